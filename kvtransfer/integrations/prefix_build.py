"""What a `PrefixCache` stands on, as configured: the pool of a rank, its tiers, the tiered cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvtransfer.cache import TieredCache
from kvtransfer.commands import Scope
from kvtransfer.config import Config
from kvtransfer.group import RankGroup
from kvtransfer.integrations.fingerprint import fingerprint
from kvtransfer.integrations.model_spec import kv_spec_for
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.pool import KVPool
from kvtransfer.tier_build import TierMaker
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.head_group_tier import HeadGroupTier
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.keys import Namespace, Shard


@dataclass(frozen=True)
class Ground:
    """``owned``: to be closed after ``tiers``, the last one first."""

    tiers: TieredCache
    pool: KVPool
    scope: Scope
    owned: tuple[Callable[[], object], ...]


def lay_ground(
    model: PreTrainedModel,
    config: Config,
    *,
    page_size: int,
    pool_tokens: int,
    model_name: str | None,
    adapter: str | None,
    tiers: Mapping[str, Tier] | None,
    ranks: RankGroup | None,
    **more: Any,
) -> Ground:
    """See `PrefixCache.create`. What was made is closed again where something fails."""
    whole = kv_spec_for(model.config, page_size, model.dtype)
    tp, rank = (1, 0) if ranks is None else (ranks.topology.tp, ranks.rank)
    if ranks is not None and ranks.topology.size != tp:
        raise ConfigError(f"ranks: expected tensor parallel ranks alone, got {ranks.topology}")
    name = model_name or config.namespace.model
    if name is None:
        if tp > 1:
            raise ConfigError("model_name: expected one (or namespace.model): a rank has a part of the weights alone")
        name = fingerprint(model)
    dtype = str(model.dtype).removeprefix("torch.")
    space = Namespace.of(whole, model=name, kv_dtype=dtype, adapter=adapter)
    scope = Scope(space.digest(), config.namespace.salt_bytes())
    mine = whole.select_heads(rank, tp)
    pool = KVPool.allocate("sglang.layer_first", spec=mine, num_pages=-(-pool_tokens // page_size), device=model.device)
    shard = Shard(0, whole.num_layers, head_part=rank, head_parts=tp)
    groups = None
    if config.share_across_tp is not None:
        groups = HeadGroups(whole, share_across_tp=config.share_across_tp, tp_size=tp, tp_rank=rank)
        shard = Shard.whole(whole)  # of all sizes alike: see `HeadGroupTier`
    place = Place(config.instance, tp=rank)
    with ExitStack() as undo:
        owned: list[Callable[[], object]] = []
        if tiers is None:
            maker = TierMaker(mine, scope.namespace, place, tp * config.instances)
            tiers = {name: _made(maker, name, config, groups) for name in config.lower_tiers}
            for tier in tiers.values():
                owned.append(tier.close)
                undo.callback(tier.close)
        cache = TieredCache.create(
            pool, config, scope=scope, tiers=tiers, model=name, model_spec=whole, shard=shard, place=place, **more
        )
        undo.pop_all()
    return Ground(cache, pool, scope, tuple(owned))


def _made(maker: TierMaker, name: str, config: Config, groups: HeadGroups | None) -> Tier:
    """A configured tier; one that others share holds records by head group, where that is asked for."""
    tier = maker(name, config.lower_tiers[name])
    return HeadGroupTier(tier, groups) if tier.shared and groups is not None else tier
