"""Relay: messages from one rank to others that follow it later, without waiting for them.

The first stage of a pipeline decides; the stages behind it act on a decision when the batch reaches them. What was not
taken yet is bounded: who is `most` messages ahead waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import BroadcastOptions

from kvtransfer.kernels.errors import RankError
from kvtransfer.pair import FRAME_BYTES, Store, fate, from_frame, left, make_pair, to_parts


class Relay:
    """From ``ranks[0]`` to all others of ``ranks``, each over a pair of its own (see `kvtransfer.star`). Thread-safe.

    ``most`` messages may be under way to a rank; ``deadline_s`` is how long `post` waits for room and `take` for a
    message. ``name``, ``store`` and ``start_s`` as for `Star`.
    """

    def __init__(
        self,
        name: str,
        store: Store | None,
        ranks: Sequence[int],
        rank: int,
        *,
        most: int = 64,
        deadline_s: float,
        start_s: float,
    ) -> None:
        self.name, self.rank, self.ranks = name, rank, tuple(ranks)
        self.first = ranks[0]
        self.most = most
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._error: RankError | None = None
        others = ranks[1:] if rank == self.first else [self.first]
        self._groups: dict[int, Any] = {}
        self._under_way: dict[int, deque[list[tuple[Any, torch.Tensor]]]] = {other: deque() for other in others}
        for other in others if len(ranks) > 1 else ():
            pair = f"{name}/{other if rank == self.first else rank}"
            self._groups[other] = make_pair(
                store, pair, other, middle=rank == self.first, start_s=start_s, timeout_s=max(start_s, deadline_s)
            )

    @property
    def outstanding(self) -> int:
        """Messages that some rank has not taken yet, as far as is known."""
        with self._lock:
            return max((self._reap(other) for other in self._groups), default=0)

    def post(self, data: bytes) -> None:
        """Send ``data`` to all others. Returns at once while fewer than ``most`` are under way.

        Raises RankError with the number of a rank that has died, or that took nothing for ``deadline_s``.
        """
        with self._lock:
            self._check(self.rank == self.first, "post")
            until = time.monotonic() + self._deadline_s
            parts = to_parts(data)
            for other, group in self._groups.items():
                self._make_room(other, self.most, until)
                try:
                    self._under_way[other].append([(_start(group, part), part) for part in parts])
                except RuntimeError as error:
                    self._fail(other, error)

    def take(self) -> bytes:
        """The next message. Raises RankError if the first rank has died, or sends nothing for ``deadline_s``."""
        with self._lock:
            self._check(self.rank != self.first, "take")
            until = time.monotonic() + self._deadline_s
            frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
            self._wait(frame, until)
            data, more = from_frame(frame)
            if more:
                rest = torch.empty(more, dtype=torch.uint8)
                self._wait(rest, until)
                data += rest.numpy().tobytes()
            return data

    def drain(self) -> None:
        """Wait until all that was posted has been taken. Raises RankError as `post` does."""
        with self._lock:
            until = time.monotonic() + self._deadline_s
            for other in self._groups if self.rank == self.first else ():
                self._make_room(other, 1, until)

    def close(self) -> None:
        """Let go of the connections; what is under way is lost (see `drain`)."""
        with self._lock:
            self._groups.clear()
            self._error = self._error or RankError(f"{self.name}: closed", [self.rank])

    def _wait(self, into: torch.Tensor, until: float) -> None:
        """Fill ``into`` with what the first rank sends next."""
        try:
            _start(self._groups[self.first], into).wait(left(until))
        except RuntimeError as error:
            self._fail(self.first, error)

    def _make_room(self, other: int, most: int, until: float) -> None:
        """Return once fewer than ``most`` messages are under way to ``other``."""
        while self._reap(other) >= most:
            try:
                for work, _ in self._under_way[other][0]:
                    work.wait(left(until))
            except RuntimeError as error:
                self._fail(other, error)

    def _reap(self, other: int) -> int:
        """Let go of what ``other`` has taken; how much it has not."""
        under_way = self._under_way[other]
        while under_way and all(work.is_completed() for work, _ in under_way[0]):
            try:
                for work, _ in under_way.popleft():
                    work.wait()
            except RuntimeError as error:
                self._fail(other, error)
        return len(under_way)

    def _fail(self, other: int, cause: RuntimeError) -> NoReturn:
        self._error = RankError(f"{self.name}: rank {other} {fate(cause)}", [other])
        raise self._error from cause

    def _check(self, allowed: bool, verb: str) -> None:
        if self._error is not None:
            raise RankError(str(self._error), self._error.ranks)
        if not allowed:
            raise RankError(f"{self.name}: {verb}: rank {self.first} posts, the others take; this is rank {self.rank}")


def _start(group: Any, data: torch.Tensor) -> Any:
    """Move ``data`` from the first end of the pair to the second; the work can be asked whether it is done."""
    options = BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([data], options)
