"""How many pages the tiers of a configuration hold, for a KVSpec."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.config_fields import Config
from kvtransfer.config_tiers import HostOptions, TierOptions
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.record import padded_bytes, trailer_bytes


@dataclass(frozen=True)
class TierPages:
    """``pages`` of one rank, or None where the configuration does not say; ``note`` says why, or what it leaves out."""

    name: str
    pages: int | None
    tokens: int | None
    note: str


def record_bytes(spec: KVSpec) -> int:
    """Bytes of one page in a tier: its payload padded to whole blocks, and its trailer."""
    return padded_bytes(spec.page_bytes) + trailer_bytes(spec)


def pages_of(config: Config, spec: KVSpec, *, ranks: int = 1, device_pages: int | None = None) -> list[TierPages]:
    """The pages of each tier for one rank.

    spec          what one rank holds (its layers and heads)
    ranks         processes of one instance on this machine: they share what the disks may hold
    device_pages  of the rank's device pool: what a ``ratio`` is of

    Raises ConfigError for a tier without room for one page.
    """
    if ranks < 1:
        raise ConfigError(f"ranks: expected at least 1, got {ranks}")
    per_page = record_bytes(spec)
    found = []
    for name, options in config.tiers.items():
        pages, note = _pages(options, per_page, ranks * config.instances, spec, device_pages)
        if pages == 0:
            raise ConfigError(
                f"tiers.{name}: expected room for at least one page of {per_page:,} bytes a rank ({note}), got less"
            )
        found.append(TierPages(name, pages, None if pages is None else pages * spec.page_size, note))
    return found


def _pages(
    options: TierOptions, per_page: int, owners: int, spec: KVSpec, device_pages: int | None
) -> tuple[int | None, str]:
    exact: int | None = getattr(options, "pages", None)
    if exact is not None:
        return exact, "as configured"
    capacity = options.capacity_bytes()
    if options.kind == "disk" and capacity is not None:
        return capacity // owners // per_page, f"its share of {owners}; journals take a little of it"
    if capacity is not None:
        return capacity // per_page, "per rank"
    if isinstance(options, HostOptions):
        if options.ratio is None:
            return None, "what the machine and its cgroups leave, decided at start"
        if device_pages is None:
            return None, f"{options.ratio:g} of the device pool, whose size is not given"
        return int(options.ratio * device_pages * spec.page_bytes) // per_page, f"{options.ratio:g} of the device pool"
    return None, "as much as its server holds"
