"""SimulatedStorage: one process's view of a simulated machine (simulated_disk.py), which forgets at a crash what was
not synced, and fails where it is told to. For tests of whatever keeps files.
"""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import OwnershipError, TierError
from kvtransfer.tiers.io import SHORT, Transfer, Usage
from kvtransfer.tiers.iopool import PoolEngine
from kvtransfer.tiers.simulated_disk import Inode, SimulatedDisk


class SimulatedStorage:
    """See `Storage` (io.py) and the module. Transfers run on one thread."""

    engine_kind = "simulated"

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk, self._life = disk, disk.life
        self._files: dict[int, tuple[str, Inode]] = {}
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
            inode = Inode()
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

    def _add(self, path: str, inode: Inode) -> int:
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
