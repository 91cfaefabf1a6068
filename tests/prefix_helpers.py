"""What tests of `PrefixCache` share: configurations, the computation without us, and records of tiers that can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvtransfer.config import Config, load_config
from kvtransfer.integrations.transformers import cache_keyword


def config(folder: Path | None = None, *, host_pages: int = 400, **more: Any) -> Config:
    """Host memory, and a disk in ``folder`` where one is given; short prompts are fetched too."""
    tiers: dict[str, Any] = {"host": {"pages": host_pages}}
    if folder is not None:
        tiers["disk"] = {"paths": [str(folder)], "cache_gb": 0.25, "clean_every_s": 1000.0}
    return load_config(arguments={"tiers": tiers, "prefetch": {"min_tokens": 0}, **more}, environment={})


def prompts_of(lengths: list[int], vocabulary: int = 256, seed: int = 1) -> list[list[int]]:
    """Prompts of these lengths; every second one begins as the one before it."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    for number, length in enumerate(lengths):
        row = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        if number % 2:
            shared = min(length, len(rows[-1])) * 2 // 3
            row[:shared] = rows[-1][:shared]
        rows.append(row)
    return rows


def padded(rows: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), padded on the left."""
    columns = max(map(len, rows))
    ids = torch.tensor([[pad] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def plain(model: Any, rows: list[list[int]], new_tokens: int, split: int = 0, **options: Any) -> list[list[int]]:
    """What transformers' own cache gives: the first ``split`` columns in a forward of their own, then the rest."""
    ids, mask = (part.to(model.device) for part in padded(rows))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        if split:
            positions = (mask[:, :split].cumsum(-1) - 1).clamp(min=0)
            model.base_model(
                input_ids=ids[:, :split],
                attention_mask=mask[:, :split],
                position_ids=positions,
                use_cache=True,
                **{cache_keyword(model): cache},
            )
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **{cache_keyword(model): cache},
            **options,
        )
    return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def new_tokens_of(out: torch.Tensor, rows: list[list[int]]) -> list[list[int]]:
    """Without the prompts."""
    return out[:, max(map(len, rows)) :].tolist()
