"""The door into transformers: a `Cache` over the pages of a `KVPool`.

    pool = pool_for(model, num_pages=512, page_size=16)
    cache = PagedCache(model, pool)
    cache.load(engine, slots, tokens=2000, prompt_tokens=ids.shape[1])
    out = model.generate(ids, **{cache_keyword(model): cache})
    cache.store(engine, more_slots).result()

or, with tiers below and nothing to keep track of,

    with PrefixCache.create(model, "kvtransfer.yaml") as prefixes:
        out = prefixes.generate(model, ids)

Works with transformers 5.17 and later. See docs/transformers.md.
"""

from __future__ import annotations

from kvtransfer.integrations.model_spec import cache_keyword, kv_spec_for, pool_for, usable_prefix, window_layers
from kvtransfer.integrations.paged_cache import PagedCache
from kvtransfer.integrations.paged_layers import PagedLayer, PagedSlidingLayer
from kvtransfer.integrations.prefix_cache import PrefixCache
from kvtransfer.integrations.prefix_parts import PrefixStats

__all__ = [
    "PagedCache",
    "PagedLayer",
    "PagedSlidingLayer",
    "PrefixCache",
    "PrefixStats",
    "cache_keyword",
    "kv_spec_for",
    "pool_for",
    "usable_prefix",
    "window_layers",
]
