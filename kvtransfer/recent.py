"""Recent prefixes: which token sequences were used last, kept in a file so that a restart can fetch them again; and the
reader of a file of token lists that says what to fetch at a start.

The file of recent prefixes lies beside the disk tier's journal, whose pages it is about. It holds tokens in clear, as
their records do, and is readable for its owner alone. Of a tenant's salt it holds a keyed digest: who knows the salt
finds his prefixes, who does not learns nothing of it.
"""

from __future__ import annotations

import gzip
import hmac
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from kvtransfer.commands import Scope
from kvtransfer.index import PrefixIndex
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.radix import Match
from kvtransfer.tree import Node

FILE_NAME = "recent"
_HEAD = struct.Struct("<8sIQQ")  # magic, version, length and xxh3 of what follows
_MAGIC, _VERSION = b"KVRECENT", 1
_TAG = b"kvtransfer: recent prefixes of"


class RecentPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of whole pages, and whose it is.

    namespace  of its scope
    tenant     HMAC-SHA256 of the namespace, keyed by the scope's salt
    tokens     little-endian u32, joined
    """

    namespace: bytes
    tenant: bytes
    tokens: bytes

    @classmethod
    def of(cls, scope: Scope, tokens: bytes) -> RecentPrefix:
        """These tokens, of this scope."""
        return cls(scope.namespace, _tenant(scope), tokens)

    def belongs_to(self, scope: Scope) -> bool:
        """Whether it was used in ``scope``."""
        return self.namespace == scope.namespace and hmac.compare_digest(self.tenant, _tenant(scope))

    def token_ids(self) -> NDArray[np.uint32]:
        """The tokens; read-only."""
        return np.frombuffer(self.tokens, dtype="<u4")


def last_used(index: PrefixIndex, count: int) -> list[RecentPrefix]:
    """The ``count`` prefixes of an index that were used last, the last one first, without those that another continues.

    Costs one walk over the nodes of the tree, and the tokens' copy; others may use the index meanwhile.
    """
    with index.mutex:
        ends = [node for node in index.nodes() if all(child.tick < node.tick for child in node.children.values())]
        ends.sort(key=lambda node: -node.tick)
        chosen: dict[Node, bytes] = {}
        for node in ends:
            if len(chosen) >= count:
                break
            for above in index.path(node)[:-1]:
                chosen.pop(above, None)
            chosen[node] = index.namespace(node)
    found = []
    for node, name in chosen.items():
        with index.mutex:  # it may have been given up or cut since
            tokens = index.tokens(Match(node, node.end))
        if tokens:
            found.append(RecentPrefix.of(Scope.parse(name), tokens))
    return found


def write_recent(file: Path | str, prefixes: Iterable[RecentPrefix], *, most_bytes: int = 64 << 20) -> int:
    """Replace ``file`` by these, in this order, as far as they fit ``most_bytes``. How many that were.

    Written beside it and renamed: whatever happens, a reader finds the old file or the new one. Raises OSError.
    """
    file = Path(file)
    kept, size = [], _HEAD.size + 5
    for prefix in prefixes:
        size += len(prefix.tokens) + len(prefix.namespace) + len(prefix.tenant) + 16  # msgpack's heads, at most
        if size > most_bytes:
            break
        kept.append(prefix)
    data = msgspec.msgpack.encode(kept)
    draft = file.with_name(file.name + ".draft")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as out:
        os.fchmod(fd, 0o600)
        out.write(_HEAD.pack(_MAGIC, _VERSION, len(data), xxhash.xxh3_64_intdigest(data)))
        out.write(data)
        out.flush()
        os.fsync(fd)
    os.replace(draft, file)
    return len(kept)


def read_recent(file: Path | str, observer: Observer = NO_OBSERVER) -> list[RecentPrefix]:
    """What was written, the last used first. A file that is not there is an empty one; so is one that is damaged, of
    another version or no such file at all, and ``observer`` is told why ("recent.ignored")."""
    try:
        data = Path(file).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        observer.noted("recent.ignored", file=str(file), message=f"{file}: {error}")
        return []
    try:
        return _decode(data)
    except ConfigError as error:
        observer.noted("recent.ignored", file=str(file), message=f"{file}: {error}")
        return []


def warm_file(file: Path | str) -> Iterator[NDArray[np.uint32]]:
    """Token sequences of a file: JSON, one list of token ids a line, gzipped if its name ends in .gz. Blank lines are
    left out. Read line by line.

    Raises ConfigError, naming the line, on anything else, and on a file that can't be read.
    """
    path, number = Path(file), 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                if line.strip():
                    yield np.array(_LINE.decode(line), dtype=np.uint32)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = line[:40].decode(errors="replace").strip()
        raise ConfigError(
            f"{path}, line {number}: expected a list of token ids in 0..{2**32 - 1}, got {shown!r}: {error}"
        ) from error
    except (OSError, EOFError) as error:  # of gzip too
        where = f"{path}, behind line {number}" if number else str(path)
        raise ConfigError(f"{where}: expected a readable file of token lists, got {error}") from error


_LINE = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=2**32 - 1)]])
_PREFIXES = msgspec.msgpack.Decoder(list[RecentPrefix])


def _decode(data: bytes) -> list[RecentPrefix]:
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ConfigError(f"expected a file of recent prefixes, got {len(data)} other bytes")
    _, version, length, checksum = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if version != _VERSION:
        raise ConfigError(f"expected version {_VERSION}, got {version}")
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise ConfigError(f"expected {length} bytes with checksum {checksum:016x}, got {len(body)} others (torn?)")
    try:
        prefixes = _PREFIXES.decode(body)
    except msgspec.DecodeError as error:
        raise ConfigError(f"expected prefixes, got {error}") from error
    if any(len(prefix.tokens) % 4 for prefix in prefixes):
        raise ConfigError("expected tokens of 4 bytes each, got a rest")
    return prefixes


def _tenant(scope: Scope) -> bytes:
    return hmac.digest(scope.salt, _TAG + scope.namespace, "sha256")
