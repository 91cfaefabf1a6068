"""Prefill and decode in processes of their own: turn 2 hits what turn 1 generated, and tokens are one process's."""

from __future__ import annotations

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


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for bad, said in ((["--prefill-tp", "0"], "above 0"), (["--decode-tp", "2"], "--model FOLDER")):
        with pytest.raises(SystemExit) as end:
            parse(bad)
        assert end.value.code == 2 and said in capsys.readouterr().err
