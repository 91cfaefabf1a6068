"""The tiers below the host of a configuration, opened for one process of an engine, and asked one after the other."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvtransfer.config_fields import Config
from kvtransfer.config_tiers import DiskOptions, MemoryOptions, TierOptions
from kvtransfer.kernels.errors import ConfigError, TierError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tier_build import TierMaker
from kvtransfer.tiers.base import BatchResult, PageStatus, RecordBuffer, Tier, TierHandle, TierStats
from kvtransfer.tiers.disk_folder import Place

logger = logging.getLogger(__name__)


def open_lower_tiers(
    config: Config, spec: KVSpec, namespace: bytes, *, place: Place, owners: int = 1, share: float = 1.0
) -> dict[str, Tier]:
    """The tiers of ``config`` below the host, by name, in the order in which they are asked.

    spec, namespace  of the records
    place, owners    which process this is, and how many share what the disks may hold (`DiskTier`)
    share            of each capacity that is for these records, where an engine keeps several kinds of them

    Raises ConfigError where there is none, and what opening one raises: those opened before are closed again.
    """
    if not config.lower_tiers:
        raise ConfigError("tiers: expected at least one below the host (disk, redis, mooncake ...), got none")
    make = TierMaker(spec, namespace, place, owners)
    opened: dict[str, Tier] = {}
    try:
        for name, options in config.lower_tiers.items():
            opened[name] = make(name, _share_of(options, share))
    except BaseException:
        for tier in opened.values():
            tier.close(drain=False)
        raise
    return opened


def _share_of(options: TierOptions, share: float) -> TierOptions:
    """The options of a tier that may take this share of the room; servers of others know no limit of ours."""
    if not isinstance(options, DiskOptions | MemoryOptions):
        return options
    smaller: dict[str, Any] = {}
    if options.cache_gb is not None:
        smaller["cache_gb"] = options.cache_gb * share
    pages = getattr(options, "pages", None)
    if pages is not None:
        smaller["pages"] = max(1, int(pages * share))
    return structs.replace(options, **smaller)


class TierStack:
    """Tiers asked one after the other, each for what those before it lack. Thread-safe; calls wait for the tiers.

    A put goes to all of them, or to those in ``put_to``. A tier that fails is passed over, and logged once until it
    answers again; its pages are misses. ``deadline_s`` ends each batch, and with it each call.
    """

    def __init__(
        self, tiers: Mapping[str, Tier], *, deadline_s: float = 30.0, put_to: Collection[str] | None = None
    ) -> None:
        self.tiers = dict(tiers)
        self._put_to = set(tiers) if put_to is None else set(put_to)
        self._deadline_s = deadline_s
        self._failing: set[str] = set()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Records lie in ``memory``: tell the tiers that must know."""
        for tier in self.tiers.values():
            if memory.nbytes and tier.needs_registration:
                tier.register(memory)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether some tier has each record."""
        found = [False] * len(keys)
        for name, tier in self.tiers.items():
            left = [at for at, ok in enumerate(found) if not ok]
            if left:
                self._settle(name, found, left, tier.lookup([keys[at] for at in left]).result())
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> list[bool]:
        """Fill each buffer from the first tier that has it; True where it is whole."""
        got = [False] * len(keys)
        for name, tier in self.tiers.items():
            left = [at for at, ok in enumerate(got) if not ok]
            if left:
                asked = tier.get_into(
                    [keys[at] for at in left], [buffers[at] for at in left], deadline_s=self._deadline_s
                )
                self._settle(name, got, left, asked.result())
        return got

    def put(self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer]) -> list[bool]:
        """Give the records to the tiers that take them; True where one has it."""
        kept = [False] * len(keys)
        handles: dict[str, TierHandle] = {}
        try:
            for name in self._put_to:
                handles[name] = self.tiers[name].put_from(keys, buffers, deadline_s=self._deadline_s)
        finally:  # whatever one of them raises: the buffers belong to the others until they are done
            results = {name: handle.result() for name, handle in handles.items()}
        for name, result in results.items():
            self._settle(name, kept, range(len(keys)), result)
        return kept

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget records in every tier; how many went."""
        return sum(len(tier.remove(keys).result().positions(PageStatus.OK)) for tier in self.tiers.values())

    def stats(self) -> dict[str, TierStats]:
        """Of each tier, by name."""
        return {name: tier.stats() for name, tier in self.tiers.items()}

    def close(self) -> None:
        """Close all tiers, finishing what they were given. Raises the first TierError when all are closed."""
        errors: list[TierError] = []
        for tier in self.tiers.values():
            try:
                tier.close(timeout_s=self._deadline_s)
            except TierError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _settle(self, name: str, outcome: list[bool], positions: Sequence[int], result: BatchResult) -> None:
        for at, status in zip(positions, result.statuses, strict=True):
            outcome[at] = outcome[at] or status is PageStatus.OK
        failed = len(result.positions(PageStatus.ERROR))
        if failed and name not in self._failing:
            self._failing.add(name)
            cause = next(iter(result.errors.values()), None)
            logger.warning("kvtransfer: tier %s fails, its pages are misses: %s", name, cause)
        elif not failed and result.statuses and name in self._failing:
            self._failing.discard(name)
            logger.info("kvtransfer: tier %s answers again", name)
