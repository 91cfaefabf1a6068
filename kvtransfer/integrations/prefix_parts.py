"""Small parts of a `PrefixCache`: its totals, and what it reads out of the options of `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class PrefixStats:
    """Totals. Tokens are those of prompts; ``cached_tokens`` were loaded and not computed.

    retries       forwards that were given up because a page of their load failed
    loaded_pages  to the device, of prompts that were answered
    stored_pages  whole pages that the cache has now, new or not; ``lost_pages`` it has not
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    loaded_pages: int = 0
    stored_pages: int = 0
    lost_pages: int = 0


class WithoutPrompt:
    """A streamer that has seen the prompt already, which `generate` hands over first."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._first = streamer, True

    def put(self, value: torch.Tensor) -> None:
        if not self._first:
            self._streamer.put(value)
        self._first = False

    def end(self) -> None:
        self._streamer.end()


def new_tokens(model: PreTrainedModel, columns: int, options: dict[str, Any]) -> int:
    """Tokens that `generate` may write at most."""
    given = options.get("generation_config") or model.generation_config
    new = options.get("max_new_tokens") or given.max_new_tokens
    if new is None:
        total = options.get("max_length") or given.max_length
        new = 20 if total is None else max(1, int(total) - columns)
    return int(new)


def end_tokens(model: PreTrainedModel, options: dict[str, Any]) -> set[int]:
    """Tokens that end a sequence, with these options of `generate`."""
    given = options.get("generation_config") or model.generation_config
    ends = options.get("eos_token_id", given.eos_token_id)
    if ends is None:
        return set()
    return {int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends])}
