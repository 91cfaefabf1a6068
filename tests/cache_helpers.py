"""A cache over real memory and real tiers, for tests: device pages in a file that both processes map, guards around
every buffer, a host tier, lower tiers that faults can be put into. The same tests run with both halves of the cache in
one process and with the mover in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from directory_helpers import check_directory
from engine_helpers import GUARD, LIMIT_S, Bytes, Ids, page_bytes, put_pages, random_bytes, until

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.cache_handles import CacheLoad
from kvtransfer.cache_parts import plan_of
from kvtransfer.commands import Scope
from kvtransfer.directory import Directory
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.mover import Mover
from kvtransfer.policy import Prefetch
from kvtransfer.pool import KVPool
from kvtransfer.remote_mover import start_mover
from kvtransfer.tier_build import TierMaker
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.batch import Verb
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, token_bytes
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.record import decode

Form = Literal["one process", "two processes"]
FORMS: tuple[Form, ...] = ("one process", "two processes")
SMALL = KVSpec.attention(
    num_layers=3, page_size=3, kv_heads=2, head_dim=5, itemsize=1, v_head_dim=3
)  # 144 bytes a page
ODD = KVSpec.attention(num_layers=2, page_size=5, kv_heads=3, head_dim=67, itemsize=2)
SPACE = Scope(Namespace.of(SMALL, model="a model", kv_dtype="uint8").digest(), b"a salt")
MEMORY: dict[str, Any] = {"kind": "memory", "cache_gb": 0.01}
RECORD_BYTES = 8192  # of `SMALL`, in a tier


@dataclass(frozen=True)
class Recipe:
    """What a rig is made of. ``lower``: options of lower tiers by name, fastest first, as a configuration has them."""

    folder: Path
    spec: KVSpec = SMALL
    layout: str = "sglang.layer_first"
    pages: int = 64
    slots: int = 32
    lower: dict[str, dict[str, Any]] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    mover: dict[str, Any] = field(default_factory=dict)
    space: Scope = SPACE

    @property
    def declared(self) -> Layout:
        return Layout.named(self.layout, self.spec, self.pages)

    def files(self) -> list[tuple[Path, int]]:
        return [(self.folder / f"pool.{n}", size) for n, size in enumerate(self.declared.buffer_bytes)]


class Gate(threading.Event):
    """Counts who comes to it."""

    reached = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.reached += 1
        return super().wait(timeout)


class Parts:
    """The mover's half, in whatever process it is: its public methods are called from there or from the other one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.delays, self.gates = Delays(), list[Gate]()
        buffers = []
        for file, size in recipe.files():
            whole = torch.from_file(str(file), shared=True, size=size + 2 * GUARD, dtype=torch.uint8)
            buffers.append(whole[GUARD : GUARD + size])
        self.pool = KVPool(recipe.declared, buffers)
        self.host = HostTier(
            recipe.spec, capacity_pages=recipe.slots, pin=False, huge_pages=False, threads=1, **recipe.host
        )
        self.host.payload.copy_(torch.from_numpy(random_bytes(np.random.default_rng(), self.host.payload.numel())))
        self.engine = TransferEngine(self.pool, self.host, delays=self.delays, **recipe.engine)
        self.maker = TierMaker(recipe.spec, recipe.space.namespace)
        self.tiers = {name: FaultyTier(self.maker(name, options)) for name, options in recipe.lower.items()}
        self.mover = Mover(self.engine, self.tiers, make_tier=self.make_tier, **recipe.mover)

    def make_tier(self, name: str, options: dict[str, Any]) -> Tier:
        tier = self.tiers[name] = FaultyTier(self.maker(name, options))
        return tier

    def close(self) -> None:
        self.let_go()
        for tier in self.tiers.values():
            tier.release()
        self.mover.close(drain=False, timeout_s=LIMIT_S)
        self.engine.close(drain=False, timeout_s=LIMIT_S)
        for tier in self.tiers.values():
            tier.close(drain=False, timeout_s=LIMIT_S)
        self.host.close(wait_s=LIMIT_S)

    # --- what tests do to it

    def fault(self, tier: str, kind: Any, verb: Verb | None = None, **more: Any) -> None:
        """A fault from the next call of ``verb`` on, or after so many more (``later``)."""
        later = more.pop("later", 0)
        self.tiers[tier].add(Fault(kind, verb, call=self.tiers[tier].calls(verb) + later, **more))

    def clear_faults(self, tier: str) -> None:
        """No fault strikes any more, and what is stalled goes on."""
        self.tiers[tier]._faults.clear()
        self.tiers[tier].release()

    def close_tier(self, tier: str) -> None:
        """Under the mover, which is not told."""
        self.tiers[tier].close(drain=False, timeout_s=LIMIT_S)

    def release(self, tier: str) -> None:
        self.tiers[tier].release()

    def revive(self, tier: str) -> None:
        self.tiers[tier].revive()

    def calls(self, tier: str, verb: Verb | None = None) -> int:
        return self.tiers[tier].calls(verb)

    def struck(self, tier: str) -> int:
        return self.tiers[tier].faults_struck

    def counters(self, tier: str) -> dict[str, int]:
        return dict(self.tiers[tier].stats().counters)

    def hold(self, lane: str = "") -> None:
        """Shut the engine's lanes whose name begins so, until `let_go`."""
        gate = Gate()
        self.gates.append(gate)
        self.delays.set(lane, gate)

    def held(self) -> int:
        """Steps that have come to a gate since the last `let_go`."""
        return sum(gate.reached for gate in self.gates)

    def let_go(self) -> None:
        self.delays.clear("copy_in")
        self.delays.clear("copy_out")
        self.delays.clear("")
        gates, self.gates = self.gates, []
        for gate in gates:
            gate.set()

    def spoil_slots(self, times: int = 1) -> list[int]:
        """Flip a bit in every slot that holds a page. Which."""
        rows = self.host.payload.numpy().reshape(-1, self.host.slot_bytes)
        stored = np.flatnonzero(
            ~(self.host.digests == np.uint64(2**64 - 1)).all(axis=1) & self.host.digests.any(axis=1)
        )
        rows[stored, 7] ^= 1
        return [int(slot) for slot in stored]

    def change_tokens(self, tier: str, page: int, tokens: list[int]) -> int:
        """In the memory tier, a record of this page with one other token, whole in every other respect. How many."""
        size, changed = self.recipe.spec.page_size, 0
        asked = bytes(token_bytes(tokens[page * size : (page + 1) * size]))
        inner = self.tiers[tier].inner
        assert isinstance(inner, MemoryTier)
        for record in inner._pages.values():
            trailer = record[-self.host.trailer_bytes :]
            header = decode(trailer)
            if header.tokens == asked:
                replace(header, tokens=bytes([asked[0] ^ 1]) + asked[1:]).encode_into(trailer)
                changed += 1
        return changed

    def drop_digests(self, tier: str) -> int:
        """In the memory tier, every record as a writer without digests leaves it. How many."""
        inner = self.tiers[tier].inner
        assert isinstance(inner, MemoryTier)
        for record in inner._pages.values():
            trailer = record[-self.host.trailer_bytes :]
            replace(decode(trailer), layer_digests=None).encode_into(trailer)
        return len(inner._pages)

    def wait_layer(self, number: int, layer: int) -> None:
        self.mover.load(number, timeout_s=LIMIT_S).wait_layer(layer)

    def busy(self) -> tuple[int, int]:
        """Pages and slots under a transfer."""
        pages, slots = np.arange(self.pool.num_pages), np.arange(self.host.num_slots)
        return int(self.pool.ledger.busy(pages).sum()), int(self.host.ledger.busy(slots).sum())

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())


class Rig:
    """A cache, and what its test looks at. ``do("method", ...)`` calls a method of `Parts`, wherever that is."""

    def __init__(
        self,
        form: Form,
        folder: Path,
        *,
        host_pages: int | None = None,
        plans: dict[str, dict[str, Any]] | None = None,
        host_plan: dict[str, Any] | None = None,
        device: bool = False,
        directory: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        **recipe: Any,
    ) -> None:
        self.form = form
        self.rng = np.random.default_rng()
        self.recipe = Recipe(folder, **recipe)
        if self.recipe.spec is not SMALL and "space" not in recipe:
            space = Namespace.of(self.recipe.spec, model="a model", kv_dtype="uint8").digest()
            self.recipe = replace(self.recipe, space=Scope(space, b"a salt"))
        self.spec, self.page_size = self.recipe.spec, self.recipe.spec.page_size
        self.whole: list[Bytes] = []
        for file, size in self.recipe.files():
            file.write_bytes(random_bytes(self.rng, size + 2 * GUARD).tobytes())
            self.whole.append(np.memmap(file, dtype=np.uint8, mode="r+"))
        self.guards = [w.copy() for w in self.whole]
        self.buffers = [w[GUARD:-GUARD] for w in self.whole]
        self.layout = self.recipe.declared
        self.free = list(self.rng.permutation(self.recipe.pages).tolist())
        self.mover: Any = self._start()
        facts = self.mover.facts()
        slots = facts.host_pages if host_pages is None else host_pages
        tiers = [TierPlan("device", "device")] if device else []
        tiers.append(TierPlan("host", "slots", slots, **(host_plan or {})))
        for name, tier in facts.tiers.items():
            tiers.append(plan_of(name, tier, **(plans or {}).get(name, {})))
        self.directory = Directory(
            self.page_size, tiers, **{"prefetch": Prefetch(1, "wait_complete"), **(directory or {})}
        )
        self.cache = TieredCache(
            self.directory,
            self.mover,
            scope=self.recipe.space,
            **{"deadline_s": LIMIT_S, "tick_s": None, **(cache or {})},
        )

    def _start(self) -> Any:
        self.parts: Parts | None = None
        if self.form == "one process":
            self.parts = Parts(self.recipe)
            return self.parts.mover
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "cache_helpers", "kvtransfer.tiers.disk"])
        self.control, theirs = context.Pipe()
        remote = start_mover(make_parts, self.recipe, theirs, context=context)
        theirs.close()
        return remote

    def do(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """A method of `Parts`, there."""
        if self.parts is not None:
            return getattr(self.parts, verb)(*arguments, **named)
        self.control.send((verb, arguments, named))
        assert self.control.poll(LIMIT_S), f"{verb} had no answer"
        good, value = self.control.recv()
        if not good:
            raise value
        return value

    def wait_layer(self, load: CacheLoad, layer: int) -> None:
        """Where the forward is: in the mover's process."""
        if self.form == "one process":
            load.wait_layer(layer)
        else:
            self.do("wait_layer", load.number, layer)

    # --- pages

    def tokens(self, pages: int, after: Sequence[int] = (), rest: int = 1) -> list[int]:
        """``after``, and ``pages`` pages of new tokens behind it, and a rest that is no page."""
        start = len(after) // self.page_size * self.page_size
        fresh = self.rng.integers(0, 2**31, pages * self.page_size + min(rest, self.page_size - 1))
        return [*after[:start], *fresh.tolist()]

    def take(self, count: int) -> list[int]:
        """Device pages of nobody."""
        out, self.free = self.free[:count], self.free[count:]
        assert len(out) == count, "the rig has no device pages left"
        return out

    def give(self, pages: Sequence[int]) -> None:
        self.cache.require_free(pages)
        self.free += list(pages)

    def write(self, pages: Sequence[int]) -> Bytes:
        """New bytes in device pages, as a forward would. Returns them."""
        rows = random_bytes(self.rng, len(pages), self.spec.page_bytes)
        self.put(pages, rows)
        return rows

    def put(self, pages: Sequence[int], rows: Bytes) -> None:
        put_pages(self.layout, self.buffers, np.asarray(pages, dtype=np.int64), rows)

    def read(self, pages: Sequence[int] | Ids) -> Bytes:
        return page_bytes(self.layout, self.buffers, np.asarray(pages, dtype=np.int64))

    def stored(self, tokens: Sequence[int], **more: Any) -> Bytes:
        """Store new bytes for all pages of ``tokens``; wait until they are there, and on their way nowhere."""
        pages = self.take(len(tokens) // self.page_size)
        rows = self.write(pages)
        self.cache.store(tokens, pages, **more).result(LIMIT_S).require()
        self.give(pages)
        self.settle()
        return rows

    def loaded(self, tokens: Sequence[int], **more: Any) -> Bytes:
        """Match and load; the bytes that came, and nothing else was touched."""
        with self.cache.match(tokens, **more) as hit:
            pages = self.take(hit.pages)
            before = self.image()
            load = self.cache.load(hit, pages)
        load.result(LIMIT_S).require()
        assert load.verdict(LIMIT_S).verified
        rows = self.read(pages)
        self.check_untouched(before, pages)
        self.give(pages)
        return rows

    def image(self) -> list[Bytes]:
        return [w.copy() for w in self.whole]

    def check_untouched(self, before: list[Bytes], but: Sequence[int]) -> None:
        """No byte of the device has changed but in these pages."""
        now = self.image()
        inner = [w[GUARD:-GUARD] for w in now]
        pages = np.asarray(but, dtype=np.int64)
        put_pages(self.layout, inner, pages, page_bytes(self.layout, [w[GUARD:-GUARD] for w in before], pages))
        for old, new in zip(before, now, strict=True):
            assert np.array_equal(old, new), f"bytes {np.flatnonzero(old != new)[:8]} were written"

    # --- the whole

    def at_rest(self) -> bool:
        """Whether nothing is under way, in the directory's books and in the cache's, which end behind those."""
        cache = self.cache
        return self.directory.idle and not (cache._active or cache._sent or cache._fetching)

    def settle(self) -> None:
        """Until nothing is under way."""
        until(self.at_rest, "nothing under way")

    def release(self, tier: str) -> None:
        """Let stalled calls of a tier go on, until nothing is under way."""

        def idle() -> bool:
            self.do("release", tier)
            return self.at_rest()

        until(idle, "nothing under way")

    def settle_all(self) -> None:
        """`settle`, with every gate and every stalled tier let go."""

        def idle() -> bool:
            self.do("let_go")
            for name in self.recipe.lower:
                self.do("release", name)
            return self.at_rest()

        until(idle, "nothing under way")

    def end_pins(self) -> None:
        def ended() -> bool:
            self.cache.tick()
            return not self.directory._pinned

        until(ended, "pins end")

    def check_books(self) -> None:
        """Books agree, guards are as they were."""
        check_directory(self.directory)
        for old, new in zip(self.guards, self.whole, strict=True):
            for part in (slice(GUARD), slice(-GUARD, None)):
                assert np.array_equal(old[part], new[part]), "a guard was written"

    def check(self) -> None:
        """And no lock is left, nor anything under a transfer."""
        self.settle()
        self.check_books()
        assert self.directory.index.locks == 0
        assert all(not node.locks for node in self.directory.index.nodes())
        assert self.do("busy") == (0, 0)
        assert not self.cache._active and not self.cache._sent and not self.cache._fetching

    def close(self) -> None:
        try:
            self.do("let_go")
            for name in self.recipe.lower:
                self.do("release", name)
        except (OSError, EOFError):
            pass  # its process was ended by the test
        try:
            self.cache.close(drain=False, timeout_s=LIMIT_S)
        finally:
            self._end()

    def _end(self) -> None:
        if self.parts is not None:
            self.parts.close()
        else:
            self.control.close()


@contextmanager
def make_parts(recipe: Recipe, control: Connection) -> Iterator[Mover]:
    """In the mover's process: parts that do what comes over ``control``."""
    torch.set_num_threads(1)
    parts = Parts(recipe)

    def obey() -> None:
        while True:
            try:
                verb, arguments, named = control.recv()
            except (EOFError, OSError):
                return
            try:
                control.send((True, getattr(parts, verb)(*arguments, **named)))
            except Exception as error:
                control.send((False, error))

    threading.Thread(target=obey, daemon=True).start()
    try:
        yield parts.mover
    finally:
        parts.close()


def hit_pages(rig: Rig, tokens: Sequence[int], **more: Any) -> int:
    with rig.cache.match(tokens, **more) as hit:
        return hit.pages


class MakeRig(Protocol):
    def __call__(self, **more: Any) -> Rig: ...


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    chosen: Form = request.param
    return chosen


@pytest.fixture
def make(form: Form, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs of this form; checks and closes each at the end."""
    rigs: list[Rig] = []

    def make_rig(**more: Any) -> Rig:
        folder = tmp_path / f"rig{len(rigs)}"
        folder.mkdir()
        rigs.append(Rig(form, folder, **more))
        return rigs[-1]

    try:
        yield make_rig
        for rig in rigs:
            if not rig.cache._closed:
                rig.do("let_go")
                rig.check()
    finally:
        for rig in rigs:
            rig.close()


def disk(folder: Path, pages: int = 500) -> dict[str, Any]:
    return {"kind": "disk", "paths": [str(folder)], "pages": pages, "disk_share": 1.0}
