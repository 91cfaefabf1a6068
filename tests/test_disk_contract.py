"""The disk tier passes the contract of tiers: with io_uring, with threads, on two folders, buffered, and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_helpers import ODD_RECORD, FolderLab, SimulatedLab
from tier_contract import BoundedContract, Lab, ShortRecordContract, TierContract

KINDS: dict[str, dict[str, Any]] = {
    "io_uring": {"engine": "io_uring", "file_bytes": 64 * ODD_RECORD},
    "threads": {"engine": "threads", "direct": False, "sync": "interval", "interval_s": 0.05},
    "batch": {"engine": "auto", "sync": "batch", "file_bytes": 100 * ODD_RECORD},
    "simulated": {"sync": "batch", "file_bytes": 50 * ODD_RECORD},
}


def lab_of(kind: str, folder: Path, **more: Any) -> Lab:
    settings = {**KINDS[kind], **more}
    if kind == "simulated":
        return SimulatedLab(**settings)
    return FolderLab(f"{folder}/a;{folder}/b" if kind == "batch" else folder, **settings)


class TestDisk(TierContract, BoundedContract):
    @pytest.fixture(params=list(KINDS))
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
        yield lab_of(request.param, tmp_path)


class TestDiskShort(ShortRecordContract):
    @pytest.fixture(params=list(KINDS))
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
        yield lab_of(request.param, tmp_path, file_bytes=ODD_RECORD)
