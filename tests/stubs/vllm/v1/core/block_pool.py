"""A pool of blocks with references, the one freed last given out first: whatever is freed too early is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockPool:
    def __init__(self, num_gpu_blocks: int) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(num_gpu_blocks)]
        self.evicted: set[int] = set()
        self._free = list(range(num_gpu_blocks - 1, 0, -1))  # block 0 stands for none

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        taken = [self.blocks[self._free.pop()] for _ in range(num_blocks)]
        self.touch(taken)
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.append(block.block_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids

    def get_num_free_blocks(self) -> int:
        return len(self._free)
