"""Checks of a record at a tier's door: is it sealed on the way in, is it whole on the way out."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from kvtransfer.kernels.errors import RecordError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.keys import FORMAT_VERSION
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import MAGIC, RecordHeader, decode, padded_bytes, payload_checksum, verify_payload
from kvtransfer.tiers.record_native import record_tools

# Of a trailer (record.py): its start up to the flags; payload length and checksum; its own checksum.
_START, _PAYLOAD, _OWN = struct.Struct("<8sIII"), struct.Struct("<QQ"), struct.Struct("<Q")
_PAYLOAD_AT, _OWN_AT, _OWN_STOP = 120, 248, 256
_HAS_CHECKSUM = 2
_ZEROS = bytes(_OWN_STOP - _OWN_AT)


def check_sealed(key: bytes, buffer: RecordBuffer) -> RecordHeader:
    """The header of a record that is to be put under ``key``. Reads the trailer alone.

    Raises RecordError unless it is whole, names the key, fits the payload's buffer and holds the payload's checksum:
    without one no tier could tell later that the bytes are right.
    """
    header = decode(buffer.trailer)
    header.require(stored_key=key)
    if padded_bytes(header.payload_bytes) != buffer.payload.size:
        raise RecordError(
            f"record: expected a payload of {buffer.payload.size} bytes with padding, "
            f"got {header.payload_bytes} without"
        )
    if header.payload_xxh3 is None:
        raise RecordError("record: expected a payload checksum, got none; seal it with checksum=True")
    return header


def check_whole(key: bytes, buffer: RecordBuffer) -> RecordHeader:
    """`check_sealed`, and the payload's bytes against the checksum. What a get calls OK has passed this."""
    header = check_sealed(key, buffer)
    verify_payload(header, buffer.payload[: header.payload_bytes])
    return header


def sealed_or_error(key: bytes, buffer: RecordBuffer) -> RecordError | None:
    """`check_sealed` as a value: what is wrong, None if nothing is. Takes 2 us where that takes 17."""
    return None if sealed_payload(key, buffer) is not None else _explained(key, buffer, whole=False)


def whole_or_error(key: bytes, buffer: RecordBuffer) -> RecordError | None:
    """`check_whole` as a value. Takes the payload's checksum and 2 us."""
    told = sealed_payload(key, buffer)
    if told is not None:
        length, checksum = told
        payload = buffer[0]
        if payload_checksum(payload if length == payload.size else payload[:length]) == checksum:
            return None
    return _explained(key, buffer, whole=True)


def errors_of(
    keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, whole: bool, parts: Parts | None = None
) -> list[RecordError | None]:
    """`whole_or_error`, or `sealed_or_error`, of many records: by C where there is a compiler, a microsecond a record
    beside the checksum. ``parts``: of ``buffers``, if they are known. The interpreter lock is given away once.
    """
    single = whole_or_error if whole else sealed_or_error
    tools = record_tools()
    if tools is None:
        return [single(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
    good = tools.good(keys, Parts.of(buffers) if parts is None else parts, whole=whole)
    return [None if g else single(key, buffer) for g, key, buffer in zip(good, keys, buffers, strict=True)]


def sealed_payload(key: bytes, buffer: RecordBuffer) -> tuple[int, int] | None:
    """Length and checksum of the payload if the record is sealed for ``key``; None if something isn't as it should."""
    image = buffer[1].tobytes()  # what is checked is what is read, whoever writes meanwhile
    magic, version, length, flags = _START.unpack_from(image)
    told = _PAYLOAD.unpack_from(image, _PAYLOAD_AT)
    if (
        magic != MAGIC
        or version != FORMAT_VERSION
        or length != len(image)
        or not flags & _HAS_CHECKSUM
        or image[32:64] != key
        or padded_bytes(told[0]) != buffer[0].size
        or xxhash.xxh3_64_intdigest(image[:_OWN_AT] + _ZEROS + image[_OWN_STOP:]) != _OWN.unpack_from(image, _OWN_AT)[0]
    ):
        return None
    return told


def _explained(key: bytes, buffer: RecordBuffer, *, whole: bool) -> RecordError | None:
    """What the slow checks say. They decide where the quick ones find fault."""
    try:
        (check_whole if whole else check_sealed)(key, buffer)
    except RecordError as error:
        return error
    return None
