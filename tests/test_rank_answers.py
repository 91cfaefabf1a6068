"""One answer of several ranks': the worst of each page, once all have spoken."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvtransfer.commands import STATUSES, Ack, Cancel, Evict, Load, Scope, Store, packed
from kvtransfer.kernels.errors import ConfigError, TransferError
from kvtransfer.rank_answers import RankAnswers
from kvtransfer.tiers.base import PageStatus

OK, MISS, ERROR, CORRUPT, CANCELLED = (
    PageStatus.OK,
    PageStatus.MISS,
    PageStatus.ERROR,
    PageStatus.CORRUPT,
    PageStatus.CANCELLED,
)


def store(number: int, pages: int) -> Store:
    ids = packed(np.arange(pages))
    return Store(id=number, pages=ids, tier="host", slots=ids)


def told(ack: Ack | None) -> list[PageStatus]:
    assert ack is not None and ack.first == 0
    return [STATUSES[code] for code in ack.statuses]


def test_one_rank_is_passed_on() -> None:
    answers, command = RankAnswers(1), store(7, 3)
    answers.expect(command)
    ack = answers.add(0, Ack.of(command, [OK, ERROR, OK], detail="why"))
    assert told(ack) == [OK, ERROR, OK] and ack is not None and ack.detail == "why" and ack.id == 7
    assert not len(answers)


def test_nothing_is_said_before_the_last_rank_and_page() -> None:
    answers, command = RankAnswers(3), store(1, 4)
    answers.expect(command)
    assert answers.add(2, Ack.of(command, OK)) is None
    assert answers.add(0, Ack.of(command, [OK, OK], first=2)) is None
    assert answers.add(1, Ack.of(command, [OK, OK, OK, MISS])) is None
    assert answers.add(0, Ack.of(command, [OK, OK], first=2)) is None  # again: counted once
    assert answers.waits_for(1)
    assert told(answers.add(0, Ack.of(command, [ERROR, OK], first=0))) == [ERROR, OK, OK, MISS]
    assert not answers.waits_for(1) and answers.add(0, Ack.of(command, OK)) is None


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations([OK, CANCELLED, MISS, ERROR, CORRUPT], 2)))
def test_the_worst_is_told_whoever_says_it(first: PageStatus, second: PageStatus) -> None:
    answers, command = RankAnswers(2), store(1, 1)
    answers.expect(command)
    answers.add(0, Ack.of(command, first, detail="of 0"))
    order = [OK, CANCELLED, MISS, ERROR, CORRUPT]
    ack = answers.add(1, Ack.of(command, second))
    assert told(ack) == [max(first, second, key=order.index)]
    assert ack is not None and ack.detail == "rank 0: of 0"


def test_what_one_rank_never_had_is_removed_all_the_same() -> None:
    answers = RankAnswers(2)
    command = Evict(id=3, tier="disk", scope=Scope(), keys=[b"a", b"b"])
    answers.expect(command)
    answers.add(0, Ack.of(command, [MISS, MISS]))
    assert told(answers.add(1, Ack.of(command, [OK, ERROR]))) == [OK, ERROR]


def test_cancels_and_empty_commands() -> None:
    answers = RankAnswers(2)
    answers.expect(Cancel(id=5, command=4))
    assert not len(answers)
    empty = Load(id=6, tier="host", slots=b"", pages=b"")
    answers.expect(empty)
    assert told(answers.add(0, Ack.of(empty, OK))) == []


def test_what_can_not_be_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        RankAnswers(0)
    answers, command = RankAnswers(2), store(1, 2)
    answers.expect(command)
    with pytest.raises(TransferError, match=r"rank of 0..1, got 2"):
        answers.add(2, Ack.of(command, OK))
    for bad in (Ack(id=1, first=1, statuses=b"\1\1"), Ack(id=1, statuses=b"\0"), Ack(id=1, statuses=b"\x63")):
        with pytest.raises(TransferError, match=r"expected statuses of positions 0\.\.1"):
            answers.add(0, bad)
    assert answers.add(0, Ack.of(command, OK)) is None
    assert told(answers.add(1, Ack.of(command, OK))) == [OK, OK]
