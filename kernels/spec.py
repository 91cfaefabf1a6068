"""KVSpec: what one page of KV cache holds, layer by layer, in bytes. No strides, no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvtransfer.kernels.errors import LayoutError


@dataclass(frozen=True)
class Component:
    """One array of a layer: k, v, an MLA latent, fp8 scales, sparse index keys, a recurrent state ...

    heads       number of heads (1 where the array has none)
    head_bytes  bytes of one head of one token; of the whole row of one page where ``per_page``
    per_page    one row a page (recurrent state, per-page scales) instead of one row a token
    """

    name: str
    heads: int
    head_bytes: int
    per_page: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.heads < 1 or self.head_bytes < 1:
            raise LayoutError(f"component: expected a name, heads >= 1 and head_bytes >= 1, got {self!r}")

    def rows(self, page_size: int) -> int:
        """Rows a page: ``page_size`` tokens, or 1 where the component is per page."""
        return 1 if self.per_page else page_size

    def page_bytes(self, page_size: int) -> int:
        """Bytes of this component in one page of one layer."""
        return self.rows(page_size) * self.heads * self.head_bytes


@dataclass(frozen=True)
class KVSpec:
    """Layers, page size and the components of each layer. Layers may differ (hybrid models).

    Page-first order is: page, layer, component (in the order given), token, head, byte.
    """

    page_size: int
    layers: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise LayoutError(f"page_size: expected at least 1 token, got {self.page_size}")
        if not self.layers or not all(self.layers):
            raise LayoutError("layers: expected at least one layer with at least one component each")
        for number, components in enumerate(self.layers):
            names = [c.name for c in components]
            if len(set(names)) != len(names):
                raise LayoutError(f"layer {number}: expected distinct component names, got {names}")

    def __hash__(self) -> int:
        return self._hash  # specs are keys of caches on the way of every transfer

    @cached_property
    def _hash(self) -> int:
        return hash((self.page_size, self.layers))

    @classmethod
    def uniform(cls, num_layers: int, page_size: int, components: Iterable[Component]) -> KVSpec:
        """Every layer holds the same components."""
        return cls(page_size, (tuple(components),) * num_layers)

    @classmethod
    def attention(
        cls, num_layers: int, page_size: int, kv_heads: int, head_dim: int, itemsize: int, v_head_dim: int | None = None
    ) -> KVSpec:
        """K and V of ordinary attention. ``itemsize`` is bytes an element; V may have its own width."""
        v_dim = head_dim if v_head_dim is None else v_head_dim
        k, v = Component("k", kv_heads, head_dim * itemsize), Component("v", kv_heads, v_dim * itemsize)
        return cls.uniform(num_layers, page_size, (k, v))

    @classmethod
    def mla(cls, num_layers: int, page_size: int, latent_bytes: int) -> KVSpec:
        """One latent row a token (576 elements for DeepSeek; 656 B packed for its fp8 form)."""
        return cls.uniform(num_layers, page_size, (Component("latent", 1, latent_bytes),))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Start of each layer within a page-first page, in bytes; the last entry is the page's length."""
        offsets = [0]
        for components in self.layers:
            offsets.append(offsets[-1] + sum(c.page_bytes(self.page_size) for c in components))
        return tuple(offsets)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.layer_offsets[-1]

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer of one page."""
        return self.layer_offsets[layer + 1] - self.layer_offsets[layer]

    def select_layers(self, start: int, stop: int) -> KVSpec:
        """The spec of layers ``start`` to ``stop - 1`` alone."""
        if not 0 <= start < stop <= self.num_layers:
            raise LayoutError(f"layers: expected 0 <= start < stop <= {self.num_layers}, got {start}:{stop}")
        return replace(self, layers=self.layers[start:stop])

    def select_heads(self, part: int, parts: int) -> KVSpec:
        """The share of rank ``part`` of ``parts``: components with more than one head are cut evenly.

        Components with one head (MLA latent, state) are replicated and stay whole. A head count that
        ``parts`` does not divide raises: how such heads are replicated is the engine's choice.
        """
        if not 0 <= part < parts:
            raise LayoutError(f"heads: expected 0 <= part < parts, got part {part} of {parts}")

        def cut(c: Component) -> Component:
            if c.heads == 1:
                return c
            if c.heads % parts:
                raise LayoutError(f"component {c.name!r}: expected heads divisible by {parts}, got {c.heads}")
            return replace(c, heads=c.heads // parts)

        return replace(self, layers=tuple(tuple(cut(c) for c in components) for components in self.layers))

    def canonical(self) -> str:
        """A stable text of the spec, for namespaces and messages; equal text means equal bytes."""
        groups: list[tuple[int, Sequence[Component]]] = []
        for components in self.layers:
            if groups and tuple(groups[-1][1]) == components:
                groups[-1] = (groups[-1][0] + 1, components)
            else:
                groups.append((1, components))
        parts = [
            f"{count}x["
            + ",".join(f"{c.name}:{c.heads}x{c.head_bytes}{'/page' if c.per_page else ''}" for c in cs)
            + "]"
            for count, cs in groups
        ]
        return f"page={self.page_size};" + ";".join(parts)
