"""The CPU stand-in for CUDA streams and events: a thread that runs closures in order, with delays for tests.

Order is promised as on a GPU: within a stream by submission, across streams by events only. Unlike a GPU, a wait on an
event that was never recorded raises instead of passing at once, an event is recorded once, and a failure stays with the
stream and with every event recorded after it.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from kvtransfer.kernels.condition import Condition, Event
from kvtransfer.kernels.ending import Ending
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, TransferError

_ending = Ending()

Rule = float | threading.Event
"""What holds a closure back: seconds to sleep, or a gate that another thread opens with ``set()``."""


class Delays:
    """Which closures start late, by label: ``{"copy": 0.01, "scatter": threading.Event()}`` or a callable.

    Of a mapping the longest key that the label begins with counts; a callable gets the whole label and may return None.
    A gate that stays shut for ``gate_timeout_s`` fails the closure. May be changed while streams run.
    """

    def __init__(
        self, rules: Mapping[str, Rule] | Callable[[str], Rule | None] | None = None, *, gate_timeout_s: float = 60.0
    ) -> None:
        self._choose = rules if callable(rules) else None
        self._rules: dict[str, Rule] = {} if rules is None or callable(rules) else dict(rules)
        self.gate_timeout_s = gate_timeout_s

    def set(self, prefix: str, rule: Rule) -> None:
        """Add or replace the rule of a label prefix."""
        self._rules = {**self._rules, prefix: rule}

    def clear(self, prefix: str) -> None:
        """Drop the rule of a label prefix; closures already waiting at its gate go on waiting."""
        self._rules = {known: rule for known, rule in self._rules.items() if known != prefix}

    def gate(self, prefix: str) -> threading.Event:
        """A new shut gate for a label prefix; ``set()`` opens it."""
        gate = threading.Event()
        self.set(prefix, gate)
        return gate

    def before(self, label: str) -> None:
        """Called on the stream's thread before a closure: sleeps, or waits at a gate (DeadlineExceeded)."""
        if self._choose is not None:
            rule = self._choose(label)
        else:
            rules = self._rules
            prefixes = [prefix for prefix in rules if label.startswith(prefix)]
            rule = rules[max(prefixes, key=len)] if prefixes else None
        if isinstance(rule, threading.Event):
            if not rule.wait(self.gate_timeout_s):
                raise DeadlineExceeded(f"the gate before {label!r} stayed shut for {self.gate_timeout_s} s")
        elif rule is not None and rule > 0:
            time.sleep(rule)


@dataclass
class _Failure:
    """The first error of a stream, shared with the events and streams it reached."""

    error: BaseException
    stream: str
    label: str
    seen: bool = False

    def raised(self) -> TransferError:
        self.seen = True
        return TransferError(f"stream {self.stream!r} failed in {self.label!r}: {self.error!r}")


class FifoEvent:
    """A point in a stream: done once everything submitted before it has run. Recorded once, by `FifoStream.record`."""

    def __init__(self) -> None:
        self._recorded = False
        self._done = Event()
        self._failure: _Failure | None = None

    @property
    def recorded(self) -> bool:
        return self._recorded

    @property
    def error(self) -> BaseException | None:
        """What failed in the stream before this point; None while it is not done, and if nothing did."""
        if not self._done.is_set() or self._failure is None:
            return None
        self._failure.seen = True
        return self._failure.error

    def query(self) -> bool:
        """Whether the point was passed, with or without an error. Never waits; False if never recorded."""
        return self._done.is_set()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Hold the caller until the point is passed: True, or False after ``timeout_s``.

        Raises TransferError (from the error itself) if something failed before the point. A never-recorded event may
        still be recorded by another thread: it is waited for up to ``timeout_s``, and without a time-out it raises.
        """
        if timeout_s is None and not self._recorded:
            raise TransferError("waiting without a time-out for an event that was never recorded would never end")
        if not self._done.wait(timeout_s):
            return False
        if self._failure is not None:
            raise self._failure.raised() from self._failure.error
        return True

    def _finish(self, failure: _Failure | None) -> None:
        self._failure = failure
        self._done.set()


class _Lane:
    """The part of a stream that its thread holds: a forgotten FifoStream can be collected, and the thread ends."""

    def __init__(self, name: str, delays: Delays | None) -> None:
        self.name = name
        self.delays = delays
        self.pid = os.getpid()
        self.changed = Condition()
        self.queue: deque[tuple[Callable[[], None], str]] = deque()
        self.thread: threading.Thread | None = None
        self.submitted = 0
        self.completed = 0
        self.running = ""
        self.failure: _Failure | None = None
        self.closing = False
        self.forgotten = False
        self.leaving = False
        self.working = False  # with a step, and so maybe in C++
        self.unfinished: Callable[[], None] | None = None
        _ending.add(self)

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self.closing:
                    self.changed.wait()
                if not self.queue or self.leaving:
                    break
                step, self.running = self.queue.popleft()
                self.working = True
            try:
                step()
            except BaseException as error:  # kept, and raised to whoever waits: SystemExit must not end the thread
                self.failure = self.failure or _Failure(error, self.name, self.running)
            if not self.working:  # it was left: to free what it holds takes C++ as well
                self.unfinished = step
                break
            del step
            with self.changed:
                self.working = False
                self.completed += 1
                self.running = ""
                self.changed.notify_all()
        if self.forgotten and self.failure is not None and not self.failure.seen:
            warnings.warn(f"kvtransfer: {self.failure.raised()}, and nobody asked", RuntimeWarning, stacklevel=1)

    def guarded(self, fn: Callable[[], object], label: str) -> None:
        if self.failure is None:
            if self.delays is not None:
                delays = self.delays
                self.rest(lambda: delays.before(label))
            fn()

    def rest(self, wait: Callable[[], object]) -> None:
        """Within a step: call ``wait``, which stays in Python, where the thread may be ended."""
        with self.changed:
            self.working = False
            self.changed.notify_all()
        try:
            wait()
        finally:
            with self.changed:
                self.working = not self.leaving
        if not self.working:
            raise DeadlineExceeded("the interpreter ended before it ran")

    def leave(self) -> None:
        """The interpreter ends: let the thread end, whatever is left to run."""
        with self.changed:
            self.leaving = self.closing = True
            self.changed.notify_all()

    def left(self, timeout_s: float) -> None:
        """After `leave`: hold the caller until the step under way is through or waits, or so long."""
        with self.changed:
            self.changed.wait_for(lambda: not self.working, timeout_s)

    def follow(self, event: FifoEvent) -> None:
        self.rest(event._done.wait)
        self.failure = self.failure or event._failure

    def forget(self) -> None:
        """The FifoStream is gone: run what is left and end. In a forked child there is no thread to tell."""
        if os.getpid() != self.pid:
            return
        with self.changed:
            self.closing = self.forgotten = True
            self.changed.notify_all()


class FifoStream:
    """Runs closures in order on one daemon thread, which starts with the first of them and ends with `close`.

    After a closure raised, later closures of this stream, and of streams that wait for its events, are skipped, and
    events recorded later carry the error, until `take_error`. Thread-safe; not usable in a forked child.
    """

    def __init__(self, name: str = "", delays: Delays | None = None) -> None:
        self.name = name or f"fifo-{id(self):x}"
        self._lane = _Lane(self.name, delays)
        finalizer = weakref.finalize(self, self._lane.forget)
        finalizer.atexit = False

    def submit(self, fn: Callable[[], object], label: str = "") -> None:
        """Enqueue ``fn()``; its result is dropped. ``label`` is for delays and messages."""
        lane = self._lane
        self._put(lambda: lane.guarded(fn, label), label)

    def record(self, event: FifoEvent | None = None) -> FifoEvent:
        """The point after everything submitted so far, as a new event or in a never-recorded ``event``."""
        event = FifoEvent() if event is None else event
        lane = self._lane
        self._check_process()
        with lane.changed:
            self._check_open()
            if event._recorded:
                raise TransferError("an event is recorded once: make a new one (waits on the old point would be lost)")
            event._recorded = True
            if lane.submitted == lane.completed:
                event._finish(lane.failure)
            else:
                self._enqueue(lambda: event._finish(lane.failure), "record")
        return event

    def wait(self, event: FifoEvent) -> None:
        """Enqueue a wait: later closures start after ``event``. The caller is not held.

        Raises TransferError for an event that was never recorded: on a GPU such a wait passes at once.
        """
        if not event._recorded:
            raise TransferError("wait on an event that was never recorded: record it on its stream first")
        if event.query() and event._failure is None:
            return
        lane = self._lane
        self._put(lambda: lane.follow(event), "wait")

    def query(self) -> bool:
        """Whether everything submitted so far has run."""
        return self._lane.submitted == self._lane.completed

    def synchronize(self, timeout_s: float = 60.0) -> None:
        """Hold the caller until all submitted so far has run. DeadlineExceeded, or TransferError from an error."""
        self._drain(timeout_s)
        failure = self._lane.failure
        if failure is not None:
            raise failure.raised() from failure.error

    def take_error(self, timeout_s: float = 60.0) -> BaseException | None:
        """Wait as `synchronize` does, then take the error off the stream, which runs closures again."""
        self._drain(timeout_s)
        with self._lane.changed:
            failure, self._lane.failure = self._lane.failure, None
        if failure is None:
            return None
        failure.seen = True
        return failure.error

    def close(self, timeout_s: float = 30.0) -> None:
        """Run what was submitted, then end the thread. Later submits raise. Safe to call twice.

        Raises DeadlineExceeded if that takes longer (the thread goes on and ends by itself), and TransferError if the
        stream failed and nobody was told yet.
        """
        self._check_process()
        lane = self._lane
        with lane.changed:
            lane.closing = True
            lane.changed.notify_all()
            thread = lane.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                raise DeadlineExceeded(self._stuck("close", timeout_s))
        if lane.failure is not None and not lane.failure.seen:
            raise lane.failure.raised() from lane.failure.error

    def __enter__(self) -> FifoStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, timeout_s: float) -> None:
        self._check_process()
        lane = self._lane
        if lane.thread is threading.current_thread():
            raise TransferError(f"stream {self.name!r} can't wait for itself from one of its closures")
        with lane.changed:
            target = lane.submitted
            lane.changed.wait_for(lambda: lane.completed >= target or lane.leaving, timeout_s)
            if lane.completed < target:
                raise DeadlineExceeded(self._stuck("synchronize", timeout_s))

    def _put(self, step: Callable[[], None], label: str) -> None:
        self._check_process()
        with self._lane.changed:
            self._check_open()
            self._enqueue(step, label)

    def _enqueue(self, step: Callable[[], None], label: str) -> None:
        lane = self._lane
        if lane.thread is None:
            thread = threading.Thread(target=lane.run, name=f"kvtransfer-{self.name}", daemon=True)
            thread.start()
            lane.thread = thread
        lane.queue.append((step, label))
        lane.submitted += 1
        lane.changed.notify_all()

    def _check_open(self) -> None:
        if self._lane.closing:
            raise TransferError(f"stream {self.name!r} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._lane.pid:
            raise ConfigError(f"stream {self.name!r} belongs to process {self._lane.pid}: make a new one after a fork")

    def _stuck(self, what: str, timeout_s: float) -> str:
        lane = self._lane
        left = lane.submitted - lane.completed
        return f"{what}: stream {self.name!r} still had {left} steps after {timeout_s} s (now in {lane.running!r})"
