"""The staging ring: slots in turn, events that guard their re-use, sharing, and no memory for it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, RING_SLOTS, TINY, WIDE, Log, make_rig, small_ring, until

from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded
from kvtransfer.kernels.events import Observer
from kvtransfer.staging import SLOT_ALIGNMENT, SLOTS, RingSlot, StagingRing

CPU = torch.device("cpu")


def test_sizes_are_cut_to_whole_slots() -> None:
    ring = StagingRing(CPU, SLOTS * (2 * SLOT_ALIGNMENT) + 4095)
    assert ring.slot_bytes == 2 * SLOT_ALIGNMENT and ring.memory.numel() == SLOTS * 2 * SLOT_ALIGNMENT
    slots = [ring.take() for _ in range(SLOTS)]
    assert [s.address - ring.memory.data_ptr() for s in slots] == [i * ring.slot_bytes for i in range(SLOTS)]
    assert all(s.memory.numel() == ring.slot_bytes for s in slots)


@pytest.mark.parametrize("staging_bytes", [-1, 1, SLOTS * SLOT_ALIGNMENT - 1])
def test_too_little_is_refused_with_numbers(staging_bytes: int) -> None:
    with pytest.raises(
        ConfigError, match=f"staging_bytes: expected at least {SLOTS * SLOT_ALIGNMENT}, got {staging_bytes}"
    ):
        StagingRing.create(CPU, staging_bytes, Observer())


def test_slots_go_round_and_carry_the_event_of_their_last_user() -> None:
    ring = StagingRing(CPU, SLOTS * SLOT_ALIGNMENT)
    assert ring.next_is_free()
    gate = threading.Event()
    with FifoStream("lane") as lane:
        lane.submit(lambda: gate.wait(LIMIT_S))
        event = lane.record()
        first = ring.take()
        assert first.free is None
        ring.give(first, event)
        for index in range(1, SLOTS):
            other = ring.take()
            assert other.index == index
            ring.give(other, None)  # not used after all
        assert not ring.next_is_free(), "the next slot is the first one, and its user is not done"
        gate.set()
        assert event.synchronize(LIMIT_S) and ring.next_is_free()
        again = ring.take()
        assert again is first and again.free is event
        assert ring.next_is_free()
        ring.give(again, None)
        assert again.free is event  # unused: the old event stands


def test_a_taken_slot_is_waited_for() -> None:
    ring = StagingRing(CPU, SLOTS * SLOT_ALIGNMENT)
    held = [ring.take() for _ in range(SLOTS)]
    assert not ring.next_is_free()
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(ring.take().index))
    waiter.start()
    ring.give(held[1], None)  # out of turn: it is slot 0 that is due
    ring.give(held[0], None)
    waiter.join(LIMIT_S)
    assert got == [0]


def test_no_memory_means_no_ring_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 12 KiB")

    log = Log()
    monkeypatch.setattr(torch, "empty", refuse)
    assert StagingRing.create(CPU, SLOTS * SLOT_ALIGNMENT, log) is None
    assert log.fallbacks == [
        ("staging", f"no room for a ring of {SLOTS * SLOT_ALIGNMENT:,} bytes on cpu: tried to allocate 12 KiB")
    ]


def test_no_ring_was_asked_for() -> None:
    log = Log()
    assert StagingRing.create(CPU, 0, log) is None and not log.fallbacks


def test_an_engine_without_a_ring_says_so_and_refuses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StagingRing, device: torch.device, staging_bytes: int) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    log = Log()
    with monkeypatch.context() as patch:
        patch.setattr(StagingRing, "__init__", refuse)
        rig = make_rig(path="staged", staging_bytes=SLOTS * SLOT_ALIGNMENT, observer=log)
    assert [what for what, _ in log.fallbacks] == ["staging"]
    with pytest.raises(ConfigError, match="path 'staged' can't carry this load: there is no staging ring"):
        rig.engine.load([1], [2])
    rows = rig.slots([1])
    rig.engine.load([1], [2], path="auto").result(LIMIT_S)
    assert np.array_equal(rig.side.pages([2]), rows)
    rig.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_slot_is_not_filled_again_before_it_was_emptied(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten chunks through three slots while the copies out of the ring are held back."""
    if not guarded:

        def forget(self: StagingRing, slot: RingSlot, free: object) -> None:
            slot.taken, slot.free = False, None

        monkeypatch.setattr(StagingRing, "give", forget)
    delays = Delays()
    gate = delays.gate("copy_out")
    rig = make_rig("sglang.layer_first", EVEN, delays=delays, path="staged", staging_bytes=small_ring())
    want = rig.side.pages(range(10))
    handle = rig.engine.store(range(10), range(10))
    assert len(handle.plan.chunks) == 10
    if guarded:
        until(lambda: len(handle._submitted) == RING_SLOTS)
    else:
        until(lambda: handle.fully_submitted)
        gather = rig.engine._shop.lanes.record("gather")
        until(gather.query)
    gate.set()
    handle.result(LIMIT_S)
    assert np.array_equal(rig.slots(range(10)), want) == guarded
    rig.close()


def test_engines_share_a_ring_and_nobody_starves() -> None:
    ring = small_ring()
    gate = threading.Event()
    held = make_rig("sglang.layer_first", EVEN, delays=Delays({"copy_out": gate}), path="staged", staging_bytes=ring)
    other = make_rig("vllm.LBNHC", WIDE, path="staged", staging_bytes=ring)
    kept = held.side.pages(range(12))
    store = held.engine.store(range(12), range(12))
    until(lambda: len(store._submitted) == RING_SLOTS)  # the ring is full of a transfer that does not move
    rows = other.slots([3, 4])
    load = other.engine.load([3, 4], [1, 2], layerwise=True)
    with pytest.raises(DeadlineExceeded):
        load.result(0.01)
    gate.set()
    load.result(LIMIT_S)
    store.result(LIMIT_S)
    assert np.array_equal(other.side.pages([1, 2]), rows) and np.array_equal(held.slots(range(12)), kept)
    other.close()
    held.close()


def test_shared_by_threads_that_all_use_it_at_once() -> None:
    ring = small_ring()
    rigs = [make_rig(n, s, path="staged", staging_bytes=ring) for n, s in (("page_first", WIDE), ("vllm.LBHNC", TINY))]
    wants = [rig.slots(range(16)) for rig in rigs]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rig, want = rigs[number], wants[number]
        try:
            for _ in range(5):
                rig.engine.load(range(16), range(15, -1, -1)).result(LIMIT_S)
                assert np.array_equal(rig.side.pages(range(15, -1, -1)), want)
                rig.engine.store(range(15, -1, -1), range(16), layerwise=False).result(LIMIT_S)
                assert np.array_equal(rig.slots(range(16)), want)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not errors
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 12])
def test_slots_that_are_held_leave_one_to_who_gives_it_back_at_once(slots: int) -> None:
    ring = StagingRing(CPU, slots * SLOT_ALIGNMENT, slots)
    held: list[list[RingSlot]] = []
    while ring.share and (some := ring.try_take(ring.share)) is not None:
        assert len(some) in (ring.share, ring.share - 1)
        held.append(some)
    assert len(held) == min(2, slots - 1), "both directions have their share"
    indices = {s.index for some in held for s in some}
    assert len(indices) == sum(len(some) for some in held) < slots
    for _ in range(3):
        slot = ring.take()  # would wait for ever
        assert slot.index not in indices and ring.try_take(1) is None
        ring.give(slot, None)
    for some in held:
        for slot in some:
            ring.give(slot, None)
    assert (ring.share == 0) or ring.try_take(ring.share) is not None
