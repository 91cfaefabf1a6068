"""Digests of the KV that a transformers cache holds, for each page and layer of a sequence."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtransfer.completion import KVDigests
from kvtransfer.integrations.transformers import PagedCache


def kv_digests(cache: Cache, tokens: int, page_size: int) -> KVDigests:
    """Of the first ``tokens`` tokens, whole pages only. Copies them to the host, which waits for the device.

    Equal for any cache that holds the same bytes, paged or transformers' own; a layer that has dropped tokens of a page
    (sliding window) has an empty string there.
    """
    layers = len(cache.layers)
    pages = tokens // page_size
    found = [["" for _ in range(layers)] for _ in range(pages)]
    for layer in range(layers):
        states, first = _states(cache, layer)
        rows = [_rows(part) for part in states]
        for page in range(pages):
            start, stop = page * page_size - first, (page + 1) * page_size - first
            if start >= 0 and all(stop <= len(part) for part in rows):
                hasher = xxhash.xxh3_64()
                for part in rows:
                    hasher.update(part[start:stop].data)
                found[page][layer] = hasher.hexdigest()
    return KVDigests(page_size, found)


def _states(cache: Cache, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """((keys, values), each (1, heads, tokens, dim), number of the first token that they hold)."""
    if isinstance(cache, PagedCache):
        return cache.states(layer), 0
    own = cache.layers[layer]
    assert isinstance(own, CacheLayerMixin) and own.keys is not None and own.values is not None
    return (own.keys, own.values), int(own.get_seq_length()) - int(own.keys.shape[-2])


def _rows(states: torch.Tensor) -> NDArray[np.uint8]:
    """(tokens, heads * bytes), contiguous, on the host."""
    rows = states.detach()[0].transpose(0, 1).contiguous().view(torch.uint8).cpu()
    return rows.reshape(len(rows), -1).numpy()
