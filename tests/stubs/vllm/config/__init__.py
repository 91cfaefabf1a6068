"""Of vLLM's configuration, what the connector looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig


@dataclass
class ModelConfig:
    model: str = ""
    dtype: Any = "auto"
    revision: str | None = None
    quantization: str | None = None
    hf_overrides: Any = field(default_factory=dict)


@dataclass
class CacheConfig:
    block_size: int = 16
    cache_dtype: str = "auto"


@dataclass
class ParallelConfig:
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0
    decode_context_parallel_size: int = 1
    data_parallel_index: int = 0


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False


@dataclass
class VllmConfig:
    model_config: ModelConfig | None = None
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    kv_transfer_config: KVTransferConfig | None = None
    kv_events_config: KVEventsConfig | None = None
