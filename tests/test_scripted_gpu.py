"""Staged layer-wise loads handed over as scripts: exact bytes, layers in time, cancel, ring shared with stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_helpers import make_rig, shuffled, spin

from kvtransfer.handles import PageState
from kvtransfer.kernels.errors import TransferCancelled
from kvtransfer.kernels.spec import KVSpec

pytestmark = pytest.mark.gpu

SPEC = KVSpec.attention(9, 16, 8, 128, 2)


@pytest.mark.parametrize("layout", ["sglang.layer_first", "vllm.BHLNC", "page_first"])
def test_layers_arrive_in_time_and_exact(layout: str) -> None:
    reader, late = torch.cuda.Stream(), torch.cuda.Stream()
    rig = make_rig(layout, SPEC, pages=120, slots=100, streams=[reader, late], path="staged", script=True)
    try:
        for seed in range(6):
            pages, slots = shuffled(77, 120, seed), shuffled(77, 100, seed + 50)
            new = rig.fill_slots(slots)
            spin(late, 10)
            load = rig.engine.load(slots, pages, layerwise=True)
            for layer in range(SPEC.num_layers):
                load.wait_layer(layer, reader)
            with torch.cuda.stream(reader):
                got = rig.page_first(pages)
            assert torch.equal(got, new)
            assert load.verdict(20).ok and (load.states() == PageState.DONE).all()
    finally:
        rig.close()


def test_stores_and_loads_share_the_ring() -> None:
    rig = make_rig("sglang.layer_first", SPEC, pages=200, slots=200, path="staged", script=True, staging_bytes=3 << 20)
    try:
        for seed in range(5):
            new = rig.fill_slots(np.arange(60))
            want = rig.page_first(np.arange(100, 160))
            load = rig.engine.load(np.arange(60), np.arange(60), layerwise=True)
            store = rig.engine.store(np.arange(100, 160), np.arange(100, 160))
            load.result(20)
            store.result(20)
            assert torch.equal(rig.page_first(np.arange(60)), new), seed
            assert torch.equal(rig.slots(np.arange(100, 160)), want), seed
    finally:
        rig.close()


def test_cancel_between_chunks_leaves_exact_states() -> None:
    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPEC, pages=64, slots=64, streams=[stream], path="staged", script=True)
    try:
        new, old = rig.fill_slots(np.arange(64)), rig.page_first(np.arange(64))
        spin(stream, 100)
        load = rig.engine.load(np.arange(64), np.arange(64), layerwise=True)
        if load.cancel():
            with pytest.raises(TransferCancelled):
                load.result(20)
        else:
            load.result(20)
        got = rig.page_first(np.arange(64))
        for i, state in enumerate(load.states().tolist()):
            if state != PageState.INVALID:
                assert torch.equal(got[i], new[i] if state == PageState.DONE else old[i])
        rig.engine.load(np.arange(64), np.arange(64), layerwise=True).result(20)
        assert torch.equal(rig.page_first(np.arange(64)), new)
    finally:
        rig.close()
