"""Loads and stores between a pool and a slab, against one large copy measured in turn with each case.

    python bench/bench_transfer.py                    # 8B-shaped pages of 1, 16 and 64 tokens, both directions
    python bench/bench_transfer.py --bars [--gemm]    # the lines that are asked for, with what is asked
    python bench/bench_transfer.py --shapes mla656 --orders random "runs of 4" --paths auto staged mapped --baselines

1 GiB in each direction (8,192 tokens of llama8b), pages in the given order on both sides, digests on. Without a GPU the
same code runs on the CPU backend with a few megabytes, and its shares are of a memcpy.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import baselines
import torch
from gemm import Gemm, beside
from harness import Bar, LargeCopy, Row, measure
from report import checked, collect, exit_status, finish, gemm_for, gemm_options, parser, progress
from rigs import ORDERS, SHAPES, Rig, compile_ahead, device_of
from works import MODES, EngineWork, Work

from kvtransfer.kernels.errors import ConfigError

TOTAL_BYTES, CPU_BYTES, TEST_BYTES = 1 << 30, 8 << 20, 1 << 20
DIRECTIONS = ("load", "store", "both")
PATHS = ("auto", "staged", "strided", "mapped", "cpu")


@dataclass(frozen=True)
class Line:
    """One case. ``bar``: what is asked for. ``gemm``: whether --gemm measures it beside a GEMM too."""

    shape: str
    page_size: int
    direction: str
    mode: str = "bulk"
    order: str = "random"
    path: str = "auto"
    layout: str = "sglang.layer_first"
    bar: Bar | None = None
    gemm: bool = True

    @property
    def name(self) -> str:
        words = [self.direction, self.shape, f"pages of {self.page_size}"]
        words += [self.mode] * (self.mode != "bulk") + [self.order] * (self.order != "random")
        words += [self.layout] * (self.layout != "sglang.layer_first")
        return ", ".join(words)

    @property
    def rig(self) -> tuple[str, int, str]:
        return self.shape, self.page_size, self.layout


# What is asked of each line of --bars, by `Line.name`: the share of one large copy alone, the share beside a GEMM, and
# what the GEMM keeps.
_SMALL_ROWS = ("onehead", "mla576", "mla656", "mla1152")
BARS: dict[str, Bar] = {
    **{
        f"load, llama8b, pages of {n}{mode}": Bar(0.97, 0.95, 0.97)
        for n in (16, 64)
        for mode in ("", ", groups of 4", ", ramped")
    },
    "load, llama8b, pages of 1": Bar(0.91, 0.88, 0.95),
    **{f"store, llama8b, pages of {n}": Bar(0.97, 0.95, 0.97) for n in (16, 64)},
    "store, llama8b, pages of 1": Bar(0.80, None, 0.97),
    "both, llama8b, pages of 16": Bar(0.93),
    **{f"load, {shape}, pages of {n}": Bar(0.85) for shape in _SMALL_ROWS for n in (16, 64)},
    **{f"store, {shape}, pages of {n}": Bar(0.80) for shape in _SMALL_ROWS for n in (16, 64)},
}


def bar_lines() -> list[Line]:
    """The lines that are asked for."""
    lines = [Line("llama8b", n, "load", mode) for n in (16, 64) for mode in ("bulk", "groups of 4", "ramped")]
    lines += [Line("llama8b", 1, "load", mode) for mode in ("bulk", "layerwise")]
    lines += [Line("llama8b", n, "store") for n in (16, 64, 1)]
    lines.append(Line("llama8b", 16, "both"))
    for shape, n, way in itertools.product(("onehead", "mla576", "mla656", "mla1152"), (16, 64), ("load", "store")):
        lines.append(Line(shape, n, way, gemm=False))
    return [replace(line, bar=BARS.get(line.name)) for line in lines]


def grid_lines(args: Any) -> list[Line]:
    combos = itertools.product(
        args.shapes, args.page_sizes, args.layouts, args.orders, args.directions, args.modes, args.paths
    )
    return [
        Line(shape, n, direction, mode, order, path, layout)
        for shape, n, layout, order, direction, mode, path in combos
        if mode in ("bulk", "layerwise") or direction == "load"  # groups of layers are the loads'
    ]


def by_rig(lines: Iterable[Line]) -> dict[tuple[str, int, str], list[Line]]:
    """Lines that share a pool and a slab, in the order they came."""
    out: dict[tuple[str, int, str], list[Line]] = {}
    for line in lines:
        out.setdefault(line.rig, []).append(line)
    return out


def works(rig: Rig, lines: Sequence[Line], with_baselines: bool) -> Iterator[tuple[Line, Callable[[], Work]]]:
    """(line, how to make its work) in order, each order's baselines behind its lines. The rig's ids change on the
    way, so each is measured before the next one is asked for."""
    for order in _orders(lines):
        rig.set_order(order)
        for line in (line for line in lines if line.order == order):
            yield line, partial(EngineWork, rig, line.direction, path=line.path, mode=line.mode, name=line.name)
        for way in _baseline_ways(lines, order) if with_baselines else ():
            for make in baselines.ALL:
                line = replace(lines[0], direction=way, mode="bulk", order=order, path=make.path, bar=None, gemm=False)
                yield line, partial(make, rig, way, line.name)


def _orders(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.order for line in lines))


def _baseline_ways(lines: Sequence[Line], order: str) -> list[str]:
    """Directions of an order's bulk lines: baselines know one direction at a time, and no layers."""
    bulk = (line for line in lines if (line.order, line.mode) == (order, "bulk") and line.direction != "both")
    return list(dict.fromkeys(line.direction for line in bulk))


def run(
    lines: Sequence[Line],
    device: torch.device,
    total_bytes: int,
    *,
    repeats: int,
    step: Callable[[str], None] = lambda _: None,
    gemm: Gemm | None = None,
    gemm_blocks: int = 10,
    gemm_s: float = 0.5,
    with_baselines: bool = False,
    processes: int = 0,
    seed: int = 0,
) -> tuple[list[Row], LargeCopy, list[tuple[str, str]]]:
    """Measure ``lines``: (rows, the limit they are shares of, (line, reason) of those that no path can carry)."""
    limit = LargeCopy(device, total_bytes)
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    rigs = by_rig(lines)
    jobs = [(SHAPES[shape], n, layout) for shape, n, layout in rigs]
    compile_ahead(jobs, device, processes if device.type == "cuda" else 0)

    def measured() -> Iterator[Row]:
        for (shape, n, layout), group in rigs.items():
            with Rig(SHAPES[shape], n, total_bytes, device, layout=layout, seed=seed) as rig:
                for line, make in works(rig, group, with_baselines):
                    step(f"{line.name} [{line.path}]")
                    try:
                        work = make()
                    except ConfigError as error:  # this path can't carry it, or the baseline needs a GPU: said below
                        skipped.append((f"{line.name} [{line.path}]", str(error)))
                        continue
                    yield measure(
                        work, limit, repeats=repeats, bar=line.bar if device.type == "cuda" else None,
                        gemm=gemm if line.gemm else None, gemm_blocks=gemm_blocks, gemm_s=gemm_s,
                    )  # fmt: skip
            if device.type == "cuda":
                torch.cuda.empty_cache()

    collect(rows, measured(), skipped)
    return rows, limit, skipped


@exit_status
def main(argv: Sequence[str] | None) -> int:
    options = parser(__doc__)
    gemm_options(options)
    options.add_argument("--bars", action="store_true", help="the lines that are asked for, instead of a grid")
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama8b"])
    options.add_argument("--page-sizes", nargs="+", type=int, default=[1, 16, 64])
    options.add_argument(
        "--layouts", nargs="+", default=["sglang.layer_first"], help="of the pool; slabs are page-first"
    )
    options.add_argument("--orders", nargs="+", choices=ORDERS, default=["random"])
    options.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=["load", "store"])
    options.add_argument("--modes", nargs="+", choices=MODES, default=["bulk"])
    options.add_argument("--paths", nargs="+", choices=PATHS, default=["auto"])
    options.add_argument("--baselines", action="store_true", help="also what one would write without this library")
    options.add_argument("--only", help="lines whose name matches this regular expression")
    options.add_argument("--list", action="store_true", help="print the lines and end")
    options.add_argument("--mib", type=int, help="bytes of a transfer; 1,024 MiB on a GPU, 8 on the CPU")
    options.add_argument("--processes", type=int, default=8, help="that compile kernels ahead")
    args, device = checked(options, argv)
    if min(args.page_sizes) < 1 or (args.mib is not None and args.mib < 1):
        options.error("--page-sizes and --mib: expected at least 1")
    lines = bar_lines() if args.bars else grid_lines(args)
    if args.only:
        try:
            lines = [line for line in lines if re.search(args.only, line.name)]
        except re.error as error:
            options.error(f"--only: expected a regular expression, got {args.only!r}: {error}")
    if not lines:
        options.error("no line is left: expected --only to match one")
    if args.list:
        print("\n".join(f"{line.name} [{line.path}]" for line in lines))
        return 0
    total = TOTAL_BYTES if device.type == "cuda" else CPU_BYTES
    total = args.mib << 20 if args.mib else total // 8 if args.quick else total
    repeats = args.repeats or (5 if args.quick else 11)
    rigs = by_rig(lines).values()
    more = sum(len(_baseline_ways(group, order)) for group in rigs for order in _orders(group)) * len(baselines.ALL)
    with progress(len(lines) + more * args.baselines) as step:
        rows, limit, skipped = run(
            lines, device, total, repeats=repeats, step=step, gemm=gemm_for(args, device), gemm_blocks=args.gemm_blocks,
            gemm_s=args.gemm_seconds, with_baselines=args.baselines, processes=args.processes, seed=args.seed,
        )  # fmt: skip
    return finish(args, f"loads and stores of {total:,} bytes, page-first slab, seed {args.seed}", rows, limit, skipped)


def test_loads_beside_a_gemm(benchmark: Any) -> None:
    """One short pair of blocks with and without loads back to back."""
    device = device_of("auto")
    gemm = Gemm(device)
    with Rig(SHAPES["llama8b"], 16, TOTAL_BYTES // 8 if device.type == "cuda" else TEST_BYTES * 4, device) as rig:
        work = EngineWork(rig, "load")
        figures = benchmark.pedantic(lambda: beside(work, gemm, blocks=1, seconds=0.2, peak_gbps=1.0), rounds=2)
        benchmark.extra_info |= {"gemm kept": figures.kept, "gbps": figures.gbps}
        assert work.exact()


def test_loads_and_stores(benchmark: Any) -> None:
    """A load and a store of random pages, back to back; every byte compared behind it."""
    device = device_of("auto")
    with Rig(SHAPES["llama8b"], 16, TOTAL_BYTES // 8 if device.type == "cuda" else TEST_BYTES * 4, device) as rig:
        ways = [EngineWork(rig, way) for way in ("load", "store")]
        benchmark.extra_info["bytes"] = sum(work.total_bytes for work in ways)
        benchmark.pedantic(lambda: [work.begin()() for work in ways], rounds=5, warmup_rounds=1)
        assert all(work.exact() for work in ways)


if __name__ == "__main__":
    sys.exit(main(None))
