"""meter: the runs that `kvtransfer tune` times, on a GPU and on the CPU.

Both sides are regions of random bytes, touched before; pieces lie at random places of the host's region. On a GPU the
stream is held by a short spin while a run is submitted, so that events time the link alone; what submitting costs the
CPU is a figure of its own.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtransfer.dma import CopyEngine, TorchCopyEngine
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.launch import MAPPED_TILE_BYTES, MAPPED_WARPS, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.relayout import relayout, relayout_reference
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.kernels.table import CopyTable, build_table
from kvtransfer.lanes import U64
from kvtransfer.link import profile_key
from kvtransfer.tune import Runner

GPU_REGION_BYTES = 256 << 20
CPU_REGION_BYTES = 64 << 20
GEMM_SIZE, CPU_GEMM_SIZE = 8192, 1024
SPIN_CYCLES_PER_US = 2000  # about a microsecond at 2 GHz
MOST_SPIN_US = 10_000
RELAYOUT_LAYERS = 8

Enqueue = Callable[[torch.cuda.Stream], None]


def random_order(limit: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``count`` distinct numbers below ``limit`` in random order; from the front again where there are fewer."""
    order = np.random.default_rng().permutation(limit).astype(np.int64)
    return np.resize(order, count)


def one_piece(piece_bytes: int, pages: int) -> tuple[KVSpec, Layout]:
    """Pages of one piece each."""
    spec = KVSpec.mla(1, 1, piece_bytes)
    return spec, Layout.page_first(spec, pages)


def addresses(layout: Layout, memory: torch.Tensor) -> list[int]:
    """Where a layout's buffers begin, laid one after the other into ``memory``."""
    starts = itertools.accumulate(layout.buffer_bytes, initial=memory.data_ptr())
    return list(starts)[:-1]


class CudaMeter:
    """Runs on one GPU, between a region of device memory and one of pinned host memory for each direction."""

    paths: tuple[str, ...] = ("staged", "strided", "mapped")
    both = True
    largest_bytes = GPU_REGION_BYTES

    def __init__(self, device: torch.device | str | int = 0) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.key = profile_key(self.device)
        self.copier = CopyEngine()
        with torch.cuda.device(self.device):
            self.streams = {way: torch.cuda.Stream() for way in ("h2d", "d2h", "kernel", "gemm")}
            self.on_device = {way: self._random(GPU_REGION_BYTES) for way in ("h2d", "d2h")}
            self.on_host = {
                w: torch.empty(GPU_REGION_BYTES, dtype=torch.uint8, pin_memory=True) for w in self.on_device
            }
            for way, host in self.on_host.items():
                host.copy_(self.on_device[way])
            torch.cuda.synchronize()
        self._gemm: tuple[torch.Tensor, ...] = ()

    def _random(self, nbytes: int) -> torch.Tensor:
        words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), dtype=torch.int64, device=self.device)
        return words.view(torch.uint8)

    # -- timing -------------------------------------------------------------------------------------

    def _timed(self, work: dict[str, Enqueue], submit_us: float, calls: int = 1) -> Runner:
        """Runs what is enqueued on each stream at once; seconds until the last is through, by ``calls``."""

        def run() -> float:
            with torch.cuda.device(self.device):
                first = next(iter(work))
                begin = torch.cuda.Event(enable_timing=True)
                with torch.cuda.stream(self.streams[first]):
                    torch.cuda._sleep(int((30 + min(submit_us, MOST_SPIN_US)) * SPIN_CYCLES_PER_US))
                    begin.record()
                ends = []
                for way, enqueue in work.items():
                    stream = self.streams[way]
                    stream.wait_event(begin)
                    enqueue(stream)
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record(stream)
                for end in ends:
                    end.synchronize()
                return float(max(begin.elapsed_time(end) for end in ends)) / 1e3 / calls

        return run

    def peak(self, kind: str) -> tuple[int, Runner]:
        if kind == "pageable":
            host = torch.empty(GPU_REGION_BYTES // 4, dtype=torch.uint8).copy_(
                self.on_host["h2d"][: GPU_REGION_BYTES // 4]
            )
            device = self.on_device["h2d"][: host.numel()]

            def run() -> float:
                torch.cuda.synchronize(self.device)
                started = time.perf_counter()
                device.copy_(host)
                torch.cuda.synchronize(self.device)
                return time.perf_counter() - started

            return host.numel(), run
        ways = ("h2d", "d2h") if kind == "both" else (kind,)
        return GPU_REGION_BYTES, self._timed({way: self._large_copy(way) for way in ways}, 0)

    def _large_copy(self, way: str) -> Enqueue:
        source, target = self._ends(way)

        def enqueue(stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

        return enqueue

    def _ends(self, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        host, device = self.on_host[way], self.on_device[way]
        return (host, device) if way == "h2d" else (device, host)

    def transfer(self, path: str, direction: str, piece_bytes: int, count: int, ctas: int) -> Runner:
        ways = ("h2d", "d2h") if direction == "both" else (direction,)
        calls = self._calls(piece_bytes, count) if path == "strided" else 1
        work = {way: self._work(path, way, piece_bytes, count, ctas) for way in ways}
        return self._timed(work, {"staged": count, "strided": 8 * calls, "mapped": 0}[path], calls)

    def _work(self, path: str, way: str, piece_bytes: int, count: int, ctas: int) -> Enqueue:
        if path == "staged":
            return self._batch(way, piece_bytes, count)
        if path == "strided":
            return self._strided(way, piece_bytes, count)
        return self._mapped(way, piece_bytes, count, ctas)

    # -- what is enqueued -----------------------------------------------------------------------------

    def _batch(self, way: str, piece_bytes: int, count: int) -> Enqueue:
        """Random host places, the ring's side packed: what the staged path hands to the copy engine."""
        host = (
            self.on_host[way].data_ptr() + random_order(GPU_REGION_BYTES // piece_bytes, count) * piece_bytes
        ).astype(np.uint64)
        ring = (self.on_device[way].data_ptr() + np.arange(count, dtype=np.int64) * piece_bytes).astype(np.uint64)
        sizes: U64 = np.full(count, piece_bytes, dtype=np.uint64)
        dst, src = (ring, host) if way == "h2d" else (host, ring)

        def enqueue(stream: torch.cuda.Stream) -> None:
            self.copier.batch(dst, src, sizes, stream.cuda_stream, any_order=way == "h2d")

        return enqueue

    @staticmethod
    def _calls(piece_bytes: int, rows: int) -> int:
        return max(1, min(16, GPU_REGION_BYTES // (2 * piece_bytes * rows)))

    def _strided(self, way: str, piece_bytes: int, rows: int) -> Enqueue:
        """2-D calls of ``rows`` rows, packed on the device and a row apart on the host, block after random block."""
        pitch = 2 * piece_bytes if 2 * piece_bytes * rows <= GPU_REGION_BYTES else piece_bytes
        calls = self._calls(piece_bytes, rows)
        blocks = random_order(GPU_REGION_BYTES // (pitch * rows), calls).tolist()
        host, device = self.on_host[way].data_ptr(), self.on_device[way].data_ptr()

        def enqueue(stream: torch.cuda.Stream) -> None:
            for at, block in enumerate(blocks):
                here, there = device + at * rows * piece_bytes, host + block * rows * pitch
                if way == "h2d":
                    self.copier.copy_2d(here, piece_bytes, there, pitch, piece_bytes, rows, stream.cuda_stream)
                else:
                    self.copier.copy_2d(there, pitch, here, piece_bytes, piece_bytes, rows, stream.cuda_stream)

        return enqueue

    def _mapped(self, way: str, piece_bytes: int, count: int, ctas: int) -> Enqueue:
        pages = GPU_REGION_BYTES // piece_bytes
        spec, layout = one_piece(piece_bytes, pages)
        source, target = self._ends(way)
        table = self._table(spec, layout, layout, source, target, MAPPED_TILE_BYTES, MAPPED_WARPS)
        src, dst = (torch.from_numpy(random_order(pages, count)).to(self.device) for _ in range(2))
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)

        def enqueue(stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                mapped_copy(table, count, flags, ctas, src_ids=src, dst_ids=dst)

        return enqueue

    def _relayout(self, piece_bytes: int) -> tuple[int, Enqueue]:
        spec = KVSpec.mla(RELAYOUT_LAYERS, 1, piece_bytes)
        pages = GPU_REGION_BYTES // spec.page_bytes
        layouts = Layout.page_first(spec, pages), Layout.named("sglang.layer_first", spec, pages)
        source, target = self.on_device["h2d"], self.on_device["d2h"]
        table = self._table(spec, *layouts, source, target, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS)
        ids = torch.from_numpy(random_order(pages, pages)).to(self.device)

        def enqueue(stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                relayout(table, pages, dst_ids=ids)

        return spec.page_bytes * pages, enqueue

    def _table(
        self, spec: KVSpec, src: Layout, dst: Layout, source: torch.Tensor, target: torch.Tensor, tile: int, warps: int
    ) -> CopyTable:
        geometry = coalesce(spec, Side.of(src), Side.of(dst), Box.whole(spec), order="src")
        ends = addresses(src, source), addresses(dst, target)
        return build_table(geometry, spec, *ends, self.device, tile, warps)

    def relayout(self, piece_bytes: int) -> tuple[int, Runner]:
        nbytes, enqueue = self._relayout(piece_bytes)
        return nbytes, self._timed({"kernel": enqueue}, 0)

    # -- the CPU, and a GEMM --------------------------------------------------------------------------

    def cpu_us(self, what: str) -> float:
        if what == "launch":
            _, enqueue = self._relayout(32 << 10)
            each, stream = 1, self.streams["kernel"]
        elif what == "call":
            enqueue, each, stream = self._strided("h2d", 4096, 16), 16, self.streams["h2d"]
        else:
            enqueue, each, stream = self._batch("h2d", 4096, 2048), 2048, self.streams["h2d"]
        times = []
        for _ in range(12):
            torch.cuda.synchronize(self.device)
            with torch.cuda.device(self.device):
                started = time.perf_counter()
                enqueue(stream)
                times.append((time.perf_counter() - started) * 1e6 / each)
        torch.cuda.synchronize(self.device)
        return statistics.median(times[2:])

    def gemm_kept(self, path: str, direction: str, ctas: int, seconds: float) -> float:
        """bf16 products of 8192 x 8192 random numbers, in blocks with and without the path beside them."""
        piece = 32 << 10 if path == "mapped" else 4 << 20
        work = self._work(path, direction, piece, GPU_REGION_BYTES // piece // (2 if path == "strided" else 1), ctas)
        relay = self._relayout(32 << 10)[1] if path == "staged" else None
        with torch.cuda.device(self.device):
            if not self._gemm:
                a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=self.device) for _ in range(2))
                self._gemm = (a, b, torch.empty_like(a))
            moved_s = self._timed({direction: work}, 0)()  # and what it compiles is compiled
            moved_s = min(moved_s, self._timed({direction: work}, 0)())
            self._gemm_block(3, direction)
            one_s = self._gemm_block(3, direction) / 3
            count = max(3, int(seconds / 4 / one_s))
            blocks: dict[bool, list[float]] = {False: [], True: []}
            for beside in (False, True, False, True):
                transfers = [work, relay] if beside else []
                blocks[beside].append(self._gemm_block(count, direction, transfers, 1.3 * one_s / moved_s))
        return statistics.median(blocks[False]) / statistics.median(blocks[True])

    def _gemm_block(self, count: int, way: str, transfers: Sequence[Enqueue | None] = (), each: float = 0.0) -> float:
        """Seconds of ``count`` products, with ``each`` transfers enqueued a product: more than they last.

        ``transfers`` are what goes on the copy's stream, and what then goes on the kernels'.
        """
        a, b, out = self._gemm
        gemm, copy, kernel = self.streams["gemm"], self.streams[way], self.streams["kernel"]
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        due = 1.0 if transfers else 0.0
        for at in range(count):
            while due >= 1.0:
                due -= 1.0
                for stream, enqueue in zip((copy, kernel), transfers, strict=True):
                    if enqueue is not None:
                        enqueue(stream)
                        kernel.wait_event(copy.record_event())
            if at == 0:
                begin.record(gemm)
            with torch.cuda.stream(gemm):
                torch.mm(a, b, out=out)
            due += each if transfers else 0.0
        end.record(gemm)
        end.synchronize()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class CpuMeter:
    """Runs of the CPU backend: the plain-torch relayout, and copies one by one between host addresses."""

    paths: tuple[str, ...] = ("cpu", "staged")
    both = False
    largest_bytes = CPU_REGION_BYTES // 2

    def __init__(self) -> None:
        self.key = profile_key("cpu")
        self._ends = tuple(torch.randint(-(2**63), 2**63 - 1, (CPU_REGION_BYTES // 8,)).view(torch.uint8) for _ in "ab")
        self.copier = TorchCopyEngine()
        for memory in self._ends:
            self.copier.register(memory)

    def _way(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        return (self._ends[0], self._ends[1]) if direction == "h2d" else (self._ends[1], self._ends[0])

    @staticmethod
    def _timed(work: Callable[[], object]) -> Runner:
        def run() -> float:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started

        return run

    def peak(self, kind: str) -> tuple[int, Runner]:
        source, target = self._way(kind)
        return CPU_REGION_BYTES, self._timed(lambda: target.copy_(source))

    def _work(self, path: str, direction: str, piece_bytes: int, count: int) -> Callable[[], object]:
        source, target = self._way(direction)
        pages = CPU_REGION_BYTES // piece_bytes
        if path == "cpu":
            spec, layout = one_piece(piece_bytes, pages)
            geometry = coalesce(spec, Side.of(layout), Side.of(layout), Box.whole(spec), order="src")
            src, dst = (torch.from_numpy(random_order(pages, count)) for _ in range(2))
            return lambda: relayout_reference(geometry, [source], [target], src, dst)
        at = random_order(pages, count) * piece_bytes
        froms = (source.data_ptr() + at).astype(np.uint64)
        to = (target.data_ptr() + np.arange(count, dtype=np.int64) * piece_bytes).astype(np.uint64)
        sizes: U64 = np.full(count, piece_bytes, dtype=np.uint64)
        return lambda: self.copier.batch(to, froms, sizes, 0)

    def transfer(self, path: str, direction: str, piece_bytes: int, count: int, ctas: int) -> Runner:
        return self._timed(self._work(path, direction, piece_bytes, count))

    def relayout(self, piece_bytes: int) -> tuple[int, Runner]:
        count = self.largest_bytes // piece_bytes
        return piece_bytes * count, self._timed(self._work("cpu", "h2d", piece_bytes, count))

    def cpu_us(self, what: str) -> float:
        """A descriptor is a memmove of 512 bytes, a call one of 16 rows, a launch a relayout of one page."""
        most = min(1024, self.largest_bytes // 512)
        works = {
            "descriptor": (self._work("staged", "h2d", 512, most), most),
            "call": (self._work("staged", "h2d", 512, 16), 1),
            "launch": (self._work("cpu", "h2d", 512, 1), 1),
        }
        if what not in works:
            raise ConfigError(f"cpu_us: expected one of {', '.join(works)}, got {what!r}")
        work, each = works[what]
        return statistics.median(self._timed(work)() for _ in range(20)) * 1e6 / each

    def gemm_kept(self, path: str, direction: str, ctas: int, seconds: float) -> float:
        """Products of 1024 x 1024 floats on this thread, with and without the path on another one."""
        a, b = torch.randn(CPU_GEMM_SIZE, CPU_GEMM_SIZE), torch.randn(CPU_GEMM_SIZE, CPU_GEMM_SIZE)
        work = self._work(path, direction, 256 << 10, self.largest_bytes // (256 << 10))
        rates = []
        for beside in (False, True):
            stop = threading.Event()
            thread = threading.Thread(target=self._repeat, args=(work, stop), daemon=True)
            if beside:
                thread.start()
            try:
                started, count = time.perf_counter(), 0
                while count < 2 or time.perf_counter() - started < seconds / 2:
                    torch.mm(a, b)
                    count += 1
                rates.append(count / (time.perf_counter() - started))
            finally:  # also at a KeyboardInterrupt: a thread in C++ must not outlive the interpreter
                stop.set()
                if beside:
                    thread.join()
        return rates[1] / rates[0]

    @staticmethod
    def _repeat(work: Callable[[], object], stop: threading.Event) -> None:
        while not stop.is_set():
            work()
