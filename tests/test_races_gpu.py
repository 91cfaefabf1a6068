"""The two races that movers of KV lose, 200 rounds each, and proof that the fence is what wins them.

Entry 1: a store must read after the kernels that write the pages. Entry 2: a load must write after the work
that still reads (or blanks) them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu_helpers import Rig, make_rig, spin

from kvtransfer.kernels.spec import KVSpec

pytestmark = pytest.mark.gpu

ROUNDS = 200
SPEC = KVSpec.attention(4, 16, 8, 128, 2)
PAGES = np.arange(20, 36)
SLOTS = np.arange(40, 56)


def without_fences(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.engine, "_fences", lambda pool, ids=None: ([], ids))


def wrong_rounds(rounds: int, one: Callable[[int], bool]) -> int:
    return sum(not one(r) for r in range(rounds))


def store_race(rig: Rig, stream: torch.cuda.Stream, path: str, submit: list[float]) -> Callable[[int], bool]:
    views = [rig.pool.view(layer, c, torch.uint8) for layer in range(SPEC.num_layers) for c in (0, 1)]
    ids = torch.from_numpy(PAGES).cuda()

    def one(r: int) -> bool:
        value = (r * 37 + 11) % 251
        spin(stream, 5)
        with torch.cuda.stream(stream):
            for view in views:
                view.index_fill_(0, ids, value)
        started = time.perf_counter()
        handle = rig.engine.store(PAGES, SLOTS, path=path)
        submit.append(time.perf_counter() - started)
        handle.result(20)
        return bool((rig.slots(SLOTS) == value).all())

    return one


def load_race(rig: Rig, stream: torch.cuda.Stream, path: str, layerwise: bool) -> Callable[[int], bool]:
    views = [rig.pool.view(layer, c, torch.int64) for layer in range(SPEC.num_layers) for c in (0, 1)]
    ids = torch.from_numpy(PAGES).cuda()

    def one(r: int) -> bool:
        new = rig.fill_slots(SLOTS)
        with torch.cuda.stream(stream):
            for view in views:
                view[ids] = r + 1
        stream.synchronize()
        spin(stream, 5)
        with torch.cuda.stream(stream):
            total = torch.stack([view[ids].sum() for view in views])
            for view in views:
                view.index_fill_(0, ids, 0)
        load = rig.engine.load(SLOTS, PAGES, path=path, layerwise=layerwise)
        load.wait_all(stream)
        with torch.cuda.stream(stream):
            got = rig.page_first(PAGES)
        load.result(20)
        want_sum = [(r + 1) * int(view[ids].numel()) for view in views]
        return bool(total.tolist() == want_sum) and torch.equal(got, new)

    return one


@pytest.mark.parametrize("path", ["staged", "mapped", "strided"])
def test_a_store_waits_for_the_writer(path: str) -> None:
    stream = torch.cuda.Stream()
    submit: list[float] = []
    rig = make_rig("sglang.layer_first", SPEC, pages=64, slots=64, streams=[stream])
    try:
        assert wrong_rounds(ROUNDS, store_race(rig, stream, path, submit)) == 0
        assert float(np.median(submit)) < 1e-3, f"store() returned after {np.median(submit) * 1e3:.2f} ms"
    finally:
        rig.close()


def test_without_its_fence_a_store_reads_old_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPEC, pages=64, slots=64, streams=[stream])
    try:
        without_fences(rig, monkeypatch)
        assert wrong_rounds(10, store_race(rig, stream, "staged", [])) > 0
    finally:
        torch.cuda.synchronize()
        rig.close()


@pytest.mark.parametrize("path", ["staged", "mapped", "strided"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_waits_for_the_readers(path: str, layerwise: bool) -> None:
    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPEC, pages=64, slots=64, streams=[stream])
    try:
        assert wrong_rounds(ROUNDS, load_race(rig, stream, path, layerwise)) == 0
    finally:
        rig.close()


def test_without_its_fence_a_load_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPEC, pages=64, slots=64, streams=[stream])
    try:
        without_fences(rig, monkeypatch)
        assert wrong_rounds(10, load_race(rig, stream, "staged", True)) > 0
    finally:
        torch.cuda.synchronize()
        rig.close()
