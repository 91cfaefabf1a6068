"""Stand-in: what SGLang says of itself. Tests replace `MODEL` and `PARALLEL`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MODEL = SimpleNamespace(model_path="dummy", revision=None, kv_cache_dtype="auto")
PARALLEL = SimpleNamespace(tp_size=1)


def get_model() -> Any:
    return MODEL


def get_parallel() -> Any:
    return PARALLEL
