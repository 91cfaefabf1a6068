"""Keeping: what is held for a while, given up, forgotten; tiers that come, go, and change their size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import INDEX_KINDS, Book, TierPlan
from kvtransfer.commands import OK, Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.jobs import Job, Move, Segment, is_whole, page_ids_of
from kvtransfer.kernels.errors import CapacityError, ConfigError, LayoutError
from kvtransfer.moves import CANCELLED, verb
from kvtransfer.policy import Prefetch, Prune
from kvtransfer.prefetch import Prefetching
from kvtransfer.radix import Match
from kvtransfer.tiers.keys import Tokens, token_bytes
from kvtransfer.tree import ABSENT, Ids, Node


class Keeping(Prefetching):
    """The part of a `Directory` for those who run it."""

    def __init__(
        self,
        index: PrefixIndex,
        books: dict[str, Book],
        host: Book,
        window: int,
        evict_extra: float,
        policy: Prefetch,
        prune: Prune | None,
        ghost_pages: int,
        watermarks: tuple[float, float],
    ) -> None:
        super().__init__(index, books, host, window, evict_extra, policy)
        self._device = next((book for book in books.values() if book.plan.kind == "device"), None)
        self._prune, self._pruned_at = prune, float("-inf")
        self._high, self._low = watermarks
        self._ghosts: dict[Node, int] = {}  # the oldest first, with their pages
        self._ghost_room = ghost_pages
        self._pinned: list[tuple[float, Node]] = []

    # --- tiers

    @verb
    def place(
        self,
        tokens: Tokens,
        page_ids: NDArray[np.int64] | Sequence[int],
        scope: Scope | None = None,
        *,
        first: int = 0,
    ) -> NDArray[np.bool_]:
        """The device tier holds these pages from now on, until `evict` or `flush` give them back. False for pages that
        it holds elsewhere already: those ids stay the caller's."""
        if self._device is None:
            raise ConfigError("place: expected a tier of kind device, got none; give one to the directory")
        if not is_whole(first, 0):
            raise LayoutError(f"place: expected first of at least 0, got {first!r}")
        scope, given = scope or Scope(), np.frombuffer(token_bytes(tokens), dtype="<u4")
        ids = page_ids_of(page_ids, max(0, given.size // self._index.page_size - first), "place")
        found = self._index.insert(given, scope.name())
        new: NDArray[np.bool_] = self._index.codes(found, self._device.name, first) == ABSENT
        self._index.write(found.node, self._device.name, np.flatnonzero(new) + first, ids[new])
        self._device.used += int(new.sum())
        return new

    @verb
    def evict(self, tier: str, pages: int) -> Ids:
        """Give up to ``pages`` pages of a tier up, by its policy, none that is held. Returns the slots (of the device
        tier: its page ids) that are free now; others follow when a lower tier has them: ask again then. Raises
        ConfigError for a tier that is not there, or pages that are no number of them."""
        if not is_whole(pages, 0):
            raise ConfigError(f"evict: expected 0 pages or more, got {pages!r}")
        book = self._book(tier)
        return self._evict(book, int(pages)) if pages else np.empty(0, dtype=np.int64)

    def flush(self, tier: str) -> Ids:
        """`evict` everything of one tier that is not held; the others keep what they have."""
        return self.evict(tier, 2**62)

    @verb
    def attach(self, plan: TierPlan) -> None:
        """Add a tier by key below the others, or take one back that was detached (what it holds is not known then)."""
        book = self._books.get(plan.name)
        if plan.kind not in ("keys", "shared") or (book is not None and (book.attached or book.plan.kind != plan.kind)):
            raise ConfigError(f"attach: expected a tier by key with a new name, or a detached one, got {plan}")
        if book is None:
            self._index.add_tier(plan.name, INDEX_KINDS[plan.kind])
            book = self._books[plan.name] = Book(plan, self._index)
            self._below.append(book)
        book.attached, book.capacity = True, plan.capacity_pages
        self._recover(book)

    @verb
    def detach(self, tier: str) -> None:
        """A tier by key is used no more. What it holds stays there, and is forgotten here."""
        book = self._book(tier)
        if not book.by_key:
            raise ConfigError(f"detach: expected a tier by key, got {tier}")
        book.attached = False
        self._recover(book)
        self._forget(book)

    @verb
    def forget(self, tier: str) -> None:
        """The tier has lost what it held: none of it is there from now on, not even for hits that are held (a load of
        them is short). What is under way there goes on: call `lost` first if nobody will answer."""
        self._forget(self._book(tier))

    @verb
    def resize(self, tier: str, capacity_pages: int) -> Job:
        """Another capacity, smaller or larger. The job is done when it holds; a later `resize` cancels it.

        A tier by key takes any number, and gives up what is too much. The slots tier (up to `TierPlan.most_pages`)
        grows once the mover has the memory. It shrinks from the highest slots down: what is too much is given up by its
        policy, what is left there moves to other slots, and then the mover gives the memory back. That waits for what
        holds more pages than there is room for; `tick` goes on with it. Pages that are held or under way are not lost.
        """
        job = Job("resize", 0, 1)
        book = self._book(tier)
        if book.capacity is None or not is_whole(capacity_pages, 1):
            raise ConfigError(
                f"resize: expected a tier with a capacity, and 1 page or more, got {tier}, {capacity_pages!r}"
            )
        if book.is_slots:
            if capacity_pages > book.extents.count:
                raise CapacityError(
                    f"{tier}: expected at most most_pages={book.extents.count} pages, got {capacity_pages}"
                )
            self._set_size(book, capacity_pages, job)
        else:
            book.capacity = capacity_pages
            self._make_room(book, 0)
            self._tell(job, np.zeros(1, dtype=np.int64), OK)
        return job

    @verb
    def grown(self, tier: str, pages: int) -> None:
        """The memory of the slots tier has grown by itself to so many slots: they are given out from now on, as far as
        the plan goes. Nothing is asked of the mover: it would take a `resize` for the end of growing. Not after one."""
        book = self._book(tier)
        if not book.is_slots or book.sizing is not None or book.size_asked:
            raise ConfigError(f"grown: expected a slots tier that no resize is about, got {tier}")
        book.memory = book.goal = max(book.memory, min(pages, book.extents.count))
        self._set_ready(book)

    def capacity(self, tier: str) -> int | None:
        """Pages that a tier may have now; None: no limit that is known here."""
        with self._index.mutex:
            return self._book(tier).capacity

    def lower_tiers(self) -> list[str]:
        """Names of the tiers by key that are attached, fastest first."""
        with self._index.mutex:
            return [book.name for book in self._below if book.attached]

    def require_fits(self, host: str, host_most_pages: int, lower: Collection[str]) -> None:
        """Raise ConfigError unless this directory has just these tiers, beside a device tier: a host tier of this name
        with at most so many slots, and these below."""
        names = {book.name for book in self._below if book.attached}
        most = self._host.extents.count
        if self._host.name != host or most > host_most_pages or names != set(lower):
            raise ConfigError(
                f"expected a directory with a slots tier {host!r} of at most {host_most_pages} pages, above "
                f"{sorted(lower)}, as the mover has; got {self._host.name!r} of {most}, above {sorted(names)}"
            )

    @verb
    def write_out(self) -> None:
        """Begin to write what write-back tiers lack of the host tier, which keeps it."""
        for book in [book for book in self._below if book.attached and book.write.on_evict]:
            for node, pages in self._bare_pages([book]):
                scope = Scope.parse(self._index.namespace(node))
                self._begin(Move(node, scope, pages, self._host.name, book.name))

    @verb
    def unsaved_pages(self) -> int:
        """Pages that the host tier alone has, where there are tiers below; 0 where there are none."""
        below = [book for book in self._below if book.attached]
        return sum(pages.size for _, pages in self._bare_pages(below)) if below else 0

    @verb
    def close(self) -> None:
        """Let go of what is pinned, and of what waits for room. What is under way is still answered."""
        pinned, self._pinned = self._pinned, []
        for _, node in pinned:
            self._index.unlock(node)
            self._index.tidy(node)
        for move in [*self._waiting]:
            self._settle(move, move.pages, CANCELLED)
        self._give_up_size(self._host)
        self._stop_looking()

    # --- keeping and forgetting

    @verb
    def pin(self, tokens: Tokens, scope: Scope | None = None, *, ttl_s: float) -> int:
        """Hold what is there of ``tokens`` for ``ttl_s`` seconds (`tick` lets go). How many pages."""
        if not (isinstance(ttl_s, int | float) and ttl_s >= 0):  # a NaN would never come, nor be over
            raise ConfigError(f"pin: expected ttl_s of 0 seconds or more, got {ttl_s!r}")
        found = self._index.match(tokens, (scope or Scope()).name(), use=False)
        pages = self._where(found, 0)[0]
        if pages:
            self._index.lock(found.node)
            self._pinned.append((self._index.clock() + ttl_s, found.node))
        return pages

    @verb
    def tick(self) -> None:
        """Call it now and then: pins end, cold branches are pruned, a host tier above its watermark is cleared, or
        goes on shrinking; tiers that failed are asked whether they answer again."""
        self._look_after()
        now = self._index.clock()
        ended = [node for until, node in self._pinned if until <= now]
        self._pinned = [pin for pin in self._pinned if pin[0] > now]
        for node in ended:
            self._index.unlock(node)
            self._index.tidy(node)
        self._vacate(self._host)
        prune, host = self._prune, self._host
        if host.sizing is not None:
            return  # pages that are relocated count twice; what is too much was given up when that began
        if host.used - host.leaving > self._high * (host.capacity or 0):
            self._evict(host, host.used - host.leaving - int(self._low * (host.capacity or 0)))
        if prune is not None and now - self._pruned_at >= prune.every_s:
            self._pruned_at = now
            tails = host.victims.candidates()
            while tails and host.used > prune.watermark * (host.capacity or 0):
                tail = tails.pop()
                if prune.is_cold(tail, now) and host.victims.is_candidate(tail):
                    parent = tail.parent
                    self._give_up(tail, host, np.flatnonzero(self._row(tail, host) >= 0))
                    if parent is not None and host.victims.is_candidate(parent):
                        tails.append(parent)

    def _bare_pages(self, below: Sequence[Book]) -> list[tuple[Node, Ids]]:
        """Nodes and pages that the host tier has, and none of these, nor are they on their way there."""
        found = []
        for node in self._index.nodes():
            bare = self._row(node, self._host) >= 0
            for book in below:
                bare &= self._row(node, book) == ABSENT
            if bare.any():
                found.append((node, np.flatnonzero(bare) + node.start))
        return found

    def _forget(self, book: Book) -> None:
        for node in [*self._index.nodes()]:
            codes = self._row(node, book)
            local = np.flatnonzero(codes >= 0)
            if local.size:
                self._index.write(node, book.name, local + node.start, np.full(local.size, ABSENT))
                book.give(codes[local] if book.is_slots else np.zeros(local.size, dtype=np.int64))
        for node in [node for node in self._index.nodes() if not node.children]:
            self._index.tidy(node)

    def _book(self, tier: str) -> Book:
        if tier not in self._books:
            raise ConfigError(f"tier: expected one of {', '.join(self._books)}, got {tier!r}")
        return self._books[tier]

    def _where(self, found: Match, device_pages: int) -> tuple[int, int, tuple[Segment, ...], int]:
        """What can be had of a path: pages, of these on the device, where the others are, and hinted ones behind."""
        index, device = self._index, device_pages
        if self._device is not None and device < found.pages:
            device += index.run(found, self._device.name, device)
        segments: list[Segment] = []
        stop = device + index.run(found, self._host.name, device)
        if stop > device:
            segments.append(Segment(self._host.name, device, stop))
        private = [book for book in self._usable() if book.plan.kind == "keys"]
        if stop < found.pages and private:
            tiers = [self._host, *private]
            best = np.full(found.pages - stop, -1, dtype=np.int64)
            for number in reversed(range(len(tiers))):
                best[index.codes(found, tiers[number].name, stop) >= 0] = number
            end = int(np.argmin(best)) if (best < 0).any() else best.size
            cuts = [0, *(np.flatnonzero(np.diff(best[:end])) + 1).tolist(), end] if end else []
            segments += [Segment(tiers[best[a]].name, stop + a, stop + b) for a, b in pairwise(cuts)]
            stop += end
        shared = [book for book in self._usable() if book.plan.kind == "shared"]
        hinted = max((index.run(found, book.name, stop) for book in shared), default=0)
        return stop, device, tuple(segments), hinted

    def _remember(self, node: Node) -> None:
        """Keep a node that nothing is stored of, so that its hits are counted; the oldest such nodes go."""
        if node not in self._ghosts and node.parent is not None:
            node.pins += 1
            self._ghosts[node] = node.pages
        while sum(self._ghosts.values()) > self._ghost_room:
            oldest = next(iter(self._ghosts))
            del self._ghosts[oldest]
            oldest.pins -= 1
            self._index.tidy(oldest)
