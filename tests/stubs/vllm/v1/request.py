"""A request."""

from __future__ import annotations

from typing import Any


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: Any,
        pooling_params: Any,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.prompt_embeds: Any = None
        self.mm_features: list[Any] = []
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.num_computed_tokens = 0
        self.all_token_ids = list(prompt_token_ids or [])
        self.block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)
