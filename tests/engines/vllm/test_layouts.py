"""Pools over views that vLLM's own code makes: every page goes to host memory and comes back into other blocks, byte
for byte, and a byte at every coordinate is where it should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtransfer.engine import TransferEngine
from kvtransfer.integrations.vllm_layout import engine_pool
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.tiers.host import HostTier

pytestmark = pytest.mark.engines
BLOCKS, LAYERS = 7, 3
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPECS: dict[str, Any] = {
    "bf16": FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=24, dtype=BF16),
    "v of its own width": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=24, head_size_v=8, dtype=BF16),
    "fp8": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=40, dtype=FP8),
    "fp8 with scales": FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=32,
        dtype=FP8,
        kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
        state_content_bytes=72,
    ),
    "mla": MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=36, dtype=BF16),
    "padded": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, page_size_padded=2048),
    "mamba": MambaSpec(block_size=512, shapes=((3, 40), (4, 8, 5)), dtypes=(BF16, torch.float32)),
}
NO_PADDING = {KVCacheLayout.LHBNC, KVCacheLayout.BHLNC}  # vLLM pads whole pages only


def views(spec: Any, layout: KVCacheLayout, kernel_block: int | None = None) -> dict[str, torch.Tensor]:
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    size = BLOCKS * LAYERS * spec.page_size_bytes
    tensor = KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    made = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block_size=kernel_block)
    return dict(zip(names, made, strict=True))


def pages(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the blocks hold, by vLLM's own reading of its views: uint8 [blocks, layers, bytes]."""
    return torch.stack([view.contiguous().view(torch.uint8).reshape(BLOCKS, -1) for view in given.values()], dim=1)


def check(given: dict[str, torch.Tensor], block_size: int) -> None:
    made = engine_pool(given, BLOCKS, block_size)
    assert made.layers == tuple((name,) for name in given)
    before = pages(given)
    with HostTier(made.pool.spec, capacity_pages=8, device="cpu", pin=False, huge_pages=False) as host:
        engine = TransferEngine(made.pool, host)
        slots = host.allocate(4)
        engine.store([6, 0, 3, 5], slots).result(30)
        engine.load(slots, [1, 2, 4, 6]).result(30)
        engine.close()
    after = pages(given)
    assert (after[[1, 2, 4, 6]] == before[[6, 0, 3, 5]]).all()
    assert (after[[0, 3, 5]] == before[[0, 3, 5]]).all()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", list(SPECS))
def test_every_kind_of_cache_in_every_layout(name: str, layout: KVCacheLayout) -> None:
    if name == "padded" and layout in NO_PADDING:
        with pytest.raises(AssertionError, match="Page padding requires"):
            views(SPECS[name], layout)
        return
    check(views(SPECS[name], layout), SPECS[name].block_size)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=lambda layout: layout.name)
def test_blocks_that_the_kernel_wants_in_pieces(layout: KVCacheLayout) -> None:
    spec = FullAttentionSpec(block_size=64, num_kv_heads=3, head_size=8, dtype=BF16)
    given = views(spec, layout, kernel_block=16)
    assert next(iter(given.values())).shape[0] == 4 * BLOCKS
    check(given, 64)


def test_a_page_first_layout_moves_as_one_piece() -> None:
    spec = SPECS["bf16"]
    made = engine_pool(views(spec, KVCacheLayout.BLNHC), BLOCKS, 16)
    pool = made.pool
    ours = Layout.page_first(pool.spec, BLOCKS)
    geometry = coalesce(pool.spec, Side.of(pool.layout), Side.of(ours), Box.whole(pool.spec), order="dst")
    (piece,) = geometry.merged
    assert piece.piece_bytes == pool.spec.page_bytes == LAYERS * spec.page_size_bytes


def test_layers_that_share_one_cache_are_moved_once() -> None:
    given = views(SPECS["bf16"], KVCacheLayout.LBNHC)
    given["model.layers.3.self_attn.attn"] = given["model.layers.0.self_attn.attn"]
    made = engine_pool(given, BLOCKS, 16)
    assert made.pool.spec.num_layers == LAYERS
    assert made.number()["model.layers.3.self_attn.attn"] == made.number()["model.layers.0.self_attn.attn"] == 0
