"""A transformers `Cache` whose tokens live in the pages of a `KVPool`.

The prefix of a prompt may still be on its way while the model runs: every layer waits for its own part of
the load, at its first `update`. All tokens that pass through `update` are written into the pool, those of
sliding-window layers too, so what a generate produced can be stored at any time.

    pool = pool_for(model, num_pages=512, page_size=16)
    cache = PagedCache(model, pool)
    cache.load(engine, slots, tokens=2000, prompt_tokens=ids.shape[1])
    out = model.generate(ids, **{cache_keyword(model): cache})
    cache.store(engine, more_slots).result()

One cache holds one sequence (batch size 1). Works with transformers 5.17 and later.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.integrations.paged import OpenStore, PageTable
from kvtransfer.kernels.errors import ConfigError, LayoutError, TransferError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool

Slots = Sequence[int] | NDArray[np.int64]


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


class _Paged:
    """What full and sliding layers share. ``owner`` is the cache, ``index`` the layer's number."""

    owner: PagedCache
    index: int
    past_tokens: int | None
    cumulative_length: int
    is_initialized: bool

    def _attach(self, owner: PagedCache, index: int, window: int | None) -> None:
        self.owner, self.index = owner, index
        self.past_tokens = None if window is None else window - 1
        self.cumulative_length = 0

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, then gather what attention may look at: all, or window - 1 past tokens and the new."""
        start = self.cumulative_length
        stop = start + keys.shape[2]
        owner = self.owner
        owner.check_states(self.index, keys, values)
        owner.table.prepare_write(start, stop)
        owner.wait_layer(self.index)  # before the write: the load also covers the rest of its last page
        views = owner.views(self.index, keys.dtype, values.dtype)
        for view, states in zip(views, (keys, values), strict=True):
            owner.table.write(view, start, states)
        self.cumulative_length = stop
        owner.wrote(self.index, stop)
        first = 0 if self.past_tokens is None else max(0, start - self.past_tokens)
        gathered = [owner.table.gather(view, first, stop) for view in views]
        return gathered[0], gathered[1]

    def _crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0 or -tokens_to_remove > self.cumulative_length:
            raise ConfigError(
                f"crop: expected minus the number of tokens to remove, at most {self.cumulative_length} of them, "
                f"got {tokens_to_remove}"
            )
        self.cumulative_length += tokens_to_remove

    def get_seq_length(self) -> int:
        """Tokens the layer holds, those still on their way included."""
        return self.cumulative_length

    def reset(self) -> None:
        """Forget the tokens; the pages stay with the cache."""
        self.cumulative_length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise ConfigError(f"a PagedCache holds one sequence: expected 1 repeat, got {repeats}")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.numel() != 1:
            raise ConfigError(
                f"a PagedCache holds one sequence: expected one index, got {indices.numel()}; "
                "beams and batches are not supported"
            )


class PagedLayer(_Paged, DynamicLayer):
    """Full attention over pages."""

    def __init__(self, owner: PagedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attach(owner, index, None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (1, heads, tokens, dim) states; returns all tokens, contiguous, (1, heads, length, dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        self._crop(tokens_to_remove)


class PagedSlidingLayer(_Paged, DynamicSlidingWindowLayer):
    """Sliding-window attention over pages: the pool keeps all tokens, attention gets the window's.

    Mask sizes are those of `DynamicSlidingWindowLayer`: they follow from `cumulative_length` alone.
    """

    def __init__(self, owner: PagedCache, index: int, window: int) -> None:
        super().__init__(sliding_window=window)
        self._attach(owner, index, window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (1, heads, tokens, dim) states; returns at most window - 1 past tokens and the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        self._crop(tokens_to_remove)


class PagedCache(Cache):
    """A cache of one sequence over the pages of ``pool``.

    model  the model, or its config
    pages  pool pages the sequence starts with; more are taken from the pool as it grows (CapacityError
           where it has none left). `release` gives them back.
    """

    def __init__(
        self, model: PreTrainedModel | PreTrainedConfig, pool: KVPool, pages: Sequence[int] | NDArray[np.int64] = ()
    ) -> None:
        config = model if isinstance(model, PreTrainedConfig) else model.config
        windows = window_layers(config.get_text_config(decoder=True))
        widths = {len(components) for components in pool.spec.layers}
        if pool.spec.num_layers != len(windows) or widths != {2}:
            raise ConfigError(
                f"pool: expected {len(windows)} layers of 2 components each, got {pool.spec.canonical()}; "
                "kv_spec_for(config, page_size, dtype) makes the right spec"
            )
        self.pool = pool
        self.table = PageTable(pool, pages)
        self._load: TransferHandle | None = None
        self._allow_unverified = False
        self._arrived: set[int] = set()
        self._views: dict[tuple[int, torch.dtype, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self.paged: list[PagedLayer | PagedSlidingLayer] = [
            PagedLayer(self, i) if window is None else PagedSlidingLayer(self, i, window)
            for i, window in enumerate(windows)
        ]
        super().__init__(layers=[*self.paged])

    @property
    def tokens(self) -> int:
        """Tokens held, those still on their way included."""
        return int(self.get_seq_length())

    def load(
        self,
        engine: TransferEngine,
        slots: Slots,
        *,
        tokens: int,
        prompt_tokens: int,
        layerwise: bool = True,
        allow_unverified: bool = False,
    ) -> TransferHandle | None:
        """Begin to load the first ``tokens`` tokens from host ``slots`` (one a page); the cache must be empty.

        The prefix is capped at ``prompt_tokens`` - 1: a model must compute one token at least. The length is
        reported at once; each layer waits for its own part when the model reaches it. Before the last layer
        hands its tokens to attention the load's verdict is read, so that a page that did not verify raises
        TransferError before the forward ends (so do pages stored without digests, unless ``allow_unverified``). Returns
        the handle, or None where nothing is left to load.
        """
        if self.tokens or self._load is not None:
            raise ConfigError(f"load: expected an empty cache, got {self.tokens} tokens")
        usable = usable_prefix(tokens, prompt_tokens)
        needed = self.table.pages_for(usable)
        if len(slots) < needed:
            raise ConfigError(f"load: expected at least {needed} slots for {usable} tokens, got {len(slots)}")
        if not needed:
            return None
        self.table.reserve(usable)
        self._allow_unverified = allow_unverified
        self._load = engine.load(slots[:needed], self.table.pages[:needed], layerwise=layerwise)
        self._arrived = set()
        for layer in self.paged:
            layer.cumulative_length = usable
        return self._load

    def store(
        self, engine: TransferEngine, slots: Slots, *, tokens: int | None = None, layerwise: bool = False
    ) -> TransferHandle:
        """Store the first ``tokens`` tokens (default: all) into host ``slots``, one a page, the last one in part.

        ``layerwise``: call it before the forward that writes these tokens (``tokens`` is then needed); each
        layer is handed over as soon as `update` has written it. (With `kvtransfer.hooks.layerwise` instead, call
        ``engine.store`` and leave this argument alone.) A later write to a page that is still being read waits.
        """
        if tokens is None:
            if layerwise:
                raise ConfigError("store: expected tokens=..., the length after the forward, with layerwise=True")
            tokens = self.tokens
        written = min(layer.cumulative_length for layer in self.paged)
        if tokens < 1 or (layerwise and tokens <= written) or (not layerwise and tokens > written):
            bound = f"more than the {written} tokens there are" if layerwise else f"1 to {written} tokens"
            raise ConfigError(f"store: expected {bound}, got {tokens}")
        needed = self.table.pages_for(tokens)
        if len(slots) < needed:
            raise ConfigError(f"store: expected at least {needed} slots for {tokens} tokens, got {len(slots)}")
        self.table.reserve(tokens)
        handle = engine.store(self.table.pages[:needed], slots[:needed], layerwise=layerwise)
        unwritten = set(range(len(self.paged))) if layerwise else set()
        self.table.stores.append(OpenStore(handle, needed, tokens, unwritten))
        return handle

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, sliding ones too: raw bytes, uint8 (1, heads, tokens, head_bytes)."""
        self.wait_layer(layer)
        length = self.paged[layer].cumulative_length
        k, v = (self.table.gather(view, 0, length) for view in self.views(layer, torch.uint8, torch.uint8))
        return k, v

    def release(self, wait_s: float = 0.0) -> None:
        """Give the pages back to the pool and forget the tokens."""
        self.table.release(wait_s)
        self._load = None
        for layer in self.paged:
            layer.reset()

    def views(self, layer: int, k_dtype: torch.dtype, v_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool's two components of ``layer``, (pages, page_size, heads, dim), no copy."""
        key = (layer, k_dtype, v_dtype)
        if key not in self._views:
            self._views[key] = self.pool.view(layer, 0, k_dtype), self.pool.view(layer, 1, v_dtype)
        return self._views[key]

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for ``layer`` of the load in flight, once; the last layer reads the verdict."""
        if self._load is None or layer in self._arrived:
            return
        self._load.wait_layer(layer)
        if len(self._arrived) + 1 == len(self.paged):
            verdict = self._load.verdict()
            if verdict.unverified_pages and not self._allow_unverified:
                raise TransferError(
                    f"load: pages {list(verdict.unverified_pages[:8])} were stored without digests; discard this "
                    "forward, or load(..., allow_unverified=True)",
                    verdict.unverified_pages,
                )
            if not verdict.ok:
                raise TransferError(
                    f"load: pages {list(verdict.bad_pages)} did not verify; discard this forward, compute the prefix",
                    verdict.bad_pages,
                )
            self._load = None
        self._arrived.add(layer)

    def wrote(self, layer: int, length: int) -> None:
        """``layer`` holds ``length`` tokens now: hand it to the layer-wise stores that wait for it."""
        for store in self.table.stores:
            if layer in store.unwritten and length >= store.tokens:
                store.handle.layer_written(layer)
                store.unwritten.discard(layer)

    def check_states(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse states that the pool's spec does not describe."""
        for component, states in zip(self.pool.spec.layers[layer], (keys, values), strict=True):
            batch, heads, _, dim = states.shape
            if batch != 1:
                raise ConfigError(f"a PagedCache holds one sequence: expected batch size 1, got {batch}")
            if (heads, dim * states.itemsize) != (component.heads, component.head_bytes):
                raise LayoutError(
                    f"layer {layer}, component {component.name!r}: expected {component.heads} heads of "
                    f"{component.head_bytes} bytes, got {heads} of {dim * states.itemsize} ({states.dtype})"
                )
            if states.device != self.pool.device:
                raise ConfigError(f"layer {layer}: expected states on {self.pool.device}, got {states.device}")


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
