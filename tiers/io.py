"""Block I/O: what the disk tier asks of the machine that its files lie on.

A `Storage` holds the files of one tier: it makes, syncs, renames and removes them, and moves records between their
slabs and memory, many at a time and asynchronously. `FileStorage` (storage.py) is the real one, over an `Engine`:
io_uring (uring_engine.py), or threads where io_uring is refused (iopool.py). `SimulatedStorage` (simulated.py) forgets
at a crash what was not synced.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.parts import Parts

MAX_TRIES = 3  # of one read or write that came back short or was told to come again
RETRIED = frozenset({errno.EAGAIN, errno.EINTR})
SHORT = errno.ENODATA  # what a transfer is told of a record that was moved in part, however often it was tried


class Transfer:
    """Records to read or write in one call. A tier subclasses it for `start` and `finish`.

    write      direction: True writes the buffers to the files
    files      the file of each record, as `Storage.open` numbered it
    offsets    int64, where each record begins there: its payload, and its trailer behind it, are one run of bytes
    buffers    each record's memory; the engine keeps it alive
    parts      where payload and trailer of each buffer lie, if it is known; ``addresses`` and ``sizes`` are its arrays
    """

    def __init__(
        self,
        *,
        write: bool,
        files: Sequence[int],
        offsets: NDArray[np.int64],
        buffers: Sequence[RecordBuffer],
        parts: Parts | None = None,
    ) -> None:
        self.write = write
        self.files = files
        self.offsets = offsets
        self.buffers = list(buffers)
        self.parts = Parts.of(self.buffers) if parts is None else parts
        self.addresses, self.sizes = self.parts.where, self.parts.sizes

    def start(self, positions: list[int]) -> list[int]:
        """Those of ``positions`` that are still wanted; called just before they are given to the device. From then on
        the device may touch their buffers until `finish` is told of them. Runs on the engine's thread."""
        return positions

    def finish(self, positions: list[int], errors: list[int]) -> None:
        """``positions`` are done: 0, or an errno, for each. Every byte was moved where it is 0. Called for each started
        position once, some at a time, on a thread of the engine's."""


class Engine(Protocol):
    """Moves records between open files and memory."""

    kind: str

    def add_file(self, fd: int) -> int:
        """Make an open file known; returns its number in transfers. `drop_file` closes ``fd``, or the caller after
        `close`."""

    def drop_file(self, number: int, fd: int) -> None:
        """Forget a file and close it, soon. No transfer may be using it. Waits for nothing: who waits for room holds
        locks that callbacks, which run on the engine's thread, may want."""

    def submit(self, transfer: Transfer) -> None:
        """Queue ``transfer``; returns at once. Raises TierError once the engine is closed."""

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        """Map ``memory`` for the device once, in chunks that end at multiples of ``step_bytes``. False: not possible,
        and nothing is lost but speed."""

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undo `register`."""

    def close(self) -> None:
        """Finish what is queued, and end. Idempotent."""


class Usage(NamedTuple):
    """A file system: which one, and bytes that a user may fill, and has."""

    device: int
    total_bytes: int
    used_bytes: int


class Storage(Protocol):
    """The files of one tier. Paths are absolute. Errors are OSError, as the system gives them. Thread-safe."""

    def make_folder(self, path: str) -> None:
        """With its parents; no error if it is there. Names of those that were made survive a power failure."""

    def list_folder(self, path: str) -> list[str]:
        """Names in it, sorted; empty if there is no such folder."""

    def lock(self, path: str, text: str) -> None:
        """Take the lock file ``path`` until `close`, and write ``text`` into it for others to read. OwnershipError,
        with their text, if somebody has it."""

    def create(self, path: str, nbytes: int, *, slab: bool) -> int:
        """A new file of ``nbytes`` zeros, its space reserved; synced, its name too. Nothing is left behind on failure.

        ``slab``: it is for `submit`, not for `write_at`.
        """

    def open(self, path: str, *, writable: bool, slab: bool) -> int:
        """An existing file; returns its number."""

    def size(self, file: int) -> int:
        """Its length in bytes."""

    def write_at(self, file: int, offset: int, data: bytes) -> None:
        """Write all of ``data``, or raise."""

    def sync(self, file: int) -> None:
        """Return once the file's contents and length survive a power failure."""

    def close_file(self, file: int) -> None:
        """Close it."""

    def read_all(self, path: str) -> bytes:
        """A whole file."""

    def replace(self, path: str, to: str) -> None:
        """Rename, over what is there."""

    def remove(self, path: str) -> None:
        """Unlink."""

    def sync_folder(self, path: str) -> None:
        """Return once names made, renamed and removed in it survive a power failure."""

    def usage(self, path: str) -> Usage:
        """The file system that ``path`` lies on."""

    def submit(self, transfer: Transfer) -> None:
        """Queue ``transfer``; returns at once."""

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        """See `Engine.register`."""

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """See `Engine.unregister`."""

    def close(self) -> None:
        """Finish transfers, close files, give locks back. Idempotent."""


def write_file(storage: Storage, folder: str, name: str, data: bytes) -> None:
    """Replace ``folder/name`` by ``data`` so that after a crash the file is the old one or the new one, whole."""
    draft, final = os.path.join(folder, name + ".tmp"), os.path.join(folder, name)
    if (name + ".tmp") in storage.list_folder(folder):
        storage.remove(draft)
    file = storage.create(draft, len(data), slab=False)
    try:
        storage.write_at(file, 0, data)
        storage.sync(file)
    except BaseException:
        storage.close_file(file)
        storage.remove(draft)
        raise
    storage.close_file(file)
    storage.replace(draft, final)
    storage.sync_folder(folder)


def address(array: NDArray[np.uint8]) -> int:
    """Where ``array`` begins in memory."""
    start: int = array.__array_interface__["data"][0]
    return start
