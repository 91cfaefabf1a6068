"""Handles: layers and pages one by one, the end and its errors, cancel, deadlines, verdicts, layer-wise stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    DEEP,
    HYBRID,
    LIMIT_S,
    TINY,
    WIDE,
    Guarded,
    Log,
    Rig,
    Steps,
    fresh,
    make_rig,
    random_bytes,
    staged,
    until,
    write_all_layers,
)

from kvtransfer import lanes as lanes_module
from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.handles import PageState, TransferHandle
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import (
    ConfigError,
    DeadlineExceeded,
    LayoutError,
    TransferCancelled,
    TransferError,
)

UNTOUCHED, DONE, INVALID = PageState.UNTOUCHED, PageState.DONE, PageState.INVALID


def gated(lanes: str = "", **engine: Any) -> tuple[Rig, threading.Event]:
    """A rig whose lanes (those that begin with ``lanes``) are shut, and the gate."""
    delays = Delays()
    gate = delays.gate(lanes)
    return make_rig(delays=delays, **engine), gate


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def blocked_handle(rig: Rig) -> tuple[TransferHandle, TransferHandle]:
    """(a layer-wise store that keeps slot 15 busy, a load of it that can't be submitted before the store is)."""
    store = rig.engine.store([15], [15], layerwise=True)
    return store, rig.engine.load([15], [14], layerwise=True)


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "lane"), [({}, "copy_in"), (staged(), "scatter"), (staged(), "copy_in")])
def test_layers_arrive_in_order_and_can_be_waited_for_one_by_one(engine: dict[str, Any], lane: str) -> None:
    steps = Steps()
    gates = [steps.gate(lane, nth) for nth in range(9)]
    log = Log()
    rig = make_rig("sglang.layer_first", DEEP, delays=Delays(steps), observer=log, **engine)
    for gate in gates:
        gate.set()
    rows = rig.fill_slots([3, 1])
    steps.counts.clear()
    for gate in gates:
        gate.clear()
    handle = rig.engine.load([3, 1], [4, 9], layerwise=True)
    chunks = handle.plan.chunks
    assert [c.box.layer_start for c in chunks] == sorted(c.box.layer_start for c in chunks) and len(chunks) > 2
    seen: list[int] = []

    def consume() -> None:
        for layer in range(DEEP.num_layers):
            handle.wait_layer(layer)
            ends = DEEP.layer_offsets
            assert np.array_equal(rig.side.pages([4, 9])[:, : ends[layer + 1]], rows[:, : ends[layer + 1]])
            seen.append(layer)

    consumer = started(consume)
    for number, chunk in enumerate(chunks):
        assert len(seen) <= chunk.box.layer_start, "a layer was handed out before it was there"
        gates[number].set()
        until(lambda stop=chunk.box.layer_stop: len(seen) >= stop)  # type: ignore[misc]
    consumer.join(LIMIT_S)
    assert seen == list(range(9)) and [layer for _, layer in log.waits] == seen
    handle.result(LIMIT_S)
    rig.close()


def test_waiting_for_a_layer_that_was_not_submitted_holds_the_caller() -> None:
    rig = make_rig()
    want = rig.side.pages([15])
    store, load = blocked_handle(rig)
    waited: list[int] = []

    def wait() -> None:
        load.wait_layer(1)
        waited.append(1)
        load.wait_all()
        waited.append(2)

    consumer = started(wait)
    assert not load.fully_submitted and not waited
    write_all_layers(store)
    consumer.join(LIMIT_S)
    assert waited == [1, 2] and np.array_equal(rig.side.pages([14]), want)
    rig.close()


@pytest.mark.parametrize("verb", ["wait_layer", "wait_all"])
def test_waiting_for_what_is_never_submitted_ends_at_the_deadline(verb: str) -> None:
    rig = make_rig()
    store = rig.engine.store([15], [15], layerwise=True)
    load = rig.engine.load([15], [14], deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.05 s"):
        load.wait_layer(2) if verb == "wait_layer" else load.wait_all()
    with pytest.raises(DeadlineExceeded):
        load.result()
    store.cancel()
    rig.close()


def test_waiting_for_a_cancelled_transfer_raises_at_once() -> None:
    rig = make_rig()
    store, load = blocked_handle(rig)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            load.wait_layer(0)
        except TransferCancelled as error:
            errors.append(error)

    consumer = started(wait)
    assert load.cancel()
    consumer.join(LIMIT_S)
    assert len(errors) == 1
    store.cancel()
    rig.close()


def test_layers_and_streams_that_are_not_there_are_refused() -> None:
    with FifoStream("compute") as compute, FifoStream("stranger") as stranger:
        rig = make_rig(streams=[compute])
        load, store = rig.engine.load([0], [0]), rig.engine.store([1], [1], layerwise=True)
        for layer in (-1, 3):
            with pytest.raises(LayoutError, match=f"wait_layer: expected 0 to 2, got {layer}"):
                load.wait_layer(layer)
            with pytest.raises(LayoutError, match=f"layer_written: expected 0 to 2, got {layer}"):
                store.layer_written(layer)
        for call in (load.wait_layer, store.layer_written):
            with pytest.raises(TransferError, match=r"expected a stream declared for pool, got .*declare_stream"):
                call(0, stranger)
        with pytest.raises(TransferError, match="declared"):
            load.wait_all(stranger)
        for layer in range(3):
            load.wait_layer(layer, compute)
        with pytest.raises(TransferError, match=r"layer_written: expected a handle of store\(\.\.\., layerwise=True\)"):
            load.layer_written(0)
        with pytest.raises(TransferError, match="layer_written: expected a handle of store"):
            rig.engine.store([5], [5]).layer_written(0)
        write_all_layers(store)
        rig.close()


def test_wait_all_is_every_layer_at_once() -> None:
    rig, gate = gated("copy_in")
    rows = rig.slots([3])
    handle = rig.engine.load([3], [4])
    with FifoStream("compute") as compute:
        rig.pool.declare_stream(compute)
        handle.wait_all(compute)
        seen: list[Any] = []
        compute.submit(lambda: seen.append(rig.side.pages([4])))
        assert not compute.query()
        gate.set()
        handle.wait_all()
        assert np.array_equal(rig.side.pages([4]), rows)
        compute.synchronize(LIMIT_S)
        assert np.array_equal(seen[0], rows)
    rig.close()


# -- pages and the end -----------------------------------------------------------------------------


def test_pages_are_reported_as_they_land() -> None:
    steps = Steps()
    gates = [steps.gate("copy_out", nth) for nth in range(4)]
    rig = make_rig(
        "vllm.LBNHC", WIDE, delays=Delays(steps), path="staged", staging_bytes=3 * 20_480, deadline_s=LIMIT_S
    )
    handle = rig.engine.store([3, 1, 2, 0], [0, 1, 2, 3])
    assert len(handle.plan.chunks) == 4, "a page fills a ring slot"
    for number, gate in enumerate(gates):
        assert handle.pages_done().tolist() == [i < number for i in range(4)]
        gate.set()
        until(lambda number=number: bool(handle.pages_done()[number]))  # type: ignore[misc]
    assert handle.result(LIMIT_S).seconds > 0 and handle.seconds > 0
    assert handle.states().tolist() == [DONE] * 4
    rig.close()


def test_a_page_that_is_cut_into_boxes_is_done_with_its_last_one() -> None:
    steps = Steps()
    last = steps.gate("scatter", 5)
    rig = make_rig("sglang.layer_first", WIDE, delays=Delays(steps), **staged())
    handle = rig.engine.load([3], [1])
    assert len(handle.plan.chunks) == 6
    until(lambda: steps.counts["scatter"] == 6 and handle.fully_submitted)
    assert handle.states().tolist() == [INVALID] and not handle.pages_done().any()
    last.set()
    handle.result(LIMIT_S)
    assert handle.states().tolist() == [DONE]
    rig.close()


def test_the_result_says_what_moved_and_how_fast() -> None:
    rig, gate = gated("copy_in")
    handle = rig.engine.load([1, 2], [3, 4])
    assert not handle.done() and handle.seconds == 0 and repr(handle).endswith("by cpu, running)")
    with pytest.raises(DeadlineExceeded, match=r"result: the transfer had not ended after 0\.01 s"):
        handle.result(0.01)
    with pytest.raises(DeadlineExceeded, match="verdict: the transfer had not ended"):
        handle.verdict(0)
    gate.set()
    result = handle.result(LIMIT_S)
    assert (result.pages, result.total_bytes, result.path) == (2, 2 * TINY.page_bytes, "cpu")
    assert result.gbps == pytest.approx(result.total_bytes / result.seconds / 1e9)
    assert handle.done() and handle.total_bytes == result.total_bytes and "ended" in repr(handle)
    assert handle.num_layers == 3
    rig.close()


def test_callbacks_run_once_before_and_after_the_end() -> None:
    rig, gate = gated("copy_in")
    handle = rig.engine.load([1], [3])
    seen: list[tuple[str, bool]] = []
    handle.add_done_callback(lambda h: seen.append(("before", h.done())))
    handle.add_done_callback(lambda h: seen.append(("second", h is handle)))
    gate.set()
    handle.result(LIMIT_S)
    until(lambda: len(seen) == 2)
    handle.add_done_callback(lambda h: seen.append(("after", h.done())))
    assert seen == [("before", True), ("second", True), ("after", True)]
    rig.close()


def test_a_callback_may_start_the_next_transfer() -> None:
    rig = make_rig()
    rows = rig.fill_slots([1])
    later: list[TransferHandle] = []
    rig.engine.load([1], [3]).add_done_callback(lambda h: later.append(rig.engine.store([3], [7])))
    until(lambda: bool(later))
    later[0].result(LIMIT_S)
    assert np.array_equal(rig.slots([7]), rows)
    rig.close()


def test_handles_can_be_awaited() -> None:
    rig, gate = gated("copy")

    async def both() -> list[int]:
        handles = [rig.engine.load([i], [i]) for i in range(3)]
        asyncio.get_running_loop().call_later(0.0, gate.set)
        return [r.pages for r in await asyncio.gather(*(wait(h) for h in handles))]

    async def wait(handle: TransferHandle) -> Any:
        return await handle

    assert asyncio.run(both()) == [1, 1, 1]

    async def ended() -> int:
        handle = rig.engine.load([1], [1])
        handle.result(LIMIT_S)
        return (await handle).pages + (await handle).pages

    assert asyncio.run(ended()) == 2
    rig.close()


def test_awaiting_a_transfer_that_fails_raises_its_error() -> None:
    rig, gate = gated("copy_in")

    async def cancelled() -> None:
        store, load = blocked_handle(rig)
        load.cancel()
        store.cancel()
        await load

    with pytest.raises(TransferCancelled):
        asyncio.run(cancelled())

    async def late() -> None:
        await rig.engine.load([1], [1], deadline_s=0.02)

    with pytest.raises(DeadlineExceeded):  # although the lane is still shut
        asyncio.run(late())
    gate.set()
    rig.close()


def test_a_coroutine_that_gave_up_harms_nobody(recwarn: pytest.WarningsRecorder) -> None:
    rig, gate = gated("copy_in")
    handle = rig.engine.load([1], [1])

    async def give_up() -> None:
        async def wait() -> None:
            await handle

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())  # its loop is closed when the transfer ends
    gate.set()
    assert handle.result(LIMIT_S).pages == 1 and rig.engine.load([2], [2]).result(LIMIT_S).pages == 1
    rig.close()
    assert not recwarn.list


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


@pytest.mark.parametrize(("nth", "kinds"), [(4, {INVALID, UNTOUCHED}), (36, {DONE, INVALID})])
def test_a_cancelled_transfer_says_exactly_what_became_of_each_page(nth: int, kinds: set[PageState]) -> None:
    """Eight pages in six boxes each, through a ring of three slots: cancelled in the first box, and in the last."""
    steps = Steps()
    gate = steps.gate("scatter", nth)
    rig = make_rig("sglang.layer_first", WIDE, delays=Delays(steps), **staged())
    slots, pages = rig.rng.permutation(16)[:8], rig.rng.permutation(16)[:8]
    want, before = rig.slots(slots), rig.side.pages(pages)
    handle = rig.engine.load(slots, pages)
    until(lambda: steps.counts["scatter"] == nth + 1)  # this one is at the gate, at most two more are submitted
    assert handle.cancel()
    gate.set()
    with pytest.raises(TransferCancelled) as got:
        handle.result(LIMIT_S)
    chunks, ran = handle.plan.chunks, steps.counts["scatter"]
    assert nth < ran <= nth + 3 < len(chunks)
    landed, total = np.zeros(8, dtype=int), np.zeros(8, dtype=int)
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
    rig = make_rig("page_first", WIDE, delays=Delays(steps), path="staged", staging_bytes=3 * 20_480)
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


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
def test_a_transfer_that_is_stuck_fails_at_its_deadline_and_keeps_its_pages(engine: dict[str, Any]) -> None:
    rig, gate = gated("copy_in", **engine)
    want = rig.slots([4])
    handle = rig.engine.load([4], [5], deadline_s=0.03)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.03 s"):
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


def break_step(monkeypatch: pytest.MonkeyPatch, rig: Rig, where: str, nth: int) -> None:
    """Make the ``nth`` step of a kind raise, once: "kernel" or "copy"."""
    calls = iter(range(10**9))
    owner, name = (lanes_module, "run_on_cpu") if where == "kernel" else (rig.engine._shop.lanes.copier, "batch")
    real = getattr(owner, name)

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise OSError(f"injected into step {nth}")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, maybe)


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
        assert not rig.host.digests[[3, 4]].any(), "what the slots hold was never verified"
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
    from kvtransfer import host_transfer

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


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
@pytest.mark.parametrize(("spec", "name"), [(TINY, "vllm.LBNHC"), (HYBRID, "sglang.layer_first"), (WIDE, "page_first")])
def test_one_flipped_bit_is_found_and_named(engine: dict[str, Any], spec: Any, name: str) -> None:
    log = Log()
    rig = make_rig(name, spec, observer=log, **engine)
    slots = [3, 9, 5]
    rig.fill_slots(slots)
    for _ in range(6):
        byte, bit = int(rig.rng.integers(spec.page_bytes)), int(rig.rng.integers(8))
        layer = next(i for i in range(spec.num_layers) if byte < spec.layer_offsets[i + 1])
        row = rig.host.payload.view(-1, rig.host.slot_bytes)[9]
        row[byte] ^= 1 << bit
        handle = rig.engine.load(slots, [0, 1, 2], layerwise=bool(rig.rng.integers(2)))
        verdict = handle.verdict(LIMIT_S)
        assert (verdict.ok, verdict.bad_pages, verdict.bad_layers) == (False, (1,), ((1, layer),))
        assert verdict.unverified_pages == () and handle.states().tolist() == [DONE, INVALID, DONE]
        with pytest.raises(TransferError, match=r"pages at positions \[1\] do not verify: treat them as misses") as got:
            handle.result(LIMIT_S)
        assert got.value.pages == (1,)
        assert log.notes[-1] == ("pages set aside", {"slots": [9]})
        row[byte] ^= 1 << bit
        assert rig.engine.load(slots, [0, 1, 2]).verdict(LIMIT_S).ok
    rig.close()


def test_pages_that_were_swapped_or_are_old_do_not_verify() -> None:
    rig = make_rig()
    rig.fill_slots([1, 2])
    rows = rig.host.payload.view(-1, rig.host.slot_bytes)
    rows[[1, 2]] = rows[[2, 1]]
    verdict = rig.engine.load([1, 2], [0, 1]).verdict(LIMIT_S)
    assert verdict.bad_pages == (0, 1) and len(verdict.bad_layers) == 6
    rig.close()


def test_slots_that_were_never_stored_are_unverified_and_not_wrong() -> None:
    rig = make_rig()
    rig.fill_slots([1])
    verdict = rig.engine.load([0, 1, 2], [0, 1, 2]).verdict(LIMIT_S)
    assert verdict.ok and verdict.unverified_pages == (0, 2)
    rig.close()


def test_storing_into_a_slot_again_replaces_its_digests() -> None:
    rig = make_rig()
    rig.fill_slots([1])
    first = rig.host.digests[1].copy()
    rig.engine.store([5], [1]).result(LIMIT_S)
    assert (rig.host.digests[1] != first).all()
    assert np.array_equal(rig.host.digests[[1]], page_digests(rig.side.pages([5]), TINY))
    assert rig.engine.load([1], [6]).verdict(LIMIT_S).unverified_pages == ()
    rig.close()


@pytest.mark.parametrize("how", ["cancel", "deadline", "error"])
def test_a_store_that_does_not_end_well_leaves_no_digests_on_what_it_touched(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    gate = steps.gate("copy_out", 1)
    delays = Delays(lambda label: steps(label) if armed else None)
    armed = False
    rig = make_rig("page_first", WIDE, delays=delays, path="staged", staging_bytes=3 * 20_480)
    rig.fill_slots(range(10))
    known = rig.host.digests[np.arange(10)].copy()
    armed = True
    if how == "error":
        break_step(monkeypatch, rig, "copy", 1)
    handle = rig.engine.store(range(10), range(10), deadline_s=0.05 if how == "deadline" else LIMIT_S)
    until(lambda: steps.counts["copy_out"] == 2)
    if how == "cancel":
        handle.cancel()
    if how == "deadline":
        with pytest.raises(DeadlineExceeded):
            handle.result()
    gate.set()
    with pytest.raises(TransferError):
        handle.result(LIMIT_S)
    until(handle.done)
    touched = np.flatnonzero(handle.states() != UNTOUCHED)
    others = np.flatnonzero(handle.states() == UNTOUCHED)
    assert touched.size and others.size
    assert not rig.host.digests[touched].any() and np.array_equal(rig.host.digests[others], known[others])
    armed = False
    verdict = rig.engine.load(range(10), range(10)).verdict(LIMIT_S)
    assert verdict.ok and verdict.unverified_pages == tuple(touched.tolist())
    rig.close()


# -- layer-wise stores -----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
def test_layers_leave_in_whatever_order_they_are_written(engine: dict[str, Any]) -> None:
    rig = make_rig("sglang.layer_first", DEEP, **engine)
    slots, pages = np.array([4, 1, 9]), np.array([0, 5, 7])
    handle = rig.engine.store(pages, slots, layerwise=True)
    old, start = rig.slots(slots), DEEP.layer_offsets
    for number, layer in enumerate(rig.rng.permutation(9).tolist()):
        assert not handle.done()
        rows = rig.side.pages(pages)
        rows[:, start[layer] : start[layer + 1]] = random_bytes(rig.rng, 3, DEEP.layer_bytes(layer))
        rig.side.put(pages, rows)  # the forward writes the layer, and nothing of it may have left before
        handle.layer_written(layer)
        handle.wait_layer(layer)
        now = rig.slots(slots)
        assert np.array_equal(now[:, start[layer] : start[layer + 1]], rows[:, start[layer] : start[layer + 1]])
        left = [i for i in range(9) if handle._chunks_left[i]]
        assert len(left) == 8 - number
        for i in left:
            assert np.array_equal(now[:, start[i] : start[i + 1]], old[:, start[i] : start[i + 1]])
    handle.result(LIMIT_S)
    assert np.array_equal(rig.slots(slots), rig.side.pages(pages))
    assert np.array_equal(rig.host.digests[slots], page_digests(rig.side.pages(pages), DEEP))
    rig.close()


def test_a_layer_is_written_once() -> None:
    rig = make_rig()
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(1)
    with pytest.raises(TransferError, match="layer_written: expected each layer once, got 1 again"):
        handle.layer_written(1)
    handle.layer_written(0)
    handle.layer_written(2)
    handle.result(LIMIT_S)
    with pytest.raises(TransferError, match="got 2 again"):
        handle.layer_written(2)
    rig.close()


@pytest.mark.parametrize("written", [0, 2])
def test_a_layerwise_store_that_is_never_finished_ends_at_its_deadline(written: int) -> None:
    rig = make_rig()
    rig.fill_slots([2, 3])
    handle = rig.engine.store([1, 4], [2, 3], layerwise=True, deadline_s=0.05)
    for layer in range(written):
        handle.layer_written(layer)
    with pytest.raises(DeadlineExceeded, match=r"passed its deadline of 0\.05 s") as got:
        handle.result()
    assert got.value.pages == (0, 1)
    until(handle.done)
    assert handle.states().tolist() == [INVALID if written else UNTOUCHED] * 2
    assert rig.host.digests[[2, 3]].any() == (written == 0)
    handle.layer_written(2)  # the forward goes on; nobody wants the layer
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.engine.store([1], [2]).result(LIMIT_S)
    rig.close()


@pytest.mark.parametrize("engine", [{}, staged()])
def test_a_layerwise_store_can_be_cancelled_half_way(engine: dict[str, Any]) -> None:
    rig = make_rig(**engine)
    old, new = rig.slots([2]), rig.side.pages([1])
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(0)
    handle.wait_layer(0)
    assert handle.cancel()
    handle.layer_written(1)
    with pytest.raises(TransferCancelled):
        handle.result(LIMIT_S)
    assert handle.states().tolist() == [INVALID]
    end = TINY.layer_offsets[1]
    assert np.array_equal(rig.slots([2])[:, :end], new[:, :end]) and np.array_equal(
        rig.slots([2])[:, end:], old[:, end:]
    )
    rig.close()


def test_a_layerwise_store_whose_step_fails_ends_although_layers_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    break_step(monkeypatch, rig, "kernel", 0)
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(0)
    with pytest.raises(TransferError, match="injected"):
        handle.result(LIMIT_S)
    handle.layer_written(1)
    assert not rig.host.ledger.any_busy()
    rig.close()


def test_a_layerwise_load_is_waited_for_while_a_layerwise_store_of_the_same_pages_follows() -> None:
    """The shape of a forward: layer i waits for its load, is used and written, and leaves at once."""
    rig = make_rig("sglang.layer_first", DEEP, **staged())
    rows = rig.fill_slots([0, 1])
    load = rig.engine.load([0, 1], [6, 7], layerwise=True)
    store = rig.engine.store([6, 7], [8, 9], layerwise=True)
    for layer in range(9):
        load.wait_layer(layer)
        store.layer_written(layer)
    store.result(LIMIT_S)
    assert np.array_equal(rig.slots([8, 9]), rows) and load.verdict(LIMIT_S).ok
    rig.close()


def test_what_ended_keeps_nothing_of_the_engine_alive() -> None:
    rig = make_rig()
    handles = [rig.engine.load([1], [1]), rig.engine.copy([1], Guarded(fresh(), rig.side.layout).pool, [2])]
    for handle in handles:
        handle.result(LIMIT_S)
        until(lambda handle=handle: handle.done() and not handle.keep)  # type: ignore[misc]
    with pytest.raises(ConfigError):
        rig.engine.load([1], [1], deadline_s=0)
    rig.close()
