"""io_uring through raw system calls: the rings are mapped and filled with numpy, many entries a store.

Nothing here but the kernel's interface; the thread that uses a ring is in uring_engine.py. All calls of one ring are
made by one thread, which also makes it: the kernel then leaves completions alone until they are asked for.

Memory order: the thread that reads completions is the one that the kernel posts them from, inside its own system call,
and the kernel reads submissions inside that call too; so no barrier is needed beyond the call itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

READV, WRITEV, READ_FIXED, WRITE_FIXED = 1, 2, 4, 5
FIXED_FILE = 1

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_CQSIZE, _CLAMP, _COOP_TASKRUN, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 3, 1 << 4, 1 << 8, 1 << 12, 1 << 13
_FEATURE_SINGLE_MMAP, _FEATURE_NODROP, _FEATURE_EXT_ARG = 1, 2, 1 << 8
_GETEVENTS, _EXT_ARG = 1, 8
_REGISTER_FILES, _FILES_UPDATE, _BUFFERS2, _BUFFERS_UPDATE, _SPARSE = 2, 6, 15, 16, 1
_SQES_AT = 0x10000000

SQE = np.dtype(
    [
        ("opcode", "u1"), ("flags", "u1"), ("ioprio", "u2"), ("fd", "i4"), ("offset", "u8"), ("address", "u8"),
        ("length", "u4"), ("rw_flags", "u4"), ("user_data", "u8"), ("buffer", "u2"), ("personality", "u2"),
        ("splice", "i4"), ("pad", "u8", 2),
    ]
)  # fmt: skip
CQE = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])


class Kernel:
    """The three system calls. One that waits gives the interpreter lock away; one that does not keeps it, since
    getting it back beside a busy Python thread costs up to 5 ms."""

    def __init__(self) -> None:
        self._waiting = ctypes.CDLL(None, use_errno=True).syscall
        self._short = ctypes.PyDLL(None, use_errno=True).syscall
        self._waiting.restype = self._short.restype = ctypes.c_long

    def call(self, number: int, *args: Any, waits: bool = False) -> int:
        """One system call. Raises OSError."""
        function = self._waiting if waits else self._short
        got = function(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(got)


class Ring:
    """One submission and completion ring of at least ``entries`` places, with tables of files and of buffers.

    Raises OSError where the kernel refuses io_uring or is older than 5.11.
    """

    def __init__(self, entries: int, *, files: int, buffers: int, kernel: Kernel | None = None) -> None:
        self._kernel = Kernel() if kernel is None else kernel
        self.fd, params = self._setup(entries)
        self._rings: mmap.mmap | None = None
        self._entries: mmap.mmap | None = None
        try:
            self._map(params)
            table = np.full(files, -1, dtype=np.int32)
            self._kernel.call(_REGISTER, self.fd, _REGISTER_FILES, ctypes.c_void_p(table.ctypes.data), files)
            self.buffers_refused = self._make_buffer_table(buffers)
        except BaseException:
            self.close()
            raise
        self._timeout = np.zeros(2, dtype=np.int64)
        self._wait_arg = np.zeros(3, dtype=np.uint64)
        self._wait_arg[2] = self._timeout.ctypes.data

    def _setup(self, entries: int) -> tuple[int, NDArray[np.uint32]]:
        for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, _COOP_TASKRUN, 0):  # Linux 6.1, 5.19, before
            params = np.zeros(30, dtype=np.uint32)
            params[1], params[2] = 2 * entries, flags | _CQSIZE | _CLAMP
            try:
                fd = self._kernel.call(_SETUP, entries, ctypes.c_void_p(params.ctypes.data))
            except OSError as error:
                if error.errno == errno.EINVAL and flags:
                    continue
                raise
            need = _FEATURE_SINGLE_MMAP | _FEATURE_NODROP | _FEATURE_EXT_ARG
            if int(params[5]) & need != need:
                os.close(fd)
                raise OSError(errno.ENOSYS, "this kernel's io_uring can't wait with a time limit (Linux 5.11 can)")
            return fd, params
        raise AssertionError("the last set of flags is 0")

    def _map(self, params: NDArray[np.uint32]) -> None:
        self.entries, completions = int(params[0]), int(params[1])
        sq, cq = params[10:20].tolist(), params[20:30].tolist()
        size = max(sq[6] + 4 * self.entries, cq[5] + 16 * completions)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._rings = mmap.mmap(self.fd, size, flags=flags, offset=0)
        self._entries = mmap.mmap(self.fd, 64 * self.entries, flags=flags, offset=_SQES_AT)
        self._sq_tail = np.frombuffer(self._rings, np.uint32, 1, sq[1])
        self._sq_mask = int(np.frombuffer(self._rings, np.uint32, 1, sq[2])[0])
        np.frombuffer(self._rings, np.uint32, self.entries, sq[6])[:] = np.arange(self.entries)
        self._cq_head = np.frombuffer(self._rings, np.uint32, 1, cq[0])
        self._cq_tail = np.frombuffer(self._rings, np.uint32, 1, cq[1])
        self._cq_mask = int(np.frombuffer(self._rings, np.uint32, 1, cq[2])[0])
        self._cqes = np.frombuffer(self._rings, CQE, completions, cq[5])
        self._sqes = np.frombuffer(self._entries, SQE, self.entries)
        self.unsubmitted = 0

    def _make_buffer_table(self, buffers: int) -> str:
        """An empty table; returns why there is none, or ''."""
        asked = np.zeros(8, dtype=np.uint32)  # count, flags, then three u64 that stay zero
        asked[0], asked[1] = buffers, _SPARSE
        try:
            self._kernel.call(_REGISTER, self.fd, _BUFFERS2, ctypes.c_void_p(asked.ctypes.data), 32)
        except OSError as error:
            return f"the kernel has no table of buffers that can change: {error.strerror}"
        return ""

    def set_file(self, place: int, fd: int) -> None:
        """Put an open file at ``place`` of the table, or nothing (-1)."""
        fds = np.array([fd], dtype=np.int32)
        update = np.array([place, fds.ctypes.data], dtype=np.uint64)
        self._kernel.call(_REGISTER, self.fd, _FILES_UPDATE, ctypes.c_void_p(update.ctypes.data), 1)

    def set_buffer(self, place: int, start: int, nbytes: int) -> None:
        """Put memory at ``place`` of the buffer table, or nothing (0, 0). The kernel pins it: ENOMEM where the memlock
        limit does not allow that, EFAULT where there is no such memory."""
        vector = np.array([start, nbytes], dtype=np.uint64)
        update = np.zeros(4, dtype=np.uint64)  # offset u32, 0 u32, data, tags, count u32, 0 u32
        update[0], update[1], update[3] = place, vector.ctypes.data, 1
        self._kernel.call(_REGISTER, self.fd, _BUFFERS_UPDATE, ctypes.c_void_p(update.ctypes.data), 32, waits=True)

    def push(self, entries: NDArray[Any]) -> None:
        """Queue ``entries`` (SQE): they are given to the kernel by the next `enter`. The caller keeps to `self.entries`
        of them at a time."""
        tail = int(self._sq_tail[0])
        first = tail & self._sq_mask
        fits = min(len(entries), self.entries - first)
        # Two runs, not one fancy index: that would give the interpreter lock away.
        self._sqes[first : first + fits] = entries[:fits]
        self._sqes[: len(entries) - fits] = entries[fits:]
        self._sq_tail[0] = (tail + len(entries)) & 0xFFFFFFFF
        self.unsubmitted += len(entries)

    def enter(self, wait_for: int = 0, timeout_s: float = 0.0) -> None:
        """Submit what is queued, then wait until ``wait_for`` completions are there, or the time is up."""
        self._timeout[0], self._timeout[1] = divmod(int(timeout_s * 1e9), 10**9)
        try:
            self.unsubmitted -= self._kernel.call(
                _ENTER,
                self.fd,
                self.unsubmitted,
                wait_for,
                _GETEVENTS | _EXT_ARG,
                ctypes.c_void_p(self._wait_arg.ctypes.data),
                24,
                waits=wait_for > 0,
            )
        except OSError as error:
            # ETIME and EINTR: nothing was submitted, or it was and the wait ended: the kernel's head tells.
            if error.errno not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise

    def ready(self) -> int:
        """Completions that can be taken now."""
        return (int(self._cq_tail[0]) - int(self._cq_head[0])) & 0xFFFFFFFF

    def take(self) -> NDArray[Any]:
        """All completions that are there, as a copy (CQE)."""
        head, count = int(self._cq_head[0]), self.ready()
        first = head & self._cq_mask
        wrapped = max(0, first + count - len(self._cqes))
        # Two runs, as in `push`, and bytes: numpy's own copy gives the lock away, too.
        image = bytearray(self._cqes[first : first + count].tobytes() + self._cqes[:wrapped].tobytes())
        self._cq_head[0] = (head + count) & 0xFFFFFFFF
        return np.frombuffer(image, dtype=CQE)

    def close(self) -> None:
        """Give the rings back. Nothing may be in flight."""
        for name in ("_sq_tail", "_cq_head", "_cq_tail", "_cqes", "_sqes"):
            self.__dict__.pop(name, None)  # views: the mapping can't go while they live
        for mapping in (self._rings, self._entries):
            if mapping is not None:
                mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
