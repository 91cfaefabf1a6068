"""KeyboardInterrupts that come at a known place, and whether a lock has survived them.

Python takes a signal where it looks for one: at the beginning of a function, after a call, at the end of a turn of a
loop. These here are real ones, due before the n-th bytecode instruction of some work, for every n there is, in
whichever frame that is: so each such place gets one.
"""

from __future__ import annotations

import _thread
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_wanted() -> Iterator[None]:
    """A background job of a shell begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_at(number: int, work: Callable[[], object]) -> BaseException | None:
    """Do the work; SIGINT is due before its instruction ``number``. What it raised; None: it is shorter than that.

    What was raised holds the frames that it came from, as ``sys.last_traceback`` does: keep it while you look.
    """
    seen, due = 0, False

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen, due
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                sys.settrace(None)
                due = True
                (_,) = map(_thread.interrupt_main, (signal.SIGINT,))  # no call of Python's: nobody looks before the end
        return trace

    gc.disable()  # what is called at a collection would take the interrupt, and Python drop it there
    try:
        sys.settrace(trace)
        work()
        sys.settrace(None)  # what was due before the end of the work is taken here at the latest
    except BaseException as error:
        return error
    finally:
        sys.settrace(None)
        gc.enable()
    assert not due, "the interrupt was lost"
    return None


def interrupted_everywhere(
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]], *, most: int = 100_000
) -> int:
    """``make`` gives some work, and what must be true on another thread after an interrupt anywhere in it. How many
    places there were."""
    with interrupts_wanted(), ThreadPoolExecutor(1) as other:
        for number in range(1, most):
            work, check = make()
            raised = interrupted_at(number, work)
            assert raised is None or isinstance(raised, KeyboardInterrupt), (number, raised)
            other.submit(check).result(10)
            if raised is None:
                return number - 1
    raise AssertionError(f"no end after {most} instructions")


def free(lock: Any) -> bool:
    """Whether the calling thread can have the lock within a second."""
    got: bool = lock.acquire(timeout=1.0)
    if got:
        lock.release()
    return got
