"""The stand-ins that the ordinary tests use (tests/stubs) against what SGLang has: names, parameters, defaults."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.engines
STUBS = Path(__file__).parents[2] / "stubs"
MODULES = sorted(".".join(file.relative_to(STUBS).with_suffix("").parts) for file in (STUBS / "sglang").rglob("*.py"))


def stub_of(name: str) -> ModuleType:
    file = (STUBS / Path(*name.split("."))).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"stub_{name.replace('.', '_')}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def own_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
            yield name, value


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    def plain(default: Any) -> Any:
        return default.value if isinstance(default, enum.Enum) else default

    return [(p.name, p.kind, plain(p.default)) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", MODULES)
def test_stub_is_like_the_real_one(name: str) -> None:
    stub, real = stub_of(name), importlib.import_module(name)
    for what, ours in own_names(stub):
        theirs = getattr(real, what)
        if inspect.isfunction(ours):
            assert parameters(ours) == parameters(theirs), what
        elif issubclass(ours, enum.Enum):
            assert {one.name: one.value for one in ours}.items() <= {one.name: one.value for one in theirs}.items()
        elif dataclasses.is_dataclass(ours):
            fields = [[(f.name, str(f.default)) for f in dataclasses.fields(one)] for one in (ours, theirs)]
            assert fields[0] == fields[1], what
        else:
            assert_methods_alike(what, ours, theirs)


def assert_methods_alike(what: str, ours: type, theirs: type) -> None:
    for method, function in vars(ours).items():
        if not inspect.isfunction(function):
            continue
        real = getattr(theirs, method)
        if method == "__init__" and "Pool" in what and "Device" not in what:
            # A pool's constructor has more than tests need: ours is a part of it.
            assert {p[0] for p in parameters(function)} <= {p[0] for p in parameters(real)}, what
        else:
            assert parameters(function) == parameters(real), f"{what}.{method}"
    abstract: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    assert abstract == getattr(theirs, "__abstractmethods__", frozenset()), what
