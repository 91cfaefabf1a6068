"""What all benchmarks share: the limit, how it is measured beside each case, and the row that comes out.

The rate of one large copy moves by 3 to 5 % within minutes on rented machines. So a case never divides by a limit
measured earlier: both are measured in turn (limit, case, limit, case ...), and the share is the median of the paired
ratios with its interval (`paired`). Copies are of random bytes; nothing is believed before every byte was compared.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gemm import Gemm, GemmFigures, beside
from paired import Spread, median_interval, paired_ratio
from works import Work

from kvtransfer.info import QUEUES

LONGEST_S = 2.0  # of one case, limit included: slow cases are repeated less often
FEWEST = 3


@dataclass(frozen=True)
class Bar:
    """What is asked for, at least: the share of the limit alone and beside a GEMM, and what the GEMM keeps."""

    share: float | None = None
    gemm_share: float | None = None
    gemm_kept: float | None = None


@dataclass(frozen=True)
class Row:
    """One case. GB = 1e9 bytes; shares are of ``peak_gbps``, one large copy in the same direction, measured in turn
    with it (of both directions at once: two large copies at once, their sum).

    median_s, low_s, high_s  seconds of a transfer, ``repeats`` times
    share_low, share_high    where its median lies with probability ``coverage``
    caller_us, engine_us     CPU time of submitting one transfer: of the calling thread, and of the engine's;
                             ``engine_us`` is the whole process's where threads can't be told apart (``cpu_of``)
    bar                      what is asked for; None: nothing is
    gemm                     beside a GEMM that runs without end; None: not measured
    exact                    every byte was compared afterwards, and was right
    """

    case: str
    path: str
    direction: str
    total_bytes: int
    repeats: int
    median_s: float
    low_s: float
    high_s: float
    gbps: float
    peak_gbps: float
    share: float
    share_low: float
    share_high: float
    coverage: float
    caller_us: float
    engine_us: float
    cpu_of: str
    exact: bool
    bar: Bar | None = None
    gemm: GemmFigures | None = None

    def verdicts(self) -> list[tuple[str, float, bool]]:
        """(what, at least, whether it is met) of everything that is asked for and was measured."""
        if self.bar is None:
            return []
        asked = [("share", self.bar.share, self.share)]
        if self.gemm is not None:
            asked.append(("beside a GEMM", self.bar.gemm_share, self.gemm.share))
            asked.append(("GEMM keeps", self.bar.gemm_kept, self.gemm.kept))
        return [(what, least, have >= least) for what, least, have in asked if least is not None]


class LargeCopy:
    """The limit: one large copy between random bytes, pinned where there is a GPU.

    ``moved_bytes`` are counted once for "load" and "store", twice for "both" (two copies at once; on the CPU one
    after the other) and for "device" (a copy within the device reads and writes).
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.seen: dict[str, list[float]] = {}  # seconds, by direction
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._streams = {w: torch.cuda.Stream(device) for w in ("load", "store", "device")} if self._on_gpu else {}

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def moved_bytes(self, direction: str) -> int:
        return self.nbytes * (2 if direction in ("both", "device") else 1)

    def gbps(self, direction: str) -> Spread:
        """Over all that was measured so far."""
        return Spread.of([self.moved_bytes(direction) / s / 1e9 for s in self.seen[direction]])

    def seconds(self, direction: str) -> float:
        """One measurement, by the GPU's clock where there is one."""
        ways = ("load", "store") if direction == "both" else (direction,)
        ends = [(way, *self._ends(way)) for way in ways]
        taken = self._on_streams(ends) if self._on_gpu else self._on_cpu(ends)
        self.seen.setdefault(direction, []).append(taken)
        return taken

    def _ends(self, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(source, target) of a way, made at first use and touched before."""
        if way not in self._pairs:
            source = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).random_()
            pinned = self._on_gpu and way != "device"
            other = torch.empty(
                self.nbytes, dtype=torch.uint8, device="cpu" if pinned else self.device, pin_memory=pinned
            )
            other.copy_(source)
            self._pairs[way] = (other, source) if way == "load" else (source, other)
        return self._pairs[way]

    @staticmethod
    def _on_cpu(ends: list[tuple[str, torch.Tensor, torch.Tensor]]) -> float:
        started = time.perf_counter()
        for _, source, target in ends:
            target.copy_(source)
        return time.perf_counter() - started

    def _on_streams(self, ends: list[tuple[str, torch.Tensor, torch.Tensor]]) -> float:
        begin = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first = self._streams[ends[0][0]]
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000)  # 0.1 ms, while the copies are enqueued
            begin.record()
        after = []
        for way, source, target in ends:
            stream = self._streams[way]
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                after.append(torch.cuda.Event(enable_timing=True))
                after[-1].record()
        for event in after:
            event.synchronize()
        return max(float(begin.elapsed_time(event)) for event in after) / 1e3


class CpuClock:
    """CPU microseconds of this thread, and of the engine's thread by its name; of the process where the system can't
    tell threads apart."""

    def __init__(self, engine_thread: str) -> None:
        named = next((t for t in threading.enumerate() if engine_thread and t.name == engine_thread), None)
        get_clock: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)
        self.of = "threads" if not engine_thread or (named is not None and get_clock is not None) else "process"
        self._clock: int | None = None
        if named is not None and named.ident is not None and get_clock is not None:
            self._clock = get_clock(named.ident)
        self._idle = not engine_thread

    def caller(self) -> float:
        return time.thread_time() * 1e6

    def engine(self) -> float:
        if self._clock is not None:
            return time.clock_gettime(self._clock) * 1e6
        return 0.0 if self._idle else time.process_time() * 1e6


def alternate(
    limit: Callable[[], float], case: Callable[[], float], repeats: int, longest_s: float = LONGEST_S
) -> list[tuple[float, float]]:
    """(seconds of the limit, seconds of the case) in turn, after one of each that doesn't count.

    At most ``repeats`` pairs, fewer (but `FEWEST`) where they would take longer than ``longest_s``.
    """
    started = time.perf_counter()
    limit()
    case()
    one_s = time.perf_counter() - started
    wanted = max(min(repeats, FEWEST), min(repeats, int(longest_s / max(one_s, 1e-9))))
    return [(limit(), case()) for _ in range(wanted)]


def measure(
    work: Work,
    limit: LargeCopy,
    *,
    repeats: int,
    bar: Bar | None = None,
    gemm: Gemm | None = None,
    gemm_blocks: int = 10,
    gemm_s: float = 0.5,
    longest_s: float = LONGEST_S,
) -> Row:
    """Time ``work`` in turn with the limit, then beside a GEMM where one is given, then compare every byte."""
    work.begin()()  # compiles what is left to compile, and starts the engine's thread
    clock = CpuClock(work.engine_thread)
    cpu: list[tuple[float, float]] = []

    def run() -> float:
        engine, caller = clock.engine(), clock.caller()
        wait = work.begin()
        caller = clock.caller() - caller
        seconds = wait()
        cpu.append((caller, clock.engine() - engine))
        return seconds

    pairs = alternate(lambda: limit.seconds(work.direction), run, repeats, longest_s)
    limits, times = [a for a, _ in pairs], [b for _, b in pairs]
    scale = work.total_bytes / limit.moved_bytes(work.direction)
    share = paired_ratio([scale * a for a in limits], times)
    spread = Spread.of(times)
    peak = limit.moved_bytes(work.direction) / Spread.of(limits).median / 1e9
    figures = None
    if gemm is not None:
        figures = beside(work, gemm, blocks=gemm_blocks, seconds=gemm_s, peak_gbps=peak)
    return Row(
        case=work.name,
        path=work.path,
        direction=work.direction,
        total_bytes=work.total_bytes,
        repeats=len(pairs),
        median_s=spread.median,
        low_s=spread.low,
        high_s=spread.high,
        gbps=work.total_bytes / spread.median / 1e9,
        peak_gbps=peak,
        share=share.median,
        share_low=share.low,
        share_high=share.high,
        coverage=share.coverage,
        caller_us=median_interval([c for c, _ in cpu[1:]]).median,
        engine_us=median_interval([e for _, e in cpu[1:]]).median,
        cpu_of=clock.of,
        exact=work.exact(),
        bar=bar,
        gemm=figures,
    )


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a figure can't be read without: the device and the versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU backend: not figures of a GPU"
    queues = os.environ.get(QUEUES)
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, QUEUES: queues}
