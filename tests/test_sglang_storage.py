"""The SGLang storage backend without SGLang (tests/stubs), over a host pool that has what SGLang's have."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolTransfer

import kvtransfer.integrations.sglang as door
from kvtransfer.config import ConfigWarning
from kvtransfer.integrations.sglang import KVTransferStorage
from kvtransfer.integrations.sglang.host_pages import HostPages
from kvtransfer.kernels.errors import ConfigError, LayoutError

PAGE, LAYERS, ROW = 4, 3, 40
MEMORY: dict[str, Any] = {"tiers": {"memory": {"cache_gb": 0.02}}}


class HostPool:
    """K and V of ``pages`` pages, all layers of a page together; other shapes by ``flat`` and ``layout``."""

    def __init__(
        self, pages: int = 16, layout: str = "page_first", *, flat: bool = False, dtype: Any = torch.int16
    ) -> None:
        self.page_size, self.layout, self.dtype, self.layer_num, self.start_layer = PAGE, layout, dtype, LAYERS, 0
        self.flat = flat
        self.kv_buffer = torch.empty((2, pages, LAYERS, PAGE, ROW // dtype.itemsize), dtype=dtype)
        self.fill()

    def fill(self) -> torch.Tensor:
        raw = self.kv_buffer.view(torch.uint8)
        raw.copy_(torch.from_numpy(np.frombuffer(secrets.token_bytes(raw.numel()), np.uint8).copy()).view(raw.shape))
        return self.kv_buffer.clone()

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.flat:
            raise ValueError("no addresses here")
        pages = (indices[::PAGE] // PAGE).tolist()
        places = [self.kv_buffer[kind, page] for page in pages for kind in range(2)]
        return [place.data_ptr() for place in places], [place.nbytes for place in places]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, int(index) // PAGE].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[:, int(index) // PAGE] = data_page.view(2, LAYERS, PAGE, -1)


def config(settings: dict[str, Any] | None = None, *, v1: bool = True, extra: Any = None, **more: Any) -> Any:
    given = {"interface_v1": int(v1), "settings": MEMORY if settings is None else settings, **(extra or {})}
    ranks: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**ranks, **more}, extra_config=given)


def attach(pool: Any, given: Any | None = None) -> Any:
    backend = KVTransferStorage(config() if given is None else given, {})
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def hashes(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]


@pytest.mark.parametrize("flat", [False, True], ids=["pieces", "flat"])
def test_there_and_back(flat: bool) -> None:
    pool = HostPool(flat=flat)
    backend = attach(pool)
    keys, places = hashes(3), torch.arange(8, 20)
    before = pool.kv_buffer.clone()
    assert backend.batch_set_v1(keys, places) == [True] * 3
    after = pool.fill()
    assert backend.batch_get_v1([keys[1], *hashes(1), keys[0]], torch.arange(40, 52)) == [True, False, True]
    assert torch.equal(pool.kv_buffer[:, 10], before[:, 3]) and torch.equal(pool.kv_buffer[:, 12], before[:, 2])
    pool.kv_buffer[:, [10, 12]] = after[:, [10, 12]]
    assert torch.equal(pool.kv_buffer, after)
    assert backend.batch_exists(keys) == 3 and backend.batch_exists([*keys[:2], *hashes(1)]) == 2
    assert backend.exists(keys[0]) and not backend.exists(hashes(1)[0])
    backend.close()


def test_pieces_and_flat_pages_are_not_mixed_up(tmp_path: Path) -> None:
    settings = {"tiers": {"object_store": {"url": f"file://{tmp_path}"}}}
    keys = hashes(1)
    one = attach(HostPool(), config(settings))
    assert one.batch_set_v1(keys, torch.arange(4)) == [True]
    other = attach(HostPool(flat=True), config(settings))
    assert one.batch_exists(keys) == 1 and other.batch_exists(keys) == 0
    one.close()
    other.close()


def test_what_the_engine_says_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tiers": {"object_store": {"url": f"file://{tmp_path}"}}}
    keys = hashes(1)
    first = attach(HostPool(), config(settings))
    assert first.batch_set_v1(keys, torch.arange(4)) == [True]
    for what, value in (("model_path", "other"), ("revision", "v2"), ("kv_cache_dtype", "fp8_e4m3")):
        with monkeypatch.context() as patch:
            patch.setattr(runtime_context.MODEL, what, value)
            other = attach(HostPool(), config(settings))
            assert other.batch_exists(keys) == 0, what
            other.close()
            named = attach(HostPool(), config({**settings, "namespace": {"model": "fingerprint"}}))
            assert named.batch_exists(keys) == 0
            named.close()
    again = attach(HostPool(), config(settings))
    assert again.batch_exists(keys) == 1
    again.close()
    first.close()


def test_calls_from_four_threads_at_once() -> None:
    """SGLang's prefetch, read, backup and scheduler threads."""
    pool = HostPool(64)
    backend = attach(pool, config(enable_storage_metrics=False))
    keys = hashes(64)
    before = pool.kv_buffer.clone()
    assert all(backend.batch_set_v1(keys, torch.arange(256)))
    wrong: list[str] = []

    def run(work: Any) -> threading.Thread:
        def body() -> None:
            for _ in range(10):
                if not work():
                    wrong.append(str(work))

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    threads = [
        run(lambda: all(backend.batch_get_v1(keys[:32], torch.arange(128)))),
        run(lambda: all(backend.batch_set_v1(keys[32:], torch.arange(128, 256)))),
        run(lambda: backend.batch_exists(keys) == 64),
        run(lambda: backend.get_stats() is None),
    ]
    for thread in threads:
        thread.join(60)
    assert not wrong and torch.equal(pool.kv_buffer, before)
    backend.close()


def test_calls_before_the_pools_are_known_are_refused() -> None:
    backend = KVTransferStorage(config(), {})
    with pytest.raises(ConfigError, match="on_host_pools_registered"):
        backend.batch_exists(hashes(1))
    backend.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"setings": {}}, "did you mean 'settings'"), ({"tiers": {}}, "belong into settings")],
    ids=["typo", "place"],
)
def test_unknown_keys_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTransferStorage(config(extra=extra), {})


def test_a_configuration_file_and_settings_over_it(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text("[tiers.memory]\ncache_gb = 0.5\n")
    with pytest.warns(ConfigWarning, match=r"0.02 is taken, not 0.5"):
        backend = attach(HostPool(), config(extra={"config": str(file)}))
    stats = backend._pools["kv"].stack.stats()["memory"]
    assert stats.capacity_bytes == int(0.02 * 2**30)
    backend.close()


def test_a_pool_without_pages_to_store_is_refused() -> None:
    class Bare(HostPool):
        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            raise NotImplementedError("scales lie elsewhere")

    with pytest.raises(ConfigError, match="scales lie elsewhere"):
        attach(Bare(flat=True))
    empty: Any = HostPool()
    empty.kv_buffer = None
    with pytest.raises(ConfigError, match="memory of its own"):
        attach(empty)
    with pytest.raises(ConfigError, match="cut by head"):
        HostPages(HostPool(flat=True), "kv", heads_split=2)


def test_pointers_outside_the_pool_are_refused() -> None:
    class Lost(HostPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return [pointer + (1 << 30) for pointer in pointers], sizes

    backend = attach(Lost())
    with pytest.raises(LayoutError, match="within its memory"):
        backend.batch_set_v1(hashes(1), torch.arange(4))
    backend.close()


def test_side_pools_of_which_one_page_is_gone() -> None:
    """A hit is as long as all pools have it."""
    kv, side = HostPool(), HostPool()
    backend = KVTransferStorage(config(), {})
    backend.register_mem_pool_host(kv)
    backend.register_mem_host_pool_v2(kv, "kv")
    backend.register_mem_host_pool_v2(side, "indexer")
    backend.on_host_pools_registered()
    keys, places = hashes(8), torch.arange(32)
    assert all(backend.batch_set_v1(keys, places))
    transfer = PoolTransfer("indexer", host_indices=places, keys=keys)
    assert backend.batch_set_v2([transfer]) == {"indexer": [True] * 8}
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 8
    backend._pools["indexer"].kept.forget(keys[5:6])
    assert backend.batch_exists_v2(keys, [transfer]).restorable_prefix_pages == [1, 2, 3, 4, 5]
    window = PoolTransfer("indexer", keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(keys, [window]).restorable_prefix_pages == [1, 2, 3, 4, 5, 8]
    backend.close()


def test_names_of_the_package() -> None:
    assert door.__all__ == sorted(door.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = door.nothing
