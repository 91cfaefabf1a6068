"""Builds the NVTX probe, runs `nvtx_work.py` under it, and reads what it heard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@dataclass
class Range:
    """One range with what was pushed inside it, and the names it lies in."""

    name: str
    category: str
    payload: Any
    outer: tuple[str, ...]
    inner: list[Range] = field(default_factory=list)


def build_probe(folder: Path, *flags: str) -> Path:
    """The probe as a shared library; skips the test without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "probe.so"
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, "-o", str(library)]
    subprocess.run([*command, str(HERE / "nvtx_probe.c"), "-lpthread"], check=True, timeout=60)
    return library


def run_work(folder: Path, device: str, *, library: Path | None, nvtx: str = "1") -> tuple[str, Path]:
    """Run the transfers with KVTRANSFER_NVTX=``nvtx``; (their output, the file the probe wrote to, if it did)."""
    heard = folder / "heard.jsonl"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NVTX_", "KVTRANSFER_"))}
    path = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"KVTRANSFER_NVTX": nvtx, "PYTHONPATH": os.pathsep.join(path)}
    if library is not None:
        environment |= {"NVTX_INJECTION64_PATH": str(library), "NVTX_PROBE_OUT": str(heard)}
    done = subprocess.run(
        [sys.executable, str(HERE / "nvtx_work.py"), device],
        capture_output=True, text=True, env=environment, cwd=HERE.parent, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, heard


def ranges(heard: Path, domain: str = "kvtransfer") -> list[Range]:
    """All ranges of the domain. Fails where one is popped that was not pushed, or is left open."""
    open_: dict[int, list[Range]] = defaultdict(list)
    found = []
    for line in heard.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["domain"] != domain:
            continue
        stack = open_[event["thread"]]
        if event["op"] == "pop":
            assert stack, "popped a range that was never pushed"
            stack.pop()
            continue
        assert event["op"] == "push", event
        made = Range(event["name"], event["category"], event.get("payload"), tuple(r.name for r in stack))
        if stack:
            stack[-1].inner.append(made)
        stack.append(made)
        found.append(made)
    assert not any(open_.values()), f"left open: {open_}"
    return found
