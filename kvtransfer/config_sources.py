"""Where a configuration comes from: a file, the environment, arguments; as trees of values that remember it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kvtransfer.config_check import dotted
from kvtransfer.kernels.errors import ConfigError

PREFIX = "KVTRANSFER_"
CONFIG_VARIABLE = "KVTRANSFER_CONFIG"
OTHER_VARIABLES = ("KVTRANSFER_NVTX", "KVTRANSFER_TIMELINE")
"""Variables that other modules read: see docs/profiling.md."""
# What Kubernetes sets in every container for a service of the name "kvtransfer".
_SERVICE_LINK = re.compile(
    r"KVTRANSFER_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.A
)
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 16

# Short ways to say what most people say.
SHORTHANDS: Mapping[str, tuple[str, ...]] = {
    "host_cache_gb": ("tiers", "host", "cache_gb"),
    "disk_cache_gb": ("tiers", "disk", "cache_gb"),
    "disk_cache_dir": ("tiers", "disk", "paths"),
}


@dataclass(frozen=True)
class Given:
    """One value as somebody gave it.

    source  who gave it, in a word: the file, the variable, "argument"
    where   where exactly, for messages: "kv.yaml: write.policy", "KVTRANSFER_WRITE__POLICY"
    rank    which wins: argument over environment over file
    text    it is text that has yet to be read as what the field takes
    over    what it takes precedence over, the next one first
    """

    value: Any
    source: str
    where: str
    rank: int
    text: bool = False
    over: tuple[Given, ...] = field(default=(), compare=False)


Tree = dict[str, "Tree | Given"]


def from_file(path: Path) -> Tree:
    """The tree of a YAML, TOML or JSON file; the ending of its name says which. An empty one is an empty tree.

    Raises ConfigError: it can't be read, it is larger than 1 MiB, it is not what its name says, a key is given twice.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": read_yaml, ".yml": read_yaml, ".toml": tomllib.loads, ".json": read_json,
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: expected a name that ends in {', '.join(readers)}, got {path.suffix or 'no ending'}"
        )
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a readable file, got {_line(error)}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: expected at most {_MOST_BYTES} bytes, got more")
    try:
        found = reader(data.decode("utf-8-sig"))
    except RecursionError as error:
        raise ConfigError(f"{path}: expected at most {_MOST_DEPTH} levels, got more") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: expected {path.suffix[1:].upper()}, got something else: {_line(error)}") from error
    return from_mapping({} if found is None else found, str(path), 0, f"{path}: ")


def from_arguments(arguments: Mapping[str, Any]) -> Tree:
    """The tree of a caller's nested mapping."""
    return from_mapping(arguments, "argument", 2, "argument ")


def from_environment(environment: Mapping[str, str]) -> Tree:
    """The tree of the variables ``KVTRANSFER_*``: ``__`` goes one level down. An empty variable is none.

    Raises ConfigError for two variables of which one lies inside the other.
    """
    tree: Tree = {}
    for variable in sorted(environment):
        text = environment[variable]
        skipped = variable == CONFIG_VARIABLE or variable in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(variable)
        if not variable.startswith(PREFIX) or skipped or not text.strip():
            continue
        name = dotted([variable])
        path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        if len(path) > _MOST_DEPTH:
            raise ConfigError(f"{name}: expected at most {_MOST_DEPTH} levels, got {len(path)}")
        tree = merge(tree, _placed(path, Given(text, name, name, 1, text=True)))
    return _spelled_out(tree)


def from_mapping(found: Any, source: str, rank: int, where: str) -> Tree:
    """The tree of nested mappings. Raises ConfigError where a key is no name, or it is nested too deep."""

    def grow(value: Any, path: tuple[str, ...]) -> Tree | Given:
        place = f"{where}{dotted(path)}"
        if not isinstance(value, Mapping):
            return Given(value, source, place, rank)
        if len(path) > _MOST_DEPTH:
            raise ConfigError(f"{place}: expected at most {_MOST_DEPTH} levels, got more")
        for key in value:
            if not isinstance(key, str):
                got = f"{type(key).__name__} {str(key)[:40]!r}"
                raise ConfigError(f"{place if path else source}: expected names as keys, got {got}")
        return {key: grow(inner, (*path, key)) for key, inner in value.items()}

    tree = grow(found, ())
    if isinstance(tree, Given):
        raise ConfigError(f"{source}: expected keys and values, got {type(found).__name__}")
    return _spelled_out(tree)


def merge(low: Tree, high: Tree) -> Tree:
    """Both, leaf by leaf; where both have a leaf ``high`` has its way, and keeps the other in ``over``."""
    tree = dict(low)
    for key, new in high.items():
        old = tree.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            tree[key] = merge(old, new)
        elif isinstance(old, Given) and isinstance(new, Given):
            tree[key] = replace(new, over=(*new.over, old, *old.over))
        elif isinstance(new, Given) and new.value is None and isinstance(old, dict):
            pass  # a section of which nothing is said
        elif old is None or (isinstance(old, Given) and old.value is None):
            tree[key] = new
        else:
            ours, theirs = next(_leaves(new), None), next(_leaves(old), None)
            if ours is not None and theirs is not None:
                raise ConfigError(f"{ours.where}: {theirs.where} is given too: one is a value, the other a table")
            tree[key] = new
    return tree


def read_yaml(text: str) -> Any:
    """YAML of one document, without anchors and tags; a key given twice raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_json(text: str) -> Any:
    """JSON; a key given twice raises ValueError."""

    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise ValueError(f"the key {key!r} is given twice")
            table[key] = value
        return table

    return json.loads(text, object_pairs_hook=once)


class _Loader(yaml.SafeLoader):
    """Refuses what a configuration doesn't need and an attacker likes, and keys given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"anchors and aliases are not taken (line {self.line + 1})")
        loader: Any = self
        if getattr(loader.peek_event(), "tag", None) is not None:  # PyYAML's errors for bad ones are of all kinds
            raise yaml.YAMLError(f"tags are not taken (line {self.line + 1})")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value!r} is given twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _spelled_out(tree: Tree) -> Tree:
    """Shorthands put where they belong. What is given in full goes before its shorthand of the same source."""
    for short, path in SHORTHANDS.items():
        value = tree.get(short)
        if isinstance(value, Given):
            tree = {key: inner for key, inner in tree.items() if key != short}
            tree = merge(_placed(path, value), tree)
    return tree


def _placed(path: tuple[str, ...], leaf: Given) -> Tree:
    tree: Tree | Given = leaf
    for key in reversed(path):
        tree = {key: tree}
    assert isinstance(tree, dict)
    return tree


def _leaves(tree: Tree | Given) -> Iterator[Given]:
    if isinstance(tree, Given):
        yield tree
    else:
        for inner in tree.values():
            yield from _leaves(inner)


def _line(error: BaseException) -> str:
    """What a parser says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
