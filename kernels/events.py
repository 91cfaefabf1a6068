"""The Observer: every stage of a transfer tells it what happens. The base class does nothing.

Traces, metrics and tests subscribe by subclassing. Callbacks run on the thread that does the work and
must return quickly; an exception raised in one is a bug in the subscriber and is not swallowed. A tier reports it (see
`HeardOut`), and goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtransfer.kernels.callbacks import call_subscriber


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work with a begin and an end: what the calling thread does between them and, where there is a
    ``stream``, what is enqueued on it between them.

    name       "plan", "submit", "layers", a stage of `Observer.submitted`, "digest", "wait_layer" or "compute"
    transfer   number of the transfer; 0 while it has none
    direction  "load", "store" or "copy"
    row        the lane of the engine ("copy_in", "scatter", ...), "compute" for the caller's own stream, or ""
    layers     start and stop; (0, 0) where the work has to do with no layer
    stream     a torch.cuda.Stream or a FifoStream; None where the calling thread itself does the work
    """

    name: str
    transfer: int
    direction: str
    row: str = ""
    layers: tuple[int, int] = (0, 0)
    pages: int = 0
    total_bytes: int = 0
    stream: Any = None


class Observer:
    """Told of every stage. Override what you need; all methods are no-ops here.

    ``transfer`` is an integer id, unique in its engine. Sizes are bytes, times are seconds.
    ``spans`` says whether `span` wants to be called. Whoever has a span to tell tests it first, and makes nothing where
    it is False.
    """

    spans: bool = False

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        """A transfer was planned: ``direction`` is "load", "store" or "copy"."""

    def submitted(self, transfer: int, stage: str, layers: tuple[int, int], pages: int, total_bytes: int) -> None:
        """One stage ("copy", "scatter", "gather", "mapped", "strided", "relayout") of a group was enqueued. Of
        transfers that a job of the submitter moves, told together: as late as their end."""

    def waited(self, transfer: int, layer: int, host_s: float) -> None:
        """``wait_layer`` returned after holding the calling thread for ``host_s`` seconds."""

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        """A transfer ended, acknowledged."""

    def fell_back(self, what: str, why: str) -> None:
        """Something slower was taken: ``what`` in a word, ``why`` in a sentence."""

    def noted(self, what: str, **fields: Any) -> None:
        """Anything else worth a line in a log (a page set aside, a lock waited for)."""

    def span(self, span: Span) -> AbstractContextManager[None]:
        """Around the work that ``span`` describes, on the thread that does it. Spans of one thread nest."""
        return nullcontext()


NO_OBSERVER = Observer()


class Observers(Observer):
    """Several observers as one, told in order. May grow and shrink while transfers run. Thread-safe.

    ``spans`` is True while one of them wants spans (as it said when it was added).
    """

    def __init__(self, *observers: Observer) -> None:
        self._changing = threading.Lock()
        self._all: tuple[Observer, ...] = ()
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Tell ``observer`` too, from now on."""
        with self._changing:
            if observer is not NO_OBSERVER:
                self._all = (*self._all, observer)
            self.spans = any(o.spans for o in self._all)

    def remove(self, observer: Observer) -> None:
        """Tell ``observer`` no more. What is under way may still reach it. No error if it is not there."""
        with self._changing:
            self._all = tuple(o for o in self._all if o is not observer)
            self.spans = any(o.spans for o in self._all)

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        for observer in self._all:
            observer.planned(transfer, direction, path, pages, total_bytes)

    def submitted(self, transfer: int, stage: str, layers: tuple[int, int], pages: int, total_bytes: int) -> None:
        for observer in self._all:
            observer.submitted(transfer, stage, layers, pages, total_bytes)

    def waited(self, transfer: int, layer: int, host_s: float) -> None:
        for observer in self._all:
            observer.waited(transfer, layer, host_s)

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        for observer in self._all:
            observer.finished(transfer, ok, seconds, total_bytes)

    def fell_back(self, what: str, why: str) -> None:
        for observer in self._all:
            observer.fell_back(what, why)

    def noted(self, what: str, **fields: Any) -> None:
        for observer in self._all:
            observer.noted(what, **fields)

    def span(self, span: Span) -> AbstractContextManager[None]:
        wanted = [o for o in self._all if o.spans]
        return wanted[0].span(span) if len(wanted) == 1 else _together([o.span(span) for o in wanted])


class HeardOut(Observer):
    """Tells ``observer`` what is noted and fallen back on, for threads that others wait for: its bug is reported as an
    uncaught one in a thread is, and harms nobody else."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def fell_back(self, what: str, why: str) -> None:
        call_subscriber(partial(self._observer.fell_back, what, why))

    def noted(self, what: str, **fields: Any) -> None:
        call_subscriber(partial(self._observer.noted, what, **fields))


@contextmanager
def _together(spans: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for span in spans:
            stack.enter_context(span)
        yield
