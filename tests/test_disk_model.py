"""Random puts, gets, removes, pins, faults, kills and reopenings of a disk tier, against a model in memory.

The short form runs always; ten minutes of it with `-m long`. What must hold: no wrong byte, nothing that was
acknowledged and neither removed nor evicted is lost, the capacity holds, nothing leaks.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from disk_helpers import SPACE, TINY, TINY_RECORD, empty, image, tiny_record
from engine_helpers import until
from tier_contract import done, eventually, statuses

from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.io import Storage
from kvtransfer.tiers.simulated import SimulatedStorage
from kvtransfer.tiers.simulated_disk import SimulatedDisk
from kvtransfer.tiers.storage import EngineKind, FileStorage

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
ERROR, NO_ROOM, CANCELLED = PageStatus.ERROR, PageStatus.NO_ROOM, PageStatus.CANCELLED
PAGES = 120


class Model:
    """One tier, what it was given, and what it must hold."""

    def __init__(self, seed: int, paths: str, storage: type[Storage] | None, engine: EngineKind) -> None:
        self.rng, self.bytes = random.Random(seed), np.random.default_rng(seed)
        self.disk = SimulatedDisk() if storage is SimulatedStorage else None
        self.paths, self.engine = paths, engine
        self.records: dict[bytes, RecordBuffer] = {}
        self.held: set[bytes] = set()
        self.faulty = False
        self.counts: dict[str, int] = {}
        self.tier = self.open()
        self.let_go = 0  # how many pages the tier had evicted when it was last looked at

    def open(self) -> DiskTier:
        files = FileStorage(engine=self.engine) if self.disk is None else SimulatedStorage(self.disk)
        return DiskTier(
            self.paths, TINY, namespace=SPACE, capacity_pages=PAGES, file_bytes=15 * TINY_RECORD, storage=files,
            sync=self.rng.choice(["none", "batch", "interval"]), interval_s=0.005, clean_every_s=0.05,
        )  # fmt: skip

    def step(self) -> None:
        choice = self.rng.random()
        verb = self.rng.choice(["put"] * 5 + ["get"] * 5 + ["remove", "pin", "lookup", "many"])
        if choice < 0.004:
            verb = "reopen"
        elif choice < 0.02:
            verb = "fault" if self.disk is not None else "clean"
        self.counts[verb] = self.counts.get(verb, 0) + 1
        getattr(self, verb)()

    def fresh(self, count: int) -> list[bytes]:
        keys = [self.rng.randbytes(32) for _ in range(count)]
        self.records.update((key, tiny_record(key, self.bytes)) for key in keys)
        return keys

    def some(self, most: int) -> list[bytes]:
        return self.rng.sample(sorted(self.records), min(len(self.records), self.rng.randint(1, most)))

    def put(self) -> None:
        keys = self.fresh(self.rng.randint(0, 12)) + self.some(4)
        if not keys:
            return
        deadline = self.rng.choice([None, None, None, 0.0, 0.0005])
        handle = self.tier.put_from(keys, [self.records[key] for key in keys], deadline_s=deadline)
        if self.rng.random() < 0.1:
            handle.cancel()
        for key, status in zip(keys, statuses(handle), strict=True):
            if status is OK:
                self.held.add(key)
            else:
                assert self.faulty or status in (NO_ROOM, CANCELLED), status
        self.see()

    def get(self) -> None:
        keys = self.some(12)
        before = set(self.held)
        self.compare(keys, statuses_of=before)

    def compare(self, keys: list[bytes], statuses_of: set[bytes]) -> None:
        buffers = [empty() for _ in keys]
        result = done(self.tier.get_into(keys, buffers))
        for key, buffer, status in zip(keys, buffers, result.statuses, strict=True):
            if status is OK:
                assert image(buffer) == image(self.records[key]), "wrong bytes"
            else:
                assert status is MISS or (status is ERROR and self.faulty), (status, result.errors)
        self.see()

    def remove(self) -> None:
        keys = self.some(5)
        for key, status in zip(keys, statuses(self.tier.remove(keys)), strict=True):
            if status in (OK, MISS) or self.faulty:  # gone, but maybe not from the journal: it may come back
                self.held.discard(key)
        self.see()

    def pin(self) -> None:
        keys = self.some(3)
        done(self.tier.pin(keys, self.rng.choice([0, 0.01, 0.05])))

    def lookup(self) -> None:
        self.see()

    def clean(self) -> None:
        self.tier.clean()
        self.see()

    def many(self) -> None:
        """Several batches at once, of the same pages too."""
        keys = self.fresh(6)
        puts = [self.tier.put_from(keys, [self.records[key] for key in keys]) for _ in range(3)]
        gets = [(self.tier.get_into(keys, buffers), buffers) for buffers in ([empty() for _ in keys] for _ in range(3))]
        for handle in puts:
            for key, status in zip(keys, statuses(handle), strict=True):
                if status is OK:
                    self.held.add(key)
        for handle, buffers in gets:
            for key, buffer, status in zip(keys, buffers, statuses(handle), strict=True):
                assert status is not OK or image(buffer) == image(self.records[key])
        self.see()

    def fault(self) -> None:
        """The disk fails in some way for a while."""
        assert self.disk is not None
        action = self.rng.choice(["write", "read", "write_at", "sync", "create", "remove"])
        code = self.rng.choice([errno.EIO, errno.ENOSPC])
        share = self.rng.choice([0.2, 1.0])
        rng = random.Random(self.rng.random())
        self.faulty = True
        self.disk.fault = lambda did, path: (
            OSError(code, os.strerror(code)) if did == action and rng.random() < share else None
        )
        for _ in range(self.rng.randint(1, 8)):
            getattr(self, self.rng.choice(["put", "get", "remove", "many", "clean"]))()
        self.disk.fault = None
        self.faulty = False
        self.tier.clean()
        self.see()

    def reopen(self) -> None:
        """Closed in order; or killed, where the disk is simulated."""
        self.see()
        if self.disk is not None and self.rng.random() < 0.5:
            self.disk.kill()
            try:
                self.tier.close(drain=False, timeout_s=10)
            except OSError:
                pass
        else:
            self.tier.close(timeout_s=10)
        evicted = self.evictions() - self.let_go  # by the cleaner, between the look and the end
        self.tier, self.let_go = self.open(), 0
        lost = self.held - set(self.there(sorted(self.held)))
        assert len(lost) <= evicted + self.evictions(), f"{len(lost)} pages are gone"
        self.held -= lost
        self.compare(sorted(self.records), set())

    def there(self, keys: list[bytes]) -> list[bytes]:
        return [key for key, s in zip(keys, statuses(self.tier.lookup(keys)), strict=True) if s is OK]

    def see(self) -> None:
        """What the tier has let go is not held; nothing else may go. The capacity holds."""
        stats = self.tier.stats()
        assert stats.used_bytes <= stats.capacity_bytes == PAGES * TINY_RECORD
        before = self.evictions()
        there = set(self.there(sorted(self.records)))  # a put that was cancelled may have been done
        gone = len(self.held - there)
        eventually(lambda: self.evictions() - self.let_go >= gone)  # the cleaner may be between the act and the count
        self.held, self.let_go = there, before
        assert len(self.held) <= PAGES
        if len(self.records) > 400:
            for key in [key for key in self.records if key not in self.held][:200]:
                del self.records[key]

    def evictions(self) -> int:
        counters = self.tier.stats().counters
        return counters.get("evicted", 0) + counters.get("cleaned", 0)

    def check_slots(self) -> None:
        """No slot is lost or in two books, once nothing is under way."""
        table = self.tier._table

        def idle() -> bool:  # a batch that a deadline ended may wait in the engine's queue still
            with self.tier._lock:
                table._settle()
                return not table._readers and not table._writing and not table._doomed

        eventually(idle)
        assert table.free_slots + len(table) == table.total_slots <= PAGES
        assert sorted(table._slot_of.values()) == sorted(table._key_of)


def run(seed: int, seconds: float, paths: str, storage: type[Storage] | None, engine: EngineKind) -> None:
    model = Model(seed, paths, storage, engine)
    first: tuple[int, int, int] | None = None
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        for _ in range(50):
            model.step()
        model.check_slots()
        rounds += 1
        if rounds % 10 == 0:
            model.reopen()
            gc.collect()
            now = (len(os.listdir("/proc/self/fd")), threading.active_count(), _resident_bytes())
            first = now if first is None else first
            assert now[0] <= first[0] + 8, "descriptors"  # a slab more or less is open
            assert now[1] <= first[1] + 1, "threads"
            assert now[2] <= first[2] + (64 << 20), "memory"
    model.reopen()
    model.tier.close()
    assert model.counts.get("put", 0) > 10 and model.counts.get("get", 0) > 10


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


CASES: list[tuple[str, type[Storage] | None, EngineKind]] = [
    ("simulated", SimulatedStorage, "auto"),
    ("io_uring", None, "io_uring"),
    ("threads", None, "threads"),
]


@pytest.mark.parametrize(("name", "storage", "engine"), CASES, ids=[case[0] for case in CASES])
def test_a_few_seconds_of_everything(
    name: str, storage: type[Storage] | None, engine: EngineKind, tmp_path: Path
) -> None:
    before = set(os.listdir("/dev/shm"))
    run(random.randrange(1 << 30), 4.0, f"{tmp_path}/a;{tmp_path}/b", storage, engine)
    until(lambda: set(os.listdir("/dev/shm")) <= before, "nothing left")  # names of tests beside this one go away


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_everything(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    for number, (name, storage, engine) in enumerate(CASES):
        run(number, 200.0, f"{tmp_path}/{name}-a;{tmp_path}/{name}-b", storage, engine)
    until(lambda: set(os.listdir("/dev/shm")) <= before, "nothing left")  # names of tests beside this one go away
