"""The secondary tier's side of vLLM's tiering."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats


@dataclass
class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: NDArray[np.int32]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    """What a tier inherits."""

    medium: ClassVar[Medium | None] = None
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        assert primary_kv_view.strides is not None
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type
        self.locality: Locality | None = None

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        raise NotImplementedError

    def submit_store(self, job_metadata: TransferJob) -> None:
        raise NotImplementedError

    def submit_load(self, job_metadata: TransferJob) -> None:
        raise NotImplementedError

    def get_finished_jobs(self) -> Iterable[JobResult]:
        raise NotImplementedError

    def take_events(self) -> Iterable[OffloadingEvent]:
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        raise NotImplementedError

    def on_request_finished(self, req_context: ReqContext) -> None:
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        return

    def drain_jobs(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        return

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {}

    def get_stats(self) -> OffloadingConnectorStats | None:
        return None
