"""Move: the handle of pages on their way between the host and a lower tier (movement.py makes them)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition
from kvtransfer.tiers.base import BatchResult, PageStatus, TierHandle
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.stop_policy import StopPolicy

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Progress:
    """A move as it stands: pages in all, with an outcome, OK, and OK without a gap from the first on; bytes moved."""

    pages: int
    settled_pages: int
    ok_pages: int
    prefix_pages: int
    moved_bytes: int


class Move(TierHandle):
    """One prefetch or write-back. Thread-safe. See `TierHandle`; `progress` and `collect` come on top.

    slots  int64, one a page: where it is in the host, -1 where a prefetch has given it none (yet), or has given it
           back. Those that a prefetch allocated for pages that are OK are the caller's to free: all of them once the
           move is done, or the prefix that `collect` returned.
    """

    def __init__(
        self,
        host: HostTier,
        batch: Batch,
        slots: Ids,
        *,
        policy: StopPolicy | None = None,
        lookup_first: bool = False,
        after: int | None = None,
        allocate: bool = False,
    ) -> None:
        self.batch = batch
        self.slots = slots
        self.policy = StopPolicy() if policy is None else policy
        self.lookup_first = lookup_first
        self.allocate = allocate
        self.parts: set[TierHandle] = set()  # batches with the tier
        self._host = host
        self._after = after
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._next = 0
        self._good = bytearray(len(slots))
        self._ok = 0
        self._prefix = 0
        self._taken: int | None = None  # pages that `collect` handed over
        self._changed = Condition()
        batch.add_done_callback(lambda _: self._tell())

    # --- for the caller

    def done(self) -> bool:
        return self.batch.done()

    def result(self, timeout_s: float | None = None) -> BatchResult:
        return self.batch.result(timeout_s)

    def cancel(self) -> bool:
        return self.batch.cancel()

    def add_done_callback(self, callback: Callable[[TierHandle], object]) -> None:
        self.batch.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, BatchResult]:
        return self.batch.__await__()

    def progress(self) -> Progress:
        """How far it is. A page counts once its bytes are final."""
        with self._lock:
            return Progress(
                len(self.batch.keys), self.batch.settled_pages, self._ok, self._prefix, self.batch.moved_bytes
            )

    def due(self) -> bool:
        """Whether `collect` would return at once."""
        limit_s = self.policy.limit_s(len(self.batch.keys) * self._host.spec.page_size)
        return self.done() or (limit_s is not None and time.monotonic() >= self._started + limit_s)

    def collect(self) -> Ids:
        """Of a prefetch: wait as long as its policy says, stop it, and take the prefix that is there.

        Returns the slots of the leading pages that are OK. What is under way behind them comes to its end by itself;
        slots allocated for it are given back then. Called again it returns the same.
        """
        limit_s = self.policy.limit_s(len(self.batch.keys) * self._host.spec.page_size)
        with self._changed:
            left = None if limit_s is None else max(0.0, self._started + limit_s - time.monotonic())
            self._changed.wait_for(lambda: self.batch.done() or self._stuck(), left)
        with self._lock:
            surplus: list[int] = []
            if self._taken is None:
                self._taken = self._prefix
                surplus = [at for at in range(self._prefix, len(self._good)) if self._good[at]]
            taken = self._taken
        self._give_back(surplus)
        self.batch.cancel()
        return self.slots[:taken].copy()

    # --- for the movement

    @property
    def all_begun(self) -> bool:
        """Whether no page waits."""
        return self._next >= len(self.batch.keys) or self.batch.stopping

    def next_places(self, count: int) -> range:
        """The next pages to begin."""
        start = self._next
        self._next = min(start + count, len(self.batch.keys))
        return range(start, self._next)

    def last_slot(self, place: int) -> int | None:
        """The slot that the page at ``place`` should follow."""
        if place == 0:
            return self._after
        before = int(self.slots[place - 1])
        return None if before < 0 else before

    def settle(self, answers: dict[int, tuple[PageStatus, BaseException | None]], *, moved_bytes: int) -> None:
        """Outcomes of some pages. Those of a prefetch that are not OK give their slots back and end it."""
        prefetch = self.batch.verb == "prefetch"
        unused: list[int] = []
        with self._lock:
            for at, (status, _) in answers.items():
                if status is not PageStatus.OK:
                    unused.append(at)
                elif self._taken is not None and at >= self._taken:
                    unused.append(at)  # it comes too late: `collect` was called
                    answers[at] = (PageStatus.CANCELLED, None)
                else:
                    self._good[at] = 1
                    self._ok += 1
            while self._prefix < len(self._good) and self._good[self._prefix]:
                self._prefix += 1
        if prefetch:
            self._give_back(unused)
        self.batch.settle_many(((at, *answer) for at, answer in answers.items()), moved_bytes=moved_bytes)
        if prefetch and unused:
            self.batch.drop_waiting()
        self._tell()

    def cancel_parts(self) -> None:
        """Cancel what is with the tier."""
        for handle in list(self.parts):
            handle.cancel()

    # --- inside

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stuck(self) -> bool:
        """Whether the prefix can't grow any more, though pages behind the gap are under way."""
        at = self._prefix
        return at < len(self.batch.keys) and self.batch.status_now(at) not in (None, PageStatus.OK)

    def _give_back(self, places: list[int]) -> None:
        """Free slots that were allocated for these pages."""
        if self.allocate:
            with self._lock:
                slots = self.slots[places]
                self.slots[places] = -1
            slots = slots[slots >= 0]
            if slots.size:
                self._host.free(slots)
