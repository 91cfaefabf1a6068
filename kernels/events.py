"""The Observer: every stage of a transfer tells it what happens. The base class does nothing.

Traces, metrics and tests subscribe by subclassing. Callbacks run on the thread that does the work and
must return quickly; an exception raised in one is a bug in the subscriber and is not swallowed.
"""

from __future__ import annotations

from typing import Any


class Observer:
    """Told of every stage. Override what you need; all methods are no-ops here.

    ``transfer`` is an integer id, unique in its engine. Sizes are bytes, times are seconds.
    """

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        """A transfer was planned: ``direction`` is "load", "store" or "copy"."""

    def submitted(self, transfer: int, stage: str, layers: tuple[int, int], pages: int, total_bytes: int) -> None:
        """One stage ("copy", "scatter", "gather", "mapped", "strided", "relayout") of a group was enqueued."""

    def waited(self, transfer: int, layer: int, host_s: float) -> None:
        """``wait_layer`` returned after holding the calling thread for ``host_s`` seconds."""

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        """A transfer ended, acknowledged."""

    def fell_back(self, what: str, why: str) -> None:
        """Something slower was taken: ``what`` in a word, ``why`` in a sentence."""

    def noted(self, what: str, **fields: Any) -> None:
        """Anything else worth a line in a log (a page set aside, a lock waited for)."""


NO_OBSERVER = Observer()
