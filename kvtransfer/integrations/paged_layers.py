"""The layers of a `PagedCache`: what `update` writes and what attention gets, full and sliding-window."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtransfer.kernels.errors import ConfigError


class Owner(Protocol):
    """What a layer asks of its cache. Columns are places in the batch: tokens of its longest sequence."""

    @property
    def rows(self) -> int:
        """Sequences of the batch."""

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (rows, heads, tokens, dim) states as columns ``start`` and on; returns columns ``first`` and on."""


class _Paged:
    """What full and sliding layers share. ``owner`` is the cache, ``index`` the layer's number."""

    owner: Owner
    index: int
    past_tokens: int | None
    cumulative_length: int
    is_initialized: bool

    def _attach(self, owner: Owner, index: int, window: int | None) -> None:
        self.owner, self.index = owner, index
        self.past_tokens = None if window is None else window - 1
        self.cumulative_length = 0

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, then gather what attention may look at: all, or window - 1 past tokens and the new."""
        start = self.cumulative_length
        first = 0 if self.past_tokens is None else max(0, start - self.past_tokens)
        gathered = self.owner.append(self.index, keys, values, start, first)
        self.cumulative_length = start + keys.shape[2]
        return gathered

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
            raise ConfigError(f"a PagedCache holds {self.owner.rows} sequences: expected 1 repeat, got {repeats}")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.tolist() != list(range(self.owner.rows)):
            raise ConfigError(
                f"a PagedCache holds {self.owner.rows} sequences: expected all of them in their order, "
                f"got {indices.tolist()}; beams are not supported"
            )


class PagedLayer(_Paged, DynamicLayer):
    """Full attention over pages."""

    def __init__(self, owner: Owner, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attach(owner, index, None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (rows, heads, tokens, dim) states; returns all tokens, contiguous, (rows, heads, length, dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        self._crop(tokens_to_remove)


class PagedSlidingLayer(_Paged, DynamicSlidingWindowLayer):
    """Sliding-window attention over pages: the pool keeps all tokens, attention gets the window's.

    Mask sizes are those of `DynamicSlidingWindowLayer`: they follow from `cumulative_length` alone.
    """

    def __init__(self, owner: Owner, index: int, window: int) -> None:
        super().__init__(sliding_window=window)
        self._attach(owner, index, window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (rows, heads, tokens, dim) states; returns at most window - 1 past tokens and the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        self._crop(tokens_to_remove)
