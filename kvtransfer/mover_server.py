"""Serving a mover to a cache in another process (remote_mover.py)."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvtransfer.channel import AnyFrame, Call, Channel, Reply
from kvtransfer.commands import Ack
from kvtransfer.kernels.condition import Event
from kvtransfer.mover import Mover
from kvtransfer.worker import Worker

VERBS = ("facts", "stats", "attach", "detach", "close")


def serve(connection: Connection, mover: Mover) -> None:
    """Carry out what comes over ``connection``, one end of a duplex `multiprocessing.Pipe`, until the cache closes the
    mover or its process is gone. The mover is closed then: what was under way is finished or cancelled."""
    _Server(connection, mover).run()


class _Server:
    def __init__(self, connection: Connection, mover: Mover) -> None:
        self._mover = mover
        self._over = Event()
        self._calling = Worker("kvtransfer-calls")  # they may take long: commands go on
        self._channel = Channel(connection, self._received, self._ended, "kvtransfer-cache")
        mover.answer = self._channel.send

    def run(self) -> None:
        self._channel.start()
        self._over.wait()
        self._calling.shutdown()
        self._mover.close(drain=False)
        self._channel.close()

    def _received(self, message: AnyFrame) -> None:
        if isinstance(message, Call):
            self._calling.submit(partial(self._call, message))
        elif not isinstance(message, Ack | Reply):
            self._mover.submit([message])  # on the reading thread: fences are recorded now

    def _call(self, call: Call) -> None:
        try:
            reply = Reply(id=call.id, value=self._do(call.verb, call.arguments))
        except Exception as error:  # kept: the caller's side raises it
            reply = Reply(id=call.id, error=str(error), kind=type(error).__name__)
        try:  # after "close" the other side ends the connection: what was sent has come then
            self._channel.send(reply)
        except (TypeError, ValueError, OverflowError) as error:  # a figure that can't travel: who waits is to know it
            self._channel.send(Reply(id=call.id, error=f"{call.verb}: {error}", kind=type(error).__name__))

    def _do(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb not in VERBS:
            raise ValueError(f"expected one of {', '.join(VERBS)}, got {verb!r}")
        return msgspec.to_builtins(getattr(self._mover, verb)(**arguments))

    def _ended(self, why: str) -> None:
        self._over.set()
