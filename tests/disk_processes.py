"""Processes that own disk tiers, for tests: forked from one that has imported everything, since torch takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np


class Nursery:
    """Forks children that run a function of this module: ``run(name, out, **arguments)``; ``out`` gets their lines."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:0] = {sys.path!r}; import disk_processes; disk_processes.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def run(self, name: str, out: Path, **arguments: Any) -> int:
        """Start a child; its process id."""
        return int(self._ask({"name": name, "out": str(out), "arguments": arguments}))

    def wait(self, pid: int) -> int:
        """Wait for a child's end; its exit status, as `subprocess` gives it."""
        return int(self._ask({"wait": pid}))

    def _ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """The nursery's own loop."""
    import disk_helpers  # noqa: F401  (before anybody is forked)

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        code = 1
        try:
            out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            globals()[request["name"]](out, **request["arguments"])
            code = 0
        except BaseException:
            os.write(out, traceback.format_exc().encode())
        finally:
            os._exit(code)


def lines(out: Path) -> list[str]:
    """What a child has written so far, whole lines."""
    text = out.read_text() if out.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def share_of_four(out: int, path: str, rank: int, again: bool) -> None:
    """One of four owners of a path: stores 50 pages and reads them, or finds them again."""
    from disk_helpers import SPACE, TINY, empty, image, tiny_record

    from kvtransfer.tiers.base import PageStatus
    from kvtransfer.tiers.disk import DiskTier
    from kvtransfer.tiers.disk_folder import Place

    rng = np.random.default_rng(rank)
    keys = [rng.bytes(32) for _ in range(50)]
    records = [tiny_record(key, rng) for key in keys]
    with DiskTier(path, TINY, namespace=SPACE, capacity_bytes=4 << 20, owners=4, place=Place(tp=rank)) as tier:
        os.write(out, f"share {tier.stats().capacity_bytes}\n".encode())
        if not again:
            tier.put_from(keys, records).result(30).require()
        while not Path(path, "go").exists():
            time.sleep(0.01)
        got = [empty() for _ in keys]
        tier.get_into(keys, got).result(30).require()
        assert [image(a) for a in got] == [image(b) for b in records]
        others = [np.random.default_rng((rank + 1) % 4).bytes(32)]
        assert tier.lookup(others).result(30).statuses == (PageStatus.MISS,)
    os.write(out, b"done\n")


def write_for_ever(out: int, path: str, seed: int, sync: Any) -> None:
    """Puts and removes pages that follow from ``seed``, and writes down what was acknowledged, until it is killed."""
    from disk_helpers import SPACE, TINY, TINY_RECORD, tiny_record

    from kvtransfer.tiers.disk import DiskTier

    tier = DiskTier(
        path,
        TINY,
        namespace=SPACE,
        capacity_pages=4000,
        sync=sync,
        file_bytes=100 * TINY_RECORD,
    )
    number = 0
    while True:
        keys = [page_key(seed, number + i) for i in range(8)]
        records = [tiny_record(key, np.random.default_rng(list(key))) for key in keys]
        os.write(out, f"try {number}\n".encode())
        tier.put_from(keys, records).result(30).require()
        os.write(out, f"put {number}\n".encode())
        if number % 40 == 32:
            tier.remove(keys[:4]).result(30).require()
            os.write(out, f"remove {number}\n".encode())
        number += 8


def page_key(seed: int, number: int) -> bytes:
    """The key of a page that `write_for_ever` puts."""
    return seed.to_bytes(8, "big") + number.to_bytes(24, "big")


def kill(pid: int) -> None:
    """As kill -9 does."""
    os.kill(pid, signal.SIGKILL)
