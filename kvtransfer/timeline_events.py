"""From recorded spans to the events of a Chrome trace (the JSON that Perfetto and chrome://tracing open). Pure.

Three processes: the streams (the caller's compute stream and the engine's lanes), the layer groups, and the threads.
Each event is complete ("X"); on every track they nest, as the viewers want: where two overlap, the second goes to
a track of its own. Bytes moved and bytes in flight are counters ("C").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvtransfer.kernels.events import Span
from kvtransfer.lanes import LANES

FORMAT = 1
STREAMS, GROUPS, THREADS = 1, 2, 3  # process ids
JITTER_NS = 1_000  # events of one stream are read against different anchors; CUDA's own resolution is 500 ns

Interval = tuple[float, float]
Row = tuple[str, tuple[Any, ...]]  # its name, and what tells it from others of the name and gives its place


@dataclass(slots=True)
class Record:
    """One span that ended. Times are (begin, end) in seconds since the timeline began.

    host       on the thread that did the work
    on_stream  on the span's stream, or for a row without a stream on the thread; None where it is not known
    group      number of the chunk it belongs to; 0 for none
    """

    span: Span
    thread: str
    group: int
    host: Interval
    on_stream: Interval | None


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says of itself, under ``otherData``."""

    pool: str
    device: str
    clock: str
    limit: int
    dropped: int
    unfinished: int
    link_gbps: float | None = None
    link_gbps_source: str = ""
    error: str = ""
    kvtransfer_timeline: int = FORMAT


def trace_of(records: Iterable[Record], header: Header) -> dict[str, Any]:
    """The trace as one object, to be encoded as JSON. Events come in the order of time, metadata first."""
    tracks = _Tracks(header.pool)
    events: list[dict[str, Any]] = []
    records = list(records)
    for start, stop, _, record in sorted((*_ns(r.on_stream), i, r) for i, r in enumerate(records) if r.on_stream):
        events.append(tracks.event(STREAMS, _row(record), record.span, start, stop, _category(record.span)))
    groups = list(_groups(records))
    for start, stop, span in groups:
        what = "layer" if span.layers[1] - span.layers[0] == 1 else "layers"
        row = (f"{span.direction} {_numbered(what, span.layers)}", (span.direction, *span.layers))
        events.append(tracks.event(GROUPS, row, span, start, stop, "group"))
    hosts = sorted(((*_ns(r.host), i, r) for i, r in enumerate(records)), key=lambda e: (e[0], -e[1]))
    for start, stop, _, record in hosts:
        events.append(tracks.event(THREADS, (record.thread, ()), record.span, start, stop, "thread"))
    events += _counters(records, groups)
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return {"traceEvents": [*tracks.metadata(), *events], "displayTimeUnit": "ms", "otherData": header}


def is_link(span: Span) -> bool:
    """Whether the span's bytes cross the link between pool and host (on a CPU: what stands for it)."""
    if span.row == "compute":
        return False
    return span.name in ("copy", "strided", "mapped") or (span.name == "relayout" and span.row.startswith("copy_"))


def _category(span: Span) -> str:
    if span.row == "compute":
        return "wait" if span.name == "wait_layer" else "compute"
    return "link" if is_link(span) else "kernel"


def _row(record: Record) -> Row:
    """Row of a stream: lanes by name, the caller's streams one by one before them."""
    span = record.span
    if span.row != "compute":
        return span.row, (1 + LANES.index(span.row) if span.row in LANES else 9, "")
    if span.stream is None:
        return "compute", (0, record.thread)
    return "compute", (0, hex(getattr(span.stream, "cuda_stream", id(span.stream))))


def _ns(interval: Interval | None) -> tuple[int, int]:
    assert interval is not None
    start, stop = round(interval[0] * 1e9), round(interval[1] * 1e9)
    return start, max(start, stop)


def _groups(records: Iterable[Record]) -> Iterator[tuple[int, int, Span]]:
    """(begin, end, span) of each chunk: from the begin of its first stage on a lane to the end of its last."""
    stages: dict[int, list[Record]] = {}
    for record in records:
        if record.group and record.on_stream is not None and record.span.row != "compute":
            stages.setdefault(record.group, []).append(record)
    found = []
    for group, parts in stages.items():
        times = [_ns(r.on_stream) for r in parts]
        found.append((min(t[0] for t in times), max(t[1] for t in times), group, parts[0].span))
    for start, stop, _, span in sorted(found, key=lambda g: g[:3]):
        yield start, stop, replace(span, name="layers", row="", stream=None)


def _counters(records: list[Record], groups: list[tuple[int, int, Span]]) -> Iterator[dict[str, Any]]:
    moves = [
        (_ns(r.on_stream)[1], r.span.direction, r.span.total_bytes) for r in records if r.on_stream and is_link(r.span)
    ]
    yield from _steps("bytes moved", moves)
    flights = [(start, s.direction, s.total_bytes) for start, _, s in groups]
    flights += [(stop, s.direction, -s.total_bytes) for _, stop, s in groups]
    yield from _steps("bytes in flight", flights)


def _steps(name: str, changes: list[tuple[int, str, int]]) -> Iterator[dict[str, Any]]:
    """One counter track for each direction. What changes at one moment is one step."""
    for direction in sorted({d for _, d, _ in changes}):
        total, at = 0, {}
        for ns, _, change in sorted(c for c in changes if c[1] == direction):
            total += change
            at[ns] = total
        for ns, value in at.items():
            yield {"ph": "C", "name": f"{name}: {direction}", "pid": STREAMS, "tid": 0, "ts": ns / 1e3,
                   "args": {"bytes": value}}  # fmt: skip


class _Tracks:
    """Gives each event a track (tid) of its row on which it nests. Events of a row come in the order of their begin."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._names: dict[tuple[int, int], str] = {}
        self._places: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._rows: dict[tuple[int, Row], list[tuple[int, list[int]]]] = {}  # tid, ends of what is open

    def event(self, pid: int, row: Row, span: Span, start: int, stop: int, category: str) -> dict[str, Any]:
        tid, start = self._place(pid, row, start, stop)
        args = {
            "transfer": span.transfer, "direction": span.direction, "layers": list(span.layers),
            "pages": span.pages, "bytes": span.total_bytes,
        }  # fmt: skip
        return {
            "ph": "X", "name": _numbered(span.name, span.layers), "cat": category, "pid": pid, "tid": tid,
            "ts": start / 1e3, "dur": max(0, stop - start) / 1e3, "args": args,
        }  # fmt: skip

    def _place(self, pid: int, row: Row, start: int, stop: int) -> tuple[int, int]:
        tracks = self._rows.setdefault((pid, row), [])
        for tid, ends in tracks:
            while ends and ends[-1] <= start:
                ends.pop()
            if pid == STREAMS and ends and ends[-1] - start <= JITTER_NS and stop > ends[-1]:
                start = ends[-1]
                ends.pop()
            if not ends or ends[-1] >= stop:
                ends.append(stop)
                return tid, start
        tid = len(self._names) + 1
        same = sum(p == pid and name.split(" #")[0] == row[0] for (p, _), name in self._names.items())
        self._names[pid, tid] = row[0] if same == 0 else f"{row[0]} #{same + 1}"
        self._places[pid, tid] = (*row[1], tid)
        tracks.append((tid, [stop]))
        return tid, start

    def metadata(self) -> Iterator[dict[str, Any]]:
        for pid, what in ((STREAMS, "streams"), (GROUPS, "layer groups"), (THREADS, "threads")):
            yield _meta("process_name", pid, 0, {"name": f"{self._pool}: {what}"})
            yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
        for rank, (pid, tid) in enumerate(sorted(self._names, key=lambda key: (key[0], self._places[key]))):
            yield _meta("thread_name", pid, tid, {"name": self._names[pid, tid]})
            yield _meta("thread_sort_index", pid, tid, {"sort_index": rank})


def _numbered(what: str, layers: tuple[int, int]) -> str:
    first, last = layers[0], layers[1] - 1
    return f"{what} {first}" if last == first else f"{what} {first}-{last}" if last > first else what


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
