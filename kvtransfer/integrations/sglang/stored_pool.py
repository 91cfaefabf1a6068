"""StoredPool: one of SGLang's host pools, and the tiers that keep its pages."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.config import Config
from kvtransfer.integrations.hashed_pages import HashedPages, plan_records
from kvtransfer.integrations.lower_tiers import TierStack, open_lower_tiers
from kvtransfer.integrations.sglang.host_pages import HostPages
from kvtransfer.integrations.sglang.identity import Identity


@dataclass(frozen=True)
class StoredPool:
    """``writes``: whether this rank writes the pool's pages, or another that has the same bytes."""

    pages: HostPages
    kept: HashedPages
    stack: TierStack
    writes: bool


def open_pool(config: Config, identity: Identity, pages: HostPages, share: float, salt: bytes) -> StoredPool:
    """Open the tiers of ``config`` for a pool, with its ``share`` of their room. Raises what one of them raises; then
    nothing is left open."""
    replicated = identity.is_replicated(pages)
    namespace = identity.host_namespace(pages)
    plan = plan_records(pages.piece_bytes, identity.shards(pages, replicated), pages.page_size)
    tiers = open_lower_tiers(
        config, plan.spec, namespace.digest(), place=identity.place, owners=identity.owners, share=share
    )
    stack = TierStack(tiers, deadline_s=config.deadline_s)
    try:
        kept = HashedPages(stack, plan, namespace, layout_id=identity.layout_id(pages), salt=salt)
        for region in pages.regions:
            kept.register(region)
    except BaseException:
        stack.close()
        raise
    return StoredPool(pages, kept, stack, not replicated or bool(identity.ranks.is_storage_writer))
