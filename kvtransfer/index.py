"""PrefixIndex: which whole pages of a token sequence are known, and which tier has each of them.

The tree of tokens is in radix.py: match, insert, lock, page keys. Here is what each tier has of it.

What the index knows of a private tier is true: whoever moves the pages writes it down here. Of a shared tier it is a
hint, since others write there too. Thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from kvtransfer.kernels.errors import ConfigError, LayoutError, OwnershipError
from kvtransfer.policy import EvictionPolicy
from kvtransfer.radix import Match, RadixTree
from kvtransfer.tiers.keys import Algorithm
from kvtransfer.tree import ABSENT, Ids, Node
from kvtransfer.victims import Victims

Kind = Literal["slots", "keys", "shared"]
KINDS: dict[Kind, type[np.signedinteger[Any]]] = {"slots": np.int32, "keys": np.int8, "shared": np.int8}
MAX_SLOT = 2**31 - 3  # a slot, and its code while pending, fit 32 bits


class PrefixIndex(RadixTree):
    """See the module.

    Args:
        page_size: tokens a page.
        tiers: names, fastest first, with their kind: "slots" (a page has a slot number), "keys" (addressed by
            key), "shared" (by key, and others write there: hints only). None: a bare tree of tokens.
        clock: seconds; what `Node.last_used` is of.
        algorithm: of page keys.
    """

    def __init__(
        self,
        page_size: int,
        tiers: Mapping[str, Kind] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        algorithm: Algorithm = "sha256",
    ) -> None:
        self.kinds: dict[str, Kind] = dict(tiers or {})
        unknown = {name: kind for name, kind in self.kinds.items() if kind not in KINDS}
        if unknown:
            raise ConfigError(f"tiers: expected kinds of {', '.join(KINDS)}, got {unknown}")
        super().__init__(page_size, len(self.kinds), clock, algorithm)
        self._numbers = {name: number for number, name in enumerate(self.kinds)}
        self._dtypes = [KINDS[kind] for kind in self.kinds.values()]
        self._private = [n for n, kind in enumerate(self.kinds.values()) if kind != "shared"]
        self._victims: dict[int, Victims] = {}

    def add_tier(self, name: str, kind: Kind) -> None:
        """One more tier, slower than those there are."""
        if name in self.kinds or kind not in KINDS:
            raise ConfigError(f"tier: expected a new name and one of {', '.join(KINDS)}, got {name!r} and {kind!r}")
        with self.mutex:
            self.kinds[name], self._numbers[name] = kind, self._tiers
            self._dtypes.append(KINDS[kind])
            if kind != "shared":
                self._private.append(self._tiers)
            self._tiers += 1
            for node in [*self._roots.values(), *self.nodes()]:
                node.rows.append(None)
                for counts in (node.have, node.due, node.kids):
                    counts.append(0)

    def remove(self, found: Match) -> dict[str, Ids]:
        """Forget the last page of ``found`` and everything below it; the rest of the path stays. For each private tier
        the slots that it had there. Raises OwnershipError, and changes nothing, if any of it is locked or on its way.
        """
        with self.mutex:
            node, pages = found
            if node.parent is None or pages < 1:
                return {}
            below = [node]
            for one in below:
                below.extend(one.children.values())
            if any(one.locks or any(one.due) for one in below):
                raise OwnershipError(
                    f"remove: expected pages that nobody holds, got a lock at page {pages - 1} or below"
                )
            if pages - 1 > node.start:
                self._split(node, pages - 1)
            slots: dict[str, Ids] = {}
            for name, tier in self._numbers.items():
                rows = [one.rows[tier] for one in below]
                codes = np.concatenate([row[row >= 0] for row in rows if row is not None] or [np.empty(0, np.int64)])
                slots[name] = codes.astype(np.int64)
            for one in reversed(below):
                for tier in range(len(self.kinds)):
                    self._put(one, tier, slice(None), np.full(one.pages, ABSENT))
                self._detach(one)
            return {name: ids for name, ids in slots.items() if self.kinds[name] != "shared"}

    def tidy(self, node: Node) -> None:
        """Forget the end of a path that no private tier has, as far as nobody holds it: nodes, and pages at the end of
        one. Call it after what was there has gone."""
        with self.mutex:
            while node.parent is not None and not (node.locks or node.children or node.pins):
                parent = node.parent
                held = max((node.held_end(tier) for tier in self._private), default=node.start)
                if held > node.start:
                    if held < node.end:
                        for tier in range(len(self.kinds)):
                            if tier not in self._private and node.rows[tier] is not None:
                                gone = np.arange(held - node.start, node.pages)
                                self._put(node, tier, gone, np.full(gone.size, ABSENT))
                        self.pages -= node.end - held
                        node.cut(held, self._page_bytes, self._key_bytes)
                    return
                for tier in range(len(self.kinds)):  # hints
                    if node.rows[tier] is not None:
                        self._put(node, tier, slice(None), np.full(node.pages, ABSENT))
                self._detach(node)
                node = parent

    # --- where pages are

    def codes(self, found: Match, tier: str, first: int = 0) -> Ids:
        """What ``tier`` has of the pages from ``first`` on: a code a page (tree.py), int64."""
        number = self._numbers[tier]
        with self.mutex:
            out = np.full(max(0, found.pages - first), ABSENT, dtype=np.int64)
            for node, a, b in self._parts(found.node, first, found.pages):
                row = node.rows[number]
                if row is not None:
                    out[a - first : b - first] = row[a - node.start : b - node.start]
            return out

    def run(self, found: Match, tier: str, first: int = 0) -> int:
        """How many pages from ``first`` on are there without a gap."""
        number, end = self._numbers[tier], first
        with self.mutex:
            for node, a, b in self._parts(found.node, first, found.pages):
                if node.have[number] < node.pages:
                    row = node.rows[number]
                    there = 0 if row is None else row[a - node.start : b - node.start] >= 0
                    if isinstance(there, int) or not there.all():
                        return end - first + (there if isinstance(there, int) else int(np.argmin(there)))
                end = b
            return end - first

    def write(self, node: Node, tier: str, pages: Ids, codes: Ids) -> None:
        """Write down what ``tier`` has of ``pages`` (numbers from the root on, rising) on the path to ``node``."""
        number = self._numbers[tier]
        if pages.size and (int(codes.min()) < ABSENT - 1 - MAX_SLOT or int(codes.max()) > MAX_SLOT):
            raise LayoutError(f"{tier}: expected slots of at most {MAX_SLOT}, got {int(codes.max())}")
        with self.mutex:
            stop = pages.size
            while stop and node.parent is not None:
                at = int(np.searchsorted(pages[:stop], node.start))
                if at < stop:
                    self._put(node, number, pages[at:stop] - node.start, codes[at:stop])
                stop, node = at, node.parent

    def watch(self, tier: str, policy: EvictionPolicy) -> Victims:
        """From now on ``policy`` says in which order ``tier`` gives up pages (`Victims.walk`)."""
        with self.mutex:
            victims = self._victims[self._numbers[tier]] = Victims(self._numbers[tier], policy)
            for node in self.nodes():
                victims.offer(node)
            return victims

    # --- inside

    def _put(self, node: Node, tier: int, local: Ids | slice, codes: Ids) -> None:
        """`Node.put`, and what it means for the nodes above and for who waits for victims."""
        was = node.occupied(tier)
        node.put(tier, local, codes, self._dtypes[tier])
        self._offer(node, tier)
        while node.parent is not None and node.occupied(tier) != was:
            parent = node.parent
            before = parent.occupied(tier)
            parent.kids[tier] += -1 if was else 1
            self._offer(parent, tier)
            node, was = parent, before

    def _offer(self, node: Node, tier: int | None = None) -> None:
        for number, victims in self._victims.items():
            if tier is None or tier == number:
                victims.offer(node)
