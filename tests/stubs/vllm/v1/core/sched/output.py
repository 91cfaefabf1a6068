"""A step, as the scheduler has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class KVConnectorBlockState:
    req_ids: set[str]
    resolve_block_ids: Callable[[str], tuple[list[int], ...]]

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        return self.resolve_block_ids(req_id) if req_id in self.req_ids else None


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    kv_connector_block_state: KVConnectorBlockState | None = None
