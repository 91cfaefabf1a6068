"""mapped: pinned host memory <-> device pool in one launch for all layers, few CTAs, a release flag a layer.

The table's addresses on the host side are those at which the GPU sees the registered memory. Each CTA
works through the layers of the box in order; when it has written its share of layer l it synchronises its
threads and adds 1 to ``flags[l]`` with release order at system scope, so that whoever reads ``flags[l] >=
epoch * CTAs`` (a cyclic 32-bit compare, cuStreamWaitValue32) sees every byte of that layer. A closed gate
writes no page but still raises every flag: no wait is without an end.

Reading host memory from SMs hardly slows a GEMM; writing it takes a third of one (docs/performance.md), so
stores use this only when asked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtransfer.kernels.relayout import (
    _FREE,
    _UNALIGNED,
    count_tiles,
    fetch_tile,
    finish_tile,
    pages_let_through,
    relayout_reference,
    tile_constants,
)
from kvtransfer.kernels.table import CopyTable

__all__ = ["mapped_copy", "mapped_kernel", "relayout_reference"]


@triton.jit(do_not_specialize=[*_FREE, "num_layers"], do_not_specialize_on_alignment=[*_UNALIGNED, "flags"])
def mapped_kernel(
    table, layer_rows, num_layers, src_shift: tl.int64, dst_shift: tl.int64, src_ids, dst_ids, src_first, dst_first,
    num_pages, status, digests, digest_layers, flags,
    COLUMNS: tl.constexpr, PAGES: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, SCALE: tl.constexpr,
    LOOPS: tl.constexpr, EXTENTS: tl.constexpr, PIECE: tl.constexpr, SRC_IDS: tl.constexpr, DST_IDS: tl.constexpr,
    GATED: tl.constexpr, DIGEST: tl.constexpr,
):  # fmt: skip
    """Grid (CTAs,): every CTA takes each CTAs-th tile of every entry, layer after layer."""
    pages = pages_let_through(num_pages, status, GATED)
    first, step = tl.program_id(0), tl.num_programs(0)
    entries = tl.load(layer_rows + num_layers)
    # Always one tile ahead, across entries too: the link's latency passes while the tile before is written.
    values = fetch_tile(
        table, first, src_shift, src_ids, src_first, pages, PAGES, LANES, WORD, SCALE, LOOPS, EXTENTS, PIECE, SRC_IDS
    )  # fmt: skip
    for layer in range(num_layers):
        for entry in range(tl.load(layer_rows + layer), tl.load(layer_rows + layer + 1)):
            row = table + entry * COLUMNS
            tiles = count_tiles(row, pages, PAGES, LANES, SCALE)
            following = tl.minimum(entry + 1, entries - 1)
            pages_after = tl.where(entry + 1 < entries, pages, 0)
            for tile in range(first, tiles, step):
                last = tile + step >= tiles
                ahead = fetch_tile(
                    table + tl.where(last, following, entry) * COLUMNS, tl.where(last, first, tile + step), src_shift,
                    src_ids, src_first, tl.where(last, pages_after, pages),
                    PAGES, LANES, WORD, SCALE, LOOPS, EXTENTS, PIECE, SRC_IDS,
                )  # fmt: skip
                finish_tile(
                    values, row, tile, dst_shift, dst_ids, dst_first, pages, digests, digest_layers,
                    PAGES, LANES, WORD, SCALE, LOOPS, EXTENTS, PIECE, DST_IDS, DIGEST, True,
                )  # fmt: skip
                values = ahead
            if first >= tiles:  # nothing here for this CTA: what it holds ahead must be the next entry's
                values = fetch_tile(
                    table + following * COLUMNS, first, src_shift, src_ids, src_first, pages_after,
                    PAGES, LANES, WORD, SCALE, LOOPS, EXTENTS, PIECE, SRC_IDS,
                )  # fmt: skip
        tl.debug_barrier()  # every thread's stores before the one thread that releases them
        tl.atomic_add(flags + layer, 1, sem="release", scope="sys")


def mapped_copy(
    table: CopyTable,
    num_pages: int,
    flags: torch.Tensor,
    ctas: int,
    *,
    src_ids: torch.Tensor | None = None,
    dst_ids: torch.Tensor | None = None,
    src_first: int = 0,
    dst_first: int = 0,
    status: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
) -> None:
    """Launch on the current stream. Mutates the destination, ``flags`` int32 [layers of the box] (each grows by
    ``ctas``), and ``digests`` where given. Ids, firsts, status and digests as in
    `kvtransfer.kernels.relayout.relayout`. The plain-torch reference is `relayout_reference`.
    """
    spare = table.layer_rows
    mapped_kernel[(ctas,)](
        table.rows,
        table.layer_rows,
        table.num_layers,
        0,
        0,
        spare if src_ids is None else src_ids,
        spare if dst_ids is None else dst_ids,
        src_first,
        dst_first,
        num_pages,
        spare if status is None else status,
        spare if digests is None else digests,
        1 if digests is None else digests.shape[1],
        flags,
        SRC_IDS=src_ids is not None,
        DST_IDS=dst_ids is not None,
        GATED=status is not None,
        DIGEST=digests is not None,
        **tile_constants(table),
    )
