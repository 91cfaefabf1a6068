"""The power fails at random points, on a simulated disk that keeps any part of what was not synced.

Under sync="batch" nothing acknowledged is lost and nothing removed comes back; under no mode is anything wrong served.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from disk_helpers import SPACE, TINY, TINY_RECORD, Told, empty, image, tiny_record
from tier_contract import done, statuses

from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.commit_log import SyncMode
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.simulated import SimulatedStorage
from kvtransfer.tiers.simulated_disk import CrashMode, SimulatedDisk

OK, MISS, CORRUPT, ERROR, NO_ROOM = (
    PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT, PageStatus.ERROR, PageStatus.NO_ROOM,
)  # fmt: skip


class World:
    """One simulated disk, the tier of the life at hand, and what a right tier would hold."""

    def __init__(self, seed: int, sync: SyncMode, capacity_pages: int) -> None:
        self.rng = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.sync, self.capacity_pages = sync, capacity_pages
        self.disk = SimulatedDisk()
        self.records: dict[bytes, RecordBuffer] = {}  # whatever was ever put
        self.held: set[bytes] = set()  # acknowledged, and neither removed nor evicted
        self.removed: set[bytes] = set()  # acknowledged
        self.told = Told()
        self.tier = self.open()

    def open(self) -> DiskTier:
        return DiskTier(
            "/sim/one;/sim/two", TINY, namespace=SPACE, capacity_pages=self.capacity_pages, sync=self.sync,
            file_bytes=8 * TINY_RECORD, interval_s=0.002, storage=SimulatedStorage(self.disk), observer=self.told,
        )  # fmt: skip

    def act(self) -> None:
        """One random batch."""
        verb = self.rng.choice(["put", "put", "put", "put", "remove", "get"])
        if verb == "put":
            keys = [self.rng.randbytes(32) for _ in range(self.rng.randint(1, 6))]
            if self.removed and self.rng.random() < 0.3:
                keys.append(self.rng.choice(sorted(self.removed)))  # the same page, anew
            for key in keys:
                self.records.setdefault(key, tiny_record(key, self.bytes))
            got = statuses(self.tier.put_from(keys, [self.records[key] for key in keys]))
            self.held |= {key for key, status in zip(keys, got, strict=True) if status is OK}
            self.removed -= set(keys)
        elif verb == "remove" and self.held:
            keys = self.rng.sample(sorted(self.held), min(len(self.held), self.rng.randint(1, 3)))
            got = statuses(self.tier.remove(keys))
            self.held -= set(keys)  # an error may have gone either way
            self.removed |= {key for key, status in zip(keys, got, strict=True) if status is OK}
        elif verb == "get" and self.held:
            self.check(self.rng.sample(sorted(self.held), min(len(self.held), 4)), (OK, ERROR, MISS))

    def forget_evicted(self) -> None:
        """What the tier itself let go is no loss. (`lookup` asks no disk.)"""
        keys = sorted(self.held)
        self.held = {key for key, status in zip(keys, statuses(self.tier.lookup(keys)), strict=True) if status is OK}

    def check(self, keys: Sequence[bytes], allowed: Sequence[PageStatus]) -> None:
        buffers = [empty() for _ in keys]
        result = done(self.tier.get_into(keys, buffers))
        for key, buffer, status in zip(keys, buffers, result.statuses, strict=True):
            assert status in allowed, (status, result.errors)
            if status is OK:
                assert image(buffer) == image(self.records[key]), "wrong bytes"

    def life(self, actions: int, mode: CrashMode) -> None:
        """Random batches until the power fails after ``actions`` of the disk's, then a look at what is left."""
        self.disk.crash_at = self.disk.actions + actions
        for _ in range(400):
            if self.disk.crashed:
                break
            self.act()
            self.forget_evicted()
        self.forget_evicted()
        self.end(mode)

    def end(self, mode: CrashMode) -> None:
        if not self.disk.crashed:
            self.disk.crash_at = self.disk.actions  # before `close`, which syncs
        try:
            self.tier.close(drain=False, timeout_s=10)
        except OSError:
            pass
        self.disk.crash(self.rng, mode)
        self.tier = self.open()
        every = sorted(self.records)
        if self.sync == "batch":
            self.check(sorted(self.held), (OK,))
            assert set(statuses(self.tier.lookup(sorted(self.removed)))) <= {MISS}
        self.check(every, (OK, MISS, CORRUPT))
        # what is left is the state that the next life begins with
        self.held = {key for key, status in zip(every, statuses(self.tier.lookup(every)), strict=True) if status is OK}
        self.removed -= self.held
        assert self.tier.stats().used_bytes <= self.tier.stats().capacity_bytes


def run(seed: int, sync: SyncMode, mode: CrashMode, lives: int = 4) -> None:
    rng = random.Random(seed)
    world = World(seed, sync, capacity_pages=rng.choice([9, 20, 400]))
    try:
        for _ in range(lives):
            world.life(rng.randint(1, 150), mode)
    finally:
        world.tier.close(drain=False, timeout_s=10)


MODES: list[CrashMode] = ["drop", "reorder", "tear", "mixed"]


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_crashes_lose_nothing_acknowledged(part: int) -> None:
    for seed in range(25):  # of 4 lives each
        run(1000 * part + seed, "batch", MODES[seed % 4])


@pytest.mark.parametrize("sync", ["none", "interval"])
def test_crashes_never_make_a_wrong_byte(sync: SyncMode) -> None:
    for seed in range(60):
        run(77_000 + seed, sync, MODES[seed % 4])


@pytest.mark.parametrize("sync", ["none", "batch", "interval"])
def test_a_killed_process_loses_nothing_acknowledged(sync: SyncMode) -> None:
    """The machine goes on: what was written is there, synced or not."""
    for seed in range(20):
        world = World(seed, sync, capacity_pages=400)
        for _ in range(3):
            for _ in range(10):
                world.act()
            dead = world.tier
            world.disk.kill()
            try:
                dead.close(drain=False, timeout_s=10)
            except OSError:
                pass  # its storage is gone
            world.tier = world.open()
            world.check(sorted(world.held), (OK,))
            assert set(statuses(world.tier.lookup(sorted(world.removed)))) <= {MISS}
        world.tier.close()


def test_the_simulated_disk_can_fail_a_tier_that_does_not_sync() -> None:
    """The crashes above take what "none" acknowledged."""
    lost = 0
    for seed in range(20):
        world = World(seed, "none", capacity_pages=400)
        for _ in range(12):
            world.act()
        held = sorted(world.held)
        world.end("drop")
        lost += sum(key not in world.held for key in held)
        world.tier.close()
    assert lost > 20


@pytest.mark.parametrize("skipped", ["slab.", "journal."])
def test_a_tier_that_leaves_out_a_sync_is_found_out(monkeypatch: pytest.MonkeyPatch, skipped: str) -> None:
    sync = SimulatedStorage.sync

    def lazy(self: SimulatedStorage, file: int) -> None:
        if skipped not in self._files[file][0]:
            sync(self, file)

    monkeypatch.setattr(SimulatedStorage, "sync", lazy)
    with pytest.raises(AssertionError, match=r"MISS|CORRUPT"):
        for seed in range(20):
            run(seed, "batch", "mixed")
