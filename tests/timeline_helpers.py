"""What a Chrome trace must be, checked event by event."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
STREAMS, GROUPS, THREADS = 1, 2, 3


def load_trace(file: Path) -> dict[str, Any]:
    """A trace that was checked to be one: by `check_trace`, and nothing but a JSON object."""
    trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    check_trace(trace)
    return trace


def check_trace(trace: dict[str, Any]) -> None:
    """The object format of Chrome's trace events: fields, types, order of time, and that the events of a track nest."""
    assert {"traceEvents", "displayTimeUnit", "otherData"} <= set(trace)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    last = 0.0
    named, used = set(), set()
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for e in trace["traceEvents"]:
        assert isinstance(e["name"], str) and e["name"]
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert isinstance(e["ts"], int | float)
        if e["ph"] == "M":
            assert e["name"] in METADATA
            assert isinstance(e["args"]["name"] if e["name"].endswith("name") else e["args"]["sort_index"], str | int)
            if e["name"] == "thread_name":
                named.add((e["pid"], e["tid"]))
            continue
        assert e["ts"] >= last, "times go back"
        last = e["ts"]
        if e["ph"] == "C":
            assert e["args"] and all(isinstance(v, int | float) and v >= 0 for v in e["args"].values())
            continue
        assert e["ph"] == "X" and e["dur"] >= 0 and isinstance(e["cat"], str)
        tracks[e["pid"], e["tid"]].append(e)
        used.add((e["pid"], e["tid"]))
    assert used == named, "every track has a name"
    for events in tracks.values():
        ends: list[int] = []
        for e in events:
            start, stop = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or stop <= ends[-1], f"{e} crosses the end of what it lies in"
            ends.append(stop)


def complete(trace: dict[str, Any], pid: int, **fields: Any) -> list[dict[str, Any]]:
    """The complete events of a process whose fields (or arguments) have these values."""
    return [
        e for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] == pid and all(e.get(k, e["args"].get(k)) == v for k, v in fields.items())
    ]  # fmt: skip


def counter(trace: dict[str, Any], name: str) -> list[int]:
    """The values of a counter, in order."""
    return [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == name]


def row_names(trace: dict[str, Any], pid: int) -> list[str]:
    """Names of the tracks of a process, in the order in which viewers show them."""
    rank = {e["tid"]: e["args"]["sort_index"] for e in trace["traceEvents"]
            if e["ph"] == "M" and e["pid"] == pid and e["name"] == "thread_sort_index"}  # fmt: skip
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"]
             if e["ph"] == "M" and e["pid"] == pid and e["name"] == "thread_name"}  # fmt: skip
    return [names[tid] for tid in sorted(names, key=lambda tid: rank[tid])]
