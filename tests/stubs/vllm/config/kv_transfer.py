"""How a connector is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "fail"
