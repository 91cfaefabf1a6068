"""One attempt of `PrefixCache.generate`: the pages of a batch, the loads into them, and what is stored afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kvtransfer.cache import TieredCache
from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.commands import Scope
from kvtransfer.group import RankGroup
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
        self.starts: set[tuple[int, ...]] = set()  # first pages of what is being stored
        self.stores: list[CacheStore] = []
        self._tiers, self._scope = tiers, scope
        self.loads: list[CacheLoad] = []
        self._loading: list[int] = []  # the row of each load

    def load(self, ranks: RankGroup | None = None) -> None:
        """Match every row and begin to load what all of them have. Pages must have been reserved.

        Returns when what lies in lower tiers has come to the host, or will not come; from there on layers arrive while
        the forward runs. With ``ranks`` returns when everything is on the device and verified, and all ranks have
        agreed on how much. Raises TransferError where it can't be begun.
        """
        if ranks is None:
            columns = self._begin(layerwise=True)
            columns = min(columns, self._columns([load.await_submitted() for load in self.loads]))
        else:
            columns = ranks.minimum("prefix columns", 1, self._loaded_columns).value[0]
        self.cached = tuple(self.batch.tokens_in(columns))
        if any(self.cached):
            self.cache.expect(self.loads if ranks is None else [], columns)
        else:
            self._settle()

    def _loaded_columns(self) -> list[int]:
        """Columns that are there and verified."""
        columns = self._begin(layerwise=False)
        for load in self.loads:
            with suppress(DeadlineExceeded):  # what has come by then counts
                load.result()
        good = [0 if load.verdict().unverified_pages else load.usable_pages for load in self.loads]
        return [min(columns, self._columns(good))]

    def _begin(self, *, layerwise: bool) -> int:
        """Begin to load what all rows have: so many columns."""
        page_size = self._tiers.page_size
        with ExitStack() as held:
            hits = [held.enter_context(self._tiers.match(row, self._scope)) for row in self.batch.rows]
            columns = self.batch.columns_of([hit.tokens for hit in hits])
            for row, tokens in enumerate(self.batch.tokens_in(columns)):
                pages = -(-tokens // page_size)
                if pages:
                    self.loaded = True
                    self._loading.append(row)
                    ids = self.cache.tables[row].pages[:pages]
                    self.loads.append(self._tiers.load(hits[row], ids, layerwise=layerwise, pages=pages))
        return columns

    def _columns(self, pages: Sequence[int]) -> int:
        """Columns that are there when each load brings so many pages; rows without a load lack nothing."""
        there = [len(tokens) for tokens in self.batch.rows]
        for row, count in zip(self._loading, pages, strict=True):
            there[row] = count * self._tiers.page_size
        return self.batch.columns_of(there)

    def store(self, rows: Sequence[Sequence[int]]) -> int:
        """Begin to store the whole pages of ``rows``: for each its tokens whose KV is there. Returns pages that no
        tier took from the start."""
        lost = 0
        for tokens, table in zip(rows, self.cache.tables, strict=True):
            pages = len(tokens) // self._tiers.page_size
            if not pages:
                continue
            self.starts.add(tuple(tokens[: self._tiers.page_size]))
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
