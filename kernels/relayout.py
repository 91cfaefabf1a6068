"""relayout: copy pages between two layouts in device memory, gathered and scattered by page id.

Shapes. A `CopyTable` describes E entries (layer, component); ids are int32 or int64 [n] or absent (page i is
at i). For each entry and page, ``unit_words`` words go from ``src + src_id * page stride`` to
``dst + dst_id * page stride`` along the table's loops. Optionally the digests of what was moved are added
to ``digests`` int64 [n, layers of the spec], which the caller has zeroed; then the geometry must have been
coalesced in the order of its page-first side.

A ``status`` word other than 0 (see `kvtransfer.kernels.check`) makes every write of the launch vanish.
All offsets are 64 bits wide. Launches run on the current stream of the table's device; nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvtransfer.kernels.coalesce import Entry, Geometry
from kvtransfer.kernels.digest import tile_digest
from kvtransfer.kernels.launch import relayout_grid
from kvtransfer.kernels.table import CopyTable

_FREE = [
    "src_shift",
    "dst_shift",
    "src_first",
    "dst_first",
    "num_pages",
]  # never specialised: one binary for all values
_UNALIGNED = ["src_ids", "dst_ids", "status", "digests"]


@triton.jit
def lane_offsets(row, lane, LOOPS: tl.constexpr, PIECE: tl.constexpr, SCALE: tl.constexpr):
    """Word offsets of ``lane`` (index in the unit, int32) on both sides: (source, destination), int64."""
    within = (lane % PIECE).to(tl.int64)
    piece = lane // PIECE
    src = within
    dst = within
    for d in tl.static_range(LOOPS):
        extent = tl.load(row + 7 + 3 * d).to(tl.int32)
        src_stride = tl.load(row + 8 + 3 * d)
        dst_stride = tl.load(row + 9 + 3 * d)
        at = (piece % extent).to(tl.int64)
        piece = piece // extent
        src += at * src_stride * SCALE
        dst += at * dst_stride * SCALE
    return src, dst


@triton.jit
def copy_tile(
    row, tile, src_shift, dst_shift, src_ids, dst_ids, src_first, dst_first, num_pages, gate, digests, digest_layers,
    PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr, LOOPS: tl.constexpr,
    PIECE: tl.constexpr, SRC_IDS: tl.constexpr, DST_IDS: tl.constexpr, DIGEST: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Copy tile number ``tile`` of the entry at ``row``: PAGES pages x LANES words (see the module docstring)."""
    unit = tl.load(row + 4).to(tl.int32)
    chunks = tl.cdiv(unit, LANES)
    lane = (tile % chunks) * LANES + tl.arange(0, LANES)
    page = (tile // chunks) * PAGES + tl.arange(0, PAGES)
    live = page < num_pages
    if SRC_IDS:
        src_page = tl.load(src_ids + src_first + page, mask=live, other=0).to(tl.int64)
    else:
        src_page = src_first + page.to(tl.int64)
    if DST_IDS:
        dst_page = tl.load(dst_ids + dst_first + page, mask=live, other=0).to(tl.int64)
    else:
        dst_page = dst_first + page.to(tl.int64)
    src_lane, dst_lane = lane_offsets(row, lane, LOOPS, PIECE, SCALE)
    if WORD == 8:
        kind = tl.pointer_type(tl.int64)
    elif WORD == 4:
        kind = tl.pointer_type(tl.int32)
    elif WORD == 2:
        kind = tl.pointer_type(tl.int16)
    else:
        kind = tl.pointer_type(tl.int8)
    src = tl.multiple_of((tl.load(row) + src_shift).to(kind), SCALE * WORD)
    dst = tl.multiple_of((tl.load(row + 1) + dst_shift).to(kind), SCALE * WORD)
    src_at = (src_page * tl.load(row + 2) * SCALE)[:, None] + src_lane[None, :]
    dst_at = (dst_page * tl.load(row + 3) * SCALE)[:, None] + dst_lane[None, :]
    wanted = (live[:, None]) & (lane < unit)[None, :] & gate
    values = tl.load(src + src_at, mask=wanted, other=0, cache_modifier=".cg")
    if STORE:
        tl.store(dst + dst_at, values, mask=wanted)
    if DIGEST:
        sums = tile_digest(values, lane, unit, tl.load(row + 6), WORD, PAGES, LANES)
        layer = tl.load(row + 5)
        at = page.to(tl.int64) * digest_layers + layer
        tl.atomic_add(digests + at, sums.to(tl.int64, bitcast=True), mask=live & gate, sem="relaxed")


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def relayout_kernel(
    table, src_shift, dst_shift, src_ids, dst_ids, src_first, dst_first, num_pages, status, digests, digest_layers,
    COLUMNS: tl.constexpr, PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr,
    LOOPS: tl.constexpr, PIECE: tl.constexpr, SRC_IDS: tl.constexpr, DST_IDS: tl.constexpr, GATED: tl.constexpr,
    DIGEST: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Grid (programs, entries): each program strides over the tiles of its entry."""
    row = table + tl.program_id(1) * COLUMNS
    gate = tl.load(status) == 0 if GATED else True
    tiles = tl.cdiv(num_pages, PAGES) * tl.cdiv(tl.load(row + 4).to(tl.int32), LANES)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        copy_tile(
            row, tile, src_shift, dst_shift, src_ids, dst_ids, src_first, dst_first, num_pages, gate, digests,
            digest_layers, PAGES, LANES, WORD, SCALE, LOOPS, PIECE, SRC_IDS, DST_IDS, DIGEST, STORE,
        )  # fmt: skip


def tile_constants(table: CopyTable) -> dict[str, Any]:
    """The compile-time arguments that `relayout_kernel` and the mapped kernel share."""
    return {
        "COLUMNS": table.rows.shape[1],
        "PAGES": table.tile.pages,
        "LANES": table.tile.words,
        "WORD": table.tile.word_bytes,
        "SCALE": table.tile.scale,
        "LOOPS": table.loops,
        "PIECE": table.piece_words,
        "num_warps": table.tile.warps,
    }


def relayout(
    table: CopyTable,
    num_pages: int,
    *,
    src_ids: torch.Tensor | None = None,
    dst_ids: torch.Tensor | None = None,
    src_first: int = 0,
    dst_first: int = 0,
    src_shift: int = 0,
    dst_shift: int = 0,
    status: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
    store: bool = True,
) -> None:
    """Launch on the current stream. Mutates the destination buffers, and ``digests`` where given.

    src_ids, dst_ids      int32/int64 [>= first + num_pages] on the device, or None: page i lies at first + i
    src_first, dst_first  where this launch starts in the ids (or in the pages, without ids)
    src_shift, dst_shift  bytes added to every address of that side (a ring slot's base)
    status                int32 [>= 1]; nothing is written unless status[0] == 0
    digests               int64 [num_pages, layers of the spec], zeroed by the caller; sums are added
    store                 False reads and digests the source, and writes nothing
    """
    tiles = -(-num_pages // table.tile.pages) * -(-table.unit_words // table.tile.words)
    spare = table.layer_rows  # a valid pointer for arguments that the compiled variant does not read
    relayout_kernel[relayout_grid(tiles, table.num_entries)](
        table.rows,
        src_shift,
        dst_shift,
        spare if src_ids is None else src_ids,
        spare if dst_ids is None else dst_ids,
        src_first,
        dst_first,
        num_pages,
        spare if status is None else status,
        spare if digests is None else digests,
        1 if digests is None else digests.shape[1],
        SRC_IDS=src_ids is not None,
        DST_IDS=dst_ids is not None,
        GATED=status is not None,
        DIGEST=digests is not None,
        STORE=store,
        **tile_constants(table),
    )


def entry_view(buffer: torch.Tensor, entry: Entry, side: str, num_pages: int, word_bytes: int) -> torch.Tensor:
    """The bytes of one entry as words, [num_pages, *loop extents, piece words], a view of ``buffer``'s memory."""
    which = 1 if side == "src" else 2
    offset, page_stride = (
        (entry.src_offset, entry.src_page_stride) if side == "src" else (entry.dst_offset, entry.dst_page_stride)
    )
    size = [num_pages, *(loop[0] for loop in entry.loops), entry.piece_bytes // word_bytes]
    stride = [page_stride // word_bytes, *(loop[which] // word_bytes for loop in entry.loops), 1]
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
    base = buffer.storage_offset() * buffer.element_size() + offset
    words = torch.empty(0, dtype=dtype, device=buffer.device)
    return words.set_(buffer.untyped_storage(), base // word_bytes, size, stride)


def relayout_reference(
    geometry: Geometry,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
) -> None:
    """Plain torch: the same bytes, for any device. Ids int64 [n]; mutates ``dst``. What the CPU backend runs."""
    offsets = [t.storage_offset() * t.element_size() for t in (*src, *dst)]
    word = min(8, geometry.alignment)
    while any(o % word for o in offsets):
        word //= 2
    src_count, dst_count = int(src_pages.max()) + 1, int(dst_pages.max()) + 1
    for e in geometry.entries:
        source = entry_view(src[e.src_buffer], e, "src", src_count, word)
        target = entry_view(dst[e.dst_buffer], e, "dst", dst_count, word)
        target[dst_pages] = source[src_pages]
