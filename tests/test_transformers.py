"""The transformers cache: tokens, scores and KV bytes equal to transformers' own cache, same split of the prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, WINDOW, configs, prompt, tiny_model
from transformers import Qwen3NextConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer

from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays
from kvtransfer.handles import TransferHandle
from kvtransfer.hooks import layerwise
from kvtransfer.integrations.paged import PageTable, spans
from kvtransfer.integrations.transformers import (
    PagedCache,
    cache_keyword,
    kv_spec_for,
    pool_for,
    usable_prefix,
    window_layers,
)
from kvtransfer.kernels.errors import CapacityError, ConfigError, LayoutError, TransferError
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

PROMPT_TOKENS = 60
NEW_TOKENS = 6
POISON = 0xFF
BYTES = torch.uint8


@dataclass
class Rig:
    """A model with pool, host slots and engine; the pool's pages are handed out in random order."""

    model: Any
    pool: KVPool
    host: HostTier
    engine: TransferEngine
    slots: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def keyword(self) -> str:
        return cache_keyword(self.model)

    def cache(self) -> PagedCache:
        pages = self.pool.allocate_pages(16)
        return PagedCache(self.model, self.pool, np.random.default_rng(0).permutation(pages))

    def clear(self) -> None:
        for buffer in self.pool.buffers:
            buffer.fill_(POISON)

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def make_rig(
    family: str,
    dtype: torch.dtype = torch.float32,
    page_size: int = 8,
    layout: str = "sglang.layer_first",
    device: str = "cpu",
    delays: Delays | None = None,
) -> Rig:
    model = tiny_model(family, dtype, device)
    pool = pool_for(model, 128, page_size, layout=layout)
    host = HostTier(pool.spec, capacity_pages=80, device=device)
    return Rig(model, pool, host, TransferEngine(pool, host, delays=delays), host.allocate(80)[::-1].copy())


@pytest.fixture
def llama() -> Iterator[Rig]:
    rig = make_rig("llama")
    yield rig
    rig.close()


def forward(rig: Rig, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = rig.model(input_ids=ids, **{rig.keyword: cache}).logits
    return logits


def generate(rig: Rig, cache: Any, ids: torch.Tensor, **options: Any) -> tuple[list[int], torch.Tensor]:
    """New tokens, and the scores they were chosen by."""
    out = rig.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **{"pad_token_id": 0, rig.keyword: cache, **options},
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.stack(out.scores)


def raw(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(BYTES)


def assert_same_states(paged: PagedCache, own: DynamicCache) -> None:
    """Every byte that transformers' own cache still holds; its sliding layers keep the last window - 1 tokens."""
    for number, layer in enumerate(own.layers):
        assert isinstance(layer, CacheLayerMixin)
        for mine, theirs in zip(paged.states(number), (layer.keys, layer.values), strict=True):
            assert theirs is not None
            kept = theirs.shape[2]
            assert kept > 0
            assert torch.equal(mine[:, :, mine.shape[2] - kept :], raw(theirs)), f"layer {number}"


def stored_prefix(rig: Rig, ids: torch.Tensor, tokens: int) -> None:
    """Compute a prefix in the pool, store it, give the pages back and clear the pool."""
    cache = rig.cache()
    forward(rig, cache, ids[:, :tokens])
    cache.store(rig.engine, rig.slots).result()
    cache.release()
    rig.clear()


def own_run(rig: Rig, ids: torch.Tensor, tokens: int) -> tuple[DynamicCache, list[int], torch.Tensor]:
    """The same split of the prompt on transformers' own cache, which never left the device."""
    own = DynamicCache(config=rig.model.config)
    forward(rig, own, ids[:, :tokens])
    return own, *generate(rig, own, ids)


def assert_reload_is_exact(rig: Rig, tokens: int, device: str = "cpu") -> None:
    ids = prompt(PROMPT_TOKENS, device)
    stored_prefix(rig, ids, tokens)
    own, own_tokens, own_scores = own_run(rig, ids, tokens)
    cache = rig.cache()
    handle = cache.load(rig.engine, rig.slots, tokens=tokens, prompt_tokens=PROMPT_TOKENS)
    assert handle is not None
    assert cache.get_seq_length() == tokens, "the length must be known before the bytes are there"
    new_tokens, scores = generate(rig, cache, ids)
    assert new_tokens == own_tokens
    assert torch.equal(scores, own_scores)
    assert_same_states(cache, own)
    assert not torch.equal(own_scores[0], own_scores[-1]), "a model that repeats itself shows nothing"


@pytest.mark.parametrize("tokens", [5, 9, 16, 37, 48, 59])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_reload_is_exact(family: str, dtype: torch.dtype, tokens: int) -> None:
    """Prefixes below, at and above the window of 16 tokens, most of them no multiple of the page size."""
    rig = make_rig(family, dtype)
    assert_reload_is_exact(rig, tokens)
    rig.close()


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_page_sizes(family: str, page_size: int) -> None:
    rig = make_rig(family, page_size=page_size)
    assert_reload_is_exact(rig, 37)
    rig.close()


@pytest.mark.parametrize(
    "layout", ["page_first", "transformers", "vllm.LBNHC", "vllm.BLHNC", "sglang.page_first_direct"]
)
def test_pool_layouts(layout: str) -> None:
    rig = make_rig("qwen3", torch.bfloat16, layout=layout)
    assert_reload_is_exact(rig, 37)
    rig.close()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [9, 37])
@pytest.mark.parametrize("family", FAMILIES)
def test_reload_is_exact_on_a_gpu(family: str, tokens: int) -> None:
    rig = make_rig(family, torch.bfloat16, device="cuda")
    assert_reload_is_exact(rig, tokens, "cuda")
    rig.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_load_it_is_just_a_cache(family: str) -> None:
    """Prefill in chunks, then generate, against transformers' own cache."""
    rig = make_rig(family)
    ids = prompt(PROMPT_TOKENS)
    cache, own = rig.cache(), DynamicCache(config=rig.model.config)
    for start, stop in pairwise([0, 1, 7, 24, 40]):
        assert torch.equal(forward(rig, cache, ids[:, start:stop]), forward(rig, own, ids[:, start:stop]))
    assert generate(rig, cache, ids)[0] == generate(rig, own, ids)[0]
    assert_same_states(cache, own)
    rig.close()


def test_chunked_prefill_by_generate(llama: Rig) -> None:
    ids = prompt(PROMPT_TOKENS)
    own = DynamicCache(config=llama.model.config)
    expected = generate(llama, own, ids, prefill_chunk_size=7)[0]
    assert generate(llama, llama.cache(), ids, prefill_chunk_size=7)[0] == expected


def test_with_gradients_on_the_pool_stays_out_of_the_graph(llama: Rig) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = forward(llama, llama.cache(), ids)
    cache = llama.cache()
    logits = llama.model(input_ids=ids, **{llama.keyword: cache}).logits
    assert logits.requires_grad
    assert torch.equal(logits.detach(), expected)
    assert not any(buffer.requires_grad for buffer in llama.pool.buffers)
    assert not any(states.requires_grad for states in cache.states(0))


# -- waiting -----------------------------------------------------------------------------------------


class Recorder(TransferHandle):
    """A handle that notes the layers that were waited for."""

    waited: list[int]

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        super().wait_layer(layer, stream)
        self.waited.append(layer)


def test_each_layer_waits_once_and_in_order(llama: Rig) -> None:
    ids = prompt(PROMPT_TOKENS)
    stored_prefix(llama, ids, 40)
    cache = llama.cache()
    handle = cache.load(llama.engine, llama.slots, tokens=40, prompt_tokens=PROMPT_TOKENS)
    assert handle is not None
    handle.__class__ = Recorder
    assert isinstance(handle, Recorder)
    handle.waited = []
    generate(llama, cache, ids)
    assert handle.waited == [0, 1, 2]


def slow_rig() -> Rig:
    return make_rig("llama", delays=Delays(lambda label: 0.02))


def test_a_late_load_is_waited_for() -> None:
    rig = slow_rig()
    assert_reload_is_exact(rig, 37)
    rig.close()


def test_without_the_wait_the_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the same run with the wait taken out reads what is not there yet."""
    gate = threading.Event()
    gate.set()
    rig = make_rig("llama", delays=Delays(lambda label: gate))
    ids = prompt(PROMPT_TOKENS)
    stored_prefix(rig, ids, 37)
    _, _, own_scores = own_run(rig, ids, 37)
    gate.clear()
    cache = rig.cache()
    handle = cache.load(rig.engine, rig.slots, tokens=37, prompt_tokens=PROMPT_TOKENS)
    monkeypatch.setattr(PagedCache, "wait_layer", lambda self, layer: None)
    _, scores = generate(rig, cache, ids)
    gate.set()
    assert not torch.equal(scores, own_scores)
    assert handle is not None
    handle.result()
    rig.close()


def test_a_damaged_page_stops_the_forward(llama: Rig) -> None:
    """One bit of a stored page is turned over: `generate` raises before a token comes out, and the next time too."""
    ids = prompt(PROMPT_TOKENS)
    stored_prefix(llama, ids, 40)
    at = int(llama.slots[2]) * llama.host.slot_bytes + 100
    llama.host.payload[at] = int(llama.host.payload[at]) ^ 1
    cache = llama.cache()
    cache.load(llama.engine, llama.slots, tokens=40, prompt_tokens=PROMPT_TOKENS)
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            generate(llama, cache, ids)
        assert caught.value.pages == (2,)


def test_pages_without_digests_are_refused_unless_asked_for(llama: Rig) -> None:
    """Nothing is known of such pages: they reach attention only where the caller says so."""
    ids = prompt(PROMPT_TOKENS)
    stored_prefix(llama, ids, 40)
    llama.host.digests[llama.slots] = 0
    cache = llama.cache()
    cache.load(llama.engine, llama.slots, tokens=40, prompt_tokens=PROMPT_TOKENS)
    with pytest.raises(TransferError, match="without digests") as caught:
        generate(llama, cache, ids)
    assert 0 in caught.value.pages
    cache.release(wait_s=10)
    again = llama.cache()
    again.load(llama.engine, llama.slots, tokens=40, prompt_tokens=PROMPT_TOKENS, allow_unverified=True)
    generate(llama, again, ids)


# -- storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_stores_what_a_generate_produced(family: str) -> None:
    """The whole conversation comes back: sliding layers too have every token in the pool."""
    rig = make_rig(family)
    ids = prompt(20)
    cache = rig.cache()
    new_tokens, _ = generate(rig, cache, ids)
    held = cache.tokens
    assert held == 20 + NEW_TOKENS - 1
    before = [cache.states(layer) for layer in range(len(cache.paged))]
    assert before[0][0].shape[2] == held > WINDOW
    cache.store(rig.engine, rig.slots).result()
    cache.release()
    rig.clear()

    longer = torch.cat([ids, torch.tensor([new_tokens]), prompt(10)], dim=1)
    own = DynamicCache(config=rig.model.config)
    generate(rig, own, ids)
    own_tokens, own_scores = generate(rig, own, longer)
    again = rig.cache()
    again.load(rig.engine, rig.slots, tokens=held, prompt_tokens=longer.shape[1])
    tokens, scores = generate(rig, again, longer)
    assert tokens == own_tokens
    assert torch.equal(scores, own_scores)
    for layer, (keys, values) in enumerate(before):
        k, v = again.states(layer)
        assert torch.equal(k[:, :, :held], keys) and torch.equal(v[:, :, :held], values)
    rig.close()


@pytest.mark.parametrize("by_hooks", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layerwise_store(family: str, by_hooks: bool) -> None:
    """Layers go down as they are written, by the cache itself or by forward hooks; the generate goes on meanwhile."""
    rig = make_rig(family)
    ids = prompt(PROMPT_TOKENS)
    cache = rig.cache()
    if by_hooks:
        handle = rig.engine.store(cache.table.pages[:5], rig.slots[:5], layerwise=True)
        with layerwise(rig.model.model.layers, store=handle):
            forward(rig, cache, ids[:, :40])
    else:
        handle = cache.store(rig.engine, rig.slots, tokens=40, layerwise=True)
        assert not handle.done()
        forward(rig, cache, ids[:, :40])
    handle.result()
    own, own_tokens, _ = own_run(rig, ids, 40)
    assert generate(rig, cache, ids)[0] == own_tokens
    cache.release()
    rig.clear()
    again = rig.cache()
    again.load(rig.engine, rig.slots, tokens=40, prompt_tokens=PROMPT_TOKENS)
    assert generate(rig, again, ids)[0] == own_tokens
    assert_same_states(again, own)
    rig.close()


def test_a_write_waits_for_the_store_of_its_page() -> None:
    """Token 37 goes into the page that a slow store still reads: the store gets the page as it was."""
    rig = slow_rig()
    ids = prompt(PROMPT_TOKENS)
    cache = rig.cache()
    forward(rig, cache, ids[:, :37])
    pages = cache.table.pages[:5]
    was = [[rig.pool.view(layer, part, BYTES)[pages].clone() for part in (0, 1)] for layer in range(3)]
    handle = cache.store(rig.engine, rig.slots)
    assert not handle.done()
    forward(rig, cache, ids[:, 37:38])
    assert handle.done() or (handle.final_event is not None and handle.final_event.query()), "all of it was read"
    handle.result()
    cache.release()
    rig.clear()
    fresh = rig.pool.allocate_pages(5)
    rig.engine.load(rig.slots[:5], fresh).result()
    for layer in range(3):
        for part in (0, 1):
            assert torch.equal(rig.pool.view(layer, part, BYTES)[fresh], was[layer][part])
    rig.close()


# -- lengths -----------------------------------------------------------------------------------------


def test_the_prefix_leaves_one_token_to_compute() -> None:
    assert usable_prefix(100, 60) == 59
    assert usable_prefix(10, 60) == 10
    assert usable_prefix(10, 1) == 0
    with pytest.raises(ConfigError, match="prompt_tokens: expected at least 1, got 0"):
        usable_prefix(10, 0)


def test_a_prompt_that_is_stored_whole(llama: Rig) -> None:
    ids = prompt(PROMPT_TOKENS)
    stored_prefix(llama, ids, PROMPT_TOKENS)
    _, own_tokens, own_scores = own_run(llama, ids, PROMPT_TOKENS - 1)
    cache = llama.cache()
    cache.load(llama.engine, llama.slots, tokens=PROMPT_TOKENS, prompt_tokens=PROMPT_TOKENS)
    assert cache.tokens == PROMPT_TOKENS - 1
    tokens, scores = generate(llama, cache, ids)
    assert tokens == own_tokens
    assert torch.equal(scores, own_scores)


def test_a_prompt_of_one_token_loads_nothing(llama: Rig) -> None:
    assert llama.cache().load(llama.engine, llama.slots, tokens=8, prompt_tokens=1) is None


@given(start=st.integers(0, 100), count=st.integers(0, 100), page_size=st.integers(1, 17))
def test_spans_cover_every_token_once(start: int, count: int, page_size: int) -> None:
    parts = list(spans(start, start + count, page_size))
    assert len(parts) <= 3
    places = [(s.page * page_size + s.offset + i, s.start + i) for s in parts for i in range(s.tokens)]
    assert places == [(start + i, i) for i in range(count)]
    for s in parts:
        assert s.tokens == s.pages * page_size or (s.pages == 1 and s.offset + s.tokens <= page_size)


@pytest.mark.parametrize("length", range(0, 40, 3))
def test_mask_sizes_are_those_of_transformers(length: int) -> None:
    rig = make_rig("mistral")
    cache, own = rig.cache(), DynamicCache(config=rig.model.config)
    if length:
        ids = prompt(PROMPT_TOKENS)[:, :length]
        forward(rig, cache, ids)
        forward(rig, own, ids)
    for query in (1, 2, 5, WINDOW, 30):
        assert cache.get_mask_sizes(query, 0) == own.get_mask_sizes(query, 0)
    assert cache.is_sliding == own.is_sliding
    rig.close()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_crop_takes_tokens_back(family: str) -> None:
    """As transformers' own cache, which keeps more than a window only when told so beforehand."""
    rig = make_rig(family)
    ids = prompt(PROMPT_TOKENS)
    cache = rig.cache()
    forward(rig, cache, ids[:, :50])
    cache.crop(-12)
    cache.crop(0)
    assert cache.tokens == 38
    own = DynamicCache(config=rig.model.config)
    own.activate_past_recording()
    forward(rig, own, ids[:, :50])
    own.crop(-12)
    assert torch.equal(forward(rig, cache, ids[:, 38:50]), forward(rig, own, ids[:, 38:50]))
    for wrong in (5, -51):
        with pytest.raises(ConfigError, match="crop: expected minus the number of tokens to remove, at most 50"):
            cache.crop(wrong)
    rig.close()


def test_reset_starts_over(llama: Rig) -> None:
    ids = prompt(PROMPT_TOKENS)
    cache = llama.cache()
    expected = forward(llama, cache, ids)
    cache.reset()  # type: ignore[no-untyped-call]
    assert cache.tokens == 0
    assert torch.equal(forward(llama, cache, ids), expected)


def test_pages_are_taken_as_needed_and_given_back() -> None:
    rig = make_rig("llama")
    cache = PagedCache(rig.model, rig.pool)
    free = rig.pool.num_pages
    forward(rig, cache, prompt(20))
    assert len(cache.table.pages) == 3
    taken = rig.pool.allocate_pages(free - 3)
    with pytest.raises(CapacityError):
        forward(rig, cache, prompt(20))
    rig.pool.free_pages(taken)
    cache.release()
    assert cache.tokens == 0
    assert len(rig.pool.allocate_pages(free)) == free
    rig.close()


# -- names and specs ---------------------------------------------------------------------------------


def test_the_keyword_is_read_from_the_signature() -> None:
    class New:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Old:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Neither:
        def forward(self, input_ids: Any) -> None: ...

    new, old, neither = (kind() for kind in (New, Old, Neither))
    assert cache_keyword(new) == "cache"  # type: ignore[arg-type]
    assert cache_keyword(old) == "past_key_values"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Neither\.forward: expected a parameter 'cache' or 'past_key_values'"):
        cache_keyword(neither)  # type: ignore[arg-type]


def test_spec_of_grouped_heads() -> None:
    spec = kv_spec_for(configs()["qwen3"], 16, torch.bfloat16)
    assert spec == KVSpec.attention(2, 16, kv_heads=2, head_dim=16, itemsize=2)


def test_spec_of_a_latent_has_two_widths() -> None:
    spec = kv_spec_for(configs()["deepseek"], 16, torch.float32)
    assert spec.layers[0] == (Component("latent", 1, 128), Component("rope", 1, 32))


def test_windows() -> None:
    assert window_layers(configs()["gemma3"]) == [WINDOW, None, WINDOW]
    assert window_layers(configs()["llama"]) == [None, None, None]


def test_sliding_layers_are_transformers_own_kind() -> None:
    """Code in transformers that asks for the kind of a layer, or reads its length, finds what it knows."""
    rig = make_rig("mistral")
    for layer in rig.cache().layers:
        assert isinstance(layer, DynamicSlidingWindowLayer)
        assert layer.cumulative_length == 0
    rig.close()


# -- refusals ----------------------------------------------------------------------------------------


def test_batches_and_beams_are_refused(llama: Rig) -> None:
    ids = prompt(20)
    with pytest.raises(ConfigError, match="expected batch size 1, one for each sequence of the cache, got 2"):
        forward(llama, llama.cache(), ids.repeat(2, 1))
    with pytest.raises(ConfigError, match="expected batch size 1, one for each"):
        generate(llama, llama.cache(), ids, num_beams=2)
    cache = llama.cache()
    with pytest.raises(ConfigError, match="expected 1 repeat, got 3"):
        cache.batch_repeat_interleave(3)
    with pytest.raises(ConfigError, match=r"expected all of them in their order, got \[0, 0\]"):
        cache.reorder_cache(torch.tensor([0, 0]))  # type: ignore[arg-type]
    cache.batch_repeat_interleave(1)
    cache.batch_select_indices(torch.tensor([0]))


def test_a_pool_of_another_model_is_refused(llama: Rig) -> None:
    with pytest.raises(ConfigError, match="pool: expected 2 layers of 2 components each"):
        PagedCache(tiny_model("qwen3"), llama.pool)
    spec = KVSpec.attention(3, 8, kv_heads=2, head_dim=32, itemsize=4)
    pool = KVPool.allocate("sglang.layer_first", spec=spec, num_pages=8)
    with pytest.raises(LayoutError, match="layer 0, component 'k': expected 2 heads of 128 bytes, got 2 of 64"):
        forward(llama, PagedCache(llama.model, pool), prompt(4))


def test_pages_must_be_distinct_and_there(llama: Rig) -> None:
    for pages in ([1, 1], [0, 128], [-1]):
        with pytest.raises(LayoutError, match="pages: expected"):
            PageTable(llama.pool, pages)


def test_load_refuses_what_can_not_be(llama: Rig) -> None:
    cache = llama.cache()
    with pytest.raises(ConfigError, match="load: expected at least 5 slots for 40 tokens, got 4"):
        cache.load(llama.engine, llama.slots[:4], tokens=40, prompt_tokens=PROMPT_TOKENS)
    forward(llama, cache, prompt(4))
    with pytest.raises(ConfigError, match="load: expected an empty cache, got 4 tokens"):
        cache.load(llama.engine, llama.slots, tokens=40, prompt_tokens=PROMPT_TOKENS)


def test_store_refuses_what_is_not_there(llama: Rig) -> None:
    cache = llama.cache()
    with pytest.raises(ConfigError, match="store: expected 1 to 0 tokens, got 0"):
        cache.store(llama.engine, llama.slots)
    with pytest.raises(ConfigError, match="store: expected tokens="):
        cache.store(llama.engine, llama.slots, layerwise=True)
    forward(llama, cache, prompt(10))
    with pytest.raises(ConfigError, match="store: expected 1 to 10 tokens, got 11"):
        cache.store(llama.engine, llama.slots, tokens=11)
    with pytest.raises(ConfigError, match="store: expected more than the 10 tokens there are, got 10"):
        cache.store(llama.engine, llama.slots, tokens=10, layerwise=True)
    with pytest.raises(ConfigError, match="store: expected at least 2 slots for 10 tokens, got 1"):
        cache.store(llama.engine, llama.slots[:1])


def test_layers_with_other_state_are_refused() -> None:
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="layer 0: expected full or sliding-window attention, got LinearAttention"):
        kv_spec_for(config, 16, torch.float32)
