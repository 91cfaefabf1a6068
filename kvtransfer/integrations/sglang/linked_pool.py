"""LinkedPool: one of SGLang's device pools, with host memory behind it and an engine between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.config import Config
from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle
from kvtransfer.integrations.keyed_slots import KeyedSlots
from kvtransfer.integrations.sglang.lower_pages import LowerPages
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.layout import Part
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier


class LinkedPool:
    """``entry`` is a `DevicePoolEntry` of SGLang's linker.

    streams    every stream that SGLang reads or writes the pool on, None on a CPU
    staging    a ring shared with the other pools of the device, or its size
    host_args  how large the host memory is (`HostTier`)

    Attributes: name; spec, one layer for each of SGLang's transfer layers that has bytes here; lower, the tiers below,
    None where there are none (`use_lower`).
    """

    def __init__(
        self,
        entry: Any,
        config: Config,
        *,
        streams: Sequence[torch.cuda.Stream] | None,
        staging: int | StagingRing,
        host_args: dict[str, Any],
    ) -> None:
        self.name = str(getattr(entry.name, "value", entry.name))
        self.page_size = int(entry.page_size)
        self.spec, parts, self._layers = spec_of(entry)
        try:
            self.pool = KVPool.from_parts(self.spec, parts, streams=streams, name=f"sglang {self.name}")
        except LayoutError as error:
            raise ConfigError(f"pool {self.name}: this layout of SGLang's is not supported: {error}") from error
        self.host = HostTier(self.spec, device=self.pool.device, name=f"host {self.name}", **host_args)
        try:
            settings = config.engine_settings() | {"staging_bytes": staging}
            self.engine = TransferEngine(self.pool, self.host, **settings)
        except BaseException:
            self.host.close()
            raise
        self.slots = KeyedSlots(self.host)
        self.lower: LowerPages | None = None
        self._early_pages = max(1, -(-config.prefetch.min_tokens // self.page_size))

    def use_lower(self, lower: LowerPages) -> None:
        """Pages that are not in host memory may be there."""
        self.lower = lower

    def find(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether its page can be loaded: it is in host memory, or known to be below, as far as there is
        room to bring it up."""
        there = self.slots.there(keys)
        if self.lower is not None and not all(there):
            absent = [at for at, found in enumerate(there) if not found][: self.slots.room]
            for at, found in zip(absent, self.lower.known([keys[at] for at in absent]), strict=True):
                there[at] = found
            self._bring([keys[at] for at in absent if there[at]])
        return there

    def _bring(self, keys: Sequence[str]) -> None:
        """Begin to read pages that a request will want: it is in the waiting queue still. Half of the room at most."""
        if self.lower is not None and self._early_pages <= len(keys) <= self.slots.room // 2:
            new = self.slots.hold(keys)
            if new:
                self.lower.fetch(new)
            self.slots.release(keys)

    def page_ids(self, indices: torch.Tensor, pages: int) -> torch.Tensor | NDArray[np.int64]:
        """Page ids from SGLang's indices, one a token; on the device they stay there. LayoutError if they don't fit."""
        if indices.numel() != pages * self.page_size:
            raise LayoutError(
                f"pool {self.name}: expected indices of {pages} pages of {self.page_size} tokens, got {indices.numel()}"
            )
        ids = indices[:: self.page_size] // self.page_size
        return ids if ids.is_cuda else ids.numpy().astype(np.int64)

    def declare_current_stream(self) -> None:
        """What runs on the current stream is waited for by transfers from here on."""
        if self.pool.device.type == "cuda":
            self.pool.declare_stream(torch.cuda.current_stream(self.pool.device))

    def load(self, keys: Sequence[str], pages: torch.Tensor | NDArray[np.int64]) -> TransferHandle:
        """Bring pages, whose slots the caller holds, to the device, layer by layer."""
        slots = self.slots.slots_of(keys)
        if self.pool.device.type != "cuda":
            return self.engine.load(slots, pages, layerwise=True)
        with torch.cuda.device(self.pool.device):  # another thread's device is the first one
            return self.engine.load(slots, pages, layerwise=True)

    def wait_layer(self, handle: TransferHandle, layer: int) -> None:
        """Make the current stream wait for what this pool has up to SGLang's transfer layer: before a full CUDA graph
        SGLang asks for the last layer alone. Layers land in order, so the last one here is enough."""
        local = bisect_right(self._layers, layer) - 1
        if local >= 0:
            self.declare_current_stream()
            handle.wait_layer(local)

    def close(self) -> None:
        """End transfers, then the memory. The tiers below first: they read it."""
        if self.lower is not None:
            self.lower.close()
        self.engine.close()
        self.host.close()


def spec_of(entry: Any) -> tuple[KVSpec, list[Part], list[int]]:
    """The spec and the parts of a `DevicePoolEntry`, and which transfer layer each layer of the spec is, ascending.

    Buffers whose rows are tokens have ``page_size`` rows a page; others have one row a page. Bytes are not looked into.
    Raises ConfigError for buffers whose rows are not contiguous.
    """
    rows = int(entry._row_span)
    transfer_layers = sorted(entry.layer_mapping)
    pages = int(entry._row_count) // rows
    layers: list[tuple[Component, ...]] = []
    parts: list[Part] = []
    for number, layer in enumerate(transfer_layers):
        mapped = entry.layer_mapping[layer]
        components: list[Component] = []
        for group, buffers in enumerate(entry.components):
            for at in (mapped,) if isinstance(mapped, int) else mapped:
                name = f"{group}.{len(components)}"
                try:
                    flat = buffers[at][: pages * rows].view(pages * rows, -1).view(torch.uint8)
                except RuntimeError as error:
                    raise ConfigError(
                        f"pool {entry.name}: expected buffers with contiguous rows, got shape "
                        f"{tuple(buffers[at].shape)} with strides {buffers[at].stride()}: {error}"
                    ) from error
                per_page = rows == 1
                components.append(Component(name, 1, flat.shape[1], per_page=per_page))
                parts.append(Part(flat, "page dim" if per_page else "(page token) dim", (name,), (number,)))
        layers.append(tuple(components))
    return KVSpec(int(entry.page_size), tuple(layers)), parts, transfer_layers
