"""A layer-wise load inside the forward that needs it, against the ideal of the same run.

    python bench/bench_layerwise.py                           # 8B-shaped layers, S = 64 to 4,096, 8,192 cached tokens
    python bench/bench_layerwise.py --busy also --baselines   # and beside a Python thread that never sleeps
    python bench/bench_layerwise.py --model llama8b small --cached 1024 8192 32768 --paths auto staged mapped

S new tokens are computed eagerly over a prefix that is being loaded, pages in random order on both sides. *Ideal*:
f_i = max(f_(i-1), arrival of layer i at the rate of one large copy) + time of layer i in the forward alone. Forward
alone and forward with its load take turns, each behind a large copy. Afterwards every byte is compared, and the
forward's output with that of a forward over the same prefix at rest. Without a GPU the same code runs on the CPU
backend with shrunk models.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forward import MODELS, Forward, KVRig, models_for
from harness import LargeCopy
from loads import LAUNCHES, Case, LaunchesBefore, LayerwiseLoad, NoOverlap
from overlap import LONGEST_S, OVER_IDEAL, OVER_LAUNCHES, Row, check, measure, split_of, timed
from processors import PLACEMENTS, Placement, beside_text, kept_awake
from report import (
    CPU_NOTE,
    checked,
    collect,
    exit_status,
    met_text,
    parser,
    peaks_text,
    print_table,
    progress,
    status,
    write_content,
)
from rigs import Rig, device_of

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link_report import require_matplotlib

PATHS = ("auto", "staged", "strided", "mapped", "cpu")
TOKENS, CPU_TOKENS = (64, 256, 512, 1024, 2048, 4096), (16, 64)
CACHED, CPU_CACHED = 8192, 512
PAGE = 16
LIMIT_BYTES, CPU_LIMIT_BYTES = 1 << 30, 4 << 20

# What the total may be over the ideal, by new tokens: 8B-shaped layers over 8,192 cached tokens, pages of 16, the path
# that the engine chooses.
BARS = {64: 1.08, 256: 1.10, 512: 1.15, 1024: 1.06, 2048: 1.05}
BUSY_MORE = 0.15
STYLES: dict[Placement | None, str] = {None: "-", "apart": "--", "free": ":"}  # of a plot's lines


def bar_of(
    model: str, page_size: int, cached: int, new: int, placement: Placement | None, device: torch.device
) -> float | None:
    """What is asked for; None where nothing is."""
    if device.type != "cuda" or (model, page_size, cached) != ("llama8b", PAGE, CACHED) or new not in BARS:
        return None
    return BARS[new] + BUSY_MORE * (placement is not None)


@dataclass(frozen=True)
class Options:
    """What is measured: every model over every prefix with so many new tokens, by every path.

    beside     where a busy Python thread runs beside it; None: without one
    hint       loads are told how long a layer takes
    script     staged loads go through the submitter in C
    repeats    rounds of a case; fewer, but three, where they take longer than ``longest_s``
    """

    models: Sequence[str] = ("llama8b",)
    tokens: Sequence[int] = TOKENS
    cached: Sequence[int] = (CACHED,)
    page_size: int = PAGE
    paths: Sequence[str] = ("auto",)
    beside: Sequence[Placement | None] = (None,)
    baselines: bool = False
    hint: bool = True
    script: bool = True
    repeats: int = 11
    longest_s: float = LONGEST_S
    seed: int = 0

    def groups(self) -> int:
        """How many groups of cases there are: what is timed in turn."""
        return len(self.models) * len(self.cached) * len(self.tokens) * len(self.beside)


def run(
    options: Options, limit: LargeCopy, step: Callable[[str], None] = lambda _: None
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows, and (case, reason) of those that could not run."""
    device = limit.device
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []

    def measured_group(rig: KVRig, forward: Forward, new: int, placement: Placement | None) -> list[Row]:
        name, cached = forward.model.name, rig.count * options.page_size
        x = forward.tokens(new)
        split = split_of(forward, x, placement)
        cases = []
        for what, make in ways(rig, forward, options, split.layer_s if options.hint else None):
            try:
                cases.append(make())
            except ConfigError as error:  # this path can't carry it: said below
                skipped.append((f"{name} by {what}", str(error)))
        bar = bar_of(name, options.page_size, cached, new, placement, device)
        return measure(
            rig, forward, cases, x, limit, split, placement=placement, repeats=options.repeats, bar=bar,
            longest_s=options.longest_s,
        )  # fmt: skip

    def measured() -> Iterator[Row]:
        for name in options.models:
            model = models_for(device)[name]
            forward = Forward(model, device)
            for cached in options.cached:
                with KVRig(
                    model, options.page_size, cached, device, seed=options.seed, script=options.script
                ) as rig:  # fmt: skip
                    forward.bind(rig)
                    for new, placement in itertools.product(options.tokens, options.beside):
                        step(f"{name}, S={new}, cached {cached}{beside_text(placement)}")
                        with kept_awake(placement):
                            group = measured_group(rig, forward, new, placement)
                        yield from group
                    forward.release()
                if device.type == "cuda":
                    torch.cuda.empty_cache()

    collect(rows, measured(), skipped)
    return rows, list(dict.fromkeys(skipped))


def ways(
    rig: Rig, forward: Forward, options: Options, hint_s: float | None
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(name, how to make it) of every case of a group."""
    for path in options.paths:
        yield path, lambda path=path: LayerwiseLoad(rig, forward, path, hint_s)  # type: ignore[misc]
    if options.baselines:
        yield "baselines", lambda: LaunchesBefore(rig, forward)
        yield "baselines", lambda: NoOverlap(rig, forward)


def print_rows(rows: Sequence[Row], limit: LargeCopy, skipped: Sequence[tuple[str, str]]) -> None:
    """A table for each model and prefix, and what could not run."""
    for model, cached in dict.fromkeys((r.model, r.cached_tokens) for r in rows):
        here = [r for r in rows if (r.model, r.cached_tokens) == (model, cached)]
        title = [
            f"{model} over {cached:,} cached tokens, {here[0].total_bytes:,} bytes in pages of {here[0].page_size}",
            f"limits: {peaks_text(limit)}",
        ]
        if limit.device.type == "cpu":
            title.append(f"{CPU_NOTE}, of shrunk models")
        bars = any(r.bar is not None for r in here)
        compared = any(r.over_launch is not None for r in here)
        columns = ["path", "groups", "S", "forward ms", "link ms", "ideal ms", "total ms (low-high)"]
        columns += ["over ideal (95 %)"] + ["bar"] * bars + ["over max"] + ["over launches"] * compared + ["exact"]
        print_table("\n".join(title), columns, [_cells(r, bars, compared) for r in here], left=2)
    if any(r.coverage < 0.95 for r in rows):
        print("* too few repeats for 95 %: the whole range")
    for name, why in skipped:
        print(f"left out: {name}: {why}")


def _cells(r: Row, bars: bool, compared: bool) -> list[str]:
    cells = [r.path, r.groups, f"{r.new_tokens:,}{beside_text(r.placement)}"]
    cells += [f"{s * 1e3:.4g}" for s in (r.forward_s, r.link_s, r.ideal_s)]
    cells.append(f"{r.total_s * 1e3:.4g} ({r.total_low_s * 1e3:.4g}-{r.total_high_s * 1e3:.4g})")
    cells.append(f"{r.over_ideal:.3f} ({r.low:.3f}-{r.high:.3f})" + ("" if r.coverage >= 0.95 else "*"))
    met = {what: f" {met_text(met)}" for what, _, met in r.verdicts()}
    if bars:
        cells.append("" if r.bar is None else f"{r.bar:.2f}{met[OVER_IDEAL]}")
    cells.append(f"{r.over_max:.3f}")
    if compared:
        cells.append("" if r.over_launch is None else f"{r.over_launch:.3f}{met.get(OVER_LAUNCHES, '')}")
    if r.right:
        return [*cells, "yes" if r.output == "same" else "bytes"]
    return [*cells, "NO" if not r.exact else "NO: output"]


def plot(file: Path, rows: Sequence[Row], limit: LargeCopy) -> None:
    """A PNG: total over ideal by new tokens, a panel for each model and prefix, a line for each path, bars as ticks."""
    plt = require_matplotlib()
    panels = list(dict.fromkeys((r.model, r.cached_tokens) for r in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, sharey=True)
    for axis, (model, cached) in zip(axes[0], panels, strict=True):
        here = [r for r in rows if (r.model, r.cached_tokens) == (model, cached)]
        for path, placement in dict.fromkeys((r.path, r.placement) for r in here):
            mine = [r for r in here if (r.path, r.placement) == (path, placement)]
            errors = [r.over_ideal - r.low for r in mine], [r.high - r.over_ideal for r in mine]
            axis.errorbar(
                [r.new_tokens for r in mine], [r.over_ideal for r in mine], yerr=errors, marker="o", ms=3, lw=1,
                ls=STYLES[placement], label=path + beside_text(placement),
            )  # fmt: skip
        asked = [(r.new_tokens, r.bar) for r in here if r.bar is not None]
        if asked:
            axis.plot(*zip(*asked, strict=True), "k_", ms=14, mew=2, label="bar")
        axis.set_xscale("log", base=2)
        axis.axhline(1, ls=":", color="0.4", lw=1)
        axis.set_title(f"{model}, {cached:,} cached tokens", fontsize=9)
        axis.set_xlabel("new tokens")
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("load and forward over the ideal")
    note = f"\n{CPU_NOTE}" if limit.device.type == "cpu" else ""
    figure.suptitle(f"limits: {peaks_text(limit)}{note}", fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


@exit_status
def main(argv: Sequence[str] | None) -> int:
    out = parser(__doc__)
    out.add_argument("--model", nargs="+", choices=MODELS, default=["llama8b"], help="shape of the forward's layers")
    out.add_argument("--tokens", nargs="+", type=int, help="new tokens (S); 64 to 4,096, on the CPU 16 and 64")
    out.add_argument("--cached", nargs="+", type=int, help="tokens of the prefix; 8,192, on the CPU 512")
    out.add_argument("--page-size", type=int, default=PAGE)
    out.add_argument("--paths", nargs="+", choices=PATHS, default=["auto"])
    out.add_argument(
        "--busy", nargs="?", const="only", choices=("only", "also"), help="beside a Python thread that never sleeps"
    )
    out.add_argument(
        "--placement", nargs="+", choices=PLACEMENTS, help="where that thread runs: on a processor of its own (apart, "
        "the default), or where the system puts it (free)",
    )  # fmt: skip
    out.add_argument("--baselines", action="store_true", help=f"also {LAUNCHES}, and a load before the forward")
    out.add_argument("--no-hint", action="store_true", help="loads are not told how long a layer takes")
    out.add_argument("--no-script", action="store_true", help="call by call, without the submitter in C")
    out.add_argument(
        "--seconds", type=float, default=LONGEST_S, help="a case is repeated less often where it takes more"
    )
    args, device = checked(out, argv)
    on_gpu = device.type == "cuda"
    tokens = args.tokens or (TOKENS[:: 2 if args.quick else 1] if on_gpu else CPU_TOKENS)
    cached = args.cached or [CACHED if on_gpu else CPU_CACHED]
    if min(tokens) < 1 or args.page_size < 1 or not args.seconds > 0:
        out.error("--tokens and --page-size: expected at least 1; --seconds: more than 0")
    if any(n < 1 or n % args.page_size for n in cached):
        out.error(f"--cached: expected multiples of --page-size {args.page_size}, got {cached}")
    if args.placement and not args.busy:
        out.error("--placement: expected --busy as well")
    beside = tuple(dict.fromkeys(args.placement or ["apart"])) if args.busy else ()
    try:
        for placement in beside:
            with kept_awake(placement):  # tried before anything is measured
                pass
    except ConfigError as error:
        out.error(str(error))
    options = Options(
        models=tuple(dict.fromkeys(args.model)),
        tokens=tuple(dict.fromkeys(tokens)),
        cached=tuple(dict.fromkeys(cached)),
        page_size=args.page_size,
        paths=tuple(dict.fromkeys(args.paths)),
        beside=beside if args.busy == "only" else (None, *beside),
        baselines=args.baselines,
        hint=not args.no_hint,
        script=not args.no_script,
        repeats=args.repeats or (5 if args.quick else 11),
        longest_s=args.seconds,
        seed=args.seed,
    )
    limit = LargeCopy(device, LIMIT_BYTES if on_gpu else CPU_LIMIT_BYTES)
    with progress(options.groups()) as step:
        rows, skipped = run(options, limit, step)
    print_rows(rows, limit, skipped)
    if args.json is not None:
        limits = {way: asdict(limit.gbps(way)) for way in limit.seen}
        content = [asdict(r) | {"verdicts": r.verdicts()} for r in rows]
        write_content(args.json, device, limits_gbps=limits, rows=content, skipped=[list(s) for s in skipped])
    if args.plot is not None and rows:
        plot(args.plot, rows, limit)
    wrong = [r.name for r in rows if not r.right]
    return status(wrong, skipped)


# -- under pytest bench ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["layer-wise", "launches", "no overlap"])
def test_forward_with_its_load(benchmark: Any, case: str) -> None:
    """The small model over 512 cached tokens; what is timed ends when the last layer is through."""
    device = device_of("auto")
    model = models_for(device)["small"]
    with KVRig(model, PAGE, CPU_CACHED, device) as rig:
        forward = Forward(model, device)
        forward.bind(rig)
        x = forward.tokens(64)
        made: dict[str, Callable[[], Case]] = {
            "layer-wise": lambda: LayerwiseLoad(rig, forward, "auto", None),
            "launches": lambda: LaunchesBefore(rig, forward),
            "no overlap": lambda: NoOverlap(rig, forward),
        }
        work = made[case]()
        benchmark.extra_info |= {"bytes": rig.total_bytes, "path": work.path}
        benchmark.pedantic(lambda: timed(forward, work, x), rounds=5, warmup_rounds=1)
        assert check(rig, forward, work, x)[0]


if __name__ == "__main__":
    sys.exit(main(None))
