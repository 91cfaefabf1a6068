"""`kvtransfer info`: what is said about a GPU, its link, memory, and what would be slow; and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replace_struct

from kvtransfer import info as info_module
from kvtransfer.device_info import DeviceInfo, PcieCounters
from kvtransfer.info import gpu_lines, link_lines, machine_report, memory_lines, queue_line, trained_lower
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import load_profile, shipped_profile
from kvtransfer.tiers.sizing import Budget, MemoryLimits

GPU = DeviceInfo("NVIDIA H200", "GPU-1", "580.1", 5, 16, 63.0, 0, "0000:01:00.0", 5, 16, 5)
SILENT = PcieCounters(None, None, None)


def test_a_sound_link_has_no_warning() -> None:
    slow: list[str] = []
    lines = list(gpu_lines(0, replace(GPU, numa_node=None), PcieCounters(1.5, 0.25, 0), slow, {0}))
    assert lines == [
        "cuda:0 NVIDIA H200, driver 580.1, at 0000:01:00.0, NUMA node not reported",
        "  PCIe 5.0 x16 at most (63.0 GB/s in theory); now 5.0 x16",
        "  PCIe traffic of the last 20 ms: to the GPU 1.50 GB/s, from it 0.25 GB/s",
        "  PCIe replays: 0",
    ]
    assert not slow


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        (
            replace(GPU, pcie_width_now=8),
            "cuda:3: the link trained to x8 and could do x16: at most 31.5 GB/s",
        ),
        (replace(GPU, pcie_gen=4), "cuda:3: the GPU could do PCIe 5.0 and its slot gives 4.0"),
        (
            replace(GPU, pcie_gen_now=1),
            "cuda:3: the link runs at generation 1 of 5 at this moment; that is usual",
        ),
    ],
)
def test_a_link_that_trained_lower_is_named(gpu: DeviceInfo, says: str) -> None:
    assert any(line.startswith(says) for line in trained_lower(3, gpu))


def test_a_hidden_link_and_replays() -> None:
    slow: list[str] = []
    hidden = replace(GPU, pcie_gen=None, pcie_width=None, pcie_theoretical_gbps=None, numa_node=None)
    lines = list(gpu_lines(0, hidden, PcieCounters(None, None, 7), slow, {0}))
    assert lines[1] == "  PCIe link not reported (virtual machines often hide it)"
    assert "7 PCIe packets were sent again" in slow[0]
    assert len(list(gpu_lines(0, hidden, SILENT, slow, {0}))) == 2


def test_a_process_far_from_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "_node_cpus", lambda node: {0, 1})
    slow: list[str] = []
    list(gpu_lines(0, GPU, SILENT, slow, {2, 3}))
    assert slow and "numactl --cpunodebind=0" in slow[0]
    slow.clear()
    list(gpu_lines(0, GPU, SILENT, slow, {1, 2}))
    assert not slow


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "CUDA_DEVICE_MAX_CONNECTIONS is not set (8)"),
        ("32", "CUDA_DEVICE_MAX_CONNECTIONS is 32"),
        ("0", "CUDA_DEVICE_MAX_CONNECTIONS is 0: where"),
        ("", "CUDA_DEVICE_MAX_CONNECTIONS is empty: where"),
        ("1", "CUDA_DEVICE_MAX_CONNECTIONS=1: relayouts wait in one queue"),
        ("many", "CUDA_DEVICE_MAX_CONNECTIONS is many"),
        ("2", ""),
        ("4", ""),
    ],
)
def test_hardware_queues(value: str | None, says: str) -> None:
    slow: list[str] = []
    line = queue_line(value, slow)
    assert line == f"CUDA_DEVICE_MAX_CONNECTIONS: {'not set' if value is None else value or 'empty'}"
    assert len(slow) == bool(says) and all(says in why for why in slow)


def test_cpus_of_a_node(tmp_path: Path) -> None:
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-2,8,10-11\n")
    assert info_module._node_cpus(1, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert info_module._node_cpus(7, tmp_path) == set()


def test_the_profile_in_use(tmp_path: Path) -> None:
    slow: list[str] = []
    lines = list(link_lines(load_profile("cpu", folder=tmp_path), slow))
    assert lines[0].startswith("link profile: shipped figures of CPU")
    assert "rests on figures of another machine: nothing was measured" in slow[0]
    slow.clear()
    measured = replace_struct(shipped_profile(), source="measured")
    peaks = measured.peak_gbps
    assert (
        f"one large copy, GB/s: h2d {peaks['h2d']:.1f}, d2h {peaks['d2h']:.1f}" in list(link_lines(measured, slow))[1]
        and not slow
    )
    half = replace_struct(measured, peak_gbps={"h2d": 25.0, "d2h": 26.0})
    list(link_lines(half, slow))
    assert "the link was measured at 25.0 GB/s of 63.0 in theory" in slow[0]


def test_memory() -> None:
    slow: list[str] = []
    limits = MemoryLimits(
        (Budget("available memory", 64 << 30), Budget("cgroup limit (x)", 2 << 30)), memlock_bytes=8 << 20
    )
    lines = list(memory_lines(limits, slow))
    assert lines == [
        "memory left: 64.0 GiB, available memory",
        "memory left: 2.0 GiB, cgroup limit (x)",
        "memlock: 8 MiB (CUDA's registration is not charged to it)",
    ]
    assert "a host tier finds 2.0 GiB (cgroup limit (x))" in slow[0]
    slow.clear()
    assert list(memory_lines(MemoryLimits((Budget("available memory", 64 << 30),)), slow))[1:] == [
        "cgroup limit: none",
        "memlock: no limit",
    ]
    assert not slow


def test_huge_pages_that_are_off(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 99999999 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB\n")
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always madvise [never]\n")
    report = machine_report(proc=tmp_path, sys=tmp_path, folder=tmp_path)
    assert "huge pages: 0 of 0 reserved pages of 2 MiB free; transparent: always madvise [never]" in report.text()
    assert any(line.startswith("pinning: transparent huge pages are off") for line in report.slow)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    text = machine_report(folder=tmp_path).text()
    assert "GPU: none that PyTorch sees" in text and "the CPU path is used" in text
    assert "what would be slow, and why:\n" in text and "without a GPU the engine works on CPU tensors" in text
    assert "link profile: shipped figures of CPU" in text


def test_a_gpu_that_nvml_does_not_describe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hidden(device: object) -> DeviceInfo:
        raise ConfigError("NVML did not start")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(info_module, "device_info", hidden)
    monkeypatch.setattr("kvtransfer.link.device_info", hidden)
    text = machine_report(folder=tmp_path).text()
    assert "cuda:0 NVIDIA H200: NVML did not start" in text and "shipped figures of NVIDIA H200" in text


def test_a_gpu_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(info_module, "device_info", lambda device: GPU)
    monkeypatch.setattr(info_module, "pcie_counters", lambda device: PcieCounters(0.0, 0.0, 0))
    monkeypatch.setattr("kvtransfer.link.device_info", lambda device: GPU)
    text = machine_report(folder=tmp_path).text()
    assert "cuda:0 NVIDIA H200" in text and "cuda:1 NVIDIA H200" in text and "run `kvtransfer tune`" in text


@pytest.mark.gpu
def test_the_real_machine() -> None:
    text = machine_report().text()
    print(text)
    assert torch.cuda.get_device_name(0) in text and "link profile: " in text
