"""SimulatedDisk: a machine's files, of which a crash keeps what was synced and any part of the rest.

Unlike a real kernel, which usually writes things back in order and soon, the crash here takes any part of what it is
allowed to take: unsynced writes are dropped, kept in any order, or torn at any sector; a length that was not synced may
be lost; names made, renamed and removed since their folder was synced are undone from some moment on.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from typing import Literal

CrashMode = Literal["drop", "reorder", "tear", "mixed"]
SECTOR_BYTES = 512
Fault = Callable[[str, str], OSError | None]


class Inode:
    """A file: what is there now, what is safe, and the writes between them."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.safe = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        _apply(self.now, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        for offset, data in self.unsynced:
            _apply(self.safe, offset, data)
        if len(self.safe) < len(self.now):
            self.safe += bytes(len(self.now) - len(self.safe))
        self.unsynced.clear()

    def crash(self, rng: random.Random, mode: CrashMode) -> None:
        """Only what a disk may have kept is left."""
        writes = list(self.unsynced)
        chosen = rng.choice(("drop", "reorder", "tear")) if mode == "mixed" else mode
        if chosen == "drop":
            writes = writes[: rng.randint(0, len(writes))]
        else:
            rng.shuffle(writes)
            writes = writes[: rng.randint(0, len(writes))]
            if chosen == "tear":
                writes = [_torn(write, rng) for write in writes]
        for offset, data in writes:
            _apply(self.safe, offset, data)
        self.now, self.unsynced = bytearray(self.safe), []


class SimulatedDisk:
    """Files and folders that outlive a crash. Thread-safe.

    Args:
        capacity_bytes: of the one file system; a file takes its length.
        fault: called before each action with its name ("read", "write", "write_at", "sync", "create", "open",
            "replace", "remove", "sync_folder") and the path; an OSError that it returns is raised. May be replaced.

    Attributes:
        actions: how many there were. others_bytes: what others take of the file system.
        crash_at: the number of the action at which the power fails; it may be done in part, all later ones fail.
    """

    def __init__(self, capacity_bytes: int = 1 << 40, *, fault: Fault | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.fault = fault
        self.others_bytes = 0
        self.actions = 0
        self.crash_at: int | None = None
        self.lock = threading.RLock()
        self.folders: set[str] = set()
        self.names: dict[str, Inode] = {}
        self.locks: dict[str, str] = {}
        self._safe_names: dict[str, Inode] = {}
        self._unsynced_names: list[tuple[str, dict[str, Inode | None]]] = []
        self.life = 0  # grows with each crash: storages of an earlier one are dead

    @property
    def crashed(self) -> bool:
        """Whether the power has failed, and `crash` was not called yet."""
        return self.crash_at is not None and self.actions >= self.crash_at

    def act(self, action: str, path: str, life: int) -> bool:
        """Count one action. False: the power fails during it. Raises OSError: it failed, or the power is off."""
        if life != self.life or self.crashed:
            raise OSError(errno.EIO, "the power is off", path)
        self.actions += 1
        error = None if self.fault is None else self.fault(action, path)
        if error is not None:
            raise error
        return not self.crashed

    def used_bytes(self) -> int:
        """Of all files and of others."""
        return self.others_bytes + sum(len(inode.now) for inode in self.names.values())

    def set_names(self, changes: dict[str, Inode | None]) -> None:
        """Bind or unbind names, all at once; not safe before `sync_names`."""
        _bind(self.names, changes)
        self._unsynced_names.append((os.path.dirname(next(iter(changes))), changes))

    def sync_names(self, folder: str) -> None:
        """The names in ``folder`` are safe, and so is what was done in others before: one log holds them in order."""
        last = max((i for i, (where, _) in enumerate(self._unsynced_names) if where == folder), default=-1)
        for _, changes in self._unsynced_names[: last + 1]:
            _bind(self._safe_names, changes)
        del self._unsynced_names[: last + 1]

    def crash(self, rng: random.Random, mode: CrashMode = "mixed") -> None:
        """The power fails, and comes back: what was not safe is kept in part. Storages that were open are dead."""
        with self.lock:
            kept = rng.randint(0, len(self._unsynced_names))
            for _, changes in self._unsynced_names[:kept]:
                _bind(self._safe_names, changes)
            self._unsynced_names.clear()
            self.names = dict(self._safe_names)
            for inode in {id(inode): inode for inode in self.names.values()}.values():
                inode.crash(rng, mode)
            self.locks.clear()
            self.crash_at = None
            self.life += 1

    def kill(self) -> None:
        """The process ends, the machine goes on: nothing is lost but locks, and open storages are dead."""
        with self.lock:
            self.locks.clear()
            self.life += 1

    def flip_bit(self, path: str, bit: int) -> None:
        """Change one bit of a file, safe copy and all."""
        inode = self.names[path]
        for image in (inode.now, inode.safe):
            image[bit // 8] ^= 1 << bit % 8


def _apply(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset + len(data):
        image += bytes(offset + len(data) - len(image))
    image[offset : offset + len(data)] = data


def _torn(write: tuple[int, bytes], rng: random.Random) -> tuple[int, bytes]:
    """The first, the last, or a middle part of a write, in whole sectors."""
    offset, data = write
    sectors = -(-len(data) // SECTOR_BYTES)
    first = rng.randint(0, sectors)
    stop = rng.randint(first, sectors)
    return offset + first * SECTOR_BYTES, data[first * SECTOR_BYTES : stop * SECTOR_BYTES]


def _bind(names: dict[str, Inode], changes: dict[str, Inode | None]) -> None:
    for name, inode in changes.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode
