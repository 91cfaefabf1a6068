"""Loads and stores of 1 GiB against one large pinned copy measured in the same run.

    python bench/bench_core.py [--json FILE] [--quick] [--repeats N]

32 layers, K and V of 8 heads x 128 in bf16, 8,192 tokens, pages in random order on both sides, every byte
compared afterwards. Prints for each case the path, the median and spread of the GPU's clock, GB/s and the
share of the large copy in that direction, then the time that ``load()`` and ``store()`` hold their caller
while another thread launches a forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 8192


@dataclass
class Row:
    case: str
    path: str
    page_size: int
    total_bytes: int
    median_s: float
    low_s: float
    high_s: float
    gbps: float
    share: float
    exact: bool


def large_copy(direction: str, nbytes: int, repeats: int) -> float:
    """GB/s of one pinned copy of ``nbytes``: the limit."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    stream, times = torch.cuda.Stream(), []
    for _ in range(repeats + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            a.record()
            device.copy_(host, non_blocking=True) if direction == "load" else host.copy_(device, non_blocking=True)
            b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return float(nbytes / statistics.median(times[1:]) / 1e9)


class Setup:
    """A pool twice the size of the transfer, a slab, an engine, and random ids."""

    def __init__(self, page_size: int, tokens: int, layers: int, *, script: bool = True) -> None:
        self.spec = KVSpec.attention(layers, page_size, HEADS, DIM, 2)
        n = tokens // page_size
        self.pool = KVPool.allocate("sglang.layer_first", spec=self.spec, num_pages=2 * n, device="cuda")
        self.host = HostTier(self.spec, capacity_pages=n, device="cuda")
        self.host.payload.view(torch.int64).random_()
        self.engine = TransferEngine(self.pool, self.host, script=script)
        rng = np.random.default_rng(0)
        self.slots, self.pages = rng.permutation(n), rng.permutation(2 * n)[:n]

    def exact(self) -> bool:
        """Whether the pool's pages hold the slots' bytes."""
        target = Layout.page_first(self.spec, len(self.pages))
        geometry = coalesce(self.spec, Side.of(self.pool.layout), Side.of(target), Box.whole(self.spec), order="dst")
        out = torch.empty(target.buffer_bytes[0], dtype=torch.uint8, device="cuda")
        ids = torch.from_numpy(self.pages).cuda()
        relayout_reference(geometry, self.pool.buffers, [out], ids, torch.arange(len(ids), device="cuda"))
        rows = self.host.payload.view(-1, self.host.slot_bytes)[:, : self.spec.page_bytes]
        want = rows[torch.from_numpy(self.slots)]
        return torch.equal(out.view(len(ids), -1).cpu(), want)

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def measure(setup: Setup, direction: str, path: str | None, layerwise: bool, limit: float, repeats: int) -> Row:
    times: list[float] = []
    engine, used = setup.engine, ""
    for _ in range(repeats + 1):
        if direction == "load":
            handle = engine.load(setup.slots, setup.pages, path=path, layerwise=layerwise)
        else:
            handle = engine.store(setup.pages, setup.slots, path=path)
        result = handle.result(60)
        times.append(result.seconds)
        used = result.path
    times = times[1:]
    total = setup.spec.page_bytes * len(setup.slots)
    if direction == "load":
        exact = setup.exact()
    else:
        for buffer in setup.pool.buffers:  # new bytes, stored once more, compared
            buffer.view(torch.int64).random_()
        engine.store(setup.pages, setup.slots, path=path).result(60)
        exact = setup.exact()
    median = statistics.median(times)
    gbps = total / median / 1e9
    name = f"{direction}{' layer-wise' if layerwise else ''}, pages of {setup.spec.page_size}"
    return Row(name, used, setup.spec.page_size, total, median, min(times), max(times), gbps, gbps / limit, exact)


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
    limits = {d: large_copy(d, total, args.repeats) for d in ("load", "store")}
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
                rows.append(measure(setup, direction, path, layerwise, limits[direction], args.repeats))
                progress.advance(task)
            if size in (1, 16):
                for busy in (False, True):
                    key = f"{len(setup.slots)} pages of {size}, {'beside a forward' if busy else 'alone'}"
                    calls[key] = call_times(setup, busy, 100)
                    progress.advance(task)
            setup.close()
            del setup
            torch.cuda.empty_cache()
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
        args.json.write_text(
            json.dumps({"limits_gbps": limits, "rows": [asdict(r) for r in rows], "calls_ms": calls}, indent=1)
        )
    return 0 if all(r.exact for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
