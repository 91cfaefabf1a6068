"""Serving with and without cached prefixes: time to first token, end to end, throughput, how much was cached.

    python bench/bench_serving.py --url http://127.0.0.1:30000 --prompts sharegpt.json --qps 4
    python bench/bench_serving.py --random-weights --ablation none host host+disk --disk /tmp/kv
    python bench/bench_serving.py --ablation host+disk+remote --disk /nvme/kv --redis redis://127.0.0.1:6379

Pass 1 sends every prompt, so that the cache fills. The engine's own prefix cache is emptied. Pass 2 sends them again
and is measured. Against a URL that is one row; a local model is served by bench/local_server.py, once for each part of
the ablation, and there the cached tokens that answers tell are compared with what the cache has counted itself.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from report import checked, parser, print_table, write_content
from serving_load import Figures, Shot, drive, figures
from serving_local import ABLATIONS, LocalOptions, served

from kvtransfer.kernels.errors import ConfigError, KVTransferError
from kvtransfer.link_report import require_matplotlib
from kvtransfer.prompts import NamedPrompt, read_prompts, shipped_prompts
from kvtransfer.server_client import ServerClient


@dataclass(frozen=True)
class Row:
    """One server or part of the ablation.

    loads, stores  pages, of the measured pass; None where the server does not say
    counted_tokens what the cache itself says it has handed out; None where it does not
    failed_pages   that a tier could not take, of both passes; None where the server does not say
    unfilled       requests of pass 1 that failed
    """

    case: str
    figures: Figures
    loads: int | None = None
    stores: int | None = None
    counted_tokens: int | None = None
    failed_pages: int | None = None
    unfilled: int = 0

    @property
    def cached_share(self) -> float | None:
        """Cached over input tokens."""
        cached, tokens = self.figures.cached_tokens, self.figures.input_tokens
        return None if cached is None or tokens is None else cached / max(1, tokens)

    @property
    def wrong(self) -> str | None:
        """What is wrong with it, None if nothing is."""
        if self.figures.failed:
            return f"{self.case}: {self.figures.failed} requests failed"
        if self.unfilled:
            return f"{self.case}: {self.unfilled} requests of pass 1 failed: less was cached than could be"
        if self.failed_pages:
            return f"{self.case}: {self.failed_pages} pages could not be written: the figures are of a cache without"
        if self.counted_tokens is not None and self.counted_tokens != self.figures.cached_tokens:
            return (
                f"{self.case}: answers tell {self.figures.cached_tokens} cached tokens, the cache {self.counted_tokens}"
            )
        return None


def measure(case: str, client: ServerClient, prompts: Sequence[NamedPrompt], args: argparse.Namespace) -> Row:
    """Both passes."""
    rules = {"max_new_tokens": args.max_new_tokens, "concurrency": args.concurrency, "seed": args.seed}
    rules["ignore_eos"] = not args.stop_at_eos
    client.flush()  # a server that can't is found out before it was filled
    first = client.info()
    unfilled = tell(case, drive(client, prompts, **rules)[0])
    if args.url is not None:
        time.sleep(args.settle_s)
    client.flush()
    before = client.info()
    shots, wall_s = drive(client, prompts, qps=args.qps, **rules)
    tell(case, shots)
    row = Row(case, figures(shots, wall_s), unfilled=unfilled)
    if not first or not before:
        return row
    client.flush()  # waits for stores
    after = client.info() or before
    grown = {name: after[name] - before.get(name, 0) for name in after}
    return replace(
        row,
        loads=grown.get("loaded_pages"),
        stores=grown.get("stored_pages"),
        counted_tokens=grown.get("cached_tokens"),
        failed_pages=after.get("failed_pages", 0) - first.get("failed_pages", 0),
    )


def tell(case: str, shots: Sequence[Shot]) -> int:
    """The first failure, if there is one; how many there are."""
    failed = [shot for shot in shots if shot.error is not None]
    if failed:
        print(f"{case}: {failed[0].name}: {failed[0].error}", file=sys.stderr)
    return len(failed)


COLUMNS: list[tuple[str, Callable[[Row], Any], str]] = [
    ("requests", lambda r: r.figures.requests, "{}"),
    ("failed", lambda r: r.figures.failed, "{}"),
    ("TTFT avg ms", lambda r: _ms(r.figures.ttft_avg_s), "{:.1f}"),
    ("p50", lambda r: _ms(r.figures.ttft_p50_s), "{:.1f}"),
    ("p90", lambda r: _ms(r.figures.ttft_p90_s), "{:.1f}"),
    ("p99", lambda r: _ms(r.figures.ttft_p99_s), "{:.1f}"),
    ("e2e p50 ms", lambda r: _ms(r.figures.e2e_p50_s), "{:.1f}"),
    ("req/s", lambda r: r.figures.requests_per_s, "{:.2f}"),
    ("out tok/s", lambda r: r.figures.output_tokens_per_s, "{:.1f}"),
    (
        "cached / input",
        lambda r: _or_unknown(r.figures.cached_tokens, r.figures.input_tokens),
        "{}",
    ),
    ("share", lambda r: r.cached_share, "{:.1%}"),
    ("loads", lambda r: r.loads, "{}"),
    ("stores", lambda r: r.stores, "{}"),
]


def show(title: str, rows: Sequence[Row]) -> None:
    """The table."""
    cells = []
    for row in rows:
        values = [(read(row), form) for _, read, form in COLUMNS]
        cells.append([row.case, *("?" if value is None else form.format(value) for value, form in values)])
    print_table(title, ["case", *(name for name, _, _ in COLUMNS)], cells)


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """A line a row, a column a figure."""
    names = ["case", *(field.name for field in fields(Figures)), "loads", "stores", "counted_tokens"]
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        for row in rows:
            flat = {**asdict(row), **asdict(row.figures)}
            writer.writerow(["" if flat[name] is None else flat[name] for name in names])


def plot(file: Path, title: str, rows: Sequence[Row]) -> None:
    """A PNG: times to first token, and the share of the input that was cached."""
    plt = require_matplotlib()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.8 + 0.5 * len(rows)), sharey=True)
    at = list(range(len(rows)))
    for offset, (name, values) in enumerate(
        (f"p{p}", [_ms(getattr(r.figures, f"ttft_p{p}_s")) or 0 for r in rows]) for p in (50, 90, 99)
    ):
        left.barh([y + 0.25 * (offset - 1) for y in at], values, height=0.23, label=name)
    left.set_yticks(at, [r.case for r in rows])
    left.invert_yaxis()
    left.set_xlabel("time to first token, ms")
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, fontsize=8)
    right.barh(at, [100 * (r.cached_share or 0) for r in rows], color="#7aa6c2")
    for y, row in zip(at, rows, strict=True):
        if row.cached_share is None:
            right.text(1, y, "not told", va="center")
    right.set_xlim(0, 100)
    right.set_xlabel("cached tokens, % of the input")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 1: a request failed, a tier did not take its pages, or cached tokens are not what the
    cache has counted; 2: bad input, or a server that does not answer; 130: interrupted. Rows that there are by then are
    shown and written all the same."""
    out = parser(__doc__)
    out.add_argument("--url", help="of a server; a local model unless given")
    out.add_argument("--api", choices=("openai", "sglang"), help="found out unless given")
    out.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="of the server: a bearer token ($OPENAI_API_KEY)"
    )
    out.add_argument("--model", help="of the server: its name; local: folder, GGUF file or id (SmolLM2-135M)")
    out.add_argument("--random-weights", action="store_true", help="local: a tiny random model")
    out.add_argument("--prompts", type=Path, help="JSONL or ShareGPT; nine texts of the project unless given")
    out.add_argument("--most-prompts", type=int, help="at most this many")
    out.add_argument("--max-new-tokens", type=int, default=32)
    out.add_argument("--concurrency", type=int, default=4, help="requests at a time, at most")
    out.add_argument("--qps", type=float, help="requests that are due a second, at random; as fast as can be otherwise")
    out.add_argument("--stop-at-eos", action="store_true", help="answers may end early")
    out.add_argument("--flush-path", help="request that empties the server's own prefix cache")
    out.add_argument("--settle-s", type=float, default=1.0, help="a server's time to end its stores before that")
    out.add_argument("--ablation", nargs="+", choices=ABLATIONS, help="local: which tiers, one after the other")
    out.add_argument("--page-size", type=int, default=16, help="local: tokens a page")
    out.add_argument("--host-pages", type=int, default=4096, help="local: pages of the host tier")
    out.add_argument("--disk", type=Path, help="local: folder on the disk, made if need be (a temporary one)")
    out.add_argument("--disk-gb", type=float, default=1.0, help="local")
    out.add_argument("--redis", help="local: redis://host:port of the remote tier")
    out.add_argument("--csv", type=Path, help="write the rows to this file")
    args, device = checked(out, argv)
    check(out, args)
    rows: list[Row] = []
    status, prompts = 0, []
    try:
        prompts = read_prompts(args.prompts, args.most_prompts) if args.prompts else shipped_prompts()
        prompts = prompts[: args.most_prompts]
        for row in _rows(args, prompts, device):
            rows.append(row)
    except KVTransferError as error:
        print(error, file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    if rows:
        write(args, device, rows, len(prompts))
    wrong = [row.wrong for row in rows if row.wrong is not None]
    for line in wrong:
        print(line, file=sys.stderr)
    return status or (1 if wrong else 0)


def check(out: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program on options that can't work, before anything is measured. Mutates ``args``: the ablation."""
    numbers = (args.max_new_tokens, args.concurrency, 1 if args.most_prompts is None else args.most_prompts)
    if min(numbers) < 1 or (args.qps is not None and not 0 < args.qps < float("inf")):
        out.error("--max-new-tokens, --concurrency, --most-prompts, --qps: expected numbers above 0")
    if args.seed < 0 or not 0 <= args.settle_s < float("inf"):
        out.error("--seed, --settle-s: expected 0 or more")
    if args.url is not None and (args.ablation is not None or args.random_weights):
        out.error("--url: expected no options of a local model, got --ablation or --random-weights")
    args.ablation = args.ablation or ["none", "host"]
    if args.url is None and any("remote" in case for case in args.ablation) and args.redis is None:
        out.error("--ablation host+disk+remote: expected --redis redis://host:port")


def write(args: argparse.Namespace, device: torch.device, rows: Sequence[Row], prompts: int) -> None:
    """The table, and the files that are asked for."""
    title = f"{prompts} prompts, {args.max_new_tokens} new tokens, {args.concurrency} at a time"
    title += "" if args.qps is None else f", {args.qps:g} a second"
    show(title, rows)
    if args.json is not None:
        write_content(args.json, device, rows=[asdict(r) | {"cached_share": r.cached_share} for r in rows], title=title)
    if args.csv is not None:
        write_csv(args.csv, rows)
    if args.plot is not None:
        plot(args.plot, title, rows)


def _rows(args: argparse.Namespace, prompts: Sequence[NamedPrompt], device: torch.device) -> Iterator[Row]:
    if args.url is not None:
        client = ServerClient(
            args.url, api=args.api, model=args.model, flush_path=args.flush_path, api_key=args.api_key or None
        )
        yield measure("server", client, prompts, args)
        return
    with _folder(args.disk) as folder:
        options = LocalOptions(
            device, args.model, args.random_weights, args.page_size, args.host_pages, folder, args.disk_gb, args.redis,
            fresh=True,
        )  # fmt: skip
        with closing(served(options, args.ablation)) as servers:  # closed before its folder goes
            for case, url in servers:
                yield measure(case, ServerClient(url, api=args.api), prompts, args)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A folder of this run alone, on the disk that is meant; what it lies in is made, and left."""
    try:
        if given is not None:
            given.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="kvtransfer-bench-", dir=given))
    except OSError as error:
        raise ConfigError(f"--disk {given}: expected a folder, there or to be made, got {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _or_unknown(*numbers: int | None) -> str:
    return " / ".join("?" if number is None else str(number) for number in numbers)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: folders and servers are given back
    sys.exit(main())
