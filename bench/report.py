"""What benchmarks show: options, a progress bar on stderr, a table on stdout, a JSON file, a picture.

Exit status: 0, or 1 where a byte was wrong, 2 for bad input, or 130 after Ctrl-C, where what was measured is shown.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gemm import Gemm
from harness import LargeCopy, Row, machine_facts
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rigs import device_of

from kvtransfer.info import MOST_QUEUES, QUEUES, queue_line
from kvtransfer.kernels.errors import KVTransferError, TransferError
from kvtransfer.link_report import require_matplotlib

CPU_NOTE = "CPU backend: shares of a memcpy, not figures of a GPU"
WIDTH = 200  # of tables that go into a file
INTERRUPTED = ("the rest", "interrupted")  # among what was left out: (case, why)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    out.add_argument("--json", type=Path, help="write the rows to this file")
    out.add_argument("--plot", type=Path, help="draw the shares into this PNG (pip install 'kvtransfer[plot]')")
    out.add_argument("--repeats", type=int, help="pairs of limit and case")
    out.add_argument("--quick", action="store_true", help="fewer bytes and repeats")
    out.add_argument("--seed", type=int, default=0, help="of ids and of what is drawn at random; data are always new")
    return out


def gemm_options(out: argparse.ArgumentParser) -> None:
    out.add_argument("--gemm", action="store_true", help="also beside a GEMM that runs without end")
    out.add_argument("--gemm-blocks", type=int, default=10, help="pairs of blocks with and without the transfer")
    out.add_argument("--gemm-seconds", type=float, default=0.5, help="of one block")


def checked(out: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """The options and the device. Bad ones end the program with status 2 before anything is measured.

    Mutates the process's environment: the driver's number of hardware queues, as docs/tuning.md asks of every process,
    unless it says one, or CUDA has read it already, or is not asked for."""
    args = out.parse_args(argv)
    written = [(name, file) for name in ("json", "csv", "plot") if (file := getattr(args, name, None)) is not None]
    for name, file in written:
        if (why := _unwritable(file)) is not None:
            out.error(f"--{name} {file}: expected {why}")
    if len({file.absolute() for _, file in written}) < len(written):
        out.error(f"{', '.join(f'--{name}' for name, _ in written)}: expected files of their own, got one twice")
    if args.repeats is not None and args.repeats < 1:
        out.error(f"--repeats: expected at least 1, got {args.repeats}")
    if getattr(args, "gemm_blocks", 1) < 1 or not 0 < getattr(args, "gemm_seconds", 1.0) < float("inf"):
        out.error("--gemm-blocks and --gemm-seconds: expected at least one block of more than 0 seconds")
    try:
        if args.plot is not None:
            require_matplotlib()  # before minutes of measuring
        if args.device != "cpu" and not torch.cuda.is_initialized():
            os.environ.setdefault(QUEUES, str(MOST_QUEUES))
        return args, device_of(args.device)
    except (KVTransferError, ValueError, RuntimeError) as error:
        out.error(str(error))


def _unwritable(file: Path) -> str | None:
    """What was expected instead, None if it can be written: known before minutes of measuring."""
    if not file.absolute().parent.is_dir():
        return "a file in a folder that exists"
    if file.exists() and not file.is_file() and not file.is_char_device() and not file.is_fifo():
        return "a file, got a folder"
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        return "a file that may be written"
    return None


def gemm_for(args: argparse.Namespace, device: torch.device) -> Gemm | None:
    return Gemm(device) if args.gemm else None


def exit_status(main: Callable[[Sequence[str] | None], int]) -> Callable[[Sequence[str] | None], int]:
    """Around a ``main``: a transfer that fails, or whose digests differ, is one line on stderr and status 1."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except TransferError as error:
            print(f"a transfer failed: {error}", file=sys.stderr)
            return 1

    return wrapped


def collect(rows: list[Any], measured: Iterator[Any], skipped: list[tuple[str, str]]) -> None:
    """Add to ``rows`` what is ``measured``, one by one. Ctrl-C ends that: the rest joins ``skipped``, and what was
    measured until then can be shown."""
    try:
        for row in measured:
            rows.append(row)
    except KeyboardInterrupt:
        skipped.append(INTERRUPTED)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what it yields with the name of each case that begins. It is drawn then, not by a thread of
    its own, which would take the GIL from what is measured ten times a second."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=escape(name), refresh=True)
            begun += 1

        yield step


def peaks_text(limit: LargeCopy) -> str:
    """The limits that shares are of, as measured over the whole run."""
    names = {
        "load": "one large copy H2D",
        "store": "one large copy D2H",
        "both": "two large copies at once",
        "device": "a device-to-device copy (read + write)",
    }
    on_cpu = limit.device.type == "cpu"
    parts = []
    for direction in limit.seen:
        g = limit.gbps(direction)
        name = f"memcpy ({direction})" if on_cpu else names[direction]
        parts.append(f"{name} {g.median:.1f} GB/s ({g.low:.1f}-{g.high:.1f})")
    if not on_cpu:
        parts.append(queue_line(os.environ.get(QUEUES), []))
    return "; ".join(parts)


def out_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Any other table: all but its first ``left`` columns are numbers."""
    table = Table(title=escape(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = out_console()
    needed = console.measure(table, options=console.options.update_width(10_000)).maximum
    if console.width < needed:  # lines that a narrow terminal breaks can be read, figures that are cut off can't
        console = Console(highlight=False, width=needed)
    console.print(table)


def print_rows(title: str, rows: Sequence[Row], limit: LargeCopy, skipped: Sequence[tuple[str, str]] = ()) -> None:
    """The table, the limits it divides by, and the cases that could not run with the reason."""
    lines = [title, f"limits: {peaks_text(limit)}"]
    if limit.device.type == "cpu":
        lines.append(CPU_NOTE)
    table = Table(title="\n".join(map(escape, lines)), title_justify="left")
    bars, gemms = any(r.verdicts() for r in rows), any(r.gemm is not None for r in rows)
    columns = ["case", "path", "MB", "ms (low-high)", "GB/s", "share of limit (95 %)"]
    columns += ["bar"] * bars + ["CPU us"] + ["GEMM keeps (95 %)", "GB/s, share beside it"] * gemms + ["exact"]
    for column in columns:
        table.add_column(column, no_wrap=column != "case", justify="left" if column in ("case", "path") else "right")
    for r in rows:
        cells = [
            escape(r.case),
            escape(r.path),
            f"{r.total_bytes / 1e6:.4g}",
            f"{r.median_s * 1e3:.4g} ({r.low_s * 1e3:.4g}-{r.high_s * 1e3:.4g})",
            f"{r.gbps:.1f}",
            f"{r.share:.1%} ({r.share_low:.1%}-{r.share_high:.1%})" + ("" if r.coverage >= 0.95 else "*"),
        ]
        if bars:
            cells.append("\n".join(f"{what} {least:.0%} {met_text(met)}" for what, least, met in r.verdicts()))
        cells.append(f"{r.caller_us:.0f} + {r.engine_us:.0f}" + ("" if r.cpu_of == "threads" else " (process)"))
        if gemms:
            cells += [_kept(r), "" if r.gemm is None else f"{r.gemm.gbps:.1f}, {r.gemm.share:.1%}"]
        cells.append("yes" if r.exact else "NO")
        table.add_row(*cells)
    console = out_console()
    console.print(table)
    if any(r.coverage < 0.95 for r in rows):
        print("* too few repeats for 95 %: the whole range")
    for r in rows:
        if r.gemm is not None and r.gemm.sm_mhz_alone is not None and r.gemm.sm_mhz_beside is not None:
            g = r.gemm
            print(
                f"{r.case}: GEMM {g.tflops_alone:.0f} TFLOP/s at {g.sm_mhz_alone:.0f} MHz alone, "
                f"{g.tflops_beside:.0f} at {g.sm_mhz_beside:.0f} beside, memory {g.memory_mhz:.0f} MHz"
            )
    for name, why in skipped:
        print(f"left out: {name}: {why}")


def met_text(met: bool) -> str:
    """Of a bar."""
    return "met" if met else "MISSED"


def _kept(row: Row) -> str:
    g = row.gemm
    if g is None:
        return ""
    return f"{g.kept:.1%} ({g.kept_low:.1%}-{g.kept_high:.1%})" + ("" if g.coverage >= 0.95 else "*")


def write_json(file: Path, limit: LargeCopy, rows: Sequence[Row], **more: Any) -> None:
    """Rows with all their fields, the limits, and what machine it was."""
    limits = {direction: asdict(limit.gbps(direction)) for direction in limit.seen}
    verdicts = [asdict(r) | {"verdicts": r.verdicts()} for r in rows]
    write_content(file, limit.device, limits_gbps=limits, rows=verdicts, **more)


def write_content(file: Path, device: torch.device, **content: Any) -> None:
    """``content``, and what machine it is of."""
    text = json.dumps({"machine": machine_facts(device), **content}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def plot_rows(file: Path, title: str, rows: Sequence[Row], limit: LargeCopy) -> None:
    """A PNG: a bar a row, its share of the limit with its interval, what is asked for as a tick, beside a GEMM as a
    dot."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.32 * len(rows)))
    at = list(range(len(rows)))
    shares = [100 * r.share for r in rows]
    low = [100 * (r.share - r.share_low) for r in rows]
    high = [100 * (r.share_high - r.share) for r in rows]
    axes.barh(at, shares, xerr=(low, high), color="#7aa6c2", ecolor="0.3", height=0.7, label="alone")
    bars = [(100 * r.bar.share, y) for r, y in zip(rows, at, strict=True) if r.bar is not None and r.bar.share]
    if bars:
        axes.plot(*zip(*bars, strict=True), "k|", ms=14, mew=2, label="bar")
    gemms = [(100 * r.gemm.share, y) for r, y in zip(rows, at, strict=True) if r.gemm is not None]
    if gemms:
        axes.plot(*zip(*gemms, strict=True), "o", color="#c2603a", ms=4, label="beside a GEMM")
    axes.axvline(100, ls="--", color="0.4", lw=1)
    axes.set_yticks(at, [f"{r.case} [{r.path}]" for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, max(105, *shares) if rows else 105)
    axes.margins(y=0.01)
    axes.set_xlabel("% of the limit\n" + peaks_text(limit).replace("; ", "\n"), fontsize=7)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.suptitle(title + (f"\n{CPU_NOTE}" if limit.device.type == "cpu" else ""), fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def finish(
    args: argparse.Namespace,
    title: str,
    rows: Sequence[Row],
    limit: LargeCopy,
    skipped: Sequence[tuple[str, str]] = (),
    **more: Any,
) -> int:
    """Table, files, exit status."""
    print_rows(title, rows, limit, skipped)
    if args.json is not None:
        write_json(args.json, limit, rows, skipped=[list(s) for s in skipped], **more)
    if args.plot is not None:
        plot_rows(args.plot, title, rows, limit)
    wrong = [r.case for r in rows if not r.exact]
    return status(wrong, skipped)


def status(wrong: Sequence[str], skipped: Sequence[tuple[str, str]]) -> int:
    """The exit status; cases with ``wrong`` bytes are named on stderr."""
    if wrong:
        print(f"wrong bytes: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    return 130 if INTERRUPTED in skipped else 0
