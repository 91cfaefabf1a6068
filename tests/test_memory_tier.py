"""The tier in ordinary memory passes the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tier_contract import BoundedContract, Lab, ShortRecordContract, TierContract

from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.memory_tier import MemoryTier


class MemoryLab(Lab):
    kind: Callable[..., MemoryTier] = MemoryTier

    def make(self) -> Tier:
        return self.kind(64 << 20, workers=2)

    def make_bounded(self, records: int, record_bytes: int) -> Tier:
        return self.kind(records * record_bytes)

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        assert isinstance(tier, MemoryTier)
        tier._pages[key][offset] ^= 4

    def shorten(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier._pages[key] = tier._pages[key][:-4096]


class TestMemory(TierContract, BoundedContract, ShortRecordContract):
    @pytest.fixture
    def bench(self) -> Iterator[Lab]:
        yield MemoryLab()
