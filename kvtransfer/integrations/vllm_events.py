"""Events for those who follow where KV lies (`--kv-events-config`): what has come into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.v1.request import Request


def stored_events(request: Request, pages: Sequence[int], block_size: int) -> list[BlockStored]:
    """One event for each run of neighbours among ``pages`` (numbers of the request's blocks, rising), as far as vLLM
    has hashes of them."""
    known = [page for page in pages if page < len(request.block_hashes)]
    runs = np.split(np.array(known, dtype=np.int64), np.flatnonzero(np.diff(known) != 1) + 1) if known else []
    lora = request.lora_request
    events = []
    for run in runs:
        first, stop = int(run[0]), int(run[-1]) + 1
        hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[first:stop]]
        parent = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=list(request.all_token_ids[first * block_size : stop * block_size]),
                block_size=block_size,
                lora_id=None if lora is None else lora.lora_int_id,
                medium=MEDIUM_CPU,
                lora_name=None if lora is None else lora.lora_name,
            )
        )
    return events
