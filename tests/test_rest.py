"""Where the engine's thread rests, in Python and in C: what ends a rest, and that nothing is missed."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from driver_helpers import build_driver

from kvtransfer import rest as rest_module
from kvtransfer.dma import CopyEngine, TorchCopyEngine
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.rest import NativeRest, Rest, Watch, build_rest, make_rest
from kvtransfer.submitter import COMMAND_WORDS, Job

ENDED = 3
LIMIT_S = 20.0
FAR_S = 1e6

QUERY = r"""
#include <stdint.h>
volatile int passed[256], failed, calls;
int query(void *event) { calls++; return failed ? 719 : passed[(uint64_t)event] ? 0 : 600; }
"""


class Driver:
    """cuEventQuery, over events that are numbers."""

    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(str(folder / "query.so"))
        self.address = ctypes.cast(self.library.query, ctypes.c_void_p).value or 0
        self.passed = (ctypes.c_int * 256).in_dll(self.library, "passed")

    @property
    def calls(self) -> int:
        return int(ctypes.c_int.in_dll(self.library, "calls").value)

    def reset(self) -> None:
        ctypes.memset(self.passed, 0, ctypes.sizeof(self.passed))
        for name in ("failed", "calls"):
            ctypes.c_int.in_dll(self.library, name).value = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rest")
    (folder / "query.c").write_text(QUERY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "query.so", folder / "query.c"], check=True)
    return folder


@pytest.fixture
def driver(folder: Path) -> Driver:
    made = Driver(folder)
    made.reset()
    return made


@pytest.fixture
def rest(driver: Driver, folder: Path) -> NativeRest:
    return NativeRest(build_rest(folder / "cache"), driver.address)


def new_job() -> Job:
    return Job(np.zeros((1, COMMAND_WORDS), dtype=np.uint64), None)


def watched(rest: NativeRest, job: Job, event: int, until_s: float = FAR_S) -> Watch:
    watch = rest.watch(job, event, until_s, None)
    assert watch is not None
    return watch


def in_a_moment(what: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(0.02, what)
    thread.start()
    return thread


def seconds(what: Callable[[], object]) -> float:
    started = time.monotonic()
    what()
    return time.monotonic() - started


@pytest.mark.parametrize("native", [False, True])
def test_a_rest_ends_when_it_is_woken_or_was_or_its_time_is_up(native: bool, rest: NativeRest) -> None:
    some = rest if native else Rest()
    assert seconds(lambda: some.rest(0.05)) >= 0.05
    some.wake()
    some.wake()
    assert seconds(lambda: some.rest(None)) < LIMIT_S, "woken before it rested"
    assert seconds(lambda: some.rest(0.05)) >= 0.05, "which counts once"
    thread = in_a_moment(some.wake)
    some.rest(None)
    thread.join()
    assert seconds(lambda: some.rest(0)) < 1 and seconds(lambda: some.rest(-1)) < 1


def test_a_watch_is_over_when_its_job_has_ended_and_its_event_has_passed(driver: Driver, rest: NativeRest) -> None:
    job = new_job()
    watch = watched(rest, job, 7)
    driver.passed[7] = 1  # of an earlier record of it, perhaps
    rest.rest(0.01)
    assert not watch.over and driver.calls == 0, "nobody asks the driver before"
    driver.passed[7] = 0
    job._job.state = ENDED
    rest.rest(0.01)
    assert not watch.over and driver.calls
    thread = in_a_moment(lambda: driver.passed.__setitem__(7, 1))
    rest.rest(None)
    thread.join()
    assert watch.over and not rest._watched
    before = driver.calls
    rest.rest(0.01)
    assert driver.calls == before, "it is not looked at any more"


@pytest.mark.parametrize("how", ["failed", "stopped", "the driver fails", "late"])
def test_a_watch_is_over_when_there_is_nothing_more_to_come(how: str, driver: Driver, rest: NativeRest) -> None:
    job = new_job()
    watch = watched(rest, job, 9, time.monotonic() + 0.05 if how == "late" else FAR_S)
    if how == "failed":
        job._job.code = 700
    if how == "stopped":
        job.stop()
    if how == "the driver fails":
        ctypes.c_int.in_dll(driver.library, "failed").value = 1
    if how != "late":
        rest.rest(0.01)
        assert not watch.over, "its job goes on"
        job._job.state = ENDED
    rest.rest(None)
    assert watch.over


def test_who_begins_to_watch_need_not_wake_who_rests(driver: Driver, rest: NativeRest) -> None:
    job = new_job()
    job._job.state, driver.passed[3] = ENDED, 1
    thread = in_a_moment(lambda: watched(rest, job, 3))
    rest.rest(None)
    thread.join()


def test_what_is_forgotten_is_not_looked_at(driver: Driver, rest: NativeRest) -> None:
    jobs = [new_job() for _ in range(3)]
    watches = [watched(rest, job, n) for n, job in enumerate(jobs)]
    for job in jobs:
        job._job.state = ENDED
    rest.forget(watches[1])
    driver.passed[1] = 1
    rest.rest(0.01)
    assert watches[1].over and not watches[0].over and not watches[2].over
    rest.forget(watches[1])  # again, and one that is over
    driver.passed[0] = 1
    rest.rest(None)
    rest.forget(watches[0])
    assert watches[0].over and list(rest._watched.values()) == [watches[2]]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_missed_whoever_begins_ends_and_wakes(seed: int, driver: Driver, rest: NativeRest) -> None:
    """Callers begin watches, a GPU lets events pass, others wake the thread; each watch is found over in the end."""
    rng = random.Random(seed)
    jobs = [new_job() for _ in range(240)]
    begun: list[Watch] = []
    chosen = [rng.random() for _ in jobs]

    def begin(part: int) -> None:
        for n in range(part, len(jobs), 3):
            begun.append(watched(rest, jobs[n], n))
            time.sleep(chosen[n] * 0.0005)

    def gpu() -> None:
        order = list(range(len(jobs)))
        random.Random(seed + 1).shuffle(order)
        for n in order:
            driver.passed[n] = 1
            jobs[n]._job.state = ENDED
            if chosen[n] < 0.2:
                rest.wake()
            time.sleep(0.0002)

    threads = [threading.Thread(target=begin, args=(part,)) for part in range(3)] + [threading.Thread(target=gpu)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT_S
    while len(begun) < len(jobs) or not all(w.over for w in begun):
        assert time.monotonic() < end
        left = [w for w in list(begun) if not w.over]
        if left and rng.random() < 0.05:
            rest.forget(left[0])
        rest.rest(None if rest._watched else 0.001)
    for thread in threads:
        thread.join()
    rest.rest(0)
    assert not rest._watched


def test_a_forked_child_lets_go_of_a_rest_that_is_in_use(driver: Driver, folder: Path) -> None:
    """The parent's thread is in it, and not in the child."""
    rest = NativeRest(build_rest(folder / "cache"), driver.address)
    thread = threading.Thread(target=rest.rest, args=(None,))
    thread.start()
    time.sleep(0.02)
    child = os.fork()
    if not child:
        try:
            rest.__del__()
        finally:
            os._exit(0)
    ended = 0
    end = time.monotonic() + LIMIT_S
    while not ended and time.monotonic() < end:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    rest.wake()
    thread.join()
    assert ended, "it waits for a thread that is not there"


def test_a_list_of_watches_that_grows_while_it_is_read_does_not_end_the_rest(driver: Driver, rest: NativeRest) -> None:
    """A collection lets other threads run, wherever it comes, and they may begin to watch."""
    jobs = [new_job() for _ in range(200)]
    for n in range(100):
        watched(rest, jobs[n], n)
    left = list(range(100, 200))

    def begin(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and left:
            n = left.pop()
            watched(rest, jobs[n], n)

    held = [(n, n) for n in range(5000)]  # pairs that Python keeps for later would set off no collection
    before = gc.get_threshold()
    gc.callbacks.append(begin)
    gc.set_threshold(1)
    assert len(held) == 5000
    try:
        rest.rest(0)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(begin)


def test_without_a_driver_or_a_compiler_python_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake = build_driver(tmp_path_factory.mktemp("driver"))
    fake.library.fake_reset()
    engine = CopyEngine(library=fake.path)
    assert type(make_rest(engine)) is NativeRest

    def no_compiler() -> Path:
        raise ConfigError("no C compiler")

    monkeypatch.setattr(rest_module, "build_rest", no_compiler)
    for some in (make_rest(engine), make_rest(TorchCopyEngine())):
        assert type(some) is Rest
        assert some.watch(new_job(), 1, FAR_S, None) is None, "it has to be looked at"
