"""NVTX ranges, as a tool that NVTX itself loads hears them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine_helpers import LIMIT_S, make_rig
from nvtx_helpers import build_probe, ranges, run_work
from nvtx_work import PAGES, SPEC

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER
from kvtransfer.trace import PAYLOAD, RANGES, NvtxObserver, nvtx_wanted, timeline_wanted

ROOT = Path(__file__).resolve().parent.parent
INSIDE = {"copy", "scatter", "gather", "mapped", "strided", "relayout", "digest"}


def test_a_tool_hears_nested_ranges_with_names_and_payloads(tmp_path: Path) -> None:
    said, heard = run_work(tmp_path, "cpu", library=build_probe(tmp_path))
    assert said == "cpu True\nstaged True\n"
    found = ranges(heard)
    assert {r.name for r in found} == {
        "plan", "submit", "layers", "copy", "scatter", "gather", "relayout", "wait_layer", "compute",
    }  # fmt: skip
    assert {r.name for r in found} <= set(RANGES)
    for r in found:
        assert set(r.payload) == set(PAYLOAD.names or ())
        assert r.payload["pages"] == PAGES
        assert 0 <= r.payload["layer_start"] < r.payload["layer_stop"] <= SPEC.num_layers
        if r.name in INSIDE:
            assert r.outer[-1] == "layers", "a stage belongs to a group of layers"
        for inner in r.inner:
            assert r.payload["layer_start"] <= inner.payload["layer_start"] or r.name == "compute"
    # Per engine: a store, a layer-wise load and store, and one more load, each of all bytes.
    whole = PAGES * SPEC.page_bytes
    by_lane = {
        lane: sum(r.payload["bytes"] for r in found if r.category == lane)
        for lane in ("copy_in", "copy_out", "scatter", "gather")
    }
    assert by_lane == {"copy_in": 4 * whole, "copy_out": 4 * whole, "scatter": 2 * whole, "gather": 2 * whole}
    waits = [r.payload["layer_start"] for r in found if r.name == "wait_layer"]
    assert waits == 2 * [*range(SPEC.num_layers), 0]
    assert sum(r.name == "plan" for r in found) == sum(r.name == "submit" for r in found) == 8
    assert {r.category for r in found if r.name in ("wait_layer", "compute")} == {"compute"}


def test_a_tool_without_the_payload_extension_hears_names(tmp_path: Path) -> None:
    library = build_probe(tmp_path, "-DWITHOUT_PAYLOADS")
    said, heard = run_work(tmp_path, "cpu", library=library)
    assert "cpu True" in said
    assert {r.payload for r in ranges(heard)} == {None}


@pytest.mark.parametrize(("nvtx", "tool"), [("0", True), ("1", False)])
def test_nothing_is_built_unless_asked_for_and_listened_to(nvtx: str, tool: bool, tmp_path: Path) -> None:
    said, heard = run_work(tmp_path, "cpu", library=build_probe(tmp_path) if tool else None, nvtx=nvtx)
    assert said == "cpu False\nstaged False\n"
    assert not heard.exists() or not ranges(heard)


def test_the_observer_can_be_given_by_hand() -> None:
    """No tool listens to this process, so it wants no spans."""
    observer = NvtxObserver()
    assert not observer.spans
    rig = make_rig(observer=observer)
    rig.engine.load([0], [0]).result(LIMIT_S)
    assert not rig.engine.observer.spans
    rig.close()
    assert not NO_OBSERVER.spans


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvtx_wanted({"KVTRANSFER_NVTX": "1"})
    assert not any(nvtx_wanted({"KVTRANSFER_NVTX": v}) for v in ("", "0"))
    assert not nvtx_wanted({})
    with pytest.raises(ConfigError, match="KVTRANSFER_NVTX: expected 1 or 0, got 'yes'"):
        nvtx_wanted({"KVTRANSFER_NVTX": "yes"})
    monkeypatch.setenv("KVTRANSFER_NVTX", "on")
    with pytest.raises(ConfigError, match="expected 1 or 0, got 'on'"):
        make_rig()
    assert timeline_wanted("p", {}) is None
    assert timeline_wanted("p", {"KVTRANSFER_TIMELINE": ""}) is None
    wanted = timeline_wanted("big", {"KVTRANSFER_TIMELINE": "t-%n-%p.json"})
    assert wanted is not None and re.fullmatch(r"t-big-\d+\.json", wanted)


def test_every_name_is_in_the_documents() -> None:
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert tuple(listed[: len(RANGES)]) == RANGES
    for name in PAYLOAD.names or ():
        assert f"`{name}`" in page
