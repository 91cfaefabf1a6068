"""Checks of many records: same verdicts as one by one, on however many threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtransfer.kernels.errors import RecordError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.quick_check import QuickCheck, Records, payload_xxh3
from kvtransfer.tiers.record import RecordHeader, padded_bytes, payload_checksum, trailer_bytes
from kvtransfer.tiers.sealed import check_whole
from kvtransfer.tiers.verifier import Verifier

LARGE = KVSpec.attention(num_layers=6, page_size=16, kv_heads=8, head_dim=101, itemsize=2)  # 310,272 bytes
SMALL = KVSpec.attention(num_layers=1, page_size=4, kv_heads=3, head_dim=67, itemsize=2)
LARGER = KVSpec.attention(num_layers=9, page_size=16, kv_heads=8, head_dim=101, itemsize=2)


def records(spec: KVSpec, count: int) -> list[tuple[bytes, RecordBuffer]]:
    rng = np.random.default_rng()
    made = []
    for _ in range(count):
        key = rng.bytes(32)
        payload = rng.integers(0, 256, padded_bytes(spec.page_bytes), dtype=np.uint8)
        trailer = np.zeros(trailer_bytes(spec), np.uint8)
        checksum = payload_checksum(payload[: spec.page_bytes])
        RecordHeader(key, bytes(32), Shard.whole(spec), "x", spec.page_bytes, payload_xxh3=checksum).encode_into(
            trailer
        )
        made.append((key, RecordBuffer(payload, trailer)))
    return made


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000, 1 << 20])
def test_the_checksum_in_pieces_is_the_checksum(size: int) -> None:
    data = np.random.default_rng().integers(0, 256, size, dtype=np.uint8)
    assert payload_xxh3(data.data) == payload_checksum(data)


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("spec", [SMALL, LARGE, LARGER], ids=["small", "large", "larger"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20])
def test_every_bad_record_is_found_in_its_place(helpers: int, spec: KVSpec, count: int) -> None:
    some = records(spec, count)
    rng = np.random.default_rng()
    bad = set(rng.permutation(count)[: count // 3].tolist())
    for at in bad:
        key, buffer = some[at]
        if at % 3 == 0:
            buffer.payload[rng.integers(spec.page_bytes)] ^= 16
        elif at % 3 == 1:
            buffer.trailer[rng.integers(buffer.trailer.size)] ^= 1
        else:
            some[at] = (bytes(32), buffer)
    verifier = Verifier("t", QuickCheck(spec.page_bytes, trailer_bytes(spec)), spec.page_bytes, helpers=helpers)
    for _ in range(3):
        found = verifier.whole(some)
        assert [error is not None for error in found] == [at in bad for at in range(count)]
    verifier.close()
    for at, (key, buffer) in enumerate(some):
        if at in bad:
            with pytest.raises(RecordError):  # the slow way says the same
                check_whole(key, buffer)
        else:
            check_whole(key, buffer)


@pytest.mark.parametrize("offset", range(0, 4096, 61))
def test_any_flipped_bit_of_a_trailer_is_found(offset: int) -> None:
    ((key, buffer),) = records(SMALL, 1)
    check = QuickCheck(SMALL.page_bytes, trailer_bytes(SMALL))
    assert check.sealed(key, buffer) is None and check.whole(key, buffer) is None
    buffer.trailer[offset] ^= 1 << (offset % 8)
    assert check.sealed(key, buffer) is not None and check.whole(key, buffer) is not None


def test_a_record_of_another_size_or_without_a_checksum_is_not_whole() -> None:
    ((key, buffer),) = records(SMALL, 1)
    assert "expected payload length 100" in str(QuickCheck(100, trailer_bytes(SMALL)).whole(key, buffer))
    header = RecordHeader(key, bytes(32), Shard.whole(SMALL), "x", SMALL.page_bytes)
    header.encode_into(buffer.trailer)
    check = QuickCheck(SMALL.page_bytes, trailer_bytes(SMALL))
    assert "payload checksum" in str(check.sealed(key, buffer))


def test_where_no_thread_can_be_had_one_checks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads; or one that is ending, whose pools take no more work."""
    some = records(LARGE, 8)
    some[5][1].payload[9] ^= 1
    for take_away in ("start", "submit"):
        verifier = Verifier("t", QuickCheck(LARGE.page_bytes, trailer_bytes(LARGE)), LARGE.page_bytes, helpers=2)
        with monkeypatch.context() as patch:

            def refuse(*_: object) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread if take_away == "start" else ThreadPoolExecutor, take_away, refuse)
            assert [error is not None for error in verifier.whole(some)] == [at == 5 for at in range(8)]
        verifier.close()


def test_where_threads_wait_one_goes_on_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier("t", QuickCheck(LARGE.page_bytes, trailer_bytes(LARGE)), LARGE.page_bytes, helpers=1)
    some = records(LARGE, 12)
    part, calls = Verifier._part, []

    def waits(self: Verifier, records: Records, parts: Parts, share: range) -> list[RecordError | None]:
        calls.append(len(share))
        time.sleep(0.02)  # as for the interpreter lock
        return part(self, records, parts, share)

    monkeypatch.setattr(Verifier, "_part", waits)
    assert verifier.whole(some) == [None] * 12
    assert sorted(calls) == [6, 6]
    for _ in range(64):
        assert verifier.whole(some) == [None] * 12
    assert len(calls) == 2
    assert verifier.whole(some) == [None] * 12
    assert len(calls) == 4, "tried again"
    verifier.close()
