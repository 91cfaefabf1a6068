"""Works: the transfers that benchmarks time.

A `Work` begins a transfer and hands back how to wait for its end. Whether every byte arrived is found out afterwards
(`Work.exact`): new random bytes, one more transfer, and a comparison by plain torch, of the pages that were to change
and of those that were not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

import torch
from rigs import LIMIT_S, Ids, Rig

from kvtransfer.groups import Groups, layer_groups
from kvtransfer.handles import TransferHandle
from kvtransfer.meter import SPIN_CYCLES_PER_US

Wait = Callable[[], float]
"""Holds the caller until what was begun has ended; its seconds, by the GPU's clock where there is one."""

HELD_US = 2000  # both directions start together, once the first chunks of each are in the queues


def grouping(mode: str, layers: int) -> Groups | None:
    """Layer groups of a mode; None: bulk ("bulk") or as the engine chooses ("layerwise")."""
    if mode == "groups of 4":
        return tuple(layer_groups(layers, 4, up=False, down=False))
    if mode == "ramped":
        return tuple(layer_groups(layers, 4))
    return None


MODES = ("bulk", "layerwise", "groups of 4", "ramped")


class Work(Protocol):
    """What is timed. ``direction`` names its limit: "load", "store", "both", or "device"."""

    name: str
    path: str
    direction: str
    total_bytes: int
    engine_thread: str  # name of the thread that submits besides the caller; "" for none

    def begin(self, *, alone: bool = True) -> Wait:
        """Start one transfer. ``alone``: nothing is queued behind it or before it."""
        ...

    def exact(self) -> bool:
        """Whether one more transfer, of new random bytes, moves all of them and nothing else."""
        ...


class EngineWork:
    """A transfer by the engine of ``rig`` in its present order."""

    def __init__(self, rig: Rig, direction: str, *, path: str = "auto", mode: str = "bulk", name: str = "") -> None:
        self.rig, self.direction, self.mode = rig, direction, mode
        self.name = name or f"{direction} {mode}"
        self._path = None if path == "auto" else path
        self.layerwise = mode != "bulk"
        self._groups = grouping(mode, rig.shape.layers)
        self.engine_thread = f"kvtransfer-{rig.name}"
        self.total_bytes = rig.total_bytes * (2 if direction == "both" else 1)
        rig.use_groups(self._groups)
        ways = ("load", "store") if direction == "both" else (direction,)
        self.plans = [
            rig.engine.plan(way, slots, pages, layerwise=self.layerwise, path=self._path)
            for way, slots, pages in zip(ways, self._slots(), self._pages(), strict=False)
        ]
        # Transfers that follow each other without a gap are of other pages, as requests' are.
        self._turns = itertools.cycle(zip(self._slots(), self._pages(), strict=True))
        used = " + ".join(dict.fromkeys(plan.path for plan in self.plans))
        self.path = used if path != "auto" else f"auto: {used}"

    def _slots(self) -> tuple[Ids, ...]:
        return self.rig.slots, self.rig.other_slots

    def _pages(self) -> tuple[Ids, ...]:
        return self.rig.pages, self.rig.other_pages

    def begin(self, *, alone: bool = True) -> Wait:
        self.rig.use_groups(self._groups)
        if self.direction == "both":
            return self._both(alone)
        slots, pages = next(self._turns) if not alone else (self.rig.slots, self.rig.pages)
        handle = self._load(slots, pages) if self.direction == "load" else self._store(pages, slots)
        return lambda: handle.result(LIMIT_S).seconds

    def _load(self, slots: Ids, pages: Ids) -> TransferHandle:
        return self.rig.engine.load(slots, pages, layerwise=self.layerwise, path=self._path)

    def _store(self, pages: Ids, slots: Ids) -> TransferHandle:
        handle = self.rig.engine.store(pages, slots, layerwise=self.layerwise, path=self._path)
        if self.layerwise:  # a forward that has computed everything already
            for layer in range(handle.num_layers):
                handle.layer_written(layer, self.rig.stream)
        return handle

    def _both(self, alone: bool) -> Wait:
        """A load and a store of other pages at once: from where both may start to the end of the later one."""
        rig, stream = self.rig, self.rig.stream
        if stream is None:
            started = time.perf_counter()
            handles = (self._load(rig.slots, rig.pages), self._store(rig.other_pages, rig.other_slots))

            def wait() -> float:
                for handle in handles:
                    handle.result(LIMIT_S)
                return time.perf_counter() - started

            return wait
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            if alone:
                torch.cuda._sleep(HELD_US * SPIN_CYCLES_PER_US)
            begin.record()
        handles = (self._load(rig.slots, rig.pages), self._store(rig.other_pages, rig.other_slots))

        def wait_on_gpu() -> float:
            for handle in handles:
                handle.wait_all(stream)
            end.record(stream)
            for handle in handles:
                handle.result(LIMIT_S)
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait_on_gpu

    def exact(self) -> bool:
        rig = self.rig
        return moved_exactly(rig, self.direction, lambda: self.begin()())


def moved_exactly(rig: Rig, direction: str, transfer: Callable[[], object]) -> bool:
    """Fill the pool anew, run ``transfer`` (of the rig's own ids), and compare: what was to move, and what was not."""
    rig.scramble()
    if direction == "both":
        transfer()
        return rig.holds(rig.pages, rig.slots) and rig.holds(rig.other_pages, rig.other_slots)
    rows: Callable[[], torch.Tensor]
    if direction == "load":
        rows = lambda: rig.page_rows(rig.other_pages)  # noqa: E731
    else:
        rows = lambda: rig.slot_rows(rig.other_slots)  # noqa: E731
    others = rows()
    transfer()
    return rig.holds(rig.pages, rig.slots) and torch.equal(others, rows())
