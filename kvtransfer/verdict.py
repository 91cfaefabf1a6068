"""Verdict: what became of the digests of a load. It needs neither torch nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The digests of what a load delivered against those of what was stored. Positions count the call's ids.

    bad_layers        (position, layer) of every digest that differs
    unverified_pages  positions of pages stored without digests: nothing is known of them
    """

    ok: bool
    bad_pages: tuple[int, ...] = ()
    bad_layers: tuple[tuple[int, int], ...] = ()
    unverified_pages: tuple[int, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether every page was compared and found good; ``ok`` alone also holds where nothing could be compared."""
        return self.ok and not self.unverified_pages
