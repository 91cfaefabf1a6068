"""SGLang's whole prefix cache on a CPU, for tests that go through all of it: device, host, storage and back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

PAGE = 4
IO_BACKENDS = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "page_head": "kernel"}


def rows_of(host: Any, layer: int, kind: int, indices: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """One layer's K (0) or V (1) of a host pool: the tensor, and the index that names these tokens' rows in it."""
    buffer, pages, tokens = host.kv_buffer, indices // host.page_size, indices % host.page_size
    if host.layout == "layer_first":
        return buffer[kind, layer], (indices,)
    if host.layout == "page_first":
        return buffer[kind, :, layer], (indices,)
    if host.layout == "page_first_direct":
        return buffer[kind, :, layer], (pages, tokens)
    # page_head: (kv, page, head, token, layer, dim)
    return buffer[kind, :, :, :, layer].transpose(1, 2), (pages, tokens)


def copies_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for SGLang's GPU copies between its MHA pools, in every layout."""

    def backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
        for layer in range(self.layer_num):
            for kind, source in enumerate((device_pool.k_buffer[layer], device_pool.v_buffer[layer])):
                rows, at = rows_of(self, layer, kind, host_indices)
                rows[at] = source[device_indices]

    def load(
        self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: Any
    ) -> None:
        for kind, target in enumerate((device_pool.k_buffer[layer_id], device_pool.v_buffer[layer_id])):
            rows, at = rows_of(self, layer_id, kind, host_indices)
            target[device_indices] = rows[at]

    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", backup)
    monkeypatch.setattr(MHATokenToKVPoolHost, "load_to_device_per_layer", load)


class Engine:
    """Device pool, allocator and request table of one engine."""

    def __init__(self, pool: MHATokenToKVPool | MLATokenToKVPool) -> None:
        self.pool = pool
        self.allocator = PagedTokenToKVPoolAllocator(
            pool.size, pool.page_size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False
        )
        self.requests = ReqToTokenPool(size=8, max_context_len=256, device="cpu", enable_memory_saver=False)

    def params(self, **more: Any) -> CacheInitParams:
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.pool.page_size,
            **{"tree_components": (ComponentType.FULL,), **more},
        )

    def buffers(self, indices: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every buffer, with the rows in it that these places stand for."""
        if isinstance(self.pool, MLATokenToKVPool):
            return [(buffer, indices) for buffer in self.pool.kv_buffer]
        return [(buffer, indices) for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)]

    def rows(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """A copy of the rows at these places, buffer by buffer."""
        return [buffer[at].clone() for buffer, at in self.buffers(indices)]

    def allocate(self, count: int) -> torch.Tensor:
        """Fresh places."""
        indices: torch.Tensor = self.allocator.alloc(count)
        return indices

    def forward(self, count: int) -> torch.Tensor:
        """Fresh places, filled as a forward would."""
        indices = self.allocate(count)
        for buffer, at in self.buffers(indices):
            buffer[at] = torch.randn(count, *buffer.shape[1:]).to(buffer.dtype)
        return indices

    def wipe(self) -> None:
        """Other bytes everywhere."""
        for buffer, _ in self.buffers(torch.arange(0)):
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))


class SlidingEngine(Engine):
    """Likewise of a model with full and sliding layers: two pools, with places of their own."""

    def __init__(self, pool: SWAKVPool) -> None:
        self.pool = pool
        self.allocator = SWATokenToKVPoolAllocator(
            pool.size, pool.size_swa, pool.page_size, pool.dtype, "cpu", pool, need_sort=False
        )
        self.requests = ReqToTokenPool(size=8, max_context_len=256, device="cpu", enable_memory_saver=False)

    def allocate(self, count: int) -> torch.Tensor:
        indices: torch.Tensor = self.allocator.full_attn_allocator.alloc(count)  # alloc_extend is for GPUs
        self.allocator.set_full_to_swa_mapping(indices, self.allocator.swa_attn_allocator.alloc(count))
        return indices

    def params(self, **more: Any) -> CacheInitParams:
        return super().params(tree_components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=8, **more)

    def buffers(self, indices: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        full, sliding = self.pool.full_kv_pool, self.pool.swa_kv_pool
        there = self.allocator.translate_loc_from_full_to_swa(indices)
        return [(buffer, indices) for buffer in (*full.k_buffer, *full.v_buffer)] + [
            (buffer, there) for buffer in (*sliding.k_buffer, *sliding.v_buffer)
        ]


class StateEngine(Engine):
    """Likewise of a model with latent attention (layers 0 and 3) and recurrent state (1 and 2): a state a request."""

    def __init__(self, size: int = 256) -> None:
        with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
            shape = Mamba2StateShape.create(
                tp_world_size=1,
                intermediate_size=32,
                n_groups=1,
                num_heads=2,
                head_dim=16,
                state_size=16,
                conv_kernel=4,
            )
            state = Mamba2CacheParams(shape=shape, layers=[1, 2])
        self.requests = HybridReqToTokenPool(
            size=8, mamba_size=20, mamba_spec_state_size=8, max_context_len=256, device="cpu",
            enable_memory_saver=False, cache_params=state, mamba_layer_ids=[1, 2], enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=3,
        )  # fmt: skip
        self.pool = HybridLinearKVPool(
            size=size, dtype=torch.bfloat16, page_size=PAGE, head_num=1, head_dim=32, full_attention_layer_ids=[0, 3],
            device="cpu", mamba_pool=self.requests.mamba_pool, use_mla=True, kv_lora_rank=24, qk_rope_head_dim=8,
        )  # fmt: skip
        self.pool.layer_num = 4
        self.allocator = PagedTokenToKVPoolAllocator(
            size, PAGE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )

    def params(self, **more: Any) -> CacheInitParams:
        return super().params(
            tree_components=(ComponentType.FULL, ComponentType.MAMBA), enable_mamba_extra_buffer=True, **more
        )

    def buffers(self, indices: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(buffer, indices) for buffer in self.pool.full_kv_pool.kv_buffer]

    def states(self) -> list[torch.Tensor]:
        """Every state buffer, (layers, slots, ...)."""
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def new_state(self) -> torch.Tensor:
        """A state's slot, filled as a forward would."""
        slot: torch.Tensor = self.requests.mamba_allocator.alloc(1)
        for buffer in self.states():
            buffer[:, slot] = torch.randn(buffer[:, slot].shape).to(buffer.dtype)
        return slot

    def state(self, slot: int) -> list[torch.Tensor]:
        return [buffer[:, slot].clone() for buffer in self.states()]

    def wipe(self) -> None:
        super().wipe()
        for buffer in self.states():
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))


def key(tokens: Sequence[int], **more: Any) -> RadixKey:
    return RadixKey(array("q", tokens), **more)


def insert(
    cache: Any, tokens: Sequence[int], indices: torch.Tensor, *, state: torch.Tensor | None = None, **more: Any
) -> None:
    params = InsertParams(key=key(tokens, **more), value=indices)
    if state is not None:
        params.mamba_value = state
    cache.insert(params)


def match(cache: Any, tokens: Sequence[int], req: Any = None, **more: Any) -> Any:
    return cache.match_prefix(MatchPrefixParams(key=key(tokens, **more), req=req))


def evict_all(cache: Any, tokens: int) -> None:
    cache.evict(EvictParams(num_tokens=tokens))


def request(name: str, matched: Any = None) -> Any:
    """As much of a request as the caches look at."""
    return SimpleNamespace(
        rid=name,
        last_node=getattr(matched, "last_device_node", None),
        prefix_len=getattr(matched, "device_prefix_len", 0),
        host_hit_length=getattr(matched, "host_hit_length", 0),
        swa_host_hit_length=0,
        mamba_host_hit_length=0,
        swa_branching_seqlen=None,
        extra_key=None,
        cache_salt=None,
        session=None,
        kv=ReqKvInfo(),
    )


def load_back(cache: Any, matched: Any, req: Any) -> Any:
    return cache.init_load_back(
        InitLoadBackParams(best_match_node=matched.best_match_node, host_hit_length=matched.host_hit_length, req=req)
    )


def until(what: Callable[[], bool], tick: Callable[[], Any], seconds: float = 60.0) -> None:
    """Tick as a scheduler does until ``what`` holds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        tick()
        time.sleep(0.01)


__all__ = ["CacheRequestHandle", "UnifiedRadixCache"]
