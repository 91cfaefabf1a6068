"""The Tier protocol: what every place below the device offers, in batch verbs over stored keys.

One contract holds for all of them, and one suite of tests checks it:

- Every verb takes a batch and answers for each page, in the order asked. One bad page never spoils another.
- Verbs return at once with a handle; ``handle.result()`` blocks. Buffers belong to the tier from the call
  until the handle is done, whatever its outcome. Memory that buffers lie in is made known with `register`; a tier
  that needs it (``needs_registration``) refuses other buffers, on every transport, before anything is touched.
- OK means exactly this: the page's own bytes, complete and checked. A page that does not verify is CORRUPT,
  is set aside by the tier, and is never handed out; what its buffer holds then is undefined.
- A put takes a sealed record whose trailer names the key and a payload checksum; another page is ERROR. It is visible
  to `lookup` once its handle says OK, and never in part. A failed put is not visible; where the answer of a remote
  store was lost it may be, whole.
- A capacity holds at all times, with whatever an earlier run left counted in.
- A store that fails or stalls costs one time-out. From then on its pages are ERROR at once, until it answers again:
  that is found out in the background. One that is absent at the start is no error of the constructor.
- Thread-safe. Nothing waits without an end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import TierError


class PageStatus(enum.Enum):
    """The outcome for one page of a batch."""

    OK = "ok"
    MISS = "miss"  # not there
    CORRUPT = "corrupt"  # there, but it does not verify: treat as a miss
    NO_ROOM = "no_room"  # refused: the capacity holds
    ERROR = "error"  # the tier failed: `BatchResult.errors` says how
    CANCELLED = "cancelled"  # cancelled, or the time was up, before it was done


class RecordBuffer(NamedTuple):
    """One record's memory: uint8 views of the padded payload and of the trailer, both multiples of 4,096 bytes."""

    payload: NDArray[np.uint8]
    trailer: NDArray[np.uint8]


@dataclass(frozen=True)
class BatchResult:
    """One status a page, in the order asked; ``errors`` holds the cause by position, where there is one."""

    statuses: tuple[PageStatus, ...]
    errors: Mapping[int, BaseException] = field(default_factory=dict)

    @property
    def all_ok(self) -> bool:
        """Whether every page is OK (an empty batch is)."""
        return all(status is PageStatus.OK for status in self.statuses)

    @property
    def prefix_pages(self) -> int:
        """Pages that are OK before the first that is not: all that a prefix can use."""
        for position, status in enumerate(self.statuses):
            if status is not PageStatus.OK:
                return position
        return len(self.statuses)

    def positions(self, status: PageStatus) -> tuple[int, ...]:
        """Where in the batch ``status`` is the outcome."""
        return tuple(i for i, got in enumerate(self.statuses) if got is status)

    def require(self) -> None:
        """Raise TierError, from the first cause, naming the pages that are not OK."""
        bad = [f"{i} ({s.value})" for i, s in enumerate(self.statuses) if s is not PageStatus.OK]
        if bad:
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            cause = self.errors[min(self.errors)] if self.errors else None
            reason = f": {cause}" if cause is not None else ""
            raise TierError(
                f"expected {len(self.statuses)} pages ok, got at positions {', '.join(bad[:8])}{more}{reason}"
            ) from cause


@dataclass(frozen=True)
class TierStats:
    """A tier's state. ``counters`` holds running totals by name (hits, misses, corrupt, errors, bytes_read ...).

    ``capacity_bytes`` is 0 where the tier has no limit of its own, or does not know the store's; ``used_bytes`` and
    ``pages`` of a shared store are what is known of it. ``in_flight`` counts batches. ``kept_bytes``: what it keeps in
    the long run, where it gives pages up by itself before it is full (a disk's cleaner); None: all that it can hold.
    """

    capacity_bytes: int
    used_bytes: int
    pages: int
    pinned_pages: int
    in_flight: int
    counters: Mapping[str, int] = field(default_factory=dict)
    kept_bytes: int | None = None


@runtime_checkable
class TierHandle(Protocol):
    """One batch under way."""

    def done(self) -> bool:
        """Whether every page has its outcome; buffers are the caller's again."""

    def result(self, timeout_s: float | None = None) -> BatchResult:
        """Wait for it. Raises DeadlineExceeded when the time is up: the batch goes on."""

    def cancel(self) -> bool:
        """Ask to stop: pages not begun become CANCELLED. False if it is done already. Buffers: see `done`."""

    def add_done_callback(self, callback: Callable[[TierHandle], object]) -> None:
        """Call ``callback`` with this handle when it is done (at once if it is), on the tier's thread."""

    def __await__(self) -> Generator[object, None, BatchResult]:
        """`result` for asyncio."""


@runtime_checkable
class Tier(Protocol):
    """One storage tier. See the module's contract. Keys are stored keys of 32 bytes (keys.py).

    ``name`` is unique in a cache. ``shared`` says whether others write to it too: then what an index
    remembers of it is a hint only. ``needs_registration`` says whether buffers must lie in registered memory.
    """

    name: str
    shared: bool
    needs_registration: bool

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Buffers of later calls lie in ``memory`` (flat, contiguous; a host slab's payload and trailer regions).

        Blocks until the store's client knows it. The memory must stay until `unregister` or `close`. Raises
        ConfigError if it overlaps what is registered, TierError if the client refuses it.
        """

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undo `register` of just this memory. ConfigError if it isn't; OwnershipError while batches use it."""

    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        """OK for pages that are there, MISS for others. Does not protect them from eviction (`pin` does)."""

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        """Read each record into its buffers, and verify header and payload."""

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        """Write each record (sealed: its trailer is complete). A key that is there already is OK, unwritten."""

    def remove(self, keys: Sequence[bytes]) -> TierHandle:
        """Forget pages. MISS where there is none. A page that is pinned or being read is ERROR, and stays."""

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> TierHandle:
        """Protect pages from eviction for ``ttl_s`` seconds (None: until unpinned; 0: no more). MISS: not there.

        ERROR, saying why, where the store can't promise it.
        """

    def stats(self) -> TierStats:
        """The state now. Never waits for the storage."""

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """End. ``drain``: finish what was submitted, roots first; else cancel it. Every handle gets its outcome.

        Raises DeadlineExceeded when the time is up; what was not done by then is CANCELLED. Idempotent.
        """
