"""Records by head group: written at one TP size, read at another, exact heads."""

from __future__ import annotations

import secrets
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tier_contract import done, statuses

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, Shard, page_keys
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.record import RecordHeader

PAGES = 3
SIZES = range(1, 9)


def spec_of(heads: int, layers: int = 2) -> KVSpec:
    """K and V of different odd widths, and a row of scales that every rank holds whole."""
    return KVSpec.uniform(
        layers, 3, (Component("k", heads, 6), Component("v", heads, 10), Component("scale", 1, 4, per_page=True))
    )


def valid(heads: int, size: int) -> bool:
    """Whether a model of so many heads runs at this TP size."""
    return heads % size == 0 or size % heads == 0


class Rank:
    """The memory of one rank: its pages in a layout of its own, guard bytes between and behind."""

    def __init__(self, groups: HeadGroups, layout: str, pad: bool) -> None:
        self.groups = groups
        spec = groups.rank_spec
        if layout == "page_first":
            stride = -(-spec.page_bytes // 16) * 16 + 64 if pad else None
            self.layout = Layout.page_first(spec, PAGES + 2, page_stride_bytes=stride)
        else:
            self.layout = Layout.named(layout, spec, PAGES + 2)
        self.buffers = [torch.full((size,), 0xA5, dtype=torch.uint8) for size in self.layout.buffer_bytes]
        self.pages = np.random.default_rng().permutation(PAGES + 2)[:PAGES].astype(np.int64)

    def view(self, page: int, layer: int, component: int) -> NDArray[np.uint8]:
        """[tokens, heads, bytes] of one component of one page, byte by byte from the layout's own numbers."""
        spec = self.groups.rank_spec
        c = spec.layers[layer][component]
        out = np.empty((c.rows(spec.page_size), c.heads, c.head_bytes), np.uint8)
        where = _offsets(self.layout, layer, component)
        buffer = self.buffers[self.layout.placements[layer][component].buffer].numpy()
        out[:] = buffer[where + page * self.layout.placements[layer][component].page_stride]
        return out

    def fill(self, whole: Whole, heads: range) -> None:
        """Its share of the model's pages."""
        for at, page in enumerate(self.pages.tolist()):
            for layer, components in enumerate(self.groups.rank_spec.layers):
                for i in range(len(components)):
                    place = self.layout.placements[layer][i]
                    where = _offsets(self.layout, layer, i) + page * place.page_stride
                    self.buffers[place.buffer].numpy()[where] = whole.cut(at, layer, i, heads)

    def check(self, whole: Whole, heads: range) -> None:
        """Exactly its share, and nothing else was written."""
        touched = [np.zeros(b.numel(), bool) for b in self.buffers]
        for at, page in enumerate(self.pages.tolist()):
            for layer, components in enumerate(self.groups.rank_spec.layers):
                for i in range(len(components)):
                    got = self.view(page, layer, i)
                    assert (got == whole.cut(at, layer, i, heads)).all(), f"page {at}, layer {layer}, component {i}"
                    place = self.layout.placements[layer][i]
                    touched[place.buffer][_offsets(self.layout, layer, i) + page * place.page_stride] = True
        for buffer, mine in zip(self.buffers, touched, strict=True):
            assert (buffer.numpy()[~mine] == 0xA5).all()


@cache
def _offsets(layout: Layout, layer: int, component: int) -> NDArray[np.int64]:
    """[tokens, heads, bytes] of page 0, from the placement's dims."""
    place = layout.placements[layer][component]

    def axis(dims: Any) -> NDArray[np.int64]:
        offsets = np.zeros(1, np.int64)
        for extent, stride in dims:
            offsets = (offsets[:, None] + np.arange(extent) * stride).reshape(-1)
        return offsets

    c = layout.spec.layers[layer][component]
    token, head = axis(place.token), axis(place.head)
    return place.offset + token[:, None, None] + head[None, :, None] + np.arange(c.head_bytes)


class Whole:
    """The model's pages, all heads: random bytes, so that every head and token differs."""

    def __init__(self, spec: KVSpec) -> None:
        rng = np.random.default_rng()
        self.spec = spec
        self.data = [
            [
                [rng.integers(0, 256, (c.rows(spec.page_size), c.heads, c.head_bytes), np.uint8) for c in components]
                for components in spec.layers
            ]
            for _ in range(PAGES)
        ]

    def cut(self, page: int, layer: int, component: int, heads: range) -> NDArray[np.uint8]:
        data = self.data[page][layer][component]
        return data if data.shape[1] == 1 else data[:, heads.start : heads.stop]


def heads_of(heads: int, size: int, rank: int) -> range:
    """What a rank of an engine holds: an even share, or one head together with others."""
    if size <= heads:
        return range(rank * heads // size, (rank + 1) * heads // size)
    return range(rank * heads // size, rank * heads // size + 1)


def records_for(groups: HeadGroups) -> HostTier:
    return HostTier(
        groups.record_spec, capacity_pages=PAGES * len(groups.owned), device="cpu", pin=False, huge_pages=False
    )


def write(spec: KVSpec, whole: Whole, share: int, size: int, layout: str, pad: bool, tier: Any, space: bytes) -> int:
    """Every rank of one TP size writes its records. Returns how many were written."""
    keys = page_keys(range(PAGES * spec.page_size), spec.page_size)
    heads = max(c.heads for c in spec.layers[0])
    written = 0
    for rank in range(size):
        groups = HeadGroups(spec, share_across_tp=share, tp_size=size, tp_rank=rank)
        if not groups.writes:
            continue
        memory = Rank(groups, layout, pad)
        memory.fill(whole, heads_of(heads, size, rank))
        with records_for(groups) as records:
            slots = records.allocate(PAGES * len(groups.owned))
            groups.cut(memory.layout, memory.buffers, memory.pages, records, slots)
            stored = groups.stored_keys(b"salt", space, keys)
            shards = groups.shards() * PAGES
            headers = [
                RecordHeader(key, space, shard, "page_first", groups.record_spec.page_bytes)
                for key, shard in zip(stored, shards, strict=True)
            ]
            records.seal(slots, headers)
            done(tier.put_from(stored, [records.record(int(slot)) for slot in slots])).require()
            written += len(stored)
    return written


def read(spec: KVSpec, whole: Whole, share: int, size: int, layout: str, pad: bool, tier: Any, space: bytes) -> None:
    """Every rank of one TP size reads its pages, and has exactly its heads."""
    keys = page_keys(range(PAGES * spec.page_size), spec.page_size)
    heads = max(c.heads for c in spec.layers[0])
    for rank in range(size):
        groups = HeadGroups(spec, share_across_tp=share, tp_size=size, tp_rank=rank)
        memory = Rank(groups, layout, pad)
        with records_for(groups) as records:
            slots = records.allocate(PAGES * len(groups.owned))
            stored = groups.stored_keys(b"salt", space, keys)
            got = statuses(tier.get_into(stored, [records.record(int(slot)) for slot in slots]))
            assert groups.page_statuses(got) == [PageStatus.OK] * PAGES
            groups.gather(records, slots, memory.layout, memory.buffers, memory.pages)
        memory.check(whole, heads_of(heads, size, rank))


LAYOUTS = ["page_first", "sglang.layer_first", "vllm.LBHNC"]


@pytest.mark.parametrize("pad", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("writer", SIZES)
def test_all_pairs_of_tp_sizes(writer: int, heads: int, pad: bool) -> None:
    spec, share = spec_of(heads), 8
    space = Namespace.of(spec, model=secrets.token_hex(4), kv_dtype="uint8").digest()
    if not valid(heads, writer):
        with pytest.raises((ConfigError, LayoutError), match="expected"):
            HeadGroups(spec, share_across_tp=share, tp_size=writer, tp_rank=0)
        return
    whole = Whole(spec)
    with MemoryTier(1 << 28) as tier:
        written = write(spec, whole, share, writer, "page_first", pad, tier, space)
        assert written == PAGES * heads, "each distinct shard once"
        for reader in SIZES:
            if valid(heads, reader):
                read(spec, whole, share, reader, "page_first", pad, tier, space)


@pytest.mark.parametrize("writer", [1, 2, 3, 4, 6, 8])
def test_sizes_that_are_no_powers_of_two_and_layouts_of_engines(writer: int) -> None:
    spec = KVSpec.uniform(2, 3, (Component("k", 24, 6), Component("v", 24, 6)))
    space = Namespace.of(spec, model=secrets.token_hex(4), kv_dtype="uint8").digest()
    whole = Whole(spec)
    with MemoryTier(1 << 28) as tier:
        assert write(spec, whole, 24, writer, LAYOUTS[writer % 3], False, tier, space) == PAGES * 24
        for reader in (1, 2, 3, 4, 6, 8):
            read(spec, whole, 24, reader, LAYOUTS[reader % 3], False, tier, space)
    for size in (5, 7):
        with pytest.raises(ConfigError, match=f"tp_size {size}: expected one that divides 24 head groups"):
            HeadGroups(spec, share_across_tp=24, tp_size=size, tp_rank=0)


def test_every_size_from_1_to_8_with_heads_for_all_of_them() -> None:
    """840 heads, the least number that all eight sizes divide. Records are the same bytes, whichever size wrote them,
    and each size reads them: so every pair works."""
    spec = KVSpec.uniform(1, 1, (Component("k", 840, 2),))
    whole = Whole(spec)
    slot_of = np.arange(840 * PAGES).reshape(PAGES, 840)

    def share(size: int, rank: int) -> tuple[HeadGroups, NDArray[np.int64]]:
        one = HeadGroups(spec, share_across_tp=840, tp_size=size, tp_rank=rank)
        return one, np.ascontiguousarray(slot_of[:, one.owned.start : one.owned.stop]).reshape(-1)

    record_spec = share(1, 0)[0].record_spec
    with HostTier(record_spec, capacity_pages=840 * PAGES, device="cpu", pin=False) as records:
        images = []
        for size in SIZES:
            records.payload.fill_(0)
            for rank in range(size):
                one, slots = share(size, rank)
                memory = Rank(one, "page_first", pad=False)
                memory.fill(whole, heads_of(840, size, rank))
                one.cut(memory.layout, memory.buffers, memory.pages, records, slots)
            images.append(records.payload.clone())
        assert all(torch.equal(image, images[0]) for image in images)
        for size in SIZES:
            for rank in range(size):
                one, slots = share(size, rank)
                memory = Rank(one, "page_first", pad=True)
                one.gather(records, slots, memory.layout, memory.buffers, memory.pages)
                memory.check(whole, heads_of(840, size, rank))


def test_groups_of_several_heads() -> None:
    """N below the number of heads: fewer, larger records; sizes above N are refused with the way out."""
    spec = spec_of(8)
    space = Namespace.of(spec, model=secrets.token_hex(4), kv_dtype="uint8").digest()
    whole = Whole(spec)
    with MemoryTier(1 << 28) as tier:
        assert write(spec, whole, 4, 1, "page_first", False, tier, space) == PAGES * 4
        for reader in (1, 2, 4):
            read(spec, whole, 4, reader, "page_first", True, tier, space)
    with pytest.raises(ConfigError, match=r"cuts groups of 2 heads; take share_across_tp=8"):
        HeadGroups(spec, share_across_tp=4, tp_size=8, tp_rank=0)


def test_replicated_heads_are_written_once() -> None:
    spec = spec_of(2)
    owners: Counter[int] = Counter()
    for rank in range(8):
        groups = HeadGroups(spec, share_across_tp=8, tp_size=8, tp_rank=rank)
        assert list(groups.owned) == [rank // 4] and groups.count == 2
        owners[groups.owned[0]] += groups.writes
    assert owners == {0: 1, 1: 1}


def test_latents_are_one_record_that_one_rank_writes() -> None:
    spec = KVSpec.mla(2, 3, 10)
    all_groups = [HeadGroups(spec, share_across_tp=8, tp_size=4, tp_rank=rank) for rank in range(4)]
    assert [groups.writes for groups in all_groups] == [True, False, False, False]
    assert {groups.shards()[0] for groups in all_groups} == {Shard.whole(spec)}
    assert all_groups[2].record_spec == all_groups[2].rank_spec == spec


def test_layers_of_a_pipeline_stage() -> None:
    spec = spec_of(4, layers=6)
    groups = HeadGroups(spec, share_across_tp=4, tp_size=2, tp_rank=1, layers=(2, 5))
    assert groups.shards() == [Shard(2, 5, 2, 4), Shard(2, 5, 3, 4)]
    assert groups.rank_spec == spec.select_layers(2, 5).select_heads(1, 2)
    other = HeadGroups(spec, share_across_tp=4, tp_size=2, tp_rank=1, layers=(0, 3))
    keys = page_keys(range(30), 3)
    mine, theirs = groups.stored_keys(b"", bytes(32), keys), other.stored_keys(b"", bytes(32), keys)
    assert len(set(mine)) == 20 and not set(mine) & set(theirs)


def test_a_page_needs_all_of_its_records() -> None:
    groups = HeadGroups(spec_of(4), share_across_tp=4, tp_size=2, tp_rank=0)
    ok, miss, corrupt = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
    assert groups.page_statuses([ok, ok, ok, miss, corrupt, miss]) == [ok, miss, corrupt]
    with pytest.raises(ConfigError, match="multiple of 2"):
        groups.page_statuses([ok] * 3)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    spec = spec_of(4)
    for share, size, rank in ((0, 2, 0), (4, 2, 2), (4, 3, 0), (4, 2, -1)):
        with pytest.raises(ConfigError, match="expected"):
            HeadGroups(spec, share_across_tp=share, tp_size=size, tp_rank=rank)
    with pytest.raises(LayoutError, match=r"'k': expected 4 heads to divide share_across_tp=6"):
        HeadGroups(spec, share_across_tp=6, tp_size=2, tp_rank=0)
    mixed = KVSpec(3, ((Component("k", 8, 2),), (Component("k", 2, 2),)))
    with pytest.raises(LayoutError, match=r"2 for 'k' of layer 1 with 2 heads, 8 for .*; take 2"):
        HeadGroups(mixed, share_across_tp=8, tp_size=2, tp_rank=0)
    assert HeadGroups(mixed, share_across_tp=2, tp_size=2, tp_rank=1).count == 2
    groups = HeadGroups(spec, share_across_tp=4, tp_size=2, tp_rank=0)
    memory = Rank(groups, "page_first", False)
    with records_for(groups) as records:
        before = records.payload.clone()
        with pytest.raises(LayoutError, match="expected 2 for each of 3 pages, got 5"):
            groups.cut(memory.layout, memory.buffers, memory.pages, records, np.arange(5))
        with pytest.raises(LayoutError, match="slots: expected 0 to 5"):
            groups.cut(memory.layout, memory.buffers, memory.pages, records, np.arange(1, 7))
        with pytest.raises(LayoutError, match="pages: expected 0 or more"):
            groups.cut(memory.layout, memory.buffers, np.array([0, 1, -1]), records, np.arange(6))
        with pytest.raises(LayoutError):
            groups.cut(Layout.page_first(spec, 5), memory.buffers, memory.pages, records, np.arange(6))
        assert torch.equal(records.payload, before)
    with HostTier(spec, capacity_pages=6, device="cpu", pin=False) as other, pytest.raises(LayoutError):
        groups.gather(other, np.arange(6), memory.layout, memory.buffers, memory.pages)
