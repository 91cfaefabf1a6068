"""A cache of small pages for replays of traces: real tiers, a pool, and bytes that are made from the whole prefix that
a page ends, so that every page that is loaded can be compared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from traces import Request

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.cache_parts import plan_of
from kvtransfer.commands import Scope
from kvtransfer.directory import Directory
from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.mover import Mover
from kvtransfer.pool import KVPool
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace

_P = ParamSpec("_P")
_R = TypeVar("_R")

LAYERS, ROW_BYTES = 2, 48  # of a page, in each layer
POISON = 0xEE  # in device pages before they are loaded
LIMIT_S = 60.0  # nothing here takes as long

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Setting:
    """One replay: capacities in pages (0: no disk), the eviction policy of both tiers."""

    page_size: int
    host_pages: int
    disk_pages: int
    policy: str


@dataclass(frozen=True)
class Result:
    """What a replay came to.

    hit_tokens      by tier, as matched
    loaded_pages    that reached the device, each compared; ``wrong_pages`` of them differed
    short_loads     loads that brought less than was matched (a host tier smaller than a request)
    moved_bytes     of payload: load, store; of records: disk_read, disk_write
    evicted_pages   by tier
    directory_s     of all its verbs, with the index; ``match_s``: of matching alone, as the caller waits for it
    """

    setting: Setting
    requests: int
    asked_tokens: int
    hit_tokens: dict[str, int]
    loaded_pages: int
    wrong_pages: int
    short_loads: int
    moved_bytes: dict[str, int]
    evicted_pages: dict[str, int]
    directory_s: float
    match_s: float
    wall_s: float

    @property
    def host_tokens(self) -> int:
        """Capacity of the host tier."""
        return self.setting.host_pages * self.setting.page_size

    def rate(self, tier: str | None = None) -> float:
        """Share of the tokens asked for that one tier had, or any."""
        hits = sum(self.hit_tokens.values()) if tier is None else self.hit_tokens.get(tier, 0)
        return hits / self.asked_tokens if self.asked_tokens else 0.0


class TimedDirectory(Directory):
    """Adds up the time of its verbs: the calling threads' CPU, waits for its mutex left out."""

    spent_s = 0.0

    def _working(self, work: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return super()._working(self._timed, work, *args, **kwargs)

    def _timed(self, work: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        outermost, started = self._depth == 1, time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            if outermost:
                self.spent_s += time.thread_time() - started


@dataclass
class Moved(Observer):
    """Bytes of transfers, by direction."""

    nbytes: Counter[str] = field(default_factory=Counter)
    _directions: dict[int, str] = field(default_factory=dict)

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        self._directions[transfer] = direction

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        self.nbytes[self._directions.pop(transfer)] += total_bytes if ok else 0


def page_contents(tokens: NDArray[np.int32], page_size: int) -> Bytes:
    """[pages, layers * bytes of a row]: of each page bytes that depend on every token from the first to its last."""
    size = 4 * page_size
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    seeds, seed = [], b""
    for at in range(0, len(data) - size + 1, size):
        seed = xxhash.xxh3_128_digest(seed + data[at : at + size])
        seeds.append(seed)
    words = np.frombuffer(b"".join(seeds), dtype=np.uint8).reshape(-1, 16)
    wide = np.tile(words, LAYERS * ROW_BYTES // 16)
    return np.bitwise_xor(wide, np.arange(wide.shape[1], dtype=np.uint8))


class Rig:
    """A cache whose clock is the trace's. Close it."""

    def __init__(self, setting: Setting, most_pages: int, folder: Path, device: torch.device) -> None:
        self.setting, self.now = setting, 0.0
        row = Component("state", 1, ROW_BYTES, per_page=True)
        spec = KVSpec.uniform(LAYERS, setting.page_size, (row,))
        self.scope = Scope(Namespace.of(spec, model="a replay", kv_dtype="uint8").digest(), b"")
        self.moved = Moved()
        with ExitStack() as opened:
            self.pool = KVPool.allocate("transformers", spec=spec, num_pages=most_pages, device=device)
            self._rows = [self.pool.view(layer, "state", torch.uint8)[:, 0, 0] for layer in range(LAYERS)]
            host = HostTier(spec, capacity_pages=setting.host_pages, device=device)
            opened.callback(host.close)
            engine = TransferEngine(self.pool, host, observer=self.moved)
            opened.callback(engine.close)
            self.tiers: dict[str, Tier] = {}
            if setting.disk_pages:
                disk = DiskTier(folder, spec, namespace=self.scope.namespace, capacity_pages=setting.disk_pages)
                opened.callback(disk.close)
                self.tiers["disk"] = disk
            mover = Mover(engine, self.tiers)
            opened.callback(mover.close)
            plans = [TierPlan("host", capacity_pages=setting.host_pages, evict=setting.policy)]
            plans += [plan_of(name, f, evict=setting.policy) for name, f in mover.facts().tiers.items()]
            # Ranking all tails is dear: a policy that does it frees 2 % at once.
            extra = 0.02 if setting.policy == "path_score" else 0.0
            self.directory = TimedDirectory(setting.page_size, plans, clock=lambda: self.now, evict_extra=extra)
            self.cache = TieredCache(self.directory, mover, scope=self.scope, tick_s=None)
            opened.callback(self.cache.close, drain=False)
            self._opened = opened.pop_all()

    def write(self, pages: NDArray[np.int64], contents: Bytes) -> None:
        """Device pages as a forward would leave them."""
        for layer, rows in enumerate(self._rows):
            part = np.ascontiguousarray(contents[:, layer * ROW_BYTES : (layer + 1) * ROW_BYTES])
            rows[torch.from_numpy(pages).to(rows.device)] = torch.from_numpy(part).to(rows.device)

    def read(self, pages: NDArray[np.int64]) -> Bytes:
        at = torch.from_numpy(pages).to(self._rows[0].device)
        return np.concatenate([rows[at].cpu().numpy() for rows in self._rows], axis=1)

    def settle(self) -> None:
        """Until nothing is under way, so that the next request finds all that this one left."""
        until = time.monotonic() + LIMIT_S
        while not self.directory.idle:
            if time.monotonic() > until:
                raise TransferError(f"expected commands to end within {LIMIT_S:g} s: {self.directory.figures()}")
            time.sleep(1e-4)

    def close(self) -> None:
        """Everything, the cache first."""
        self._opened.close()


def replay(
    requests: Sequence[Request],
    setting: Setting,
    folder: Path,
    device: torch.device,
    step: Callable[[str], None] = lambda text: None,
    each: int = 100,
) -> Result:
    """Each request in turn: match, load and compare, compute the rest, store all. ``step`` is called every ``each``."""
    size = setting.page_size
    most = 1 + max(request.input_tokens for request in requests) // size
    loaded = wrong = short = 0
    match_s, started = 0.0, time.perf_counter()
    rig = Rig(setting, most, folder, device)
    try:
        for number, request in enumerate(requests):
            if number % each == 0:
                step(f"{setting.policy}, host of {setting.host_pages * size:,} tokens, request {number:,}")
            rig.now = request.at_s
            tokens = request.tokens()
            contents = page_contents(tokens, size)
            pages = np.arange(len(contents))
            begun = time.perf_counter()
            hit = rig.cache.match(tokens)
            match_s += time.perf_counter() - begun
            usable = 0
            with hit:
                if hit.pages:
                    rig.write(pages[: hit.pages], np.full((hit.pages, LAYERS * ROW_BYTES), POISON, dtype=np.uint8))
                    load = rig.cache.load(hit, pages[: hit.pages])
                    load.result(LIMIT_S)
                    usable = load.usable_pages
            short += usable < hit.pages
            loaded += usable
            wrong += int((rig.read(pages[:usable]) != contents[:usable]).any(axis=1).sum())
            rig.write(pages[usable:], contents[usable:])
            rig.cache.store(tokens, pages).result(LIMIT_S)
            rig.settle()
        figures = rig.directory.figures()
        if figures.locks or sum(figures.hit_tokens_by_tier.values()) != figures.hit_tokens:
            raise TransferError(f"expected books that close, got {figures}")
        moved: dict[str, Any] = dict(rig.moved.nbytes)
        for name, tier in rig.tiers.items():
            counters = tier.stats().counters
            moved |= {f"{name}_read": counters["bytes_read"], f"{name}_write": counters["bytes_written"]}
        return Result(
            setting=setting,
            requests=len(requests),
            asked_tokens=figures.asked_tokens,
            hit_tokens=dict(figures.hit_tokens_by_tier),
            loaded_pages=loaded,
            wrong_pages=wrong,
            short_loads=short,
            moved_bytes=moved,
            evicted_pages={name: tier.counters.get("evicted", 0) for name, tier in figures.tiers.items()},
            directory_s=rig.directory.spent_s,
            match_s=match_s,
            wall_s=time.perf_counter() - started,
        )
    finally:
        rig.close()
