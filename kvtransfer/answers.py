"""Answers: what an acknowledgement means for the index, the books and the jobs, page by page."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import Book
from kvtransfer.commands import OK, STATUSES, Ack, Evict, Promote, Relocate, Scope
from kvtransfer.jobs import Flight, Move
from kvtransfer.kernels.errors import TransferError
from kvtransfer.moves import CANCELLED, CORRUPT, MISS, Moves
from kvtransfer.radix import Match
from kvtransfer.room import BARRED_S
from kvtransfer.tree import ABSENT, Ids, Node


class Answers(Moves):
    """The part of a `Directory` that takes answers. ``late_answers`` counts pages that were answered before, or whose
    command is unknown or given up."""

    late_answers = 0

    @abstractmethod
    def _size_on(self, flight: Flight) -> None:
        """See resizing.py."""

    @abstractmethod
    def _landed(self, flight: Flight) -> None:
        """See resizing.py."""

    def _check(self, ack: Ack, count: int) -> None:
        """Raise TransferError on an answer that can't be one to a command with so many positions."""
        if ack.first < 0 or ack.first + len(ack.statuses) > count:
            stop = ack.first + len(ack.statuses)
            raise TransferError(f"ack: expected positions in 0..{count - 1}, got {ack.first}..{stop - 1}")
        told = {*ack.unverified, *(position for position, _ in ack.bad_layers)}
        if not told <= set(range(ack.first, ack.first + len(ack.statuses))):
            raise TransferError(f"ack: expected details of positions that have a status in it, got {sorted(told)[:8]}")
        unknown = sorted(set(ack.statuses) - set(STATUSES))
        if unknown:
            raise TransferError(f"ack: expected statuses of {sorted(STATUSES)}, got {unknown}")

    def _answer(self, flight: Flight, ack: Ack) -> None:
        """Take statuses of some of the flight's pages."""
        self._check(ack, flight.pages.size)
        at = np.arange(ack.first, ack.first + len(ack.statuses))
        statuses = np.frombuffer(ack.statuses, dtype=np.uint8)
        fresh = ~flight.answered[at]
        self.late_answers += int(at.size - fresh.sum())
        at, statuses = at[fresh], statuses[fresh]
        flight.codes[at] = statuses
        move = flight.move
        job = move.job if move is not None else None
        if move is not None and job is not None:
            if self._reads(move):  # another tier may have what this one has not
                move.detail = move.detail or ack.detail
            else:
                job.detail = job.detail or ack.detail
            new = set(at.tolist())
            job.unverified += [int(flight.pages[n]) for n in ack.unverified if n in new]
            job.bad_layers += [(int(flight.pages[n]), layer) for n, layer in ack.bad_layers if n in new]
        if at.size:
            if isinstance(flight.command, Evict):
                self._evicted(flight, flight.pages[at], statuses)
            elif isinstance(flight.command, Relocate):
                self._relocated(flight, at, statuses)
            else:
                self._moved(flight, at, statuses)
        if flight.answered.all():
            self._land(flight)

    def _evicted(self, flight: Flight, pages: Ids, statuses: NDArray[np.uint8]) -> None:
        """What the tier could not remove is there still, and not asked to go again for a while."""
        assert flight.source is not None
        book = self._books[flight.source]
        gone = (statuses == OK) | (statuses == MISS)
        gone |= not book.attached
        self._index.write(flight.node, book.name, pages, np.where(gone, ABSENT, 0))
        book.leaving -= pages.size
        book.give(np.zeros(int(gone.sum()), dtype=np.int64))
        book.counters["evicted"] += int(gone.sum())
        book.counters["failed"] += int((~gone).sum())
        if not gone.all():
            book.barred[flight.node] = self._index.clock() + BARRED_S

    def _relocated(self, flight: Flight, at: Ids, statuses: NDArray[np.uint8]) -> None:
        """Pages have another slot now, and the old one is free once nobody reads it; or they stay where they are."""
        assert flight.source is not None
        book, pages, ok = self._books[flight.source], flight.pages[at], statuses == OK
        old, new = flight.read[at], flight.slots[at]
        first = int(pages[0])
        same = self._index.codes(Match(flight.node, int(pages[-1]) + 1), book.name, first)[pages - first] == old
        good = ok & same  # else it was found to be lost meanwhile
        book.end_read(old)
        self._index.write(flight.node, book.name, pages[good], new[good])
        book.give(old[good])
        book.give(new[~good])
        book.counters["relocated"] += int(good.sum())
        gone = (statuses == CORRUPT) | (statuses == MISS)
        if gone.any():
            self._lost(flight.node, book, pages[gone], old[gone])

    def _moved(self, flight: Flight, at: Ids, statuses: NDArray[np.uint8]) -> None:
        pages, ok = flight.pages[at], statuses == OK
        index, node, move = self._index, flight.node, flight.move
        assert move is not None
        if flight.target is not None:
            target = self._books[flight.target]
            kept = ok & target.attached
            index.write(node, target.name, pages, np.where(kept, flight.slots[at], ABSENT))
            target.give(flight.slots[at][~kept])
            target.counters["written"] += int(kept.sum())
            target.counters["failed"] += int((~kept).sum())
        if flight.source is not None:
            source = self._books[flight.source]
            if flight.read.size:
                source.end_read(flight.read[at])
            source.counters["read"] += int(ok.sum())
            gone = (statuses == CORRUPT) | (statuses == MISS)
            if gone.any():
                self._lost(node, source, pages[gone], flight.read[at][gone] if flight.read.size else None)
            if flight.target is None and (statuses == CORRUPT).any():
                self._distrust(node, pages[statuses == CORRUPT])
        for status in [] if ok.all() or self._reads(move) else np.unique(statuses[~ok]).tolist():
            self._settle(move, pages[statuses == status], status)
        if ok.any() and not self._goes_on(move):
            self._settle(move, pages[ok], OK)

    def _goes_on(self, move: Move) -> bool:
        """Whether arriving is not the end for the move's job: pages that a load waits for in the host tier."""
        return move.job is not None and move.job.kind == "load" and move.target is not None

    def _lost(self, node: Node, book: Book, pages: Ids, slots: Ids | None) -> None:
        """The tier does not have these pages (any more): a miss from now on."""
        where, first = Match(node, int(pages[-1]) + 1), int(pages[0])
        codes = self._index.codes(where, book.name, first)[pages - first]
        there = codes >= 0 if slots is None else codes == slots
        self._index.write(node, book.name, pages[there], np.full(int(there.sum()), ABSENT))
        book.give(codes[there])
        book.counters["lost"] += int(there.sum())

    def _distrust(self, node: Node, pages: Ids) -> None:
        """The host tier's bytes of these pages were wrong. What private tiers have of them came from there, or went
        there: it goes too, lest the next load brings the same bytes again."""
        for book in self._below:
            if book.attached and book.plan.kind == "keys":
                for one in self._index.path(node):
                    some = pages[(pages >= one.start) & (pages < one.end)]
                    if some.size:
                        self._ask_to_remove(one, book, some[self._row(one, book)[some - one.start] >= 0])

    def _land(self, flight: Flight) -> None:
        """Every page is answered."""
        del self._flights[flight.command.id]
        move, good = flight.move, flight.pages[flight.ok]
        if move is not None:
            if isinstance(flight.command, Promote):
                self._read(flight, flight.command)
            if good.size and self._goes_on(move):
                self._arrived(move, good)
            if good.size and flight.target == self._host.name:
                self._write_below(flight, good)
            move.under_way -= 1
        self._index.unlock(flight.node)
        if isinstance(flight.command, Relocate):
            self._landed(flight)
        if move is not None:
            if move.for_eviction and flight.source is not None:
                self._written_back(move, self._books[flight.source], flight)
            self._end(move)
        self._index.tidy(flight.node)
        self._size_on(flight)

    def _read(self, flight: Flight, command: Promote) -> None:
        """A tier has answered a read. What it could not give comes from the next one that has it."""
        move, codes, pages = flight.move, flight.codes, flight.pages
        assert move is not None and flight.source is not None
        # The haste of a load says nothing of a tier that had less time for it than it gets between two looks.
        hurried = 0 < command.within_s < self.retry_s[0] and bool((codes == CANCELLED).all())
        if not flight.cancelled and not hurried:
            self._heard(self._books[flight.source], codes, command)
        if not self._reads(move) or flight.ok.all():
            return
        tried = (codes != OK) & (codes != CANCELLED)
        if tried.any():  # a read ends with the first page that fails: what is CANCELLED behind it was not begun
            tried |= (codes == CANCELLED) & (np.arange(codes.size) < np.argmax(tried))
        else:
            tried = codes == CANCELLED
        for status in np.unique(codes[tried]).tolist():
            some = pages[tried & (codes == status)]
            if flight.cancelled:
                self._settle(move, some, status)
            else:
                self._elsewhere(move, some, status, move.tried | {flight.source})
        rest = pages[(codes == CANCELLED) & ~tried]
        if rest.size and flight.cancelled:
            self._settle(move, rest, CANCELLED)
        elif rest.size:
            self._elsewhere(move, rest, CANCELLED, move.tried)

    def _written_back(self, move: Move, source: Book, flight: Flight) -> None:
        """Pages were written so that they can go: the host tier gives them up now. Were they to wait until somebody
        looks for victims again, a small lower tier would give them up meanwhile, and they would be written again and
        again. Those of the device go when its owner asks again: he has to be told which."""
        if source.is_slots and flight.ok.any():
            self._drop(move.node, source, flight.pages[flight.ok], "evicted")
        if not flight.ok.all():
            self._drop(move.node, source, flight.pages[~flight.ok])

    def _write_below(self, flight: Flight, pages: Ids) -> None:
        """Pages have come into the host tier: what do the tiers below get of them now? Those that are faster than where
        the pages came from, if they came from below."""
        assert flight.move is not None
        for book in self._below:
            if book.name == flight.source:
                break
            for one in self._index.path(flight.node):
                some = pages[(pages >= one.start) & (pages < one.end)]
                if some.size and book.attached and book.write.now(one.hits):
                    self._begin(Move(one, flight.move.scope, some, self._host.name, book.name))

    def _write_hit(self, node: Node, scope: Scope) -> None:
        """Pages were hit: what do lower tiers get now that they did not get before?"""
        for book in self._below:
            for one in self._index.path(node) if book.attached else ():
                if (
                    not one.have[self._host.victims.tier]
                    or not book.write.now(one.hits)
                    or book.write.now(one.hits - 1)
                ):
                    continue
                where = Match(one, one.end)
                here = self._index.codes(where, self._host.name, one.start) >= 0
                lacking = here & (self._index.codes(where, book.name, one.start) == ABSENT)
                if lacking.any():
                    self._begin(Move(one, scope, np.flatnonzero(lacking) + one.start, self._host.name, book.name))
