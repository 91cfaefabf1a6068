"""Worker: one thread that does what it is given, in order. Ticker: one that does the same thing again and again.

Python's own executors take no more work as soon as the main thread has ended, though other threads go on: a server
whose main thread only starts the others would have a mover that answers nothing. This one works until the
interpreter ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.condition import Condition, Event
from kvtransfer.kernels.ending import Ending

_ending = Ending()


class Worker:
    """See the module. Thread-safe. The thread starts with the first task; a task that raises ends nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._tasks: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.leaving = False  # the interpreter ends
        _ending.add(self)

    def submit(self, task: Callable[[], object]) -> None:
        """Do it after what was given before. Raises RuntimeError once it takes no more."""
        with self._changed:
            if self._closing:
                raise RuntimeError(f"{self._name}: it is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._tasks.append(task)
            self._changed.notify()

    def shutdown(self, wait: bool = True) -> None:
        """Take no more; the thread ends once it has done what it was given. ``wait`` until then. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def leave(self) -> None:
        """The interpreter ends: what the thread is at is the last that it does."""
        with self._changed:
            self._tasks.clear()
            self._closing = self.leaving = True
            self._changed.notify()

    def left(self, timeout_s: float) -> None:
        """Hold the caller until the thread has ended, or so long."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closing:
                    self._changed.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            call_subscriber(task)
            del task  # what it holds is not kept while this thread sleeps


class Ticker:
    """Calls ``work`` every ``every_s`` seconds on a thread of its own, from now on, whatever it raises."""

    def __init__(self, work: Callable[[], object], every_s: float) -> None:
        self._work, self._every_s = work, every_s
        self._over = Event()
        self._thread = threading.Thread(target=self._run, name="kvtransfer-tick", daemon=True)
        self._thread.start()
        _ending.add(self)

    def close(self) -> None:
        """No more calls; returns once the last one is through, but to the thread itself. Idempotent."""
        self.leave()
        self.left(None)

    def leave(self) -> None:
        """Begin no call any more."""
        self._over.set()

    def left(self, timeout_s: float | None) -> None:
        """Hold the caller until the thread has ended, or so long."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            call_subscriber(self._work)
