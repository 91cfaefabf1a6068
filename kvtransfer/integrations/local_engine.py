"""A small engine over one transformers model: a request at a time, with the prefix cache that it is given.

It is what `kvtransfer verify` asks when there is no server, and what the serving benchmark's local server runs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvtransfer.completion import Completion, KVDigests, Prompt
from kvtransfer.integrations.kv_digests import kv_digests
from kvtransfer.integrations.transformers import cache_keyword, usable_prefix
from kvtransfer.kernels.errors import ConfigError

Inspect = Callable[[Cache, tuple[int, ...]], None]
"""Told the cache, and for each row the tokens that were not computed, while the cache still holds everything."""


class Prefixes(Protocol):
    """Where an engine's cached prefixes come from."""

    def generate(
        self, model: PreTrainedModel, ids: torch.Tensor, *, inspect: Inspect | None = None, **options: Any
    ) -> Any:
        """``model.generate(ids, **options)`` over whatever is cached; ``ids`` (1, tokens)."""

    def flush(self) -> None:
        """Forget what the engine itself keeps; lower tiers keep theirs."""

    def close(self) -> None:
        """Give everything back."""


class KeptPrefixes:
    """transformers as it is, with the caches of the last requests kept: what an engine's own prefix cache does.

    most       caches kept; 0: nothing is
    page_size  tokens: a kept cache is cropped to whole pages, as engines do

    Only caches of full attention are reused: others can't be cropped.
    """

    def __init__(self, most: int = 8, page_size: int = 16) -> None:
        self._most, self._page_size = most, page_size
        self._kept: OrderedDict[tuple[int, ...], DynamicCache] = OrderedDict()

    def generate(
        self, model: PreTrainedModel, ids: torch.Tensor, *, inspect: Inspect | None = None, **options: Any
    ) -> Any:
        cache, cached = self._take(ids[0].tolist())
        cache = DynamicCache(config=model.config) if cache is None else cache
        run: Any = model.generate
        out = run(ids, attention_mask=torch.ones_like(ids), **{cache_keyword(model): cache}, **options)
        if inspect is not None:
            inspect(cache, (cached,))
        sequence = out if isinstance(out, torch.Tensor) else out.sequences
        if all(type(layer) is DynamicLayer for layer in cache.layers):
            self._kept[tuple(sequence[0, : int(cache.get_seq_length())].tolist())] = cache
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return out

    def flush(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self.flush()

    def _take(self, prompt: list[int]) -> tuple[DynamicCache | None, int]:
        """The kept cache that shares most whole pages with ``prompt``, cropped to them, and how many tokens."""
        best = max(self._kept, key=lambda kept: _shared(kept, prompt), default=())
        usable = usable_prefix(_shared(best, prompt), len(prompt)) // self._page_size * self._page_size
        if not usable:
            return None, 0
        cache = self._kept.pop(best)
        cache.crop(usable - int(cache.get_seq_length()))
        return cache, usable


class LocalEngine:
    """Answers prompts, greedily. Thread-safe: requests wait for one another.

    encode, decode  text to ids and back; ``prefixes``: where cached prefixes come from
    page_size       of the digests
    """

    def __init__(
        self,
        model: Any,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        prefixes: Prefixes,
        *,
        page_size: int = 16,
    ) -> None:
        self.model, self.encode, self.decode, self.prefixes = model, encode, decode, prefixes
        self._page_size = page_size
        self._lock = threading.Lock()
        eos = model.generation_config.eos_token_id
        self._eos = eos if isinstance(eos, list) else [] if eos is None else [eos]

    def complete(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        tops: bool = False,
        digests: bool = False,
        ignore_eos: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """One answer. ``on_token`` is called with each token's id as soon as it is known, on the calling thread.

        Raises ConfigError on a prompt without tokens, with ids that the model has not, or one that it can't hold.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        longest = int(self.model.config.get_text_config(decoder=True).max_position_embeddings)
        if not ids or max_new_tokens < 1 or len(ids) + max_new_tokens > longest:
            raise ConfigError(
                f"prompt: expected at least 1 token, and {longest} with the new ones at most, "
                f"got {len(ids)} and {max_new_tokens} new"
            )
        told: list[tuple[KVDigests | None, int]] = []

        def inspect(cache: Cache, cached: tuple[int, ...]) -> None:
            told.append((kv_digests(cache, len(ids), self._page_size) if digests else None, cached[0]))

        started = time.perf_counter()
        clock = _Tokens(on_token)
        with self._lock, torch.no_grad():
            out = self.prefixes.generate(
                self.model,
                torch.tensor([ids], device=self.model.device),
                inspect=inspect,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None if ignore_eos or not self._eos else self._eos,
                streamer=clock,
                output_logits=tops,
                return_dict_in_generate=True,
            )
        new = out.sequences[0, len(ids) :].tolist()
        found, cached = told[-1]
        return Completion(
            tokens=[str(token) for token in new],
            text=self.decode(new),
            prompt_tokens=len(ids),
            cached_tokens=cached,
            output_tokens=len(new),
            tops=_best_two(out.logits) if tops else [],
            first_token_s=clock.first_at - started,
            total_s=time.perf_counter() - started,
            digests=found,
        )

    def flush(self) -> None:
        """See `Prefixes.flush`; waits for a request that runs."""
        with self._lock:
            self.prefixes.flush()

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self.prefixes.close()


class _Tokens:
    """A streamer for `generate`: notes when the first new token was there; the first call brings the prompt."""

    def __init__(self, on_token: Callable[[int], None] | None) -> None:
        self._on_token, self._prompt = on_token, True
        self.first_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.first_at = self.first_at or time.perf_counter()
        if self._on_token is not None:
            for token in value.reshape(-1).tolist():
                self._on_token(int(token))

    def end(self) -> None:
        """Nothing to do."""


def _best_two(logits: tuple[torch.Tensor, ...]) -> list[list[tuple[str, float]]]:
    """For each step the two best tokens and their log probabilities; ``logits``: (1, vocabulary) a step."""
    found = []
    for step in logits:
        best = torch.log_softmax(step[0].float(), dim=-1).topk(2)
        found.append([(str(t), p) for t, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)])
    return found


def _shared(kept: tuple[int, ...], prompt: list[int]) -> int:
    """Tokens at the start that are the same."""
    return next((i for i, (a, b) in enumerate(zip(kept, prompt, strict=False)) if a != b), min(len(kept), len(prompt)))
