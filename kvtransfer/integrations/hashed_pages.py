"""Pages that an engine names by a hash alone, kept in tiers as records without tokens.

Some doors of engines pass neither tokens nor a layout, only a hash of the prefix and pieces of memory that hold the
page. What a record can't prove by its tokens it proves by its key: the engine's hash goes into the stored key together
with the content namespace, which names model, dtype, page size, the engine's byte order and the sizes of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.integrations.lower_tiers import TierStack
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.keys import Namespace, Shard, stored_keys
from kvtransfer.tiers.memory import Mapping
from kvtransfer.tiers.record import BLOCK_BYTES, RecordHeader, padded_bytes, payload_checksum, trailer_bytes

_R = TypeVar("_R")

Piece = NDArray[np.uint8]
MOST_PIECES = 2  # of a page that become records of their own: each costs a trailer and a key


@dataclass(frozen=True)
class RecordPart:
    """One record of a page: ``pieces`` (positions among the page's) one behind the other, of this share of it.

    ``number`` of ``numbers`` records of the shard.
    """

    shard: Shard
    pieces: tuple[int, ...]
    number: int = 0
    numbers: int = 1


@dataclass(frozen=True)
class RecordPlan:
    """How pages become records, all of one size.

    direct  each record is one piece, read and written where it lies; else pieces are copied through a staging area
    """

    spec: KVSpec
    parts: tuple[RecordPart, ...]
    piece_bytes: tuple[int, ...]
    direct: bool

    @property
    def payload_bytes(self) -> int:
        """Of one record."""
        return self.spec.page_bytes

    @property
    def page_bytes(self) -> int:
        """Of one page: all its records."""
        return sum(self.piece_bytes)


def plan_records(piece_bytes: Sequence[int], shards: Sequence[Shard], page_size: int) -> RecordPlan:
    """The plan for pages of these pieces, an equal run of them for each of ``shards``.

    Pieces of whole blocks of 4,096 bytes, at most two a shard and of one size, are records of their own, without a
    copy. Raises ConfigError where pieces can't be shared out evenly.
    """
    sizes = tuple(piece_bytes)
    each, rest = divmod(len(sizes), len(shards)) if shards else (0, 1)
    if rest or not each or min(sizes, default=0) < 1:
        raise ConfigError(f"pieces: expected the same number for each of {len(shards)} shards, got sizes {sizes[:8]}")
    runs = [tuple(range(at * each, (at + 1) * each)) for at in range(len(shards))]
    direct = each <= MOST_PIECES and len(set(sizes)) == 1 and sizes[0] % BLOCK_BYTES == 0
    if direct:
        parts = [
            RecordPart(shard, (piece,), number, each)
            for shard, run in zip(shards, runs, strict=True)
            for number, piece in enumerate(run)
        ]
    else:
        parts = [RecordPart(shard, run) for shard, run in zip(shards, runs, strict=True)]
    payloads = {sum(sizes[p] for p in part.pieces) for part in parts}
    if len(payloads) != 1:
        raise ConfigError(f"pieces: expected shards of one size, got {sorted(payloads)} bytes")
    page = Component("page", 1, payloads.pop(), per_page=True)
    return RecordPlan(KVSpec.uniform(1, page_size, (page,)), tuple(parts), sizes, direct)


class Staging:
    """``count`` places for records; payloads only where the plan copies. Thread-safe."""

    def __init__(self, plan: RecordPlan, count: int) -> None:
        self.count = count
        self.payload_bytes = 0 if plan.direct else padded_bytes(plan.payload_bytes)
        self.trailer_bytes = trailer_bytes(plan.spec)
        self._maps = [Mapping(count * max(n, BLOCK_BYTES)) for n in (self.payload_bytes, self.trailer_bytes)]
        whole = [memory.bytes for memory in self._maps]
        assert whole[0] is not None and whole[1] is not None
        self.payloads: Piece = whole[0][: count * self.payload_bytes]
        self.trailers: Piece = whole[1][: count * self.trailer_bytes]
        self._free = list(range(count))
        self._freed = Condition()

    def lend(self, number: int, work: Callable[[list[int]], _R]) -> _R:
        """Do some work with ``number`` places, at most `count`. Waits for others to give theirs back: they hold no more
        than one lot."""
        taken: list[int] = []
        try:
            with self._freed:
                self._freed.wait_for(lambda: len(self._free) >= number)
                taken, self._free = self._free[:number], self._free[number:]
            return work(taken)
        finally:
            with self._freed:
                self._free += taken
                self._freed.notify_all()

    def payload(self, place: int) -> Piece:
        return self.payloads[place * self.payload_bytes : (place + 1) * self.payload_bytes]

    def trailer(self, place: int) -> Piece:
        return self.trailers[place * self.trailer_bytes : (place + 1) * self.trailer_bytes]


class HashedPages:
    """Pages of one kind in the tiers of ``stack``. Thread-safe; each call waits for the tiers.

    namespace      of these pages; its ``spec`` must say what the bytes are and how they lie
    layout_id      the byte order's name, as records show it
    salt           the tenant's; may be exchanged: pages under another are out of reach
    staging_bytes  memory for records on their way, at least one page

    ``keys`` are the engine's page hashes, 64 hex digits. A page is a sequence of pieces: flat contiguous uint8 arrays
    of the plan's sizes.
    """

    def __init__(
        self,
        stack: TierStack,
        plan: RecordPlan,
        namespace: Namespace,
        *,
        layout_id: str,
        salt: bytes = b"",
        staging_bytes: int = 64 << 20,
    ) -> None:
        self.plan = plan
        self._stack, self._layout_id, self.salt = stack, layout_id, salt
        total = len(plan.parts)
        self._namespaces = [
            replace(namespace, spec=f"{namespace.spec};record={part.number}/{part.numbers}").digest()
            for part in plan.parts
        ]
        record = padded_bytes(plan.payload_bytes)
        self.staging = Staging(plan, max(1, min(512, staging_bytes // (total * record))) * total)
        stack.register(self.staging.trailers)
        stack.register(self.staging.payloads)

    def register(self, memory: Piece) -> None:
        """Pieces of direct records lie in ``memory``: tell the tiers that must know."""
        if self.plan.direct:
            self._stack.register(memory)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page is there, all its records."""
        found = self._stack.lookup(self._stored(keys))
        return self._by_page(found)

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[Piece]]) -> list[bool]:
        """Keep pages; True for those that a tier has, whole, when this returns. ``pages`` are read, not changed."""
        self._check(keys, pages)
        kept: list[bool] = []
        for lot in self._lots(len(keys)):
            stored = self._stored(keys[lot.start : lot.stop])
            kept += self.staging.lend(len(stored), partial(self._put, stored, pages[lot.start : lot.stop]))
        return kept

    def get(self, keys: Sequence[str], pages: Sequence[Sequence[Piece]]) -> list[bool]:
        """Fill ``pages``; True for those that hold their bytes, verified. What the others hold is undefined."""
        self._check(keys, pages)
        filled: list[bool] = []
        for lot in self._lots(len(keys)):
            stored = self._stored(keys[lot.start : lot.stop])
            filled += self.staging.lend(len(stored), partial(self._get, stored, pages[lot.start : lot.stop]))
        return filled

    def forget(self, keys: Sequence[str]) -> int:
        """Remove pages from every tier; how many records went."""
        return self._stack.remove(self._stored(keys))

    def _put(self, stored: Sequence[bytes], pages: Sequence[Sequence[Piece]], places: list[int]) -> list[bool]:
        buffers = self._buffers(pages, places)
        self._gather(pages, buffers)
        self._seal(stored, buffers)
        return self._by_page(self._stack.put(stored, buffers))

    def _get(self, stored: Sequence[bytes], pages: Sequence[Sequence[Piece]], places: list[int]) -> list[bool]:
        buffers = self._buffers(pages, places)
        whole = self._by_page(self._stack.get(stored, buffers))
        self._scatter(pages, buffers, whole)
        return whole

    def _stored(self, keys: Sequence[str]) -> list[bytes]:
        """Stored keys, page by page, record by record."""
        try:
            hashes = [bytes.fromhex(key) for key in keys]
        except (ValueError, TypeError) as error:
            raise LayoutError(f"keys: expected page hashes in hex, got {error}") from error
        if any(len(one) != 32 for one in hashes):
            raise LayoutError(f"keys: expected 64 hex digits, got lengths {sorted({len(key) for key in keys})}")
        columns = [
            stored_keys(self.salt, namespace, hashes, part.shard)
            for namespace, part in zip(self._namespaces, self.plan.parts, strict=True)
        ]
        return [key for row in zip(*columns, strict=True) for key in row]

    def _by_page(self, records: Sequence[bool]) -> list[bool]:
        each = len(self.plan.parts)
        return [all(records[at : at + each]) for at in range(0, len(records), each)]

    def _lots(self, pages: int) -> Iterator[range]:
        """Pages at a time: at most half of the staging area, so that a reader and a writer don't take turns."""
        step = max(1, self.staging.count // len(self.plan.parts) // 2)
        for start in range(0, pages, step):
            yield range(start, min(start + step, pages))

    def _check(self, keys: Sequence[str], pages: Sequence[Sequence[Piece]]) -> None:
        if len(keys) != len(pages):
            raise LayoutError(f"pages: expected one a key, got {len(pages)} for {len(keys)} keys")
        for page in pages:
            if tuple(piece.nbytes for piece in page) != self.plan.piece_bytes:
                raise LayoutError(
                    f"page: expected pieces of {self.plan.piece_bytes[:8]} bytes, "
                    f"got {tuple(piece.nbytes for piece in page)[:8]}"
                )

    def _buffers(self, pages: Sequence[Sequence[Piece]], places: Sequence[int]) -> list[RecordBuffer]:
        free = iter(places)
        buffers = []
        for page in pages:
            for part in self.plan.parts:
                place = next(free)
                payload = page[part.pieces[0]] if self.plan.direct else self.staging.payload(place)
                buffers.append(RecordBuffer(payload, self.staging.trailer(place)))
        return buffers

    def _gather(self, pages: Sequence[Sequence[Piece]], buffers: Sequence[RecordBuffer]) -> None:
        if self.plan.direct:
            return
        for record, buffer in zip(self._records(pages), buffers, strict=True):
            at = 0
            for piece in record:
                buffer.payload[at : at + piece.nbytes] = piece
                at += piece.nbytes
            buffer.payload[at:] = 0  # nothing of another page goes out in the padding

    def _scatter(
        self, pages: Sequence[Sequence[Piece]], buffers: Sequence[RecordBuffer], whole: Sequence[bool]
    ) -> None:
        if self.plan.direct:
            return
        wanted = [ok for ok in whole for _ in self.plan.parts]
        for record, buffer, ok in zip(self._records(pages), buffers, wanted, strict=True):
            at = 0
            for piece in record if ok else ():
                piece[:] = buffer.payload[at : at + piece.nbytes]
                at += piece.nbytes

    def _records(self, pages: Sequence[Sequence[Piece]]) -> Iterator[list[Piece]]:
        for page in pages:
            for part in self.plan.parts:
                yield [page[p] for p in part.pieces]

    def _seal(self, stored: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> None:
        each = len(self.plan.parts)
        for at, (key, buffer) in enumerate(zip(stored, buffers, strict=True)):
            header = RecordHeader(
                key,
                self._namespaces[at % each],
                self.plan.parts[at % each].shard,
                self._layout_id,
                self.plan.payload_bytes,
                payload_xxh3=payload_checksum(buffer.payload[: self.plan.payload_bytes]),
            )
            header.encode_into(buffer.trailer)
