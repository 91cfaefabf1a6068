"""DiskRoom: where a disk tier's records may go, and which pages and slabs go for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtransfer.kernels.errors import CapacityError
from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.batch_book import BatchBook
from kvtransfer.tiers.commit_log import CommitLog
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.pins import PinBook
from kvtransfer.tiers.slab_files import SlabFiles

_EVICT_AHEAD = 32  # pages that make room at a time, where the cleaner was too slow


class DiskRoom:
    """See the module. Thread-safe. ``lock`` is that of the table; the tier holds it too. ``now`` is the wall clock."""

    def __init__(
        self,
        name: str,
        slabs: SlabFiles,
        table: SlotTable,
        lock: threading.Lock,
        log: CommitLog,
        pins: PinBook,
        book: BatchBook,
        now: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.name = name
        self._slabs, self._table, self._lock, self._log = slabs, table, lock, log
        self._pins, self._book, self._now, self._observer = pins, book, now, observer
        self._growing = threading.Lock()  # of the slabs; taken before the table's

    def make(self, count: int) -> tuple[list[int], CapacityError | None]:
        """Slots for ``count`` records, in slabs that are there, in new ones, or of pages that go. And why not all."""
        slots: list[int] = []
        cause: OSError | None = None
        while len(slots) < count:
            with self._lock:
                slots += self._table.allocate(count - len(slots))
            if len(slots) == count:
                break
            try:
                if self._grow():
                    continue
            except OSError as error:
                cause = error
                self._book.count("grow_failed")
            if not self._evict_for(slots, count):
                refused = CapacityError(
                    f"{self.name}: expected room for {count} records, got {len(slots)}: there may be "
                    f"{self._slabs.max_slots}, and those that are there are pinned or in use"
                    f"{'' if cause is None else f'; a new slab failed: {cause}'}"
                )
                refused.__cause__ = cause
                return slots, refused
        return slots, None

    def _evict_for(self, slots: list[int], count: int) -> bool:
        """Add slots of evicted pages to ``slots``. False: not enough of them can go."""
        with self._lock:
            missing = count - len(slots)
            ahead = min(_EVICT_AHEAD, len(self._table) // 8)
            victims = self._table.choose_victims(max(missing, ahead), self._pins.keys())
            self._log.note_gone(self._table.drop(victims))
            slots += self._table.allocate(missing)
        self._book.count("evicted", len(victims))
        return len(slots) == count

    def _grow(self) -> bool:
        """Make more slabs, if there may be some and nobody else just did."""
        with self._growing:
            with self._lock:
                if self._table.free_slots:
                    return True
            made = self._slabs.grow()
            with self._lock:
                for slab in made:
                    self._table.add_file(slab.number, slab.path, slab.slots)
            return bool(made)

    # --- for the cleaner

    def evict_above(self, share: float, idle_s: float) -> int:
        """While more than ``share`` of the capacity is used: pages unused for ``idle_s``, then victims of the policy.
        How many went."""
        with self._lock:
            excess = len(self._table) - int(share * self._slabs.max_slots)
            victims: Sequence[bytes] = ()
            if excess > 0:
                idle = self._table.idle_since(self._now() - idle_s)
                victims = self._table.choose_victims(excess, self._pins.keys(), idle)
                self._log.note_gone(self._table.drop(victims))
        self._book.count("cleaned", len(victims))
        return len(victims)

    def shrink_overfull(self) -> int:
        """Delete slabs, the longest unused first, until no file system is over its share. How many. Raises OSError if
        one can't be unlinked; the others go all the same."""
        with self._growing:
            deleted = 0
            failed: OSError | None = None
            try:
                self._slabs.delete_stuck()
            except OSError as error:
                failed = error
            with self._lock:
                order = self._table.files_by_use()
            for number in order:
                path = self._slabs.files[number].path
                if self._slabs.overfull_bytes(path) <= 0:
                    continue
                with self._lock:
                    if self._table.busy_file(number, self._pins.keys()):
                        continue
                    gone = self._table.drop_file(number)
                    self._log.note_gone(gone)
                self._log.forget_file(self._slabs.files[number].file)
                self._book.count("evicted", len(gone))
                try:
                    self._slabs.delete(number)
                except OSError as error:
                    failed = error
                deleted += 1
                self._observer.noted(
                    "disk.shrunk",
                    name=self.name,
                    message=f"{self.name}: slab {number} with {len(gone)} pages deleted: its file system is too full",
                    slab=number,
                    pages=len(gone),
                )
        if failed is not None:
            raise failed
        return deleted

    def clean_failed(self, what: str, error: BaseException) -> None:
        """``what`` did not work; it is tried again next time."""
        self._book.count("clean_failed")
        self._observer.noted("disk.clean_failed", name=self.name, step=what, message=str(error))
