"""Rigs: a pool and a slab of random bytes with an engine between them, and the transfers that benchmarks time.

A `Work` is what is timed: it begins a transfer and hands back how to wait for its end. Whether every byte arrived is
found out afterwards (`Work.exact`): new random bytes, one more transfer, and a comparison by plain torch, of the pages
that were to change and of those that were not.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.engine import DEFAULT_STAGING_BYTES, TransferEngine
from kvtransfer.groups import Groups, layer_groups
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.meter import SPIN_CYCLES_PER_US
from kvtransfer.pool import KVPool
from kvtransfer.predict import Terrain
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier

Ids = NDArray[np.int64]
Wait = Callable[[], float]
"""Holds the caller until what was begun has ended; its seconds, by the GPU's clock where there is one."""

LONGEST_RUN = 16  # the pool holds whole runs of so many pages
CPU_RING_BYTES = 24 << 20
HELD_US = 2000  # both directions start together, once the first chunks of each are in the queues
LIMIT_S = 120.0  # of a transfer: some baselines take seconds


@dataclass(frozen=True)
class Shape:
    """Layers of equal components (name, heads, bytes of one head)."""

    name: str
    layers: int
    components: tuple[tuple[str, int, int], ...]

    def spec(self, page_size: int) -> KVSpec:
        return KVSpec.uniform(self.layers, page_size, (Component(*c) for c in self.components))


SHAPES = {
    s.name: s
    for s in (
        Shape("llama8b", 32, (("k", 8, 256), ("v", 8, 256))),  # 8 KV heads of 128 in bf16
        Shape("onehead", 32, (("k", 1, 256), ("v", 1, 256))),  # one of them: tensor parallelism over 8 GPUs
        Shape("mla576", 61, (("latent", 1, 576),)),  # 576 one-byte elements
        Shape("mla656", 61, (("latent", 1, 656),)),  # fp8 with its scales
        Shape("mla1152", 61, (("latent", 1, 1152),)),  # 576 in bf16
    )
}

ORDERS = {"random": 1, "runs of 4": 4, "runs of 16": 16, "contiguous": 0}
"""Pages that follow each other on both sides; 0: all of them."""


def grouping(mode: str, layers: int) -> Groups | None:
    """Layer groups of a mode; None: bulk ("bulk") or as the engine chooses ("layerwise")."""
    if mode == "groups of 4":
        return tuple(layer_groups(layers, 4, up=False, down=False))
    if mode == "ramped":
        return tuple(layer_groups(layers, 4))
    return None


MODES = ("bulk", "layerwise", "groups of 4", "ramped")


def ordered_ids(total: int, run: int, rng: np.random.Generator) -> Ids:
    """0 to ``total - 1`` in runs of ``run`` (which divides ``total``), the runs in random order."""
    starts = rng.permutation(total // run) * run
    ids: Ids = (starts[:, None] + np.arange(run)).reshape(-1).astype(np.int64)
    return ids


class Rig:
    """``total_bytes`` of pages in a pool of twice as many, a slab of as many slots, and an engine.

    slots, pages              what a load or a store moves, in the order that `set_order` chose
    other_slots, other_pages  as many more: what a store moves while a load runs, and what must stay as it is otherwise
    stream                    the one declared stream of the pool; None on the CPU
    """

    def __init__(
        self,
        shape: Shape,
        page_size: int,
        total_bytes: int,
        device: torch.device,
        *,
        layout: str = "sglang.layer_first",
        seed: int = 0,
        script: bool = False,
    ) -> None:
        self.shape, self.device = shape, device
        self.spec = shape.spec(page_size)
        self.count = max(1, total_bytes // self.spec.page_bytes)
        self.total_bytes = self.count * self.spec.page_bytes
        whole = max(run for run in (LONGEST_RUN, 4, 1) if run <= self.count)
        self._half = -(-self.count // whole) * whole
        self._rng = np.random.default_rng(seed)
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.name = f"bench {shape.name} {page_size} {layout}"
        self.pool = KVPool.allocate(
            layout,
            spec=self.spec,
            num_pages=2 * self._half,
            device=device,
            streams=None if self.stream is None else [self.stream],
            name=self.name,
        )
        self.host = HostTier(self.spec, capacity_pages=2 * self._half, device=device)
        try:
            ring = DEFAULT_STAGING_BYTES if on_gpu else StagingRing(device, CPU_RING_BYTES)
            self.engine = TransferEngine(self.pool, self.host, staging_bytes=ring, script=script, deadline_s=LIMIT_S)
        except BaseException:
            self.host.close()
            raise
        self._terrain = self.engine._terrain["load"]
        self._fixed: dict[Groups, Terrain] = {(): self._terrain}
        self.set_order("random")
        self.scramble()
        everything = np.arange(2 * self._half)
        self.engine.store(everything, everything).result(LIMIT_S)  # random bytes, with digests that loads compare

    def set_order(self, order: str | int) -> None:
        """Choose new ids: a name of `ORDERS`, or the length of runs (rounded down to one that divides)."""
        run = ORDERS[order] if isinstance(order, str) else order
        run = self._half if run == 0 else math.gcd(self._half, min(run, self._half))
        sides = [ordered_ids(2 * self._half, run, self._rng) for _ in range(2)]
        (self.slots, self.other_slots), (self.pages, self.other_pages) = (
            (ids[: self.count], ids[self._half : self._half + self.count]) for ids in sides
        )

    def use_groups(self, groups: Groups | None) -> None:
        """Layer-wise loads travel in ``groups`` from now on; None: as the engine chooses."""
        key = groups or ()
        if key not in self._fixed:
            self._fixed[key] = replace(self._terrain, fixed_groups=key)
        self.engine._terrain["load"] = self._fixed[key]

    def scramble(self) -> None:
        """New random bytes in the whole pool, complete on return."""
        for buffer in self.pool.buffers:
            buffer.random_()
        self.synchronize()

    def page_rows(self, pages: Ids) -> torch.Tensor:
        """Pages in page-first order, uint8 [n, page_bytes] on the pool's device: a copy by plain torch."""
        target = Layout.page_first(self.spec, len(pages))
        geometry = coalesce(self.spec, Side.of(self.pool.layout), Side.of(target), Box.whole(self.spec), order="dst")
        out = torch.empty(target.buffer_bytes[0], dtype=torch.uint8, device=self.device)
        here = torch.arange(len(pages), device=self.device)
        relayout_reference(geometry, self.pool.buffers, [out], torch.from_numpy(pages).to(self.device), here)
        return out.view(len(pages), -1)

    def slot_rows(self, slots: Ids) -> torch.Tensor:
        """Payloads of slots without padding, uint8 [n, page_bytes] on the pool's device: a copy."""
        rows = self.host.payload.view(-1, self.host.slot_bytes)
        if self.device.type == "cuda":
            rows = rows.to(self.device)  # all of them: the copy engine is quicker than a gather on the CPU
        return rows[torch.from_numpy(slots).to(self.device)][:, : self.spec.page_bytes]

    def holds(self, pages: Ids, slots: Ids) -> bool:
        """Whether pages and slots hold the same bytes, the i-th and the i-th."""
        return torch.equal(self.page_rows(pages), self.slot_rows(slots))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.engine.close()
        self.host.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Work(Protocol):
    """What is timed. ``direction`` names its limit: "load", "store", "both", or "device"."""

    name: str
    path: str
    direction: str
    total_bytes: int
    engine_thread: str  # name of the thread that submits besides the caller; "" for none

    def begin(self, *, alone: bool = True) -> Wait:
        """Start one transfer. ``alone``: nothing is queued behind it or before it."""
        ...

    def exact(self) -> bool:
        """Whether one more transfer, of new random bytes, moves all of them and nothing else."""
        ...


class EngineWork:
    """A transfer by the engine of ``rig`` in its present order."""

    def __init__(self, rig: Rig, direction: str, *, path: str = "auto", mode: str = "bulk", name: str = "") -> None:
        self.rig, self.direction, self.mode = rig, direction, mode
        self.name = name or f"{direction} {mode}"
        self._path = None if path == "auto" else path
        self.layerwise = mode != "bulk"
        self._groups = grouping(mode, rig.shape.layers)
        self.engine_thread = f"kvtransfer-{rig.name}"
        self.total_bytes = rig.total_bytes * (2 if direction == "both" else 1)
        rig.use_groups(self._groups)
        ways = ("load", "store") if direction == "both" else (direction,)
        self.plans = [
            rig.engine.plan(way, slots, pages, layerwise=self.layerwise, path=self._path)
            for way, slots, pages in zip(ways, self._slots(), self._pages(), strict=False)
        ]
        used = " + ".join(dict.fromkeys(plan.path for plan in self.plans))
        self.path = used if path != "auto" else f"auto: {used}"

    def _slots(self) -> tuple[Ids, ...]:
        return self.rig.slots, self.rig.other_slots

    def _pages(self) -> tuple[Ids, ...]:
        return self.rig.pages, self.rig.other_pages

    def begin(self, *, alone: bool = True) -> Wait:
        self.rig.use_groups(self._groups)
        if self.direction == "both":
            return self._both(alone)
        handle = self._load() if self.direction == "load" else self._store(self.rig.pages, self.rig.slots)
        return lambda: handle.result(LIMIT_S).seconds

    def _load(self) -> TransferHandle:
        rig = self.rig
        return rig.engine.load(rig.slots, rig.pages, layerwise=self.layerwise, path=self._path)

    def _store(self, pages: Ids, slots: Ids) -> TransferHandle:
        handle = self.rig.engine.store(pages, slots, layerwise=self.layerwise, path=self._path)
        if self.layerwise:  # a forward that has computed everything already
            for layer in range(handle.num_layers):
                handle.layer_written(layer, self.rig.stream)
        return handle

    def _both(self, alone: bool) -> Wait:
        """A load and a store of other pages at once: from where both may start to the end of the later one."""
        rig, stream = self.rig, self.rig.stream
        if stream is None:
            started = time.perf_counter()
            handles = (self._load(), self._store(rig.other_pages, rig.other_slots))

            def wait() -> float:
                for handle in handles:
                    handle.result(LIMIT_S)
                return time.perf_counter() - started

            return wait
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            if alone:
                torch.cuda._sleep(HELD_US * SPIN_CYCLES_PER_US)
            begin.record()
        handles = (self._load(), self._store(rig.other_pages, rig.other_slots))

        def wait_on_gpu() -> float:
            for handle in handles:
                handle.wait_all(stream)
            end.record(stream)
            for handle in handles:
                handle.result(LIMIT_S)
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait_on_gpu

    def exact(self) -> bool:
        rig = self.rig
        return moved_exactly(rig, self.direction, lambda: self.begin()())


def moved_exactly(rig: Rig, direction: str, transfer: Callable[[], object]) -> bool:
    """Fill the pool anew, run ``transfer`` (of the rig's own ids), and compare: what was to move, and what was not."""
    rig.scramble()
    if direction == "both":
        transfer()
        return rig.holds(rig.pages, rig.slots) and rig.holds(rig.other_pages, rig.other_slots)
    rows: Callable[[], torch.Tensor]
    if direction == "load":
        rows = lambda: rig.page_rows(rig.other_pages)  # noqa: E731
    else:
        rows = lambda: rig.slot_rows(rig.other_slots)  # noqa: E731
    others = rows()
    transfer()
    return rig.holds(rig.pages, rig.slots) and torch.equal(others, rows())


def compile_ahead(jobs: Sequence[tuple[Shape, int, str]], device: torch.device, processes: int) -> None:
    """Compile the kernels of engines for (shape, page size, layout) in several processes, into Triton's cache on disk:
    one after the other they take longer than what is measured. Does nothing on the CPU or for one job."""
    if device.type != "cuda" or processes < 2 or len(jobs) < 2:
        return
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_compile, [(*job, str(device)) for job in jobs]):
            pass


def _compile(job: tuple[Shape, int, str, str]) -> None:
    shape, page_size, layout, device = job
    with Rig(shape, page_size, 1, torch.device(device), layout=layout):
        pass
