"""The io_uring engine: one thread that keeps a ring full, and hands back what is done.

A record in registered memory is two fixed reads or writes, payload and trailer, next to each other on the device, which
merges them: half the CPU of one vectored call at 1 MiB (0.024 against 0.05 s/GB), the same at 64 KiB. Other memory goes
as one vectored call a record.

Beside a busy Python thread every return of the interpreter lock costs up to 5 ms, so the thread gives it up only to wait
for a quarter of what is in flight: the device works through the rest meanwhile.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.io import MAX_TRIES, RETRIED, SHORT, Transfer, address
from kvtransfer.tiers.uring import FIXED_FILE, READ_FIXED, READV, SQE, WRITE_FIXED, WRITEV, Kernel, Ring

DEPTH = 128  # records in flight: fio's best here was 32, and a quarter of these must outlast 5 ms without the lock
IN_FLIGHT_BYTES = 32 << 20
CHUNK_BYTES = 1 << 30  # the kernel registers no more in one piece
_FILES, _BUFFERS = 256, 4096
_NOTICE_S = 0.1  # how long a wait may keep a command from being seen


class UringEngine:
    """See the module. Thread-safe. Raises OSError where io_uring is refused: nothing is left behind.

    ``kernel`` stands in for the system calls.
    """

    kind = "io_uring"

    def __init__(self, name: str = "disk", *, observer: Observer = NO_OBSERVER, kernel: Kernel | None = None) -> None:
        self._name, self._observer, self._kernel = name, observer, kernel
        self._changed = threading.Condition()
        self._commands: deque[Callable[[Ring], None]] = deque()
        self._queue: deque[tuple[Transfer, list[int]]] = deque()
        self._closing = False
        self._failed: BaseException | None = None
        self._fds: dict[int, int] = {}  # number -> what entries name: a place in the ring's table, or a descriptor
        self._in_table: set[int] = set()
        self._next_file = 0
        self._memory: dict[int, list[int]] = {}  # address of registered memory -> its places
        self._chunks: list[tuple[int, int, int]] = []  # start, stop, place; sorted
        self._starts = np.empty(0, dtype=np.uint64)
        self._stops = np.empty(0, dtype=np.uint64)
        self._places = np.empty(0, dtype=np.uint16)
        self._free_places = list(range(_BUFFERS - 1, -1, -1))
        self._told = False
        self._slots_free = list(range(DEPTH))
        self._slots: list[tuple[Transfer, int] | None] = [None] * DEPTH
        self._vectors = np.zeros((DEPTH, 4), dtype=np.uint64)
        self._sent = np.zeros((DEPTH, 2), dtype=SQE)
        self._expected = np.zeros((DEPTH, 2), dtype=np.int64)
        self._left = np.zeros(DEPTH, dtype=np.int64)  # entries of a record that are in flight
        self._error = np.zeros(DEPTH, dtype=np.int64)
        self._tries = np.zeros(DEPTH, dtype=np.int64)
        self._bytes = 0
        started: list[OSError | None] = []
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started, ready), name=f"{name}-io", daemon=True)
        self._thread.start()
        ready.wait()
        if started[0] is not None:
            self._thread.join()
            raise started[0]

    # --- any thread

    def add_file(self, fd: int) -> int:
        with self._changed:
            number = self._next_file
            self._next_file += 1
            self._fds[number] = fd
            if (place := number) < _FILES:  # numbers grow by one a file: later ones go by descriptor

                def put(ring: Ring) -> None:
                    try:
                        ring.set_file(place, fd)
                    except OSError:
                        return  # the descriptor serves as well
                    self._fds[number] = place
                    self._in_table.add(number)

                self._commands.append(put)
        return number

    def drop_file(self, number: int) -> None:
        def drop(ring: Ring) -> None:
            place = self._fds.pop(number)
            if number in self._in_table:
                self._in_table.discard(number)
                ring.set_file(place, -1)

        self._call(drop)

    def submit(self, transfer: Transfer) -> None:
        with self._changed:
            if self._closing or self._failed is not None:
                raise TierError(f"{self._name}: I/O has ended{'' if self._failed is None else f': {self._failed}'}")
            self._queue.append((transfer, list(range(len(transfer.buffers)))))
            self._changed.notify()

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        kept: list[bool] = []
        self._call(lambda ring: kept.append(self._register(ring, memory, step_bytes)))
        return bool(kept and kept[0])

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        self._call(lambda ring: self._unregister(ring, address(memory)))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, command: Callable[[Ring], None]) -> None:
        """Run ``command`` on the ring's thread, and wait for it."""
        done = threading.Event()

        def run(ring: Ring) -> None:
            try:
                command(ring)
            finally:
                done.set()

        with self._changed:
            if self._failed is not None or not self._thread.is_alive():
                return
            self._commands.append(run)
            self._changed.notify()
        while not done.wait(_NOTICE_S):
            if not self._thread.is_alive():
                return

    # --- the ring's thread

    def _run(self, started: list[OSError | None], ready: threading.Event) -> None:
        try:
            ring = Ring(2 * DEPTH, files=_FILES, buffers=_BUFFERS, kernel=self._kernel)
        except OSError as error:
            started.append(error)
            ready.set()
            return
        started.append(None)
        ready.set()
        try:
            self._loop(ring)
        except BaseException as error:
            with self._changed:
                self._failed = error
            ring.close()  # first: the kernel lets go of the buffers
            self._abandon(errno.EIO)
            raise  # never expected: the thread's hook prints it
        ring.close()

    def _loop(self, ring: Ring) -> None:
        while True:
            with self._changed:
                while not (self._commands or self._queue or self._bytes or self._closing):
                    self._changed.wait()
            while self._commands:
                self._commands.popleft()(ring)
            finished = self._reap(ring)
            self._fill(ring)
            if finished:
                if ring.unsubmitted:
                    ring.enter()  # the device goes on while the tier looks at what came
                self._deliver(finished)
            elif self._bytes:
                in_flight = int(self._left.sum())
                ring.enter(max(1, in_flight // 4), _NOTICE_S)
            elif self._closing and not self._queue:
                return

    def _fill(self, ring: Ring) -> None:
        """Start what there is room for."""
        while self._queue and self._slots_free:
            transfer, waiting = self._queue[0]
            each = sum(part.size for part in transfer.buffers[waiting[0]])
            room = min(len(self._slots_free), max(1, (IN_FLIGHT_BYTES - self._bytes) // each))
            if self._bytes and self._bytes + each > IN_FLIGHT_BYTES:
                return
            now = waiting[:room]
            del waiting[:room]
            if not waiting:
                self._queue.popleft()
            started = _guarded(transfer.start, now) or []
            if started:
                ring.push(self._entries(transfer, started))

    def _entries(self, transfer: Transfer, started: list[int]) -> NDArray[Any]:
        """Entries for ``started``, each with a place of its own in the books."""
        count = len(started)
        slots = np.array([self._slots_free.pop() for _ in started])
        for slot, position in zip(slots.tolist(), started, strict=True):
            self._slots[slot] = (transfer, position)
        parts = [transfer.buffers[p] for p in started]
        where = np.array([(address(b.payload), address(b.trailer)) for b in parts], dtype=np.uint64)
        sizes = np.array([(b.payload.size, b.trailer.size) for b in parts], dtype=np.uint64)
        files = [transfer.files[p] for p in started]
        entries = np.zeros((count, 2), dtype=SQE)
        entries["fd"] = np.array([self._fds[f] for f in files])[:, None]
        entries["flags"] = np.array([FIXED_FILE if f in self._in_table else 0 for f in files])[:, None]
        entries["offset"][:, 0] = transfer.offsets[started]
        entries["offset"][:, 1] = entries["offset"][:, 0] + sizes[:, 0]
        entries["user_data"] = 2 * slots[:, None] + np.arange(2)
        places, fixed = self._places_of(where, sizes)
        entries["opcode"] = WRITE_FIXED if transfer.write else READ_FIXED
        entries["address"], entries["length"], entries["buffer"] = where, sizes, places
        loose = np.flatnonzero(~fixed)
        if loose.size:
            rows = slots[loose]
            self._vectors[rows] = np.stack((where[loose], sizes[loose]), axis=2).reshape(-1, 4)
            entries["opcode"][loose, 0] = WRITEV if transfer.write else READV
            entries["address"][loose, 0] = address(self._vectors.view(np.uint8).reshape(-1)) + 32 * rows
            entries["length"][loose, 0], entries["buffer"][loose] = 2, 0
        self._sent[slots] = entries
        self._expected[slots] = sizes
        self._expected[slots[loose], 0] += sizes[loose, 1].astype(np.int64)
        self._left[slots] = np.where(fixed, 2, 1)
        self._error[slots] = self._tries[slots] = 0
        self._bytes += int(sizes.sum())
        kept = np.ones((count, 2), dtype=np.bool_)
        kept[loose, 1] = False
        return entries[kept]

    def _places_of(
        self, where: NDArray[np.uint64], sizes: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
        """The place in the buffer table of each part, and for each record whether both parts have one."""
        if not self._starts.size:
            return np.zeros(where.shape, dtype=np.uint16), np.zeros(len(where), dtype=np.bool_)
        at = np.searchsorted(self._starts, where, side="right") - 1
        inside = (at >= 0) & (where + sizes <= self._stops[at])
        return self._places[at], np.logical_and(inside[:, 0], inside[:, 1])

    def _reap(self, ring: Ring) -> dict[int, tuple[Transfer, list[int], list[int]]]:
        """What is done, by transfer. Short and interrupted ones are sent again."""
        finished: dict[int, tuple[Transfer, list[int], list[int]]] = {}
        if not ring.ready():
            return finished
        done = ring.take()
        slots, parts = np.divmod(done["user_data"].astype(np.int64), 2)
        results = done["result"].astype(np.int64)
        np.subtract.at(self._left, slots, 1)
        for i in np.flatnonzero(results != self._expected[slots, parts]).tolist():
            slot, part, result = int(slots[i]), int(parts[i]), int(results[i])
            self._tries[slot] += 1
            if (result >= 0 or -result in RETRIED) and self._tries[slot] < MAX_TRIES:
                ring.push(self._sent[slot, part : part + 1])
                self._left[slot] += 1
            else:
                self._error[slot] = -result if result < 0 else SHORT
        for slot in dict.fromkeys(slots[self._left[slots] == 0].tolist()):
            entry = self._slots[slot]
            assert entry is not None
            transfer, position = entry
            self._slots[slot] = None
            self._slots_free.append(slot)
            self._bytes -= sum(part.size for part in transfer.buffers[position])
            _, positions, errors = finished.setdefault(id(transfer), (transfer, [], []))
            positions.append(position)
            errors.append(int(self._error[slot]))
        return finished

    def _deliver(self, finished: dict[int, tuple[Transfer, list[int], list[int]]]) -> None:
        for transfer, positions, errors in finished.values():
            _guarded(transfer.finish, positions, errors)

    def _abandon(self, code: int) -> None:
        """Tell everybody that it failed."""
        for entry in [e for e in self._slots if e is not None]:
            _guarded(entry[0].finish, [entry[1]], [code])
        while self._queue:
            transfer, waiting = self._queue.popleft()
            started = _guarded(transfer.start, waiting) or []
            _guarded(transfer.finish, started, [code] * len(started))

    def _register(self, ring: Ring, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        step = max(1, CHUNK_BYTES // step_bytes) * step_bytes
        start, stop = address(memory), address(memory) + memory.size
        chunks = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        places: list[int] = []
        why = ring.buffers_refused
        if not why and len(chunks) > len(self._free_places):
            why = f"expected at most {len(self._free_places)} chunks, got {len(chunks)}"
        if not why and step_bytes > CHUNK_BYTES:
            why = f"expected records of at most {CHUNK_BYTES} bytes, got {step_bytes}"
        try:
            for at, end in [] if why else chunks:
                ring.set_buffer(self._free_places[-1], at, end - at)
                places.append(self._free_places.pop())
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)} (the memlock limit is charged for registered memory)"
        if why:
            for place in places:
                ring.set_buffer(place, 0, 0)
            self._free_places += places
            if not self._told:
                self._told = True
                self._observer.fell_back("registered buffers", f"{self._name}: memory is mapped at each call: {why}")
            return False
        self._memory[start] = places
        self._set_chunks(self._chunks + [(a, b, p) for (a, b), p in zip(chunks, places, strict=True)])
        return True

    def _unregister(self, ring: Ring, start: int) -> None:
        places = self._memory.pop(start, [])
        self._set_chunks([chunk for chunk in self._chunks if chunk[2] not in set(places)])
        for place in places:
            ring.set_buffer(place, 0, 0)
        self._free_places += places

    def _set_chunks(self, chunks: list[tuple[int, int, int]]) -> None:
        self._chunks = sorted(chunks)
        self._starts = np.array([c[0] for c in self._chunks], dtype=np.uint64)
        self._stops = np.array([c[1] for c in self._chunks], dtype=np.uint64)
        self._places = np.array([c[2] for c in self._chunks], dtype=np.uint16)


def _guarded(call: Callable[..., Any], *args: Any) -> Any:
    """Call the tier. A bug of its is reported as an uncaught one in a thread is; I/O goes on for the others."""
    try:
        return call(*args)
    except BaseException:  # not hidden: the hook prints it, or does what the program set it to
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        return None
