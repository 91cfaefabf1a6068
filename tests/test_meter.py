"""The GPU meter's runs move what they say: its copies and kernels on CPU tensors, under Triton's interpreter."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HAS_GPU

from kvtransfer import meter as meter_module
from kvtransfer.dma import TorchCopyEngine
from kvtransfer.meter import CpuMeter, CudaMeter

REGION = 64 << 10
STREAM: Any = SimpleNamespace(cuda_stream=0)
NO_STREAM: Any = None

pytestmark = pytest.mark.skipif(HAS_GPU, reason="stands in for a GPU where there is none")


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> CudaMeter:
    monkeypatch.setattr(meter_module, "GPU_REGION_BYTES", REGION)
    made = object.__new__(CudaMeter)
    made.device = torch.device("cpu")
    made.on_device = {way: torch.randint(0, 256, (REGION,), dtype=torch.uint8) for way in ("h2d", "d2h")}
    made.on_host = {way: torch.randint(0, 256, (REGION,), dtype=torch.uint8) for way in ("h2d", "d2h")}
    copier: Any = TorchCopyEngine()
    for memory in (*made.on_device.values(), *made.on_host.values()):
        copier.register(memory)
    made.copier = copier
    return made


def pieces(memory: torch.Tensor, piece: int) -> list[bytes]:
    return [row.tobytes() for row in memory.numpy().reshape(-1, piece)]


def changed(before: torch.Tensor, after: torch.Tensor, piece: int) -> list[int]:
    rows = (before != after).numpy().reshape(-1, piece).any(axis=1)
    return np.flatnonzero(rows).tolist()


@pytest.mark.parametrize("way", ["h2d", "d2h"])
@pytest.mark.parametrize(
    ("path", "piece", "count"),
    [("staged", 512, 40), ("staged", 4096, 8), ("strided", 1024, 4), ("strided", 16384, 4), ("mapped", 512, 64)],
)
def test_runs_move_random_pieces(meter: CudaMeter, path: str, way: str, piece: int, count: int) -> None:
    source, target = meter._ends(way)
    held, before = source.clone(), target.clone()
    meter._work(path, way, piece, count, 2)(NO_STREAM if path == "mapped" else STREAM)
    assert torch.equal(source, held)
    moved = changed(before, target, piece)
    calls = meter._calls(piece, count) if path == "strided" else 1
    assert len(moved) == count * calls
    have = set(pieces(source, piece))
    assert all(pieces(target, piece)[at] in have for at in moved), "whole pieces"
    if path == "staged":
        assert (moved == list(range(count))) == (way == "h2d"), "packed on the device, random on the host"


def test_the_relayout_moves_every_byte(meter: CudaMeter) -> None:
    nbytes, enqueue = meter._relayout(512)
    enqueue(NO_STREAM)
    assert nbytes == REGION
    assert sorted(pieces(meter.on_device["d2h"], 512)) == sorted(pieces(meter.on_device["h2d"], 512))


def test_the_cpu_meter_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "CPU_REGION_BYTES", REGION)
    monkeypatch.setattr(CpuMeter, "largest_bytes", REGION // 2)
    cpu = CpuMeter()
    for path in cpu.paths:
        source, target = cpu._way("d2h")
        before = target.clone()
        assert cpu.transfer(path, "d2h", 512, 32, 1)() > 0
        moved = changed(before, target, 512)
        assert len(moved) == 32 and {pieces(target, 512)[at] for at in moved} <= set(pieces(source, 512))
    assert cpu.cpu_us("descriptor") > 0
    with pytest.raises(ValueError, match="expected one of descriptor, call, launch, got 'tape'"):
        cpu.cpu_us("tape")


def test_an_interrupt_ends_the_thread_beside_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies in PyTorch's C++: left to the end of the interpreter it aborts the process."""
    monkeypatch.setattr(meter_module, "CPU_REGION_BYTES", REGION)
    monkeypatch.setattr(CpuMeter, "largest_bytes", REGION // 2)
    monkeypatch.setattr(CpuMeter, "_work", lambda *a: lambda: time.sleep(0.001))
    cpu, before = CpuMeter(), threading.active_count()

    def interrupted(*_: object) -> None:
        if threading.active_count() > before:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "mm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpu.gemm_kept("cpu", "h2d", 0, 0.01)
    assert threading.active_count() == before
