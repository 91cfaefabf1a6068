"""RankSlots: which host slots hold a page, the same page on every rank, though stages have slots of their own.

The leader gives slots out. Ranks of its stage use its ids; a later pipeline stage holds other layers, so that its slots
are of another size and number: its leader keeps a map from the leader's ids to its own, which its ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.group import RankGroup
from kvtransfer.kernels.errors import CapacityError, ConfigError, OwnershipError
from kvtransfer.tiers.extents import Extents

Ids = NDArray[np.int64]


class RankSlots:
    """The slots that the ranks of ``group`` fill alike. All ranks make the same calls in the same order.

    num_slots  of this rank's tier, at most
    ready      how many of them can be used by now, where the tier grows or shrinks; all of them unless told otherwise

    A page is named by the leader's slot id. There are as many pages as the smallest tier has slots: ``num_pages``, of
    which ``capacity_pages`` could be given out at the last round; the same on all ranks. Making it is one round.
    """

    def __init__(self, group: RankGroup, num_slots: int, *, ready: Callable[[], int] | None = None) -> None:
        self._group = group
        self._ready = ready
        self.num_slots = num_slots
        least = group.minimum("slots", 1, lambda: [num_slots])
        (self.num_pages,) = least.value
        if self.num_pages < 1:
            raise ConfigError(f"slots: expected at least one on every rank, got {num_slots} here{_why(least.failures)}")
        self.capacity_pages = 0
        self._goal = self.num_pages  # what `resize` leaves
        self._pages = Extents(self.num_pages, 0, "page") if group.is_leader else None
        follows = group.coordinates.pp > 0
        self._own = Extents(num_slots, 0, "slot") if follows and group.leads_stage else None
        self._slot_of = np.full(self.num_pages, -1, dtype=np.int64)  # of pages that are given out, here

    @property
    def used_pages(self) -> int:
        """Pages that are given out; the same on all ranks."""
        return int((self._slot_of >= 0).sum())

    def allocate(self, n: int, *, after: int | None = None) -> Ids:
        """Take ``n`` pages: ids that the leader chose, the same on every rank. `slots` tells where they lie here.

        ``after`` is the page that they should follow. One round of all and one of each stage, also where there is no
        room. Raises CapacityError on every rank if one has not so much, or can't say: nothing is taken then.
        """
        if n < 0:
            raise ConfigError(f"pages: expected a count of at least 0, got {n}")

        def decide(reports: Mapping[int, Any]) -> tuple[int, int, bytes | None]:
            assert self._pages is not None
            free, chosen = 0, None
            if len(reports) == self._group.topology.size:
                _fit(self._pages, min(self._goal, *reports.values()))
                # A page that lies beyond counts: a later stage may have its slot where the leader has none.
                free = max(0, min(self._pages.free_slots, self._pages.ready - self.used_pages))
                if n <= free:
                    chosen = _packed(self._pages.allocate(n, after))
            return free, self._pages.ready, chosen

        agreed = self._group.agree(f"allocate {n}", self._usable, decide)
        free, self.capacity_pages, chosen = agreed.value
        pages = np.empty(0, dtype=np.int64) if chosen is None else _unpacked(chosen)
        slots = self._choose_slots(pages)
        if chosen is None:
            raise CapacityError(f"expected {n} free pages on every rank, got {free}{_why(agreed.failures)}; evict some")
        self._slot_of[pages] = slots
        return pages

    def resize(self, pages: int) -> Ids:
        """Give out only pages below ``pages`` from now on, fewer or more than before: what the leader says, and no more
        than the smallest rank has (``capacity_pages`` tells). Two rounds of all ranks.

        Returns the pages, the same on every rank, that lie in slots from there on, on whichever rank. They stay their
        owners' until they are freed. Once this returns none, every rank may give the memory beyond back (and ``ready``
        is to say so before it does). Growing, make the memory first. Raises CapacityError on every rank if one can't
        say what it has.
        """
        if pages < 1:
            raise ConfigError(f"pages: expected a count of at least 1, got {pages}")

        def decide(reports: Mapping[int, Any]) -> tuple[int, int] | None:
            assert self._pages is not None
            if len(reports) < self._group.topology.size:
                return None
            goal = min(pages, self.num_pages)
            _fit(self._pages, min(goal, *reports.values()))
            return goal, self._pages.ready

        agreed = self._group.agree("resize", self._usable, decide)
        if agreed.value is not None:
            self._goal, self.capacity_pages = agreed.value
            if self._own is not None:
                _fit(self._own, min(self._own.ready, self._goal))
        beyond = self._group.agree("beyond", self._beyond, lambda reports: b"".join(reports.values()))
        failures = {**agreed.failures, **beyond.failures}
        if agreed.value is None or failures:
            raise CapacityError(f"expected every rank to say what it has{_why(failures)}; resize again")
        return np.unique(_unpacked(beyond.value))

    def slots(self, pages: Any) -> Ids:
        """Where ``pages`` lie in this rank's tier. OwnershipError, naming pages, for one that is not given out."""
        ids = np.asarray(pages, dtype=np.int64).reshape(-1)
        outside = (ids < 0) | (ids >= self.num_pages)
        found = self._slot_of[np.where(outside, 0, ids)]
        bad = ids[outside | (found < 0)]
        if bad.size:
            raise OwnershipError(f"expected pages that are given out, got {bad[:8].tolist()}")
        return found

    def free(self, pages: Any) -> Ids:
        """Give ``pages`` back on every rank: those that the leader names, whatever the others say. One round.

        Returns them. Raises OwnershipError on every rank if one is none, free, or comes twice: nothing is freed then.
        """
        named = self._group.from_leader("free", lambda: _packed(np.asarray(pages, dtype=np.int64).reshape(-1)))
        ids = _unpacked(named)
        slots = self.slots(ids)
        if np.unique(ids).size != ids.size:
            raise OwnershipError(f"expected pages that are each named once, got {ids[:8].tolist()}")
        if self._pages is not None:
            self._pages.free(ids)
        if self._own is not None:
            self._own.free(slots)
        self._slot_of[ids] = -1
        return ids

    def _usable(self) -> int:
        """How many slots of this rank can be used by now."""
        ready = self.num_slots if self._ready is None else min(self.num_slots, self._ready())
        if self._own is not None:
            _fit(self._own, min(self._goal, ready))
        return ready

    def _beyond(self) -> bytes:
        """Pages that are in slots of this rank, or have names, beyond those that are given out now."""
        outside = (self._slot_of >= self.capacity_pages) | (np.arange(self.num_pages) >= self.capacity_pages)
        return _packed(np.flatnonzero((self._slot_of >= 0) & outside))

    def _choose_slots(self, pages: Ids) -> Ids:
        """The slots of this stage for new pages. Its leader chooses; in the first stage they are the pages' own."""

        def choose() -> bytes | None:
            return None if self._own is None else _packed(self._own.allocate(len(pages)))

        chosen = self._group.from_leader(f"slots of {len(pages)}", choose, among="stage")
        return pages if chosen is None else _unpacked(chosen)


def _fit(extents: Extents, ready: int) -> None:
    if ready < extents.ready:
        extents.shrink(ready)
    else:
        extents.grow(ready)


def _why(failures: Mapping[int, str]) -> str:
    return "".join(f"; rank {rank} failed: {why}" for rank, why in failures.items())


def _packed(ids: Ids) -> bytes:
    return ids.astype("<i8").tobytes()


def _unpacked(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
