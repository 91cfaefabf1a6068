"""From trees of given values to a checked `Config`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, get_type_hints

import msgspec

from kvtransfer.config_check import Field, FieldError, Section, did_you_mean, dotted, fields, masked, read, shown
from kvtransfer.config_fields import Config
from kvtransfer.config_sources import PREFIX, SHORTHANDS, Given, Tree
from kvtransfer.config_tiers import BUILT_IN, OtherOptions, TierOptions, other_kinds
from kvtransfer.kernels.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.A)
_S = TypeVar("_S", bound=Section)


class ConfigWarning(UserWarning):
    """Two values of a configuration disagree, or kvtransfer was chosen twice: the message says what is taken."""


class Builder:
    """Makes one `Config`, and notes who gave what (``sources``) and what disagrees (``warnings``)."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Note what disagrees."""
        self.warnings.append(text)

    def config(self, tree: Tree) -> Config:
        """The configuration that ``tree`` gives. Raises ConfigError with the place of the wrong value."""
        tiers = self._tiers(self._table(tree.get("tiers", {}), ("tiers",)))
        return self._section(Config, tree, (), tiers=tiers)

    def _tiers(self, tree: Tree) -> dict[str, TierOptions]:
        """The tiers by name, the host first."""
        found: dict[str, TierOptions] = {}
        for name in sorted(tree, key=lambda name: name != "host"):  # stable
            path = ("tiers", name)
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{_where(tree[name], path)}: expected a tier's name in small letters, got {shown(name)}"
                )
            table = self._table(tree[name], path)
            kind = self._kind(name, table)
            if (kind == "host") != (name == "host"):
                raise ConfigError(f"{_where(table, path)}: expected the host tier to be called host, and no other")
            if kind in BUILT_IN:
                found[name] = self._section(BUILT_IN[kind], table, path, kind=kind)
            else:
                shared = {key: table[key] for key in ("share_across_tp",) if key in table}
                more = {
                    key: self._plain(inner, (*path, key), guess=True)
                    for key, inner in table.items()
                    if key not in ("kind", *shared)
                }
                found[name] = self._section(OtherOptions, shared, path, kind=kind, more=more)
        return found if "host" in found else {"host": BUILT_IN["host"](kind="host"), **found}

    def _kind(self, name: str, table: Tree) -> str:
        path = ("tiers", name, "kind")
        given = table.get("kind")
        kind = name if given is None else str(self._leaf(path, given, fields(OtherOptions)["kind"]))
        kinds = [*BUILT_IN, *other_kinds()]
        if kind not in kinds:
            raise ConfigError(
                f"{_where(given or table, path[:2])}: expected a kind of tier, one of {', '.join(kinds)}, "
                f"got {shown(kind)}{did_you_mean(kind, kinds)}"
            )
        return kind

    def _section(self, section: type[_S], tree: Tree, path: tuple[str, ...], **made: Any) -> _S:
        """One section; ``made`` are fields that are read already."""
        hints = get_type_hints(section)
        values: dict[str, Any] = dict(made)
        tree = self._one_of(section, tree, path)
        known = {field.name: field for field in msgspec.structs.fields(section)}
        for key, inner in tree.items():
            if key not in known:
                raise self._unknown(key, inner, path, list(known))
        for key, inner in tree.items():
            if key in made:
                continue
            if key in fields(section):
                values[key] = self._leaf((*path, key), inner, fields(section)[key])
            else:
                values[key] = self._section(hints[key], self._table(inner, (*path, key)), (*path, key))
        for name, field in known.items():
            if field.required and name not in values:
                raise ConfigError(f"{_where(tree, path)}: expected {dotted((*path, name))}, which has no default")
        try:
            return section(**values)
        except FieldError as error:
            where = tree.get(error.path[0], tree)
            raise ConfigError(f"{_where(where, (*path, *error.path))}: {error.problem}") from error

    def _one_of(self, section: type[Section], tree: Tree, path: tuple[str, ...]) -> Tree:
        """Without what a source of higher rank says in another way."""
        for group in section.one_of:
            given = {
                name: leaf for name in group if isinstance(leaf := tree.get(name), Given) and leaf.value is not None
            }
            best = max(given.values(), key=lambda leaf: leaf.rank, default=None)
            for name, leaf in given.items():
                if best is not None and leaf.rank < best.rank:
                    self._read((*path, name), leaf, fields(section)[name])  # wrong it may not be
                    self.warn(f"{best.where} is taken, not {leaf.where}")
                    tree = {key: inner for key, inner in tree.items() if key != name}
        return tree

    def _leaf(self, path: tuple[str, ...], inner: Tree | Given, field: Field) -> Any:
        """The value of one field, and of everything that it takes precedence over."""
        if isinstance(inner, dict):
            plain = self._plain(inner, path)
            return self._read(path, Given(plain, "", _where(inner, path), 0), field)
        return self._taken(path, inner, lambda given: self._read(path, given, field))

    def _taken(self, path: tuple[str, ...], given: Given, reading: Callable[[Given], Any]) -> Any:
        """What is given, noted; a warning for all that it goes before and that disagrees."""
        value = reading(given)
        self.sources[".".join(path)] = given.source
        for other in given.over:
            if (was := reading(other)) != value:
                told = [shown(masked(path, one)) for one in (value, was)]
                self.warn(f"{given.where}: {told[0]} is taken, not {told[1]} of {other.where}")
        return value

    def _read(self, path: tuple[str, ...], given: Given, field: Field) -> Any:
        try:
            return read(path, given.value, field, text=given.text)
        except FieldError as error:
            raise ConfigError(f"{given.where}: {error.problem}") from error.__cause__

    def _plain(self, inner: Tree | Given, path: tuple[str, ...], *, guess: bool = False) -> Any:
        """Nested values as they were given. ``guess``: text of the environment is read as JSON where it is that."""
        if isinstance(inner, dict):
            return {key: self._plain(value, (*path, key), guess=guess) for key, value in inner.items()}
        return self._taken(path, inner, _guessed if guess else lambda given: given.value)

    def _table(self, inner: Tree | Given, path: tuple[str, ...]) -> Tree:
        """A section; one of which nothing is said is empty."""
        if isinstance(inner, dict):
            return inner
        if inner.value is None:
            return {}
        raise ConfigError(f"{inner.where}: expected a table of {path[-1]} settings, got {shown(inner.value)}")

    def _unknown(self, key: str, inner: Tree | Given, path: tuple[str, ...], known: list[str]) -> ConfigError:
        """An error that names the nearest key: of this section, or the same one in another place."""
        names = [*known, *(SHORTHANDS if not path else ())]
        elsewhere = [".".join(p) for p in _all_paths(Config, ()) if p[-1] == key and p[:-1] != path]
        is_variable = isinstance(inner, Given) and inner.text
        if is_variable:
            spell = {variable_of((*path, name)): name for name in names}
            assert isinstance(inner, Given)
            near = did_you_mean(inner.source, spell)
        else:
            near = did_you_mean(key, names)
        if key in elsewhere:  # the same word at the top: not what a misspelt one of this section would be
            near = f"; {key!r} is there for the whole configuration, not here"
        elif elsewhere and not near:
            near = f"; did you mean {elsewhere[0]!r}?"
        return ConfigError(f"{_where(inner, (*path, key))}: expected one of {', '.join(names)}, got {shown(key)}{near}")


def _guessed(given: Given) -> Any:
    if given.text:
        with suppress(ValueError, RecursionError):
            return json.loads(given.value)
    return given.value


def variable_of(path: tuple[str, ...]) -> str:
    """The environment variable of a field."""
    return PREFIX + "__".join(path).upper()


def _all_paths(section: type[Section], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every field of a section and of those in it."""
    found = [(*path, name) for name in fields(section)]
    for name, kind in get_type_hints(section).items():
        if isinstance(kind, type) and issubclass(kind, Section):
            found += _all_paths(kind, (*path, name))
    return found


def _where(inner: Tree | Given | None, path: tuple[str, ...]) -> str:
    """Where a value was given, as far as that is known: of a table, the file of its first value and the path."""
    if isinstance(inner, Given):
        return inner.where
    first: Tree | Given | None = inner
    while isinstance(first, dict) and first:
        first = next(iter(first.values()))
    name = dotted(path)
    if isinstance(first, Given):
        return f"{first.source}: {name}" if first.rank == 0 and name else first.source if first.rank else first.where
    return name or "configuration"
