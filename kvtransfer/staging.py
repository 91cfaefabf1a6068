"""StagingRing: a few equal slots of device memory between the copy engine and the relayout kernels.

Allocated once and never grown. Slots are taken in turn, by transfers in the order of their submission, so
nobody starves. A slot carries the event after which its last user is done; whoever takes it makes the GPU
wait for that event. Nothing here holds the calling thread for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer
from kvtransfer.lanes import Event

SLOTS = 12  # six for each direction: beside a GEMM a relayout waits for SMs longer than three take to fill
SLOT_ALIGNMENT = 4096


@dataclass
class RingSlot:
    """``free``: the event after which the slot may be written again; None while nothing used it yet."""

    index: int
    memory: torch.Tensor  # uint8 [slot_bytes]
    free: Event | None = None
    taken: bool = False

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()


class StagingRing:
    """``staging_bytes`` of device memory in ``slots`` slots; may be shared by engines of one device. Thread-safe."""

    def __init__(self, device: torch.device, staging_bytes: int, slots: int = SLOTS) -> None:
        self.slot_bytes = staging_bytes // slots // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        if self.slot_bytes <= 0:
            raise ConfigError(f"staging_bytes: expected at least {slots * SLOT_ALIGNMENT}, got {staging_bytes}")
        self.memory = torch.empty(self.slot_bytes * slots, dtype=torch.uint8, device=device)
        self._slots = [RingSlot(i, self.memory[i * self.slot_bytes : (i + 1) * self.slot_bytes]) for i in range(slots)]
        self._next = 0
        self._changed = Condition()

    @property
    def share(self) -> int:
        """Slots that one direction may hold at once (see `try_take`); 0 where there are too few to hold any."""
        return len(self._slots) // 2

    @classmethod
    def create(cls, device: torch.device, staging_bytes: int, observer: Observer) -> StagingRing | None:
        """A ring, or None (said through the observer) where there is no memory for it or none was asked for."""
        if staging_bytes == 0:
            return None
        try:
            return cls(device, staging_bytes)
        except torch.OutOfMemoryError as error:
            observer.fell_back("staging", f"no room for a ring of {staging_bytes:,} bytes on {device}: {error}")
            return None

    def take(self) -> RingSlot:
        """The next slot in turn. Wait for its ``free`` event on the lane that writes it, then `give` it back."""
        with self._changed:
            self._changed.wait_for(lambda: not all(s.taken for s in self._slots))
            return self._take(1)[0]

    def try_take(self, count: int, held: list[RingSlot] | None = None) -> list[RingSlot] | None:
        """The next ``count`` slots that nobody holds, to be held for a while, or one less; None where fewer can be had.
        Never waits. They are also added to ``held``, which its caller has whatever interrupts this.

        One slot is always left to `take`, whose caller gives it back at once. Without it `take` could wait for ever,
        under its engine's lock, for slots that only somebody with that lock gives back.
        """
        with self._changed:
            found = min(count, sum(not s.taken for s in self._slots) - 1)
            return self._take(found, held) if found >= max(1, count - 1) else None

    def _take(self, count: int, held: list[RingSlot] | None = None) -> list[RingSlot]:
        turn = [self._slots[(self._next + i) % len(self._slots)] for i in range(len(self._slots))]
        slots = [s for s in turn if not s.taken][:count]
        self._next = (slots[-1].index + 1) % len(self._slots)
        held = [] if held is None else held
        for slot in slots:
            slot.taken = True  # between this and the end of `append` no KeyboardInterrupt comes
            held.append(slot)
        return slots

    def give(self, slot: RingSlot, free: Event | None) -> None:
        """The slot's use was submitted; it is free after ``free`` (None: it was not used, the old event stands)."""
        with self._changed:
            slot.taken = False
            slot.free = free if free is not None else slot.free
            self._changed.notify_all()

    def next_is_free(self) -> bool:
        """Whether the GPU is done with the slot that `take` would give: for pacing, never waits."""
        with self._changed:
            turn = (self._slots[(self._next + i) % len(self._slots)] for i in range(len(self._slots)))
            slot = next((s for s in turn if not s.taken), None)
        return slot is not None and (slot.free is None or slot.free.query())
