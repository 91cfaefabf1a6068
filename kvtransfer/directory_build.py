"""The deciding half of a cache as configured. Needs neither torch nor a GPU."""

from __future__ import annotations

from importlib import import_module

from kvtransfer.books import TierPlan
from kvtransfer.cache_parts import plan_of
from kvtransfer.config import Config, kv_dtype_of
from kvtransfer.config_fields import EVICTION_POLICIES
from kvtransfer.directory import Directory
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.mover_facts import MoverFacts
from kvtransfer.policy import SLRU, EvictionPolicy, Prefetch, Prune, WritePolicy, WriteThroughSelective
from kvtransfer.tiers.keys import Namespace


def namespace_of(
    config: Config, spec: KVSpec, model: str | None, kv_dtype: str | None, adapter: str | None = None
) -> Namespace:
    """The content namespace of a configuration; a dtype that nobody names is "bytes": the spec has their number."""
    named = kv_dtype not in (None, "auto") or config.kv_dtype != "auto"
    dtype = kv_dtype_of(config, kv_dtype) if named else "bytes"
    return Namespace.of(spec, model=model or config.namespace.model or "", kv_dtype=dtype, adapter=adapter)


def directory_of(config: Config, facts: MoverFacts) -> Directory:
    """The deciding half of a configuration, for the memory that a mover has."""
    evict = _eviction(config)
    write: str | WritePolicy = config.write.policy
    if config.write.policy == "write_through_selective":
        write = WriteThroughSelective(config.write.min_hits)
    plans = [TierPlan(facts.host_name, "slots", facts.host_pages, facts.host_most_pages, evict=evict)]
    plans += [plan_of(name, tier, write=write, evict=evict) for name, tier in facts.tiers.items()]
    options = config.eviction
    prune = Prune(options.prune_uses, options.prune_idle_s, options.prune_every_s, options.prune_above)
    fetch = config.prefetch
    low = options.high_watermark if options.low_watermark is None else options.low_watermark
    return Directory(
        facts.page_size,
        plans,
        prefetch=Prefetch(fetch.min_tokens, fetch.stop, fetch.timeout_base_s, fetch.timeout_per_ki_token_s),
        prune=prune if options.prune else None,
        evict_extra=0.0 if options.low_watermark is None else max(0.0, options.high_watermark - low),
        watermarks=(options.high_watermark, low),
        algorithm=config.namespace.page_keys,
    )


def _eviction(config: Config) -> str | EvictionPolicy:
    """The configured policy; one of somebody else's is imported."""
    name = config.eviction.policy
    if name == "slru":
        return SLRU(config.eviction.slru_protected_hits)
    if name in EVICTION_POLICIES:
        return name
    module, _, attribute = name.partition(":")
    try:
        policy: EvictionPolicy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"eviction.policy: expected a policy's class, got {name}: {error}") from error
    return policy
