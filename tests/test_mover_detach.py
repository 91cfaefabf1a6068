"""A tier that does not let go in time: detaching it can be asked for again, nothing is lost, nothing is freed twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_helpers import MEMORY, SPACE, MakeRig, form, hit_pages, make  # noqa: F401
from engine_helpers import LIMIT_S, until
from numpy.typing import NDArray
from test_mover import KEYS, Bench, demote, ids, promote

from kvtransfer.commands import Lookup, Resize, Store
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, OwnershipError, TierError
from kvtransfer.tiers.base import PageStatus, Tier
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.registered import address_range

OK, ERROR, CANCELLED = PageStatus.OK, PageStatus.ERROR, PageStatus.CANCELLED


class Counted(FaultyTier):
    """Keeps books of the memory that it was told of, and of its closes."""

    refuse: Exception | None = None  # at the last part that it is to forget
    ends = True  # else its close is out of time

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.known: Counter[int] = Counter()
        self.calls_of: Counter[str] = Counter()

    def register(self, memory: NDArray[np.uint8]) -> None:
        self.calls_of["register"] += 1
        self.known[address_range(memory)[0]] += 1
        super().register(memory)

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        if self.refuse is not None and sum(self.known.values()) == 1:
            raise self.refuse
        self.calls_of["unregister"] += 1
        self.known[address_range(memory)[0]] -= 1
        super().unregister(memory)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        self.calls_of["close"] += 1
        if not self.ends:
            raise DeadlineExceeded("not drained")
        super().close(drain=drain, timeout_s=timeout_s)

    @property
    def parts(self) -> int:
        assert all(count in (0, 1) for count in self.known.values())
        return sum(self.known.values())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, mover={"deadline_s": 0.3}, slots=32)
    try:
        yield made
        assert not made.twice
    finally:
        made.parts.close()


def attached(bench: Bench, owned: bool) -> Counted:
    tier = Counted(bench.parts.maker("far", MEMORY))
    bench.mover._make_tier = lambda name, options: tier
    bench.mover.attach("far", {} if owned else tier)
    bench.parts.tiers["far"] = tier  # closed with the others
    assert tier.parts > 0
    return tier


def stall(tier: Counted, verb: Any) -> None:
    tier.add(Fault("stall", verb, call=tier.calls(verb), hold=True))


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_tier_that_holds_the_memory_is_detached_later(bench: Bench, verb: str, drain: bool, owned: bool) -> None:
    tier = attached(bench, owned)
    parts = tier.parts
    assert bench.ask(Store(id=1, pages=ids(5, 6, 7, 8), tier="host", slots=ids(0, 1, 2, 3))) == [OK] * 4
    if verb == "get":
        assert bench.ask(demote(2, ids(0, 1, 2, 3))) == [OK] * 4
    stall(tier, verb)
    command = promote(3, ids(10, 11, 12, 13)) if verb == "get" else demote(3, ids(0, 1, 2, 3))
    bench.mover.submit([command])
    until(lambda: tier.faults_struck, "the tier has it")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            bench.mover.detach("far", drain=drain, timeout_s=0.1)
        assert tier.parts == parts and not tier.calls_of["close"] and 3 not in bench.acks
        assert "far" not in bench.mover.facts().tiers and "far" not in bench.mover.stats()
        assert (
            bench.ask(Lookup(id=10 + tier.calls("lookup") + len(bench.acks), tier="far", scope=SPACE, keys=KEYS))
            == [ERROR] * 4
        )
        with pytest.raises(ConfigError, match="'far', which is not detached yet; call detach again"):
            bench.mover.attach("far", tier)

    def answered() -> bool:
        tier.release()  # (the call may be yet to come to its stall)
        return command.id in bench.acks

    until(answered, "an answer")
    assert len(bench.answer(command)) == 4  # once: the fixture looks
    bench.mover.detach("far", timeout_s=LIMIT_S)
    assert tier.parts == 0 and tier.calls_of["unregister"] == tier.calls_of["register"] == parts
    assert tier.calls_of["close"] == owned
    with pytest.raises(ConfigError, match="got 'far'"):
        bench.mover.detach("far")
    bench.mover.attach("far", other := Counted(bench.parts.maker("far", MEMORY)))  # the name is free
    assert bench.ask(demote(90, ids(0, 1, 2, 3))) == [OK] * 4
    bench.mover.detach("far")
    assert other.parts == 0
    other.close()


def test_a_tier_of_ours_that_does_not_end_is_ended_later(bench: Bench) -> None:
    tier = attached(bench, True)
    tier.ends = False
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            bench.mover.detach("far", drain=True, timeout_s=0.1)
        assert tier.parts == 0 and tier.calls_of["unregister"] == tier.calls_of["register"]
    tier.ends = True
    bench.mover.detach("far", timeout_s=LIMIT_S)
    assert tier.calls_of["close"] == 3 and tier.calls_of["unregister"] == tier.calls_of["register"]
    with pytest.raises(ConfigError):
        bench.mover.detach("far")


@pytest.mark.parametrize("owned", [False, True])
def test_a_tier_that_will_not_forget_the_memory_yet(bench: Bench, owned: bool) -> None:
    """Of what it forgot before it refused it is told again."""
    tier = attached(bench, owned)
    parts = tier.parts
    tier.refuse = OwnershipError("a batch uses it")
    with pytest.raises(OwnershipError, match="a batch"):
        bench.mover.detach("far", timeout_s=1.0)
    assert tier.parts == parts and not tier.calls_of["close"]
    tier.refuse = None
    bench.mover.detach("far", timeout_s=1.0)
    assert tier.parts == 0 and tier.calls_of["close"] == owned


@pytest.mark.parametrize("owned", [False, True])
def test_a_tier_whose_client_fails_is_gone_all_the_same(bench: Bench, owned: bool) -> None:
    tier = attached(bench, owned)
    tier.refuse = TierError("the client is gone")
    with pytest.raises(TierError, match="client is gone"):
        bench.mover.detach("far", timeout_s=1.0)
    assert tier.calls_of["close"] == owned
    with pytest.raises(ConfigError):
        bench.mover.detach("far")
    bench.mover.close(timeout_s=LIMIT_S)


SIZES = (9, 32, 1, 32, 20)  # of the host: the memory of each is other parts


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[Bench]:
    """The host's memory in many parts, so that every other size has others."""
    made = Bench(tmp_path, mover={"deadline_s": 0.3}, slots=32, host={"chunk_bytes": 1 << 14})
    try:
        yield made
        assert not made.twice
    finally:
        made.parts.close()


def resize(bench: Bench, pages: int) -> list[PageStatus]:
    return bench.ask(Resize(id=1000 + len(bench.acks), tier="host", capacity_pages=pages))


@pytest.mark.parametrize("refused", [False, True], ids=["ends late", "fails, and ends late"])
def test_the_host_is_resized_beside_a_tier_that_knows_it_no_more(parted: Bench, refused: bool) -> None:
    """It is not told again: not of what goes, which it has forgotten, nor of what comes."""
    bench, tier = parted, attached(parted, True)
    other = Counted(bench.parts.maker("other", MEMORY))
    bench.mover.attach("other", other)
    bench.parts.tiers["other"] = other
    whole = other.parts
    tier.ends = False
    tier.refuse = TierError("the client is gone") if refused else None
    with pytest.raises(DeadlineExceeded):
        bench.mover.detach("far", timeout_s=0.1)
    told = tier.calls_of.copy()
    assert tier.parts == int(refused)
    for size in SIZES:
        assert resize(bench, size) == [OK]
        assert bench.mover.host.ready_slots == size
        assert {start for start, count in other.known.items() if count} == {
            address_range(part)[0] for part in bench.mover.host.parts()
        }
        with pytest.raises(DeadlineExceeded):
            bench.mover.detach("far", timeout_s=0.1)
    assert (tier.calls_of["register"], tier.calls_of["unregister"]) == (told["register"], told["unregister"])
    assert 0 < other.parts < whole
    tier.ends, tier.refuse = True, None
    bench.mover.detach("far", timeout_s=LIMIT_S)
    bench.mover.detach("other", timeout_s=LIMIT_S)
    assert other.parts == 0 and tier.parts == int(refused)
    bench.mover.attach("far", again := Counted(bench.parts.maker("far", MEMORY)))  # at the size that is now
    assert resize(bench, 5) == [OK] and resize(bench, 31) == [OK]
    bench.mover.detach("far")
    assert again.parts == 0
    again.close()


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("how", ["a batch", "a refusal"])
def test_the_host_is_resized_beside_a_tier_that_knows_it_still(parted: Bench, how: str, owned: bool) -> None:
    """It is told of what goes and comes until it lets go."""
    bench, tier = parted, attached(parted, owned)
    assert bench.ask(Store(id=1, pages=ids(5, 6, 7, 8), tier="host", slots=ids(0, 1, 2, 3))) == [OK] * 4
    if how == "a batch":
        stall(tier, "put")
        bench.mover.submit([demote(3, ids(0, 1, 2, 3))])
        until(lambda: tier.faults_struck, "the tier has it")
    else:
        tier.refuse = OwnershipError("a batch uses it")
    for size in (9, 32, 20, 26):
        with pytest.raises((DeadlineExceeded, OwnershipError)):
            bench.mover.detach("far", timeout_s=0.1)
        assert resize(bench, size) == [OK] and bench.mover.host.ready_slots == size
        assert {start for start, count in tier.known.items() if count} == {
            address_range(part)[0] for part in bench.mover.host.parts()
        }
    tier.refuse = None

    def ended() -> bool:
        tier.release()  # (the call may be yet to come to its stall)
        return how == "a refusal" or 3 in bench.acks

    until(ended, "an answer")
    bench.mover.detach("far", timeout_s=LIMIT_S)
    assert tier.parts == 0 and tier.calls_of["unregister"] == tier.calls_of["register"]
    assert tier.calls_of["close"] == owned


def test_a_mover_that_could_not_close_closes_later(bench: Bench) -> None:
    """Of two tiers the one that can be closed is; the other one when it lets go."""
    good = Counted(bench.parts.maker("good", MEMORY))
    bench.mover.attach("good", good)
    tier = attached(bench, True)
    tier.ends = False
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            bench.mover.close(timeout_s=0.1)
        assert good.parts == 0 and good.calls_of["unregister"] == good.calls_of["register"]
    tier.ends = True
    bench.mover.close(timeout_s=LIMIT_S)
    bench.mover.close(timeout_s=LIMIT_S)
    assert tier.parts == 0 and tier.calls_of["unregister"] == tier.calls_of["register"]
    good.close()


def test_two_threads_detach_at_once(bench: Bench) -> None:
    """One does; the other one is told that there is none."""
    tier = attached(bench, True)
    bench.ask(Store(id=1, pages=ids(5, 6, 7, 8), tier="host", slots=ids(0, 1, 2, 3)))
    stall(tier, "put")
    bench.mover.submit([demote(3, ids(0, 1, 2, 3))])
    until(lambda: tier.faults_struck, "the tier has it")
    met: list[Any] = []

    def detach() -> None:
        try:
            bench.mover.detach("far", timeout_s=LIMIT_S)
            met.append(None)
        except ConfigError as error:
            met.append(error)

    threads = [threading.Thread(target=detach) for _ in range(3)]
    for thread in threads:
        thread.start()

    def ended() -> bool:
        tier.release()  # (the call may be yet to come to its stall)
        return len(met) == 3

    until(ended, "all have their answer")
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(met) == 3 and met.count(None) == 1
    assert tier.parts == 0 and tier.calls_of["close"] == 1


def test_a_cache_detaches_again(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY, "farther": MEMORY})
    tokens = rig.tokens(4)
    rows = rig.stored(tokens)
    rig.cache.flush("host")
    rig.settle()
    rig.do("fault", "far", "stall", "get", hold=True)
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, pages := rig.take(4))
    until(lambda: rig.do("struck", "far"), "the tier is asked")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            rig.cache.detach("far", timeout_s=0.1)
        with rig.cache.match(tokens) as hit:
            assert set(hit.tokens_by_tier) == {"farther"}
    rig.do("release", "far")
    load.result(LIMIT_S).require()  # whichever tier gave them
    assert np.array_equal(rig.read(pages), rows)
    rig.give(pages)
    rig.cache.detach("far", timeout_s=LIMIT_S)
    with pytest.raises(ConfigError):
        rig.cache.detach("far")
    rig.cache.attach("far", MEMORY)
    assert hit_pages(rig, tokens) == 4 and np.array_equal(rig.loaded(tokens), rows)
