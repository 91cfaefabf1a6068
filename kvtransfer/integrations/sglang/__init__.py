"""kvtransfer inside SGLang 0.5.23. docs/sglang.md says how to start it with each of these.

    KVTransferStorage  behind HiCache's host memory           --hicache-storage-backend dynamic
    KVTransferLinker   instead of it, from the device pools   --unified-cache-external-linker-backend dynamic
    plugin             a radix backend, for SGLang's plug-ins  --radix-cache-backend kvtransfer

Nothing of SGLang is imported before one of the names is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtransfer.integrations.sglang.linker import KVTransferLinker
    from kvtransfer.integrations.sglang.storage import KVTransferStorage

__all__ = ["KVTransferLinker", "KVTransferStorage", "plugin"]

_MODULES = {
    "KVTransferLinker": "kvtransfer.integrations.sglang.linker",
    "KVTransferStorage": "kvtransfer.integrations.sglang.storage",
}


def plugin() -> None:
    """What SGLang calls at start (entry point ``sglang.srt.plugins``): registers the radix backend."""
    from kvtransfer.integrations.sglang.radix import register  # noqa: PLC0415  (only where SGLang asks for it)

    register()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
