"""The directory with a memory that looks at every byte: hits, stores, loads, lower tiers, room, failures."""

from __future__ import annotations

import gzip
import random
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from directory_helpers import BROKEN, FULL, GOOD, LOST, Memory, check_directory
from engine_helpers import until
from index_helpers import Family, page_tuples

from kvtransfer.books import TierPlan
from kvtransfer.commands import (
    Ack,
    Cancel,
    Command,
    Demote,
    Evict,
    Load,
    Lookup,
    Promote,
    Relocate,
    Resize,
    Scope,
    Store,
    ids,
    positions,
)
from kvtransfer.directory import Directory
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import CapacityError, ConfigError, LayoutError, OwnershipError, TransferError
from kvtransfer.policy import LRU, Prefetch, Prune, WriteThroughSelective
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_keys

ROOT = Path(__file__).resolve().parent.parent
HOST = TierPlan("host", capacity_pages=100)
DISK = TierPlan("disk", "keys", capacity_pages=1000)
FAR = TierPlan("far", "shared")


def make(*tiers: TierPlan, page_size: int = 2, **more: Any) -> tuple[Directory, Memory]:
    return Directory(page_size, tiers or (HOST,), **more), Memory(page_size)


def store(directory: Directory, memory: Memory, tokens: Any, **more: Any) -> Any:
    job = directory.store(tokens, memory.fill(tokens, more.get("scope", Scope())), **more)
    memory.drain(directory)
    assert job.done
    return job


def hit_of(directory: Directory, tokens: Any, scope: Scope | None = None) -> tuple[int, dict[str, int]]:
    with directory.match(tokens, scope) as hit:
        return hit.pages, dict(hit.tokens_by_tier)


def test_store_match_load() -> None:
    directory, memory = make()
    tokens = list(range(21))
    pages = memory.fill(tokens)
    job = directory.store(tokens, pages)
    assert hit_of(directory, tokens) == (0, {})  # not acknowledged
    [command] = memory.take(directory)
    assert isinstance(command, Store) and ids(command.pages).tolist() == pages
    assert ids(command.slots).tolist() == list(range(10))  # one run
    directory.acknowledge(memory.answer(command, [3, 4], [GOOD, GOOD])[0])
    assert job.positions(GOOD) == [3, 4] and not job.done and job.usable_pages == 0
    for ack in memory.answer(command, [0, 1, 2], [GOOD] * 3):
        directory.acknowledge(ack)
    assert hit_of(directory, tokens) == (5, {"host": 10})  # page by page
    memory.drain(directory)
    assert job.done and job.usable_pages == 10 and job.statuses == [GOOD] * 10
    assert directory.commands() == []
    hit = directory.match([*tokens[:15], 99])
    assert (hit.pages, hit.tokens, hit.device_pages, hit.segments) == (7, 14, 0, (("host", 0, 7),))
    room = memory.room(7)
    load = directory.load(hit, room)
    hit.release()
    assert directory.index.locks == 2 and not load.done  # the job's, and its command's
    memory.drain(directory)
    assert load.usable_pages == 7
    memory.verify(load, tokens, room)
    assert directory.index.locks == 0
    check_directory(directory)


def test_only_what_is_lacking_is_written_and_behind_what_is_there() -> None:
    directory, memory = make()
    store(directory, memory, list(range(10)))
    more = [*range(10), *range(50, 60)]
    assert store(directory, memory, more).usable_pages == 10
    last = memory.seen[-1]
    assert isinstance(last, Store) and ids(last.slots).tolist() == [5, 6, 7, 8, 9]
    assert store(directory, memory, more).usable_pages == 10 and memory.seen[-1] is last
    first = directory.store([*more, 1, 2], memory.fill([*more, 1, 2], first=8), first=8)
    second = directory.store([*more, 1, 2], memory.fill([*more, 1, 2]))
    assert len(memory.take(directory)) == 1  # the second waits for the first one's page
    assert (second.done, second.positions(None)) == (False, [10])
    memory.drain(directory, lambda command: BROKEN if command.id == memory.seen[-1].id else GOOD)
    assert first.positions(BROKEN) == [10] and (first.first, first.usable_pages) == (8, 2)
    memory.drain(directory)
    check_directory(directory)


def test_a_page_that_another_store_fails_is_stored_by_the_one_that_waited() -> None:
    directory, memory = make()
    first, second = (directory.store([1, 2, 3, 4], memory.fill([1, 2, 3, 4])) for _ in range(2))
    [command] = memory.take(directory)
    for ack in memory.answer(command, [0, 1], [GOOD, BROKEN]):
        directory.acknowledge(ack)
    assert first.statuses == [GOOD, BROKEN] and not second.done
    memory.drain(directory)
    assert second.statuses == [GOOD, GOOD] and hit_of(directory, [1, 2, 3, 4])[0] == 2
    check_directory(directory)


@pytest.mark.parametrize("capacity", [1, 3, 17, 60])
@pytest.mark.parametrize("page_size", [1, 4])
def test_hits_are_those_of_exact_lru(capacity: int, page_size: int) -> None:
    """An ordered dictionary of pages: used ones move to the end, the deepest first; what is in front goes."""
    directory, memory = make(TierPlan("host", capacity_pages=capacity), page_size=page_size)
    family, kept = Family(random.Random(capacity), 25 * page_size, words=4), OrderedDict[tuple[int, ...], None]()
    for turn in range(300):
        tokens = family.draw()
        prefixes = page_tuples(tokens, page_size)
        wanted = next((n for n, prefix in enumerate(prefixes) if prefix not in kept), len(prefixes))
        with directory.match(tokens) as hit:
            assert hit.pages == wanted
        job = directory.store(tokens, memory.fill(tokens))
        memory.drain(directory)
        for prefix in reversed(prefixes[:wanted]):
            kept.move_to_end(prefix)
        room = min(len(prefixes), capacity)
        while len(kept) + room - wanted > capacity:
            kept.popitem(last=False)
        for prefix in reversed(prefixes[wanted:room]):
            kept[prefix] = None
        for prefix in reversed(prefixes[:room]):
            kept.move_to_end(prefix)
        assert job.usable_pages == room
        if turn % 10 == 0:
            check_directory(directory)
        assert directory.figures().tiers["host"].used_pages == len(kept)


def test_held_pages_stay_and_the_rest_is_what_there_is_room_for() -> None:
    """A pool of 8 that is full, 4 of them held: others get 4 at most, and the hit loads as it was found."""
    directory, memory = make(TierPlan("host", capacity_pages=8))
    mine, other = list(range(8)), list(range(100, 108))
    store(directory, memory, mine)
    store(directory, memory, other)
    hit = directory.match(mine)
    job = store(directory, memory, list(range(200, 212)))
    assert job.statuses == [GOOD] * 4 + [PageStatus.NO_ROOM] * 2
    assert hit_of(directory, other)[0] == 0
    room = memory.room(4)
    load = directory.load(hit, room)
    hit.release()
    assert directory.evict("host", 8).size == 4  # what is under way stays
    memory.drain(directory)
    memory.verify(load, mine, room)
    assert load.usable_pages == 4 and directory.evict("host", 8).size == 4
    assert directory.index.pages == 0 and directory.index.locks == 0
    check_directory(directory)


def test_device_pages_come_first() -> None:
    directory, memory = make()
    tokens = list(range(20))
    store(directory, memory, tokens[:12])
    with directory.match(tokens, device_pages=4) as hit:
        assert (hit.pages, hit.device_pages, hit.segments) == (6, 4, (("host", 4, 6),))
        assert hit.tokens_by_tier == {"device": 8, "host": 4}
        room = memory.room(2)
        load = directory.load(hit, room)
        memory.drain(directory)
        memory.verify(load, tokens, room)
        assert (load.first, load.usable_pages) == (4, 2)
    with directory.match(tokens, device_pages=8) as hit:
        assert (hit.pages, hit.device_pages, hit.segments) == (8, 8, ())
        assert directory.load(hit, []).done
    with directory.match(tokens, device_pages=99) as hit:
        assert hit.pages == 10
    figures = directory.figures()
    assert figures.hit_tokens == 12 + 16 + 20 == sum(figures.hit_tokens_by_tier.values())
    assert figures.asked_tokens == 60 and figures.matches == 3


def test_a_device_tier_knows_its_pages_and_gives_them_back() -> None:
    directory, memory = make(TierPlan("device", "device"), TierPlan("host", capacity_pages=9, write="write_back"))
    tokens = list(range(20))
    pages = memory.fill(tokens)
    assert directory.place(tokens, pages).all()
    again = memory.fill([*tokens, 7, 7])
    assert directory.place([*tokens, 7, 7], again).tolist() == [False] * 10 + [True]
    assert directory.store(tokens, pages).statuses == [PageStatus.CANCELLED] * 10  # write-back: not now
    assert hit_of(directory, tokens) == (10, {"device": 20})
    assert directory.evict("device", 3).size == 0  # written first
    assert kinds(memory.take(directory)) == ["Store"]
    memory.drain(directory)
    assert directory.evict("device", 3).tolist() == [again[10]]  # and what was in front of it is written now
    memory.drain(directory)
    assert directory.evict("device", 2).tolist() == [pages[8], pages[9]]
    with directory.match([*tokens, 7, 7]) as hit:
        assert (hit.pages, hit.device_pages, hit.segments) == (11, 8, (("host", 8, 11),))
        load = directory.load(hit, room := memory.room(3))
        memory.drain(directory)
        memory.verify(load, [*tokens, 7, 7], room)
    # What the host tier has no room for is given up unwritten.
    directory.flush("device")
    memory.drain(directory)
    directory.flush("device")
    memory.drain(directory)
    assert directory.figures().tiers["device"].used_pages == 0
    assert directory.figures().tiers["host"].used_pages <= 9
    check_directory(directory)


def test_a_lower_tier_gets_what_it_lacks_and_gives_it_back() -> None:
    directory, memory = make(HOST, DISK)
    tokens = list(np.random.default_rng(0).integers(0, 9, 200))
    store(directory, memory, tokens)
    sizes = [len(c.keys) for c in memory.seen if isinstance(c, Demote)]
    assert directory.flush("host").size == 100
    assert sizes == [100]
    assert hit_of(directory, tokens) == (100, {"disk": 200})
    hit = directory.match(tokens)
    load = directory.load(hit, room := memory.room(100))
    hit.release()
    memory.drain(directory)
    assert load.usable_pages == 100
    memory.verify(load, tokens, room)
    assert kinds(memory.seen[-2:]) == ["Promote", "Load"]
    assert hit_of(directory, tokens) == (100, {"host": 200})
    assert sum(isinstance(c, Demote) for c in memory.seen) == 1  # the disk has them still
    check_directory(directory)


def test_a_hit_is_made_of_the_fastest_tier_that_has_each_page() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=20), DISK)
    tokens = list(range(40))
    store(directory, memory, tokens)
    directory.flush("host")
    for first in (4, 10):
        part = directory.store(tokens[: 2 * first + 4], memory.fill(tokens[: 2 * first + 4], first=first), first=first)
        memory.drain(directory)
        assert part.usable_pages == 2
    with directory.match(tokens) as hit:
        assert hit.segments == (
            ("disk", 0, 4),
            ("host", 4, 6),
            ("disk", 6, 10),
            ("host", 10, 12),
            ("disk", 12, 20),
        )
        assert hit.tokens_by_tier == {"disk": 32, "host": 8} and hit.tokens == 40
        load = directory.load(hit, room := memory.room(20))
    memory.drain(directory)
    memory.verify(load, tokens, room)
    assert load.usable_pages == 20
    check_directory(directory)


def test_a_stream_through_a_small_host_tier_reaches_the_disk_whole() -> None:
    """Device 100 pages, host 20, 1,000 pages streamed: the disk gets all of them, whoever's they are."""
    directory, memory = make(TierPlan("host", capacity_pages=20), DISK)
    for n in range(10):
        tokens = list(range(1000 * n, 1000 * n + 200))
        assert store(directory, memory, tokens).usable_pages == 100
    assert len(memory.stored) == 1000
    assert hit_of(directory, list(range(3000, 3200)))[0] == 100
    check_directory(directory)


def test_a_failed_backup_is_not_a_backup() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=20), DISK)
    tokens = list(range(80))
    job = directory.store(tokens, memory.fill(tokens))
    memory.drain(directory, lambda command: BROKEN if isinstance(command, Demote) else GOOD)
    assert job.statuses == [GOOD] * 20 + [FULL] * 20  # nothing can make room: refused, not hung
    assert directory.figures().tiers["disk"].used_pages == 0
    directory.flush("host")
    assert hit_of(directory, tokens)[0] == 0 and directory.index.pages == 0
    check_directory(directory)


def test_write_back_writes_what_the_host_tier_gives_up_before_it_goes() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=10), TierPlan("disk", "keys", 30, write="write_back"))
    first, second = list(range(20)), list(range(100, 120))
    store(directory, memory, first)
    assert not any(isinstance(c, Demote) for c in memory.seen)
    job = directory.store(second, memory.fill(second))
    commands = memory.take(directory)
    assert kinds(commands) == ["Demote"] and not job.done
    for ack in memory.answer(commands[0], list(range(10)), [GOOD] * 9 + [BROKEN]):
        directory.acknowledge(ack)
    memory.drain(directory)
    assert job.usable_pages == 10
    assert hit_of(directory, second) == (10, {"host": 20})
    assert hit_of(directory, first) == (9, {"disk": 18})  # the page that could not be written is dropped
    assert directory.figures().tiers["host"].counters["dropped"] == 1
    check_directory(directory)


def test_what_was_written_so_that_it_can_go_goes() -> None:
    """Many stores wait for a small host tier above a smaller disk: the disk must not give up what was just written to
    it before the host tier has given it up, or it is written again and again (it was: one page 37 times)."""
    directory, memory = make(
        TierPlan("host", capacity_pages=14), TierPlan("disk", "keys", 3, write="write_back"), FAR, page_size=1, window=1
    )
    trunk = list(range(50))
    branches = [trunk[:n] + [100 + n] * 8 for n in (0, 3, 9, 14, 15, 18)]
    jobs = [directory.store(branch, memory.fill(branch)) for branch in branches]
    memory.drain(directory, limit=200)
    assert all(job.done for job in jobs)
    written = Counter(key for c in memory.seen if isinstance(c, Demote) and c.tier == "disk" for key in c.keys)
    assert written and max(written.values()) <= 2
    check_directory(directory)


def test_pages_of_a_disk_that_are_held_are_not_evicted() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=10), TierPlan("disk", "keys", 10))
    mine = list(range(20))
    store(directory, memory, mine)
    directory.flush("host")
    hit = directory.match(mine)
    assert hit.segments == (("disk", 0, 10),)
    store(directory, memory, list(range(100, 120)))
    assert not any(isinstance(command, Evict) for command in memory.seen) and len(memory.stored) == 10
    directory.flush("host")
    load = directory.load(hit, room := memory.room(10))
    hit.release()
    memory.drain(directory)
    assert load.usable_pages == 10
    memory.verify(load, mine, room)
    check_directory(directory)


def test_nothing_behind_a_page_that_failed_is_loaded() -> None:
    """The first batch lacks a page while the second one has arrived already."""
    directory, memory = make(TierPlan("host", capacity_pages=300), DISK, page_size=1, window=2)
    tokens = list(range(200))
    store(directory, memory, tokens)
    directory.flush("host")
    load = directory.load(directory.match(tokens), memory.room(200))
    first, second = memory.take(directory)
    del memory.stored["disk", Scope(), page_keys(tokens, 1)[7]]
    for command in (first, second):
        for ack in memory.answer(command, list(memory.under[command.id].left), [GOOD] * positions(command)):
            directory.acknowledge(ack)
    memory.drain(directory)
    assert [positions(command) for command in memory.seen if isinstance(command, Load)] == [7]
    assert load.usable_pages == 7 and load.positions(PageStatus.CANCELLED)[-1] == 199


def test_selective_writing_counts_hits_of_what_is_stored_nowhere() -> None:
    directory, memory = make(
        TierPlan("host", capacity_pages=10, write=WriteThroughSelective(1)),
        TierPlan("disk", "keys", 30, write=WriteThroughSelective(3)),
    )
    tokens = list(range(12))
    for turn in range(5):
        hits = hit_of(directory, tokens)[0]
        job = store(directory, memory, tokens)
        assert hits == (0 if turn < 2 else 6)
        assert job.positions(GOOD) == ([] if turn == 0 else [0, 1, 2, 3, 4, 5])
        assert len(memory.stored) == (0 if turn < 3 else 6)
        check_directory(directory)
    assert job.detail == ""
    for n in range(20):  # never hit: forgotten again
        store(directory, memory, list(range(1000 + 20 * n, 1010 + 20 * n)))
    assert directory.index.pages <= 6 + 10
    check_directory(directory)


def test_a_disk_evicts_by_command_and_counts_what_is_not_gone_yet() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=10), TierPlan("disk", "keys", 12))
    chains = [list(range(100 * n, 100 * n + 8)) for n in range(5)]
    for chain in chains[:3]:
        store(directory, memory, chain)
    assert directory.figures().tiers["disk"].used_pages == 12
    directory.store(chains[3], memory.fill(chains[3]))
    memory.drain(directory, lambda command: BROKEN if isinstance(command, Evict) else GOOD)
    assert len(memory.stored) == 12 and directory.figures().tiers["disk"].counters["failed"] >= 4
    check_directory(directory)
    store(directory, memory, chains[4])
    assert len(memory.stored) == 12
    assert hit_of(directory, chains[0])[0] in (0, 4)
    check_directory(directory)


def test_pages_that_are_lost_below_shorten_the_load_and_are_forgotten() -> None:
    directory, memory = make(HOST, DISK)
    tokens = list(range(40))
    store(directory, memory, tokens)
    directory.flush("host")
    gone = page_keys(tokens, 2)[7]
    del memory.stored["disk", Scope(), gone]
    hit = directory.match(tokens)
    assert hit.pages == 20
    load = directory.load(hit, room := memory.room(20))
    hit.release()
    memory.drain(directory)
    assert load.usable_pages == 7 and load.statuses[7] is LOST
    memory.verify(load, tokens, room)
    assert hit_of(directory, tokens)[0] == 7
    assert directory.index.locks == 0
    check_directory(directory)


def test_a_record_of_the_host_tier_that_does_not_verify_is_not_matched_again() -> None:
    directory, memory = make()
    tokens = list(range(20))
    store(directory, memory, tokens)
    hits = [directory.match(tokens) for _ in range(2)]
    loads = [directory.load(hit, memory.room(10)) for hit in hits]
    first, second = memory.take(directory)
    [ack] = memory.answer(first, list(range(10)), [GOOD] * 4 + [PageStatus.CORRUPT] + [GOOD] * 5)
    directory.acknowledge(ack)
    assert loads[0].usable_pages == 4
    assert directory._host.readers[4] == 1 and directory.figures().tiers["host"].used_pages == 10  # still being read
    check_directory(directory)
    for ack in memory.answer(second, list(range(10)), [GOOD] * 10):
        directory.acknowledge(ack)
    assert directory.figures().tiers["host"].used_pages == 9
    third = directory.load(hits[0], memory.room(10))
    memory.drain(directory)
    assert third.statuses[4] is LOST and third.usable_pages == 4
    for hit in hits:
        hit.release()
    assert hit_of(directory, tokens)[0] == 4
    check_directory(directory)


def test_shared_tiers_are_asked_and_their_pages_fetched_in_batches() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=2000), FAR, prefetch=Prefetch(threshold_tokens=100))
    tokens = np.random.default_rng(1).integers(0, 1000, 1000).astype(np.int32)
    other, other_memory = make(TierPlan("host", capacity_pages=2000), FAR)
    store(other, other_memory, tokens)
    memory.stored = other_memory.stored
    assert hit_of(directory, tokens)[0] == 0
    job = directory.prefetch(tokens, request="r1")
    assert directory.prefetch(tokens, request="r1") is job
    lookups = memory.take(directory)
    assert [(type(c), len(c.keys)) for c in lookups] == [(Lookup, 128)] * 3 + [(Lookup, 116)]  # type: ignore[union-attr]
    memory.drain(directory)
    assert job.done and job.usable_pages == 500
    assert {len(c.keys) for c in memory.seen if isinstance(c, Promote)} == {128, 116}
    assert hit_of(directory, tokens) == (500, {"host": 1000})
    assert directory.admit(job) and directory.index.locks == 0
    check_directory(directory)
    directory.flush("host")
    with directory.match(tokens) as hit:
        assert (hit.pages, hit.hinted_pages) == (0, 0)  # the tree forgets what no private tier has
    assert sum(isinstance(c, Demote) for c in memory.seen) == 0


def test_prefetch_below_the_threshold_is_not_begun() -> None:
    directory, memory = make(HOST, DISK, prefetch=Prefetch(threshold_tokens=20))
    store(directory, memory, list(range(18)))
    store(directory, memory, list(range(100, 120)))
    directory.flush("host")
    small, enough = directory.prefetch(list(range(19))), directory.prefetch(list(range(100, 121)))
    assert small.done and small.statuses == [PageStatus.CANCELLED] * 9
    assert not enough.done and len(memory.take(directory)) == 1
    memory.drain(directory)
    assert enough.usable_pages == 10 and directory.index.locks == 0
    assert directory.prefetch([1]).done and directory.prefetch(list(range(100, 120))).done
    check_directory(directory)


@pytest.mark.parametrize(("stop", "waits_s"), [("best_effort", 0.0), ("wait_complete", 1e9), ("timeout", 2.0 + 0.5)])
def test_when_a_request_may_run_before_its_prefetch_is_complete(stop: Any, waits_s: float) -> None:
    now = [100.0]
    policy = Prefetch(threshold_tokens=1, stop=stop, base_s=2.0, per_ki_token_s=0.5)
    directory, memory = make(
        TierPlan("host", capacity_pages=2000), DISK, page_size=1, prefetch=policy, clock=lambda: now[0], window=1
    )
    tokens = list(range(1024))
    job = directory.store(tokens, memory.fill(tokens))
    memory.drain(directory)
    assert job.done and len(memory.stored) == 1000  # the disk evicted nothing: its own path is not given up
    directory.flush("host")
    fetch = directory.prefetch(tokens[:1000])
    assert fetch.limit_s == pytest.approx(min(waits_s, fetch.limit_s)) or stop == "wait_complete"
    [command] = memory.take(directory)
    limit = {"best_effort": 0.0, "wait_complete": 1e9, "timeout": 2.0 + 0.5 * 1000 / 1024}[stop]
    if limit:
        now[0] = 100.0 + 0.99 * limit
        assert not directory.admit(fetch)
    now[0] = 100.0 + 1.01 * limit
    if stop == "wait_complete":
        assert not directory.admit(fetch)
        memory.drain(directory)
        assert directory.admit(fetch) and fetch.usable_pages == 1000
    else:
        assert directory.admit(fetch)
        cancels = memory.take(directory)
        assert [c.command for c in cancels if isinstance(c, Cancel)] == [command.id] and len(cancels) == 1
        assert not fetch.done and fetch.positions(None) == list(range(128))
        acks = memory.answer(command, list(range(128)), [GOOD] * 100 + [PageStatus.CANCELLED] * 28)
        directory.acknowledge(acks[0])
        assert fetch.done and fetch.usable_pages == 100
        assert hit_of(directory, tokens[:200]) == (200, {"host": 100, "disk": 100})
    directory.stop(fetch)
    assert directory.index.locks == 0 and not directory._waiting
    check_directory(directory)


def test_a_stopped_lookup_is_left_alone() -> None:
    directory, memory = make(HOST, FAR, prefetch=Prefetch(threshold_tokens=2))
    job = directory.prefetch(list(range(10)), request=1)
    [command] = memory.take(directory)
    directory.stop(job)
    assert job.done and job.statuses == [PageStatus.CANCELLED] * 5
    assert directory.prefetch(list(range(10)), request=1) is not job
    for ack in memory.answer(command, list(range(5)), [GOOD] * 5):
        directory.acknowledge(ack)
    memory.drain(directory)
    assert directory.figures().commands_under_way == 0 and directory.index.locks == 0
    check_directory(directory)


def test_a_disk_that_is_asked_gives_what_an_earlier_run_left() -> None:
    directory, memory = make(HOST, DISK)
    tokens = list(range(300, 340))
    store(directory, memory, tokens)
    reborn = Directory(2, [HOST, TierPlan("disk", "keys", 1000, ask=True)], prefetch=Prefetch(threshold_tokens=8))
    job = reborn.prefetch([*tokens[:30], 1, 2])
    memory.drain(reborn)
    assert job.statuses == [GOOD] * 15 + [LOST]
    assert reborn.figures().tiers["disk"].used_pages == 15
    assert hit_of(reborn, tokens) == (15, {"host": 30})
    check_directory(reborn)


def test_another_namespace_or_salt_never_hits_and_has_other_keys() -> None:
    fields = {"model": "m", "kv_dtype": "bf16", "spec": "s", "page_size": 2, "adapter": None, "format_version": 1}
    changes = [("adapter", "x"), ("kv_dtype", "fp8"), ("page_size", 4), ("model", "n"), ("spec", "t")]
    mine = Namespace(**fields).digest()  # type: ignore[arg-type]
    scopes = [Scope(mine, b"salt"), Scope(mine, b"other"), Scope(mine), Scope()]
    for field, value in [*changes, ("format_version", 2)]:
        scopes.append(Scope(Namespace(**{**fields, field: value}).digest(), b"salt"))  # type: ignore[arg-type]
    directory, memory = make(HOST, DISK)
    tokens = list(range(20))
    store(directory, memory, tokens, scope=scopes[0])
    directory.flush("host")
    for scope in scopes[1:]:
        assert hit_of(directory, tokens, scope) == (0, {})
    assert hit_of(directory, tokens, scopes[0]) == (10, {"disk": 20})
    [demote] = [c for c in memory.seen if isinstance(c, Demote)]
    assert demote.scope == scopes[0]
    stored = [set(stored_keys(s.salt, s.namespace or bytes(32), demote.keys, Shard(0, 1))) for s in scopes]
    assert len(set().union(*stored)) == 10 * len(scopes)
    for scope in scopes:
        assert Scope.parse(scope.name()) == scope
    for scope in scopes[1:]:
        store(directory, memory, tokens, scope=scope)
    assert len({s.name() for s in scopes}) == len(scopes) == len(directory.index._roots)
    check_directory(directory)


def test_pins_end_with_their_time() -> None:
    now = [0.0]
    directory, memory = make(clock=lambda: now[0])
    store(directory, memory, list(range(20)))
    assert directory.pin(list(range(12)), ttl_s=5.0) == 6 and directory.pin([77, 78], ttl_s=5.0) == 0
    assert directory.flush("host").size in (0, 4)
    now[0] = 4.9
    directory.tick()
    assert hit_of(directory, list(range(12)))[0] == 6
    now[0] = 5.0
    directory.tick()
    assert directory.index.locks == 0
    directory.flush("host")
    assert directory.index.pages == 0
    check_directory(directory)


def test_cold_branches_are_pruned_above_the_watermark_only() -> None:
    now = [0.0]
    prune = Prune(watermark=0.5, lone=False)
    directory, memory = make(TierPlan("host", capacity_pages=40), prune=prune, clock=lambda: now[0])
    warm, cold = [list(range(n, n + 20)) for n in (0, 100)]
    for tokens in (warm, cold):
        store(directory, memory, tokens)
    for _ in range(3):
        hit_of(directory, warm)
    now[0] = 400.0
    directory.tick()
    assert directory.figures().tiers["host"].used_pages == 20  # half is not above the watermark
    store(directory, memory, [900, 901])
    now[0] = 405.0
    directory.tick()
    assert directory.figures().tiers["host"].used_pages == 21  # it looked 5 s ago
    store(directory, memory, [902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912, 913])
    now[0] = 410.0
    held = directory.match(cold)
    now[0] = 800.0
    directory.tick()
    assert hit_of(directory, cold)[0] == 10
    held.release()
    now[0] = 1100.0
    store(directory, memory, list(range(2000, 2010)))
    now[0] = 1200.0
    directory.tick()
    assert hit_of(directory, cold)[0] == 0 and hit_of(directory, warm)[0] == 10
    check_directory(directory)


def test_tiers_are_attached_and_detached_while_commands_are_under_way() -> None:
    directory, memory = make(HOST)
    tokens = list(range(20))
    directory.attach(DISK)
    job = directory.store(tokens, memory.fill(tokens))
    [command] = memory.take(directory)
    for ack in memory.answer(command, list(range(10)), [GOOD] * 10):
        directory.acknowledge(ack)
    [demote] = memory.take(directory)
    assert isinstance(demote, Demote) and job.done
    directory.acknowledge(memory.answer(demote, [0, 1], [GOOD] * 2)[0])
    directory.detach("disk")
    for ack in memory.answer(demote, list(range(2, 10)), [GOOD] * 8):
        directory.acknowledge(ack)
    assert directory.figures().tiers["disk"].used_pages == 0
    store(directory, memory, list(range(50, 60)))
    assert len(memory.seen) == 3 and hit_of(directory, tokens) == (10, {"host": 20})
    directory.attach(TierPlan("disk", "keys", 50))
    store(directory, memory, list(range(70, 80)))
    assert isinstance(memory.seen[-1], Demote)
    directory.flush("host")
    assert hit_of(directory, list(range(70, 80))) == (5, {"disk": 10}) and hit_of(directory, tokens)[0] == 0
    check_directory(directory)
    for wrong in (DISK, TierPlan("gpu", "device"), HOST):
        with pytest.raises(ConfigError, match="attach: expected"):
            directory.attach(wrong)
    with pytest.raises(ConfigError, match="detach: expected a tier by key, got host"):
        directory.detach("host")


def test_the_host_tier_grows() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=4, most_pages=10))
    assert store(directory, memory, list(range(20))).usable_pages == 4
    job = directory.resize("host", 10)
    assert not job.done and directory.figures().tiers["host"].capacity_pages == 4
    assert store(directory, memory, list(range(20))).usable_pages == 10  # it waits for the room that comes
    assert job.statuses == [GOOD] and directory.figures().tiers["host"].capacity_pages == 10
    check_directory(directory)
    with pytest.raises(CapacityError, match="expected at most most_pages=10 pages, got 11"):
        directory.resize("host", 11)
    with pytest.raises(ConfigError, match="1 page or more, got host, 0"):
        directory.resize("host", 0)
    assert directory.resize("host", 10).statuses == [GOOD]  # nothing to do


def test_growing_that_fails_changes_nothing() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=4, most_pages=10))
    job = directory.resize("host", 10)
    memory.drain(directory, lambda command: FULL)
    assert job.statuses == [FULL] and directory.figures().tiers["host"].capacity_pages == 4
    check_directory(directory)
    again = directory.resize("host", 7)
    directory.lost()
    assert again.statuses == [BROKEN] and "nobody answers" in again.detail
    assert directory.figures().commands_under_way == 0
    last = directory.resize("host", 8)
    memory.drain(directory)
    assert last.statuses == [GOOD] and directory.figures().tiers["host"].capacity_pages == 8


def test_the_host_tier_shrinks_and_keeps_what_the_policy_keeps() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=12))
    memory.slots = 12
    old, new = list(range(100, 112)), list(range(12))
    store(directory, memory, old)
    store(directory, memory, new)  # in slots 6 to 11
    job = directory.resize("host", 6)
    assert hit_of(directory, old)[0] == 0
    memory.take(directory)
    assert [type(c.command) for c in memory.under.values()] == [Relocate]  # and no Resize yet
    with directory.match(new) as hit:  # readable while it moves
        pages = memory.room(6)
        load = directory.load(hit, pages)
        memory.drain(directory)
        memory.verify(load, new, pages)
    assert load.usable_pages == 6 and job.statuses == [GOOD] and memory.slots == 6
    assert memory.seen[-1] == Resize(tier="host", capacity_pages=6, id=memory.seen[-1].id)
    figures = directory.figures().tiers["host"]
    assert (figures.capacity_pages, figures.used_pages, figures.counters["relocated"]) == (6, 6, 6)
    check_directory(directory)
    job = directory.resize("host", 12)
    memory.drain(directory)
    assert job.statuses == [GOOD] and store(directory, memory, old).usable_pages == 6
    assert hit_of(directory, new)[0] == hit_of(directory, old)[0] == 6


def test_pages_on_the_move_are_not_taken_for_too_much() -> None:
    """They have two slots each meanwhile: a tick must not clear the tier for that."""
    directory, memory = make(TierPlan("host", capacity_pages=12), prune=Prune(watermark=1.0, every_s=0.0, idle_s=0.0))
    old, new = list(range(100, 112)), list(range(12))
    store(directory, memory, old)
    store(directory, memory, new)
    job = directory.resize("host", 8)
    for _ in range(3):
        directory.tick()
    memory.drain(directory)
    assert job.statuses == [GOOD] and directory.figures().tiers["host"].counters["relocated"] == 4
    assert hit_of(directory, old)[0] == 2 and hit_of(directory, new)[0] == 6


def test_what_is_held_is_waited_for() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=8))
    tokens = list(range(16))
    store(directory, memory, tokens)
    hit = directory.match(tokens)
    job = directory.resize("host", 5)
    for _ in range(3):
        memory.drain(directory)
        directory.tick()
        check_directory(directory)
    assert not job.done and directory.figures().tiers["host"].used_pages == 8
    pages = memory.room(8)
    load = directory.load(hit, pages)
    memory.drain(directory)
    memory.verify(load, tokens, pages)
    assert load.usable_pages == 8 and not job.done
    hit.release()
    directory.tick()
    memory.drain(directory)
    assert job.statuses == [GOOD] and hit_of(directory, tokens)[0] == 5
    check_directory(directory)


def test_what_is_on_its_way_to_a_slot_that_goes_is_moved_once_it_is_there() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=8))
    store(directory, memory, list(range(100, 108)))  # slots 0 to 3
    tokens = list(range(8))
    stored = directory.store(tokens, memory.fill(tokens))
    memory.take(directory)
    first = directory.resize("host", 6)
    second = directory.resize("host", 4)
    assert first.statuses == [PageStatus.CANCELLED] and not second.done
    memory.drain(directory)
    assert second.done and stored.usable_pages == 4
    assert hit_of(directory, tokens)[0] + hit_of(directory, list(range(100, 108)))[0] == 4
    check_directory(directory)


@pytest.mark.parametrize("status", [BROKEN, LOST, PageStatus.CORRUPT])
def test_pages_that_cannot_be_moved_are_given_up(status: PageStatus) -> None:
    directory, memory = make(TierPlan("host", capacity_pages=8))
    memory.slots = 8
    tokens = list(range(8))
    store(directory, memory, list(range(100, 108)))
    store(directory, memory, tokens)
    directory.evict("host", 4)
    job = directory.resize("host", 4)
    memory.drain(directory, lambda command: status if isinstance(command, Relocate) else GOOD)
    assert job.statuses == [GOOD] and hit_of(directory, tokens)[0] == 0 and memory.slots == 4
    check_directory(directory)


@pytest.mark.parametrize("policy", ["path_score", "lru"])
@pytest.mark.parametrize("left", [9, 5, 3, 1])
def test_a_tier_shrinks_below_what_its_policy_always_keeps(policy: str, left: int) -> None:
    """A path of five nodes stays for ever, but not beyond the size of the tier: the resize would never be done."""
    now = [0.0]
    directory = Directory(1, [TierPlan("host", "slots", 14, 14, policy)], clock=lambda: now[0])
    memory = Memory(1, slots=14)
    tokens = list(range(14))
    for n in (2, 4, 6, 8, 10, 12):  # nodes: something else branches off at each
        directory.index.insert([*tokens[: n - 1], 99], Scope().name())
    store(directory, memory, tokens)
    job = directory.resize("host", left)
    memory.drain(directory)
    now[0] += 1000.0
    directory.tick()
    memory.drain(directory)
    assert job.done and job.statuses == [GOOD]
    assert hit_of(directory, tokens) == (left, {"host": left})
    check_directory(directory)


def test_a_shrinking_tier_writes_back_what_it_gives_up() -> None:
    directory, memory = make(TierPlan("host", capacity_pages=8), TierPlan("disk", "keys", 100, write="write_back"))
    tokens = list(range(16))
    store(directory, memory, tokens)
    job = directory.resize("host", 3)
    memory.drain(directory)
    assert job.statuses == [GOOD] and hit_of(directory, tokens) == (8, {"host": 6, "disk": 10})
    check_directory(directory)


def test_a_smaller_disk_gives_up_what_is_too_much() -> None:
    directory, memory = make(HOST, DISK)
    store(directory, memory, list(range(100)))
    directory.resize("disk", 20)
    memory.drain(directory)
    directory.resize("disk", 20)
    memory.drain(directory)
    assert len(memory.stored) == directory.figures().tiers["disk"].used_pages == 20
    check_directory(directory)


def test_a_memory_that_died_leaves_nothing_behind() -> None:
    directory, memory = make(HOST, DISK, FAR, prefetch=Prefetch(threshold_tokens=2))
    store(directory, memory, list(range(20)))
    directory.flush("host")
    hit = directory.match(list(range(20)))
    jobs: list[Any] = [directory.load(hit, memory.room(10)), directory.store([7] * 10, memory.fill([7] * 10))]
    jobs.append(directory.prefetch(list(range(200, 240))))
    hit.release()
    done: list[Any] = []
    for job in jobs:
        job.add_done_callback(done.append)
    late = memory.take(directory)
    directory.lost()
    assert len(done) == 3 and all(job.done and job.usable_pages == 0 for job in jobs)
    assert directory.index.locks == 0 and directory.figures().commands_under_way == 0
    check_directory(directory)
    before = directory.late_answers
    for command in late:
        for ack in memory.answer(
            command, list(memory.under[command.id].left), [GOOD] * len(memory.under[command.id].left)
        ):
            directory.acknowledge(ack)
    assert directory.late_answers > before
    assert hit_of(directory, [7] * 10)[0] == 0
    check_directory(directory)


def test_answers_that_can_not_be_are_refused_and_repeated_ones_left() -> None:
    directory, memory = make()
    job = directory.store(list(range(8)), memory.fill(range(8)))
    [command] = memory.take(directory)
    for wrong in (
        Ack(id=command.id, first=3, statuses=b"\1\1"),
        Ack(id=command.id, first=-1, statuses=b"\1"),
        Ack(id=command.id, statuses=b"\0"),
        Ack(id=command.id, statuses=b"\77"),
    ):
        with pytest.raises(TransferError, match="ack: expected"):
            directory.acknowledge(wrong)
    assert job.positions(None) == [0, 1, 2, 3]
    for statuses in (b"\1\1", b"\5\5"):  # the second answer to the same pages changes nothing
        directory.acknowledge(Ack(id=command.id, statuses=statuses, detail="because"))
    assert job.positions(GOOD) == [0, 1] and directory.late_answers == 2
    directory.acknowledge(Ack(id=4711, statuses=b"\1\1\1"))
    assert directory.late_answers == 5 and job.detail == "because"
    directory.acknowledge(Ack(id=command.id, first=2, statuses=b"\1\1"))
    assert job.done
    check_directory(directory)


def test_what_can_not_be_is_refused_before_anything_is_touched() -> None:
    directory, memory = make(TierPlan("device", "device"), HOST)
    store(directory, memory, list(range(8)))
    commands = directory.commands()
    for ids_, says in [([1], "expected 4 device pages"), ([1, 1, 2, 3], "distinct"), ([1, 2, 3, -4], "distinct")]:
        with pytest.raises(LayoutError, match=says):
            directory.store(list(range(50, 58)), ids_)
        with pytest.raises(LayoutError, match=says):
            directory.place(list(range(50, 58)), ids_)
        with directory.match(list(range(8))) as hit, pytest.raises(LayoutError, match=says):
            directory.load(hit, ids_)
    with pytest.raises(OwnershipError, match="one that was released"):
        directory.load(hit, [1, 2, 3, 4])
    for few in (-1, 2.5, True, None, float("nan")):
        with pytest.raises(LayoutError, match="device_pages"):
            directory.match(list(range(8)), device_pages=few)  # type: ignore[arg-type]
        for verb in (directory.store, directory.place):
            with pytest.raises(LayoutError, match="first"):
                verb(list(range(8)), [1, 2, 3, 4], first=few)  # type: ignore[arg-type]
    wrong: tuple[Any, ...] = (5, (n for n in range(8)), [[1, 2]], [1.5, 2.5])
    for tokens in wrong:
        with pytest.raises(LayoutError, match="tokens"):
            directory.match(tokens)
        with pytest.raises(LayoutError, match="tokens"):
            directory.prefetch(tokens)
        with pytest.raises(LayoutError, match="tokens"):
            directory.store(tokens, [3])
    with directory.match(None) as nothing:  # type: ignore[arg-type]
        assert nothing.pages == 0
    for ttl in (float("nan"), -1.0, "5"):
        with pytest.raises(ConfigError, match="ttl_s"):
            directory.pin(list(range(8)), ttl_s=ttl)  # type: ignore[arg-type]
    for size in (2.5, float("nan"), True, "4", None, 0):
        with pytest.raises(ConfigError, match="1 page or more"):
            directory.resize("host", size)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="tokens"):
        directory.store([1, -1], [3])
    with pytest.raises(ConfigError, match="one of device, host, got 'disc'"):
        directory.evict("disc", 1)
    for count in (2.5, float("nan"), True, "4", None, -1):
        with pytest.raises(ConfigError, match="0 pages or more"):
            directory.evict("host", count)  # type: ignore[arg-type]
    assert directory.evict("host", 0).size == 0
    with pytest.raises(ConfigError, match="kind device"):
        make()[0].place([1, 2], [1])
    hit.release()
    assert directory.commands() == commands == [] and directory.index.locks == 0
    assert directory.index.pages == 4
    check_directory(directory)


@pytest.mark.parametrize(
    "tiers",
    [
        [DISK],
        [HOST, HOST],
        [HOST, TierPlan("other", capacity_pages=3)],
        [DISK, HOST],
        [HOST, TierPlan("device", "device")],
        [HOST, TierPlan("device", "keys", 4)],
    ],
)
def test_tiers_that_do_not_go_together_are_refused(tiers: list[TierPlan]) -> None:
    with pytest.raises(ConfigError, match="tiers: "):
        Directory(4, tiers)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "tape"}, {"capacity_pages": 0}, {"capacity_pages": None}, {"kind": "shared", "capacity_pages": 4}],
)
def test_plans_that_can_not_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"x.*: expected"):
        TierPlan(**{"name": "x", "capacity_pages": 3, **wrong})


def test_callbacks_run_without_the_mutex() -> None:
    directory, memory = make()
    job = directory.store([1, 2], memory.fill([1, 2]))
    free: list[bool] = []

    def other_thread_gets_in(job: Any) -> None:
        thread = threading.Thread(target=lambda: free.append(directory.match([1, 2]).pages == 1))
        thread.start()
        thread.join(10)

    job.add_done_callback(other_thread_gets_in)
    memory.drain(directory)
    job.add_done_callback(lambda job: free.append(True))
    assert free == [True, True]


class Between(Job):
    """A job that ends just after somebody has seen that it has not."""

    ends = False

    @property
    def done(self) -> bool:
        seen = self._done
        if self.ends and not seen:
            self.ends = False
            ending = threading.Thread(target=self._call_back)
            ending.start()
            ending.join(0.2)
        return seen

    @done.setter
    def done(self, done: bool) -> None:
        self._done = done


def test_a_callback_that_comes_while_its_job_ends_is_called() -> None:
    job, told = Between("store", 0, 1), list[Job]()
    job.ends = True
    job.add_done_callback(told.append)
    until(lambda: told == [job], "it is told")


def test_a_callback_that_raises_keeps_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    directory, memory = make()
    job = directory.store([1, 2, 3, 4], memory.fill([1, 2, 3, 4]))
    told: list[Job] = []
    job.add_done_callback(lambda _: 1 / 0)
    job.add_done_callback(told.append)
    memory.drain(directory)
    assert told == [job] and [one.exc_type for one in seen] == [ZeroDivisionError]
    check_directory(directory)


class Moody(LRU):
    """Somebody's policy, with a bug."""

    broken = False

    def rank(self, node: Any, now: float) -> Any:
        if self.broken:
            raise RuntimeError("a bug")
        return super().rank(node, now)


def test_a_job_that_ended_is_told_though_its_verb_raises() -> None:
    policy = Moody()
    directory, memory = make(TierPlan("host", capacity_pages=2, evict=policy))
    job, told = directory.store([1, 2, 3, 4], memory.fill([1, 2, 3, 4])), list[Job]()
    job.add_done_callback(told.append)
    (command,) = directory.commands()
    policy.broken = True
    with pytest.raises(RuntimeError, match="a bug"):
        directory.acknowledge(Ack.of(command, PageStatus.OK))
    assert job.done and told == [job]


def test_neither_torch_nor_a_gpu_is_needed() -> None:
    code = (
        "import sys, kvtransfer.directory as d; x = d.Directory(2, [d.TierPlan('host', capacity_pages=4)])\n"
        "x.store([1, 2, 3, 4], [0, 1]); print(len(x.commands()), [m for m in ('torch', 'triton', 'pynvml', 'cuda')\n"
        "    if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "1 []", done.stderr


def test_the_examples_of_the_documentation_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/index_and_cache.md").read_text(encoding="utf-8")
    _, _, first, recent, recompute = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(first, names)
    assert capsys.readouterr().out == "496 tokens: {'host': 496}\n"
    monkeypatch.chdir(tmp_path)
    with gzip.open("system_prompts.jsonl.gz", "wt") as out:
        out.write("[1, 2, 3]\n")
    exec(recent.replace("/nvme0/kv/recent", "recent"), names)
    assert names["prefix"].token_ids().tolist() == list(range(992)) and names["tokens"].tolist() == [1, 2, 3]
    exec(recompute, {})
    assert capsys.readouterr().out == "load 400 pages, compute from token 6400 on\n"


def test_requests_of_several_threads_and_a_mover_of_its_own() -> None:
    """Three threads serve requests that share beginnings, a fourth carries out commands: every load is right."""
    directory, memory = make(TierPlan("host", capacity_pages=60), DISK)
    filling, failures, stop = threading.Lock(), list[BaseException](), threading.Event()

    def serve(seed: int) -> None:
        family = Family(random.Random(seed), 60)
        for _ in range(60):
            tokens = family.draw()
            with directory.match(tokens) as hit:
                with filling:
                    room = memory.room(hit.pages)
                load = directory.load(hit, room)
            with filling:
                pages = memory.fill(tokens)
            job = directory.store(tokens, pages)
            assert ends(load) and ends(job)
            memory.verify(load, tokens, room)

    def ends(job: Job) -> bool:
        ended = threading.Event()
        job.add_done_callback(lambda _: ended.set())
        return ended.wait(30)

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)

    def move() -> None:
        while not stop.is_set():
            with filling:
                memory.drain(directory)
            stop.wait(0.001)

    mover = threading.Thread(target=guarded, args=(move,))
    threads = [threading.Thread(target=guarded, args=(serve, seed)) for seed in range(3)]
    for thread in (mover, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    mover.join(60)
    assert not failures and directory.index.locks == 0
    check_directory(directory)


def kinds(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]
