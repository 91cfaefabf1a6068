"""The slot allocator against a naive model, its runs, and its memory."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.kernels.errors import CapacityError, OwnershipError
from kvtransfer.tiers.extents import Extents


def ids(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(slots, dtype=np.int64)


def naive_runs(free: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in sorted(free):
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def check_placement(free: dict[int, int], got: list[int], n: int, after: int | None) -> None:
    """``got`` is what best fit gives: behind ``after`` first, then in the smallest run that holds the rest, and while
    there is none in the whole of the largest one. Which of several runs of that length is open."""
    at = 0
    if n and after is not None and after + 1 in free:
        at = min(n, free.pop(after + 1))
        assert got[:at] == list(range(after + 1, after + 1 + at))
    while at < n:
        left = n - at
        wanted = min((length for length in free.values() if length >= left), default=max(free.values(), default=0))
        assert free.pop(got[at]) == wanted
        take = min(left, wanted)
        assert got[at : at + take] == list(range(got[at], got[at] + take))
        at += take
    assert len(got) == n


def test_one_slot() -> None:
    extents = Extents(1)
    assert extents.allocate(1).tolist() == [0]
    with pytest.raises(CapacityError, match="expected 1 free slots, got 0 of 1"):
        extents.allocate(1)
    extents.free(ids(0))
    assert extents.free_runs() == [(0, 1)]


def test_best_fit_takes_the_smallest_run_that_holds_it() -> None:
    extents = Extents(20)
    extents.allocate(20)
    extents.free(ids(0, 1, 2, 3, 4, 7, 8, 9, 12, 13))
    assert extents.allocate(2).tolist() == [12, 13]
    assert extents.allocate(2).tolist() == [7, 8]
    assert extents.allocate(4).tolist() == [0, 1, 2, 3]


def test_no_run_holds_it_the_largest_come_first() -> None:
    extents = Extents(12)
    extents.allocate(12)
    extents.free(ids(0, 2, 3, 6, 7, 8))
    assert extents.allocate(5).tolist() == [6, 7, 8, 2, 3]
    assert extents.free_runs() == [(0, 1)]


def test_a_prefix_is_continued_behind_its_last_slot() -> None:
    extents = Extents(16)
    first, other = extents.allocate(3), extents.allocate(3)
    assert other.tolist() == [3, 4, 5]
    assert extents.allocate(2, after=int(first[-1])).tolist() == [6, 7]  # 3 is taken: anywhere
    extents.free(ids(3, 4))
    assert extents.allocate(4, after=2).tolist() == [3, 4, 8, 9]  # as far as it is free, then the rest in one run
    assert extents.allocate(2, after=9).tolist() == [10, 11]
    assert extents.allocate(1, after=15).tolist() == [12]
    assert extents.allocate(0, after=12).tolist() == []


def test_freed_neighbours_join() -> None:
    extents = Extents(9)
    extents.allocate(9)
    for slot in (1, 3, 5, 7, 2, 4, 6):
        extents.free(ids(slot))
    assert extents.free_runs() == [(1, 7)]
    extents.free(ids(8, 0))
    assert extents.free_runs() == [(0, 9)]


def test_fragmentation_report() -> None:
    extents = Extents(10)
    whole = extents.fragmentation()
    assert (whole.free_slots, whole.free_runs, whole.largest_run, whole.outside_largest) == (10, 1, 10, 0.0)
    extents.allocate(10)
    none = extents.fragmentation()
    assert (none.free_slots, none.free_runs, none.largest_run, none.outside_largest) == (0, 0, 0, 0.0)
    extents.free(ids(0, 1, 4, 5, 6, 9))
    some = extents.fragmentation()
    assert (some.free_slots, some.free_runs, some.largest_run, some.outside_largest) == (6, 3, 3, 0.5)


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ((4,), r"got \[4\]: free already"),
        ((0, 5, 4), r"got \[5, 4\]: free already"),
        ((0, 1, 0), r"distinct slots, got \[0\]"),
        ((0, 6), r"in 0\.\.5, got \[6\]"),
        ((-1,), r"got \[-1\]"),
    ],
)
def test_bad_frees_name_the_slots_and_change_nothing(slots: tuple[int, ...], says: str) -> None:
    extents = Extents(6)
    extents.allocate(4)
    with pytest.raises(OwnershipError, match=says):
        extents.free(ids(*slots))
    assert extents.free_runs() == [(4, 2)]
    assert extents.free_slots == 2


def test_refused_allocation_takes_nothing_and_says_numbers() -> None:
    extents = Extents(6, ready=4)
    extents.allocate(1)
    with pytest.raises(CapacityError, match="expected 4 free slots, got 3 of 4, 2 more not ready yet"):
        extents.allocate(4)
    with pytest.raises(CapacityError, match="at least 0, got -1"):
        extents.allocate(-1)
    assert extents.free_slots == 3


def test_runs_in_any_order_come_back_whole() -> None:
    """Few runs out of order, many single slots, and the same slots backwards: one and the same free space."""
    one_by_one = np.random.default_rng(5).permutation(np.arange(3, 60))
    for back in (ids(*range(40, 60), *range(3, 40)), one_by_one, np.arange(59, 2, -1)):
        extents = Extents(64)
        extents.allocate(64)
        extents.free(back)
        assert extents.free_runs() == [(3, 57)] and extents.free_slots == 57


def test_overlapping_runs_name_what_is_given_twice() -> None:
    extents = Extents(100)
    extents.allocate(90)
    twice = ids(*range(40, 60), *range(20, 42))
    with pytest.raises(OwnershipError, match=r"distinct slots, got \[40, 41\] more than once"):
        extents.free(twice)
    with pytest.raises(OwnershipError, match=r"in 0\.\.99, got \[100\]"):
        extents.free(ids(*range(80, 101), *range(5, 40)))
    with pytest.raises(OwnershipError, match=r"got \[-2, -1\]"):
        extents.free(ids(*range(-2, 30)))
    assert extents.free_runs() == [(90, 10)]


def test_growing_joins_the_free_end() -> None:
    extents = Extents(8, ready=0)
    extents.grow(3)
    assert extents.allocate(2).tolist() == [0, 1]
    extents.grow(6)
    extents.grow(6)
    assert extents.free_runs() == [(2, 4)]
    with pytest.raises(OwnershipError, match=r"in 0\.\.5, got \[7\]"):
        extents.free(ids(7))
    for wrong in (5, 9):
        with pytest.raises(CapacityError, match="expected to grow"):
            extents.grow(wrong)


def test_slots_that_are_to_go_are_given_out_no_more() -> None:
    extents = Extents(10)
    assert extents.allocate(7).tolist() == list(range(7))
    extents.shrink(4)
    assert (extents.ready, extents.free_slots, extents.leaving, extents.free_runs()) == (4, 0, 3, [])
    extents.free(ids(5, 2, 3, 4))  # across the new end
    assert (extents.free_slots, extents.leaving, extents.free_runs()) == (2, 1, [(2, 2)])
    with pytest.raises(OwnershipError, match=r"got \[5\]: free already"):
        extents.free(ids(5))
    extents.grow(9)  # 6 is in use still
    assert extents.free_runs() == [(2, 4), (7, 2)] and extents.leaving == 0 and extents.free_slots == 6
    extents.free(ids(6))
    assert extents.free_runs() == [(2, 7)]
    for wrong in (-1, 10):
        with pytest.raises(CapacityError, match=r"expected to shrink to 0\.\.9"):
            extents.shrink(wrong)


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 40), seed=st.randoms(use_true_random=False))
def test_same_as_a_set(count: int, seed: random.Random) -> None:
    """Random allocations, growth, shrinking and frees, against a set of free slots."""
    ready = seed.randint(0, count)
    extents, free, taken = Extents(count, ready), set(range(ready)), set[int]()
    for _ in range(40):
        action = seed.random()
        if action < 0.1 and ready < count:
            more = seed.randint(ready, count)
            free.update(set(range(ready, more)) - taken)
            ready = more
            extents.grow(ready)
        elif action < 0.17:
            ready = seed.randint(0, ready)
            free = {slot for slot in free if slot < ready}
            extents.shrink(ready)
        elif action < 0.55:
            n = seed.randint(0, count // 2 + 1)
            after = seed.choice([None, seed.randint(0, count - 1)])
            if n > len(free):
                with pytest.raises(CapacityError):
                    extents.allocate(n, after)
            else:
                got = extents.allocate(n, after).tolist()
                check_placement(dict(naive_runs(free)), got, n, after)
                free.difference_update(got)
                taken.update(got)
        elif taken:
            back = seed.sample(sorted(taken), seed.randint(1, len(taken)))
            if seed.random() < 0.5:  # most stores are given back as the runs they are
                back.sort(reverse=seed.random() < 0.3)
            extents.free(ids(*back))
            taken.difference_update(back)
            free.update(slot for slot in back if slot < ready)
        assert extents.free_runs() == naive_runs(free)
        assert extents.free_slots == len(free)
        report = extents.fragmentation()
        longest = max((length for _, length in naive_runs(free)), default=0)
        assert (report.free_runs, report.largest_run) == (len(naive_runs(free)), longest)
        everything = np.arange(count, dtype=np.int64)
        assert extents.taken(everything).tolist() == [slot in taken for slot in range(count)]
        assert extents.leaving == sum(slot >= ready for slot in taken)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_kept_ids_own_their_storage_and_memory_stays() -> None:
    """10^5 rounds on a pool of 10^6 slots, one id of each kept as a slice, the way an index keeps them."""
    extents = Extents(1_000_000)
    kept = []
    before = rss_bytes()
    for _ in range(100_000):
        slots = extents.allocate(8)
        assert slots.base is None and slots.flags.owndata
        kept.append(slots[:1])
        extents.free(slots[1:])
    assert rss_bytes() - before < 50 << 20
    assert extents.free_slots == 900_000
    assert extents.fragmentation().free_runs == 1
