"""Which device pools of a model the linker carries: those that SGLang's own assembler knows, and the plain ones.

SGLang's assembler serves hybrid models (DeepSeek V4, sparse attention with an indexer, Mamba beside attention). Models
with plain attention, an MLA latent, or full and sliding layers are described here, in the same terms.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvtransfer.kernels.errors import ConfigError


def device_pool_group(kvcache: Any, params: Any, components: Collection[Any]) -> Any:
    """SGLang's `DevicePoolGroup` of ``kvcache``. Raises ConfigError, saying what it is, for what can't be carried
    whole: a page without all of its parts would be wrong."""
    names = {str(getattr(one, "name", one)) for one in components}
    page_size = int(params.page_size)
    try:
        if int(getattr(get_parallel(), "attn_dcp_size", 1)) > 1:
            raise ConfigError("expected no decode context parallelism, whose ranks hold parts of a page each")
        if names == {"FULL"} and type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool):
            is_mla = isinstance(kvcache, MLATokenToKVPool)
            layers = {layer: layer for layer in range(kvcache.layer_num)}
            entries = [_entry(PoolName.KV, kvcache, layers, page_size), *_drafts(params, page_size)]
            return DevicePoolGroup(entries, kvcache.layer_num, page_size, rank_replicated=is_mla and len(entries) == 1)
        if names == {"FULL", "SWA"} and type(kvcache) is SWAKVPool:
            if params.sidecar_draft_device_pools or params.mtp_draft_device_pools:
                raise ConfigError("expected a model without a draft model beside sliding layers")
            parts = ((PoolName.KV, kvcache.full_kv_pool, False), (PoolName.SWA, kvcache.swa_kv_pool, True))
            entries = [_entry(name, pool, _layers_of(kvcache, sliding), page_size) for name, pool, sliding in parts]
            return DevicePoolGroup(entries, kvcache.layer_num, page_size)
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=set(components)
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"linker: expected a model whose KV can be carried whole, got {type(kvcache).__name__} with components "
            f"{', '.join(sorted(names))}: {error}"
        ) from error


def _layers_of(kvcache: Any, sliding: bool) -> dict[int, int]:
    """Transfer layers of one half of a pool with sliding layers, and which of its buffers each is."""
    return {
        layer - kvcache.start_layer: local
        for layer, (local, is_sliding) in kvcache.layers_mapping.items()
        if is_sliding == sliding
    }


def _drafts(params: Any, page_size: int) -> list[Any]:
    """The pool of a draft model that shares its target's indices: layer i travels with the target's layer i."""
    if params.mtp_draft_device_pools or len(params.sidecar_draft_device_pools) > 1:
        raise ConfigError("expected one draft pool beside the model's at most, none of them packed into it")
    return [
        _entry(PoolName.DRAFT, pool, {layer: layer for layer in range(pool.layer_num)}, page_size, PoolName.KV)
        for pool in params.sidecar_draft_device_pools
    ]


def _entry(name: Any, pool: Any, layers: dict[int, int], page_size: int, source: Any | None = None) -> Any:
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ConfigError(f"pool {name}: expected token rows (NHD), got {pool.kv_cache_layout}")
    if type(pool) is MLATokenToKVPool:
        components, mapping = [list(pool.kv_buffer)], dict(layers)
    elif type(pool) is MHATokenToKVPool:
        for scales in ("k_scale_buffer", "native_k_scale_buffer"):
            if getattr(pool, scales, None) is not None:
                raise ConfigError(f"pool {name}: expected a KV cache without scales of its own, got {scales}")
        components, mapping = [list(pool.k_buffer), list(pool.v_buffer)], dict(layers)
    else:
        raise ConfigError(f"pool {name}: expected plain K and V or an MLA latent, got {type(pool).__name__}")
    return DevicePoolEntry(
        name=name,
        indices_from_pool=source or name,
        device_pool=pool,
        components=components,
        layer_mapping=mapping,
        page_size=page_size,
        rows_are_pages=False,
    )
