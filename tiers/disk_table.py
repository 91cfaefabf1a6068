"""SlotTable: which page lies in which slot of the slabs, which slots are free, and which are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.tiers.eviction import EvictionPolicy
from kvtransfer.tiers.journal import PUT, entries_of

_OVER = 64  # groups of ended reads that may wait to be taken in


class SlotTable:
    """The books of one disk tier, in memory only. Not thread-safe: the tier holds its lock (but for `read_over`).

    A slot is free, being written (`allocate` to `publish` or `give_back`), or holds a page. A page that is dropped
    while it is read leaves the table at once; its slot is free when the last reader is done.

    ``slots_per_file``: slot ``s`` lies in slab ``s // slots_per_file``. ``paths``: free slots are taken from each path
    in turn.
    """

    def __init__(self, slots_per_file: int, paths: int, policy: EvictionPolicy) -> None:
        self.slots_per_file = slots_per_file
        self._policy = policy
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._free: list[deque[int]] = [deque() for _ in range(paths)]
        self._turn = 0
        self._files: dict[int, tuple[int, int]] = {}  # slab -> its path and its slots
        self._used_s = np.zeros(0, dtype=np.float64)
        self._readers: dict[int, int] = {}  # how many read a slot, where some do
        self._writing: set[int] = set()
        self._doomed: set[int] = set()  # dropped, and read still
        self._over: deque[tuple[list[int], list[bytes], float]] = deque()  # told by `read_over`

    # --- slabs

    @property
    def total_slots(self) -> int:
        """Of all slabs."""
        return sum(slots for _, slots in self._files.values())

    @property
    def free_slots(self) -> int:
        """That can be taken."""
        return sum(len(free) for free in self._free)

    def add_file(self, number: int, path: int, slots: int) -> None:
        """A slab is there, all its slots free."""
        need = (number + 1) * self.slots_per_file
        if need > len(self._used_s):
            self._used_s = np.concatenate((self._used_s, np.zeros(need - len(self._used_s))))
        first = number * self.slots_per_file
        self._files[number] = (path, slots)
        self._free[path].extend(range(first, first + slots))

    def drop_file(self, number: int) -> list[tuple[bytes, int]]:
        """Forget a slab that is not busy: its pages, which are returned with their slots, and its free slots."""
        path, slots = self._files.pop(number)
        first = number * self.slots_per_file
        mine = range(first, first + slots)
        gone = self.drop([self._key_of[slot] for slot in mine if slot in self._key_of])
        self._free[path] = deque(slot for slot in self._free[path] if slot not in mine)
        return gone

    def busy_file(self, number: int, pinned: Collection[bytes]) -> bool:
        """Whether something in the slab is being read or written, or is pinned."""
        self._settle()
        first = number * self.slots_per_file
        mine = range(first, first + self._files[number][1])
        if any(slot in mine for slot in self._readers) or any(slot in mine for slot in self._writing):
            return True
        return any(self._slot_of.get(key, -1) in mine for key in pinned)

    def files_by_use(self) -> list[int]:
        """Slabs, the one whose newest use is the longest ago first."""

        self._settle()

        def newest(number: int) -> float:
            first = number * self.slots_per_file
            held = [s for s in range(first, first + self._files[number][1]) if s in self._key_of]
            return float(self._used_s[held].max()) if held else 0.0

        return sorted(self._files, key=newest)

    def file_of(self, slot: int) -> tuple[int, int]:
        """The slab that ``slot`` lies in, and its number there."""
        return divmod(slot, self.slots_per_file)

    # --- pages

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The slot of each key, -1 where there is none."""
        get = self._slot_of.get
        return [get(key, -1) for key in keys]

    def begin_read(self, keys: Sequence[bytes]) -> list[int]:
        """`find`; the slots stay as they are until `end_read`."""
        if len(self._over) > _OVER:
            self._settle()
        slots = self.find(keys)
        readers = self._readers
        for slot in slots:
            if slot >= 0:
                readers[slot] = readers.get(slot, 0) + 1
        return slots

    def end_read(self, slots: Sequence[int]) -> None:
        """These are not read any more."""
        readers = self._readers
        for slot in slots:
            left = readers[slot] - 1
            if left:
                readers[slot] = left
                continue
            del readers[slot]
            if slot in self._doomed:
                self._doomed.discard(slot)
                self._release(slot)

    def read_over(self, slots: list[int], used: list[bytes], now_s: float) -> None:
        """`end_read`, and `touch` of ``used``: may be called without the lock. Whoever next looks at what depends on
        it, sees it. (A thread that reads for others must not wait for a lock whose holder waits for the interpreter:
        beside a busy Python thread that took 8 ms a batch.)"""
        self._over.append((slots, used, now_s))

    def _settle(self) -> None:
        """Take in what `read_over` was told."""
        while self._over:
            slots, used, now_s = self._over.popleft()
            self.touch(used, now_s)
            self.end_read(slots)

    def is_read(self, slot: int) -> bool:
        """Whether somebody reads it."""
        self._settle()
        return slot in self._readers

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        """Pages were used."""
        held = [key for key in keys if key in self._slot_of]
        self._used_s[[self._slot_of[key] for key in held]] = now_s
        self._policy.used(held)

    def allocate(self, count: int) -> list[int]:
        """Up to ``count`` free slots, to be written, spread over the paths."""
        self._settle()
        taken: list[int] = []
        empty = 0
        while len(taken) < count and empty < len(self._free):
            free = self._free[self._turn]
            self._turn = (self._turn + 1) % len(self._free)
            if free:
                taken.append(free.popleft())
                empty = 0
            else:
                empty += 1
        self._writing.update(taken)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Slots whose writing came to nothing. They are taken again last."""
        for slot in slots:
            self._writing.discard(slot)
            self._release(slot)

    def publish(self, keys: Sequence[bytes], slots: Sequence[int], now_s: float) -> None:
        """Pages are there from now on, in slots from `allocate`. None of the keys may be there already."""
        for key, slot in zip(keys, slots, strict=True):
            self._writing.discard(slot)
            self._slot_of[key] = slot
            self._key_of[slot] = key
        self._used_s[list(slots)] = now_s
        self._policy.added(keys)

    def drop(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Forget pages; returns those that were there, with their slots."""
        self._settle()
        gone: list[tuple[bytes, int]] = []
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                del self._key_of[slot]
                gone.append((key, slot))
                if slot in self._readers:
                    self._doomed.add(slot)
                else:
                    self._release(slot)
        self._policy.removed([key for key, _ in gone])
        return gone

    def idle_since(self, before_s: float) -> list[bytes]:
        """Pages whose last use was before ``before_s``, the longest unused first."""
        self._settle()
        slots = np.fromiter(self._key_of, dtype=np.int64, count=len(self._key_of))
        used = self._used_s[slots]
        idle = slots[used < before_s]
        return [self._key_of[slot] for slot in idle[np.argsort(used[used < before_s], kind="stable")].tolist()]

    def choose_victims(self, count: int, pinned: Collection[bytes], first: Iterable[bytes] = ()) -> list[bytes]:
        """Up to ``count`` pages to evict: from ``first``, then as the policy says; none that is pinned or read."""
        self._settle()
        chosen: dict[bytes, None] = {}
        pinned = frozenset(pinned)  # asked for each candidate
        for source in (first, self._policy.victims()):
            for key in source:
                if len(chosen) >= count:
                    return list(chosen)
                slot = self._slot_of.get(key)
                if slot is not None and key not in pinned and slot not in self._readers:
                    chosen[key] = None
        return list(chosen)

    # --- the journal's view

    def restore(self, entries: NDArray[Any]) -> int:
        """Take over what a journal says, in order. Returns how many pages lie in slots that are not there (any
        more)."""
        at_of: dict[bytes, int] = {}  # key -> position of the entry that put it where it is
        key_of: dict[int, bytes] = {}
        names, all_slots = entries["key"].tobytes(), entries["slot"].tolist()
        for at, (kind, slot) in enumerate(zip(entries["kind"].tolist(), all_slots, strict=True)):
            key = names[32 * at : 32 * at + 32]
            before = key_of.get(slot)
            if kind == PUT:
                if before is not None and before != key:
                    del at_of[before]  # the slot was given to another page
                held = at_of.get(key)
                if held is not None and all_slots[held] != slot:
                    del key_of[all_slots[held]]
                at_of[key], key_of[slot] = at, key
            elif before == key:
                del at_of[key], key_of[slot]
        keys = list(at_of)
        ats = np.fromiter(at_of.values(), dtype=np.int64, count=len(at_of))
        slots = entries["slot"][ats].astype(np.int64)
        room = np.zeros(max(self._files, default=-1) + 2, dtype=np.int64)  # of each slab; the last is none
        for number, (_, count) in self._files.items():
            room[number] = count
        numbers, indices = np.divmod(slots, self.slots_per_file)
        there = indices < room[np.minimum(numbers, len(room) - 1)]
        used = entries["used_s"][ats]
        order = np.lexsort((ats, used))
        kept = order[there[order]]
        ordered = [keys[i] for i in kept.tolist()]
        places = slots[kept].tolist()
        self._slot_of = dict(zip(ordered, places, strict=True))
        self._key_of = dict(zip(places, ordered, strict=True))
        self._used_s[places] = used[kept]
        self._free = [deque(slot for slot in free if slot not in self._key_of) for free in self._free]
        self._policy.added(ordered)
        return len(keys) - len(ordered)

    def take_pages_of(self, other: SlotTable) -> None:
        """Hold what ``other`` does, of the same slabs and maybe more. What is being read stays so."""
        self._settle()
        self._files, self._used_s = other._files, other._used_s
        self._slot_of, self._key_of = other._slot_of, other._key_of

    def entries(self) -> NDArray[Any]:
        """What there is, as journal entries."""
        self._settle()
        slots = np.fromiter(self._key_of, dtype=np.int64, count=len(self._key_of))
        return entries_of(PUT, slots, self._used_s[slots], list(self._key_of.values()))

    # --- inside

    def _release(self, slot: int) -> None:
        entry = self._files.get(slot // self.slots_per_file)
        if entry is not None:
            self._free[entry[0]].append(slot)
