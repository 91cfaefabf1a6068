"""The pages of one sequence in a pool, in token order: where tokens are written and gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.pool import KVPool


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``start + tokens - 1`` of a call, in ``pages`` whole pages or in a part of one.

    page    position in the page table of the first page
    offset  first token within that page (0 where pages are whole)
    """

    start: int
    tokens: int
    page: int
    pages: int
    offset: int


def spans(start: int, stop: int, page_size: int) -> Iterator[Span]:
    """Cut tokens ``start`` to ``stop - 1`` into at most three spans: part of a page, whole pages, part of a page."""
    at = start
    if at % page_size and at < stop:
        tokens = min(page_size - at % page_size, stop - at)
        yield Span(0, tokens, at // page_size, 1, at % page_size)
        at += tokens
    whole = (stop - at) // page_size
    if whole > 0:
        yield Span(at - start, whole * page_size, at // page_size, whole, 0)
        at += whole * page_size
    if at < stop:
        yield Span(at - start, stop - at, at // page_size, 1, 0)


@dataclass
class OpenStore:
    """A store in flight over the first ``pages`` pages; ``unwritten`` layers have not been handed to it yet."""

    handle: TransferHandle
    pages: int
    tokens: int
    unwritten: set[int] = field(default_factory=set)


class PageTable:
    """The page ids of one sequence. Takes pages from the pool as the sequence grows; not thread-safe.

    pages  pool page ids that already belong to the sequence, in token order; the table owns them from now on
    """

    def __init__(self, pool: KVPool, pages: Sequence[int] | NDArray[np.int64] = ()) -> None:
        self.pool = pool
        self.page_size = pool.spec.page_size
        self.stores: list[OpenStore] = []
        self._pages = np.asarray(pages, dtype=np.int64).reshape(-1)
        if self._pages.size and (self._pages.min() < 0 or self._pages.max() >= pool.num_pages):
            raise LayoutError(f"pages: expected ids in 0..{pool.num_pages - 1}, got {self._pages.tolist()}")
        if np.unique(self._pages).size != self._pages.size:
            raise LayoutError(f"pages: expected distinct ids, got {self._pages.tolist()}")
        self._upload()

    @property
    def pages(self) -> NDArray[np.int64]:
        """Page ids in token order (a copy)."""
        return self._pages.copy()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in all. Raises CapacityError where the pool has no pages left."""
        missing = self.pages_for(tokens) - self._pages.size
        if missing > 0:
            self._pages = np.concatenate([self._pages, self.pool.allocate_pages(missing)])
            self._upload()

    def prepare_write(self, start: int, stop: int) -> None:
        """Before tokens ``start`` to ``stop - 1`` are written: reserve their pages, and make the current stream
        wait for stores that still read one of them (a store whose layers are being written now is not waited for).
        """
        self.reserve(stop)
        if self.pool.device.type == "cuda":  # a store would not wait for writes on any other
            self.pool.require_declared(torch.cuda.current_stream(self.pool.device))
        self.stores = [s for s in self.stores if not s.handle.done()]  # one that failed holds nobody up either
        first = start // self.page_size
        for store in self.stores:
            if first < store.pages and not store.unwritten:
                store.handle.wait_all()

    def write(self, view: torch.Tensor, start: int, states: torch.Tensor) -> None:
        """Write ``states`` (1, heads, tokens, dim) as tokens ``start`` and on.

        ``view``: one component of one layer of the pool, (pages, page_size, heads, dim); mutated on the current stream.
        """
        rows = states[0].detach().transpose(0, 1)  # (tokens, heads, dim); a pool takes no part in autograd
        for span in spans(start, start + states.shape[2], self.page_size):
            part = rows[span.start : span.start + span.tokens]
            if span.tokens == span.pages * self.page_size:
                ids = self._device_pages[span.page : span.page + span.pages]
                view.index_copy_(0, ids, _paged(part, 0, self.page_size))
            else:
                view[int(self._pages[span.page]), span.offset : span.offset + span.tokens].copy_(part)

    def gather(self, view: torch.Tensor, start: int, stop: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens ``start`` to ``stop - 1`` of ``view`` (as in `write`), (1, heads, tokens, dim): into ``out``, or a new
        contiguous tensor. One copy, on the current stream.
        """
        _, _, heads, dim = view.shape
        if out is None:
            out = torch.empty((1, heads, stop - start, dim), dtype=view.dtype, device=view.device)
        by_head = view.permute(2, 0, 1, 3)  # (heads, pages, page_size, dim)
        for span in spans(start, stop, self.page_size):
            part = out[0, :, span.start : span.start + span.tokens]
            if span.tokens == span.pages * self.page_size:
                ids = self._device_pages[span.page : span.page + span.pages]
                torch.index_select(by_head, 1, ids, out=_paged(part, 1, self.page_size))
            else:
                part.copy_(by_head[:, int(self._pages[span.page]), span.offset : span.offset + span.tokens])
        return out

    def release(self, wait_s: float = 0.0) -> None:
        """Give every page back to the pool. OwnershipError if a transfer owns one for longer than ``wait_s``."""
        if any(s.unwritten and not s.handle.done() for s in self.stores):
            raise ConfigError("release: expected every layer of the layer-wise store to be written, got some missing")
        self.pool.free_pages(self._pages, wait_s)
        self._pages = self._pages[:0]
        self.stores = []
        self._upload()

    def _upload(self) -> None:
        self._device_pages = torch.as_tensor(self._pages, device=self.pool.device)


def _paged(tokens: torch.Tensor, axis: int, page_size: int) -> torch.Tensor:
    """A view of ``tokens`` with ``axis`` split into (pages, page_size)."""
    shape, strides = list(tokens.shape), list(tokens.stride())
    shape[axis : axis + 1] = [shape[axis] // page_size, page_size]
    strides[axis : axis + 1] = [strides[axis] * page_size, strides[axis]]
    return tokens.as_strided(shape, strides)
