"""A 64-bit digest of each layer of a page, folded into the copies; the same value on CPU and GPU.

Definition. A component's bytes of one page and layer, in page-first order, are read as little-endian 64-bit
words, the last one padded with zeros. With word w at index i of component c (its place in the spec's
layer), all in arithmetic modulo 2**64::

    x = w ^ ((c * 2**40 + i + 1) * 0x9E3779B97F4A7C15)
    x = (x ^ (x >> 32)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 29)) * 0x94D049BB133111EB
    digest(page, layer) = sum over c and i of (x ^ (x >> 32))

The mixing steps are those of splitmix64 (Steele, Lea, Flood, 2014) with shifts of our own. A sum does not
depend on the order in which tiles arrive, and every position has its own key, so moved, swapped or stale
words show. It is not cryptographic: it finds faults, not forgeries.
"""

from __future__ import annotations

import math

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvtransfer.kernels.coalesce import Box
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import box_bytes, packed_box
from kvtransfer.kernels.spec import Component, KVSpec

KEY = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
COMPONENT_SHIFT = 40
BLOCK_WORDS = 16 * 1024  # 128 KiB: fits the second-level cache three times


@triton.jit
def mix_words(words, position):
    """Mix uint64 ``words`` with their int64 ``position`` (component * 2**40 + index). Shapes broadcast."""
    x = words ^ ((position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    x = (x ^ (x >> 32)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 29)) * 0x94D049BB133111EB
    return x ^ (x >> 32)


@triton.jit
def tile_digest(
    values, lane, unit_words, first_position, WORD_BYTES: tl.constexpr, PAGES: tl.constexpr, LANES: tl.constexpr
):
    """Sum of mixed words of each page of a tile: [PAGES] uint64.

    ``values`` [PAGES, LANES] integers of WORD_BYTES, 0 in lanes past the unit; ``lane`` [LANES] int32, their index
    in the unit, which the tile starts at a multiple of 8 bytes; ``unit_words`` lanes are in the unit,
    whose first word has ``first_position`` (component * 2**40 + its index in the component).
    """
    if WORD_BYTES == 8:
        words = values.to(tl.uint64, bitcast=True)
        index = lane
        valid = lane < unit_words
    else:
        NARROW: tl.constexpr = 8 // WORD_BYTES
        if WORD_BYTES == 4:
            narrow = values.to(tl.uint32, bitcast=True).to(tl.uint64)
        elif WORD_BYTES == 2:
            narrow = values.to(tl.uint16, bitcast=True).to(tl.uint64)
        else:
            narrow = values.to(tl.uint8, bitcast=True).to(tl.uint64)
        shift = (lane % NARROW).to(tl.uint64) * (8 * WORD_BYTES)
        words = tl.sum(tl.reshape(narrow << shift[None, :], (PAGES, LANES // NARROW, NARROW)), axis=2)
        first = tl.min(tl.reshape(lane, (LANES // NARROW, NARROW)), axis=1)
        index = first // NARROW
        valid = first < unit_words
    position = index.to(tl.int64) + first_position
    mixed = mix_words(words, position[None, :])
    return tl.sum(tl.where(valid[None, :], mixed, 0), axis=1)


def page_digests(pages: NDArray[np.uint8], spec: KVSpec) -> NDArray[np.uint64]:
    """Reference. ``pages`` uint8 [n, page_bytes], page-first -> uint64 [n, layers]. Nothing is mutated."""
    return box_digests(pages, spec, Box.whole(spec))


def box_digests(pages: NDArray[np.uint8], spec: KVSpec, box: Box) -> NDArray[np.uint64]:
    """What ``box`` adds to the digests: ``pages`` uint8 [n, bytes of the box], packed -> uint64 [n, layers].

    The sums over boxes that make up a page are the page's digests (`first_word` says which boxes can be added).
    """
    nbytes = box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
    if pages.ndim != 2 or pages.dtype != np.uint8 or pages.shape[1] != nbytes:
        raise LayoutError(f"pages: expected uint8 [n, {nbytes}], got {pages.dtype} {pages.shape}")
    out = np.zeros((pages.shape[0], spec.num_layers), dtype=np.uint64)
    packed = packed_box(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop, 0)
    for (layer, order), place in packed.items():
        unit = math.prod(extent for extent, _ in place.inner)
        part = pages[:, place.offset : place.offset + unit]
        if unit % 8:
            padded = np.zeros((pages.shape[0], -(-unit // 8) * 8), dtype=np.uint8)
            padded[:, :unit] = part
            part = padded
        words = np.ascontiguousarray(part).view("<u8")
        first = first_word(spec.layers[layer][order], box)
        position = np.arange(words.shape[1], dtype=np.uint64) + np.uint64((order << COMPONENT_SHIFT) + first)
        out[:, layer] += _mixed_sums(words, (position + np.uint64(1)) * np.uint64(KEY))
    return out


def _mixed_sums(words: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sum of the mixed words of each row, a few rows at a time: the working set stays in the cache."""
    rows = max(1, BLOCK_WORDS // max(1, words.shape[1]))
    sums = np.empty(words.shape[0], dtype=np.uint64)
    x, t = (np.empty((min(rows, words.shape[0]), words.shape[1]), dtype=np.uint64) for _ in range(2))
    for at in range(0, words.shape[0], rows):
        part = words[at : at + rows]
        a, b = x[: len(part)], t[: len(part)]
        np.bitwise_xor(part, keys, out=a)
        for shift, factor in ((32, MIX_1), (29, MIX_2)):
            np.right_shift(a, np.uint64(shift), out=b)
            np.bitwise_xor(a, b, out=a)
            np.multiply(a, np.uint64(factor), out=a)
        np.right_shift(a, np.uint64(32), out=b)
        np.bitwise_xor(a, b, out=a)
        sums[at : at + rows] = a.sum(axis=1, dtype=np.uint64)
    return sums


def first_word(component: Component, box: Box) -> int:
    """Index of the box's first word within the component; a box that starts inside a word raises LayoutError."""
    start = 0 if component.per_page else box.token_start * component.heads * component.head_bytes
    if start % 8:
        raise LayoutError(
            f"digest: expected a box that starts on a multiple of 8 bytes of {component.name!r}, got {start}"
        )
    return start // 8
