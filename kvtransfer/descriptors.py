"""Copy-engine descriptors from a geometry: addresses and sizes of every piece, in bulk. Pure numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.coalesce import Entry, Geometry
from kvtransfer.lanes import U64

Ids = NDArray[np.int64]


def piece_offsets(entry: Entry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets of every piece of an entry within a page, on both sides: the loops written out."""
    src, dst = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for extent, s, d in entry.loops:
        steps = np.arange(extent, dtype=np.int64)
        src = (src[:, None] + steps * s).reshape(-1)
        dst = (dst[:, None] + steps * d).reshape(-1)
    return src, dst


def descriptors(geometry: Geometry, src: list[int], dst: list[int], src_ids: Ids, dst_ids: Ids) -> tuple[U64, U64, U64]:
    """(destination addresses, source addresses, sizes) of every piece, page by page: what a copy engine takes."""
    dst_cols, src_cols, sizes = [], [], []
    for e in geometry.merged:
        src_at, dst_at = piece_offsets(e)
        src_cols.append((src[e.src_buffer] + e.src_offset + src_ids * e.src_page_stride)[:, None] + src_at)
        dst_cols.append((dst[e.dst_buffer] + e.dst_offset + dst_ids * e.dst_page_stride)[:, None] + dst_at)
        sizes.append(np.full(src_cols[-1].shape, e.piece_bytes, dtype=np.uint64))
    if len(sizes) == 1:
        return (
            dst_cols[0].reshape(-1).astype(np.uint64),
            src_cols[0].reshape(-1).astype(np.uint64),
            sizes[0].reshape(-1),
        )
    return (
        np.concatenate(dst_cols, axis=1).reshape(-1).astype(np.uint64),
        np.concatenate(src_cols, axis=1).reshape(-1).astype(np.uint64),
        np.concatenate(sizes, axis=1).reshape(-1),
    )
