"""How good the engine's choice of path is: random transfers off the grid that the profile was measured on.

    python bench/bench_choice.py [--points 200] [--geometries 8] [--seed N] [--json FILE] [--worst 5]

Draws geometries (layers, components, page sizes that are no powers of two), then for each point pages (1 to 20,000,
log-uniform, at most 1 GiB), the length of runs (1 to 32) and a direction. Every path that could carry it, and that the
budget does not bar, is measured in turn with the others. A point's share is the best time over the chosen path's: 1
where the choice was the best one. Prints the 5th percentile, the worst point, and `explain()` of the worst ones.

`kvtransfer tune` first: without a profile of the machine the choice rests on shipped figures. Without a GPU there is
one path to choose from, so the shares say nothing there; the same code runs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from harness import machine_facts
from report import checked, exit_status, out_console, parser, progress
from rich.table import Table
from rigs import LIMIT_S, Rig, Shape, compile_ahead, device_of

from kvtransfer.link_report import require_matplotlib
from kvtransfer.plan import Plan

MOST_BYTES, CPU_BYTES, TEST_BYTES = 1 << 30, 4 << 20, 1 << 18
MOST_PAGES, LONGEST_RUN = 20_000, 32
HOPELESS, CHEAP_S = 3.0, 0.02  # a path that took so many times the best, and more than this, is not measured again
LAYOUTS = ("sglang.layer_first", "vllm.LBNHC", "vllm.BLHNC", "page_first")


@dataclass(frozen=True)
class Geometry:
    shape: Shape
    page_size: int
    layout: str


@dataclass(frozen=True)
class Point:
    """What is drawn of one transfer."""

    geometry: int
    pages: int
    run: int
    direction: str


@dataclass(frozen=True)
class Result:
    """Medians of seconds by path, ``chosen`` among them. ``predicted``: what the plan expected of each."""

    point: Point
    geometry: str
    total_bytes: int
    chosen: str
    seconds: dict[str, float]
    predicted: dict[str, float]
    exact: bool
    explain: str

    @property
    def best(self) -> str:
        return min(self.seconds, key=lambda path: self.seconds[path])

    @property
    def share(self) -> float:
        """Best time over the chosen path's."""
        return self.seconds[self.best] / self.seconds[self.chosen]


def draw_geometry(rng: np.random.Generator, number: int) -> Geometry:
    """Layers, heads and widths as models have them, or nearly; page sizes of 1 to 64 of which few are powers of two."""
    layers = int(rng.integers(4, 65))
    if rng.random() < 0.35:
        shape = Shape(f"latent{number}", layers, (("latent", 1, 16 * int(rng.integers(8, 97))),))
    else:
        heads, width = int(rng.integers(1, 9)), 64 * int(rng.integers(1, 9))
        shape = Shape(f"kv{number}", layers, (("k", heads, width), ("v", heads, width)))
    page_size = int(rng.integers(1, 65)) if rng.random() < 0.8 else int(rng.choice([1, 16, 64]))
    return Geometry(shape, page_size, str(rng.choice(LAYOUTS)))


def draw_points(rng: np.random.Generator, geometries: Sequence[Geometry], count: int, most_bytes: int) -> list[Point]:
    """``count`` points over the geometries in turn, in the order of the geometries."""
    points = []
    for n in range(count):
        at = n % len(geometries)
        g = geometries[at]
        most = max(1, min(MOST_PAGES, most_bytes // g.shape.spec(g.page_size).page_bytes))
        pages = min(most, int(math.exp(rng.uniform(0.0, math.log(most + 1)))))
        run = int(rng.integers(1, LONGEST_RUN + 1))
        points.append(Point(at, pages, run, str(rng.choice(["load", "store"]))))
    return sorted(points, key=lambda p: p.geometry)


def runs_of_ids(total: int, count: int, run: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``count`` distinct ids below ``total`` in runs of ``run`` at random places (fewer at the ends)."""
    starts = rng.permutation(-(-total // run)) * run
    ids = (starts[:, None] + np.arange(run)).reshape(-1)
    return ids[ids < total][:count].astype(np.int64)


def candidates(plan: Plan) -> list[str]:
    """The chosen path, and the others that the plan could have chosen."""
    barred = {path for path, _ in plan.barred}
    return [plan.path, *(p.path for p in plan.others if p.path not in barred)]


def time_in_turn(paths: Sequence[str], run: Callable[[str], float], repeats: int) -> dict[str, float]:
    """Median seconds of each path, the chosen one first, in turn; after one run of each that counts only where it is
    hopeless."""
    first = {path: run(path) for path in paths}
    limit = max(CHEAP_S, HOPELESS * min(first.values()))
    kept = [path for path in paths if path == paths[0] or first[path] <= limit]
    times: dict[str, list[float]] = {path: [first[path]] for path in paths if path not in kept}
    for _ in range(repeats):
        for path in kept:
            times.setdefault(path, []).append(run(path))
    return {path: statistics.median(times[path]) for path in paths}


def measure_point(rig: Rig, point: Point, name: str, repeats: int, rng: np.random.Generator) -> Result:
    """Time every candidate of one point; the chosen path's bytes are compared behind it."""
    total = rig.pool.num_pages
    slots, pages = (runs_of_ids(total, point.pages, point.run, rng) for _ in range(2))
    plan = rig.engine.plan(point.direction, slots, pages)

    def run(path: str) -> float:
        if point.direction == "load":
            return rig.engine.load(slots, pages, path=path).result(LIMIT_S).seconds
        return rig.engine.store(pages, slots, path=path).result(LIMIT_S).seconds

    seconds = time_in_turn(candidates(plan), run, repeats)
    for buffer in rig.pool.buffers:  # other bytes, one more transfer, all of it compared
        buffer.bitwise_not_()
    rig.synchronize()
    run(plan.path)
    exact = rig.holds(pages, slots)
    predictions = [p for p in (plan.predicted, *plan.others) if p is not None]
    predicted = {p.path: p.seconds for p in predictions}
    return Result(point, name, plan.total_bytes, plan.path, seconds, predicted, exact, plan.explain())


def measure_points(
    geometries: Sequence[Geometry],
    points: Sequence[Point],
    device: torch.device,
    most_bytes: int,
    *,
    repeats: int,
    seed: int,
    step: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Results in the order of the points; one pool and slab a geometry."""
    rng = np.random.default_rng([seed, 1])
    for at, group in groupby(points, key=lambda p: p.geometry):
        g = geometries[at]
        mine = list(group)
        page_bytes = g.shape.spec(g.page_size).page_bytes
        name = f"{g.shape.layers} x {g.shape.components}, pages of {g.page_size}, {g.layout}"
        total = page_bytes * max(p.pages for p in mine)
        with Rig(g.shape, g.page_size, min(total, max(most_bytes, page_bytes)), device, layout=g.layout) as rig:
            for point in mine:
                step(f"{point.direction} of {point.pages} pages in runs of {point.run}: {name}")
                yield measure_point(rig, point, name, repeats, rng)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def print_results(results: Sequence[Result], seed: int, worst: int, device: torch.device, took_s: float) -> None:
    """Percentiles, a table by chosen path, and the worst points with what the plan said."""
    shares = [r.share for r in results]
    right = sum(r.best == r.chosen for r in results)
    console = out_console()
    lines = [f"{len(results)} random transfers, seed {seed}, {took_s:.0f} s; share = best path's time / chosen path's"]
    lines += ["CPU backend: one path to choose from, so the shares say nothing"] * (device.type == "cpu")
    table = Table(title="\n".join(lines), title_justify="left")
    for column in ("chosen", "points", "was the best", "median share", "5th percentile", "worst"):
        table.add_column(column, justify="left" if column == "chosen" else "right")
    for path in (*sorted({r.chosen for r in results}), "all"):
        mine = [r for r in results if path in (r.chosen, "all")]
        s = [r.share for r in mine]
        best = sum(r.best == r.chosen for r in mine)
        figures = (statistics.median(s), percentile(s, 0.05), min(s))
        table.add_row(path, str(len(mine)), str(best), *(f"{x:.1%}" for x in figures))
    console.print(table)
    print(f"5th percentile {percentile(shares, 0.05):.1%}, worst {min(shares):.1%}, best path {right}/{len(results)}")
    for r in sorted(results, key=lambda r: r.share)[:worst]:
        times = ", ".join(f"{path} {s * 1e3:.4g} ms" for path, s in sorted(r.seconds.items(), key=lambda x: x[1]))
        print(f"\n{r.share:.1%}: runs of {r.point.run}, {r.geometry}\n  measured: {times}\n{r.explain}")


def plot_results(results: Sequence[Result], file: Any) -> None:
    """A PNG: each point's share over its bytes, by chosen path."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for path in sorted({r.chosen for r in results}):
        mine = [r for r in results if r.chosen == path]
        axes.plot([r.total_bytes for r in mine], [100 * r.share for r in mine], "o", ms=4, label=path)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of a transfer")
    axes.set_ylabel("% of the best path's rate")
    axes.legend(title="chosen")
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


@exit_status
def main(argv: Sequence[str] | None) -> int:
    options = parser(__doc__)
    options.add_argument("--points", type=int, help="200, or 12 on the CPU")
    options.add_argument("--geometries", type=int, help="pools and slabs that the points are drawn over: 8, or 3")
    options.add_argument("--worst", type=int, default=5, help="points that are explained")
    options.add_argument("--mib", type=int, help="most bytes of a transfer; 1,024 MiB on a GPU, 4 on the CPU")
    options.add_argument("--processes", type=int, default=8, help="that compile kernels ahead")
    args, device = checked(options, argv)
    on_gpu = device.type == "cuda"
    count = args.points or (200 if on_gpu else 12) // (4 if args.quick else 1)
    number = min(count, args.geometries or (8 if on_gpu else 3))
    if min(count, number) < 1 or (args.mib is not None and args.mib < 1):
        options.error("--points, --geometries and --mib: expected at least 1")
    most = args.mib << 20 if args.mib else (MOST_BYTES if on_gpu else CPU_BYTES)
    rng = np.random.default_rng(args.seed)
    geometries = [draw_geometry(rng, n) for n in range(number)]
    points = draw_points(rng, geometries, count, most)
    started = time.perf_counter()
    compile_ahead([(g.shape, g.page_size, g.layout) for g in geometries], device, args.processes if on_gpu else 0)
    with progress(count) as step:
        repeats = args.repeats or 3
        found = measure_points(geometries, points, device, most, repeats=repeats, seed=args.seed, step=step)
        results = list(found)
    print_results(results, args.seed, args.worst, device, time.perf_counter() - started)
    if args.json is not None:
        rows = [asdict(r) | {"share": r.share, "best": r.best} for r in results]
        shares = [r.share for r in results]
        content = {
            "machine": machine_facts(device), "seed": args.seed, "p5": percentile(shares, 0.05), "worst": min(shares),
            "geometries": [asdict(g) for g in geometries], "points": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot_results(results, args.plot)
    wrong = [r for r in results if not r.exact]
    for r in wrong:
        print(f"wrong bytes: {r.point} {r.geometry}", file=sys.stderr)
    return 1 if wrong else 0


def test_choice(benchmark: Any) -> None:
    """A few random points, each path once; the chosen one's bytes compared."""
    device = device_of("auto")
    rng = np.random.default_rng()
    most = MOST_BYTES // 16 if device.type == "cuda" else TEST_BYTES
    geometries = [draw_geometry(rng, 0)]
    points = draw_points(rng, geometries, 4, most)
    results = benchmark.pedantic(
        lambda: list(measure_points(geometries, points, device, most, repeats=1, seed=0)), rounds=1
    )
    assert all(r.exact and 0 < r.share <= 1 for r in results)


if __name__ == "__main__":
    sys.exit(main(None))
