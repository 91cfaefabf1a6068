"""The staging ring: slots in turn, events that guard their re-use, sharing, and no memory for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_helpers import LIMIT_S, Log

from kvtransfer.fifo import FifoStream
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer
from kvtransfer.staging import SLOT_ALIGNMENT, SLOTS, StagingRing

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
    assert StagingRing.create(CPU, 12_288, log) is None
    assert log.fallbacks == [("staging", "no room for a ring of 12,288 bytes on cpu: tried to allocate 12 KiB")]


def test_no_ring_was_asked_for() -> None:
    log = Log()
    assert StagingRing.create(CPU, 0, log) is None and not log.fallbacks
