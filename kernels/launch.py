"""Pure choice of tile, grid and warps, with the measurement each constant rests on."""

from __future__ import annotations

from dataclasses import dataclass

# A tile of 64 KiB a CTA keeps 64 KiB in flight: 1,024 threads x 64 B. On an H200 the mapped kernel reached
# 50.9 GB/s with it and 4 CTAs, and 25-47 with half of it (docs/performance.md).
MAPPED_TILE_BYTES = 64 * 1024
MAPPED_WARPS = 32
# Device to device there is no latency of the link to hide: smaller tiles give more programs for short jobs.
RELAYOUT_TILE_BYTES = 16 * 1024
RELAYOUT_WARPS = 8
# Programs a launch of the relayout kernel: four on each of 132 SMs. With digests, whose arithmetic leaves fewer loads
# under way, they reached 86 to 91 % of a copy, half as many 67 to 80 % (docs/performance.md).
RELAYOUT_PROGRAMS = 528


@dataclass(frozen=True)
class Tile:
    """``pages`` x ``words`` lanes of ``word_bytes``; ``scale`` words make one unit of the table's strides."""

    pages: int
    words: int
    word_bytes: int
    scale: int
    warps: int


def choose_tile(unit_bytes: int, alignment: int, tile_bytes: int, warps: int) -> Tile:
    """The tile for entries of at most ``unit_bytes`` a page whose addresses share ``alignment`` (1 to 16).

    Lanes are 8 bytes wide where alignment allows (16-byte accesses come from pairs of lanes). A page's unit
    is covered by a power of two of lanes; what the tile has left goes to further pages.
    """
    word = min(alignment, 8)
    lanes = tile_bytes // 8  # the same number of lanes for narrow words: registers, not bytes, set the limit
    unit_words = -(-unit_bytes // word)
    words = max(8, min(lanes, 1 << (unit_words - 1).bit_length()))
    return Tile(lanes // words, words, word, alignment // word, warps)


def relayout_grid(tiles: int, entries: int) -> tuple[int, int]:
    """(programs, entries): enough programs to fill the card over all entries, never more than tiles."""
    wanted = -(-RELAYOUT_PROGRAMS // entries)
    return max(1, min(tiles, max(wanted, 2))), entries
