"""What tests of the index and of the directory share: what must hold of any tree, and random sequences that share
beginnings."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.index import PrefixIndex
from kvtransfer.tree import ABSENT


def check_tree(index: PrefixIndex) -> None:
    """Everything that is kept twice agrees: counts, links, edges, candidates; every array owns its storage."""
    step = 4 * index.page_size
    pages, own_locks = 0, 0
    for name, root in index._roots.items():
        assert index._names[root] == name and root.children
    for node in [*index._roots.values(), *index.nodes()]:
        pages += node.pages
        assert len(node.edge) == node.pages * step
        assert node.keys is None or len(node.keys) == node.pages * index._key_bytes
        if node.parent is not None:
            assert node.pages > 0 and node.parent.children[node.edge[:step]] is node and node.parent.end == node.start
            own = node.locks - sum(child.locks for child in node.children.values())
            assert own >= 0
            own_locks += own
        for tier in range(len(index.kinds)):
            row = node.rows[tier]
            assert row is None or (row.base is None and row.size == node.pages and row.dtype == index._dtypes[tier])
            codes = np.full(node.pages, ABSENT) if row is None else row
            assert node.have[tier] == int((codes >= 0).sum()) and node.due[tier] == int((codes < ABSENT).sum())
            assert (row is None) == (not node.have[tier] and not node.due[tier])
            assert node.kids[tier] == sum(child.occupied(tier) for child in node.children.values())
            victims = index._victims.get(tier)
            if victims is not None and victims.is_candidate(node):
                assert node in victims._nodes
                assert not victims.policy.static or any(entry[2] is node for entry in victims._heap)
    assert pages == index.pages
    assert own_locks <= index.locks  # the rest is of hits without a page: they lock nothing


def page_tuples(tokens: NDArray[Any], page_size: int) -> list[tuple[int, ...]]:
    """Every prefix of whole pages, as a tuple of its tokens."""
    ids = tuple(tokens.tolist())
    return [ids[: (n + 1) * page_size] for n in range(len(ids) // page_size)]


class Family:
    """Sequences that share beginnings, end anywhere, and part anywhere."""

    def __init__(self, rng: random.Random, longest: int, words: int = 3) -> None:
        self.rng, self.longest, self.words = rng, longest, words
        self.known: list[NDArray[np.int32]] = []

    def draw(self) -> NDArray[np.int32]:
        rng = self.rng
        fresh = [rng.randrange(self.words) for _ in range(rng.randrange(self.longest + 1))]
        if self.known and rng.random() < 0.8:
            old = rng.choice(self.known)
            fresh = [*old[: rng.randrange(old.size + 1)].tolist(), *fresh][: self.longest]
        out = np.array(fresh, dtype=np.int32)
        self.known.append(out)
        return out
