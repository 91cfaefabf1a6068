"""A local model behind bench/local_server.py, with one set of tiers after the other."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from local_server import serving
from rich.console import Console

from kvtransfer.config import Config, load_config
from kvtransfer.demo_model import LoadedModel, load_model
from kvtransfer.integrations.local_engine import KeptPrefixes, LocalEngine
from kvtransfer.integrations.prefix_cache import PrefixCache

LEFT_S = 86_400.0
"""Seconds after which a shared store forgets what a benchmark left there: nobody can find it again."""
ABLATIONS = ("none", "host", "host+disk", "host+disk+remote")


@dataclass(frozen=True)
class LocalOptions:
    """``folder`` is the disk tier's; ``redis`` the remote tier's URL. ``fresh``: what earlier runs left on the disk or
    in a shared store is not ours, nor is what we leave anybody's."""

    device: torch.device
    model: str | None
    random_weights: bool
    page_size: int
    host_pages: int
    folder: Path
    disk_gb: float
    redis: str | None
    fresh: bool = False


def served(options: LocalOptions, cases: Sequence[str], port: int = 0) -> Generator[tuple[str, str]]:
    """(case, URL) of a server for each case, which serves until the next one is asked for, or this is closed.

    ``port`` 0: a free one. Raises ConfigError on options that can't work for one of the cases before the first begins.
    """
    configs = {case: _config(case, options) for case in cases if case != "none"}
    loaded = load_model(options.model, options.random_weights, options.device, Console(stderr=True, highlight=False))
    for case in cases:
        if case == "none":
            yield from _serve(case, loaded, KeptPrefixes(most=0), options, {}, port)
            continue
        pool_tokens = int(loaded.model.config.get_text_config(decoder=True).max_position_embeddings)
        prefixes = PrefixCache.create(
            loaded.model,
            configs[case],
            page_size=options.page_size,
            pool_tokens=min(pool_tokens, 1 << 16),
            model_name=f"bench-{secrets.token_hex(8)}" if options.fresh else None,
        )
        yield from _serve(case, loaded, prefixes, options, {"cache": prefixes}, port)


def _serve(
    case: str, loaded: LoadedModel, prefixes: Any, options: LocalOptions, more: dict[str, PrefixCache], port: int
) -> Generator[tuple[str, str]]:
    engine = LocalEngine(loaded.model, loaded.encode, loaded.decode, prefixes, page_size=options.page_size)

    def info() -> dict[str, int]:
        if not more:
            return {}
        stats, tiers = more["cache"].stats(), more["cache"].tiers.stats().directory.tiers
        fetched = sum(tier.counters.get("read", 0) for name, tier in tiers.items() if name != "host")
        return {
            "cached_tokens": stats.cached_tokens,
            "loaded_pages": stats.loaded_pages,
            "stored_pages": tiers["host"].counters.get("written", 0) - fetched,  # all that is fetched goes to the host
            "failed_pages": sum(tier.counters.get("failed", 0) for tier in tiers.values()),
        }

    try:
        with serving(engine, info=info, port=port) as server:
            yield case, server.url
    finally:
        engine.close()


def _config(case: str, options: LocalOptions) -> Config:
    tiers: dict[str, Any] = {"host": {"pages": options.host_pages}}
    if "disk" in case:
        tiers["disk"] = {"paths": [str(options.folder / case.replace("+", "-"))], "cache_gb": options.disk_gb}
    if "remote" in case:
        tiers["remote"] = {"kind": "redis", "url": options.redis, "ttl_s": LEFT_S if options.fresh else None}
    return load_config(arguments={"tiers": tiers, "prefetch": {"min_tokens": 0}}, environment={})
