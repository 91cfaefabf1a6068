"""The directory under random steps: hits, loads, stores, prefetches, evictions, tiers that come and go, answers in any
order, in pieces, late, twice, and bad. After every step all books agree; every page that is loaded is the right one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from directory_helpers import BROKEN, FULL, GOOD, LOST, Memory, check_directory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtransfer.books import TierPlan
from kvtransfer.commands import Scope
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job, PrefixHit
from kvtransfer.policy import EVICTION, WRITING, Prefetch, Prune
from kvtransfer.tiers.base import PageStatus

QUICK = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=1000, stateful_step_count=50)
NO_ROOM = PageStatus.NO_ROOM
SCOPES = (Scope(), Scope(b"n" * 32, b"s"))
TRUNK = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0]
BRANCHES = (TRUNK, TRUNK[:16] + [7] * 8, TRUNK[:9] + [5] * 15, TRUNK[:2] + [3] * 22, [4] * 24)
tokens_of = st.builds(
    lambda branch, n: list(BRANCHES[branch][:n]),
    st.sampled_from([0, 0, 1, 2, 3, 4]),
    st.sampled_from([24, 24, 17, 12, 9, 5, 1, 0]),
)
outcomes = st.sampled_from([GOOD, GOOD, GOOD, GOOD, LOST, BROKEN, FULL, PageStatus.CORRUPT, PageStatus.CANCELLED])


class DirectorySteps(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.page_size = data.draw(st.integers(1, 2))
        evict = st.sampled_from([*EVICTION])
        write = st.sampled_from([*WRITING])
        tiers = [TierPlan("device", "device", evict=data.draw(evict))] if data.draw(st.booleans()) else []
        tiers.append(
            TierPlan(
                "host", "slots", data.draw(st.sampled_from([14, 13, 8, 3, 1])), 14, data.draw(evict), data.draw(write)
            )
        )
        if data.draw(st.booleans()):
            room = data.draw(st.sampled_from([30, None, 3]))
            ask = data.draw(st.booleans())
            tiers.append(TierPlan("disk", "keys", room, None, data.draw(evict), data.draw(write), ask))
        if data.draw(st.booleans()):
            tiers.append(TierPlan("slow", "keys", data.draw(st.sampled_from([None, 30])), write=data.draw(write)))
        if data.draw(st.booleans()):
            tiers.append(TierPlan("far", "shared", write=data.draw(write)))
        self.now = 0.0
        self.directory = Directory(
            self.page_size,
            tiers,
            prefetch=Prefetch(2, data.draw(st.sampled_from(["best_effort", "wait_complete", "timeout"])), 1.0, 0.1),
            prune=data.draw(st.sampled_from([None, Prune(2, 3.0, 1.0, 0.3)])),
            window=data.draw(st.integers(1, 2)),
            evict_extra=data.draw(st.sampled_from([0.0, 0.2])),
            retry_s=data.draw(st.sampled_from([(0.5, 2.0), (50.0, 50.0)])),
            clock=lambda: self.now,
        )
        self.memory = Memory(self.page_size, slots=next(t.capacity_pages for t in tiers if t.kind == "slots"))
        self.sizes: list[Job] = []
        self.hits: list[tuple[PrefixHit, list[int]]] = []
        self.jobs: list[Job] = []
        self.loads: list[tuple[Job, list[int], list[int], Scope]] = []
        self.fetches: list[Any] = []
        self.placed: dict[int, Any] = {}
        self.told: list[Job] = []

    def job(self, job: Any) -> Any:
        self.jobs.append(job)
        job.add_done_callback(self.told.append)
        return job

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of, device=st.sampled_from([0, 0, 2]))
    def match(self, scope: Scope, tokens: list[int], device: int) -> None:
        before = self.directory.figures().hit_tokens
        hit = self.directory.match(tokens, scope, device_pages=device)
        assert hit.tokens == hit.pages * self.page_size <= len(tokens)
        assert sum(hit.tokens_by_tier.values()) == hit.tokens == self.directory.figures().hit_tokens - before
        ends = [hit.device_pages, *(end for s in hit.segments for end in (s.first, s.stop)), hit.pages]
        assert ends[::2] == ends[1::2] and ends == sorted(ends)  # one contiguous prefix
        self.hits.append((hit, tokens))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.hits:
            hit, _ = self.hits.pop(data.draw(st.integers(0, len(self.hits) - 1)))
            hit.release()
            hit.release()

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if self.hits:
            hit, tokens = data.draw(st.sampled_from(self.hits))
            pages = self.memory.room(hit.pages - hit.device_pages)
            job = self.job(self.directory.load(hit, pages))
            self.loads.append((job, tokens, pages, hit.scope))

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of, leaving=st.booleans(), priority=st.integers(0, 2))
    def store(self, scope: Scope, tokens: list[int], leaving: bool, priority: int) -> None:
        first = min(1, len(tokens) // self.page_size) if leaving else 0
        pages = self.memory.fill(tokens, scope, first)
        job = self.directory.store(tokens, pages, scope, first=first, priority=priority, leaving=leaving)
        self.job(job)

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of, at_once=st.booleans(), flush=st.booleans())
    def serve(self, scope: Scope, tokens: list[int], at_once: bool, flush: bool) -> None:
        """A request as it comes: prefetch, match, load, store."""
        if flush:
            self.directory.flush("host")
        fetch = self.job(self.directory.prefetch(tokens, scope))
        if at_once:
            self.memory.drain(self.directory)
        self.directory.stop(fetch)
        with self.directory.match(tokens, scope) as hit:
            pages = self.memory.room(hit.pages - hit.device_pages)
            load = self.job(self.directory.load(hit, pages))
            self.loads.append((load, tokens, pages, scope))
        if at_once:
            self.memory.drain(self.directory)
            lost = self.directory.figures().tiers["host"].counters.get("lost", 0)
            assert lost or load.usable_pages == len(pages) or NO_ROOM in load.statuses
        stored = self.job(self.directory.store(tokens, self.memory.fill(tokens, scope), scope, leaving=True))
        if at_once:
            self.memory.drain(self.directory)
            assert stored.done

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of)
    def place(self, scope: Scope, tokens: list[int]) -> None:
        if self.directory._device is not None:
            pages = self.memory.fill(tokens, scope)
            new = self.directory.place(tokens, pages, scope)
            for page in np.array(pages, dtype=np.int64)[new].tolist():
                self.placed[page] = self.memory.device[page]

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of, request=st.sampled_from([None, 1, 2]))
    def prefetch(self, scope: Scope, tokens: list[int], request: int | None) -> None:
        fetch = self.directory.prefetch(tokens, scope, request=request)
        if not any(fetch is one for one in self.fetches):
            self.fetches.append(self.job(fetch))

    @rule(data=st.data(), admit=st.booleans())
    def end_prefetch(self, data: st.DataObject, admit: bool) -> None:
        if self.fetches:
            fetch = data.draw(st.sampled_from(self.fetches))
            if not admit:
                self.directory.stop(fetch)
            elif not self.directory.admit(fetch):
                return
            self.fetches = [one for one in self.fetches if one is not fetch]

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.memory.take(self.directory)
        if self.memory.under:
            under = data.draw(st.sampled_from(sorted(self.memory.under.values(), key=lambda u: u.command.id)))
            some = data.draw(st.lists(st.sampled_from(under.left), unique=True)) if under.left else []
            at = sorted(some) or list(under.left)
            statuses = data.draw(st.lists(outcomes, min_size=len(at), max_size=len(at)))
            for ack in self.memory.answer(under.command, at, statuses):
                self.directory.acknowledge(ack)
                if data.draw(st.booleans()):
                    self.directory.acknowledge(ack)  # twice

    @rule(status=st.sampled_from([GOOD, GOOD, BROKEN, LOST, FULL]))
    def carry_out_everything(self, status: PageStatus) -> None:
        self.memory.drain(self.directory, lambda command: status)
        assert all(job.done for job in self.jobs if job.kind != "resize")

    @rule(data=st.data(), pages=st.sampled_from([1, 5, 100]))
    def evict(self, data: st.DataObject, pages: int) -> None:
        tier = data.draw(st.sampled_from(sorted(self.directory._books)))
        freed = self.directory.evict(tier, pages)
        if tier == "device":
            self.give_back(freed.tolist())

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            assert self.memory.device[page] == self.placed.pop(page)

    @rule(by=st.sampled_from([0.0, 0.5, 2.0, 50.0]))
    def time_goes_by(self, by: float) -> None:
        self.now += by
        self.directory.tick()

    @rule(scope=st.sampled_from(SCOPES), tokens=tokens_of)
    def pin(self, scope: Scope, tokens: list[int]) -> None:
        self.directory.pin(tokens, scope, ttl_s=3.0)

    @rule()
    def come_and_go(self) -> None:
        book = self.directory._books.get("disk")
        if book is not None and book.attached:
            self.directory.detach("disk")
        else:
            self.directory.attach(TierPlan("disk", "keys", 20))

    @rule(pages=st.sampled_from([14, 14, 9, 5, 2, 1]))
    def resize(self, pages: int) -> None:
        held = {(id(hit), hit.pages): self.present(hit, tokens) for hit, tokens in self.hits}
        self.sizes = [job for job in self.sizes if not job.done]
        self.sizes.append(self.job(self.directory.resize("host", pages)))
        assert all(job.done for job in self.sizes[:-1])  # one at a time
        for hit, tokens in self.hits:
            assert self.present(hit, tokens) == held[id(hit), hit.pages], "a page that was held is gone"

    def present(self, hit: PrefixHit, tokens: list[int]) -> int:
        """Of the pages that a hit found in the host tier, those that are there now."""
        found = self.directory.index.match(tokens, hit.scope.name(), use=False)
        codes = self.directory.index.codes(found, "host")
        return sum(int((codes[s.first : s.stop] >= 0).sum()) for s in hit.segments if s.tier == "host")

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "directory"):
            check_directory(self.directory)
            for job, tokens, pages, scope in self.loads:
                self.memory.verify(job, tokens, pages, scope)
            self.loads = [load for load in self.loads if not load[0].done]
            assert [id(job) for job in self.jobs if job.done] == [
                id(j) for j in self.jobs if any(j is t for t in self.told)
            ]
            assert all(self.memory.device[page] == content for page, content in self.placed.items())

    def teardown(self) -> None:
        if not hasattr(self, "directory"):
            return
        for hit, _ in self.hits:
            hit.release()
        for fetch in self.fetches:
            self.directory.stop(fetch)
        self.memory.drain(self.directory)
        self.now += 1000.0
        self.directory.tick()
        for _ in range(4):  # a write-back policy wants things written first, and a small disk may refuse them at first
            self.directory.tick()
            self.memory.drain(self.directory)
        assert all(job.done for job in self.jobs) and len(self.told) == len(self.jobs)
        assert self.directory.index.locks == 0 and not self.directory._requests
        assert all(not node.locks for node in self.directory.index.nodes())
        for _ in range(4):  # a tier gives up what a write-back policy wanted written first
            for tier in sorted(self.directory._books, key=["device", "host", "disk", "slow", "far"].index):
                freed = self.directory.flush(tier)
                self.give_back(freed.tolist() if tier == "device" else [])
                self.memory.drain(self.directory)
        check_directory(self.directory)


TestDirectorySteps = DirectorySteps.TestCase
TestDirectorySteps.settings = QUICK


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_thousand_steps() -> None:
    run_state_machine_as_test(DirectorySteps, settings=LONG)
