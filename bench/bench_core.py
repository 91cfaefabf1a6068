"""Loads and stores against one large copy, and how long a call holds its caller: the short form of `bench_transfer` and
`bench_submit`.

    python bench/bench_core.py [--quick] [--json FILE] [--plot FILE]

32 layers, K and V of 8 heads x 128 in bf16, 8,192 tokens (1 GiB), pages of 1, 16 and 64 in random order on both sides,
every path that can carry them, every byte compared afterwards. Then the time that ``load()`` and ``store()`` hold their
caller, alone and while another thread launches a forward. Without a GPU the same code runs on the CPU backend with a
megabyte in 8 layers of one head.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import LargeCopy, Row, measure
from report import checked, exit_status, finish, parser, print_table, progress
from rigs import LIMIT_S, SHAPES, Rig, Shape, device_of
from works import EngineWork

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import ConfigError

GPU_SHAPE, CPU_SHAPE = SHAPES["llama8b"], Shape("tiny", 8, (("k", 1, 256), ("v", 1, 256)))
TOTAL_BYTES, CPU_BYTES = 1 << 30, 1 << 20
PAGE_SIZES, CALL_PAGE_SIZES = (1, 16, 64), (1, 16)
PATHS = ("auto", "staged", "mapped")
CALLS = ("load", "store", "load layer-wise")
BUSY_SIZE, CPU_BUSY_SIZE = 4096, 64  # hidden size of the forward beside calls

CallTimes = dict[str, dict[str, float]]
"""Median milliseconds of each call, by what was moved and what ran beside it."""


def shape_for(device: torch.device) -> Shape:
    """What is moved: layers and rows of a model, or few and small ones on the CPU."""
    return GPU_SHAPE if device.type == "cuda" else CPU_SHAPE


@contextmanager
def forward_beside(device: torch.device, wanted: bool) -> Iterator[None]:
    """Beside a thread that launches small layers without end, as an eager forward does, where ``wanted``."""
    stop = threading.Event()
    on_gpu = device.type == "cuda"
    size, dtype = (BUSY_SIZE, torch.bfloat16) if on_gpu else (CPU_BUSY_SIZE, torch.float32)

    def launch() -> None:
        weight = torch.randn(size, size, device=device, dtype=dtype)
        x = torch.randn(256, size, device=device, dtype=dtype)
        stream = torch.cuda.Stream(device) if on_gpu else None
        with torch.cuda.stream(stream):
            while not stop.is_set():
                for _ in range(50):
                    x = torch.nn.functional.rms_norm(x @ weight, (size,))
                if stream is not None:
                    stream.synchronize()

    thread = threading.Thread(target=launch, name="forward")
    if not wanted:
        yield
        return
    thread.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        stop.set()
        thread.join()


def call_times(rig: Rig, repeats: int) -> dict[str, float]:
    """Median milliseconds for which load() and store() hold their caller."""
    engine = rig.engine
    calls: dict[str, Callable[[], TransferHandle]] = {
        "load": lambda: engine.load(rig.slots, rig.pages),
        "store": lambda: engine.store(rig.pages, rig.slots),
        "load layer-wise": lambda: engine.load(rig.slots, rig.pages, layerwise=True),
    }
    out = {}
    for name, call in calls.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            handle = call()
            times.append(time.perf_counter() - started)
            handle.result(LIMIT_S)
        out[name] = statistics.median(times) * 1e3
    return out


def cases() -> list[tuple[str, str, str]]:
    """(direction, mode, path) of what is measured with each page size."""
    bulk = [(direction, "bulk", path) for direction in ("load", "store") for path in PATHS]
    return [*bulk, ("load", "layerwise", "auto"), ("load", "layerwise", "mapped")]


def run(
    limit: LargeCopy, *, repeats: int, call_repeats: int, seed: int = 0, step: Callable[[str], None] = lambda _: None
) -> tuple[list[Row], CallTimes, list[tuple[str, str]]]:
    """Transfers of as many bytes as ``limit`` copies: (rows, calls, (case, reason) of those that no path can carry)."""
    rows: list[Row] = []
    calls: CallTimes = {}
    skipped: list[tuple[str, str]] = []
    for size in PAGE_SIZES:
        with Rig(shape_for(limit.device), size, limit.nbytes, limit.device, seed=seed) as rig:
            for direction, mode, path in cases():
                name = f"{direction}{' layer-wise' * (mode == 'layerwise')}, pages of {size}"
                step(f"{name} [{path}]")
                try:
                    work = EngineWork(rig, direction, path=path, mode=mode, name=name)
                except ConfigError as error:  # this path can't carry it: said below
                    skipped.append((f"{name} [{path}]", str(error)))
                    continue
                rows.append(measure(work, limit, repeats=repeats))
            for busy in (False, True) if size in CALL_PAGE_SIZES else ():
                name = f"{rig.count:,} pages of {size}, {'beside a forward' if busy else 'alone'}"
                step(name)
                with forward_beside(limit.device, busy):
                    calls[name] = call_times(rig, call_repeats)
        if limit.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, calls, skipped


@exit_status
def main(argv: Sequence[str] | None) -> int:
    args, device = checked(parser(__doc__), argv)
    total = TOTAL_BYTES if device.type == "cuda" else CPU_BYTES
    limit = LargeCopy(device, total // 8 if args.quick else total)
    repeats, call_repeats = (5, 10) if args.quick else (9, 100 if device.type == "cuda" else 10)
    with progress(len(PAGE_SIZES) * len(cases()) + 2 * len(CALL_PAGE_SIZES)) as step:
        rows, calls, skipped = run(
            limit, repeats=args.repeats or repeats, call_repeats=call_repeats, seed=args.seed, step=step
        )
    status = finish(args, f"{limit.nbytes:,} bytes, pages in random order", rows, limit, skipped, calls_ms=calls)
    held = [[name, *(f"{times[call]:.2f}" for call in CALLS)] for name, times in calls.items()]
    print_table(f"ms that a call holds its caller, median of {call_repeats}", ["transfer", *CALLS], held)
    return status


# -- under pytest bench ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bulk", "layerwise"])
def test_a_load(benchmark: Any, mode: str) -> None:
    """From its call to its end; every byte compared behind it."""
    device = device_of("auto")
    with Rig(shape_for(device), 16, TOTAL_BYTES // 8 if device.type == "cuda" else CPU_BYTES, device) as rig:
        work = EngineWork(rig, "load", mode=mode)
        benchmark.extra_info |= {"bytes": work.total_bytes, "path": work.path}
        benchmark.pedantic(lambda: work.begin()(), rounds=5, warmup_rounds=1)
        assert work.exact()


if __name__ == "__main__":
    sys.exit(main(None))
