"""Rigs: a pool and a slab of random bytes with an engine between them, in the shapes that benchmarks use."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.engine import DEFAULT_STAGING_BYTES, TransferEngine
from kvtransfer.groups import Groups
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.predict import Terrain
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier

Ids = NDArray[np.int64]
LONGEST_RUN = 16  # the pool holds whole runs of so many pages
CPU_RING_BYTES = 24 << 20
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


def device_of(name: str) -> torch.device:
    """ "auto" (a GPU where there is one), "cpu" or "cuda[:N]". ValueError where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {name}: expected a GPU that PyTorch sees, got none; use --device cpu")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def ordered_ids(total: int, run: int, rng: np.random.Generator) -> Ids:
    """0 to ``total - 1`` in runs of ``run`` (which divides ``total``), the runs in random order."""
    starts = rng.permutation(total // run) * run
    ids: Ids = (starts[:, None] + np.arange(run)).reshape(-1).astype(np.int64)
    return ids


class Rig:
    """``total_bytes`` of pages in a pool of twice as many, a slab of as many slots (or ``num_slots``), and an engine.

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
        script: bool = True,
        num_slots: int = 0,
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
        self.host = HostTier(self.spec, capacity_pages=max(num_slots, 2 * self._half), device=device)
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

    def place(self, slots: Ids) -> None:
        """Move ``slots`` (as many as there are pages) from now on. They are stored to once: loads compare digests."""
        others = np.setdiff1d(np.arange(self.host.num_slots), slots)
        self.slots, self.other_slots = slots, self._rng.permutation(others)[: self.count]
        self.engine.store(self.pages, self.slots).result(LIMIT_S)
        self.engine.store(self.other_pages, self.other_slots).result(LIMIT_S)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compile_ahead(jobs: Sequence[tuple[Shape, int, str]], device: torch.device, processes: int) -> None:
    """Make engines for (shape, page size, layout) in several processes, which leaves their kernels in Triton's cache on
    disk: compiled one after the other they take longer than what is measured. Nothing to do for one job."""
    if processes < 2 or len(jobs) < 2:
        return
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_compile, [(*job, str(device)) for job in jobs]):
            pass


def _compile(job: tuple[Shape, int, str, str]) -> None:
    shape, page_size, layout, device = job
    device_of(device)
    with Rig(shape, page_size, 1, torch.device(device), layout=layout):
        pass
