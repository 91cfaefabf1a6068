"""The disk tier's reads and writes on their way: what is told to the batch when the device is done with a page."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvtransfer.kernels.errors import CapacityError, RecordError, TierError
from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.io import SHORT, Transfer
from kvtransfer.tiers.verifier import Verifier

Outcome = tuple[int, PageStatus, BaseException | None]
_CUT = RecordError("record: expected all of it, got a slab that ends before: it was cut")
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class BatchTransfer(Transfer, ABC):
    """Some pages of a batch, each in a slot.

    positions, slots  of each record: its place in the batch, and on the disk
    where             the storage's file and the offset of each slot
    buffers           those of the whole batch
    """

    def __init__(
        self,
        batch: Batch,
        positions: Sequence[int],
        slots: Sequence[int],
        where: tuple[list[int], list[int]],
        buffers: Sequence[RecordBuffer],
        *,
        write: bool,
        dropped: Callable[[list[int]], None],
    ) -> None:
        # not the batch's own: it lets go of them when a deadline ends it before this transfer has begun
        mine = [buffers[p] for p in positions]
        offsets, parts = np.array(where[1], dtype=np.int64), batch.parts.only(positions)
        super().__init__(write=write, files=where[0], offsets=offsets, buffers=mine, parts=parts)
        self.batch = batch
        self.positions = list(positions)
        self.slots = list(slots)
        self._dropped = dropped

    def start(self, positions: list[int]) -> list[int]:
        at_batch = {self.positions[at]: at for at in positions}
        with self.batch.on_own_thread():
            started = [at_batch[p] for p in self.batch.begin(at_batch)]
            if len(started) < len(positions):
                wanted = set(started)
                self.leave([at for at in positions if at not in wanted])
        return started

    def finish(self, positions: list[int], errors: list[int]) -> None:
        with self.batch.on_own_thread():
            self.moved(positions, errors)

    @abstractmethod
    def moved(self, positions: list[int], errors: list[int]) -> None:
        """`finish`, by each subclass."""

    def leave(self, positions: list[int]) -> None:
        """These will not be moved: cancelled, or too late."""
        self._dropped([self.slots[at] for at in positions])

    def keys_of(self, positions: Sequence[int]) -> list[bytes]:
        """Their stored keys."""
        return [self.batch.keys[self.positions[at]] for at in positions]

    def failure(self, at: int, code: int) -> Outcome:
        """The outcome of a page that the device did not move."""
        error = OSError(code, os.strerror(code))
        verb = "write" if self.write else "read"
        if self.write and code in NO_SPACE:
            full = CapacityError(f"{verb}: the file system has no room for a slot that was reserved: {error.strerror}")
            full.__cause__ = error
            return self.positions[at], PageStatus.NO_ROOM, full
        failed = TierError(f"{verb}: expected the whole record, got: {error.strerror}")
        failed.__cause__ = error
        return self.positions[at], PageStatus.ERROR, failed


class ReadTransfer(BatchTransfer):
    """Reads; each record is checked as it comes. ``ended`` is told positions that were right, those that were not, and
    all, before the batch is."""

    def __init__(
        self,
        batch: Batch,
        positions: Sequence[int],
        slots: Sequence[int],
        where: tuple[list[int], list[int]],
        buffers: Sequence[RecordBuffer],
        *,
        verifier: Verifier,
        dropped: Callable[[list[int]], None],
        ended: Callable[[ReadTransfer, list[int], list[int], list[int]], list[Outcome]],
    ) -> None:
        super().__init__(batch, positions, slots, where, buffers, write=False, dropped=dropped)
        self._verifier = verifier
        self._ended = ended

    def moved(self, positions: list[int], errors: list[int]) -> None:
        came = [at for at, code in zip(positions, errors, strict=True) if not code] if any(errors) else positions
        records = list(zip(self.keys_of(came), [self.buffers[at] for at in came], strict=True))
        wrong = self._verifier.whole(records, self.parts.only(came))
        good = came
        bad: list[int] = []
        outcomes: list[Outcome] = []
        if any(wrong):
            good = [at for at, problem in zip(came, wrong, strict=True) if problem is None]
            bad = [at for at, problem in zip(came, wrong, strict=True) if problem is not None]
            outcomes = [(self.positions[at], PageStatus.CORRUPT, e) for at, e in zip(came, wrong, strict=True) if e]
        for at, code in zip(positions, errors, strict=True) if any(errors) else ():
            if code == SHORT:
                bad.append(at)
                outcomes.append((self.positions[at], PageStatus.CORRUPT, _CUT))
            elif code:
                outcomes.append(self.failure(at, code))
        outcomes += [(self.positions[at], PageStatus.OK, None) for at in good]
        moved = int(self.sizes[0].sum()) * len(good)  # of one length: the tier's
        replaced = {place: (place, status, error) for place, status, error in self._ended(self, good, bad, positions)}
        if replaced:
            outcomes = [replaced.get(outcome[0], outcome) for outcome in outcomes]
        self.batch.settle_many(outcomes, moved_bytes=moved)


class WriteTransfer(BatchTransfer):
    """Writes; ``twins`` are other positions of the same page in the batch: they share its outcome. Once the device is
    done with every page that was begun, ``written`` is told, with those that are whole."""

    def __init__(
        self,
        batch: Batch,
        positions: Sequence[int],
        slots: Sequence[int],
        where: tuple[list[int], list[int]],
        buffers: Sequence[RecordBuffer],
        *,
        twins: Mapping[int, Sequence[int]],
        dropped: Callable[[list[int]], None],
        written: Callable[[WriteTransfer, list[int]], None],
    ) -> None:
        super().__init__(batch, positions, slots, where, buffers, write=True, dropped=dropped)
        self._twins = twins
        self._written = written
        self._lock = threading.Lock()
        self._left = len(self.positions)
        self._whole: list[int] = []

    def leave(self, positions: list[int]) -> None:
        super().leave(positions)
        self._count(len(positions))

    def moved(self, positions: list[int], errors: list[int]) -> None:
        failed = [(at, code) for at, code in zip(positions, errors, strict=True) if code]
        with self._lock:
            self._whole += [at for at, code in zip(positions, errors, strict=True) if not code]
        if failed:
            self._dropped([self.slots[at] for at, _ in failed])
            self.settle([self.failure(at, code) for at, code in failed])
        self._count(len(positions))

    def settle(self, outcomes: list[Outcome], moved_bytes: int = 0) -> None:
        """Tell the batch."""
        if self._twins:
            more = [(twin, status, error) for at, status, error in outcomes for twin in self._twins.get(at, ())]
            outcomes = outcomes + more
        self.batch.settle_many(outcomes, moved_bytes=moved_bytes)

    def _count(self, done: int) -> None:
        with self._lock:
            self._left -= done
            if self._left:
                return
        if self._whole:
            self._written(self, self._whole)
