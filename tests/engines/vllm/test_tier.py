"""vLLM's own TieringOffloadingSpec, factory and manager over `KVTransferTier`: chunks leave the host memory and come
back byte for byte, and what fails is a miss."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtransfer import tier_build
from kvtransfer.integrations.vllm_tier import PAGES, KVTransferTier
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.faulty import Fault, FaultyTier

pytestmark = pytest.mark.engines

CHUNK = 5 * 4096  # two blocks of 10,000 bytes, and what fills them up to whole memory pages
CHUNKS = 6
LIMIT_S = 30.0
Keys = list[OffloadKey]


class Engine:
    """What vLLM's offloading scheduler does with the manager, in as many words."""

    def __init__(self, tier: dict[str, Any], *, lookup_s: float = 5.0) -> None:
        self.id = f"kvt{secrets.token_hex(4)}"
        secondary = {
            "type": "KVTransferTier",
            "module_path": "kvtransfer.integrations.vllm_tier",
            "lookup_s": lookup_s,
            "enable_kv_events": True,
            **tier,
        }
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("model.layers.0.attn", "model.layers.1.attn"), 0),),
            worker_kv_bytes_per_block=10_000,
            enable_kv_cache_events=True,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": CHUNKS * CHUNK,
                "secondary_tiers": [secondary],
            },
            engine_id=self.id,
            model=OffloadingModelConfig("org/model", "bfloat16", 1024),
            cache=OffloadingCacheConfig(16, 2),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
            kv_cache_layout="LBHNC",
        )
        self.spec: Any = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = self.spec.get_manager()
        assert self.spec.num_chunks == CHUNKS and self.spec.kv_bytes_per_chunk == CHUNK

    def rows(self) -> NDArray[np.uint8]:
        """The host memory, through a mapping that the caller drops at once."""
        return np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), dtype=np.uint8).reshape(CHUNKS, CHUNK)

    def request(self) -> ReqContext:
        made = ReqContext(secrets.token_hex(4))
        with self.manager.lock:
            self.manager.on_new_request(made)
        return made

    def end(self, request: ReqContext) -> None:
        with self.manager.lock:
            self.manager.on_request_finished(request)

    def step(self) -> None:
        with self.manager.lock:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.002)

    def settle(self) -> None:
        """Steps until nothing moves."""
        until = time.monotonic() + LIMIT_S
        while self.manager.has_pending_work() and time.monotonic() < until:
            self.step()
        assert not self.manager.has_pending_work()

    def store(self, keys: Keys) -> NDArray[np.uint8]:
        """Fresh random bytes into the host memory under these keys, as the workers' copies would bring them."""
        request = self.request()
        with self.manager.lock:
            prepared = self.manager.prepare_store(keys, request)
            assert prepared is not None and list(prepared.keys_to_store) == keys
        payload = np.random.default_rng().integers(0, 256, (len(keys), CHUNK), dtype=np.uint8)
        self.rows()[prepared.store_spec.chunk_ids] = payload
        with self.manager.lock:
            self.manager.complete_store(keys, request)
        self.settle()
        self.end(request)
        return payload

    def empty(self) -> None:
        """Nothing is in the host memory any more."""
        with self.manager.lock:
            self.manager.reset_cache()
            self.manager.on_reset_flushed()
        self.rows()[:] = 0xEE

    def find(self, keys: Keys) -> tuple[list[bool], NDArray[np.uint8]]:
        """For each key whether it can be loaded in the end, and the bytes of those that can."""
        request = self.request()
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            with self.manager.lock:
                said = [self.manager.lookup(key, request) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(said):
                break
            self.step()
        there = [key for key, result in zip(keys, said, strict=True) if result is LookupResult.HIT]
        with self.manager.lock:
            chunk_ids = self.manager.prepare_load(there, request).chunk_ids if there else []
            got = self.rows()[chunk_ids].copy()
            self.manager.complete_load(there, request)
        self.end(request)
        return [result is LookupResult.HIT for result in said], got

    def close(self) -> None:
        self.manager.shutdown()
        assert not list(Path("/dev/shm").glob(f"vllm_offload_{self.id}*"))


def keys(count: int) -> Keys:
    return [make_offload_key(secrets.token_bytes(32), 0) for _ in range(count)]


MEMORY = {"tier": "memory", "settings": {"tiers": {"memory": {"cache_gb": 0.01}}}}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTier]:
    """Tiers that are made from here on, as they can be told to fail."""
    made: list[FaultyTier] = []
    inner = tier_build.make_tier

    def wrapped(kind: str, **settings: Any) -> Tier:
        made.append(FaultyTier(inner(kind, **settings)))
        return made[-1]

    monkeypatch.setattr(tier_build, "make_tier", wrapped)
    return made


@pytest.fixture
def engine(faulty: list[FaultyTier]) -> Iterator[Engine]:
    made = Engine(MEMORY)
    yield made
    made.close()


def test_chunks_go_down_and_come_back(engine: Engine) -> None:
    names = keys(4)
    payload = engine.store(names)
    engine.empty()
    there, got = engine.find([*names, *keys(1)])
    assert there == [True, True, True, True, False] and (got == payload).all()
    tier = engine.manager.secondary_tiers[0]
    assert isinstance(tier, KVTransferTier)
    stored = [event for event in engine.manager.take_events() if event.medium.value == "STORAGE"]
    assert [set(event.keys) for event in stored] == [set(names)]
    stats = engine.manager.get_stats()
    assert stats.data["data"][PAGES] == {("KVTransferTier", "store", "ok"): 4, ("KVTransferTier", "load", "ok"): 4}


def test_more_than_the_host_memory_holds(engine: Engine) -> None:
    names, payloads = [], []
    for _ in range(5):  # 20 chunks through 6
        some = keys(4)
        payloads.append(engine.store(some))
        names.append(some)
    for some, payload in zip(names, payloads, strict=True):
        there, got = engine.find(some)
        assert there == [True] * 4 and (got == payload).all()


def test_a_page_that_fails_is_a_miss_and_the_others_come(engine: Engine, faulty: list[FaultyTier]) -> None:
    names = keys(4)
    payload = engine.store(names)
    engine.empty()
    faulty[0].add(Fault("error", verb="get", call=0, pages=[1]))
    there, got = engine.find(names)
    assert there == [True, False, True, True] and (got == payload[[0, 2, 3]]).all()
    engine.empty()
    faulty[0].add(Fault("wrong_bytes", verb="get", call=1, pages=[3]))
    there, got = engine.find(names)
    assert there == [True, True, True, False] and (got == payload[:3]).all()


def test_a_slow_tier_does_not_hold_the_engine(faulty: list[FaultyTier]) -> None:
    engine = Engine({**MEMORY, "settings": {**MEMORY["settings"], "deadline_s": 0.5}}, lookup_s=0.2)  # type: ignore[dict-item]
    names = keys(2)
    payload = engine.store(names)
    engine.empty()
    faulty[0].add(Fault("stall", verb="lookup", call=faulty[0].calls("lookup")))
    began = time.monotonic()
    assert engine.find(names)[0] == [False, False]
    faulty[0].release()
    faulty[0].add(Fault("stall", verb="get", call=0))
    assert engine.find(names)[0] == [False, False]
    assert time.monotonic() - began < 10
    faulty[0].release()
    there, got = engine.find(names)
    assert there == [True, True] and (got == payload).all()
    engine.close()


def test_a_full_tier_costs_hits_and_nothing_else(faulty: list[FaultyTier]) -> None:
    room = 2 * (CHUNK + 4096)
    engine = Engine({"tier": "memory", "settings": {"tiers": {"memory": {"cache_gb": room / 2**30}}}})
    first = keys(2)
    payload = engine.store(first)
    tier = faulty[0]
    tier.pin(engine.manager.secondary_tiers[0]._store.stored_keys(first), None).result(LIMIT_S)
    second = keys(2)
    engine.store(second)  # refused, page by page
    engine.empty()
    there, got = engine.find([*first, *second])
    assert there == [True, True, False, False] and (got == payload).all()
    engine.close()


def test_a_tier_that_dies_costs_hits_and_nothing_else(engine: Engine, faulty: list[FaultyTier]) -> None:
    names = keys(2)
    engine.store(names)
    faulty[0].add(Fault("death", call=faulty[0].calls()))
    there, _ = engine.find(names)
    assert there == [True, True]  # from host memory
    engine.empty()
    assert engine.find(names)[0] == [False, False]
    engine.store(keys(3))


def test_a_disk_serves_the_next_engine(tmp_path: Path) -> None:
    disk = {
        "tier": "disk",
        "settings": {"tiers": {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "disk_share": 1.0}}},
    }
    engine = Engine(disk)
    names = keys(4)
    payload = engine.store(names)
    engine.close()
    engine = Engine(disk)
    there, got = engine.find([*names, *keys(1)])
    assert there == [True] * 4 + [False] and (got == payload).all()
    engine.close()
