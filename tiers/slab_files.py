"""SlabFiles: the slab files of one disk tier over its folders, and how many there may be."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.kernels.errors import CapacityError
from kvtransfer.tiers.io import Storage

_PREFIX = "slab."


@dataclass(frozen=True)
class SlabFile:
    """One slab: its number, the storage's file, its folder, and how many records it holds."""

    number: int
    file: int
    path: int
    slots: int


class SlabFiles:
    """Makes, finds and deletes slabs. Not thread-safe: the tier holds a lock of its own for this.

    fill_limit  the share of a file system that may be used with what this tier adds
    """

    def __init__(
        self, storage: Storage, folders: Sequence[str], record_bytes: int, slots_per_file: int, fill_limit: float
    ) -> None:
        self._storage, self._folders = storage, list(folders)
        self._record_bytes, self._slots_per_file, self._fill_limit = record_bytes, slots_per_file, fill_limit
        self.max_slots = 0
        self.files: dict[int, SlabFile] = {}
        self._stuck: dict[int, SlabFile] = {}  # emptied, but unlinking failed: they take their room still

    @property
    def total_slots(self) -> int:
        """Of all slabs."""
        return sum(file.slots for file in (*self.files.values(), *self._stuck.values()))

    def open_all(self, *, writable: bool) -> None:
        """Open what is there and is not open yet."""
        for path, folder in enumerate(self._folders):
            for name in self._storage.list_folder(folder):
                digits = name[len(_PREFIX) :]
                if not name.startswith(_PREFIX) or not digits.isdigit() or int(digits) in self.files:
                    continue
                try:
                    file = self._storage.open(os.path.join(folder, name), writable=writable, slab=True)
                except FileNotFoundError:
                    if writable:
                        raise
                    continue  # its owner deleted it just now
                slots = min(self._slots_per_file, self._storage.size(file) // self._record_bytes)
                self.files[int(digits)] = SlabFile(int(digits), file, path, slots)

    def close_all(self) -> None:
        """Close all of them. No transfer may be using one."""
        for slab in self.files.values():
            self._storage.close_file(slab.file)
        self.files.clear()

    def allowed_slots(self, wanted: int, spare_bytes: int) -> tuple[int, str]:
        """How many of ``wanted`` records fit so that every file system stays below the limit, and in words what cut it
        ('': nothing). What is there stays where no limit is passed. ``spare_bytes`` are for journals, on the first.
        Raises CapacityError where not one fits."""
        room: dict[int, tuple[int, str]] = {}
        for path, folder in enumerate(self._folders):
            usage = self._storage.usage(folder)
            own = sum(f.slots for f in self.files.values() if f.path == path) * self._record_bytes
            if path == 0:
                spare_bytes = max(0, spare_bytes - self._other_bytes(folder))
            limit = int(self._fill_limit * usage.total_bytes)
            free, names = room.get(usage.device, (limit - usage.used_bytes - (spare_bytes if path == 0 else 0), ""))
            room[usage.device] = (free + own, f"{names} {folder}".strip())
        fits = sum(max(0, free) // self._record_bytes for free, _ in room.values())
        if all(self.overfull_bytes(path) <= 0 for path in range(len(self._folders))):
            fits = max(fits, self.total_slots)
        if fits >= wanted:
            return wanted, ""
        words = "; ".join(f"{names}: {max(0, free)} bytes" for free, names in room.values())
        why = f"at {self._fill_limit:.0%} of the file system full, what is left is {words}"
        if fits < 1:
            raise CapacityError(f"disk: expected room for a record of {self._record_bytes} bytes, got none: {why}")
        return fits, why

    def _other_bytes(self, folder: str) -> int:
        """Of what is no slab: journals and snapshots of an earlier run."""
        total = 0
        for name in self._storage.list_folder(folder):
            if not name.startswith(_PREFIX):
                file = self._storage.open(os.path.join(folder, name), writable=False, slab=False)
                total += self._storage.size(file)
                self._storage.close_file(file)
        return total

    def grow(self) -> list[SlabFile]:
        """One more slab on each path, as far as more are allowed and fit; fewest first. Raises OSError if none could be
        made where there is room."""
        made: list[SlabFile] = []
        error: OSError | None = None
        counts = [sum(f.path == path for f in self.files.values()) for path in range(len(self._folders))]
        for path in sorted(range(len(self._folders)), key=counts.__getitem__):
            slots = min(self._slots_per_file, self.max_slots - self.total_slots)
            if slots < 1 or self.overfull_bytes(path, slots * self._record_bytes) > 0:
                continue
            number = next(n for n in itertools.count() if n not in self.files and n not in self._stuck)
            name = os.path.join(self._folders[path], f"{_PREFIX}{number:06d}")
            try:
                file = self._storage.create(name, slots * self._record_bytes, slab=True)
            except OSError as failure:
                error = failure
                continue
            self.files[number] = SlabFile(number, file, path, slots)
            made.append(self.files[number])
        if error is not None and not made:
            raise error
        return made

    def overfull_bytes(self, path: int, more_bytes: int = 0) -> int:
        """By how much the path's file system is over the limit, with ``more_bytes``; negative: below."""
        usage = self._storage.usage(self._folders[path])
        return usage.used_bytes + more_bytes - int(self._fill_limit * usage.total_bytes)

    def delete(self, number: int) -> None:
        """Close and unlink a slab. Raises OSError if unlinking fails: it is tried again by `delete_stuck`."""
        slab = self.files.pop(number)
        self._storage.close_file(slab.file)
        self._stuck[number] = slab
        self._unlink(slab)

    def delete_stuck(self) -> None:
        """Try again what could not be unlinked. Raises OSError if one still can't; the others go all the same."""
        failed: OSError | None = None
        for slab in list(self._stuck.values()):
            try:
                self._unlink(slab)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def _unlink(self, slab: SlabFile) -> None:
        try:
            self._storage.remove(os.path.join(self._folders[slab.path], f"{_PREFIX}{slab.number:06d}"))
        except FileNotFoundError:
            pass
        del self._stuck[slab.number]
