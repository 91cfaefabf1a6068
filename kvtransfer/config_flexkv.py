"""FlexKV's configuration keys, each with what becomes of it here.

The keys are those of its ``UserConfig``, of the variables ``FLEXKV_*``, which a file gives in small letters without
the prefix, and of the older ``cache_config``; older spellings of one key stand beside the present one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from kvtransfer.config_check import shown
from kvtransfer.kernels.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.A)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_NOTHING = (False, 0, None)

Reading = Literal["flag", "number", "text"]


@dataclass(frozen=True)
class Rule:
    """What becomes of a key.

    target  the field that takes it, with dots; "" where none does
    why     what is done to the value on the way; or, where nothing takes it, why none is needed; or why it is refused
    refuse  refused, unless its value is one of ``off``, which asks for nothing
    reads   what its value is
    """

    target: str = ""
    why: str = ""
    refuse: bool = False
    off: tuple[object, ...] = _NOTHING
    reads: Reading = "text"


def _to(target: str, reads: Reading, why: str = "") -> Rule:
    return Rule(target, why, reads=reads)


def _unneeded(why: str, *keys: str) -> dict[str, Rule]:
    return {key: Rule(why=why) for key in keys}


def _refused(why: str, *keys: str, off: tuple[object, ...] = _NOTHING, reads: Reading = "flag") -> dict[str, Rule]:
    return {key: Rule(why=why, refuse=True, off=off, reads=reads) for key in keys}


def _layouts(*sides: str) -> dict[str, Rule]:
    rule = Rule(why="tiers hold pages with all layers together", refuse=True, off=("BLOCKFIRST", "blockfirst"))
    return dict.fromkeys([key for side in sides for key in (f"{side}_layout", f"{side}_layout_type")], rule)


_MRU = "mru and filo are refused: what they evict is likely to be used"
_LARGER = "one budget for both directions: the larger is taken"
_SERVES = "a process does not serve its tiers to others: use a shared tier"
_NO_FILES = "there is no such client: use the tier object_store with a file:// url"
_NO_GDS = "the disk tier goes through host memory: there is no GPUDirect Storage"
_NO_BUFFER = "there is no temporary buffer"
_INDEX = "the index lies in one process; instances share pages through a shared tier, not an index"
_PEERS = "used by FlexKV for its peers only; for pages in Redis add a tier redis"
_PATHS = "the way across the link is chosen by measurement (kvtransfer tune)"
_TRACE = "of FlexKV's request trace; here KVTRANSFER_TIMELINE=FILE names a timeline"
_REMOTE = "of FlexKV's remote file system, which is refused: use the tier object_store with a file:// url"
_SHARD = "which layers a record holds comes from the engine's ranks"
_PORTS = "kvtransfer opens no port"

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # What most files say.
        "cpu_cache_gb": _to("tiers.host.cache_gb", "number", "FlexKV's is for all ranks of a machine, ours for each"),
        "ssd_cache_gb": _to("tiers.disk.cache_gb", "number", "0 is no disk tier"),
        "ssd_cache_dir": _to("tiers.disk.paths", "text"),
        "num_cpu_blocks": _to("tiers.host.pages", "number", "a block is a page; cpu_cache_gb goes before it"),
        "num_ssd_blocks": _to("tiers.disk.pages", "number", "a block is a page; ssd_cache_gb goes before it"),
        "enable_flexkv": _to("enabled", "flag"),
        "enable_cpu": Rule(why="there is always a host tier", refuse=True, off=(True,), reads="flag"),
        "enable_ssd": Rule(why="a disk tier is there where it has a size and folders", reads="flag"),
        "kv_cache_dtype": _to("kv_dtype", "text"),
        "instance_num": _to("instances", "number"),
        "instance_id": _to("instance", "number"),
        # Policies
        "eviction_policy": _to("eviction.policy", "text", _MRU),
        "evict_start_threshold": _to("eviction.high_watermark", "number"),
        "evict_ratio": _to("eviction.low_watermark", "number", "that much below evict_start_threshold"),
        "slru_protected_threshold": _to("eviction.slru_protected_hits", "number"),
        **_refused("lru knows no bonus for hits: use slru, lfu or path_score", "hit_reward_seconds", reads="number"),
        # Crossing the link
        "transfer_num_cta_h2d": _to("sm_budget", "number", _LARGER),
        "transfer_num_cta_d2h": _to("sm_budget", "number", _LARGER),
        "transfer_sms_h2d": _to("sm_budget", "number", _LARGER),
        "transfer_sms_d2h": _to("sm_budget", "number", _LARGER),
        "enable_layerwise_transfer": _to("layerwise", "flag"),
        **_unneeded(_PATHS, "use_ce_transfer_h2d", "use_ce_transfer_d2h", "ce_segment_threshold", "ce_path_opt"),
        **_unneeded(_PATHS, "enable_ce_memcpy2d", "ce_gather_threads", "ce_gather_nt", "transfer_segment_threshold"),
        **_unneeded(_PATHS, "transfer_path_opt", "enable_memcpy2d"),
        **_unneeded("layers are told by GPU events", "layerwise_notify_mode"),
        **_unneeded("copies run in the engine's own process", "enable_mps"),
        **_unneeded("replicated KV is written once, by its owner", "mla_d2h_mode"),
        **_unneeded("ranks always agree", "enable_collective_sync"),
        **_unneeded("all components of a layer travel in one page", "swa_multi_group", "swa_multi_layer", "swa"),
        **_unneeded("all components of a layer travel in one page", "enable_swa_transfer"),
        **_refused("pages are not compressed", "nvcomp_batch_size", reads="number"),
        # Host memory
        "use_hugepage_cpu_buffer": _to("tiers.host.huge_pages", "flag", "true is reserved"),
        "cudahost_chunk_size_gb": _to("tiers.host.chunk_gb", "number", "0 is our default"),
        **_unneeded(_NO_BUFFER, "use_hugepage_tmp_buffer", "num_tmp_cpu_blocks", "num_local_blocks"),
        **_refused(
            "reserved huge pages are of the kernel's default size: set that (default_hugepagesz=)",
            "hugepage_size_bytes", off=(2 << 20,), reads="number",
        ),
        **_layouts("cpu", "ssd", "remote", "gds"),
        **_unneeded("the page size is the engine's", "tokens_per_block"),
        # Disk
        "iouring_entries": _to("tiers.disk.engine", "number", "0 is threads; otherwise it is chosen"),
        "ioring_entries": _to("tiers.disk.engine", "number", "0 is threads; otherwise it is chosen"),
        "ssd_cache_iouring_entries": _to("tiers.disk.engine", "number", "0 is threads; otherwise it is chosen"),
        "max_file_size_gb": _to("tiers.disk.file_gb", "number", "-1 is our default"),
        **_refused("io_uring is set up without flags of the user", "iouring_flags", "ioring_flags", reads="number"),
        **_refused(_NO_GDS, "enable_gds", "use_gds", "enable_nixl"),
        **_unneeded("of GPUDirect Storage, which is refused", "nixl_extra_config", "num_gds_blocks", "gds_cache_dir"),
        # Remote
        "use_mooncake_store_backend": _to("tiers.mooncake", "flag", "settings come from mooncake_store_config_path"),
        "mooncake_store_config_path": _to("tiers.mooncake", "text", "its settings are taken over"),
        **_unneeded(_SHARD, "mooncake_store_pp_rank", "mooncake_store_pp_size", "mooncake_store_node_layer_start"),
        **_unneeded(_SHARD, "mooncake_store_node_layer_end", "mooncake_store_total_layers"),
        **_refused(_SERVES, "enable_p2p_cpu", "enable_p2p_ssd"),
        **_refused(_SERVES, "enable_kv_sharing"),
        **_refused(_NO_FILES, "enable_3rd_remote", "enable_remote"),
        **_unneeded(_REMOTE, "num_remote_blocks", "remote_cache_size_mode", "remote_file_size", "remote_file_num"),
        **_unneeded(_REMOTE, "remote_file_prefix", "remote_cache_path", "remote_config_custom"),
        **_unneeded(_PEERS, "redis_host", "redis_port", "redis_password", "node_ttl_seconds", "local_ip"),
        **_unneeded(_PEERS, "local_zmq_ip"),
        **_unneeded(_PEERS, "local_zmq_port", "distributed_node_id", "mooncake_config_path"),
        # The index
        **_unneeded("there is one index", "index_accel"),
        **_refused(_INDEX, "radix_shmem"),
        **_refused(_INDEX, "radix_world_size", off=(1,), reads="number"),
        **_unneeded(_INDEX, "shm_radix_id", "shm_radix_server_id", "radix_rank", "radix_registry", "radix_cluster_id"),
        **_unneeded(_INDEX, "radix_rpc_address", "radix_rpc_interface", "radix_rdma_dev", "radix_gid_idx"),
        **_unneeded(_INDEX, "radix_bootstrap_timeout_sec", "radix_remote_op_transport", "num_extra_te_channels"),
        **_unneeded(_INDEX, "lt_pool_initial_capacity", "refresh_batch_size", "rebuild_interval_ms", "idle_sleep_ms"),
        **_unneeded(_INDEX, "lease_ttl_ms", "safety_ttl_ms", "renew_lease_ms"),
        **_refused("prefetching is part of the cache: there is no controller outside it", "prefetch_enabled"),
        # Processes
        **_refused("kvtransfer works in the engine's process: there is no server", "server_client_mode"),
        **_unneeded("there is no server", "server_recv_port"),
        **_unneeded("ranks meet in torch.distributed", "master_host", "master_ports"),
        # Seeing it
        **_refused(f"{_PORTS}: the engine's process serves what is to be seen", "enable_metrics"),
        **_unneeded(_PORTS, "cpp_metrics_port", "py_metrics_port"),
        **_refused(_TRACE, "enable_trace", "transfer_trace"),
        **_unneeded(_TRACE, "trace_file_path", "trace_max_file_size_mb", "trace_max_files", "trace_flush_interval_ms"),
        **_unneeded("observers tell; nothing is logged", "logging_prefix", "log_level", "num_log_interval_requests"),
        **_unneeded("KVTRANSFER_CONFIG names our file", "config_path"),
    }
)  # fmt: skip


def mooncake_options(found: Any) -> dict[str, Any]:
    """Options of the tier mooncake from the JSON that configures a client of Mooncake Store. ConfigError for others."""
    if not isinstance(found, dict) or not {"master_server_address", "local_hostname"} <= set(found):
        raise ConfigError("expected master_server_address and local_hostname in it")
    names = {
        "master_server_address": "master", "local_hostname": "hostname", "metadata_server": "metadata",
        "protocol": "protocol", "device_name": "devices",
    }  # fmt: skip
    options: dict[str, Any] = {ours: found[theirs] for theirs, ours in names.items() if theirs in found}
    for theirs, ours in (("global_segment_size", "segment_gb"), ("local_buffer_size", "local_buffer_gb")):
        if theirs in found:
            size = _SIZE.fullmatch(str(found[theirs]).strip().lower())
            if size is None:
                raise ConfigError(f"{theirs}: expected a size, got {shown(found[theirs])}")
            options[ours] = float(size[1]) * _UNITS[size[2]] / (1 << 30)
    return options
