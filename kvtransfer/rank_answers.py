"""RankAnswers: one directory, several movers that carry out the same commands; one answer made of theirs.

A page is there when every rank has it. So an answer goes to the directory once every rank has answered the whole
command, and the worst that any of them said of a page is what is said of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import CODES, OK, Ack, Cancel, Command, Evict, positions
from kvtransfer.kernels.errors import ConfigError, TransferError
from kvtransfer.tiers.base import PageStatus

_WORST_LAST = (
    PageStatus.OK,
    PageStatus.CANCELLED,
    PageStatus.NO_ROOM,
    PageStatus.MISS,
    PageStatus.ERROR,
    PageStatus.CORRUPT,
)
_RANK = np.zeros(max(CODES.values()) + 1, dtype=np.int64)
_RANK[[CODES[status] for status in _WORST_LAST]] = np.arange(len(_WORST_LAST))
_CODE = np.array([CODES[status] for status in _WORST_LAST], dtype=np.uint8)
_MISS = CODES[PageStatus.MISS]


@dataclass
class _Open:
    """A command that not everybody has answered. ``left``: positions, of all ranks together."""

    command: Command
    badness: NDArray[np.int64]
    seen: NDArray[np.bool_]
    left: int
    detail: str = ""


class RankAnswers:
    """Collects what ``ranks`` movers answer. Not thread-safe: it belongs to whoever has the directory."""

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(f"ranks: expected at least 1, got {ranks}")
        self.ranks = ranks
        self._open: dict[int, _Open] = {}

    def expect(self, command: Command) -> None:
        """``command`` goes out to every rank."""
        if not isinstance(command, Cancel):  # which has no answer
            n = positions(command)
            seen = np.zeros((self.ranks, n), dtype=np.bool_)
            self._open[command.id] = _Open(command, np.zeros(n, dtype=np.int64), seen, self.ranks * n)

    def waits_for(self, number: int) -> bool:
        """Whether some rank has not answered this command."""
        return number in self._open

    def __len__(self) -> int:
        """Commands that some rank has not answered."""
        return len(self._open)

    def add(self, rank: int, ack: Ack) -> Ack | None:
        """What a rank answers; returns the answer of all when it was the last. Late answers are left.

        Raises TransferError, and changes nothing, on a rank or positions that can't be.
        """
        if not 0 <= rank < self.ranks:
            raise TransferError(f"ack: expected a rank of 0..{self.ranks - 1}, got {rank}")
        one = self._open.get(ack.id)
        if one is None:
            return None
        codes = np.frombuffer(ack.statuses, dtype=np.uint8)
        at = np.arange(ack.first, ack.first + codes.size)
        if ack.first < 0 or ack.first + codes.size > one.badness.size or not np.isin(codes, _CODE).all():
            raise TransferError(
                f"ack: expected statuses of positions 0..{one.badness.size - 1}, got {codes[:8].tolist()} "
                f"of {ack.first}..{ack.first + codes.size - 1}"
            )
        if isinstance(one.command, Evict):  # not there is as good as removed
            codes = np.where(codes == _MISS, OK, codes)
        fresh = ~one.seen[rank, at]
        one.seen[rank, at] = True
        np.maximum.at(one.badness, at[fresh], _RANK[codes[fresh]])
        one.left -= int(fresh.sum())
        if ack.detail and not one.detail:
            one.detail = ack.detail if self.ranks == 1 else f"rank {rank}: {ack.detail}"
        if one.left:
            return None
        del self._open[ack.id]
        return Ack(id=ack.id, statuses=_CODE[one.badness].tobytes(), detail=one.detail)
