"""RespSocket: GET and SET of many pages over one socket of a Redis or Valkey server, without a copy on the way.

Values are received straight into the pages' buffers and sent straight from them, a payload and its trailer as one
scatter/gather list. Everything else about a server (connecting, authentication, TLS, other commands) is the client
library's. Protocol: RESP2; both commands' shortest replies, ``$-1`` and ``+OK``, are 5 bytes long.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import UnavailableError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.resp_native import Asking, Got, NativeWire

SHORTEST_REPLY_BYTES = 5
_IOV_MAX = 1024  # Linux's limit for one sendmsg
_SCRATCH_BYTES = 1 << 16
# Further ahead is slower: the server makes all answers before anybody reads the first, and they have left the cache by
# then. Of a bare client's speed, 64 KiB and 1 MiB: 70 % and 145 % with 8 MiB ahead, 75 to 90 % and 160 to 260 % with
# 1.5 MiB (two pages at least).
_WINDOW_PAGES, _WINDOW_BYTES = 64, 3 << 19
# Read in one go; each page is checked at once, in the core's cache. Python costs some 0.2 ms a go, however short it is:
# the pages have driven it out of the cache. Over a slow link the time ends it: whoever watches must hear of pages as
# they come, and `stop` be asked.
_BURST_PAGES, _BURST_BYTES, _BURST_NS = 128, 8 << 20, 50_000_000
# Of SETs that are sent in one go, twice as much being under way: as many as are answered within some 50 ms.
_LEAST_GROUP_BYTES, _MOST_GROUP_BYTES, _GROUP_S = 256 << 10, 16 << 20, 0.05
_REPLIES = 16  # of SETs that are waited for together


class RespError(Exception):
    """The server refused one command. ``code`` is the first word of its answer ("OOM", "LOADING", "ERR" ...)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


Answer = Got | int | RespError


class RespSocket:
    """One socket, connected and authenticated, that nobody else uses. Not thread-safe but for `shut`.

    ``timeout_s`` bounds each wait for the server; one that sends a little now and then is stopped by `shut` alone
    (``was_shut``). ``in_step`` says whether every reply that was asked for has been read: a socket that is not must be
    closed. The generators raise UnavailableError where the server is gone or late.
    ``native`` moves records; None: Python does, which takes several times the CPU beside the copies themselves.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, *, native: NativeWire | None = None) -> None:
        self._sock = sock
        self._vectored = not isinstance(sock, ssl.SSLSocket)  # TLS has no scatter/gather
        self._native = native if self._vectored else None
        self._ahead = b""  # read already, and of the next answer
        self._group_bytes = _LEAST_GROUP_BYTES
        self.in_step = True
        self.was_shut = False
        if self._vectored:
            # The kernel waits for whole pages, with the GIL released once a page, and keeps the time.
            sock.setblocking(True)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            sock.settimeout(timeout_s)

    def fetch(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[RecordBuffer],
        stop: Callable[[], bool] = lambda: False,
        *,
        stored_keys: Sequence[bytes] = (),
        parts: Parts | None = None,
    ) -> Iterator[list[Answer]]:
        """GET each key into its buffer. Yields, some at a time, for each: `Got`; the value's length, where that is not
        the buffer's (it is undefined then); or the server's error. ``stored_keys``: of the records; where they are
        told, C checks them on the way. ``parts``: of ``buffers``, if they are known.

        Keys are asked for in a window that moves with the answers, so that the server always has some to answer. They
        are read in bursts, and yielded while more are under way: what the caller does with them costs no time then.
        Once ``stop`` is true nothing more is asked for: the iteration ends early.
        """
        window, burst = _window_and_burst(buffers)
        commands = _gets(keys)
        asking = Asking(commands, window)
        where = Parts.of(buffers) if parts is None and self._native is not None else parts
        read = 0
        while True:
            if stop():
                asking.limit = asking.asked
            if read == asking.limit:
                return
            places, answers = range(read, min(read + burst, asking.limit)), list[Answer]()
            until_ns = time.monotonic_ns() + _BURST_NS
            self.in_step = False
            try:
                if self._native is not None and where is not None:
                    self._fetch_natively(self._native, asking, places, until_ns, stored_keys, where, buffers, answers)
                else:
                    self._fetch(asking, commands, places, until_ns, buffers, answers)
            except UnavailableError:
                if answers:
                    yield answers  # these came
                raise
            read += len(answers)
            self.in_step = read == asking.asked
            yield answers

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[RecordBuffer],
        options: Sequence[bytes],
        *,
        parts: Parts | None = None,
    ) -> Iterator[list[bool | RespError]]:
        """SET each key from its buffer with ``options`` (NX ...). Yields, some at a time, for each: whether it was set,
        or an error. ``parts``: of ``buffers``, if they are known.

        Records go in groups, and a group's answers are read behind the next one: the server always has some to store,
        and is heard of often, however slow the network is.
        """
        sizes = [payload.size + trailer.size for payload, trailer in buffers]
        most = max(sizes, default=1)
        if self._native is not None and parts is None:
            parts = Parts.of(buffers)
        commands = _sets(keys, sizes, options)
        sent, began, answered = range(0), 0.0, 0
        while answered < len(keys):
            due, due_began, began = sent, began, time.monotonic()
            sent = range(sent.stop, min(sent.stop + max(1, self._group_bytes // most), len(keys)))
            if sent:
                self._send_records(commands, sent, buffers, parts)
            while answered < due.stop:
                answers: list[bool | RespError] = []
                try:
                    self._read_stored(min(due.stop - answered, _REPLIES), answers)
                except UnavailableError:
                    if answers:
                        yield answers  # these came
                    raise
                answered += len(answers)
                self.in_step = answered == sent.stop
                yield answers
            if due:
                slow = time.monotonic() - due_began > _GROUP_S
                fitting = self._group_bytes // 2 if slow else self._group_bytes * 2
                self._group_bytes = min(max(fitting, 1), _MOST_GROUP_BYTES)

    def shut(self) -> None:
        """Make whoever waits on the socket stop waiting, from any thread. The socket is of no more use."""
        self.was_shut = True
        shut(self._sock)

    # --- inside

    def _send_records(
        self, commands: _Sets, places: range, buffers: Sequence[RecordBuffer], parts: Parts | None
    ) -> None:
        """Send the SETs of ``places``."""
        texts = commands.texts[places.start : places.stop]
        texts = [texts[0], *[commands.tail + text for text in texts[1:]], commands.tail]
        if self._native is None or parts is None:
            records = [part for at, text in zip(places, texts, strict=False) for part in (text, *buffers[at])]
            self._begin([*records, commands.tail])
            return
        self.in_step = False
        try:
            self._native.send(self._sock.fileno(), texts, parts.only(places))
        except OSError as error:
            raise _broken(error) from error

    def _begin(self, parts: list[Any]) -> None:
        self.in_step = False
        try:
            if self._vectored:
                self._send(parts)
            else:
                for part in parts:
                    self._sock.sendall(part)
        except OSError as error:
            raise _broken(error) from error

    def _send(self, parts: list[Any]) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        first = 0
        while first < len(views):
            sent = self._sock.sendmsg(views[first : first + _IOV_MAX])
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _fetch_natively(
        self,
        native: NativeWire,
        asking: Asking,
        places: range,
        until_ns: int,
        stored_keys: Sequence[bytes],
        parts: Parts,
        buffers: Sequence[RecordBuffer],
        answers: list[Answer],
    ) -> None:
        """Append the answers for ``places``, asking for more meanwhile; after ``until_ns`` only the first."""
        fd = self._sock.fileno()
        while (at := places.start + len(answers)) < places.stop and not (answers and time.monotonic_ns() >= until_ns):
            rest = range(at, places.stop)
            try:
                self._ahead, other = native.receive(
                    fd, asking, stored_keys, parts, rest, until_ns, self._ahead, answers
                )
            except OSError as error:
                raise _broken(error) from error
            if other:
                at = places.start + len(answers)
                answers.append(self._answer(buffers[at], asking.asked - at - 1))

    def _fetch(
        self,
        asking: Asking,
        commands: Sequence[bytes],
        places: range,
        until_ns: int,
        buffers: Sequence[RecordBuffer],
        answers: list[Answer],
    ) -> None:
        """`_fetch_natively` without C."""
        for at in places:
            if answers and time.monotonic_ns() >= until_ns:
                return
            if asking.asked - at <= asking.window // 2 and asking.asked < asking.limit:
                first, asking.asked = asking.asked, min(at + asking.window, asking.limit)
                self._begin([b"".join(commands[first : asking.asked])])
            answers.append(self._answer(buffers[at], asking.asked - at - 1))

    def _answer(self, buffer: RecordBuffer, left: int) -> Answer:
        """What `fetch` yields for one key; ``left`` more answers are due."""
        payload, trailer = buffer
        size = payload.size + trailer.size
        wanted = b"$%d\r\n" % size
        if self._ahead == wanted:
            self._ahead = b""
        else:
            line = self._line()
            if line[:1] == b"-":
                return RespError(line[1:].decode(errors="replace"))
            length = _length(line)
            if length < 0:
                return Got.NONE
            if length != size:
                self._skip(length + 2)
                return length
        self._body(payload, trailer, wanted, left)
        return Got.FILLED

    def _line(self) -> bytes:
        """The next line, without its end. What was read behind it stays read ahead."""
        while b"\r\n" not in self._ahead:
            # A reply is 5 bytes at least, so that many may be waited for; behind them one by one.
            self._read_ahead(SHORTEST_REPLY_BYTES)
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _read_stored(self, count: int, answers: list[bool | RespError]) -> None:
        """Append what the next ``count`` SETs came to. Most replies are the shortest there are, and come at once."""
        for left in range(count, 0, -1):
            if b"\r\n" not in self._ahead:
                self._read_ahead(SHORTEST_REPLY_BYTES * left)
                if self._ahead == b"+OK\r\n" * left:
                    self._ahead = b""
                    answers += [True] * left
                    return
            line = self._line()
            if line[:1] == b"-":
                answers.append(RespError(line[1:].decode(errors="replace")))
            elif line in (b"+OK", b"$-1"):  # $-1: NX, and it was there
                answers.append(line == b"+OK")
            else:
                raise UnavailableError(f"expected +OK or $-1 for a SET, got {line[:40]!r}: out of step")

    def _read_ahead(self, sure: int) -> None:
        """Read on until ``sure`` bytes are ahead, and one at least."""
        more = bytearray(max(sure - len(self._ahead), 1))
        self._receive([more], len(more))
        self._ahead += more

    def _body(self, payload: NDArray[np.uint8], trailer: NDArray[np.uint8], line: bytes, left: int) -> None:
        """Receive a value, its line end, and ahead as much as is sure to come of ``left`` more answers, at most as long
        as ``line``."""
        size = payload.size + trailer.size
        early, behind = self._ahead[: size + 2], self._ahead[size + 2 :]
        rest = bytearray(2 if behind else 2 + min(SHORTEST_REPLY_BYTES * left, len(line)))
        parts = [payload.data, trailer.data, memoryview(rest)]
        while early:
            fits = min(len(early), len(parts[0]))
            parts[0][:fits], early = early[:fits], early[fits:]
            parts = [parts[0][fits:], *parts[1:]] if fits < len(parts[0]) else parts[1:]
        if parts:
            self._receive(parts, sum(map(len, parts)))
        if rest[:2] != b"\r\n":
            raise UnavailableError("expected the end of a value, got more of it: out of step")
        self._ahead = bytes(rest[2:]) + behind

    def _skip(self, count: int) -> None:
        count -= len(self._ahead)
        self._ahead = self._ahead[count:] if count < 0 else b""
        while count > 0:
            scratch = bytearray(min(count, _SCRATCH_BYTES))
            self._receive([scratch], len(scratch))
            count -= len(scratch)

    def _receive(self, parts: list[Any], total: int) -> None:
        """Fill all of ``parts``, ``total`` bytes."""
        try:
            if self._vectored:
                got = self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            else:
                got = self._sock.recv_into(parts[0])
            if got != total:
                self._receive_rest(parts, got, total)
        except OSError as error:
            raise _broken(error) from error

    def _receive_rest(self, parts: list[Any], got: int, total: int) -> None:
        """Go on after the first ``got`` bytes: over TLS, and where a signal came between."""
        left = total
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while True:
            if not got:
                raise UnavailableError(f"the server closed the connection {left} bytes before the end of an answer")
            left -= got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if not left:
                return
            views[0] = views[0][got:]
            got = self._sock.recvmsg_into(views)[0] if self._vectored else self._sock.recv_into(views[0])


def shut(sock: socket.socket | None) -> None:
    """Make whoever waits on ``sock`` stop waiting."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is down already


def _broken(error: OSError) -> UnavailableError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return UnavailableError("the server gave no answer in time")
    return UnavailableError(f"the connection broke: {error}")


def _length(line: bytes) -> int:
    """Of the value that ``line`` announces; -1: there is none."""
    if line[:1] != b"$" or not (line[1:].isdigit() or line == b"$-1"):
        raise UnavailableError(f"expected the length of a value, got {line[:40]!r}: out of step")
    return int(line[1:])


def _window_and_burst(buffers: Sequence[RecordBuffer]) -> tuple[int, int]:
    """How many values to ask for ahead, and how many to read at a time."""
    record_bytes = sum(part.size for part in buffers[0]) if buffers else 1
    window = max(2, min(_WINDOW_PAGES, _WINDOW_BYTES // record_bytes))
    return window, max(1, min(_BURST_PAGES, _BURST_BYTES // record_bytes))


def _gets(keys: Sequence[bytes]) -> list[bytes]:
    """A command for each key."""
    heads = {length: b"*2\r\n$3\r\nGET\r\n$%d\r\n" % length for length in set(map(len, keys))}
    return [b"%s%s\r\n" % (heads[len(key)], key) for key in keys]


class _Sets(NamedTuple):
    """SETs: what goes before each record, and behind it."""

    texts: list[bytes]
    tail: bytes


def _sets(keys: Sequence[bytes], sizes: Sequence[int], options: Sequence[bytes]) -> _Sets:
    """A command for each key."""
    head = b"*%d\r\n%s" % (3 + len(options), _bulk(b"SET"))
    texts = [b"%s$%d\r\n%s\r\n$%d\r\n" % (head, len(key), key, n) for key, n in zip(keys, sizes, strict=True)]
    return _Sets(texts, b"\r\n" + b"".join(_bulk(option) for option in options))


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)
