"""Replaying a trace through a cache with real tiers: hits are the model's, bytes are looked at, knees are found."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_index import replay as replay_directory
from lru_model import ExactLru
from replay import count_of, knee, main, read_requests
from replay_cache import LAYERS, ROW_BYTES, Result, Rig, Setting, page_contents, replay
from traces import block_tokens

EXCERPT = Path(__file__).parent / "data" / "conversation_trace_excerpt.jsonl"
CPU = torch.device("cpu")


def test_pages_depend_on_every_token_before() -> None:
    tokens = block_tokens(np.arange(3, dtype=np.uint64))
    rows = page_contents(tokens, 100)
    assert rows.shape == (15, LAYERS * ROW_BYTES) and len({row.tobytes() for row in rows}) == 15
    assert np.array_equal(page_contents(tokens[:799], 100), rows[:7])
    other = tokens.copy()
    other[250] += 1
    changed = (page_contents(other, 100) != rows).any(axis=1)
    assert changed.tolist() == [False] * 2 + [True] * 13
    halves = rows.reshape(15, LAYERS, ROW_BYTES)
    assert (halves[:, 0] != halves[:, 1]).any(axis=1).all()
    assert page_contents(tokens[:99], 100).shape == (0, LAYERS * ROW_BYTES)


@pytest.mark.parametrize(("host", "policy"), [(300, "lru"), (2000, "lru"), (600, "slru")])
def test_hits_are_those_of_the_directory_and_of_the_model(tmp_path: Path, host: int, policy: str) -> None:
    requests = read_requests(EXCERPT, 80)
    got = replay(requests, Setting(512, host, 0, policy), tmp_path, CPU)
    alone = replay_directory(requests, 512, host, 0, policy)
    assert got.hit_tokens == alone.hit_tokens and got.evicted_pages["host"] == alone.evicted_pages
    assert got.wrong_pages == got.short_loads == 0
    assert got.loaded_pages * 512 == sum(got.hit_tokens.values()) > 0
    assert got.moved_bytes["load"] == got.loaded_pages * LAYERS * ROW_BYTES
    if policy == "lru":
        model = ExactLru(512, host)
        assert sum(model.serve(request.tokens()) for request in requests) == got.loaded_pages


def test_a_disk_below(tmp_path: Path) -> None:
    requests = read_requests(EXCERPT, 200)
    everything = replay(requests, Setting(512, 5000, 0, "lru"), tmp_path, CPU)
    got = replay(requests, Setting(512, 250, 5000, "lru"), tmp_path, CPU)
    assert sum(got.hit_tokens.values()) == sum(everything.hit_tokens.values())
    assert got.hit_tokens["disk"] > 0 and got.rate() == everything.rate() > got.rate("host") > 0
    assert got.wrong_pages == got.short_loads == 0 and got.loaded_pages == everything.loaded_pages
    assert got.moved_bytes["disk_read"] == got.hit_tokens["disk"] // 512 * 8192
    assert got.moved_bytes["disk_write"] % 8192 == 0 and got.moved_bytes["disk_write"] > got.moved_bytes["disk_read"]
    assert 0 < got.directory_s < got.wall_s


def test_wrong_bytes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A cache that gives somebody else's page fails the run."""
    honest = Rig.read

    def wrong(self: Rig, pages: Any) -> Any:
        rows = honest(self, pages)
        rows[-1:, 5] ^= 1
        return rows

    monkeypatch.setattr(Rig, "read", wrong)
    words = ["--trace", str(EXCERPT), "--limit", "40", "--host-tokens", "1M", "--device", "cpu"]
    assert main([*words, "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "WRONG" in told.out and "wrong bytes in" in told.err
    assert not list(tmp_path.iterdir())


def result(host_pages: int, host: int, disk: int = 0, policy: str = "lru") -> Result:
    setting = Setting(512, host_pages, 100 if disk else 0, policy)
    return Result(setting, 1, 1000, {"host": host, "disk": disk}, 0, 0, 0, {}, {}, 0.0, 0.0, 0.0)


def test_the_knee_is_the_smallest_size_within_two_percent_of_the_best() -> None:
    sizes = [result(1, 100, 300), result(2, 390, 10), result(4, 392, 8), result(8, 400, 0), result(16, 399)]
    assert knee(sizes).setting.host_pages == 4
    assert knee(sizes[::-1]).setting.host_pages == 4  # in any order
    assert knee(sizes, tier=None).setting.host_pages == 1  # with the disk any size does
    assert knee(sizes[:1]) is sizes[0]
    assert knee([result(1, 0), result(2, 0)]).setting.host_pages == 1
    assert replace(sizes[0], asked_tokens=0).rate() == 0.0


def test_counts() -> None:
    assert [count_of(text) for text in ("7", "500k", "4M", "1.5G", "0")] == [7, 500_000, 4_000_000, 1_500_000_000, 0]
    for bad in ("", "M", "4T", "-1", "nan"):
        with pytest.raises(ValueError):
            count_of(bad)


def test_what_the_program_says_and_writes(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "plot")}
    words = ["--trace", str(trace), "--limit", "50", "--device", "cpu", "--page-size", "256", "--disk-tokens", "2M"]
    words += ["--host-tokens", "300k", "100k", "1M", "--policies", "lru", "lfu"]
    words += [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "50 requests" in told and "a disk of 1,999,872 tokens" in told and "all right" in told
    assert "knee of lru: a host tier of" in told and told.count("<- knee") == 2
    written = json.loads(files["json"].read_text())
    assert len(written["rows"]) == 6 and set(written["knee_host_tokens"]) == {"lru", "lfu"}
    with files["csv"].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["host_tokens"]) for row in rows] == [99_840, 299_776, 999_936] * 2
    assert all(int(row["wrong_pages"]) == 0 and int(row["loaded_pages"]) > 0 for row in rows)
    assert [float(row["hit_rate"]) for row in rows] == [row["hit_rate"] for row in written["rows"]]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host-tokens", "100"], "at least a page of 512"),
        (["--disk-tokens", "100"], "at least a page of 512"),
        (["--limit", "0"], "--page-size and --limit"),
        (["--csv", "/nowhere/x.csv"], "a folder that exists"),
        (["--trace", "/nowhere/x.jsonl"], "No such file"),
        (["--policies", "best"], "invalid choice"),
        (["--host-tokens", "many"], "invalid count_of value"),
    ],
)
def test_bad_options(words: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trace", str(EXCERPT), *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_an_empty_trace_is_refused(tmp_path: Path, capsys: Any) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(SystemExit):
        main(["--trace", str(empty)])
    assert "expected requests, got none" in capsys.readouterr().err
