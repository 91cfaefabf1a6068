"""coalesce: the pieces of well-known pairs, and for random pairs of layouts exactly the naive byte map."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    Memory,
    Numbers,
    Plan,
    box_columns,
    check_copy,
    declare,
    page_first_memory,
    ready_memory,
    starts_in_page,
)

from kvtransfer.kernels.coalesce import Box, Entry, Geometry, Side, coalesce, require_same_content
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import Layout, Part, box_bytes
from kvtransfer.kernels.spec import Component, KVSpec

# 32 layers, 8 heads of 128 bf16 elements: 2,048 B of K or V a token
SPEC = KVSpec.attention(32, 16, kv_heads=8, head_dim=128, itemsize=2)
WHOLE = Box.whole(SPEC)


def geometry(src: Layout, dst: Layout, box: Box | None = None, order: str = "dst") -> Geometry:
    box = box or Box.whole(src.spec)
    return coalesce(src.spec, Side.of(src), Side.of(dst), box, order=order)


PIECES = {  # against page-first: (smallest piece in bytes, pieces a page)
    "page_first": (32768, 64),
    "sglang.layer_first": (32768, 64),  # a page of K of a layer
    "sglang.layer_first_host": (32768, 64),
    "sglang.page_first": (2048, 1024),  # a token of a layer
    "sglang.page_first_direct": (32768, 64),
    "sglang.page_head": (256, 8192),  # a head of a token of a layer
    "sglang.page_unified": (256, 8192),
    "vllm.LBNHC": (256, 8192),  # K beside V: a head of a token
    "vllm.LBHNC": (256, 8192),
    "vllm.BLNHC": (256, 8192),
    "transformers": (256, 8192),
}


@pytest.mark.parametrize("name", sorted(PIECES))
@pytest.mark.parametrize("order", ["src", "dst"])
def test_pieces_against_page_first(name: str, order: str) -> None:
    g = geometry(Layout.named(name, SPEC, 4), Layout.page_first(SPEC, 9), order=order)
    assert (g.piece_bytes, g.pieces_a_page) == PIECES[name]
    assert g.page_bytes == SPEC.page_bytes
    assert g.alignment == 16


def test_pieces_of_latents() -> None:
    spec = KVSpec.mla(4, 64, 656)
    g = geometry(Layout.named("vllm.MLA", spec, 4), Layout.page_first(spec, 4))
    assert (g.piece_bytes, g.pieces_a_page) == (64 * 656, 4)
    g = geometry(Layout.named("sglang.page_first", spec, 4), Layout.page_first(spec, 4))
    assert (g.piece_bytes, g.pieces_a_page) == (656, 256)


def test_layouts_that_nest_alike_keep_their_runs() -> None:
    a, b = Layout.named("vllm.LBHNC", SPEC, 4), Layout.named("vllm.BLHNC", SPEC, 4)
    assert (geometry(a, b).piece_bytes, geometry(a, b).pieces_a_page) == (256, 8192)  # K is between V and V
    heads = Layout.named("transformers", SPEC, 4)
    other = Layout.named("transformers", SPEC, 7)
    assert geometry(heads, other).piece_bytes == 16 * 256  # a head of a page


def test_page_first_on_both_sides_is_one_run() -> None:
    src, dst = Layout.page_first(SPEC, 4), Layout.page_first(SPEC, 9, SPEC.page_bytes + 4096)
    (only,) = geometry(src, dst).merged
    assert only.piece_bytes == SPEC.page_bytes
    assert (only.loops, only.src_offset, only.dst_offset) == ((), 0, 0)
    assert (only.src_page_stride, only.dst_page_stride) == (SPEC.page_bytes, SPEC.page_bytes + 4096)


def test_merged_joins_only_what_continues_on_both_sides() -> None:
    # Layers of K follow each other; in page-first V is between them.
    pool = Layout.named("sglang.page_first_direct", SPEC, 4)
    assert len(geometry(pool, Layout.page_first(SPEC, 4)).merged) == 64
    mla = KVSpec.mla(6, 4, 576)
    g = geometry(Layout.named("vllm.BLNHC", mla, 4), Layout.page_first(mla, 4))
    assert [e.piece_bytes for e in g.merged] == [6 * 4 * 576]
    layer_first = geometry(Layout.named("vllm.LBNHC", mla, 4), Layout.page_first(mla, 4))
    assert len(layer_first.merged) == 6
    strided = geometry(Layout.named("sglang.page_first", mla, 4), Layout.page_first(mla, 4))
    assert strided.merged == strided.entries  # entries with loops stay


@pytest.mark.parametrize("width", [2048, 1024, 8, 12, 2, 13])
def test_alignment_is_the_widest_that_divides_all(width: int) -> None:
    spec = KVSpec.mla(3, 5, width)
    g = geometry(Layout.named("sglang.page_first", spec, 4), Layout.page_first(spec, 4))
    assert g.alignment == math.gcd(width, 16)


# -- expanding the loops gives the byte map ---------------------------------------------------------


def visited(entry: Entry) -> tuple[Numbers, Numbers]:
    """(source, destination) addresses of page 0 in the order of the loops."""
    src, dst = np.array([entry.src_offset]), np.array([entry.dst_offset])
    for extent, s, d in (*entry.loops, (entry.piece_bytes, 1, 1)):
        src = (src[:, None] + np.arange(extent) * s).reshape(-1)
        dst = (dst[:, None] + np.arange(extent) * d).reshape(-1)
    return src, dst


def check_geometry(g: Geometry, src: Memory, dst: Memory, order: str) -> None:
    """Each entry visits every byte of its component once, the same byte on both sides, upwards on the ordered side."""
    spec = src.layout.spec
    starts = starts_in_page(spec)
    assert [(e.layer, e.component) for e in g.entries] == [
        (layer, i) for layer, components in enumerate(spec.layers) for i in range(len(components))
    ]
    for e in g.entries:
        c = spec.layers[e.layer][e.component]
        at_src, at_dst = visited(e)
        first = starts[e.layer, c.name]
        for memory, buffer, at, page_stride in (
            (src, e.src_buffer, at_src, e.src_page_stride),
            (dst, e.dst_buffer, at_dst, e.dst_page_stride),
        ):
            for page in range(memory.layout.num_pages):
                assert (memory.pages[buffer][at + page * page_stride] == page).all()
        src_bytes, dst_bytes = src.offsets[e.src_buffer][at_src], dst.offsets[e.dst_buffer][at_dst]
        np.testing.assert_array_equal(src_bytes, dst_bytes)
        np.testing.assert_array_equal(np.sort(src_bytes), np.arange(first, first + c.page_bytes(spec.page_size)))
        upwards = at_src if order == "src" else at_dst
        assert (np.diff(upwards) > 0).all()
        # nothing that continues on both sides is left apart
        loops = (*e.loops, (e.piece_bytes, 1, 1)) if e.piece_bytes > 1 else e.loops
        for (_, s, d), (extent, s_in, d_in) in itertools.pairwise(loops):
            assert (s, d) != (extent * s_in, extent * d_in)


def factors(n: int) -> list[tuple[int, ...]]:
    return [(a, n // a) for a in range(2, n) if n % a == 0]


@st.composite
def plans(draw: st.DrawFn, spec: KVSpec, num_pages: int, element: int) -> list[Plan]:
    """Tensors for a spec with axes in any order, split, grouped and padded."""
    dtype = {1: torch.uint8, 2: torch.bfloat16}[element]
    out: list[Plan] = []
    one_tensor = draw(st.booleans())
    layer_sets = [list(range(spec.num_layers))] if one_tensor else [[layer] for layer in range(spec.num_layers)]
    for layers in layer_sets:
        components = spec.layers[layers[0]]
        widths = {c.head_bytes for c in components}
        form = draw(st.sampled_from(["kv", "fused", "apart"] if len(widths) == 1 else ["fused", "apart"]))
        for chosen in [[c] for c in components] if form == "apart" else [list(components)]:
            sizes: dict[str, list[int]] = {"page": [num_pages], "token": [spec.page_size], "head": [chosen[0].heads]}
            total = chosen[0].head_bytes if form == "kv" else sum(c.head_bytes for c in chosen)
            sizes["dim"] = [total // element]
            if len(layers) > 1 or draw(st.booleans()):
                sizes["layer"] = [len(layers)]
            if form == "kv":
                sizes["kv"] = [len(chosen)]
            for word in ("token", "head"):
                whole = (sizes[word][0],)
                sizes[word] = list(draw(st.sampled_from([whole, whole, *factors(sizes[word][0])])))
            words = draw(st.permutations([word for word, extents in sizes.items() for _ in extents]))
            groups: list[list[str]] = []
            for word in words:
                free = len(sizes[word]) == 1  # a part of a split stands alone: its extent shows there only
                if groups and free and len(sizes[groups[-1][-1]]) == 1 and draw(st.integers(0, 3)) == 0:
                    groups[-1].append(word)
                else:
                    groups.append([word])
            axes = " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)
            pad = [draw(st.integers(0, 2)) if draw(st.booleans()) else 0 for _ in groups]
            out.append(Plan(axes, dict(sizes), [c.name for c in chosen], layers, dtype, pad))
    return out


@st.composite
def specs(draw: st.DrawFn) -> tuple[KVSpec, int]:
    """(spec, bytes of an element that divide its widths)."""
    element = draw(st.sampled_from([1, 2]))
    heads, tokens = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3, 4, 6]))
    widths = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=2))
    components = [Component("kv"[i], heads, width * element) for i, width in enumerate(widths)]
    return KVSpec.uniform(draw(st.integers(1, 2)), tokens, components), element


@given(data=st.data(), spec_element=specs(), order=st.sampled_from(["src", "dst"]))
@settings(deadline=None, max_examples=150)
def test_random_pairs_of_layouts(data: st.DataObject, spec_element: tuple[KVSpec, int], order: str) -> None:
    spec, element = spec_element
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    src = declare(spec, data.draw(plans(spec, 3, element)), rng)
    dst = declare(spec, data.draw(plans(spec, 2, element)), rng)
    try:
        g = coalesce(spec, Side.of(src.layout), Side.of(dst.layout), Box.whole(spec), order=order)
    except LayoutError as error:
        assert "expected splits of an axis that nest" in str(error)
        assume(False)
    check_geometry(g, src, dst, order)
    check_copy("reference", src, dst, rng, order=order)


@given(data=st.data(), spec_element=specs(), gap=st.sampled_from([0, 16]))
@settings(deadline=None, max_examples=100)
def test_random_layouts_against_page_first(data: st.DataObject, spec_element: tuple[KVSpec, int], gap: int) -> None:
    """Never refused, and in canonical order on the page-first side, which digests rest on."""
    spec, element = spec_element
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    pool = declare(spec, data.draw(plans(spec, 3, element)), rng)
    store = page_first_memory(spec, 4, rng, stride=spec.page_bytes + gap)
    check_geometry(geometry(pool.layout, store.layout), pool, store, "dst")
    check_geometry(geometry(store.layout, pool.layout, order="src"), store, pool, "src")
    for e in geometry(pool.layout, store.layout).entries:
        _, at = visited(e)
        np.testing.assert_array_equal(at, np.arange(e.dst_offset, e.dst_offset + e.unit_bytes))


# -- boxes ----------------------------------------------------------------------------------------

HYBRID = KVSpec(
    6,
    (
        (Component("k", 2, 6), Component("v", 2, 10)),
        (Component("state", 1, 21, per_page=True), Component("latent", 1, 13)),
        (Component("latent", 1, 13), Component("scale", 1, 4)),
    ),
)


@pytest.mark.parametrize("layers", [(0, 3), (1, 2), (0, 2), (2, 3)])
@pytest.mark.parametrize("tokens", [(0, 6), (0, 2), (2, 6), (3, 4)])
@pytest.mark.parametrize("name", ["page_first", "sglang.layer_first", "transformers"])
def test_boxes_against_a_packed_ring(name: str, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
    box = Box(*layers, *tokens)
    memory = ready_memory(name, HYBRID, 3, np.random.default_rng(0))
    nbytes = box_bytes(HYBRID, *layers, *tokens)
    ring = Side.packed(HYBRID, box, 5, nbytes)
    columns = box_columns(HYBRID, box)
    for src, dst, order in ((Side.of(memory.layout), ring, "dst"), (ring, Side.of(memory.layout), "src")):
        g = coalesce(HYBRID, src, dst, box, order=order)
        assert g.page_bytes == nbytes
        seen = []
        for e in g.entries:
            at_src, at_dst = visited(e)
            pool, packed, buffer = (at_src, at_dst, e.src_buffer) if order == "dst" else (at_dst, at_src, e.dst_buffer)
            assert (memory.pages[buffer][pool] == 0).all()
            np.testing.assert_array_equal(memory.offsets[buffer][pool], columns[packed])
            seen.append(packed)
        np.testing.assert_array_equal(np.concatenate(seen), np.arange(nbytes))


def test_boxes_cut_kernel_blocks_where_they_can() -> None:
    """Pages of 64 tokens in kernel blocks of 16: whole blocks, or a part of one."""
    spec = KVSpec.attention(1, 64, kv_heads=2, head_dim=8, itemsize=1)
    tensor = torch.empty(4 * 3, 2, 16, 16, dtype=torch.uint8)
    layout = Layout.from_tensors(spec, [tensor], "(page token) head token dim")
    for start, stop in ((0, 64), (16, 48), (48, 64), (4, 12), (16, 24)):
        box = Box(0, 1, start, stop)
        packed = Side.packed(spec, box, 3, box_bytes(spec, 0, 1, start, stop))
        assert coalesce(spec, Side.of(layout), packed, box, order="dst").page_bytes == (stop - start) * 32
    with pytest.raises(LayoutError, match=r"'k': tokens: expected a slice along the declared split .*, got 8:24"):
        coalesce(spec, Side.of(layout), packed, Box(0, 1, 8, 24), order="dst")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (Box(0, 33, 0, 16), "box: expected layers within 0:32, got 0:33"),
        (Box(-1, 2, 0, 16), "box: expected layers within 0:32, got -1:2"),
        (Box(3, 3, 0, 16), "box: expected layers within 0:32, got 3:3"),
        (Box(0, 1, 0, 17), "box: expected tokens within 0:16, got 0:17"),
        (Box(0, 1, 4, 4), "box: expected tokens within 0:16, got 4:4"),
    ],
)
def test_boxes_outside_the_spec_are_refused(box: Box, message: str) -> None:
    layout = Layout.page_first(SPEC, 1)
    with pytest.raises(LayoutError) as error:
        geometry(layout, layout, box)
    assert message in str(error.value)


def test_a_box_that_holds_nothing_is_refused() -> None:
    layout = Layout.page_first(KVSpec(4, ((Component("state", 1, 8, per_page=True),),)), 2)
    assert geometry(layout, layout, Box(0, 1, 0, 4)).page_bytes == 8
    with pytest.raises(LayoutError, match=r"box: expected something to copy, got Box\(.*token_start=1, token_stop=2\)"):
        geometry(layout, layout, Box(0, 1, 1, 2))


def test_splits_that_do_not_nest_are_refused() -> None:
    spec = KVSpec.mla(1, 6, 4)

    def split(outer: int) -> Layout:
        tensor = torch.empty(outer, 2, 6 // outer, 4, dtype=torch.uint8)
        return Layout.from_parts(spec, [Part(tensor, "token page token dim", ("latent",), (0,))])

    with pytest.raises(LayoutError, match=r"layer 0 'latent': expected splits of an axis that nest, got .* and .*"):
        geometry(split(2), split(3))
    assert geometry(split(2), split(2)).piece_bytes == 12


def test_axes_of_different_length_are_refused() -> None:
    layout = Layout.page_first(KVSpec.attention(1, 2, kv_heads=4, head_dim=8, itemsize=1), 2)
    with pytest.raises(LayoutError, match=r"layer 0 'k': expected axes of one length, got .* and .*"):
        geometry(layout, layout.select_heads(0, 2))


def test_sides_with_other_contents_are_refused() -> None:
    require_same_content(SPEC, KVSpec.attention(32, 16, kv_heads=8, head_dim=128, itemsize=2))
    with pytest.raises(LayoutError, match=r"expected both sides to hold the same spec, got page=16;.* and page=4;"):
        require_same_content(SPEC, KVSpec.mla(1, 4, 8))
