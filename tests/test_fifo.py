"""The CPU stand-in for streams: order, events, gates, errors, and an end to every wait."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvtransfer.fifo import Delays, FifoEvent, FifoStream
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, TransferError

LIMIT_S = 20.0


def fail(text: str) -> None:
    raise ValueError(text)


def test_closures_run_in_order_on_one_thread_of_their_own() -> None:
    seen: list[tuple[int, int]] = []
    with FifoStream("order") as stream:
        for i in range(500):
            stream.submit(lambda i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
        stream.synchronize(LIMIT_S)
        assert [i for i, _ in seen] == list(range(500))
        assert len({thread for _, thread in seen}) == 1 and seen[0][1] != threading.get_ident()
        assert stream.query()


def test_submitting_does_not_wait() -> None:
    delays = Delays()
    gate = delays.gate("slow")
    with FifoStream("a", delays) as stream:
        stream.submit(lambda: None, "slow")
        event = stream.record()
        assert not event.query() and not stream.query()
        assert event.synchronize(0.02) is False
        gate.set()
        assert event.synchronize(LIMIT_S) is True
        assert event.query() and event.error is None


def test_an_idle_stream_records_at_once_and_starts_no_thread() -> None:
    before = threading.active_count()
    with FifoStream("idle") as stream:
        event = stream.record()
        assert event.query() and event.recorded
        stream.wait(event)  # already passed
        assert threading.active_count() <= before


def test_a_wait_holds_the_stream_and_not_the_caller() -> None:
    delays, seen = Delays(), []
    gate = delays.gate("copy")
    with FifoStream("copy", delays) as copy, FifoStream("compute", delays) as compute:
        copy.submit(lambda: seen.append("copied"), "copy layers 0-3")
        compute.submit(lambda: seen.append("before"), "compute")
        compute.wait(copy.record())
        compute.submit(lambda: seen.append("after"), "compute")
        later = compute.record()
        assert not later.synchronize(0.05)
        assert seen == ["before"]
        gate.set()
        assert later.synchronize(LIMIT_S)
        assert seen == ["before", "copied", "after"]


def test_without_the_wait_the_order_would_be_wrong() -> None:
    """The stand-in must be able to show a missing fence."""
    delays, seen = Delays(), []
    gate = delays.gate("copy")
    with FifoStream("copy", delays) as copy, FifoStream("compute", delays) as compute:
        copy.submit(lambda: seen.append("copied"), "copy")
        compute.submit(lambda: seen.append("read"), "compute")
        compute.synchronize(LIMIT_S)
        gate.set()
        copy.synchronize(LIMIT_S)
    assert seen == ["read", "copied"]


def test_waiting_for_a_never_recorded_event_raises() -> None:
    event = FifoEvent()
    with FifoStream() as stream:
        with pytest.raises(TransferError, match="never recorded"):
            stream.wait(event)
        with pytest.raises(TransferError, match="never"):
            event.synchronize()
        assert not event.query() and not event.recorded and event.error is None
        assert event.synchronize(0.01) is False


def test_an_event_may_be_recorded_by_another_thread_while_one_waits() -> None:
    event = FifoEvent()
    with FifoStream() as stream:
        timer = threading.Timer(0.05, lambda: stream.record(event))
        timer.start()
        assert event.synchronize(LIMIT_S) is True
        timer.join()
        with pytest.raises(TransferError, match="recorded once"):
            stream.record(event)


def test_an_event_covers_what_was_submitted_before_it_only() -> None:
    delays = Delays()
    gate = delays.gate("late")
    with FifoStream("a", delays) as stream:
        stream.submit(lambda: None, "early")
        event = stream.record()
        stream.submit(lambda: None, "late")
        assert event.synchronize(LIMIT_S)
        assert not stream.query()
        gate.set()


def test_delays_take_the_longest_prefix_and_may_be_callable() -> None:
    short = Delays({"copy": 0.0, "copy layer 3": 0.08, "compute": 5.0})
    started = time.monotonic()
    for label in ("copy layer 2", "scatter", ""):
        short.before(label)
    assert time.monotonic() - started < 0.05
    short.before("copy layer 3")
    assert time.monotonic() - started >= 0.08
    short.clear("compute")
    short.before("compute")
    asked: list[str] = []
    by_call = Delays(lambda label: asked.append(label))
    with FifoStream("a", by_call) as stream:
        for label in ("x", "y"):
            stream.submit(lambda: None, label)
        stream.record()
    assert asked == ["x", "y"]


def test_a_gate_that_stays_shut_fails_the_closure() -> None:
    ran: list[int] = []
    delays = Delays({"copy": threading.Event()}, gate_timeout_s=0.05)
    with FifoStream("a", delays) as stream:
        stream.submit(lambda: ran.append(1), "copy")
        with pytest.raises(TransferError, match="stayed shut"):
            stream.synchronize(LIMIT_S)
        assert not ran


def test_an_error_stays_with_the_stream_and_its_later_events() -> None:
    ran: list[str] = []
    with FifoStream("bad") as stream:
        delays = threading.Event()
        stream.submit(delays.wait)
        before = stream.record()
        stream.submit(lambda: fail("broken"), "scatter layer 2")
        stream.submit(lambda: ran.append("skipped"))
        after = stream.record()
        delays.set()
        assert before.synchronize(LIMIT_S) and before.error is None
        with pytest.raises(TransferError, match=r"'bad' failed in 'scatter layer 2'.*broken") as caught:
            after.synchronize(LIMIT_S)
        assert isinstance(caught.value.__cause__, ValueError)
        assert after.query() and isinstance(after.error, ValueError)
        with pytest.raises(TransferError, match="broken"):
            stream.synchronize(LIMIT_S)
        assert not ran
        assert isinstance(stream.record().error, ValueError)
        assert isinstance(stream.take_error(LIMIT_S), ValueError)
        assert stream.take_error(LIMIT_S) is None
        stream.submit(lambda: ran.append("again"))
        stream.synchronize(LIMIT_S)
        assert ran == ["again"]


def test_an_error_reaches_streams_that_wait_for_it() -> None:
    ran: list[str] = []
    first, second, third = (FifoStream(name) for name in ("first", "second", "third"))
    first.submit(lambda: fail("broken"))
    second.wait(first.record())
    second.submit(lambda: ran.append("second"))
    third.wait(second.record())
    third.submit(lambda: ran.append("third"))
    with pytest.raises(TransferError, match="'first' failed"):
        third.synchronize(LIMIT_S)
    assert not ran
    for stream in (first, second, third):
        stream.close()  # the error was seen: closing does not raise it again


def test_a_passed_event_with_an_error_still_poisons() -> None:
    with FifoStream("a") as a, FifoStream("b") as b:
        a.submit(lambda: fail("broken"))
        event = a.record()
        while not event.query():
            time.sleep(0.001)
        b.wait(event)
        with pytest.raises(TransferError, match="broken"):
            b.synchronize(LIMIT_S)


def test_closing_tells_an_error_that_nobody_saw() -> None:
    stream = FifoStream("quiet")
    stream.submit(lambda: fail("broken"))
    with pytest.raises(TransferError, match="broken"):
        stream.close()
    stream.close()


def test_an_exit_in_a_closure_does_not_end_the_thread() -> None:
    with FifoStream() as stream:
        stream.submit(lambda: sys.exit(3))
        assert isinstance(stream.take_error(LIMIT_S), SystemExit)
        stream.submit(lambda: None)
        stream.synchronize(LIMIT_S)


def test_close_drains_and_then_refuses() -> None:
    ran: list[int] = []
    stream = FifoStream("a", Delays({"slow": 0.01}))
    for i in range(10):
        stream.submit(lambda i=i: ran.append(i), "slow")  # type: ignore[misc]
    event = stream.record()
    stream.close()
    assert ran == list(range(10)) and event.query()
    for call in (lambda: stream.submit(lambda: None), stream.record, lambda: stream.wait(FifoEvent())):
        with pytest.raises(TransferError, match=r"closed|never recorded"):
            call()
    stream.close()
    stream.synchronize(LIMIT_S)


def test_waits_have_an_end() -> None:
    delays = Delays()
    gate = delays.gate("held")
    stream = FifoStream("stuck", delays)
    stream.submit(lambda: None, "held")
    with pytest.raises(DeadlineExceeded, match=r"'stuck' still had 1 steps after 0\.05 s"):
        stream.synchronize(0.05)
    with pytest.raises(DeadlineExceeded, match="close"):
        stream.close(0.05)
    gate.set()
    stream.close()


def test_a_closure_may_submit_but_not_wait_for_its_own_stream() -> None:
    ran: list[int] = []
    with FifoStream() as stream:
        stream.submit(lambda: stream.submit(lambda: ran.append(1)))
        stream.synchronize(LIMIT_S)
        stream.synchronize(LIMIT_S)
        assert ran == [1]
        stream.submit(stream.synchronize)
        with pytest.raises(TransferError, match="can't wait for itself"):
            stream.synchronize(LIMIT_S)


def test_many_streams_against_a_model_of_the_order() -> None:
    """Random work and waits on 12 streams: every closure sees all that was ordered before it."""
    rng = random.Random(7)
    streams = [FifoStream(f"s{i}", Delays(lambda label: rng.random() * 2e-4)) for i in range(12)]
    done: set[int] = set()
    wrong: list[tuple[int, set[int]]] = []
    known: list[set[int]] = [set() for _ in streams]

    def body(number: int, needed: frozenset[int]) -> None:
        if not needed <= done:
            wrong.append((number, set(needed - done)))
        done.add(number)

    for number in range(400):
        at = rng.randrange(12)
        if rng.random() < 0.5:
            other = rng.randrange(12)
            streams[at].wait(streams[other].record())
            known[at] |= known[other]
        streams[at].submit(lambda n=number, k=frozenset(known[at]): body(n, k), f"work {number}")  # type: ignore[misc]
        known[at].add(number)
    for stream in streams:
        stream.close()
    assert not wrong and len(done) == 400


def test_many_threads_submit_to_one_stream() -> None:
    seen: list[tuple[int, int]] = []
    with FifoStream() as stream:

        def body(who: int) -> None:
            for i in range(200):
                stream.submit(lambda: seen.append((who, i)))  # noqa: B023
                stream.record().synchronize(LIMIT_S)

        threads = [threading.Thread(target=body, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 800
    for who in range(4):
        assert [i for w, i in seen if w == who] == list(range(200))


def test_a_forgotten_stream_finishes_its_work_and_ends() -> None:
    ran: list[int] = []
    stream = FifoStream("forgotten", Delays({"slow": 0.02}))
    stream.submit(lambda: ran.append(1), "slow")
    event, reference = stream.record(), weakref.ref(stream)
    del stream
    gc.collect()
    assert reference() is None
    assert event.synchronize(LIMIT_S) and ran == [1]
    deadline = time.monotonic() + LIMIT_S
    while any(thread.name == "kvtransfer-forgotten" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_interpreter_ends_while_a_stream_is_held() -> None:
    code = """
import threading
from kvtransfer.fifo import Delays, FifoStream
stream = FifoStream("held", Delays({"": threading.Event()}))
stream.submit(lambda: None)
other = FifoStream("other"); other.wait(stream.record())
print("end")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "end"), result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_is_told() -> None:
    stream = FifoStream("parent")
    stream.submit(lambda: None)
    stream.synchronize(LIMIT_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            stream.submit(lambda: None)
        except ConfigError:
            del stream
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.close()
