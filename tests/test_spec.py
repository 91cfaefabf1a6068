"""KVSpec and Component: sizes in bytes, shares of ranks, refusals."""

from __future__ import annotations

import pytest
from kernel_helpers import starts_in_page

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.spec import Component, KVSpec

HYBRID = KVSpec(
    3,
    (
        (Component("k", 4, 16), Component("v", 4, 24)),
        (Component("state", 2, 40, per_page=True), Component("conv", 1, 13, per_page=True)),
        (Component("latent", 1, 576), Component("scale", 4, 4)),
    ),
)


def test_bytes_are_counted_by_layer_component_token_and_head() -> None:
    assert [HYBRID.layer_bytes(layer) for layer in range(3)] == [3 * 4 * 40, 2 * 40 + 13, 3 * (576 + 16)]
    assert HYBRID.page_bytes == 480 + 93 + 1776
    assert HYBRID.layer_offsets == (0, 480, 573, 2349)
    assert starts_in_page(HYBRID)[2, "scale"] == 573 + 3 * 576


def test_attention_and_mla() -> None:
    spec = KVSpec.attention(32, 16, kv_heads=8, head_dim=128, itemsize=2)
    assert spec.layer_bytes(0) == 16 * 2 * 2048
    assert spec.page_bytes == 32 * 65536
    narrow_v = KVSpec.attention(1, 1, kv_heads=2, head_dim=192, itemsize=2, v_head_dim=128)
    assert [c.page_bytes(1) for c in narrow_v.layers[0]] == [768, 512]
    assert KVSpec.mla(60, 64, 656).page_bytes == 60 * 64 * 656


def test_select_layers() -> None:
    assert HYBRID.select_layers(1, 3).layers == HYBRID.layers[1:]
    assert HYBRID.select_layers(1, 3).layer_offsets == (0, 93, 1869)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (-1, 2), (2, 2), (2, 1)])
def test_select_layers_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match=rf"expected 0 <= start < stop <= 3, got {start}:{stop}"):
        HYBRID.select_layers(start, stop)


def test_select_heads_cuts_many_heads_and_keeps_single_ones_whole() -> None:
    share = HYBRID.select_heads(1, 2)
    assert [[c.heads for c in components] for components in share.layers] == [[2, 2], [1, 1], [1, 2]]
    assert HYBRID.select_heads(0, 1) == HYBRID


def test_select_heads_that_do_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'k': expected heads divisible by 3, got 4"):
        HYBRID.select_heads(0, 3)
    with pytest.raises(LayoutError, match=r"expected 0 <= part < parts, got part 2 of 2"):
        HYBRID.select_heads(2, 2)


def test_canonical_text_tells_specs_apart() -> None:
    k, v = Component("k", 2, 8), Component("v", 2, 8)
    different = [
        KVSpec.uniform(2, 4, [k, v]),
        KVSpec.uniform(2, 4, [v, k]),
        KVSpec.uniform(3, 4, [k, v]),
        KVSpec.uniform(2, 8, [k, v]),
        KVSpec.uniform(2, 4, [k]),
        KVSpec.uniform(2, 4, [k, Component("v", 4, 4)]),
        KVSpec.uniform(2, 4, [k, Component("v", 2, 8, per_page=True)]),
        KVSpec(4, ((k, v), (k,))),
        KVSpec(4, ((k,), (k, v))),
    ]
    assert len({spec.canonical() for spec in different}) == len(different)
    assert KVSpec.uniform(2, 4, [k, v]).canonical() == KVSpec(4, ((k, v), (k, v))).canonical()


@pytest.mark.parametrize(("name", "heads", "head_bytes"), [("", 1, 1), ("k", 0, 1), ("k", 1, 0), ("k", -2, 8)])
def test_component_without_bytes_is_refused(name: str, heads: int, head_bytes: int) -> None:
    with pytest.raises(LayoutError, match=r"expected a name, heads >= 1 and head_bytes >= 1, got Component"):
        Component(name, heads, head_bytes)


def test_spec_without_tokens_layers_or_distinct_names_is_refused() -> None:
    k = Component("k", 1, 8)
    with pytest.raises(LayoutError, match=r"page_size: expected at least 1 token, got 0"):
        KVSpec(0, ((k,),))
    with pytest.raises(LayoutError, match=r"expected at least one layer"):
        KVSpec(1, ())
    with pytest.raises(LayoutError, match=r"at least one component each"):
        KVSpec(1, ((k,), ()))
    with pytest.raises(LayoutError, match=r"layer 1: expected distinct component names, got \['k', 'k'\]"):
        KVSpec(1, ((k,), (k, k)))
