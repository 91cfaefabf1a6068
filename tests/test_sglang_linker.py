"""The SGLang linker without SGLang (tests/stubs), driven in SGLang's own order of calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang_helpers import LAYERS, PAGE, Component, Engine, hashes, until

from kvtransfer.integrations.sglang import KVTransferLinker
from kvtransfer.integrations.sglang.layer_counter import SLOTS, LayerCounter
from kvtransfer.kernels.errors import ConfigError, LayoutError, TransferError


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.linker.close()


def test_there_and_back(engine: Engine) -> None:
    keys = hashes(9)
    rows = engine.fill([*range(1, 10)])
    assert engine.linker.lookup("r", engine.transfer(keys)) == []
    assert engine.offload(keys, [*range(1, 10)])
    assert engine.linker.lookup("r", engine.transfer([*keys, *hashes(2)])) == [*range(1, 10)]
    assert engine.linker.lookup("r", engine.transfer([*hashes(1), *keys])) == []
    engine.fill([*range(33)])
    before = engine.rows([*range(20, 33)])
    assert engine.load("r", keys[2:], [19, 12, 18, 13, 17, 14, 16])
    assert torch.equal(engine.rows([19, 12, 18, 13, 17, 14, 16]), rows[2:])
    assert torch.equal(engine.rows([*range(20, 33)]), before)


def test_offloads_are_acknowledged_in_order_and_fail_without_room() -> None:
    engine = Engine(pages=4)
    keys = hashes(10)
    engine.fill([*range(1, 11)])
    assert engine.linker.offload(engine.transfer(keys[:3], [1, 2, 3]))
    assert engine.linker.offload(engine.transfer(keys[3:8], [4, 5, 6, 7, 8]))  # more than there are slots
    assert engine.linker.offload(engine.transfer(keys[:3], [1, 2, 3]))  # there already
    until(lambda: engine.linker.num_completed_offloads() == 3)
    assert [engine.linker.pop_completed_offload() for _ in range(3)] == [True, False, True]
    with pytest.raises(IndexError, match="over"):
        engine.linker.pop_completed_offload()
    assert engine.linker.lookup("r", engine.transfer(keys)) == [1, 2, 3]
    assert not engine.linker.offload(engine.transfer([], []))
    engine.linker.close()


def test_what_was_evicted_between_fails_the_load_on_the_rank_alone(engine: Engine) -> None:
    """`load` itself says True: what one rank refuses and another doesn't would part them."""
    keys = hashes(2)
    engine.fill([1, 2])
    assert engine.offload(keys, [1, 2])
    pool = engine.linker.pools[PoolName.KV]
    pool.slots.forget(keys[1:])
    assert not engine.load("r", keys, [3, 4])
    assert pool.slots.room == 64
    assert engine.load("s", keys[:1], [5])


def test_reset_waits_and_keeps(engine: Engine) -> None:
    keys = hashes(4)
    rows = engine.fill([1, 2, 3, 4])
    assert engine.linker.offload(engine.transfer(keys, [1, 2, 3, 4]))
    engine.linker.load("queued", engine.transfer(hashes(1), [9]))
    with pytest.raises(ConfigError, match="again"):
        engine.linker.load("queued", engine.transfer(hashes(1), [9]))
    engine.linker.reset()
    assert engine.linker.num_completed_offloads() == 0
    assert not engine.linker.cancel_queued_load("queued")
    assert engine.linker.start_layer_wise_loading() == -1
    assert engine.load("r", keys, [5, 6, 7, 8]) and torch.equal(engine.rows([5, 6, 7, 8]), rows)


def test_indices_that_are_no_pages_are_refused(engine: Engine) -> None:
    transfer = engine.transfer(hashes(2), [1, 2])
    transfer[0].device_indices = transfer[0].device_indices[:-1]
    with pytest.raises(LayoutError, match="2 pages of 4 tokens, got 7"):
        engine.linker.offload(transfer)
    with pytest.raises(LayoutError, match="got 7"):
        engine.linker.load("r", transfer)
    assert engine.linker.pools[PoolName.KV].slots.room == 64


@pytest.mark.parametrize(
    "change",
    [{"kv_cache_layout": "hnd"}, {"k_scale_buffer": []}, {"native_k_scale_buffer": []}],
    ids=lambda change: next(iter(change)),
)
def test_a_pool_that_can_not_be_carried_whole_is_refused(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(MHATokenToKVPool, name, value)
    with pytest.raises(ConfigError, match="carried whole"):
        Engine()


def test_context_parallel_decoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_context.PARALLEL, "attn_dcp_size", 2, raising=False)
    with pytest.raises(ConfigError, match="decode context"):
        Engine()


def test_components_that_are_not_known_are_refused() -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match="C128"):
        KVTransferLinker(None, engine.params, components={Component["C128"]}, extra_config={})
    engine.linker.close()


# --- the layer counter


class Gate:
    """A load whose layers are released by hand."""

    def __init__(self) -> None:
        self.layers = [threading.Event() for _ in range(LAYERS)]
        self.waited: list[int] = []
        self.finishes = 0

    def wait_layer(self, layer: int) -> None:
        assert self.layers[layer].wait(20)
        self.waited.append(layer)

    def finish(self) -> bool:
        self.finishes += 1
        return True


def test_a_layer_of_an_earlier_load_releases_nothing_of_a_later_one() -> None:
    counter = LayerCounter(LAYERS)
    for _ in range(4):
        old = Gate()
        index = counter.start(old)
        for layer in old.layers:
            layer.set()
        counter.set_consumer(index)
        counter.wait_until(2)
        assert counter.finish(index)
        for event in old.layers:
            event.set()  # a signal that comes late
        new = Gate()
        later = [counter.start(new if number == SLOTS - 1 else Gate()) for number in range(SLOTS)][-1]
        assert later % SLOTS == index % SLOTS  # the same slot
        counter.set_consumer(index)
        counter.wait_until(0)  # waits for nothing
        counter.set_consumer(later)
        waiter = threading.Thread(target=counter.wait_until, args=(1,))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive() and not new.waited
        new.layers[1].set()
        waiter.join(20)
        assert new.waited == [1]
        for number in range(later - SLOTS + 1, later + 1):
            assert counter.finish(number)


def test_a_slot_is_given_again_only_when_its_load_is_over() -> None:
    counter = LayerCounter(LAYERS)
    loads = [Gate() for _ in range(SLOTS + 1)]
    indices = [counter.start(load) for load in loads]
    assert indices == [0, 1, 2, 3]
    assert [load.finishes for load in loads] == [1, 0, 0, 0]
    assert counter.finish(0) and loads[0].finishes == 1  # its outcome was kept
    assert counter.finish(99) and counter.finish(-1)
    counter.reset()
    assert [load.finishes for load in loads] == [1, 1, 1, 1]
    assert counter.start(Gate()) == 4  # indices never come back
    counter.set_consumer(-1)
    counter.wait_until(0)


def test_a_failed_load_is_told_when_its_slot_was_given_away() -> None:
    counter = LayerCounter(LAYERS)
    bad = Gate()
    bad.finish = lambda: False  # type: ignore[method-assign]
    index = counter.start(bad)
    for _ in range(SLOTS):
        counter.start(Gate())
    assert not counter.finish(index)
    assert counter.finish(index)  # told once


def test_a_load_can_be_waited_for_by_its_index() -> None:
    """As speculative decoding with a fused draft does."""
    counter = LayerCounter(LAYERS)
    load = Gate()
    for layer in load.layers:
        layer.set()
    index = counter.start(load)
    counter.events[index].wait(counter.num_layers - 1)
    counter.events[index - 1].wait(0)
    assert load.waited == [LAYERS - 1]


def test_an_error_in_a_wait_does_not_reach_the_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = hashes(2)
    engine.fill([1, 2])
    assert engine.offload(keys, [1, 2])
    pool = engine.linker.pools[PoolName.KV]

    def broken(*_: Any) -> None:
        raise TransferError("broken")

    monkeypatch.setattr(type(pool), "wait_layer", broken)
    assert not engine.load("r", keys, [3, 4])
    monkeypatch.undo()
    assert engine.load("r", keys, [3, 4])


def test_pools_whose_rows_are_pages_travel_with_the_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an indexer's keys do: one row a page, some layers only, under the KV's indices."""
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

    from kvtransfer.integrations.sglang import linked_pools
    from kvtransfer.integrations.sglang.device_pools import device_pool_group as made

    index = [torch.randint(0, 256, (33, 52), dtype=torch.uint8) for _ in range(2)]

    def with_indexer(kvcache: Any, params: Any, components: Any) -> Any:
        group = made(kvcache, params, components)
        side = DevicePoolEntry(
            name=PoolName.INDEXER, indices_from_pool=PoolName.KV, device_pool=kvcache, components=[index],
            layer_mapping={0: 0, 2: 1}, page_size=PAGE, rows_are_pages=True,
        )  # fmt: skip
        return DevicePoolGroup([*group.entries, side], group.num_layers, PAGE, rank_replicated=True)

    monkeypatch.setattr(linked_pools, "device_pool_group", with_indexer)
    engine = Engine()
    pool = engine.linker.pools[PoolName.INDEXER]
    assert pool.spec.page_bytes == 2 * 52 and pool.host.num_slots == 64
    keys = hashes(5)
    rows, side = engine.fill([1, 2, 3, 4, 5]), [one[1:6].clone() for one in index]
    assert engine.offload(keys, [1, 2, 3, 4, 5])
    engine.fill([*range(33)])
    for one in index:
        one.random_(0, 256)
    before = [one.clone() for one in index]
    assert engine.load("r", keys[1:4], [30, 10, 20])
    assert torch.equal(engine.rows([30, 10, 20]), rows[1:4])
    for one, was, expected in zip(index, before, side, strict=True):
        assert torch.equal(one[[30, 10, 20]], expected[1:4])
        was[[30, 10, 20]] = expected[1:4]
        assert torch.equal(one, was)
    pool.slots.forget(keys[2:3])  # what one pool lacks shortens the hit of all
    assert engine.linker.lookup("s", engine.transfer(keys)) == [1, 2]
    engine.linker.close()


def test_strided_rows_are_carried_and_rows_in_pieces_refused() -> None:
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry

    from kvtransfer.integrations.sglang.linked_pool import spec_of

    def entry(buffer: torch.Tensor) -> Any:
        return DevicePoolEntry(
            name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=None, components=[[buffer]],
            layer_mapping={0: 0}, page_size=PAGE, rows_are_pages=False,
        )  # fmt: skip

    wide = torch.zeros(36, 3, 2, 8)
    spec, parts, local = spec_of(entry(wide[:, 1]))
    assert spec.page_bytes == PAGE * 64 and parts[0].tensor.stride(0) == 192 and local == [0]
    with pytest.raises(ConfigError, match="contiguous rows"):
        spec_of(entry(wide[:, :, 0]))


def test_pages_reach_the_tiers_while_they_are_being_loaded() -> None:
    engine = Engine(tiers={"host": {"pages": 64, "pin": False}, "memory": {"cache_gb": 0.02}})
    pool: Any = engine.linker.pools[PoolName.KV]
    keys = hashes(8)
    rows = engine.fill([*range(1, 9)])
    writing = pool.lower._keep
    gate = threading.Event()
    pool.lower._keep = lambda names: gate.wait(20) and writing(names)
    assert engine.offload(keys, [*range(1, 9)])
    assert engine.linker.load("r", engine.transfer(keys, [*range(11, 19)]))
    reader = object()
    pool.host.ledger.claim(pool.slots.slots_of(keys), reader)  # as a load does
    gate.set()
    until(lambda: pool.lower._stack.stats()["memory"].pages == 8)
    pool.host.ledger.release(reader)
    assert engine.linker.cancel_queued_load("r")
    pool.slots.forget(keys)
    assert engine.linker.lookup("s", engine.transfer(keys)) == [*range(1, 9)]
    until(lambda: pool.slots.room == 64)
    assert engine.load("t", keys, [*range(21, 29)]) and torch.equal(engine.rows([*range(21, 29)]), rows)
    engine.linker.close()


def test_the_last_layer_stands_for_all_of_every_pool(engine: Engine) -> None:
    """Before a full CUDA graph SGLang waits for the last layer only, which a pool of some layers may not have."""
    pool = engine.linker.pools[PoolName.KV]
    pool._layers = [1, 4, 6]  # its transfer layers
    waited: list[int] = []
    handle: Any = SimpleNamespace(wait_layer=waited.append)
    for layer in range(8):
        pool.wait_layer(handle, layer)
    assert waited == [0, 0, 0, 1, 1, 2, 2]  # for layer 0 nothing
