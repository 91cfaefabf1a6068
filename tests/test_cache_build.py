"""A cache from a configuration: what it makes, what it refuses, what it finds again after a restart."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import LIMIT_S, TINY, Guarded, until

from kvtransfer.cache import TieredCache
from kvtransfer.config import load_config
from kvtransfer.directory_build import directory_of
from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.layout import Layout
from kvtransfer.mover import Mover
from kvtransfer.mover_facts import MoverFacts, TierFacts
from kvtransfer.policy import LFU, SLRU, WriteThroughSelective
from kvtransfer.recent import FILE_NAME, read_recent
from kvtransfer.recent_keeper import RecentKeeper
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.memory_tier import MemoryTier

SIZE = TINY.page_size


class Told(Observer):
    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append((what, fields))


def configured(**arguments: Any) -> Any:
    host = {"pages": 40, "pin": False, "huge_pages": False, "threads": 1}
    tiers = {"host": host, **arguments.pop("tiers", {})}
    return load_config(arguments={"tiers": tiers, **arguments}, environment={})


@pytest.fixture
def side() -> Guarded:
    return Guarded(np.random.default_rng(), Layout.named("sglang.layer_first", TINY, 64))


@contextmanager
def created(side: Guarded, config: Any, **more: Any) -> Iterator[TieredCache]:
    cache = TieredCache.create(side.pool, config, tick_s=None, **more)
    try:
        yield cache
    finally:
        cache.close(timeout_s=LIMIT_S)


def store(cache: TieredCache, side: Guarded, tokens: list[int]) -> Any:
    pages = list(range(len(tokens) // SIZE))
    rows = np.random.default_rng().integers(0, 256, (len(pages), TINY.page_bytes), dtype=np.uint8)
    side.put(pages, rows)
    cache.store(tokens, pages).result(LIMIT_S).require()
    until(lambda: cache.directory.idle, "nothing under way")
    return rows


def load(cache: TieredCache, side: Guarded, tokens: list[int]) -> Any:
    with cache.match(tokens) as hit:
        pages = list(range(30, 30 + hit.pages))
        handle = cache.load(hit, pages)
    handle.result(LIMIT_S).require()
    return side.pages(pages)


def tokens_of(pages: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 2**31, pages * SIZE).tolist()
    return found


def test_a_size_alone_is_a_configuration(side: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("host_cache_gb: 0.001\n")
    with created(side, file) as cache:
        assert cache.directory.capacity("host") == (1 << 30) // 1000 // (4096 + 4096)
        rows = store(cache, side, tokens := tokens_of(5))
        assert np.array_equal(load(cache, side, tokens), rows)
        assert cache.stats().directory.hit_tokens == 15
    with pytest.raises(Exception, match="closed"):
        cache.match(tokens)


def test_a_ratio_is_of_the_pool(side: Guarded) -> None:
    config = load_config(arguments={"tiers": {"host": {"ratio": 60.0, "pin": False}}}, environment={})
    with created(side, config) as cache:
        assert cache.directory.capacity("host") == 60 * 64 * TINY.page_bytes // 8192


def test_every_tier_is_made_with_what_it_asks_for(side: Guarded, tmp_path: Path) -> None:
    tiers = {
        "disk": {"paths": [str(tmp_path / "d")], "pages": 100, "disk_share": 1.0},
        "ram": {"kind": "memory", "cache_gb": 0.01},
    }
    config = configured(tiers=tiers, namespace={"model": "m", "salt": "s"}, kv_dtype="bfloat16")
    with created(side, config) as cache:
        assert list(cache.stats().tiers) == ["disk", "ram"]
        rows = store(cache, side, tokens := tokens_of(6))
        for tier in ("host", "disk"):
            cache.flush(tier)
            until(lambda: cache.directory.idle, "nothing under way")
        assert np.array_equal(load(cache, side, tokens), rows)
        assert cache.scope.salt == b"s" and len(cache.scope.namespace) == 32
    assert next((tmp_path / "d").iterdir()).name.startswith(cache.scope.namespace.hex()[:8])


def test_policies_come_from_the_configuration() -> None:
    facts = MoverFacts(
        spec="",
        page_size=4,
        num_layers=1,
        page_bytes=8,
        pool_pages=9,
        host_name="host",
        host_pages=10,
        host_most_pages=20,
        host_grows=True,
        tiers={"disk": TierFacts(False, 50, 3), "far": TierFacts(True, None, 0)},
    )
    config = configured(
        eviction={
            "policy": "slru",
            "slru_protected_hits": 5,
            "low_watermark": 0.5,
            "high_watermark": 0.75,
            "prune": True,
        },
        write={"policy": "write_through_selective", "min_hits": 3},
        prefetch={"stop": "wait_complete", "min_tokens": 7},
        namespace={"page_keys": "xxh3_128"},
    )
    directory = directory_of(config, facts)
    books = directory._books
    assert [(b.name, b.plan.kind, b.capacity, b.ask) for b in books.values()] == [
        ("host", "slots", 10, False),
        ("disk", "keys", 50, True),  # it holds what an earlier run wrote
        ("far", "shared", None, True),
    ]
    assert books["host"].extents.count == 20 and books["host"].victims.policy == SLRU(5)
    assert books["far"].write == WriteThroughSelective(3) and books["host"].write.now(0)
    assert (directory._high, directory._low, directory._evict_extra) == (0.75, 0.5, 0.25)
    assert directory._policy.threshold_tokens == 7 and directory.index.algorithm == "xxh3_128"
    assert directory._prune is not None
    lfu = directory_of(configured(eviction={"policy": "kvtransfer.policy:LFU"}), facts)
    assert isinstance(lfu._books["host"].victims.policy, LFU)
    with pytest.raises(ConfigError, match=r"eviction.policy: .*no_such"):
        directory_of(configured(eviction={"policy": "no_such.module:Thing"}), facts)


def test_a_host_above_its_watermark_is_cleared(side: Guarded) -> None:
    with created(side, configured(eviction={"high_watermark": 0.5, "low_watermark": 0.25})) as cache:
        for seed in range(3):
            store(cache, side, tokens_of(8, seed))
        assert cache.stats().directory.tiers["host"].present_pages == 24
        cache.tick()
        assert cache.stats().directory.tiers["host"].present_pages == 10


def test_what_is_given_stays_open(side: Guarded) -> None:
    with (
        HostTier(TINY, capacity_pages=20, pin=False) as host,
        TransferEngine(side.pool, host) as engine,
        MemoryTier(1 << 20, name="ram") as tier,
    ):
        with created(side, configured(), engine=engine, tiers={"ram": tier}, model="m") as cache:
            rows = store(cache, side, tokens := tokens_of(4))
            cache.flush("host")
            until(lambda: cache.directory.idle, "nothing under way")
            assert np.array_equal(load(cache, side, tokens), rows)
        engine.store([0], [0]).result(LIMIT_S)
        assert tier.stats().pages == 4
        other = Guarded(np.random.default_rng(), Layout.named("sglang.layer_first", TINY, 4))
        with pytest.raises(ConfigError, match="over the pool"):
            TieredCache.create(other.pool, configured(), engine=engine)
        with pytest.raises(ConfigError, match="over the host"), HostTier(TINY, capacity_pages=1, pin=False) as second:
            TieredCache.create(side.pool, configured(), engine=engine, host=second)
        with pytest.raises(ConfigError, match="model"):
            TieredCache.create(side.pool, configured(), engine=engine, tiers={"ram": tier})


def test_a_mistake_leaves_nothing_open(side: Guarded, tmp_path: Path) -> None:
    tiers = {"disk": {"paths": [str(tmp_path / "d")], "pages": 10, "disk_share": 1.0}}
    warm = tmp_path / "warm.jsonl"
    warm.write_text("[1, -2]")
    bad = configured(tiers=tiers, namespace={"model": "m"}, warm_file=str(warm))
    with pytest.raises(ConfigError, match="line 1"):
        TieredCache.create(side.pool, bad)
    with created(side, configured(tiers=tiers, namespace={"model": "m"})) as cache:  # the disk has no owner: it opens
        assert cache.stats().tiers["disk"].pages == 0


def test_what_was_used_last_is_there_after_a_restart(side: Guarded, tmp_path: Path) -> None:
    tiers = {"disk": {"paths": [str(tmp_path / "d")], "pages": 100, "disk_share": 1.0}}
    config = configured(tiers=tiers, namespace={"model": "m", "salt": "mine"})
    old, new = tokens_of(9, 1), tokens_of(12, 2)
    with created(side, config) as cache:
        assert cache.warm_recent() == []
        wanted = [store(cache, side, tokens) for tokens in (old, new)]
        scope = cache.scope
    [file] = (tmp_path / "d").rglob(FILE_NAME)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [prefix.token_ids().tolist() for prefix in read_recent(file)] == [new, old]
    told = Told()
    with created(side, config, observer=told) as cache:
        assert cache.scope == scope
        jobs = cache.warm_recent()
        until(lambda: len(jobs) == 2 and all(job.done for job in jobs), "they are warm")
        for tokens, rows in zip((old, new), wanted, strict=True):
            with cache.match(tokens) as hit:
                assert dict(hit.tokens_by_tier) == {"host": len(tokens)}
            assert np.array_equal(load(cache, side, tokens), rows)
        other = cache.warm_recent([cache.scope.__class__(scope.namespace, b"somebody else's")])
        assert other == []
    assert any(what == "cache.closed" for what, _ in told.notes)
    file.write_bytes(file.read_bytes()[:-1])  # damaged: an empty one
    with created(side, config) as cache:
        assert cache.warm_recent() == []


def test_the_keeper_writes_now_and_then_and_keeps_the_earlier_ones(side: Guarded, tmp_path: Path) -> None:
    file, told = tmp_path / "recent", Told()
    with created(side, configured()) as cache:
        keeper = RecentKeeper(cache.directory.index, file, 3, every_s=0.01, observer=told)
        keeper.write()
        assert not file.exists()  # nothing was used
        for seed in range(2):
            store(cache, side, tokens_of(2, seed))

        def written() -> bool:
            keeper.tick()
            return file.exists()

        until(written, "it is written")
        again = RecentKeeper(cache.directory.index, file, 3, observer=told)
        assert [p.token_ids().tolist() for p in again.read()] == [tokens_of(2, 1), tokens_of(2, 0)]
        cache.flush("host")
        for seed in (5, 6):
            store(cache, side, tokens_of(2, seed))
        again.write()
        kept = [p.token_ids().tolist() for p in read_recent(file)]
        assert kept == [tokens_of(2, 6), tokens_of(2, 5), tokens_of(2, 1)]
        lost = RecentKeeper(cache.directory.index, tmp_path / "no" / "folder", 3, observer=told)
        store(cache, side, tokens_of(2, 7))
        lost.write()
        assert [what for what, _ in told.notes] == ["recent.failed"]
        with pytest.raises(ConfigError):
            RecentKeeper(cache.directory.index, file, 0)


def test_a_cache_closes_whatever_its_observer_raises(
    side: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where its file can't be written, and that is told too."""
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(str(told.exc_value)))

    class Rude(Observer):
        def noted(self, what: str, **fields: Any) -> None:
            if what.startswith(("recent", "cache")):
                raise ValueError(what)

    with created(side, configured(), observer=Rude()) as cache:
        keeper = RecentKeeper(cache.directory.index, tmp_path / "no" / "folder", observer=cache.observer)
        monkeypatch.setattr(cache, "_recent", keeper)
        store(cache, side, tokens_of(2))
        dropped = cache.close()
    assert raised == ["recent.failed", "cache.closed"]
    assert cache.close() is dropped


def test_a_file_of_token_lists_is_warm_at_the_start(side: Guarded, tmp_path: Path) -> None:
    tiers = {"disk": {"paths": [str(tmp_path / "d")], "pages": 100, "disk_share": 1.0}}
    warm = tmp_path / "warm.jsonl"
    tokens = tokens_of(7)
    warm.write_text(f"{tokens}\n")
    config = configured(tiers=tiers, namespace={"model": "m"}, warm_file=str(warm))
    with created(side, config) as cache:
        rows = store(cache, side, tokens)
    with created(side, config) as cache:
        until(lambda: cache.directory.idle, "it is warm")
        with cache.match(tokens) as hit:
            assert dict(hit.tokens_by_tier) == {"host": 21}
        assert np.array_equal(load(cache, side, tokens), rows)


def test_connect_takes_a_mover_that_is_there(side: Guarded) -> None:
    with HostTier(TINY, capacity_pages=20, pin=False) as host, TransferEngine(side.pool, host) as engine:
        cache = TieredCache.connect(Mover(engine), configured(deadline_s=7.0), model="m", tick_s=None)
        rows = store(cache, side, tokens := tokens_of(4))
        assert np.array_equal(load(cache, side, tokens), rows) and cache.deadline_s == 7.0
        assert cache.directory.capacity("host") == 20
        cache.close()


def test_a_host_that_grows_in_the_background_is_used_as_it_grows(side: Guarded) -> None:
    config = load_config(
        arguments={"tiers": {"host": {"pages": 5000, "pin": False, "background": True}}}, environment={}
    )
    with created(side, config) as cache:
        rows = store(cache, side, tokens := tokens_of(1))

        def grown() -> bool:
            cache.tick()
            return cache.directory.capacity("host") == 5000

        until(grown, "it has grown")
        assert np.array_equal(load(cache, side, tokens), rows)


def test_what_is_faster_to_compute_is_not_loaded(side: Guarded) -> None:
    tokens = tokens_of(8)
    for prefill, expected in ((None, 8), (1.0, 8), (1e12, 0)):  # tokens a second
        with created(side, configured(prefill_tokens_per_s=prefill)) as cache:
            rows = store(cache, side, tokens)
            cache.tick()
            with cache.match(tokens) as hit:
                assert cache.worth_loading(hit) == expected
                assert cache.worth_loading(hit, total_tokens=len(tokens), layerwise=True) == expected
                handle = cache.load(hit, range(30, 30 + expected), pages=expected)
            handle.result(LIMIT_S).require()
            assert np.array_equal(side.pages(list(range(30, 30 + expected))), rows[:expected])
            with cache.match(tokens, device_pages=3) as hit:
                assert cache.worth_loading(hit) == max(3, expected)
