"""Which pages a tier gives up first: the policy that its constructor takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Told what happens to a tier's pages, asked for victims. Keys are stored keys. The tier calls it under its own
    lock:
    calls must be short and must not call the tier."""

    def added(self, keys: Sequence[bytes]) -> None:
        """Pages that are there from now on; at open those of an earlier run, the longest unused first."""

    def used(self, keys: Sequence[bytes]) -> None:
        """Pages that were read. Lookups do not count: probing must not keep a page."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Pages that are there no more, evicted or not."""

    def victims(self) -> Iterator[bytes]:
        """All pages, the first to go first. The tier takes as many as it needs, skips those that it must keep, and
        calls `removed` for those that went once it is done iterating."""


class LRU:
    """The page that was stored or read the longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def added(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._order[key] = None
            self._order.move_to_end(key)

    def used(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._order.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)
