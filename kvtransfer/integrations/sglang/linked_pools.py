"""LinkedPools: all device pools of a model, each with its share of host memory and of the tiers below."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.runtime_context import get_model, get_parallel

from kvtransfer.config import Config
from kvtransfer.integrations.lower_tiers import TierStack, open_lower_tiers
from kvtransfer.integrations.sglang.device_pools import device_pool_group
from kvtransfer.integrations.sglang.identity import Identity
from kvtransfer.integrations.sglang.linked_pool import LinkedPool
from kvtransfer.integrations.sglang.lower_pages import LowerPages
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.keys import Shard

logger = logging.getLogger(__name__)


class LinkedPools:
    """Made by the linker, for the components that SGLang asks it to carry.

    Attributes: by_name, num_layers (SGLang's transfer layers). Raises ConfigError for a model that can't be served.
    """

    def __init__(
        self, config: Config, params: Any, components: Collection[Any], forward_stream: torch.cuda.Stream | None
    ) -> None:
        self.group = device_pool_group(params.token_to_kv_pool_allocator.get_kvcache(), params, components)
        self.num_layers = int(self.group.num_layers)
        self.by_name: dict[Any, LinkedPool] = {}
        identity = self._identity(config, params)
        entries = list(self.group.entries)
        device = entries[0].kv_buffer[0].device
        on_gpu = device.type == "cuda"
        streams = None
        ring: int | StagingRing = config.staging_bytes
        if on_gpu:
            streams = [torch.cuda.current_stream(device)] + ([forward_stream] if forward_stream is not None else [])
            ring = StagingRing.create(device, config.staging_bytes, NO_OBSERVER) or 0
        sizes = {entry.name: _device_bytes(entry) for entry in entries}
        try:
            for entry in entries:
                share = sizes[entry.name] / sum(sizes.values())
                host_args = _host_args(config, entry, entries[0], sizes[entry.name], share, len(entries))
                pool = LinkedPool(entry, config, streams=streams, staging=ring, host_args=host_args)
                self.by_name[entry.name] = pool
                if config.lower_tiers:
                    self._use_lower(config, identity, pool, share)
        except BaseException:
            self.close()
            raise
        logger.info(
            "kvtransfer: linker for %s: %s; tiers below: %s",
            identity.describe(),
            ", ".join(f"{p.name} {p.spec.page_bytes} B x {p.host.num_slots} pages" for p in self.by_name.values()),
            ", ".join(config.lower_tiers) or "none",
        )

    def resolve(
        self, transfers: list[PoolTransfer], *, partial: bool = False
    ) -> list[tuple[LinkedPool, PoolTransfer, list[str]]]:
        """Each physical pool of ``transfers`` with its own transfer and keys. Unless ``partial``, none if one of them
        is missing."""
        resolved = self.group.resolve_transfers(transfers, allow_partial=partial, allow_missing_kv=partial)
        return [(self.by_name[one.name], one, list(one.keys)) for one in resolved]

    def declare_current_stream(self) -> None:
        """Work of the current stream is waited for by transfers from here on."""
        for pool in self.by_name.values():
            pool.declare_current_stream()

    def close(self) -> None:
        """Close every pool."""
        for pool in self.by_name.values():
            pool.close()

    def _identity(self, config: Config, params: Any) -> Identity:
        rank, size = 0, int(get_parallel().tp_size)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            group = params.attn_tp_cache_group or params.tp_cache_group
            rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
        ranks = HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            is_mla_model=bool(self.group.rank_replicated),
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=get_model().model_path,
        )
        kv = self.group.entry_map.get(PoolName.KV, self.group.entries[0])
        return Identity.of(config, ranks, kv.kv_buffer[0].dtype)

    def _use_lower(self, config: Config, identity: Identity, pool: LinkedPool, share: float) -> None:
        replicated = bool(self.group.rank_replicated)
        namespace = identity.namespace(f"linker.{pool.name}", pool.spec.canonical(), pool.page_size)
        ranks = identity.ranks
        part, parts = (0, 1) if replicated else (ranks.tp_rank, ranks.tp_size)
        shard = Shard(0, pool.spec.num_layers, part, parts, ranks.attn_cp_rank, ranks.attn_cp_size)
        tiers = open_lower_tiers(
            config, pool.spec, namespace.digest(), place=identity.place, owners=identity.owners, share=share
        )
        # Of bytes that all ranks have, one writes those that others can read; a disk of its own each fills itself.
        shared = {name: tier for name, tier in tiers.items() if tier.shared}
        writes = not replicated or ranks.tp_rank == 0
        stack = TierStack(tiers, deadline_s=config.deadline_s, put_to=None if writes else set(tiers) - set(shared))
        pool.use_lower(LowerPages(stack, pool.slots, namespace, shard, salt=config.namespace.salt_bytes()))


def _device_bytes(entry: Any) -> int:
    return sum(int(buffer.nbytes) for buffer in entry.kv_buffer)


def _host_args(config: Config, entry: Any, first: Any, device_bytes: int, share: float, pools: int) -> dict[str, Any]:
    """How large one pool's host memory is: its share of what is configured; pages count those of the first pool."""
    settings = config.host.sized(device_bytes)
    if settings["most_bytes"] is not None:
        settings["most_bytes"] = max(1, int(settings["most_bytes"] * share))
    if config.host.ratio is None:
        if settings["capacity_bytes"] is not None:
            settings["capacity_bytes"] = max(1, int(settings["capacity_bytes"] * share))
        elif settings["capacity_pages"] is not None:
            of_first = (entry._row_count / entry._row_span) / (first._row_count / first._row_span)
            settings["capacity_pages"] = max(1, int(settings["capacity_pages"] * of_first))
        elif pools > 1:
            raise ConfigError(
                f"tiers.host: expected a size (cache_gb, pages or ratio) for a model with {pools} pools, got none"
            )
    return settings
