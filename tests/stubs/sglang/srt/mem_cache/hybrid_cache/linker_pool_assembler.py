"""Stand-in for how SGLang describes device pools to a linker. tests/engines checks it against the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer


class DevicePoolEntry:
    def __init__(
        self,
        *,
        name: PoolName,
        indices_from_pool: PoolName,
        device_pool: Any,
        components: Sequence[Sequence[torch.Tensor]],
        layer_mapping: dict[int, Any],
        page_size: int,
        rows_are_pages: bool,
        packed: bool = True,
        index_mapper: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.name, self.indices_from_pool = name, indices_from_pool
        self.components = [list(buffers) for buffers in components]
        self.layer_mapping, self.page_size = layer_mapping, page_size
        self.kv_buffer = [buffer for buffers in self.components for buffer in buffers]
        self._row_span = 1 if rows_are_pages else page_size
        self._row_count = min(buffer.shape[0] for buffer in self.kv_buffer)


class DevicePoolGroup:
    def __init__(
        self,
        entries: Sequence[DevicePoolEntry],
        num_layers: int,
        page_size: int,
        *,
        rank_replicated: bool = False,
    ) -> None:
        self.entries = list(entries)
        self.entry_map = {entry.name: entry for entry in entries}
        self.num_layers, self.rank_replicated = num_layers, rank_replicated

    def resolve_transfers(
        self, transfers: list[PoolTransfer], *, allow_partial: bool = False, allow_missing_kv: bool = False
    ) -> list[PoolTransfer]:
        given = {transfer.name: transfer for transfer in transfers if transfer.keys}
        sources = [(entry.name, given.get(entry.indices_from_pool)) for entry in self.entries]
        if not allow_partial and any(source is None for _, source in sources):
            return []
        return [replace(source, name=name, host_indices=source.device_indices) for name, source in sources if source]


def resolve_hybrid_device_pool_group(
    *, kvcache: Any, page_size: int, params: Any, components: set[Any]
) -> DevicePoolGroup:
    raise ValueError(f"no such model here: {type(kvcache).__name__}")
