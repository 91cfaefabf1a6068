"""Order and ownership: fences against the pool's streams, transfers behind transfers, pages that stay owned.

An ordering test has a twin in which the order is taken away; the twin must see wrong bytes, or the test proves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    EVEN,
    LIMIT_S,
    TINY,
    Bytes,
    Guarded,
    Rig,
    make_rig,
    random_bytes,
    staged,
    until,
    write_all_layers,
)

from kvtransfer import engine as engine_module
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import DeadlineExceeded
from kvtransfer.kernels.layout import Layout

PATHS = [pytest.param({"path": "cpu"}, id="cpu"), pytest.param(staged(), id="staged")]


def without_fences(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    monkeypatch.setattr(rig.engine, "_fences", lambda *args, **kwargs: ([], None))


# -- fences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("engine", PATHS)
def test_a_store_waits_for_the_streams_that_write_its_pages(
    engine: dict[str, Any], fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Delays()
    with FifoStream("compute", forward) as compute, FifoStream("other", forward) as other:
        rig = make_rig("sglang.layer_first", EVEN, streams=[other, compute], **engine)
        if not fenced:
            without_fences(monkeypatch, rig)
        for number in range(10):
            pages, slots = rig.rng.permutation(16)[:3], rig.rng.permutation(16)[:3]
            old, new = rig.side.pages(pages), random_bytes(rig.rng, 3, EVEN.page_bytes)
            gate = forward.gate("write")
            writer = (compute, other)[number % 2]  # whichever of the declared streams it is
            writer.submit(lambda pages=pages, new=new: rig.side.put(pages, new), "write")  # type: ignore[misc]
            handle = rig.engine.store(pages, slots)
            if fenced:
                until(lambda handle=handle: handle.fully_submitted)  # type: ignore[misc]
                assert not handle.pages_done().any()
                gate.set()
                handle.result(LIMIT_S)
                assert np.array_equal(rig.slots(slots), new)
            else:
                handle.result(LIMIT_S)
                gate.set()
                writer.synchronize(LIMIT_S)
                assert np.array_equal(rig.slots(slots), old) and not np.array_equal(old, new)
        rig.close()


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("engine", PATHS)
def test_a_load_waits_for_the_work_that_still_uses_its_pages(
    engine: dict[str, Any], fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward reads the pages and blanks them; only then may the restored prefix land in them."""
    forward = Delays()
    with FifoStream("compute", forward) as compute:
        rig = make_rig("vllm.LBHNC", EVEN, streams=[compute], **engine)
        if not fenced:
            without_fences(monkeypatch, rig)
        for _ in range(10):
            pages, slots = rig.rng.permutation(16)[:3], rig.rng.permutation(16)[:3]
            new, old = rig.fill_slots(slots), rig.side.pages(pages)
            seen: list[Bytes] = []

            def use(pages: Any = pages, seen: list[Bytes] = seen) -> None:
                seen.append(rig.side.pages(pages))
                rig.side.put(pages, np.zeros((3, EVEN.page_bytes), dtype=np.uint8))

            gate = forward.gate("read")
            compute.submit(use, "read")
            handle = rig.engine.load(slots, pages, layerwise=bool(rig.rng.integers(2)))
            if fenced:
                until(lambda handle=handle: handle.fully_submitted)  # type: ignore[misc]
                assert not handle.pages_done().any()
                gate.set()
                handle.result(LIMIT_S)
                assert np.array_equal(seen[0], old) and np.array_equal(rig.side.pages(pages), new)
            else:
                handle.result(LIMIT_S)
                gate.set()
                compute.synchronize(LIMIT_S)
                assert np.array_equal(seen[0], new), "the forward read bytes of another request"
                assert not rig.side.pages(pages).any(), "and blanked what was loaded"
        rig.close()


@pytest.mark.parametrize("said", [True, False])
def test_a_layer_leaves_after_the_stream_that_writes_it(said: bool) -> None:
    forward = Delays()
    gate = forward.gate("write")
    with FifoStream("compute", forward) as compute:
        rig = make_rig("sglang.layer_first", TINY, streams=[compute], **staged())
        old, new = rig.side.pages([4, 2]), random_bytes(rig.rng, 2, TINY.page_bytes)
        handle = rig.engine.store([4, 2], [0, 1], layerwise=True)  # before the write: its own fences can't cover it
        compute.submit(lambda: rig.side.put([4, 2], new), "write")
        write_all_layers(handle, compute if said else None)
        if said:
            assert not handle.pages_done().any()
            gate.set()
            handle.result(LIMIT_S)
        else:  # "this thread has written it": then nothing holds the copy back
            handle.result(LIMIT_S)
            gate.set()
        assert np.array_equal(rig.slots([0, 1]), new if said else old)
        rig.close()


def test_a_copy_between_pools_is_fenced_on_both_sides() -> None:
    forward = Delays()
    with FifoStream("a", forward) as a, FifoStream("b", forward) as b:
        rig = make_rig(streams=[a])
        other = Guarded(rig.rng, Layout.named("vllm.LBHNC", TINY, 8), streams=[b])
        new, seen = random_bytes(rig.rng, 2, TINY.page_bytes), []
        held = other.pages([5, 6])
        write, read = forward.gate("write"), forward.gate("read")
        a.submit(lambda: rig.side.put([1, 2], new), "write")
        b.submit(lambda: seen.append(other.pages([5, 6])), "read")
        handle = rig.engine.copy([1, 2], other.pool, [5, 6])
        until(lambda: handle.fully_submitted)
        for gate in (write, read):
            assert not handle.pages_done().any()
            gate.set()
        handle.result(LIMIT_S)
        assert np.array_equal(other.pages([5, 6]), new) and np.array_equal(seen[0], held)
        rig.close()


def test_what_is_given_to_a_stream_after_the_call_is_not_waited_for() -> None:
    forward = Delays()
    gate = forward.gate("later")
    with FifoStream("compute", forward) as compute:
        rig = make_rig(streams=[compute])
        rig.side.pages([1])
        handle = rig.engine.store([1], [1])
        compute.submit(lambda: None, "later")
        handle.result(LIMIT_S)
        gate.set()
        rig.close()


def test_a_consumer_stream_waits_and_its_thread_does_not() -> None:
    with FifoStream("compute") as compute:
        rig = make_rig(streams=[compute])
        rows, seen = rig.fill_slots([3]), []
        gate = rig.delays.gate("copy_in")
        handle = rig.engine.load([3], [8], layerwise=True)
        for layer in range(TINY.num_layers):
            handle.wait_layer(layer, compute)
        compute.submit(lambda: seen.append(rig.side.pages([8])))
        assert not compute.query()
        gate.set()
        compute.synchronize(LIMIT_S)
        assert np.array_equal(seen[0], rows)
        rig.close()


# -- transfers behind transfers --------------------------------------------------------------------

# Two transfers that touch a slot or a page: the first, the second.
Call = Callable[[TransferEngine], TransferHandle]
PAIRS: dict[str, tuple[Call, Call]] = {
    "store, store: one slot": (lambda e: e.store([1], [4]), lambda e: e.store([2], [4])),
    "store, load: one slot": (lambda e: e.store([1], [4]), lambda e: e.load([4], [2])),
    "load, store: one slot": (lambda e: e.load([4], [1]), lambda e: e.store([2], [4])),
    "load, load: one page": (lambda e: e.load([4], [1]), lambda e: e.load([5], [1])),
    "load, store: one page": (lambda e: e.load([4], [1]), lambda e: e.store([1], [5])),
    "store, load: one page": (lambda e: e.store([1], [4]), lambda e: e.load([5], [1])),
    "copy, load: one page": (lambda e: e.copy([1], e.pool, [2]), lambda e: e.load([4], [1])),
    "store, copy: one page": (lambda e: e.store([1], [4]), lambda e: e.copy([2], e.pool, [1])),
    "copy, store: one page": (lambda e: e.copy([1], e.pool, [2]), lambda e: e.store([2], [4])),
    "load, load: one slot and page": (lambda e: e.load([4, 5], [1, 2]), lambda e: e.load([5, 4], [1, 2])),
}


class World:
    """A pool and a slab with two engines over them; the first one's lanes are shut."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.gate = threading.Event()
        self.rig = make_rig("sglang.layer_first", TINY, delays=Delays(lambda label: self.gate), **first)
        self.second = TransferEngine(self.rig.pool, self.rig.host, **second)

    def state(self) -> tuple[Bytes, Bytes]:
        return self.rig.side.pages(range(16)), self.rig.slots(range(16))

    def close(self) -> None:
        self.gate.set()
        self.second.close(timeout_s=LIMIT_S)
        self.rig.close()


def in_order(world: World, pair: tuple[Call, Call]) -> tuple[Bytes, Bytes]:
    """What both give one after the other, in a twin world with the same bytes."""
    twin = World({"path": "cpu"}, {"path": "cpu"})
    twin.gate.set()
    twin.rig.side.put(range(16), world.rig.side.pages(range(16)))
    twin.rig.host.payload.copy_(world.rig.host.payload)
    for call in pair:
        call(twin.rig.engine).result(LIMIT_S)
    state = twin.state()
    twin.close()
    return state


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("second", PATHS)
@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("pair", PAIRS)
def test_two_transfers_of_two_engines_on_one_place_run_in_order(
    pair: str, first: dict[str, Any], second: dict[str, Any], ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(first, second)
    want = in_order(world, PAIRS[pair])
    if not ordered:
        monkeypatch.setattr(engine_module, "claim_all", lambda wanted, owner: [])
    a = PAIRS[pair][0](world.rig.engine)
    b = PAIRS[pair][1](world.second)
    if ordered:
        with pytest.raises(DeadlineExceeded):
            b.result(0.01)
        world.gate.set()
        b.result(LIMIT_S)
        assert a.done(), "the earlier one is acknowledged first"
    else:
        b.result(LIMIT_S)  # nothing holds it
        world.gate.set()
        a.result(LIMIT_S)
    have = world.state()
    same = all(np.array_equal(x, y) for x, y in zip(want, have, strict=True))
    assert same == ordered
    world.close()


@pytest.mark.parametrize("engine", PATHS)
def test_transfers_of_one_engine_on_one_place_run_in_order(engine: dict[str, Any]) -> None:
    """The lanes of one engine are different queues: in and out must be ordered too."""
    for pair in PAIRS.values():
        world = World(engine, {})
        want = in_order(world, pair)
        handles = [call(world.rig.engine) for call in pair]
        world.gate.set()
        for handle in handles:
            handle.result(LIMIT_S)
        assert all(np.array_equal(x, y) for x, y in zip(want, world.state(), strict=True))
        world.close()


def test_transfers_that_share_nothing_do_not_wait_for_each_other() -> None:
    world = World({"path": "cpu"}, {"path": "cpu"})
    first = world.rig.engine.store([1], [4])
    world.second.store([2], [5]).result(LIMIT_S)
    assert not first.done()
    world.close()


def test_a_load_of_a_slot_under_a_layerwise_store_waits_for_it_and_others_do_not_wait_with_it() -> None:
    rig = make_rig()
    want, other = rig.side.pages([1]), rig.fill_slots([9])
    store = rig.engine.store([1], [4], layerwise=True)
    store.layer_written(2)
    load = rig.engine.load([4], [2])
    rig.engine.load([9], [3]).result(LIMIT_S)  # unrelated: must not be stuck in the queue behind it
    assert np.array_equal(rig.side.pages([3]), other)
    assert not load.done() and not load.fully_submitted
    store.layer_written(0)
    store.layer_written(1)
    load.result(LIMIT_S)
    assert np.array_equal(rig.side.pages([2]), want) and load.verdict(0).unverified_pages == ()
    rig.close()


def test_a_layerwise_store_is_ordered_behind_what_is_still_queued() -> None:
    """Its layers are submitted by the caller, who must not overtake the engine's thread."""
    rig = make_rig()
    blocker = rig.engine.store([0], [5], layerwise=True)  # keeps the load below in the queue
    wanted = rig.side.pages([0])
    load = rig.engine.load([5], [7])
    store = rig.engine.store([7], [9], layerwise=True)
    writer = threading.Thread(target=write_all_layers, args=(store,))
    writer.start()
    assert not store.fully_submitted and not load.fully_submitted
    write_all_layers(blocker)
    writer.join(LIMIT_S)
    store.result(LIMIT_S)
    assert np.array_equal(rig.slots([9]), wanted) and load.done()
    rig.close()


@pytest.mark.parametrize("stop", ["cancel", "deadline"])
def test_a_layer_that_waits_for_a_queued_transfer_gives_up_with_its_store(stop: str) -> None:
    rig = make_rig()
    blocker = rig.engine.store([0], [5], layerwise=True)
    rig.engine.load([5], [7])
    store = rig.engine.store([7], [9], layerwise=True, deadline_s=0.05 if stop == "deadline" else 30.0)
    before = rig.slots([9])
    writer = threading.Thread(target=write_all_layers, args=(store,))
    writer.start()
    if stop == "cancel":
        store.cancel()
    writer.join(LIMIT_S)
    assert not writer.is_alive()
    write_all_layers(blocker)
    until(store.done)
    assert np.array_equal(rig.slots([9]), before) and not store.states().any()
    rig.close()


def test_a_transfer_behind_a_cancelled_one_still_waits_for_the_one_before() -> None:
    world = World({"path": "cpu"}, {"path": "cpu"})
    want = world.rig.side.pages([1])
    first = world.rig.engine.store([1], [4])
    until(lambda: first.fully_submitted)
    middle = world.second.store([2], [4], layerwise=True)
    assert middle.cancel()
    last = world.second.load([4], [3])
    with pytest.raises(DeadlineExceeded):
        last.result(0.01)
    world.gate.set()
    last.result(LIMIT_S)
    assert np.array_equal(world.rig.side.pages([3]), want)
    world.close()
