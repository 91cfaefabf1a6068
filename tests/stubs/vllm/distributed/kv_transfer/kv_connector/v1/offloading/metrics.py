"""Counters of offloading, by their labels."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class OffloadingConnectorStats(KVConnectorStats):
    def is_empty(self) -> bool:
        return not self.data

    def increase_counter(
        self, counter_name: str, counter_increase_value: int | float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        counts = self.data.setdefault(counter_name, {})
        counts[labelvalues] = counts.get(labelvalues, 0) + counter_increase_value
