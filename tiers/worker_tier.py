"""WorkerTier: a tier over a store whose client blocks. Most tiers are a subclass with five short methods.

The verbs cut a batch into jobs and queue them; worker threads run them through the subclass's ``do_...`` methods,
which are generators that yield an outcome a page, one by one, in lists, or as runs of pages that fared alike.
Everything that the contract asks besides is done here: input is checked, records are verified, buffers are returned, a
store that fails is left alone until it answers, and `close` leaves nothing without an outcome. docs/adding_a_tier.md
shows a complete one.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.ending import Daemon
from kvtransfer.kernels.errors import (
    ConfigError,
    KVTransferError,
    OwnershipError,
    RecordError,
    TierError,
    UnavailableError,
)
from kvtransfer.kernels.events import NO_OBSERVER, HeardOut, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, Tier, TierHandle, TierStats
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.batch_book import BatchBook
from kvtransfer.tiers.health import Health
from kvtransfer.tiers.jobs import Group, Job, Outcome, Outcomes, Same, grouped, singly
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.pins import PinBook
from kvtransfer.tiers.registered import RegisteredMemory, overlaps
from kvtransfer.tiers.sealed import errors_of

_SETTLE_PAGES = 16  # outcomes are told in groups of this many: it costs a lock each time


class WorkerTier(Tier, ABC):
    """See the module. Thread-safe; subclasses' ``do_...`` methods are called by ``workers`` threads at once.

    A ``do_...`` method that raises UnavailableError or OSError says that the store does not answer: the tier is left
    alone until `do_probe` returns. Any other KVTransferError fails only the pages that have no outcome yet; anything
    else is a bug, is reported as an uncaught error of a thread is, and fails those pages too.

    Args:
        name, shared: see `Tier`.
        workers: threads that run jobs.
        job_pages: most pages in one job.
        spread: cut a batch so that every worker has a part of it, unless jobs are waiting already. Else it is cut by
            ``job_pages`` alone: for a client that does many pages at once by itself.
        timeout_s: a ``do_...`` call that yields nothing for so long means that the store has stalled.
        needs_registration: buffers must lie in memory that `register` was told of.
    """

    needs_registration: bool = False

    def __init__(
        self,
        name: str,
        *,
        shared: bool,
        workers: int = 1,
        job_pages: int = 32,
        spread: bool = True,
        timeout_s: float = 5.0,
        needs_registration: bool = False,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if workers < 1 or job_pages < 1 or not timeout_s > 0:
            raise ConfigError(
                f"{name}: expected workers and job_pages of at least 1 and a time-out above 0, "
                f"got {workers}, {job_pages} and {timeout_s}"
            )
        observer = HeardOut(observer)
        self.name = name
        self.shared = shared
        self.needs_registration = needs_registration
        self.timeout_s = timeout_s
        self.book = BatchBook(name, observer)
        self.pins = PinBook()
        self.registered = RegisteredMemory(name)
        self.health = Health(name, self._probe, timeout_s=timeout_s, went_down=self._went_down, observer=observer)
        self._job_pages, self._spread = job_pages, spread
        self._jobs: queue.SimpleQueue[tuple[Batch, range] | Callable[[], object] | None] = queue.SimpleQueue()
        self._aborted = self._leaving = False  # the latter: the interpreter ends
        self._ending = threading.Lock()
        self._workers = self._at_work = workers
        self._threads = [Daemon(self._work, name=f"{name}-{i}", leave=self._leave) for i in range(workers)]

    def start(self) -> None:
        """The last line of a subclass's constructor: probe once, start the threads. No error if the store is away."""
        self.health.try_now()
        for thread in self._threads:
            thread.start()

    # --- what a subclass does

    @abstractmethod
    def do_lookup(self, job: Job) -> Outcomes:
        """OK or MISS for each key."""

    @abstractmethod
    def do_get(self, job: Job) -> Outcomes:
        """Fill each buffer. OK says that all bytes of it were written; they are verified behind this call."""

    @abstractmethod
    def do_put(self, job: Job) -> Outcomes:
        """Store each buffer, all or nothing, unless its key is there. Their trailers are verified already."""

    @abstractmethod
    def do_remove(self, job: Job) -> Outcomes:
        """Forget each key: OK or MISS."""

    def do_set_aside(self, job: Job) -> Outcomes:
        """These pages do not verify: never hand them out again, and let their keys be put anew. Removes them.

        MISS for one that was gone already: it was removed or evicted while it was read.
        """
        return self.do_remove(job)

    def do_pin(self, job: Job) -> Outcomes:
        """Protect each key; `pins` is brought up to date behind this call. Unless overridden: it can't be done."""
        error = TierError(f"{self.name}: the store can't protect a page from eviction")
        for at in range(len(job.keys)):
            yield Outcome(at, PageStatus.ERROR, error)

    def do_probe(self) -> None:
        """Connect, or ask something small. Raises TierError or OSError if the store does not answer."""

    def do_register(self, memory: NDArray[np.uint8]) -> None:
        """Tell the client of memory."""

    def do_unregister(self, memory: NDArray[np.uint8]) -> None:
        """Tell the client that it goes."""

    def do_usage(self) -> tuple[int, int, int]:
        """Capacity in bytes (0: none known), used bytes, pages. From memory: it must not wait for the store."""
        return 0, 0, 0

    def do_interrupt(self, threads: Collection[int]) -> None:
        """Make the calls on these workers (`threading.get_ident`) end soon, where that can be done: they have waited
        for the store for too long, though it may send a little now and then. Else their pages wait for them."""

    def do_abort(self) -> None:
        """Make calls that wait for the store end soon, in whatever way: `close` is out of time."""

    def do_close(self) -> None:
        """Let go of the client. Called once, when no job runs."""

    def soon(self, chore: Callable[[], object]) -> None:
        """Run ``chore`` on a worker behind what is queued, if the store answers then. May raise what ``do_...`` may."""
        self._jobs.put(chore)

    # --- the verbs

    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        return self._submit(self.book.open("lookup", keys))

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        return self._submit(self.book.open("get", keys, buffers, deadline_s=deadline_s, check=self._require))

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        return self._submit(self.book.open("put", keys, buffers, deadline_s=deadline_s, check=self._require))

    def remove(self, keys: Sequence[bytes]) -> TierHandle:
        return self._submit(self.book.open("remove", keys))

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> TierHandle:
        return self._submit(self.book.open("pin", keys, ttl_s=ttl_s))

    def stats(self) -> TierStats:
        capacity, used, pages = self.do_usage()
        counters = {**self.book.counters(), "times_down": self.health.times_down}
        return TierStats(capacity, used, pages, len(self.pins.keys()), self.book.in_flight, counters)

    def register(self, memory: NDArray[np.uint8]) -> None:
        self.registered.add(memory)
        try:
            self.do_register(memory)
        except BaseException:
            self.registered.remove(memory)
            raise

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        for batch in self.book.batches():
            if overlaps(memory, batch.buffers):
                raise OwnershipError(f"{self.name}: unregister: expected memory that no batch uses, got {batch!r}")
        self.registered.remove(memory)
        self.do_unregister(memory)

    def wait_up(self, timeout_s: float | None = None) -> bool:
        """Wait until the store answers; False when the time is up."""
        return self.health.wait_up(timeout_s)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        join_s = 0.0
        try:
            self.book.close(drain=drain, timeout_s=timeout_s, abort=self._abort)
            join_s = self.timeout_s
        finally:
            self._end(join_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _require(self, parts: Parts) -> None:
        if self.needs_registration:
            self.registered.require(parts)

    def _submit(self, batch: Batch) -> Batch:
        if self._leaving or not self.health.up:
            self._refuse(batch, range(len(batch.keys)))
            return batch
        pages = len(batch.keys)
        spread = self._spread and self._jobs.empty()  # else no worker is idle, and longer jobs cost less a page
        step = max(1, min(self._job_pages, -(-pages // self._workers) if spread else pages))
        for start in range(0, pages, step):
            self._jobs.put((batch, range(start, min(start + step, pages))))
        return batch

    def _refuse(self, batch: Batch, positions: range) -> None:
        """ERROR for pages that are not begun, since the store is down, or nobody will be there to begin them."""
        error = TierError(f"{self.name}: the interpreter ends") if self._leaving else self.health.error()
        if error is not None:
            batch.fail(error, batch.begin(positions))

    def _probe(self) -> None:
        """A store that answers a probe is of no use while every worker is stuck in a call: pages would wait unheard."""
        if self.health.overdue_calls >= self._workers:
            raise UnavailableError(f"{self.name}: every call that was given up is under way still")
        self.do_probe()

    def _went_down(self, error: UnavailableError) -> None:
        """What waits in the queue is answered now, though every worker may be stuck."""
        for batch in self.book.batches():
            self._refuse(batch, range(len(batch.keys)))
        if overdue := self.health.overdue_threads():
            self.do_interrupt(overdue)

    def _work(self) -> None:
        self.book.own_thread()
        while (item := self._jobs.get()) is not None:
            if callable(item):
                call_subscriber(functools.partial(self._chore, item))
            else:
                self._take(*item)
            del item  # nobody's memory is kept while this thread sleeps
        with self._ending:
            self._at_work -= 1
            last = self._at_work == 0
        if last and not self._leaving:
            self.do_close()

    def _take(self, batch: Batch, positions: range) -> None:
        if self._leaving or not self.health.up:
            self._refuse(batch, positions)
        if mine := batch.begin(positions):
            buffers = [batch.buffers[p] for p in mine] if batch.buffers else []
            job = Job(batch, mine, [batch.keys[p] for p in mine], buffers)
            call_subscriber(functools.partial(self._run, job))  # a bug in a subclass does not end the worker

    def _chore(self, chore: Callable[[], object]) -> None:
        if self.health.up and not self.book.closing and not self._leaving:
            try:
                with self.health.watching():
                    chore()
            except (UnavailableError, OSError) as error:
                self.health.failed(error)
            except KVTransferError:
                pass  # no page's outcome hangs on it

    def _run(self, job: Job) -> None:
        """Every page of the job gets its outcome, whatever the subclass does."""
        verb = job.batch.verb
        checked: dict[str, Callable[[Job], Iterator[Group]]] = {
            "lookup": lambda job: grouped(self.do_lookup(job)),
            "get": self._get,
            "put": self._put,
            "remove": self._remove,
            "pin": self._pin,
        }
        missing: BaseException = TierError(f"{self.name}: {verb}: the tier gave no outcome for this page")
        known: list[tuple[int, PageStatus, BaseException | None]] = []
        moved_bytes = 0
        try:
            with self.health.watching() as answered:
                for group in checked[verb](job):
                    answered()
                    if not isinstance(group, Same):
                        known += [(job.positions[at], status, error) for at, status, error, *_ in group]
                        moved_bytes += sum([outcome.moved_bytes for outcome in group])
                        if len(known) < _SETTLE_PAGES:
                            continue
                    if known:  # before a run, too: the first outcome of a page counts
                        job.batch.settle_many(known, moved_bytes=moved_bytes)
                        known, moved_bytes = [], 0
                    if isinstance(group, Same):
                        run_bytes = group.pages * group.moved_bytes
                        job.batch.settle_same(job.positions_of(group), group.status, moved_bytes=run_bytes)
        except (UnavailableError, OSError) as error:
            if not self._aborted:
                self.health.failed(error)
            missing = self.health.error() or error
        except KVTransferError as error:
            missing = error
        except BaseException as error:
            missing = TierError(f"{self.name}: {verb}: {error!r}")
            missing.__cause__ = error
            raise
        finally:
            rest = PageStatus.CANCELLED if self._aborted else PageStatus.ERROR
            job.batch.settle_many(known, moved_bytes=moved_bytes)
            if silent := job.batch.unsettled(job.positions):
                job.batch.settle_many([(p, rest, missing) for p in silent])

    def _get(self, job: Job) -> Iterator[Group]:
        """`do_get`, verified. Rotten records are set aside before anybody hears of them."""
        rotten: list[Outcome] = []
        for some in grouped(self.do_get(job)):
            if isinstance(some, Same) and (
                some.checked if some.status is PageStatus.OK else some.status is not PageStatus.CORRUPT
            ):
                yield some  # what most are: there is nothing to look at
                continue
            group = told = some.singly() if isinstance(some, Same) else some
            came = [outcome.at for outcome in group if outcome.status is PageStatus.OK and not outcome.checked]
            wrong = dict(zip(came, self._wrong(job, came), strict=True)) if came else {}
            if any(wrong.values()) or any(outcome.status is PageStatus.CORRUPT for outcome in group):
                told = []
                for outcome in group:
                    if error := wrong.get(outcome.at):
                        outcome = outcome._replace(status=PageStatus.CORRUPT, error=error)
                    (rotten if outcome.status is PageStatus.CORRUPT else told).append(outcome)
            yield told
        if not rotten:
            return
        failure: BaseException | None = None
        try:
            for at, status, *_ in singly(self.do_set_aside(job.only([outcome.at for outcome in rotten]))):
                if status is PageStatus.MISS:
                    rotten[at] = rotten[at]._replace(status=PageStatus.MISS)
        except (TierError, OSError) as error:
            failure = error
        yield rotten
        if failure is not None:
            raise failure

    def _wrong(self, job: Job, places: list[int]) -> list[RecordError | None]:
        """Of these pages, what is wrong with the records that were read."""
        keys, buffers = [job.keys[at] for at in places], [job.buffers[at] for at in places]
        return errors_of(keys, buffers, whole=True, parts=job.parts.only(places))

    def _put(self, job: Job) -> Iterator[Group]:
        """`do_put` of what is sealed."""
        wrong = errors_of(job.keys, job.buffers, whole=False, parts=job.parts)
        if bad := [Outcome(at, PageStatus.ERROR, error) for at, error in enumerate(wrong) if error is not None]:
            yield bad
        yield from _some(self.do_put, job, [at for at, error in enumerate(wrong) if error is None])

    def _remove(self, job: Job) -> Iterator[Group]:
        """`do_remove` of what is neither pinned nor being read."""
        read = {key for batch in self.book.batches() if batch.verb == "get" for key in batch.keys}
        free: list[int] = []
        for at, key in enumerate(job.keys):
            if key in read or self.pins.holds(key):
                why = "is being read" if key in read else "is pinned"
                error = OwnershipError(f"{self.name}: remove: expected a page that nobody holds, got one that {why}")
                yield [Outcome(at, PageStatus.ERROR, error)]
            else:
                free.append(at)
        yield from _some(self.do_remove, job, free)

    def _pin(self, job: Job) -> Iterator[Group]:
        """`do_pin`, remembered."""
        for outcome in singly(self.do_pin(job)):
            if outcome.status is PageStatus.OK:
                self.pins.pin(job.keys[outcome.at], job.ttl_s)
            elif outcome.status is PageStatus.MISS:
                self.pins.forget(job.keys[outcome.at])
            yield [outcome]

    def _abort(self) -> None:
        self._aborted = True
        self.do_abort()

    def _leave(self) -> None:
        """The interpreter ends: calls that wait for the store end soon, and each worker behind its own."""
        with self._ending:
            threads, self._leaving = [] if self._leaving else self._threads, True
        if threads:
            call_subscriber(self._abort)
        for _ in threads:
            self._jobs.put(None)

    def _end(self, join_s: float) -> None:
        """Let the threads go, once. The last one closes the client, so that no call is under way in it then."""
        with self._ending:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        self.health.close()
        own = threading.current_thread()
        deadline = time.monotonic() + join_s
        for thread in threads:
            if thread is not own:
                thread.join(max(0.0, deadline - time.monotonic()))


def _some(do: Callable[[Job], Outcomes], job: Job, places: list[int]) -> Iterator[Group]:
    """``do`` of some pages of a job, with their positions in the whole of it."""
    if len(places) == len(job.keys):
        yield from grouped(do(job))
    elif places:
        for outcome in singly(do(job.only(places))):
            yield [outcome._replace(at=places[outcome.at])]
