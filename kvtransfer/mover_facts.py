"""What a mover says of the memory that it has. Plain structures: they travel between processes; no torch, no GPU."""

from __future__ import annotations

import msgspec

from kvtransfer.tiers.base import TierStats


class TierFacts(msgspec.Struct, frozen=True):
    """A lower tier.

    shared          others write there too
    capacity_pages  None: it has no limit of its own, or it is not known
    pages           there at the time of asking
    folder          of this process, that what belongs to the tier may lie in; "" where it has none
    """

    shared: bool
    capacity_pages: int | None
    pages: int
    folder: str = ""


class MoverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``spec`` is the canonical text of what a page holds here. ``host_pages`` of the host tier can be used now; it may
    be given up to ``host_most_pages``, and ``host_grows`` by itself now. ``link_bytes_per_s``: what the link to the
    device was measured to do with such pages, or is thought to."""

    spec: str
    page_size: int
    num_layers: int
    page_bytes: int
    pool_pages: int
    host_name: str
    host_pages: int
    host_most_pages: int
    host_grows: bool
    tiers: dict[str, TierFacts]
    link_bytes_per_s: float = 0.0


class TierState(msgspec.Struct, frozen=True):
    """`TierStats`, as it travels."""

    capacity_bytes: int
    used_bytes: int
    pages: int
    pinned_pages: int
    in_flight: int
    counters: dict[str, int]

    @classmethod
    def of(cls, stats: TierStats) -> TierState:
        """The same as a message."""
        return cls(
            stats.capacity_bytes,
            stats.used_bytes,
            stats.pages,
            stats.pinned_pages,
            stats.in_flight,
            dict(stats.counters),
        )
