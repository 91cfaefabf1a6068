"""Doubts: what a forward may have made of a layer-wise load that fails.

Such a load gives its verdict after the forward has begun to use it. What that step, or one that followed before the
verdict was known, has stored and filled is not believed.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.commands import CODES, OK, Ack, Command, Load, Store
from kvtransfer.tiers.base import PageStatus

_ERROR = CODES[PageStatus.ERROR]


class Doubts:
    """Of one engine. Told of every command and every answer; belongs to whoever has the directory."""

    def __init__(self) -> None:
        self._loads: set[int] = set()  # layer-wise, not answered
        self._stores: set[int] = set()  # not answered
        self._doubtful: set[int] = set()  # of these
        self._filled: set[int] = set()  # blocks, by steps with such loads under way
        self._bad: set[int] = set()

    def filled(self, blocks: Iterable[int]) -> None:
        """The step that is being made fills these blocks."""
        self._filled.update(blocks)

    def sent(self, commands: Iterable[Command]) -> None:
        """The commands of that step."""
        for command in commands:
            if isinstance(command, Store):
                self._stores.add(command.id)
            elif isinstance(command, Load) and command.layerwise:
                self._loads.add(command.id)
        if not self._loads:
            self._filled.clear()

    def judged(self, acks: Iterable[Ack]) -> list[Ack]:
        """The answers of a step as they are to be taken: loads first; what was stored in vain is ERROR."""
        out = []
        for ack in sorted(acks, key=lambda ack: ack.id not in self._loads):  # stable
            if ack.id in self._loads and set(ack.statuses) - {OK}:
                self._doubtful |= self._stores
                self._bad |= self._filled
            if ack.id in self._doubtful:
                self._doubtful.discard(ack.id)
                statuses = bytes([_ERROR]) * len(ack.statuses)
                ack = Ack(id=ack.id, statuses=statuses, detail="made from a load that failed")
            self._loads.discard(ack.id)
            self._stores.discard(ack.id)
            out.append(ack)
        return out

    def take_bad_blocks(self) -> set[int]:
        """Blocks that hold what was made of such a load, since the last call: nobody else is to find them."""
        taken, self._bad = self._bad, set()
        return taken
