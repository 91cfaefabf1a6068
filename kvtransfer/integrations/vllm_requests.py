"""What the scheduler's half remembers of a request of vLLM, and what of the request may be kept at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.commands import Scope
from kvtransfer.jobs import Job, PrefixHit
from kvtransfer.prefetch import PrefetchJob

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestState:
    """One request, from its arrival to its end.

    most_tokens   leading tokens whose KV depends on nothing but tokens, adapter and salt
    hit           held between the question and the allocation
    stored_pages  leading pages that were given to a store, or need none
    """

    request: Request
    scope: Scope
    most_tokens: int
    hit: PrefixHit | None = None
    fetch: PrefetchJob | None = None
    load: Job | None = None
    stored_pages: int = 0

    def tokens(self, limit: int) -> list[int]:
        """The leading tokens that are known, at most ``limit``, as far as their KV may be kept."""
        return list(self.request.all_token_ids[: max(0, min(limit, self.most_tokens))])

    def forget_hit(self) -> None:
        """Hold the hit no more."""
        if self.hit is not None:
            self.hit.release()
            self.hit = None


def keepable_tokens(request: Request) -> int:
    """Leading tokens of a request whose KV is told by tokens alone: up to the first image or the like. None of a prompt
    that was given as embeddings, wholly or in part."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return 0
    return min((feature.mm_position.offset for feature in request.mm_features), default=2**62)


def request_salt(salt: bytes, cache_salt: str | None) -> bytes:
    """The tenant's salt with the request's own. No two pairs give the same."""
    if cache_salt is None:
        return salt
    return hashlib.sha256(
        b"kvtransfer request salt\0" + len(salt).to_bytes(8, "little") + salt + cache_salt.encode()
    ).digest()


def adapter_name(request: Request) -> str | None:
    """What tells the request's adapter from others: vLLM's name for it and where its weights came from."""
    lora = request.lora_request
    return None if lora is None else f"{lora.lora_name}\0{lora.lora_path}"
