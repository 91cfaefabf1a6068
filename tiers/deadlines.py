"""Deadlines: the thread that ends waiting pages when their time is up, whatever else their tier is stuck in."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.ending import Daemon


class Expiring(Protocol):
    """What has a deadline (of `time.monotonic`), and is told once that has passed."""

    deadline: float | None

    def expire(self) -> None:
        """The time may be up."""


class Deadlines:
    """Calls `expire` of each batch (or the like) that it watches, once its deadline has passed. Thread-safe.

    The thread starts with the first deadline. ``entered`` is called on it first. Batches that end before are
    not kept alive.
    """

    def __init__(self, name: str, entered: Callable[[], object]) -> None:
        self._name = name
        self._entered = entered
        self._changed = Condition()
        self._heap: list[tuple[float, int, weakref.ref[Expiring]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, batch: Expiring) -> None:
        """Watch ``batch``, which has a deadline. Raises RuntimeError, and does not, where there can be no thread."""
        assert batch.deadline is not None
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                thread = Daemon(self._run, name=f"{self._name}-deadlines", leave=self._leave)
                thread.start()
                self._thread = thread
            heapq.heappush(self._heap, (batch.deadline, next(self._numbers), weakref.ref(batch)))
            if self._heap[0][2]() is batch:  # others need not wake it
                self._changed.notify()

    def close(self) -> None:
        """End the thread. What is watched is watched no more. Idempotent."""
        self._leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _leave(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        self._entered()
        while (batch := self._next()) is not None:
            batch.expire()

    def _next(self) -> Expiring | None:
        """The next batch that is due, once it is; None at the end."""
        with self._changed:
            while not self._closed:
                if not self._heap:
                    self._changed.wait()
                    continue
                batch = self._heap[0][2]()
                left = self._heap[0][0] - time.monotonic()
                if batch is None or left <= 0:
                    heapq.heappop(self._heap)
                    if batch is not None:
                        return batch
                else:
                    del batch  # not kept alive while this thread sleeps
                    self._changed.wait(left)
            return None
