"""RegisteredMemory: which memory a tier's client was told of.

The book is kept here, not asked of the client: a client over TCP takes any address, and the same call over RDMA
fails. So a missing registration is an error on every transport, before anything is touched.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.parts import Parts


def address_range(array: NDArray[np.uint8]) -> tuple[int, int]:
    """Start and stop address of a contiguous array."""
    start = int(array.__array_interface__["data"][0])
    return start, start + array.nbytes


class RegisteredMemory:
    """The regions of one tier. Thread-safe. ``name`` is for messages. Keeps the memory alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted, with `_regions`
        self._regions: list[tuple[int, int, NDArray[np.uint8]]] = []

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Take ``memory`` into the book. ConfigError if it overlaps a region, LayoutError if it is no flat bytes."""
        if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8 or memory.ndim != 1:
            raise LayoutError(f"{self._name}: register: expected a flat uint8 array, got {_kind(memory)}")
        if not memory.size or not memory.flags.c_contiguous:
            raise LayoutError(f"{self._name}: register: expected contiguous memory, got {memory.size} bytes, strided")
        start, stop = address_range(memory)
        with self._lock:
            for low, high, _ in self._regions:
                if start < high and low < stop:
                    raise ConfigError(
                        f"{self._name}: register: expected new memory, got {start:#x}-{stop:#x}, which overlaps "
                        f"{low:#x}-{high:#x}; unregister that first"
                    )
            at = bisect_right(self._starts, start)
            self._starts.insert(at, start)
            self._regions.insert(at, (start, stop, memory))

    def remove(self, memory: NDArray[np.uint8]) -> None:
        """Strike ``memory``, which must be just one region. ConfigError otherwise."""
        where = address_range(memory)
        with self._lock:
            for at, (start, stop, _) in enumerate(self._regions):
                if (start, stop) == where:
                    del self._starts[at], self._regions[at]
                    return
        raise ConfigError(
            f"{self._name}: unregister: expected memory that is registered, got {where[0]:#x}-{where[1]:#x}"
        )

    def require(self, parts: Parts) -> None:
        """ConfigError, naming the first, unless each part of every record lies within one region."""
        starts, sizes = parts.where.reshape(-1).tolist(), parts.sizes.reshape(-1).tolist()
        with self._lock:
            stops = [stop for _, stop, _ in self._regions]
            for at, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                found = bisect_right(self._starts, start) - 1
                if found < 0 or start + size > stops[found]:
                    raise ConfigError(
                        f"{self._name}: buffers[{at // 2}].{('payload', 'trailer')[at % 2]}: expected registered "
                        f"memory, got {start:#x}-{start + size:#x}; call register() on the whole region that the "
                        "buffers lie in first"
                    )

    def regions(self) -> list[NDArray[np.uint8]]:
        """What is registered, by address."""
        with self._lock:
            return [memory for _, _, memory in self._regions]


def overlaps(memory: NDArray[np.uint8], buffers: Sequence[RecordBuffer]) -> bool:
    """Whether a part of a buffer lies in ``memory``."""
    start, stop = address_range(memory)
    return any(low < stop and start < high for buffer in buffers for low, high in map(address_range, buffer))


def _kind(memory: object) -> str:
    if isinstance(memory, np.ndarray):
        return f"{memory.dtype} of {memory.ndim} dimensions"
    return type(memory).__name__
