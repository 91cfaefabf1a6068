"""TieredCache: a directory that decides and a mover that moves, as one cache. What a serving engine calls.

The mover may be in this process or in another: nothing here needs torch or a GPU. Commands go out on the thread whose
call made them, so that a store is fenced when it is called; answers come in on a thread of the mover's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.cache_parts import CacheStats, Dropped, MoverPort, PageIds, TierOrOptions, plan_of
from kvtransfer.commands import Ack, Load, Scope, ids
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job, PrefixHit
from kvtransfer.kernels.errors import ConfigError, LayoutError, OwnershipError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.policy import EvictionPolicy, WritePolicy
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.tiers.keys import Tokens

_H = TypeVar("_H", CacheLoad, CacheStore)

if TYPE_CHECKING:
    from kvtransfer.config import Config
    from kvtransfer.layer_loads import LayerLoad
    from kvtransfer.pool import KVPool


class TieredCache:
    """Keeps KV pages of prefixes in host memory and below, and brings them back. Thread-safe. No verb waits for a
    transfer, but for `close` and those that attach and detach tiers.

    Args:
        directory, mover: the two halves; they serve nobody else. `create` makes both.
        scope: of calls that name none (`Scope`: content namespace and tenant's salt).
        deadline_s: of each load and store.
        tick_s: how often a thread of this cache calls `tick`; None: the caller does.
        observer: told "cache.closed" and what was dropped, "cache.lost" when the mover's process died.
        owned: called at `close`, the last one first: what else is to be closed.
    """

    def __init__(
        self,
        directory: Directory,
        mover: MoverPort,
        *,
        scope: Scope | None = None,
        deadline_s: float = 30.0,
        tick_s: float | None = 1.0,
        observer: Observer = NO_OBSERVER,
        owned: Sequence[Callable[[], object]] = (),
    ) -> None:
        facts = mover.facts()
        if directory.index.page_size != facts.page_size:
            raise ConfigError(
                f"cache: expected a directory of {facts.page_size} tokens a page, as the pool has, "
                f"got {directory.index.page_size}"
            )
        if not (0 < deadline_s <= 1e6 and (tick_s is None or tick_s > 0)):
            raise ConfigError(f"cache: expected deadline_s and tick_s above 0, got {deadline_s} and {tick_s}")
        directory.require_fits(facts.host_name, facts.host_most_pages, facts.tiers)
        self.directory, self.mover = directory, mover
        self.scope = Scope() if scope is None else scope
        self.deadline_s = deadline_s
        self.observer = observer
        self.news = threading.Condition()
        self.num_layers, self.page_size = facts.num_layers, facts.page_size
        self._facts = facts
        self._owned = tuple(owned)
        self._sent: dict[int, list[NDArray[np.int64]]] = {}  # by load: device pages whose load has been submitted
        self._active: dict[CacheLoad | CacheStore, None] = {}
        self._fetching: dict[PrefetchJob, None] = {}
        self._closed = False
        self._dropped: Dropped | None = None
        self._stop = threading.Event()
        mover.answer = self._answered
        directory.on_commands = self._go
        self._ticker: threading.Thread | None = None
        if tick_s is not None:
            self._ticker = threading.Thread(target=self._tick_on, args=(tick_s,), name="kvtransfer-tick", daemon=True)
            self._ticker.start()

    @classmethod
    def create(cls, pool: KVPool, config: Config | str | Path | None = None, **more: Any) -> TieredCache:
        """A cache of ``pool`` with both halves in this process, as configured. See `kvtransfer.cache_build.create`."""
        from kvtransfer.cache_build import create  # noqa: PLC0415  (torch, which a cache of two processes does without)

        return create(pool, config, **more)

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
        the host tier comes there first, page by page. Where a page fails, the load is a shorter one:
        `CacheLoad.usable_pages`, ``free_page_ids``. Raises LayoutError for bad ids, OwnershipError for a hit that was
        released, before anything is touched.
        """
        self._require_open()
        given = self._checked(page_ids)
        return self._watch(
            CacheLoad(
                self, self.directory.load(hit, given, layerwise=layerwise, pages=pages), self._deadline(deadline_s)
            )
        )

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
        job = self.directory.prefetch(tokens, self._scope(scope), request=request)
        with self.news:
            self._fetching[job] = None
        job.add_done_callback(self._fetched)
        return job

    def admit(self, job: PrefetchJob) -> bool:
        """Whether the request may run now, by the stop policy: `Directory.admit`."""
        return self.directory.admit(job)

    def stop(self, job: PrefetchJob) -> None:
        """The request was aborted, or runs: no more is fetched for it."""
        self.directory.stop(job)

    def require_free(self, page_ids: PageIds, *, wait_s: float = 0.0) -> None:
        """Raise OwnershipError, naming pages, if a load or a store still owns one of these pages of the pool after
        ``wait_s`` seconds. For owners of an allocator, before they hand a page to somebody else."""
        wanted = np.array(page_ids, dtype=np.int64).reshape(-1)
        with self.news:
            self.news.wait_for(lambda: not self._owned_of(wanted).size, wait_s)
            held = self._owned_of(wanted)
        if held.size:
            raise OwnershipError(
                f"expected pages that no load or store of the cache owns, got {held[:8].tolist()}"
                f"{' ...' if held.size > 8 else ''} after {wait_s:g} s; cancel it, and wait until it is done"
            )

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
        job = self.directory.prefetch(tokens, self._scope(scope), always=True)
        with self.news:
            self._fetching[job] = None
        job.add_done_callback(self._fetched)
        return job

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
        tier knows the host's memory."""
        self._require_open()
        facts = self.mover.attach(name, tier)
        try:
            self.directory.attach(plan_of(name, facts, write=write, evict=evict, ask=ask))
        except BaseException:
            self.mover.detach(name)
            raise

    def detach(self, name: str) -> None:
        """A lower tier is used no more, and forgotten here; what it holds stays there. Blocks until what is under way
        is over. Raises DeadlineExceeded if the tier does not let go of the host's memory: it must stay, then."""
        self.directory.detach(name)
        self.mover.detach(name)

    def tick(self) -> None:
        """Pins end, cold branches are pruned, handles beyond their deadline are cancelled, a host tier that has grown
        is used. Called by a thread of the cache every ``tick_s``, or by you."""
        self.directory.tick()
        for handle in [*self._active]:
            if handle.expired():
                handle.cancel()
        before = self._facts
        if before.host_pages < before.host_most_pages:  # it grows in the background
            self._facts = self.mover.facts()
            if self._facts.host_pages > before.host_pages:
                self.directory.resize(before.host_name, self._facts.host_pages)

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
        with self.news:
            if self._dropped is not None:
                return self._dropped
            if self.mover.is_own_thread():
                raise TierError("close: a callback can't wait for what its own thread has to tell")
            self._closed = True
        until = time.monotonic() + timeout_s
        self._stop.set()
        if self._ticker is not None and self._ticker is not threading.current_thread():
            self._ticker.join()
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
        self.directory.close()
        bare = self.directory.unsaved_pages()
        self.mover.close(drain=drain, timeout_s=max(1.0, until - time.monotonic()))
        for close in reversed(self._owned):
            close()
        self._dropped = Dropped(tuple(dropped), len(fetching), bare)
        self.observer.noted("cache.closed", handles=len(dropped), prefetches=len(fetching), pages=bare)
        return self._dropped

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(drain=error is None)

    # --- for the handles

    def cancel_job(self, job: Job) -> None:
        self.directory.cancel(job)

    def sent(self, job: Job) -> NDArray[np.bool_]:
        """Which pages of a load have been given to the mover."""
        assert job.ids is not None
        with self.news:
            sent = self._sent.get(job.number, [])
            return np.isin(job.ids, np.concatenate(sent)) if sent else np.zeros(job.ids.size, dtype=np.bool_)

    def layer_load(self, number: int) -> LayerLoad:
        return self.mover.load(number)

    def is_own_thread(self) -> bool:
        return self.mover.is_own_thread()

    # --- inside

    def _go(self) -> None:
        """Hand over what the directory wants done. Two threads may do this at once: commands need no order."""
        commands = self.directory.commands()
        if not commands:
            return
        loads = [command for command in commands if isinstance(command, Load)]
        with self.news:
            for command in loads:
                self._sent.setdefault(command.load, [])
        self.mover.submit(commands)
        with self.news:
            for command in loads:
                if command.load in self._sent:  # else it is done already
                    self._sent[command.load].append(ids(command.pages))
            self.news.notify_all()

    def _answered(self, ack: Ack) -> None:
        self.directory.acknowledge(ack)
        with self.news:
            self.news.notify_all()

    def _watch(self, handle: _H) -> _H:
        with self.news:
            self._active[handle] = None
        handle.add_done_callback(self._forget)
        return handle

    def _forget(self, handle: CacheLoad | CacheStore) -> None:
        with self.news:
            self._active.pop(handle, None)
            if isinstance(handle, CacheLoad):
                self._sent.pop(handle.number, None)
            self.news.notify_all()

    def _fetched(self, job: Job) -> None:
        with self.news:
            self._fetching.pop(job, None)  # type: ignore[call-overload]

    def _owned_of(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        owned = [handle.page_ids for handle in self._active if not handle.done()]
        return wanted[np.isin(wanted, np.concatenate(owned))] if owned else wanted[:0]

    def _await_idle(self, until: float) -> bool:
        """Hold the caller until nothing is under way; False when the time is up."""
        with self.news:
            while not self.directory.idle:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self.news.wait(min(left, 0.5))
            return True

    def _tick_on(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            with suppress(UnavailableError):  # the mover has gone meanwhile
                self.tick()

    def _scope(self, scope: Scope | None) -> Scope:
        return self.scope if scope is None else scope

    def _deadline(self, deadline_s: float | None) -> float:
        if deadline_s is not None and not 0 < deadline_s <= 1e6:
            raise ConfigError(f"deadline_s: expected seconds above 0, got {deadline_s}")
        return self.deadline_s if deadline_s is None else deadline_s

    def _checked(self, page_ids: PageIds) -> NDArray[np.int64]:
        """Page ids of the pool; the directory checks the rest."""
        given = np.array(page_ids, dtype=np.int64).reshape(-1)
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self._facts.pool_pages:
            raise LayoutError(
                f"page ids: expected 0 to {self._facts.pool_pages - 1}, got {int(given.min())} to {int(given.max())}"
            )
        return given

    def _require_open(self) -> None:
        if self._closed:
            raise TierError("the cache is closed")
