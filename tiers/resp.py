"""RespSocket: GET and SET of many pages over one socket of a Redis or Valkey server, without a copy on the way.

Values are received straight into the pages' buffers and sent straight from them, a payload and its trailer as one
scatter/gather list. Everything else about a server (connecting, authentication, TLS, other commands) is the client
library's. Protocol: RESP2; both commands' shortest replies, ``$-1`` and ``+OK``, are 5 bytes long.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvtransfer.kernels.errors import UnavailableError
from kvtransfer.tiers.base import RecordBuffer

SHORTEST_REPLY_BYTES = 5
_IOV_MAX = 1024  # Linux's limit for one sendmsg
_SCRATCH_BYTES = 1 << 16


class RespError(Exception):
    """The server refused one command. ``code`` is the first word of its answer ("OOM", "LOADING", "ERR" ...)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


class RespSocket:
    """One socket, connected and authenticated, that nobody else uses. Not thread-safe but for `shut`.

    ``timeout_s`` bounds each wait for the server. ``in_step`` says whether every reply that was asked for has been
    read: a socket that is not must be closed. The generators raise UnavailableError where the server is gone or late.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._vectored = not isinstance(sock, ssl.SSLSocket)  # TLS has no scatter/gather
        self._head = bytearray(64)
        self._have = 0  # bytes at the front of `_head` that were read ahead
        self._scratch = bytearray()
        self.in_step = True
        if self._vectored:
            # The kernel waits for whole pages, with the GIL released once a page, and keeps the time.
            sock.setblocking(True)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            sock.settimeout(timeout_s)

    def fetch(self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> Iterator[bool | int | RespError]:
        """GET each key into its buffer. Yields for each: True; False, there is none; the value's length, where that
        is not the buffer's (it is undefined then); or the server's error."""
        self._begin([b"".join(_command(b"GET", key) for key in keys)])
        for left, buffer in zip(range(len(keys), 0, -1), buffers, strict=True):
            line = self._line()
            if line[:1] == b"-":
                result: bool | int | RespError = RespError(line[1:].decode(errors="replace"))
            elif (length := int(line[1:])) < 0:
                result = False
            elif length != buffer.payload.size + buffer.trailer.size:
                self._skip(length + 2)
                result = length
            else:
                self._body(buffer, SHORTEST_REPLY_BYTES * (left - 1))
                result = True
            self.in_step = left == 1
            yield result

    def store(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], options: Sequence[bytes]
    ) -> Iterator[bool | RespError]:
        """SET each key from its buffer with ``options`` (NX ...). Yields for each: whether it was set, or an error."""
        parts: list[Any] = []
        tail = b"\r\n" + b"".join(_bulk(option) for option in options)
        before = b""
        for key, (payload, trailer) in zip(keys, buffers, strict=True):
            head = b"*%d\r\n%s%s$%d\r\n" % (
                3 + len(options),
                _bulk(b"SET"),
                _bulk(key),
                payload.size + trailer.size,
            )
            parts += [before + head, payload, trailer]
            before = tail
        self._begin([*parts, before])
        for left in range(len(keys), 0, -1):
            line = self._line()
            self.in_step = left == 1
            yield RespError(line[1:].decode(errors="replace")) if line[:1] == b"-" else line == b"+OK"

    def shut(self) -> None:
        """Make whoever waits on the socket stop waiting, from any thread. The socket is of no more use."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already

    # --- inside

    def _begin(self, parts: list[Any]) -> None:
        self.in_step = False
        if not self._vectored:
            for part in parts:
                self._call(self._sock.sendall, part)
            return
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        first = 0
        while first < len(views):
            sent = self._call(self._sock.sendmsg, views[first : first + _IOV_MAX])
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _line(self) -> bytes:
        """The next line, without its end. What was read behind it stays in `_head`."""
        while (end := self._head.find(b"\r\n", 0, self._have)) < 0:
            if self._have == len(self._head):
                self._head.extend(bytes(len(self._head)))  # an error message is long
            # A reply is 5 bytes at least, so that many may be waited for; behind them one by one.
            want = max(SHORTEST_REPLY_BYTES, self._have + 1)
            self._have += self._receive([memoryview(self._head)[self._have : want]])
        line = bytes(self._head[:end])
        self._drop(end + 2)
        return line

    def _drop(self, count: int) -> None:
        self._head[: self._have - count] = self._head[count : self._have]
        self._have -= count

    def _body(self, buffer: RecordBuffer, sure_bytes: int) -> None:
        """Receive a value, its line end, and ahead as much of the next line as is sure to come."""
        payload, trailer = buffer.payload.data, buffer.trailer.data
        early = min(self._have, len(payload))
        payload[:early] = self._head[:early]
        self._drop(early)
        ahead = min(sure_bytes, len(f"${len(payload) + len(trailer)}\r\n"))
        rest = bytearray(2 + ahead)
        self._receive([payload[early:], trailer, memoryview(rest)])
        self._head[:ahead] = rest[2:]
        self._have = ahead

    def _skip(self, count: int) -> None:
        early = min(self._have, count)
        self._drop(early)
        count -= early
        if not self._scratch:
            self._scratch = bytearray(_SCRATCH_BYTES)
        while count:
            count -= self._receive([memoryview(self._scratch)[: min(count, _SCRATCH_BYTES)]])

    def _receive(self, views: list[memoryview]) -> int:
        """Fill all of ``views``. Returns how many bytes that were."""
        total = sum(map(len, views))
        left = total
        views = [view for view in views if len(view)]
        while views:
            if self._vectored:
                got = self._call(self._sock.recvmsg_into, views, 0, socket.MSG_WAITALL)[0]
            else:
                got = self._call(self._sock.recv_into, views[0])
            if not got:
                raise UnavailableError(f"the server closed the connection {left} bytes before the end of an answer")
            left -= got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]
        return total

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except (TimeoutError, BlockingIOError) as error:
            raise UnavailableError("the server gave no answer in time") from error
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error}") from error


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))
