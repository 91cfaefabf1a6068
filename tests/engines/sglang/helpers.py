"""SGLang's own pools, host pools and caches on a CPU, filled with fresh random bytes.

What SGLang has only for GPUs (copies between its device and host pools) is done in plain torch, by the layout that its
own pools declare (caches.py). Everything else is SGLang's code.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import common as host_common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
MODULE = "kvtransfer.integrations.sglang"
RANKS = {
    "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_tp_rank": 0, "attn_tp_size": 1, "attn_dp_rank": 0,
    "attn_dp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0,
}  # fmt: skip


def publish(**settings: Any) -> ServerArgs:
    """Server arguments that SGLang's own code finds."""
    arguments = ServerArgs(**{"model_path": "dummy", **settings})
    arguments._mamba_cache_chunk_size = 4  # it would be read from the model's configuration
    set_global_server_args_for_scheduler(arguments)
    return arguments


@contextmanager
def one_rank() -> Iterator[None]:
    """The parallel context of a single process."""
    with get_parallel().override(**RANKS):
        yield


def plain_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host pools that are not pinned: there is no CUDA here."""

    def zeros(
        dims: Sequence[int], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, **_: Any
    ) -> torch.Tensor:
        return torch.zeros(tuple(dims), dtype=dtype)

    monkeypatch.setitem(host_common.ALLOC_MEMORY_FUNCS, "cpu", zeros)


def mha_pool(
    size: int = 256, page_size: int = 4, layers: int = 3, heads: int = 2, head_dim: int = 8, dtype: Any = torch.float16
) -> MHATokenToKVPool:
    """A device pool on the CPU."""
    return MHATokenToKVPool(
        size=size, page_size=page_size, dtype=dtype, head_num=heads, head_dim=head_dim, layer_num=layers, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def mla_pool(size: int = 256, page_size: int = 4, layers: int = 3, rank: int = 24, rope: int = 8) -> MLATokenToKVPool:
    """A device pool with one latent row a token."""
    return MLATokenToKVPool(
        size=size, page_size=page_size, dtype=torch.bfloat16, kv_lora_rank=rank, qk_rope_head_dim=rope,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def sliding_pool(size: int = 256, page_size: int = 4) -> SWAKVPool:
    """Layers 0 and 3 full, 1, 2 and 4 sliding."""
    return SWAKVPool(
        size=size, size_swa=size, page_size=page_size, dtype=torch.float16, head_num=2, head_dim=8,
        swa_attention_layer_ids=[1, 2, 4], full_attention_layer_ids=[0, 3], device="cpu",
    )  # fmt: skip


def host_pool(pool: Any, layout: str) -> Any:
    """SGLang's host pool beside ``pool``, filled with random bytes."""
    info = pool.get_device_pool_infos()[0].buffer_info
    size = pool.size
    common = {"device_capacity_tokens": size, "start_layer": 0, "end_layer": pool.layer_num - 1}
    if isinstance(pool, MLATokenToKVPool):
        made: Any = MLATokenToKVPoolHost(
            info, 1.0, 0, pool.page_size, layout, pin_memory=False, target_layer_num=pool.layer_num, **common
        )
    else:
        made = MHATokenToKVPoolHost(info, 1.0, 0, pool.page_size, layout, pin_memory=False, **common)
    randomize(made)
    return made


def as_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's storage as a flat numpy view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def randomize(pool: Any) -> None:
    """Random bytes all over a host pool."""
    memory = as_bytes(pool.kv_buffer)
    memory[:] = np.frombuffer(secrets.token_bytes(memory.nbytes), dtype=np.uint8)


def hashes(count: int) -> list[str]:
    """Page hashes that nobody had before."""
    return [secrets.token_hex(32) for _ in range(count)]


def storage_config(settings: dict[str, Any] | None, *, v1: bool = True, **changes: Any) -> HiCacheStorageConfig:
    """What HiCache hands to a storage backend."""
    extra: dict[str, Any] = {
        "backend_name": "kvtransfer", "module_path": MODULE, "class_name": "KVTransferStorage", "interface_v1": int(v1),
    }  # fmt: skip
    if settings is not None:
        extra["settings"] = settings
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m",
        "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**values, **changes})


def attach(config: HiCacheStorageConfig, pool: Any, **others: Any) -> Any:
    """Our backend through SGLang's factory, told of its pools as the controller does it."""
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    for name, other in ({"kv": pool, **others} if others else {}).items():
        backend.register_mem_host_pool_v2(other, name)
    backend.on_host_pools_registered()
    return backend


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes (random ones are no number now and then)."""
    got, expected = (tensor.contiguous().view(torch.uint8) for tensor in (got, expected))
    return torch.equal(got, expected)
