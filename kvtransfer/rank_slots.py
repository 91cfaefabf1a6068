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

    num_slots  of this rank's tier
    ready      how many of them can be used by now, where the tier still grows; all of them unless told otherwise

    A page is named by the leader's slot id. There are as many pages as the smallest tier has slots: ``num_pages``.
    Making it is one round.
    """

    def __init__(self, group: RankGroup, num_slots: int, *, ready: Callable[[], int] | None = None) -> None:
        self._group = group
        self._ready = ready
        self.num_slots = num_slots
        least = group.minimum("slots", 1, lambda: [num_slots])
        (self.num_pages,) = least.value
        if self.num_pages < 1:
            raise ConfigError(f"slots: expected at least one on every rank, got {num_slots} here{_why(least.failures)}")
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

        def decide(reports: Mapping[int, Any]) -> tuple[int, bytes | None]:
            assert self._pages is not None
            if len(reports) == self._group.topology.size:
                self._pages.grow(max(self._pages.ready, min(self.num_pages, *reports.values())))
                if n <= self._pages.free_slots:
                    return self._pages.free_slots, _packed(self._pages.allocate(n, after))
            return self._pages.free_slots, None

        agreed = self._group.agree(f"allocate {n}", self._grown, decide)
        free, chosen = agreed.value
        pages = np.empty(0, dtype=np.int64) if chosen is None else _unpacked(chosen)
        slots = self._choose_slots(pages)
        if chosen is None:
            raise CapacityError(f"expected {n} free pages on every rank, got {free}{_why(agreed.failures)}; evict some")
        self._slot_of[pages] = slots
        return pages

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

    def _grown(self) -> int:
        """How many slots of this rank can be used by now."""
        ready = self.num_slots if self._ready is None else min(self.num_slots, self._ready())
        if self._own is not None:
            self._own.grow(max(self._own.ready, ready))
        return ready

    def _choose_slots(self, pages: Ids) -> Ids:
        """The slots of this stage for new pages. Its leader chooses; in the first stage they are the pages' own."""

        def choose() -> bytes | None:
            return None if self._own is None else _packed(self._own.allocate(len(pages)))

        chosen = self._group.from_leader(f"slots of {len(pages)}", choose, among="stage")
        return pages if chosen is None else _unpacked(chosen)


def _why(failures: Mapping[int, str]) -> str:
    return "".join(f"; rank {rank} failed: {why}" for rank, why in failures.items())


def _packed(ids: Ids) -> bytes:
    return ids.astype("<i8").tobytes()


def _unpacked(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
