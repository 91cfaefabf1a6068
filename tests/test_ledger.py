"""The ledger: chains of transfers on one id, ownership, and claims on several ledgers at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from engine_helpers import LIMIT_S, Ids
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.kernels.errors import OwnershipError, TierError
from kvtransfer.tiers.ledger import PageLedger, claim_all


class Owner:
    """Stands for a transfer."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def test_each_claim_is_ordered_after_the_last_open_one_of_its_ids() -> None:
    ledger = PageLedger(7, "pool page")
    a, b, c, d = (Owner(n) for n in "abcd")
    assert ledger.claim(ids(1, 2), a) == []
    assert ledger.claim(ids(2, 3), b) == [a]
    assert ledger.claim(ids(3, 4), c) == [b]  # the chain b -> a orders it after a where that matters
    assert set(ledger.claim(ids(1, 4, 6), d)) == {a, c}
    for owner in (a, b, c, d):
        ledger.release(owner)
    assert ledger.claim(ids(1, 2, 3, 4, 6), Owner()) == []


def test_a_released_claim_orders_nobody_and_the_ids_come_free_only_with_the_last_holder() -> None:
    ledger = PageLedger(5, "pool page")
    a, b = Owner(), Owner()
    ledger.claim(ids(1, 2), a)
    ledger.claim(ids(2, 3), b)
    ledger.release(a)
    assert ledger.busy(np.arange(5)).tolist() == [False, False, True, True, False]
    assert ledger.claim(ids(0, 1), Owner()) == []
    ledger.release(b)
    assert ledger.busy(ids(2, 3)).tolist() == [False, False]


def test_releasing_what_was_never_claimed_is_nothing() -> None:
    ledger = PageLedger(3, "pool page")
    ledger.release(Owner())
    assert not ledger.any_busy()


def test_claiming_every_id() -> None:
    ledger = PageLedger(4, "pool page")
    a, b, c = Owner(), Owner(), Owner()
    ledger.claim(ids(2), a)
    assert ledger.claim(None, b) == [a]
    assert ledger.busy(np.arange(4)).all() and ledger.any_busy()
    assert ledger.claim(ids(0), c) == [b]
    ledger.release(b)
    assert ledger.busy(np.arange(4)).tolist() == [True, False, True, False]


def test_one_owner_with_two_claims_is_not_ordered_after_itself() -> None:
    ledger = PageLedger(4, "pool page")
    a = Owner()
    assert ledger.claim(ids(0, 1), a) == []
    assert ledger.claim(ids(1, 2), a) == []
    ledger.release(a)
    assert not ledger.busy(np.arange(4)).any()


def test_an_id_given_twice_is_held_and_released_once() -> None:
    ledger = PageLedger(4, "host slot")  # a load may read one slot into two pages
    a = Owner()
    ledger.claim(ids(1, 1, 2), a)
    ledger.release(a)
    assert not ledger.busy(np.arange(4)).any()


def test_waiting_for_ids_ends_with_their_release_or_with_the_time() -> None:
    ledger = PageLedger(4, "host slot")
    a = Owner()
    ledger.claim(ids(1), a)
    assert ledger.wait_free(ids(0, 2), 0.0)
    assert not ledger.wait_free(ids(0, 1), 0.01)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(ledger.wait_free(ids(1), LIMIT_S)))
    waiter.start()
    ledger.release(a)
    waiter.join(LIMIT_S)
    assert seen == [True]


def test_the_error_names_the_ids_that_are_owned() -> None:
    ledger = PageLedger(30, "host slot")
    ledger.claim(np.arange(3, 20), Owner())
    with pytest.raises(
        OwnershipError, match=r"host slots that no transfer owns, got \[3, 4, 5, 6, 7, 8, 9, 10\] \.\.\."
    ):
        ledger.require_free(np.arange(30), 0.0)
    with pytest.raises(OwnershipError, match=r"got \[7\] still in flight after 0\.01 s; wait for the handle"):
        ledger.require_free(ids(1, 7, 25), 0.01)
    ledger.require_free(ids(1, 2, 25), 0.0)


def test_claims_on_several_ledgers_name_each_owner_once() -> None:
    pool, host = PageLedger(4, "pool page"), PageLedger(4, "host slot")
    a, b = Owner("a"), Owner("b")
    assert claim_all([(pool, ids(0, 1)), (host, ids(2))], a) == []
    assert claim_all([(host, ids(2, 3)), (pool, ids(1))], b) == [a]
    assert claim_all([(pool, ids(2)), (pool, ids(3))], Owner()) == []


def test_two_threads_never_end_up_each_behind_the_other() -> None:
    first, second = PageLedger(2, "pool page"), PageLedger(2, "host slot")
    rounds, start = 300, threading.Barrier(2)
    behind: dict[int, list[object]] = {}
    owners = [[Owner(f"{t}.{r}") for r in range(rounds)] for t in range(2)]

    def work(thread: int) -> None:
        order = [(first, ids(0)), (second, ids(1))]
        for number in range(rounds):
            start.wait(LIMIT_S)
            me = owners[thread][number]
            behind[id(me)] = list(claim_all(order if thread else order[::-1], me))
            start.wait(LIMIT_S)
            first.release(me)
            second.release(me)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    for a, b in zip(*owners, strict=True):
        assert (a in behind[id(b)]) != (b in behind[id(a)]), "expected exactly one of the two to go first"


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 12), rng=st.randoms(use_true_random=False))
def test_every_open_transfer_of_an_id_is_waited_for(count: int, rng: random.Random) -> None:
    """Random claims, and releases in an order that a pump allows, against lists of who is open on each id: whom a
    claim is ordered after, directly or through others, are all of those."""
    ledger = PageLedger(count, "pool page")
    touches: dict[object, set[int]] = {}
    after: dict[object, Sequence[object]] = {}
    for number in range(40):
        if rng.random() < 0.6:
            wanted = rng.sample(range(count), rng.randint(1, count)) if rng.random() < 0.9 else None
            held = set(range(count)) if wanted is None else set(wanted)
            owner = Owner(str(number))
            got = ledger.claim(None if wanted is None else ids(*wanted), owner)
            reached: set[object] = set()
            todo: list[object] = list(got)
            while todo:
                if (other := todo.pop()) not in reached:
                    reached.add(other)
                    todo += [o for o in after[other] if o in touches]
            rivals = {o for o, of in touches.items() if of & held}
            assert rivals <= reached and set(got) <= rivals and len(set(got)) == len(got)
            touches[owner], after[owner] = held, got
        elif through := [o for o in touches if not any(e in touches for e in after[o])]:
            ended = rng.choice(through)
            ledger.release(ended)
            del touches[ended]
        held = set().union(*touches.values())
        assert ledger.busy(np.arange(count)).tolist() == [i in held for i in range(count)]


def test_ids_from_a_limit_on_cannot_be_claimed() -> None:
    ledger = PageLedger(7, "host slot")
    high, low = Owner("high"), Owner("low")
    ledger.claim(ids(5), high)
    ledger.claim(ids(1, 2), low)
    with pytest.raises(OwnershipError, match=r"host slots that no transfer owns, got \[5\] in flight after 0 s"):
        ledger.limit(4, 0.0)
    late = Owner("late")
    assert ledger.claim(ids(6), late) == []  # the limit is what it was
    ledger.release(late)
    timer = threading.Timer(0.05, ledger.release, [high])
    timer.start()
    ledger.limit(4, LIMIT_S)  # waits for it, and for no other
    timer.join()
    assert ledger.busy(ids(1, 5)).tolist() == [True, False]
    with pytest.raises(TierError, match=r"host slots in 0\.\.3, got 4: its memory was let go"):
        ledger.claim(ids(0, 4), late)
    with pytest.raises(TierError, match="let go"):
        claim_all([(PageLedger(9, "pool page"), ids(8)), (ledger, ids(6))], late)
    assert not ledger.busy(ids(0)).any()
    assert ledger.claim(ids(0, 3), late) == []
    ledger.limit(7, 0.0)
    assert ledger.claim(ids(6), late) == []
