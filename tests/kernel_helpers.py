"""What the kernel tests share: guarded buffers, a naive model of where bytes lie, one way to run every kernel.

The model is independent of `kvtransfer.kernels.layout`: axes are given with all their extents, outermost first,
every byte of a tensor is listed with its coordinates, and (page, offset in the page-first page) is counted
from them by the definition in `KVSpec`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.coalesce import Box, Geometry, Side, coalesce
from kvtransfer.kernels.digest import box_digests
from kvtransfer.kernels.layout import Layout, Part, Placement, box_bytes
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.relayout import relayout, relayout_reference
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.kernels.table import CopyTable, build_table

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
GUARD_BYTES = 256
KERNELS = ("relayout", "mapped", "reference")
WARPS = 4
CTAS = 2

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Nest = Sequence[tuple[str, int]]  # (axis word, extent), outermost first, down to ("byte", bytes an element)


def fresh_generator() -> np.random.Generator:
    """Random bits from a seed of its own, printed so that a failure can be repeated."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


class Guarded:
    """``nbytes`` random bytes on the device between two guards of random bytes.

    inner  uint8 [nbytes], the part that a test hands out. ``misalign`` bytes move it off its 16-byte boundary.
    """

    def __init__(self, nbytes: int, rng: np.random.Generator, misalign: int = 0) -> None:
        self.start = GUARD_BYTES + misalign
        self.original: Bytes = rng.integers(0, 256, self.start + nbytes + GUARD_BYTES, dtype=np.uint8)
        room = torch.empty(self.original.size + 16, dtype=torch.uint8, device=DEVICE)
        lead = -room.data_ptr() % 16
        self.whole = room[lead : lead + self.original.size]
        self.whole.copy_(torch.from_numpy(self.original))
        self.inner = self.whole[self.start : self.start + nbytes]

    def fill(self, data: Bytes) -> None:
        """Other bytes inside, which count as the original ones from now on."""
        self.original[self.start : self.start + data.size] = data
        self.inner.copy_(torch.from_numpy(data))

    def before(self) -> Bytes:
        """The inner bytes as they were."""
        return self.original[self.start : self.original.size - GUARD_BYTES]

    def now(self) -> Bytes:
        return self.inner.cpu().numpy().copy()

    def expect(self, inner: Bytes | None = None) -> None:
        """Every byte, guards included, is as it was, or as ``inner`` where that is given."""
        wanted = self.original.copy()
        if inner is not None:
            wanted[self.start : wanted.size - GUARD_BYTES] = inner
        got = self.whole.cpu().numpy()
        bad = np.flatnonzero(got != wanted)
        if bad.size:
            at = int(bad[0])
            raise AssertionError(
                f"{bad.size} bytes differ, the first at {at - self.start} of {wanted.size - self.start - GUARD_BYTES} "
                f"(guards lie outside): expected {wanted[at]}, got {got[at]}"
            )


@dataclass(frozen=True)
class Memory:
    """A layout over guarded buffers. ``pages`` and ``offsets``: for each byte of each buffer, the page it belongs to
    (-1: none) and its offset in that page when it is page-first.
    """

    layout: Layout
    buffers: list[Guarded]
    pages: list[Numbers]
    offsets: list[Numbers]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [b.inner for b in self.buffers]

    def page_first(self, data: Sequence[Bytes]) -> Bytes:
        """[pages, page_bytes] of the bytes ``data`` of the buffers."""
        out: Bytes = np.zeros((self.layout.num_pages, self.layout.spec.page_bytes), dtype=np.uint8)
        for values, pages, offsets in zip(data, self.pages, self.offsets, strict=True):
            held = pages >= 0
            out[pages[held], offsets[held]] = values[held]
        return out

    def fill(self, page_first: Bytes) -> None:
        """Put [pages, page_bytes] where they belong; bytes of no page keep their random values."""
        for buffer, pages, offsets in zip(self.buffers, self.pages, self.offsets, strict=True):
            held = pages >= 0
            data = buffer.before().copy()
            data[held] = page_first[pages[held], offsets[held]]
            buffer.fill(data)

    def original_pages(self) -> Bytes:
        return self.page_first([b.before() for b in self.buffers])

    def expect_pages(self, wanted: Bytes) -> None:
        """The memory holds ``wanted`` [pages, page_bytes]; every other byte is as it was. Names the coordinates."""
        got = self.page_first([b.now() for b in self.buffers])
        bad = np.argwhere(got != wanted)
        if bad.size:
            page, offset = bad[0].tolist()
            raise AssertionError(
                f"{self.layout.name}: {len(bad)} bytes differ, the first at page {page}, "
                f"{coordinates(self.layout.spec, offset)}: expected {wanted[page, offset]}, got {got[page, offset]}"
            )
        for buffer, pages, offsets in zip(self.buffers, self.pages, self.offsets, strict=True):
            held = pages >= 0
            data = buffer.before().copy()
            data[held] = wanted[pages[held], offsets[held]]
            buffer.expect(data)

    def expect_untouched(self) -> None:
        for buffer in self.buffers:
            buffer.expect()


def coordinates(spec: KVSpec, offset: int) -> str:
    """(layer, component, token, head, byte) of an offset in a page-first page, in words."""
    for layer, components in enumerate(spec.layers):
        for c in components:
            if offset < c.page_bytes(spec.page_size):
                token, rest = divmod(offset, c.heads * c.head_bytes)
                head, byte = divmod(rest, c.head_bytes)
                return f"layer {layer}, {c.name!r}, token {token}, head {head}, byte {byte}"
            offset -= c.page_bytes(spec.page_size)
    return "outside the page"


def starts_in_page(spec: KVSpec) -> dict[tuple[int, str], int]:
    """Offset of each (layer, component name) in a page-first page, counted one by one."""
    at, starts = 0, {}
    for layer, components in enumerate(spec.layers):
        for c in components:
            starts[layer, c.name] = at
            at += (1 if c.per_page else spec.page_size) * c.heads * c.head_bytes
    return starts


def where_bytes_lie(spec: KVSpec, nest: Nest, names: Sequence[str], layers: Sequence[int]) -> tuple[Numbers, Numbers]:
    """(page, offset in the page-first page) of every byte of a tensor whose axes nest as ``nest``, in its C order."""
    extents = [extent for _, extent in nest]
    index = np.indices(extents).reshape(len(extents), -1)

    def position(word: str) -> Numbers:
        at = np.zeros(index.shape[1], dtype=np.int64)
        for i, (other, extent) in enumerate(nest):
            if other == word:
                at = at * extent + index[i]
        return at

    element = next(extent for word, extent in reversed(nest) if word == "byte")
    words = [word for word, _ in nest]
    byte = position("dim") * element + position("byte")
    nth_layer, kv, token, head = position("layer"), position("kv"), position("token"), position("head")
    by_name = {c.name: c for c in spec.layers[layers[0]]}
    chosen = [by_name[n] for n in names]
    if "head" in words:
        widths = [c.head_bytes for c in chosen]
    else:
        widths = [c.heads * c.head_bytes for c in chosen]
    if "kv" not in words:  # side by side in the innermost axis
        edges = np.cumsum([0, *widths])
        kv = np.searchsorted(edges, byte, side="right") - 1
        byte = byte - edges[kv]
    heads, head_bytes = np.array([c.heads for c in chosen]), np.array([c.head_bytes for c in chosen])
    if "head" not in words:
        head, byte = byte // head_bytes[kv], byte % head_bytes[kv]
    starts = starts_in_page(spec)
    table = np.array([[starts[layer, n] for n in names] for layer in layers])
    offset = table[nth_layer, kv] + token * heads[kv] * head_bytes[kv] + head * head_bytes[kv] + byte
    return position("page"), offset


def grouped(axes: str) -> list[list[str]]:
    return [g.strip("()").split() for g in re.findall(r"\([^()]*\)|\w+", axes)]


def sized(axes: str, sizes: Mapping[str, Sequence[int]], element: int) -> tuple[list[int], Nest]:
    """(shape, nest) of a tensor: ``sizes`` gives the extents of each word in the order in which it occurs."""
    left = {word: list(extents) for word, extents in sizes.items()}
    shape, nest = [], []
    for group in grouped(axes):
        extents = [left[word].pop(0) for word in group]
        nest += list(zip(group, extents, strict=True))
        shape.append(int(np.prod(extents)))
    return shape, [*nest, ("byte", element)]


@dataclass(frozen=True)
class Plan:
    """One tensor to make: axes with the extents of their words; ``pad`` elements are added to some tensor axes."""

    axes: str
    sizes: Mapping[str, Sequence[int]]
    names: Sequence[str]
    layers: Sequence[int]
    dtype: torch.dtype = torch.uint8
    pad: Sequence[int] = ()


def declare(spec: KVSpec, plans: Sequence[Plan], rng: np.random.Generator, misalign: int = 0) -> Memory:
    """Real tensors (strided where padded) with declared axes, through `Layout.from_parts`."""
    parts, buffers, pages, offsets = [], [], [], []
    for plan in plans:
        size = plan.dtype.itemsize
        shape, nest = sized(plan.axes, plan.sizes, size)
        padded = [n + p for n, p in zip(shape, plan.pad or [0] * len(shape), strict=True)]
        buffer = Guarded(int(np.prod(padded)) * size, rng, misalign)
        tensor = buffer.inner.view(plan.dtype).view(padded)[tuple(slice(n) for n in shape)]
        element = np.arange(int(np.prod(padded))).reshape(padded)[tuple(slice(n) for n in shape)].reshape(-1)
        address = (element[:, None] * size + np.arange(size)).reshape(-1)
        page, offset = np.full(buffer.inner.numel(), -1), np.full(buffer.inner.numel(), -1)
        page[address], offset[address] = where_bytes_lie(spec, nest, plan.names, plan.layers)
        parts.append(Part(tensor, plan.axes, tuple(plan.names), tuple(plan.layers)))
        buffers.append(buffer)
        pages.append(page)
        offsets.append(offset)
    return Memory(Layout.from_parts(spec, parts), buffers, pages, offsets)


def page_first_memory(
    spec: KVSpec, num_pages: int, rng: np.random.Generator, stride: int | None = None, misalign: int = 0
) -> Memory:
    layout = Layout.page_first(spec, num_pages, stride)
    step = spec.page_bytes if stride is None else stride
    address = np.arange(layout.buffer_bytes[0])
    inside = address % step < spec.page_bytes
    pages, offsets = np.where(inside, address // step, -1), np.where(inside, address % step, -1)
    return Memory(layout, [Guarded(address.size, rng, misalign)], [pages], [offsets])


def ready_memory(name: str, spec: KVSpec, num_pages: int, rng: np.random.Generator) -> Memory:
    """A ready layout over buffers of its own. How it nests is written down here once more, from the engines' shapes."""
    if name == "page_first":
        return page_first_memory(spec, num_pages, rng)
    layout = Layout.named(name, spec, num_pages)
    buffers, pages, offsets = [], [], []
    for nest, names, layers in ready_nests(name, spec, num_pages):
        page, offset = where_bytes_lie(spec, nest, names, layers)
        buffers.append(Guarded(page.size, rng))
        pages.append(page)
        offsets.append(offset)
    assert layout.buffer_bytes == tuple(p.size for p in pages)
    return Memory(layout, buffers, pages, offsets)


def ready_nests(name: str, spec: KVSpec, num_pages: int) -> list[tuple[Nest, list[str], list[int]]]:
    """(nest, components, layers) of each tensor of a ready layout."""
    layers = list(range(spec.num_layers))
    slots = num_pages * spec.page_size

    def rows(c: Component) -> int:
        return 1 if c.per_page else spec.page_size

    if name == "sglang.layer_first":  # k_buffer[l], v_buffer[l]: (slots, heads, dim)
        return [
            ([("page", num_pages), ("token", rows(c)), ("head", c.heads), ("byte", c.head_bytes)], [c.name], [layer])
            for layer in layers
            for c in spec.layers[layer]
        ]
    if name == "transformers":  # keys, values: (heads, slots, dim)
        return [
            ([("head", c.heads), ("page", num_pages), ("token", rows(c)), ("byte", c.head_bytes)], [c.name], [layer])
            for layer in layers
            for c in spec.layers[layer]
        ]
    first, *others = spec.layers[0]
    count, names = len(spec.layers[0]), [c.name for c in spec.layers[0]]
    equal = count > 1 and all((c.heads, c.head_bytes) == (first.heads, first.head_bytes) for c in others)
    sizes = {
        "L": ("layer", len(layers)),
        "B": ("page", num_pages),
        "N": ("token", rows(first)),
        "H": ("head", first.heads),
    }
    if name.startswith("vllm."):
        letters = {"MLA": "LBNHC"}.get(name[5:], name[5:])
        width = sum(c.head_bytes for c in spec.layers[0])  # K and V side by side for each head
        return [([*(sizes[letter] for letter in letters if letter != "C"), ("byte", width)], names, layers)]
    orders = {
        "sglang.layer_first_host": "2LBNH",  # (2, L, slots, heads, dim)
        "sglang.page_first": "2BNLH",  # (2, slots, L, heads, dim)
        "sglang.page_first_direct": "2BLNH",  # (2, pages, L, page, heads, dim)
        "sglang.page_head": "2BHNL",  # (2, pages, heads, page, L, dim)
        "sglang.page_unified": "BHL2N",  # (pages, groups, L, 2, page, heads of a group, dim); a head a group
    }
    order = orders[name]
    assert slots % num_pages == 0
    if equal:
        sizes["2"] = ("kv", count)
        return [([*(sizes[letter] for letter in order), ("byte", first.head_bytes)], names, layers)]
    out: list[tuple[Nest, list[str], list[int]]] = []
    for c in spec.layers[0]:
        own = {**sizes, "H": ("head", c.heads), "N": ("token", rows(c))}
        out.append(([*(own[letter] for letter in order if letter != "2"), ("byte", c.head_bytes)], [c.name], layers))
    return out


def addresses(place: Placement, num_pages: int) -> Numbers:
    """[pages, bytes a page] where a placement says that they lie in their buffer, in page-first order."""
    at = np.array([[place.offset]])
    for extent, stride in (*place.token, *place.head, *place.byte):
        at = (at[:, :, None] + np.arange(extent) * stride).reshape(1, -1)
    return at + (np.arange(num_pages) * place.page_stride)[:, None]


def placement_maps(layout: Layout) -> tuple[list[Numbers], list[Numbers]]:
    """(pages, offsets) of every byte of every buffer as the layout has them; raises where two bytes share one."""
    pages = [np.full(n, -1) for n in layout.buffer_bytes]
    offsets = [np.full(n, -1) for n in layout.buffer_bytes]
    starts = starts_in_page(layout.spec)
    for layer, places in enumerate(layout.placements):
        for c, place in zip(layout.spec.layers[layer], places, strict=True):
            at = addresses(place, layout.num_pages)
            assert at.shape[1] == c.page_bytes(layout.spec.page_size)
            assert (pages[place.buffer][at] == -1).all()
            pages[place.buffer][at] = np.arange(layout.num_pages)[:, None]
            offsets[place.buffer][at] = starts[layer, c.name] + np.arange(at.shape[1])
    return pages, offsets


def random_ids(rng: np.random.Generator, count: int, limit: int) -> Numbers:
    return rng.permutation(limit)[:count].astype(np.int64)


def on_device(ids: Numbers, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.asarray(ids)).to(dtype).to(DEVICE)


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def make_table(geometry: Geometry, src: Memory, dst: Memory, tile_bytes: int = 4096) -> CopyTable:
    bases = addresses_of(src.tensors), addresses_of(dst.tensors)
    return build_table(geometry, src.layout.spec, *bases, DEVICE, tile_bytes, WARPS)


def run_kernel(
    kernel: str,
    geometry: Geometry,
    spec: KVSpec,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_ids: Numbers,
    dst_ids: Numbers,
    *,
    tile_bytes: int = 4096,
    id_dtype: torch.dtype = torch.int64,
) -> NDArray[np.uint64] | None:
    """Run one of `KERNELS` over real tensors with ids on both sides; the digests that it computed, if it does."""
    if kernel == "reference":
        relayout_reference(geometry, src, dst, on_device(src_ids), on_device(dst_ids))
        return None
    table = build_table(geometry, spec, addresses_of(src), addresses_of(dst), DEVICE, tile_bytes, WARPS)
    digests = torch.zeros(len(src_ids), spec.num_layers, dtype=torch.int64, device=DEVICE)
    a, b = on_device(src_ids, id_dtype), on_device(dst_ids, id_dtype)
    if kernel == "relayout":
        relayout(table, len(src_ids), src_ids=a, dst_ids=b, digests=digests)
    else:
        flags = torch.zeros(table.num_layers, dtype=torch.int32, device=DEVICE)
        mapped_copy(table, len(src_ids), flags, CTAS, src_ids=a, dst_ids=b, digests=digests)
        assert flags.tolist() == [CTAS] * table.num_layers
    return as_unsigned(digests)


def as_unsigned(digests: torch.Tensor) -> NDArray[np.uint64]:
    return digests.cpu().numpy().view(np.uint64)


def check_copy(
    kernel: str,
    src: Memory,
    dst: Memory,
    rng: np.random.Generator,
    *,
    count: int | None = None,
    order: str | None = None,
    tile_bytes: int = 4096,
    id_dtype: torch.dtype = torch.int64,
) -> None:
    """Copy random pages to random places and compare every byte on both sides, guards included, and the digests."""
    spec = src.layout.spec
    count = count if count is not None else max(1, min(src.layout.num_pages, dst.layout.num_pages) - 1)
    src_ids, dst_ids = random_ids(rng, count, src.layout.num_pages), random_ids(rng, count, dst.layout.num_pages)
    content, wanted = src.original_pages(), dst.original_pages()
    wanted[dst_ids] = content[src_ids]
    if order is None:
        order = "dst" if dst.layout.is_page_first else "src"
    geometry = coalesce(spec, Side.of(src.layout), Side.of(dst.layout), Box.whole(spec), order=order)
    digests = run_kernel(
        kernel, geometry, spec, src.tensors, dst.tensors, src_ids, dst_ids, tile_bytes=tile_bytes, id_dtype=id_dtype
    )
    dst.expect_pages(wanted)
    dst.fill(wanted)  # what counts as untouched from now on
    src.expect_untouched()
    if digests is not None and (src.layout.is_page_first or dst.layout.is_page_first):
        np.testing.assert_array_equal(digests, box_digests(content[src_ids], spec, Box.whole(spec)))


def check_round(kernel: str, pool: Memory, store: Memory, rng: np.random.Generator, tile_bytes: int = 4096) -> None:
    """Each kernel on its own errand: relayout gathers from the pool, mapped fills it, the reference does both."""
    if kernel != "mapped":
        check_copy(kernel, pool, store, rng, tile_bytes=tile_bytes)
    if kernel != "relayout":
        check_copy(kernel, store, pool, rng, tile_bytes=tile_bytes)


def box_columns(spec: KVSpec, box: Box) -> Numbers:
    """Offsets in the page-first page of the bytes of a box, in the order in which a packed box holds them."""
    out: list[Numbers] = []
    for (layer, name), start in starts_in_page(spec).items():
        c = next(c for c in spec.layers[layer] if c.name == name)
        if not box.layer_start <= layer < box.layer_stop:
            continue
        row = c.heads * c.head_bytes
        if c.per_page:
            out += [np.arange(start, start + row)] if box.token_start == 0 else []
        else:
            out.append(np.arange(start + box.token_start * row, start + box.token_stop * row))
    columns = np.concatenate(out)
    assert columns.size == box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
    return columns


def head_columns(spec: KVSpec, part: int, parts: int) -> Numbers:
    """Offsets in the page-first page of the heads of rank ``part`` of ``parts``, in the order of its own pages."""
    out: list[Numbers] = []
    for (layer, name), start in starts_in_page(spec).items():
        c = next(c for c in spec.layers[layer] if c.name == name)
        whole = (start + np.arange(c.page_bytes(spec.page_size))).reshape(-1, c.heads, c.head_bytes)
        first, last = (0, 1) if c.heads == 1 else (part * c.heads // parts, (part + 1) * c.heads // parts)
        out.append(whole[:, first:last].reshape(-1))
    return np.concatenate(out)
