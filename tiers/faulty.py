"""FaultyTier: wraps any tier and injects faults, for tests of whatever stands above.

    tier = FaultyTier(RedisTier(...), [Fault("error", verb="get", call=2, pages=[1])])

The third get answers ERROR for its second page. Everything that no fault touches goes to the inner tier as it is. What
the faults do to bytes is found by the checks that every tier makes, so that the outcome is the one that a real
fault would have; ``silent`` leaves the checks out, for a tier that lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError, KVTransferError, RecordError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, Tier, TierHandle, TierStats
from kvtransfer.tiers.batch import Batch, Verb
from kvtransfer.tiers.batch_book import BatchBook
from kvtransfer.tiers.sealed import check_whole

Kind = Literal["delay", "error", "partial", "wrong_bytes", "short", "stall", "death"]
_KINDS = ("delay", "error", "partial", "wrong_bytes", "short", "stall", "death")


@dataclass(frozen=True)
class Fault:
    """One fault, and when it strikes.

    kind     *delay*: the call reaches the tier ``seconds`` later.
             *error*: the pages are ERROR, the tier never hears of them.
             *partial*: only the first ``count`` pages reach the tier, the others are ERROR.
             *wrong_bytes*: one bit of the payload is other than it was, read or written.
             *short*: only the first half of the payload is read or written.
             *stall*: no answer until `FaultyTier.release`, at most ``seconds``; then the call goes on.
             *death*: from this call on every page of every verb is ERROR, until `FaultyTier.revive`.
    verb     which verb's calls are counted; None: all calls
    call     the first call that it strikes, counted from 0
    times    how many calls it strikes; None: all from there on
    pages    positions in the batch that it strikes; None: all. Delay, partial, stall and death take whole calls
    seconds  of a delay, or the longest of a stall
    count    of partial
    hold     of stall: the pages count as begun, so that cancel and deadline don't end them
    silent   of wrong_bytes and short, read: the pages are handed out as OK
    error    the cause that the pages of error, partial and death get; None: a TierError that says so
    """

    kind: Kind
    verb: Verb | None = None
    call: int = 0
    times: int | None = 1
    pages: Sequence[int] | None = None
    seconds: float = 60.0
    count: int = 0
    hold: bool = False
    silent: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"fault: expected one of {', '.join(_KINDS)}, got {self.kind!r}")
        if self.call < 0 or self.count < 0 or not self.seconds >= 0 or (self.times is not None and self.times < 1):
            raise ConfigError(
                f"fault: expected call, count and seconds of 0 or more and times of 1 or more, got {self}"
            )

    def strikes(self, call: int, call_of_verb: int, verb: Verb) -> bool:
        """Whether it strikes this call, the ``call``-th of all and the ``call_of_verb``-th of its verb."""
        number = call if self.verb is None else call_of_verb
        if self.verb not in (None, verb) or number < self.call:
            return False
        return self.times is None or number < self.call + self.times

    def hits(self, position: int) -> bool:
        """Whether it strikes the page at ``position``."""
        return self.pages is None or position in self.pages


class FaultyTier(Tier):
    """``inner`` with ``faults``. Thread-safe. Closes ``inner`` with itself.

    ``kill`` is called when a *death* strikes first, for instance to end a real server. ``faults_struck`` counts calls
    that a fault struck.
    """

    def __init__(
        self,
        inner: Tier,
        faults: Sequence[Fault] = (),
        *,
        kill: Callable[[], object] | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.shared = inner.shared
        self.needs_registration = inner.needs_registration
        self.faults_struck = 0
        self._faults = list(faults)
        self._kill = kill
        self._book = BatchBook(inner.name, observer)
        self._lock = threading.Lock()
        self._calls: dict[Verb | None, int] = {}
        self._dead = False
        self._stalled: list[Callable[[], object]] = []

    # --- control

    def add(self, fault: Fault) -> None:
        """One more fault. Calls are counted from the start of the tier: see `calls`."""
        with self._lock:
            self._faults.append(fault)

    def calls(self, verb: Verb | None = None) -> int:
        """How many calls of ``verb`` (None: of all) there were: the number of the next one."""
        with self._lock:
            return self._calls.get(verb, 0)

    def release(self) -> None:
        """Every call that is stalled now goes on."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for go_on in stalled:
            go_on()

    def revive(self) -> None:
        """Undo a death."""
        with self._lock:
            self._dead = False

    # --- the verbs

    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        return self._call("lookup", keys, (), None, None)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        return self._call("get", keys, buffers, deadline_s, None)

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        return self._call("put", keys, buffers, deadline_s, None)

    def remove(self, keys: Sequence[bytes]) -> TierHandle:
        return self._call("remove", keys, (), None, None)

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> TierHandle:
        return self._call("pin", keys, (), None, ttl_s)

    def register(self, memory: NDArray[np.uint8]) -> None:
        self.inner.register(memory)

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        self.inner.unregister(memory)

    def stats(self) -> TierStats:
        """The inner tier's, with batches and outcomes as the caller sees them, and a counter "faults_struck"."""
        inner, own = self.inner.stats(), self._book.counters()
        del own["bytes_written"]  # which puts were written, the inner tier alone knows
        counters = {**inner.counters, **own, "faults_struck": self.faults_struck}
        return replace(inner, in_flight=self._book.in_flight, counters=counters)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        if not drain:
            self.release()
        try:
            self._book.close(drain=drain, timeout_s=timeout_s, abort=self.release)
        finally:
            self.inner.close(drain=drain, timeout_s=timeout_s)

    # --- inside

    def _call(
        self,
        verb: Verb,
        keys: Sequence[bytes],
        buffers: Sequence[RecordBuffer],
        deadline_s: float | None,
        ttl_s: float | None,
    ) -> TierHandle:
        with self._lock:
            call, of_verb = self._calls.get(None, 0), self._calls.get(verb, 0)
            self._calls[None], self._calls[verb] = call + 1, of_verb + 1
            faults = [fault for fault in self._faults if fault.strikes(call, of_verb, verb)]
            dies = not self._dead and any(fault.kind == "death" for fault in faults)
            self._dead = self._dead or dies
            dead = self._dead
            self.faults_struck += bool(faults) or dead
        batch = self._book.open(verb, keys, buffers, deadline_s=deadline_s, ttl_s=ttl_s)
        if dies and self._kill is not None:
            self._kill()
        if dead:
            cause = next((fault.error for fault in faults if fault.kind == "death" and fault.error), None)
            batch.fail(cause or UnavailableError(f"{self.name}: injected death"), batch.begin())
            return batch
        for fault in faults:
            if fault.kind in ("error", "partial"):
                struck = fault.hits if fault.kind == "error" else (lambda at, count=fault.count: at >= count)
                error = fault.error or TierError(f"{self.name}: injected {fault.kind} fault")
                batch.fail(error, batch.begin([at for at in range(len(batch.keys)) if struck(at)]))
        for fault in faults:
            if fault.kind in ("delay", "stall"):
                self._later(batch, fault, faults)
                return batch
        self._forward(batch, batch.begin(), faults)
        return batch

    def _later(self, batch: Batch, fault: Fault, faults: list[Fault]) -> None:
        """Forward the call when the time is up or, of a stall, when it is released."""
        held = batch.begin() if fault.hold else None
        once = threading.Lock()

        def go_on() -> None:
            if once.acquire(blocking=False):
                timer.cancel()
                try:
                    self._forward(batch, batch.begin() if held is None else held, faults)
                except KVTransferError:
                    pass  # the handle has it

        timer = threading.Timer(fault.seconds, go_on)
        timer.daemon = True
        timer.start()
        if fault.kind == "stall":
            with self._lock:
                self._stalled.append(go_on)

        def over(_: TierHandle) -> None:  # by cancel or deadline: nobody waits for the timer any more
            timer.cancel()
            with self._lock:
                if go_on in self._stalled:
                    self._stalled.remove(go_on)

        batch.add_done_callback(over)

    def _forward(self, batch: Batch, positions: list[int], faults: list[Fault]) -> None:
        """Give pages that are begun to the inner tier."""
        if not positions:
            return
        keys = [batch.keys[p] for p in positions]
        buffers = [batch.buffers[p] for p in positions] if batch.buffers else []
        copies: list[NDArray[np.uint8]] = []
        deadline_s = batch.remaining_s
        try:
            if batch.verb == "put":
                given = [self._spoilt(b, p, faults, copies) for b, p in zip(buffers, positions, strict=True)]
                handle = self.inner.put_from(keys, given, deadline_s=deadline_s)
            elif batch.verb == "get":
                handle = self.inner.get_into(keys, buffers, deadline_s=deadline_s)
            elif batch.verb == "pin":
                handle = self.inner.pin(keys, batch.ttl_s)
            else:
                handle = self.inner.lookup(keys) if batch.verb == "lookup" else self.inner.remove(keys)
        except KVTransferError as error:
            self._forget(copies)
            batch.fail(error, positions)
            raise

        def answered(done: TierHandle) -> None:
            self._forget(copies)
            with self._book.as_own_thread():
                self._answer(batch, positions, buffers, faults, done)

        batch.on_cancel = handle.cancel
        handle.add_done_callback(answered)

    def _answer(
        self,
        batch: Batch,
        positions: list[int],
        buffers: list[RecordBuffer],
        faults: list[Fault],
        handle: TierHandle,
    ) -> None:
        """What the inner tier said, with what the faults make of the bytes that were read."""
        result = handle.result(0)
        statuses, errors = list(result.statuses), dict(result.errors)
        rotten: list[int] = []
        for at, position in enumerate(positions):
            if batch.verb != "get" or statuses[at] is not PageStatus.OK:
                continue
            struck = [f for f in faults if f.kind in ("wrong_bytes", "short") and f.hits(position)]
            for fault in struck:
                spoil(buffers[at], fault.kind)
            if struck and not any(fault.silent for fault in struck):
                try:
                    check_whole(batch.keys[position], buffers[at])
                except RecordError as error:
                    statuses[at], errors[at] = PageStatus.CORRUPT, error
                    rotten.append(position)

        def settle(_: object = None) -> None:
            moved = 0
            if batch.verb == "get":
                read = (b for b, status in zip(buffers, statuses, strict=True) if status is PageStatus.OK)
                moved = sum(b.payload.size + b.trailer.size for b in read)
            causes = (errors.get(at) for at in range(len(positions)))
            with self._book.as_own_thread():
                batch.settle_many(zip(positions, statuses, causes, strict=True), moved_bytes=moved)

        if not rotten:
            settle()
            return
        try:  # as a tier does with what does not verify
            removed = self.inner.remove([batch.keys[p] for p in rotten])
        except KVTransferError:  # closed meanwhile
            settle()
        else:
            removed.add_done_callback(settle)

    def _spoilt(
        self, buffer: RecordBuffer, position: int, faults: list[Fault], copies: list[NDArray[np.uint8]]
    ) -> RecordBuffer:
        """The buffer, or a copy with what the faults make of it: that goes to ``copies``, and is registered."""
        kinds = [f.kind for f in faults if f.kind in ("wrong_bytes", "short") and f.hits(position)]
        if not kinds:
            return buffer
        copy = RecordBuffer(buffer.payload.copy(), buffer.trailer)
        for kind in kinds:
            spoil(copy, kind)
        if self.needs_registration:
            self.inner.register(copy.payload)
        copies.append(copy.payload)
        return copy

    def _forget(self, copies: list[NDArray[np.uint8]]) -> None:
        for copy in copies:
            if self.needs_registration:
                self.inner.unregister(copy)


def spoil(buffer: RecordBuffer, kind: Kind) -> None:
    """Do to the payload what the fault does: flip its first bit, or lose its second half (never all of one byte)."""
    if kind == "wrong_bytes":
        buffer.payload[0] ^= 1
    else:
        half = buffer.payload[buffer.payload.size // 2 :]
        half[:] = 0 if half.any() else 0xFF
