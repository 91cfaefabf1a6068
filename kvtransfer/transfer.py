"""Transfer: what every kind of transfer shares: fences, chunks, the last event, acknowledgement.

Order. The lanes that touch a pool wait for the declared streams' events (recorded on the caller's thread at
the call) and for every earlier transfer that touches the same page or slot. All of it is stream order: no
thread waits for a GPU here. The pump acknowledges.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.handles import PageState, TransferHandle
from kvtransfer.kernels import check
from kvtransfer.kernels.coalesce import Box
from kvtransfer.kernels.errors import KVTransferError, LayoutError, TransferError
from kvtransfer.kernels.events import Span
from kvtransfer.kernels.layout import box_bytes
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.lanes import CpuLanes, CudaLanes, Event, RelayoutTask, as_transfer_error
from kvtransfer.plan import Chunk, Plan
from kvtransfer.rest import Rest, Watch
from kvtransfer.tiers.ledger import PageLedger
from kvtransfer.verdict import Verdict
from kvtransfer.workshop import Workshop

Ids = NDArray[np.int64]


class Transfer(ABC):
    """The work behind a handle. ``earlier`` is set once the pages and slots are claimed in ``ledgers``.

    copy_lane, kernel_lane  the lanes it uses; last_lane the one that everything has passed when the last event has
    """

    copy_lane: str
    kernel_lane: str
    last_lane: str

    def __init__(
        self, shop: Workshop, handle: TransferHandle, fences: Sequence[Event], ledgers: Sequence[PageLedger]
    ) -> None:
        self.shop, self.handle = shop, handle
        self.plan: Plan = handle.plan
        self.spec: KVSpec = shop.pool.spec
        self.fences = fences
        self.ledgers = ledgers
        self.earlier: list[Transfer] = []
        self.started = False
        self.in_pump = False  # which will acknowledge it, or has
        self.watch: Watch | None = None  # of the engine's thread while it rests
        self.late = False  # its deadline passed while it was in flight
        self.by_caller = False  # its caller submits it layer by layer
        self.handed_over = False  # the submitter has it
        self._next = 0
        self._began = 0.0
        self._nothing_written = False
        self._status: torch.Tensor | None = None
        self._status_back: torch.Tensor | None = None
        self._times: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    # -- what the pump asks -------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether `start`, or then the next chunk, can be submitted without waiting for anything."""
        return self.started or all(
            e.handle.done() or (self.waits_by_event(e) and e.handle.ask_submitted()) for e in self.earlier
        )

    def waits_by_event(self, other: Transfer) -> bool:
        """Whether a lane of this transfer can wait for an event of ``other``: a CPU engine and a GPU engine on one
        slab can only wait until the other is done."""
        return other.shop.on_gpu == self.shop.on_gpu

    @property
    def chunks_left(self) -> bool:
        return self._next < len(self.plan.chunks)

    def start(self) -> None:
        """Fences, ids and scratch; once, before the first chunk. Under the shop's lock."""
        lanes = self.shop.lanes
        self.started = True
        self._began = time.monotonic()
        if not self.scripted:  # a job waits itself, behind those that were handed over before it
            self._wait_on_lanes()
        self.prepare()
        if isinstance(lanes, CudaLanes) and not self.scripted:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(lanes.streams[self.first_lane()])
            self._times = (begin, end)

    def waits(self) -> list[tuple[str, Event]]:
        """(lane, event) of all that must have passed before its first chunk: fences, and transfers before it."""
        found: list[tuple[str, Event]] = []
        for lane in dict.fromkeys((self.copy_lane, self.kernel_lane)):
            found += [(lane, event) for event in (self.fences if self.touches_pool(lane) else ())]
            for other in self.earlier:
                if other.handle.final_event is not None and self.waits_by_event(other):
                    found.append((lane, other.handle.final_event))
        return found

    def _wait_on_lanes(self) -> None:
        for lane, event in self.waits():
            self.shop.lanes.wait(lane, event)

    @property
    def scripted(self) -> bool:
        """Whether `hand_over` gives all its chunks to the submitter, instead of `next_chunk` one by one."""
        return False

    def hand_over(self) -> bool:
        """Once started: False where it has to be tried again. Otherwise (and after an error that left it `handed_over`)
        `take_back` until that says True, and `finish` where the handle has no last event by then."""
        raise TransferError("this kind of transfer is submitted chunk by chunk")

    def take_back(self) -> bool:
        """Whether the submitter is through with it; see `hand_over`."""
        return True

    def watched(self, rest: Rest) -> Watch | None:
        """Have ``rest`` wake its thread once there is something to do about it; None where that has to look itself."""
        return None

    def count_submitted(self) -> None:
        """After a script: what the handle knows of."""
        self._next = self.handle.chunks_submitted

    def next_chunk(self) -> None:
        """Submit the next chunk in order. Under the shop's lock, when `ready`."""
        self.submit(self.plan.chunks[self._next])

    def submit(self, chunk: Chunk) -> None:
        """Submit one chunk and tell the handle."""
        if self.shop.observer.spans:
            with self.span("layers", "", chunk):
                self._submit(chunk)
        else:
            self._submit(chunk)

    def _submit(self, chunk: Chunk) -> None:
        self.shop.lanes.owner = self.handle
        self._next += 1
        self.handle.chunk_begun(chunk)
        self.handle.chunk_submitted(chunk, self.move(chunk))

    @property
    def expected_end(self) -> float:
        """When its last byte should have landed, on the clock of `time.monotonic`; 0 where nobody knows."""
        predicted = self.plan.predicted
        return 0.0 if predicted is None or not self.started else self._began + predicted.seconds

    def finish(self) -> None:
        """Everything that will be submitted has been: record the last event. An error on the way is the handle's."""
        try:
            self._finish()
        except Exception as error:  # kept: it is the transfer's error
            self.handle.fail(as_transfer_error(error))

    def _finish(self) -> None:
        lanes = self.shop.lanes
        if self.scripted:  # its job may have ended before it waited, and who comes behind it asks it alone
            self._wait_on_lanes()
        for lane in (self.copy_lane, self.kernel_lane):
            if lane != self.last_lane:
                lanes.wait(self.last_lane, lanes.record(lane))
        if isinstance(lanes, CudaLanes):
            try:
                with lanes.on(self.last_lane):
                    self.fetch_results()
                    if self._status is not None and self._status_back is None:
                        self._status_back = self.fetch(self._status)
            except Exception as error:  # kept; what is in flight owns its pages until the last event has passed
                self.handle.fail(as_transfer_error(error))
            if self._times is not None:
                self._times[1].record(lanes.streams[self.last_lane])
        self.handle.keep.append(self)
        self.handle.all_submitted(lanes.record(self.last_lane))

    def judge(self) -> Verdict | None:
        """The last event has passed, or nothing was submitted: find what went wrong. Under the shop's lock.

        Fails the handle where pages can't be used; None where there is nothing to judge.
        """
        if self._status_back is not None:
            message = check.explain_status(self._status_back.tolist(), self.shop.pool.num_pages, self.id_name)
            if message:
                self._nothing_written = True
                self.handle.fail(LayoutError(message))
        error = self._lane_error()
        if error is not None:
            self.handle.fail(error)
        whole = not self.handle.failed and not self.chunks_left
        verdict = self.settle(whole)
        if verdict is not None and verdict.bad_pages:
            some = list(verdict.bad_pages[:8])
            self.handle.fail(
                TransferError(f"pages at positions {some} do not verify: treat them as misses", verdict.bad_pages)
            )
        return verdict

    def acknowledge(self, verdict: Verdict | None) -> None:
        """Free the ids for others and tell the caller."""
        bad = np.asarray(verdict.bad_pages if verdict is not None else (), dtype=np.int64)
        if self.handle.broken:
            # A step failed: the CPU's lanes passed the later events without moving anything.
            bad = np.flatnonzero(self.handle.states() == PageState.DONE)
        seconds = time.monotonic() - self._began if self.started else 0.0
        try:
            if self._times is not None and self.handle.final_event is not None:
                seconds = self._times[0].elapsed_time(self._times[1]) / 1e3
        except RuntimeError as error:  # kept: CUDA is lost
            self.handle.fail(as_transfer_error(error))
        for ledger in self.ledgers:
            ledger.release(self)
        self.earlier = []
        self.handle.end(verdict, seconds, bad, nothing_written=self._nothing_written)

    def force_flags(self) -> None:  # noqa: B027  (most kinds have none)
        """At a deadline: let go whoever waits for a flag that may never come. Nothing to do without flags."""

    # -- what a kind of transfer fills in -----------------------------------------------------------

    @property
    def id_name(self) -> str:
        """What its GPU ids are called in messages."""
        return f"{self.shop.pool.name} page"

    def touches_pool(self, lane: str) -> bool:
        """Whether work on ``lane`` reads or writes pool memory, and so must wait for the fences."""
        return True

    def first_lane(self) -> str:
        """The lane on which the first byte moves: where the clock starts."""
        return self.kernel_lane

    @abstractmethod
    def prepare(self) -> None:
        """Ids and scratch on the kernel lane, after the fences."""

    @abstractmethod
    def move(self, chunk: Chunk) -> Event:
        """Enqueue one chunk; returns the event after which it has landed."""

    def fetch_results(self) -> None:  # noqa: B027  (most kinds have none)
        """On a GPU, on the last lane: copies of results to the host."""

    @abstractmethod
    def settle(self, whole: bool) -> Verdict | None:
        """After the last event: keep or compare digests. ``whole``: every chunk landed and nothing failed."""

    # -- small parts --------------------------------------------------------------------------------

    def upload(self, ids: Ids) -> torch.Tensor:
        """Ids to the GPU on the current stream; the pinned copy is kept by the handle."""
        pinned = torch.from_numpy(ids).pin_memory()
        self.handle.keep.append(pinned)
        return pinned.to(self.shop.pool.device, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy, enqueued on the current stream; valid once that stream has got there."""
        back = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        back.copy_(tensor, non_blocking=True)
        return back

    def check_on_gpu(self, ids: torch.Tensor, limit: int) -> None:
        """Enqueue the check of ids on the current stream (the kernel lane's); its status gates the launches."""
        shop = self.shop
        key = (self.kernel_lane, limit)
        if key not in shop.seen:
            shop.seen[key] = torch.zeros(limit, dtype=torch.int32, device=shop.pool.device)
        fresh = torch.tensor(check.fresh_status(), dtype=torch.int32).pin_memory()
        self.handle.keep.append(fresh)
        self._status = fresh.to(shop.pool.device, non_blocking=True)
        check.check_ids(ids, limit, self._status, shop.seen[key], next(shop.stamps))

    def tell(self, stage: str, chunk: Chunk) -> None:
        """Tell the observer of one stage of a chunk."""
        layers = (chunk.box.layer_start, chunk.box.layer_stop)
        self.shop.observer.submitted(self.handle.number, stage, layers, chunk.count, self._bytes(chunk))

    def span(self, name: str, lane: str, chunk: Chunk) -> AbstractContextManager[None]:
        """Around the enqueueing of work for ``chunk`` on ``lane`` ("": on none); where the observer wants spans."""
        layers = (chunk.box.layer_start, chunk.box.layer_stop)
        stream = self.shop.lanes.streams[lane] if lane else None
        span = Span(
            name, self.handle.number, self.plan.direction, lane, layers, chunk.count, self._bytes(chunk), stream
        )
        return self.shop.observer.span(span)

    def relayout(self, stage: str, lane: str, chunk: Chunk, task: RelayoutTask) -> None:
        """Enqueue one relayout of ``chunk`` on ``lane``."""
        if self.shop.observer.spans:
            with self.span(stage, lane, chunk):
                self.shop.lanes.relayout(lane, task)
        else:
            self.shop.lanes.relayout(lane, task)

    def _bytes(self, chunk: Chunk) -> int:
        box: Box = chunk.box
        return chunk.count * box_bytes(self.spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)

    def _lane_error(self) -> KVTransferError | None:
        """What went wrong on the CPU's lanes outside any transfer's steps (a gate that stayed shut); taken off them."""
        lanes = self.shop.lanes
        cause = getattr(self.handle.final_event, "error", None)
        if cause is None or not isinstance(lanes, CpuLanes):
            return None
        for stream in lanes.streams.values():
            stream.take_error()
        error = TransferError(f"the transfer failed: {cause!r}", range(self.plan.pages))
        error.__cause__ = cause
        return error
