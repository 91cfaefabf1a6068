"""The disk tier: restarts, owners and readers, capacity, the cleaner, failing disks, the end."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_helpers import (
    SPACE,
    TINY,
    TINY_RECORD,
    TINY_SLOT,
    TINY_TRAILER,
    Told,
    empty,
    flip_byte,
    image,
    slab_path,
    tiny_record,
)
from tier_contract import done, eventually, statuses
from tier_pages import ODD

from kvtransfer.kernels.errors import CapacityError, ConfigError, DeadlineExceeded, OwnershipError, TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.disk_folder import Place, split_paths
from kvtransfer.tiers.disk_reader import DiskReader
from kvtransfer.tiers.io import Transfer, Usage
from kvtransfer.tiers.keys import Namespace
from kvtransfer.tiers.simulated import SimulatedStorage
from kvtransfer.tiers.simulated_disk import SimulatedDisk
from kvtransfer.tiers.storage import FileStorage

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
ERROR, NO_ROOM, CANCELLED = PageStatus.ERROR, PageStatus.NO_ROOM, PageStatus.CANCELLED


def make(paths: Any, pages: int | None = 100, **more: Any) -> DiskTier:
    return DiskTier(paths, TINY, namespace=more.pop("namespace", SPACE), capacity_pages=pages, **more)


def simulated(disk: SimulatedDisk, pages: int | None = 100, **more: Any) -> DiskTier:
    return make("/sim/a", pages, storage=SimulatedStorage(disk), **more)


class Pages:
    """Fresh records."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng()
        self.keys = [rng.bytes(32) for _ in range(count)]
        self.buffers = [tiny_record(key, rng) for key in self.keys]

    def put(self, tier: DiskTier) -> tuple[PageStatus, ...]:
        return statuses(tier.put_from(self.keys, self.buffers))

    def get(self, tier: DiskTier | DiskReader) -> tuple[PageStatus, ...]:
        """What a get says; the bytes of what is OK are compared."""
        buffers = [empty() for _ in self.keys]
        got = statuses(tier.get_into(self.keys, buffers))
        for status, buffer, mine in zip(got, buffers, self.buffers, strict=True):
            assert status is not OK or image(buffer) == image(mine)
        return got


def disk_bytes(folder: Path) -> int:
    """What everything below takes, in blocks."""
    return sum(os.lstat(os.path.join(at, n)).st_blocks * 512 for at, _, names in os.walk(folder) for n in names)


# --- restarts


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    pages = Pages(100)
    with make(tmp_path) as tier:
        assert pages.put(tier) == (OK,) * 100
        statuses(tier.remove(pages.keys[:3]))
    told = Told()
    with make(tmp_path, observer=told) as tier:
        assert tier.stats().pages == 97 and tier.stats().used_bytes == 97 * TINY_RECORD
        assert tier.stats().counters["recovered"] == 97
        assert pages.get(tier) == (MISS,) * 3 + (OK,) * 97
        assert told.of("disk.size")[0]["found_pages"] == 97
        more = Pages(20)
        assert more.put(tier) == (OK,) * 20  # three are free: what an earlier run left counts, and is evicted
        assert tier.stats().pages <= 100


def test_use_is_remembered_over_a_restart(tmp_path: Path) -> None:
    old, new = Pages(5), Pages(5)
    now = [1000.0]
    with make(tmp_path, 10, clock=lambda: now[0]) as tier:
        old.put(tier)
        now[0] += 10
        new.put(tier)
        now[0] += 10
        assert old.get(tier) == (OK,) * 5  # the older ones are the ones in use
    with make(tmp_path, 10, clock=lambda: now[0]) as tier:
        assert Pages(5).put(tier) == (OK,) * 5
        assert statuses(tier.lookup(old.keys)) == (OK,) * 5
        assert statuses(tier.lookup(new.keys)) == (MISS,) * 5


def test_pages_survive_many_rotations_of_the_journal(tmp_path: Path) -> None:
    with make(tmp_path, 64) as tier:
        kept = Pages(8)
        kept.put(tier)
        done(tier.pin(kept.keys, None)).require()
        for _ in range(60):
            Pages(16).put(tier)
        generation = tier._log._journal._generation
    assert generation > 1
    with make(tmp_path, 64) as tier:
        assert kept.get(tier) == (OK,) * 8


@pytest.mark.parametrize("sync", ["none", "interval", "batch"])
def test_every_mode_keeps_what_was_closed(sync: Any) -> None:
    disk, pages = SimulatedDisk(), Pages(20)
    with simulated(disk, sync=sync) as tier:
        pages.put(tier)
    disk.crash(random.Random(0), "drop")
    with simulated(disk, sync=sync) as tier:
        assert pages.get(tier) == (OK,) * 20


def test_sync_now_and_by_interval_keep_what_came_before() -> None:
    disk, pages = SimulatedDisk(), Pages(20)
    tier = simulated(disk)
    pages.put(tier)
    tier.sync()
    disk.crash(random.Random(0), "drop")
    with pytest.raises(OSError):
        tier.close()
    with simulated(disk, sync="interval", interval_s=0.01) as tier:
        assert pages.get(tier) == (OK,) * 20
        more = Pages(20)
        more.put(tier)
        syncs: list[str] = []
        disk.fault = lambda action, path: syncs.append(path) if action == "sync" else None
        eventually(lambda: any("journal" in path for path in syncs))
        eventually(lambda: not tier._log._dirty)
        disk.fault = None
        disk.crash(random.Random(0), "drop")
        with pytest.raises(OSError):
            tier.close()
    with simulated(disk) as tier:
        assert more.get(tier) == (OK,) * 20


@pytest.mark.parametrize("what", ["snapshot", "sync"])
def test_sync_keeps_its_word_after_a_failure(what: str) -> None:
    """The snapshot that was to hold an unsynced journal's pages failed; or a sync did, and the kernel forgot."""
    for seed in range(5):
        disk, pages = SimulatedDisk(), Pages(5)
        tier = simulated(disk)
        for key, buffer in zip(pages.keys, pages.buffers, strict=True):
            done(tier.put_from([key], [buffer])).require()

        def fault(action: str, path: str, disk: SimulatedDisk = disk) -> OSError | None:
            if what == "snapshot":
                return OSError(errno.ENOSPC, "full") if action == "create" and "snapshot" in path else None
            if action != "sync" or "journal" not in path:
                return None
            disk.names[path].unsynced.clear()
            return OSError(errno.EIO, "bad")

        disk.fault = fault
        with pytest.raises(OSError):
            tier._log.rotate() if what == "snapshot" else tier.sync()
        disk.fault = None
        tier.sync()
        disk.crash(random.Random(seed), "drop")
        with pytest.raises(OSError):
            tier.close()
        with simulated(disk) as tier:
            assert pages.get(tier) == (OK,) * 5


def test_puts_go_on_while_the_next_journal_is_made() -> None:
    """Making it waits for the disk, which may take seconds where it is busy."""
    disk, pages, gate, inside = SimulatedDisk(), Pages(20), threading.Event(), threading.Event()
    with simulated(disk) as tier:
        create = tier._storage.create

        def slow(path: str, nbytes: int, *, slab: bool) -> int:
            if "journal." in path:
                inside.set()
                assert gate.wait(20)
            return create(path, nbytes, slab=slab)

        tier._storage.create = slow  # type: ignore[method-assign]
        thread = threading.Thread(target=tier._log.rotate)
        thread.start()
        try:
            assert inside.wait(20)
            assert pages.put(tier) == (OK,) * 20 and pages.get(tier) == (OK,) * 20
            assert statuses(tier.remove(pages.keys[:5])) == (OK,) * 5
        finally:
            gate.set()
            thread.join(20)
        assert pages.get(tier) == (MISS,) * 5 + (OK,) * 15
    with simulated(disk) as tier:
        assert pages.get(tier) == (MISS,) * 5 + (OK,) * 15


# --- owners, readers, namespaces


def test_a_second_owner_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    with make(tmp_path):
        with pytest.raises(OwnershipError, match=rf"owned by process {os.getpid()}.*place of its own|read_only|place"):
            make(tmp_path)
        with make(tmp_path, place=Place(tp=1)) as other, make(tmp_path, place=Place(instance=3, dp=1, pp=2, cp=4)):
            assert other.folders[0].endswith("i0-dp0-pp0-cp0-tp1")
    make(tmp_path).close()


def test_another_namespace_or_place_never_hits(tmp_path: Path) -> None:
    pages = Pages(4)
    with make(tmp_path) as tier:
        pages.put(tier)
        for more in ({"namespace": bytes(32)}, {"place": Place(tp=1)}):
            with make(tmp_path, **more) as other:
                assert pages.get(other) == (MISS,) * 4
    space = Namespace.of(TINY, model="m", kv_dtype="bfloat16")
    with make(tmp_path, namespace=space) as tier:
        assert space.digest().hex() in tier.folders[0]


def test_a_folder_of_other_records_is_refused(tmp_path: Path) -> None:
    make(tmp_path).close()
    with pytest.raises(ConfigError, match=r"payload_bytes 2112, asked for 12060"):
        DiskTier(tmp_path, ODD, namespace=SPACE, capacity_pages=10)
    paths = [tmp_path / "a", tmp_path / "b"]
    make(paths).close()
    for wrong in (paths[::-1], paths[:1]):
        with pytest.raises(ConfigError, match="same paths in the same order"):
            make(wrong)
    folder = next((tmp_path / "a" / SPACE.hex()).iterdir())
    (folder / "meta.json").write_text("{}")
    with pytest.raises(TierError, match=r"meta\.json"):
        make(paths)


def test_a_disk_that_was_exchanged_costs_its_own_pages_only(tmp_path: Path) -> None:
    paths, pages = [tmp_path / "a", tmp_path / "b"], Pages(60)
    with make(paths, 80) as tier:
        pages.put(tier)
    folder = next((tmp_path / "b" / SPACE.hex()).iterdir())
    for name in folder.iterdir():
        name.unlink()
    told = Told()
    with make(paths, 80, observer=told) as tier:
        got = pages.get(tier)
        assert set(got) == {OK, MISS} and got.count(OK) == 30
        assert told.of("disk.size")[0]["lost_pages"] == 30
        assert Pages(50).put(tier) == (OK,) * 50


def test_slabs_are_spread_over_the_paths(tmp_path: Path) -> None:
    with make(f"{tmp_path}/a; {tmp_path}/b;{tmp_path}/c", 90) as tier:
        pages = Pages(60)
        pages.put(tier)
        where = [slab_path(tier, key)[0].split("/")[-4] for key in pages.keys]
        assert {name: where.count(name) for name in "abc"} == {"a": 20, "b": 20, "c": 20}
        assert pages.get(tier) == (OK,) * 60
    assert split_paths("/x; /y") == ["/x", "/y"] == split_paths(["/x", "/y"])
    for bad in ("", " ; ", "/x;/x", ["/x", "/y/../x"]):
        with pytest.raises(ConfigError, match="different ones"):
            split_paths(bad)


def test_others_may_read_while_the_owner_works(tmp_path: Path) -> None:
    pages, more = Pages(20), Pages(10)
    with make(tmp_path, 30) as tier, pytest.raises(ConfigError, match="expected a tier"):
        DiskReader(tmp_path, namespace=bytes(32))
    with make(tmp_path, 30) as tier:
        pages.put(tier)
        with DiskReader(tmp_path, namespace=SPACE, refresh_s=0) as reader:
            assert pages.get(reader) == (OK,) * 20 and reader.stats().pages == 20
            assert more.get(reader) == (MISS,) * 10
            more.put(tier)
            assert more.get(reader) == (OK,) * 10
            for handle in (
                reader.put_from(more.keys, more.buffers),
                reader.remove(more.keys),
                reader.pin(more.keys, 1),
            ):
                assert statuses(handle) == (ERROR,) * 10
            statuses(tier.remove(pages.keys))
            assert Pages(20).put(tier) == (OK,) * 20  # over what the reader believes in
            assert pages.get(reader) == (MISS,) * 20
            assert pages.get(tier) == (MISS,) * 20
        assert more.get(tier) == (OK,) * 10, "a reader never takes anything from the owner"


def test_a_reader_finds_slabs_that_were_made_anew() -> None:
    disk, pages = SimulatedDisk(), Pages(20)
    with simulated(disk, 20, file_bytes=5 * TINY_RECORD) as tier:
        pages.put(tier)
        with DiskReader("/sim/a", namespace=SPACE, refresh_s=0, storage=SimulatedStorage(disk)) as reader:
            assert pages.get(reader) == (OK,) * 20
            disk.others_bytes = disk.capacity_bytes
            tier.clean()
            assert tier.stats().pages == 0
            disk.others_bytes = 0
            more = Pages(20)
            assert more.put(tier) == (OK,) * 20
            more.get(reader)  # old slabs are open still: what it finds in them makes it look again
            assert more.get(reader) == (OK,) * 20
            assert pages.get(reader) == (MISS,) * 20


def test_a_reader_that_cannot_look_again_answers_all_the_same() -> None:
    """The owner's journal, or a slab, can't be opened for a while: no get without an end, and nothing raised."""
    disk, pages, more = SimulatedDisk(), Pages(20), Pages(5)
    with simulated(disk, 40, file_bytes=5 * TINY_RECORD) as tier:
        pages.put(tier)
        with DiskReader("/sim/a", namespace=SPACE, refresh_s=0, storage=SimulatedStorage(disk)) as reader:
            for what in ("journal", "slab"):
                path, start = slab_path(tier, pages.keys[3])
                disk.flip_bit(path, 8 * (start + 100))
                disk.fault = lambda action, path, what=what: (
                    OSError(errno.EIO, "bad") if action == "open" and what in path else None
                )
                assert pages.get(reader)[3] in (CORRUPT, MISS)
                assert more.get(reader) == (MISS,) * 5
                more.put(tier)
                assert set(more.get(reader)) <= {OK, MISS} and reader.stats().counters["refresh_failed"] >= 1
                disk.fault = None
                assert more.get(reader) == (OK,) * 5
                statuses(tier.remove(more.keys))
                more = Pages(5)
                disk.flip_bit(path, 8 * (start + 100))
            assert pages.get(reader) == (OK,) * 20
            assert reader.stats().in_flight == 0


# --- capacity


@pytest.mark.parametrize("limit", [300 << 10, 1 << 20, 5_000_000])
def test_everything_together_stays_within_the_capacity(tmp_path: Path, limit: int) -> None:
    tier = DiskTier(tmp_path, TINY, namespace=SPACE, capacity_bytes=limit)
    most = 0
    for _ in range(12):
        pages = Pages(100)
        assert OK in pages.put(tier)
        most = max(most, disk_bytes(tmp_path))
    assert tier.stats().capacity_bytes > 0.8 * limit or limit < 1 << 20
    tier.close()
    assert max(most, disk_bytes(tmp_path)) <= limit


def test_a_smaller_capacity_next_time_deletes_slabs_and_keeps_what_was_used(tmp_path: Path) -> None:
    old, new = Pages(40), Pages(40)
    now = [0.0]
    with make(tmp_path, 80, file_bytes=10 * TINY_RECORD, clock=lambda: now[0]) as tier:
        old.put(tier)
        now[0] = 50.0
        new.put(tier)
    with make(tmp_path, 45, file_bytes=10 * TINY_RECORD) as tier:
        assert new.get(tier) == (OK,) * 40
        assert old.get(tier) == (MISS,) * 40
        assert tier.stats().capacity_bytes == 45 * TINY_RECORD
    with make(tmp_path, 3) as tier:
        assert tier.stats().used_bytes <= 3 * TINY_RECORD
        assert Pages(9).put(tier).count(OK) == 3
        assert len([n for n in os.listdir(tier.folders[0]) if n.startswith("slab")]) == 1
        assert sum(os.path.getsize(os.path.join(tier.folders[0], n)) for n in os.listdir(tier.folders[0])
                   if n.startswith("slab")) <= 3 * TINY_RECORD  # fmt: skip


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*: expected a folder, there or to be made, got .*; take another path"):
        make(tmp_path / "file")


def test_bad_settings_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pages": None}, ConfigError, "either capacity_bytes or capacity_pages"),
        ({"pages": 0}, CapacityError, "at least one record"),
        ({"pages": None, "capacity_bytes": 20_000}, CapacityError, "at least one record"),
        ({"owners": 0}, ConfigError, "at least one owner"),
        ({"disk_share": 0.0}, ConfigError, "disk_share"),
        ({"file_bytes": 4096}, ConfigError, "file_bytes"),
        ({"namespace": b"short"}, ConfigError, "32 bytes"),
        ({"sync": "always"}, ConfigError, "sync"),
        ({"interval_s": 0}, ConfigError, "interval_s"),
        ({"full_share": 1.5}, ConfigError, "full_share"),
        ({"engine": "gds"}, ConfigError, "engine"),
    ]
    for more, error, match in cases:
        with pytest.raises(error, match=match):
            make(tmp_path / "x", **{"pages": 10, **more})
    with pytest.raises(ConfigError, match="at most 1073741824 bytes"):
        huge = KVSpec.attention(num_layers=128, page_size=4096, kv_heads=8, head_dim=128, itemsize=2)
        DiskTier(tmp_path / "x", huge, namespace=SPACE, capacity_pages=1)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="at least 0"):
        Place(tp=-1)


def test_the_capacity_is_cut_so_that_the_file_system_keeps_room() -> None:
    disk, told = SimulatedDisk(capacity_bytes=200 * TINY_RECORD), Told()
    disk.others_bytes = 100 * TINY_RECORD
    tier = simulated(disk, 150, observer=told, disk_share=0.85)
    (size,) = told.of("disk.size")
    assert size["cut"] and "cut from 150" in size["message"] and "85%" in size["message"]
    pages = tier.stats().capacity_bytes // TINY_RECORD
    assert 30 < pages < 70
    for _ in range(5):
        Pages(60).put(tier)
    assert disk.used_bytes() <= 0.85 * disk.capacity_bytes
    tier.close()
    with simulated(disk, 150, observer=told) as tier:  # its own files are not others'
        assert tier.stats().capacity_bytes // TINY_RECORD >= pages - 2
    disk.others_bytes = 180 * TINY_RECORD
    with pytest.raises(CapacityError, match="got none"):
        simulated(SimulatedDisk(capacity_bytes=8192))


def test_a_slab_is_not_made_where_others_have_filled_the_disk_since() -> None:
    disk = SimulatedDisk(capacity_bytes=200 * TINY_RECORD)
    with simulated(disk, 100, file_bytes=10 * TINY_RECORD) as tier:
        first = Pages(10)
        assert first.put(tier) == (OK,) * 10
        disk.others_bytes = 150 * TINY_RECORD
        assert Pages(10).put(tier) == (OK,) * 10  # in place of the first
        assert first.get(tier) == (MISS,) * 10
        assert tier._slabs.total_slots == 10
        disk.others_bytes = 0
        assert Pages(30).put(tier) == (OK,) * 30
        assert tier.stats().pages >= 30


# --- the cleaner


def test_the_cleaner_takes_idle_pages_first_and_then_what_the_policy_says() -> None:
    now = [0.0]
    disk = SimulatedDisk()
    with simulated(disk, 100, clock=lambda: now[0], idle_s=100.0) as tier:
        idle, recent, newest = Pages(10), Pages(40), Pages(50)
        idle.put(tier)
        now[0] = 150.0
        recent.put(tier)
        newest.put(tier)
        now[0] = 158.0
        idle.get(tier)  # in use again: the policy would spare them
        now[0] = 160.0
        recent.get(tier)
        now[0] = 255.0  # `newest` is idle for 105 s, the others for less
        tier.clean()
        assert tier.stats().pages == 85
        assert tier.stats().kept_bytes == 85 * tier.record_bytes, "what a directory may count on"
        left = statuses(tier.lookup(newest.keys))
        assert left.count(MISS) == 15
        assert set(statuses(tier.lookup(idle.keys + recent.keys))) == {OK}
        tier.clean()
        assert tier.stats().pages == 85, "85 % is enough"
        Pages(15).put(tier)
        now[0] = 256.0
        tier.clean()
        assert tier.stats().pages == 85
        assert tier.stats().counters["cleaned"] == 30


class Newest:
    """Evicts what came last; told of everything."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.reads = 0

    def added(self, keys: Sequence[bytes]) -> None:
        self.order += keys

    def used(self, keys: Sequence[bytes]) -> None:
        self.reads += len(keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        self.order = [key for key in self.order if key not in set(keys)]

    def victims(self) -> Iterator[bytes]:
        return iter(self.order[::-1])


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    policy = Newest()
    pages = [Pages(10) for _ in range(3)]
    with make(tmp_path, 20, policy=policy) as tier:
        pages[0].put(tier)
        pages[1].put(tier)
        done(tier.pin(pages[1].keys[5:], None)).require()
        pages[2].put(tier)
        assert statuses(tier.lookup(pages[1].keys)) == (MISS,) * 5 + (OK,) * 5, "pinned pages stay"
        assert statuses(tier.lookup(pages[0].keys)).count(OK) == 5
        assert policy.reads == 0, "a lookup is no use"
        assert set(policy.order) == set(tier._table._slot_of)
        assert len(policy.order) == 20
    again = Newest()
    with make(tmp_path, 20, policy=again):
        assert sorted(again.order) == sorted(policy.order)


def test_whole_slabs_go_where_others_fill_the_disk() -> None:
    disk, told = SimulatedDisk(capacity_bytes=200 * TINY_RECORD), Told()
    now = [0.0]
    with simulated(disk, 100, file_bytes=10 * TINY_RECORD, observer=told, clock=lambda: now[0]) as tier:
        pages = [Pages(10) for _ in range(6)]
        for group in pages:
            now[0] += 1.0
            group.put(tier)
        done(tier.pin(pages[0].keys[:1], None)).require()
        disk.others_bytes = 130 * TINY_RECORD
        tier.clean()
        assert disk.used_bytes() <= 0.85 * disk.capacity_bytes
        kept = [statuses(tier.lookup(group.keys)).count(OK) for group in pages]
        assert kept[0] == 10 and kept[-1] == 10 and kept[1] == 0, kept  # the pinned one's, and the newest
        assert all("deleted" in note["message"] for note in told.of("disk.shrunk")) and told.of("disk.shrunk")
    with simulated(disk, 100) as tier:
        for group, count in zip(pages, kept, strict=True):
            assert group.get(tier).count(OK) == count


def test_a_slab_that_cannot_be_deleted_blocks_no_other() -> None:
    disk, told = SimulatedDisk(capacity_bytes=300 * TINY_RECORD), Told()
    with simulated(disk, 60, file_bytes=10 * TINY_RECORD, observer=told) as tier:
        Pages(60).put(tier)
        disk.fault = lambda action, path: (
            OSError(errno.EPERM, "immutable") if action == "remove" and path.endswith("slab.000002") else None
        )
        disk.others_bytes = 300 * TINY_RECORD
        tier.clean()
        assert [name for name in disk.names if "slab" in name] == [f"{tier.folders[0]}/slab.000002"]
        assert tier.stats().counters["clean_failed"] == 1 and told.of("disk.clean_failed")
        disk.others_bytes = 0
        assert Pages(50).put(tier) == (OK,) * 50
        assert Pages(60).put(tier).count(OK) == 50, "what could not be deleted counts"
        disk.others_bytes = 300 * TINY_RECORD
        tier.clean()  # it can't still
        assert [name for name in disk.names if "slab" in name] == [f"{tier.folders[0]}/slab.000002"]
        disk.others_bytes = 0
        disk.fault = None
        tier.clean()
        assert f"{tier.folders[0]}/slab.000002" not in disk.names
        assert Pages(60).put(tier) == (OK,) * 60


def test_the_cleaner_runs_by_itself(tmp_path: Path) -> None:
    with make(tmp_path, 100, clean_every_s=0.02) as tier:
        Pages(100).put(tier)
        eventually(lambda: tier.stats().pages == 85)


# --- failing disks


def failing(action: str, part: str, code: int, times: int = 10**9) -> Any:
    left = [times]

    def fault(did: str, path: str) -> OSError | None:
        if did == action and part in path and left[0]:
            left[0] -= 1
            return OSError(code, os.strerror(code))
        return None

    return fault


@pytest.mark.parametrize("sync", ["none", "batch"])
@pytest.mark.parametrize(
    ("action", "part", "code"),
    [
        ("write", "slab", errno.EIO),
        ("write", "slab", errno.ENOSPC),
        ("write_at", "journal", errno.EIO),
        ("write_at", "journal", errno.ENOSPC),
        ("sync", "journal", errno.EIO),
        ("sync", "slab", errno.EIO),
    ],
)
def test_a_put_that_fails_is_never_visible(action: str, part: str, code: int, sync: Any) -> None:
    disk, before, bad, after = SimulatedDisk(), Pages(3), Pages(4), Pages(3)
    tier = simulated(disk, 20, sync=sync)
    before.put(tier)
    disk.fault = failing(action, part, code)
    got = bad.put(tier)
    expected = NO_ROOM if (action, code) == ("write", errno.ENOSPC) else ERROR
    if action == "sync" and sync == "none":
        expected = OK
    assert got == (expected,) * 4
    if expected is not OK:
        assert statuses(tier.lookup(bad.keys)) == (MISS,) * 4
        result = done(tier.put_from(bad.keys[:1], bad.buffers[:1]))
        assert os.strerror(code) in str(result.errors[0])
    assert before.get(tier) == (OK,) * 3, "reading goes on"
    disk.fault = None
    assert after.put(tier) == (OK,) * 3, "and so does writing, once the disk does"
    disk.kill()
    with pytest.raises(OSError):
        tier.close()
    with simulated(disk, 20) as tier:
        assert before.get(tier) == (OK,) * 3 and after.get(tier) == (OK,) * 3
        assert bad.get(tier) == ((OK if expected is OK else MISS),) * 4
        assert Pages(20).put(tier) == (OK,) * 20, "no slot is lost"


def test_one_page_that_fails_spoils_no_other() -> None:
    disk, pages = SimulatedDisk(), Pages(6)
    with simulated(disk, 20) as tier:
        disk.fault = failing("write", "slab", errno.EIO, times=1)
        got = pages.put(tier)
        assert sorted(status.value for status in got) == ["error"] + ["ok"] * 5
        assert statuses(tier.lookup(pages.keys)) == tuple(MISS if status is ERROR else OK for status in got)
        assert tier.stats().counters["errors"] == 1


def test_a_read_that_fails_is_an_error_and_the_page_stays() -> None:
    disk, pages = SimulatedDisk(), Pages(3)
    with simulated(disk) as tier:
        pages.put(tier)
        disk.fault = failing("read", "slab", errno.EIO)
        assert pages.get(tier) == (ERROR,) * 3
        disk.fault = None
        assert pages.get(tier) == (OK,) * 3


def test_a_full_disk_keeps_serving_what_fits() -> None:
    disk = SimulatedDisk()
    with simulated(disk, 40, file_bytes=10 * TINY_RECORD) as tier:
        disk.fault = failing("create", "slab", errno.ENOSPC)
        got = done(tier.put_from(*_lists(Pages(2))))
        assert got.statuses == (NO_ROOM,) * 2 and "new slab failed" in str(got.errors[0])
        disk.fault = None
        first = Pages(10)
        assert first.put(tier) == (OK,) * 10
        disk.fault = failing("create", "slab", errno.ENOSPC)
        assert Pages(10).put(tier) == (OK,) * 10
        assert first.get(tier) == (MISS,) * 10
        assert tier.stats().counters["grow_failed"] >= 2
        disk.fault = None
        assert Pages(30).put(tier) == (OK,) * 30 and tier.stats().pages == 40


def _lists(pages: Pages) -> tuple[list[bytes], list[RecordBuffer]]:
    return pages.keys, pages.buffers


def test_without_room_for_a_journal_pages_can_be_read() -> None:
    disk, pages, told = SimulatedDisk(), Pages(5), Told()
    with simulated(disk) as tier:
        pages.put(tier)
    disk.fault = failing("create", "journal", errno.ENOSPC)
    tier = simulated(disk, observer=told)
    assert told.of("disk.journal_failed")
    assert pages.get(tier) == (OK,) * 5
    more = Pages(2)
    assert more.put(tier) == (ERROR,) * 2
    disk.fault = None
    assert more.put(tier) == (OK,) * 2, "tried again"
    tier.close()
    with simulated(disk) as tier:
        assert pages.get(tier) == (OK,) * 5 and more.get(tier) == (OK,) * 2


@pytest.mark.parametrize("where", ["payload", "trailer", "journal", "snapshot"])
def test_a_flipped_bit_is_a_counted_miss(tmp_path: Path, where: str) -> None:
    pages = Pages(10)
    tier = make(tmp_path)
    pages.put(tier)
    path, start = slab_path(tier, pages.keys[4])
    folder = tier.folders[0]
    if where == "journal":  # closing would write a snapshot: copied as a killed process leaves it
        journal = next(n for n in os.listdir(folder) if n.startswith("journal"))
        image = (Path(folder) / journal).read_bytes()
        snapshot = (Path(folder) / "snapshot").read_bytes()
        tier.close()
        for name in os.listdir(folder):
            if name.startswith("journal"):
                os.unlink(os.path.join(folder, name))
        (Path(folder) / "snapshot").write_bytes(snapshot)
        (Path(folder) / journal).write_bytes(image)
        flip_byte(os.path.join(folder, journal), 64 + 64 * 4 + 40)
        lost = range(10)
    else:
        tier.close()
        offset = {"payload": start + 100, "trailer": start + TINY_SLOT + TINY_TRAILER - 9, "snapshot": 64 + 64 * 4 + 40}
        flip_byte(os.path.join(folder, "snapshot") if where == "snapshot" else path, offset[where])
        lost = range(10) if where == "snapshot" else range(4, 5)
    with make(tmp_path) as tier:
        got = pages.get(tier)
        in_files = where in ("payload", "trailer")
        assert got == tuple((CORRUPT if in_files else MISS) if i in lost else OK for i in range(10))
        counters = tier.stats().counters
        assert (counters.get("corrupt", 0), counters["journal_damaged"]) == ((1, 0) if in_files else (0, 1))
        assert pages.get(tier).count(CORRUPT) == 0, "set aside"
        assert pages.put(tier) == (OK,) * 10
        assert pages.get(tier) == (OK,) * 10


def test_a_record_in_anothers_place_is_no_hit(tmp_path: Path) -> None:
    """Bytes that are whole, and of another page: written there by whoever."""
    pages = Pages(2)
    with make(tmp_path) as tier:
        pages.put(tier)
        places = [slab_path(tier, key) for key in pages.keys]
    with open(places[0][0], "r+b") as file:
        file.seek(places[0][1])
        record = file.read(TINY_RECORD)
        file.seek(places[1][1])
        file.write(record)
    with make(tmp_path) as tier:
        assert pages.get(tier) == (OK, CORRUPT)


# --- use and the end


class Held(SimulatedStorage):
    """A device that answers when it is told to."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(disk)
        self.held: list[Transfer] = []
        self.holding = True

    def submit(self, transfer: Transfer) -> None:
        if self.holding:
            transfer.start(list(range(len(transfer.buffers))))
            started = transfer.start

            def again(positions: list[int]) -> list[int]:
                transfer.start = started  # type: ignore[method-assign]
                return positions

            transfer.start = again  # type: ignore[method-assign]
            self.held.append(transfer)
        else:
            super().submit(transfer)

    def release(self) -> None:
        self.holding = False
        for transfer in self.held:
            super().submit(transfer)
        self.held.clear()


def test_what_is_being_read_is_neither_evicted_nor_removed_nor_deleted() -> None:
    disk = SimulatedDisk(capacity_bytes=200 * TINY_RECORD)
    storage = Held(disk)
    storage.holding = False
    tier = make("/sim/a", 10, storage=storage, file_bytes=5 * TINY_RECORD)
    pages = Pages(10)
    pages.put(tier)
    storage.holding = True
    buffers = [empty() for _ in range(3)]
    reading = tier.get_into(pages.keys[:3], buffers)
    assert not reading.done()
    result = done(tier.remove(pages.keys[:4]))
    assert result.statuses == (ERROR,) * 3 + (OK,) and "being read" in str(result.errors[0])
    disk.others_bytes = disk.capacity_bytes
    tier.clean()
    assert statuses(tier.lookup(pages.keys[:3])) == (OK,) * 3
    disk.others_bytes = 0
    writing = tier.put_from(*_lists(Pages(20)))
    storage.release()
    put = statuses(writing)
    assert put.count(OK) == tier.stats().capacity_bytes // TINY_RECORD - 3
    assert done(reading).all_ok
    assert [image(b) for b in buffers] == [image(b) for b in pages.buffers[:3]]
    tier.close()


def test_close_ends_in_time_though_the_device_does_not_answer() -> None:
    disk = SimulatedDisk()
    storage = Held(disk)
    tier = make("/sim/a", storage=storage)
    pages = Pages(2)
    handle = tier.put_from(pages.keys, pages.buffers)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="2 still under way"):
        tier.close(timeout_s=0.1)
    assert time.monotonic() - started < 2
    assert not handle.done(), "the device may still touch the buffers"
    with pytest.raises(OwnershipError):
        simulated(disk)
    storage.release()
    assert done(handle).all_ok
    eventually(lambda: not disk.locks)
    with simulated(disk) as tier:
        assert pages.get(tier) == (OK, OK)


def test_two_batches_that_put_one_page_store_it_once(tmp_path: Path) -> None:
    with make(tmp_path, 50) as tier:  # what is under way takes its room: five times ten
        pages = Pages(10)
        handles = [tier.put_from(pages.keys * 2, pages.buffers * 2) for _ in range(5)]
        for handle in handles:
            assert done(handle).all_ok
        assert tier.stats().pages == 10
        assert pages.get(tier) == (OK,) * 10
        assert Pages(40).put(tier) == (OK,) * 40
        assert tier.stats().pages == 50


def test_a_bug_in_a_policy_leaves_no_batch_without_an_end(tmp_path: Path) -> None:
    class Broken(Newest):
        def victims(self) -> Iterator[bytes]:
            raise ZeroDivisionError("a bug")

    tier = make(tmp_path, 5, policy=Broken())
    Pages(5).put(tier)
    with pytest.raises(ZeroDivisionError):
        tier.put_from(*_lists(Pages(1)))
    assert tier.stats().in_flight == 0
    tier.close(timeout_s=10)


def test_a_tier_costs_no_threads_descriptors_or_memory_once_closed(tmp_path: Path) -> None:
    pages = Pages(50)

    def use() -> None:
        for sync in ("none", "batch", "interval"):
            with make(tmp_path, 60, sync=sync) as tier:
                pages.put(tier)
                pages.get(tier)
                tier.remove(pages.keys)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    use()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count(), resident())
    for _ in range(15):
        use()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before[:2]
    assert resident() - before[2] < 32 << 20


# --- callbacks on the thread that moves records


def test_a_broken_observer_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises is reported; the tier opens, a page that does not verify has its outcome, and it closes."""
    reported: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: reported.append(str(told.exc_value)))

    class Broken(Observer):
        def noted(self, what: str, **fields: Any) -> None:
            raise ZeroDivisionError(what)

        def fell_back(self, what: str, why: str) -> None:
            raise ZeroDivisionError(what)

    tier = DiskTier(tmp_path, TINY, namespace=SPACE, capacity_pages=8, observer=Broken())
    key, rng = bytes(31) + b"k", np.random.default_rng()
    assert tier.put_from([key], [tiny_record(key, rng)]).result(20).all_ok
    path, start = slab_path(tier, key)
    flip_byte(path, start + 100)
    unaligned = RecordBuffer(np.zeros(TINY_SLOT + 1, np.uint8)[1:], np.zeros(TINY_TRAILER, np.uint8))
    assert tier.get_into([key], [unaligned]).result(20).statuses == (PageStatus.CORRUPT,)
    assert tier.stats().in_flight == 0 and "tier.corrupt" in reported and "aligned buffers" in reported
    tier.close(timeout_s=20)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_callback_may_call_whatever_waits_for_its_own_thread(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registering, letting go, and a cleaning round that deletes slabs, from where a batch's end is told."""
    pages, told = Pages(20), threading.Event()
    errors: list[BaseException] = []
    memory = np.zeros(8 * TINY_SLOT, dtype=np.uint8)
    with make(tmp_path, 100, file_bytes=10 * TINY_RECORD, engine=engine) as tier:
        pages.put(tier)

        def callback(_: object) -> None:
            try:
                tier.register(memory)
                tier.unregister(memory)
                monkeypatch.setattr(FileStorage, "usage", lambda self, path: Usage(1, 1 << 30, 1 << 30))
                tier.clean()  # others have filled the disk: slabs go
            except BaseException as error:
                errors.append(error)
            told.set()

        read = tier.get_into(pages.keys[:10], [empty() for _ in range(10)])
        read.add_done_callback(callback)
        assert told.wait(20), "it waits for itself"
        assert not errors, errors
        assert set(pages.get(tier)) == {MISS} and not list(tmp_path.rglob("slab.*"))
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not [name for name in descriptors if str(tmp_path) in name], "slabs that were deleted are closed"


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
