"""mapped: one launch for all layers, a flag a layer. Its bytes are compared in test_relayout.py, with its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_helpers import (
    DEVICE,
    Memory,
    as_unsigned,
    fresh_generator,
    make_table,
    on_device,
    page_first_memory,
    random_ids,
    ready_memory,
)

from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.kernels.table import CopyTable

SPEC = KVSpec.mla(3, 4, 24)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=DEVICE)


def load_table(src: Memory, dst: Memory, box: Box | None = None, tile_bytes: int = 4096) -> CopyTable:
    spec = src.layout.spec
    box = box or Box.whole(spec)
    return make_table(coalesce(spec, Side.of(src.layout), Side.of(dst.layout), box, order="src"), src, dst, tile_bytes)


@pytest.mark.parametrize("ctas", [1, 2, 7])
@pytest.mark.parametrize("tile_bytes", [64, 1024, 65536])
def test_every_cta_takes_its_share_and_raises_every_flag(ctas: int, tile_bytes: int) -> None:
    """More CTAs than tiles, fewer, and tiles of several pages; flags lie between others that stay as they are."""
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 4, rng), ready_memory("sglang.layer_first", SPEC, 6, rng)
    src_ids, dst_ids = random_ids(rng, 4, 4), random_ids(rng, 4, 6)
    flags = torch.full((5,), 40, dtype=torch.int32, device=DEVICE)
    digests = torch.zeros(4, 3, dtype=torch.int64, device=DEVICE)
    table = load_table(src, dst, tile_bytes=tile_bytes)
    mapped_copy(table, 4, flags[1:4], ctas, src_ids=on_device(src_ids), dst_ids=on_device(dst_ids), digests=digests)
    wanted = dst.original_pages()
    wanted[dst_ids] = src.original_pages()[src_ids]
    dst.expect_pages(wanted)
    src.expect_untouched()
    assert flags.tolist() == [40, *[40 + ctas] * 3, 40]
    np.testing.assert_array_equal(as_unsigned(digests), page_digests(src.original_pages()[src_ids], SPEC))


@pytest.mark.parametrize("ctas", [2, 3, 5])
def test_entries_of_few_and_many_tiles_follow_each_other(ctas: int) -> None:
    """Each CTA reads one tile ahead, across entries: also past entries in which it has no tile."""
    rng = fresh_generator()
    small, large = Component("scale", 1, 8), Component("latent", 1, 104)
    spec = KVSpec(2, ((small, large), (small,), (small,), (large, small), (large,)))
    src, dst = page_first_memory(spec, 2, rng), ready_memory("transformers", spec, 3, rng)
    table = load_table(src, dst, tile_bytes=64)
    assert {int(n) * table.tile.scale for n in table.rows[:, 4]} == {2, 26}  # words: 1 tile and 4 of a page
    digests = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    ids = random_ids(rng, 2, 3)
    mapped_copy(table, 2, zeros(5), ctas, dst_ids=on_device(ids), digests=digests)
    wanted = dst.original_pages()
    wanted[ids] = src.original_pages()
    dst.expect_pages(wanted)
    np.testing.assert_array_equal(as_unsigned(digests), page_digests(src.original_pages(), spec))


def test_flags_grow_by_the_ctas_of_each_launch() -> None:
    """An epoch is a launch: a waiter asks for epoch x CTAs, also past the sign bit (its compare is cyclic)."""
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 2, rng), ready_memory("sglang.layer_first", SPEC, 2, rng)
    table = load_table(src, dst)
    flags = zeros(3)
    for epoch in range(1, 4):
        mapped_copy(table, 2, flags, 4, status=None)
        assert flags.tolist() == [4 * epoch] * 3
    flags.fill_(2**31 - 2)
    mapped_copy(table, 2, flags, 4)
    assert flags.tolist() == [-(2**31) + 2] * 3


def test_a_box_has_flags_for_its_own_layers() -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 2, rng), ready_memory("sglang.layer_first", SPEC, 2, rng)
    flags = zeros(4)
    digests = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    mapped_copy(load_table(src, dst, Box(1, 3, 0, 4)), 2, flags[:2], 2, digests=digests)
    assert flags.tolist() == [2, 2, 0, 0]
    wanted, content = dst.original_pages(), src.original_pages()
    wanted[:, SPEC.layer_offsets[1] :] = content[:, SPEC.layer_offsets[1] :]
    dst.expect_pages(wanted)
    expected = page_digests(content, SPEC)
    expected[:, 0] = 0  # digests stay at the layer's place in the spec
    np.testing.assert_array_equal(as_unsigned(digests), expected)


def test_a_layer_with_nothing_in_the_box_raises_its_flag_all_the_same() -> None:
    rng = fresh_generator()
    spec = KVSpec(8, ((Component("k", 1, 8),), (Component("state", 1, 16, per_page=True),), (Component("k", 1, 4),)))
    src, dst = page_first_memory(spec, 2, rng), ready_memory("transformers", spec, 2, rng)
    flags = zeros(3)
    mapped_copy(load_table(src, dst, Box(0, 3, 2, 8)), 2, flags, 3)
    assert flags.tolist() == [3, 3, 3]
    wanted, content = dst.original_pages(), src.original_pages()
    for part in (slice(16, 64), slice(64 + 16 + 8, spec.page_bytes)):
        wanted[:, part] = content[:, part]
    dst.expect_pages(wanted)


@pytest.mark.parametrize("status", [1, 3, -1])
def test_a_closed_gate_writes_nothing_and_raises_every_flag(status: int) -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 3, rng), ready_memory("vllm.LBHNC", SPEC, 3, rng)
    flags, gate = zeros(3), torch.tensor([status, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    digests = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    mapped_copy(load_table(src, dst), 3, flags, 5, status=gate, digests=digests)
    dst.expect_untouched()
    src.expect_untouched()
    assert flags.tolist() == [5, 5, 5]
    assert not digests.any()
    mapped_copy(load_table(src, dst), 3, flags, 5, status=torch.zeros_like(gate), digests=digests)
    dst.expect_pages(src.original_pages())
    assert flags.tolist() == [10, 10, 10]


def test_no_pages_raise_every_flag() -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 2, rng), ready_memory("vllm.LBHNC", SPEC, 2, rng)
    flags = zeros(3)
    mapped_copy(load_table(src, dst), 0, flags, 2)
    dst.expect_untouched()
    assert flags.tolist() == [2, 2, 2]
