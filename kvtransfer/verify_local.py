"""A local transformers model as what `kvtransfer verify` asks: by itself, or with a `PrefixCache`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

from kvtransfer.completion import Completion, Prompt
from kvtransfer.config import Config, load_config
from kvtransfer.demo import repeatable_attention
from kvtransfer.demo_model import LoadedModel, load_model, pick_device
from kvtransfer.integrations.local_engine import KeptPrefixes, LocalEngine
from kvtransfer.integrations.prefix_cache import PrefixCache
from kvtransfer.integrations.prefix_run import PrefixRun
from kvtransfer.prompts import NamedPrompt
from kvtransfer.verify_options import VerifyOptions

_SPARE_TOKENS = 64  # a page that is full in part, on both ends


class FlippingPrefixCache(PrefixCache):
    """One bit of the loaded KV is turned over, after it was verified: the fault that nobody but a comparison sees.

    page  of each prompt; prompts of which it is not loaded stay as they are
    """

    page = 0

    def forward(self, model: Any, run: PrefixRun, options: dict[str, Any]) -> Any:
        if (self.page + 1) * self.pool.spec.page_size <= run.cached[0]:
            for load in run.loads:
                load.result()
            layer = len(run.cache.paged) // 2
            view = run.cache.views(layer, torch.uint8, torch.uint8)[0]
            view[int(run.cache.table.pages[self.page]), 0, 0, 0] ^= 1
        return super().forward(model, run, options)


class LocalTarget:
    """An engine over a model in this process."""

    def __init__(self, name: str, engine: LocalEngine, prefixes: PrefixCache | None = None) -> None:
        self.name, self._engine, self._prefixes = name, engine, prefixes

    def complete(self, prompt: Prompt, max_new_tokens: int) -> Completion:
        return self._engine.complete(prompt, max_new_tokens, tops=True, digests=True, ignore_eos=True)

    def flush(self) -> None:
        self._engine.flush()

    def counts(self) -> list[str]:
        if self._prefixes is None:
            return []
        stats = self._prefixes.stats()
        return [
            f"stored, or there already: {stats.stored_pages:,} pages of all answers, not stored: {stats.lost_pages:,}; "
            f"forwards done again because a page failed: {stats.retries:,}"
        ]


class LocalModel:
    """A model that was loaded once, for both phases."""

    def __init__(self, options: VerifyOptions, console: Console) -> None:
        self._options = options
        self._device = pick_device(options.device)
        self._loaded: LoadedModel = load_model(options.model, options.random_weights, self._device, console)

    def lengths(self, prompts: Sequence[NamedPrompt]) -> list[int]:
        """Tokens of each prompt."""
        return [len(self._loaded.encode(p.prompt) if isinstance(p.prompt, str) else p.prompt) for p in prompts]

    @contextmanager
    def alone(self) -> Iterator[LocalTarget]:
        """The model with transformers' own cache."""
        prefixes = KeptPrefixes(page_size=self._options.page_size)
        engine = LocalEngine(
            self._loaded.model, self._loaded.encode, self._loaded.decode, prefixes, page_size=self._options.page_size
        )
        with repeatable_attention(self._device):
            yield LocalTarget(f"{self._loaded.name}, transformers' own cache", engine)
        engine.close()

    @contextmanager
    def with_us(self, lengths: Sequence[int]) -> Iterator[LocalTarget]:
        """The model with a `PrefixCache`, whose pool holds the longest of prompts of these lengths twice; its host
        memory holds them all where no configuration says otherwise."""
        options, kind = self._options, PrefixCache
        spare = options.max_new_tokens + _SPARE_TOKENS + options.page_size
        if options.flip_page is not None:
            kind = FlippingPrefixCache
        prefixes = kind.create(
            self._loaded.model,
            options.config or self._config(sum(lengths) + spare * len(lengths)),
            page_size=options.page_size,
            pool_tokens=2 * (max(lengths) + spare),
        )
        if isinstance(prefixes, FlippingPrefixCache) and options.flip_page is not None:
            prefixes.page = options.flip_page
        with prefixes, repeatable_attention(self._device):
            engine = LocalEngine(
                self._loaded.model, self._loaded.encode, self._loaded.decode, prefixes, page_size=options.page_size
            )
            yield LocalTarget(f"{self._loaded.name}, with kvtransfer", engine, prefixes)

    def _config(self, tokens: int) -> Config:
        """What the environment says; without a word there just as much host memory as ``tokens`` need."""
        config = load_config()
        if config != Config():
            return config
        return load_config(arguments={"tiers": {"host": {"pages": -(-tokens // self._options.page_size)}}})
