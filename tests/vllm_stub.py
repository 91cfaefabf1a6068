"""`vllm` for ordinary tests: the package's stand-in (stubs/vllm), where the package itself is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"
_OURS = "kvtransfer.integrations.vllm"


@pytest.fixture
def vllm_stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import `vllm` and what rests on it anew, and forget them afterwards."""
    if "vllm" not in sys.modules and find_spec("vllm") is not None:
        pytest.fail("this is for environments without vllm; run tests/engines/vllm in those with it")
    monkeypatch.syspath_prepend(str(STUBS))
    yield
    for name in list(sys.modules):
        if name == "vllm" or name.startswith(("vllm.", _OURS)):
            module = sys.modules.pop(name)
            parent, _, own = name.rpartition(".")
            if vars(sys.modules.get(parent, object)).get(own) is module:
                delattr(sys.modules[parent], own)
