"""StopPolicy: how long a request that waits for a prefetch waits before it goes on with what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtransfer.kernels.errors import ConfigError

Kind = Literal["best_effort", "wait_complete", "timeout"]
_KINDS = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True)
class StopPolicy:
    """When a prefetch is over for the request that needs it.

    best_effort    at once: what has come by then is used.
    wait_complete  when every page has its outcome (the tier's own time-outs bound that).
    timeout        like wait_complete, but at most ``base_s + per_ki_token_s * tokens / 1024`` from its start on.
    """

    kind: Kind = "timeout"
    base_s: float = 1.0
    per_ki_token_s: float = 0.25

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"stop policy: expected one of {', '.join(_KINDS)}, got {self.kind!r}")
        if not (self.base_s >= 0 and self.per_ki_token_s >= 0):
            raise ConfigError(f"stop policy: expected times of 0 or more, got {self.base_s} and {self.per_ki_token_s}")

    def limit_s(self, tokens: int) -> float | None:
        """How long to wait for ``tokens`` tokens, from the start of the prefetch; None: until it is complete."""
        if self.kind == "timeout":
            return self.base_s + self.per_ki_token_s * tokens / 1024
        return 0.0 if self.kind == "best_effort" else None
