"""DiskTier: pages in slab files on local disks. They are there again after a restart, and never wrong.

Each page is one record, payload and trailer in one place, in a slot of a preallocated slab file. A journal says which
page lies in which slot; a record says what it is itself, and is checked whenever it is read, so whatever a crash, a bad
sector or another program did to it makes a miss, never a wrong byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtransfer.kernels.errors import ConfigError, OwnershipError
from kvtransfer.kernels.events import NO_OBSERVER, HeardOut, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle, TierStats
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.cleaner import Cleaner
from kvtransfer.tiers.commit_log import CommitLog, SyncMode
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.disk_open import DiskPlan, open_disk
from kvtransfer.tiers.disk_reading import DiskReading, failing
from kvtransfer.tiers.disk_room import DiskRoom
from kvtransfer.tiers.disk_transfers import Outcome, ReadTransfer, WriteTransfer
from kvtransfer.tiers.eviction import LRU, EvictionPolicy
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.keys import Namespace
from kvtransfer.tiers.pins import PinBook
from kvtransfer.tiers.record_native import record_tools
from kvtransfer.tiers.storage import EngineKind, FileStorage


class DiskTier(DiskReading):
    """Records of ``spec`` under one or several folders. See `Tier` and the module. Thread-safe.

    Args:
        paths: folders, as a sequence or in one string with ``;`` between them; slabs are spread over all. All processes
            of a host may be given the same ones: each makes a sub-folder of its own (disk_folder.py) and finds it
                again.
        spec: of the records of this process (its share of layers and heads).
        namespace: of the model served (keys.py): names the folder, so that another model's records are never met.
            Records of the model's adapters may lie in it: their stored keys differ. Where keys are those of all heads
            (``share_across_tp``), that of this rank's part: `kvtransfer.tier_build.RankPart.own_namespace`.
        capacity_bytes: of everything that is kept, records, trailers, journals; of all ``owners`` processes together. A
            process takes its share and says how much that is.
        capacity_pages: instead: exactly how many records this process may keep; journals come on top.
        owners: how many processes share ``capacity_bytes``.
        place: which of them this is. Two at one place: the second is refused.
        sync: what survives what, see commit_log.py. "none": everything acknowledged survives the process. "interval":
            and a power failure, but for the last ``interval_s``. "batch": and a power failure, all of it.
        file_bytes: length of a slab; a 64th of the capacity, at least 64 MiB and at most 16 GiB, unless told otherwise.
        policy: which pages go first; the least recently used, unless told otherwise. Pages that are pinned or read
            stay.
        clean_every_s, full_share, idle_s: the cleaner, see cleaner.py.
        disk_share: the capacity is cut at open so that the file system stays below this share of its size; a slab is
            not made where it would pass it, and whole slabs go where others fill it.
        engine, direct: see `FileStorage`. storage: stands in for it. clock: Unix time.

    A batch whose time is up ends what the device was not given yet. What it was given is waited for: the kernel may
    touch those buffers, so no deadline can end it, and a device that never answers holds its handles.
    Raises ConfigError, OwnershipError (a second owner), CapacityError (no room for one record), OSError.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        spec: KVSpec,
        *,
        namespace: bytes | Namespace,
        capacity_bytes: int | None = None,
        capacity_pages: int | None = None,
        owners: int = 1,
        place: Place | None = None,
        sync: SyncMode = "none",
        interval_s: float = 1.0,
        file_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        clean_every_s: float = 60.0,
        full_share: float = 0.85,
        idle_s: float = 24 * 3600.0,
        disk_share: float = 0.85,
        engine: EngineKind = "auto",
        direct: bool | None = None,
        name: str = "disk",
        observer: Observer = NO_OBSERVER,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        observer = HeardOut(observer)
        record_tools()  # built now, not by the first page
        plan = DiskPlan(
            name=name,
            paths=paths,
            spec=spec,
            namespace=namespace.digest() if isinstance(namespace, Namespace) else namespace,
            capacity_bytes=capacity_bytes,
            capacity_pages=capacity_pages,
            owners=owners,
            place=Place() if place is None else place,
            file_bytes=file_bytes,
            disk_share=disk_share,
        )
        if sync not in ("none", "batch", "interval"):
            raise ConfigError(f"{name}: sync: expected 'none', 'batch' or 'interval', got {sync!r}")
        for what, value in (("interval_s", interval_s), ("clean_every_s", clean_every_s), ("idle_s", idle_s)):
            if not value > 0:
                raise ConfigError(f"{name}: {what}: expected seconds above 0, got {value}")
        if not 0 < full_share <= 1:
            raise ConfigError(f"{name}: full_share: expected a share above 0 and at most 1, got {full_share}")
        plan.check()
        files = FileStorage(name, engine=engine, direct=direct, observer=observer) if storage is None else storage
        try:
            disk = open_disk(files, plan, LRU() if policy is None else policy, observer)
        except BaseException:
            files.close()
            raise
        super().__init__(
            name, files, disk.table, disk.slabs, page_bytes=spec.page_bytes, slot_bytes=disk.slot_bytes,
            trailer_bytes=disk.trailer_bytes, clock=clock, observer=observer,
        )  # fmt: skip
        self.folders, self.namespace = disk.folders, plan.namespace
        self._found = {"recovered": len(disk.table), "journal_damaged": disk.damaged}
        self._pins = PinBook()
        self._full_share = full_share
        self._log = CommitLog(
            name,
            self._storage,
            disk.journal,
            self._table,
            self._lock,
            sync,
            clock,
            self._book.own_thread,
            observer,
        )
        self._room = DiskRoom(
            name, self._slabs, self._table, self._lock, self._log, self._pins, self._book, clock, observer
        )
        self._cleaner = Cleaner(
            self._room, self._log, sync_every_s=interval_s if sync == "interval" else None, clean_every_s=clean_every_s,
            full_share=full_share, idle_s=idle_s,
        )  # fmt: skip
        self._cleaner.start()

    # --- the verbs

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        batch = self._book.open("put", keys, buffers, deadline_s=deadline_s)
        with failing(batch):
            self._put(batch, keys, buffers)
        return batch

    def _put(self, batch: Batch, keys: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> None:
        with self._lock:
            there = self._table.find(keys)
            self._table.touch([key for key, slot in zip(keys, there, strict=True) if slot >= 0], self._clock())
        outcomes: list[Outcome] = []
        wanted: list[int] = []
        twins: dict[int, list[int]] = {}  # of a page that is named twice, its other positions
        first: dict[bytes, int] = {}
        unfit = self._unfit(buffers)
        sealed = self._check.many(list(zip(keys, buffers, strict=True)), whole=False)
        for at, (key, slot) in enumerate(zip(keys, there, strict=True)):
            wrong = unfit.get(at) or sealed[at]
            if wrong is not None:
                outcomes.append((at, PageStatus.ERROR, wrong))
            elif slot >= 0:
                outcomes.append((at, PageStatus.OK, None))
            elif key in first:
                twins.setdefault(first[key], []).append(at)
            else:
                first[key] = at
                wanted.append(at)
        slots, refused = self._room.make(len(wanted))
        for at in wanted[len(slots) :]:
            outcomes += [(twin, PageStatus.NO_ROOM, refused) for twin in (at, *twins.get(at, ()))]
        if outcomes:
            batch.settle_many(outcomes)
        if slots:
            transfer = WriteTransfer(
                batch,
                wanted[: len(slots)],
                slots,
                self._where(slots),
                buffers,
                twins=twins,
                dropped=self._unwritten,
                written=self._log.written,
            )
            self._submit(transfer)

    def remove(self, keys: Sequence[bytes]) -> TierHandle:
        """See `Tier.remove`. ERROR by the journal: the page is gone from this process, and may be back in the next."""
        batch = self._book.open("remove", keys)
        outcomes: list[Outcome] = []
        gone: list[int] = []
        with self._lock:
            for at, (key, slot) in enumerate(zip(keys, self._table.find(keys), strict=True)):
                if slot >= 0 and (self._pins.holds(key) or self._table.is_read(slot)):
                    why = "is pinned" if self._pins.holds(key) else "is being read"
                    held = OwnershipError(f"{self.name}: remove: expected a page that nobody holds, got one that {why}")
                    outcomes.append((at, PageStatus.ERROR, held))
                elif slot >= 0 and (dropped := self._table.drop([key])):
                    self._log.note_gone(dropped)
                    gone.append(at)
                else:
                    outcomes.append((at, PageStatus.MISS, None))
        batch.settle_many(outcomes)
        if gone:

            def flushed(error: BaseException | None) -> None:
                status = PageStatus.OK if error is None else PageStatus.ERROR
                batch.settle_many((at, status, error) for at in gone)

            batch.begin(gone)
            self._log.flush(flushed)
        return batch

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> TierHandle:
        batch = self._book.open("pin", keys, ttl_s=ttl_s)
        with self._lock:
            slots = self._table.find(keys)
            for key, slot in zip(keys, slots, strict=True):
                if slot >= 0:
                    self._pins.pin(key, ttl_s)
        batch.settle_many((at, PageStatus.OK if slot >= 0 else PageStatus.MISS, None) for at, slot in enumerate(slots))
        return batch

    def stats(self) -> TierStats:
        with self._lock:
            pages = len(self._table)
            pinned = sum(slot >= 0 for slot in self._table.find(self._pins.keys()))
        return TierStats(
            self._slabs.max_slots * self.record_bytes,
            pages * self.record_bytes,
            pages,
            pinned,
            self._book.in_flight,
            {**self._book.counters(), **self._found},
            kept_bytes=int(self._slabs.max_slots * self._full_share) * self.record_bytes,
        )

    def clean(self) -> None:
        """What the cleaner does every ``clean_every_s``, now, on the calling thread."""
        self._cleaner.clean()

    def sync(self) -> None:
        """Return once everything acknowledged survives a power failure, whatever ``sync=`` says. Raises OSError."""
        self._log.sync_now()

    # --- inside

    def _end_more(self) -> None:
        self._cleaner.close()
        self._log.close()

    def _unwritten(self, slots: list[int]) -> None:
        with self._lock:
            self._table.give_back(slots)

    def _set_aside(self, transfer: ReadTransfer, bad: list[int]) -> list[Outcome]:
        rotten = transfer.keys_of(bad)
        with self._lock:
            found = zip(rotten, bad, self._table.find(rotten), strict=True)
            same = [key for key, at, slot in found if slot == transfer.slots[at]]
            self._log.note_gone(self._table.drop(same))
        for key in rotten:
            self._observer.noted("tier.corrupt", name=self.name, page=key.hex())
        return []
