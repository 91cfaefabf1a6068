"""The command line: version, info, and errors as one line with the right exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtransfer
from kvtransfer import cli
from kvtransfer.kernels.errors import CapacityError, ConfigError, KVTransferError, LayoutError, TransferError

ROOT = Path(__file__).resolve().parent.parent


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return int(caught.value.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.strip() == f"kvtransfer {kvtransfer.__version__}"


def test_version_is_quick_about_it() -> None:
    """Neither torch nor transformers is loaded to print a version."""
    code = (
        "import sys; from kvtransfer import cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split("\n")[1] == "[]", done.stderr


def test_info_works_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("info") == 0
    out = capsys.readouterr().out
    assert f"kvtransfer {kvtransfer.__version__}" in out
    assert "torch " in out
    assert "GPU" in out or "cuda:0" in out


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a setting"), 2),
        (LayoutError("a layout"), 2),
        (CapacityError("no room"), 2),
        (TransferError("pages did not verify", [3]), 1),
        (KVTransferError("something else"), 1),
    ],
)
def test_errors_are_one_line_on_stderr(
    error: KVTransferError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert exit_code("demo") == status
    captured = capsys.readouterr()
    assert captured.err == f"kvtransfer: {error}\n"
    assert not captured.out


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--random-weights", "--device", "tpu"], "device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--random-weights", "--device", "meta"], "device: expected auto, cpu, cuda or cuda:N, got 'meta'"),
        (["--random-weights", "--device", "cuda:99"], "device: expected"),
        (["--random-weights", "--page-size", "0"], "--page-size: expected at least 1, got 0"),
        (["--random-weights", "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--random-weights", "--prefix-tokens", "1"], "--prefix-tokens: expected at least 2, got 1"),
        (["--random-weights", "--model", "x"], "--model and --random-weights: expected one of them, got both"),
        (["--random-weights", "--prompt-file", "/no/such/file"], "--prompt-file /no/such/file: expected a readable"),
        (["--random-weights", "--json", "/no/such/folder/file"], "expected a file in a folder that exists"),
        (["--random-weights", "--max-new-tokens", "70000"], "--max-new-tokens: expected few enough for a model"),
    ],
)
def test_bad_input_to_the_demo(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", *args) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.strip().count("\n") == 0
    assert not captured.out


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert exit_code("demo", "--device", "cpu", "--model", str(tmp_path / "empty")) == 2
    assert "expected a folder, a GGUF file or an id that transformers can load" in capsys.readouterr().err


def test_an_unknown_option_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", "--no-such-option") == 2
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cpu", "--budget-s", "0"], "--budget-s: expected seconds above 0, got 0.0"),
        (["--cpu", "--budget-s", "nan"], "--budget-s: expected seconds above 0, got nan"),
        (["--cpu", "--plot", "/no/such/folder/x.png"], "expected a file in a folder that exists"),
        (["--cpu", "--json", "/no/such/folder/x.json"], "expected a file in a folder that exists"),
        (["--device", "99"], "GPU" if not torch.cuda.is_available() else "--device: expected an index below"),
    ],
)
def test_bad_input_to_tune(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("tune", *args) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.strip().count("\n") == 0
    assert not captured.out


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert exit_code("tune", "--cpu", "--plot", "x.png") == 2
    assert "--plot: expected matplotlib, got none; pip install 'kvtransfer[plot]'" in capsys.readouterr().err


def test_tune_measures_the_cpu_shows_it_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtransfer.link import decode_profile, load_profile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvtransfer.meter.CPU_REGION_BYTES", 4 << 20)
    monkeypatch.setattr("kvtransfer.meter.CpuMeter.largest_bytes", 1 << 20)
    assert exit_code("tune", "--cpu", "--budget-s", "0.3", "--json", str(tmp_path / "link.json")) == 0
    out = capsys.readouterr().out
    assert "GB/s by piece size" in out and "256 KiB" in out and "us a launch" not in out.splitlines()[0]
    kept = load_profile("cpu")
    assert f"kept as {tmp_path / 'cache' / 'kvtransfer' / kept.key.file_name}" in out.replace("\n", "")
    assert kept.source == "measured" and decode_profile((tmp_path / "link.json").read_bytes(), "file") == kept
    assert exit_code("info") == 0
    assert "link profile: measured on CPU" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_profile_is_drawn(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvtransfer.link import shipped_profile
    from kvtransfer.link_report import plot_profile

    plot_profile(shipped_profile(kind), tmp_path / "link.png")
    assert (tmp_path / "link.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ConfigError, match="expected a file in a folder that exists"):
        plot_profile(shipped_profile(kind), tmp_path / "none" / "link.png")
