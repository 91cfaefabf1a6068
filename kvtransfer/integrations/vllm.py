"""KVTransferConnector: kvtransfer inside vLLM, as a KV connector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTransferConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtransfer.integrations.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"settings": {"tiers": {"host": {"cache_gb": 64}}}}}'

vLLM makes it once in its scheduler and once in each worker. The scheduler's half decides (vllm_scheduler.py), the
workers' halves move (vllm_worker.py); what they tell each other travels with each step. docs/vllm.md has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtransfer.integrations.vllm_facts import EngineFacts, Options
from kvtransfer.integrations.vllm_layout import WANTED_LAYOUT
from kvtransfer.integrations.vllm_messages import StepAnswers, StepMetadata, WorkerFacts
from kvtransfer.integrations.vllm_metrics import PromMetrics, Stats
from kvtransfer.integrations.vllm_scheduler import SchedulerHalf
from kvtransfer.integrations.vllm_worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


class KVTransferConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Options are those of `vllm_facts.Options`. Raises ConfigError for what it does not serve."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.of(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if not options.config.enabled:
            logger.warning("kvtransfer: enabled is false: nothing is kept or loaded")
            return
        facts = EngineFacts.of(vllm_config, kv_cache_config, options.config)
        if role is KVConnectorRole.SCHEDULER:
            wanted = vllm_config.kv_events_config
            events = wanted is not None and wanted.enable_kv_cache_events
            self._scheduler = SchedulerHalf(options.config, facts, layerwise=options.layerwise, events=events)
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kvtransfer: kv_load_failure_policy is %r: a page that can't be read will fail its request; "
                    'set it to "recompute"',
                    self._kv_transfer_config.kv_load_failure_policy,
                )
        else:
            self._worker = WorkerHalf(options.config, facts)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not kept is computed again."""
        return False

    # --- the worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV memory is there."""
        if self._worker is not None:
            self._worker.register(kv_caches)
            self._registered = kv_caches

    def unregister_kv_caches(self) -> None:
        """The engine goes to sleep: everything that is kept in host memory goes."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """It woke up."""
        if self._worker is not None and self._worker.told() is None:
            self._worker.register(self._registered)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's half must know of this worker's memory."""
        return None if self._worker is None else self._worker.told()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads, and what is to be moved between tiers."""
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Have the current stream wait until the layer is there."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: stores begin when the forward has been launched (`wait_for_save`), for whole pages at once."""

    def wait_for_save(self) -> None:
        """Begin this step's stores. Does not wait: their blocks are held until they are answered."""
        if self._worker is not None:
            self._worker.end_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous load is over. Blocks under a store are held otherwise: `bind_gpu_block_pool`."""
        received = self._step().received if self._worker is not None and self.has_connector_metadata() else None
        return None, set(received) if received else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that this step's loads, or asynchronous ones that it reports, did not fill."""
        if self._worker is None:
            return set()
        told = self._step().failed_blocks if self.has_connector_metadata() else set()
        return self._worker.failed_blocks() | told

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What became of the scheduler half's commands."""
        return None if self._worker is None else self._worker.take_answers()

    def shutdown(self) -> None:
        """Finish what is under way; close the tiers, and let go of the memory."""
        if self._worker is not None:
            self._worker.unregister()

    # --- the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The workers' memory is there."""
        if self._scheduler is not None:
            self._scheduler.start([facts for _, facts in sorted(metadata.items()) if isinstance(facts, WorkerFacts)])

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Where blocks are held while they are stored."""
        if self._scheduler is not None:
            self._scheduler.hold_in(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """A request has come."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What can be loaded behind the tokens that vLLM has itself."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Which of the loaded tokens came from host memory, and which from below it."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        fetched = min(num_external_tokens, self._scheduler.fetched_tokens(request))
        told = {CacheHitSource.HOST: num_external_tokens - fetched, CacheHitSource.DISK: fetched}
        return {source: tokens for source, tokens in told.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do in this step."""
        return StepMetadata() if self._scheduler is None else self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have answered."""
        answers = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(answers, StepAnswers):
            self._scheduler.answered(answers)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Its blocks may be freed: those of stores under way are held by a reference of ours."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed, with or without requests: answers of stores bring blocks back."""
        return self._scheduler is not None and self._scheduler.holds_blocks

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for stores is better than preempting a request."""
        return self._scheduler is not None and self._scheduler.holds_blocks

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What has come into host memory since the last call."""
        return () if self._scheduler is None else self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """Nothing that was kept before is found from now on."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- both, and the class

    def get_kv_connector_stats(self) -> Stats | None:
        """Counted by this half since the last call."""
        half = self._worker or self._scheduler
        counts = {} if half is None else half.take_counts()
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """The same from what was sent."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Counters for Prometheus."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Blocks outermost: a page of all layers is then one piece, here and there."""
        return WANTED_LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers wait in Python, between the pieces of a graph; a full graph would skip that."""
        return Options.of(extra_config).layerwise

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
