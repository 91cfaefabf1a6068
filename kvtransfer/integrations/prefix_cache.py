"""PrefixCache: `model.generate` over a `TieredCache`, across calls and, with a disk or a remote tier, across processes.

    with PrefixCache.create(model, "kvtransfer.yaml") as prefixes:
        out = prefixes.generate(model, ids, max_new_tokens=64)

Each call matches its prompts, loads what is there layer by layer while the forward over the rest runs, and stores what
is new. Answers are those of the same computation without us: see docs/transformers.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvtransfer.cache import TieredCache
from kvtransfer.commands import Scope
from kvtransfer.config import Config, load_config
from kvtransfer.group import RankGroup
from kvtransfer.integrations.model_spec import cache_keyword
from kvtransfer.integrations.paged_cache import PagedCache
from kvtransfer.integrations.prefix_build import lay_ground
from kvtransfer.integrations.prefix_parts import PrefixStats, PromptOnce, end_tokens, new_tokens
from kvtransfer.integrations.prefix_run import PrefixRun
from kvtransfer.integrations.prompt_batch import Ids, PromptBatch
from kvtransfer.kernels.errors import CapacityError, ConfigError, DeadlineExceeded, TransferError
from kvtransfer.pool import KVPool
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.tiers.base import Tier

Inspect = Callable[[Cache, tuple[int, ...]], None]
"""Told the cache, and for each row the tokens that were not computed, while the cache still holds everything."""

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
_TRIES = 3  # the last one loads nothing
_POLL_S = 0.001
_ARRIVAL_POLL_S = 0.02
_ONE_EACH = ("num_beams", "num_return_sequences", "num_beam_groups")


class PrefixCache:
    """Keeps the KV of what a model has read and written. Thread-safe.

    tiers  the cache; ``pool`` is its pool: sequences live there while they run
    scope  what pages belong to: content namespace and salt. It must name the weights: `create` sees to it
    role   "prefill" keeps prompts only; "decode" waits, ``arrival_s`` at most, until somebody else has stored the
           prompt where it can be read, and keeps what it generates; "both" waits for nothing and keeps everything
    ranks  of a tensor-parallel model: all of them call `generate` alike, and use what all have. Loads are then complete
           and verified before the forward begins, since no rank can give it up alone
    owned  called at `close`, the last one first
    """

    def __init__(
        self,
        tiers: TieredCache,
        pool: KVPool,
        scope: Scope | None = None,
        *,
        role: Role = "both",
        arrival_s: float = 10.0,
        ranks: RankGroup | None = None,
        owned: Sequence[Callable[[], object]] = (),
    ) -> None:
        if tiers.page_size != pool.spec.page_size:
            raise ConfigError(f"pool: expected pages of {tiers.page_size} tokens, got {pool.spec.page_size}")
        if role not in ROLES or not 0 <= arrival_s <= 1e6:
            raise ConfigError(f"expected a role of {', '.join(ROLES)} and seconds, got {role!r} and {arrival_s}")
        self.tiers, self.pool = tiers, pool
        self.scope = tiers.scope if scope is None else scope
        self.role, self.arrival_s, self.ranks = role, arrival_s, ranks
        self._owned = tuple(owned)
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
        role: Role = "both",
        arrival_s: float = 10.0,
        ranks: RankGroup | None = None,
        **more: Any,
    ) -> Self:
        """A cache for ``model`` as configured (None: as the environment says), with a pool on the model's device.

        pool_tokens  room for the sequences that run at a time, and those that are still being stored
        model_name   what stands for the weights; None: ``namespace.model``, or a fingerprint of them
        tiers, more  instead of the configured lower tiers; for `kvtransfer.cache_build.create`
        role, arrival_s, ranks  see the class. With ``share_across_tp`` configured, shared tiers hold records by head
                     group, which ranks of other tensor-parallel sizes can read
        """
        if not isinstance(config, Config):
            config = load_config(config)
        ground = lay_ground(
            model,
            config,
            page_size=page_size,
            pool_tokens=pool_tokens,
            model_name=model_name,
            adapter=adapter,
            tiers=tiers,
            ranks=ranks,
            **more,
        )
        owned = (ground.tiers.close,)
        return cls(ground.tiers, ground.pool, ground.scope, role=role, arrival_s=arrival_s, ranks=ranks, owned=owned)

    def generate(
        self,
        model: PreTrainedModel,
        ids: Ids,
        *,
        attention_mask: torch.Tensor | None = None,
        inspect: Inspect | None = None,
        store: bool = True,
        **options: Any,
    ) -> Any:
        """``model.generate(ids, **options)``, without computing what the cache has. The same result.

        ids      (rows, tokens), several prompts padded on the left with their ``attention_mask``; a list of ids, which
                 is one prompt; or lists of ids
        inspect  see `Inspect`
        store    keep what is new; False for what nobody will ask again

        A batch uses the columns that all of its rows have. Where a page fails on its way the forward is given up before
        a token came out, and done again with what is left. Raises CapacityError where the pool is too small,
        ConfigError on beams, several sequences a prompt, or ids that don't fit or that the model has not.
        """
        wrong = {name: options[name] for name in _ONE_EACH if options.get(name, 1) not in (1, None)}
        if wrong:
            raise ConfigError(f"generate: expected one sequence a prompt and no beams, got {wrong}")
        pad = options.get("pad_token_id")
        batch = PromptBatch.of(ids, attention_mask, 0 if pad is None else int(pad), model.device)
        embeddings: Any = model.get_input_embeddings()
        known = int(embeddings.num_embeddings)
        least, most = min(map(min, batch.rows)), max(map(max, batch.rows))
        if not 0 <= least <= most < known:  # on a GPU such an id ends the process
            raise ConfigError(f"ids: expected token ids of 0..{known - 1}, got {least}..{most}")
        longest = batch.columns + new_tokens(model, batch.columns, options)
        self._await_stores(batch)
        self._fetch(batch)
        streamer = options.get("streamer")
        if streamer is not None:
            streamer = options["streamer"] = PromptOnce(streamer)
        for attempt in range(1, _TRIES + 1):
            if streamer is not None:
                streamer.begin()
            run = self._reserve(model, batch, longest)
            try:
                if attempt < _TRIES:
                    run.load(self.ranks)
                out = self.forward(model, run, options)
                if inspect is not None:
                    inspect(run.cache, run.cached)
            except TransferError:
                run.end()
                if attempt == _TRIES or not run.loaded:
                    raise
                self._count(retries=1)
                continue
            except BaseException:
                run.end()
                raise
            lost = run.store(self._rows(model, run, out, options)) if store else 0
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

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything is stored, in lower tiers too. The device keeps no prefixes: it forgets nothing.

        Raises DeadlineExceeded where lower tiers are not done in time.
        """
        while self._reap(wait=True):
            pass
        until = time.monotonic() + timeout_s
        while not self.tiers.directory.idle:
            if time.monotonic() > until:
                raise DeadlineExceeded(f"flush: lower tiers were not done after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Wait for stores to the host; close what was made here, which sees to the lower tiers."""
        while self._reap(wait=True):
            pass
        owned, self._owned = self._owned, ()
        for close in reversed(owned):
            close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _await_stores(self, batch: PromptBatch) -> None:
        """What begins as one of the prompts and is on its way to the host can be hit in a moment: the next turn of a
        conversation comes at once."""
        size = self.tiers.page_size
        starts = [tuple(row[:size]) for row in batch.rows]
        with self._lock:
            near = [run for run in self._leaving if any(start in run.starts for start in starts)]
        for run in near:
            run.wait()

    def _fetch(self, batch: PromptBatch) -> None:
        """Bring what lower tiers have to the host, as long as the stop policy says; as "decode" until all is there."""
        until = time.monotonic() + (self.arrival_s if self.role == "decode" else 0.0)
        while True:
            with ExitStack() as stop:
                jobs: list[PrefetchJob] = []
                for row in batch.rows:
                    jobs.append(self.tiers.prefetch(row, self.scope))
                    stop.callback(self.tiers.stop, jobs[-1])
                for job in jobs:
                    while not self.tiers.admit(job):
                        time.sleep(_POLL_S)
            if time.monotonic() >= until or all(self._has(row) for row in batch.rows):
                return
            time.sleep(_ARRIVAL_POLL_S)

    def _has(self, row: list[int]) -> bool:
        """Whether every whole page of a prompt is there."""
        with self.tiers.match(row, self.scope) as hit:
            return hit.pages == len(row) // self.tiers.page_size

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
                    pages = sum(
                        table.pages_for(columns - pad) for pad, table in zip(batch.pads, cache.tables, strict=True)
                    )
                    raise CapacityError(
                        f"pool: expected {pages} free pages for {len(batch.rows)} sequences of up to {columns} tokens, "
                        f"got {self.pool.free_page_count} of {self.pool.num_pages}; make it larger (pool_tokens), or "
                        "the batch smaller"
                    ) from error

    def forward(self, model: PreTrainedModel, run: PrefixRun, options: dict[str, Any]) -> Any:
        """``model.generate`` over ``run``, whose loads are on their way. For `generate`; may be overridden."""
        generate: Any = model.generate
        more = {**options, cache_keyword(model): run.cache}
        return generate(run.batch.ids, attention_mask=run.batch.mask, **more)

    def _rows(self, model: PreTrainedModel, run: PrefixRun, out: Any, options: dict[str, Any]) -> list[list[int]]:
        """For each row its tokens whose KV is there, without what follows an end of text."""
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        ends = end_tokens(model, options)
        rows = []
        for row, pad, prompt in zip(sequences.tolist(), run.batch.pads, run.batch.rows, strict=True):
            tokens = row[pad : len(prompt) + pad if self.role == "prefill" else run.cache.tokens]
            end = next((i for i, token in enumerate(tokens) if i >= len(prompt) and token in ends), len(tokens))
            rows.append(tokens[: end + 1])
        return rows

    def _reap(self, *, wait: bool) -> bool:
        """Give back the pages of what has been stored; ``wait``: at least of the oldest. False: none is left."""
        with self._lock:
            if not self._leaving or not (wait or self._leaving[0].done()):
                return False
            run = self._leaving.popleft()
        try:
            moved = run.end()
        except BaseException:  # interrupted, or its pages are under a transfer still: they are to go back later
            with self._lock:
                self._leaving.appendleft(run)
            raise
        self._count(loaded_pages=moved.loaded, stored_pages=moved.stored, lost_pages=moved.lost)
        return True

    def _count(self, **more: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})
