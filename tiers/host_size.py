"""Resizing a host tier whose memory other tiers know: what goes is struck from their books first, what comes is told.

A tier that has mapped memory for its device, or registered it with a network card, goes on using the *old* memory of an
address whose pages were given back and come again: bytes would land where nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import KVTransferError, OwnershipError
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.registered import address_range


def register_host(host: HostTier, tier: Tier) -> None:
    """Tell ``tier`` of the host's memory, part by part, so that `resize_host` can take parts away again. Once the host
    is ready (`HostTier.wait_ready`). All of it, or none with what `Tier.register` raises."""
    _register(host.parts(), [tier])


def unregister_host(host: HostTier, tier: Tier) -> None:
    """Undo `register_host`, whatever the size is now. Raises what `Tier.unregister` does; after OwnershipError the tier
    knows all of it still, and this can be called again."""
    gone: list[NDArray[np.uint8]] = []
    try:
        for part in host.parts():
            tier.unregister(part)
            gone.append(part)
    except OwnershipError:
        for part in gone:
            tier.register(part)
        raise


def resize_host(host: HostTier, slots: int, tiers: Iterable[Tier] = (), *, wait_s: float = 30.0) -> int:
    """`HostTier.resize`, with ``tiers`` told before memory goes and after it has come. They know it by `register_host`.

    Blocks; one thread at a time. Bytes given back. Raises what `HostTier.resize` does; OwnershipError, too, if a batch
    of a tier uses memory that is to go; what `Tier.register` raises if one does not take new memory. Nothing has
    changed then, but for the CudaError of `HostTier.resize`.
    """
    told, before = list(tiers), host.ready_slots
    going = host.parts(slots) if slots < before else []
    gone: list[tuple[Tier, NDArray[np.uint8]]] = []
    try:
        for tier in told:
            for part in going:
                tier.unregister(part)
                gone.append((tier, part))
        had = {address_range(part)[0] for part in host.parts()}
        given = host.resize(slots, wait_s=wait_s)
    except KVTransferError:
        if host.ready_slots == before:
            for tier, part in gone:
                tier.register(part)
        raise
    try:
        _register([part for part in host.parts() if address_range(part)[0] not in had], told)
    except KVTransferError:
        host.resize(before, wait_s=wait_s)
        raise
    return given


def _register(parts: list[NDArray[np.uint8]], tiers: list[Tier]) -> None:
    done: list[tuple[Tier, NDArray[np.uint8]]] = []
    try:
        for tier in tiers:
            for part in parts:
                tier.register(part)
                done.append((tier, part))
    except KVTransferError:
        for tier, part in done:
            tier.unregister(part)
        raise
