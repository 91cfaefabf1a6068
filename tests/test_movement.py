"""Pages between the host and a lower tier: batches, bounds, outcomes, progress, policies, ownership, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tier_contract import done, eventually, statuses
from tier_pages import ODD, Arena

from kvtransfer.kernels.errors import ConfigError, OwnershipError, RecordError, TierError
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.jobs import Job, Outcomes
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.move import Move, Progress
from kvtransfer.tiers.movement import Movement
from kvtransfer.tiers.stop_policy import StopPolicy

OK, MISS, CORRUPT, ERROR = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT, PageStatus.ERROR
NO_ROOM, CANCELLED = PageStatus.NO_ROOM, PageStatus.CANCELLED


class Watched(MemoryTier):
    """Notes sizes and number of batches; `gate` holds gets and puts."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.sizes: list[int] = []
        self.most = 0
        self.gate = threading.Event()
        self.gate.set()
        self.hold_from: dict[bytes, threading.Event] = {}
        super().__init__(capacity_bytes, workers=4)

    def _note(self, keys: Sequence[bytes]) -> None:
        self.sizes.append(len(keys))
        self.most = max(self.most, self.book.in_flight + 1)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        self._note(keys)
        return super().get_into(keys, buffers, deadline_s=deadline_s)

    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        self._note(keys)
        return super().put_from(keys, buffers, deadline_s=deadline_s)

    def do_get(self, job: Job) -> Outcomes:
        self.gate.wait(20)
        for key in job.keys:
            if key in self.hold_from:
                self.hold_from[key].wait(20)
        return super().do_get(job)

    def do_put(self, job: Job) -> Outcomes:
        self.gate.wait(20)
        return super().do_put(job)


@pytest.fixture
def tier() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.gate.set()
    made.close(drain=False, timeout_s=20)


class Store:
    """A tier that holds pages, and a host slab of a given size above it."""

    def __init__(self, tier: Any, pages: int, slots: int, **settings: Any) -> None:
        self.source = Arena(pages).fill()
        self.images = self.source.images()
        for start in range(0, pages, 128):
            done(
                tier.put_from(self.source.keys[start : start + 128], self.source.buffers[start : start + 128])
            ).require()
        self.host = HostTier(ODD, capacity_pages=slots, device="cpu", pin=False, huge_pages=False)
        self.movement = Movement(self.host, tier, **settings)
        self.keys = self.source.keys
        if isinstance(tier, Watched):
            tier.sizes.clear()
            tier.most = 0

    def image(self, slot: int) -> bytes:
        record = self.host.record(slot)
        return record.payload.tobytes() + record.trailer.tobytes()

    def check(self, move: Move, places: Sequence[int]) -> None:
        """These pages are in their slots, byte for byte."""
        bad = [at for at in places if self.image(int(move.slots[at])) != self.images[at]]
        assert not bad, f"pages {bad[:8]} are wrong"


@pytest.fixture
def store(tier: Watched) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(pages: int, slots: int, *, over: Any = None, **settings: Any) -> Store:
        made.append(Store(tier if over is None else over, pages, slots, **settings))
        return made[-1]

    yield make
    for one in made:
        one.movement.close(drain=False, timeout_s=20)
        one.source.close()
        one.host.close()


def test_prefetch_of_many_pages_in_bounded_batches(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(300, 300, batch_pages=50, in_flight=2)
    move = it.movement.prefetch(it.keys)
    assert done(move).all_ok
    it.check(move, range(300))
    assert tier.sizes == [50] * 6 and tier.most <= 2
    assert move.progress() == Progress(300, 300, 300, 300, 300 * it.source.record_bytes)
    assert it.host.free_slots == 0
    it.host.free(move.slots)
    assert it.movement.book.counters()["prefetched"] == 300


def test_batches_are_of_128_pages_at_most(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(300, 300)
    assert done(it.movement.prefetch(it.keys)).all_ok
    assert sorted(tier.sizes) == [44, 128, 128]
    wrongs: list[dict[str, Any]] = [{"batch_pages": 129}, {"batch_pages": 0}, {"in_flight": 0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="movement: expected"):
            Movement(it.host, tier, register=False, **wrong)


def test_in_flight_bounds_all_moves_together(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(120, 240, batch_pages=10, in_flight=3)
    tier.gate.clear()
    moves = [it.movement.prefetch(it.keys), it.movement.prefetch(it.keys)]
    time.sleep(0.1)
    assert tier.most == 3 and len(tier.sizes) == 3
    assert it.host.free_slots == 240 - 30, "slots are taken batch by batch"
    tier.gate.set()
    assert all(done(move).all_ok for move in moves)
    assert tier.most == 3 and len(tier.sizes) == 24
    for move in moves:
        it.check(move, range(120))


def test_slots_follow_the_prefix(store: Callable[..., Store]) -> None:
    it = store(40, 60, batch_pages=8, in_flight=1)
    first = it.host.allocate(3)
    move = it.movement.prefetch(it.keys, after=int(first[-1]))
    assert done(move).all_ok
    assert move.slots.tolist() == list(range(int(first[-1]) + 1, int(first[-1]) + 41))


def test_the_first_gap_ends_a_prefetch_and_gives_slots_back(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(100, 100, batch_pages=10, in_flight=1)
    statuses(tier.remove([it.keys[34]]))
    move = it.movement.prefetch(it.keys)
    result = done(move)
    assert result.prefix_pages == 34 and result.statuses[34] is MISS
    assert set(result.statuses[40:]) == {CANCELLED} and tier.sizes == [10] * 4, "nothing is begun behind the gap"
    assert move.progress().prefix_pages == 34
    it.check(move, result.positions(OK))
    kept = move.slots[move.slots >= 0]
    assert it.host.free_slots == 100 - len(result.positions(OK)) == 100 - kept.size
    assert move.slots[34] == -1


def test_collect_takes_the_prefix_and_frees_the_rest(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(100, 100, batch_pages=10, in_flight=2)
    statuses(tier.remove([it.keys[34]]))
    move = it.movement.prefetch(it.keys, policy=StopPolicy("wait_complete"))
    slots = move.collect()
    assert slots.tolist() == move.slots[:34].tolist() and slots.size == 34
    done(move)
    assert it.host.free_slots == 100 - 34
    assert move.collect().tolist() == slots.tolist()
    it.host.free(slots)
    assert it.host.free_slots == 100


def test_slots_of_the_caller_are_wiped_where_nothing_came(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(6, 10, batch_pages=6)
    statuses(tier.remove([it.keys[2]]))
    slots = it.host.allocate(6)
    move = it.movement.prefetch(it.keys, slots)
    assert done(move).statuses == (OK, OK, MISS, OK, OK, OK)
    it.check(move, (0, 1, 3, 4, 5))
    assert it.host.verify(int(slots[0])).stored_key == it.keys[0]
    with pytest.raises(RecordError):
        it.host.header(int(slots[2]))
    assert (it.host.digests[slots[2]] == 2**64 - 1).all()
    assert it.host.free_slots == 4, "the caller's slots stay the caller's"


def test_a_host_without_room_gets_what_fits(store: Callable[..., Store]) -> None:
    it = store(30, 13, batch_pages=8, in_flight=2)
    move = it.movement.prefetch(it.keys)
    result = done(move)
    assert result.statuses == (OK,) * 13 + (NO_ROOM,) * 3 + (CANCELLED,) * 14
    it.check(move, range(13))
    assert it.host.free_slots == 0 and (move.slots[13:] == -1).all()
    again = done(it.movement.prefetch(it.keys))
    assert again.prefix_pages == 0 and again.statuses[0] is NO_ROOM and "free" in str(again.errors[0])


def test_corrupt_and_failing_pages_never_count(store: Callable[..., Store]) -> None:
    inner = MemoryTier(1 << 30, workers=2)
    tier = FaultyTier(inner, [Fault("wrong_bytes", verb="get", call=1, pages=[3]), Fault("error", verb="get", call=3)])
    it = store(80, 80, over=tier, batch_pages=20, in_flight=1)
    move = it.movement.prefetch(it.keys)
    result = done(move)
    assert result.statuses[23] is CORRUPT and result.prefix_pages == 23
    assert it.host.free_slots == 80 - len(result.positions(OK))
    move = it.movement.prefetch(it.keys[:23], policy=StopPolicy("wait_complete"))
    assert move.collect().size == 20 and done(move).statuses[20:] == (ERROR,) * 3
    it.movement.close()
    tier.close()


def test_progress_while_running(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(60, 60, batch_pages=10, in_flight=3)
    late = threading.Event()
    tier.hold_from[it.keys[0]] = late  # the first batch comes last
    move = it.movement.prefetch(it.keys)
    eventually(lambda: move.progress().ok_pages >= 50)
    assert move.progress().prefix_pages == 0 and not move.done()
    it.check(move, [at for at in range(60) if move.batch.status_now(at) is OK])
    late.set()
    assert done(move).all_ok and move.progress().prefix_pages == 60


def test_progress_only_grows_and_what_counts_is_final(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(400, 400, batch_pages=16, in_flight=4)
    move = it.movement.prefetch(it.keys)
    seen = [Progress(400, 0, 0, 0, 0)]
    while not move.done():
        now = move.progress()
        it.check(move, range(seen[-1].prefix_pages, now.prefix_pages))
        assert now.prefix_pages >= seen[-1].prefix_pages and now.ok_pages >= now.prefix_pages
        seen.append(now)
    it.check(move, range(400))


@pytest.mark.parametrize("kind", ["best_effort", "timeout", "wait_complete"])
def test_stop_policies(tier: Watched, store: Callable[..., Store], kind: Any) -> None:
    it = store(60, 60, batch_pages=10, in_flight=1)
    gate = threading.Event()
    tier.hold_from[it.keys[35]] = gate
    policy = StopPolicy(kind, base_s=0.2, per_ki_token_s=0.1 * 1024 / (60 * ODD.page_size))  # 0.3 s for this one
    move = it.movement.prefetch(it.keys, policy=policy)
    eventually(lambda: move.progress().prefix_pages == 30)
    opener = threading.Timer(0.6, gate.set)
    opener.start()
    started = time.monotonic()
    slots = move.collect()
    waited = time.monotonic() - started
    expected = {"best_effort": (0.0, 0.2), "timeout": (0.0, 0.5), "wait_complete": (0.5, 10)}[kind]
    assert expected[0] <= waited <= expected[1]
    assert slots.size == (60 if kind == "wait_complete" else 30)
    it.check(move, range(slots.size))
    gate.set()
    result = done(move)
    assert result.prefix_pages == slots.size and set(result.statuses[slots.size :]) <= {CANCELLED}
    assert it.host.free_slots == 60 - slots.size, "what came too late gave its slots back"
    opener.join()


def test_the_time_out_counts_from_the_start(tier: Watched, store: Callable[..., Store]) -> None:
    policy = StopPolicy("timeout", base_s=0.5, per_ki_token_s=0.25)
    assert policy.limit_s(2048) == 1.0 and StopPolicy("best_effort").limit_s(9) == 0.0
    assert StopPolicy("wait_complete").limit_s(9) is None
    it = store(10, 10)
    tier.gate.clear()
    move = it.movement.prefetch(it.keys, policy=StopPolicy("timeout", base_s=0.2, per_ki_token_s=0.0))
    assert not move.due()
    time.sleep(0.25)
    assert move.due()
    started = time.monotonic()
    assert move.collect().size == 0 and time.monotonic() - started < 0.1
    tier.gate.set()
    done(move)
    assert it.host.free_slots == 10
    wrongs: list[dict[str, Any]] = [{"kind": "never"}, {"base_s": -1.0}, {"per_ki_token_s": float("nan")}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="stop policy"):
            StopPolicy(**wrong)


def test_a_slow_tier_cannot_hold_collect_for_ever(store: Callable[..., Store]) -> None:
    inner = MemoryTier(1 << 30)
    tier = FaultyTier(inner, [Fault("stall", verb="get", hold=True)])
    it = store(5, 5, over=tier)
    move = it.movement.prefetch(it.keys, policy=StopPolicy("timeout", base_s=0.1, per_ki_token_s=0.0))
    assert move.collect().size == 0
    with pytest.raises(OwnershipError):  # the tier may still write into them
        it.host.free(move.slots)
    tier.release()
    assert set(statuses(move)) == {CANCELLED}
    assert it.host.free_slots == 5
    it.movement.close()
    tier.close()


def test_cancel_and_deadline(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(100, 100, batch_pages=10, in_flight=2)
    tier.gate.clear()
    move = it.movement.prefetch(it.keys)
    assert move.cancel()
    tier.gate.set()
    result = done(move)
    assert set(result.statuses) <= {OK, CANCELLED} and set(result.statuses[20:]) == {CANCELLED}
    assert it.host.free_slots == 100 - len(result.positions(OK))
    tier.gate.clear()
    late = it.movement.prefetch(it.keys, deadline_s=0.1)
    time.sleep(0.15)
    tier.gate.set()
    assert set(statuses(late)[30:]) == {CANCELLED}


def test_a_callback_of_a_move_that_was_too_late_may_begin_another(tier: Watched, store: Callable[..., Store]) -> None:
    """Whoever finds that a move's time is up, its callbacks run without a lock of the movement's."""
    it = store(20, 40, batch_pages=10, in_flight=1)
    it.movement.book._deadlines.close()  # so that the thread which makes room finds it
    tier.gate.clear()
    first = it.movement.prefetch(it.keys[:10])
    late = it.movement.prefetch(it.keys, deadline_s=0.05)
    more: list[Move] = []
    late.add_done_callback(lambda _: more.append(it.movement.prefetch(it.keys)))
    time.sleep(0.1)
    tier.gate.set()
    assert done(first).all_ok
    eventually(lambda: bool(more))
    assert set(statuses(late)) == {CANCELLED} and done(more[0]).all_ok
    it.check(more[0], range(20))


@pytest.mark.parametrize("problem", [OSError("gone"), KeyError("bug")])
def test_a_tier_that_raises_stops_no_later_move(
    tier: Watched, store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    it = store(20, 40)

    def refuse(*_: Any, **__: Any) -> TierHandle:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(tier, "get_into", refuse)
        assert set(statuses(it.movement.prefetch(it.keys))) == {ERROR}
    assert it.host.free_slots == 40 and len(reported) == (not isinstance(problem, OSError))
    assert done(it.movement.prefetch(it.keys)).all_ok


# --- write-back


def filled(host: HostTier, arena: Arena) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The arena's pages in slots of ``host``."""
    slots = host.allocate(arena.count)
    for slot, buffer in zip(slots.tolist(), arena.buffers, strict=True):
        record = host.record(slot)
        record.payload[:], record.trailer[:] = buffer.payload, buffer.trailer
    return slots


def test_write_back_sends_what_the_tier_lacks(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(20, 200, batch_pages=16, in_flight=2)
    fresh, target = Arena(50).fill(), Arena(50)
    slots = np.concatenate([filled(it.host, it.source), filled(it.host, fresh)])
    before = tier.stats().counters["bytes_written"]
    move = it.movement.write_back([*it.keys, *fresh.keys], slots)
    assert done(move).all_ok
    assert sum(tier.sizes) == 50 and tier.most <= 2, "only what it lacks is sent"
    assert tier.stats().counters["bytes_written"] - before == 50 * fresh.record_bytes
    assert move.progress() == Progress(70, 70, 70, 70, 50 * fresh.record_bytes)
    done(tier.get_into(fresh.keys, target.buffers)).require()
    assert target.images() == fresh.images()
    again = it.movement.write_back(fresh.keys, slots[20:], lookup_first=False)
    assert done(again).all_ok and it.movement.book.counters()["written_back"] == 120
    fresh.close()


def test_one_unsealed_slot_spoils_no_other_write_back(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(1, 20, batch_pages=4)
    fresh = Arena(9).fill()
    slots = filled(it.host, fresh)
    it.host.record(int(slots[5])).trailer[200] ^= 1
    result = done(it.movement.write_back(fresh.keys, slots))
    assert result.positions(ERROR) == (5,) and isinstance(result.errors[5], RecordError)
    assert statuses(tier.lookup(fresh.keys)) == tuple(MISS if i == 5 else OK for i in range(9))
    fresh.close()


def test_slots_of_a_move_are_not_freed_under_it(tier: Watched, store: Callable[..., Store]) -> None:
    """What a background store reads is never somebody else's page."""
    it = store(1, 20)
    fresh, target = Arena(4).fill(), Arena(4)
    slots = filled(it.host, fresh)
    tier.gate.clear()
    move = it.movement.write_back(fresh.keys, slots)
    eventually(lambda: len(tier.sizes) == 1)
    with pytest.raises(OwnershipError, match="in flight"):
        it.host.free(slots)
    with pytest.raises(OwnershipError, match="nothing else moves"):
        it.movement.prefetch(it.keys[:1], slots[:1])
    opener = threading.Timer(0.1, tier.gate.set)
    opener.start()
    it.host.free(slots, wait_s=10)
    assert done(move).all_ok
    done(tier.get_into(fresh.keys, target.buffers)).require()
    assert target.images() == fresh.images()
    opener.join()
    fresh.close()


def test_slots_under_a_transfer_are_refused(store: Callable[..., Store]) -> None:
    it = store(2, 4)
    slots = it.host.allocate(2)
    owner = object()
    it.host.ledger.claim(slots, owner)
    for call in (it.movement.write_back, it.movement.prefetch):
        with pytest.raises(OwnershipError, match="nothing else moves"):
            call(it.keys, slots)
    it.host.ledger.release(owner)
    with pytest.raises(ConfigError, match="one slot a key, got 1 for 2"):
        it.movement.write_back(it.keys, slots[:1])
    with pytest.raises(OwnershipError):
        it.movement.write_back(it.keys, [int(slots[0]), 3])  # not given out


# --- the end


def test_a_tier_that_dies_or_closes_ends_every_page(store: Callable[..., Store]) -> None:
    inner = MemoryTier(1 << 30)
    tier = FaultyTier(inner, [Fault("death", verb="get", call=2)])
    it = store(60, 60, over=tier, batch_pages=10, in_flight=1)
    result = done(it.movement.prefetch(it.keys))
    assert result.prefix_pages == 20 and set(result.statuses[20:30]) == {ERROR} and it.host.free_slots == 40
    it.movement.close()
    tier.close()
    again = Movement(it.host, tier, register=False)
    result = done(again.prefetch(it.keys))
    assert result.statuses[0] is ERROR and "closed" in str(result.errors[0])
    assert it.host.free_slots == 40
    again.close()


def test_close_drains_or_drops(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(100, 200, batch_pages=10, in_flight=2)
    move = it.movement.prefetch(it.keys)
    it.movement.close(timeout_s=20)
    assert done(move).all_ok
    with pytest.raises(TierError, match="closed"):
        it.movement.prefetch(it.keys)
    again = Movement(it.host, tier, batch_pages=10, in_flight=2)
    tier.gate.clear()
    move = again.prefetch(it.keys)
    opener = threading.Timer(0.1, tier.gate.set)
    opener.start()
    again.close(drain=False, timeout_s=20)
    result = move.result(0)
    assert set(result.statuses[20:]) == {CANCELLED} and again.book.counters()["dropped"] >= 80
    opener.join()


def test_no_pages(store: Callable[..., Store]) -> None:
    it = store(1, 2)
    for move in (it.movement.prefetch([]), it.movement.write_back([], [])):
        assert done(move).all_ok and move.collect().size == 0 and move.due()


def test_many_moves_from_many_threads_leave_no_slot_behind(tier: Watched, store: Callable[..., Store]) -> None:
    it = store(64, 150, batch_pages=7, in_flight=3)
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            start = int(rng.integers(0, 40))
            keys = it.keys[start : start + int(rng.integers(1, 24))]
            kind: Any = ("best_effort", "wait_complete", "timeout")[int(rng.integers(3))]
            move = it.movement.prefetch(keys, policy=StopPolicy(kind, 0.002, 0.0))
            if rng.random() < 0.2:
                move.cancel()
            slots = move.collect()
            for i, slot in enumerate(slots.tolist()):
                if it.image(slot) != it.images[start + i]:
                    problems.append(f"page {start + i} is wrong")
            it.host.free(slots)
            done(move)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems[:4]
    assert it.host.free_slots == 150
