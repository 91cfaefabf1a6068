"""Movement: pages between a host slab and one lower tier, many at a time, in batches of bounded size and number.

A move is cut into batches of at most 128 pages; a few of them, of all moves together, are with the tier at a time.
What waits is a list of ids: buffers, and slots that a prefetch allocates, are taken batch by batch. Batches are
begun in the order of the keys, roots first.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.check import host_ids
from kvtransfer.kernels.errors import CapacityError, ConfigError, KVTransferError, OwnershipError, TierError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, Tier, TierHandle
from kvtransfer.tiers.batch import Verb
from kvtransfer.tiers.batch_book import BatchBook
from kvtransfer.tiers.host import HostTier, Slots
from kvtransfer.tiers.host_size import register_host, unregister_host
from kvtransfer.tiers.move import Move
from kvtransfer.tiers.record import NOTHING_STORED
from kvtransfer.tiers.stop_policy import StopPolicy

MOST_PAGES = 128
Ids = NDArray[np.int64]
Answers = dict[int, tuple[PageStatus, BaseException | None]]  # by the page's place in its move
Answered = Callable[[Answers], None]
Step = Callable[[list[int]], tuple[TierHandle, Answered]]


class Movement:
    """Moves pages between ``host`` and ``tier``. Thread-safe; has no thread of its own: the tier's carry it on.

    Args:
        batch_pages: most pages of one batch, at most 128.
        in_flight: most batches with the tier at a time, of all moves together. ``batch_pages * in_flight`` pages bound
            what is taken for pages under way.
        register: tell the tier of the slab's memory now, and that it goes at `close`; False: it knows it.
        claims: put the slots of a batch under it in ``host.ledger``. False: the caller keeps books of its own, so that
            nobody writes a slot that a move reads, nor touches one that a move fills; reading it at once is legal.

    Raises ConfigError on settings out of range.
    """

    def __init__(
        self,
        host: HostTier,
        tier: Tier,
        *,
        batch_pages: int = MOST_PAGES,
        in_flight: int = 4,
        register: bool = True,
        claims: bool = True,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if not 1 <= batch_pages <= MOST_PAGES or in_flight < 1:
            raise ConfigError(
                f"movement: expected 1 to {MOST_PAGES} pages a batch and 1 or more in flight, "
                f"got {batch_pages} and {in_flight}"
            )
        self.host, self.tier, self.claims = host, tier, claims
        self.book = BatchBook(f"{host.name}<->{tier.name}", observer)
        self._batch_pages, self._most = batch_pages, in_flight
        self._lock = threading.Lock()
        self._waiting: deque[Move] = deque()  # moves with pages that are not begun
        self._with_tier = 0
        self._pumping = False
        self._again = False
        self._registered = register
        if register:
            register_host(host, tier)

    def write_back(
        self,
        keys: Sequence[bytes],
        slots: Slots,
        *,
        lookup_first: bool = True,
        deadline_s: float | None = None,
    ) -> Move:
        """Sealed slots of the host to the tier; ``keys[i]`` is the stored key of ``slots[i]``.

        ``lookup_first`` asks the tier what it has, and sends only the rest. The slots are the move's until each has
        its outcome: `HostTier.free` waits for them or raises. OwnershipError, before anything is touched, if a
        transfer is writing one of them.
        """
        ids = host_ids(slots, self.host.num_slots, "host slot", distinct=False)
        return self._start("write_back", keys, ids, deadline_s, lookup_first=lookup_first)

    def prefetch(
        self,
        keys: Sequence[bytes],
        slots: Slots | None = None,
        *,
        after: int | None = None,
        policy: StopPolicy | None = None,
        deadline_s: float | None = None,
    ) -> Move:
        """Pages of the tier into slots of the host, ready to be loaded.

        ``slots``: the caller's, one a key. None: they are allocated batch by batch, behind ``after`` where that can be;
        what finds no slot is NO_ROOM. Slots of pages that are not OK are wiped, and given back if they were allocated
        here. The first page that is not OK ends the move: what lies behind can't be part of the prefix, and is not
        begun. ``policy`` is for `Move.collect`.
        """
        if slots is None:
            ids = np.full(len(keys), -1, dtype=np.int64)
        else:
            ids = host_ids(slots, self.host.num_slots, "host slot", distinct=True)
        return self._start("prefetch", keys, ids, deadline_s, policy=policy, after=after, allocate=slots is None)

    @property
    def registered(self) -> bool:
        """Whether the tier was told of the slab here, and not yet that it goes."""
        return self._registered

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Finish or cancel what is under way (see `Tier.close`), and unregister the slab. Leaves the tier open. After
        DeadlineExceeded or OwnershipError the tier knows the slab still: call it again."""
        self.book.close(drain=drain, timeout_s=timeout_s, abort=lambda: None)
        registered, self._registered = self._registered, False
        if registered:
            try:
                unregister_host(self.host, self.tier)
            except OwnershipError:
                self._registered = True
                raise

    # --- inside

    def _start(self, verb: Verb, keys: Sequence[bytes], ids: Ids, deadline_s: float | None, **more: Any) -> Move:
        if len(ids) != len(keys):
            raise ConfigError(f"{verb}: expected one slot a key, got {len(ids)} for {len(keys)} keys")
        given = ids[ids >= 0]
        if given.size:
            self.host.require_given_out(given)
            busy = given[self.host.ledger.busy(given)] if self.claims else given[:0]
            if busy.size:
                raise OwnershipError(
                    f"{verb}: expected slots that nothing else moves, got {busy[:8].tolist()}; "
                    "wait for the handle first"
                )
        batch = self.book.open(verb, keys, deadline_s=deadline_s)
        move = Move(self.host, batch, ids, **more)
        batch.on_cancel = move.cancel_parts
        if keys:
            with self._lock:
                self._waiting.append(move)
            self._pump()
        return move

    def _pump(self) -> None:
        """Begin batches while there is room. Called on whatever thread made room; one at a time does the work."""
        with self._lock:
            self._again = True
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                if not self._again:
                    self._pumping = False
                    return
                self._again = False
            while (part := self._next_part()) is not None:
                call_subscriber(functools.partial(self._begin, *part))  # a tier's bug does not stop the others

    def _next_part(self) -> tuple[Move, list[int]] | None:
        """Of the one thread that pumps."""
        while True:
            with self._lock:
                if not self._waiting or self._with_tier >= self._most:
                    return None
                move = self._waiting[0]
            # Without the lock: where its time is up this ends the move, and calls who waits for it.
            places = move.batch.begin(move.next_places(self._batch_pages))
            with self._lock:
                if move.all_begun:
                    self._waiting.popleft()
                if places:
                    self._with_tier += 1
                    return move, places

    def _begin(self, move: Move, places: list[int]) -> None:
        part = _Part(self, move, places)
        try:
            part.begin()
        except (KVTransferError, OSError) as error:  # the tier is closed, or a slot is not ours
            part.end(dict.fromkeys(part.places, (PageStatus.ERROR, error)))
        except BaseException as error:  # a bug, of the tier most likely: reported as one
            part.end(dict.fromkeys(part.places, (PageStatus.ERROR, TierError(f"{self.tier.name}: {error!r}"))))
            raise

    def part_ended(self) -> None:
        """A batch is back from the tier."""
        with self._lock:
            self._with_tier -= 1
        self._pump()


class _Part:
    """One batch of a move, on its way: takes slots, asks the tier, settles. Owns its slots in the host's ledger."""

    def __init__(self, movement: Movement, move: Move, places: list[int]) -> None:
        self.movement, self.move, self.places = movement, move, places
        self.host, self.tier = movement.host, movement.tier
        self._ours = False  # whether the slots are: nobody else moves them

    def begin(self) -> None:
        if self.move.allocate:
            self._allocate()
        slots = self.move.slots[self.places]
        if slots.size:
            if self.movement.claims and self.host.ledger.claim(slots, self):
                raise OwnershipError("expected slots that nothing else moves, got some that a transfer has claimed")
            self._ours = True
        if not self.places:
            self.end({})
        elif self.move.batch.verb == "prefetch":
            self._ask(self._read, self.places)
        elif self.move.lookup_first:
            self._ask(self._look, self.places)
        else:
            self._ask(self._write, self.places)

    def _allocate(self) -> None:
        """Slots for as many pages as there are; the others are NO_ROOM."""
        wanted = len(self.places)
        taken = np.empty(0, dtype=np.int64)
        error: KVTransferError | None = None
        while wanted and not taken.size:
            try:
                taken = self.host.allocate(wanted, after=self.move.last_slot(self.places[0]))
            except CapacityError as refused:
                error = refused
                wanted = min(wanted - 1, self.host.free_slots)  # less each time: others may be faster
        self.move.slots[self.places[: taken.size]] = taken
        without, self.places = self.places[taken.size :], self.places[: taken.size]
        self.move.settle(dict.fromkeys(without, (PageStatus.NO_ROOM, error)), moved_bytes=0)

    # Each step asks the tier and says what to do with the answer. Steps run on the tier's threads.

    def _ask(self, step: Step, places: list[int]) -> None:
        handle, answered = step(places)
        self.move.parts.add(handle)
        if self.move.batch.stopping:
            handle.cancel()

        def done(ended: TierHandle) -> None:
            self.move.parts.discard(handle)
            result = ended.result(0)
            answers: Answers = {
                at: (status, result.errors.get(i))
                for i, (at, status) in enumerate(zip(places, result.statuses, strict=True))
            }
            try:
                answered(answers)
            except (KVTransferError, OSError) as error:  # the tier was closed meanwhile
                self.end(dict.fromkeys(self.places, (PageStatus.ERROR, error)))

        handle.add_done_callback(done)

    def _keys(self, places: list[int]) -> list[bytes]:
        return [self.move.batch.keys[at] for at in places]

    def _buffers(self, places: list[int]) -> list[RecordBuffer]:
        rows, trailers = self.host.rows, self.host.trailers
        slots = self.move.slots[places].tolist()
        return [RecordBuffer(rows[slot], trailers[slot]) for slot in slots]

    def _read(self, places: list[int]) -> tuple[TierHandle, Answered]:
        deadline_s = self.move.batch.remaining_s
        return self.tier.get_into(self._keys(places), self._buffers(places), deadline_s=deadline_s), self._moved

    def _look(self, places: list[int]) -> tuple[TierHandle, Answered]:
        def seen(answers: Answers) -> None:
            lacking = [at for at, (status, _) in answers.items() if status is PageStatus.MISS]
            known = {at: answer for at, answer in answers.items() if answer[0] is not PageStatus.MISS}
            if not lacking or self.move.batch.stopping:
                self.end(known | dict.fromkeys(lacking, (PageStatus.CANCELLED, None)))
            else:
                self.move.settle(known, moved_bytes=0)
                self.places = lacking
                self._ask(self._write, lacking)

        return self.tier.lookup(self._keys(places)), seen

    def _write(self, places: list[int]) -> tuple[TierHandle, Answered]:
        deadline_s = self.move.batch.remaining_s
        return self.tier.put_from(self._keys(places), self._buffers(places), deadline_s=deadline_s), self._moved

    def _moved(self, answers: Answers) -> None:
        pages = sum(status is PageStatus.OK for status, _ in answers.values())
        self.end(answers, moved_bytes=pages * (self.host.slot_bytes + self.host.trailer_bytes))

    def end(self, answers: Answers, *, moved_bytes: int = 0) -> None:
        """The last answer. The ledger is told first: whoever hears of the pages may free or move their slots."""
        if self._ours and self.move.batch.verb == "prefetch":
            self._wipe([at for at in self.places if answers[at][0] is not PageStatus.OK])
        self.host.ledger.release(self)
        self.move.settle(answers, moved_bytes=moved_bytes)
        self.movement.part_ended()

    def _wipe(self, places: list[int]) -> None:
        """What these slots hold is of no page."""
        slots = self.move.slots[places]
        if slots.size:
            self.host.digests[slots] = NOTHING_STORED
            self.host.trailers[slots, :8] = 0  # the magic: no header
