"""The engine's thread: it acknowledges unasked, survives every error, keeps its order, and ends when it should."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    LIMIT_S,
    RING_SLOTS,
    TINY,
    TOKEN,
    WIDE,
    Guarded,
    Log,
    Rig,
    Steps,
    fresh,
    make_host,
    make_rig,
    staged,
    until,
    write_all_layers,
)

from kvtransfer import engine as engine_module
from kvtransfer import lanes as lanes_module
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays
from kvtransfer.handles import PageState, TransferHandle
from kvtransfer.host_transfer import HostTransfer
from kvtransfer.kernels.errors import DeadlineExceeded, TransferCancelled, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.lanes import CpuLanes
from kvtransfer.rest import Rest
from kvtransfer.staging import StagingRing

Hooked = list[BaseException | None]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    """What reached `threading.excepthook`: bugs of subscribers are reported there."""
    seen: Hooked = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    return seen


def thread_of(rig: Rig) -> threading.Thread | None:
    return rig.engine._pump._thread


def works(rig: Rig) -> bool:
    """Whether the engine still carries bytes."""
    rig.engine.store([14], [15]).result(LIMIT_S)  # first, since a failed store may have torn the slot
    rows = rig.slots([15])
    rig.engine.load([15], [15]).result(LIMIT_S)
    return np.array_equal(rig.side.pages([15]), rows) and np.array_equal(rig.side.pages([14]), rows)


# -- acknowledging ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
def test_transfers_are_acknowledged_although_nobody_asks(engine: dict[str, Any]) -> None:
    log = Log()
    rig = make_rig("page_first", TOKEN, pages=300, slots=300, observer=log, **engine)
    want = rig.side.pages(range(300))
    for i in range(300):
        rig.engine.store([i], [299 - i])  # the handles are dropped
    until(lambda: len(log.ended) == 300)
    assert all(ok for _, ok in log.ended) and len({number for number, _ in log.ended}) == 300
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    assert np.array_equal(rig.slots(range(299, -1, -1)), want) and rig.host.digests.any(axis=1).all()
    rig.close()


def test_a_caller_that_only_polls_gets_there() -> None:
    rig = make_rig()
    handles = [rig.engine.store([i % 16], [i % 16]) for i in range(64)]
    polls = 0
    while not all(h.done() for h in handles):  # no sleep: a busy thread must not starve the engine's
        polls += 1
        assert polls < 10**8
    rig.close()


def test_the_thread_starts_with_the_first_transfer_and_sleeps_between_them() -> None:
    rig = make_rig()
    assert thread_of(rig) is None
    rig.engine.load([1], [1]).result(LIMIT_S)
    thread = thread_of(rig)
    rig.engine.load([1], [1]).result(LIMIT_S)
    assert thread is not None and thread_of(rig) is thread and thread.is_alive()
    rig.close()
    assert not thread.is_alive()


# -- order -----------------------------------------------------------------------------------------


def test_the_queue_is_worked_off_in_order() -> None:
    log = Log()
    rig = make_rig("page_first", WIDE, pages=32, slots=32, observer=log, **staged())
    handles = [rig.engine.load([i], [i]) for i in range(32)]
    for handle in handles:
        handle.result(LIMIT_S)
    numbers = [number for number, *_ in log.stages]
    assert numbers == sorted(numbers) and [n for n, _ in log.ended] == [h.number for h in handles]
    rig.close()


def test_no_more_than_the_ring_holds_is_under_way() -> None:
    log, steps = Log(), Steps()
    gate = steps.gate("scatter", 0)
    rig = make_rig("page_first", WIDE, delays=Delays(steps), observer=log, **staged())
    handle = rig.engine.load(range(8), range(8))
    until(lambda: len(log.stages) == 2 * RING_SLOTS)  # copy and scatter of a chunk a slot
    with pytest.raises(DeadlineExceeded):
        handle.result(0.02)
    assert len(log.stages) == 2 * RING_SLOTS and not handle.fully_submitted
    gate.set()
    handle.result(LIMIT_S)
    rig.close()


# -- errors ----------------------------------------------------------------------------------------


def test_callbacks_that_raise_are_reported_and_harm_nobody(hooked: Hooked) -> None:
    delays = Delays()
    gate = delays.gate("copy_in")
    rig = make_rig(delays=delays)
    handle = rig.engine.load([1], [1])
    seen: list[TransferHandle] = []

    def bug(_: TransferHandle) -> None:
        raise ValueError("a subscriber's bug")

    for fn in (bug, seen.append, bug):
        handle.add_done_callback(fn)
    gate.set()
    handle.result(LIMIT_S)
    until(lambda: len(hooked) == 2)
    assert seen == [handle] and all(isinstance(e, ValueError) for e in hooked)
    assert works(rig)
    rig.close()


@pytest.mark.parametrize("method", ["submitted", "finished", "noted"])
def test_observers_that_raise_do_not_stop_the_thread(method: str, hooked: Hooked) -> None:
    class Buggy(Log):
        armed = False  # an engine that is made may have something to note

    def bug(self: Buggy, *args: Any, **kwargs: Any) -> None:
        if self.armed:
            raise ValueError("a subscriber's bug")

    setattr(Buggy, method, bug)
    observer = Buggy()
    rig = make_rig(observer=observer, **staged())
    rig.fill_slots([1])
    observer.armed = True
    rig.host.payload.view(-1, rig.host.slot_bytes)[1, 0] ^= 1  # something to be noted
    handle = rig.engine.load([1], [2])
    with pytest.raises(TransferError):
        handle.result(LIMIT_S)
    until(lambda: bool(hooked) or method != "finished")
    observer.armed = False
    assert not rig.pool.ledger.any_busy() and works(rig)
    rig.close()


@pytest.mark.parametrize("where", ["settle", "record", "prepare", "start"])
@pytest.mark.parametrize("kind", ["bulk", "layerwise load", "layerwise store"])
def test_errors_in_the_engines_own_steps_end_the_transfer(
    where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(**staged())

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(CpuLanes if where == "record" else HostTransfer, where, refuse)
        if kind == "layerwise store":
            handle = rig.engine.store([1], [2], layerwise=True)
            write_all_layers(handle)
        else:
            handle = rig.engine.load([1], [2], layerwise=kind != "bulk")
        with pytest.raises(TransferError, match="injected"):
            handle.result(LIMIT_S)
    assert handle.done() and not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    assert works(rig)
    rig.close()


def test_every_transfer_is_acknowledged_whatever_fails(monkeypatch: pytest.MonkeyPatch, hooked: Hooked) -> None:
    """Random errors in steps and callbacks, cancels and short deadlines: all end, pages come free, others are exact."""
    rng = random.Random()
    rig = make_rig("sglang.layer_first", TINY, **staged())
    second = TransferEngine(rig.pool, rig.host)
    real = lanes_module.run_on_cpu
    errors = [OSError("EIO"), RuntimeError("lost"), TimeoutError("late"), ValueError("size")]

    def maybe(task: Any) -> None:
        if rng.random() < 0.2:
            raise rng.choice(errors)
        real(task)

    def bug(_: TransferHandle) -> None:
        raise ValueError("a subscriber's bug")

    monkeypatch.setattr(lanes_module, "run_on_cpu", maybe)
    handles = []
    for _ in range(400):
        engine = rng.choice([rig.engine, second])
        pages, slots = rng.sample(range(16), 3), rng.sample(range(16), 3)
        layerwise, deadline_s = rng.random() < 0.3, rng.choice([LIMIT_S, LIMIT_S, LIMIT_S, 0.0005])
        if rng.random() < 0.5:
            handle = engine.load(slots, pages, layerwise=layerwise, deadline_s=deadline_s)
        else:
            handle = engine.store(pages, slots, layerwise=layerwise, deadline_s=deadline_s)
            if layerwise:
                write_all_layers(handle)
        if rng.random() < 0.1:
            handle.cancel()
        if rng.random() < 0.1:
            with contextlib.suppress(ValueError):  # of one that has ended, it is raised here
                handle.add_done_callback(bug)
        handles.append(handle)
    ends = {"ok": 0, "failed": 0}
    for handle in handles:
        try:
            handle.result(LIMIT_S)
            assert (handle.states() == PageState.DONE).all()
            ends["ok"] += 1
        except TransferError as error:
            assert not isinstance(error, DeadlineExceeded) or handle.deadline_s < 1, "nothing may hang"
            ends["failed"] += 1
    until(lambda: all(h.done() for h in handles))
    assert min(ends.values()) > 10
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    monkeypatch.undo()
    assert works(rig) and all(isinstance(e, ValueError) for e in hooked)
    second.close()
    rig.close()


# -- the end ---------------------------------------------------------------------------------------


def test_closing_waits_for_what_is_under_way() -> None:
    delays = Delays()
    gate = delays.gate("copy")
    rig = make_rig(delays=delays, **staged())
    want = rig.slots(range(8))
    handles = [rig.engine.load([i], [i]) for i in range(8)]
    closer = threading.Thread(target=rig.engine.close)
    closer.start()
    until(lambda: rig.engine._closed)
    with pytest.raises(TransferError, match="the engine is closed"):
        rig.engine.load([9], [9])
    assert not any(h.done() for h in handles)
    gate.set()
    closer.join(LIMIT_S)
    assert all(h.done() for h in handles) and np.array_equal(rig.side.pages(range(8)), want)
    assert rig.engine.close() == [] and rig.engine.close(drain=False) == []  # again is nothing
    rig.close()


def test_closing_without_draining_drops_what_was_not_submitted_and_says_so() -> None:
    delays = Delays()
    gate = delays.gate("copy_in")
    rig = make_rig("page_first", WIDE, delays=delays, **staged())
    before, want = rig.side.pages(range(16)), rig.slots(range(16))
    handles = [rig.engine.load([2 * i, 2 * i + 1], [2 * i, 2 * i + 1]) for i in range(4)]
    store = rig.engine.store([8], [8], layerwise=True)
    until(lambda: handles[0].states().any())
    dropped: list[TransferHandle] = []
    closer = threading.Thread(target=lambda: dropped.extend(rig.engine.close(drain=False)))
    closer.start()
    until(lambda: all(h.cancelled for h in handles))
    gate.set()
    closer.join(LIMIT_S)
    assert dropped == [*handles, store] or dropped == [store, *handles]
    for handle in dropped:
        with pytest.raises(TransferCancelled):
            handle.result(0)
    states = np.concatenate([h.states() for h in handles])
    now = rig.side.pages(range(16))[:8]
    assert states[0] != PageState.UNTOUCHED and (states[2:] == PageState.UNTOUCHED).all()
    assert np.array_equal(now[states == PageState.UNTOUCHED], before[:8][states == PageState.UNTOUCHED])
    assert np.array_equal(now[states == PageState.DONE], want[:8][states == PageState.DONE])
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()


def test_closing_that_takes_too_long_raises_and_can_be_tried_again() -> None:
    delays = Delays()
    gate = delays.gate("copy_in")
    rig = make_rig(delays=delays)
    handle = rig.engine.load([1], [1])
    thread = thread_of(rig)
    assert thread is not None
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"close: 1 transfers had not ended after 0\.01 s"):
            rig.engine.close(timeout_s=0.01)
    gate.set()
    assert rig.engine.close(timeout_s=LIMIT_S) == [] and handle.done() and not thread.is_alive()
    rig.close()


def test_a_with_block_drains_or_on_an_error_cancels() -> None:
    rig = make_rig()
    with TransferEngine(rig.pool, rig.host) as engine:
        good = engine.load([1], [1])
    assert good.done() and good.result(0).pages == 1
    with pytest.raises(KeyError), TransferEngine(rig.pool, rig.host) as engine:
        bad = engine.store([1], [2], layerwise=True)
        raise KeyError
    with pytest.raises(TransferCancelled):
        bad.result(0)
    rig.close()


def test_an_engine_may_be_closed_by_its_last_callback() -> None:
    rig = make_rig()
    closed: list[Any] = []
    rig.engine.load([1], [1]).add_done_callback(lambda h: closed.append(rig.engine.close(timeout_s=LIMIT_S)))
    until(lambda: closed == [[]])
    thread = thread_of(rig)
    until(lambda: thread is not None and not thread.is_alive())
    rig.close()


def test_a_dropped_engine_ends_its_thread_and_lets_go_of_the_pool() -> None:
    rng = fresh()
    host = make_host(rng, TINY, 4)
    side = Guarded(rng, Layout.page_first(TINY, 4), name="dropped")
    delays = Delays()
    gate = delays.gate("copy_out")
    engine = TransferEngine(side.pool, host, delays=delays)
    want = side.pages([1, 2])
    handle = engine.store([1, 2], [0, 3])
    pool, buffer = weakref.ref(side.pool), weakref.ref(side.pool.buffers[0])
    del engine, side
    gc.collect()
    gate.set()  # what was under way is finished all the same
    handle.result(LIMIT_S)
    rows = host.payload.numpy().reshape(-1, host.slot_bytes)
    assert np.array_equal(rows[[0, 3], : TINY.page_bytes], want)
    del handle

    def gone() -> bool:
        gc.collect()
        return pool() is None and buffer() is None and not any("dropped" in t.name for t in threading.enumerate())

    until(gone)
    host.close()


# -- many ------------------------------------------------------------------------------------------


def test_many_engines_and_pools_live_side_by_side() -> None:
    names = ["page_first", "sglang.layer_first", "vllm.LBNHC", "transformers"]
    rigs = [make_rig(name, TINY, **kw) for name in names for kw in ({}, staged())]
    wants = [rig.side.pages(range(16)) for rig in rigs]
    handles = [rig.engine.store(range(16), range(15, -1, -1)) for rig in rigs]
    for rig, want, handle in zip(rigs, wants, handles, strict=True):
        handle.result(LIMIT_S)
        assert np.array_equal(rig.slots(range(15, -1, -1)), want)
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("engine", [{}, staged()])
def test_sixty_four_transfers_of_eight_threads(engine: dict[str, Any]) -> None:
    rig = make_rig("sglang.layer_first", TINY, pages=64, slots=64, **engine)
    slots = rig.rng.permutation(64)
    want, start, errors = rig.slots(slots), threading.Barrier(8), list[BaseException]()

    def work(thread: int) -> None:
        try:
            start.wait(LIMIT_S)
            handles = [rig.engine.load(slots[p : p + 1], [p], layerwise=bool(p % 3 == 0)) for p in range(thread, 64, 8)]
            for handle in handles:
                handle.wait_layer(2)
                handle.result(LIMIT_S)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not errors and np.array_equal(rig.side.pages(range(64)), want)
    rig.close()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_wants_to_end_the_thread_does_not(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    rig = make_rig()

    def raises(_: object) -> None:
        raise kind("from a callback")

    rig.engine.load([1], [1]).add_done_callback(raises)
    until(lambda: seen == [kind])
    assert works(rig)
    rig.close()


ENDING = """
import atexit, sys, threading
from pathlib import Path

def last():  # registered first, it is called last
    alive = [t.name for t in threading.enumerate() if t.name == "kvtransfer-pool"]
    try:
        handle.result(5)
        print("a result")
    except Exception as error:
        print(alive, type(error).__name__, error)

atexit.register(last)
sys.path[:0] = sys.argv[1:]
from engine_helpers import TINY, make_rig
from kvtransfer.fifo import Delays

gate = threading.Event()  # stays shut
rig = make_rig("sglang.layer_first", TINY, path="staged", pages=20, slots=20, delays=Delays({"copy": gate}))
handle = rig.engine.load(range(10), range(10))
before = [t.name for t in threading.enumerate()]
assert "kvtransfer-pool" in before, before
END
"""


def ends(text: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that runs ``text``."""
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", text, str(here.parent), str(here)],
        capture_output=True, text=True, timeout=LIMIT_S * 3, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2), ("1 / 0", 1)])
def test_the_thread_ends_before_the_interpreter(end: str, code: int) -> None:
    """However it ends, with transfers on their way; who waits even then is told, and does not hang."""
    done = ends(ENDING.replace("END", end))
    assert done.stdout.strip() == "[] DeadlineExceeded the interpreter ended before the transfer did", done.stderr
    assert done.returncode in (code, 130 if code == -2 else code), done.stderr


LATE = """
import atexit, sys, threading, time

def last():  # registered first, it is called last
    begun = time.monotonic()
    for work in (cancelled.result, queued.result, rig.engine.close, done.result, other.engine.close):
        try:
            work()
            print("no error")
        except Exception as error:
            print(type(error).__name__, error)
    print(time.monotonic() - begun < 4)

atexit.register(last)
sys.path[:0] = sys.argv[1:]
from engine_helpers import make_rig, staged
from kvtransfer.fifo import Delays
from kvtransfer.kernels.errors import TransferCancelled

gate = threading.Event()  # stays shut
rig, other = make_rig(delays=Delays({"copy": gate}), **staged()), make_rig()
done = other.engine.load([1], [1])
done.result(5)
cancelled, queued = (rig.engine.load(range(10), range(10)) for _ in range(2))
cancelled.fail(TransferCancelled("cancelled"))
"""


def test_who_waits_behind_the_end_is_told_at_once() -> None:
    done = ends(LATE)
    assert done.stdout.splitlines() == [
        "TransferCancelled cancelled",
        "DeadlineExceeded the interpreter ended before the transfer did",
        "DeadlineExceeded close: 2 transfers had not ended with the interpreter",
        "no error",
        "no error",
        "True",
    ], done.stderr  # fmt: skip
    assert done.returncode == 0


BUSY = """
import os, sys, threading
sys.path[:0] = sys.argv[1:]
import numpy as np
from engine_helpers import make_rig
from kvtransfer.kernels.spec import KVSpec

rig = make_rig("sglang.layer_first", KVSpec.attention(9, 16, 8, 128, 2), pages=200, slots=200)
ids = np.arange(100)
under_way = [rig.engine.load(ids, ids, layerwise=bool(i % 2)) for i in range(8)]
under_way.append(rig.engine.store(ids + 100, ids + 100))
assert not under_way[-1].done()
sys.exit(3)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_lanes_on_the_cpu_end_before_the_interpreter(attempt: int) -> None:
    """They are in PyTorch's C++ most of the time: ended there they abort the process."""
    done = ends(BUSY)
    assert done.returncode == 3, done.stderr


FORKED = """
import os, sys, threading, time
sys.path[:0] = sys.argv[1:]
from engine_helpers import make_rig

rig = make_rig()
rig.engine.load([1], [1]).result(5)
held = [threading.Thread(target=lambda c=c: (c.acquire(), time.sleep(60)), daemon=True)
        for c in (rig.engine._pump._changed, *(s._lane.changed for s in rig.engine._shop.lanes.streams.values()))]
for thread in held:
    thread.start()
time.sleep(0.1)
child = os.fork()
if not child:
    sys.exit(7)
end = time.monotonic() + 10
while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
    time.sleep(0.01)
if found == (0, 0):
    os.kill(child, 9)
print(os.waitstatus_to_exitcode(found[1]), flush=True)
os._exit(0)
"""


def test_a_forked_child_ends_whatever_its_parents_threads_hold() -> None:
    done = ends(FORKED)
    assert done.stdout.strip() == "7", done.stderr


@pytest.mark.parametrize("shared", [False, True])
def test_the_thread_of_an_engine_on_a_shared_ring_looks_after_its_slots(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for them: it must not rest until all has landed."""
    made = Rest()
    monkeypatch.setattr(engine_module, "make_rest", lambda copier: made)
    ring = StagingRing(torch.device("cpu"), 1 << 20)
    rig = make_rig("page_first", path="staged", staging_bytes=ring if shared else 1 << 20)
    assert (rig.engine._pump._rest is made) is not shared
    rig.close()
