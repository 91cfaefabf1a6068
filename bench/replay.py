"""Replays a trace of real requests through a cache with real tiers, for host tiers of many sizes.

    python bench/replay.py --trace conversation_trace.jsonl.gz --host-tokens 1M 4M 16M 64M --disk-tokens 30M \\
        --policies lru path_score --csv replay.csv --plot replay.png

Each request is matched, what was hit is loaded and compared byte for byte, the rest is computed, all of it is stored;
the next request begins when nothing is under way any more. Pages are small: 96 bytes made from the tokens of the whole
prefix (a record is 8 KiB in a tier, its header included). The clock of the cache is the trace's.

What comes out, for each size and policy: the share of the tokens asked for that each tier had, bytes moved, pages
evicted, the CPU time of the directory (index and decisions). The *knee* of a policy is the smallest host tier whose hit
rate is within 2 % of the best one's: of what the host tier itself hits, since that is what its size buys; a disk below
hits what it holds at any size. For the format of a trace see traces.py.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from replay_cache import Result, Setting, replay
from report import checked, exit_status, print_table, progress, write_content
from report import parser as options
from traces import Request, read

from kvtransfer.link_report import require_matplotlib
from kvtransfer.policy import EVICTION

NEAR = 0.02  # of the best rate: what a knee may lack
SIZES = ("1M", "2M", "4M", "8M", "16M", "32M", "64M", "128M")
UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
MARKERS = "osD^vX"
EACH = 100  # requests between two steps of the bar


def count_of(text: str) -> int:
    """ "4M" as 4,000,000. Raises ValueError."""
    unit = UNITS.get(text[-1:].lower())
    number = float(text[:-1] if unit else text) * (unit or 1)
    if not 0 <= number < 1e15:
        raise ValueError(f"expected a count such as 500k or 4M, got {text!r}")
    return round(number)


def knee(results: Sequence[Result], tier: str | None = "host") -> Result:
    """The smallest host tier whose rate is within 2 % of the best of ``results``."""
    best = max(result.rate(tier) for result in results)
    good = [result for result in results if result.rate(tier) >= (1 - NEAR) * best]
    return min(good, key=lambda result: result.setting.host_pages)


def by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    """In the order in which they were run."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.setting.policy, []).append(result)
    return found


def flat(result: Result) -> dict[str, Any]:
    """One row of a table of numbers."""
    setting = asdict(result.setting)
    return {
        **setting,
        "host_tokens": result.host_tokens,
        "disk_tokens": result.setting.disk_pages * result.setting.page_size,
        "requests": result.requests,
        "asked_tokens": result.asked_tokens,
        "host_hit_tokens": result.hit_tokens.get("host", 0),
        "disk_hit_tokens": result.hit_tokens.get("disk", 0),
        "host_hit_rate": round(result.rate("host"), 6),
        "hit_rate": round(result.rate(), 6),
        "loaded_pages": result.loaded_pages,
        "wrong_pages": result.wrong_pages,
        "short_loads": result.short_loads,
        **{f"{way}_bytes": result.moved_bytes.get(way, 0) for way in ("load", "store", "disk_read", "disk_write")},
        **{f"{tier}_evicted_pages": result.evicted_pages.get(tier, 0) for tier in ("host", "disk")},
        "directory_s": round(result.directory_s, 3),
        "match_s": round(result.match_s, 3),
        "wall_s": round(result.wall_s, 1),
    }


def print_results(results: Sequence[Result]) -> None:
    cells = []
    for policy, mine in by_policy(results).items():
        best = knee(mine)
        for r in mine:
            moved = r.moved_bytes
            cells.append(
                [
                    policy,
                    f"{r.host_tokens:,}" + (" <- knee" if r is best else ""),
                    f"{r.rate('host'):.2%}",
                    f"{r.rate('disk'):.2%}" if r.setting.disk_pages else "",
                    f"{r.rate():.2%}",
                    f"{r.loaded_pages:,}" + (f", {r.wrong_pages:,} WRONG" if r.wrong_pages else ", all right"),
                    f"{r.short_loads:,}",
                    f"{moved.get('load', 0) / 1e6:.2f}, {moved.get('store', 0) / 1e6:.2f}",
                    f"{moved.get('disk_read', 0) / 1e6:.0f}, {moved.get('disk_write', 0) / 1e6:.0f}",
                    f"{r.evicted_pages.get('host', 0):,}, {r.evicted_pages.get('disk', 0):,}",
                    f"{r.directory_s:.1f}",
                    f"{r.wall_s:.0f}",
                ]
            )
    first = results[0]
    columns = ["policy", "host (tokens)", "host hits", "disk hits", "all hits", "pages loaded", "short loads"]
    columns += ["MB loaded, stored", "disk MB read, written", "evicted (host, disk)", "directory CPU s", "wall s"]
    disk = first.setting.disk_pages * first.setting.page_size
    print_table(
        f"{first.requests:,} requests, {first.asked_tokens:,} tokens, pages of {first.setting.page_size}, "
        + (f"a disk of {disk:,} tokens" if disk else "no disk"),
        columns,
        cells,
    )
    for policy, mine in by_policy(results).items():
        best = knee(mine)
        print(
            f"knee of {policy}: a host tier of {best.host_tokens:,} tokens ({best.rate('host'):.2%} of the tokens hit)"
        )


def write_csv(file: Path, results: Sequence[Result]) -> None:
    rows = [flat(result) for result in results]
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(file: Path, results: Sequence[Result]) -> None:
    """A PNG: hit rate over the host tier's size, a line a policy; its knee is a ring, the sum with a disk dashed."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for number, (policy, mine) in enumerate(by_policy(results).items()):
        mine = sorted(mine, key=lambda r: r.setting.host_pages)
        colour, sizes = colours[number % len(colours)], [r.host_tokens / 1e6 for r in mine]
        best = knee(mine)
        x, y = best.host_tokens / 1e6, 100 * best.rate("host")
        look = {"marker": MARKERS[number % len(MARKERS)], "color": colour, "ms": 5, "alpha": 0.8}
        label = f"{policy}: host (knee {x:.3g} M)"
        axes.plot(sizes, [100 * r.rate("host") for r in mine], "-", label=label, **look)
        if mine[0].setting.disk_pages:
            axes.plot(sizes, [100 * r.rate() for r in mine], "--", color=colour, lw=1.2, label=f"{policy}: with disk")
        axes.plot([x], [y], "o", ms=11 + 4 * number, mfc="none", mec=colour, mew=1.5)
    axes.set_xscale("log", base=2)
    ticks = sorted({r.host_tokens / 1e6 for r in results})
    axes.set_xticks(ticks, [f"{t:.2g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(100 * r.rate() for r in results) or 1)
    axes.set_xlabel("host tier, million tokens (ring: the smallest within 2 % of the best)")
    axes.set_ylabel("tokens that were hit, %")
    first = results[0]
    axes.set_title(
        f"{first.requests:,} requests, {first.asked_tokens / 1e6:.1f} million tokens", loc="left", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def write_files(args: argparse.Namespace, results: Sequence[Result], device: torch.device) -> None:
    """What was asked for of ``results``."""
    if args.json is not None:
        knees = {policy: knee(mine).host_tokens for policy, mine in by_policy(results).items()}
        write_content(args.json, device, rows=[flat(result) for result in results], knee_host_tokens=knees)
    if args.csv is not None:
        write_csv(args.csv, results)
    if args.plot is not None:
        plot(args.plot, results)


def read_requests(file: Path, limit: int | None) -> list[Request]:
    """The first ``limit`` of a trace, without those of less than a token. Raises OSError, ValueError."""
    found = [request for request in islice(read(file), limit) if request.input_tokens]
    if not found:
        raise ValueError(f"{file}: expected requests, got none")
    return found


@exit_status
def main(argv: Sequence[str] | None) -> int:
    out = options(__doc__)
    out.add_argument("--trace", type=Path, required=True, help="JSON lines, gzipped or not")
    out.add_argument("--host-tokens", type=count_of, nargs="+", default=[count_of(size) for size in SIZES])
    out.add_argument("--disk-tokens", type=count_of, default=0, help="that a disk below holds (0: none)")
    out.add_argument("--policies", nargs="+", choices=EVICTION, default=["lru"], help="eviction, of both tiers")
    out.add_argument("--page-size", type=int, default=512)
    out.add_argument("--limit", type=int, help="only so many requests")
    out.add_argument("--folder", type=Path, help="of the disk; removed afterwards (a temporary one)")
    out.add_argument("--csv", type=Path, help="write the rows to this file")
    args, device = checked(out, argv)
    if args.page_size < 1 or (args.limit is not None and args.limit < 1):
        out.error("--page-size and --limit: expected at least 1")
    if min(args.host_tokens) < args.page_size or 0 < args.disk_tokens < args.page_size:
        out.error(f"--host-tokens and --disk-tokens: expected at least a page of {args.page_size}")
    try:
        requests = read_requests(args.trace, 200 if args.quick and args.limit is None else args.limit)
    except (OSError, ValueError) as error:
        out.error(f"--trace: {error}")
    size = args.page_size
    settings = [
        Setting(size, host // size, args.disk_tokens // size, policy)
        for policy in args.policies
        for host in sorted(set(args.host_tokens))
    ]
    results = []
    with progress(len(settings) * -(-len(requests) // EACH)) as step:
        for setting in settings:
            with tempfile.TemporaryDirectory(prefix="replay-", dir=args.folder) as folder:
                results.append(replay(requests, setting, Path(folder), device, step, EACH))
            write_files(args, results, device)  # each time: a sweep takes long, and may be ended before its end
    print_results(results)
    wrong = sum(result.wrong_pages for result in results)
    if wrong:
        print(f"wrong bytes in {wrong:,} pages", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(None))
