"""Slab: the memory of a host tier. One mapping with two regions, which is touched and pinned, or given back, by chunks.

The payload region holds all payloads back to back, the trailer region all trailers. What the bytes mean,
and who owns which slot, is host.py's matter.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import CapacityError, CudaError, TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.memory import HugePages, Mapping
from kvtransfer.tiers.pinning import Chunk, Registrar, Registrations, plan_chunks

_BACKGROUND_STEP_BYTES = 1 << 30  # a step of some 0.3 s (measured: touch and register 0.26-0.28 s/GiB, 8 threads)
_DEFAULT_THREADS = 8  # with eight threads 0.26 s/GiB, with one 0.85


class Slab:
    """Memory for ``num_slots`` records: payloads of ``slot_bytes`` each, then trailers of ``trailer_bytes`` each.

    Args:
        registrar: pins it chunk by chunk; None leaves it pageable.
        node: NUMA node that the memory should come from, or None.
        fd, shared: ``fd`` attaches another process's memfd; ``shared`` makes one; neither: anonymous memory.
        background: grow in a thread. A failure is raised by `check` and `wait_ready`, or else by `close`.
        first_slots: have memory at first; the others have addresses only, until `grow`. None: all of them.

    Attributes:
        payload: uint8 tensor ``[num_slots * slot_bytes]``. trailers: uint8 ``[num_slots, trailer_bytes]``. Both
            are None once closed. address: of the first payload byte (the device's: plus `device_shift`).
        ready_slots: slots that are touched and registered.
        goal_slots: what it grows to by itself, and what `grow` and `shrink` set.
        chunk_slots, trailer_chunk_slots: int64, the first slot of every registered chunk of that region but its
            first: no copy may cross one.

    Raises CapacityError where the system has no room, CudaError where pinning fails: all is undone then.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        trailer_bytes: int,
        *,
        registrar: Registrar | None = None,
        node: int | None = None,
        shared: bool = False,
        fd: int | None = None,
        huge_pages: HugePages = True,
        threads: int | None = None,
        background: bool = False,
        chunk_bytes: int = 64 << 30,
        first_slots: int | None = None,
        name: str = "slab",
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.num_slots = num_slots
        self.goal_slots = num_slots if first_slots is None else first_slots
        self.name = name
        self.ready_slots = 0
        self._observer = observer
        self._node = node
        self._threads = threads or min(_DEFAULT_THREADS, len(os.sched_getaffinity(0)))
        self._touches = fd is None  # attached memory is the maker's to touch
        self._changed = Condition()
        self._failure: BaseException | None = None
        self._failure_seen = False
        self._stop = False
        self._thread: threading.Thread | None = None

        step_bytes = min(chunk_bytes, max(_BACKGROUND_STEP_BYTES, slot_bytes)) if background else chunk_bytes
        trailers_at = -(-num_slots * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        payload = self._cut(slot_bytes, step_bytes, 0)
        with_them = payload[0].stop * trailer_bytes if background else chunk_bytes  # no slot waits for others' trailers
        trailers = self._cut(trailer_bytes, min(with_them, chunk_bytes), trailers_at)
        self.chunk_slots: NDArray[np.int64] = np.array([c.first for c in payload[1:]], dtype=np.int64)
        self.trailer_chunk_slots: NDArray[np.int64] = np.array([c.first for c in trailers[1:]], dtype=np.int64)
        self._chunks = list(_in_turn(trailers, payload))
        self._payload_chunks = set(payload)
        self._there: set[Chunk] = set()  # touched and registered

        nbytes = trailers_at + num_slots * trailer_bytes
        if fd is None:
            self._mapping = Mapping(
                nbytes, shared=shared, huge=huge_pages, whole=self.goal_slots == num_slots, name=name
            )
        else:
            self._mapping = Mapping.attached(fd, nbytes)
        self.address = self._mapping.address
        view = self._mapping.bytes
        assert view is not None
        # Not taken from the tensor: who drops the last of such views frees a tensor, in C++ and without the interpreter
        # lock, which on a tier's thread is slow, and at the end of the interpreter ends the process.
        self.rows: NDArray[np.uint8] | None = view[: num_slots * slot_bytes].reshape(num_slots, slot_bytes)
        self.payload: torch.Tensor | None = torch.from_numpy(view[: num_slots * slot_bytes])
        self.trailers: NDArray[np.uint8] | None = view[trailers_at:nbytes].reshape(num_slots, trailer_bytes)
        del view
        self._registrations: Registrations | None = None
        if registrar is not None:
            self._registrations = Registrations(registrar)
            finalizer = weakref.finalize(self, self._registrations.release)  # dropped without close()
            finalizer.atexit = False  # at exit the driver goes too, and the system unpins everything
        if background:
            self._thread = threading.Thread(target=self._grow_behind, name=f"{name}-grow", daemon=True)
            self._thread.start()
        else:
            try:
                self._grow()
            except BaseException:
                self._release()
                raise

    def _cut(self, stride_bytes: int, chunk_bytes: int, offset: int) -> list[Chunk]:
        """Chunks of one region, cut where the first slots end: the others need no memory yet."""
        first, more = self.goal_slots, self.num_slots - self.goal_slots
        chunks = plan_chunks(first, stride_bytes, chunk_bytes, offset=offset)
        if more:
            behind = plan_chunks(more, stride_bytes, chunk_bytes, offset=offset + first * stride_bytes)
            chunks += [Chunk(c.offset, c.nbytes, c.first + first, c.stop + first) for c in behind]
        return chunks

    @property
    def fd(self) -> int:
        """The memfd's descriptor, or -1."""
        return self._mapping.fd

    def device_shift(self) -> int:
        """What a device adds to a host address: 0 where addressing is unified, or nothing is pinned."""
        return 0 if self._registrations is None else self._registrations.shift()

    def check(self) -> None:
        """Raise TierError (CapacityError where memory ran out) if growing failed."""
        if self._failure is not None:
            self._failure_seen = True
            kind = CapacityError if isinstance(self._failure, CapacityError) else TierError
            text = f"{self.name}: growing stopped at {self.ready_slots} of {self.goal_slots} slots: {self._failure}"
            raise kind(text) from self._failure

    def wait_ready(self, slots: int, timeout_s: float | None) -> bool:
        """Wait until ``slots`` are ready; False when the time is up. Raises as `check` does, and when closed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self.ready_slots < slots:
                self.check()
                if self._stop:
                    raise TierError(f"{self.name}: closed while waiting for {slots} slots")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """Stop growing, unregister (the last chunk first), unmap. The caller knows that no copy is in flight.

        Raises what unregistering met, or a failed growth that nobody has seen yet, after all is released.
        Views that somebody holds stay readable: the memory goes when the last one does.
        """
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._release()
        if not self._failure_seen:
            self.check()

    def parts(self, first: int = 0) -> list[NDArray[np.uint8]]:
        """The chunks that have memory, or get it by themselves, and hold no slot below ``first``, as flat views."""
        view = self._mapping.bytes
        if view is None:
            raise TierError(f"{self.name}: closed")
        wanted = [c for c in self._chunks if c.first >= first and (c in self._there or c.first < self.goal_slots)]
        return [view[c.offset : c.offset + c.nbytes] for c in wanted]

    def shrink(self, slots: int) -> int:
        """Keep the first ``slots``; unregister and give back the chunks that hold only others. How many bytes that was.

        One thread at a time, with `grow`, and not while the slab grows by itself; the caller knows that nobody uses the
        others. What has a slot below ``slots`` stays, so of a long chunk much may stay: `grow` has less to do then.
        Raises the first CudaError of unregistering, after all is done.
        """
        self.goal_slots = self.ready_slots = slots
        going = [chunk for chunk in self._chunks if chunk.first >= slots and chunk in self._there]
        given, failure = self._let_go(going)
        if failure is not None:
            raise failure
        return given

    def _let_go(self, chunks: list[Chunk]) -> tuple[int, CudaError | None]:
        """Unregister and give back, the last one first: bytes, and the first failure."""
        failure: CudaError | None = None
        given = 0
        for chunk in reversed(chunks):
            self._there.discard(chunk)
            try:
                if self._registrations is not None:
                    self._registrations.drop(self.address + chunk.offset)
            except CudaError as error:
                failure = failure or error
                continue  # still pinned, perhaps: then its memory must stay what it is
            if self._touches:
                self._mapping.give_back(chunk.offset, chunk.nbytes, self._observer)
            given += chunk.nbytes
        return given, failure

    def grow(self, slots: int) -> None:
        """Have the first ``slots`` ready, in the caller's thread. New memory is zeros.

        Raises CapacityError where memory runs out, CudaError where pinning fails: what was begun is undone then.
        """
        if slots <= self.ready_slots:
            return
        before, had = self.ready_slots, set(self._there)
        self.goal_slots = slots
        try:
            self._grow()
        except BaseException:
            self.goal_slots = self.ready_slots = before
            self._let_go([c for c in self._chunks if c.first < slots and c not in had])  # one may be touched only
            raise

    def _grow_behind(self) -> None:
        try:
            self._grow()
        except BaseException as error:  # kept, and raised by whoever asks next
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _grow(self) -> None:
        """Touch and register chunk by chunk, each payload chunk behind the trailers of its slots, up to the goal."""
        for number, chunk in enumerate(self._chunks):
            if self._stop:
                return
            if chunk.first >= self.goal_slots:
                continue
            if chunk not in self._there:
                self._make(number, chunk)
            if chunk in self._payload_chunks and chunk.stop > self.ready_slots:
                with self._changed:
                    self.ready_slots = min(chunk.stop, self.goal_slots)
                    self._changed.notify_all()
                self._observer.noted(
                    "host.ready", name=self.name, ready_slots=self.ready_slots, num_slots=self.num_slots
                )

    def _make(self, number: int, chunk: Chunk) -> None:
        if self._touches:
            self._mapping.populate(
                chunk.offset, chunk.nbytes, threads=self._threads, node=self._node, observer=self._observer
            )
        if self._registrations is not None:
            try:
                self._registrations.add(self.address + chunk.offset, chunk.nbytes)
            except CudaError as error:
                total = len(self._chunks)
                text = f"{self.name}: pinning chunk {number + 1} of {total} ({chunk.nbytes} bytes) failed: {error}"
                raise CudaError(text, error.code) from error
        self._there.add(chunk)

    def _release(self) -> None:
        """Unregister in reverse, then unmap."""
        try:
            if self._registrations is not None:
                self._registrations.release()
        finally:
            self.payload = self.rows = self.trailers = None
            if not self._mapping.close():
                self._observer.noted("host.views_alive", name=self.name, nbytes=self._mapping.nbytes)


def _in_turn(trailers: list[Chunk], payload: list[Chunk]) -> Iterator[Chunk]:
    """Chunks in the order in which they are made: those of the trailers that a payload chunk needs, then it."""
    left = deque(trailers)
    for chunk in payload:
        while left and left[0].first < chunk.stop:
            yield left.popleft()
        yield chunk
