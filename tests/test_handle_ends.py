"""Transfers that do not end well: cancelled, too late, or broken. What is left is said exactly, others go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    LIMIT_S,
    RING_SLOTS,
    TINY,
    WIDE,
    Steps,
    blocked_handle,
    break_step,
    gated,
    make_rig,
    random_bytes,
    small_ring,
    staged,
    until,
    write_all_layers,
)

from kvtransfer import host_transfer
from kvtransfer.fifo import Delays
from kvtransfer.handles import PageState
from kvtransfer.host_transfer import HostTransfer
from kvtransfer.kernels.errors import (
    DeadlineExceeded,
    TransferCancelled,
    TransferError,
)
from kvtransfer.lanes import Event
from kvtransfer.plan import Chunk
from kvtransfer.tiers.record import NOTHING_STORED

UNTOUCHED, DONE, INVALID = PageState.UNTOUCHED, PageState.DONE, PageState.INVALID


# -- cancel ----------------------------------------------------------------------------------------


def test_a_transfer_that_is_cancelled_before_it_starts_touches_nothing() -> None:
    rig = make_rig()
    before = rig.side.snapshot()
    store, load = blocked_handle(rig)
    assert load.cancel() and not load.cancel(), "only the first call kept anything back"
    assert rig.pool.ledger.busy(np.array([14])).all(), "the pages stay owned until the end"
    store.cancel()
    with pytest.raises(TransferCancelled, match="the transfer was cancelled") as got:
        load.result(LIMIT_S)
    assert got.value.pages == (0,) and load.states().tolist() == [UNTOUCHED]
    with pytest.raises(TransferCancelled):
        load.verdict(0)
    until(store.done)
    rig.side.expect(before, np.empty(0, dtype=np.int64), random_bytes(rig.rng, 0, TINY.page_bytes))
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()


@pytest.mark.parametrize(("nth", "kinds"), [(4, {INVALID, UNTOUCHED}), (72, {DONE, INVALID})])
def test_a_cancelled_transfer_says_exactly_what_became_of_each_page(nth: int, kinds: set[PageState]) -> None:
    """Sixteen pages in six boxes each, through a ring of six slots: cancelled in the first box, and in the last."""
    steps = Steps()
    gate = steps.gate("scatter", nth)
    rig = make_rig("sglang.layer_first", WIDE, delays=Delays(steps), **staged())
    slots, pages = rig.rng.permutation(16), rig.rng.permutation(16)
    want, before = rig.slots(slots), rig.side.pages(pages)
    handle = rig.engine.load(slots, pages)
    until(lambda: steps.counts["scatter"] == nth + 1)  # at the gate; as many more as there are slots may be under way
    assert handle.cancel()
    gate.set()
    with pytest.raises(TransferCancelled) as got:
        handle.result(LIMIT_S)
    chunks, ran = handle.plan.chunks, steps.counts["scatter"]
    assert nth < ran <= nth + RING_SLOTS < len(chunks)
    landed, total = np.zeros(16, dtype=int), np.zeros(16, dtype=int)
    for number, chunk in enumerate(chunks):
        total[chunk.first : chunk.first + chunk.count] += 1
        landed[chunk.first : chunk.first + chunk.count] += number < ran
    states = handle.states()
    assert states.tolist() == np.where(landed == total, DONE, np.where(landed > 0, INVALID, UNTOUCHED)).tolist()
    assert set(states.tolist()) == kinds
    assert set(np.flatnonzero(states != DONE).tolist()) <= set(got.value.pages)
    now = rig.side.pages(pages)
    assert np.array_equal(now[states == DONE], want[states == DONE])
    assert np.array_equal(now[states == UNTOUCHED], before[states == UNTOUCHED])
    rig.close()


def test_pages_that_landed_before_a_cancel_are_done_and_the_rest_untouched() -> None:
    steps = Steps()
    gate = steps.gate("copy_out", 2)
    rig = make_rig("page_first", WIDE, delays=Delays(steps), path="staged", staging_bytes=small_ring(20_480))
    pages, slots = np.arange(10), np.arange(10)
    old, new = rig.slots(slots), rig.side.pages(pages)
    handle = rig.engine.store(pages, slots)
    until(lambda: steps.counts["copy_out"] == 3)
    assert handle.cancel()
    gate.set()
    with pytest.raises(TransferCancelled) as got:
        handle.result(LIMIT_S)
    states, ran = handle.states(), steps.counts["copy_out"]
    assert 3 <= ran < 10
    assert states.tolist() == [DONE] * ran + [UNTOUCHED] * (10 - ran)
    assert set(got.value.pages) >= set(range(ran, 10))
    assert np.array_equal(rig.slots(slots), np.concatenate((new[:ran], old[ran:])))
    assert not rig.host.ledger.any_busy()
    rig.close()


def test_cancelling_a_transfer_that_ended_or_is_all_under_way_is_too_late() -> None:
    rig, gate = gated("copy_in")
    handle = rig.engine.load([1], [1])
    until(lambda: handle.fully_submitted)
    assert not handle.cancel()
    gate.set()
    handle.result(LIMIT_S)
    assert not handle.cancel() and handle.states().tolist() == [DONE]
    rig.close()


def test_a_cancel_that_said_yes_always_ends_in_that_error() -> None:
    """However the calls of the two threads interleave."""
    rig = make_rig(**staged())
    for number in range(200):
        handle = rig.engine.load([1, 2, 3], [4, 5, 6], layerwise=bool(number % 2))
        if number % 3:
            handle.wait_layer(number % 3)
        said = handle.cancel()
        try:
            handle.result(LIMIT_S)
            assert not said
        except TransferCancelled:
            assert said
    rig.close()


def test_a_cancel_while_the_last_chunk_is_on_its_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    real = HostTransfer.move

    def move(self: HostTransfer, chunk: Chunk) -> Event:
        said.append(self.handle.cancel())
        return real(self, chunk)

    monkeypatch.setattr(HostTransfer, "move", move)
    rig = make_rig()
    want = rig.slots([1, 2])
    handle = rig.engine.load([1, 2], [3, 4])
    with pytest.raises(TransferCancelled) as got:
        handle.result(LIMIT_S)
    assert said == [True] and got.value.pages == () and handle.states().tolist() == [DONE, DONE]
    assert np.array_equal(rig.side.pages([3, 4]), want), "it landed, and that is what the states say"
    rig.close()


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
def test_a_transfer_that_is_stuck_fails_at_its_deadline_and_keeps_its_pages(engine: dict[str, Any]) -> None:
    rig, gate = gated("copy_in", **engine)
    want = rig.slots([4])
    handle = rig.engine.load([4], [5], deadline_s=0.4)
    until(lambda: handle.fully_submitted)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.4 s"):
            handle.result()
    with pytest.raises(DeadlineExceeded):
        handle.wait_layer(0)
    with pytest.raises(DeadlineExceeded):
        handle.verdict()
    assert not handle.done() and rig.pool.ledger.busy(np.array([5])).all()
    seen: list[bool] = []
    handle.add_done_callback(lambda h: seen.append(h.failed))
    gate.set()
    until(lambda: bool(seen))
    assert handle.done() and handle.states().tolist() == [DONE], "it landed after all"
    assert np.array_equal(rig.side.pages([5]), want)
    with pytest.raises(DeadlineExceeded):  # and is late all the same
        handle.result()
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()


def test_a_transfer_in_the_queue_fails_at_its_own_deadline() -> None:
    rig = make_rig()
    store = rig.engine.store([0], [5], layerwise=True)  # 30 s
    first = rig.engine.load([5], [1])  # waits for it, 30 s
    second = rig.engine.store([1], [7], deadline_s=0.05)  # waits for that
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.05 s"):
        second.result(LIMIT_S)
    assert second.states().tolist() == [UNTOUCHED] and not first.failed
    write_all_layers(store)
    first.result(LIMIT_S)
    rig.close()


def test_the_deadline_holds_even_where_the_engines_thread_is_stuck() -> None:
    rig = make_rig()
    with rig.engine._shop.lock:  # as a driver call that does not return would hold it
        handle = rig.engine.load([1], [2], deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            handle.result()
    until(handle.done)
    rig.close()


def test_the_engines_deadline_is_that_of_calls_without_one() -> None:
    rig, gate = gated("copy_in", deadline_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"0\.02 s"):
        rig.engine.load([1], [2]).result()
    assert rig.engine.load([1], [3], deadline_s=7.5).deadline_s == 7.5
    gate.set()
    rig.close()


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("verb", ["load", "store"])
@pytest.mark.parametrize(
    ("engine", "where", "nth"),
    [({}, "kernel", 0), (staged(), "kernel", 0), (staged(), "kernel", 2), (staged(), "copy", 0), (staged(), "copy", 2)],
)
def test_a_step_that_fails_ends_its_transfer_and_no_other(
    engine: dict[str, Any], where: str, nth: int, verb: str, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("sglang.layer_first", WIDE, **engine)
    before, payload = rig.side.snapshot(), rig.host.payload.numpy().copy()
    good_before = rig.slots([9])
    break_step(monkeypatch, rig, where, nth)
    if verb == "load":
        handle = rig.engine.load([3, 4], [1, 2], layerwise=layerwise)
    else:
        handle = rig.engine.store([1, 2], [3, 4], layerwise=layerwise)
        if layerwise:
            write_all_layers(handle)
    with pytest.raises(TransferError, match=f"a step of the transfer failed: OSError.*injected into step {nth}") as got:
        handle.result(LIMIT_S)
    assert isinstance(got.value.__cause__, OSError)
    assert got.value.pages and all(handle.states()[p] != DONE for p in got.value.pages)
    with pytest.raises(TransferError):
        handle.verdict(0)
    with pytest.raises(TransferError):
        handle.wait_layer(1)
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.engine.load([9], [5]).result(LIMIT_S)
    assert np.array_equal(rig.side.pages([5]), good_before)
    rig.engine.store([5], [8]).result(LIMIT_S)
    assert np.array_equal(rig.slots([8]), good_before)
    # Nothing outside the two pages (or slots) was written.
    if verb == "load":
        assert np.array_equal(rig.slots([3, 4]), payload.reshape(-1, rig.host.slot_bytes)[[3, 4], : WIDE.page_bytes])
        rig.side.expect(before, np.array([1, 2, 5]), rig.side.pages([1, 2, 5]))
    else:
        torn = np.array([3, 4])[handle.states() != UNTOUCHED]
        assert torn.size and (rig.host.digests[torn] == NOTHING_STORED).all(), "torn slots must not verify"
        rig.side.expect(before, np.array([5]), good_before)
    rig.close()


def test_transfers_around_a_broken_one_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten loads in the lanes at once, the fifth fails: nine arrive."""
    rig, gate = gated("copy_in")
    rows = rig.slots(range(10))
    break_step(monkeypatch, rig, "kernel", 4)
    handles = [rig.engine.load([i], [i]) for i in range(10)]
    gate.set()
    for i, handle in enumerate(handles):
        if i == 4:
            with pytest.raises(TransferError, match="injected") as got:
                handle.result(LIMIT_S)
            assert got.value.pages == (0,) and handle.states().tolist() == [INVALID]
        else:
            handle.result(LIMIT_S)
            assert np.array_equal(rig.side.pages([i]), rows[i : i + 1])
    rig.close()


@pytest.mark.parametrize("verb", ["load", "store"])
def test_what_follows_a_failed_step_is_skipped(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring slot that was never filled must not reach the pool, nor the slab."""
    rig = make_rig(**staged())
    before, payload = rig.side.pages(range(16)), rig.slots(range(16))
    break_step(monkeypatch, rig, "copy" if verb == "load" else "kernel", 0)
    handle = rig.engine.load([1], [2]) if verb == "load" else rig.engine.store([2], [1])
    with pytest.raises(TransferError, match="injected"):
        handle.result(LIMIT_S)
    assert np.array_equal(rig.side.pages(range(16)), before) and np.array_equal(rig.slots(range(16)), payload)
    rig.close()


def test_a_transfer_behind_a_broken_one_on_the_same_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, gate = gated("copy_in")
    rows = rig.slots([5])
    break_step(monkeypatch, rig, "kernel", 0)
    broken, good = rig.engine.load([4], [1]), rig.engine.load([5], [1])
    gate.set()
    good.result(LIMIT_S)
    assert np.array_equal(rig.side.pages([1]), rows) and broken.failed
    rig.close()


def test_a_gate_that_stays_shut_is_an_error_of_the_transfer_and_leaves_the_lanes_usable() -> None:
    delays = Delays(gate_timeout_s=0.02)
    delays.gate("copy_in")
    rig = make_rig(delays=delays)
    with pytest.raises(TransferError, match="stayed shut") as got:
        rig.engine.load([1, 2], [3, 4]).result(LIMIT_S)
    assert got.value.pages == (0, 1)
    delays.clear("copy_in")
    rig.engine.load([1], [3]).result(LIMIT_S)
    rig.close()


def test_an_error_while_submitting_is_the_transfers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise MemoryError("no room for descriptors")

    rig = make_rig("sglang.layer_first", WIDE, **staged())
    with monkeypatch.context() as patch:
        patch.setattr(host_transfer, "descriptors", refuse)
        load, store = rig.engine.load([1], [3]), rig.engine.store([4], [5])
        layers = rig.engine.store([6], [7], layerwise=True)
        write_all_layers(layers)
        for handle in (load, store, layers):
            with pytest.raises(TransferError, match="no room for descriptors") as got:
                handle.result(LIMIT_S)
            assert got.value.pages == (0,) and handle.states().tolist() == [INVALID]
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.engine.load([1], [3]).result(LIMIT_S)
    rig.close()


def test_result_ends_at_the_deadline_whatever_went_wrong_before() -> None:
    """A handle that has failed, and whose engine's thread is held up, must not be waited for without an end."""
    rig = make_rig()
    held = rig.delays.gate("copy")
    gate, inside = threading.Event(), threading.Event()
    first = rig.engine.store([0], [0])

    def hold(_: object) -> None:
        inside.set()
        gate.wait(LIMIT_S)

    first.add_done_callback(hold)
    rig.delays.clear("copy")
    held.set()
    try:
        assert inside.wait(LIMIT_S)
        handle = rig.engine.load([1], [3], deadline_s=0.3)
        handle.fail(TransferError("failed earlier"))
        started = time.monotonic()
        with pytest.raises(TransferError):
            handle.result(LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 2, "it was held until the engine's thread came free"
    finally:
        gate.set()
    rig.close()
