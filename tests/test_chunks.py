"""Rows of foreign memory in a tier: bytes, keys, and what is left of a job that fails in part."""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.integrations.chunks import ChunkJob, ChunkStore, chunk_spec, namespace_digest
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.tiers.base import PageStatus, Tier
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.memory_tier import MemoryTier

CHUNK = 3 * 4096
ROWS = 13
SPACE = namespace_digest({"model": "m", "chunk_bytes": CHUNK})
LIMIT_S = 20.0


def memory(rows: int = ROWS) -> NDArray[np.uint8]:
    """Rows of fresh random bytes, aligned as an engine's mapping is."""
    out = np.frombuffer(mmap.mmap(-1, rows * CHUNK), dtype=np.uint8).reshape(rows, CHUNK)
    out[:] = np.random.default_rng().integers(0, 256, out.shape, dtype=np.uint8)
    return out


def keys(count: int) -> list[bytes]:
    """Foreign keys that nobody had before: 32 bytes of a hash and a group's number."""
    return [secrets.token_bytes(32) + (i % 3).to_bytes(4, "big") for i in range(count)]


def ended(store: ChunkStore, count: int = 1) -> list[ChunkJob]:
    """The next ``count`` jobs that end."""
    out: list[ChunkJob] = []
    until = time.monotonic() + LIMIT_S
    while len(out) < count and time.monotonic() < until:
        out += store.finished()
        time.sleep(0.002)
    assert len(out) == count
    return out


def answer(store: ChunkStore, key: bytes, who: str = "r") -> bool:
    """What a lookup says in the end."""
    until = time.monotonic() + LIMIT_S
    while (known := store.lookup(key, who)) is None and time.monotonic() < until:
        store.flush()
        time.sleep(0.002)
    assert known is not None
    return known


class Rig:
    def __init__(self, tier: Tier, *, rows: NDArray[np.uint8] | None = None, **more: Any) -> None:
        self.rows = memory() if rows is None else rows
        self.tier = tier
        self.store = ChunkStore(tier, self.rows, namespace=SPACE, salt=b"s", **more)

    def put(self, names: Sequence[bytes], rows: Sequence[int]) -> ChunkJob:
        self.store.store(secrets.token_hex(4), names, rows)
        return ended(self.store)[0]

    def get(self, names: Sequence[bytes], rows: Sequence[int]) -> ChunkJob:
        self.store.load(secrets.token_hex(4), names, rows)
        return ended(self.store)[0]


@pytest.fixture
def memory_rig() -> Iterator[Rig]:
    rig = Rig(MemoryTier(1 << 24))
    yield rig
    rig.store.close()


def faulty_rig(*faults: Fault, **more: Any) -> tuple[Rig, FaultyTier]:
    tier = FaultyTier(MemoryTier(1 << 24), faults)
    return Rig(tier, **more), tier


def test_bytes_come_back_into_other_rows_and_no_row_beside_them_changes(memory_rig: Rig) -> None:
    rows = memory_rig.rows
    before, names = rows.copy(), keys(5)
    job = memory_rig.put(names, [1, 4, 6, 9, 12])
    assert job.ok == [True] * 5 and not job.is_load
    rows[[1, 4, 6, 9, 12]] = 0xEE
    job = memory_rig.get(names[::-1], [0, 2, 4, 6, 8])
    assert job.ok == [True] * 5 and job.is_load and job.statuses == {PageStatus.OK: 5}
    assert (rows[[0, 2, 4, 6, 8]] == before[[12, 9, 6, 4, 1]]).all()
    for row in (3, 5, 7, 10, 11):
        assert (rows[row] == before[row]).all()


def test_more_pages_than_a_batch_has() -> None:
    rig = Rig(MemoryTier(1 << 26), rows=memory(300))
    before, names = rig.rows.copy(), keys(300)
    assert rig.put(names, range(300)).ok == [True] * 300
    rig.rows[:] = 0
    assert rig.get(names, range(299, -1, -1)).ok == [True] * 300
    assert (rig.rows == before[::-1]).all()
    rig.store.close()


def test_an_empty_job_ends_too(memory_rig: Rig) -> None:
    assert memory_rig.put([], []).ok == []
    assert memory_rig.get([], []).ok == []


def test_lookups_are_asked_together_at_the_flush_and_kept_until_forgotten(memory_rig: Rig) -> None:
    there, missing = keys(2)
    memory_rig.put([there], [3])
    store = memory_rig.store
    assert store.lookup(there, "a") is None and store.lookup(missing, "a") is None and store.lookup(there, "b") is None
    assert answer(store, there, "a") and not answer(store, missing, "a")
    memory_rig.tier.remove(store.stored_keys([there])).result(LIMIT_S)
    assert store.lookup(there, "b") is True  # what was said stays said while a request uses it
    store.forget("a")
    assert store.lookup(there, "b") is True
    store.forget("b")
    assert not answer(store, there, "c")


def test_what_a_store_brings_is_found_by_a_request_that_missed_it(memory_rig: Rig) -> None:
    (name,) = keys(1)
    assert not answer(memory_rig.store, name)
    memory_rig.put([name], [0])
    assert memory_rig.store.lookup(name, "r") is True


def test_a_page_that_fails_costs_that_page_alone_and_is_a_miss_from_then_on() -> None:
    rig, tier = faulty_rig()
    names, before = keys(4), rig.rows.copy()
    rig.put(names, [0, 1, 2, 3])
    for name in names:
        assert answer(rig.store, name)
    tier.add(Fault("error", verb="get", call=0, pages=[2]))
    job = rig.get(names, [5, 6, 7, 8])
    assert job.ok == [True, True, False, True] and job.error is not None
    assert (rig.rows[[5, 6, 8]] == before[[0, 1, 3]]).all()
    assert [rig.store.lookup(name, "r") for name in names] == [True, True, False, True]
    rig.store.close()


def test_a_bit_that_flipped_is_no_hit() -> None:
    rig, _ = faulty_rig(Fault("wrong_bytes", verb="get", call=0, pages=[0]))
    names = keys(2)
    rig.put(names, [0, 1])
    job = rig.get(names, [2, 3])
    assert job.ok == [False, True] and job.statuses[PageStatus.CORRUPT] == 1
    rig.store.close()


def test_a_slow_tier_ends_jobs_at_their_deadline_and_makes_lookups_misses() -> None:
    rig, tier = faulty_rig(
        Fault("stall", verb="get", call=0), Fault("stall", verb="lookup", call=0), deadline_s=0.3, lookup_s=0.2
    )
    names = keys(2)
    rig.put(names, [0, 1])
    began = time.monotonic()
    assert answer(rig.store, names[0]) is False  # nobody waits for the answer for ever
    assert time.monotonic() - began < 5
    job = rig.get(names, [2, 3])
    assert job.ok == [False, False] and job.statuses == {PageStatus.CANCELLED: 2}
    tier.release()
    assert rig.get(names, [2, 3]).ok == [True, True]  # it comes back by itself
    rig.store.close()


def test_a_late_answer_to_a_lookup_does_not_bring_the_miss_back() -> None:
    rig, tier = faulty_rig(Fault("stall", verb="lookup", call=0), lookup_s=0.1)
    (name,) = keys(1)
    rig.put([name], [0])
    assert answer(rig.store, name) is False
    tier.release()
    time.sleep(0.1)
    assert rig.store.lookup(name, "r") is False
    rig.store.close()


def test_drain_waits_for_what_the_tier_holds_and_no_row_is_touched_afterwards() -> None:
    rig, tier = faulty_rig(Fault("stall", verb="get", call=0, hold=True))
    names = keys(1)
    rig.put(names, [0])
    rig.store.load("x", names, [1])
    assert not rig.store.drain(0.1) and rig.store.under_way == 1
    threading.Timer(0.1, tier.release).start()
    assert rig.store.drain(LIMIT_S)
    assert [job.ok for job in rig.store.finished()] == [[True]]
    rig.store.close()


def test_a_full_tier_refuses_and_says_so() -> None:
    tier = MemoryTier(2 * (CHUNK + 4096))
    rig = Rig(tier)
    names = keys(3)
    assert rig.put(names[:2], [0, 1]).ok == [True, True]
    tier.pin(rig.store.stored_keys(names[:2]), None).result(LIMIT_S)
    job = rig.put(names[2:], [2])
    assert job.ok == [False] and job.statuses == {PageStatus.NO_ROOM: 1}
    assert answer(rig.store, names[0]) and not answer(rig.store, names[2])
    rig.store.close()


def test_a_tier_that_died_answers_every_job() -> None:
    rig, _ = faulty_rig(Fault("death", call=0))
    names = keys(2)
    assert rig.put(names, [0, 1]).ok == [False, False]
    assert rig.get(names, [0, 1]).ok == [False, False]
    assert not answer(rig.store, names[0])
    rig.store.close()


def test_a_closed_tier_refuses_jobs_one_by_one() -> None:
    tier = MemoryTier(1 << 24)
    rig = Rig(tier)
    tier.close()
    names = keys(1)
    assert rig.put(names, [0]).ok == [False]
    job = rig.get(names, [0])
    assert job.ok == [False] and not answer(rig.store, names[0])
    rig.store.close()
    rig.store.close()


def test_close_lets_go_of_the_memory() -> None:
    mapped = mmap.mmap(-1, 4 * CHUNK)
    view = memoryview(mapped)
    rows = np.frombuffer(view, dtype=np.uint8).reshape(4, CHUNK)
    rig = Rig(MemoryTier(1 << 24), rows=rows)
    rig.put(keys(2), [0, 1])
    rig.store.close()
    rig.rows = rows = np.empty((0, 0), dtype=np.uint8)
    view.release()  # BufferError while somebody still looks at it
    mapped.close()


def disk(folder: Path, space: bytes = SPACE) -> DiskTier:
    return DiskTier(str(folder), chunk_spec(CHUNK), namespace=space, capacity_pages=32, disk_share=1.0)


def test_a_disk_keeps_them_for_the_next_process(tmp_path: Path) -> None:
    rig = Rig(disk(tmp_path))
    before, names = rig.rows.copy(), keys(4)
    assert rig.put(names, [2, 3, 5, 7]).ok == [True] * 4
    rig.store.close()
    again = Rig(disk(tmp_path))
    assert answer(again.store, names[0])
    assert again.get(names, [0, 1, 2, 3]).ok == [True] * 4
    assert (again.rows[:4] == before[[2, 3, 5, 7]]).all()
    again.store.close()


def test_another_namespace_or_salt_finds_nothing() -> None:
    tier = MemoryTier(1 << 24)
    rows = memory()
    names = keys(1)
    ours = ChunkStore(tier, rows, namespace=SPACE, salt=b"s")
    ours.store(0, names, [0])
    assert ended(ours)[0].ok == [True]
    for space, salt in ((SPACE, b"t"), (namespace_digest({"model": "n", "chunk_bytes": CHUNK}), b"s")):
        other = ChunkStore(tier, rows, namespace=space, salt=salt)
        assert not answer(other, names[0])
        other.load(0, names, [1])
        assert ended(other)[0].ok == [False]
    ours.close()


def test_namespace_digest_keeps_neighbours_apart() -> None:
    assert namespace_digest({"a": "bc", "d": "e"}) != namespace_digest({"a": "b", "cd": "e"})
    assert namespace_digest({"a": 1, "b": 2}) == namespace_digest({"b": 2, "a": 1})
    assert namespace_digest({"a": None}) != namespace_digest({})


def test_bad_input_is_refused_before_anything_is_touched(memory_rig: Rig) -> None:
    store = memory_rig.store
    with pytest.raises(LayoutError, match=r"expected rows in 0..12, got \[13\]"):
        store.load("x", keys(1), [ROWS])
    with pytest.raises(LayoutError, match="expected one row a key, got 2 rows for 1 keys"):
        store.store("x", keys(1), [0, 1])
    assert store.under_way == 0
    with pytest.raises(ConfigError, match="expected contiguous uint8 rows of a multiple of 4096"):
        ChunkStore(MemoryTier(1), np.zeros((2, 4097), dtype=np.uint8), namespace=SPACE)


def test_an_id_that_is_under_way_is_refused() -> None:
    rig, tier = faulty_rig(Fault("stall", verb="get", call=0))
    rig.store.load("x", keys(1), [0])
    with pytest.raises(LayoutError, match="expected an id that is not under way"):
        rig.store.load("x", keys(1), [1])
    tier.release()
    rig.store.close()
