"""RemoteMover: a mover in another process, for the cache in this one, which needs neither torch nor a GPU.

    remote = start_mover(make_mover, "a", "b")  # a process that calls make_mover("a", "b"), and serves what it gives
    cache = TieredCache(directory_of(config, remote.facts()), remote, scope=scope)

If that process dies, everything that was under way there has failed, and the cache goes on without it.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvtransfer.channel import AnyFrame, Call, Channel, Reply, require_plain
from kvtransfer.commands import Ack, Cancel, Command
from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, TransferError, UnavailableError
from kvtransfer.mover_facts import MoverFacts, TierFacts, TierState
from kvtransfer.tiers.base import PageStatus
from kvtransfer.worker import Worker

if TYPE_CHECKING:
    from kvtransfer.layer_loads import LayerLoad
    from kvtransfer.mover import Mover

_T = TypeVar("_T")


class RemoteMover:
    """The mover at the other end of ``connection`` (one end of a duplex `multiprocessing.Pipe`), where
    `kvtransfer.mover_server.serve` runs. Thread-safe.

    timeout_s  for a call that is answered at once (figures); attaching, detaching and closing may take what they say
    process    the process, if it was started here: joined by `close`
    answer     takes the answers, on this object's reading thread
    lost       called with the reason, once, when the other process is gone
    """

    def __init__(self, connection: Connection, *, timeout_s: float = 60.0, process: BaseProcess | None = None) -> None:
        self.answer: Callable[[Ack], object] | None = None
        self.lost: Callable[[str], object] | None = None
        self.process = process
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._last_call = 0
        self._gone = ""
        self._refusing: Worker | None = None
        self._refuser: int | None = None
        self._channel = Channel(connection, self._received, self._ended, "kvtransfer-mover")
        self._channel.start()

    # --- for the cache

    def submit(self, commands: Iterable[Command]) -> None:
        """Have them carried out there. Fences are recorded when they arrive: what wrote the pages of a store must have
        been launched there before this is called. Never waits, never raises: a mover that is gone answers ERROR."""
        for command in commands:
            with self._lock:
                gone = self._gone
                if gone and self._refusing is None:
                    self._refusing = Worker("kvtransfer-refuses")
            if not gone:
                self._channel.send(command)
            elif not isinstance(command, Cancel):
                assert self._refusing is not None
                try:
                    self._refusing.submit(partial(self._refuse, command, gone))
                except RuntimeError:  # closed: it takes no more
                    call_subscriber(partial(self._answer_error, command, gone))

    def load(self, number: int) -> LayerLoad:
        """Raises ConfigError: streams can be made to wait in the mover's process alone (`Mover.load`)."""
        raise ConfigError(
            f"load {number}: expected a mover in this process, got one in another: wait for layers there, with "
            "Mover.load(number)"
        )

    def facts(self) -> MoverFacts:
        """What is there."""
        return self._call("facts", MoverFacts, self._timeout_s)

    def stats(self) -> Mapping[str, TierState]:
        """The lower tiers' own figures; none from a mover that is gone."""
        try:
            return self._call("stats", dict[str, TierState], self._timeout_s)
        except UnavailableError:
            return {}

    def attach(self, name: str, tier: Any) -> TierFacts:
        """See `Mover.attach`: here options alone will do, of plain values. Raises ConfigError, naming the option
        that can't travel, before anything is sent."""
        if not isinstance(tier, Mapping):
            raise ConfigError(
                f"attach: expected the options of {name!r}, from which the mover's process makes it, "
                f"got {type(tier).__name__}"
            )
        return self._call("attach", TierFacts, None, name=name, tier=dict(tier))

    def detach(self, name: str, *, timeout_s: float = 60.0) -> None:
        """See `Mover.detach`."""
        self._call("detach", type(None), None, name=name, timeout_s=timeout_s)

    def is_own_thread(self) -> bool:
        """Whether the caller is on the thread that answers."""
        return self._channel.is_reader() or self._refuser == threading.get_ident()

    def close(self, *, drain: bool = True, timeout_s: float = 60.0) -> None:
        """Close the mover, and let its process end; one that was started here is joined, and ended if it does not end
        by itself. Nothing is waited for where it is gone. Raises DeadlineExceeded, and leaves it as it is, where the
        mover can't close in time: call it again, or end the process."""
        try:
            self._call("close", type(None), timeout_s + 10.0, drain=drain, timeout_s=timeout_s)
        except UnavailableError:
            pass  # it is gone: everything has been answered
        self._give_up_calls("the mover is closed")
        refusing = self._refusing
        self._channel.close()
        if refusing is not None and not self.is_own_thread():
            refusing.shutdown()
        if self.process is not None:
            self.process.join(10.0)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()

    # --- inside

    def _call(self, verb: str, kind: type[_T], limit_s: float | None, /, **arguments: Any) -> _T:
        """Have something done there, and wait for it up to ``limit_s``."""
        if self.is_own_thread():
            raise TransferError(f"{verb}: a callback can't wait for what its own thread has to tell")
        for name, value in arguments.items():
            require_plain(value, f"{verb}: {name}")
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                raise UnavailableError(f"{verb}: {self._gone}")
            self._last_call += 1
            number = self._last_call
            self._calls[number] = future
        try:
            self._channel.send(Call(id=number, verb=verb, arguments=arguments))
            if not wait([future], limit_s).done:
                raise DeadlineExceeded(f"{verb}: the mover's process gave no answer after {limit_s:g} s")
            return msgspec.convert(future.result(), kind)
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _received(self, message: AnyFrame) -> None:
        if isinstance(message, Ack):
            if self.answer is not None:
                call_subscriber(lambda: self.answer(message) if self.answer is not None else None)
        elif isinstance(message, Reply):
            with self._lock:
                future = self._calls.pop(message.id, None)
            if future is not None:
                try:
                    future.set_result(message.result())
                except Exception as error:  # kept: the caller's thread raises it
                    future.set_exception(error)

    def _ended(self, why: str) -> None:
        if self._give_up_calls(f"the mover is gone: {why}") and self.lost is not None:
            call_subscriber(lambda: self.lost(why) if self.lost is not None else None)

    def _give_up_calls(self, why: str) -> bool:
        """No call has an answer from now on. False if that was known."""
        with self._lock:
            new, self._gone = not self._gone, self._gone or why
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(UnavailableError(self._gone))
        return new

    def _refuse(self, command: Command, why: str) -> None:
        self._refuser = threading.get_ident()
        self._answer_error(command, why)

    def _answer_error(self, command: Command, why: str) -> None:
        if self.answer is not None:
            self.answer(Ack.of(command, PageStatus.ERROR, detail=why))


def start_mover(
    make: Callable[..., AbstractContextManager[Mover]],
    *arguments: Any,
    context: BaseContext | None = None,
    start_s: float = 300.0,
) -> RemoteMover:
    """Start a process that makes a mover with ``make(*arguments)``, a context manager, and serves it.

    ``context``: how processes are started, "spawn" unless told otherwise; a forked one must not use CUDA. Raises
    UnavailableError if it ends before it serves.
    """
    chosen = multiprocessing.get_context("spawn") if context is None else context
    mine, theirs = chosen.Pipe()
    process = chosen.Process(target=_main, args=(theirs, make, arguments), name="kvtransfer-mover", daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()  # the child's alone: when it ends, so does the connection
    remote = RemoteMover(mine, timeout_s=start_s, process=process)
    try:
        remote.facts()
    except BaseException:
        process.kill()
        remote.close(drain=False, timeout_s=1.0)
        raise
    return remote


def _main(connection: Connection, make: Callable[..., AbstractContextManager[Mover]], arguments: Any) -> None:
    from kvtransfer.mover_server import serve  # noqa: PLC0415  (torch, which the process that starts it does without)

    with make(*arguments) as mover:
        serve(connection, mover)
