"""GPU events that keep the GIL.

PyTorch gives the GIL away to record an event, to wait for one and to free one. Each takes a microsecond; to get it
back takes 5 ms where another Python thread computes, and a load needs some of them before its first byte moves: on an
H200 `load` held its caller for 11 ms, and each wait for a layer for 5 ms.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import byref, c_void_p
from typing import Protocol

from kvtransfer.dma import CopyEngine
from kvtransfer.kernels.errors import CudaError

_WITHOUT_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class RawStream(Protocol):
    """A stream by its driver handle, such as ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int: ...


class GpuEvents:
    """Makes events of the CUDA context of ``stream`` (a driver handle, no default stream's). Thread-safe; the calling
    thread may have another context, or none."""

    def __init__(self, engine: CopyEngine, stream: int) -> None:
        self._engine = engine
        self._context = engine.context_of(stream)

    def mark(self, stream: RawStream) -> GpuEvent:
        """A new event after all that ``stream``, one of the context's, has been given. Raises CudaError."""
        event = GpuEvent(self)
        event.record(stream)
        return event

    def enter(self) -> None:
        """Make the context the calling thread's own, for C of ours on it that asks for events."""
        self._engine.must("cuCtxSetCurrent", self._context)

    def code(self, symbol: str, *arguments: object) -> int:
        """What a driver function says in the events' context: the default stream's handle is 0 in every one."""
        engine = self._engine
        function = engine.function(symbol)
        if engine.current_context() == self._context:
            return function(*arguments)
        engine.must("cuCtxPushCurrent", self._context)
        try:
            return function(*arguments)
        finally:
            engine.must("cuCtxPopCurrent", byref(c_void_p()))

    def call(self, symbol: str, *arguments: object) -> None:
        """`code`, where all but 0 raises CudaError."""
        if code := self.code(symbol, *arguments):
            raise self.error(symbol, code)

    def error(self, symbol: str, code: int) -> CudaError:
        """What a failed call raises."""
        return self._engine.error(symbol, code)


class GpuEvent:
    """An event without timing, with the verbs of ``torch.cuda.Event``; ``torch.cuda.Stream.wait_event`` takes it.

    cuda_event  the driver's handle
    """

    __slots__ = ("_events", "cuda_event")

    def __init__(self, events: GpuEvents) -> None:
        self._events, self.cuda_event = events, 0
        handle = c_void_p()
        events.call("cuEventCreate", byref(handle), _WITHOUT_TIMING)
        self.cuda_event = handle.value or 0

    def record(self, stream: RawStream) -> None:
        """It has passed once all that ``stream`` was given so far is through. Raises CudaError."""
        self._events.call("cuEventRecord", self.cuda_event, stream.cuda_stream)

    def wait(self, stream: RawStream) -> None:
        """Later work of ``stream`` starts after it; the caller is not held. Raises CudaError.

        Of another GPU it may be any but the default stream, whose handle is the same on all."""
        self._events.call("cuStreamWaitEvent", stream.cuda_stream, self.cuda_event, 0)

    def query(self) -> bool:
        """Whether it has passed, or was never recorded. Raises CudaError where CUDA is lost."""
        code = self._events.code("cuEventQuery", self.cuda_event)
        if code not in (0, _NOT_READY):
            raise self._events.error("cuEventQuery", code)
        return code == 0

    def __del__(self) -> None:
        if self.cuda_event:
            with suppress(CudaError):  # at the end of the process the driver may be gone
                self._events.call("cuEventDestroy", self.cuda_event)
