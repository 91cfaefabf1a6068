"""The kernels' view of a geometry: one row of 64-bit numbers an entry, addresses resolved.

Row: source address, destination address, source page stride, destination page stride, length of a unit, layer,
digest position of its first word, then for each loop (extent, source stride, destination stride), innermost
first. Strides and length are in units of the geometry's alignment, so that the compiler knows how far each address is
aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtransfer.kernels.coalesce import Entry, Geometry
from kvtransfer.kernels.digest import COMPONENT_SHIFT, first_word
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.launch import Tile, choose_tile
from kvtransfer.kernels.spec import KVSpec

HEAD = 7  # columns before the loops; the kernels spell these numbers out


@dataclass(frozen=True)
class CopyTable:
    """``rows`` int64 [entries, HEAD + 3 * loops] and ``layer_rows`` int32 [layers + 1] (first row of each layer of
    the box, counted from its first layer) on the device; the rest is what a launch needs to know.
    """

    rows: torch.Tensor
    layer_rows: torch.Tensor
    num_entries: int
    num_layers: int
    loops: int
    extents: tuple[int, ...]  # of the loops, innermost first, where all entries have the same; else empty
    piece_words: int
    tile: Tile
    unit_words: int  # of the largest entry


def build_table(
    geometry: Geometry,
    spec: KVSpec,
    src_addresses: Sequence[int],
    dst_addresses: Sequence[int],
    device: torch.device,
    tile_bytes: int,
    warps: int,
) -> CopyTable:
    """Resolve ``geometry`` against the base addresses of both sides' buffers. The table holds no reference to
    the buffers: whoever launches keeps them alive. Bases of 0 leave room for a shift at launch.
    """
    alignment = math.gcd(geometry.alignment, *src_addresses, *dst_addresses)
    word = min(alignment, 8)
    piece = math.gcd(*(e.piece_bytes for e in geometry.entries))
    nests = [_split_piece(e, piece) for e in geometry.entries]
    loops = max(len(n) for n in nests)
    rows = []
    extents = set()
    for e, nest in zip(geometry.entries, nests, strict=True):
        if e.unit_bytes // word >= 2**30:  # lanes of the last tile, past the unit, must be 32-bit numbers too
            raise LayoutError(
                f"layer {e.layer}: expected less than 2**30 words a page and component, got {e.unit_bytes} B"
            )
        row = [
            src_addresses[e.src_buffer] + e.src_offset,
            dst_addresses[e.dst_buffer] + e.dst_offset,
            e.src_page_stride // alignment,
            e.dst_page_stride // alignment,
            e.unit_bytes // alignment,
            e.layer,
            (e.component << COMPONENT_SHIFT) + first_word(spec.layers[e.layer][e.component], geometry.box),
        ]
        nest = list(reversed([(1, 0, 0)] * (loops - len(nest)) + nest))
        extents.add(tuple(extent for extent, _, _ in nest))
        for extent, s, d in nest:
            row += [extent, s // alignment, d // alignment]
        rows.append(row)
    first = [0]
    for layer in range(geometry.box.layer_start, geometry.box.layer_stop):
        first.append(first[-1] + sum(e.layer == layer for e in geometry.entries))
    unit = max(e.unit_bytes for e in geometry.entries)
    return CopyTable(
        torch.tensor(rows, dtype=torch.int64).to(device),
        torch.tensor(first, dtype=torch.int32).to(device),
        len(rows),
        len(first) - 1,
        loops,
        extents.pop() if len(extents) == 1 else (),
        piece // word,
        choose_tile(unit, alignment, tile_bytes, warps),
        unit // word,
    )


def _split_piece(e: Entry, piece: int) -> list[tuple[int, int, int]]:
    nest = list(e.loops)
    if e.piece_bytes > piece:
        nest.append((e.piece_bytes // piece, piece, piece))
    return nest
