"""TierMaker: lower tiers from their options, by name, with what a configuration does not say."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtransfer.config import Config, load_config
from kvtransfer.config_tiers import TierOptions
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.disk_folder import Place
from kvtransfer.tiers.head_group_tier import HeadGroupTier
from kvtransfer.tiers.head_groups import HeadGroups
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.registry import make_tier, tier_factory


@dataclass(frozen=True)
class RankPart:
    """Which part of a model this process holds, and whether its tiers share pages with other tensor-parallel sizes.

    model_spec       of the whole model
    shard            the part
    by_group         some tier holds records by head group: then keys are those of all heads, on every rank
    share_across_tp  of tiers that others share, where their options say nothing
    """

    model_spec: KVSpec
    shard: Shard
    by_group: bool = False
    share_across_tp: int | None = None

    @classmethod
    def configured(cls, config: Config, model_spec: KVSpec, shard: Shard) -> RankPart:
        """As a configuration says."""
        return cls(model_spec, shard, config.shares_across_tp, config.share_across_tp)

    @property
    def keys(self) -> Shard:
        """What the keys of pages are made with (`Mover`)."""
        return replace(self.shard, head_part=0, head_parts=1) if self.by_group else self.shard

    def own_namespace(self, namespace: bytes) -> bytes:
        """What names the data of a tier of this process alone (32 bytes): ``namespace``, and the heads held here where
        keys don't say them. An instance of another TP size may be started over the same disks: rank 1 of 4 and rank 1
        of 8 hold other heads in records of one length."""
        if self.keys == self.shard:
            return namespace
        return hashlib.sha256(b"kvtransfer part of a model\0" + namespace + self.shard.canonical()).digest()

    def groups(self, share_across_tp: int, spec: KVSpec) -> HeadGroups:
        """How this process cuts its pages, of ``spec``. Raises ConfigError."""
        shard = self.shard
        if shard.head_parts > 1 and not self.by_group:
            raise ConfigError(
                "share_across_tp: expected a cache whose configuration has it from the start, got one whose keys tell "
                "tensor-parallel ranks apart; set it in the configuration"
            )
        if shard.context_parts > 1:
            raise ConfigError(
                f"share_across_tp: expected ranks that hold all tokens of a page, got part {shard.context_part} of "
                f"{shard.context_parts}; leave it out with context parallelism"
            )
        try:
            groups = HeadGroups(
                self.model_spec,
                share_across_tp=share_across_tp,
                tp_size=shard.head_parts,
                tp_rank=shard.head_part,
                layers=(shard.layer_start, shard.layer_stop),
            )
        except LayoutError as error:
            raise ConfigError(f"share_across_tp: {error}") from error
        if groups.rank_spec != spec:
            raise ConfigError(
                f"share_across_tp: expected a pool of this rank's part of the model, {groups.rank_spec.canonical()}, "
                f"got one of {spec.canonical()}; give model_spec= and shard="
            )
        return groups


@dataclass(frozen=True)
class TierMaker:
    """Makes tiers of one process of a deployment.

    spec       of the records: what this process holds of a page
    namespace  digest of the content namespace of the model served (32 bytes): disks name their folder by it, or by
               that of their part of the model
    place      which process of the deployment this is; owners: how many of them share what disks may hold
    part       for ``share_across_tp``; None: not here
    """

    spec: KVSpec
    namespace: bytes
    place: Place = Place()  # noqa: RUF009  (frozen)
    owners: int = 1
    observer: Observer = NO_OBSERVER
    part: RankPart | None = None

    def __call__(self, name: str, options: TierOptions | Mapping[str, Any]) -> Tier:
        """The tier ``name``, by the registry (`kvtransfer.tiers.registry`). Options may be plain, as in a file.

        A constructor gets what it asks for by these names: name, spec, namespace, place, owners, observer. One that
        holds records by head group (``share_across_tp``) is wrapped in a `HeadGroupTier`. A tier of this process alone
        gets the namespace of its part (`RankPart.own_namespace`). Raises ConfigError on options that don't fit.
        """
        if not isinstance(options, TierOptions):
            options = load_config(arguments={"tiers": {name: dict(options)}}, environment={}).tiers[name]
        groups = None if options.shared_by is None else self._groups(name, options.shared_by)
        spec = self.spec if groups is None else groups.record_spec
        known = {"name": name, "spec": spec, "place": self.place, "owners": self.owners, "observer": self.observer}
        wanted = inspect.signature(tier_factory(options.kind)).parameters

        def made(namespace: bytes) -> Tier:
            given = {what: value for what, value in (known | {"namespace": namespace}).items() if what in wanted}
            return make_tier(options.kind, **given | options.settings())

        own = self.namespace if groups is not None else self._own_namespace()
        tier = made(own)
        if tier.shared and own != self.namespace and "namespace" in wanted:  # one of another package
            tier.close(drain=False)
            tier = made(self.namespace)
        try:
            return self._by_group(name, tier, groups)
        except BaseException:
            tier.close(drain=False)
            raise

    def check(self, name: str, tier: Tier) -> None:
        """Raise ConfigError where ranks would take each other's pages for their own: the keys don't tell them apart,
        and ``tier``, which others share, has no records by head group, or those of another rank; or it keeps those of
        this process alone under a ``namespace`` that ranks of other TP sizes have too (`RankPart.own_namespace`)."""
        part = self.part
        if part is None or not part.by_group or part.shard.head_parts == 1:
            return
        if tier.shared and not isinstance(tier, HeadGroupTier):
            raise ConfigError(
                f"tiers.{name}: expected share_across_tp here too, since keys don't tell tensor-parallel ranks apart "
                "where a tier has it, got a shared tier without; set it for this one, or for all"
            )
        if isinstance(tier, HeadGroupTier):
            mine, got = self._groups(name, tier.groups.count), tier.groups
            if (mine.owned, mine.layers) != (got.owned, got.layers):
                raise ConfigError(
                    f"tiers.{name}: expected head groups {[*mine.owned]} of {mine.count}, layers {mine.layers}, which "
                    f"this rank holds, got {[*got.owned]} of {got.count}, layers {got.layers}; make it for this rank"
                )
        namespace = getattr(tier, "namespace", None)  # a disk's
        if not tier.shared and isinstance(namespace, bytes) and namespace != self._own_namespace():
            raise ConfigError(
                f"tiers.{name}: expected a tier under the namespace of this rank's part of the model, since keys don't "
                f"tell tensor-parallel ranks apart where a tier has share_across_tp, got {namespace.hex()}; let "
                "it be made from its options, or give it RankPart.own_namespace"
            )

    def _own_namespace(self) -> bytes:
        return self.namespace if self.part is None else self.part.own_namespace(self.namespace)

    def _by_group(self, name: str, tier: Tier, groups: HeadGroups | None) -> Tier:
        if groups is not None and not tier.shared:
            raise ConfigError(
                f"tiers.{name}.share_across_tp: expected a tier that other processes share, got one of this process "
                "alone; leave it out"
            )
        if groups is None and tier.shared and self.part is not None and self.part.share_across_tp is not None:
            groups = self._groups(name, self.part.share_across_tp)
        if groups is not None:
            return HeadGroupTier(tier, groups, observer=self.observer)
        self.check(name, tier)
        return tier

    def _groups(self, name: str, share_across_tp: int) -> HeadGroups:
        if self.part is None:
            raise ConfigError(
                f"tiers.{name}.share_across_tp: expected a cache that knows which heads this process holds "
                "(TieredCache.create, PrefixCache.create), got an engine's own tiers; leave it out"
            )
        try:
            return self.part.groups(share_across_tp, self.spec)
        except ConfigError as error:
            raise ConfigError(f"tiers.{name}: {error}") from error
