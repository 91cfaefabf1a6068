"""A cache's stores and loads against the streams of the pool: a store has what was being written when it was called, a
load waits for who still reads; on FIFO streams, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, make_rig, random_bytes, until

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.directory import Directory
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.mover import Mover
from kvtransfer.pool import KVPool
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.host import HostTier


def cache_over(engine: TransferEngine, slots: int) -> TieredCache:
    directory = Directory(engine.pool.spec.page_size, [TierPlan("host", "slots", slots)])
    return TieredCache(directory, Mover(engine), tick_s=None)


def test_a_store_waits_for_the_forward_and_a_load_for_its_readers() -> None:
    forward = Delays()
    with FifoStream("compute", forward) as compute, FifoStream("other", forward) as other:
        rig = make_rig("sglang.layer_first", EVEN, streams=[other, compute])
        cache = cache_over(rig.engine, 16)
        tokens = list(range(3 * 16))
        for number in range(6):
            gate = forward.gate("forward")
            writer = (compute, other)[number % 2]
            new = random_bytes(rig.rng, 3, EVEN.page_bytes)
            writer.submit(lambda new=new: rig.side.put([1, 2, 3], new), "forward")  # type: ignore[misc]
            store = cache.store(tokens, [1, 2, 3])
            assert not store.done()
            gate.set()
            store.result(LIMIT_S).require()
            reader = (other, compute)[number % 2]
            gate = forward.gate("forward")
            seen: list[np.ndarray] = []
            reader.submit(lambda seen=seen: seen.append(rig.side.pages([7, 8, 9])), "forward")  # type: ignore[misc]
            before = rig.side.pages([7, 8, 9])
            with cache.match(tokens) as hit:
                load = cache.load(hit, [7, 8, 9], layerwise=True)
            assert not load.done()
            gate.set()
            load.result(LIMIT_S).require()
            assert np.array_equal(seen[0], before) and np.array_equal(rig.side.pages([7, 8, 9]), new)
            cache.flush("host")
            until(lambda: cache.directory.idle, "nothing under way")
            forward.clear("forward")
        cache.close(timeout_s=LIMIT_S)
        rig.close()


def test_a_store_that_waited_for_room_has_what_was_written_when_it_was_called() -> None:
    """It is fenced again when its turn comes."""
    delays = Delays()
    rig = make_rig("sglang.layer_first", EVEN, delays=delays)
    cache = cache_over(rig.engine, 4)
    gate = delays.gate("copy_out")
    rows = random_bytes(rig.rng, 8, EVEN.page_bytes)
    rig.side.put(range(8), rows)
    first = cache.store(list(range(64)), range(4))
    second = cache.store(list(range(100, 164)), range(4, 8))  # room comes when the first one has been answered
    assert not second.done()
    gate.set()
    first.result(LIMIT_S)
    statuses = second.result(LIMIT_S).statuses
    assert statuses == (PageStatus.OK,) * 4
    with cache.match(list(range(100, 164))) as hit:
        cache.load(hit, range(10, 14)).result(LIMIT_S).require()
    assert np.array_equal(rig.side.pages(range(10, 14)), rows[4:])
    cache.close(timeout_s=LIMIT_S)
    rig.close()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sglang.layer_first", "vllm.LBNHC"])
def test_a_busy_gpu(layout: str) -> None:
    """Stores right behind the kernels that write their pages, loads right behind those that read the old ones."""
    from gpu_helpers import spin

    spec = EVEN
    compute = torch.cuda.Stream()
    pool = KVPool.allocate(layout, spec=spec, num_pages=64, device="cuda", streams=[compute])
    views = [pool.view(layer, part, torch.uint8) for layer in range(spec.num_layers) for part in (0, 1)]
    with HostTier(spec, capacity_pages=64, device="cuda") as host, TransferEngine(pool, host) as engine:
        cache = cache_over(engine, 64)
        tokens = list(range(16 * 16))
        source, target = torch.arange(16, device="cuda"), torch.arange(30, 46, device="cuda")
        for _ in range(5):
            want = [torch.randint(0, 256, (16, *view.shape[1:]), dtype=torch.uint8, device="cuda") for view in views]
            torch.cuda.synchronize()
            with torch.cuda.stream(compute):
                spin(compute, 20)
                for view, rows in zip(views, want, strict=True):
                    view[source] = rows
                store = cache.store(tokens, range(16))
            store.result(LIMIT_S).require()
            with torch.cuda.stream(compute):
                for view in views:
                    view[target] = 0
                spin(compute, 20)
                old = [view[target].clone() for view in views]
                with cache.match(tokens) as hit:
                    load = cache.load(hit, range(30, 46), layerwise=True)
                new = []
                for layer in range(spec.num_layers):
                    load.wait_layer(layer)
                    new += [view[target].clone() for view in views[2 * layer : 2 * layer + 2]]
            assert load.verdict(LIMIT_S).verified
            compute.synchronize()
            assert all(not rows.any() for rows in old)
            assert all(torch.equal(rows, seen) for rows, seen in zip(want, new, strict=True))
            cache.flush("host")
            until(lambda: cache.directory.idle, "nothing under way")
        cache.close(timeout_s=LIMIT_S)
