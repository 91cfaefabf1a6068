"""Pump: the one background thread of an engine. It submits queued transfers in order and acknowledges all.

It never lets more of a transfer into the GPU's queues than the ring has slots, so a transfer can be cancelled
half-way and other people's small copies do not wait behind a burst. Completions are handled here alone,
whether or not anybody calls in. Python in a second thread costs a forward that is being launched, so the
thread rests most of the time (`kvtransfer.rest`) and each wake-up is short.

At the end of the interpreter the thread is ended first (`kvtransfer.kernels.ending`).
"""

from __future__ import annotations

import threading
import time
from collections import deque

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.ending import Ending
from kvtransfer.kernels.errors import DeadlineExceeded, TransferCancelled, TransferError
from kvtransfer.lanes import CudaLanes, as_transfer_error
from kvtransfer.rest import Rest
from kvtransfer.transfer import Transfer
from kvtransfer.workshop import Workshop

SHORTEST_NAP_S = 0.0001
LONGEST_NAP_S = 0.001  # a 32 MiB chunk takes 0.6 ms at 55 GB/s, and the ring holds six
LONGEST_SLEEP_S = 0.02  # while nothing is due: each wake-up takes the GIL from a thread that launches a forward

_ending = Ending()


class Pump:
    """``enqueue`` transfers to be submitted here, ``watch`` those that their caller submitted. The thread waits for
    something to do in ``rest``."""

    def __init__(self, shop: Workshop, name: str, rest: Rest) -> None:
        self._shop = shop
        self._name = name
        self._changed = Condition()
        self._queue: deque[Transfer] = deque()
        self._flight: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._leaving = False
        self._rest = rest
        _ending.add(self)

    def enqueue(self, transfer: Transfer) -> None:
        """Submit ``transfer`` after those enqueued before it. A second call does what a KeyboardInterrupt left
        undone of the first."""
        self._add(self._queue, transfer)

    def watch(self, transfer: Transfer) -> None:
        """``transfer`` is being submitted by its caller; acknowledge it when it is through, or at its deadline."""
        self._add(self._flight, transfer)

    def wake(self) -> None:
        """Look at once: somebody waits for what the thread is to find out."""
        self._rest.wake()

    def is_this_thread(self) -> bool:
        """Whether the caller is the engine's thread, in a callback or an observer."""
        return threading.current_thread() is self._thread

    def idle(self) -> bool:
        return not self._queue and not self._flight

    @property
    def leaving(self) -> bool:
        """Whether the interpreter ends: what is on its way won't be seen to end."""
        return self._leaving

    def drain(self, timeout_s: float | None) -> bool:
        """Hold the caller until nothing is queued or in flight; False when the time is up, or nobody will see it."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle() or self._leaving, timeout_s)
            return self.idle()

    def pending(self) -> list[TransferHandle]:
        """Handles of everything not yet acknowledged."""
        with self._changed:
            return [t.handle for t in (*self._queue, *self._flight)]

    def close(self, wait: bool = True) -> None:
        """End the thread once what is queued and in flight is through; ``wait`` for that."""
        with self._changed:
            self._closing = True
            thread = self._thread
        self._rest.wake()
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def leave(self) -> None:
        """The interpreter ends: let the thread end, whatever is on its way."""
        with self._changed:
            self._leaving = self._closing = True
            self._changed.notify_all()
        self._rest.wake()

    def left(self, timeout_s: float) -> None:
        """After `leave`: hold the caller until the thread has ended, or so long. Who waits for a transfer is told."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        for handle in self.pending():
            handle.abandon(DeadlineExceeded("the interpreter ended before the transfer did"))

    def _add(self, to: deque[Transfer] | list[Transfer], transfer: Transfer) -> None:
        with self._changed:
            if self._closing:
                raise TransferError("the engine is closed")
            watched = False
            try:
                if not transfer.in_pump:
                    transfer.in_pump = True  # between this and the end of `append` no KeyboardInterrupt comes
                    to.append(transfer)
                watched = to is self._flight and self._watch(transfer)
            finally:  # also after a KeyboardInterrupt: nobody else would tell the thread
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"kvtransfer-{self._name}", daemon=True)
                    thread.start()
                    self._thread = thread
                elif not watched:
                    self._rest.wake()

    def _watch(self, transfer: Transfer) -> bool:
        """Let the thread rest until there is something to do about a transfer in flight; False where it has to look."""
        transfer.watch = transfer.watched(self._rest) if transfer.handed_over else None
        return transfer.watch is not None

    def _run(self) -> None:
        with self._changed:
            if self._thread not in (None, threading.current_thread()):
                return  # a KeyboardInterrupt left open whether this one had started, and another was
            self._thread = threading.current_thread()
        if isinstance(self._shop.lanes, CudaLanes):
            self._shop.lanes.adopt_thread()
        nap = SHORTEST_NAP_S
        while not self._leaving:
            with self._changed:
                idle = self.idle()
                if idle and self._closing:
                    break
            if idle:
                self._rest.rest(None)
                nap = SHORTEST_NAP_S
                continue
            moved = self._submit() | self._acknowledge()
            nap = SHORTEST_NAP_S if moved else min(2 * nap, LONGEST_NAP_S)
            if not moved:
                self._rest.rest(self._sleep_s(nap))
        for handle in self.pending():  # the interpreter ends
            handle.stop_script()
        for submitter in self._shop.submitters.values():
            submitter.close()

    def _sleep_s(self, nap: float) -> float | None:
        """How long to look away: until somebody says something (None) where all that is in flight is watched, and where
        only ends are due half of the time until the first one should come."""
        with self._changed:
            if self._queue:
                return nap
            left = [t for t in self._flight if t.watch is None or t.watch.over]
        if not left:
            return None
        if any(t.by_caller for t in left):
            return nap
        due = min(t.expected_end for t in left) - time.monotonic()
        return min(max(nap, due / 2), LONGEST_SLEEP_S)

    def _submit(self) -> bool:
        """Submit what may be submitted now, in the order of the queue; True if anything happened."""
        moved = False
        for transfer in self._queued():
            if self._stopped(transfer):
                self._retire(transfer)
                moved = True
        while (head := self._head()) is not None:
            if self._stopped(head):
                self._retire(head)
                moved = True
                continue
            try:
                if not head.ready():
                    return moved
                with self._shop.lock:
                    if not head.started:
                        head.start()
                        if not head.ready():
                            return True
                    if not head.scripted:
                        head.next_chunk()
                    elif not head.hand_over():
                        return moved  # another one holds the ring
                if head.handed_over or not head.chunks_left:
                    self._retire(head)
            except BaseException as error:  # kept: it becomes the transfer's error, and its callers get it
                head.handle.fail(as_transfer_error(error))
                self._retire(head)
            moved = True
        return moved

    def _head(self) -> Transfer | None:
        """The first of the queue that waits for no other transfer: one that does must not hold up the rest."""
        return next((t for t in self._queued() if t.started or t.ready()), None)

    def _queued(self) -> list[Transfer]:
        with self._changed:
            return list(self._queue)

    def _stopped(self, transfer: Transfer) -> bool:
        """Whether no more of it may be submitted: cancelled, failed or too late."""
        handle = transfer.handle
        if handle.failed:
            return True
        if handle.cancelled:
            handle.fail(TransferCancelled("the transfer was cancelled", _left(handle)))
            return True
        if handle.expired():
            handle.fail(DeadlineExceeded(f"the transfer passed its deadline of {handle.deadline_s:g} s", _left(handle)))
            return True
        return False

    def _retire(self, transfer: Transfer) -> None:
        """From the queue to the transfers in flight, with its last event recorded."""
        with self._shop.lock:
            if transfer.started and not transfer.handed_over:
                transfer.finish()
        with self._changed:
            self._watch(transfer)
            self._queue.remove(transfer)
            self._flight.append(transfer)

    def _acknowledge(self) -> bool:
        """End the transfers whose last event has passed; True if there were any."""
        ended = []
        for transfer in list(self._flight):
            try:
                through = self._is_through(transfer)
            except BaseException as error:  # kept: an event that can't be asked (CUDA is lost) will not pass either
                transfer.handle.fail(as_transfer_error(error))
                through = True
            if through:
                ended.append(transfer)
        for transfer in ended:
            if transfer.watch is not None:
                self._rest.forget(transfer.watch)
            with self._changed:
                self._flight.remove(transfer)
            self._end(transfer)
        if ended:
            with self._changed:
                self._changed.notify_all()
        return bool(ended)

    def _is_through(self, transfer: Transfer) -> bool:
        """Whether nothing of it is in flight, and so it may end. Fails it at its deadline."""
        handle = transfer.handle
        if transfer.handed_over:
            self._take_back(transfer)
        final = handle.final_event
        if final is None and transfer.handed_over:
            return False
        if final is None and transfer.by_caller and not self._stopped_by_caller(transfer):
            return False  # layer by layer: its caller is still submitting
        if final is not None and not final.query():
            if handle.expired() and not transfer.late:
                transfer.late = True
                handle.fail(
                    DeadlineExceeded(f"still in flight at its deadline of {handle.deadline_s:g} s", _left(handle))
                )
                with self._shop.lock:
                    transfer.force_flags()
            return False
        # Its digests are compared with what an earlier transfer may have yet to write down.
        return all(e.handle.done() for e in transfer.earlier)

    def _take_back(self, transfer: Transfer) -> None:
        """From the submitter, once it is through with it. At its deadline, whoever saw that first: let it submit no
        more, since it may be waiting for what never comes, and others wait behind it."""
        handle = transfer.handle
        if handle.expired() and not handle.failed:
            handle.fail(DeadlineExceeded(f"still in flight at its deadline of {handle.deadline_s:g} s", _left(handle)))
        if handle.failed:
            handle.stop_script()
        with self._shop.lock:
            try:
                back = transfer.take_back()
            except BaseException as error:  # kept: it is the transfer's error; what is in flight still owns its pages
                handle.fail(as_transfer_error(error))
                back = True
            if back:
                transfer.handed_over = False
                if transfer.handle.final_event is None:
                    transfer.finish()

    def _end(self, transfer: Transfer) -> None:
        """Judge and acknowledge. What goes wrong here is the transfer's error: its pages come free, others go on."""
        verdict = None
        try:
            with self._shop.lock:
                verdict = transfer.judge()
        except BaseException as error:  # kept: it is the transfer's error
            transfer.handle.fail(as_transfer_error(error))
        transfer.acknowledge(verdict)

    def _stopped_by_caller(self, transfer: Transfer) -> bool:
        """A layer-wise store whose caller gave up or ran out of time: close it with what it has submitted."""
        if not self._stopped(transfer):
            return False
        with self._shop.lock:
            if transfer.started and transfer.handle.final_event is None:
                transfer.finish()
        return transfer.handle.final_event is None


def _left(handle: TransferHandle) -> list[int]:
    done = handle.pages_done()
    return [i for i, ok in enumerate(done.tolist()) if not ok]
