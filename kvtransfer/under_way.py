"""UnderWay: the commands that a mover is carrying out, from their arrival to their answer. Each is answered once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtransfer.commands import CODES, Ack, Command, positions
from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import TransferError
from kvtransfer.tiers.base import PageStatus
from kvtransfer.worker import Worker

ERROR, CANCELLED = CODES[PageStatus.ERROR], CODES[PageStatus.CANCELLED]
_EARLY = 4096  # cancels that came before their commands, remembered


class Stoppable(Protocol):
    """A transfer, or a tier's batch."""

    def cancel(self) -> bool: ...


@dataclass(eq=False)
class Under:
    """A command being carried out. ``handle`` is None until it has begun; ``late`` is called at the ``deadline``."""

    command: Command
    deadline: float | None = None
    handle: Stoppable | None = None
    cancelled: bool = False
    answered: bool = False
    late: Callable[[Under], object] = field(default=lambda under: None)

    def expire(self) -> None:
        """See `Deadlines`."""
        self.late(self)


class UnderWay:
    """See the module. Thread-safe. ``answer`` takes the answers, on a thread of this object's own."""

    def __init__(self) -> None:
        self.answer: Callable[[Ack], object] | None = None
        self._changed = Condition()
        self._under: dict[int, Under] = {}
        self._early: OrderedDict[int, None] = OrderedDict()
        self._closing = False
        self._telling = Worker("kvtransfer-tells")
        self._teller: int | None = None

    def enter(self, command: Command) -> Under | None:
        """A command has come. None where it is answered at once: it was cancelled before, or nothing is begun now."""
        under = Under(command)
        with self._changed:
            if command.id in self._early:
                del self._early[command.id]
                under.cancelled = True
            elif not self._closing:
                self._under[command.id] = under
                return under
        code, said = (CANCELLED, "cancelled") if under.cancelled else (ERROR, "the mover is closed")
        self.end(under, bytes([code]) * positions(command), said)
        return None

    def begun(self, under: Under, handle: Stoppable) -> None:
        """It is carried out by ``handle``."""
        with self._changed:
            under.handle = handle
            cancelled = under.cancelled
        if cancelled:
            handle.cancel()

    def cancel(self, number: int) -> None:
        """Ask a command to stop. One that is unknown has ended, or is yet to come."""
        with self._changed:
            under = self._under.get(number)
            if under is None:
                self._early[number] = None
                while len(self._early) > _EARLY:
                    self._early.popitem(last=False)
                return
            under.cancelled = True
            handle = under.handle
        if handle is not None:
            handle.cancel()

    def end(
        self,
        under: Under,
        codes: bytes,
        detail: str = "",
        unverified: tuple[int, ...] = (),
        bad_layers: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Answer a command, once; `codes` of all of its positions."""
        with self._changed:
            if under.answered:
                return
            under.answered = True
        ack = Ack(id=under.command.id, statuses=codes, detail=detail, unverified=unverified, bad_layers=bad_layers)
        self.later(partial(self._say, ack))

    def later(self, work: Callable[[], object]) -> None:
        """Do something on the telling thread; once that has ended, at once."""
        try:
            self._telling.submit(work)
        except RuntimeError:  # it takes no more
            # At the end of the interpreter a tier's own thread must not begin what an answer leads to: a load, say, in
            # PyTorch's C++, in the middle of which Python would end it.
            if not (self._telling.leaving and threading.current_thread().daemon):
                call_subscriber(work)

    def is_own_thread(self) -> bool:
        """Whether the caller is on the telling thread."""
        return self._teller == threading.get_ident()

    def refuse_more(self) -> None:
        """Whatever comes from now on is answered ERROR."""
        with self._changed:
            self._closing = True

    @property
    def closing(self) -> bool:
        """Whether `refuse_more` was called."""
        return self._closing

    def cancel_all(self) -> None:
        """`cancel` for all that are under way."""
        with self._changed:
            numbers = [*self._under]
        for number in numbers:
            self.cancel(number)

    def wait_empty(self, timeout_s: float) -> int:
        """Hold the caller until every command is answered, or the time is up; how many are not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under, timeout_s)
            return len(self._under)

    def close(self) -> None:
        """End the telling thread, once it has told everything."""
        self._telling.shutdown(wait=not self.is_own_thread())

    def _say(self, ack: Ack) -> None:
        self._teller = threading.get_ident()
        try:
            if self.answer is None:
                raise TransferError(f"mover: nobody takes answers: command {ack.id} has one")
            self.answer(ack)
        finally:
            with self._changed:
                self._under.pop(ack.id, None)
                self._changed.notify_all()
