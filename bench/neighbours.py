"""Neighbours: small copies of others, and what keeps the link busy beside them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from baselines import UnmergedBatch
from rigs import LIMIT_S, Rig
from works import EngineWork

LONGEST_S = 3.0  # of one case


class Probe:
    """Small copies to the GPU or from it, each of new random bytes, on a stream of its own, from or to pinned memory.
    Each comes behind a kernel, as inputs do behind the step before them, and sampled tokens behind the sampler."""

    def __init__(self, device: torch.device, nbytes: int, *, to_device: bool = True) -> None:
        self.nbytes, self.to_device, self._device = nbytes, to_device, device
        self._stream = torch.cuda.Stream(device)
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kernels_own = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._source, self._target = (host, there) if to_device else (there, host)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.exact = True

    @property
    def name(self) -> str:
        return "to the GPU" if self.to_device else "from it"

    def __call__(self) -> tuple[float, float]:
        """(seconds from the call until the host sees its end, seconds by the GPU's clock) of a copy and its kernel."""
        if self.to_device:
            self._source.random_()
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._begin.record()
            (self._kernels_own if self.to_device else self._source).random_()
            self._target.copy_(self._source, non_blocking=True)
            self._end.record()
        self._end.synchronize()
        seconds = time.perf_counter() - started
        return seconds, float(self._begin.elapsed_time(self._end)) / 1e3

    def check(self) -> None:
        """Compare what arrived last. Not with every copy: it would be one more of them."""
        torch.cuda.synchronize(self._device)
        self.exact = self.exact and torch.equal(self._target.cpu(), self._source.cpu())


@dataclass(frozen=True)
class Begun:
    """A transfer that was begun: whether it is ``under_way`` (never waits), and how to ``wait`` for its end, which
    raises what went wrong with it."""

    under_way: Callable[[], bool]
    wait: Callable[[], object]


class Neighbour(ABC):
    """What keeps the link busy beside the small copies."""

    name = ""
    total_bytes = 0

    @abstractmethod
    def begin(self) -> Begun:
        """Start one transfer."""

    def exact(self) -> bool:
        """Whether it moves the right bytes, found out by one more."""
        return True


class Nothing(Neighbour):
    """A link of one's own: under way until it is waited for."""

    name = "alone"

    def begin(self) -> Begun:
        return Begun(lambda: True, lambda: None)


class Engine(Neighbour):
    """Loads or stores of the engine."""

    def __init__(self, rig: Rig, direction: str, mode: str = "bulk") -> None:
        self._work = EngineWork(rig, direction, mode=mode)
        self._rig, self._layerwise = rig, mode != "bulk"
        self.name, self.total_bytes = (
            f"{direction}{' layer-wise' * self._layerwise} [{self._work.path}]",
            rig.total_bytes,
        )

    def begin(self) -> Begun:
        engine, rig = self._rig.engine, self._rig
        if self._work.direction == "load":
            handle = engine.load(rig.slots, rig.pages, layerwise=self._layerwise)
        else:
            handle = engine.store(rig.pages, rig.slots)
        return Begun(lambda: not handle.done(), lambda: handle.result(LIMIT_S))

    def exact(self) -> bool:
        return self._work.exact()


class Enqueued(Neighbour):
    """What ``enqueue`` leaves on ``stream``, or on the current one, which is one of its own."""

    def __init__(
        self,
        name: str,
        rig: Rig,
        enqueue: Callable[[], object],
        exact: Callable[[], bool],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.name, self.total_bytes, self._exact = name, rig.total_bytes, exact
        self._stream, self._enqueue = stream or torch.cuda.Stream(rig.device), enqueue

    def begin(self) -> Begun:
        with torch.cuda.stream(self._stream):
            self._enqueue()
            event = self._stream.record_event()
        return Begun(lambda: not event.query(), event.synchronize)

    def exact(self) -> bool:
        return self._exact()


def neighbours(rig: Rig) -> list[Neighbour]:
    """Nothing, the engine's transfers, and what they are compared to."""
    batch = UnmergedBatch(rig, "load", "one batch")
    return [
        Nothing(),
        Engine(rig, "load"),
        Engine(rig, "load", "layerwise"),
        Engine(rig, "store"),
        large_copy("one large copy H2D", rig, to_device=True),
        large_copy("one large copy D2H", rig, to_device=False),
        Enqueued("one batch H2D, not merged", rig, batch.move, batch.exact, batch.stream),
    ]


def large_copy(name: str, rig: Rig, *, to_device: bool) -> Enqueued:
    """As many random bytes as the rig's pages in one copy from or to pinned memory."""
    host = torch.empty(rig.total_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(rig.total_bytes, dtype=torch.uint8, device=rig.device)
    source, target = (host, device) if to_device else (device, host)
    source.random_()
    torch.cuda.synchronize(rig.device)

    def exact() -> bool:
        torch.cuda.synchronize(rig.device)
        return torch.equal(device.cpu(), host)

    return Enqueued(name, rig, lambda: target.copy_(source, non_blocking=True), exact)


def sample(
    probe: Callable[[], tuple[float, float]],
    check: Callable[[], object],
    neighbour: Neighbour,
    samples: int,
    longest_s: float = LONGEST_S,
) -> tuple[list[tuple[float, float]], int]:
    """(what ``probe`` returned for each copy, how many transfers were begun). Transfers follow each other, with a
    ``check`` behind each, and a copy counts where the transfer was under way when it was asked for: the one that waits
    for the transfer's end is what this looks for. Fewer than ``samples`` after ``longest_s``; RuntimeError where none
    counted by then."""
    got: list[tuple[float, float]] = []
    begun = 0
    until = time.perf_counter() + longest_s
    while len(got) < samples and time.perf_counter() < until:
        transfer = neighbour.begin()
        begun += 1
        while len(got) < samples and time.perf_counter() < until and transfer.under_way():
            got.append(probe())
        transfer.wait()
        check()
    if not got:
        raise RuntimeError(f"{neighbour.name}: no copy began while one of {begun} transfers was under way")
    return got, begun
