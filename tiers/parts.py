"""Parts: where the payloads and trailers of many records lie in memory, as arrays that C and the kernel read."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.tiers.base import RecordBuffer

_PAIR_BYTES = 16


@dataclass(frozen=True)
class Parts:
    """Of ``n`` records, each a payload and a trailer. Keeps no memory alive.

    where  uint64 ``[n, 2]``: the address at which each part begins
    sizes  uint64 ``[n, 2]``: its bytes
    """

    where: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    @classmethod
    def of(cls, buffers: Sequence[RecordBuffer]) -> Parts:
        """Of contiguous arrays of bytes. 0.5 us a part, read-only ones 1.7."""
        quick = cls.writable(buffers)
        if quick is not None:
            return quick
        parts = [part for buffer in buffers for part in buffer]
        return cls(_pairs([part.__array_interface__["data"][0] for part in parts]), _pairs([p.nbytes for p in parts]))

    @classmethod
    def writable(cls, buffers: Sequence[RecordBuffer]) -> Parts | None:
        """`of`; None unless every part is contiguous memory that may be written to, and is not empty."""
        parts: list[Any] = [part for buffer in buffers for part in buffer]
        address, view = ctypes.addressof, ctypes.c_char.from_buffer
        try:
            starts = [address(view(part)) for part in parts]
        except (TypeError, ValueError, BufferError):
            return None
        return cls(_pairs(starts), _pairs([part.nbytes for part in parts]))

    def addresses(self, first: int, count: int) -> tuple[int, int]:
        """Where ``where`` and ``sizes`` of ``count`` records lie, for C. IndexError: there are not so many."""
        if not 0 <= first <= first + count <= len(self.where) == len(self.sizes):
            raise IndexError(f"expected records {first} to {first + count - 1}, got {len(self.where)} records")
        at = self.where.__array_interface__["data"][0], self.sizes.__array_interface__["data"][0]
        return at[0] + _PAIR_BYTES * first, at[1] + _PAIR_BYTES * first

    def from_(self, first: int) -> Parts:
        """Those of the records from ``first`` on."""
        return Parts(self.where[first:], self.sizes[first:])

    def only(self, places: Sequence[int]) -> Parts:
        """Those of just these records, in this order. IndexError: there are not so many."""
        first, count = places[0] if places else 0, len(places)
        run = places == range(first, first + count) or list(places) == list(range(first, first + count))
        low, high = (first, first + count - 1) if run else (min(places), max(places))
        if count and not 0 <= low <= high < len(self.where):
            raise IndexError(f"expected records 0 to {len(self.where) - 1}, got {list(places)}")
        if run:
            if count == len(self.where):
                return self
            return Parts(self.where[first : first + count], self.sizes[first : first + count])
        return Parts(_rows(self.where, places), _rows(self.sizes, places))


def _rows(pairs: NDArray[np.uint64], places: Sequence[int]) -> NDArray[np.uint64]:
    """``pairs[places]``, which gives the interpreter lock away: beside a busy Python thread that takes up to 10 ms."""
    image = pairs.tobytes()
    picked = b"".join([image[at : at + _PAIR_BYTES] for at in [_PAIR_BYTES * place for place in places]])
    return np.frombuffer(picked, dtype=np.uint64).reshape(-1, 2)


def _pairs(numbers: list[int]) -> NDArray[np.uint64]:
    """By way of an array: numpy looks at each number twice."""
    return np.frombuffer(array("Q", numbers), dtype=np.uint64).reshape(-1, 2)
