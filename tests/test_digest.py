"""The digest: its definition in plain integers, the same value on both sides, boxes add up, changes show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_helpers import (
    DEVICE,
    Bytes,
    Memory,
    as_unsigned,
    box_columns,
    fresh_generator,
    make_table,
    on_device,
    page_first_memory,
    ready_memory,
)

from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.digest import box_digests, first_word, page_digests
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.relayout import relayout
from kvtransfer.kernels.spec import Component, KVSpec

MASK = 2**64 - 1
GOLDEN = 0x3F015BEA539F897B

ODD = KVSpec(
    3,
    (
        (Component("k", 2, 13), Component("v", 2, 7)),
        (Component("state", 1, 29, per_page=True),),
        (Component("latent", 1, 576), Component("scale", 1, 4)),
    ),
)


def digest_by_hand(page: bytes, spec: KVSpec) -> list[int]:
    """The definition in the module's docstring, in Python integers."""
    out, at = [], 0
    for components in spec.layers:
        total = 0
        for c, component in enumerate(components):
            nbytes = (1 if component.per_page else spec.page_size) * component.heads * component.head_bytes
            data = page[at : at + nbytes] + bytes(-nbytes % 8)
            at += nbytes
            for i in range(len(data) // 8):
                x = int.from_bytes(data[8 * i : 8 * i + 8], "little")
                x ^= ((c * 2**40 + i + 1) * 0x9E3779B97F4A7C15) & MASK
                x = ((x ^ (x >> 32)) * 0xBF58476D1CE4E5B9) & MASK
                x = ((x ^ (x >> 29)) * 0x94D049BB133111EB) & MASK
                total += x ^ (x >> 32)
        out.append(total & MASK)
    return out


def on_the_device(memory: Memory, tile_bytes: int = 4096) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Digests of all pages by the shipped kernel, which writes nothing (``store=False``)."""
    spec, pages = memory.layout.spec, memory.layout.num_pages
    away = page_first_memory(spec, pages, np.random.default_rng(0))
    geometry = coalesce(spec, Side.of(memory.layout), Side.of(away.layout), Box.whole(spec), order="dst")
    digests = torch.zeros(pages, spec.num_layers, dtype=torch.int64, device=DEVICE)
    relayout(make_table(geometry, memory, away, tile_bytes), pages, digests=digests, store=False)
    away.expect_untouched()
    memory.expect_untouched()
    return as_unsigned(digests)


def test_reference_is_the_definition() -> None:
    pages = fresh_generator().integers(0, 256, (4, ODD.page_bytes), dtype=np.uint8)
    assert page_digests(pages, ODD).tolist() == [digest_by_hand(p.tobytes(), ODD) for p in pages]


def test_golden_value() -> None:
    """The format of stored records rests on it: it must never change."""
    spec = KVSpec(2, ((Component("k", 1, 8), Component("v", 1, 3)),))
    pages = np.arange(spec.page_bytes, dtype=np.uint8)[None]
    assert page_digests(pages, spec).tolist() == [[GOLDEN]]
    assert digest_by_hand(pages.tobytes(), spec) == [GOLDEN]


@pytest.mark.parametrize("misalign", [0, 8, 4, 2, 1])
def test_kernel_gives_the_same_value_in_words_of_every_width(misalign: int) -> None:
    """Over several tiles a page, and several pages a tile."""
    rng = fresh_generator()
    spec = KVSpec.uniform(1, 3, [Component("k", 2, 24), Component("v", 1, 32)])
    memory = page_first_memory(spec, 3, rng, misalign=misalign)
    np.testing.assert_array_equal(on_the_device(memory, 256), page_digests(memory.original_pages(), spec))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 12, 13, 31])
def test_kernel_pads_odd_widths_as_the_reference_does(width: int) -> None:
    rng = fresh_generator()
    spec = KVSpec.uniform(2, 3, [Component("k", 1, width), Component("v", 3, width)])
    memory = page_first_memory(spec, 4, rng)
    np.testing.assert_array_equal(on_the_device(memory), page_digests(memory.original_pages(), spec))


@pytest.mark.parametrize("name", ["sglang.layer_first", "transformers"])
def test_kernel_digests_a_hybrid_page_in_any_layout(name: str) -> None:
    memory = ready_memory(name, ODD, 3, fresh_generator())
    np.testing.assert_array_equal(on_the_device(memory), page_digests(memory.original_pages(), ODD))


def test_boxes_add_up_to_the_page() -> None:
    rng = fresh_generator()
    spec = KVSpec(
        12,
        (
            (Component("k", 2, 12), Component("v", 1, 6)),
            (Component("state", 1, 29, per_page=True), Component("latent", 1, 10)),
        ),
    )
    pages = rng.integers(0, 256, (3, spec.page_bytes), dtype=np.uint8)
    for cuts in ([0, 12], [0, 4, 12], [0, 4, 8, 12]):
        total = np.zeros((3, 2), dtype=np.uint64)
        for layer in range(2):
            for start, stop in itertools.pairwise(cuts):
                box = Box(layer, layer + 1, start, stop)
                total += box_digests(pages[:, box_columns(spec, box)], spec, box)
        np.testing.assert_array_equal(total, page_digests(pages, spec))


@pytest.mark.parametrize(("count", "width"), [(3000, 24), (5000, 3), (3, 200_004)])
def test_many_pages_and_large_ones_are_those_of_each_alone(count: int, width: int) -> None:
    rng = fresh_generator()
    spec = KVSpec(1, ((Component("k", 1, width), Component("v", 1, 8)),))
    pages = rng.integers(0, 256, (count, spec.page_bytes), dtype=np.uint8)
    digests = page_digests(pages, spec)
    assert digests.shape == (count, 1)
    for page in {0, 1, count - 1, *rng.integers(0, count, 20).tolist()}:
        np.testing.assert_array_equal(digests[page], page_digests(pages[page : page + 1], spec)[0])
    for page in (0, count - 1) if width < 100 else ():
        assert digests[page].tolist() == digest_by_hand(pages[page].tobytes(), spec)


def test_pages_may_be_a_strided_view() -> None:
    """As a slab hands them out: rows with a trailer between them."""
    rows = fresh_generator().integers(0, 256, (5, ODD.page_bytes + 37), dtype=np.uint8)
    view = rows[::2, 5 : 5 + ODD.page_bytes]
    np.testing.assert_array_equal(page_digests(view, ODD), page_digests(view.copy(), ODD))


def test_box_that_starts_inside_a_word_is_refused() -> None:
    c = Component("k", 1, 6)
    assert [first_word(c, Box(0, 1, start, 8)) for start in (0, 4)] == [0, 3]
    with pytest.raises(LayoutError, match=r"expected a box that starts on a multiple of 8 bytes of 'k', got 6"):
        first_word(c, Box(0, 1, 1, 8))


@pytest.mark.parametrize(
    "pages",
    [np.zeros((2, 7), np.uint8), np.zeros(ODD.page_bytes, np.uint8), np.zeros((1, ODD.page_bytes), np.int8)],
)
def test_wrong_pages_are_refused(pages: Bytes) -> None:
    with pytest.raises(LayoutError, match=rf"expected uint8 \[n, {ODD.page_bytes}\], got (u?int8) \("):
        page_digests(pages, ODD)


SPEC = KVSpec.uniform(2, 4, [Component("k", 2, 16), Component("v", 2, 16)])


def swapped(a: slice, b: slice, page: Bytes) -> Bytes:
    out = page.copy()
    out[a], out[b] = page[b], page[a]
    return out


CHANGES = {
    "two words of a head": (slice(0, 8), slice(8, 16), [0]),
    "two heads": (slice(0, 16), slice(16, 32), [0]),
    "two tokens": (slice(0, 32), slice(32, 64), [0]),
    "distant words": (slice(0, 8), slice(120, 128), [0]),
    "the components": (slice(0, 128), slice(128, 256), [0]),
    "the layers": (slice(0, 256), slice(256, 512), [0, 1]),
    "a word of each layer": (slice(40, 48), slice(296, 304), [0, 1]),
    "two bytes": (slice(3, 4), slice(4, 5), [0]),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_what_is_swapped_shows_in_its_layers_alone(what: str) -> None:
    rng = fresh_generator()
    memory = page_first_memory(SPEC, 1, rng)
    page = rng.permutation(256).astype(np.uint8)  # no two bytes of a layer alike
    page = np.concatenate([page, rng.permutation(page)])
    a, b, layers = CHANGES[what]
    before = page_digests(page[None], SPEC)
    memory.fill(swapped(a, b, page)[None])
    after = on_the_device(memory)
    assert np.flatnonzero(before[0] != after[0]).tolist() == layers
    np.testing.assert_array_equal(after, page_digests(memory.original_pages(), SPEC))


def test_pages_that_changed_places_show() -> None:
    rng = fresh_generator()
    memory = page_first_memory(SPEC, 2, rng)
    before = on_the_device(memory)
    memory.fill(memory.original_pages()[::-1])
    assert (on_the_device(memory) != before).all()


def test_every_single_bit_shows() -> None:
    rng = fresh_generator()
    spec = KVSpec.uniform(1, 1, [Component("k", 1, 13), Component("v", 1, 8)])
    page = rng.integers(0, 256, spec.page_bytes, dtype=np.uint8)
    flipped = np.repeat(page[None], 8 * spec.page_bytes, axis=0)
    for bit in range(8 * spec.page_bytes):
        flipped[bit, bit // 8] ^= np.uint8(1 << bit % 8)
    digests = page_digests(np.concatenate([page[None], flipped]), spec)
    assert len(set(digests[:, 0].tolist())) == 1 + 8 * spec.page_bytes


def test_pages_of_one_value_are_told_apart_by_length_and_position() -> None:
    """Zeros are the common stale content: pages of zeros of other lengths, components or layers must not agree."""
    specs = [KVSpec.mla(1, n, 8) for n in (1, 2, 3)]
    specs.append(KVSpec.uniform(1, 1, [Component("k", 1, 8), Component("v", 1, 8)]))
    digests = [int(page_digests(np.zeros((1, s.page_bytes), np.uint8), s)[0, 0]) for s in specs]
    assert len(set(digests)) == len(digests)


def test_digests_are_added_to_what_is_there() -> None:
    rng = fresh_generator()
    memory, away = page_first_memory(SPEC, 3, rng), page_first_memory(SPEC, 3, rng)
    geometry = coalesce(SPEC, Side.of(memory.layout), Side.of(away.layout), Box.whole(SPEC), order="dst")
    digests = torch.full((2, 2), 5, dtype=torch.int64, device=DEVICE)
    relayout(make_table(geometry, memory, away), 2, src_ids=on_device(np.array([2, 0])), digests=digests)
    expected = page_digests(memory.original_pages()[[2, 0]], SPEC) + np.uint64(5)
    np.testing.assert_array_equal(as_unsigned(digests), expected)
