"""What a timeline says: exposed wait a layer, overlap of copies and compute, achieved share of the link; as a page too.

Everything is computed from the file alone, so that a trace can be read on another machine.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.timeline_events import FORMAT, STREAMS, Header

Interval = tuple[float, float]


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of a Chrome trace, times in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = {}


class Trace(msgspec.Struct, frozen=True):
    """A whole file."""

    traceEvents: list[TraceEvent]
    otherData: Header


class Work(msgspec.Struct, frozen=True):
    """The arguments of a complete event of ours."""

    transfer: int
    direction: str
    layers: tuple[int, int]
    pages: int
    bytes: int


@dataclass(frozen=True)
class Link:
    """One direction. ``busy_s``: a copy was running; ``span_s``: from the begin of the first to the end of the last."""

    direction: str
    total_bytes: int
    busy_s: float
    span_s: float

    @property
    def gbps(self) -> float:
        """GB/s while a copy was running; GB = 1e9 bytes."""
        return self.total_bytes / self.busy_s / 1e9 if self.busy_s > 0 else 0.0


@dataclass(frozen=True)
class Wait:
    """How long the compute stream stood still for one layer, over all forwards."""

    layer: int
    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True)
class Summary:
    """``overlap_share``: of the time in which copies ran, the part in which compute ran too; None without compute."""

    links: tuple[Link, ...]
    waits: tuple[Wait, ...]
    compute_s: float
    overlap_share: float | None
    link_gbps: float | None
    link_gbps_source: str
    header: Header

    @property
    def wait_s(self) -> float:
        return sum(w.total_s for w in self.waits)


def read_trace(file: str | Path) -> Trace:
    """A file that a timeline wrote. ConfigError, saying what was found, for anything else."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: expected a readable timeline, got {error.strerror}") from error
    try:
        trace = msgspec.json.decode(content, type=Trace)
        for event in trace.traceEvents:
            if event.ph == "X":
                msgspec.convert(event.args, Work)
            if event.dur < 0:
                raise ConfigError(f"{file}: expected durations of 0 or more, got {event.dur} in {event.name!r}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected a timeline that kvtransfer wrote: {error}") from error
    if trace.otherData.kvtransfer_timeline != FORMAT:
        found = trace.otherData.kvtransfer_timeline
        raise ConfigError(f"{file}: expected a timeline of format {FORMAT}, got {found}")
    return trace


def summarize(trace: Trace, link_gbps: float | None = None) -> Summary:
    """``link_gbps`` stands in place of what the trace says of its link. Pure."""
    if link_gbps is not None and not link_gbps > 0:
        raise ConfigError(f"--link-gbps: expected more than 0, got {link_gbps}")
    copies: dict[str, list[tuple[Interval, int]]] = defaultdict(list)
    waits: dict[int, list[float]] = defaultdict(list)
    compute: list[Interval] = []
    for event in trace.traceEvents:
        if event.ph != "X" or event.pid != STREAMS:
            continue
        work = msgspec.convert(event.args, Work)
        interval = (event.ts / 1e6, (event.ts + event.dur) / 1e6)
        if event.cat == "link":
            copies[work.direction].append((interval, work.bytes))
        elif event.cat == "wait":
            waits[work.layers[0]].append(event.dur / 1e6)
        elif event.cat == "compute":
            compute.append(interval)
    links = []
    for direction, parts in sorted(copies.items()):
        busy = union(i for i, _ in parts)
        span = busy[-1][1] - busy[0][0]
        links.append(Link(direction, sum(n for _, n in parts), length(busy), span))
    computing = union(compute)
    copying = union(i for parts in copies.values() for i, _ in parts)
    both = length(intersection(copying, computing))
    header = trace.otherData
    return Summary(
        tuple(links),
        tuple(Wait(layer, len(t), sum(t), max(t)) for layer, t in sorted(waits.items())),
        length(computing),
        both / length(copying) if computing and length(copying) > 0 else None,
        header.link_gbps if link_gbps is None else link_gbps,
        header.link_gbps_source if link_gbps is None else "given",
        header,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The points in both of two results of `union`."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def link_lines(summary: Summary) -> list[tuple[str, str]]:
    """(what, how much) of everything but the waits, as text."""
    header, limit = summary.header, summary.link_gbps
    lines = [("recorded on", f"{header.device}, times from {header.clock}")]
    if limit is None:
        lines.append(("the link", "its rate is not known: give it with --link-gbps"))
    else:
        lines.append(("the link", f"{limit:.2f} GB/s, {summary.link_gbps_source or 'as the trace says'}"))
    for link in summary.links:
        share = f", {link.gbps / limit:.1%} of the link" if limit else ""
        lines.append(
            (
                link.direction,
                f"{link.total_bytes:,} bytes, {link.gbps:.2f} GB/s while copying{share}; "
                f"copying {link.busy_s * 1e3:.3f} ms of {link.span_s * 1e3:.3f} ms from first to last",
            )
        )
    if not summary.links:
        lines.append(("copies", "none were recorded"))
    if summary.overlap_share is None:
        lines.append(("overlap", "no layer of a forward ran under kvtransfer.hooks.layerwise"))
    else:
        lines.append(("overlap", f"{summary.overlap_share:.1%} of the copying ran beside compute"))
        total = summary.compute_s + summary.wait_s
        share = f" ({summary.wait_s / total:.1%} of both)" if total > 0 else ""
        lines.append(
            (
                "exposed wait",
                f"{summary.wait_s * 1e3:.3f} ms, beside {summary.compute_s * 1e3:.3f} ms of compute{share}",
            )
        )
    if header.dropped or header.unfinished:
        lines.append(
            (
                "not in the trace",
                f"{header.dropped} dropped (at most {header.limit} are kept), "
                f"{header.unfinished} unfinished when it was closed",
            )
        )
    if header.error:
        lines.append(("cut short by", header.error))
    return lines


def print_summary(summary: Summary, console: Console) -> None:
    """One table of the whole, one line a layer."""
    table = Table(show_header=False, title=f"timeline of {_printable(summary.header.pool)}")
    table.add_column(no_wrap=True)
    table.add_column()
    for what, how_much in link_lines(summary):
        table.add_row(_printable(what), _printable(how_much))
    console.print(table, markup=False)
    if not summary.waits:
        return
    table = Table(title="exposed wait a layer")
    for column in ("layer", "waits", "total ms", "longest ms"):
        table.add_column(column, justify="right")
    for w in summary.waits:
        table.add_row(str(w.layer), str(w.count), f"{w.total_s * 1e3:.3f}", f"{w.longest_s * 1e3:.3f}")
    console.print(table, markup=False)


def write_page(trace: Trace, summary: Summary, file: str | Path) -> None:
    """One HTML file that draws the trace and needs nothing else. ConfigError where it can't be written."""
    template = files("kvtransfer").joinpath("data/timeline.html").read_text(encoding="utf-8")
    rows = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in link_lines(summary))
    waits = "".join(
        f"<tr><td>{w.layer}</td><td>{w.count}</td><td>{w.total_s * 1e3:.3f}</td><td>{w.longest_s * 1e3:.3f}</td></tr>"
        for w in summary.waits
    )
    data = msgspec.json.encode(_drawing(trace)).decode().replace("<", "\\u003c")
    page = (
        template.replace("@TITLE@", html.escape(f"kvtransfer timeline of {summary.header.pool}"))
        .replace("@SUMMARY@", rows)
        .replace("@WAITS@", waits or '<tr><td colspan="4">no layer waited</td></tr>')
        .replace("@DATA@", data)
    )
    try:
        Path(file).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: expected a file in a folder that exists: {error.strerror}") from error


def _drawing(trace: Trace) -> dict[str, Any]:
    """Rows in the order of the viewers, each with its events [ts, dur, name, category, tooltip], and the counters."""
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    ranks: dict[tuple[int, int], int] = {}
    events: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)
    counters: dict[str, list[list[float]]] = defaultdict(list)
    for e in trace.traceEvents:
        key = (e.pid, e.tid)
        if e.ph == "M" and e.name == "process_name":
            processes[e.pid] = str(e.args.get("name", e.pid))
        elif e.ph == "M" and e.name == "thread_name":
            names[key] = str(e.args.get("name", e.tid))
        elif e.ph == "M" and e.name == "thread_sort_index":
            ranks[key] = int(e.args.get("sort_index", 0))
        elif e.ph == "C":
            counters[e.name].append([e.ts, float(e.args.get("bytes", 0))])
        elif e.ph == "X":
            work = msgspec.convert(e.args, Work)
            tip = f"transfer {work.transfer}, {work.direction}, {work.pages:,} pages"
            events[key].append([e.ts, e.dur, e.name, e.cat, tip + (f", {work.bytes:,} bytes" if work.bytes else "")])
    rows = [
        {"process": processes.get(key[0], ""), "name": names.get(key, str(key[1])), "events": events[key]}
        for key in sorted(events, key=lambda k: (k[0], ranks.get(k, 0), k[1]))
    ]
    return {"rows": rows, "counters": [{"name": n, "points": p} for n, p in sorted(counters.items())]}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "·" for c in text)
