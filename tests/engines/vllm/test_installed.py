"""That the engine under test is the one whose interfaces are written down, that it is the real one, and that the
stand-in of the ordinary tests has its signatures."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
STUBS = Path(__file__).parents[2] / "stubs"
MADE_BY_THE_ENGINE = ("BlockPool",)  # it gives us one: how it makes it is its own


def test_version() -> None:
    listed = (Path(__file__).parent / "engine.txt").read_text()
    pinned = re.search(r"^vllm==(\S+)$", listed, re.M)
    assert pinned is not None and version("vllm") == pinned[1]


def test_it_is_the_real_one() -> None:
    import vllm.v1.kv_offload.tiering.base as base

    assert "site-packages" in str(base.__file__)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """The stand-in's modules, by name: parsed, for the name `vllm` is the real package's here."""
    for file in sorted((STUBS / "vllm").rglob("*.py")):
        parts = file.relative_to(STUBS).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), ast.parse(file.read_text())


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Names of parameters without self and cls, with a * or ** in front of those that gather the rest."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def _real_parameters(real: Any) -> list[str]:
    signs = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(real).parameters.values()
    return [signs.get(p.kind, "") + p.name for p in found if p.name not in ("self", "cls")]


def _differences(module: str, node: ast.stmt, real: Any) -> Iterator[str]:
    """How what is defined in the stand-in differs from the real thing."""
    if isinstance(node, ast.FunctionDef):
        found = getattr(real, node.name, None)
        if found is None:
            yield f"{module}.{node.name} is not there"
            return
        if isinstance(inspect.getattr_static(real, node.name), property):
            decorators = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
            if "property" not in decorators:
                yield f"{module}.{node.name} is a property"
            return
        ours, theirs = _parameters(node), _real_parameters(found)
        if not node.name.startswith("_") or node.name == "__init__":
            # What theirs has more must have defaults, and stand behind ours.
            more = [p for p in inspect.signature(found).parameters.values() if p.name in theirs[len(ours) :]]
            if theirs[: len(ours)] != ours or any(p.default is inspect.Parameter.empty for p in more):
                yield f"{module}.{node.name}: {ours} here, {theirs} there"
    elif isinstance(node, ast.ClassDef):
        found = getattr(real, node.name, None)
        if found is None:
            yield f"{module}.{node.name} is not there"
            return
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            known = [
                "",
                "NamedTuple",
                "Enum",
                "ABC",
                "object",
                "Protocol",
                *(c.__name__ for c in inspect.getmro(found)),
            ]
            if name not in known:
                yield f"{module}.{node.name} does not derive from {name}"
        fields = [f.name for f in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else None
        ours = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        is_data = any("dataclass" in ast.dump(d) for d in node.decorator_list)
        if is_data and (fields is None or [f for f in fields if f in ours] != ours):
            yield f"{module}.{node.name}: fields {ours} here, {fields} there"
        elif not is_data and (missing := [n for n in ours if not hasattr(found, n) and n not in _annotated(found)]):
            yield f"{module}.{node.name} has no {missing}"
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                if member.name == "__init__" and node.name in MADE_BY_THE_ENGINE:
                    continue
                yield from _differences(f"{module}.{node.name}", member, found)
            elif isinstance(member, ast.Assign):
                for target in member.targets:
                    if isinstance(target, ast.Name) and not hasattr(found, target.id):
                        yield f"{module}.{node.name}.{target.id} is not there"


def _annotated(real: type) -> set[str]:
    return {name for c in inspect.getmro(real) for name in getattr(c, "__annotations__", {})}


@pytest.mark.parametrize(
    ("module", "tree"), list(_modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_stand_in_has_its_signatures(module: str, tree: ast.Module) -> None:
    real = importlib.import_module(module)
    private = [
        difference
        for node in tree.body
        if not (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name.startswith("_"))
        for difference in _differences(module, node, real)
    ]
    assert not private, "\n".join(private)
