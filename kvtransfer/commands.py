"""Commands: what a `Directory` asks of whoever moves the pages, and what it is told in return.

Plain structures of numbers and bytes, so that the two halves can live in two processes: `encode` and `decode` are
msgpack. Lists of page ids and slots travel as bytes (int64, little-endian); see `ids` and `packed`. Every message
carries the version of this format, and one of another version is refused.

Commands for the same pages never depend on each other while both are under way, so they may run in any order and at
once. A command that moves pages has been dealt with when every position has its status, in one `Ack` or in several, in
any order. A page that has no status yet stays as it is: its slots are not given to anybody.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tiers.base import PageStatus

VERSION = 1
WAITING = 0  # no status yet
CODES: dict[PageStatus, int] = {status: number for number, status in enumerate(PageStatus, 1)}
STATUSES: dict[int, PageStatus] = {number: status for status, number in CODES.items()}
OK = CODES[PageStatus.OK]


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """What pages belong to: the content namespace's digest, and the tenant's salt (both in keys.py)."""

    namespace: bytes = b""
    salt: bytes = b""

    def name(self) -> bytes:
        """Of the index's root: no two scopes have the same."""
        return len(self.namespace).to_bytes(4, "little") + self.namespace + self.salt

    @classmethod
    def parse(cls, name: bytes) -> Scope:
        """The scope of a `name`."""
        stop = 4 + int.from_bytes(name[:4], "little")
        return cls(name[4:stop], name[stop:])


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """``id`` is unique in a directory's life; an `Ack` has that of its command."""

    id: int
    version: int = VERSION


class Store(Message, frozen=True, tag="store"):
    """Copy pages of the device pool into slots of the host tier."""

    pages: bytes
    tier: str
    slots: bytes


class Load(Message, frozen=True, tag="load"):
    """Copy slots of the host tier into pages of the device pool. ``load`` is the number of the load that this is a part
    of (`Job.number`): who waits for its layers knows it by that."""

    tier: str
    slots: bytes
    pages: bytes
    layerwise: bool = False
    load: int = 0


class Promote(Message, frozen=True, tag="promote"):
    """Read pages from a lower tier into slots of the host tier, and compare their tokens.

    keys    page keys (keys.py); with the scope and a shard they make stored keys
    tokens  of these pages, little-endian u32, joined
    within_s  that the tier may take, since another one has the pages too; 0: as long as the mover gives it
    """

    source: str
    tier: str
    slots: bytes
    scope: Scope
    keys: list[bytes]
    tokens: bytes
    within_s: float = 0.0


class Demote(Message, frozen=True, tag="demote"):
    """Write slots of the host tier to a lower tier, sealed with these keys and tokens (as in `Promote`). The slots
    stay as they are."""

    source: str
    slots: bytes
    tier: str
    scope: Scope
    keys: list[bytes]
    tokens: bytes


class Evict(Message, frozen=True, tag="evict"):
    """Remove pages from a tier that is addressed by key."""

    tier: str
    scope: Scope
    keys: list[bytes]


class Lookup(Message, frozen=True, tag="lookup"):
    """Say which pages a tier has: OK or MISS."""

    tier: str
    scope: Scope
    keys: list[bytes]


class Relocate(Message, frozen=True, tag="relocate"):
    """Copy whole records within the host tier, from the slots ``read`` to ``slots``. Loads and demotions may read the
    former meanwhile."""

    tier: str
    read: bytes
    slots: bytes


class Resize(Message, frozen=True, tag="resize"):
    """The host tier's memory is to have the first ``capacity_pages`` slots, no more: no other command is about the
    others. One position: OK once they can be used, and where there were more, once those are given back."""

    tier: str
    capacity_pages: int


class Cancel(Message, frozen=True, tag="cancel"):
    """Begin nothing more of another command. It has no Ack of its own: the other one's says what became of it."""

    command: int


class Ack(Message, frozen=True, tag="ack"):
    """Statuses of positions ``first``, ``first + 1`` ... of a command, a byte each (`CODES`).

    unverified  positions of a load that are OK, but were stored without digests: nobody could compare them
    bad_layers  (position, layer) of digests of a load that differ
    """

    first: int = 0
    statuses: bytes = b""
    detail: str = ""
    unverified: tuple[int, ...] = ()
    bad_layers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, command: Command, statuses: list[PageStatus] | PageStatus, first: int = 0, detail: str = "") -> Ack:
        """The answer to ``command``; a single status stands for all of its positions from ``first`` on."""
        given = [statuses] * (positions(command) - first) if isinstance(statuses, PageStatus) else statuses
        return cls(id=command.id, first=first, statuses=bytes(CODES[s] for s in given), detail=detail)


Command = Store | Load | Promote | Demote | Evict | Lookup | Relocate | Resize | Cancel
AnyMessage = Command | Ack
_M = TypeVar("_M")
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
_VERSION_ONLY = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def positions(command: Command) -> int:
    """How many pages a command is about: as many statuses answer it."""
    if isinstance(command, Cancel | Resize):
        return int(isinstance(command, Resize))
    return len(command.slots) // 8 if isinstance(command, Store | Load | Relocate) else len(command.keys)


def packed(numbers: NDArray[np.int64]) -> bytes:
    """Page ids or slots as they travel."""
    return numbers.astype("<i8", copy=False).tobytes()


def ids(numbers: bytes) -> NDArray[np.int64]:
    """What was `packed`; read-only."""
    return np.frombuffer(numbers, dtype="<i8")


def encode(message: Message) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> AnyMessage:
    """What was encoded. Raises ConfigError on another version, or on what is no message at all."""
    return checked(data, _DECODER)


def checked(data: bytes, decoder: msgspec.msgpack.Decoder[_M]) -> _M:
    """`decode` for a decoder of other messages too."""
    try:
        version = msgspec.msgpack.decode(_VERSION_ONLY.decode(data).get("version", msgspec.Raw(b"\xc0")))
        message = decoder.decode(data) if version == VERSION else None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"message: expected a command or an answer, got {len(data)} other bytes: {error}") from error
    if message is None:
        raise ConfigError(f"message: expected version {VERSION}, got {version!r}; run one release on both sides")
    return message
