"""Checks of a record at a tier's door: is it sealed on the way in, is it whole on the way out."""

from __future__ import annotations

from kvtransfer.kernels.errors import RecordError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.record import RecordHeader, decode, padded_bytes, verify_payload


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
