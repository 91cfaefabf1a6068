"""What SGLang's ``extra config`` tells kvtransfer, and what the engine itself says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.runtime_context import get_model

from kvtransfer.config import Config, kv_dtype_of, load_config
from kvtransfer.config_check import did_you_mean
from kvtransfer.kernels.errors import ConfigError

OURS = ("config", "settings")


def read_settings(extra: Mapping[str, Any] | None, theirs: tuple[str, ...] = ()) -> Config:
    """The configuration that an extra config gives: ``config`` names a file, ``settings`` goes before it.

    Keys in ``theirs`` are SGLang's own. Raises ConfigError on any other key, and where kvtransfer is not enabled.
    """
    given = dict(extra or {})
    for key in given:
        if key not in (*OURS, *theirs):
            raise ConfigError(
                f"extra config: expected {', '.join(OURS)} of kvtransfer, got {key!r}{did_you_mean(key, OURS)}; "
                "fields of the configuration belong into settings"
            )
    config = load_config(given.get("config"), arguments=given.get("settings"))
    if not config.enabled:
        raise ConfigError("enabled: expected kvtransfer to be enabled where SGLang is told to use it, got false")
    return config


def engine_kv_dtype(config: Config, held: Any) -> str:
    """The dtype of the KV cache by name. ``held`` is the dtype of the pool's memory.

    SGLang's own setting decides; where it is "auto", the memory does, unless that is bytes, which says nothing.
    Raises ConfigError where nobody says it.
    """
    said = str(getattr(get_model(), "kv_cache_dtype", None) or "auto")
    held_name = str(held).removeprefix("torch.")
    if said == "auto" and held_name != "uint8":
        said = held_name
    return kv_dtype_of(config, said)


def engine_model(config: Config, name: str | None) -> str:
    """A text that names the weights: the configuration's ``namespace.model``, or what SGLang says of them.

    That is ``name`` (the served one, with a tag of the page format), the path they were loaded from, and the revision:
    two models served under one name differ. Raises ConfigError where there is nothing.
    """
    if config.namespace.model:
        return config.namespace.model
    told = get_model()
    said = [name, getattr(told, "model_path", None), getattr(told, "revision", None)]
    if not any(said):
        raise ConfigError("namespace.model: expected a fingerprint of the model where SGLang names none; set it")
    return "\0".join(str(one or "") for one in said)
