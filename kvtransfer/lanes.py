"""Lanes: the four queues of an engine, with one set of verbs for a GPU and for the CPU.

``copy_in`` and ``copy_out`` carry the copy engine's work, ``scatter`` and ``gather`` the kernels'. On a GPU a
lane is a CUDA stream and a verb enqueues at once; on the CPU it is a `FifoStream` and a verb enqueues a
closure, which tests may delay. What is above (the engine, its order of waits, the ring) is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.dma import Copier, CopyEngine
from kvtransfer.fifo import Delays, FifoEvent, FifoStream
from kvtransfer.gpu_events import GpuEvent, GpuEvents
from kvtransfer.kernels import relayout as relayout_kernels
from kvtransfer.kernels.coalesce import Geometry
from kvtransfer.kernels.digest import box_digests
from kvtransfer.kernels.errors import CudaError, KVTransferError, TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.kernels.table import CopyTable
from kvtransfer.pool import Stream

LANES = ("copy_in", "copy_out", "scatter", "gather")


def lanes_of(load: bool) -> tuple[str, str]:
    """(copy lane, kernel lane) of a direction."""
    return ("copy_in", "scatter") if load else ("copy_out", "gather")


U64 = NDArray[np.uint64]
CudaEvent = torch.cuda.Event | GpuEvent
Event = CudaEvent | FifoEvent


@dataclass(frozen=True)
class RelayoutTask:
    """One relayout: tensors for the CPU, a table with resolved addresses for a GPU.

    Ids are int64 tensors on the lanes' device, or None: page i lies at i. ``first`` and ``count`` choose the part
    of the ids that this launch moves; the side without ids starts at page 0. ``digests`` int64 [>= first + count,
    layers] gets the sums of rows first to first + count - 1.
    """

    spec: KVSpec
    geometry: Geometry
    table: CopyTable | None
    src: Sequence[torch.Tensor]
    dst: Sequence[torch.Tensor]
    src_ids: torch.Tensor | None
    dst_ids: torch.Tensor | None
    first: int
    count: int
    packed: Callable[[], torch.Tensor] | None  # CPU digests: uint8 [count, bytes of the box], page-first, when run
    src_shift: int = 0
    dst_shift: int = 0
    digests: torch.Tensor | None = None
    status: torch.Tensor | None = None
    store: bool = True


class Owner(Protocol):
    """The transfer whose work is being enqueued: on the CPU it is told of a step that fails."""

    @property
    def broken(self) -> bool: ...
    def step_failed(self, error: KVTransferError) -> None: ...


def as_transfer_error(error: BaseException) -> KVTransferError:
    """Our own errors as they are; anything else (a CUDA error out of torch, say) as a TransferError from it."""
    if isinstance(error, KVTransferError):
        return error
    wrapped = TransferError(f"a step of the transfer failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped


class Lanes(Protocol):
    """See `CudaLanes`; both classes have the same verbs. ``owner`` is set before a transfer enqueues."""

    device: torch.device
    copier: Copier
    owner: Owner | None

    def mark(self, stream: Stream) -> Event: ...
    def record(self, lane: str) -> Event: ...
    def wait(self, lane: str, event: Event) -> None: ...
    def let_others_in(self, lane: str) -> None: ...
    def batch(self, lane: str, dst: U64, src: U64, sizes: U64, *, any_order: bool) -> None: ...
    def copy_2d(
        self, lane: str, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int
    ) -> None: ...
    def relayout(self, lane: str, task: RelayoutTask) -> None: ...
    def close(self) -> None: ...


def word_to_pass(device: torch.device, copier: Copier, stream: int, observer: Observer) -> torch.Tensor | None:
    """[1] int32 on the device, which stays 0, for `CudaLanes.let_others_in`. None where streams can't wait for a word
    (torch's own copies), or not for this one (said through the observer: managed memory, say): it is a courtesy, and
    transfers go on without. Enqueues one such wait on ``stream``; zeros on torch's current stream."""
    if not copier.supports_flags:
        return None
    word = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        copier.wait_value(stream, word.data_ptr(), 0)
    except CudaError as error:
        observer.fell_back("small copies of others", f"{error}; they may wait for the end of a transfer")
        return None
    return word


class CudaLanes:
    """Four streams of one device, none of them the legacy stream, of default priority (a high one lost, see
    docs/decisions.md). Verbs may be called from any thread, under the engine's lock.
    """

    def __init__(self, device: torch.device, observer: Observer, copier: Copier | None = None) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.streams = {lane: torch.cuda.Stream(device=device) for lane in LANES}
            self._aside = torch.cuda.Stream(device=device)
            self.copier = copier if copier is not None else CopyEngine.create(device, observer=observer)
            raw = self._aside.cuda_stream
            self._events = GpuEvents(self.copier, raw) if isinstance(self.copier, CopyEngine) else None
        with self.aside():
            self.word = word_to_pass(device, self.copier, self._aside.cuda_stream, observer)
        self._aside.synchronize()  # its 0 is there before a lane looks
        self.owner: Owner | None = None

    def on(self, lane: str) -> AbstractContextManager[Any]:
        """The lane's stream as the current one (and its device), for torch and Triton."""
        return torch.cuda.stream(self.streams[lane])

    def aside(self) -> AbstractContextManager[Any]:
        """A stream that is no lane as the current one: for uploads that hold the calling thread until it is through."""
        return torch.cuda.stream(self._aside)

    def adopt_thread(self) -> None:
        """For a thread of the engine's own, which polls: the device and its context are its own from now on, and it
        leaves other people's captures alone."""
        torch.cuda.set_device(self.device)
        self.copier.leave_captures_alone()
        if self._events is not None:
            self._events.enter()

    def mark(self, stream: Stream) -> CudaEvent:
        """A new event after everything that ``stream``, of this device, has been given so far."""
        assert not isinstance(stream, FifoStream)
        if self._events is not None:
            return self._events.mark(stream)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def record(self, lane: str) -> CudaEvent:
        """`mark` of a lane."""
        return self.mark(self.streams[lane])

    def wait(self, lane: str, event: Event) -> None:
        """Later work of the lane starts after ``event``; the caller is not held."""
        assert not isinstance(event, FifoEvent)
        event.wait(self.streams[lane])

    def let_others_in(self, lane: str) -> None:
        """Before a chunk's copies: small ones of others, that have to wait for a kernel of theirs, come in between.
        They are kept out while one stream has copies on end (docs/performance.md, "Small copies of others")."""
        if self.word is not None:
            self.copier.wait_value(self.streams[lane].cuda_stream, self.word.data_ptr(), 0)

    def batch(self, lane: str, dst: U64, src: U64, sizes: U64, *, any_order: bool) -> None:
        """Copy-engine batch (`kvtransfer.dma.Copier.batch`)."""
        self.copier.batch(dst, src, sizes, self.streams[lane].cuda_stream, any_order=any_order)

    def copy_2d(self, lane: str, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int) -> None:
        """Strided copy (`kvtransfer.dma.Copier.copy_2d`)."""
        self.copier.copy_2d(dst, dst_pitch, src, src_pitch, width, height, self.streams[lane].cuda_stream)

    def relayout(self, lane: str, task: RelayoutTask) -> None:
        """One kernel launch."""
        if task.table is None:
            raise TransferError("relayout on a GPU: expected a table")
        with self.on(lane):
            relayout_kernels.relayout(
                task.table,
                task.count,
                src_ids=task.src_ids,
                dst_ids=task.dst_ids,
                src_first=task.first if task.src_ids is not None else 0,
                dst_first=task.first if task.dst_ids is not None else 0,
                src_shift=task.src_shift,
                dst_shift=task.dst_shift,
                status=task.status,
                digests=None if task.digests is None else task.digests[task.first : task.first + task.count],
                store=task.store,
            )

    def close(self) -> None:
        """Streams are torch's; nothing to give back."""


class CpuLanes:
    """Four FIFO threads over CPU tensors. ``delays`` holds closures back by label: the lane's name.

    Runs the plain-torch references, never Triton: its interpreter is not thread-safe.
    """

    def __init__(self, delays: Delays | None = None) -> None:
        self.device = torch.device("cpu")
        self.streams = {lane: FifoStream(lane, delays) for lane in LANES}
        self.copier = CopyEngine.create(self.device)
        self.owner: Owner | None = None

    def mark(self, stream: Stream) -> FifoEvent:
        assert isinstance(stream, FifoStream)
        return stream.record()

    def record(self, lane: str) -> FifoEvent:
        return self.streams[lane].record()

    def wait(self, lane: str, event: Event) -> None:
        assert isinstance(event, FifoEvent)
        self.streams[lane].wait(event)

    def let_others_in(self, lane: str) -> None:
        """Nothing queues for a link here."""

    def batch(self, lane: str, dst: U64, src: U64, sizes: U64, *, any_order: bool) -> None:
        self._put(lane, lambda: self.copier.batch(dst, src, sizes, 0, any_order=any_order))

    def copy_2d(self, lane: str, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int) -> None:
        self._put(lane, lambda: self.copier.copy_2d(dst, dst_pitch, src, src_pitch, width, height, 0))

    def relayout(self, lane: str, task: RelayoutTask) -> None:
        self._put(lane, lambda: run_on_cpu(task))

    def _put(self, lane: str, step: Callable[[], None]) -> None:
        """Enqueue for the current owner. Its failure is its own: it skips the owner's later steps and nobody else's."""
        owner = self.owner

        def run() -> None:
            if owner is not None and owner.broken:
                return
            try:
                step()
            except BaseException as error:  # kept: it is the transfer's error
                if owner is None:
                    raise
                owner.step_failed(as_transfer_error(error))

        self.streams[lane].submit(run, lane)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def run_on_cpu(task: RelayoutTask) -> None:
    """What a relayout launch does, by the plain-torch reference. Mutates ``dst`` and ``digests``."""
    part = slice(task.first, task.first + task.count)
    here = torch.arange(task.count)
    if task.store:
        relayout_kernels.relayout_reference(
            task.geometry,
            task.src,
            task.dst,
            here if task.src_ids is None else task.src_ids[part],
            here if task.dst_ids is None else task.dst_ids[part],
        )
    if task.digests is None:
        return
    if task.packed is None:
        raise TransferError("digests on the CPU: expected a way to the page-first bytes")
    sums = box_digests(task.packed().numpy(), task.spec, task.geometry.box)
    task.digests[part] += torch.from_numpy(sums.view(np.int64))
