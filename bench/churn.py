"""Churn: stores come and go in a slab that is nearly full, and where each of them lies afterwards. No GPU.

A store asks a placer for slots, one a page, and what was used least recently leaves first. The placers are ours
(`kvtransfer.tiers.extents`) and the usual free lists.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.tiers.extents import Extents

Ids = NDArray[np.int64]

SHORTEST_TOKENS, LONGEST_TOKENS = 256, 8192  # of a store, evenly spread
CONTEXT_TOKENS = 32768  # a prefix that is continued grows no longer than this
FILL = 0.95
RECENT = 200  # a store that is hit again is one of the last so many
HIT = 0.5  # of the stores hit (or continue) one of them
AT_ONCE = 16  # stores that grow beside each other


class Placer(Protocol):
    """Gives slots out and takes them back."""

    def allocate(self, n: int, after: int | None = None) -> Ids:
        """``n`` slots, best right behind ``after``."""
        ...

    def free(self, slots: Ids) -> None:
        """Take them back."""
        ...


class Stack:
    """Last in, first out: the list of free slots that one pops from. A store's slots are pushed backwards, so that the
    next one pops them in order: the kindest way."""

    def __init__(self, count: int) -> None:
        self._free = np.arange(count - 1, -1, -1, dtype=np.int64)
        self._top = count

    def allocate(self, n: int, after: int | None = None) -> Ids:
        """The ``n`` slots that were freed last."""
        self._top -= n
        return self._free[self._top : self._top + n][::-1].copy()

    def free(self, slots: Ids) -> None:
        """Put them on top."""
        self._free[self._top : self._top + slots.size] = slots[::-1]
        self._top += slots.size


class Queue:
    """First in, first out: freed slots are appended, new ones taken from the front."""

    def __init__(self, count: int) -> None:
        self._free = np.arange(count, dtype=np.int64)

    def allocate(self, n: int, after: int | None = None) -> Ids:
        """The ``n`` slots that have been free for longest."""
        out, self._free = self._free[:n].copy(), self._free[n:]
        return out

    def free(self, slots: Ids) -> None:
        """Append them."""
        self._free = np.concatenate((self._free, slots))


class SortedList(Queue):
    """A queue whose free slots are sorted once the sorted ones have run out."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._freed: list[Ids] = []

    def allocate(self, n: int, after: int | None = None) -> Ids:
        """The ``n`` lowest of the sorted ones."""
        if n > self._free.size:
            self._free = np.sort(np.concatenate((self._free, *self._freed)))
            self._freed = []
        return super().allocate(n)

    def free(self, slots: Ids) -> None:
        """Keep them for the next sort."""
        self._freed.append(slots)


PLACERS: dict[str, type[Extents] | type[Stack] | type[Queue] | type[SortedList]] = {
    "extents": Extents,
    "stack": Stack,
    "queue": Queue,
    "sorted": SortedList,
}


@dataclass(frozen=True)
class Workload:
    """How stores come and go.

    extends      half of the stores continue an earlier one: they are given its last slot
    tails        the tail ends of the least recently used branches leave, no more than is needed; otherwise whole
                 stores with all that continues them
    block_bytes  `AT_ONCE` stores grow beside each other, so many bytes of pages at a time; 0: a store is placed at once
    """

    name: str
    says: str
    extends: bool = False
    tails: bool = False
    block_bytes: int = 0


WORKLOADS = {
    w.name: w
    for w in (
        Workload("new", "every store is new; whole stores leave"),
        Workload("extend", "half continue an earlier one; whole conversations leave", extends=True),
        Workload("tails", "half continue an earlier one; tails leave", extends=True, tails=True),
        Workload("blocks", f"{AT_ONCE} grow at once in blocks of 4 MiB; tails leave", tails=True, block_bytes=4 << 20),
        Workload("pages", f"{AT_ONCE} grow at once page by page; tails leave", tails=True, block_bytes=1),
    )
}


@dataclass
class _Store:
    slots: Ids
    parent: int | None = None
    children: set[int] = field(default_factory=set)


class Churn:
    """Stores in ``slots`` slots of ``page_size`` tokens, `FILL` full. Every slot that is given out is checked to be
    free, and in range.

    seconds, calls  of the placer: CPU time in it, and times it was asked for slots
    """

    def __init__(
        self, placer: Placer, slots: int, page_size: int, page_bytes: int, workload: Workload, seed: int
    ) -> None:
        self.placer, self.slots, self.page_size, self.workload = placer, slots, page_size, workload
        self.block = max(1, workload.block_bytes // page_bytes)
        self.limit = int(FILL * slots)
        need = (2 * AT_ONCE if workload.block_bytes else 4) * LONGEST_TOKENS // page_size
        if self.limit < need:
            raise ValueError(f"slots: expected at least {int(need / FILL) + 1} for pages of {page_size}, got {slots}")
        self.seconds, self.calls = 0.0, 0
        self._used = np.zeros(slots, dtype=np.bool_)
        self._mark = np.zeros(slots, dtype=np.int64)
        self._held = 0
        self._live: OrderedDict[int, _Store] = OrderedDict()  # the least recently used first
        self._rng = random.Random(seed)
        self._made = 0

    def stores(self) -> Iterator[Ids]:
        """The slots of one finished store after another, without end."""
        return self._side_by_side() if self.workload.block_bytes else self._one_by_one()

    def free_runs(self) -> Ids:
        """Lengths of the runs that the free slots lie in."""
        return run_lengths(np.flatnonzero(~self._used))

    def _one_by_one(self) -> Iterator[Ids]:
        while True:
            n = self._length()
            path = self._hit(n)
            parent = path[0] if path and self.workload.extends else None
            slots = self._take(n, None if parent is None else int(self._live[parent].slots[-1]), set(path))
            self._keep(slots, parent)
            yield slots

    def _side_by_side(self) -> Iterator[Ids]:
        growing: list[tuple[int, list[Ids]]] = []
        while True:
            growing += [(self._length(), []) for _ in range(AT_ONCE - len(growing))]
            for number, (left, parts) in enumerate(growing):
                n = min(left, self.block)
                parts.append(self._take(n, int(parts[-1][-1]) if parts else None, set()))
                growing[number] = (left - n, parts)
            for _, parts in (g for g in growing if not g[0]):
                slots = np.concatenate(parts)
                self._hit(0)
                self._keep(slots, None)
                yield slots
            growing = [g for g in growing if g[0]]

    def _length(self) -> int:
        return -(-self._rng.randint(SHORTEST_TOKENS, LONGEST_TOKENS) // self.page_size)

    def _hit(self, n: int) -> list[int]:
        """A store that is used again, and what it continues, back to the root; nothing if none is, or if ``n`` more
        pages would be too long."""
        path: list[int] = []
        if self._rng.random() >= HIT:
            return path
        at: int | None = self._rng.randrange(max(0, self._made - RECENT), max(1, self._made))
        while at is not None and at in self._live:
            path.append(at)
            at = self._live[at].parent
        longest = min(CONTEXT_TOKENS // self.page_size, self.limit // 4)
        if sum(self._live[p].slots.size for p in path) + n > longest and self.workload.extends:
            return []
        for p in path:
            self._live.move_to_end(p)
        return path

    def _keep(self, slots: Ids, parent: int | None) -> None:
        self._live[self._made] = _Store(slots, parent)
        if parent is not None:
            self._live[parent].children.add(self._made)
        self._made += 1

    def _take(self, n: int, after: int | None, path: set[int]) -> Ids:
        while (excess := self._held + n - self.limit) > 0:
            self._give_back(self._least_recent(excess, path))
        started = time.thread_time()
        slots = self.placer.allocate(n, after)
        self.seconds += time.thread_time() - started
        self.calls += 1
        self._mark[slots] = here = np.arange(slots.size)
        if slots.size != n or self._used[slots].any() or (self._mark[slots] != here).any():
            raise RuntimeError(f"expected {n} free slots, got {slots.size}, or some of them given out already")
        self._used[slots] = True
        self._held += n
        return slots

    def _give_back(self, slots: Ids) -> None:
        started = time.thread_time()
        self.placer.free(slots)
        self.seconds += time.thread_time() - started
        self._used[slots] = False
        self._held -= slots.size

    def _least_recent(self, excess: int, path: set[int]) -> Ids:
        """Take out of the books what leaves next, nothing of ``path``; its slots."""
        if self.workload.tails:
            at = next(i for i, store in self._live.items() if not store.children and i not in path)
            store = self._live[at]
            if store.slots.size > excess:
                store.slots, leaving = store.slots[:-excess], store.slots[-excess:]
                return leaving
            return self._drop(at).slots
        at = next(i for i, store in self._live.items() if store.parent is None and i not in path)
        branch, todo = [], [at]
        while todo:
            at = todo.pop()
            todo += self._live[at].children
            branch.append(self._live.pop(at).slots)
        return np.concatenate(branch)

    def _drop(self, at: int) -> _Store:
        store = self._live.pop(at)
        if store.parent is not None:
            self._live[store.parent].children.remove(at)
        return store


def run_lengths(slots: Ids) -> Ids:
    """Lengths of the runs in which slots go up by one, in order."""
    if not slots.size:
        return slots
    cuts = np.flatnonzero(slots[1:] - slots[:-1] != 1)
    ends = np.concatenate(([-1], cuts, [slots.size - 1]))
    lengths: Ids = ends[1:] - ends[:-1]
    return lengths
