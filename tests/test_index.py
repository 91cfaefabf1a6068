"""The prefix index: against a brute-force model, its inputs, its locks, its keys, and what it keeps alive."""

from __future__ import annotations

import array
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from index_helpers import Family, check_tree, page_tuples

import kvtransfer.radix
from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import ConfigError, LayoutError, OwnershipError
from kvtransfer.radix import Match, common_pages
from kvtransfer.tiers.keys import Namespace, page_keys
from kvtransfer.tree import ABSENT, pending

ROOT = Path(__file__).resolve().parent.parent


def fresh(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1 << 17, n).astype(np.int32)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_matches_are_those_of_the_model(page_size: int) -> None:
    """The longest common page prefix over all sequences, whatever was split on the way."""
    family = Family(random.Random(page_size), 20 * page_size)
    index, known = PrefixIndex(page_size), set[tuple[int, ...]]()
    for _ in range(400):
        asked = family.draw()
        wanted = sum(prefix in known for prefix in page_tuples(asked, page_size))
        for use in (False, True, False):
            assert index.match(asked, use=use).pages == wanted
        if family.rng.random() < 0.7:
            found = index.insert(asked)
            assert found.pages == found.node.end == len(asked) // page_size
            known |= set(page_tuples(asked, page_size))
        assert index.pages == len(known)
    check_tree(index)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda a: array.array("i", a.tolist()),
        lambda a: array.array("Q", a.tolist()),
        lambda a: a.astype(np.int64),
        lambda a: a.astype(np.uint32),
        lambda a: np.repeat(a, 3)[::3],
        torch.from_numpy,
        lambda a: torch.from_numpy(a).long(),
        lambda a: a.astype(">i4"),
    ],
)
def test_every_form_of_tokens_is_the_same(form: Any) -> None:
    tokens = fresh(67)
    index = PrefixIndex(4)
    index.insert(tokens)
    assert index.match(form(tokens)).pages == 16
    other = PrefixIndex(4)
    other.insert(form(tokens))
    assert other.match(tokens).pages == 16 and other.pages == 16
    assert other.tokens(other.match(tokens), 3) == tokens[12:64].astype("<u4").tobytes()


def test_int32_tokens_are_not_copied_to_be_compared() -> None:
    import tracemalloc

    tokens = fresh(1 << 18)
    index = PrefixIndex(16)
    index.insert(tokens)
    index.match(tokens)
    tracemalloc.start()
    try:
        assert index.match(tokens).pages == tokens.size // 16
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "tokens", [[1, -1], np.array([1, -1], np.int32), [1 << 32], [1.5], np.zeros((2, 2), int), "ab"]
)
def test_bad_tokens_are_refused_and_change_nothing(tokens: Any) -> None:
    index = PrefixIndex(1)
    index.insert([1, 2])
    for call in (index.match, index.insert):
        with pytest.raises(LayoutError, match="tokens: expected"):
            call(tokens)
    assert index.pages == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"page_size": 0}, "at least 1 token, got 0"),
        ({"page_size": 4, "tiers": {"x": "disk"}}, "kinds of slots, keys, shared, got"),
        ({"page_size": 4, "algorithm": "md5"}, "one of sha256, xxh3_128, got 'md5'"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PrefixIndex(**wrong)


@pytest.mark.parametrize("tokens", [[], [5], [5, 6, 7]])
def test_less_than_a_page_is_no_hit_and_leaves_nothing(tokens: list[int]) -> None:
    index = PrefixIndex(4)
    assert index.insert(tokens).pages == 0 and index.match(tokens).pages == 0
    assert not index._roots and not index._names and index.pages == 0


def test_one_token_that_differs_ends_the_hit_at_its_page() -> None:
    tokens = fresh(64)
    for at in range(64):
        index = PrefixIndex(8)
        index.insert(tokens)
        other = tokens.copy()
        other[at] ^= 1
        assert index.match(other).pages == at // 8
        assert index.match(tokens[: at + 1]).pages == (at + 1) // 8
        assert index.match(tokens).pages == 8
        check_tree(index)


def test_probing_changes_nothing() -> None:
    index = PrefixIndex(2, clock=lambda: 7.0)
    node = index.insert(range(20)).node
    before = [getattr(node, name) for name in ("hits", "tick", "last_used", "pages")]
    assert index.match([0, 1, 2, 3, 9], use=False) == Match(node, 2)
    assert [getattr(node, name) for name in ("hits", "tick", "last_used", "pages")] == before
    assert len(list(index.nodes())) == 1


def test_hits_and_times_are_of_the_pages_that_were_matched() -> None:
    now = [1.0]
    index = PrefixIndex(2, clock=lambda: now[0])
    tail = index.insert(range(20), priority=3).node
    now[0] = 2.0
    head = index.match([0, 1, 2, 3, 4, 9]).node
    assert head is tail.parent and (head.start, head.end, tail.start, tail.end) == (0, 2, 2, 10)
    assert (head.hits, head.last_used, tail.hits, tail.last_used) == (1, 2.0, 0, 1.0)
    assert head.tick > tail.tick and head.born == tail.born and head.priority == tail.priority == 3
    assert (head.depth(), tail.depth()) == (1, 2) and tail.top().parent is None
    index.insert(range(20), priority=1)
    assert (head.hits, tail.hits, tail.last_used, tail.priority) == (1, 0, 2.0, 3)


FIELDS = {"model": "m", "kv_dtype": "bfloat16", "spec": "s", "page_size": 4, "adapter": "a", "format_version": 1}
CHANGED = [("adapter", "b"), ("adapter", None), ("kv_dtype", "float8_e4m3"), ("page_size", 8), ("model", "n")]
CHANGED += [("spec", "t"), ("format_version", 2)]


@pytest.mark.parametrize(("field", "value"), CHANGED)
def test_another_namespace_shares_nothing(field: str, value: Any) -> None:
    tokens, index = fresh(64), PrefixIndex(4)
    mine = Namespace(**FIELDS).digest()  # type: ignore[arg-type]
    theirs = Namespace(**{**FIELDS, field: value}).digest()
    found = index.insert(tokens, mine)
    assert index.match(tokens, mine).pages == 16
    assert index.match(tokens, theirs).pages == 0
    assert index.insert(tokens, theirs).node is not found.node
    assert (index.namespace(found.node), index.pages) == (mine, 32)
    index.remove(Match(index.match(tokens, theirs).node, 1))
    assert index.match(tokens, theirs).pages == 0 and index.match(tokens, mine).pages == 16
    check_tree(index)


def test_keys_are_those_of_the_chain_and_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(tokens: Any, *more: Any, **named: Any) -> list[bytes]:
        keys = page_keys(tokens, *more, **named)
        hashed.append(len(keys))
        return keys

    monkeypatch.setattr(kvtransfer.radix, "page_keys", counted)
    for algorithm in ("sha256", "xxh3_128"):
        hashed.clear()
        tokens, index = fresh(200, 1), PrefixIndex(4, algorithm=algorithm)
        index.insert(tokens)
        whole = page_keys(tokens, 4, algorithm=algorithm)
        assert index.keys(index.match(tokens[:80])) == whole[:20]
        assert index.keys(index.match(tokens), 7) == whole[7:]
        other = np.concatenate((tokens[:50], fresh(60, 2)))
        index.insert(other)
        assert index.keys(index.match(other)) == page_keys(other, 4, algorithm=algorithm)
        assert index.keys(index.match(tokens), 49) == whole[49:]
        assert sum(hashed) == 50 + 15  # each page of the tree once, split or not
        check_tree(index)


def test_locks_count_up_to_the_root_and_survive_splits() -> None:
    index = PrefixIndex(1)
    tail = index.insert(range(30)).node
    index.lock(tail)
    index.lock(tail)
    middle = index.match(range(20)).node
    top = index.match(range(10)).node
    index.lock(top)
    assert [node.locks for node in (top, middle, tail)] == [3, 2, 2] and index.locks == 3
    other = index.insert([*range(10), 77]).node
    assert other.locks == 0
    index.remove(Match(other, 11))
    with pytest.raises(OwnershipError, match="pages that nobody holds"):
        index.remove(Match(middle, 15))
    check_tree(index)
    for _ in range(2):
        index.unlock(tail)
    with pytest.raises(OwnershipError, match="unlocked twice"):
        index.unlock(tail)
    index.remove(Match(middle, 15))
    assert index.match(range(30)).pages == 14 and top.locks == 1
    index.unlock(top)
    assert index.locks == 0
    check_tree(index)


def test_a_match_without_pages_can_be_locked() -> None:
    index = PrefixIndex(4)
    nothing = index.match(range(8))
    index.lock(nothing.node)
    index.insert(range(8))
    index.unlock(nothing.node)
    with pytest.raises(OwnershipError, match="unlocked twice"):
        index.unlock(nothing.node)
    assert index.locks == 0


def test_what_tiers_have_follows_pages_through_splits() -> None:
    index = PrefixIndex(1, {"host": "slots", "disk": "keys", "far": "shared"})
    tail = index.insert(range(10)).node
    pages = np.arange(10)
    index.write(tail, "host", pages, 100 + pages)
    index.write(tail, "disk", pages[2:5], np.zeros(3, np.int64))
    index.write(tail, "far", pages[9:], np.zeros(1, np.int64))
    index.write(tail, "host", np.array([3, 7, 8]), np.array([ABSENT, *pending(np.array([7, 8]))]))
    assert index.match([0, 1, 2, 3, 99]).pages == 4
    assert index.match([0, 1, 99]).pages == 2
    found = index.match(range(10))
    assert found.node is tail
    assert index.codes(found, "host").tolist() == [100, 101, 102, -1, 104, 105, 106, -9, -10, 109]
    assert index.codes(found, "disk", 1).tolist() == [-1, 0, 0, 0, -1, -1, -1, -1, -1]
    assert index.codes(Match(found.node, 4), "host", 2).tolist() == [102, -1]
    assert [index.run(found, "host", first) for first in (0, 2, 3, 4, 6, 7, 9, 10)] == [3, 1, 0, 3, 1, 0, 1, 0]
    assert index.run(found, "far", 9) == 1 and index.run(Match(found.node, 2), "host") == 2
    check_tree(index)
    with pytest.raises(LayoutError, match="slots of at most"):
        index.write(tail, "host", pages[:1], np.array([2**31]))
    index.write(tail, "host", pages[:1], np.array([2**31 - 3]))
    index.write(tail, "host", pages[:1], pending(np.array([2**31 - 3])))
    assert pending(index.codes(found, "host"))[0] == 2**31 - 3


def test_the_end_that_no_tier_has_is_forgotten_hints_with_it() -> None:
    index = PrefixIndex(2, {"host": "slots", "far": "shared"})
    tail = index.insert(range(20)).node
    head = index.match(range(8)).node
    index.write(tail, "host", np.arange(6), np.arange(6))
    index.write(tail, "far", np.arange(10), np.zeros(10, np.int64))
    index.keys(index.match(range(20)))
    index.tidy(tail)
    assert index.match(range(20)).pages == index.pages == 6 and (tail.start, tail.end) == (4, 6)
    check_tree(index)
    index.lock(tail)
    index.write(tail, "host", np.arange(6), np.full(6, ABSENT))
    index.tidy(tail)
    assert index.pages == 6
    index.unlock(tail)
    tail.pins = 1
    index.tidy(tail)
    assert index.pages == 6
    tail.pins = 0
    index.tidy(tail)
    assert index.pages == 0 and not index._roots and tail.parent is None and head.parent is None


def test_removing_gives_back_the_slots() -> None:
    index = PrefixIndex(1, {"device": "slots", "host": "slots", "far": "shared"})
    index.insert(range(10))
    other = index.insert([0, 1, 2, 3, 50, 51]).node
    tail = index.match(range(10)).node
    index.write(tail, "host", np.arange(10), np.arange(10))
    index.write(other, "host", np.arange(4, 6), np.array([20, 21]))
    index.write(other, "device", np.arange(2, 5), np.array([7, 8, 9]))
    index.write(tail, "far", np.arange(10), np.zeros(10, np.int64))
    slots = index.remove(Match(other.parent, 3))  # type: ignore[arg-type]
    assert sorted(slots) == ["device", "host"]
    assert sorted(slots["host"].tolist()) == [2, 3, 4, 5, 6, 7, 8, 9, 20, 21]
    assert sorted(slots["device"].tolist()) == [7, 8, 9]
    assert index.pages == 2 and index.match(range(10)).pages == 2
    check_tree(index)
    index.write(index.match(range(2)).node, "host", np.array([1]), pending(np.array([30])))
    with pytest.raises(OwnershipError, match="nobody holds"):
        index.remove(index.match(range(2)))
    assert index.remove(index.match([9])) == {}


def test_a_tier_can_be_added() -> None:
    index = PrefixIndex(1, {"host": "slots"})
    tail = index.insert(range(4)).node
    index.add_tier("disk", "keys")
    index.write(tail, "disk", np.arange(2), np.zeros(2, np.int64))
    assert index.run(index.match(range(4)), "disk") == 2
    index.insert([0, 1, 9])
    check_tree(index)
    index.tidy(tail)
    assert index.match(range(4)).pages == 2
    with pytest.raises(ConfigError, match="a new name"):
        index.add_tier("disk", "keys")


def test_halves_do_not_keep_each_others_memory() -> None:
    """What is left of a long sequence costs what it holds, not what it was cut from."""
    import tracemalloc

    index = PrefixIndex(1, {"host": "slots"})
    tracemalloc.start()
    try:
        for round_ in range(30):
            tokens = fresh(50_000, round_)
            tail = index.insert(tokens).node
            index.write(tail, "host", np.arange(50_000), np.arange(50_000))
            index.match(tokens[:10])
            index.write(tail, "host", np.arange(10, 50_000), np.full(49_990, ABSENT))
            index.tidy(tail)
            del tokens, tail
        assert index.pages == 300
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_common_pages() -> None:
    edge = np.arange(12, dtype="<u4").tobytes()
    for n in range(13):
        other = np.arange(12, dtype="<u4")
        other[n:] += 1
        for page in (1, 2, 3, 5):
            assert common_pages(edge, memoryview(other.tobytes()), 4 * page) == n // page
            assert common_pages(edge, memoryview(other[:n].tobytes()), 4 * page) == n // page


def test_threads() -> None:
    """Four threads that insert, match, lock, and remove what is theirs: nothing is lost, nothing is mixed."""
    index, failures = PrefixIndex(4, {"host": "slots"}), list[BaseException]()

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            shared = np.arange(400, dtype=np.int32)
            for step in range(150):
                own = np.concatenate((shared[: rng.randrange(400)], fresh(40, 1000 * seed + step)))
                found = index.insert(own)
                index.lock(found.node)
                index.write(found.node, "host", np.arange(found.pages), np.full(found.pages, seed))
                again = index.match(own)
                assert again.pages >= own.size // 4 and index.run(again, "host") == again.pages
                index.unlock(found.node)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not failures and index.locks == 0
    check_tree(index)


def test_neither_torch_nor_a_gpu_is_needed() -> None:
    code = (
        "import sys, kvtransfer.index as i; x = i.PrefixIndex(2, {'host': 'slots'}); x.insert([1, 2, 3, 4])\n"
        "print(x.match([1, 2, 3, 4]).pages, [m for m in ('torch', 'triton', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "2 []", done.stderr
