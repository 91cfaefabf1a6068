"""Jobs and their outcomes: what a worker makes of each way to tell them, and how a batch is cut into jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tier_contract import done, eventually, statuses
from tier_pages import Arena

from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes, Same, grouped, singly
from kvtransfer.tiers.memory_tier import MemoryTier

OK, MISS, CORRUPT, ERROR, CANCELLED = (
    PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT, PageStatus.ERROR, PageStatus.CANCELLED,
)  # fmt: skip
Told = Callable[[Job, list[Outcome]], Outcomes]


class Teller(MemoryTier):
    """Does the work of a memory tier, and tells of it as ``told`` says."""

    told: Told | None = None

    def _tell(self, job: Job, outcomes: Outcomes) -> Outcomes:
        told = getattr(self, "told", None)
        return outcomes if told is None else told(job, list(singly(outcomes)))

    def do_lookup(self, job: Job) -> Outcomes:
        return self._tell(job, super().do_lookup(job))

    def do_get(self, job: Job) -> Outcomes:
        return self._tell(job, super().do_get(job))

    def do_put(self, job: Job) -> Outcomes:
        return self._tell(job, super().do_put(job))

    def do_remove(self, job: Job) -> Outcomes:
        return self._tell(job, super().do_remove(job))

    def do_pin(self, job: Job) -> Outcomes:
        return self._tell(job, super().do_pin(job))

    def rot(self, key: bytes) -> None:
        self._pages[key][5] ^= 1


def same(status: PageStatus = OK, *, checked: bool = False) -> Told:
    """The whole job as one."""
    return lambda job, some: [Same(0, len(some), status, some[0].moved_bytes, checked)]


@pytest.fixture
def pages() -> Iterator[Arena]:
    arena = Arena(12).fill()
    yield arena
    arena.close()


@pytest.fixture
def tier(pages: Arena) -> Iterator[Teller]:
    with Teller(1 << 24, workers=1) as made:
        done(made.put_from(pages.keys, pages.buffers)).require()
        yield made


def test_runs_lists_and_single_outcomes_are_the_same_to_who_reads_them() -> None:
    told: list[Outcome | list[Outcome] | Same] = [
        Outcome(0, MISS), Same(1, 3, OK, 77, True), [Outcome(4, MISS), Outcome(5, OK, None, 9)], [], Same(6, 1, MISS),
    ]  # fmt: skip
    assert list(grouped(told)) == [[told[0]], *told[1:]]
    ok = [Outcome(at, OK, None, 77, True) for at in (1, 2, 3)]
    assert list(singly(told)) == [Outcome(0, MISS), *ok, Outcome(4, MISS), Outcome(5, OK, None, 9), Outcome(6, MISS)]


def test_a_run_that_the_tier_has_not_checked_is_checked(tier: Teller, pages: Arena) -> None:
    """Whatever the tier says of the whole run, each page is looked at; what is rotten is set aside."""
    read = tier.stats().counters["bytes_read"]
    for at in (3, 11):
        tier.rot(pages.keys[at])
    tier.told = same()
    result = done(tier.get_into(pages.keys, pages.buffers))
    assert result.statuses == tuple(CORRUPT if at in (3, 11) else OK for at in range(12))
    assert "checksum" in str(result.errors[3]) and tier.stats().counters["bytes_read"] - read == 12 * pages.record_bytes
    tier.told = None
    assert statuses(tier.lookup(pages.keys)) == tuple(MISS if at in (3, 11) else OK for at in range(12))


def test_a_run_that_the_tier_has_checked_is_believed(tier: Teller, pages: Arena) -> None:
    tier.rot(pages.keys[3])
    tier.told = same(checked=True)
    assert done(tier.get_into(pages.keys, pages.buffers)).all_ok
    counters = tier.stats().counters
    assert counters["hits"] == 12 and counters["bytes_read"] == 12 * pages.record_bytes


@pytest.mark.parametrize("checked", [False, True])
def test_a_run_of_corrupt_pages_is_set_aside(tier: Teller, pages: Arena, checked: bool) -> None:
    tier.told = lambda job, some: [Same(0, 2, CORRUPT, 5, checked), *some[2:]]
    assert statuses(tier.get_into(pages.keys, pages.buffers)) == (CORRUPT,) * 2 + (OK,) * 10
    tier.told = None
    assert statuses(tier.lookup(pages.keys)) == (MISS,) * 2 + (OK,) * 10


@pytest.mark.parametrize("checked", [False, True])
def test_a_run_that_ends_where_the_batch_was_cancelled(tier: Teller, pages: Arena, checked: bool) -> None:
    """What came counts, what did not is CANCELLED, and neither is told twice."""
    before = tier.stats().counters["bytes_read"]

    def stopped(job: Job, some: list[Outcome]) -> Outcomes:
        yield Same(0, 5, OK, some[0].moved_bytes, checked)
        job.batch.cancel()
        assert job.stopping
        yield Same(5, 7, CANCELLED)
        yield Same(3, 4, MISS)  # late

    tier.told = stopped
    assert statuses(tier.get_into(pages.keys, pages.buffers)) == (OK,) * 5 + (CANCELLED,) * 7
    counters = tier.stats().counters
    assert counters["bytes_read"] - before == 5 * pages.record_bytes and counters["cancelled"] == 7


@pytest.mark.parametrize("verb", ["lookup", "get", "put", "remove"])
@pytest.mark.parametrize("run", [(0, 13), (-1, 1), (5, -2), (13, 0)])
def test_a_run_of_pages_that_the_job_has_not_is_a_bug_that_is_told(
    tier: Teller, pages: Arena, verb: str, run: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page gets an outcome by it, nor does a counter move."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    before = tier.stats().counters
    tier.told = lambda job, some: [Same(*run, OK, 1000, True)]
    calls = {
        "lookup": lambda: tier.lookup(pages.keys),
        "get": lambda: tier.get_into(pages.keys, pages.buffers),
        "put": lambda: tier.put_from(pages.keys, pages.buffers),
        "remove": lambda: tier.remove(pages.keys),
    }
    result = done(calls[verb]())
    assert result.statuses == (ERROR,) * 12 and "12 pages" in str(result.errors[0])
    eventually(lambda: len(reported) == 1)
    after = tier.stats().counters
    assert after == {**before, "errors": before["errors"] + 12}


def test_runs_of_other_verbs(tier: Teller, pages: Arena) -> None:
    more = Arena(8).fill()
    more.buffers[2].trailer[60] ^= 1  # not sealed: what the tier is given has a gap
    tier.told = same()
    before = tier.stats().counters["bytes_written"]
    assert statuses(tier.put_from(more.keys, more.buffers)) == (OK, OK, ERROR) + (OK,) * 5
    assert tier.stats().counters["bytes_written"] - before == 7 * more.record_bytes
    assert statuses(tier.lookup(more.keys[3:])) == (OK,) * 5
    assert statuses(tier.pin(more.keys[3:], None)) == (OK,) * 5 and set(tier.pins.keys()) == set(more.keys[3:])
    assert statuses(tier.remove(more.keys[1:4])) == (
        OK,
        OK,
        ERROR,
    )  # the last is pinned; the one before never was there
    tier.told = same(MISS)
    assert statuses(tier.pin(more.keys[3:], None)) == (MISS,) * 5 and tier.pins.keys() == []
    assert statuses(tier.get_into(pages.keys, pages.buffers)) == (MISS,) * 12
    more.close()


def test_a_batch_is_spread_where_nothing_waits_and_else_goes_as_one(pages: Arena) -> None:
    gate, jobs = threading.Event(), list[list[int]]()

    class Slow(MemoryTier):
        def do_lookup(self, job: Job) -> Outcomes:
            jobs.append(job.positions)
            gate.wait(10)
            return super().do_lookup(job)

    with Slow(1 << 20, workers=2, timeout_s=20) as tier:
        handles = [tier.lookup(pages.keys)]
        eventually(lambda: len(jobs) == 2)
        handles += [tier.lookup(pages.keys[:3]), tier.lookup(pages.keys)]
        gate.set()
        assert all(set(statuses(handle)) == {MISS} for handle in handles)
    assert sorted(jobs[:2]) == [[*range(6)], [*range(6, 12)]], "each of the workers had a part"
    assert sorted(jobs[2:]) == sorted([[0, 1], [2], [*range(12)]]), (
        "spread at first; then both were busy and one waited"
    )
