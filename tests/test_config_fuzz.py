"""Whatever is given: a valid configuration, or a ConfigError. And what was read comes back from all three formats."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from kvtransfer.config import Config, as_mapping, resolve
from kvtransfer.config_build import variable_of
from kvtransfer.config_check import Section, fields, read
from kvtransfer.config_convert import convert_flexkv
from kvtransfer.config_flexkv import RULES
from kvtransfer.config_tiers import BUILT_IN
from kvtransfer.kernels.errors import ConfigError

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
FEW = settings(QUICK, max_examples=15)
SECTIONS = ("eviction", "write", "prefetch", "namespace")
WORDS = st.text(string.printable.replace("\x0b", "").replace("\x0c", "").replace("\r", "") + "äß漢🜚", max_size=12)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    WORDS,
    st.sampled_from([0, 1, -1, 10**30, "none", "/a;/b", "16"]),
)
ALL = (Config, *BUILT_IN.values(), *(type(getattr(Config(), name)) for name in SECTIONS))
NAMES = sorted(
    {name for section in ALL for name in fields(section)}
    | {"host_cache_gb", "disk_cache_gb", "disk_cache_dir", "tiers", *SECTIONS, *BUILT_IN, "kind", "near"}
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(NAMES), WORDS)
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=5), st.lists(inner, max_size=3)),
    max_leaves=12,
)


def valid(kinds: tuple[inspect.Type, ...]) -> st.SearchStrategy[Any]:
    """Values that a field takes."""
    made: list[st.SearchStrategy[Any]] = []
    for kind in kinds:
        if isinstance(kind, inspect.IntType):
            made.append(st.integers(kind.ge or 0, kind.le))
        elif isinstance(kind, inspect.FloatType):
            low = kind.ge if kind.ge is not None else kind.gt
            made.append(st.floats(low, kind.le, exclude_min=kind.gt is not None).map(float))
        elif isinstance(kind, inspect.LiteralType):
            made.append(st.sampled_from(kind.values))
        elif isinstance(kind, inspect.BoolType):
            made.append(st.booleans())
        elif isinstance(kind, inspect.NoneType):
            made.append(st.none())
        elif isinstance(kind, inspect.VarTupleType):
            made.append(st.lists(st.sampled_from(["/a", "/b b", "c", "/ä"]), min_size=1, unique=True).map(tuple))
        elif isinstance(kind, inspect.DictType):
            made.append(st.dictionaries(WORDS, st.one_of(WORDS, st.integers(-5, 5), st.booleans()), max_size=3))
        else:
            made.append(WORDS)
    return st.one_of(made)


@st.composite
def sections(draw: st.DrawFn, /, section: type[Section], **fixed: Any) -> Section:
    """A valid section of some of its fields."""
    values = dict(fixed)
    one_of = {name for group in section.one_of for name in group}
    chosen = {draw(st.sampled_from(group)) for group in section.one_of}
    for name, field in fields(section).items():
        given_up = name in one_of and name not in chosen
        if name not in values and not given_up and (field.required or name in chosen or draw(st.booleans())):
            value = draw(valid(field.kinds))
            values[name] = value if value is not None or not field.required else "x"
    if section is BUILT_IN["disk"] and not any(values.get(name) for name in ("cache_gb", "pages")):
        values["pages"] = 1
    if "low_watermark" in fields(section):
        values.pop("policy", None)
        low, high = values.get("low_watermark"), values.get("high_watermark", 1.0)
        values["low_watermark"] = None if low is None else min(low, high)
    return section(**values)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration."""
    tiers = {"host": draw(sections(BUILT_IN["host"]))}
    for kind in draw(st.lists(st.sampled_from([k for k in BUILT_IN if k != "host"]), unique=True)):
        tiers[draw(st.sampled_from([kind, f"{kind}_2"]))] = draw(sections(BUILT_IN[kind], kind=kind))
    parts = {name: draw(sections(type(getattr(Config(), name)))) for name in SECTIONS}
    plain = draw(sections(Config, tiers=tiers, instance=0, **parts))
    assert isinstance(plain, Config)
    return plain


@FEW
@given(config=configs())
def test_round_trips(config: Config, tmp_path: Path) -> None:
    plain = as_mapping(config)
    for name, text in (
        ("a.json", json.dumps(plain)),
        ("a.yaml", yaml.safe_dump(plain, allow_unicode=True, sort_keys=False)),
        ("a.toml", tomli_w.dumps(plain)),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = resolve(tmp_path / name, environment={})
        assert found.config == config, name
        assert list(found.config.tiers) == list(config.tiers), name
        assert not found.warnings
    assert resolve(arguments=plain, environment={}).config == config


@FEW
@given(config=configs())
def test_round_trips_through_the_environment(config: Config) -> None:
    """Every value that is no empty text can be said by a variable."""
    environment: dict[str, str] = {}

    def walk(value: Any, path: tuple[str, ...], section: Any) -> None:
        if path[-1:] in (("options",), ("client_options",)):
            environment[variable_of(path)] = json.dumps(value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, (*path, key), section)
        elif isinstance(value, list):
            environment[variable_of(path)] = ";".join(value)
        else:
            environment[variable_of(path)] = str(value)

    walk(as_mapping(config), (), Config)
    environment = {name: text for name, text in environment.items() if text.strip()}
    arguments: dict[str, Any] = {"tiers": {}}
    for name, options in config.tiers.items():  # texts that only blanks make up, or that say none, need a file
        arguments["tiers"][name] = {
            key: value for key, value in msgspec.to_builtins(options).items()
            if isinstance(value, str) and (not value.strip() or value.strip().lower() in ("none", "null"))
        }  # fmt: skip
    for section in (*SECTIONS, None):
        holder: Section = config if section is None else getattr(config, section)
        for key in fields(type(holder)):
            value = getattr(holder, key)
            if isinstance(value, str) and (not value.strip() or value.strip().lower() in ("none", "null")):
                (arguments if section is None else arguments.setdefault(section, {}))[key] = value
    for path in list(environment):
        if environment[path].strip().lower() in ("none", "null"):
            del environment[path]
    assert resolve(environment=environment, arguments=arguments).config == config


@QUICK
@given(tree=TREES)
@example(tree={"tiers": {"host": {"cache_gb": 10**400}}})
@example(tree={"tiers": {"object_store": {"url": "x", "options": {"a": {"b": [None]}}}}})
@example(tree={"deadline_s": "\ud800"})
@example(tree={"\ud800": 1})
def test_any_arguments(tree: Any) -> None:
    try:
        resolved = resolve(arguments=tree if isinstance(tree, dict) else {"tiers": tree}, environment={})
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert resolve(arguments=as_mapping(resolved.config), environment={}).config == resolved.config


@QUICK
@given(tree=st.dictionaries(st.sampled_from(NAMES), TREES, max_size=4), suffix=st.sampled_from([".yaml", ".json"]))
def test_any_tree_in_a_file(tree: Any, suffix: str, tmp_path: Path) -> None:
    text = json.dumps(tree) if suffix == ".json" else yaml.safe_dump(tree)
    (tmp_path / f"a{suffix}").write_text(text)
    try:
        resolve(tmp_path / f"a{suffix}", environment={})
    except ConfigError:
        pass


@QUICK
@given(data=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode(errors="replace"))),
       suffix=st.sampled_from([".yaml", ".json", ".toml"]))  # fmt: skip
@example(data=b"a: 2001-99-99", suffix=".yaml")
@example(data=b"a: !!binary x", suffix=".yaml")
@example(data=b"? [a]\n: b", suffix=".yaml")
@example(data=b"? {a: b}\n: b", suffix=".yaml")
@example(data=b"<<: 3", suffix=".yaml")
@example(data=b"a: =", suffix=".yaml")
@example(data=b"a: !!int x", suffix=".yaml")
@example(data=b"a: !!int ''", suffix=".yaml")
@example(data=b"a: !!float _", suffix=".yaml")
@example(data=b"a: !!bool z", suffix=".yaml")
@example(data=b"a: !!timestamp z", suffix=".yaml")
@example(data=b"a: 0b_", suffix=".yaml")
@example(data=b"deadline_s: 2001-01-01", suffix=".yaml")
@example(data=b"deadline_s: 1" + b"0" * 5000, suffix=".yaml")
@example(data=b'{"deadline_s": 1' + b"0" * 5000 + b"}", suffix=".json")
@example(data=b'{"deadline_s": NaN}', suffix=".json")
@example(data=b"deadline_s = 1979-05-27T07:32:00Z", suffix=".toml")
@example(data=b"deadline_s = inf", suffix=".toml")
def test_any_bytes_in_a_file(data: bytes, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_bytes(data)
    try:
        resolve(tmp_path / f"a{suffix}", environment={})
    except ConfigError as error:
        assert "\n" not in str(error)


@QUICK
@given(
    environment=st.dictionaries(
        st.lists(st.sampled_from([*NAMES, "x"]), min_size=1, max_size=4).map(lambda path: variable_of(tuple(path))),
        st.one_of(WORDS, st.sampled_from(["1", "0.5", "{}", "[", '{"a":1}', "none"])),
        max_size=5,
    )
)
def test_any_variables(environment: dict[str, str]) -> None:
    try:
        resolve(environment=environment)
    except ConfigError as error:
        assert "KVTRANSFER_" in str(error) or "expected" in str(error)


@QUICK
@given(keys=st.dictionaries(st.sampled_from(sorted(RULES)), TREES, max_size=6), ranks=st.integers(1, 9))
@example(keys={"cpu_cache_gb": "16", "ssd_cache_gb": 5}, ranks=2)
@example(keys={"mooncake_store_config_path": "\0", "use_mooncake_store_backend": True}, ranks=1)
def test_any_values_of_flexkv(keys: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    (tmp_path / "flexkv.json").write_text(json.dumps(keys))
    try:
        converted = convert_flexkv(tmp_path / "flexkv.json", ranks=ranks)
    except ConfigError:
        return
    (tmp_path / "ours.yaml").write_text(converted.yaml())
    assert resolve(tmp_path / "ours.yaml", environment={}).config
    assert [outcome.key for outcome in converted.outcomes] == list(keys)


@QUICK
@given(data=st.data())
def test_any_value_in_any_field(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(ALL))
    name, field = data.draw(st.sampled_from(sorted(fields(section).items())))
    value, text = data.draw(TREES), data.draw(st.booleans())
    try:
        found = read((name,), value, field, text=text)
    except ConfigError as error:
        assert str(error).startswith(f"{name}: expected ")
    else:
        assert read((name,), found, field) == found


def test_the_strategies_reach_every_field() -> None:
    """A fuzz that never makes a field's value says nothing of it."""
    for section in ALL:
        for name, field in fields(section).items():
            assert not valid(field.kinds).is_empty, name
    with pytest.raises(ConfigError):
        resolve(arguments={"no_such": 1}, environment={})
