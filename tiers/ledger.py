"""PageLedger: which pages or slots are under which transfer, and in what order transfers touch them.

One ledger belongs to one piece of memory (a device pool, a host slab) and is shared by every engine
that works on it. Hazards are tracked on the physical id, never on a logical one: two transfers that
touch the same id are ordered, whatever they do there. A chain is enough for that: each id remembers the
last transfer that claimed it, and that one waits for its predecessor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import OwnershipError, TierError
from kvtransfer.kernels.ids import id_tools

Ids = NDArray[np.int64]


class Owner(Protocol):
    """What a ledger asks of a transfer: nothing. It hands the object back to whoever must wait for it."""


class PageLedger:
    """In-flight bookkeeping for ``count`` ids, 0 to ``count - 1``. Thread-safe.

    ``what`` names the ids in messages ("pool page", "host slot").
    """

    def __init__(self, count: int, what: str) -> None:
        self.count = count
        self.what = what
        self._changed = Condition()
        self._last_ticket = np.zeros(count, dtype=np.int64)  # the last transfer that claimed the id
        self._open: dict[int, tuple[Owner, Ids | slice]] = {}
        self._tickets: dict[int, list[int]] = {}  # id(owner) -> its tickets
        self._unwritten = 0  # the last ticket, as long as nobody had to look for its ids
        self._next = 1
        self._oldest_open = 1  # every ticket below this one is closed
        self._shut = False
        self._limit = count  # ids from here on can't be claimed

    def claim(self, ids: Ids | None, owner: Owner) -> list[Owner]:
        """Put ``ids`` (distinct, in range: checked by the caller) under ``owner``; None claims every id.

        Returns the transfers still in flight that touched any of them before; the owner must be ordered
        after these. Call `release` once ``owner`` is acknowledged. Use `claim_all` for several ledgers.
        """
        every: Ids | slice = slice(None) if ids is None else ids
        with self._changed:
            self._refuse(ids)
            earlier = self._claimed_before(every, owner) if self._open else []
            ticket = self._unwritten = self._next
            self._next += 1
            self._tickets.setdefault(id(owner), []).append(ticket)  # first: `release` finds what is open by it
            self._open[ticket] = (owner, every)
            return earlier

    def _claimed_before(self, ids: Ids | slice, owner: Owner) -> list[Owner]:
        """Open transfers other than ``owner`` that ids remember. The last claim is written down here: where one has
        ended before the next begins, nobody asks for its ids, and 8,192 of them cost as much as a plan."""
        tools = id_tools()
        if self._unwritten in self._open:
            last = self._open[self._unwritten][1]
            if isinstance(last, slice):
                self._last_ticket[last] = self._unwritten
            else:
                tools.mark(self._last_ticket, last, self._unwritten)
        # Most calls touch nothing in flight.
        if not isinstance(ids, slice) and tools.most(self._last_ticket, ids) < self._oldest_open:
            return []
        before = self._last_ticket[ids]
        tickets = np.unique(before[before >= self._oldest_open]).tolist()
        return [self._open[t][0] for t in tickets if t in self._open and self._open[t][0] is not owner]

    def shut(self, timeout_s: float) -> None:
        """No more claims; returns once nothing is claimed. OwnershipError when the time is up, and claims go on."""
        with self._changed:
            self._shut = True
            if not self._changed.wait_for(lambda: not self._open, timeout_s):
                self._shut = False
                held = np.flatnonzero(self._owned())
                raise OwnershipError(
                    f"expected {self.what}s that no transfer owns, got {held[:8].tolist()}"
                    f"{' ...' if held.size > 8 else ''} in flight after {timeout_s:g} s; wait for the handle first"
                )

    def limit(self, count: int, timeout_s: float) -> None:
        """Ids from ``count`` on can't be claimed from now on, those below can; returns once none of the former is.
        OwnershipError when the time is up: the limit is what it was before then."""
        with self._changed:
            before, self._limit = self._limit, count
            if not self._changed.wait_for(lambda: not self._owned()[count:before].any(), timeout_s):
                self._limit = before
                held = np.flatnonzero(self._owned()[count:before]) + count
                raise OwnershipError(
                    f"expected {self.what}s that no transfer owns, got {held[:8].tolist()}"
                    f"{' ...' if held.size > 8 else ''} in flight after {timeout_s:g} s; wait for the handle first"
                )

    def _refuse(self, ids: Ids | None) -> None:
        if self._shut:
            raise TierError(f"expected {self.what}s of memory that is open, got memory that is closed or closing")
        if self._limit < self.count and ids is not None and ids.size and int(ids.max()) >= self._limit:
            raise TierError(
                f"expected {self.what}s in 0..{self._limit - 1}, got {int(ids.max())}: its memory was let go"
            )

    def release(self, owner: Owner) -> None:
        """``owner`` is acknowledged: its ids may be freed. Releasing what was never claimed is a no-op."""
        with self._changed:
            for ticket in self._tickets.pop(id(owner), ()):
                self._open.pop(ticket, None)  # a KeyboardInterrupt came before it was open
            self._oldest_open = min(self._open, default=self._next)
            self._changed.notify_all()

    def before(self, owner: Owner) -> list[Owner] | None:
        """All others that had a claim before ``owner`` and have it still, whatever their ids; None where ``owner`` has
        none."""
        with self._changed:
            if id(owner) not in self._tickets:
                return None
            own = min(self._tickets[id(owner)], default=self._next)
            return [other for ticket, (other, _) in self._open.items() if ticket < own]

    def busy(self, ids: Ids) -> NDArray[np.bool_]:
        """For each id, whether a transfer in flight touches it."""
        with self._changed:
            return self._owned()[ids]

    def any_busy(self) -> bool:
        """Whether any transfer is in flight here."""
        with self._changed:
            return bool(self._open)

    def wait_free(self, ids: Ids, timeout_s: float) -> bool:
        """Block until no transfer touches ``ids`` or the time is up; True if they are free."""
        deadline = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            while bool(self._owned()[ids].any()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _owned(self) -> NDArray[np.bool_]:
        """[count] which ids are under a transfer. Made when somebody frees, so that claiming costs nothing for it."""
        owned = np.zeros(self.count, dtype=np.bool_)
        for _, ids in self._open.values():
            owned[ids] = True
        return owned

    def require_free(self, ids: Ids, wait_s: float) -> None:
        """`wait_free`, or an OwnershipError that names the ids a transfer still owns."""
        if not self.wait_free(ids, wait_s):
            held = ids[self.busy(ids)]
            raise OwnershipError(
                f"expected {self.what}s that no transfer owns, got {held[:8].tolist()}"
                f"{' ...' if held.size > 8 else ''} still in flight after {wait_s:g} s; wait for the handle first"
            )


def claim_all(wanted: Sequence[tuple[PageLedger, Ids | None]], owner: Owner) -> list[Owner]:
    """Claim on several ledgers at once, so that no two transfers are each ordered after the other.

    Returns what `PageLedger.claim` does for each ledger, without repeats.
    """
    ledgers = sorted({id(ledger): ledger for ledger, _ in wanted}.values(), key=id)
    earlier = _claim_under(ledgers, wanted, owner)
    return list({id(e): e for e in earlier}.values())


def _claim_under(
    ledgers: Sequence[PageLedger], wanted: Sequence[tuple[PageLedger, Ids | None]], owner: Owner
) -> list[Owner]:
    """Claim with the locks of all ``ledgers`` taken: each by a ``with`` of its own, which a KeyboardInterrupt can't
    leave without giving it back, as it can an ExitStack."""
    if ledgers:
        with ledgers[0]._changed:
            return _claim_under(ledgers[1:], wanted, owner)
    for ledger, ids in wanted:
        ledger._refuse(ids)  # before any of them is claimed
    return [e for ledger, ids in wanted for e in ledger.claim(ids, owner)]
