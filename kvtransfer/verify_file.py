"""The file that `kvtransfer verify` keeps between its phases: prompts, and what a run without us answered."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from kvtransfer.completion import Completion, Prompt
from kvtransfer.kernels.errors import ConfigError

VERSION = 1


class Entry(Struct, frozen=True):
    """One prompt. ``cold``: nothing of it was cached; ``warm``: again at once, out of the engine's own prefix cache."""

    name: str
    prompt: Prompt
    cold: Completion
    warm: Completion


class Baseline(Struct, frozen=True):
    """All prompts, and who answered them."""

    target: str
    max_new_tokens: int
    entries: list[Entry]
    version: int = VERSION


def write_baseline(baseline: Baseline, path: Path) -> None:
    """As JSON. Raises ConfigError where the file can't be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--file {path}: could not be written: {error}") from error


def read_baseline(path: Path) -> Baseline:
    """What was written. Raises ConfigError on another file, or one of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--file {path}: expected what `kvtransfer verify baseline` wrote: {error}") from error
    try:
        baseline = msgspec.json.decode(data, type=Baseline)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--file {path}: expected what `kvtransfer verify baseline` wrote, got {error}") from error
    if baseline.version != VERSION:
        raise ConfigError(f"--file {path}: expected version {VERSION}, got {baseline.version}; record it again")
    return baseline
