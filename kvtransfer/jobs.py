"""What a directory hands out and keeps: hits, jobs, and the moves and flights that jobs are made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import CODES, OK, STATUSES, WAITING, Command, Scope
from kvtransfer.index import MAX_SLOT
from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tree import Ids, Node

if TYPE_CHECKING:
    from types import TracebackType

    from kvtransfer.directory import Directory


class Segment(NamedTuple):
    """Pages ``first`` to ``stop - 1`` of a hit, and the fastest tier that has them."""

    tier: str
    first: int
    stop: int


class PrefixHit:
    """A prefix that is there, one contiguous run of pages from the first on: nothing of it goes until `release`.

    Release it once its loads have been submitted (they hold what they read): a hit that is kept while a request runs
    keeps its pages in every tier.

    pages         of the hit; ``tokens`` = pages * page_size
    device_pages  of these, the leading ones that need no load
    segments      where the others are, in order
    hinted_pages  pages behind the hit that a shared tier is thought to have; a prefetch asks it
    """

    def __init__(
        self,
        directory: Directory,
        scope: Scope,
        node: Node,
        pages: int,
        device_pages: int,
        segments: tuple[Segment, ...],
        hinted_pages: int,
    ) -> None:
        self._directory = directory
        self.scope = scope
        self.node = node
        self.pages = pages
        self.device_pages = device_pages
        self.segments = segments
        self.hinted_pages = hinted_pages
        self.held = True

    @property
    def tokens(self) -> int:
        """Length of the hit."""
        return self.pages * self._directory.index.page_size

    @property
    def tokens_by_tier(self) -> Mapping[str, int]:
        """The same by tier; the sum is `tokens`."""
        size = self._directory.index.page_size
        out = {"device": self.device_pages * size} if self.device_pages else {}
        for tier, first, stop in self.segments:
            out[tier] = out.get(tier, 0) + (stop - first) * size
        return out

    def release(self) -> None:
        """Hold it no more. Does nothing the second time."""
        self._directory._release(self)

    def __enter__(self) -> PrefixHit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Job:
    """A store, a load or a prefetch under way: a status for each of its pages ``first``, ``first + 1`` ... A resize has
    one status.

    number      of a load: its commands have it (`Load.load`)
    ids         of a load or a store: the device pages
    deadline_s  that a load may take, None where nobody said
    unverified  of a load: pages that are OK, but have no digests to compare; bad_layers: (page, layer) that differ
    """

    def __init__(self, kind: Literal["store", "load", "prefetch", "resize"], first: int, pages: int) -> None:
        self.kind = kind
        self.first = first
        self.codes: NDArray[np.uint8] = np.full(pages, WAITING, dtype=np.uint8)
        self.detail = ""  # the first cause that an answer gave
        self.done = False
        self.number = 0
        self.ids: Ids | None = None
        self.deadline_s: float | None = None
        self.unverified: list[int] = []
        self.bad_layers: list[tuple[int, int]] = []
        self.node: Node | None = None  # locked for it
        self._unknown = pages
        self._telling = (
            threading.Lock()
        )  # of `done` and the callbacks: one that comes while it ends is called all the same
        self._callbacks: list[Callable[[Job], object]] = []

    @property
    def statuses(self) -> list[PageStatus | None]:
        """One a page; None: not known yet."""
        return [STATUSES.get(code) for code in self.codes.tolist()]

    @property
    def usable_pages(self) -> int:
        """Leading pages that are OK: all that a prefix can use."""
        bad = np.flatnonzero(self.codes != OK)
        return int(bad[0]) if bad.size else int(self.codes.size)

    @property
    def open_end(self) -> int:
        """Leading pages that are OK or can still be."""
        bad = np.flatnonzero((self.codes != OK) & (self.codes != WAITING))
        return int(bad[0]) if bad.size else int(self.codes.size)

    def positions(self, status: PageStatus | None) -> list[int]:
        """Page numbers (from the root on) with this status."""
        wanted = WAITING if status is None else CODES[status]
        return (np.flatnonzero(self.codes == wanted) + self.first).tolist()

    def add_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Call it once the job is done (at once if it is), on the thread that brought the last answer, without any of
        the directory's locks."""
        with self._telling:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _settle(self, pages: Ids, status: int) -> bool:
        """Write a status down where there is none. Whether this was the last that was missing."""
        if not pages.size:
            return False
        at = pages - self.first
        at = at[self.codes[at] == WAITING]
        self.codes[at] = status
        self._unknown -= at.size
        return bool(at.size) and not self._unknown

    def _finish(self) -> None:
        """All statuses are known. No callback is added from now on: one that comes is called at once."""
        with self._telling:
            self.done = True

    def _call_back(self) -> None:
        """Tell those who asked."""
        self._finish()
        while self._callbacks:
            call_subscriber(partial(self._callbacks.pop(0), self))


@dataclass(eq=False)
class Move:
    """Pages that are to go from one tier to another, as far as they are not under way yet.

    source        None: the caller's device pages, in ``ids`` (a page id for each of ``pages``)
    target        None: the caller's device pages, in ``ids``
    for_eviction  the source gives the pages up once they are written, or can't be
    tried         sources where they could not be had; ``detail``: the first cause of that
    """

    node: Node
    scope: Scope
    pages: Ids
    source: str | None
    target: str | None
    ids: Ids | None = None
    job: Job | None = None
    for_eviction: bool = False
    layerwise: bool = False
    tried: frozenset[str] = frozenset()
    detail: str = ""
    under_way: int = 0  # commands

    def without(self, gone: NDArray[np.bool_]) -> None:
        """Pages that need no command any more, or have one."""
        self.pages = self.pages[~gone]
        if self.ids is not None:
            self.ids = self.ids[~gone]


@dataclass(eq=False)
class Flight:
    """A command that has been given out: its pages on the path to ``node``, which is locked until all are answered.

    slots  that it writes; zeros where the target is the device or a tier by key
    read   slots of a slots tier that it reads; empty where there are none
    """

    command: Command
    node: Node
    pages: Ids
    slots: Ids
    read: Ids
    move: Move | None
    source: str | None
    target: str | None
    cancelled: bool = False  # it was asked to stop: what it says is not the tier's fault
    codes: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.codes = np.full(self.pages.size, WAITING, dtype=np.uint8)

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which pages have their status."""
        return np.asarray(self.codes != WAITING)

    @property
    def ok(self) -> NDArray[np.bool_]:
        return np.asarray(self.codes == OK)


def page_ids_of(given: NDArray[np.int64] | Sequence[int], count: int, verb: str) -> Ids:
    """Device page ids, int64, a copy of the caller's. Raises LayoutError unless they are ``count`` distinct ones."""
    out = integers(given, verb)
    if out.size != count:
        raise LayoutError(f"{verb}: expected {count} device pages, one for each page of tokens, got {out.size}")
    if out.size and (int(out.min()) < 0 or int(out.max()) > MAX_SLOT or np.unique(out).size < out.size):
        raise LayoutError(f"{verb}: expected distinct device pages in 0..{MAX_SLOT}, got {out[:8].tolist()}")
    return out


def integers(given: NDArray[np.int64] | Sequence[int], what: str) -> Ids:
    """A list of ids as int64, a copy. Raises LayoutError on what are no integers, or not one list of them: 1.5 is no
    page 1, and a mask is no list of pages."""
    try:
        out = np.asarray(given)
    except ValueError as error:
        raise LayoutError(f"{what}: expected a list of integers, got a ragged one") from error
    if out.size and (out.ndim != 1 or out.dtype.kind not in "iu"):
        raise LayoutError(f"{what}: expected a list of integers, got shape {out.shape} of {out.dtype}")
    return out.astype(np.int64).reshape(-1)


def is_whole(given: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``: neither 2.5 nor True is one."""
    return isinstance(given, int | np.integer) and not isinstance(given, bool) and int(given) >= least
