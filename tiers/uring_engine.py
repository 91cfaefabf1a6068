"""The io_uring engine: one thread that keeps a ring full, and hands back what is done.

A record in registered memory is two fixed reads or writes, payload and trailer, next to each other on the device, which
merges them: half the CPU of one vectored call at 1 MiB (0.024 against 0.05 s/GB), the same at 64 KiB. Other memory goes
as one vectored call a record.

Beside a busy Python thread every return of the interpreter lock costs up to 5 ms, so the thread gives it up only to
wait for a quarter of what is in flight: the device works through the rest meanwhile.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition, Event
from kvtransfer.kernels.ending import Daemon
from kvtransfer.kernels.errors import TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.io import MAX_TRIES, RETRIED, SHORT, Transfer, address
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.uring import FIXED_FILE, READ_FIXED, READV, SQE, WRITE_FIXED, WRITEV, Kernel, Ring
from kvtransfer.tiers.uring_buffers import PLACES, FixedBuffers

# In flight at most. A device needs 32 or so; the rest is work for it while this thread waits for the interpreter lock,
# which beside a busy Python thread is 5 ms twice: 64 MiB last 13 ms at 5 GB/s.
DEPTH = 256
IN_FLIGHT_BYTES = 64 << 20
_FILES = 256
_GROUP = 16  # completions that are looked at together, if there are so many to come
_NOTICE_S = 0.1  # how long a wait may keep a command from being seen


class UringEngine:
    """See the module. Thread-safe. Raises OSError where io_uring is refused: nothing is left behind.

    ``kernel`` stands in for the system calls.
    """

    kind = "io_uring"

    def __init__(self, name: str = "disk", *, observer: Observer = NO_OBSERVER, kernel: Kernel | None = None) -> None:
        self._name, self._kernel = name, kernel
        self._changed = Condition()
        self._commands: deque[Callable[[Ring], None]] = deque()
        self._queue: deque[tuple[Transfer, list[int]]] = deque()
        self._closing = False
        self._leaving = False  # the interpreter ends
        self._failed: BaseException | None = None
        self._fds = np.zeros(0, dtype=np.int32)  # by number: what entries name, a place in the table or a descriptor
        self._fixed = np.zeros(0, dtype=np.uint8)  # by number: FIXED_FILE where it is a place
        self._fixed_buffers = FixedBuffers(name, observer)
        # Of each record in flight, by its place in the books. Lists: numpy's sort, unique, searchsorted, zeros and some
        # fancy indexing give the interpreter lock away, for 5 ms each time beside a busy Python thread.
        self._slots_free = list(range(DEPTH))
        self._slots: list[Transfer | None] = [None] * DEPTH
        self._position = [0] * DEPTH
        self._size = [0] * DEPTH
        self._expected = [0] * (2 * DEPTH)  # by part
        self._left = [0] * DEPTH  # entries that the kernel has
        self._tries = [0] * DEPTH
        self._error = [0] * DEPTH
        self._vectors = np.zeros((DEPTH, 4), dtype=np.uint64)
        self._vectors_at = address(self._vectors.view(np.uint8).reshape(-1))
        self._draft = np.zeros((DEPTH, 2), dtype=SQE)
        self._flying = 0
        self._bytes = 0
        started: list[OSError | None] = []
        ready = Event()
        self._ring: Ring | None = None
        self._thread = Daemon(self._run, started, ready, name=f"{name}-io", leave=self._leave)
        self._thread.start()
        ready.wait()
        if started[0] is not None:
            self._thread.join()
            raise started[0]

    # --- any thread

    def add_file(self, fd: int) -> int:
        with self._changed:
            number = len(self._fds)
            self._fds = np.append(self._fds, np.int32(fd))
            self._fixed = np.append(self._fixed, np.uint8(0))
            if number < _FILES:  # numbers grow by one a file: later ones go by descriptor

                def put(ring: Ring) -> None:
                    try:
                        ring.set_file(number, fd)
                    except OSError:
                        return  # the descriptor serves as well
                    with self._changed:  # not into an array that `add_file` is copying: half of it would be lost
                        self._fds[number], self._fixed[number] = number, FIXED_FILE

                self._commands.append(put)
        return number

    def drop_file(self, number: int, fd: int) -> None:
        def drop(ring: Ring) -> None:
            try:
                if self._fixed[number]:
                    ring.set_file(number, -1)
                with self._changed:
                    self._fds[number], self._fixed[number] = -1, 0
            finally:
                os.close(fd)

        with self._changed:
            if self._failed is None and self._thread.is_alive():
                self._commands.append(drop)
                self._changed.notify()
                return
        os.close(fd)

    def submit(self, transfer: Transfer) -> None:
        with self._changed:
            if self._closing or self._failed is not None:
                raise TierError(f"{self._name}: I/O has ended{'' if self._failed is None else f': {self._failed}'}")
            self._queue.append((transfer, list(range(len(transfer.buffers)))))
            self._changed.notify()

    def register(self, memory: NDArray[np.uint8], step_bytes: int) -> bool:
        kept: list[bool] = []
        self._call(lambda ring: kept.append(self._fixed_buffers.add(ring, memory, step_bytes)))
        return bool(kept and kept[0])

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        self._call(lambda ring: self._fixed_buffers.drop(ring, memory))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _leave(self) -> None:
        """The interpreter ends: what the device has is the last that is moved."""
        with self._changed:
            self._closing = self._leaving = True
            self._changed.notify()

    def _call(self, command: Callable[[Ring], None]) -> None:
        """Run ``command`` on the ring's thread, and wait for it. In a callback of a batch that is this thread."""
        if threading.current_thread() is self._thread:
            if self._ring is not None:
                command(self._ring)
            return
        done = Event()

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

    def _run(self, started: list[OSError | None], ready: Event) -> None:
        try:
            ring = Ring(2 * DEPTH, files=_FILES, buffers=PLACES, kernel=self._kernel)
        except OSError as error:
            started.append(error)
            ready.set()
            return
        self._ring = ring
        started.append(None)
        ready.set()
        try:
            self._loop(ring)
            self._run_commands(ring)
        except BaseException as error:
            with self._changed:
                self._failed = error
            self._drain(ring)  # first: closing does not wait for what the device has, and that may write still
            with suppress(OSError):
                self._run_commands(ring)
            self._ring = None
            ring.close()
            self._abandon(errno.EIO)
            raise  # never expected: the thread's hook prints it
        self._ring = None
        ring.close()

    def _loop(self, ring: Ring) -> None:
        while True:
            with self._changed:
                while not (self._commands or self._queue or self._bytes or self._closing):
                    self._changed.wait()
            self._run_commands(ring)
            if self._leaving:
                self._refuse_queued(errno.ECANCELED)
            self._fill(ring)
            if not self._bytes:
                if self._closing and not self._queue:
                    return
                continue
            # Enough at a time to be worth the trouble; the rest keeps the device at work meanwhile.
            enough = max(self._flying // 4, min(self._flying, _GROUP))
            if not ring.unsubmitted:
                ring.enter()  # sees what has come without giving the interpreter lock away
            if ring.ready() < enough:
                ring.enter(enough, _NOTICE_S)
            finished = self._reap(ring)
            self._fill(ring)
            if ring.unsubmitted:
                ring.enter()  # the device goes on while the tier looks at what came
            _tell(finished)
            del finished  # nobody's memory is kept while this thread sleeps

    def _run_commands(self, ring: Ring) -> None:
        while self._commands:
            self._commands.popleft()(ring)

    def _fill(self, ring: Ring) -> None:
        """Start what there is room for."""
        while self._queue and self._slots_free:
            transfer, waiting = self._queue[0]
            each = int(transfer.sizes[waiting[0]].sum())
            room = (IN_FLIGHT_BYTES - self._bytes) // each
            if room < 1 and self._bytes:
                return
            count = min(len(self._slots_free), max(1, room))
            now = waiting[:count]
            del waiting[:count]
            if not waiting:
                self._queue.popleft()
            started = _guarded(transfer.start, now) or []
            if started:
                try:
                    self._send(ring, transfer, started)
                except BaseException:  # a bug here; the thread ends, but not with somebody waiting for these
                    for slot, of in enumerate(self._slots):
                        if of is transfer and self._position[slot] in started:
                            self._slots[slot] = None
                    _guarded(transfer.finish, started, [errno.EIO] * len(started))
                    raise

    def _send(self, ring: Ring, transfer: Transfer, started: list[int]) -> None:
        """Give ``started`` to the ring, each with a place of its own in the books."""
        count = len(started)
        slots = self._slots_free[-count:]
        del self._slots_free[-count:]
        parts = Parts(transfer.addresses, transfer.sizes).only(started)
        where, sizes, offsets = parts.where, parts.sizes, transfer.offsets.data  # no list: there may be many
        files = [transfer.files[p] for p in started]
        entries = self._draft[:count]  # what is not set here is always zero
        entries["fd"] = self._fds[files][:, None]
        entries["flags"] = self._fixed[files][:, None]
        entries["offset"][:, 0] = [offsets[p] for p in started]
        entries["offset"][:, 1] = entries["offset"][:, 0] + sizes[:, 0]
        entries["user_data"] = 2 * np.array(slots)[:, None] + np.arange(2)
        places = self._places_of(where, sizes)
        entries["opcode"] = WRITE_FIXED if transfer.write else READ_FIXED
        entries["address"], entries["length"], entries["buffer"] = where, sizes, np.array(places) & 0xFFFF
        loose: list[int] = []
        for row, (slot, position, (payload, trailer), place) in enumerate(
            zip(slots, started, sizes.tolist(), places, strict=True)
        ):
            self._slots[slot], self._position[slot], self._size[slot] = transfer, position, payload + trailer
            self._error[slot] = 0
            self._expected[2 * slot], self._expected[2 * slot + 1] = payload, trailer
            self._left[slot] = 2
            if place[0] < 0 or place[1] < 0:
                loose.append(row)
                self._expected[2 * slot] += trailer
                self._left[slot] = 1
            self._bytes += payload + trailer
        if not loose:
            self._push(ring, entries.reshape(-1))
            return
        vectors = [slots[row] for row in loose]
        self._vectors[vectors] = np.stack((where[loose], sizes[loose]), axis=2).reshape(-1, 4)
        entries["opcode"][loose, 0] = WRITEV if transfer.write else READV
        entries["address"][loose, 0] = self._vectors_at + 32 * np.array(vectors)
        entries["length"][loose, 0], entries["buffer"][loose] = 2, 0
        kept = np.ones((count, 2), dtype=np.bool_)
        kept[loose, 1] = False
        self._push(ring, entries[kept])

    def _push(self, ring: Ring, entries: NDArray[Any]) -> None:
        ring.push(entries)
        self._flying += len(entries)

    def _places_of(self, where: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """The place in the buffer table of each record's two parts; -1 where there is none."""
        if not self._fixed_buffers.chunks:
            return [(-1, -1)] * len(where)
        place = self._fixed_buffers.place
        return [
            (place(one, payload), place(two, trailer))
            for (one, two), (payload, trailer) in zip(where.tolist(), sizes.tolist(), strict=True)
        ]

    def _reap(self, ring: Ring) -> dict[int, tuple[Transfer, list[int], list[int]]]:
        """What is done, by transfer. A record that came short, or was interrupted, is sent again as a whole."""
        finished: dict[int, tuple[Transfer, list[int], list[int]]] = {}
        done = ring.take()
        self._flying -= len(done)
        for part, result in zip(done["user_data"].tolist(), done["result"].tolist(), strict=True):
            slot = part >> 1
            if result != self._expected[part]:
                self._error[slot] = -result if result < 0 else SHORT
            self._left[slot] -= 1
            if self._left[slot]:
                continue
            transfer, position, error = self._slots[slot], self._position[slot], self._error[slot]
            assert transfer is not None
            self._slots[slot] = None
            self._slots_free.append(slot)
            self._bytes -= self._size[slot]
            self._tries[slot] += 1
            if error and (error == SHORT or error in RETRIED) and self._tries[slot] < MAX_TRIES:
                self._send(ring, transfer, [position])  # into the same slot: it was freed last
                continue
            self._tries[slot] = 0
            entry = finished.get(id(transfer))
            if entry is None:
                entry = finished[id(transfer)] = (transfer, [], [])
            entry[1].append(position)
            entry[2].append(error)
        return finished

    def _drain(self, ring: Ring) -> None:
        """Wait until the kernel has no buffers any more, as far as it lets itself be asked."""
        left = self._flying - ring.unsubmitted
        ring.unsubmitted = 0  # never given to it
        try:
            while (left := left - len(ring.take())) > 0:
                ring.enter(left, _NOTICE_S)
        except OSError:
            pass  # no ring to ask: closing it is all that is left

    def _abandon(self, code: int) -> None:
        """Tell everybody that it failed."""
        for slot, transfer in enumerate(self._slots):
            if transfer is not None:
                _guarded(transfer.finish, [self._position[slot]], [code])
        self._refuse_queued(code)

    def _refuse_queued(self, code: int) -> None:
        """Tell everybody whose records were not begun that they won't be."""
        while self._queue:
            transfer, waiting = self._queue.popleft()
            started = _guarded(transfer.start, waiting) or []
            _guarded(transfer.finish, started, [code] * len(started))


def _tell(finished: dict[int, tuple[Transfer, list[int], list[int]]]) -> None:
    for transfer, positions, errors in finished.values():
        _guarded(transfer.finish, positions, errors)


def _guarded(call: Callable[..., Any], *args: Any) -> Any:
    """Call the tier. A bug of its is reported as an uncaught one in a thread is; I/O goes on for the others."""
    try:
        return call(*args)
    except BaseException:  # not hidden: the hook prints it, or does what the program set it to
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        return None
