"""ending: work in C++ comes to rest before the interpreter goes.

Python ends daemon threads where they next ask for its lock. In the middle of PyTorch's C++, which is not made to be
unwound, that aborts the process ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

LONGEST_S = 5.0  # for all to come to rest; it takes as long as what PyTorch or the driver was last asked


class Leaver(Protocol):
    """What has a thread of its own that calls into C++."""

    def leave(self) -> None:
        """Begin nothing more. Returns at once."""

    def left(self, timeout_s: float) -> None:
        """Hold the caller until the thread is out of C++, or so long."""


class Ending:
    """Those to be told at the end of the interpreter, as long as they live. A later `Ending` is told before an earlier
    one. In a forked child, where their threads are not, nobody is."""

    def __init__(self) -> None:
        self._leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
        atexit.register(self.tell)
        os.register_at_fork(after_in_child=self._leavers.clear)

    def add(self, leaver: Leaver) -> None:
        self._leavers.add(leaver)

    def tell(self) -> None:
        """Tell all, then wait for all; `LONGEST_S` together."""
        leavers, until = list(self._leavers), time.monotonic() + LONGEST_S
        for leaver in leavers:
            leaver.leave()
        for leaver in leavers:
            leaver.left(max(0.0, until - time.monotonic()))
