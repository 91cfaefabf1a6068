"""What each of two ranks does in test_ranks.py: one engine each, tensor parallel, over gloo."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist
from engines.sglang import caches, helpers
from engines.sglang.linked import PAGES, Linked, equal
from sglang.srt.runtime_context import get_parallel


def work(rank: int, meeting: str, folder: str) -> None:
    """Every step on both ranks; what each saw goes to a file of its own."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    told: dict[str, Any] = {}
    ranks = {**helpers.RANKS, "tp_rank": rank, "tp_size": 2, "attn_tp_rank": rank, "attn_tp_size": 2, "moe_tp_size": 2}
    with get_parallel().override(**ranks):
        linker_steps(rank, group, told)
        radix_steps(rank, group, folder, told)
    with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


def linker_steps(rank: int, group: Any, told: dict[str, Any]) -> None:
    # Rank 1 has less host memory: what it can't keep no rank has kept.
    settings = PAGES if rank == 0 else {"tiers": {"host": {"pages": 8, "pin": False}}}
    linked = Linked(settings, tp_cache_group=group)
    pool = next(iter(linked.linker.pools.values()))
    pool.slots._protect_s = 0.0
    tokens, big = [*range(100, 132)], [*range(1000, 1064)]
    rows = linked.run(tokens)
    linked.run(big)
    linked.evict()
    told["too big"] = linked.ask("big", big)[0].host_hit_length
    told["kept"] = linked.ask("kept", tokens)[0].host_hit_length
    linked.cache.linker.hit_markers.clear()
    got = linked.load("whole", tokens)
    told["whole"] = equal(got, rows)
    if rank == 1:  # it loses a page: both have a shorter hit
        pool.slots.forget([_key_of(5)])
    told["shorter"] = linked.ask("shorter", tokens)[0].host_hit_length
    linked.cache.linker.hit_markers.clear()
    got = linked.load("short", tokens)
    told["short"] = equal(got, [one[:20] for one in rows])
    if rank == 0:  # a page of it does not verify: the load fails on both
        slot = pool.slots.slots_of([_key_of(2)])[0]
        pool.host.payload.numpy()[slot * pool.host.slot_bytes + 3] ^= 8
    told["bad"] = linked.load("bad", tokens) is None
    told["after"] = linked.ask("after", tokens)[0].host_hit_length
    linked.linker.close()


def _key_of(page: int) -> str:
    """The key of a page of the tokens that were kept first, by its place in the chain."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    keys: list[str] = get_storage_hash_str(caches.key([*range(100, 132)]), None, page_size=caches.PAGE)
    return keys[page]


def radix_steps(rank: int, group: Any, folder: str, told: dict[str, Any]) -> None:
    from kvtransfer.integrations.sglang.radix import NAME, register

    register()
    config = os.path.join(folder, f"kv{rank}.json")
    with open(config, "w") as file:
        json.dump(PAGES, file)
    os.environ["KVTRANSFER_CONFIG"] = config
    linked = Linked(radix_backend=NAME, tp_cache_group=group)
    pool = next(iter(linked.linker.pools.values()))
    tokens = [*range(100, 132)]
    rows = linked.run(tokens)
    linked.evict()
    free = linked.engine.allocator.available_size()
    if rank == 1:
        slot = pool.slots.slots_of([_key_of(6)])[0]
        pool.host.payload.numpy()[slot * pool.host.slot_bytes + 3] ^= 8
    told["radix bad"] = linked.begin("bad", tokens)
    told["radix freed"] = linked.engine.allocator.available_size() == free
    told["radix again"] = linked.begin("again", tokens)
    slots = linked.cache.linker.private_load_indices["again"]
    told["radix rows"] = equal(linked.engine.rows(slots), [one[:24] for one in rows])
    linked.linker.close()
