"""What `kvtransfer verify` is told, and that it makes sense."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.server_client import Api
from kvtransfer.verify import Reference
from kvtransfer.verify_compare import NEAR_TIE

Phase = Literal["baseline", "test", "both"]


@dataclass(frozen=True)
class VerifyOptions:
    """See docs/verify.md. ``url`` None: a local model."""

    phase: Phase
    file: Path | None = None
    url: str | None = None
    api: Api | None = None
    model: str | None = None
    random_weights: bool = False
    device: str = "auto"
    page_size: int = 16
    config: Path | None = None
    prompts: Path | None = None
    most_prompts: int | None = None
    max_new_tokens: int = 32
    reference: Reference = "cold"
    allow_near_ties: bool = False
    near_tie: float = NEAR_TIE
    explain: bool = False
    settle_s: float = 1.0
    flush_path: str | None = None
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    flip_page: int | None = None

    def check(self) -> None:
        """Raise ConfigError on what can't work."""
        if self.url is not None and (self.phase == "both" or self.random_weights or self.config is not None):
            raise ConfigError(
                "--url: expected phase baseline (a server without kvtransfer), then phase test (one with it), and "
                f"no options of a local model, got {self.phase}"
                + ", --random-weights" * self.random_weights
                + ", --config" * (self.config is not None)
            )
        if self.url is not None and self.flip_page is not None:
            raise ConfigError("--flip-page: expected a local model, got --url")
        if self.phase != "both" and self.file is None:
            raise ConfigError(f"phase {self.phase}: expected --file, which phase baseline writes and phase test reads")
        if self.file is not None and not self.file.absolute().parent.is_dir():
            raise ConfigError(f"--file {self.file}: expected a file in a folder that exists")
        if self.file is not None and self.phase != "test":  # written at the end: known before all is asked
            where = self.file if self.file.exists() else self.file.absolute().parent
            if self.file.is_dir() or not os.access(where, os.W_OK):
                raise ConfigError(f"--file {self.file}: expected a file that may be written")
        if self.phase == "test" and self.prompts is not None:
            raise ConfigError("--prompts: expected phase baseline, whose file holds the prompts, got phase test")
        for name, value, least in (
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--page-size", self.page_size, 1),
            ("--most-prompts", self.most_prompts, 1),
            ("--flip-page", self.flip_page, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}: expected at least {least}, got {value}")
        for name, number in (("--near-tie", self.near_tie), ("--settle-s", self.settle_s)):
            if not 0 <= number < float("inf"):
                raise ConfigError(f"{name}: expected 0 or more, got {number}")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"--timeout-s: expected a number above 0, got {self.timeout_s}")
