"""The index under random steps, against a plain model: sets of prefixes, and dictionaries of what tiers have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from index_helpers import check_tree, page_tuples

from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import OwnershipError
from kvtransfer.policy import LRU
from kvtransfer.radix import Match
from kvtransfer.tree import ABSENT, Node, pending

Prefix = tuple[int, ...]
SPACES = (b"", b"other")
tokens_of = st.lists(st.integers(0, 1), max_size=14)
QUICK = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=1000, stateful_step_count=50)


class IndexSteps(RuleBasedStateMachine):
    """``known``: (namespace, prefix) -> its codes by tier; ``held``: locked nodes with what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[bytes, Prefix], dict[str, int]] = {}
        self.uses: Counter[tuple[bytes, Prefix]] = Counter()
        self.held: list[tuple[Node, int, list[tuple[bytes, Prefix]]]] = []
        self.slot = 0

    @initialize(page_size=st.integers(1, 3))
    def begin(self, page_size: int) -> None:
        self.index = PrefixIndex(page_size, {"host": "slots", "disk": "keys", "far": "shared"})
        self.index.watch("host", LRU())

    def prefixes(self, space: bytes, tokens: list[int]) -> list[tuple[bytes, Prefix]]:
        return [(space, p) for p in page_tuples(np.array(tokens, dtype=np.int32), self.index.page_size)]

    def known_of(self, space: bytes, tokens: list[int]) -> list[tuple[bytes, Prefix]]:
        """The leading known ones: a known prefix's shorter ones are known too."""
        return [p for p in self.prefixes(space, tokens) if p in self.known]

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of, use=st.booleans())
    def match(self, space: bytes, tokens: list[int], use: bool) -> None:
        wanted = self.known_of(space, tokens)
        found = self.index.match(tokens, space, use=use)
        assert found.pages == len(wanted)
        if use:
            self.uses.update(wanted)
            assert found.node.end == found.pages
        for tier in self.index.kinds:
            codes = self.index.codes(found, tier).tolist()
            assert codes == [self.known[p].get(tier, ABSENT) for p in wanted]
            for first in range(found.pages + 1):
                there = [code >= 0 for code in codes[first:]]
                assert self.index.run(found, tier, first) == [*there, False].index(False)
        hits = [n.hits for n in self.index.path(found.node) for _ in range(n.pages)]
        assert hits[: found.pages] == [self.uses[p] for p in wanted]

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def insert(self, space: bytes, tokens: list[int]) -> None:
        assert self.index.insert(tokens, space).pages == len(self.prefixes(space, tokens))
        for p in self.prefixes(space, tokens):
            self.known.setdefault(p, {})

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def lock(self, space: bytes, tokens: list[int]) -> None:
        found = self.index.match(tokens, space)
        self.uses.update(self.known_of(space, tokens))
        self.index.lock(found.node)
        self.held.append((found.node, found.pages, self.known_of(space, tokens)))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.held:
            node, pages, prefixes = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            kept = [self.known[p].get("host", ABSENT) for p in prefixes]  # still the same pages, split or not
            assert self.index.codes(Match(node, pages), "host").tolist() == kept
            self.index.unlock(node)

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of, data=st.data())
    def write(self, space: bytes, tokens: list[int], data: st.DataObject) -> None:
        prefixes = self.known_of(space, tokens)
        found = self.index.match(tokens, space, use=False)
        tier = data.draw(st.sampled_from(sorted(self.index.kinds)))
        some = data.draw(st.lists(st.booleans(), min_size=len(prefixes), max_size=len(prefixes)))
        codes = []
        for page in np.flatnonzero(some).tolist():
            slot = self.slot = self.slot + 1 if tier == "host" else 0
            code = data.draw(st.sampled_from([ABSENT, slot, int(pending(np.int64(slot)))]))  # type: ignore[arg-type]
            codes.append(code)
            self.known[prefixes[page]][tier] = code
        self.index.write(found.node, tier, np.flatnonzero(some), np.array(codes, dtype=np.int64))

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def remove(self, space: bytes, tokens: list[int]) -> None:
        prefixes = self.known_of(space, tokens)
        found = self.index.match(tokens, space, use=False)
        below = [
            p for p in self.known if p[0] == space and prefixes and p[1][: len(prefixes[-1][1])] == prefixes[-1][1]
        ]
        try:
            slots = self.index.remove(found)
        except OwnershipError:
            # Refused for a lock or a page on its way, at least as coarse as nodes are.
            node = found.node
            subtree = [node]
            for one in subtree:
                subtree.extend(one.children.values())
            assert any(one.locks or any(one.due) for one in subtree)
            return
        gone = [self.known.pop(p) for p in below]
        for p in below:
            self.uses.pop(p, None)
        for tier in ("host", "disk") if prefixes else ():
            assert sorted(slots[tier].tolist()) == sorted(c[tier] for c in gone if c.get(tier, ABSENT) >= 0)

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def tidy(self, space: bytes, tokens: list[int]) -> None:
        found = self.index.match(tokens, space, use=False)
        locked = {p for _, _, prefixes in self.held for p in prefixes}
        node_end = found.node.end
        whole = self.known_of(space, tokens)
        if found.pages < node_end or found.node.children or found.node.locks:
            self.index.tidy(found.node)
            if found.pages < node_end:  # whatever went is of pages that we did not name: ask the tree which
                self.forget_unknown()
            return
        self.index.tidy(found.node)
        while whole and whole[-1] not in locked and not self.worth(whole[-1]) and not self.has_longer(whole[-1]):
            self.known.pop(whole[-1])
            self.uses.pop(whole.pop(), None)
        assert self.index.match(tokens, space, use=False).pages == len(whole)

    def worth(self, p: tuple[bytes, Prefix]) -> bool:
        return any(self.known[p].get(tier, ABSENT) != ABSENT for tier in ("host", "disk"))

    def has_longer(self, p: tuple[bytes, Prefix]) -> bool:
        longer = len(p[1]) + self.index.page_size
        return any(q[0] == p[0] and len(q[1]) == longer and q[1][: len(p[1])] == p[1] for q in self.known)

    def forget_unknown(self) -> None:
        for p in sorted(self.known, key=lambda p: -len(p[1])):
            if self.index.match(list(p[1]), p[0], use=False).pages * self.index.page_size < len(p[1]):
                assert not self.worth(p) and not self.has_longer(p)
                del self.known[p]
                self.uses.pop(p, None)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "index"):
            check_tree(self.index)
            assert self.index.pages == len(self.known)
            assert self.index.locks == len(self.held)

    def teardown(self) -> None:
        for node, _, _ in self.held:
            self.index.unlock(node)
        if hasattr(self, "index"):
            assert self.index.locks == 0 and all(not node.locks for node in self.index.nodes())


TestIndexSteps = IndexSteps.TestCase
TestIndexSteps.settings = QUICK


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_thousand_steps() -> None:
    run_state_machine_as_test(IndexSteps, settings=LONG)
