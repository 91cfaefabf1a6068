"""A memory that carries out a directory's commands, and looks at every byte: what a page holds here is the whole prefix
that it stands for, so a wrong page can't look right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from index_helpers import check_tree

from kvtransfer.commands import (
    CODES,
    Ack,
    AnyMessage,
    Cancel,
    Command,
    Demote,
    Evict,
    Load,
    Lookup,
    Promote,
    Relocate,
    Resize,
    Scope,
    Store,
    decode,
    encode,
    ids,
    positions,
)
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.keys import page_keys
from kvtransfer.tree import ABSENT, pending

Content = tuple[Scope, tuple[int, ...]]
GOOD, LOST, BROKEN, FULL = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.NO_ROOM


def over_the_wire(message: AnyMessage) -> AnyMessage:
    return decode(encode(message))


@dataclass
class Under:
    """A command being carried out: which positions have no answer yet."""

    command: Command
    left: list[int]


@dataclass
class Memory:
    """Device pages, host slots, and pages by (tier, scope, page key). A slot is marked when its command arrives, so
    that one given to two commands at once is found out; what is read is read when it is answered."""

    page_size: int
    device: dict[int, Content] = field(default_factory=dict)
    host: dict[int, Content | int] = field(default_factory=dict)
    stored: dict[tuple[str, Scope, bytes], Content] = field(default_factory=dict)
    under: dict[int, Under] = field(default_factory=dict)
    seen: list[Command] = field(default_factory=list)
    next_page: int = 0
    slots: int | None = None  # that have memory; None: not looked at

    def fill(self, tokens: Iterable[int], scope: Scope = Scope(), first: int = 0) -> list[int]:  # noqa: B008
        """New device pages that hold what a forward over ``tokens`` would have written."""
        whole = tuple(int(t) for t in tokens)
        pages = []
        for n in range(first, len(whole) // self.page_size):
            self.device[self.next_page] = (scope, whole[: (n + 1) * self.page_size])
            pages.append(self.next_page)
            self.next_page += 1
        return pages

    def room(self, n: int) -> list[int]:
        """New device pages that hold nothing."""
        self.next_page += n
        return list(range(self.next_page - n, self.next_page))

    def take(self, directory: Directory) -> list[Command]:
        out = []
        for sent in directory.commands():
            command = over_the_wire(sent)
            assert command == sent and not isinstance(command, Ack)
            out.append(command)
            if isinstance(command, Cancel):
                continue
            assert command.id not in self.under
            self.under[command.id] = Under(command, list(range(positions(command))))
            if isinstance(command, Store | Promote | Relocate):
                slots = ids(command.slots).tolist()
                assert len(set(slots)) == len(slots) and (self.slots is None or max(slots) < self.slots)
                taken = {s for u in self.under.values() for s in self._uses(u) if u.command is not command}
                assert not taken & set(slots), f"{command} writes slots that {taken & set(slots)} are still used"
                self.host |= dict.fromkeys(slots, command.id)
            if isinstance(command, Resize):
                self._let_go(command)
        self.seen += out
        return out

    def _let_go(self, command: Resize) -> None:
        """Memory goes as soon as it is asked: nothing may be there that anybody uses, now or later."""
        used = {s for u in self.under.values() for s in self._uses(u)}
        assert all(slot < command.capacity_pages for slot in used), f"{command} of slots in {used}"
        self.host = {slot: held for slot, held in self.host.items() if slot < command.capacity_pages}
        if self.slots is not None:
            self.slots = min(self.slots, command.capacity_pages)

    def _uses(self, under: Under) -> list[int]:
        if isinstance(under.command, Relocate):
            both = [ids(numbers)[under.left] for numbers in (under.command.read, under.command.slots)]
            return [int(slot) for slot in np.concatenate(both)]
        if isinstance(under.command, Store | Load | Promote | Demote):
            slots: list[int] = ids(under.command.slots)[under.left].tolist()
            return slots
        return []

    def answer(self, command: Command, at: list[int], statuses: list[PageStatus]) -> list[Ack]:
        """Carry out some positions of a command with these outcomes. One answer a run of neighbours."""
        under = self.under[command.id]
        told: list[Ack] = []
        for position, status in zip(at, statuses, strict=True):
            got = self._one(command, position, status)
            under.left.remove(position)
            code = bytes([CODES[got]])
            if told and told[-1].first + len(told[-1].statuses) == position:
                told[-1] = Ack(id=command.id, first=told[-1].first, statuses=told[-1].statuses + code)
            else:
                told.append(Ack(id=command.id, first=position, statuses=code))
        if not under.left:
            del self.under[command.id]
        return told

    def _one(self, command: Command, at: int, status: PageStatus) -> PageStatus:
        """What really becomes of a page."""
        if isinstance(command, Lookup | Evict):
            key = (command.tier, command.scope, command.keys[at])
            if isinstance(command, Lookup):
                return status if status is not GOOD or key in self.stored else LOST
            if status is GOOD and self.stored.pop(key, None) is None:
                return LOST
            return status
        if isinstance(command, Resize):
            if status is GOOD and self.slots is not None:
                self.slots = command.capacity_pages
            return status
        if isinstance(command, Relocate):
            held, slot = self.host[int(ids(command.read)[at])], int(ids(command.slots)[at])
            assert not isinstance(held, int) and self.host[slot] == command.id
            if status is GOOD:
                self.host[slot] = held
            return status
        assert not isinstance(command, Cancel)
        slot = int(ids(command.slots)[at])
        if isinstance(command, Store | Promote):
            assert self.host[slot] == command.id, "the slot was given to somebody else"
            if isinstance(command, Store):
                content = self.device[int(ids(command.pages)[at])]
            else:
                found = self.stored.get((command.source, command.scope, command.keys[at]))
                if found is None:
                    return LOST if status is GOOD else status
                content = found
                size = self.page_size
                own = np.frombuffer(command.tokens, "<u4")[at * size : (at + 1) * size]
                assert content[1][-size:] == tuple(own.tolist())
            if status is GOOD:
                self.host[slot] = content
            return status
        held = self.host[slot]
        assert not isinstance(held, int), "read before it was written"
        if status is GOOD and isinstance(command, Load):
            self.device[int(ids(command.pages)[at])] = held
        if status is GOOD and isinstance(command, Demote):
            assert held[0] == command.scope
            key_of = page_keys(held[1], self.page_size)[-1]
            assert command.keys[at] == key_of
            self.stored[command.tier, command.scope, key_of] = held
        return status

    def drain(
        self, directory: Directory, status: Callable[[Command], PageStatus] = lambda command: GOOD, limit: int = 200
    ) -> None:
        """Carry out everything, in order, until nothing is left. A full tier may move a page a round."""
        waiting = sum(move.pages.size for move in directory._waiting)
        for _ in range(limit + waiting):
            self.take(directory)
            if not self.under:
                return
            for under in list(self.under.values()):
                at = list(under.left)
                for ack in self.answer(under.command, at, [status(under.command)] * len(at)):
                    answer = over_the_wire(ack)
                    assert isinstance(answer, Ack)
                    directory.acknowledge(answer)
        raise AssertionError("commands without an end")

    def verify(self, job: Job, tokens: Iterable[int], page_ids: list[int], scope: Scope = Scope()) -> None:  # noqa: B008
        """Every page that a load says is OK holds what it should."""
        whole = tuple(int(t) for t in tokens)
        for position in job.positions(GOOD):
            page = page_ids[position - job.first]
            assert self.device[page] == (scope, whole[: (position + 1) * self.page_size])


def check_directory(directory: Directory) -> None:
    """No page is both free and used, everything that is counted is right, and nothing waits for nobody."""
    index = directory.index
    check_tree(index)
    flights = directory._flights.values()
    for book in directory._books.values():
        tier = book.victims.tier
        rows = [row for node in index.nodes() if (row := node.rows[tier]) is not None]
        codes = np.concatenate([row.astype(np.int64) for row in rows]) if rows else np.empty(0, np.int64)
        here, coming = codes[codes >= 0], pending(codes[codes < ABSENT])
        if book.is_slots:
            doomed = np.flatnonzero(book._doomed)
            moving = [f.slots[~f.answered] for f in flights if isinstance(f.command, Relocate)]
            used = np.concatenate((here, coming, doomed, *moving))
            assert np.unique(used).size == used.size, "one slot for two pages"
            taken = np.flatnonzero(book.extents._taken)
            assert sorted(used.tolist()) == taken.tolist()
            ready = book.extents.ready
            below = int((taken < ready).sum())
            assert book.used == taken.size and book.extents.free_slots == ready - below == book.free
            assert book.extents.leaving == taken.size - below and book.capacity == ready <= book.memory
            assert book.sizing is not None or (taken.size == below and book.goal == book.memory == ready)
            readers = np.zeros_like(book.readers)
            for flight in flights:
                if flight.read.size and flight.source == book.name:
                    readers[flight.read[~flight.answered]] += 1
            assert (readers == book.readers).all() and (book.readers[doomed] > 0).all()
        else:
            assert book.used == (here.size + coming.size if book.plan.kind != "shared" else 0)
        assert book.capacity is None or book.used <= book.capacity or book.by_key or book.sizing is not None
        assert book.leaving >= 0
        if not flights and not directory._waiting and not directory._sizings:
            assert book.leaving == 0
    relocations = [f for f in flights if isinstance(f.command, Relocate)]
    assert sum(book.relocations for book in directory._books.values()) == len(relocations)
    if not flights:
        assert not directory._waiting or directory._sizings  # a tier that grows may bring room
        assert all(not any(node.due) for node in index.nodes())
    pins = sum(node.pins for node in index.nodes())
    under_way = {id(f.move): f.move for f in flights if f.move is not None}
    moves = under_way | {id(move): move for move in directory._waiting}
    assert pins == len(moves) + len(directory._ghosts)
    assert len(flights) <= index.locks
    figures = directory.figures()
    assert sum(figures.hit_tokens_by_tier.values()) == figures.hit_tokens <= figures.asked_tokens
