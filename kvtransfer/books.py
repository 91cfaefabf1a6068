"""Books: what a directory keeps of each tier. How many pages it may have and has, which slots are free, who reads
them, and what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvtransfer.commands import Scope
from kvtransfer.index import Kind, PrefixIndex
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import ConfigError, OwnershipError
from kvtransfer.policy import EvictionPolicy, WritePolicy, eviction, writing
from kvtransfer.tiers.extents import Extents
from kvtransfer.tree import Ids, Node

TierKind = Literal["device", "slots", "keys", "shared"]
INDEX_KINDS: dict[TierKind, Kind] = {"device": "slots", "slots": "slots", "keys": "keys", "shared": "shared"}


@dataclass(frozen=True)
class TierPlan:
    """One tier, as a directory sees it.

    kind            device  the engine's pool: the engine gives out its pages and says which it filled
                    slots   the host tier: the directory gives out its slots
                    keys    private, addressed by key (a disk)
                    shared  by key, and others write there too: asked before anything is read
    capacity_pages  None: the tier sees to it itself (device, shared; a disk that evicts by itself)
    most_pages      what a slots tier may grow to (`Directory.resize`); None: its capacity
    evict           policy, by name or your own
    write           what the tier gets from above, and when
    ask             whether pages that the index does not know are looked up there before a prefetch. None: if it is
                    shared. True for a disk that holds more than this directory wrote (after a restart).
    """

    name: str
    kind: TierKind = "slots"
    capacity_pages: int | None = None
    most_pages: int | None = None
    evict: str | EvictionPolicy = "lru"
    write: str | WritePolicy = "write_through"
    ask: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in INDEX_KINDS:
            raise ConfigError(f"{self.name}: expected a kind of {', '.join(INDEX_KINDS)}, got {self.kind!r}")
        if self.capacity_pages is not None and self.capacity_pages < 1:
            raise ConfigError(f"{self.name}: expected a capacity of at least 1 page, got {self.capacity_pages}")
        if (self.kind == "slots") != (self.capacity_pages is not None) and self.kind != "keys":
            raise ConfigError(f"{self.name} ({self.kind}): expected capacity_pages for slots and keys, and only there")


@dataclass(frozen=True)
class TierFigures:
    """``used_pages`` are there, on their way, or not yet confirmed gone (of a shared tier: not counted, 0).
    ``counters``: pages by what became of them (written, read, failed, evicted, dropped, lost). ``down``: it failed, and
    nothing is read from it until it answers again; ``outages``: how often that was so."""

    capacity_pages: int | None
    used_pages: int
    present_pages: int
    counters: dict[str, int] = field(default_factory=dict)
    down: bool = False
    outages: int = 0


class Book:
    """Of one tier. The directory's mutex guards it."""

    def __init__(self, plan: TierPlan, index: PrefixIndex) -> None:
        self.plan = plan
        self.name = plan.name
        self.is_slots = plan.kind == "slots"
        self.by_key = plan.kind in ("keys", "shared")
        self.counted = plan.kind != "shared"  # hints come and go with the tree
        self.write = writing(plan.write)
        self.ask = plan.kind == "shared" if plan.ask is None else plan.ask
        self.attached = True
        self.capacity = plan.capacity_pages
        self.leaving = 0  # pages whose going has begun: room that will be there
        self.used = 0
        self.barred: dict[Node, float] = {}  # what the tier could not remove, and until when it is not asked again
        self.counters: Counter[str] = Counter()
        # Of one by key: see outages.py.
        self.down, self.outages = False, 0
        self.pause_s = 0.0  # 0: the last read was answered
        self.asked_at = 0.0  # when it failed, or was looked at, last
        self.sample = (Scope(), b"")  # a page that it is asked for then
        self.victims = index.watch(plan.name, eviction(plan.evict))
        ready = (plan.capacity_pages or 0) if self.is_slots else 0
        most = max(ready, plan.most_pages or 0) if self.is_slots else 0
        self.extents = Extents(most, ready, f"{plan.name} slot")
        self.goal = self.memory = ready  # slots that there are to be, and that have memory
        self.sizing: Job | None = None  # the resize that is not done
        self.size_asked = False  # whether its command is under way
        self.relocations = 0  # commands under way
        self.readers = np.zeros(most, dtype=np.int32)
        self._doomed = np.zeros(most, dtype=np.bool_)

    @property
    def free(self) -> int | None:
        """Pages that there is room for now; None: no limit that is known here."""
        if self.is_slots:
            return self.extents.free_slots
        return None if self.capacity is None else self.capacity - self.used

    def take(self, n: int, after: int | None = None) -> Ids:
        """Room for ``n`` pages: their slots, or zeros where there are none."""
        self.used += n if self.counted else 0
        return self.extents.allocate(n, after) if self.is_slots else np.zeros(n, dtype=np.int64)

    def give(self, slots: Ids) -> None:
        """The pages in ``slots`` are there no more. A slot that is still read is free once it is not."""
        if self.is_slots and slots.size:
            read = self.readers[slots] > 0
            self._doomed[slots[read]] = True
            slots = slots[~read]
            self.extents.free(slots)
        self.used -= slots.size if self.counted else 0

    def begin_read(self, slots: Ids) -> None:
        """A command reads ``slots`` (distinct) until `end_read`."""
        if self.is_slots:
            self.readers[slots] += 1

    def end_read(self, slots: Ids) -> None:
        if self.is_slots:
            if (self.readers[slots] < 1).any():
                raise OwnershipError(f"{self.name}: expected slots that are being read, got {slots[:8].tolist()}")
            self.readers[slots] -= 1
            over = slots[self._doomed[slots] & (self.readers[slots] == 0)]
            if over.size:
                self._doomed[over] = False
                self.give(over)
