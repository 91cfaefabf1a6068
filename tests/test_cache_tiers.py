"""TieredCache and its tiers: policies, several of them, coming and going, prefetching, pins, namespaces."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cache_helpers import MEMORY, SMALL, SPACE, MakeRig, Rig, disk, form, hit_pages, make  # noqa: F401
from engine_helpers import LIMIT_S, until

from kvtransfer.commands import Scope
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, LayoutError, OwnershipError, TierError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.policy import Prefetch
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_keys

OK, CANCELLED = PageStatus.OK, PageStatus.CANCELLED


def tiers_of(rig: Rig, tokens: list[int]) -> dict[str, int]:
    """Pages of the hit by tier."""
    with rig.cache.match(tokens) as hit:
        assert sum(hit.tokens_by_tier.values()) == hit.tokens
        return {tier: count // rig.page_size for tier, count in hit.tokens_by_tier.items()}


def test_pages_that_a_full_host_gives_up_are_in_the_tiers_below(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    lower = {"disk": disk(tmp_path / "disk"), "far": MEMORY}
    rig = make(slots=6, lower=lower, plans={"disk": {"write": "write_back"}})
    kept = [(tokens := rig.tokens(4), rig.stored(tokens)) for _ in range(4)]
    first, rows = kept[0]
    assert tiers_of(rig, first) == {"disk": 4}
    assert np.array_equal(rig.loaded(first), rows)
    for tier in ("disk", "host", "disk"):  # what the host gives up goes to the disk again
        rig.cache.flush(tier)
        rig.settle()
    assert tiers_of(rig, first) == {"far": 4}
    for tokens, rows in kept:
        assert np.array_equal(rig.loaded(tokens), rows)


def test_what_comes_from_a_slow_tier_is_kept_in_a_faster_one(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    rig = make(lower={"disk": disk(tmp_path / "disk"), "far": MEMORY})
    tokens = rig.tokens(5)
    rows = rig.stored(tokens)
    for tier in ("disk", "host"):
        rig.cache.flush(tier)
        rig.settle()
    assert tiers_of(rig, tokens) == {"far": 5}
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.settle()
    for tier in ("far", "host"):
        rig.cache.flush(tier)
        rig.settle()
    assert tiers_of(rig, tokens) == {"disk": 5}
    assert np.array_equal(rig.loaded(tokens), rows)


def test_one_hit_over_all_tiers(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, device=True)
    tokens = rig.tokens(6, rest=0)
    rows = rig.stored(tokens)
    rig.cache.evict("host", 2)  # the end of it is below alone
    rig.settle()
    assert tiers_of(rig, tokens) == {"host": 4, "far": 2}
    device = rig.take(2)
    rig.put(device, rows[:2])
    assert rig.cache.place(tokens[: 2 * rig.page_size], device).all()
    with rig.cache.match(tokens) as hit:
        assert dict(hit.tokens_by_tier) == {t: n * rig.page_size for t, n in {"device": 2, "host": 2, "far": 2}.items()}
        pages = rig.take(4)
        load = rig.cache.load(hit, pages, layerwise=True)
    load.result(LIMIT_S).require()
    assert np.array_equal(rig.read(pages), rows[2:]) and load.first_page == 2
    rig.give(pages)
    with rig.cache.match(tokens, device_pages=5) as hit:  # the caller has more than the index knows of
        assert hit.device_pages == 5 and hit.pages == 6
        pages = rig.take(1)
        rig.cache.load(hit, pages).result(LIMIT_S).require()
    assert np.array_equal(rig.read(pages), rows[5:])
    rig.give(pages)
    assert sorted(rig.cache.flush("device").tolist()) == sorted(device)
    rig.give(device)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_tier_comes_and_goes_while_the_cache_runs(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    before = rig.tokens(3)
    rig.stored(before)
    rig.cache.attach("far", MEMORY)
    tokens = rig.tokens(3)
    rows = rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    assert tiers_of(rig, tokens) == {"far": 3} and hit_pages(rig, before) == 0
    assert np.array_equal(rig.loaded(tokens), rows)
    with pytest.raises(ConfigError, match="no tier 'far' yet"):
        rig.cache.attach("far", MEMORY)
    rig.cache.detach("far")
    rig.cache.flush("host")
    assert hit_pages(rig, tokens) == 0 and "far" not in rig.cache.stats().tiers
    with pytest.raises(ConfigError):
        rig.cache.detach("far")
    rig.cache.attach("far", MEMORY)  # another one of that name
    rows = rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    assert np.array_equal(rig.loaded(tokens), rows)
    with pytest.raises(ConfigError, match="kind"):
        rig.cache.attach("odd", {"kind": "no such kind"})


def test_a_tier_goes_while_loads_of_it_are_under_way(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    tokens = rig.tokens(4)
    rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    rig.do("fault", "far", "stall", "get")
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, pages := rig.take(4))
    until(lambda: rig.do("struck", "far"), "the tier is asked")
    rig.cache.detach("far")
    assert OK not in load.result(LIMIT_S).statuses
    rig.give(pages)
    assert hit_pages(rig, tokens) == 0


def test_prefetch_is_one_for_a_request_and_ends_with_it(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, directory={"prefetch": Prefetch(6, "timeout", 30.0, 0.0)})
    tokens = rig.tokens(4)
    rows = rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    rig.do("fault", "far", "stall", "get", hold=True)
    job = rig.cache.prefetch(tokens, request="r1")
    assert rig.cache.prefetch(tokens, request="r1") is job
    until(lambda: rig.do("struck", "far"), "the tier is asked")
    assert not rig.cache.admit(job)  # it may come yet
    rig.release("far")
    until(lambda: rig.cache.admit(job), "the request may run")
    assert job.statuses == [OK] * 4 and tiers_of(rig, tokens) == {"host": 4}
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.cache.flush("host")
    rig.settle()
    rig.do("fault", "far", "stall", "get")
    job = rig.cache.prefetch(tokens, request="r1")
    until(lambda: rig.do("struck", "far") >= 2, "the tier is asked")
    rig.cache.stop(job)  # aborted
    until(lambda: job.done, "it has ended")
    rig.cache.stop(job)
    assert OK not in job.statuses and rig.cache.prefetch(tokens[:2], request="r1") is not job
    short = rig.cache.prefetch(tokens[: rig.page_size], request="r2")  # not worth it
    assert short.done and OK not in short.statuses
    rig.release("far")


def test_flush_of_one_tier_keeps_the_others(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    rig = make(lower={"disk": disk(tmp_path / "disk"), "far": MEMORY})
    tokens = rig.tokens(3)
    rows = rig.stored(tokens)
    with rig.cache.match(tokens):
        rig.cache.flush("host")  # held
        assert tiers_of(rig, tokens) == {"host": 3}
    rig.cache.flush("disk")
    rig.settle()
    figures = rig.cache.stats().directory.tiers
    assert [figures[t].present_pages for t in ("host", "disk", "far")] == [3, 0, 3]
    assert np.array_equal(rig.loaded(tokens), rows)


def test_a_pin_holds_for_its_time(make: MakeRig) -> None:  # noqa: F811
    rig = make(slots=4)
    tokens = rig.tokens(3)
    rows = rig.stored(tokens)
    assert rig.cache.pin(tokens, ttl_s=0.5) == 3
    pages = rig.take(4)
    rig.write(pages)
    assert rig.cache.store(rig.tokens(4), pages).result(LIMIT_S).statuses.count(OK) == 1  # there is room for one
    rig.give(pages)
    assert np.array_equal(rig.loaded(tokens), rows)
    rig.end_pins()
    rig.stored(rig.tokens(4))
    assert hit_pages(rig, tokens) < 3


def test_warming_brings_what_is_below(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    rig = make(slots=8, lower={"far": MEMORY}, directory={"prefetch": Prefetch(10_000)})
    some = [rig.tokens(3) for _ in range(4)]
    for tokens in some:
        rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    assert rig.cache.prefetch(some[0]).statuses == [CANCELLED] * 3  # too little, for a request
    job = rig.cache.warm(some[0])
    until(lambda: job.done, "it is warm")
    assert tiers_of(rig, some[0]) == {"host": 3}
    file = tmp_path / "warm.jsonl"
    file.write_text("\n".join(str(tokens) for tokens in some[1:]) + "\n")
    jobs = rig.cache.warm_all(file)
    until(lambda: all(job.done for job in jobs), "it is warm")
    assert len(jobs) == 2  # the third would drive out the first
    assert [tiers_of(rig, t) for t in some[1:3]] == [{"host": 3}] * 2
    file.write_text("[1, 2]\n[3, 'x']\n")
    with pytest.raises(ConfigError, match="line 2"):
        rig.cache.warm_all(file)


def test_close_writes_what_is_written_late(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    rig = make(lower={"disk": disk(tmp_path / "disk")}, plans={"disk": {"write": "write_back"}})
    tokens = rig.tokens(5)
    rows = rig.stored(tokens)
    job = rig.cache.prefetch(rig.tokens(2, after=tokens))
    dropped = rig.cache.close(drain=True, timeout_s=LIMIT_S)
    assert (dropped.handles, dropped.pages) == ((), 0) and job.done
    assert rig.cache.close() is dropped
    with pytest.raises(TierError, match="closed"):
        rig.cache.match(tokens)
    rig.close()
    again = make(lower={"disk": disk(tmp_path / "disk")})
    job = again.cache.warm(tokens)  # the index knows nothing of it: the disk is asked
    until(lambda: job.done, "it is there")
    assert np.array_equal(again.loaded(tokens), rows)


def test_close_without_draining_says_what_it_dropped(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY}, plans={"far": {"write": "write_back"}})
    rig.stored(rig.tokens(3))
    rig.do("hold", "copy_out")
    pages = rig.take(2)
    rig.write(pages)
    store = rig.cache.store(rig.tokens(2), pages)
    until(lambda: rig.do("held"), "the copy is under way")
    with pytest.raises(DeadlineExceeded, match="no end after"):
        rig.cache.close(drain=False, timeout_s=0.2)
    rig.do("let_go")
    dropped = rig.cache.close(drain=False, timeout_s=LIMIT_S)
    assert store.done() and dropped.pages >= 3


def test_two_caches_share_a_tier(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    """What one has written the other finds, though its index knows nothing of it; another salt finds nothing."""
    shared = {"far": {"kind": "object_store", "url": f"file://{tmp_path}/shared"}}
    one, two = make(lower=shared), make(lower=shared)
    tokens = one.tokens(5)
    rows = one.stored(tokens)
    assert hit_pages(two, tokens) == 0
    other = two.cache.prefetch(tokens, OTHERS["salt"])
    job = two.cache.prefetch(tokens)
    until(lambda: job.done and other.done, "they have ended")
    assert job.statuses == [OK] * 5 and OK not in other.statuses
    assert np.array_equal(two.loaded(tokens), rows)
    with two.cache.match(tokens) as hit:
        assert hit.hinted_pages == 0 and dict(hit.tokens_by_tier) == {"host": 15}
    two.cache.flush("host")
    assert hit_pages(two, tokens) == 0  # what a shared tier has is a hint
    one.cache.evict("far", 5)
    one.settle()


# --- what two pages must have in common


def space_of(spec: KVSpec = SMALL, salt: bytes = b"a salt", **changed: object) -> Scope:
    space = Namespace.of(spec, model="a model", kv_dtype="uint8")
    return Scope(replace(space, **changed).digest(), salt)  # type: ignore[arg-type]


OTHERS = {
    "adapter": space_of(adapter="a lora"),
    "empty adapter": space_of(adapter=""),
    "dtype": space_of(kv_dtype="int8"),
    "page size": space_of(page_size=6),
    "model": space_of(model="a model "),
    "components": space_of(spec=replace(SMALL, layers=tuple(layer[::-1] for layer in SMALL.layers))),
    "format version": space_of(format_version=2),
    "salt": space_of(salt=b"another salt"),
}


def test_two_scopes_never_share_a_page(make: MakeRig, tmp_path: Path) -> None:  # noqa: F811
    assert space_of() == SPACE and len({SPACE, *OTHERS.values()}) == len(OTHERS) + 1
    rig = make(pages=96, slots=64, lower={"disk": disk(tmp_path / "disk")})
    tokens = rig.tokens(3)
    rows = {"own": rig.stored(tokens)}
    for name, scope in OTHERS.items():
        assert hit_pages(rig, tokens, scope=scope) == 0
        fetch = rig.cache.warm(tokens, scope)
        until(lambda job=fetch: job.done, "it has ended")  # type: ignore[misc]
        assert OK not in fetch.statuses
        rows[name] = rig.stored(tokens, scope=scope)
    for flushed in (False, True):
        if flushed:
            rig.cache.flush("host")
            rig.settle()
        for name, scope in {"own": SPACE, **OTHERS}.items():
            assert np.array_equal(rig.loaded(tokens, scope=scope), rows[name])


def test_keys_of_another_salt_share_nothing() -> None:
    keys, shard = page_keys(range(300), 3), Shard.whole(SMALL)
    found = [stored_keys(s.salt, s.namespace, keys, shard) for s in (SPACE, *OTHERS.values())]
    assert len({key for some in found for key in some}) == 100 * len(found)
    prefixes = {key[:4] for some in found for key in some}
    assert len(prefixes) == 100 * len(found)  # not even their beginnings


# --- input that is no good


def test_bad_input_is_refused_before_anything_is_touched(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    tokens = rig.tokens(3)
    rig.stored(tokens)
    before = rig.cache.stats().directory
    with pytest.raises(LayoutError, match="expected 0 to 63, got 62 to 64"):
        rig.cache.store(tokens, [62, 63, 64])
    with pytest.raises(LayoutError, match="distinct"):
        rig.cache.store(tokens, [1, 2, 1])
    with pytest.raises(LayoutError, match="expected 3 device pages"):
        rig.cache.store(tokens, [1, 2])
    with pytest.raises(ConfigError, match="deadline_s"):
        rig.cache.store(tokens, [1, 2, 3], deadline_s=0.0)
    for wrong in ([0.5, 1.0, 2.0], [[0, 1, 2]], [True, False, True], ["0", "1", "2"], [[0], [1, 2]], [2**63, 1, 2]):
        with pytest.raises(LayoutError, match="expected"):
            rig.cache.store(tokens, wrong)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="expected"):
            rig.directory.store(tokens, wrong, rig.cache.scope)  # type: ignore[arg-type]
    hit = rig.cache.match(tokens)
    with pytest.raises(LayoutError):
        rig.cache.load(hit, [0, 1])
    with pytest.raises(ConfigError, match="deadline_s"):
        rig.cache.load(hit, [0, 1, 2], deadline_s=0.0)
    assert rig.directory.idle and rig.directory.figures().tiers == before.tiers
    hit.release()
    with pytest.raises(OwnershipError, match="held"):
        rig.cache.load(hit, [0, 1, 2])
    with pytest.raises(LayoutError):
        rig.cache.match(np.array([1.5, 2.5]))
    after = rig.cache.stats().directory
    assert after.tiers == before.tiers and after.commands_under_way == 0


def test_an_empty_load_and_an_empty_store_are_done(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    store = rig.cache.store([1], [])
    with rig.cache.match([1, 2]) as hit:
        load = rig.cache.load(hit, [], layerwise=True)
    assert store.done() and load.done() and load.result(LIMIT_S).all_ok
    assert load.await_submitted() == 0 and load.verdict(LIMIT_S).verified
    load.wait_layer(0)
    load.wait_all()
    with pytest.raises(LayoutError, match="expected 0 to 2"):
        load.wait_layer(3)
    started = time.monotonic()
    rig.cache.require_free([1, 2], wait_s=5.0)
    assert time.monotonic() - started < 4.0
