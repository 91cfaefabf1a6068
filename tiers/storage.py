"""FileStorage: a tier's files on real file systems, read and written past the page cache where they allow it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError, OwnershipError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.aligned import AlignedTransfer
from kvtransfer.tiers.io import Engine, Transfer, Usage
from kvtransfer.tiers.iopool import PoolEngine
from kvtransfer.tiers.record import BLOCK_BYTES
from kvtransfer.tiers.uring import Kernel
from kvtransfer.tiers.uring_engine import UringEngine

EngineKind = Literal["auto", "io_uring", "threads"]
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})


@dataclass
class _Open:
    fd: int
    engine_file: int | None


class FileStorage:
    """See `Storage` (io.py).

    Args:
        engine: "io_uring", "threads", or "auto": io_uring, and threads where the kernel refuses it.
        direct: O_DIRECT for slabs; None: where a written and read block shows that the folder allows it.
        kernel: stands in for io_uring's system calls.

    Whatever is slower than it could be is told to ``observer`` once a kind and folder. Raises ConfigError where what
    was asked for by name is refused.
    """

    def __init__(
        self,
        name: str = "disk",
        *,
        engine: EngineKind = "auto",
        direct: bool | None = None,
        observer: Observer = NO_OBSERVER,
        kernel: Kernel | None = None,
    ) -> None:
        self._name, self._observer, self._direct = name, observer, direct
        self._lock = threading.Lock()
        self._files: dict[int, _Open] = {}
        self._next = 0
        self._locks: list[int] = []
        self._can_direct: dict[str, bool] = {}
        self._told_unaligned = False
        self._closed = False
        self._engine: Engine = self._choose(engine, kernel)

    def _choose(self, kind: EngineKind, kernel: Kernel | None) -> Engine:
        if kind not in ("auto", "io_uring", "threads"):
            raise ConfigError(f"{self._name}: engine: expected 'auto', 'io_uring' or 'threads', got {kind!r}")
        if kind == "threads":
            return PoolEngine(self._name)
        try:
            return UringEngine(self._name, observer=self._observer, kernel=kernel)
        except OSError as error:
            if kind == "io_uring":
                raise ConfigError(f"{self._name}: engine='io_uring': the kernel refused it: {error}") from error
            self._observer.fell_back("io_uring", f"{self._name}: threads read and write instead: {error}")
            return PoolEngine(self._name)

    @property
    def engine_kind(self) -> str:
        """Which engine is used: "io_uring" or "threads"."""
        return self._engine.kind

    # --- files

    def make_folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError:  # others make theirs under the same path
            if not os.path.isdir(path):
                raise
        self.sync_folder(parent)

    def list_folder(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def lock(self, path: str, text: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise OwnershipError(
                f"{os.path.dirname(path)}: expected a folder that no other process owns, got one owned by "
                f"{owner or 'an unknown process'}; give each process its own place (instance and ranks), or open it "
                "with read_only=True"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._locks.append(fd)

    def create(self, path: str, nbytes: int, *, slab: bool) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct_flag(path, slab), 0o644)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            os.fsync(fd)
            self.sync_folder(os.path.dirname(path))
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return self._add(fd, slab)

    def open(self, path: str, *, writable: bool, slab: bool) -> int:
        if writable or not slab:
            flags = os.O_RDWR if writable else os.O_RDONLY
            return self._add(os.open(path, flags | os.O_CLOEXEC | self._direct_flag(path, slab)), slab)
        return self._add(self._open_to_read(path), slab)

    def _open_to_read(self, path: str) -> int:
        """A slab of somebody else's, where no block may be written to try O_DIRECT: one is read."""
        folder = os.path.dirname(path)
        if self._direct is not False and self._can_direct.get(folder, True):
            fd = -1
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                os.preadv(fd, [mmap.mmap(-1, BLOCK_BYTES)], 0)
                return fd
            except OSError as error:
                if fd >= 0:
                    os.close(fd)
                if error.errno not in _NO_DIRECT:
                    raise
                self._refused_direct(folder, str(error))
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _add(self, fd: int, slab: bool) -> int:
        engine_file = self._engine.add_file(fd) if slab else None
        with self._lock:
            number = self._next
            self._next += 1
            self._files[number] = _Open(fd, engine_file)
        return number

    def _direct_flag(self, path: str, slab: bool) -> int:
        if not slab or self._direct is False:
            return 0
        folder = os.path.dirname(path)
        if folder not in self._can_direct:
            why = _refuses_direct(folder)
            if why:
                self._refused_direct(folder, why)
            else:
                self._can_direct[folder] = True
        return os.O_DIRECT if self._can_direct[folder] else 0

    def _refused_direct(self, folder: str, why: str) -> None:
        if self._direct:
            raise ConfigError(f"{self._name}: direct=True: {folder} refuses O_DIRECT: {why}")
        self._can_direct[folder] = False
        self._observer.fell_back(
            "O_DIRECT", f"{self._name}: {folder} is read and written through the page cache: {why}"
        )

    def size(self, file: int) -> int:
        return os.fstat(self._files[file].fd).st_size

    def write_at(self, file: int, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._files[file].fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, file: int) -> None:
        os.fdatasync(self._files[file].fd)

    def close_file(self, file: int) -> None:
        with self._lock:
            entry = self._files.pop(file)
        if entry.engine_file is not None:
            self._engine.drop_file(entry.engine_file, entry.fd)
        else:
            os.close(entry.fd)

    def read_all(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def replace(self, path: str, to: str) -> None:
        os.replace(path, to)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def usage(self, path: str) -> Usage:
        state = os.statvfs(path)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        # As df counts: blocks that only root may fill are neither used nor free.
        return Usage(os.stat(path).st_dev, used + state.f_bavail * state.f_frsize, used)

    # --- records

    def submit(self, transfer: Transfer) -> None:
        numbers = {file: self._files[file].engine_file for file in set(transfer.files)}
        self._engine.submit(
            AlignedTransfer(transfer, [_slab(numbers[file]) for file in transfer.files], self._note_unaligned)
        )

    def _note_unaligned(self) -> None:
        if not self._told_unaligned:
            self._told_unaligned = True
            self._observer.fell_back(
                "aligned buffers",
                f"{self._name}: memory that does not begin at a multiple of 4,096 is copied on the way",
            )

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        return self._engine.register(memory, step_bytes)

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        self._engine.unregister(memory)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine.close()
        for entry in self._files.values():
            os.close(entry.fd)
        self._files.clear()
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()


def _slab(engine_file: int | None) -> int:
    assert engine_file is not None, "opened with slab=False"
    return engine_file


def _refuses_direct(folder: str) -> str:
    """Why O_DIRECT can't be used in ``folder``, or ''. A block is written and read to find out."""
    path = os.path.join(folder, f".direct-{os.getpid()}-{threading.get_ident()}")
    if not hasattr(os, "O_DIRECT"):
        return "this system has none"
    if not os.access(folder, os.W_OK):
        return ""  # a reader can't write a block; opening tells
    block = mmap.mmap(-1, BLOCK_BYTES)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _forget(path)
        if error.errno in _NO_DIRECT:
            return error.strerror or str(error)
        raise
    try:
        if os.pwrite(fd, block, 0) != BLOCK_BYTES or os.preadv(fd, [block], 0) != BLOCK_BYTES:
            return "a block was moved in part"
        return ""
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""  # no room to try; the slabs that are there tell
        raise
    finally:
        os.close(fd)
        _forget(path)


def _forget(path: str) -> None:
    try:
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
