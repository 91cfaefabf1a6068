"""Which prefix lengths a pool can restore, by SGLang's hit policies."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from kvtransfer.kernels.errors import ConfigError


def leading(flags: Sequence[bool]) -> int:
    """How many are set from the first on."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def restorable_lengths(transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    """Prefix lengths in pages at which the transfer's pool has what it must, given which of its pages are there.

    All of them for ``all_pages``; for ``trailing_pages`` the last ``len(transfer.keys)``. Raises ConfigError for
    another policy.
    """
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading(there) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        run = 0
        lengths = set()
        for length, flag in enumerate(there, 1):
            run = run + 1 if flag else 0
            if run >= min(window, length):
                lengths.add(length)
        return lengths
    raise ConfigError(f"pool {transfer.name}: expected all_pages or trailing_pages, got {transfer.hit_policy}")
