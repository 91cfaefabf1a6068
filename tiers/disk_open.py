"""Opening a disk tier: checks, folders, slabs, recovery, and what capacity is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.kernels.errors import CapacityError, ConfigError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.disk_folder import Place, claim_folders, split_paths
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.eviction import EvictionPolicy
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.journal import Journal, journal_bytes, metadata_bytes, recover
from kvtransfer.tiers.record import padded_bytes, trailer_bytes
from kvtransfer.tiers.slab_files import SlabFiles

_MIN_FILE_BYTES, _MAX_FILE_BYTES = 64 << 20, 16 << 30
_MAX_RECORD_BYTES = 1 << 30  # one call moves a record, and says how many bytes in 31 bits
_OTHER_BYTES = 16 << 10  # LOCK, meta.json and its draft, in whole blocks


@dataclass(frozen=True)
class DiskPlan:
    """What `DiskTier` was asked for; see there."""

    name: str
    paths: str | Path | Sequence[str | Path]
    spec: KVSpec
    namespace: bytes
    capacity_bytes: int | None
    capacity_pages: int | None
    owners: int
    place: Place
    file_bytes: int | None
    disk_share: float

    @property
    def record_bytes(self) -> int:
        """Of one padded payload and its trailer."""
        return padded_bytes(self.spec.page_bytes) + trailer_bytes(self.spec)

    def check(self) -> None:
        """Raise ConfigError, before anything is touched, on what can't be meant."""
        if len(self.namespace) != 32:
            raise ConfigError(f"{self.name}: namespace: expected a digest of 32 bytes, got {len(self.namespace)}")
        if (self.capacity_bytes is None) == (self.capacity_pages is None):
            raise ConfigError(
                f"{self.name}: expected either capacity_bytes or capacity_pages, "
                f"got {self.capacity_bytes} and {self.capacity_pages}"
            )
        if self.owners < 1 or not 0 < self.disk_share <= 1:
            raise ConfigError(
                f"{self.name}: expected at least one owner and a disk_share above 0 and at most 1, "
                f"got {self.owners} and {self.disk_share}"
            )
        if self.record_bytes > _MAX_RECORD_BYTES:
            raise ConfigError(
                f"{self.name}: expected records of at most {_MAX_RECORD_BYTES} bytes, got {self.record_bytes}; take "
                "smaller pages, or cut them by layers or heads"
            )
        if self.file_bytes is not None and self.file_bytes < self.record_bytes:
            raise ConfigError(f"{self.name}: file_bytes: expected at least {self.record_bytes}, got {self.file_bytes}")
        split_paths(self.paths)
        self.slots()

    def slots(self) -> int:
        """How many records this process may keep, before the file systems are looked at."""
        if self.capacity_pages is not None:
            slots, words = self.capacity_pages, f"capacity_pages={self.capacity_pages}"
        else:
            assert self.capacity_bytes is not None
            share = self.capacity_bytes // self.owners
            low, high = 0, max(0, share // self.record_bytes)
            while low < high:  # the journals of n records leave room for n records
                middle = (low + high + 1) // 2
                fits = middle * self.record_bytes + metadata_bytes(middle) + _OTHER_BYTES <= share
                low, high = (middle, high) if fits else (low, middle - 1)
            slots, words = low, f"{self.capacity_bytes} bytes for {self.owners} process(es)"
        if slots < 1:
            raise CapacityError(
                f"{self.name}: expected room for at least one record of {self.record_bytes} bytes, a journal and "
                f"{_OTHER_BYTES} bytes besides, got {words}"
            )
        return slots

    def slots_per_file(self) -> int:
        """Of a tier that is made anew."""
        wanted = self.file_bytes
        if wanted is None:
            wanted = min(_MAX_FILE_BYTES, max(_MIN_FILE_BYTES, self.slots() * self.record_bytes // 64))
        return max(1, min(wanted // self.record_bytes, -(-self.slots() // len(split_paths(self.paths)))))


@dataclass
class OpenDisk:
    """What `open_disk` made. ``damaged`` counts journal batches that were not whole."""

    folders: list[str]
    slot_bytes: int
    trailer_bytes: int
    record_bytes: int
    slabs: SlabFiles
    table: SlotTable
    journal: Journal
    damaged: int


def open_disk(storage: Storage, plan: DiskPlan, policy: EvictionPolicy, observer: Observer) -> OpenDisk:
    """Claim the folders, recover what an earlier run left, cut it to the capacity, and begin a journal.

    Raises ConfigError, OwnershipError, CapacityError, OSError. The caller closes ``storage`` then.
    """
    folders = [f"{path}/{plan.namespace.hex()}/{plan.place.folder()}" for path in split_paths(plan.paths)]
    wanted = {
        "slots_per_file": plan.slots_per_file(),
        "capacity_bytes": plan.capacity_bytes or plan.slots() * plan.record_bytes,
        "owners": plan.owners,
    }
    meta = claim_folders(storage, folders, plan.spec, plan.namespace, plan.place, wanted)[0]
    slabs = SlabFiles(storage, folders, plan.record_bytes, meta.slots_per_file, plan.disk_share)
    slabs.open_all(writable=True)
    slots = plan.slots()
    slabs.max_slots, why = slabs.allowed_slots(slots, metadata_bytes(slots))
    table = SlotTable(meta.slots_per_file, len(folders), policy)
    for slab in slabs.files.values():
        table.add_file(slab.number, slab.path, slab.slots)
    set_id = bytes.fromhex(meta.set_id)
    found = recover(storage, folders[0], set_id)
    lost = table.restore(found.entries)
    for number in table.files_by_use():
        if slabs.total_slots <= slabs.max_slots:
            break
        lost += len(table.drop_file(number))
        try:
            slabs.delete(number)
        except OSError as error:
            observer.noted("disk.stuck", name=plan.name, slab=number, message=str(error))
    journal = Journal(storage, folders[0], set_id, journal_bytes(slots), generation=found.generation)
    try:
        journal.snapshot(table.entries(), journal.start_next())
    except OSError as error:  # what is there can be read; the cleaner tries again
        observer.noted("disk.journal_failed", name=plan.name, message=str(error))
    share = slabs.max_slots * plan.record_bytes
    cut = f", cut from {slots} since, {why}" if why else ""
    observer.noted(
        "disk.size",
        name=plan.name,
        message=f"{plan.name}: {slabs.max_slots} pages, {share} bytes at {plan.place.folder()}, which has one share of "
        f"{plan.owners}{cut}; {len(table)} pages found, {lost} lost, {found.damaged} damaged journal batches",
        cut=bool(why),
        share_bytes=share,
        found_pages=len(table),
        lost_pages=lost,
    )
    return OpenDisk(
        folders,
        padded_bytes(plan.spec.page_bytes),
        trailer_bytes(plan.spec),
        plan.record_bytes,
        slabs,
        table,
        journal,
        found.damaged,
    )
