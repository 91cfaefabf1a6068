"""What a GPU is and how it is attached, by NVML: name, driver, PCIe link, NUMA node. Nothing happens at import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtransfer.kernels.errors import ConfigError

# GB/s (1e9 bytes) a lane, one direction, after line coding: 8b/10b, 128b/130b, from 6.0 on FLIT (242 of 256 bytes).
_LANE_GBPS = {
    1: 2.5 * 8 / 10 / 8,
    2: 5.0 * 8 / 10 / 8,
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 242 / 256 / 8,
    7: 128.0 * 242 / 256 / 8,
}


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU. ``None`` where the driver or the machine does not tell (virtual machines often hide the link).

    pcie_gen, pcie_width    the most that this GPU and its slot can do together: an idle link is slower for a while
    pcie_gen_now, pcie_width_now  how the link runs at this moment; an idle GPU may lower the generation, not the width
    pcie_gen_gpu            the most that the GPU could do in another slot
    pcie_theoretical_gbps   GB/s in one direction after line coding; measured copies reach 85-90 % of it
    numa_node               node of the CPUs next to the GPU, for pinned memory
    pci_bus_id              "0000:3b:00.0", as in /sys/bus/pci/devices
    """

    name: str
    uuid: str
    driver: str
    pcie_gen: int | None
    pcie_width: int | None
    pcie_theoretical_gbps: float | None
    numa_node: int | None
    pci_bus_id: str
    pcie_gen_now: int | None = None
    pcie_width_now: int | None = None
    pcie_gen_gpu: int | None = None


@dataclass(frozen=True)
class PcieCounters:
    """NVML's counters of one GPU; None where it does not tell. Rates are over NVML's own window of 20 ms, in GB/s as
    the GPU sees them: ``rx`` towards it. ``replays`` counts packets sent again since the driver was loaded."""

    rx_gbps: float | None
    tx_gbps: float | None
    replays: int | None


def theoretical_pcie_gbps(gen: int | None, width: int | None) -> float | None:
    """GB/s in one direction of a link of ``width`` lanes; None for an unknown generation or width."""
    if gen not in _LANE_GBPS or not width or width < 0:
        return None
    return _LANE_GBPS[gen] * width


def device_info(device: int | str | torch.device, *, sysfs: Path = Path("/sys/bus/pci/devices")) -> DeviceInfo:
    """The GPU that torch calls ``device`` (an index among the visible ones, "cuda:1", or a torch.device).

    NVML numbers all GPUs of the machine, CUDA only the visible ones and in its own order, so the GPU is found by its
    PCI address, or by its UUID where torch does not tell the address. ConfigError without a GPU, a driver or NVML.
    """
    index, properties = _properties(device)
    with _nvml() as nvml:
        try:
            handle = _handle(nvml, properties)
            bus_id = _normal_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            gen = _optional(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)))
            width = _optional(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)))
            return DeviceInfo(
                name=_text(nvml.nvmlDeviceGetName(handle)),
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                driver=_text(nvml.nvmlSystemGetDriverVersion()),
                pcie_gen=gen or None,
                pcie_width=width or None,
                pcie_theoretical_gbps=theoretical_pcie_gbps(gen, width),
                numa_node=_numa_node(sysfs / bus_id / "numa_node"),
                pci_bus_id=bus_id,
                pcie_gen_now=_optional(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))) or None,
                pcie_width_now=_optional(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))) or None,
                pcie_gen_gpu=_optional(nvml, lambda: int(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle))) or None,
            )
        except nvml.NVMLError as error:
            raise ConfigError(f"device {index}: NVML could not describe it: {error}") from error


def pcie_counters(device: int | str | torch.device) -> PcieCounters:
    """What NVML counts on the GPU's link at this moment. Takes 40 ms. ConfigError as in `device_info`."""
    index, properties = _properties(device)
    with _nvml() as nvml:
        try:
            handle = _handle(nvml, properties)
            rates = [
                _optional(nvml, lambda kind=kind: int(nvml.nvmlDeviceGetPcieThroughput(handle, kind)))  # type: ignore[misc]
                for kind in (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
            ]
            replays = _optional(nvml, lambda: int(nvml.nvmlDeviceGetPcieReplayCounter(handle)))
        except nvml.NVMLError as error:
            raise ConfigError(f"device {index}: NVML could not read its PCIe counters: {error}") from error
    rx, tx = (None if kb is None else kb * 1e3 / 1e9 for kb in rates)  # NVML counts in KB/s
    return PcieCounters(rx, tx, replays)


def _properties(device: int | str | torch.device) -> tuple[int, Any]:
    """(torch's index, torch's properties) of a GPU; ConfigError where it is none."""
    index = _cuda_index(device)
    if not torch.cuda.is_available():
        raise ConfigError(f"device {index}: expected a CUDA GPU, got none that torch can use (torch.cuda.is_available)")
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigError(f"device: expected an index below {torch.cuda.device_count()} (visible GPUs), got {index}")
    return index, torch.cuda.get_device_properties(index)


def _cuda_index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ConfigError(f"device: expected a CUDA device, got {str(device)!r}")
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml, initialised; NVML counts, so the paired shutdown ends no one else's use."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigError("expected the package nvidia-ml-py (imported as pynvml); pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(f"NVML did not start ({error}): expected an NVIDIA driver with libnvidia-ml.so.1") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, properties: Any) -> Any:
    if hasattr(properties, "pci_bus_id"):
        domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        return nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08x}:{bus:02x}:{slot:02x}.0".encode())
    if hasattr(properties, "uuid"):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
    raise ConfigError("torch tells neither PCI address nor UUID of the GPU: expected torch 2.11 or newer")


def _optional(nvml: Any, read: Callable[[], int]) -> int | None:
    """A value that this GPU may not have; other NVML errors pass."""
    try:
        return read()
    except nvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    """NVML strings: bytes in older bindings, str in newer ones."""
    return value.decode() if isinstance(value, bytes) else value


def _normal_bus_id(text: str) -> str:
    """``00000000:3B:00.0`` of NVML as ``0000:3b:00.0``, the name in sysfs."""
    domain, rest = text.strip().lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _numa_node(path: Path) -> int | None:
    """The node in a sysfs file; None where there is no such file (containers) or no node (-1)."""
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
