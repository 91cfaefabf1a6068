"""Tiers by name: those that come with kvtransfer, and those that other packages add.

A package adds a tier with an entry point of the group ``kvtransfer.tiers``:

    [project.entry-points."kvtransfer.tiers"]
    mine = "my_package.my_tier:MyTier"

`make_tier` then takes "mine" like one of ours. docs/adding_a_tier.md shows a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from kvtransfer.kernels.errors import ConfigError, TierError
from kvtransfer.tiers.base import Tier

GROUP = "kvtransfer.tiers"
# kind -> where it is, and the extra that brings its client ("" where it needs none).
BUILT_IN: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "disk": ("kvtransfer.tiers.disk", "DiskTier", ""),
        "memory": ("kvtransfer.tiers.memory_tier", "MemoryTier", ""),
        "mooncake": ("kvtransfer.tiers.mooncake", "MooncakeTier", "mooncake"),
        "object_store": ("kvtransfer.tiers.object_store", "ObjectStoreTier", "object"),
        "redis": ("kvtransfer.tiers.redis", "RedisTier", "redis"),
    }
)


def tier_kinds() -> list[str]:
    """The names that `make_tier` takes, sorted. Imports nothing."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def tier_factory(kind: str) -> Callable[..., Tier]:
    """What makes a tier of ``kind``: its class, or a function. Imports its module.

    Raises ConfigError for a name that nobody gave or that two gave, and where its package is not installed.
    """
    added = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP) if entry.name == kind}
    if len(added) + (kind in BUILT_IN) > 1:
        givers = ", ".join(sorted(value for _, value in added))
        ours = " besides kvtransfer's own" if kind in BUILT_IN else ""
        raise ConfigError(f"tier {kind!r}: expected one entry point of {GROUP}, got {givers}{ours}; uninstall one")
    if added:
        return _load(next(iter(added.values())))
    if kind not in BUILT_IN:
        raise ConfigError(f"tier: expected one of {', '.join(tier_kinds())}, got {kind!r}")
    module, name, extra = BUILT_IN[kind]
    try:
        factory: Callable[..., Tier] = getattr(import_module(module), name)
    except ImportError as error:
        what = f"; pip install 'kvtransfer[{extra}]'" if extra else ""
        raise ConfigError(f"tier {kind!r}: its client is not there: {error}{what}") from error
    return factory


def make_tier(kind: str, /, **settings: Any) -> Tier:
    """A tier of ``kind`` with these settings (its constructor's arguments).

    Raises ConfigError on a kind or a setting that there isn't, TierError if what was made is no `Tier`.
    """
    factory = tier_factory(kind)
    try:
        tier = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"tier {kind!r}: settings {sorted(settings)}: {error}") from error
    if not isinstance(tier, Tier):
        missing = [name for name in sorted(_members()) if not hasattr(tier, name)]
        raise TierError(
            f"tier {kind!r}: expected all of the Tier protocol, got {type(tier).__name__} without {missing}"
        )
    return tier


def _load(entry: EntryPoint) -> Callable[..., Tier]:
    try:
        factory: Callable[..., Tier] = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tier {entry.name!r}: the entry point {entry.value} can't be loaded: {error}") from error
    return factory


def _members() -> set[str]:
    """What the protocol asks for."""
    return {name for name in (*vars(Tier), *Tier.__annotations__) if not name.startswith("_")}
