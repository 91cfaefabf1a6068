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
    stored_pages  whole pages that the cache has after a call, new or not: once a call, however many tiers take them;
                  ``lost_pages`` it has not
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    loaded_pages: int = 0
    stored_pages: int = 0
    lost_pages: int = 0


class PromptOnce:
    """A streamer over several tries, each of which hands over the prompt first, if it gets so far: ``streamer`` has it
    once. Call `begin` before each."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._given, self._first = False, True

    def begin(self) -> None:
        self._first = True

    def put(self, value: torch.Tensor) -> None:
        again, self._first = self._first and self._given, False
        if not again:
            self._given = True
            self._streamer.put(value)

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
