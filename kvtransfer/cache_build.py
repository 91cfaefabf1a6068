"""A `TieredCache` as configured: the host tier, the engine, lower tiers, both halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from kvtransfer.cache import TieredCache
from kvtransfer.commands import Scope
from kvtransfer.config import Config, load_config
from kvtransfer.directory_build import connect, scope_of
from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.mover import Mover
from kvtransfer.pool import KVPool
from kvtransfer.tier_build import RankPart, TierMaker
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Shard


def create(
    pool: KVPool,
    config: Config | str | Path | None = None,
    *,
    host: HostTier | None = None,
    tiers: Mapping[str, Tier] | None = None,
    engine: TransferEngine | None = None,
    scope: Scope | None = None,
    model: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | None = None,
    model_spec: KVSpec | None = None,
    shard: Shard | None = None,
    place: Place | None = None,
    owners: int = 1,
    tick_s: float | None = 1.0,
    observer: Observer = NO_OBSERVER,
) -> TieredCache:
    """A cache of ``pool`` with both halves in this process.

    config      a `Config`, or its file; None: what the environment says (`kvtransfer.config.load_config`)
    host, engine, tiers  instead of those that the configuration describes; they stay yours. ``engine`` brings its host
    scope       of calls that name none. None: that of ``model``, ``kv_dtype``, ``adapter`` and ``model_spec``: see
                `kvtransfer.directory_build.scope_of`
    model_spec  of the whole model, where the pool holds a part of it, which is ``shard``. They say, too, how pages are
                cut where a tier has ``share_across_tp``
    place, owners  which process of a deployment this is, and how many share the disks (`DiskTier`)

    Raises ConfigError, CapacityError; what was made is closed again then.
    """
    if not isinstance(config, Config):
        config = load_config(config)
    if engine is not None and host is not None and engine.host is not host:
        raise ConfigError("create: expected an engine over the host tier that is given, got one over another")
    if engine is not None and engine.pool is not pool:
        raise ConfigError("create: expected an engine over the pool that is given, got one over another")
    made: list[Callable[[], object]] = []
    with ExitStack() as undo:

        def mine(close: Callable[[], object]) -> None:
            made.append(close)
            undo.callback(close)

        if scope is None:
            lower = [*(config.lower_tiers if tiers is None else tiers)]
            whole = model_spec or pool.spec
            scope = scope_of(
                config, whole.canonical(), whole.page_size, lower, model=model, kv_dtype=kv_dtype, adapter=adapter
            )
        part = RankPart.configured(config, model_spec or pool.spec, shard or Shard.whole(pool.spec))
        if host is None and engine is None:
            settings = config.host.sized(pool.num_pages * pool.spec.page_bytes)
            host = HostTier(pool.spec, device=pool.device, observer=observer, **settings)
            mine(host.close)
        if engine is None:
            assert host is not None
            engine = TransferEngine(pool, host, observer=observer, **config.engine_settings())
            mine(engine.close)
        maker = TierMaker(
            pool.spec,
            scope.namespace,
            Place(config.instance) if place is None else place,
            owners * config.instances,
            observer,
            part,
        )
        if tiers is None:
            tiers = {}
            for name, options in config.lower_tiers.items():
                tier = tiers[name] = maker(name, options)
                mine(tier.close)
        for name, tier in tiers.items():
            maker.check(name, tier)
        mover = Mover(
            engine,
            tiers,
            shard=part.keys,
            deadline_s=config.deadline_s,
            batch_pages=min(config.write.batch_pages, 128),
            make_tier=maker,
            check_tier=maker.check,
            observer=observer,
        )
        mine(mover.close)
        engine.host.wait_ready(slots=1)  # one that grows in the background
        cache = connect(mover, config, scope=scope, tick_s=tick_s, observer=observer, owned=made[:-1])
        undo.pop_all()
    return cache
