"""DiskReading: what a disk tier that owns its files and one that only reads them have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import DeadlineExceeded, LayoutError, OwnershipError, TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.batch_book import BatchBook
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.disk_transfers import BatchTransfer, Outcome, ReadTransfer
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.quick_check import QuickCheck
from kvtransfer.tiers.registered import RegisteredMemory, overlaps
from kvtransfer.tiers.slab_files import SlabFiles
from kvtransfer.tiers.verifier import Verifier


class DiskReading(ABC):
    """`lookup` and `get_into` over a table and slabs, registration, and the end. Thread-safe.

    Subclasses say what is done with pages that do not verify (`_set_aside`), and what ends with the tier (`_end_more`).
    """

    shared = False
    needs_registration = False

    def __init__(
        self,
        name: str,
        storage: Storage,
        table: SlotTable,
        slabs: SlabFiles,
        *,
        page_bytes: int,
        slot_bytes: int,
        trailer_bytes: int,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.name = name
        self.record_bytes = slot_bytes + trailer_bytes
        self._storage, self._table, self._slabs = storage, table, slabs
        self._slot_bytes, self._trailer_bytes = slot_bytes, trailer_bytes
        self._clock, self._observer = clock, observer
        self._lock = threading.Lock()  # of the table
        self._check = QuickCheck(page_bytes, trailer_bytes)
        self._verifier = Verifier(name, self._check, page_bytes)
        self._book = BatchBook(name, observer)
        self._registered = RegisteredMemory(name)
        self._ending = threading.Lock()
        self._ended = False

    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        batch = self._book.open("lookup", keys)
        with self._lock:
            slots = self._table.find(keys)
        batch.settle_many((at, PageStatus.OK if slot >= 0 else PageStatus.MISS, None) for at, slot in enumerate(slots))
        return batch

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        batch = self._book.open("get", keys, buffers, deadline_s=deadline_s)
        with failing(batch):
            self._get(batch, keys, buffers)
        return batch

    def _get(self, batch: Batch, keys: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> None:
        unfit = self._unfit(buffers)
        asked = [at for at in range(len(keys)) if at not in unfit]
        with self._lock:
            slots = dict(zip(asked, self._table.begin_read([keys[at] for at in asked]), strict=True))
        there = [at for at, slot in slots.items() if slot >= 0]
        where = self._where([slots[at] for at in there])
        if len(there) < len(keys):
            outcomes: list[Outcome] = [(at, PageStatus.MISS, None) for at, slot in slots.items() if slot < 0]
            batch.settle_many(outcomes + [(at, PageStatus.ERROR, error) for at, error in unfit.items()])
        if there:
            transfer = ReadTransfer(
                batch, there, [slots[at] for at in there], where, buffers,
                verifier=self._verifier, dropped=self._unread, ended=self._read_ended,
            )  # fmt: skip
            self._submit(transfer)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Map ``memory`` for the device, where the memlock limit allows; slower without, which is told once.

        Chunks end between slots if ``memory`` is a whole number of payloads or trailers. See `Tier.register`.
        """
        self._registered.add(memory)
        payload = self._slot_bytes
        self._storage.register(memory, payload if memory.size % payload == 0 else self._trailer_bytes)

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        for batch in self._book.batches():
            if overlaps(memory, batch.buffers):
                raise OwnershipError(f"{self.name}: unregister: expected memory that no batch uses, got {batch!r}")
        self._registered.remove(memory)
        self._storage.unregister(memory)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """See `Tier.close`. Everything acknowledged is synced, in every mode. Raises OSError if that failed.

        Where the time is up and the device still holds buffers, a thread in the background closes when it lets go.
        """
        with self._ending:
            if self._ended:
                return
            try:
                self._book.close(drain=drain, timeout_s=timeout_s)
            except DeadlineExceeded:
                self._ended = True
                if self._book.in_flight:
                    threading.Thread(target=self._end, name=f"{self.name}-end", daemon=True).start()
                else:  # cancelling was enough
                    self._end()
                raise
            self._ended = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _end(self) -> None:
        self._book.close()
        try:
            self._end_more()
        finally:
            self._storage.close()
            self._verifier.close()
            for memory in self._registered.regions():
                self._registered.remove(memory)

    def _unfit(self, buffers: Sequence[RecordBuffer]) -> dict[int, LayoutError]:
        """Buffers that no record of this tier fits, by position."""
        payload, trailer = self._slot_bytes, self._trailer_bytes
        return {
            at: LayoutError(
                f"{self.name}: buffers[{at}]: expected a payload of {payload} bytes and a trailer of {trailer}, "
                f"got {buffer.payload.size} and {buffer.trailer.size}"
            )
            for at, buffer in enumerate(buffers)
            if buffer.payload.size != payload or buffer.trailer.size != trailer
        }

    def _where(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """The storage's file and the offset of each slot."""
        files, offsets = [], []
        for slot in slots:
            number, index = self._table.file_of(slot)
            files.append(self._slabs.files[number].file)
            offsets.append(index * self.record_bytes)
        return files, offsets

    def _submit(self, transfer: BatchTransfer) -> None:
        try:
            self._storage.submit(transfer)
        except TierError as error:  # I/O has ended: a bug of the engine's, or the tier is closing
            transfer.leave(list(range(len(transfer.positions))))
            transfer.batch.fail(error)

    def _unread(self, slots: list[int]) -> None:
        with self._lock:
            self._table.end_read(slots)

    def _read_ended(self, transfer: ReadTransfer, good: list[int], bad: list[int], ended: list[int]) -> list[Outcome]:
        """Pages are read: those that do not verify are set aside before anybody hears of them."""
        replaced = self._set_aside(transfer, bad) if bad else []
        self._table.read_over([transfer.slots[at] for at in ended], transfer.keys_of(good), self._clock())
        return replaced

    @abstractmethod
    def _set_aside(self, transfer: ReadTransfer, bad: list[int]) -> list[Outcome]:
        """Pages that did not verify; returns outcomes to tell instead of CORRUPT."""

    @abstractmethod
    def _end_more(self) -> None:
        """Called once, when no batch is under way, before the storage is closed. Raises OSError."""


@contextmanager
def failing(batch: Batch) -> Iterator[None]:
    """Whatever goes wrong inside: the batch has an end."""
    try:
        yield
    except BaseException as error:
        batch.fail(error)
        raise
