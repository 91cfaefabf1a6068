"""What a `PrefixCache` stands on, as configured: the pool of a rank, its tiers, the tiered cache."""

from __future__ import annotations

from collections.abc import Mapping
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
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.keys import Namespace, Shard


@dataclass(frozen=True)
class Ground:
    tiers: TieredCache
    pool: KVPool
    scope: Scope


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
    place = Place(config.instance, tp=rank)
    settings: dict[str, Any] = {"scope": scope, "tiers": tiers, "model": name, "place": place, "owners": tp, **more}
    return Ground(TieredCache.create(pool, config, model_spec=whole, shard=shard, **settings), pool, scope)
