"""Verdicts: a byte that changed in a slot is found and named, and what was never verified is never called right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    HYBRID,
    LIMIT_S,
    TINY,
    WIDE,
    Log,
    Steps,
    break_step,
    make_rig,
    small_ring,
    staged,
    until,
)

from kvtransfer.fifo import Delays
from kvtransfer.handles import PageState
from kvtransfer.kernels.digest import page_digests
from kvtransfer.kernels.errors import (
    DeadlineExceeded,
    TransferError,
)

UNTOUCHED, DONE, INVALID = PageState.UNTOUCHED, PageState.DONE, PageState.INVALID


@pytest.mark.parametrize("engine", [{}, staged()])
@pytest.mark.parametrize(("spec", "name"), [(TINY, "vllm.LBNHC"), (HYBRID, "sglang.layer_first"), (WIDE, "page_first")])
def test_one_flipped_bit_is_found_and_named(engine: dict[str, Any], spec: Any, name: str) -> None:
    log = Log()
    rig = make_rig(name, spec, observer=log, **engine)
    slots = [3, 9, 5]
    rig.fill_slots(slots)
    for _ in range(6):
        byte, bit = int(rig.rng.integers(spec.page_bytes)), int(rig.rng.integers(8))
        layer = next(i for i in range(spec.num_layers) if byte < spec.layer_offsets[i + 1])
        row = rig.host.payload.view(-1, rig.host.slot_bytes)[9]
        row[byte] ^= 1 << bit
        handle = rig.engine.load(slots, [0, 1, 2], layerwise=bool(rig.rng.integers(2)))
        verdict = handle.verdict(LIMIT_S)
        assert (verdict.ok, verdict.bad_pages, verdict.bad_layers) == (False, (1,), ((1, layer),))
        assert verdict.unverified_pages == () and handle.states().tolist() == [DONE, INVALID, DONE]
        with pytest.raises(TransferError, match=r"pages at positions \[1\] do not verify: treat them as misses") as got:
            handle.result(LIMIT_S)
        assert got.value.pages == (1,)
        assert log.notes[-1] == ("pages set aside", {"slots": [9]})
        row[byte] ^= 1 << bit
        # Set aside: the slot is a miss until something is stored there again.
        assert rig.engine.load(slots, [0, 1, 2]).verdict(LIMIT_S).bad_pages == (1,)
        rig.engine.store([0, 1, 2], slots).result(LIMIT_S)
        assert rig.engine.load(slots, [0, 1, 2]).verdict(LIMIT_S).ok
    rig.close()


def test_pages_that_were_swapped_or_are_old_do_not_verify() -> None:
    rig = make_rig()
    rig.fill_slots([1, 2])
    rows = rig.host.payload.view(-1, rig.host.slot_bytes)
    rows[[1, 2]] = rows[[2, 1]]
    verdict = rig.engine.load([1, 2], [0, 1]).verdict(LIMIT_S)
    assert verdict.bad_pages == (0, 1) and len(verdict.bad_layers) == 6
    rig.close()


def test_slots_that_were_never_stored_are_unverified_and_not_wrong() -> None:
    rig = make_rig()
    rig.fill_slots([1])
    verdict = rig.engine.load([0, 1, 2], [0, 1, 2]).verdict(LIMIT_S)
    assert verdict.ok and verdict.unverified_pages == (0, 2)
    rig.close()


def test_storing_into_a_slot_again_replaces_its_digests() -> None:
    rig = make_rig()
    rig.fill_slots([1])
    first = rig.host.digests[1].copy()
    rig.engine.store([5], [1]).result(LIMIT_S)
    assert (rig.host.digests[1] != first).all()
    assert np.array_equal(rig.host.digests[[1]], page_digests(rig.side.pages([5]), TINY))
    assert rig.engine.load([1], [6]).verdict(LIMIT_S).unverified_pages == ()
    rig.close()


@pytest.mark.parametrize("how", ["cancel", "deadline", "error"])
def test_a_store_that_does_not_end_well_leaves_no_digests_on_what_it_touched(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    gate = steps.gate("copy_out", 1)
    delays = Delays(lambda label: steps(label) if armed else None)
    armed = False
    rig = make_rig("page_first", WIDE, delays=delays, path="staged", staging_bytes=small_ring(20_480))
    rig.fill_slots(range(10))
    known = rig.host.digests[np.arange(10)].copy()
    armed = True
    if how == "error":
        break_step(monkeypatch, rig, "copy", 1)
    handle = rig.engine.store(range(10), range(10), deadline_s=0.4 if how == "deadline" else LIMIT_S)
    until(lambda: steps.counts["copy_out"] == 2)
    if how == "cancel":
        handle.cancel()
    if how == "deadline":
        with pytest.raises(DeadlineExceeded):
            handle.result()
    gate.set()
    with pytest.raises(TransferError):
        handle.result(LIMIT_S)
    until(handle.done)
    touched = np.flatnonzero(handle.states() != UNTOUCHED)
    others = np.flatnonzero(handle.states() == UNTOUCHED)
    assert touched.size and others.size
    assert not (rig.host.digests[touched] == known[touched]).any() and np.array_equal(
        rig.host.digests[others], known[others]
    )
    armed = False
    verdict = rig.engine.load(range(10), range(10)).verdict(LIMIT_S)
    if how == "error":  # bytes of some step are missing: none of what it touched may pass for a page
        assert verdict.bad_pages == tuple(touched.tolist()) and verdict.unverified_pages == ()
    else:
        assert verdict.ok and verdict.unverified_pages == tuple(touched.tolist())
    rig.close()
