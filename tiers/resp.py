"""RespSocket: GET and SET of many pages over one socket of a Redis or Valkey server, without a copy on the way.

Values are received straight into the pages' buffers and sent straight from them, a payload and its trailer as one
scatter/gather list. Everything else about a server (connecting, authentication, TLS, other commands) is the client
library's. Protocol: RESP2; both commands' shortest replies, ``$-1`` and ``+OK``, are 5 bytes long.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import UnavailableError
from kvtransfer.tiers.base import RecordBuffer

SHORTEST_REPLY_BYTES = 5
_IOV_MAX = 1024  # Linux's limit for one sendmsg
_SCRATCH_BYTES = 1 << 16
# Further ahead is slower: the server makes all answers before anybody reads the first (measured with 1 MiB: 1.2 GB/s
# with 8 asked for at once, 0.9 with 32, 0.6 with 128).
_WINDOW_PAGES, _WINDOW_BYTES = 64, 8 << 20
_BURST_BYTES = 1 << 20  # what a core's cache holds until it has been verified


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
        self._ahead = b""  # read already, and of the next answer
        self.in_step = True
        if self._vectored:
            # The kernel waits for whole pages, with the GIL released once a page, and keeps the time.
            sock.setblocking(True)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            sock.settimeout(timeout_s)

    def fetch(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[bool | int | RespError]:
        """GET each key into its buffer. Yields for each: True; False, there is none; the value's length, where that
        is not the buffer's (it is undefined then); or the server's error.

        Keys are asked for in a window that moves with the answers, so that the server always has some to answer. They
        are read in bursts, and yielded once more are asked for: what the caller does with them costs no time then.
        Once ``stop`` is true nothing more is asked for: the iteration ends early.
        """
        window, burst = _window_and_burst(buffers)
        asked = read = 0
        answers: list[bool | int | RespError] = []
        while True:
            if asked - read <= window // 2 and asked < len(keys) and not stop():
                more = keys[asked : read + window]
                self._begin([b"".join([_command(b"GET", key) for key in more])])
                asked += len(more)
            yield from answers
            left = asked - read
            if not left:
                return
            answers = []
            try:
                for buffer in buffers[read : read + min(burst, left)]:
                    left -= 1
                    answers.append(self._answer(buffer, left))
            except UnavailableError:
                yield from answers  # these came
                raise
            read += len(answers)
            self.in_step = not left

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
            if line[:1] == b"-":
                answer: bool | RespError = RespError(line[1:].decode(errors="replace"))
            elif line in (b"+OK", b"$-1"):  # $-1: NX, and it was there
                answer = line == b"+OK"
            else:
                raise UnavailableError(f"expected +OK or $-1 for a SET, got {line[:40]!r}: out of step")
            self.in_step = left == 1
            yield answer

    def shut(self) -> None:
        """Make whoever waits on the socket stop waiting, from any thread. The socket is of no more use."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already

    # --- inside

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

    def _answer(self, buffer: RecordBuffer, left: int) -> bool | int | RespError:
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
                return False
            if length != size:
                self._skip(length + 2)
                return length
        self._body(payload, trailer, wanted, left)
        return True

    def _line(self) -> bytes:
        """The next line, without its end. What was read behind it stays read ahead."""
        while b"\r\n" not in self._ahead:
            # A reply is 5 bytes at least, so that many may be waited for; behind them one by one.
            more = bytearray(max(SHORTEST_REPLY_BYTES - len(self._ahead), 1))
            self._receive([more], len(more))
            self._ahead += more
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _body(self, payload: NDArray[np.uint8], trailer: NDArray[np.uint8], line: bytes, left: int) -> None:
        """Receive a value, its line end, and ahead as much as is sure to come of ``left`` more answers, at most as long
        as ``line``."""
        if early := len(self._ahead):
            payload[:early] = np.frombuffer(self._ahead, dtype=np.uint8)
            payload = payload[early:]
        rest = bytearray(2 + min(SHORTEST_REPLY_BYTES * left, len(line)))
        self._receive([payload, trailer, rest], payload.size + trailer.size + len(rest))
        self._ahead = bytes(rest[2:])

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
    return window, max(1, min(window // 2, _BURST_BYTES // record_bytes))


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))
