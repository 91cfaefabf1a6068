"""HeadGroupTier: a tier of whole pages of one rank over a shared tier that holds a record for each head group.

Ranks of other tensor-parallel sizes read what this one has written, each exactly its heads (head_groups.py): a page
that is put is cut into the records of the groups that the rank owns, a page that is got is gathered from them. All
sizes must give their pages the same stored keys: the same namespace (of the whole model) and the same shard.

The key of a group's record is ``SHA-256(stored key of the page || shard of the group)``: whoever can't guess the one
can't guess the other.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.ending import Section
from kvtransfer.kernels.errors import ConfigError, KVTransferError, RecordError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import BatchResult, PageStatus, RecordBuffer, Tier
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes
from kvtransfer.tiers.record import RecordHeader, decode, payload_checksum
from kvtransfer.tiers.worker_tier import WorkerTier

_CHUNK_PAGES = 32


class _Stage(NamedTuple):
    """Memory of one call: whole pages, and the records that they are cut into."""

    pages: HostTier
    records: HostTier


class HeadGroupTier(WorkerTier):
    """``inner`` for the rank of ``groups``. Thread-safe. Takes ``inner`` over: closes it with itself.

    workers      calls at a time; each has memory of its own, ``chunk_pages`` pages and as many records as they make
    chunk_pages  most pages with ``inner`` in one batch
    timeout_s    of a batch with ``inner``, where the caller gives no deadline

    Removing a page removes the groups that this rank owns.
    """

    def __init__(
        self,
        inner: Tier,
        groups: HeadGroups,
        *,
        workers: int = 2,
        chunk_pages: int = _CHUNK_PAGES,
        timeout_s: float = 30.0,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if chunk_pages < 1:
            raise ConfigError(f"{inner.name}: chunk_pages: expected at least 1, got {chunk_pages}")
        # The inner tier answers at `timeout_s` at the latest: twice that says that it does not keep its word.
        super().__init__(
            inner.name,
            shared=inner.shared,
            workers=workers,
            job_pages=chunk_pages,
            timeout_s=2 * timeout_s,
            observer=observer,
        )
        self.inner, self.groups = inner, groups
        self._each = len(groups.owned)
        self._shards = [shard.canonical() for shard in groups.shards()]
        self._inner_s = timeout_s
        self._torch = Section()  # a worker cuts and gathers pages there
        self._free: queue.SimpleQueue[_Stage] = queue.SimpleQueue()
        self._stages = [self._make_stage(chunk_pages) for _ in range(workers)]
        for stage in self._stages:
            self._free.put(stage)
        self.start()

    def record_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of the records of each page: page after page, group after group."""
        return [hashlib.sha256(key + shard).digest() for key in keys for shard in self._shards]

    # --- for WorkerTier

    def do_lookup(self, job: Job) -> Outcomes:
        yield from self._told(job, self.inner.lookup(self.record_keys(job.keys)).result())

    def do_remove(self, job: Job) -> Outcomes:
        yield from self._told(job, self.inner.remove(self.record_keys(job.keys)).result())

    def do_pin(self, job: Job) -> Outcomes:
        yield from self._told(job, self.inner.pin(self.record_keys(job.keys), job.ttl_s).result())

    def do_get(self, job: Job) -> Outcomes:
        for places in self._chunks(job):
            with self._stage() as stage:
                count = len(places)
                slots = np.arange(count * self._each)
                buffers = [stage.records.record(slot) for slot in slots.tolist()]
                keys = self.record_keys([job.keys[at] for at in places])
                result = self.inner.get_into(keys, buffers, deadline_s=self._left(job)).result()
                told = list(self._told(job.only(places), result))
                pages = np.arange(count, dtype=np.int64)
                self._torch.call(
                    self.groups.gather, stage.records, slots, stage.pages.layout, [stage.pages.payload], pages
                )
                for at, outcome in zip(places, told, strict=True):
                    if outcome.status is PageStatus.OK:
                        outcome = self._join(stage, outcome.at, job.keys[at], job.buffers[at])
                    yield outcome._replace(at=at)

    def do_put(self, job: Job) -> Outcomes:
        for places in self._chunks(job):
            with self._stage() as stage:
                count, slots = len(places), np.arange(len(places) * self._each)
                for page, at in enumerate(places):
                    stage.pages.record(page).payload[:] = job.buffers[at].payload
                pages = np.arange(count, dtype=np.int64)
                self._torch.call(
                    self.groups.cut, stage.pages.layout, [stage.pages.payload], pages, stage.records, slots
                )
                keys = self.record_keys([job.keys[at] for at in places])
                buffers = [stage.records.record(slot) for slot in slots.tolist()]
                for page, at in enumerate(places):
                    self._seal(decode(job.buffers[at].trailer), keys, buffers, page)
                result = self.inner.put_from(keys, buffers, deadline_s=self._left(job)).result()
                for at, outcome in zip(places, self._told(job.only(places), result), strict=True):
                    yield outcome._replace(at=at)

    def do_usage(self) -> tuple[int, int, int]:
        stats = self.inner.stats()
        return stats.capacity_bytes, stats.used_bytes, stats.pages // self._each

    def do_close(self) -> None:
        for stage in self._stages:
            for memory in self._memory(stage.records):
                with suppress(KVTransferError):  # it may be closed already, or its store away
                    self.inner.unregister(memory)
        self.inner.close(drain=False, timeout_s=self._inner_s)
        for stage in self._stages:
            stage.pages.close()
            stage.records.close()

    # --- inside

    def _make_stage(self, pages: int) -> _Stage:
        made = [
            HostTier(spec, capacity_pages=count, device="cpu", pin=False, name=f"{self.name}-stage")
            for spec, count in ((self.groups.rank_spec, pages), (self.groups.record_spec, pages * self._each))
        ]
        stage = _Stage(*made)
        for memory in self._memory(stage.records):
            self.inner.register(memory)
        return stage

    @staticmethod
    def _memory(host: HostTier) -> list[NDArray[np.uint8]]:
        return [host.rows.reshape(-1), host.trailers.reshape(-1)]

    @contextmanager
    def _stage(self) -> Iterator[_Stage]:
        """Memory for one chunk. There is one for each worker, so nobody waits. ``inner`` is done with it afterwards:
        its handle was waited for."""
        stage = self._free.get()
        try:
            yield stage
        finally:
            self._free.put(stage)

    def _chunks(self, job: Job) -> Iterator[list[int]]:
        """Places of the job, so many as a stage holds at a time."""
        size = self._stages[0].pages.num_slots
        for start in range(0, len(job.keys), size):
            yield list(range(start, min(start + size, len(job.keys))))

    def _left(self, job: Job) -> float:
        """Seconds that ``inner`` may take: the rest of the caller's deadline, or this tier's own."""
        return self._inner_s if job.remaining_s is None else max(1e-3, min(job.remaining_s, self._inner_s))

    def _told(self, job: Job, result: BatchResult) -> Iterator[Outcome]:
        """An outcome a page, of one a record."""
        statuses = self.groups.page_statuses(result.statuses)
        for at, status in enumerate(statuses):
            records = range(at * self._each, (at + 1) * self._each)
            error = next((result.errors[r] for r in records if r in result.errors), None)
            bytes_ = self.groups.record_spec.page_bytes * self._each if status is PageStatus.OK else 0
            yield Outcome(at, status, error, bytes_ if job.buffers else 0)

    def _seal(self, header: RecordHeader, keys: list[bytes], buffers: list[RecordBuffer], page: int) -> None:
        """Headers of the page's records: what ``header`` says of the whole page, with their own keys and bytes."""
        length = self.groups.record_spec.page_bytes
        for n, shard in enumerate(self.groups.shards()):
            at = page * self._each + n
            payload, trailer = buffers[at]
            payload[length:] = 0
            replace(
                header,
                stored_key=keys[at],
                shard=shard,
                payload_bytes=length,
                payload_xxh3=payload_checksum(payload[:length]),
                layer_digests=None,  # those of the page are of other bytes
            ).encode_into(trailer)

    def _join(self, stage: _Stage, page: int, key: bytes, buffer: RecordBuffer) -> Outcome:
        """The gathered page and a header into the caller's memory; CORRUPT unless its records belong together."""
        spec = self.groups.rank_spec
        payload = stage.pages.record(page).payload
        try:
            headers = [stage.records.header(page * self._each + n) for n in range(self._each)]
            first = headers[0]
            for header, shard in zip(headers, self.groups.shards(), strict=True):
                header.require(
                    namespace=first.namespace, layout_id=first.layout_id, tokens=first.tokens or b"", shard=shard
                )
        except RecordError as error:
            return Outcome(page, PageStatus.CORRUPT, error)
        payload[spec.page_bytes :] = 0
        buffer.payload[:] = payload
        body = payload[: spec.page_bytes]
        layers = self.groups.layers
        replace(
            first,
            stored_key=key,
            shard=replace(first.shard, layer_start=layers[0], layer_stop=layers[1], head_part=0, head_parts=1),
            payload_bytes=spec.page_bytes,
            payload_xxh3=payload_checksum(body),
            layer_digests=tuple(page_digests(body[None], spec)[0].tolist()),
        ).encode_into(buffer.trailer)
        return Outcome(page, PageStatus.OK, None, spec.page_bytes)
