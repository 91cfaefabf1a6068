"""Templates: the jobs of staged transfers, written down once for each shape of transfer and re-used.

A `Template` is what depends on the plan alone: commands, kernel parameters and page lists of every chunk. A `Desk` is
memory and events for one job at a time: page ids on both sides, digests, an event a chunk. A template laid out on a
desk (`Desk.bind`) is a job but for the ring slots, which `Bound.job` fills in with a few numpy calls.

Of each chunk a load is: wait for the ring slot, copy its host pages there, scatter, and an event that makes its layers
ready; a store gathers first and copies then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from kvtransfer.descriptors import piece_offsets
from kvtransfer.fifo import FifoEvent
from kvtransfer.kernels.coalesce import Box, Geometry
from kvtransfer.kernels.launch import relayout_grid
from kvtransfer.kernels.relayout import tile_constants
from kvtransfer.lanes import CudaEvent, CudaLanes, Event, lanes_of
from kvtransfer.plan import Chunk
from kvtransfer.staging import RingSlot
from kvtransfer.submitter import (
    CHUNK,
    COMMAND_WORDS,
    COPY,
    LAUNCH,
    NONE,
    PACE,
    PAGES,
    PAGES_WORDS,
    RECORD,
    U64,
    WAIT,
    ZERO,
    Job,
)
from kvtransfer.workshop import Workshop

CHUNKS_AHEAD = 8  # submitted and not through: more than a job has ring slots, few enough to cancel
# The copy engine begins when a driver call returns, which takes 1 to 4 us a descriptor: the first chunks of a load are
# handed over in small parts. On an H200 the link idled for 0.5 ms behind the first chunk without that.
HASTY_CHUNKS, HASTY_DESCRIPTORS = 2, 16
LEAST_PAGES = 256  # of a desk
MOST_BOUND = 16  # templates laid out on one desk

# The commands of a chunk, by row. A load copies first and launches then, a store the other way round.
_PACE, _SLOT, _FIRST, _COPIED, _AFTER, _SECOND, _DONE, _COUNTED = range(8)
_ROWS = 8
_EVENT, _POINTER, _PARAMETERS = 2, 2, 4  # columns of a command: what is recorded or waited for, pointed to, passed
MOST_WAITS = 16  # rows of a job for what must have passed before it: fences, and transfers before it
_PROLOGUE, _EPILOGUE = MOST_WAITS + 3, 4  # commands before the first chunk and after the last one
_COLUMN = {name: i for i, name in enumerate(PAGES_WORDS)}
# Parameters of the relayout kernel that are filled in, by position: (ring shift, ids), and the digests.
_LOAD_PARAMETERS, _STORE_PARAMETERS, _DIGESTS = (1, 4), (2, 3), 9


def variant(shop: Workshop, kind: str, box: Box) -> tuple[object, ...]:
    """Under which `Workshop.launches` holds the compiled kernel of a box."""
    table = shop.geometry(kind, box)[1]
    assert table is not None
    return (kind, *tile_constants(table).items())


class Template:
    """The job of every staged transfer with these chunks, in one direction, but for ids, slots and events.

    ``launchable``: whether the kernel of every chunk was preloaded in the form that a job launches.
    """

    def __init__(self, shop: Workshop, load: bool, chunks: Sequence[Chunk]) -> None:
        lanes = shop.lanes
        assert isinstance(lanes, CudaLanes)
        kind = "ring>pool" if load else "pool>ring"
        self.load, self.chunks = load, tuple(chunks)
        variants = {box: variant(shop, kind, box) for box in dict.fromkeys(c.box for c in chunks)}
        self.launchable = all(v in shop.launches for v in variants.values())
        if not self.launchable:
            return
        self.copy, self.kernel = (lanes.streams[lane].cuda_stream for lane in lanes_of(load))
        self.firsts = np.array([c.first for c in chunks], dtype=np.int64)
        self.keep: list[object] = []
        self.pages: U64 = np.zeros((len(chunks), len(PAGES_WORDS)), dtype=np.uint64)
        self.commands: U64 = np.zeros((len(chunks), _ROWS, COMMAND_WORDS), dtype=np.uint64)
        self.commands[:, :, 0] = [
            PACE, WAIT, *((PAGES, RECORD, WAIT, LAUNCH) if load else (LAUNCH, RECORD, WAIT, PAGES)), RECORD, CHUNK
        ]  # fmt: skip
        before, after = (self.copy, self.kernel) if load else (self.kernel, self.copy)
        self.before, self.after = before, after
        self.commands[:, :, 1] = [0, before, before, before, after, after, after, 0]
        self.commands[:, _COUNTED, 2] = np.arange(1, len(chunks) + 1)
        self.launch_row, self.copy_row = (_SECOND, _FIRST) if load else (_FIRST, _SECOND)
        shapes = np.zeros((len(chunks), 5), dtype=np.uint32)
        values: list[list[int]] = []
        for i, chunk in enumerate(chunks):
            table = shop.geometry(kind, chunk.box)[1]
            assert table is not None
            launch = shop.launches[variants[chunk.box]]
            tiles = -(-chunk.count // table.tile.pages) * -(-table.unit_words // table.tile.words)
            shapes[i] = launch.shape(relayout_grid(tiles, table.num_entries))
            spare = table.layer_rows.data_ptr()
            layers = shop.pool.spec.num_layers if shop.verify else 1
            firsts = (0, chunk.first) if load else (chunk.first, 0)
            arguments = [table.rows.data_ptr(), 0, 0, spare, spare, *firsts, chunk.count, spare, spare, layers]
            values.append(launch.values(arguments))
            self.commands[i, self.launch_row, 2] = launch.function
            self.pages[i] = self._pages(shop, chunk)
        if load:
            self.pages[:HASTY_CHUNKS, _COLUMN["most"]] = HASTY_DESCRIPTORS
        self.values: U64 = np.array(values, dtype=np.uint64)
        self.keep.append(shapes)
        self.commands[:, self.launch_row, 3] = shapes.ctypes.data + shapes.strides[0] * np.arange(len(chunks))

    def _pages(self, shop: Workshop, chunk: Chunk) -> list[int]:
        geometry, _ = shop.geometry("host>ring" if self.load else "ring>host", chunk.box, build=False)
        pieces, host_stride, ring_stride = _pieces(geometry, self.load)
        cuts = shop.boundaries
        self.keep += [pieces, cuts]
        return [0, chunk.first, chunk.count, shop.host_address, host_stride, 0, ring_stride, pieces.ctypes.data,
                len(pieces), cuts.ctypes.data, len(cuts), int(self.load), 0, 0]  # fmt: skip


class Desk:
    """Memory and events for one job at a time, of at most ``pages`` pages.

    slots, ids   int64 [pages]: host slots, and pool pages (pinned, copied to ``ids_there`` by the job)
    digests      int64 [pages, layers] on the device, zeroed by the job and copied back to ``digests_back`` (pinned);
                 None without verification
    begin, end   timing events before the first copy and after the last one
    """

    def __init__(self, shop: Workshop, pages: int) -> None:
        device, layers = shop.pool.device, shop.pool.spec.num_layers
        self.pages = max(LEAST_PAGES, 1 << (pages - 1).bit_length())
        self.slots = np.zeros(self.pages, dtype=np.int64)
        self._ids = torch.zeros(self.pages, dtype=torch.int64, pin_memory=True)
        self.ids = self._ids.numpy()
        self.digests: torch.Tensor | None = None
        self.digests_back: torch.Tensor | None = None
        lanes = shop.lanes
        assert isinstance(lanes, CudaLanes)
        with lanes.aside():
            self.ids_there = torch.empty(self.pages, dtype=torch.int64, device=device)
            if shop.verify:
                self.digests = torch.empty(self.pages, layers, dtype=torch.int64, device=device)
                self.digests_back = torch.zeros(self.pages, layers, dtype=torch.int64, pin_memory=True)
            aside = torch.cuda.current_stream(device)
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for event in (self.begin, self.end):
                event.record(aside)  # makes the driver's handle; the job records it again
            self._new_event = functools.partial(lanes.mark, aside)
            self._between = self._new_event()
            aside.synchronize()
        self._events: list[CudaEvent] = []
        self._bound: dict[int, Bound] = {}

    def events(self, count: int) -> list[CudaEvent]:
        """Events of the first ``count`` chunks."""
        while len(self._events) < count:
            self._events.append(self._new_event())
        return self._events[:count]

    def bind(self, template: Template, pages: int) -> Bound:
        """``template``, for ``pages`` pages, laid out here. The same one again while the desk remembers it."""
        bound = self._bound.get(id(template))
        if bound is None or bound.template is not template:
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            bound = self._bound[id(template)] = Bound(self, template, pages)
        return bound


class Bound:
    """A template on a desk."""

    def __init__(self, desk: Desk, template: Template, pages: int) -> None:
        self.template = template
        chunks = len(template.chunks)
        self.events = desk.events(chunks)
        self.chunks: list[tuple[Chunk, Event]] = list(zip(template.chunks, self.events, strict=True))
        self.pages, self.values = template.pages.copy(), template.values.copy()
        done = np.array([e.cuda_event for e in self.events], dtype=np.uint64)
        self.pages[:, _COLUMN["ids"]] = desk.slots.ctypes.data
        self.shift, ids = _LOAD_PARAMETERS if template.load else _STORE_PARAMETERS
        self.values[:, ids] = desk.ids_there.data_ptr()
        if desk.digests is not None:
            row_bytes = desk.digests.stride(0) * desk.digests.element_size()
            self.values[:, _DIGESTS] = desk.digests.data_ptr() + row_bytes * template.firsts
        self.parameters: U64 = self.values.ctypes.data + 8 * np.arange(self.values.size, dtype=np.uint64)
        self.all: U64 = np.zeros((_PROLOGUE + _ROWS * chunks + _EPILOGUE, COMMAND_WORDS), dtype=np.uint64)
        self.commands = self.all[_PROLOGUE : _PROLOGUE + _ROWS * chunks].reshape(chunks, _ROWS, COMMAND_WORDS)
        self.commands[:] = template.commands
        rows = np.arange(chunks)
        self.commands[:, template.copy_row, _POINTER] = self.pages.ctypes.data + self.pages.strides[0] * rows
        row_words = self.values.shape[1]
        self.commands[:, template.launch_row, _PARAMETERS] = self.parameters.ctypes.data + 8 * row_words * rows
        self.commands[:, [_COPIED, _AFTER], _EVENT] = desk._between.cuda_event
        self.commands[:, _DONE, _EVENT] = done
        self.commands[:CHUNKS_AHEAD, _PACE, 0] = NONE
        self.commands[CHUNKS_AHEAD:, _PACE, _EVENT] = done[: max(0, chunks - CHUNKS_AHEAD)]
        self._done, self._turn = done, rows
        start: list[list[int]] = [[COPY, template.kernel, desk.ids_there.data_ptr(), desk.ids.ctypes.data, 8 * pages]]
        stop: list[list[int]] = []
        if desk.digests is not None and desk.digests_back is not None:
            nbytes = desk.digests.stride(0) * desk.digests.element_size() * pages
            start.append([ZERO, template.kernel, desk.digests.data_ptr(), nbytes])
            stop.append([COPY, template.after, desk.digests_back.data_ptr(), desk.digests.data_ptr(), nbytes])
        start.append([RECORD, template.before, desk.begin.cuda_event])
        stop.append([RECORD, template.after, desk.end.cuda_event])
        for at, row in [*enumerate(start, MOST_WAITS), *enumerate(stop, len(self.all) - _EPILOGUE)]:
            self.all[at, : len(row)] = row
        self._final = self.all[-2]
        self._final[:2] = RECORD, template.after
        self.all[-1, :3] = CHUNK, 0, chunks + 1

    def job(
        self,
        slots: Sequence[RingSlot],
        final: CudaEvent,
        any_order: bool,
        waits: Sequence[tuple[int, int]] = (),
    ) -> Job:
        """The job over these ring slots. ``final`` is recorded last. Chunk number chunks + 1 says that all is there.

        ``waits``: (stream, event) as raw handles, at most `MOST_WAITS`: which streams wait for what before all else.
        """
        held, chunks = len(slots), len(self.events)
        ring = np.array([s.address for s in slots], dtype=np.uint64)[self._turn % held]
        self.pages[:, _COLUMN["ring"]] = self.values[:, self.shift] = ring
        self.pages[:, _COLUMN["any_order"]] = any_order
        free = self.commands[:, _SLOT]
        free[:, 0] = WAIT
        free[held:, _EVENT] = self._done[: max(0, chunks - held)]
        for row, slot in zip(free, slots, strict=False):  # there may be fewer chunks
            if slot.free is None:
                row[0] = NONE
            else:
                assert not isinstance(slot.free, FifoEvent)
                row[_EVENT] = slot.free.cuda_event
        self._final[_EVENT] = final.cuda_event
        self.all[:MOST_WAITS, 0] = NONE
        for at, (stream, event) in enumerate(waits):
            self.all[at, : _EVENT + 1] = WAIT, stream, event
        return Job(self.all, (self, slots, final))


def _pieces(geometry: Geometry, load: bool) -> tuple[U64, int, int]:
    """(rows of host offset, ring offset, bytes: a page's pieces; host stride, ring stride)."""
    rows = []
    strides = set()
    for e in geometry.merged:
        src, dst = piece_offsets(e)
        host, ring = (e.src_offset + src, e.dst_offset + dst) if load else (e.dst_offset + dst, e.src_offset + src)
        rows += [(h, r, e.piece_bytes) for h, r in zip(host.tolist(), ring.tolist(), strict=True)]
        strides.add((e.src_page_stride, e.dst_page_stride) if load else (e.dst_page_stride, e.src_page_stride))
    ((host_stride, ring_stride),) = strides  # both sides are one buffer of whole pages
    return np.array(rows, dtype=np.uint64), host_stride, ring_stride
