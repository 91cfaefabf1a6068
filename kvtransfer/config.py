"""Configuration: one file, environment variables, arguments; checked, and each value remembers who gave it.

    config = load_config("kv.yaml", arguments={"prefetch": {"stop": "best_effort"}})

Arguments go before the environment (``KVTRANSFER_*``), that before the file (the argument's, or the one that
``KVTRANSFER_CONFIG`` names), that before the defaults. What disagrees warns (`ConfigWarning`). docs/configuration.md
lists every field.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtransfer.config_build import Builder, ConfigWarning
from kvtransfer.config_fields import DTYPE_ALIASES, Config
from kvtransfer.config_sources import CONFIG_VARIABLE, from_arguments, from_environment, from_file, merge
from kvtransfer.config_tiers import OtherOptions
from kvtransfer.kernels.errors import ConfigError

__all__ = ["Config", "ConfigWarning", "Resolved", "as_mapping", "chosen_once", "kv_dtype_of", "load_config", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """A configuration, who gave each value (by its path with dots; the rest is default), and what disagreed."""

    config: Config
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def load_config(
    file: str | Path | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of this process. See `resolve`; what disagrees is issued as a `ConfigWarning`."""
    resolved = resolve(file, arguments=arguments, environment=environment)
    for text in resolved.warnings:
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return resolved.config


def resolve(
    file: str | Path | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Read, merge and check.

    file         YAML, TOML or JSON by its ending; None: the one that KVTRANSFER_CONFIG names, if it does
    arguments    nested as in a file; goes before everything else
    environment  ``os.environ`` unless told otherwise

    Raises ConfigError, naming the key and where it was given, what was expected, and the nearest name.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(CONFIG_VARIABLE) or None
    chosen = file if file is not None else named
    builder = Builder()
    if file is not None and named is not None and os.path.abspath(file) != os.path.abspath(named):
        builder.warn(f"{file} is read, not {named}, which {CONFIG_VARIABLE} names")
    tree = {} if chosen is None else from_file(Path(chosen))
    tree = merge(tree, from_environment(variables))
    tree = merge(tree, from_arguments(arguments or {}))
    config = builder.config(tree)
    return Resolved(config, builder.sources, tuple(builder.warnings))


def as_mapping(config: Config, *, empty: bool = False) -> dict[str, Any]:
    """The configuration as plain nested values, as a file would give it.

    Of fields without a value only those are in it that ``empty`` asks for: TOML has no way to say None.
    """
    plain: dict[str, Any] = msgspec.to_builtins(config)
    if not empty:
        plain = _without_none(plain)
    for name, options in config.tiers.items():
        if isinstance(options, OtherOptions):
            shared = {} if options.shared_by is None else {"share_across_tp": options.shared_by}
            plain["tiers"][name] = {"kind": options.kind, **shared, **options.more}
        elif "paths" in plain["tiers"][name]:
            plain["tiers"][name]["paths"] = list(plain["tiers"][name]["paths"])
    return plain


def kv_dtype_of(config: Config, engine_says: str | None) -> str:
    """The dtype of the KV cache: the engine's, or the configuration's where the engine says "auto" or nothing.

    Where both name one and they differ, the engine's is taken, whose memory it is, and a `ConfigWarning` issued.
    Raises ConfigError where nobody names one.
    """
    if not engine_says or engine_says == "auto":
        if config.kv_dtype == "auto":
            raise ConfigError("kv_dtype: expected a dtype where the engine says auto, got auto; set kv_dtype")
        return config.kv_dtype
    engine = engine_says.lower().removeprefix("torch.")
    engine = DTYPE_ALIASES.get(engine, engine)
    if config.kv_dtype not in ("auto", engine):
        warnings.warn(f"kv_dtype: {config.kv_dtype} is configured, the engine's {engine} is taken", ConfigWarning, 2)
    return engine


def chosen_once(doors: Mapping[str, bool]) -> str | None:
    """The first of an engine's ``doors`` (flags by which kvtransfer can be chosen) that is open; None if none is.

    Issues a `ConfigWarning` where several are: only one of them has an effect.
    """
    opened = [door for door, is_open in doors.items() if is_open]
    if len(opened) > 1:
        warnings.warn(
            f"kvtransfer is chosen {len(opened)} times, by {', '.join(opened)}: {opened[0]} has its way",
            ConfigWarning,
            2,
        )
    return opened[0] if opened else None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
