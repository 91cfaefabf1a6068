"""Hashes as events have them, and blocks."""

from __future__ import annotations

from dataclasses import dataclass


def maybe_convert_block_hash(hash_bytes: bytes) -> bytes | int:
    """As it is."""
    return hash_bytes


@dataclass
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
