"""Disk tiers over real folders and simulated disks, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from tier_contract import Lab
from tier_pages import ODD

from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import RecordBuffer, Tier
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.record import RecordHeader, padded_bytes, payload_checksum, trailer_bytes
from kvtransfer.tiers.simulated import SimulatedStorage
from kvtransfer.tiers.simulated_disk import SimulatedDisk

SPACE = bytes(range(32))
TINY = KVSpec.attention(num_layers=2, page_size=4, kv_heads=2, head_dim=33, itemsize=2)  # 2,112 bytes: one block
ODD_RECORD = padded_bytes(ODD.page_bytes) + trailer_bytes(ODD)
TINY_SLOT, TINY_TRAILER = padded_bytes(TINY.page_bytes), trailer_bytes(TINY)
TINY_RECORD = padded_bytes(TINY.page_bytes) + trailer_bytes(TINY)
MOST_PAGES = 1000  # of a lab: cancelled batches hold their room until the device lets go of it


class Told(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.fallbacks: list[tuple[str, str]] = []

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append((what, fields))

    def fell_back(self, what: str, why: str) -> None:
        self.fallbacks.append((what, why))

    def of(self, what: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.notes if name == what]


def slab_path(tier: DiskTier, key: bytes) -> tuple[str, int]:
    """The file that a page lies in, and where it begins there."""
    (slot,) = tier._table.find([key])
    assert slot >= 0
    number, index = tier._table.file_of(slot)
    folder = tier.folders[tier._slabs.files[number].path]
    return os.path.join(folder, f"slab.{number:06d}"), index * tier.record_bytes


class FolderLab(Lab):
    """Tiers over one folder of a real file system."""

    persistent = True

    def __init__(self, paths: str | Path, **more: Any) -> None:
        self.paths, self.more = paths, more
        self.made = 0

    def make(self) -> Tier:
        self.made += 1
        # a place of its own where another tier of the lab is open still; the same one once it is closed
        return DiskTier(self.paths, ODD, namespace=SPACE, capacity_pages=MOST_PAGES, **self.more)

    def make_bounded(self, records: int, record_bytes: int) -> Tier:
        assert record_bytes == ODD_RECORD
        return DiskTier(self.paths, ODD, namespace=SPACE, capacity_pages=records, place=Place(instance=7), **self.more)

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        assert isinstance(tier, DiskTier)
        path, start = slab_path(tier, key)
        flip_byte(path, start + offset)

    def shorten(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, DiskTier)
        path, start = slab_path(tier, key)
        os.truncate(path, start + tier.record_bytes - 4096)


class SimulatedLab(FolderLab):
    """Tiers over one simulated disk."""

    def __init__(self, **more: Any) -> None:
        super().__init__("/sim/a;/sim/b", **more)
        self.disk = SimulatedDisk()

    def make(self) -> Tier:
        self.more["storage"] = SimulatedStorage(self.disk)
        return super().make()

    def make_bounded(self, records: int, record_bytes: int) -> Tier:
        self.more["storage"] = SimulatedStorage(self.disk)
        return super().make_bounded(records, record_bytes)

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        assert isinstance(tier, DiskTier)
        path, start = slab_path(tier, key)
        self.disk.flip_bit(path, 8 * (start + offset))

    def shorten(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, DiskTier)
        path, start = slab_path(tier, key)
        del self.disk.names[path].now[start + tier.record_bytes - 4096 :]


def tiny_record(key: bytes, rng: np.random.Generator) -> RecordBuffer:
    """A sealed record of random bytes."""
    payload = rng.integers(0, 256, TINY_SLOT, dtype=np.uint8)
    trailer = np.zeros(TINY_TRAILER, np.uint8)
    checksum = payload_checksum(payload[: TINY.page_bytes])
    header = RecordHeader(key, SPACE, Shard.whole(TINY), "page_first", TINY.page_bytes, payload_xxh3=checksum)
    header.encode_into(trailer)
    return RecordBuffer(payload, trailer)


def empty() -> RecordBuffer:
    return RecordBuffer(np.full(TINY_SLOT, 0xEE, np.uint8), np.full(TINY_TRAILER, 0xEE, np.uint8))


def image(buffer: RecordBuffer) -> bytes:
    """All that a checksum covers: a crash may tear the padding of a page that it spares."""
    return buffer.payload[: TINY.page_bytes].tobytes() + buffer.trailer.tobytes()


def flip_byte(path: str, offset: int) -> None:
    """Flip one bit of a real file behind everybody's back, past the page cache."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 4]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)
