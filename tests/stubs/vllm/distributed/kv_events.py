"""Events about where KV lies."""

from __future__ import annotations

import msgspec

MEDIUM_CPU = "CPU"


class KVCacheEvent(msgspec.Struct):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
