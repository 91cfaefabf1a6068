"""Pages of fresh random data in host memory, sealed, for tests of tiers; and what must not change around them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np

from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_keys, token_bytes
from kvtransfer.tiers.record import RecordHeader

ODD = KVSpec.attention(num_layers=3, page_size=5, kv_heads=3, head_dim=67, itemsize=2)  # 12,060 bytes a page
GUARD = 0xA5


class Arena:
    """``count`` places for records in a host slab, with a guard slot before and behind each.

    Attributes: buffers, one RecordBuffer a place; keys, the stored key of each, fresh for every arena (`fill`).
    """

    def __init__(self, count: int, spec: KVSpec = ODD, *, tier: Tier | None = None) -> None:
        self.spec = spec
        self.count = count
        self.host = HostTier(spec, capacity_pages=2 * count + 1, device="cpu", pin=False, huge_pages=False)
        self.payloads = self.host.payload.numpy()
        self.trailers = self.host.trailers.reshape(-1)
        self.payloads[:] = GUARD
        self.trailers[:] = GUARD
        self.buffers = [self.host.record(2 * i + 1) for i in range(count)]
        self.keys: list[bytes] = []
        self._tier = tier
        if tier is not None:
            tier.register(self.payloads)
            tier.register(self.trailers)

    @property
    def record_bytes(self) -> int:
        """Payload and trailer of one record."""
        return self.host.slot_bytes + self.host.trailer_bytes

    def fill(self) -> Arena:
        """Random bytes in every payload and its padding, sealed under keys that nobody had before."""
        rng = np.random.default_rng()
        tokens = np.arange(self.count * self.spec.page_size)
        space = Namespace.of(self.spec, model=secrets.token_hex(8), kv_dtype="uint8").digest()
        shard = Shard.whole(self.spec)
        self.keys = stored_keys(b"salt", space, page_keys(tokens, self.spec.page_size), shard)
        for i, (key, buffer) in enumerate(zip(self.keys, self.buffers, strict=True)):
            buffer.payload[:] = rng.integers(0, 256, buffer.payload.size, dtype=np.uint8)
            own = tokens[i * self.spec.page_size : (i + 1) * self.spec.page_size]
            header = RecordHeader(
                key, space, shard, "page_first", self.spec.page_bytes, tokens=bytes(token_bytes(own)), sequence=i
            )
            self.host.seal(2 * i + 1, [header])
        return self

    def image(self, place: int) -> bytes:
        """The whole record's bytes."""
        return self.buffers[place].payload.tobytes() + self.buffers[place].trailer.tobytes()

    def images(self) -> list[bytes]:
        return [self.image(i) for i in range(self.count)]

    def check_guards(self, untouched: Iterable[int] = ()) -> None:
        """Nothing was written between the places, nor to those in ``untouched``."""
        slots = list(range(0, 2 * self.count + 1, 2)) + [2 * i + 1 for i in untouched]
        payloads = self.payloads.reshape(-1, self.host.slot_bytes)
        for region in (payloads, self.host.trailers):
            bad = [slot for slot in slots if not (region[slot] == GUARD).all()]
            assert not bad, f"slots {bad[:8]} were written to"

    def close(self) -> None:
        if self._tier is not None:
            self._tier.unregister(self.payloads)
            self._tier.unregister(self.trailers)
        del self.payloads, self.trailers, self.buffers
        self.host.close()


def differing(got: Sequence[bytes], expected: Sequence[bytes]) -> list[int]:
    """Positions at which two lists of images differ."""
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
