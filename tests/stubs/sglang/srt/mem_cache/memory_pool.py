"""Stand-in for device pools: their buffers alone."""

from __future__ import annotations

from typing import Any

import torch


class MHATokenToKVPool:
    """K and V of every layer, (size + page_size, heads, head_dim)."""

    kv_cache_layout = "nhd"
    k_scale_buffer = native_k_scale_buffer = None
    start_layer = 0

    def __init__(
        self, size: int, page_size: int, dtype: Any, head_num: int, head_dim: int, layer_num: int, device: Any
    ) -> None:
        self.size, self.page_size, self.layer_num = size, page_size, layer_num
        shape = (2, size + page_size, head_num, head_dim)
        both = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.k_buffer, self.v_buffer = [one[0] for one in both], [one[1] for one in both]


class MLATokenToKVPool:
    """One row a token and layer."""

    start_layer = 0
    kv_buffer: list[torch.Tensor]
    layer_num: int
