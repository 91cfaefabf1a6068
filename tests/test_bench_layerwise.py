"""The benchmark of loads beside a forward, of small copies beside transfers, and the short form, on the CPU backend."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_core
import bench_layerwise
import bench_neighbours
import numpy as np
import overlap
import pytest
import torch
from bench_helpers import spoil
from bench_layerwise import BARS, Options, bar_of, run
from bench_neighbours import Latency
from conftest import HAS_GPU
from forward import MODELS, SHRUNK, Forward, KVRig, Model, ideal_s
from harness import FEWEST, LargeCopy
from loads import LAUNCHES, Case, End, LaunchesBefore, LayerwiseLoad, NoOverlap, groups_text
from neighbours import Begun, Neighbour, Nothing, sample
from overlap import (
    OVER_IDEAL,
    OVER_LAUNCHES,
    Round,
    Split,
    check,
    even,
    layers_of,
    measure,
    over_ideal,
    rounds,
    split_of,
)
from processors import PLACEMENTS, Placement, kept_awake
from rigs import device_of

from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import TransferError

CPU = torch.device("cpu")
TINY = Model("tiny", 3, 16, 24, 2, 1, 8)
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
GPU_OR_CPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=GPU_OR_CPU)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_of(request.param)


@pytest.fixture
def rig(device: torch.device) -> Iterator[KVRig]:
    with KVRig(TINY, 4, 36, device) as made:
        yield made


@pytest.fixture
def forward(rig: KVRig) -> Forward:
    made = Forward(TINY, rig.device)
    made.bind(rig)
    return made


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """A busy thread gives up the GIL more often than it would, so that these tests end soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


# -- the ideal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_s", "arrivals_s", "want"),
    [
        ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 6.0),  # all there: the forward alone
        ([1.0, 1.0, 1.0], [5.0, 10.0, 15.0], 16.0),  # the link is slower: its end and one layer
        ([4.0, 1.0, 1.0], [1.0, 2.0, 9.0], 10.0),  # waits for the first and for the last
        ([1.0, 6.0], [2.0, 2.5], 9.0),
    ],
)
def test_the_ideal_waits_layer_by_layer(layer_s: list[float], arrivals_s: list[float], want: float) -> None:
    assert ideal_s(layer_s, arrivals_s) == want


def test_the_ideal_is_the_longest_way_through() -> None:
    """A forward is through at the latest of: a layer's arrival and everything from it on."""
    draw = random.Random()
    for _ in range(50):
        layers = draw.randint(1, 9)
        takes = [draw.random() for _ in range(layers)]
        arrives = np.cumsum([draw.random() for _ in range(layers)]).tolist()
        ways = [sum(takes), *(a + sum(takes[i:]) for i, a in enumerate(arrives))]
        assert ideal_s(takes, arrives) == pytest.approx(max(ways))


def test_a_split_is_made_of_medians() -> None:
    split = Split.of([[1.0, 3.0], [1.2, 2.8], [9.0, 3.0]], [9.0, 3.0, 3.5])
    assert split.shares == pytest.approx((1.2 / 4.2, 3 / 4.2)) and split.layer_s == 1.75


def test_the_ideal_of_a_round_is_of_its_own_times(rig: KVRig) -> None:
    """A machine that gets slower by half takes its ideal along: the ratio stays."""
    split = Split((0.5, 0.25, 0.25), 1.0)
    seen = []
    for slow in (1.0, 1.5, 1.2):
        peak_gbps = rig.total_bytes / (0.9 * slow) / 1e9  # arrivals 0.3, 0.6, 0.9; layers 0.5, 0.25, 0.25
        seen.append(Round(peak_gbps, 1.0 * slow, 1.2 * (0.3 + 1.0) * slow))
    over, ideals, link_s = over_ideal(rig, split, seen)
    assert (over.median, over.low, over.high) == pytest.approx((1.2, 1.2, 1.2))
    assert ideals == pytest.approx([1.3, 1.95, 1.56]) and link_s == pytest.approx([0.9, 1.35, 1.08])


# -- turns -------------------------------------------------------------------------------------------


class FakeForward:
    """Tells what is asked of it: its forward takes a second, with a load it takes longer from round to round."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.model, self.stream = said, TINY, None

    def __call__(self, x: torch.Tensor) -> None:
        self.said.append("forward" + ", busy" * is_busy())

    def seconds(self, work: Callable[[], object]) -> float:
        before = len(self.said)
        work()
        return 1.0 if self.said[before].startswith("forward") else float(len(self.said))

    def host_seconds(self, work: Callable[[], object], after: Callable[[], None] | None = None) -> list[float]:
        return [self.seconds(work)]


class FakeCase(Case):
    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name, self.done = said, name, lambda: True

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        self.said.append(self.name + ", busy" * is_busy())
        return x, lambda: self.said.append(f"end of {self.name}")


def is_busy() -> bool:
    return any(thread.name == "busy" for thread in threading.enumerate())


@needs_two
@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
def test_large_copy_forward_and_load_take_turns(placement: Placement | None) -> None:
    said: list[str] = []

    def copy(way: str) -> float:
        said.append(way + ", busy" * is_busy())
        return 0.5

    limit: Any = SimpleNamespace(nbytes=10**9, seconds=copy)
    cases = [FakeCase(said, "a"), FakeCase(said, "b")]
    fake: Any = FakeForward(said)
    got = rounds(fake, torch.ones(1), cases, limit, placement, 2, 60.0)
    first = [w for c in "ab" for w in ("load", "forward", "load", c, f"end of {c}")]
    second = first
    if placement is not None:
        first = [w for c in "ab" for w in ("load", "load", "forward, busy", f"{c}, busy", f"end of {c}")]
        second = [w for c in "ab" for w in ("load", "load", f"{c}, busy", f"end of {c}", "forward, busy")]
    assert said == ["a", "end of a", "b", "end of b", *first, *second], "the first round warms up"
    assert [len(r) for r in got] == [2, 2] and got[0][0].peak_gbps == 2.0
    assert all(r.alone_s == 1.0 < r.total_s for mine in got for r in mine)
    assert all(r.uneven == (None if placement is None else r.total_s) for mine in got for r in mine)
    said.clear()
    assert [len(r) for r in rounds(fake, torch.ones(1), cases[:1], limit, None, 50, 0.0)] == [FEWEST]


class Landing(Case):
    """Nothing is loaded; it is ``done`` behind so many layers."""

    def __init__(self, rig: KVRig, forward: Forward, layers: int) -> None:
        super().__init__(rig, forward)
        self.left, self.layers = layers, layers
        self.done = self.is_done
        self.ended = 0

    def is_done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        self.left = self.layers

        def end() -> None:
            self.ended += 1

        return self.forward(x), end


@pytest.mark.parametrize("landed_behind", range(TINY.layers + 1))
def test_layers_behind_the_end_of_a_load_are_known(rig: KVRig, forward: Forward, landed_behind: int) -> None:
    case = Landing(rig, forward, landed_behind)
    layer_s, touched = layers_of(forward, case, forward.tokens(2))
    assert touched == min(landed_behind + 1, TINY.layers) and case.ended == 1
    assert len(layer_s) == TINY.layers and all(s > 0 for s in layer_s)


def test_real_loads_say_when_they_have_ended(rig: KVRig, forward: Forward) -> None:
    for case in cases_of(rig, forward):
        seen: list[bool] = []

        def after(case: Case = case, seen: list[bool] = seen) -> None:
            seen.append(case.done())

        ends: list[End] = []
        forward.host_seconds(lambda case=case, ends=ends: ends.append(case.run(forward.tokens(2))[1]), after)  # type: ignore[misc]
        ends[0]()
        assert len(seen) == TINY.layers and seen == sorted(seen) and case.done(), case.name


def test_what_a_forward_differs_by_behind_the_load_counts_for_nothing() -> None:
    alone, loaded = [1.0, 2.0, 3.0, 4.0], [1.5, 2.0, 9.0, 1.0]
    assert even(alone, loaded, 1) == (1.0 + 10.5, 1.5 + 10.5)
    assert even(alone, loaded, 3) == (6.0 + 2.5, 12.5 + 2.5)
    assert even(alone, loaded, 4) == (sum(alone), sum(loaded)), "it was there until the end"


def test_a_forward_that_fails_is_watched_no_more(forward: Forward) -> None:
    x, seen = forward.tokens(2), list[int]()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        forward.host_seconds(lambda: forward(torch.ones(1)), lambda: seen.append(1))
    forward(x)
    assert not seen
    layer_s = forward.host_seconds(lambda: forward(x), lambda: seen.append(1))
    assert len(seen) == len(layer_s) == TINY.layers and min(layer_s) > 0


# -- forwards ----------------------------------------------------------------------------------------


def test_pools_hold_numbers(rig: KVRig, forward: Forward) -> None:
    """And outputs are numbers: nobody times NaN."""
    rows = rig.page_rows(rig.pages).view(torch.bfloat16)
    assert bool(torch.isfinite(rows).all()) and len(rows.unique()) > 100
    assert bool(torch.isfinite(forward(forward.tokens(5))).all())


def test_a_forward_reads_every_layer_of_its_pages(rig: KVRig, forward: Forward) -> None:
    x = forward.tokens(5)
    before = forward(x)
    assert torch.equal(forward(x), before)
    rig.pool.view(0, "k", torch.bfloat16)[torch.from_numpy(rig.other_pages)] += 1
    assert torch.equal(forward(x), before), "pages of others"
    for layer in range(TINY.layers):
        for name in ("k", "v"):
            page = int(rig.pages[-1])
            view = rig.pool.view(layer, name, torch.bfloat16)[page]
            kept = view.clone()
            view.normal_()
            assert not torch.equal(forward(x), before), (layer, name)
            view.copy_(kept)
    assert torch.equal(forward(x), before)


def test_layers_are_timed_one_by_one(forward: Forward) -> None:
    x = forward.tokens(3)
    layer_s = forward.layer_seconds(x)
    assert len(layer_s) == TINY.layers and all(s > 0 for s in layer_s)
    ends = forward.marks(lambda mark: forward(x, mark))
    assert len(ends) == TINY.layers + 1 and ends == sorted(ends)
    split = split_of(forward, x, None)
    assert sum(split.shares) == pytest.approx(1) and split.layer_s > 0


@pytest.mark.parametrize(("layer_s", "forwards"), [(1e-3, overlap.SPLIT_RUNS), (overlap.LONG_S, 1)])
def test_a_slow_forward_is_split_by_one_run(
    forward: Forward, monkeypatch: pytest.MonkeyPatch, layer_s: float, forwards: int
) -> None:
    seen: list[str] = []
    shares = [layer_s * (layer + 1) for layer in range(TINY.layers)]

    def layer_seconds(x: torch.Tensor) -> list[float]:
        seen.append("marked")
        return shares

    def seconds(work: Callable[[], object]) -> float:
        seen.append("whole")
        return 2 * sum(shares)

    monkeypatch.setattr(forward, "layer_seconds", layer_seconds)
    monkeypatch.setattr(forward, "seconds", seconds)
    split = split_of(forward, forward.tokens(3), None)
    assert seen == ["whole"] * overlap.WARM_UPS + ["marked"] * forwards + ["whole"] * forwards
    assert split.shares == tuple(s / sum(shares) for s in shares)
    assert split.layer_s == pytest.approx(2 * sum(shares) / TINY.layers)


@needs_two
def test_a_forward_is_split_where_it_is_timed(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up before it is alone: what threads a forward starts are started there."""
    seen: list[tuple[str, int, bool]] = []

    def saying(what: str, answer: Any) -> Callable[[object], Any]:
        def say(_: object) -> Any:
            seen.append((what, len(os.sched_getaffinity(0)), is_busy()))
            return answer

        return say

    monkeypatch.setattr(forward, "layer_seconds", saying("marked", [1.0] * TINY.layers))
    monkeypatch.setattr(forward, "seconds", saying("whole", 3.0))
    split_of(forward, forward.tokens(3), "apart")
    free = ("whole", len(os.sched_getaffinity(0)), False)
    assert seen == [free] * overlap.WARM_UPS + [("marked", 1, True), ("whole", 1, True)]


def test_models_have_a_shrunk_twin() -> None:
    assert set(MODELS) == set(SHRUNK)
    for model in (*MODELS.values(), *SHRUNK.values()):
        assert model.query_heads % model.heads == 0
        assert model.shape().spec(16).page_bytes == 16 * model.layers * 2 * model.heads * model.dim * 2
    assert MODELS["llama8b"].shape().spec(16).page_bytes == 2 << 20


# -- loads -------------------------------------------------------------------------------------------


def cases_of(rig: KVRig, forward: Forward) -> list[Case]:
    paths = ("auto", "staged", "mapped") if rig.device.type == "cuda" else ("auto", "staged")
    loads = [LayerwiseLoad(rig, forward, path, 1e-4) for path in paths]
    return [*loads, LaunchesBefore(rig, forward), NoOverlap(rig, forward)]


def test_loads_are_exact_and_waited_for(rig: KVRig, forward: Forward) -> None:
    x = forward.tokens(7)
    for case in cases_of(rig, forward):
        assert check(rig, forward, case, x) == (True, "same"), case.path


class TooLate(Case):
    """The forward reads its prefix before it is there."""

    path = "too late"

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        out = self.forward(x)
        load = self.rig.engine.load(self.rig.slots, self.rig.pages)
        return out, lambda: load.result(10)


class Idle(Case):
    """Nothing is loaded at all."""

    path = "idle"

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        return self.forward(x), lambda: None


def test_a_layer_that_did_not_wait_is_found(rig: KVRig, forward: Forward) -> None:
    x = forward.tokens(2)
    assert check(rig, forward, TooLate(rig, forward), x) == (True, "differs")
    assert check(rig, forward, Idle(rig, forward), x)[0] is False
    limit = LargeCopy(rig.device, 1 << 16)
    late, fine = measure(
        rig, forward, [TooLate(rig, forward), NoOverlap(rig, forward)], x, limit, split_of(forward, x, None),
        placement=None, repeats=2,
    )  # fmt: skip
    assert late.exact and not late.right and fine.right


def test_a_forward_that_does_not_repeat_says_so(rig: KVRig, forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Forward.__call__
    monkeypatch.setattr(Forward, "__call__", lambda self, x, after=None: real(self, x, after) + torch.rand(1).item())
    assert check(rig, forward, NoOverlap(rig, forward), forward.tokens(2)) == (True, "unrepeatable")


def test_groups_are_written_short(rig: KVRig, forward: Forward) -> None:
    def plan(path: str, *spans: tuple[int, int]) -> Any:
        boxes = [SimpleNamespace(layer_start=a, layer_stop=b) for a, b in spans]
        return SimpleNamespace(path=path, chunks=[SimpleNamespace(box=box) for box in boxes for _ in range(2)])

    assert groups_text(plan("staged", (0, 1), (1, 3), (3, 7), (7, 11), (11, 12))) == "1,2,4x2,1"
    assert groups_text(plan("mapped", (0, 32))) == "flags"
    assert LaunchesBefore(rig, forward).groups == "1x3"


def test_loads_are_told_how_long_a_layer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []
    real = TransferEngine.load

    def load(self: TransferEngine, *args: Any, **more: Any) -> Any:
        if more.get("layerwise"):
            told.append(more["compute_s_per_layer"])
        return real(self, *args, **more)

    monkeypatch.setattr(TransferEngine, "load", load)
    limit = LargeCopy(CPU, 1 << 16)
    for hint in (True, False):
        told.clear()
        options = Options(("small",), tokens=(3,), cached=(32,), hint=hint, repeats=2)
        (row,), skipped = run(options, limit)
        assert skipped == [] and row.right
        assert told == [row.hint_s] * len(told) and len(told) == 4, "a warm-up, two rounds, the check"
        assert (row.hint_s is not None) == hint
        if row.hint_s is not None:
            assert 0 < row.hint_s < 1


class Watched(Case):
    """A case that looks, while it is timed, which threads there are that may use one processor only, and which of all
    that there were is the busy one. (One that was joined may still be there, on its way out.)"""

    def __init__(self, case: Case, pinned: list[set[int]], busy: set[int]) -> None:
        self.case, self.pinned, self.busy = case, pinned, busy
        self.done = lambda: case.done()

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        got = self.case.run(x)
        pinned = set()
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):  # it has ended
                if len(os.sched_getaffinity(thread)) == 1:
                    pinned.add(thread)
        self.pinned.append(pinned)
        self.busy |= {t.native_id for t in threading.enumerate() if t.name == "busy" and t.native_id is not None}
        return got


@needs_two
def test_threads_of_an_engine_are_not_pinned(rig: KVRig, forward: Forward, quick_turns: None) -> None:
    """They are all there after the warm-up, and none inherits the processor of the caller that is timed."""
    pinned, busy = list[set[int]](), set[int]()
    cases = [Watched(case, pinned, busy) for case in cases_of(rig, forward)]
    rounds(forward, forward.tokens(3), cases, LargeCopy(rig.device, 1 << 16), "apart", 2, 60.0)
    warm, timed = pinned[: len(cases)], pinned[len(cases) :]
    me = threading.get_native_id()
    assert not any(warm) and len(timed) == 2 * len(cases)
    assert all(threads - busy == {me} and threads & busy for threads in timed)


# -- rows and bars -----------------------------------------------------------------------------------


def test_bars_are_of_the_shape_that_they_were_set_for() -> None:
    gpu = torch.device("cuda", 0)
    assert [bar_of("llama8b", 16, 8192, new, None, gpu) for new in BARS] == [1.08, 1.10, 1.15, 1.06, 1.05]
    for new, bar in BARS.items():
        for placement in ("apart", "free"):
            assert bar_of("llama8b", 16, 8192, new, placement, gpu) == pytest.approx(bar + 0.15)
    for other in [
        ("small", 16, 8192, 64),
        ("llama8b", 1, 8192, 64),
        ("llama8b", 16, 4096, 64),
        ("llama8b", 16, 8192, 8),
    ]:
        assert bar_of(*other, None, gpu) is None
    assert bar_of("llama8b", 16, 8192, 64, None, CPU) is None


def test_rows_say_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with KVRig(TINY, 4, 36, CPU) as rig:
        forward = Forward(TINY, CPU)
        forward.bind(rig)
        x = forward.tokens(3)
        limit = LargeCopy(CPU, 1 << 18)
        split = split_of(forward, x, None)
        cases = cases_of(rig, forward)
        rows = measure(rig, forward, cases, x, limit, split, placement=None, repeats=7, bar=1e6)
    for row, case in zip(rows, cases, strict=True):
        assert row.repeats == 7 and row.coverage >= 0.95 and row.right
        assert (row.new_tokens, row.cached_tokens, row.total_bytes) == (3, 36, rig.total_bytes)
        assert row.low <= row.over_ideal <= row.high and row.total_low_s <= row.total_s <= row.total_high_s
        assert sum(row.layer_s) == pytest.approx(row.forward_s) and row.ideal_s >= row.forward_s
        assert row.link_s == pytest.approx(rig.total_bytes / row.peak_gbps / 1e9)
        assert (row.bar is not None) == case.path.startswith("auto"), "asked of what the engine chooses"
        assert (row.over_launch is not None) == isinstance(case, LayerwiseLoad)
    auto = rows[0]
    assert [what for what, _, _ in auto.verdicts()] == [OVER_IDEAL, OVER_LAUNCHES] and auto.verdicts()[0][2]
    missed = [replace_row(auto, bar=0.5, over_launch=1.25), replace_row(rows[1], exact=False)]
    bench_layerwise.print_rows([*missed, replace_row(auto, output="differs")], limit, [("that", "no reason")])
    out = capsys.readouterr().out
    assert "0.50 MISSED" in out and "1.250 MISSED" in out and "1000000.00 met" in out and "memcpy (load)" in out
    assert "NO: output" in out and "left out: that: no reason" in out and LAUNCHES not in out
    assert auto.name == "tiny, S=3, cached 36, auto: cpu"
    assert replace_row(auto, placement="apart").name == "tiny, S=3, cached 36, busy apart, auto: cpu"


def replace_row(row: Any, **more: Any) -> Any:
    return type(row)(**{name: more.get(name, getattr(row, name)) for name in type(row).__dataclass_fields__})


# -- scripts -----------------------------------------------------------------------------------------

ON_CPU = ["--device", "cpu", "--repeats", "2"]


@needs_two
def test_layerwise_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_turns: None) -> None:
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--model", "llama8b", "small", "--tokens", "5", "--cached", "64", "128", "--paths", "auto", "mapped"]
    words += ["--busy", "also", "--baselines", "--json", str(data), "--plot", str(picture)]
    assert bench_layerwise.main([*ON_CPU, *words]) == 0
    out = capsys.readouterr().out
    assert "CPU backend" in out and "shrunk models" in out and "nan" not in out
    assert "left out: small by mapped" in out and "llama8b over 128 cached tokens" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    got = json.loads(data.read_text())
    want = [
        (model, cached, new, placement, path)
        for model in ("llama8b", "small")
        for cached in (64, 128)
        for new in (5,)
        for placement in (None, "apart")
        for path in ("auto: cpu", LAUNCHES, "load, then forward")
    ]
    fields = ("model", "cached_tokens", "new_tokens", "placement", "path")
    assert [tuple(row[f] for f in fields) for row in got["rows"]] == want
    assert all(row["exact"] and row["output"] == "same" and row["verdicts"] == [] for row in got["rows"])
    assert got["limits_gbps"]["load"]["median"] > 0 and len(got["skipped"]) == 2


@needs_two
def test_the_script_beside_a_busy_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_turns: None) -> None:
    data = tmp_path / "out.json"
    words = ["--tokens", "2", "--cached", "64", "--busy", "--placement", *PLACEMENTS, "--json", str(data)]
    before = os.sched_getaffinity(0)
    assert bench_layerwise.main([*ON_CPU, *words, "--plot", str(tmp_path / "out.png")]) == 0
    assert os.sched_getaffinity(0) == before and not is_busy()
    out, rows = capsys.readouterr().out, json.loads(data.read_text())["rows"]
    assert [row["placement"] for row in rows] == list(PLACEMENTS)
    assert all(row["exact"] and row["output"] == "same" and row["repeats"] == 2 for row in rows)
    assert all(f"2, busy {placement}" in out for placement in PLACEMENTS)


def test_a_placement_that_cant_be_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with pytest.raises(SystemExit) as end:
            bench_layerwise.main([*ON_CPU, "--busy"])
    finally:
        os.sched_setaffinity(0, before)
    assert end.value.code == 2 and "at least 2 processors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["--tokens", "0"], "expected at least 1"),
        (["--seconds", "nan"], "more than 0"),
        (["--cached", "40"], "multiples of --page-size 16, got [40]"),
        (["--cached", "0"], "multiples of --page-size"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--busy", "never"], "invalid choice"),
        (["--busy", "--placement", "near"], "invalid choice: 'near'"),
        (["--placement", "apart"], "expected --busy as well"),
        (["--repeats", "0"], "expected at least 1"),
    ],
)
def test_bad_input_is_exit_status_2(bad: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_layerwise.main(["--device", "cpu", *bad])
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layerwise", "core"])
def test_a_wrong_byte_is_exit_status_1(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, loads_alone=True)
    monkeypatch.setattr(bench_core, "PAGE_SIZES", (64,))
    if name == "core":
        assert bench_core.main([*ON_CPU, "--quick"]) == 1
    else:
        assert bench_layerwise.main([*ON_CPU, "--tokens", "2", "--cached", "64"]) == 1
    assert "wrong bytes: " in capsys.readouterr().err


@pytest.mark.parametrize("beside", [[], pytest.param(["--busy"], marks=needs_two)])
@pytest.mark.parametrize("measured", [0, 1])
def test_ctrl_c_shows_what_was_measured_until_then(
    measured: int,
    beside: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    quick_turns: None,
) -> None:
    seen: list[int] = []
    spinners: list[int] = []

    def split(forward: Forward, x: torch.Tensor, placement: Placement | None) -> Split:
        if len(seen) == measured:
            signal.raise_signal(signal.SIGINT)
        seen.append(x.shape[0])
        return split_of(forward, x, placement)

    @contextmanager
    def awake(placement: Placement | None) -> Iterator[None]:
        with kept_awake(placement) as made:
            spinners.extend(made)
            yield

    monkeypatch.setattr(bench_layerwise, "split_of", split)
    monkeypatch.setattr(bench_layerwise, "kept_awake", awake)
    before, files = signal.signal(signal.SIGINT, signal.default_int_handler), ["--json", "a", "--plot", "b"]
    words = [str(tmp_path / word) if "-" not in word else word for word in files]
    try:
        assert bench_layerwise.main([*ON_CPU, "--tokens", "2", "3", "--cached", "64", *words, *beside]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "left out: the rest: interrupted" in capsys.readouterr().out
    got = json.loads((tmp_path / "a").read_text())
    assert [row["new_tokens"] for row in got["rows"]] == [2][:measured] and all(row["exact"] for row in got["rows"])
    assert (tmp_path / "b").exists() == bool(measured)
    assert bool(spinners) == bool(beside)
    for spinner in spinners:
        with pytest.raises(ProcessLookupError):
            os.kill(spinner, 0)


def test_an_output_that_differs_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(NoOverlap, "run", TooLate.run)
    assert bench_layerwise.main([*ON_CPU, "--tokens", "2", "--cached", "64", "--baselines"]) == 1
    assert capsys.readouterr().err.strip() == "wrong bytes: llama8b, S=2, cached 64, load, then forward"


def test_core_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert bench_core.main([*ON_CPU, "--quick", "--json", str(data), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "CPU backend: shares of a memcpy" in out and "beside a forward" in out and "ms that a call holds" in out
    got = json.loads(data.read_text())
    assert [row["case"] for row in got["rows"]] == [
        f"{what}, pages of {size}"
        for size in (1, 16, 64)
        for what in ("load", "load", "store", "store", "load layer-wise")
    ]
    assert all(row["exact"] and row["share"] > 0 for row in got["rows"])
    assert len(got["skipped"]) == 9 and all("[mapped]" in name for name, _ in got["skipped"])
    assert len(got["calls_ms"]) == 4 and all(t > 0 for calls in got["calls_ms"].values() for t in calls.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


# -- small copies beside transfers -------------------------------------------------------------------


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_small_copies_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_neighbours.main(["--quick"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        bench_neighbours.main(["--kib", "0"])
    assert end.value.code == 2


def test_latencies_are_values_that_were_seen() -> None:
    times = [n * 1e-6 for n in range(1, 201)]
    random.shuffle(times)
    got = Latency.of(times)
    assert (got.median_us, got.p95_us, got.worst_us) == pytest.approx((100, 190, 200))
    assert Latency.of([3e-6]).median_us == Latency.of([3e-6]).worst_us == pytest.approx(3.0)
    assert got.text() == ("100.0", "190.0", "200.0")


class Counted(Neighbour):
    """Each of its transfers is under way for as long as it is asked ``lasts`` times."""

    name = "counted"

    def __init__(self, lasts: int, fail_at: int = 10**9) -> None:
        self.lasts, self.fail_at, self.waited = lasts, fail_at, 0

    def begin(self) -> Begun:
        asked = iter(range(self.lasts))

        def wait() -> None:
            self.waited += 1
            if self.waited >= self.fail_at:
                raise TransferError("it failed")

        return Begun(lambda: next(asked, None) is not None, wait)


def test_a_copy_counts_where_a_transfer_was_under_way_before_it() -> None:
    numbers, checks = iter(range(1000)), []
    work = Counted(lasts=3)  # three count, and the transfer is over
    got, begun = sample(lambda: (float(next(numbers)), 0.0), lambda: checks.append(1), work, 7)
    assert [n for n, _ in got] == list(range(7)) and begun == work.waited == len(checks) == 3
    stuck = Counted(lasts=1)  # each copy ends behind the transfer: those above all
    numbers = iter(range(1000))
    got, begun = sample(lambda: (float(next(numbers)), 0.0), lambda: None, stuck, 3)
    assert [n for n, _ in got] == [0, 1, 2] and begun == 3
    assert len(sample(lambda: (1.0, 1.0), lambda: None, Nothing(), 50)[0]) == 50
    with pytest.raises(RuntimeError, match="no copy began"):
        sample(lambda: (1.0, 1.0), lambda: None, Counted(lasts=0), 3, longest_s=0.02)
    with pytest.raises(TransferError, match="it failed"):
        sample(lambda: (1.0, 1.0), lambda: None, Counted(4, fail_at=2), 9)


@pytest.mark.gpu
def test_small_copies_beside_transfers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--mib", "512", "--repeats", "30", "--json", str(data), "--plot", str(picture)]
    assert bench_neighbours.main(words) == 0
    rows = json.loads(data.read_text())["rows"]
    assert len(rows) == 14 and all(row["exact"] and row["samples"] > 0 for row in rows)
    most = {(row["small"], row["beside"].split(" [")[0]): row["host"]["p95_us"] for row in rows}
    for beside in (("to the GPU", "load"), ("to the GPU", "load layer-wise"), ("from it", "store")):
        assert most[beside] < 5_000, "of a transfer of 10 ms: let in before the whole of it is through"
    assert "load layer-wise" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
