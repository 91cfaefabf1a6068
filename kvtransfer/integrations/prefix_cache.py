"""PrefixCache: `model.generate` over a `TieredCache`, across calls and, with a disk or a remote tier, across processes.

    with PrefixCache.create(model, "kvtransfer.yaml") as prefixes:
        out = prefixes.generate(model, ids, max_new_tokens=64)

Each call matches its prompts, loads what is there layer by layer while the forward over the rest runs, and stores what
is new. Answers are those of the same computation without us: see docs/transformers.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvtransfer.cache import TieredCache
from kvtransfer.commands import Scope
from kvtransfer.config import Config, load_config
from kvtransfer.integrations.fingerprint import fingerprint
from kvtransfer.integrations.model_spec import cache_keyword, pool_for
from kvtransfer.integrations.paged_cache import PagedCache
from kvtransfer.integrations.prefix_run import PrefixRun
from kvtransfer.integrations.prompt_batch import Ids, PromptBatch
from kvtransfer.kernels.errors import CapacityError, ConfigError, TransferError
from kvtransfer.pool import KVPool
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.keys import Namespace

Inspect = Callable[[Cache, tuple[int, ...]], None]
"""Told the cache, and for each row the tokens that were not computed, while the cache still holds everything."""

_TRIES = 3  # the last one loads nothing
_POLL_S = 0.001
_ONE_EACH = ("num_beams", "num_return_sequences", "num_beam_groups")


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


class PrefixCache:
    """Keeps the KV of what a model has read and written. Thread-safe.

    tiers  the cache; ``pool`` is its pool: sequences live there while they run
    scope  what pages belong to: content namespace and salt. It must name the weights: `create` sees to it
    owned  close the cache with this
    """

    def __init__(self, tiers: TieredCache, pool: KVPool, scope: Scope | None = None, *, owned: bool = False) -> None:
        if tiers.page_size != pool.spec.page_size:
            raise ConfigError(f"pool: expected pages of {tiers.page_size} tokens, got {pool.spec.page_size}")
        self.tiers, self.pool = tiers, pool
        self.scope = tiers.scope if scope is None else scope
        self._owned = owned
        self._lock = threading.Lock()
        self._stats = PrefixStats()
        self._leaving: deque[PrefixRun] = deque()  # answered, and still being stored

    @classmethod
    def create(
        cls,
        model: PreTrainedModel,
        config: Config | str | Path | None = None,
        *,
        page_size: int = 16,
        pool_tokens: int = 16_384,
        model_name: str | None = None,
        adapter: str | None = None,
        tiers: Mapping[str, Tier] | None = None,
        **more: Any,
    ) -> PrefixCache:
        """A cache for ``model`` as configured (None: as the environment says), with a pool on the model's device.

        pool_tokens  room for the sequences that run at a time, and those that are still being stored
        model_name   what stands for the weights; None: ``namespace.model``, or a fingerprint of them
        tiers, more  instead of the configured lower tiers; for `kvtransfer.cache_build.create`
        """
        if not isinstance(config, Config):
            config = load_config(config)
        pool = pool_for(model, -(-pool_tokens // page_size), page_size)
        name = model_name or config.namespace.model or fingerprint(model)
        dtype = str(model.dtype).removeprefix("torch.")
        space = Namespace.of(pool.spec, model=name, kv_dtype=dtype, adapter=adapter)
        scope = Scope(space.digest(), config.namespace.salt_bytes())
        return cls(TieredCache.create(pool, config, scope=scope, tiers=tiers, **more), pool, scope, owned=True)

    def generate(
        self,
        model: PreTrainedModel,
        ids: Ids,
        *,
        attention_mask: torch.Tensor | None = None,
        inspect: Inspect | None = None,
        **options: Any,
    ) -> Any:
        """``model.generate(ids, **options)``, without computing what the cache has. The same result.

        ids      (rows, tokens), several prompts padded on the left with their ``attention_mask``; or lists of ids
        inspect  see `Inspect`

        A batch uses the columns that all of its rows have. Where a page fails on its way the forward is given up before
        a token came out, and done again with what is left. Raises CapacityError where the pool is too small,
        ConfigError on beams, several sequences a prompt, or ids that don't fit.
        """
        wrong = {name: options[name] for name in _ONE_EACH if options.get(name, 1) not in (1, None)}
        if wrong:
            raise ConfigError(f"generate: expected one sequence a prompt and no beams, got {wrong}")
        pad = options.get("pad_token_id")
        batch = PromptBatch.of(ids, attention_mask, 0 if pad is None else int(pad), model.device)
        longest = batch.columns + _new_tokens(model, batch.columns, options)
        self._fetch(batch)
        for attempt in range(1, _TRIES + 1):
            run = self._reserve(model, batch, longest)
            try:
                if attempt < _TRIES:
                    run.load()
                out = self.forward(model, run, options)
                if inspect is not None:
                    inspect(run.cache, run.cached)
            except TransferError:
                run.end()
                if attempt == _TRIES or not run.loaded:
                    raise
                self._count(retries=1)
                if attempt == 1 and options.get("streamer") is not None:
                    options["streamer"] = _WithoutPrompt(options["streamer"])
                continue
            except BaseException:
                run.end()
                raise
            lost = run.store(self._rows(model, run, out, options))
            with self._lock:
                self._leaving.append(run)
            self._count(
                prompts=len(batch.rows),
                prompt_tokens=sum(map(len, batch.rows)),
                cached_tokens=sum(run.cached),
                lost_pages=lost,
            )
            self._reap(wait=False)
            return out
        raise AssertionError("unreachable")

    def stats(self) -> PrefixStats:
        """Totals so far. Pages of stores that are under way are not counted yet: `flush` waits for them."""
        self._reap(wait=False)
        with self._lock:
            return self._stats

    def flush(self) -> None:
        """Wait until everything is stored. The device keeps no prefixes: there is nothing to forget."""
        while self._reap(wait=True):
            pass

    def close(self) -> None:
        """Wait for stores; close the cache, if it was made here."""
        self.flush()
        if self._owned:
            self.tiers.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _fetch(self, batch: PromptBatch) -> None:
        """Bring what lower tiers have to the host, as long as the stop policy says."""
        with ExitStack() as stop:
            jobs: list[PrefetchJob] = []
            for row in batch.rows:
                jobs.append(self.tiers.prefetch(row, self.scope))
                stop.callback(self.tiers.stop, jobs[-1])
            for job in jobs:
                while not self.tiers.admit(job):
                    threading.Event().wait(_POLL_S)

    def _reserve(self, model: PreTrainedModel, batch: PromptBatch, columns: int) -> PrefixRun:
        """Pages for the whole batch and what it will write; waits for stores where there is no room."""
        cache = PagedCache(model, self.pool, pads=batch.pads)
        while True:
            try:
                for pad, table in zip(batch.pads, cache.tables, strict=True):
                    table.reserve(columns - pad)
                return PrefixRun(self.tiers, self.scope, cache, batch)
            except CapacityError as error:
                if not self._reap(wait=True):
                    cache.release()
                    raise CapacityError(
                        f"pool: expected room for {len(batch.rows)} sequences of {columns} tokens, got {error}; "
                        "make it larger (pool_tokens), or the batch smaller"
                    ) from error

    def forward(self, model: PreTrainedModel, run: PrefixRun, options: dict[str, Any]) -> Any:
        """``model.generate`` over ``run``, whose loads are on their way. For `generate`; may be overridden."""
        generate: Any = model.generate
        more = {**options, cache_keyword(model): run.cache}
        return generate(run.batch.ids, attention_mask=run.batch.mask, **more)

    def _rows(self, model: PreTrainedModel, run: PrefixRun, out: Any, options: dict[str, Any]) -> list[list[int]]:
        """For each row its tokens whose KV is there, without what follows an end of text."""
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        ends = _end_tokens(model, options)
        rows = []
        for row, pad, prompt in zip(sequences.tolist(), run.batch.pads, run.batch.rows, strict=True):
            tokens = row[pad : run.cache.tokens]
            end = next((i for i, token in enumerate(tokens) if i >= len(prompt) and token in ends), len(tokens))
            rows.append(tokens[: end + 1])
        return rows

    def _reap(self, *, wait: bool) -> bool:
        """Give back the pages of what has been stored; ``wait``: at least of the oldest. False: none is left."""
        with self._lock:
            if not self._leaving or not (wait or self._leaving[0].done()):
                return False
            run = self._leaving.popleft()
        moved = run.end()
        self._count(loaded_pages=moved.loaded, stored_pages=moved.stored, lost_pages=moved.lost)
        return True

    def _count(self, **more: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})


class _WithoutPrompt:
    """A streamer that has seen the prompt already, which `generate` hands over first."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._first = streamer, True

    def put(self, value: torch.Tensor) -> None:
        if not self._first:
            self._streamer.put(value)
        self._first = False

    def end(self) -> None:
        self._streamer.end()


def _new_tokens(model: PreTrainedModel, columns: int, options: dict[str, Any]) -> int:
    """Tokens that `generate` may write at most."""
    given = options.get("generation_config") or model.generation_config
    new = options.get("max_new_tokens") or given.max_new_tokens
    if new is None:
        total = options.get("max_length") or given.max_length
        new = 20 if total is None else max(1, int(total) - columns)
    return int(new)


def _end_tokens(model: PreTrainedModel, options: dict[str, Any]) -> set[int]:
    given = options.get("generation_config") or model.generation_config
    ends = options.get("eos_token_id", given.eos_token_id)
    if ends is None:
        return set()
    return {int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends])}
