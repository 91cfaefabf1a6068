"""QuickCheck: is a record whole, for many records of one kind.

What `sealed.check_sealed` and `check_whole` decide, at a fifth of their time (5 us a page of 64 KiB instead of 24) for
a record that is right. One that is not goes through them, and they say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtransfer.kernels.errors import RecordError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import payload_checksum
from kvtransfer.tiers.record_native import record_tools
from kvtransfer.tiers.sealed import check_sealed, check_whole, sealed_payload

# xxhash gives the interpreter lock away above this; beside a busy Python thread, getting it back takes up to 5 ms a
# page.
_KEEPS_LOCK_BYTES = 64 << 10


Records = Sequence[tuple[bytes, RecordBuffer]]  # stored keys and where the records are


class QuickCheck:
    """Checks records of ``payload_bytes`` with a trailer of ``trailer_bytes``. (A stored key is a digest over the
    content namespace too: a record under the right key is of the right one.)"""

    def __init__(self, payload_bytes: int, trailer_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._trailer_bytes = trailer_bytes

    def sealed(self, key: bytes, buffer: RecordBuffer) -> RecordError | None:
        """What is wrong with a record that is to be put under ``key``; the trailer alone is read. None: nothing."""
        if self._sealed_xxh3(key, buffer) is not None:
            return None
        return self._explain(key, buffer, whole=False)

    def whole(self, key: bytes, buffer: RecordBuffer, *, gives_lock: bool = False) -> RecordError | None:
        """`sealed`, and the payload against its checksum; ``gives_lock``: other Python threads may run meanwhile."""
        expected = self._sealed_xxh3(key, buffer)
        digest = payload_checksum if gives_lock else payload_xxh3
        if expected is not None and digest(buffer.payload[: self._payload_bytes].data) == expected:
            return None
        return self._explain(key, buffer, whole=True)

    def many(
        self, records: Records, *, whole: bool, gives_lock: bool = False, parts: Parts | None = None
    ) -> list[RecordError | None]:
        """`whole`, or `sealed`, of many: by C where there is a compiler. ``parts``: of the buffers, if known."""
        tools = record_tools()
        good = bytes(len(records))
        if tools is not None:
            parts = Parts.of([buffer for _, buffer in records]) if parts is None else parts
            good = tools.good(
                [key for key, _ in records], parts, whole=whole, payload_bytes=self._payload_bytes,
                trailer_bytes=self._trailer_bytes, gives_lock=gives_lock,
            )  # fmt: skip
        found: list[RecordError | None] = []
        for is_good, (key, buffer) in zip(good, records, strict=True):
            if is_good:
                found.append(None)
            else:
                found.append(self.whole(key, buffer, gives_lock=gives_lock) if whole else self.sealed(key, buffer))
        return found

    def _sealed_xxh3(self, key: bytes, buffer: RecordBuffer) -> int | None:
        """The payload's checksum, if the trailer is one of ours in every respect."""
        told = sealed_payload(key, buffer)
        if told is None or told[0] != self._payload_bytes or buffer.trailer.size != self._trailer_bytes:
            return None
        return told[1]

    def _explain(self, key: bytes, buffer: RecordBuffer, *, whole: bool) -> RecordError | None:
        try:
            header = (check_whole if whole else check_sealed)(key, buffer)
            header.require(payload_bytes=self._payload_bytes)
        except RecordError as error:
            return error
        return None


def payload_xxh3(payload: memoryview) -> int:
    """xxh3_64 of ``payload`` (bytes) without giving the interpreter lock away: 40 us a MiB that is in a cache."""
    if len(payload) <= _KEEPS_LOCK_BYTES:
        return xxhash.xxh3_64_intdigest(payload)
    hasher = xxhash.xxh3_64()
    for at in range(0, len(payload), _KEEPS_LOCK_BYTES):
        hasher.update(payload[at : at + _KEEPS_LOCK_BYTES])
    return hasher.intdigest()
