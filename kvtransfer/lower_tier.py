"""LowerTier: carries out a directory's commands on one tier that is addressed by key.

A page that is read is compared with what was asked for: the tier has checked that the record is whole and under its
key, here its namespace, byte order and tokens are compared too. A page that is written is sealed first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import CODES, Demote, Evict, Lookup, Promote, ids
from kvtransfer.kernels.errors import DeadlineExceeded, OwnershipError, RecordError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus, Tier, TierHandle
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Shard, stored_keys
from kvtransfer.tiers.movement import Movement
from kvtransfer.tiers.record import (
    DIGESTS_OFFSET,
    LAYOUT_ID_BYTES,
    NOTHING_STORED,
    RecordHeader,
    decode,
    payload_checksum,
)
from kvtransfer.tiers.sealed import sealed_payload

NOT_YET = (DeadlineExceeded, OwnershipError)
KeyCommand = Promote | Demote | Evict | Lookup
LAYOUT_ID = "page_first"
# Of a trailer (record.py): flags, numbers of digests, tokens and bytes of the layout id; namespace; layout id.
_COUNTS, _SPACE, _LAYOUT = slice(16, 32), slice(64, 96), slice(144, 144 + LAYOUT_ID_BYTES)
_HAS_TOKENS = 1


class LowerTier:
    """``tier`` below ``host``, whose slots the directory gives out. Thread-safe.

    shard       which part of a page this process holds
    deadline_s  of each command, from `begin` on
    in_flight, batch_pages  batches with the tier at a time (as many reads, as many writes), and the most pages of one
    owned       close the tier with this
    """

    def __init__(
        self,
        tier: Tier,
        host: HostTier,
        shard: Shard,
        *,
        deadline_s: float,
        in_flight: int = 4,
        batch_pages: int = 128,
        owned: bool = False,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.tier = tier
        self.leaving = False  # it takes no more commands
        self._host, self._shard, self._deadline_s, self._owned = host, shard, deadline_s, owned
        # Two, so that what somebody waits for is not behind what nobody does.
        self._reads, self._writes = (
            Movement(
                host,
                tier,
                batch_pages=batch_pages,
                in_flight=in_flight,
                register=register,
                claims=False,
                observer=observer,
            )
            for register in (True, False)
        )
        self._sequence = itertools.count(time.time_ns())

    @property
    def knows_memory(self) -> bool:
        """Whether the tier has to be told where the host's memory goes or comes: until `close` has got so far, even if
        the tier itself has not ended then."""
        return self._reads.registered

    def begin(self, command: KeyCommand) -> TierHandle:
        """Begin to carry it out. Reads all of the payload to seal it: not for a thread that others wait for."""
        keys = stored_keys(command.scope.salt, command.scope.namespace, command.keys, self._shard)
        if isinstance(command, Lookup):
            return self.tier.lookup(keys)
        if isinstance(command, Evict):
            return self.tier.remove(keys)
        slots = ids(command.slots)
        if isinstance(command, Promote):
            return self._reads.prefetch(keys, slots, deadline_s=self.limit_s(command))
        self._seal(command, keys, slots)
        return self._writes.write_back(keys, slots, lookup_first=self.tier.shared, deadline_s=self._deadline_s)

    def limit_s(self, command: KeyCommand) -> float:
        """Seconds that it may take, from `begin` on."""
        within_s = command.within_s if isinstance(command, Promote) else 0.0
        return min(within_s, self._deadline_s) if within_s > 0 else self._deadline_s

    def judge(self, command: KeyCommand, handle: TierHandle) -> tuple[bytes, str]:
        """What became of each page of a command that is done (`CODES`), and the first cause of what went wrong."""
        result = handle.result(0)
        codes = np.array([CODES[status] for status in result.statuses], dtype=np.uint8)
        detail = next((str(error) for error in result.errors.values()), "")
        if isinstance(command, Promote):
            foreign = self._foreign(command, np.flatnonzero(codes == CODES[PageStatus.OK]))
            for position, why in foreign.items():
                codes[position] = CODES[PageStatus.CORRUPT]
                detail = detail or why
        return codes.tobytes(), detail

    def close(self, *, drain: bool, timeout_s: float) -> None:
        """Finish or cancel what is under way, and let go of the host's memory; the tier goes too if it is ours.

        Raises `NOT_YET` where the tier uses the memory still, or has not ended: call it again. After another error
        there is nothing left to be done.
        """
        until = time.monotonic() + timeout_s
        self._end_batches(drain, until)
        try:
            self._reads.close(drain=drain, timeout_s=timeout_s)
        except NOT_YET:
            raise
        except BaseException:
            if self._owned:
                self.tier.close(drain=False, timeout_s=max(0.0, until - time.monotonic()))
            raise
        if self._owned:
            self.tier.close(drain=drain, timeout_s=max(0.0, until - time.monotonic()))

    def _end_batches(self, drain: bool, until: float) -> None:
        """Both kinds of batches end, or are asked to, before the tier is told that the memory goes."""
        late: DeadlineExceeded | None = None
        for part in (self._writes, self._reads):
            try:
                part.book.close(drain=drain, timeout_s=max(0.0, until - time.monotonic()))
            except DeadlineExceeded as error:
                late = late or error
        if late is not None:
            raise late

    # --- inside

    def _seal(self, command: Demote, keys: Sequence[bytes], slots: NDArray[np.int64]) -> None:
        """Complete the headers of slots that have none yet. Raises RecordError for a slot whose bytes are known bad."""
        host, size = self._host, 4 * self._host.spec.page_size
        digests = host.digests
        bad = slots[(digests[slots] == NOTHING_STORED).all(axis=1)]
        if bad.size:
            raise RecordError(f"expected slots that hold pages, got {bad[:8].tolist()}, which did not verify")
        for at, (key, slot) in enumerate(zip(keys, slots.tolist(), strict=True)):
            record = host.record(slot)
            if sealed_payload(key, record) is not None:
                continue  # it came from a lower tier, or was written to another one
            RecordHeader(
                key,
                command.scope.namespace,
                self._shard,
                LAYOUT_ID,
                host.spec.page_bytes,
                tokens=command.tokens[at * size : (at + 1) * size],
                payload_xxh3=payload_checksum(record.payload[: host.spec.page_bytes]),
                layer_digests=tuple(digests[slot].tolist()),  # zeros where there are none, as in the host
                sequence=next(self._sequence),
            ).encode_into(record.trailer)

    def _foreign(self, command: Promote, at: NDArray[np.int64]) -> dict[int, str]:
        """Pages that were read whole, but are not what was asked for, and why. Their slots are wiped."""
        if not at.size:
            return {}
        host, slots = self._host, ids(command.slots)[at]
        page_size, layers = host.spec.page_size, host.spec.num_layers
        rows = host.trailers[slots]
        counts = np.ascontiguousarray(rows[:, _COUNTS]).view("<u4")
        space = np.frombuffer(command.scope.namespace, dtype=np.uint8)
        layout = np.frombuffer(LAYOUT_ID.encode().ljust(LAYOUT_ID_BYTES, b"\0"), dtype=np.uint8)
        asked = np.frombuffer(command.tokens, dtype=np.uint8).reshape(-1, 4 * page_size)[at]
        plain = (counts[:, 3] == len(LAYOUT_ID)) & (rows[:, _SPACE] == space).all(axis=1)
        plain &= (rows[:, _LAYOUT] == layout).all(axis=1) & (counts[:, 1] == layers)
        start = DIGESTS_OFFSET + 8 * layers
        same = (counts[:, 2] == page_size) & (rows[:, start : start + 4 * page_size] == asked).all(axis=1)
        plain &= same | ((counts[:, 0] & _HAS_TOKENS) == 0)
        found: dict[int, str] = {}
        for n in np.flatnonzero(~plain).tolist():
            try:
                header = decode(rows[n])
                header.require(namespace=command.scope.namespace, shard=self._shard, layout_id=LAYOUT_ID)
                header.require(payload_bytes=host.spec.page_bytes, tokens=asked[n].tobytes())
                if header.layer_digests is None:  # the host has zeros for that, in their place
                    replace(header, layer_digests=(0,) * layers).encode_into(host.trailers[slots[n]])
            except RecordError as error:
                found[int(at[n])] = str(error)
        if found:
            wiped = ids(command.slots)[list(found)]
            host.digests[wiped] = NOTHING_STORED
            host.trailers[wiped, :8] = 0
        return found
