"""Health: whether a store answers, and the thread that finds out when it does again.

A store that fails or stalls costs one time-out. From then on it is *down*: its tier answers at once that it is
unavailable, and a thread probes the store with growing pauses until it answers. Both are logged: a wrong port would go
unseen otherwise, since a tier that is down costs speed alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer

logger = logging.getLogger(__name__)


class Health:
    """The state of one store. Thread-safe.

    Args:
        name: of the tier, for messages and the observer, which is told "tier.down" and "tier.up".
        probe: connects or asks something small; returns if the store answers, raises TierError or OSError if not.
            Never called by two threads at once.
        timeout_s: how long a call inside `watching` may take before the store counts as stalled.
        first_pause_s, longest_pause_s: between probes; doubled each time.
        went_down: called once each time the store goes down, with the cause, on the thread that noticed.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        *,
        timeout_s: float,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 5.0,
        went_down: Callable[[UnavailableError], object] = lambda error: None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self._name = name
        self._probe = probe
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._went_down = went_down
        self._observer = observer
        self._changed = Condition()
        self._cause: UnavailableError | None = None
        self._calls: dict[int, float] = {}  # number -> when it is overdue; inf once that was acted upon
        self._callers: dict[int, int] = {}  # number -> thread
        self._asleep = False  # the thread waits without an end
        self._next_call = 0
        self._times_down = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def up(self) -> bool:
        """Whether the store answered when it was last asked."""
        return self._cause is None

    @property
    def times_down(self) -> int:
        """How often it went down."""
        return self._times_down

    @property
    def overdue_calls(self) -> int:
        """Calls inside `watching` that took too long, and go on."""
        return sum(map(math.isinf, list(self._calls.values())))

    def overdue_threads(self) -> set[int]:
        """The threads that those calls are on, by `threading.get_ident`."""
        with self._changed:
            return {self._callers[number] for number, due in self._calls.items() if math.isinf(due)}

    def error(self) -> UnavailableError | None:
        """Why the store is left alone now; None if it is not. A new error each time: it may be raised."""
        cause = self._cause
        if cause is None:
            return None
        error = UnavailableError(str(cause))
        error.__cause__ = cause.__cause__
        return error

    def try_now(self) -> bool:
        """Probe once on the calling thread; where that fails the store is down, and probing goes on behind."""
        try:
            self._probe()
        except (TierError, OSError) as error:
            self.failed(error)
        return self.up

    def failed(self, error: BaseException) -> None:
        """A call failed in a way that says that the store does not answer. Nothing, if it is down already."""
        with self._changed:
            if self._cause is not None or self._closed or not self._start():
                return  # without the thread nobody would find out that it answers again
            self._cause = UnavailableError(f"{self._name}: unavailable, tried again in the background: {error}")
            self._cause.__cause__ = error
            self._times_down += 1
            cause = self._cause
            self._changed.notify_all()
        logger.warning("kvtransfer: %s is down, tried again in the background: %s", self._name, error)
        self._observer.noted("tier.down", name=self._name, cause=str(error))
        self._went_down(cause)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], None]]:
        """Around calls that wait for the store: where one takes longer than the time-out, the store is down.

        Call what it gives whenever the store has answered: the time-out begins anew.
        """
        with self._changed:
            number = self._next_call
            self._next_call += 1
            self._calls[number] = time.monotonic() + self._timeout_s
            self._callers[number] = threading.get_ident()
            self._start()
            if self._asleep:
                self._changed.notify_all()

        def answered() -> None:
            self._calls[number] = time.monotonic() + self._timeout_s

        try:
            yield answered
        finally:
            with self._changed:
                del self._calls[number], self._callers[number]

    def wait_up(self, timeout_s: float | None = None) -> bool:
        """Wait until the store answers; False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self._cause is None, timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; a probe that hangs is left to itself after ``timeout_s``. Idempotent."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # --- inside

    def _start(self) -> bool:
        """Whether the thread is there: the next call tries again where the process may have no more."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._run, name=f"{self._name}-health", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while True:
            with self._changed:
                if self._closed:
                    return
                stalled = self._cause is None and self._wait_stall()
                if self._cause is None and not stalled:
                    continue
                if not stalled and self._changed.wait_for(lambda: self._closed, pause_s):
                    return
            if stalled:
                self.failed(TimeoutError(f"no answer within {self._timeout_s:g} s"))
                pause_s = self._first_pause_s
                continue
            try:
                self._probe()
            except (TierError, OSError):
                pause_s = min(2 * pause_s, self._longest_pause_s)
                continue
            pause_s = self._first_pause_s
            with self._changed:
                self._cause = None
                self._changed.notify_all()
            logger.info("kvtransfer: %s answers", self._name)
            self._observer.noted("tier.up", name=self._name)

    def _wait_stall(self) -> bool:
        """Sleep until something changes or a call is overdue; whether one is. The caller holds the lock."""
        due = min(list(self._calls.values()), default=math.inf)
        left = due - time.monotonic()
        if left > 0:
            self._asleep = math.isinf(due)
            self._changed.wait(None if self._asleep else left)
            self._asleep = False
            return False
        for number, when in list(self._calls.items()):
            if when <= due:
                self._calls[number] = math.inf
        return True
