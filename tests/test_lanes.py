"""Small copies of others are let in before each chunk's copies, where streams can wait for a word; one wait that is
refused costs one transfer at most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, Log, make_rig, staged

from kvtransfer.dma import Copier
from kvtransfer.handles import PageState
from kvtransfer.kernels.errors import CudaError
from kvtransfer.lanes import CudaLanes, word_to_pass

CPU = torch.device("cpu")


class Waits:
    """A copier that writes down waits, or refuses them."""

    def __init__(self, *, flags: bool = True, error: CudaError | None = None) -> None:
        self.supports_flags, self._error = flags, error
        self.asked: list[tuple[int, int, int]] = []

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self.asked.append((stream, address, value))
        if self._error is not None:
            raise self._error


def word_of(copier: Waits, log: Log) -> torch.Tensor | None:
    return word_to_pass(CPU, cast(Copier, copier), 77, log)


def lanes_with(copier: Waits, word: torch.Tensor | None) -> CudaLanes:
    made = CudaLanes.__new__(CudaLanes)  # streams need a GPU
    made.streams = cast(Any, {"copy_in": SimpleNamespace(cuda_stream=5), "copy_out": SimpleNamespace(cuda_stream=6)})
    made.copier, made.word = cast(Copier, copier), word
    return made


def test_a_lane_waits_for_a_word_that_is_there_already() -> None:
    copier, log = Waits(), Log()
    word = word_of(copier, log)
    assert word is not None and word.dtype == torch.int32 and word.tolist() == [0]
    assert copier.asked == [(77, word.data_ptr(), 0)] and not log.fallbacks
    lanes = lanes_with(copier, word)
    lanes.let_others_in("copy_out")
    lanes.let_others_in("copy_in")
    assert copier.asked == [(stream, word.data_ptr(), 0) for stream in (77, 6, 5)]


def test_where_streams_cannot_wait_nothing_is_asked_of_them() -> None:
    copier, log = Waits(flags=False), Log()
    assert word_of(copier, log) is None and not copier.asked and not log.fallbacks
    lanes_with(copier, None).let_others_in("copy_in")
    assert not copier.asked


def test_a_word_that_is_refused_is_said_once_and_done_without() -> None:
    copier, log = Waits(error=CudaError("cuStreamWaitValue32 returned 801", 801)), Log()
    assert word_of(copier, log) is None and len(copier.asked) == 1
    assert [what for what, _ in log.fallbacks] == ["small copies of others"] and "801" in log.fallbacks[0][1]
    lanes_with(copier, None).let_others_in("copy_in")
    assert len(copier.asked) == 1


@pytest.mark.parametrize("direction", ["load", "store"])
def test_each_chunk_lets_others_in_before_its_copies(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(spec=EVEN, **staged())
    lanes, said = rig.engine._shop.lanes, list[tuple[str, str]]()
    batch = lanes.batch

    def told(lane: str, *args: Any, **more: Any) -> None:
        said.append(("copy", lane))
        batch(lane, *args, **more)

    monkeypatch.setattr(lanes, "batch", told)
    monkeypatch.setattr(lanes, "let_others_in", lambda lane: said.append(("others", lane)))
    move = rig.engine.load if direction == "load" else rig.engine.store
    rig.fill_slots(range(16))
    handle = move(range(16), range(16))
    handle.result(LIMIT_S)
    lane = "copy_in" if direction == "load" else "copy_out"
    assert len(handle.plan.chunks) > 2 and said == [("others", lane), ("copy", lane)] * len(handle.plan.chunks)
    rig.close()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_refused_wait_fails_its_transfer_and_no_other(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle: chunks before it have moved, later ones have not, and all is given back."""
    rig = make_rig(spec=EVEN, **staged())
    rig.fill_slots(range(16))
    load = direction == "load"
    move = rig.engine.load if load else rig.engine.store
    new, old = (rig.slots(range(16)), rig.side.pages(range(16)))[:: 1 if load else -1]
    asked = 0

    def refuse(lane: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise CudaError("cuStreamWaitValue32 returned 1", 1)

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine._shop.lanes, "let_others_in", refuse)
        handle = move(range(16), range(16))
        with pytest.raises(CudaError, match="cuStreamWaitValue32"):
            handle.result(LIMIT_S)
    states = handle.states()
    now = rig.side.pages(range(16)) if load else rig.slots(range(16))
    assert asked == 2 and 0 < np.count_nonzero(states == PageState.DONE) < 16
    for state, want in ((PageState.DONE, new), (PageState.UNTOUCHED, old)):
        assert np.array_equal(now[states == state], want[states == state])
    assert not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.fill_slots(range(16))
    rig.engine.load(range(16), range(16)).result(LIMIT_S)
    assert np.array_equal(rig.side.pages(range(16)), rig.slots(range(16)))
    rig.close()


@pytest.mark.gpu
def test_lanes_have_their_word_on_a_gpu() -> None:
    log = Log()
    lanes = CudaLanes(torch.device("cuda", 0), log)
    assert lanes.word is not None and not log.fallbacks
    for lane in ("copy_in", "copy_out"):
        lanes.let_others_in(lane)
        lanes.streams[lane].synchronize()
    assert lanes.word.item() == 0
