"""The fields: what docs/configuration.md says of them, and what takes them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.config import Config, as_mapping, load_config
from kvtransfer.config_build import variable_of
from kvtransfer.config_check import fields
from kvtransfer.config_fields import DTYPE_ALIASES, DTYPE_BYTES, EVICTION_POLICIES, EvictionOptions, KVDtype
from kvtransfer.config_flexkv import RULES
from kvtransfer.config_pages import record_bytes
from kvtransfer.config_sources import SHORTHANDS
from kvtransfer.config_tiers import BUILT_IN, ENTRY_POINTS, DiskOptions, HostOptions, MemoryOptions, TierOptions
from kvtransfer.config_tools import _text
from kvtransfer.engine import DEFAULT_STAGING_BYTES, TransferEngine
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.plan import HOST_PATHS
from kvtransfer.predict import BUDGETS
from kvtransfer.tiers import registry
from kvtransfer.tiers.host import HostTier

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
# Given by whoever makes a tier, not by a configuration.
RUNTIME = {
    "self", "spec", "namespace", "owners", "place", "policy", "name", "observer", "storage", "clock", "device",
    "registrar", "limits", "store", "most_pages",
}  # fmt: skip
CLASSES = {
    "host": ("host", "HostTier"),
    "disk": ("disk", "DiskTier"),
    "memory": ("memory_tier", "MemoryTier"),
    "redis": ("redis", "RedisTier"),
    "mooncake": ("mooncake", "MooncakeTier"),
    "object_store": ("object_store", "ObjectStoreTier"),
}
SAMPLE: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"paths": ("/a",), "cache_gb": 1},
    "memory": {"cache_gb": 1},
    "redis": {"url": "redis://h"},
    "mooncake": {"master": "h:1", "hostname": "h"},
    "object_store": {"url": "s3://b"},
}


def rows(title: str) -> list[list[str]]:
    """The cells of all tables under headings that begin with ``title``."""
    parts = re.split(r"^#+ ", PAGE, flags=re.M)
    lines = [line for part in parts if part.startswith(title) for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def all_fields() -> dict[str, str]:
    """Every field by its path, with its default as the page gives it."""
    found: dict[str, str] = {}

    def add(section: Any, prefix: str) -> None:
        for name, field in fields(section).items():
            value = "required" if field.required else "none" if field.default is None else f"`{_text(field.default)}`"
            found[prefix + name] = value

    add(Config, "")
    for kind, options in BUILT_IN.items():
        add(options, f"tiers.{kind}.")
    for name in ("eviction", "write", "prefetch", "namespace"):
        add(type(getattr(Config(), name)), f"{name}.")
    return found


def documented() -> dict[str, str]:
    titles = ("Fields", *BUILT_IN, "Eviction", "Writing", "Prefetching", "Namespace")
    cells = [row for title in titles for row in rows(f"{title}\n" if title in BUILT_IN or title == "Fields" else title)]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names)
    assert all(len(row) == 3 and row[2] for row in cells)
    return {row[0].strip("`"): row[1] for row in cells}


def test_the_page_names_every_field_and_no_other_with_its_default() -> None:
    assert documented() == all_fields()


def test_no_section_is_left_out() -> None:
    """Every leaf of a full configuration is one of the fields that the page is compared with."""
    tiers: dict[str, TierOptions] = {kind: BUILT_IN[kind](kind=kind, **SAMPLE[kind]) for kind in BUILT_IN}
    known = all_fields()

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if ".".join(path) in known:
            return
        assert isinstance(value, dict) and value, path
        for key, inner in value.items():
            walk(inner, (*path, key))

    walk(as_mapping(Config(tiers=tiers), empty=True), ())


def test_the_page_names_the_short_forms() -> None:
    assert {row[0].strip("`"): row[1].strip("`") for row in rows("Short forms")} == {
        short: ".".join(path) for short, path in SHORTHANDS.items()
    }


def test_the_page_names_every_key_of_flexkv_and_what_becomes_of_it() -> None:
    known = all_fields()
    table = {row[0].strip("`"): row[1:] for row in rows("Coming from FlexKV")}
    assert set(table) == set(RULES)
    for key, rule in RULES.items():
        fate = "refused" if rule.refuse else f"`{rule.target}`" if rule.target else "not needed"
        assert table[key] == [fate, rule.why] if rule.why else table[key][0] == fate, key
        assert rule.why or rule.target, key
        assert not rule.target or rule.target in known or rule.target == "tiers.mooncake", key


def test_the_page_maps_keys_of_hicache_to_fields_that_exist() -> None:
    known = all_fields() | {"tiers": ""}
    table = rows("Coming from HiCache")
    assert len({row[0] for row in table}) == len(table) >= 20
    for row in table:
        assert row[1] == "not needed" or row[1].strip("`") in known, row
        assert all(name in known or name in ("kv_dtype", "file", "reserved") or "." not in name
                   for name in re.findall(r"`([a-z_.]+)`", " ".join(row[2:]))), row  # fmt: skip


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(code, {})
    assert capsys.readouterr().out == f"30.0 {16 << 30}\n"
    small, large = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    (tmp_path / "a.yaml").write_text(small)
    assert load_config(tmp_path / "a.yaml", environment={}).host.cache_gb == 16
    (tmp_path / "a.yaml").write_text(large)
    assert list(load_config(tmp_path / "a.yaml", environment={}).lower_tiers) == ["disk", "redis"]
    for name in re.findall(r"KVTRANSFER_[A-Z_]*[A-Z]", PAGE):
        path = tuple(name.removeprefix("KVTRANSFER_").lower().split("__"))
        assert ".".join(path) in all_fields() or path[-1] in ("nvtx", "timeline", "config"), name
        assert variable_of(path) == name


def test_the_kinds_are_those_of_the_registry() -> None:
    assert ENTRY_POINTS == registry.GROUP
    assert set(BUILT_IN) == {"host", *registry.BUILT_IN}
    for kind, (module, name) in CLASSES.items():
        assert kind == "host" or registry.BUILT_IN[kind][:2] == (f"kvtransfer.tiers.{module}", name)


def test_settings_make_tiers(tmp_path: Path) -> None:
    spec = KVSpec.attention(2, 4, 2, 8, 2)
    memory = registry.make_tier("memory", **MemoryOptions(cache_gb=0.5).settings())
    assert memory.stats().capacity_bytes == 1 << 29
    memory.close()
    options = DiskOptions(paths=(str(tmp_path / "a"), str(tmp_path / "b")), pages=7, engine="threads")
    for folder in options.paths:
        Path(folder).mkdir()
    disk: Any = registry.make_tier("disk", spec=spec, namespace=bytes(32), **options.settings())
    try:
        assert disk.stats().capacity_bytes == 7 * record_bytes(spec) and len(disk.folders) == 2
    finally:
        disk.close()


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_options_are_what_the_tier_takes(kind: str) -> None:
    """By name and by default: an argument that a tier gains or loses must show here."""
    module, name = CLASSES[kind]
    try:
        tier = getattr(import_module(f"kvtransfer.tiers.{module}"), name)
    except ImportError:
        pytest.skip(f"needs the client of {kind}")
    taken = inspect.signature(tier.__init__).parameters
    settings = BUILT_IN[kind](kind=kind, **SAMPLE[kind]).settings()
    assert set(settings) == set(taken) - RUNTIME
    for key, value in settings.items():
        default = taken[key].default
        if default is not inspect.Parameter.empty and key not in SAMPLE[kind]:
            if key in ("options", "client_options"):
                assert not value and not default
            elif key != "capacity_bytes" or "cache_gb" not in SAMPLE[kind]:
                assert value == default, key


def test_host_options_make_a_host_tier() -> None:
    spec = KVSpec.attention(2, 4, 2, 8, 2)
    options = HostOptions(ratio=2.0, pin=False)
    with HostTier(spec, **options.sized(100 * 8192)) as host:
        assert host.num_slots == 200  # a slot is 4,096 bytes, and its trailer as much
    with HostTier(spec, **HostOptions(pages=7, pin=False).settings()) as host:
        assert host.num_slots == 7


def test_engine_settings_are_what_the_engine_takes() -> None:
    taken = inspect.signature(TransferEngine.__init__).parameters
    for key, value in Config().engine_settings().items():
        assert taken[key].default == value, key
    assert Config().staging_bytes == DEFAULT_STAGING_BYTES
    for path in ("auto", *HOST_PATHS):
        assert Config(path=path).path == path  # type: ignore[arg-type]
    for budget in BUDGETS:
        assert Config(sm_budget=budget).sm_budget == budget  # type: ignore[arg-type]


def test_dtypes() -> None:
    import torch

    assert set(DTYPE_BYTES) == set(KVDtype.__args__) - {"auto"} == set(DTYPE_ALIASES.values())  # type: ignore[attr-defined]
    for name, size in DTYPE_BYTES.items():
        dtype = getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(name, name))
        assert dtype.itemsize == size
        assert DTYPE_ALIASES[str(dtype).removeprefix("torch.")] == name


def test_policies() -> None:
    for policy in EVICTION_POLICIES:
        assert EvictionOptions(policy=policy).policy == policy
