"""Bounce: memory in which a thread's records lie as one piece on their way, for a store to which a piece is dear."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record_native import RecordTools
from kvtransfer.tiers.registered import address_range


class Bounce:
    """``nbytes`` of memory for one thread at a time; ``tools`` copy, with the interpreter lock given away once."""

    def __init__(self, nbytes: int, tools: RecordTools) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self._start = address_range(self.memory)[0]
        self._tools = tools

    def fits(self, record_bytes: int) -> int:
        """How many records of that length it holds."""
        return self.memory.size // record_bytes

    def places(self, count: int, record_bytes: int) -> list[int]:
        """Where so many records lie, one behind the other: addresses. ValueError if they do not fit."""
        if count > self.fits(record_bytes):
            raise ValueError(f"expected at most {self.fits(record_bytes)} records of {record_bytes} bytes, got {count}")
        return list(range(self._start, self._start + count * record_bytes, record_bytes))

    def pack(self, parts: Parts, record_bytes: int) -> list[int]:
        """Copy records, each of ``record_bytes``, into `places`, which are returned."""
        places = self.places(len(parts.where), record_bytes)
        self._tools.pack(parts, self._start, record_bytes)
        return places

    def unpack(self, places: Sequence[int], keys: Sequence[bytes], parts: Parts) -> bytes:
        """Copy records from ``places`` to where they belong; 1 for each that is whole there under its stored key, 0
        where Python must look closer (`RecordTools.good`)."""
        return self._tools.unpack(places, keys, parts)
