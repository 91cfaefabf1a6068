"""One algebra for every copy: two layouts in, loop nests over the longest common runs of bytes out.

For a box of a page (some layers, some tokens) `coalesce` pairs the places of both layouts, orders and
merges the axes that continue each other on both sides, and yields one `Entry` a component: what is left
to loop over, and the *piece*, the run of bytes contiguous on both sides. Choice of path, kernel tables,
copy-engine descriptors and re-sharding by head all come from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import Dim, Layout, Placement, packed_box, slice_dims
from kvtransfer.kernels.spec import Component, KVSpec

Loop = tuple[int, int, int]  # (extent, source stride, destination stride), strides in bytes
Key = tuple[int, int]  # (layer, component)


@dataclass(frozen=True)
class Box:
    """Layers ``layer_start:layer_stop`` and tokens ``token_start:token_stop`` of every page of a transfer."""

    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int

    @classmethod
    def whole(cls, spec: KVSpec) -> Box:
        return cls(0, spec.num_layers, 0, spec.page_size)


@dataclass(frozen=True)
class Side:
    """Placements of one side of a copy; keys are (layer, component) of the shared spec."""

    places: Mapping[Key, Placement]
    num_pages: int

    @classmethod
    def of(cls, layout: Layout) -> Side:
        places = {(layer, i): p for layer, row in enumerate(layout.placements) for i, p in enumerate(row)}
        return cls(places, layout.num_pages)

    @classmethod
    def packed(cls, spec: KVSpec, box: Box, num_pages: int, page_stride: int) -> Side:
        """The box of each page back to back, page-first: how a staging ring holds it."""
        places = packed_box(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop, page_stride)
        return cls(places, num_pages)


@dataclass(frozen=True)
class Entry:
    """One component of one layer of a box, as a loop nest (outermost first) around a piece.

    ``src_*`` and ``dst_*`` are bytes: the offset of page 0 in its buffer, and the stride of pages.
    Looping in the given order visits the destination (or source, see `coalesce`) upwards.
    """

    layer: int
    component: int
    src_buffer: int
    src_offset: int
    src_page_stride: int
    dst_buffer: int
    dst_offset: int
    dst_page_stride: int
    loops: tuple[Loop, ...]
    piece_bytes: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of the entry a page."""
        return self.piece_bytes * math.prod(extent for extent, _, _ in self.loops)


@dataclass(frozen=True)
class Geometry:
    """What a copy of one box looks like on both sides: all of its entries, in layer order."""

    box: Box
    entries: tuple[Entry, ...]
    num_layers: int

    @cached_property
    def page_bytes(self) -> int:
        """Bytes moved a page."""
        return sum(e.unit_bytes for e in self.entries)

    @cached_property
    def piece_bytes(self) -> int:
        """The smallest piece of any entry: what the copy engine would be given."""
        return min(e.piece_bytes for e in self.entries)

    @cached_property
    def pieces_a_page(self) -> int:
        return sum(e.unit_bytes // e.piece_bytes for e in self.entries)

    @cached_property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every offset, stride and piece."""
        divisor = 16
        for e in self.entries:
            divisor = math.gcd(divisor, e.src_offset, e.dst_offset, e.src_page_stride, e.dst_page_stride, e.piece_bytes)
            for _, src, dst in e.loops:
                divisor = math.gcd(divisor, src, dst)
        return divisor

    @cached_property
    def merged(self) -> tuple[Entry, ...]:
        """Entries that continue each other on both sides joined, where they are one piece each.

        A page-first pool against a page-first slab comes out as a single run a page.
        """
        out: list[Entry] = []
        for e in self.entries:
            last = out[-1] if out else None
            if (
                last is not None
                and not last.loops
                and not e.loops
                and (last.src_buffer, last.src_page_stride) == (e.src_buffer, e.src_page_stride)
                and (last.dst_buffer, last.dst_page_stride) == (e.dst_buffer, e.dst_page_stride)
                and last.src_offset + last.piece_bytes == e.src_offset
                and last.dst_offset + last.piece_bytes == e.dst_offset
            ):
                out[-1] = Entry(
                    last.layer, last.component, last.src_buffer, last.src_offset, last.src_page_stride,
                    last.dst_buffer, last.dst_offset, last.dst_page_stride, (), last.piece_bytes + e.piece_bytes,
                )  # fmt: skip
            else:
                out.append(e)
        return tuple(out)


def coalesce(spec: KVSpec, src: Side, dst: Side, box: Box, *, order: str) -> Geometry:
    """Loop nests that copy ``box`` of a page from ``src`` to ``dst``.

    ``order`` ("src" or "dst") names the side that is visited upwards; give the page-first side, then the
    loops run in canonical order, which digests need. Raises LayoutError where the splits of an axis on
    both sides do not nest, or where the box is outside the spec or holds nothing.
    """
    if not (0 <= box.layer_start < box.layer_stop <= spec.num_layers):
        raise LayoutError(f"box: expected layers within 0:{spec.num_layers}, got {box.layer_start}:{box.layer_stop}")
    if not (0 <= box.token_start < box.token_stop <= spec.page_size):
        raise LayoutError(f"box: expected tokens within 0:{spec.page_size}, got {box.token_start}:{box.token_stop}")
    entries = []
    for layer in range(box.layer_start, box.layer_stop):
        for i, c in enumerate(spec.layers[layer]):
            if c.per_page and box.token_start > 0:
                continue
            entries.append(_entry(layer, i, c, src.places[layer, i], dst.places[layer, i], box, order))
    if not entries:
        raise LayoutError(f"box: expected something to copy, got {box} of components that lie in token 0's box alone")
    return Geometry(box, tuple(entries), spec.num_layers)


def require_same_content(src: KVSpec, dst: KVSpec) -> None:
    """Both sides of a copy must hold the same components; raises LayoutError with both specs."""
    if src != dst:
        raise LayoutError(f"expected both sides to hold the same spec, got {src.canonical()} and {dst.canonical()}")


def _entry(layer: int, i: int, c: Component, src: Placement, dst: Placement, box: Box, order: str) -> Entry:
    what = f"layer {layer} {c.name!r}"
    src_at, src_token = _tokens(src, c, box, what)
    dst_at, dst_token = _tokens(dst, c, box, what)
    loops: list[Loop] = []
    for a, b in ((src_token, dst_token), (src.head, dst.head), (src.byte, dst.byte)):
        loops.extend(_refine(a, b, what))
    by = 1 if order == "src" else 2
    loops.sort(key=lambda d: (d[by], d[3 - by]), reverse=True)
    merged: list[Loop] = []
    for extent, s, d in loops:
        if merged and merged[-1][1] == extent * s and merged[-1][2] == extent * d:
            merged[-1] = (merged[-1][0] * extent, s, d)
        else:
            merged.append((extent, s, d))
    piece = 1
    if merged and merged[-1][1:] == (1, 1):
        piece = merged.pop()[0]
    return Entry(
        layer, i, src.buffer, src.offset + src_at, src.page_stride, dst.buffer, dst.offset + dst_at, dst.page_stride,
        tuple(merged), piece,
    )  # fmt: skip


def _tokens(place: Placement, c: Component, box: Box, what: str) -> tuple[int, tuple[Dim, ...]]:
    """The token axis cut to the box. A packed side holds the box alone, so it needs no cut."""
    rows = 1 if c.per_page else box.token_stop - box.token_start
    have = math.prod(extent for extent, _ in place.token)
    if have == rows:
        return 0, place.token
    return slice_dims(place.token, box.token_start, rows, f"{what}: tokens")


def _refine(src: Sequence[Dim], dst: Sequence[Dim], what: str) -> list[Loop]:
    """Both mixed radices of one axis over their common refinement, extents of 1 dropped."""
    a, b = [d for d in src if d[0] > 1], [d for d in dst if d[0] > 1]
    out: list[Loop] = []
    while a and b:
        (ea, sa), (eb, sb) = a.pop(), b.pop()
        extent = min(ea, eb)
        if ea % extent or eb % extent:
            raise LayoutError(f"{what}: expected splits of an axis that nest, got {tuple(src)} and {tuple(dst)}")
        out.insert(0, (extent, sa, sb))
        if ea > extent:
            a.append((ea // extent, sa * extent))
        if eb > extent:
            b.append((eb // extent, sb * extent))
    if a or b:
        raise LayoutError(f"{what}: expected axes of one length, got {tuple(src)} and {tuple(dst)}")
    return out
