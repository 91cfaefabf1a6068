"""KVTransferLinker driven by SGLang's UnifiedRadixCache and its linker controller: device -> us -> evicted -> back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.sglang import caches, helpers
from engines.sglang.caches import Engine, SlidingEngine, StateEngine
from engines.sglang.linked import Linked, equal, some
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tiers.record import NOTHING_STORED

pytestmark = pytest.mark.engines


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with helpers.one_rank():
        yield


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.linker.close()
    made.linker.close()


def test_evicted_and_back(linked: Linked) -> None:
    tokens = some(40)
    rows = linked.run(tokens)
    found, _ = linked.ask("still there", tokens)
    assert (found.device_prefix_len, found.host_hit_length) == (40, 0)
    linked.evict()
    assert equal(linked.load("again", tokens), rows)
    assert equal(linked.load("longer", [*tokens, 1, 2, 3, 4, 5]), rows)
    assert equal(linked.load("shorter", tokens[:30]), [one[:28] for one in rows])
    assert linked.load("another", some(40)) == []


def test_the_tail_behind_what_the_device_has(linked: Linked) -> None:
    tokens = some(48)
    indices = linked.engine.forward(48)
    rows = linked.engine.rows(indices)
    caches.insert(linked.cache, tokens[:24], indices[:24])
    caches.insert(linked.cache, tokens, indices)
    linked.settle()
    caches.evict_all(linked.cache, 24)  # the leaf goes, its parent stays
    found, _ = linked.ask("tail", tokens)
    assert (found.device_prefix_len, found.host_hit_length) == (24, 24)
    assert equal(linked.load("tail 2", tokens), [one[24:] for one in rows])


def test_two_tenants(linked: Linked) -> None:
    tokens = some(32)
    first = linked.run(tokens, cache_salt="one")
    second = linked.run(tokens, cache_salt="two")
    linked.run(tokens, extra_key="adapter")
    linked.evict()
    assert linked.load("nobody", tokens) == []
    assert linked.load("third", tokens, cache_salt="three") == []
    assert linked.load("other adapter", tokens, extra_key="other") == []
    assert equal(linked.load("two", tokens, cache_salt="two"), second)
    assert equal(linked.load("one", tokens, cache_salt="one"), first)


def test_a_page_that_does_not_verify_fails_the_load(linked: Linked) -> None:
    tokens = some(32)
    rows = linked.run(tokens)
    linked.evict()
    pool = next(iter(linked.linker.pools.values()))
    slots = [entry.slot for entry in pool.slots._entries.values()]
    pool.host.payload.numpy()[slots[3] * pool.host.slot_bytes + 5] ^= 16
    free = linked.engine.allocator.available_size()
    assert linked.load("bad", tokens) is None
    assert linked.engine.allocator.available_size() == free
    found, _ = linked.ask("after", tokens)
    assert found.host_hit_length < 32  # the page is gone; what lies before it is not
    linked.cache.linker.hit_markers.clear()
    assert equal(linked.load("rest", tokens), [one[: found.host_hit_length] for one in rows])
    assert equal(linked.load("new", again := some(16)), []) and again


def test_a_cancel_frees_what_was_held(linked: Linked) -> None:
    tokens = some(32)
    linked.run(tokens)
    linked.evict()
    pool = next(iter(linked.linker.pools.values()))
    assert linked.begin("gone", tokens) == 32
    assert pool.slots.room == 64 - 8
    slots = linked.cache.linker.private_load_indices["gone"]
    linked.cache.linker.release_request("gone")
    linked.engine.allocator.free(slots)
    assert pool.slots.room == 64
    linked.engine.wipe()
    before = linked.engine.rows(torch.arange(4, 256))
    assert linked.cache.ready_to_load_host_cache() == -1
    assert equal(linked.engine.rows(torch.arange(4, 256)), before)
    assert not linked.linker.cancel_queued_load("gone")


def test_several_requests_in_one_batch(linked: Linked) -> None:
    prompts = [some(16), some(24), some(8)]
    rows = [linked.run(tokens) for tokens in prompts]
    linked.evict()
    for number, tokens in enumerate(prompts):
        assert linked.begin(str(number), tokens) == len(tokens)
    slots = dict(linked.cache.linker.private_load_indices)
    linked.forward()
    assert linked.cache.linker.finish_loads() == []
    for number, expected in enumerate(rows):
        assert equal(linked.engine.rows(slots[str(number)]), expected)


def test_a_stale_index_waits_for_nothing_and_releases_nothing(linked: Linked) -> None:
    """Six loads through three slots, each waited for with the index of the one before it as well."""
    tokens = some(16)
    rows = linked.run(tokens)
    linked.evict()
    stale = -1
    for number in range(6):
        assert linked.begin(f"r{number}", tokens) == 16
        slots = linked.cache.linker.private_load_indices[f"r{number}"]
        index = linked.cache.ready_to_load_host_cache()
        assert index == stale + 1
        counter = linked.worker.counter
        counter.set_consumer(stale)
        counter.wait_until(2)
        assert linked.linker.finish_layer_wise_loading(stale)
        counter.set_consumer(index)
        linked.engine.pool.get_kv_buffer(2)
        assert linked.cache.linker.finish_loads() == []
        assert equal(linked.engine.rows(slots), rows)
        linked.engine.allocator.free(slots)
        stale = index


def test_host_memory_smaller_than_the_device() -> None:
    linked = Linked({"tiers": {"host": {"pages": 8, "pin": False}}})
    pool = next(iter(linked.linker.pools.values()))
    pool.slots._protect_s = 0.0
    prompts = [some(16) for _ in range(6)]
    rows = [linked.run(tokens) for tokens in prompts]
    assert pool.slots.evicted == 4 * 6 - 8
    linked.evict()
    assert linked.load("old", prompts[0]) == []
    assert equal(linked.load("new", prompts[5]), rows[5])
    big = some(64)  # more than there is room for: it is not kept, and nothing is stuck
    linked.run(big)
    linked.evict()
    assert linked.load("big", big) == []
    linked.linker.close()


def with_disk(folder: Path) -> dict[str, Any]:
    """Host memory of 8 pages, and a disk."""
    disk = {"paths": [str(folder)], "cache_gb": 0.05, "file_gb": 0.01}
    return {"tiers": {"host": {"pages": 8, "pin": False}, "disk": disk}}


def until_on_disk(pool: Any, pages: int) -> None:
    caches.until(lambda: pool.lower._stack.stats()["disk"].pages == pages, lambda: None)


def four_prompts(linked: Linked) -> tuple[Any, list[list[int]], list[list[torch.Tensor]]]:
    """Twice what host memory holds: all on the disk when this returns, half of it there alone; the device is empty."""
    pool = next(iter(linked.linker.pools.values()))
    pool.slots._protect_s = 0.0
    prompts = [some(16) for _ in range(4)]
    rows = []
    for number, tokens in enumerate(prompts, 1):
        rows.append(linked.run(tokens))
        # While the disk has not got them they stay in host memory, and there is no room for others.
        until_on_disk(pool, 4 * number)
    linked.evict()
    return pool, prompts, rows


def test_a_disk_below_and_a_restart(tmp_path: Path) -> None:
    settings = with_disk(tmp_path)
    linked = Linked(settings)
    _, prompts, rows = four_prompts(linked)
    for number in (0, 3, 1):  # the first are on the disk alone
        assert equal(linked.load(f"a{number}", prompts[number]), rows[number])
    linked.linker.close()

    again = Linked(settings)
    for number, tokens in enumerate(prompts):
        assert found_in_the_end(again, f"b{number}", tokens) == 16
        again.cache.linker.hit_markers.clear()
        assert equal(again.load(f"c{number}", tokens), rows[number])
    again.linker.close()


def found_in_the_end(linked: Linked, name: str, tokens: list[int]) -> int:
    """What a request's passes find: the first one asks, a later one knows."""
    found: list[int] = []
    caches.until(lambda: bool(found and found[-1]), lambda: found.append(linked.ask(name, tokens)[0].host_hit_length))
    return found[-1]


def test_a_disk_page_that_is_damaged_fails_the_load(tmp_path: Path) -> None:
    settings = with_disk(tmp_path)
    first = Linked(settings)
    tokens = some(16)
    rows = first.run(tokens)
    first.linker.close()
    (slab,) = tmp_path.rglob("slab.000000")
    content = bytearray(slab.read_bytes())
    page = rows[0][8:12].contiguous().view(torch.uint8).numpy().tobytes()
    content[content.index(page) + 7] ^= 2
    slab.write_bytes(content)
    second = Linked(settings)
    assert found_in_the_end(second, "look", tokens) == 16
    second.cache.linker.hit_markers.clear()
    assert second.load("bad", tokens) is None
    assert second.ask("after", tokens)[0].host_hit_length <= 8
    pool = next(iter(second.linker.pools.values()))
    assert pool.slots.room == 8
    second.linker.close()


def test_flush_keeps_what_was_stored_and_waits(linked: Linked) -> None:
    tokens = some(32)
    indices = linked.engine.forward(32)
    rows = linked.engine.rows(indices)
    caches.insert(linked.cache, tokens, indices)  # its offload is under way
    linked.cache.reset()
    assert linked.linker.num_completed_offloads() == 0
    linked.engine.allocator.clear()
    linked.engine.wipe()
    assert equal(linked.load("after the flush", tokens), rows)


def test_lookup_is_quick(linked: Linked) -> None:
    """Thousands of pages that are not there, looked up on the scheduler's thread."""
    import time

    tokens = some(4 * 20_000)
    linked.ask("warm up", tokens[:400])
    keys = helpers.hashes(20_000)
    transfer = linked.cache.linker._components[0].build_external_linker_transfer
    from sglang.srt.mem_cache.unified_cache.components import LinkerTransferPhase

    began = time.thread_time()
    assert linked.linker.lookup("x", [transfer(LinkerTransferPhase.LOOKUP, None, keys)]) == []
    assert time.thread_time() - began < 0.25


def test_a_load_waits_for_a_slow_tier_and_the_scheduler_does_not(tmp_path: Path) -> None:
    settings = with_disk(tmp_path)
    linked = Linked(settings)
    pool, prompts, rows = four_prompts(linked)
    gate = threading.Event()
    real = pool.lower._stack.get
    pool.lower._stack.get = lambda *args: gate.wait(30) and real(*args)
    assert linked.begin("slow", prompts[0]) == 16
    slots = linked.cache.linker.private_load_indices["slow"]
    index = linked.cache.ready_to_load_host_cache()  # returns though nothing has come yet
    linked.worker.counter.set_consumer(index)
    waited = threading.Thread(target=lambda: linked.engine.pool.get_kv_buffer(2))
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()
    gate.set()
    waited.join(30)
    assert not waited.is_alive()
    assert linked.cache.linker.finish_loads() == []
    assert equal(linked.engine.rows(slots), rows[0])
    linked.linker.close()


@pytest.mark.parametrize(
    ("settings", "message"), [({"enabled": False}, "enabled"), ({"tiers": {"host": {"pages": "many"}}}, "pages")]
)
def test_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Linked(settings)


def test_a_torn_slot_does_not_verify(linked: Linked) -> None:
    tokens = some(16)
    linked.run(tokens)
    linked.evict()
    pool = next(iter(linked.linker.pools.values()))
    pool.host.digests[[entry.slot for entry in pool.slots._entries.values()][-1]] = NOTHING_STORED
    assert linked.load("torn", tokens) is None


def test_latent_pools() -> None:
    linked = Linked(engine=Engine(helpers.mla_pool()))
    tokens = some(40)
    rows = linked.run(tokens)
    linked.evict()
    assert equal(linked.load("latent", tokens), rows)
    linked.linker.close()


def test_sliding_layers_come_back_where_they_are_needed() -> None:
    """All pages of the full layers, and the window's of the sliding ones; a boundary without its window is no hit."""
    linked = Linked(engine=SlidingEngine(helpers.sliding_pool()))
    assert {name.value for name in linked.linker.pools} == {"kv", "swa"}
    tokens = some(40)
    indices = linked.engine.forward(40)
    rows = linked.engine.rows(indices)
    caches.insert(linked.cache, tokens, indices)
    linked.settle()
    caches.evict_all(linked.cache, 256)
    linked.engine.wipe()
    found, req = linked.ask("again", [*tokens, 7])
    assert found.host_hit_length == 40
    assert caches.load_back(linked.cache, found, req)[0] == 40
    slots = linked.cache.linker.private_load_indices["again"]
    linked.forward()
    assert linked.cache.linker.finish_loads() == []
    got = linked.engine.rows(slots)
    half = len(got) - 2 * len(linked.engine.pool.swa_kv_pool.k_buffer)
    assert equal(got[:half], rows[:half])
    assert equal([one[-8:] for one in got[half:]], [one[-8:] for one in rows[half:]])
    linked.linker.close()


def test_recurrent_state_comes_with_its_prefix() -> None:
    """State lies at the end of what was inserted: that boundary is a hit, others are none."""
    engine = StateEngine()
    linked = Linked(engine=engine)
    assert {name.value for name in linked.linker.pools} == {"kv", "mamba"}
    tokens = some(40)
    indices, slot = engine.forward(40), engine.new_state()
    rows, state = engine.rows(indices), engine.state(int(slot))
    caches.insert(linked.cache, tokens, indices, state=slot)
    linked.settle()
    caches.evict_all(linked.cache, 256)
    linked.cache.evict(EvictParams(num_tokens=256, mamba_num=20))
    engine.wipe()
    assert linked.ask("inside", tokens[:36])[0].host_hit_length == 0
    found, req = linked.ask("again", [*tokens, 7])
    assert (found.host_hit_length, found.mamba_host_hit_length) == (40, 1)
    assert caches.load_back(linked.cache, found, req)[0] == 40
    slots = linked.cache.linker.private_load_indices["again"]
    linked.worker.counter.set_consumer(linked.cache.ready_to_load_host_cache())
    for layer in range(4):
        linked.worker.counter.wait_until(layer)
    assert linked.cache.linker.finish_loads() == []
    assert equal(engine.rows(slots), rows)
    assert equal(engine.state(int(req.kv.mamba_pool_idx)), state)
    linked.linker.close()
