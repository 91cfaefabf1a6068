"""BatchBook: the batches that one tier has under way.

It makes them, refuses bad input before anything is touched, counts what became of every page, ends waiting pages
at their deadline, and closes: everything that was submitted gets its outcome.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, LayoutError, TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import BatchResult, PageStatus, RecordBuffer
from kvtransfer.tiers.batch import Batch, Verb
from kvtransfer.tiers.deadlines import Deadlines
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import BLOCK_BYTES

KEY_BYTES = 32
_UINT8 = np.dtype(np.uint8)

# (verb, status) -> the counter that such a page adds to. An outcome that is not here has none of its own.
_COUNTERS: dict[tuple[Verb, PageStatus], str] = {
    ("lookup", PageStatus.OK): "lookup_hits",
    ("lookup", PageStatus.MISS): "lookup_misses",
    ("get", PageStatus.OK): "hits",
    ("get", PageStatus.MISS): "misses",
    ("put", PageStatus.OK): "stored",
    ("remove", PageStatus.OK): "removed",
    ("pin", PageStatus.OK): "pinned",
    ("prefetch", PageStatus.OK): "prefetched",
    ("prefetch", PageStatus.MISS): "misses",
    ("write_back", PageStatus.OK): "written_back",
}
_ANY_VERB = {
    PageStatus.CORRUPT: "corrupt",
    PageStatus.NO_ROOM: "no_room",
    PageStatus.ERROR: "errors",
    PageStatus.CANCELLED: "cancelled",
}
_NO_PARTS = Parts.of(())
_ZEROS = dict.fromkeys([*_COUNTERS.values(), *_ANY_VERB.values(), "bytes_read", "bytes_written", "dropped"], 0)


class BatchBook:
    """The batches of one tier, from the call to the outcome. Thread-safe.

    ``name`` is the tier's. ``observer`` is told "tier.dropped" at a close that left pages undone.
    """

    def __init__(self, name: str, observer: Observer = NO_OBSERVER) -> None:
        self.name = name
        self._observer = observer
        self._changed = Condition()
        self._open: dict[int, Batch] = {}  # by id, in the order of the calls
        self._counters: Counter[str] = Counter()
        self._closing = False
        self._own = threading.local()  # depth: above 0 on the tier's own threads
        self._deadlines = Deadlines(name, self.own_thread)

    def open(
        self,
        verb: Verb,
        keys: Sequence[bytes],
        buffers: Sequence[RecordBuffer] = (),
        *,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        check: Callable[[Parts], object] = lambda parts: None,
    ) -> Batch:
        """A new batch, every page waiting. A batch of no pages is done at once. ``check`` of the buffers may raise.

        Raises, before anything is touched: ConfigError on a key that is not 32 bytes, a number of buffers that does
        not fit, or a negative time; LayoutError on a buffer that is not a flat uint8 array of whole blocks
        (writable for a get); TierError once the tier is closed, or where no thread can watch the deadline.
        """
        for at, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
                raise ConfigError(f"{self.name}: keys[{at}]: expected a stored key of {KEY_BYTES} bytes, got {got}")
        parts = _NO_PARTS
        if verb in ("get", "put"):
            if len(buffers) != len(keys):
                raise ConfigError(f"{self.name}: expected one buffer a key, got {len(buffers)} for {len(keys)} keys")
            parts = _checked_parts(self.name, buffers, writable=verb == "get")
            check(parts)
        for what, seconds in (("deadline_s", deadline_s), ("ttl_s", ttl_s)):
            if seconds is not None and not seconds >= 0:
                raise ConfigError(f"{self.name}: {what}: expected 0 or more seconds, got {seconds}")
        batch = Batch(self, verb, tuple(keys), tuple(buffers), parts, deadline_s, ttl_s)
        with self._changed:
            if self._closing:
                raise TierError(f"{self.name}: closed")
            self._open[id(batch)] = batch
        if not keys:
            batch.end_empty()
        elif batch.deadline is not None:
            try:
                self._deadlines.watch(batch)
            except RuntimeError as error:  # nobody gets this batch: nobody else would end it
                refused = TierError(f"{self.name}: deadline_s: expected a thread to watch it, got: {error}")
                batch.fail(refused)
                raise refused from error
        return batch

    @property
    def in_flight(self) -> int:
        """Batches that are not done."""
        return len(self._open)

    @property
    def closing(self) -> bool:
        """Whether `close` was called: nothing new comes."""
        return self._closing

    def batches(self) -> list[Batch]:
        """Those that are not done, in the order of the calls."""
        with self._changed:
            return list(self._open.values())

    def count(self, counter: str, by: int = 1) -> None:
        """Add to a counter of the tier's own."""
        with self._changed:
            self._counters[counter] += by

    def counters(self) -> dict[str, int]:
        """Running totals by name: pages by outcome, bytes_read and bytes_written, pages dropped at the close."""
        with self._changed:
            return {**_ZEROS, **self._counters}

    def own_thread(self) -> None:
        """The calling thread works for the tier: `Batch.result` refuses to wait on it for what is not done."""
        self._own.depth = getattr(self._own, "depth", 0) + 1

    @contextmanager
    def as_own_thread(self) -> Iterator[None]:
        """`own_thread` for a while: on a thread that is not the tier's, but ends batches now."""
        self.own_thread()
        try:
            yield
        finally:
            self._own.depth -= 1

    def is_own_thread(self) -> bool:
        """Whether the calling thread called `own_thread`, or is the one that watches deadlines."""
        return getattr(self._own, "depth", 0) > 0

    def close(
        self, *, drain: bool = True, timeout_s: float | None = None, abort: Callable[[], object] | None = None
    ) -> int:
        """Refuse new batches, and wait for those under way; ``drain=False`` cancels first. Idempotent.

        When the time is up: cancels what waits, calls ``abort`` (it should end what is begun: close sockets), and
        raises DeadlineExceeded unless that was all. Pages begun keep their handle open until the tier lets go of
        their buffers. Returns how many pages were CANCELLED; the observer is told "tier.dropped" if any were.
        """
        with self._changed:
            self._closing = True
        dropped = 0 if drain else self._drop_all()
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._open, timeout_s)
        if not idle:
            dropped += self._drop_all()
            if abort is not None:
                abort()
        self._deadlines.close()
        if dropped:
            self._observer.noted("tier.dropped", name=self.name, pages=dropped)
        if not idle:
            left = sum(len(batch.keys) - batch.settled_pages for batch in self.batches())
            raise DeadlineExceeded(
                f"{self.name}: close: not drained after {timeout_s:g} s: "
                f"{dropped} pages cancelled, {left} still under way"
            )
        return dropped

    # --- inside

    def _drop_all(self) -> int:
        dropped = sum(batch.drop() for batch in self.batches())
        self.count("dropped", dropped)
        return dropped

    def ended(self, batch: Batch, result: BatchResult) -> None:
        """Called by the batch itself when its last page is settled."""
        totals: Counter[str] = Counter()
        for status in PageStatus:  # a Counter would hash each page's, in Python
            pages = result.statuses.count(status)
            name = _ANY_VERB.get(status) or _COUNTERS.get((batch.verb, status))
            if pages and name is not None:
                totals[name] += pages
        if batch.moved_bytes:
            totals["bytes_read" if batch.verb in ("get", "prefetch") else "bytes_written"] += batch.moved_bytes
        with self._changed:
            self._counters += totals
            self._open.pop(id(batch), None)
            self._changed.notify_all()


def _checked_parts(name: str, buffers: Sequence[RecordBuffer], *, writable: bool) -> Parts:
    """Where ``buffers`` lie. Raises LayoutError if one is not as it should be. Quick where all are flat writable bytes:
    every page of every batch comes by."""
    for at, buffer in enumerate(buffers):
        if len(buffer) != 2:
            raise LayoutError(f"{name}: buffers[{at}]: expected a payload and a trailer, got {len(buffer)} arrays")
    if all(type(part) is np.ndarray and part.dtype is _UINT8 and part.ndim == 1 for both in buffers for part in both):
        parts = Parts.writable(buffers)
        if parts is not None and not (parts.sizes % BLOCK_BYTES).any():
            return parts
    for at, buffer in enumerate(buffers):
        _check_buffer(name, at, buffer, writable=writable)
    return Parts.of(buffers)


def _check_buffer(name: str, at: int, buffer: RecordBuffer, *, writable: bool) -> None:
    for part, array in zip(("payload", "trailer"), buffer, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
            got = f"{array.dtype} of {array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
            raise LayoutError(f"{name}: buffers[{at}].{part}: expected a flat uint8 array, got {got}")
        if not array.size or array.size % BLOCK_BYTES or not array.flags.c_contiguous:
            raise LayoutError(
                f"{name}: buffers[{at}].{part}: expected a multiple of {BLOCK_BYTES} contiguous bytes, "
                f"got {array.size} with strides {array.strides}"
            )
        if writable and not array.flags.writeable:
            raise LayoutError(f"{name}: buffers[{at}].{part}: expected writable memory, got a read-only array")
