"""Moves: pages on their way from tier to tier, as commands that are given out when there is room.

The rules that everything rests on:

- A page is there (to be matched, to be read) from its acknowledgement on, and not before.
- A slot is given to somebody else only after every command that writes or reads it was answered for that page.
- What is locked (held by a hit, or under way) is not given up. A page leaves a tier after those behind it.
- Whoever waits for room waits only while answers are due: an answer always comes, a release may not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import Book
from kvtransfer.commands import CODES, OK, WAITING, Cancel, Command, Demote, Load, Promote, Resize, Store, packed
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Flight, Job, Move
from kvtransfer.outages import Outages
from kvtransfer.radix import Match
from kvtransfer.room import BATCH_PAGES
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tree import ABSENT, Ids, pending

MISS, CORRUPT = CODES[PageStatus.MISS], CODES[PageStatus.CORRUPT]
NO_ROOM, ERROR, CANCELLED = CODES[PageStatus.NO_ROOM], CODES[PageStatus.ERROR], CODES[PageStatus.CANCELLED]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound="Moves")


def verb(work: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
    """Makes a method of a directory one of its verbs: see `Moves._working`."""

    @wraps(work)
    def run(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._working(work, self, *args, **kwargs)

    return run


class Moves(Outages):
    """The part of a `Directory` that has pages moved. ``window``: commands that one move may have under way to or from
    a tier that is addressed by key. ``on_commands``, if set, is called after a verb, without the directory's locks,
    while there are commands to be taken."""

    def __init__(self, index: PrefixIndex, books: dict[str, Book], host: Book, window: int, evict_extra: float) -> None:
        super().__init__(index, books, evict_extra)
        self._host = host
        self._window = window
        self._sizings: dict[int, tuple[Book, Resize]] = {}  # by command; see resizing.py
        self._waiting: list[Move] = []  # with pages that are not under way
        self._ended: list[Job] = []
        self._depth = 0
        self.on_commands: Callable[[], object] | None = None

    def _working(self, work: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Do the work of a verb: under the mutex; before it ends, waiting moves go on as far as they can; after it,
        without the mutex, callbacks of jobs that ended run.

        The ``with`` stands in a plain function: its lock is taken and given back in C, where no KeyboardInterrupt comes
        between. One between a context manager in Python and the block that it holds leaves the mutex taken.
        """
        ended: list[Job] = []
        tell: Callable[[], object] | None = None
        try:
            with self._index.mutex:
                self._depth += 1
                try:
                    out = work(*args, **kwargs)
                    if self._depth == 1:
                        self._pump()
                    return out
                finally:
                    self._depth -= 1
                    if not self._depth:
                        tell = self.on_commands if self._outbox else None
                        ended, self._ended = self._ended, []
                        for job in ended:
                            job._finish()
        finally:  # whatever was raised: what was begun is given out, a job that has ended says so, and to everybody
            try:
                if tell is not None:
                    tell()
            finally:
                for job in ended:
                    job._call_back()

    # --- moves

    def _begin(self, move: Move) -> None:
        """Have the move's pages moved, as far as there is room now, the rest as room comes."""
        move.node.pins += 1
        self._waiting.append(move)
        self._advance(move)

    def _pump(self) -> None:
        """Let every waiting move go on as far as it can. Those that no answer can help any more are refused."""
        while self._waiting:
            changed = [self._advance(move) for move in [*self._waiting]]
            if any(changed):
                continue
            if self._flights or self._sizings:
                return
            going = [move for move in self._waiting if move.for_eviction]  # their pages make room for the others
            for move in going or [*self._waiting]:
                self._settle(move, move.pages, NO_ROOM)

    def _advance(self, move: Move) -> bool:
        """Give out what the move can do now. Whether anything has changed."""
        changed = False
        while move.pages.size and (most := self._batch(move)) and move in self._waiting:
            some = move.pages[: 2 * most]
            where, first = Match(move.node, int(some[-1]) + 1), int(some[0])
            ready = np.ones(some.size, dtype=np.bool_)
            if move.target is not None:
                there = self._index.codes(where, move.target, first)[some - first]
                if not self._books[move.target].attached:
                    self._settle(move, move.pages, CANCELLED)
                    return True
                if (there >= 0).any():
                    self._arrived(move, some[there >= 0])
                    changed = True
                    continue
                ready = there == ABSENT
            if move.source is not None:
                here = self._index.codes(where, move.source, first)[some - first]
                down = self._books[move.source].down and self._reads(move)
                lost = ready if down else ready & (here == ABSENT)
                if lost.any():
                    self._elsewhere(move, some[lost], ERROR if down else MISS, move.tried | {move.source})
                    changed = True
                    continue
                ready &= here >= 0
            batch = np.flatnonzero(ready)[:most]
            batch = batch[: self._room(move, batch.size)]
            if not batch.size or move not in self._waiting:
                return changed
            self._send(move, batch)
            changed = True
        return changed

    def _batch(self, move: Move) -> int:
        """Pages that the next command may take."""
        ends = [self._books[name] for name in (move.source, move.target) if name is not None]
        if not any(book.by_key for book in ends):
            return int(move.pages.size)
        return BATCH_PAGES if move.under_way < self._window else 0

    def _room(self, move: Move, wanted: int) -> int:
        if move.target is None or not wanted:
            return wanted
        return self._make_room(self._books[move.target], wanted, move.node)

    def _send(self, move: Move, at: Ids) -> None:
        """Give out one command for the pages at these positions of the move."""
        index, pages = self._index, move.pages[at]
        last = int(pages[-1])
        node = move.node
        while node.start > last and node.parent is not None:
            node = node.parent
        where, first = Match(node, last + 1), int(pages[0])
        source = None if move.source is None else self._books[move.source]
        target = None if move.target is None else self._books[move.target]
        read = np.empty(0, dtype=np.int64)
        if source is not None and not source.by_key:
            read = index.codes(where, source.name, first)[pages - first]
            source.begin_read(read)
        slots = np.zeros(pages.size, dtype=np.int64)
        if target is not None:
            before = int(index.codes(Match(node, first), target.name, first - 1)[0]) if first else ABSENT
            slots = target.take(pages.size, before if before >= 0 else None)
            index.write(node, target.name, pages, pending(slots))
        number = self._new_id()
        device = move.ids[at] if move.ids is not None else read
        command: Command
        if target is None:
            assert source is not None
            command = Load(
                id=number,
                tier=source.name,
                slots=packed(read),
                pages=packed(device),
                layerwise=move.layerwise,
                load=0 if move.job is None else move.job.number,
            )
        elif target.is_slots and (source is None or not source.by_key):
            command = Store(id=number, pages=packed(device), tier=target.name, slots=packed(slots))
        else:
            assert source is not None
            keys, tokens = self._named(where, pages)
            if target.is_slots:
                command = Promote(
                    id=number,
                    source=source.name,
                    tier=target.name,
                    slots=packed(slots),
                    scope=move.scope,
                    keys=keys,
                    tokens=tokens,
                    within_s=self._share_s(move, pages),
                )
            else:
                command = Demote(
                    id=number,
                    source=source.name,
                    slots=packed(read),
                    tier=target.name,
                    scope=move.scope,
                    keys=keys,
                    tokens=tokens,
                )
        self._give_out(Flight(command, node, pages, slots, read, move, move.source, move.target))
        move.under_way += 1
        sent = np.zeros(move.pages.size, dtype=np.bool_)
        sent[at] = True
        self._take_out(move, sent)

    def _take_out(self, move: Move, gone: NDArray[np.bool_]) -> None:
        """These pages of the move wait no more."""
        move.without(gone)
        if not move.pages.size and move in self._waiting:
            self._waiting.remove(move)
            self._end(move)

    def _end(self, move: Move) -> None:
        """The move's node need not be kept for it any more, once nothing of it waits or is under way."""
        if not move.pages.size and not move.under_way:
            move.node.pins -= 1
            self._index.tidy(move.node)

    def _settle(self, move: Move, pages: Ids, status: int) -> None:
        """This is what became of some of the move's pages, waiting or under way."""
        if not pages.size:
            return
        pages = pages.copy()
        if move.pages.size:
            self._take_out(move, np.isin(move.pages, pages))
        job = move.job
        if job is not None:
            if status != OK:
                job.detail = job.detail or move.detail
            self._tell(job, pages, status)
            if status != OK and job.kind != "store":  # no prefix goes beyond it
                self._cut(job, int(pages[0]))
        if move.for_eviction and move.source is not None:
            self._books[move.source].leaving -= pages.size
            if status != OK:
                self._drop(move.node, self._books[move.source], pages)

    def _tell(self, job: Job, pages: Ids, status: int) -> None:
        """This is what became of some of the job's pages. Once all are known, it holds them no more."""
        if job._settle(pages, status):
            self._ended.append(job)
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """The job holds its pages no more."""
        node, job.node = job.node, None
        if node is not None:
            self._index.unlock(node)
            self._index.tidy(node)

    def _cancel(self, job: Job) -> None:
        """Begin nothing more of the job, and ask what is under way to stop. A load does not wait for what is on its way
        to the host tier: that touches none of its device pages."""
        flights = [f for f in self._flights.values() if f.move is not None and f.move.job is job]
        for flight in flights:
            flight.cancelled = True
            self._outbox.append(Cancel(id=self._new_id(), command=flight.command.id))
        for move in [move for move in self._waiting if move.job is job]:
            self._settle(move, move.pages, CANCELLED)
        unowned = job.codes == WAITING
        for flight in flights:
            if job.kind != "load" or flight.target is None:
                unowned[flight.pages - job.first] = False
        self._tell(job, np.flatnonzero(unowned) + job.first, CANCELLED)

    def _cut(self, job: Job, page: int) -> None:
        """Nothing behind ``page`` is of use to the job: what is not under way stays where it is."""
        for move in [move for move in self._waiting if move.job is job]:
            behind = move.pages[move.pages > page]
            if behind.size:
                self._take_out(move, np.isin(move.pages, behind))
                self._tell(job, behind, CANCELLED)

    def _arrived(self, move: Move, pages: Ids) -> None:
        """Pages of the move are where it brings them; those of a load go on to the device."""
        job = move.job
        if job is None or job.kind != "load" or move.target is None:
            self._settle(move, pages, OK)
            return
        pages = pages.copy()
        if move.pages.size:
            self._take_out(move, np.isin(move.pages, pages))
        assert job.ids is not None
        wanted = pages[pages < job.first + job.open_end]
        self._tell(job, pages[wanted.size :], CANCELLED)
        if wanted.size:
            ids = job.ids[wanted - job.first]
            self._begin(Move(move.node, move.scope, wanted, move.target, None, ids, job, layerwise=move.layerwise))
