"""What the connector takes from vLLM's configuration and from its workers, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.kv_cache_interface import is_full_attention_spec

from kvtransfer.config import Config, kv_dtype_of, load_config
from kvtransfer.integrations.vllm_messages import WorkerFacts
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.mover_facts import MoverFacts, TierFacts
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.keys import Namespace, Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HOST = "host"
_OPTIONS = ("config", "settings", "layerwise")


@dataclass(frozen=True)
class Options:
    """``kv_connector_extra_config``: ``config`` (a file of kvtransfer), ``settings`` (what such a file would hold),
    ``layerwise`` (loads overlap the forward that uses them; default: the configuration's)."""

    config: Config
    layerwise: bool

    @classmethod
    def of(cls, extra_config: dict[str, Any]) -> Options:
        """Raises ConfigError on names that there are not, and on settings that don't fit."""
        unknown = sorted(set(extra_config) - set(_OPTIONS))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: expected {', '.join(_OPTIONS)}, got {', '.join(unknown)}; settings of "
                "kvtransfer go into 'settings' or the file that 'config' names"
            )
        config = load_config(extra_config.get("config"), arguments=dict(extra_config.get("settings") or {}))
        layerwise = extra_config.get("layerwise", config.layerwise)
        if not isinstance(layerwise, bool):
            raise ConfigError(f"layerwise: expected true or false, got {layerwise!r}")
        return cls(config, layerwise)


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as both halves see it.

    block_size    tokens of a block, which is a page
    num_blocks    of a worker's pool
    ranks, rank   workers that hold a part of each page, and which this one is (0 in the scheduler)
    replicas      neighbouring ranks that hold the same heads
    model, kv_dtype  for the namespace: what the weights are, and what the bytes mean
    replica, replicas_of_engine  which of the engine's data-parallel replicas, of how many
    """

    block_size: int
    num_blocks: int
    ranks: int
    rank: int
    replicas: int
    model: str
    kv_dtype: str
    replica: int
    replicas_of_engine: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> EngineFacts:
        """Raises ConfigError for what this connector does not serve, saying what to do."""
        parallel = vllm_config.parallel_config
        refused = {
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "decode_context_parallel_size": parallel.decode_context_parallel_size,
            "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        }
        for name, size in refused.items():
            if size > 1:
                raise ConfigError(f"{name}: expected 1 with this connector, got {size}; use tensor or data parallel")
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not is_full_attention_spec(groups[0].kv_cache_spec):
            kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
            raise ConfigError(
                f"KV cache groups: expected one group of full attention, got {len(groups)} ({kinds or 'none'}); start "
                "vLLM with --disable-hybrid-kv-cache-manager, or take its OffloadingConnector with our tier below it "
                "(docs/vllm.md)"
            )
        replicas = max(1, kv_cache_config.kv_tp_replicas)
        if parallel.tensor_parallel_size % replicas:
            raise ConfigError(
                f"kv_tp_replicas: expected a divisor of {parallel.tensor_parallel_size} ranks, got {replicas}"
            )
        return cls(
            block_size=groups[0].kv_cache_spec.block_size,
            num_blocks=kv_cache_config.num_blocks,
            ranks=parallel.tensor_parallel_size,
            rank=parallel.rank % parallel.tensor_parallel_size,
            replicas=replicas,
            model=_fingerprint(vllm_config, config),
            kv_dtype=_kv_dtype(vllm_config, config),
            replica=parallel.data_parallel_index,
            replicas_of_engine=max(1, parallel.data_parallel_size),
        )

    @property
    def head_parts(self) -> int:
        """In how many parts the heads are cut."""
        return self.ranks // self.replicas

    def shard(self, num_layers: int) -> Shard:
        """What this rank holds of a page. Ranks that hold the same have the same shard."""
        return Shard(0, num_layers, self.rank // self.replicas, self.head_parts)

    def place(self, instance: int) -> Place:
        """Which process of a deployment a worker is: disks have a folder for each."""
        return Place(instance=instance, dp=self.replica, tp=self.rank)

    def namespace(self, spec: str, adapter: str | None = None, generation: str = "") -> bytes:
        """Digest of the content namespace; ``spec``: canonical text of the whole model's pages. A ``generation`` sets
        apart what was kept since the engine's cache was reset."""
        model = f"{self.model} generation={generation}" if generation else self.model
        return Namespace(model, self.kv_dtype, spec, self.block_size, adapter).digest()


def common_facts(workers: Sequence[WorkerFacts]) -> MoverFacts:
    """What all of these workers have. Raises ConfigError if they differ in what must be equal."""
    facts = [worker.facts for worker in workers]
    if len({(worker.spec, one.page_size, tuple(one.tiers)) for worker, one in zip(workers, facts, strict=True)}) != 1:
        raise ConfigError(f"workers: expected the same pages and tiers on every rank, got {workers}")
    tiers = {}
    for name in facts[0].tiers:
        said = [one.tiers[name] for one in facts]
        capacities = [tier.capacity_pages for tier in said if tier.capacity_pages is not None]
        pages = max(tier.pages for tier in said)
        tiers[name] = TierFacts(said[0].shared, min(capacities, default=None), pages)
    return msgspec.structs.replace(
        facts[0],
        host_pages=min(one.host_pages for one in facts),
        host_most_pages=min(one.host_pages for one in facts),
        tiers=tiers,
    )


def _fingerprint(vllm_config: VllmConfig, config: Config) -> str:
    """What tells this model's KV from another's: given, or vLLM's name of it and what changes its numbers."""
    if config.namespace.model is not None:
        return config.namespace.model
    model = vllm_config.model_config
    if model is None:
        raise ConfigError("namespace.model: expected a fingerprint of the weights where vLLM names no model, got none")
    told = (model.model, model.revision, str(model.dtype), model.quantization, repr(model.hf_overrides))
    return "vllm " + " ".join(map(repr, told))


def _kv_dtype(vllm_config: VllmConfig, config: Config) -> str:
    says = str(vllm_config.cache_config.cache_dtype)
    if says == "auto" and vllm_config.model_config is not None:
        says = str(vllm_config.model_config.dtype)
    return kv_dtype_of(config, says)
