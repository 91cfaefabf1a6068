"""Small copies of others while the engine moves a gibibyte: are they stuck behind its burst?

    python bench/bench_neighbours.py [--quick] [--kib 4] [--repeats 4000] [--json FILE] [--plot FILE]

An engine's scheduler copies a few KiB to the GPU before each step (token ids, block tables) and from it behind each
(sampled tokens), each behind kernels of its stream. Timed one by one with one small kernel before each, alone and while
loads (bulk and layer-wise) and stores of 1 GiB follow each other: from before the call until the host sees the event
behind it, and on the GPU's clock from where the kernel may begin to the copy's end. The first also holds what the calls
cost their caller beside the engine's thread. For comparison the same
beside one large copy, and beside one batch of all pieces as they are. A copy counts where a transfer was under way when
it was asked for. Needs a GPU: nothing queues for a link on the CPU backend.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from neighbours import Engine, Neighbour, Probe, neighbours, sample
from report import checked, exit_status, parser, print_table, progress, write_content
from rigs import SHAPES, Rig, device_of

from kvtransfer.link_report import require_matplotlib

TOTAL_BYTES, QUICK_BYTES = 1 << 30, 1 << 28
SMALL_BYTES = 4 << 10
SAMPLES, QUICK_SAMPLES = 4000, 500
WARM_UPS = 20
PAGE = 16


@dataclass(frozen=True)
class Latency:
    """Microseconds: median, 95th percentile, worst."""

    median_us: float
    p95_us: float
    worst_us: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Percentiles are values that were seen: the smallest that so many do not exceed."""
        ordered = sorted(seconds)
        count = len(ordered)
        return cls(*(1e6 * ordered[max(0, -(-count * percent // 100) - 1)] for percent in (50, 95, 100)))

    def text(self) -> tuple[str, str, str]:
        return f"{self.median_us:.1f}", f"{self.p95_us:.1f}", f"{self.worst_us:.1f}"


@dataclass(frozen=True)
class Row:
    """``samples`` small copies (``small``: which way) beside ``transfers`` transfers. ``host``: call to event seen;
    ``gpu``: on its clock. ``exact``: every small copy arrived, and the transfer moves the right bytes."""

    small: str
    beside: str
    samples: int
    transfers: int
    small_bytes: int
    total_bytes: int
    host: Latency
    gpu: Latency
    exact: bool


def measure(probe: Probe, neighbour: Neighbour, samples: int) -> Row:
    """A row of small copies beside ``neighbour``."""
    for _ in range(WARM_UPS):
        probe()
    neighbour.begin().wait()
    got, transfers = sample(probe, probe.check, neighbour, samples)
    return Row(
        small=probe.name,
        beside=neighbour.name,
        samples=len(got),
        transfers=transfers,
        small_bytes=probe.nbytes,
        total_bytes=neighbour.total_bytes,
        host=Latency.of([host for host, _ in got]),
        gpu=Latency.of([gpu for _, gpu in got]),
        exact=neighbour.exact() and probe.exact,
    )


def print_rows(rows: Sequence[Row]) -> None:
    """The table."""
    times = [f"{where} {what}" for where in ("host", "GPU") for what in ("median", "95 %", "worst")]
    columns = ["copies", "beside", "MB each", "samples", "transfers", *times, "exact"]
    cells = [
        [
            r.small,
            r.beside,
            f"{r.total_bytes / 1e6:.4g}" if r.total_bytes else "",
            f"{r.samples:,}",
            f"{r.transfers:,}" if r.total_bytes else "",
            *r.host.text(),
            *r.gpu.text(),
            "yes" if r.exact else "NO",
        ]
        for r in rows
    ]
    print_table(f"us that a kernel and a copy of {rows[0].small_bytes:,} bytes take others", columns, cells, left=2)


def plot(file: Path, rows: Sequence[Row]) -> None:
    """A PNG: a line a row from the median over the 95th percentile to the worst, for host and GPU clock."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.3 * len(rows)))
    for shift, clock, color in ((-0.15, "host", "#7aa6c2"), (0.15, "GPU", "#c2603a")):
        at = [n + shift for n in range(len(rows))]
        seen = [r.host if clock == "host" else r.gpu for r in rows]
        axes.hlines(at, [s.median_us for s in seen], [s.worst_us for s in seen], color=color, lw=1)
        axes.plot([s.median_us for s in seen], at, "|", ms=10, mew=2, color=color, label=f"{clock}: median")
        axes.plot([s.p95_us for s in seen], at, "o", ms=4, color=color, label="95 %")
        axes.plot([s.worst_us for s in seen], at, ">", ms=4, color=color, label="worst")
    axes.set_yticks(range(len(rows)), [f"{r.small}, {r.beside}" for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"us of a kernel and a copy of {rows[0].small_bytes:,} bytes")
    axes.legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


@exit_status
def main(argv: Sequence[str] | None) -> int:
    out = parser(__doc__)
    out.add_argument("--kib", type=int, default=SMALL_BYTES >> 10, help="of a small copy")
    out.add_argument("--mib", type=int, help="of a transfer; 1,024")
    out.add_argument("--page-size", type=int, default=PAGE)
    args, device = checked(out, argv)
    if min(args.kib, args.page_size) < 1 or (args.mib is not None and args.mib < 1):
        out.error("--kib, --mib and --page-size: expected at least 1")
    if device.type != "cuda":
        print("bench_neighbours needs a GPU: on the CPU backend nothing queues for a link", file=sys.stderr)
        return 2
    samples = args.repeats or (QUICK_SAMPLES if args.quick else SAMPLES)
    total = args.mib << 20 if args.mib else QUICK_BYTES if args.quick else TOTAL_BYTES
    rows: list[Row] = []
    probes = [Probe(device, args.kib << 10, to_device=to_device) for to_device in (True, False)]
    with Rig(SHAPES["llama8b"], args.page_size, total, device, seed=args.seed) as rig:
        those = neighbours(rig)
        with progress(len(probes) * len(those)) as step:
            for probe, neighbour in itertools.product(probes, those):
                step(f"{probe.name}, {neighbour.name}")
                rows.append(measure(probe, neighbour, samples))
    print_rows(rows)
    if args.json is not None:
        write_content(args.json, device, rows=[asdict(r) for r in rows])
    if args.plot is not None:
        plot(args.plot, rows)
    wrong = [f"{r.small}, {r.beside}" for r in rows if not r.exact]
    if wrong:
        print(f"wrong bytes: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


# -- under pytest bench ----------------------------------------------------------------------------


def test_a_small_copy_beside_loads(benchmark: Any) -> None:
    """Small copies one by one, each waited for, while loads follow each other."""
    if not torch.cuda.is_available():  # asked here: an import must not start CUDA
        pytest.skip("needs a GPU")
    device = device_of("cuda")
    with Rig(SHAPES["llama8b"], PAGE, QUICK_BYTES, device) as rig:
        probe, load = Probe(device, SMALL_BYTES), Engine(rig, "load")
        row = benchmark.pedantic(lambda: measure(probe, load, 200), rounds=2)
        benchmark.extra_info |= {"gpu p95 us": row.gpu.p95_us, "path": load.name}
        assert row.exact


if __name__ == "__main__":
    sys.exit(main(None))
