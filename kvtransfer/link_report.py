"""link_report: what `kvtransfer tune` shows: a progress bar, a profile as tables, its curves in a picture."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import Grid, LinkProfile, encode_profile, save_profile
from kvtransfer.meter import CpuMeter, CudaMeter
from kvtransfer.tune import Meter, measure

SHOWN_BYTES = tuple(1024 * n // 2 for n in (1, 4, 16, 64, 128, 256, 512, 2048, 8192))


def tune_link(device: int | None, budget_s: float, plot: Path | None, json_file: Path | None) -> LinkProfile:
    """Measure GPU ``device`` (None: the CPU backend), keep the profile in the user cache folder, and show it.

    ConfigError where there is no such GPU, or a file can't be written; the profile is kept all the same.
    """
    meter = _meter(device)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        profile = measure(
            meter,
            budget_s=budget_s,
            progress=lambda done, cells, what: bar.update(task, completed=done, total=cells, description=what),
        )
    path = save_profile(profile)
    console = Console(highlight=False)
    print_profile(profile, console if console.is_terminal else Console(highlight=False, width=160))
    print(f"kept as {path}")
    if json_file is not None:
        try:
            json_file.write_bytes(encode_profile(profile))
        except OSError as error:
            raise ConfigError(f"--json {json_file}: expected a file that can be written: {error}") from error
    if plot is not None:
        plot_profile(profile, plot)
    return profile


def _meter(device: int | None) -> Meter:
    if device is None:
        return CpuMeter()
    if not torch.cuda.is_available():
        raise ConfigError("tune: expected a GPU, got none that PyTorch sees; `kvtransfer tune --cpu` measures the CPU")
    if not 0 <= device < torch.cuda.device_count():
        raise ConfigError(f"--device: expected an index below {torch.cuda.device_count()}, got {device}")
    return CudaMeter(device)


def size_text(nbytes: float) -> str:
    """Bytes for people: B, KiB or MiB, whole or with one digit."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:g} B"


def largest_counts(grid: Grid) -> list[tuple[int, int, float]]:
    """(piece bytes, count, GB/s) of the largest count measured of each piece size."""
    return [(p, grid.counts[len(row) - 1], row[-1]) for p, row in zip(grid.piece_bytes, grid.gbps, strict=True)]


def print_profile(profile: LinkProfile, console: Console) -> None:
    """The rates at the largest counts, with each direction's limit, and the figures a plan uses besides."""
    peaks = ", ".join(f"{kind} {gbps:.1f}" for kind, gbps in profile.peak_gbps.items())
    table = Table(title=f"{profile.key}\nGB/s by piece size, at the largest count of each; one large copy: {peaks}")
    table.add_column("path", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for nbytes in SHOWN_BYTES:
        table.add_column(size_text(nbytes), justify="right", no_wrap=True)
    table.add_column("GEMM keeps", justify="right")
    for key, grid in profile.grids.items():
        path, way = key.split("/")
        rates = [f"{grid.rate(nbytes, grid.counts[-1]):.1f}" for nbytes in SHOWN_BYTES]
        kept = "" if way == "both" else f"{profile.kept(path, way, profile.mapped_ctas):.0%}"
        table.add_row(path, way, *rates, kept)
    console.print(table)
    if profile.mapped_scale:
        ctas = Table(title="mapped kernel by CTAs, pieces of 32 KiB: GB/s, and the share that a GEMM keeps")
        first = next(iter(profile.mapped_scale.values()))
        ctas.add_column("way")
        for n in first.gbps.at:
            ctas.add_column(str(n), justify="right")
        for way, scale in profile.mapped_scale.items():
            pairs = zip(scale.gbps.values, scale.gemm_kept.values, strict=True)
            ctas.add_row(way, *(f"{gbps:.1f}, {kept:.0%}" for gbps, kept in pairs))
        console.print(ctas)
    cpu, relayout = profile.cpu, profile.relayout
    console.print(
        f"CPU, us: {cpu.descriptor_us:.2f} a descriptor, {cpu.call_us:.1f} a 2-D call, {cpu.launch_us:.1f} a launch"
    )
    pairs = zip(relayout.at, relayout.values, strict=True)
    console.print("relayout: " + ", ".join(f"{size_text(at)} {gbps:,.1f} GB/s" for at, gbps in pairs))


def require_matplotlib() -> Any:
    """pyplot without a display. ConfigError, with what to install, where there is none."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError("--plot: expected matplotlib, got none; pip install 'kvtransfer[plot]'") from error


def plot_profile(profile: LinkProfile, file: Path) -> None:
    """Write a PNG: a panel for each direction, a curve for each path, the large-copy limit as a dashed line.

    ConfigError without matplotlib, or where the file can't be written.
    """
    plt = require_matplotlib()
    ways = [way for way in ("h2d", "d2h", "both") if any(key.endswith(f"/{way}") for key in profile.grids)]
    figure, axes = plt.subplots(1, len(ways), figsize=(5.2 * len(ways), 4.6), sharey=True, squeeze=False)
    titles = {"h2d": "host to device", "d2h": "device to host", "both": "both at once, each"}
    for panel, way in zip(axes[0], ways, strict=True):
        for key, grid in profile.grids.items():
            path, of = key.split("/")
            if of == way:
                points = largest_counts(grid)
                panel.plot([p for p, _, _ in points], [gbps for _, _, gbps in points], marker="o", ms=3, label=path)
        if way in profile.peak_gbps:
            peak = profile.peak_gbps[way]
            panel.axhline(peak, ls="--", color="0.4", lw=1)
            panel.annotate(f"one large copy: {peak:.1f}", (0.02, peak), xycoords=("axes fraction", "data"), va="bottom")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)))
        panel.yaxis.set_major_formatter(lambda gbps, _: f"{gbps:g}")
        panel.tick_params(axis="x", labelrotation=45)
        panel.set_title(titles[way])
        panel.set_xlabel("piece size")
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(loc="lower right")
    axes[0][0].set_ylabel("GB/s, largest count of each piece size")
    figure.suptitle(str(profile.key))
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {file}: expected a file in a folder that exists: {error}") from error
    finally:
        plt.close(figure)
