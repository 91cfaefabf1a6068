"""Whether the GIL changed hands: a second thread that asks for it without a pause counts how often it got it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gil_counter() -> Iterator[Callable[[], int]]:
    """While open, nobody is made to give the GIL away. Yields how often another thread got it so far: call it twice.
    One that is given away for microseconds alone may be back before that thread is awake."""
    count, stop = 0, threading.Event()

    def ask() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while not count:
            time.sleep(0.0001)
        yield lambda: count
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
