"""A slab's memory: chunks, pinning against a fake runtime, growing behind one's back, sharing, first touch."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import until
from host_helpers import FakeRuntime, smaps
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.kernels.errors import CapacityError, ConfigError, CudaError, RecordError, TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers import memory
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.memory import Mapping, parse_cpulist, pci_numa_node
from kvtransfer.tiers.pinning import CudaRegistrar, _loaded_library, plan_chunks
from kvtransfer.tiers.record import RecordHeader
from kvtransfer.tiers.sizing import Budget, MemoryLimits

SPEC = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)  # slots of 12,288 bytes
SLOT, TRAILER = 12_288, 4096
ROOT = Path(__file__).resolve().parent.parent


def host(count: int, **more: Any) -> HostTier:
    return HostTier(SPEC, capacity_pages=count, **more)


@given(
    slots=st.integers(1, 300),
    stride=st.sampled_from([4096, 12_288, 1 << 20, 65_536, 8192 * 5]),
    chunk=st.integers(4096, 1 << 23),
    align=st.sampled_from([4096, 16_384, 65_536]),
)
def test_chunks_end_between_slots(slots: int, stride: int, chunk: int, align: int) -> None:
    offset = 3 * align
    rows = align // np.gcd(stride, align)
    if chunk < rows * stride:
        with pytest.raises(ConfigError, match=f"expected at least {rows * stride} .* got {chunk}"):
            plan_chunks(slots, stride, chunk, offset=offset, align_bytes=align)
        return
    chunks = plan_chunks(slots, stride, chunk, offset=offset, align_bytes=align)
    assert sum(c.nbytes for c in chunks) == slots * stride
    assert chunks[0].offset == offset and chunks[0].first == 0 and chunks[-1].stop == slots
    for c in chunks:
        assert c.nbytes == (c.stop - c.first) * stride and c.offset == offset + c.first * stride
        assert c.offset % align == 0 and c.nbytes <= max(chunk, rows * stride)
    for a, b in itertools.pairwise(chunks):
        assert a.stop == b.first and a.offset + a.nbytes == b.offset
        assert a.nbytes + rows * stride > chunk  # as long as the limit allows


def test_half_a_terabyte_in_64_gib_chunks() -> None:
    chunks = plan_chunks(180_001, 3 << 20, 64 << 30)
    assert [c.first for c in chunks] == [n * 21_845 for n in range(9)]
    assert max(c.nbytes for c in chunks) == 21_845 * (3 << 20) <= 64 << 30
    for bad in ((0, 4096, 4096), (1, 0, 4096)):
        with pytest.raises(ConfigError, match="expected at least one slot"):
            plan_chunks(*bad)
    with pytest.raises(ConfigError, match="offset"):
        plan_chunks(1, 4096, 4096, offset=1)


def test_registered_in_chunks_and_released_in_reverse() -> None:
    runtime = FakeRuntime()
    tier = host(7, registrar=runtime, chunk_bytes=3 * SLOT + 100)
    assert tier.pinned and tier.pin_reason == "registered with FakeRuntime"
    start, trailers = tier.address, tier.address + 7 * SLOT
    assert runtime.calls == [
        ("register", trailers, 7 * TRAILER),
        ("register", start, 3 * SLOT),
        ("register", start + 3 * SLOT, 3 * SLOT),
        ("register", start + 6 * SLOT, SLOT),
    ]
    assert tier.chunk_slots.tolist() == [3, 6] and tier.trailer_chunk_slots.tolist() == []
    tier.close()
    assert runtime.calls[4:] == [("unregister", a, n) for _, a, n in reversed(runtime.calls[:4])]
    tier.close()
    assert len(runtime.calls) == 8


@pytest.mark.parametrize("k", range(4))
def test_failure_at_chunk_k_undoes_the_others_in_reverse(k: int) -> None:
    runtime = FakeRuntime(fail_at=k)
    with pytest.raises(CudaError, match=f"host: pinning chunk {k + 1} of 4 .*out of memory") as caught:
        host(7, registrar=runtime, chunk_bytes=3 * SLOT)
    assert caught.value.code == 2
    assert not runtime.live
    assert [c[0] for c in runtime.calls] == ["register"] * k + ["unregister"] * k
    assert [c[1] for c in runtime.calls[k:]] == [c[1] for c in reversed(runtime.calls[:k])]


def test_a_failed_unregister_does_not_stop_the_others() -> None:
    runtime = FakeRuntime()
    runtime.fail_unregister = {2}
    tier = host(7, registrar=runtime, chunk_bytes=3 * SLOT)
    with pytest.raises(CudaError, match="error 713"):
        tier.close()
    assert not runtime.live and len(runtime.calls) == 8
    tier.close()


def test_a_dropped_tier_is_unregistered() -> None:
    runtime = FakeRuntime()
    tier = host(2, registrar=runtime)
    view = tier.payload
    del tier
    gc.collect()
    assert not runtime.live
    view.fill_(1)  # still mapped


def test_a_slot_longer_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"chunk_bytes: expected at least {SLOT} .*got {SLOT - 1}"):
        host(1, registrar=FakeRuntime(), chunk_bytes=SLOT - 1)


def test_pin_false_leaves_the_registrar_alone() -> None:
    runtime = FakeRuntime()
    with host(1, registrar=runtime, pin=False) as tier:
        assert not tier.pinned
    assert not runtime.calls


def test_device_shift() -> None:
    for shifts, expected in [((0,), 0), ((1 << 40,), 1 << 40)]:
        with host(4, registrar=FakeRuntime(shifts=shifts), chunk_bytes=2 * SLOT) as tier:
            assert tier.device_shift() == tier.device_shift("cuda:0") == expected
            assert tier.device_shift("cpu") == 0
    with (
        host(4, registrar=FakeRuntime(shifts=(0, 4096)), chunk_bytes=2 * SLOT) as tier,
        pytest.raises(CudaError, match=r"one shift, got \[0, 4096\]"),
    ):
        tier.device_shift()


def test_cuda_calls_are_checked_and_their_errors_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ctypes side of `CudaRegistrar`, against a library that records what it is given."""

    class Library:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []
            self.code = 0

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                self.calls.append((name, *(getattr(a, "value", a) for a in arguments)))
                if name == "cudaGetErrorString":
                    return b"already registered"
                if name == "cudaHostGetDevicePointer":
                    arguments[0]._obj.value = 1 << 45
                return self.code

            return call

    library = Library()
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    registrar = CudaRegistrar.__new__(CudaRegistrar)
    registrar.device, registrar._runtime = torch.device("cuda:0"), library  # type: ignore[assignment]
    registrar.register(1 << 46, 5 << 32)
    registrar.unregister(1 << 46)
    assert registrar.device_address(1 << 46) == 1 << 45
    assert library.calls[:2] == [("cudaHostRegister", 1 << 46, 5 << 32, 3), ("cudaHostUnregister", 1 << 46)]
    library.calls.clear()
    library.code = 712
    with pytest.raises(
        CudaError, match=r"cudaHostRegister\(0x1000, 4096 bytes\): .* 712: already registered"
    ) as caught:
        registrar.register(4096, 4096)
    assert caught.value.code == 712
    assert [name for name, *_ in library.calls] == ["cudaHostRegister", "cudaGetLastError", "cudaGetErrorString"]


def test_finding_a_loaded_library() -> None:
    assert "/libc.so" in _loaded_library("libc.so")
    with pytest.raises(ConfigError, match=r"expected libnothing\.so among the loaded libraries"):
        _loaded_library("libnothing.so")


def test_memlock_counts_where_the_registrar_says_so() -> None:
    limits = MemoryLimits((Budget("memory", 1 << 40),), memlock_bytes=64 << 10)
    runtime = FakeRuntime()
    with host(5, registrar=runtime, limits=limits):
        pass
    runtime.needs_memlock = True
    with pytest.raises(CapacityError, match=r"RLIMIT_MEMLOCK .*64\.00 KiB per rank \(4 slots\)"):
        host(5, registrar=runtime, limits=limits)
    with host(4, registrar=runtime, limits=limits), host(5, registrar=runtime, limits=limits, pin=False):
        pass


def test_background_growth_is_usable_meanwhile() -> None:
    gate = threading.Event()
    tier = host(7, registrar=FakeRuntime(gate=gate), chunk_bytes=3 * SLOT, background=True)
    assert tier.wait_ready(10, slots=3) and tier.ready_slots == 3
    assert not tier.wait_ready(0.02)
    assert tier.allocate(3).tolist() == [0, 1, 2]
    with pytest.raises(CapacityError, match="got 0 of 3, 4 more not ready yet"):
        tier.allocate(1)
    gate.set()
    assert tier.wait_ready(10) and tier.ready_slots == 7
    assert tier.allocate(4).tolist() == [3, 4, 5, 6]
    tier.close()


def test_in_the_background_no_slot_waits_for_the_trailers_of_others() -> None:
    """A slab of small pages has as many bytes of trailers as of payloads: they grow side by side."""
    runtime = FakeRuntime()
    tier = host(30, registrar=runtime, chunk_bytes=7 * SLOT, background=True)
    assert tier.wait_ready(10)
    trailers = tier.address + 30 * SLOT
    starts = [(address, nbytes) for _, address, nbytes in runtime.calls]
    wanted = []
    for first in range(0, 30, 7):
        count = min(7, 30 - first)
        wanted += [(trailers + first * TRAILER, count * TRAILER), (tier.address + first * SLOT, count * SLOT)]
    assert starts == wanted
    assert tier.chunk_slots.tolist() == tier.trailer_chunk_slots.tolist() == [7, 14, 21, 28]
    assert tier.trailers.shape == (30, TRAILER) and not tier.trailers.any()
    tier.close()
    assert not runtime.live


@pytest.mark.parametrize("k", range(6))
def test_background_failure_is_raised_by_the_next_calls(k: int) -> None:
    runtime = FakeRuntime(fail_at=k)
    tier = host(7, registrar=runtime, chunk_bytes=3 * SLOT, background=True)
    ready = k // 2 * 3  # trailers, payload, trailers ...
    for _ in range(2):
        with pytest.raises(TierError, match=f"host: growing stopped at {ready} of 7 slots: .*out of memory"):
            tier.wait_ready(10)
        with pytest.raises(TierError, match="growing stopped") as caught:
            tier.allocate(0)
        assert isinstance(caught.value.__cause__, CudaError)
    if ready:
        tier.record(0)
    tier.close()
    assert not runtime.live


def test_background_failure_that_nobody_saw_is_raised_by_close() -> None:
    runtime = FakeRuntime(fail_at=1)
    tier = host(7, registrar=runtime, chunk_bytes=3 * SLOT, background=True)
    assert tier._slab._thread is not None
    tier._slab._thread.join()
    with pytest.raises(TierError, match="growing stopped"):
        tier.close()
    assert not runtime.live
    tier.close()


def test_close_stops_growth() -> None:
    gate = threading.Event()
    runtime = FakeRuntime(gate=gate, gate_at=4)  # two slots and their trailers
    tier = host(30, registrar=runtime, chunk_bytes=SLOT, background=True)
    assert tier.wait_ready(10, slots=2)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while not tier._slab._stop:
        time.sleep(0.001)
    gate.set()
    closer.join(10)
    assert not closer.is_alive() and not runtime.live
    assert runtime.count <= 6
    with pytest.raises(TierError, match="closed while waiting"):
        tier.wait_ready(1)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_exact_touched_and_not_inherited(shared: bool) -> None:
    with host(64, shared=shared, pin=False) as tier:
        facts = smaps(tier.address)
        nbytes = 64 * (SLOT + TRAILER)
        assert "dc" in facts["VmFlags"].split()  # MADV_DONTFORK
        assert int(facts["Rss"].split()[0]) * 1024 >= nbytes
        if shared:
            assert int(facts["bytes"]) == nbytes == os.fstat(tier.fd).st_size
        else:
            assert "hg" in facts["VmFlags"].split()  # MADV_HUGEPAGE
            with pytest.raises(ConfigError, match="shared=True"):
                _ = tier.fd
        address = tier.address
    assert not smaps(address)


def test_many_threads_touch_and_keep_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_TOUCH_BYTES", 8192)
    mapping = Mapping(40_960)
    assert mapping.bytes is not None
    mapping.bytes[5000] = 7
    mapping.populate(4096, 36_864, threads=3, node=0, observer=NO_OBSERVER)
    assert mapping.bytes[5000] == 7 and mapping.bytes.sum() == 7
    assert mapping.close()


def test_kernels_without_populate_write_clear_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    mapping = Mapping(40_960, huge=False)
    mapping.populate(0, 40_960, threads=2, node=None, observer=NO_OBSERVER)
    assert mapping.bytes is not None and not mapping.bytes.any()
    assert int(smaps(mapping.address)["Rss"].split()[0]) >= 40
    assert mapping.close()


def test_memory_that_runs_out_is_a_capacity_error() -> None:
    mapping = Mapping(8192)
    address = mapping.address
    assert mapping.close()
    with pytest.raises(CapacityError, match="expected 8192 bytes of memory"):
        memory._touch(address, 8192)


def test_a_node_that_is_not_there_is_told_and_done_without() -> None:
    class Told(Observer):
        def __init__(self) -> None:
            self.what: list[str] = []

        def fell_back(self, what: str, why: str) -> None:
            self.what.append(why)

    told, mapping = Told(), Mapping(8192)
    mapping.populate(0, 8192, threads=1, node=1000, observer=told)
    assert any("mbind to node 1000" in why for why in told.what)
    assert any("the CPUs of node 1000" in why for why in told.what)
    assert mapping.close()


def test_numa_facts(tmp_path: Path) -> None:
    assert parse_cpulist("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpulist("\n") == set()
    for address, text in [("0000:3b:00.0", "1\n"), ("0000:5e:00.0", "-1\n"), ("0000:5f:00.0", "x")]:
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert pci_numa_node("0000:3B:00.0", tmp_path) == 1
    assert pci_numa_node("0000:5e:00.0", tmp_path) is None
    assert pci_numa_node("0000:5f:00.0", tmp_path) is None
    assert pci_numa_node("0000:ff:00.0", tmp_path) is None


def test_reserved_huge_pages_come_from_their_pool_alone() -> None:
    none = MemoryLimits((Budget("memory", 1 << 40),), Budget("reserved huge pages", 0))
    with pytest.raises(CapacityError, match="reserved huge pages leaves 0 B"):
        host(4, huge_pages="reserved", limits=none)
    claimed = MemoryLimits((), Budget("reserved huge pages", 1 << 50))
    with pytest.raises(CapacityError, match="bytes of reserved huge pages, got"):
        host(1 << 24, huge_pages="reserved", limits=claimed)


ATTACH = """
import sys
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier
spec = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)
tier = HostTier.attach(int(sys.argv[1]), spec, num_slots=5, pin=False)
assert tier.ready_slots == 5
header = tier.verify(2)
tier.payload[4 * tier.slot_bytes :] = int(tier.payload[2 * tier.slot_bytes]) + 1
tier.seal([4], [header])
print("ready", flush=True)
sys.stdin.readline()
tier.close()
"""


def spawn(script: str, *arguments: object, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_two_processes_share_one_slab() -> None:
    with host(5, shared=True, pin=False) as tier:
        tier.payload.fill_(0)
        tier.payload[2 * SLOT : 3 * SLOT] = 41
        header = sample_header()
        tier.seal([2], [header])
        child = spawn(ATTACH, tier.fd, fds=(tier.fd,))
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert tier.payload[4 * SLOT :].eq(42).all()
        with pytest.raises(RecordError, match="payload checksum"):
            tier.verify(4)  # sealed with the checksum of slot 2
        assert tier.header(4).stored_key == header.stored_key
        child.communicate("\n", timeout=30)
        assert child.returncode == 0
        assert tier.verify(2).tokens == header.tokens


def sample_header() -> RecordHeader:
    return RecordHeader(b"k" * 32, b"n" * 32, Shard.whole(SPEC), "page_first", SPEC.page_bytes, tokens=b"1234" * 5)


def test_attached_slabs_do_not_give_slots_out() -> None:
    with host(5, shared=True, pin=False) as tier, HostTier.attach(tier.fd, SPEC, num_slots=5, pin=False) as other:
        tier.payload[0] = 9
        assert other.payload[0] == 9 and other.address != tier.address
        for use in (lambda: other.allocate(1), lambda: other.free([0])):
            with pytest.raises(TierError, match="belongs to the process that made the slab"):
                use()
        for count in (4, 6):
            with pytest.raises(ConfigError, match=f"expected a memfd of {count * 16_384} bytes, got 81920"):
                HostTier.attach(tier.fd, SPEC, num_slots=count, pin=False)
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(tier.fd, 4096)  # sealed: nobody can pull the memory from under another process
        fd = tier.fd
        tier.close()
        assert other.payload[0] == 9
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


KILLED = """
import os, sys, time
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier
spec = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)
tier = HostTier(spec, capacity_pages=300, shared=True, pin=False)
second = HostTier.attach(tier.fd, spec, num_slots=300, pin=False)
print("ready", flush=True)
time.sleep(60)
"""


def test_sigkill_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    for _ in range(2):  # and the next start works
        child = spawn(KILLED)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        until(lambda: set(os.listdir("/dev/shm")) <= before, "no name of its own")  # other tests' names come and go
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=30)
        assert child.returncode == -signal.SIGKILL
    until(lambda: set(os.listdir("/dev/shm")) <= before, "nothing left")
