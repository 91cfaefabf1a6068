"""One attempt of `PrefixCache.generate`: the pages of a batch, the loads into them, and what is stored afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kvtransfer.cache import TieredCache
from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.commands import Scope
from kvtransfer.integrations.paged_cache import PagedCache
from kvtransfer.integrations.prompt_batch import PromptBatch
from kvtransfer.kernels.errors import DeadlineExceeded, TierError, TransferError
from kvtransfer.tiers.base import PageStatus

_FREE_S = 30.0


class Moved(NamedTuple):
    """Pages: loaded; stored, or there already; not stored."""

    loaded: int
    stored: int
    lost: int


class PrefixRun:
    """``cache`` holds the pages of ``batch``; they go back to its pool by `end`, once nothing moves them any more.

    cached  for each row the tokens that were not computed
    loaded  whether anything was to be loaded, by ``loads``
    """

    def __init__(self, tiers: TieredCache, scope: Scope, cache: PagedCache, batch: PromptBatch) -> None:
        self.cache, self.batch = cache, batch
        self.cached: tuple[int, ...] = (0,) * len(batch.rows)
        self.loaded = False
        self.stores: list[CacheStore] = []
        self._tiers, self._scope = tiers, scope
        self.loads: list[CacheLoad] = []

    def load(self) -> None:
        """Match every row and begin to load what all of them have. Pages must have been reserved.

        Returns when what lies in lower tiers has come to the host, or will not come; from there on layers arrive while
        the forward runs. Raises TransferError where it can't be begun.
        """
        page_size = self._tiers.page_size
        with ExitStack() as held:
            hits = [held.enter_context(self._tiers.match(row, self._scope)) for row in self.batch.rows]
            columns = self.batch.columns_of([hit.tokens for hit in hits])
            rows: list[tuple[int, CacheLoad]] = []
            for row, tokens in enumerate(self.batch.tokens_in(columns)):
                pages = -(-tokens // page_size)
                if pages:
                    self.loaded = True
                    ids = self.cache.tables[row].pages[:pages]
                    load = self._tiers.load(hits[row], ids, layerwise=True, pages=pages)
                    self.loads.append(load)
                    rows.append((row, load))
        there = [len(tokens) for tokens in self.batch.rows]  # rows without a load lack nothing
        for row, load in rows:
            there[row] = load.await_submitted() * page_size
        columns = min(columns, self.batch.columns_of(there))
        self.cached = tuple(self.batch.tokens_in(columns))
        if any(self.cached):
            self.cache.expect(self.loads, columns)
        else:
            self._settle()

    def store(self, rows: Sequence[Sequence[int]]) -> int:
        """Begin to store the whole pages of ``rows``: for each its tokens whose KV is there. Returns pages that no
        tier took from the start."""
        lost = 0
        for tokens, table in zip(rows, self.cache.tables, strict=True):
            pages = len(tokens) // self._tiers.page_size
            if not pages:
                continue
            try:
                self.stores.append(self._tiers.store(tokens, table.pages[:pages], self._scope))
            except TierError:  # the cache goes on without: it is counted
                lost += pages
        return lost

    def done(self) -> bool:
        """Whether nothing moves the pages any more."""
        return all(store.done() for store in self.stores) and all(load.done() for load in self.loads)

    def wait(self) -> None:
        """Until `done`, or the deadlines of the stores."""
        for store in self.stores:
            with suppress(DeadlineExceeded):  # it is cancelled then, and its pages have statuses
                store.result()

    def end(self) -> Moved:
        """Wait, give the pages back."""
        self.wait()
        loaded = sum(load.usable_pages for load in self.loads)
        self._settle()
        for table in self.cache.tables:
            self._tiers.require_free(table.pages, wait_s=_FREE_S)
        self.cache.release(_FREE_S)
        statuses = [status for store in self.stores for status in store.statuses]
        stored = sum(status is PageStatus.OK for status in statuses)
        return Moved(loaded, stored, len(statuses) - stored)

    def _settle(self) -> None:
        """End loads that are not wanted any more."""
        for load in self.loads:
            load.cancel()
            with suppress(TransferError):  # it was given up: how it ended is no matter
                load.result()
        self.loads = []
