"""The journal: which record lies in which slot, as it changes, in a form that a crash can't make lie.

A journal file is preallocated and holds batches, one behind the other: a header of 64 bytes with a checksum over the
batch, then entries of 64 bytes. A snapshot is a file of the same form that holds everything at one moment; it takes its
place by rename, and the journals before it are removed. Reading takes every batch that is whole and newer than the one
before it, and steps over what is not: a batch that was torn costs its own entries, nothing else.

What a journal says is never trusted with content: each record names its own key and carries its checksum.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.kernels.errors import CapacityError, TierError
from kvtransfer.tiers.io import Storage, write_file

PUT, REMOVE = 1, 2
ENTRY = np.dtype(
    [("kind", "u1"), ("pad", "u1", 7), ("slot", "<u8"), ("used_s", "<f8"), ("zero", "<u8"), ("key", "u1", 32)]
)
SNAPSHOT = "snapshot"
_PREFIX = "journal."
_MAGIC = b"\x89KVTJNL\n"
_HEADER = struct.Struct("<8sQI4xQQ16s8x")  # magic, xxh3_64 of what follows, entries, number, generation, set
_UNIT = 64
_SNAPSHOT_BATCH = 512  # entries: what one flipped bit can cost
_MIN_BYTES, _MAX_BYTES = 16 << 10, 64 << 20


def journal_bytes(num_slots: int) -> int:
    """Length of a journal of a tier of ``num_slots``: room for four changes of each."""
    wanted = 4 * num_slots * 2 * _UNIT  # a batch may hold one entry, and has a header
    return min(_MAX_BYTES, max(_MIN_BYTES, -(-wanted // 4096) * 4096))


def metadata_bytes(num_slots: int) -> int:
    """The most that journals and snapshots of ``num_slots`` take on the disk, the draft of the next one included."""
    return 2 * journal_bytes(num_slots) + 2 * (num_slots + num_slots // _SNAPSHOT_BATCH + 1) * _UNIT


def entries_of(
    kind: int, slots: Sequence[int] | NDArray[np.int64], used_s: float | NDArray[np.float64], keys: Sequence[bytes]
) -> NDArray[Any]:
    """Journal entries (`ENTRY`): ``keys`` went into, or out of, ``slots``; last used at ``used_s`` (Unix time)."""
    entries = np.zeros(len(slots), dtype=ENTRY)
    entries["kind"], entries["slot"], entries["used_s"] = kind, slots, used_s
    if keys:
        entries["key"] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)
    return entries


def encode_batch(entries: NDArray[Any], number: int, generation: int, set_id: bytes) -> bytes:
    """One batch."""
    head = _HEADER.pack(_MAGIC, 0, len(entries), number, generation, set_id)
    checked = head[16:] + entries.tobytes()
    return _MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked)) + checked


@dataclass
class Recovered:
    """What a folder's snapshot and journals say.

    entries     every entry, in order
    damaged     batches that were not whole: torn by a crash, or changed later
    generation  the highest one met
    files       names of the journals and the snapshot read, oldest first
    """

    entries: NDArray[Any]
    damaged: int = 0
    generation: int = 0
    files: list[str] = field(default_factory=list)


def recover(storage: Storage, folder: str, set_id: bytes) -> Recovered:
    """Read everything. Raises OSError only: damage is counted."""
    names = storage.list_folder(folder)
    journals = sorted(
        (int(name[len(_PREFIX) :]), name)
        for name in names
        if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit()
    )
    out = Recovered(np.zeros(0, dtype=ENTRY))
    parts: list[NDArray[Any]] = []
    since = 0
    if SNAPSHOT in names:
        data = storage.read_all(os.path.join(folder, SNAPSHOT))
        since = _read(data, set_id, None, out, parts)
        out.files.append(SNAPSHOT)
    for generation, name in journals:
        out.generation = max(out.generation, generation)
        if generation >= since:
            _read(storage.read_all(os.path.join(folder, name)), set_id, generation, out, parts)
            out.files.append(name)
    out.generation = max(out.generation, since)  # a journal numbered below the snapshot's would say nothing
    if parts:
        out.entries = np.concatenate(parts)
    return out


def _read(data: bytes, set_id: bytes, generation: int | None, out: Recovered, parts: list[NDArray[Any]]) -> int:
    """Add the whole batches of ``data`` to ``parts``; returns their generation (0: there are none).

    ``generation`` None takes any: a snapshot's is that of the first journal behind it. Batches are numbered from 1 in
    each file: a gap is damage, and so is anything but zeros behind the last one.
    """
    found, last, behind = 0, 0, 0
    units = len(data) // _UNIT
    words = np.frombuffer(data, dtype="<u8", count=units * _UNIT // 8)
    wanted = np.zeros(units, dtype=np.bool_)
    view = memoryview(data)
    unpack, digest = _HEADER.unpack_from, xxhash.xxh3_64_intdigest
    for at in np.flatnonzero(words[:: _UNIT // 8] == int.from_bytes(_MAGIC, "little")).tolist():
        if at < behind:
            continue  # inside a batch that is whole
        _, check, count, number, its, owner = unpack(data, at * _UNIT)
        stop = at + 1 + count
        if stop > units or owner != set_id or number <= last or (generation is not None and its != generation):
            continue
        if digest(view[at * _UNIT + 16 : stop * _UNIT]) != check:
            continue
        wanted[at + 1 : stop] = True
        out.damaged += number - last - 1
        last, behind, found = number, stop, its
    out.damaged += bool(words[behind * _UNIT // 8 :].any())
    parts.append(np.frombuffer(data, dtype=ENTRY, count=units)[wanted])
    return found


class Journal:
    """The journal that a tier appends to. Not thread-safe (the tier holds its own lock) but for `prepare`.

    After `append` and `sync` returned, a crash keeps the batch. What a failed append left behind is wiped, or written
    over by the next one.
    """

    def __init__(self, storage: Storage, folder: str, set_id: bytes, nbytes: int, *, generation: int) -> None:
        self._storage, self._folder, self._set_id, self._nbytes = storage, folder, set_id, nbytes
        self._generation = generation
        self._number = 0
        self._file: int | None = None
        self._at = 0
        self._dirty = False
        self._doubted = 0  # generation of the newest journal that may not be safe; 0: none
        self._making = threading.Lock()  # of the next file
        self._spare: int | None = None  # made already

    @property
    def in_doubt(self) -> bool:
        """Whether what was appended may never become safe by `sync`: one failed (what the kernel could not write, it
        forgets), or it stands in an older file that was not synced. A snapshot that succeeds puts an end to it."""
        return self._doubted > 0

    @property
    def usable(self) -> bool:
        """Whether there is a file to append to."""
        return self._file is not None

    @property
    def free_entries(self) -> int:
        """How many entries one more batch could hold."""
        return 0 if self._file is None else max(0, (self._nbytes - self._at) // _UNIT - 1)

    @property
    def filled(self) -> float:
        """Share of the file that is used."""
        return self._at / self._nbytes

    def append(self, entries: NDArray[Any], *, sync: bool) -> None:
        """Write one batch; with ``sync`` return once it survives a power failure.

        Raises OSError, TierError where there is no file, CapacityError where it is full (`start_next` helps).
        Nothing of the batch is there then.
        """
        if self._file is None:
            raise TierError("journal: expected a file to write to, got none: making it failed")
        if len(entries) > self.free_entries:
            raise CapacityError(f"journal: expected room for {len(entries)} entries, got {self.free_entries}")
        data = encode_batch(entries, self._number + 1, self._generation, self._set_id)
        try:
            self._storage.write_at(self._file, self._at, data)
            self._dirty = True
            if sync:
                self.sync()
        except OSError:
            try:
                self._storage.write_at(self._file, self._at, bytes(len(data)))
            except OSError:
                pass  # the next batch is written over it
            raise
        self._number += 1
        self._at += len(data)

    def sync(self) -> None:
        """Return once everything appended survives a power failure."""
        if self._dirty and self._file is not None:
            try:
                self._storage.sync(self._file)
            except OSError:
                self._doubted = self._generation
                raise
            self._dirty = False

    def prepare(self) -> None:
        """Make the file that `start_next` will begin, unless it is there: that waits for the disk. On any thread, while
        others append. Raises OSError: nothing changed."""
        with self._making:
            if self._spare is None:
                self._spare = self._make(self._generation + 1)

    def _make(self, generation: int) -> int:
        name = f"{_PREFIX}{generation:08d}"
        if name in self._storage.list_folder(self._folder):
            self._storage.remove(os.path.join(self._folder, name))
        return self._storage.create(os.path.join(self._folder, name), self._nbytes, slab=False)

    def start_next(self) -> int:
        """Append to a fresh file from now on; returns its generation, for `snapshot`. Raises OSError: nothing changed.

        What the old file says that was not synced is in the snapshot that follows.
        """
        self.prepare()
        with self._making:
            file, self._spare = self._spare, None
            if self._file is not None:
                self._storage.close_file(self._file)
            if self._dirty:
                self._doubted = self._generation
            self._file, self._at, self._number, self._dirty = file, 0, 0, False
            self._generation += 1
            return self._generation

    def snapshot(self, entries: NDArray[Any], generation: int) -> None:
        """Make ``entries`` (PUT only) the state at the beginning of journal ``generation``, and remove older journals.

        Raises OSError: the old snapshot and journals stay. May run beside `append`.
        """
        batches = [
            encode_batch(entries[at : at + _SNAPSHOT_BATCH], 1 + i, generation, self._set_id)
            for i, at in enumerate(range(0, max(1, len(entries)), _SNAPSHOT_BATCH))
        ]
        write_file(self._storage, self._folder, SNAPSHOT, b"".join(batches))
        if self._doubted < generation:  # else it is of one begun since
            self._doubted = 0
        for name in self._storage.list_folder(self._folder):
            if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit() and int(name[len(_PREFIX) :]) < generation:
                self._storage.remove(os.path.join(self._folder, name))

    def close(self) -> None:
        """Sync, and close the file. Raises OSError."""
        if self._file is not None:
            self.sync()
            self._storage.close_file(self._file)
            self._file = None
        with self._making:
            spare, self._spare = self._spare, None
            if spare is not None:
                self._storage.close_file(spare)
                self._storage.remove(os.path.join(self._folder, f"{_PREFIX}{self._generation + 1:08d}"))
