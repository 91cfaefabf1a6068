"""What the demo reports: one table, one line, one JSON object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtransfer.kernels.errors import ConfigError


@dataclass(frozen=True)
class DemoResult:
    """One run. ``gbps`` is the load inside the forward; the other rates are for comparison. 1 GB = 1e9 bytes."""

    identical: bool
    model: str
    tokens_reused: int
    bytes: int
    path: str
    gbps: float
    ttft_cold_s: float
    ttft_warm_s: float
    why: str
    difference: str
    gbps_alone: float
    store_gbps: float
    link_gbps: float
    device: str
    prompt_tokens: int
    answer: str

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        keys = ("identical", "model", "tokens_reused", "bytes", "path", "gbps", "ttft_cold_s", "ttft_warm_s")
        return {key: getattr(self, key) for key in keys}


def print_result(result: DemoResult, console: Console) -> None:
    """One table, and the verdict as the last line."""
    table = Table(title=f"kvtransfer demo: {result.model} on {result.device}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    rows = [
        ("tokens reused", f"{result.tokens_reused:,} of {result.prompt_tokens:,} in the prompt"),
        ("bytes", f"{result.bytes:,}"),
        ("path", result.path),
        ("why", result.why),
        ("load in the forward", _rate(result.gbps, result.link_gbps)),
        ("load alone", _rate(result.gbps_alone, result.link_gbps)),
        ("store", _rate(result.store_gbps, result.link_gbps)),
        ("the link", f"{result.link_gbps:.2f} GB/s, one large copy in this run"),
        ("time to first token, cold", f"{result.ttft_cold_s:.3f} s"),
        ("time to first token, warm", f"{result.ttft_warm_s:.3f} s"),
        ("answer", "".join(c if c.isprintable() or c == "\n" else "·" for c in result.answer)),
    ]
    if not result.identical:
        rows.append(("difference", result.difference))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table, markup=False)
    console.print(f"identical: {'yes' if result.identical else 'no'}")


def write_json(result: DemoResult, path: Path) -> None:
    """The result as one JSON object."""
    try:
        path.write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: could not be written: {error}") from error


def _rate(gbps: float, link: float) -> str:
    return f"{gbps:.2f} GB/s, {100 * gbps / link:.0f} % of the link"
