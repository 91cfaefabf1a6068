"""The connector by the calls of vLLM's scheduler and model runner, without vLLM. tests/engines/vllm has its own code
make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from vllm_engine import BLOCK, MiniEngine

from kvtransfer import tier_build
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.registry import make_tier

if TYPE_CHECKING:
    from kvtransfer.mover import Mover

pytest_plugins = ["vllm_stub"]
pytestmark = pytest.mark.usefixtures("vllm_stub")
Make = Callable[..., MiniEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines that are closed at the end."""
    made: list[MiniEngine] = []

    def one(**options: Any) -> MiniEngine:
        made.append(MiniEngine(**options))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def prompt(tokens: int) -> list[int]:
    rng = random.Random()
    return [rng.randrange(50_000) for _ in range(tokens)]


def mover(engine: MiniEngine) -> Mover:
    half = engine.worker._worker
    assert half is not None and half._mover is not None
    return half._mover


def spoil(engine: MiniEngine, slots: list[int]) -> None:
    """One bit of these host slots is other than it was."""
    host = mover(engine).host
    for slot in slots:
        host.record(slot).payload[slot * 13 % host.spec.page_bytes] ^= 4


@pytest.mark.parametrize("layout", ["BLNHC", "LBHNC"])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_what_was_stored_is_loaded_byte_for_byte(make: Make, layerwise: bool, layout: str) -> None:
    engine = make(layerwise=layerwise, layout=layout)
    tokens = prompt(5 * BLOCK + 3)
    assert engine.run(tokens) == 0
    engine.settle()
    engine.raw.fill_(0x55)
    assert engine.run(tokens) == 5 * BLOCK
    assert engine.run([*tokens[: 3 * BLOCK], *prompt(20)]) == 3 * BLOCK
    assert engine.run(prompt(40)) == 0


def test_one_token_is_left_to_compute(make: Make) -> None:
    engine = make()
    tokens = prompt(4 * BLOCK)
    engine.run(tokens)
    engine.settle()
    assert engine.run(tokens) == 3 * BLOCK


@pytest.mark.parametrize("unhooked", [[0], [2], [0, 1, 2]])
def test_layers_that_no_attention_waits_for_are_waited_for_at_the_start(make: Make, unhooked: list[int]) -> None:
    engine = make(unhooked=unhooked)
    tokens = prompt(6 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    for _ in range(3):
        engine.raw.fill_(0x55)
        assert engine.run(tokens) == 6 * BLOCK


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_page_that_does_not_verify_ends_the_prefix(make: Make, layerwise: bool) -> None:
    engine = make(layerwise=layerwise)
    tokens = prompt(6 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    spoil(engine, [3])
    assert engine.run(tokens) == 3 * BLOCK
    engine.settle()
    assert engine.run(tokens) == 6 * BLOCK
    assert engine.counts["load_failed_pages"] == 1 and engine.counts["failed_load_pages"] == 3


def test_what_was_made_of_a_bad_page_is_not_kept_and_the_engine_is_told_to_drop_it(make: Make) -> None:
    engine = make()
    stem = prompt(4 * BLOCK)
    engine.run([*stem, 1])
    engine.settle()
    spoil(engine, [2])
    tokens = [*stem, *prompt(3 * BLOCK)]
    request = engine.request(tokens)
    request.num_computed_tokens, _ = engine.begin(request)
    blocks = list(engine.blocks[request.request_id])
    engine.step(request, sync_loads=True)
    assert engine.pool.evicted == set(blocks[2:7])
    engine.end(request)
    engine.settle()
    assert engine.run(tokens) == 2 * BLOCK
    assert engine.counts["failed_store_pages"] == 3  # those behind the four that were loaded
    engine.settle()
    assert engine.run(tokens) == 6 * BLOCK


def test_blocks_are_held_until_their_store_is_answered(make: Make) -> None:
    engine = make()
    free = engine.pool.get_num_free_blocks()
    request = engine.request(prompt(4 * BLOCK + 1))
    engine.begin(request)
    answers = engine.worker.build_connector_worker_meta
    engine.worker.build_connector_worker_meta = lambda: None  # type: ignore[method-assign]
    engine.step(request)
    engine.end(request)
    for _ in range(3):
        engine.step()
    assert engine.pool.get_num_free_blocks() == free - 4
    assert engine.scheduler.has_pending_push_work() and engine.scheduler.has_pending_block_frees()
    engine.worker.build_connector_worker_meta = answers  # type: ignore[method-assign]
    engine.settle()
    assert engine.pool.get_num_free_blocks() == free
    assert not engine.scheduler.has_pending_block_frees()


def test_a_request_that_goes_before_it_is_scheduled_holds_nothing(make: Make) -> None:
    engine = make(host_pages=4)
    tokens = prompt(4 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    request = engine.request(tokens)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, False)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, False)  # asked again: the same
    assert engine.scheduler.get_num_new_matched_tokens(request, BLOCK) == (3 * BLOCK, False)
    engine.scheduler.request_finished(request, [])
    engine.run(prompt(4 * BLOCK + 1))  # takes all of the host memory
    engine.settle()
    assert engine.run(tokens) == 0


def test_what_is_not_told_by_tokens_is_not_kept(make: Make) -> None:
    engine = make()
    tokens = prompt(5 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    for change, loaded in (
        ({"cache_salt": "x"}, 0),
        ({"lora_request": SimpleNamespace(lora_name="a", lora_path="p", lora_int_id=1)}, 0),
        ({"prompt_embeds": object()}, 0),
        ({"prompt_token_ids": None}, 0),
        ({"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=2 * BLOCK + 1))]}, 2 * BLOCK),
        ({}, 5 * BLOCK),
    ):
        request = engine.request(prompt(1))
        request.all_token_ids, request.prompt_token_ids = list(tokens), list(tokens)
        for name, value in change.items():
            setattr(request, name, value)
        engine.scheduler.request_finished(request, [])  # as it was when it was first heard of
        engine.scheduler.on_new_request(request)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == loaded, change
        engine.scheduler.request_finished(request, [])


def test_an_adapter_of_one_name_and_two_paths_is_two_adapters() -> None:
    from kvtransfer.integrations.vllm_requests import adapter_name, request_salt

    def named(name: str, path: str) -> Any:
        return SimpleNamespace(lora_request=SimpleNamespace(lora_name=name, lora_path=path))

    assert adapter_name(named("a", "p")) != adapter_name(named("a", "q"))
    assert request_salt(b"s", None) == b"s" and request_salt(b"s", "") != b"s"
    assert request_salt(b"ab", "c") != request_salt(b"a", "bc")


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_disk_below(make: Make, tmp_path: Path, layerwise: bool) -> None:
    disk = {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "disk_share": 1.0}}
    engine = make(layerwise=layerwise, settings={"tiers": disk})
    tokens = prompt(8 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    while mover(engine).stats()["disk"].pages < 8:
        engine.step()
    engine.close()
    again = make(layerwise=layerwise, settings={"tiers": disk})
    again.seed = engine.seed
    assert again.run(tokens) == 8 * BLOCK


def to_the_tier_below(engine: MiniEngine, tokens: list[int]) -> None:
    """Have the prompt stored, and pushed out of a host memory of 4 pages by another one."""
    for one in (tokens, prompt(4 * BLOCK + 1)):
        engine.run(one)
        engine.settle()
        settle_tiers(engine)


def settle_tiers(engine: MiniEngine) -> None:
    half = engine.scheduler._scheduler
    assert half is not None and half._directory is not None
    while not half._directory.idle:
        engine.step()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_tier_below_that_fails_stalls_or_dies_costs_hits_and_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    tiers: list[FaultyTier] = []

    def faulty(kind: str, **settings: Any) -> FaultyTier:
        tiers.append(FaultyTier(make_tier(kind, **settings)))
        return tiers[-1]

    monkeypatch.setattr(tier_build, "make_tier", faulty)
    settings = {
        "tiers": {"memory": {"cache_gb": 0.01}},
        "deadline_s": 2.0,
        "prefetch": {"min_tokens": 0, "stop": "timeout", "timeout_base_s": 0.3},
    }
    engine = make(layerwise=layerwise, host_pages=4, settings=settings)
    tokens = prompt(4 * BLOCK + 1)
    to_the_tier_below(engine, tokens)
    (tier,) = tiers
    times = 1 if layerwise else 2  # a load beside the steps asks again for what was not fetched before it
    tier.add(Fault("error", verb="get", call=tier.calls("get"), pages=[2]))
    tier.add(Fault("error", verb="get", call=tier.calls("get") + 1, pages=[0]))
    assert engine.run(tokens) == 2 * BLOCK
    engine.settle()
    to_the_tier_below(engine, tokens)
    tier.add(Fault("stall", verb="get", call=tier.calls("get"), times=times))
    assert engine.run(tokens) == 0  # it does not wait longer than it was told
    tier.release()
    engine.settle()
    settle_tiers(engine)
    to_the_tier_below(engine, tokens)
    tier.add(Fault("death", call=tier.calls()))
    assert engine.run(tokens) == 0


def test_hits_are_told_by_their_source(make: Make, tmp_path: Path) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    disk = {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "disk_share": 1.0}}
    engine = make(host_pages=4, settings={"tiers": disk})
    tokens = prompt(4 * BLOCK + 1)
    to_the_tier_below(engine, tokens)
    request = engine.request(tokens)
    loaded, _ = engine.begin(request)
    assert loaded == 4 * BLOCK
    assert engine.scheduler.get_external_cache_hit_sources(request, loaded) == {CacheHitSource.DISK: loaded}
    request.num_computed_tokens = loaded
    engine.step(request, sync_loads=True)
    engine.check(request)
    engine.end(request)
    again = engine.request(tokens)
    loaded, _ = engine.begin(again)
    assert engine.scheduler.get_external_cache_hit_sources(again, loaded) == {CacheHitSource.HOST: loaded}
    assert engine.scheduler.get_external_cache_hit_sources(again, 0) == {}


def test_events_say_what_has_come_into_host_memory(make: Make) -> None:
    engine = make()
    tokens = prompt(3 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    (event,) = engine.scheduler.take_events()
    from kvtransfer.tiers.keys import page_keys

    assert event.block_hashes == page_keys(tokens, BLOCK) and event.parent_block_hash is None
    assert event.token_ids == tokens[: 3 * BLOCK] and event.medium == "CPU" and event.block_size == BLOCK
    assert list(engine.scheduler.take_events()) == []


def test_figures_in_the_log_and_in_prometheus(make: Make) -> None:
    engine = make()
    tokens = prompt(4 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    engine.run(tokens)
    engine.settle()
    connector = type(engine.scheduler)
    stats = connector.build_kv_connector_stats(dict(engine.counts))
    stats = stats.aggregate(connector.build_kv_connector_stats({"load_pages": 2}))
    told = stats.reduce()
    assert told["load_pages"] == 6 and told["store_pages"] == 4 and told["loaded_tokens"] == 4 * BLOCK
    assert told["load_bytes"] == 4 * 3 * engine.page_bytes and told["load_gbps"] >= 0 and not stats.is_empty()
    stats.reset()
    assert stats.is_empty() and stats.reduce() == {}
    registry = CollectorRegistry()

    def counter(**given: Any) -> Counter:
        return Counter(registry=registry, **given)

    metrics = connector.build_prom_metrics(engine.config, {Counter: counter}, ["model", "engine"], {0: ["m", "0"]})
    metrics.observe({"load_pages": 3, "something else": 1}, 0)
    metrics.observe({"load_pages": 2}, 0)
    assert registry.get_sample_value("vllm:kvtransfer_load_pages_total", {"model": "m", "engine": "0"}) == 5


def test_after_a_reset_nothing_is_found(make: Make) -> None:
    engine = make()
    tokens = prompt(4 * BLOCK + 1)
    engine.run(tokens)
    engine.settle()
    assert engine.scheduler.reset_cache() is True
    assert engine.run(tokens) == 0
    engine.settle()
    assert engine.run(tokens) == 4 * BLOCK


def test_what_the_class_asks_the_engine_for(make: Make) -> None:
    engine = make()
    connector = type(engine.scheduler)
    assert connector.get_required_kvcache_layout(engine.config) == "BLNHC"
    assert connector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not connector.requires_piecewise_for_cudagraph({"layerwise": False})
    assert not engine.scheduler.requires_kv_delivery


def test_switched_off_it_does_nothing(make: Make) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput

    engine = make()
    transfer = engine.config.kv_transfer_config
    assert transfer is not None
    transfer.kv_connector_extra_config["settings"] = {"enabled": False}
    scheduler, worker = (
        type(engine.scheduler)(engine.config, role, engine.kv_cache_config) for role in KVConnectorRole
    )
    worker.register_kv_caches(engine.views)
    assert worker.get_handshake_metadata() is None
    request = engine.request(prompt(100))
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput({request.request_id: 100})))
    worker.start_load_kv(ForwardContext())
    worker.wait_for_layer_load(next(iter(engine.views)))
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None) and not worker.get_block_ids_with_load_errors()
    assert worker.build_connector_worker_meta() is None and worker.get_kv_connector_stats() is None
    assert scheduler.request_finished(request, []) == (False, None) and not scheduler.has_pending_push_work()
    worker.shutdown()


def test_what_it_does_not_serve_is_refused(make: Make) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from kvtransfer.integrations.vllm_facts import EngineFacts, Options, common_facts

    engine = make()
    config = Options.of({"settings": {"kv_dtype": "int8"}}).config

    def facts(groups: list[Any] | None = None, **parallel: int) -> None:
        for name, value in parallel.items():
            setattr(engine.config.parallel_config, name, value)
        try:
            given = engine.kv_cache_config if groups is None else KVCacheConfig(4, groups)
            EngineFacts.of(engine.config, given, config)
        finally:
            for name in parallel:
                setattr(engine.config.parallel_config, name, 1)

    facts()
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 with this connector, got 2"):
            facts(None, **{name: 2})
    full = KVCacheGroupSpec(["a"], FullAttentionSpec(16))
    for groups in ([full, full], [KVCacheGroupSpec(["a"], SlidingWindowSpec(16))], []):
        with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
            facts(groups)
    with pytest.raises(ConfigError, match="expected config, settings, layerwise, got cpu_bytes"):
        Options.of({"cpu_bytes": 1})
    with pytest.raises(ConfigError, match="layerwise: expected true or false, got 'yes'"):
        Options.of({"layerwise": "yes"})
    engine.config.model_config = None
    with pytest.raises(ConfigError, match=r"namespace.model: expected a fingerprint"):
        facts()
    told = engine.worker.get_handshake_metadata()
    assert told is not None
    other = type(told)(told.facts, "another spec")
    with pytest.raises(ConfigError, match="expected the same pages and tiers on every rank"):
        common_facts([told, other])


def test_caches_that_can_not_be_read_are_refused_and_nothing_is_left_behind(make: Make) -> None:
    import torch

    engine = make()
    engine.worker.unregister_kv_caches()
    with pytest.raises(LayoutError, match=r"layer0: expected \[blocks, heads, tokens, content\]"):
        engine.worker.register_kv_caches({"layer0": torch.zeros(64)})
    engine.worker.register_kv_caches(engine.views)


def test_whatever_comes_every_byte_is_right(make: Make) -> None:
    """200 requests over shared prefixes, through a pool and a host memory that hold a few of them."""
    rng = random.Random()
    engine = make(num_blocks=24, host_pages=30, layerwise=True)
    stems = [prompt(rng.randrange(1, 120)) for _ in range(5)]
    loaded = 0
    for _ in range(200):
        stem = rng.choice(stems)
        loaded += engine.run([*stem[: rng.randrange(1, len(stem) + 1)], *prompt(rng.randrange(1, 40))])
        if rng.random() < 0.1:
            engine.settle()  # a store's digests are of what has arrived, on the CPU
            spoil(engine, [rng.randrange(30)])
    assert loaded > 0
