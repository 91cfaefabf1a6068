"""MemoryTier: records in ordinary memory of this process. The smallest complete tier.

For tests and trials, and as a second level of host memory that is not pinned. Least recently used pages go first;
what is pinned stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes
from kvtransfer.tiers.worker_tier import WorkerTier


class MemoryTier(WorkerTier):
    """Holds at most ``capacity_bytes`` of payloads and trailers. Thread-safe. ``workers`` threads copy in and out."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        name: str = "memory",
        workers: int = 1,
        timeout_s: float = 5.0,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"{name}: capacity_bytes: expected 0 or more, got {capacity_bytes}")
        super().__init__(name, shared=False, workers=workers, timeout_s=timeout_s, observer=observer)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self.start()

    def do_lookup(self, job: Job) -> Outcomes:
        for at, key in enumerate(job.keys):
            yield Outcome(at, PageStatus.OK if key in self._pages else PageStatus.MISS)

    def do_get(self, job: Job) -> Outcomes:
        for at, (key, buffer) in enumerate(zip(job.keys, job.buffers, strict=True)):
            with self._lock:
                record = self._pages.get(key)
                if record is not None:
                    self._pages.move_to_end(key)
            if record is None:
                yield Outcome(at, PageStatus.MISS)
            elif record.size != buffer.payload.size + buffer.trailer.size:
                yield Outcome(at, PageStatus.CORRUPT)
            else:
                buffer.payload[:] = record[: buffer.payload.size]
                buffer.trailer[:] = record[buffer.payload.size :]
                yield Outcome(at, PageStatus.OK, moved_bytes=record.size)

    def do_put(self, job: Job) -> Outcomes:
        for at, (key, buffer) in enumerate(zip(job.keys, job.buffers, strict=True)):
            if key in self._pages:
                yield Outcome(at, PageStatus.OK)
            elif not self._make_room(buffer):
                yield Outcome(at, PageStatus.NO_ROOM)
            else:
                record = np.concatenate(buffer)
                with self._lock:
                    stored = self._pages.setdefault(key, record) is record
                    if not stored:
                        self._used_bytes -= record.size
                yield Outcome(at, PageStatus.OK, moved_bytes=record.size if stored else 0)

    def do_remove(self, job: Job) -> Outcomes:
        for at, key in enumerate(job.keys):
            with self._lock:
                record = self._pages.pop(key, None)
                self._used_bytes -= 0 if record is None else record.size
            yield Outcome(at, PageStatus.MISS if record is None else PageStatus.OK)

    def do_pin(self, job: Job) -> Outcomes:
        for at, key in enumerate(job.keys):
            with self._lock:  # not between the look and an eviction
                there = key in self._pages
                if there:
                    self.pins.pin(key, job.ttl_s)
            yield Outcome(at, PageStatus.OK if there else PageStatus.MISS)

    def do_usage(self) -> tuple[int, int, int]:
        with self._lock:
            return self._capacity_bytes, self._used_bytes, len(self._pages)

    def do_close(self) -> None:
        with self._lock:
            self._pages.clear()
            self._used_bytes = 0

    def _make_room(self, buffer: RecordBuffer) -> bool:
        """Take the bytes of one record into the account, evicting for them; False if they can't be had."""
        need = buffer.payload.size + buffer.trailer.size
        if need > self._capacity_bytes:
            return False
        with self._lock:
            victims, left = [], self._capacity_bytes - self._used_bytes
            for key, record in self._pages.items():
                if left >= need:
                    break
                if not self.pins.holds(key):
                    victims.append(key)
                    left += record.size
            if left < need:
                return False
            for key in victims:
                self._used_bytes -= self._pages.pop(key).size
            self.book.count("evicted", len(victims))
            self._used_bytes += need
            return True
