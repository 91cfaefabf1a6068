"""The configuration: every field, its type, its bounds, its default. docs/configuration.md says what each is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from kvtransfer.config_check import FieldError, Section, did_you_mean, shown
from kvtransfer.config_tiers import Count, DiskOptions, HostOptions, Seconds, Share, TierOptions
from kvtransfer.kernels.errors import ConfigError

EVICTION_POLICIES = ("lru", "lfu", "slru", "fifo", "priority", "path_score")
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2", "int8"]
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}
)
# What engines and other caches call them.
DTYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
        **dict.fromkeys(("fp16", "half", "float16"), "float16"),
        **dict.fromkeys(("fp32", "float", "float32"), "float32"),
        **dict.fromkeys(("fp8", "float8", "e4m3", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn"), "float8_e4m3"),
        **dict.fromkeys(("e5m2", "fp8_e5m2", "float8_e5m2"), "float8_e5m2"),
        "int8": "int8",
    }
)
_IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.A)
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class EvictionOptions(Section, frozen=True, kw_only=True):
    """Which pages of a full tier go, and when. Without ``low_watermark`` no more than is needed goes."""

    policy: str = "lru"
    slru_protected_hits: Count = 2
    high_watermark: Share = 1.0
    low_watermark: Share | None = None
    prune: bool = False
    prune_above: Share = 0.8
    prune_uses: Count = 3
    prune_idle_s: Seconds = 300.0
    prune_every_s: Seconds = 10.0

    def check(self) -> None:
        if self.policy not in EVICTION_POLICIES and not _IMPORTABLE.fullmatch(self.policy):
            raise FieldError(
                ("policy",),
                f"expected one of {', '.join(EVICTION_POLICIES)}, or package.module:Class, got {shown(self.policy)}"
                f"{did_you_mean(self.policy, EVICTION_POLICIES)}",
            )
        if self.low_watermark is not None and self.low_watermark > self.high_watermark:
            raise FieldError(
                ("low_watermark",),
                f"expected at most high_watermark, {self.high_watermark:g}, got {self.low_watermark:g}",
            )


class WriteOptions(Section, frozen=True, kw_only=True):
    """When a page goes to a lower tier."""

    policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    min_hits: Count = 2
    batch_pages: Count = 128


class PrefetchOptions(Section, frozen=True, kw_only=True):
    """Pages of lower tiers that are fetched while a request waits."""

    stop: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    min_tokens: _Tokens = 256
    timeout_base_s: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    timeout_per_ki_token_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.25

    def timeout_s(self, tokens: int) -> float:
        """Seconds that a prefetch of ``tokens`` may take where ``stop`` is "timeout"."""
        return self.timeout_base_s + self.timeout_per_ki_token_s * tokens / 1024


class NamespaceOptions(Section, frozen=True, kw_only=True):
    """What separates pages of the same tokens: see `kvtransfer.tiers.keys.Namespace`."""

    one_of = (("salt", "salt_file"),)

    model: str | None = None
    salt: str | None = None
    salt_file: str | None = None
    page_keys: Literal["sha256", "xxh3_128"] = "sha256"

    def salt_bytes(self) -> bytes:
        """The tenant's salt, b"" for none. Reads ``salt_file``: all of it, but for one line end.

        Raises ConfigError where that can't be read or is empty.
        """
        if self.salt_file is None:
            return (self.salt or "").encode()
        try:
            salt = Path(self.salt_file).read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"namespace.salt_file: expected a readable file, got {self.salt_file}: {error}"
            ) from error
        salt = salt.removesuffix(b"\n").removesuffix(b"\r")
        if not salt:
            raise ConfigError(f"namespace.salt_file: expected a salt, got the empty file {self.salt_file}")
        return salt


class Config(Section, frozen=True, kw_only=True):
    """All of it. `kvtransfer.config.load_config` makes one from a file, the environment and arguments.

    ``tiers`` holds the host first, then the lower tiers in the order in which they are asked.
    """

    enabled: bool = True
    kv_dtype: KVDtype = "auto"
    deadline_s: Seconds = 30.0
    verify: bool = True
    layerwise: bool = True
    path: Literal["auto", "staged", "strided", "mapped", "cpu"] = "auto"
    sm_budget: Count | Literal["prefill", "decode"] = "prefill"
    staging_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 384 << 20
    share_across_tp: Count | None = None
    instance: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    instances: Count = 1
    warm_file: str | None = None
    kept_prefixes: _Tokens = 1000
    prefill_tokens_per_s: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    tiers: dict[str, TierOptions] = field(default_factory=lambda: {"host": HostOptions()})
    eviction: EvictionOptions = EvictionOptions()
    write: WriteOptions = WriteOptions()
    prefetch: PrefetchOptions = PrefetchOptions()
    namespace: NamespaceOptions = NamespaceOptions()

    def check(self) -> None:
        if self.instance >= self.instances:
            raise FieldError(("instance",), f"expected less than instances, {self.instances}, got {self.instance}")
        owners: dict[str, str] = {}
        for name, options in self.tiers.items():
            for folder in options.paths if isinstance(options, DiskOptions) else ():
                if (owner := owners.setdefault(folder.rstrip("/"), name)) != name:
                    raise FieldError(("tiers", name, "paths"), f"expected folders of its own, got {folder} of {owner}")

    @property
    def host(self) -> HostOptions:
        """The host tier's options."""
        host = self.tiers.get("host", HostOptions())
        assert isinstance(host, HostOptions)
        return host

    @property
    def shares_across_tp(self) -> bool:
        """Whether some tier holds records by head group, or is to if it comes later: see ``share_across_tp``."""
        said = [self.share_across_tp, *(options.shared_by for options in self.lower_tiers.values())]
        return any(groups is not None for groups in said)

    @property
    def lower_tiers(self) -> dict[str, TierOptions]:
        """The tiers below the host, in the order in which they are asked."""
        return {name: options for name, options in self.tiers.items() if name != "host"}

    def engine_settings(self) -> dict[str, Any]:
        """Arguments for `TransferEngine`."""
        names = ("deadline_s", "verify", "path", "sm_budget", "staging_bytes")
        return {name: getattr(self, name) for name in names}
