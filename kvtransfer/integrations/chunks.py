"""ChunkStore: rows of somebody else's host memory, kept in one of our tiers under somebody else's keys.

For engines that own the host memory and pass hashes, not tokens: a row of that memory is the payload of a record, its
trailer lies beside it in memory of ours, so that nothing is copied on the way. Such a record holds no tokens; it rests
on its full key, its namespace and its checksum.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError, KVTransferError, LayoutError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.tiers.base import PageStatus, RecordBuffer, Tier, TierHandle
from kvtransfer.tiers.keys import Shard, stored_keys
from kvtransfer.tiers.record import BLOCK_BYTES, RecordHeader, payload_checksum, trailer_bytes

BATCH_PAGES = 128  # most of one call to the tier


def chunk_spec(chunk_bytes: int) -> KVSpec:
    """A page whose inside is not known: one layer, one component, one row."""
    return KVSpec(1, ((Component("chunk", 1, chunk_bytes, per_page=True),),))


@dataclass
class ChunkJob:
    """A store or a load of rows: which keys arrived, in how many seconds. ``ok`` is in the order asked."""

    id: Hashable
    keys: tuple[bytes, ...]
    is_load: bool
    ok: list[bool]
    began_s: float
    seconds: float = 0.0
    left: int = 0  # batches that have no outcome yet
    statuses: Counter[PageStatus] = field(default_factory=Counter)
    error: BaseException | None = None  # the first cause that there was


class ChunkStore:
    """Moves rows of ``rows`` to and from ``tier``. No verb waits, but `drain` and `close`. Thread-safe.

    Args:
        tier: becomes the store's: `close` closes it.
        rows: uint8 ``[chunks, chunk_bytes]``, contiguous; the rows of a job are the job's until it is finished.
        namespace: digest of all that must be equal for two chunks of one key to hold the same (32 bytes).
        salt: the tenant's.
        layout_id: says what the bytes of a chunk are, for whoever looks at a record.
        deadline_s: of a job; what the tier was not given by then fails.
        lookup_s: a lookup without an answer after this long is a miss.
        clock: seconds.

    Raises ConfigError if the rows can't be payloads of records.
    """

    def __init__(
        self,
        tier: Tier,
        rows: NDArray[np.uint8],
        *,
        namespace: bytes,
        salt: bytes = b"",
        layout_id: str = "foreign",
        deadline_s: float = 30.0,
        lookup_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rows.ndim != 2 or rows.dtype != np.uint8 or not rows.flags.c_contiguous or rows.shape[1] % BLOCK_BYTES:
            raise ConfigError(
                f"rows: expected contiguous uint8 rows of a multiple of {BLOCK_BYTES} bytes, "
                f"got {rows.dtype} of {rows.shape}"
            )
        self.tier = tier
        self.chunk_bytes = int(rows.shape[1])
        spec = chunk_spec(self.chunk_bytes)
        self._namespace, self._salt, self._layout_id = namespace, salt, layout_id
        self._shard = Shard.whole(spec)
        self._deadline_s, self._lookup_s, self._clock = deadline_s, lookup_s, clock
        size = trailer_bytes(spec)
        self._rows = rows
        self._trailers = np.frombuffer(mmap.mmap(-1, rows.shape[0] * size), dtype=np.uint8).reshape(-1, size)
        self._changed = Condition()
        self._jobs: dict[Hashable, ChunkJob] = {}
        self._finished: deque[ChunkJob] = deque()
        self._known: dict[bytes, bool] = {}  # what lookups said, as long as somebody is interested
        self._asked_s: dict[bytes, float] = {}  # no answer yet
        self._to_ask: list[bytes] = []
        self._interest: dict[Hashable, set[bytes]] = {}
        self._users: Counter[bytes] = Counter()
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix=f"{tier.name}-seal")
        self._registered = tier.needs_registration
        if self._registered:
            tier.register(rows.reshape(-1))
            tier.register(self._trailers.reshape(-1))

    def stored_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys under which records of these foreign ones lie."""
        return stored_keys(self._salt, self._namespace, [hashlib.sha256(k).digest() for k in keys], self._shard)

    # --- lookups

    def lookup(self, key: bytes, who: Hashable) -> bool | None:
        """Whether the tier has ``key``; None: ask again, after `flush`. The answer stays until `forget` (who)."""
        with self._changed:
            mine = self._interest.setdefault(who, set())
            if key not in mine:
                mine.add(key)
                self._users[key] += 1
            known = self._known.get(key)
            if known is None and key not in self._asked_s:
                self._asked_s[key] = self._clock()
                self._to_ask.append(key)
            elif known is None and self._clock() - self._asked_s[key] > self._lookup_s:
                known = self._known[key] = False
            return known

    def flush(self) -> None:
        """Ask the tier, at once, for all that was looked up since."""
        with self._changed:
            asked, self._to_ask = self._to_ask, []
        for at in range(0, len(asked), BATCH_PAGES):
            some = asked[at : at + BATCH_PAGES]
            try:
                handle = self.tier.lookup(self.stored_keys(some))
            except KVTransferError:  # it is closed, or can't be asked: a miss
                self._answered(some, [PageStatus.ERROR] * len(some))
            else:
                handle.add_done_callback(functools.partial(self._told, some))

    def forget(self, who: Hashable) -> None:
        """Nobody asks for ``who`` any more."""
        with self._changed:
            for key in self._interest.pop(who, ()):
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    self._known.pop(key, None)
                    self._asked_s.pop(key, None)

    def _told(self, keys: Sequence[bytes], handle: TierHandle) -> None:
        self._answered(keys, handle.result(0).statuses)

    def _answered(self, keys: Sequence[bytes], statuses: Sequence[PageStatus]) -> None:
        with self._changed:
            for key, status in zip(keys, statuses, strict=True):
                # A late answer does not undo what a job has found out since.
                if self._asked_s.pop(key, None) is not None and key in self._users:
                    self._known.setdefault(key, status is PageStatus.OK)

    # --- jobs

    def store(self, job: Hashable, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin to write these rows of the memory under ``keys``. Seals them on a thread of ours, for the checksums."""
        self._sealer.submit(self._seal, self._open(job, keys, rows, is_load=False), [int(row) for row in rows])

    def load(self, job: Hashable, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin to read ``keys`` into these rows. What a row holds whose key fails is undefined."""
        opened = self._open(job, keys, rows, is_load=True)
        self._hand_over(opened, [int(row) for row in rows])

    def finished(self) -> list[ChunkJob]:
        """Jobs that ended since the last call: their rows are the caller's again."""
        with self._changed:
            out = list(self._finished)
            self._finished.clear()
            return out

    @property
    def under_way(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is under way; False when the time is up. Their outcomes stay to be taken."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float | None = 30.0) -> None:
        """Finish what is under way, close the tier, and let go of the memory. Idempotent."""
        self._sealer.shutdown()
        self.tier.close(drain=True, timeout_s=timeout_s)
        self._registered = False  # by close
        self._rows = np.empty((0, self.chunk_bytes), dtype=np.uint8)
        self._trailers = np.empty((0, 0), dtype=np.uint8)

    def _open(self, job: Hashable, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool) -> ChunkJob:
        if len(keys) != len(rows):
            raise LayoutError(f"job {job!r}: expected one row a key, got {len(rows)} rows for {len(keys)} keys")
        bad = [int(row) for row in rows if not 0 <= row < len(self._rows)]
        if bad:
            raise LayoutError(f"job {job!r}: expected rows in 0..{len(self._rows) - 1}, got {bad[:8]}")
        opened = ChunkJob(job, tuple(keys), is_load, [False] * len(keys), self._clock())
        with self._changed:
            if job in self._jobs:
                raise LayoutError(f"job {job!r}: expected an id that is not under way")
            self._jobs[job] = opened
        return opened

    def _seal(self, job: ChunkJob, rows: list[int]) -> None:
        try:
            for stored, row in zip(self.stored_keys(job.keys), rows, strict=True):
                header = RecordHeader(
                    stored,
                    self._namespace,
                    self._shard,
                    self._layout_id,
                    self.chunk_bytes,
                    payload_xxh3=payload_checksum(self._rows[row]),
                )
                header.encode_into(self._trailers[row])
        except BaseException as error:  # kept: whoever takes the job gets it
            job.error = error
            self._settle(job, range(len(rows)), [PageStatus.ERROR] * len(rows), last=True)
            return
        self._hand_over(job, rows)

    def _hand_over(self, job: ChunkJob, rows: list[int]) -> None:
        """Give the job to the tier, in batches; each answers for itself."""
        keys = self.stored_keys(job.keys)
        buffers = [RecordBuffer(self._rows[row], self._trailers[row]) for row in rows]
        starts = range(0, len(keys), BATCH_PAGES)
        job.left = max(1, len(starts))
        if not keys:
            self._settle(job, range(0), [])
        verb = self.tier.get_into if job.is_load else self.tier.put_from
        for start in starts:
            places = range(start, min(start + BATCH_PAGES, len(keys)))
            try:
                handle = verb(keys[start : places.stop], buffers[start : places.stop], deadline_s=self._deadline_s)
            except KVTransferError as error:  # refused as a whole: closed, or memory that it does not know
                job.error = job.error or error
                self._settle(job, places, [PageStatus.ERROR] * len(places))
            else:
                handle.add_done_callback(functools.partial(self._done, job, places))

    def _done(self, job: ChunkJob, places: range, handle: TierHandle) -> None:
        result = handle.result(0)
        if result.errors and job.error is None:
            job.error = result.errors[min(result.errors)]
        self._settle(job, places, result.statuses)

    def _settle(self, job: ChunkJob, places: range, statuses: Sequence[PageStatus], *, last: bool = False) -> None:
        with self._changed:
            for place, status in zip(places, statuses, strict=True):
                key, ok = job.keys[place], status is PageStatus.OK
                job.ok[place] = ok
                job.statuses[status] += 1
                if key in self._users and (ok or job.is_load):
                    self._known[key] = ok
            job.left = 0 if last else job.left - 1
            if not job.left:
                job.seconds = self._clock() - job.began_s
                del self._jobs[job.id]
                self._finished.append(job)
                self._changed.notify_all()


def namespace_digest(fields: Mapping[str, object]) -> bytes:
    """32 bytes over named facts: SHA-256 over length-prefixed names and values, in the order of names."""
    hasher = hashlib.sha256(b"kvtransfer foreign namespace\0")
    for name in sorted(fields):
        for text in (name.encode(), repr(fields[name]).encode()):
            hasher.update(len(text).to_bytes(4, "little") + text)
    return hasher.digest()
