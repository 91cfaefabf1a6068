"""Policies: who goes first, against sorting by hand; what is written; when a request waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from index_helpers import check_tree

from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.policy import (
    EVICTION,
    FIFO,
    LFU,
    LRU,
    SLRU,
    EvictionPolicy,
    PathScore,
    Prefetch,
    Priority,
    Prune,
    WriteBack,
    WriteThrough,
    WriteThroughSelective,
    eviction,
    writing,
)
from kvtransfer.tree import ABSENT, Node


class Bench:
    """An index whose sequences are all in one tier, with a clock that is set by hand."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.now = 0.0
        self.index = PrefixIndex(1, {"host": "slots"}, clock=lambda: self.now)
        self.victims = self.index.watch("host", policy)
        self.slot = 0

    def add(self, tokens: Any, priority: int = 0) -> Node:
        found = self.index.insert(tokens, priority=priority)
        lacking = np.flatnonzero(self.index.codes(found, "host") == ABSENT)
        self.index.write(found.node, "host", lacking, np.arange(self.slot, self.slot + lacking.size))
        self.slot += lacking.size
        return found.node

    def hit(self, tokens: Any, times: int = 1) -> None:
        for _ in range(times):
            self.index.match(tokens)

    def give_up(self, node: Node) -> None:
        pages = np.arange(node.start, node.end)
        self.index.write(node, "host", pages, np.full(pages.size, ABSENT))

    def order(self) -> list[int]:
        """The first token of each node, in the order in which they go."""
        gone = []
        for node in self.victims.walk(self.now):
            gone.append(int(np.frombuffer(node.edge, "<u4")[0]))
            self.give_up(node)
        check_tree(self.index)
        return gone


def test_lru_goes_by_use_lfu_by_hits_fifo_by_birth_priority_by_priority() -> None:
    def order(policy: EvictionPolicy) -> list[int]:
        bench = Bench(policy)
        for n, priority in ((1, 2), (2, 0), (3, 1), (4, 0)):
            bench.add([n], priority)
        bench.hit([1], 3)
        bench.hit([3], 2)
        bench.hit([4], 2)
        bench.hit([2], 1)
        return bench.order()

    assert order(LRU()) == [1, 3, 4, 2]
    assert order(LFU()) == [2, 3, 4, 1]
    assert order(FIFO()) == [1, 2, 3, 4]
    assert order(Priority()) == [4, 2, 3, 1]
    assert order(SLRU(2)) == [2, 1, 3, 4]
    assert order(SLRU(4)) == [1, 3, 4, 2]


def test_a_tail_goes_before_what_is_in_front_of_it_whatever_its_rank() -> None:
    bench = Bench(LFU())
    bench.add([1, 2, 3])
    bench.add([1, 2, 4])
    bench.hit([1, 2, 3], 5)
    assert bench.order() == [4, 3, 1]


def test_use_while_queued_moves_a_node_back() -> None:
    bench = Bench(LRU())
    for n in range(5):
        bench.add([n])
    walk = bench.victims.walk(0.0)
    first = next(walk)
    assert first.edge == np.array([0], "<u4").tobytes()
    bench.give_up(first)
    bench.hit([1])
    assert next(walk).edge == np.array([2], "<u4").tobytes()
    walk.close()
    assert bench.order() == [2, 3, 4, 1]


@pytest.mark.parametrize("name", sorted(EVICTION))
def test_what_is_left_or_held_is_asked_again_later(name: str) -> None:
    bench = Bench(eviction(name))
    nodes = [bench.add([n, n + 1]) for n in range(0, 20, 2)]
    bench.index.lock(nodes[3])
    seen = list(bench.victims.walk(0.0))
    assert len(seen) == 9 and nodes[3] not in seen
    walk = bench.victims.walk(0.0)
    next(walk)
    walk.close()
    bench.index.unlock(nodes[3])
    assert sorted(bench.victims.candidates(), key=id) == sorted(nodes, key=id)
    assert len(bench.order()) == 10


@pytest.mark.parametrize("name", sorted(EVICTION))
def test_any_history_gives_the_order_of_a_sort(name: str) -> None:
    """The heap that is not told of every use agrees with sorting all tails, each time."""
    rng, policy = random.Random(name), eviction(name)
    bench = Bench(policy)
    for _ in range(400):
        bench.now += rng.random()
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.5:
            bench.add(tokens, rng.randrange(3))
        else:
            bench.hit(tokens)
        if rng.random() < 0.3:
            for _ in range(rng.randrange(4)):
                tails = [n for n in bench.index.nodes() if n.have[0] and not n.kids[0]]
                deep = [n for n in tails if n.depth() >= policy.keep_depth]
                may = [n for n in tails if not policy.keep_depth or n.depth() != policy.keep_depth or len(deep) > 1]
                walk = bench.victims.walk(bench.now)
                victim = next(walk, None)
                walk.close()
                assert victim is min(may, key=lambda n: policy.rank(n, bench.now), default=None)
                if victim is not None:
                    bench.give_up(victim)
                    bench.index.tidy(victim)
        check_tree(bench.index)


def test_nodes_that_are_gone_are_not_kept_alive() -> None:
    bench = Bench(LFU())
    bench.hit([0], 1)
    for n in range(5000):
        node = bench.add([n])
        bench.hit([n], 3)
        bench.give_up(node)
        bench.index.tidy(node)
    assert len(bench.victims._nodes) <= 64 and len(bench.victims._heap) <= 65


def test_path_score_is_its_formula() -> None:
    bench = Bench(PathScore())
    deep = bench.add([1, 2])
    bench.hit([1])
    bench.hit([1, 2], 4)
    bench.now = 10.0
    assert deep.depth() == 2
    assert PathScore().rank(deep, 10.0)[0] == pytest.approx(4 * 0.95**10 + 0.3 * 2)
    assert PathScore().rank(deep, -5.0)[0] == pytest.approx(4 + 0.6)  # a clock that went back is no bonus
    assert PathScore(decay=0.5, depth_weight=1.0).rank(deep, 3.0)[0] == pytest.approx(4 * 0.125 + 2)


def test_path_score_changes_its_order_as_time_goes_by() -> None:
    def first_at(now: float) -> int:
        bench = Bench(PathScore())
        for stop in (1, 2, 3):
            bench.add([1, 2, 3][:stop])  # depth 3, never hit: 0.9
        bench.add([9])
        bench.hit([9], 1)  # depth 1, one hit: 1.3 at first, 0.3 in the end
        bench.now = now
        return bench.order()[0]

    assert first_at(0.0) == 3 and first_at(100.0) == 9


def test_path_score_keeps_one_path_of_five_nodes() -> None:
    bench = Bench(PathScore())
    long, other = [list(range(n, n + 10)) for n in (0, 100)]
    for one in (long, other):
        for stop in range(1, 8):
            bench.add(one[:stop])
    bench.hit(long, 2)
    order = bench.order()
    assert order.count(6) == order.count(5) == 1  # cut back to five nodes
    assert [n for n in order if n >= 100] == [106, 105, 104, 103, 102, 101, 100]
    assert sorted(n.start for n in bench.index.nodes() if n.have[0]) == [0, 1, 2, 3, 4]


def test_somebody_elses_policy() -> None:
    class Random:
        static, keep_depth = False, 0

        def rank(self, node: Node, now: float) -> float:
            return -float(np.frombuffer(node.edge, "<u4")[0])

    bench = Bench(eviction(Random()))
    for n in (3, 1, 2):
        bench.add([n])
    assert bench.order() == [3, 2, 1]


def test_names_and_what_they_are_not() -> None:
    assert {name: type(eviction(name)) for name in EVICTION} == EVICTION
    assert isinstance(writing("write_back"), WriteBack)
    for wrong in ("lifo", object()):
        with pytest.raises(ConfigError, match="eviction: expected"):
            eviction(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="write: expected"):
            writing(wrong)  # type: ignore[arg-type]
    prunes: list[dict[str, Any]] = [{"watermark": 1.5}, {"idle_s": -1.0}, {"every_s": -1.0}]
    for settings in prunes:
        with pytest.raises(ConfigError, match="prune: expected"):
            Prune(**settings)
    fetches: list[dict[str, Any]] = [{"stop": "never"}, {"threshold_tokens": -1}, {"base_s": -0.1}]
    for settings in fetches:
        with pytest.raises(ConfigError, match="prefetch: expected"):
            Prefetch(**settings)
    with pytest.raises(ConfigError, match="hits of at least 0"):
        WriteThroughSelective(-1)


def test_what_is_written_when() -> None:
    assert [WriteThrough().now(n) for n in (0, 1)] == [True, True] and not WriteThrough().on_evict
    assert [WriteThroughSelective(2).now(n) for n in (0, 1, 2, 3)] == [False, False, True, True]
    assert not WriteBack().now(100) and WriteBack().on_evict


def test_what_is_fetched_and_for_how_long_a_request_waits() -> None:
    assert [Prefetch().is_worth(n) for n in (0, 255, 256, 1000)] == [False, False, True, True]
    assert [Prefetch(0).is_worth(n) for n in (0, 1)] == [False, True]
    assert Prefetch(stop="best_effort").limit_s(10_000) == 0.0
    assert Prefetch(stop="wait_complete").limit_s(10_000) == float("inf")
    assert Prefetch(stop="timeout", base_s=2.0, per_ki_token_s=0.25).limit_s(4096) == 2.0 + 0.25 * 4


def test_cold_is_rarely_used_and_idle_or_a_branch_of_its_own() -> None:
    prune = Prune(lone=False)
    bench = Bench(LRU())
    node = bench.add([1, 2])
    assert not prune.is_cold(node, 299.9) and prune.is_cold(node, 300.0)
    bench.hit([1, 2], 2)
    assert prune.is_cold(node, 300.0)
    bench.hit([1, 2], 1)
    assert not prune.is_cold(node, 1e6)
    assert Prune().is_cold(node, 0.0)  # nobody shares it
    bench.add([1, 2, 3])
    tail = bench.index.match([1, 2, 3], use=False).node
    assert Prune().is_cold(tail, 0.0)
    bench.add([1, 2, 4])
    assert not Prune().is_cold(tail, 0.0)  # two continue it
