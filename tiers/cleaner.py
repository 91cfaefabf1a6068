"""Cleaner: the disk tier's thread that keeps room free, syncs at intervals, and writes snapshots.

Every ``clean_every_s``, while more than ``full_share`` of the capacity is used: pages that nobody used for ``idle_s``
go first, the longest unused first, then victims of the tier's policy, until ``full_share`` is used. Where others have
filled the file system beyond the tier's ``disk_share``, whole slabs are emptied and deleted, those not used for the
longest time first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.condition import Event
from kvtransfer.kernels.errors import TierError
from kvtransfer.tiers.commit_log import CommitLog
from kvtransfer.tiers.disk_room import DiskRoom

_LOOK_S = 1.0  # how often a journal that fills up is noticed


class Cleaner:
    """See the module."""

    def __init__(
        self,
        room: DiskRoom,
        log: CommitLog,
        *,
        sync_every_s: float | None,
        clean_every_s: float,
        full_share: float,
        idle_s: float,
    ) -> None:
        self._room, self._log = room, log
        self._sync_every_s, self._clean_every_s = sync_every_s, clean_every_s
        self._full_share, self._idle_s = full_share, idle_s
        self._stop = Event()
        self._cleaning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"{room.name}-cleaner", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def clean(self) -> None:
        """One round, on the calling thread."""
        with self._cleaning:
            self._try("delete slabs", self._room.shrink_overfull)
            self._room.evict_above(self._full_share, self._idle_s)
            self._try("journal", self._log.keep)

    def _run(self) -> None:
        started = time.monotonic()
        next_clean = started + self._clean_every_s
        next_sync = started + (self._sync_every_s or float("inf"))
        next_look = started + _LOOK_S
        while not self._stop.wait(max(0.0, min(next_clean, next_sync, next_look) - time.monotonic())):
            now = time.monotonic()
            due: list[Callable[[], object]] = []
            if now >= next_sync:
                next_sync = now + (self._sync_every_s or float("inf"))
                due.append(lambda: self._try("sync", self._log.sync_now))
            if now >= next_look:
                next_look = now + _LOOK_S
                due.append(lambda: self._try("snapshot", self._log.keep_small))
            if now >= next_clean:
                next_clean = now + self._clean_every_s
                due.append(self.clean)
            for action in due:
                call_subscriber(action)  # a bug is reported as uncaught; the thread serves on

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, TierError) as error:
            self._room.clean_failed(what, error)
