"""`KVTransferTier` by the calls that vLLM's tiering manager makes, without vLLM. tests/engines/vllm has its own code
make them."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.faulty import Fault, FaultyTier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey

    from kvtransfer.integrations.vllm_tier import KVTransferTier

pytest_plugins = ["vllm_stub"]
pytestmark = pytest.mark.usefixtures("vllm_stub")

CHUNK = 2 * 4096
LIMIT_S = 20.0
MEMORY: dict[str, Any] = {"tiers": {"memory": {"cache_gb": 0.01}}}


def offloading_spec(**changes: Any) -> OffloadingSpec:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    given: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        "worker_kv_bytes_per_block": CHUNK,
        "enable_kv_cache_events": True,
        "extra_config": {},
        "engine_id": "e",
        "model": OffloadingModelConfig("org/model", "bfloat16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingSpec(OffloadingConfig(**{**given, **changes}))


class Rig:
    """A tier over rows of fresh random bytes, as vLLM's manager sees it."""

    def __init__(self, rows: int = 9, settings: dict[str, Any] | None = None, **more: Any) -> None:
        from kvtransfer.integrations.vllm_tier import KVTransferTier

        self.map = mmap.mmap(-1, rows * CHUNK)
        self.view = memoryview(self.map).cast("b", (rows, CHUNK))
        self.rows: NDArray[np.uint8] = np.frombuffer(self.view, dtype=np.uint8).reshape(rows, CHUNK)
        self.rows[:] = np.random.default_rng().integers(0, 256, self.rows.shape, dtype=np.uint8)
        given = {"tier": "memory", **more}
        self.tier: KVTransferTier = KVTransferTier(
            offloading_spec(), self.view, "KVTransferTier", settings=MEMORY if settings is None else settings, **given
        )
        self.jobs = 0

    def keys(self, count: int) -> list[OffloadKey]:
        from vllm.v1.kv_offload.base import make_offload_key

        return [make_offload_key(secrets.token_bytes(32), 0) for _ in range(count)]

    def run(self, keys: list[OffloadKey], rows: list[int], *, load: bool) -> Any:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(rows, dtype=np.int32), load, ReqContext("r"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def lookup(self, key: OffloadKey) -> str:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        until = time.monotonic() + LIMIT_S
        while (said := self.tier.lookup(key, ReqContext("r"))) is LookupResult.RETRY and time.monotonic() < until:
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.002)
        return str(said.name)

    def close(self) -> None:
        self.tier.shutdown()
        self.rows = np.empty((0, 0), dtype=np.uint8)
        self.view.release()
        self.map.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(enable_kv_events=True)
    yield made
    made.close()


@pytest.fixture
def with_faults(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTier]:
    """Every tier that is made from here on can be told to fail."""
    from kvtransfer import tier_build
    from kvtransfer.tiers.registry import make_tier as inner

    made: list[FaultyTier] = []

    def wrapped(kind: str, **settings: Any) -> Tier:
        made.append(FaultyTier(inner(kind, **settings)))
        return made[-1]

    monkeypatch.setattr(tier_build, "make_tier", wrapped)
    return made


def test_chunks_come_back_byte_for_byte(rig: Rig) -> None:
    before, names = rig.rows.copy(), rig.keys(3)
    stored = rig.run(names, [1, 3, 5], load=False)
    assert stored.success and stored.transfer_bytes == 3 * CHUNK and stored.transfer_time is not None
    assert [rig.lookup(key) for key in (*names, *rig.keys(1))] == ["HIT", "HIT", "HIT", "MISS"]
    rig.rows[:] = 0x5A
    loaded = rig.run(names, [8, 0, 2], load=True)
    assert loaded.success and (rig.rows[[8, 0, 2]] == before[[1, 3, 5]]).all()
    assert (rig.rows[[1, 3, 4, 5, 6, 7]] == 0x5A).all()


def test_a_failed_page_leaves_the_others(with_faults: list[FaultyTier]) -> None:
    rig = Rig()
    names = rig.keys(3)
    rig.run(names, [0, 1, 2], load=False)
    with_faults[0].add(Fault("error", verb="get", call=0, pages=[1]))
    result = rig.run(names, [3, 4, 5], load=True)
    assert not result.success and list(result.successful_keys) == [names[0], names[2]]
    assert result.transfer_bytes == 2 * CHUNK
    assert [rig.lookup(key) for key in names] == ["HIT", "HIT", "HIT"]  # asked anew: nobody had asked before
    with_faults[0].add(Fault("wrong_bytes", verb="get", call=1, pages=[0]))
    assert list(rig.run(names, [3, 4, 5], load=True).successful_keys) == names[1:]
    assert [rig.lookup(key) for key in names] == ["MISS", "HIT", "HIT"]
    rig.close()


def test_a_store_that_fails_is_told_and_no_event_is_made_of_it(with_faults: list[FaultyTier]) -> None:
    rig = Rig(enable_kv_events=True)
    with_faults[0].add(Fault("error", verb="put", call=0, pages=[0]))
    names = rig.keys(2)
    result = rig.run(names, [0, 1], load=False)
    assert not result.success and result.successful_keys is None
    (event,) = rig.tier.take_events()
    assert event.keys == names[1:] and not event.removed
    rig.close()


def test_events_and_counts(rig: Rig) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium

    from kvtransfer.integrations.vllm_tier import PAGES, KVTransferTier

    names = rig.keys(2)
    rig.run(names, [0, 1], load=False)
    rig.run([*names, *rig.keys(1)], [0, 1, 2], load=True)
    (event,) = rig.tier.take_events()
    assert event.keys == names and event.medium is Medium.STORAGE and event.locality is Locality.LOCAL
    assert list(rig.tier.take_events()) == []
    stats = rig.tier.get_stats()
    assert stats is not None and not stats.is_empty()
    kind = "KVTransferTier"
    assert _counts(stats, PAGES) == {(kind, "store", "ok"): 2, (kind, "load", "ok"): 2, (kind, "load", "miss"): 1}
    assert rig.tier.get_stats() is None
    (metric,) = KVTransferTier.build_metric_definitions({}).values()
    assert len(metric.labelnames) == 3


def _counts(stats: Any, name: str) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = stats.data[name]
    return counts


def test_no_events_unless_asked_for() -> None:
    rig = Rig()
    rig.run(rig.keys(1), [0], load=False)
    assert list(rig.tier.take_events()) == []
    rig.close()


def test_a_disk_of_its_own_for_each_replica(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.config import OffloadingParallelConfig

    from kvtransfer.integrations.vllm_tier import KVTransferTier

    settings = {"tiers": {"disk": {"paths": [str(tmp_path)], "cache_gb": 0.05, "disk_share": 1.0}}}
    rig = Rig(settings=settings, tier="disk")
    second = offloading_spec(parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 1, 2, None, True))
    other = KVTransferTier(second, rig.view, "KVTransferTier", tier="disk", settings=settings)
    with pytest.raises(Exception, match="no other process owns"):
        KVTransferTier(second, rig.view, "KVTransferTier", tier="disk", settings=settings)
    other.shutdown()
    before, names = rig.rows.copy(), rig.keys(2)
    assert rig.run(names, [0, 1], load=False).success
    rig.close()
    again = Rig(settings=settings, tier="disk")
    assert again.run(names, [4, 5], load=True).success and (again.rows[4:6] == before[:2]).all()
    again.close()


def test_what_must_not_be_mixed_up_is_in_the_namespace() -> None:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    from kvtransfer.integrations.chunks import namespace_digest
    from kvtransfer.integrations.vllm_tier import content_facts

    def digest(**changes: Any) -> bytes:
        return namespace_digest(content_facts(offloading_spec(**changes), CHUNK, None))

    two = OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False)
    seen = [
        digest(),
        digest(model=OffloadingModelConfig("org/other", "bfloat16")),
        digest(model=OffloadingModelConfig("org/model", "fp8")),
        digest(groups=(OffloadingGroupConfig(32, ("l0", "l1"), 0),)),
        digest(groups=(OffloadingGroupConfig(16, ("l1", "l0"), 0),)),
        digest(cache=OffloadingCacheConfig(16, 2)),
        digest(kv_cache_layout="LBNHC"),
        digest(parallel=two),
        namespace_digest(content_facts(offloading_spec(), CHUNK, "a fingerprint")),
        namespace_digest(content_facts(offloading_spec(), 2 * CHUNK, None)),
    ]
    assert len(set(seen)) == len(seen)
    agnostic = OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, True)
    assert digest(parallel=agnostic) == digest()


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one of the configured tiers below the host \(memory\), got 'x'"):
        Rig(tier="x")
    with pytest.raises(ConfigError, match="expected one of the configured tiers"):
        Rig(tier="host")
    with pytest.raises(ConfigError, match="lookup_s: expected seconds above 0, got 0"):
        Rig(lookup_s=0)
    with pytest.raises(ValueError, match="MARS"):
        Rig(locality="MARS")
