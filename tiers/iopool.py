"""The engine of threads with preadv and pwritev: for where io_uring is refused. Slower beside busy Python threads."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.ending import Daemon
from kvtransfer.kernels.errors import TierError
from kvtransfer.tiers.io import MAX_TRIES, RETRIED, SHORT, Transfer

THREADS = 8
CHUNK = 16  # records a thread takes at a time: enough to be worth a turn of the interpreter lock


class PoolEngine:
    """``threads`` threads that read and write records in chunks. Thread-safe.

    ``move`` stands in for preadv and pwritev: it moves one record of a transfer, whole, and returns 0 or an errno.
    """

    kind = "threads"

    def __init__(
        self, name: str = "disk", *, threads: int = THREADS, move: Callable[[Transfer, int], int] | None = None
    ) -> None:
        self._name = name
        self._move = self._move_by_calls if move is None else move
        self._changed = Condition()
        self._queue: deque[tuple[Transfer, list[int]]] = deque()
        self._closing = False
        self._leaving = False  # the interpreter ends
        self._fds: dict[int, int] = {}
        self._next_file = 0
        self._threads = [Daemon(self._run, name=f"{name}-io-{i}", leave=self._leave) for i in range(max(1, threads))]
        for thread in self._threads:
            thread.start()

    def add_file(self, fd: int) -> int:
        with self._changed:
            number = self._next_file
            self._next_file += 1
            self._fds[number] = fd
            return number

    def drop_file(self, number: int, fd: int) -> None:
        with self._changed:
            del self._fds[number]
        os.close(fd)

    def submit(self, transfer: Transfer) -> None:
        count = len(transfer.buffers)
        step = min(CHUNK, max(1, -(-count // len(self._threads))))
        with self._changed:
            if self._closing:
                raise TierError(f"{self._name}: I/O has ended")
            self._queue.extend((transfer, list(range(i, min(i + step, count)))) for i in range(0, count, step))
            self._changed.notify_all()

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        return False

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _leave(self) -> None:
        """The interpreter ends: what a thread is at is the last that it moves."""
        with self._changed:
            self._closing = self._leaving = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                transfer, positions = self._queue.popleft()
            # a bug of the tier's is reported as uncaught; this thread serves on
            call_subscriber(functools.partial(self._serve, transfer, positions))
            del transfer  # nobody's memory is kept while this thread sleeps

    def _serve(self, transfer: Transfer, positions: list[int]) -> None:
        started = transfer.start(positions)
        if started:
            transfer.finish(started, [errno.ECANCELED if self._leaving else self._move(transfer, p) for p in started])

    def _move_by_calls(self, transfer: Transfer, position: int) -> int:
        """Move one record whole: 0, or the errno."""
        fd, start = self._fds[transfer.files[position]], int(transfer.offsets[position])
        payload, trailer = transfer.buffers[position]
        total = payload.size + trailer.size
        code = errno.EIO
        for _ in range(MAX_TRIES):  # from the start again: the rest of a short one may not be aligned
            try:
                if transfer.write:
                    moved = os.pwritev(fd, [payload.data, trailer.data], start)
                else:
                    moved = os.preadv(fd, [payload.data, trailer.data], start)
            except OSError as error:
                code = error.errno or errno.EIO
                if code not in RETRIED:
                    return code
                continue
            if moved == total:
                return 0
            code = SHORT
        return code
