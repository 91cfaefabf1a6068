"""Moves the KV cache of language models between GPU memory, pinned host memory and storage.

`import kvtransfer` loads nothing but this file: each public name is imported from its module on first use,
so that neither torch nor a GPU is touched before something needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtransfer.engine import TransferEngine
    from kvtransfer.fifo import FifoStream
    from kvtransfer.handles import PageState, TransferHandle, TransferResult, Verdict
    from kvtransfer.hooks import layerwise
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
    from kvtransfer.plan import Plan
    from kvtransfer.pool import KVPool
    from kvtransfer.tiers.host import HostTier

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Component",
    "ConfigError",
    "CudaError",
    "DeadlineExceeded",
    "FifoStream",
    "HostTier",
    "KVPool",
    "KVSpec",
    "KVTransferError",
    "Layout",
    "LayoutError",
    "LinkProfile",
    "Observer",
    "OwnershipError",
    "PageState",
    "Part",
    "Plan",
    "RecordError",
    "TierError",
    "TransferCancelled",
    "TransferEngine",
    "TransferError",
    "TransferHandle",
    "TransferResult",
    "UnavailableError",
    "Verdict",
    "__version__",
    "layerwise",
]

_MODULES = {
    "kvtransfer.engine": ("TransferEngine",),
    "kvtransfer.fifo": ("FifoStream",),
    "kvtransfer.handles": ("PageState", "TransferHandle", "TransferResult", "Verdict"),
    "kvtransfer.hooks": ("layerwise",),
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
    "kvtransfer.plan": ("Plan",),
    "kvtransfer.pool": ("KVPool",),
    "kvtransfer.tiers.host": ("HostTier",),
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
