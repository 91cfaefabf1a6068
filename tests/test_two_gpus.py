"""A pool, ring and kernels on cuda:1 while the current device is cuda:0, from the main and from a new thread."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_helpers import Rig, make_rig, shuffled

from kvtransfer.kernels.spec import KVSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SPECS = {"page-16": KVSpec.attention(6, 16, 8, 128, 2), "page-1": KVSpec.attention(6, 1, 8, 128, 2)}


def exchange(rig: Rig, seed: int, failures: list[str]) -> None:
    for path in (None, "staged", "mapped", "strided"):
        for layerwise in (False, True):
            pages, slots, into = (shuffled(40, 96, seed + i) for i in range(3))
            want = rig.page_first(pages)
            rig.engine.store(pages, slots, path=path).result(30)
            load = rig.engine.load(slots, into, path=path, layerwise=layerwise)
            for layer in range(rig.pool.spec.num_layers):
                load.wait_layer(layer)
            if not torch.equal(rig.page_first(into), want) or not load.verdict(30).ok:
                failures.append(f"{rig.pool.device} {path} layerwise={layerwise}")
            if torch.cuda.current_device() != 0:
                failures.append("the current device was changed")
            seed += 3


@pytest.mark.parametrize("name", SPECS)
def test_the_second_gpu_from_both_threads(name: str) -> None:
    torch.cuda.set_device(0)
    rigs = [make_rig("sglang.layer_first", SPECS[name], pages=96, slots=96, device=f"cuda:{i}") for i in (1, 0)]
    failures: list[str] = []
    try:
        exchange(rigs[0], 1, failures)
        threads = [threading.Thread(target=exchange, args=(rig, 50 * i, failures)) for i, rig in enumerate(rigs)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not failures
    finally:
        for rig in rigs:
            rig.close()
