"""One transfer on its way to the lanes: fences first, then chunk after chunk, then the last event.

Order. The lanes that touch the pool wait for the declared streams' events (recorded on the caller's thread at
the call) and for every earlier transfer that touches the same page or slot. Ring slots are written only
after their last reader. All of it is stream order: no thread waits for a GPU here.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.handles import LayerFlags, PageState, TransferHandle, Verdict
from kvtransfer.kernels import check, mapped
from kvtransfer.kernels.coalesce import Box, Entry, Geometry, Side, coalesce
from kvtransfer.kernels.errors import KVTransferError, LayoutError, TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.launch import MAPPED_TILE_BYTES, MAPPED_WARPS, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.kernels.layout import box_bytes
from kvtransfer.kernels.table import CopyTable, build_table
from kvtransfer.lanes import U64, CpuLanes, CudaLanes, Event, RelayoutTask
from kvtransfer.dma import merge_runs
from kvtransfer.plan import Chunk, Plan, runs_of
from kvtransfer.pool import KVPool
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier

Ids = NDArray[np.int64]
STRIDED_RUN_PAGES = 4  # shorter runs go as batch descriptors: a 2-D call costs 8 descriptors' worth of CPU


class FlagSets:
    """Release flags for mapped launches: one set of a counter a layer for each launch in flight.

    Counters only grow, each launch waits for a target of its own, so what an earlier launch added can't release
    a later one. A set whose flags were forced (`LayerFlags` at a deadline) is not used again.
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
    seen: dict[str, torch.Tensor] = field(default_factory=dict)  # scratch of the GPU's check of page ids, a lane
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
        key = (kind, box)
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


class Transfer:
    """The work behind a handle. ``pages`` is None where the pool's page ids are on the GPU (``gpu_pages``)."""

    def __init__(
        self,
        shop: Workshop,
        handle: TransferHandle,
        slots: Ids,
        pages: Ids | None,
        gpu_pages: torch.Tensor | None,
        fences: list[Event],
        earlier: list[Transfer],
    ) -> None:
        self.shop, self.handle = shop, handle
        self.plan: Plan = handle.plan
        self.slots, self.pages, self.gpu_pages = slots, pages, gpu_pages
        self.fences, self.earlier = fences, earlier
        self.load = self.plan.direction == "load"
        self.started = False
        self.late = False  # its deadline passed while it was in flight
        self.by_caller = False  # its caller submits it layer by layer
        self._began = 0.0
        self._nothing_written = False
        self._next = 0
        self._ids: torch.Tensor | None = None
        self._slot_ids: torch.Tensor | None = None
        self._digests: torch.Tensor | None = None
        self._digests_back: torch.Tensor | None = None
        self._status: torch.Tensor | None = None
        self._status_back: torch.Tensor | None = None
        self._checked: Event | None = None
        self._flags: tuple[torch.Tensor, int] | None = None
        self._times: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        copy, kernel = ("copy_in", "scatter") if self.load else ("copy_out", "gather")
        self.copy_lane, self.kernel_lane = copy, kernel
        self.last_lane = "scatter" if self.load else "copy_out"

    # -- what the engine asks ---------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the next chunk can be submitted without waiting for anything."""
        if not self.started:
            return all(e.handle.fully_submitted for e in self.earlier)
        if self._checked is not None and not self.load and not self._checked.query():
            return False  # a copy out of the ring can't be gated on the GPU: its ids must be known good
        return self.plan.path != "staged" or self.shop.ring is None or self.shop.ring.next_is_free()

    @property
    def chunks_left(self) -> bool:
        return self._next < len(self.plan.chunks)

    def start(self) -> None:
        """Fences, ids and scratch; once, before the first chunk. Under the shop's lock."""
        lanes, spec = self.shop.lanes, self.shop.pool.spec
        self.started = True
        self._began = time.monotonic()
        for lane in (self.copy_lane, self.kernel_lane):
            touches_pool = lane == self.kernel_lane or self.plan.path in ("strided", "cpu")
            for event in self.fences if touches_pool else []:
                lanes.wait(lane, event)
            for other in self.earlier:
                if other.handle.final_event is not None:
                    lanes.wait(lane, other.handle.final_event)
        pages = self.plan.pages
        if isinstance(lanes, CpuLanes):
            assert self.pages is not None
            self._ids = torch.from_numpy(self.pages)
            if self.shop.verify:
                self._digests = self._digests_back = torch.zeros(pages, spec.num_layers, dtype=torch.int64)
            return
        with lanes.on(self.kernel_lane):
            self._ids = self._upload(self.pages) if self.pages is not None else self.gpu_pages
            if self.plan.path == "mapped":
                self._slot_ids = self._upload(self.slots)
            if self.shop.verify:
                self._digests = torch.zeros(pages, spec.num_layers, dtype=torch.int64, device=lanes.device)
            if self.gpu_pages is not None:
                self._check_on_gpu(self.gpu_pages)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(lanes.streams[self.kernel_lane if self.plan.path == "mapped" or not self.load else self.copy_lane])
        self._times = (begin, end)

    def next_chunk(self) -> None:
        """Submit the next chunk in order. Under the shop's lock, when `ready`."""
        if self._checked is not None and not self.load:
            self._require_good_ids()
        self.submit(self.plan.chunks[self._next])

    def submit(self, chunk: Chunk) -> None:
        """Submit one chunk on the plan's path and tell the handle."""
        self.shop.lanes.owner = self.handle
        self._next += 1
        event = {
            "staged": self._staged,
            "strided": self._strided,
            "mapped": self._mapped,
            "cpu": self._cpu,
        }[self.plan.path](chunk)
        self.handle.chunk_submitted(chunk, event)

    def finish(self) -> None:
        """Everything that will be submitted has been: fetch digests and status, record the last event."""
        lanes = self.shop.lanes
        if self.load:
            lanes.wait("scatter", lanes.record("copy_in"))
        else:
            lanes.wait("copy_out", lanes.record("gather"))
        if isinstance(lanes, CudaLanes):
            with lanes.on(self.last_lane):
                if self._digests is not None:
                    self._digests_back = self._fetch(self._digests)
                if self._status is not None and self._status_back is None:
                    self._status_back = self._fetch(self._status)
            if self._times is not None:
                self._times[1].record(lanes.streams[self.last_lane])
        self.handle.keep += [self._ids, self._slot_ids, self._digests, self._status, self.fences, self.shop]
        self.handle.all_submitted(lanes.record(self.last_lane))

    def judge(self) -> Verdict | None:
        """The last event has passed, or nothing was submitted: find what went wrong and check the digests. Under the
        shop's lock. Fails the handle where pages can't be used; None where there is nothing to judge."""
        error = self._lane_error()
        if error is None and self._status_back is not None:
            message = check.explain_status(self._status_back.tolist(), self.shop.pool.num_pages, "pool page")
            error = LayoutError(message) if message else None
            self._nothing_written = error is not None
        if self._flags is not None and self.shop.flags is not None:
            self.shop.flags.give(*self._flags)
        if error is not None:
            self.handle.fail(error)
        if self.handle.failed or self.chunks_left:
            if not self.load:
                self.shop.host.digests[self.slots[self.handle.states() != PageState.UNTOUCHED]] = 0
            return None
        verdict = self._compare()
        if verdict.bad_pages:
            some = list(verdict.bad_pages[:8])
            self.handle.fail(
                TransferError(f"pages at positions {some} do not verify: treat them as misses", verdict.bad_pages)
            )
        return verdict

    def acknowledge(self, verdict: Verdict | None) -> None:
        """Free the ids for others and tell the caller."""
        bad = np.asarray(verdict.bad_pages if verdict is not None else (), dtype=np.int64)
        if not self.shop.on_gpu and self.handle.failed:
            bad = np.flatnonzero(self.handle.states() == PageState.DONE)  # the lanes went on without moving anything
            bad = bad if verdict is None else np.asarray(verdict.bad_pages, dtype=np.int64)
        timed = self._times is not None and self.handle.final_event is not None
        seconds = self._times[0].elapsed_time(self._times[1]) / 1e3 if self._times and timed else self._host_seconds()
        self.shop.pool.ledger.release(self)
        self.shop.host.ledger.release(self)
        self.earlier = []
        self.handle.end(verdict, seconds, bad, nothing_written=self._nothing_written)

    def force_flags(self) -> None:
        """At a deadline: raise the layer flags, so that no stream waits without an end; the set is not used again."""
        lanes = self.shop.lanes
        if self._flags is None or not isinstance(lanes, CudaLanes):
            return
        flags, target = self._flags
        self._flags = None
        for layer in range(flags.numel()):
            lanes.copier.write_value(lanes.streams["copy_in"].cuda_stream, flags.data_ptr() + 4 * layer, target & 0xFFFFFFFF)
        self.handle.keep.append(flags)

    # -- paths ------------------------------------------------------------------------------------

    def _staged(self, chunk: Chunk) -> Event:
        shop, lanes, ring = self.shop, self.shop.lanes, self.shop.ring
        assert ring is not None
        slot = ring.take()
        done: Event | None = None
        try:
            first = self.copy_lane if self.load else self.kernel_lane
            if slot.free is not None:
                lanes.wait(first, slot.free)
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
            if done is None:  # a call failed half-way: whatever was enqueued must be through before the slot is re-used
                done = lanes.record("scatter" if self.load else "copy_out")
            ring.give(slot, done)
        self._tell("copy", chunk)
        self._tell("scatter" if self.load else "gather", chunk)
        return done

    def _ring_copy(self, chunk: Chunk, ring_address: int) -> None:
        geometry, _ = self.shop.geometry("host>ring" if self.load else "ring>host", chunk.box, build=False)
        slots = self.slots[chunk.first : chunk.first + chunk.count]
        here = np.arange(chunk.count, dtype=np.int64)
        host = [self.shop.host_address]
        if self.load:
            dst, src, sizes = descriptors(geometry, host, [ring_address], slots, here)
        else:
            dst, src, sizes = descriptors(geometry, [ring_address], host, here, slots)
        dst, src, sizes = merge_runs(dst, src, sizes, self.shop.boundaries)
        self.shop.lanes.batch(self.copy_lane, dst, src, sizes, any_order=self.load and not self.earlier)

    def _ring_relayout(self, chunk: Chunk, memory: torch.Tensor, kind: str) -> None:
        geometry, table = self.shop.geometry(kind, chunk.box)
        nbytes, address = geometry.page_bytes, memory.data_ptr()
        out = kind == "pool>ring"
        task = RelayoutTask(
            self.shop.pool.spec, geometry, table,
            src=self.shop.pool.buffers if out else [memory],
            dst=[memory] if out else self.shop.pool.buffers,
            src_ids=self._ids if out else None,
            dst_ids=None if out else self._ids,
            first=chunk.first, count=chunk.count,
            packed=lambda: memory[: chunk.count * nbytes].view(chunk.count, nbytes),
            src_shift=0 if out else address, dst_shift=address if out else 0,
            digests=self._digests, status=self._status,
        )  # fmt: skip
        self.shop.lanes.relayout(self.kernel_lane, task)

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
        self._copy_runs(geometry, src_bases, dst_bases, src_ids, dst_ids)
        if self.load:
            lanes.wait("scatter", lanes.record("copy_in"))
            self._digest_pool(chunk)
        self._tell("strided", chunk)
        return lanes.record(self.last_lane)

    def _copy_runs(self, geometry: Geometry, src: list[int], dst: list[int], src_ids: Ids, dst_ids: Ids) -> None:
        merged = geometry.merged()
        alone = np.zeros(src_ids.size, dtype=bool)
        plain = all(not e.loops for e in merged)
        for first, length in runs_of(src_ids, dst_ids):
            if length < STRIDED_RUN_PAGES or not plain or self._crosses(first, length):
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

    def _crosses(self, first: int, length: int) -> bool:
        """Whether a run of slots lies in two registrations of the slab: one call must not span them."""
        cuts, start = self.shop.host.chunk_slots, int(self.slots[first])
        return bool(np.searchsorted(cuts, start, "right") != np.searchsorted(cuts, start + length - 1, "right"))

    def _digest_pool(self, chunk: Chunk) -> None:
        if self._digests is None:
            return
        geometry, table = self.shop.geometry("pool>ring", chunk.box)
        task = RelayoutTask(
            self.shop.pool.spec, geometry, table, self.shop.pool.buffers, (), self._ids, None, chunk.first, chunk.count,
            _no_packed, digests=self._digests, status=self._status, store=False,
        )  # fmt: skip
        self.shop.lanes.relayout(self.kernel_lane, task)

    def _mapped(self, chunk: Chunk) -> Event:
        lanes, flag_sets = self.shop.lanes, self.shop.flags
        assert isinstance(lanes, CudaLanes) and flag_sets is not None
        _, table = self.shop.geometry("host>pool" if self.load else "pool>host", chunk.box)
        assert table is not None
        with lanes.on(self.kernel_lane):
            flags, held = flag_sets.take()
            target = held + self.shop.ctas
            self._flags = (flags, target)
            mapped.mapped_copy(
                table, chunk.count, flags, self.shop.ctas,
                src_ids=self._slot_ids if self.load else self._ids,
                dst_ids=self._ids if self.load else self._slot_ids,
                src_first=chunk.first, dst_first=chunk.first,
                status=self._status, digests=self._digests,
            )  # fmt: skip
        self._tell("mapped", chunk)
        if self.load and lanes.copier.supports_flags:
            self.handle.flags_submitted(LayerFlags(lanes.copier, flags.data_ptr(), target & 0xFFFFFFFF, flags))
        return lanes.record(self.kernel_lane)

    def _cpu(self, chunk: Chunk) -> Event:
        shop, box = self.shop, chunk.box
        kind = "host>pool" if self.load else "pool>host"
        geometry, _ = shop.geometry(kind, box)
        part = slice(chunk.first, chunk.first + chunk.count)
        slots = torch.from_numpy(self.slots)
        offsets = shop.pool.spec.layer_offsets
        rows = shop.host.payload.view(-1, shop.host.slot_bytes)

        def packed() -> torch.Tensor:
            return rows[slots[part], offsets[box.layer_start] : offsets[box.layer_stop]]

        host = [shop.host.payload]
        task = RelayoutTask(
            shop.pool.spec, geometry, None,
            src=host if self.load else shop.pool.buffers,
            dst=shop.pool.buffers if self.load else host,
            src_ids=slots if self.load else self._ids,
            dst_ids=self._ids if self.load else slots,
            first=chunk.first, count=chunk.count, packed=packed, digests=self._digests,
        )  # fmt: skip
        shop.lanes.relayout(self.copy_lane, task)
        self._tell("relayout", chunk)
        return shop.lanes.record(self.copy_lane)

    # -- small parts ------------------------------------------------------------------------------

    def _upload(self, ids: Ids) -> torch.Tensor:
        """Ids to the GPU on the current stream; the pinned copy is kept by the handle."""
        pinned = torch.from_numpy(ids).pin_memory()
        self.handle.keep.append(pinned)
        return pinned.to(self.shop.pool.device, non_blocking=True)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy, enqueued on the current stream; valid once that stream has got there."""
        back = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        back.copy_(tensor, non_blocking=True)
        return back

    def _check_on_gpu(self, ids: torch.Tensor) -> None:
        shop = self.shop
        if self.kernel_lane not in shop.seen:
            shop.seen[self.kernel_lane] = torch.zeros(shop.pool.num_pages, dtype=torch.int32, device=shop.pool.device)
        fresh = torch.tensor(check.fresh_status(), dtype=torch.int32).pin_memory()
        self.handle.keep.append(fresh)
        self._status = fresh.to(shop.pool.device, non_blocking=True)
        check.check_ids(ids, shop.pool.num_pages, self._status, shop.seen[self.kernel_lane], next(shop.stamps))
        if not self.load:
            self._status_back = self._fetch(self._status)
            self._checked = shop.lanes.record(self.kernel_lane)

    def _require_good_ids(self) -> None:
        assert self._status_back is not None
        self._checked = None
        message = check.explain_status(self._status_back.tolist(), self.shop.pool.num_pages, "pool page")
        if message:
            raise LayoutError(message)

    def _lane_error(self) -> KVTransferError | None:
        """What went wrong on the CPU's lanes; taken off them, so that later transfers run."""
        lanes = self.shop.lanes
        final = self.handle.final_event
        cause = getattr(final, "error", None)
        if cause is None or not isinstance(lanes, CpuLanes):
            return None
        for stream in lanes.streams.values():
            stream.take_error()
        error = TransferError(f"the transfer failed: {cause!r}", range(self.plan.pages))
        error.__cause__ = cause
        return error

    def _host_seconds(self) -> float:
        return time.monotonic() - self._began if self.started else 0.0

    def _compare(self) -> Verdict:
        """Compare a load's digests with the slots' own; keep a store's with its slots. Set aside what differs."""
        host = self.shop.host
        if self._digests_back is None:
            if not self.load:
                host.digests[self.slots] = 0
            return Verdict(True, unverified_pages=tuple(range(self.plan.pages)))
        got = self._digests_back.numpy().view(np.uint64)
        if not self.load:
            host.digests[self.slots] = got
            return Verdict(True)
        want = host.digests[self.slots]
        known = want.any(axis=1)
        differs = (got != want) & known[:, None]
        bad = np.flatnonzero(differs.any(axis=1))
        if bad.size:
            self.shop.observer.noted("pages set aside", slots=self.slots[bad].tolist())
        return Verdict(
            not bad.size,
            tuple(bad.tolist()),
            tuple((int(p), int(layer)) for p, layer in zip(*np.nonzero(differs), strict=True)),
            tuple(np.flatnonzero(~known).tolist()),
        )

    def _tell(self, stage: str, chunk: Chunk) -> None:
        box = chunk.box
        nbytes = box_bytes(self.shop.pool.spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
        self.shop.observer.submitted(
            self.handle.number, stage, (box.layer_start, box.layer_stop), chunk.count, nbytes * chunk.count
        )


def _no_packed() -> torch.Tensor:
    raise TransferError("digest of a pool on the CPU: the cpu path digests host pages instead")


def piece_offsets(entry: Entry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets of every piece of an entry within a page, on both sides: the loops written out."""
    src, dst = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for extent, s, d in entry.loops:
        steps = np.arange(extent, dtype=np.int64)
        src = (src[:, None] + steps * s).reshape(-1)
        dst = (dst[:, None] + steps * d).reshape(-1)
    return src, dst


def descriptors(
    geometry: Geometry, src: list[int], dst: list[int], src_ids: Ids, dst_ids: Ids
) -> tuple[U64, U64, U64]:
    """(destination addresses, source addresses, sizes) of every piece, page by page: what a copy engine takes."""
    dst_cols, src_cols, sizes = [], [], []
    for e in geometry.merged():
        src_at, dst_at = piece_offsets(e)
        src_cols.append((src[e.src_buffer] + e.src_offset + src_ids * e.src_page_stride)[:, None] + src_at)
        dst_cols.append((dst[e.dst_buffer] + e.dst_offset + dst_ids * e.dst_page_stride)[:, None] + dst_at)
        sizes.append(np.full(src_cols[-1].shape, e.piece_bytes, dtype=np.uint64))
    if len(sizes) == 1:
        return dst_cols[0].reshape(-1).astype(np.uint64), src_cols[0].reshape(-1).astype(np.uint64), sizes[0].reshape(-1)
    return (
        np.concatenate(dst_cols, axis=1).reshape(-1).astype(np.uint64),
        np.concatenate(src_cols, axis=1).reshape(-1).astype(np.uint64),
        np.concatenate(sizes, axis=1).reshape(-1),
    )
