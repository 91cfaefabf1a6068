"""The engine moves bytes exactly, by every path of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    DEEP,
    EVEN,
    GUARD,
    HYBRID,
    LATENT,
    LIMIT_S,
    TINY,
    TOKEN,
    WIDE,
    Guarded,
    Ids,
    Log,
    Rig,
    fresh,
    make_host,
    make_rig,
    random_bytes,
    staged,
    write_all_layers,
)

from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.coalesce import Box
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.staging import SLOT_ALIGNMENT

LAYOUTS = [
    ("page_first", TINY),
    ("page_first", HYBRID),
    ("sglang.layer_first", TINY),
    ("sglang.layer_first", HYBRID),
    ("sglang.layer_first", TOKEN),
    ("sglang.layer_first_host", EVEN),
    ("sglang.page_first", TINY),
    ("sglang.page_first_direct", EVEN),
    ("sglang.page_head", EVEN),
    ("sglang.page_unified", EVEN),
    ("vllm.LBNHC", TINY),
    ("vllm.LBHNC", EVEN),
    ("vllm.LHBNC", TINY),
    ("vllm.BLNHC", TOKEN),
    ("vllm.BLHNC", EVEN),
    ("vllm.BHLNC", EVEN),
    ("vllm.MLA", LATENT),
    ("transformers", TINY),
    ("transformers", DEEP),
    ("sglang.layer_first", WIDE),
]
NONE = np.empty(0, dtype=np.int64)
NO_ROWS = np.empty((0, TINY.page_bytes), dtype=np.uint8)
PATHS = {"cpu": {"path": "cpu"}, "staged": staged(), "auto": {}}


def chosen(rng: np.random.Generator, count: int, limit: int, order: str) -> Ids:
    if order == "random":
        return rng.permutation(limit)[:count].astype(np.int64)
    start = int(rng.integers(0, limit - count + 1))
    return np.arange(start, start + count)


def check_store(rig: Rig, pages: Ids, slots: Ids, *, layerwise: bool) -> None:
    """Store, then compare the slab (padding too), the pool (unchanged) and the digests with the naive model."""
    before, payload = rig.side.snapshot(), rig.host.payload.numpy().copy()
    trailers = rig.host.trailers.copy()
    want = rig.side.pages(pages)
    handle = rig.engine.store(pages, slots, layerwise=layerwise)
    if layerwise:
        write_all_layers(handle)
    result = handle.result(LIMIT_S)
    assert (result.pages, result.total_bytes) == (pages.size, want.size) and result.path == handle.plan.path
    rows = payload.reshape(-1, rig.host.slot_bytes)
    rows[slots, : rig.spec.page_bytes] = want
    assert np.array_equal(rig.host.payload.numpy(), payload), "the slab is not what it was, with the slots replaced"
    rig.side.expect(before, NONE, random_bytes(rig.rng, 0, rig.spec.page_bytes))
    assert np.array_equal(rig.host.digests[slots], page_digests(want, rig.spec))
    others = np.setdiff1d(np.arange(rig.host.num_slots), slots)
    assert np.array_equal(rig.host.trailers[others], trailers[others])
    assert handle.verdict(LIMIT_S).ok and handle.pages_done().all()


def check_load(rig: Rig, slots: Ids, pages: Ids, *, layerwise: bool) -> None:
    """Load, then compare the pool (margins and other pages too) and the slab (unchanged) with the naive model."""
    before, payload = rig.side.snapshot(), rig.host.payload.numpy().copy()
    want = rig.slots(slots)
    handle = rig.engine.load(slots, pages, layerwise=layerwise)
    if layerwise:
        for layer in range(rig.spec.num_layers):
            handle.wait_layer(layer)
    assert handle.result(LIMIT_S).pages == pages.size
    rig.side.expect(before, pages, want)
    assert np.array_equal(rig.host.payload.numpy(), payload)
    assert handle.verdict(LIMIT_S).ok and handle.pages_done().all()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "spec"), LAYOUTS)
def test_pages_go_out_and_come_back_byte_for_byte(name: str, spec: KVSpec, path: str, layerwise: bool) -> None:
    rng = fresh()
    rig = make_rig(name, spec, pages=13, slots=11, rng=rng, **PATHS[path])
    order = "random" if rng.integers(2) else "neighbours"
    pages, slots = chosen(rng, 7, 13, order), chosen(rng, 7, 11, order)
    check_store(rig, pages, slots, layerwise=layerwise)
    check_load(rig, slots, chosen(rng, 7, 13, order), layerwise=layerwise)
    check_load(rig, slots[:1], chosen(rng, 1, 13, order), layerwise=layerwise)
    rig.close()


@pytest.mark.parametrize("path", ["cpu", "staged"])
def test_many_pages_go_through_few_slots_of_a_ring(path: str) -> None:
    rig = make_rig("vllm.BLNHC", EVEN, pages=301, slots=301, **PATHS[path])
    check_store(rig, rig.rng.permutation(301), rig.rng.permutation(301), layerwise=False)
    check_load(rig, rig.rng.permutation(301), rig.rng.permutation(301), layerwise=True)
    rig.close()


@pytest.mark.parametrize("layerwise", [False, True])
def test_pages_larger_than_a_ring_slot_are_cut_by_layer_then_by_token(layerwise: bool) -> None:
    log = Log()
    rig = make_rig("sglang.layer_first", WIDE, **staged(), observer=log)
    assert WIDE.layer_bytes(0) > SLOT_ALIGNMENT
    plan = rig.engine.plan("load", range(3), range(3), layerwise=layerwise)
    boxes = {c.box for c in plan.chunks}
    assert boxes == {Box(i, i + 1, t, min(t + 8, 20)) for i in range(2) for t in (0, 8, 16)}
    check_store(rig, np.array([5, 1, 9]), np.array([0, 7, 3]), layerwise=layerwise)
    check_load(rig, np.array([0, 7, 3]), np.array([2, 8, 4]), layerwise=layerwise)
    rig.close()


def test_pages_made_of_kernel_blocks_are_cut_within_a_block() -> None:
    """Manager pages of 48 tokens in blocks of 16: cuts that cross a block have no byte strides."""
    spec = KVSpec.attention(num_layers=2, page_size=48, kv_heads=2, head_dim=40, itemsize=1)
    rng = fresh()
    tensors = [torch.from_numpy(random_bytes(rng, 6 * 3, 2, 16, 80)) for _ in range(2)]
    layout = Layout.from_tensors(spec, tensors, "(page token) head token dim")
    side = Guarded(rng, layout)
    host = make_host(rng, spec, 6)
    rig = Rig(rng, side, host, TransferEngine(side.pool, host, **staged()), Delays())
    assert 24 * spec.layer_bytes(0) // 48 < SLOT_ALIGNMENT, "24 tokens would fit, and end within a block"
    check_store(rig, np.array([5, 0, 3]), np.array([1, 2, 4]), layerwise=False)
    check_load(rig, np.array([1, 2, 4]), np.array([0, 5, 2]), layerwise=True)
    rig.close()


def test_a_ring_that_can_not_hold_eight_tokens_is_refused_with_numbers() -> None:
    spec = KVSpec.mla(1, 16, 1152)
    rig = make_rig("vllm.MLA", spec, pages=4, slots=4, **staged())
    for verb in (rig.engine.load, rig.engine.store):
        with pytest.raises(ConfigError, match=r"ring slot of 4,096 bytes is too small for 8 tokens .*9,216 bytes"):
            verb([0], [0])
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()


def test_one_slot_may_fill_several_pages_and_one_page_several_slots() -> None:
    rig = make_rig("sglang.page_first", TINY)
    rows = rig.fill_slots([3])
    rig.engine.load([3, 3, 3], [7, 0, 2]).result(LIMIT_S)
    assert np.array_equal(rig.side.pages([7, 0, 2]), np.repeat(rows, 3, axis=0))
    rig.engine.store([7, 7], [9, 10]).result(LIMIT_S)
    assert np.array_equal(rig.slots([9, 10]), np.repeat(rows, 2, axis=0))
    rig.close()


@pytest.mark.parametrize("ids", [list, tuple, np.asarray, torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32)])
def test_ids_come_in_many_kinds(ids: Any) -> None:
    rig = make_rig("page_first", TOKEN)
    rows = rig.fill_slots([4, 5])
    rig.engine.load(ids([4, 5]), ids([1, 0])).result(LIMIT_S)
    assert np.array_equal(rig.side.pages([1, 0]), rows)
    rig.engine.load(np.int64(4), 9).result(LIMIT_S)
    assert np.array_equal(rig.side.pages([9]), rows[:1])
    rig.close()


def test_the_callers_ids_may_change_after_the_call() -> None:
    rig = make_rig()
    rows = rig.fill_slots([4, 5])
    slots, pages = np.array([4, 5]), torch.tensor([6, 7])
    gate = rig.delays.gate("copy_in")
    handle = rig.engine.load(slots, pages)
    slots[:], pages[:] = 0, 1
    gate.set()
    handle.result(LIMIT_S)
    assert np.array_equal(rig.side.pages([6, 7]), rows)
    rig.close()


def test_no_pages_are_a_transfer_that_has_ended() -> None:
    log = Log()
    with FifoStream("compute") as compute:
        rig = make_rig(streams=[compute], observer=log)
        before = rig.side.snapshot()
        seen: list[TransferHandle] = []
        store = rig.engine.store([], [], layerwise=True)
        for handle in (rig.engine.load([], []), rig.engine.load((), np.empty(0), layerwise=True), store):
            assert handle.done() and handle.result(0).total_bytes == 0 and handle.result(0).gbps == 0
            assert handle.verdict(0).ok and handle.states().size == 0 and not handle.cancel()
            handle.add_done_callback(seen.append)
            handle.wait_layer(2)
            handle.wait_all(compute)
        assert len(seen) == 3
        write_all_layers(store)
        other = Guarded(rig.rng, Layout.named("vllm.BLHNC", TINY, 3))
        assert rig.engine.copy([], other.pool, []).verdict(0).ok
        rig.side.expect(before, NONE, NO_ROWS)
        rig.close()


def test_without_digests_nothing_is_verified_and_old_ones_are_wiped() -> None:
    rig = make_rig(verify=False)
    rig.fill_slots([1, 2])
    assert rig.host.digests[[1, 2]].all(axis=1).all()
    handle = rig.engine.store([3], [1])
    assert handle.verdict(LIMIT_S).unverified_pages == (0,)
    assert not rig.host.digests[1].any() and rig.host.digests[2].any()
    verdict = rig.engine.load([2, 1], [5, 6]).verdict(LIMIT_S)
    assert verdict.ok and verdict.unverified_pages == (0, 1)
    rig.close()


# -- device copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "spec"),
    [
        ("sglang.layer_first", "page_first", TINY),
        ("vllm.LBNHC", "sglang.page_head", EVEN),
        ("sglang.layer_first", "transformers", HYBRID),
        ("vllm.MLA", "page_first", LATENT),
        ("page_first", "page_first", HYBRID),
    ],
)
def test_pages_are_copied_between_pools_of_different_layouts(source: str, target: str, spec: KVSpec) -> None:
    rig = make_rig(source, spec, pages=9)
    other = Guarded(rig.rng, Layout.named(target, spec, 6), name="other")
    before, mine = other.snapshot(), rig.side.snapshot()
    pages, into = rig.rng.permutation(9)[:5].astype(np.int64), rig.rng.permutation(6)[:5].astype(np.int64)
    handle = rig.engine.copy(pages, other.pool, into)
    assert handle.result(LIMIT_S).path == "device" and handle.plan.direction == "copy"
    want = rig.side.pages(pages)
    other.expect(before, into, want)
    rig.side.expect(mine, pages, want)
    assert handle.verdict(0).unverified_pages == tuple(range(5))
    assert not rig.pool.ledger.any_busy() and not other.pool.ledger.any_busy()
    rig.close()


def test_pages_are_copied_within_a_pool() -> None:
    rig = make_rig("vllm.LHBNC", TINY)
    before, want = rig.side.snapshot(), rig.side.pages([3, 3, 5])
    rig.engine.copy([3, 3, 5], rig.pool, [0, 8, 2]).result(LIMIT_S)
    rig.side.expect(before, np.array([0, 8, 2]), want)
    rig.close()


# -- seen from outside -------------------------------------------------------------------------------


def test_plans_explain_themselves() -> None:
    rig = make_rig("sglang.layer_first", TINY)
    plan = rig.engine.plan("load", [1, 2, 3], [4, 5, 6])
    assert plan.path == "cpu" and plan.pages == 3 and plan.total_bytes == 3 * TINY.page_bytes
    assert plan.explain().splitlines()[0] == (
        f"load: 3 pages, {3 * TINY.page_bytes} bytes by path cpu: the pool is in host memory"
    )
    assert not rig.pool.ledger.any_busy(), "a plan claims nothing"
    assert rig.engine.plan("store", [1], [4], layerwise=True).layerwise
    assert rig.engine.load([0], [0], path="auto").plan.path == "cpu"
    rig.close()
    rig = make_rig(**staged())
    assert rig.engine.plan("load", [1], [4]).path == "staged"
    assert rig.engine.load([1], [4], path="auto").result(LIMIT_S).path == "cpu"  # the call may ask for the choice again
    rig.close()


def test_the_observer_is_told_of_every_stage() -> None:
    log = Log()
    rig = make_rig(**staged(), observer=log)
    rig.engine.store([0, 1], [3, 4]).result(LIMIT_S)
    rig.engine.load([3], [5], layerwise=True).result(LIMIT_S)
    assert log.plans == [("store", "staged"), ("load", "staged")]
    assert [s[1:] for s in log.stages[:2]] == [("copy", (0, 3), 2), ("gather", (0, 3), 2)]
    assert {s[1] for s in log.stages[2:]} == {"copy", "scatter"} and len(log.stages) == 2 + 2 * 3
    assert [ok for _, ok in log.ended] == [True, True]
    rig.close()


def test_margins_are_real() -> None:
    """The guard bytes of these tests do catch a write that is off by one."""
    side = Guarded(fresh(), Layout.page_first(TINY, 2))
    before = side.snapshot()
    side.whole[0][GUARD - 1] ^= 1
    with pytest.raises(AssertionError, match="1 bytes differ, the first at -1"):
        side.expect(before, NONE, NO_ROWS)
