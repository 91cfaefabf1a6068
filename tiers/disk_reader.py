"""DiskReader: the pages of a disk tier that another process owns, to read only.

It takes no lock and writes nothing. What the owner stores is seen after at most ``refresh_s``; what the owner has
evicted and written over is found out when it is read, since a record names its own key: a miss, never a wrong byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from kvtransfer.kernels.errors import ConfigError, TierError
from kvtransfer.kernels.events import NO_OBSERVER, HeardOut, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle, TierStats
from kvtransfer.tiers.disk_folder import Place, read_meta, split_paths
from kvtransfer.tiers.disk_reading import DiskReading
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.disk_transfers import Outcome, ReadTransfer
from kvtransfer.tiers.eviction import LRU
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.journal import recover
from kvtransfer.tiers.keys import Namespace
from kvtransfer.tiers.slab_files import SlabFiles
from kvtransfer.tiers.storage import EngineKind, FileStorage


class DiskReader(DiskReading):
    """See the module, and `DiskTier` for the arguments. Puts, removes and pins are ERROR. Thread-safe.

    refresh_s  a miss looks at the owner's journal again, at most this often (50 ms for 100,000 pages)

    Raises ConfigError where there is no tier of that namespace and place, TierError if its files can't be understood.
    """

    shared = True

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        namespace: bytes | Namespace,
        place: Place | None = None,
        refresh_s: float = 1.0,
        engine: EngineKind = "auto",
        direct: bool | None = None,
        name: str = "disk-reader",
        observer: Observer = NO_OBSERVER,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not refresh_s >= 0:
            raise ConfigError(f"{name}: refresh_s: expected 0 or more seconds, got {refresh_s}")
        observer = HeardOut(observer)
        digest = namespace.digest() if isinstance(namespace, Namespace) else namespace
        where = (Place() if place is None else place).folder()
        self.folders = [f"{path}/{digest.hex()}/{where}" for path in split_paths(paths)]
        files = FileStorage(name, engine=engine, direct=direct, observer=observer) if storage is None else storage
        try:
            meta = read_meta(files, self.folders[0])
            if meta is None or meta.paths != len(self.folders):
                got = "none" if meta is None else f"one of {meta.paths} paths"
                raise ConfigError(
                    f"{name}: expected a tier of {len(self.folders)} paths in {self.folders[0]}, got {got}"
                )
            slabs = SlabFiles(files, self.folders, meta.record_bytes, meta.slots_per_file, 1.0)
            super().__init__(
                name, files, self._empty(meta.slots_per_file), slabs, page_bytes=meta.payload_bytes,
                slot_bytes=meta.slot_bytes, trailer_bytes=meta.trailer_bytes, clock=clock, observer=observer,
            )  # fmt: skip
            self._set_id = bytes.fromhex(meta.set_id)
            self._refresh_s = refresh_s
            self._seen = b""
            self._in_doubt = False
            self._next_look = 0.0
            self.refresh()
        except BaseException:
            files.close()
            raise

    def _empty(self, slots_per_file: int) -> SlotTable:
        return SlotTable(slots_per_file, len(self.folders), LRU())

    def refresh(self) -> bool:
        """Look at the owner's journal now. True if it says anything new.

        Raises OSError: what could be opened serves.
        """
        with self._lock:
            self._next_look = time.monotonic() + self._refresh_s
            for _ in range(3):  # a snapshot may take a journal's place between the listing and the reading
                try:
                    found = recover(self._storage, self.folders[0], self._set_id)
                    break
                except FileNotFoundError:
                    continue
            else:
                return False
            seen = xxhash.xxh3_128_digest(found.entries.tobytes())
            if seen == self._seen and not self._in_doubt:
                return False
            if not self._book.in_flight:  # a slab may have been deleted, and another made in its place
                self._slabs.close_all()
                self._in_doubt = False
            failed: OSError | None = None
            try:
                self._slabs.open_all(writable=False)
            except OSError as error:
                failed = error  # the table must fit the slabs that are open all the same
            self._slabs.max_slots = self._slabs.total_slots
            fresh = self._empty(self._table.slots_per_file)
            for slab in self._slabs.files.values():
                fresh.add_file(slab.number, slab.path, slab.slots)
            fresh.restore(found.entries)
            self._table.take_pages_of(fresh)
            self._seen = seen if failed is None else b""
        if failed is not None:
            raise failed
        return True

    # --- the verbs

    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        self._look_again(keys)
        return super().lookup(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        self._look_again(keys)
        return super().get_into(keys, buffers, deadline_s=deadline_s)

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        batch = self._book.open("put", keys, buffers, deadline_s=deadline_s)
        batch.fail(self._refusal())
        return batch

    def remove(self, keys: Sequence[bytes]) -> TierHandle:
        batch = self._book.open("remove", keys)
        batch.fail(self._refusal())
        return batch

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> TierHandle:
        batch = self._book.open("pin", keys, ttl_s=ttl_s)
        batch.fail(self._refusal())
        return batch

    def stats(self) -> TierStats:
        with self._lock:
            pages = len(self._table)
        capacity = self._slabs.max_slots * self.record_bytes
        return TierStats(capacity, pages * self.record_bytes, pages, 0, self._book.in_flight, self._book.counters())

    # --- inside

    def _look_again(self, keys: Sequence[bytes]) -> None:
        if time.monotonic() >= self._next_look:
            with self._lock:
                missing = -1 in self._table.find(keys)
            if missing:
                self._try_refresh()

    def _try_refresh(self) -> None:
        """`refresh`. Where that fails the old view serves on: each page is checked as it is read."""
        try:
            self.refresh()
        except OSError as error:
            self._book.count("refresh_failed")
            self._observer.noted("disk.refresh_failed", name=self.name, message=str(error))

    def _refusal(self) -> TierError:
        return TierError(f"{self.name}: expected its owner to do this, got a reader; open a DiskTier at its own place")

    def _set_aside(self, transfer: ReadTransfer, bad: list[int]) -> list[Outcome]:
        """Written over by the owner since, most likely; then it is a miss like any other."""
        before = dict(zip(transfer.keys_of(bad), [transfer.slots[at] for at in bad], strict=True))
        self._in_doubt = True
        self._try_refresh()
        with self._lock:
            now = dict(zip(before, self._table.find(before), strict=True))
        return [
            (transfer.positions[at], PageStatus.MISS, None)
            for at, key in zip(bad, transfer.keys_of(bad), strict=True)
            if now[key] != before[key]
        ]

    def _end_more(self) -> None:
        pass
