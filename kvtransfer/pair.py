"""Pairs: a process group (gloo) of two ranks each, and messages of any length over it.

A pair shares nothing with the engine's groups, nor with other pairs: a rank that dies or is late breaks its own pair
only, so that its number is known and the others can still be told. (`torch.distributed.new_group` names groups by how
many a process has made: ranks that made different numbers would wait for each other forever.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from kvtransfer.kernels.errors import ConfigError, RankError

__all__ = ["FRAME_BYTES", "Link", "Store", "fate", "from_frame", "left", "make_pair", "one_line", "to_parts"]

FRAME_BYTES = 4096
_HEAD_BYTES = 8


def make_pair(store: Store | None, name: str, peer: int, *, middle: bool, start_s: float, timeout_s: float) -> Any:
    """The process group of two ends, of which ``middle`` is number 0; waits up to ``start_s`` for the other.

    ``name`` is the pair's on ``store``; ``peer`` the other's rank, for messages; ``timeout_s`` that of its collectives.
    Raises RankError if the other does not come.
    """
    if store is None:
        raise ConfigError(f"{name}: expected a store that all ranks reach, got none")
    inside = PrefixStore(name, store)
    inside.set_timeout(timedelta(seconds=start_s))
    try:
        return ProcessGroupGloo(inside, 0 if middle else 1, 2, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankError(f"rank {peer} did not come within {start_s:g} s: {one_line(error)}", [peer]) from error


def to_parts(data: bytes) -> list[torch.Tensor]:
    """A message as uint8 tensors: one frame, which begins with the length, and the rest where it is longer."""
    first = len(data).to_bytes(_HEAD_BYTES, "little") + data[: FRAME_BYTES - _HEAD_BYTES]
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    frame[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    rest = data[FRAME_BYTES - _HEAD_BYTES :]
    return [frame, torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [frame]


def from_frame(frame: torch.Tensor) -> tuple[bytes, int]:
    """What a frame holds of its message, and how many bytes follow it."""
    length = int.from_bytes(frame[:_HEAD_BYTES].numpy().tobytes(), "little")
    data = frame[_HEAD_BYTES : _HEAD_BYTES + length].numpy().tobytes()
    return data, length - len(data)


class Link:
    """One end of a pair that sends and receives. Not thread-safe. ``peer`` is the other's rank.

    Raises RankError if the other does not come within ``start_s``.
    """

    def __init__(self, store: Store | None, name: str, peer: int, *, middle: bool, start_s: float) -> None:
        self.peer = peer
        self._other = 1 if middle else 0
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._pending: Any = None
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._group = make_pair(store, name, peer, middle=middle, start_s=start_s, timeout_s=start_s)

    def expect(self) -> None:
        """Be ready for the next message, so that its sender is done. Does not wait. RankError if the other has died."""
        if self._pending is None:
            with self._blaming():
                self._pending = self._group.recv([self._frame], self._other, 0)

    def receive(self, until: float) -> bytes:
        """The next message. RankError with the other's number if it has died, or has sent nothing by ``until``."""
        self.expect()
        with self._blaming():
            self._pending.wait(left(until))
            self._pending = None
            data, more = from_frame(self._frame)
            if more:
                rest = torch.empty(more, dtype=torch.uint8)
                self._group.recv([rest], self._other, 0).wait(left(until))
                data += rest.numpy().tobytes()
        return data

    def send(self, data: bytes) -> None:
        """Send a message; `sent` waits for it. RankError if the other has died."""
        with self._blaming():
            self._sending += [(self._group.send([part], self._other, 0), part) for part in to_parts(data)]

    def sent(self, until: float) -> None:
        """Wait until the other takes what was sent. RankError if it has died, or has not taken it by ``until``."""
        sending, self._sending = self._sending, []
        with self._blaming():
            for work, _ in sending:
                work.wait(left(until))

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """gloo's errors as ours, with the other's number."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(f"rank {self.peer} {fate(error)}", [self.peer]) from error


def left(until: float) -> timedelta:
    """Time that is left: at least a millisecond, as none at all means without an end."""
    return timedelta(seconds=max(0.001, until - time.monotonic()))


def fate(error: RuntimeError) -> str:
    """What gloo's error says about the other end."""
    text = one_line(error)
    if "imed out" in text or "timeout" in text:
        return "is late"
    return f"is gone ({text})"


def one_line(error: BaseException) -> str:
    """The error in one line, without its place in the sources of others."""
    text = " ".join(str(error).split())
    return text.partition("] ")[2][:160] if text.startswith("[") else text[:160] or type(error).__name__
