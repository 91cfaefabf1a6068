"""KVTransferStorage through SGLang's factory, over SGLang's own host pools in all their layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines.sglang import helpers
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.tiers.base import PageStatus

pytestmark = pytest.mark.engines
MEMORY: dict[str, Any] = {"tiers": {"memory": {"cache_gb": 0.05}}}
LAYOUTS = [("mha", layout) for layout in helpers.MHA_LAYOUTS] + [("mla", layout) for layout in helpers.MLA_LAYOUTS]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    helpers.publish(page_size=4)
    helpers.plain_host_memory(monkeypatch)
    with helpers.one_rank():
        yield


def disk(folder: Path) -> dict[str, Any]:
    return {"tiers": {"disk": {"paths": [str(folder)], "cache_gb": 0.05, "file_gb": 0.01}}}


def make_pool(kind: str, layout: str, **sizes: Any) -> Any:
    return helpers.host_pool(helpers.mla_pool(**sizes) if kind == "mla" else helpers.mha_pool(**sizes), layout)


def other_places(pool: Any, indices: torch.Tensor) -> torch.Tensor:
    """As many pages elsewhere, in another order."""
    pages = indices.reshape(-1, pool.page_size)
    moved: torch.Tensor = (pages.flip(0) + pages.shape[0] * pool.page_size).reshape(-1)
    return moved


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "flat"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_come_back_byte_for_byte(kind: str, layout: str, v1: bool) -> None:
    pool = make_pool(kind, layout)
    backend = helpers.attach(helpers.storage_config(MEMORY, v1=v1), pool)
    keys, places = helpers.hashes(5), torch.arange(4, 24)
    elsewhere = other_places(pool, places)
    pages = [pool.get_data_page(int(at)).clone() for at in places[::4]]
    put(backend, pool, keys, places, v1)
    assert backend.batch_exists(keys + helpers.hashes(1)) == 5
    assert backend.batch_exists(helpers.hashes(1) + keys) == 0

    helpers.randomize(pool)
    expected = pool.kv_buffer.clone()
    assert get(backend, pool, keys, elsewhere, v1) == [True] * 5
    for at, page in zip(elsewhere[::4].tolist(), pages, strict=True):
        assert helpers.same(pool.get_data_page(at), page)
    # Nothing else was touched: with these pages as they were, all is as it was.
    after = pool.kv_buffer.clone()
    pool.kv_buffer.copy_(expected)
    before = [pool.get_data_page(at).clone() for at in elsewhere[::4].tolist()]
    pool.kv_buffer.copy_(after)
    for at, page in zip(elsewhere[::4].tolist(), before, strict=True):
        pool.set_from_flat_data_page(at, page)
    assert np.array_equal(helpers.as_bytes(pool.kv_buffer), helpers.as_bytes(expected))
    backend.close()
    backend.close()


def put(backend: Any, pool: Any, keys: list[str], places: torch.Tensor, v1: bool) -> None:
    if v1:
        assert backend.batch_set_v1(keys, places) == [True] * len(keys)
    else:
        assert backend.batch_set(keys, [pool.get_data_page(int(at)) for at in places[::4]])


def get(backend: Any, pool: Any, keys: list[str], places: torch.Tensor, v1: bool) -> list[bool]:
    if v1:
        found: list[bool] = backend.batch_get_v1(keys, places)
        return found
    pages = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for at, page in zip(places[::4].tolist(), pages, strict=True):
        if page is not None:
            pool.set_from_flat_data_page(at, page)
    return [page is not None for page in pages]


@pytest.mark.parametrize("layout", helpers.MHA_LAYOUTS)
def test_pieces_of_whole_blocks_are_not_copied(layout: str) -> None:
    """64 heads' bytes in K and in V of a page make 16 KiB: two records of a page, where they lie."""
    pool = make_pool("mha", layout, page_size=16, layers=4, heads=4, head_dim=32)
    backend = helpers.attach(helpers.storage_config(MEMORY), pool)
    plan = backend._pools["kv"].kept.plan
    assert plan.direct == (layout != "layer_first")  # its page is 8 pieces: one record, copied
    assert len(plan.parts) == (2 if plan.direct else 1)
    keys, places = helpers.hashes(3), torch.arange(16, 64)
    pages = [pool.get_data_page(int(at)).clone() for at in places[::16]]
    assert backend.batch_set_v1(keys, places) == [True] * 3
    helpers.randomize(pool)
    assert backend.batch_get_v1([keys[2], helpers.hashes(1)[0], keys[0]], places) == [True, False, True]
    assert helpers.same(pool.get_data_page(16), pages[2]) and helpers.same(pool.get_data_page(48), pages[0])
    backend.close()


def test_more_pages_than_the_staging_area_holds() -> None:
    pool = make_pool("mha", "page_first", size=2048)
    backend = helpers.attach(helpers.storage_config(MEMORY), pool)
    kept = backend._pools["kv"].kept
    assert kept.staging.count < 2 * 500
    keys, places = helpers.hashes(500), torch.arange(2000)
    before = pool.kv_buffer.clone()
    assert all(backend.batch_set_v1(keys, places))
    helpers.randomize(pool)
    assert all(backend.batch_get_v1(keys, places))
    assert helpers.same(pool.kv_buffer[:, :2000], before[:, :2000])
    backend.close()


def test_a_disk_is_found_again(tmp_path: Path) -> None:
    pool = make_pool("mha", "page_first")
    keys, places = helpers.hashes(4), torch.arange(16)
    before = pool.kv_buffer[:, :16].clone()
    first = helpers.attach(helpers.storage_config(disk(tmp_path)), pool)
    assert first.batch_set_v1(keys, places) == [True] * 4
    first.close()
    helpers.randomize(pool)
    second = helpers.attach(helpers.storage_config(disk(tmp_path)), pool)
    assert second.batch_exists(keys) == 4
    assert second.batch_get_v1(keys, places) == [True] * 4
    assert helpers.same(pool.kv_buffer[:, :16], before)
    second.close()


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model_name": "another"},
    "tp rank": {"tp_rank": 1, "tp_size": 2},
    "tp size": {"tp_size": 2},
    "pp rank": {"pp_rank": 1, "pp_size": 2},
    "pp size": {"pp_size": 2},
    "cp rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "cp size": {"attn_cp_size": 2},
}


OTHERS = ("path", "layout", "dtype", "page size", "heads", "layers", "salt", "interface")


@pytest.mark.parametrize("change", [*CHANGES, *OTHERS])
def test_every_difference_is_a_miss(change: str, tmp_path: Path) -> None:
    """Over one store: what was written with one identity is not there with another, and still there with its own."""
    settings: dict[str, Any] = {
        "tiers": {"object_store": {"url": f"file://{tmp_path}"}}, "namespace": {"salt": "one"},
    }  # fmt: skip
    keys = helpers.hashes(2)
    pool = make_pool("mha", "page_first")
    with_one = helpers.attach(helpers.storage_config(settings), pool)
    assert with_one.batch_set_v1(keys, torch.arange(8)) == [True, True]
    other, config = pool, helpers.storage_config(settings, **CHANGES.get(change, {}))
    if change == "layout":
        other = make_pool("mha", "page_first_direct")
    elif change == "dtype":
        other = make_pool("mha", "page_first", dtype=torch.bfloat16)
    elif change == "page size":  # of twice as many tokens, half as wide
        other = make_pool("mha", "page_first", page_size=8, head_dim=4)
    elif change == "heads":
        other = make_pool("mha", "page_first", heads=4, head_dim=4)
    elif change == "layers":
        other = make_pool("mha", "page_first", heads=1, layers=6)
    elif change == "path":  # other weights under the same served name
        helpers.publish(model_path="none", page_size=4)  # another name that SGLang looks nothing up for
    elif change == "salt":
        config = helpers.storage_config({**settings, "namespace": {"salt": "two"}})
    elif change == "interface":
        config = helpers.storage_config(settings, v1=False)
    with_other = helpers.attach(config, other)
    assert with_other.batch_exists(keys) == 0
    assert with_one.batch_exists(keys) == 2
    with_one.close()
    with_other.close()


def test_one_rank_writes_replicated_pages(tmp_path: Path) -> None:
    settings = {"tiers": {"object_store": {"url": f"file://{tmp_path}"}}}
    keys, places = helpers.hashes(2), torch.arange(8)
    pools = [make_pool("mla", "page_first") for _ in range(2)]
    ranks = [
        helpers.attach(helpers.storage_config(settings, is_mla_model=True, tp_rank=rank, tp_size=2), pools[rank])
        for rank in range(2)
    ]
    assert ranks[1].batch_set_v1(keys, places) == [True, True]  # told that it is done, as it is not this rank's
    assert ranks[0].batch_exists(keys) == ranks[1].batch_exists(keys) == 0
    assert ranks[0].batch_set_v1(keys, places) == [True, True]
    assert ranks[1].batch_get_v1(keys, places) == [True, True]
    assert helpers.same(pools[1].kv_buffer[:8], pools[0].kv_buffer[:8])
    for rank in ranks:
        rank.close()


def test_heads_for_other_tp_sizes(tmp_path: Path) -> None:
    """Written by one rank with four heads, cut by head for four; read by the ranks of tensor parallel 2."""
    settings = {"tiers": {"object_store": {"url": f"file://{tmp_path}"}}}
    keys, places = helpers.hashes(2), torch.arange(8)
    whole = make_pool("mha", "page_head", heads=4)
    cut: dict[str, Any] = {"tp_lcm_size": 4, "should_split_heads": True}
    writer = helpers.attach(helpers.storage_config(settings, **cut), whole)
    assert writer.batch_set_v1(keys, places) == [True, True]
    for rank in range(2):
        part = make_pool("mha", "page_head", heads=2)
        reader = helpers.attach(helpers.storage_config(settings, tp_rank=rank, tp_size=2, **cut), part)
        assert reader.batch_get_v1(keys, places) == [True, True]
        # (kv, page, head, token, layer, dim)
        assert helpers.same(part.kv_buffer[:, :2], whole.kv_buffer[:, :2, 2 * rank : 2 * rank + 2])
        reader.close()
    writer.close()


def test_several_pools_and_their_policies() -> None:
    kv, swa, index = (make_pool("mha", "page_first", heads=heads) for heads in (2, 1, 3))
    backend = helpers.attach(helpers.storage_config(MEMORY), kv, swa=swa, indexer=index)
    keys, places = helpers.hashes(6), torch.arange(24)
    before = {name: pool.kv_buffer.clone() for name, pool in (("kv", kv), ("swa", swa), ("indexer", index))}
    assert all(backend.batch_set_v1(keys, places))

    def transfer(name: str, chosen: list[int], policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES) -> Any:
        at = torch.cat([places[4 * i : 4 * i + 4] for i in chosen]) if chosen else None
        return PoolTransfer(name=name, host_indices=at, keys=[keys[i] for i in chosen], hit_policy=policy)

    stored = backend.batch_set_v2([transfer("swa", [1, 2, 4, 5]), transfer("indexer", [0, 1, 2, 3, 4])])
    assert stored == {"swa": [True] * 4, "indexer": [True] * 5}
    trailing = PoolTransfer(name="swa", keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = backend.batch_exists_v2(keys, [trailing])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [3, 6])
    assert result.extra_pool_hit_pages == {"kv": 6, "swa": 6}
    result = backend.batch_exists_v2(keys, [trailing, transfer("indexer", [0])])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [3])
    assert result.extra_pool_hit_pages == {"kv": 6, "swa": 6, "indexer": 5}
    assert backend.batch_exists_v2(helpers.hashes(2), [trailing]).restorable_prefix_pages == []

    for pool in (kv, swa, index):
        helpers.randomize(pool)
    got = backend.batch_get_v2([transfer("swa", [1, 2]), transfer("indexer", [4, 5])])
    assert got == {"swa": [True, True], "indexer": [True, False]}
    assert helpers.same(swa.kv_buffer[:, 4:12], before["swa"][:, 4:12])
    assert helpers.same(index.kv_buffer[:, 16:20], before["indexer"][:, 16:20])
    with pytest.raises(ConfigError, match="expected all_pages or trailing_pages"):
        backend.batch_exists_v2(keys, [transfer("swa", [], PoolHitPolicy.BLOCK_GROUPS)])
    with pytest.raises(ConfigError, match="mamba"):
        backend.batch_get_v2([transfer("mamba", [0])])
    with pytest.raises(ConfigError, match="one later"):
        backend.register_mem_host_pool_v2(kv, "draft")
    backend.close()


def test_what_is_there_but_damaged_is_a_miss(tmp_path: Path) -> None:
    pool = make_pool("mha", "page_first")
    backend = helpers.attach(helpers.storage_config(disk(tmp_path)), pool)
    keys, places = helpers.hashes(3), torch.arange(12)
    assert all(backend.batch_set_v1(keys, places))
    backend.close()
    (slab,) = tmp_path.rglob("slab.000000")
    content = bytearray(slab.read_bytes())
    page = pool.get_data_page(4).view(torch.uint8).numpy().tobytes()
    content[content.index(page[:64]) + 5] ^= 1
    slab.write_bytes(content)
    again = helpers.attach(helpers.storage_config(disk(tmp_path)), pool)
    assert again.batch_get_v1(keys, places) == [True, False, True]
    assert again.batch_exists(keys) == 1
    assert again._pools["kv"].stack.tiers["disk"].remove([b"x" * 32]).result().statuses == (PageStatus.MISS,)
    again.close()


def test_clear_and_bad_calls() -> None:
    pool = make_pool("mha", "page_first")
    backend = helpers.attach(helpers.storage_config(MEMORY, enable_storage_metrics=True), pool)
    keys, places = helpers.hashes(2), torch.arange(8)
    assert all(backend.batch_set_v1(keys, places)) and all(backend.batch_get_v1(keys, places))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2]) and min(stats.prefetch_bandwidth) > 0
    assert backend.get_stats().backup_pgs == []
    backend.clear()
    assert backend.batch_exists(keys) == 0 and backend.batch_get_v1(keys, places) == [False, False]
    assert all(backend.batch_set_v1(keys, places)) and backend.batch_exists(keys) == 2
    with pytest.raises(LayoutError, match="2 pages, got 1"):
        backend.batch_get_v1(keys, places[:4])
    with pytest.raises(LayoutError, match="whole pages"):
        backend.batch_get_v1(keys, places[:5])
    with pytest.raises(LayoutError, match="hex"):
        backend.batch_exists(["not a hash"])
    with pytest.raises(ConfigError, match="interface_v1"):
        backend.batch_set(keys, [pool.get_data_page(0)] * 2)
    backend.close()


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {}, "at least one below the host"),
        ({"enabled": False, **MEMORY}, {}, "enabled"),
        ({"tires": {}}, {}, "tiers"),
    ],
)
def test_refused_at_start(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        helpers.attach(helpers.storage_config(settings, **changes), make_pool("mha", "page_first"))


def test_a_key_in_the_wrong_place_is_refused() -> None:
    config = helpers.storage_config(MEMORY)
    config.extra_config["tiers"] = {}
    with pytest.raises(ConfigError, match="settings"):
        helpers.attach(config, make_pool("mha", "page_first"))


def test_bytes_need_a_named_dtype() -> None:
    """fp8 pools hold bytes: e4m3 and e5m2 must not be mixed up."""
    pool = make_pool("mha", "page_first", dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="kv_dtype"):
        helpers.attach(helpers.storage_config(MEMORY), pool)
    helpers.publish(page_size=4, kv_cache_dtype="fp8_e4m3")
    helpers.attach(helpers.storage_config(MEMORY), pool).close()
