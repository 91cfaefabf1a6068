"""The record: a page in a tier is its payload and a trailer, and the trailer tells what the payload is.

A trailer is `trailer_bytes(spec)` long, a multiple of 4,096, little-endian, at fixed offsets:

====  =====  ==================================================================================
at    bytes  what
====  =====  ==================================================================================
0     8      magic
8     4      format version
12    4      length of the trailer in bytes
16    4      flags: 1 tokens present, 2 payload checksum present, 4 layer digests present
20    4      number of layer digests
24    4      number of tokens
28    4      length of the layout id in bytes
32    32     stored key
64    32     content namespace
96    24     shard (6 x u32)
120   8      payload length in bytes
128   8      xxh3_64 of the payload
136   8      sequence number of the write
144   64     layout id, UTF-8, zero-padded
208   40     zero
248   8      xxh3_64 of the whole trailer with these 8 bytes taken as zero
256   8 x L  GPU digest of each layer
...   4 x T  the page's token ids
...          zero
====  =====  ==================================================================================

The checksum covers every byte, the padding too, so that any flipped bit in a trailer is found.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.kernels.errors import RecordError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.keys import FORMAT_VERSION, Shard

MAGIC = b"\x89KVTREC\n"
BLOCK_BYTES = 4096
DIGESTS_OFFSET = 256
NOTHING_STORED = 2**64 - 1  # in every digest of a slot whose bytes are of no page: new, or torn by a failed store
LAYOUT_ID_BYTES = 64
_FIXED = struct.Struct("<8s6I32s32s24s3Q64s40xQ")
_CHECKSUM_OFFSET = 248
_HAS_TOKENS, _HAS_CHECKSUM, _HAS_DIGESTS = 1, 2, 4


def padded_bytes(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks of 4,096 bytes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def trailer_bytes(spec: KVSpec) -> int:
    """Length of the trailer of a record of ``spec``: one block holds 512 tokens and 128 layers."""
    return padded_bytes(DIGESTS_OFFSET + 8 * spec.num_layers + 4 * spec.page_size)


@dataclass(frozen=True)
class RecordHeader:
    """What a record says about its payload. Encoded in its trailer.

    stored_key, namespace  32 bytes each (keys.py)
    shard                  which layers and heads the payload holds
    layout_id              the payload's byte order: "page_first", or a foreign layout's name
    payload_bytes          length of the payload, without padding
    tokens                 the page's token ids as little-endian u32 (`keys.token_bytes`), or None where the
                           writer knew only a hash
    payload_xxh3           xxh3_64 of the payload, or None
    layer_digests          the GPU's digest of each layer, or None
    sequence               grows with every write of the tier
    """

    stored_key: bytes
    namespace: bytes
    shard: Shard
    layout_id: str
    payload_bytes: int
    tokens: bytes | None = None
    payload_xxh3: int | None = None
    layer_digests: tuple[int, ...] | None = None
    sequence: int = 0

    @property
    def token_ids(self) -> NDArray[np.uint32] | None:
        """The page's token ids, or None where the record does not hold them."""
        return None if self.tokens is None else np.frombuffer(self.tokens, dtype="<u4").astype(np.uint32)

    def encode_into(self, buffer: Any) -> None:
        """Overwrite all of ``buffer`` (writable, contiguous, `trailer_bytes` long) with this header.

        Raises RecordError if a field is out of range or does not fit; nothing is written then.
        """
        out = np.frombuffer(buffer, dtype=np.uint8)
        layout, tokens = self.layout_id.encode(), self.tokens or b""
        digests = self.layer_digests or ()
        need = DIGESTS_OFFSET + 8 * len(digests) + len(tokens)
        if out.size % BLOCK_BYTES or need > out.size:
            raise RecordError(
                f"trailer: expected a multiple of {BLOCK_BYTES} and at least {need} bytes, got {out.size}"
            )
        if not len(self.stored_key) == len(self.namespace) == 32:
            raise RecordError(
                f"stored key and namespace: expected 32 bytes each, got {len(self.stored_key)}, {len(self.namespace)}"
            )
        if len(layout) > LAYOUT_ID_BYTES or len(tokens) % 4:
            raise RecordError(
                f"expected a layout id of at most {LAYOUT_ID_BYTES} bytes and 4 bytes a token, "
                f"got {len(layout)} and {len(tokens)} bytes"
            )
        flags = _HAS_TOKENS * (self.tokens is not None) + _HAS_CHECKSUM * (self.payload_xxh3 is not None)
        flags += _HAS_DIGESTS * (self.layer_digests is not None)
        image = bytearray(out.size)
        try:
            _FIXED.pack_into(
                image,
                0,
                MAGIC,
                FORMAT_VERSION,
                out.size,
                flags,
                len(digests),
                len(tokens) // 4,
                len(layout),
                self.stored_key,
                self.namespace,
                self.shard.canonical(),
                self.payload_bytes,
                self.payload_xxh3 or 0,
                self.sequence,
                layout,
                0,
            )
            struct.pack_into(f"<{len(digests)}Q", image, DIGESTS_OFFSET, *digests)
        except struct.error as error:
            raise RecordError(f"expected unsigned 64-bit numbers, got {self!r}: {error}") from error
        image[need - len(tokens) : need] = tokens
        struct.pack_into("<Q", image, _CHECKSUM_OFFSET, xxhash.xxh3_64_intdigest(image))
        out[:] = np.frombuffer(image, dtype=np.uint8)

    def check_fits(self, spec: KVSpec) -> None:
        """Raise RecordError unless this can be the header of a page of ``spec``."""
        tokens = len(self.tokens or b"") // 4
        digests = spec.num_layers if self.layer_digests is None else len(self.layer_digests)
        if self.payload_bytes != spec.page_bytes or digests != spec.num_layers or tokens > spec.page_size:
            raise RecordError(
                f"header: expected {spec.page_bytes} payload bytes, {spec.num_layers} layer digests (or none) and at "
                f"most {spec.page_size} tokens, got {self.payload_bytes}, {digests} and {tokens}"
            )

    def require(
        self,
        *,
        stored_key: bytes | None = None,
        namespace: bytes | None = None,
        shard: Shard | None = None,
        layout_id: str | None = None,
        payload_bytes: int | None = None,
        tokens: bytes | None = None,
    ) -> None:
        """Raise RecordError unless every field given is equal to the record's own.

        A record that holds no tokens (a writer that knew only a hash) passes ``tokens``: it rests on its full
        key, its namespace and its checksum.
        """
        asked: tuple[tuple[str, object, object], ...] = (
            ("stored key", stored_key, self.stored_key),
            ("content namespace", namespace, self.namespace),
            ("shard", shard, self.shard),
            ("layout id", layout_id, self.layout_id),
            ("payload length", payload_bytes, self.payload_bytes),
            ("tokens", tokens if self.tokens is not None else None, self.tokens),
        )
        for name, expected, got in asked:
            if expected is not None and expected != got:
                raise RecordError(f"record: expected {name} {_brief(expected)}, got {_brief(got)}")


def decode(buffer: Any) -> RecordHeader:
    """The header in ``buffer`` (a whole trailer). Raises RecordError, with expected and got, if it can't be used."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    if data.size < BLOCK_BYTES or data.size % BLOCK_BYTES:
        raise RecordError(f"trailer: expected a multiple of {BLOCK_BYTES} bytes, got {data.size}")
    image = bytearray(data.tobytes())  # one copy: what is checked is what is read, whoever writes meanwhile
    (magic, version, length, flags, num_digests, num_tokens, layout_bytes, stored_key, namespace, shard) = (
        _FIXED.unpack_from(image)[:10]
    )
    payload_bytes, payload_xxh3, sequence, layout, checksum = _FIXED.unpack_from(image)[10:]
    if magic != MAGIC:
        raise RecordError(f"magic: expected {MAGIC.hex()}, got {magic.hex()}{'' if any(magic) else ' (never written)'}")
    if version != FORMAT_VERSION:
        raise RecordError(f"format version: expected {FORMAT_VERSION}, got {version}")
    if length != data.size:
        raise RecordError(f"trailer length: expected {data.size} bytes, got {length}")
    image[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 8] = bytes(8)
    expected = xxhash.xxh3_64_intdigest(image)
    if checksum != expected:
        raise RecordError(f"header checksum: expected {expected:016x}, got {checksum:016x}; the trailer is damaged")
    tokens_at = DIGESTS_OFFSET + 8 * num_digests
    if tokens_at + 4 * num_tokens > length or layout_bytes > LAYOUT_ID_BYTES:
        raise RecordError(
            f"expected {num_digests} digests, {num_tokens} tokens and a layout id of {layout_bytes} bytes to fit "
            f"{length} bytes, got more"
        )
    try:
        where, name = Shard(*struct.unpack("<6I", shard)), layout[:layout_bytes].decode()
    except ValueError as error:  # a ConfigError or UnicodeDecodeError: sound bytes from a writer that is wrong
        raise RecordError(f"expected a valid shard and a layout id in UTF-8, got {shard.hex()}, {layout!r}") from error
    return RecordHeader(
        stored_key,
        namespace,
        where,
        name,
        payload_bytes,
        bytes(image[tokens_at : tokens_at + 4 * num_tokens]) if flags & _HAS_TOKENS else None,
        payload_xxh3 if flags & _HAS_CHECKSUM else None,
        struct.unpack_from(f"<{num_digests}Q", image, DIGESTS_OFFSET) if flags & _HAS_DIGESTS else None,
        sequence,
    )


def payload_checksum(payload: Any) -> int:
    """xxh3_64 of ``payload``, any contiguous buffer (about 30 GB/s a thread; releases the GIL)."""
    return xxhash.xxh3_64_intdigest(payload)


def verify_payload(header: RecordHeader, payload: Any) -> bool:
    """Check ``payload`` (contiguous, without padding) against ``header``.

    True if its checksum was compared and is right, False if the record holds none. Raises RecordError on a
    wrong length or a wrong checksum.
    """
    size = memoryview(payload).nbytes
    if size != header.payload_bytes:
        raise RecordError(f"payload: expected {header.payload_bytes} bytes, got {size}")
    if header.payload_xxh3 is None:
        return False
    got = payload_checksum(payload)
    if got != header.payload_xxh3:
        raise RecordError(f"payload checksum: expected {header.payload_xxh3:016x}, got {got:016x}")
    return True


def _brief(value: object) -> str:
    """Bytes as hex, cut short; anything else as it prints."""
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 32 else f"{value[:32].hex()}... ({len(value)} bytes)"
    return repr(value)
