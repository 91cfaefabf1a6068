"""`vllm` for ordinary tests: the package's stand-in (stubs/vllm), also where the package itself is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"
_OURS = "kvtransfer.integrations.vllm"


@pytest.fixture
def vllm_stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import `vllm` and what rests on it anew, and forget them afterwards."""
    _forget()
    monkeypatch.syspath_prepend(str(STUBS))
    yield
    _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if name == "vllm" or name.startswith(("vllm.", _OURS)):
            module = sys.modules.pop(name)
            parent, _, own = name.rpartition(".")
            if vars(sys.modules.get(parent, object)).get(own) is module:
                delattr(sys.modules[parent], own)
