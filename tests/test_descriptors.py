"""Descriptors: what a copy engine is given moves exactly the bytes that the layouts say, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import (
    EVEN,
    HYBRID,
    LATENT,
    TINY,
    TOKEN,
    WIDE,
    Bytes,
    Ids,
    fresh,
    page_bytes,
    put_pages,
    random_bytes,
)

from kvtransfer.descriptors import descriptors, piece_offsets
from kvtransfer.dma import merge_runs
from kvtransfer.kernels.coalesce import Box, Entry, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.lanes import U64

NAMES = ["page_first", "sglang.layer_first", "sglang.page_first", "sglang.page_head", "vllm.LBHNC", "transformers"]
CASES = [(name, spec) for name in NAMES for spec in (TINY, TOKEN, WIDE)] + [
    ("page_first", HYBRID),
    ("sglang.layer_first", HYBRID),
    ("vllm.MLA", LATENT),
    ("vllm.BHLNC", EVEN),
]


def apply(memory: Bytes, dst: U64, src: U64, sizes: U64) -> Bytes:
    """What a copy engine does with descriptors over one flat memory, whose byte 0 has address 0."""
    out = memory.copy()
    for d, s, n in zip(dst.astype(np.int64), src.astype(np.int64), sizes.astype(np.int64), strict=True):
        out[d : d + n] = memory[s : s + n]
    return out


def flat(rng: np.random.Generator, *layouts: Layout) -> tuple[Bytes, list[list[Bytes]], list[list[int]]]:
    """One memory that holds the buffers of all layouts, with gaps: (memory, views, addresses)."""
    sizes = [n for layout in layouts for n in layout.buffer_bytes]
    memory = random_bytes(rng, sum(sizes) + 13 * (len(sizes) + 1))
    views: list[list[Bytes]] = []
    addresses: list[list[int]] = []
    at = 13
    for layout in layouts:
        views.append([])
        addresses.append([])
        for n in layout.buffer_bytes:
            views[-1].append(memory[at : at + n])
            addresses[-1].append(at)
            at += n + 13
    return memory, views, addresses


@pytest.mark.parametrize(("name", "spec"), CASES)
@pytest.mark.parametrize("load", [True, False])
def test_pages_move_byte_for_byte(name: str, spec: KVSpec, load: bool) -> None:
    rng = fresh()
    pool, host = Layout.named(name, spec, 7), Layout.page_first(spec, 6, page_stride_bytes=spec.page_bytes + 16 * 3)
    memory, (in_pool, in_host), (at_pool, at_host) = flat(rng, pool, host)
    pages, slots = rng.permutation(7)[:5].astype(np.int64), rng.permutation(6)[:5].astype(np.int64)
    source, target = (host, pool) if load else (pool, host)
    geometry = coalesce(spec, Side.of(source), Side.of(target), Box.whole(spec), order="src" if load else "dst")
    ids: tuple[Ids, Ids] = (slots, pages) if load else (pages, slots)
    bases = (at_host, at_pool) if load else (at_pool, at_host)
    dst, src, sizes = descriptors(geometry, bases[0], bases[1], *ids)
    assert int(sizes.sum()) == 5 * spec.page_bytes
    assert dst.dtype == src.dtype == sizes.dtype == np.uint64
    got = apply(memory, dst, src, sizes)
    if load:
        put_pages(pool, in_pool, pages, page_bytes(host, in_host, slots))
    else:
        put_pages(host, in_host, slots, page_bytes(pool, in_pool, pages))
    assert np.array_equal(got, memory)


def packed(spec: KVSpec, pages: Bytes, box: Box) -> Bytes:
    """The box of page-first pages, cut out by hand: uint8 [n, bytes of the box]."""
    parts, start = [], 0
    for layer, components in enumerate(spec.layers):
        for c in components:
            row = c.heads * c.head_bytes
            if box.layer_start <= layer < box.layer_stop:
                if not c.per_page:
                    parts.append(pages[:, start + box.token_start * row : start + box.token_stop * row])
                elif box.token_start == 0:
                    parts.append(pages[:, start : start + row])
            start += c.page_bytes(spec.page_size)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(
    "box", [Box(0, 1, 0, 16), Box(1, 3, 0, 16), Box(2, 3, 8, 16), Box(0, 1, 0, 8), Box(2, 3, 0, 8)]
)
def test_a_box_moves_between_host_pages_and_a_packed_ring(box: Box) -> None:
    rng = fresh()
    host = Layout.page_first(HYBRID, 5)
    slots = np.array([4, 0, 2], dtype=np.int64)
    want = packed(HYBRID, page_bytes(host, [memory := random_bytes(rng, host.buffer_bytes[0])], slots), box)
    ring = Side.packed(HYBRID, box, 0, want.shape[1])
    geometry = coalesce(HYBRID, Side.of(host), ring, box, order="src")
    assert geometry.page_bytes == want.shape[1]
    both = np.concatenate((memory, random_bytes(rng, 13 + want.size + 13)))
    at = memory.size + 13
    here = np.arange(3, dtype=np.int64)
    got = apply(both, *descriptors(geometry, [0], [at], slots, here))
    assert np.array_equal(got[at:-13].reshape(want.shape), want)
    assert np.array_equal(got[:at], both[:at]) and np.array_equal(got[-13:], both[-13:])
    got[: memory.size] = random_bytes(rng, memory.size)
    back = coalesce(HYBRID, ring, Side.of(host), box, order="dst")
    got = apply(got, *descriptors(back, [at], [0], here, slots))
    assert np.array_equal(packed(HYBRID, page_bytes(host, [got[: memory.size]], slots), box), want)


def test_neighbours_merge_and_boundaries_are_kept() -> None:
    host = Layout.page_first(TINY, 8)
    geometry = coalesce(TINY, Side.of(host), Side.of(host), Box.whole(TINY), order="src")
    ids = np.array([1, 2, 3, 6, 7], dtype=np.int64)
    dst, src, sizes = descriptors(geometry, [1000], [9000], ids, ids)
    assert sizes.tolist() == [TINY.page_bytes] * 5
    cut = np.array([1000 + 7 * TINY.page_bytes], dtype=np.uint64)
    assert [n // TINY.page_bytes for n in merge_runs(dst, src, sizes)[2].tolist()] == [3, 2]
    assert [n // TINY.page_bytes for n in merge_runs(dst, src, sizes, cut)[2].tolist()] == [3, 1, 1]


def test_no_pages_give_no_descriptors() -> None:
    for name in ("page_first", "sglang.layer_first"):
        pool = Layout.named(name, TINY, 3)
        geometry = coalesce(TINY, Side.of(pool), Side.of(pool), Box.whole(TINY), order="src")
        none = np.empty(0, dtype=np.int64)
        bases = [0] * len(pool.buffer_bytes)
        assert all(column.size == 0 for column in descriptors(geometry, bases, bases, none, none))


def test_offsets_of_a_loop_nest_past_32_bits() -> None:
    entry = Entry(0, 0, 0, 5, 100, 0, 7, 200, ((2, 1 << 33, 3), (3, 10, 1 << 40)), 4)
    src, dst = piece_offsets(entry)
    assert src.tolist() == [0, 10, 20, 1 << 33, (1 << 33) + 10, (1 << 33) + 20]
    assert dst.tolist() == [0, 1 << 40, 2 << 40, 3, (1 << 40) + 3, (2 << 40) + 3]
    far = np.array([70_000_000], dtype=np.int64)
    geometry = coalesce(
        TOKEN,
        Side.of(Layout.page_first(TOKEN, 1, 1 << 20)),
        Side.of(Layout.page_first(TOKEN, 1)),
        Box.whole(TOKEN),
        order="src",
    )
    _, source, _ = descriptors(geometry, [0], [0], far, np.zeros(1, dtype=np.int64))
    assert int(source[0]) == 70_000_000 << 20
