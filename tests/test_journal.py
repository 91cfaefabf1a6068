"""The journal: batches, damage, rotation, snapshots, and how long recovery takes."""

from __future__ import annotations

import errno
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.kernels.errors import CapacityError, TierError
from kvtransfer.tiers.disk_table import SlotTable
from kvtransfer.tiers.eviction import LRU
from kvtransfer.tiers.io import write_file
from kvtransfer.tiers.journal import (
    ENTRY,
    PUT,
    REMOVE,
    SNAPSHOT,
    Journal,
    encode_batch,
    entries_of,
    journal_bytes,
    metadata_bytes,
    recover,
)
from kvtransfer.tiers.simulated import SimulatedStorage
from kvtransfer.tiers.simulated_disk import SimulatedDisk
from kvtransfer.tiers.storage import FileStorage

SET = bytes(range(16))
FOLDER = "/sim/x"


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") * 8


def puts(numbers: Sequence[int]) -> np.ndarray:
    return entries_of(PUT, list(numbers), 1.5, [key(i) for i in numbers])


def fresh(nbytes: int = 16384) -> tuple[SimulatedDisk, SimulatedStorage, Journal]:
    disk = SimulatedDisk()
    storage = SimulatedStorage(disk)
    storage.make_folder(FOLDER)
    journal = Journal(storage, FOLDER, SET, nbytes, generation=0)
    journal.start_next()
    return disk, storage, journal


def held(disk: SimulatedDisk) -> dict[bytes, int]:
    """What recovery says: key -> slot."""
    table = SlotTable(1 << 20, 1, LRU())
    table.add_file(0, 0, 1 << 20)
    table.restore(recover(SimulatedStorage(disk), FOLDER, SET).entries)
    return dict(table._slot_of)


def path(generation: int) -> str:
    return f"{FOLDER}/journal.{generation:08d}"


def test_an_entry_has_64_bytes_and_comes_back() -> None:
    assert ENTRY.itemsize == 64
    disk, _, journal = fresh()
    journal.append(puts([3, 4, 5]), sync=False)
    journal.append(entries_of(REMOVE, [4], 2.0, [key(4)]), sync=True)
    found = recover(SimulatedStorage(disk), FOLDER, SET)
    assert found.damaged == 0 and found.generation == 1
    assert found.entries["kind"].tolist() == [PUT, PUT, PUT, REMOVE]
    assert found.entries["used_s"].tolist() == [1.5, 1.5, 1.5, 2.0]
    assert held(disk) == {key(3): 3, key(5): 5}


def test_a_slot_goes_to_the_last_page_that_was_put_there_and_a_page_to_its_last_slot() -> None:
    disk, _, journal = fresh()
    journal.append(entries_of(PUT, [1, 1, 2, 7], 0.0, [key(1), key(2), key(3), key(2)]), sync=False)
    assert held(disk) == {key(3): 2, key(2): 7}
    journal.append(entries_of(REMOVE, [1], 0.0, [key(2)]), sync=False)  # an old place: says nothing of the new one
    assert held(disk) == {key(3): 2, key(2): 7}


@pytest.mark.parametrize("where", range(0, 64 * 9, 13))
def test_a_flipped_bit_costs_its_batch_and_is_counted(where: int) -> None:
    disk, _, journal = fresh()
    for first in (0, 2, 4):
        journal.append(puts([first, first + 1]), sync=True)  # 3 x 64 bytes each
    disk.flip_bit(path(1), 8 * where + random.randrange(8))
    found = recover(SimulatedStorage(disk), FOLDER, SET)
    batch = where // 192
    assert found.damaged == 1
    assert sorted(held(disk).values()) == [slot for slot in range(6) if slot // 2 != batch]


@pytest.mark.parametrize("where", range(0, 64 * 8, 31))
def test_a_flipped_bit_in_a_snapshot_is_counted(where: int) -> None:
    disk, _, journal = fresh()
    journal.snapshot(puts(range(1000)), journal.start_next())
    journal.append(puts([5000]), sync=True)
    assert len(held(disk)) == 1001
    disk.flip_bit(f"{FOLDER}/{SNAPSHOT}", 8 * where)
    found = recover(SimulatedStorage(disk), FOLDER, SET)
    assert found.damaged == 1
    assert sorted(held(disk).values()) == [*range(512, 1000), 5000]


def test_a_torn_tail_ends_the_journal() -> None:
    data = encode_batch(puts([1, 2]), 1, 1, SET)
    second = encode_batch(puts([3, 4, 5]), 2, 1, SET)
    for kept in range(0, len(second), 29):
        disk, storage, _ = fresh()
        storage.write_at(1, 0, data + second[:kept])
        found = recover(SimulatedStorage(disk), FOLDER, SET)
        assert found.entries["slot"].tolist() == [1, 2]
        assert found.damaged == (kept > 0)


@pytest.mark.parametrize(
    ("number", "generation", "owner"),
    [(1, 1, bytes(16)), (1, 2, SET), (0, 1, SET)],
    ids=["set", "generation", "number"],
)
def test_batches_of_another_journal_say_nothing(number: int, generation: int, owner: bytes) -> None:
    disk, storage, _ = fresh()
    storage.write_at(1, 0, encode_batch(puts([1]), number, generation, owner))
    found = recover(SimulatedStorage(disk), FOLDER, SET)
    assert not len(found.entries) and found.damaged == 1


def test_a_full_journal_refuses_and_says_so() -> None:
    _, _, journal = fresh(nbytes=64 * 8)
    journal.append(puts(range(4)), sync=False)
    assert journal.free_entries == 2
    with pytest.raises(CapacityError, match="room for 3 entries, got 2"):
        journal.append(puts(range(3)), sync=False)
    journal.append(puts([1, 2]), sync=False)
    assert journal.filled == 1.0 and journal.free_entries == 0


def test_without_a_file_it_says_so() -> None:
    journal = Journal(SimulatedStorage(SimulatedDisk()), FOLDER, SET, 4096, generation=0)
    assert not journal.usable and journal.free_entries == 0
    with pytest.raises(TierError, match="expected a file"):
        journal.append(puts([1]), sync=False)
    journal.close()


def test_a_failed_append_leaves_nothing() -> None:
    for failing in ("write_at", "sync"):
        disk, _, journal = fresh()
        journal.append(puts([1]), sync=True)
        disk.fault = lambda action, _, failing=failing: OSError(errno.EIO, "bad") if action == failing else None
        with pytest.raises(OSError):
            journal.append(puts([2, 3, 4]), sync=True)
        disk.fault = None
        assert set(held(disk)) == {key(1)} or failing == "write_at"
        journal.append(puts([5]), sync=True)
        assert set(held(disk)) == {key(1), key(5)}


def test_rotation_survives_a_crash_at_every_step() -> None:
    for step in range(1, 40):
        disk, _, journal = fresh()
        journal.snapshot(puts(range(10)), journal.start_next())
        journal.append(puts([10, 11]), sync=True)
        disk.crash_at = disk.actions + step
        try:
            journal.snapshot(puts(range(12)), journal.start_next())
            journal.append(puts([12]), sync=True)
            acknowledged = 13
        except OSError:
            acknowledged = 12
        over = not disk.crashed
        disk.crash(random.Random(step))
        assert sorted(held(disk).values())[:12] == list(range(12)), step
        assert len(held(disk)) >= acknowledged
        if over:
            assert step > 8
            return
    pytest.fail("the rotation has no end")


def test_a_file_made_ahead_is_the_one_that_is_begun() -> None:
    disk, storage, journal = fresh()
    journal.append(puts([0]), sync=True)
    made: list[str] = []
    disk.fault = lambda action, path: made.append(path) if action == "create" else None
    journal.prepare()
    journal.prepare()
    assert made == [f"{FOLDER}/journal.00000002"]
    journal.append(puts([1]), sync=True)  # into the first one still
    assert held(disk) == {key(0): 0, key(1): 1}, "an empty file behind it is no damage"
    assert recover(storage, FOLDER, SET).damaged == 0
    assert journal.start_next() == 2 and len(made) == 1
    journal.append(puts([2]), sync=True)
    disk.crash(random.Random(1))
    assert held(disk) == {key(i): i for i in range(3)}


def test_a_file_made_ahead_and_never_begun_is_no_trouble() -> None:
    """Closed, it is gone; after a crash it is made anew; where it can't be made nothing has changed."""
    disk, storage, journal = fresh()
    journal.append(puts([0]), sync=True)
    disk.fault = lambda action, _: OSError(errno.ENOSPC, "full") if action == "create" else None
    with pytest.raises(OSError):
        journal.prepare()
    disk.fault = None
    journal.append(puts([1]), sync=True)
    journal.prepare()
    disk.crash(random.Random(2))
    storage = SimulatedStorage(disk)
    found = recover(storage, FOLDER, SET)
    again = Journal(storage, FOLDER, SET, 16384, generation=found.generation)
    again.snapshot(found.entries, again.start_next())
    again.append(puts([2]), sync=True)
    again.prepare()
    again.close()
    names = [name for name in storage.list_folder(FOLDER) if name.startswith("journal.")]
    assert len(names) == 1 and held(disk) == {key(i): i for i in range(3)}


def test_a_snapshot_without_journals_says_what_the_next_is_called() -> None:
    disk, storage, journal = fresh()
    journal.append(puts([0]), sync=True)
    journal.snapshot(puts([0]), journal.start_next())
    storage.remove(f"{FOLDER}/journal.00000002")
    again = Journal(storage, FOLDER, SET, 16384, generation=recover(storage, FOLDER, SET).generation)
    again.start_next()
    again.append(puts([1]), sync=True)
    assert set(held(disk)) == {key(0), key(1)}


def test_a_crash_during_write_file_leaves_the_old_or_the_new() -> None:
    kinds = set()
    for step in range(1, 12):
        disk = SimulatedDisk()
        storage = SimulatedStorage(disk)
        write_file(storage, FOLDER, "f", b"old" * 500)
        disk.crash_at = disk.actions + step
        try:
            write_file(storage, FOLDER, "f", b"new!" * 700)
        except OSError:
            pass
        disk.crash(random.Random(step))
        data = SimulatedStorage(disk).read_all(f"{FOLDER}/f")
        assert data in (b"old" * 500, b"new!" * 700)
        kinds.add(data[:3])
    assert kinds == {b"old", b"new"}


def test_metadata_stays_within_what_is_reserved(tmp_path: Path) -> None:
    for slots in (1, 17, 600):
        disk, storage, _ = fresh()
        journal = Journal(storage, FOLDER, SET, journal_bytes(slots), generation=1)
        for _ in range(3):
            journal.snapshot(puts(range(slots)), journal.start_next())
        assert disk.used_bytes() <= metadata_bytes(slots)


def test_100_000_records_are_recovered_in_2_s(tmp_path: Path) -> None:
    """From a snapshot of half of them and a journal of single puts: the slowest form."""
    storage = FileStorage(engine="threads")
    folder = str(tmp_path)
    journal = Journal(storage, folder, SET, 64 << 20, generation=0)
    keys = [secrets.token_bytes(32) for _ in range(100_000)]
    first = entries_of(PUT, range(50_000), 0.0, keys[:50_000])
    journal.snapshot(first, journal.start_next())
    rest = entries_of(PUT, range(50_000, 100_000), 0.0, keys[50_000:])
    for at in range(50_000):
        journal.append(rest[at : at + 1], sync=False)
    journal.close()
    started = time.thread_time()  # files are in the page cache: what a busy machine does meanwhile is not ours
    table = SlotTable(1 << 20, 1, LRU())
    table.add_file(0, 0, 1 << 20)
    assert table.restore(recover(storage, folder, SET).entries) == 0
    seconds = time.thread_time() - started
    assert table.find(keys) == list(range(100_000))
    assert seconds < 2.0, seconds
    storage.close()
