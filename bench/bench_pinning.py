"""How long pinned host memory takes: the first GiB of a big tier, all of it, and the usual ways beside it.

    python bench/bench_pinning.py [--gib 32] [--baseline-gib 8] [--threads 8] [--repeats 3]

A `HostTier` that grows in the background is asked for everything, and for its first GiB; another one is made at once.
Baselines are smaller, since they are slow; seconds a GiB compare. Every way's memory is written at both ends and read
back. Without a GPU nothing is pinned: the same code touches the memory only, and says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report import checked, parser, print_table, progress, write_content

from kvtransfer.kernels.errors import KVTransferError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.link_report import require_matplotlib
from kvtransfer.tiers.host import HostTier

GIB = 1 << 30
SPEC = KVSpec.attention(32, 1, 8, 128, 2)  # Llama-8B, a token a page: 128 KiB
FIRST_BAR_S = 1.0  # until the first GiB is usable
WHOLE_BAR = 0.30  # seconds a GiB


@dataclass(frozen=True)
class Row:
    """One way: medians over ``repeats``. ``first_s`` until the first GiB (of less than two: half) is usable, which may
    be when all of it is."""

    case: str
    gib: float
    repeats: int
    first_gib: float
    first_s: float
    total_s: float
    s_a_gib: float
    low: float
    high: float
    pinned: bool
    first_bar_s: float | None = None
    bar_s_a_gib: float | None = None

    @property
    def misses(self) -> list[str]:
        """What it was asked for and does not reach."""
        out = []
        if self.first_bar_s is not None and self.first_s > self.first_bar_s:
            out.append(f"first {self.first_gib:g} GiB in {self.first_s:.2f} s, not {self.first_bar_s:g}")
        if self.bar_s_a_gib is not None and self.s_a_gib > self.bar_s_a_gib:
            out.append(f"{self.s_a_gib:.3f} s/GiB, not {self.bar_s_a_gib:g}")
        return out


Timed = tuple[float, float]  # seconds until the first GiB, and until all
Case = tuple[str, Callable[[], Timed], int, bool, bool, bool]  # name, how, bytes, pinned, bars, with a first GiB


def tier(nbytes: int, threads: int, *, background: bool) -> Timed:
    """A HostTier of ``nbytes``, touched by ``threads`` threads and registered where there is a GPU."""
    started = time.perf_counter()
    with HostTier(SPEC, capacity_bytes=nbytes, threads=threads, background=background) as host:
        host.wait_ready(slots=max(1, min(GIB, nbytes // 2) // host.slot_bytes))
        first = time.perf_counter() - started
        host.payload[:4096] = 7  # usable, while the rest grows
        host.wait_ready()
        total = time.perf_counter() - started
        host.payload[-4096:] = 7
        if not int(host.payload[0]) == int(host.payload[-1]) == 7 or host.payload[4096:8192].any():
            raise RuntimeError("expected zeros, and what was written")
    return first, total


def torch_pinned(nbytes: int) -> Timed:
    """``torch.empty(pin_memory=True)``: cudaHostAlloc behind PyTorch's allocator."""
    started = time.perf_counter()
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory[0], memory[-1] = 7, 7
    total = time.perf_counter() - started
    del memory
    torch._C._host_emptyCache()  # or the next one is handed the same memory
    return total, total


def torch_pin_memory(nbytes: int) -> Timed:
    """``tensor.pin_memory()``: pageable memory first, then a pinned copy."""
    started = time.perf_counter()
    memory = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    total = time.perf_counter() - started
    del memory
    torch._C._host_emptyCache()
    return total, total


def numpy_filled(nbytes: int) -> Timed:
    """Pageable memory, written once by one thread."""
    started = time.perf_counter()
    memory = np.empty(nbytes, dtype=np.uint8)
    memory.fill(7)
    total = time.perf_counter() - started
    return total, total


def summary(case: Case, times: Sequence[Timed]) -> Row:
    """Medians of what one way took."""
    name, _, nbytes, pinned, bars, first = case
    gib = nbytes / GIB
    each = [total / gib for _, total in times]
    return Row(
        case=name,
        gib=gib,
        repeats=len(times),
        first_gib=min(1.0, gib / 2) if first else gib,
        first_s=statistics.median(f if first else total for f, total in times),
        total_s=statistics.median(total for _, total in times),
        s_a_gib=statistics.median(each),
        low=min(each),
        high=max(each),
        pinned=pinned,
        first_bar_s=FIRST_BAR_S if bars and first else None,
        bar_s_a_gib=WHOLE_BAR if bars else None,
    )


def cases(nbytes: int, baseline_bytes: int, threads: int) -> list[Case]:
    """Ours, and what is there to compare with on this machine."""
    gpu = torch.cuda.is_available()
    small = baseline_bytes
    out: list[Case] = [
        ("HostTier in the background", lambda: tier(nbytes, threads, background=True), nbytes, gpu, True, True),
        ("HostTier", lambda: tier(nbytes, threads, background=False), nbytes, gpu, True, False),
        ("HostTier, one thread", lambda: tier(small, 1, background=False), small, gpu, False, False),
    ]
    if gpu:
        out += [
            ("torch.empty(pin_memory=True)", lambda: torch_pinned(small), small, True, False, False),
            ("torch.zeros().pin_memory()", lambda: torch_pin_memory(small), small, True, False, False),
        ]
    return [*out, ("numpy, filled, not pinned", lambda: numpy_filled(small), small, False, False, False)]


def run(nbytes: int, baseline_bytes: int, threads: int, repeats: int) -> list[Row]:
    """All cases in turn, ``repeats`` times: in a virtual machine the first to touch memory may wait for the host."""
    todo = cases(nbytes, baseline_bytes, threads)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context is nobody's cost
    times: dict[str, list[Timed]] = {case[0]: [] for case in todo}
    with progress(repeats * len(todo)) as step:
        for _ in range(repeats):
            for name, make, size, *_ in todo:
                step(f"{name}, {size / GIB:g} GiB")
                times[name].append(make())
    return [summary(case, times[case[0]]) for case in todo]


def print_rows(rows: Sequence[Row], threads: int) -> None:
    """The table."""
    cells = [
        [
            r.case,
            f"{r.gib:g}",
            f"{r.first_gib:g} GiB: {r.first_s:.3f}",
            f"{r.total_s:.2f}",
            f"{r.s_a_gib:.3f} ({r.low:.3f}-{r.high:.3f})",
            "yes" if r.pinned else "no",
            "" if r.bar_s_a_gib is None else "MISSED: " + "; ".join(r.misses) if r.misses else "met",
        ]
        for r in rows
    ]
    columns = ["way", "GiB", "first, s", "whole, s", "s/GiB (low-high)", "pinned", "bar"]
    print_table(f"host memory, {threads} threads of HostTier's; medians of {rows[0].repeats}", columns, cells)
    if not torch.cuda.is_available():
        print("no GPU: nothing was pinned, memory was touched only")


def plot(file: Path, rows: Sequence[Row]) -> None:
    """A PNG: seconds a GiB, a bar a way."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.4 * len(rows)))
    at = list(range(len(rows)))
    axes.barh(at, [r.s_a_gib for r in rows], color="#7aa6c2")
    axes.axvline(WHOLE_BAR, ls="--", color="0.4", lw=1)
    axes.set_yticks(at, [f"{r.case} ({r.gib:g} GiB)" for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("s/GiB")
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def _gib(text: str) -> float:
    value = float(text)
    if not 0.01 <= value < 2**20:
        raise argparse.ArgumentTypeError(f"expected GiB, at least 0.01, got {text}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    out = parser(__doc__)
    out.add_argument("--gib", type=_gib, help="of the tier: 32, without a GPU 1")
    out.add_argument("--baseline-gib", type=_gib, help="of the others: 8, without a GPU 1")
    out.add_argument("--threads", type=_count, default=8)
    args, device = checked(out, argv)
    gpu = device.type == "cuda"
    gib = args.gib or (32 if gpu and not args.quick else 1 if gpu else 0.25 if args.quick else 1)
    small = args.baseline_gib or min(gib, 8)
    try:
        rows = run(int(gib * GIB), int(small * GIB), args.threads, args.repeats or (1 if args.quick else 3))
    except KVTransferError as error:  # not enough memory, mostly
        print(f"bench_pinning: {error}", file=sys.stderr)
        return 2
    print_rows(rows, args.threads)
    if args.json is not None:
        write_content(args.json, device, rows=[asdict(r) | {"misses": r.misses} for r in rows])
    if args.plot is not None:
        plot(args.plot, rows)
    return 0


# -- under pytest bench ----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 8])
def test_tier(benchmark: Callable[..., Any], threads: int) -> None:
    """64 MiB of a host tier: made, pinned where there is a GPU, and closed."""
    first, total = benchmark(tier, 64 << 20, threads, background=False)
    assert 0 < first <= total


if __name__ == "__main__":
    sys.exit(main())
