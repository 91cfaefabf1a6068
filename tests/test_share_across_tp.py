"""``share_across_tp`` of a configured tier: what a cache of one tensor-parallel size writes, caches of others read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import LIMIT_S, Bytes, fresh, page_bytes, put_pages, random_bytes, until
from tier_servers import start_redis

from kvtransfer.cache import TieredCache
from kvtransfer.commands import Scope
from kvtransfer.config import as_mapping, load_config
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tier_build import RankPart, TierMaker
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.head_group_tier import HeadGroupTier
from kvtransfer.tiers.keys import Namespace, Shard
from kvtransfer.tiers.memory_tier import MemoryTier

MODEL = KVSpec.attention(num_layers=3, page_size=5, kv_heads=4, head_dim=67, itemsize=2, v_head_dim=33)
PAGES = 40  # more than a chunk of a HeadGroupTier


def shard_of(size: int, rank: int) -> Shard:
    return Shard(0, MODEL.num_layers, head_part=rank, head_parts=size)


def heads_of(size: int, rank: int) -> tuple[int, int]:
    """Which part of the heads, of how many: several ranks hold one where there are more ranks than heads."""
    parts = min(size, 4)
    return rank * parts // size, parts


def config_of(tier: dict[str, Any], **more: Any) -> Any:
    settings = {
        "tiers": {"host": {"pages": 64, "pin": False}, "store": tier, **more.pop("tiers", {})},
        "namespace": {"model": "a model", "salt": "of the tenant"},
        "prefetch": {"min_tokens": 1, "stop": "wait_complete"},
        **more,
    }
    return load_config(arguments=settings, environment={})


@dataclass
class Rank:
    """One rank of an instance: its cache, and the layout of its pool."""

    cache: TieredCache
    pool: KVPool
    size: int
    rank: int

    def pages_of(self, whole: Bytes) -> Bytes:
        """This rank's heads of pages of the whole model, page-first, by plain slicing."""
        parts, at = [], 0
        rank, size = heads_of(self.size, self.rank)
        for components in MODEL.layers:
            for c in components:
                n = MODEL.page_size * c.heads * c.head_bytes
                each = c.heads // size
                part = whole[:, at : at + n].reshape(len(whole), MODEL.page_size, c.heads, c.head_bytes)
                parts.append(part[:, :, rank * each : (rank + 1) * each].reshape(len(whole), -1))
                at += n
        return np.concatenate(parts, axis=1)

    def write(self, pages: list[int], whole: Bytes) -> None:
        layout, buffers = self.memory()
        put_pages(layout, buffers, np.array(pages), self.pages_of(whole))

    def read(self, pages: list[int]) -> Bytes:
        layout, buffers = self.memory()
        return page_bytes(layout, buffers, np.array(pages))

    def memory(self) -> tuple[Layout, list[Bytes]]:
        return self.pool.layout, [buffer.view(torch.uint8).reshape(-1).numpy() for buffer in self.pool.buffers]

    def store(self, tokens: list[int], whole: Bytes) -> None:
        self.write(list(range(PAGES)), whole)
        self.cache.store(tokens, range(PAGES)).result(LIMIT_S).require()
        until(lambda: self.cache.directory.idle, "all is written")

    def check(self, tokens: list[int], whole: Bytes) -> None:
        """Everything comes back, from the store, exactly this rank's heads; nothing else is touched."""
        job = self.cache.prefetch(tokens)
        until(lambda: job.done, "it has come")
        assert job.usable_pages == PAGES, job.detail
        for buffer in self.memory()[1]:
            buffer[:] = random_bytes(fresh(), buffer.size)
        ids = fresh().permutation(self.pool.num_pages)[:PAGES].tolist()
        others = sorted({*range(self.pool.num_pages)} - {*ids})
        before = self.read(others)
        with self.cache.match(tokens) as hit:
            assert hit.pages == PAGES
            load = self.cache.load(hit, ids)
        load.result(LIMIT_S).require()
        assert load.verdict(LIMIT_S).verified
        assert np.array_equal(self.read(ids), self.pages_of(whole)), f"rank {self.rank} of {self.size}"
        assert np.array_equal(self.read(others), before)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_rank(opened: ExitStack, size: int, rank: int, config: Any, **more: Any) -> Rank:
    spec = MODEL.select_heads(*heads_of(size, rank))
    pool = KVPool.allocate("sglang.layer_first", spec=spec, num_pages=PAGES + 9, device="cpu")
    settings = {"model_spec": MODEL, "shard": shard_of(size, rank), "tick_s": None, **more}
    cache = opened.enter_context(TieredCache.create(pool, config, **settings))
    return Rank(cache, pool, size, rank)


@pytest.fixture(params=["redis", "object_store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options of a shared tier."""
    if request.param == "object_store":
        pytest.importorskip("obstore")
        (tmp_path / "objects").mkdir()
        yield {"kind": "object_store", "url": f"file://{tmp_path}/objects"}
    else:
        server, port, _ = start_redis(tmp_path)
        try:
            yield {"kind": "redis", "url": f"redis://127.0.0.1:{port}"}
        finally:
            server.kill()


@pytest.mark.parametrize("by_tier", [True, False], ids=["of the tier", "of all"])
def test_written_by_two_ranks_read_by_one_and_by_four(store: dict[str, Any], by_tier: bool, opened: ExitStack) -> None:
    config = config_of({**store, "share_across_tp": 4}) if by_tier else config_of(store, share_across_tp=4)
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size + 2).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    with ExitStack() as writers:
        for rank in range(2):
            open_rank(writers, 2, rank, config).store(tokens, whole)
    for size in (1, 4, 2):
        for rank in range(size):
            with ExitStack() as readers:
                open_rank(readers, size, rank, config).check(tokens, whole)
    more = random_bytes(fresh(), PAGES, MODEL.page_bytes)  # and the other way
    others = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    with ExitStack() as writers:
        for rank in range(4):
            open_rank(writers, 4, rank, config).store(others, more)
    for rank in range(2):
        open_rank(opened, 2, rank, config).check(others, more)


def test_half_of_the_ranks_is_a_miss(store: dict[str, Any], opened: ExitStack) -> None:
    config = config_of({**store, "share_across_tp": 4})
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    with ExitStack() as writers:
        open_rank(writers, 2, 0, config).store(tokens, whole)
    reader = open_rank(opened, 1, 0, config)
    job = reader.cache.prefetch(tokens)
    until(lambda: job.done, "it has ended")
    assert job.usable_pages == 0
    half = open_rank(opened, 4, 1, config)
    half.check(tokens, whole)


def test_ranks_keep_their_own_disks_beside_it(store: dict[str, Any], tmp_path: Path) -> None:
    """Keys are the same on all ranks then: a disk's folder is not."""
    disks = {"disk": {"paths": [str(tmp_path / "disk")], "pages": 400, "disk_share": 1.0}}
    (tmp_path / "disk").mkdir()
    config = config_of({**store, "share_across_tp": 2}, tiers=disks)
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    with ExitStack() as both:
        ranks = [open_rank(both, 2, n, config, place=Place(tp=n), owners=2) for n in range(2)]
        for rank in ranks:
            rank.store(tokens, whole)
        for rank in ranks:
            rank.cache.flush("host")
            until(lambda rank=rank: rank.cache.directory.idle, "it is empty")  # type: ignore[misc]
            with rank.cache.match(tokens) as hit:
                assert set(hit.tokens_by_tier) == {"disk"}
            rank.check(tokens, whole)


def disk_of(folder: Path) -> dict[str, Any]:
    return {"kind": "disk", "paths": [str(folder)], "cache_gb": 0.1, "disk_share": 1.0}


@pytest.mark.parametrize(("size", "other"), [(4, 8), (8, 4), (8, 16), (1, 1), (2, 2), (4, 4), (8, 8)])
def test_disks_of_another_size(size: int, other: int, tmp_path: Path) -> None:
    """The same folder, records of one length, other heads: nothing is found there by ranks of another size. Those of
    its own find all again."""
    config = config_of(disk_of(tmp_path), share_across_tp=16)
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    ranks = sorted({0, 1, min(size, other) - 1} & {*range(size)})
    for rank in ranks:
        with ExitStack() as writer:
            open_rank(writer, size, rank, config, place=Place(tp=rank), owners=16).store(tokens, whole)
    more = random_bytes(fresh(), PAGES, MODEL.page_bytes)  # told apart from what is there
    for rank in ranks:
        with ExitStack() as reader:
            one = open_rank(reader, other, rank, config, place=Place(tp=rank), owners=16)
            if size == other:
                one.check(tokens, whole)
                continue
            job = one.cache.prefetch(tokens)
            until(lambda job=job: job.done, "it has ended")  # type: ignore[misc]
            assert job.usable_pages == 0
            one.store(tokens, more)
    for rank in ranks:
        with ExitStack() as again:
            open_rank(again, size, rank, config, place=Place(tp=rank), owners=16).check(tokens, whole)
        if size != other:
            with ExitStack() as again:
                open_rank(again, other, rank, config, place=Place(tp=rank), owners=16).check(tokens, more)


def test_a_disk_made_by_hand_is_under_the_ranks_part(opened: ExitStack, tmp_path: Path) -> None:
    config = config_of({"kind": "memory", "cache_gb": 0.01}, share_across_tp=8)
    spec = MODEL.select_heads(0, 4)
    scope = Scope(Namespace.of(MODEL, model="m", kv_dtype="bfloat16").digest())
    part = RankPart.configured(config, MODEL, shard_of(8, 1))
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)

    def disk(namespace: bytes) -> DiskTier:
        return opened.enter_context(
            DiskTier(tmp_path, spec, namespace=namespace, capacity_pages=400, place=Place(tp=1), disk_share=1.0)
        )

    wrong, right = disk(scope.namespace), disk(part.own_namespace(scope.namespace))
    with pytest.raises(ConfigError, match=r"tiers\.disk: expected a tier under the namespace of this rank's part"):
        open_rank(opened, 8, 1, config, tiers={"disk": wrong}, scope=scope)
    one = open_rank(opened, 8, 1, config, tiers={"disk": right}, scope=scope)
    one.store(tokens, whole)
    one.cache.flush("host")
    until(lambda: one.cache.directory.idle, "it is empty")
    one.check(tokens, whole)
    assert open_rank(opened, 8, 1, config_of({"kind": "memory", "cache_gb": 0.01}), tiers={"disk": wrong}, scope=scope)


def test_one_that_is_attached_later(store: dict[str, Any], opened: ExitStack) -> None:
    plain = config_of({"kind": "memory", "cache_gb": 0.01})
    told = config_of({"kind": "memory", "cache_gb": 0.01}, share_across_tp=4)
    options = {**store, "share_across_tp": 4}
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    for rank in range(2):
        one = open_rank(opened, 2, rank, plain)
        with pytest.raises(ConfigError, match=r"tiers\.far: share_across_tp: .* from the start"):
            one.cache.attach("far", options)
        two = open_rank(opened, 2, rank, told)
        two.cache.attach("far", options if rank else store)  # that of all counts where it says nothing
        two.store(tokens, whole)
    alone = open_rank(opened, 1, 0, plain)  # its keys are those of all heads anyway
    alone.cache.attach("far", options)
    alone.check(tokens, whole)


def test_one_that_is_attached_ready_made(
    store: dict[str, Any], opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `create` refuses is refused later as well, before the tier is touched."""
    config = config_of({"kind": "memory", "cache_gb": 0.01}, share_across_tp=2)
    tokens = fresh().integers(0, 2**31, PAGES * MODEL.page_size).tolist()
    whole = random_bytes(fresh(), PAGES, MODEL.page_bytes)
    spec = MODEL.select_heads(0, 2)
    parts = [RankPart.configured(config, MODEL, shard_of(2, rank)) for rank in range(2)]
    groups = [part.groups(2, MODEL.select_heads(rank, 2)) for rank, part in enumerate(parts)]
    told: list[Any] = []

    def plain() -> Tier:
        return opened.enter_context(closing(TierMaker(spec, bytes(32))("far", store)))

    def by_group(of: int) -> Tier:
        return opened.enter_context(closing(HeadGroupTier(plain(), groups[of])))

    for rank in range(2):
        cache = (one := open_rank(opened, 2, rank, config)).cache
        disk = TierMaker(spec, cache.scope.namespace, Place(tp=rank))("far", disk_of(tmp_path / "disk"))
        for tier, match in (
            (plain(), r"tiers\.far: expected share_across_tp here too"),
            (by_group(1 - rank), rf"tiers\.far: expected head groups \[{rank}\] of 2, .*got \[{1 - rank}\] of 2"),
            (opened.enter_context(closing(disk)), r"tiers\.far: expected a tier under the namespace of this rank's"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(tier, "register", told.append)
                with pytest.raises(ConfigError, match=match):
                    cache.attach("far", tier)
            with pytest.raises(ConfigError, match=match):
                open_rank(opened, 2, rank, config, tiers={"far": tier}, scope=cache.scope)
            assert not told and "far" not in cache.stats().tiers
        cache.attach("far", by_group(rank))
        one.store(tokens, whole)
        cache.flush("host")
        until(lambda cache=cache: cache.directory.idle, "it is empty")  # type: ignore[misc]
        cache.flush("store")
        until(lambda cache=cache: cache.directory.idle, "it is empty")  # type: ignore[misc]
        one.check(tokens, whole)
        cache.detach("far")
    alone = open_rank(opened, 1, 0, config)
    alone.cache.attach("far", plain())  # at TP 1 nobody is told apart, and nothing of theirs is met
    job = alone.cache.prefetch(tokens)
    until(lambda: job.done, "it has ended")
    assert job.usable_pages == 0
    alone.cache.detach("far")


def test_what_is_refused(store: dict[str, Any], opened: ExitStack, tmp_path: Path) -> None:
    def refused(match: str, config: Any, size: int = 2, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            open_rank(opened, size, size - 1, config, **more)

    shared = config_of({**store, "share_across_tp": 4})
    refused(r"tiers\.other: expected share_across_tp here too", config_of(
        {**store, "share_across_tp": 4}, tiers={"other": store}))  # fmt: skip
    open_rank(opened, 1, 0, config_of({**store, "share_across_tp": 4}, tiers={"other": store}))  # at TP 1 nobody is
    refused(r"tiers\.store: .*expected 4 heads to divide share_across_tp=6", config_of({**store, "share_across_tp": 6}))
    refused(r"tiers\.store: .*tp_size 4: expected at most 2", config_of({**store, "share_across_tp": 2}), 4)
    refused(r"tiers\.store: .*expected a pool of this rank's part .*model_spec= and shard=", shared, shard=None)
    refused(r"tiers\.store: .*got part 1 of 2; .*context", shared, shard=Shard(0, 3, 1, 2, 1, 2))
    ready = MemoryTier(1 << 20)
    ready.shared = True
    refused(r"tiers\.store: expected share_across_tp here too", shared, tiers={"store": ready})
    ready.close()
    for wrong in (0, -1, 1.5, "two", True):
        with pytest.raises(ConfigError, match="share_across_tp: expected a whole number"):
            config_of({**store, "share_across_tp": wrong})
    for private in ({"kind": "disk", "paths": [str(tmp_path)], "pages": 9}, {"kind": "memory", "cache_gb": 0.01}):
        with pytest.raises(ConfigError, match=r"store\.share_across_tp: expected one of"):
            config_of({**private, "share_across_tp": 2})
    with pytest.raises(ConfigError, match="knows which heads this process holds"):
        TierMaker(MODEL, bytes(32))("store", {**store, "share_across_tp": 2})


def test_a_tier_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`share_across_tp` is not handed to it; one that nobody shares is refused, and closed."""
    made: list[Any] = []

    class Other(MemoryTier):
        def __init__(self, spec: KVSpec, namespace: bytes, shared: bool, more: int) -> None:
            super().__init__(1 << 22)
            self.shared, self.spec, self.namespace, self.closed = shared, spec, namespace, False
            made.append((self, more))

        def close(self, **more: Any) -> None:
            self.closed = True
            super().close(**more)

    monkeypatch.setattr("kvtransfer.config_build.other_kinds", lambda: ["other"])
    monkeypatch.setattr("kvtransfer.tier_build.tier_factory", lambda kind: Other)
    monkeypatch.setattr("kvtransfer.tier_build.make_tier", lambda kind, **settings: Other(**settings))
    part = RankPart(MODEL, shard_of(2, 1), by_group=True)
    maker = TierMaker(MODEL.select_heads(1, 2), bytes(32), part=part)
    options = {"kind": "other", "share_across_tp": 4, "shared": True, "more": 7}
    tier = maker("mine", options)
    assert isinstance(tier, HeadGroupTier) and made[-1][1] == 7
    assert made[-1][0].spec == tier.groups.record_spec == MODEL.select_heads(0, 4)
    tier.close()
    assert made[-1][0].namespace == bytes(32)  # whoever shares it names its data alike
    own = maker("mine", {**options, "shared": False, "share_across_tp": None})
    assert isinstance(own, Other) and own.namespace == part.own_namespace(bytes(32)) != bytes(32)
    own.close()
    of_all = TierMaker(MODEL.select_heads(1, 2), bytes(32), part=replace(part, share_across_tp=4))
    tier = of_all("mine", {**options, "share_across_tp": None})  # that it is shared is known once it is made
    assert isinstance(tier, HeadGroupTier) and made[-1][0].namespace == bytes(32)
    assert made[-2][0].closed and not made[-1][0].closed
    tier.close()
    with pytest.raises(ConfigError, match=r"tiers\.mine\.share_across_tp: expected a tier that other processes share"):
        maker("mine", {**options, "shared": False})
    assert made[-1][0].closed
    config = load_config(arguments={"tiers": {"mine": options}}, environment={})
    assert config.shares_across_tp and config.tiers["mine"].shared_by == 4
    assert as_mapping(config)["tiers"]["mine"] == options
    assert load_config(arguments=as_mapping(config), environment={}) == config
