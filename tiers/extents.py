"""Extents: which of a tier's slots are free, given out as contiguous runs.

A transfer over neighbouring slots is one plain copy, so runs matter more than slots: an allocation takes
the smallest free run that holds it, and a prefix can be continued right behind its last slot. Best fit was the
best of eight policies after long churn (docs/decisions.md, "Extents").

Stores that grow beside each other, a slot at a time, cut each other's way off: then every run is one slot long. Who
writes such stores should take slots in blocks of a few MiB and give the rest back at the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import CapacityError, OwnershipError
from kvtransfer.kernels.ids import id_tools


@dataclass(frozen=True)
class Fragmentation:
    """How scattered the free slots are. ``outside_largest`` is their share that is not in the largest run."""

    free_slots: int
    free_runs: int
    largest_run: int
    outside_largest: float


class Extents:
    """An allocator over slots 0 to ``count - 1``. Not thread-safe: the owner holds a lock.

    Slots from ``ready`` on do not exist yet, or not any more; `grow` adds them, `shrink` takes them out: free ones at
    once, those in use (``leaving`` of them) when they are freed. Free runs never touch each other: a freed
    slot joins its free neighbours at once. Finding a run is O(log r) in the r distinct run lengths
    (r < sqrt(2 * count)); freeing costs a few passes over the slots plus a dictionary step a run.

    Args:
        count: slots there will be in the end.
        ready: slots that exist now (all of them unless told otherwise).
        what: names a slot in messages ("host slot").
    """

    def __init__(self, count: int, ready: int | None = None, what: str = "slot") -> None:
        self.count = count
        self.what = what
        self.ready = 0
        self.free_slots = 0
        self.leaving = 0
        self._most_ready = 0  # there never was a slot from here on
        self._taken = np.zeros(count, dtype=np.bool_)
        self._length: dict[int, int] = {}  # first slot of a free run -> its length
        self._start: dict[int, int] = {}  # slot behind a free run -> its first slot
        self._by_length: dict[int, list[int]] = {}  # length -> first slots, in no order
        self._at: dict[int, int] = {}  # first slot of a free run -> its position in that list
        self._lengths: list[int] = []  # the keys of _by_length, sorted
        self.grow(count if ready is None else ready)

    def grow(self, ready: int) -> None:
        """Slots up to ``ready - 1`` exist from now on. The new ones are free, but for those in use since a `shrink`."""
        if not self.ready <= ready <= self.count:
            raise CapacityError(f"{self.what}s: expected to grow to {self.ready}..{self.count}, got {ready}")
        if ready > self.ready:
            new = np.flatnonzero(~self._taken[self.ready : ready]) + self.ready
            self.leaving -= ready - self.ready - new.size
            self.free_slots += new.size
            self.ready, self._most_ready = ready, max(ready, self._most_ready)
            for run in np.split(new, _cuts(new)):
                if run.size:
                    self._join(int(run[0]), run.size)

    def shrink(self, ready: int) -> None:
        """Slots from ``ready`` on are given out no more. Those in use stay their owners' until they are freed."""
        if not 0 <= ready <= self.ready:
            raise CapacityError(f"{self.what}s: expected to shrink to 0..{self.ready}, got {ready}")
        for start, length in [run for run in self._length.items() if sum(run) > ready]:
            self._drop(start, length)
            self.free_slots -= start + length - max(start, ready)
            if start < ready:
                self._add(start, ready - start)
        self.leaving += int(np.count_nonzero(self._taken[ready : self.ready]))
        self.ready = ready

    def allocate(self, n: int, after: int | None = None) -> NDArray[np.int64]:
        """Take ``n`` slots and return their ids, in the order in which a prefix should fill them.

        Slots right behind ``after`` come first, as far as they are free; the rest lies in the smallest free
        run that holds it, else in the largest runs there are. The array owns its storage.
        Raises CapacityError if fewer than ``n`` are free: nothing is taken then.
        """
        if n < 0:
            raise CapacityError(f"{self.what}s: expected a count of at least 0, got {n}")
        if n > self.free_slots:
            growing = "" if self.ready == self.count else f", {self.count - self.ready} more not ready yet"
            raise CapacityError(
                f"expected {n} free {self.what}s, got {self.free_slots} of {self.ready}{growing}; free or evict some"
            )
        slots = np.empty(n, dtype=np.int64)
        filled = 0
        if after is not None and n and after + 1 in self._length:
            filled = self._take(after + 1, n, slots, 0)
        while filled < n:
            at = bisect_left(self._lengths, n - filled)
            start = self._by_length[self._lengths[min(at, len(self._lengths) - 1)]][-1]
            filled += self._take(start, n - filled, slots, filled)
        self.free_slots -= n
        return slots

    def check(self, slots: NDArray[np.int64]) -> None:
        """Raise OwnershipError unless ``slots`` are distinct, in range and all given out. Changes nothing."""
        self._runs(slots)

    def free(self, slots: NDArray[np.int64]) -> None:
        """Give ``slots`` back: all of them, or none with an OwnershipError (see `check`)."""
        starts, lengths = self._runs(slots)
        self._taken[slots] = False
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            stays = max(0, min(length, self.ready - start))
            self.free_slots += stays
            self.leaving -= length - stays
            if stays:
                self._join(start, stays)

    def _runs(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first slots, lengths) of the runs that ``slots`` make up, in order, checked.

        A store is a few runs, so it is these that are put in order, not its slots: 20 us instead of 60 for 4,224.
        """
        if not slots.size:
            return slots, slots
        ordered, cuts = slots, _cuts(slots)
        if cuts.size > slots.size // 8:  # scattered: in order they may well be runs
            ordered = np.sort(slots)
            cuts = _cuts(ordered)
        first = np.concatenate(([0], cuts))
        starts, lengths = ordered[first], np.concatenate((cuts, [slots.size])) - first
        if cuts.size:
            order = np.argsort(starts)
            starts, lengths = starts[order], lengths[order]
        ends = starts + lengths
        if starts[0] < 0 or ends.max() > self._most_ready:
            bad = slots[(slots < 0) | (slots >= self._most_ready)]
            raise OwnershipError(f"expected {self.what}s in 0..{self._most_ready - 1}, got {_some(bad)}")
        used = self._taken[slots]
        if not used.all():
            bad = slots[~used]
            raise OwnershipError(f"expected {self.what}s in use, got {_some(bad)}: free already (freed twice?)")
        if (starts[1:] < ends[:-1]).any():
            ordered = np.sort(slots)
            bad = ordered[1:][ordered[1:] == ordered[:-1]]
            raise OwnershipError(f"expected distinct {self.what}s, got {_some(bad)} more than once in one call")
        return starts, lengths

    def taken(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each slot, whether it is given out."""
        return np.asarray(self._taken[slots])

    def all_taken(self, slots: NDArray[np.int64]) -> bool:
        """Whether all slots are given out."""
        return id_tools().all_set(self._taken, slots)

    def fragmentation(self) -> Fragmentation:
        """How the free slots lie, now."""
        largest = self._lengths[-1] if self._lengths else 0
        outside = (self.free_slots - largest) / self.free_slots if self.free_slots else 0.0
        return Fragmentation(self.free_slots, len(self._length), largest, outside)

    def free_runs(self) -> list[tuple[int, int]]:
        """Every free run as (first slot, length), in order: for reports and tests."""
        return sorted(self._length.items())

    def _take(self, start: int, n: int, out: NDArray[np.int64], at: int) -> int:
        """Move up to ``n`` slots from the front of the free run at ``start`` to ``out[at:]``; how many."""
        length = self._length[start]
        taken = min(n, length)
        self._drop(start, length)
        if length > taken:
            self._add(start + taken, length - taken)
        out[at : at + taken] = np.arange(start, start + taken)
        self._taken[start : start + taken] = True
        return taken

    def _join(self, start: int, length: int) -> None:
        """Add a free run, merged with the free runs that touch it."""
        before = self._start.get(start)
        if before is not None:
            self._drop(before, start - before)
            start, length = before, length + start - before
        behind = self._length.get(start + length)
        if behind is not None:
            self._drop(start + length, behind)
            length += behind
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        group = self._by_length.get(length)
        if group is None:
            group = self._by_length[length] = []
            insort(self._lengths, length)
        self._at[start] = len(group)
        group.append(start)

    def _drop(self, start: int, length: int) -> None:
        del self._length[start]
        del self._start[start + length]
        group, at = self._by_length[length], self._at.pop(start)
        last = group.pop()
        if last != start:  # the last one takes its place: constant time, where a set would be searched
            group[at] = last
            self._at[last] = at
        if not group:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]


def _cuts(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions at which a slot does not follow the one before it."""
    return np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1


def _some(slots: NDArray[np.int64]) -> str:
    """The first few ids, for a message."""
    return f"{slots[:8].tolist()}{' ...' if slots.size > 8 else ''}"
