"""The cache in two processes, a thousand requests with real transfers on the GPU: every byte is compared, and the
directory's process never has anything of CUDA. The same in small on CPU tensors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_trace import Day, Worker, command

ROOT = Path(__file__).resolve().parent.parent
TRACE = os.environ.get("REPLAY_TRACE", "")  # a file of requests


def served(day: Day, limit_s: float) -> dict[str, Any]:
    own = [str(ROOT / name) for name in ("", "tests", "bench")]
    paths = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command(day), capture_output=True, text=True, timeout=limit_s, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def check(day: Day, out: dict[str, Any]) -> None:
    assert out["errors"] == [] and out["requests"] == day.requests
    assert out["wrong_bytes"] == 0 and out["guards"] == 0 and out["failed_loads"] == 0
    assert out["loaded_pages"] > day.requests / 2
    assert out["disk_read_pages"] > 0 and out["evicted_pages"] > 0  # round the whole way, and back
    assert sum(out["by_tier"].values()) == out["hit_tokens"] >= out["loaded_pages"] * day.page_size
    assert out["locks"] == 0 and out["dropped"] == 0
    assert not out["torch_here"] and not out["cuda_here"]


def test_the_comparison_sees_one_wrong_byte(tmp_path: Path) -> None:
    worker = Worker(Day(str(tmp_path), pages=8))
    try:
        assert worker.use(0, [], [], [1, 2], [50, 60]) == 0
        assert worker.use(0, [1, 2], [50, 60], [], []) == 0
        worker.pool.view(2, 1, torch.uint8)[2, 5, 1, 7] ^= 1
        assert worker.use(0, [1, 2], [50, 60], [], []) == 1
        assert worker.use(0, [1], [51], [], []) > 0
    finally:
        worker.close()


def test_a_day_in_small_on_the_cpu(tmp_path: Path) -> None:
    day = Day(str(tmp_path), requests=80, host_pages=60, disk_pages=300)
    out = served(day, 120.0)
    check(day, out)
    assert not out["mover_on_gpu"]


@pytest.mark.gpu
@pytest.mark.timeout(580)
@pytest.mark.parametrize("layout", ["vllm.LBNHC", "sglang.layer_first"])
def test_a_thousand_requests_on_the_gpu(tmp_path: Path, layout: str) -> None:
    """Pages of 256 KiB over 8 layers; requests of the trace that REPLAY_TRACE names, else made up in its shape."""
    day = Day(
        str(tmp_path),
        "cuda",
        requests=1000,
        trace=TRACE,
        layers=8,
        heads=4,
        head_dim=128,
        page_size=16,
        pages=1024,
        host_pages=2000 if TRACE else 500,
        disk_pages=8000,
        layout=layout,
    )
    out = served(day, 560.0)
    check(day, out)
    assert out["mover_on_gpu"]
