"""Jobs of staged transfers on a GPU of ours that does in random order whatever may overlap: exact bytes, right ends."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    DEEP,
    EVEN,
    HYBRID,
    LATENT,
    LIMIT_S,
    TINY,
    TOKEN,
    WIDE,
    started,
    until,
    write_all_layers,
)
from fake_gpu import scripted_rig

from kvtransfer.handles import PageState
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import CudaError, DeadlineExceeded, TransferCancelled, TransferError
from kvtransfer.staging import SLOT_ALIGNMENT, StagingRing

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "submitter"  # built once for all tests


def ring_of(slots: int, slot_bytes: int = SLOT_ALIGNMENT) -> StagingRing:
    return StagingRing(CPU, slots * slot_bytes, slots)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("slots", [2, 3, 12])
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("sglang.layer_first", TINY),
        ("page_first", EVEN),
        ("vllm.BLHNC", DEEP),
        ("vllm.LBNHC", WIDE),
        ("page_first", HYBRID),
        ("page_first", LATENT),
    ],
)
def test_loads_and_stores_are_exact_with_digests(
    layout: str, spec: Any, slots: int, layerwise: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    rig, gpu = scripted_rig(
        monkeypatch, folder, layout, spec, ring_of(slots), seed=seed, pages=96, slots=96
    )
    rng = rig.rng
    for _ in range(6):
        n = int(rng.integers(1, 40))
        pages = rng.permutation(96)
        into = rng.permutation(96) if rng.random() < 0.5 else (np.arange(96) + int(rng.integers(96))) % 96
        before, rows = rig.side.snapshot(), rig.side.pages(pages[:n])
        store = rig.engine.store(pages[:n], into[:n])
        load = rig.engine.load(into[:n], pages[n : 2 * n], layerwise=layerwise)
        assert load.verdict(LIMIT_S).verified, seed
        store.result(LIMIT_S)
        assert np.array_equal(rig.slots(into[:n]), rows), seed
        assert np.array_equal(rig.host.digests[into[:n]], page_digests(rows, spec)), seed
        rig.side.expect(before, pages[n : 2 * n], rows)
        assert (load.states() == PageState.DONE).all() and (store.states() == PageState.DONE).all()
    rig.close()
    gpu.close()


def test_a_layer_can_be_stored_while_jobs_hold_the_ring(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is submitted call by call needs one slot under the engine's lock, and so does who gives slots back."""
    rig, gpu = scripted_rig(
        monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(4), seed=1, pages=128, slots=128, verify=False
    )
    store = rig.engine.store(range(100, 104), range(100, 104), layerwise=True)
    rows = rig.side.pages(range(100, 104))
    gpu.held |= {rig.engine._shop.lanes.streams[lane].cuda_stream for lane in ("scatter", "copy_out")}
    jobs = [rig.engine.load(range(50), range(50)), rig.engine.store(range(50, 99), range(50, 99))]
    until(lambda: all(h.chunks_submitted == 8 or h.poll() for h in jobs))  # paced: they keep what they hold
    writer = started(lambda: write_all_layers(store))
    time.sleep(0.05)
    gpu.held.clear()
    writer.join(LIMIT_S)
    assert not writer.is_alive(), "stuck for a slot, with the lock that its holder needs"
    for handle in (*jobs, store):
        handle.result(LIMIT_S)
    assert np.array_equal(rig.slots(range(100, 104)), rows)
    rig.close()
    gpu.close()


def test_a_job_stops_at_the_deadline_also_where_a_waiter_saw_it_first(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    rig, gpu = scripted_rig(monkeypatch, folder, "sglang.layer_first", WIDE, ring_of(6), seed=1, pages=64, slots=64)
    scatter = rig.engine._shop.lanes.streams["scatter"].cuda_stream
    gpu.held.add(scatter)
    late = rig.engine.load(range(60), range(60))
    until(lambda: late.poll() or late.chunks_submitted == 8)
    late.fail(DeadlineExceeded("what a waiter says to it"))
    until(lambda: late.fully_submitted, "the end of the job")
    gpu.held.clear()
    until(late.done)
    assert late.chunks_submitted == 8 and len(late.plan.chunks) > 8
    rig.close()
    gpu.close()
