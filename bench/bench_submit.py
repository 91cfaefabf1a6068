"""How long load(), store() and plan() hold the thread that calls them, and what they do meanwhile.

    python bench/bench_submit.py [--pages 16 128 1024 8192] [--page-sizes 1 16] [--repeats 100]
    python bench/bench_submit.py --profile          # where the time of a call goes, stage by stage

32 layers, pages in random order on both sides. Each kind of call alone, beside a Python thread that is never idle, and
on a GPU beside a thread that launches a forward without end. Wall time is what the caller loses; CPU time is what the
call costs, so that the rest is waiting: for the GIL, mostly. On the CPU backend heads are small, so that the calls are
not drowned by copies, and layer-wise loads are copied by the caller: its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch
from report import checked, parser, print_table, progress, write_content
from rigs import device_of

from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.link_report import require_matplotlib
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

LAYERS = 32
BAR_US = 500.0  # of a bulk call for 8,192 pages
KINDS = ("load", "store", "load layer-wise", "plan")
LIMIT_S = 60.0

# Stages of a call by the functions that they are (file, name): the time in them and below, in this order.
STAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "check ids": (("engine.py", "_check"),),
    "plan": (("engine.py", "_plan"),),
    "handle": (("engine.py", "_handle"),),
    "fences": (("engine.py", "_fences"),),
    "transfer object": (("host_transfer.py", "__init__"),),
    "claim": (("ledger.py", "claim_all"),),
    "hand over": (("pump.py", "enqueue"), ("engine.py", "_submit_here")),
}


@dataclass(frozen=True)
class Row:
    """Microseconds of one kind of call. ``cpu_us``: of the calling thread. ``bar_us`` is asked of the median."""

    kind: str
    pages: int
    page_size: int
    beside: str
    repeats: int
    median_us: float
    low_us: float
    high_us: float
    p95_us: float
    cpu_us: float
    bar_us: float | None

    @property
    def meets_bar(self) -> bool | None:
        return None if self.bar_us is None else self.median_us <= self.bar_us


class Setup:
    """A pool and a slab of twice the pages, filled, with an engine between them."""

    def __init__(self, page_size: int, most_pages: int, device: torch.device, seed: int) -> None:
        on_gpu = device.type == "cuda"
        self.spec = KVSpec.attention(LAYERS, page_size, 8, 128, 2) if on_gpu else KVSpec.attention(LAYERS, 1, 1, 2, 2)
        self.page_size, self.device = page_size, device
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.pool = KVPool.allocate(
            "sglang.layer_first",
            spec=self.spec,
            num_pages=2 * most_pages,
            device=device,
            streams=None if self.stream is None else [self.stream],
        )
        self.host = HostTier(self.spec, capacity_pages=2 * most_pages, device=device)
        self.engine = TransferEngine(self.pool, self.host, deadline_s=LIMIT_S)
        everything = self.host.allocate(2 * most_pages)
        self.engine.store(everything, everything).result(LIMIT_S)
        self._rng = np.random.default_rng(seed)
        self.most = 2 * most_pages

    def call(self, kind: str, pages: int) -> Callable[[], TransferHandle | None]:
        """A call of this kind for so many random pages and slots."""
        engine = self.engine
        slots, ids = (self._rng.permutation(self.most)[:pages] for _ in range(2))
        if kind == "load":
            return lambda: engine.load(slots, ids)
        if kind == "load layer-wise":
            return lambda: engine.load(slots, ids, layerwise=True)
        if kind == "store":
            return lambda: engine.store(ids, slots)

        def plan() -> None:
            engine.plan("load", slots, ids)

        return plan

    def close(self) -> None:
        """The engine first."""
        self.engine.close()
        self.host.close()

    def __enter__(self) -> Setup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def python_loop(stop: threading.Event, setup: Setup) -> None:
    """Bytecode without end: as a scheduler or a tokenizer does."""
    x = 0
    while not stop.is_set():
        for i in range(1000):
            x = (x * 31 + i) % 65521


def forward_loop(stop: threading.Event, setup: Setup) -> None:
    """Launch small layers without end, as an eager forward does, on a stream of its own."""
    device = setup.device
    weight = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    x = torch.randn(256, 4096, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        while not stop.is_set():
            for _ in range(50):
                x = torch.nn.functional.rms_norm(x @ weight, (4096,))
            stream.synchronize()


LOADS: dict[str, Callable[[threading.Event, Setup], None] | None] = {
    "alone": None,
    "a Python thread": python_loop,
    "a forward": forward_loop,
}


@contextmanager
def beside(load: str, setup: Setup) -> Iterator[None]:
    """Keep another thread busy meanwhile."""
    work = LOADS[load]
    if work is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop, setup), name="busy")
    thread.start()
    time.sleep(0.3)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(setup: Setup, kind: str, pages: int, load: str, repeats: int, longest_s: float = 5.0) -> Row:
    """Time calls one by one, each once the one before has ended. Fewer than ``repeats`` (but 5) if they take long."""
    wall: list[float] = []
    cpu: list[float] = []
    began = time.perf_counter()
    for number in range(repeats + 2):
        call = setup.call(kind, pages)
        busy, started = time.thread_time(), time.perf_counter()
        handle = call()
        wall.append((time.perf_counter() - started) * 1e6)
        cpu.append((time.thread_time() - busy) * 1e6)
        if handle is not None:
            handle.result(LIMIT_S)
        if number >= 6 and time.perf_counter() - began > longest_s:
            break
    wall, cpu = wall[2:], cpu[2:]  # the first ones compile, allocate and start threads
    bar = BAR_US if pages == 8192 and load == "alone" and kind in ("load", "store") else None
    return Row(
        kind=kind,
        pages=pages,
        page_size=setup.page_size,
        beside=load,
        repeats=len(wall),
        median_us=statistics.median(wall),
        low_us=min(wall),
        high_us=max(wall),
        p95_us=sorted(wall)[int(0.95 * (len(wall) - 1))],
        cpu_us=statistics.median(cpu),
        bar_us=bar,
    )


def profile(setup: Setup, kind: str, pages: int, repeats: int) -> tuple[dict[str, float], pstats.Stats]:
    """Microseconds a call by stage, and the statistics. The profiler makes Python slower, not numpy or the driver."""
    profiler = cProfile.Profile()
    for number in range(repeats + 2):
        call = setup.call(kind, pages)
        if number >= 2:
            profiler.enable()
        handle = call()
        profiler.disable()
        if handle is not None:
            handle.result(LIMIT_S)
    stats = pstats.Stats(profiler)
    below: dict[tuple[str, str], float] = {}
    for (file, _, name), (_, _, _, all_s, _) in stats.stats.items():  # type: ignore[attr-defined]
        below[Path(file).name, name] = below.get((Path(file).name, name), 0.0) + all_s
    stages = {stage: sum(below.get(f, 0.0) for f in which) / repeats * 1e6 for stage, which in STAGES.items()}
    whole = below.get(("bench_submit.py", "<lambda>"), 0.0) + below.get(("bench_submit.py", "plan"), 0.0)
    stages["the rest"] = whole / repeats * 1e6 - sum(stages.values())
    return stages, stats


def print_rows(rows: Sequence[Row]) -> None:
    """The table."""
    cells = [
        [
            r.kind,
            r.beside,
            f"{r.page_size}",
            f"{r.pages:,}",
            f"{r.median_us:,.0f} ({r.low_us:,.0f}-{r.high_us:,.0f})",
            f"{r.p95_us:,.0f}",
            f"{r.cpu_us:,.0f}",
            "" if r.bar_us is None else f"{r.bar_us:.0f} {'met' if r.meets_bar else 'MISSED'}",
        ]
        for r in rows
    ]
    columns = ["call", "beside", "page size", "pages", "us, median (low-high)", "95 %", "CPU us", "bar"]
    print_table("what a call costs its caller", columns, cells, left=2)
    if not torch.cuda.is_available():
        print("CPU backend: not figures of a GPU")


def print_profile(found: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Stages of each call."""
    columns = ["call", *found[0][1], "together"]
    cells = [[name, *(f"{v:,.0f}" for v in stages.values()), f"{sum(stages.values()):,.0f}"] for name, stages in found]
    print_table("us a call, by stage, under a profiler", columns, cells)


def plot(file: Path, rows: Sequence[Row]) -> None:
    """A PNG: microseconds over pages, a line for each call, a panel for each load beside it."""
    plt = require_matplotlib()
    loads = list(dict.fromkeys(r.beside for r in rows))
    figure, axes = plt.subplots(1, len(loads), figsize=(4 * len(loads), 3.4), squeeze=False, sharey=True)
    for axis, load in zip(axes[0], loads, strict=True):
        for kind, size in dict.fromkeys((r.kind, r.page_size) for r in rows):
            some = [r for r in rows if (r.kind, r.page_size, r.beside) == (kind, size, load)]
            axis.plot([r.pages for r in some], [r.median_us for r in some], marker="o", ms=3, label=f"{kind}, {size}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"beside {load}" if load != "alone" else load, fontsize=9)
        axis.set_xlabel("pages")
    axes[0][0].set_ylabel("us a call")
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    out = parser(__doc__)
    out.add_argument("--pages", type=_count, nargs="+", help="16 128 1024 8192, with --quick 16 1024")
    out.add_argument("--page-sizes", type=_count, nargs="+", default=[1, 16])
    out.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    out.add_argument("--profile", action="store_true", help="where the time goes, of calls that run alone")
    args, device = checked(out, argv)
    args.pages = args.pages or ([16, 1024] if args.quick else [16, 128, 1024, 8192])
    loads = [name for name in LOADS if name != "a forward" or device.type == "cuda"]
    repeats = args.repeats or (10 if args.quick else 100)
    rows: list[Row] = []
    found: list[tuple[str, dict[str, float]]] = []
    cases = [(load, kind, pages) for load in loads for kind in args.kinds for pages in args.pages]
    with progress(len(cases) * len(args.page_sizes)) as step:
        for size in args.page_sizes:
            most = [p for p in args.pages if device.type == "cpu" or size * p <= 65_536]  # 8 GiB of a GPU
            with Setup(size, max(most, default=1), device, args.seed) as setup:
                for load in loads:
                    with beside(load, setup):
                        for kind, pages in ((k, p) for k in args.kinds for p in most):
                            step(f"{kind}, {pages} pages of {size}, {load}")
                            rows.append(measure(setup, kind, pages, load, repeats, 0.3 if args.quick else 5.0))
                for kind in args.kinds if args.profile and most else ():
                    stages, stats = profile(setup, kind, most[-1], repeats)
                    found.append((f"{kind}, {most[-1]:,} pages of {size}", stages))
                    if not args.quick:
                        stats.sort_stats("tottime").print_stats(15)
    print_rows(rows)
    if found:
        print_profile(found)
    if args.json is not None:
        content = [asdict(r) | {"meets_bar": r.meets_bar} for r in rows]
        write_content(args.json, device, rows=content, stages_us=dict(found))
    if args.plot is not None:
        plot(args.plot, rows)
    return 0


# -- under pytest bench ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_call(benchmark: Any, kind: str) -> None:
    """One call for 1,024 pages; waiting for its end is not counted."""
    with Setup(1, 1024, device_of("auto"), 0) as setup:
        handles: list[TransferHandle] = []

        def wait() -> tuple[tuple[()], dict[str, Any]]:
            while handles:
                handles.pop().result(LIMIT_S)
            return (), {}

        call = setup.call(kind, 1024)

        def once() -> None:
            handle = call()
            if handle is not None:
                handles.append(handle)

        benchmark.pedantic(once, setup=wait, rounds=20, warmup_rounds=2)
        wait()


if __name__ == "__main__":
    sys.exit(main())
