"""The copy engine: batches of copies, strided copies and 32-bit flags on CUDA streams, by the driver API.

Nothing here is asked of the driver at import. A `CopyEngine` holds function pointers that were fetched with an
explicit version, since `cuMemcpyBatchAsync` has two forms under one name: 12.8 has a failure index, 13.0 has not.
Addresses and sizes are bytes, streams are raw handles (``torch.cuda.Stream.cuda_stream``). Calls only enqueue work:
memory must stay alive, and sources unchanged, until the stream has passed the copy.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.kernels.errors import ConfigError, CudaError, LayoutError, TransferError
from kvtransfer.kernels.events import NO_OBSERVER, Observer

U64 = npt.NDArray[np.uint64]

BATCH_VERSIONS = (13000, 12080)
"""The known forms of cuMemcpyBatchAsync, newest first: 8 arguments, and 9 with a failure index."""

KEEP_GIL_BELOW = 512
"""Batches of fewer descriptors keep the GIL. A descriptor costs 0.9-1.2 us of CPU (H200, driver 580), so 512 hold it
for about 0.5 ms; giving it up beside a busy Python thread costs up to the switch interval, 5 ms (measured: forty
GIL-releasing calls went from 2 to 211 ms)."""

MAX_PITCH_BYTES = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far; cuMemcpy2DAsync refuses more."""

MEMMOVE_KEEP_GIL_BYTES = 1 << 20
"""Host pieces below this are moved with the GIL kept: 1 MiB takes about 0.1 ms, a hand-over up to 5 ms."""

_NO_INDEX = 2**64 - 1
_LEGACY_STREAMS = (0, 1)  # NULL and CU_STREAM_LEGACY
_SPECIAL_STREAMS = (0, 1, 2)  # and CU_STREAM_PER_THREAD: these mean "of the current context"
_ORDER_STREAM, _ORDER_ANY = 1, 3  # CUmemcpySrcAccessOrder
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CUmemcpyFlags
_MEMORYTYPE_UNIFIED = 4  # CUmemorytype
_WAIT_VALUE_GEQ = 0  # CUstreamWaitValue_flags: (int32)(*address - value) >= 0


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The location hints only matter for managed memory."""

    _fields_ = [("order", c_int), ("src_hint", _Location), ("dst_hint", _Location), ("flags", c_uint)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuMemcpy2DAsync_v2."""

    _fields_ = [
        *(("src_x_bytes", c_size_t), ("src_y", c_size_t), ("src_type", c_int), ("src_host", c_void_p)),
        *(("src_device", c_uint64), ("src_array", c_void_p), ("src_pitch", c_size_t)),
        *(("dst_x_bytes", c_size_t), ("dst_y", c_size_t), ("dst_type", c_int), ("dst_host", c_void_p)),
        *(("dst_device", c_uint64), ("dst_array", c_void_p), ("dst_pitch", c_size_t)),
        *(("width_bytes", c_size_t), ("height", c_size_t)),
    ]


# Name -> the version that brought the form called here, and its arguments. All return a CUresult.
_ENTRY_POINTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuGetErrorName": (6000, (c_int, c_void_p)),
    "cuGetErrorString": (6000, (c_int, c_void_p)),
    "cuCtxGetCurrent": (4000, (c_void_p,)),
    "cuCtxPushCurrent": (4000, (c_void_p,)),
    "cuCtxPopCurrent": (4000, (c_void_p,)),
    "cuCtxSetCurrent": (4000, (c_void_p,)),
    "cuStreamGetCtx": (9020, (c_void_p, c_void_p)),  # 12.5 added a third argument
    "cuStreamIsCapturing": (10000, (c_void_p, c_void_p)),
    "cuMemcpy2DAsync": (3020, (c_void_p, c_void_p)),
    "cuStreamWaitValue32": (11070, (c_void_p, c_uint64, c_uint32, c_uint)),
    "cuStreamWriteValue32": (11070, (c_void_p, c_uint64, c_uint32, c_uint)),
    "cuStreamWaitEvent": (3020, (c_void_p, c_void_p, c_uint)),
    "cuEventCreate": (2000, (c_void_p, c_uint)),
    "cuEventDestroy": (4000, (c_void_p,)),
    "cuEventRecord": (2000, (c_void_p, c_void_p)),
    "cuEventQuery": (2000, (c_void_p,)),
    "cuMemcpyAsync": (4000, (c_uint64, c_uint64, c_size_t, c_void_p)),
    "cuMemsetD8Async": (3020, (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p)),
    "cuLaunchKernel": (4000, (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p)),
    "cuThreadExchangeStreamCaptureMode": (10010, (c_void_p,)),
    "cuMemHostGetDevicePointer": (3020, (c_void_p, c_void_p, c_uint)),
}
_BATCH = "cuMemcpyBatchAsync"
_BATCH_ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)


def merge_runs(dst: U64, src: U64, sizes: U64, boundaries: U64 | None = None) -> tuple[U64, U64, U64]:
    """Merge descriptors that follow one another on both sides; the order stays. The arrays themselves if none do.

    ``boundaries`` (ascending addresses) are never merged across, on either side: pass the starts of registered chunks
    and of buffers, since one copy must not straddle two registrations or allocations. The driver does not merge
    by itself: runs of 8 neighbours of 128 KiB went from 39.6 to 52.1 GB/s.
    """
    if len(sizes) < 2:
        return dst, src, sizes
    joined = (dst[1:] == dst[:-1] + sizes[:-1]) & (src[1:] == src[:-1] + sizes[:-1])
    if boundaries is not None and len(boundaries):
        for side in (dst, src):
            part = np.searchsorted(boundaries, side, side="right")
            joined &= part[1:] == part[:-1]
    if not joined.any():
        return dst, src, sizes
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    return dst[starts], src[starts], np.add.reduceat(sizes, starts)


def check_descriptors(dst: U64, src: U64, sizes: U64) -> int:
    """The number of descriptors, or a LayoutError where the arrays can't be handed to a driver."""
    for name, array in (("dst", dst), ("src", src), ("sizes", sizes)):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.ndim != 1:
            got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise LayoutError(f"{name}: expected a one-dimensional numpy array of uint64, got {got}")
        if not array.flags.c_contiguous:
            raise LayoutError(f"{name}: expected a contiguous array, got strides {array.strides}; copy it first")
    if not len(dst) == len(src) == len(sizes):
        raise LayoutError(f"expected dst, src and sizes of one length, got {len(dst)}, {len(src)} and {len(sizes)}")
    if np.count_nonzero(sizes) != len(sizes):
        raise LayoutError(f"sizes: expected at least 1 byte each, got 0 at index {int(np.argmin(sizes))}")
    return len(sizes)


def _check_2d(dst_pitch: int, src_pitch: int, width: int, height: int) -> None:
    if width < 1 or height < 0:
        raise LayoutError(f"copy_2d: expected width >= 1 and height >= 0, got {width} bytes x {height} rows")
    for name, pitch in (("dst_pitch", dst_pitch), ("src_pitch", src_pitch)):
        if not width <= pitch <= MAX_PITCH_BYTES:
            raise LayoutError(f"copy_2d: expected {width} (width) <= {name} <= {MAX_PITCH_BYTES} bytes, got {pitch}")


def _refuse_legacy(stream: int) -> None:
    if stream in _LEGACY_STREAMS:
        raise TransferError(
            f"a batch of copies is not allowed on the legacy default stream (handle {stream}); "
            "make a stream of its own with torch.cuda.Stream() and order it by events"
        )


def _refuse_capture(stream: int) -> None:
    raise TransferError(
        f"stream {stream:#x} is being captured into a CUDA graph, and a transfer can't be part of one: "
        "submit outside the capture and call handle.wait_all() before the replay, or capture piecewise with the hooks "
        "between the graphs"
    )


class Copier(ABC):
    """What moves bytes between addresses: `CopyEngine` on a GPU, `TorchCopyEngine` elsewhere. Thread-safe."""

    name: str
    supports_flags: bool
    """Whether `wait_value` and `write_value` work."""

    @abstractmethod
    def batch(self, dst: U64, src: U64, sizes: U64, stream: int, *, any_order: bool = False) -> None:
        """Copy ``sizes[i]`` bytes from ``src[i]`` to ``dst[i]``, in no order among themselves, in order on ``stream``.

        The three arrays (uint64, contiguous, one length) are read during the call and not changed; pieces must not
        overlap. None at all is a no-op. ``any_order=True`` lets sources be read before the stream gets there: legal
        only where the *host* has already seen the last write of every source complete (a host page that no transfer
        is filling), never for what earlier work of a stream still produces.

        Raises LayoutError (arrays), TransferError (the legacy stream, a stream under capture) before anything is
        enqueued, and CudaError: then any piece may have been copied or not.
        """

    @abstractmethod
    def copy_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        """Copy ``height`` rows of ``width`` bytes, ``dst_pitch`` and ``src_pitch`` bytes apart, in stream order."""

    @abstractmethod
    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Hold ``stream`` until (int32)(*address - value) >= 0, a cyclic compare, for the uint32 at device ``address``.

        Submit the work that sets the flag first, with its modules loaded: a wait enqueued before may never end.
        """

    @abstractmethod
    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write a uint32 to device ``address`` in stream order, after a system-wide fence of the stream's writes."""

    @abstractmethod
    def stream_is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is being captured into a graph (an invalidated capture that has not ended counts)."""

    @abstractmethod
    def host_device_pointer(self, address: int) -> int:
        """The device alias of pinned or registered host memory; needs a current context. Often the same address."""

    def leave_captures_alone(self) -> None:  # noqa: B027
        """For a thread that polls: from now on its calls are not refused while another thread captures a graph in
        the global mode (torch's default), and do not break that capture. A no-op without a driver."""

    def register(self, memory: torch.Tensor | npt.NDArray[Any]) -> None:  # noqa: B027
        """Tell which memory addresses will lie in (the whole storage of a tensor). A no-op where addresses suffice."""


def _bindings_resolver() -> Callable[[str, int], int]:
    """`cuGetProcAddress` of cuda.bindings; its own exceptions (DynamicLibNotFoundError) are RuntimeErrors."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    if code := int(driver.cuInit(0)[0]):
        raise ConfigError(f"cuInit returned {code}")

    def resolve(symbol: str, version: int) -> int:
        code, address, _ = driver.cuGetProcAddress(symbol.encode(), version, 0)
        return 0 if int(code) else int(address or 0)

    return resolve


def _library_resolver(library: str | os.PathLike[str]) -> Callable[[str, int], int]:
    """`cuGetProcAddress_v2` of a driver library, by ctypes. Raises OSError, AttributeError (too old), ConfigError."""
    driver = ctypes.CDLL(os.fspath(library))
    driver.cuInit.argtypes = [c_uint]
    get_address = driver.cuGetProcAddress_v2
    get_address.argtypes = [ctypes.c_char_p, c_void_p, c_int, c_uint64, c_void_p]
    if code := int(driver.cuInit(0)):
        raise ConfigError(f"cuInit returned {code}")

    def resolve(symbol: str, version: int) -> int:
        address, status = c_void_p(), c_int()
        code = get_address(symbol.encode(), byref(address), version, 0, byref(status))
        return 0 if code else int(address.value or 0)

    return resolve


def _resolver(library: str | os.PathLike[str] | None) -> Callable[[str, int], int]:
    """A function (symbol, version) -> address, 0 where the driver lacks it. ConfigError where there is no driver."""
    failures: list[str] = []
    cause: Exception | None = None
    doors: list[tuple[str, Callable[[], Callable[[str, int], int]]]] = []
    if library is None:
        doors.append(("cuda.bindings", _bindings_resolver))
    doors.append((os.fspath(library or "libcuda.so.1"), lambda: _library_resolver(library or "libcuda.so.1")))
    for name, door in doors:
        try:
            return door()
        except (ImportError, OSError, RuntimeError, AttributeError, ConfigError) as error:
            cause = error
            failures.append(f"{name}: {error}")
    raise ConfigError(
        "no usable CUDA driver (" + "; ".join(failures) + "); expected libcuda.so.1 of CUDA 12.8 or newer and a GPU"
    ) from cause


class CopyEngine(Copier):
    """The GPU's copy engines by the driver API. Makes no context and no stream; works on all GPUs of the process.

    batch_version   12080 or 13000; None takes the newest the driver has
    library         path of the driver library; None: cuda.bindings where installed, else libcuda.so.1
    keep_gil_below  batches of fewer descriptors are submitted with the GIL kept. A stream whose queue is full blocks
                    its submitter, so work ahead of such a batch must not itself wait for Python of this process
    """

    name = "copy engine"
    supports_flags = True

    def __init__(
        self,
        *,
        batch_version: int | None = None,
        library: str | os.PathLike[str] | None = None,
        keep_gil_below: int = KEEP_GIL_BELOW,
    ) -> None:
        if batch_version is not None and batch_version not in BATCH_VERSIONS:
            raise ConfigError(f"batch_version: expected None or one of {sorted(BATCH_VERSIONS)}, got {batch_version}")
        resolve = _resolver(library)
        self._call: dict[str, Callable[..., int]] = {}
        self._addresses: dict[str, int] = {}
        for symbol, (version, arguments) in _ENTRY_POINTS.items():
            if not (address := resolve(symbol, version)):
                raise ConfigError(f"the CUDA driver has no {symbol} of version {version}; expected CUDA 12.8 or newer")
            self._call[symbol] = ctypes.PYFUNCTYPE(c_int, *arguments)(address)
            self._addresses[symbol] = address
        wanted = BATCH_VERSIONS if batch_version is None else (batch_version,)
        found = ((version, resolve(_BATCH, version)) for version in wanted)
        self.batch_version, address = next((pair for pair in found if pair[1]), (0, 0))
        if not address:
            raise ConfigError(f"the CUDA driver has no {_BATCH} of version {wanted}; expected CUDA 12.8 or newer")
        self._addresses[_BATCH] = address
        fail_index = (c_void_p,) if self.batch_version == 12080 else ()
        types = (*_BATCH_ARGUMENTS, *fail_index, c_void_p)
        self._batch_keeping_gil: Callable[..., int] = ctypes.PYFUNCTYPE(c_int, *types)(address)
        self._batch_releasing_gil: Callable[..., int] = ctypes.CFUNCTYPE(c_int, *types)(address)
        self.keep_gil_below = keep_gil_below
        no_hint = _Location(0, 0)
        flags = _PREFER_OVERLAP_WITH_COMPUTE
        self._stream_order = (_Attributes * 1)(_Attributes(_ORDER_STREAM, no_hint, no_hint, flags))
        self._any_order = (_Attributes * 1)(_Attributes(_ORDER_ANY, no_hint, no_hint, flags))
        self._first = (c_size_t * 1)(0)  # attrsIdxs: one entry for each of numAttrs=1 attributes

    @staticmethod
    def create(
        device: torch.device | str | None = None,
        *,
        batch_version: int | None = None,
        library: str | os.PathLike[str] | None = None,
        keep_gil_below: int = KEEP_GIL_BELOW,
        observer: Observer = NO_OBSERVER,
    ) -> Copier:
        """A CopyEngine, or a `TorchCopyEngine` for a CPU ``device`` (as asked) or without a usable driver (said once).

        A ``batch_version`` that was asked for and that the driver lacks raises ConfigError: no fallback.
        """
        if device is not None and torch.device(device).type == "cpu":
            return TorchCopyEngine()
        try:
            return CopyEngine(batch_version=batch_version, library=library, keep_gil_below=keep_gil_below)
        except ConfigError as error:
            if batch_version is not None:
                raise
            why = f"{error}; copies go one by one through torch, and stream flags are not available"
            observer.fell_back("copy engine", why)
            warnings.warn(f"kvtransfer: copy engine batches can't be used: {why}", RuntimeWarning, stacklevel=2)
            return TorchCopyEngine()

    def entry_points(self) -> tuple[int, ...]:
        """Addresses for `kvtransfer.submitter`, in the order of its ``driver_t``: functions (the batch in the form of
        `batch_version`), then the batch attributes in stream order and in any order. Valid as long as this engine."""
        symbols = (_BATCH, "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuMemcpyAsync",
                   "cuMemsetD8Async", "cuStreamWaitValue32", "cuCtxSetCurrent",
                   "cuThreadExchangeStreamCaptureMode")  # fmt: skip
        attributes = (ctypes.addressof(self._stream_order), ctypes.addressof(self._any_order))
        return (*(self._addresses[symbol] for symbol in symbols), *attributes)

    def current_context(self) -> int:
        """The calling thread's CUDA context (raw handle), 0 where it has none."""
        context = c_void_p()
        self.must("cuCtxGetCurrent", byref(context))
        return context.value or 0

    def context_of(self, stream: int) -> int:
        """The CUDA context (raw handle) of a stream that is no default one."""
        context = c_void_p()
        self.must("cuStreamGetCtx", stream, byref(context))
        return context.value or 0

    def batch(self, dst: U64, src: U64, sizes: U64, stream: int, *, any_order: bool = False) -> None:
        n = check_descriptors(dst, src, sizes)
        if n == 0:
            return
        _refuse_legacy(stream)
        attributes = self._any_order if any_order else self._stream_order
        failed = c_size_t(_NO_INDEX)
        fail_index = (byref(failed),) if self.batch_version == 12080 else ()
        submit = self._batch_keeping_gil if n < self.keep_gil_below else self._batch_releasing_gil
        arrays = (dst.ctypes.data, src.ctypes.data, sizes.ctypes.data)
        code = self._enqueue(stream, submit, *arrays, n, attributes, self._first, 1, *fail_index, stream)
        if code:
            detail = f"{n} pieces, stream {stream:#x}"
            if failed.value < n:
                i = failed.value
                detail += f", failed at piece {i}: dst {int(dst[i]):#x}, src {int(src[i]):#x}, {int(sizes[i])} bytes"
            raise self.error(_BATCH, code, detail)

    def copy_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        _check_2d(dst_pitch, src_pitch, width, height)
        if height == 0:
            return
        copy = _Copy2D(src_type=_MEMORYTYPE_UNIFIED, src_device=src, src_pitch=src_pitch, width_bytes=width)
        copy.dst_type, copy.dst_device, copy.dst_pitch, copy.height = _MEMORYTYPE_UNIFIED, dst, dst_pitch, height
        if code := self._enqueue(stream, self._call["cuMemcpy2DAsync"], byref(copy), stream):
            detail = f"{height} rows of {width} bytes, dst {dst:#x} pitch {dst_pitch}, src {src:#x} pitch {src_pitch}"
            raise self.error("cuMemcpy2DAsync", code, detail)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._flag("cuStreamWaitValue32", stream, address, value, _WAIT_VALUE_GEQ)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._flag("cuStreamWriteValue32", stream, address, value, 0)

    def stream_is_capturing(self, stream: int) -> bool:
        status = c_int()
        self.must("cuStreamIsCapturing", stream, byref(status))
        return status.value != 0

    def leave_captures_alone(self) -> None:
        mode = c_int(_CAPTURE_MODE_RELAXED)
        self.must("cuThreadExchangeStreamCaptureMode", byref(mode))

    def host_device_pointer(self, address: int) -> int:
        alias = c_uint64()
        self.must("cuMemHostGetDevicePointer", byref(alias), address, 0)
        return alias.value

    def _flag(self, symbol: str, stream: int, address: int, value: int, flags: int) -> None:
        if address % 4 or not 0 <= value < 2**32:
            raise LayoutError(
                f"expected a 4-byte aligned address and a 32-bit value >= 0, got {address:#x} and {value}"
            )
        if code := self._enqueue(stream, self._call[symbol], stream, address, value, flags):
            raise self.error(symbol, code, f"stream {stream:#x}, address {address:#x}, value {value}")

    def _enqueue(self, stream: int, call: Callable[..., int], *arguments: Any) -> int:
        """`call` with the stream's own context current (this thread's may be of another GPU, or none); no capture."""
        wanted, current = c_void_p(), c_void_p()
        if stream not in _SPECIAL_STREAMS:
            self.must("cuStreamGetCtx", stream, byref(wanted))
            self.must("cuCtxGetCurrent", byref(current))
        pushed = wanted.value != current.value
        if pushed:
            self.must("cuCtxPushCurrent", wanted)
        try:
            if self.stream_is_capturing(stream):
                _refuse_capture(stream)
            return call(*arguments)
        finally:
            if pushed:
                self.must("cuCtxPopCurrent", byref(current))

    def address(self, symbol: str) -> int:
        """Of an entry point of the driver, for C of ours."""
        return self._addresses[symbol]

    def function(self, symbol: str) -> Callable[..., int]:
        """An entry point of the driver by its name, which keeps the GIL and returns the driver's code."""
        return self._call[symbol]

    def must(self, symbol: str, *arguments: Any) -> None:
        """`function`, called. Raises CudaError where it fails."""
        if code := self._call[symbol](*arguments):
            raise self.error(symbol, code)

    def error(self, symbol: str, code: int, detail: str = "") -> CudaError:
        """What a driver call that returned ``code`` raises."""
        texts = []
        for getter in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = self._call[getter](code, byref(text)) == 0
            texts.append(text.value.decode() if known and text.value else "unknown error")
        return CudaError(f"{symbol} returned {code} {texts[0]} ({texts[1]})" + (f": {detail}" if detail else ""), code)


def _external_stream(stream: int, device: torch.device | None) -> torch.cuda.Stream:
    """The torch stream of a raw handle (torch leaves this class untyped)."""
    make: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
    return make(stream, device=device)


class TorchCopyEngine(Copier):
    """The same calls by torch copies (CUDA) or memmove (host), one piece at a time: the CPU backend and the fallback.

    Every address must lie in memory told to `register`: a bad one raises LayoutError before anything is written.
    Between host addresses a call copies at once and ``stream`` is not looked at; as soon as one side is on a GPU the
    copies are enqueued on ``stream``, under the same refusals as `CopyEngine`.
    """

    name = "torch"
    supports_flags = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: tuple[U64, U64, tuple[torch.Tensor, ...]] = (np.empty(0, np.uint64), np.empty(0, np.uint64), ())
        address = ctypes.cast(ctypes.memmove, c_void_p).value
        types = (c_void_p, c_void_p, c_void_p, c_size_t)
        self._move_keeping_gil = ctypes.PYFUNCTYPE(*types)(address or 0)
        self._move_releasing_gil = ctypes.CFUNCTYPE(*types)(address or 0)

    def register(self, memory: torch.Tensor | npt.NDArray[Any]) -> None:
        """Keeps the whole storage (of an array: its bytes, C-contiguous) alive as long as this engine.

        What lies inside registered memory adds nothing; memory that overlaps it in part raises LayoutError.
        """
        if isinstance(memory, np.ndarray):
            if not memory.flags.c_contiguous:
                raise LayoutError(f"register: expected a contiguous array, got strides {memory.strides}")
            flat = torch.from_numpy(memory.reshape(-1).view(np.uint8))
        else:
            storage = memory.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
        start, end = flat.data_ptr(), flat.data_ptr() + flat.numel()
        if start == end:
            return
        with self._lock:
            kept: list[tuple[int, int, torch.Tensor]] = []
            for old_start, old_end, old in zip(*self._ranges, strict=True):
                first, last = int(old_start), int(old_end)
                if first <= start and end <= last:
                    return
                if not (start <= first and last <= end):
                    if start < last and first < end:
                        raise LayoutError(f"register: {start:#x}-{end:#x} overlaps {first:#x}-{last:#x} in part")
                    kept.append((first, last, old))
            kept.append((start, end, flat))
            kept.sort(key=lambda entry: entry[0])
            starts, ends, tensors = zip(*kept, strict=True)
            self._ranges = (np.array(starts, np.uint64), np.array(ends, np.uint64), tensors)

    def batch(self, dst: U64, src: U64, sizes: U64, stream: int, *, any_order: bool = False) -> None:
        if check_descriptors(dst, src, sizes) == 0:
            return
        starts, ends, tensors = self._ranges
        to, dst_offsets = self._find("dst", dst, sizes, starts, ends)
        of, src_offsets = self._find("src", src, sizes, starts, ends)
        devices = {tensors[i].device for i in np.unique(np.concatenate((to, of)))}
        on_gpu = [device for device in devices if device.type == "cuda"]
        if not on_gpu:
            for d, s, n in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                move = self._move_keeping_gil if n < MEMMOVE_KEEP_GIL_BYTES else self._move_releasing_gil
                move(d, s, n)
            return
        _refuse_legacy(stream)
        if self.stream_is_capturing(stream):
            _refuse_capture(stream)
        with torch.cuda.stream(_external_stream(stream, on_gpu[0])):
            pieces = np.stack((to.astype(np.uint64), dst_offsets, of.astype(np.uint64), src_offsets, sizes), axis=1)
            for i, d, j, s, n in pieces.tolist():
                tensors[i][d : d + n].copy_(tensors[j][s : s + n], non_blocking=True)

    def copy_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        _check_2d(dst_pitch, src_pitch, width, height)
        rows = np.arange(height, dtype=np.uint64)
        self.batch(
            np.uint64(dst) + rows * np.uint64(dst_pitch),
            np.uint64(src) + rows * np.uint64(src_pitch),
            np.full(height, width, dtype=np.uint64),
            stream,
        )

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Not available: raises ConfigError."""
        raise ConfigError("stream flags need the CUDA driver (12.8 or newer): choose a path that signals by events")

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Not available: raises ConfigError."""
        raise ConfigError("stream flags need the CUDA driver (12.8 or newer): choose a path that signals by events")

    def stream_is_capturing(self, stream: int) -> bool:
        """False where this process has no GPU: then a stream is not a CUDA stream."""
        if stream in _SPECIAL_STREAMS or not torch.cuda.is_available():
            return False
        with torch.cuda.stream(_external_stream(stream, None)):
            return bool(torch.cuda.is_current_stream_capturing())

    def host_device_pointer(self, address: int) -> int:
        """The address itself: torch takes no other."""
        return address

    @staticmethod
    def _find(
        name: str, addresses: U64, sizes: U64, starts: U64, ends: U64
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """For each address: which registered range holds all its bytes, and the offset in it."""
        index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
        inside = index >= 0
        if len(starts):
            inside &= addresses + sizes <= ends[np.maximum(index, 0)]
        if not inside.all():
            i = int(np.argmin(inside))
            raise LayoutError(
                f"{name}[{i}]: expected {int(sizes[i])} bytes inside registered memory, got address "
                f"{int(addresses[i]):#x}, which is in none of {len(starts)} ranges; register(tensor) first"
            )
        return index, addresses - starts[index]
