"""What a `TieredCache` is made of and says: the mover as it sees it, its figures, what its close dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import TierPlan
from kvtransfer.cache_handles import CacheLoad, CacheStore
from kvtransfer.commands import Ack, Command
from kvtransfer.directory import DirectoryFigures
from kvtransfer.mover_facts import MoverFacts, TierFacts, TierState
from kvtransfer.policy import EvictionPolicy, WritePolicy
from kvtransfer.tiers.base import Tier

if TYPE_CHECKING:
    from kvtransfer.layer_loads import LayerLoad

PageIds = NDArray[np.int64] | Sequence[int]
TierOrOptions = Tier | Mapping[str, Any]


class MoverPort(Protocol):
    """What a cache asks of a mover: `kvtransfer.mover.Mover`, or one in another process."""

    answer: Callable[[Ack], object] | None

    def submit(self, commands: Sequence[Command]) -> None: ...

    def load(self, number: int) -> LayerLoad: ...

    def facts(self) -> MoverFacts: ...

    def stats(self) -> Mapping[str, TierState]: ...

    def attach(self, name: str, tier: Any) -> TierFacts: ...

    def detach(self, name: str, *, timeout_s: float = 60.0) -> None: ...

    def is_own_thread(self) -> bool: ...

    def close(self, *, drain: bool = True, timeout_s: float = 60.0) -> None: ...


@dataclass(frozen=True)
class CacheStats:
    """``directory``: hits by tier, pages and counters of each tier, locks. ``tiers``: what the lower tiers say of
    themselves. ``under_way``: loads and stores that are not done."""

    directory: DirectoryFigures
    tiers: Mapping[str, TierState]
    under_way: int


@dataclass(frozen=True)
class Dropped:
    """What a `TieredCache.close` left undone. ``handles`` and ``prefetches`` were cancelled before they were done;
    ``pages`` were in no tier that outlives this process, though there is one (of write-back policies, or refused)."""

    handles: tuple[CacheLoad | CacheStore, ...] = ()
    prefetches: int = 0
    pages: int = 0


def plan_of(
    name: str,
    facts: TierFacts,
    *,
    write: str | WritePolicy = "write_through",
    evict: str | EvictionPolicy = "lru",
    ask: bool | None = None,
) -> TierPlan:
    """How a directory uses a lower tier. One that holds pages already is asked for what the index does not know."""
    if facts.shared:
        return TierPlan(name, "shared", evict=evict, write=write, ask=ask)
    return TierPlan(
        name, "keys", facts.capacity_pages, evict=evict, write=write, ask=facts.pages > 0 if ask is None else ask
    )
