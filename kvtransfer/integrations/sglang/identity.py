"""Which records are whose: what SGLang's page hash leaves out, and must be equal before bytes may be taken over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.base import ranks_per_host

from kvtransfer.config import Config
from kvtransfer.integrations.sglang.host_pages import HostPages
from kvtransfer.integrations.sglang.settings import engine_kv_dtype, engine_model
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.keys import Namespace, Shard


@dataclass(frozen=True)
class Identity:
    """This process among all that may share a store.

    kv_dtype       of the KV cache, by name
    place, owners  of this process's disk folders, and how many processes of this machine share the disks' capacity
    """

    ranks: HiCacheStorageConfig
    model: str
    kv_dtype: str
    place: Place
    owners: int

    @classmethod
    def of(cls, config: Config, ranks: HiCacheStorageConfig, held: torch.dtype) -> Identity:
        """``held``: the dtype of the KV pool's memory. Raises ConfigError where nobody names the model or the dtype."""
        model = engine_model(config, ranks.model_name)
        place = Place(
            instance=config.instance, dp=ranks.dp_rank, pp=ranks.pp_rank, cp=ranks.attn_cp_rank, tp=ranks.tp_rank
        )
        owners = config.instances * max(1, ranks_per_host())
        return cls(ranks, model, engine_kv_dtype(config, held), place, owners)

    def namespace(self, pool: str, form: str, page_size: int) -> Namespace:
        """Of pages of a pool; ``form`` says everything of their bytes and of how these lie."""
        spec = f"sglang;pool={pool};{form};pp={self.ranks.pp_rank}/{self.ranks.pp_size}"
        return Namespace(self.model, self.kv_dtype, spec, page_size)

    def host_namespace(self, pages: HostPages) -> Namespace:
        """Of the pages of one host pool."""
        return self.namespace(pages.name, f"{self.layout_id(pages)};{_geometry(pages)}", pages.page_size)

    def layout_id(self, pages: HostPages) -> str:
        """The byte order's name: the pool's layout, the tag of a format of its own, and how pages are handed over."""
        tag = getattr(pages.pool, "storage_format_tag", None)
        return f"sglang.{pages.layout}{f'+{tag}' if tag else ''}.{pages.form}"

    def shards(self, pages: HostPages, replicated: bool) -> list[Shard]:
        """What part of the model's page each run of pieces is: one, or one a head group where pages are cut by head."""
        first = int(getattr(pages.pool, "start_layer", 0) or 0)
        layers = max(1, int(getattr(pages.pool, "layer_num", 1) or 1))
        part, parts = (0, 1) if replicated else (self.ranks.tp_rank, self.ranks.tp_size)
        groups = pages.heads_split
        return [
            Shard(
                first,
                first + layers,
                part * groups + group,
                parts * groups,
                self.ranks.attn_cp_rank,
                self.ranks.attn_cp_size,
            )
            for group in range(groups)
        ]

    def is_replicated(self, pages: HostPages) -> bool:
        """Whether every TP rank has the same bytes. State, and pools that are cut by head, never are: neither the
        Mamba state nor a draft model's K and V beside an MLA model."""
        by_head = hasattr(pages.pool, "head_num") and not hasattr(pages.pool, "kv_lora_rank")
        return bool(self.ranks.is_mla_model) and pages.name != PoolName.MAMBA.value and not by_head

    def describe(self) -> str:
        """For the log."""
        ranks = self.ranks
        return (
            f"model {self.model!r}, tp {ranks.tp_rank}/{ranks.tp_size}, pp {ranks.pp_rank}/{ranks.pp_size}, "
            f"cp {ranks.attn_cp_rank}/{ranks.attn_cp_size}, dp {ranks.dp_rank}"
        )


def _geometry(pages: HostPages) -> str:
    """Of one head group: sizes of the pieces, runs of equal ones together, and heads where the pool tells."""
    runs: list[list[int]] = []
    for size in pages.piece_bytes[: len(pages.piece_bytes) // pages.heads_split]:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    heads = int(getattr(pages.pool, "head_num", 0)) // pages.heads_split
    return f"pieces={','.join(f'{count}x{size}' for count, size in runs)};heads={heads};dtype={pages.pool.dtype}"
