"""KVTransferLinker: SGLang's device pools straight to kvtransfer's host memory and the tiers below.

``--unified-cache-external-linker-backend dynamic``. SGLang keeps no host copy then: what leaves its device pools is
here, page by page under SGLang's hash (which covers tenant and adapter), and comes back layer by layer while the
forward runs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvtransfer.integrations.sglang.hit_policies import restorable_lengths
from kvtransfer.integrations.sglang.layer_counter import LayerCounter
from kvtransfer.integrations.sglang.linked_pools import LinkedPools
from kvtransfer.integrations.sglang.load_batch import LoadBatch, PoolLoad
from kvtransfer.integrations.sglang.offloads import Offloads, Pages
from kvtransfer.integrations.sglang.settings import read_settings
from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.errors import ConfigError

logger = logging.getLogger(__name__)


class KVTransferLinker(UnifiedCacheLinker):
    """See the module. SGLang makes one in each scheduler process and calls it from its scheduler thread.

    Raises ConfigError at start for a configuration, a model or a component that it can't serve.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self._config = read_settings(extra_config)
        self._pools = LinkedPools(self._config, params, components, forward_stream)
        self.pools = self._pools.by_name
        self.layer_done_counter = LayerCounter(self._pools.num_layers)
        self._deadline_s = self._config.deadline_s
        self._pending: dict[str, list[PoolLoad]] = {}
        self._offloads = Offloads()
        self._starting = ThreadPoolExecutor(1, "kvtransfer-starts")
        self._closed = False
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    # --- hits

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every prefix length in pages that this rank can restore. Looks into memory; of tiers that have to be asked
        it uses what is known, and asks the rest in the background: the next pass finds it."""
        wanted = self._pools.resolve(transfers)
        kv = next((keys for pool, _, keys in wanted if pool.name == PoolName.KV.value), None)
        if not kv:
            return []
        lengths: set[int] | None = None
        for pool, transfer, _ in wanted:
            there = pool.find(kv)
            good = restorable_lengths(transfer, there)
            lengths = good if lengths is None else lengths & good
            if not lengths:
                return []
        return sorted(lengths or ())

    # --- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load; what lies in lower tiers begins to come. False if the transfers name no pages.

        Where something is gone meanwhile the load is queued all the same and fails when it is finished: ranks must not
        part here.
        """
        if rid in self._pending:
            raise ConfigError(f"load: expected a request without a queued load, got {rid} again")
        loads = []
        for pool, transfer, keys in self._pools.resolve(transfers, partial=True):
            pages = pool.page_ids(transfer.host_indices, len(keys))
            new = pool.slots.hold(keys)
            loads.append(PoolLoad(pool, keys, pages))
            if new and pool.lower is not None:
                pool.lower.fetch(new)
            else:
                pool.slots.forget(new)
        if not loads:
            return False
        self._pending[rid] = loads
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a load that has not been started; whether there was one."""
        loads = self._pending.pop(rid, None)
        for load in loads or ():
            load.release()
        return loads is not None

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the index for the layer counter, -1 if nothing is."""
        if not self._pending:
            return -1
        batch = LoadBatch(self._pending, self._deadline_s)
        self._pending = {}
        self._pools.declare_current_stream()
        index = self.layer_done_counter.start(batch)
        if batch.waits_for_tiers:
            self._starting.submit(call_subscriber, batch.start)
        else:
            batch.start()
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of the batch is written any more; whether every page landed and verifies."""
        return self.layer_done_counter.finish(counter_index)

    # --- offloads

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages to host memory, and from there to the tiers below, behind what both streams have been given.

        They are acknowledged when host memory has them, as failed where it has no room that nobody holds. False if the
        transfers name no pages: ranks must not part here.
        """
        wanted: list[tuple[Any, list[str], Pages]] = [
            (pool, keys, pool.page_ids(transfer.host_indices, len(keys)))
            for pool, transfer, keys in self._pools.resolve(transfers, partial=True)
        ]
        if not wanted:
            return False
        self._pools.declare_current_stream()
        self._offloads.begin(wanted)
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads are over and have not been popped, from the oldest on."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest; whether it landed."""
        return self._offloads.pop()

    # --- end

    def reset(self) -> None:
        """Wait for what is under way, drop what is queued. What was kept stays: SGLang's flush is of its own pools."""
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        self._offloads.drain(2 * self._deadline_s)

    def close(self) -> None:
        """`reset`, then give everything back. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        try:
            self.reset()
        finally:
            self._starting.shutdown()
            self._pools.close()
