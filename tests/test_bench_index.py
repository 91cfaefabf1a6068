"""The index benchmark: its cases, its replay against the model, and what it prints. The excerpt of a real trace."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_index import TOKENS, Args, inserts, keys, main, memory, replay, sequences, sixteen_nodes, two_nodes
from lru_model import ExactLru
from traces import BLOCK_TOKENS, Request, block_tokens, read

EXCERPT = Path(__file__).parent / "data" / "conversation_trace_excerpt.jsonl"
MUCH = Args(3, 3, 1.0)


def test_the_excerpt_is_read() -> None:
    requests = list(read(EXCERPT))
    assert len(requests) == 400
    assert requests[0].input_tokens == 6758 and requests[0].blocks == tuple(range(14)) and requests[1].blocks[0] == 0
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))


def test_gzipped_traces_and_bad_lines(tmp_path: Path) -> None:
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    assert list(read(packed)) == list(read(EXCERPT))
    for line in ("{}", "no json", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}'):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(EXCERPT.read_text().splitlines()[0] + "\n" + line + "\n")
        with pytest.raises(ValueError, match="line 2: expected"):
            list(read(bad))


def test_a_blocks_tokens_depend_on_its_id_alone() -> None:
    several = block_tokens(np.array([5, 0, 182_789, 5], dtype=np.uint64)).reshape(4, BLOCK_TOKENS)
    assert (several[0] == several[3]).all() and several.dtype == np.int32 and several.min() >= 0
    for n, block in enumerate((5, 0, 182_789)):
        assert (block_tokens(np.array([block], dtype=np.uint64)) == several[n]).all()
    assert len(np.unique(several)) > 1500
    assert Request(0.0, 700, 1, (5, 0)).tokens().tolist() == [*several[0].tolist(), *several[1, :188].tolist()]


@pytest.mark.parametrize(
    ("page_size", "room"), [(512, 40), (512, 700), (512, None), (128, 1500), (16, 20_000), (16, None)]
)
def test_hits_of_the_excerpt_are_those_of_the_model(page_size: int, room: int | None) -> None:
    """Exact LRU, and everything kept: the longest common page prefix over all that was stored."""
    requests = list(read(EXCERPT))[: 400 if page_size > 16 else 150]
    everything = sum(r.input_tokens // page_size for r in requests)
    row = replay(requests, page_size, room or everything, model=ExactLru(page_size, room))
    assert row.exact is True and row.hit_tokens["host"] > 0
    assert row.asked_tokens == sum(r.input_tokens for r in requests)
    assert (row.evicted_pages > 0) == (room is not None)


@pytest.mark.parametrize("policy", ["lfu", "slru", "fifo", "priority", "path_score"])
def test_every_policy_replays_with_a_disk_below(policy: str) -> None:
    requests = list(read(EXCERPT))[:200]
    row = replay(requests, 512, 100, 600, policy)
    assert set(row.hit_tokens) == {"host", "disk"} and row.evicted_pages > 0
    assert all(tokens % 512 == 0 and tokens > 0 for tokens in row.hit_tokens.values())


def test_a_model_that_differs_is_found_out() -> None:
    assert replay(list(read(EXCERPT)), 512, 100, model=ExactLru(512, 2000)).exact is False


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif("REPLAY_TRACE" not in os.environ, reason="REPLAY_TRACE names no trace")
@pytest.mark.parametrize("page_size", [512, 16])
def test_hits_of_a_whole_trace_are_those_of_the_model(page_size: int) -> None:
    requests = list(read(Path(os.environ["REPLAY_TRACE"])))
    for room in (3_000_000 // page_size, None):
        everything = sum(r.input_tokens // page_size for r in requests)
        assert replay(requests, page_size, room or everything, model=ExactLru(page_size, room)).exact is True


@pytest.mark.parametrize("case", [two_nodes, sixteen_nodes, inserts, keys])
def test_cases_run(case: Any) -> None:
    row = case(64, sequences(3, 0), MUCH)
    assert row.us > 0 and row.bare_us > 0 and row.low <= row.value <= row.high and row.bar is not None


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_memory_a_token_is_within_its_bar(page_size: int) -> None:
    row = memory(page_size, sequences(10, 0))
    assert row.met and 4.0 < row.value < (10.0 if page_size == 1 else 5.0)


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    trace = tmp_path / "some.jsonl"
    trace.write_text("".join(line + "\n" for line in EXCERPT.read_text().splitlines()[:50]))
    words = ["--quick", "--repeats", "3", "--page-sizes", "64", "--trace", str(trace), "--trace-page-sizes", "512"]
    assert main([*words, "--check", "--host-tokens", "51200", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert len(content["rows"]) == 5 and [r["exact"] for r in content["replays"]] == [None, True, True]
    printed = capsys.readouterr().out
    assert f"{TOKENS:,} int32 tokens" in printed and "equal" in printed and "DIFFERENT" not in printed


@pytest.mark.parametrize("words", [["--page-sizes", "3"], ["--trace", "/nowhere/t.jsonl"], ["--host-tokens", "0"]])
def test_bad_options_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--quick", *words])
    assert end.value.code == 2 and "error:" in capsys.readouterr().err
