"""Tiers that fail under a directory: their pages come from the next tier that has them, nothing is planned from them
while they are down, and they come back by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from directory_helpers import BROKEN, GOOD, LOST, Memory, check_directory
from msgspec import structs

from kvtransfer.books import TierPlan
from kvtransfer.commands import Cancel, Command, Load, Lookup, Promote, Scope
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.policy import Prefetch
from kvtransfer.tiers.base import PageStatus

CORRUPT, CANCELLED = PageStatus.CORRUPT, PageStatus.CANCELLED
HOST = TierPlan("host", capacity_pages=1000)
NEAR, FAR, FARTHEST = (TierPlan(name, "keys", capacity_pages=2000) for name in ("near", "far", "farthest"))
SHARED = TierPlan("far", "shared")


class Bench:
    """A directory and its memory; ``now`` is its clock."""

    def __init__(self, *below: TierPlan, **more: Any) -> None:
        self.now = 0.0
        self.directory = Directory(
            2, [HOST, *below], clock=lambda: self.now, **{"prefetch": Prefetch(1, "wait_complete"), **more}
        )
        self.memory = Memory(2)
        self.next_token = 0

    def tokens(self, pages: int) -> list[int]:
        self.next_token += 2 * pages
        return list(range(self.next_token - 2 * pages, self.next_token))

    def below(self, pages: int, *without: tuple[str, int]) -> list[int]:
        """Tokens whose pages are in all lower tiers, not in the host; tiers ``without`` have so many leading ones."""
        tokens = self.tokens(pages)
        directory, memory = self.directory, self.memory
        directory.store(tokens, memory.fill(tokens))
        memory.drain(directory)
        directory.flush("host")
        memory.drain(directory)
        for tier, left in without:
            directory.evict(tier, pages - left)
            memory.drain(directory)
        return tokens

    def load(self, tokens: list[int], **more: Any) -> tuple[Job, list[int]]:
        with self.directory.match(tokens) as hit:
            pages = self.memory.room(hit.pages)
            return self.directory.load(hit, pages, **more), pages

    def tiers(self, tokens: list[int]) -> dict[str, int]:
        with self.directory.match(tokens) as hit:
            return {tier: count // 2 for tier, count in hit.tokens_by_tier.items()}

    def take(self, kind: type[Command]) -> list[Any]:
        return [command for command in self.memory.take(self.directory) if isinstance(command, kind)]

    def answer(self, command: Any, statuses: list[PageStatus], detail: str = "") -> None:
        for ack in self.memory.answer(command, list(range(len(statuses))), statuses):
            self.directory.acknowledge(structs.replace(ack, detail=detail))

    def drain(self, status: Callable[[Command], PageStatus] = lambda command: GOOD) -> list[Promote]:
        """Everything is carried out. The reads of it."""
        seen = len(self.memory.seen)
        self.memory.drain(self.directory, status)
        return [command for command in self.memory.seen[seen:] if isinstance(command, Promote)]

    def down(self, tier: str) -> bool:
        return self.directory.figures().tiers[tier].down

    def check(self) -> None:
        self.drain()
        check_directory(self.directory)
        assert self.directory.index.locks == 0


def near_fails(command: Command) -> PageStatus:
    source = getattr(command, "source", getattr(command, "tier", ""))
    return BROKEN if source == "near" and isinstance(command, Promote | Lookup) else GOOD


@pytest.mark.parametrize("last", [FAR, SHARED], ids=["private", "shared"])
def test_a_load_goes_on_from_the_next_tier(last: TierPlan) -> None:
    bench = Bench(NEAR, last)
    tokens = bench.below(5)
    assert bench.tiers(tokens) == {"near": 5}
    job, pages = bench.load(tokens)
    reads = bench.drain(near_fails)
    assert [read.source for read in reads] == ["near", "far"]
    assert job.done and job.usable_pages == 5 and job.detail == ""
    bench.memory.verify(job, tokens, pages)
    assert bench.down("near") and not bench.down("far")
    bench.check()


def test_nothing_is_planned_from_a_tier_that_is_down_until_it_answers() -> None:
    bench = Bench(NEAR, FAR)
    others = bench.below(3)
    tokens = bench.below(5)
    bench.load(tokens)
    bench.drain(near_fails)
    bench.directory.flush("host")
    bench.drain()
    assert bench.tiers(others) == {"far": 3} and bench.tiers(tokens) == {"far": 5}
    job, pages = bench.load(others)
    assert [read.source for read in bench.drain(near_fails)] == ["far"]
    bench.memory.verify(job, others, pages)
    assert job.usable_pages == 3
    bench.directory.flush("host")
    bench.drain()
    bench.now += 0.99
    bench.directory.tick()
    assert not bench.take(Lookup)  # its pause is not over
    bench.now += 0.01
    bench.directory.tick()
    [look] = bench.take(Lookup)
    assert look.tier == "near" and len(look.keys) == 1 and bench.directory.idle
    bench.directory.tick()
    assert not bench.take(Lookup) and bench.tiers(others) == {"far": 3}  # one look at a time
    bench.answer(look, [GOOD])
    assert bench.tiers(others) == {"near": 3} and not bench.down("near")
    job, pages = bench.load(tokens)
    assert [read.source for read in bench.drain()] == ["near"] and job.usable_pages == 5
    assert bench.directory.figures().tiers["near"].outages == 1
    bench.check()


@pytest.mark.parametrize("answer", [GOOD, LOST, BROKEN, CANCELLED])
def test_any_request_has_the_tier_looked_at_and_any_answer_of_its_own_brings_it_back(answer: PageStatus) -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(2)
    bench.load(tokens)
    bench.drain(near_fails)
    bench.now = 1.0
    if answer is LOST:
        bench.memory.stored = {key: held for key, held in bench.memory.stored.items() if key[0] != "near"}
    bench.tiers(tokens)
    [look] = bench.take(Lookup)
    bench.answer(look, [answer])
    assert bench.down("near") == (answer not in (GOOD, LOST))
    bench.now = 2.9
    bench.tiers(tokens)
    assert not bench.take(Lookup)
    bench.now = 3.0
    bench.directory.prefetch(tokens)
    assert len(bench.take(Lookup)) == (answer not in (GOOD, LOST))
    bench.check()


def test_a_tier_that_answers_but_can_not_be_read_is_left_alone_longer_each_time() -> None:
    bench = Bench(NEAR, FAR, retry_s=(1.0, 5.0))
    tokens = bench.below(2)

    def unreadable(command: Command) -> PageStatus:
        return BROKEN if isinstance(command, Promote) and command.source == "near" else GOOD

    for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
        bench.directory.flush("host")
        bench.drain()
        job, _ = bench.load(tokens)
        assert [read.source for read in bench.drain(unreadable)] == ["near", "far"] and job.usable_pages == 2
        bench.now += 0.75 * pause
        bench.directory.tick()
        assert not bench.take(Lookup)
        bench.now += 0.25 * pause
        bench.directory.tick()
        bench.drain(unreadable)
        assert not bench.down("near")
    bench.directory.flush("host")
    bench.drain()
    bench.load(tokens)
    bench.drain()  # it can be read
    bench.directory.flush("host")
    bench.drain()
    bench.load(tokens)
    bench.drain(unreadable)
    bench.now += 1.0
    bench.directory.tick()
    assert bench.take(Lookup)  # and begins anew
    bench.check()


def test_what_no_other_tier_has_fails_and_what_comes_before_is_loaded() -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(6, ("far", 4))
    job, pages = bench.load(tokens)
    [read] = bench.take(Promote)
    bench.answer(read, [BROKEN] * 6, "the disk is gone")
    assert [read.source for read in bench.drain()] == ["far"]
    assert job.done and job.usable_pages == 4 and job.detail == "the disk is gone"
    assert job.positions(BROKEN) == [4, 5]
    bench.memory.verify(job, tokens, pages)
    assert bench.tiers(tokens) == {"host": 4}
    bench.now = 1.0
    bench.directory.tick()
    bench.drain()
    assert bench.tiers(tokens) == {"host": 4, "near": 2}  # nothing of it was forgotten
    bench.check()


@pytest.mark.parametrize("status", [BROKEN, LOST, CORRUPT])
def test_one_page_that_fails_takes_the_others_nowhere(status: PageStatus) -> None:
    """A read ends with it: what was not begun is read where it lies."""
    bench = Bench(NEAR, FAR)
    tokens = bench.below(5)
    job, pages = bench.load(tokens)
    [read] = bench.take(Promote)
    bench.answer(read, [GOOD, GOOD, status, CANCELLED, CANCELLED])
    assert [(read.source, len(read.keys)) for read in bench.drain()] == [("far", 1), ("near", 2)]
    assert job.usable_pages == 5 and not bench.down("near")
    bench.memory.verify(job, tokens, pages)
    bench.check()


def test_one_page_that_is_nowhere_ends_the_prefix() -> None:
    bench = Bench(NEAR)
    job, _ = bench.load(bench.below(5))
    [read] = bench.take(Promote)
    bench.answer(read, [GOOD, GOOD, LOST, CANCELLED, CANCELLED])
    assert not bench.drain() and job.done and job.usable_pages == 2  # what lies behind is of no use
    bench.check()


def test_what_waits_for_its_turn_does_not_go_to_a_tier_that_went_down() -> None:
    bench = Bench(NEAR, FAR, window=1)
    tokens = bench.below(500, ("far", 300))
    job, pages = bench.load(tokens)
    [read] = bench.take(Promote)
    assert read.source == "near" and len(read.keys) < 300
    bench.answer(read, [BROKEN] * len(read.keys))
    assert {read.source for read in bench.drain()} == {"far"}
    assert job.done and job.usable_pages == 300
    bench.memory.verify(job, tokens, pages)
    bench.check()


def test_a_hit_made_before_is_loaded_from_elsewhere() -> None:
    bench = Bench(NEAR, FAR)
    tokens, others = bench.below(3), bench.below(4)
    hit = bench.directory.match(tokens)
    bench.load(others)
    bench.drain(near_fails)
    job = bench.directory.load(hit, pages := bench.memory.room(3))
    hit.release()
    assert [read.source for read in bench.drain(near_fails)] == ["far"] and job.usable_pages == 3
    bench.memory.verify(job, tokens, pages)
    bench.check()


def test_every_tier_fails() -> None:
    bench = Bench(NEAR, FAR, FARTHEST)
    tokens = bench.below(3)
    job, _ = bench.load(tokens)
    reads = bench.drain(lambda command: BROKEN if isinstance(command, Promote) else GOOD)
    assert [read.source for read in reads] == ["near", "far", "farthest"]
    assert job.done and job.positions(BROKEN) == [0, 1, 2]
    assert bench.tiers(tokens) == {}
    bench.now = 1.0
    bench.directory.tick()
    bench.drain()
    assert bench.tiers(tokens) == {"near": 3}
    bench.check()


@pytest.mark.parametrize("kind", ["load", "prefetch"])
def test_who_gives_up_gets_no_other_tier_asked_and_blames_none(kind: str) -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(3)
    job = bench.load(tokens)[0] if kind == "load" else bench.directory.prefetch(tokens)
    [read] = bench.take(Promote)
    bench.directory.cancel(job)
    assert bench.take(Cancel)
    bench.answer(read, [CANCELLED] * 3)
    assert not bench.drain() and job.done and not bench.down("near")
    bench.check()


def test_a_prefetch_goes_on_from_the_next_tier() -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(4)
    job = bench.directory.prefetch(tokens)
    assert [read.source for read in bench.drain(near_fails)] == ["near", "far"]
    assert job.done and job.usable_pages == 4 and bench.tiers(tokens) == {"host": 4}
    bench.directory.flush("host")
    bench.drain()
    job = bench.directory.prefetch(tokens)
    assert [read.source for read in bench.drain(near_fails)] == ["far"] and job.usable_pages == 4
    bench.check()


def test_a_shared_tier_that_does_not_answer_lookups_is_not_asked() -> None:
    bench = Bench(NEAR, SHARED)
    tokens = bench.tokens(4)
    job = bench.directory.prefetch(tokens)
    [look] = bench.take(Lookup)
    bench.answer(look, [BROKEN] * 4)
    assert job.done and bench.down("far")
    assert bench.directory.prefetch(tokens).done and not bench.take(Lookup)
    bench.now = 1.0
    bench.directory.tick()
    bench.drain()
    assert not bench.down("far")
    bench.directory.prefetch(tokens)
    assert bench.take(Lookup)
    bench.check()


def test_a_lookup_that_fails_forgets_nothing() -> None:
    """Only a tier that says that it has not the page: else room would be counted that is not there."""
    near = TierPlan("near", "keys", capacity_pages=2000, ask=True)
    bench = Bench(near)
    tokens = bench.below(6)
    used = bench.directory.figures().tiers["near"].used_pages
    index = bench.directory.index
    found = index.match(tokens, Scope().name(), use=False)
    index.write(found.node, "near", np.array([2]), np.array([-1]))  # a gap: what is behind it has to be asked for
    bench.directory._books["near"].give(np.zeros(1, dtype=np.int64))
    job = bench.directory.prefetch(tokens)
    [look] = bench.take(Lookup)
    bench.answer(look, [GOOD, BROKEN, CANCELLED, BROKEN][: len(look.keys)])
    bench.drain()
    assert job.done and bench.directory.figures().tiers["near"].used_pages == used
    bench.check()


def test_time_is_shared_between_the_tiers_that_have_a_page() -> None:
    bench = Bench(NEAR, FAR, FARTHEST)
    tokens = bench.below(3)
    bench.load(tokens, deadline_s=8.0)
    within = [read.within_s for read in bench.drain(lambda c: BROKEN if isinstance(c, Promote) else GOOD)]
    assert within == [4.0, 2.0, 0.0]
    bench = Bench(NEAR)
    bench.load(bench.below(3), deadline_s=8.0)
    assert [read.within_s for read in bench.drain()] == [0.0]
    bench = Bench(NEAR, FAR)
    bench.load(bench.below(3))
    assert [read.within_s for read in bench.drain()] == [0.0]


def test_a_tier_is_not_blamed_for_the_haste_of_a_load() -> None:
    """Half of a short deadline was too little for it: the load goes on elsewhere, and it stays up for all others."""
    bench = Bench(NEAR, FAR)
    tokens = bench.below(3)
    job, pages = bench.load(tokens, deadline_s=0.02)
    [read] = bench.take(Promote)
    assert read.source == "near" and read.within_s == 0.01
    bench.answer(read, [CANCELLED] * 3)
    assert not bench.down("near")
    assert [again.source for again in bench.drain()] == ["far"]
    assert job.done and job.usable_pages == 3
    bench.memory.verify(job, tokens, pages)
    bench.check()


def test_tiers_are_not_blamed_for_a_mover_that_is_gone() -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(3)
    job, _ = bench.load(tokens)
    bench.directory.commands()
    bench.directory.lost()
    assert job.done and job.usable_pages == 0
    assert not bench.down("near") and not bench.down("far")
    bench.check()


@pytest.mark.parametrize("how", ["detach", "close"])
def test_a_look_that_is_under_way_is_waited_for_by_nobody(how: str) -> None:
    bench = Bench(NEAR, FAR)
    tokens = bench.below(3)
    bench.load(tokens)
    bench.drain(near_fails)
    bench.now = 1.0
    bench.directory.tick()
    [look] = bench.take(Lookup)
    if how == "close":
        bench.directory.close()
        assert [cancel.command for cancel in bench.take(Cancel)] == [look.id]
    else:
        bench.directory.detach("near")
        bench.directory.attach(NEAR)
    late = bench.directory.late_answers
    bench.answer(look, [BROKEN])
    assert bench.directory.late_answers == late + 1
    assert bench.down("near") == (how == "close")
    bench.check()


def test_loads_of_a_tier_that_went_down_and_came_back_meanwhile() -> None:
    """An answer that was under way all the time is one."""
    bench = Bench(NEAR, FAR)
    tokens, others = bench.below(3), bench.below(4)
    bench.load(tokens)
    [first] = bench.take(Promote)
    bench.load(others)
    [second] = bench.take(Promote)
    bench.answer(first, [BROKEN] * 3)
    assert bench.down("near")
    bench.answer(second, [GOOD] * 4)
    assert not bench.down("near")
    assert {type(command) for command in bench.memory.take(bench.directory)} == {Promote, Load}
    bench.check()


@pytest.mark.parametrize("retry_s", [(0.0, 1.0), (2.0, 1.0), (-1.0, -1.0)])
def test_bad_pauses(retry_s: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="retry_s"):
        Bench(NEAR, retry_s=retry_s)
