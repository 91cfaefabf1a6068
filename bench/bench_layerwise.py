"""A layer-wise load inside a forward, against the ideal of the same run.

    python bench/bench_layerwise.py [--tokens 64 256 ...] [--cached 8192] [--busy] [--json FILE] [--repeats N]

32 Llama-8B-shaped layers compute S new tokens over a prefix that is being loaded (page size 16, pages in random order
on both sides). *Ideal*: f_i = max(f_(i-1), arrival of layer i at the rate of one large copy) + compute time of layer i,
from the same run. Prints for each S and path the total over the ideal and over max(forward, link time); ``--busy`` adds
a Python thread that never sleeps. The last column proves that the pool holds the slots' bytes after the timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_core import DIM, HEADS, LAYERS, Setup, large_copy
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransfer.handles import TransferHandle
from kvtransfer.hooks import layerwise

HIDDEN, INTERMEDIATE, QUERY_HEADS, PAGE = 4096, 14336, 32, 16


class Layer(torch.nn.Module):
    """A decoder layer of Llama 8B's shape: attention over the pool's cached tokens and the new ones, and an MLP."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> None:
        super().__init__()
        self.k, self.v, self.pages = k, v, pages
        kv = HEADS * DIM

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02

        self.qkv, self.out = weight(HIDDEN, HIDDEN + 2 * kv), weight(HIDDEN, HIDDEN)
        self.up, self.down = weight(HIDDEN, 2 * INTERMEDIATE), weight(INTERMEDIATE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new, kv = x.shape[0], HEADS * DIM
        q, k, v = (F.rms_norm(x, (HIDDEN,)) @ self.qkv).split([HIDDEN, kv, kv], -1)
        keys = torch.cat([self.k[self.pages].view(-1, kv), k]).view(-1, HEADS, DIM).transpose(0, 1)
        values = torch.cat([self.v[self.pages].view(-1, kv), v]).view(-1, HEADS, DIM).transpose(0, 1)
        queries = q.view(new, QUERY_HEADS, DIM).transpose(0, 1)
        a = F.scaled_dot_product_attention(queries[None], keys[None], values[None], enable_gqa=True)[0]
        x = x + a.transpose(0, 1).reshape(new, HIDDEN) @ self.out
        gate, up = (F.rms_norm(x, (HIDDEN,)) @ self.up).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down


@dataclass
class Row:
    new_tokens: int
    path: str
    busy: bool
    forward_ms: float
    link_ms: float
    ideal_ms: float
    total_ms: float
    over_ideal: float
    over_max: float
    exact: bool


@contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """A Python thread that computes without a pause."""
    stop = threading.Event()

    def spin() -> None:
        x = 0
        while not stop.is_set():
            x += 1

    thread = threading.Thread(target=spin, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def median_ms(stream: torch.cuda.Stream, work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            a.record()
            handle = work()
            b.record()
        b.synchronize()
        if isinstance(handle, TransferHandle):
            handle.result(60)
        times.append(a.elapsed_time(b))
    return float(statistics.median(times[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 512, 1024, 2048])
    parser.add_argument("--cached", type=int, default=8192)
    parser.add_argument("--paths", nargs="+", default=["auto", "mapped"])
    parser.add_argument("--busy", action="store_true", help="beside a Python thread that never sleeps")
    parser.add_argument("--no-script", action="store_true", help="call by call, without the submitter in C")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_layerwise: needs a GPU", file=sys.stderr)
        return 2
    compute = torch.cuda.Stream()
    setup = Setup(PAGE, args.cached, LAYERS, script=not args.no_script)
    setup.pool.declare_stream(compute)
    total = setup.spec.page_bytes * len(setup.slots)
    peak = large_copy("load", total, args.repeats)
    link_ms = total / peak / 1e6
    pages = torch.from_numpy(setup.pages).cuda()
    layers = torch.nn.ModuleList(
        Layer(setup.pool.view(i, "k", torch.bfloat16), setup.pool.view(i, "v", torch.bfloat16), pages)
        for i in range(LAYERS)
    )
    rows: list[Row] = []

    def forward(x: torch.Tensor) -> None:
        for layer in layers:
            x = layer(x)

    console = Console(stderr=True)
    with torch.no_grad(), busy_thread(args.busy), Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(args.tokens) * len(args.paths))
        for new in args.tokens:
            x = torch.randn(new, HIDDEN, device="cuda", dtype=torch.bfloat16)
            alone = median_ms(compute, lambda: forward(x), args.repeats)  # noqa: B023
            f = 0.0
            for i in range(LAYERS):
                f = max(f, link_ms * (i + 1) / LAYERS) + alone / LAYERS
            for path in args.paths:

                def run(path: str = path, x: torch.Tensor = x) -> TransferHandle:
                    forced = None if path == "auto" else path
                    load: TransferHandle = setup.engine.load(setup.slots, setup.pages, layerwise=True, path=forced)
                    with layerwise(layers, load):
                        forward(x)
                    return load

                both = median_ms(compute, run, args.repeats)
                used = (
                    setup.engine.plan("load", setup.slots, setup.pages, layerwise=True).path if path == "auto" else path
                )
                name = f"{path} ({used})" if path == "auto" else path
                longest = max(alone, link_ms)
                rows.append(Row(new, name, args.busy, alone, link_ms, f, both, both / f, both / longest, setup.exact()))
                progress.advance(task)
    setup.close()
    title = f"{total:,} bytes at {peak:.1f} GB/s{', with a busy Python thread' if args.busy else ''}"
    table = Table(title=title)
    for column in ("S", "path", "forward ms", "link ms", "ideal ms", "total ms", "/ ideal", "/ max", "exact"):
        table.add_column(column)
    for r in rows:
        times = (f"{t:.2f}" for t in (r.forward_ms, r.link_ms, r.ideal_ms, r.total_ms))
        exact = "yes" if r.exact else "NO"
        table.add_row(str(r.new_tokens), r.path, *times, f"{r.over_ideal:.3f}", f"{r.over_max:.3f}", exact)
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"peak_gbps": peak, "rows": [asdict(r) for r in rows]}, indent=1))
    return 0 if all(r.exact for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
