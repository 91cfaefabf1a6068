"""Device information against a fake NVML and a fake torch.cuda, and without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.device_info import DeviceInfo, PcieCounters, device_info, pcie_counters, theoretical_pcie_gbps
from kvtransfer.kernels.errors import ConfigError


class FakeNvml:
    """Two GPUs, of which CUDA_VISIBLE_DEVICES shows only the second; counts starts and stops."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self) -> None:
        self.open = 0
        self.missing: dict[str, type[Exception]] = {}
        self.gpus = {"00000000:17:00.0": "GPU-aaaa", "00000000:3B:00.0": "GPU-bbbb"}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if name in self.missing:
                raise self.missing[name](f"{name} failed")
            return getattr(self, "_" + name)(*arguments)

        return call

    def _nvmlInit(self) -> None:
        self.open += 1

    def _nvmlShutdown(self) -> None:
        self.open -= 1

    def _nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> str:
        return {key.lower(): key for key in self.gpus}[bus.decode().lower()]

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return {value: key for key, value in self.gpus.items()}[uuid.decode()]

    def _nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=handle.encode())

    def _nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def _nvmlDeviceGetUUID(self, handle: str) -> str:
        return self.gpus[handle]

    def _nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def _nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return 1

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 8

    def _nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: str) -> int:
        return 6

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def _nvmlDeviceGetPcieThroughput(self, handle: str, kind: int) -> int:
        return (2_000_000, 50_000_000)[kind]

    def _nvmlDeviceGetPcieReplayCounter(self, handle: str) -> int:
        return 3


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0, uuid="bbbb")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return fake


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_the_visible_gpu_is_found_by_its_address(nvml: FakeNvml, tmp_path: Path, device: Any) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    assert device_info(device, sysfs=tmp_path) == DeviceInfo(
        name="NVIDIA H200",
        uuid="GPU-bbbb",
        driver="580.159.04",
        pcie_gen=5,
        pcie_width=16,
        pcie_theoretical_gbps=theoretical_pcie_gbps(5, 16),
        numa_node=1,
        pci_bus_id="0000:3b:00.0",
        pcie_gen_now=1,
        pcie_width_now=8,
        pcie_gen_gpu=6,
    )
    assert nvml.open == 0


def test_counters(nvml: FakeNvml) -> None:
    assert pcie_counters(0) == PcieCounters(rx_gbps=50.0, tx_gbps=2.0, replays=3)
    nvml.missing["nvmlDeviceGetPcieThroughput"] = nvml.NVMLError_NotSupported
    assert pcie_counters("cuda:0") == PcieCounters(None, None, 3)
    nvml.missing["nvmlDeviceGetPcieReplayCounter"] = nvml.NVMLError
    with pytest.raises(ConfigError, match="could not read its PCIe counters"):
        pcie_counters(0)
    assert nvml.open == 0
    with pytest.raises(ConfigError, match=r"index below 1 \(visible GPUs\), got 1"):
        pcie_counters(1)


def test_by_uuid_where_torch_tells_no_address(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="aaaa"))
    assert device_info(0, sysfs=tmp_path).pci_bus_id == "0000:17:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    with pytest.raises(ConfigError, match="neither PCI address nor UUID"):
        device_info(0, sysfs=tmp_path)
    assert nvml.open == 0


def test_what_a_machine_hides_is_none(nvml: FakeNvml, tmp_path: Path) -> None:
    for name in ("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"):
        nvml.missing[name] = nvml.NVMLError_NotSupported
    info = device_info(0, sysfs=tmp_path)
    assert (info.pcie_gen, info.pcie_width, info.pcie_theoretical_gbps, info.numa_node) == (None, None, None, None)
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert device_info(0, sysfs=tmp_path).numa_node is None


def test_nvml_errors_are_mapped_and_nvml_is_shut_down(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.missing["nvmlDeviceGetUUID"] = nvml.NVMLError
    with pytest.raises(ConfigError, match="could not describe it") as caught:
        device_info(0, sysfs=tmp_path)
    assert isinstance(caught.value.__cause__, nvml.NVMLError) and nvml.open == 0
    nvml.missing["nvmlInit"] = nvml.NVMLError
    with pytest.raises(ConfigError, match="NVML did not start") as caught:
        device_info(0, sysfs=tmp_path)
    assert isinstance(caught.value.__cause__, nvml.NVMLError) and nvml.open == 0


def test_bad_devices(nvml: FakeNvml) -> None:
    with pytest.raises(ConfigError, match=r"index below 1 \(visible GPUs\), got 1"):
        device_info(1)
    with pytest.raises(ConfigError, match="expected a CUDA device, got 'cpu'"):
        device_info("cpu")


def test_without_pynvml(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        device_info(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", [0, "cuda", torch.device("cuda:3")])
def test_without_a_gpu(device: Any) -> None:
    with pytest.raises(ConfigError, match="expected a CUDA GPU"):
        device_info(device)


def test_theoretical_rates() -> None:
    assert theoretical_pcie_gbps(1, 16) == 4.0
    assert theoretical_pcie_gbps(3, 16) == pytest.approx(15.75, abs=0.01)
    assert theoretical_pcie_gbps(4, 8) == pytest.approx(15.75, abs=0.01)
    assert theoretical_pcie_gbps(5, 16) == pytest.approx(63.0, abs=0.1)
    assert theoretical_pcie_gbps(6, 16) == 121.0
    for gen, width in ((None, 16), (5, None), (0, 16), (99, 16), (5, 0)):
        assert theoretical_pcie_gbps(gen, width) is None


@pytest.mark.gpu
def test_the_real_gpu() -> None:
    info = device_info(torch.device("cuda", 0))
    print(info, pcie_counters(0))
    assert info.name == torch.cuda.get_device_name(0)
    assert info.uuid.startswith("GPU-") and info.driver
    assert info.uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(0).uuid)
    assert info.pcie_theoretical_gbps is None or info.pcie_theoretical_gbps > 1
