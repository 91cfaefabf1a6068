"""KeyedSlots: slots of a host tier by the hash of their page, for engines that pass no tokens."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition
from kvtransfer.tiers.host import HostTier

FILLING, READY, LOST = range(3)  # on its way; there; it did not come, and nobody finds it


@dataclass(slots=True, eq=False)
class _Entry:
    slot: int
    state: int = FILLING
    holds: int = 0
    until: float = 0.0  # was found: not to be evicted before that time


class KeyedSlots:
    """Which key's page lies in which slot of ``host``, whose slots nobody else gives out. Thread-safe.

    Pages go when room is needed, the least recently used first, of one prefix its last page first. One that is held,
    not ready, or was found less than ``protect_s`` ago stays: what a lookup promised is there for the load behind it.
    """

    def __init__(self, host: HostTier, *, protect_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self._protect_s, self._clock = protect_s, clock
        self._changed = Condition()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._held = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def room(self) -> int:
        """Slots that are free or can be made so, at most: those that nobody holds."""
        return self.host.num_slots - self._held

    def there(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether its page is here and ready. Those are used and protected for a while."""
        until = self._clock() + self._protect_s
        found = [False] * len(keys)
        with self._changed:
            for at in range(len(keys) - 1, -1, -1):  # the first page is the most recently used
                entry = self._entries.get(keys[at])
                if entry is not None and entry.state == READY:
                    entry.until = until
                    self._entries.move_to_end(keys[at])
                    found[at] = True
        return found

    def hold(self, keys: Sequence[str]) -> list[str]:
        """Hold the slots of ``keys``, those that are here and new ones of the others. Returns the others: whoever holds
        them fills them, then `publish` or `forget`. Where room is short the last ones are not here afterwards."""
        new: list[str] = []
        with self._changed:
            missing = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    missing.append(key)
                else:
                    self._hold(entry)
            if missing:
                given = self._make_room(len(missing), partly=True).tolist()
                new = missing[: len(given)]
                for key, slot in zip(new, given, strict=True):
                    self._hold(self._add(key, slot))
        return new

    def reserve(self, keys: Sequence[str]) -> tuple[list[int], NDArray[np.int64]] | None:
        """Slots for those of ``keys`` that are not here: their positions, and the slots, held and to be filled.

        None, and nothing is reserved, where there is no room for all of them.
        """
        with self._changed:
            missing = [at for at, key in enumerate(keys) if key not in self._entries]
            given = self._make_room(len(missing), partly=False)
            if given.size < len(missing):
                return None
            for at, slot in zip(missing, given.tolist(), strict=True):
                self._hold(self._add(keys[at], slot))
        return missing, given

    def publish(self, keys: Sequence[str]) -> None:
        """Their bytes are there. They stay held."""
        with self._changed:
            for key in reversed(keys):
                if key in self._entries:
                    self._entries[key].state = READY
                    self._entries.move_to_end(key)
            self._changed.notify_all()

    def release(self, keys: Sequence[str]) -> None:
        """Hold them once less; those that are not here are passed over."""
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.holds:
                    entry.holds -= 1
                    self._held -= entry.holds == 0
                    self._drop_unused(key, entry)

    def forget(self, keys: Sequence[str]) -> None:
        """Their bytes are not to be used: nobody finds them from now on. Slots go when the last holder lets go."""
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.state = LOST
                    self._drop_unused(key, entry)
            self._changed.notify_all()

    def wait_ready(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait until none of ``keys`` is on its way any more; those that are not ready then, or not here at all."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._state(key) == FILLING for key in keys), timeout_s)
            return [key for key in keys if self._state(key) != READY]

    def all_ready(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are here and ready. It is no use of them."""
        with self._changed:
            return all(self._state(key) == READY for key in keys)

    def slots_of(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Of keys that the caller holds."""
        with self._changed:
            return np.array([self._entries[key].slot for key in keys], dtype=np.int64)

    def _state(self, key: str) -> int:
        entry = self._entries.get(key)
        return LOST if entry is None else entry.state

    def _add(self, key: str, slot: int) -> _Entry:
        entry = self._entries[key] = _Entry(slot)
        return entry

    def _hold(self, entry: _Entry) -> None:
        entry.holds += 1
        self._held += entry.holds == 1

    def _drop_unused(self, key: str, entry: _Entry) -> None:
        if not entry.holds and entry.state != READY:
            del self._entries[key]
            self.host.free(entry.slot)

    def _make_room(self, number: int, *, partly: bool) -> NDArray[np.int64]:
        """``number`` slots, evicting for them; where there are fewer, those, or none unless ``partly``. The caller
        holds the lock."""
        short = number - self.host.free_slots
        if short > 0:
            now = self._clock()
            victims: list[str] = []
            for key, entry in self._entries.items():
                if len(victims) == short:
                    break
                if entry.state == READY and not entry.holds and entry.until <= now:
                    victims.append(key)
            if len(victims) < short and not partly:
                return np.empty(0, dtype=np.int64)
            if victims:
                self.host.free(np.array([self._entries.pop(key).slot for key in victims], dtype=np.int64))
                self.evicted += len(victims)
        return self.host.allocate(min(number, self.host.free_slots))
