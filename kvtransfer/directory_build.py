"""The deciding half of a cache as configured, and the cache over a mover. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.cache_parts import MoverPort, plan_of
from kvtransfer.commands import Scope
from kvtransfer.config import Config, kv_dtype_of, load_config
from kvtransfer.config_fields import EVICTION_POLICIES
from kvtransfer.directory import Directory
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.mover_facts import MoverFacts
from kvtransfer.policy import SLRU, EvictionPolicy, Prefetch, Prune, WritePolicy, WriteThroughSelective
from kvtransfer.recent import FILE_NAME, warm_file
from kvtransfer.recent_keeper import RecentKeeper
from kvtransfer.recompute import Prefill
from kvtransfer.tiers.keys import Namespace


def connect(
    mover: MoverPort,
    config: Config | str | Path | None = None,
    *,
    scope: Scope | None = None,
    model: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | None = None,
    model_spec: KVSpec | None = None,
    tick_s: float | None = 1.0,
    observer: Observer = NO_OBSERVER,
    owned: Sequence[Callable[[], object]] = (),
) -> TieredCache:
    """A cache over ``mover``, whose memory and tiers are what they are; of ``config`` the policies, deadlines, and what
    is warmed at the start (``warm_file``, as much as the host tier has).

    config      a `Config`, or its file; None: what the environment says (`kvtransfer.config.load_config`)
    scope       of calls that name none. None: see `scope_of`, which has the other arguments
    model_spec  of the whole model, where the pool holds a part of it
    owned       called at the cache's close

    Prefixes used last are kept beside the first disk's journal (``kept_prefixes`` of them): `TieredCache.warm_recent`.
    """
    if not isinstance(config, Config):
        config = load_config(config)
    facts = mover.facts()
    if scope is None:
        spec = facts.spec if model_spec is None else model_spec.canonical()
        scope = scope_of(config, spec, facts.page_size, [*facts.tiers], model=model, kv_dtype=kv_dtype, adapter=adapter)
    warm = [] if config.warm_file is None else list(warm_file(config.warm_file))  # first: it may be wrong
    directory = directory_of(config, facts)
    folder = next((tier.folder for tier in facts.tiers.values() if tier.folder), "")
    keeper = None
    if folder and config.kept_prefixes:
        keeper = RecentKeeper(directory.index, Path(folder) / FILE_NAME, config.kept_prefixes, observer=observer)
    cache = TieredCache(
        directory,
        mover,
        scope=scope,
        deadline_s=config.deadline_s,
        tick_s=tick_s,
        recent=keeper,
        prefill=None if config.prefill_tokens_per_s is None else Prefill(config.prefill_tokens_per_s),
        observer=observer,
        owned=owned,
    )
    cache.warm_some((tokens, cache.scope) for tokens in warm)
    return cache


def scope_of(
    config: Config,
    spec: str,
    page_size: int,
    lower: Sequence[str],
    *,
    model: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | None = None,
) -> Scope:
    """Whose pages a cache keeps: the content namespace of ``model`` (or ``namespace.model``), of ``spec`` (canonical)
    and the dtype, and the configured salt. A dtype that nobody names is "bytes": the spec has their number.

    Raises ConfigError where there are ``lower`` tiers, which outlive the process or are shared, and no model is named.
    """
    named = model or config.namespace.model
    if lower and not named:
        raise ConfigError(
            f"scope: expected a model's name for {', '.join(lower)}, which may keep pages of other models too, got "
            "none; set namespace.model, or give model= or scope="
        )
    has_dtype = kv_dtype not in (None, "auto") or config.kv_dtype != "auto"
    dtype = kv_dtype_of(config, kv_dtype) if has_dtype else "bytes"
    space = Namespace(named or "", dtype, spec, page_size, adapter)
    return Scope(space.digest(), config.namespace.salt_bytes())


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
