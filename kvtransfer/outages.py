"""Outages: tiers by key that failed, and when they are asked again; from where else a page can be had.

A tier that answers a read or a lookup with nothing but failures is *down*: its pages stay known, but nothing is planned
from it. After a pause it is asked for one page; once it answers, it is used again. A tier that answers, and fails as
soon as it is read, is left alone longer each time.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import Book
from kvtransfer.commands import CODES, OK, WAITING, Ack, Cancel, Lookup, Promote
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Move
from kvtransfer.radix import Match
from kvtransfer.room import Room
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tree import Ids, Node

CANCELLED = CODES[PageStatus.CANCELLED]
_ALIVE = [CODES[status] for status in (PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT)]


class Outages(Room):
    """The part of a `Directory` that keeps away from tiers that fail. ``retry_s``: the first and the longest pause."""

    retry_s: tuple[float, float] = (1.0, 60.0)

    def __init__(self, index: PrefixIndex, books: dict[str, Book], evict_extra: float) -> None:
        super().__init__(index, books, evict_extra)
        self._looks: dict[int, Book] = {}  # at tiers that are down, by command

    @abstractmethod
    def _settle(self, move: Move, pages: Ids, status: int) -> None:
        """See moves.py."""

    @abstractmethod
    def _take_out(self, move: Move, gone: NDArray[np.bool_]) -> None:
        """See moves.py."""

    def _usable(self) -> list[Book]:
        """Tiers by key that pages are read from, fastest first."""
        return [book for book in self._below if book.attached and not book.down]

    def _sources(self, node: Node, pages: Ids, tried: frozenset[str]) -> list[tuple[str, Ids]]:
        """From where ``pages`` (rising) on the path to ``node`` can be read, but for the tiers ``tried``: names, each
        with its pages. What nobody has is in none."""
        found: list[tuple[str, Ids]] = []
        for book in self._usable():
            if book.name not in tried and pages.size:
                where, first = Match(node, int(pages[-1]) + 1), int(pages[0])
                there = self._index.codes(where, book.name, first)[pages - first] >= 0
                if there.any():
                    found.append((book.name, pages[there]))
                    pages = pages[~there]
        return found

    def _reads(self, move: Move) -> bool:
        """Whether somebody waits for the move's pages to come from a tier by key, from whichever."""
        return move.job is not None and move.source is not None and self._books[move.source].by_key

    def _elsewhere(self, move: Move, pages: Ids, status: int, tried: frozenset[str]) -> None:
        """Pages of the move, waiting or under way, can't be had from its source. They are to come from the next tier
        that has them, but none of ``tried``; where there is none, ``status`` is what became of them."""
        job = move.job
        if job is None or not self._reads(move):
            self._settle(move, pages, status)
            return
        wanted = pages[job.codes[pages - job.first] == WAITING]
        found = self._sources(move.node, wanted, tried)
        some = np.concatenate([part for _, part in found]) if found else wanted[:0]
        self._settle(move, np.setdiff1d(pages, some), status)
        end = job.first + job.open_end  # nothing behind it is of use
        self._settle(move, np.sort(some[some >= end]), CANCELLED)
        if move.pages.size:
            self._take_out(move, np.isin(move.pages, some))
        for name, part in found:
            if (part := part[part < end]).size:
                again = Move(move.node, move.scope, part, name, move.target, job=job, layerwise=move.layerwise)
                again.tried, again.detail = tried, move.detail
                self._begin(again)

    def _share_s(self, move: Move, pages: Ids) -> float:
        """How long the move's source may take for these pages: of a load, half of what is left for it, where another
        tier has some of them; 0 where nobody says."""
        limit_s = None if move.job is None else move.job.deadline_s
        if limit_s is None or move.source is None or not self._sources(move.node, pages, move.tried | {move.source}):
            return 0.0
        return limit_s * 0.5 ** (1 + len(move.tried))

    def _heard(self, book: Book, codes: NDArray[np.uint8], command: Promote | Lookup) -> None:
        """This is all that a tier had to say to a read, or to a lookup."""
        if np.isin(codes, _ALIVE).any():
            if isinstance(command, Promote) and (codes == OK).any():
                book.down, book.pause_s = False, 0.0
        elif book.attached and not book.down:
            first, longest = self.retry_s
            book.down = True
            book.pause_s = min(2 * book.pause_s, longest) if book.pause_s else first
            book.asked_at = self._index.clock()
            book.sample = command.scope, command.keys[0]
            book.outages += 1

    def _look_after(self) -> None:
        """Ask tiers that are down whether they answer again, each when its pause is over."""
        now = self._index.clock()
        for book in self._below:
            if book.down and book.attached and now - book.asked_at >= book.pause_s and book not in self._looks.values():
                scope, key = book.sample
                command = Lookup(id=self._new_id(), tier=book.name, scope=scope, keys=[key])
                self._looks[command.id] = book
                self._outbox.append(command)

    def _looked(self, ack: Ack) -> None:
        """Whether the tier answers again. That it can be read, too, is seen when it is."""
        book = self._looks[ack.id]
        if not ack.statuses:
            return
        del self._looks[ack.id]
        if ack.statuses[0] in _ALIVE:
            book.down = False
        else:
            book.pause_s = min(2 * book.pause_s, self.retry_s[1])
            book.asked_at = self._index.clock()

    def _stop_looking(self) -> None:
        """No answer is waited for."""
        for number in self._looks:
            self._outbox.append(Cancel(id=self._new_id(), command=number))
        self._looks.clear()

    def _recover(self, book: Book) -> None:
        """Nothing is held against the tier any more."""
        book.down, book.pause_s = False, 0.0
        self._looks = {number: one for number, one in self._looks.items() if one is not book}
