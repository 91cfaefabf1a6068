"""The timeline and NVTX on a GPU: times come from CUDA events, and they are in an order that the streams allow."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_helpers import Rig, make_rig, shuffled, spin
from nvtx_helpers import build_probe, ranges, run_work
from nvtx_work import PAGES as NVTX_PAGES
from nvtx_work import SPEC as NVTX_SPEC
from timeline_helpers import GROUPS, STREAMS, complete, counter, load_trace, row_names

from kvtransfer import timeline as timeline_module
from kvtransfer import timeline_clock
from kvtransfer.handles import TransferHandle
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.timeline import Timeline
from kvtransfer.timeline_report import read_trace, summarize, write_page

pytestmark = pytest.mark.gpu

LAYERS = 8
SPEC = KVSpec.attention(num_layers=LAYERS, page_size=16, kv_heads=8, head_dim=128, itemsize=2)  # 64 KiB a layer
PAGES, SLOTS = shuffled(512, 1024, 1), shuffled(512, 1024, 2)  # 256 MiB
SLACK_US = 20.0  # of times on one GPU: a mark is an event of its own, beside the work
EXPECTED = {"staged": ("copy", "copy_in"), "mapped": ("mapped", "scatter"), "strided": ("strided", "copy_in")}


class Layer(torch.nn.Module):
    """A matrix product of about half a millisecond, on whatever stream is current."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x @ self.weight
        return x


class Bench:
    """A rig with a compute stream and a stream that can be kept busy, a model and its input, all warm."""

    def __init__(self, path: str) -> None:
        self.compute, self.late = torch.cuda.Stream(), torch.cuda.Stream()
        self.rig: Rig = make_rig(
            "sglang.layer_first", SPEC, pages=1024, slots=1024, streams=[self.compute, self.late],
            staging_bytes=96 << 20, path=path,
        )  # fmt: skip
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.x = torch.zeros(2048, 4096, device="cuda", dtype=torch.bfloat16)
        self.rig.fill_slots(SLOTS)
        self.load()  # kernels and cuBLAS are loaded

    def load(self) -> TransferHandle:
        """A layer-wise load with a forward on the compute stream."""
        load = self.rig.engine.load(SLOTS, PAGES, layerwise=True)
        with torch.no_grad(), torch.cuda.stream(self.compute), layerwise(self.layers, load=load):
            x = self.x
            for layer in self.layers:
                x = layer(x)
        self.compute.synchronize()
        load.result(20)
        return load


def events_of(trace: dict[str, Any], row: str) -> list[dict[str, Any]]:
    """Complete events of one row of the streams."""
    names = [e for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == STREAMS]
    tids = {e["tid"] for e in names if e["args"]["name"] == row}
    return [e for e in complete(trace, STREAMS) if e["tid"] in tids]


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize("path", ["staged", "mapped", "strided"])
def test_a_load_under_a_forward(path: str, tmp_path: Path) -> None:
    bench = Bench(path)
    with bench.rig.engine.timeline(tmp_path / "out.json") as timeline:
        load = bench.load()
    trace = load_trace(timeline.path)
    about = trace["otherData"]
    assert (about["clock"], about["dropped"], about["unfinished"], about["error"]) == ("CUDA events", 0, 0, "")
    assert about["device"] == torch.cuda.get_device_name()

    name, row = EXPECTED[path]
    links = complete(trace, STREAMS, cat="link")
    assert {e["name"].split()[0] for e in links} == {name}
    assert sum(e["args"]["bytes"] for e in links) == load.total_bytes
    assert counter(trace, "bytes moved: load")[-1] == load.total_bytes
    assert counter(trace, "bytes in flight: load")[-1] == 0
    assert set(row_names(trace, STREAMS)) == {"compute", row, "scatter"}  # one track a stream: nothing overlaps

    for i in range(LAYERS):
        (wait,) = complete(trace, STREAMS, cat="wait", layers=[i, i + 1])
        (compute,) = complete(trace, STREAMS, cat="compute", layers=[i, i + 1])
        assert end(wait) <= compute["ts"] + SLACK_US
        assert compute["dur"] > 50, "the model's own work is in the row"
        if path != "mapped":  # its layers are released by flags, inside the one launch
            groups = [e for e in complete(trace, GROUPS) if i in range(*e["args"]["layers"])]
            arrived = max(end(e) for e in groups)
            assert arrived <= end(wait) + SLACK_US, f"layer {i} was released before it had arrived"

    summary = summarize(read_trace(timeline.path))
    (link,) = summary.links
    assert 0.5 * load.seconds < link.span_s < 1.2 * load.seconds
    assert 1 < link.gbps < 500
    assert summary.overlap_share is not None and 0 <= summary.overlap_share <= 1
    assert [w.layer for w in summary.waits] == list(range(LAYERS))
    write_page(read_trace(timeline.path), summary, tmp_path / "page.html")
    bench.rig.close()


def test_a_late_load_shows_as_exposed_wait(tmp_path: Path) -> None:
    bench = Bench("staged")
    with bench.rig.engine.timeline(tmp_path / "out.json"):
        spin(bench.late, 20)
        bench.load()
    summary = summarize(read_trace(tmp_path / "out.json"))
    assert summary.waits[0].total_s > 0.010
    assert summary.waits[-1].total_s < summary.waits[0].total_s
    bench.rig.close()


def test_a_load_and_a_store_at_once(tmp_path: Path) -> None:
    bench = Bench("staged")
    others = shuffled(1024, 1024, 1)[512:]
    slots = shuffled(1024, 1024, 2)[512:]
    with bench.rig.engine.timeline(tmp_path / "out.json"):
        store = bench.rig.engine.store(others, slots)
        load = bench.rig.engine.load(SLOTS, PAGES)
        store.result(20)
        load.result(20)
    trace = load_trace(tmp_path / "out.json")
    for direction, handle in (("load", load), ("store", store)):
        assert counter(trace, f"bytes moved: {direction}")[-1] == handle.total_bytes
    for stores in complete(trace, STREAMS, direction="store", cat="link"):
        gathered = [e for e in events_of(trace, "gather") if end(e) <= end(stores) + SLACK_US]
        assert gathered, "a copy out of the ring comes after a gather into it"
    bench.rig.close()


def test_old_anchors_are_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_clock, "ANCHOR_S", 0.002)
    bench = Bench("staged")
    with bench.rig.engine.timeline(tmp_path / "out.json") as timeline:
        assert timeline._gpu is not None
        anchors = set()
        for _ in range(6):
            bench.load()
            anchors.add(timeline._gpu.anchor.at_s)
    assert len(anchors) > 2
    trace = load_trace(tmp_path / "out.json")
    assert set(row_names(trace, STREAMS)) == {"compute", "copy_in", "scatter"}
    computes = complete(trace, STREAMS, cat="compute")
    assert [e["args"]["layers"][0] for e in computes] == 6 * list(range(LAYERS))
    hosts = [e for e in trace["traceEvents"] if e.get("cat") == "thread" and e["name"].startswith("compute")]
    for on_gpu, on_host in zip(computes, hosts, strict=True):
        assert on_gpu["ts"] > on_host["ts"] - 200, "the GPU's clock and the host's agree on what came first"
    bench.rig.close()


def test_events_are_used_again_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "PENDING_LIMIT", 64)
    bench = Bench("staged")
    timeline = Timeline(tmp_path / "out.json", bench.rig.pool.device, "pool", limit=100)
    bench.rig.engine.observer.add(timeline)
    for _ in range(20):
        bench.load()
    assert timeline._gpu is not None
    assert len(timeline._pending) <= 64
    assert len(timeline._gpu._spare) <= 2 * 64
    assert len(timeline._kept) <= 100
    timeline.close()
    assert timeline.dropped > 0
    load_trace(tmp_path / "out.json")
    bench.rig.close()


def test_a_capture_beside_it_is_left_alone(tmp_path: Path) -> None:
    """Asking for events breaks a capture in the global mode: transfers end, and are recorded, all the same."""
    bench = Bench("staged")
    graph = torch.cuda.CUDAGraph()
    x, weight = bench.x[:64].clone(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = x @ weight  # its kernel is loaded outside the capture
    with bench.rig.engine.timeline(tmp_path / "out.json"):
        loads = [bench.rig.engine.load(SLOTS[i::8], PAGES[i::8]) for i in range(8)]
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="global"):
            y = x
            for _ in range(300):
                y = y @ weight
            threading.Event().wait(0.02)
        for load in loads:
            load.result(20)
        graph.replay()
        torch.cuda.synchronize()
    trace = load_trace(tmp_path / "out.json")
    assert counter(trace, "bytes moved: load")[-1] == sum(load.total_bytes for load in loads)
    bench.rig.close()


def test_a_tool_hears_every_stage_of_every_path(tmp_path: Path) -> None:
    said, heard = run_work(tmp_path, "cuda", library=build_probe(tmp_path))
    assert said == "staged True\nmapped True\nstrided True\n"
    found = ranges(heard)
    assert {r.name for r in found} == {
        "plan", "submit", "layers", "copy", "scatter", "gather", "mapped", "strided", "digest", "wait_layer", "compute",
    }  # fmt: skip
    whole = NVTX_PAGES * NVTX_SPEC.page_bytes
    by_name = {name: sum(r.payload["bytes"] for r in found if r.name == name) for name in ("mapped", "scatter")}
    assert by_name["mapped"] == 3 * whole  # a store and two loads
    assert by_name["scatter"] >= 2 * whole
    for r in found:
        if r.category in ("copy_in", "copy_out", "scatter", "gather"):
            assert r.outer[-1] == "layers"
