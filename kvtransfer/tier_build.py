"""TierMaker: lower tiers from their options, by name, with what a configuration does not say."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtransfer.config import load_config
from kvtransfer.config_tiers import TierOptions
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.registry import make_tier, tier_factory


@dataclass(frozen=True)
class TierMaker:
    """Makes tiers of one process of a deployment.

    spec       of the records: what this process holds of a page
    namespace  digest of the content namespace of the model served (32 bytes): disks name their folder by it
    place      which process of the deployment this is; owners: how many of them share what disks may hold
    """

    spec: KVSpec
    namespace: bytes
    place: Place = Place()  # noqa: RUF009  (frozen)
    owners: int = 1
    observer: Observer = NO_OBSERVER

    def __call__(self, name: str, options: TierOptions | Mapping[str, Any]) -> Tier:
        """The tier ``name``, by the registry (`kvtransfer.tiers.registry`). Options may be plain, as in a file.

        A constructor gets what it asks for by these names: name, spec, namespace, place, owners, observer. Raises
        ConfigError on options that don't fit.
        """
        if not isinstance(options, TierOptions):
            options = load_config(arguments={"tiers": {name: dict(options)}}, environment={}).tiers[name]
        wanted = inspect.signature(tier_factory(options.kind)).parameters
        known = {"name": name} | {
            what: getattr(self, what) for what in ("spec", "namespace", "place", "owners", "observer")
        }
        return make_tier(
            options.kind, **{what: value for what, value in known.items() if what in wanted} | options.settings()
        )
