"""Stand-in for the protocol between SGLang's prefix cache and a linker; tests/engines checks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolTransfer


class UnifiedCacheLinker(ABC):
    layer_done_counter: object
    pools: dict[Any, Any]
    forward_stream: Any = None

    @abstractmethod
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]: ...

    @abstractmethod
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool: ...

    @abstractmethod
    def start_layer_wise_loading(self) -> int: ...

    @abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...

    @abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...

    @abstractmethod
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool: ...

    @abstractmethod
    def num_completed_offloads(self) -> int: ...

    @abstractmethod
    def pop_completed_offload(self) -> bool: ...

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
