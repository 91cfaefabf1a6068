"""Workshop: what all transfers of an engine share: lanes, ring, release flags, kernel tables."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvtransfer.kernels.coalesce import Box, Geometry, Side, coalesce
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.launch import MAPPED_TILE_BYTES, MAPPED_WARPS, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.kernels.layout import box_bytes
from kvtransfer.kernels.table import CopyTable, build_table
from kvtransfer.lanes import U64, CpuLanes, CudaLanes
from kvtransfer.pool import KVPool
from kvtransfer.staging import StagingRing
from kvtransfer.submitter import Launch, Submitter
from kvtransfer.tiers.host import HostTier

FLAG_SETS = 32  # made at once: more mapped loads are seldom in flight


class FlagSets:
    """Release flags for mapped launches: one set of a counter a layer for each launch in flight.

    Counters only grow, each launch waits for a target of its own, so what an earlier launch added can't release
    a later one. A set whose flags were forced (at a deadline) is not used again.

    A stream may look at a flag before the launch that raises it has begun, so zeros are in memory before a set is
    given out: on a lane they could land after the look, which would see what the memory held before.
    """

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device, self._layers = device, layers
        self._free: list[tuple[torch.Tensor, int]] = []  # (flags, what they hold once their launch is through)
        self._grow()

    def take(self) -> tuple[torch.Tensor, int]:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        """More sets; holds the caller for their zeros, on a stream that carries nothing else."""
        if self._device.type != "cuda":
            fresh = torch.zeros(FLAG_SETS, self._layers, dtype=torch.int32, device=self._device)
        else:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                fresh = torch.zeros(FLAG_SETS, self._layers, dtype=torch.int32, device=self._device)
            stream.synchronize()
        self._free += [(flags, 0) for flags in fresh]

    def give(self, flags: torch.Tensor, holds: int) -> None:
        self._free.append((flags, holds))


@dataclass
class Workshop:
    """What all transfers of an engine share. Lanes, ring and tables are used under ``lock``."""

    pool: KVPool
    host: HostTier
    lanes: CudaLanes | CpuLanes
    ring: StagingRing | None
    flags: FlagSets | None
    ctas: int
    verify: bool
    observer: Observer
    host_address: int  # at which the GPU sees the slab
    lock: threading.RLock = field(default_factory=threading.RLock)
    tables: dict[tuple[Any, ...], tuple[Geometry, CopyTable | None]] = field(default_factory=dict)
    submitters: dict[str, Submitter] = field(default_factory=dict)  # by direction, so that both run at once
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)  # (kind, *tile constants), ungated
    templates: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # of `kvtransfer.templates`, by shape
    desks: list[Any] = field(default_factory=list)  # of `kvtransfer.templates`, those nobody uses
    device_tables: weakref.WeakKeyDictionary[KVPool, dict[Box, tuple[Geometry, CopyTable | None]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )  # of copies into other pools, which are not kept alive by them
    seen: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # scratch of the checks of ids on the GPU
    stamps: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @cached_property
    def boundaries(self) -> U64:
        """Addresses at which the slab's registrations meet: no copy may span one."""
        return (self.host_address + self.host.chunk_slots * self.host.slot_bytes).astype(np.uint64)

    @property
    def on_gpu(self) -> bool:
        return self.pool.device.type == "cuda"

    def geometry(self, kind: str, box: Box, *, build: bool = True) -> tuple[Geometry, CopyTable | None]:
        """The geometry between two of pool, host and ring for ``box``, with its kernel table on a GPU.

        ``kind``: "ring>pool", "pool>ring" (packed side at address 0, shifted at launch), "host>pool", "pool>host",
        "host>ring", "ring>host".
        """
        key = (kind, box, build)
        if key not in self.tables:
            self.tables[key] = self._make(kind, box, build)
        return self.tables[key]

    def _make(self, kind: str, box: Box, build: bool) -> tuple[Geometry, CopyTable | None]:
        spec = self.pool.spec
        stride = box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
        sides = {
            "pool": (Side.of(self.pool.layout), [b.data_ptr() for b in self.pool.buffers]),
            "host": (Side.of(self.host.layout), [self.host_address]),
            "ring": (Side.packed(spec, box, 0, stride), [0]),
        }
        source, target = kind.split(">")
        # Loops run in the order of the page-first side, as digests and ring need.
        geometry = coalesce(spec, sides[source][0], sides[target][0], box, order="dst" if source == "pool" else "src")
        if not build or not self.on_gpu:
            return geometry, None
        tile, warps = (MAPPED_TILE_BYTES, MAPPED_WARPS) if "host" in kind else (RELAYOUT_TILE_BYTES, RELAYOUT_WARPS)
        return geometry, self.build(geometry, sides[source][1], sides[target][1], tile, warps)

    def build(self, geometry: Geometry, src: Sequence[int], dst: Sequence[int], tile: int, warps: int) -> CopyTable:
        """`build_table`, uploaded on a stream that carries nothing else: the upload holds its caller until the stream
        is through, which must not be the model's."""
        with self.lanes.aside() if isinstance(self.lanes, CudaLanes) else nullcontext():
            return build_table(geometry, self.pool.spec, src, dst, self.pool.device, tile, warps)
