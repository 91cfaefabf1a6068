"""plan: which path a transfer takes, in which chunks, and why. Pure functions over numbers.

The rules rest on the figures of docs/performance.md: copy-engine batches reach the link from pieces of
256 KiB on, a mapped kernel reads small pieces at 90 % of it, a strided copy costs 8 us of CPU a call, and
SMs that write host memory take a third of a GEMM. A measured profile replaces them later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.coalesce import Box, Geometry
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.layout import box_bytes
from kvtransfer.kernels.spec import KVSpec

HOST_PATHS = ("staged", "strided", "mapped", "cpu")  # between a pool and host slots
PATHS = (*HOST_PATHS, "device")

BATCH_PIECE_BYTES = 256 * 1024  # H2D batches: 39 GB/s at 128 KiB, 52 at 1 MiB, of 55 (H200)
STRIDED_CALL_BYTES = 1 << 20  # a call costs 8 us of CPU, in which the link moves 440 KB
STRIDED_ROW_BYTES = 16 * 1024
CPU_CHUNK_PAGES = 128
DIGEST_TOKENS = 8  # a box starts on a whole digest word when it starts on a multiple of 8 tokens
MAX_GROUP_LAYERS = 4  # 1,2,3,4,4,..,4,3,2,1 was the best of six patterns in a forward (H200)


@dataclass(frozen=True)
class Chunk:
    """What is submitted and acknowledged as one: pages ``first`` to ``first + count - 1`` of a box."""

    box: Box
    first: int
    count: int


@dataclass(frozen=True)
class Plan:
    """How one transfer will run. ``rejected`` holds (path, reason) of the others, ``reason`` why this one."""

    direction: str
    path: str
    reason: str
    pages: int
    total_bytes: int
    piece_bytes: int
    pieces: int
    chunks: tuple[Chunk, ...]
    layerwise: bool
    rejected: tuple[tuple[str, str], ...] = field(default=())

    def explain(self) -> str:
        """A few lines for people: pieces, count, path, and why the others lost."""
        lines = [
            f"{self.direction}: {self.pages} pages, {self.total_bytes:,} bytes by path {self.path}: {self.reason}",
            f"  {self.pieces:,} pieces of {self.piece_bytes:,} bytes in {len(self.chunks)} chunks"
            + (", layer by layer" if self.layerwise else ""),
        ]
        lines += [f"  not {path}: {why}" for path, why in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True)
class Facts:
    """What a choice is made from. ``slot_bytes`` is a ring slot, 0 without a ring.

    ``runs`` counts runs of pages that follow each other on both sides; None where the page ids are on the GPU.
    ``direct`` is the geometry between pool and host with its entries merged; ``strided_ok`` and ``mapped_ok``
    say whether copy engine and kernels can reach host memory directly.
    """

    direction: str
    spec: KVSpec
    pages: int
    direct: Geometry
    runs: int | None
    slot_bytes: int
    layerwise: bool
    on_gpu: bool
    host_pinned: bool


def make_plan(facts: Facts, forced: str | None = None) -> Plan:
    """Choose a path (or take ``forced``) and cut the transfer into chunks. ConfigError if a forced path can't run."""
    refused = dict(_refusals(facts))
    order, why = _preference(facts)
    if forced is not None:
        if forced not in PATHS:
            raise ConfigError(f"path: expected one of {', '.join(PATHS)} or 'auto', got {forced!r}")
        if forced in refused:
            raise ConfigError(f"path {forced!r} can't carry this {facts.direction}: {refused[forced]}")
        order, why = (forced, *order), {**why, forced: "asked for by the caller"}
    path = next((p for p in order if p not in refused), None)
    if path is None:
        raise ConfigError(f"no path can carry this {facts.direction}: {refused}")
    others = [(p, refused.get(p) or why.get(p, "")) for p in dict.fromkeys(order) if p != path]
    piece, pieces = _pieces(facts, path)
    return Plan(
        facts.direction, path, why[path], facts.pages, facts.pages * facts.spec.page_bytes, piece, pieces,
        tuple(_chunks(facts, path)), facts.layerwise, tuple(o for o in others if o[1]),
    )  # fmt: skip


def _refusals(f: Facts) -> Iterable[tuple[str, str]]:
    if not f.on_gpu:
        yield "mapped", "there is no GPU to run the kernel"
        yield "strided", "there is no GPU"
    else:
        yield "cpu", "the pool is on a GPU"
        if not f.host_pinned:
            yield "mapped", "the host slab is not pinned, so kernels can't reach it"
    if f.slot_bytes == 0:
        yield "staged", "there is no staging ring"
    elif (need := _largest_box(f)) > f.slot_bytes:
        yield (
            "staged",
            (
                f"a ring slot of {f.slot_bytes:,} bytes is too small for {DIGEST_TOKENS} tokens of one layer "
                f"({need:,} bytes); a ring has three slots: give it more staging_bytes"
            ),
        )
    if f.runs is None:
        yield "strided", "page ids are on the GPU: the copy engine needs addresses on the CPU"
    if f.layerwise and f.direction == "store":
        yield "mapped", "its one launch can't leave layer by layer"
        if f.runs is None:
            yield "staged", "layer by layer it can't wait for the GPU's check of page ids: give them on the CPU"
    yield "device", "one side is host memory"


def _preference(f: Facts) -> tuple[tuple[str, ...], dict[str, str]]:
    """Paths from best to worst, each with its reason (or, for those behind, what counts against it)."""
    if not f.on_gpu:
        return ("cpu", "staged"), {"cpu": "the pool is in host memory", "staged": "a ring gains nothing on a CPU"}
    merged = f.direct.merged
    row = min(e.piece_bytes for e in merged)
    runs = max(f.pages if f.runs is None else f.runs, 1)
    call = row * f.pages // runs
    good_rows = all(not e.loops for e in merged) and (row >= STRIDED_ROW_BYTES or runs == f.pages == 1)
    piece = _staged_piece(f)
    why = {
        "strided": f"rows of {row:,} bytes in {runs} runs make {call:,} bytes a call",
        "staged": f"pieces of {piece:,} bytes between ring and host pages",
        "mapped": f"pieces of {piece:,} bytes are too small for the copy engine ({BATCH_PIECE_BYTES:,} wanted)",
    }
    if good_rows and call >= STRIDED_CALL_BYTES:
        return ("strided", "staged", "mapped"), {**why, "mapped": "SMs are left to the model where the copy engine can"}
    why["strided"] = f"{call:,} bytes a call are less than {STRIDED_CALL_BYTES:,}"
    if f.direction == "store":
        why["mapped"] = "writing host memory from SMs takes a third of a concurrent GEMM"
        return ("staged", "strided", "mapped"), why
    if piece >= BATCH_PIECE_BYTES:
        return ("staged", "mapped", "strided"), {**why, "mapped": "the copy engine reaches the link with these pieces"}
    why["staged"] = f"pieces of {piece:,} bytes: the copy engine wants {BATCH_PIECE_BYTES:,}"
    return ("mapped", "staged", "strided"), why


def _staged_piece(f: Facts) -> int:
    """Bytes contiguous in a host page that one descriptor moves, most of the time."""
    if not f.layerwise:
        return min(f.spec.page_bytes, max(f.slot_bytes, 1))
    return max(f.spec.layer_bytes(i) for i in range(f.spec.num_layers)) * min(MAX_GROUP_LAYERS, f.spec.num_layers)


def _pieces(f: Facts, path: str) -> tuple[int, int]:
    if path == "staged":
        piece = _staged_piece(f)
        return piece, f.pages * max(1, -(-f.spec.page_bytes // piece))
    if path == "strided":
        merged = f.direct.merged
        return min(e.piece_bytes for e in merged), f.pages * sum(e.unit_bytes // e.piece_bytes for e in merged)
    return f.direct.piece_bytes, f.pages * f.direct.pieces_a_page


def _chunks(f: Facts, path: str) -> Iterable[Chunk]:
    if f.pages == 0:
        return
    whole = Box.whole(f.spec)
    tokens = f.spec.page_size
    if path == "mapped":
        yield Chunk(whole, 0, f.pages)
    elif path == "staged":
        for box in _boxes(f):
            nbytes = box_bytes(f.spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
            yield from _by_pages(box, f.pages, max(1, f.slot_bytes // nbytes))
    elif f.layerwise or (path == "strided" and len(f.direct.merged) > 1):
        for layer in range(f.spec.num_layers):
            yield Chunk(Box(layer, layer + 1, 0, tokens), 0, f.pages)
    else:
        yield from _by_pages(whole, f.pages, CPU_CHUNK_PAGES)


def _by_pages(box: Box, pages: int, most: int) -> Iterable[Chunk]:
    for first in range(0, pages, most):
        yield Chunk(box, first, min(most, pages - first))


def _boxes(f: Facts) -> tuple[Box, ...]:
    return staged_boxes(f.spec, f.slot_bytes, tuple(_groups(f)))


def _groups(f: Facts) -> list[tuple[int, int]]:
    """Layers that may travel together. A layer-wise store can't wait for the next layer: each goes alone."""
    layers = f.spec.num_layers
    if not f.layerwise:
        return [(0, layers)]
    return layer_groups(layers) if f.direction == "load" else [(i, i + 1) for i in range(layers)]


@lru_cache(maxsize=256)
def staged_boxes(spec: KVSpec, slot_bytes: int, groups: tuple[tuple[int, int], ...]) -> tuple[Box, ...]:
    """The boxes that each group of layers is cut into to fit a ring slot: by layer first, then by token."""
    tokens = spec.page_size
    boxes: list[Box] = []
    for start, stop in groups:
        at = start
        while at < stop:
            end = at + 1
            while end < stop and box_bytes(spec, at, end + 1, 0, tokens) <= slot_bytes:
                end += 1
            if box_bytes(spec, at, end, 0, tokens) <= slot_bytes:
                boxes.append(Box(at, end, 0, tokens))
            else:
                boxes += _token_boxes(spec, at, slot_bytes)
            at = end
    return tuple(boxes)


def _token_boxes(spec: KVSpec, layer: int, slot_bytes: int) -> list[Box]:
    # Powers of two, so that pages made of kernel blocks (16, 64 tokens) are cut between or within blocks, never across.
    tokens = spec.page_size
    step = min(tokens, DIGEST_TOKENS)
    while 2 * step <= tokens and box_bytes(spec, layer, layer + 1, 0, 2 * step) <= slot_bytes:
        step *= 2
    return [Box(layer, layer + 1, t, min(t + step, tokens)) for t in range(0, tokens, step)]


def _largest_box(f: Facts) -> int:
    """Bytes of the largest box that the pages are cut into: more than a slot where it can't be cut smaller."""
    return max(box_bytes(f.spec, b.layer_start, b.layer_stop, b.token_start, b.token_stop) for b in _boxes(f))


def layer_groups(num_layers: int, most: int = MAX_GROUP_LAYERS) -> list[tuple[int, int]]:
    """(start, stop) of the groups of a layer-wise transfer: small first, larger in the middle, small last."""
    ramp = list(range(1, most))
    while 2 * sum(ramp) > num_layers:
        ramp.pop()
    middle = num_layers - 2 * sum(ramp)
    sizes = ramp + [most] * (middle // most) + ([middle % most] if middle % most else []) + ramp[::-1]
    stops = np.cumsum(sizes).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def count_runs(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Runs in which both id lists go up by one together."""
    if a.size == 0:
        return 0
    return 1 + int(np.count_nonzero((a[1:] - a[:-1] != 1) | (b[1:] - b[:-1] != 1)))


def runs_of(a: NDArray[np.int64], b: NDArray[np.int64]) -> Sequence[tuple[int, int]]:
    """(first position, length) of each such run."""
    if a.size == 0:
        return []
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    return list(zip(starts.tolist(), np.diff(np.append(starts, a.size)).tolist(), strict=True))
