"""Channel: messages between the process of a directory and that of a mover, over one connection.

The messages are those of commands.py, and a few calls with replies (`Call`, `Reply`), one a frame of the connection. A
thread reads, another writes: nobody who sends waits for the other side.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvtransfer.commands import Ack, Command, Message, checked, encode
from kvtransfer.config_check import shown
from kvtransfer.kernels import errors
from kvtransfer.kernels.errors import ConfigError, KVTransferError, TierError


class Call(Message, frozen=True, tag="call"):
    """Something to be done once, with a reply: a method of the mover, and plain arguments."""

    verb: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class Reply(Message, frozen=True, tag="reply"):
    """To the `Call` of this id: a plain value, or the text and the class of the error that it raised."""

    value: Any = None
    error: str = ""
    kind: str = ""

    def result(self) -> Any:
        """The value; raises what was raised there, as far as it is an error of ours."""
        if self.kind:
            kind = getattr(errors, self.kind, None)
            if isinstance(kind, type) and issubclass(kind, KVTransferError):
                raise kind(self.error)
            raise TierError(f"{self.kind}: {self.error}")
        return self.value


def require_plain(value: Any, what: str) -> None:
    """Raise ConfigError, naming the part, unless ``value`` arrives on the other side as it is: None, booleans, numbers
    (whole ones of 64 bits), texts, bytes, lists, tables with texts as keys. Tuples arrive as lists."""
    problem = ""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{what}: expected texts as keys, got {type(key).__name__} {shown(key)}")
            require_plain(key, f"{what}: a key")
            require_plain(inner, f"{what}: {shown(key)}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            require_plain(inner, f"{what}[{at}]")
    elif type(value) is int:
        problem = "" if -(2**63) <= value < 2**64 else "a whole number of at most 64 bits"
    elif type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = "a text that UTF-8 can hold"
    elif value is not None and type(value) not in (bool, float, bytes):
        problem = "a plain value (number, text, bytes, true or false, none, a list or table of these)"
    if problem:
        raise ConfigError(
            f"{what}: expected {problem}, since the mover is another process, got {type(value).__name__} {shown(value)}"
        )


AnyFrame = Command | Ack | Call | Reply
_DECODER = msgspec.msgpack.Decoder(AnyFrame)


class Channel:
    """One end. Thread-safe.

    connection  one end of a duplex `multiprocessing.Pipe`, or another connection over a socket; it is the channel's
    received    called with each message, in order, on the reading thread
    ended       called once, on the reading thread, with the reason, when nothing more will come: the other end is
                closed or its process has died, it sent what is no message, or this end was closed
    """

    def __init__(
        self,
        connection: Connection,
        received: Callable[[AnyFrame], object],
        ended: Callable[[str], object],
        name: str = "channel",
    ) -> None:
        if not (connection.readable and connection.writable):
            raise ConfigError(f"{name}: expected a duplex connection, got {connection!r}")
        self._connection, self._received, self._ended = connection, received, ended
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reads", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-writes", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._reader.start()
        self._writer.start()

    def send(self, message: AnyFrame) -> None:
        """Send it, in the order of the calls. Never waits; what can't be sent any more is dropped."""
        self._out.put(encode(message))

    def is_reader(self) -> bool:
        """Whether the caller is on the reading thread."""
        return threading.current_thread() is self._reader

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what was given to `send`, and end. Idempotent."""
        self._out.put(None)
        if self._writer.ident is not None and threading.current_thread() is not self._writer:
            self._writer.join(timeout_s)
        self._shut()
        if self._reader.ident is not None and not self.is_reader():
            self._reader.join(timeout_s)
        self._connection.close()
        self._socket.close()

    # --- inside

    def _read(self) -> None:
        why = "the other end is closed, or its process has ended"
        try:
            while True:
                self._received(checked(self._connection.recv_bytes(), _DECODER))
        except EOFError:
            pass
        except (OSError, ConfigError) as error:  # reset, or no message of ours
            why = str(error)
        except BaseException as error:  # a bug of ``received``: nobody reads any more, and both sides have to know it
            why = f"{type(error).__name__}: {error}"
            self._shut()
            raise
        finally:
            self._out.put(None)
            self._ended(why)

    def _write(self) -> None:
        try:
            while (data := self._out.get()) is not None:
                self._connection.send_bytes(data)
        except OSError:  # the reading thread finds out as well, and says so
            self._shut()

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reading thread; closing alone would not
        except OSError:
            pass  # the other end has done so
