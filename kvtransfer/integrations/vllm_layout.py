"""From vLLM's KV tensors to a `KVPool`: one view a layer, ``[blocks, heads, tokens, content]``, strided any way.

vLLM keeps K and V of a head side by side in the last axis, so they are one component here: in a layout with the blocks
outermost and the heads inside the tokens (BLNHC) a page of vLLM is byte for byte a page of ours: it moves as one piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.layout import Part
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool, Stream

WANTED_LAYOUT = "BLNHC"
_FIRST = re.compile(r"indexer|mamba|linear_attn|conv|ssm")  # read before the attention of their layer


@dataclass(frozen=True)
class EnginePool:
    """A pool over the engine's tensors. ``layers[i]`` are the engine's names of layer i (several share one cache)."""

    pool: KVPool
    layers: tuple[tuple[str, ...], ...]

    def number(self) -> dict[str, int]:
        """Layer number by the engine's name."""
        return {name: i for i, names in enumerate(self.layers) for name in names}


def engine_pool(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    block_size: int,
    *,
    streams: list[Stream] | None = None,
    name: str = "vllm",
) -> EnginePool:
    """The pool that the registered tensors are. Pages are blocks of ``block_size`` tokens; nothing is copied.

    Layers are in the order in which a forward needs them: by the number in their name, but first those that no
    attention hook waits for (recurrent states, sparse indexes). Blocks that a kernel wants in smaller pieces are put
    together again. What does not have a row a token (states, compressed caches) is opaque bytes a page.

    Raises LayoutError for tensors that can't be read this way.
    """
    if not kv_caches:
        raise LayoutError("kv_caches: expected at least one layer, got none")
    aliases: dict[tuple[object, ...], list[str]] = {}
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for layer, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4 or tensor.shape[0] % num_blocks:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise LayoutError(
                f"{layer}: expected [blocks, heads, tokens, content] and a multiple of {num_blocks} blocks, got {got}; "
                "caches without a view a layer can't be kept"
            )
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        aliases.setdefault(key, []).append(layer)
        tensors[key] = tensor
    order = sorted(aliases, key=lambda key: _place(aliases[key][0]))  # stable
    views = [_grouped(tensors[key], num_blocks, block_size) for key in order]
    spec = KVSpec(block_size, tuple((component,) for _, _, component in views))
    parts = _one_part([view for view, _, _ in views], views[0][1], spec) or [
        Part(view, axes, (component.name,), (i,)) for i, (view, axes, component) in enumerate(views)
    ]
    pool = KVPool.from_parts(spec, parts, streams=streams, name=name)
    return EnginePool(pool, tuple(tuple(aliases[key]) for key in order))


def whole_spec(spec: KVSpec, head_parts: int) -> KVSpec:
    """The spec of the model before ``head_parts`` ranks got their share of its heads."""
    layers = tuple(
        tuple(c if c.per_page else replace(c, heads=c.heads * head_parts) for c in components)
        for components in spec.layers
    )
    return replace(spec, layers=layers)


def _place(name: str) -> tuple[bool, int]:
    number = re.search(r"\d+", name)
    return not _FIRST.search(name), int(number[0]) if number else -1


def _grouped(tensor: torch.Tensor, num_blocks: int, block_size: int) -> tuple[torch.Tensor, str, Component]:
    """One layer's view by blocks of the block manager, its axes, and what a page of it holds."""
    blocks, heads, rows, width = tensor.shape
    ratio = blocks // num_blocks
    size = tensor.element_size()
    if rows * ratio == block_size:
        component = Component("kv", heads, width * size)
        if ratio == 1:
            return tensor, "page head token dim", component
        return tensor.unflatten(0, (num_blocks, ratio)), "page token head token dim", component
    component = Component("state", 1, ratio * heads * rows * width * size, per_page=True)
    view = tensor if ratio == 1 else tensor.unflatten(0, (num_blocks, ratio))
    return view, " ".join(["page"] + ["dim"] * (view.ndim - 1)), component


def _one_part(views: list[torch.Tensor], axes: str, spec: KVSpec) -> list[Part] | None:
    """All layers as one tensor where they are alike and lie evenly in one allocation: pieces then span layers."""
    first = views[0]
    alike = all(
        view.shape == first.shape
        and view.stride() == first.stride()
        and view.dtype == first.dtype
        and view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for view in views
    )
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(views)}
    if len(views) < 2 or not alike or len(steps) != 1 or (step := steps.pop()) <= 0:
        return None
    if any(components != spec.layers[0] for components in spec.layers):
        return None
    stacked = first.as_strided((len(views), *first.shape), (step, *first.stride()), first.storage_offset())
    return [Part(stacked, f"layer {axes}", (spec.layers[0][0].name,), tuple(range(len(views))))]
