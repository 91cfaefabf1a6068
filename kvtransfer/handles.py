"""TransferHandle: what a caller holds of a transfer. It answers a layer and a page, and never hangs.

Waits come in two kinds. ``wait_layer`` and ``wait_all`` make a *stream* wait (on the CPU: the caller, unless
a stream is given) and hold the calling thread only until the work they wait for has been submitted.
``result`` and ``verdict`` hold the calling thread until the transfer has ended. All of them end with an
error at the transfer's deadline.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.fifo import FifoEvent, FifoStream
from kvtransfer.kernels.callbacks import call_subscriber, future_and_waker
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import (
    CudaError,
    DeadlineExceeded,
    KVTransferError,
    LayoutError,
    TransferCancelled,
    TransferError,
)
from kvtransfer.kernels.events import Observer, Span
from kvtransfer.lanes import Event
from kvtransfer.plan import Chunk, Plan
from kvtransfer.pool import KVPool, Stream, is_capturing
from kvtransfer.script_waits import ScriptWaits
from kvtransfer.verdict import Verdict

if TYPE_CHECKING:
    from kvtransfer.dma import Copier
    from kvtransfer.submitter import Job


class PageState(IntEnum):
    """What a transfer left of one page."""

    UNTOUCHED = 0  # nothing was written at the destination
    DONE = 1  # every byte is there
    INVALID = 2  # some bytes were or may have been written, or they do not verify


@dataclass(frozen=True)
class TransferResult:
    """A transfer that ended well. ``seconds`` runs from its first copy to its last, on the GPU's clock where there is
    one."""

    pages: int
    total_bytes: int
    seconds: float
    path: str

    @property
    def gbps(self) -> float:
        """GB/s, GB = 1e9 bytes; 0 for an empty transfer."""
        return self.total_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class LayerFlags:
    """Release flags of a mapped launch: layer i is there when the uint32 at ``address + 4 * i`` reaches ``target``."""

    copier: Copier
    address: int
    target: int
    memory: torch.Tensor


@dataclass
class _Running:
    """A job under way: see `TransferHandle.script_started`. ``seen`` of its chunks have been taken note of."""

    job: Job
    await_chunks: Callable[[Job, int], None]
    chunks: list[tuple[Chunk, Event]]
    seen: int = 0


class TransferHandle:
    """Made by `TransferEngine.load`, ``store`` and ``copy``. Thread-safe. Keeps alive what the transfer uses."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        pool: KVPool,
        deadline_s: float,
        observer: Observer,
        *,
        target: KVPool | None = None,
        on_engine_thread: Callable[[], bool] = lambda: False,
        wake_engine: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self.plan = plan
        self.deadline_s = deadline_s
        self._pool = pool
        self._target = pool if target is None else target  # of a device copy: its streams may wait too
        self._on_engine_thread = on_engine_thread
        self._wake_engine = wake_engine
        self._observer = observer
        self._deadline = time.monotonic() + deadline_s
        self._changed = Condition()
        layers = pool.spec.num_layers
        self._chunks_left = [*plan.chunks_a_layer, *[0] * (layers - len(plan.chunks_a_layer))]  # not yet submitted
        self._layer_event: list[Event | None] = [None] * layers
        self._begun: list[Chunk] = []  # chunks of which something may have been enqueued
        self._submitted: list[tuple[Chunk, Event]] = []
        self._flags: LayerFlags | None = None
        self._script: _Running | None = None
        self._short: ScriptWaits | None = None
        self._final: Event | None = None
        self._ended = False
        self._cancelled = False
        self._broken = False
        self._abandoned = False
        self._error: KVTransferError | None = None
        self._verdict: Verdict | None = None
        self._seconds = 0.0
        self._nothing_written = False
        self._states: NDArray[np.int8] | None = None  # once ended: its events may be others' by then
        self._bad: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._callbacks: list[Callable[[TransferHandle], object]] = []
        self._wakers: list[Callable[[], object]] = []  # of coroutines: also at the deadline, which `result` ends at
        self._write_layer: Callable[[int, Stream | None], None] | None = None
        self.keep: list[Any] = []  # buffers, index tensors and events that the GPU still uses

    # -- for callers ------------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        return self.plan.total_bytes

    @property
    def num_layers(self) -> int:
        return len(self._layer_event)

    @property
    def seconds(self) -> float:
        """Time from the first copy to the last; 0 until the transfer has ended."""
        return self._seconds

    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Never waits."""
        return self._ended

    def wait_layer(self, layer: int, stream: Stream | None = None) -> None:
        """Make ``stream`` (default: the current one; on the CPU the calling thread) wait until ``layer`` is there.

        Raises LayoutError for a layer that is not there, TransferError for an undeclared stream, inside graph
        capture, or when the transfer failed, TransferCancelled, DeadlineExceeded.
        """
        if not 0 <= layer < len(self._layer_event):
            raise LayoutError(f"wait_layer: expected 0 to {len(self._layer_event) - 1}, got {layer}")
        if self._write_layer is not None and self._chunks_left[layer] and self._error is None:
            raise TransferError(
                f"wait_layer({layer}): this store moves it after layer_written({layer}), which is to come"
            )
        started = time.monotonic()
        short = self._short
        plain = stream is None and self._error is None and not self._observer.spans
        if short is not None and plain and short.wait(layer, landed=self._ended):
            self._observer.waited(self.number, layer, time.monotonic() - started)
            return
        consumer = self._consumer(stream, "wait_layer")
        if short is not None and isinstance(consumer, torch.cuda.Stream) and stream is None:
            short.allow(consumer)
        if self.plan.pages:

            def look() -> Event | None:
                return self._layer_event[layer] if self._chunks_left[layer] == 0 else None

            if self._observer.spans:
                with self._span("wait_layer", layer, consumer):
                    self._hold(consumer, self._recorded(look, layer), layer)
            else:
                self._hold(consumer, self._recorded(look, layer), layer)
        self._observer.waited(self.number, layer, time.monotonic() - started)

    def wait_all(self, stream: Stream | None = None) -> None:
        """`wait_layer` for every layer at once: blocks until all is submitted, then one wait on ``stream``.

        What a full CUDA graph needs: call it before ``graph.replay()``, on the stream of the replay.
        """
        if self._write_layer is not None and any(self._chunks_left) and self._error is None:
            raise TransferError("wait_all: this store moves a layer after layer_written, and some are to come")
        consumer = self._consumer(stream, "wait_all")
        if self.plan.pages:
            self._hold(consumer, self._recorded(lambda: self._final), None)

    def result(self, timeout_s: float | None = None) -> TransferResult:
        """Hold the caller until the transfer has ended. Raises what ended it; TransferError names bad pages.

        DeadlineExceeded at ``timeout_s`` leaves the transfer running.
        """
        self._join(timeout_s, "result")
        if self._error is not None:
            raise self._error
        return TransferResult(self.plan.pages, self.total_bytes, self._seconds, self.plan.path)

    def verdict(self, timeout_s: float | None = None) -> Verdict:
        """The verdict on a load's bytes; read it before a token is emitted or KV is published.

        Raises what ended the transfer, unless that was the verdict itself.
        """
        self._join(timeout_s, "verdict")
        if self._verdict is None:
            assert self._error is not None
            raise self._error
        return self._verdict

    def pages_done(self) -> NDArray[np.bool_]:
        """For each page of the call, whether all of it has landed. Never waits. Not yet verified: see `verdict`."""
        return np.asarray(self.states() == PageState.DONE)

    def states(self) -> NDArray[np.int8]:
        """`PageState` of each page, as far as known now; final once `done`. Never waits."""
        with self._changed:
            if self._states is not None:
                return self._states.copy()
        pages = self.plan.pages
        if self._nothing_written:
            return np.zeros(pages, dtype=np.int8)
        touched = np.zeros(pages, dtype=np.int32)
        landed = np.zeros(pages, dtype=np.int32)
        wanted = np.zeros(pages, dtype=np.int32)
        for chunk in self.plan.chunks:
            wanted[chunk.first : chunk.first + chunk.count] += 1
        self.poll()
        with self._changed:
            begun, submitted, bad = list(self._begun), list(self._submitted), self._bad
        for chunk in begun:
            touched[chunk.first : chunk.first + chunk.count] += 1
        for chunk, event in submitted:
            landed[chunk.first : chunk.first + chunk.count] += _landed(event)
        states = np.where(touched > 0, PageState.INVALID, PageState.UNTOUCHED).astype(np.int8)
        states[landed == wanted] = PageState.DONE
        states[bad] = PageState.INVALID
        with self._changed:  # once it has ended its events may be another transfer's
            return states if self._states is None else self._states.copy()

    def cancel(self) -> bool:
        """Submit nothing more. True if that kept a page back; what was submitted lands and is reported as such.

        Pages stay owned until the work in flight is through; `result` then raises TransferCancelled.
        """
        with self._changed:
            self.poll()
            if self._ended or self._final is not None or self._cancelled or not any(self._chunks_left):
                return False
            self._cancelled = True
            self.stop_script()
            self._changed.notify_all()
        self._wake_engine()
        return True

    def add_done_callback(self, fn: Callable[[TransferHandle], object]) -> None:
        """Call ``fn(handle)`` once the transfer has ended: on the engine's thread, or here if it has."""
        with self._changed:
            if not self._ended:
                self._callbacks.append(fn)
                return
        fn(self)

    def layer_written(self, layer: int, stream: Stream | None = None) -> None:
        """Layer-wise store: the work enqueued on ``stream`` (default: the current) has written ``layer``; let it go.

        Raises TransferError for other transfers and for a layer given twice.
        """
        if not (self.plan.layerwise and self.plan.direction == "store"):
            raise TransferError("layer_written: expected a handle of store(..., layerwise=True)")
        if not 0 <= layer < len(self._layer_event):
            raise LayoutError(f"layer_written: expected 0 to {len(self._layer_event) - 1}, got {layer}")
        consumer = self._consumer(stream, "layer_written")
        if self._write_layer is not None:  # a store of no pages has nothing to write
            self._write_layer(layer, consumer)

    def __await__(self) -> Generator[Any, None, TransferResult]:
        future, wake = future_and_waker()
        with self._changed:
            if self._ended or self._waits_no_more:
                wake()
            else:
                self._wakers.append(wake)
        yield from future.__await__()
        return self.result(0)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"TransferHandle({self.plan.direction} of {self.plan.pages} pages by {self.plan.path}, {state})"

    # -- for the engine and the hooks -------------------------------------------------------------

    @property
    def observer(self) -> Observer:
        return self._observer

    def computing(self, layer: int) -> AbstractContextManager[None]:
        """Around the work of ``layer``'s forward on the current stream; where the observer wants spans."""
        on_gpu = self._pool.device.type == "cuda"
        return self._span("compute", layer, torch.cuda.current_stream(self._pool.device) if on_gpu else None)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def broken(self) -> bool:
        """Whether a step failed on the CPU's lanes: its later steps are skipped."""
        return self._broken

    @property
    def fully_submitted(self) -> bool:
        """Whether every event of the transfer has been recorded (or it will record no more)."""
        return self._final is not None or self._ended

    @property
    def final_event(self) -> Event | None:
        return self._final

    @property
    def deadline(self) -> float:
        """On the clock of `time.monotonic`."""
        return self._deadline

    def expired(self) -> bool:
        return time.monotonic() > self._deadline

    def ask_submitted(self) -> bool:
        """`fully_submitted`, and where nobody has looked at the end of its job yet, have that done: the engine's thread
        rests until all has landed, and those of other engines would wait so long."""
        script = self._script
        if script is not None and script.job.ended and not self._on_engine_thread():
            self._wake_engine()
        return self.fully_submitted

    def await_submitted(self, timeout_s: float) -> bool:
        """Hold the caller until the transfer records no more events; False when the time is up."""
        until = time.monotonic() + timeout_s
        while not self.fully_submitted and (left := until - time.monotonic()) > 0:
            script = self._script
            if script is None:
                with self._changed:
                    self._changed.wait_for(lambda: self.fully_submitted or self._script is not None, left)
            else:
                self._await_script(script, len(script.chunks) + 1, left)
        return self.fully_submitted

    def chunk_begun(self, chunk: Chunk) -> None:
        """Before its first copy is enqueued: its pages are not untouched any more."""
        with self._changed:
            self._begun.append(chunk)

    @property
    def chunks_submitted(self) -> int:
        return len(self._submitted)

    def script_started(
        self, job: Job, await_chunks: Callable[[Job, int], None], chunks: list[tuple[Chunk, Event]]
    ) -> None:
        """Chunks are about to be submitted without Python: ``job`` says how many of them have been, and their events
        are recorded in that order. ``await_chunks`` holds its caller until it is so many. Told again of the same job it
        does nothing."""
        with self._changed:
            if self._script is not None:
                return
            self._begun = [chunk for chunk, _ in chunks]
            if self.plan.layerwise and self._pool.device.type == "cuda":
                events = [event for _, event in chunks if not isinstance(event, FifoEvent)]
                self._short = ScriptWaits(job, events, self.plan.chunks_until, self._pool.device)
            if self._cancelled:
                job.stop()
            self._script = _Running(job, await_chunks, chunks)  # last: half of it can be told again
            self._changed.notify_all()

    def stop_script(self) -> None:
        """Let nothing be submitted after the chunk under way."""
        script = self._script
        if script is not None:
            script.job.stop()

    def script_ended(self, *, failed: bool) -> None:
        """Nothing more of the script will be submitted; of the chunk after the last one some of it may have been."""
        self.poll()
        with self._changed:
            if self._script is not None:
                for chunk, _ in self._script.chunks[self._script.seen + failed :]:
                    self._begun.remove(chunk)
                self._script = None
            self._changed.notify_all()

    def poll(self) -> None:
        """Take note of what a job has submitted by now."""
        script = self._script
        if script is None:
            return
        with self._changed:
            done = script.job.chunks_submitted
            for chunk, event in script.chunks[script.seen : done]:
                self.chunk_submitted(chunk, event)
            script.seen = max(script.seen, done)

    def chunk_submitted(self, chunk: Chunk, event: Event) -> None:
        with self._changed:
            self._submitted.append((chunk, event))
            for layer in range(chunk.box.layer_start, chunk.box.layer_stop):
                self._chunks_left[layer] -= 1
                self._layer_event[layer] = event
            self._changed.notify_all()

    def flags_submitted(self, flags: LayerFlags) -> None:
        """Before `chunk_submitted` of a mapped launch: its layers can be waited for one by one."""
        self._flags = flags

    def all_submitted(self, final: Event) -> None:
        with self._changed:
            self._final = final
            if self._cancelled and self._error is None:  # `cancel` said True while the last chunk was on its way
                self._error = TransferCancelled("the transfer was cancelled")
            self._changed.notify_all()

    def fail(self, error: KVTransferError) -> None:
        """Waits raise from now on. The transfer ends (`end`) once what is in flight is through."""
        wakers: list[Callable[[], object]] = []
        with self._changed:
            self._error = self._error or error
            if self._waits_no_more:
                wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        self._wake_engine()  # to let nothing more be submitted
        for wake in wakers:
            call_subscriber(wake)

    def abandon(self, error: KVTransferError) -> None:
        """`fail`, and nobody will see the transfer end: `result` and its like wait no more."""
        self._abandoned = True
        self.fail(error)

    def step_failed(self, error: KVTransferError) -> None:
        """`fail`, and skip what the CPU's lanes still hold of the transfer."""
        self._broken = True
        self.fail(error)

    def end(
        self, verdict: Verdict | None, seconds: float, bad: NDArray[np.int64], *, nothing_written: bool = False
    ) -> None:
        """Acknowledge: nothing of the transfer is in flight any more. ``nothing_written``: the GPU refused the ids."""
        with self._changed:
            if self._ended:
                return
            self._verdict, self._seconds, self._bad = verdict, seconds, bad
            self._nothing_written = nothing_written
            self._states = self.states()
            if isinstance(self._error, TransferError) and not self._error.pages:
                self._error.pages = tuple(np.flatnonzero(self._states != PageState.DONE).tolist())
            self._ended = True
            self.keep.clear()
            if self._write_layer is not None:  # it holds the transfer: let go of that
                self._write_layer = _given_up if self._error is not None else _written_already
            callbacks, self._callbacks = self._callbacks, []
            wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        call_subscriber(lambda: self._observer.finished(self.number, self._error is None, seconds, self.total_bytes))
        for wake in wakers:
            call_subscriber(wake)
        for fn in callbacks:
            call_subscriber(functools.partial(fn, self))

    # -- inside -----------------------------------------------------------------------------------

    def _consumer(self, stream: Stream | None, verb: str) -> Stream | None:
        if self._pool.device.type == "cpu":
            if stream is not None:
                self._require_declared(stream)
            return stream
        if stream is None:
            stream = torch.cuda.current_stream(self._pool.device.index)
        if isinstance(stream, FifoStream):
            self._require_declared(stream)
            return stream
        if is_capturing(stream):
            raise TransferError(
                f"{verb} inside CUDA graph capture: the wait would be frozen into the graph. Capture piecewise with "
                "the hooks between the graphs, or call handle.wait_all() before graph.replay()"
            )
        self._require_declared(stream)
        return stream

    def _require_declared(self, stream: Stream) -> None:
        if not self._target.declares(stream):
            self._pool.require_declared(stream)

    def _span(self, name: str, layer: int, stream: Stream | None) -> AbstractContextManager[None]:
        span = Span(name, self.number, self.plan.direction, "compute", (layer, layer + 1), self.plan.pages, 0, stream)
        return self._observer.span(span)

    def _recorded(self, look: Callable[[], Event | None], layer: int | None = None) -> Event:
        """Hold the caller until the event that ``look`` returns (of ``layer``, or of all) has been recorded."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                self.poll()
                event = look()
                if event is not None:
                    return event
                if self._cancelled:
                    raise TransferCancelled("the transfer was cancelled before this layer was submitted")
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"not submitted within the deadline of {self.deadline_s:g} s")
                script = self._script
                if script is None:
                    self._changed.wait(left)
                    continue
            # Behind the last chunk it counts one more for its last event (`Bound.job`): what `wait_all` waits for.
            chunks = len(script.chunks) + 1 if layer is None else self.plan.chunks_until[layer]
            self._await_script(script, chunks, left)

    def _await_script(self, script: _Running, chunks: int, left_s: float) -> None:
        """Hold the caller for a while, until that job has submitted so many chunks or it was said what became of it."""
        if not script.job.ended:
            # A job tells nobody how far it is. Its own wait gives up the GIL once, and takes it back once.
            script.await_chunks(script.job, chunks)
            return
        self._wake_engine()
        with self._changed:
            if self._script is script:
                self._changed.wait(min(left_s, 0.01))

    def _hold(self, consumer: Stream | None, event: Event, layer: int | None) -> None:
        if isinstance(event, FifoEvent):
            if isinstance(consumer, FifoStream):
                consumer.wait(event)
            elif not event.synchronize(max(0.0, self._deadline - time.monotonic())):
                raise DeadlineExceeded(f"layer {layer} was not there within the deadline of {self.deadline_s:g} s")
            elif self._error is not None:
                raise self._error
            return
        assert isinstance(consumer, torch.cuda.Stream)
        if self._ended:
            return  # the host has seen all of it land, and the event may be another transfer's by now
        flags = self._flags
        if flags is not None and layer is not None:
            with torch.cuda.device(self._pool.device):  # the default stream's handle is 0 on every device
                flags.copier.wait_value(consumer.cuda_stream, flags.address + 4 * layer, flags.target)
            flags.memory.record_stream(consumer)  # the flags outlive the wait, whoever lets go of them
        else:
            event.wait(consumer)

    @property
    def _waits_no_more(self) -> bool:
        """Whether who waits for the end is to go on before it."""
        return self._abandoned or isinstance(self._error, DeadlineExceeded)

    def _join(self, timeout_s: float | None, verb: str) -> None:
        if not self._ended and self._on_engine_thread():
            raise TransferError(f"{verb}: a callback can't wait for a transfer that its own thread must end")
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._ended:
                if self.expired():  # whoever submits may be stuck itself: the deadline holds all the same
                    self.fail(DeadlineExceeded(f"{verb}: not through at the deadline of {self.deadline_s:g} s"))
                    assert self._error is not None
                    raise self._error
                if self._error is not None and self._waits_no_more:
                    raise self._error
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExceeded(f"{verb}: the transfer had not ended after {timeout_s:g} s")
                self._changed.wait(0.5 if left is None else min(left, 0.5))


def _given_up(layer: int, stream: Stream | None) -> None:
    """`layer_written` of a store that failed or was cancelled: what the layer holds is not wanted any more."""


def _written_already(layer: int, stream: Stream | None) -> None:
    raise TransferError(f"layer_written: expected each layer once, got {layer} again")


def _landed(event: Event) -> bool:
    """Whether the work before ``event`` is through, and well. False where CUDA is lost: then nobody knows."""
    try:
        return event.query() and getattr(event, "error", None) is None
    except (RuntimeError, CudaError):
        return False
