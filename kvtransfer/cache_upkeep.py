"""CacheUpkeep: what those who run a `TieredCache` do with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvtransfer.cache_core import CacheCore
from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.cache_parts import CacheStats, Dropped, PageIds, TierOrOptions, plan_of
from kvtransfer.commands import Scope
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import DeadlineExceeded, TierError
from kvtransfer.kernels.events import HeardOut
from kvtransfer.policy import EvictionPolicy, WritePolicy
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.recent import warm_file
from kvtransfer.tiers.keys import Tokens


class CacheUpkeep(CacheCore):
    """The part of a `TieredCache` for those who run it."""

    # --- for who runs it

    def place(
        self, tokens: Tokens, page_ids: PageIds, scope: Scope | None = None, *, first: int = 0
    ) -> NDArray[np.bool_]:
        """The device tier holds these pages from now on: `Directory.place`."""
        return self.directory.place(tokens, self._checked(page_ids), self._scope(scope), first=first)

    def pin(self, tokens: Tokens, scope: Scope | None = None, *, ttl_s: float) -> int:
        """Hold what is there of ``tokens`` for ``ttl_s`` seconds. How many pages."""
        return self.directory.pin(tokens, self._scope(scope), ttl_s=ttl_s)

    def evict(self, tier: str, pages: int) -> NDArray[np.int64]:
        """Give up to ``pages`` pages of a tier up, by its policy, none that is held: `Directory.evict`."""
        return self.directory.evict(tier, pages)

    def flush(self, tier: str) -> NDArray[np.int64]:
        """`evict` everything of one tier that is not held; the others keep what they have."""
        return self.directory.flush(tier)

    def warm(self, tokens: Tokens, scope: Scope | None = None) -> PrefetchJob:
        """Bring what lower tiers have of ``tokens`` to the host tier, however little it is. It ends by itself."""
        self._require_open()
        return self._fetch(self.directory.prefetch(tokens, self._scope(scope), always=True))

    def warm_all(self, file: Path | str, scope: Scope | None = None) -> list[PrefetchJob]:
        """`warm` what a file of token lists names (`kvtransfer.recent.warm_file`), as many pages as the host tier has.
        Raises ConfigError, naming the line, on a file that is none; nothing has begun then."""
        return self.warm_some([(tokens, self._scope(scope)) for tokens in warm_file(file)])

    def warm_recent(self, scopes: Sequence[Scope] = ()) -> list[PrefetchJob]:
        """`warm` what was used last in an earlier run, as many pages as the host tier has: of these scopes, or of the
        cache's own."""
        if self._recent is None:
            return []
        known = scopes or (self.scope,)
        found = ((prefix, [scope for scope in known if prefix.belongs_to(scope)]) for prefix in self._recent.read())
        return self.warm_some([(prefix.token_ids(), scope) for prefix, mine in found for scope in mine[:1]])

    def warm_some(self, sequences: Iterable[tuple[Tokens, Scope]]) -> list[PrefetchJob]:
        """`warm` these, in this order, as many pages as the host tier has: more would drive the first ones out."""
        room, jobs = self.directory.capacity(self._facts.host_name) or 0, []
        for tokens, scope in sequences:
            room -= len(tokens) // self.page_size
            if room < 0:
                break
            jobs.append(self.warm(tokens, scope))
        return jobs

    def attach(
        self,
        name: str,
        tier: TierOrOptions,
        *,
        write: str | WritePolicy = "write_through",
        evict: str | EvictionPolicy = "lru",
        ask: bool | None = None,
    ) -> None:
        """Add a lower tier below the others while running, or take one back. ``tier``: a `Tier`, which stays yours; or
        its options as a configuration has them (``{"kind": "redis", "url": ...}``), from which the mover makes it: the
        only way where the mover is another process. ``write``, ``evict``, ``ask``: see `TierPlan`. Blocks until the
        tier knows the host's memory. Raises ConfigError on a tier that `create` would refuse."""
        self._require_open()
        facts = self.mover.attach(name, tier)
        try:
            self.directory.attach(plan_of(name, facts, write=write, evict=evict, ask=ask))
        except BaseException:
            self.mover.detach(name)
            raise

    def detach(self, name: str, *, timeout_s: float = 60.0) -> None:
        """A lower tier is used no more, and forgotten here; what it holds stays there. Blocks until what is under way
        is over. Raises DeadlineExceeded if the tier does not let go of the host's memory in time: it must stay, then;
        call this again."""
        self.directory.detach(name)
        self.mover.detach(name, timeout_s=timeout_s)

    def resize_host(self, capacity_pages: int) -> Job:
        """Another size of the host tier, smaller or larger, memory and all: `Directory.resize`. Returns at once; the
        job is done when it holds (`Job.add_done_callback`), CANCELLED if this is called again before."""
        self._require_open()
        with self._sizing:
            self._resized = True
        return self.directory.resize(self._facts.host_name, capacity_pages)

    def stats(self) -> CacheStats:
        """The state now."""
        return CacheStats(self.directory.figures(), self.mover.stats(), len(self._active))

    def close(self, *, drain: bool = True, timeout_s: float = 60.0) -> Dropped:
        """Take no more calls; end what is under way, and close the mover and what is owned.

        ``drain``: loads and stores end well, prefetches are stopped, and pages of the host tier that a write-back tier
        lacks are written. Otherwise, and when the time is up, what is not begun is dropped. Returns what was dropped;
        the observer is told. Raises DeadlineExceeded if something could not be stopped: a tier that does not let go of
        its buffers. Idempotent.
        """
        until = time.monotonic() + timeout_s
        with self.news:
            mine = self._closing and self._closer == threading.get_ident()
            if self._dropped is None and (mine or self.mover.is_own_thread()):
                raise TierError("close: a callback can't wait for what its own thread has to tell")
            if not self.news.wait_for(lambda: not self._closing, timeout_s):  # another thread does it
                raise DeadlineExceeded(f"close: another thread was at it still after {timeout_s:g} s")
            if self._dropped is not None:
                return self._dropped
            self._closed = self._closing = True
            self._closer = threading.get_ident()
        try:
            return self._close(drain, until)
        finally:
            with self.news:
                self._closing = False
                self.news.notify_all()

    def _close(self, drain: bool, until: float) -> Dropped:
        self._end_ticks()
        fetching = [job for job in [*self._fetching] if not job.done]
        for job in fetching:
            self.directory.stop(job)
        dropped: list[CacheLoad | CacheStore] = []
        if drain and self._await_idle(until):
            self.directory.write_out()
            drain = self._await_idle(until)
        else:
            drain = False
        if not drain:
            dropped = [handle for handle in [*self._active] if handle.cancel()]
        if self._recent is not None:
            self._recent.write()
        self.directory.close()
        bare = self.directory.unsaved_pages()
        self.mover.close(drain=drain, timeout_s=max(1.0, until - time.monotonic()))
        for close in reversed(self._owned):
            close()
        self._dropped = Dropped(tuple(dropped), len(fetching), bare)
        told = HeardOut(self.observer)  # all is closed: a bug of the observer's does not make it a failure
        told.noted("cache.closed", handles=len(dropped), prefetches=len(fetching), pages=bare)
        return self._dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(drain=error is None)
