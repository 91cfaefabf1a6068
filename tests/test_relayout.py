"""relayout bit for bit, beside the mapped kernel and the plain-torch reference, which run the same cases.

Contents are random bits; every buffer lies between guards, and every byte outside the moved pages must stay as
it was. On a machine without a GPU the kernels run under Triton's interpreter: small sizes, one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_helpers import (
    CTAS,
    DEVICE,
    KERNELS,
    WARPS,
    Bytes,
    Guarded,
    Memory,
    Plan,
    addresses_of,
    as_unsigned,
    box_columns,
    check_copy,
    check_round,
    coordinates,
    declare,
    fresh_generator,
    head_columns,
    make_table,
    on_device,
    page_first_memory,
    random_ids,
    ready_memory,
    run_kernel,
)

from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.digest import box_digests, page_digests
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.launch import (
    MAPPED_TILE_BYTES,
    RELAYOUT_PROGRAMS,
    RELAYOUT_TILE_BYTES,
    Tile,
    choose_tile,
    relayout_grid,
)
from kvtransfer.kernels.layout import Layout, box_bytes
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.names import READY
from kvtransfer.kernels.relayout import lane_offsets, relayout, relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.kernels.table import build_table

ON_GPU_ALIKE = ("relayout", "mapped")  # the Triton kernels
TILES = {"relayout": RELAYOUT_TILE_BYTES, "mapped": MAPPED_TILE_BYTES, "reference": 0}  # as shipped

SPEC = KVSpec.attention(2, 4, kv_heads=2, head_dim=8, itemsize=2)
HYBRID = KVSpec(
    8,
    (
        (Component("k", 2, 12), Component("v", 2, 20)),
        (Component("state", 1, 21, per_page=True), Component("conv", 2, 6, per_page=True)),
        (Component("latent", 1, 26), Component("scale", 1, 4), Component("state", 3, 8, per_page=True)),
    ),
)


# -- where bytes go -------------------------------------------------------------------------------


def spec_for(name: str) -> KVSpec:
    return KVSpec.mla(2, 4, 24) if name == "vllm.MLA" else SPEC


def both_sides(name: str, to_page_first: bool, rng: np.random.Generator) -> tuple[Memory, Memory, str]:
    """(source, destination, order): a pool of 4 pages in a ready layout and a page-first store of 5."""
    spec = KVSpec.mla(2, 4, 24) if name == "vllm.MLA" else SPEC
    pool, store = ready_memory(name, spec, 4, rng), page_first_memory(spec, 5, rng)
    return (pool, store, "dst") if to_page_first else (store, pool, "src")


@pytest.mark.parametrize("to_page_first", [True, False], ids=["to page-first", "from page-first"])
@pytest.mark.parametrize("name", ["page_first", *READY])
def test_every_byte_arrives_at_its_coordinates(name: str, to_page_first: bool) -> None:
    """Each byte carries its own number (page, layer, component, token, head, byte), a digit of it at a time."""
    rng = fresh_generator()
    src, dst, order = both_sides(name, to_page_first, rng)
    spec, here, there = src.layout.spec, src.layout.num_pages, dst.layout.num_pages
    src_ids, dst_ids = random_ids(rng, 3, here), random_ids(rng, 3, there)
    geometry = coalesce(spec, Side.of(src.layout), Side.of(dst.layout), Box.whole(spec), order=order)
    numbers = np.arange(here * spec.page_bytes).reshape(here, spec.page_bytes)
    arrived = np.zeros((there, spec.page_bytes), dtype=np.int64)
    for digit in range(2):
        src.fill((numbers >> 8 * digit & 255).astype(np.uint8))
        run_kernel("reference", geometry, spec, src.tensors, dst.tensors, src_ids, dst_ids)
        src.expect_untouched()
        arrived += dst.page_first([b.now() for b in dst.buffers]).astype(np.int64) << 8 * digit
    for a, b in zip(src_ids, dst_ids, strict=True):
        wrong = np.flatnonzero(arrived[b] != numbers[a])
        if wrong.size:
            page, offset = divmod(int(arrived[b, wrong[0]]), spec.page_bytes)
            pytest.fail(
                f"page {a} at {b}, {coordinates(spec, int(wrong[0]))} holds page {page}, {coordinates(spec, offset)}"
            )


@pytest.mark.parametrize("to_page_first", [True, False], ids=["to page-first", "from page-first"])
@pytest.mark.parametrize("name", ["page_first", *READY])
def test_ready_layouts_by_kernel(name: str, to_page_first: bool) -> None:
    """relayout in both directions, mapped in one: under the interpreter a launch takes its time."""
    rng = fresh_generator()
    src, dst, order = both_sides(name, to_page_first, rng)
    check_copy("relayout", src, dst, rng, order=order)
    if name.startswith(("page", "vllm")) != to_page_first or DEVICE.type == "cuda":
        check_copy("mapped", *both_sides(name, to_page_first, rng)[:2], rng, order=order)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("row", [256, 576, 656, 1152, 2048, 13])
@pytest.mark.parametrize("page_size", [1, 3, 7, 16, 64])
def test_page_sizes_and_rows(page_size: int, row: int, kernel: str) -> None:
    """With the tiles that ship; pieces of a page where relayout gathers, of a row where mapped scatters."""
    rng = fresh_generator()
    spec = KVSpec.uniform(1, page_size, [Component("k", 1, row)])
    name = "sglang.page_first" if kernel == "mapped" else "sglang.layer_first"
    pages = 4 if page_size < 64 else 2
    pool, store = ready_memory(name, spec, pages, rng), page_first_memory(spec, pages, rng, stride=4 * spec.page_bytes)
    check_round(kernel, pool, store, rng, tile_bytes=TILES[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("axes", "pad"), [("page head token dim", ()), ("(page token) head dim", (2, 1, 3))], ids=["dense", "strided"]
)
def test_dtypes(dtype: torch.dtype, axes: str, pad: tuple[int, ...], kernel: str) -> None:
    """Typed tensors with declared axes: NaNs, infinities and denormals are bits like any others."""
    rng = fresh_generator()
    spec = KVSpec.attention(1, 3, kv_heads=2, head_dim=10, itemsize=dtype.itemsize, v_head_dim=6)
    sizes = {"page": [4], "token": [3], "head": [2], "dim": [16]}
    pool = declare(spec, [Plan(axes, sizes, ["k", "v"], [0], dtype, pad)], rng)
    check_round(kernel, pool, page_first_memory(spec, 5, rng, stride=spec.page_bytes + 64), rng)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["sglang.layer_first", "transformers"])
def test_hybrid_models_with_state_rows(name: str, kernel: str) -> None:
    rng = fresh_generator()
    check_round(kernel, ready_memory(name, HYBRID, 3, rng), page_first_memory(HYBRID, 4, rng), rng)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fp8_with_separate_scales(kernel: str) -> None:
    rng = fresh_generator()
    heads = 2
    k, v = Component("k", heads, 32), Component("v", heads, 32)
    scales = Component("k_scale", heads, 4), Component("v_scale", 1, 4, per_page=True)
    spec = KVSpec.uniform(2, 4, [k, v, *scales])
    plans = []
    for layer in range(2):
        for name in "kv":
            sizes = {"page": [3], "token": [4], "head": [heads], "dim": [32]}
            plans.append(Plan("(page token) head dim", sizes, [name], [layer], torch.float8_e4m3fn))
        sizes = {"page": [3], "token": [4], "head": [heads], "dim": [1]}
        plans.append(Plan("(page token) head dim", sizes, ["k_scale"], [layer], torch.float32))
        plans.append(Plan("page dim", {"page": [3], "dim": [1]}, ["v_scale"], [layer], torch.float32))
    check_round(kernel, declare(spec, plans, rng), page_first_memory(spec, 3, rng), rng)


@pytest.mark.parametrize("kernel", KERNELS)
def test_manager_pages_of_several_kernel_blocks(kernel: str) -> None:
    """A manager page of 64 tokens in kernel blocks of 16, each (heads, tokens, K | V)."""
    rng = fresh_generator()
    spec = KVSpec.attention(1, 64, kv_heads=2, head_dim=8, itemsize=2)
    sizes = {"page": [3], "token": [4, 16], "head": [2], "dim": [16]}
    plan = Plan("(page token) head token dim", sizes, ["k", "v"], [0], torch.bfloat16)
    check_round(kernel, declare(spec, [plan], rng), page_first_memory(spec, 3, rng), rng)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axes", ["kv page token head dim", "page kv token head dim"])
def test_two_pages_of_k_and_v(axes: str, kernel: str) -> None:
    """Shape (2, 2, ...) either way: the declaration alone says which axis is the page."""
    rng = fresh_generator()
    sizes = {"kv": [2], "page": [2], "token": [4], "head": [2], "dim": [8]}
    plans = [Plan(axes, sizes, ["k", "v"], [layer], torch.float16) for layer in range(2)]
    check_round(kernel, declare(SPEC, plans, rng), page_first_memory(SPEC, 2, rng), rng)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pool_to_pool(kernel: str) -> None:
    """Neither side page-first: K's width is not V's, and the layouts nest in other orders."""
    rng = fresh_generator()
    spec = KVSpec.attention(2, 6, kv_heads=2, head_dim=6, itemsize=2, v_head_dim=4)
    check_copy(kernel, ready_memory("vllm.LHBNC", spec, 3, rng), ready_memory("sglang.page_head", spec, 4, rng), rng)


@pytest.mark.parametrize("kernel", ON_GPU_ALIKE)
@pytest.mark.parametrize(("src_off", "dst_off"), [(8, 0), (4, 4), (0, 2), (1, 0), (3, 3)])
def test_buffers_off_their_alignment(src_off: int, dst_off: int, kernel: str) -> None:
    rng = fresh_generator()
    spec = KVSpec.attention(1, 3, kv_heads=2, head_dim=16, itemsize=1)
    src = page_first_memory(spec, 3, rng, misalign=src_off)
    sizes = {"page": [3], "head": [2], "token": [3], "dim": [32]}
    dst = declare(spec, [Plan("page head token dim", sizes, ["k", "v"], [0])], rng, misalign=dst_off)
    check_copy(kernel, src, dst, rng)


@pytest.mark.parametrize("kernel", ON_GPU_ALIKE)
@pytest.mark.parametrize("tile_bytes", [128, 512, 65536])
def test_tiles_smaller_and_larger_than_a_page(tile_bytes: int, kernel: str) -> None:
    rng = fresh_generator()
    spec = KVSpec(3, ((Component("k", 2, 64), Component("v", 1, 40)),))
    check_copy(
        kernel, ready_memory("transformers", spec, 7, rng), page_first_memory(spec, 6, rng), rng, tile_bytes=tile_bytes
    )


# -- ids, shifts, boxes ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ON_GPU_ALIKE)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_id", ["both", "source", "destination", "none"])
def test_ids_on_either_side_and_where_they_start(by_id: str, id_dtype: torch.dtype, kernel: str) -> None:
    rng = fresh_generator()
    spec = KVSpec.mla(2, 4, 24)
    src, dst = ready_memory("sglang.layer_first", spec, 9, rng), page_first_memory(spec, 9, rng)
    table = make_table(coalesce(spec, Side.of(src.layout), Side.of(dst.layout), Box.whole(spec), order="dst"), src, dst)
    count, src_first, dst_first = 3, 2, 5
    src_ids = random_ids(rng, 9, 9) if by_id in ("both", "source") else None
    dst_ids = random_ids(rng, 9, 9) if by_id in ("both", "destination") else None
    digests = torch.zeros(count, spec.num_layers, dtype=torch.int64, device=DEVICE)
    a = None if src_ids is None else on_device(src_ids, id_dtype)
    b = None if dst_ids is None else on_device(dst_ids, id_dtype)
    if kernel == "relayout":
        relayout(table, count, src_ids=a, dst_ids=b, src_first=src_first, dst_first=dst_first, digests=digests)
    else:
        flags = torch.zeros(spec.num_layers, dtype=torch.int32, device=DEVICE)
        mapped_copy(
            table, count, flags, CTAS, src_ids=a, dst_ids=b, src_first=src_first, dst_first=dst_first, digests=digests
        )
    source = (np.arange(9) if src_ids is None else src_ids)[src_first : src_first + count]
    target = (np.arange(9) if dst_ids is None else dst_ids)[dst_first : dst_first + count]
    wanted = dst.original_pages()
    wanted[target] = src.original_pages()[source]
    dst.expect_pages(wanted)
    src.expect_untouched()
    np.testing.assert_array_equal(as_unsigned(digests), page_digests(src.original_pages()[source], spec))


BOXES = [
    (HYBRID, Box(0, 3, 0, 8)),
    (HYBRID, Box(1, 3, 0, 8)),
    (HYBRID, Box(0, 1, 0, 4)),
    (HYBRID, Box(0, 1, 4, 8)),
    (HYBRID, Box(2, 3, 4, 8)),
    (KVSpec.attention(3, 16, 2, 8, 1), Box(1, 3, 8, 16)),
    (KVSpec.attention(3, 16, 2, 8, 1), Box(2, 3, 3, 5)),
]


@pytest.mark.parametrize("into_ring", [True, False], ids=["pool to ring", "ring to pool"])
@pytest.mark.parametrize(("spec", "box"), BOXES)
def test_boxes_through_a_packed_ring(spec: KVSpec, box: Box, into_ring: bool) -> None:
    """A slot of a staging ring: its base is a shift at launch, its pages lie back to back."""
    rng = fresh_generator()
    nbytes = box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
    pool, ring = ready_memory("sglang.layer_first", spec, 5, rng), Guarded(4 * nbytes, rng)
    pages, columns = random_ids(rng, 4, 5), box_columns(spec, box)
    packed = Side.packed(spec, box, 0, nbytes)
    digests = torch.zeros(4, spec.num_layers, dtype=torch.int64, device=DEVICE)
    base, ids = ring.inner.data_ptr(), on_device(pages)
    bases = addresses_of(pool.tensors)
    if into_ring:
        geometry = coalesce(spec, Side.of(pool.layout), packed, box, order="dst")
        table = build_table(geometry, spec, bases, [0], DEVICE, TILES["relayout"], WARPS)
        relayout(table, 4, src_ids=ids, dst_shift=base, digests=digests)
        held: Bytes = pool.original_pages()[pages][:, columns]
        ring.expect(held.reshape(-1))
        pool.expect_untouched()
    else:
        geometry = coalesce(spec, packed, Side.of(pool.layout), box, order="src")
        table = build_table(geometry, spec, [0], bases, DEVICE, TILES["relayout"], WARPS)
        relayout(table, 4, dst_ids=ids, src_shift=base, digests=digests)
        held = ring.before().reshape(4, nbytes)
        wanted = pool.original_pages()
        wanted[pages[:, None], columns] = held
        pool.expect_pages(wanted)
        ring.expect()
    np.testing.assert_array_equal(as_unsigned(digests), box_digests(held, spec, box))


@pytest.mark.parametrize("kernel", KERNELS)
def test_boxes_of_a_page_make_the_page_and_its_digest(kernel: str) -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(HYBRID, 3, rng), ready_memory("transformers", HYBRID, 4, rng)
    src_ids, dst_ids = random_ids(rng, 2, 3), random_ids(rng, 2, 4)
    total = np.zeros((2, HYBRID.num_layers), dtype=np.uint64)
    for box in (Box(0, 1, 0, 4), Box(0, 1, 4, 8), Box(1, 3, 0, 4), Box(2, 3, 4, 8)):
        geometry = coalesce(HYBRID, Side.of(src.layout), Side.of(dst.layout), box, order="src")
        digests = run_kernel(kernel, geometry, HYBRID, src.tensors, dst.tensors, src_ids, dst_ids)
        total += 0 if digests is None else digests
    content, wanted = src.original_pages(), dst.original_pages()
    wanted[dst_ids] = content[src_ids]
    dst.expect_pages(wanted)
    src.expect_untouched()
    if kernel != "reference":
        np.testing.assert_array_equal(total, page_digests(content[src_ids], HYBRID))


@pytest.mark.parametrize("status", [0, 1, 2, -1])
def test_a_closed_gate_writes_nothing(status: int) -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 3, rng), ready_memory("vllm.BHLNC", SPEC, 3, rng)
    table = make_table(coalesce(SPEC, Side.of(src.layout), Side.of(dst.layout), Box.whole(SPEC), order="src"), src, dst)
    digests = torch.full((3, SPEC.num_layers), 9, dtype=torch.int64, device=DEVICE)
    relayout(table, 3, status=torch.tensor([status], dtype=torch.int32, device=DEVICE), digests=digests)
    if status:
        dst.expect_untouched()
        assert (digests == 9).all()
    else:
        dst.expect_pages(src.original_pages())
        np.testing.assert_array_equal(as_unsigned(digests), page_digests(src.original_pages(), SPEC) + np.uint64(9))


# -- heads of another TP size ---------------------------------------------------------------------

SIZES = (1, 2, 4, 8)


def reshard(kernel: str, heads: int, writers: int, readers: int, gap: int) -> None:
    """Ranks of one TP size store into page-first slots; ranks of another load from them."""
    rng = fresh_generator()
    spec = KVSpec(2, ((Component("k", heads, 6), Component("latent", 1, 5)), (Component("v", heads, 4),)))
    store = page_first_memory(spec, 3, rng, stride=spec.page_bytes + gap)
    whole = store.original_pages()
    slots = random_ids(rng, 2, 3)
    content = rng.integers(0, 256, (2, spec.page_bytes), dtype=np.uint8)
    for rank in range(writers):
        share = spec.select_heads(rank, writers)
        pool = ready_memory("sglang.layer_first", share, 3, rng)
        pages, columns = random_ids(rng, 2, 3), head_columns(spec, rank, writers)
        held = pool.original_pages()
        held[pages] = content[:, columns]
        pool.fill(held)
        target = Side.of(store.layout.select_heads(rank, writers))
        geometry = coalesce(share, Side.of(pool.layout), target, Box.whole(share), order="dst")
        digests = run_kernel(kernel, geometry, share, pool.tensors, store.tensors, pages, slots)
        whole[slots[:, None], columns] = content[:, columns]
        store.expect_pages(whole)
        pool.expect_untouched()
        if digests is not None:
            np.testing.assert_array_equal(digests, page_digests(held[pages], share))
    np.testing.assert_array_equal(whole[slots], content)
    store.fill(whole)
    for rank in range(readers):
        share = spec.select_heads(rank, readers)
        pool = ready_memory("transformers", share, 3, rng)
        pages = random_ids(rng, 2, 3)
        source = Side.of(store.layout.select_heads(rank, readers))
        geometry = coalesce(share, source, Side.of(pool.layout), Box.whole(share), order="src")
        run_kernel(kernel, geometry, share, store.tensors, pool.tensors, slots, pages)
        wanted = pool.original_pages()
        wanted[pages] = content[:, head_columns(spec, rank, readers)]
        pool.expect_pages(wanted)
        store.expect_untouched()


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("gap", [0, 32], ids=["packed", "padded pages"])
def test_heads_go_to_ranks_of_another_tp_size(heads: int, gap: int) -> None:
    for writers, readers in itertools.product(SIZES, SIZES):
        for parts in (writers, readers):
            if heads > 1 and heads % parts:
                with pytest.raises(LayoutError, match=rf"'k': expected heads divisible by {parts}, got {heads}"):
                    reshard("reference", heads, writers, readers, gap)
                break
        else:
            reshard("reference", heads, writers, readers, gap)


@pytest.mark.parametrize("kernel", ON_GPU_ALIKE)
@pytest.mark.parametrize(("heads", "writers", "readers"), [(4, 4, 2), (2, 1, 2), (1, 2, 1)])
def test_heads_go_to_ranks_of_another_tp_size_by_kernel(heads: int, writers: int, readers: int, kernel: str) -> None:
    reshard(kernel, heads, writers, readers, 32)


# -- the launcher and the reference at their edges ------------------------------------------------


def test_a_shift_off_the_alignment_is_refused() -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 2, rng), page_first_memory(SPEC, 2, rng)
    table = make_table(coalesce(SPEC, Side.of(src.layout), Side.of(dst.layout), Box.whole(SPEC), order="src"), src, dst)
    with pytest.raises(
        LayoutError, match=r"shift: expected multiples of 16 bytes, got 0 \(source\), 8 \(destination\)"
    ):
        relayout(table, 1, dst_shift=8)
    dst.expect_untouched()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_pages_at_all(kernel: str) -> None:
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 2, rng), ready_memory("transformers", SPEC, 2, rng)
    check_copy(kernel, src, dst, rng, count=0)


def test_the_reference_refuses_memory_that_ends_too_early() -> None:
    spec = KVSpec.mla(1, 1, 8)
    layout = Layout.page_first(spec, 4)
    geometry = coalesce(spec, Side.of(layout), Side.of(layout), Box.whole(spec), order="src")
    src, short = torch.zeros(32, dtype=torch.uint8), torch.full((24,), 7, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"layer 0, dst: expected at least 32 bytes of memory, got 24"):
        relayout_reference(geometry, [src], [short], torch.tensor([0]), torch.tensor([3]))
    assert short.untyped_storage().nbytes() == 24
    assert (short == 7).all()


def test_the_reference_works_on_views_with_an_offset() -> None:
    rng = fresh_generator()
    for shift in range(9):
        src = page_first_memory(SPEC, 3, rng, misalign=shift)
        check_copy("reference", src, ready_memory("vllm.LBHNC", SPEC, 3, rng), rng)


def test_a_page_of_too_many_words_is_refused() -> None:
    spec = KVSpec.mla(1, 2**20, 8191)
    layout = Layout.page_first(spec, 1)
    geometry = coalesce(spec, Side.of(layout), Side.of(layout), Box.whole(spec), order="src")
    with pytest.raises(LayoutError, match=r"layer 0: expected less than 2\*\*30 words a page and component, got \d+ B"):
        build_table(geometry, spec, [1], [0], DEVICE, 4096, WARPS)


def test_a_box_that_starts_inside_a_digest_word_is_refused() -> None:
    spec = KVSpec.mla(1, 4, 13)
    layout = Layout.page_first(spec, 1)
    geometry = coalesce(spec, Side.of(layout), Side.of(layout), Box(0, 1, 1, 4), order="src")
    with pytest.raises(LayoutError, match=r"expected a box that starts on a multiple of 8 bytes of 'latent', got 13"):
        build_table(geometry, spec, [0], [0], DEVICE, 4096, WARPS)


@pytest.mark.parametrize(
    ("unit_bytes", "alignment", "expected"),
    [
        (32768, 16, Tile(1, 2048, 8, 2, 8)),  # a page larger than a tile
        (2048, 16, Tile(8, 256, 8, 2, 8)),
        (656, 8, Tile(16, 128, 8, 1, 8)),  # 82 words
        (8, 8, Tile(256, 8, 8, 1, 8)),
        (13, 1, Tile(128, 16, 1, 1, 8)),
        (12, 4, Tile(256, 8, 4, 1, 8)),
    ],
)
def test_choose_tile(unit_bytes: int, alignment: int, expected: Tile) -> None:
    assert choose_tile(unit_bytes, alignment, 16384, 8) == expected


def test_relayout_grid_fills_the_card_and_never_has_idle_programs() -> None:
    assert relayout_grid(1000, 64) == (9, 64)
    assert relayout_grid(3, 64) == (3, 64)
    assert relayout_grid(10**6, 1) == (RELAYOUT_PROGRAMS, 1)
    assert relayout_grid(10**6, 1000) == (2, 1000)
    assert relayout_grid(0, 4) == (1, 4)


# -- offsets past 2**31 ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Far:
    """A buffer of more than 2 GiB, of which a few places are touched. ``places[page]``: (address, bytes) of its runs in
    page-first order, counted here and not by the layout.
    """

    spec: KVSpec
    layout: Layout
    places: dict[int, list[tuple[int, int]]]


def far_page_576() -> Far:
    spec = KVSpec.mla(1, 1, 576)
    pages = (4_000_000, 3_728_270, 0)  # the second lies across 2**31
    return Far(spec, Layout.page_first(spec, 4_000_001), {p: [(p * 576, 576)] for p in pages})


def far_page_61440() -> Far:
    spec = KVSpec.mla(2, 16, 1920)
    pages = (70_000, 34_952, 69_905)  # the others lie across 2**31 and 2**32
    return Far(spec, Layout.page_first(spec, 70_001), {p: [(p * 61440, 61440)] for p in pages})


def far_axis(word: str) -> Far:
    """Five layers, components, tokens or heads that lie 576,000,000 bytes apart; the last starts at 2,304,000,000."""
    count, pages, row = 5, 1_000_000, 576
    spec = {
        "layer": KVSpec.mla(count, 1, row),
        "kv": KVSpec(1, (tuple(Component(name, 1, row) for name in "abcde"),)),
        "token": KVSpec.mla(1, count, row),
        "head": KVSpec(1, ((Component("k", count, row),),)),
    }[word]
    tensor = torch.empty(count, pages, row, dtype=torch.uint8, device="meta")
    layout = Layout.from_tensors(spec, [tensor], f"{word} page dim")
    runs = {p: [(i * pages * row + p * row, row) for i in range(count)] for p in (999_999, 3, 728_272)}
    return Far(spec, layout, runs)


FAR: dict[str, Callable[[], Far]] = {
    "page of 576": far_page_576,
    "page of 61440": far_page_61440,
    **{word: partial(far_axis, word) for word in ("layer", "kv", "token", "head")},
}
BLOCK = 4096


class Sparse:
    """The touched 4,096-byte blocks of a `Far` buffer, each with random bytes, and what they must hold in the end.

    memory  starts at an odd address: the kernels then count in bytes, and 2**31 of them are passed.
    """

    def __init__(self, far: Far, rng: np.random.Generator) -> None:
        self.memory = torch.empty(far.layout.buffer_bytes[0] + BLOCK + 1, dtype=torch.uint8, device=DEVICE)[1:]
        runs = [run for places in far.places.values() for run in places]
        runs += [(at % 2**32, nbytes) for at, nbytes in runs]  # where 32 bits would take them
        blocks = {b for at, nbytes in runs for b in range(at // BLOCK, (at + nbytes - 1) // BLOCK + 1)}
        self.wanted = {b: rng.integers(0, 256, BLOCK, dtype=np.uint8) for b in sorted(blocks)}
        for b, data in self.wanted.items():
            self.memory[b * BLOCK : (b + 1) * BLOCK].copy_(torch.from_numpy(data))

    def read(self, runs: list[tuple[int, int]]) -> Bytes:
        return np.concatenate([self._window(at, nbytes) for at, nbytes in runs])

    def _window(self, at: int, nbytes: int) -> Bytes:
        first, last = at // BLOCK, (at + nbytes - 1) // BLOCK
        data = np.concatenate([self.wanted[b] for b in range(first, last + 1)])
        return data[at - first * BLOCK :][:nbytes]

    def write(self, runs: list[tuple[int, int]], data: Bytes) -> None:
        address = np.concatenate([np.arange(at, at + nbytes) for at, nbytes in runs])
        for b in np.unique(address // BLOCK).tolist():
            mine = address // BLOCK == b
            self.wanted[b][address[mine] % BLOCK] = data[mine]

    def expect(self) -> None:
        for b, data in self.wanted.items():
            got = self.memory[b * BLOCK : (b + 1) * BLOCK].cpu().numpy()
            np.testing.assert_array_equal(got, data, err_msg=f"block at {b * BLOCK}")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("index", sorted(FAR))
def test_offsets_past_31_and_32_bits(index: str, side: str, kernel: str) -> None:
    """The far side has more than 2 GiB of address space; only the pages that are used come into being."""
    rng = fresh_generator()
    far = FAR[index]()
    pages = np.array(list(far.places))
    sparse, near = Sparse(far, rng), page_first_memory(far.spec, 4, rng)
    slots = random_ids(rng, len(pages), 4)
    tile_bytes = 65536  # few tiles, for the interpreter's sake
    if side == "source":
        geometry = coalesce(far.spec, Side.of(far.layout), Side.of(near.layout), Box.whole(far.spec), order="dst")
        digests = run_kernel(
            kernel,
            geometry,
            far.spec,
            [sparse.memory],
            near.tensors,
            pages,
            slots,
            tile_bytes=tile_bytes,
            id_dtype=torch.int32,
        )
        content, wanted = np.stack([sparse.read(far.places[p]) for p in far.places]), near.original_pages()
        wanted[slots] = content
        near.expect_pages(wanted)
    else:
        geometry = coalesce(far.spec, Side.of(near.layout), Side.of(far.layout), Box.whole(far.spec), order="src")
        digests = run_kernel(
            kernel, geometry, far.spec, near.tensors, [sparse.memory], slots, pages, tile_bytes=tile_bytes
        )
        content = near.original_pages()[slots]
        for page, data in zip(far.places, content, strict=True):
            sparse.write(far.places[page], data)
        near.expect_untouched()
    sparse.expect()
    if digests is not None:
        np.testing.assert_array_equal(digests, page_digests(content, far.spec))


@triton.jit  # type: ignore[untyped-decorator]
def probe_lanes(  # type: ignore[no-untyped-def]
    row, lane, src, dst, LOOPS: tl.constexpr, EXTENTS: tl.constexpr, PIECE: tl.constexpr, SCALE: tl.constexpr
):
    """The shipped offsets of one lane."""
    at_src, at_dst = lane_offsets(row, tl.load(lane), LOOPS, EXTENTS, PIECE, SCALE)
    tl.store(src, at_src)
    tl.store(dst, at_dst)


@triton.jit
def naive_product(index, stride, out):  # type: ignore[no-untyped-def]
    """What it must not be: 32 bits times 32 bits."""
    tl.store(out, (tl.load(index) * tl.load(stride)).to(tl.int64))


def one(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("known", [True, False], ids=["extents-known", "extents-loaded"])
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("word", ["token", "head"])
def test_the_offset_of_one_lane(word: str, side: str, known: bool) -> None:
    """The last token or head lies at 4 x 576,000,000 bytes: counted in words of 8 bytes, and of single bytes."""
    far = far_axis(word)
    near = Layout.page_first(far.spec, 1)
    src, dst = (far.layout, near) if side == "source" else (near, far.layout)
    geometry = coalesce(far.spec, Side.of(src), Side.of(dst), Box.whole(far.spec), order="dst")
    for bases, word_bytes in (([0], 8), ([1], 1)):
        table = build_table(geometry, far.spec, bases, [0], DEVICE, 4096, WARPS)
        assert table.tile.word_bytes == word_bytes and len(table.extents) == table.loops
        lane = 4 * 576 // word_bytes + 5
        out = {"source": one(0, torch.int64), "destination": one(0, torch.int64)}
        probe_lanes[(1,)](
            table.rows[0],
            one(lane),
            out["source"],
            out["destination"],
            table.loops,
            table.extents if known else (),
            table.piece_words,
            table.tile.scale,
        )
        other = "destination" if side == "source" else "source"
        assert int(out[side]) == 2_304_000_000 // word_bytes + 5
        assert int(out[other]) == lane


def test_a_naive_product_wraps() -> None:
    """So a buffer this large tells 32 bits from 64, under the interpreter too."""
    for index, stride, right in ((4_000_000, 576, 2_304_000_000), (70_000, 61_440, 4_300_800_000)):
        out = one(0, torch.int64)
        naive_product[(1,)](one(index), one(stride), out)
        assert int(out) == (right + 2**31) % 2**32 - 2**31
        assert int(out) != right
