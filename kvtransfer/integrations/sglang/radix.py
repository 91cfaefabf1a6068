"""``--radix-cache-backend kvtransfer``: SGLang's own radix tree, with kvtransfer's host memory and tiers behind it.

For engines whose scheduler does not know of a linker. The tree polls where the scheduler does not tick, and a load is
over when its request is admitted: it has landed and verifies, or the request computes its prompt. What overlaps loads
with the forward is the linker (linker.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvtransfer.integrations.sglang.linker import KVTransferLinker

NAME = "kvtransfer"


class WholeLinker(KVTransferLinker):
    """A linker whose loads are over when `load` returns."""

    def __init__(self, server_args: Any, params: Any, **more: Any) -> None:
        super().__init__(server_args, params, **more)
        attention = [params.attn_cp_cache_group, params.attn_tp_cache_group]  # as SGLang's tree agrees with others
        self._groups = _of_several(attention) or _of_several([params.tp_cache_group])

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Bring all pages, wait for them, and verify. False, on every rank, where they are not all there on one: SGLang
        frees the pages then."""
        if not super().load(rid, transfers):
            return False
        landed = super().finish_layer_wise_loading(super().start_layer_wise_loading())
        return self._agreed(landed)

    def start_layer_wise_loading(self) -> int:
        """Nothing is left to start."""
        return -1

    def _agreed(self, landed: bool) -> bool:
        told = torch.tensor([int(landed)])
        for group in self._groups:
            torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(told.item())


def _of_several(groups: Sequence[Any]) -> list[Any]:
    """Those groups that have more than one rank."""
    return [g for g in groups if g is not None and torch.distributed.get_world_size(group=g) > 1]


class KVTransferRadixCache(UnifiedRadixCache):
    """See the module. Made by `create`."""

    scheduler_ticks = False

    def match_prefix(self, params: Any) -> Any:
        self._poll()
        return super().match_prefix(params)

    def evict(self, params: Any) -> Any:
        self._poll()
        return super().evict(params)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Keep what of the request's KV is committed: not the last sampled token, nor drafts that may be rejected."""
        self._poll()
        self._own(req.rid)
        super().checkpoint(req, up_to=min(up_to, req.kv.kv_committed_len), **kwargs)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self._own(req.rid)
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: Any) -> None:
        self._own(request.rid)
        super().release_aborted_request(request)

    def _poll(self) -> None:
        """What a scheduler's tick does, where there is none: acknowledge offloads, so that their pages can be evicted.
        Ranks call this in step, as they do everything that leads here."""
        if not self.scheduler_ticks and self.linker is not None and not self.tree_core.has_ongoing_insert():
            self.check_hicache_events()

    def _own(self, rid: str) -> None:
        """The loaded pages of a request are as good as computed ones from now on."""
        if self.linker is not None:
            self.linker.private_load_indices.pop(rid, None)
            if rid in self.linker.inflight_load_rids:
                self.linker.inflight_load_rids.remove(rid)


def create(context: Any) -> KVTransferRadixCache:
    """The factory that SGLang's registry calls in each scheduler process.

    With ``--enable-hierarchical-cache`` the scheduler ticks; host memory is kvtransfer's all the same. The
    configuration is the file that KVTRANSFER_CONFIG names.
    """
    ticks = bool(context.enable_hierarchical_cache)
    context = replace(context, enable_hierarchical_cache=False)
    cache: KVTransferRadixCache = create_unified_radix_cache(context, cache_class=KVTransferRadixCache)
    worker = context.tp_worker
    linker = WholeLinker(
        context.server_args,
        context.params,
        components=set(cache.components),
        forward_stream=getattr(getattr(worker, "model_runner", None), "forward_stream", None),
    )
    cache.init_cache_linker(linker)
    cache.scheduler_ticks = ticks
    return cache


def register() -> None:
    """Make the name known to SGLang. Does nothing the second time."""
    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, create)
