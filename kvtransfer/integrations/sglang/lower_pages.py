"""LowerPages: the tiers below one pool's host memory, asked and filled in the background.

The scheduler's thread must not wait for a disk or a server. What it wants to know is asked by a thread; it waits a few
milliseconds for the answer at most, and finds it at its next pass otherwise.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvtransfer.integrations.keyed_slots import KeyedSlots
from kvtransfer.integrations.lower_tiers import TierStack
from kvtransfer.kernels.errors import KVTransferError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.keys import Namespace, Shard, stored_keys
from kvtransfer.tiers.record import RecordHeader, payload_checksum

logger = logging.getLogger(__name__)
FOUND_S = 30.0  # how long "it is there" is believed
MISSED_S = 2.0
MOST_HINTS = 1 << 18


class LowerPages:
    """Pages of ``slots`` in the tiers of ``stack``; keys are SGLang's page hashes in hex. Thread-safe.

    ``wait_s``: how long `known` may hold its caller.
    """

    def __init__(
        self,
        stack: TierStack,
        slots: KeyedSlots,
        namespace: Namespace,
        shard: Shard,
        *,
        salt: bytes,
        wait_s: float = 0.005,
    ) -> None:
        self._stack, self._slots, self._host = stack, slots, slots.host
        self._namespace, self._shard, self._salt = namespace.digest(), shard, salt
        self._wait_s = wait_s
        self._hints: OrderedDict[str, tuple[bool, float]] = OrderedDict()  # until when it is believed
        self._asked: set[str] = set()
        self._patient_from = 0.0
        self._closed = False
        # A question is not to stand behind a read, nor that behind a write.
        self._asking = ThreadPoolExecutor(1, "kvtransfer-asks")
        self._reading = ThreadPoolExecutor(2, "kvtransfer-reads")
        self._writing = ThreadPoolExecutor(1, "kvtransfer-writes")
        stack.register(self._host.payload.numpy())
        stack.register(self._host.trailers.reshape(-1))

    def known(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it is known to be there. Asks for those of which nothing is known; waits for the answer
        up to ``wait_s`` only, and a tenth of the time at most."""
        now = time.monotonic()
        ask = [key for key in keys if self._hint(key, now) is None and key not in self._asked]
        if ask and not self._closed:
            self._asked.update(ask)
            asked = self._asking.submit(self._ask, ask)
            if now >= self._patient_from:
                wait([asked], self._wait_s)
                self._patient_from = time.monotonic() + 10 * (time.monotonic() - now)
        return [bool(self._hint(key, now)) for key in keys]

    def fetch(self, keys: Sequence[str]) -> Future[None]:
        """Fill the slots of ``keys``, new ones that the caller holds; then those that are whole are ready, the others
        forgotten. The read holds them too: buffers are the tiers' until they have answered."""
        self._slots.hold(keys)
        return self._reading.submit(self._fetch, list(keys))

    def keep(self, keys: Sequence[str]) -> Future[None]:
        """Write pages that are ready, whose slots the caller holds; they are let go of when that is over."""
        return self._writing.submit(self._keep, list(keys))

    def close(self) -> None:
        """Finish what is under way, close the tiers."""
        self._closed = True
        for pool in (self._writing, self._reading, self._asking):
            pool.shutdown()
        self._stack.close()

    def _hint(self, key: str, now: float) -> bool | None:
        hint = self._hints.get(key)
        return None if hint is None or hint[1] < now else hint[0]

    def _note(self, keys: Sequence[str], found: Sequence[bool]) -> None:
        now = time.monotonic()
        for key, there in zip(keys, found, strict=True):
            self._hints[key] = (there, now + (FOUND_S if there else MISSED_S))
        while len(self._hints) > MOST_HINTS:
            try:
                self._hints.popitem(last=False)
            except KeyError:  # another thread was faster
                break

    def _stored(self, keys: Sequence[str]) -> list[bytes]:
        return stored_keys(self._salt, self._namespace, [bytes.fromhex(key) for key in keys], self._shard)

    def _ask(self, keys: list[str]) -> None:
        try:
            self._note(keys, self._stack.lookup(self._stored(keys)))
        except KVTransferError as error:
            logger.warning("kvtransfer: tiers can't be asked: %s", error)
            self._note(keys, [False] * len(keys))
        finally:
            self._asked.difference_update(keys)

    def _fetch(self, keys: list[str]) -> None:
        whole = [False] * len(keys)
        try:
            slots = self._slots.slots_of(keys)
            whole = self._stack.get(self._stored(keys), [self._host.record(slot) for slot in slots.tolist()])
        except KVTransferError as error:
            logger.warning("kvtransfer: pages can't be read from the tiers: %s", error)
        finally:
            self._slots.publish([key for key, ok in zip(keys, whole, strict=True) if ok])
            lost = [key for key, ok in zip(keys, whole, strict=True) if not ok]
            self._slots.forget(lost)
            self._note(lost, [False] * len(lost))
            self._slots.release(keys)

    def _sealed(self, key: bytes, slot: int) -> RecordBuffer:
        """The slot's record with its header. Loads may read the slot meanwhile: its digests stay as they are."""
        record, size = self._host.record(slot), self._host.spec.page_bytes
        RecordHeader(
            key,
            self._namespace,
            self._shard,
            "page_first",
            size,
            payload_xxh3=payload_checksum(record.payload[:size]),
            layer_digests=tuple(self._host.digests[slot].tolist()),
        ).encode_into(record.trailer)
        return record

    def _keep(self, keys: list[str]) -> None:
        try:
            stored = self._stored(keys)
            records = [self._sealed(key, slot) for key, slot in zip(stored, self._slots.slots_of(keys), strict=True)]
            self._note(keys, self._stack.put(stored, records))
        except KVTransferError as error:
            logger.warning("kvtransfer: pages can't be written to the tiers: %s", error)
        finally:
            self._slots.release(keys)
