"""Page keys, namespaces, shards and stored keys."""

from __future__ import annotations

import array
import hashlib
import hmac
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_key, stored_keys, token_bytes

SPEC = KVSpec.attention(num_layers=3, page_size=5, kv_heads=2, head_dim=9, itemsize=2)
SPACE = Namespace.of(SPEC, model="model@r1", kv_dtype="bfloat16", adapter="lora-a")


def test_page_keys_golden() -> None:
    keys = page_keys([1, 2, 3, 4, 5, 6, 7], 3)
    assert [k.hex() for k in keys] == [
        "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d",
        "b33a1d453499d2f2cc40ae1c3579a476f2576432f8dcb7d4c235aa946a68d4bf",
    ]


def test_page_keys_are_the_chain_of_sha256_over_u32() -> None:
    tokens = [0, 1, 65_536, 2**32 - 1, 151_643, 7, 9]
    expected, parent = [], b""
    for start in (0, 3):
        parent = hashlib.sha256(parent + b"".join(struct.pack("<I", t) for t in tokens[start : start + 3])).digest()
        expected.append(parent)
    assert page_keys(tokens, 3) == expected
    assert page_keys(tokens[3:], 3, parent=expected[0]) == expected[1:]
    assert page_keys(tokens, 3, parent=b"") == expected


def test_xxh3_is_chosen_explicitly() -> None:
    first = xxhash.xxh3_128(struct.pack("<2I", 5, 6)).digest()
    second = xxhash.xxh3_128(first + struct.pack("<2I", 7, 8)).digest()
    assert page_keys([5, 6, 7, 8], 2, algorithm="xxh3_128") == [first, second]
    assert page_keys([7, 8], 2, first, algorithm="xxh3_128") == [second]


@pytest.mark.parametrize(
    "tokens",
    [
        (3, 70_000, 5),
        range(3, 3 + 3 * 70_000, 70_000),
        array.array("I", [3, 70_000, 5]),
        array.array("q", [3, 70_000, 5]),
        np.array([3, 70_000, 5], dtype=np.uint32),
        np.array([3, 70_000, 5], dtype=">i8"),
        np.array([3, 0, 70_000, 0, 5, 0], dtype=np.int32)[::2],
        [np.int64(3), np.int32(70_000), 5],
        torch.tensor([3, 70_000, 5]),
        torch.tensor([3, 70_000, 5], dtype=torch.int32),
        torch.tensor([3, 9, 70_000, 9, 5, 9])[::2],
    ],
    ids=lambda t: type(t).__name__,
)
def test_every_kind_of_token_input_gives_the_same_bytes(tokens: Any) -> None:
    expected = struct.pack("<3I", *(int(t) for t in tokens))
    assert bytes(token_bytes(tokens)) == expected
    assert page_keys(tokens, 3) == [hashlib.sha256(expected).digest()]


@pytest.mark.parametrize("tokens", [None, [], (), range(0), np.empty(0), np.empty(0, np.int64), torch.tensor([])])
def test_no_tokens_no_keys(tokens: Any) -> None:
    assert page_keys(tokens, 1) == []
    assert page_keys(tokens, 16, parent=b"p" * 32) == []


def test_a_rest_has_no_key() -> None:
    assert page_keys([1, 2, 3], 4) == []
    assert len(page_keys([1, 2, 3, 4], 4)) == 1
    assert page_keys(range(11), 4) == page_keys(range(8), 4)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -2, 3], "-2 at position 1"),
        ([1, 2, 2**32], "4294967296 at position 2"),
        (np.array([1, -1], dtype=np.int8), "-1 at position 1"),
        (np.array([2**40], dtype=np.uint64), "at position 0"),
        ([2**70], "dtype object"),
        ([1.0, 2.0], "dtype float64"),
        (["1"], "integers"),
        ([None], "integers"),
        ("12", "one dimension"),
        (7, "one dimension"),
        ([[1, 2]], "one dimension"),
        ([[1], [2, 3]], "flat sequence"),
        (np.array([True, False]), "dtype bool"),
        (np.zeros((2, 2), np.int64), "one dimension"),
        (torch.zeros(3), "float32"),
        (torch.zeros(3, dtype=torch.bool), "bool"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "on the CPU"),
        ((t for t in [1, 2]), "one dimension"),
    ],
)
def test_bad_tokens_are_refused(tokens: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        page_keys(tokens, 1)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        page_keys([1], 0)
    with pytest.raises(ConfigError, match="md5"):
        page_keys([1], 1, algorithm="md5")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 16 bytes"):
        page_keys([1], 1, parent=b"x" * 16)
    with pytest.raises(ConfigError, match="got 32 bytes"):
        page_keys([1], 1, parent=b"x" * 32, algorithm="xxh3_128")
    with pytest.raises(ConfigError, match="got str"):
        page_keys([1], 1, parent="ab")  # type: ignore[arg-type]


def test_namespace_digest_golden_and_independent() -> None:
    hasher = hashlib.sha256(b"kvtransfer content namespace\0")
    for tag, value in [
        ("model", "model@r1"),
        ("kv_dtype", "bfloat16"),
        ("spec", "page=5;3x[k:2x18,v:2x18]"),
        ("page_size", "5"),
        ("adapter", "lora-a"),
        ("format_version", "1"),
    ]:
        hasher.update(struct.pack("<II", len(tag), len(value)) + tag.encode() + value.encode())
    assert SPACE.digest() == hasher.digest()
    assert SPACE.digest().hex() == "4817d58bf82340cf231888a38e793fc4bff553299a011d6f04f690ffaf828c00"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "model@r2"},
        {"kv_dtype": "float8_e4m3"},
        {"page_size": 4},
        {"spec": KVSpec.attention(3, 5, 2, 8, 2).canonical()},
        {"spec": KVSpec.attention(4, 5, 2, 9, 2).canonical()},
        {"spec": KVSpec.uniform(3, 5, [Component("k", 2, 18), Component("v", 2, 18, per_page=True)]).canonical()},
        {"adapter": "lora-b"},
        {"adapter": None},
        {"adapter": ""},
        {"format_version": 2},
        {"model": "model@r1bfloat16", "kv_dtype": ""},  # fields don't run into each other
    ],
    ids=str,
)
def test_every_field_of_the_namespace_changes_the_key(change: dict[str, Any]) -> None:
    other = replace(SPACE, **change)
    assert other.digest() != SPACE.digest()
    page, shard = page_keys([1, 2, 3, 4, 5], 5)[0], Shard.whole(SPEC)
    assert stored_key(b"salt", other.digest(), page, shard) != stored_key(b"salt", SPACE.digest(), page, shard)


def test_absent_and_empty_adapter_differ() -> None:
    assert replace(SPACE, adapter=None).digest() != replace(SPACE, adapter="").digest()


@pytest.mark.parametrize(
    "change",
    [
        {"layer_start": 1},
        {"layer_stop": 2},
        {"head_part": 1},
        {"head_parts": 4},
        {"context_part": 1},
        {"context_parts": 3},
    ],
    ids=str,
)
def test_every_field_of_the_shard_changes_the_key(change: dict[str, Any]) -> None:
    shard = Shard(0, 3, 0, 2, 0, 2)
    page = page_keys([1, 2, 3, 4, 5], 5)[0]
    assert stored_key(b"", SPACE.digest(), page, replace(shard, **change)) != stored_key(
        b"", SPACE.digest(), page, shard
    )


@pytest.mark.parametrize("values", [(1, 1), (2, 1), (-1, 3), (0, 3, 2, 2), (0, 3, 0, 0), (0, 3, 0, 1, -1, 1)])
def test_impossible_shards_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="shard"):
        Shard(*values)


def test_stored_key_golden_and_independent() -> None:
    page, shard = page_keys([1, 2, 3, 4, 5], 5)[0], Shard(0, 3, 1, 4)
    body = SPACE.digest() + page + struct.pack("<6I", 0, 3, 1, 4, 0, 1)
    got = stored_key(b"tenant", SPACE.digest(), page, shard)
    assert got == hmac.new(b"tenant", body, hashlib.sha256).digest()
    assert got.hex() == "deb2e0f75d9290dc0a77e4f1f2d12d1e7781d6448a4c79067c628e09bc70cc50"


def test_salt_and_tokens_change_the_stored_key() -> None:
    whole = Shard.whole(SPEC)
    pages = page_keys(range(10), 5)
    made = {stored_key(salt, SPACE.digest(), page, whole) for salt in (b"", b"x", b"y", b"x" * 100) for page in pages}
    assert len(made) == 8
    assert stored_keys(b"x", SPACE.digest(), pages, whole) == [
        stored_key(b"x", SPACE.digest(), p, whole) for p in pages
    ]
    assert stored_keys(b"x", SPACE.digest(), [], whole) == []


def test_stored_key_refuses_wrong_widths() -> None:
    page, whole = page_keys([1, 2, 3, 4, 5], 5)[0], Shard.whole(SPEC)
    with pytest.raises(ConfigError, match="salt"):
        stored_key("x", SPACE.digest(), page, whole)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="namespace"):
        stored_key(b"", b"short", page, whole)
    with pytest.raises(ConfigError, match="page key"):
        stored_key(b"", SPACE.digest(), page[:-1], whole)
    short = page_keys([1, 2, 3, 4, 5], 5, algorithm="xxh3_128")[0]
    assert len(stored_key(b"", SPACE.digest(), short, whole)) == 32


def test_another_tenant_adapter_or_revision_finds_nothing() -> None:
    """Four pages stored under (adapter A, salt x): only the same pair finds them."""

    def keys(adapter: str | None, salt: bytes) -> list[bytes]:
        return stored_keys(salt, replace(SPACE, adapter=adapter).digest(), page_keys(range(20), 5), Shard.whole(SPEC))

    store = set(keys("A", b"x"))
    assert [k in store for k in keys("A", b"x")] == [True] * 4
    for adapter, salt in [("B", b"x"), ("A", b"y"), (None, b"")]:
        assert not store.intersection(keys(adapter, salt))
