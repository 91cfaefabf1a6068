"""The engine moves bytes exactly, by every path of the CPU, and refuses bad input before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    RING_BYTES,
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
from kvtransfer.kernels.errors import ConfigError, KVTransferError, LayoutError, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier

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
    assert WIDE.layer_bytes(0) > RING_BYTES // 3
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
    assert 24 * spec.layer_bytes(0) // 48 < RING_BYTES // 3, "24 tokens would fit, and end within a block"
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


# -- bad input -------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[Any, type[KVTransferError], str]]:
    """What is called on a rig of 16 pages and 16 slots, what it raises, and the message."""
    other_spec = KVSpec.attention(num_layers=2, page_size=3, kv_heads=2, head_dim=5, itemsize=1, v_head_dim=3)
    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    return {
        "page too high": (lambda r: r.engine.load([0], [16]), LayoutError, "pool page ids: expected 0 to 15, got 16"),
        "page negative": (lambda r: r.engine.store([1, -1], [0, 1]), LayoutError, "0 to 15, got -1 at position 1"),
        "slot too high": (
            lambda r: r.engine.load([3, 99], [0, 1]),
            LayoutError,
            "host slot ids: expected 0 to 15, got 99",
        ),
        "slot negative": (lambda r: r.engine.store([0], [-3]), LayoutError, "host slot ids: expected 0 to 15, got -3"),
        "page twice": (
            lambda r: r.engine.load([0, 1], [5, 5]),
            LayoutError,
            r"distinct ids, got 5 at positions [0, 1]",
        ),
        "slot twice": (
            lambda r: r.engine.store([0, 1], [7, 7]),
            LayoutError,
            r"distinct ids, got 7 at positions [0, 1]",
        ),
        "lengths, load": (
            lambda r: r.engine.load([0, 1], [0]),
            LayoutError,
            "load: expected as many slots as pages, got 2 and 1",
        ),
        "lengths, store": (
            lambda r: r.engine.store([0, 1], [0]),
            LayoutError,
            "store: expected as many slots as pages, got 1 and 2",
        ),
        "not integers": (
            lambda r: r.engine.load([0.5], [0]),
            LayoutError,
            "expected one axis of integers, got shape (1,) of float64",
        ),
        "two axes": (
            lambda r: r.engine.load([0], [[0]]),
            LayoutError,
            "expected one axis of integers, got shape (1, 1)",
        ),
        "text": (
            lambda r: r.engine.load("1", [0]),
            LayoutError,
            "expected integers, a numpy array or a tensor, got str",
        ),
        "None": (
            lambda r: r.engine.store(None, [0]),
            LayoutError,
            "expected integers, a numpy array or a tensor, got NoneType",
        ),
        "a flag": (lambda r: r.engine.store(True, [0]), LayoutError, "got bool"),
        "ids elsewhere": (
            lambda r: r.engine.load([0, 1], meta),
            LayoutError,
            "pool page ids: expected them on cpu, got meta",
        ),
        "slots elsewhere": (
            lambda r: r.engine.load(meta, [0, 1]),
            LayoutError,
            "expected CPU ids here, got a tensor on meta",
        ),
        "unknown path": (
            lambda r: r.engine.load([0], [0], path="tape"),
            ConfigError,
            "path: expected one of staged, strided",
        ),
        "no GPU": (
            lambda r: r.engine.store([0], [0], path="mapped"),
            ConfigError,
            "path 'mapped' can't carry this store: there is no GPU",
        ),
        "no ring": (lambda r: r.engine.load([0], [0], path="staged"), ConfigError, "there is no staging ring"),
        "deadline": (
            lambda r: r.engine.load([0], [0], deadline_s=-1),
            ConfigError,
            "deadline_s: expected more than 0, got -1",
        ),
        "no deadline": (
            lambda r: r.engine.store([0], [0], deadline_s=float("nan")),
            ConfigError,
            "expected more than 0, got nan",
        ),
        "copy deadline": (
            lambda r: r.engine.copy([0], r.pool, [1], deadline_s=0),
            ConfigError,
            "expected more than 0, got 0",
        ),
        "copy lengths": (
            lambda r: r.engine.copy([0, 1], r.pool, [2]),
            LayoutError,
            "as many pages on both sides, got 2 and 1",
        ),
        "copy onto itself": (
            lambda r: r.engine.copy([0, 1], r.pool, [1, 2]),
            LayoutError,
            "pages that are on one side only",
        ),
        "copy twice": (lambda r: r.engine.copy([0, 1], r.pool, [2, 2]), LayoutError, "distinct ids, got 2"),
        "copy too high": (lambda r: r.engine.copy([16], r.pool, [2]), LayoutError, "expected 0 to 15, got 16"),
        "copy spec": (
            lambda r: r.engine.copy([0], Guarded(r.rng, Layout.page_first(other_spec, 2)).pool, [0]),
            LayoutError,
            "expected both sides to hold the same spec, got page=3;3x[k:2x5,v:2x3] and page=3;2x[k:2x5,v:2x3]",
        ),
        "plan of what": (
            lambda r: r.engine.plan("copy", [0], [0]),
            ConfigError,
            "direction: expected 'load' or 'store', got 'copy'",
        ),
        "plan of bad ids": (lambda r: r.engine.plan("load", [0], [77]), LayoutError, "got 77"),
    }


@pytest.mark.parametrize("case", refusals())
def test_bad_calls_are_refused_and_nothing_is_touched(case: str) -> None:
    call, error, message = refusals()[case]
    log = Log()
    rig = make_rig(observer=log)
    before, slab, trailers = rig.side.snapshot(), rig.host.payload.clone(), rig.host.trailers.copy()
    with pytest.raises(error, match=re.escape(message)):
        call(rig)
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy() and not log.stages
    rig.engine.close()
    rig.side.expect(before, NONE, NO_ROWS)
    assert torch.equal(rig.host.payload, slab) and np.array_equal(rig.host.trailers, trailers)
    rig.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sm_budget": 0}, ConfigError, "sm_budget: expected at least 1 CTA, got 0"),
        ({"deadline_s": 0.0}, ConfigError, "deadline_s: expected more than 0, got 0.0"),
        ({"deadline_s": float("nan")}, ConfigError, "deadline_s: expected more than 0, got nan"),
        (
            {"path": "tape"},
            ConfigError,
            "path: expected 'auto' or one of staged, strided, mapped, device, cpu, got 'tape'",
        ),
        ({"path": "staged", "staging_bytes": 100}, ConfigError, "staging_bytes: expected at least 12288, got 100"),
        ({"staging_bytes": "meta"}, ConfigError, "staging_bytes: expected a ring on cpu, got meta"),
    ],
)
def test_bad_engines_are_refused(arguments: dict[str, Any], error: type[KVTransferError], message: str) -> None:
    if arguments.get("staging_bytes") == "meta":
        arguments = {"staging_bytes": StagingRing(torch.device("meta"), RING_BYTES)}
    side = Guarded(fresh(), Layout.page_first(TINY, 2))
    with make_host(fresh(), TINY, 2) as host, pytest.raises(error, match=re.escape(message)):
        TransferEngine(side.pool, host, **arguments)


def test_both_sides_must_hold_the_same_content() -> None:
    side = Guarded(fresh(), Layout.page_first(TINY, 2))
    fp8 = KVSpec.uniform(3, 3, [Component("k", 2, 5), Component("v", 2, 4)])
    with (
        make_host(fresh(), fp8, 2) as host,
        pytest.raises(LayoutError, match=r"got page=3;3x\[k:2x5,v:2x3\] and page=3;"),
    ):
        TransferEngine(side.pool, host)


def test_pools_elsewhere_are_refused() -> None:
    meta = KVPool(Layout.page_first(TINY, 2), [torch.zeros(2 * TINY.page_bytes, dtype=torch.uint8, device="meta")])
    with make_host(fresh(), TINY, 2) as host:
        with pytest.raises(ConfigError, match="pool: expected a CUDA or CPU device, got meta"):
            TransferEngine(meta, host)
        side = Guarded(fresh(), Layout.page_first(TINY, 2))
        with TransferEngine(side.pool, host) as engine, pytest.raises(LayoutError, match="a pool on cpu, got meta"):
            engine.copy([0], meta, [1])


def test_slots_that_are_not_ready_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(HostTier, "ready_slots", property(lambda self: 9))
    rig.engine.load([8], [0]).result(LIMIT_S)
    calls: list[Callable[[], object]] = [lambda: rig.engine.load([2, 9], [0, 1]), lambda: rig.engine.store([0], [15])]
    for call in calls:
        with pytest.raises(LayoutError, match="host slot ids: expected slots that are ready, 0 to 8"):
            call()
    monkeypatch.undo()
    rig.close()


def test_a_closed_engine_takes_nothing() -> None:
    rig = make_rig()
    rig.engine.close()
    before = rig.side.snapshot()
    calls: list[Callable[[], object]] = [
        lambda: rig.engine.load([0], [0]),
        lambda: rig.engine.load([0], [0], layerwise=True),
        lambda: rig.engine.store([0], [0]),
        lambda: rig.engine.store([0], [0], layerwise=True),
        lambda: rig.engine.load([], []),
        lambda: rig.engine.copy([0], rig.pool, [1]),
    ]
    for call in calls:
        with pytest.raises(TransferError, match="the engine is closed"):
            call()
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.side.expect(before, NONE, NO_ROWS)
    rig.close()


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
