"""Submitter: a thread in C that hands whole transfers to the driver, without Python and without the GIL.

Python in a second thread costs a forward that is being launched, and costs it again for each call that must take the
GIL back. A `Job` is plain numbers: commands, and the pages that they are about. ``submitter.c`` is compiled at first
use with the compiler that Triton needs anyway and kept in the user cache folder. Where there is no compiler,
`Submitter.create` returns None and transfers are submitted call by call.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.dma import Copier, CopyEngine
from kvtransfer.kernels.errors import ConfigError, CudaError, TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.native import build

U64 = NDArray[np.uint64]

# Commands: rows of 8 words, [op, stream, six arguments]; handles and addresses are raw numbers.
NONE, WAIT, RECORD, PACE, PAGES, LAUNCH, CHUNK, COPY, ZERO = range(9)
COMMAND_NAMES = ("none", "wait", "record", "pace", "copy of pages", "launch", "chunk", "copy", "zero")
COMMAND_WORDS = 8
# What PAGES points to: `pages_t` of submitter.c, one word each.
PAGES_WORDS = ("ids", "first", "count", "host", "host_stride", "ring", "ring_stride", "pieces", "num_pieces", "cuts",
               "num_cuts", "load", "any_order", "most")  # fmt: skip
_MADE, _QUEUED, _RUNNING, _ENDED = range(4)
LONGEST_LOOK_NS = 5_000_000  # without the GIL, before a waiter looks again whether its transfer failed
# A chunk takes 0.6 ms (32 MiB at 55 GB/s). Who waits for so few of them keeps the GIL: to get it back takes 5 ms where
# another Python thread computes, and a forward waits once a layer group.
FEW_CHUNKS, SHORT_LOOK_NS = 3, 2_000_000


class _Job(ctypes.Structure):
    """job_t of submitter.c, and behind it the two words that it points to."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("commands", "count", "progress", "stop", "state", "code", "failed_at")),
        ("next", ctypes.c_void_p),
        ("chunks_submitted", ctypes.c_uint32),
        ("stopped", ctypes.c_uint32),
    )


class Job:
    """Commands for the worker; ``keep`` is what they point to. Nothing of it may change until it has ended.

    commands   [n, COMMAND_WORDS] uint64, contiguous. Of each chunk: first PACE (or NONE), last CHUNK with its number,
               counted from 1. WAIT and RECORD take an event, PACE one that must have passed before the worker goes on,
               PAGES a `PAGES_WORDS` array, LAUNCH a function, its shape (`Launch.shape`) and parameter pointers,
               COPY destination, source and bytes, ZERO destination and bytes
    """

    def __init__(self, commands: U64, keep: object) -> None:
        self.commands = np.ascontiguousarray(commands, dtype=np.uint64)
        self.keep = keep
        self.stood_at = -1  # how many chunks it had submitted when somebody kept the GIL for more of them in vain
        self._job = _Job(self.commands.ctypes.data, len(self.commands))  # _MADE is 0
        self.address = ctypes.addressof(self._job)
        self._job.progress = self.address + _Job.chunks_submitted.offset
        self._job.stop = self.address + _Job.stopped.offset

    @property
    def looked_at(self) -> tuple[int, int, int]:
        """Addresses of its state, its error code and of whether it was stopped, for `kvtransfer.rest`."""
        fields = (_Job.state, _Job.code, _Job.stopped)
        state, code, stopped = (self.address + field.offset for field in fields)
        return state, code, stopped

    @property
    def chunks_submitted(self) -> int:
        """Chunks of which everything has been enqueued, their events recorded. Read it from any thread."""
        return int(self._job.chunks_submitted)

    def stop(self) -> None:
        """Let nothing be submitted after the chunk under way."""
        self._job.stopped = 1

    @property
    def given(self) -> bool:
        """Whether the worker has it, or has had it."""
        return int(self._job.state) != _MADE

    @property
    def ended(self) -> bool:
        """Whether the worker is done with it."""
        return int(self._job.state) == _ENDED

    def error(self) -> CudaError | None:
        """After the end: the driver's error that ended it, if one did."""
        code, at = int(self._job.code), int(self._job.failed_at)
        if not code:
            return None
        name = COMMAND_NAMES[int(self.commands[at, 0])] if at < len(self.commands) else "start"
        return CudaError(f"submitter: command {at} of {len(self.commands)} ({name}) returned {code}", code)


class Launch:
    """What it takes to launch a Triton-compiled kernel without Triton: function, threads, shared bytes, parameters.

    ``widths``: bytes of each parameter, from the kernel's PTX. The trailing ones that the kernel's signature does
    not name are Triton's own scratch pointers, null for kernels that use none.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, widths: Sequence[int]) -> None:
        self.function, self.threads, self.shared_bytes = function, threads, shared_bytes
        self.widths = tuple(widths)

    @classmethod
    def of(cls, compiled: Any) -> Launch:
        """From what a Triton launch returns."""
        ptx: str = compiled.asm["ptx"]
        start = ptx.index(".entry")
        widths = [int(bits) // 8 for bits in re.findall(r"\.param\s+\.[busf](\d+)", ptx[start : ptx.index(")", start)])]
        return cls(compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared, widths)

    def shape(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """What LAUNCH wants to know besides the function: grid x, y, z, threads, shared bytes."""
        return (grid[0], grid[1], 1, self.threads, self.shared_bytes)

    def values(self, arguments: Sequence[int]) -> list[int]:
        """One word a parameter; little-endian, so 8 bytes fit all widths."""
        if len(arguments) > len(self.widths):
            raise ConfigError(f"launch: expected at most {len(self.widths)} arguments, got {len(arguments)}")
        return [a & 0xFFFFFFFFFFFFFFFF for a in arguments] + [0] * (len(self.widths) - len(arguments))


_FUNCTIONS = ("batch", "wait", "record", "query", "launch", "copy", "zero", "wait_value", "set_context",
              "exchange_capture_mode")  # fmt: skip


class _Driver(ctypes.Structure):
    """driver_t of submitter.c."""

    _fields_ = [
        ("batch_version", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        *((name, ctypes.c_void_p) for name in ("ordered", "any_order", "context")),
        ("word", ctypes.c_uint64),
    ]


class Submitter:
    """The worker of one engine. Its thread begins with the first job. Thread-safe.

    ``context`` is the CUDA context of the streams and events in its jobs; ``word`` the address of an int32 0 on their
    device, by which copies of others get in between two chunks (`CudaLanes.let_others_in`), or 0 for none.
    """

    def __init__(self, library: Path, copier: CopyEngine, context: int, word: int) -> None:
        keeping, releasing = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
        self._open, self._expect, self._give, self._close, self._await, self._await_keeping_gil = (
            keeping.kvt_open, keeping.kvt_expect, keeping.kvt_give, releasing.kvt_close, releasing.kvt_await,
            keeping.kvt_await,
        )  # fmt: skip
        self._open.restype, self._open.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._expect.restype, self._expect.argtypes = None, [ctypes.c_void_p, ctypes.c_int]
        self._give.restype, self._give.argtypes = None, [ctypes.c_void_p] * 2
        self._close.restype, self._close.argtypes = None, [ctypes.c_void_p]
        for function in (self._await, self._await_keeping_gil):
            function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]
        self._copier = copier  # owns the batch attributes
        self._driver = _Driver(copier.batch_version, *copier.entry_points(), context, word)
        self._worker: int | None = None
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def create(cls, copier: Copier, observer: Observer, word: int) -> Submitter | None:
        """A submitter for the current context, or None (said through the observer) without a driver or a compiler."""
        if not isinstance(copier, CopyEngine):
            return None
        try:
            return cls(build_submitter(), copier, copier.current_context(), word)
        except (ConfigError, OSError) as error:
            observer.fell_back("submitter", f"{error}; transfers are submitted call by call")
            return None

    def expect(self, job: bool = True) -> None:
        """A ``job`` follows within a millisecond, most likely: let the thread wake up meanwhile, which takes up to
        0.1 ms; it stays awake so long. Or none does after all: let it sleep. Nothing happens before the first job."""
        with self._lock:
            if self._worker is not None:
                self._expect(self._worker, job)

    def give(self, job: Job) -> None:
        """Queue ``job`` behind those given before. The caller keeps it alive until it has ended."""
        with self._lock:
            if self._closed:
                raise TransferError("the submitter is closed")
            if self._worker is None:
                self._worker = self._open(ctypes.addressof(self._driver))
                if not self._worker:
                    raise TransferError("the submitter's thread could not be started")
            self._give(self._worker, job.address)

    def await_chunks(self, job: Job, count: int) -> None:
        """Hold the caller until so many chunks are submitted, the job has ended, or 7 ms passed; without the GIL where
        that takes more than 2 ms, and as long as a job stands still."""
        submitted = job.chunks_submitted
        if count - submitted <= FEW_CHUNKS and submitted != job.stood_at:
            self._await_keeping_gil(job.address, count, SHORT_LOOK_NS)
            if job.chunks_submitted >= count or job.ended:
                return
            job.stood_at = job.chunks_submitted  # it waits itself: who goes on asking would keep others from the GIL
        self._await(job.address, count, LONGEST_LOOK_NS)

    def close(self) -> None:
        """End the thread after the jobs that it was given. Idempotent."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            self._close(worker)


def build_submitter(folder: Path | None = None) -> Path:
    """The compiled library (`kvtransfer.kernels.native.build`)."""
    return build(Path(__file__).with_name("submitter.c"), folder)
