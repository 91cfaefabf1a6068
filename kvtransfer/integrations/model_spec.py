"""What a transformers model keeps for each token: the `KVSpec` of its cache, and a pool for it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which ``model.forward`` and ``generate`` take a cache: "cache" from transformers 5.24 on,
    "past_key_values" before. Read from the signature; read it once.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ConfigError(
        f"{type(model).__name__}.forward: expected a parameter 'cache' or 'past_key_values', got {list(parameters)}"
    )


def usable_prefix(stored_tokens: int, prompt_tokens: int) -> int:
    """Tokens of a stored prefix that a prompt may use: one token at least must be left to compute."""
    if prompt_tokens < 1:
        raise ConfigError(f"prompt_tokens: expected at least 1, got {prompt_tokens}")
    return max(0, min(stored_tokens, prompt_tokens - 1))


def kv_spec_for(config: PreTrainedConfig, page_size: int, dtype: torch.dtype) -> KVSpec:
    """What one page of ``config``'s model holds, as transformers hands it to `Cache.update`.

    Two components a layer: k and v, or, for models that cache a latent (DeepSeek's MLA), latent and rope, of
    different width. Layers may differ. Raises ConfigError for layers that keep something else (recurrent
    state, indexer keys, layers that share another's KV).
    """
    text = config.get_text_config(decoder=True)
    window_layers(text)
    view = getattr(text, "per_layer_config", None)
    layer_configs = [text] * text.num_hidden_layers if view is None else list(view)
    return KVSpec(page_size, tuple(_components(layer, dtype.itemsize) for layer in layer_configs))


def pool_for(
    model: PreTrainedModel,
    num_pages: int,
    page_size: int,
    device: torch.device | str | None = None,
    *,
    layout: str = "sglang.layer_first",
    streams: Sequence[Any] | None = None,
) -> KVPool:
    """A pool for ``model``'s KV, on the model's device unless told otherwise. ``streams``: see `KVPool`."""
    spec = kv_spec_for(model.config, page_size, model.dtype)
    return KVPool.allocate(
        layout, spec=spec, num_pages=num_pages, device=model.device if device is None else device, streams=streams
    )


def window_layers(config: PreTrainedConfig) -> list[int | None]:
    """For each layer its sliding window in tokens, or None for full attention, as transformers' own cache has it."""
    windows: list[int | None] = []
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        else:
            raise ConfigError(
                f"layer {number}: expected full or sliding-window attention, got {type(layer).__name__}; "
                "state, indexer and shared layers are not supported"
            )
    return windows


class _Widths(Protocol):
    hidden_size: int
    num_attention_heads: int


def _components(config: _Widths, itemsize: int) -> tuple[Component, Component]:
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        rope = int(getattr(config, "qk_rope_head_dim"))  # noqa: B009
        return Component("latent", 1, latent * itemsize), Component("rope", 1, rope * itemsize)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Component("k", heads, dim * itemsize), Component("v", heads, dim * itemsize)
