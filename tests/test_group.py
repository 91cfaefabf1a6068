"""Ranks agree: real processes, one slowed, one failing, one killed, one late, one somewhere else."""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_work
from rank_helpers import run_ranks, values

from kvtransfer.group import RankGroup
from kvtransfer.kernels.errors import CapacityError, ConfigError, RankError
from kvtransfer.rank_slots import RankSlots
from kvtransfer.topology import Topology

SHAPES = {1: Topology(), 2: Topology(tp=2), 3: Topology(cp=3), 4: Topology(tp=2, pp=2), 6: Topology(tp=3, cp=2)}
EIGHT = Topology(tp=2, pp=2, cp=2)


def expected_minima(seed: int, operations: list[int], ranks: int, failing: int | None) -> dict[int, list[int]]:
    """What every rank must have decided, computed in one place."""
    found = {}
    for operation in operations:
        columns = zip(*(rank_work.local_numbers(seed, rank, operation) for rank in range(ranks)), strict=True)
        lost = failing is not None and rank_work.fails(seed, failing, failing, operation)
        found[operation] = [0] * rank_work.NUMBERS if lost else [min(column) for column in columns]
    return found


def check_decisions(topology: Topology, folder: Path, operations: int, seed: int, **options: Any) -> set[str]:
    failing = topology.size - 1 if topology.size > 1 else None
    slow = 1 if topology.size > 1 else None
    slots = [50 + 13 * pp for pp in range(topology.pp)][::-1]  # the leader's stage has the most
    found = values(run_ranks(topology, rank_work.decisions, folder, seed, operations, failing, slow, slots, **options))
    first = found[0]
    for other in found[1:]:
        assert (other["digest"], other["all"], other["stage"]) == (first["digest"], first["all"], first["stage"]), (
            first["log"],
            other["log"],
        )
    assert first["minima"] == expected_minima(seed, list(first["minima"]), topology.size, failing)
    assert first["used"] == first["held"] == found[-1]["used"]
    assert first["minima"]
    kinds: set[str] = first["kinds"]
    return kinds


@pytest.mark.parametrize("ranks", sorted(SHAPES))
def test_ranks_agree_on_random_operations(ranks: int, tmp_path: Path) -> None:
    check_decisions(SHAPES[ranks], tmp_path, 120, seed=ranks)


def test_eight_ranks_agree_with_one_slow_and_one_failing(tmp_path: Path) -> None:
    kinds = check_decisions(EIGHT, tmp_path, 1000, seed=88, limit_s=200)
    assert kinds == {"hits", "stage", "allocate", "free", "tell", "refuse", "post", "bad_free"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_eight_ranks_agree_on_ten_thousand_operations(tmp_path: Path) -> None:
    check_decisions(EIGHT, tmp_path, 10_000, seed=888, limit_s=1700)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_is_named_at_once(victim: int, tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[4], rank_work.until_lost, tmp_path, victim, "kill", 25, 0.0, deadline_s=20.0)
    assert ended[victim].exitcode == -9 and ended[victim].value is None
    survivors = [ended[rank] for rank in range(4) if rank != victim]
    for end in survivors:
        assert not end.error and end.value["ranks"] == (victim,), end
        assert f"rank {victim} is gone" in end.value["text"]
        assert end.value["waited"] < 10 and end.value["again"] == end.value["text"]
    assert len({end.value["operation"] for end in survivors}) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_late_is_named_within_twice_the_deadline(victim: int, tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[3], rank_work.until_lost, tmp_path, victim, "late", 5, 5.0, deadline_s=1.0)
    for rank in range(3):
        end = ended[rank]
        if rank == victim:  # it comes back, and finds the others gone or without it
            assert end.value["ranks"]
        else:
            assert end.value["ranks"] == (victim,) and "is late" in end.value["text"], end
            assert 0.9 < end.value["waited"] < 3.5


def test_a_rank_that_is_slow_but_in_time_changes_nothing(tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[2], rank_work.until_lost, tmp_path, 1, "late", 3, 0.7, deadline_s=30.0)
    assert values(ended) == [{}, {}]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_in_another_round_is_named(victim: int, tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[3], rank_work.until_lost, tmp_path, victim, "astray", 7, 0.0, deadline_s=20.0)
    for end in values(ended):
        assert "is in round 8 (" in end["text"] and end["operation"] == 7
        # If it is the leader who is astray, all others are not where it is.
        assert end["ranks"] == ((1, 2) if victim == 0 else (victim,))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_between_rounds_is_named_in_the_next(victim: int, tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[3], rank_work.between_rounds, tmp_path, victim, deadline_s=20.0)
    assert {rank: end.value for rank, end in ended.items()} == {
        rank: None if rank == victim else (victim,) for rank in range(3)
    }


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(absent: int, tmp_path: Path) -> None:
    ended = run_ranks(SHAPES[2], rank_work.own_cuda, tmp_path, absent=(absent,), start_s=2.0, limit_s=60)
    assert f"RankError: rank {absent} did not come within 2 s" in ended[1 - absent].error


def test_two_caches_meet_in_one_store(tmp_path: Path) -> None:
    """Instances and data-parallel replicas: nothing of one reaches the other."""
    results: dict[int, Any] = {}

    def cache(number: int) -> None:
        ended = run_ranks(SHAPES[2], rank_work.same_numbers, tmp_path, number, name=f"i0-dp{number}")
        results[number] = values(ended)

    threads = [threading.Thread(target=cache, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert results[number][0] == results[number][1]
    assert results[0][0] != results[1][0]


@pytest.mark.parametrize("size", [0, 4080, 4096, 70_001])
def test_messages_of_any_length(size: int, tmp_path: Path) -> None:
    found = values(run_ranks(SHAPES[3], rank_work.big, tmp_path, size))
    whole = b"".join(bytes([rank]) * (size + rank) for rank in range(3))
    assert found == [(hashlib.sha256(whole).hexdigest(), len(whole))] * 3


def test_stages_behind_take_what_the_first_posted(tmp_path: Path) -> None:
    found = values(run_ranks(Topology(pp=3), rank_work.relay, tmp_path, 60, 0.5, most_ahead=7))
    most, left = found[0]
    assert most == 7 and left == 0
    assert found[1] == found[2] == (list(range(60)), True)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("first dies", {1: (0,), 2: (0,)}), ("last dies", {0: (2,)}), ("last is late", {0: (2,)})],
)
def test_a_stage_that_is_lost_is_named(how: str, expected: dict[int, Any], tmp_path: Path) -> None:
    ended = run_ranks(Topology(pp=3), rank_work.relay_lost, tmp_path, how, most_ahead=5, deadline_s=1.5)
    for rank, ranks in expected.items():
        assert ended[rank].value == ranks, ended


def test_tiers_that_grow(tmp_path: Path) -> None:
    found = values(run_ranks(Topology(pp=2), rank_work.growing, tmp_path))
    assert found[0] == found[1] == [20, 4, -1, -1, 4, 12]  # 4, 7 and 10 slots are ready on the slower one, then all


@pytest.mark.parametrize("failing", [None, 1])
@pytest.mark.parametrize(
    ("shape", "slots"), [(Topology(tp=2), [20]), (Topology(tp=2, pp=2), [20, 27]), (Topology(pp=3), [25, 20, 22])]
)
def test_slots_follow_the_size_on_all_ranks(
    shape: Topology, slots: list[int], failing: int | None, tmp_path: Path
) -> None:
    seed = int(np.random.default_rng().integers(1 << 30))
    found = values(run_ranks(shape, rank_work.resizing, tmp_path, seed, 150, slots, failing))
    assert len(set(found)) == 1, (seed, found)  # the same decisions, in as many rounds


def test_slots_follow_the_smallest_rank(tmp_path: Path) -> None:
    found = values(run_ranks(Topology(tp=2, pp=2), rank_work.smallest, tmp_path))
    assert found[0] == found[1] == found[2] == found[3]
    capacity, beyond, shrunk, freed, left, grown, more, refused, pages = found[0]
    assert (capacity, shrunk, freed, more) == (9, 4, 6, 12) and set(range(4, 9)) <= set(beyond) and grown == []
    assert set(left) <= {6, 7, 8} and "expected 11 free pages on every rank, got 9" in refused
    assert len(pages) == 9 and max(pages) < 12


def test_bad_sizes_and_ranks_that_can_not_say() -> None:
    def ready() -> int:
        if broken:
            raise OSError("no answer")
        return 8

    broken = False
    with RankGroup(Topology()) as group:
        slots = RankSlots(group, 8, ready=ready)
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            slots.resize(0)
        pages = slots.allocate(8)
        assert slots.resize(5).tolist() == [5, 6, 7] == sorted(pages.tolist())[5:]
        broken, rounds = True, group.all.rounds
        with pytest.raises(CapacityError, match="rank 0 failed: OSError: no answer; resize again"):
            slots.resize(2)
        assert group.all.rounds == rounds + 2 and slots.capacity_pages == 5
        broken = False
        slots.free([5, 6, 7])
        assert slots.resize(5).size == 0 and slots.resize(100).size == 0 and slots.capacity_pages == 8
        assert len(slots.allocate(3)) == 3


def test_nothing_of_cuda_is_touched(tmp_path: Path) -> None:
    assert values(run_ranks(SHAPES[2], rank_work.own_cuda, tmp_path)) == [(False, False, [])] * 2


def test_one_rank_needs_nobody() -> None:
    with RankGroup(Topology()) as group:
        assert group.is_leader and group.leads_stage and group.stage is group.all
        assert group.minimum("hits", 2, lambda: [3, 4]).value == (3, 4)
        assert group.from_leader("x", lambda: {"a": [1, b"2"]}) == {"a": [1, b"2"]}
        group.post("nobody listens")
        with pytest.raises(RankError, match="take: rank 0 posts, the others take"):
            group.take()
        agreed = group.minimum("hits", 2, lambda: [3])
        assert agreed.value == (0, 0) and "expected 2 numbers of at least 0, got [3]" in agreed.failures[0]
        assert group.minimum("hits", 1, lambda: [-1]).value == (0,)
        assert group.all.rounds == 4
    with pytest.raises(RankError, match="closed"):
        group.minimum("hits", 1, lambda: [1])


def test_a_failure_to_report_is_told() -> None:
    from kvtransfer.kernels.events import Observer

    told = []

    class Ear(Observer):
        def noted(self, what: str, **fields: Any) -> None:
            told.append((what, fields))

    def broken() -> list[int]:
        raise OSError("disk on fire")

    with RankGroup(Topology(), observer=Ear()) as group:
        agreed = group.minimum("hits", 3, broken)
    assert agreed.value == (0, 0, 0) and agreed.failures == {0: "OSError: disk on fire"}
    assert told == [("group.failed", {"kind": "hits", "rank": 0, "why": "OSError: disk on fire"})]


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "ranks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code.replace("/tmp/kvtransfer-ranks", str(tmp_path / "store")), {})
    assert capsys.readouterr().out == "12 8\n"


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="rank: expected 0 to 1, got 2"):
        RankGroup(Topology(tp=2), 2)
    with pytest.raises(ConfigError, match="expected a store that all 2 ranks reach"):
        RankGroup(Topology(tp=2), 1)
    with pytest.raises(ConfigError, match="deadline_s and start_s above 0"):
        RankGroup(Topology(), deadline_s=0)
