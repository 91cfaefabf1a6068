"""An engine with the names and the call order of SGLang, and the linker over its pool: for tests without SGLang."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvtransfer.integrations.sglang import KVTransferLinker

PAGE, LAYERS = 4, 3
Component = enum.Enum("Component", "FULL C128")


class Engine:
    """A device pool, and the linker over it."""

    def __init__(self, device: str = "cpu", stream: Any = None, pages: int = 64, **settings: Any) -> None:
        self.pool = MHATokenToKVPool(PAGE * 32, PAGE, torch.float16, 2, 24, LAYERS, device)
        settings = {"tiers": {"host": {"pages": pages, **({"pin": False} if device == "cpu" else {})}}, **settings}
        self.params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool),
            page_size=PAGE, attn_tp_cache_group=None, tp_cache_group=None, pp_rank=0, pp_size=1, attn_cp_rank=0,
            attn_cp_size=1, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
        )  # fmt: skip
        self.linker = KVTransferLinker(
            None, self.params, components={Component["FULL"]}, extra_config={"settings": settings},
            forward_stream=stream,
        )  # fmt: skip
        self.counter = self.linker.layer_done_counter

    def transfer(self, keys: list[str], pages: list[int] | None = None) -> list[PoolTransfer]:
        """Of these pages, by SGLang's token indices."""
        indices = None
        if pages is not None:
            starts = torch.tensor(pages, dtype=torch.int64)[:, None] * PAGE
            indices = (starts + torch.arange(PAGE)).reshape(-1).to(self.pool.k_buffer[0].device)
        return [PoolTransfer(PoolName.KV, keys=keys, device_indices=indices)]

    def rows(self, pages: list[int]) -> torch.Tensor:
        """All bytes of these pages, a copy on the CPU: uint8 [pages, bytes]."""
        found = []
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            found.append(buffer.view(-1, PAGE * 2 * 24)[pages].contiguous().view(torch.uint8))
        return torch.cat(found, dim=1).cpu()

    def fill(self, pages: list[int]) -> torch.Tensor:
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.view(-1, PAGE * 2 * 24)[pages] = torch.randn(len(pages), PAGE * 2 * 24).to(buffer)
        return self.rows(pages)

    def offload(self, keys: list[str], pages: list[int]) -> bool:
        assert self.linker.offload(self.transfer(keys, pages))
        until(lambda: self.linker.num_completed_offloads() == 1)
        return self.linker.pop_completed_offload()

    def load(self, name: str, keys: list[str], pages: list[int]) -> bool:
        assert self.linker.load(name, self.transfer(keys, pages))
        index = self.linker.start_layer_wise_loading()
        self.counter.set_consumer(index)
        for layer in range(LAYERS):
            self.counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)


def until(what: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def hashes(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]
