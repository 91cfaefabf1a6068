"""Commands and answers as they travel."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvtransfer.commands import (
    CODES,
    STATUSES,
    VERSION,
    Ack,
    AnyMessage,
    Cancel,
    Demote,
    Evict,
    Load,
    Lookup,
    Promote,
    Relocate,
    Resize,
    Scope,
    Store,
    decode,
    encode,
    ids,
    packed,
    positions,
)
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tiers.base import PageStatus

SLOTS = np.array([0, 7, 2**40, 3])
SCOPE = Scope(b"n" * 32, b"salt")
KEYS = [bytes([n]) * 32 for n in range(4)]
MESSAGES: list[AnyMessage] = [
    Store(id=1, pages=packed(SLOTS), tier="host", slots=packed(SLOTS)),
    Load(id=2, tier="host", slots=packed(SLOTS), pages=packed(SLOTS), layerwise=True),
    Promote(id=3, source="disk", tier="host", slots=packed(SLOTS), scope=SCOPE, keys=KEYS, tokens=b"\0" * 64),
    Demote(id=4, source="host", slots=packed(SLOTS), tier="disk", scope=SCOPE, keys=KEYS, tokens=b"\1" * 64),
    Evict(id=5, tier="disk", scope=Scope(), keys=KEYS),
    Lookup(id=6, tier="far", scope=SCOPE, keys=KEYS),
    Cancel(id=7, command=3),
    Relocate(id=8, tier="host", read=packed(SLOTS), slots=packed(SLOTS + 1)),
    Resize(id=9, tier="host", capacity_pages=2**40),
    Ack(id=2**40, first=3, statuses=b"\1\2", detail="the disk said no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_come_back_as_they_were(message: AnyMessage) -> None:
    back = decode(encode(message))
    assert back == message and type(back) is type(message) and back.version == VERSION
    if not isinstance(message, Ack):
        assert positions(message) == {Cancel: 0, Resize: 1}.get(type(message), 4)


def test_ids() -> None:
    assert ids(packed(SLOTS)).tolist() == SLOTS.tolist()
    assert ids(packed(SLOTS.astype(">i8"))).tolist() == SLOTS.tolist()
    assert ids(packed(SLOTS[::2])).tolist() == [0, 2**40]


def test_every_status_has_a_code_and_none_is_that_of_waiting() -> None:
    assert set(CODES) == set(PageStatus) and 0 not in STATUSES and len(STATUSES) == len(PageStatus)
    store = MESSAGES[0]
    assert isinstance(store, Store)
    assert Ack.of(store, PageStatus.MISS, first=1).statuses == bytes([CODES[PageStatus.MISS]] * 3)
    assert Ack.of(store, [PageStatus.OK, PageStatus.ERROR]).statuses == bytes(
        [CODES[PageStatus.OK], CODES[PageStatus.ERROR]]
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "got 0 other bytes"),
        (b"\xc1\xc1", "other bytes"),
        (msgspec.msgpack.encode([1, 2]), "other bytes"),
        (msgspec.msgpack.encode({"op": "ack", "id": 1}), "expected version 1, got None"),
        (msgspec.msgpack.encode({"op": "ack", "id": 1, "version": 2}), "expected version 1, got 2"),
        (msgspec.msgpack.encode({"op": "format", "id": 1, "version": 1}), "other bytes"),
        (msgspec.msgpack.encode({"op": "store", "id": 1, "version": 1}), "other bytes"),
        (encode(MESSAGES[0])[:-1], "other bytes"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=f"message: expected.*{says.removeprefix('expected ')}"):
        decode(data)


def test_scopes_have_names_of_their_own() -> None:
    """Where one field ends and the next begins is part of the name."""
    scopes = [Scope(a, b) for a in (b"", b"x", b"xy") for b in (b"", b"y", b"yx", b"\0\0\0\0")]
    assert len({scope.name() for scope in scopes}) == len(scopes)
    assert [Scope.parse(scope.name()) for scope in scopes] == scopes
