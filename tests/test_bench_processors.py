"""Where a busy thread runs beside the one that is timed: pins that end with their block, processors kept awake."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processors
import pytest
from processors import PLACEMENTS, Placement, busy_thread, kept_awake

from kvtransfer.kernels.errors import ConfigError

ALLOWED = sorted(os.sched_getaffinity(0))
BENCH = Path(processors.__file__).parent

# With one, every thread is where it would be pinned to.
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")


@pytest.fixture
def one_processor() -> Iterator[None]:
    """This thread may use no more."""
    os.sched_setaffinity(0, ALLOWED[:1])
    yield
    os.sched_setaffinity(0, ALLOWED)


@pytest.fixture
def waiting() -> Iterator[Callable[[], int]]:
    """Starts a thread that does nothing until the test ends, and gives its native id."""
    over, threads = threading.Event(), list[threading.Thread]()

    def start() -> int:
        threads.append(threading.Thread(target=over.wait))
        threads[-1].start()
        assert threads[-1].native_id is not None
        return threads[-1].native_id

    yield start
    over.set()
    for thread in threads:
        thread.join()


def busy_id() -> int | None:
    """The native id of the busy thread; None: there is none."""
    return next((t.native_id for t in threading.enumerate() if t.name == "busy"), None)


def where(thread: int) -> list[int]:
    return sorted(os.sched_getaffinity(thread))


# -- pins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_threads_are_pinned_while_the_block_lasts(
    placement: Placement, end: type[BaseException] | None, waiting: Callable[[], int]
) -> None:
    other = waiting()
    os.sched_setaffinity(other, ALLOWED[:1])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def block() -> int:
        with busy_thread(placement):
            busy = busy_id()
            assert busy is not None
            meanwhile, pins = waiting(), (where(0), where(busy))
            if placement == "free":
                assert pins == (ALLOWED, ALLOWED)
            else:
                assert [len(pin) for pin in pins] == [1, 1] and pins[0] != pins[1]
                assert set(pins[0] + pins[1]) <= set(ALLOWED)
            assert where(other) == ALLOWED[:1], "it is none of the two"
            if end is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            elif end is not None:
                raise end
        return meanwhile

    try:
        if end is None:
            assert where(block()) == ALLOWED, "what was started meanwhile keeps no pin"
        else:
            with pytest.raises(end):
                block()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert where(0) == ALLOWED and where(other) == ALLOWED[:1] and busy_id() is None


def test_no_placement_is_no_thread() -> None:
    with kept_awake(None) as spinners, busy_thread(None):
        assert spinners == [] and busy_id() is None


# -- refusals ----------------------------------------------------------------------------------------


def test_apart_needs_two_processors(one_processor: None) -> None:
    for start in (busy_thread, kept_awake):
        with pytest.raises(ConfigError, match="expected at least 2 processors"), start("apart"):
            pytest.fail("it began")
    assert busy_id() is None


@pytest.mark.parametrize(
    ("placement", "missing"),
    [("apart", "SCHED_IDLE"), ("apart", "sched_setaffinity")],
)
def test_what_a_system_lacks_is_named(placement: Placement, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, missing)
    for start in (busy_thread, kept_awake):
        with pytest.raises(ConfigError, match=rf"{placement}: expected os\.{missing}, .* use free"), start(placement):
            pytest.fail("it began")
        with start("free"):
            pass
    assert busy_id() is None


# -- processors that are kept awake ------------------------------------------------------------------


def gone(pid: int) -> bool:
    """Ended and reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_a_spinner_on_each_processor_takes_what_nothing_else_wants(end: type[BaseException] | None) -> None:
    spinners: list[int] = []

    def block() -> None:
        with kept_awake("apart") as made:
            spinners.extend(made)
            assert [where(pid) for pid in made] == [[processor] for processor in ALLOWED]
            for pid in made:
                assert os.sched_getscheduler(pid) == os.SCHED_IDLE
                assert os.getpgid(pid) == pid, "a terminal's Ctrl-C is not for it"
                assert os.getsid(pid) == os.getsid(0), "idle beside us, not beside us in a group of its own"
            if end is not None:
                raise end

    if end is None:
        block()
    else:
        with pytest.raises(end):
            block()
    assert len(spinners) == len(ALLOWED) and all(map(gone, spinners))


def test_free_threads_keep_nothing_awake() -> None:
    with kept_awake("free") as spinners:
        assert spinners == []


def test_a_spinner_that_cant_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    last = f"if sys.argv[1] == '{ALLOWED[-1]}': raise OSError('no such policy')\n"
    monkeypatch.setattr(
        processors, "SPINNER", processors.SPINNER.replace("os.sched_setscheduler", f"{last}os.sched_setscheduler")
    )
    started: list[int] = []

    def popen(*args: Any, **more: Any) -> Any:
        made = subprocess.Popen(*args, **more)
        started.append(made.pid)
        return made

    monkeypatch.setattr(processors, "Popen", popen)
    with pytest.raises(ConfigError, match="got OSError: no such policy"), kept_awake("apart"):
        pytest.fail("it began")
    assert len(started) == len(ALLOWED) and all(map(gone, started))


def test_spinners_end_with_a_parent_that_was_killed() -> None:
    code = """
from processors import kept_awake
with kept_awake("apart") as spinners:
    print(*spinners, flush=True)
    input()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCH), str(BENCH.parent)])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    ends = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    assert len(ends) == len(ALLOWED)
    for end in ends:
        assert select.select([end], [], [], 30)[0], "it spins on"
        os.close(end)
