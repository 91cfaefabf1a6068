"""The host tier of a cache changes its size while it is used: in both forms, above a disk that knows its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_helpers import FORMS, SMALL, Rig, hit_pages
from engine_helpers import LIMIT_S, until

from kvtransfer.cache import TieredCache
from kvtransfer.config import load_config
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import CapacityError
from kvtransfer.pool import KVPool
from kvtransfer.tiers.base import PageStatus

CHUNK = 4 * 4096  # four slots
OK = PageStatus.OK


@pytest.fixture(params=FORMS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    lower: dict[str, Any] = {
        "disk": {"kind": "disk", "paths": [str(tmp_path / "disk")], "pages": 500, "disk_share": 1.0}
    }
    made = Rig(
        request.param, tmp_path, slots=24, host={"chunk_bytes": CHUNK, "most_pages": 40}, lower=lower,
        host_plan={"most_pages": 40},
    )  # fmt: skip
    try:
        yield made
        made.check()
    finally:
        made.close()


def sized(cache: TieredCache, pages: int) -> Job:
    job = cache.resize_host(pages)
    until(lambda: job.done, f"{pages} pages")
    return job


def test_every_byte_survives_shrinking_and_growing(rig: Rig) -> None:
    old, new = rig.tokens(12), rig.tokens(8)
    rows = {tuple(tokens): rig.stored(tokens) for tokens in (old, new)}
    assert sized(rig.cache, 10).statuses == [OK]
    facts = rig.mover.facts()
    assert (facts.host_pages, facts.host_most_pages, facts.host_grows) == (10, 40, False)
    with rig.cache.match(new) as hit:
        assert dict(hit.tokens_by_tier) == {"host": 8 * rig.page_size}
    assert np.array_equal(rig.loaded(new), rows[tuple(new)])
    with rig.cache.match(old) as hit:
        assert dict(hit.tokens_by_tier) == {"host": 2 * rig.page_size, "disk": 10 * rig.page_size}
    part = old[: 10 * rig.page_size]
    assert np.array_equal(rig.loaded(part), rows[tuple(old)][:10])  # by way of the slots that are left
    assert sized(rig.cache, 40).statuses == [OK]
    for tokens in (old, new):  # the disk reads into memory that came anew
        assert np.array_equal(rig.loaded(tokens), rows[tuple(tokens)])
    third = rig.tokens(18)
    rows[tuple(third)] = rig.stored(third)
    rig.settle()
    for tokens in (old, new, third):
        with rig.cache.match(tokens) as hit:
            assert dict(hit.tokens_by_tier) == {"host": len(tokens) // rig.page_size * rig.page_size}
        assert np.array_equal(rig.loaded(tokens), rows[tuple(tokens)])
    figures = rig.cache.stats().directory.tiers["host"]
    assert figures.capacity_pages == 40 and figures.used_pages == 38


def test_a_held_hit_is_loaded_whatever_happens_meanwhile(rig: Rig) -> None:
    tokens = rig.tokens(20)
    rows = rig.stored(tokens)
    hit = rig.cache.match(tokens)
    job = rig.cache.resize_host(6)
    rig.settle()
    rig.cache.tick()
    assert not job.done
    pages = rig.take(20)
    load = rig.cache.load(hit, pages)
    load.result(LIMIT_S).require()
    assert np.array_equal(rig.read(pages), rows)
    rig.give(pages)
    hit.release()
    rig.settle()
    rig.cache.tick()
    until(lambda: job.done, "the new size")
    assert job.statuses == [OK] and hit_pages(rig, tokens) == 20
    assert np.array_equal(rig.loaded(tokens[: 6 * rig.page_size]), rows[:6])


def test_sizes_that_follow_each_other(rig: Rig) -> None:
    for n in (3, 4):
        rig.stored(rig.tokens(n))
    jobs = [rig.cache.resize_host(pages) for pages in (5, 30, 2, 40, 7)]
    until(lambda: all(job.done for job in jobs), "every size")
    assert jobs[-1].statuses == [OK] and rig.mover.facts().host_pages == 7
    tokens = rig.tokens(7)
    assert np.array_equal(rig.stored(tokens), rig.loaded(tokens))


def test_growing_past_what_there_is_memory_for_is_refused(rig: Rig) -> None:
    with pytest.raises(CapacityError, match="expected at most most_pages=40 pages, got 41"):
        rig.cache.resize_host(41)
    assert rig.mover.facts().host_pages == 24


def test_a_configured_cache_grows_to_what_the_file_says() -> None:
    pool = KVPool.allocate("vllm.LBNHC", spec=SMALL, num_pages=8, device="cpu")
    most = 16 * 8192  # 16 slots and their trailers
    host = {"pages": 10, "most_gb": most / 2**30, "chunk_gb": CHUNK / 2**30, "pin": False}
    config = load_config(arguments={"tiers": {"host": host}}, environment={})
    with TieredCache.create(pool, config, tick_s=None) as cache:
        for pages in (16, 3, 12):
            assert sized(cache, pages).statuses == [OK] and cache.mover.facts().host_pages == pages
            assert cache.stats().directory.tiers["host"].capacity_pages == pages
        with pytest.raises(CapacityError, match="most_pages=16 pages, got 17"):
            cache.resize_host(17)
