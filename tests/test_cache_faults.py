"""TieredCache when something fails: tiers that err, lie, stall or die, damaged memory, cancels, deadlines."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cache_helpers import MEMORY, MakeRig, Rig, disk, form, hit_pages, make  # noqa: F401
from engine_helpers import LIMIT_S, until

from kvtransfer.kernels.errors import DeadlineExceeded, OwnershipError, TransferError
from kvtransfer.tiers.base import PageStatus

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
ERROR, CANCELLED, NO_ROOM = PageStatus.ERROR, PageStatus.CANCELLED, PageStatus.NO_ROOM


def in_far_only(rig: Rig, pages: int) -> tuple[list[int], np.ndarray]:
    """Tokens whose pages lie in the lower tier alone, and their bytes."""
    tokens = rig.tokens(pages)
    rows = rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    with rig.cache.match(tokens) as hit:
        assert set(hit.tokens_by_tier) == {"far"} and hit.pages == pages
    return tokens, rows


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_part_of_a_load_fails_and_the_rest_is_usable(make: MakeRig, layerwise: bool) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, rows = in_far_only(rig, 6)
    rig.do("fault", "far", "error", "get", pages=[3, 4])
    with rig.cache.match(tokens) as hit:
        pages = rig.take(6)
        before = rig.image()
        load = rig.cache.load(hit, pages, layerwise=layerwise)
    assert load.await_submitted(LIMIT_S) == 3
    result = load.result(LIMIT_S)
    assert result.statuses[:4] == (OK, OK, OK, ERROR) and OK not in result.statuses[3:]
    assert load.usable_pages == 3 and load.free_page_ids.tolist() == pages[3:] and "injected" in load.detail
    rig.wait_layer(load, 2)
    assert load.verdict(LIMIT_S).ok  # of the pages that it is long
    assert np.array_equal(rig.read(pages[:3]), rows[:3])
    rig.check_untouched(before, pages[:3])
    rig.give(pages)
    assert np.array_equal(rig.loaded(tokens), rows)  # the tier did not lose it


def test_a_load_that_nobody_made_shorter_says_so(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, _ = in_far_only(rig, 4)
    rig.do("fault", "far", "error", "get", pages=[2])
    with rig.cache.match(tokens) as hit:
        pages = rig.take(4)
        load = rig.cache.load(hit, pages, layerwise=True)
    load.result(LIMIT_S)
    verdict = load.verdict(LIMIT_S)
    assert not verdict.ok and verdict.bad_pages == (2, 3)
    with pytest.raises(TransferError, match=r"positions \[2, 3\] can't be loaded: .*injected error"):
        load.wait_layer(0)
    rig.give(pages)


def test_records_that_rot_or_lie_are_misses(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, rows = in_far_only(rig, 5)
    rig.do("fault", "far", "wrong_bytes", "get", pages=[1])
    with rig.cache.match(tokens) as hit:
        pages = rig.take(5)
        load = rig.cache.load(hit, pages)
    assert load.result(LIMIT_S).statuses[:2] == (OK, CORRUPT)
    rig.settle()
    rig.give(pages)
    assert hit_pages(rig, tokens) == 1  # it is forgotten, and what lies behind it can't be reached
    assert np.array_equal(rig.loaded(tokens), rows[:1])

    tokens, rows = in_far_only(rig, 5)  # a tier that lies: the payload is other than it was, and said to be right
    rig.do("fault", "far", "wrong_bytes", "get", pages=[2], silent=True)
    with rig.cache.match(tokens) as hit:
        pages = rig.take(5)
        load = rig.cache.load(hit, pages)
    assert load.result(LIMIT_S).statuses == (OK, OK, CORRUPT, OK, OK)
    verdict = load.verdict(LIMIT_S)
    assert verdict.bad_pages == (2,) and verdict.bad_layers == ((2, 0),)
    assert np.array_equal(rig.read(pages[:2]), rows[:2])
    rig.settle()
    rig.give(pages)
    assert hit_pages(rig, tokens) == 2


def test_a_record_of_other_tokens_under_the_same_key_is_a_miss(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, rows = in_far_only(rig, 4)
    assert rig.do("change_tokens", "far", 2, tokens) == 1
    with rig.cache.match(tokens) as hit:
        pages = rig.take(4)
        load = rig.cache.load(hit, pages)
    assert load.result(LIMIT_S).statuses[:3] == (OK, OK, CORRUPT) and "tokens" in load.detail
    rig.give(pages)
    assert np.array_equal(rig.loaded(tokens), rows[:2])


@pytest.mark.parametrize("layerwise", [False, True])
def test_damaged_host_memory_is_never_published(make: MakeRig, layerwise: bool) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens = rig.tokens(4)
    rows = rig.stored(tokens)
    assert len(rig.do("spoil_slots")) == 4
    with rig.cache.match(tokens) as hit:
        pages = rig.take(4)
        load = rig.cache.load(hit, pages, layerwise=layerwise)
    if layerwise:
        with suppress(TransferError):  # the forward has begun; or the load was judged before it could
            rig.wait_layer(load, 0)
    verdict = load.verdict(LIMIT_S)
    assert not verdict.ok and verdict.bad_pages == (0, 1, 2, 3) and load.usable_pages == 0
    assert [page for page, _ in verdict.bad_layers] == [0, 1, 2, 3] and load.statuses == [CORRUPT] * 4
    rig.settle()
    rig.give(pages)
    assert hit_pages(rig, tokens) == 0
    assert rig.do("counters", "far")["removed"] == 4  # what came from there, or went there, is not trusted either
    rows = rig.stored(tokens)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_damage_before_the_write_below_is_found_when_it_comes_back(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, plans={"far": {"write": "write_back"}})
    tokens = rig.tokens(3)
    rig.stored(tokens)
    rig.do("spoil_slots")
    rig.cache.flush("host")
    rig.settle()
    with rig.cache.match(tokens) as hit:
        assert dict(hit.tokens_by_tier) == {"far": 3 * rig.page_size}
        pages = rig.take(3)
        load = rig.cache.load(hit, pages)
    assert load.result(LIMIT_S).statuses == (CORRUPT,) * 3
    rig.settle()
    rig.give(pages)
    assert hit_pages(rig, tokens) == 0


def test_an_engine_that_is_late_fails_the_store_and_nothing_is_there(make: MakeRig) -> None:  # noqa: F811
    rig = make(engine={"deadline_s": 0.3})
    tokens = rig.tokens(4)
    pages = rig.take(4)
    rig.write(pages)
    rig.do("hold", "copy_out")
    store = rig.cache.store(tokens, pages)
    with pytest.raises(DeadlineExceeded, match=r"4 of 4 pages had no status after 0\.5 s"):
        store.result(0.5)
    assert store.statuses == [None] * 4 and hit_pages(rig, tokens) == 0
    with pytest.raises(OwnershipError, match="cancel it"):
        rig.cache.require_free(pages)  # the copy may still read them
    rig.do("let_go")
    assert store.result(LIMIT_S).statuses == (ERROR,) * 4 and "deadline" in store.detail
    rig.give(pages)
    assert hit_pages(rig, tokens) == 0
    rows = rig.stored(tokens)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_lower_tier_that_stalls_costs_a_time_out(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, mover={"deadline_s": 0.4})
    tokens, rows = in_far_only(rig, 3)
    rig.do("fault", "far", "stall", "get")
    with rig.cache.match(tokens) as hit:
        pages = rig.take(3)
        load = rig.cache.load(hit, pages)
    assert load.result(LIMIT_S).statuses == (CANCELLED,) * 3 and load.usable_pages == 0
    rig.give(pages)
    assert hit_pages(rig, tokens) == 0  # another one would cost as much

    def is_back() -> bool:
        rig.cache.tick()
        return hit_pages(rig, tokens) == 3

    until(is_back, "the tier answers")
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_tier_that_keeps_its_buffers_keeps_slots_but_nobody_waits(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, mover={"deadline_s": 0.2}, slots=8)
    tokens, rows = in_far_only(rig, 5)
    rig.do("fault", "far", "stall", "get", hold=True)
    with rig.cache.match(tokens) as hit:
        pages = rig.take(5)
        load = rig.cache.load(hit, pages, deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="5 of 5 pages had no status"):
        load.result()
    assert time.monotonic() - started < LIMIT_S / 2
    assert load.done() and load.statuses == [CANCELLED] * 5
    rig.give(pages)  # nothing will write these any more
    other = rig.tokens(8)
    more = rig.take(8)
    rig.write(more)
    store = rig.cache.store(other, more)
    assert not store.done()  # three slots are free: the others are the tier's still
    until(lambda: store.usable_pages == 3, "the free slots are used")
    rig.release("far")
    store.result(LIMIT_S)
    assert store.done()
    rig.settle()
    rig.give(more)
    assert np.array_equal(rig.loaded(tokens), rows)


@pytest.mark.parametrize("verb", ["lookup", "remove"])
def test_questions_that_get_no_answer_are_given_up(make: MakeRig, verb: str) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, mover={"deadline_s": 0.2}, plans={"far": {"ask": True}})
    tokens, rows = in_far_only(rig, 3)
    rig.do("fault", "far", "stall", verb, hold=True)
    if verb == "lookup":
        job = rig.cache.prefetch(rig.tokens(3, after=tokens))
        until(lambda: job.done, "the prefetch has an end")
        assert job.statuses[:3] == [OK] * 3 and OK not in job.statuses[3:]
    else:
        rig.cache.evict("far", 2)
        rig.settle()
        assert hit_pages(rig, tokens) == 3  # it did not say that they are gone
    rig.release("far")
    if verb == "lookup":
        assert np.array_equal(rig.loaded(tokens), rows)


def test_writes_that_fail_leave_the_tier_without_the_page(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    rig.do("fault", "far", "error", "put", pages=[1])
    tokens = rig.tokens(3)
    rows = rig.stored(tokens)
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.cache.flush("host")
    rig.settle()
    assert hit_pages(rig, tokens) == 1
    rig.do("fault", "far", "death", "get")
    tokens = rig.tokens(3, after=tokens)
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, pages := rig.take(1))
    assert load.result(LIMIT_S).statuses == (ERROR,)
    rig.give(pages)
    rows = rig.stored(tokens)  # the cache goes on without the tier
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_load_does_not_wait_for_a_slow_write_below(make: MakeRig) -> None:  # noqa: F811
    """Nor does another write of the same slots, nor a read of other pages."""
    rig = make(lower={"near": MEMORY, "far": MEMORY})
    first = rig.tokens(3)
    kept = rig.stored(first)
    rig.cache.flush("host")
    rig.settle()
    tokens = rig.tokens(4)
    rig.do("fault", "near", "stall", "put", hold=True)
    pages = rig.take(4)
    rows = rig.write(pages)
    rig.cache.store(tokens, pages).result(LIMIT_S).require()
    rig.give(pages)
    until(lambda: rig.do("struck", "near"), "the tier has them")
    assert np.array_equal(rig.loaded(tokens), rows)
    assert np.array_equal(rig.loaded(first), kept)
    until(lambda: rig.do("counters", "far")["stored"] == 7, "the other tier has them")
    assert not rig.directory.idle
    rig.release("near")
    rig.cache.flush("host")
    rig.settle()
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_store_that_is_aborted_leaks_nothing_and_stores_no_strangers_bytes(make: MakeRig) -> None:  # noqa: F811
    rig = make(pages=12, slots=32)
    tokens = rig.tokens(8)
    pages = rig.take(8)
    rows = rig.write(pages)
    rig.do("hold", "copy_out")
    store = rig.cache.store(tokens, pages)
    until(lambda: rig.do("held"), "the copy is under way")
    store.cancel()
    with pytest.raises(OwnershipError):
        rig.cache.require_free(pages[:1], wait_s=0.05)
    rig.do("let_go")
    result = store.result(LIMIT_S)
    assert set(result.statuses) <= {OK, CANCELLED}
    rig.cache.require_free(pages)
    others = rig.write(pages)  # the next request writes its own
    stored = rig.cache.store(other := rig.tokens(8), pages)
    stored.result(LIMIT_S).require()
    rig.give(pages)
    assert np.array_equal(rig.loaded(other), others)
    assert np.array_equal(rig.loaded(tokens), rows[: hit_pages(rig, tokens)])


def test_a_store_that_waits_for_room_is_cancelled_at_once(make: MakeRig) -> None:  # noqa: F811
    rig = make(slots=4, lower={"far": MEMORY}, plans={"far": {"write": "write_back"}}, pages=64)
    first = rig.tokens(4)
    rig.stored(first)
    rig.do("fault", "far", "stall", "put", hold=True)
    pages = rig.take(3)
    rig.write(pages)
    store = rig.cache.store(rig.tokens(3), pages)  # the host's pages go below first, and that stalls
    until(lambda: rig.do("struck", "far"), "the tier has them")
    assert not store.done()
    assert store.cancel() and store.done() and store.statuses == [CANCELLED] * 3
    rig.give(pages)
    assert not store.cancel()
    rig.release("far")


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_that_is_cancelled_gives_its_pages_back(make: MakeRig, layerwise: bool) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, rows = in_far_only(rig, 4)
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.do("hold", "copy_in")
    with rig.cache.match(tokens) as hit:
        pages = rig.take(4)
        load = rig.cache.load(hit, pages, layerwise=layerwise)
    load.cancel()
    rig.do("let_go")
    assert set(load.result(LIMIT_S).statuses) in ({OK}, {CANCELLED})
    rig.give(pages)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_handles_beyond_their_deadline_are_cancelled_by_tick(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens, _ = in_far_only(rig, 2)
    rig.do("fault", "far", "stall", "get")
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, pages := rig.take(2), deadline_s=0.1)
    until(load.expired, "the deadline")
    rig.cache.tick()
    until(load.done, "the load is done")
    assert load.statuses == [CANCELLED] * 2
    rig.give(pages)
    rig.release("far")


def test_the_mover_dies(tmp_path: Path) -> None:
    rig = Rig("two processes", tmp_path, lower={"far": MEMORY}, pages=64)
    try:
        tokens, _ = in_far_only(rig, 3)
        kept = rig.tokens(3)
        rig.stored(kept)
        rig.do("hold", "copy_out")
        pages = rig.take(4)
        rig.write(pages)
        store = rig.cache.store(other := rig.tokens(4), pages)
        rig.do("fault", "far", "stall", "get")
        until(lambda: rig.do("held"), "the copy is under way")
        hit = rig.cache.match(tokens)
        load = rig.cache.load(hit, more := rig.take(3))
        fetch = rig.cache.prefetch(rig.tokens(1, after=tokens))
        assert not store.done() and not load.done() and rig.mover.process is not None
        rig.mover.process.kill()
        assert store.result(LIMIT_S).statuses == (ERROR,) * 4
        assert OK not in load.result(LIMIT_S).statuses
        until(lambda: fetch.done, "the prefetch is done")
        rig.cache.require_free([*pages, *more])
        hit.release()
        rig.settle()
        assert [hit_pages(rig, t) for t in (tokens, kept, other)] == [0, 0, 0]
        again = rig.cache.store(other, pages)  # nobody hangs from here on
        assert again.result(LIMIT_S).statuses == (ERROR,) * 4 and "gone" in again.detail
        assert rig.cache.stats().tiers == {}
        rig.settle()
        assert rig.directory.index.locks == 0 and not rig.cache._active
        dropped = rig.cache.close()
        assert dropped.handles == ()
    finally:
        rig.close()
