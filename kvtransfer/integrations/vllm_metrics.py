"""What the vLLM connector counts, in vLLM's log line "KV Transfer metrics" and in its Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = MappingProxyType(
    {
        "asked_tokens": "Prompt tokens that the engine did not have and asked for.",
        "loads": "Loads begun.",
        "loaded_tokens": "Tokens whose KV was asked to be loaded.",
        "stored_tokens": "Tokens whose KV was kept, or was kept already.",
        "failed_load_pages": "Pages of loads that did not arrive, and were computed.",
        "failed_store_pages": "Pages that were not kept.",
        "load_pages": "Pages that workers loaded from host memory.",
        "load_bytes": "Bytes that workers loaded from host memory.",
        "load_seconds": "Seconds that loads took, from their start to their answer.",
        "load_failed_pages": "Pages that workers did not load.",
        "store_pages": "Pages that workers stored to host memory.",
        "store_bytes": "Bytes that workers stored to host memory.",
        "store_seconds": "Seconds that stores took, from their start to their answer.",
        "store_failed_pages": "Pages that workers did not store.",
    }
)
PREFIX = "vllm:kvtransfer_"


@dataclass
class Stats(KVConnectorStats):
    """Counts by name (`COUNTERS`), since the last time they were taken."""

    def reset(self) -> None:
        """Nothing was counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Of both: ranks and halves count different things, or their own part of the same."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: every count, and the rates that follow."""
        told: dict[str, int | float] = {name: round(self.data[name], 4) for name in COUNTERS if name in self.data}
        for kind in ("load", "store"):
            seconds = self.data.get(f"{kind}_seconds", 0)
            if seconds > 0:
                told[f"{kind}_gbps"] = round(self.data.get(f"{kind}_bytes", 0) / seconds / 1e9, 3)
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each of `COUNTERS`, with vLLM's labels of the engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._counters = {
            (engine, name): counter.labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for name, counter in made.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted."""
        for name, value in transfer_stats_data.items():
            if (counter := self._counters.get((engine_idx, name))) is not None:
                counter.inc(value)
