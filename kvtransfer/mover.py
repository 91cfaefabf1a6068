"""Mover: carries out a directory's commands where the memory is, and answers them page by page.

Pages go between the device and the host tier by the engine, between the host tier and lower ones in batches
(lower_tier.py). Whatever fails becomes a status. It knows no tokens and decides nothing: see `Directory`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kvtransfer.commands import (
    CODES,
    OK,
    Ack,
    Cancel,
    Command,
    Load,
    Lookup,
    Promote,
    Relocate,
    Resize,
    Store,
    ids,
    positions,
)
from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, KVTransferError, TierError, TransferCancelled
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.layer_loads import LayerLoad, LayerLoads
from kvtransfer.lower_tier import NOT_YET, KeyCommand, LowerTier
from kvtransfer.mover_facts import MoverFacts, TierFacts, TierState
from kvtransfer.recompute import link_rate
from kvtransfer.tiers.base import PageStatus, Tier, TierHandle
from kvtransfer.tiers.deadlines import Deadlines
from kvtransfer.tiers.host_size import resize_host
from kvtransfer.tiers.keys import Shard
from kvtransfer.under_way import CANCELLED, ERROR, Under, UnderWay
from kvtransfer.worker import Worker

CORRUPT = CODES[PageStatus.CORRUPT]
GRACE_S = 2.0  # beyond a tier's own deadline, before it is asked to stop


class Mover:
    """Moves pages for one `Directory`. Thread-safe.

    Args:
        engine: between the device pool and the host tier, whose slots the directory alone gives out.
        tiers: by the names that the directory has for them. They stay their owner's.
        host_name: what the directory calls the host tier.
        shard: which part of a page is held here; None: all of the pool's layers and heads.
        deadline_s: of a command to or from a lower tier; those of the engine have its own. A page whose buffers a tier
            does not let go of has no status until it does.
        in_flight, batch_pages: batches with each lower tier at a time, and the most pages of one.
        make_tier: makes a tier from its name and options, for `attach` (`kvtransfer.tier_build.TierMaker`).
        check_tier: refuses a tier that is given, ready made, by raising ConfigError (`TierMaker.check`).
        observer: told what the movements tell.

    Streams: a store or a load is fenced against all streams of the pool as they stand when `submit` is called; commands
    that wait for room come later, and are fenced then.
    """

    def __init__(
        self,
        engine: TransferEngine,
        tiers: Mapping[str, Tier] | None = None,
        *,
        host_name: str = "host",
        shard: Shard | None = None,
        deadline_s: float = 30.0,
        in_flight: int = 4,
        batch_pages: int = 128,
        make_tier: Callable[[str, Any], Tier] | None = None,
        check_tier: Callable[[str, Tier], object] = lambda name, tier: None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if not 0 < deadline_s <= 1e6:
            raise ConfigError(f"mover: deadline_s: expected seconds above 0, got {deadline_s}")
        self.engine, self.host, self.host_name = engine, engine.host, host_name
        self.shard = Shard.whole(engine.pool.spec) if shard is None else shard
        self._deadline_s, self._observer = deadline_s, observer
        self._make_tier, self._check_tier = make_tier, check_tier
        self._in_flight, self._batch_pages = in_flight, batch_pages
        self._lock = threading.Lock()
        self._under = UnderWay()
        self._lower: dict[str, LowerTier] = {}
        self._loads = LayerLoads()
        self._deadlines = Deadlines("mover", lambda: None)
        # One thread begins what somebody waits for, one what reads a lot of memory first (to seal it), one resizes:
        # none is an engine's or a tier's.
        self._reading = Worker("kvtransfer-reads")
        self._writing = Worker("kvtransfer-writes")
        self._sizing = Worker("kvtransfer-resizes")
        self._tiers = threading.RLock()  # held while tiers are told of the host's memory
        for name, tier in (tiers or {}).items():
            self.attach(name, tier)

    @property
    def answer(self) -> Callable[[Ack], object] | None:
        """Takes the answers, on a thread of the mover's. Set it before the first command."""
        return self._under.answer

    @answer.setter
    def answer(self, answer: Callable[[Ack], object] | None) -> None:
        self._under.answer = answer

    # --- commands

    def submit(self, commands: Iterable[Command]) -> None:
        """Carry out ``commands``, in any order. Returns once those to and from the device are fenced and begun. Never
        raises for what becomes of them: that is in their answers, which come on a thread of the mover's."""
        for command in commands:
            if isinstance(command, Cancel):
                self._under.cancel(command.command)
            elif (under := self._under.enter(command)) is None:
                continue
            elif isinstance(command, Store | Load):
                self._transfer(under, command)
            elif isinstance(command, Relocate | Resize):
                thread = self._writing if isinstance(command, Relocate) else self._sizing
                self._hand_over(thread, under, partial(self._on_host, under, command))
            else:
                thread = self._reading if isinstance(command, Promote | Lookup) else self._writing
                self._hand_over(thread, under, partial(self._begin, under, command))

    def load(self, number: int, *, pages: int = 1, timeout_s: float = 0.0) -> LayerLoad:
        """The parts of a load (`Load.load`) that have been submitted, to wait for its layers: for whoever launches the
        forward. Holds the caller until they are so many ``pages`` (`CacheLoad.await_submitted`), which may still be on
        their way to this process. Raises TransferError if they are less then, or long since forgotten."""
        return self._loads.of(number, pages, timeout_s)

    def is_own_thread(self) -> bool:
        """Whether the caller is on the thread that answers: it must not wait for what that thread has to tell."""
        return self._under.is_own_thread()

    # --- tiers

    def attach(self, name: str, tier: Tier | Mapping[str, Any]) -> TierFacts:
        """Take commands for one more tier. Blocks until it knows the host's memory. Options instead of a tier: it is
        made here, and closed at `detach` or `close`. Raises ConfigError, before the tier is touched, where it does
        not fit (``check_tier``), too."""
        self._require_new(name)
        owned = not isinstance(tier, Tier)
        if not isinstance(tier, Tier):
            if self._make_tier is None:
                raise ConfigError(
                    f"attach: expected a mover with make_tier for the options of {name!r}, got one without"
                )
            tier = self._make_tier(name, tier)
        else:
            self._check_tier(name, tier)
        with self._tiers:
            try:
                self._require_new(name)  # another thread may have been faster
                lower = LowerTier(
                    tier,
                    self.host,
                    self.shard,
                    deadline_s=self._deadline_s,
                    in_flight=self._in_flight,
                    batch_pages=self._batch_pages,
                    owned=owned,
                    observer=self._observer,
                )
            except BaseException:
                if owned:
                    tier.close(drain=False)
                raise
            with self._lock:
                self._lower[name] = lower
        return self._facts_of(tier)

    def detach(self, name: str, *, drain: bool = False, timeout_s: float = 60.0) -> None:
        """Take no more commands for a tier, finish or cancel those under way, and let go of it.

        Raises DeadlineExceeded (OwnershipError) where the tier does not let go of the host's memory in time, or of its
        own. It takes no commands then, but has its name and the memory still: call it again. Commands under way are
        answered when they end.
        """
        with self._tiers:
            with self._lock:
                lower = self._lower.get(name)
                if lower is None:
                    raise ConfigError(f"detach: expected one of {', '.join(self._lower) or 'no tier'}, got {name!r}")
                lower.leaving = True
            self._close_lower(name, lower, drain, timeout_s)

    def facts(self) -> MoverFacts:
        """What a directory has to know of the memory here."""
        spec, pool = self.engine.pool.spec, self.engine.pool
        with self._lock:
            tiers = {name: self._facts_of(one.tier) for name, one in self._lower.items() if not one.leaving}
        return MoverFacts(
            spec=spec.canonical(),
            page_size=spec.page_size,
            num_layers=spec.num_layers,
            page_bytes=spec.page_bytes,
            pool_pages=pool.num_pages,
            host_name=self.host_name,
            host_pages=self.host.ready_slots,
            host_most_pages=self.host.num_slots,
            host_grows=self.host.grows,
            tiers=tiers,
            link_bytes_per_s=link_rate(self.engine.profile, spec.page_bytes).bytes_per_s,
        )

    def stats(self) -> dict[str, TierState]:
        """The lower tiers' own figures, by name. Never waits for them."""
        with self._lock:
            lower = {name: one for name, one in self._lower.items() if not one.leaving}
        return {name: TierState.of(one.tier.stats()) for name, one in lower.items()}

    # --- end

    def close(self, *, drain: bool = True, timeout_s: float = 60.0) -> None:
        """Take no more commands, finish (or cancel) those under way, and let go of the tiers. The engine, the host and
        the tiers that were given stay open. Every command is answered. Idempotent.

        Raises DeadlineExceeded when the time is up: what is under way then is answered when it ends, and tiers that
        have not let go stay: call it again.
        """
        until = time.monotonic() + timeout_s
        self._under.refuse_more()
        if not drain:
            self._under.cancel_all()
        if left := self._under.wait_empty(timeout_s):
            raise DeadlineExceeded(f"mover: close: {left} commands had no end after {timeout_s:g} s")
        failed: list[Exception] = []
        try:
            if not self._tiers.acquire(timeout=max(0.1, until - time.monotonic())):
                raise DeadlineExceeded(f"mover: close: a tier was being attached or detached after {timeout_s:g} s")
            for name, lower in [*self._lower.items()]:
                try:
                    self._close_lower(name, lower, drain, max(0.1, until - time.monotonic()))
                except Exception as error:  # kept: the others are closed first
                    failed.append(error)
        finally:
            try:
                self._tiers.release()
            except RuntimeError:  # it is not ours: there was no time, or an interrupt
                pass
        if failed:
            raise failed[0]
        self._deadlines.close()
        self._reading.shutdown()
        self._writing.shutdown()
        self._sizing.shutdown()
        self._under.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(drain=error is None)

    # --- inside

    def _hand_over(self, thread: Worker, under: Under, work: Callable[[], object]) -> None:
        try:
            thread.submit(work)
        except RuntimeError:  # it takes no more: the interpreter ends
            self._under.end(under, bytes([ERROR]) * positions(under.command), "the mover's threads have ended")

    def _close_lower(self, name: str, lower: LowerTier, drain: bool, timeout_s: float) -> None:
        """Holding ``_tiers``. The tier is forgotten unless it is to be closed again."""
        over = True
        try:
            lower.close(drain=drain, timeout_s=timeout_s)
        except NOT_YET:
            over = False
            raise
        finally:
            if over:
                with self._lock:
                    del self._lower[name]

    def _require_new(self, name: str) -> None:
        with self._lock:
            if name in self._lower and self._lower[name].leaving:
                raise ConfigError(
                    f"attach: expected a name that is free, got {name!r}, which is not detached yet; call "
                    "detach again first"
                )
            if name in self._lower or name == self.host_name or self._under.closing:
                raise ConfigError(f"attach: expected a mover that is open and has no tier {name!r} yet")

    def _facts_of(self, tier: Tier) -> TierFacts:
        stats = tier.stats()
        record_bytes = self.host.slot_bytes + self.host.trailer_bytes
        # A page that a tier gives up by itself is a miss: its directory plans with what stays.
        room = stats.capacity_bytes if stats.kept_bytes is None else stats.kept_bytes
        capacity = room // record_bytes if stats.capacity_bytes and not tier.shared else None
        folders = getattr(tier, "folders", None)  # a disk's
        return TierFacts(tier.shared, capacity, stats.pages, folders[0] if folders else "")

    def _transfer(self, under: Under, command: Store | Load) -> None:
        """Begin a transfer of the engine, on the caller's thread: its fences are recorded now."""
        slots, pages = ids(command.slots), ids(command.pages)
        try:
            if command.tier != self.host_name:
                raise ConfigError(f"expected the host tier {self.host_name!r}, got {command.tier!r}")
            if isinstance(command, Load):
                handle = self.engine.load(slots, pages, layerwise=command.layerwise)
                self._loads.add(command.load, handle)
            else:
                self.host.trailers[slots, :8] = 0  # no header: what the slot holds is of another page from now on
                handle = self.engine.store(pages, slots)
        except Exception as error:  # kept: it is what became of the command
            self._under.end(under, bytes([ERROR]) * slots.size, _said(error))
            return
        self._under.begun(under, handle)
        handle.add_done_callback(lambda ended: self._under.later(partial(self._transferred, under, ended)))

    def _transferred(self, under: Under, handle: TransferHandle) -> None:
        """On the telling thread: a transfer has ended."""
        pages = positions(under.command)
        is_load = isinstance(under.command, Load)
        error: KVTransferError | None = None
        verdict = None
        try:
            handle.result(0)
        except KVTransferError as raised:
            error = raised
        if is_load:
            try:
                verdict = handle.verdict(0)
            except KVTransferError:
                verdict = None  # it is ``error``
        if error is None:
            unverified = verdict.unverified_pages if verdict is not None else ()
            self._under.end(under, bytes([OK]) * pages, unverified=unverified)
        elif verdict is not None:  # all has landed, and some does not verify
            codes = bytearray([OK]) * pages
            for position in verdict.bad_pages:
                codes[position] = CORRUPT
            unverified = tuple(p for p in verdict.unverified_pages if codes[p] == OK)
            self._under.end(under, bytes(codes), str(error), unverified, verdict.bad_layers)
        else:  # what has landed was not compared: of no use
            status = CANCELLED if isinstance(error, TransferCancelled) else ERROR
            self._under.end(under, bytes([status]) * pages, str(error))

    def _on_host(self, under: Under, command: Relocate | Resize) -> None:
        """Copy slots within the host tier, or give it another size: on a thread that may take its time."""
        code, said = OK, ""
        try:
            if command.tier != self.host_name:
                raise ConfigError(f"expected the host tier {self.host_name!r}, got {command.tier!r}")
            if under.cancelled:
                raise TransferCancelled("cancelled before it was begun")
            if isinstance(command, Relocate):
                self.host.copy(ids(command.read), ids(command.slots))
            else:
                with self._tiers:
                    with self._lock:
                        tiers = [lower.tier for lower in self._lower.values() if lower.knows_memory]
                    resize_host(self.host, command.capacity_pages, tiers)
        except Exception as error:  # kept: it is what became of the command
            code, said = CANCELLED if isinstance(error, TransferCancelled) else ERROR, _said(error)
        self._under.end(under, bytes([code]) * positions(command), said)

    def _begin(self, under: Under, command: KeyCommand) -> None:
        """On the reading or the writing thread: ask a lower tier."""
        name = command.source if hasattr(command, "source") and command.tier == self.host_name else command.tier
        with self._lock:
            lower = self._lower.get(name)
            if lower is not None and lower.leaving:
                lower = None
            cancelled = under.cancelled
        try:
            if cancelled:
                raise TransferCancelled("cancelled before it was begun")
            if lower is None:
                raise ConfigError(f"expected a tier that is attached, got {name!r}")
            handle = lower.begin(command)
        except Exception as error:  # kept: it is what became of the command
            status = CANCELLED if isinstance(error, TransferCancelled) else ERROR
            self._under.end(under, bytes([status]) * positions(command), _said(error))
            return
        under.deadline, under.late = time.monotonic() + lower.limit_s(command) + GRACE_S, self._late
        self._under.begun(under, handle)
        self._deadlines.watch(under)
        handle.add_done_callback(lambda ended: self._under.later(partial(self._judge, lower, under, command, ended)))

    def _judge(self, lower: LowerTier, under: Under, command: KeyCommand, handle: TierHandle) -> None:
        """On the telling thread: a tier has answered."""
        pages = positions(command)
        try:
            codes, said = lower.judge(command, handle)
            if len(codes) != pages:
                raise TierError(f"expected an answer for each of {pages} pages, got {len(codes)}")
        except Exception as error:  # kept: it is what became of the command
            codes, said = bytes([ERROR]) * pages, _said(error)
        self._under.end(under, codes, said)

    def _late(self, under: Under) -> None:
        """A tier has not kept its deadline: ask it to stop. Where it holds no buffers, it is not waited for."""
        assert under.handle is not None
        under.handle.cancel()
        if not hasattr(under.command, "slots"):
            codes = bytes([ERROR]) * positions(under.command)
            self._under.later(partial(self._under.end, under, codes, f"no answer after {self._deadline_s:g} s"))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KVTransferError) else f"{type(error).__name__}: {error}"
