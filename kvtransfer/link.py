"""link: what the link of this machine was measured to do, in one versioned file, and how to read it.

A `LinkProfile` holds a `Grid` of GB/s by piece size and count for each way of moving bytes, the CPU's cost of
submitting, and what each way costs a concurrent GEMM. `kvtransfer tune` measures one (`kvtransfer.tune`) and keeps it
in the user cache folder; a plan reads it (`kvtransfer.predict`). Until one is measured, and whenever the one that is
there belongs to another card, driver, link or format, the shipped figures of an H200 stand in, and that is said.

GB = 1e9 bytes. Directions: "h2d", "d2h", and "both": each direction's rate while the other one runs too.
"""

from __future__ import annotations

import math
import os
import platform
import re
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvtransfer.device_info import device_info
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.native import cache_folder

FORMAT = 1  # of the file: another number is not read
DIRECTIONS = ("h2d", "d2h", "both")
LINK_PATHS = ("staged", "strided", "mapped", "cpu")


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile is valid for. Two cards of one model on equal links share one."""

    device: str
    driver: str
    pcie_gen: int | None = None
    pcie_width: int | None = None

    @property
    def file_stem(self) -> str:
        """What the files of all profiles of this device begin with."""
        return f"link-{_slug(self.device)}--"

    @property
    def file_name(self) -> str:
        link = "" if self.pcie_gen is None else f" gen{self.pcie_gen} x{self.pcie_width}"
        return f"{self.file_stem}{_slug(self.driver + link)}.json"

    def __str__(self) -> str:
        link = "" if self.pcie_gen is None else f", PCIe {self.pcie_gen}.0 x{self.pcie_width}"
        return f"{self.device}, {self.driver}{link}"


class Curve(msgspec.Struct, frozen=True, dict=True):
    """Values over one ascending axis (bytes or CTAs), all positive; read by log-log interpolation, clamped."""

    at: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("at", self.at)
        if len(self.values) != len(self.at):
            raise ValueError(f"expected {len(self.at)} values, got {len(self.values)}")
        _check_rates(self.values)

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log(x) for x in self.at], [math.log(v) for v in self.values]

    def value(self, at: float) -> float:
        axis, values = self._logs
        return math.exp(along(axis, values, math.log(at)))


class Grid(msgspec.Struct, frozen=True, dict=True):
    """GB/s by piece size and count: one row a piece size, one value a count.

    A row may be shorter than ``counts``: larger counts of it were too many bytes to measure, and its last rate
    stands for them (rates settle as counts grow).
    """

    piece_bytes: tuple[int, ...]
    counts: tuple[int, ...]
    gbps: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis("piece_bytes", self.piece_bytes)
        _check_axis("counts", self.counts)
        if len(self.gbps) != len(self.piece_bytes):
            raise ValueError(f"gbps: expected {len(self.piece_bytes)} rows, got {len(self.gbps)}")
        for row in self.gbps:
            if not 1 <= len(row) <= len(self.counts):
                raise ValueError(f"gbps: expected 1 to {len(self.counts)} values a row, got {len(row)}")
            _check_rates(row)

    @cached_property
    def _logs(self) -> tuple[list[float], list[float], list[list[float]]]:
        rows = [[math.log(v) for v in row] for row in self.gbps]
        return [math.log(p) for p in self.piece_bytes], [math.log(n) for n in self.counts], rows

    def rate(self, piece_bytes: float, count: float) -> float:
        """GB/s of ``count`` pieces of ``piece_bytes``, log-log bilinear, clamped to the measured range."""
        pieces, counts, rows = self._logs
        low, high, share = bracket(pieces, math.log(piece_bytes))
        n = math.log(max(count, 1.0))
        a = along(counts, rows[low], n)
        return math.exp(a if low == high else a + (along(counts, rows[high], n) - a) * share)

    def seconds(self, piece_bytes: float, count: float) -> float:
        return piece_bytes * count / self.rate(piece_bytes, count) / 1e9 if count else 0.0


class CpuCost(msgspec.Struct, frozen=True):
    """Microseconds of the submitting thread: for a batch's descriptor, a 2-D call, a kernel launch."""

    descriptor_us: float
    call_us: float
    launch_us: float

    def __post_init__(self) -> None:
        _check_rates((self.descriptor_us, self.call_us, self.launch_us))


class CtaScale(msgspec.Struct, frozen=True):
    """A mapped kernel by CTAs: its GB/s with pieces of 32 KiB, and the share that a concurrent GEMM keeps."""

    gbps: Curve
    gemm_kept: Curve


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What was measured. Keys of ``grids`` and ``gemm_kept`` are "path/direction", such as "staged/h2d".

    peak_gbps     one large copy: "h2d", "d2h", "both", and "pageable" (from memory that isn't pinned)
    grids         "mapped" was measured with ``mapped_ctas`` CTAs; of "strided" a count is the rows of one call
    relayout      GB/s of payload of the device's relayout, by piece size
    mapped_scale  "h2d" (reads host memory) and "d2h" (writes it)
    gemm_kept     share of a GEMM's rate that is left beside the path
    note          why this profile stands in for another; not part of a measurement
    """

    format: int
    key: ProfileKey
    source: str  # "measured" or "shipped"
    made: str
    peak_gbps: dict[str, float]
    grids: dict[str, Grid]
    mapped_ctas: int
    cpu: CpuCost
    relayout: Curve
    mapped_scale: dict[str, CtaScale]
    gemm_kept: dict[str, float]
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("h2d", "d2h"):
            if name not in self.peak_gbps:
                raise ValueError(f"peak_gbps: expected {name!r}, got {sorted(self.peak_gbps)}")
        _check_rates(tuple(self.peak_gbps.values()))
        for key in (*self.grids, *self.gemm_kept):
            path, _, direction = key.partition("/")
            if path not in LINK_PATHS or direction not in DIRECTIONS:
                raise ValueError(f"expected keys 'path/direction', got {key!r}")
        _check_rates(tuple(self.gemm_kept.values()))

    def kept(self, path: str, direction: str, ctas: int) -> float:
        """The share of a concurrent GEMM's rate that ``path`` leaves, at most 1; 1 where nothing was measured."""
        if path == "mapped" and direction in self.mapped_scale:
            return min(1.0, self.mapped_scale[direction].gemm_kept.value(ctas))
        return min(1.0, self.gemm_kept.get(f"{path}/{direction}", 1.0))

    def mapped_factor(self, direction: str, ctas: int) -> float:
        """The rate of a mapped kernel of ``ctas`` over that of the grid's ``mapped_ctas``."""
        if direction not in self.mapped_scale:
            return 1.0
        curve = self.mapped_scale[direction].gbps
        return curve.value(ctas) / curve.value(self.mapped_ctas)

    def describe(self) -> str:
        """One line: whose figures these are."""
        what = "measured on" if self.source == "measured" else "shipped figures of"
        return f"{what} {self.key} ({self.made})" + (f"; {self.note}" if self.note else "")


# -- pure interpolation ----------------------------------------------------------------------------


def bracket(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """(index below, index above, share of the way) of ``x`` on an ascending axis; the ends hold beyond it."""
    above = bisect_right(axis, x)
    if above == 0:
        return 0, 0, 0.0
    if above == len(axis):
        return above - 1, above - 1, 0.0
    low = axis[above - 1]
    return above - 1, above, (x - low) / (axis[above] - low)


def along(axis: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear interpolation, clamped. ``values`` may end before the axis does: its last value then holds."""
    low, high, share = bracket(axis, x)
    last = len(values) - 1
    if high > last:
        return values[last] if low >= last else values[low]
    return values[low] + (values[high] - values[low]) * share


def _check_axis(name: str, axis: Sequence[int]) -> None:
    if not axis or axis[0] < 1 or any(b <= a for a, b in pairwise(axis)):
        raise ValueError(f"{name}: expected ascending numbers of at least 1, got {list(axis)}")


def _check_rates(values: Sequence[float]) -> None:
    if not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"expected finite numbers above 0, got {list(values)}")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


# -- files -----------------------------------------------------------------------------------------


def profile_key(device: torch.device | str | int) -> ProfileKey:
    """What this machine's profile is kept under. Works without NVML: then the driver and the link are unknown."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return ProfileKey(f"CPU {_cpu_model()}, {torch.get_num_threads()} threads", f"torch {torch.__version__}")
    try:
        info = device_info(device)
    except ConfigError:
        if not torch.cuda.is_available():
            raise
        return ProfileKey(torch.cuda.get_device_name(device), "driver unknown")
    return ProfileKey(info.name, f"driver {info.driver}", info.pcie_gen, info.pcie_width_now or info.pcie_width)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.machine()


def save_profile(profile: LinkProfile, folder: Path | None = None) -> Path:
    """Write the profile under its key, whole or not at all. ConfigError where the folder can't be written."""
    folder = cache_folder() if folder is None else folder
    target = folder / profile.key.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".link-", delete=False) as file:
            try:
                file.write(encode_profile(profile))
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigError(f"{folder}: can't write the link profile ({error}); set XDG_CACHE_HOME") from error
    return target


def encode_profile(profile: LinkProfile) -> bytes:
    """The profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(data: bytes, where: str) -> LinkProfile:
    """A profile out of JSON. ConfigError, naming ``where``, for another format and for what is no profile."""
    try:
        head: Any = msgspec.json.decode(data)
        found = head.get("format") if isinstance(head, dict) else None
        if found != FORMAT:
            raise ConfigError(f"{where}: expected a link profile of format {FORMAT}, got {found!r}")
        return msgspec.json.decode(data, type=LinkProfile)
    except (msgspec.MsgspecError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: expected a link profile, got something else: {error}") from error


def shipped_profile(device_type: str = "cuda") -> LinkProfile:
    """The figures that come with the package: of an H200, or of two cores of a server."""
    name = "link_default.json" if device_type == "cuda" else "link_default_cpu.json"
    return decode_profile(files("kvtransfer").joinpath("data", name).read_bytes(), name)


def load_profile(
    device: torch.device | str | int, *, folder: Path | None = None, observer: Observer = NO_OBSERVER
) -> LinkProfile:
    """The profile measured on this machine, or the shipped one with a ``note`` that says why.

    A file that is damaged or of another card, driver, link or format is not used, and the observer is told
    (`Observer.fell_back`); that nothing was measured yet is only noted.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    folder = cache_folder() if folder is None else folder
    key = profile_key(device)
    command = "kvtransfer tune" + ("" if device.type == "cuda" else " --cpu")
    path = folder / key.file_name
    try:
        profile = decode_profile(path.read_bytes(), str(path))
        if profile.key == key:
            return profile
        why = f"{path} is of {profile.key}, this is {key}: it is not used"
    except ConfigError as error:
        why = f"{error}: it is not used"
    except OSError:
        why = ""
        others = sorted(folder.glob(f"{key.file_stem}*.json")) if folder.is_dir() else []
        if others:
            why = f"{others[0]} is of another driver or link than {key}: it is not used"
    if why:
        observer.fell_back("link profile", f"{why}; run `{command}`")
    else:
        observer.noted("link profile", why="nothing was measured on this machine", command=command)
    note = f"{why or 'nothing was measured on this machine'}; run `{command}`"
    return msgspec.structs.replace(shipped_profile(device.type), note=note)
