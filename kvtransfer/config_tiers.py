"""Options of the tiers. Each class is one kind; ``settings`` gives what its tier's constructor takes.

Sizes are in GB of 2^30 bytes, times in seconds. What is not an option here (the spec, the namespace, observers) is
given by whoever makes the tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from kvtransfer.config_check import FieldError, Section

GB = 1 << 30
ENTRY_POINTS = "kvtransfer.tiers"

# The upper ends keep sums from overflowing; nobody reaches them: an exabyte, and what a thread can wait for.
Size = Annotated[float, Meta(gt=0, le=1e9)]
SizeOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Pages = Annotated[int, Meta(ge=1, le=2**40)]


class TierOptions(Section, frozen=True, kw_only=True):
    """What all tiers have. ``kind`` names the class; it may be left out where the tier's name is its kind."""

    kind: str

    @property
    def shared_by(self) -> int | None:
        """``share_across_tp`` of a kind that other processes share, where it is given."""
        found: int | None = getattr(self, "share_across_tp", None)
        return found

    def settings(self) -> dict[str, Any]:
        """Arguments for the tier's constructor: every option by its own name. Kinds whose constructors take bytes, or
        other names, say so."""
        return self.named(*(name for name in self.__struct_fields__ if name not in ("kind", "share_across_tp")))

    def capacity_bytes(self) -> int | None:
        """What the tier may hold, in bytes; None where that is given otherwise or not at all."""
        cache_gb: float | None = getattr(self, "cache_gb", None)
        return None if cache_gb is None else gb_to_bytes(cache_gb)

    def named(self, *names: str) -> dict[str, Any]:
        """These fields by their own names."""
        return {name: getattr(self, name) for name in names}


class HostOptions(TierOptions, frozen=True, kw_only=True):
    """Pinned host memory, of each rank. At most one of ``cache_gb``, ``pages`` and ``ratio`` (of the device pool); with
    none of them, what the machine and its cgroups leave."""

    one_of = (("cache_gb", "pages", "ratio"),)

    kind: Literal["host"] = "host"
    cache_gb: Size | None = None
    pages: Pages | None = None
    ratio: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    pin: bool | None = None
    shared: bool = False
    huge_pages: bool | Literal["reserved"] = True
    threads: Count | None = None
    background: bool = False
    chunk_gb: Size = 64.0
    most_gb: Size | None = None

    def settings(self) -> dict[str, Any]:
        """Arguments for `HostTier`. A size given by ``ratio`` is not among them: see `sized`."""
        return {
            "capacity_pages": self.pages,
            "capacity_bytes": self.capacity_bytes(),
            **self.named("pin", "shared", "huge_pages", "threads", "background"),
            "chunk_bytes": gb_to_bytes(self.chunk_gb),
            "most_bytes": None if self.most_gb is None else gb_to_bytes(self.most_gb),
        }

    def sized(self, device_pool_bytes: int) -> dict[str, Any]:
        """`settings` of a rank whose device pool holds ``device_pool_bytes``."""
        settings = self.settings()
        if self.ratio is not None:
            settings["capacity_bytes"] = int(self.ratio * device_pool_bytes)
        return settings


class DiskOptions(TierOptions, frozen=True, kw_only=True):
    """Slab files in folders of local disks. ``cache_gb`` is for all processes of the machine together."""

    one_of = (("cache_gb", "pages"),)

    kind: Literal["disk"] = "disk"
    cache_gb: Size | None = None
    pages: Pages | None = None
    paths: tuple[str, ...]
    sync: Literal["none", "interval", "batch"] = "none"
    interval_s: Seconds = 1.0
    file_gb: Size | None = None
    clean_every_s: Seconds = 60.0
    full_share: Share = 0.85
    idle_s: Seconds = 24 * 3600.0
    disk_share: Share = 0.85
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    direct: bool | None = None

    def check(self) -> None:
        if not self.paths:
            raise FieldError(("paths",), "expected at least one folder, got none")
        if len(set(self.paths)) != len(self.paths):
            raise FieldError(("paths",), f"expected folders that differ, got {', '.join(self.paths)}")
        if self.cache_gb is None and self.pages is None:
            raise FieldError(("cache_gb",), "expected a size: cache_gb or pages, got neither")

    def settings(self) -> dict[str, Any]:
        return {
            "paths": list(self.paths),
            "capacity_bytes": self.capacity_bytes(),
            "capacity_pages": self.pages,
            "file_bytes": None if self.file_gb is None else gb_to_bytes(self.file_gb),
            **self.named("sync", "interval_s", "clean_every_s", "full_share", "idle_s", "disk_share"),
            **self.named("engine", "direct"),
        }


class SharedOptions(TierOptions, frozen=True, kw_only=True):
    """A tier that other processes share. ``share_across_tp``: records by head group of so many ranks, which instances
    of other tensor-parallel sizes can read; None: as the whole configuration says."""

    share_across_tp: Count | None = None


class RedisOptions(SharedOptions, frozen=True, kw_only=True):
    """A Redis or Valkey server."""

    kind: Literal["redis"] = "redis"
    url: str
    prefix: str = "kvtransfer"
    ttl_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    connections: Count = 2
    timeout_s: Seconds = 2.0
    job_pages: Count = 128


class MooncakeOptions(SharedOptions, frozen=True, kw_only=True):
    """Mooncake Store."""

    kind: Literal["mooncake"] = "mooncake"
    master: str
    hostname: str
    prefix: str = "kvtransfer"
    metadata: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_gb: SizeOrZero = 0.0
    local_buffer_gb: SizeOrZero = 0.0
    replicas: Count = 1
    bounce_bytes: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    lease_s: Seconds = 5.0
    timeout_s: Seconds = 5.0
    workers: Count = 2
    job_pages: Count = 128

    def settings(self) -> dict[str, Any]:
        return {
            **self.named("master", "hostname", "prefix", "metadata", "protocol", "devices", "replicas", "lease_s"),
            **self.named("bounce_bytes", "timeout_s", "workers", "job_pages"),
            "segment_bytes": gb_to_bytes(self.segment_gb),
            "local_buffer_bytes": gb_to_bytes(self.local_buffer_gb),
        }


class ObjectStoreOptions(SharedOptions, frozen=True, kw_only=True):
    """S3, Google Cloud Storage, Azure, or a folder."""

    kind: Literal["object_store"] = "object_store"
    url: str
    prefix: str = "kvtransfer"
    options: dict[str, Any] = field(default_factory=dict)
    client_options: dict[str, Any] = field(default_factory=dict)
    timeout_s: Seconds = 10.0
    retries: Annotated[int, Meta(ge=0, le=1000)] = 1
    workers: Count = 8


class MemoryOptions(TierOptions, frozen=True, kw_only=True):
    """Memory of this process that is not pinned: for tests and for machines without a GPU."""

    kind: Literal["memory"] = "memory"
    cache_gb: Size
    workers: Count = 1
    timeout_s: Seconds = 5.0

    def settings(self) -> dict[str, Any]:
        return {"capacity_bytes": self.capacity_bytes(), **self.named("workers", "timeout_s")}


class OtherOptions(SharedOptions, frozen=True, kw_only=True):
    """A tier of another package: what stands beside ``kind`` and ``share_across_tp`` is handed to it as it is."""

    more: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return dict(self.more)


BUILT_IN: Mapping[str, type[TierOptions]] = MappingProxyType(
    {
        "host": HostOptions,
        "disk": DiskOptions,
        "memory": MemoryOptions,
        "redis": RedisOptions,
        "mooncake": MooncakeOptions,
        "object_store": ObjectStoreOptions,
    }
)


def other_kinds() -> list[str]:
    """Kinds of tiers that installed packages add. Imports none of them."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})


def gb_to_bytes(size_gb: float) -> int:
    """GB of 2^30 bytes in bytes, at least 1 where there is anything."""
    return max(int(size_gb * GB), 1 if size_gb > 0 else 0)
