"""Directory: decides which pages are kept, where, and what has to be moved for that. It moves nothing itself.

It lives where requests are scheduled, and needs neither torch nor a GPU: it holds the index, the free slots of the host
tier, and the policies. Its verbs put commands (commands.py) into an outbox; whoever has the memory takes them, carries
them out, and brings each answer to `acknowledge`, which may give out more. No verb waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import INDEX_KINDS, Book, TierFigures, TierPlan
from kvtransfer.commands import Ack, Command, Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Job, Move, PrefixHit, is_whole, page_ids_of
from kvtransfer.keeping import Keeping
from kvtransfer.kernels.errors import ConfigError, LayoutError, OwnershipError
from kvtransfer.moves import CANCELLED, ERROR, verb
from kvtransfer.policy import Prefetch, Prune
from kvtransfer.prefetch import PrefetchJob
from kvtransfer.radix import Match
from kvtransfer.tiers.keys import Algorithm, Tokens, token_bytes

DEVICE = "device"  # where pages are that the caller says it has, with or without a tier of that kind


@dataclass(frozen=True)
class DirectoryFigures:
    """Totals since the start. ``hit_tokens`` is the sum of ``hit_tokens_by_tier``, to the token."""

    matches: int
    asked_tokens: int
    hit_tokens: int
    hit_tokens_by_tier: dict[str, int]
    tiers: dict[str, TierFigures]
    locks: int
    pages_in_index: int
    commands_under_way: int
    late_answers: int


class Directory(Keeping):
    """See the module. Thread-safe.

    Args:
        page_size: tokens a page.
        tiers: fastest first: at most one of kind "device", exactly one of kind "slots", then what is below.
        prefetch: threshold and stop policy.
        prune: drop cold branches of the host tier; None: never.
        window: commands that one store, load or prefetch has under way to or from a lower tier.
        evict_extra: share of a tier made free beyond what is needed, so that eviction runs less often.
        ghost_pages: pages known only so that their hits are counted (selective writing); None: as many as the host
            tier has.
        watermarks: high and low. When the host tier is fuller than the high share, `tick` frees it down to the low one.
        retry_s: the first and the longest pause of a tier that failed, before it is asked whether it answers again.
        clock: seconds.
        algorithm: of page keys.
    """

    def __init__(
        self,
        page_size: int,
        tiers: Sequence[TierPlan],
        *,
        prefetch: Prefetch | None = None,
        prune: Prune | None = None,
        window: int = 4,
        evict_extra: float = 0.0,
        ghost_pages: int | None = None,
        watermarks: tuple[float, float] = (1.0, 1.0),
        retry_s: tuple[float, float] = (1.0, 60.0),
        clock: Callable[[], float] = time.monotonic,
        algorithm: Algorithm = "sha256",
    ) -> None:
        ranks = {"device": 0, "slots": 1, "keys": 2, "shared": 2}
        kinds = [plan.kind for plan in tiers]
        names = [plan.name for plan in tiers]
        if kinds.count("slots") != 1 or kinds.count("device") > 1 or len(set(names)) < len(names):
            raise ConfigError(
                f"tiers: expected names that differ, one slots tier, one device tier at most, got {tiers}"
            )
        if [ranks[kind] for kind in kinds] != sorted(ranks[kind] for kind in kinds):
            raise ConfigError(f"tiers: expected device, slots, then the tiers by key, got {', '.join(kinds)}")
        if any(name == DEVICE and kind != "device" for name, kind in zip(names, kinds, strict=True)):
            raise ConfigError(f"tiers: {DEVICE!r} names the engine's pool, got a tier of another kind with this name")
        if window < 1 or not 0 <= evict_extra < 1 or not 0 <= watermarks[1] <= watermarks[0]:
            raise ConfigError(
                "expected a window of at least 1, evict_extra in 0..1, and a high watermark above the low one, "
                f"got {window}, {evict_extra} and {watermarks}"
            )
        if not 0 < retry_s[0] <= retry_s[1]:
            raise ConfigError(f"retry_s: expected seconds above 0, the first no longer than the longest, got {retry_s}")
        index = PrefixIndex(
            page_size, {plan.name: INDEX_KINDS[plan.kind] for plan in tiers}, clock=clock, algorithm=algorithm
        )
        books = {plan.name: Book(plan, index) for plan in tiers}
        host = next(book for book in books.values() if book.is_slots)
        ghosts = (host.capacity or 0) if ghost_pages is None else ghost_pages
        super().__init__(index, books, host, window, evict_extra, prefetch or Prefetch(), prune, ghosts, watermarks)
        self.retry_s = retry_s
        self._asked_tokens = self._hit_tokens = self._matches = 0
        self._hit_pages: dict[str, int] = {}

    @property
    def index(self) -> PrefixIndex:
        """To look at. What it says of tiers is changed by the directory alone."""
        return self._index

    # --- requests

    @verb
    def match(self, tokens: Tokens, scope: Scope | None = None, *, device_pages: int = 0) -> PrefixHit:
        """The longest prefix of ``tokens`` that is there, in whole pages, held until it is released.

        ``device_pages``: leading pages that the caller has on the device already. Behind them come the pages of the
        device tier, if there is one, then of the others: of each page the fastest tier that has it. It counts as a
        use. Raises LayoutError on bad tokens.
        """
        if not is_whole(device_pages, 0):
            raise LayoutError(f"device_pages: expected a whole number of at least 0, got {device_pages!r}")
        scope, ids = scope or Scope(), np.frombuffer(token_bytes(tokens), dtype="<u4")
        self._look_after()
        found = self._index.match(ids, scope.name())
        device_pages = min(int(device_pages), ids.size // self._index.page_size)
        hit = self._hit(scope, found, device_pages)
        self._index.lock(hit.node)
        self._matches += 1
        self._asked_tokens += ids.size
        self._hit_tokens += hit.tokens
        for tier, count in hit.tokens_by_tier.items():
            self._hit_pages[tier] = self._hit_pages.get(tier, 0) + count // self._index.page_size
        self._write_hit(hit.node, scope)
        return hit

    @verb
    def load(
        self,
        hit: PrefixHit,
        page_ids: NDArray[np.int64] | Sequence[int],
        *,
        layerwise: bool = False,
        pages: int | None = None,
        deadline_s: float | None = None,
    ) -> Job:
        """Have the hit's pages behind its device pages brought to these pages of the device pool, one id each.

        What lies below the host tier comes to the host tier first; a page that fails in one tier comes from the next
        one that has it. ``pages``: of the hit, to load fewer. A page that fails ends the prefix: `Job.usable_pages`
        says how far it goes, and the other device pages are free to be given to somebody else once the job is done. The
        hit may be released at once. ``deadline_s``: that the load will be waited for; a tier has half of what is left
        of it where another one has the pages too.
        """
        if not hit.held:
            raise OwnershipError("load: expected a hit that is held, got one that was released")
        stop = hit.pages if pages is None else pages
        if not hit.device_pages <= stop <= hit.pages:
            raise LayoutError(f"load: expected {hit.device_pages}..{hit.pages} pages, got {stop}")
        ids = page_ids_of(page_ids, stop - hit.device_pages, "load")
        job = Job("load", hit.device_pages, ids.size)
        job.ids, job.number, job.deadline_s = ids, self._new_id(), deadline_s
        if not ids.size:
            self._ended.append(job)
            return job
        job.node = hit.node
        self._index.lock(hit.node)
        for tier, first, end in hit.segments:
            wanted = np.arange(first, min(end, stop))
            if wanted.size:
                in_host = tier == self._host.name
                move = Move(hit.node, hit.scope, wanted, tier, None if in_host else self._host.name, job=job)
                move.layerwise = layerwise
                move.ids = ids[wanted - job.first] if in_host else None
                self._begin(move)
        return job

    @verb
    def store(
        self,
        tokens: Tokens,
        page_ids: NDArray[np.int64] | Sequence[int],
        scope: Scope | None = None,
        *,
        first: int = 0,
        priority: int = 0,
        leaving: bool = False,
    ) -> Job:
        """Have pages of the device pool kept: ``page_ids`` holds one id for each whole page of ``tokens`` from page
        ``first`` on. Only what the host tier lacks is written, and what its write policy wants now.

        The device pages stay the store's until the job is done (`Job.statuses`, page by page). ``leaving``: the device
        gives these pages up; a write-back policy writes them now. Pages that the policy leaves out are CANCELLED.
        Raises LayoutError if the ids are too many or too few.
        """
        if not is_whole(first, 0):
            raise LayoutError(f"store: expected first of at least 0, got {first!r}")
        scope, given = scope or Scope(), np.frombuffer(token_bytes(tokens), dtype="<u4")
        total = given.size // self._index.page_size
        ids = page_ids_of(page_ids, max(0, total - first), "store")
        job = Job("store", first, ids.size)
        job.ids = ids
        if not ids.size:
            self._ended.append(job)
            return job
        found = self._index.insert(given, scope.name(), priority=priority)
        pages = np.arange(first, total)
        wanted = np.zeros(pages.size, dtype=np.bool_)
        policy = self._host.write
        for node in self._index.path(found.node):
            if policy.now(node.hits) or (leaving and policy.on_evict):
                wanted |= (pages >= node.start) & (pages < node.end)
        if wanted.any():
            move = Move(found.node, scope, pages[wanted], None, self._host.name, ids[wanted], job)
            self._begin(move)
        if not wanted.all():
            job.detail = "left out by the write policy"
            self._tell(job, pages[~wanted], CANCELLED)
            self._remember(found.node)
        return job

    @verb
    def prefetch(
        self, tokens: Tokens, scope: Scope | None = None, *, request: Hashable | None = None, always: bool = False
    ) -> PrefetchJob:
        """Begin to bring what lower tiers have of ``tokens`` to the host tier, if it is enough to be worth it (or
        ``always``). Ask `admit` before the request runs, or `stop` it. For one ``request`` there is one: asked again,
        it is returned."""
        scope = scope or Scope()
        self._look_after()
        if request is not None and request in self._requests:
            return self._requests[request]
        size = self._index.page_size
        ids = np.frombuffer(token_bytes(tokens), dtype="<u4")
        found = self._index.match(ids, scope.name(), use=False)
        hit = self._hit(scope, found, 0)
        first = next((s.first for s in hit.segments if s.tier != self._host.name), hit.pages)
        job = PrefetchJob(scope, ids.copy(), first, ids.size // size - first, self._index.clock())
        job.always = always
        job.limit_s = self._policy.limit_s(job.codes.size * size)
        if not job.codes.size:
            self._ended.append(job)
            return job
        if request is not None:
            job.request = request
            self._requests[request] = job
        self._start(job, Match(hit.node, hit.pages), hit.pages)
        return job

    @verb
    def admit(self, job: PrefetchJob) -> bool:
        """Whether the request may run now, by the stop policy: if so its prefetch is stopped."""
        if not job.done and self._index.clock() - job.started_s < job.limit_s:
            return False
        self._stop(job)
        return True

    @verb
    def stop(self, job: PrefetchJob) -> None:
        """The request was aborted, or runs: no more is fetched for it. Does nothing the second time."""
        self._stop(job)

    @verb
    def cancel(self, job: Job) -> None:
        """Begin nothing more of a job, and ask what is under way to stop. Device pages under a command are the job's
        until that is answered; a load is through with pages that are only on their way to the host tier."""
        if isinstance(job, PrefetchJob):
            self.stop(job)
            return
        self._cancel(job)

    # --- the other half

    @property
    def idle(self) -> bool:
        """Whether no answer is due that anybody waits for (a look at a tier that is down is not waited for)."""
        with self._index.mutex:
            return not (self._flights or self._lookups or self._sizings or self._waiting or self._outbox)

    @verb
    def commands(self) -> list[Command]:
        """Take what is to be done now, in an order that may be kept or not. Each is given out once."""
        out, self._outbox = self._outbox, []
        return out

    def given_out(self) -> list[Command]:
        """`commands`, and nothing else: no job ends in this call. For `on_commands`: the verb before it has seen to it
        that what can be given out is."""
        with self._index.mutex:
            out, self._outbox = self._outbox, []
            return out

    @verb
    def acknowledge(self, ack: Ack) -> None:
        """Take an answer. Pages answered before, and unknown commands, are counted and left. Raises TransferError,
        and changes nothing, on positions or statuses that can't be."""
        if ack.id in self._lookups:
            self._looked_up(ack)
        elif ack.id in self._sizings:
            self._sized(ack)
        elif ack.id in self._looks:
            self._looked(ack)
        elif ack.id in self._flights:
            self._answer(self._flights[ack.id], ack)
        else:
            self.late_answers += len(ack.statuses)

    @verb
    def lost(self, *, memory: bool = False) -> None:
        """Whoever carried out the commands is gone: what it never answered has failed. Only then: a command that is
        still being carried out owns its slots. ``memory``: the host tier is gone with it, and nobody reaches the tiers
        below: they are detached."""
        if memory:
            self.forget(self._host.name)
            for name in self.lower_tiers():
                self.detach(name)
        for flight in [*self._flights.values()]:
            flight.cancelled = True
            n = flight.pages.size
            self._answer(flight, Ack(id=flight.command.id, statuses=bytes([ERROR]) * n, detail="nobody answers"))
        for _, command, _ in [*self._lookups.values()]:
            self._looked_up(Ack(id=command.id, statuses=bytes([ERROR]) * len(command.keys)))
        for number in [*self._sizings]:
            self._sized(Ack(id=number, statuses=bytes([ERROR]), detail="nobody answers"))
        for book in self._below:
            self._recover(book)  # it was not the tiers' fault

    @verb
    def figures(self) -> DirectoryFigures:
        """The state now."""
        size = self._index.page_size
        present = dict.fromkeys(self._books, 0)
        for node in self._index.nodes():
            for name, book in self._books.items():
                present[name] += node.have[book.victims.tier]
        tiers = {
            name: TierFigures(book.capacity, book.used, present[name], dict(book.counters), book.down, book.outages)
            for name, book in self._books.items()
        }
        by_tier = {name: pages * size for name, pages in self._hit_pages.items()}
        return DirectoryFigures(
            matches=self._matches,
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            hit_tokens_by_tier=by_tier,
            tiers=tiers,
            locks=self._index.locks,
            pages_in_index=self._index.pages,
            commands_under_way=len(self._flights) + len(self._lookups) + len(self._sizings) + len(self._looks),
            late_answers=self.late_answers,
        )

    def _hit(self, scope: Scope, found: Match, device_pages: int) -> PrefixHit:
        pages, device, segments, hinted = self._where(found, device_pages)
        node = found.node
        while node.parent is not None and node.start >= pages:
            node = node.parent
        return PrefixHit(self, scope, node, pages, device, segments, hinted)

    @verb
    def _release(self, hit: PrefixHit) -> None:
        if hit.held:
            hit.held = False
            self._index.unlock(hit.node)
            self._index.tidy(hit.node)
