"""Condition and Event: Python's own, whose locks a KeyboardInterrupt can't leave taken."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import TYPE_CHECKING


class Condition(threading.Condition):
    """The ``with`` of `threading.Condition` takes its lock and gives it back in two functions of Python. A
    KeyboardInterrupt in one of them, behind the one or before the other, leaves the lock taken for good, and all other
    threads out. Here it finds the lock's own functions, of C, in which none comes: as safe as ``with`` a bare lock.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        super().__init__(self._mutex)

    if not TYPE_CHECKING:  # for whom they are what they were
        __enter__ = property(attrgetter("_mutex.__enter__"))
        __exit__ = property(attrgetter("_mutex.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:  # the lock is not the caller's
            raise
        except BaseException:
            # It may have come behind giving the lock back, before the part that takes it again.
            if not self._is_owned():  # type: ignore[attr-defined]
                self._mutex.acquire()
            self.notify_all()  # the caller may be listed still, and would be told in another's place
            raise

    def notify(self, n: int = 1) -> None:
        try:
            super().notify(n)
        except RuntimeError:  # the lock is not the caller's: nobody was told
            raise
        except BaseException:  # one who was told is listed still, and would be told again in another's place
            self.notify_all()
            raise


class Event(threading.Event):
    """`threading.Event` over such a condition: ``set`` and ``wait`` hold it for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()
