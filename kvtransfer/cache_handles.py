"""CacheStore and CacheLoad: what a caller holds of a store or a load of a `TieredCache`.

They answer page by page and never hang: whoever waits is let go at the handle's deadline at the latest. Positions count
the call's page ids. Neither torch nor a GPU is needed here: what has to do with streams is asked of the mover.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import CODES, OK, WAITING
from kvtransfer.jobs import Job
from kvtransfer.kernels.callbacks import call_subscriber, future_and_waker
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import DeadlineExceeded, LayoutError, TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.base import BatchResult, PageStatus
from kvtransfer.verdict import Verdict

if TYPE_CHECKING:
    from kvtransfer.layer_loads import LayerLoad
    from kvtransfer.pool import Stream

_CORRUPT = CODES[PageStatus.CORRUPT]


class Owner(Protocol):
    """What a handle asks of its cache. ``news`` is notified whenever a command went out or an answer came in."""

    news: Condition
    num_layers: int
    observer: Observer

    def cancel_job(self, job: Job) -> None: ...

    def sent(self, job: Job) -> NDArray[np.bool_]: ...

    def layer_load(self, number: int) -> LayerLoad: ...

    def is_own_thread(self) -> bool: ...


class CacheHandle:
    """See the module. Thread-safe."""

    def __init__(self, owner: Owner, job: Job, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.deadline: float = time.monotonic() + deadline_s
        self._owner, self._job = owner, job
        self._changed = Condition()
        self._ended = False
        self._callbacks: list[Callable[[Any], object]] = []
        self._wakers: list[Callable[[], object]] = []
        job.add_done_callback(self._end)

    @property
    def page_ids(self) -> NDArray[np.int64]:
        """The device pages of the call, int64; they belong to it until it is done."""
        ids = self._job.ids
        return np.empty(0, dtype=np.int64) if ids is None else ids

    @property
    def first_page(self) -> int:
        """The number of the first page, from the beginning of the tokens on."""
        return self._job.first

    @property
    def statuses(self) -> list[PageStatus | None]:
        """One a page, in the order of the call; None: not known yet. Never waits."""
        return self._job.statuses

    @property
    def usable_pages(self) -> int:
        """Leading pages that are OK by now: all that a prefix can use. Final once `done`."""
        return self._job.usable_pages

    @property
    def detail(self) -> str:
        """The first cause that was told of a page that is not OK, "" if none was."""
        return self._job.detail

    def done(self) -> bool:
        """Whether every page has its status: its device pages are the caller's again. Never waits."""
        return self._job.done

    def result(self, timeout_s: float | None = None) -> BatchResult:
        """Hold the caller until it is done; a status a page (``result().require()`` raises unless all are OK).

        DeadlineExceeded at ``timeout_s`` leaves it running; at its own deadline it is cancelled too.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._ended and self._owner.is_own_thread():
            raise TransferError("result: a callback can't wait for what its own thread has to tell")
        with self._changed:
            while not self._ended:
                left = self.deadline if limit is None else min(limit, self.deadline)
                if not self._changed.wait_for(lambda: self._ended, max(0.0, left - time.monotonic())):
                    break
        if not self._ended:
            open_pages = np.flatnonzero(self._job.codes == WAITING)
            spent = timeout_s
            if limit is None or limit >= self.deadline:
                spent = self.deadline_s
                self.cancel()
            raise DeadlineExceeded(
                f"{self._job.kind}: {open_pages.size} of {self._job.codes.size} pages had no status after {spent:g} s",
                open_pages.tolist(),
            )
        return self._result()

    def cancel(self) -> bool:
        """Begin nothing more of it: pages not begun become CANCELLED. False if it is done. Its device pages stay its
        own until `done`."""
        if self._job.done:
            return False
        self._owner.cancel_job(self._job)
        return True

    def expired(self) -> bool:
        """Whether its deadline has passed before it was done."""
        return not self._job.done and time.monotonic() > self.deadline

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call it with this handle once it is done (at once if it is), on the thread that brought the last answer."""
        with self._changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, BatchResult]:
        future, wake = future_and_waker()
        with self._changed:
            if self._ended:
                wake()
            else:
                self._wakers.append(wake)
        yield from future.__await__()
        return self._result()

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"{type(self).__name__}({self._job.codes.size} pages, {self.usable_pages} usable, {state})"

    def _result(self) -> BatchResult:
        statuses = tuple(status for status in self._job.statuses if status is not None)
        bad = next((at for at, status in enumerate(statuses) if status is not PageStatus.OK), None)
        errors = {bad: TransferError(self._job.detail, [bad])} if bad is not None and self._job.detail else {}
        return BatchResult(statuses, errors)

    def _end(self, job: Job) -> None:
        with self._changed:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
            wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        with self._owner.news:
            self._owner.news.notify_all()
        for wake in wakers:
            call_subscriber(wake)
        for callback in callbacks:
            call_subscriber(functools.partial(callback, self))


class CacheStore(CacheHandle):
    """A store under way: made by `TieredCache.store`. A page that is OK can be matched from then on."""


class CacheLoad(CacheHandle):
    """A load under way: made by `TieredCache.load`. `kvtransfer.hooks.layerwise` takes it for ``load``."""

    def __init__(self, owner: Owner, job: Job, deadline_s: float) -> None:
        super().__init__(owner, job, deadline_s)
        self._pages = int(job.codes.size)  # that it is long: see `await_submitted`
        self._parts: LayerLoad | None = None

    @property
    def number(self) -> int:
        """Of this load: `Mover.load` knows it by that, where the mover is another process."""
        return self._job.number

    @property
    def num_layers(self) -> int:
        return self._owner.num_layers

    @property
    def observer(self) -> Observer:
        return self._owner.observer

    @property
    def free_page_ids(self) -> NDArray[np.int64]:
        """Device pages behind the usable ones: what was allocated for too long a prefix. Raises TransferError before
        the load is done: until then they are its own."""
        if not self.done():
            raise TransferError("free_page_ids: expected a load that is done, got one under way; wait for it first")
        return self.page_ids[self.usable_pages :]

    def await_submitted(self, timeout_s: float | None = None) -> int:
        """Hold the caller until nothing more of it has to come from lower tiers. Returns the leading pages that are
        there or on their way to the device: the load is that long from now on, and the forward computes the rest.
        Returns at once where all lay in the host tier. Raises DeadlineExceeded."""
        sent = self._await_sent(timeout_s)
        codes = self._job.codes
        good = (codes == OK) | (sent & (codes == WAITING))
        self._pages = min(self._pages, int(good.size if good.all() else np.argmin(good)))
        return self._pages

    def wait_layer(self, layer: int, stream: Stream | None = None) -> None:
        """Make ``stream`` (default: the current one; on the CPU the calling thread) wait until ``layer`` is there.

        Holds the caller until the load has been submitted. Raises LayoutError for a layer that is not there,
        TransferError where a page of it failed, DeadlineExceeded, TransferCancelled. Read `verdict` before anything
        that the forward made is used. Where the mover is another process, wait there: `Mover.load`.
        """
        if not 0 <= layer < self.num_layers:
            raise LayoutError(f"wait_layer: expected 0 to {self.num_layers - 1}, got {layer}")
        parts = self._submitted()
        if parts is not None:
            parts.wait_layer(layer, stream)

    def wait_all(self, stream: Stream | None = None) -> None:
        """`wait_layer` for every layer at once. What a full CUDA graph needs: see `TransferHandle.wait_all`."""
        parts = self._submitted()
        if parts is not None:
            parts.wait_all(stream)

    def verdict(self, timeout_s: float | None = None) -> Verdict:
        """Hold the caller until it is done: are the pages of the load (`await_submitted`) all there and right? Read it
        before a token is emitted or KV is published; on a bad one discard the forward's output, and store nothing of
        it. ``bad_pages`` are the positions that can't be used; what did not verify is forgotten by the cache."""
        self.result(timeout_s)
        codes, first = self._job.codes[: self._pages], self._job.first
        bad = np.flatnonzero(codes != OK)
        unverified = sorted(page - first for page in self._job.unverified if page - first < self._pages)
        layers = sorted((page - first, layer) for page, layer in self._job.bad_layers if page - first < self._pages)
        return Verdict(not bad.size, tuple(bad.tolist()), tuple(layers), tuple(unverified))

    def computing(self, layer: int) -> AbstractContextManager[None]:
        """Around the work of the layer's forward; see `TransferHandle.computing`."""
        parts = self._known_parts()
        return nullcontext() if parts is None else parts.computing(layer)

    # --- inside

    def _submitted(self) -> LayerLoad | None:
        """The transfers of the load, all of them; None where nothing has to be waited for."""
        if self._parts is None and self._pages:
            sent = self._await_sent(None)
            codes = self._job.codes[: self._pages]
            failed = np.flatnonzero(((codes == WAITING) & ~sent[: self._pages]) | ((codes != OK) & (codes != WAITING)))
            if failed.size:
                raise TransferError(
                    f"load: pages at positions {failed[:8].tolist()} can't be loaded"
                    f"{': ' + self.detail if self.detail else ''}; await_submitted() says how long it is before the "
                    "forward begins",
                    failed.tolist(),
                )
            self._parts = self._known_parts()
        return self._parts

    def _known_parts(self) -> LayerLoad | None:
        """None where the mover has forgotten it: all has landed, and the host has seen that, so there is nothing that a
        stream would have to wait for."""
        try:
            return self._owner.layer_load(self.number)
        except TransferError:
            if self._job.done:
                return None
            raise

    def _await_sent(self, timeout_s: float | None) -> NDArray[np.bool_]:
        """Hold the caller until each page has a status or is on its way to the device. Which have been sent there."""
        limit = self.deadline if timeout_s is None else min(self.deadline, time.monotonic() + timeout_s)
        owner, job = self._owner, self._job
        with owner.news:
            while True:
                sent = owner.sent(job)
                if job.done or (sent | (job.codes != WAITING)).all():
                    return sent
                if owner.is_own_thread():
                    raise TransferError("a callback can't wait for what its own thread has to tell")
                left = limit - time.monotonic()
                if left <= 0:
                    missing = np.flatnonzero(~sent & (job.codes == WAITING))
                    raise DeadlineExceeded(
                        f"load: {missing.size} pages had not come from lower tiers in time", missing.tolist()
                    )
                owner.news.wait(left)
