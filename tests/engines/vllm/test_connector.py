"""The connector inside vLLM's own scheduler: what comes out is right to the token, whatever comes from a cache."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.vllm.rig import BLOCK, Engine
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus

from kvtransfer.commands import Load, Store
from kvtransfer.fifo import Delays
from kvtransfer.integrations import vllm_worker
from kvtransfer.mover import Mover

pytestmark = pytest.mark.engines


def prompt(tokens: int) -> list[int]:
    rng = random.Random()
    return [rng.randrange(50_000) for _ in range(tokens)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_second_turn_hits_the_first(tmp_path: Path, layerwise: bool, runner: str) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, runner=runner)
    first = prompt(100)
    answer = engine.ask("a", first, 40)
    assert answer == engine.right(first, 40)
    engine.forget()
    engine.taken()
    second = [*first, *answer, *prompt(20)]
    assert engine.ask("b", second, 10) == engine.right(second, 10)
    assert engine.taken()["loaded_tokens"] == (100 + 39) // BLOCK * BLOCK  # the last token's KV was never computed
    engine.close()


def mover(engine: Engine, rank: int = 0) -> Mover:
    half = engine.workers[rank].connector._worker
    assert half is not None and half._mover is not None
    return half._mover


def flip_a_bit_of_every_page(engine: Engine, rank: int = 0, *, of: int = 7) -> None:
    """In host memory: one bit in each ``of``-th slot, somewhere."""
    host, rng = mover(engine, rank).host, random.Random()
    payload = host.payload.numpy().reshape(host.num_slots, host.slot_bytes)
    for slot in range(0, host.num_slots, of):
        payload[slot, rng.randrange(host.spec.page_bytes)] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_every_layout_of_the_engine(tmp_path: Path, layout: str, layerwise: bool) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, layout=layout)
    asked = prompt(70)
    answer = engine.ask("a", asked, 5)
    engine.forget()
    engine.taken()
    assert engine.ask("b", asked, 5) == answer == engine.right(asked, 5)
    assert engine.taken()["loaded_tokens"] == 64
    engine.close()


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_pages_that_do_not_verify_are_computed_again(tmp_path: Path, layerwise: bool, runner: str) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, runner=runner)
    prompts = [prompt(150) for _ in range(4)]
    answers = [engine.ask(f"a{i}", one, 3) for i, one in enumerate(prompts)]
    assert answers == [engine.right(one, 3) for one in prompts]
    engine.forget()
    engine.taken()
    flip_a_bit_of_every_page(engine)
    for i, one in enumerate(prompts):
        engine.add(f"b{i}", one, 3)
    engine.run()
    assert [list(engine.requests[f"b{i}"].output_token_ids) for i in range(4)] == answers
    counts = engine.taken()
    assert counts["failed_load_pages"] > 0 and counts["load_pages"] > 0
    engine.forget()  # what was stored meanwhile is right too
    assert [engine.ask(f"c{i}", one, 3) for i, one in enumerate(prompts)] == answers
    assert "failed_load_pages" not in engine.taken()
    engine.close()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_with_the_policy_fail_the_request_fails_and_no_other(tmp_path: Path, layerwise: bool) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, policy="fail")
    asked = prompt(100)
    answer = engine.ask("a", asked, 3)
    engine.forget()
    flip_a_bit_of_every_page(engine, of=1)
    request, other = engine.add("b", asked, 3), engine.add("c", prompt(100), 3)
    engine.run()
    assert request.status == RequestStatus.FINISHED_ERROR and not request.output_token_ids
    assert list(other.output_token_ids) == engine.right(other.prompt_token_ids or [], 3)
    assert engine.ask("d", asked, 3) == answer
    engine.close()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_two_ranks_have_a_page_together_or_not_at_all(tmp_path: Path, layerwise: bool) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, ranks=2)
    asked = prompt(200)
    answer = engine.ask("a", asked, 5)
    assert answer == engine.right(asked, 5)
    engine.forget()
    assert engine.ask("b", asked, 5) == answer
    engine.forget()
    engine.taken()
    flip_a_bit_of_every_page(engine, rank=1)
    assert engine.ask("c", asked, 5) == answer
    assert engine.taken()["failed_load_pages"] > 0
    engine.forget()
    assert engine.ask("d", asked, 5) == answer
    engine.close()


def test_salts_and_adapters_are_kept_apart(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    asked = prompt(100)
    engine.ask("a", asked, 2, cache_salt="tenant 1")
    engine.forget()
    engine.taken()
    for request_id, salt in (("b", None), ("c", "tenant 2")):
        engine.ask(request_id, asked, 2, cache_salt=salt)
        assert "loaded_tokens" not in engine.taken()
        engine.forget()
    engine.ask("d", asked, 2, cache_salt="tenant 1")
    assert engine.taken()["loaded_tokens"] == 96
    engine.close()


def test_blocks_are_held_while_they_are_stored_whatever_becomes_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    store = Mover._transferred

    def gated(self: Mover, under: Any, handle: Any) -> None:
        if isinstance(under.command, Store):
            assert gate.wait(60)
        store(self, under, handle)

    monkeypatch.setattr(Mover, "_transferred", gated)
    engine = Engine(tmp_path)
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.add("a", prompt(100), 50)
    engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert pool.get_num_free_blocks() == free - 6
    assert engine.connector.has_pending_push_work() and engine.connector.has_pending_block_frees()
    assert engine.scheduler.has_requests()  # the engine goes on stepping, for the answer
    gate.set()
    engine.run()
    assert pool.get_num_free_blocks() == free and not engine.connector.has_pending_push_work()
    engine.close()


def slow(monkeypatch: pytest.MonkeyPatch, most_s: float) -> None:
    """The engines of movers made from here on hold every copy back, for some time or other."""
    made, rng = vllm_worker.TransferEngine, random.Random()

    def wrapped(*args: Any, **more: Any) -> Any:
        return made(*args, **more, delays=Delays(lambda label: rng.choice([0, 0, 0, rng.uniform(0, most_s)])))

    monkeypatch.setattr(vllm_worker, "TransferEngine", wrapped)


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_preempted_requests_and_what_they_had_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    slow(monkeypatch, 0.02)
    engine = Engine(tmp_path, layerwise=layerwise, num_blocks=20)
    prompts = {f"a{i}": prompt(60) for i in range(6)}
    for name, one in prompts.items():
        engine.add(name, one, 40)
    engine.run()
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    for name, one in prompts.items():
        assert list(engine.requests[name].output_token_ids) == engine.right(one, 40)
    engine.forget()
    for name, one in prompts.items():
        assert engine.ask(f"again {name}", one, 40) == engine.right(one, 40)
    assert engine.taken()["loaded_tokens"] > 0
    engine.close()


def test_a_request_aborted_while_it_loads_gives_its_blocks_back_once_nothing_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    transferred = Mover._transferred

    def gated(self: Mover, under: Any, handle: Any) -> None:
        if isinstance(under.command, Load):
            assert gate.wait(60)
        transferred(self, under, handle)

    monkeypatch.setattr(Mover, "_transferred", gated)
    engine = Engine(tmp_path, layerwise=False)
    asked = prompt(100)
    answer = engine.ask("a", asked, 3)
    engine.forget()
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.add("b", asked, 3)
    engine.step()
    assert engine.requests["b"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step()
    assert pool.get_num_free_blocks() == free - 6
    gate.set()
    until = time.monotonic() + 30
    while pool.get_num_free_blocks() < free and time.monotonic() < until:
        engine.step()
    assert pool.get_num_free_blocks() == free
    assert engine.ask("c", asked, 3) == answer
    engine.close()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_disk_below_serves_the_next_engine(tmp_path: Path, layerwise: bool) -> None:
    disk = {"disk": {"paths": [str(tmp_path / "disk")], "cache_gb": 0.05, "disk_share": 1.0}}
    asked = prompt(300)
    engine = Engine(tmp_path, layerwise=layerwise, settings={"tiers": disk})
    answer = engine.ask("a", asked, 3)
    wait_for(lambda: mover(engine).stats()["disk"].pages == 18, engine)
    engine.close()
    engine = Engine(tmp_path, layerwise=layerwise, settings={"tiers": disk})
    assert engine.ask("b", asked, 3) == answer == engine.right(asked, 3)
    assert engine.taken()["loaded_tokens"] == 288
    engine.close()


def wait_for(condition: Callable[[], bool], engine: Engine) -> None:
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        engine.step()
    assert condition()


def test_after_a_reset_nothing_is_found_in_any_tier(tmp_path: Path) -> None:
    disk = {"disk": {"paths": [str(tmp_path / "disk")], "cache_gb": 0.05, "disk_share": 1.0}}
    engine = Engine(tmp_path, settings={"tiers": disk})
    asked = prompt(100)
    answer = engine.ask("a", asked, 3)
    engine.taken()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.ask("b", asked, 3) == answer
    assert "loaded_tokens" not in engine.taken()
    engine.forget()
    assert engine.ask("c", asked, 3) == answer
    assert engine.taken()["loaded_tokens"] == 96
    engine.close()


def test_after_sleep_the_host_memory_is_new_and_the_disk_is_not(tmp_path: Path) -> None:
    disk = {"disk": {"paths": [str(tmp_path / "disk")], "cache_gb": 0.05, "disk_share": 1.0}}
    engine = Engine(tmp_path, settings={"tiers": disk})
    asked = prompt(100)
    answer = engine.ask("a", asked, 3)
    wait_for(lambda: mover(engine).stats()["disk"].pages == 6, engine)
    engine.forget()
    worker = engine.workers[0].connector
    worker.unregister_kv_caches()
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    engine.taken()
    assert engine.ask("b", asked, 3) == answer
    assert engine.taken()["loaded_tokens"] == 96
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_whatever_happens_the_tokens_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layerwise: bool, ranks: int
) -> None:
    """Few blocks, few host pages, slow copies, shared prefixes, aborts, resets, bits that flip."""
    slow(monkeypatch, 0.02)
    rng = random.Random()
    engine = Engine(tmp_path, layerwise=layerwise, num_blocks=30, host_pages=40, ranks=ranks, batch_tokens=128)
    stems = [prompt(rng.randrange(20, 150)) for _ in range(4)]
    wanted: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for round_ in range(25):
        for number in range(rng.randrange(4)):
            name = f"{round_}.{number}"
            stem = rng.choice(stems)
            asked = [*stem[: rng.randrange(1, len(stem) + 1)], *prompt(rng.randrange(0, 30))]
            wanted[name] = asked, rng.randrange(1, 25)
            engine.add(name, *wanted[name])
        for _ in range(rng.randrange(8)):
            engine.step()
        running = [name for name in wanted if name in engine.scheduler.requests and name not in aborted]
        if running and rng.random() < 0.2:
            name = rng.choice(running)
            aborted.add(name)
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.2:
            engine.run()
            engine.forget()
        if rng.random() < 0.3 and not engine.connector.has_pending_push_work():
            # Not while something is stored: on the CPU a store's digests are of what has arrived.
            flip_a_bit_of_every_page(engine, rng.randrange(ranks), of=rng.randrange(1, 9))
    engine.run()
    for name, (asked, count) in wanted.items():
        given = list(engine.requests[name].output_token_ids)
        right = engine.right(asked, count)
        assert given == (right[: len(given)] if name in aborted else right), name
    counts = engine.taken()
    assert counts["loaded_tokens"] > 0 and counts["stored_tokens"] > 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == engine.num_blocks - 1
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_forward_makes_of_a_bad_page_is_never_kept(tmp_path: Path, ranks: int) -> None:
    """The step that finds out has computed, and begun to store, pages behind the one that does not verify."""
    engine = Engine(tmp_path, ranks=ranks)
    stem = prompt(100)
    engine.ask("a", stem, 2)
    engine.forget()
    flip_a_bit_of_every_page(engine, ranks - 1, of=1)
    asked = [*stem, *prompt(100)]
    assert engine.ask("b", asked, 2) == engine.right(asked, 2)
    engine.forget()
    engine.taken()
    assert engine.ask("c", asked, 2) == engine.right(asked, 2)
    assert engine.taken()["loaded_tokens"] == 192
    engine.close()


def test_nobody_else_takes_a_bad_page_from_the_engines_own_cache(tmp_path: Path) -> None:
    """The engine has cached the blocks of a layer-wise load at once; the request that was to compute them anew goes."""
    engine = Engine(tmp_path)
    asked = prompt(150)
    answer = engine.ask("a", asked, 2)
    engine.forget()
    flip_a_bit_of_every_page(engine, of=1)
    engine.add("b", asked, 2)
    engine.step()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert engine.ask("c", asked, 2) == answer
    engine.close()


def test_nor_what_was_made_of_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    stem = prompt(100)
    engine.ask("a", stem, 2)
    engine.forget()
    flip_a_bit_of_every_page(engine, of=1)
    asked = [*stem, *prompt(100)]
    engine.add("b", asked, 2)
    engine.step()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    engine.ask("c", stem, 2)  # computes the first pages: those behind them would be found again
    assert engine.ask("d", asked, 2) == engine.right(asked, 2)
    engine.close()
