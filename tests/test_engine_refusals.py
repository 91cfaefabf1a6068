"""Bad input is refused before anything is touched, with a message that says what was expected and what was got."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    LIMIT_S,
    TINY,
    Guarded,
    Log,
    fresh,
    make_host,
    make_rig,
)

from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import ConfigError, KVTransferError, LayoutError, OwnershipError, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.staging import StagingRing
from kvtransfer.tiers.host import HostTier

NONE = np.empty(0, dtype=np.int64)
NO_ROWS = np.empty((0, TINY.page_bytes), dtype=np.uint8)


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
            "path: expected 'auto' or one of staged, strided, mapped, cpu, got 'tape'",
        ),
        ({"path": "staged", "staging_bytes": 100}, ConfigError, "staging_bytes: expected at least 49152, got 100"),
        ({"staging_bytes": "meta"}, ConfigError, "staging_bytes: expected a ring on cpu, got meta"),
    ],
)
def test_bad_engines_are_refused(arguments: dict[str, Any], error: type[KVTransferError], message: str) -> None:
    if arguments.get("staging_bytes") == "meta":
        arguments = {"staging_bytes": StagingRing(torch.device("meta"), 1 << 20)}
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


def test_slots_that_were_given_back_are_refused() -> None:
    """Who gives slots out by `allocate` is held to it: a stale id must not land on the next owner's page."""
    with make_host(fresh(), TINY, 8) as host:
        side = Guarded(fresh(), Layout.page_first(TINY, 4), name="stale")
        engine = TransferEngine(side.pool, host)
        slots = host.allocate(4)
        host.free(slots[:2])
        before = host.payload.clone()
        calls: list[Callable[[], object]] = [
            lambda: engine.store([0, 1], slots[1:3]),
            lambda: engine.load(slots[:2], [0, 1]),
        ]
        for call in calls:
            with pytest.raises(OwnershipError, match=r"given out, got \["):
                call()
        assert torch.equal(before, host.payload)
        engine.store([0, 1], slots[2:]).result(20)
        engine.close()


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_deadlines_longer_than_a_thread_can_wait_are_refused(seconds: float) -> None:
    rig = make_rig()
    with pytest.raises(ConfigError, match="expected at most"):
        rig.engine.load([0], [0], deadline_s=seconds)
    rig.close()
