"""CacheCore: how the halves of a `TieredCache` are joined: commands out, answers in, and who waits for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.cache_parts import Dropped, MoverPort, PageIds
from kvtransfer.commands import Ack, Command, Load, Scope, ids
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job, integers
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError, LayoutError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.recent_keeper import RecentKeeper
from kvtransfer.recompute import Prefill, TierRates
from kvtransfer.worker import Ticker

if TYPE_CHECKING:
    from kvtransfer.layer_loads import LayerLoad

_H = TypeVar("_H", CacheLoad, CacheStore)


class CacheCore:
    """The part of a `TieredCache` that joins its halves. See there."""

    def __init__(
        self,
        directory: Directory,
        mover: MoverPort,
        *,
        scope: Scope | None = None,
        deadline_s: float = 30.0,
        tick_s: float | None = 1.0,
        recent: RecentKeeper | None = None,
        prefill: Prefill | None = None,
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
        self.news = Condition()
        self.num_layers, self.page_size = facts.num_layers, facts.page_size
        self._facts = facts
        self._owned = tuple(owned)
        self._sent: dict[int, list[NDArray[np.int64]]] = {}  # by load: device pages whose load has been submitted
        self._active: dict[CacheLoad | CacheStore, None] = {}
        self._fetching: dict[PrefetchJob, None] = {}
        self._going = threading.RLock()
        self._closed = self._closing = False
        self._closer = 0  # the thread that closes, or did
        self._sizing = threading.RLock()
        self._resized = False  # by the caller: what grows by itself is not followed any more
        self._dropped: Dropped | None = None
        self._ticker: Ticker | None = None
        mover.answer = self._answered
        directory.on_commands = self._go
        if hasattr(mover, "lost"):
            mover.lost = self._mover_lost
        self._recent, self._prefill, self._rates = recent, prefill, TierRates()
        if tick_s is not None:
            self._ticker = Ticker(self._tick_once, tick_s)

    def tick(self) -> None:
        """Pins end, cold branches are pruned, handles beyond their deadline are cancelled, a host tier that has grown
        is used, prefixes used last are written down, lower tiers' speed is looked at. Called by a thread of the cache
        every ``tick_s``, or by you: by one thread."""
        self.directory.tick()
        for handle in [*self._active]:
            if handle.expired():
                handle.cancel()
        if self._recent is not None:
            self._recent.tick()
        if self._prefill is not None:
            now = time.monotonic()
            for name, state in self.mover.stats().items():
                self._rates.sample(name, state, now)
        before = self._facts
        if before.host_grows:
            self._facts = self.mover.facts()
            with self._sizing:
                if self._facts.host_pages > before.host_pages and not self._resized:
                    self.directory.grown(before.host_name, self._facts.host_pages)

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
        """Hand over what the directory wants done. One thread at a time, so that a store is fenced when the call that
        made it returns, whichever thread took its command. Nobody's callbacks run in here."""
        with self._going:
            commands = self.directory.given_out()
            if commands:
                self._submit(commands)

    def _submit(self, commands: list[Command]) -> None:
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

    def _mover_lost(self, why: str) -> None:
        """The mover's process is gone, and its memory with it."""
        self.directory.lost(memory=True)
        self.observer.noted("cache.lost", why=why)

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

    def _fetch(self, job: PrefetchJob) -> PrefetchJob:
        """Remember it while it is not done."""
        with self.news:
            self._fetching[job] = None
        job.add_done_callback(self._fetched)
        return job

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

    def _end_ticks(self) -> None:
        if self._ticker is not None:
            self._ticker.close()

    def _tick_once(self) -> None:
        with suppress(UnavailableError):  # the mover has gone meanwhile
            self.tick()

    def _scope(self, scope: Scope | None) -> Scope:
        return self.scope if scope is None else scope

    def _deadline(self, deadline_s: float | None) -> float:
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and 0 < deadline_s <= 1e6):
            raise ConfigError(f"deadline_s: expected seconds above 0, got {deadline_s!r}")
        return self.deadline_s if deadline_s is None else deadline_s

    def _checked(self, page_ids: PageIds) -> NDArray[np.int64]:
        """Page ids of the pool; the directory checks the rest."""
        given = integers(page_ids, "page ids")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self._facts.pool_pages:
            raise LayoutError(
                f"page ids: expected 0 to {self._facts.pool_pages - 1}, got {int(given.min())} to {int(given.max())}"
            )
        return given

    def _require_open(self) -> None:
        if self._closed:
            raise TierError("the cache is closed")
