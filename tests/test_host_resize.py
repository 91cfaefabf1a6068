"""A host tier that shrinks and grows: memory goes back and comes again, and nobody is left with what has gone."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_helpers import FakeRuntime
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.books import TierPlan
from kvtransfer.commands import Ack, Cancel, Command, Load, Relocate, Resize, Scope, Store, decode, encode, ids
from kvtransfer.directory import Directory
from kvtransfer.kernels.errors import CapacityError, ConfigError, CudaError, LayoutError, OwnershipError, TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.host_size import register_host, resize_host, unregister_host
from kvtransfer.tiers.keys import Shard, page_keys, stored_keys
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.record import RecordHeader
from kvtransfer.tiers.worker_tier import WorkerTier

SPEC = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)  # slots of 12,288 bytes
SLOT, TRAILER = 12_288, 4096
SPACE = bytes(range(32))
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def host(count: int, **more: Any) -> HostTier:
    return HostTier(SPEC, capacity_pages=count, **{"pin": False, "chunk_bytes": 3 * SLOT, **more})


def rows(tier: HostTier) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tier.payload.numpy().reshape(-1, tier.slot_bytes)


def fill(tier: HostTier, slots: np.ndarray[Any, Any]) -> dict[int, bytes]:
    """Random bytes in payloads and trailers; what they are."""
    rng = np.random.default_rng()
    for slot in slots.tolist():
        rows(tier)[slot] = rng.integers(0, 256, tier.slot_bytes, dtype=np.uint8)
        tier.trailers[slot] = rng.integers(0, 256, tier.trailer_bytes, dtype=np.uint8)
    return {slot: content(tier, slot) for slot in slots.tolist()}


def content(tier: HostTier, slot: int) -> bytes:
    record: bytes = rows(tier)[slot].tobytes() + tier.trailers[slot].tobytes()
    return record


def resident_bytes(tier: HostTier) -> int:
    """Of the slab, as the system counts."""
    if tier._slab.fd >= 0:
        return os.fstat(tier.fd).st_blocks * 512
    nbytes = tier._slab._mapping.nbytes
    there = (ctypes.c_ubyte * (nbytes // 4096))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(tier.address), ctypes.c_size_t(nbytes), there)
    return 4096 * sum(page & 1 for page in there)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_goes_back_and_comes_again(shared: bool) -> None:
    with host(12, shared=shared, huge_pages=False) as tier:
        address, whole = tier.address, resident_bytes(tier)
        assert whole >= 12 * (SLOT + TRAILER)
        held = fill(tier, np.arange(12))
        given_bytes = tier.resize(4)
        assert given_bytes == 6 * SLOT + 3 * TRAILER  # in chunks of 3, and of 9 trailers
        assert tier.ready_slots == tier.free_slots == 4 and tier.num_slots == 12 and tier.address == address
        assert resident_bytes(tier) == whole - given_bytes
        assert all(content(tier, slot) == held[slot] for slot in range(6))
        assert (
            not rows(tier)[6:].any() and not tier.trailers[9:].any()
        )  # a view of what has gone reads zeros, and takes memory again
        with pytest.raises(CapacityError, match=r"expected 5 free host slots, got 4 of 4, 8 more not ready"):
            tier.allocate(5)
        with pytest.raises(LayoutError, match="expected 0 to 3, got 4"):
            tier.record(4)
        assert tier.resize(12) == 0
        assert tier.ready_slots == tier.free_slots == 12 and resident_bytes(tier) == whole
        assert all(content(tier, slot) == held[slot] for slot in range(4))
        fill(tier, tier.allocate(12))


def test_chunks_are_unregistered_and_registered_again() -> None:
    runtime = FakeRuntime()
    tier = host(12, pin=None, registrar=runtime, chunk_bytes=4 * SLOT)
    whole = dict(runtime.live)
    tier.resize(5)
    assert sorted(runtime.live) == [tier.address, tier.address + 4 * SLOT, tier.address + 12 * SLOT]
    assert [call[:2] for call in runtime.calls[-1:]] == [("unregister", tier.address + 8 * SLOT)]
    tier.resize(7)  # has memory still
    assert len(runtime.live) == 3 and tier.ready_slots == 7
    tier.resize(12)
    assert runtime.live == whole
    tier.resize(1)
    tier.close()
    assert not runtime.live


def test_growing_that_fails_is_undone() -> None:
    runtime = FakeRuntime()
    tier = host(12, pin=None, registrar=runtime, chunk_bytes=3 * SLOT, huge_pages=False)
    tier.resize(2)
    before = resident_bytes(tier)
    runtime.fail_at = runtime.count + 1  # the second of four
    with pytest.raises(CudaError, match="pinning chunk 4 of 6"):
        tier.resize(12)
    assert tier.ready_slots == tier.free_slots == 2 and len(runtime.live) == 2
    assert resident_bytes(tier) == before
    tier.resize(12)
    assert tier.free_slots == 12 and len(runtime.live) == 6
    tier.resize(2)
    runtime.shifts = (4096,)  # the device sees it elsewhere now
    with pytest.raises(CudaError, match="as it did before"):
        tier.resize(12)
    assert len(runtime.live) == 2
    tier.close()


def test_unregistering_that_fails_is_raised_and_keeps_that_memory() -> None:
    runtime = FakeRuntime()
    tier = host(9, pin=None, registrar=runtime, chunk_bytes=3 * SLOT)
    held = fill(tier, np.arange(9))
    runtime.fail_unregister = {3}
    with pytest.raises(CudaError, match="error 713"):
        tier.resize(3)
    assert tier.ready_slots == 3 and content(tier, 8)[:SLOT] == held[8][:SLOT] and not rows(tier)[3:6].any()
    tier.close()


def test_slots_in_use_are_named_and_nothing_changes() -> None:
    with host(9) as tier:
        slots = tier.allocate(8)
        with pytest.raises(OwnershipError, match=r"slots from 4 on are free, got \[4, 5, 6, 7\] in use"):
            tier.resize(4)
        assert tier.ready_slots == 9 and tier.allocate(1).tolist() == [8]
        tier.free([8])
        for wrong in (0, 10):
            with pytest.raises(CapacityError, match="expected a size of 1 to 9 slots"):
                tier.resize(wrong)
        tier.free(slots[4:])
        owner = object()
        tier.ledger.claim(slots[5:6], owner)
        with pytest.raises(OwnershipError, match=r"no transfer owns, got \[5\]"):
            tier.resize(4, wait_s=0.0)
        assert tier.ready_slots == 9 and tier.free_slots == 5
        timer = threading.Timer(0.05, tier.ledger.release, [owner])
        timer.start()
        tier.resize(4)
        timer.join()
        assert tier.free_slots == 0 and tier.is_allocated([0, 3]).all()
    with pytest.raises(TierError, match="closed"):
        tier.resize(5)


def test_addresses_for_more_cost_no_memory() -> None:
    with host(2, most_pages=40, huge_pages=False) as tier:
        assert (tier.num_slots, tier.ready_slots) == (40, 2) and tier.wait_ready(1)
        assert resident_bytes(tier) < 3 * (SLOT + TRAILER)
        tier.resize(39)
        assert tier.free_slots == 39 and resident_bytes(tier) >= 39 * (SLOT + TRAILER)
    with host(2, most_bytes=8 * (SLOT + TRAILER) - 1) as tier:
        assert tier.num_slots == 7
    for more in ({"most_pages": 4}, {"most_bytes": 4 * (SLOT + TRAILER)}, {"most_pages": 9, "most_bytes": 1 << 30}):
        with pytest.raises(ConfigError, match="expected one of them, and at least the capacity of 5 slots"):
            host(5, **more)


def test_resizing_beside_growth_in_the_background() -> None:
    gate = threading.Event()
    runtime = FakeRuntime(gate=gate, gate_at=4)
    tier = host(30, pin=None, registrar=runtime, chunk_bytes=SLOT, background=True, most_pages=31)
    assert tier.wait_ready(10, slots=2)
    with pytest.raises(TierError, match=r"expected it to have grown within 0\.01 s, got 2"):
        tier.resize(1, wait_s=0.01)
    threading.Timer(0.05, gate.set).start()
    assert tier.resize(10) == 0 and tier.ready_slots >= 10  # waits for so many, and no longer
    tier.resize(31)
    assert tier.free_slots == 31
    assert tier.resize(5) > 0 and tier.ready_slots == 5
    tier.close()
    assert not runtime.live


def test_who_is_attached_lets_go_first() -> None:
    runtime = FakeRuntime()
    with host(9, shared=True, huge_pages=False) as tier:
        other = HostTier.attach(tier.fd, SPEC, num_slots=9, registrar=runtime, chunk_bytes=3 * SLOT)
        assert len(runtime.live) == 4
        other.resize(3)
        tier.resize(3)
        assert other.ready_slots == 3 and len(runtime.live) == 2
        before = resident_bytes(tier)
        tier.resize(9)
        assert resident_bytes(tier) == before + 6 * SLOT
        other.resize(9)
        rows(tier)[8] = 77
        assert (rows(other)[8] == 77).all() and len(runtime.live) == 4
        other.close()


def test_records_are_copied_whole() -> None:
    with host(9) as tier:
        held = fill(tier, np.arange(9))
        tier.copy([7, 1], [0, 2])
        assert content(tier, 0) == held[7] and content(tier, 2) == held[1]
        assert all(content(tier, slot) == held[slot] for slot in (1, 3, 4, 5, 6, 7, 8))
        for read, slots in (([1], [1, 2]), ([1, 2], [2, 3])):
            with pytest.raises(LayoutError, match="copy: expected as many slots as are read, and none of those"):
                tier.copy(read, slots)
        owner = object()
        tier.ledger.claim(np.array([3, 4]), owner)
        tier.copy([3], [5])  # a transfer may read it too
        with pytest.raises(OwnershipError, match=r"no transfer owns, got \[4\] still in flight after 0\.01 s"):
            tier.copy([1], [4], wait_s=0.01)
        assert content(tier, 4) == held[4]
        assert not tier.ledger.busy(np.array([0, 2, 5])).any()
        tier.ledger.release(owner)


# --- tiers that know the memory


def sealed(tier: HostTier, slots: np.ndarray[Any, Any], salt: bytes) -> list[bytes]:
    """Fresh records in these slots; their keys."""
    for slot in slots.tolist():
        rows(tier)[slot] = np.random.default_rng().integers(0, 256, tier.slot_bytes, dtype=np.uint8)
    tier.trailers[slots] = 0
    tokens = np.arange(len(slots) * SPEC.page_size)
    keys = stored_keys(salt, SPACE, page_keys(tokens, SPEC.page_size), Shard.whole(SPEC))
    headers = [RecordHeader(k, SPACE, Shard.whole(SPEC), "page_first", SPEC.page_bytes) for k in keys]
    tier.seal(slots, headers)
    return keys


@contextmanager
def disk_of(folder: Path) -> Iterator[DiskTier]:
    with DiskTier(str(folder), SPEC, namespace=SPACE, capacity_pages=200, sync="none") as disk:
        yield disk


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_disk_reads_into_the_memory_that_is_there_now(device: str, tmp_path: Path) -> None:
    """A ring that had mapped the old memory would fill that, and the slot would stay empty."""
    with ExitStack() as stack:
        tier = stack.enter_context(HostTier(SPEC, capacity_pages=12, device=device, chunk_bytes=4 * SLOT))
        disk = stack.enter_context(disk_of(tmp_path))
        register_host(tier, disk)
        slots = np.arange(12)
        keys = sealed(tier, slots, b"a")
        wanted = [content(tier, slot) for slot in slots.tolist()]
        assert disk.put_from(keys, [tier.record(slot) for slot in slots.tolist()]).result(30).all_ok
        for size in (3, 12, 5, 9, 12):
            resize_host(tier, size, [disk])
            use = np.arange(size)
            rows(tier)[use] = 0
            tier.trailers[use] = 0
            read = disk.get_into(keys[:size], [tier.record(slot) for slot in use.tolist()]).result(30)
            assert read.all_ok
            for slot in use.tolist():
                got, page = content(tier, slot), SPEC.page_bytes
                assert got[:page] == wanted[slot][:page] and got[SLOT:] == wanted[slot][SLOT:]
        unregister_host(tier, disk)


class Refuses(MemoryTier):
    """Takes no more than ``most`` regions."""

    most = 100

    def do_register(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if len(self.registered.regions()) > self.most:
            raise TierError("no more regions")


def test_every_tier_knows_what_is_there_whatever_fails() -> None:
    with host(12) as tier, Refuses(1 << 30) as first, Refuses(1 << 30, name="second") as second:
        for each in (first, second):
            register_host(tier, each)

        def known(each: WorkerTier) -> int:
            return sum(memory.size for memory in each.registered.regions())

        whole = 12 * (SLOT + TRAILER)
        assert known(first) == known(second) == whole
        kept = tier.allocate(12)
        with pytest.raises(OwnershipError, match="are free"):
            resize_host(tier, 3, [first, second])
        assert known(first) == known(second) == whole
        tier.free(kept)
        resize_host(tier, 3, [first, second])
        assert known(first) == known(second) == 3 * SLOT + 9 * TRAILER
        second.most = 3
        with pytest.raises(TierError, match="no more regions"):
            resize_host(tier, 12, [first, second])
        assert known(first) == known(second) == 3 * SLOT + 9 * TRAILER and tier.ready_slots == 3
        second.most = 100
        resize_host(tier, 12, [first, second])
        assert known(first) == known(second) == whole
        unregister_host(tier, first)
        with pytest.raises(ConfigError, match="unregister: expected memory that is registered"):
            resize_host(tier, 3, [second, first])
        assert known(second) == whole and tier.ready_slots == 12


# --- with a directory


class Carrier:
    """Carries out a directory's commands with a real host tier. The device is a dictionary of pages."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.device: dict[int, bytes] = {}

    def one(self, command: Command) -> None:
        tier = self.tier
        if isinstance(command, Store):
            for page, slot in zip(ids(command.pages).tolist(), ids(command.slots).tolist(), strict=True):
                record = tier.record(slot)
                record.payload[:] = np.frombuffer(self.device[page], np.uint8)
                record.trailer[:] = record.payload[:TRAILER]
        elif isinstance(command, Load):
            for page, slot in zip(ids(command.pages).tolist(), ids(command.slots).tolist(), strict=True):
                record = tier.record(slot)
                assert (record.trailer == record.payload[:TRAILER]).all()
                self.device[page] = record.payload.tobytes()
        elif isinstance(command, Relocate):
            tier.copy(ids(command.read), ids(command.slots))
        elif isinstance(command, Resize):
            resize_host(tier, command.capacity_pages)

    def run(self, directory: Directory, rng: np.random.Generator, most: int) -> None:
        """Everything that there is to do, in any order, ``most`` commands a time."""
        todo: list[Command] = []
        while todo := [*todo, *directory.commands()]:
            order = rng.permutation(len(todo))[:most].tolist()
            for at in order:
                command = decode(encode(todo[at]))
                assert not isinstance(command, Ack | Cancel)
                self.one(command)
                directory.acknowledge(Ack.of(command, PageStatus.OK))
            todo = [command for at, command in enumerate(todo) if at not in order]


def bytes_of(prefix: list[int]) -> bytes:
    """The page that a prefix ends in."""
    return np.random.default_rng(prefix).integers(0, 256, SLOT, dtype=np.uint8).tobytes()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_directory_and_its_memory_shrink_and_grow_together(seed: int, sizes: list[int]) -> None:
    """Every page that is hit holds its own bytes, whatever the size has been meanwhile."""
    rng = np.random.default_rng(seed)
    with host(20, most_pages=40) as tier:
        directory = Directory(1, [TierPlan("host", capacity_pages=20, most_pages=40)])
        carrier, page = Carrier(tier), 0
        for size in [20, *sizes]:
            job = directory.resize("host", size)
            for _ in range(6):
                tokens = [int(rng.integers(3)) for _ in range(int(rng.integers(1, 9)))]
                with directory.match(tokens, Scope()) as hit:
                    load = directory.load(hit, list(range(page, page + hit.pages)))
                    carrier.run(directory, rng, 2)
                    assert load.usable_pages == hit.pages
                for n in range(hit.pages):
                    assert carrier.device[page + n] == bytes_of(tokens[: n + 1])
                page += hit.pages
                carrier.device |= {page + n: bytes_of(tokens[: n + 1]) for n in range(len(tokens))}
                directory.store(tokens, list(range(page, page + len(tokens))))
                page += len(tokens)
                carrier.run(directory, rng, 1)
            directory.tick()
            carrier.run(directory, rng, 3)
            assert job.statuses == [PageStatus.OK] and tier.ready_slots == size
            assert directory.figures().tiers["host"].used_pages <= size


def test_what_stays_beside_a_failure_is_told() -> None:
    """A system that does not take memory back is no error: the tier is smaller, and says so."""

    class Told(Observer):
        why = ""

        def fell_back(self, what: str, why: str) -> None:
            self.why += f"{what}: {why}" if what == "give_back" else ""

    class Stubborn:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    told = Told()
    with host(6, observer=told) as tier:
        real, mapping = tier._slab._mapping._map, tier._slab._mapping
        mapping._map = Stubborn()  # type: ignore[assignment]
        tier.resize(3)
        assert tier.ready_slots == 3 and told.why.startswith(f"give_back: {3 * SLOT} bytes of a slab stay")
        mapping._map = real
