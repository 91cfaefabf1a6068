"""Checking the values of a configuration against their types: what was expected, what was given, the nearest name."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, get_type_hints

import msgspec
from msgspec import inspect

from kvtransfer.kernels.errors import ConfigError

_SECRET = re.compile(r"(^|_)(salt|secret|password|passwd|token|credentials?|key)$")
_PASSWORD = re.compile(r"(://[^/@]*:)[^/]*@")
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class FieldError(ConfigError):
    """A value of a configuration is wrong. ``path`` names it from the outermost key; ``problem`` says the rest."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{dotted(path)}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True)
class Field:
    """A field that holds a value: its annotation, what that means to msgspec, and its default."""

    annotation: Any
    kinds: tuple[inspect.Type, ...]
    default: Any
    required: bool


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the configuration. Made in Python it is checked as one from a file is: FieldError on a bad value.

    ``one_of``: fields of which at most one may be given, a tuple each.
    """

    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __post_init__(self) -> None:
        for name, field in fields(type(self)).items():
            msgspec.structs.force_setattr(self, name, read((name,), getattr(self, name), field))
        for group in self.one_of:
            given = [name for name in group if getattr(self, name) is not None]
            if len(given) > 1:
                raise FieldError((given[1],), f"expected at most one of {', '.join(group)}, got {' and '.join(given)}")
        self.check()

    def check(self) -> None:
        """What no field can tell by itself. Raises FieldError."""


@cache
def fields(section: type[Section]) -> dict[str, Field]:
    """The fields of ``section`` that hold values: not those that hold sections."""
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(section):
        kinds = tuple(_alternatives(inspect.type_info(hints[field.name])))
        if not any(_holds_sections(kind) for kind in kinds):
            default = None if field.default is msgspec.NODEFAULT else field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            found[field.name] = Field(hints[field.name], kinds, default, field.required)
    return found


def read(path: tuple[str, ...], value: Any, field: Field, *, text: bool = False) -> Any:
    """``value`` as ``field`` takes it. ``text``: it is from the environment, where all is text.

    One text with ``;`` between stands for a list of texts. Raises FieldError.
    """
    try:
        plain = _from_text(value, field.kinds) if text else value
        if isinstance(plain, str) and any(isinstance(kind, inspect.VarTupleType) for kind in field.kinds):
            plain = [part.strip() for part in plain.split(";") if part.strip()]
        found = msgspec.convert(plain, field.annotation, strict=not text)
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError("not finite")
        for word in (found,) if isinstance(found, str) else found if isinstance(found, tuple) else ():
            word.encode()  # half of a surrogate pair is no text
        return found
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's ValidationError is a ValueError
        choices = [str(v) for kind in field.kinds if isinstance(kind, inspect.LiteralType) for v in kind.values]
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise FieldError(path, f"expected {expected(field)}, got {shown(masked(path, value))}{near}") from error


def dotted(path: Iterable[str]) -> str:
    """A path for a message: on one line, shortened."""
    return ".".join(name if name.isprintable() else repr(name) for name in path)[:200]


def masked(path: tuple[str, ...], value: Any) -> Any:
    """``value`` of the field at ``path`` for people to see: without what is secret in it."""
    if isinstance(value, dict):
        return {key: masked((*path, str(key)), inner) for key, inner in value.items()}
    if value not in (None, "") and _SECRET.search(path[-1]):
        return "***"
    return _PASSWORD.sub(r"\1***@", value) if isinstance(value, str) else value


def shown(value: Any) -> str:
    """A value in a message: on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    try:
        return short.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"an {type(value).__name__} that is too long to show"


def expected(field: Field) -> str:
    """What a field takes, in words."""
    words = []
    for kind in field.kinds:
        if isinstance(kind, inspect.IntType):
            words.append("a whole number" + _bounds(kind))
        elif isinstance(kind, inspect.FloatType):
            words.append("a number" + _bounds(kind))
        elif isinstance(kind, inspect.LiteralType):
            values = [str(v) for v in kind.values]
            words.append(f"one of {', '.join(values)}" if len(values) > 1 else repr(values[0]))
        elif isinstance(kind, inspect.BoolType):
            words.append("true or false")
        elif isinstance(kind, inspect.NoneType):
            words.append("nothing")
        elif isinstance(kind, inspect.VarTupleType):
            words.append("a list of texts, or one text with ; between them")
        elif isinstance(kind, inspect.DictType):
            words.append("a table of settings")
        else:
            words.append("text")
    return " or ".join(words)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``names``, or ""."""
    by_small = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower()[:100], by_small, n=1)
    return f"; did you mean {by_small[near[0]]!r}?" if near else ""


def _from_text(text: Any, kinds: tuple[inspect.Type, ...]) -> Any:
    """What a variable of the environment says, as far as msgspec does not read text by itself."""
    if not isinstance(text, str):
        return text
    types = {type(kind) for kind in kinds}
    small = text.strip().lower()
    if inspect.NoneType in types and small in ("none", "null"):
        return None
    if inspect.BoolType in types and small in FLAGS:
        return FLAGS[small]
    if inspect.IntType in types and re.fullmatch(r"[+-]?\d{1,30}", small, re.A):
        return int(small)
    if inspect.DictType in types:
        return json.loads(text)
    return text


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types of a union, without what is only annotation; the type alone where it is none."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return [inner for one in kind.types for inner in _alternatives(one)]
    return [kind]


def _holds_sections(kind: inspect.Type) -> bool:
    inner = kind.value_type if isinstance(kind, inspect.DictType) else kind
    return isinstance(inner, inspect.StructType)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    """The bounds of a number, in words."""
    words = []
    if kind.gt is not None:
        words.append(f"above {kind.gt:,.15g}")
    if kind.ge is not None:
        words.append(f"of at least {kind.ge:,.15g}")
    if kind.le is not None:
        words.append(f"at most {kind.le:,.15g}")
    return " " + " and ".join(words) if words else ""
