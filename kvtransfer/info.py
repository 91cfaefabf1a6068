"""info: what this machine offers, and what would be slow on it and why. Right words without a GPU too."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvtransfer import __version__
from kvtransfer.device_info import DeviceInfo, PcieCounters, device_info, pcie_counters, theoretical_pcie_gbps
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import LinkProfile, load_profile
from kvtransfer.tiers.sizing import MemoryLimits, parse_meminfo, read_limits

PACKAGES = (
    *("torch", "triton", "numpy", "cuda-bindings", "nvidia-ml-py", "nvtx", "msgspec", "xxhash"),
    *("transformers", "matplotlib"),
)
SLOW_SHARE = 0.75  # of the link's theoretical rate; measured copies reach 85-90 %
LITTLE_MEMORY_BYTES = 4 << 30
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # of the driver, read when CUDA starts
MOST_QUEUES = 4  # with which copies were not slowed (H200)


@dataclass
class Report:
    """Lines for people, and what would be slow, each with its reason."""

    lines: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def text(self) -> str:
        out = list(self.lines)
        out += ["", "what would be slow, and why:"] if self.slow else ["", "nothing found that would be slow"]
        return "\n".join(out + [f"  - {line}" for line in self.slow])


def machine_report(*, proc: Path = Path("/proc"), sys: Path = Path("/sys"), folder: Path | None = None) -> Report:
    """All that `kvtransfer info` prints. ``folder`` holds the link profiles; None is the user cache folder."""
    report = Report()
    report.lines.append(f"kvtransfer {__version__}, Python {platform.python_version()}, {platform.system()}")
    report.lines += list(_versions())
    _gpus(report, folder)
    _memory(report, proc, sys)
    return report


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: not installed"


def _gpus(report: Report, folder: Path | None) -> None:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this PyTorch is built without CUDA)"
        report.lines.append(f"GPU: none that PyTorch sees{built}; the CPU path is used")
        report.lines += link_lines(load_profile("cpu", folder=folder), report.slow)
        report.slow.append("everything: without a GPU the engine works on CPU tensors, for tests and to try it out")
        return
    for index in range(torch.cuda.device_count()):
        try:
            gpu = device_info(index)
        except ConfigError as error:
            report.lines.append(f"cuda:{index} {torch.cuda.get_device_name(index)}: {error}")
        else:
            report.lines += gpu_lines(index, gpu, _counters(index), report.slow, os.sched_getaffinity(0))
        report.lines += link_lines(load_profile(index, folder=folder), report.slow)
    report.lines.append(queue_line(os.environ.get(QUEUES), report.slow))


def queue_line(value: str | None, slow: list[str]) -> str:
    """How many hardware queues the driver spreads streams over, by the ``value`` of `QUEUES`; what that makes slow goes
    to ``slow``. Measured on an H200 (docs/performance.md, "Hardware queues")."""
    count = int(value) if value is not None and value.isdecimal() else None
    said = "not set" if value is None else value or "empty"
    if count == 1:
        slow.append(
            f"{QUEUES}=1: relayouts wait in one queue with the model's kernels, and a transfer beside a GEMM takes "
            "three times as long (H200); 4 are best, or 2 where nothing is loaded and stored at once"
        )
    elif count is None or not 0 < count <= MOST_QUEUES:
        slow.append(
            f"{QUEUES} is {said}{' (8)' * (value is None)}: where relayouts and the model's kernels get "
            "into different groups of hardware queues, copies beside the model take 6 % longer (H200); start the "
            f"process with {QUEUES}=4"
        )
    return f"{QUEUES}: {said}"


def _counters(index: int) -> PcieCounters:
    try:
        return pcie_counters(index)
    except ConfigError:
        return PcieCounters(None, None, None)


def gpu_lines(index: int, gpu: DeviceInfo, counters: PcieCounters, slow: list[str], cpus: set[int]) -> Iterator[str]:
    """Lines about one GPU; what its link makes slow goes to ``slow``. ``cpus`` are those this process may run on."""
    node = "NUMA node not reported" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
    yield f"cuda:{index} {gpu.name}, driver {gpu.driver}, at {gpu.pci_bus_id}, {node}"
    if gpu.pcie_gen is None or gpu.pcie_width is None or gpu.pcie_theoretical_gbps is None:
        yield "  PCIe link not reported (virtual machines often hide it)"
    else:
        now = ""
        if gpu.pcie_gen_now is not None and gpu.pcie_width_now is not None:
            now = f"; now {gpu.pcie_gen_now}.0 x{gpu.pcie_width_now}"
        rate = f"{gpu.pcie_theoretical_gbps:.1f} GB/s in theory"
        yield f"  PCIe {gpu.pcie_gen}.0 x{gpu.pcie_width} at most ({rate}){now}"
        slow += trained_lower(index, gpu)
    sent = [f"{what} {rate:.2f} GB/s" for what, rate in _rates(counters)]
    if sent:
        yield "  PCIe traffic of the last 20 ms: " + ", ".join(sent)
    if counters.replays is not None:
        yield f"  PCIe replays: {counters.replays}"
        if counters.replays:
            slow.append(
                f"cuda:{index}: {counters.replays} PCIe packets were sent again since the driver was loaded; "
                "if the number grows, the link is unsound"
            )
    if gpu.numa_node is not None:
        near = _node_cpus(gpu.numa_node)
        if near and not near & cpus:
            slow.append(
                f"cuda:{index}: this process may not run on the CPUs of its NUMA node {gpu.numa_node}; "
                f"start it with numactl --cpunodebind={gpu.numa_node}"
            )


def trained_lower(index: int, gpu: DeviceInfo) -> Iterator[str]:
    """Warnings where the link does less than it could. An idle GPU lowers the generation by itself."""
    if gpu.pcie_width_now is not None and gpu.pcie_width is not None and gpu.pcie_width_now < gpu.pcie_width:
        full, now = (theoretical_pcie_gbps(gpu.pcie_gen, w) or 0.0 for w in (gpu.pcie_width, gpu.pcie_width_now))
        yield (
            f"cuda:{index}: the link trained to x{gpu.pcie_width_now} and could do x{gpu.pcie_width}: at most "
            f"{now:.1f} GB/s instead of {full:.1f}; reseat the card or look at the slot and its BIOS setting"
        )
    if gpu.pcie_gen_gpu is not None and gpu.pcie_gen is not None and gpu.pcie_gen < gpu.pcie_gen_gpu:
        yield (
            f"cuda:{index}: the GPU could do PCIe {gpu.pcie_gen_gpu}.0 and its slot gives {gpu.pcie_gen}.0: half the "
            "rate for each generation"
        )
    if gpu.pcie_gen_now is not None and gpu.pcie_gen is not None and gpu.pcie_gen_now < gpu.pcie_gen:
        yield (
            f"cuda:{index}: the link runs at generation {gpu.pcie_gen_now} of {gpu.pcie_gen} at this moment; that is "
            "usual while the GPU is idle, and slow if it stays so during a transfer"
        )


def link_lines(profile: LinkProfile, slow: list[str]) -> Iterator[str]:
    """Lines about the profile in use; what its figures (or their absence) make slow goes to ``slow``."""
    yield f"link profile: {profile.describe()}"
    peaks = ", ".join(f"{kind} {gbps:.1f}" for kind, gbps in profile.peak_gbps.items())
    yield f"  one large copy, GB/s: {peaks}"
    if profile.note:
        slow.append(f"the choice of paths rests on figures of another machine: {profile.note}")
        return
    best = theoretical_pcie_gbps(profile.key.pcie_gen, profile.key.pcie_width)
    if best is not None and profile.peak_gbps["h2d"] < SLOW_SHARE * best:
        slow.append(
            f"the link was measured at {profile.peak_gbps['h2d']:.1f} GB/s of {best:.1f} in theory; "
            "85-90 % are usual: look at NUMA placement, IOMMU and PCIe switches"
        )


def _rates(counters: PcieCounters) -> list[tuple[str, float]]:
    both = (("to the GPU", counters.rx_gbps), ("from it", counters.tx_gbps))
    return [(what, rate) for what, rate in both if rate is not None]


def _node_cpus(node: int, sys: Path = Path("/sys")) -> set[int]:
    """The CPUs of a NUMA node; none where the machine does not tell."""
    try:
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def _memory(report: Report, proc: Path, sys: Path) -> None:
    limits = read_limits(proc=proc, cgroup=sys / "fs/cgroup")
    report.lines += list(memory_lines(limits, report.slow))
    try:
        info = parse_meminfo((proc / "meminfo").read_text())
        thp = (sys / "kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        info, thp = {}, "not reported"
    size = info.get("Hugepagesize", 0)
    pages = (
        f"{info.get('HugePages_Free', 0)} of {info.get('HugePages_Total', 0)} reserved pages of {size >> 20} MiB free"
    )
    report.lines.append(f"huge pages: {pages}; transparent: {thp}")
    if "[never]" in thp and not info.get("HugePages_Free"):
        report.slow.append(
            "pinning: transparent huge pages are off and none are reserved, so that a large slab is pinned by pages of "
            "4 KiB; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )


def memory_lines(limits: MemoryLimits, slow: list[str]) -> Iterator[str]:
    """Lines about what host memory allows; what it makes slow goes to ``slow``."""
    for budget in limits.memory:
        yield f"memory left: {budget.free_bytes / 2**30:.1f} GiB, {budget.source}"
    if not any("cgroup" in budget.source for budget in limits.memory):
        yield "cgroup limit: none"
    if limits.memlock_bytes is None:
        yield "memlock: no limit"
    else:
        yield f"memlock: {limits.memlock_bytes / 2**20:,.0f} MiB (CUDA's registration is not charged to it)"
    tightest = min(limits.memory, key=lambda b: b.free_bytes)
    if tightest.free_bytes < LITTLE_MEMORY_BYTES:
        slow.append(
            f"a host tier finds {tightest.free_bytes / 2**30:.1f} GiB ({tightest.source}): few pages fit, "
            "and most hits go to lower tiers"
        )
