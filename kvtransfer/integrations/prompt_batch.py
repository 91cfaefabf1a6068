"""Several prompts of mixed length as one batch, padded on the left."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

import torch

from kvtransfer.kernels.errors import ConfigError

Ids = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class PromptBatch:
    """rows: token ids without padding; pads: columns before each; ids, mask: (rows, columns) on the model's device."""

    rows: list[list[int]]
    pads: tuple[int, ...]
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def columns(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.ids.shape[1])

    @classmethod
    def of(cls, ids: Ids, mask: torch.Tensor | None, pad_token: int, device: torch.device) -> PromptBatch:
        """Of a (rows, columns) tensor with its attention mask, zeros on the left, as tokenizers give it with
        ``padding_side="left"``; of a list of ids, which is one prompt, as tokenizers give it for a text; or of lists of
        ids, which are padded here. Raises ConfigError on anything else.
        """
        if isinstance(ids, torch.Tensor):
            if ids.ndim != 2 or ids.is_floating_point() or (mask is not None and mask.shape != ids.shape):
                raise ConfigError(
                    f"ids: expected integers (rows, columns) and a mask of the same shape, got {tuple(ids.shape)} "
                    f"{ids.dtype}{'' if mask is None else f' and {tuple(mask.shape)}'}"
                )
            kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            pads = tuple((~kept).sum(dim=1).tolist())
            if any(not bool(row[pad:].all()) for row, pad in zip(kept, pads, strict=True)):
                raise ConfigError('attention_mask: expected zeros on the left only; tokenize with padding_side="left"')
            rows = [row[pad:].tolist() for row, pad in zip(ids, pads, strict=True)]
            columns = int(ids.shape[1])
        else:
            if mask is not None:
                raise ConfigError("attention_mask: expected none with lists of ids, which are padded here")
            rows = _rows(ids)
            columns = max(map(len, rows), default=0)
            pads = tuple(columns - len(row) for row in rows)
        if not rows or not all(rows):
            raise ConfigError(
                f"ids: expected at least one prompt and a token in each, got {list(map(len, rows))} tokens"
            )
        padded = [[pad_token] * pad + row for pad, row in zip(pads, rows, strict=True)]
        where = torch.arange(columns)[None, :] >= torch.tensor(pads)[:, None]
        return cls(rows, pads, torch.tensor(padded, device=device), where.long().to(device))

    def columns_of(self, tokens: Sequence[int]) -> int:
        """Columns that are there when of each row so many leading tokens are: none of the batch may lack any, and a
        token of each row is left to compute."""
        there = [pad + min(n, len(row) - 1) for pad, n, row in zip(self.pads, tokens, self.rows, strict=True)]
        return min(there)

    def tokens_in(self, columns: int) -> list[int]:
        """For each row, its tokens within the first ``columns`` columns."""
        return [max(0, columns - pad) for pad in self.pads]


def _rows(ids: Any) -> list[list[int]]:
    """Lists of ids, or the one list that there is."""
    try:
        prompts = list(ids)
        if prompts and all(isinstance(one, Integral) for one in prompts):
            prompts = [prompts]
        return [[index(token) for token in prompt] for prompt in prompts]
    except TypeError as error:
        raise ConfigError(
            f"ids: expected a tensor (rows, columns), a list of token ids, or a list of such lists, got "
            f"{type(ids).__name__} {reprlib.repr(ids)}"
        ) from error
