"""Rest: where the engine's thread waits for something to do.

Each time that it wakes up it asks for the GIL, and beside a forward that is being launched such a turn can cost the
forward 5 ms. So where a C compiler is there, it rests in C (``rest.c``), which looks after the transfers that the
submitter has: the thread comes back when one is over.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvtransfer.dma import Copier, CopyEngine
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError, TransferError
from kvtransfer.kernels.native import build
from kvtransfer.submitter import Job

_FOREVER_NS = 2**64 - 1


class Watch(ctypes.Structure):
    """watch_t of rest.c. ``keep`` is what it points to."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("until_ns", ctypes.c_uint64),
        ("over", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
    )

    keep: object = None


class Rest:
    """For one thread, that others wake. Python's own: it watches nothing."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._woken = False

    def rest(self, timeout_s: float | None) -> None:
        """Hold the caller until it is woken (or was, since this last returned), a watch is over, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken, timeout_s)
            self._woken = False

    def wake(self) -> None:
        """Let who rests, or rests next, go on. From any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def watch(self, job: Job, event: int, until_s: float, keep: object) -> Watch | None:
        """From now on who rests is woken once ``job`` has failed or was stopped, or has ended and ``event`` (a driver
        handle) has passed, and at ``until_s`` of `time.monotonic`; then the watch is ``over``. From any thread. None:
        it has to be looked at."""
        return None

    def forget(self, watch: Watch) -> None:
        """Not to be watched any more. By the thread that rests."""


class NativeRest(Rest):
    """In C. ``query`` is the address of ``cuEventQuery``; the thread that rests has the events' context."""

    def __init__(self, library: Path, query: int) -> None:
        keeping, releasing = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
        self._rest, self._wake = releasing.kvt_rest, keeping.kvt_rest_wake
        self._watch, self._forget = keeping.kvt_rest_watch, keeping.kvt_rest_forget
        self._close = keeping.kvt_rest_close
        self._rest.restype, self._rest.argtypes = None, [ctypes.c_void_p, ctypes.c_uint64]
        for function in (self._watch, self._forget):
            function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
        for function in (self._wake, self._close):
            function.restype, function.argtypes = None, [ctypes.c_void_p]
        keeping.kvt_rest_open.restype, keeping.kvt_rest_open.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._process = os.getpid()
        self._watched: dict[int, Watch] = {}  # C looks at them until they are over
        self._here: int | None = keeping.kvt_rest_open(query)
        if not self._here:
            raise TransferError("no memory for the engine's thread to rest in")

    def rest(self, timeout_s: float | None) -> None:
        self._rest(self._here, _FOREVER_NS if timeout_s is None else int(1e9 * max(0.0, timeout_s)))
        # Not of `items`: a tuple a watch may set off a collection, in the middle of which others begin to watch.
        for watch in list(self._watched.values()):
            if watch.over:
                del self._watched[ctypes.addressof(watch)]

    def wake(self) -> None:
        self._wake(self._here)

    def watch(self, job: Job, event: int, until_s: float, keep: object) -> Watch | None:
        made = Watch(*job.looked_at, event, int(1e9 * until_s))
        made.keep = (job, keep)
        address = ctypes.addressof(made)
        self._watched[address] = made
        self._watch(self._here, address)
        return made

    def forget(self, watch: Watch) -> None:
        if self._watched.pop(ctypes.addressof(watch), None) is not None:
            self._forget(self._here, ctypes.addressof(watch))

    def __del__(self) -> None:
        here, self._here = getattr(self, "_here", None), None
        if here and self._process == os.getpid():  # in a forked child it waits for a thread that is not there
            self._close(here)


def make_rest(copier: Copier) -> Rest:
    """In C where there is a driver and a compiler (whose absence the submitter has said)."""
    if not isinstance(copier, CopyEngine):
        return Rest()
    try:
        return NativeRest(build_rest(), copier.address("cuEventQuery"))
    except (ConfigError, OSError):
        return Rest()


def build_rest(folder: Path | None = None) -> Path:
    """The compiled library (`kvtransfer.kernels.native.build`)."""
    return build(Path(__file__).with_name("rest.c"), folder)
