"""The pages of one of SGLang's host pools, as pieces of its memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError, LayoutError

Piece = NDArray[np.uint8]


class HostPages:
    """Pages of ``pool`` (a `HostKVCache`), which must have its memory already.

    heads_split  cut each page by head into so many parts (layout page_head alone)

    Attributes: piece_bytes, of one page, in the pool's own order; form, how a page is handed over: "pieces" of the
    pool's memory where the pool tells their addresses, else "flat" copies of whole pages that it makes itself.
    Raises ConfigError for a pool that offers neither, or has no memory.
    """

    def __init__(self, pool: Any, name: str, *, heads_split: int = 1, flat: bool = False) -> None:
        if getattr(pool, "kv_buffer", ()) is None:
            raise ConfigError(
                f"pool {name}: expected a host pool with memory of its own, got a {type(pool).__name__} without; "
                "models whose KV lies in compressed pools alone are not supported by this backend"
            )
        self.pool, self.name = pool, name
        self.page_size = int(pool.page_size)
        self.layout = str(pool.layout)
        self.heads_split = heads_split
        self._regions = [] if flat else _regions(pool)
        self._starts = [start for start, _ in self._regions]
        self.form = "flat"
        first = torch.arange(self.page_size)
        if not flat:
            try:
                sizes = self._meta(first)[1]
                self.form = "pieces"
            except (NotImplementedError, ValueError, AttributeError) as error:
                if heads_split > 1:
                    raise ConfigError(f"pool {name}: expected pages that can be cut by head, got: {error}") from error
        if self.form == "flat":
            try:
                sizes = [pool.get_data_page(0, flat=True).nbytes]
                self._flat_dtype = pool.get_dummy_flat_data_page().dtype
            except (NotImplementedError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"pool {name}: expected a host pool whose pages can be stored (layout page_first or "
                    f"page_first_direct), got {type(pool).__name__} with layout {self.layout}: {error}"
                ) from error
        self.piece_bytes = tuple(int(size) for size in sizes)

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return sum(self.piece_bytes)

    @property
    def regions(self) -> list[Piece]:
        """The memory that all pieces lie in."""
        return [memory for _, memory in self._regions]

    def count(self, indices: torch.Tensor | None) -> int:
        """How many pages ``indices`` name; LayoutError if they are no whole pages."""
        number = 0 if indices is None else indices.numel()
        if number % self.page_size:
            raise LayoutError(
                f"pool {self.name}: expected indices of whole pages of {self.page_size} tokens, got {number}"
            )
        return number // self.page_size

    def read(self, indices: torch.Tensor) -> list[list[Piece]]:
        """The pages that ``indices`` (one a token) name, to be read: views, or copies where the form is "flat"."""
        if self.form == "pieces":
            return self._pieces(indices)
        return [[flat_bytes(self.pool.get_data_page(start, flat=True))] for start in self._page_starts(indices)]

    def blank(self, indices: torch.Tensor) -> list[list[Piece]]:
        """Memory for these pages to be written: their own, or new where the form is "flat". Then `wrote` them."""
        if self.form == "pieces":
            return self._pieces(indices)
        return [[np.empty(self.page_bytes, dtype=np.uint8)] for _ in range(self.count(indices))]

    def wrote(self, indices: torch.Tensor, pages: Sequence[Sequence[Piece]], whole: Sequence[bool]) -> None:
        """What `blank` gave is filled where ``whole`` says so: put it where it belongs."""
        if self.form == "flat":
            for start, page, ok in zip(self._page_starts(indices), pages, whole, strict=True):
                if ok:
                    self.pool.set_from_flat_data_page(start, torch.from_numpy(page[0]).view(self._flat_dtype))

    def _page_starts(self, indices: torch.Tensor) -> list[int]:
        self.count(indices)
        starts: list[int] = indices[:: self.page_size].tolist()
        return starts

    def _meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.heads_split > 1:
            pointers, sizes = self.pool.get_split_heads_page_buffer_meta(indices, self.heads_split)
        else:
            pointers, sizes = self.pool.get_page_buffer_meta(indices)
        return pointers, sizes

    def _pieces(self, indices: torch.Tensor) -> list[list[Piece]]:
        number, each = self.count(indices), len(self.piece_bytes)
        if not number:
            return []
        pointers, sizes = self._meta(indices)
        if tuple(sizes) != self.piece_bytes * number:
            raise LayoutError(f"pool {self.name}: expected pieces of {self.piece_bytes[:8]}, got {sizes[:8]} bytes")
        pieces = [self._view(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]

    def _view(self, pointer: int, size: int) -> Piece:
        at = bisect_right(self._starts, pointer) - 1
        if at >= 0:
            start, memory = self._regions[at]
            if pointer + size <= start + memory.nbytes:
                return memory[pointer - start : pointer - start + size]
        raise LayoutError(f"pool {self.name}: expected a piece within its memory, got {size} bytes at {pointer:#x}")


def flat_bytes(page: torch.Tensor) -> Piece:
    """A contiguous CPU tensor as bytes, no copy. LayoutError for any other."""
    if page.device.type != "cpu" or not page.is_contiguous():
        raise LayoutError(f"page: expected a contiguous tensor on the CPU, got {tuple(page.shape)} on {page.device}")
    flat: Piece = page.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _regions(pool: Any) -> list[tuple[int, Piece]]:
    """Start address and bytes of each of the pool's tensors, by address."""
    try:
        tensors = list(pool.get_hybrid_pool_buffer())
    except (AttributeError, NotImplementedError):
        tensors = [getattr(pool, "kv_buffer", None)]
    found: dict[int, Piece] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            found.setdefault(storage.data_ptr(), storage.numpy())
    return sorted(found.items())
