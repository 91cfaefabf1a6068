"""Star: rounds in which all ranks report to one in the middle, who decides and tells all.

The middle has a process group of its own with each other rank (`kvtransfer.pair`): it knows who died or is late, and
tells the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvtransfer.kernels.errors import RankError
from kvtransfer.pair import Link, Store, one_line

Decide: TypeAlias = Callable[[Mapping[int, bytes]], bytes]


class _Message(msgspec.Struct, array_like=True):
    """``number`` and ``kind`` of the round; what is said; or why nothing is, and which ranks are to blame."""

    number: int
    kind: str
    body: bytes = b""
    problem: str = ""
    ranks: tuple[int, ...] = ()


class Star:
    """Rounds among ``ranks``, of which the first is in the middle. Thread-safe; one round at a time.

    Args:
        name: of these rounds, different for every star on ``store``.
        store: that all of them reach (a TCPStore, a FileStore ...); used while starting only.
        ranks: of the cache, the same sequence everywhere; ``rank`` is this one.
        deadline_s: that a rank may be late. A dead one is seen at once where its host still answers. The others wait
            twice as long for the middle, which may itself be waiting for someone.
        start_s: that a rank may take to come.

    Each call of `round` is one message from each other rank to the middle, and one back, whatever happens in it.
    """

    def __init__(
        self, name: str, store: Store | None, ranks: Sequence[int], rank: int, *, deadline_s: float, start_s: float
    ) -> None:
        self.name, self.rank, self.ranks = name, rank, tuple(ranks)
        self.middle = ranks[0]
        self.rounds = 0
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._error: RankError | None = None
        self._lost: dict[int, str] = {}
        others = [other for other in ranks if other != rank] if rank == self.middle else [self.middle]
        self._links: dict[int, Link] = {}
        for other in others if len(ranks) > 1 else ():
            pair = f"{name}/{other if rank == self.middle else rank}"
            self._links[other] = Link(store, pair, other, middle=rank == self.middle, start_s=start_s)

    def round(self, kind: str, report: bytes, decide: Decide) -> bytes:
        """One round: give ``report``, get what ``decide`` makes of all of them, by rank, in the middle.

        ``kind`` says what the round is about: ranks that disagree about it have lost each other. Raises RankError, on
        all that are left, if a rank died, is late, or is in another round; every later round raises it again. If
        ``decide`` raises, so does the middle, and the others raise RankError for this round only.
        """
        with self._lock:
            if self._error is not None:
                raise RankError(str(self._error), self._error.ranks)
            self.rounds += 1
            try:
                return (
                    self._in_middle(kind, report, decide) if self.rank == self.middle else self._outside(kind, report)
                )
            except RankError as error:
                if not isinstance(error, _OnlyThisRound):
                    self._error = error
                raise

    def close(self) -> None:
        """Let go of the connections. Others that are still in a round see this rank gone: close after the last one."""
        with self._lock:
            self._links.clear()
            self._error = self._error or RankError(f"{self.name}: closed", [self.rank])

    def _in_middle(self, kind: str, report: bytes, decide: Decide) -> bytes:
        until = time.monotonic() + self._deadline_s
        reports = {self.rank: report}
        astray: dict[int, str] = {}
        if not self._lost:  # else that is what this round is about
            self._try(self._alive(), Link.expect)
        for link in self._alive() if not self._lost else ():
            try:
                message = msgspec.msgpack.decode(link.receive(until), type=_Message)
            except RankError as error:
                self._lost[link.peer] = str(error)
                continue
            if (message.number, message.kind) != (self.rounds, kind):
                astray[link.peer] = f"rank {link.peer} is in round {message.number} ({message.kind})"
            reports[link.peer] = message.body
        if self._lost or astray:
            problem = "; ".join([*self._lost.values(), *astray.values()])
            problem = f"{self.name}, round {self.rounds} ({kind}): {problem}"
            ranks = tuple(sorted({*self._lost, *astray}))
            self._tell(_Message(self.rounds, kind, problem=problem, ranks=ranks))
            raise RankError(problem, ranks)
        try:
            decision = decide({rank: reports[rank] for rank in self.ranks})
        except BaseException as error:
            problem = f"{self.name}, round {self.rounds} ({kind}): rank {self.rank} could not decide: {one_line(error)}"
            self._tell(_Message(self.rounds, kind, problem=problem))
            raise
        self._tell(_Message(self.rounds, kind, decision))
        return decision

    def _outside(self, kind: str, report: bytes) -> bytes:
        until = time.monotonic() + 2 * self._deadline_s
        link = self._links[self.middle]
        link.expect()
        link.send(msgspec.msgpack.encode(_Message(self.rounds, kind, report)))
        message = msgspec.msgpack.decode(link.receive(until), type=_Message)
        link.sent(until)
        if message.problem:
            raise (RankError if message.ranks else _OnlyThisRound)(message.problem, message.ranks or (self.middle,))
        return message.body

    def _alive(self) -> list[Link]:
        return [link for link in self._links.values() if link.peer not in self._lost]

    def _tell(self, message: _Message) -> None:
        """To all that are left. Who does not take it is told of in the next round, to all alike."""
        data = msgspec.msgpack.encode(message)
        until = time.monotonic() + self._deadline_s
        alive = self._alive()
        self._try(alive, lambda link: link.send(data))
        self._try(alive, lambda link: link.sent(until))

    def _try(self, links: Sequence[Link], step: Callable[[Link], None]) -> None:
        """Do ``step`` with each; those with which it fails are lost."""
        for link in links:
            try:
                step(link)
            except RankError as error:
                self._lost.setdefault(link.peer, str(error))


class _OnlyThisRound(RankError):
    """The middle could not decide, but is there."""
