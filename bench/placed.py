"""What lies in a slab after churn, moved for real: in turn with one large copy, every byte compared.

Meant for a GPU. The CPU backend runs the same code, for its tests; its shares are of a memcpy.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import showing
import torch
from churn import PLACERS, WORKLOADS, Churn, Ids, run_lengths

from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

MOVED_BYTES = 1 << 30
LIMIT_S = 60.0
BAR = 0.95  # towards the host, placed by our allocator


@dataclass(frozen=True)
class Shape:
    """Layers of equal components (name, heads, bytes of one head), and tokens a page."""

    name: str
    layers: int
    components: tuple[tuple[str, int, int], ...]
    page_size: int

    @property
    def spec(self) -> KVSpec:
        return KVSpec.uniform(self.layers, self.page_size, (Component(*c) for c in self.components))


_MLA = {"mla576": 576, "mla656": 656, "mla1152": 1152}
SHAPES = (
    Shape("llama8b", 32, (("k", 8, 256), ("v", 8, 256)), 1),
    *(Shape(name, 61, (("latent", 1, row),), size) for name, row in _MLA.items() for size in (16, 64)),
    *(Shape("onehead", 32, (("k", 1, 256), ("v", 1, 256)), size) for size in (16, 64)),
)


@dataclass(frozen=True)
class Moved:
    """One direction of what one placer left: medians of pairs (large copy, transfer). ``bar`` is asked of our own."""

    case: str
    placer: str
    direction: str
    path: str
    total_bytes: int
    pieces: int
    mean_run: float
    gbps: float
    peak_gbps: float
    share: float
    low: float
    high: float
    bar: float | None
    exact: bool


@dataclass(frozen=True)
class Job:
    """One churn: what it needs to know, in a process of its own."""

    shape: Shape
    placer: str
    num_slots: int
    stores: int
    pages: int
    seed: int


def last_slots(job: Job) -> Ids:
    """Churn (tails leave), then the slots of the last stores, store by store: ``pages`` of them, all still held."""
    placer = PLACERS[job.placer](job.num_slots)
    spec = job.shape.spec
    churn = Churn(placer, job.num_slots, job.shape.page_size, spec.page_bytes, WORKLOADS["tails"], job.seed)
    coming = churn.stores()
    for _ in range(job.stores):
        next(coming)
    parts: list[Ids] = []
    while sum(p.size for p in parts) < job.pages:
        parts.append(next(coming))
    return np.concatenate(parts)[: job.pages]


class Rig:
    """A slab of ``num_slots`` pages of a shape, and a pool of twice what is moved."""

    def __init__(self, shape: Shape, num_slots: int, moved_bytes: int, device: torch.device, seed: int) -> None:
        spec = shape.spec
        self.shape, self.spec, self.device = shape, spec, device
        self.on_gpu = device.type == "cuda"
        self.count = moved_bytes // spec.page_bytes
        self.total_bytes = self.count * spec.page_bytes
        self.host = HostTier(spec, capacity_pages=num_slots, device=device)
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        streams = None if self.stream is None else [self.stream]
        self.pool = KVPool.allocate(
            "sglang.layer_first", spec=spec, num_pages=2 * self.count, device=device, streams=streams
        )
        self.engine = TransferEngine(self.pool, self.host)
        self.pages = np.random.default_rng(seed).permutation(2 * self.count)[: self.count]
        self._there = torch.empty(self.total_bytes, dtype=torch.uint8, device=device).random_()
        self._here = torch.empty(self.total_bytes, dtype=torch.uint8, pin_memory=self.on_gpu)

    def scramble(self) -> None:
        """New random bytes in the whole pool."""
        for buffer in self.pool.buffers:
            buffer.random_()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def holds(self, slots: Ids) -> bool:
        """Whether the pool's pages and ``slots`` hold the same bytes, by a copy in plain torch."""
        target = Layout.page_first(self.spec, self.count)
        geometry = coalesce(self.spec, Side.of(self.pool.layout), Side.of(target), Box.whole(self.spec), order="dst")
        out = torch.empty(target.buffer_bytes[0], dtype=torch.uint8, device=self.device)
        ids = torch.from_numpy(self.pages).to(self.device)
        relayout_reference(geometry, self.pool.buffers, [out], ids, torch.arange(self.count, device=self.device))
        rows = self.host.payload.view(-1, self.host.slot_bytes)[torch.from_numpy(slots)]
        return torch.equal(out.view(self.count, -1).cpu(), rows[:, : self.spec.page_bytes])

    def large_copy(self, direction: str) -> float:
        """Seconds of one pinned copy of as many bytes."""
        source, target = (self._here, self._there) if direction == "load" else (self._there, self._here)
        if self.stream is None:
            started = time.perf_counter()
            target.copy_(source)
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def measure(rig: Rig, slots: Ids, placer: str, direction: str, repeats: int) -> Moved:
    """Time ``repeats`` pairs, then move new random bytes once more and compare them."""
    engine, pages = rig.engine, rig.pages
    load: Callable[[], TransferHandle] = lambda: engine.load(slots, pages)  # noqa: E731
    store: Callable[[], TransferHandle] = lambda: engine.store(pages, slots)  # noqa: E731
    move = load if direction == "load" else store
    path = engine.plan(direction, slots, pages).path
    pairs = []
    for _ in range(repeats + 1):
        copied = rig.large_copy(direction)
        pairs.append((copied, move().result(LIMIT_S).seconds))
    pairs = pairs[1:]
    shares = sorted(copied / moved for copied, moved in pairs)
    rig.scramble()
    store().result(LIMIT_S)
    exact = rig.holds(slots)
    if direction == "load":
        rig.scramble()
        load().result(LIMIT_S)
        exact = exact and rig.holds(slots)
    runs = run_lengths(slots)
    return Moved(
        case=f"{rig.shape.name}, pages of {rig.shape.page_size}",
        placer=placer,
        direction=direction,
        path=path,
        total_bytes=rig.total_bytes,
        pieces=runs.size,
        mean_run=float(runs.mean()),
        gbps=rig.total_bytes / statistics.median(m for _, m in pairs) / 1e9,
        peak_gbps=rig.total_bytes / statistics.median(c for c, _ in pairs) / 1e9,
        share=statistics.median(shares),
        low=shares[0],
        high=shares[-1],
        bar=BAR if (placer, direction) == ("extents", "store") else None,
        exact=exact,
    )


def replay(
    gib: float,
    stores: int,
    seed: int,
    repeats: int,
    device: torch.device,
    *,
    shapes: Sequence[Shape] = SHAPES,
    placers: Sequence[str] = ("extents", "stack", "queue"),
    moved_bytes: int = MOVED_BYTES,
    processes: int | None = None,
) -> list[Moved]:
    """For each shape: churn in a slab of ``gib``, then store and load the last stores' pages where they lie.

    The churns run first, in ``processes`` of their own (as many as there are CPUs): they take longer than the copies.
    """
    jobs = [
        Job(s, placer, int(gib * 2**30) // s.spec.page_bytes, stores, moved_bytes // s.spec.page_bytes, seed)
        for s in shapes
        for placer in placers
    ]
    most = min(len(jobs), processes or len(os.sched_getaffinity(0)))
    if most > 1:
        with ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn")) as workers:
            places = list(workers.map(last_slots, jobs))
    else:
        places = [last_slots(job) for job in jobs]
    out: list[Moved] = []
    with showing.progress(len(jobs)) as step:
        for shape in shapes:
            mine = [(job, slots) for job, slots in zip(jobs, places, strict=True) if job.shape is shape]
            rig = Rig(shape, mine[0][0].num_slots, moved_bytes, device, seed)
            try:
                for job, slots in mine:
                    step(f"{shape.name}, pages of {shape.page_size}, {job.placer}")
                    rig.engine.store(rig.pages, slots).result(LIMIT_S)  # digests that the loads compare
                    out += [measure(rig, slots, job.placer, direction, repeats) for direction in ("store", "load")]
            finally:
                rig.close()
            del rig
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return out


def print_moved(rows: Sequence[Moved]) -> None:
    """The table."""
    columns = ["case", "placed by", "direction", "path", "pieces", "mean run", "GB/s", "large copy"]
    columns += ["share (low-high)", "bar", "exact"]
    cells = [
        [
            r.case,
            r.placer,
            r.direction,
            r.path,
            f"{r.pieces:,}",
            f"{r.mean_run:,.0f}",
            f"{r.gbps:.1f}",
            f"{r.peak_gbps:.1f}",
            f"{r.share:.1%} ({r.low:.1%}-{r.high:.1%})",
            "" if r.bar is None else f"{r.bar:.0%} {'met' if r.share >= r.bar else 'MISSED'}",
            "yes" if r.exact else "NO",
        ]
        for r in rows
    ]
    showing.table("the last stores' bytes, moved from and to where they lie", columns, cells, left=4)
