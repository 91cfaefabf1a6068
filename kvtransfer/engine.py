"""TransferEngine: load and store pages between a device pool and host slots.

A call checks its input, records the fences of the declared streams on the caller's thread, claims its pages
and slots (so that two transfers that touch one are ordered), and returns a handle. Bulk transfers are
submitted by the engine's own thread (`kvtransfer.pump`), which keeps the call under a millisecond; a layer-wise
load by the caller, who is about to launch the forward it feeds: one launch, or one job for a thread in C.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtransfer.device_copy import DeviceCopy, device_plan
from kvtransfer.dma import CopyEngine
from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.handles import TransferHandle
from kvtransfer.host_transfer import HostTransfer
from kvtransfer.kernels import check
from kvtransfer.kernels.coalesce import Box, Side, coalesce, require_same_content
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, LayoutError, OwnershipError, TransferError
from kvtransfer.kernels.events import NO_OBSERVER, Observer, Observers, Span
from kvtransfer.kernels.ids import id_tools
from kvtransfer.lanes import CpuLanes, CudaLanes, Event, as_transfer_error
from kvtransfer.link import LinkProfile, load_profile
from kvtransfer.plan import HOST_PATHS, Facts, Plan, make_plan
from kvtransfer.pool import KVPool, Stream, is_capturing
from kvtransfer.predict import Runs, Terrain, budget_of
from kvtransfer.pump import Pump
from kvtransfer.rest import Rest, make_rest
from kvtransfer.staging import StagingRing
from kvtransfer.submitter import Submitter
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.ledger import PageLedger, claim_all
from kvtransfer.trace import NvtxObserver, nvtx_wanted, timeline_wanted
from kvtransfer.transfer import Ids, Transfer
from kvtransfer.verdict import Verdict
from kvtransfer.workshop import FlagSets, Workshop

if TYPE_CHECKING:
    from kvtransfer.timeline import Timeline

DEFAULT_STAGING_BYTES = 384 << 20
MOST_PLANS = 256  # remembered
LONGEST_DEADLINE_S = 1e6  # eleven days: what a thread can wait for is limited


class TransferEngine:
    """Moves pages between ``pool`` and ``host``, whose specs must be equal. Thread-safe.

    staging_bytes  device memory of the ring, allocated once; 0 for none. Or a `StagingRing` shared with others
    path           "auto", or one of `kvtransfer.plan.HOST_PATHS` for every transfer
    sm_budget      what a transfer may take of the GPU: "prefill" or "decode" (`kvtransfer.predict.BUDGETS`), or CTAs
                   of a mapped launch, whatever a concurrent GEMM loses by them
    profile        what the link was measured to do; None takes this machine's own (`kvtransfer tune`), or the shipped
                   figures where there is none
    compute_s_per_layer  seconds that a layer of the forward takes, for the groups of layer-wise loads; None: unknown
    verify         digests: written down by stores, compared by loads (`TransferHandle.verdict`)
    deadline_s     of each transfer, from its call, unless the call says otherwise
    script         staged transfers are handed over to a thread in C (`kvtransfer.scripted`); False, as where there is
                   no C compiler: call by call on the engine's thread
    observer       told of every stage; more may be added to ``engine.observer`` later. KVTRANSFER_NVTX=1 and
                   KVTRANSFER_TIMELINE=FILE add ours (docs/profiling.md)
    delays         CPU only: hold lanes back (tests)
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostTier,
        *,
        staging_bytes: int | StagingRing = DEFAULT_STAGING_BYTES,
        path: str = "auto",
        sm_budget: int | str = "prefill",
        verify: bool = True,
        deadline_s: float = 30.0,
        script: bool = True,
        profile: LinkProfile | None = None,
        compute_s_per_layer: float | None = None,
        observer: Observer = NO_OBSERVER,
        delays: Delays | None = None,
    ) -> None:
        require_same_content(pool.spec, host.spec)
        budget = budget_of(sm_budget)
        _require_deadline(deadline_s)
        self.compute_s_per_layer = _require_compute(compute_s_per_layer)
        if path not in ("auto", *HOST_PATHS):
            raise ConfigError(f"path: expected 'auto' or one of {', '.join(HOST_PATHS)}, got {path!r}")
        if pool.device.type not in ("cuda", "cpu"):
            raise ConfigError(f"pool: expected a CUDA or CPU device, got {pool.device}")
        on_gpu = pool.device.type == "cuda"
        if on_gpu and delays is not None:
            raise ConfigError("delays: only the CPU's lanes can be held back")
        id_tools()  # built here, not in the first call
        self.pool, self.host = pool, host
        self.deadline_s = deadline_s
        self.path = path
        self.observer = Observers(observer)
        if nvtx_wanted():
            self.observer.add(NvtxObserver())
        self.profile = load_profile(pool.device, observer=self.observer) if profile is None else profile
        if on_gpu:
            # Copies of pageable memory hold their submitter for as long as they take: not with the GIL as well.
            told = self.observer
            copier = None if host.pinned else CopyEngine.create(pool.device, keep_gil_below=0, observer=told)
            lanes: CudaLanes | CpuLanes = CudaLanes(pool.device, told, copier)
        else:
            lanes = CpuLanes(delays)
        if isinstance(staging_bytes, StagingRing):
            if staging_bytes.memory.device != pool.device:
                raise ConfigError(f"staging_bytes: expected a ring on {pool.device}, got {staging_bytes.memory.device}")
            ring: StagingRing | None = staging_bytes
        elif on_gpu or path == "staged":
            ring = StagingRing.create(pool.device, staging_bytes, self.observer)
        else:
            ring = None  # the CPU path needs none
        for memory in (*pool.buffers, host.payload, *([ring.memory] if ring is not None else [])):
            lanes.copier.register(memory)
        self._shop = Workshop(
            pool,
            host,
            lanes,
            ring,
            FlagSets(pool.device, pool.spec.num_layers) if on_gpu else None,
            budget.ctas,
            verify,
            self.observer,
            host.address + (host.device_shift(pool.device) if on_gpu and host.pinned else 0),
        )
        ends = {"load": (host.layout, pool.layout, "src"), "store": (pool.layout, host.layout, "dst")}
        if isinstance(lanes, CudaLanes) and script and ring is not None:
            word = 0 if lanes.word is None else lanes.word.data_ptr()
            with torch.cuda.device(pool.device):
                for direction in ends:
                    if (submitter := Submitter.create(lanes.copier, self.observer, word)) is not None:
                        self._shop.submitters[direction] = submitter
        self._terrain = {
            direction: Terrain(
                direction,
                pool.spec,
                coalesce(pool.spec, Side.of(source), Side.of(target), Box.whole(pool.spec), order=order),
                0 if ring is None else ring.slot_bytes,
                on_gpu,
                host.pinned,
                self.profile,
                budget,
                host.slot_bytes,
                scripted=bool(self._shop.submitters),
            )
            for direction, (source, target, order) in ends.items()
        }
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._order = threading.Lock()  # claims and queue positions of one call, as one step
        self._numbers = itertools.count(1)
        # Engines that share a ring wait for each other's slots, which a thread that rests gives back late.
        shares = isinstance(staging_bytes, StagingRing)
        self._pump = Pump(self._shop, pool.name, Rest() if shares else make_rest(lanes.copier))
        self._closed = False
        # Dropped without `close`: the thread ends after what is under way, and lets go of the pool.
        weakref.finalize(self, self._pump.close, wait=False).atexit = False
        if on_gpu:
            from kvtransfer.preload import load_kernels  # noqa: PLC0415  (Triton is only needed where there is a GPU)

            load_kernels(self._shop, host_pinned=host.pinned)
            for power in range((pool.num_pages - 1).bit_length() + 1):  # so that no call has to
                self._terrain["load"].groups(1 << power, self.compute_s_per_layer)
        self._timeline: Timeline | None = None
        wanted = timeline_wanted(pool.name)
        if wanted is not None:
            self._timeline = self._open_timeline(wanted, None, overwrite=False)
            weakref.finalize(self, self._timeline.close)  # also at the end of the process

    # -- transfers --------------------------------------------------------------------------------

    def load(
        self,
        slots: Any,
        pages: Any,
        *,
        layerwise: bool = False,
        path: str | None = None,
        deadline_s: float | None = None,
        compute_s_per_layer: float | None = None,
    ) -> TransferHandle:
        """Host ``slots`` into pool ``pages``, the i-th into the i-th. Returns once fenced, not once moved.

        slots      host slot ids on the CPU: ints, a list, numpy, a tensor
        pages      page ids likewise, distinct; or an int32/int64 tensor on the pool's device, checked there
        layerwise  layers arrive in order; wait for each with ``handle.wait_layer`` (or `kvtransfer.hooks.layerwise`)
        compute_s_per_layer  seconds that a layer of this forward takes, where it is not the engine's own

        Waits for nothing on the GPU. Raises LayoutError for bad ids before anything is written.
        """
        return self._begin("load", slots, pages, layerwise, path, deadline_s, compute_s_per_layer)

    def store(
        self,
        pages: Any,
        slots: Any,
        *,
        layerwise: bool = False,
        path: str | None = None,
        deadline_s: float | None = None,
    ) -> TransferHandle:
        """Pool ``pages`` into host ``slots`` (distinct), the i-th into the i-th; arguments as in `load`.

        ``layerwise``: nothing of a layer moves until ``handle.layer_written(layer)`` says that the work which
        writes it is enqueued. Pages and slots stay owned by the transfer until it has ended.
        """
        return self._begin("store", slots, pages, layerwise, path, deadline_s)

    def copy(
        self, src_pages: Any, target: KVPool, dst_pages: Any, *, deadline_s: float | None = None
    ) -> TransferHandle:
        """Pages of this engine's pool into ``dst_pages`` (distinct) of ``target``, a pool of the same device and spec
        (this one too, where no page is on both sides). Page ids on the CPU. Fenced against both pools' streams."""
        require_same_content(self.pool.spec, target.spec)
        if target.device != self.pool.device:
            raise LayoutError(f"copy: expected a pool on {self.pool.device}, got {target.device}")
        source = check.host_ids(src_pages, self.pool.num_pages, f"{self.pool.name} page", distinct=False)
        into = check.host_ids(dst_pages, target.num_pages, f"{target.name} page", distinct=True)
        if source.size != into.size:
            raise LayoutError(f"copy: expected as many pages on both sides, got {source.size} and {into.size}")
        if target is self.pool and np.intersect1d(source, into).size:
            raise LayoutError("copy within a pool: expected pages that are on one side only")
        handle = self._handle(device_plan(self.pool, target, source.size), deadline_s, target)
        if source.size == 0:
            handle.end(Verdict(True), 0.0, np.empty(0, dtype=np.int64))
            return handle
        fences = self._fences(self.pool)[0] + (self._fences(target)[0] if target is not self.pool else [])
        transfer = DeviceCopy(self._shop, handle, fences, source, target, into)
        self._launch(transfer, [(self.pool.ledger, source), (target.ledger, into)], here=False)
        return handle

    def plan(
        self,
        direction: str,
        slots: Any,
        pages: Any,
        *,
        layerwise: bool = False,
        path: str | None = None,
        compute_s_per_layer: float | None = None,
    ) -> Plan:
        """What `load` ("load") or `store` ("store") of these ids would do, and why: ``plan.explain()``."""
        if direction not in ("load", "store"):
            raise ConfigError(f"direction: expected 'load' or 'store', got {direction!r}")
        slot_ids, page_ids, _ = self._check(direction, slots, pages)
        return self._plan(direction, slot_ids, page_ids, layerwise, path, compute_s_per_layer)

    @contextmanager
    def timeline(self, file: str | Path, *, link_gbps: float | None = None) -> Iterator[Timeline]:
        """While open, what happens is recorded; at the end it is written to ``file`` as a Chrome/Perfetto trace.

        link_gbps  what the link can do, for the shares that ``kvtransfer timeline summarize`` prints; None takes the
                   measured profile's, or what PCIe can do in theory

        Take the results of transfers inside the block: what is not through when it ends is cut off. Not while a CUDA
        graph is captured. Raises ConfigError where the file can't be written.
        """
        timeline = self._open_timeline(file, link_gbps, overwrite=True)
        try:
            yield timeline
        finally:
            self.observer.remove(timeline)
            timeline.close()

    def close(self, drain: bool = True, timeout_s: float = 60.0) -> list[TransferHandle]:
        """Take no more transfers; ``drain`` waits for those under way, otherwise they are cancelled.

        Returns the handles of transfers that were dropped. Raises DeadlineExceeded when work in flight does not
        end in ``timeout_s``. Idempotent.
        """
        if self._pump.is_this_thread() and not self._pump.idle():
            raise TransferError("close: a callback can't wait for transfers that its own thread must end")
        with self._order:
            self._closed = True
        pending = self._pump.pending()
        dropped = [] if drain else [h for h in pending if h.cancel()]
        if not self._pump.drain(timeout_s):
            when = "with the interpreter" if self._pump.leaving else f"after {timeout_s:g} s"
            raise DeadlineExceeded(f"close: {len(self._pump.pending())} transfers had not ended {when}")
        self._pump.close()
        self._shop.lanes.close()
        if self._timeline is not None:
            self.observer.remove(self._timeline)
            self._timeline.close()
        return dropped

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    # -- inside -----------------------------------------------------------------------------------

    def _begin(
        self,
        direction: str,
        slots: Any,
        pages: Any,
        layerwise: bool,
        path: str | None,
        deadline_s: float | None,
        compute_s: float | None = None,
    ) -> TransferHandle:
        submitter = self._shop.submitters.get(direction) if layerwise and direction == "load" else None
        if submitter is not None:
            submitter.expect()  # the forward waits: its thread wakes up while the ids are checked
        slot_ids, page_ids, gpu_ids = self._check(direction, slots, pages)
        plan = self._plan(direction, slot_ids, page_ids, layerwise, path, compute_s)
        handle = self._handle(plan, deadline_s)
        if plan.pages == 0:
            if submitter is not None:
                submitter.expect(False)
            handle.end(Verdict(True), 0.0, np.empty(0, dtype=np.int64))
            return handle
        by_layer = layerwise and direction == "store"
        fences, copied = self._fences(self.pool, gpu_ids)
        transfer = HostTransfer(self._shop, handle, fences, slot_ids, page_ids, copied)
        transfer.by_caller = by_layer
        if submitter is not None and not transfer.scripted:
            submitter.expect(False)
        if by_layer:
            _LayerStore(transfer, self._shop)
        claims = [(self.pool.ledger, page_ids), (self.host.ledger, slot_ids)]
        self._launch(transfer, claims, here=layerwise and (plan.path in ("mapped", "cpu") or transfer.scripted))
        return handle

    def _handle(self, plan: Plan, deadline_s: float | None, target: KVPool | None = None) -> TransferHandle:
        if self._closed:
            raise TransferError("the engine is closed")
        deadline = self.deadline_s if deadline_s is None else _require_deadline(deadline_s)
        handle = TransferHandle(
            next(self._numbers), plan, self.pool, deadline, self.observer,
            target=target, on_engine_thread=self._pump.is_this_thread, wake_engine=self._pump.wake,
        )  # fmt: skip
        self.observer.planned(handle.number, plan.direction, plan.path, plan.pages, plan.total_bytes)
        return handle

    def _launch(self, transfer: Transfer, claims: list[tuple[PageLedger, Ids | None]], *, here: bool) -> None:
        """Claim, then submit: here, by the caller layer by layer, or on the engine's thread."""
        if self.observer.spans:
            handle, plan = transfer.handle, transfer.plan
            layers = (0, self.pool.spec.num_layers)
            span = Span("submit", handle.number, plan.direction, "", layers, plan.pages, plan.total_bytes)
            with self.observer.span(span):
                self._claim_and_submit(transfer, claims, here)
        else:
            self._claim_and_submit(transfer, claims, here)

    def _claim_and_submit(self, transfer: Transfer, claims: list[tuple[PageLedger, Ids | None]], here: bool) -> None:
        with self._order:
            if self._closed:
                raise TransferError("the engine is closed")
            try:
                transfer.earlier = self._claim(transfer, claims)
                if transfer.by_caller:
                    self._pump.watch(transfer)
                elif here and transfer.ready():
                    self._submit_here(transfer)
                else:
                    self._pump.enqueue(transfer)
            except BaseException as error:  # a KeyboardInterrupt: its pages may be claimed, and nobody would free them
                self._give_up(transfer, [ledger for ledger, _ in claims], error)
                raise

    def _give_up(self, transfer: Transfer, ledgers: list[PageLedger], error: BaseException) -> None:
        """End a transfer that its caller will never hear of: on the engine's thread, in its turn."""
        before = [ledger.before(transfer) for ledger in ledgers]
        if all(owners is None for owners in before):
            return
        transfer.handle.fail(as_transfer_error(error))
        if not transfer.in_pump:  # the interrupt may have come before it was known what it comes after
            transfer.earlier = [t for owners in before for t in owners or () if isinstance(t, Transfer)]
        self._pump.enqueue(transfer)

    def _claim(self, transfer: Transfer, claims: list[tuple[PageLedger, Ids | None]]) -> list[Transfer]:
        """The transfers that this one must come after. Others that own its ids, such as moves to and from lower tiers,
        can't be waited for in stream order: OwnershipError, and nothing is claimed."""
        earlier = claim_all(claims, transfer)
        transfers = [t for t in earlier if isinstance(t, Transfer)]
        if len(transfers) < len(earlier):
            for ledger, _ in claims:
                ledger.release(transfer)
            raise OwnershipError(
                f"{transfer.plan.direction}: expected pages and slots that are under transfers of engines alone, got "
                "some under a move between tiers; wait for its handle first"
            )
        return transfers

    def _check(self, direction: str, slots: Any, pages: Any) -> tuple[Ids, Ids | None, torch.Tensor | None]:
        """Slot ids, and page ids on the CPU or on the GPU; raises before anything has happened."""
        slot_ids = check.host_ids(slots, self.host.num_slots, "host slot", distinct=direction == "store")
        ready = self.host.ready_slots
        # While all are ready nobody looks: `max` gives the GIL away.
        if ready < self.host.num_slots and slot_ids.size and int(slot_ids.max()) >= ready:
            raise LayoutError(
                f"host slot ids: expected slots that are ready, 0 to {ready - 1}, got {int(slot_ids.max())}"
            )
        self.host.require_given_out(slot_ids)
        page_ids: Ids | None = None
        gpu_ids: torch.Tensor | None = None
        if isinstance(pages, torch.Tensor) and pages.device.type != "cpu":
            gpu_ids = check.device_ids(pages, self.pool.device, f"{self.pool.name} page")
            count = gpu_ids.numel()
        else:
            page_ids = check.host_ids(
                pages, self.pool.num_pages, f"{self.pool.name} page", distinct=direction == "load"
            )
            count = page_ids.size
        if count != slot_ids.size:
            raise LayoutError(f"{direction}: expected as many slots as pages, got {slot_ids.size} and {count}")
        return slot_ids, page_ids, gpu_ids if count else None

    def _plan(
        self, direction: str, slots: Ids, pages: Ids | None, layerwise: bool, path: str | None, compute_s: float | None
    ) -> Plan:
        facts = Facts(
            self._terrain[direction],
            slots.size,
            None if pages is None else Runs.of(slots, pages),
            Runs.of(slots),
            layerwise,
            self.compute_s_per_layer if compute_s is None else _require_compute(compute_s),
        )
        forced = self.path if path is None else path
        chosen = None if forced == "auto" else forced
        if self.observer.spans:
            spec, pages_ = self.pool.spec, slots.size
            span = Span("plan", 0, direction, "", (0, spec.num_layers), pages_, pages_ * spec.page_bytes)
            with self.observer.span(span):
                return self._remembered_plan(facts, chosen)
        return self._remembered_plan(facts, chosen)

    def _remembered_plan(self, facts: Facts, forced: str | None) -> Plan:
        """`make_plan`; the same plan again where the numbers are the same (scattered pages differ in nothing else)."""
        groups = facts.terrain.groups(facts.pages, facts.compute_s) if facts.layerwise else None
        asked = (facts.pages, facts.runs, facts.host_runs, facts.layerwise, facts.compute_s, groups)
        key = (facts.terrain.direction, forced, *asked)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make_plan(facts, forced)
        return plan

    def _open_timeline(self, file: str | Path, link_gbps: float | None, *, overwrite: bool) -> Timeline:
        from kvtransfer.timeline import Timeline  # noqa: PLC0415  (most engines never open one)

        if link_gbps is None and self._shop.on_gpu and self.profile.source == "measured":
            link_gbps = self.profile.peak_gbps["h2d"]
        timeline = Timeline(file, self.pool.device, self.pool.name, link_gbps=link_gbps, overwrite=overwrite)
        self.observer.add(timeline)
        return timeline

    def _fences(self, pool: KVPool, gpu_ids: torch.Tensor | None = None) -> tuple[list[Event], torch.Tensor | None]:
        """Events after all that the pool's streams have been given so far, and the GPU's ids copied in the caller's
        stream order, so that the caller may change its tensor at once."""
        copied = None
        streams: list[Stream] = list(pool.streams)
        if not self._shop.on_gpu:
            return [s.record() for s in streams if isinstance(s, FifoStream)], None
        current = torch.cuda.current_stream(self.pool.device.index)
        asked = {s.cuda_stream: s for s in (current, *streams) if isinstance(s, torch.cuda.Stream)}
        with torch.cuda.device(self.pool.device):
            if any(map(is_capturing, asked.values())):
                raise TransferError(
                    "load and store can't be captured into a CUDA graph: call them before the capture or the replay"
                )
            if gpu_ids is not None:
                copied = gpu_ids.to(torch.int64, copy=True)  # one width: one set of kernels
                if not pool.declares(current):
                    streams.append(current)
            return [self._shop.lanes.mark(s) for s in streams], copied

    def _submit_here(self, transfer: Transfer) -> None:
        """Submit a layer-wise load on the caller's thread: one job, one launch, or a few closures on the CPU."""
        waits = False
        try:
            with self._shop.lock:
                try:
                    transfer.start()
                    if transfer.scripted:
                        waits = not transfer.hand_over()
                    while not transfer.scripted and transfer.chunks_left and not transfer.handle.cancelled:
                        transfer.next_chunk()
                except BaseException as error:  # kept: it is the transfer's error, raised by whoever waits
                    transfer.handle.fail(as_transfer_error(error))
                    if isinstance(error, KeyboardInterrupt):  # the user's, who would wait for an end in vain
                        raise
                finally:
                    if not (transfer.handed_over or waits):
                        transfer.finish()
        finally:  # also after a KeyboardInterrupt: its pages are claimed
            (self._pump.enqueue if waits else self._pump.watch)(transfer)


class _LayerStore:
    """A layer-wise store in the hands of its caller: each layer leaves when it is said to be written."""

    def __init__(self, transfer: Transfer, shop: Workshop) -> None:
        self._transfer, self._shop = transfer, shop
        self._written: set[int] = set()
        transfer.handle._write_layer = self

    def __call__(self, layer: int, stream: Stream | None) -> None:
        transfer, shop = self._transfer, self._shop
        handle = transfer.handle
        event = None if stream is None else shop.lanes.mark(stream)
        submitted_before = self._follows_all()
        with shop.lock:
            if layer in self._written:
                raise TransferError(f"layer_written: expected each layer once, got {layer} again")
            if not submitted_before or handle.failed or handle.cancelled or handle.final_event is not None:
                return  # given up: what the layer holds is not wanted any more
            self._written.add(layer)
            try:
                if not transfer.started:
                    transfer.start()
                if event is not None:
                    for lane in {transfer.kernel_lane, transfer.copy_lane}:
                        shop.lanes.wait(lane, event)
                for chunk in transfer.plan.chunks:
                    if chunk.box.layer_start == layer:
                        transfer.submit(chunk)
                if len(self._written) == shop.pool.spec.num_layers:
                    transfer.finish()
            except BaseException as error:  # kept: it is the transfer's error
                handle.fail(as_transfer_error(error))
                transfer.finish()
                if isinstance(error, KeyboardInterrupt):
                    raise

    def _follows_all(self) -> bool:
        """Hold the caller until every earlier transfer of these pages or slots is submitted, so that this one can be
        ordered behind it. False when it was given up meanwhile."""
        handle = self._transfer.handle
        for other in list(self._transfer.earlier):
            while not self._passed(other):
                if handle.failed or handle.cancelled or handle.expired():
                    return False
        return True

    def _passed(self, other: Transfer) -> bool:
        """Whether this transfer can be submitted as far as ``other`` goes; looks for a moment."""
        if self._transfer.waits_by_event(other):
            return other.handle.await_submitted(0.05)
        time.sleep(0.0 if other.handle.done() else 0.001)
        return other.handle.done()


def _require_deadline(deadline_s: float) -> float:
    if not deadline_s > 0:
        raise ConfigError(f"deadline_s: expected more than 0, got {deadline_s}")
    if deadline_s > LONGEST_DEADLINE_S:
        raise ConfigError(f"deadline_s: expected at most {LONGEST_DEADLINE_S:g}, got {deadline_s}")
    return deadline_s


def _require_compute(compute_s: float | None) -> float | None:
    if compute_s is not None and not 0 < compute_s < float("inf"):
        raise ConfigError(f"compute_s_per_layer: expected seconds above 0, got {compute_s}")
    return compute_s
