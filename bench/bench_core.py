"""Loads and stores of 1 GiB against one large pinned copy, and how long a call holds its caller.

    python bench/bench_core.py [--json FILE] [--quick] [--repeats N]

32 layers, K and V of 8 heads x 128 in bf16, 8,192 tokens, pages in random order on both sides, every byte
compared afterwards. Prints for each case the path, the median and spread of the GPU's clock, GB/s and the
share of a large copy in that direction, measured in turn with it, then the time that ``load()`` and ``store()``
hold their caller while another thread launches a forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from harness import LargeCopy, Row, measure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rigs import Rig, Shape
from works import EngineWork

LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 8192


def large_copy(direction: str, nbytes: int, repeats: int) -> float:
    """GB/s of one pinned copy of ``nbytes``: the limit."""
    limit = LargeCopy(torch.device("cuda", torch.cuda.current_device()), nbytes)
    limit.seconds(direction)
    limit.seen.clear()
    for _ in range(repeats):
        limit.seconds(direction)
    return limit.gbps(direction).median


class Setup(Rig):
    """A rig of the benchmark's model on the GPU."""

    def __init__(self, page_size: int, tokens: int, layers: int, *, script: bool = True) -> None:
        shape = Shape("llama8b", layers, (("k", HEADS, 2 * DIM), ("v", HEADS, 2 * DIM)))
        total = layers * 2 * HEADS * DIM * 2 * tokens
        super().__init__(shape, page_size, total, torch.device("cuda", torch.cuda.current_device()), script=script)

    def exact(self) -> bool:
        """Whether the pool's pages hold the slots' bytes."""
        return self.holds(self.pages, self.slots)


def busy_forward(stop: threading.Event, stream: torch.cuda.Stream) -> None:
    """Launch small layers without end, as an eager forward does."""
    torch.cuda.set_device(0)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        while not stop.is_set():
            for _ in range(50):
                x = torch.nn.functional.rms_norm(x @ weight, (4096,))
            stream.synchronize()


def call_times(setup: Setup, busy: bool, repeats: int) -> dict[str, float]:
    """Median milliseconds for which load() and store() hold their caller."""
    stop, stream = threading.Event(), torch.cuda.Stream()
    thread = threading.Thread(target=busy_forward, args=(stop, stream))
    if busy:
        thread.start()
        time.sleep(0.5)
    out = {}
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: setup.engine.load(setup.slots, setup.pages),
        "store": lambda: setup.engine.store(setup.pages, setup.slots),
        "load layer-wise": lambda: setup.engine.load(setup.slots, setup.pages, layerwise=True),
    }
    for name, call in calls.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            handle = call()
            times.append(time.perf_counter() - started)
            handle.result(60)  # type: ignore[attr-defined]
        out[name] = statistics.median(times) * 1e3
    stop.set()
    if busy:
        thread.join()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="an eighth of the bytes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_core: needs a GPU: its figures are shares of a PCIe link", file=sys.stderr)
        return 2
    tokens = TOKENS // 8 if args.quick else TOKENS
    total = LAYERS * 2 * HEADS * DIM * 2 * tokens
    console = Console(stderr=True)
    limit = LargeCopy(torch.device("cuda", torch.cuda.current_device()), total)
    rows: list[Row] = []
    calls: dict[str, dict[str, float]] = {}
    cases: list[tuple[int, str, str | None, bool]] = []
    for size in (1, 16, 64):
        for direction in ("load", "store"):
            cases += [(size, direction, path, False) for path in (None, "staged", "mapped")]
        cases += [(size, "load", None, True), (size, "load", "mapped", True)]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases) + 4)
        for size in (1, 16, 64):
            setup = Setup(size, tokens, LAYERS)
            for _, direction, path, layerwise in (c for c in cases if c[0] == size):
                name = f"{direction}{' layer-wise' if layerwise else ''}, pages of {size}"
                mode = "layerwise" if layerwise else "bulk"
                work = EngineWork(setup, direction, path=path or "auto", mode=mode, name=name)
                rows.append(measure(work, limit, repeats=args.repeats))
                progress.advance(task)
            if size in (1, 16):
                for busy in (False, True):
                    key = f"{len(setup.slots)} pages of {size}, {'beside a forward' if busy else 'alone'}"
                    calls[key] = call_times(setup, busy, 100)
                    progress.advance(task)
            setup.close()
            del setup
            torch.cuda.empty_cache()
    limits = {d: limit.gbps(d).median for d in ("load", "store")}
    table = Table(title=f"{total:,} bytes; one large copy: H2D {limits['load']:.1f}, D2H {limits['store']:.1f} GB/s")
    for column in ("case", "path", "ms (low-high)", "GB/s", "share", "exact"):
        table.add_column(column)
    for r in rows:
        span = f"{r.median_s * 1e3:.2f} ({r.low_s * 1e3:.2f}-{r.high_s * 1e3:.2f})"
        table.add_row(r.case, r.path, span, f"{r.gbps:.1f}", f"{r.share:.1%}", "yes" if r.exact else "NO")
    out = Console(width=120)
    out.print(table)
    held = Table(title="time that a call holds its caller, median of 100, ms")
    for column in ("case", "load", "store", "load layer-wise"):
        held.add_column(column)
    for key, times in calls.items():
        held.add_row(key, *(f"{times[c]:.2f}" for c in ("load", "store", "load layer-wise")))
    out.print(held)
    if args.json:
        sized = [asdict(r) | {"page_size": c[0]} for r, c in zip(rows, cases, strict=True)]
        args.json.write_text(json.dumps({"limits_gbps": limits, "rows": sized, "calls_ms": calls}, indent=1))
    return 0 if all(r.exact for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
