"""FixedBuffers: which memory a ring has mapped once and for all, in chunks that end between slots."""

from __future__ import annotations

import os
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.io import address
from kvtransfer.tiers.uring import Ring

CHUNK_BYTES = 1 << 30  # the kernel registers no more in one piece
PLACES = 4096


class FixedBuffers:
    """The ring's table of buffers. For the ring's thread alone. ``observer`` is told once where it can't be used."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name, self._observer = name, observer
        self._free = list(range(PLACES - 1, -1, -1))
        self._memory: dict[int, list[int]] = {}  # address of registered memory -> its places
        self._starts: list[int] = []
        self._told = False
        self.chunks: list[tuple[int, int, int]] = []  # start, stop, place; sorted

    def add(self, ring: Ring, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        """Map ``memory`` in chunks of whole ``step_bytes``. False if that can't be done: nothing is mapped then."""
        step = max(1, CHUNK_BYTES // step_bytes) * step_bytes
        start, stop = address(memory), address(memory) + memory.size
        chunks = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        places: list[int] = []
        why = ring.buffers_refused
        if not why and len(chunks) > len(self._free):
            why = f"expected at most {len(self._free)} chunks, got {len(chunks)}"
        if not why and step_bytes > CHUNK_BYTES:
            why = f"expected records of at most {CHUNK_BYTES} bytes, got {step_bytes}"
        try:
            for at, end in [] if why else chunks:
                ring.set_buffer(self._free[-1], at, end - at)
                places.append(self._free.pop())
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)} (the memlock limit is charged for registered memory)"
        if why:
            self._empty(ring, places)
            if not self._told:
                self._told = True
                self._observer.fell_back("registered buffers", f"{self._name}: memory is mapped at each call: {why}")
            return False
        self._memory[start] = places
        self._set([*self.chunks, *((a, b, p) for (a, b), p in zip(chunks, places, strict=True))])
        return True

    def drop(self, ring: Ring, memory: NDArray[np.uint8]) -> None:
        """Undo `add`."""
        places = self._memory.pop(address(memory), [])
        self._set([chunk for chunk in self.chunks if chunk[2] not in set(places)])
        self._empty(ring, places)

    def place(self, start: int, size: int) -> int:
        """The place of the chunk that holds ``size`` bytes at ``start``; -1 if none does."""
        at = bisect_right(self._starts, start) - 1
        return self.chunks[at][2] if at >= 0 and start + size <= self.chunks[at][1] else -1

    def _empty(self, ring: Ring, places: list[int]) -> None:
        for place in places:
            ring.set_buffer(place, 0, 0)
        self._free += places

    def _set(self, chunks: list[tuple[int, int, int]]) -> None:
        self.chunks = sorted(chunks)
        self._starts = [chunk[0] for chunk in self.chunks]
