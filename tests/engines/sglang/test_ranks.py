"""Two ranks of tensor parallel, each with its own memory: what one lacks or fails at, both do without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines.sglang.rank_work import work
from torch.multiprocessing.spawn import spawn

pytestmark = pytest.mark.engines


@pytest.mark.timeout(900)  # two processes import SGLang
def test_ranks_never_part(tmp_path: Path) -> None:
    start: Any = spawn
    start(work, args=(str(tmp_path / "meeting"), str(tmp_path)), nprocs=2, join=True)
    expected = {
        "too big": 0, "kept": 32, "whole": True, "shorter": 20, "short": True, "bad": True, "after": 8,
        "radix bad": 0, "radix freed": True, "radix again": 24, "radix rows": True,
    }  # fmt: skip
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == expected
