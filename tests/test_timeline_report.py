"""What is read out of a timeline, and that nothing else passes for one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, make_rig, staged
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import cli
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Span
from kvtransfer.timeline_events import Header, Record, trace_of
from kvtransfer.timeline_report import intersection, length, link_lines, read_trace, summarize, union, write_page

MS = 1e-3


def header(**fields: Any) -> Header:
    known: dict[str, Any] = {"pool": "pool", "device": "cpu", "clock": "clock", "limit": 9}
    return Header(**(known | {"dropped": 0, "unfinished": 0} | fields))


def record(
    name: str, row: str, layer: int, start: float, stop: float, nbytes: int = 0, direction: str = "load"
) -> Record:
    span = Span(name, 1, direction, row, (layer, layer + 1), 4, nbytes)
    return Record(span, "MainThread", layer + 1, (start, stop), (start, stop))


# Copies 0-10 and 12-20 ms, 20 MB each; compute 8-11 and 15-25 ms; the stream stood still 2-8 ms and 11-15 ms.
FORWARD = [
    record("copy", "copy_in", 0, 0, 10 * MS, 20_000_000),
    record("copy", "copy_in", 1, 12 * MS, 20 * MS, 20_000_000),
    record("wait_layer", "compute", 0, 2 * MS, 8 * MS),
    record("compute", "compute", 0, 8 * MS, 11 * MS),
    record("wait_layer", "compute", 1, 11 * MS, 15 * MS),
    record("compute", "compute", 1, 15 * MS, 25 * MS),
]


def written(folder: Path, records: list[Record], **fields: Any) -> Path:
    file = folder / "trace.json"
    file.write_bytes(msgspec.json.encode(trace_of(records, header(**fields))))
    return file


def test_shares_of_a_forward_worked_out_by_hand(tmp_path: Path) -> None:
    summary = summarize(read_trace(written(tmp_path, FORWARD, link_gbps=4.0)))
    (link,) = summary.links
    assert (link.direction, link.total_bytes) == ("load", 40_000_000)
    assert link.busy_s == pytest.approx(18 * MS)
    assert link.span_s == pytest.approx(20 * MS)
    assert link.gbps == pytest.approx(40 / 18)
    assert [(w.layer, w.count, round(w.total_s, 6), round(w.longest_s, 6)) for w in summary.waits] == [
        (0, 1, 0.006, 0.006),
        (1, 1, 0.004, 0.004),
    ]
    assert summary.compute_s == pytest.approx(13 * MS)
    assert summary.wait_s == pytest.approx(10 * MS)
    assert summary.overlap_share == pytest.approx((2 + 5) / 18)
    lines = dict(link_lines(summary))
    assert "2.22 GB/s while copying, 55.6% of the link; copying 18.000 ms of 20.000 ms" in lines["load"]
    assert lines["overlap"].startswith("38.9% of the copying")
    assert lines["exposed wait"] == "10.000 ms, beside 13.000 ms of compute (43.5% of both)"


def test_the_link_can_be_given_and_need_not_be_known(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, FORWARD, link_gbps=4.0, link_gbps_source="PCIe 9.0"))
    assert "4.00 GB/s, PCIe 9.0" in dict(link_lines(summarize(trace)))["the link"]
    assert "5.00 GB/s, given" in dict(link_lines(summarize(trace, 5.0)))["the link"]
    unknown = dict(link_lines(summarize(read_trace(written(tmp_path, FORWARD)))))
    assert "--link-gbps" in unknown["the link"]
    assert "of the link" not in unknown["load"]
    for senseless in (0.0, -2.0, float("nan")):
        with pytest.raises(ConfigError, match="--link-gbps: expected more than 0"):
            summarize(trace, senseless)


def test_an_empty_timeline_says_so(tmp_path: Path) -> None:
    summary = summarize(read_trace(written(tmp_path, [], dropped=7, unfinished=2, error="CUDA is lost")))
    lines = dict(link_lines(summary))
    assert lines["copies"] == "none were recorded"
    assert "layerwise" in lines["overlap"]
    assert lines["not in the trace"] == "7 dropped (at most 9 are kept), 2 unfinished when it was closed"
    assert lines["cut short by"] == "CUDA is lost"


def test_work_that_took_no_time_divides_by_nothing(tmp_path: Path) -> None:
    found = [record("copy", "copy_in", 0, 0, 0, 100), record("compute", "compute", 0, 0, 0)]
    summary = summarize(read_trace(written(tmp_path, found, link_gbps=4.0)))
    assert summary.links[0].gbps == 0
    assert summary.overlap_share is None
    assert link_lines(summary)


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (float(t[0]), float(sum(t)))))


@settings(deadline=None)
@given(intervals, intervals)
def test_unions_and_intersections_by_counting_points(
    a: list[tuple[float, float]], b: list[tuple[float, float]]
) -> None:
    def points(of: list[tuple[float, float]]) -> set[int]:
        return {p for start, stop in of for p in range(int(start), int(stop))}

    assert length(union(a)) == len(points(a))
    assert all(x[1] < y[0] for x, y in zip(union(a), union(a)[1:], strict=False))
    assert length(intersection(union(a), union(b))) == len(points(a) & points(b))


# -- bad input ----------------------------------------------------------------------------------------


def bad(change: Any) -> bytes:
    trace = json.loads(msgspec.json.encode(trace_of(FORWARD, header())))
    change(trace)
    return json.dumps(trace).encode()


BAD = {
    "empty": b"",
    "no json": b"hello",
    "binary": b"\xff\xfe\x00\x01",
    "a number": b"7",
    "a list": b"[]",
    "an empty object": b"{}",
    "somebody else's trace": b'{"traceEvents": [], "displayTimeUnit": "ms"}',
    "half of one": bad(lambda t: None)[:-200],
    "no numbers": bad(lambda t: t["traceEvents"][-1].update(ts="soon")),
    "an event without a place": bad(lambda t: t["traceEvents"][-1].pop("pid")),
    "work without its size": bad(lambda t: [e["args"].clear() for e in t["traceEvents"] if e["ph"] == "X"]),
    "a time that runs back": bad(lambda t: [e.update(dur=-1.0) for e in t["traceEvents"] if e["ph"] == "X"]),
    "not a time": bad(lambda t: t["traceEvents"][-1].update(ts=float("nan"))),
    "a later format": bad(lambda t: t["otherData"].update(kvtransfer_timeline=2)),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_timeline_is_refused(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(BAD[what])
    with pytest.raises(ConfigError, match=r"bad\.json: expected"):
        read_trace(file)
    assert run("timeline", "summarize", str(file)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("kvtransfer: ") and said.err.count("\n") == 1
    assert not said.out


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readable timeline, got No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="expected a readable timeline, got Is a directory"):
        read_trace(tmp_path)


# -- the command and the page -------------------------------------------------------------------------


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return int(caught.value.code or 0)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A real one: a layer-wise load through a ring, and a forward."""
    rig = make_rig(spec=EVEN, **staged())
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(EVEN.num_layers))
    with rig.engine.timeline(tmp_path / "out.json"):
        load = rig.engine.load(range(4), range(4), layerwise=True)
        with layerwise(layers, load=load):
            for layer in layers:
                layer(torch.zeros(1))
        load.result(LIMIT_S)
    rig.close()
    return tmp_path / "out.json"


def test_the_command_prints_waits_overlap_and_share(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("timeline", "summarize", str(recorded), "--link-gbps", "0.5") == 0
    said = capsys.readouterr().out
    for words in ("of the link", "of the copying ran beside compute", "exposed wait a layer", "0.50 GB/s, given"):
        assert words in said.replace("\n", " ").replace("│", "")
    assert re.search(r"│\s+2 │\s+1 │\s+\d+\.\d{3} │", said)


def test_the_page_is_whole_and_by_itself(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("timeline", "summarize", str(recorded), "--html", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)
    assert not re.search(r"@[A-Z]+@", text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    drawing = json.loads(data[1])
    assert [row["name"] for row in drawing["rows"]][:3] == ["compute", "copy_in", "scatter"]
    assert all(len(e) == 5 for row in drawing["rows"] for e in row["events"])
    assert {c["name"] for c in drawing["counters"]} == {"bytes in flight: load", "bytes moved: load"}


def test_names_in_a_trace_cant_break_out_of_the_page(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    found = [Record(Span(nasty, 1, nasty, nasty), nasty, 0, (0, 1e-3), (0, 1e-3))]
    trace = read_trace(written(tmp_path, found, pool=nasty, device=nasty))
    write_page(trace, summarize(trace), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_a_page_that_cant_be_written(recorded: Path, tmp_path: Path) -> None:
    assert run("timeline", "summarize", str(recorded), "--html", str(tmp_path / "none" / "page.html")) == 2


@pytest.mark.long
def test_a_browser_draws_the_page(recorded: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    page = tmp_path / "page.html"
    trace = read_trace(recorded)
    write_page(trace, summarize(trace), page)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    bars = re.findall(r"<rect [^>]*data-r=", done.stdout)
    assert len(bars) > EVEN.num_layers
    assert ">scatter<" in done.stdout.replace("</text>", "<")
