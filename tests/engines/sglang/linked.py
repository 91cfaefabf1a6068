"""An engine on a CPU whose prefix cache, SGLang's own, has our linker; and what a scheduler does with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engines.sglang import caches, helpers
from engines.sglang.caches import Engine, SlidingEngine, StateEngine
from sglang.srt.mem_cache import registry

PAGES = {"tiers": {"host": {"pages": 64, "pin": False}}}


class Worker:
    """As much of SGLang's worker as the linker's construction asks."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(forward_stream=None)
        self.counter: Any = None

    def register_hicache_layer_transfer_counter(self, counter: Any) -> None:
        self.counter = counter


class Linked:
    """An engine whose prefix cache has our linker."""

    def __init__(
        self,
        settings: dict[str, Any] = PAGES,
        *,
        engine: Engine | None = None,
        radix_backend: str | None = None,
        **params: Any,
    ) -> None:
        linker = {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "KVTransferLinker",
                "linker_module_path": helpers.MODULE,
                "linker_extra_config": {"settings": settings},
            },
        }
        chosen = linker if radix_backend is None else {"radix_cache_backend": radix_backend}
        arguments = helpers.publish(page_size=caches.PAGE, **chosen)
        self.engine = Engine(helpers.mha_pool()) if engine is None else engine
        self.worker = Worker()
        context = registry.TreeCacheBuildContext(
            server_args=arguments, params=self.engine.params(**params),
            is_hybrid_swa=isinstance(engine, SlidingEngine), is_hybrid_ssm=isinstance(engine, StateEngine),
            enable_hierarchical_cache=False, disable_radix_cache=False, tp_worker=self.worker, model_config=None,
            tp_size=1, tp_rank=0, tp_group=None,
        )  # fmt: skip
        self.cache = registry.create_tree_cache(context)
        self.linker = self.cache.linker.cache_linker
        if radix_backend is None:
            assert self.engine.pool.layer_transfer_counter is self.worker.counter is self.linker.layer_done_counter

    def run(self, tokens: list[int], **more: Any) -> list[torch.Tensor]:
        """A request of ``tokens``; its KV once the linker has acknowledged it."""
        indices = self.engine.forward(len(tokens))
        rows = self.engine.rows(indices)
        caches.insert(self.cache, tokens, indices, **more)
        self.settle()
        return rows

    def settle(self) -> None:
        caches.until(lambda: not self.cache.linker.pending_offloads, self.cache.check_hicache_events)

    def evict(self) -> None:
        """Everything leaves the device, and other bytes are there."""
        caches.evict_all(self.cache, self.engine.pool.size)
        self.engine.wipe()

    def ask(self, name: str, tokens: list[int], **more: Any) -> tuple[Any, Any]:
        """Match as a waiting request does."""
        req = caches.request(name)
        found = caches.match(self.cache, tokens, req=req, **more)
        req.last_node, req.prefix_len = found.last_device_node, found.device_prefix_len
        return found, req

    def begin(self, name: str, tokens: list[int], **more: Any) -> int:
        """Admit it: queue its load; how many tokens it brings."""
        found, req = self.ask(name, tokens, **more)
        if not found.host_hit_length:
            return 0
        return int(caches.load_back(self.cache, found, req)[0])

    def forward(self) -> None:
        """Launch the forward of what was admitted: every layer's buffers are asked for, in order."""
        self.worker.counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(self.engine.pool.layer_num):
            self.engine.pool.get_kv_buffer(layer)

    def load(self, name: str, tokens: list[int], **more: Any) -> list[torch.Tensor] | None:
        """All of a request's load: its rows, None where the linker reports a failure."""
        if not self.begin(name, tokens, **more):
            return []
        slots = self.cache.linker.private_load_indices[name]
        self.forward()
        failed = self.cache.linker.finish_loads()
        rows = self.engine.rows(slots)
        self.engine.allocator.free(slots)
        assert failed in ([], [name])
        return None if failed else rows


def some(count: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 2**31, (count,)).tolist()
    return tokens


def equal(got: list[torch.Tensor] | None, expected: list[torch.Tensor]) -> bool:
    return got is not None and all(helpers.same(a, b) for a, b in zip(got, expected, strict=True))
