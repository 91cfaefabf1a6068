"""Predictions: what a path's time is made of, against the same sums written out; budgets; an engine's own profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, TINY, Log, make_rig
from msgspec.structs import replace
from test_plan import BIG, H200, MEDIUM, TOKENS, facts

from kvtransfer.groups import Beside, GroupTimes, best_groups
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import CpuCost, Curve, Grid, LinkProfile, save_profile, shipped_profile
from kvtransfer.plan import Facts, make_plan
from kvtransfer.predict import (
    BUDGETS,
    PYTHON_CHUNK_US,
    PYTHON_PIECE_US,
    RUN_LOOP_US,
    START_S,
    Prediction,
    Runs,
    budget_of,
)


def flat(gbps: float) -> Grid:
    return Grid((1,), (1,), ((gbps,),))


def profile(**grids: Grid) -> LinkProfile:
    """Rates that do not depend on anything; a CPU and a relayout that cost next to nothing."""
    return replace(
        H200,
        grids={f"{path}/{way}": grid for path, grid in grids.items() for way in ("h2d", "d2h")},
        cpu=CpuCost(1e-6, 1e-6, 1e-6),
        relayout=Curve((1,), (1e9,)),
        mapped_scale={},
    )


def predicted(case: Facts, path: str) -> Prediction:
    found = make_plan(case, path).predicted
    assert found is not None and found.path == path
    return found


def test_times_are_bytes_over_the_tables_rate() -> None:
    rates = profile(staged=flat(20.0), strided=flat(40.0), mapped=flat(10.0))
    case = facts(MEDIUM, pages=512, profile=rates)
    assert predicted(case, "staged").seconds == pytest.approx((1 << 30) / 20e9, rel=1e-3)
    assert predicted(case, "mapped").seconds == pytest.approx((1 << 30) / 10e9, rel=1e-3)
    strided = predicted(case, "strided")  # random pages go piece by piece, from the engine's thread
    assert strided.seconds == pytest.approx(
        (strided.pieces * PYTHON_PIECE_US + 512 * 32 * RUN_LOOP_US + 32 * PYTHON_CHUNK_US) * 1e-6, rel=0.01
    )
    assert (strided.pieces, strided.bound) == (512 * 64, "the CPU")
    runs = facts(MEDIUM, pages=512, runs=1, profile=rates)
    seconds = (1 << 30) / 40e9 + PYTHON_CHUNK_US * 1e-6
    assert predicted(runs, "strided").seconds == pytest.approx(seconds, rel=0.01), "a run is one call a layer"
    assert predicted(runs, "strided").pieces == 64


def test_a_gentle_path_is_not_taken_at_any_price() -> None:
    """A measurement noisier than the budget allows left a transfer to a path that took fifty times as long."""
    rates = replace(profile(staged=flat(50.0), mapped=flat(49.0)), gemm_kept={"staged/h2d": 0.91, "strided/h2d": 1.0})
    slow = make_plan(facts(TOKENS, pages=8192, profile=rates))
    assert slow.path in ("staged", "mapped"), slow.explain()
    close = make_plan(
        facts(BIG, pages=64, runs=1, profile=replace(rates, grids=rates.grids | {"mapped/h2d": flat(1.0)}))
    )
    assert close.path == "strided" and dict(close.barred)["staged"].startswith("it takes 9%"), close.explain()


def test_no_path_is_quicker_than_the_link() -> None:
    case = facts(MEDIUM, pages=512, profile=profile(staged=flat(900.0), mapped=flat(900.0)))
    for path in ("staged", "mapped"):
        assert predicted(case, path).gbps == pytest.approx(H200.peak_gbps["h2d"], rel=1e-3)
    pageable = facts(MEDIUM, pages=512, host_pinned=False)
    assert predicted(pageable, "staged").gbps == pytest.approx(6.0, rel=0.01)


def test_a_slow_cpu_or_a_slow_relayout_decides() -> None:
    slow = replace(profile(staged=flat(50.0), strided=flat(50.0)), cpu=CpuCost(100.0, 100.0, 1.0))
    found = predicted(facts(TOKENS, pages=8192, profile=slow), "staged")
    assert found.bound == "the CPU" and found.seconds == pytest.approx(8192 * 100e-6, rel=0.01)
    runs = predicted(facts(MEDIUM, pages=512, runs=128, profile=slow), "strided")
    assert runs.bound == "the CPU" and runs.seconds == pytest.approx(
        128 * 64 * 100e-6 + 32 * PYTHON_CHUNK_US * 1e-6, rel=0.01
    )
    kernel = replace(profile(staged=flat(50.0)), relayout=Curve((1,), (5.0,)))
    found = predicted(facts(MEDIUM, pages=512, profile=kernel), "staged")
    assert found.bound == "the relayout" and found.seconds > (1 << 30) / 5e9


@pytest.mark.parametrize(
    ("case", "pieces", "piece_bytes"),
    [
        (facts(TOKENS, pages=8192), 8192, 128 << 10),
        (facts(TOKENS, pages=8192, host_runs=1024), 1024, 1 << 20),
        (facts(TOKENS, pages=8192, host_runs=1), 16, 64 << 20),  # a chunk of the ring is the longest that merges
        (facts(TOKENS, pages=8192, host_runs=1024, host_stride_bytes=132 << 10), 8192, 128 << 10),
        (facts(TOKENS, pages=8192, runs=None, host_runs=1024), 1024, 1 << 20),  # host slots are known on the CPU
        (facts(BIG, pages=4, slot_bytes=2 << 20), 16, 2 << 20),  # a page of 8 MiB in a ring of 2 MiB slots
        (facts(BIG, pages=4, slot_bytes=2 << 20, host_runs=1), 16, 2 << 20),
        (facts(MEDIUM, pages=512, direction="store", layerwise=True), 512 * 32, 64 << 10),
    ],
)
def test_pieces_after_merging(case: Facts, pieces: int, piece_bytes: int) -> None:
    plan = make_plan(case, "staged")
    assert (plan.pieces, plan.piece_bytes) == (pieces, piece_bytes)
    assert f"{pieces:,} pieces of {piece_bytes:,} bytes" in plan.explain()


def test_long_and_short_runs_are_counted_apart() -> None:
    """Half the pages in one long run, half alone: the long half goes at the rate of long pieces."""
    halves = Runs(1024, 513, 1, 512)
    assert halves.parts() == [(1, 512), (512, 512)]
    even = predicted(facts(TOKENS, pages=1024, host_runs=513), "staged")
    case = facts(TOKENS, pages=1024)
    apart = predicted(Facts(case.terrain, 1024, case.runs, halves, False), "staged")
    assert apart.pieces == 513 == even.pieces
    assert apart.seconds != pytest.approx(even.seconds, rel=0.01)


@pytest.mark.parametrize("pages", [1, 7])
def test_small_loads_wait_for_the_start_on_every_path(pages: int) -> None:
    """What lies before a load's first byte favours no path: a few pages do not go in hundreds of calls for it."""
    for compute_s in (4e-4, 8.1e-4, 2e-3):
        plan = make_plan(facts(MEDIUM, pages=pages, layerwise=True, compute_s=compute_s))
        assert plan.path == "staged" and len(plan.others) == 2
        for p in (plan.predicted, *plan.others):
            assert p is not None and p.seconds > START_S and p.finish_s > START_S + 32 * compute_s / p.kept
    bulk = predicted(facts(MEDIUM, pages=pages), "mapped").seconds
    assert predicted(facts(MEDIUM, pages=pages, layerwise=True), "mapped").seconds == pytest.approx(START_S + bulk)


@pytest.mark.parametrize("figures", [H200, shipped_profile()], ids=["sketch", "shipped"])
def test_few_pages_are_not_copied_layer_by_layer_all_along_the_forward(figures: LinkProfile) -> None:
    """Where the forwards end at about the same time: 32 turns of Python against one job."""
    for pages, compute_s in ((1, 4e-4), (1, 8.1e-4), (7, 8.1e-4), (7, 2e-3), (64, 2e-3)):
        plan = make_plan(facts(MEDIUM, pages=pages, layerwise=True, compute_s=compute_s, profile=figures))
        assert plan.path == "staged"
    strided = next(p for p in plan.others if p.path == "strided")
    assert plan.predicted is not None and strided.seconds > 5 * plan.predicted.seconds
    if strided.finish_s < plan.predicted.finish_s:
        assert "within 3% of the quickest, and its last byte is there first" in plan.explain()
        assert "less, noise, and it arrives later" in plan.explain()


def test_on_the_cpu_no_link_has_to_begin() -> None:
    quick = profile(staged=flat(1e3), cpu=flat(1e3))
    for layerwise in (False, True):
        here = facts(EVEN, pages=3, layerwise=layerwise, on_gpu=False, host_pinned=False, profile=quick)
        assert all(predicted(here, path).seconds < START_S / 2 for path in ("cpu", "staged"))


def test_a_known_compute_time_shapes_groups_and_the_finish() -> None:
    for compute_s in (1e-5, 6e-4, 1e-2):
        found = predicted(facts(MEDIUM, pages=512, layerwise=True, compute_s=compute_s), "staged")
        assert found.finish_s >= max(found.seconds, 32 * compute_s)
        assert found.finish_s < 1.2 * (found.seconds + 32 * compute_s)
    busy = predicted(facts(MEDIUM, pages=512, layerwise=True, compute_s=1e-2), "mapped")
    first = START_S + (busy.seconds - START_S) / 32  # what lies before the first byte is not spread over the layers
    assert busy.finish_s == pytest.approx(first + 32 * 1e-2 / 0.955, rel=1e-6), "the GEMM is slowed too"
    boxes = [make_plan(facts(MEDIUM, pages=512, layerwise=True, compute_s=s)).chunks[0].box for s in (1e-5, 1e-3)]
    assert boxes[0].layer_stop > boxes[1].layer_stop
    plan = make_plan(facts(MEDIUM, pages=512, layerwise=True, compute_s=1e-3), "staged")
    assert "load and forward would take" in plan.explain()


def test_named_budgets() -> None:
    assert budget_of("prefill") is BUDGETS["prefill"] and budget_of("decode").ctas > budget_of("prefill").ctas
    assert budget_of(7).ctas == 7 and budget_of(7).gemm_loss == 1.0
    with pytest.raises(ConfigError, match="expected a number of CTAs or one of prefill, decode, got 'chat'"):
        budget_of("chat")
    with pytest.raises(ConfigError, match="expected at least 1 CTA, got 0"):
        budget_of(0)


# -- an engine's profile -----------------------------------------------------------------------------


def test_an_engine_takes_a_profile_and_explain_names_it() -> None:
    own = replace(shipped_profile("cpu"), source="measured", made="in a test")
    log = Log()
    rig = make_rig(profile=own, observer=log, compute_s_per_layer=0.001, sm_budget="decode")
    assert not log.notes and not log.fallbacks
    handle = rig.engine.load([0], [1])
    assert f"  link: {own.describe()}" in handle.plan.explain().splitlines()
    assert handle.plan.predicted is not None and handle.plan.predicted.seconds > 0
    handle.result(LIMIT_S)
    rig.engine.load([0], [1], layerwise=True, compute_s_per_layer=0.1).result(LIMIT_S)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="compute_s_per_layer: expected seconds above 0"):
            rig.engine.load([0], [1], compute_s_per_layer=bad)
    rig.close()
    with pytest.raises(ConfigError, match="compute_s_per_layer: expected seconds above 0"):
        make_rig(compute_s_per_layer=0.0)


def test_an_engine_loads_this_machines_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = Log()
    rig = make_rig(observer=log)
    assert rig.engine.profile.source == "shipped" and [what for what, _ in log.notes] == ["link profile"]
    assert "nothing was measured on this machine" in rig.engine.plan("load", [0], [0]).explain()
    rig.close()
    path = save_profile(replace(shipped_profile("cpu"), key=_key(), source="measured", made="today"))
    rig = make_rig(observer=Log())
    assert rig.engine.profile.made == "today"
    rig.close()
    path.write_bytes(b"{")
    log = Log()
    rig = make_rig(observer=log)
    assert log.fallbacks[0][0] == "link profile" and "it is not used" in rig.engine.plan("load", [0], [0]).explain()
    rig.engine.load([0], [0]).result(LIMIT_S)
    rig.close()


def _key() -> Any:
    from kvtransfer.link import profile_key

    return profile_key("cpu")


@pytest.mark.gpu
def test_choices_are_close_to_the_best_path_on_a_gpu() -> None:
    """The engine's choice against every path timed in the same run, with a profile measured for 20 s."""
    from gpu_helpers import make_rig as make_gpu_rig
    from gpu_helpers import shuffled

    from kvtransfer.engine import TransferEngine
    from kvtransfer.kernels.spec import KVSpec
    from kvtransfer.meter import CudaMeter
    from kvtransfer.tune import measure

    found = measure(CudaMeter(0), budget_s=20)
    shares = []
    for page_size, heads in ((1, 8), (3, 8), (16, 8), (24, 2), (64, 1)):
        spec = KVSpec.attention(16, page_size, heads, 128, 2)
        pages = (128 << 20) // spec.page_bytes
        rig = make_gpu_rig("sglang.layer_first", spec, pages=pages + 9, slots=pages + 5, staging_bytes=192 << 20)
        slots, ids = shuffled(pages, pages + 5, 1), shuffled(pages, pages + 9, 2)
        with TransferEngine(rig.pool, rig.host, profile=found, verify=False) as engine:
            times = {}
            for path in ("auto", "staged", "mapped", "strided"):
                seconds = [engine.load(slots, ids, path=path).result(60).seconds for _ in range(6)]
                times[path] = sorted(seconds[1:])[2]
            plan = engine.plan("load", slots, ids)
            print(plan.explain(), {path: f"{s * 1e3:.2f} ms" for path, s in times.items()})
            shares.append(min(times.values()) / times[plan.path])
        rig.close()
        torch.cuda.empty_cache()
    assert min(shares) > 0.85, shares


def test_tiny_pages_and_none() -> None:
    assert predicted(facts(TINY, pages=1), "staged").seconds > 0
    none = make_plan(facts(TINY, pages=0, runs=0))
    assert none.predicted is not None and none.predicted.seconds == 0 and "predicted" not in none.explain()


def test_every_group_has_to_be_worth_it() -> None:
    """Nothing to gain by more groups: the fewest. A price for each of its descriptors: larger groups."""
    ends = [i * 100 for i in range(33)]
    free = best_groups(ends, lambda nbytes, first: GroupTimes(0.0, nbytes * 1e-5, 0.0, 0.0), [Beside(1e-9)], 1 << 30)
    assert len(free) < 6 and free[-1][1] == 32
    fine = best_groups(ends, lambda nbytes, first: GroupTimes(0.0, nbytes * 1e-5, 0.0, 0.0), [Beside(1e-3)], 1 << 30)
    dear = best_groups(ends, lambda nbytes, first: GroupTimes(6e-3, nbytes * 1e-5, 0.0, 0.0), [Beside(1e-3)], 1 << 30)
    assert len(dear) < len(fine)
