"""What `kvtransfer config` prints."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvtransfer.config import Config, Resolved, as_mapping, resolve
from kvtransfer.config_check import masked
from kvtransfer.config_fields import DTYPE_ALIASES, DTYPE_BYTES
from kvtransfer.config_tiers import SharedOptions
from kvtransfer.kernels.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from kvtransfer.config_pages import TierPages
    from kvtransfer.kernels.spec import KVSpec


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache as options give it: all heads, and how many ranks share them."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    latent_dim: int | None = None
    page_size: int = 16
    dtype: str | None = None
    tp: int = 1
    device_pages: int | None = None

    @property
    def given(self) -> bool:
        """Whether anything of a model is told."""
        return any(x is not None for x in (self.layers, self.kv_heads, self.head_dim, self.latent_dim))

    def spec(self, config: Config) -> KVSpec:
        """What one rank holds. Raises ConfigError for options that leave it open."""
        from kvtransfer.kernels.spec import KVSpec  # noqa: PLC0415

        for name in ("layers", "kv_heads", "head_dim", "latent_dim", "page_size", "tp", "device_pages"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        name = self.dtype or config.kv_dtype
        dtype = DTYPE_ALIASES.get(name.lower(), name)
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype: expected one of {', '.join(DTYPE_BYTES)} here or as kv_dtype, got {name}")
        if self.layers is None:
            raise ConfigError("--layers: expected the number of layers, got none")
        if self.latent_dim is not None:
            if self.kv_heads is not None or self.head_dim is not None:
                raise ConfigError("--latent-dim: expected it alone, got --kv-heads or --head-dim too")
            return KVSpec.mla(self.layers, self.page_size, self.latent_dim * DTYPE_BYTES[dtype])
        if self.kv_heads is None or self.head_dim is None:
            raise ConfigError("--kv-heads and --head-dim: expected both, or --latent-dim, got less")
        if max(self.kv_heads, self.tp) % min(self.kv_heads, self.tp):
            raise ConfigError(f"--tp: expected a divisor or a multiple of {self.kv_heads} heads, got {self.tp}")
        heads = max(1, self.kv_heads // self.tp)
        return KVSpec.attention(self.layers, self.page_size, heads, self.head_dim, DTYPE_BYTES[dtype])

    def require_groups(self, config: Config) -> None:
        """Raise ConfigError where ``share_across_tp``, of a tier or of all, does not fit the heads and ranks."""
        from kvtransfer.kernels.spec import KVSpec  # noqa: PLC0415
        from kvtransfer.tiers.head_groups import HeadGroups  # noqa: PLC0415

        if self.kv_heads is None or self.head_dim is None:
            return  # a latent has no heads: every rank holds all of it
        model = KVSpec.attention(1, self.page_size, self.kv_heads, self.head_dim, 1)
        for name, options in config.lower_tiers.items():
            wanted = options.shared_by or (config.share_across_tp if isinstance(options, SharedOptions) else None)
            if wanted is not None:
                try:
                    HeadGroups(model, share_across_tp=wanted, tp_size=self.tp, tp_rank=0)
                except (ConfigError, LayoutError) as error:
                    raise ConfigError(f"tiers.{name}: share_across_tp: {error}") from error


def check_file(file: Path | None, geometry: Geometry) -> None:
    """Print the resolved configuration, who gave each value, and the pages of each tier. What disagrees on stderr."""
    resolved = resolve(file)
    for text in resolved.warnings:
        print(f"warning: {text}", file=sys.stderr)
    try:
        resolved.config.namespace.salt_bytes()
    except ConfigError as error:  # it may be there on the machine that serves
        print(f"warning: {error}; here a cache would not start", file=sys.stderr)
    for line in table(resolved):
        print(line)
    if geometry.given:
        from kvtransfer.config_pages import pages_of, record_bytes  # noqa: PLC0415  (loads torch)

        spec = geometry.spec(resolved.config)
        pages = pages_of(resolved.config, spec, ranks=geometry.tp, device_pages=geometry.device_pages)
        whole = record_bytes(spec)
        print(f"\none page of {spec.page_size} tokens: {spec.page_bytes:,} bytes, {whole:,} in a tier; per rank:")
        for line in pages_table(pages):
            print(line)
        geometry.require_groups(resolved.config)
    else:
        print("\nfor the pages of each tier give --layers and --kv-heads with --head-dim, or --latent-dim")


def convert_file(file: Path, ranks: int, output: Path | None) -> bool:
    """Print FlexKV's ``file`` in our terms, or write it to ``output``; what became of each key on stderr.

    Returns whether nothing was refused.
    """
    from kvtransfer.config_convert import convert_flexkv  # noqa: PLC0415  (nobody else needs FlexKV's keys)

    converted = convert_flexkv(file, ranks=ranks)
    for outcome in converted.outcomes:
        print(f"{outcome.fate:<10}  {outcome.key}: {outcome.text}", file=sys.stderr)
    if output is None:
        print(converted.yaml(), end="")
    else:
        try:
            with output.open("x", encoding="utf-8") as new:
                new.write(converted.yaml())
        except OSError as error:
            raise ConfigError(f"--output {output}: expected a new file: {error}") from error
    return not converted.refused


def table(resolved: Resolved) -> list[str]:
    """A line a field: its path, its value, who gave it. Secrets are not shown."""
    rows = [
        (".".join(path), _text(masked(path, value)), _source(resolved, path)) for path, value in _flat(resolved.config)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in rows]


def pages_table(pages: list[TierPages]) -> list[str]:
    """A line a tier."""
    return [
        f"{tier.name:<16}{'?' if tier.pages is None else f'{tier.pages:,}':>16} pages"
        f"{'?' if tier.tokens is None else f'{tier.tokens:,}':>18} tokens  {tier.note}"
        for tier in pages
    ]


def _source(resolved: Resolved, path: tuple[str, ...]) -> str:
    """Who gave a value; of a table of settings, all who gave some."""
    name = ".".join(path)
    givers = {source for key, source in resolved.sources.items() if key == name or key.startswith(name + ".")}
    return ", ".join(sorted(givers)) or "default"


def _flat(config: Config) -> list[tuple[tuple[str, ...], Any]]:
    """Every field with its path; a table of settings of a tier's client counts as one."""
    rows: list[tuple[tuple[str, ...], Any]] = []

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict) and value and len(path) < 3:
            for key, inner in value.items():
                walk(inner, (*path, key))
        else:
            rows.append((path, value))

    walk(as_mapping(config, empty=True), ())
    return rows


def _text(value: Any) -> str:
    """A value on one line, as a file would give it."""
    if value is None:
        return "-"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ";".join(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
