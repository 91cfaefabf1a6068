"""RankGroup: the ranks that serve one model agree on what their caches do.

One rank leads. What needs all of them (how many pages can be loaded, is there room) is one round: every rank reports,
the leader decides, all do the same. Each verb costs the same number of rounds whatever is found, fails or is refused,
so that ranks can't wait for each other in different places.

One cache per instance of an engine and data-parallel replica: nothing here reaches further. Those share pages through a
shared tier. Only CPU memory is used; nothing of CUDA is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Literal, TypeVar

import msgspec

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.pair import Store
from kvtransfer.relay import Relay
from kvtransfer.star import Star
from kvtransfer.topology import Topology

Among = Literal["all", "stage"]
_T = TypeVar("_T")
_D = TypeVar("_D")


class _Report(msgspec.Struct, array_like=True):
    """What a rank says: ``value``, or why it has none."""

    value: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class Agreed(Generic[_D]):
    """What was decided, and which ranks could not report, with the reason. The same on all ranks."""

    value: _D
    failures: Mapping[int, str] = field(default_factory=dict)


class RankGroup:
    """The ranks of ``topology``, of which this process is ``rank``. Thread-safe. All make the same calls in order.

    Args:
        store: a `torch.distributed.Store` that all ranks reach, used while starting; None for one rank alone.
        name: of the cache, where several meet in one store: another for each instance and replica.
        deadline_s: that a rank may be late before the others give it up. They raise RankError, alike, within twice
            that. A rank whose process died is seen at once.
        start_s: that a rank may take to come.
        most_ahead: decisions that a first stage may be ahead of a later one (see `post`).
        observer: told of ranks that could not report.

    Attributes:
        coordinates, is_leader, leads_stage: of this rank.
        all, stage: rounds of all ranks, and of the ranks of this pipeline stage.

    Raises ConfigError on arguments that don't fit, RankError if a rank does not come.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int = 0,
        store: Store | None = None,
        *,
        name: str = "",
        deadline_s: float = 30.0,
        start_s: float = 300.0,
        most_ahead: int = 64,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.coordinates = topology.coordinates(rank)
        if not (0 < deadline_s <= 1e6 and 0 < start_s <= 1e6) or most_ahead < 1:
            raise ConfigError(
                f"group: expected deadline_s and start_s above 0 and most_ahead of at least 1, "
                f"got {deadline_s}, {start_s} and {most_ahead}"
            )
        if store is None and topology.size > 1:
            raise ConfigError(f"group: expected a store that all {topology.size} ranks reach, got none")
        self.topology, self.rank = topology, rank
        self._observer = observer
        prefix = f"kvtransfer/{name}"
        ranks, stage = tuple(range(topology.size)), topology.stage(self.coordinates.pp)
        self.is_leader, self.leads_stage = rank == ranks[0], rank == stage[0]
        self.all = Star(f"{prefix}/all", store, ranks, rank, deadline_s=deadline_s, start_s=start_s)
        if topology.pp == 1:
            self.stage = self.all
        else:
            which = f"{prefix}/stage{self.coordinates.pp}"
            self.stage = Star(which, store, stage, rank, deadline_s=deadline_s, start_s=start_s)
        self._relay: Relay | None = None
        if self.leads_stage:
            leaders = topology.stage_leaders
            self._relay = Relay(
                f"{prefix}/relay", store, leaders, rank, most=most_ahead, deadline_s=deadline_s, start_s=start_s
            )

    def agree(
        self,
        kind: str,
        report: Callable[[], Any],
        decide: Callable[[Mapping[int, Any]], _D],
        *,
        among: Among = "all",
    ) -> Agreed[_D]:
        """One round: what ``report`` gives here goes to the leader, whose ``decide`` makes a decision of all, by rank.

        kind    what it is about, the same on all ranks ("match request 17")
        report  gives plain values (numbers, texts, bytes, lists, tables). Where it raises, the round goes on without
                this rank's report: ``failures`` says so, to all alike
        decide  called by the leader alone, with the reports that there are; gives plain values
        among   "all" ranks, or those of this pipeline "stage", whose first rank leads it

        If ``decide`` raises, the leader does, and the others raise RankError; the next round is as good as any.
        """
        star = self.all if among == "all" else self.stage

        def combine(reports: Mapping[int, bytes]) -> bytes:
            said = {rank: msgspec.msgpack.decode(data, type=_Report) for rank, data in reports.items()}
            failures = {rank: one.failure for rank, one in said.items() if one.failure is not None}
            decision = decide({rank: one.value for rank, one in said.items() if one.failure is None})
            return msgspec.msgpack.encode((decision, failures))

        found = star.round(kind, msgspec.msgpack.encode(self._report(kind, report)), combine)
        value, failures = msgspec.msgpack.decode(found, type=tuple[Any, dict[int, str]])
        return Agreed(value, MappingProxyType(failures))

    def minimum(
        self, kind: str, count: int, numbers: Callable[[], Sequence[int]], *, among: Among = "all"
    ) -> Agreed[tuple[int, ...]]:
        """The least that any rank has, number by number: hits, free slots. One round.

        ``numbers`` gives ``count`` of them, at least 0 each. A rank where it raises counts as 0 of each.
        """

        def mine() -> list[int]:
            found = [int(number) for number in numbers()]
            if len(found) != count or min(found, default=0) < 0:
                raise ConfigError(f"{kind}: expected {count} numbers of at least 0, got {found}")
            return found

        def least(reports: Mapping[int, Any]) -> list[int]:
            if len(reports) < (self.topology.size if among == "all" else len(self.stage.ranks)):
                return [0] * count
            return [min(column) for column in zip(*reports.values(), strict=True)]

        agreed = self.agree(kind, mine, least, among=among)
        return Agreed(tuple(agreed.value), agreed.failures)

    def from_leader(self, kind: str, make: Callable[[], _T], *, among: Among = "all") -> _T:
        """What ``make`` gives on the leader (of all, or of the stage), on every rank. One round.

        ``make`` is called there alone. If it raises, the leader does, and the others raise RankError.
        """
        return self.agree(kind, lambda: None, lambda reports: make(), among=among).value

    def post(self, message: Any) -> None:
        """Tell the leaders of the later stages something that they need when the batch reaches them (see `take`).

        Called by the leader; returns without waiting while they are less than ``most_ahead`` messages behind. Raises
        RankError if one has died, or takes nothing for ``deadline_s``.
        """
        self._ahead().post(msgspec.msgpack.encode(message))

    def take(self) -> Any:
        """The next message that the leader posted. Called by leaders of later stages; see `Relay.take` for errors."""
        return msgspec.msgpack.decode(self._ahead().take())

    def close(self) -> None:
        """Let go of the connections. Call it after the last round, on all ranks."""
        self.all.close()
        self.stage.close()
        if self._relay is not None:
            self._relay.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ahead(self) -> Relay:
        if self._relay is None:
            raise ConfigError(f"post and take: expected the leader of a stage, got rank {self.rank}")
        return self._relay

    def _report(self, kind: str, report: Callable[[], Any]) -> _Report:
        """What this rank says. A failure is told to all: raising it here would leave the others waiting."""
        try:
            return _Report(report())
        except Exception as error:  # kept: it becomes this rank's answer, and every rank raises it
            why = f"{type(error).__name__}: {error}"[:500]
            self._observer.noted("group.failed", kind=kind, rank=self.rank, why=why)
            return _Report(failure=why)
