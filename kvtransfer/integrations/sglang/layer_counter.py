"""LayerCounter: what SGLang's pools ask, layer by layer, before they hand out a buffer that a load fills."""

from __future__ import annotations

import threading
from typing import Protocol

from kvtransfer.kernels.errors import TransferError

SLOTS = 3  # loads that may be under way: one that is built, one that runs, one whose forward has just ended


class Waited(Protocol):
    """A load whose layers arrive one by one."""

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for the layer. Does not raise: a failure is told by `finish`."""

    def finish(self) -> bool:
        """Wait until nothing is written any more; whether all has landed and is right."""


class _LoadOf:
    """One load by its index, as SGLang's counters give it out: ``counter.events[index].wait(layer)``."""

    def __init__(self, counter: LayerCounter, index: int) -> None:
        self._counter, self._index = counter, index

    def wait(self, layer: int) -> None:
        """Wait for the layer, if the load is not over."""
        self._counter.wait_for(self._index, layer)


class _Loads:
    def __init__(self, counter: LayerCounter) -> None:
        self._counter = counter

    def __getitem__(self, index: int) -> _LoadOf:
        return _LoadOf(self._counter, index)


class LayerCounter:
    """A ring of three slots, each with one load. Attributes as SGLang's counters have them: num_layers, consumer_index,
    events (which speculative decoding with a fused draft asks).

    A load's index is its running number, not its slot: who waits with the index of a load that is over waits for
    nothing, whatever load has the slot by then. A slot is given again only when its load has been finished.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.events = _Loads(self)
        self._lock = threading.Lock()
        self._slots: list[tuple[int, Waited] | None] = [None] * SLOTS
        self._landed: dict[int, bool] = {}
        self._next = 0

    def start(self, load: Waited) -> int:
        """Give ``load`` the next slot; its index. Finishes the load that had it, if nobody has yet."""
        with self._lock:
            index = self._next
            before = self._slots[index % SLOTS]
        if before is not None:
            landed = before[1].finish()
            with self._lock:
                self._landed[before[0]] = landed
        with self._lock:
            self._next = index + 1
            self._slots[index % SLOTS] = (index, load)
        return index

    def set_consumer(self, index: int) -> None:
        """The forward that is launched next waits for this load; -1: for none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait for a layer of the consumer's load."""
        self.wait_for(self.consumer_index, threshold)

    def wait_for(self, index: int, layer: int) -> None:
        """Wait for a layer of this load, if it is not over."""
        load = self._load_of(index)
        if load is not None:
            load.wait_layer(layer)

    def finish(self, index: int) -> bool:
        """Wait until the load writes no more; True if all of it landed. True for a load that there isn't."""
        load = self._load_of(index)
        if load is None:
            with self._lock:
                return self._landed.pop(index, True)
        landed = load.finish()
        with self._lock:
            if self._slots[index % SLOTS] == (index, load):
                self._slots[index % SLOTS] = None
        return landed

    def reset(self) -> None:
        """Finish all loads and forget them. Indices go on counting, so that none of before means one of after."""
        for held in list(self._slots):
            if held is not None:
                self.finish(held[0])
        with self._lock:
            if any(self._slots):
                raise TransferError("layer counter: expected no load to be started while it is reset")
            self.consumer_index = -1
            self._landed.clear()

    def _load_of(self, index: int) -> Waited | None:
        if index < 0:
            return None
        with self._lock:
            held = self._slots[index % SLOTS]
        return held[1] if held is not None and held[0] == index else None
