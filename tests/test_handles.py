"""Handles: layers one by one, pages as they land, the end and who is told of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    DEEP,
    LIMIT_S,
    TINY,
    WIDE,
    Log,
    Steps,
    blocked_handle,
    gated,
    make_rig,
    small_ring,
    staged,
    started,
    until,
    write_all_layers,
)

from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.handles import PageState, TransferHandle
from kvtransfer.kernels.errors import (
    DeadlineExceeded,
    LayoutError,
    TransferCancelled,
    TransferError,
)

UNTOUCHED, DONE, INVALID = PageState.UNTOUCHED, PageState.DONE, PageState.INVALID


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
        "vllm.LBNHC", WIDE, delays=Delays(steps), path="staged", staging_bytes=small_ring(20_480), deadline_s=LIMIT_S
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
