"""Where the values of a configuration come from, and what is said about wrong ones."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.config import (
    Config,
    ConfigWarning,
    Resolved,
    as_mapping,
    chosen_once,
    kv_dtype_of,
    load_config,
    resolve,
)
from kvtransfer.config_build import variable_of
from kvtransfer.config_check import FieldError
from kvtransfer.config_fields import EvictionOptions, NamespaceOptions, PrefetchOptions
from kvtransfer.config_sources import CONFIG_VARIABLE, OTHER_VARIABLES
from kvtransfer.config_tiers import DiskOptions, HostOptions, OtherOptions, RedisOptions
from kvtransfer.kernels.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def read(
    tmp_path: Path, text: str, *, name: str = "kv.yaml", environment: dict[str, str] | None = None, **arguments: Any
) -> Resolved:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return resolve(path, environment=environment or {}, arguments=arguments)


def error(tmp_path: Path, text: str, *, environment: dict[str, str] | None = None, **arguments: Any) -> str:
    """The message, without the folder."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environment=environment, **arguments)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_nothing_is_a_configuration() -> None:
    resolved = resolve(environment={})
    assert resolved.config == Config() and not resolved.sources and not resolved.warnings
    assert resolved.config.deadline_s == 30.0
    assert resolved.config.host == HostOptions() and not resolved.config.lower_tiers


@pytest.mark.parametrize(
    ("name", "text"),
    [("kv.yaml", "host_cache_gb: 16"), ("kv.toml", "host_cache_gb = 16"), ("kv.json", '{"host_cache_gb": 16}')],
)
def test_a_size_alone_is_a_file(name: str, text: str, tmp_path: Path) -> None:
    config = read(tmp_path, text, name=name).config
    assert config.host.settings()["capacity_bytes"] == 16 << 30
    assert config == Config(tiers={"host": HostOptions(cache_gb=16)})


def test_an_argument_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    text = "deadline_s: 1\nwrite: {policy: write_back, min_hits: 5}\nverify: false"
    environment = {"KVTRANSFER_DEADLINE_S": "2", "KVTRANSFER_WRITE__POLICY": "write_through_selective"}
    found = read(tmp_path, text, environment=environment, deadline_s=3)
    assert (found.config.deadline_s, found.config.write.policy) == (3.0, "write_through_selective")
    assert (found.config.write.min_hits, found.config.verify) == (5, False)
    file = str(tmp_path / "kv.yaml")
    assert found.sources == {
        "deadline_s": "argument",
        "write.policy": "KVTRANSFER_WRITE__POLICY",
        "write.min_hits": file,
        "verify": file,
    }
    assert [text.replace(file, "FILE") for text in found.warnings] == [
        "argument deadline_s: 3.0 is taken, not 2.0 of KVTRANSFER_DEADLINE_S",
        "argument deadline_s: 3.0 is taken, not 1.0 of FILE: deadline_s",
        "KVTRANSFER_WRITE__POLICY: 'write_through_selective' is taken, not 'write_back' of FILE: write.policy",
    ]


def test_what_agrees_does_not_warn(tmp_path: Path) -> None:
    found = read(tmp_path, "host_cache_gb: 16", environment={"KVTRANSFER_HOST_CACHE_GB": "16.0"}, host_cache_gb=16)
    assert not found.warnings


def test_a_short_form_and_the_long_one_that_disagree(tmp_path: Path) -> None:
    found = read(tmp_path, "host_cache_gb: 16\ntiers: {host: {cache_gb: 17}}")
    assert found.config.host.cache_gb == 17
    assert len(found.warnings) == 1 and "tiers.host.cache_gb: 17.0 is taken, not 16.0 of" in found.warnings[0]


def test_none_is_a_value_too(tmp_path: Path) -> None:
    found = read(tmp_path, "host_cache_gb: 16", host_cache_gb=None)
    assert found.config.host.cache_gb is None
    assert len(found.warnings) == 1 and "None is taken, not 16.0 of" in found.warnings[0]
    assert "deadline_s: expected a number" in error(tmp_path, "deadline_s:")


def test_options_of_a_client_that_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.config_build.other_kinds", lambda: ["shelf"])
    text = "tiers: {shelf: {boards: 3, colour: red}, object_store: {url: u, options: {region: x, secret_key: a}}}"
    environment = {
        "KVTRANSFER_TIERS__SHELF__BOARDS": "3",
        "KVTRANSFER_TIERS__SHELF__COLOUR": "blue",
        "KVTRANSFER_TIERS__OBJECT_STORE__OPTIONS__REGION": "y",
        "KVTRANSFER_TIERS__OBJECT_STORE__OPTIONS__SECRET_KEY": "b",
    }
    warned = sorted(text.split(" of ")[0] for text in read(tmp_path, text, environment=environment).warnings)
    assert warned == [
        "KVTRANSFER_TIERS__OBJECT_STORE__OPTIONS__REGION: 'y' is taken, not 'x'",
        "KVTRANSFER_TIERS__OBJECT_STORE__OPTIONS__SECRET_KEY: '***' is taken, not '***'",
        "KVTRANSFER_TIERS__SHELF__COLOUR: 'blue' is taken, not 'red'",
    ]


def test_a_size_said_in_another_way_by_who_goes_before(tmp_path: Path) -> None:
    found = read(tmp_path, "host_cache_gb: 16", environment={"KVTRANSFER_TIERS__HOST__PAGES": "100"})
    assert (found.config.host.pages, found.config.host.cache_gb) == (100, None)
    assert "KVTRANSFER_TIERS__HOST__PAGES is taken, not" in found.warnings[0]
    assert set(found.sources) == {"tiers.host.pages"}
    text = "tiers: {host: {cache_gb: 16, pages: 100}}"
    assert "expected at most one of cache_gb, pages, ratio, got cache_gb and pages" in error(tmp_path, text)


def test_warnings_are_issued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv.yaml").write_text("deadline_s: 4")
    with pytest.warns(ConfigWarning, match="not 4.0 of"):
        assert load_config(tmp_path / "kv.yaml", arguments={"deadline_s": 5}, environment={}).deadline_s == 5
    monkeypatch.setenv("KVTRANSFER_DEADLINE_S", "6")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config().deadline_s == 6


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    named, other = tmp_path / "named.yaml", tmp_path / "other.yaml"
    named.write_text("deadline_s: 4")
    other.write_text("deadline_s: 5")
    assert resolve(environment={CONFIG_VARIABLE: str(named)}).config.deadline_s == 4
    assert not resolve(named, environment={CONFIG_VARIABLE: str(named)}).warnings
    found = resolve(other, environment={CONFIG_VARIABLE: str(named)})
    assert found.config.deadline_s == 5
    assert found.warnings == (f"{other} is read, not {named}, which KVTRANSFER_CONFIG names",)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        (("verify",), "off", False),
        (("verify",), "1", True),
        (("deadline_s",), "2.5", 2.5),
        (("sm_budget",), "4", 4),
        (("sm_budget",), "decode", "decode"),
        (("share_across_tp",), "none", None),
        (("namespace", "salt"), "0123", "0123"),
        (("namespace", "salt"), " with spaces ", " with spaces "),
        (("tiers", "host", "huge_pages"), "reserved", "reserved"),
        (("tiers", "host", "huge_pages"), "false", False),
        (("tiers", "disk", "paths"), "/a; /b;", ["/a", "/b"]),
        (("tiers", "object_store", "options"), '{"region": "x", "deep": {"y": 1}}', {"region": "x", "deep": {"y": 1}}),
        (("prefetch", "timeout_per_ki_token_s"), "0", 0.0),
    ],
)
def test_environment_variables(path: tuple[str, ...], text: str, value: Any) -> None:
    tiers = {"disk": {"cache_gb": 1, "paths": "/a;/b"}, "object_store": {"url": "s3://b"}}
    if path == ("tiers", "disk", "paths"):
        tiers["disk"] = {"cache_gb": 1}
    found = resolve(environment={variable_of(path): text}, arguments={"tiers": tiers})
    plain: Any = as_mapping(found.config, empty=True)
    for key in path:
        plain = plain[key]
    assert plain == value and type(plain) is type(value)
    assert found.sources[".".join(path)] == variable_of(path)


def test_a_table_of_a_client_is_merged_key_by_key(tmp_path: Path) -> None:
    text = "tiers: {object_store: {url: 's3://b', options: {region: x, endpoint: y}}}"
    found = read(tmp_path, text, environment={"KVTRANSFER_TIERS__OBJECT_STORE__OPTIONS__REGION": "z"})
    assert found.config.tiers["object_store"].settings()["options"] == {"region": "z", "endpoint": "y"}


def test_an_empty_variable_and_those_of_others_are_passed_over() -> None:
    environment = {
        "KVTRANSFER_DEADLINE_S": " ",
        "KVTRANSFER_SERVICE_HOST": "10.0.0.1",
        "KVTRANSFER_SERVICE_PORT_HTTP": "80",
        "KVTRANSFER_PORT": "tcp://10.0.0.1:80",
        "KVTRANSFER_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVTRANSFER_NVTX": "1",
        "KVTRANSFER_TIMELINE": "x.json",
        "PATH": "/bin",
    }
    assert resolve(environment=environment).config == Config()


def test_every_variable_that_the_code_reads_is_known() -> None:
    """One that another module begins to read must not make a configuration fail."""
    found = set()
    for path in (*(ROOT / "kvtransfer").glob("*.py"), *(ROOT / "tiers").glob("*.py"), *(ROOT / "kernels").glob("*.py")):
        if not path.name.startswith("config"):
            found |= set(re.findall(r'"(KVTRANSFER_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    assert found == set(OTHER_VARIABLES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "tiers: {disk: {paths: /a, cache_gb: 1, share_across_tp: 2}}",
            "tiers.disk.share_across_tp: expected one of .*; 'share_across_tp' is there for the whole configuration",
        ),
        ("host_cachegb: 1", "kv.yaml: host_cachegb: expected one of enabled, .* did you mean 'host_cache_gb'"),
        ("policy: lru", "kv.yaml: policy: .* did you mean 'eviction.policy'"),
        ("prefetch: {stp: timeout}", "kv.yaml: prefetch.stp: expected one of stop, .* did you mean 'stop'"),
        ("prefetch: {stop: time_out}", "prefetch.stop: expected one of best_effort, .* did you mean 'timeout'"),
        ("prefetch: {min_tokens: -1}", "prefetch.min_tokens: expected a whole number of at least 0 .* got -1"),
        ("prefetch: 3", "kv.yaml: prefetch: expected a table of prefetch settings, got 3"),
        ("prefetch: {stop: {a: 1}}", "kv.yaml: prefetch.stop: expected one of .*, got {'a': 1}"),
        ("deadline_s: 0", "deadline_s: expected a number above 0 and at most 1,000,000, got 0"),
        ("deadline_s: .inf", "deadline_s: expected a number above 0"),
        ("deadline_s: .nan", "deadline_s: expected a number above 0"),
        ("deadline_s: '30'", "deadline_s: expected a number above 0 and at most 1,000,000, got '30'"),
        ("verify: 1", "verify: expected true or false, got 1"),
        ("sm_budget: prefil", "sm_budget: expected a whole number .* or one of decode, prefill, .*mean 'prefill'"),
        ("staging_bytes: 1.5", "staging_bytes: expected a whole number"),
        ("staging_bytes: true", "staging_bytes: expected a whole number"),
        ("tiers: {rediz: {url: x}}", "tiers.rediz: expected a kind of tier, one of host, .* did you mean 'redis'"),
        ("tiers: {near: {kind: redi, url: x}}", "tiers.near.kind: expected a kind of tier, .* did you mean 'redis'"),
        ("tiers: {near: {kind: redis, url: 3}}", "tiers.near.url: expected text, got 3"),
        ("tiers: {redis: {}}", "tiers.redis: expected tiers.redis.url, which has no default"),
        ("tiers: {disk: {paths: /a}}", "tiers.disk.cache_gb: expected a size: cache_gb or pages"),
        ("tiers: {disk: {cache_gb: 1, paths: ' ; '}}", "kv.yaml: tiers.disk.paths: expected at least one folder"),
        ("tiers: {disk: {cache_gb: 1, paths: /a;/a}}", "kv.yaml: tiers.disk.paths: expected folders that differ"),
        (
            "tiers: {disk: {cache_gb: 1, paths: /a}, far: {kind: disk, cache_gb: 1, paths: [/b, /a/]}}",
            "tiers.far.paths: expected folders of its own, got /a/ of disk",
        ),
        ("tiers: {mine: {kind: host}}", "tiers.mine: expected the host tier to be called host"),
        ("tiers: {host: {kind: disk, cache_gb: 1, paths: /a}}", "tiers.host: expected the host tier to be called host"),
        ("tiers: {'Big Disk': {kind: redis}}", "tiers.Big Disk: expected a tier's name in small letters"),
        ("eviction: {policy: lruu}", "eviction.policy: expected one of lru, lfu, .* did you mean 'lru'"),
        ("eviction: {low_watermark: 0.9, high_watermark: 0.8}", "low_watermark: expected at most high_watermark"),
        ("namespace: {salt: a, salt_file: b}", "namespace.salt_file: expected at most one of salt, salt_file"),
        ("instance: 3", "kv.yaml: instance: expected less than instances, 1, got 3"),
        ("a: 1\na: 2", "kv.yaml: expected YAML, got something else: the key 'a' is given twice"),
        ("write: {policy: write_back, policy: write_back}", "the key 'policy' is given twice"),
        ("a: &x [*x]", "anchors and aliases are not taken"),
        ("[1]", "kv.yaml: expected keys and values, got list"),
        ("just words", "kv.yaml: expected keys and values, got str"),
        ("{1: 2}", "kv.yaml: expected names as keys, got int '1'"),
        ("a: [", "kv.yaml: expected YAML, got something else"),
        ("--- 1\n--- 2", "kv.yaml: expected YAML, got something else"),
        ("namespace: {salt: \"\\uD800\"}", "namespace.salt: expected text or nothing, got "),
    ],
)  # fmt: skip
def test_wrong_values(text: str, says: str, tmp_path: Path) -> None:
    message = error(tmp_path, text)
    assert re.search(says, message), message
    assert "\n" not in message and len(message) < 800


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"KVTRANSFER_PREFETCH__STP": "x"}, "KVTRANSFER_PREFETCH__STP: .* did you mean 'KVTRANSFER_PREFETCH__STOP'"),
        ({"KVTRANSFER_HOST_CACHEGB": "1"}, "KVTRANSFER_HOST_CACHEGB: .* did you mean 'KVTRANSFER_HOST_CACHE_GB'"),
        ({"KVTRANSFER_VERIFY": "maybe"}, "KVTRANSFER_VERIFY: expected true or false, got 'maybe'"),
        ({"KVTRANSFER_DEADLINE_S": "nan"}, "KVTRANSFER_DEADLINE_S: expected a number above 0"),
        ({"KVTRANSFER_SM_BUDGET": "0"}, "KVTRANSFER_SM_BUDGET: expected a whole number of at least 1"),
        ({"KVTRANSFER_": "x"}, "KVTRANSFER_: expected one of enabled"),
        ({"KVTRANSFER_WRITE": "x"}, "KVTRANSFER_WRITE: expected a table of write settings, got 'x'"),
        ({"KVTRANSFER_WRITE": "x", "KVTRANSFER_WRITE__POLICY": "y"}, "one is a value, the other a table"),
        ({"KVTRANSFER_" + "A__" * 40: "x"}, "expected at most 16 levels"),
        ({"KVTRANSFER_CONFIG": "kv.ini"}, r"kv.ini: expected a name that ends in .yaml, .yml, .toml, .json, got .ini"),
        ({"KVTRANSFER_CONFIG": "no/such/file.yaml"}, "no/such/file.yaml: expected a readable file"),
    ],
)  # fmt: skip
def test_wrong_variables(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(environment=environment)


def test_a_wrong_value_that_another_goes_before_is_still_wrong(tmp_path: Path) -> None:
    assert "kv.yaml: deadline_s: expected a number" in error(tmp_path, "deadline_s: x", deadline_s=3)


def test_a_wrong_argument() -> None:
    with pytest.raises(ConfigError, match=r"argument write.policy: expected one of .*; did you mean 'write_back'"):
        resolve(arguments={"write": {"policy": "writeback"}}, environment={})
    deep: Any = {}
    deep["tiers"] = deep
    with pytest.raises(ConfigError, match="expected at most 16 levels"):
        resolve(arguments=deep, environment={})


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, text in (("a.json", "{,"), ("a.json", '{"a": 1, "a": 1}'), ("a.toml", "a ="), ("a.toml", "a = 1\na = 2")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"expected (JSON|TOML), got something else"):
            resolve(tmp_path / name, environment={})
    for name in ("a.json", "a.toml", "a.yaml"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="got something else"):
            resolve(tmp_path / name, environment={})
        (tmp_path / name).write_bytes(b"a" * ((1 << 20) + 1))
        with pytest.raises(ConfigError, match="expected at most 1048576 bytes"):
            resolve(tmp_path / name, environment={})
        (tmp_path / name).write_text('{"a":' * 30_000 if name != "a.toml" else "a=" + "[" * 30_000)
        with pytest.raises(ConfigError, match="expected at most 16 levels"):
            resolve(tmp_path / name, environment={})
    with pytest.raises(ConfigError, match="expected a readable file"):
        resolve(Path(str(tmp_path / "\0.yaml")), environment={})


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"verify": False}).encode())
    assert not resolve(tmp_path / "a.json", environment={}).config.verify


def test_sections_of_which_nothing_is_said(tmp_path: Path) -> None:
    assert read(tmp_path, "tiers:\nwrite:\nprefetch: {}").config == Config()
    assert read(tmp_path, "tiers: {host: }").config == Config()
    assert read(tmp_path, "write:", environment={"KVTRANSFER_WRITE__MIN_HITS": "3"}).config.write.min_hits == 3


def test_tiers_keep_their_order_with_the_host_first(tmp_path: Path) -> None:
    text = "tiers: {redis: {url: r}, far: {kind: redis, url: s}, host: {cache_gb: 1}, memory: {cache_gb: 1}}"
    config = read(tmp_path, text).config
    assert list(config.tiers) == ["host", "redis", "far", "memory"]
    assert list(config.lower_tiers) == ["redis", "far", "memory"]
    assert config.tiers["far"] == RedisOptions(url="s")


def test_a_tier_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.config_build.other_kinds", lambda: ["shelf"])
    text = "tiers: {shelf: {boards: 3}, low: {kind: shelf, deep: {x: [1, 2]}}}"
    environment = {"KVTRANSFER_TIERS__LOW__BOARDS": "4", "KVTRANSFER_TIERS__LOW__COLOUR": "red"}
    config = read(tmp_path, text, environment=environment).config
    assert config.tiers["shelf"] == OtherOptions(kind="shelf", more={"boards": 3})
    assert config.tiers["low"].settings() == {"deep": {"x": [1, 2]}, "boards": 4, "colour": "red"}
    assert resolve(arguments=as_mapping(config), environment={}).config == config


def test_entry_points_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point, as pip would install it."""
    info = tmp_path / "shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvtransfer.tiers]\nshelf = no_such_module:Shelf\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolve(arguments={"tiers": {"shelf": {"boards": 3}}}, environment={}).config
    assert config.tiers["shelf"] == OtherOptions(kind="shelf", more={"boards": 3})


def test_sections_made_in_python_are_checked_too() -> None:
    assert DiskOptions(paths=["/a"], cache_gb=1).paths == ("/a",)  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="stop: expected one of"):
        PrefetchOptions(stop="never")  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="policy: expected one of"):
        EvictionOptions(policy="lru; import os")
    assert EvictionOptions(policy="my_package.policies:Mine").policy == "my_package.policies:Mine"
    with pytest.raises(FieldError, match="deadline_s: expected a number"):
        Config(deadline_s=0)


def test_the_prefetch_formula() -> None:
    assert PrefetchOptions().timeout_s(0) == 1.0
    assert PrefetchOptions().timeout_s(4096) == 2.0
    assert PrefetchOptions(timeout_base_s=0.5, timeout_per_ki_token_s=2).timeout_s(512) == 1.5


def test_salts(tmp_path: Path) -> None:
    assert NamespaceOptions().salt_bytes() == b""
    assert NamespaceOptions(salt="gr\u00fcn").salt_bytes() == "gr\u00fcn".encode()
    secret = os.urandom(30) + b"x"
    (tmp_path / "salt").write_bytes(secret + b"\n")
    assert NamespaceOptions(salt_file=str(tmp_path / "salt")).salt_bytes() == secret
    (tmp_path / "salt").write_bytes(b"\r\n")
    with pytest.raises(ConfigError, match=r"namespace.salt_file: expected a salt, got the empty file"):
        NamespaceOptions(salt_file=str(tmp_path / "salt")).salt_bytes()
    with pytest.raises(ConfigError, match=r"namespace.salt_file: expected a readable file"):
        NamespaceOptions(salt_file=str(tmp_path / "none")).salt_bytes()


def test_secrets_are_not_told(tmp_path: Path) -> None:
    found = read(tmp_path, "namespace: {salt: hidden}", namespace={"salt": "covert"})
    assert "'***' is taken, not '***'" in found.warnings[0]
    text = "tiers: {redis: {url: 'redis://me:hidden@h'}}"
    found = read(tmp_path, text, tiers={"redis": {"url": "redis://me:covert@h"}})
    assert "hidden" not in found.warnings[0] and "covert" not in found.warnings[0]
    assert "4711" not in error(tmp_path, "namespace: {salt: 4711}")


def test_the_dtype_where_the_engine_says_auto() -> None:
    config = Config(kv_dtype="float8_e4m3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv_dtype_of(config, "auto") == kv_dtype_of(config, None) == "float8_e4m3"
        assert kv_dtype_of(config, "fp8") == kv_dtype_of(config, "torch.float8_e4m3fn") == "float8_e4m3"
        assert kv_dtype_of(Config(), "torch.bfloat16") == "bfloat16"
        assert kv_dtype_of(Config(), "nvfp4") == "nvfp4"
    with pytest.warns(ConfigWarning, match="float8_e4m3 is configured, the engine's bfloat16 is taken"):
        assert kv_dtype_of(config, "bf16") == "bfloat16"
    with pytest.raises(ConfigError, match="expected a dtype where the engine says auto, got auto; set kv_dtype"):
        kv_dtype_of(Config(), "auto")


def test_kvtransfer_chosen_twice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen_once({"--radix-cache-backend": False, "--linker": False}) is None
        assert chosen_once({"--radix-cache-backend": False, "--linker": True}) == "--linker"
    with pytest.warns(ConfigWarning, match="chosen 2 times, by --a, --b: --a has its way"):
        assert chosen_once({"--a": True, "--b": True}) == "--a"
