"""What a prefix cache of so many pages would have hit: the model that the directory is compared with. Brute force."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray


class ExactLru:
    """Pages by the whole prefix they end, in order of their last use, the deepest of one use first. ``capacity_pages``
    None: everything is kept, so a hit is the longest common page prefix with all that was stored."""

    def __init__(self, page_size: int, capacity_pages: int | None) -> None:
        self.page_size = page_size
        self.capacity_pages = capacity_pages
        self._names: dict[tuple[int, bytes], int] = {}  # (name of the prefix before, the page's bytes) -> its name
        self._kept: OrderedDict[int, None] = OrderedDict()

    def serve(self, tokens: NDArray[np.int32]) -> int:
        """A request: pages hit, before all of its pages are stored, as far as there is room."""
        names = self._prefixes(tokens)
        hit = 0
        while hit < len(names) and names[hit] in self._kept:
            hit += 1
        room = len(names) if self.capacity_pages is None else min(len(names), self.capacity_pages)
        for name in reversed(names[:hit]):
            self._kept.move_to_end(name)
        while self.capacity_pages is not None and len(self._kept) + room - hit > self.capacity_pages:
            self._kept.popitem(last=False)
        for name in reversed(names[:room]):
            self._kept[name] = None
            self._kept.move_to_end(name)
        return hit

    @property
    def pages(self) -> int:
        """Pages kept now."""
        return len(self._kept)

    def _prefixes(self, tokens: NDArray[np.int32]) -> list[int]:
        size = 4 * self.page_size
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        names, name = [], -1
        for at in range(0, len(data) - size + 1, size):
            name = self._names.setdefault((name, data[at : at + size]), len(self._names))
            names.append(name)
        return names
