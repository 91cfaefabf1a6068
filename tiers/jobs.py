"""Job, and Outcome or Same: what a tier's worker is given, and what it answers for each page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.parts import Parts


class Outcome(NamedTuple):
    """What became of one page of a job: its position there, its status, and a cause where there is one.

    ``moved_bytes`` were read or written for it: 0 for a put whose key was there already. ``checked``, of a get that is
    OK: the record has passed `sealed.check_whole` already.
    """

    at: int
    status: PageStatus
    error: BaseException | None = None
    moved_bytes: int = 0
    checked: bool = False


class Same(NamedTuple):
    """One outcome of ``pages`` pages that follow each other in a job: the quick way to tell what most come to.
    ``moved_bytes`` is each page's. See `Outcome`."""

    first: int
    pages: int
    status: PageStatus
    moved_bytes: int = 0
    checked: bool = False

    def singly(self) -> list[Outcome]:
        """Each by itself."""
        _, _, status, moved_bytes, checked = self
        return [Outcome(at, status, None, moved_bytes, checked) for at in range(self.first, self.first + self.pages)]


@dataclass(frozen=True)
class Job:
    """Some pages of one batch, begun: they are the worker's until it has yielded an outcome for each.

    positions      of these pages in the batch
    keys, buffers  of these pages, equally long (no buffers for lookup, remove and pin)
    """

    batch: Batch
    positions: list[int]
    keys: list[bytes]
    buffers: list[RecordBuffer]

    def only(self, places: Sequence[int]) -> Job:
        """The job of just these pages of it."""
        return Job(
            self.batch,
            [self.positions[i] for i in places],
            [self.keys[i] for i in places],
            [self.buffers[i] for i in places] if self.buffers else [],
        )

    @cached_property
    def parts(self) -> Parts:
        """Where the buffers lie."""
        return self.batch.parts.only(self.positions)

    def positions_of(self, run: Same) -> list[int]:
        """In the batch. IndexError: the job has no such pages."""
        first, stop = run.first, run.first + run.pages
        if not 0 <= first <= stop <= len(self.positions):
            raise IndexError(f"expected a run of a job of {len(self.positions)} pages, got {first} to {stop - 1}")
        return self.positions[first:stop]

    @property
    def ttl_s(self) -> float | None:
        """Of a pin."""
        return self.batch.ttl_s

    @property
    def stopping(self) -> bool:
        """Whether to begin nothing more: what is left may be yielded as CANCELLED."""
        return self.batch.stopping

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the batch's deadline, None without one."""
        return self.batch.remaining_s


Outcomes = Iterable[Outcome | list[Outcome] | Same]
Group = list[Outcome] | Same


def grouped(outcomes: Outcomes) -> Iterator[Group]:
    """Several at a time, whatever was yielded: what is known at the same time is checked and told together."""
    for some in outcomes:
        yield [some] if isinstance(some, Outcome) else some


def singly(outcomes: Outcomes) -> Iterator[Outcome]:
    """One at a time, whatever was yielded."""
    for some in grouped(outcomes):
        yield from some.singly() if isinstance(some, Same) else some
