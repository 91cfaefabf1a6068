"""RecentKeeper: writes down which prefixes were used last, now and then and at the end (recent.py)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, HeardOut, Observer
from kvtransfer.recent import RecentPrefix, last_used, read_recent, write_recent


class RecentKeeper:
    """Of ``index``, in ``file``: the ``count`` prefixes used last, written at most every ``every_s`` seconds (`tick`).

    A file that can't be written costs nothing but the observer's "recent.failed". Thread-safe.
    """

    def __init__(
        self,
        index: PrefixIndex,
        file: Path,
        count: int = 1000,
        *,
        every_s: float = 60.0,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if count < 1 or not every_s > 0:
            raise ConfigError(f"recent: expected at least 1 prefix and seconds above 0, got {count} and {every_s}")
        self.file = file
        observer = HeardOut(observer)  # a cache closes whatever it raises
        self._index, self._count, self._every_s, self._observer = index, count, every_s, observer
        self._lock = threading.Lock()
        self._written = time.monotonic()
        self._tick = index.tick
        self._kept = read_recent(file, observer)  # of an earlier run: until there is something newer

    def read(self) -> list[RecentPrefix]:
        """What an earlier run has left, the last used first."""
        return list(self._kept)

    def tick(self) -> None:
        """Write, if it is time to."""
        if time.monotonic() - self._written >= self._every_s:
            self.write()

    def write(self) -> None:
        """Write now, if anything was used since. Behind the prefixes of this run come those of the earlier one, as far
        as there is room."""
        with self._lock:
            self._written = time.monotonic()
            if self._index.tick == self._tick:
                return
            self._tick = self._index.tick
            own = last_used(self._index, self._count)
            known = set(own)
            older = [prefix for prefix in self._kept if prefix not in known]
            try:
                write_recent(self.file, [*own, *older][: self._count])
            except OSError as error:
                self._observer.noted("recent.failed", file=str(self.file), message=f"{self.file}: {error}")
