"""What a server or a local model answers to one prompt, as far as it can be compared and timed."""

from __future__ import annotations

from msgspec import Struct, field

Prompt = str | list[int]
"""A text, or token ids."""


class KVDigests(Struct, frozen=True):
    """A digest for each whole page and layer of the prompt's KV: ``pages[page][layer]``, xxh3_64 in hex.

    An empty string where the bytes can't be had (a sliding-window layer of a plain cache forgets them).
    """

    page_size: int
    pages: list[list[str]]


class Completion(Struct, frozen=True):
    """One answer.

    tokens         a string a token: its id in decimal where the server tells ids, else its text
    tops           for each token the two most likely ones and their log probabilities, best first; empty if not asked
    prompt_tokens  None where the server does not say; likewise ``cached_tokens``, those that were not computed
    first_token_s  seconds from the request to the first token; ``total_s`` to the last
    """

    tokens: list[str]
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    tops: list[list[tuple[str, float]]] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    digests: KVDigests | None = None

    def margin(self, position: int) -> float | None:
        """How far the best token was ahead of the second, in log probability; None where that is not known."""
        if position >= len(self.tops) or len(self.tops[position]) < 2:
            return None
        (_, first), (_, second) = self.tops[position][:2]
        return abs(first - second)
