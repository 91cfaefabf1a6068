"""A small engine over the stand-in of vLLM (stubs/vllm): one request at a time, the connector's two halves, and the
calls of a model runner in their order. On the CPU, or on a GPU with its work on a stream of its own.

A page holds bytes that follow from the tokens up to its end, fresh in every engine. Whatever a forward reads is copied
out behind the waits and compared.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtransfer.tiers.keys import page_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtransfer.integrations.vllm import KVTransferConnector

BLOCK = 16
HEADS = 2


class MiniEngine:
    """``layout`` of the pool: strides of block, layer and token, as vLLM's names have them: "BLNHC" or "LBHNC"."""

    def __init__(
        self,
        *,
        layerwise: bool = True,
        layout: str = "BLNHC",
        layers: int = 3,
        width: int = 24,
        num_blocks: int = 32,
        host_pages: int = 64,
        device: str = "cpu",
        settings: dict[str, Any] | None = None,
        policy: str = "recompute",
        unhooked: Sequence[int] = (),
        busy_ms: float | None = None,
    ) -> None:
        from vllm.config import KVEventsConfig, ModelConfig, VllmConfig
        from vllm.config.kv_transfer import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from kvtransfer.integrations.vllm import KVTransferConnector

        extents = {"L": layers, "B": num_blocks, "H": HEADS, "N": BLOCK, "C": width}
        strides, step = {}, 1
        for axis in reversed(layout):
            strides[axis], step = step, step * extents[axis]
        self.raw = torch.zeros(step, dtype=torch.uint8, device=device)
        shape, stride = [extents[a] for a in "BHNC"], [strides[a] for a in "BHNC"]
        names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.views = {n: self.raw.as_strided(shape, stride, i * strides["L"]) for i, n in enumerate(names)}
        self.unhooked, self.busy_ms = set(unhooked), busy_ms
        self.page_bytes = HEADS * BLOCK * width  # of a layer
        self.seed = secrets.token_bytes(8)
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        given = {"kv_dtype": "int8", "prefetch": {"min_tokens": 0, "stop": "wait_complete"}, **(settings or {})}
        given["tiers"] = {"host": {"pages": host_pages}, **given.get("tiers", {})}
        transfer = KVTransferConfig(
            "KVTransferConnector",
            "kv_both",
            {"layerwise": layerwise, "settings": given},
            "kvtransfer.integrations.vllm",
            policy,
        )
        config = VllmConfig(
            ModelConfig("org/model"), kv_transfer_config=transfer, kv_events_config=KVEventsConfig(True)
        )
        spec = KVCacheConfig(num_blocks, [KVCacheGroupSpec(names, FullAttentionSpec(BLOCK))])
        self.config, self.kv_cache_config = config, spec
        self.scheduler: KVTransferConnector = KVTransferConnector(config, KVConnectorRole.SCHEDULER, spec)
        self.worker: KVTransferConnector = KVTransferConnector(config, KVConnectorRole.WORKER, spec)
        with self.on_stream():
            self.worker.register_kv_caches(self.views)
        told = self.worker.get_handshake_metadata()
        assert told is not None
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        self.pool = BlockPool(num_blocks)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.received: set[str] = set()
        self.failed: set[int] = set()
        self.blocks: dict[str, list[int]] = {}
        self.got: dict[str, list[torch.Tensor]] = {}
        self.there: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # what to write, and where, on the device
        self.counts: dict[str, float] = {}
        self.number = 0

    def on_stream(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def pages(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the whole pages of ``tokens`` hold: uint8 ``[pages, layers, page_bytes]``."""
        size = len(self.views) * self.page_bytes
        rows = [
            np.random.default_rng(int.from_bytes(self.seed + key[:8], "little")).integers(0, 256, size, dtype=np.uint8)
            for key in page_keys(list(tokens), BLOCK)
        ]
        return torch.from_numpy(np.array(rows, dtype=np.uint8).reshape(-1, len(self.views), self.page_bytes))

    def request(self, tokens: Sequence[int]) -> Request:
        from vllm.v1.request import Request

        self.number += 1
        request = Request(f"r{self.number}", list(tokens), None, None)
        request.block_hashes = page_keys(list(tokens), BLOCK)
        self.scheduler.on_new_request(request)
        return request

    def step(self, request: Request | None = None, *, sync_loads: bool = False) -> None:
        """One step, with or without a forward: the calls of vLLM's runner."""
        from vllm.forward_context import ForwardContext
        from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
        from vllm.v1.outputs import KVConnectorOutput

        scheduled: dict[str, int] = {}
        if request is not None:
            scheduled[request.request_id] = request.num_tokens - request.num_computed_tokens
        state = KVConnectorBlockState(set(scheduled), lambda request_id: (self.blocks[request_id],))
        output = SchedulerOutput(scheduled, has_sync_kv_loads=sync_loads, kv_connector_block_state=state)
        metadata = self.scheduler.build_connector_meta(output)
        with self.on_stream():
            self.worker.handle_preemptions(metadata)
            self.worker.bind_connector_metadata(metadata)
            if request is not None:
                self.disturb(request, sync_loads)
            if sync_loads:
                self.worker.start_load_kv(ForwardContext())
            if request is not None:
                self.forward(request)
            self.worker.finish_forward()
            if not sync_loads:
                self.worker.start_load_kv(ForwardContext())
            self.worker.wait_for_save()
        _, received = self.worker.get_finished(set())
        failed = self.worker.get_block_ids_with_load_errors()
        for half in (self.worker, self.scheduler):
            stats = half.get_kv_connector_stats()
            for name, value in (stats.data if stats is not None else {}).items():
                self.counts[name] = self.counts.get(name, 0) + value
        answers = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.received |= received or set()
        self.failed |= failed
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=answers))

    def idle(self) -> None:
        """A step without a forward. It leaves the GIL to the threads that it waits for: without that, each hand-over
        takes an interpreter's switch interval."""
        self.step()
        time.sleep(0.0005)

    def disturb(self, request: Request, sync_loads: bool) -> None:
        """Work that is queued before the step's loads begin: other bytes into the blocks that are free, and into those
        that this step is to load; then nothing for a while. On a GPU nothing behind this waits for it on the host."""
        want = self.pages(request.all_token_ids)
        ids = torch.tensor(self.blocks[request.request_id][: len(want)], dtype=torch.long)
        self.there[request.request_id] = want.to(self.raw.device), ids.to(self.raw.device)
        if self.busy_ms is not None:
            fill = secrets.randbelow(256)
            to_load = self.blocks[request.request_id] if sync_loads else []
            free = torch.tensor([*self.pool._free, *to_load], device=self.raw.device)
            for view in self.views.values():
                view[free] = fill
            if self.stream is not None:
                torch.cuda._sleep(int(self.busy_ms * 1_900_000))  # cycles

    def forward(self, request: Request) -> None:
        """Layer by layer: write what is new, wait, copy out all that is there, say that it is written."""
        from vllm.v1.attention.backend import AttentionMetadata

        want, ids = self.there.pop(request.request_id)
        first, stop = request.num_computed_tokens // BLOCK, len(want)
        got = self.got[request.request_id] = []
        for layer, (name, view) in enumerate(self.views.items()):
            tokens = view.permute(0, 2, 1, 3)
            tokens[ids[first:]] = want[first:, layer].view(-1, BLOCK, HEADS, view.shape[3])
            if layer not in self.unhooked:
                self.worker.wait_for_layer_load(name)
            got.append(tokens[ids].reshape(stop, self.page_bytes))
            if layer not in self.unhooked:
                self.worker.save_kv_layer(name, view, AttentionMetadata())

    def begin(self, request: Request) -> tuple[int, bool]:
        """Ask, allocate, and begin to load. How many tokens are loaded, and whether beside the steps."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks

        while (asked := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            self.idle()
        external, beside = asked
        assert external is not None
        count = -(-request.num_tokens // BLOCK)
        while self.pool.get_num_free_blocks() < count:
            self.idle()
        blocks = self.pool.get_new_blocks(count)
        self.blocks[request.request_id] = [block.block_id for block in blocks]
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), external)
        return external, beside

    def run(self, tokens: Sequence[int]) -> int:
        """A request from its arrival to its end; every page that its forward read must be right. Returns the number of
        tokens that were loaded and used."""
        request = self.request(tokens)
        external, beside = self.begin(request)
        if beside:
            while request.request_id not in self.received:
                self.idle()
            external = self.usable(request, external)
        request.num_computed_tokens = external
        self.step(request, sync_loads=external > 0 and not beside)
        if (usable := self.usable(request, external)) < external:  # computed again, from there on
            request.num_computed_tokens = external = usable
            self.step(request)
        self.check(request)
        self.end(request)
        return external

    def usable(self, request: Request, external: int) -> int:
        """Tokens before the first block that failed."""
        blocks = self.blocks[request.request_id][: external // BLOCK]
        failed, self.failed = self.failed, set()
        return next((at * BLOCK for at, block in enumerate(blocks) if block in failed), external)

    def check(self, request: Request) -> None:
        """Every byte that the request's forward read was right."""
        want = self.pages(request.all_token_ids)
        if self.stream is not None:
            self.stream.synchronize()
        for layer, got in enumerate(self.got.pop(request.request_id)):
            wrong = (got.cpu() != want[:, layer]).any(dim=1).nonzero().flatten().tolist()
            assert not wrong, f"layer {layer}: pages {wrong} of {len(want)}"

    def end(self, request: Request) -> None:
        """The request is through; its blocks are free as far as it is concerned."""
        blocks = self.blocks.pop(request.request_id)
        told = self.scheduler.request_finished_all_groups(request, (blocks,))
        assert told == (False, None)
        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])

    def settle(self) -> None:
        """Steps until no block is held."""
        while self.scheduler.has_pending_push_work():
            self.idle()

    def close(self) -> None:
        self.worker.shutdown()
