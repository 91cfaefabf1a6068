"""Tiers against what their storage can do, each ratio within one run.

    python bench/bench_tiers.py [disk redis mooncake ...] [--folder DIR] [--json FILE] [--quick]

A tier's part is a function from `Options` to rows, listed in `PARTS`: disk is in bench_disk.py; redis and mooncake, in
bench_remote.py, need their clients and servers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from bench_rows import Options, Row
from rich.console import Console
from rich.table import Table

PARTS = {  # module and function: a part's clients are imported with it
    "disk": ("bench_disk", "disk_rows"),
    "redis": ("bench_remote", "redis_rows"),
    "mooncake": ("bench_remote", "mooncake_rows"),
}


def rows_of(part: str, options: Options) -> list[Row]:
    """Measure one part."""
    module, function = PARTS[part]
    rows: list[Row] = getattr(import_module(module), function)(options)
    return rows


def show(rows: list[Row]) -> None:
    """Print the rows."""
    table = Table("what", "GB/s", "spread", "against", "GB/s", "share", "bar", "")
    for row in rows:
        verdict = "" if row.bar is None else "met" if row.met else "[red]MISSED[/red]"
        bar = "" if row.bar is None else f"{row.bar:.0%}"
        table.add_row(
            row.what, f"{row.gbps:.2f}", f"{row.low:.2f}-{row.high:.2f}", row.against, f"{row.limit_gbps:.2f}",
            f"{row.share:.0%}", bar, verdict,
        )  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--folder", type=Path, default=Path.cwd() / ".bench", help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a fifth of the time; figures are rough")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    args.folder.mkdir(parents=True, exist_ok=True)
    options = Options(args.folder, repeats=3 if args.quick else 5, seconds=0.5 if args.quick else 2.0)
    rows: list[Row] = []
    for part in args.parts or PARTS:  # a part takes minutes: what is measured is shown and kept at once
        found = rows_of(part, options)
        rows += found
        show(found)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if any(not row.met for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
