"""That the engine under test is the one whose interfaces are written down, and that it is the real one."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines


def test_version() -> None:
    listed = (Path(__file__).parent / "engine.txt").read_text()
    pinned = re.search(r"^sglang==(\S+)$", listed, re.M)
    assert pinned is not None and version("sglang") == pinned[1]


def test_it_is_the_real_one() -> None:
    import sglang.srt.mem_cache.hicache_storage as storage

    assert "site-packages" in str(storage.__file__)
