"""Layer-wise stores: nothing of a layer leaves before it is written, in any order, and they end whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    DEEP,
    LIMIT_S,
    TINY,
    Guarded,
    break_step,
    fresh,
    make_rig,
    random_bytes,
    staged,
    until,
)

from kvtransfer.handles import PageState
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import (
    ConfigError,
    DeadlineExceeded,
    TransferCancelled,
    TransferError,
)
from kvtransfer.tiers.record import NOTHING_STORED

UNTOUCHED, DONE, INVALID = PageState.UNTOUCHED, PageState.DONE, PageState.INVALID


@pytest.mark.parametrize("engine", [{}, staged()])
def test_layers_leave_in_whatever_order_they_are_written(engine: dict[str, Any]) -> None:
    rig = make_rig("sglang.layer_first", DEEP, **engine)
    slots, pages = np.array([4, 1, 9]), np.array([0, 5, 7])
    handle = rig.engine.store(pages, slots, layerwise=True)
    old, start = rig.slots(slots), DEEP.layer_offsets
    for number, layer in enumerate(rig.rng.permutation(9).tolist()):
        assert not handle.done()
        rows = rig.side.pages(pages)
        rows[:, start[layer] : start[layer + 1]] = random_bytes(rig.rng, 3, DEEP.layer_bytes(layer))
        rig.side.put(pages, rows)  # the forward writes the layer, and nothing of it may have left before
        handle.layer_written(layer)
        handle.wait_layer(layer)
        now = rig.slots(slots)
        assert np.array_equal(now[:, start[layer] : start[layer + 1]], rows[:, start[layer] : start[layer + 1]])
        left = [i for i in range(9) if handle._chunks_left[i]]
        assert len(left) == 8 - number
        for i in left:
            assert np.array_equal(now[:, start[i] : start[i + 1]], old[:, start[i] : start[i + 1]])
    handle.result(LIMIT_S)
    assert np.array_equal(rig.slots(slots), rig.side.pages(pages))
    assert np.array_equal(rig.host.digests[slots], page_digests(rig.side.pages(pages), DEEP))
    rig.close()


def test_a_layer_is_written_once() -> None:
    rig = make_rig()
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(1)
    with pytest.raises(TransferError, match="layer_written: expected each layer once, got 1 again"):
        handle.layer_written(1)
    handle.layer_written(0)
    handle.layer_written(2)
    handle.result(LIMIT_S)
    with pytest.raises(TransferError, match="got 2 again"):
        handle.layer_written(2)
    rig.close()


@pytest.mark.parametrize("written", [0, 2])
def test_a_layerwise_store_that_is_never_finished_ends_at_its_deadline(written: int) -> None:
    rig = make_rig()
    rig.fill_slots([2, 3])
    handle = rig.engine.store([1, 4], [2, 3], layerwise=True, deadline_s=0.4)
    for layer in range(written):
        handle.layer_written(layer)
    with pytest.raises(DeadlineExceeded, match=r"passed its deadline of 0\.4 s") as got:
        handle.result()
    assert got.value.pages == (0, 1)
    until(handle.done)
    assert handle.states().tolist() == [INVALID if written else UNTOUCHED] * 2
    assert (rig.host.digests[[2, 3]] == NOTHING_STORED).all() == (written > 0)
    handle.layer_written(2)  # the forward goes on; nobody wants the layer
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.engine.store([1], [2]).result(LIMIT_S)
    rig.close()


@pytest.mark.parametrize("engine", [{}, staged()])
def test_a_layerwise_store_can_be_cancelled_half_way(engine: dict[str, Any]) -> None:
    rig = make_rig(**engine)
    old, new = rig.slots([2]), rig.side.pages([1])
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(0)
    handle.wait_layer(0)
    assert handle.cancel()
    handle.layer_written(1)
    with pytest.raises(TransferCancelled):
        handle.result(LIMIT_S)
    assert handle.states().tolist() == [INVALID]
    end = TINY.layer_offsets[1]
    assert np.array_equal(rig.slots([2])[:, :end], new[:, :end]) and np.array_equal(
        rig.slots([2])[:, end:], old[:, end:]
    )
    rig.close()


def test_a_layerwise_store_whose_step_fails_ends_although_layers_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    break_step(monkeypatch, rig, "kernel", 0)
    handle = rig.engine.store([1], [2], layerwise=True)
    handle.layer_written(0)
    with pytest.raises(TransferError, match="injected"):
        handle.result(LIMIT_S)
    handle.layer_written(1)
    assert not rig.host.ledger.any_busy()
    rig.close()


def test_a_layerwise_load_is_waited_for_while_a_layerwise_store_of_the_same_pages_follows() -> None:
    """The shape of a forward: layer i waits for its load, is used and written, and leaves at once."""
    rig = make_rig("sglang.layer_first", DEEP, **staged())
    rows = rig.fill_slots([0, 1])
    load = rig.engine.load([0, 1], [6, 7], layerwise=True)
    store = rig.engine.store([6, 7], [8, 9], layerwise=True)
    for layer in range(9):
        load.wait_layer(layer)
        store.layer_written(layer)
    store.result(LIMIT_S)
    assert np.array_equal(rig.slots([8, 9]), rows) and load.verdict(LIMIT_S).ok
    rig.close()


def test_what_ended_keeps_nothing_of_the_engine_alive() -> None:
    rig = make_rig()
    handles = [rig.engine.load([1], [1]), rig.engine.copy([1], Guarded(fresh(), rig.side.layout).pool, [2])]
    for handle in handles:
        handle.result(LIMIT_S)
        until(lambda handle=handle: handle.done() and not handle.keep)  # type: ignore[misc]
    with pytest.raises(ConfigError):
        rig.engine.load([1], [1], deadline_s=0)
    rig.close()
