"""What one would write without this library, as simply as it is usually written, for the same pages and slots.

Each moves the bytes of a `Rig` between its slab (page-first) and its pool, is timed from its first call to the end of
its last copy, and is compared byte by byte like the engine's own. Not tuned on purpose, except that nothing copies on
the legacy default stream.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from rigs import Rig
from works import Wait, moved_exactly

from kvtransfer.descriptors import descriptors
from kvtransfer.dma import Copier, CopyEngine
from kvtransfer.kernels.coalesce import Box, Geometry, Side, coalesce
from kvtransfer.kernels.errors import ConfigError, CudaError
from kvtransfer.kernels.launch import MAPPED_TILE_BYTES, MAPPED_WARPS
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.relayout import entry_view, relayout_reference
from kvtransfer.kernels.table import build_table

PROGRAMS, WORDS = 12, 1024  # of the fixed copy kernel: programs, 8-byte words at once
CTAS = 4


class Baseline(ABC):
    """One way of moving the rig's pages. Raises ConfigError where it needs a GPU and there is none."""

    path = ""
    engine_thread = ""
    needs_gpu = False

    def __init__(self, rig: Rig, direction: str, name: str) -> None:
        if self.needs_gpu and rig.device.type != "cuda":
            raise ConfigError("it needs a GPU")
        self.rig, self.direction, self.name = rig, direction, name
        self.total_bytes = rig.total_bytes
        self.stream = torch.cuda.Stream(rig.device) if rig.device.type == "cuda" else None
        shift = rig.host.device_shift(rig.device) if self.stream is not None else 0
        host, pool = [rig.host.address + shift], [b.data_ptr() for b in rig.pool.buffers]
        ids = rig.slots, rig.pages
        self.src, self.dst = (host, pool) if direction == "load" else (pool, host)
        self.src_ids, self.dst_ids = ids if direction == "load" else ids[::-1]
        self.prepare()

    def prepare(self) -> None:  # noqa: B027  (not all have something to prepare)
        """What is done once for a pool and a slab, not for each transfer."""

    @abstractmethod
    def move(self) -> None:
        """Enqueue everything on the current stream, or do it."""

    def begin(self, *, alone: bool = True) -> Wait:
        if self.stream is None:
            started = time.perf_counter()
            self.move()
            seconds = time.perf_counter() - started
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            begin.record()
            self.move()
            end.record()

        def wait() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait

    def exact(self) -> bool:
        return moved_exactly(self.rig, self.direction, lambda: self.begin()())

    def geometry(self, box: Box | None = None) -> Geometry:
        spec = self.rig.spec
        box = Box.whole(spec) if box is None else box
        host, pool = Side.of(self.rig.host.layout), Side.of(self.rig.pool.layout)
        if self.direction == "load":
            return coalesce(spec, host, pool, box, order="src")
        return coalesce(spec, pool, host, box, order="dst")

    def raw_stream(self) -> int:
        return 0 if self.stream is None else int(self.stream.cuda_stream)


class IndexAndCopy(Baseline):
    """torch alone, tensor by tensor: index the source, copy the result over, index the destination."""

    path = "torch index + copy"

    def prepare(self) -> None:
        self.entries = self.geometry().entries
        host, pool = (self.rig.host.payload,), self.rig.pool.buffers
        self.tensors = (host, pool) if self.direction == "load" else (pool, host)
        self.devices = [t[0].device for t in self.tensors]
        self.ids = [torch.from_numpy(i).to(d) for i, d in zip((self.src_ids, self.dst_ids), self.devices, strict=True)]
        self.counts = [int(i.max()) + 1 for i in (self.src_ids, self.dst_ids)]
        self.word = min(8, self.geometry().alignment)

    def move(self) -> None:
        for e in self.entries:
            source = entry_view(self.tensors[0][e.src_buffer], e, "src", self.counts[0], self.word)
            target = entry_view(self.tensors[1][e.dst_buffer], e, "dst", self.counts[1], self.word)
            target[self.ids[1]] = source[self.ids[0]].to(self.devices[1])


class CallAPiece(Baseline):
    """One cudaMemcpyAsync a piece (on the CPU: one memmove), in a loop of Python without anything else in it."""

    path = "one memcpy a piece"

    def prepare(self) -> None:
        self.copy: Callable[[int, int, int], int | None] = ctypes.memmove
        if self.stream is not None:
            call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
            call.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
            call.restype = ctypes.c_int
            stream = self.raw_stream()
            self.copy = lambda dst, src, nbytes: call(dst, src, nbytes, stream)

    def move(self) -> None:
        pieces = descriptors(self.geometry(), self.src, self.dst, self.src_ids, self.dst_ids)
        copy, on_gpu = self.copy, self.stream is not None
        for dst, src, nbytes in zip(*(a.tolist() for a in pieces), strict=True):
            code = copy(dst, src, nbytes)
            if on_gpu and code:
                raise CudaError(f"cuMemcpyAsync returned {code}", code)


class UnmergedBatch(Baseline):
    """All pieces between slab and pool in one copy-engine batch, as they are: no ring, no runs."""

    path = "one batch, not merged"

    def prepare(self) -> None:
        self.copier: Copier = CopyEngine.create(self.rig.device)
        for memory in (*self.rig.pool.buffers, self.rig.host.payload):
            self.copier.register(memory)

    def move(self) -> None:
        pieces = descriptors(self.geometry(), self.src, self.dst, self.src_ids, self.dst_ids)
        self.copier.batch(*pieces, self.raw_stream())


class LaunchALayer(Baseline):
    """A kernel on pinned memory, one launch a layer (on the CPU: the plain-torch copy, layer by layer)."""

    path = "one launch a layer"

    def prepare(self) -> None:
        rig, spec = self.rig, self.rig.spec
        boxes = [Box(i, i + 1, 0, spec.page_size) for i in range(spec.num_layers)]
        self.geometries = [self.geometry(box) for box in boxes]
        host, pool = (rig.host.payload,), rig.pool.buffers
        self.tensors = (host, pool) if self.direction == "load" else (pool, host)
        self.ids = [torch.from_numpy(i).to(rig.device) for i in (self.src_ids, self.dst_ids)]
        if self.stream is not None:
            self.tables = [
                build_table(g, spec, self.src, self.dst, rig.device, MAPPED_TILE_BYTES, MAPPED_WARPS)
                for g in self.geometries
            ]
            self.flags = torch.zeros(1, dtype=torch.int32, device=rig.device)
            torch.cuda.synchronize(rig.device)

    def move(self) -> None:
        for layer in range(self.rig.shape.layers):
            self.move_layer(layer)

    def move_layer(self, layer: int) -> None:
        """Enqueue one layer on the current stream, or copy it."""
        src, dst = self.ids
        if self.stream is None:
            relayout_reference(self.geometries[layer], self.tensors[0], self.tensors[1], src, dst)
            return
        mapped_copy(self.tables[layer], self.rig.count, self.flags, CTAS, src_ids=src, dst_ids=dst)


@triton.jit  # type: ignore[untyped-decorator]
def copy_pieces(  # type: ignore[no-untyped-def]
    dst, src, pieces, words, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr
):
    """Piece i goes from address ``src[i]`` to ``dst[i]``; program p takes every PROGRAMS-th, WORDS at a time."""
    lane = tl.arange(0, WORDS)
    if WORD == 8:
        kind = tl.pointer_type(tl.int64)
    else:
        kind = tl.pointer_type(tl.int8)
    for piece in range(tl.program_id(0), pieces, PROGRAMS):
        source = tl.load(src + piece).to(kind)
        target = tl.load(dst + piece).to(kind)
        for at in range(0, words, WORDS):
            live = at + lane < words
            tl.store(target + at + lane, tl.load(source + at + lane, mask=live), mask=live)


def launch_copy_pieces(dst: torch.Tensor, src: torch.Tensor, piece_bytes: int) -> None:
    """Launch on the current stream; ``dst`` and ``src`` are addresses, int64 [pieces] on the device."""
    word = 8 if piece_bytes % 8 == 0 else 1
    copy_pieces[(PROGRAMS,)](dst, src, dst.numel(), piece_bytes // word, PROGRAMS, WORDS, word)


class TwelvePrograms(Baseline):
    """A plain copy kernel of a fixed number of programs; its list of addresses is made and uploaded each time."""

    path = "12-program kernel"
    needs_gpu = True

    def prepare(self) -> None:
        pieces = {e.piece_bytes for e in self.geometry().merged}
        if len(pieces) != 1:
            raise ConfigError(f"it needs pieces of one size, got {sorted(pieces)}")

    def move(self) -> None:
        dst, src, sizes = descriptors(self.geometry(), self.src, self.dst, self.src_ids, self.dst_ids)
        both = torch.from_numpy(np.stack([dst, src]).astype(np.int64)).pin_memory()
        at = both.to(self.rig.device, non_blocking=True)
        launch_copy_pieces(at[0], at[1], int(sizes[0]))


ALL: tuple[type[Baseline], ...] = (IndexAndCopy, CallAPiece, UnmergedBatch, LaunchALayer, TwelvePrograms)
