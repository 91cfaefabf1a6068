"""Records checked by C: the same verdicts as Python's, for any lengths, wherever a bit is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kernel_helpers import fresh_generator

import kvtransfer.tiers.record_native as record_native
from kvtransfer.kernels.native import build, once
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.bounce import Bounce
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import BLOCK_BYTES, RecordHeader, padded_bytes, payload_checksum
from kvtransfer.tiers.record_native import RecordTools, record_tools
from kvtransfer.tiers.sealed import errors_of, sealed_or_error, whole_or_error

SOURCE = Path(record_native.__file__).with_name("records.c")
SHARD = Shard(0, 1)
SHORTEST = 241


@pytest.fixture(params=["as it is", "any processor"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> RecordTools:
    """What this machine's processor can do, and what any can."""
    if request.param == "any processor":
        source = tmp_path / "records.c"
        source.write_text(SOURCE.read_text().replace("defined(__x86_64__)", "0"))
        return RecordTools(build(source, tmp_path))
    found = record_tools()
    assert found is not None, "this machine has a compiler"
    return found


def sealed(rng: np.random.Generator, payload_bytes: int, trailer_blocks: int = 1) -> tuple[bytes, RecordBuffer]:
    """A record of random bytes, its memory at an odd address."""
    payload = np.frombuffer(bytearray(rng.bytes(padded_bytes(payload_bytes) + 1)), np.uint8)[1:]
    trailer = np.frombuffer(bytearray(trailer_blocks * BLOCK_BYTES + 1), np.uint8)[1:]
    key = rng.bytes(32)
    checksum = payload_checksum(payload[:payload_bytes])
    header = RecordHeader(
        key, rng.bytes(32), SHARD, "page_first", payload_bytes, tokens=rng.bytes(64), payload_xxh3=checksum
    )
    header.encode_into(trailer)
    return key, RecordBuffer(payload, trailer)


def one(
    tools: RecordTools,
    key: bytes,
    buffer: RecordBuffer,
    *,
    whole: bool = True,
    payload_bytes: int = 0,
    trailer_bytes: int = 0,
) -> bool:
    parts = Parts.of([buffer])
    return tools.good([key], parts, whole=whole, payload_bytes=payload_bytes, trailer_bytes=trailer_bytes) == b"\1"


def test_any_length(tools: RecordTools) -> None:
    rng = fresh_generator()
    lengths = [SHORTEST, 255, 256, 257, 1023, 1024, 1025, 1088, 4095, 4096, 4097, 65536, 1 << 20]
    for length in [*lengths, *rng.integers(SHORTEST, 20000, 200).tolist()]:
        key, buffer = sealed(rng, length, int(rng.integers(1, 17)))
        assert one(tools, key, buffer) and one(tools, key, buffer, whole=False), length
        at = int(rng.integers(length))
        buffer.payload[at] ^= 1 << rng.integers(8)
        assert not one(tools, key, buffer) and one(tools, key, buffer, whole=False), (length, at)


def test_what_c_does_not_take_is_left_to_python(tools: RecordTools) -> None:
    rng = fresh_generator()
    for length, blocks in ((1, 1), (SHORTEST - 1, 1), (5000, 17)):
        key, buffer = sealed(rng, length, blocks)
        assert not one(tools, key, buffer) and errors_of([key], [buffer], whole=True) == [None]


def test_every_flipped_bit_is_found(tools: RecordTools) -> None:
    rng = fresh_generator()
    key, buffer = sealed(rng, 12060)
    for at in [*range(280), *range(280, BLOCK_BYTES, 97), BLOCK_BYTES - 1]:
        buffer.trailer[at] ^= 1 << (at % 8)
        for whole, single in ((False, sealed_or_error), (True, whole_or_error)):
            assert not one(tools, key, buffer, whole=whole)
            assert str(errors_of([key], [buffer], whole=whole)[0]) == str(single(key, buffer)) != "None"
        buffer.trailer[at] ^= 1 << (at % 8)
    assert one(tools, key, buffer)
    buffer.payload[12060:] ^= 1  # padding is of no page
    assert one(tools, key, buffer)


def test_another_key_or_length_than_asked(tools: RecordTools) -> None:
    rng = fresh_generator()
    key, buffer = sealed(rng, 12060, 2)
    assert one(tools, key, buffer, payload_bytes=12060, trailer_bytes=8192)
    assert not one(tools, rng.bytes(32), buffer)
    assert not one(tools, key, buffer, payload_bytes=12061) and not one(tools, key, buffer, trailer_bytes=4096)
    longer = RecordBuffer(np.concatenate((buffer.payload, buffer.payload[:4096])), buffer.trailer)
    assert not one(tools, key, longer) and not one(tools, key, RecordBuffer(buffer.payload[:8192], buffer.trailer))


@pytest.mark.parametrize("gives_lock", [True, False])
def test_many_at_once_each_for_itself(tools: RecordTools, gives_lock: bool) -> None:
    rng = fresh_generator()
    records = [sealed(rng, int(rng.integers(SHORTEST, 90_000))) for _ in range(100)]
    bad = set(rng.permutation(100)[:30].tolist())
    for at in bad:
        records[at][1].payload[0] ^= 1
    keys, buffers = [key for key, _ in records], [buffer for _, buffer in records]
    parts = Parts.of(buffers)
    good = tools.good(keys, parts, whole=True, gives_lock=gives_lock)
    assert [bool(g) for g in good] == [at not in bad for at in range(100)]
    assert [error is not None for error in errors_of(keys, buffers, whole=True)] == [at in bad for at in range(100)]
    some = [7, 3, 99, 50]
    assert list(tools.good([keys[i] for i in some], parts.only(some), whole=True)) == [i not in bad for i in some]
    assert tools.good([], Parts.of([]), whole=True) == b""


def test_parts_of_memory_that_may_not_be_written() -> None:
    rng = fresh_generator()
    key, buffer = sealed(rng, 5000)
    before = Parts.of([buffer])
    for part in buffer:
        part.flags.writeable = False
    after = Parts.of([buffer])
    assert (before.where == after.where).all() and (before.sizes == after.sizes).all()
    assert errors_of([key], [buffer], whole=True) == [None]
    with pytest.raises(IndexError, match="expected records 1 to 1, got 1"):
        after.addresses(1, 1)
    assert after.only([]).where.shape == (0, 2)


def test_parts_of_some_records_in_any_order() -> None:
    rng = fresh_generator()
    parts = Parts(*(rng.integers(0, 1 << 63, (100, 2)).astype(np.uint64) for _ in range(2)))
    for places in ([], [99], range(3, 50), range(100), rng.permutation(100)[:37].tolist(), [5, 5, 4], [*range(9), 8]):
        some = parts.only(places)
        assert (some.where == parts.where[list(places)]).all() and (some.sizes == parts.sizes[list(places)]).all()
        assert some.where.shape == some.sizes.shape == (len(places), 2)
        some.addresses(0, len(places))
    for outside in ([3, 100], [4, -1], [4, -2], [-1], [100], range(98, 101), [-2, -1], [-1, 0]):
        with pytest.raises(IndexError, match="expected records 0 to 99"):
            parts.only(outside)


def test_records_there_and_back_as_one_piece(tools: RecordTools) -> None:
    """Packed one behind the other; back in their places in any order, checked there, and nothing beside them."""
    rng = fresh_generator()
    records = [sealed(rng, 5000) for _ in range(9)]
    keys, buffers = [key for key, _ in records], [buffer for _, buffer in records]
    each = 8192 + BLOCK_BYTES
    bounce = Bounce(10 * each, tools)
    bounce.memory[:] = 7
    places = bounce.pack(Parts.of(buffers), each)
    images = [buffer.payload.tobytes() + buffer.trailer.tobytes() for buffer in buffers]
    assert bounce.memory.tobytes() == b"".join(images) + bytes([7] * each)
    assert places == bounce.places(9, each) and bounce.fits(each) == 10
    with pytest.raises(ValueError, match="at most 10 records"):
        bounce.places(11, each)
    bounce.memory[3 * each + 4999] ^= 1
    order = rng.permutation(9).tolist()
    memory = rng.integers(0, 256, (9, 2 * each), dtype=np.uint8)
    kept = memory.copy()
    targets = [RecordBuffer(row[100 : 100 + 8192], row[9000 : 9000 + BLOCK_BYTES]) for row in memory]
    good = bounce.unpack([places[i] for i in order], [keys[i] for i in order], Parts.of(targets))
    assert list(good) == [i != 3 for i in order]
    for i, target in zip(order, targets, strict=True):
        if i != 3:
            assert target.payload.tobytes() + target.trailer.tobytes() == images[i]
        target.payload[:], target.trailer[:] = 0, 0
    kept[:, 100 : 100 + 8192], kept[:, 9000 : 9000 + BLOCK_BYTES] = 0, 0
    assert (memory == kept).all()
    assert bounce.unpack([], [], Parts.of([])) == b""


def test_without_a_compiler_python_does_it(tmp_path: Path) -> None:
    code = (
        "from kvtransfer.tiers.record_native import record_tools\n"
        "from kvtransfer.tiers.resp_native import native_wire\n"
        "import sys; sys.exit(not (record_tools() is None and native_wire() is None))"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path), "PATH": "/nowhere"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_errors_without_a_compiler_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = fresh_generator()
    records = [sealed(rng, 5000) for _ in range(5)]
    records[2][1].payload[17] ^= 4
    keys, buffers = [key for key, _ in records], [buffer for _, buffer in records]
    by_c = [str(error) for error in errors_of(keys, buffers, whole=True)]
    monkeypatch.setattr("kvtransfer.tiers.sealed.record_tools", lambda: None)
    assert [str(error) for error in errors_of(keys, buffers, whole=True)] == by_c
    assert by_c[2].startswith("payload checksum") and by_c.count("None") == 4


@pytest.mark.parametrize("order", [[1, 0], [2, 0, 1], [1, 2], [0, 0, 0], []])
def test_verdicts_follow_the_order_that_was_asked_for(order: list[int]) -> None:
    """One key for all: the verdict of a good copy must not reach a bad one."""
    rng = fresh_generator()
    key, first = sealed(rng, 8192)
    records = [first]
    for _ in range(2):
        payload = first.payload.copy()
        payload[int(rng.integers(8192))] ^= 1 << int(rng.integers(8))
        records.append(RecordBuffer(payload, first.trailer.copy()))
    bad = [False, True, True]
    some = [records[at] for at in order]
    errors = errors_of([key] * len(order), some, whole=True, parts=Parts.of(records).only(order))
    assert [error is not None for error in errors] == [bad[at] for at in order]


def test_c_is_built_once_and_whoever_asks_meanwhile_waits() -> None:
    built: list[int] = []
    begun = threading.Barrier(4)

    def make() -> int:
        built.append(0)
        time.sleep(0.05)
        return len(built)

    get = once(make)

    def ask() -> int:
        begun.wait(10)
        return get()

    with ThreadPoolExecutor(4) as threads:
        assert [f.result(10) for f in [threads.submit(ask) for _ in range(4)]] == [1, 1, 1, 1]
    assert get() == 1 == len(built)


@pytest.mark.parametrize("make", ["RedisTier('redis://127.0.0.1:9', prefix='t').close()", "DiskTier"])
def test_tiers_build_before_their_first_page(tmp_path: Path, make: str) -> None:
    """A build takes seconds; a worker's call has a limit, and what passes it counts as a server that is down."""
    if make == "DiskTier":
        make = f"DiskTier({str(tmp_path / 'disk')!r}, KVSpec.attention(1, 8, 1, 16, 2), namespace=bytes(32),"
        make += " capacity_bytes=1 << 24).close()"
    code = (
        "import os, pathlib, threading\n"
        "import kvtransfer.kernels.native as native\n"
        "real, seen = native.subprocess.run, []\n"
        "def run(*a, **k):\n"
        "    seen.append(threading.current_thread() is threading.main_thread())\n"
        "    return real(*a, **k)\n"
        "native.subprocess.run = run\n"
        "from kvtransfer.kernels.spec import KVSpec\n"
        "from kvtransfer.tiers.disk import DiskTier\n"
        "from kvtransfer.tiers.redis import RedisTier\n"
        f"{make}\n"
        "assert seen and all(seen), seen\n"
        "from kvtransfer.tiers.record_native import record_tools\n"
        "count = len(seen); assert record_tools() is not None and len(seen) == count\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
