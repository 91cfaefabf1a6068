"""KVTransferStorage under SGLang's own prefix cache: device -> host -> tiers -> host of another cache -> device."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.sglang import caches, helpers
from engines.sglang.caches import CacheRequestHandle, Engine, UnifiedRadixCache

pytestmark = pytest.mark.engines


class HiCache:
    """One engine with HiCache and our storage behind it."""

    def __init__(self, layout: str, settings: dict[str, Any], *, core: str = "rust") -> None:
        extra = {
            "backend_name": "kvtransfer", "module_path": helpers.MODULE, "class_name": "KVTransferStorage",
            "interface_v1": 1, "prefetch_threshold": 4, "settings": settings,
        }  # fmt: skip
        arguments = helpers.publish(
            page_size=caches.PAGE, enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_mem_layout=layout,
            hicache_io_backend=caches.IO_BACKENDS[layout], hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )  # fmt: skip
        self.engine = Engine(helpers.mha_pool())
        params = self.engine.params(tree_core_backend=core)
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(arguments, params)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def run(self, tokens: list[int]) -> list[torch.Tensor]:
        """A request of ``tokens``; returns its KV once it is in our tiers."""
        indices = self.engine.forward(len(tokens))
        rows = self.engine.rows(indices)
        caches.insert(self.cache, tokens, indices)
        self.cache.flush_pending_backups()
        caches.until(
            lambda: self.stored() == len(tokens) // caches.PAGE and not self.cache.ongoing_backup,
            self.cache.check_hicache_events,
        )
        return rows

    def stored(self) -> int:
        """Records in the first tier, in pages."""
        pool = self.storage._pools["kv"]
        return int(next(iter(pool.stack.stats().values())).pages) // len(pool.kept.plan.parts)

    def fetch(self, name: str, tokens: list[int]) -> int:
        """Prefetch as a waiting request does; how many tokens its host hit then has."""
        handle = CacheRequestHandle(name, 0)
        found = caches.match(self.cache, tokens)
        self.cache.prefetch_from_storage(handle, found.last_host_node, array("q", tokens), None)
        caches.until(lambda: bool(self.cache.check_prefetch_progress(handle)), self.cache.check_hicache_events)
        return int(caches.match(self.cache, tokens).host_hit_length)

    def load(self, name: str, tokens: list[int]) -> list[torch.Tensor]:
        """Load the host hit back, layer by layer, and return the rows."""
        found = caches.match(self.cache, tokens)
        req = caches.request(name, found)
        loaded, node = caches.load_back(self.cache, found, req)
        assert loaded == found.host_hit_length
        counter = self.cache.cache_controller.layer_done_counter
        counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(self.engine.pool.layer_num):
            self.engine.pool.get_kv_buffer(layer)
        return self.engine.rows(self.cache.path_device_indices(node))

    def close(self) -> None:
        self.cache.cache_controller.detach_storage_backend()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    helpers.plain_host_memory(monkeypatch)
    caches.copies_in_torch(monkeypatch)
    with helpers.one_rank():
        yield


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(helpers.same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", caches.IO_BACKENDS)
def test_to_a_disk_and_into_another_engine(layout: str, tmp_path: Path) -> None:
    settings = {"tiers": {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "file_gb": 0.01}}}
    tokens = torch.randint(0, 2**31, (24,)).tolist()
    first = HiCache(layout, settings)
    expected = first.run(tokens)
    caches.evict_all(first.cache, 64)
    first.engine.wipe()
    assert equal(first.load("warm", tokens), expected)  # from SGLang's own host memory
    first.close()

    second = HiCache(layout, settings)
    assert caches.match(second.cache, tokens).host_hit_length == 0
    assert second.fetch("again", [*tokens, 1, 2, 3, 4]) == 24
    assert equal(second.load("again", tokens), expected)
    second.close()


def test_a_page_that_fails_shortens_the_hit(tmp_path: Path) -> None:
    settings = {"tiers": {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "file_gb": 0.01}}}
    tokens = torch.randint(0, 2**31, (24,)).tolist()
    first = HiCache("page_first_direct", settings)
    rows = first.run(tokens)
    page = rows[0][16:20].contiguous().view(torch.uint8).numpy().tobytes()  # layer 0's K of page 4
    first.close()
    (slab,) = tmp_path.rglob("slab.000000")
    content = bytearray(slab.read_bytes())
    content[content.index(page) + 3] ^= 64
    slab.write_bytes(content)
    second = HiCache("page_first_direct", settings)
    assert second.fetch("short", tokens) == 16
    assert equal(second.load("short", tokens), [one[:16] for one in rows])
    second.close()


def test_two_tenants_share_a_store_and_nothing_else(tmp_path: Path) -> None:
    def settings(salt: str) -> dict[str, Any]:
        return {"tiers": {"object_store": {"url": f"file://{tmp_path}"}}, "namespace": {"salt": salt}}

    tokens = torch.randint(0, 2**31, (16,)).tolist()
    one = HiCache("page_first", settings("one"))
    indices = one.engine.forward(16)
    rows = one.engine.rows(indices)
    caches.insert(one.cache, tokens, indices)
    one.cache.flush_pending_backups()
    caches.until(lambda: _files(tmp_path) >= 4, one.cache.check_hicache_events)
    two = HiCache("page_first", settings("two"))
    assert two.fetch("other tenant", tokens) == 0
    again = HiCache("page_first", settings("one"))
    assert again.fetch("same tenant", tokens) == 16
    assert equal(again.load("same tenant", tokens), rows)
    for cache in (one, two, again):
        cache.close()


def _files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))
