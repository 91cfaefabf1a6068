"""`kvtransfer tier inspect` and `tier fsck`: what lies in a disk tier's folders, and whether it is right.

Both take paths as configured, a namespace's folder below them, or the folder of one process. `inspect` changes nothing
and may look at a tier in use. `fsck` reads every record; with ``repair`` it owns the tier meanwhile and takes out what
is wrong.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtransfer.kernels.errors import ConfigError, RecordError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.disk_folder import LOCK, META, Meta, read_meta, split_paths
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.eviction import LRU
from kvtransfer.tiers.journal import SNAPSHOT, Journal, journal_bytes, recover
from kvtransfer.tiers.sealed import check_whole
from kvtransfer.tiers.slab_files import SlabFiles
from kvtransfer.tiers.storage import FileStorage


@dataclass(frozen=True)
class TierReport:
    """What one process's folders hold.

    owner               who has it open now, '' if nobody
    pages, lost_pages   that the journal knows: in slabs that are there, and in slabs that are not
    damaged             journal batches that are not whole
    slabs, slab_slots   how many files, and records that they have room for
    oldest_s, newest_s  seconds since the last use of the page used longest ago, and latest; None without pages
    strange             names of files that no tier made
    """

    folders: list[str]
    meta: Meta
    owner: str
    pages: int
    lost_pages: int
    damaged: int
    slabs: int
    slab_slots: int
    oldest_s: float | None
    newest_s: float | None
    strange: list[str]

    @property
    def used_bytes(self) -> int:
        """Of the pages."""
        return self.pages * self.meta.record_bytes

    @property
    def slab_bytes(self) -> int:
        """Of the slabs."""
        return self.slab_slots * self.meta.record_bytes


@dataclass
class CheckReport:
    """What `check_tier` found. ``bad``: stored key in hex, and what is wrong with its record."""

    folders: list[str]
    owner: str
    checked: int
    bad: list[tuple[str, str]]
    lost_pages: int
    damaged: int
    repaired: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.bad or self.lost_pages or self.damaged)


def find_tiers(text: str) -> list[list[str]]:
    """The tiers at or below the paths in ``text`` (``;`` between several, as configured): the folders of each, in turn.

    Folders of paths that are not named are left out. Raises ConfigError where there is none, and for one whose first
    path, which has the journal, is not named.
    """
    paths = split_paths(text)
    folders: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{path}: expected a folder, got {'a file' if os.path.exists(path) else 'nothing'}")
        found = (sorted(Path(path).glob(os.path.join(depth, META))) for depth in ("", "*", "*/*"))
        folders += [str(meta.parent) for meta in next((metas for metas in found if metas), [])]
    if not folders:
        raise ConfigError(f"{text}: expected a disk tier's folder or one that holds some, got none with a {META}")
    tiers: dict[str, dict[int, str]] = {}
    storage = FileStorage("inspect", engine="threads", direct=False)
    try:
        for folder in folders:
            meta = read_meta(storage, folder)
            assert meta is not None  # it was found by its file
            tiers.setdefault(meta.set_id, {})[meta.path_number] = folder
    finally:
        storage.close()
    for parts in tiers.values():
        if 0 not in parts:
            raise ConfigError(
                f"{min(parts.values())}: expected all paths of the tier, got it without its first, which has the "
                "journal; name them as configured, with ; between them"
            )
    return [[parts[number] for number in sorted(parts)] for parts in tiers.values()]


class _Opened:
    """The files of one tier, and the table that its journal makes."""

    def __init__(self, storage: FileStorage, folders: Sequence[str]) -> None:
        meta = read_meta(storage, folders[0])
        assert meta is not None  # it was found by its file
        self.meta, self.folders = meta, list(folders)
        self.slabs = SlabFiles(storage, folders, meta.record_bytes, meta.slots_per_file, 1.0)
        self.slabs.open_all(writable=False)
        self.table = SlotTable(meta.slots_per_file, len(folders), LRU())
        for slab in self.slabs.files.values():
            self.table.add_file(slab.number, slab.path, slab.slots)
        self.found = recover(storage, folders[0], bytes.fromhex(meta.set_id))
        self.lost = self.table.restore(self.found.entries)


def inspect_tier(folders: Sequence[str]) -> TierReport:
    """What a tier's ``folders`` hold; changes nothing. Raises TierError or ConfigError if they can't be understood."""
    storage = FileStorage("inspect", engine="threads", direct=False)
    try:
        opened = _Opened(storage, folders)
        now = time.time()
        used = opened.table.entries()["used_s"]
        names = [name for folder in folders for name in storage.list_folder(folder)]
        return TierReport(
            folders=list(folders),
            meta=opened.meta,
            owner=_owner(folders[0]),
            pages=len(opened.table),
            lost_pages=opened.lost,
            damaged=opened.found.damaged,
            slabs=len(opened.slabs.files),
            slab_slots=opened.slabs.total_slots,
            oldest_s=now - float(used.min()) if len(used) else None,
            newest_s=now - float(used.max()) if len(used) else None,
            strange=[n for n in names if n not in (LOCK, META, SNAPSHOT) and not n.startswith(("slab.", "journal."))],
        )
    finally:
        storage.close()


def _owner(folder: str) -> str:
    """Who holds the lock, '' if nobody. Takes a shared lock for a moment at most."""
    try:
        fd = os.open(os.path.join(folder, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return os.pread(fd, 200, 0).decode(errors="replace").strip() or "an unknown process"
    finally:
        os.close(fd)


def check_tier(folders: Sequence[str], *, repair: bool = False) -> CheckReport:
    """Read and verify every record. With ``repair``: own the tier meanwhile, drop what is not right from its journal.

    Raises OwnershipError if ``repair`` is asked for while a process owns it, ConfigError if not all of its paths are
    named then; TierError, OSError.
    """
    storage = FileStorage("fsck", engine="threads", direct=False)
    try:
        if repair:
            for folder in folders:
                storage.lock(os.path.join(folder, LOCK), f"fsck, process {os.getpid()}\n")
        opened = _Opened(storage, folders)
        if repair and len(folders) < opened.meta.paths:
            raise ConfigError(
                f"{folders[0]}: expected all {opened.meta.paths} paths of the tier, got {len(folders)}: pages on the "
                "others would be dropped; name them as configured, with ; between them"
            )
        owner = "" if repair else _owner(folders[0])
        bad = list(_wrong_records(opened))
        pages = len(opened.table)
        report = CheckReport(
            list(folders), owner, pages, [(k.hex(), why) for k, why in bad], opened.lost, opened.found.damaged
        )
        if repair and not report.clean:
            opened.table.drop([key for key, _ in bad])
            size = journal_bytes(max(1, opened.slabs.total_slots))
            set_id = bytes.fromhex(opened.meta.set_id)
            journal = Journal(storage, folders[0], set_id, size, generation=opened.found.generation)
            journal.snapshot(opened.table.entries(), journal.start_next())
            journal.close()
            report.repaired = True
        return report
    finally:
        storage.close()


def _wrong_records(opened: _Opened) -> Iterator[tuple[bytes, str]]:
    """Pages whose record does not verify, and why."""
    meta = opened.meta
    buffer = RecordBuffer(np.empty(meta.slot_bytes, np.uint8), np.empty(meta.trailer_bytes, np.uint8))
    entries = opened.table.entries()
    entries.sort(order="slot")
    names = entries["key"].tobytes()
    files: dict[int, int] = {}
    try:
        for at, slot in enumerate(entries["slot"].tolist()):
            key = names[32 * at : 32 * at + 32]
            number, index = divmod(slot, meta.slots_per_file)
            if number not in files:
                path = os.path.join(opened.folders[opened.slabs.files[number].path], f"slab.{number:06d}")
                files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                got = os.preadv(files[number], [buffer.payload.data, buffer.trailer.data], index * meta.record_bytes)
                if got != meta.record_bytes:
                    raise RecordError(f"record: expected {meta.record_bytes} bytes, got {got}")
                header = check_whole(key, buffer)
                header.require(payload_bytes=meta.payload_bytes)
            except (RecordError, OSError) as error:
                yield key, str(error)
    finally:
        for fd in files.values():
            os.close(fd)


def describe(report: TierReport) -> str:
    """A few lines for people."""
    meta = report.meta
    used = report.used_bytes / max(1, report.slab_bytes)
    lines = [
        "; ".join(report.folders),
        f"  namespace  {meta.namespace}",
        f"  place      {meta.place}, {len(report.folders)} of {meta.paths} path(s)",
        f"  owner      {report.owner or 'nobody'}",
        f"  records    {meta.payload_bytes} bytes of payload, {meta.record_bytes} on the disk",
        f"  configured {meta.capacity_bytes} bytes for {meta.owners} owner(s)",
        f"  slabs      {report.slabs} files, {report.slab_slots} records, {report.slab_bytes} bytes",
        f"  pages      {report.pages}, {report.used_bytes} bytes, {used:.0%} of the slabs",
    ]
    if report.oldest_s is not None and report.newest_s is not None:
        lines.append(f"  last used  {report.newest_s:.0f} to {report.oldest_s:.0f} s ago")
    if report.lost_pages or report.damaged:
        lines.append(f"  damage     {report.lost_pages} pages in lost slabs, {report.damaged} journal batches")
    if report.strange:
        lines.append(f"  strange    {', '.join(report.strange)}")
    return "\n".join(lines)


def describe_check(report: CheckReport) -> str:
    """A few lines for people."""
    lines = [f"{'; '.join(report.folders)}: {report.checked} records read, {len(report.bad)} wrong"]
    lines += [f"  {key}: {why}" for key, why in report.bad[:20]]
    if len(report.bad) > 20:
        lines.append(f"  and {len(report.bad) - 20} more")
    if report.lost_pages:
        lines.append(f"  {report.lost_pages} pages lie in slabs that are not there")
    if report.damaged:
        lines.append(f"  {report.damaged} journal batches are not whole")
    if report.owner and not report.clean:
        lines.append(f"  {report.owner} has it open: what it changed meanwhile may look wrong")
    if report.repaired:
        lines.append("  repaired: what was wrong is out of the journal; its slots are free")
    return "\n".join(lines)
