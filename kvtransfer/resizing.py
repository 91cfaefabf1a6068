"""Resizing: the host tier gets other slots while it is used. Fewer: pages in slots that are to go move to others.

First the policy gives up what is too much, then what is left in the highest slots is relocated; when nobody uses these
any more, the mover is told to give their memory back. What is held is moved, not given up, and what is on its way to
such a slot is moved once it is there. More: the mover makes the memory, then its slots are given out.
"""

from __future__ import annotations

import numpy as np

from kvtransfer.answers import Answers
from kvtransfer.books import Book
from kvtransfer.commands import OK, Ack, Relocate, Resize, packed
from kvtransfer.jobs import Flight, Job
from kvtransfer.moves import CANCELLED
from kvtransfer.radix import Match
from kvtransfer.room import BATCH_PAGES
from kvtransfer.tree import Ids, Node


class Resizing(Answers):
    """The part of a `Directory` that changes the size of its slots tier. Its methods want the mutex held."""

    def _set_size(self, book: Book, pages: int, job: Job) -> None:
        """The tier is to have ``pages`` slots; ``job`` is done once it has, memory and all."""
        self._give_up_size(book)
        book.sizing, book.goal = job, pages
        self._set_ready(book)
        self._vacate(book)

    def _give_up_size(self, book: Book) -> None:
        """Wait for no other size any more. Its command, if it is under way, still has its answer."""
        job, book.sizing = book.sizing, None
        if job is not None:
            self._tell(job, np.zeros(1, dtype=np.int64), CANCELLED)

    def _set_ready(self, book: Book) -> None:
        """Give out the slots that are to be and have memory, and no others."""
        ready = min(book.goal, book.memory)
        if ready < book.extents.ready:
            book.extents.shrink(ready)
        else:
            book.extents.grow(ready)
        book.capacity = ready

    def _vacate(self, book: Book) -> None:
        """Free the slots that are to go, as far as that can be begun now."""
        if book.sizing is None or not book.extents.leaving or book.relocations:
            return
        for spare in (True, False):  # what a policy would keep for ever must fit, too
            over = sum(local.size for _, local in self._outside(book)) - book.extents.free_slots - book.leaving
            if over > 0:
                self._evict(book, over, spare=spare)
        for node, local in self._outside(book):
            for at in range(0, local.size, BATCH_PAGES):
                self._relocate(book, node, local[at : at + min(BATCH_PAGES, book.extents.free_slots)] + node.start)

    def _outside(self, book: Book) -> list[tuple[Node, Ids]]:
        """The pages, by node and place in it, that are in slots that are to go."""
        ready, tier = book.extents.ready, book.victims.tier
        found = []
        for node in self._index.nodes():
            row = node.rows[tier]
            if row is not None and (local := np.flatnonzero(row >= ready)).size:
                found.append((node, local))
        return found

    def _relocate(self, book: Book, node: Node, pages: Ids) -> None:
        if not pages.size:
            return
        where, first = Match(node, int(pages[-1]) + 1), max(0, int(pages[0]) - 1)
        codes = self._index.codes(where, book.name, first)
        read = codes[pages - first]
        slots = book.take(pages.size, int(codes[0]) if first < pages[0] and codes[0] >= 0 else None)
        book.begin_read(read)
        command = Relocate(id=self._new_id(), tier=book.name, read=packed(read), slots=packed(slots))
        book.relocations += 1
        self._give_out(Flight(command, node, pages, slots, read, None, book.name, book.name))

    def _landed(self, flight: Flight) -> None:
        """A relocation is answered. What could not be moved is given up, unless somebody holds it."""
        assert flight.source is not None
        book = self._books[flight.source]
        book.relocations -= 1
        if not flight.ok.all():
            codes = self._index.codes(Match(flight.node, flight.node.end), book.name)
            left = flight.pages[~flight.ok]
            left = left[codes[left] == flight.read[~flight.ok]]
            if left.size:
                self._drop(flight.node, book, left)

    def _size_on(self, flight: Flight) -> None:
        """A command is answered: go on with what it was in the way of. Looking for pages costs a walk over the tree, so
        it is done after answers that can have changed something; `Directory.tick` does it in any case."""
        book = self._host
        if book.sizing is None or not book.extents.leaving:
            return
        wrote = flight.target == book.name and bool((flight.slots >= book.extents.ready).any())
        gave_up = flight.move is not None and flight.move.for_eviction
        if wrote or gave_up or (isinstance(flight.command, Relocate) and flight.ok.any()):
            self._vacate(book)

    def _pump(self) -> None:
        """Ask the mover for the other size as soon as nothing is in the way."""
        super()._pump()
        book = self._host
        if book.sizing is None or book.size_asked or book.extents.leaving:
            return
        if book.goal == book.memory:
            job, book.sizing = book.sizing, None
            self._tell(job, np.zeros(1, dtype=np.int64), OK)
            return
        book.size_asked = True
        book.memory = min(book.memory, book.goal)  # what goes is not counted on from now on
        command = Resize(id=self._new_id(), tier=book.name, capacity_pages=book.goal)
        self._sizings[command.id] = (book, command)
        self._outbox.append(command)

    def _sized(self, ack: Ack) -> None:
        """The mover's answer to a `Resize`."""
        book, command = self._sizings[ack.id]
        self._check(ack, 1)
        if not ack.statuses:
            return
        del self._sizings[ack.id]
        book.size_asked = False
        if ack.statuses[0] == OK:
            book.memory = command.capacity_pages
        if book.sizing is not None and book.goal == command.capacity_pages:
            job, book.sizing = book.sizing, None
            job.detail = ack.detail
            self._tell(job, np.zeros(1, dtype=np.int64), ack.statuses[0])
            book.goal = book.memory
        self._set_ready(book)
