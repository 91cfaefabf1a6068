"""HeadGroups: records that other tensor-parallel sizes can read.

A rank's page holds its own share of the heads, so a record of it serves that TP size alone. With
``share_across_tp=N`` a page is cut into records by head group, N of them, whatever the size of the rank that writes:
each rank writes the groups that it owns, and a rank of another size gathers the groups that make up its own share.
Cutting and gathering are one copy, planned by the layout algebra, between the rank's layout and page-first records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.coalesce import Box, Geometry, Side, coalesce, require_same_content
from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Shard, stored_keys

Ids = NDArray[np.int64]


class HeadGroups:
    """How rank ``tp_rank`` of ``tp_size`` cuts its pages into records. Immutable; no memory of its own.

    Args:
        spec: of the whole model, all heads; ``layers`` of it are this rank's (pipeline parallel), all unless given.
        share_across_tp: N, a multiple of every TP size that shares the records; their least common multiple is best.
            Where a model has fewer heads than N there is a group for each head, and ranks that hold a head together
            share its record.

    Attributes:
        count: groups in all. It is N, or the number of heads where that is smaller; 1 where no component has heads
            to cut (MLA).
        owned: the groups that make up this rank's share, in order.
        writes: whether this rank is the one that writes them: of ranks that hold the same heads the first does.
        rank_spec, record_spec: what the rank holds, and what one record holds. Components with one head are
            replicated: every group has them.

    Raises ConfigError or LayoutError, naming the component and the way out, if heads, N and the TP size don't fit.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        share_across_tp: int,
        tp_size: int,
        tp_rank: int,
        layers: tuple[int, int] | None = None,
    ) -> None:
        if share_across_tp < 1 or not 0 <= tp_rank < tp_size:
            raise ConfigError(
                f"expected share_across_tp >= 1 and 0 <= tp_rank < tp_size, "
                f"got {share_across_tp}, {tp_rank} of {tp_size}"
            )
        self.layers = (0, spec.num_layers) if layers is None else layers
        part = spec.select_layers(*self.layers)
        self.count, heads_a_group = _cut(spec, share_across_tp)
        if tp_size <= self.count:
            if self.count % tp_size:
                raise ConfigError(
                    f"tp_size {tp_size}: expected one that divides {self.count} head groups; "
                    "share_across_tp must be a multiple of every TP size that shares the records"
                )
            each = self.count // tp_size
            self.owned = range(tp_rank * each, (tp_rank + 1) * each)
            self.writes = True
            self.rank_spec = part.select_heads(tp_rank, tp_size)
        else:
            if heads_a_group > 1:
                raise ConfigError(
                    f"tp_size {tp_size}: expected at most {self.count}, got one that cuts groups of {heads_a_group} "
                    f"heads; take share_across_tp={tp_size} or a multiple of it"
                )
            if tp_size % self.count:
                raise ConfigError(
                    f"tp_size {tp_size}: expected a multiple of the {self.count} heads that ranks replicate"
                )
            replicas = tp_size // self.count
            self.owned = range(tp_rank // replicas, tp_rank // replicas + 1)
            self.writes = tp_rank % replicas == 0
            self.rank_spec = part.select_heads(self.owned[0], self.count)
        self.record_spec = part.select_heads(0, self.count)

    def shards(self) -> list[Shard]:
        """The shard of each owned group's record."""
        return [Shard(*self.layers, head_part=group, head_parts=self.count) for group in self.owned]

    def stored_keys(self, salt: bytes, namespace_digest: bytes, page_keys: Sequence[bytes]) -> list[bytes]:
        """Keys of the owned records of each page: page after page, group after group."""
        by_group = [stored_keys(salt, namespace_digest, page_keys, shard) for shard in self.shards()]
        return [key for page in zip(*by_group, strict=True) for key in page]

    def page_statuses(self, statuses: Sequence[PageStatus]) -> list[PageStatus]:
        """One a page, from one a record in the order of `stored_keys`: OK if all are, else the first that isn't."""
        each = len(self.owned)
        if len(statuses) % each:
            raise ConfigError(f"statuses: expected a multiple of {each} records a page, got {len(statuses)}")
        pages = [statuses[at : at + each] for at in range(0, len(statuses), each)]
        return [next((s for s in page if s is not PageStatus.OK), PageStatus.OK) for page in pages]

    def layouts(self, layout: Layout) -> list[Layout]:
        """Of the rank's memory, the part of each owned group: the same buffers, other offsets. No copy."""
        require_same_content(layout.spec, self.rank_spec)
        return [layout.select_heads(at, len(self.owned)) for at in range(len(self.owned))]

    def cut(
        self,
        layout: Layout,
        buffers: Sequence[torch.Tensor],
        pages: Ids,
        records: HostTier,
        slots: Ids,
    ) -> None:
        """Copy the rank's ``pages`` (int64 [n]) into slots of ``records`` (int64 [n * len(owned)], in the order of
        `stored_keys`).

        Everything on the CPU. ``layout`` is of ``rank_spec``, ``records`` holds `record_spec`; its slots are to be
        sealed afterwards. Raises LayoutError, before anything is written, on specs or ids that don't fit.
        """
        by_group = self._slots_by_group(pages, records, slots)
        for group, into in zip(self.layouts(layout), by_group, strict=True):
            plan = self._plan(group, records.layout, into_records=True)
            relayout_reference(plan, buffers, [records.payload], torch.from_numpy(pages), into)

    def gather(
        self,
        records: HostTier,
        slots: Ids,
        layout: Layout,
        buffers: Sequence[torch.Tensor],
        pages: Ids,
    ) -> None:
        """`cut` the other way: verified records into the rank's pages. Overwrites all of these pages."""
        by_group = self._slots_by_group(pages, records, slots)
        for group, out_of in zip(self.layouts(layout), by_group, strict=True):
            plan = self._plan(group, records.layout, into_records=False)
            relayout_reference(plan, [records.payload], buffers, out_of, torch.from_numpy(pages))

    # --- inside

    def _plan(self, group: Layout, records: Layout, *, into_records: bool) -> Geometry:
        mine, theirs = Side.of(group), Side.of(records)
        box = Box.whole(self.record_spec)
        if into_records:
            return coalesce(self.record_spec, mine, theirs, box, order="dst")
        return coalesce(self.record_spec, theirs, mine, box, order="src")

    def _slots_by_group(self, pages: Ids, records: HostTier, slots: Ids) -> list[torch.Tensor]:
        require_same_content(records.spec, self.record_spec)
        each = len(self.owned)
        if len(slots) != len(pages) * each:
            raise LayoutError(f"slots: expected {each} for each of {len(pages)} pages, got {len(slots)}")
        if slots.size:
            low, high = int(slots.min()), int(slots.max())
            if low < 0 or high >= records.num_slots:
                raise LayoutError(f"slots: expected 0 to {records.num_slots - 1}, got {low} to {high}")
        if pages.size and int(pages.min()) < 0:
            raise LayoutError(f"pages: expected 0 or more, got {int(pages.min())}")
        return [torch.from_numpy(np.ascontiguousarray(slots[at::each])) for at in range(each)]


def _cut(spec: KVSpec, wanted: int) -> tuple[int, int]:
    """Groups, and heads in each, for ``share_across_tp=wanted``; (1, 1) where nothing can be cut."""
    found: dict[int, str] = {}  # groups -> a component that asks for so many
    most_heads = 1
    for layer, components in enumerate(spec.layers):
        for c in components:
            if c.heads == 1:
                continue
            if c.heads % wanted and wanted % c.heads:
                raise LayoutError(
                    f"layer {layer}, {c.name!r}: expected {c.heads} heads to divide share_across_tp={wanted}, "
                    "or the other way"
                )
            groups = min(wanted, c.heads)
            found.setdefault(groups, f"{c.name!r} of layer {layer} with {c.heads} heads")
            most_heads = max(most_heads, c.heads // groups)
    if len(found) > 1:
        raise LayoutError(
            f"share_across_tp={wanted}: expected every component cut into as many groups, got "
            + ", ".join(f"{groups} for {who}" for groups, who in sorted(found.items()))
            + f"; take {min(found)}"
        )
    return next(iter(found), 1), most_heads
