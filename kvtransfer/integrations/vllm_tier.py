"""KVTransferTier: one of our tiers (disk, Redis, Mooncake, object store ...) below vLLM's own host cache.

For vLLM's ``TieringOffloadingSpec``, in ``--kv-transfer-config``:

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
        "secondary_tiers": [{"type": "KVTransferTier", "module_path": "kvtransfer.integrations.vllm_tier",
                             "tier": "disk", "settings": {"tiers": {"disk": {"paths": ["/nvme"], "cache_gb": 500}}}}]}}

vLLM moves chunks between the GPU and its host memory, and calls the tier in its scheduler's process to move them on.
A chunk is all layers of all workers of a few blocks; it goes to the tier as it lies, without a copy. This door passes
hashes, not tokens, so records hold none: docs/reliability.md says what they rest on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtransfer.config import Config, load_config
from kvtransfer.integrations.chunks import ChunkStore, chunk_spec, namespace_digest
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tier_build import TierMaker
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place

PAGES = "vllm:kvtransfer_tier_pages"
STATUS_LABEL, DIRECTION_LABEL, TIER_LABEL = "status", "direction", "tier"
logger = init_logger(f"vllm.{__name__}")


class KVTransferTier(SecondaryTierManager):
    """A tier of kvtransfer as a secondary tier of vLLM. Called under the tiering manager's lock; never waits, but in
    `drain_jobs` and `shutdown`.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: vLLM's.
        tier: which of the configured tiers, by its name; its kind too, unless the settings say otherwise.
        config: a configuration file of kvtransfer (docs/configuration.md).
        settings: what such a file would hold; goes before it.
        model: fingerprint of the weights; vLLM's name of the model unless given here or in ``namespace.model``.
        lookup_s: a lookup that the tier does not answer in this time is a miss.
        enable_kv_events: publish what is stored here, where vLLM publishes events at all.
        locality: "LOCAL" or "REMOTE", for those events; unless given, LOCAL for tiers of this process alone.

    A page that fails is one that is not there: the others of its job are kept. Raises ConfigError on settings that
    don't fit.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        tier: str,
        config: str | None = None,
        settings: Mapping[str, Any] | None = None,
        model: str | None = None,
        lookup_s: float = 1.0,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not lookup_s > 0:
            raise ConfigError(f"lookup_s: expected seconds above 0, got {lookup_s}")
        rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(-1, self.block_size_bytes)
        ours = load_config(config, arguments=dict(settings or {}))
        facts = content_facts(offloading_spec, self.block_size_bytes, model or ours.namespace.model)
        namespace = namespace_digest(facts)
        made = _make(ours, tier, offloading_spec, self.block_size_bytes, namespace)
        try:
            self._store = ChunkStore(
                made,
                rows,
                namespace=namespace,
                salt=ours.namespace.salt_bytes(),
                layout_id="vllm_chunk",
                deadline_s=ours.deadline_s,
                lookup_s=lookup_s,
            )
            self.locality = Locality(locality or ("REMOTE" if made.shared else "LOCAL"))
        except BaseException:
            made.close(drain=False)
            raise
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._stats = OffloadingConnectorStats()
        logger.info(
            "kvtransfer: tier %s (%s) below %d chunks of %d bytes, namespace %s",
            made.name,
            type(made).__name__,
            len(rows),
            self.block_size_bytes,
            namespace.hex()[:16],
        )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while the tier is being asked, which happens once a step for all keys together."""
        known = self._store.lookup(key, req_context.req_id)
        if known is None:
            return LookupResult.RETRY
        return LookupResult.HIT if known else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write the job's chunks."""
        self._store.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read the job's chunks."""
        self._store.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, with what arrived of them."""
        results = []
        for job in self._store.finished():
            good = [OffloadKey(key) for key, ok in zip(job.keys, job.ok, strict=True) if ok]
            direction = "load" if job.is_load else "store"
            for status, pages in job.statuses.items():
                self._stats.increase_counter(PAGES, pages, (self.tier_type, direction, status.value))
            if job.error is not None:
                logger.warning_once(
                    "kvtransfer: tier %s: %s: %s", self._store.tier.name, direction, f"{job.error}"[:500]
                )
            if good and not job.is_load and self._events is not None:
                self._events.append(OffloadingEvent(good, self.medium, removed=False, locality=self.locality))
            results.append(
                JobResult(
                    job.id,
                    success=len(good) == len(job.keys),
                    successful_keys=tuple(good) if job.is_load and good else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(good) * self.block_size_bytes,
                )
            )
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored since the last call."""
        if self._events:
            taken, self._events = self._events, []
            yield from taken

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Only what is computed anew need be stored: the rest is here, or was given up."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """What lookups said for this request is forgotten."""
        self._store.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the tier for all keys of this step's lookups."""
        self._store.flush()

    def drain_jobs(self) -> None:
        """Wait for every job. Each ends by its deadline, unless a device holds its memory."""
        self._store.drain()

    def shutdown(self) -> None:
        """Finish what is under way and close the tier; vLLM's memory is let go of."""
        self._store.close()
        gc.collect()  # errors and the frames they came from hold each other, and the memory that vLLM is to unmap

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The counter of pages by what became of them."""
        labels = (TIER_LABEL, DIRECTION_LABEL, STATUS_LABEL)
        return {PAGES: OffloadingCounterMetadata("Chunks moved by kvtransfer's tier, by outcome.", labels)}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counted since the last call."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken


def content_facts(spec: OffloadingSpec, chunk_bytes: int, model: str | None) -> Mapping[str, object]:
    """All that must be equal for two chunks of one key to hold the same bytes.

    vLLM's keys are digests over the tokens and what came before, adapters and salts included; the rest is here. How
    many ranks share a chunk does not matter where vLLM says that the bytes don't depend on it.
    """
    given = spec.config
    parallel = given.parallel
    ranks: object = "any"
    if not (parallel.is_parallelism_agnostic or given.replicated_layout):
        ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    return {
        "engine": "vllm",
        "model": model or given.model.name,
        "kv_dtype": given.model.dtype,
        "groups": [(group.tokens_per_block, tuple(group.layer_names)) for group in given.groups],
        "tokens_per_hash": given.cache.tokens_per_hash,
        "blocks_per_chunk": spec.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "layout": (given.kv_cache_layout, given.canonical_layout, given.replicated_layout),
        "ranks": ranks,
    }


def _make(config: Config, name: str, spec: OffloadingSpec, chunk_bytes: int, namespace: bytes) -> Tier:
    """The configured tier of this name. Disks get a folder for each replica of the engine."""
    options = config.tiers.get(name)
    if options is None or name == "host":
        known = ", ".join(config.lower_tiers) or "none"
        raise ConfigError(f"tier: expected one of the configured tiers below the host ({known}), got {name!r}")
    parallel = spec.config.parallel
    maker = TierMaker(
        chunk_spec(chunk_bytes),
        namespace,
        Place(instance=config.instance, dp=parallel.data_parallel_index),
        config.instances * max(1, parallel.data_parallel_size),
    )
    return maker(name, options)
