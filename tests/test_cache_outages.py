"""TieredCache when a private lower tier dies, stalls or errs, and comes back: loads go on from the tier below it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cache_helpers import MEMORY, MakeRig, Rig, form, hit_pages, make  # noqa: F401
from engine_helpers import LIMIT_S, Bytes, until

from kvtransfer.tiers.base import PageStatus

OK = PageStatus.OK
LOWER = {"near": MEMORY, "far": MEMORY}
RETRY = {"retry_s": (0.05, 0.2)}
Kept = list[tuple[list[int], Bytes]]


def tiers_of(rig: Rig, tokens: list[int]) -> set[str]:
    with rig.cache.match(tokens) as hit:
        return set(hit.tokens_by_tier)


def filled(rig: Rig, count: int, pages: int) -> Kept:
    """Prefixes that both lower tiers have, and the host has not."""
    kept = [(tokens := rig.tokens(pages), rig.stored(tokens)) for _ in range(count)]
    flush(rig)
    assert all(tiers_of(rig, tokens) == {"near"} for tokens, _ in kept)
    return kept


def flush(rig: Rig) -> None:
    rig.cache.flush("host")
    rig.settle()


def is_down(rig: Rig, tier: str = "near") -> bool:
    return rig.directory.figures().tiers[tier].down


def back(rig: Rig, tier: str = "near") -> None:
    """Until the tier is used again."""

    def up() -> bool:
        rig.cache.tick()
        return not is_down(rig, tier)

    until(up, f"{tier} is used again")


@pytest.mark.parametrize("call", [0, 1, 3])
def test_death_at_a_chosen_read(make: MakeRig, call: int) -> None:  # noqa: F811
    rig = make(lower=LOWER, directory=RETRY)
    kept = filled(rig, 4, 5)
    rig.do("fault", "near", "death", "get", later=call)
    for tokens, rows in kept:
        assert np.array_equal(rig.loaded(tokens), rows)
    assert rig.do("struck", "near") >= 1
    flush(rig)
    asked = rig.do("calls", "far", "get")
    for tokens, rows in kept:
        assert tiers_of(rig, tokens) == {"far"}
        assert np.array_equal(rig.loaded(tokens), rows)
    assert rig.do("calls", "far", "get") > asked
    more = rig.tokens(3)  # it goes on
    rows = rig.stored(more)
    flush(rig)
    assert np.array_equal(rig.loaded(more), rows)
    rig.do("revive", "near")
    back(rig)
    flush(rig)
    reads = rig.do("calls", "near", "get")
    for tokens, rows in kept:
        assert np.array_equal(rig.loaded(tokens), rows)
    assert rig.do("calls", "near", "get") > reads


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"), [("error", {}), ("partial", {"count": 2}), ("wrong_bytes", {}), ("short", {})]
)
def test_a_read_that_fails_once(make: MakeRig, kind: str, more: dict[str, Any], layerwise: bool) -> None:  # noqa: F811
    """Some of its pages, or all: the load is whole, of the right bytes."""
    for pages in (None, [1, 3]):
        rig = make(lower=LOWER, directory=RETRY)
        [(tokens, rows)] = filled(rig, 1, 6)
        rig.do("fault", "near", kind, "get", pages=pages, **more)
        with rig.cache.match(tokens) as hit:
            ids = rig.take(6)
            before = rig.image()
            load = rig.cache.load(hit, ids, layerwise=layerwise)
        assert load.await_submitted(LIMIT_S) == 6
        rig.wait_layer(load, rig.spec.num_layers - 1)
        assert load.result(LIMIT_S).all_ok and load.verdict(LIMIT_S).verified and load.detail == ""
        assert np.array_equal(rig.read(ids), rows)
        rig.check_untouched(before, ids)
        rig.give(ids)
        if is_down(rig):
            back(rig)
        flush(rig)
        assert np.array_equal(rig.loaded(tokens), rows)


def test_a_stall_leaves_time_for_the_next_tier(make: MakeRig) -> None:  # noqa: F811
    """The mover would wait longer than the load."""
    rig = make(lower=LOWER, directory={"retry_s": (0.5, 1.0)})
    kept = filled(rig, 2, 4)
    rig.do("fault", "near", "stall", None, times=None)
    (tokens, rows), (others, more) = kept
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, ids := rig.take(4), deadline_s=2.0)
    began = time.monotonic()
    load.result().require()
    assert time.monotonic() - began < 2.0
    assert np.array_equal(rig.read(ids), rows) and is_down(rig)
    rig.give(ids)
    began = time.monotonic()
    assert np.array_equal(rig.loaded(others), more)  # it costs one time-out, not one each
    assert time.monotonic() - began < 1.0
    rig.release("near")


def test_a_stall_of_the_only_tier_costs_one_time_out(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"near": MEMORY}, mover={"deadline_s": 0.3}, directory=RETRY)
    [(tokens, rows)] = filled(rig, 1, 4)
    rig.do("fault", "near", "stall", "get", times=None)
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, ids := rig.take(4))
    assert OK not in load.result(LIMIT_S).statuses
    rig.give(ids)
    assert is_down(rig) and hit_pages(rig, tokens) == 0
    back(rig)  # lookups are answered; and reads?
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, ids := rig.take(4))
    assert OK not in load.result(LIMIT_S).statuses and is_down(rig)
    rig.give(ids)
    rig.do("clear_faults", "near")
    back(rig)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_prefetch_goes_on_from_the_next_tier(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower=LOWER, directory=RETRY)
    [(tokens, rows)] = filled(rig, 1, 5)
    rig.do("fault", "near", "death", "get")
    job = rig.cache.prefetch(tokens)
    until(lambda: job.done, "it has ended")
    assert job.usable_pages == 5 and tiers_of(rig, tokens) == {"host"}
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.do("revive", "near")


def test_the_owner_of_a_tier_is_gone(make: MakeRig) -> None:  # noqa: F811
    """It was closed under the cache: every call raises."""
    rig = make(lower=LOWER, directory=RETRY)
    kept = filled(rig, 3, 4)
    rig.do("close_tier", "near")
    for tokens, rows in kept:
        assert np.array_equal(rig.loaded(tokens), rows)
    assert is_down(rig)
    for _ in range(3):
        rig.cache.tick()
        time.sleep(0.06)
    assert is_down(rig)
    tokens = rig.tokens(4)
    rows = rig.stored(tokens)
    flush(rig)
    assert tiers_of(rig, tokens) == {"far"}
    assert np.array_equal(rig.loaded(tokens), rows)


def test_many_loads_while_tiers_die_and_come_back(make: MakeRig) -> None:  # noqa: F811
    """Loads from several prefixes at once, at each of which something else happens."""
    rig = make(lower=LOWER, directory=RETRY, pages=96, slots=40)
    kept = filled(rig, 6, 5)
    for turn in range(12):
        tier = ("near", "far")[turn % 2]
        if turn % 3 != 2:
            rig.do("fault", tier, "death" if turn % 3 else "error", "get", pages=[int(rig.rng.integers(5))])
        loads = []
        for tokens, rows in kept:
            with rig.cache.match(tokens) as hit:
                loads.append((rig.cache.load(hit, rig.take(hit.pages)), rows))
        for load, rows in loads:
            load.result(LIMIT_S)
            good = load.usable_pages
            assert np.array_equal(rig.read(load.page_ids[:good]), rows[:good])
            rig.give(load.page_ids.tolist())
        rig.do("revive", "near")
        rig.do("revive", "far")
        back(rig, "near")
        back(rig, "far")
        flush(rig)
    for tokens, rows in kept:
        assert np.array_equal(rig.loaded(tokens), rows)
