"""What the ranks of the tests do. Each function runs in a process of its own."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvtransfer.group import RankGroup
from kvtransfer.kernels.errors import CapacityError, OwnershipError, RankError
from kvtransfer.rank_slots import RankSlots

NUMBERS = 3


class TierDown(Exception):
    """What the failing rank's tier raises."""


def local_numbers(seed: int, rank: int, operation: int) -> list[int]:
    """What ``rank`` finds by itself: the test computes the same."""
    rng = random.Random(f"{seed}/{rank}/{operation}")
    return [rng.randrange(100) for _ in range(NUMBERS)]


def fails(seed: int, failing: int | None, rank: int, operation: int) -> bool:
    """Whether the tier of ``rank`` fails in this operation."""
    return rank == failing and random.Random(f"fails/{seed}/{operation}").random() < 0.2


class RandomWork:
    """Random operations: the same kinds on all ranks, other numbers on each."""

    kinds = ("hits", "hits", "stage", "allocate", "allocate", "free", "tell", "refuse", "post", "bad_free")

    def __init__(self, group: RankGroup, seed: int, failing: int | None, num_slots: int) -> None:
        self.group, self.seed, self.failing = group, seed, failing
        self.slots = RankSlots(group, num_slots)
        self.held: list[int] = []
        self.taken: set[int] = set()  # slots here
        self.log: list[Any] = []
        self.minima: dict[int, list[int]] = {}
        self.posted = 0

    def numbers(self, operation: int) -> list[int]:
        if fails(self.seed, self.failing, self.group.rank, operation):
            raise TierDown(f"operation {operation}")
        return local_numbers(self.seed, self.group.rank, operation)

    def hits(self, operation: int, size: int) -> Any:
        agreed = self.group.minimum(f"hits {operation}", NUMBERS, lambda: self.numbers(operation))
        self.minima[operation] = list(agreed.value)
        return agreed.value, dict(agreed.failures)

    def stage(self, operation: int, size: int) -> Any:
        agreed = self.group.minimum(f"stage {operation}", NUMBERS, lambda: self.numbers(operation), among="stage")
        return self.group.agree(f"stages {operation}", lambda: list(agreed.value), lambda reports: reports).value

    def allocate(self, operation: int, size: int) -> Any:
        try:
            pages = self.slots.allocate(size, after=self.held[-1] if self.held else None).tolist()
        except CapacityError as error:
            return str(error)
        self.held += pages
        here = set(self.slots.slots(pages).tolist())
        assert len(here) == size and not here & self.taken, "slots are given out twice"
        self.taken |= here
        return pages

    def free(self, operation: int, size: int) -> Any:
        given = self.held[: size % (len(self.held) + 1)]
        self.taken -= set(self.slots.slots(given).tolist())
        freed = self.slots.free(given if self.group.is_leader else [-5]).tolist()  # the leader's word counts
        assert freed == given
        self.held = self.held[len(given) :]
        return given

    def bad_free(self, operation: int, size: int) -> Any:
        twice = self.held and size % 2
        try:
            self.slots.free([self.held[0], self.held[0]] if twice else [self.slots.num_pages + 3])
        except OwnershipError as error:
            return str(error)
        raise AssertionError("freed what it must not")

    def tell(self, operation: int, size: int) -> Any:
        word = self.group.from_leader(f"tell {operation}", lambda: os.urandom(size * 300))
        return hashlib.sha256(word).hexdigest()

    def refuse(self, operation: int, size: int) -> Any:
        def decide(reports: Mapping[int, Any]) -> None:
            raise ZeroDivisionError(f"no {operation}")

        try:
            self.group.agree(f"refuse {operation}", lambda: None, decide)
        except (ZeroDivisionError, RankError) as error:
            assert isinstance(error, ZeroDivisionError) == self.group.is_leader
            assert f"no {operation}" in str(error)
        return operation

    def post(self, operation: int, size: int) -> Any:
        self.posted += 1
        if self.group.is_leader:
            self.group.post([operation, self.posted])
        elif self.group.leads_stage:
            assert self.group.take() == [operation, self.posted]
        return self.posted


def decisions(
    group: RankGroup, seed: int, operations: int, failing: int | None, slow: int | None, slots_by_stage: list[int]
) -> dict[str, Any]:
    """Random operations, and a digest of all that was decided."""
    rng = random.Random(seed)  # the same on all ranks
    own = random.Random(f"{seed}/{group.rank}/own")
    work = RandomWork(group, seed, failing, slots_by_stage[group.coordinates.pp])
    for operation in range(operations):
        kind, size = rng.choice(RandomWork.kinds), rng.randrange(1, 40)
        if group.rank == slow and own.random() < 0.01:
            time.sleep(own.random() * 0.03)
        work.log.append((kind, size, getattr(work, kind)(operation, size)))
    return {
        "digest": hashlib.sha256(repr(work.log).encode()).hexdigest(),
        "minima": work.minima,
        "all": group.all.rounds,
        "stage": group.stage.rounds,
        "used": work.slots.used_pages,
        "held": len(work.held),
        "kinds": {entry[0] for entry in work.log},
        "log": work.log[-3:],
    }


def until_lost(group: RankGroup, victim: int, how: str, at: int, hold_s: float) -> dict[str, Any]:
    """Rounds until one rank is lost. The survivors tell which, when, and what the next round says."""
    try:
        for operation in range(100):
            if group.rank == victim and operation == at:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "late":
                    time.sleep(hold_s)
                if how == "astray":
                    group.minimum("something else", 1, lambda: [1])
            began = time.monotonic()
            group.minimum(f"op {operation}", 1, lambda: [1])
            time.sleep(0.002)
    except RankError as error:
        waited = time.monotonic() - began
        again = ""
        try:
            group.minimum("after", 1, lambda: [1])
        except RankError as second:
            again = str(second)
        if group.rank == 0:
            time.sleep(0.5)  # the others have their answer by then, whenever they were
        return {"ranks": error.ranks, "text": str(error), "waited": waited, "operation": operation, "again": again}
    return {}


def between_rounds(group: RankGroup, victim: int) -> Any:
    """A rank dies while nobody is in a round."""
    group.minimum("one", 1, lambda: [1])
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    try:
        group.minimum("two", 1, lambda: [1])
    except RankError as error:
        if group.rank == 0:
            time.sleep(0.3)
        return error.ranks
    return None


def relay(group: RankGroup, messages: int, take_from: float) -> Any:
    """The first stage posts; the others take later. Returns what was under way at most, and what was taken."""
    if group.is_leader:
        most = 0
        for number in range(messages):
            group.post([number, b"x" * (number * 37 % 9000)])
            assert group._relay is not None
            most = max(most, group._relay.outstanding)
        assert group._relay is not None
        group._relay.drain()
        return most, group._relay.outstanding
    if group.leads_stage:
        time.sleep(take_from)
        taken = [group.take() for _ in range(messages)]
        return [number for number, _ in taken], all(data == b"x" * (number * 37 % 9000) for number, data in taken)
    return None


def relay_lost(group: RankGroup, how: str) -> Any:
    """A later stage dies, or does not take: the first one learns its number. Or the first one dies."""
    try:
        if how == "first dies" and group.is_leader:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "last dies" and group.rank == group.topology.stage_leaders[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.is_leader:
            for number in range(1000):
                group.post(number)
                time.sleep(0.001)
        elif group.leads_stage:
            late = how == "last is late" and group.rank == group.topology.stage_leaders[-1]
            if late:
                time.sleep(4)
            for _ in range(1000):
                group.take()
    except RankError as error:
        return error.ranks
    return None


def big(group: RankGroup, size: int) -> Any:
    """Reports and decisions of any length."""
    data = bytes([group.rank]) * (size + group.rank)
    agreed = group.agree("big", lambda: data, lambda reports: b"".join(reports[rank] for rank in sorted(reports)))
    return hashlib.sha256(agreed.value).hexdigest(), len(agreed.value)


def growing(group: RankGroup) -> Any:
    """The tiers grow at their own pace: the slowest says how many pages there are."""
    ready = {"slots": 4 + group.rank}
    slots = RankSlots(group, 20 + group.rank, ready=lambda: ready["slots"])
    found = [slots.num_pages]
    for _ in range(4):
        try:
            found.append(len(slots.allocate(4)))
        except CapacityError:
            found.append(-1)
            ready["slots"] += 3
    ready["slots"] = 100
    found.append(len(slots.allocate(slots.num_pages - slots.used_pages)))
    return found


def own_cuda(group: RankGroup) -> Any:
    """What of CUDA a rank has touched, and what of ours it has loaded."""
    import torch

    RankSlots(group, 4).allocate(2)
    ours = [name for name in sys.modules if name.startswith("kvtransfer.")]
    touching = [name for name in ours if name in ("kvtransfer.engine", "kvtransfer.dma", "kvtransfer.kernels.check")]
    return torch.cuda.is_initialized(), "triton" in sys.modules, touching


def same_numbers(group: RankGroup, seed: int) -> Any:
    """A few rounds whose result tells which cache this is."""
    rng = np.random.default_rng([seed, group.rank])
    return [group.minimum(f"{step}", 1, lambda: [int(rng.integers(1000))]).value for step in range(20)]


def resizing(group: RankGroup, seed: int, operations: int, slots_by_stage: list[int], failing: int | None) -> Any:
    """Random sizes, pages taken and freed. After each step nothing lies where the memory may be gone."""
    rng = random.Random(seed)  # the same on all ranks
    own = random.Random(f"{seed}/{group.rank}/own")
    memory = {"slots": slots_by_stage[group.coordinates.pp], "fails": False}

    def ready() -> int:
        if memory["fails"]:
            raise TierDown("no answer")
        return memory["slots"]

    slots = RankSlots(group, slots_by_stage[group.coordinates.pp], ready=ready)
    held: list[int] = []
    log: list[Any] = []
    for _ in range(operations):
        kind, size = rng.choice(["allocate", "allocate", "free", "resize", "resize", "grow"]), rng.randrange(1, 24)
        memory["fails"] = group.rank == failing and kind in ("allocate", "resize") and own.random() < 0.2
        before, capacity = [*held], slots.capacity_pages
        try:
            if kind == "allocate":
                new = slots.allocate(size).tolist()
                assert max(new) < slots.capacity_pages and not set(new) & set(held)
                held += new
                assert len(held) <= slots.capacity_pages
                here = slots.slots(held)
                assert np.unique(here).size == here.size and (slots.slots(new) < slots.capacity_pages).all()
            elif kind == "free":
                given = rng.sample(held, size % (len(held) + 1))
                slots.free(given)
                held = [page for page in held if page not in given]
            else:
                if kind == "grow":
                    size, memory["slots"] = 1000, slots.num_slots  # the memory is made first
                beyond = slots.resize(size).tolist()
                capacity = slots.capacity_pages
                assert 1 <= capacity <= min(size, memory["slots"], slots.num_pages) and slots.used_pages == len(held)
                outside = {page for page in held if page >= capacity or slots.slots([page])[0] >= capacity}
                assert outside <= set(beyond) <= set(held)
                log.append(beyond)
                if rng.random() < 0.7 and beyond:
                    slots.free(beyond)
                    held = [page for page in held if page not in beyond]
                    assert not slots.resize(size).size
                    beyond = []
                if not beyond:
                    memory["slots"] = capacity  # given back: nothing may lie there
                    assert (slots.slots(held) < capacity).all()
        except CapacityError as error:
            assert held == before and slots.used_pages == len(before)
            if failing is None:
                assert kind == "allocate"
                room = slots.capacity_pages - len(held)
                assert size > room or slots.capacity_pages < capacity or "free pages on every rank" in str(error)
        log.append((kind, size, held[-3:], slots.capacity_pages))
    return hashlib.sha256(repr(log).encode()).hexdigest(), group.all.rounds, slots.used_pages, slots.capacity_pages


def smallest(group: RankGroup) -> Any:
    """One rank has less: all have so many pages; and it alone gets more."""
    ready = {"slots": 9 if group.rank == 1 else 20}
    slots = RankSlots(group, 20, ready=lambda: ready["slots"])
    pages = slots.allocate(9)
    found: list[Any] = [slots.capacity_pages]
    if group.rank == 2:
        ready["slots"] = 4
    found.append(slots.resize(20).tolist())
    found.append(slots.capacity_pages)
    found.append(slots.free(pages[:6]).size)
    found.append(slots.resize(20).tolist())
    ready["slots"] = 20
    found.append(slots.resize(12).tolist())
    found.append(slots.capacity_pages)
    try:
        slots.allocate(11)
    except CapacityError as error:
        found.append(str(error))
    found.append(np.sort(slots.allocate(9)).tolist())
    return found
