"""Room: what a tier gives up so that something else has room, and how.

Pages of the host tier and of the device go at once, or once they are written where a write-back policy wants them. A
tier that is addressed by key is told to remove them, and they count until it has said so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import Book
from kvtransfer.commands import Command, Evict, Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Flight, Move
from kvtransfer.radix import Match
from kvtransfer.tree import ABSENT, Ids, Node, pending

BATCH_PAGES = 128  # of a command to or from a tier that is addressed by key
BARRED_S = 1.0  # before a page that a tier could not remove is asked to go again


class Room(ABC):
    """The part of a `Directory` that gives up pages, and gives out commands. Its methods want the mutex held.

    evict_extra  share of a tier's capacity that is made free beyond what is needed
    """

    def __init__(self, index: PrefixIndex, books: dict[str, Book], evict_extra: float) -> None:
        self._index = index
        self._books = books
        self._below = [book for book in books.values() if book.by_key]  # fastest first
        self._evict_extra = evict_extra
        self._outbox: list[Command] = []
        self._flights: dict[int, Flight] = {}
        self._next_id = 1

    @abstractmethod
    def _begin(self, move: Move) -> None:
        """See moves.py."""

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _give_out(self, flight: Flight) -> None:
        self._index.lock(flight.node)
        self._flights[flight.command.id] = flight
        self._outbox.append(flight.command)

    def _named(self, where: Match, pages: Ids) -> tuple[list[bytes], bytes]:
        """Keys and tokens of some pages (rising)."""
        first, size = int(pages[0]), 4 * self._index.page_size
        keys, tokens = self._index.keys(where, first), self._index.tokens(where, first)
        if len(keys) == pages.size:
            return keys, tokens
        local = (pages - first).tolist()
        return [keys[n] for n in local], b"".join(tokens[n * size : (n + 1) * size] for n in local)

    def _make_room(self, book: Book, wanted: int, own: Node | None = None) -> int:
        """Up to ``wanted`` pages of room, for pages on the path to ``own``: how many there are now. Others' pages go,
        and of that path those that a lower tier has. Some may go only after an answer."""
        if book.free is None:
            return wanted
        while (short := wanted - book.free - book.leaving) > 0:
            extra = int(self._evict_extra * (book.capacity or 0))
            gone = self._evict(book, short + extra, own)
            if not (book.is_slots and (gone >= book.extents.ready).any()):
                break  # what went from slots that are to go made no room: look for more
        return max(0, min(wanted, book.free))

    def _evict(self, book: Book, wanted: int, own: Node | None = None, *, spare: bool = True) -> Ids:
        """Give up to ``wanted`` pages up, in the order of the tier's policy (``spare``: see `Victims.walk`). The slots
        (or device pages) that are free now; for others commands have been given out."""
        freed: list[Ids] = []
        path = set(self._index.path(own)) if own is not None else set()
        now = self._index.clock()
        book.barred = {node: until for node, until in book.barred.items() if until > now}
        with closing(book.victims.walk(now, spare=spare)) as walk:
            for node in walk:
                if node in book.barred:
                    continue
                local = np.flatnonzero(self._row(node, book) >= 0)
                if node in path:
                    local = self._covered_tail(node, book, local)
                local = local[-wanted:]
                if local.size:
                    freed.append(self._give_up(node, book, local))
                    wanted -= local.size
                if wanted <= 0:
                    break
        return np.concatenate(freed) if freed else np.empty(0, dtype=np.int64)

    def _row(self, node: Node, book: Book) -> NDArray[np.int64]:
        return self._index.codes(Match(node, node.end), book.name, node.start)

    def _covered_tail(self, node: Node, book: Book, local: Ids) -> Ids:
        """Of the tier's pages in a node, the last ones, as far as a private tier by key has them too."""
        have = np.zeros(node.pages, dtype=np.bool_)
        for lower in self._below:
            if lower is not book and lower.attached and lower.plan.kind == "keys":
                have |= self._row(node, lower) >= 0
        bare = np.flatnonzero(~have[local])
        return local[bare[-1] + 1 :] if bare.size else local

    def _give_up(self, node: Node, book: Book, local: Ids) -> Ids:
        """A tail's pages go: at once, or once they are written where they must be, or once their tier says so."""
        pages = local + node.start
        scope = Scope.parse(self._index.namespace(node))
        below = [b for b in self._books.values() if b.attached and b.write.on_evict and self._writes(book, b)]
        for lower in below:
            lacking = self._row(node, lower)[local] == ABSENT
            if lacking.any():
                book.leaving += int(lacking.sum())
                move = Move(node, scope, pages[lacking], book.name, lower.name, for_eviction=True)
                behind = int(np.flatnonzero(lacking)[-1]) + 1
                freed = self._drop(node, book, pages[behind:], "evicted") if behind < local.size else local[:0]
                self._begin(move)
                return freed
        if not book.by_key:
            return self._drop(node, book, pages, "evicted")
        self._ask_to_remove(node, book, pages)
        return local[:0]

    def _ask_to_remove(self, node: Node, book: Book, pages: Ids) -> None:
        """Tell a tier by key to remove pages of a node; they count until it has said so."""
        scope = Scope.parse(self._index.namespace(node))
        for at in range(0, pages.size, BATCH_PAGES):
            some = pages[at : at + BATCH_PAGES]
            book.leaving += some.size
            keys, _ = self._named(Match(node, int(some[-1]) + 1), some)
            zeros = np.zeros(some.size, dtype=np.int64)
            self._index.write(node, book.name, some, pending(zeros))
            command = Evict(id=self._new_id(), tier=book.name, scope=scope, keys=keys)
            self._give_out(Flight(command, node, some, zeros, zeros[:0], None, book.name, None))

    def _writes(self, upper: Book, lower: Book) -> bool:
        """Whether pages go from the one to the other."""
        return lower.is_slots if upper.plan.kind == "device" else upper.is_slots and lower.by_key

    def _drop(self, node: Node, book: Book, pages: Ids, counted: str = "dropped") -> Ids:
        """The tier has these pages no more, from now on, as far as nobody holds them. Their slots."""
        where, first = Match(node, int(pages[-1]) + 1), int(pages[0])
        codes = self._index.codes(where, book.name, first)[pages - first]
        held = np.zeros(pages.size, dtype=np.bool_)
        for one in self._index.path(node):
            if one.locks:
                held |= (pages >= one.start) & (pages < one.end)
        going = (codes >= 0) & ~held
        pages, codes = pages[going], codes[going]
        self._index.write(node, book.name, pages, np.full(pages.size, ABSENT))
        book.give(codes)
        book.counters[counted] += pages.size
        self._index.tidy(node)
        return codes
