"""Workshop: what all transfers of an engine share: lanes, ring, release flags, kernel tables."""

from __future__ import annotations

import itertools
import threading
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


class FlagSets:
    """Release flags for mapped launches: one set of a counter a layer for each launch in flight.

    Counters only grow, each launch waits for a target of its own, so what an earlier launch added can't release
    a later one. A set whose flags were forced (at a deadline) is not used again.
    """

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device, self._layers = device, layers
        self._free: list[tuple[torch.Tensor, int]] = []  # (flags, what they hold once their launch is through)

    def take(self) -> tuple[torch.Tensor, int]:
        if self._free:
            return self._free.pop()
        return torch.zeros(self._layers, dtype=torch.int32, device=self._device), 0

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
    submitter: Submitter | None = None
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)  # (kind, *tile constants), ungated
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
        table = build_table(geometry, spec, sides[source][1], sides[target][1], self.pool.device, tile, warps)
        return geometry, table
