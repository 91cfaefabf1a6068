"""Marks on streams and the times at which they were passed: CUDA events on a GPU, points of a FIFO on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import itemgetter

import torch

from kvtransfer.fifo import FifoEvent

ANCHOR_TRIES = 16
ANCHOR_S = 2.0  # event times are float32 milliseconds: 0.12 us at 2 s, 8 us at 2 minutes


class Stamp(FifoEvent):
    """A point of a FIFO that knows when it was passed, on `time.perf_counter`."""

    at_s = 0.0

    def _finish(self, failure: object) -> None:
        self.at_s = time.perf_counter()
        super()._finish(failure)  # type: ignore[arg-type]


Mark = torch.cuda.Event | Stamp


@dataclass(frozen=True, slots=True)
class Anchor:
    """A passed CUDA event and when that was, in seconds since the timeline began."""

    at_s: float
    event: torch.cuda.Event


class GpuClock:
    """Times of CUDA events of one device, in seconds since ``zero_s`` of `time.perf_counter`.

    Times count from an anchor that was passed before the event was recorded, and is renewed every `ANCHOR_S`.
    """

    def __init__(self, device: torch.device, zero_s: float) -> None:
        self._stream = torch.cuda.Stream(device=device)
        self.anchor = self._tightest(zero_s)
        self._renewed = time.perf_counter()
        self._next: torch.cuda.Event | None = None
        self._spare: list[torch.cuda.Event] = []

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def at(self, anchor: Anchor, event: torch.cuda.Event) -> float:
        return anchor.at_s + float(anchor.event.elapsed_time(event)) / 1e3

    def give(self, event: torch.cuda.Event) -> None:
        """``event`` was passed and read: use it again."""
        self._spare.append(event)

    def renew(self) -> None:
        """Move the anchor on when it is old. Asks for events, so not where a capture forbids it."""
        if self._next is not None and self._next.query():
            self.anchor, self._next = Anchor(self.at(self.anchor, self._next), self._next), None
        elif self._next is None and time.perf_counter() - self._renewed > ANCHOR_S:
            self._next, self._renewed = self._record(), time.perf_counter()

    def _tightest(self, zero_s: float) -> Anchor:
        """Of some, the anchor of which is known best when it was passed: between its record and the return of a wait,
        which takes a millisecond and more now and then where other processes use the GPU."""

        def attempt() -> tuple[float, Anchor]:
            before = time.perf_counter()
            event = self._record()
            event.synchronize()
            after = time.perf_counter()
            return after - before, Anchor((before + after) / 2 - zero_s, event)

        return min((attempt() for _ in range(ANCHOR_TRIES)), key=itemgetter(0))[1]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
