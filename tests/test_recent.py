"""Prefixes that were used last: which they are, their file and what may be wrong with it, and files of token lists."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import recent
from kvtransfer.commands import Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer
from kvtransfer.recent import RecentPrefix, last_used, read_recent, warm_file, write_recent

ONE, OTHER = Scope(b"n" * 32, b"a secret of one tenant"), Scope(b"n" * 32, b"another's")


class Told(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def noted(self, what: str, **fields: Any) -> None:
        assert what == "recent.ignored"
        self.messages.append(fields["message"])


def lists(prefixes: list[RecentPrefix]) -> list[list[int]]:
    return [prefix.token_ids().tolist() for prefix in prefixes]


def use(index: PrefixIndex, tokens: list[int], scope: Scope = ONE) -> None:
    index.insert(tokens, scope.name())


def test_the_last_used_come_first_and_only_whole_pages_of_the_longest() -> None:
    index = PrefixIndex(2)
    use(index, [1, 2, 3, 4, 5])
    use(index, [7, 8])
    use(index, [1, 2, 9, 9], OTHER)
    use(index, [1, 2, 3, 4, 5, 6, 7, 8])  # goes on where the first ended
    assert lists(last_used(index, 10)) == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9], [7, 8]]
    assert [prefix.belongs_to(ONE) for prefix in last_used(index, 10)] == [True, False, True]
    assert lists(last_used(index, 2)) == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9]]
    index.match([1, 2, 3, 4], ONE.name())  # a use that ended inside
    assert lists(last_used(index, 1)) == [[1, 2, 3, 4]]
    assert lists(last_used(index, 2)) == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9]]
    assert last_used(PrefixIndex(3), 5) == [] and last_used(index, 0) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.randoms(use_true_random=False), count=st.integers(1, 12))
def test_same_as_a_list_of_uses(seed: random.Random, count: int) -> None:
    """Against all uses in order: walked from the last one on, what another one so far continues adds nothing."""
    index = PrefixIndex(1)
    uses: list[tuple[int, ...]] = []
    for _ in range(seed.randint(1, 25)):
        tokens = tuple(seed.randint(0, 1) for _ in range(seed.randint(1, 6)))
        use(index, list(tokens))
        uses.append(tokens)
    want: list[tuple[int, ...]] = []
    for tokens in dict.fromkeys(reversed(uses)):
        if len(want) == count:
            break
        if not any(one[: len(tokens)] == tokens for one in want):
            want = [one for one in want if tokens[: len(one)] != one] + [tokens]
    assert [tuple(one) for one in lists(last_used(index, count))] == want


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "recent"
    told = Told()
    assert read_recent(file, told) == [] and not told.messages
    prefixes = [RecentPrefix.of(ONE, np.arange(n, dtype="<u4").tobytes()) for n in (5, 0, 70_000)]
    assert write_recent(file, prefixes) == 3
    assert read_recent(file, told) == prefixes and not told.messages
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["recent"]
    assert write_recent(file, iter([])) == 0 and read_recent(file) == []
    for secret in (ONE.salt, OTHER.salt):
        write_recent(file, [RecentPrefix.of(scope, b"\1\0\0\0") for scope in (ONE, OTHER, Scope())])
        assert secret not in file.read_bytes()
    mine = [p for p in read_recent(file) if p.belongs_to(OTHER)]
    assert len(mine) == 1
    assert not any(p.belongs_to(Scope(b"m" * 32, ONE.salt)) for p in read_recent(file))


@pytest.mark.parametrize("most_bytes", [0, 28, 4_000, 4_200, 8_300, 1 << 20])
def test_a_file_is_no_larger_than_it_may_be(tmp_path: Path, most_bytes: int) -> None:
    prefixes = [RecentPrefix.of(ONE, np.arange(n, n + 1000, dtype="<u4").tobytes()) for n in range(7)]
    kept = write_recent(tmp_path / "recent", prefixes, most_bytes=most_bytes)
    assert read_recent(tmp_path / "recent") == prefixes[:kept]
    size = (tmp_path / "recent").stat().st_size
    assert size <= max(most_bytes, 33) and kept == min(7, max(0, (most_bytes - 33) // 4096))


def test_damaged_and_foreign_files_are_ignored_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "recent"
    write_recent(file, [RecentPrefix.of(ONE, b"\1\0\0\0" * 9)])
    good = file.read_bytes()
    head = recent._HEAD.size

    def packed(body: bytes, version: int = 1) -> bytes:
        return recent._HEAD.pack(b"KVRECENT", version, len(body), xxhash.xxh3_64_intdigest(body)) + body

    flipped = bytearray(good)
    flipped[head + 20] ^= 4
    for bad, says in [
        (b"", "got 0 other bytes"),
        (good[: head - 1], "other bytes"),
        (b"SQLite format 3\0" * 20, "expected a file of recent prefixes"),
        (good[:-1], "torn?"),
        (good + b"\0", "torn?"),
        (bytes(flipped), "torn?"),
        (packed(good[head:], version=2), "expected version 1, got 2"),
        (packed(b"\xc1"), "expected prefixes"),
        (packed(msgspec.msgpack.encode([[b"n", b"t", "text"]])), "expected prefixes"),
        (packed(msgspec.msgpack.encode([[b"n", b"t", b"\1\0\0"]])), "got a rest"),
    ]:
        file.write_bytes(bad)
        told = Told()
        assert read_recent(file, told) == []
        assert len(told.messages) == 1 and says in told.messages[0] and str(file) in told.messages[0]
    told = Told()
    assert read_recent(tmp_path, told) == [] and "directory" in told.messages[0]
    for length in range(len(good)):  # torn anywhere
        file.write_bytes(good[:length])
        assert read_recent(file) == []


def test_writing_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recent"
    old, new = [RecentPrefix.of(ONE, b"\1\0\0\0")], [RecentPrefix.of(ONE, b"\2\0\0\0")]
    write_recent(file, old)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", full)
        write_recent(file, new)
    assert read_recent(file) == old
    write_recent(file, new)  # over the draft that was left
    assert read_recent(file) == new and sorted(os.listdir(tmp_path)) == ["recent"]


@pytest.mark.parametrize("name", ["warm.jsonl", "warm.jsonl.gz"])
def test_warm_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    want = [[1, 2, 3], [], [2**32 - 1, 0], list(range(50_000))]
    text = "\n".join(json.dumps(one) for one in want[:2]) + "\n\n  \n" + "\n".join(json.dumps(o) for o in want[2:])
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    got = list(warm_file(file))
    assert [one.tolist() for one in got] == want and all(one.dtype == np.uint32 for one in got)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1, 2", "truncated"),
        ("[1, -2]", r"`int` >= 0 - at `\$\[1\]`"),
        ("[4294967296]", "<= 4294967295"),
        ("[1.5]", "got `float`"),
        ("[true]", "got `bool`"),
        ('{"tokens": [1]}', "expected a list of token ids .*got `object`"),
        ('"hello"', "got `str`"),
        ("[1] [2]", "trailing characters"),
        ("\udce9", "malformed"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_bytes(b"[1]\n\n" + line.encode(errors="surrogateescape") + b"\n[2]\n")
    lines = warm_file(file)
    assert next(lines).tolist() == [1]
    with pytest.raises(ConfigError, match=rf"warm\.jsonl, line 3: .*{says}"):
        next(lines)


def test_warm_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a readable file of token lists, got .*No such file"):
        next(warm_file(tmp_path / "none.jsonl"))
    whole = gzip.compress(b"".join(b"[%d]\n" % n for n in range(100_000)))
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"torn\.jsonl\.gz, behind line \d+: "):
        for n, one in zip(itertools.count(), warm_file(torn), strict=False):
            assert one.tolist() == [n]
    plain = tmp_path / "plain.gz"
    plain.write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match="gzipped"):
        next(warm_file(plain))
