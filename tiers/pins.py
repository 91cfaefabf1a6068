"""PinBook: which keys a tier must not evict, and until when."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class PinBook:
    """Pins by key, each with an end. Thread-safe. ``now`` is the clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}

    def pin(self, key: bytes, ttl_s: float | None) -> None:
        """Pin for ``ttl_s`` seconds from now, whatever was before; None: until told otherwise; 0: no more."""
        with self._lock:
            if ttl_s == 0:
                self._until.pop(key, None)
            else:
                self._until[key] = math.inf if ttl_s is None else self._now() + ttl_s

    def forget(self, key: bytes) -> None:
        """The page is gone."""
        self.pin(key, 0)

    def holds(self, key: bytes) -> bool:
        """Whether the key is pinned now."""
        with self._lock:
            until = self._until.get(key)
            if until is None:
                return False
            if until <= self._now():
                del self._until[key]
                return False
            return True

    def keys(self) -> list[bytes]:
        """What is pinned now."""
        with self._lock:
            now = self._now()
            self._until = {key: until for key, until in self._until.items() if until > now}
            return list(self._until)
