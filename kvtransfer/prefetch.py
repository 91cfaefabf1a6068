"""Prefetching: what lower tiers have of a request goes into the host tier while the request still waits its turn."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import Book
from kvtransfer.commands import OK, Ack, Lookup, Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Job, Move
from kvtransfer.moves import CANCELLED, MISS
from kvtransfer.policy import Prefetch
from kvtransfer.radix import Match
from kvtransfer.resizing import Resizing
from kvtransfer.room import BATCH_PAGES
from kvtransfer.tiers.keys import page_keys
from kvtransfer.tree import ABSENT


class PrefetchJob(Job):
    """Pages ``first`` ... of a request on their way to the host tier. `Directory.admit` says when the request may run;
    that, or `Directory.stop`, ends it: what is not under way stays where it is, what has come can be matched.

    started_s  by the directory's clock
    limit_s    how long the request may wait for it
    """

    def __init__(self, scope: Scope, tokens: NDArray[np.uint32], first: int, pages: int, started_s: float) -> None:
        super().__init__("prefetch", first, pages)
        self.scope = scope
        self.tokens = tokens
        self.started_s = started_s
        self.limit_s = 0.0
        self.always = False  # however little it is
        self.stopped = False
        self.request: Hashable | None = None
        self.known = 0  # pages from the root on that need not be looked up
        self.found: dict[str, NDArray[np.uint8]] = {}  # by tier: statuses of the pages from `known` on


class Prefetching(Resizing):
    """The part of a `Directory` that prefetches."""

    def __init__(
        self,
        index: PrefixIndex,
        books: dict[str, Book],
        host: Book,
        window: int,
        evict_extra: float,
        policy: Prefetch,
    ) -> None:
        super().__init__(index, books, host, window, evict_extra)
        self._policy = policy
        self._lookups: dict[int, tuple[PrefetchJob, Lookup, int]] = {}  # by command: job, command, first position
        self._requests: dict[Hashable, PrefetchJob] = {}

    def _start(self, job: PrefetchJob, found: Match, held: int) -> None:
        """``found``: the tree's match, of which the first ``held`` pages are in some private tier."""
        index = self._index
        job.node = found.node
        index.lock(found.node)
        total = job.first + job.codes.size
        job.known = held
        asked = [book for book in self._usable() if book.ask]
        possible = total if asked else held
        if not self._is_worth(job, possible):
            self._tell(job, np.arange(job.first, total), CANCELLED)
            return
        if held == total or not asked:
            self._tell(job, np.arange(held, total), MISS)
            self._fetch(job, job.first, held)
            return
        keys = index.keys(Match(found.node, held)) if held else []
        rest = job.tokens[held * index.page_size :]
        keys = page_keys(rest, index.page_size, keys[-1] if keys else None, algorithm=index.algorithm)
        for book in asked:
            job.found[book.name] = np.zeros(total - held, dtype=np.uint8)
            for at in range(0, len(keys), BATCH_PAGES):
                some = keys[at : at + BATCH_PAGES]
                command = Lookup(id=self._new_id(), tier=book.name, scope=job.scope, keys=some)
                self._lookups[command.id] = (job, command, at)
                self._outbox.append(command)
        self._fetch(job, job.first, held)  # what is known to be there need not wait for the rest

    def _looked_up(self, ack: Ack) -> None:
        """An answer to a lookup; the last one of a job says how far the prefix goes."""
        job, command, at = self._lookups[ack.id]
        self._check(ack, len(command.keys))
        there = job.found[command.tier]
        mine = there[at + ack.first : at + ack.first + len(ack.statuses)]
        fresh = mine == 0
        mine[fresh] = np.frombuffer(ack.statuses, dtype=np.uint8)[fresh]
        self.late_answers += int(mine.size - fresh.sum())
        said = there[at : at + len(command.keys)]
        if not said.all():
            return
        del self._lookups[ack.id]
        self._heard(self._books[command.tier], said, command)
        if job.stopped or any(one[0] is job for one in self._lookups.values()):
            return
        some = np.zeros(job.codes.size + job.first - job.known, dtype=np.bool_)
        for codes in job.found.values():
            some |= codes == OK
        known, total = job.known, job.first + job.codes.size
        stop = total if some.all() else known + int(np.argmin(some))
        self._tell(job, np.arange(stop, total), MISS)
        if stop > known and self._is_worth(job, stop):
            self._adopt(job, known, stop)
            self._fetch(job, known, stop)
        else:
            self._tell(job, np.arange(known, stop), CANCELLED)

    def _is_worth(self, job: PrefetchJob, stop: int) -> bool:
        """Whether pages up to ``stop`` are fetched."""
        pages = stop - job.first
        return pages > 0 and (job.always or self._policy.is_worth(pages * self._index.page_size))

    def _adopt(self, job: PrefetchJob, known: int, stop: int) -> None:
        """Write down what lookups found."""
        index = self._index
        found = index.insert(job.tokens[: stop * index.page_size], job.scope.name())
        index.lock(found.node)
        self._let_go(job)
        job.node = found.node
        for name, codes in job.found.items():
            book = self._books[name]
            if not book.attached:
                continue
            there = np.flatnonzero(codes[: stop - known] == OK) + known
            if there.size:
                there = there[index.codes(found, name, int(there[0]))[there - there[0]] == ABSENT]
                index.write(found.node, name, there, book.take(there.size))
            gone = np.flatnonzero(codes[: stop - known] == MISS) + known
            if gone.size:
                self._lost(found.node, book, gone, None)

    def _fetch(self, job: PrefetchJob, first: int, stop: int) -> None:
        """Begin moves for pages ``first`` to ``stop - 1``, each from the fastest tier that has it."""
        if job.node is None or first >= stop:
            return
        where, rest = Match(job.node, stop), np.ones(stop - first, dtype=np.bool_)
        for book in [self._host, *self._usable()]:
            there = rest & (self._index.codes(where, book.name, first) != ABSENT)
            rest &= ~there
            pages = np.flatnonzero(there) + first
            pages = pages[pages < job.first + job.open_end]
            if pages.size:  # what is in the host tier, or on its way there, only has to be waited for
                source = self._below[0] if book is self._host else book
                self._begin(Move(where.node, job.scope, pages, source.name, self._host.name, job=job))
        self._tell(job, np.flatnonzero(rest) + first, MISS)
        self._tell(job, np.arange(job.first + job.open_end, stop), CANCELLED)  # where none was begun

    def _stop(self, job: PrefetchJob) -> None:
        """Nothing more of it is begun, and what is under way is asked to stop."""
        if job.stopped:
            return
        job.stopped = True
        self._cancel(job)
        self._let_go(job)
        if job.request is not None and self._requests.get(job.request) is job:
            del self._requests[job.request]
