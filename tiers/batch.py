"""A batch under way: the handle that a tier's verbs return.

The caller waits for it, cancels it or hangs a callback on it; the tier's threads `begin` its pages and `settle`
them one by one. `BatchBook` (batch_book.py) makes the batches of one tier and keeps the books.

A page is in one of three states. *Waiting*: nobody works on it, so a cancel or the deadline ends it at once.
*Begun*: the tier may be reading or writing its buffers, so only the tier can end it. *Settled*: it has its
outcome, and a later one is ignored.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from kvtransfer.kernels.callbacks import call_subscriber, future_and_waker
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import DeadlineExceeded, TierError
from kvtransfer.tiers.base import BatchResult, PageStatus, RecordBuffer, TierHandle
from kvtransfer.tiers.parts import Parts

Verb = Literal["lookup", "get", "put", "remove", "pin", "prefetch", "write_back"]


class BatchOwner(Protocol):
    """What a batch tells and asks the book it stands in."""

    def as_own_thread(self) -> AbstractContextManager[None]:
        """While the calling thread works for the tier."""

    def is_own_thread(self) -> bool:
        """Whether the calling thread works for the tier."""

    def ended(self, batch: Batch, result: BatchResult) -> None:
        """The last page is settled; called before anybody who waits is woken."""


class Batch(TierHandle):
    """One batch of a tier: see the module. Made by `BatchBook.open`. Thread-safe.

    verb       which verb of the tier made it
    keys       the stored keys, in the order asked
    buffers    one a key for get and put, else empty. Empty too once the batch is done: they are the caller's again
    parts      where the buffers lie. Kept once the batch is done: addresses only, which say nothing any more
    ttl_s      of a pin
    deadline   `time.monotonic` after which waiting pages are CANCELLED, or None
    moved_bytes  read or written for it so far
    on_cancel  what the tier wants called after a cancel, to stop what is begun; None for nothing
    """

    def __init__(
        self,
        book: BatchOwner,
        verb: Verb,
        keys: tuple[bytes, ...],
        buffers: tuple[RecordBuffer, ...],
        parts: Parts,
        deadline_s: float | None,
        ttl_s: float | None,
    ) -> None:
        self.verb: Verb = verb
        self.keys = keys
        self.buffers = buffers
        self.parts = parts
        self.ttl_s = ttl_s
        self.moved_bytes = 0
        self.on_cancel: Callable[[], object] | None = None
        self._book = book
        self._changed = Condition()
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._statuses: list[PageStatus | None] = [None] * len(keys)
        self._errors: dict[int, BaseException] = {}
        self._begun = bytearray(len(keys))
        self._left = len(keys)
        self._cancelled = False
        self._result: BatchResult | None = None
        self._callbacks: list[Callable[[TierHandle], object]] = []
        self._wakers: list[Callable[[], object]] = []

    # --- for the caller

    def done(self) -> bool:
        self.expire()
        return self._result is not None

    def result(self, timeout_s: float | None = None) -> BatchResult:
        """See `TierHandle.result`. Raises TierError on a thread of the tier's own that would wait for itself."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        self.expire()
        if self._result is None and self._book.is_own_thread():
            raise TierError("result: a callback can't wait for a batch that its own thread must end")
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._result is not None, None if limit is None else max(0.0, limit - time.monotonic())
            ):
                raise DeadlineExceeded(
                    f"{self.verb}: {self._left} of {len(self.keys)} pages had no outcome after {timeout_s:g} s",
                    [i for i, status in enumerate(self._statuses) if status is None],
                )
            assert self._result is not None
            return self._result

    def cancel(self) -> bool:
        if self._result is not None:
            return False
        self.drop()
        return True

    def add_done_callback(self, callback: Callable[[TierHandle], object]) -> None:
        with self._changed:
            if self._result is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, BatchResult]:
        future, wake = future_and_waker()
        with self._changed:
            if self._result is None:
                self._wakers.append(wake)
            else:
                wake()
        yield from future.__await__()
        return self.result(0)

    @property
    def settled_pages(self) -> int:
        """How many pages have their outcome by now."""
        return len(self.keys) - self._left

    def status_now(self, position: int) -> PageStatus | None:
        """The outcome of one page, None while it has none: readable while the batch runs."""
        return self._statuses[position]

    def unsettled(self, positions: Iterable[int]) -> list[int]:
        """Those of ``positions`` that have no outcome by now."""
        return [p for p in positions if self._statuses[p] is None]

    # --- for the tier

    def on_own_thread(self) -> AbstractContextManager[None]:
        """While the calling thread may end this batch: it may not wait for one of the tier's in a callback."""
        return self._book.as_own_thread()

    @property
    def stopping(self) -> bool:
        """Whether it was cancelled or its time is up: what is begun should end as soon as it safely can."""
        return self._cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def begin(self, positions: Iterable[int] | None = None) -> list[int]:
        """Those of ``positions`` (None: all) that the tier is to work on, now begun.

        Left out are pages with an outcome; and all of them if the batch is `stopping`: those are CANCELLED then.
        The buffers of what is returned are the tier's until it settles it.
        """
        if self.stopping:
            self.drop_waiting()
            return []
        with self._changed:
            if self._cancelled:
                return []
            asked = range(len(self.keys)) if positions is None else positions
            mine = [p for p in asked if self._statuses[p] is None and not self._begun[p]]
            for position in mine:
                self._begun[position] = 1
            return mine

    def settle(
        self, position: int, status: PageStatus, error: BaseException | None = None, *, moved_bytes: int = 0
    ) -> bool:
        """The outcome of one page. False, and nothing changes, if it has one already: a late answer."""
        return self.settle_many([(position, status, error)], moved_bytes=moved_bytes) == 1

    def settle_many(
        self, outcomes: Iterable[tuple[int, PageStatus, BaseException | None]], *, moved_bytes: int = 0
    ) -> int:
        """`settle` several pages at once; ``moved_bytes`` is for all of them. Returns how many were not late.

        The last page ends the batch: callbacks run on this thread before the call returns.
        """
        asked = list(outcomes)
        with self._changed:
            fresh = 0
            for position, status, error in asked:
                if self._statuses[position] is None:
                    self._statuses[position] = status
                    if error is not None:
                        self._errors[position] = error
                    fresh += 1
            self._left -= fresh
            if fresh:
                self.moved_bytes += moved_bytes
            last = fresh > 0 and self._left == 0
        if last:
            self._end()
        return fresh

    def settle_same(self, positions: Sequence[int], status: PageStatus, *, moved_bytes: int = 0) -> int:
        """`settle_many` of pages that all came to ``status``, without a cause: quick where ``positions`` follow each
        other."""
        start, count = positions[0] if positions else 0, len(positions)
        run = slice(start, start + count)
        with self._changed:
            quick = list(positions) == list(range(start, start + count)) and self._statuses[run] == [None] * count
            if quick:
                self._statuses[run] = [status] * count
                self._left -= count
                self.moved_bytes += moved_bytes
            last = quick and count > 0 and self._left == 0
        if not quick:
            return self.settle_many([(p, status, None) for p in positions], moved_bytes=moved_bytes)
        if last:
            self._end()
        return count

    def fail(self, error: BaseException, positions: Iterable[int] | None = None) -> int:
        """ERROR with this cause for those of ``positions`` (None: all) that have no outcome. Returns how many."""
        asked = range(len(self.keys)) if positions is None else positions
        return self.settle_many((p, PageStatus.ERROR, error) for p in asked)

    def drop(self) -> int:
        """`cancel`; returns how many pages that made CANCELLED."""
        with self._changed:
            self._cancelled = True
        dropped = self.drop_waiting()
        if self.on_cancel is not None and self._result is None:
            self.on_cancel()
        return dropped

    def expire(self) -> None:
        """If the deadline has passed, CANCELLED for what waits."""
        if self.deadline is not None and self._result is None and time.monotonic() >= self.deadline:
            self.drop_waiting()

    def drop_waiting(self) -> int:
        """CANCELLED for all pages that nobody works on; what is begun goes on. Returns how many."""
        with self._changed:
            waiting = [p for p, status in enumerate(self._statuses) if status is None and not self._begun[p]]
            for position in waiting:
                self._begun[position] = 1  # in the same step as the look: nobody begins them now
        return self.settle_many((p, PageStatus.CANCELLED, None) for p in waiting)

    def end_empty(self) -> None:
        """End a batch of no pages: there is nobody else to do it."""
        if not self.keys and self._result is None:
            self._end()

    # --- inside

    def _end(self) -> None:
        statuses = tuple(status for status in self._statuses if status is not None)
        result = BatchResult(statuses, dict(sorted(self._errors.items())))
        self.buffers = ()
        self._book.ended(self, result)  # first: whoever is woken finds the books right
        with self._changed:
            self._result = result
            callbacks, self._callbacks = self._callbacks, []
            wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        for wake in wakers:
            call_subscriber(wake)
        for callback in callbacks:
            call_subscriber(functools.partial(callback, self))

    def __repr__(self) -> str:
        return f"Batch({self.verb} of {len(self.keys)} pages, {self.settled_pages} settled)"
