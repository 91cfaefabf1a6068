"""KVPool: the paged KV memory of one engine, on one device, with the streams that use it declared."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.fifo import FifoStream
from kvtransfer.kernels.check import host_ids
from kvtransfer.kernels.errors import ConfigError, LayoutError, TransferError
from kvtransfer.kernels.layout import Layout, Part
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.extents import Extents
from kvtransfer.tiers.ledger import PageLedger

Stream = torch.cuda.Stream | FifoStream


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is being captured into a CUDA graph."""
    if stream.device_index == torch.cuda.current_device() and stream == torch.cuda.current_stream(stream.device_index):
        return bool(torch.cuda.is_current_stream_capturing())  # without a change of streams, which costs ten times more
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


class KVPool:
    """Buffers with a layout over them.

    layout   where each byte of each page lies (`Layout.from_tensors` over the engine's own tensors, or a ready name)
    buffers  the tensors that the layout's buffers stand for, in its order, all on one device; not copied
    streams  every stream that reads or writes the pool. Transfers are ordered against all of them. Default: on
             CUDA the stream that is current now; on the CPU none (the calling thread works at once)

    `allocate_pages` and `free_pages` are for owners who have no allocator of their own; those who have one
    ask `ledger` (or `require_free`) before they hand a page to somebody else.
    """

    def __init__(
        self,
        layout: Layout,
        buffers: Sequence[torch.Tensor],
        *,
        streams: Sequence[Stream] | None = None,
        name: str = "pool",
    ) -> None:
        if len(buffers) != len(layout.buffer_bytes):
            raise LayoutError(f"buffers: expected {len(layout.buffer_bytes)} for {layout.name}, got {len(buffers)}")
        devices = {b.device for b in buffers}
        if len(devices) != 1:
            raise LayoutError(f"buffers: expected one device, got {sorted(map(str, devices))}")
        for number, (buffer, need) in enumerate(zip(buffers, layout.buffer_bytes, strict=True)):
            have = buffer.untyped_storage().nbytes() - buffer.storage_offset() * buffer.element_size()
            if have < need:
                raise LayoutError(f"buffer {number}: expected at least {need} bytes for {layout.name}, got {have}")
        self.layout = layout
        self.spec: KVSpec = layout.spec
        self.num_pages = layout.num_pages
        self.buffers = tuple(buffers)
        self.device = devices.pop()
        self.name = name
        self.ledger = PageLedger(self.num_pages, f"{name} page")
        self._pages = Extents(self.num_pages, what=f"{name} page")
        self._lock = threading.Lock()
        self._views: dict[tuple[int, int | str, torch.dtype], torch.Tensor] = {}
        if streams is None:
            streams = [torch.cuda.current_stream(self.device)] if self.device.type == "cuda" else []
        self.streams: list[Stream] = []
        for stream in streams:
            self.declare_stream(stream)

    @classmethod
    def allocate(
        cls,
        layout: str | Layout,
        *,
        spec: KVSpec | None = None,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
        streams: Sequence[Stream] | None = None,
        name: str = "pool",
    ) -> KVPool:
        """A pool over new zeroed memory: a ready layout by name (with ``spec`` and ``num_pages``), or a Layout.

        Raises ConfigError for a device that PyTorch doesn't have here, LayoutError for a layout that isn't known.
        """
        if isinstance(layout, str):
            if spec is None or num_pages is None:
                raise LayoutError(f"layout {layout!r} by name: expected spec and num_pages as well")
            layout = Layout.named(layout, spec, num_pages)
        require_device(device)
        buffers = [torch.zeros(n, dtype=torch.uint8, device=device) for n in layout.buffer_bytes]
        if buffers[0].is_cuda:  # the zeros are enqueued on a stream that need not be declared
            torch.cuda.current_stream(buffers[0].device).synchronize()
        return cls(layout, buffers, streams=streams, name=name)

    @classmethod
    def from_tensors(
        cls,
        spec: KVSpec,
        tensors: Sequence[torch.Tensor],
        axes: str,
        *,
        components: Sequence[str] | None = None,
        streams: Sequence[Stream] | None = None,
        name: str = "pool",
    ) -> KVPool:
        """A pool over an engine's own tensors, all alike, with declared axes (`Layout.from_tensors`); no copy."""
        layout = Layout.from_tensors(spec, tensors, axes, components=components)
        return cls(layout, tensors, streams=streams, name=name)

    @classmethod
    def from_parts(
        cls, spec: KVSpec, parts: Sequence[Part], *, streams: Sequence[Stream] | None = None, name: str = "pool"
    ) -> KVPool:
        """A pool over an engine's own tensors that differ: separate K and V, hybrid layers (`Layout.from_parts`)."""
        return cls(Layout.from_parts(spec, parts), [part.tensor for part in parts], streams=streams, name=name)

    def declare_stream(self, stream: Stream) -> None:
        """Order transfers against ``stream`` too, from the next call on."""
        if isinstance(stream, FifoStream) != (self.device.type == "cpu"):
            raise ConfigError(f"streams: expected streams of {self.device}, got {stream!r}")
        if isinstance(stream, torch.cuda.Stream) and stream.device != self.device:
            raise ConfigError(f"streams: expected streams of {self.device}, got one of {stream.device}")
        if not self.declares(stream):
            self.streams.append(stream)

    def declares(self, stream: Stream) -> bool:
        """Whether ``stream`` is one of `streams`."""
        if isinstance(stream, FifoStream):
            return any(stream is s for s in self.streams)
        if stream.device != self.device:  # the default stream's handle is 0 on every device
            return False
        return any(isinstance(s, torch.cuda.Stream) and s.cuda_stream == stream.cuda_stream for s in self.streams)

    def require_declared(self, stream: Stream) -> None:
        """Raise TransferError for a stream whose work no transfer would wait for."""
        if not self.declares(stream):
            raise TransferError(
                f"expected a stream declared for {self.name}, got {stream!r}: transfers would not be ordered against "
                f"it. Declare it with pool.declare_stream(stream)"
            )

    @property
    def free_page_count(self) -> int:
        """Pages that `allocate_pages` would give out now."""
        return self._pages.free_slots

    def allocate_pages(self, count: int) -> NDArray[np.int64]:
        """``count`` free page ids, in runs where it can; CapacityError when there are fewer."""
        with self._lock:
            return self._pages.allocate(count)

    def free_pages(self, pages: Any, wait_s: float = 0.0) -> None:
        """Give pages back. A page under a transfer is waited for up to ``wait_s``, then OwnershipError; all or none."""
        ids = host_ids(pages, self.num_pages, f"{self.name} page", distinct=False)
        with self._lock:
            self._pages.check(ids)
        self.ledger.require_free(ids, wait_s)
        with self._lock:
            self._pages.free(ids)

    def require_free(self, pages: Any, wait_s: float = 0.0) -> None:
        """For owners with an allocator of their own: OwnershipError if a transfer still owns one of ``pages``."""
        self.ledger.require_free(host_ids(pages, self.num_pages, f"{self.name} page", distinct=False), wait_s)

    def view(self, layer: int, component: int | str, dtype: torch.dtype) -> torch.Tensor:
        """[pages, tokens, heads, dim] of one component as ``dtype``: a strided view, nothing is copied. The same tensor
        at each call: whoever reads a pool asks for every layer in every forward.

        layer      0 to ``spec.num_layers`` - 1
        component  its name, or its place in the layer, from 0
        dtype      of the model, or any other whose elements divide heads and strides: a spec knows bytes, not what they
                   stand for. The last axis has as many elements as a head then holds; ``torch.uint8`` is the raw bytes

        Raises LayoutError for a layer, a component or a dtype that is not there, where the bytes do not divide into
        ``dtype``, and where an axis is split over several strides.
        """
        key = (layer, component, dtype)
        if key not in self._views:
            self._views[key] = self._view(layer, component, dtype)
        return self._views[key]

    def _view(self, layer: int, component: int | str, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(layer, SupportsIndex) or not 0 <= index(layer) < self.spec.num_layers:
            raise LayoutError(f"layer: expected 0 to {self.spec.num_layers - 1}, got {layer!r}")
        components = self.spec.layers[layer]
        names = [c.name for c in components]
        at = names.index(component) if component in names else component
        if not isinstance(at, SupportsIndex) or not 0 <= index(at) < len(components):
            known = f"{', '.join(map(repr, names))} or 0 to {len(components) - 1}"
            raise LayoutError(f"component of layer {layer}: expected {known}, got {component!r}")
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"dtype: expected a torch.dtype, got {dtype!r}")
        c, place = components[at], self.layout.placements[layer][at]
        size = dtype.itemsize
        if c.head_bytes % size:
            raise LayoutError(
                f"dtype: expected elements that divide heads of {c.head_bytes} bytes, got {dtype} of {size} bytes"
            )
        dims: list[tuple[int, int]] = [(self.num_pages, place.page_stride)]
        for axis, extent in ((place.token, c.rows(self.spec.page_size)), (place.head, c.heads)):
            split = [d for d in axis if d[0] > 1]
            if len(split) > 1:
                raise LayoutError(f"{self.layout.name}: expected one stride an axis for a view, got {axis}")
            dims.append(split[0] if split else (extent, size))
        if place.byte != ((c.head_bytes, 1),) and c.head_bytes > 1:
            raise LayoutError(f"{self.layout.name}: expected contiguous heads for a view, got {place.byte}")
        buffer = self.buffers[place.buffer]
        base = buffer.storage_offset() * buffer.element_size() + place.offset
        if math.gcd(base, c.head_bytes, *(stride for _, stride in dims)) % size:
            raise LayoutError(f"{self.layout.name}: expected offsets in whole {dtype}, got {dims} at {base}")
        shape = [*(extent for extent, _ in dims), c.head_bytes // size]
        strides = [*(stride // size for _, stride in dims), 1]
        with torch.inference_mode(False):  # one made in that mode could not be written to outside of it
            view = torch.empty(0, dtype=dtype, device=self.device)
            return view.set_(buffer.untyped_storage(), base // size, shape, strides)

    def __repr__(self) -> str:
        return f"KVPool({self.name!r}, {self.layout.name}, {self.num_pages} pages on {self.device})"


def require_device(device: torch.device | str) -> None:
    """Raise ConfigError for a device that PyTorch does not know, or does not have on this machine."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: expected one that PyTorch knows, such as cuda or cpu, got {device!r}") from error
    if wanted.type != "cuda":
        return
    count = torch.cuda.device_count()
    if not count:
        why = "none that PyTorch sees" if torch.version.cuda else "a PyTorch that is built without CUDA"
        raise ConfigError(f"device: expected a GPU for {str(wanted)!r}, got {why}; device='cpu' works without one")
    if wanted.index is not None and wanted.index >= count:
        raise ConfigError(f"device: expected one of the {count} GPUs that PyTorch sees, got {str(wanted)!r}")
