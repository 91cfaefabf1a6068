"""HeadGroupTier: what a rank of one TP size writes, ranks of another read, over real records of a shared tier."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tier_pages import Arena
from tier_servers import start_redis

from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus, Tier
from kvtransfer.tiers.batch import Verb
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.head_group_tier import HeadGroupTier
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.redis import RedisTier

OK, MISS, ERROR = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR
MODEL = KVSpec.attention(num_layers=3, page_size=5, kv_heads=4, head_dim=67, itemsize=2, v_head_dim=33)
SHARED = 4


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server, port, _ = start_redis(tmp_path_factory.mktemp("redis"))
    yield port
    server.kill()


def rank(port: int, tp_size: int, tp_rank: int, spec: KVSpec = MODEL) -> HeadGroupTier:
    groups = HeadGroups(spec, share_across_tp=SHARED, tp_size=tp_size, tp_rank=tp_rank)
    return HeadGroupTier(RedisTier(f"redis://127.0.0.1:{port}"), groups)


def arenas(tier: HeadGroupTier, whole: Arena, pages: int, size: int, number: int) -> Arena:
    """Places of the rank's share of ``whole``, sealed as its mover would."""
    arena = Arena(pages, tier.groups.rank_spec, tier=tier).fill()
    arena.keys = whole.keys
    heads = [np.arange(c.heads) for c in MODEL.layers[0]]
    assert all(len(h) % size == 0 for h in heads)
    for place in range(pages):
        arena.buffers[place].payload[: arena.spec.page_bytes] = share(
            whole.buffers[place].payload[: MODEL.page_bytes], size, number
        )
        header = whole.host.header(2 * place + 1)
        from dataclasses import replace

        arena.host.seal(2 * place + 1, [replace(header, payload_bytes=arena.spec.page_bytes)])
    return arena


def share(page: np.ndarray, size: int, number: int) -> np.ndarray:
    """The rank's bytes of a page-first page, by plain slicing."""
    out, at = [], 0
    for components in MODEL.layers:
        for c in components:
            n = MODEL.page_size * c.heads * c.head_bytes
            part = page[at : at + n].reshape(MODEL.page_size, c.heads, c.head_bytes)
            each = c.heads // size
            out.append(part[:, number * each : (number + 1) * each].reshape(-1))
            at += n
    return np.concatenate(out)


@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 4), (2, 1), (4, 2), (1, 4), (4, 1), (2, 2)])
def test_another_size_reads_its_heads(redis: int, writes: int, reads: int) -> None:
    pages = 70  # more than two chunks
    whole = Arena(pages, MODEL).fill()
    for number in range(writes):
        with rank(redis, writes, number) as tier:
            mine = arenas(tier, whole, pages, writes, number)
            assert tier.lookup(mine.keys).result(20).statuses == (MISS,) * pages
            assert tier.put_from(mine.keys, mine.buffers).result(20).all_ok
            assert tier.lookup(mine.keys).result(20).all_ok
            mine.close()
    for number in range(reads):
        with rank(redis, reads, number) as tier:
            mine = Arena(pages, tier.groups.rank_spec, tier=tier)
            assert tier.lookup(whole.keys).result(20).all_ok
            result = tier.get_into(whole.keys, mine.buffers).result(20)
            assert result.all_ok, result.errors
            for place in range(pages):
                wanted = share(whole.buffers[place].payload[: MODEL.page_bytes], reads, number)
                got = mine.buffers[place].payload[: mine.spec.page_bytes]
                assert (got == wanted).all(), f"page {place} of rank {number}"
                header = mine.host.header(2 * place + 1)
                assert header.tokens == whole.host.header(2 * place + 1).tokens
                assert header.layer_digests == tuple(page_digests(got[None].copy(), mine.spec)[0].tolist())
            mine.check_guards()
            mine.close()
    whole.close()


def test_a_page_of_which_a_group_is_missing_is_a_miss(redis: int) -> None:
    whole = Arena(3, MODEL).fill()
    with rank(redis, 2, 0) as tier:
        half = arenas(tier, whole, 3, 2, 0)
        assert tier.put_from(half.keys, half.buffers).result(20).all_ok
        half.close()
    with rank(redis, 1, 0) as tier:
        mine = Arena(3, MODEL, tier=tier)
        assert tier.lookup(whole.keys).result(20).statuses == (MISS,) * 3
        assert tier.get_into(whole.keys, mine.buffers).result(20).statuses == (MISS,) * 3
        mine.close()
    with rank(redis, 2, 1) as tier:
        other = arenas(tier, whole, 3, 2, 1)
        assert tier.put_from(other.keys[1:], other.buffers[1:]).result(20).all_ok
        other.close()
    with rank(redis, 1, 0) as tier:
        assert tier.lookup(whole.keys).result(20).statuses == (MISS, OK, OK)
        assert tier.remove(whole.keys).result(20).statuses == (MISS, OK, OK)
        assert tier.lookup(whole.keys).result(20).statuses == (MISS,) * 3
    whole.close()


def faulty(*faults: Fault) -> tuple[HeadGroupTier, FaultyTier]:
    inner = FaultyTier(MemoryTier(64 << 20), faults)
    groups = HeadGroups(MODEL, share_across_tp=SHARED, tp_size=1, tp_rank=0)
    return HeadGroupTier(inner, groups, workers=1, chunk_pages=2), inner


def filled(tier: Tier, pages: int) -> Arena:
    return Arena(pages, MODEL, tier=tier).fill()


@pytest.mark.parametrize("verb", ["get", "put"])
def test_an_error_of_one_record_is_that_of_its_page(verb: Verb) -> None:
    """Record 5 of a chunk of two pages belongs to the second page; the next chunks are not concerned."""
    tier, _ = faulty(Fault("error", verb=verb, call=1, pages=[5]))
    with tier:
        arena = filled(tier, 6)
        put = tier.put_from(arena.keys, arena.buffers).result(20)
        wanted = (OK, OK, OK, ERROR, OK, OK)
        assert put.statuses == (wanted if verb == "put" else (OK,) * 6)
        if verb == "get":
            got = tier.get_into(arena.keys, arena.buffers).result(20)
            assert got.statuses == wanted and list(got.errors) == [3]
        arena.close()


def test_a_bit_that_flips_in_a_record_spoils_its_page_alone() -> None:
    tier, _ = faulty(Fault("wrong_bytes", verb="get", call=0, pages=[2]))
    with tier:
        arena = filled(tier, 4)
        images = [buffer.payload[: MODEL.page_bytes].tobytes() for buffer in arena.buffers]
        assert tier.put_from(arena.keys, arena.buffers).result(20).all_ok
        got = tier.get_into(arena.keys, arena.buffers).result(20)
        assert got.statuses[0] is not OK and got.statuses[1:] == (OK,) * 3
        assert [buffer.payload[: MODEL.page_bytes].tobytes() for buffer in arena.buffers][1:] == images[1:]
        arena.close()


def test_a_tier_that_dies_is_an_error_a_page_and_no_more() -> None:
    tier, inner = faulty(Fault("death", verb="get", call=1))
    with tier:
        arena = filled(tier, 6)
        assert tier.put_from(arena.keys, arena.buffers).result(20).all_ok
        assert tier.get_into(arena.keys, arena.buffers).result(20).statuses == (OK, OK, *[ERROR] * 4)
        inner.revive()
        assert tier.get_into(arena.keys, arena.buffers).result(20).all_ok
        arena.close()


def test_records_of_two_pages_do_not_make_one(tmp_path: Path) -> None:
    """Somebody put another namespace's record under a group's key: the page does not verify."""
    inner = MemoryTier(64 << 20)
    groups = HeadGroups(MODEL, share_across_tp=2, tp_size=1, tp_rank=0)
    with HeadGroupTier(inner, groups, workers=1) as tier:
        arena = filled(tier, 1)
        assert tier.put_from(arena.keys, arena.buffers).result(20).all_ok
        (_, second) = tier.record_keys(arena.keys)
        other = Arena(1, groups.record_spec, tier=inner).fill()
        from dataclasses import replace

        header = replace(other.host.header(1), stored_key=second, shard=groups.shards()[1])
        other.host.seal(1, [header])
        assert inner.remove([second]).result(20).all_ok
        assert inner.put_from([second], other.buffers).result(20).all_ok
        assert tier.get_into(arena.keys, arena.buffers).result(20).statuses == (PageStatus.CORRUPT,)
        other.close()
        arena.close()


ENDING = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from tier_pages import Arena
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.head_group_tier import HeadGroupTier
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.memory_tier import MemoryTier

spec = KVSpec.attention(num_layers=16, page_size=16, kv_heads=8, head_dim=128, itemsize=2)
tier = HeadGroupTier(MemoryTier(1 << 30), HeadGroups(spec, share_across_tp=8, tp_size=1, tp_rank=0))
arena = Arena(64, tier.groups.rank_spec, tier=tier).fill()
result = tier.put_from(arena.keys, arena.buffers)
time.sleep(float(sys.argv[3]))
assert not result.done()
sys.exit(3)
"""


@pytest.mark.parametrize("after_s", [0.02, 0.04, 0.06])
def test_a_process_may_end_while_pages_are_cut(after_s: float) -> None:
    """Workers do that in PyTorch's C++: ended there they abort the process."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(here.parent), str(here), str(after_s)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
