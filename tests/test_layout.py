"""Layouts say where bytes lie: against a naive model and the engines' own tensors; every refusal with its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    Numbers,
    Plan,
    addresses,
    declare,
    page_first_memory,
    placement_maps,
    ready_memory,
)

from kvtransfer.kernels import names
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import Layout, Part, box_bytes, packed_box, slice_dims
from kvtransfer.kernels.names import READY
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec

RNG = np.random.default_rng(0)  # contents do not matter in this file

L, P, N, H, D = 2, 3, 4, 2, 8
SPEC = KVSpec.attention(L, N, H, D, itemsize=4)
UNEQUAL = KVSpec.attention(L, N, H, 8, itemsize=1, v_head_dim=5)
MLA = KVSpec.mla(L, N, 36)
HYBRID = KVSpec(
    4,
    (
        (Component("k", 2, 6), Component("v", 2, 10)),
        (Component("state", 1, 21, per_page=True), Component("conv", 2, 3, per_page=True)),
        (Component("latent", 1, 13), Component("scale", 1, 4)),
    ),
)


def byte_tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


# -- ready layouts --------------------------------------------------------------------------------


def ready_cases() -> list[tuple[str, KVSpec]]:
    cases = [(name, spec) for name in READY if name != "vllm.MLA" for spec in (SPEC, UNEQUAL, MLA)]
    cases += [("vllm.MLA", MLA)]
    return cases + [(name, HYBRID) for name in ("sglang.layer_first", "transformers", "page_first")]


@pytest.mark.parametrize(("name", "spec"), ready_cases())
@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_ready_layouts_place_every_byte_as_the_model_does(name: str, spec: KVSpec, num_pages: int) -> None:
    memory = ready_memory(name, spec, num_pages, RNG)
    pages, offsets = placement_maps(memory.layout)
    for got, expected in zip(pages + offsets, memory.pages + memory.offsets, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert memory.layout.name == name
    assert sum(memory.layout.buffer_bytes) == num_pages * spec.page_bytes  # packed


def test_page_unified_nests_groups_of_heads() -> None:
    spec = KVSpec.attention(2, 4, kv_heads=6, head_dim=8, itemsize=1)
    layout = Layout.named("sglang.page_unified", spec, 3, head_groups=2)
    nest = "page head layer kv token head dim"  # (pages, groups, L, 2, page, heads of a group, dim)
    sizes = {"page": [3], "head": [2, 3], "layer": [2], "kv": [2], "token": [4], "dim": [8]}
    model = declare(spec, [Plan(nest, sizes, ["k", "v"], [0, 1])], RNG)
    pages, offsets = placement_maps(layout)
    np.testing.assert_array_equal(pages[0], model.pages[0])
    np.testing.assert_array_equal(offsets[0], model.offsets[0])


def test_page_first_leaves_room_after_each_page() -> None:
    memory = page_first_memory(HYBRID, 3, RNG, stride=HYBRID.page_bytes + 16)
    pages, offsets = placement_maps(memory.layout)
    np.testing.assert_array_equal(pages[0], memory.pages[0])
    np.testing.assert_array_equal(offsets[0], memory.offsets[0])


# -- the tensors that engines really have ----------------------------------------------------------


def logical() -> torch.Tensor:
    """int32 [page, layer, k or v, token, head, dim], every element another number."""
    return torch.arange(P * L * 2 * N * H * D, dtype=torch.int32).view(P, L, 2, N, H, D)


Tensors = tuple[list[torch.Tensor], str, dict[str, Any]]


def sglang_layer_first(v: torch.Tensor) -> Tensors:
    halves = [v[:, layer].permute(1, 0, 2, 3, 4).reshape(2, P * N, H, D) for layer in range(L)]
    return [half[c] for half in halves for c in range(2)], "sglang.layer_first", {}


def sglang_layer_first_host(v: torch.Tensor) -> Tensors:
    return [v.permute(2, 1, 0, 3, 4, 5).reshape(2, L, P * N, H, D)], "sglang.layer_first_host", {}


def sglang_page_first(v: torch.Tensor) -> Tensors:
    return [v.permute(2, 0, 3, 1, 4, 5).reshape(2, P * N, L, H, D)], "sglang.page_first", {}


def sglang_page_first_direct(v: torch.Tensor) -> Tensors:
    return [v.permute(2, 0, 1, 3, 4, 5).contiguous()], "sglang.page_first_direct", {}


def sglang_page_head(v: torch.Tensor) -> Tensors:
    return [v.permute(2, 0, 4, 3, 1, 5).contiguous()], "sglang.page_head", {}


def sglang_page_unified(v: torch.Tensor) -> Tensors:
    return [v.view(P, L, 2, N, 2, H // 2, D).permute(0, 4, 1, 2, 3, 5, 6).contiguous()], "sglang.page_unified", {}


def transformers_rows(v: torch.Tensor) -> Tensors:
    rows = [v[:, layer, c].permute(2, 0, 1, 3).reshape(H, P * N, D) for layer in range(L) for c in range(2)]
    return rows, "transformers", {}


def vllm_views(nesting: str) -> Callable[[torch.Tensor], Tensors]:
    """One allocation nested as the letters say, and for each layer its view (blocks, heads, tokens, K | V)."""

    def make(v: torch.Tensor) -> Tensors:
        letters = "BLNHC"
        fused = v.permute(0, 1, 3, 4, 2, 5).reshape(P, L, N, H, 2 * D)
        backing = fused.permute([letters.index(letter) for letter in nesting]).contiguous()
        whole = backing.permute([nesting.index(letter) for letter in "LBHNC"])
        return [whole[layer] for layer in range(L)], "page head token dim", {}

    return make


def kv_first(v: torch.Tensor) -> Tensors:
    return [v[:, layer].permute(1, 0, 2, 3, 4).contiguous() for layer in range(L)], "kv page token head dim", {}


def block_first(v: torch.Tensor) -> Tensors:
    return [v[:, layer].contiguous() for layer in range(L)], "page kv token head dim", {}


def kernel_blocks(v: torch.Tensor) -> Tensors:
    """Pages of 4 tokens in kernel blocks of 2: (2 x pages, heads, 2, K | V) a layer."""
    fused = v.permute(0, 1, 3, 4, 2, 5).reshape(P, L, 2, 2, H, 2 * D)
    blocks = [fused[:, layer].permute(0, 1, 3, 2, 4).reshape(2 * P, H, 2, 2 * D) for layer in range(L)]
    return blocks, "(page token) head token dim", {}


ENGINES: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "sglang.layer_first": sglang_layer_first,
    "sglang.layer_first_host": sglang_layer_first_host,
    "sglang.page_first": sglang_page_first,
    "sglang.page_first_direct": sglang_page_first_direct,
    "sglang.page_head": sglang_page_head,
    "sglang.page_unified": sglang_page_unified,
    "transformers": transformers_rows,
    **{f"vllm.{n}": vllm_views(n) for n in ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")},
    "K and V first": kv_first,
    "block first": block_first,
    "kernel blocks": kernel_blocks,
}


def declared(tensors: list[torch.Tensor], axes: str) -> Layout:
    """A ready name stands for its axes."""
    if axes in READY:
        ready = READY[axes]
        if ready.one_per == "component":
            parts = [Part(t, ready.axes, ("kv"[i % 2],), (i // 2,)) for i, t in enumerate(tensors)]
            return Layout.from_parts(SPEC, parts)
        axes = ready.axes
    return Layout.from_tensors(SPEC, tensors, axes)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_engine_tensors_hold_what_their_indices_say(engine: str) -> None:
    values = logical()
    tensors, axes, _ = ENGINES[engine](values)
    layout = declared(tensors, axes)
    target = Layout.page_first(SPEC, P)
    out = torch.zeros(target.buffer_bytes[0], dtype=torch.uint8)
    geometry = coalesce(SPEC, Side.of(layout), Side.of(target), Box.whole(SPEC), order="dst")
    relayout_reference(geometry, tensors, [out], torch.arange(P), torch.arange(P))
    assert torch.equal(out.view(torch.int32).view(P, L, 2, N, H, D), values)


@pytest.mark.parametrize("nesting", ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"])
def test_vllm_views_lie_where_the_ready_name_says(nesting: str) -> None:
    tensors, axes, _ = vllm_views(nesting)(logical())
    base = min(t.data_ptr() for t in tensors)
    views, ready = Layout.from_tensors(SPEC, tensors, axes), Layout.named(f"vllm.{nesting}", SPEC, P)
    for layer in range(L):
        for c in range(2):
            got = addresses(views.placements[layer][c], P) + tensors[layer].data_ptr() - base
            np.testing.assert_array_equal(got, addresses(ready.placements[layer][c], P))


@pytest.mark.parametrize("name", [n for n in ENGINES if n in READY and not n.startswith("vllm.")])
def test_ready_names_fit_the_shapes_of_their_engines(name: str) -> None:
    tensors, _, _ = ENGINES[name](logical())
    assert name in names.that_fit(SPEC, tensors)


def test_x_packed_heads() -> None:
    """Keys as [pages, heads, dim / x, tokens, x] and values as [pages, heads, dim, tokens]."""
    values = logical()
    parts = []
    for layer in range(L):
        k = values[:, layer, 0].view(P, N, H, D // 4, 4).permute(0, 2, 3, 1, 4).contiguous()
        v = values[:, layer, 1].permute(0, 2, 3, 1).contiguous()
        parts.append(Part(k, "page head dim token dim", ("k",), (layer,)))
        parts.append(Part(v, "page head dim token", ("v",), (layer,)))
    layout, target = Layout.from_parts(SPEC, parts), Layout.page_first(SPEC, P)
    out = torch.zeros(target.buffer_bytes[0], dtype=torch.uint8)
    geometry = coalesce(SPEC, Side.of(layout), Side.of(target), Box.whole(SPEC), order="dst")
    relayout_reference(geometry, [p.tensor for p in parts], [out], torch.arange(P), torch.arange(P))
    assert torch.equal(out.view(torch.int32).view(P, L, 2, N, H, D), values)


def test_two_pages_have_the_shape_of_k_and_v_and_only_the_declaration_tells() -> None:
    tensors = [torch.zeros(2, 2, N, H, D, dtype=torch.int32) for _ in range(L)]
    first = Layout.from_tensors(SPEC, tensors, "kv page token head dim")
    block = Layout.from_tensors(SPEC, tensors, "page kv token head dim")
    row = N * H * D * 4
    assert [p.offset for p in first.placements[0]] == [0, 2 * row]
    assert [p.offset for p in block.placements[0]] == [0, row]
    assert (first.placements[0][0].page_stride, block.placements[0][0].page_stride) == (row, 2 * row)
    with pytest.raises(LayoutError, match=r"expected a declaration such as .* got None; shape \[\(2, 2, 4, 2, 8\)\]"):
        Layout.from_tensors(SPEC, tensors, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_strides_are_bytes_whatever_the_dtype(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    spec = KVSpec.attention(1, 2, 3, 5, itemsize=size)
    tensor = torch.zeros(4, 2, 3, 16, dtype=dtype)
    layout = Layout.from_tensors(spec, [tensor[..., 3:13]], "page token head dim")
    k, v = layout.placements[0]
    assert (k.page_stride, k.token, k.head) == (96 * size, ((2, 48 * size),), ((3, 16 * size),))
    assert (k.byte, v.byte, v.offset - k.offset) == (((5 * size, 1),), ((5 * size, 1),), 5 * size)
    assert layout.buffer_bytes == ((3 * 96 + 48 + 2 * 16 + 10) * size,)


# -- shares ---------------------------------------------------------------------------------------


def test_select_layers_keeps_the_memory() -> None:
    layout = Layout.named("sglang.page_first", SPEC, P)
    share = layout.select_layers(1, 2)
    assert share.placements == layout.placements[1:]
    assert share.spec == SPEC.select_layers(1, 2)
    assert share.buffer_bytes == layout.buffer_bytes


@pytest.mark.parametrize("name", ["page_first", *(n for n in READY if n != "vllm.MLA")])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_shares_of_heads_are_the_heads_of_the_whole(name: str, parts: int) -> None:
    spec = KVSpec.attention(2, 4, kv_heads=4, head_dim=6, itemsize=1)
    layout = Layout.named(name, spec, 3)
    for part in range(parts):
        share = layout.select_heads(part, parts)
        for layer in range(2):
            for c in range(2):
                whole = addresses(layout.placements[layer][c], 3).reshape(3, 4, 4, 6)
                mine: Numbers = whole[:, :, part * 4 // parts : (part + 1) * 4 // parts].reshape(3, -1)
                np.testing.assert_array_equal(addresses(share.placements[layer][c], 3), mine)


def test_a_share_that_cuts_a_group_of_heads_unevenly_is_refused() -> None:
    spec = KVSpec.attention(1, 2, kv_heads=6, head_dim=4, itemsize=1)
    layout = Layout.named("sglang.page_unified", spec, 2, head_groups=3)
    assert layout.select_heads(1, 3).placements[0][0].head == ((2, 4),)
    with pytest.raises(LayoutError, match=r"heads of 'k': expected a slice along the declared split .*, got 0:3"):
        layout.select_heads(0, 2)


def test_is_page_first() -> None:
    assert Layout.page_first(HYBRID, 2).is_page_first
    assert Layout.page_first(HYBRID, 2, HYBRID.page_bytes + 8).is_page_first
    assert Layout.page_first(HYBRID, 2).select_layers(1, 3).is_page_first
    tensors, axes, _ = block_first(logical())
    assert not Layout.from_tensors(SPEC, tensors, axes).is_page_first  # a buffer a layer
    assert not Layout.page_first(SPEC, 2).select_heads(0, 2).is_page_first
    assert not Layout.named("sglang.page_first", SPEC, 2).is_page_first
    one = KVSpec.mla(2, 1, 16)
    assert Layout.named("vllm.BLNHC", one, 3).is_page_first
    assert not Layout.named("vllm.LBNHC", one, 3).is_page_first


def test_packed_boxes_hold_their_components_back_to_back() -> None:
    places = packed_box(HYBRID, 1, 3, 0, 2, 1000)
    assert {key: place.offset for key, place in places.items()} == {(1, 0): 0, (1, 1): 21, (2, 0): 27, (2, 1): 53}
    assert box_bytes(HYBRID, 1, 3, 0, 2) == 61
    later = packed_box(HYBRID, 1, 3, 2, 4, 1000)  # per page: only with token 0
    assert {key: place.offset for key, place in later.items()} == {(2, 0): 0, (2, 1): 26}
    assert box_bytes(HYBRID, 1, 3, 2, 4) == 34


@given(
    extents=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    start=st.integers(0, 80),
    count=st.integers(1, 80),
    data=st.data(),
)
@settings(deadline=None)
def test_slice_dims_is_a_slice(extents: list[int], start: int, count: int, data: st.DataObject) -> None:
    strides = data.draw(st.lists(st.integers(0, 99), min_size=len(extents), max_size=len(extents)))
    dims = tuple(zip(extents, strides, strict=True))
    try:
        offset, kept = slice_dims(dims, start, count, "test")
    except LayoutError:
        inner = 1
        for extent, _ in reversed(dims[1:]):  # where the outermost axis takes whole blocks it is never refused
            inner *= extent
        whole = start % inner == 0 and count % inner == 0 and start + count <= inner * extents[0]
        assert not whole
        return

    def spread(some: tuple[tuple[int, int], ...]) -> Numbers:
        at = np.zeros(1, dtype=np.int64)
        for extent, stride in some:
            at = (at[:, None] + np.arange(extent) * stride).reshape(-1)
        return at

    np.testing.assert_array_equal(offset + spread(kept), spread(dims)[start : start + count])


# -- refusals -------------------------------------------------------------------------------------


def from_axes(axes: str, *shape: int, spec: KVSpec = SPEC, layers: tuple[int, ...] = (0,)) -> Callable[[], Layout]:
    """One tensor of int32 for ``layers``, which cover the spec."""
    return lambda: Layout.from_parts(spec, [Part(torch.zeros(shape, dtype=torch.int32), axes, ("k", "v"), layers)])


ONE = SPEC.select_layers(0, 1)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unknown word": (from_axes("page token heads dim", P, N, H, 16), r"expected words of \('layer'.*, got \['heads'\]"),
    "no words": (from_axes("", P), r"expected words of .*, got none"),
    "page twice": (from_axes("page page token head dim", P, 1, N, H, 16), r"'page' is given 2 times; only token, head"),
    "no page": (from_axes("token head dim", N, H, 16), r"expected a 'page' axis"),
    "no dim": (from_axes("page token head", P, N, H), r"expected a 'dim' axis"),
    "open group": (from_axes("(page token head dim", P, N, H, 16), r"expected each '\(' closed by one '\)'"),
    "group in a group": (from_axes("((page token) head) dim", 24, 16), r"expected each '\(' closed by one '\)'"),
    "axes of the tensor": (from_axes("page token head dim", P, N, 32, spec=ONE), r"expected 4 tensor axes, got 3"),
    "no elements": (from_axes("page token head dim", 0, N, H, 16, spec=ONE), r"expected a tensor with elements"),
    "layer outside": (
        from_axes("page token head dim", P, N, H, 16, layers=(5,)),
        r"expected layers 0 to 1, got \(5,\)",
    ),
    "no layers": (from_axes("page token head dim", P, N, H, 16, layers=()), r"expected layers 0 to 1, got \(\)"),
    "layer twice": (
        from_axes("layer page token head dim", 2, P, N, H, 16, layers=(0, 0)),
        r"expected each layer and component once, got layers \(0, 0\)",
    ),
    "component twice": (
        lambda: Layout.from_parts(ONE, [Part(byte_tensor(P, N, H, 64), "page token head dim", ("k", "k"), (0,))]),
        r"expected each layer and component once, got layers \(0,\) and \('k', 'k'\)",
    ),
    "component unknown": (
        lambda: Layout.from_tensors(ONE, [byte_tensor(P, N, H, 64)], "page token head dim", components=["k", "w"]),
        r"expected components of \['k', 'v'\] in layer 0, got \['w'\]",
    ),
    "no layer axis": (
        from_axes("page token head dim", P, N, H, 16, layers=(0, 1)),
        r"expected a 'layer' axis for 2 layers",
    ),
    "no token axis": (from_axes("page head dim", P, H, 16, spec=ONE), r"expected a 'token' axis for 4 tokens"),
    "head count": (from_axes("page token head dim", P, N, 3, 16, spec=ONE), r"expected 2 heads, got 3"),
    "token count": (from_axes("page token head dim", P, 5, H, 16, spec=ONE), r"expected 4 tokens, got 5"),
    "dim count": (from_axes("page token head dim", P, N, H, 8, spec=ONE), r"expected 16 dims, got 8"),
    "slots": (from_axes("(page token) head dim", 13, H, 16, spec=ONE), r"expected axis 0 in multiples of 4, got 13"),
    "kernel block": (
        from_axes("(page token) head token dim", 6, H, 3, 16, spec=ONE),
        r"expected parts of 'token' that multiply to 4, got 3 x \?",
    ),
    "fixed group": (
        from_axes("page (token head) dim", P, 9, 16, spec=ONE),
        r"expected 8 along axis 1 \(token head\), got 9",
    ),
    "ambiguous split": (
        from_axes("(page token) (head token) dim", 6, 4, 16, spec=ONE),
        r"ambiguous split in axis 0; write the parts as axes of their own",
    ),
    "whole elements": (
        lambda: Layout.from_tensors(
            KVSpec.attention(1, N, H, 5, 1), [torch.zeros(P, N, H, 3, dtype=torch.int32)], "page token head dim"
        ),
        r"expected whole elements of 4 B in a row of 10 B \(misaligned\)",
    ),
    "kv of two widths": (
        lambda: Layout.from_tensors(UNEQUAL, [byte_tensor(L, 2, P, N, H, 8)], "layer kv page token head dim"),
        r"a kv axis needs components of one width, got \[8, 5\] bytes",
    ),
    "rows differ": (
        lambda: Layout.from_tensors(
            KVSpec(4, ((Component("k", 2, 8), Component("s", 2, 8, per_page=True)),)),
            [byte_tensor(P, 4, 2, 16)],
            "page token head dim",
        ),
        r"components \('k', 's'\) differ in rows or heads; give one part each",
    ),
    "layers differ": (
        lambda: Layout.from_parts(
            KVSpec(1, ((Component("k", 1, 8),), (Component("k", 2, 4),))),
            [Part(byte_tensor(2, P, 1, 1, 8), "layer page token head dim", ("k",), (0, 1))],
        ),
        r"expected one set of components in all layers of a part; give one part a set",
    ),
    "heads scattered in dim": (
        lambda: Layout.from_tensors(
            KVSpec(1, ((Component("k", 2, 8),),)), [byte_tensor(P, 8, 4)[:, ::2]], "page dim dim"
        ),
        r"expected a head axis, or heads contiguous in dim",
    ),
    "component missing": (
        lambda: Layout.from_tensors(SPEC, [byte_tensor(L, P, N, H, 32)], "layer page token head dim", components=["k"]),
        r"expected a part for every component, got none for layer 0 'v', layer 1 'v'",
    ),
    "component placed twice": (
        lambda: Layout.from_parts(
            KVSpec.mla(1, 1, 8), [Part(byte_tensor(P, 8), "page dim", ("latent",), (0,)) for _ in range(2)]
        ),
        r"layer 0, component 'latent': placed by two parts",
    ),
    "pages differ": (
        lambda: Layout.from_parts(
            KVSpec.mla(2, 1, 8), [Part(byte_tensor(p, 8), "page dim", ("latent",), (i,)) for i, p in enumerate((3, 4))]
        ),
        r"expected the same number of pages in every part, got \[3, 4\]",
    ),
    "number of tensors": (
        lambda: Layout.from_tensors(KVSpec.mla(3, 1, 8), [byte_tensor(P, 8)] * 2, "page dim"),
        r"tensors: expected 1 or one a layer \(3\), got 2",
    ),
    "no parts": (lambda: Layout.from_parts(SPEC, []), r"expected a part for every component, got none for layer 0 'k'"),
    "page stride": (lambda: Layout.page_first(SPEC, 2, 1000), r"expected at least 1024 and a multiple of 16, got 1000"),
    "page stride alignment": (lambda: Layout.page_first(SPEC, 2, 1032), r"a multiple of 16, got 1032"),
    "no pages": (lambda: Layout.page_first(SPEC, 0), r"num_pages: expected at least 1, got 0"),
    "no pages by name": (lambda: Layout.named("transformers", SPEC, 0), r"num_pages: expected at least 1, got 0"),
    "name": (
        lambda: Layout.named("paged", SPEC, 2),
        r"expected one of page_first, sglang\.layer_first, .*, got 'paged'",
    ),
    "MLA of two": (
        lambda: Layout.named("vllm.MLA", SPEC, 2),
        r"expected one latent component with one head a layer, got",
    ),
    "hybrid in one tensor": (
        lambda: Layout.named("vllm.LBNHC", HYBRID, 2),
        r"vllm\.LBNHC: expected the same components in every layer, got page=4;1x\[k",
    ),
    "head groups": (
        lambda: Layout.named("sglang.page_unified", SPEC, 2, head_groups=3),
        r"head_groups: expected a divisor of 2 heads, got 3",
    ),
    "head groups elsewhere": (
        lambda: Layout.named("vllm.LBNHC", SPEC, 2, head_groups=2),
        r"head_groups: expected a layout with two head axes, got 'vllm\.LBNHC'",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_refusals_say_what_was_expected_and_got(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(LayoutError, match=message):
        make()


def test_undeclared_axes_are_refused_with_the_names_that_fit() -> None:
    spec = KVSpec.attention(2, page_size=4, kv_heads=4, head_dim=8, itemsize=1)
    with pytest.raises(
        LayoutError, match=r"got None; shape \[\(2, 5, 4, 4, 16\)\] fits vllm\.LBNHC and vllm\.LBHNC; pass axes"
    ):
        Layout.from_tensors(spec, [byte_tensor(2, 5, 4, 4, 16)], None)
    with pytest.raises(LayoutError, match=r"fits no ready layout; pass axes"):
        Layout.from_tensors(spec, [byte_tensor(7, 16)], None)


@pytest.mark.parametrize(
    ("spec", "shapes", "expected"),
    [
        # tokens = heads
        (KVSpec.attention(2, 4, 4, 8, 1), [(2, 5, 4, 4, 16)], {"vllm.LBNHC", "vllm.LBHNC"}),
        # pages could be layers
        (KVSpec.attention(3, 4, 2, 8, 1), [(3, 3, 4, 2, 16)], {"vllm.LBNHC", "vllm.BLNHC"}),
        # all of them alike
        (
            KVSpec.attention(2, 2, 2, 8, 1),
            [(2, 2, 2, 2, 16)],
            {f"vllm.{n}" for n in ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")},
        ),
        # SGLang's host pools: as many slots as layers
        (KVSpec.attention(8, 4, 2, 8, 1), [(2, 8, 8, 2, 8)], {"sglang.layer_first_host", "sglang.page_first"}),
        # K and V of each layer: slots = heads
        (KVSpec.attention(1, 2, 4, 8, 1), [(4, 4, 8)] * 2, {"sglang.layer_first", "transformers"}),
        # one view a layer, as vLLM registers them: which letters they nest by doesn't show in the shape
        (KVSpec.attention(2, 4, 2, 8, 1), [(5, 4, 2, 16)] * 2, {"vllm.LBNHC", "vllm.BLNHC"}),
        # an MLA cache is called by two names
        (KVSpec.mla(2, 4, 36), [(2, 5, 4, 1, 36)], {"vllm.LBNHC", "vllm.MLA"}),
        # heads = layers
        (KVSpec.attention(2, 4, 2, 8, 1), [(2, 3, 2, 4, 2, 8)], {"sglang.page_first_direct", "sglang.page_head"}),
        (KVSpec.attention(2, 4, 2, 8, 1), [(2, 3, 4, 2, 16)], {"vllm.LBNHC"}),
    ],
)  # fmt: skip
def test_all_ready_layouts_that_fit_a_shape_are_found(
    spec: KVSpec, shapes: list[tuple[int, ...]], expected: set[str]
) -> None:
    assert set(names.that_fit(spec, [byte_tensor(*shape) for shape in shapes])) == expected


# -- overlaps -------------------------------------------------------------------------------------

TWO = KVSpec.attention(1, 2, kv_heads=1, head_dim=4, itemsize=1)


def two_parts(k: torch.Tensor, v: torch.Tensor, axes: str = "page token head dim") -> Layout:
    return Layout.from_parts(TWO, [Part(k, axes, ("k",), (0,)), Part(v, axes, ("v",), (0,))])


def test_strides_that_overlap_in_one_tensor_are_refused() -> None:
    spec = KVSpec.mla(1, 2, 8)
    base = byte_tensor(64)
    with pytest.raises(LayoutError, match=r"layer 0 'latent': overlapping strides, expected more than 15 B, got 12 B"):
        Layout.from_tensors(spec, [base.as_strided((3, 2, 8), (12, 8, 1))], "page token dim")
    with pytest.raises(LayoutError, match=r"overlapping strides, expected more than 0 B, got 0 B"):
        Layout.from_tensors(spec, [byte_tensor(1, 2, 8).expand(3, 2, 8)], "page token dim")


def test_expanded_components_and_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"overlapping strides: layer 0 'k' and layer 0 'v' share byte"):
        Layout.from_tensors(TWO, [byte_tensor(1, 3, 2, 1, 4).expand(2, 3, 2, 1, 4)], "kv page token head dim")
    with pytest.raises(LayoutError, match=r"overlapping strides: layer 0 'latent' and layer 1 'latent' share byte"):
        Layout.from_tensors(KVSpec.mla(2, 1, 8), [byte_tensor(1, 3, 8).expand(2, 3, 8)], "layer page dim")


def test_parts_that_share_memory_are_refused_wherever_they_meet() -> None:
    base = byte_tensor(30, 2, 1, 4)
    with pytest.raises(LayoutError, match=r"layer 0 'k' and layer 0 'v' share byte"):
        two_parts(base[:10], base[:10])
    with pytest.raises(LayoutError, match=r"layer 0 'k' and layer 0 'v' share byte"):
        two_parts(base[:16], base[14:])  # the last pages of one are the first of the other
    with pytest.raises(LayoutError, match=r"share byte"):
        two_parts(base.view(-1)[: 15 * 8].view(15, 2, 1, 4), base.view(-1)[3 : 15 * 8 + 3].view(15, 2, 1, 4))
    narrow = byte_tensor(30 * 8)
    with pytest.raises(LayoutError, match=r"share byte"):  # other page strides, meeting late
        two_parts(narrow.as_strided((5, 2, 1, 4), (40, 4, 4, 1)), narrow.as_strided((5, 2, 1, 4), (12, 4, 4, 1), 110))


def test_parts_that_interleave_without_sharing_are_taken() -> None:
    base = byte_tensor(10, 2, 2, 1, 4)
    assert two_parts(base[:, 0], base[:, 1]).num_pages == 10
    assert two_parts(base[:, :, 0], base[:, :, 1]).num_pages == 10
    assert two_parts(base.view(20, 2, 1, 4)[:10], base.view(20, 2, 1, 4)[10:]).num_pages == 10
    assert two_parts(base.view(20, 2, 1, 4)[:1], base.view(20, 2, 1, 4)[1:2]).num_pages == 1
    wide = byte_tensor(10, 24)
    k, v = wide[:, 1:9].view(10, 2, 1, 4), wide[:, 13:21].view(10, 2, 1, 4)
    assert two_parts(k, v).num_pages == 10


def test_overlaps_are_found_in_layouts_of_many_layers_quickly() -> None:
    spec = KVSpec.attention(64, 64, kv_heads=8, head_dim=128, itemsize=2)
    tensor = torch.empty(2, 4096 * 64, 64, 8, 128, dtype=torch.bfloat16, device="meta")
    assert Layout.from_tensors(spec, [tensor], "kv (page token) layer head dim").num_pages == 4096


@st.composite
def two_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    base = byte_tensor(400)
    pages = draw(st.integers(1, 6))

    def view() -> torch.Tensor:
        strides = [draw(st.sampled_from([4, 5, 8, 9, 12, 16, 24, 40])), draw(st.sampled_from([4, 5, 8, 20, 48])), 4, 1]
        return base.as_strided((pages, 2, 1, 4), strides, draw(st.integers(0, 100)))

    one, other = view(), view()
    if draw(st.booleans()):
        other = base.as_strided((pages, 2, 1, 4), one.stride(), other.storage_offset())
    return one, other


@given(two_views())
@settings(deadline=None, max_examples=300)
def test_overlap_is_what_a_count_of_addresses_says(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Refused wherever two bytes share an address. One part alone is held to nested strides, which is stricter."""
    taken = np.concatenate([np.arange(400)[v.storage_offset() :][_positions(v)].reshape(-1) for v in views])
    shared = np.unique(taken).size < taken.size
    try:
        two_parts(*views)
    except LayoutError as error:
        assert shared or "overlapping strides, expected more than" in str(error)
    else:
        assert not shared


def _positions(view: torch.Tensor) -> Numbers:
    index: Numbers = np.indices(tuple(view.shape)).reshape(view.dim(), -1) * np.array(view.stride())[:, None]
    at: Numbers = index.sum(axis=0)
    return at
