"""MooncakeTier: records in a Mooncake Store, the distributed memory pool, through its own client.

Payloads and trailers move straight between registered memory and the store's segments, a record as two buffers.
The package is ``mooncake-transfer-engine`` or its ``-non-cuda`` build (extra ``mooncake`` names the former).
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Event
from kvtransfer.kernels.ending import Guarded, Section
from kvtransfer.kernels.errors import ConfigError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, HeardOut, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes
from kvtransfer.tiers.mooncake_records import MooncakeRecords
from kvtransfer.tiers.record import BLOCK_BYTES
from kvtransfer.tiers.registered import address_range
from kvtransfer.tiers.worker_tier import WorkerTier

# The client's codes, mooncake-store/include/types.h.
_NO_SPACE, _BAD_SIZE = -200, -600
_NOT_READY, _NOT_FOUND, _EXISTS, _LEASE_EXPIRED, _GONE = -703, -704, -705, -707, -712
_TRANSFER_FAILED, _RPC = -800, -900
_BOUNCED_BYTES = 128 << 10
_MISSES = (_NOT_READY, _NOT_FOUND, _LEASE_EXPIRED, _GONE)


class MooncakeTier(WorkerTier):
    """Records as objects ``<prefix>:<stored key in hex>``. Thread-safe. Buffers must be registered (`register`).

    A page that was evicted, or whose lease ran out while it was read, is a miss; where no segment has room a put is
    NO_ROOM. A dead master, or a dead owner of a segment, costs one time-out; then the tier is left alone until the
    master answers, and what failed can be read again or is known to be lost. A call inside the client can't be
    interrupted: after a time-out its pages keep their buffers until it returns (30 s for an owner that hangs).

    `lookup` asks the master whether an object exists, which makes it un-evictable for one lease. `pin` does
    that over and over: it holds while this process lives and the master answers. `remove` does not wait for leases.

    The client's process LISTENS ON ALL INTERFACES, with no authentication: docs/tiers.md says what to do about it.

    Args:
        master: "host:port" of the master, or what its client takes for a highly available one ("etcd://...").
        hostname: this host's name or address, as other clients reach it.
        metadata: "P2PHANDSHAKE", or the address of a metadata server.
        protocol: "tcp" or "rdma". devices: names of the RDMA devices, separated by commas, passed through.
        segment_bytes: memory that this process gives to the pool (0: none). local_buffer_bytes: of the client.
        replicas: of each object.
        bounce_bytes: records up to this length go as one piece, over memory of the tier's own (``job_pages`` of them a
            worker); see mooncake_records.py. None: 128 KiB over TCP, 0 (never) by RDMA.
        lease_s: the master's ``default_kv_lease_ttl``, or less: pins are renewed three times in it.
        timeout_s: a call that takes longer means that the store has stalled.
        store: a client that is set up already, instead of one of the tier's own; whoever made it closes it, after
            the tier. ``hostname`` to ``local_buffer_bytes`` mean nothing then.

    Raises ConfigError on settings that make no sense. An absent master is no error.
    """

    def __init__(
        self,
        master: str,
        *,
        hostname: str = "",
        name: str = "mooncake",
        prefix: str = "kvtransfer",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int = 0,
        local_buffer_bytes: int = 0,
        replicas: int = 1,
        bounce_bytes: int | None = None,
        lease_s: float = 5.0,
        timeout_s: float = 5.0,
        workers: int = 2,
        job_pages: int = 128,
        store: MooncakeDistributedStore | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f'{name}: protocol: expected "tcp" or "rdma", got {protocol!r}')
        if bounce_bytes is None:
            bounce_bytes = _BOUNCED_BYTES if protocol == "tcp" else 0
        if segment_bytes < 0 or local_buffer_bytes < 0 or bounce_bytes < 0 or replicas < 1 or not lease_s > 0:
            raise ConfigError(
                f"{name}: expected sizes of 0 or more, 1 or more replicas and a lease above 0, got {segment_bytes}, "
                f"{local_buffer_bytes} and {bounce_bytes}, {replicas} and {lease_s}"
            )
        if store is None and not hostname:
            raise ConfigError(f"{name}: hostname: expected this host's name as other clients reach it, got none")
        observer = HeardOut(observer)
        self._address = _host_and_port(name, master)
        self._setup = (hostname, metadata, segment_bytes, local_buffer_bytes, protocol, devices, master)
        self._prefix = prefix + ":"
        self._lease_s = lease_s
        self._connect_s = timeout_s
        self._config = ReplicateConfig()
        self._config.replica_num = replicas
        self._own_store = store is None
        # Its binding takes Python's lock back in C++, on the workers' threads.
        self._store: Any = Guarded(MooncakeDistributedStore() if store is None else store, Section(TierError))
        self._records = MooncakeRecords(
            self._store, self._config, bounce_bytes, job_pages, self._ready, lambda why: observer.fell_back(name, why)
        )
        self._connected = store is not None
        self._closed = False
        self._changing = threading.Lock()  # held while the client is set up, probed or closed
        self._suspect: tuple[str, int] | None = None  # an object that could not be read, and its length
        self._put_failed = False
        self._renewing: threading.Thread | None = None
        self._over = Event()
        super().__init__(
            name,
            shared=True,
            workers=workers,
            job_pages=job_pages,
            spread=False,
            timeout_s=timeout_s,
            needs_registration=True,
            observer=observer,
        )
        self.start()

    # --- jobs

    def do_lookup(self, job: Job) -> Outcomes:
        found = self._exist(self._names(job.keys))
        return [Outcome(at, PageStatus.OK if there else PageStatus.MISS) for at, there in enumerate(found)]

    def do_get(self, job: Job) -> Outcomes:
        names = self._names(job.keys)
        sizes = job.parts.sizes.sum(axis=1).tolist()
        failed: TierError | None = None
        for places, codes, good in self._records.get(names, job):
            outcomes: list[Outcome] = []
            for at, code, checked in zip(places, codes, good, strict=True):
                if code == sizes[at]:
                    outcomes.append(Outcome(at, PageStatus.OK, None, code, bool(checked)))
                    continue
                outcome = self._not_got(at, code, names[at], sizes[at])
                if isinstance(outcome.error, UnavailableError):
                    failed = outcome.error
                outcomes.append(outcome)
            yield outcomes
        if failed is not None:
            raise failed

    def _not_got(self, at: int, code: int, name: str, record_bytes: int) -> Outcome:
        """What a code that is not the record's length says."""
        if code in _MISSES:
            return Outcome(at, PageStatus.MISS)
        if code not in (_BAD_SIZE, _TRANSFER_FAILED) and code < 0:
            return Outcome(at, PageStatus.ERROR, self._error("get", code))
        # The client says "transfer failed", too, where the object is shorter than the buffers.
        size = self._store.get_size(name)
        if size >= 0 and size != record_bytes:
            error = TierError(f"{self.name}: expected a record of {record_bytes} bytes, got {size}")
            return Outcome(at, PageStatus.CORRUPT, error)
        if size in _MISSES:
            return Outcome(at, PageStatus.MISS)
        self._suspect = (name, record_bytes)
        return Outcome(at, PageStatus.ERROR, self._gone("get", code))

    def do_put(self, job: Job) -> Outcomes:
        names = self._names(job.keys)
        found = self._exist(names)  # the client would not tell, and would send the bytes
        fresh = [at for at, there in enumerate(found) if not there]
        for at, there in enumerate(found):
            if there:
                yield Outcome(at, PageStatus.OK)
        if not fresh:
            return
        failed: TierError | None = None
        for at, code in zip(fresh, self._records.put([names[at] for at in fresh], job.parts.only(fresh)), strict=True):
            if code in (0, _EXISTS):
                yield Outcome(at, PageStatus.OK, moved_bytes=0 if code else _record_bytes(job.buffers[at]))
            elif code == _NO_SPACE:
                yield Outcome(at, PageStatus.NO_ROOM, self._error("put", code))
            else:
                error = self._error("put", code)
                if isinstance(error, UnavailableError):
                    failed = error
                    self._put_failed = self._put_failed or code == _TRANSFER_FAILED
                yield Outcome(at, PageStatus.ERROR, error)
        if failed is not None:
            raise failed

    def do_remove(self, job: Job) -> Outcomes:
        # A lease is no reason to keep a page: whoever reads it now verifies what he gets.
        codes = self._store.batch_remove(self._names(job.keys), True)
        for at, code in enumerate(codes):
            if code in _MISSES or code == 0:
                yield Outcome(at, PageStatus.OK if code == 0 else PageStatus.MISS)
            else:
                error = self._error("remove", code)
                if isinstance(error, UnavailableError):
                    raise error
                yield Outcome(at, PageStatus.ERROR, error)

    def do_pin(self, job: Job) -> Outcomes:
        outcomes = list(self.do_lookup(job))  # that alone is a lease
        with self._changing:
            if self._renewing is None and not self._closed:
                self._renewing = threading.Thread(target=self._renew, name=f"{self.name}-pins", daemon=True)
                self._renewing.start()
        return outcomes

    def do_register(self, memory: NDArray[np.uint8]) -> None:
        with self._changing:
            if self._connected:  # else when it is
                self._register(memory)

    def do_unregister(self, memory: NDArray[np.uint8]) -> None:
        with self._changing:
            if self._connected and not self._closed:
                self._store.unregister_buffer(address_range(memory)[0])

    def do_probe(self) -> None:
        with self._changing:
            if self._closed:
                return
            if not self._connected:
                self._connect()
            self._exist([self._prefix + "probe"])
            self._try_again()

    def do_close(self) -> None:
        self._over.set()
        if self._renewing is not None:
            self._renewing.join()
        with self._changing:
            self._closed = True
            if self._connected:
                for memory in [*self.registered.regions(), *self._records.memory()]:
                    self._store.unregister_buffer(address_range(memory)[0])
                if self._own_store:
                    self._store.close()  # any call after this one ends the process

    # --- inside

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _ready(self, memory: NDArray[np.uint8]) -> bool:
        """Tell the client of memory of the tier's own, if it is set up. Raises TierError where it refuses."""
        with self._changing:
            if not self._connected or self._closed:
                return False
            self._register(memory)
            return True

    def _connect(self) -> None:
        """Set the client up. It would try for 90 s to reach a master that is not there, so look first."""
        if self._address is not None:
            socket.create_connection(self._address, timeout=self._connect_s).close()
        code = self._store.setup(*self._setup)
        if code != 0:
            raise UnavailableError(f"{self.name}: the client could not be set up: code {code}")
        self._connected = True
        for memory in self.registered.regions():
            self._register(memory)

    def _register(self, memory: NDArray[np.uint8]) -> None:
        start, stop = address_range(memory)
        code = self._store.register_buffer(start, stop - start)
        if code != 0:
            raise TierError(
                f"{self.name}: register: the client refused {stop - start} bytes at {start:#x}: code {code}"
            )

    def _exist(self, names: list[str]) -> list[bool]:
        codes = self._store.batch_is_exist(names)
        for code in codes:
            if code < 0:
                raise self._error("exist", code)
        return [code == 1 for code in codes]

    def _try_again(self) -> None:
        """Do what failed once more: the master may answer while the owner of a segment is gone."""
        if self._suspect is None and not self._put_failed:
            return
        name, size = self._suspect or ("", BLOCK_BYTES)
        scratch = np.zeros(size, dtype=np.uint8)
        address = address_range(scratch)[0]
        self._register(scratch)
        try:
            if self._suspect is not None:
                code = self._store.get_into(name, address, size)
                if code < 0 and code not in _MISSES:
                    raise self._gone("get", code)
                self._suspect = None
            if self._put_failed:
                canary = f"{self._prefix}canary-{secrets.token_hex(8)}"
                code = self._store.put_from(canary, address, BLOCK_BYTES)
                if code not in (0, _NO_SPACE):
                    raise self._gone("put", code)
                self._store.remove(canary, True)
                self._put_failed = False
        finally:
            self._store.unregister_buffer(address)

    def _renew(self) -> None:
        """Keep the leases of what is pinned."""
        while not self._over.wait(self._lease_s / 3):
            held = self.pins.keys()
            if held and self.health.up:
                try:
                    codes = self._store.batch_is_exist(self._names(held))
                except TierError:  # the interpreter ends
                    return
                for key, code in zip(held, codes, strict=True):
                    if code == 0:
                        self.pins.forget(key)
                        self.book.count("pins_lost")

    def _gone(self, verb: str, code: int) -> UnavailableError:
        return UnavailableError(f"{self.name}: {verb}: the owner of a segment does not answer: code {code}")

    def _error(self, verb: str, code: int) -> TierError:
        if code == _TRANSFER_FAILED:
            return self._gone(verb, code)
        if code <= _RPC:
            return UnavailableError(f"{self.name}: {verb}: the master does not answer: code {code}")
        why = "no segment has room" if code == _NO_SPACE else "refused"
        return TierError(f"{self.name}: {verb}: {why}: code {code}")


def _record_bytes(buffer: RecordBuffer) -> int:
    return buffer.payload.size + buffer.trailer.size


def _host_and_port(name: str, master: str) -> tuple[str, int] | None:
    """Of a plain address; None where the client resolves it in its own way."""
    if "://" in master:
        return None
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'{name}: master: expected "host:port", got {master!r}')
    return host, int(port)
