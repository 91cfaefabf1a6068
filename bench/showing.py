"""What benchmarks without a link's share show: options, a bar on stderr, a table on stdout, a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link_report import require_matplotlib

WIDTH = 180  # of tables that go into a file


def options(doc: str | None) -> argparse.ArgumentParser:
    """Options that these benchmarks share."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--json", type=Path, help="write the rows to this file")
    out.add_argument("--plot", type=Path, help="draw them into this PNG (pip install 'kvtransfer[plot]')")
    out.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    return out


def checked(out: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; bad ones end the program with status 2 before anything is measured."""
    args = out.parse_args(argv)
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file is not None and not file.absolute().parent.is_dir():
            out.error(f"--{name} {file}: expected a file in a folder that exists")
    if args.plot is not None:
        try:
            require_matplotlib()  # before minutes of measuring
        except ConfigError as error:
            out.error(str(error))
    return args


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what it yields with the name of each case that begins."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=escape(name))
            begun += 1

        yield step


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table; all but the first ``left`` columns are numbers."""
    out = Table(title=escape(title), title_justify="left")
    for number, column in enumerate(columns):
        out.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        out.add_row(*map(escape, row))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=WIDTH)).print(out)


def write_json(file: Path, **content: Any) -> None:
    """``content``, and what machine it was."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine: Mapping[str, Any] = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    file.write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n", encoding="utf-8")
