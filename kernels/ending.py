"""ending: work in C++ comes to rest before the interpreter goes.

Python ends daemon threads where they next ask for its lock. In the middle of PyTorch's C++, which is not made to be
unwound, that aborts the process ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import TransferError

_P = ParamSpec("_P")
_R = TypeVar("_R")

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


class Daemon(threading.Thread):
    """A daemon thread of those who move other people's memory. It may be what drops the last hold on a tensor, and to
    free one is a call into C++: at the end of the interpreter ``leave`` is called, which tells it to end and returns at
    once, and it is waited for."""

    def __init__(self, target: Callable[..., object], *args: object, name: str, leave: Callable[[], object]) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._leave = leave

    def start(self) -> None:
        super().start()
        _ending.add(self)

    def leave(self) -> None:
        self._leave()

    def left(self, timeout_s: float) -> None:
        if self is not threading.current_thread():
            self.join(timeout_s)


class Section:
    """For calls into C++ on threads that nobody joins. At the end of the interpreter those under way are waited for,
    and whoever wants to begin one gets an ``error``."""

    def __init__(self, error: Callable[[str], Exception] = TransferError) -> None:
        self._error = error
        self._changed = Condition()
        self._inside = 0
        self._leaving = False
        _ending.add(self)

    def call(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        mine = 0
        try:
            with self._changed:
                if self._leaving:
                    raise self._error("the interpreter ends")
                mine = 1
                self._inside += mine
            return fn(*args, **kwargs)
        finally:
            with self._changed:
                self._inside -= mine
                self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._leaving = True

    def left(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._inside, timeout_s)


class Guarded:
    """An object of C++, each call of its methods in ``section``."""

    def __init__(self, it: object, section: Section) -> None:
        self._it, self._section = it, section

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._it, name)

        def guarded(*arguments: Any) -> Any:
            return self._section.call(call, *arguments)

        return guarded


_ending = Ending()
