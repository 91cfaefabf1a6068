"""Order and ownership: fences against the pool's streams, transfers behind transfers, pages that stay owned.

An ordering test has a twin in which the order is taken away; the twin must see wrong bytes, or the test proves nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    EVEN,
    LIMIT_S,
    TINY,
    TOKEN,
    Bytes,
    Guarded,
    Rig,
    fresh,
    make_rig,
    random_bytes,
    slot_bytes,
    staged,
    until,
    write_all_layers,
)

from kvtransfer import engine as engine_module
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream, Rule
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import DeadlineExceeded, OwnershipError, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.tiers.host import HostTier

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
        compute.submit(lambda: rig.side.put([4, 2], new), "write")
        handle = rig.engine.store([4, 2], [0, 1], layerwise=True)
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


# -- a model of everything -------------------------------------------------------------------------


class Model:
    """Random transfers by four engines over one pool, one slab and a second pool, against the same done in order."""

    SIZE = 16

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bytes = fresh()
        chance = random.Random(seed + 1)

        def delay(label: str) -> Rule | None:
            return chance.random() * 0.0005 if chance.random() < 0.1 else None

        self.compute = FifoStream("compute", Delays(delay))
        self.side = Guarded(self.bytes, Layout.named("sglang.layer_first", TINY, self.SIZE), streams=[self.compute])
        self.other = Guarded(self.bytes, Layout.named("vllm.LBHNC", TINY, self.SIZE), name="other")
        self.host = HostTier(TINY, capacity_pages=self.SIZE, pin=False, huge_pages=False, threads=1)
        self.engines = [
            TransferEngine(self.side.pool, self.host, delays=Delays(delay), **kw) for kw in ({}, {}, staged())
        ]
        self.engines.append(TransferEngine(self.other.pool, self.host, delays=Delays(delay), **staged()))
        self.pages, self.others = self.side.pages(range(self.SIZE)), self.other.pages(range(self.SIZE))
        self.slots = slot_bytes(self.host, range(self.SIZE))
        self.known = np.zeros(self.SIZE, dtype=bool)  # slots with digests
        self.running: list[tuple[TransferHandle, set[int]]] = []  # with the pages of the first pool that each touches
        self.loads: list[tuple[TransferHandle, tuple[int, ...]]] = []
        self.reads: list[tuple[Bytes, Bytes]] = []

    def ids(self, count: int) -> list[int]:
        return self.rng.sample(range(self.SIZE), count)

    def step(self) -> None:
        kind = self.rng.choice(["store", "store", "load", "load", "copy", "write", "read", "layers"])
        count = self.rng.randint(1, 4)
        if kind in ("write", "read"):
            self.forward(kind, self.ids(count))
            return
        engine = self.rng.choice(self.engines)
        mine, model = (self.others, self.others) if engine is self.engines[-1] else (self.pages, self.pages)
        pages, slots = self.ids(count), self.ids(count)
        touched = set() if model is self.others else set(pages)
        if kind == "copy":
            engine, into = self.rng.choice(self.engines[:3]), self.ids(count)
            handle = engine.copy(pages, self.other.pool, into)
            self.others[into] = self.pages[pages]
            touched = set(pages)
        elif kind == "load":
            handle = engine.load(slots, pages, layerwise=self.rng.random() < 0.3)
            mine[pages] = self.slots[slots]
            self.loads.append((handle, tuple(np.flatnonzero(~self.known[slots]).tolist())))
        else:
            handle = engine.store(pages, slots, layerwise=kind == "layers")
            self.slots[slots] = mine[pages]
            self.known[slots] = True
            if kind == "layers":
                stream = self.compute if model is self.pages and self.rng.random() < 0.5 else None
                if model is self.pages and stream is None:
                    self.compute.synchronize(LIMIT_S)  # "this thread has written it" must be true
                for layer in self.rng.sample(range(3), 3):
                    handle.layer_written(layer, stream)
        self.running.append((handle, touched))

    def forward(self, kind: str, pages: list[int]) -> None:
        """Work of the model on the compute stream: it waits for the transfers of its pages."""
        for handle, touched in self.running:
            if touched & set(pages) and not handle.done():
                handle.wait_all(self.compute)
        if kind == "write":
            rows = random_bytes(self.bytes, len(pages), TINY.page_bytes)
            self.compute.submit(lambda: self.side.put(pages, rows), "compute")
            self.pages[pages] = rows
        else:
            want = self.pages[pages].copy()
            self.compute.submit(lambda: self.reads.append((want, self.side.pages(pages))), "compute")

    def check(self) -> None:
        for handle, _ in self.running:
            handle.result(LIMIT_S)
        self.compute.synchronize(LIMIT_S)
        for handle, unknown in self.loads:
            assert handle.verdict(0).unverified_pages == unknown
        assert np.array_equal(self.side.pages(range(self.SIZE)), self.pages)
        assert np.array_equal(self.other.pages(range(self.SIZE)), self.others)
        assert np.array_equal(slot_bytes(self.host, range(self.SIZE)), self.slots)
        assert all(np.array_equal(want, seen) for want, seen in self.reads)
        self.running.clear()
        self.loads.clear()
        self.reads.clear()

    def run(self, operations: int) -> None:
        try:
            for number in range(operations):
                self.step()
                if number % 100 == 99:
                    self.check()
            self.check()
        finally:
            for engine in self.engines:
                engine.close(timeout_s=LIMIT_S)
            self.compute.close()
        assert not self.side.pool.ledger.any_busy() and not self.host.ledger.any_busy()
        self.host.close()


def test_two_thousand_random_transfers_give_what_they_give_in_order() -> None:
    Model(random.SystemRandom().randrange(2**32)).run(2_000)


@pytest.mark.long
def test_ten_thousand_random_transfers_give_what_they_give_in_order() -> None:
    for seed in range(3):
        Model(seed).run(10_000)


def test_the_model_sees_transfers_that_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "claim_all", lambda wanted, owner: [])
    with pytest.raises((AssertionError, TransferError)):  # other bytes, or digests that do not fit them
        for seed in range(20):
            Model(seed).run(300)


def test_engines_that_wait_for_each_other_both_ways_never_lock_up() -> None:
    rig = make_rig("page_first", TOKEN, pages=8, slots=8)
    engines = [TransferEngine(rig.pool, rig.host, **kw) for kw in ({}, staged())]
    handles: list[TransferHandle] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            engine = rng.choice(engines)
            pages, slots = rng.sample(range(8), 3), rng.sample(range(8), 3)
            handles.append(engine.load(slots, pages) if rng.random() < 0.5 else engine.store(pages, slots))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    for handle in handles:
        assert handle.result(LIMIT_S).pages == 3
    for engine in engines:
        engine.close(timeout_s=LIMIT_S)
    assert len(handles) == 400 and not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()


# -- ownership -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", PATHS)
def test_pages_and_slots_of_a_running_transfer_can_not_be_freed(engine: dict[str, Any]) -> None:
    gate = threading.Event()
    rig = make_rig(delays=Delays(lambda label: gate), **engine)
    pages, slots = rig.pool.allocate_pages(16), rig.host.allocate(16)
    handle = rig.engine.store(pages[:3], slots[5:8])
    other = rig.engine.load(slots[9:10], pages[7:8])
    with pytest.raises(OwnershipError, match=rf"pool pages that no transfer owns, got \[{pages[2]}\] still in flight"):
        rig.pool.free_pages(pages[2:7])
    with pytest.raises(OwnershipError, match=rf"host slots that no transfer owns, got \[{slots[5]}\] still in flight"):
        rig.host.free(slots[:6])
    with pytest.raises(OwnershipError, match=rf"got \[{slots[9]}\] still"):
        rig.host.free(slots[9:10], wait_s=0.01)
    rig.pool.free_pages(pages[8:])
    rig.host.free(slots[10:])
    freed: list[str] = []

    def free() -> None:
        rig.pool.free_pages(pages[:8], wait_s=LIMIT_S)
        freed.append("pages")
        rig.host.free(slots[:10], wait_s=LIMIT_S)
        freed.append("slots")

    waiter = threading.Thread(target=free)
    waiter.start()
    assert not freed
    gate.set()
    waiter.join(LIMIT_S)
    assert freed == ["pages", "slots"] and handle.done() and other.done()
    rig.close()


def test_a_page_that_is_wanted_by_somebody_else_keeps_its_bytes_until_the_store_has_them() -> None:
    """The owner asks to free and reuse the pages while their store is held back; the slot must get the old bytes."""
    gate = threading.Event()
    rig = make_rig(delays=Delays(lambda label: gate), **staged())
    pages = rig.pool.allocate_pages(16)
    old = rig.side.pages(pages[:4])
    rig.engine.store(pages[:4], [0, 1, 2, 3])

    def preempt() -> None:
        rig.pool.free_pages(pages[:4], wait_s=LIMIT_S)
        again = rig.pool.allocate_pages(4)
        rig.side.put(again, random_bytes(rig.rng, 4, TINY.page_bytes))

    thread = threading.Thread(target=preempt)
    thread.start()
    gate.set()
    thread.join(LIMIT_S)
    assert np.array_equal(rig.slots([0, 1, 2, 3]), old)
    assert not np.array_equal(rig.side.pages(pages[:4]), old)
    rig.close()


def test_owners_with_an_allocator_of_their_own_can_ask() -> None:
    gate = threading.Event()
    rig = make_rig(delays=Delays(lambda label: gate))
    handle = rig.engine.load([2], [11])
    with pytest.raises(OwnershipError, match=r"got \[11\]"):
        rig.pool.require_free([10, 11])
    rig.pool.require_free([10, 12])
    assert rig.pool.ledger.busy(np.array([10, 11])).tolist() == [False, True]
    gate.set()
    handle.result(LIMIT_S)
    rig.pool.require_free([11])
    rig.close()


def test_a_slab_is_not_closed_under_a_transfer() -> None:
    gate = threading.Event()
    rig = make_rig(delays=Delays(lambda label: gate))
    rig.engine.load([2], [11])
    with pytest.raises(OwnershipError, match=r"got \[2\]"):
        rig.host.close(wait_s=0.01)
    gate.set()
    rig.close()
