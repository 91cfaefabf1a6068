"""KVTransferStorage: kvtransfer's tiers behind SGLang's HiCache (``--hicache-storage-backend dynamic``).

SGLang keeps its own host memory and its own index; what it hands over are page hashes and places in its host pools. So
records hold no tokens here: a page rests on its hash, its namespace and its checksum. The namespace names what SGLang's
key leaves out: model, dtype, layout, page size and, in the shard, the ranks.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtransfer.config import Config
from kvtransfer.integrations.sglang.hit_policies import leading, restorable_lengths
from kvtransfer.integrations.sglang.host_pages import HostPages, flat_bytes
from kvtransfer.integrations.sglang.identity import Identity
from kvtransfer.integrations.sglang.settings import read_settings
from kvtransfer.integrations.sglang.storage_meter import StorageMeter
from kvtransfer.integrations.sglang.stored_pool import StoredPool, open_pool
from kvtransfer.kernels.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)

# Keys of the extra config that are SGLang's own and that it leaves in.
THEIRS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")


class KVTransferStorage(HiCacheStorage):
    """See the module. Made by SGLang, once in each scheduler process; thread-safe.

    The tiers are opened when all host pools are known (`on_host_pools_registered`); before that nothing is there.
    Raises ConfigError at start for a configuration or a pool that it can't serve.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self.storage_config = storage_config
        extra = storage_config.extra_config
        self._config: Config = read_settings(extra, THEIRS)
        self._zero_copy = bool((extra or {}).get("interface_v1", 0))
        self._meter = StorageMeter(storage_config.enable_storage_metrics)
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[str, StoredPool] = {}
        self._opened = self._closed = False
        self._salt = self._config.namespace.salt_bytes()
        self._clears = 0

    # --- what SGLang tells us of its pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of the KV itself."""
        self.mem_pool_host = mem_pool_host
        self.registered_pools[PoolName.KV.value] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName | str) -> None:
        """A host pool by name, the KV's again among them."""
        name = _name(host_pool_name)
        if self._opened and name not in self._pools:
            raise ConfigError(
                f"pool {name}: expected all host pools before the tiers were opened and their room was shared out, got "
                "one later; this model's draft pool can't be kept by this backend"
            )
        self.registered_pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Open the tiers. Raises what is wrong with them or with a pool: SGLang does not start then."""
        if self._opened:
            return
        identity = Identity.of(self._config, self.storage_config, self.mem_pool_host.dtype)
        pages = {name: self._pages_of(name, pool) for name, pool in self.registered_pools.items()}
        total = sum(one.page_bytes for one in pages.values())
        try:
            for name, one in pages.items():
                self._pools[name] = open_pool(self._config, identity, one, one.page_bytes / total, self._salt)
        except BaseException:
            self.close()
            raise
        self._opened = True
        logger.info(
            "kvtransfer: storage backend for %s: pools %s, tiers %s",
            identity.describe(),
            ", ".join(f"{n} ({p.kept.plan.page_bytes} B a page, {p.pages.form})" for n, p in self._pools.items()),
            ", ".join(self._config.lower_tiers),
        )

    def _pages_of(self, name: str, pool: Any) -> HostPages:
        split, is_kv = 1, name == PoolName.KV.value
        if is_kv and self.storage_config.should_split_heads:
            split = int(self.storage_config.tp_lcm_size or 1) // self.storage_config.tp_size
        return HostPages(pool, name, heads_split=split, flat=is_kv and not self._zero_copy)

    # --- the KV: zero-copy calls

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages are there, from the first on."""
        return leading(self._pool(PoolName.KV).kept.exist(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill host pages; True for those that hold their bytes, verified."""
        return self._get(self._pool(PoolName.KV), keys, host_indices, metered=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Keep host pages; True for those that a tier has, and for those that another rank writes."""
        return self._set(self._pool(PoolName.KV), keys, host_indices, metered=True)

    # --- several pools at once

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every prefix length that all pools can restore, and how far each of them reaches."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            there = self._pool(transfer.name).kept.exist(keys[:kv_pages])
            good = restorable_lengths(transfer, there)
            if good:
                hits[transfer.name] = max(good)
            restorable = [length for length in restorable if length in good]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill the host pages of each transfer."""
        return {
            transfer.name: self._get(self._pool(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Keep the host pages of each transfer."""
        return {
            transfer.name: self._set(self._pool(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    # --- flat pages, where interface_v1 is off

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        """The page in ``target_location``, a flat tensor of its size; None if it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Likewise, one tensor a key."""
        kv, targets = self._flat_pool(), list(target_locations or [])
        whole = kv.kept.get(keys, [[flat_bytes(target)] for target in targets])
        return [target if ok else None for target, ok in zip(targets, whole, strict=True)]

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """Keep one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Keep flat pages; whether all of them are."""
        kv = self._flat_pool()
        return not kv.writes or all(kv.kept.put(keys, [[flat_bytes(value)] for value in values or []]))

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self._pool(PoolName.KV).kept.exist([key])[0]

    # --- the rest

    def clear(self) -> None:
        """Forget everything: from now on other stored keys are used. Room comes back as tiers evict.

        All ranks must be told, as SGLang does. Pages of before are found again after a restart.
        """
        self._clears += 1
        salt = hashlib.sha256(b"kvtransfer cleared\0" + self._clears.to_bytes(8, "little") + self._salt).digest()
        for pool in self._pools.values():
            pool.kept.salt = salt
        logger.warning("kvtransfer: cleared: stored pages are out of reach until the next start")

    def get_stats(self) -> Any:
        """What was moved since the last call, as SGLang's metrics want it; None without metrics."""
        return self._meter.take()

    def close(self) -> None:
        """Finish what is under way and close the tiers. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        for pool in self._pools.values():
            pool.stack.close()

    def _pool(self, name: PoolName | str) -> StoredPool:
        pool = self._pools.get(_name(name))
        if pool is None:
            known = ", ".join(self._pools) or "none: on_host_pools_registered() has not been called"
            raise ConfigError(f"pool: expected one of those registered ({known}), got {_name(name)}")
        return pool

    def _flat_pool(self) -> StoredPool:
        kv = self._pool(PoolName.KV)
        if kv.pages.form != "flat":
            raise ConfigError("interface_v1: expected calls by host index where it is on, got flat pages")
        return kv

    def _get(
        self, pool: StoredPool, keys: Sequence[str], indices: torch.Tensor | None, *, metered: bool = False
    ) -> list[bool]:
        _require_pages(pool.pages, keys, indices)
        if not keys or indices is None:
            return []
        began = time.perf_counter()
        pages = pool.pages.blank(indices)
        whole = pool.kept.get(keys, pages)
        pool.pages.wrote(indices, pages, whole)
        if metered:
            self._meter.fetched(sum(whole), pool.pages.page_bytes, time.perf_counter() - began)
        return whole

    def _set(
        self, pool: StoredPool, keys: Sequence[str], indices: torch.Tensor | None, *, metered: bool = False
    ) -> list[bool]:
        _require_pages(pool.pages, keys, indices)
        if not pool.writes:
            return [True] * len(keys)
        if not keys or indices is None:
            return []
        began = time.perf_counter()
        kept = pool.kept.put(keys, pool.pages.read(indices))
        if metered:
            self._meter.kept(sum(kept), pool.pages.page_bytes, time.perf_counter() - began)
        return kept


def _name(name: PoolName | str) -> str:
    return str(getattr(name, "value", name))


def _require_pages(pages: HostPages, keys: Sequence[str], indices: torch.Tensor | None) -> None:
    if pages.count(indices) != len(keys):
        raise LayoutError(f"pool {pages.name}: expected host indices of {len(keys)} pages, got {pages.count(indices)}")
