"""Pages named by a hash alone, in tiers and in slots of a host tier; and tiers asked one after the other."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import fresh

from kvtransfer.config import load_config
from kvtransfer.integrations.hashed_pages import HashedPages, RecordPlan, plan_records
from kvtransfer.integrations.keyed_slots import KeyedSlots
from kvtransfer.integrations.lower_tiers import TierStack, open_lower_tiers
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, Shard
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.record import decode

WHOLE = Shard(0, 3)
SPACE = Namespace("m", "float16", "test", 5)
GUARD = 0x5A


def keys(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]


class Memory:
    """Pages in pieces, each between guard bytes, filled at random."""

    def __init__(self, plan: RecordPlan, count: int) -> None:
        rng = fresh()
        self.memory = []
        self.pages = []
        for _ in range(count):
            page = []
            for size in plan.piece_bytes:
                whole = np.full(size + 128, GUARD, dtype=np.uint8)
                whole[64 : 64 + size] = rng.integers(0, 256, size, dtype=np.uint8)
                self.memory.append(whole)
                page.append(whole[64 : 64 + size])
            self.pages.append(page)

    def images(self) -> list[bytes]:
        return [b"".join(piece.tobytes() for piece in page) for page in self.pages]

    def check_guards(self) -> None:
        assert all((whole[:64] == GUARD).all() and (whole[-64:] == GUARD).all() for whole in self.memory)


def memory_stack(**more: Any) -> TierStack:
    return TierStack({"memory": MemoryTier(1 << 24)}, **more)


SIZES = {
    "odd pieces": ([37, 5000, 1], [WHOLE]),
    "one piece of blocks": ([8192], [WHOLE]),
    "two pieces of blocks": ([4096, 4096], [WHOLE]),
    "many pieces of blocks": ([4096] * 6, [WHOLE]),
    "head groups": ([100, 200] * 2, [Shard(0, 3, part, 4) for part in (2, 3)]),
    "head groups of blocks": ([4096] * 4, [Shard(0, 3, part, 2) for part in (0, 1)]),
}


@pytest.mark.parametrize("case", SIZES)
def test_pages_come_back(case: str) -> None:
    sizes, shards = SIZES[case]
    plan = plan_records(sizes, shards, 5)
    assert plan.direct == ("of blocks" in case and "many" not in case)
    stack = memory_stack()
    kept = HashedPages(stack, plan, SPACE, layout_id="test", staging_bytes=20_000)
    names, memory = keys(23), Memory(plan, 23)
    before = memory.images()
    assert kept.exist(names) == [False] * 23
    assert kept.put(names, memory.pages) == [True] * 23
    assert memory.images() == before
    target = Memory(plan, 24)
    was = target.images()
    asked = [*names[:11], *keys(1), *names[11:]]
    assert kept.get(asked, target.pages) == [True] * 11 + [False] + [True] * 12
    got = target.images()
    assert got[:11] + got[12:] == before
    if not plan.direct:
        assert got[11] == was[11]  # a miss touches nothing
    memory.check_guards()
    target.check_guards()
    assert kept.exist(asked) == [True] * 11 + [False] + [True] * 12
    assert kept.forget(names[:2]) == 2 * len(plan.parts)
    assert kept.exist(names[:3]) == [False, False, True]
    stack.close()


def test_a_page_of_which_a_record_is_missing_is_not_there() -> None:
    plan = plan_records([4096, 4096], [WHOLE], 5)
    stack = memory_stack()
    kept = HashedPages(stack, plan, SPACE, layout_id="test")
    names, memory = keys(2), Memory(plan, 2)
    assert kept.put(names, memory.pages) == [True, True]
    stack.tiers["memory"].remove(kept._stored(names)[1:2]).result()
    assert kept.exist(names) == [False, True]
    assert kept.get(names, Memory(plan, 2).pages) == [False, True]
    stack.close()


def test_padding_holds_nothing_of_another_page() -> None:
    plan = plan_records([5000], [WHOLE], 5)
    tier = MemoryTier(1 << 24)
    kept = HashedPages(TierStack({"memory": tier}), plan, SPACE, layout_id="test", staging_bytes=1)
    kept.staging.payloads[:] = 0xEE
    kept.put(keys(1), Memory(plan, 1).pages)
    (record,) = tier._pages.values()
    assert not record[5000:8192].any()
    header = decode(record[8192:])
    assert header.tokens is None and header.layout_id == "test" and header.shard == WHOLE
    tier.close()


def test_other_namespaces_salts_and_shards_are_other_pages() -> None:
    plan = plan_records([64], [WHOLE], 5)
    stack = memory_stack()
    names, memory = keys(1), Memory(plan, 1)
    assert HashedPages(stack, plan, SPACE, layout_id="t", salt=b"a").put(names, memory.pages) == [True]
    other_shard = plan_records([64], [Shard(0, 3, 1, 2)], 5)
    for space, salt, other in (
        (Namespace("n", "float16", "test", 5), b"a", plan),
        (Namespace("m", "bfloat16", "test", 5), b"a", plan),
        (Namespace("m", "float16", "text", 5), b"a", plan),
        (Namespace("m", "float16", "test", 6), b"a", plan),
        (SPACE, b"b", plan),
        (SPACE, b"a", other_shard),
    ):
        assert HashedPages(stack, other, space, layout_id="t", salt=salt).exist(names) == [False]
    assert HashedPages(stack, plan, SPACE, layout_id="t", salt=b"a").exist(names) == [True]
    stack.close()


def test_readers_and_writers_share_a_small_staging_area() -> None:
    plan = plan_records([100], [WHOLE], 5)
    stack = memory_stack()
    kept = HashedPages(stack, plan, SPACE, layout_id="t", staging_bytes=1)
    assert kept.staging.count == 1
    names = [keys(20) for _ in range(4)]
    memories = [Memory(plan, 20) for _ in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            target = Memory(plan, 20)
            done = kept.put(names[number], memories[number].pages) + kept.get(names[number], target.pages)
            if not all(done) or target.images() != memories[number].images():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    stack.close()


def test_bad_calls_touch_nothing() -> None:
    plan = plan_records([100], [WHOLE], 5)
    stack = memory_stack()
    kept = HashedPages(stack, plan, SPACE, layout_id="t")
    memory = Memory(plan, 2)
    for bad in (["xy"], ["ab"], [keys(1)[0][:-2]]):
        with pytest.raises(LayoutError, match="hex"):
            kept.put(bad, memory.pages[:1])
    with pytest.raises(LayoutError, match="one a key, got 2 for 1"):
        kept.get(keys(1), memory.pages)
    with pytest.raises(LayoutError, match="pieces of"):
        kept.get(keys(1), [[memory.pages[0][0][:50]]])
    for sizes, shards in (([], [WHOLE]), ([1, 2, 3], [WHOLE, WHOLE]), ([0], [WHOLE]), ([1, 2], [WHOLE, WHOLE])):
        with pytest.raises(ConfigError, match="pieces"):
            plan_records(sizes, shards, 5)
    stack.close()


# --- tiers one after the other


def test_a_tier_that_fails_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    first, second = MemoryTier(1 << 24, name="a"), MemoryTier(1 << 24, name="b")
    faulty = FaultyTier(first)
    stack = TierStack({"a": faulty, "b": second})
    plan = plan_records([300], [WHOLE], 5)
    kept = HashedPages(stack, plan, SPACE, layout_id="t")
    names, memory = keys(3), Memory(plan, 3)
    assert kept.put(names, memory.pages) == [True] * 3
    second.remove(kept._stored(names[:1])).result()
    faulty.add(Fault("death", call=faulty.calls()))
    target = Memory(plan, 3)
    assert kept.exist(names) == [False, True, True]
    assert kept.get(names, target.pages) == [False, True, True]
    assert target.images()[1:] == memory.images()[1:]
    assert kept.put(more := keys(1), memory.pages[:1]) == [True]
    assert sum("fails" in record.message for record in caplog.records) == 1
    faulty.revive()
    assert kept.exist([*names, *more]) == [True, True, True, True]
    assert set(stack.stats()) == {"a", "b"}
    stack.close()


def test_a_put_goes_where_it_may() -> None:
    stack = TierStack({"a": MemoryTier(1 << 24), "b": MemoryTier(1 << 24)}, put_to=["b"])
    plan = plan_records([300], [WHOLE], 5)
    kept = HashedPages(stack, plan, SPACE, layout_id="t")
    names = keys(2)
    assert kept.put(names, Memory(plan, 2).pages) == [True, True]
    asked = [tier.lookup(kept._stored(names)).result().statuses for tier in stack.tiers.values()]
    assert asked == [(PageStatus.MISS,) * 2, (PageStatus.OK,) * 2]
    stack.close()
    nowhere = TierStack({"a": MemoryTier(1 << 24)}, put_to=[])
    assert HashedPages(nowhere, plan, SPACE, layout_id="t").put(names, Memory(plan, 2).pages) == [False, False]
    nowhere.close()


def test_tiers_of_a_configuration(tmp_path: Path) -> None:
    disk = {"paths": [str(tmp_path / "a")], "cache_gb": 0.02, "file_gb": 0.005}
    config = load_config(arguments={"tiers": {"disk": disk, "memory": {"cache_gb": 0.01}}})
    spec = KVSpec.attention(2, 4, 2, 8, 2)
    tiers = open_lower_tiers(config, spec, bytes(32), place=Place(tp=1), owners=2, share=0.5)
    assert list(tiers) == ["disk", "memory"]
    assert tiers["memory"].stats().capacity_bytes == int(0.01 * 2**30) // 2
    assert 0 < tiers["disk"].stats().capacity_bytes <= int(0.02 * 2**30) // 4
    assert (tmp_path / "a" / bytes(32).hex() / "i0-dp0-pp0-cp0-tp1").is_dir()
    for tier in tiers.values():
        tier.close()
    with pytest.raises(ConfigError, match="at least one below"):
        open_lower_tiers(load_config(), spec, bytes(32), place=Place())
    bad = load_config(arguments={"tiers": {"memory": {"cache_gb": 0.01}, "disk": {**disk, "cache_gb": 1e-9}}})
    with pytest.raises(Exception, match="disk"):
        open_lower_tiers(bad, spec, bytes(32), place=Place())


# --- slots by key


@pytest.fixture
def slots() -> Any:
    host = HostTier(KVSpec.attention(2, 4, 2, 8, 2), capacity_pages=8, device="cpu", pin=False, huge_pages=False)
    now = [100.0]
    made = KeyedSlots(host, protect_s=2.0, clock=lambda: now[0])
    yield made, now
    host.close()


def filled(slots: KeyedSlots, names: list[str]) -> None:
    assert slots.hold(names) == names
    slots.publish(names)
    slots.release(names)


def test_the_last_pages_of_the_oldest_prefix_go_first(slots: Any) -> None:
    book, now = slots
    old, new = keys(4), keys(4)
    filled(book, old)
    filled(book, new)
    assert book.there(old) == [True] * 4  # used, and protected
    assert book.reserve(keys(5)) is None  # only four may go, and none of them for nothing
    assert book.all_ready(old) and book.all_ready(new)
    filled(book, more := keys(2))
    # What is left of the oldest prefix that may go is its beginning.
    assert [book.all_ready([key]) for key in new] == [True, True, False, False]
    now[0] += 3
    filled(book, again := keys(4))
    assert [book.all_ready([key]) for key in old] == [True, True, False, False]
    assert book.all_ready(more) and book.all_ready(again) and not book.all_ready(new[:1])


def test_what_is_held_stays(slots: Any) -> None:
    book, now = slots
    names = keys(8)
    filled(book, names)
    assert book.hold(names[:3]) == []
    assert book.room == 5
    now[0] += 10
    more = keys(6)
    new = book.hold(more)
    assert len(new) == 5 and book.room == 0 and book.all_ready(names[:3])
    assert book.wait_ready(more, 0.0) == more
    book.publish(new)
    assert book.wait_ready(more, 0.0) == more[5:]
    book.release(new)
    book.release(names[:3])
    assert book.room == 8 and len(book) == 8


def test_a_failed_page_is_found_by_nobody_and_its_slot_comes_back(slots: Any) -> None:
    book, _ = slots
    names = keys(3)
    positions, places = book.reserve(names)
    assert positions == [0, 1, 2] and sorted(places.tolist()) == sorted(set(places.tolist()))
    assert book.reserve(names[:2])[0] == []  # on their way: not to be stored twice
    assert book.there(names) == [False] * 3
    book.publish(names[:1])
    book.forget(names[1:])
    assert book.there(names) == [True, False, False]
    book.release(names)
    assert len(book) == 1 and book.room == 8
    book.forget(names[:1])
    assert len(book) == 0 and book.host.free_slots == 8


def test_waiting_ends_with_the_page_or_the_time(slots: Any) -> None:
    book, _ = slots
    names = keys(2)
    book.hold(names)
    assert book.wait_ready(names, 0.01) == names
    done = threading.Timer(0.05, lambda: (book.publish(names[:1]), book.forget(names[1:])))
    done.start()
    assert book.wait_ready(names, 30) == names[1:]
    done.join()
