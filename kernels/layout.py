"""Layout: where each (page, layer, component, token, head, byte) of a KV cache lies, as byte strides.

Axes are declared over real tensors, never guessed from a shape. Everything below a layout moves raw bytes.

Axis words: ``layer``, ``kv`` (the components of a part, in order), ``page``, ``token``, ``head``, ``dim``
(the bytes of one head; components without a ``kv`` axis of their own lie one after the other in it).
``(page token)`` means that one tensor axis runs over both, page outermost. ``token``, ``head`` or ``dim``
given twice is split, the outer part first: ``"(page token) head token dim"`` is a manager page made of
several kernel blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.spec import Component, KVSpec

Dim = tuple[int, int]  # (extent, stride in bytes)

AXES = ("layer", "kv", "page", "token", "head", "dim")


@dataclass(frozen=True)
class Placement:
    """Where one component of one layer lies. Every axis is a mixed radix of (extent, stride) pairs.

    buffer, offset  the buffer, and the byte in it of page 0, token 0, head 0, byte 0
    page_stride     bytes from one page to the next
    token, head, byte  outermost first; their extents multiply to the rows, heads and head_bytes
    """

    buffer: int
    offset: int
    page_stride: int
    token: tuple[Dim, ...]
    head: tuple[Dim, ...]
    byte: tuple[Dim, ...]

    @property
    def inner(self) -> tuple[Dim, ...]:
        """All dims below the page, in logical order."""
        return self.token + self.head + self.byte


@dataclass(frozen=True)
class Part:
    """A tensor with declared axes that holds ``components`` of ``layers`` (see the module docstring)."""

    tensor: torch.Tensor
    axes: str
    components: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A spec with a place for every byte of it. Made by `page_first`, `named` or `from_parts`.

    placements    [layer][component], in the spec's order
    buffer_bytes  for each buffer, the bytes it must have
    """

    name: str
    spec: KVSpec
    num_pages: int
    placements: tuple[tuple[Placement, ...], ...]
    buffer_bytes: tuple[int, ...]

    @classmethod
    def page_first(cls, spec: KVSpec, num_pages: int, page_stride_bytes: int | None = None) -> Layout:
        """All layers of a page contiguous: page, layer, component, token, head, byte; one buffer.

        ``page_stride_bytes`` leaves room after each page (a slot); it must hold the page and keep its
        alignment.
        """
        stride = spec.page_bytes if page_stride_bytes is None else page_stride_bytes
        if stride < spec.page_bytes or stride % _alignment(spec.page_bytes):
            raise LayoutError(
                f"page_stride_bytes: expected at least {spec.page_bytes} and a multiple of "
                f"{_alignment(spec.page_bytes)}, got {stride}"
            )
        if num_pages < 1:
            raise LayoutError(f"num_pages: expected at least 1, got {num_pages}")
        placements = packed_box(spec, 0, spec.num_layers, 0, spec.page_size, stride)
        rows = tuple(
            tuple(placements[layer, i] for i in range(len(components))) for layer, components in enumerate(spec.layers)
        )
        return cls("page_first", spec, num_pages, rows, ((num_pages - 1) * stride + spec.page_bytes,))

    @classmethod
    def named(cls, name: str, spec: KVSpec, num_pages: int, *, head_groups: int | None = None) -> Layout:
        """A ready layout over buffers still to be allocated; `kvtransfer.kernels.names` lists them."""
        from kvtransfer.kernels import names  # noqa: PLC0415  (names builds layouts: it imports this module)

        return names.build(name, spec, num_pages, head_groups)

    @classmethod
    def from_parts(cls, spec: KVSpec, parts: Iterable[Part], *, name: str = "declared") -> Layout:
        """A layout over real tensors. Each tensor becomes a buffer, in the order given.

        Raises LayoutError where axes and shapes disagree, a component is missing or placed twice, parts
        hold different numbers of pages, or two bytes would share an address.
        """
        placed: dict[tuple[int, int], Placement] = {}
        buffer_bytes: list[int] = []
        addresses: list[int] = []
        page_counts: set[int] = set()
        for part in parts:
            num_pages, places = _place(spec, part, len(buffer_bytes))
            page_counts.add(num_pages)
            for key, place in places.items():
                if key in placed:
                    layer, i = key
                    raise LayoutError(f"layer {layer}, component {spec.layers[layer][i].name!r}: placed by two parts")
                placed[key] = place
            buffer_bytes.append(_span_bytes(part.tensor))
            addresses.append(part.tensor.data_ptr() if part.tensor.device.type != "meta" else -1)
        missing = [
            f"layer {layer} {c.name!r}"
            for layer, components in enumerate(spec.layers)
            for i, c in enumerate(components)
            if (layer, i) not in placed
        ]
        if missing:
            raise LayoutError(f"expected a part for every component, got none for {', '.join(missing[:6])}")
        if len(page_counts) != 1:
            raise LayoutError(f"expected the same number of pages in every part, got {sorted(page_counts)}")
        num_pages = page_counts.pop()
        rows = tuple(
            tuple(placed[layer, i] for i in range(len(components))) for layer, components in enumerate(spec.layers)
        )
        layout = cls(name, spec, num_pages, rows, tuple(buffer_bytes))
        _refuse_overlap(layout, addresses)
        return layout

    @classmethod
    def from_tensors(
        cls,
        spec: KVSpec,
        tensors: Sequence[torch.Tensor],
        axes: str | None,
        *,
        components: Sequence[str] | None = None,
        name: str = "declared",
    ) -> Layout:
        """Declared ``axes`` over tensors that all look alike: one for all layers, or one a layer.

        ``components`` defaults to every component of the first layer. ``axes=None`` is refused, with the
        ready layouts whose shapes would fit: a shape does not say what its axes mean.
        """
        if axes is None:
            from kvtransfer.kernels import names  # noqa: PLC0415

            fits = names.that_fit(spec, tensors)
            raise LayoutError(
                f"axes: expected a declaration such as 'page token head dim', got None; shape "
                f"{[tuple(t.shape) for t in tensors[:1]]} fits {' and '.join(fits) or 'no ready layout'}; pass axes=..."
            )
        wanted = tuple(components) if components is not None else tuple(c.name for c in spec.layers[0])
        if len(tensors) == 1:
            layers: list[tuple[int, ...]] = [tuple(range(spec.num_layers))]
        elif len(tensors) == spec.num_layers:
            layers = [(layer,) for layer in range(spec.num_layers)]
        else:
            raise LayoutError(f"tensors: expected 1 or one a layer ({spec.num_layers}), got {len(tensors)}")
        return cls.from_parts(
            spec, (Part(t, axes, wanted, ls) for t, ls in zip(tensors, layers, strict=True)), name=name
        )

    def select_layers(self, start: int, stop: int) -> Layout:
        """The same memory, layers ``start`` to ``stop - 1`` alone."""
        return replace(self, spec=self.spec.select_layers(start, stop), placements=self.placements[start:stop])

    def select_heads(self, part: int, parts: int) -> Layout:
        """The same memory, the heads of tensor-parallel rank ``part`` of ``parts`` (`KVSpec.select_heads`)."""
        spec = self.spec.select_heads(part, parts)

        def cut(place: Placement, whole: Component, share: Component) -> Placement:
            if whole.heads == share.heads:
                return place
            start, head = slice_dims(place.head, part * share.heads, share.heads, f"heads of {whole.name!r}")
            return replace(place, offset=place.offset + start, head=head)

        placements = tuple(
            tuple(cut(p, w, s) for p, w, s in zip(places, whole, share, strict=True))
            for places, whole, share in zip(self.placements, self.spec.layers, spec.layers, strict=True)
        )
        return replace(self, name=f"{self.name}[heads {part}/{parts}]", spec=spec, placements=placements)

    @property
    def is_page_first(self) -> bool:
        """Whether each page is one contiguous run in canonical order (the order of digests and records)."""
        packed = packed_box(self.spec, 0, self.spec.num_layers, 0, self.spec.page_size, 0)
        first = self.placements[0][0]
        return all(
            place.buffer == first.buffer
            and place.page_stride == first.page_stride
            and place.offset - first.offset == packed[layer, i].offset
            and _merge(place.inner) == _merge(packed[layer, i].inner)
            for layer, places in enumerate(self.placements)
            for i, place in enumerate(places)
        )


def packed_box(
    spec: KVSpec, layer_start: int, layer_stop: int, token_start: int, token_stop: int, page_stride: int
) -> dict[tuple[int, int], Placement]:
    """Page-first places of a box of a page: some layers, some tokens, packed without gaps, in buffer 0.

    Components that are per page lie in the box that starts at token 0.
    """
    places: dict[tuple[int, int], Placement] = {}
    at = 0
    for layer in range(layer_start, layer_stop):
        for i, c in enumerate(spec.layers[layer]):
            if c.per_page and token_start > 0:
                continue
            rows = 1 if c.per_page else token_stop - token_start
            places[layer, i] = Placement(
                0, at, page_stride, ((rows, c.heads * c.head_bytes),), ((c.heads, c.head_bytes),), ((c.head_bytes, 1),)
            )
            at += rows * c.heads * c.head_bytes
    return places


def box_bytes(spec: KVSpec, layer_start: int, layer_stop: int, token_start: int, token_stop: int) -> int:
    """Bytes a page of the box that `packed_box` places."""
    if token_start == 0 and token_stop == spec.page_size:
        return spec.layer_offsets[layer_stop] - spec.layer_offsets[layer_start]
    return sum(
        (0 if token_start else 1) * c.page_bytes(1) if c.per_page else c.page_bytes(token_stop - token_start)
        for components in spec.layers[layer_start:layer_stop]
        for c in components
    )


def slice_dims(dims: tuple[Dim, ...], start: int, count: int, what: str) -> tuple[int, tuple[Dim, ...]]:
    """Positions ``start`` to ``start + count - 1`` of a mixed radix: (byte offset, dims). Pure.

    A slice that is not itself a mixed radix (it cuts an inner block in two) raises LayoutError.
    """
    inner = 1
    for depth in range(len(dims) - 1, -1, -1):
        extent, stride = dims[depth]
        if count % inner == 0 and start % inner == 0 and start // inner % extent + count // inner <= extent:
            offset = (start // inner % extent) * stride
            above = start // (inner * extent)
            kept: tuple[Dim, ...] = ((count // inner, stride), *dims[depth + 1 :])
            for outer_extent, outer_stride in reversed(dims[:depth]):
                offset += above % outer_extent * outer_stride
                above //= outer_extent
            if above == 0:
                return offset, kept
        inner *= extent
    raise LayoutError(f"{what}: expected a slice along the declared split {dims}, got {start}:{start + count}")


def _alignment(nbytes: int) -> int:
    return math.gcd(nbytes, 16)


def _merge(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Adjacent dims that continue each other become one; extents of 1 vanish."""
    out: list[Dim] = []
    for extent, stride in dims:
        if extent == 1:
            continue
        if out and out[-1][1] == extent * stride:
            out[-1] = (out[-1][0] * extent, stride)
        else:
            out.append((extent, stride))
    return tuple(out)


def _span_bytes(t: torch.Tensor) -> int:
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return reach * t.element_size()


def _parse(axes: str) -> list[list[str]]:
    if re.search(r"[()]", re.sub(r"\([^()]*\)", " ", axes)):
        raise LayoutError(f"axes {axes!r}: expected each '(' closed by one ')' and none inside another")
    groups = [g.strip("()").split() for g in re.findall(r"\([^()]*\)|[^\s()]+", axes)]
    words = [w for g in groups for w in g]
    unknown = sorted(set(words) - set(AXES))
    if unknown or not words:
        raise LayoutError(f"axes {axes!r}: expected words of {AXES}, got {unknown or 'none'}")
    for word in ("layer", "kv", "page"):
        if words.count(word) > 1:
            raise LayoutError(
                f"axes {axes!r}: {word!r} is given {words.count(word)} times; only token, head, dim split"
            )
    for word in ("page", "dim"):
        if word not in words:
            raise LayoutError(f"axes {axes!r}: expected a {word!r} axis")
    return groups


def _place(spec: KVSpec, part: Part, buffer: int) -> tuple[int, dict[tuple[int, int], Placement]]:
    """(number of pages, placements) of one part."""
    t, groups = part.tensor, _parse(part.axes)
    where = f"axes {part.axes!r} over shape {tuple(t.shape)}"
    if len(groups) != t.dim():
        raise LayoutError(f"{where}: expected {len(groups)} tensor axes, got {t.dim()}")
    if any(s < 0 for s in t.stride()) or t.numel() == 0:
        raise LayoutError(f"{where}: expected a tensor with elements and non-negative strides, got {t.stride()}")
    if not part.layers or not all(0 <= layer < spec.num_layers for layer in part.layers):
        raise LayoutError(f"{where}: expected layers 0 to {spec.num_layers - 1}, got {part.layers}")
    if len(set(part.layers)) < len(part.layers) or len(set(part.components)) < len(part.components):
        raise LayoutError(
            f"{where}: expected each layer and component once, got layers {part.layers} and {part.components}"
        )
    members = [_members(spec, layer, part.components, where) for layer in part.layers]
    if any(m != members[0] for m in members):
        raise LayoutError(f"{where}: expected one set of components in all layers of a part; give one part a set")
    chosen = [c for _, c in members[0]]
    words = [w for g in groups for w in g]
    size = t.element_size()
    kv, has_head = "kv" in words, "head" in words
    if len({(c.rows(spec.page_size), c.heads if has_head else 1) for c in chosen}) != 1:
        raise LayoutError(f"{where}: components {part.components} differ in rows or heads; give one part each")
    row_bytes = [c.head_bytes if has_head else c.heads * c.head_bytes for c in chosen]
    if kv and len(set(row_bytes)) != 1:
        raise LayoutError(f"{where}: a kv axis needs components of one width, got {row_bytes} bytes")
    dim_bytes = row_bytes[0] if kv else sum(row_bytes)
    if dim_bytes % size:
        raise LayoutError(f"{where}: expected whole elements of {size} B in a row of {dim_bytes} B (misaligned)")
    totals = {
        "layer": len(part.layers),
        "kv": len(chosen),
        "token": chosen[0].rows(spec.page_size),
        "head": chosen[0].heads if has_head else 1,
        "dim": dim_bytes // size,
    }
    for word, total in totals.items():
        if word not in words and total != 1 and not (word == "kv" or word == "dim"):
            raise LayoutError(f"{where}: expected a {word!r} axis for {total} {word}s")
    extents = _extents(groups, tuple(t.shape), totals, where)
    dims = _in_text_order(groups, extents, t, size)
    (num_pages, page_stride) = dims["page"][0]
    places: dict[tuple[int, int], Placement] = {}
    for nth, layer in enumerate(part.layers):
        at_layer = nth * dims["layer"][0][1] if dims["layer"] else 0
        for order, ((i, c), width) in enumerate(zip(members[nth], row_bytes, strict=True)):
            offset = at_layer
            byte: tuple[Dim, ...] = (*dims["dim"], (size, 1))
            if kv:
                offset += order * dims["kv"][0][1]
            elif len(chosen) > 1:
                start = sum(row_bytes[:order])
                shift, byte = slice_dims(byte, start, width, f"{where}: component {c.name!r} in dim")
                offset += shift
            head = tuple(dims["head"])
            if not has_head:
                byte_merged = _merge(byte) or ((1, 1),)
                if c.heads > 1:
                    if len(byte_merged) != 1:
                        raise LayoutError(f"{where}: expected a head axis, or heads contiguous in dim")
                    head = ((c.heads, c.head_bytes * byte_merged[0][1]),)
                    byte = ((c.head_bytes, byte_merged[0][1]),)
                else:
                    head = ((1, 0),)
            places[layer, i] = Placement(
                buffer, offset, page_stride, tuple(dims["token"]) or ((1, 0),), head, _merge(byte) or ((1, 1),)
            )
    return num_pages, places


def _members(spec: KVSpec, layer: int, names: Sequence[str], where: str) -> list[tuple[int, Component]]:
    by_name = {c.name: (i, c) for i, c in enumerate(spec.layers[layer])}
    unknown = [n for n in names if n not in by_name]
    if unknown or not names:
        raise LayoutError(
            f"{where}: expected components of {sorted(by_name)} in layer {layer}, got {unknown or 'none'}"
        )
    return [by_name[n] for n in names]


def _extents(groups: list[list[str]], shape: tuple[int, ...], totals: dict[str, int], where: str) -> list[list[int]]:
    """The extent of every word of every group; raises where the text leaves one open or the shape disagrees."""
    known: dict[tuple[int, int], int] = {}
    spots = [(word, axis, i) for axis, g in enumerate(groups) for i, word in enumerate(g)]
    for word, axis, i in spots:
        if len(groups[axis]) == 1:
            known[axis, i] = shape[axis]
        elif word in totals and sum(w == word for w, _, _ in spots) == 1:
            known[axis, i] = totals[word]
    for word, total in totals.items():  # a split word with one part open
        places = [(a, i) for w, a, i in spots if w == word]
        unknown = [p for p in places if p not in known]
        if len(unknown) == 1:
            rest = math.prod(known[p] for p in places if p in known)
            if total % rest:
                raise LayoutError(f"{where}: expected parts of {word!r} that multiply to {total}, got {rest} x ?")
            known[unknown[0]] = total // rest
    for axis, group in enumerate(groups):  # what is left is the page
        unknown = [(axis, i) for i in range(len(group)) if (axis, i) not in known]
        if len(unknown) == 1:
            rest = math.prod(known[axis, i] for i in range(len(group)) if (axis, i) in known)
            if shape[axis] % rest:
                raise LayoutError(f"{where}: expected axis {axis} in multiples of {rest}, got {shape[axis]}")
            known[unknown[0]] = shape[axis] // rest
        elif unknown:
            raise LayoutError(f"{where}: ambiguous split in axis {axis}; write the parts as axes of their own")
    for axis, group in enumerate(groups):
        product = math.prod(known[axis, i] for i in range(len(group)))
        if product != shape[axis]:
            raise LayoutError(f"{where}: expected {product} along axis {axis} ({' '.join(group)}), got {shape[axis]}")
    for word, total in totals.items():
        places = [(a, i) for w, a, i in spots if w == word]
        product = math.prod(known[p] for p in places)
        if places and product != total:
            raise LayoutError(f"{where}: expected {total} {word}s, got {product}")
    return [[known[axis, i] for i in range(len(g))] for axis, g in enumerate(groups)]


def _in_text_order(
    groups: list[list[str]], extents: list[list[int]], t: torch.Tensor, size: int
) -> dict[str, list[Dim]]:
    dims: dict[str, list[Dim]] = {w: [] for w in AXES}
    for axis, group in enumerate(groups):
        for i, word in enumerate(group):
            stride = t.stride(axis) * size * math.prod(extents[axis][i + 1 :])
            dims[word].append((extents[axis][i], stride))
    return dims


def _refuse_overlap(layout: Layout, addresses: Sequence[int]) -> None:
    """Raise if two bytes of the layout share an address. ``addresses``: base of each buffer, -1 unknown."""
    spots: list[tuple[int, int, int, str]] = []  # (space, first byte, last byte + 1, name)
    for layer, places in enumerate(layout.placements):
        for i, place in enumerate(places):
            label = f"layer {layer} {layout.spec.layers[layer][i].name!r}"
            dims = [d for d in ((layout.num_pages, place.page_stride), *place.inner) if d[0] > 1]
            reach = 0
            for extent, stride in sorted(dims, key=lambda d: d[1]):
                if stride <= reach:
                    raise LayoutError(f"{label}: overlapping strides, expected more than {reach} B, got {stride} B")
                reach += (extent - 1) * stride
            base = addresses[place.buffer]
            space = -1 if base >= 0 else place.buffer
            start = place.offset + max(base, 0)
            spots.append((space, start, start + reach + 1, label))
    spots.sort()
    # Places whose spans cross are interleaved: compare them byte run by byte run.
    cluster: list[int] = []
    end = -1
    order = dict(_labelled(layout))
    for index, (space, first, last, _) in enumerate(spots):
        if cluster and (space != spots[cluster[-1]][0] or first >= end):
            _refuse_interleaved(layout, [spots[j] for j in cluster], order)
            cluster = []
        cluster.append(index)
        end = max(end, last) if len(cluster) > 1 else last
    _refuse_interleaved(layout, [spots[j] for j in cluster], order)


def _labelled(layout: Layout) -> list[tuple[str, Placement]]:
    return [
        (f"layer {layer} {layout.spec.layers[layer][i].name!r}", place)
        for layer, places in enumerate(layout.placements)
        for i, place in enumerate(places)
    ]


def _refuse_interleaved(layout: Layout, spots: list[tuple[int, int, int, str]], order: dict[str, Placement]) -> None:
    """Exact, for all pages at once: with one page stride S a run of bytes is a column range (address modulo S) in the
    rows q to q + pages - 1 (address // S), so two runs meet where their columns cross and their rows do."""
    if len(spots) < 2:
        return
    places = [order[label] for _, _, _, label in spots]
    strides = {place.page_stride for place in places}
    spread = layout.num_pages == 1 or len(strides) > 1  # no common stride: each page's runs are runs of their own
    pages = 1 if spread else layout.num_pages
    stride = max(last for _, _, last, _ in spots) if spread else strides.pop()
    origin = spots[0][1]
    starts: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    numbers: list[torch.Tensor] = []
    for number, ((_, first, _, _), place) in enumerate(zip(spots, places, strict=True)):
        dims = list(_merge(place.inner))
        run = 1
        if dims and dims[-1][1] == 1:
            run = dims.pop()[0]
        at = torch.tensor([first - origin])
        for extent, step in ((layout.num_pages if spread else 1, place.page_stride), *dims):
            at = (at[:, None] + torch.arange(extent) * step).reshape(-1)
        starts.append(at)
        lengths.append(torch.full_like(at, run))
        numbers.append(torch.full_like(at, number))
    at, run_bytes, number_of = torch.cat(starts), torch.cat(lengths), torch.cat(numbers)
    room = torch.minimum(run_bytes, stride - at % stride)
    cut = (run_bytes > room).nonzero().reshape(-1)  # what goes over the end of a row starts the next one
    at, number_of = torch.cat((at, at[cut] + room[cut])), torch.cat((number_of, number_of[cut]))
    run_bytes = torch.cat((room, run_bytes[cut] - room[cut]))
    row, by_row = (at // stride).sort()
    at, run_bytes, number_of = at[by_row], run_bytes[by_row], number_of[by_row]
    seen = 0
    for start in row.unique().tolist():
        low, high = torch.searchsorted(row, torch.tensor([start, start + pages])).tolist()
        if high == seen:
            continue  # every pair of this window was in the one before
        seen = high
        column, by_column = (at[low:high] % stride).sort()
        bad = (column[:-1] + run_bytes[low:high][by_column][:-1] > column[1:]).nonzero()
        if bad.numel():
            nth = int(bad[0])
            one, two = (low + int(by_column[j]) for j in (nth, nth + 1))
            byte = origin + max(int(row[one]), int(row[two])) * stride + int(column[nth + 1])
            names = [spots[int(number_of[j])][3] for j in (one, two)]
            raise LayoutError(f"overlapping strides: {names[0]} and {names[1]} share byte {byte}")
