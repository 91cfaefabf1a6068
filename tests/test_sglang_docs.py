"""The commands in docs/sglang.md: their JSON is what the doors take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.integrations import sglang as door
from kvtransfer.integrations.sglang.settings import read_settings
from kvtransfer.integrations.sglang.storage import THEIRS

TEXT = (Path(__file__).parents[1] / "docs" / "sglang.md").read_text()


def given(start: str) -> dict[str, Any]:
    """The JSON in quotes behind ``start``."""
    found = re.search(re.escape(start) + r"\s*'(\{.*?\})'", TEXT, re.S)
    assert found is not None, start
    value: dict[str, Any] = json.loads(found[1])
    return value


@pytest.mark.parametrize("start", ["--unified-cache-external-linker-config", "SHARED="])
def test_linker(start: str) -> None:
    config = given(start)
    assert set(config) == {"linker", "linker_module_path", "linker_extra_config"}
    assert config["linker_module_path"] == door.__name__ and config["linker"] in door.__all__
    assert "host" in read_settings(config["linker_extra_config"]).tiers


def test_storage() -> None:
    extra = given("--hicache-storage-backend-extra-config")
    assert extra["module_path"] == door.__name__ and extra["class_name"] in door.__all__
    assert read_settings(extra, THEIRS).lower_tiers
