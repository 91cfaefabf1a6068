"""What the KV cache is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KVCacheSpec:
    block_size: int


@dataclass
class FullAttentionSpec(KVCacheSpec):
    pass


@dataclass
class SlidingWindowSpec(KVCacheSpec):
    pass


def is_full_attention_spec(kv_cache_spec: KVCacheSpec) -> bool:
    """Whether every token's KV is kept."""
    return isinstance(kv_cache_spec, FullAttentionSpec)


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_tp_replicas: int = 1
