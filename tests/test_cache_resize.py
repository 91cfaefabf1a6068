"""The host tier of a cache changes its size while it is used: in both forms, above a disk that knows its memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import FORMS, SMALL, Parts, Recipe, Rig, hit_pages
from engine_helpers import GUARD, LIMIT_S, put_pages, until

from kvtransfer.cache import TieredCache
from kvtransfer.commands import STATUSES, Ack, Cancel, Relocate, Resize, packed
from kvtransfer.config import load_config
from kvtransfer.jobs import Job
from kvtransfer.kernels.errors import CapacityError
from kvtransfer.pool import KVPool
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.pinning import Chunk
from kvtransfer.tiers.slab import Slab

CHUNK = 4 * 4096  # four slots
OK = PageStatus.OK


@pytest.fixture(params=FORMS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    lower: dict[str, Any] = {
        "disk": {"kind": "disk", "paths": [str(tmp_path / "disk")], "pages": 500, "disk_share": 1.0}
    }
    made = Rig(
        request.param, tmp_path, slots=24, host={"chunk_bytes": CHUNK, "most_pages": 40}, lower=lower,
        host_plan={"most_pages": 40},
    )  # fmt: skip
    try:
        yield made
        made.check()
    finally:
        made.close()


def sized(cache: TieredCache, pages: int) -> Job:
    job = cache.resize_host(pages)

    def done() -> bool:
        cache.tick()
        return job.done

    until(done, f"{pages} pages")
    return job


def test_every_byte_survives_shrinking_and_growing(rig: Rig) -> None:
    old, new = rig.tokens(12), rig.tokens(8)
    rows = {tuple(tokens): rig.stored(tokens) for tokens in (old, new)}
    assert sized(rig.cache, 10).statuses == [OK]
    facts = rig.mover.facts()
    assert (facts.host_pages, facts.host_most_pages, facts.host_grows) == (10, 40, False)
    with rig.cache.match(new) as hit:
        assert dict(hit.tokens_by_tier) == {"host": 8 * rig.page_size}
    assert np.array_equal(rig.loaded(new), rows[tuple(new)])
    with rig.cache.match(old) as hit:
        assert dict(hit.tokens_by_tier) == {"host": 2 * rig.page_size, "disk": 10 * rig.page_size}
    part = old[: 10 * rig.page_size]
    assert np.array_equal(rig.loaded(part), rows[tuple(old)][:10])  # by way of the slots that are left
    assert sized(rig.cache, 40).statuses == [OK]
    for tokens in (old, new):  # the disk reads into memory that came anew
        assert np.array_equal(rig.loaded(tokens), rows[tuple(tokens)])
    third = rig.tokens(18)
    rows[tuple(third)] = rig.stored(third)
    rig.settle()
    for tokens in (old, new, third):
        with rig.cache.match(tokens) as hit:
            assert dict(hit.tokens_by_tier) == {"host": len(tokens) // rig.page_size * rig.page_size}
        assert np.array_equal(rig.loaded(tokens), rows[tuple(tokens)])
    figures = rig.cache.stats().directory.tiers["host"]
    assert figures.capacity_pages == 40 and figures.used_pages == 38


def test_a_held_hit_is_loaded_whatever_happens_meanwhile(rig: Rig) -> None:
    tokens = rig.tokens(20)
    rows = rig.stored(tokens)
    hit = rig.cache.match(tokens)
    job = rig.cache.resize_host(6)
    rig.settle()
    rig.cache.tick()
    assert not job.done
    pages = rig.take(20)
    load = rig.cache.load(hit, pages)
    load.result(LIMIT_S).require()
    assert np.array_equal(rig.read(pages), rows)
    rig.give(pages)
    hit.release()
    rig.settle()
    rig.cache.tick()
    until(lambda: job.done, "the new size")
    assert job.statuses == [OK] and hit_pages(rig, tokens) == 20
    assert np.array_equal(rig.loaded(tokens[: 6 * rig.page_size]), rows[:6])


def test_sizes_that_follow_each_other(rig: Rig) -> None:
    for n in (3, 4):
        rig.stored(rig.tokens(n))
    jobs = [rig.cache.resize_host(pages) for pages in (5, 30, 2, 40, 7)]
    until(lambda: all(job.done for job in jobs), "every size")
    assert jobs[-1].statuses == [OK] and rig.mover.facts().host_pages == 7
    tokens = rig.tokens(7)
    assert np.array_equal(rig.stored(tokens), rig.loaded(tokens))


def content(prefix: list[int]) -> bytes:
    """Of the page that a prefix ends in, whoever computes it."""
    return hashlib.shake_128(repr(prefix).encode()).digest(SMALL.page_bytes)


def test_requests_go_on_while_the_size_changes(rig: Rig) -> None:
    """Three threads match, load, compare and store while a fourth asks for one size after the other."""
    size = rig.page_size
    trunk = rig.tokens(3, rest=0)
    asked = [rig.tokens(n, after=trunk, rest=0) for n in (1, 3, 4, 6)] + [rig.tokens(7, rest=0)]
    rows = [
        np.array([[*content(tokens[: (n + 1) * size])] for n in range(len(tokens) // size)], dtype=np.uint8)
        for tokens in asked
    ]
    failures: list[BaseException] = []
    over = threading.Event()

    def serve(seed: int) -> None:
        rng = np.random.default_rng(seed)
        mine = np.arange(seed * 20, seed * 20 + 20)  # device pages
        try:
            while not over.is_set():
                which = int(rng.integers(len(asked)))
                tokens, want = asked[which], rows[which]
                pages = rng.permutation(mine)[: len(want)]
                with rig.cache.match(tokens) as hit:
                    load = rig.cache.load(hit, pages[: hit.pages])
                assert PageStatus.CORRUPT not in load.result(LIMIT_S).statuses
                assert np.array_equal(rig.read(pages[: load.usable_pages]), want[: load.usable_pages])
                put_pages(rig.layout, rig.buffers, pages, want)
                rig.cache.store(tokens, pages).result(LIMIT_S)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng()
    try:
        for _ in range(10):
            assert sized(rig.cache, int(rng.integers(11, 41))).statuses == [OK] and not failures
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_growing_past_what_there_is_memory_for_is_refused(rig: Rig) -> None:
    with pytest.raises(CapacityError, match="expected at most most_pages=40 pages, got 41"):
        rig.cache.resize_host(41)
    assert rig.mover.facts().host_pages == 24


def test_a_configured_cache_grows_to_what_the_file_says() -> None:
    pool = KVPool.allocate("vllm.LBNHC", spec=SMALL, num_pages=8, device="cpu")
    most = 16 * 8192  # 16 slots and their trailers
    host = {"pages": 10, "most_gb": most / 2**30, "chunk_gb": CHUNK / 2**30, "pin": False}
    config = load_config(arguments={"tiers": {"host": host}}, environment={})
    with TieredCache.create(pool, config, tick_s=None) as cache:
        for pages in (16, 3, 12):
            assert sized(cache, pages).statuses == [OK] and cache.mover.facts().host_pages == pages
            assert cache.stats().directory.tiers["host"].capacity_pages == pages
        with pytest.raises(CapacityError, match="most_pages=16 pages, got 17"):
            cache.resize_host(17)


def packed_ids(*numbers: int) -> bytes:
    return packed(np.array(numbers, dtype=np.int64))


def test_the_mover_answers_what_it_cannot_do(tmp_path: Path) -> None:
    """Nothing that a command asks of the host tier raises, and a refused one changes nothing."""
    recipe = Recipe(tmp_path, slots=8)
    for file, size in recipe.files():
        file.write_bytes(np.random.default_rng().bytes(size + 2 * GUARD))
    parts = Parts(recipe)
    acks: dict[int, Ack] = {}
    parts.mover.answer = lambda ack: acks.update({ack.id: ack})
    try:

        def ask(command: Relocate | Resize) -> tuple[list[PageStatus], str]:
            parts.mover.submit([command])
            until(lambda: command.id in acks, "an answer")
            return [STATUSES[code] for code in acks[command.id].statuses], acks[command.id].detail

        error = PageStatus.ERROR
        statuses, said = ask(Relocate(id=1, tier="elsewhere", read=packed_ids(1), slots=packed_ids(2)))
        assert statuses == [error] and "expected the host tier 'host', got 'elsewhere'" in said
        statuses, said = ask(Relocate(id=2, tier="host", read=packed_ids(1, 2), slots=packed_ids(2, 3)))
        assert statuses == [error] * 2 and "none of those" in said
        statuses, said = ask(Resize(id=3, tier="host", capacity_pages=9))
        assert statuses == [error] and "expected a size of 1 to 8 slots, got 9" in said
        parts.mover.submit([Cancel(id=4, command=5)])
        assert ask(Resize(id=5, tier="host", capacity_pages=2))[0] == [PageStatus.CANCELLED]
        assert parts.mover.facts().host_pages == 8
        before = parts.host.payload.clone()
        assert ask(Relocate(id=6, tier="host", read=packed_ids(7, 5), slots=packed_ids(0, 1)))[0] == [OK, OK]
        rows, old = (x.view(8, -1) for x in (parts.host.payload, before))
        assert torch.equal(rows[:2], old[[7, 5]]) and torch.equal(rows[2:], old[2:])
        assert ask(Resize(id=7, tier="host", capacity_pages=2))[0] == [OK] and parts.mover.facts().host_pages == 2
    finally:
        parts.close()


def test_growth_in_the_background_is_followed_and_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step: what is ready is used while the rest is still to come, and it comes."""
    steps, good = threading.Semaphore(2), Slab._make

    def make(self: Slab, number: int, chunk: Chunk) -> None:
        assert steps.acquire(timeout=LIMIT_S)
        good(self, number, chunk)

    monkeypatch.setattr(Slab, "_make", make)
    rig = Rig(
        "one process",
        tmp_path,
        slots=32,
        host={"background": True, "chunk_bytes": 8 * 4096},
        host_pages=8,
        host_plan={"most_pages": 24},
    )
    try:
        assert rig.parts is not None
        host = rig.parts.host
        until(lambda: host.ready_slots == 8, "a quarter of it")
        rig.cache.tick()
        steps.release(2)
        until(lambda: host.ready_slots == 16, "half of it")
        rig.cache.tick()
        assert rig.directory.capacity("host") == 16 and host.grows and rig.directory.idle
        tokens = rig.tokens(16)
        rows = rig.stored(tokens)
        steps.release(4)
        until(lambda: not host.grows, "all of it")
        rig.cache.tick()
        assert rig.directory.capacity("host") == 24 and host.ready_slots == 32
        assert np.array_equal(rig.loaded(tokens), rows)
        assert sized(rig.cache, 5).statuses == [OK] and host.ready_slots == 5
        rig.check()
    finally:
        steps.release(8)
        rig.close()
