"""Long churn of a slab that is 95 % full: how long are the runs that a store's slots lie in, and what is that worth?

    python bench/bench_extents.py [--quick] [--page-sizes 1 16] [--slots N] [--stores N] [--seed N]
    python bench/bench_extents.py --gpu [--gpu-gib 16]     # then moves what lies there, and compares every byte

Stores of 256 to 8,192 tokens come, the least recently used leave (`churn.WORKLOADS`), placed by our allocator and by
the usual free lists. For the last stores: lengths of runs, share of the slots in runs of at least 32, pieces a store,
the free space, microseconds of the allocator, and the predicted share of one large copy:

- *simple*: a piece costs what makes 128 KiB pieces reach 83 % (measured on an H200 towards the host): time = pieces x
  0.49 us + bytes / peak. It flatters pieces of 256 KiB to 2 MiB by one to three percent.
- *profile*: the rates that the shipped link profile has for pieces of these sizes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from churn import FILL, PLACERS, WORKLOADS, Churn, Ids, run_lengths
from harness import LargeCopy
from harness import Row as Moved
from placed import MOVED_BYTES, replay
from report import checked, exit_status, print_rows, print_table, progress, write_content
from report import parser as options

from kvtransfer.link import LinkProfile, shipped_profile
from kvtransfer.link_report import require_matplotlib

TOKENS = 524_288  # 64 GiB of Llama-8B: pages of 128 KiB a token
TOKEN_BYTES = 131_072
STORES = 100_000
LAST = 1000  # stores that are looked at
LONG_RUN = 32  # pages of 128 KiB: 4 MiB
PEAK = 55.3e9
PIECE_S = TOKEN_BYTES / PEAK * (1 / 0.83 - 1)
FEWER = {"blocks": 10, "pages": 200}  # workloads with many more allocations a store: fewer stores


@dataclass(frozen=True)
class Row:
    """What the last stores of one churn look like. Runs are in pages; ``pieces`` are runs a store. ``simple`` and
    ``profile`` are predicted shares of one large copy (see the module), ``worst`` the simple one of the worst 5 % of
    the stores. ``histogram``: share of the slots in runs of 2^i to 2^(i+1) - 1 pages."""

    workload: str
    placer: str
    page_size: int
    page_bytes: int
    slots: int
    stores: int
    seed: int
    median_run: float
    mean_run: float
    in_long_runs: float
    pieces: float
    free_runs: int
    largest_free_run: int
    us_a_store: float
    us_a_call: float
    simple: float
    profile: float
    worst: float
    histogram: tuple[float, ...]


def simple_share(pages: float, pieces: float, page_bytes: int) -> float:
    """Predicted share of the peak for pages in so many pieces: a cost a piece, and the peak."""
    best = pages * page_bytes / PEAK
    return best / (best + pieces * PIECE_S)


def profile_share(runs: Ids, page_bytes: int, profile: LinkProfile, way: str = "d2h") -> float:
    """Predicted share of the profile's peak, by its rates for pieces of these sizes."""
    grid, peak = profile.grids[f"staged/{way}"], profile.peak_gbps[way]
    sizes = runs * page_bytes
    seconds = 0.0
    for power in np.unique(np.log2(sizes).astype(int)):
        group = sizes[np.log2(sizes).astype(int) == power]
        seconds += float(group.sum()) / min(grid.rate(float(group.mean()), runs.size), peak) / 1e9
    return float(sizes.sum()) / seconds / 1e9 / peak


def measure(workload: str, placer: str, page_size: int, slots: int, stores: int, seed: int, last: int = LAST) -> Row:
    """Churn ``stores`` stores and look at the last of them."""
    page_bytes = page_size * TOKEN_BYTES
    churn = Churn(PLACERS[placer](slots), slots, page_size, page_bytes, WORKLOADS[workload], seed)
    coming = churn.stores()
    for _ in range(max(0, stores - last)):
        next(coming)
    churn.seconds, churn.calls = 0.0, 0
    each = [run_lengths(next(coming)) for _ in range(min(last, stores))]
    runs = np.concatenate(each)
    shares = sorted(simple_share(float(r.sum()), r.size, page_bytes) for r in each)
    free, total = churn.free_runs(), float(runs.sum())
    powers = np.log2(runs).astype(int)
    histogram = tuple(float(runs[powers == p].sum()) / total for p in range(int(powers.max()) + 1))
    return Row(
        workload=workload,
        placer=placer,
        page_size=page_size,
        page_bytes=page_bytes,
        slots=slots,
        stores=stores,
        seed=seed,
        median_run=float(np.median(runs)),
        mean_run=total / runs.size,
        in_long_runs=float(runs[runs >= LONG_RUN].sum()) / total,
        pieces=runs.size / len(each),
        free_runs=free.size,
        largest_free_run=int(free.max(initial=0)),
        us_a_store=churn.seconds / len(each) * 1e6,
        us_a_call=churn.seconds / max(1, churn.calls) * 1e6,
        simple=simple_share(total, runs.size, page_bytes),
        profile=profile_share(runs, page_bytes, shipped_profile()),
        worst=shares[len(shares) // 20],
        histogram=histogram,
    )


def print_churns(rows: Sequence[Row]) -> None:
    """A table for each page size."""
    columns = ["stores", "placed by", "runs, median", "mean", f"in runs >= {LONG_RUN}", "pieces a store", "free runs"]
    columns += ["largest", "us a store", "us a call", "simple", "profile", "worst 5 %"]
    for size in dict.fromkeys(r.page_size for r in rows):
        some = [r for r in rows if r.page_size == size]
        cells = [
            [
                f"{r.workload} ({r.stores:,})",
                r.placer,
                f"{r.median_run:,.0f}",
                f"{r.mean_run:,.1f}",
                f"{r.in_long_runs:.1%}",
                f"{r.pieces:,.1f}",
                f"{r.free_runs:,}",
                f"{r.largest_free_run:,}",
                f"{r.us_a_store:,.0f}",
                f"{r.us_a_call:,.1f}",
                f"{r.simple:.1%}",
                f"{r.profile:.1%}",
                f"{r.worst:.1%}",
            ]
            for r in some
        ]
        title = f"pages of {size} ({size * TOKEN_BYTES >> 10} KiB), {some[0].slots:,} slots, {FILL:.0%} full, "
        print_table(f"{title}seed {some[0].seed}; shares of one large copy are predicted", columns, cells, left=2)
    for workload in dict.fromkeys(r.workload for r in rows):
        print(f"{workload}: {WORKLOADS[workload].says}")


def plot(file: Path, rows: Sequence[Row]) -> None:
    """A PNG: for each workload and page size, the share of slots that lie in runs of at least so many pages."""
    plt = require_matplotlib()
    panels = list(dict.fromkeys((r.page_size, r.workload) for r in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.2), squeeze=False, sharey=True)
    for axis, (size, workload) in zip(axes[0], panels, strict=True):
        for r in (r for r in rows if (r.page_size, r.workload) == (size, workload)):
            at_least = np.cumsum(r.histogram[::-1])[::-1]
            axis.plot([2**i for i in range(len(at_least))], 100 * at_least, marker="o", ms=3, label=r.placer)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{workload}, pages of {size}", fontsize=9)
        axis.set_xlabel("run of at least, pages")
    axes[0][0].set_ylabel("% of the slots")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


@exit_status
def main(argv: Sequence[str] | None) -> int:
    out = options(__doc__)
    out.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16])
    out.add_argument("--slots", type=int, help=f"of the slab (default: {TOKENS:,} tokens)")
    out.add_argument("--stores", type=int, help=f"default {STORES:,}; fewer where they grow: {FEWER}")
    out.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    out.add_argument("--placers", nargs="+", choices=PLACERS, default=list(PLACERS))
    out.add_argument("--gpu", action="store_true", help="then move what lies there (skipped without a GPU)")
    out.add_argument("--gpu-gib", type=float, default=16.0, help="of the pinned slab")
    args, device = checked(out, argv)
    if min([*args.page_sizes, args.slots or 1, args.stores or 1]) < 1:
        out.error("--page-sizes, --slots and --stores: expected at least 1")
    stores = args.stores or (2000 if args.quick else STORES)
    if args.quick and args.workloads == list(WORKLOADS):
        args.workloads.remove("pages")
    cases = list(itertools.product(args.page_sizes, args.workloads, args.placers))
    rows: list[Row] = []
    try:
        with progress(len(cases)) as step:
            for size, workload, placer in cases:
                step(f"{workload}, pages of {size}, {placer}")
                some = max(200, stores // FEWER.get(workload, 1))
                rows.append(measure(workload, placer, size, args.slots or TOKENS // size, some, args.seed))
    except ValueError as error:
        out.error(str(error))
    print_churns(rows)
    moved: list[Moved] = []
    if args.gpu and device.type != "cuda":
        print("--gpu: skipped: PyTorch sees no GPU, and a share of its link can't be measured without one")
    elif args.gpu:
        limit = LargeCopy(device, MOVED_BYTES)
        moved = replay(args.gpu_gib, stores, limit, seed=args.seed, repeats=args.repeats or (5 if args.quick else 11))
        print_rows(f"a gibibyte of the last of {stores:,} stores, moved from and to where it lies", moved, limit)
    if args.json is not None:
        churns, shares = [asdict(r) for r in rows], [asdict(m) | {"verdicts": m.verdicts()} for m in moved]
        write_content(args.json, device, rows=churns, moved=shares)
    if args.plot is not None:
        plot(args.plot, rows)
    wrong = [m.case for m in moved if not m.exact]
    if wrong:
        print(f"wrong bytes: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


# -- under pytest bench ----------------------------------------------------------------------------


@pytest.mark.parametrize("placer", PLACERS)
@pytest.mark.parametrize("workload", ["new", "extend", "tails"])
def test_churn(benchmark: Callable[..., Any], workload: str, placer: str) -> None:
    """Time of 100 stores in a slab of 65,536 pages, after 400."""
    churn = Churn(PLACERS[placer](65_536), 65_536, 1, TOKEN_BYTES, WORKLOADS[workload], 0)
    coming = churn.stores()

    def some(count: int = 100) -> list[Ids]:
        return [next(coming) for _ in range(count)]

    some(400)
    made = benchmark(some)
    assert len(made) == 100 and all(s.size >= 256 for s in made)


if __name__ == "__main__":
    sys.exit(main(None))
