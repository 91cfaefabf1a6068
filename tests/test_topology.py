"""Who stands where, who holds what, and that each shard of each page is written once."""

from __future__ import annotations

import hashlib
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.tiers.keys import Shard
from kvtransfer.topology import Coordinates, Shards, Topology

SIZES = st.integers(1, 4)


@given(tp=SIZES, pp=SIZES, cp=SIZES)
def test_ranks_and_places_are_the_same_thing(tp: int, pp: int, cp: int) -> None:
    topology = Topology(tp=tp, pp=pp, cp=cp)
    places = [topology.coordinates(rank) for rank in range(topology.size)]
    assert len(set(places)) == topology.size == tp * pp * cp
    for rank, at in enumerate(places):
        assert topology.rank(pp=at.pp, cp=at.cp, tp=at.tp) == rank
        assert rank in topology.stage(at.pp)
    assert topology.stage_leaders == tuple(topology.stage(stage)[0] for stage in range(pp))
    assert places[0] == Coordinates(0, 0, 0)


def test_tensor_parts_are_innermost() -> None:
    assert Topology(tp=2, pp=2, cp=2).coordinates(5) == Coordinates(pp=1, cp=0, tp=1)


def test_bad_topologies() -> None:
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        Topology(tp=0)
    with pytest.raises(ConfigError, match="rank: expected 0 to 3, got 4"):
        Topology(tp=2, cp=2).coordinates(4)
    with pytest.raises(ConfigError, match="expected a place within"):
        Topology(tp=2).rank(tp=2)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 3),
    cp=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4, 8]),
    split=st.booleans(),
    pages=st.integers(1, 30),
)
def test_each_shard_of_each_page_is_written_once(
    tp: int, pp: int, cp: int, heads: int, split: bool, pages: int
) -> None:
    topology = Topology(tp=tp, pp=pp, cp=cp)
    shards = Shards(topology, KVSpec.attention(6, 16, heads, 8, 2), context_split=split)
    keys = [hashlib.sha256(os.urandom(8)).digest() for _ in range(pages)]
    written = Counter(
        (shards.shard(rank), position) for rank in range(topology.size) for position in shards.to_write(rank, keys)
    )
    different = min(heads, tp) * pp * (cp if split else 1)
    assert len({shards.shard(rank) for rank in range(topology.size)}) == different
    assert len(written) == different * pages and set(written.values()) == {1}
    for rank in range(topology.size):
        assert rank in shards.holders(rank)
        assert {shards.shard(other) for other in shards.holders(rank)} == {shards.shard(rank)}


def test_what_the_shards_hold_makes_up_the_model() -> None:
    """The bytes of the different shards of a page add up to the page's."""
    spec = KVSpec.uniform(6, 16, [Component("k", 4, 32), Component("v", 4, 16)])
    shards = Shards(Topology(tp=8, pp=2, cp=2), spec, stage_layers=[(0, 4), (4, 6)])
    sizes = {shards.shard(rank): shards.local_spec(rank).page_bytes for rank in range(32)}
    assert sum(sizes.values()) == spec.page_bytes
    assert shards.shard(1) == Shard(0, 4, 0, 4) == shards.shard(0)  # four heads, eight ranks: copied in pairs
    assert shards.shard(31) == Shard(4, 6, 3, 4)
    assert shards.holders(0) == (0, 1, 8, 9)


def test_a_latent_is_held_by_all_and_written_by_turns() -> None:
    shards = Shards(Topology(tp=4), KVSpec.mla(2, 16, 576))
    assert shards.holders(2) == (0, 1, 2, 3) and shards.shard(3) == Shard(0, 2)
    keys = [hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(2000)]
    shares = [len(shards.to_write(rank, keys)) for rank in range(4)]
    assert sum(shares) == 2000 and all(400 < share < 600 for share in shares)


def test_a_hybrid_is_cut_by_its_heads() -> None:
    """A component of one head rides along in the shard of every rank."""
    spec = KVSpec(16, ((Component("k", 8, 32),), (Component("state", 1, 4096, per_page=True),)))
    shards = Shards(Topology(tp=2), spec)
    assert shards.holders(0) == (0,)
    assert shards.local_spec(1).page_bytes == spec.page_bytes - 16 * 4 * 32


def test_what_can_not_be_cut() -> None:
    with pytest.raises(LayoutError, match=r"counts that 3 ranks can cut or copy evenly, got \[4\]"):
        Shards(Topology(tp=3), KVSpec.attention(2, 16, 4, 8, 2))
    with pytest.raises(LayoutError, match=r"got \[2, 8\]"):
        Shards(Topology(tp=4), KVSpec.uniform(1, 16, [Component("k", 8, 8), Component("x", 2, 8)]))
    with pytest.raises(ConfigError, match="5 layers are no 2 equal parts"):
        Shards(Topology(pp=2), KVSpec.mla(5, 16, 8))
    for parts in ([(0, 5)], [(0, 2), (3, 5)], [(0, 2), (2, 4)], [(1, 2), (2, 5)], [(0, 0), (0, 5)], [(0, 5), (5, 5)]):
        with pytest.raises(ConfigError, match="expected 2 parts that follow each other from 0 to 5"):
            Shards(Topology(pp=2), KVSpec.mla(5, 16, 8), stage_layers=parts)
    assert Shards(Topology(pp=2), KVSpec.mla(5, 16, 8), stage_layers=[(0, 2), (2, 5)]).shard(1) == Shard(2, 5)
