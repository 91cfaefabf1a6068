"""The contract of tiers (base.py), as tests that every tier passes, plain and wrapped by `FaultyTier`.

A test module of a tier derives `Lab`, which makes the tier and meddles with its store behind its back, and

    class TestMine(TierContract, BoundedContract):
        @pytest.fixture
        def bench(self) -> Iterator[Lab]: ...

with those of `BoundedContract`, `ShortRecordContract` and `RemoteContract` that the lab can serve.

Every test takes one lab. tests/test_tier_contract.py breaks a tier in each way that a test is about, and sees it fail.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tier_pages import Arena, differing

from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, KVTransferError, LayoutError, TierError
from kvtransfer.tiers.base import BatchResult, PageStatus, RecordBuffer, Tier, TierHandle
from kvtransfer.tiers.faulty import Fault, FaultyTier

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
ERROR, NO_ROOM, CANCELLED = PageStatus.ERROR, PageStatus.NO_ROOM, PageStatus.CANCELLED
LIMIT_S = 20.0  # longest wait for anything here


class Lab(ABC):
    """One store, and tiers over it.

    can_pin     pages can be protected from eviction
    persistent  a tier made later finds what an earlier one stored
    many        pages of a long batch
    outage_s    how long the tier may take to notice an outage
    """

    can_pin = True
    persistent = False
    many = 200
    outage_s = 2.0

    @abstractmethod
    def make(self) -> Tier:
        """A new tier over the store, with room for 400 records of tier_pages.ODD at least."""

    @abstractmethod
    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        """Flip a bit of the stored record's byte at ``offset`` (payload with padding, then trailer)."""

    def shorten(self, tier: Tier, key: bytes) -> None:
        """Take the last block from the stored record (`ShortRecordContract`)."""
        raise NotImplementedError

    def make_bounded(self, records: int, record_bytes: int) -> Tier:
        """A tier with room for about that many records (`BoundedContract`)."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the store, as a crash would (`RemoteContract`)."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it again at the same address (`RemoteContract`)."""
        raise NotImplementedError


class WrappedLab(Lab):
    """Another lab's tiers inside a `FaultyTier`."""

    def __init__(self, inner: Lab) -> None:
        self.inner = inner
        self.can_pin, self.persistent = inner.can_pin, inner.persistent
        self.many, self.outage_s = inner.many, inner.outage_s

    def make(self) -> Tier:
        return FaultyTier(self.inner.make())

    def make_bounded(self, records: int, record_bytes: int) -> Tier:
        return FaultyTier(self.inner.make_bounded(records, record_bytes))

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        assert isinstance(tier, FaultyTier)
        self.inner.rot(tier.inner, key, offset)

    def shorten(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FaultyTier)
        self.inner.shorten(tier.inner, key)

    def stop(self) -> None:
        self.inner.stop()

    def start(self) -> None:
        self.inner.start()


def done(handle: TierHandle) -> BatchResult:
    """The result, in time."""
    return handle.result(LIMIT_S)


def statuses(handle: TierHandle) -> tuple[PageStatus, ...]:
    """The outcomes, in time."""
    return done(handle).statuses


def eventually(what: Callable[[], bool]) -> None:
    """Wait until ``what`` is true."""
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.02)


@contextmanager
def opened(lab: Lab, tier: Tier | None = None) -> Iterator[tuple[Tier, Callable[[int], Arena]]]:
    """A tier, and a maker of arenas that are registered with it. All are closed."""
    made = lab.make() if tier is None else tier
    arenas: list[Arena] = []

    def arena(count: int) -> Arena:
        arenas.append(Arena(count, tier=made))
        return arenas[-1]

    try:
        yield made, arena
        for one in arenas:
            one.close()
    finally:
        made.close(drain=False, timeout_s=LIMIT_S)


class _Contract:
    """``lab`` comes plain and wrapped."""

    @pytest.fixture
    def bench(self) -> Iterator[Lab]:
        raise NotImplementedError

    @pytest.fixture(params=["plain", "faulty"])
    def lab(self, request: pytest.FixtureRequest, bench: Lab) -> Lab:
        return bench if request.param == "plain" else WrappedLab(bench)


class TierContract(_Contract):
    """What holds for every tier."""

    # --- bytes

    def test_a_record_comes_back_byte_for_byte(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(7).fill(), arena(7)
            before = source.images()
            assert isinstance(tier, Tier)
            assert statuses(tier.lookup(source.keys)) == (MISS,) * 7
            assert statuses(tier.put_from(source.keys, source.buffers)) == (OK,) * 7
            assert statuses(tier.lookup(source.keys)) == (OK,) * 7
            order = [3, 0, 6, 2]
            got = tier.get_into([source.keys[i] for i in order], target.buffers[:4])
            assert statuses(got) == (OK,) * 4
            assert not differing([target.image(i) for i in range(4)], [before[i] for i in order])
            assert not differing(source.images(), before), "a put changed its buffers"
            source.check_guards()
            target.check_guards(untouched=(4, 5, 6))

    def test_a_long_batch(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            pages = lab.many + 101
            source, target = arena(pages).fill(), arena(pages)
            assert done(tier.put_from(source.keys, source.buffers)).all_ok
            assert done(tier.get_into(source.keys, target.buffers)).all_ok
            assert not differing(target.images(), source.images())
            target.check_guards()

    def test_the_first_value_of_a_key_stays(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            first, second, target = arena(2).fill(), arena(2).fill(), arena(2)
            kept = first.images()
            assert done(tier.put_from(first.keys, first.buffers)).all_ok
            stored = tier.stats().counters["bytes_written"]
            assert stored == 2 * first.record_bytes
            other = second.host.header(1)  # other bytes, sealed for the first's keys
            for place, key in enumerate(first.keys):
                second.host.seal(2 * place + 1, [_renamed(other, key)])
            assert done(tier.put_from(first.keys, second.buffers)).all_ok
            assert tier.stats().counters["bytes_written"] == stored
            assert done(tier.get_into(first.keys, target.buffers)).all_ok
            assert not differing(target.images(), kept)

    # --- one result a page

    def test_hits_and_misses_keep_their_places(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            here, away, target = arena(6).fill(), arena(6).fill(), arena(12)
            done(tier.put_from(here.keys, here.buffers)).require()
            mixed = [key for pair in zip(away.keys, here.keys, strict=True) for key in pair]
            assert statuses(tier.lookup(mixed)) == (MISS, OK) * 6
            result = done(tier.get_into(mixed, target.buffers))
            assert result.statuses == (MISS, OK) * 6 and result.prefix_pages == 0
            assert not differing([target.image(i) for i in range(1, 12, 2)], here.images())
            counters = tier.stats().counters
            assert (counters["hits"], counters["misses"]) == (6, 6)
            assert (counters["lookup_hits"], counters["lookup_misses"]) == (6, 6)
            assert counters["bytes_read"] == 6 * here.record_bytes
            assert statuses(tier.remove(mixed)) == (MISS, OK) * 6
            assert statuses(tier.lookup(mixed)) == (MISS,) * 12
            target.check_guards()

    def test_an_unsealed_page_spoils_no_other(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source = arena(5).fill()
            source.buffers[1].trailer[300] ^= 1  # damaged
            bad_key = bytes(32)  # sealed for another key
            source.host.seal(2 * 3 + 1, [_renamed(source.host.header(7), source.keys[3])], checksum=False)
            keys = [*source.keys[:4], bad_key]
            result = done(tier.put_from(keys, source.buffers))
            assert result.statuses == (OK, ERROR, OK, ERROR, ERROR)
            assert sorted(result.errors) == [1, 3, 4]
            assert statuses(tier.lookup(keys)) == (OK, MISS, OK, MISS, MISS)

    def test_no_pages(self, lab: Lab) -> None:
        with opened(lab) as (tier, _):
            for handle in (tier.lookup([]), tier.get_into([], []), tier.put_from([], []), tier.remove([])):
                assert statuses(handle) == ()
            assert statuses(tier.pin([], 1.0)) == ()

    def test_a_key_twice_in_a_batch(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(1).fill(), arena(2)
            twice = source.keys * 2
            assert done(tier.put_from(twice, source.buffers * 2)).all_ok
            assert done(tier.get_into(twice, target.buffers)).all_ok
            assert not differing(target.images(), source.images() * 2)
            assert OK in statuses(tier.remove(twice))
            assert statuses(tier.lookup(twice)) == (MISS, MISS)

    # --- what does not verify

    @pytest.mark.parametrize("where", ["payload", "last byte of the payload", "trailer", "last byte of the trailer"])
    def test_a_flipped_bit_is_a_miss_and_is_set_aside(self, lab: Lab, where: str) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(3).fill(), arena(3)
            done(tier.put_from(source.keys, source.buffers)).require()
            payload = source.host.slot_bytes
            offset = {
                "payload": 77,
                "last byte of the payload": source.spec.page_bytes - 1,
                "trailer": payload + 130,
                "last byte of the trailer": source.record_bytes - 1,
            }[where]
            lab.rot(tier, source.keys[1], offset)
            result = done(tier.get_into(source.keys, target.buffers))
            assert result.statuses == (OK, CORRUPT, OK)
            assert tier.stats().counters["corrupt"] == 1
            assert not differing([target.image(0), target.image(2)], [source.image(0), source.image(2)])
            assert statuses(tier.lookup(source.keys)) == (OK, MISS, OK)
            assert done(tier.put_from(source.keys, source.buffers)).all_ok
            assert done(tier.get_into(source.keys, target.buffers)).all_ok
            assert not differing(target.images(), source.images())

    def test_a_record_of_another_size_is_no_hit(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(3).fill(), arena(3)
            size = source.host.slot_bytes
            less = RecordBuffer(target.buffers[0].payload[4096:], target.buffers[0].trailer)
            more = RecordBuffer(target.payloads[size : 2 * size + 4096], target.buffers[1].trailer)
            for buffer in (less, more):
                done(tier.put_from(source.keys, source.buffers)).require()
                (status,) = statuses(tier.get_into(source.keys[:1], [buffer]))
                assert status in (CORRUPT, ERROR)

    # --- input

    def test_bad_input_is_refused_before_anything_is_touched(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source = arena(2).fill()
            keys, buffers = source.keys, source.buffers
            with pytest.raises(ConfigError, match="32 bytes, got 31"):
                tier.lookup([keys[0], b"x" * 31])
            with pytest.raises(ConfigError, match="one buffer a key, got 1 for 2"):
                tier.put_from(keys, buffers[:1])
            strided = RecordBuffer(source.payloads[: 2 * 12288 : 2], buffers[0].trailer)
            with pytest.raises(LayoutError, match="contiguous"):
                tier.get_into(keys[:1], [strided])
            read_only = RecordBuffer(buffers[0].payload[:], buffers[0].trailer)
            read_only.payload.flags.writeable = False
            with pytest.raises(LayoutError, match="read-only"):
                tier.get_into(keys[:1], [read_only])
            assert done(tier.put_from(keys[:1], [read_only])).all_ok
            with pytest.raises(ConfigError, match="deadline_s"):
                tier.get_into(keys, buffers, deadline_s=-1.0)
            with pytest.raises(ConfigError, match="ttl_s"):
                tier.pin(keys, -1.0)
            assert statuses(tier.lookup(keys)) == (OK, MISS)

    def test_registration(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, foreign = arena(1).fill(), Arena(1).fill()
            if tier.needs_registration:
                with pytest.raises(ConfigError, match="registered"):
                    tier.put_from(foreign.keys, foreign.buffers)
                with pytest.raises(ConfigError, match="registered"):
                    tier.get_into(foreign.keys, foreign.buffers)
            else:
                assert done(tier.put_from(foreign.keys, foreign.buffers)).all_ok
            with pytest.raises(ConfigError, match="overlaps"):
                tier.register(source.payloads[4096:])
            with pytest.raises(ConfigError, match="unregister"):
                tier.unregister(foreign.payloads)
            tier.register(foreign.payloads)
            tier.register(foreign.trailers)
            assert done(tier.put_from(foreign.keys, foreign.buffers)).all_ok
            tier.unregister(foreign.trailers)
            tier.unregister(foreign.payloads)
            foreign.close()

    # --- handles

    def test_handles_call_back_once_and_can_be_awaited(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source = arena(3).fill()
            called: list[TierHandle] = []
            over = threading.Event()

            def back(handle: TierHandle) -> None:
                called.append(handle)
                over.set()

            handle = tier.put_from(source.keys, source.buffers)
            assert isinstance(handle, TierHandle)
            handle.add_done_callback(back)
            assert done(handle).all_ok and handle.done() and over.wait(LIMIT_S)
            assert called == [handle] and not handle.cancel()
            handle.add_done_callback(back)
            assert called == [handle, handle]

            async def look() -> BatchResult:
                return await tier.lookup(source.keys)

            assert asyncio.run(look()).all_ok
            eventually(lambda: tier.stats().in_flight == 0)

    def test_a_callback_that_waits_for_its_own_thread_is_told_so(self, lab: Lab) -> None:
        """On whichever thread a tier ends a batch: another batch that this thread must end is refused, not waited for
        without an end."""
        with opened(lab) as (tier, arena):
            source, target, other = arena(40).fill(), arena(40), arena(40).fill()
            done(tier.put_from(source.keys, source.buffers)).require()
            ended: list[bool | str] = []
            over = threading.Event()

            def back(_: TierHandle) -> None:
                for handle in (tier.get_into(source.keys, target.buffers), tier.put_from(other.keys, other.buffers)):
                    try:
                        ended.append(handle.result(3).all_ok)
                    except TierError as error:
                        ended.append("can't wait" in str(error))
                over.set()

            tier.get_into(source.keys, source.buffers).add_done_callback(back)
            assert over.wait(LIMIT_S) and ended == [True, True]
            eventually(lambda: tier.stats().in_flight == 0)

    def test_a_deadline_of_nothing_begins_nothing(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(3).fill(), arena(3)
            assert statuses(tier.put_from(source.keys, source.buffers, deadline_s=0.0)) == (CANCELLED,) * 3
            assert statuses(tier.lookup(source.keys)) == (MISS,) * 3
            done(tier.put_from(source.keys, source.buffers, deadline_s=LIMIT_S)).require()
            assert statuses(tier.get_into(source.keys, target.buffers, deadline_s=0.0)) == (CANCELLED,) * 3
            target.check_guards(untouched=range(3))

    def test_cancel_leaves_each_page_done_or_undone(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(lab.many).fill(), arena(lab.many)
            for _ in range(3):
                handle = tier.put_from(source.keys, source.buffers)
                handle.cancel()
                put = statuses(handle)
                assert set(put) <= {OK, CANCELLED}
                there = statuses(tier.lookup(source.keys))
                assert all(seen is OK for seen, was in zip(there, put, strict=True) if was is OK)
                assert put != (CANCELLED,) * lab.many or there == (MISS,) * lab.many
                handle = tier.get_into(source.keys, target.buffers)
                handle.cancel()
                got = statuses(handle)
                assert set(got) <= {OK, MISS, CANCELLED}
                right = [i for i, status in enumerate(got) if status is OK]
                assert not differing([target.image(i) for i in right], [source.image(i) for i in right])
                # A page whose cancelled read the device has not let go of yet is held for a moment longer.
                eventually(lambda: ERROR not in statuses(tier.remove(source.keys)))
            target.check_guards()

    # --- pins

    def test_pins(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, away = arena(2).fill(), arena(1).fill()
            done(tier.put_from(source.keys, source.buffers)).require()
            if not lab.can_pin:
                result = done(tier.pin(source.keys, None))
                assert result.statuses == (ERROR, ERROR) and len(result.errors) == 2
                return
            assert statuses(tier.pin([*source.keys, *away.keys], None)) == (OK, OK, MISS)
            assert tier.stats().pinned_pages == 2
            result = done(tier.remove(source.keys))
            assert result.statuses == (ERROR, ERROR) and "pinned" in str(result.errors[0])
            assert statuses(tier.lookup(source.keys)) == (OK, OK)
            assert statuses(tier.pin(source.keys[:1], 0)) == (OK,)
            assert statuses(tier.pin(source.keys[1:], 0.05)) == (OK,)
            assert statuses(tier.remove(source.keys[:1])) == (OK,)
            eventually(lambda: statuses(tier.remove(source.keys[1:])) == (OK,))
            assert tier.stats().pinned_pages == 0

    # --- many threads

    def test_many_threads(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source = arena(24).fill()
            images = source.images()
            targets = [arena(6) for _ in range(4)]
            problems: list[str] = []

            def work(seed: int) -> None:
                rng, target = random.Random(seed), targets[seed]
                for _ in range(25):
                    places = rng.sample(range(24), 6)
                    keys = [source.keys[p] for p in places]
                    verb = rng.choice(["put", "get", "get", "remove", "lookup"])
                    if verb == "put":
                        got = statuses(tier.put_from(keys, [source.buffers[p] for p in places]))
                        allowed = {OK}
                    elif verb == "get":
                        got = statuses(tier.get_into(keys, target.buffers))
                        allowed = {OK, MISS}
                        for i, status in enumerate(got):
                            if status is OK and target.image(i) != images[places[i]]:
                                problems.append(f"wrong bytes of page {places[i]}")
                    elif verb == "remove":
                        got = statuses(tier.remove(keys))
                        allowed = {OK, MISS, ERROR}  # ERROR: somebody reads it
                    else:
                        got = statuses(tier.lookup(keys))
                        allowed = {OK, MISS}
                    if not set(got) <= allowed:
                        problems.append(f"{verb}: {got}")

            threads = [threading.Thread(target=_reporting, args=(work, seed, problems)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * LIMIT_S)
            assert not problems, problems[:5]
            eventually(lambda: tier.stats().in_flight == 0)
            assert done(tier.put_from(source.keys, source.buffers)).all_ok

    # --- the end

    def test_close_drains_and_refuses_what_comes_after(self, lab: Lab) -> None:
        tier = lab.make()
        arena = Arena(120, tier=tier).fill()
        keys, images = arena.keys, arena.images()
        handles = [tier.put_from(keys[i : i + 10], arena.buffers[i : i + 10]) for i in range(0, 120, 10)]
        tier.close(timeout_s=LIMIT_S)
        assert all(handle.done() and handle.result(0).all_ok for handle in handles)
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.lookup(keys)
        with pytest.raises(TierError, match="closed"):
            tier.put_from(keys, arena.buffers)
        if lab.persistent:
            with opened(lab) as (again, make):
                target = make(120)
                assert done(again.get_into(keys, target.buffers)).all_ok
                assert not differing(target.images(), images)
        arena.host.close()

    def test_close_without_drain_gives_every_page_its_outcome(self, lab: Lab) -> None:
        tier = lab.make()
        arena = Arena(120, tier=tier).fill()
        handles = [tier.put_from(arena.keys[i : i + 10], arena.buffers[i : i + 10]) for i in range(0, 120, 10)]
        tier.close(drain=False, timeout_s=LIMIT_S)
        got = [status for handle in handles for status in handle.result(0).statuses]
        assert len(got) == 120 and set(got) <= {OK, CANCELLED}
        assert tier.stats().in_flight == 0
        arena.host.close()

    def test_nothing_is_left_behind(self, lab: Lab) -> None:
        def use() -> None:
            with opened(lab) as (tier, arena):
                source = arena(4).fill()
                done(tier.put_from(source.keys, source.buffers)).require()
                done(tier.get_into(source.keys, source.buffers)).require()

        use()
        gc.collect()
        before = (_descriptors(), threading.active_count())
        for _ in range(4):
            use()
        gc.collect()
        eventually(lambda: _descriptors() <= before[0] and threading.active_count() <= before[1])

    # --- faults

    @pytest.mark.parametrize("kind", ["wrong_bytes", "short"])
    @pytest.mark.parametrize("verb", ["put", "get"])
    def test_spoilt_bytes_never_come_out(self, bench: Lab, kind: Any, verb: Any) -> None:
        tier = FaultyTier(bench.make(), [Fault(kind, verb=verb, call=0, pages=[1, 2])])
        with opened(bench, tier) as (_, arena):
            source, target = arena(4).fill(), arena(4)
            kept = source.images()
            assert done(tier.put_from(source.keys, source.buffers)).all_ok
            assert not differing(source.images(), kept), "the fault reached the caller's buffers"
            assert statuses(tier.get_into(source.keys, target.buffers)) == (OK, CORRUPT, CORRUPT, OK)
            assert statuses(tier.lookup(source.keys)) == (OK, MISS, MISS, OK)
            assert done(tier.put_from(source.keys, source.buffers)).all_ok
            assert done(tier.get_into(source.keys, target.buffers)).all_ok
            assert not differing(target.images(), kept)

    def test_errors_and_partial_batches_leave_the_rest_alone(self, bench: Lab) -> None:
        faults = [
            Fault("error", verb="put", call=0, pages=[0]),
            Fault("partial", verb="get", call=0, count=2),
            Fault("delay", verb="lookup", call=0, seconds=0.1),
        ]
        tier = FaultyTier(bench.make(), faults)
        with opened(bench, tier) as (_, arena):
            source, target = arena(4).fill(), arena(4)
            assert statuses(tier.put_from(source.keys, source.buffers)) == (ERROR, OK, OK, OK)
            started = time.monotonic()
            assert statuses(tier.lookup(source.keys)) == (MISS, OK, OK, OK)
            assert time.monotonic() - started >= 0.1
            assert statuses(tier.get_into(source.keys, target.buffers)) == (MISS, OK, ERROR, ERROR)
            assert target.image(1) == source.image(1)
            target.check_guards(untouched=(2, 3))
            assert tier.faults_struck == 3

    def test_a_stall_ends_by_deadline_cancel_and_release(self, bench: Lab) -> None:
        tier = FaultyTier(bench.make(), [Fault("stall", verb="get", times=3)])
        with opened(bench, tier) as (_, arena):
            source, target = arena(2).fill(), arena(2)
            done(tier.put_from(source.keys, source.buffers)).require()
            assert statuses(tier.get_into(source.keys, target.buffers, deadline_s=0.05)) == (CANCELLED, CANCELLED)
            handle = tier.get_into(source.keys, target.buffers)
            with pytest.raises(DeadlineExceeded):
                handle.result(0.05)
            handle.cancel()
            assert statuses(handle) == (CANCELLED, CANCELLED)
            target.check_guards(untouched=(0, 1))
            handle = tier.get_into(source.keys, target.buffers)
            tier.release()
            assert done(handle).all_ok
            assert not differing(target.images(), source.images())

    def test_death_at_a_chosen_call(self, bench: Lab) -> None:
        tier = FaultyTier(bench.make(), [Fault("death", call=2)])
        with opened(bench, tier) as (_, arena):
            source = arena(2).fill()
            assert done(tier.put_from(source.keys, source.buffers)).all_ok
            assert done(tier.lookup(source.keys)).all_ok
            for _ in range(2):
                assert statuses(tier.lookup(source.keys)) == (ERROR, ERROR)
                assert statuses(tier.get_into(source.keys, source.buffers)) == (ERROR, ERROR)
            tier.revive()
            assert done(tier.lookup(source.keys)).all_ok


class BoundedContract(_Contract):
    """For stores whose capacity a lab can set."""

    def test_the_capacity_holds(self, lab: Lab) -> None:
        record_bytes = Arena(1).record_bytes
        tier = lab.make_bounded(40, record_bytes)
        with opened(lab, tier) as (tier, arena):
            capacity = tier.stats().capacity_bytes
            pinned, target = arena(3).fill(), arena(60)
            done(tier.put_from(pinned.keys, pinned.buffers)).require()
            if lab.can_pin:
                done(tier.pin(pinned.keys, None)).require()
            for _ in range(4):
                source = arena(60).fill()
                put = statuses(tier.put_from(source.keys, source.buffers))
                assert set(put) <= {OK, NO_ROOM}
                assert tier.stats().used_bytes <= capacity
                got = statuses(tier.get_into(source.keys, target.buffers))
                right = [i for i, status in enumerate(got) if status is OK]
                assert set(got) <= {OK, MISS} and right
                assert all(put[i] is OK for i in right)
                assert not differing([target.image(i) for i in right], [source.image(i) for i in right])
            if lab.can_pin:
                assert done(tier.get_into(pinned.keys, target.buffers[:3])).all_ok
                assert not differing([target.image(i) for i in range(3)], pinned.images())


class ShortRecordContract(_Contract):
    """For stores in which a record can be shorter than it was."""

    def test_a_short_record_is_a_miss(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(3).fill(), arena(3)
            done(tier.put_from(source.keys, source.buffers)).require()
            lab.shorten(tier, source.keys[1])
            assert statuses(tier.get_into(source.keys, target.buffers)) == (OK, CORRUPT, OK)
            assert not differing([target.image(0), target.image(2)], [source.image(0), source.image(2)])
            assert statuses(tier.lookup(source.keys)) == (OK, MISS, OK)
            target.check_guards()


class RemoteContract(_Contract):
    """For stores that can go away."""

    def test_a_store_that_dies_costs_one_time_out_and_comes_back(self, lab: Lab) -> None:
        with opened(lab) as (tier, arena):
            source, target = arena(4).fill(), arena(4)
            done(tier.put_from(source.keys, source.buffers)).require()
            lab.stop()
            end = time.monotonic() + lab.outage_s + LIMIT_S
            while statuses(tier.get_into(source.keys, target.buffers)) != (ERROR,) * 4:
                assert time.monotonic() < end
            started = time.monotonic()
            for handle in (tier.lookup(source.keys), tier.get_into(source.keys, target.buffers)):
                result = done(handle)
                assert result.statuses == (ERROR,) * 4 and "unavailable" in str(result.errors[0])
            assert statuses(tier.put_from(source.keys, source.buffers)) == (ERROR,) * 4
            assert time.monotonic() - started < 0.5, "suppressed calls must not wait for the store"
            assert tier.stats().counters["times_down"] == 1
            lab.start()
            eventually(lambda: OK in statuses(tier.put_from(source.keys, source.buffers)))
            done(tier.put_from(source.keys, source.buffers)).require()
            done(tier.get_into(source.keys, target.buffers)).require()
            assert not differing(target.images(), source.images())

    def test_a_store_that_is_absent_at_the_start(self, lab: Lab) -> None:
        lab.stop()
        with opened(lab) as (tier, arena):
            source = arena(2).fill()
            assert statuses(tier.lookup(source.keys)) == (ERROR, ERROR)
            lab.start()
            eventually(lambda: statuses(tier.put_from(source.keys, source.buffers)) == (OK, OK))


def _renamed(header: Any, key: bytes) -> Any:
    """The header of another page, for ``key``, with the payload's checksum to be computed anew."""
    from dataclasses import replace

    return replace(header, stored_key=key, payload_xxh3=None)


def _reporting(work: Callable[[int], None], seed: int, problems: list[str]) -> None:
    try:
        work(seed)
    except (KVTransferError, AssertionError) as error:
        problems.append(repr(error))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
