"""A simulated machine with disks: it forgets at a crash what was not synced, and fails where it is told to.

`SimulatedDisk` is what outlives a crash, `SimulatedStorage` is one process's view of it (see `Storage`). Unlike a real
kernel, which usually writes things back in order and soon, the crash here takes any part of what it is allowed to take:
unsynced writes are dropped, kept in any order, or torn at any sector; a length that was not synced may be lost; names
made, renamed and removed since their folder was synced are undone from some moment on.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import OwnershipError, TierError
from kvtransfer.tiers.io import SHORT, Transfer, Usage
from kvtransfer.tiers.iopool import PoolEngine

CrashMode = Literal["drop", "reorder", "tear", "mixed"]
SECTOR_BYTES = 512
Fault = Callable[[str, str], OSError | None]


class _Inode:
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
        self.names: dict[str, _Inode] = {}
        self.locks: dict[str, str] = {}
        self._safe_names: dict[str, _Inode] = {}
        self._unsynced_names: list[tuple[str, dict[str, _Inode | None]]] = []
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

    def set_names(self, changes: dict[str, _Inode | None]) -> None:
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


class SimulatedStorage:
    """See `Storage` (io.py) and the module. Transfers run on one thread."""

    engine_kind = "simulated"

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk, self._life = disk, disk.life
        self._files: dict[int, tuple[str, _Inode]] = {}
        self._next = 0
        self._owned: list[str] = []
        self._starting = threading.Lock()
        self._engine: PoolEngine | None = None  # from the first transfer on
        self._closed = False

    @property
    def open_files(self) -> int:
        """How many files are open."""
        return len(self._files)

    def make_folder(self, path: str) -> None:
        with self._disk.lock:
            self._disk.folders.add(path)

    def list_folder(self, path: str) -> list[str]:
        with self._disk.lock:
            return sorted(os.path.basename(name) for name in self._disk.names if os.path.dirname(name) == path)

    def lock(self, path: str, text: str) -> None:
        with self._disk.lock:
            if path in self._disk.locks:
                raise OwnershipError(f"{path}: expected a free lock, got one owned by {self._disk.locks[path]}")
            self._disk.locks[path] = text
            self._owned.append(path)

    def create(self, path: str, nbytes: int, *, slab: bool) -> int:
        with self._disk.lock:
            whole = self._disk.act("create", path, self._life)
            if path in self._disk.names:
                raise FileExistsError(errno.EEXIST, "exists", path)
            if self._disk.used_bytes() + nbytes > self._disk.capacity_bytes:
                raise OSError(errno.ENOSPC, "no space", path)
            inode = _Inode()
            inode.now = bytearray(nbytes)
            self._disk.set_names({path: inode})
            self._power(whole, path)
            inode.sync()
            self._disk.sync_names(os.path.dirname(path))
            return self._add(path, inode)

    def open(self, path: str, *, writable: bool, slab: bool) -> int:
        with self._disk.lock:
            self._power(self._disk.act("open", path, self._life), path)
            if path not in self._disk.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            return self._add(path, self._disk.names[path])

    def size(self, file: int) -> int:
        return len(self._files[file][1].now)

    def write_at(self, file: int, offset: int, data: bytes) -> None:
        path, inode = self._files[file]
        with self._disk.lock:
            whole = self._disk.act("write_at", path, self._life)
            inode.write(offset, bytes(data))
            self._power(whole, path)

    def sync(self, file: int) -> None:
        path, inode = self._files[file]
        with self._disk.lock:
            self._power(self._disk.act("sync", path, self._life), path)
            inode.sync()

    def close_file(self, file: int) -> None:
        with self._disk.lock:
            del self._files[file]

    def read_all(self, path: str) -> bytes:
        with self._disk.lock:
            self._power(self._disk.act("open", path, self._life), path)
            return bytes(self._disk.names[path].now)

    def replace(self, path: str, to: str) -> None:
        with self._disk.lock:
            whole = self._disk.act("replace", path, self._life)
            self._disk.set_names({path: None, to: self._disk.names[path]})
            self._power(whole, path)

    def remove(self, path: str) -> None:
        with self._disk.lock:
            whole = self._disk.act("remove", path, self._life)
            if path not in self._disk.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self._disk.set_names({path: None})
            self._power(whole, path)

    def sync_folder(self, path: str) -> None:
        with self._disk.lock:
            self._power(self._disk.act("sync_folder", path, self._life), path)
            self._disk.sync_names(path)

    def usage(self, path: str) -> Usage:
        with self._disk.lock:
            return Usage(0, self._disk.capacity_bytes, self._disk.used_bytes())

    def submit(self, transfer: Transfer) -> None:
        with self._starting:
            if self._closed:
                raise TierError("simulated: I/O has ended")
            if self._engine is None:
                self._engine = PoolEngine("simulated", threads=1, move=self._move)
        self._engine.submit(transfer)

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        return False

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        pass

    def close(self) -> None:
        with self._starting:
            self._closed = True
        if self._engine is not None:
            self._engine.close()
        with self._disk.lock:
            self._files.clear()
            if self._life == self._disk.life:
                for path in self._owned:
                    self._disk.locks.pop(path, None)
            self._owned.clear()

    def _power(self, on: bool, path: str) -> None:
        if not on:
            raise OSError(errno.EIO, "the power is off", path)

    def _add(self, path: str, inode: _Inode) -> int:
        self._next += 1
        self._files[self._next] = (path, inode)
        return self._next

    def _move(self, transfer: Transfer, at: int) -> int:
        """One record: 0, or the errno."""
        path, inode = self._files[transfer.files[at]]
        buffer, offset = transfer.buffers[at], int(transfer.offsets[at])
        with self._disk.lock:
            try:
                whole = self._disk.act("write" if transfer.write else "read", path, self._life)
                if transfer.write:
                    inode.write(offset, buffer.payload.tobytes() + buffer.trailer.tobytes())
                self._power(whole, path)
            except OSError as error:
                return error.errno or errno.EIO
            if not transfer.write:
                data = np.frombuffer(inode.now, dtype=np.uint8)[
                    offset : offset + buffer.payload.size + buffer.trailer.size
                ]
                if data.size < buffer.payload.size + buffer.trailer.size:
                    return SHORT  # beyond the end
                buffer.payload[:], buffer.trailer[:] = data[: buffer.payload.size], data[buffer.payload.size :]
                del data
            return 0


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


def _bind(names: dict[str, _Inode], changes: dict[str, _Inode | None]) -> None:
    for name, inode in changes.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode
