"""The tests in a folder are collected where the engine of that name is installed (prepare.sh), and nowhere else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


collect_ignore = [
    str(listed.parent) for listed in Path(__file__).parent.glob("*/engine.txt") if not _installed(listed.parent.name)
]
