"""A transformers `Cache` whose tokens live in the pages of a `KVPool`.

The prefix of a prompt may still be on its way while the model runs: every layer waits for its own part of
the load, at its first `update`. All tokens that pass through `update` are written into the pool, those of
sliding-window layers too, so what a generate produced can be stored at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.integrations.model_spec import usable_prefix, window_layers
from kvtransfer.integrations.paged import OpenStore, PageTable
from kvtransfer.integrations.paged_layers import PagedLayer, PagedSlidingLayer
from kvtransfer.kernels.errors import ConfigError, LayoutError, TransferError
from kvtransfer.pool import KVPool
from kvtransfer.verdict import Verdict

Slots = Sequence[int] | NDArray[np.int64]


class LoadInFlight(Protocol):
    """A layer-wise load: a `TransferHandle`, or a load of a `TieredCache`."""

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for the layer."""

    def verdict(self) -> Verdict:
        """Hold the caller until it is done: which pages are right."""


class PagedCache(Cache):
    """A cache over the pages of ``pool``, of one sequence, or of a batch padded on the left.

    model  the model, or its config
    pages  pool pages the (first) sequence starts with; more are taken from the pool as sequences grow (CapacityError
           where it has none left). `release` gives them back.
    pads   for each sequence of the batch how many columns of padding stand before it

    Padding is not kept: attention gets zeros there, which its mask hides.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        pool: KVPool,
        pages: Slots = (),
        *,
        pads: Sequence[int] = (0,),
    ) -> None:
        config = model if isinstance(model, PreTrainedConfig) else model.config
        windows = window_layers(config.get_text_config(decoder=True))
        widths = {len(components) for components in pool.spec.layers}
        if pool.spec.num_layers != len(windows) or widths != {2}:
            raise ConfigError(
                f"pool: expected {len(windows)} layers of 2 components each, got {pool.spec.canonical()}; "
                "kv_spec_for(config, page_size, dtype) makes the right spec"
            )
        if not pads or min(pads) < 0:
            raise ConfigError(f"pads: expected 0 or more columns for each of 1 or more sequences, got {list(pads)}")
        self.pool = pool
        self.pads = tuple(pads)
        self.tables = [PageTable(pool, pages if not row else ()) for row in range(len(pads))]
        self._loads: list[LoadInFlight] = []
        self._allow_unverified = False
        self._arrived: set[int] = set()
        self.paged: list[PagedLayer | PagedSlidingLayer] = [
            PagedLayer(self, i) if window is None else PagedSlidingLayer(self, i, window)
            for i, window in enumerate(windows)
        ]
        super().__init__(layers=[*self.paged])

    @property
    def rows(self) -> int:
        """Sequences of the batch."""
        return len(self.tables)

    @property
    def table(self) -> PageTable:
        """The pages of the only sequence. ConfigError where there are several: see `tables`."""
        if len(self.tables) != 1:
            raise ConfigError(f"expected a cache of one sequence, got one of {len(self.tables)}")
        return self.tables[0]

    @property
    def tokens(self) -> int:
        """Columns held, those still on their way included: tokens of the longest sequence."""
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
        if self.tokens or self._loads:
            raise ConfigError(f"load: expected an empty cache, got {self.tokens} tokens")
        usable = usable_prefix(tokens, prompt_tokens)
        needed = self.table.pages_for(usable)
        if len(slots) < needed:
            raise ConfigError(f"load: expected at least {needed} slots for {usable} tokens, got {len(slots)}")
        if not needed:
            return None
        self.table.reserve(usable)
        load = engine.load(slots[:needed], self.table.pages[:needed], layerwise=layerwise)
        self.expect([load], usable, allow_unverified=allow_unverified)
        return load

    def expect(self, loads: Sequence[LoadInFlight], columns: int, *, allow_unverified: bool = False) -> None:
        """Loads into pages of `tables` have begun: the first ``columns`` columns count as held from now on.

        Each layer waits for its part, and the last one reads the verdicts, as `load` says.
        """
        self._allow_unverified = allow_unverified
        self._loads = list(loads)
        self._arrived = set()
        for layer in self.paged:
            layer.cumulative_length = columns

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

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For the layers: write columns ``start`` and on of ``layer``, and gather columns ``first`` to the last."""
        stop = start + keys.shape[2]
        self.check_states(layer, keys, values)
        for pad, table in zip(self.pads, self.tables, strict=True):
            if stop > pad:
                table.prepare_write(max(0, start - pad), stop - pad)
        self.wait_layer(layer)  # before the write: the load also covers the rest of its last page
        views = self.views(layer, keys.dtype, values.dtype)
        for view, states in zip(views, (keys, values), strict=True):
            for row, (pad, table) in enumerate(zip(self.pads, self.tables, strict=True)):
                if stop > pad:
                    table.write(view, max(0, start - pad), states[row : row + 1, :, max(0, pad - start) :])
        self.wrote(layer, stop)
        k, v = (self._gather(view, first, stop) for view in views)
        return k, v

    def _gather(self, view: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Columns ``first`` to ``stop - 1`` of every row: a new (rows, heads, columns, dim), zeros for padding."""
        if self.pads == (0,):
            return self.tables[0].gather(view, first, stop)
        _, _, heads, dim = view.shape
        out = torch.zeros((self.rows, heads, stop - first, dim), dtype=view.dtype, device=view.device)
        for row, (pad, table) in enumerate(zip(self.pads, self.tables, strict=True)):
            begin = max(first, pad)
            if begin < stop:
                table.gather(view, begin - pad, stop - pad, out=out[row : row + 1, :, begin - first :])
        return out

    def states(self, layer: int, row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer and sequence, sliding ones too: raw bytes, uint8 (1, heads, tokens, bytes)."""
        self.wait_layer(layer)
        length = max(0, self.paged[layer].cumulative_length - self.pads[row])
        k, v = (self.tables[row].gather(view, 0, length) for view in self.views(layer, torch.uint8, torch.uint8))
        return k, v

    def release(self, wait_s: float = 0.0) -> None:
        """Give the pages back to the pool and forget the tokens."""
        for table in self.tables:
            table.release(wait_s)
        self._loads = []
        for layer in self.paged:
            layer.reset()

    def views(self, layer: int, k_dtype: torch.dtype, v_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool's two components of ``layer``, (pages, page_size, heads, dim), no copy."""
        return self.pool.view(layer, 0, k_dtype), self.pool.view(layer, 1, v_dtype)

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for ``layer`` of the load in flight, once; the last layer reads the verdict."""
        if not self._loads or layer in self._arrived:
            return
        for load in self._loads:
            load.wait_layer(layer)
        if len(self._arrived) + 1 == len(self.paged):
            for load in self._loads:
                self._require_right(load)
            self._loads = []
        self._arrived.add(layer)

    def _require_right(self, load: LoadInFlight) -> None:
        """Raise TransferError on a verdict that is not good."""
        verdict = load.verdict()
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

    def wrote(self, layer: int, length: int) -> None:
        """``layer`` holds ``length`` columns now: hand it to the layer-wise stores that wait for it."""
        for pad, table in zip(self.pads, self.tables, strict=True):
            for store in table.stores:
                if layer in store.unwritten and length - pad >= store.tokens:
                    store.handle.layer_written(layer)
                    store.unwritten.discard(layer)

    def check_states(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse states that the pool's spec does not describe."""
        for component, states in zip(self.pool.spec.layers[layer], (keys, values), strict=True):
            batch, heads, _, dim = states.shape
            if batch != self.rows:
                raise ConfigError(f"expected batch size {self.rows}, one for each sequence of the cache, got {batch}")
            if (heads, dim * states.itemsize) != (component.heads, component.head_bytes):
                raise LayoutError(
                    f"layer {layer}, component {component.name!r}: expected {component.heads} heads of "
                    f"{component.head_bytes} bytes, got {heads} of {dim * states.itemsize} ({states.dtype})"
                )
            if states.device != self.pool.device:
                raise ConfigError(f"layer {layer}: expected states on {self.pool.device}, got {states.device}")
