"""Ready layouts: the names that SGLang, vLLM and transformers give to the way their KV caches lie.

Each entry says which tensors there are and how their axes nest; `kvtransfer.kernels.layout` does the rest.
Sources: SGLang 0.5.23 ``mem_cache/memory_pool.py`` and ``mem_cache/pool_host``, vLLM 0.33.0
``KVCacheLayout``, transformers 5.x ``cache_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import Layout, Part
from kvtransfer.kernels.spec import KVSpec


@dataclass(frozen=True)
class ReadyLayout:
    """``axes`` of one tensor; ``one_per`` says what gets a tensor of its own: "all", "layer", "component"
    (a tensor a layer and component). ``kv`` in the axes needs components of one width; where they differ
    the tensor splits into one a component, as the engines do.
    """

    axes: str
    one_per: str


READY: dict[str, ReadyLayout] = {
    # SGLang, device pool: a tensor for k and one for v in each layer, (slots, heads, dim)
    "sglang.layer_first": ReadyLayout("(page token) head dim", "component"),
    # SGLang, host pools
    "sglang.layer_first_host": ReadyLayout("kv layer (page token) head dim", "all"),
    "sglang.page_first": ReadyLayout("kv (page token) layer head dim", "all"),
    "sglang.page_first_direct": ReadyLayout("kv page layer token head dim", "all"),
    "sglang.page_head": ReadyLayout("kv page head token layer dim", "all"),
    "sglang.page_unified": ReadyLayout("page head layer kv token head dim", "all"),
    # vLLM: K and V side by side in the last axis; the letters are the nesting, L layer, B page, N token
    "vllm.LBNHC": ReadyLayout("layer page token head dim", "all"),
    "vllm.LBHNC": ReadyLayout("layer page head token dim", "all"),
    "vllm.LHBNC": ReadyLayout("layer head page token dim", "all"),
    "vllm.BLNHC": ReadyLayout("page layer token head dim", "all"),
    "vllm.BLHNC": ReadyLayout("page layer head token dim", "all"),
    "vllm.BHLNC": ReadyLayout("page head layer token dim", "all"),
    "vllm.MLA": ReadyLayout("layer page token head dim", "all"),
    # transformers: a row of the batch, (heads, tokens, dim), for k and for v in each layer
    "transformers": ReadyLayout("head (page token) dim", "component"),
}


def build(name: str, spec: KVSpec, num_pages: int, head_groups: int | None = None) -> Layout:
    """The named layout, packed, over buffers still to be allocated (``Layout.buffer_bytes``)."""
    if name == "page_first":
        return Layout.page_first(spec, num_pages)
    if name not in READY:
        raise LayoutError(f"layout: expected one of {', '.join(['page_first', *sorted(READY)])}, got {name!r}")
    if num_pages < 1:
        raise LayoutError(f"num_pages: expected at least 1, got {num_pages}")
    if head_groups is not None and READY[name].axes.split().count("head") < 2:
        raise LayoutError(f"head_groups: expected a layout with two head axes, got {name!r}")
    parts = [
        Part(_blank(spec, axes, components, layers, num_pages, head_groups), axes, components, layers)
        for axes, components, layers in _tensors(READY[name], spec, name)
    ]
    return replace(Layout.from_parts(spec, parts), name=name)


def that_fit(spec: KVSpec, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of the ready layouts whose axes fit the shapes: why a shape alone can't be trusted."""
    fits = []
    for name, ready in READY.items():
        try:
            wanted = _tensors(ready, spec, name)
            if name.startswith("vllm.") and len(tensors) == spec.num_layers > 1:  # vLLM registers a view a layer
                axes = " ".join(w for w in ready.axes.split() if w != "layer")
                wanted = [(axes, components, (layer,)) for _, components, layers in wanted for layer in layers]
            if len(wanted) != len(tensors):
                continue
            Layout.from_parts(spec, [Part(t, a, c, ls) for t, (a, c, ls) in zip(tensors, wanted, strict=True)])
        except LayoutError:
            continue
        fits.append(name)
    return fits


def _tensors(ready: ReadyLayout, spec: KVSpec, name: str) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """(axes, components, layers) of each tensor of a ready layout."""
    if name == "vllm.MLA" and any(len(cs) != 1 or cs[0].heads != 1 for cs in spec.layers):
        raise LayoutError(f"vllm.MLA: expected one latent component with one head a layer, got {spec.canonical()}")
    if ready.one_per == "component":
        return [(ready.axes, (c.name,), (layer,)) for layer, cs in enumerate(spec.layers) for c in cs]
    if any(cs != spec.layers[0] for cs in spec.layers):
        raise LayoutError(f"{name}: expected the same components in every layer, got {spec.canonical()}")
    names, layers = tuple(c.name for c in spec.layers[0]), tuple(range(spec.num_layers))
    widths = {(c.heads, c.head_bytes, c.per_page) for c in spec.layers[0]}
    if "kv" in ready.axes.split() and (len(widths) > 1 or len(names) == 1):
        axes = " ".join(w for w in ready.axes.split() if w != "kv")
        return [(axes, (n,), layers) for n in names]
    return [(ready.axes, names, layers)]


def _blank(
    spec: KVSpec,
    axes: str,
    components: tuple[str, ...],
    layers: tuple[int, ...],
    num_pages: int,
    head_groups: int | None,
) -> torch.Tensor:
    """A byte tensor without memory (meta device) whose shape the axes ask for."""
    members = [c for c in spec.layers[layers[0]] if c.name in components]
    words = axes.replace("(", " ( ").replace(")", " ) ").split()
    heads = [members[0].heads]
    if words.count("head") == 2:  # page_unified: groups of heads outside, heads of a group inside
        groups = heads[0] if head_groups is None else head_groups
        if heads[0] % groups:
            raise LayoutError(f"head_groups: expected a divisor of {heads[0]} heads, got {groups}")
        heads = [groups, heads[0] // groups]
    sizes = {
        "layer": len(layers),
        "kv": len(members),
        "page": num_pages,
        "token": members[0].rows(spec.page_size),
        "dim": members[0].head_bytes if "kv" in words else sum(c.head_bytes for c in members),
    }
    shape: list[int] = []
    group: list[int] | None = None
    for word in words:
        if word == "(":
            group = []
        elif word == ")":
            shape.append(math.prod(group or []))
            group = None
        else:
            extent = heads.pop(0) if word == "head" else sizes[word]
            shape.append(extent) if group is None else group.append(extent)
    return torch.empty(shape, dtype=torch.uint8, device="meta")
