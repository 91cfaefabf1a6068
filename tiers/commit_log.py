"""CommitLog: from records on the disk to pages that are there. It decides when a put is done, and what a crash can
take.

The order is always: data, then journal, then table, then the caller is told. ``sync`` says where the log waits for
the disk in between:

- "none": nowhere. What was acknowledged survives the end of the process, by any signal. A power failure or a crash of
  the kernel may take any of it; what it tore is found out on reading and is a miss.
- "interval": as "none", and every ``interval_s`` data and journal are synced: a power failure takes at most what was
  acknowledged since the last sync that was begun.
- "batch": data is synced before the journal, and the journal before the caller is told: a power failure takes nothing
  that was acknowledged. Batches that are done at the same time share the syncs.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.condition import Condition, Event
from kvtransfer.kernels.ending import Daemon
from kvtransfer.kernels.errors import TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.disk_transfers import Outcome, WriteTransfer
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.journal import PUT, REMOVE, Journal, entries_of

SyncMode = Literal["none", "batch", "interval"]
Flushed = Callable[[BaseException | None], None]
_Item = tuple[WriteTransfer | None, list[int], Flushed | None]


class CommitLog:
    """See the module. Thread-safe.

    ``table`` and its ``lock`` are shared with the tier, which calls `note_gone` while it holds the lock. ``now`` is the
    wall clock.
    """

    def __init__(
        self,
        name: str,
        storage: Storage,
        journal: Journal,
        table: SlotTable,
        lock: threading.Lock,
        sync: SyncMode,
        now: Callable[[], float],
        entered: Callable[[], object],
        observer: Observer,
    ) -> None:
        self._name, self._storage, self._journal, self._table = name, storage, journal, table
        self._lock, self._mode, self._now, self._entered, self._observer = lock, sync, now, entered, observer
        self._committing = threading.RLock()  # held around what changes the journal; taken before the table's lock
        self._gone: list[tuple[bytes, int]] = []  # dropped from the table, not yet from the journal
        self._taken: list[tuple[bytes, int]] = []  # those of them that a commit is writing
        self._dirty: set[int] = set()  # files with data that was not synced
        self._snapshot_free = Event()
        self._snapshot_free.set()
        self._queue: deque[_Item] = deque()
        self._changed = Condition()
        self._ending = False
        self._thread: threading.Thread | None = None
        if sync != "none":  # what waits for the disk must not hold the thread that moves records
            self._thread = Daemon(self._run, name=f"{name}-commit", leave=self._leave)
            self._thread.start()

    # --- any thread

    def note_gone(self, gone: list[tuple[bytes, int]]) -> None:
        """Pages were dropped from the table; the caller holds its lock. The journal is told with the next batch."""
        self._gone += gone

    def written(self, transfer: WriteTransfer, whole: list[int]) -> None:
        """These records are on the device: commit them, and tell their batch."""
        self._submit((transfer, whole, None))

    def flush(self, flushed: Flushed) -> None:
        """Tell the journal what is gone; then call ``flushed`` with what prevented it, or None."""
        self._submit((None, [], flushed))

    def _submit(self, item: _Item) -> None:
        with self._changed:
            if self._thread is not None and not self._ending:
                self._queue.append(item)
                self._changed.notify()
                return
        self._commit([item])

    def sync_now(self) -> None:
        """Return once everything acknowledged so far survives a power failure. Raises OSError: it is tried again."""
        with self._committing:
            self._append(self._take_gone(), sync=False)
            files, self._dirty = self._dirty, set()
            try:
                for file in files:
                    self._storage.sync(file)
                self._snapshot_free.wait()
                if self._journal.in_doubt:
                    self.rotate()
                self._journal.sync()
            except OSError:
                self._dirty |= files
                raise

    def forget_file(self, file: int) -> None:
        """A slab is about to be closed."""
        with self._committing:
            self._dirty.discard(file)

    def rotate(self) -> None:
        """Write a snapshot, and begin a fresh journal. Raises OSError: the state on the disk is as good as before."""
        self._journal.prepare()  # before others have to wait: it takes as long as a busy disk takes to sync
        with self._committing:
            self._snapshot_free.wait()  # another one is being written; that needs no lock
            with self._lock:
                entries, gone, self._gone = self._table.entries(), self._gone, []
            try:
                generation = self._journal.start_next()
            except OSError:
                self._restore_gone(gone)
                raise
            self._snapshot_free.clear()
        try:  # others go on committing meanwhile
            self._journal.snapshot(entries, generation)
        except OSError:
            self._restore_gone(gone)
            raise
        finally:
            self._snapshot_free.set()

    def _restore_gone(self, gone: list[tuple[bytes, int]]) -> None:
        with self._lock:
            self._gone = gone + self._gone

    def keep_small(self) -> None:
        """Write a snapshot before the journal is full, or if there is none to be relied on. Raises OSError."""
        if not self._journal.usable or self._journal.in_doubt or self._journal.filled > 0.5:
            self.rotate()

    def keep(self) -> None:
        """`keep_small`, and tell the journal what is gone. Raises OSError or TierError."""
        self.keep_small()
        with self._committing:
            self._append(self._take_gone(), sync=self._mode == "batch")

    def close(self) -> None:
        """Commit what is queued, sync, write a snapshot. Raises OSError if that failed; everything is closed then
        too."""
        self._leave()
        if self._thread is not None:
            self._thread.join()
        with self._committing:
            try:
                self.sync_now()
                self.rotate()
            finally:
                self._journal.close()

    # --- inside

    def _leave(self) -> None:
        """What is queued is the last that the thread commits."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def _run(self) -> None:
        self._entered()
        while True:
            with self._changed:
                while not self._queue and not self._ending:
                    self._changed.wait()
                if not self._queue:
                    return
                items = list(self._queue)
                self._queue.clear()
            call_subscriber(functools.partial(self._commit, items))  # a bug is reported as uncaught; this serves on
            del items  # nobody's memory is kept while this thread sleeps

    def _commit(self, items: list[_Item]) -> None:
        writes = [(transfer, whole) for transfer, whole, _ in items if transfer is not None]
        with self._committing:
            fresh: dict[bytes, tuple[int, int]] = {}  # key -> slot, file
            spare: list[int] = []
            with self._lock:
                for transfer, whole in writes:
                    keys = transfer.keys_of(whole)
                    for at, key, there in zip(whole, keys, self._table.find(keys), strict=True):
                        if there >= 0 or key in fresh:
                            spare.append(transfer.slots[at])  # somebody else was faster: one copy is enough
                        else:
                            fresh[key] = (transfer.slots[at], transfer.files[at])
                self._table.give_back(spare)
            error = self._make_durable(fresh)
            with self._lock:
                slots = [slot for slot, _ in fresh.values()]
                if error is None:
                    self._table.publish(list(fresh), slots, self._now())
                else:
                    self._table.give_back(slots)
        for transfer, whole in writes:
            outcomes: list[Outcome] = []
            moved = 0
            for at, key in zip(whole, transfer.keys_of(whole), strict=True):
                if error is not None and key in fresh:
                    outcomes.append((transfer.positions[at], PageStatus.ERROR, error))
                else:
                    outcomes.append((transfer.positions[at], PageStatus.OK, None))
                    moved += sum(part.size for part in transfer.buffers[at])
            transfer.settle(outcomes, moved)
        for _, _, flushed in items:
            if flushed is not None:
                flushed(error)

    def _make_durable(self, fresh: dict[bytes, tuple[int, int]]) -> TierError | None:
        """Data and journal, as the mode demands. What prevented it, or None."""
        batch = self._mode == "batch"
        files = {file for _, file in fresh.values()}
        try:
            if batch:
                for file in files:
                    self._storage.sync(file)
            gone = self._take_gone()
            puts = entries_of(PUT, [slot for slot, _ in fresh.values()], self._now(), list(fresh))
            self._append(np.concatenate((gone, puts)), sync=batch, puts=puts)
        except (OSError, TierError) as error:
            failed = TierError(f"{self._name}: commit: expected data and journal on the disk, got: {error}")
            failed.__cause__ = error
            return failed
        if not batch:
            self._dirty |= files
        return None

    def _take_gone(self) -> NDArray[Any]:
        with self._lock:
            gone, self._gone = self._gone, []
        self._taken = gone
        return entries_of(REMOVE, [slot for _, slot in gone], self._now(), [key for key, _ in gone])

    def _append(self, entries: NDArray[Any], *, sync: bool, puts: NDArray[Any] | None = None) -> None:
        """One batch into the journal; ``puts`` are those of ``entries`` that a snapshot taken now would lack."""
        try:
            if len(entries) and len(entries) > self._journal.free_entries:
                self.rotate()  # what is gone is gone from the snapshot too
                self._taken = []
                entries = entries[:0] if puts is None else puts
            if len(entries):
                self._journal.append(entries, sync=sync)
        except BaseException:
            self._restore_gone(self._taken)
            raise
        finally:
            self._taken = []
