"""Jobs of staged transfers on a GPU of ours that does in random order whatever may overlap: exact bytes, right ends."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_helpers import (
    DEEP,
    EVEN,
    HYBRID,
    LATENT,
    LIMIT_S,
    TINY,
    TOKEN,
    WIDE,
    Guarded,
    started,
    until,
    write_all_layers,
)
from fake_gpu import FakeEvent, FakeLanes, FakeShop, FakeStream, lane, on_their_way, scripted_rig
from interrupt_helpers import interrupted_everywhere

from kvtransfer import scripted
from kvtransfer.engine import TransferEngine
from kvtransfer.handles import PageState, TransferHandle
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import CudaError, DeadlineExceeded, TransferCancelled, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.staging import SLOT_ALIGNMENT, StagingRing
from kvtransfer.submitter import NONE, Job, Submitter
from kvtransfer.templates import MOST_WAITS, Bound, Desk, Template

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "submitter"  # built once for all tests


def refuse_at(number: int) -> Callable[[str], bool]:
    """For `Gpu.refuse`: that one of the calls that do something."""
    calls = itertools.count()
    return lambda call: call not in ("query", "mode", "set_context") and next(calls) == number


def ring_of(slots: int, slot_bytes: int = SLOT_ALIGNMENT) -> StagingRing:
    return StagingRing(CPU, slots * slot_bytes, slots)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("slots", [2, 12])
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("sglang.layer_first", TINY),
        ("page_first", EVEN),
        ("vllm.BLHNC", DEEP),
        ("vllm.LBNHC", WIDE),
        ("page_first", HYBRID),
        ("page_first", LATENT),
    ],
)
def test_loads_and_stores_are_exact_with_digests(
    layout: str, spec: Any, slots: int, layerwise: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    rig, gpu = scripted_rig(monkeypatch, folder, layout, spec, ring_of(slots), seed=seed, pages=96, slots=96)
    rng = rig.rng
    for _ in range(3):
        n = int(rng.integers(1, 40))
        pages = rng.permutation(96)
        into = rng.permutation(96) if rng.random() < 0.5 else (np.arange(96) + int(rng.integers(96))) % 96
        before, rows = rig.side.snapshot(), rig.side.pages(pages[:n])
        store = rig.engine.store(pages[:n], into[:n])
        load = rig.engine.load(into[:n], pages[n : 2 * n], layerwise=layerwise)
        assert load.verdict(LIMIT_S).verified, seed
        store.result(LIMIT_S)
        assert np.array_equal(rig.slots(into[:n]), rows), seed
        assert np.array_equal(rig.host.digests[into[:n]], page_digests(rows, spec)), seed
        rig.side.expect(before, pages[n : 2 * n], rows)
        assert (load.states() == PageState.DONE).all() and (store.states() == PageState.DONE).all()
    rig.close()
    gpu.close()


def test_a_layer_can_be_stored_while_jobs_hold_the_ring(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is submitted call by call needs one slot under the engine's lock, and so does who gives slots back."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(4), seed=1, pages=128, slots=128, verify=False
    )
    store = rig.engine.store(range(100, 104), range(100, 104), layerwise=True)
    rows = rig.side.pages(range(100, 104))
    gpu.held |= {lane(rig, "scatter"), lane(rig, "copy_out")}
    jobs = [rig.engine.load(range(50), range(50)), rig.engine.store(range(50, 99), range(50, 99))]
    until(lambda: on_their_way(*jobs))  # paced: they keep what they hold
    writer = started(lambda: write_all_layers(store))
    time.sleep(0.05)
    gpu.held.clear()
    writer.join(LIMIT_S)
    assert not writer.is_alive(), "stuck for a slot, with the lock that its holder needs"
    for handle in (*jobs, store):
        handle.result(LIMIT_S)
    assert np.array_equal(rig.slots(range(100, 104)), rows)
    rig.close()
    gpu.close()


def test_a_job_stops_at_the_deadline_also_where_a_waiter_saw_it_first(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(6), seed=1, pages=64, slots=64)
    gpu.held.add(lane(rig, "scatter"))
    late = rig.engine.load(range(60), range(60))
    until(lambda: on_their_way(late))
    late.fail(DeadlineExceeded("what a waiter says to it"))
    until(lambda: late.fully_submitted, "the end of the job")
    gpu.held.clear()
    until(late.done)
    assert late.chunks_submitted == 8 and len(late.plan.chunks) > 8
    rig.close()
    gpu.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", ["load", "store"])
def test_errors_and_cancels_at_any_command_leave_what_the_states_say(
    direction: str, seed: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(4), seed=seed, pages=64, slots=64)
    rng = np.random.default_rng([seed, direction == "load"])
    ends = {"ok": 0, "not": 0}
    for _ in range(8):
        n = int(rng.integers(1, 12))
        pages, slots = rng.permutation(64)[:n], rng.permutation(64)[:n]
        old = rig.side.pages(pages) if direction == "load" else rig.slots(slots)
        new = rig.slots(slots) if direction == "load" else rig.side.pages(pages)
        stop = bool(rng.random() < 0.3)
        if not stop:
            gpu.refuse = refuse_at(int(rng.integers(0, 3 + 9 * n)))
        handle = rig.engine.load(slots, pages) if direction == "load" else rig.engine.store(pages, slots)
        if stop:
            time.sleep(rng.random() * 0.005)
            handle.cancel()
        try:
            handle.result(LIMIT_S)
            ends["ok"] += 1
        except (CudaError, TransferCancelled):
            ends["not"] += 1
        gpu.refuse = lambda call: False
        now = rig.side.pages(pages) if direction == "load" else rig.slots(slots)
        states = handle.states()
        assert np.array_equal(now[states == PageState.DONE], new[states == PageState.DONE])
        assert np.array_equal(now[states == PageState.UNTOUCHED], old[states == PageState.UNTOUCHED])
        assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
        assert not any(s.taken for s in rig.engine._shop.ring._slots)  # type: ignore[union-attr]
    rig.fill_slots(range(4))
    rig.engine.load(range(4), range(4)).result(LIMIT_S)
    rig.close()
    gpu.close()


def test_an_observer_that_raises_does_not_end_a_transfer_that_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Told by a thread that looks at the end of the job; the one that rests in C looks at the end of all."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1, native_rest=False)
    observer = rig.engine.observer

    def bug(*args: Any) -> None:
        raise ValueError("a subscriber's bug")

    gpu.held.add(lane(rig, "copy_in"))
    with monkeypatch.context() as patch:
        patch.setattr(observer, "submitted", bug)
        handle = rig.engine.load(range(8), range(8))
        until(lambda: handle.failed)
        time.sleep(0.05)
        assert not handle.done() and rig.pool.ledger.any_busy() and not rig.engine._shop.desks
        gpu.held.clear()
        with pytest.raises(TransferError, match="a subscriber's bug"):
            handle.result(LIMIT_S)
    assert np.array_equal(rig.side.pages(range(8)), rig.slots(range(8)))
    rig.close()
    gpu.close()


@pytest.mark.parametrize("how", ["job stopped", "job refused", "chunk refused"])
def test_a_ring_slot_keeps_its_earlier_user_where_the_next_one_fails_before_it_waited(
    how: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A load still scatters out of it, a store gets it and ends at once, another store writes it."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1, pages=64, slots=64, verify=False
    )
    lanes, layerwise = rig.engine._shop.lanes, how == "chunk refused"
    rows, stored = rig.slots(range(2)), rig.side.pages(range(32, 36))
    gpu.held.add(lane(rig, "scatter"))
    load = rig.engine.load(range(2), range(2))
    assert load.await_submitted(LIMIT_S)
    give, wait = Submitter.give, lanes.wait

    def stopped(submitter: Submitter, job: Job) -> None:
        job.stop()
        give(submitter, job)

    def refused(name: str, event: Any) -> None:
        if event is load.final_event:
            raise CudaError("injected", 700)
        wait(name, event)

    for _ in range(4):  # each slot once, at least
        with monkeypatch.context() as patch:
            if how == "job stopped":
                patch.setattr(Submitter, "give", stopped)
            if how == "job refused":
                gpu.refuse = lambda call: call == "wait"
            if layerwise:
                patch.setattr(lanes, "wait", refused)
            store = rig.engine.store(range(40, 48), range(40, 48), layerwise=layerwise)
            if layerwise:
                write_all_layers(store)
            assert store.await_submitted(LIMIT_S)
            gpu.refuse = lambda call: False
    stores = [rig.engine.store([32 + i], [32 + i], layerwise=layerwise) for i in range(4)]
    for store in stores if layerwise else ():
        write_all_layers(store)
    time.sleep(0.05)
    gpu.held.clear()
    load.result(LIMIT_S)
    for store in stores:
        store.result(LIMIT_S)
    assert np.array_equal(rig.side.pages(range(2)), rows)
    assert np.array_equal(rig.slots(range(32, 36)), stored)
    rig.close()
    gpu.close()


def test_an_interrupt_behind_the_hand_over_leaves_the_job_what_it_uses(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(4), seed=1, pages=64, slots=64)
    submitter = rig.engine._shop.submitters["load"]
    gpu.held.add(lane(rig, "copy_in"))
    give = submitter.give
    jobs: list[Any] = []

    def interrupted(job: Any) -> None:
        give(job)
        jobs.append(job)
        until(lambda: job.chunks_submitted == 8)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submitter, "give", interrupted)
        handle = rig.engine.load(range(60), range(60))
        until(lambda: handle.failed)
    until(lambda: handle.fully_submitted)
    time.sleep(0.02)
    assert not handle.done() and rig.pool.ledger.any_busy(), "eight chunks are on their way"
    gpu.held.clear()
    with pytest.raises(TransferError, match="KeyboardInterrupt"):
        handle.result(LIMIT_S)
    assert jobs[0].ended and jobs[0].chunks_submitted == 8 == handle.chunks_submitted
    assert not any(s.taken for s in rig.engine._shop.ring._slots)  # type: ignore[union-attr]
    rig.close()
    gpu.close()


def test_an_interrupt_at_any_line_leaves_what_the_states_say(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Of `hand_over` and what it calls, on the thread of a caller who loads layer by layer."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(4), seed=1, pages=64, slots=64)
    traced = {
        f.__code__
        for f in (
            scripted.hand_over,
            Bound.job,
            Submitter.give,
            Job.__init__,
            TransferHandle.script_started,
        )
    }
    left, seen = 0, set[tuple[object, int]]()
    made: list[TransferHandle] = []
    make = rig.engine._handle

    def seen_made(*arguments: Any) -> TransferHandle:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(rig.engine, "_handle", seen_made)

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code not in traced:
            return None
        line = frame.f_code, frame.f_lineno
        if event == "line" and line not in seen:  # not at the end of a `with`, where no signal is looked at either
            seen.add(line)
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    was, lines = sys.gettrace(), 0
    for n in itertools.count(1):
        chosen = rig.rng.permutation(64)[:20]
        slots = rig.rng.permutation(64)[:20]
        old, new = rig.side.pages(chosen), rig.slots(slots)
        left = n
        seen.clear()
        sys.settrace(trace)
        try:
            rig.engine.load(slots, chosen, layerwise=True)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(was)
        handle = made[-1]
        if left > 0:
            handle.result(LIMIT_S)
            break
        lines += 1
        with pytest.raises(TransferError, match="KeyboardInterrupt"):
            handle.result(LIMIT_S)
        now, states = rig.side.pages(chosen), handle.states()
        assert np.array_equal(now[states == PageState.DONE], new[states == PageState.DONE]), n
        assert np.array_equal(now[states == PageState.UNTOUCHED], old[states == PageState.UNTOUCHED]), n
        assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
        assert not any(s.taken for s in rig.engine._shop.ring._slots), n  # type: ignore[union-attr]
        assert rig.engine.load(slots, chosen).verdict(LIMIT_S), n
        assert np.array_equal(rig.side.pages(chosen), new), n
    assert lines > 50
    rig.close()
    gpu.close()


@pytest.mark.parametrize("kind", ["load", "layer-wise load", "store"])
def test_an_interrupt_anywhere_in_a_call_leaves_nothing_claimed(
    kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Whoever was interrupted has no handle to wait for: the transfer ends all the same, and lets go of its pages."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1, verify=False)
    engine = rig.engine
    assert engine._shop.ring is not None
    slots = engine._shop.ring._slots

    def case() -> tuple[Callable[[], object], Callable[[], object]]:
        def work() -> None:
            if kind == "store":
                engine.store([1, 2], [3, 4])
            else:
                engine.load([1, 2], [3, 4], layerwise=kind == "layer-wise load")

        def check() -> None:
            until(lambda: not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy(), "the end of the claims")
            until(engine._pump.idle)
            assert not any(s.taken for s in slots)

        return work, check

    work, check = case()
    work()  # its plan is remembered from now on, which is less to do
    check()
    assert interrupted_everywhere(case) > 200
    rows = rig.slots([1, 2])
    engine.load([1, 2], [3, 4]).result(LIMIT_S)
    assert np.array_equal(rig.side.pages([3, 4]), rows)
    rig.close()
    gpu.close()


@pytest.mark.parametrize("load", [False, True])
def test_a_job_is_the_same_whatever_was_before_it(load: bool, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A template that was laid out long ago, over other ring slots, says what one does that is laid out now."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(12), seed=1, pages=64, slots=64)
    shop, rng = rig.engine._shop, rig.rng
    ring = shop.ring
    assert ring is not None
    ids, any_event = range(int(rng.integers(8, 64))), cast(Any, FakeEvent)
    template = Template(shop, load, rig.engine.plan("load" if load else "store", ids, ids, path="staged").chunks)
    desk = Desk(shop, len(ids))
    bound = desk.bind(template, len(ids))
    for _ in range(300):
        slots = [ring._slots[i] for i in rng.permutation(12)[: int(rng.integers(1, 13))]]
        for slot in slots:
            slot.free = None if rng.random() < 0.5 else any_event()
        waits = [(int(rng.integers(9)), int(rng.integers(9))) for _ in range(int(rng.integers(MOST_WAITS + 1)))]
        asked = slots, any_event(), bool(rng.random() < 0.5), waits
        other = Bound(desk, template, len(ids))
        jobs = [b.job(*asked) for b in (bound, other)]
        words = [job.commands.copy() for job in jobs]
        for own, at in zip((bound, other), words, strict=True):  # pointers to what each has of its own
            own_rows = at[len(at) - 4 - own.commands[:, :, 0].size : -4].reshape(own.commands.shape)
            own_rows[:, template.copy_row, 2] -= np.uint64(own.pages.ctypes.data)
            own_rows[:, template.launch_row, 4] -= np.uint64(own.parameters.ctypes.data)
            at[at[:, 0] == NONE] = NONE
        assert np.array_equal(words[0], words[1])
        assert np.array_equal(bound.pages, other.pages) and np.array_equal(bound.values, other.values)
    rig.close()
    gpu.close()


def test_an_interrupted_job_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Between the lines that write which slots wait for which chunks."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(12), seed=1, pages=64, slots=64)
    shop = rig.engine._shop
    assert shop.ring is not None
    template = Template(shop, True, rig.engine.plan("load", range(60), range(60), path="staged").chunks)
    desk = Desk(shop, 60)
    bound, final = desk.bind(template, 60), cast(Any, FakeEvent())
    for slot in shop.ring._slots:
        slot.free = cast(Any, FakeEvent())
    few, many = shop.ring._slots[:4], shop.ring._slots[:6]
    want = bound.job(many, final, False).commands.copy()
    for nth in itertools.count(1):
        bound.job(few, final, False)
        left = nth

        def trace(frame: Any, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code is not Bound.job.__code__:
                return None
            left -= event == "line"
            if not left:
                raise KeyboardInterrupt
            return trace

        was = sys.gettrace()
        sys.settrace(trace)
        try:
            bound.job(many, final, False)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(was)
        assert np.array_equal(bound.job(many, final, False).commands, want), nth
        if left > 0:
            break
    assert nth > 10
    rig.close()
    gpu.close()


def test_a_job_is_expected_until_it_is_known_that_there_will_be_none(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1)
    said: list[bool] = []
    for submitter in rig.engine._shop.submitters.values():
        monkeypatch.setattr(submitter, "expect", lambda job=True: said.append(job))
    monkeypatch.setattr(rig.engine, "_launch", lambda *a, **k: None)  # whether it is a job is known before
    for ids, more, want in (
        ([1, 2], {"layerwise": True}, [True]),
        ([3], {}, []),  # the engine's thread will give it
        ([4, 5], {"layerwise": True, "path": "cpu"}, [True, False]),
        ([], {"layerwise": True}, [True, False]),
    ):
        said.clear()
        rig.engine.load(ids, ids, **more)
        assert said == want
    said.clear()
    rig.engine.store([1], [1], layerwise=True)
    assert not said
    rig.close()
    gpu.close()


def test_no_copy_spans_two_registrations_and_neighbours_merge_else(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    spec = KVSpec.attention(2, 16, 4, 8, 2)
    rig, gpu = scripted_rig(monkeypatch, folder, "page_first", spec, ring_of(4, 16 * 4096), seed=3, pages=64, slots=64)
    shop = rig.engine._shop
    assert shop.host.slot_bytes == spec.page_bytes, "neighbours are one run"
    cuts = rig.host.address + np.array([7, 8, 40]) * rig.host.slot_bytes
    shop.__dict__["boundaries"] = cuts.astype(np.uint64)
    rows = rig.side.pages(range(64))
    rig.engine.store(range(64), range(64)).result(LIMIT_S)
    rig.engine.load(range(64), range(63, -1, -1)).result(LIMIT_S)
    assert np.array_equal(rig.slots(range(64)), rows) and np.array_equal(rig.side.pages(range(64)), rows[::-1])
    low, high = rig.host.address, rig.host.address + rig.host.payload.numel()
    copies = [(host, n) for batch in gpu.driver.batches for d, s, n in batch for host in (d, s) if low <= host < high]
    assert sum(n for _, n in copies) == 2 * 64 * spec.page_bytes
    assert not any(((start < cuts) & (cuts < start + n)).any() for start, n in copies)
    starts = {start for start, _ in copies}
    assert set(cuts.tolist()) <= starts and len(copies) < 64, "and they are merged up to there"
    plans = [rig.engine.plan(direction, range(64), range(64)) for direction in ("store", "load")]
    lanes = [lane(rig, name) for name in ("copy_out", "copy_in")]
    want = [stream for stream, plan in zip(lanes, plans, strict=True) for _ in plan.chunks]
    assert gpu.driver.let_in == want, "others are let in before each chunk's copies"
    rig.close()
    gpu.close()


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_transfers_over_the_same_pages_end_as_if_they_ran_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Loads, stores and layer-wise stores over few pages and slots, some cancelled late; the last bytes are exact."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", TINY, ring_of(4), seed=seed, pages=12, slots=12, verify=False
    )
    rng = np.random.default_rng()
    for _ in range(12):
        pages, slots = rig.side.pages(range(12)), rig.slots(range(12))
        handles = []
        for _ in range(15):
            n, kind = int(rng.integers(1, 7)), rng.random()
            p, s = rng.permutation(12)[:n], rng.permutation(12)[:n]
            if kind < 0.5:
                handles.append(rig.engine.load(s, p, layerwise=kind < 0.2))
                pages[p] = slots[s]
            else:
                handles.append(rig.engine.store(p, s, layerwise=kind < 0.6))
                slots[s] = pages[p]
                if kind < 0.6:
                    write_all_layers(handles[-1])
        for handle in handles:
            handle.result(LIMIT_S)
        assert np.array_equal(rig.side.pages(range(12)), pages) and np.array_equal(rig.slots(range(12)), slots)
    rig.close()
    gpu.close()


def test_a_transfer_is_not_held_by_the_fences_of_one_behind_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(6), seed=1, pages=64, slots=64)
    scatter, compute = lane(rig, "scatter"), FakeStream(gpu)
    gpu.held |= {scatter, compute.cuda_stream}
    first = rig.engine.load(range(30), range(30))
    until(lambda: on_their_way(first))  # and it has more to submit
    fence = FakeEvent()
    fence.record(compute)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "_fences", lambda *a: ([fence], None))
        second = rig.engine.load(range(30, 40), range(30, 40))
    time.sleep(0.05)
    gpu.held.discard(scatter)
    first.result(LIMIT_S)
    assert not second.done()
    gpu.held.clear()
    second.result(LIMIT_S)
    rig.close()
    gpu.close()


def test_what_never_ran_still_keeps_those_behind_it_in_order(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The third knows of the second only, which was stopped before it began to wait for the first."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(12), seed=1
    )  # slots for all three
    gpu.held.add(lane(rig, "copy_out"))
    rows = rig.side.pages([7])
    first = rig.engine.store([7], [3])
    assert first.await_submitted(LIMIT_S)
    submitter = rig.engine._shop.submitters["load"]

    def refuse(job: object) -> None:
        raise TransferError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(submitter, "give", refuse)
        second = rig.engine.load([3], [9])
        until(lambda: second.failed and second.fully_submitted)
    third = rig.engine.load([3], [11])
    assert third.await_submitted(LIMIT_S)
    time.sleep(0.05)
    gpu.held.clear()
    for handle in (first, third):
        handle.result(LIMIT_S)
    with pytest.raises(TransferError, match="injected"):
        second.result(LIMIT_S)
    assert np.array_equal(rig.side.pages([11]), rows)
    rig.close()
    gpu.close()


@pytest.mark.parametrize("native_rest", [False, True])
def test_a_transfer_of_another_engine_is_submitted_behind_a_job_and_not_behind_its_end(
    native_rest: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """They share the host's slots. The thread that is to say that the job has ended may rest until all has landed."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1, verify=False, native_rest=native_rest
    )
    side, ring = Guarded(rig.rng, Layout.named("sglang.layer_first", TOKEN, 16)), ring_of(4)
    other = TransferEngine(side.pool, rig.host, path="staged", staging_bytes=ring, verify=False)
    shop: Any = other._shop
    shop.lanes.close()
    shop.__class__, shop.lanes = FakeShop, FakeLanes(gpu)
    for memory in (*side.pool.buffers, rig.host.payload, ring.memory):
        shop.lanes.copier.register(memory)
    rows = rig.side.pages([7])
    gpu.held.add(lane(rig, "copy_out"))
    first = rig.engine.store([7], [3])
    second = other.load([3], [5])
    until(lambda: second.fully_submitted)
    assert not first.done()
    gpu.held.clear()
    for handle in (first, second):
        handle.result(LIMIT_S)
    assert np.array_equal(side.pages([5]), rows)
    other.close(timeout_s=LIMIT_S)
    rig.close()
    gpu.close()


def test_who_waits_for_the_end_of_a_job_that_failed_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Until the engine's thread, which may be busy, says what became of it."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1)
    gpu.held.add(lane(rig, "copy_out"))
    handle, wakes = rig.engine.store([7], [3]), itertools.count()
    until(lambda: handle._script is not None and handle._script.job.ended)
    monkeypatch.setattr(handle, "_wake_engine", lambda: next(wakes))
    with rig.engine._shop.lock:
        handle.fail(TransferError("injected"))
        assert not handle.await_submitted(0.2)
    assert next(wakes) < 100, "10 ms each"
    gpu.held.clear()
    rig.engine._pump.wake()
    until(handle.done)
    rig.close()
    gpu.close()


class InterruptedList(list[Any]):
    """As a signal that comes while `append` runs: Python looks at it behind the call."""

    def append(self, item: Any) -> None:
        super().append(item)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("layerwise", "where"), [(False, "listed"), (True, "listed"), (True, "watched")])
def test_an_interrupt_behind_the_list_of_the_engines_thread_leaves_it_to_that(
    layerwise: bool, where: str, again: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Also where that is to begin with this transfer."""
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(12), seed=1, pages=64, slots=64)
    pump: Any = rig.engine._pump
    if again:
        rig.engine.load(range(8), range(8)).result(LIMIT_S)
        until(pump.idle)
        time.sleep(0.01)  # it rests, most likely
    name, rows = "_flight" if layerwise else "_queue", rig.slots(range(8, 16))
    was, watch = getattr(pump, name), pump._rest.watch
    if where == "listed":
        setattr(pump, name, InterruptedList())
    else:

        def interrupted(*arguments: Any) -> None:
            watch(*arguments)
            raise KeyboardInterrupt

        pump._rest.watch = interrupted
    with pytest.raises(KeyboardInterrupt):
        rig.engine.load(range(8, 16), range(8, 16), layerwise=layerwise)
    pump._rest.watch = watch
    until(lambda: not rig.pool.ledger.any_busy(), "the end of a transfer that was listed")
    until(pump.idle)
    setattr(pump, name, was)
    rig.engine.load(range(8, 16), range(8, 16)).result(LIMIT_S)
    assert np.array_equal(rig.side.pages(range(8, 16)), rows)
    rig.close()
    gpu.close()


def test_who_waits_for_all_of_a_job_sleeps_until_its_last_event(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", TOKEN, ring_of(4), seed=1)
    submitter, copies, looks = rig.engine._shop.submitters["load"], itertools.count(), itertools.count()
    real = submitter.await_chunks

    def slow(call: str) -> bool:
        if call == "copy" and next(copies) == 1:  # the digests, behind the last chunk
            time.sleep(0.2)
        return False

    def counted(job: Any, count: int) -> None:
        next(looks)
        real(job, count)

    gpu.refuse = slow
    monkeypatch.setattr(submitter, "await_chunks", counted)
    handle = rig.engine.load(range(4), range(4))
    handle._recorded(lambda: handle.final_event)
    assert next(looks) < 100, "5 ms each"
    handle.result(LIMIT_S)
    rig.close()
    gpu.close()
