"""AlignedTransfer: a transfer on its way to an engine, from memory that O_DIRECT can use."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.io import Transfer, address
from kvtransfer.tiers.record import BLOCK_BYTES


class AlignedTransfer(Transfer):
    """A tier's transfer with the engine's file numbers. Buffers that O_DIRECT can't use are swapped for aligned ones
    while they are on their way: as many as are in flight."""

    def __init__(self, inner: Transfer, files: list[int], note_unaligned: Callable[[], None]) -> None:
        self.write, self.files, self.offsets, self.buffers = inner.write, files, inner.offsets, inner.buffers
        self.addresses, self.sizes = inner.addresses, inner.sizes
        self._inner = inner
        self._crooked: set[int] = set(np.flatnonzero((self.addresses % BLOCK_BYTES).any(axis=1)).tolist())
        self._straight: dict[int, RecordBuffer] = {}
        if self._crooked:
            note_unaligned()
            self.buffers, self.addresses = list(inner.buffers), inner.addresses.copy()

    def start(self, positions: list[int]) -> list[int]:
        started = self._inner.start(positions)
        for position in self._crooked.intersection(started) if self._crooked else ():
            theirs = self._inner.buffers[position]
            memory = np.frombuffer(mmap.mmap(-1, theirs.payload.size + theirs.trailer.size), dtype=np.uint8)
            ours = RecordBuffer(memory[: theirs.payload.size], memory[theirs.payload.size :])
            if self.write:
                ours.payload[:], ours.trailer[:] = theirs
            self.buffers[position] = self._straight[position] = ours
            self.addresses[position] = address(ours.payload), address(ours.trailer)
        return started

    def finish(self, positions: list[int], errors: list[int]) -> None:
        for position in self._crooked.intersection(positions) if self._crooked else ():
            ours, theirs = self._straight.pop(position), self._inner.buffers[position]
            if not self.write:
                theirs.payload[:], theirs.trailer[:] = ours
            self.buffers[position] = theirs
        self._inner.finish(positions, errors)
