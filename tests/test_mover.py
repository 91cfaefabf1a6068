"""The mover alone: commands that come in any order, for tiers that are not there, late, early, refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import MEMORY, SMALL, SPACE, Parts, Recipe
from engine_helpers import GUARD, LIMIT_S, until

from kvtransfer.commands import (
    STATUSES,
    Ack,
    Cancel,
    Demote,
    Evict,
    Load,
    Lookup,
    Promote,
    Store,
    packed,
    positions,
)
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, TransferError
from kvtransfer.tiers.base import BatchResult, PageStatus, Tier, TierHandle
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.faulty import FaultyTier
from kvtransfer.tiers.keys import page_keys, token_bytes

OK, MISS, ERROR, CANCELLED = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.CANCELLED
TOKENS = list(range(12))
KEYS = page_keys(TOKENS, 3)


class Bench:
    """Parts, and the answers that came."""

    def __init__(self, folder: Path, **recipe: Any) -> None:
        self.recipe = Recipe(folder, **recipe)
        for file, size in self.recipe.files():
            file.write_bytes(np.random.default_rng().bytes(size + 2 * GUARD))
        self.parts = Parts(self.recipe)
        self.mover = self.parts.mover
        self.acks: dict[int, Ack] = {}
        self.twice: list[int] = []
        self.mover.answer = self.take

    def take(self, ack: Ack) -> None:
        if ack.id in self.acks:
            self.twice.append(ack.id)
        self.acks[ack.id] = ack

    def answer(self, command: Any) -> list[PageStatus]:
        until(lambda: command.id in self.acks, f"an answer to {type(command).__name__}")
        ack = self.acks[command.id]
        assert ack.first == 0 and len(ack.statuses) == positions(command)
        return [STATUSES[code] for code in ack.statuses]

    def ask(self, command: Any) -> list[PageStatus]:
        self.mover.submit([command])
        return self.answer(command)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, lower={"far": MEMORY}, mover={"deadline_s": 0.3})
    try:
        yield made
        assert not made.twice
    finally:
        made.parts.close()


def ids(*numbers: int) -> bytes:
    return packed(np.array(numbers, dtype=np.int64))


def demote(number: int, slots: bytes, tier: str = "far") -> Demote:
    return Demote(
        id=number, source="host", slots=slots, tier=tier, scope=SPACE, keys=KEYS, tokens=bytes(token_bytes(TOKENS))
    )


def promote(number: int, slots: bytes, tokens: list[int] = TOKENS) -> Promote:
    return Promote(
        id=number, source="far", tier="host", slots=slots, scope=SPACE, keys=KEYS, tokens=bytes(token_bytes(tokens))
    )


def test_the_round_of_a_page(bench: Bench) -> None:
    pool, host = bench.parts.pool, bench.parts.host
    assert bench.ask(Store(id=1, pages=ids(5, 6, 7, 8), tier="host", slots=ids(0, 1, 2, 3))) == [OK] * 4
    assert bench.ask(Lookup(id=2, tier="far", scope=SPACE, keys=KEYS)) == [MISS] * 4
    assert bench.ask(demote(3, ids(0, 1, 2, 3))) == [OK] * 4
    assert bench.ask(Lookup(id=4, tier="far", scope=SPACE, keys=KEYS)) == [OK] * 4
    assert bench.ask(promote(5, ids(10, 11, 12, 13))) == [OK] * 4
    assert bench.ask(Load(id=6, tier="host", slots=ids(10, 11, 12, 13), pages=ids(20, 21, 22, 23))) == [OK] * 4
    for a, b in zip((5, 6, 7, 8), (20, 21, 22, 23), strict=True):
        for layer in range(SMALL.num_layers):
            for part in (0, 1):
                view = pool.view(layer, part, torch.uint8)
                assert (view[a] == view[b]).all()
    assert bench.ask(Evict(id=7, tier="far", scope=SPACE, keys=KEYS[:2])) == [OK] * 2
    assert bench.ask(promote(8, ids(14, 15, 16, 17))) == [MISS, MISS, OK, OK]
    # a slot of a page that did not come holds nothing that verifies
    assert bench.ask(Load(id=9, tier="host", slots=ids(14), pages=ids(30))) == [PageStatus.CORRUPT]
    assert host.ledger.any_busy() is False


@pytest.mark.parametrize("verify", [True, False])
def test_a_slot_that_is_stored_again_is_sealed_again(tmp_path: Path, verify: bool) -> None:
    """Its old header may name the same key; of an engine without digests, nothing else tells that it is stale."""
    bench = Bench(tmp_path, lower={"far": MEMORY}, engine={"verify": verify})
    try:
        bench.ask(Store(id=1, pages=ids(0, 1, 2, 3), tier="host", slots=ids(0, 1, 2, 3)))
        assert bench.ask(demote(2, ids(0, 1, 2, 3))) == [OK] * 4
        bench.ask(Evict(id=3, tier="far", scope=SPACE, keys=KEYS))
        bench.ask(Store(id=4, pages=ids(4, 5, 6, 7), tier="host", slots=ids(0, 1, 2, 3)))
        assert bench.ask(demote(5, ids(0, 1, 2, 3))) == [OK] * 4
        assert bench.ask(promote(6, ids(8, 9, 10, 11))) == [OK] * 4
        assert bench.ask(Load(id=7, tier="host", slots=ids(8, 9, 10, 11), pages=ids(20, 21, 22, 23))) == [OK] * 4
    finally:
        bench.parts.close()


def test_known_bad_slots_are_never_sealed(bench: Bench) -> None:
    bench.ask(Store(id=1, pages=ids(0, 1, 2, 3), tier="host", slots=ids(0, 1, 2, 3)))
    bench.parts.spoil_slots()
    assert bench.ask(Load(id=2, tier="host", slots=ids(2), pages=ids(9))) == [PageStatus.CORRUPT]
    assert bench.ask(demote(3, ids(0, 1, 2, 3))) == [ERROR] * 4
    assert "did not verify" in bench.acks[3].detail


def test_tokens_are_compared_not_keys_alone(bench: Bench) -> None:
    bench.ask(Store(id=1, pages=ids(0, 1, 2, 3), tier="host", slots=ids(0, 1, 2, 3)))
    bench.ask(demote(2, ids(0, 1, 2, 3)))
    others = [*TOKENS[:3], 99, *TOKENS[4:]]
    statuses = bench.ask(promote(3, ids(8, 9, 10, 11), others))
    assert statuses == [OK, PageStatus.CORRUPT, OK, OK] and "tokens" in bench.acks[3].detail


@pytest.mark.parametrize("digests", [True, False])
def test_records_without_digests_can_be_loaded(tmp_path: Path, digests: bool) -> None:
    """A writer that does not verify leaves none: zeros in the host say so, where others have theirs."""
    bench = Bench(tmp_path, lower={"far": MEMORY}, engine={"verify": False})
    try:
        bench.ask(Store(id=1, pages=ids(0, 1, 2, 3), tier="host", slots=ids(0, 1, 2, 3)))
        bench.ask(demote(2, ids(0, 1, 2, 3)))
        if not digests:
            assert bench.parts.drop_digests("far") == 4
        bench.parts.engine._shop.verify = True
        assert bench.ask(promote(3, ids(8, 9, 10, 11))) == [OK] * 4
        assert (bench.parts.host.digests[8:12] == 0).all()
        assert bench.ask(Load(id=4, tier="host", slots=ids(8, 9), pages=ids(20, 21))) == [OK] * 2
        assert bench.acks[4].unverified == (0, 1)
        assert bench.ask(demote(5, ids(8, 9, 10, 11))) == [OK] * 4
    finally:
        bench.parts.close()


def test_cancel_comes_before_its_command(bench: Bench) -> None:
    store = Store(id=7, pages=ids(1), tier="host", slots=ids(1))
    bench.mover.submit([Cancel(id=8, command=7), store])
    assert bench.answer(store) == [CANCELLED]
    assert bench.ask(Store(id=9, pages=ids(1), tier="host", slots=ids(1))) == [OK]


def test_what_can_not_be_done_is_answered(bench: Bench) -> None:
    assert bench.ask(Store(id=1, pages=ids(64), tier="host", slots=ids(0))) == [ERROR]
    assert "expected" in bench.acks[1].detail
    assert bench.ask(Store(id=2, pages=ids(1), tier="memory", slots=ids(0))) == [ERROR]
    assert bench.ask(Load(id=3, tier="host", slots=ids(99), pages=ids(0))) == [ERROR]
    assert bench.ask(demote(4, ids(0, 1, 2, 3), tier="disk")) == [ERROR] * 4
    assert "'disk'" in bench.acks[4].detail
    assert bench.ask(Lookup(id=5, tier="far", scope=SPACE.__class__(b"short"), keys=KEYS)) == [ERROR] * 4


def test_a_mover_that_is_closed_answers(bench: Bench) -> None:
    bench.parts.hold("copy_out")
    store = Store(id=1, pages=ids(1), tier="host", slots=ids(1))
    bench.mover.submit([store])
    with pytest.raises(DeadlineExceeded, match="1 commands had no end"):
        bench.mover.close(timeout_s=0.1)
    assert bench.ask(Store(id=2, pages=ids(2), tier="host", slots=ids(2))) == [ERROR]
    bench.parts.let_go()
    assert bench.answer(store) == [OK]
    bench.mover.close(timeout_s=LIMIT_S)
    bench.mover.close()
    assert bench.ask(Store(id=3, pages=ids(3), tier="host", slots=ids(3))) == [ERROR]
    assert bench.ask(Lookup(id=4, tier="far", scope=SPACE, keys=KEYS)) == [ERROR] * 4


def test_layers_of_a_load_that_has_not_come_yet(bench: Bench) -> None:
    bench.ask(Store(id=1, pages=ids(0, 1), tier="host", slots=ids(0, 1)))
    with pytest.raises(TransferError, match="expected 1 pages or more"):
        bench.mover.load(5)
    first = Load(id=2, tier="host", slots=ids(0), pages=ids(8), layerwise=True, load=5)
    second = Load(id=3, tier="host", slots=ids(1), pages=ids(9), layerwise=True, load=5)
    bench.mover.submit([first])
    assert bench.mover.load(5).pages == 1
    timer = threading.Timer(0.1, bench.mover.submit, [[second]])
    timer.start()
    both = bench.mover.load(5, pages=2, timeout_s=LIMIT_S)
    both.wait_layer(1)
    both.wait_all()
    assert both.pages == 2 and both.num_layers == 3
    assert [bench.answer(c) for c in (first, second)] == [[OK], [OK]]
    timer.join()


class Registers(FaultyTier):
    """Takes its time to know the host's memory."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.called, self.gate, self.closed = threading.Event(), threading.Event(), False

    def register(self, memory: Any) -> None:
        self.called.set()
        self.gate.wait(LIMIT_S)
        super().register(memory)

    def close(self, *, drain: bool = True, timeout_s: float | None = 60.0) -> None:
        self.closed = True
        super().close(drain=drain, timeout_s=timeout_s)


@pytest.mark.parametrize("closing", [False, True], ids=["attached twice", "closed meanwhile"])
def test_a_tier_that_takes_long_to_attach(bench: Bench, closing: bool) -> None:
    """Of two that attach a name at once one is refused, and nothing of it is left; a mover that is closed meanwhile
    lets go of the tier as well."""
    tiers = [Registers(bench.parts.maker("x", MEMORY)) for _ in range(2)]
    to_make = [*tiers]
    bench.mover._make_tier = lambda name, options: to_make.pop(0)
    met: list[Any] = []

    def attach() -> None:
        try:
            met.append(bench.mover.attach("x", {}))
        except ConfigError as error:
            met.append(error)

    threads = [threading.Thread(target=attach) for _ in range(1 if closing else 2)]
    threads[0].start()
    assert tiers[0].called.wait(LIMIT_S)
    if closing:
        with pytest.raises(DeadlineExceeded, match="attached"):
            bench.mover.close(timeout_s=0.1)
    else:
        threads[1].start()
        until(lambda: not to_make, "the other tier is made")
    tiers[0].gate.set()
    for thread in threads:
        thread.join(LIMIT_S)
    if not closing:
        assert sorted(isinstance(one, ConfigError) for one in met) == [False, True]
        assert [tier.closed for tier in tiers] == [False, True] and not tiers[1].called.is_set()
    bench.mover.close(timeout_s=LIMIT_S)
    assert tiers[0].closed


class Trimmed:
    """A handle of a tier with a bug: it has no outcome for the last page, or fails to say any."""

    def __init__(self, inner: TierHandle, raises: bool) -> None:
        self._inner, self._raises = inner, raises

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def result(self, timeout_s: float | None = None) -> BatchResult:
        if self._raises:
            raise KeyError("page")
        whole = self._inner.result(timeout_s)
        return BatchResult(whole.statuses[:-1], whole.errors)

    def add_done_callback(self, callback: Any) -> None:
        self._inner.add_done_callback(lambda _: callback(self))


@pytest.mark.parametrize("raises", [False, True])
def test_a_tier_that_does_not_answer_for_every_page(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Its command has failed, at once, and is no more under way."""
    tier = bench.parts.tiers["far"]
    for verb in ("lookup", "remove"):
        good = getattr(tier, verb)
        monkeypatch.setattr(tier, verb, lambda keys, good=good, **more: Trimmed(good(keys, **more), raises))
    assert bench.ask(Lookup(id=1, tier="far", scope=SPACE, keys=KEYS)) == [ERROR] * 4
    assert bench.ask(Evict(id=2, tier="far", scope=SPACE, keys=KEYS)) == [ERROR] * 4
    assert ("KeyError" if raises else "each of 4 pages, got 3") in bench.acks[1].detail
    monkeypatch.undo()


def test_bad_settings(bench: Bench) -> None:
    from kvtransfer.mover import Mover

    for deadline_s in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="deadline_s"):
            Mover(bench.parts.engine, deadline_s=deadline_s)
    plain = Mover(bench.parts.engine)
    with pytest.raises(ConfigError, match="make_tier"):
        plain.attach("ram", {"kind": "memory", "cache_gb": 1.0})
    with pytest.raises(ConfigError, match="no tier 'host' yet"):
        plain.attach("host", bench.parts.tiers["far"])
    plain.close()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_directory_plans_with_what_a_disk_keeps_by_itself(tmp_path: Path, wrapped: bool) -> None:
    """Planned to the brim, pages that the disk's cleaner took were hits of the directory, and loads came out short."""
    recipe = Recipe(tmp_path, slots=8)
    for file, size in recipe.files():
        file.write_bytes(bytes(size + 2 * GUARD))
    parts = Parts(recipe)
    try:
        disk = DiskTier(tmp_path / "disk", SMALL, namespace=SPACE.namespace, capacity_pages=40, disk_share=1.0)
        tier: Tier = FaultyTier(disk) if wrapped else disk
        facts = parts.mover.attach("disk", tier)
        assert facts.capacity_pages == 34
        parts.mover.detach("disk")
        tier.close()
    finally:
        parts.close()
