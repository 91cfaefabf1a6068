"""The benchmarks of pinning and of calls: what they time, their verdicts, and each script in its CPU mode."""

from __future__ import annotations

import json
from pathlib import Path

import bench_pinning
import bench_submit
import pytest
from bench_pinning import GIB, Row, cases, summary, tier
from bench_submit import KINDS, STAGES, Setup, beside, measure, profile
from conftest import HAS_GPU
from rigs import device_of

GPU_OR_CPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_a_tier_that_grows_in_the_background_is_usable_before_it_is_whole() -> None:
    first, total = tier(2 * GIB + GIB // 4, 2, background=True)
    assert 0 < first < total
    at_once, whole = tier(64 << 20, 2, background=False)
    assert 0 < at_once <= whole


def test_medians_and_bars_of_a_way() -> None:
    times = [(0.5, 3.0), (1.5, 9.0), (0.7, 4.0)]
    row = summary(("x", lambda: (0, 0), 16 * GIB, True, True, True), times)
    assert (row.first_s, row.total_s, row.s_a_gib, row.low, row.high) == (0.7, 4.0, 0.25, 3 / 16, 9 / 16)
    assert row.first_gib == 1 and row.misses == []
    slow = summary(("x", lambda: (0, 0), 8 * GIB, True, True, True), [(1.2, 4.0)])
    assert slow.misses == ["first 1 GiB in 1.20 s, not 1", "0.500 s/GiB, not 0.3"]
    late = summary(("x", lambda: (0, 0), 8 * GIB, True, True, False), [(0.1, 4.0)])
    assert late.misses == ["0.500 s/GiB, not 0.3"] and late.first_s == 4.0 and late.first_gib == 8
    assert summary(("x", lambda: (0, 0), GIB, True, False, False), [(9.0, 9.0)]).misses == []


def test_pinning_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--quick", "--gib", "0.1", "--baseline-gib", "0.05", "--json", str(out), "--plot", str(picture)]
    assert bench_pinning.main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["case"] for r in rows] == [case[0] for case in cases(1, 1, 1)]
    assert all(r["pinned"] == HAS_GPU for r in rows if r["case"].startswith("HostTier"))
    assert ("nothing was pinned" in capsys.readouterr().out) == (not HAS_GPU)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert bench_pinning.main(["--gib", "1000000"]) == 2
    assert "wanted 1000000.00 GiB" in capsys.readouterr().err
    for bad in (["--gib", "0"], ["--threads", "0"]):
        with pytest.raises(SystemExit) as end:
            bench_pinning.main(bad)
        assert end.value.code == 2


@pytest.mark.parametrize("where", GPU_OR_CPU)
def test_each_kind_of_call_is_timed_and_ends(where: str) -> None:
    with Setup(1, 200, device_of(where), 0) as setup:
        for kind in KINDS:
            row = measure(setup, kind, 130, "alone", 8)
            assert 0 < row.low_us <= row.median_us <= row.p95_us <= row.high_us
            assert row.cpu_us > 0 and row.repeats == 8 and row.meets_bar is None
        loaded = measure(setup, "load", 200, "a Python thread", 5)
        assert loaded.beside == "a Python thread"
        with beside("a Python thread", setup):
            assert measure(setup, "store", 3, "a Python thread", 5).median_us > 0


def test_only_bulk_calls_for_8192_pages_alone_have_a_bar() -> None:
    with Setup(1, 8192, device_of("cpu"), 0) as setup:
        row = measure(setup, "store", 8192, "alone", 3)
        assert row.bar_us == bench_submit.BAR_US and row.meets_bar == (row.median_us <= 500)
        assert measure(setup, "plan", 8192, "alone", 3).bar_us is None


def test_stages_add_up_to_the_call() -> None:
    """Every stage is found by its name: a renamed function would leave it at zero."""
    with Setup(1, 512, device_of("cpu"), 0) as setup:
        stages, _ = profile(setup, "store", 500, 5)
        assert list(stages) == [*STAGES, "the rest"]
        assert all(us > 0 for us in stages.values()), stages
        assert stages["the rest"] < sum(stages.values()) / 2
        plan, _ = profile(setup, "plan", 500, 5)
        assert plan["plan"] > 0 and plan["check ids"] > 0 and plan["claim"] == plan["handle"] == 0


def test_submit_script(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--quick", "--profile", "--device", "cpu", "--pages", "16", "40", "--page-sizes", "1"]
    words += ["--kinds", "load", "plan"]
    assert bench_submit.main([*words, "--repeats", "4", "--json", str(out), "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())
    assert [(r["beside"], r["kind"], r["pages"]) for r in found["rows"]] == [
        (load, kind, pages) for load in ("alone", "a Python thread") for kind in ("load", "plan") for pages in (16, 40)
    ]
    assert set(found["stages_us"]) == {"load, 40 pages of 1", "plan, 40 pages of 1"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_row_is_what_a_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("some way", 8, 3, 1, 1.2, 4.0, 0.5, 0.4, 0.6, True, 1.0, 0.3)]
    bench_pinning.print_rows(rows, 8)
    printed = capsys.readouterr().out
    assert "MISSED: first 1 GiB in 1.20 s, not 1; 0.500 s/GiB, not 0.3" in printed
