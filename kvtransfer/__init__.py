"""Moves the KV cache of language models between GPU memory, pinned host memory and storage.

`import kvtransfer` loads nothing but this file: each public name is imported from its module on first use,
so that neither torch nor a GPU is touched before something needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtransfer.books import TierPlan
    from kvtransfer.cache import TieredCache
    from kvtransfer.cache_handles import CacheLoad, CacheStore
    from kvtransfer.commands import Scope
    from kvtransfer.config import Config, load_config
    from kvtransfer.directory import Directory
    from kvtransfer.engine import TransferEngine
    from kvtransfer.fifo import FifoStream
    from kvtransfer.handles import PageState, TransferHandle, TransferResult
    from kvtransfer.hooks import layerwise
    from kvtransfer.index import PrefixIndex
    from kvtransfer.jobs import PrefixHit
    from kvtransfer.kernels.errors import (
        CapacityError,
        ConfigError,
        CudaError,
        DeadlineExceeded,
        KVTransferError,
        LayoutError,
        OwnershipError,
        RecordError,
        TierError,
        TransferCancelled,
        TransferError,
        UnavailableError,
    )
    from kvtransfer.kernels.events import Observer
    from kvtransfer.kernels.layout import Layout, Part
    from kvtransfer.kernels.spec import Component, KVSpec
    from kvtransfer.link import LinkProfile
    from kvtransfer.mover import Mover
    from kvtransfer.plan import Plan
    from kvtransfer.pool import KVPool
    from kvtransfer.tiers.host import HostTier
    from kvtransfer.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "CacheLoad",
    "CacheStore",
    "CapacityError",
    "Component",
    "Config",
    "ConfigError",
    "CudaError",
    "DeadlineExceeded",
    "Directory",
    "FifoStream",
    "HostTier",
    "KVPool",
    "KVSpec",
    "KVTransferError",
    "Layout",
    "LayoutError",
    "LinkProfile",
    "Mover",
    "Observer",
    "OwnershipError",
    "PageState",
    "Part",
    "Plan",
    "PrefixHit",
    "PrefixIndex",
    "RecordError",
    "Scope",
    "TierError",
    "TierPlan",
    "TieredCache",
    "TransferCancelled",
    "TransferEngine",
    "TransferError",
    "TransferHandle",
    "TransferResult",
    "UnavailableError",
    "Verdict",
    "__version__",
    "layerwise",
    "load_config",
]

_MODULES = {
    "kvtransfer.books": ("TierPlan",),
    "kvtransfer.cache": ("TieredCache",),
    "kvtransfer.cache_handles": ("CacheLoad", "CacheStore"),
    "kvtransfer.commands": ("Scope",),
    "kvtransfer.config": ("Config", "load_config"),
    "kvtransfer.directory": ("Directory",),
    "kvtransfer.engine": ("TransferEngine",),
    "kvtransfer.fifo": ("FifoStream",),
    "kvtransfer.handles": ("PageState", "TransferHandle", "TransferResult"),
    "kvtransfer.hooks": ("layerwise",),
    "kvtransfer.index": ("PrefixIndex",),
    "kvtransfer.jobs": ("PrefixHit",),
    "kvtransfer.kernels.errors": (
        "CapacityError",
        "ConfigError",
        "CudaError",
        "DeadlineExceeded",
        "KVTransferError",
        "LayoutError",
        "OwnershipError",
        "RecordError",
        "TierError",
        "TransferCancelled",
        "TransferError",
        "UnavailableError",
    ),
    "kvtransfer.kernels.events": ("Observer",),
    "kvtransfer.kernels.layout": ("Layout", "Part"),
    "kvtransfer.kernels.spec": ("Component", "KVSpec"),
    "kvtransfer.link": ("LinkProfile",),
    "kvtransfer.mover": ("Mover",),
    "kvtransfer.plan": ("Plan",),
    "kvtransfer.pool": ("KVPool",),
    "kvtransfer.tiers.host": ("HostTier",),
    "kvtransfer.verdict": ("Verdict",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
