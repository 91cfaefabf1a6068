"""Overlaps: how long a forward takes beside the load of its prefix, over the ideal of the same run.

Each `Case` is timed in turn with what it is compared to: one large copy, the forward alone, another large copy, then
the forward with its load, for every case of a round and round by round. The clock of a GPU and the rate of its link
drift within a run, so ratios are taken pair by pair, and the figure is their median. Both forwards come behind a copy:
straight behind another forward, one that fills the GPU finds it at a lower clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from forward import Forward, ideal_s
from harness import FEWEST, LargeCopy
from loads import LAUNCHES, Case, End, LaunchesBefore, LayerwiseLoad
from paired import Interval, Spread, paired_ratio
from processors import Placement, beside_text, busy_thread
from rigs import Rig
from works import moved_exactly

WARM_UPS = 5  # forwards alone whose times do not count
SPLIT_RUNS = 3  # forwards alone that say how one is split over its layers, and others that say how long it is
LONG_S = 1.0  # one forward that takes so long is enough: what disturbs a short one is lost in it
LONGEST_S = 4.0  # of the rounds of one case
OVER_IDEAL, OVER_LAUNCHES = "over ideal", f"over {LAUNCHES}"  # what bars are of


@dataclass(frozen=True)
class Row:
    """A load beside a forward of ``new_tokens`` over ``cached_tokens``. Times are medians over ``repeats`` rounds, by
    the GPU's clock where there is one. GB = 1e9 bytes.

    groups      sizes of the layer groups in which the load travels, or what stands for them
    placement   where a Python thread that never rests ran beside both forwards; None: there was none
    hint_s      ``compute_s_per_layer`` that the load was given; None: nothing
    peak_gbps   one large copy to the device, measured in turn with the case
    link_s      the load's bytes at that rate
    forward_s   the forward alone, beside the same thread where there is one
    layer_s     its layers: the split of single forwards, scaled to ``forward_s``
    ideal_s     f_i = max(f_(i-1), arrival of layer i at the peak) + time of layer i
    total_s     load and forward, from the call of the load to the end of the last layer
    over_ideal  the median of the rounds' ratios; it lies between ``low`` and ``high`` with probability ``coverage``.
                Beside a busy thread of times in which layers behind the load's end are `even`
    uneven      the median of the total over the forward alone, as each of them was; None without a busy thread
    over_max    total over max(forward alone, link time), likewise
    over_launch total over that of one launch a layer in the same round; None: that was not measured
    bar         what ``over_ideal`` must not exceed; None: nothing is asked
    exact       every byte was compared afterwards and was right
    output      the forward's result beside a load into scrambled pages, against one over the same prefix at rest:
                "same" to the bit, "differs", or "unrepeatable" where two at rest differ as well
    """

    model: str
    page_size: int
    new_tokens: int
    cached_tokens: int
    case: str
    path: str
    groups: str
    placement: Placement | None
    hint_s: float | None
    total_bytes: int
    repeats: int
    peak_gbps: float
    link_s: float
    forward_s: float
    layer_s: tuple[float, ...]
    ideal_s: float
    total_s: float
    total_low_s: float
    total_high_s: float
    over_ideal: float
    low: float
    high: float
    coverage: float
    uneven: float | None
    over_max: float
    over_launch: float | None
    bar: float | None
    exact: bool
    output: str

    @property
    def right(self) -> bool:
        """Whether nothing speaks against the bytes."""
        return self.exact and self.output != "differs"

    @property
    def name(self) -> str:
        beside = beside_text(self.placement)
        return f"{self.model}, S={self.new_tokens}, cached {self.cached_tokens}{beside}, {self.path}"

    def verdicts(self) -> list[tuple[str, float, bool]]:
        """(what, at most, whether it is met) of everything that is asked for and was measured."""
        if self.bar is None:
            return []
        out = [(OVER_IDEAL, self.bar, self.over_ideal <= self.bar)]
        if self.over_launch is not None:
            out.append((OVER_LAUNCHES, 1.0, self.over_launch < 1))
        return out


@dataclass(frozen=True)
class Split:
    """How a forward alone spreads over its layers. ``shares`` add up to 1; ``layer_s``: the mean layer of
    forwards without marks, in seconds."""

    shares: tuple[float, ...]
    layer_s: float

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]], whole_s: Sequence[float]) -> Split:
        """Medians over ``runs``, each the seconds of every layer, and over those of whole forwards."""
        layers = [statistics.median(times) for times in zip(*runs, strict=True)]
        return cls(tuple(t / sum(layers) for t in layers), statistics.median(whole_s) / len(layers))


def split_of(forward: Forward, x: torch.Tensor, placement: Placement | None) -> Split:
    """Of forwards alone, beside a busy thread where ``placement`` says where. Marks between layers cost time of their
    own, most of all in a busy process: runs with them say how a forward is split, others how long it is."""
    for _ in range(WARM_UPS):
        forward.seconds(lambda: forward(x))
    with busy_thread(placement):
        marked = [forward.layer_seconds(x)]
        runs = 1 if sum(marked[0]) >= LONG_S else SPLIT_RUNS
        marked += [forward.layer_seconds(x) for _ in range(runs - 1)]
        return Split.of(marked, [forward.seconds(lambda: forward(x)) for _ in range(runs)])


@dataclass(frozen=True)
class Round:
    """Seconds of one case in one round. ``uneven``: see `Row`."""

    peak_gbps: float
    alone_s: float
    total_s: float
    uneven: float | None = None


def rounds(
    forward: Forward,
    x: torch.Tensor,
    cases: Sequence[Case],
    limit: LargeCopy,
    placement: Placement | None,
    repeats: int,
    longest_s: float,
) -> list[list[Round]]:
    """Of each case, ``repeats`` rounds. Fewer (but `FEWEST`) where they would take longer than ``longest_s`` a case."""
    for case in cases:  # compiles what is left to compile, and starts what threads a case has: none must inherit a pin
        timed(forward, case, x)
    out: list[list[Round]] = [[] for _ in cases]
    started = time.perf_counter()
    for done in range(repeats):
        if done >= FEWEST and time.perf_counter() - started > longest_s * len(cases) * done / (done + 1):
            break
        for case, into in zip(cases, out, strict=True):
            into.append(one_round(forward, x, case, limit, placement, flip=done % 2 == 1))
    return out


def one_round(
    forward: Forward, x: torch.Tensor, case: Case, limit: LargeCopy, placement: Placement | None, flip: bool
) -> Round:
    """Large copy, forward alone, large copy, forward with its load.

    With a ``placement``: both copies, then both forwards beside one busy thread, the other way round with ``flip``, and
    made `even`.
    """
    copies_s = limit.seconds("load")
    if placement is None:
        alone_s = forward.seconds(lambda: forward(x))
        copies_s += limit.seconds("load")
        total_s, uneven = timed(forward, case, x), None
    else:
        copies_s += limit.seconds("load")
        with busy_thread(placement):
            loaded = layers_of(forward, case, x) if flip else None
            alone = forward.host_seconds(lambda: forward(x))
            loaded = layers_of(forward, case, x) if loaded is None else loaded
        alone_s, total_s = even(alone, *loaded)
        uneven = sum(loaded[0]) / sum(alone)
    return Round(2 * limit.nbytes / copies_s / 1e9, alone_s, total_s, uneven)


def layers_of(forward: Forward, case: Case, x: torch.Tensor) -> tuple[list[float], int]:
    """(seconds of each layer of the forward with its load, of how many the load may have been a part). Returns once the
    load has been acknowledged, which is not counted."""
    ends: list[End] = []
    touched = 1  # its call comes before the first layer

    def after() -> None:
        nonlocal touched
        touched += not case.done()

    layer_s = forward.host_seconds(lambda: ends.append(case.run(x)[1]), after)
    ends[0]()
    return layer_s, min(touched, len(layer_s))


def even(alone: Sequence[float], loaded: Sequence[float], touched: int) -> tuple[float, float]:
    """Seconds of both forwards, where layers that began behind the load's end take what they took on average of both:
    the same work beside the same thread. A forward of some seconds beside a thread that takes the GIL is 30 % longer or
    shorter the next time, and a load of 20 ms is over in its first layer: what the other 31 differ by says nothing
    of it."""
    rest = (sum(alone[touched:]) + sum(loaded[touched:])) / 2
    return sum(alone[:touched]) + rest, sum(loaded[:touched]) + rest


def timed(forward: Forward, case: Case, x: torch.Tensor) -> float:
    """Seconds of load and forward. Returns once the load has been acknowledged, which is not counted."""
    ends: list[End] = []
    seconds = forward.seconds(lambda: ends.append(case.run(x)[1]))
    ends[0]()
    return seconds


def measure(
    rig: Rig,
    forward: Forward,
    cases: Sequence[Case],
    x: torch.Tensor,
    limit: LargeCopy,
    split: Split,
    *,
    placement: Placement | None,
    repeats: int,
    bar: float | None = None,
    longest_s: float = LONGEST_S,
) -> list[Row]:
    """A row of each case: timed in turn, then checked. ``bar`` is asked of the path that the engine chooses."""
    seen = rounds(forward, x, cases, limit, placement, repeats, longest_s)
    launches = next((r for c, r in zip(cases, seen, strict=True) if isinstance(c, LaunchesBefore)), None)
    rows = []
    for case, mine in zip(cases, seen, strict=True):
        layerwise_load = isinstance(case, LayerwiseLoad)
        over, ideals, link_s = over_ideal(rig, split, mine)
        totals = [r.total_s for r in mine]
        alone_s = statistics.median(r.alone_s for r in mine)
        span = Spread.of(totals)
        exact, output = check(rig, forward, case, x)
        rows.append(
            Row(
                model=forward.model.name,
                page_size=rig.spec.page_size,
                new_tokens=x.shape[0],
                cached_tokens=rig.count * rig.spec.page_size,
                case=case.name,
                path=case.path,
                groups=case.groups,
                placement=placement,
                hint_s=case.hint_s,
                total_bytes=rig.total_bytes,
                repeats=len(mine),
                peak_gbps=statistics.median(r.peak_gbps for r in mine),
                link_s=statistics.median(link_s),
                forward_s=alone_s,
                layer_s=tuple(share * alone_s for share in split.shares),
                ideal_s=statistics.median(ideals),
                total_s=span.median,
                total_low_s=span.low,
                total_high_s=span.high,
                over_ideal=over.median,
                low=over.low,
                high=over.high,
                coverage=over.coverage,
                uneven=statistics.median(r.uneven or 0.0 for r in mine) if placement is not None else None,
                over_max=paired_ratio(
                    totals, [max(r.alone_s, s) for r, s in zip(mine, link_s, strict=True)]
                ).median,
                over_launch=None
                if launches is None or not layerwise_load
                else paired_ratio(totals, [r.total_s for r in launches]).median,
                bar=bar if case.path.startswith("auto") else None,
                exact=exact,
                output=output,
            )
        )  # fmt: skip
    return rows


def over_ideal(rig: Rig, split: Split, mine: Sequence[Round]) -> tuple[Interval, list[float], list[float]]:
    """(total over ideal, the ideal of each round, the link time of each round)."""
    by_layer = [rig.count * until for until in rig.spec.layer_offsets[1:]]
    ideals, link_s = [], []
    for r in mine:
        arrivals = [nbytes / r.peak_gbps / 1e9 for nbytes in by_layer]
        ideals.append(ideal_s([share * r.alone_s for share in split.shares], arrivals))
        link_s.append(arrivals[-1])
    return paired_ratio([r.total_s for r in mine], ideals), ideals, link_s


def check(rig: Rig, forward: Forward, case: Case, x: torch.Tensor) -> tuple[bool, str]:
    """(whether all bytes that were to move did and no others, `Row.output`), of one more load into scrambled pages: a
    layer that did not wait for its KV reads other numbers and tells by its output."""
    outputs: list[torch.Tensor] = []

    def load_and_forward() -> None:
        ends: list[End] = []

        def work() -> None:
            out, end = case.run(x)
            outputs.append(out)
            ends.append(end)

        forward.seconds(work)
        ends[0]()

    exact = moved_exactly(rig, "load", load_and_forward)
    for _ in range(2):
        forward.seconds(lambda: outputs.append(forward(x)))
    if not torch.equal(outputs[1], outputs[2]):
        return exact, "unrepeatable"
    return exact, "same" if torch.equal(outputs[0], outputs[1]) else "differs"
