"""A GPU of streams and events in Python, for the submitter's jobs: whatever may overlap is done in random order.

The engine, its thread and the worker in C are the real ones. Only the driver below them is ours: a copy, a launch or a
record is put on its stream, a thread takes the head of any stream that is not held by a wait, and a launch is carried
out from the parameters that the job passed.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_helpers import LIMIT_S, Rig, make_rig
from numpy.typing import NDArray

from kvtransfer.dma import CopyEngine, TorchCopyEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.coalesce import Box, Geometry
from kvtransfer.kernels.digest import box_digests
from kvtransfer.kernels.launch import RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.kernels.relayout import tile_constants
from kvtransfer.kernels.table import CopyTable, build_table
from kvtransfer.lanes import LANES, CudaLanes, RelayoutTask
from kvtransfer.plan import staged_boxes
from kvtransfer.rest import NativeRest, build_rest
from kvtransfer.submitter import Launch, Submitter, build_submitter
from kvtransfer.templates import CHUNKS_AHEAD
from kvtransfer.workshop import Workshop

FAILED = 700  # what a refused call returns
WORD = 4096  # where the streams find their 0
WIDTHS = (8, 8, 8, 8, 8, 4, 4, 4, 8, 8, 4, 8, 8)


class Passed:
    """One record of an event."""

    done = False


class Gpu:
    """Streams by handle, each a queue; a thread runs them, but for those that are ``held``."""

    driver: FakeDriver

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queues: dict[int, deque[tuple[str, Any]]] = {}
        self.events: dict[int, Passed] = {}
        self.tables: dict[int, tuple[Geometry, CopyTable]] = {}  # by the address of their rows
        self.held: set[int] = set()
        self.errors: list[BaseException] = []
        self.refuse: Callable[[str], bool] = lambda call: False
        self.lock = threading.RLock()
        self.handles = itertools.count(100)
        self._stop = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, stream: int, kind: str, what: Any) -> None:
        with self.lock:
            self.queues.setdefault(stream, deque()).append((kind, what))

    def record(self, event: int, stream: int) -> None:
        with self.lock:
            mark = self.events[event] = Passed()
            self.put(stream, "record", mark)

    def wait(self, stream: int, event: int) -> None:
        with self.lock:
            if event in self.events:  # as on a GPU: one that was never recorded holds nobody
                self.put(stream, "wait", self.events[event])

    def query(self, event: int) -> bool:
        with self.lock:
            return event not in self.events or self.events[event].done

    def close(self) -> None:
        self._stop = True
        self.thread.join(LIMIT_S)
        assert not self.errors, self.errors

    def _run(self) -> None:
        while not self._stop:
            with self.lock:
                ready = [q for s, q in self.queues.items() if q and s not in self.held and self._goes(q[0])]
                if ready:
                    queue = self.rng.choice(ready)
                    kind, what = queue.popleft()
                    try:
                        if kind == "record":
                            what.done = True
                        elif kind == "work":
                            what()
                    except BaseException as error:  # kept for `close`
                        self.errors.append(error)
            time.sleep(0 if ready else 0.0002)

    def _goes(self, head: tuple[str, Any]) -> bool:
        return head[0] != "wait" or head[1].done


class FakeStream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.cuda_stream = gpu, next(gpu.handles)

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """Instead of ``torch.cuda.Event``."""

    gpu: Gpu

    def __init__(self, enable_timing: bool = False) -> None:
        self.cuda_event = next(self.gpu.handles)

    def record(self, stream: FakeStream) -> None:
        self.gpu.record(self.cuda_event, stream.cuda_stream)

    def wait(self, stream: FakeStream) -> None:
        self.gpu.wait(stream.cuda_stream, self.cuda_event)

    def query(self) -> bool:
        return self.gpu.query(self.cuda_event)

    def synchronize(self) -> None:
        end = time.monotonic() + LIMIT_S
        while not self.query():
            assert time.monotonic() < end
            time.sleep(0.0002)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "a time was asked for before it was known"
        return 1.0


class FakeLanes(CudaLanes):
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.device, self.owner = gpu, torch.device("cpu"), None
        self.streams = {lane: cast(Any, FakeStream(gpu)) for lane in LANES}
        self._aside = cast(Any, FakeStream(gpu))
        self.copier, self.word, self._events = TorchCopyEngine(), None, None

    def adopt_thread(self) -> None:
        pass

    def on(self, lane: str) -> Any:
        return nullcontext()

    def aside(self) -> Any:
        return nullcontext()

    def batch(self, lane: str, dst: Any, src: Any, sizes: Any, *, any_order: bool) -> None:
        rows = list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))
        self.gpu.put(self.streams[lane].cuda_stream, "work", lambda: [ctypes.memmove(*row) for row in rows])

    def relayout(self, lane: str, task: RelayoutTask) -> None:
        assert task.table is not None
        ids = task.dst_ids if task.src_ids is None else task.src_ids
        assert ids is not None
        part = ids[task.first : task.first + task.count].numpy().copy()
        here = np.arange(task.count)
        sides = (here, part) if task.src_ids is None else (part, here)
        table = task.table
        self.gpu.put(
            self.streams[lane].cuda_stream, "work", lambda: move(table, task.src_shift, task.dst_shift, *sides)
        )


class FakeShop(Workshop):
    def _make(self, kind: str, box: Box, build: bool) -> tuple[Geometry, CopyTable | None]:
        geometry, _ = super()._make(kind, box, build)
        if not build:
            return geometry, None
        pool = [b.data_ptr() for b in self.pool.buffers]
        src, dst = (pool, [0]) if kind == "pool>ring" else ([0], pool)
        table = build_table(
            geometry, self.pool.spec, src, dst, torch.device("cpu"), RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
        )
        cast(FakeLanes, self.lanes).gpu.tables[table.rows.data_ptr()] = geometry, table
        return geometry, table


def move(table: CopyTable, src_shift: int, dst_shift: int, src_ids: Any, dst_ids: Any) -> None:
    """What the relayout kernel does, from its table."""
    step = table.tile.word_bytes * table.tile.scale
    piece = table.piece_words * table.tile.word_bytes
    for row in table.rows.tolist():
        loops = [row[7 + 3 * i : 10 + 3 * i] for i in range(table.loops)]
        for src_page, dst_page in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
            for at in range(row[4] * step // piece):
                s, d = row[0] + src_shift + src_page * row[2] * step, row[1] + dst_shift + dst_page * row[3] * step
                for extent, src, dst in loops:
                    s, d, at = s + at % extent * src * step, d + at % extent * dst * step, at // extent
                ctypes.memmove(d, s, piece)


def lane(rig: Rig, name: str) -> int:
    """Handle of one of the engine's streams: what `Gpu.held` takes."""
    return cast(FakeStream, rig.engine._shop.lanes.streams[name]).cuda_stream


def on_their_way(*handles: TransferHandle) -> bool:
    """Whether each has submitted as much as may be, while the GPU stands still."""
    for handle in handles:
        handle.poll()
    return all(handle.chunks_submitted == CHUNKS_AHEAD for handle in handles)


def words(address: int, count: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (count,))


class FakeDriver:
    """The entry points that the worker calls, on a `Gpu`. Each may be refused by its name (``gpu.refuse``)."""

    batch_version = 13000

    def __init__(self, gpu: Gpu, verify: bool, spec: Any) -> None:
        self.gpu, self.verify, self.spec = gpu, verify, spec
        self.batches: list[list[tuple[int, int, int]]] = []  # (destination, source, bytes) of each copy asked for
        self.let_in: list[int] = []  # streams that let others in
        p, u, i, q = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64
        types = {
            "batch": (p, p, p, q, p, p, q, q), "wait": (q, q, u), "record": (q, q), "query": (q,),
            "launch": (q, u, u, u, u, u, u, u, q, p, p), "copy": (q, q, q, q), "zero": (q, ctypes.c_ubyte, q, q),
            "wait_value": (q, q, u, u), "set_context": (p,), "mode": (p,),
        }  # fmt: skip
        self.calls = {n: ctypes.CFUNCTYPE(i, *t)(self._guarded(n)) for n, t in types.items()}

    def entry_points(self) -> tuple[int, ...]:
        return (*(ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.calls.values()), 0, 0)

    def _guarded(self, name: str) -> Callable[..., int]:
        call = getattr(self, f"do_{name}")

        def run(*arguments: Any) -> int:
            try:
                if self.gpu.refuse(name):
                    return FAILED
                return call(*arguments) or 0
            except BaseException as error:  # kept for `Gpu.close`
                self.gpu.errors.append(error)
                return FAILED

        return run

    def do_batch(self, dst: int, src: int, sizes: int, n: int, _a: Any, _f: Any, _k: int, stream: int) -> None:
        rows = list(zip(*(words(a, n).tolist() for a in (dst, src, sizes)), strict=True))
        self.batches.append(rows)
        self.gpu.put(stream, "work", lambda: [ctypes.memmove(*row) for row in rows])

    def do_wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        assert (address, value, flags) == (WORD, 0, 0), "a wait that has passed already"
        self.let_in.append(stream)

    def do_wait(self, stream: int, event: int, flags: int) -> None:
        self.gpu.wait(stream, event)

    def do_record(self, event: int, stream: int) -> None:
        self.gpu.record(event, stream)

    def do_query(self, event: int) -> int:
        return 0 if self.gpu.query(event) else 600

    def do_launch(self, function: int, *rest: Any) -> None:
        stream, parameters = rest[7], rest[8]
        pointers = words(parameters, len(WIDTHS)).tolist()
        values = [
            int.from_bytes(ctypes.string_at(a, w), "little") for a, w in zip(pointers, WIDTHS, strict=True)
        ]  # fmt: skip
        self.gpu.put(stream, "work", lambda: self._relayout(values))

    def _relayout(self, v: list[int]) -> None:
        rows, src_shift, dst_shift, src_ids, dst_ids, src_first, dst_first, count, _, digests, layers = v[:11]
        geometry, table = self.gpu.tables[rows]
        spare = table.layer_rows.data_ptr()
        here = np.arange(count)
        store = dst_ids == spare
        ids = words((src_ids if store else dst_ids) + 8 * (src_first if store else dst_first), count).copy()
        assert (src_first if not store else dst_first) == 0
        move(table, src_shift, dst_shift, *((ids, here) if store else (here, ids)))
        if self.verify:
            nbytes = geometry.page_bytes
            packed = np.frombuffer(ctypes.string_at(dst_shift if store else src_shift, count * nbytes), np.uint8)
            sums = box_digests(packed.reshape(count, nbytes), self.spec, geometry.box)
            words(digests, count * layers)[:] += sums.view(np.int64).reshape(-1)

    def do_copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.gpu.put(stream, "work", lambda: ctypes.memmove(dst, src, nbytes))

    def do_zero(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        self.gpu.put(stream, "work", lambda: ctypes.memset(dst, value, nbytes))

    def do_set_context(self, context: int) -> None:
        pass

    def do_mode(self, mode: int) -> None:
        pass


def scripted_rig(
    monkeypatch: pytest.MonkeyPatch, folder: Path, layout: str, spec: Any, ring: Any, *, seed: int, verify: bool = True,
    native_rest: bool | None = None, **more: Any,
) -> tuple[Rig, Gpu]:  # fmt: skip
    """A rig whose staged transfers go through the C worker to a `Gpu`. Close the rig, then the GPU.

    ``native_rest``: the engine's thread rests in C, as it does beside a real driver; None: where ``seed`` is odd.
    """
    gpu = Gpu(seed)
    monkeypatch.setattr(FakeEvent, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(gpu))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("zeros", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, pin_memory=False, **k: real(*a, **k))
    rig = make_rig(layout, spec, path="staged", staging_bytes=ring, verify=verify, **more)
    shop = rig.engine._shop
    shop.lanes.close()
    lanes = FakeLanes(gpu)
    for memory in (*rig.pool.buffers, rig.host.payload, ring.memory):
        lanes.copier.register(memory)
    shop.__class__ = FakeShop
    shop.lanes = lanes
    single = tuple((i, i + 1) for i in range(spec.num_layers))
    for groups in (((0, spec.num_layers),), single, tuple(rig.engine._terrain["load"].groups(1))):
        for box in staged_boxes(spec, ring.slot_bytes, groups):
            for kind in ("ring>pool", "pool>ring"):
                table = shop.geometry(kind, box)[1]
                assert table is not None
                shop.launches[(kind, *tile_constants(table).items())] = Launch(1, 256, 0, WIDTHS)
    driver = gpu.driver = FakeDriver(gpu, verify, spec)
    for direction in ("load", "store"):
        shop.submitters[direction] = Submitter(build_submitter(folder), cast(CopyEngine, driver), 1, WORD)
    if native_rest if native_rest is not None else seed % 2:
        query = ctypes.cast(driver.calls["query"], ctypes.c_void_p).value
        rig.engine._pump._rest = NativeRest(build_rest(folder), query or 0)
    return rig, gpu
