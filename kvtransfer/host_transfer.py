"""HostTransfer: pages between a device pool and host slots, by the paths staged, strided, mapped and cpu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from kvtransfer.descriptors import descriptors
from kvtransfer.dma import merge_runs
from kvtransfer.handles import LayerFlags, PageState, TransferHandle
from kvtransfer.kernels import check, mapped
from kvtransfer.kernels.coalesce import Geometry
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.table import CopyTable
from kvtransfer.lanes import U64, CpuLanes, CudaEvent, CudaLanes, Event, RelayoutTask, lanes_of
from kvtransfer.plan import Chunk, runs_of
from kvtransfer.predict import STRIDED_RUN_PAGES
from kvtransfer.rest import Rest, Watch
from kvtransfer.scripted import Handed, give_desk, hand_over, take_back, template_of
from kvtransfer.templates import Desk
from kvtransfer.tiers.record import NOTHING_STORED
from kvtransfer.transfer import Ids, Transfer
from kvtransfer.verdict import Verdict
from kvtransfer.workshop import Workshop


class HostTransfer(Transfer):
    """A load or a store. ``pages`` is None where the pool's page ids are on the GPU (``gpu_pages``)."""

    def __init__(
        self,
        shop: Workshop,
        handle: TransferHandle,
        fences: Sequence[Event],
        slots: Ids,
        pages: Ids | None,
        gpu_pages: torch.Tensor | None,
    ) -> None:
        super().__init__(shop, handle, fences, (shop.pool.ledger, shop.host.ledger))
        self.slots, self.pages, self.gpu_pages = slots, pages, gpu_pages
        self.load = self.plan.direction == "load"
        self.copy_lane, self.kernel_lane = lanes_of(self.load)
        self.last_lane = "scatter" if self.load else "copy_out"
        self.ids: torch.Tensor | None = None
        self._slot_ids: torch.Tensor | None = None
        self.digests: torch.Tensor | None = None
        self._digests_back: torch.Tensor | None = None
        self._checked: Event | None = None
        self._flags: tuple[torch.Tensor, int] | None = None
        self.handed: Handed | None = None  # while the submitter has it
        self.desk: Desk | None = None  # from then on until the end

    @cached_property
    def scripted(self) -> bool:
        """Whether the submitter takes it (`kvtransfer.scripted`). Not while spans are wanted: they are Python's."""
        shop, plan = self.shop, self.plan
        return bool(
            plan.direction in shop.submitters
            and plan.path == "staged"
            and shop.ring is not None
            and shop.ring.share
            and not self.by_caller
            and self.pages is not None
            and not shop.observer.spans
            and template_of(shop, self).launchable
        )

    def hand_over(self) -> bool:
        return hand_over(self)

    def take_back(self) -> bool:
        return take_back(self)

    def watched(self, rest: Rest) -> Watch | None:
        handed = self.handed
        if handed is None:
            return None
        return rest.watch(handed.job, int(handed.final.cuda_event), self.handle.deadline, handed)

    def finish_with(
        self,
        final: CudaEvent,
        times: tuple[torch.cuda.Event, torch.cuda.Event],
        digests_back: torch.Tensor | None,
    ) -> None:
        """Instead of `finish`, where the job did it: ``final`` is the last event, ``times`` those around the copies,
        ``digests_back`` will hold the digests of all pages."""
        self._times = times
        if digests_back is not None:
            self._digests_back = digests_back[: self.plan.pages]
        self.handle.all_submitted(final)

    def acknowledge(self, verdict: Verdict | None) -> None:
        super().acknowledge(verdict)
        desk, self.desk = self.desk, None
        if desk is not None:
            with self.shop.lock:
                give_desk(self.shop, desk)

    def ready(self) -> bool:
        if not self.started:
            return super().ready()
        if self._checked is not None and not self._checked.query():
            return False
        if self.scripted:
            return True
        return self.plan.path != "staged" or self.shop.ring is None or self.shop.ring.next_is_free()

    def touches_pool(self, lane: str) -> bool:
        return lane == self.kernel_lane or self.plan.path in ("strided", "cpu")

    def first_lane(self) -> str:
        return self.copy_lane if self.load and self.plan.path != "mapped" else self.kernel_lane

    def prepare(self) -> None:
        lanes, pages, layers = self.shop.lanes, self.plan.pages, self.spec.num_layers
        if self.scripted:
            return  # the job does it
        if isinstance(lanes, CpuLanes):
            assert self.pages is not None
            self.ids = torch.from_numpy(self.pages)
            if self.shop.verify:
                self.digests = self._digests_back = torch.zeros(pages, layers, dtype=torch.int64)
            return
        with lanes.on(self.kernel_lane):
            self.ids = self.upload(self.pages) if self.pages is not None else self.gpu_pages
            if self.plan.path == "mapped":
                self._slot_ids = self.upload(self.slots)
            if self.shop.verify:
                self.digests = torch.zeros(pages, layers, dtype=torch.int64, device=lanes.device)
            if self.gpu_pages is not None:
                self.check_on_gpu(self.gpu_pages, self.shop.pool.num_pages)
                if not self.load:
                    # A copy out of the ring can't be gated on the GPU: its ids must be known good before.
                    assert self._status is not None
                    self._status_back = self.fetch(self._status)
                    self._checked = lanes.record(self.kernel_lane)

    def next_chunk(self) -> None:
        if self._checked is not None:
            assert self._status_back is not None
            self._checked = None
            message = check.explain_status(self._status_back.tolist(), self.shop.pool.num_pages, self.id_name)
            if message:
                raise LayoutError(message)
        super().next_chunk()

    def move(self, chunk: Chunk) -> Event:
        paths = {"staged": self._staged, "strided": self._strided, "mapped": self._mapped, "cpu": self._cpu}
        return paths[self.plan.path](chunk)

    def fetch_results(self) -> None:
        if self.digests is not None:
            self._digests_back = self.fetch(self.digests)

    def settle(self, whole: bool) -> Verdict | None:
        if self._flags is not None and self.shop.flags is not None:
            self.shop.flags.give(*self._flags)
        if whole:
            return self._compare()
        if not self.load:
            states = self.handle.states()
            whole_pages = (states == PageState.DONE) & (not self.handle.broken)
            self.shop.host.digests[self.slots[states != PageState.UNTOUCHED]] = NOTHING_STORED  # torn
            self.shop.host.digests[self.slots[whole_pages]] = 0  # all there, but nobody kept their digests
        return None

    def force_flags(self) -> None:
        """Raise the layer flags of a mapped load; the set is not used again."""
        lanes = self.shop.lanes
        if self._flags is None or not isinstance(lanes, CudaLanes) or not lanes.copier.supports_flags:
            return
        flags, target = self._flags
        self._flags = None
        for layer in range(flags.numel()):
            address = flags.data_ptr() + 4 * layer
            with lanes.aside():  # a lane may be stuck behind the very work that is late
                stream = torch.cuda.current_stream(lanes.device).cuda_stream
                lanes.copier.write_value(stream, address, target & 0xFFFFFFFF)
        self.handle.keep.append(flags)

    # -- paths ------------------------------------------------------------------------------------

    def _staged(self, chunk: Chunk) -> Event:
        lanes, ring = self.shop.lanes, self.shop.ring
        assert ring is not None
        slot = ring.take()
        first, last = (self.copy_lane, self.kernel_lane) if self.load else (self.kernel_lane, self.copy_lane)
        done: Event | None = None
        waited = False
        try:
            if slot.free is not None:
                lanes.wait(first, slot.free)
            waited = True
            if self.load:
                self._ring_copy(chunk, slot.address)
                lanes.wait("scatter", lanes.record("copy_in"))
                self._ring_relayout(chunk, slot.memory, "ring>pool")
                done = lanes.record("scatter")
            else:
                self._ring_relayout(chunk, slot.memory, "pool>ring")
                lanes.wait("copy_out", lanes.record("gather"))
                self._ring_copy(chunk, slot.address)
                done = lanes.record("copy_out")
        finally:
            try:
                if waited and done is None:  # what was enqueued must be through before the slot is re-used
                    lanes.wait(last, lanes.record(first))
                    done = lanes.record(last)
            finally:
                ring.give(slot, done)
        self.tell("copy", chunk)
        self.tell("scatter" if self.load else "gather", chunk)
        return done

    def _ring_copy(self, chunk: Chunk, ring_address: int) -> None:
        dst, src, sizes = self.ring_descriptors(chunk, ring_address)
        lanes, lane = self.shop.lanes, self.copy_lane
        lanes.let_others_in(lane)
        if self.shop.observer.spans:
            with self.span("copy", lane, chunk):
                lanes.batch(lane, dst, src, sizes, any_order=self.any_order)
        else:
            lanes.batch(lane, dst, src, sizes, any_order=self.any_order)

    @property
    def any_order(self) -> bool:
        """Whether sources may be read before the stream gets there: legal where the host has seen all of them complete,
        since no transfer in flight writes these slots."""
        return self.load and not self.earlier and self.shop.host.pinned

    def ring_descriptors(self, chunk: Chunk, ring_address: int) -> tuple[U64, U64, U64]:
        """What the copy engine moves between the chunk's host pages and a ring slot, neighbours merged."""
        geometry, _ = self.shop.geometry("host>ring" if self.load else "ring>host", chunk.box, build=False)
        slots = self.slots[chunk.first : chunk.first + chunk.count]
        here = np.arange(chunk.count, dtype=np.int64)
        host = [self.shop.host_address]
        if self.load:
            dst, src, sizes = descriptors(geometry, host, [ring_address], slots, here)
        else:
            dst, src, sizes = descriptors(geometry, [ring_address], host, here, slots)
        return merge_runs(dst, src, sizes, self.shop.boundaries)

    def _ring_relayout(self, chunk: Chunk, memory: torch.Tensor, kind: str) -> None:
        geometry, table = self.shop.geometry(kind, chunk.box)
        nbytes, address = geometry.page_bytes, memory.data_ptr()
        out = kind == "pool>ring"
        task = RelayoutTask(
            self.spec, geometry, table,
            src=self.shop.pool.buffers if out else [memory],
            dst=[memory] if out else self.shop.pool.buffers,
            src_ids=self.ids if out else None,
            dst_ids=None if out else self.ids,
            first=chunk.first, count=chunk.count,
            packed=lambda: memory[: chunk.count * nbytes].view(chunk.count, nbytes),
            src_shift=0 if out else address, dst_shift=address if out else 0,
            digests=self.digests, status=self._status,
        )  # fmt: skip
        self.relayout(self.kernel_lane, self.kernel_lane, chunk, task)

    def _strided(self, chunk: Chunk) -> Event:
        """Copy engine straight between pool and host; a kernel only reads along for the digests."""
        lanes = self.shop.lanes
        if not self.load:
            self._digest_pool(chunk)
            lanes.wait("copy_out", lanes.record("gather"))
        geometry, _ = self.shop.geometry("host>pool" if self.load else "pool>host", chunk.box, build=False)
        part = slice(chunk.first, chunk.first + chunk.count)
        assert self.pages is not None
        src_ids, dst_ids = (self.slots[part], self.pages[part]) if self.load else (self.pages[part], self.slots[part])
        pool, host = [b.data_ptr() for b in self.shop.pool.buffers], [self.shop.host_address]
        src_bases, dst_bases = (host, pool) if self.load else (pool, host)
        if self.shop.observer.spans:
            with self.span("strided", self.copy_lane, chunk):
                self._copy_runs(geometry, src_bases, dst_bases, src_ids, dst_ids)
        else:
            self._copy_runs(geometry, src_bases, dst_bases, src_ids, dst_ids)
        if self.load:
            lanes.wait("scatter", lanes.record("copy_in"))
            self._digest_pool(chunk)
        self.tell("strided", chunk)
        return lanes.record(self.last_lane)

    def _copy_runs(self, geometry: Geometry, src: list[int], dst: list[int], src_ids: Ids, dst_ids: Ids) -> None:
        self.shop.lanes.let_others_in(self.copy_lane)
        merged = geometry.merged
        alone = np.zeros(src_ids.size, dtype=bool)
        plain = all(not e.loops for e in merged)
        slots = src_ids if self.load else dst_ids
        for first, length in runs_of(src_ids, dst_ids):
            if length < STRIDED_RUN_PAGES or not plain or self._crosses(int(slots[first]), length):
                alone[first : first + length] = True
                continue
            for e in merged:
                self.shop.lanes.copy_2d(
                    self.copy_lane,
                    dst[e.dst_buffer] + e.dst_offset + int(dst_ids[first]) * e.dst_page_stride, e.dst_page_stride,
                    src[e.src_buffer] + e.src_offset + int(src_ids[first]) * e.src_page_stride, e.src_page_stride,
                    e.piece_bytes, length,
                )  # fmt: skip
        if alone.any():
            d, s, sizes = descriptors(geometry, src, dst, src_ids[alone], dst_ids[alone])
            d, s, sizes = merge_runs(d, s, sizes, self.shop.boundaries)
            self.shop.lanes.batch(self.copy_lane, d, s, sizes, any_order=False)

    def _crosses(self, start: int, length: int) -> bool:
        """Whether ``length`` slots from ``start`` on lie in two registrations of the slab: no call may span them."""
        cuts = self.shop.host.chunk_slots
        return bool(np.searchsorted(cuts, start, "right") != np.searchsorted(cuts, start + length - 1, "right"))

    def _digest_pool(self, chunk: Chunk) -> None:
        if self.digests is None:
            return
        geometry, table = self.shop.geometry("pool>ring", chunk.box)
        task = RelayoutTask(
            self.spec, geometry, table, self.shop.pool.buffers, (), self.ids, None, chunk.first, chunk.count,
            packed=None, digests=self.digests, status=self._status, store=False,
        )  # fmt: skip
        self.relayout("digest", self.kernel_lane, chunk, task)

    def _mapped(self, chunk: Chunk) -> Event:
        lanes, flag_sets = self.shop.lanes, self.shop.flags
        assert isinstance(lanes, CudaLanes) and flag_sets is not None
        _, table = self.shop.geometry("host>pool" if self.load else "pool>host", chunk.box)
        assert table is not None
        with lanes.on(self.kernel_lane):
            flags, held = flag_sets.take()
            target = held + self.shop.ctas
            if self.shop.observer.spans:
                with self.span("mapped", self.kernel_lane, chunk):
                    self._launch_mapped(chunk, table, flags)
            else:
                self._launch_mapped(chunk, table, flags)
            self._flags = (flags, target)  # not before: a set that no launch raises would never reach its target again
        self.tell("mapped", chunk)
        if self.load and lanes.copier.supports_flags:
            self.handle.flags_submitted(LayerFlags(lanes.copier, flags.data_ptr(), target & 0xFFFFFFFF, flags))
        return lanes.record(self.kernel_lane)

    def _launch_mapped(self, chunk: Chunk, table: CopyTable, flags: torch.Tensor) -> None:
        mapped.mapped_copy(
            table, chunk.count, flags, self.shop.ctas,
            src_ids=self._slot_ids if self.load else self.ids,
            dst_ids=self.ids if self.load else self._slot_ids,
            src_first=chunk.first, dst_first=chunk.first,
            status=self._status, digests=self.digests,
        )  # fmt: skip

    def _cpu(self, chunk: Chunk) -> Event:
        shop, box = self.shop, chunk.box
        kind = "host>pool" if self.load else "pool>host"
        geometry, _ = shop.geometry(kind, box)
        part = slice(chunk.first, chunk.first + chunk.count)
        slots = torch.from_numpy(self.slots)
        offsets = self.spec.layer_offsets
        rows = shop.host.payload.view(-1, shop.host.slot_bytes)

        def packed() -> torch.Tensor:
            return rows[slots[part], offsets[box.layer_start] : offsets[box.layer_stop]]

        host = [shop.host.payload]
        task = RelayoutTask(
            self.spec, geometry, None,
            src=host if self.load else shop.pool.buffers,
            dst=shop.pool.buffers if self.load else host,
            src_ids=slots if self.load else self.ids,
            dst_ids=self.ids if self.load else slots,
            first=chunk.first, count=chunk.count, packed=packed, digests=self.digests,
        )  # fmt: skip
        self.relayout("relayout", self.copy_lane, chunk, task)
        self.tell("relayout", chunk)
        return shop.lanes.record(self.copy_lane)

    # -- small parts ------------------------------------------------------------------------------

    def _compare(self) -> Verdict:
        """Compare a load's digests with the slots' own; keep a store's with its slots. Set aside what differs."""
        host = self.shop.host
        got = None if self._digests_back is None else self._digests_back.numpy().view(np.uint64)
        if not self.load:
            host.digests[self.slots] = 0 if got is None else got
            unknown = () if got is not None else tuple(range(self.plan.pages))
            return Verdict(True, unverified_pages=unknown)
        want = host.digests[self.slots]
        empty = np.asarray((want == NOTHING_STORED).all(axis=1))
        known = np.asarray(want.any(axis=1)) if got is not None else empty
        differs = np.asarray((empty[:, None] if got is None else got != want) & known[:, None])
        bad = np.flatnonzero(differs.any(axis=1))
        if bad.size:
            host.digests[self.slots[bad]] = NOTHING_STORED  # no later load takes them for good
            self.shop.observer.noted("pages set aside", slots=self.slots[bad].tolist())
        return Verdict(
            not bad.size,
            tuple(bad.tolist()),
            tuple((int(p), int(layer)) for p, layer in zip(*np.nonzero(differs), strict=True)),
            tuple(np.flatnonzero(~known).tolist()),
        )
