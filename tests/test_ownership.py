"""Pages and slots under a transfer stay owned by it until it is acknowledged."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    LIMIT_S,
    TINY,
    make_rig,
    random_bytes,
    staged,
)

from kvtransfer.fifo import Delays
from kvtransfer.kernels.errors import OwnershipError

PATHS = [pytest.param({"path": "cpu"}, id="cpu"), pytest.param(staged(), id="staged")]


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


@pytest.mark.parametrize("direction", ["load", "store"])
def test_what_a_move_between_tiers_owns_is_refused_and_nothing_is_claimed(direction: str) -> None:
    """A move is not a transfer of an engine: no stream can wait for it."""
    rig, move = make_rig(), object()
    rig.host.ledger.claim(np.array([2, 5]), move)
    before = rig.side.pages(range(4)), rig.slots(range(8))
    with pytest.raises(OwnershipError, match=f"{direction}: .* under a move between tiers; wait for its handle first"):
        if direction == "load":
            rig.engine.load([1, 2, 3], [0, 1, 2])
        else:
            rig.engine.store([0, 1, 2], [4, 5, 6])
    assert not rig.pool.ledger.any_busy()
    assert np.flatnonzero(rig.host.ledger.busy(np.arange(8))).tolist() == [2, 5]
    assert np.array_equal(rig.side.pages(range(4)), before[0]) and np.array_equal(rig.slots(range(8)), before[1])
    rig.host.ledger.release(move)
    rig.engine.load([1, 2, 3], [0, 1, 2]).result(LIMIT_S)
    rig.close()
