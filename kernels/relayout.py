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
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.launch import relayout_grid
from kvtransfer.kernels.table import CopyTable

# Never specialised: one binary for all values, since loading another one would wait for the device.
_FREE = ["src_shift", "dst_shift", "src_first", "dst_first", "num_pages", "digest_layers"]
_UNALIGNED = ["src_ids", "dst_ids", "status", "digests"]


@triton.jit
def lane_offsets(row, lane, LOOPS: tl.constexpr, EXTENTS: tl.constexpr, PIECE: tl.constexpr, SCALE: tl.constexpr):
    """Word offsets of ``lane`` (index in the unit, int32) on both sides: (source, destination), int64."""
    within = (lane % PIECE).to(tl.int64)
    piece = lane // PIECE
    src = within
    dst = within
    for d in tl.static_range(LOOPS):
        if len(EXTENTS) > 0:  # divisions by what the compiler knows are shifts, or a multiplication
            extent = EXTENTS[d]
        else:
            extent = tl.load(row + 7 + 3 * d).to(tl.int32)
        src_stride = tl.load(row + 8 + 3 * d)
        dst_stride = tl.load(row + 9 + 3 * d)
        at = (piece % extent).to(tl.int64)
        piece = piece // extent
        src += at * src_stride * SCALE
        dst += at * dst_stride * SCALE
    return src, dst


@triton.jit
def load_unit(row, SCALE: tl.constexpr):
    """Words of an entry's unit, with a factor the compiler can see, so that masks come in pairs of lanes."""
    return tl.load(row + 4).to(tl.int32) * SCALE


@triton.jit
def count_tiles(row, num_pages, PAGES: tl.constexpr, LANES: tl.constexpr, SCALE: tl.constexpr):
    """Tiles of the entry at ``row``."""
    return tl.cdiv(num_pages, PAGES) * tl.cdiv(load_unit(row, SCALE), LANES)


@triton.jit
def tile_pages(tile, unit, PAGES: tl.constexpr, LANES: tl.constexpr):
    """(pages [PAGES], lanes [LANES]) of tile number ``tile``: chunks of a unit fastest, then pages."""
    chunks = tl.cdiv(unit, LANES)
    return (tile // chunks) * PAGES + tl.arange(0, PAGES), (tile % chunks) * LANES + tl.arange(0, LANES)


@triton.jit
def side_pointers(
    base, page_stride, ids, first, page, live, offsets,
    IDS: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Pointers [PAGES, LANES] of one side of a tile: page ids, or the page numbers themselves."""
    if IDS:
        at = tl.load(ids + first + page, mask=live, other=0).to(tl.int64)
    else:
        at = first + page.to(tl.int64)
    if WORD == 8:
        kind = tl.pointer_type(tl.int64)
    elif WORD == 4:
        kind = tl.pointer_type(tl.int32)
    elif WORD == 2:
        kind = tl.pointer_type(tl.int16)
    else:
        kind = tl.pointer_type(tl.int8)
    return tl.multiple_of(base.to(kind), SCALE * WORD) + ((at * page_stride * SCALE)[:, None] + offsets[None, :])


@triton.jit
def fetch_tile(
    row, tile, src_shift, src_ids, src_first, num_pages,
    PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr, LOOPS: tl.constexpr,
    EXTENTS: tl.constexpr, PIECE: tl.constexpr, SRC_IDS: tl.constexpr,
):  # fmt: skip
    """Read tile number ``tile`` of the entry at ``row``: [PAGES, LANES] words, 0 past the pages and the unit."""
    unit = load_unit(row, SCALE)
    page, lane = tile_pages(tile, unit, PAGES, LANES)
    live = page < num_pages
    offsets, _ = lane_offsets(row, lane, LOOPS, EXTENTS, PIECE, SCALE)
    base, stride = tl.load(row) + src_shift, tl.load(row + 2)
    at = side_pointers(base, stride, src_ids, src_first, page, live, offsets, SRC_IDS, WORD, SCALE)
    return tl.load(at, mask=live[:, None] & (lane < unit)[None, :], other=0, cache_modifier=".cg")


@triton.jit
def finish_tile(
    values, row, tile, dst_shift, dst_ids, dst_first, num_pages, digests, digest_layers,
    PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr, LOOPS: tl.constexpr,
    EXTENTS: tl.constexpr, PIECE: tl.constexpr, DST_IDS: tl.constexpr, DIGEST: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Write what `fetch_tile` read, and add it to the digests of its pages."""
    unit = load_unit(row, SCALE)
    page, lane = tile_pages(tile, unit, PAGES, LANES)
    live = page < num_pages
    if STORE:
        _, offsets = lane_offsets(row, lane, LOOPS, EXTENTS, PIECE, SCALE)
        base, stride = tl.load(row + 1) + dst_shift, tl.load(row + 3)
        at = side_pointers(base, stride, dst_ids, dst_first, page, live, offsets, DST_IDS, WORD, SCALE)
        tl.store(at, values, mask=live[:, None] & (lane < unit)[None, :])
    if DIGEST:
        sums = tile_digest(values, lane, unit, tl.load(row + 6), WORD, PAGES, LANES)
        at = page.to(tl.int64) * digest_layers + tl.load(row + 5)
        tl.atomic_add(digests + at, sums.to(tl.int64, bitcast=True), mask=live, sem="relaxed")


@triton.jit
def pages_let_through(num_pages, status, GATED: tl.constexpr):
    """``num_pages``, or 0 where the gate is closed: no tile is then copied."""
    if GATED:
        return tl.where(tl.load(status) == 0, num_pages, 0)
    else:
        return num_pages


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def relayout_kernel(
    table, src_shift: tl.int64, dst_shift: tl.int64, src_ids, dst_ids, src_first, dst_first, num_pages, status, digests,
    digest_layers,
    COLUMNS: tl.constexpr, PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr,
    LOOPS: tl.constexpr, EXTENTS: tl.constexpr, PIECE: tl.constexpr, SRC_IDS: tl.constexpr, DST_IDS: tl.constexpr,
    GATED: tl.constexpr, DIGEST: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Grid (programs, entries): each program strides over the tiles of its entry."""
    row = table + tl.program_id(1) * COLUMNS
    pages = pages_let_through(num_pages, status, GATED)
    for tile in range(tl.program_id(0), count_tiles(row, pages, PAGES, LANES, SCALE), tl.num_programs(0)):
        values = fetch_tile(
            row, tile, src_shift, src_ids, src_first, pages, PAGES, LANES, WORD, SCALE, LOOPS, EXTENTS, PIECE, SRC_IDS
        )  # fmt: skip
        finish_tile(
            values, row, tile, dst_shift, dst_ids, dst_first, pages, digests, digest_layers, PAGES, LANES,
            WORD, SCALE, LOOPS, EXTENTS, PIECE, DST_IDS, DIGEST, STORE,
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
        "EXTENTS": table.extents,
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
) -> Any:
    """Launch on the current stream. Mutates the destination buffers, and ``digests`` where given.

    src_ids, dst_ids      int32/int64 [>= first + num_pages] on the device, or None: page i lies at first + i
    src_first, dst_first  where this launch starts in the ids (or in the pages, without ids)
    src_shift, dst_shift  bytes added to every address of that side (a ring slot's base)
    status                int32 [>= 1]; nothing is written unless status[0] == 0
    digests               int64 [num_pages, layers of the spec], zeroed by the caller; sums are added
    store                 False reads and digests the source, and writes nothing

    A shift that breaks the alignment the table was built with raises LayoutError. Returns Triton's compiled kernel
    (nothing under the interpreter), for launches without Triton.
    """
    aligned = table.tile.word_bytes * table.tile.scale
    if src_shift % aligned or dst_shift % aligned:
        raise LayoutError(
            f"shift: expected multiples of {aligned} bytes, got {src_shift} (source), {dst_shift} (destination)"
        )
    tiles = -(-num_pages // table.tile.pages) * -(-table.unit_words // table.tile.words)
    spare = table.layer_rows  # a valid pointer for arguments that the compiled variant does not read
    return relayout_kernel[relayout_grid(tiles, table.num_entries)](
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
    last = base + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) * word_bytes + word_bytes
    have = buffer.untyped_storage().nbytes()
    if last > have:  # set_ below would let the storage grow
        raise LayoutError(f"layer {entry.layer}, {side}: expected at least {last} bytes of memory, got {have}")
    words = torch.empty(0, dtype=dtype, device=buffer.device)
    return words.set_(buffer.untyped_storage(), base // word_bytes, size, stride)


def relayout_reference(
    geometry: Geometry,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
) -> None:
    """Plain torch: the same bytes, for any device. Ids int64 [n]; mutates ``dst``. What the CPU backend runs.

    Memory that ends before the last page asked for raises LayoutError.
    """
    if src_pages.numel() == 0:
        return
    offsets = [t.storage_offset() * t.element_size() for t in (*src, *dst)]
    word = min(8, geometry.alignment)
    while any(o % word for o in offsets):
        word //= 2
    src_count, dst_count = int(src_pages.max()) + 1, int(dst_pages.max()) + 1
    for e in geometry.entries:
        source = entry_view(src[e.src_buffer], e, "src", src_count, word)
        target = entry_view(dst[e.dst_buffer], e, "dst", dst_count, word)
        target[dst_pages] = source[src_pages]
