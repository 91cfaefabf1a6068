"""The record header: golden bytes, every flipped byte found, payload checks."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtransfer.kernels.errors import RecordError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.keys import Shard, token_bytes
from kvtransfer.tiers.record import (
    DIGESTS_OFFSET,
    RecordHeader,
    decode,
    padded_bytes,
    payload_checksum,
    trailer_bytes,
    verify_payload,
)

SPEC = KVSpec.attention(num_layers=3, page_size=5, kv_heads=1, head_dim=7, itemsize=1)
PAYLOAD = bytes(range(256))[: SPEC.page_bytes]
HEADER = RecordHeader(
    stored_key=bytes(range(32)),
    namespace=bytes(range(100, 132)),
    shard=Shard(1, 4, 2, 3, 0, 1),
    layout_id="page_first",
    payload_bytes=len(PAYLOAD),
    tokens=bytes(token_bytes([7, 2**32 - 1, 0, 1, 2])),
    payload_xxh3=0x0123456789ABCDEF,
    layer_digests=(1, 2**64 - 1, 3),
    sequence=9,
)


def encoded(header: RecordHeader, nbytes: int = 4096) -> bytearray:
    buffer = bytearray(b"\xaa" * nbytes)
    header.encode_into(buffer)
    return buffer


def test_trailer_lengths() -> None:
    sizes = {(1, 1): 4096, (128, 512): 4096, (128, 704): 4096, (128, 705): 8192, (1, 1024): 8192, (3, 5): 4096}
    for (layers, tokens), expected in sizes.items():
        assert trailer_bytes(KVSpec.mla(layers, tokens, 3)) == expected
    assert [padded_bytes(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]


def test_golden_bytes() -> None:
    """The image, put together by hand."""
    image = bytearray(4096)
    image[0:32] = b"\x89KVTREC\n" + struct.pack("<6I", 1, 4096, 7, 3, 5, 10)
    image[32:96] = HEADER.stored_key + HEADER.namespace
    image[96:144] = struct.pack("<6I3Q", 1, 4, 2, 3, 0, 1, 210, 0x0123456789ABCDEF, 9)
    image[144:154] = b"page_first"
    image[256:280] = struct.pack("<3Q", 1, 2**64 - 1, 3)
    image[280:300] = struct.pack("<5I", 7, 2**32 - 1, 0, 1, 2)
    image[248:256] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(image)))
    assert encoded(HEADER) == image
    assert hashlib.sha256(image).hexdigest() == "c047a9a653061f772639c669c039f3ab8d6756e9f27487b5f7370a0f92613732"


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        replace(HEADER, tokens=None),
        replace(HEADER, tokens=b""),
        replace(HEADER, payload_xxh3=None),
        replace(HEADER, payload_xxh3=0),
        replace(HEADER, layer_digests=None),
        replace(HEADER, layer_digests=(0,), tokens=None, payload_xxh3=None, layout_id=""),
        replace(HEADER, layout_id="ß" * 32),
        replace(HEADER, sequence=2**64 - 1, payload_bytes=2**40),
    ],
)
@pytest.mark.parametrize("nbytes", [4096, 8192])
def test_round_trip(header: RecordHeader, nbytes: int) -> None:
    assert decode(encoded(header, nbytes)) == header


def test_biggest_page_of_one_block() -> None:
    spec = KVSpec.mla(128, 512, 8)
    header = replace(HEADER, layer_digests=tuple(range(1, 129)), tokens=bytes(token_bytes(range(512))))
    assert decode(encoded(header, trailer_bytes(spec))) == header


def test_token_ids() -> None:
    ids = HEADER.token_ids
    assert ids is not None and ids.tolist() == [7, 2**32 - 1, 0, 1, 2]
    assert replace(HEADER, tokens=None).token_ids is None


def test_digests_lie_at_their_fixed_offset() -> None:
    words = np.frombuffer(encoded(HEADER), dtype=np.uint64)
    assert words[DIGESTS_OFFSET // 8 :][:3].tolist() == [1, 2**64 - 1, 3]


def test_every_flipped_byte_is_found() -> None:
    """All 4,096 of them, the zero padding too."""
    good = encoded(HEADER)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        with pytest.raises(RecordError, match=r"expected .*got"):
            decode(bad)


def test_never_written_and_foreign() -> None:
    with pytest.raises(RecordError, match="never written"):
        decode(bytes(4096))
    with pytest.raises(RecordError, match=r"magic: expected 894b\w+, got aaaa"):
        decode(b"\xaa" * 4096)
    with pytest.raises(RecordError, match="multiple of 4096 bytes, got 100"):
        decode(bytes(100))
    with pytest.raises(RecordError, match="got 0"):
        decode(b"")
    with pytest.raises(RecordError, match="trailer length: expected 8192 bytes, got 4096"):
        decode(bytes(encoded(HEADER)) + bytes(4096))


def test_another_format_version_is_named() -> None:
    image = encoded(HEADER)
    image[8:12] = struct.pack("<I", 2)
    with pytest.raises(RecordError, match="format version: expected 1, got 2"):
        decode(image)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (20, struct.pack("<I", 2**20), "to fit 4096 bytes"),
        (24, struct.pack("<I", 2**32 - 1), "to fit 4096 bytes"),
        (28, struct.pack("<I", 65), "layout id"),
        (96, struct.pack("<2I", 4, 1), "valid shard"),
        (144, b"\xff\xfe", "layout id in UTF-8"),
    ],
)
def test_sound_checksum_around_nonsense(at: int, value: bytes, says: str) -> None:
    image = encoded(HEADER)
    image[at : at + len(value)] = value
    image[248:256] = bytes(8)
    image[248:256] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(image)))
    with pytest.raises(RecordError, match=says):
        decode(image)


@pytest.mark.parametrize(
    "change",
    [
        {"stored_key": b"x"},
        {"namespace": b""},
        {"layout_id": "x" * 65},
        {"tokens": b"123"},
        {"tokens": b"1234" * 1000},
        {"layer_digests": (1,) * 500},
        {"layer_digests": (2**64,)},
        {"layer_digests": (-1,)},
        {"sequence": -1},
        {"payload_bytes": 2**64},
        {"payload_xxh3": 2**64},
    ],
    ids=str,
)
def test_encode_refuses_what_does_not_fit_and_writes_nothing(change: dict[str, Any]) -> None:
    buffer = bytearray(b"\xaa" * 4096)
    with pytest.raises(RecordError, match="expected"):
        replace(HEADER, **change).encode_into(buffer)
    assert buffer == b"\xaa" * 4096
    with pytest.raises(RecordError, match="got 1000"):
        HEADER.encode_into(bytearray(1000))


def test_verify_payload() -> None:
    header = replace(HEADER, payload_xxh3=payload_checksum(PAYLOAD))
    assert header.payload_xxh3 == xxhash.xxh3_64_intdigest(PAYLOAD)
    assert verify_payload(header, PAYLOAD) is True
    assert verify_payload(header, np.frombuffer(PAYLOAD, np.uint8)) is True
    assert verify_payload(replace(header, payload_xxh3=None), PAYLOAD) is False
    with pytest.raises(RecordError, match="expected 210 bytes, got 209"):
        verify_payload(header, PAYLOAD[:-1])
    for at in range(len(PAYLOAD)):
        bad = bytearray(PAYLOAD)
        bad[at] ^= 0x80
        with pytest.raises(RecordError, match=f"payload checksum: expected {header.payload_xxh3:016x}, got"):
            verify_payload(header, bad)


@pytest.mark.parametrize(
    "asked",
    [
        {"stored_key": bytes(32)},
        {"namespace": bytes(32)},
        {"shard": Shard(0, 4, 2, 3)},
        {"layout_id": "vllm.LBNHC"},
        {"payload_bytes": 209},
        {"tokens": bytes(token_bytes([7, 2**32 - 1, 0, 1, 3]))},
        {"tokens": b""},
    ],
    ids=str,
)
def test_require_names_what_differs(asked: dict[str, Any]) -> None:
    HEADER.require()
    HEADER.require(**{name: getattr(HEADER, name) for name in asked})
    with pytest.raises(RecordError, match=r"expected .* got"):
        HEADER.require(**asked)


def test_require_passes_tokens_that_the_record_does_not_hold() -> None:
    replace(HEADER, tokens=None).require(tokens=b"1234", stored_key=HEADER.stored_key)


@pytest.mark.parametrize(
    "change", [{"payload_bytes": 209}, {"layer_digests": (1, 2)}, {"tokens": b"1234" * 6}], ids=str
)
def test_check_fits(change: dict[str, Any]) -> None:
    HEADER.check_fits(SPEC)
    replace(HEADER, tokens=None, layer_digests=None).check_fits(SPEC)
    with pytest.raises(RecordError, match="header: expected 210 payload bytes, 3 layer digests"):
        replace(HEADER, **change).check_fits(SPEC)
