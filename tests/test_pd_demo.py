"""Prefill and decode in processes of their own: turn 2 hits what turn 1 generated, and tokens are one process's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pd_demo
import pytest
from pd_demo import Outcome, Step, parse, run
from rich.console import Console
from tier_servers import Mooncake, start_redis

from kvtransfer.kernels.errors import ServerError

PAGE = 16


def check(outcome: Outcome, new_tokens: int) -> None:
    """Every instance used all that there was: decode the prompt, prefill the first turn with its answer."""
    assert outcome.equal, outcome
    first, decode_1, second, decode_2 = outcome.steps
    assert first.cached_tokens == 0
    for step in (decode_1, decode_2):
        assert step.cached_tokens == min(step.prompt_tokens // PAGE * PAGE, step.prompt_tokens - 1)
    kept = outcome.turn1_tokens - 1  # the last token's KV was never computed
    assert second.cached_tokens == kept // PAGE * PAGE > first.prompt_tokens
    assert len(decode_1.tokens) == len(decode_2.tokens) == new_tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("prefill", "decode"), [(2, 4), *(pytest.param(a, b, marks=pytest.mark.long) for a, b in ((1, 1), (1, 2), (4, 1)))]
)
def test_sizes_over_redis(prefill: int, decode: int, tmp_path: Path) -> None:
    server, port, _ = start_redis(tmp_path)
    try:
        words = ["--random-weights", "--redis", f"redis://127.0.0.1:{port}", "--prompt-tokens", "100"]
        words += ["--prefill-tp", str(prefill), "--decode-tp", str(decode), "--max-new-tokens", "20"]
        check(run(parse(words), Console(quiet=True)), 20)
    finally:
        server.kill()


@pytest.mark.timeout(600)
def test_over_mooncake(tmp_path: Path) -> None:
    mooncake = Mooncake(tmp_path, segment_mib=128, lease_ms=5000)
    try:
        words = ["--random-weights", "--mooncake", mooncake.address, "--prompt-tokens", "100"]
        words += ["--prefill-tp", "1", "--decode-tp", "2", "--max-new-tokens", "20"]
        check(run(parse(words), Console(quiet=True)), 20)
    finally:
        mooncake.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert pd_demo.main(["--prompt-tokens", "400"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("tokens equal: yes")


def test_a_difference_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [Step(1, "prefill", 10, 0, 0.1, [5])]
    monkeypatch.setattr(pd_demo, "run", lambda args, console: Outcome(steps, False, 11))
    assert pd_demo.main(["--random-weights"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("tokens equal: no")


def test_an_instance_that_dies_is_named(tmp_path: Path) -> None:
    settings = {"device": "cpu", "model": str(tmp_path / "none"), "config": {}, "page_size": 16, "pool_tokens": 64}
    with pytest.raises(ServerError, match=r"decode \(tp 1\): a rank ended with status 1"):
        pd_demo.Instance("decode", 1, {**settings, "name": "x"}, tmp_path)


DYING = """
import json, os, sys, time
settings = json.loads(sys.argv[1])
print("{}", flush=True)
sys.stdin.readline()
if settings["rank"] == settings["dies"]:
    print("out of memory", file=sys.stderr)
    os._exit(3)
time.sleep(1000)
"""


@pytest.mark.parametrize("dies", [0, 1])
def test_ranks_that_wait_for_a_dead_one_are_ended(dies: int, tmp_path: Path) -> None:
    """A rank dies at a request, the other waits for it and hears nothing: both are gone within seconds."""
    worker = tmp_path / "worker.py"
    worker.write_text(DYING)
    instance = pd_demo.Instance("decode", 2, {"dies": dies}, tmp_path, worker)
    started = time.monotonic()
    try:
        with pytest.raises(ServerError, match=r"decode \(tp 2\): a rank ended with status 3:\nout of memory"):
            instance.ask(1, [1, 2], 1)
        with pytest.raises(ServerError, match="status 3"):
            instance.ask(1, [1, 2], 1)
    finally:
        instance.close()
    assert time.monotonic() - started < 10
    assert [rank.returncode for rank in instance._ranks] == ([3, -9] if dies == 0 else [-9, 3])


def test_a_store_that_gives_nothing_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every instance can compute all there is: equal tokens do not show that anything was shared."""
    asked = [(1, "prefill", 100, 0), (1, "decode", 100, 96), (2, "prefill", 150, 112), (2, "decode", 150, 144)]
    steps = [Step(turn, f"{role} (tp 1)", count, cached, 0.1, [5]) for turn, role, count, cached in asked]
    monkeypatch.setattr(pd_demo, "run", lambda args, console: Outcome(steps, True, 120))
    assert pd_demo.main(["--random-weights"]) == 0
    for number, wanted in ((1, 96), (2, 112), (3, 144)):
        without = [*steps]
        without[number] = replace(steps[number], cached_tokens=wanted - 16)
        monkeypatch.setattr(pd_demo, "run", lambda args, console, s=without: Outcome(s, True, 120))
        capsys.readouterr()
        assert pd_demo.main(["--random-weights"]) == 1
        out = capsys.readouterr().out
        assert f"expected {wanted} cached, got {wanted - 16}" in out and out.rstrip().endswith("tokens equal: yes")


@pytest.mark.timeout(120)
def test_being_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    words = [sys.executable, pd_demo.__file__, "--random-weights", "--prompt-tokens", "50"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, process_group=0)
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "starting decode" in line:
                break
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 130, demo.stderr.read()
        with pytest.raises(ProcessLookupError):
            os.killpg(demo.pid, 0)  # ranks and the store are of its group
        assert list(tmp_path.iterdir()) == []
    finally:
        demo.kill()
        demo.wait()


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for bad, said in (
        (["--prefill-tp", "0"], "above 0"),
        (["--host-pages", "0"], "above 0"),
        (["--decode-tp", "2"], "--model FOLDER"),
        (["--redis", "redis://127.0.0.1:9", "--mooncake", "127.0.0.1:9"], "one store"),
        (["--model", "x", "--random-weights"], "one of them"),
    ):
        with pytest.raises(SystemExit) as end:
            parse(bad)
        assert end.value.code == 2 and said in capsys.readouterr().err
