"""Victims: the nodes whose pages one tier can give up, the first to go first.

Only tails go: a page leaves a tier before the pages in front of it, so that what stays is whole prefixes. A node is a
candidate while the tier has pages of it, none of its subtree's, and nobody holds it. The index offers a node each time
it becomes one; a node that stops being one is found out when its turn comes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator
from typing import Any

from kvtransfer.policy import EvictionPolicy
from kvtransfer.tree import Node

_Entry = tuple[Any, int, Node]


class Victims:
    """Of one tier (its number in the index), by one policy. The index's mutex guards it.

    A policy whose ranks only rise, and only when a node is used (``static``), gets a heap in which an entry may be too
    early, never too late: it is put back where its node was used since. Others are ranked anew each time.
    """

    def __init__(self, tier: int, policy: EvictionPolicy) -> None:
        self.tier = tier
        self.policy = policy
        self._nodes: dict[Node, None] = {}  # offered, in a heap or to be ranked
        self._heap: list[_Entry] = []
        self._serial = itertools.count()
        self._ranking: list[_Entry] | None = None  # of a walk under way, where ranks are not static
        self._now = 0.0
        self._sweep_at = 64

    def is_candidate(self, node: Node) -> bool:
        """Whether the tier could give up pages of the node now."""
        tier = self.tier
        return bool(node.have[tier]) and not node.locks and not node.kids[tier] and node.parent is not None

    def offer(self, node: Node) -> None:
        """The node may have become a candidate."""
        if node in self._nodes or not self.is_candidate(node):
            return
        self._nodes[node] = None
        if self.policy.static:
            self._push(self._heap, node, self._now)
        elif self._ranking is not None:
            self._push(self._ranking, node, self._now)
        if len(self._nodes) > self._sweep_at and self._ranking is None:
            self._sweep()

    def walk(self, now: float, *, spare: bool = True) -> Generator[Node]:
        """Candidates, the first to go first. The caller takes pages of each, or leaves it; a node that becomes a
        candidate by that is walked too. Close the walk when done; one at a time. ``spare=False``: also what the policy
        would always keep (``keep_depth``)."""
        self._now = now
        heap = self._heap
        if not self.policy.static:
            heap = self._ranking = []
            for node in list(self._nodes):
                if self.is_candidate(node):
                    self._push(heap, node, now)
                else:
                    del self._nodes[node]
        left: list[Node] = []
        try:
            while heap:
                rank, _, node = heapq.heappop(heap)
                self._nodes.pop(node, None)
                if not self.is_candidate(node):
                    continue
                if self.policy.static and (current := self.policy.rank(node, now)) > rank:
                    self._nodes[node] = None
                    heapq.heappush(heap, (current, next(self._serial), node))
                    continue
                stays = spare and self._must_stay(node, heap, left)
                left.append(node)
                if not stays:
                    yield node
        finally:
            self._ranking = None
            for node in left:
                self.offer(node)

    def candidates(self) -> list[Node]:
        """All of them, in no order."""
        return [node for node in self._nodes if self.is_candidate(node)]

    def _must_stay(self, node: Node, heap: list[_Entry], left: list[Node]) -> bool:
        """Whether this is the last node at the depth that the policy keeps one path of."""
        floor = self.policy.keep_depth
        if not floor or node.depth() != floor:
            return False
        others = itertools.chain((entry[2] for entry in heap), left)
        return not any(other.depth() >= floor for other in others if self.is_candidate(other))

    def _push(self, heap: list[_Entry], node: Node, now: float) -> None:
        heapq.heappush(heap, (self.policy.rank(node, now), next(self._serial), node))

    def _sweep(self) -> None:
        """Drop what is a candidate no more: such nodes would be kept alive until their turn came."""
        self._nodes = {node: None for node in self._nodes if self.is_candidate(node)}
        if self.policy.static:
            self._heap[:] = [entry for entry in self._heap if entry[2] in self._nodes]
            heapq.heapify(self._heap)
        self._sweep_at = max(64, 2 * len(self._nodes))
