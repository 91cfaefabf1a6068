"""vLLM's own scheduler, block manager, connector factory, runner hooks, attention decorator and aggregation of ranks,
around a model of ours on the CPU (vllm_model.py). What is not vLLM's: the forward pass."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_model import Sequences, expected, new_rows, prefixes, read_rows, sampled, write_rows

from kvtransfer.integrations.vllm import KVTransferConnector

BLOCK = 16
LAYERS = 3
LIMIT_S = 60.0
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 50_000,
    "max_position_embeddings": 4096,
}


def model_config(folder: Path) -> ModelConfig:
    """vLLM's configuration of a model without weights."""
    (folder / "config.json").write_text(json.dumps(TINY))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=2048, enforce_eager=True
    )


class Worker:
    """One rank: its KV memory, its half of the connector, and the forward pass in vLLM's order of calls."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank, self.engine = rank, engine
        config = copy.copy(engine.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.config = config
        self.seen = Sequences()
        self.raw = torch.zeros(engine.kv_cache_config.kv_cache_tensors[0].size, dtype=torch.int8)
        tensor = engine.kv_cache_config.kv_cache_tensors[0]
        self.views: dict[str, torch.Tensor] = dict(
            zip(
                tensor.layers,
                create_kv_cache_views(self.raw, engine.spec, engine.num_blocks, engine.layout, tensor),
                strict=True,
            )
        )
        made: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, engine.kv_cache_config)
        self.connector: KVTransferConnector = made
        with self.as_agent():
            self.active = ActiveKVConnector(config, self.views) if engine.runner == "v2" else None
            if self.active is None:
                self.connector.register_kv_caches(self.views)

    def as_agent(self) -> Any:
        """vLLM has one connector a process; here each rank has its turn."""
        worker = self

        class Agent:
            def __enter__(self) -> None:
                kv_transfer_state._KV_CONNECTOR_AGENT = worker.connector

            def __exit__(self, *_: object) -> None:
                kv_transfer_state._KV_CONNECTOR_AGENT = None

        return Agent()

    def follow(self, output: Any) -> None:
        """Take note of the step's requests, as a model runner does."""
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self.seen.tokens[new.req_id], self.seen.blocks[new.req_id] = list(tokens), list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if request in cached.resumed_req_ids:
                self.seen.blocks[request] = []
            if blocks is not None:
                self.seen.blocks[request] += blocks[0]

    def run(self, output: Any) -> tuple[dict[str, list[bytes]], Any]:
        """One step: the rows that each request's last token saw, layer by layer, and the connector's output."""
        self.follow(output)
        with self.as_agent(), set_forward_context(None, self.config):
            if self.active is not None:
                self.active.pre_forward(output)
                seen = self.forward(output)
                self.active.finish_forward()
                return seen, self.active.post_forward(output.finished_req_ids)
            with KVConnectorModelRunnerMixin._get_kv_connector_output(output) as told:
                seen = self.forward(output)
            return seen, told

    def forward(self, output: Any) -> dict[str, list[bytes]]:
        """Each layer writes its new KV, then waits, reads everything, and says that it is written."""
        if not output.num_scheduled_tokens:
            return {}
        seen: dict[str, list[bytes]] = {request: [] for request in output.num_scheduled_tokens}
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

        for layer, (name, view) in enumerate(self.views.items()):
            for request, count in output.num_scheduled_tokens.items():
                start, known = starts[request], prefixes(self.seen.tokens[request][: starts[request] + count])
                below = seen[request][-1] if layer else None
                rows = new_rows(known, start, layer, self.rank, below)
                write_rows(view, self.seen.blocks[request], start, rows)

            def attend(layer_name: str, view: torch.Tensor = view) -> None:
                for request, count in output.num_scheduled_tokens.items():
                    seen[request].append(read_rows(view, self.seen.blocks[request], starts[request] + count))

            self.engine.decorated(attend)(name)
        return seen


class Engine:
    """An engine of ``ranks`` workers. ``runner``: whose order of calls, "v1" or "v2"."""

    def __init__(
        self,
        folder: Path,
        *,
        layerwise: bool = True,
        runner: str = "v2",
        layout: str = "BLNHC",
        num_blocks: int = 64,
        host_pages: int = 200,
        ranks: int = 1,
        batch_tokens: int = 512,
        settings: dict[str, Any] | None = None,
        policy: str = "recompute",
    ) -> None:
        self.runner, self.num_blocks, self.ranks = runner, num_blocks, ranks
        self.layout = KVCacheLayout[layout]
        given = {
            "kv_dtype": "bfloat16",
            "prefetch": {"min_tokens": 0, "stop": "wait_complete"},
            **(settings or {}),
        }
        given["tiers"] = {"host": {"pages": host_pages}, **given.get("tiers", {})}
        transfer = KVTransferConfig(
            kv_connector="KVTransferConnector",
            kv_connector_module_path="kvtransfer.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"layerwise": layerwise, "settings": given},
        )
        self.config = VllmConfig(
            model_config=model_config(folder),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=batch_tokens,
                max_model_len=2048,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            kv_transfer_config=transfer,
            device_config=DeviceConfig(device="cpu"),
        )
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.parallel_config = ParallelConfig()
        self.config.parallel_config.tensor_parallel_size = ranks
        self.config.parallel_config.world_size = ranks
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        self.spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        layer_stride, block_stride, *_ = compute_layout_strides(self.spec, num_blocks, LAYERS, self.layout)
        size = num_blocks * LAYERS * self.spec.page_size_bytes
        tensor = KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[KVCacheGroupSpec(names, self.spec)],
            kv_cache_layout=layout,
        )
        self.scheduler = Scheduler(
            self.config, self.kv_cache_config, StructuredOutputManager(self.config), block_size=BLOCK, log_stats=True
        )
        self.connector: Any = self.scheduler.connector
        self.workers = [Worker(self, rank) for rank in range(ranks)]
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, worker.rank): worker.connector.get_handshake_metadata() for worker in self.workers}
        )
        self.aggregator = KVOutputAggregator(ranks)
        hashing = get_hash_fn_by_name("sha256")
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(BLOCK, hashing)
        self.requests: dict[str, Request] = {}
        self.counts: dict[str, float] = {}
        self.events: list[Any] = []
        attention.get_attention_context = lambda name: (SimpleNamespace(), None, None, None)
        self.decorated = kv_transfer_utils.maybe_transfer_kv_layer

    def add(self, request_id: str, prompt: Sequence[int], count: int, **more: Any) -> Request:
        """A request for ``count`` tokens."""
        self.requests[request_id] = Request(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=count, ignore_eos=True),
            None,
            block_hasher=self.hasher,
            **more,
        )
        self.scheduler.add_request(self.requests[request_id])
        return self.requests[request_id]

    def step(self) -> Any:
        """One step of the engine. Returns the scheduler's output."""
        output = self.scheduler.schedule()
        results = [worker.run(output) for worker in self.workers]
        requests = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request in requests:
            done = self.scheduler.requests[request].num_computed_tokens
            rows = [layer for seen, _ in results for layer in seen[request]]
            complete = done >= len(self.workers[0].seen.tokens[request])
            tokens.append([sampled(rows)] if complete else [])
        made = [
            ModelRunnerOutput(requests, {r: i for i, r in enumerate(requests)}, tokens, kv_connector_output=told)
            for _, told in results
        ]
        whole = self.aggregator.aggregate(made)
        assert whole is not None
        outputs = self.scheduler.update_from_output(output, whole)
        for request in requests:  # what was discarded, the next step does not know either
            known = self.requests[request].all_token_ids
            for worker in self.workers:
                worker.seen.tokens[request] = list(known)
        for one in outputs.values():
            stats = one.scheduler_stats
            for name, value in ((stats.kv_connector_stats or {}) if stats is not None else {}).items():
                self.counts[name] = self.counts.get(name, 0) + value
        return output

    def run(self) -> None:
        """Steps until every request is through and no block is held. Where nothing can be scheduled, what is awaited is
        given time, as vLLM's engine does: steps alone are over before anything is moved."""
        until = time.monotonic() + LIMIT_S
        while self.scheduler.has_requests():
            assert time.monotonic() < until, f"{LIMIT_S:g} s, and still {list(self.scheduler.requests)}"
            if not self.step().num_scheduled_tokens:
                time.sleep(0.001)

    def ask(self, request_id: str, prompt: Sequence[int], count: int, **more: Any) -> list[int]:
        """The tokens that a prompt is continued with, in a run of its own."""
        request = self.add(request_id, prompt, count, **more)
        self.run()
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED, request.status
        return list(request.output_token_ids)

    def right(self, prompt: Sequence[int], count: int) -> list[int]:
        """What they have to be."""
        return expected(prompt, count, LAYERS, self.ranks)

    def forget(self) -> None:
        """vLLM's own prefix cache is empty, and its pool full of other bytes."""
        assert self.scheduler.reset_prefix_cache()
        for worker in self.workers:
            worker.raw.fill_(0x55)

    def taken(self) -> dict[str, float]:
        """Counts since the last call."""
        taken, self.counts = self.counts, {}
        return taken

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
