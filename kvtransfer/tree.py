"""Node: a run of whole pages that nothing branches off inside, and where each of them lies.

Pages are counted from the root: a node holds pages ``start`` to ``end - 1`` of every sequence that runs through it.
When it is split, the *lower* half stays the same object, so that a node and a page number name the same page for
as long as the node is in the tree. What a tier has of a page is one integer, a *code*:

- 0 and up: the page is there, in that slot (0 in a tier that is addressed by key)
- -1 (`ABSENT`): it is not
- -2 and down: it is on its way to slot ``-2 - code`` (see `pending`)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
ABSENT = -1


def pending(slots: Ids) -> Ids:
    """The codes of pages on their way to ``slots``; applied to such codes, the slots again."""
    return -2 - slots


class Node:
    """See the module. The index that made it writes it, under its mutex; policies read it.

    edge        the token ids as little-endian u32: bytes, because two runs of bytes are compared in one memcmp
    children    by the bytes of their first page
    hits        matches that used these pages
    last_used   the index's clock then, in seconds; `tick` counts up with every match and insert, so it has no ties
    born        the tick at which the pages came in
    priority    the highest that anybody gave them
    locks       holders of this node or of one below it
    pins        who wants the node kept although no private tier may have any of it; its pages may go
    rows        for each tier the codes of the pages, or None: none is there nor on its way
    have, due   for each tier, how many pages are there, and on their way
    kids        for each tier, how many children have pages in their subtree, there or on their way
    keys        the page keys, joined, once somebody asked
    """

    __slots__ = (
        "__weakref__",
        "born",
        "children",
        "due",
        "edge",
        "end",
        "have",
        "hits",
        "keys",
        "kids",
        "last_used",
        "locks",
        "parent",
        "pins",
        "priority",
        "rows",
        "start",
        "tick",
    )

    def __init__(self, parent: Node | None, edge: bytes, start: int, end: int, tiers: int) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.rows: list[NDArray[Any] | None] = [None] * tiers
        self.have = [0] * tiers
        self.due = [0] * tiers
        self.kids = [0] * tiers
        self.keys: bytes | None = None
        self.locks = 0
        self.hits = 0
        self.tick = 0
        self.born = 0
        self.last_used = 0.0
        self.priority = 0
        self.pins = 0

    @property
    def pages(self) -> int:
        """Pages in this node."""
        return self.end - self.start

    def depth(self) -> int:
        """Nodes from the root to this one: 1 for a child of the root."""
        depth, node = 0, self
        while node.parent is not None:
            depth, node = depth + 1, node.parent
        return depth

    def top(self) -> Node:
        """The root."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def occupied(self, tier: int) -> bool:
        """Whether any page of the subtree is in the tier, or on its way to it."""
        return bool(self.have[tier] or self.due[tier] or self.kids[tier])

    def put(self, tier: int, local: Ids | slice, codes: Ids, dtype: type[np.signedinteger[Any]]) -> None:
        """Write the codes of some of the node's own pages (``local``: counted from its start), and count anew."""
        row = self.rows[tier]
        if row is None:
            row = self.rows[tier] = np.full(self.pages, ABSENT, dtype=dtype)
        for part, sign in ((row[local], -1), (codes, 1)):  # counted before it is overwritten: it may be a view
            self.have[tier] += sign * int(np.count_nonzero(part >= 0))
            self.due[tier] += sign * int(np.count_nonzero(part < ABSENT))
        row[local] = codes
        if not self.have[tier] and not self.due[tier]:
            self.rows[tier] = None

    def held_end(self, tier: int) -> int:
        """The page behind the last one that the tier has or expects; ``start`` where there is none."""
        row = self.rows[tier]
        if row is None:
            return self.start
        return self.end - int(np.argmax(row[::-1] != ABSENT))

    def split(self, at: int, page_bytes: int, key_bytes: int) -> Node:
        """Cut the node before page ``at``. Returns the new upper half; this object becomes the lower one. Both own
        their arrays: a view would keep the other half's memory alive."""
        parent = self.parent
        assert parent is not None and self.start < at < self.end
        n = at - self.start
        upper = Node(parent, self.edge[: n * page_bytes], self.start, at, len(self.rows))
        parent.children[self.edge[:page_bytes]] = upper
        self.edge = self.edge[n * page_bytes :]
        self.parent, self.start = upper, at
        upper.children[self.edge[:page_bytes]] = self
        for name in ("locks", "hits", "tick", "born", "last_used", "priority"):
            setattr(upper, name, getattr(self, name))
        if self.keys is not None:
            upper.keys, self.keys = self.keys[: n * key_bytes], self.keys[n * key_bytes :]
        for tier, row in enumerate(self.rows):
            if row is not None:
                self._share(upper, tier, row, n)
            upper.kids[tier] = int(self.occupied(tier))
        return upper

    def _share(self, upper: Node, tier: int, row: NDArray[Any], n: int) -> None:
        """Of a tier's codes: the first ``n`` for the upper half, the rest for this one."""
        halves = (upper, row[:n]), (self, row[n:])
        for node, codes in halves:
            node.have[tier] = int(np.count_nonzero(codes >= 0))
            node.due[tier] = int(np.count_nonzero(codes < ABSENT))
            node.rows[tier] = codes.copy() if node.have[tier] or node.due[tier] else None

    def cut(self, at: int, page_bytes: int, key_bytes: int) -> None:
        """Forget the pages from ``at`` on. No tier may have or expect any of them."""
        n = at - self.start
        self.edge = self.edge[: n * page_bytes]
        self.end = at
        self.keys = None if self.keys is None else self.keys[: n * key_bytes]
        self.rows = [None if row is None else row[:n].copy() for row in self.rows]
