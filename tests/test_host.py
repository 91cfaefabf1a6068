"""The host tier without a GPU: slots, records, ownership, sharing, and pinning against a fake runtime."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.kernels.errors import CapacityError, ConfigError, LayoutError, OwnershipError, RecordError, TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_keys, token_bytes
from kvtransfer.tiers.record import NOTHING_STORED, RecordHeader, payload_checksum
from kvtransfer.tiers.sizing import Budget, MemoryLimits

SMALL = KVSpec.attention(num_layers=3, page_size=5, kv_heads=1, head_dim=7, itemsize=1)  # 210 bytes a page
ODD = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)  # 12,060 bytes a page
LONG = KVSpec.mla(num_layers=2, page_size=1030, latent_bytes=3)  # a trailer of two blocks
SPACE = Namespace.of(SMALL, model="m", kv_dtype="uint8").digest()


class Notes(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.fallbacks: list[tuple[str, str]] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []

    def fell_back(self, what: str, why: str) -> None:
        self.fallbacks.append((what, why))

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append((what, fields))


def headers(spec: KVSpec, count: int, **more: Any) -> list[RecordHeader]:
    tokens = np.arange(count * spec.page_size)
    keys = stored_keys(b"salt", SPACE, page_keys(tokens, spec.page_size), Shard.whole(spec))
    return [
        RecordHeader(
            key,
            SPACE,
            Shard.whole(spec),
            "page_first",
            spec.page_bytes,
            tokens=bytes(token_bytes(tokens[i * spec.page_size : (i + 1) * spec.page_size])),
            sequence=i,
            **more,
        )
        for i, key in enumerate(keys)
    ]


@pytest.mark.parametrize("spec", [SMALL, ODD, LONG], ids=["small", "odd", "long"])
@pytest.mark.parametrize("count", [1, 7])
def test_two_regions_in_one_mapping(spec: KVSpec, count: int) -> None:
    with HostTier(spec, capacity_pages=count, pin=False) as host:
        assert (host.num_slots, host.ready_slots, host.free_slots) == (count, count, count)
        assert host.slot_bytes == {210: 4096, 12_060: 12_288, 6180: 8192}[spec.page_bytes]
        assert host.trailer_bytes == (8192 if spec is LONG else 4096)
        assert host.payload.shape == (count * host.slot_bytes,) and host.payload.dtype == torch.uint8
        assert host.payload.data_ptr() == host.address and host.address % 4096 == 0
        assert host.trailers.shape == (count, host.trailer_bytes)
        assert host.trailers.ctypes.data == host.address + count * host.slot_bytes
        assert host.digests.shape == (count, spec.num_layers) and host.digests.dtype == np.uint64
        assert host.digests.ctypes.data == host.trailers.ctypes.data + 256
        assert host.layout == Layout.page_first(spec, count, page_stride_bytes=host.slot_bytes)
        assert not host.payload.any() and not host.trailers.any()
        host.digests[-1, -1] = 2**64 - 1
        assert host.trailers.sum() == 8 * 255 and not host.payload.any()
        host.digests[-1, -1] = 0
        host.payload.fill_(255)
        assert not host.trailers.any()


def test_records_are_views_of_their_slot() -> None:
    with HostTier(ODD, capacity_pages=3, pin=False) as host:
        for slot in range(3):
            record = host.record(slot)
            record.payload[:] = slot + 1
            record.trailer[:] = slot + 101
        assert host.payload.view(3, -1).unique(dim=1).flatten().tolist() == [1, 2, 3]
        assert np.unique(host.trailers, axis=1).flatten().tolist() == [101, 102, 103]
        for bad in (3, -1):
            with pytest.raises(LayoutError, match=f"expected 0 to 2, got {bad}"):
                host.record(bad)


@pytest.mark.parametrize(
    ("nbytes", "slots"), [(8192, 1), (8191 * 2, 1), (5 * 8192, 5), (5 * 8192 + 8191, 5), (33 * 8192, 33)]
)
def test_sizes_are_exact(nbytes: int, slots: int) -> None:
    """Never rounded to a power of two."""
    with HostTier(SMALL, capacity_bytes=nbytes, pin=False) as host:
        assert host.num_slots == slots
        assert host._slab._mapping.nbytes == slots * 8192


def test_what_is_left_is_taken_when_nothing_is_asked() -> None:
    limits = MemoryLimits((Budget("memory", 10 * 8192), Budget("cgroup", 5 * 8192)))
    notes = Notes()
    with HostTier(SMALL, pin=False, limits=limits, observer=notes) as host:
        assert host.num_slots == 4  # a tenth stays in reserve
    assert notes.notes[0][0] == "host.size" and "limited by cgroup" in notes.notes[0][1]["message"]


def test_too_big_is_refused_before_anything_is_mapped() -> None:
    limits = MemoryLimits((Budget("memory", 1 << 20),))
    with pytest.raises(CapacityError, match=r"wanted 1\.25 MiB .* largest size that fits is"):
        HostTier(SMALL, capacity_pages=160, limits=limits)
    with pytest.raises(CapacityError, match="anonymous memory, got"):
        HostTier(SMALL, capacity_pages=1 << 35, limits=MemoryLimits((Budget("memory", 1 << 60),)))
    with pytest.raises(CapacityError, match="at least one slot"):
        HostTier(SMALL, capacity_bytes=8191)
    for wrong in ({"capacity_pages": 0}, {"capacity_pages": 1, "capacity_bytes": 9999}, {"threads": 0}):
        with pytest.raises(ConfigError, match="expected"):
            HostTier(SMALL, **wrong)  # type: ignore[arg-type]


def test_allocation_keeps_prefixes_adjacent_and_wipes_old_records() -> None:
    with HostTier(SMALL, capacity_pages=9, pin=False) as host:
        first, other = host.allocate(3), host.allocate(2)
        assert first.tolist() == [0, 1, 2] and first.dtype == np.int64 and first.flags.owndata
        host.seal(other, headers(SMALL, 2, layer_digests=(1, 2, 3)))
        host.free(torch.from_numpy(other))
        assert host.allocate(2, after=int(first[-1])).tolist() == [3, 4]
        for slot in (3, 4):
            with pytest.raises(RecordError, match="never written"):
                host.header(slot)
        assert (host.digests[:5] == NOTHING_STORED).all() and not host.digests[5:].any()
        assert host.is_allocated(range(9)).tolist() == [True] * 5 + [False] * 4
        with pytest.raises(CapacityError, match="expected 5 free host slots, got 4 of 9"):
            host.allocate(5)
        assert host.free_slots == 4 and host.fragmentation().largest_run == 4


def test_bad_frees_change_nothing() -> None:
    with HostTier(SMALL, capacity_pages=6, pin=False) as host:
        slots = host.allocate(4)
        for bad, says in [([0, 5], r"\[5\]: free already"), ([0, 0], r"distinct host slots, got \[0\]")]:
            with pytest.raises(OwnershipError, match=says):
                host.free(bad)
        for wrong in ([0, 6], [-1], [0.5], [[0]], "0"):
            with pytest.raises(LayoutError, match="host slot ids"):
                host.free(wrong)  # type: ignore[arg-type]
        assert host.free_slots == 2
        host.free(slots)
        with pytest.raises(OwnershipError, match=r"\[0, 1, 2, 3\]"):
            host.free(slots)
        host.free([])


def test_a_slot_under_a_transfer_is_not_freed() -> None:
    with HostTier(SMALL, capacity_pages=4, pin=False) as host:
        slots = host.allocate(4)
        owner = object()
        host.ledger.claim(slots[1:3], owner)
        begun = time.monotonic()
        with pytest.raises(OwnershipError, match=r"\[1, 2\] still in flight"):
            host.free(slots, wait_s=0.05)
        assert 0.05 <= time.monotonic() - begun < 5
        assert host.free_slots == 0
        host.free(slots[3:])
        threading.Timer(0.05, host.ledger.release, (owner,)).start()
        host.free(slots[:3], wait_s=10)
        assert host.free_slots == 4


def test_two_frees_at_once_free_once() -> None:
    with HostTier(SMALL, capacity_pages=2, pin=False) as host:
        slots = host.allocate(1)
        owner = object()
        host.ledger.claim(slots, owner)
        outcomes: list[str] = []

        def free() -> None:
            try:
                host.free(slots, wait_s=10)
                outcomes.append("freed")
            except OwnershipError:
                outcomes.append("refused")

        threads = [threading.Thread(target=free) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        host.ledger.release(owner)
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["freed", "refused"] and host.free_slots == 2


def test_many_threads_never_share_a_slot() -> None:
    with HostTier(SMALL, capacity_pages=64, pin=False) as host:
        owners = np.zeros(64, dtype=np.int64)
        wrong: list[int] = []

        def work(me: int) -> None:
            for _ in range(200):
                slots = host.allocate(5)
                owners[slots] = me
                time.sleep(0)
                wrong.extend(slots[owners[slots] != me].tolist())
                host.free(slots)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert host.fragmentation().free_runs == 1 and host.free_slots == 64


@pytest.mark.parametrize("spec", [SMALL, ODD, LONG], ids=["small", "odd", "long"])
def test_sealed_pages_verify_and_one_flipped_bit_is_found(spec: KVSpec) -> None:
    with HostTier(spec, capacity_pages=4, pin=False) as host:
        host.payload.random_(0, 256, generator=torch.Generator().manual_seed(1))
        slots = host.allocate(4)[::2]
        given = headers(spec, 2)
        host.seal(slots, given)
        for slot, header in zip(slots.tolist(), given, strict=True):
            page = host.record(slot).payload[: spec.page_bytes]
            assert host.verify(slot) == replace(header, payload_xxh3=payload_checksum(page))
            for at in (0, spec.page_bytes // 2, spec.page_bytes - 1):
                page[at] ^= 1
                with pytest.raises(RecordError, match="payload checksum"):
                    host.verify(slot)
                page[at] ^= 1
            host.trailers[slot, 3000] ^= 1
            with pytest.raises(RecordError, match="header checksum"):
                host.verify(slot)
            host.trailers[slot, 3000] ^= 1
            host.record(slot).payload[spec.page_bytes :] = 7  # padding is no part of the page
            host.verify(slot)
        with pytest.raises(RecordError, match="never written"):
            host.verify(1)


def test_seal_keeps_the_digests_that_a_transfer_left() -> None:
    with HostTier(SMALL, capacity_pages=3, pin=False) as host:
        slots = host.allocate(3)
        host.digests[0] = (5, 0, 2**64 - 1)
        host.digests[2] = 9
        host.seal(slots, [*headers(SMALL, 2), headers(SMALL, 1, layer_digests=(1, 2, 3))[0]])
        assert host.header(0).layer_digests == (5, 0, 2**64 - 1)
        assert host.header(1).layer_digests is None
        assert host.header(2).layer_digests == (1, 2, 3) == tuple(host.digests[2].tolist())


def test_seal_takes_the_checksum_given_or_none() -> None:
    with HostTier(SMALL, capacity_pages=2, pin=False) as host:
        host.seal([0], headers(SMALL, 1), checksum=False)
        assert host.verify(0).payload_xxh3 is None
        host.seal([1], headers(SMALL, 1, payload_xxh3=5))
        assert host.header(1).payload_xxh3 == 5
        with pytest.raises(RecordError, match="expected 0000000000000005"):
            host.verify(1)


def test_seal_refuses_before_it_writes() -> None:
    with HostTier(SMALL, capacity_pages=3, pin=False) as host:
        good, other = headers(SMALL, 2)
        for bad, says in [
            ([good], "one header a slot, got 1 for 2"),
            ([good, replace(other, payload_bytes=211)], "expected 210 payload bytes"),
            ([good, replace(other, layer_digests=(1, 2))], "3 layer digests"),
            ([good, replace(other, tokens=b"1234" * 6)], "at most 5 tokens"),
        ]:
            with pytest.raises(RecordError, match=says):
                host.seal([0, 1], bad)
        for wrong in ([0, 3], [0, 0]):
            with pytest.raises(LayoutError, match="host slot ids"):
                host.seal(wrong, [good, other])
        assert not host.trailers.any()


def test_views_that_outlive_the_tier_stay_readable() -> None:
    notes = Notes()
    host = HostTier(SMALL, capacity_pages=2, pin=False, observer=notes)
    payload, trailer = host.payload[4096:], host.record(1).trailer
    payload.fill_(3)
    host.close()
    host.close()
    assert ("host.views_alive", {"name": "host", "nbytes": 16_384}) in notes.notes
    del host
    gc.collect()
    assert payload.eq(3).all() and not trailer.any()


def test_everything_refuses_after_close() -> None:
    host = HostTier(SMALL, capacity_pages=2, pin=False)
    slots = host.allocate(1)
    host.close()
    for use in (
        lambda: host.payload,
        lambda: host.trailers,
        lambda: host.digests,
        lambda: host.record(0),
        lambda: host.header(0),
        lambda: host.seal(slots, headers(SMALL, 1)),
        lambda: host.allocate(1),
        lambda: host.free(slots),
    ):
        with pytest.raises(TierError, match="host: closed"):
            use()


def test_close_waits_for_transfers_or_refuses() -> None:
    host = HostTier(SMALL, capacity_pages=2, pin=False)
    owner = object()
    host.ledger.claim(host.allocate(1), owner)
    with pytest.raises(OwnershipError, match=r"\[0\] in flight"):
        host.close(wait_s=0.02)
    assert host.payload.numel() == 8192 and host.free_slots == 1
    threading.Timer(0.05, host.ledger.release, (owner,)).start()
    host.close(wait_s=10)
    with pytest.raises(TierError, match="closed"):
        host.allocate(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_it_works_unpinned_and_says_so() -> None:
    notes = Notes()
    with HostTier(SMALL, capacity_pages=1, observer=notes) as host:
        assert (host.pinned, host.pin_reason, host.numa_node) == (False, "there is no CUDA device", None)
        assert host.device_shift() == host.device_shift("cpu") == 0
    assert notes.fallbacks == [("pin", "host: not pinned: there is no CUDA device")]
    with HostTier(SMALL, capacity_pages=1, device="cpu") as host:
        assert (host.pinned, host.pin_reason) == (False, "the device is cpu")
    notes.fallbacks.clear()
    with HostTier(SMALL, capacity_pages=1, pin=False, observer=notes) as host:
        assert (host.pinned, host.pin_reason) == (False, "pin=False was asked for")
    assert not notes.fallbacks
    for device in (None, "cpu"):
        with pytest.raises(ConfigError, match="pin=True: expected a CUDA device"):
            HostTier(SMALL, capacity_pages=1, pin=True, device=device)
