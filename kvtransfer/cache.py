"""TieredCache: a directory that decides and a mover that moves, as one cache. What a serving engine calls.

The mover may be in this process or in another: nothing here needs torch or a GPU. Commands go out on the thread whose
call made them, so that a store is fenced when it is called; answers come in on a thread of the mover's.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.cache_parts import MoverPort, PageIds
from kvtransfer.cache_upkeep import CacheUpkeep
from kvtransfer.commands import Scope
from kvtransfer.jobs import PrefixHit, integers
from kvtransfer.kernels.errors import OwnershipError
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.recompute import Rate, choose
from kvtransfer.tiers.keys import Tokens

if TYPE_CHECKING:
    from kvtransfer.config import Config
    from kvtransfer.pool import KVPool


class TieredCache(CacheUpkeep):
    """Keeps KV pages of prefixes in host memory and below, and brings them back. Thread-safe. No verb waits for a
    transfer, but for `close` and those that attach and detach tiers.

    Args:
        directory, mover: the two halves; they serve nobody else. `create` makes both.
        scope: of calls that name none (`Scope`: content namespace and tenant's salt).
        deadline_s: of each load and store.
        tick_s: how often a thread of this cache calls `tick`; None: the caller does.
        observer: told "cache.closed" and what was dropped, "cache.lost" when the mover's process died.
        recent: writes down which prefixes were used last (`warm_recent` reads what an earlier run has left).
        prefill: how long the model takes to compute a prefix (`worth_loading`).
        owned: called at `close`, the last one first: what else is to be closed.
    """

    @classmethod
    def create(cls, pool: KVPool, config: Config | str | Path | None = None, **more: Any) -> TieredCache:
        """A cache of ``pool`` with both halves in this process, as configured. See `kvtransfer.cache_build.create`."""
        from kvtransfer.cache_build import create  # noqa: PLC0415  (torch, which a cache of two processes does without)

        return create(pool, config, **more)

    @classmethod
    def connect(cls, mover: MoverPort, config: Config | str | Path | None = None, **more: Any) -> TieredCache:
        """A cache over a mover that is there, in another process (`kvtransfer.remote_mover`) or in this one, as
        configured. See `kvtransfer.directory_build.connect`."""
        from kvtransfer.directory_build import connect  # noqa: PLC0415  (it makes this class)

        return connect(mover, config, **more)

    # --- requests

    def match(self, tokens: Tokens, scope: Scope | None = None, *, device_pages: int = 0) -> PrefixHit:
        """The longest prefix of ``tokens`` that is there, held until it is released: `Directory.match`."""
        self._require_open()
        return self.directory.match(tokens, self._scope(scope), device_pages=device_pages)

    def load(
        self,
        hit: PrefixHit,
        page_ids: PageIds,
        *,
        layerwise: bool = False,
        pages: int | None = None,
        deadline_s: float | None = None,
    ) -> CacheLoad:
        """Bring the hit's pages behind its device pages to these pages of the pool: `Directory.load`. The hit may be
        released at once.

        ``layerwise``: layers arrive in order, and the forward waits for each (`CacheLoad.wait_layer`); what lies below
        the host tier comes there first, page by page. Where a page fails in each tier that has it, the load is a
        shorter one: `CacheLoad.usable_pages`, ``free_page_ids``. Raises LayoutError for bad ids, OwnershipError for a
        hit that was released, before anything is touched.
        """
        self._require_open()
        given = self._checked(page_ids)
        deadline = self._deadline(deadline_s)
        job = self.directory.load(hit, given, layerwise=layerwise, pages=pages, deadline_s=deadline)
        return self._watch(CacheLoad(self, job, deadline))

    def store(
        self,
        tokens: Tokens,
        page_ids: PageIds,
        scope: Scope | None = None,
        *,
        first: int = 0,
        priority: int = 0,
        leaving: bool = False,
        deadline_s: float | None = None,
    ) -> CacheStore:
        """Keep pages of the pool, one id for each whole page of ``tokens`` from page ``first`` on: `Directory.store`.

        What the pool's streams have been given when this is called is waited for by the copy. The pages belong to the
        store until it is done, also after `CacheStore.cancel`: do not write them, nor give them to another request,
        before that (`require_free` asks). Call it on the thread that launched the forward, or later.
        """
        self._require_open()
        given = self._checked(page_ids)
        deadline = self._deadline(deadline_s)
        job = self.directory.store(tokens, given, self._scope(scope), first=first, priority=priority, leaving=leaving)
        return self._watch(CacheStore(self, job, deadline))

    def prefetch(self, tokens: Tokens, scope: Scope | None = None, *, request: Hashable | None = None) -> PrefetchJob:
        """Begin to bring what lower tiers have of ``tokens`` to the host tier: `Directory.prefetch`. Call it when a
        request is queued or matched (for one ``request`` there is one); `admit` or `stop` ends it."""
        self._require_open()
        return self._fetch(self.directory.prefetch(tokens, self._scope(scope), request=request))

    def admit(self, job: PrefetchJob) -> bool:
        """Whether the request may run now, by the stop policy: `Directory.admit`."""
        return self.directory.admit(job)

    def stop(self, job: PrefetchJob) -> None:
        """The request was aborted, or runs: no more is fetched for it."""
        self.directory.stop(job)

    def worth_loading(self, hit: PrefixHit, *, total_tokens: int | None = None, layerwise: bool = False) -> int:
        """How many pages of the hit, its device pages included, are to be loaded (``load(..., pages=...)``): it is
        faster to compute those behind them again, as far as the prefill's rate is known (``prefill``), and the link's
        and the tiers' (what they have done so far). Else all of them. ``total_tokens``: of the request, the rest of
        which is computed in any case. See `kvtransfer.recompute`."""
        if self._prefill is None or not self._facts.link_bytes_per_s:
            return hit.pages
        link = Rate(self._facts.link_bytes_per_s)
        rates = {tier: link for tier, _, _ in hit.segments} | self._rates.known()  # of unknown ones the best is thought
        choice = choose(
            [(tier, stop - first) for tier, first, stop in hit.segments],
            page_size=self.page_size,
            page_bytes=self._facts.page_bytes,
            link=link,
            rates=rates,
            prefill=self._prefill,
            device_tokens=hit.device_pages * self.page_size,
            total_tokens=total_tokens,
            layers=self.num_layers if layerwise else 1,
            host=self._facts.host_name,
        )
        return hit.device_pages + choice.load_pages

    def require_free(self, page_ids: PageIds, *, wait_s: float = 0.0) -> None:
        """Raise OwnershipError, naming pages, if a load or a store still owns one of these pages of the pool after
        ``wait_s`` seconds. For owners of an allocator, before they hand a page to somebody else."""
        wanted = integers(page_ids, "page ids")
        with self.news:
            self.news.wait_for(lambda: not self._owned_of(wanted).size, wait_s)
            held = self._owned_of(wanted)
        if held.size:
            raise OwnershipError(
                f"expected pages that no load or store of the cache owns, got {held[:8].tolist()}"
                f"{' ...' if held.size > 8 else ''} after {wait_s:g} s; cancel it, and wait until it is done"
            )
