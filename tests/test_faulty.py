"""What `FaultyTier` does beyond what the contract's own tests of faults show."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tier_contract import done, eventually, statuses
from tier_pages import Arena

from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, TierError
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.memory_tier import MemoryTier

OK, MISS, ERROR, CANCELLED = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.CANCELLED


@pytest.fixture
def pages() -> Iterator[Arena]:
    arena = Arena(3).fill()
    yield arena
    arena.close()


def test_faults_strike_the_calls_that_they_name(pages: Arena) -> None:
    cause = OSError("pulled out")
    faults = [Fault("error", verb="lookup", call=1, times=2, error=cause), Fault("error", call=5, times=None)]
    with MemoryTier(1 << 20) as inner:
        tier = FaultyTier(inner, faults)
        got = [statuses(tier.lookup(pages.keys[:1])) for _ in range(5)]
        assert got == [(MISS,), (ERROR,), (ERROR,), (MISS,), (MISS,)]
        assert [statuses(tier.put_from(pages.keys[:1], pages.buffers[:1])) for _ in range(3)] == [(ERROR,)] * 3
        assert (tier.calls(), tier.calls("lookup"), tier.calls("get")) == (8, 5, 0)
        assert tier.stats().counters["faults_struck"] == tier.faults_struck == 5
        tier.add(Fault("error", verb="remove", call=tier.calls("remove")))
        assert statuses(tier.remove(pages.keys[:1])) == (ERROR,)
        again = FaultyTier(inner, [Fault("error", error=cause)])
        assert done(again.lookup(pages.keys[:1])).errors[0] is cause


@pytest.mark.parametrize("kind", ["wrong_bytes", "short"])
def test_a_silent_fault_hands_wrong_bytes_out(pages: Arena, kind: Any) -> None:
    target = Arena(3)
    with MemoryTier(1 << 20) as inner:
        tier = FaultyTier(inner, [Fault(kind, verb="get", silent=True, pages=[2])])
        done(tier.put_from(pages.keys, pages.buffers)).require()
        assert done(tier.get_into(pages.keys, target.buffers)).all_ok
        assert [target.image(i) == pages.image(i) for i in range(3)] == [True, True, False]
    target.close()


def test_a_held_stall_keeps_the_buffers_whatever_the_caller_does(pages: Arena) -> None:
    with MemoryTier(1 << 20) as inner:
        tier = FaultyTier(inner, [Fault("stall", verb="put", hold=True)])
        handle = tier.put_from(pages.keys, pages.buffers)
        assert handle.cancel()
        with pytest.raises(DeadlineExceeded):
            handle.result(0.1)
        tier.release()
        assert done(handle).all_ok


def test_a_stall_ends_by_itself_and_with_the_tier(pages: Arena) -> None:
    inner = MemoryTier(1 << 20)
    tier = FaultyTier(inner, [Fault("stall", verb="put", seconds=0.1), Fault("stall", verb="get")])
    started = time.monotonic()
    assert done(tier.put_from(pages.keys, pages.buffers)).all_ok
    assert 0.1 <= time.monotonic() - started < 5
    handle = tier.get_into(pages.keys, pages.buffers)
    tier.close(drain=False, timeout_s=5)
    assert handle.done() and set(statuses(handle)) <= {OK, CANCELLED}
    with pytest.raises(TierError, match="closed"):
        inner.lookup(pages.keys)


@pytest.mark.parametrize("kind", ["delay", "stall"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_batch_that_ended_before_its_fault_leaves_nothing(pages: Arena, kind: Any, how: str) -> None:
    before = threading.active_count()
    tier = FaultyTier(MemoryTier(1 << 20), [Fault(kind, verb="put", times=None)])
    handle = tier.put_from(pages.keys, pages.buffers, deadline_s=0.01 if how == "deadline" else None)
    if how == "cancel":
        assert handle.cancel()
    if how != "close":
        assert statuses(handle) == (CANCELLED,) * 3
    batch = weakref.ref(handle)
    tier.close(drain=how != "close", timeout_s=5)
    assert set(statuses(handle)) <= {OK, CANCELLED}
    del handle
    eventually(lambda: threading.active_count() <= before)
    gc.collect()
    assert batch() is None, "kept by the tier"


def test_a_tier_that_is_closed_before_a_rotten_page_can_be_removed(pages: Arena) -> None:
    inner = MemoryTier(1 << 20)
    tier = FaultyTier(inner, [Fault("wrong_bytes", verb="get")])
    done(tier.put_from(pages.keys, pages.buffers)).require()
    get = inner.get_into

    def then_closed(*args: Any, **more: Any) -> Any:
        handle = get(*args, **more)
        assert done(handle).all_ok
        inner.close()
        return handle

    inner.get_into = then_closed  # type: ignore[method-assign]
    assert statuses(tier.get_into(pages.keys, pages.buffers)) == (PageStatus.CORRUPT,) * 3


def test_closing_out_of_time_lets_a_stalled_batch_go(pages: Arena) -> None:
    tier = FaultyTier(MemoryTier(1 << 20), [Fault("stall", verb="put")])
    handle = tier.put_from(pages.keys, pages.buffers)
    with pytest.raises(DeadlineExceeded, match="3 pages cancelled"):
        tier.close(timeout_s=0.05)
    assert statuses(handle) == (CANCELLED,) * 3


def test_death_kills_once(pages: Arena) -> None:
    killed: list[int] = []
    with MemoryTier(1 << 20) as inner:
        tier = FaultyTier(inner, [Fault("death", call=1, times=None)], kill=lambda: killed.append(1))
        assert statuses(tier.lookup(pages.keys)) == (MISS,) * 3
        assert statuses(tier.lookup(pages.keys)) == statuses(tier.remove(pages.keys)) == (ERROR,) * 3
        assert killed == [1]


def test_wrong_bytes_reach_a_tier_that_needs_registered_memory(pages: Arena) -> None:
    class Strict(MemoryTier):
        def __init__(self) -> None:
            super().__init__(1 << 20)
            self.needs_registration = True

    with Strict() as inner:
        tier = FaultyTier(inner, [Fault("wrong_bytes", verb="put")])
        tier.register(pages.payloads)
        tier.register(pages.trailers)
        done(tier.put_from(pages.keys, pages.buffers)).require()
        assert statuses(tier.get_into(pages.keys, pages.buffers)) == (PageStatus.CORRUPT,) * 3
        assert len(inner.registered.regions()) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "fire"}, {"kind": "error", "call": -1}, {"kind": "delay", "seconds": -1}, {"kind": "x", "times": 0}],
)
def test_faults_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Fault(**wrong)
