"""DeviceCopy: pages from one pool to another of the same device, by one relayout launch (path "device")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.launch import RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.lanes import CpuLanes, Event, RelayoutTask
from kvtransfer.plan import Chunk, Plan
from kvtransfer.pool import KVPool
from kvtransfer.transfer import Ids, Transfer
from kvtransfer.verdict import Verdict
from kvtransfer.workshop import Workshop


class DeviceCopy(Transfer):
    """Page ids on the CPU, both sides checked by the engine."""

    copy_lane = kernel_lane = last_lane = "gather"

    def __init__(
        self,
        shop: Workshop,
        handle: TransferHandle,
        fences: Sequence[Event],
        src_pages: Ids,
        target: KVPool,
        dst_pages: Ids,
    ) -> None:
        super().__init__(shop, handle, fences, (shop.pool.ledger, target.ledger))
        self.target, self.src_pages, self.dst_pages = target, src_pages, dst_pages
        self._ids: tuple[torch.Tensor, torch.Tensor] | None = None

    def prepare(self) -> None:
        lanes = self.shop.lanes
        if isinstance(lanes, CpuLanes):
            self._ids = torch.from_numpy(self.src_pages), torch.from_numpy(self.dst_pages)
            return
        with lanes.on(self.kernel_lane):
            self._ids = self.upload(self.src_pages), self.upload(self.dst_pages)

    def move(self, chunk: Chunk) -> Event:
        shop, lanes = self.shop, self.shop.lanes
        assert self._ids is not None
        tables = shop.device_tables.setdefault(self.target, {})
        if chunk.box not in tables:
            source, target = Side.of(shop.pool.layout), Side.of(self.target.layout)
            geometry = coalesce(self.spec, source, target, chunk.box, order="dst")
            table = None
            if shop.on_gpu:
                bases = [b.data_ptr() for b in shop.pool.buffers], [b.data_ptr() for b in self.target.buffers]
                table = shop.build(geometry, *bases, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS)
            tables[chunk.box] = (geometry, table)
        geometry, table = tables[chunk.box]
        task = RelayoutTask(
            self.spec, geometry, table, shop.pool.buffers, self.target.buffers, *self._ids, chunk.first, chunk.count,
            packed=None,
        )  # fmt: skip
        self.relayout("relayout", self.kernel_lane, chunk, task)
        self.tell("relayout", chunk)
        return lanes.record(self.kernel_lane)

    def settle(self, whole: bool) -> Verdict | None:
        return Verdict(True, unverified_pages=tuple(range(self.plan.pages))) if whole else None


def device_plan(pool: KVPool, target: KVPool, pages: int) -> Plan:
    """One chunk: everything in one launch."""
    geometry = coalesce(pool.spec, Side.of(pool.layout), Side.of(target.layout), Box.whole(pool.spec), order="dst")
    chunks = (Chunk(Box.whole(pool.spec), 0, pages),) if pages else ()
    return Plan(
        "copy", "device", "both pools are on one device", pages, pages * pool.spec.page_bytes, geometry.piece_bytes,
        pages * geometry.pieces_a_page, chunks, False,
    )  # fmt: skip
