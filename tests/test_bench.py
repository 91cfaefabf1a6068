"""The benchmarks' own logic: statistics, turns, ids, groups, checks that fail, and each script in its CPU mode."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import baselines
import bench_choice
import bench_relayout
import bench_transfer
import numpy as np
import pytest
import torch
from bench_helpers import spoil
from conftest import HAS_GPU
from gemm import BackToBack, Block, Gemm, beside
from harness import FEWEST, Bar, CpuClock, LargeCopy, Row, alternate, measure
from paired import Spread, median_interval, order_rank, paired_ratio
from report import checked, parser, print_rows
from rigs import SHAPES, Rig, Shape, compile_ahead, device_of, ordered_ids
from works import EngineWork, Wait, Work

from kvtransfer import lanes
from kvtransfer.groups import layer_groups
from kvtransfer.info import QUEUES
from kvtransfer.kernels.errors import ConfigError, TransferError
from kvtransfer.plan import Plan
from kvtransfer.predict import Prediction

ROOT = Path(__file__).resolve().parent.parent
TINY = Shape("tiny", 5, (("k", 2, 24), ("v", 2, 24)))
LATENT = Shape("latent", 3, (("latent", 1, 41),))
GPU_OR_CPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=GPU_OR_CPU)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_of(request.param)


def make_rig(device: torch.device, shape: Shape = TINY, page_size: int = 3, pages: int = 21, **more: Any) -> Rig:
    return Rig(shape, page_size, shape.spec(page_size).page_bytes * pages, device, **more)


@pytest.fixture
def rig(device: torch.device) -> Iterator[Rig]:
    with make_rig(device) as made:
        yield made


# -- statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 13))
def test_the_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """All 2^n ways in which n values lie below or above the true median are equally likely."""
    k, coverage = order_rank(count)
    below = [sum(signs) for signs in itertools.product((0, 1), repeat=count)]
    inside = sum(k <= b <= count - k for b in below)  # the k-th smallest is below it, the k-th largest is not
    assert coverage == pytest.approx(inside / 2**count)
    assert coverage >= 0.95 or k == 1
    if count > 1:
        wider = sum(k + 1 <= b <= count - k - 1 for b in below) / 2**count
        assert wider < 0.95, "a narrower interval would have done"


def test_intervals_of_known_values() -> None:
    got = median_interval([9.0, 1, 8, 2, 7, 3, 6, 4, 5, 10])
    assert (got.median, got.low, got.high) == (5.5, 2, 9)
    assert got.coverage == pytest.approx(1 - 22 / 1024)
    assert median_interval([4.0]) == median_interval([4.0], 0.5)
    assert Spread.of([3, 1, 2]) == Spread(2, 1, 3)
    with pytest.raises(ValueError, match="at least 1 value"):
        order_rank(0)


def test_a_drift_cancels_in_pairs() -> None:
    drift = [1 + 0.05 * n for n in range(10)]
    got = paired_ratio([0.9 * d for d in drift], drift)
    assert got.low == pytest.approx(0.9) and got.high == pytest.approx(0.9)
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


# -- turns -------------------------------------------------------------------------------------------


def test_limit_and_case_take_turns() -> None:
    said: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], float]:
        def run() -> float:
            said.append(name)
            return seconds

        return run

    pairs = alternate(call("limit", 1.0), call("case", 2.0), 4)
    assert pairs == [(1.0, 2.0)] * 4
    assert said == ["limit", "case"] * 5, "the first pair warms up"


def test_slow_cases_are_repeated_less_often() -> None:
    calls: list[float] = []

    def slow() -> float:
        time.sleep(0.02)
        calls.append(0.02)
        return 0.02

    assert len(alternate(lambda: 1.0, slow, 50, longest_s=0.01)) == FEWEST
    assert len(alternate(lambda: 1.0, slow, 2, longest_s=0.01)) == 2
    assert FEWEST <= len(alternate(lambda: 1.0, slow, 50, longest_s=0.2)) <= 10


def test_the_engine_thread_s_cpu_time_is_its_own() -> None:
    stop, go, burnt = threading.Event(), threading.Event(), threading.Event()

    def burn() -> None:
        go.wait()
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        burnt.set()
        stop.wait()

    thread = threading.Thread(target=burn, name="kvtransfer-of-this-test", daemon=True)
    thread.start()
    clock = CpuClock("kvtransfer-of-this-test")
    caller, engine = clock.caller(), clock.engine()
    go.set()
    burnt.wait()
    assert clock.of == "threads"
    assert clock.engine() - engine >= 0.049e6
    assert clock.caller() - caller < 0.04e6
    stop.set()
    thread.join()
    assert CpuClock("nobody").of == "process"
    assert CpuClock("").engine() == 0.0


def test_large_copies_move_bytes_both_ways(device: torch.device) -> None:
    limit = LargeCopy(device, 1 << 20)
    for direction in ("load", "store", "both", "device"):
        assert limit.seconds(direction) > 0
    assert [limit.moved_bytes(d) for d in ("load", "both", "device")] == [1 << 20, 2 << 20, 2 << 20]
    for source, target in limit._pairs.values():
        assert torch.equal(source.cpu(), target.cpu())
        assert len(source.unique()) == 256, "never zeros"
    assert limit.gbps("both").low > 0


# -- ids and groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "run"), [(32, 1), (32, 4), (48, 16), (42, 21), (7, 7)])
def test_ordered_ids_are_all_there_in_runs(total: int, run: int) -> None:
    ids = ordered_ids(total, run, np.random.default_rng())
    assert sorted(ids.tolist()) == list(range(total))
    assert all((np.diff(part) == 1).all() for part in ids.reshape(-1, run))


def test_runs_of_any_length_are_distinct_and_in_range() -> None:
    rng = np.random.default_rng()
    for _ in range(50):
        total, run = int(rng.integers(1, 80)), int(rng.integers(1, 33))
        count = int(rng.integers(1, total + 1))
        ids = bench_choice.runs_of_ids(total, count, run, rng)
        assert len(set(ids.tolist())) == count and ids.min() >= 0 and ids.max() < total
        if run > 1 and count > 2 * run:
            assert (np.diff(ids) == 1).sum() >= count - count // run - 3


@pytest.mark.parametrize("pages", [1, 3, 5, 16, 21])
def test_a_rig_keeps_loads_and_stores_apart(pages: int) -> None:
    with make_rig(torch.device("cpu"), pages=pages) as rig:
        for order in ("random", "runs of 4", "runs of 16", "contiguous", 7):
            rig.set_order(order)
            for mine, others in ((rig.slots, rig.other_slots), (rig.pages, rig.other_pages)):
                assert len(mine) == len(others) == pages == rig.count
                assert not set(mine.tolist()) & set(others.tolist())
            if order == "contiguous":
                assert (np.diff(rig.pages) == 1).all() and (np.diff(rig.slots) == 1).all()
        assert rig.holds(np.arange(rig.pool.num_pages), np.arange(rig.pool.num_pages)), "stored when it was made"


def test_layer_groups_can_be_fixed(device: torch.device) -> None:
    with make_rig(device, SHAPES["onehead"], 16, 2) as rig:
        wanted = {"groups of 4": [(i, i + 4) for i in range(0, 32, 4)], "ramped": layer_groups(32, 4)}
        own = EngineWork(rig, "load", path="staged", mode="layerwise").plans[0].chunks
        for mode, groups in wanted.items():
            work = EngineWork(rig, "load", path="staged", mode=mode)
            assert [(c.box.layer_start, c.box.layer_stop) for c in work.plans[0].chunks] == groups
            assert work.exact()
        assert EngineWork(rig, "load", path="staged", mode="layerwise").plans[0].chunks == own


# -- works -------------------------------------------------------------------------------------------

PATHS = {"cpu": ("auto", "cpu", "staged"), "cuda": ("auto", "staged", "strided", "mapped")}


@pytest.mark.parametrize("layout", ["sglang.layer_first", "vllm.BLHNC", "transformers", "page_first"])
def test_transfers_are_exact(device: torch.device, layout: str) -> None:
    with make_rig(device, layout=layout) as rig:
        for order, direction, path in itertools.product(
            ("random", "runs of 4"), ("load", "store", "both"), PATHS[device.type]
        ):
            rig.set_order(order)
            work = EngineWork(rig, direction, path=path)
            assert work.begin()() > 0
            assert work.exact(), (order, direction, path)
        for direction, path in (("load", "auto"), ("load", "staged"), ("store", "auto"), ("store", "staged")):
            assert EngineWork(rig, direction, path=path, mode="layerwise").exact()


@pytest.mark.parametrize("direction", ["load", "store", "both"])
def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    with make_rig(torch.device("cpu")) as rig:
        work = EngineWork(rig, direction)
        assert work.exact()
        spoil(monkeypatch)
        assert not work.exact()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_byte_beside_the_pages_is_found(direction: str) -> None:
    with make_rig(torch.device("cpu")) as rig:
        work = EngineWork(rig, direction)
        real = work.begin

        def stray(*, alone: bool = True) -> Wait:
            seconds = real(alone=alone)()
            if direction == "load":
                place = rig.pool.layout.placements[0][0]
                rig.pool.buffers[place.buffer][place.offset + int(rig.other_pages[0]) * place.page_stride] ^= 1
            else:
                rig.host.payload[int(rig.other_slots[-1]) * rig.host.slot_bytes] ^= 1
            return lambda: seconds

        work.begin = stray  # type: ignore[method-assign]
        assert not work.exact()


@pytest.mark.parametrize("make", baselines.ALL)
@pytest.mark.parametrize(
    ("shape", "layout"), [(TINY, "sglang.layer_first"), (TINY, "vllm.BLHNC"), (LATENT, "page_first")]
)
def test_baselines_are_exact(device: torch.device, make: type[baselines.Baseline], shape: Shape, layout: str) -> None:
    with make_rig(device, shape, layout=layout) as rig:
        for direction in ("load", "store"):
            if make.needs_gpu and device.type == "cpu":
                with pytest.raises(ConfigError, match="needs a GPU"):
                    make(rig, direction, "it")
                continue
            work = make(rig, direction, "it")
            assert work.begin()() > 0
            assert work.exact()


def test_a_baseline_that_moves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig(torch.device("cpu")) as rig:
        for make in baselines.ALL:
            if not make.needs_gpu:
                monkeypatch.setattr(make, "move", lambda self: None)
                assert not make(rig, "load", "it").exact()
                assert not make(rig, "store", "it").exact()


@pytest.mark.skipif(HAS_GPU, reason="under Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize("piece", [8, 41, 1032, 8208])
def test_the_twelve_program_kernel_copies_pieces(piece: int) -> None:
    rng = np.random.default_rng()
    count, guard = 17, 24
    source = torch.from_numpy(rng.integers(0, 256, count * piece, dtype=np.uint8))
    target = torch.from_numpy(rng.integers(0, 256, count * piece + 2 * guard, dtype=np.uint8))
    before = target.clone()
    order = torch.from_numpy(rng.permutation(count))
    src = source.data_ptr() + torch.arange(count) * piece
    dst = target.data_ptr() + guard + order * piece
    baselines.launch_copy_pieces(dst, src, piece)
    want = before.clone()
    want[guard:-guard].view(count, piece)[order] = source.view(count, piece)
    assert torch.equal(target, want)


# -- GEMM blocks -------------------------------------------------------------------------------------


class Sleeper:
    """A transfer that takes 2 ms and counts."""

    name, path, direction, total_bytes, engine_thread = "sleeper", "none", "load", 10**6, ""

    def __init__(self, fail_at: int = 10**9) -> None:
        self.begun, self.fail_at = 0, fail_at
        self.times: list[float] = []

    def begin(self, *, alone: bool = True) -> Wait:
        self.begun += 1
        if self.begun > self.fail_at:
            raise TransferError("no more")

        def wait() -> float:
            time.sleep(0.002)
            self.times.append(time.perf_counter())
            return 0.002

        return wait

    def exact(self) -> bool:
        return True


def test_blocks_come_in_pairs_whose_order_flips(device: torch.device) -> None:
    work: Any = Sleeper()
    gemm = Gemm(device, 64)
    order: list[bool] = []
    real = gemm.block

    def block(seconds: float) -> Block:
        order.append(any(t.name == "transfers" for t in threading.enumerate()))
        return real(seconds)

    gemm.block = block  # type: ignore[method-assign]
    got = beside(work, gemm, blocks=4, seconds=0.03, peak_gbps=2.0)
    assert order == [False, True, True, False, False, True, True, False]
    assert got.blocks == 4 and got.transfers >= 8 and got.kept > 0
    assert 0 < got.gbps <= 0.51, "a megabyte in 2 ms or more"
    assert got.share == pytest.approx(got.gbps / 2)
    assert (got.sm_mhz_alone is None) == (device.type == "cpu")


def test_the_rate_counts_what_ended_inside_the_block() -> None:
    work: Work = Sleeper()
    running = BackToBack(work, torch.device("cpu"))
    running._ends = [0.9, 1.0, 1.5, 2.0, 2.6]
    assert running.rate(Block(1, 1.0, 1.0, 2.2, None)) == (3, 2.0)
    count, a_second = running.rate(Block(1, 1.0, 2.1, 2.2, None))
    assert count == 5 and a_second == pytest.approx(4 / 1.7), "the block is too short: all of them"


def test_an_error_of_the_transfers_is_raised() -> None:
    with pytest.raises(TransferError, match="no more"):
        beside(Sleeper(fail_at=3), Gemm(torch.device("cpu"), 16), blocks=1, seconds=0.05, peak_gbps=1.0)
    with (
        pytest.raises(TransferError, match="no more"),
        BackToBack(Sleeper(fail_at=0), torch.device("cpu")),
    ):
        pass  # entering does not hang


def test_a_row_says_what_was_measured(rig: Rig) -> None:
    limit = LargeCopy(rig.device, 1 << 20)
    gemm = Gemm(rig.device, 64)
    row = measure(EngineWork(rig, "load"), limit, repeats=7, gemm=gemm, gemm_blocks=2, gemm_s=0.02)
    assert row.exact and row.repeats == 7 and row.total_bytes == rig.total_bytes
    assert row.low_s <= row.median_s <= row.high_s and row.share_low <= row.share <= row.share_high
    assert row.gbps == pytest.approx(rig.total_bytes / row.median_s / 1e9)
    assert row.coverage > 0.95 and row.caller_us > 0 and row.engine_us > 0 and row.cpu_of == "threads"
    assert row.gemm is not None and row.gemm.transfers >= 4


def test_bars_are_judged_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with make_rig(torch.device("cpu")) as rig:
        limit = LargeCopy(rig.device, 1 << 18)
        row = measure(EngineWork(rig, "load"), limit, repeats=3)
    assert row.verdicts() == []
    row = replace(row, share=0.5, bar=Bar(share=0.4, gemm_kept=0.9))
    assert row.verdicts() == [("share", 0.4, True)], "nothing was measured beside a GEMM"
    missed = replace(row, case="the other", bar=Bar(share=0.6))
    print_rows("two", [row, missed], limit)
    out = capsys.readouterr().out
    assert "share 40% met" in out and "share 60% MISSED" in out and "memcpy (load)" in out


# -- the choice --------------------------------------------------------------------------------------


def test_candidates_leave_barred_paths_out() -> None:
    p = [Prediction(n, 1.0, 1.0, 1, 1, 1, "the link", 1.0) for n in ("staged", "mapped", "strided")]
    plan = Plan(
        "store", "staged", "", 1, 1, 1, 1, (), False, p[0], (p[2], p[1]), (("mapped", "not unless asked for"),)
    )  # fmt: skip
    assert bench_choice.candidates(plan) == ["staged", "strided"]


def test_paths_take_turns_and_hopeless_ones_run_once() -> None:
    said: list[str] = []
    seconds = {"a": 1.0, "b": 2.0, "c": 9.0}

    def run(path: str) -> float:
        said.append(path)
        return seconds[path]

    assert bench_choice.time_in_turn(["a", "b", "c"], run, 2) == seconds
    assert said == ["a", "b", "c", "a", "b", "a", "b"]
    said.clear()
    bench_choice.time_in_turn(["c", "a", "b"], run, 1)
    assert said == ["c", "a", "b"] * 2, "the chosen one is believed only when it was warm"


def test_percentiles() -> None:
    values = [n / 100 for n in range(1, 201)]
    assert bench_choice.percentile(values, 0.05) == 0.1
    assert bench_choice.percentile([0.7], 0.05) == 0.7


def test_points_are_off_the_grid_and_repeat_with_their_seed() -> None:
    def draw() -> tuple[list[Any], list[Any]]:
        rng = np.random.default_rng(5)
        geometries = [bench_choice.draw_geometry(rng, n) for n in range(8)]
        return geometries, bench_choice.draw_points(rng, geometries, 200, 1 << 30)

    geometries, points = draw()
    assert (geometries, points) == draw()
    assert any(g.page_size & (g.page_size - 1) for g in geometries)
    assert {p.direction for p in points} == {"load", "store"} and len({p.geometry for p in points}) == 8
    for p in points:
        g = geometries[p.geometry]
        assert 1 <= p.pages <= 20_000 and 1 <= p.run <= 32
        assert p.pages * g.shape.spec(g.page_size).page_bytes <= 1 << 30
    logs = sorted(math.log(p.pages) for p in points)
    assert logs[50] < math.log(40) and logs[-1] > math.log(300), "from a page to as many as fit"


# -- scripts -----------------------------------------------------------------------------------------

Main = Callable[[list[str]], int]
SCRIPTS: dict[str, tuple[Main, list[str]]] = {
    "transfer": (
        bench_transfer.main,
        ["--mib", "1", "--only", "of 16", "--gemm", "--gemm-blocks", "1", "--gemm-seconds", "0.02", "--baselines"],
    ),
    "bars": (bench_transfer.main, ["--bars", "--mib", "1", "--only", "llama8b, pages of 16"]),
    "relayout": (
        bench_relayout.main,
        ["--mib", "1", "--pieces", "256", "--pairs", "ring>sglang.layer_first", "vllm.BLHNC>ring"],
    ),
    "choice": (bench_choice.main, ["--points", "4", "--geometries", "2", "--mib", "1"]),
}
CPU = ["--device", "cpu", "--repeats", "2"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_on_the_cpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, more = SCRIPTS[name]
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert main([*CPU, *more, "--json", str(data), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "CPU backend" in out and "nan" not in out
    got = json.loads(data.read_text())
    assert "CPU" in got["machine"]["device"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    if name == "choice":
        assert len(got["points"]) == 4 and all(p["exact"] and 0 < p["share"] <= 1 for p in got["points"])
        assert got["seed"] == 0 and "seed 0" in out and "5th percentile" in out
        return
    assert got["rows"] and all(row["exact"] for row in got["rows"])
    for row in got["rows"]:
        assert row["peak_gbps"] > 0 and row["gbps"] * row["median_s"] * 1e9 == pytest.approx(row["total_bytes"])
        assert row["share_low"] <= row["share"] <= row["share_high"]
    if name == "transfer":
        assert {row["path"] for row in got["rows"]} >= {m.path for m in baselines.ALL if not m.needs_gpu}
        assert any("needs a GPU" in why for _, why in got["skipped"])
        assert [row["gemm"] is not None for row in got["rows"][:2]] == [True, True]
    if name == "bars":
        assert [row["case"].rsplit("16", 1)[1] for row in got["rows"]] == ["", ", groups of 4", ", ramped", "", ""]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_byte_is_exit_status_1(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main, more = SCRIPTS[name]
    spoil(monkeypatch, loads_alone=name in ("transfer", "bars"))
    if name == "relayout":
        monkeypatch.setattr(bench_relayout, "run_on_cpu", lanes.run_on_cpu)
    few = [a for a in more if a != "--baselines"]
    assert main([*CPU, *few]) == 1
    err = capsys.readouterr().err
    if name == "choice":
        assert "do not verify" in err, "stores were wrong, and the digests of loads say so"
    else:
        assert "wrong bytes: " in err


def test_ctrl_c_shows_what_was_measured_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = itertools.count(1)

    def interrupted(*args: Any, **more: Any) -> Row:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return measure(*args, **more)

    monkeypatch.setattr(bench_transfer, "measure", interrupted)
    before, data = signal.signal(signal.SIGINT, signal.default_int_handler), tmp_path / "out.json"
    try:
        assert bench_transfer.main([*CPU, *SCRIPTS["bars"][1], "--json", str(data)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    got = json.loads(data.read_text())
    assert [row["case"].rsplit("16", 1)[1] for row in got["rows"]] == ["", ", groups of 4"]
    assert got["skipped"] == [["the rest", "interrupted"]]
    out = capsys.readouterr().out
    assert "groups of 4" in out and "ramped" not in out and "left out: the rest: interrupted" in out


def test_points_whose_bytes_are_wrong_are_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Rig, "holds", lambda self, pages, slots: False)
    assert bench_choice.main([*CPU, "--points", "2", "--mib", "1"]) == 1
    assert capsys.readouterr().err.count("wrong bytes: Point(") == 2


@pytest.mark.parametrize(
    ("main", "bad", "words"),
    [
        (bench_transfer.main, ["--only", "nothing at all"], "no line is left"),
        (bench_transfer.main, ["--only", "("], "expected a regular expression"),
        (bench_transfer.main, ["--page-sizes", "0"], "expected at least 1"),
        (bench_transfer.main, ["--gemm", "--gemm-blocks", "0"], "expected at least one block"),
        (bench_transfer.main, ["--repeats", "0"], "expected at least 1"),
        (bench_relayout.main, ["--pieces", "100"], "multiples of 16"),
        (bench_choice.main, ["--points", "-1"], "expected at least 1"),
        (bench_choice.main, ["--json", "/nowhere/at/all.json"], "a folder that exists"),
        (bench_relayout.main, ["--device", "tape"], "tape"),
    ],
)
def test_bad_input_is_exit_status_2(main: Main, bad: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(bad if "--device" in bad else ["--device", "cpu", *bad])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "started", "before", "after"),
    [
        ("auto", False, None, "4"),
        ("auto", False, "2", "2"),
        ("auto", True, None, None),  # CUDA has read it: to set it now would only be believed by who reads the figures
        ("cpu", False, None, None),
    ],
)
def test_hardware_queues_are_set_before_cuda_starts(
    name: str, started: bool, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUES, before or "")
    if before is None:
        monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    seen: list[str | None] = []

    def found(device: str) -> torch.device:
        seen.append(os.environ.get(QUEUES))
        return torch.device("cpu")

    monkeypatch.setattr("report.device_of", found)
    checked(parser(None), ["--device", name])
    assert seen == [after] and os.environ.get(QUEUES) == after


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="expected a GPU that PyTorch sees"):
        device_of("cuda")


def test_lines_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_transfer.main(["--bars", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 28
    assert set(bench_transfer.BARS) <= {line.removesuffix(" [auto]") for line in lines}


def test_a_script_runs_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "bench/bench_transfer.py", *CPU, "--mib", "1", "--page-sizes", "16"]
    command += ["--directions", "load", "--json", str(tmp_path / "out.json")]
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "load, llama8b, pages of 16" in done.stdout
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert set(rows[0]) == {*Row.__dataclass_fields__, "verdicts"}


@pytest.mark.gpu
def test_engines_are_made_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    device = device_of("cuda")
    compile_ahead([(TINY, 3, "sglang.layer_first"), (LATENT, 2, "page_first")], device, 2)
    compile_ahead([(TINY, 3, "no such layout")], device, 2)  # one job: nothing is done ahead
    with pytest.raises(Exception, match="no such layout"):
        compile_ahead([(TINY, 3, "page_first"), (TINY, 3, "no such layout")], device, 2)
