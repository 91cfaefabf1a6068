"""``--radix-cache-backend kvtransfer``: found by SGLang's plug-in loader, built by its registry, called as it calls."""

from __future__ import annotations

import json
import sys
import tomllib
from array import array
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.sglang import caches, helpers
from engines.sglang.caches import CacheRequestHandle, Engine
from sglang.srt import plugins
from sglang.srt.managers.schedule_batch import Req, split_cached_prefix_by_tier
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from kvtransfer.integrations.sglang.radix import NAME, KVTransferRadixCache

pytestmark = pytest.mark.engines
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with helpers.one_rank():
        yield


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader has run, over an installed distribution with the entry points of our pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "kvtransfer_here-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtransfer-here\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["sglang.srt.plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    invalidate_caches()
    monkeypatch.delitem(registry._RADIX_CACHE_REGISTRY, NAME, raising=False)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()


class Backend:
    """An engine with our radix backend."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        ticks: bool = False,
        speculative: bool = False,
        **tiers: Any,
    ) -> None:
        config = folder / "kv.json"
        config.write_text(json.dumps({"tiers": {"host": {"pages": 64, "pin": False}, **tiers}}))
        monkeypatch.setenv("KVTRANSFER_CONFIG", str(config))
        self.ticks = ticks
        arguments = helpers.publish(
            page_size=caches.PAGE,
            radix_cache_backend=NAME,
            enable_hierarchical_cache=ticks,
            speculative_algorithm="EAGLE" if speculative else None,
        )
        self.engine = Engine(helpers.mha_pool())
        context = registry.TreeCacheBuildContext(
            server_args=arguments, params=self.engine.params(is_eagle=speculative),
            is_hybrid_swa=False, is_hybrid_ssm=False,
            enable_hierarchical_cache=ticks, disable_radix_cache=False,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(forward_stream=None)), model_config=None,
            tp_size=1, tp_rank=0, tp_group=None,
        )  # fmt: skip
        self.cache = registry.create_tree_cache(context)
        assert isinstance(self.cache, KVTransferRadixCache)

    def settle(self) -> None:
        """A tick where the scheduler has them; the next request's match where not."""
        tick = self.cache.check_hicache_events if self.ticks else lambda: caches.match(self.cache, [1, 2])
        caches.until(lambda: not self.cache.linker.pending_offloads, tick)

    def admit(self, name: str, tokens: list[int]) -> tuple[Any, int, list[torch.Tensor]]:
        """Match and load back, as admission does; the tokens loaded, and all rows of the prefix then."""
        req = caches.request(name)
        found = caches.match(self.cache, tokens, req=req)
        req.last_node, req.prefix_len = found.last_device_node, found.device_prefix_len
        loaded = 0
        if found.host_hit_length:
            loaded, req.last_node = caches.load_back(self.cache, found, req)
            assert loaded in (0, found.host_hit_length)  # what SGLang demands
        req.prefix_len += loaded
        return found, loaded, self.engine.rows(self.cache.prefix_device_indices(req))

    def serve(self, prompt: list[int], committed: int, allocated: int, output: list[int]) -> tuple[Any, Any]:
        """A request of SGLang's own with KV for ``committed`` tokens and room for ``allocated``, and all its rows."""
        req = Req(f"r{len(prompt)}", "", array("q", prompt), SamplingParams(max_new_tokens=100))
        req.output_ids = array("q", output)
        places = self.engine.forward(allocated)
        (row,) = self.engine.requests.alloc([req])
        self.engine.requests.req_to_token[row, :allocated] = places.to(torch.int32)
        req.kv.req_pool_idx, req.kv.kv_committed_len, req.kv.kv_allocated_len = row, committed, allocated
        req.last_node = self.cache.root_node_handle()
        req.lock = self.cache.lock(req.last_node)
        req.cache_protected_len = 0
        rows = self.engine.rows(places)
        return req, rows

    def stored(self) -> int:
        return len(next(iter(self.cache.linker.cache_linker.pools.values())).slots)

    def flush(self) -> None:
        """SGLang's flush: the tree and the allocators, in its scheduler's order."""
        self.cache.reset()
        self.engine.requests.clear()
        self.engine.allocator.clear()
        self.engine.wipe()

    def close(self) -> None:
        self.cache.release_host_resources()


def some(count: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 2**31, (count,)).tolist()
    return tokens


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(helpers.same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("ticks", [False, True], ids=["polls", "ticks"])
def test_flush_then_hits_from_host(ticks: bool, loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Backend(tmp_path, monkeypatch, ticks=ticks)
    tokens = some(40)
    indices = engine.engine.forward(40)
    rows = engine.engine.rows(indices)
    caches.insert(engine.cache, tokens, indices)
    engine.settle()
    found, loaded_tokens, got = engine.admit("warm", tokens)
    assert (found.device_prefix_len, loaded_tokens) == (40, 0) and equal(got, rows)
    assert details(found, loaded_tokens) == (40, 0, 0)
    engine.flush()
    assert engine.cache.ready_to_load_host_cache() == -1
    found, loaded_tokens, got = engine.admit("after the flush", [*tokens, 1, 2, 3])
    assert (found.device_prefix_len, loaded_tokens) == (0, 40) and equal(got, rows)
    assert details(found, loaded_tokens) == (0, 40, 0)
    engine.close()


def details(found: Any, loaded_tokens: int) -> tuple[int, int, int]:
    """SGLang's own split of a request's cached tokens: device, host, storage."""
    split: tuple[int, int, int] = split_cached_prefix_by_tier(
        prefix_len=found.device_prefix_len + loaded_tokens,
        host_hit_len=loaded_tokens,
        storage_hit_len=0,
        storage_hit_start=None,
        host_hit_is_storage=False,
    )
    return split


def test_a_load_that_fails_returns_nothing_and_frees_everything(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Backend(tmp_path, monkeypatch)
    tokens = some(40)
    caches.insert(engine.cache, tokens, engine.engine.forward(40))
    engine.settle()
    engine.flush()
    pool = next(iter(engine.cache.linker.cache_linker.pools.values()))
    slot = [entry.slot for entry in pool.slots._entries.values()][5]
    pool.host.payload.numpy()[slot * pool.host.slot_bytes + 9] ^= 1
    free = engine.engine.allocator.available_size()
    found, loaded_tokens, _ = engine.admit("bad", tokens)
    assert (found.host_hit_length, loaded_tokens) == (40, 0)
    assert engine.engine.allocator.available_size() == free
    assert pool.slots.room == 64 and engine.cache.linker.private_load_indices == {}
    found, loaded_tokens, _ = engine.admit("again", tokens)
    assert 0 < loaded_tokens < 40  # the page is forgotten, and what lies before it is used
    engine.close()


@pytest.mark.parametrize("drafts", [0, 8], ids=["plain", "speculative"])
def test_only_committed_tokens_are_stored(
    drafts: int, loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 18 prompt tokens and 7 sampled ones, the last of which has no KV; behind it drafts, rejected.

    EAGLE's keys are pairs of tokens: there is one less of them than of tokens.
    """
    engine = Backend(tmp_path, monkeypatch, speculative=drafts > 0)
    prompt, output = some(18), some(7)
    req, rows = engine.serve(prompt, 24, 24 + drafts, output)
    pages = 5 if drafts else 6
    req.finished_len = 7
    req.finished_reason = SimpleNamespace(to_json=dict)
    release_kv_cache(req, engine.cache, checkpoint=True)
    engine.settle()
    assert engine.stored() == pages
    engine.flush()
    _, loaded_tokens, got = engine.admit("next turn", [*prompt, *output, *some(10)])
    assert loaded_tokens == 4 * pages
    assert equal(got, [one[: 4 * pages] for one in rows])
    engine.close()


def test_a_caller_that_asks_for_more_gets_what_is_committed(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Backend(tmp_path, monkeypatch)
    req, _ = engine.serve(some(24), 16, 32, some(8))
    req.refresh_fill_ids()
    engine.cache.checkpoint(req, up_to=32)
    engine.settle()
    assert engine.stored() == 4
    engine.close()


def test_an_abort_mid_draft_stores_nothing_that_is_not_committed(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Backend(tmp_path, monkeypatch, speculative=True)
    free = engine.engine.allocator.available_size()
    req, _ = engine.serve(some(16), 8, 28, some(12))
    engine.cache.release_aborted_request(CacheRequestHandle(req.rid, 0))
    release_kv_cache(req, engine.cache, checkpoint=False)
    engine.settle()
    assert engine.stored() == 0
    assert engine.engine.allocator.available_size() == free
    engine.close()


def test_offloads_are_acknowledged_though_only_eviction_is_called(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pure decode: no match, no tick. Pages under an offload are locked; eviction must come to them all the same."""
    engine = Backend(tmp_path, monkeypatch)
    tokens = some(200)
    caches.insert(engine.cache, tokens, engine.engine.forward(200))
    free = engine.engine.allocator.available_size()

    def evicted() -> bool:
        caches.evict_all(engine.cache, 200)
        return bool(engine.engine.allocator.available_size() == free + 200)

    caches.until(evicted, lambda: None)
    engine.close()


def test_pages_of_a_disk_come_while_the_request_waits(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: dict[str, Any] = {"disk": {"paths": [str(tmp_path / "pages")], "cache_gb": 0.05, "file_gb": 0.01}}
    tokens = some(40)
    first = Backend(tmp_path, monkeypatch, **disk)
    indices = first.engine.forward(40)
    rows = first.engine.rows(indices)
    caches.insert(first.cache, tokens, indices)
    first.settle()
    first.close()
    second = Backend(tmp_path, monkeypatch, **disk)
    pool = next(iter(second.cache.linker.cache_linker.pools.values()))
    pool._early_pages = 2  # 256 tokens as configured
    request = caches.request("waiting")
    caches.until(
        lambda: len(pool.slots) == 10 and pool.slots.all_ready(list(pool.slots._entries)),
        lambda: caches.match(second.cache, tokens, req=request),
    )
    _, loaded_tokens, got = second.admit("waiting", tokens)
    assert loaded_tokens == 40 and equal(got, rows)
    second.close()
