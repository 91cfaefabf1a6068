"""What a transfer and a GEMM take from each other: blocks with and without the transfer, in turn.

"With GEMM": random bf16 products of 8192 x 8192 x 8192 are enqueued without end on a stream of their own, while another
thread keeps transfers going back to back for the whole block. A pair of blocks (one with the transfer, one without,
the order flips from pair to pair) gives one ratio of the GEMM's rates; what it keeps is the median of these ratios with
its interval. The transfer's own rate is that between the ends of the first and the last transfer inside a block: bytes
over the time they took, with whatever lay between two of them.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch
from paired import median_interval, paired_ratio
from works import Wait, Work

from kvtransfer.device_info import device_info
from kvtransfer.kernels.errors import ConfigError

SIZE, CPU_SIZE = 8192, 256
BATCH = 4  # products enqueued at once: 6 ms of an H200
AHEAD = 3  # batches in the queue
DEPTH = 2  # transfers begun and not ended: one runs, one is queued


@dataclass(frozen=True)
class GemmFigures:
    """``kept`` is the share of its rate that the GEMM has beside the transfer; its median lies between ``kept_low`` and
    ``kept_high`` with probability ``coverage``. Clocks in MHz, medians over the blocks; None where NVML does not tell.
    """

    blocks: int
    block_s: float
    kept: float
    kept_low: float
    kept_high: float
    coverage: float
    tflops_alone: float
    tflops_beside: float
    gbps: float
    share: float
    share_low: float
    share_high: float
    transfers: int
    sm_mhz_alone: float | None
    sm_mhz_beside: float | None
    memory_mhz: float | None


class Clocks:
    """SM and memory clocks of a GPU at this moment, by NVML; nothing where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        if device.type != "cuda":
            return
        try:
            address = device_info(device).pci_bus_id
        except ConfigError:  # no NVML, which device_info says of itself: figures without clocks
            return
        self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(address.encode())

    def read(self) -> tuple[int, int] | None:
        """(SM, memory) in MHz."""
        if self._nvml is None:
            return None
        kinds = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        sm, memory = (int(self._nvml.nvmlDeviceGetClockInfo(self._handle, kind)) for kind in kinds)
        return sm, memory


@dataclass(frozen=True)
class Block:
    """``count`` products in ``seconds`` of the GPU's clock, between two moments of the host's."""

    count: int
    seconds: float
    started: float
    stopped: float
    clocks: tuple[int, int] | None


class Gemm:
    """Products of random matrices without end: bf16 on a GPU, small float32 ones on the CPU."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.size = size or (SIZE if on_gpu else CPU_SIZE)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self._a, self._b = (torch.randn(self.size, self.size, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._clocks = Clocks(device)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self.block(0.05)  # picks its kernel

    def tflops(self, block: Block) -> float:
        return 2 * self.size**3 * block.count / block.seconds / 1e12

    def block(self, seconds: float) -> Block:
        """Products for about ``seconds``; nothing of it is left in the queue on return."""
        return self._on_cpu(seconds) if self._stream is None else self._on_stream(self._stream, seconds)

    def _on_cpu(self, seconds: float) -> Block:
        started, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - started < seconds:
            torch.mm(self._a, self._b, out=self._out)
            count += 1
        stopped = time.perf_counter()
        return Block(count, stopped - started, started, stopped, None)

    def _on_stream(self, stream: torch.cuda.Stream, seconds: float) -> Block:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        queued: deque[torch.cuda.Event] = deque()
        count, clocks = 0, None
        stream.synchronize()
        started = time.perf_counter()
        begin.record(stream)
        while (passed := time.perf_counter() - started) < seconds:
            with torch.cuda.stream(stream):
                for _ in range(BATCH):
                    torch.mm(self._a, self._b, out=self._out)
            count += BATCH
            queued.append(torch.cuda.Event(blocking=True))
            queued[-1].record(stream)
            if len(queued) > AHEAD:
                queued.popleft().synchronize()
            if clocks is None and passed > seconds / 2:
                clocks = self._clocks.read()
        end.record(stream)
        end.synchronize()
        return Block(count, float(begin.elapsed_time(end)) / 1e3, started, time.perf_counter(), clocks)


class BackToBack:
    """Transfers of ``work`` one after the other on a thread of their own, for as long as the block is open.

    Entering returns once the first one has ended. What went wrong on the thread is raised on leaving.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self._device = work, device
        self._stop, self._running = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._ends: list[float] = []
        self._thread = threading.Thread(target=self._run, name="transfers")

    def rate(self, block: Block) -> tuple[int, float]:
        """(transfers, how many a second) inside ``block``, counted from the end of the first to the end of the last.
        Where fewer than two ended inside (the block is too short for them), of all."""
        ends = [t for t in self._ends if block.started <= t <= block.stopped]
        ends = ends if len(ends) > 1 else self._ends
        return len(ends), (len(ends) - 1) / (ends[-1] - ends[0])

    def __enter__(self) -> BackToBack:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        queued: deque[Wait] = deque()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while not self._stop.is_set() or len(self._ends) + len(queued) < DEPTH:
                queued.append(self._work.begin(alone=False))
                if len(queued) >= DEPTH:
                    self._end(queued.popleft())
            while queued:
                self._end(queued.popleft())
        except BaseException as error:  # kept: raised by whoever leaves the block
            self._error = error
        finally:
            self._running.set()

    def _end(self, wait: Wait) -> None:
        wait()
        self._ends.append(time.perf_counter())
        self._running.set()


def beside(work: Work, gemm: Gemm, *, blocks: int, seconds: float, peak_gbps: float) -> GemmFigures:
    """``blocks`` pairs of blocks of ``seconds``. ``peak_gbps`` is what the transfer's share is of."""
    alone: list[Block] = []
    both: list[Block] = []
    rates: list[float] = []
    transfers = 0
    for nth in range(blocks):
        for with_transfer in (False, True) if nth % 2 == 0 else (True, False):
            if not with_transfer:
                alone.append(gemm.block(seconds))
                continue
            with BackToBack(work, gemm.device) as running:
                both.append(gemm.block(seconds))
            count, a_second = running.rate(both[-1])
            transfers += count
            rates.append(work.total_bytes * a_second / 1e9)
    kept = paired_ratio([gemm.tflops(b) for b in both], [gemm.tflops(b) for b in alone])
    rate = median_interval(rates)
    clocks = [b.clocks for b in (*alone, *both) if b.clocks is not None]
    return GemmFigures(
        blocks=blocks,
        block_s=seconds,
        kept=kept.median,
        kept_low=kept.low,
        kept_high=kept.high,
        coverage=kept.coverage,
        tflops_alone=median(gemm.tflops(b) for b in alone),
        tflops_beside=median(gemm.tflops(b) for b in both),
        gbps=rate.median,
        share=rate.median / peak_gbps,
        share_low=rate.low / peak_gbps,
        share_high=rate.high / peak_gbps,
        transfers=transfers,
        sm_mhz_alone=_sm_mhz(alone),
        sm_mhz_beside=_sm_mhz(both),
        memory_mhz=median(memory for _, memory in clocks) if clocks else None,
    )


def _sm_mhz(blocks: list[Block]) -> float | None:
    clocks = [b.clocks[0] for b in blocks if b.clocks is not None]
    return median(clocks) if clocks else None
