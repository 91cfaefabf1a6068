"""Processors: where a Python thread that never rests runs beside the one that is timed, so that figures repeat.

Each call of PyTorch gives the interpreter lock away for microseconds. Whether the busy thread takes it meanwhile, and
keeps it for the switch interval (5 ms), depends on how fast its processor wakes up: one that has halted takes longer
than the call. A `Placement` says what is done about that:

free       nothing: both threads run where the system puts them. What a call costs changes from second to second
apart      a processor for each, and all processors are kept awake: a call costs about one turn of the busy thread

Both on one processor were tried too: calls cost nothing then, but a turn of any third thread let the forward wait for
40 ms, since the busy one has the processor by the time that the forward may go on.

Only the two threads are pinned. Those that the calling thread starts meanwhile inherit its processor until the end, so
whatever starts threads is run once before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import PIPE, Popen
from typing import Literal, get_args

from kvtransfer.kernels.errors import ConfigError

Placement = Literal["free", "apart"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
NEEDS = {"free": (), "apart": ("sched_setaffinity", "SCHED_IDLE")}  # of `os`

# Arguments: its processor, the process whose child it is. Says so once it runs as it should.
SPINNER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("awake", flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""


def beside_text(placement: Placement | None) -> str:
    """What a name ends with: ", busy apart", or nothing where there is no such thread."""
    return "" if placement is None else f", busy {placement}"


def _check(placement: Placement) -> None:
    """ConfigError where this system can't do that, or this process has too few processors."""
    missing = [f"os.{name}" for name in NEEDS[placement] if not hasattr(os, name)]
    if missing:
        raise ConfigError(f"placement {placement}: expected {', '.join(missing)}, which Linux has; use free")
    if placement == "apart" and len(os.sched_getaffinity(0)) < 2:
        raise ConfigError("placement apart: expected at least 2 processors that this process may use, got 1; use free")


@contextmanager
def kept_awake(placement: Placement | None) -> Iterator[list[int]]:
    """No processor of this process halts meanwhile, where ``placement`` asks for that: on each a child process spins
    that takes only what nothing else wants. Yields their ids; they are gone behind the block, and soon after the end of
    this process if that is killed. Starting them takes up to a second, so it is done once for many rounds.

    Raises ConfigError where they can't run."""
    if placement is not None:
        _check(placement)
    spinners: list[Popen[str]] = []
    try:
        for processor in sorted(os.sched_getaffinity(0)) if placement == "apart" else ():
            words = [sys.executable, "-S", "-E", "-c", SPINNER, str(processor), str(os.getpid())]
            # A process group: a terminal's Ctrl-C is not for them. No session: in one of their own (autogroups) they
            # would get as much of a processor as all threads of this one.
            spinners.append(Popen(words, stdout=PIPE, stderr=PIPE, text=True, process_group=0))
        for spinner in spinners:
            assert spinner.stdout is not None and spinner.stderr is not None
            if spinner.stdout.readline() != "awake\n":  # it has ended
                why = spinner.stderr.read().strip().rpartition("\n")[2]
                raise ConfigError(f"placement {placement}: expected an idle process on each processor, got {why}")
        yield [spinner.pid for spinner in spinners]
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.communicate()


@contextmanager
def busy_thread(placement: Placement | None) -> Iterator[None]:
    """Beside a Python thread that computes without a pause, it and the caller on processors as ``placement`` says;
    None: without one. The caller's processors are its own again behind the block.

    Raises ConfigError where this machine can't do that."""
    if placement is None:
        yield
        return
    _check(placement)
    stop = threading.Event()

    def spin() -> None:
        x = 0
        while not stop.is_set():
            for i in range(1000):
                x = (x * 31 + i) % 65521

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        if placement == "free":
            yield
        else:
            assert thread.native_id is not None
            with _pinned(thread.native_id):
                yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _pinned(other: int) -> Iterator[None]:
    """The calling thread and the ``other`` (by its native id) on a processor each."""
    allowed, before = os.sched_getaffinity(0), _threads()
    *_, ours, theirs = sorted(allowed)
    try:
        os.sched_setaffinity(other, {theirs})
        os.sched_setaffinity(0, {ours})
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        for thread in _threads() - before:  # started meanwhile: the caller's processor is nothing that they asked for
            with suppress(ProcessLookupError):  # it has ended
                if os.sched_getaffinity(thread) == {ours}:
                    os.sched_setaffinity(thread, allowed)


def _threads() -> set[int]:
    """Native ids of this process's threads."""
    return {int(name) for name in os.listdir("/proc/self/task")}
