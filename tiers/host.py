"""HostTier: slots of pinned host memory that hold pages, each with its record header.

The memory is a slab with two regions (slab.py): neighbouring slots merge into one plain copy, and lower
tiers move a record as two buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.check import host_ids
from kvtransfer.kernels.errors import (
    CapacityError,
    ConfigError,
    LayoutError,
    OwnershipError,
    RecordError,
    TierError,
)
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.extents import Extents, Fragmentation
from kvtransfer.tiers.ledger import PageLedger
from kvtransfer.tiers.memory import HugePages, gpu_numa_node
from kvtransfer.tiers.pinning import Registrar, choose_registrar
from kvtransfer.tiers.record import (
    DIGESTS_OFFSET,
    NOTHING_STORED,
    RecordHeader,
    decode,
    padded_bytes,
    payload_checksum,
    trailer_bytes,
    verify_payload,
)
from kvtransfer.tiers.sizing import MemoryLimits, plan_host_size, read_limits
from kvtransfer.tiers.slab import Slab

Slots = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor | int
_View = TypeVar("_View", torch.Tensor, NDArray[np.uint8])


class HostTier:
    """Slots of host memory for pages of ``spec``. Thread-safe.

    Args:
        capacity_pages | capacity_bytes: exact number of slots, or bytes for payloads and trailers together, of
            this process; neither: what the machine and its cgroups leave (sizing.py).
        most_pages | most_bytes: what `resize` may grow to later: only addresses are taken for that now. Neither: the
            capacity.
        device: the GPU whose NUMA node the memory should be near, and whose runtime pins it.
        pin: register with CUDA; None: where there is a CUDA device and ``device`` is not another kind. CUDA does
            not charge RLIMIT_MEMLOCK, so that limit refuses only a registrar that says it does.
        shared: a memfd instead of anonymous memory, so that other processes can `attach`. Nothing is left behind
            in /dev/shm, whatever way the processes end.
        huge_pages: True asks for transparent huge pages; "reserved" takes hugetlb pages.
        threads: for the first touch (at most 8 unless told otherwise).
        background: return at once and grow in a thread: `ready_slots` rises, `allocate` gives out what is ready,
            a failure is raised by every `allocate` and `wait_ready` from then on, or else by `close`.
        chunk_bytes: most bytes in one CUDA registration, and what `resize` gives back at a time.
        registrar, limits: stand-ins for CUDA and for what the machine allows.

    Attributes:
        num_slots, slot_bytes, trailer_bytes: how many at most; bytes of one padded payload and of one trailer.
        address: of slot 0's payload in host memory; slot s lies ``s * slot_bytes`` behind it.
        pinned, pin_reason, numa_node: whether it is registered, why (not), and the node asked for.
        layout: page-first over `payload`, one page a slot.
        ledger: which slots are under a transfer.
        chunk_slots, trailer_chunk_slots: int64 arrays, the first slot of each registered chunk of that region
            but its first. One copy must not reach across such a boundary: runs of neighbours are cut there.

    A forked child does not have the memory (MADV_DONTFORK): touching a view there ends the child.
    Raises ConfigError on arguments that don't fit, CapacityError where memory does not suffice, CudaError
    where registration fails (everything is undone then).
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        capacity_pages: int | None = None,
        capacity_bytes: int | None = None,
        most_pages: int | None = None,
        most_bytes: int | None = None,
        device: torch.device | str | None = None,
        pin: bool | None = None,
        shared: bool = False,
        huge_pages: HugePages = True,
        threads: int | None = None,
        background: bool = False,
        chunk_bytes: int = 64 << 30,
        name: str = "host",
        observer: Observer = NO_OBSERVER,
        registrar: Registrar | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: expected at least 1, got {threads}")
        chosen = self._prepare(spec, device, pin, registrar, name, observer)
        plan = plan_host_size(
            slot_bytes=self.slot_bytes,
            trailer_bytes=self.trailer_bytes,
            limits=read_limits() if limits is None else limits,
            requested_slots=capacity_pages,
            requested_bytes=capacity_bytes,
            reserved_huge=huge_pages == "reserved",
            locked=chosen is not None and chosen.needs_memlock,
        )
        observer.noted("host.size", name=name, message=plan.message)
        most = plan.num_slots if most_pages is None else most_pages
        if most_bytes is not None:
            most = most_bytes // (self.slot_bytes + self.trailer_bytes)
        if most < plan.num_slots or None not in (most_pages, most_bytes):
            raise ConfigError(
                f"most_pages or most_bytes: expected one of them, and at least the capacity of {plan.num_slots} slots, "
                f"got {most_pages} and {most_bytes}"
            )
        slab = Slab(
            most,
            self.slot_bytes,
            self.trailer_bytes,
            registrar=chosen,
            node=self.numa_node,
            shared=shared,
            huge_pages=huge_pages,
            threads=threads,
            background=background,
            chunk_bytes=chunk_bytes,
            first_slots=plan.num_slots,
            name=name,
            observer=observer,
        )
        self._adopt(slab)

    @classmethod
    def attach(
        cls,
        fd: int,
        spec: KVSpec,
        *,
        num_slots: int,
        device: torch.device | str | None = None,
        pin: bool | None = None,
        chunk_bytes: int = 64 << 30,
        name: str = "host",
        observer: Observer = NO_OBSERVER,
        registrar: Registrar | None = None,
    ) -> HostTier:
        """Another process's slab, from its memfd (``fd`` is duplicated; the caller keeps its own).

        ``spec`` and ``num_slots`` must be the maker's; a memfd of another length is refused. The maker alone
        gives slots out: `allocate` and `free` raise here. Attach once the maker's slab is ready.
        """
        tier = cls.__new__(cls)
        chosen = tier._prepare(spec, device, pin, registrar, name, observer)
        tier._attached = True
        slab = Slab(
            num_slots,
            tier.slot_bytes,
            tier.trailer_bytes,
            registrar=chosen,
            fd=fd,
            chunk_bytes=chunk_bytes,
            name=name,
            observer=observer,
        )
        tier._adopt(slab)
        return tier

    def _prepare(
        self,
        spec: KVSpec,
        device: torch.device | str | None,
        pin: bool | None,
        registrar: Registrar | None,
        name: str,
        observer: Observer,
    ) -> Registrar | None:
        """Everything that is known before there is memory; returns what will pin it."""
        self.spec = spec
        self.name = name
        self.slot_bytes = padded_bytes(spec.page_bytes)
        self.trailer_bytes = trailer_bytes(spec)
        self._attached = False
        self._closed = False
        self._lock = threading.Lock()
        self._resizing = threading.Lock()
        where = None if device is None else torch.device(device)
        chosen, self.pin_reason = choose_registrar(where, pin, registrar)
        self.pinned = chosen is not None
        if chosen is None and pin is None:
            observer.fell_back("pin", f"{name}: not pinned: {self.pin_reason}")
        self.numa_node = gpu_numa_node(where, observer)
        return chosen

    def _adopt(self, slab: Slab) -> None:
        """The books of the slab's slots."""
        self._slab = slab
        self._limit = self.num_slots = slab.num_slots
        self.address = slab.address
        self.chunk_slots, self.trailer_chunk_slots = slab.chunk_slots, slab.trailer_chunk_slots
        self.layout = Layout.page_first(self.spec, slab.num_slots, page_stride_bytes=self.slot_bytes)
        self.ledger = PageLedger(slab.num_slots, "host slot")
        self._extents = Extents(slab.num_slots, 0, "host slot")
        blank = np.zeros(DIGESTS_OFFSET // 8 + self.spec.num_layers, dtype=np.uint64)
        blank[DIGESTS_OFFSET // 8 :] = NOTHING_STORED
        self._blank = blank.view(np.uint8)  # how a new slot's trailer begins: no header, digests of nothing
        self._gives_out = False

    # --- slots

    @property
    def ready_slots(self) -> int:
        """Slots that can be used now: 0 to this, less one."""
        return min(self._slab.ready_slots, self._limit)

    @property
    def grows(self) -> bool:
        """Whether slots become ready by themselves, in the background."""
        return self._slab.ready_slots < self._slab.goal_slots

    @property
    def free_slots(self) -> int:
        """Ready slots that are not given out."""
        with self._lock:
            return self._grown().free_slots

    def wait_ready(self, timeout_s: float | None = None, *, slots: int | None = None) -> bool:
        """Wait until ``slots`` (all that there are to be, unless told otherwise) are ready; False when the time is up.

        Raises TierError or CapacityError if growing failed.
        """
        goal = self._slab.goal_slots
        return self._slab.wait_ready(goal if slots is None else min(slots, goal), timeout_s)

    def allocate(self, n: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Take ``n`` slots: int64 ids that own their storage, in runs as long as can be.

        ``after`` is the slot that they should follow (the last one of the prefix that they extend). The slots'
        headers are wiped and their digests say that nothing is stored. A store that grows should take slots in
        blocks of a few MiB, and free what it did not fill: slot by slot, stores that grow at once cut each other's
        runs off. Raises CapacityError if fewer are free and ready: nothing is taken then.
        """
        with self._lock:
            self._check_maker("allocate")
            self._slab.check()
            slots = self._grown().allocate(n, after)
            self.trailers[slots, : self._blank.size] = self._blank
            self._gives_out = True
            return slots

    def free(self, slots: Slots, *, wait_s: float = 0.0) -> None:
        """Give slots back: all of them, or none.

        Waits up to ``wait_s`` for transfers that own some. Raises OwnershipError, naming slots, for one that is
        free already, named twice, or owned still when the time is up; LayoutError for one out of range.
        """
        ids = host_ids(slots, self.num_slots, "host slot", distinct=False)
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                self._check_maker("free")
                extents = self._grown()
                if not self.ledger.busy(ids).any():
                    extents.free(ids)
                    return
                extents.check(ids)
            self.ledger.require_free(ids, max(0.0, deadline - time.monotonic()))

    def is_allocated(self, slots: Slots) -> NDArray[np.bool_]:
        """For each slot, whether it is given out."""
        ids = host_ids(slots, self.num_slots, "host slot", distinct=False)
        with self._lock:
            return self._extents.taken(ids)

    def require_given_out(self, slots: NDArray[np.int64]) -> None:
        """OwnershipError, naming slots, for one that is not given out. Who never called `allocate` keeps books of his
        own, as do processes that are attached: nothing is refused then."""
        with self._lock:
            if self._gives_out and not self._extents.all_taken(slots):
                stale = slots[~self._extents.taken(slots)]
                raise OwnershipError(
                    f"expected host slots that are given out, got {stale[:8].tolist()}"
                    f"{' ...' if stale.size > 8 else ''}, which are free; allocate() them first"
                )

    def fragmentation(self) -> Fragmentation:
        """How the free slots lie: runs, the largest, and the share outside it."""
        with self._lock:
            return self._grown().fragmentation()

    # --- memory

    def resize(self, slots: int, *, wait_s: float = 30.0) -> int:
        """Have the first ``slots`` from now on, of at most `num_slots`. Bytes given back (0 when it grows).

        *Fewer*: the others must be free (`free`); it waits up to ``wait_s`` for transfers that own some. Chunks that
        hold only others are unregistered and go back to the system: ``chunk_bytes`` is the grain. Tiers that were told
        of that memory must have been told that it goes (`host_size.resize_host` does both); a process that is attached
        resizes its own first. *More*: touched and registered by the calling thread (about 0.3 s/GiB), or waited for
        where the tier grows by itself. Addresses never change, nor what lies in slots that stay.

        Raises CapacityError on a size that can't be had, OwnershipError, naming slots, if some are in use, TierError
        if it still grows by itself when the time is up: nothing has changed then. CudaError where registering failed
        (undone), or unregistering (the slots are gone all the same).
        """
        with self._resizing:
            if self._closed:
                raise TierError(f"{self.name}: closed")
            if not 1 <= slots <= self.num_slots:
                raise CapacityError(f"{self.name}: expected a size of 1 to {self.num_slots} slots, got {slots}")
            ready, goal = self.ready_slots, self._slab.goal_slots
            on_its_way = ready < slots <= goal
            if not self._slab.wait_ready(slots if on_its_way else goal, wait_s):
                raise TierError(f"{self.name}: expected it to have grown within {wait_s:g} s, got {self.ready_slots}")
            if on_its_way:
                return 0
            if slots < goal:
                return self._shrink(slots, wait_s)
            self._slab.grow(slots)
            with self._lock:
                self.ledger.limit(self.num_slots, 0.0)
                self._limit = self.num_slots
            return 0

    def _shrink(self, slots: int, wait_s: float) -> int:
        with self._lock:
            extents, before = self._grown(), self._limit
            others = np.arange(slots, extents.ready)
            if (taken := others[extents.taken(others)]).size:
                raise OwnershipError(
                    f"{self.name}: expected that slots from {slots} on are free, got {taken[:8].tolist()}"
                    f"{' ...' if taken.size > 8 else ''} in use; free them first"
                )
            self._limit = slots
            extents.shrink(slots)
        try:
            self.ledger.limit(slots, wait_s)
        except OwnershipError:
            with self._lock:
                self._limit = before
                self._grown()
            raise
        return self._slab.shrink(slots)

    def parts(self, first: int = 0) -> list[NDArray[np.uint8]]:
        """The memory that there is (or is to be, in the background), as flat views of chunks, payload and trailers; no
        copy. No slot straddles two. ``first``: only those that hold no slot below it: what `resize` to so many gives
        back."""
        return self._slab.parts(first)

    def copy(self, read: Slots, slots: Slots, *, wait_s: float = 1.0) -> None:
        """Copy whole records, payload and trailer, from the slots ``read`` to as many others.

        Blocks, on the calling thread. The caller sees to it that nobody writes or frees what is read; what is written
        is in the ledger meanwhile. Raises OwnershipError if a transfer owns some of that still after ``wait_s``.
        """
        sources = host_ids(read, self.ready_slots, "host slot", distinct=False)
        targets = host_ids(slots, self.ready_slots, "host slot", distinct=True)
        if sources.size != targets.size or np.isin(targets, sources).any():
            raise LayoutError(
                f"copy: expected as many slots as are read, and none of those, got {sources[:8].tolist()} to "
                f"{targets[:8].tolist()}"
            )
        owner = object()
        self.ledger.require_free(targets, wait_s)
        try:
            if self.ledger.claim(targets, owner):
                raise OwnershipError(f"copy: expected slots of the caller's, got a transfer to {targets[:8].tolist()}")
            rows, trailers = self.rows, self.trailers
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                rows[target] = rows[source]
                trailers[target] = trailers[source]
        finally:
            self.ledger.release(owner)

    @property
    def payload(self) -> torch.Tensor:
        """The payload region, uint8 ``[num_slots * slot_bytes]``; no copy.

        A view that outlives `close` stays readable, but is pinned no more.
        """
        return self._open(self._slab.payload)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The payload region, uint8 ``[num_slots, slot_bytes]``; no copy, and no tensor: for views that any thread may
        drop."""
        return self._open(self._slab.rows)

    @property
    def trailers(self) -> NDArray[np.uint8]:
        """The trailer region, uint8 ``[num_slots, trailer_bytes]``; no copy."""
        return self._open(self._slab.trailers)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """The GPU digests inside the trailers, uint64 ``[num_slots, layers]``, strided; no copy.

        Zeros: the page has none, so nothing is known of it; whoever fills a slot by hand sets that. `NOTHING_STORED`
        in all: a new slot, or one that a failed store or a bad digest left unusable; loads of it do not verify.
        """
        words: NDArray[np.uint64] = self.trailers.view(np.uint64)
        return words[:, DIGESTS_OFFSET // 8 : DIGESTS_OFFSET // 8 + self.spec.num_layers]

    @property
    def fd(self) -> int:
        """The memfd to pass to another process (see `attach`)."""
        if self._slab.fd < 0:
            raise ConfigError(f"{self.name}: expected a slab made with shared=True, got one without a descriptor")
        return self._slab.fd

    def record(self, slot: int) -> RecordBuffer:
        """The slot's two buffers, padding included: what a lower tier reads into or writes from."""
        at = self._one(slot)
        return RecordBuffer(self.rows[at], self.trailers[at])

    def device_shift(self, device: torch.device | str | None = None) -> int:
        """What a kernel adds to a host address of this slab: 0 where addressing is unified, and on the CPU.

        Raises CudaError where chunks differ in that: such a slab can be moved by the copy engine only.
        """
        on_cpu = device is not None and torch.device(device).type != "cuda"
        return 0 if on_cpu else self._slab.device_shift()

    # --- records

    def seal(self, slots: Slots, headers: Sequence[RecordHeader], *, checksum: bool = True) -> None:
        """Write each slot's header into its trailer, once the payload is complete (its store acknowledged).

        A header without a payload checksum gets one computed here, on the calling thread, unless
        ``checksum=False``. A header without layer digests keeps those that the transfer left in `digests` (all
        zero: none). Raises RecordError, before anything is written, on a header that does not fit the spec.
        """
        ids = host_ids(slots, self.ready_slots, "host slot", distinct=True)
        busy = ids[self.ledger.busy(ids)]
        if busy.size:
            raise OwnershipError(
                f"seal: expected slots that no transfer owns, got {busy[:8].tolist()}: wait for the handle"
            )
        trailers, digests = self.trailers, self.digests
        if len(ids) != len(headers):
            raise RecordError(f"seal: expected one header a slot, got {len(headers)} for {len(ids)} slots")
        for header in headers:
            header.check_fits(self.spec)
        for slot, header in zip(ids.tolist(), headers, strict=True):
            if header.layer_digests is None and digests[slot].any() and not (digests[slot] == NOTHING_STORED).all():
                header = replace(header, layer_digests=tuple(digests[slot].tolist()))
            if checksum and header.payload_xxh3 is None:
                header = replace(header, payload_xxh3=payload_checksum(self._page(slot)))
            header.encode_into(trailers[slot])

    def header(self, slot: int) -> RecordHeader:
        """The slot's header. Raises RecordError if it was never sealed, or is damaged."""
        return decode(self.trailers[self._one(slot)])

    def verify(self, slot: int) -> RecordHeader:
        """`header`, with the payload checked against it. Raises RecordError: the page is a miss then."""
        header = self.header(slot)
        verify_payload(header, self._page(self._one(slot)))
        return header

    # --- end

    def close(self, *, wait_s: float = 30.0) -> None:
        """Stop growing, unregister (the last chunk first), unmap. Does nothing the second time.

        Waits up to ``wait_s`` for transfers that own slots; if some still do, raises OwnershipError, and nothing
        is closed. Raises what unregistering met, or a background failure that nobody has seen, after all is
        released. Views that the caller holds keep the memory mapped until the last one goes.
        """
        with self._lock:
            if self._closed:
                return
        self.ledger.shut(wait_s)  # no transfer can claim a slot from here on
        with self._resizing:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
            self._slab.close()

    def __enter__(self) -> HostTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _grown(self) -> Extents:
        """The allocator, told of the slots that became ready. The caller holds the lock."""
        self._extents.grow(self.ready_slots)
        return self._extents

    def _one(self, slot: int) -> int:
        return int(host_ids(slot, self.ready_slots, "host slot", distinct=False)[0])

    def _page(self, slot: int) -> NDArray[np.uint8]:
        """The payload without its padding."""
        return self.rows[slot, : self.spec.page_bytes]

    def _check_maker(self, verb: str) -> None:
        if self._closed:
            raise TierError(f"{self.name}: closed")
        if self._attached:
            raise TierError(f"{self.name}: {verb} belongs to the process that made the slab; this one is attached")

    def _open(self, view: _View | None) -> _View:
        if view is None:
            raise TierError(f"{self.name}: closed")
        return view
