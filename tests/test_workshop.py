"""What the transfers of an engine share: release flags that no later launch can inherit, geometries made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import HYBRID, TINY, make_rig, staged

from kvtransfer import workshop as workshop_module
from kvtransfer.kernels.coalesce import Box
from kvtransfer.workshop import FlagSets, Workshop


def test_flags_of_an_earlier_launch_never_release_a_later_one() -> None:
    sets = FlagSets(torch.device("cpu"), 5)
    ctas, targets = 4, []
    for _ in range(3):
        flags, held = sets.take()
        assert flags.shape == (5,) and flags.dtype == torch.int32 and int(flags.max()) == held
        target = held + ctas
        assert not (flags >= target).any(), "a waiter of this launch would pass at once"
        flags += ctas  # what the launch adds
        targets.append(target)
        sets.give(flags, target)
    assert targets == [4, 8, 12], "one set, whose counters only grow"


def test_launches_in_flight_have_sets_of_their_own_and_forced_sets_are_not_used_again() -> None:
    sets = FlagSets(torch.device("cpu"), 3)
    (first, _), (second, _) = sets.take(), sets.take()
    assert first.data_ptr() != second.data_ptr()
    sets.give(second, 4)  # the first was forced at a deadline: it is never given back
    assert sets.take()[0].data_ptr() == second.data_ptr()
    assert sets.take()[0].data_ptr() not in (first.data_ptr(), second.data_ptr())


@pytest.mark.parametrize("kind", ["pool>ring", "ring>pool", "host>pool", "pool>host", "host>ring", "ring>host"])
def test_geometries_are_made_once_and_move_the_whole_box(kind: str) -> None:
    rig = make_rig("sglang.layer_first", HYBRID, **staged())
    shop = rig.engine._shop
    for box in (Box.whole(HYBRID), Box(2, 3, 0, 8), Box(2, 3, 8, 16)):
        geometry, table = shop.geometry(kind, box)
        assert table is None and shop.geometry(kind, box)[0] is geometry
        want = HYBRID.page_bytes if box == Box.whole(HYBRID) else 8 * 36 + (4 if box.token_start == 0 else 0)
        assert geometry.page_bytes == want
    rig.close()


def test_a_geometry_asked_for_without_a_table_does_not_hide_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided transfer needs addresses alone; the mapped one after it, of the same box, needs the kernel's table."""
    rig = make_rig("page_first", TINY)
    built: list[Any] = []
    monkeypatch.setattr(Workshop, "on_gpu", property(lambda self: True))

    def build(*args: Any) -> Any:
        built.append(args)
        return args

    monkeypatch.setattr(workshop_module, "build_table", build)
    box = Box.whole(TINY)
    assert rig.engine._shop.geometry("pool>host", box, build=False)[1] is None and not built
    assert rig.engine._shop.geometry("pool>host", box)[1] is built[0]
    rig.engine._shop.geometry("pool>host", box)
    assert len(built) == 1
    monkeypatch.undo()
    rig.close()
