"""`kvtransfer config convert`: what becomes of each key of FlexKV's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtransfer.config import Config, resolve
from kvtransfer.config_convert import Converted, convert_flexkv
from kvtransfer.config_flexkv import RULES, mooncake_options
from kvtransfer.config_tiers import DiskOptions, HostOptions, MooncakeOptions
from kvtransfer.kernels.errors import ConfigError

HOST = {"tiers": {"host": {"cache_gb": 16}}}
# FlexKV's UserConfig and the names that its environment gives, as its config.py of August 2026 lists them.
FLEXKV_KEYS = (Path(__file__).parent / "data" / "flexkv_keys.txt").read_text().split()
# A value of each kind for which a key asks for something.
ASKS: dict[str, Any] = {
    "enable_cpu": False,
    "hugepage_size_bytes": 1 << 30,
    "radix_world_size": 2,
    "hit_reward_seconds": 10,
    "nvcomp_batch_size": 8,
    "iouring_flags": 2,
    "ioring_flags": 2,
    **{key: "LAYERFIRST" for key in RULES if key.endswith(("_layout", "_layout_type"))},
}


def convert(tmp_path: Path, keys: dict[str, Any], **options: int) -> Converted:
    path = tmp_path / "flexkv.yaml"
    path.write_text(yaml.safe_dump(keys))
    return convert_flexkv(path, **options)


def ours(converted: Converted, tmp_path: Path) -> Config:
    """The configuration that the written file gives."""
    (tmp_path / "ours.yaml").write_text(converted.yaml(), encoding="utf-8")
    return resolve(tmp_path / "ours.yaml", environment={}).config


def fate(tmp_path: Path, **keys: Any) -> list[str]:
    return [outcome.fate for outcome in convert(tmp_path, keys).outcomes]


def test_every_key_has_a_rule() -> None:
    assert len(FLEXKV_KEYS) > 100 and set(FLEXKV_KEYS) <= set(RULES)


def test_the_file_that_its_guide_shows(tmp_path: Path) -> None:
    keys = {"cpu_cache_gb": 32, "ssd_cache_gb": 1024, "ssd_cache_dir": "/data0/f/;/data1/f/", "enable_gds": False}
    converted = convert(tmp_path, keys)
    assert not converted.refused
    assert ours(converted, tmp_path) == Config(
        tiers={"host": HostOptions(cache_gb=32), "disk": DiskOptions(cache_gb=1024, paths=("/data0/f/", "/data1/f/"))}
    )


def test_ranks_share_the_host_but_not_the_disk(tmp_path: Path) -> None:
    keys = {"cpu_cache_gb": 100, "ssd_cache_gb": 1024, "ssd_cache_dir": "/a"}
    config = ours(convert(tmp_path, keys, ranks=8), tmp_path)
    assert config.host.cache_gb == 12.5
    assert config.tiers["disk"].settings()["capacity_bytes"] == 1024 << 30
    with pytest.raises(ConfigError, match="ranks: expected at least 1, got 0"):
        convert(tmp_path, keys, ranks=0)


def test_an_empty_file_has_its_default_size(tmp_path: Path) -> None:
    assert convert(tmp_path, {}).config == HOST
    assert convert(tmp_path, {}, ranks=4).config == {"tiers": {"host": {"cache_gb": 4}}}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"cpu_cache_gb": "24"}, {"tiers": {"host": {"cache_gb": 24}}}),
        ({"FLEXKV_CPU_CACHE_GB": 24}, {"tiers": {"host": {"cache_gb": 24}}}),
        ({"num_cpu_blocks": 1000}, {"tiers": {"host": {"pages": 1000}}}),
        ({"num_cpu_blocks": 1000, "cpu_cache_gb": 1}, {"tiers": {"host": {"cache_gb": 1}}}),
        ({"ssd_cache_gb": 0, "ssd_cache_dir": "/a", "max_file_size_gb": 3}, HOST),
        ({"ssd_cache_gb": 5}, {"tiers": {"host": {"cache_gb": 16}, "disk": {"cache_gb": 5, "paths": "./flexkv_ssd"}}}),
        (
            {"ssd_cache_gb": 5, "ssd_cache_dir": ["/a", "/b"], "max_file_size_gb": 0.5, "iouring_entries": 0},
            {"tiers": {"disk": {"cache_gb": 5, "paths": ["/a", "/b"], "file_gb": 0.5, "engine": "threads"}}},
        ),
        (
            {"ssd_cache_gb": 5, "ssd_cache_dir": "/a", "max_file_size_gb": -1, "iouring_entries": 512},
            {"tiers": {"disk": {"cache_gb": 5, "paths": "/a"}}},
        ),
        ({"iouring_entries": 0}, HOST),
        ({"enable_flexkv": 0}, {"enabled": False}),
        ({"kv_cache_dtype": "E4M3"}, {"kv_dtype": "float8_e4m3"}),
        ({"kv_cache_dtype": "auto"}, {"kv_dtype": "auto"}),
        ({"instance_num": 2, "instance_id": 1}, {"instances": 2, "instance": 1}),
        ({"eviction_policy": "SLRU"}, {"eviction": {"policy": "slru"}}),
        ({"slru_protected_threshold": 3}, {"eviction": {"slru_protected_hits": 3}}),
        ({"evict_start_threshold": 0.7}, {"eviction": {"high_watermark": 0.7}}),
        ({"evict_ratio": 0.05}, {"eviction": {"low_watermark": 0.95}}),
        (
            {"evict_ratio": 0.05, "evict_start_threshold": 0.7},
            {"eviction": {"high_watermark": 0.7, "low_watermark": 0.65}},
        ),
        ({"transfer_num_cta_h2d": 4, "transfer_num_cta_d2h": 8}, {"sm_budget": 8}),
        ({"transfer_sms_h2d": 8, "transfer_sms_d2h": 4}, {"sm_budget": 8}),
        ({"enable_layerwise_transfer": "1"}, {"layerwise": True}),
        ({"use_hugepage_cpu_buffer": True}, {"tiers": {"host": {"huge_pages": "reserved"}}}),
        ({"use_hugepage_cpu_buffer": False}, HOST),
        ({"cudahost_chunk_size_gb": 8}, {"tiers": {"host": {"chunk_gb": 8}}}),
        ({"cudahost_chunk_size_gb": 0}, HOST),
        (
            {"cache_config": {"enable_ssd": True, "num_cpu_blocks": 10, "num_ssd_blocks": 20, "ssd_cache_dir": "/a"}},
            {"tiers": {"host": {"pages": 10}, "disk": {"pages": 20, "paths": "/a"}}},
        ),
        ({"cache_config": {"enable_ssd": False, "num_ssd_blocks": 20, "ssd_cache_dir": "/a"}}, HOST),
    ],
)  # fmt: skip
def test_what_is_mapped(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    converted = convert(tmp_path, keys)
    assert not converted.refused
    whole = json.loads(json.dumps(expected))
    host = whole.setdefault("tiers", {}).setdefault("host", {})
    if not {"cache_gb", "pages"} & set(host):
        host["cache_gb"] = 16
    assert converted.config == whole
    assert ours(converted, tmp_path) == resolve(arguments=whole, environment={}).config


@pytest.mark.parametrize("key", sorted(key for key, rule in RULES.items() if rule.refuse))
def test_what_is_refused(key: str, tmp_path: Path) -> None:
    converted = convert(tmp_path, {key: ASKS.get(key, True)})
    assert [(outcome.key, outcome.text) for outcome in converted.refused] == [(key, RULES[key].why)]
    assert converted.yaml().startswith(f"# refused: {key}: ")
    assert ours(converted, tmp_path) == Config(tiers={"host": HostOptions(cache_gb=16)})
    for off in RULES[key].off:
        if off is None or RULES[key].reads != "number" or not isinstance(off, bool):
            assert fate(tmp_path, **{key: off}) == ["not needed"], off


@pytest.mark.parametrize("key", sorted(key for key, rule in RULES.items() if not rule.refuse and not rule.target))
def test_what_is_not_needed(key: str, tmp_path: Path) -> None:
    for value in (1, "x", [1], {"a": 1}):
        converted = convert(tmp_path, {key: value}) if RULES[key].reads == "text" else convert(tmp_path, {key: True})
        assert [(outcome.fate, outcome.text) for outcome in converted.outcomes] == [("not needed", RULES[key].why)]
        assert converted.config == HOST


@pytest.mark.parametrize("key", sorted(key for key, rule in RULES.items() if rule.target))
def test_nothing_said_changes_nothing(key: str, tmp_path: Path) -> None:
    converted = convert(tmp_path, {key: None})
    assert converted.config == HOST and [outcome.fate for outcome in converted.outcomes] == ["not needed"]


@pytest.mark.parametrize(
    "keys",
    [
        {"kv_cache_dtype": "nvfp4"},
        {"eviction_policy": "mru"},
        {"eviction_policy": "FILO"},
        {"evict_ratio": 1.0},
        {"evict_ratio": -0.1},
        {"evict_ratio": 0.8, "evict_start_threshold": 0.7},
        {"use_mooncake_store_backend": True},
        {"use_mooncake_store_backend": True, "mooncake_store_config_path": "/no/such/file"},
    ],
)
def test_values_that_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    assert len(convert(tmp_path, keys).refused) == 1


def test_a_key_that_flexkv_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu_cache_gbs: expected a key of FlexKV.*did you mean 'cpu_cache_gb'"):
        convert(tmp_path, {"cpu_cache_gbs": 1})
    with pytest.raises(ConfigError, match="index_accel: expected it once, got it twice"):
        convert(tmp_path, {"index_accel": 1, "FLEXKV_INDEX_ACCEL": 0})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"cpu_cache_gb": "many"}, "flexkv.yaml: cpu_cache_gb: expected a number, got 'many'"),
        (
            {"cpu_cache_gb": -3},
            "no valid configuration: argument tiers.host.cache_gb: expected a number above 0 .* got -3",
        ),
        ({"cpu_cache_gb": float("inf")}, "cpu_cache_gb: expected a number, got inf"),
        ({"enable_gds": "perhaps"}, "enable_gds: expected true or false, got 'perhaps'"),
        ({"instance_id": 3}, "instance: expected less than instances"),
        ({"transfer_num_cta_h2d": 1.5}, "sm_budget: expected a whole number"),
        ({"eviction_policy": "random"}, "eviction.policy: expected one of"),
    ],
)
def test_values_that_flexkv_would_not_take(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(tmp_path, keys)


def test_mooncake_settings_are_taken_over(tmp_path: Path) -> None:
    store = {
        "local_hostname": "node1",
        "master_server_address": "10.0.0.1:50051",
        "metadata_server": "http://10.0.0.1:8080/metadata",
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "global_segment_size": "4GB",
        "local_buffer_size": 1 << 29,
        "something_else": 1,
    }
    (tmp_path / "store.json").write_text(json.dumps(store))
    keys = {"use_mooncake_store_backend": True, "mooncake_store_config_path": str(tmp_path / "store.json")}
    converted = convert(tmp_path, keys)
    assert [outcome.fate for outcome in converted.outcomes] == ["mapped", "mapped"]
    assert ours(converted, tmp_path).tiers["mooncake"] == MooncakeOptions(
        master="10.0.0.1:50051",
        hostname="node1",
        metadata="http://10.0.0.1:8080/metadata",
        protocol="rdma",
        devices="mlx5_0",
        segment_gb=4,
        local_buffer_gb=0.5,
    )
    assert fate(tmp_path, mooncake_store_config_path="x", use_mooncake_store_backend=0) == ["not needed", "not needed"]
    with pytest.raises(ConfigError, match="expected master_server_address and local_hostname"):
        mooncake_options({"protocol": "tcp"})
    with pytest.raises(ConfigError, match="global_segment_size: expected a size, got 'much'"):
        mooncake_options({"local_hostname": "a", "master_server_address": "b", "global_segment_size": "much"})


def test_a_comment_can_not_become_a_setting(tmp_path: Path) -> None:
    converted = convert(tmp_path, {"kv_cache_dtype": "x\nverify: false", "cpu_layout": "y\u2028verify: false"})
    assert len(converted.refused) == 2
    assert ours(converted, tmp_path).verify


def test_a_secret_is_not_told(tmp_path: Path) -> None:
    converted = convert(tmp_path, {"redis_password": "hidden"})
    assert "hidden" not in converted.yaml() + "".join(outcome.text for outcome in converted.outcomes)
