"""The timeline on the CPU's lanes: what it records, that its memory is bounded, and that its file is a Chrome trace."""

from __future__ import annotations

import gc
import json
import random
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from engine_helpers import DEEP, EVEN, LIMIT_S, Log, make_rig, staged, until, write_all_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_helpers import GROUPS, STREAMS, THREADS, check_trace, complete, counter, load_trace, row_names

from kvtransfer import timeline as timeline_module
from kvtransfer import timeline_clock
from kvtransfer.fifo import FifoStream
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Span
from kvtransfer.timeline import Timeline
from kvtransfer.timeline_clock import GpuClock
from kvtransfer.timeline_events import Header, Record, trace_of

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
HEADER = Header(pool="pool", device="cpu", clock="clock", limit=9, dropped=0, unfinished=0)


def forward(layers: torch.nn.ModuleList) -> None:
    for layer in layers:
        layer(torch.zeros(1))


def layers(count: int) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(torch.nn.Identity() for _ in range(count))


@pytest.mark.parametrize("path", ["cpu", "staged"])
def test_a_load_and_a_store_around_a_forward(path: str, tmp_path: Path) -> None:
    model = layers(DEEP.num_layers)
    rig = make_rig(spec=DEEP, **(staged() if path == "staged" else {}))
    rig.fill_slots(range(8))
    with rig.engine.timeline(tmp_path / "out.json", link_gbps=2.5) as timeline:
        load = rig.engine.load(range(8), range(8), layerwise=True)
        store = rig.engine.store(range(8, 16), range(8, 16), layerwise=True)
        with layerwise(model, load=load, store=store):
            forward(model)
        load.result(LIMIT_S)
        store.result(LIMIT_S)
    assert timeline.path == tmp_path / "out.json"
    trace = load_trace(timeline.path)
    about = trace["otherData"]
    assert (about["clock"], about["device"], about["link_gbps"]) == ("clock", "cpu", 2.5)
    assert (about["dropped"], about["unfinished"], about["error"]) == (0, 0, "")

    links = complete(trace, STREAMS, cat="link")
    for handle, direction in ((load, "load"), (store, "store")):
        assert sum(e["args"]["bytes"] for e in links if e["args"]["direction"] == direction) == handle.total_bytes
        assert counter(trace, f"bytes moved: {direction}")[-1] == handle.total_bytes
        assert counter(trace, f"bytes in flight: {direction}")[-1] == 0
    expected = ["compute", "copy_in", "copy_out"] + (["scatter", "gather"] if path == "staged" else [])
    assert row_names(trace, STREAMS) == expected
    groups = complete(trace, GROUPS)
    assert {tuple(e["args"]["layers"]) for e in groups if e["args"]["direction"] == "store"} == {
        (i, i + 1) for i in range(DEEP.num_layers)
    }
    for i in range(DEEP.num_layers):
        (wait,) = complete(trace, STREAMS, cat="wait", layers=[i, i + 1])
        (compute,) = complete(trace, STREAMS, cat="compute", layers=[i, i + 1])
        arrived = max(e["ts"] + e["dur"] for e in groups if e["args"]["direction"] == "load" and _holds(e, i))
        assert arrived <= wait["ts"] + wait["dur"] + 0.001 <= compute["ts"] + 0.002
        left = min(e["ts"] for e in groups if e["args"]["direction"] == "store" and _holds(e, i))
        assert compute["ts"] <= left
    names = {e["name"].split()[0] for e in complete(trace, THREADS)}
    assert {"plan", "submit", "layers", "wait_layer", "compute"} <= names
    rig.close()


def _holds(event: dict[str, Any], layer: int) -> bool:
    first, stop = event["args"]["layers"]
    return bool(first <= layer < stop)


def test_exposed_waits_are_as_long_as_the_lane_is_late(tmp_path: Path) -> None:
    rig = make_rig(spec=EVEN)
    gate = rig.delays.gate("copy_in")
    with rig.engine.timeline(tmp_path / "out.json"):
        load = rig.engine.load(range(4), range(4), layerwise=True)
        threading.Timer(0.1, gate.set).start()
        with layerwise(model := layers(EVEN.num_layers), load=load):
            forward(model)
        load.result(LIMIT_S)
    trace = load_trace(tmp_path / "out.json")
    (late,) = complete(trace, STREAMS, cat="wait", layers=[0, 1])
    assert 50e3 < late["dur"] < LIMIT_S * 1e6
    (copy,) = complete(trace, STREAMS, cat="link", layers=[0, 1])
    assert copy["dur"] > 50e3  # the gate held the closure itself, between its marks
    rig.close()


def test_a_stream_of_the_callers_own_gets_its_own_row(tmp_path: Path) -> None:
    with FifoStream("model") as stream:
        rig = make_rig(spec=EVEN, streams=[stream])
        with rig.engine.timeline(tmp_path / "out.json"):
            load = rig.engine.load(range(4), range(4), layerwise=True)
            load.wait_layer(0, stream)
            load.wait_layer(1)
            load.result(LIMIT_S)
        assert row_names(load_trace(tmp_path / "out.json"), STREAMS) == ["compute", "compute #2", "copy_in"]
        rig.close()


def test_only_what_is_inside_the_block_is_recorded(tmp_path: Path) -> None:
    rig = make_rig()
    rig.engine.load([0], [0]).result(LIMIT_S)
    with rig.engine.timeline(tmp_path / "out.json"):
        inside = rig.engine.load([1], [1])
        inside.result(LIMIT_S)
    rig.engine.load([2], [2]).result(LIMIT_S)
    assert not rig.engine.observer.spans
    numbers = {e["args"]["transfer"] for e in complete(load_trace(tmp_path / "out.json"), STREAMS)}
    assert numbers == {inside.number}
    rig.close()


def test_two_timelines_at_once_and_other_observers(tmp_path: Path) -> None:
    log = Log()
    rig = make_rig(observer=log)
    with rig.engine.timeline(tmp_path / "a.json"), rig.engine.timeline(tmp_path / "b.json"):
        rig.engine.load([1], [1]).result(LIMIT_S)
    for name in ("a.json", "b.json"):
        assert len(complete(load_trace(tmp_path / name), STREAMS, cat="link")) == 1
    assert len(log.ended) == 1
    rig.close()


def test_an_error_in_the_block_is_raised_and_the_file_is_written(tmp_path: Path) -> None:
    rig = make_rig()
    with pytest.raises(ArithmeticError), rig.engine.timeline(tmp_path / "out.json"):
        rig.engine.load([1], [1]).result(LIMIT_S)
        raise ArithmeticError
    assert complete(load_trace(tmp_path / "out.json"), STREAMS)
    rig.close()


def test_steps_that_fail_are_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_helpers import break_step

    from kvtransfer.kernels.errors import TransferError

    rig = make_rig(spec=DEEP, **staged())
    break_step(monkeypatch, rig, "copy", 1)
    with rig.engine.timeline(tmp_path / "out.json"):
        with pytest.raises(TransferError):
            rig.engine.load(range(4), range(4), layerwise=True).result(LIMIT_S)
        rig.engine.load(range(4), range(4, 8)).result(LIMIT_S)
    trace = load_trace(tmp_path / "out.json")
    assert trace["otherData"]["unfinished"] == 0
    assert len({e["args"]["transfer"] for e in complete(trace, STREAMS)}) == 2
    rig.close()


def test_what_is_not_through_when_it_closes_is_counted(tmp_path: Path) -> None:
    rig = make_rig(spec=EVEN)
    gate = rig.delays.gate("copy_in")
    timeline = Timeline(tmp_path / "out.json", CPU, "pool")
    rig.engine.observer.add(timeline)
    load = rig.engine.load(range(4), range(4), layerwise=True)
    timeline.close(wait_s=0.05)
    trace = load_trace(tmp_path / "out.json")
    assert trace["otherData"]["unfinished"] == EVEN.num_layers
    assert not complete(trace, STREAMS)
    gate.set()
    load.result(LIMIT_S)  # ends after the timeline did
    timeline.close()
    assert load_trace(tmp_path / "out.json") == trace
    rig.close()


# -- memory -------------------------------------------------------------------------------------------


def span(number: int, stream: FifoStream | None = None) -> Span:
    return Span("copy", number, "load", "copy_in", (number % 4, number % 4 + 1), 1, 100, stream)


def test_the_oldest_records_go_first_and_are_counted(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json", CPU, "pool", limit=10)
    for number in range(25):
        with timeline.span(span(number)):
            pass
    timeline.close()
    trace = load_trace(tmp_path / "out.json")
    assert [e["args"]["transfer"] for e in complete(trace, STREAMS)] == list(range(15, 25))
    assert (trace["otherData"]["dropped"], trace["otherData"]["limit"]) == (15, 10)


def test_marks_not_passed_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "PENDING_LIMIT", 8)
    timeline = Timeline(tmp_path / "out.json", CPU, "pool")
    gate = threading.Event()
    with FifoStream("late") as stream:
        stream.submit(lambda: gate.wait(LIMIT_S))
        for number in range(20):
            with timeline.span(span(number, stream)):
                pass
        assert timeline.dropped == 12
        gate.set()
        stream.synchronize()
        timeline.finished(1, True, 0.1, 100)
        for number in range(20, 24):
            with timeline.span(span(number, stream)):
                pass
    timeline.close()
    trace = load_trace(tmp_path / "out.json")
    assert [e["args"]["transfer"] for e in complete(trace, STREAMS)] == [*range(8), *range(20, 24)]


def test_one_late_stream_does_not_hold_up_the_others(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json", CPU, "pool")
    gate = threading.Event()
    with FifoStream("late") as late, FifoStream("quick") as quick:
        late.submit(lambda: gate.wait(LIMIT_S))
        with timeline.span(span(1, late)), timeline.span(span(2, quick)):
            pass
        quick.synchronize()
        timeline.finished(1, True, 0.1, 100)
        assert [p.record.span.transfer for p in timeline._pending] == [1]
        assert [r.span.transfer for r in timeline._kept] == [2]
        gate.set()
    timeline.close()


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json", CPU, "pool", limit=500)

    def run(count: int) -> None:
        for number in range(count):
            with timeline.span(span(number)):
                pass

    run(1000)
    tracemalloc.start()
    try:
        run(600)
        before = tracemalloc.get_traced_memory()[0]
        run(3000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert before < 500 * 1000, "a record takes less than 1,000 bytes"
    assert after < before + 50_000
    timeline.close()


def test_threads_at_once(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json", CPU, "pool", limit=10_000)

    def work(first: int) -> None:
        with FifoStream() as stream:
            for number in range(first, first + 200):
                with timeline.span(Span("layers", number, "load")), timeline.span(span(number, stream)):
                    pass
                timeline.finished(number, True, 0.1, 100)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    trace = load_trace(tmp_path / "out.json")
    assert len(complete(trace, STREAMS)) == 800
    assert len(complete(trace, THREADS)) == 1600
    assert counter(trace, "bytes moved: load")[-1] == 80_000


# -- the file -----------------------------------------------------------------------------------------

times = st.tuples(st.integers(0, 300), st.integers(0, 80)).map(lambda t: (t[0] / 1e6, (t[0] + t[1]) / 1e6))
records = st.lists(
    st.builds(
        Record,
        span=st.builds(
            Span,
            name=st.sampled_from(["copy", "scatter", "wait_layer", "compute", "relayout"]),
            transfer=st.integers(0, 3),
            direction=st.sampled_from(["load", "store", "copy"]),
            row=st.sampled_from(["", "copy_in", "scatter", "copy_out", "gather", "compute", "elsewhere"]),
            layers=st.tuples(st.integers(0, 3), st.integers(0, 4)),
            pages=st.integers(0, 9),
            total_bytes=st.integers(0, 2**40),
        ),
        thread=st.sampled_from(["MainThread", "copy_in", "other"]),
        group=st.integers(0, 4),
        host=times,
        on_stream=st.none() | times,
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(records)
def test_whatever_was_recorded_is_a_trace_whose_events_nest(found: list[Record]) -> None:
    trace = json.loads(msgspec.json.encode(trace_of(found, HEADER)))
    check_trace(trace)
    assert len(complete(trace, THREADS)) == len(found)
    assert len(complete(trace, STREAMS)) == sum(r.on_stream is not None for r in found)
    for direction in ("load", "store", "copy"):
        links = complete(trace, STREAMS, cat="link", direction=direction)
        assert ([0, *counter(trace, f"bytes moved: {direction}")])[-1] == sum(e["args"]["bytes"] for e in links)
        assert ([0, *counter(trace, f"bytes in flight: {direction}")])[-1] == 0


def test_readings_that_cross_by_a_hair_stay_on_one_row() -> None:
    """Two events of one stream can't overlap; what CUDA says of them may, by half a microsecond."""
    found = [Record(span(i), "t", 0, (i * 1e-3, i * 1e-3 + 1e-6), (i * 1e-3, (i + 1) * 1e-3 + 4e-7)) for i in range(5)]
    trace = json.loads(msgspec.json.encode(trace_of(found, HEADER)))
    check_trace(trace)
    assert row_names(trace, STREAMS) == ["copy_in"]


@pytest.mark.parametrize("name", ["missing/out.json", "."])
def test_a_file_that_cant_be_written_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    rig = make_rig()
    with (
        pytest.raises(ConfigError, match="expected a file in a folder that exists"),
        rig.engine.timeline(tmp_path / name),
    ):
        raise AssertionError("not reached")
    assert not rig.engine.observer.spans
    rig.close()


@pytest.mark.parametrize(
    "options", [{"link_gbps": 0.0}, {"link_gbps": -1.0}, {"link_gbps": float("nan")}, {"limit": 0}]
)
def test_senseless_options(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Timeline(tmp_path / "out.json", CPU, "pool", **options)


def test_a_folder_that_went_away(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    timeline = Timeline(folder / "out.json", CPU, "pool")
    folder.rmdir()
    with pytest.raises(ConfigError, match="can't be written"):
        timeline.close()


# -- the environment ----------------------------------------------------------------------------------


def test_the_variable_opens_a_timeline_for_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRANSFER_TIMELINE", str(tmp_path / "out-%n.json"))
    for _ in range(2):
        rig = make_rig()
        rig.engine.load([1], [1]).result(LIMIT_S)
        rig.close()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out-pool-1.json", "out-pool.json"]
    for file in tmp_path.iterdir():
        assert complete(load_trace(file), STREAMS, cat="link")


def test_an_engine_that_is_dropped_leaves_its_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRANSFER_TIMELINE", str(tmp_path / "out.json"))
    rig = make_rig()
    rig.engine.load([1], [1]).result(LIMIT_S)
    host = rig.host
    del rig

    def written() -> bool:
        gc.collect()
        return (tmp_path / "out.json").stat().st_size > 0

    until(written, "the file")
    load_trace(tmp_path / "out.json")
    host.close(wait_s=LIMIT_S)


def test_a_process_that_ends_leaves_its_timeline(tmp_path: Path) -> None:
    code = "from engine_helpers import make_rig\nrig = make_rig()\nrig.engine.load([1], [1]).result(20)\n"
    environment = {"KVTRANSFER_TIMELINE": str(tmp_path / "out.json"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert complete(load_trace(tmp_path / "out.json"), STREAMS, cat="link")


def test_a_layerwise_store_alone(tmp_path: Path) -> None:
    rig = make_rig(spec=EVEN)
    with rig.engine.timeline(tmp_path / "out.json"):
        store = rig.engine.store(range(4), range(4), layerwise=True)
        time.sleep(0.002)
        write_all_layers(store)
        store.result(LIMIT_S)
    trace = load_trace(tmp_path / "out.json")
    assert row_names(trace, GROUPS) == [f"store layer {i}" for i in range(EVEN.num_layers)]
    rig.close()


def test_the_example_in_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    rig = make_rig(spec=EVEN)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(EVEN.num_layers)

        def forward(self, x: torch.Tensor) -> None:
            forward(self.layers)

    names = {"slots": [1, 2], "pages": [3, 4], "model": Model(), "inputs": torch.zeros(1)}
    monkeypatch.chdir(tmp_path)
    exec(block, {"engine": rig.engine, "layerwise": layerwise, **names})
    assert len(complete(load_trace(tmp_path / "out.json"), STREAMS, cat="compute")) == EVEN.num_layers
    rig.close()


def test_the_gpus_clock_begins_at_the_anchor_that_is_known_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other processes have the GPU a wait returns late, and half of it is what the times are off by."""
    now, widths = 50.0, random.Random(3).choices([0.004, 0.002, 0.00003], [6, 6, 1], k=timeline_clock.ANCHOR_TRIES - 1)
    widths.insert(5, 0.00001)
    begun: list[float] = []

    class Event:
        def record(self, stream: object) -> None:
            begun.append(now)

        def synchronize(self) -> None:
            nonlocal now
            now += widths[len(begun) - 1]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(timeline_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = GpuClock(torch.device("cuda"), 40.0)
    assert len(begun) == timeline_clock.ANCHOR_TRIES
    assert clock.anchor.at_s == pytest.approx(begun[5] + 0.000005 - 40.0, abs=1e-9)
