"""The churn benchmark: its books, its predictions, its baselines, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_extents import main, measure, profile_share, simple_share
from churn import FILL, PLACERS, WORKLOADS, Churn, Stack, run_lengths
from harness import Bar, LargeCopy
from placed import replay
from rigs import SHAPES, Rig, Shape, device_of
from works import EngineWork

from kvtransfer.link import shipped_profile

SLOTS = 40_000


@pytest.mark.parametrize("placer", ["extents", "stack", "queue", "sorted"])
@pytest.mark.parametrize("workload", ["new", "extend", "tails", "blocks"])
def test_the_slab_stays_as_full_as_it_is_said_to_be(workload: str, placer: str) -> None:
    slots = SLOTS // 16 if workload != "blocks" else SLOTS  # in pages of 16 tokens
    churn = Churn(PLACERS[placer](slots), slots, 16, 1 << 21, WORKLOADS[workload], 3)
    coming = churn.stores()
    sizes = [next(coming).size for _ in range(300)]
    assert min(sizes) >= 16 and max(sizes) <= 512
    free = int(churn.free_runs().sum())
    assert slots - int(FILL * slots) <= free < slots // 2
    if workload == "tails":  # no more leaves than is needed
        assert free == slots - int(FILL * slots)
    assert churn.seconds > 0 and churn.calls >= 300


def test_one_seed_is_one_churn() -> None:
    def last(seed: int) -> list[int]:
        coming = Churn(PLACERS["extents"](SLOTS), SLOTS, 1, 1 << 17, WORKLOADS["extend"], seed).stores()
        slots: list[int] = [next(coming) for _ in range(60)][-1].tolist()
        return slots

    assert last(5) == last(5) != last(6)


def test_a_placer_that_gives_a_slot_out_twice_is_found_out() -> None:
    class Wrong(Stack):
        def free(self, slots: Any) -> None:
            super().free(np.concatenate((slots[:-1], slots[:1])))

    coming = Churn(Wrong(SLOTS), SLOTS, 1, 1 << 17, WORKLOADS["new"], 0).stores()
    with pytest.raises(RuntimeError, match="given out already"):
        for _ in range(200):
            next(coming)


def test_a_slab_too_small_for_the_stores_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 34493 for pages of 1, got 30000"):
        Churn(PLACERS["stack"](30_000), 30_000, 1, 1 << 17, WORKLOADS["new"], 0)


def test_predicted_shares() -> None:
    """Pieces of 128 KiB reach what the model was made from; longer ones more; the profile never above its peak."""
    assert simple_share(1000, 1000, 131_072) == pytest.approx(0.83)
    assert simple_share(1024, 32, 131_072) == pytest.approx(1 / (1 + (1 / 0.83 - 1) / 32))
    profile = shipped_profile()
    shares = [profile_share(np.full(65536 // n, n), 131_072, profile) for n in (1, 4, 32, 1024)]
    assert 0.7 < shares[0] <= shares[1] <= shares[2] <= 1 and 0.95 < shares[3] <= 1  # few pieces: the start counts
    assert shares[0] == pytest.approx(profile.grids["staged/d2h"].rate(131_072, 65536) / profile.peak_gbps["d2h"])


def test_run_lengths() -> None:
    assert run_lengths(np.array([5, 6, 7, 3, 4, 9, 8])).tolist() == [3, 2, 1, 1]
    assert run_lengths(np.array([], dtype=np.int64)).tolist() == []


def test_ours_keeps_longer_runs_than_free_lists_do() -> None:
    runs = {p: measure("tails", p, 1, 65_536, 600, 0, last=200).mean_run for p in ("extents", "stack", "queue")}
    assert runs["extents"] > 2 * max(runs["stack"], runs["queue"])


def test_rows_are_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--quick", "--stores", "300", "--page-sizes", "16", "--workloads", "new", "tails"]
    words += ["--placers", "extents", "stack", *([] if torch.cuda.is_available() else ["--gpu"])]
    assert main([*words, "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["workload"], r["placer"]) for r in rows] == [
        (w, p) for w in ("new", "tails") for p in ("extents", "stack")
    ]
    for row in rows:
        assert sum(row["histogram"]) == pytest.approx(1)
        assert 0.9 < row["profile"] <= 1 and row["worst"] <= row["simple"] + 0.01
        assert row["pieces"] * row["mean_run"] == pytest.approx(2 * (256 + 8192) / 2 / 16 / 2, rel=0.2)
    printed = capsys.readouterr().out
    assert "half continue an earlier one; tails leave" in printed
    assert ("--gpu: skipped: PyTorch sees no GPU" in printed) == (not torch.cuda.is_available())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", ["--slots 1000", "--json /nowhere/x.json", "--workloads some"])
def test_bad_options_end_with_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--quick", "--page-sizes", "1", *words.split()])
    assert end.value.code == 2
    assert "expected" in (said := capsys.readouterr().err) or "invalid choice" in said


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_lies_there_is_moved_and_compared(where: str) -> None:
    shape = Shape("tiny", 3, (("latent", 1, 36),))
    limit = LargeCopy(device_of(where), 1 << 20)
    rows = replay(0.01, 50, limit, seed=1, repeats=3, cases=[(shape, 4)], placers=["extents", "queue"], processes=1)
    assert [(r.case.split(":")[0], r.direction, r.exact) for r in rows] == [
        (f"{d}, tiny, pages of 4, {p}", d, True) for p in ("extents", "queue") for d in ("store", "load")
    ]
    assert [r.bar for r in rows] == [Bar(0.95) if where == "cuda" else None, None, None, None]
    assert all(r.total_bytes == (1 << 20) // 432 * 432 and r.share > 0 for r in rows)


def test_a_rig_moves_the_slots_that_it_is_given() -> None:
    with Rig(SHAPES["onehead"], 2, 40 << 10, device_of("cpu"), num_slots=50) as rig:
        assert rig.host.num_slots == 50 and rig.count == 1
        rig.place(np.array([47]))
        assert rig.holds(rig.pages, np.array([47])) and 47 not in rig.other_slots
        assert EngineWork(rig, "load").exact() and EngineWork(rig, "store").exact()
