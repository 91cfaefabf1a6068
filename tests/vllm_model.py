"""A model whose every output depends on every byte of KV that it reads: one wrong byte anywhere, and the tokens differ.

The KV row of a token is a digest of the tokens up to it and of their rows in the layer below, as they are found in the
pool; the next token is a digest of all rows, of all layers and ranks. `expected` says what comes out if every byte is
right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

VOCABULARY = 50_000
ROW_BYTES = 64  # of one token, layer and rank


def prefixes(tokens: Sequence[int]) -> list[bytes]:
    """A digest of the tokens up to each one."""
    out, state = [], hashlib.blake2b(b"kv", digest_size=32)
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        out.append(state.copy().digest())
    return out


def new_rows(known: Sequence[bytes], start: int, layer: int, rank: int, below: bytes | None) -> list[bytes]:
    """The KV of the tokens from position ``start`` on. ``below``: all rows of the layer below, as they were read: what
    was wrong there is wrong here too."""
    seen = hashlib.blake2b(below[: start * ROW_BYTES] if below is not None else b"", digest_size=32)
    rows = []
    for at, prefix in enumerate(known[start:], start):
        if below is not None:
            seen.update(below[at * ROW_BYTES : (at + 1) * ROW_BYTES])
        rows.append(hashlib.blake2b(prefix + bytes([layer, rank]) + seen.digest(), digest_size=ROW_BYTES).digest())
    return rows


def sampled(rows_by_layer: Sequence[bytes]) -> int:
    """The token that follows, of all rows, layer by layer and rank by rank."""
    return int.from_bytes(hashlib.blake2b(b"".join(rows_by_layer), digest_size=8).digest(), "little") % VOCABULARY


def expected(prompt: Sequence[int], count: int, layers: int, ranks: int = 1) -> list[int]:
    """What a prompt is continued with."""
    tokens = list(prompt)
    there = [[b""] * layers for _ in range(ranks)]
    for _ in range(count):
        known = prefixes(tokens)
        for rank, rows in enumerate(there):
            for layer in range(layers):
                start = len(rows[layer]) // ROW_BYTES
                rows[layer] += b"".join(new_rows(known, start, layer, rank, rows[layer - 1] if layer else None))
        tokens.append(sampled([one for rows in there for one in rows]))
    return tokens[len(prompt) :]


@dataclass
class Sequences:
    """What a model runner remembers of requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """``[blocks, tokens, heads, bytes]`` of a layer's ``[blocks, heads, tokens, content]``."""
    return view.view(torch.uint8).permute(0, 2, 1, 3)


def write_rows(view: torch.Tensor, blocks: Sequence[int], start: int, rows: Sequence[bytes]) -> None:
    """Rows of the tokens from position ``start`` on into their blocks."""
    pages = as_bytes(view)
    size, heads = pages.shape[1], pages.shape[2]
    for at, data in enumerate(rows, start):
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(heads, -1)
        pages[blocks[at // size], at % size] = source


def read_rows(view: torch.Tensor, blocks: Sequence[int], stop: int) -> bytes:
    """The rows of the first ``stop`` tokens, as they are there."""
    pages = as_bytes(view)
    size = pages.shape[1]
    taken = pages[torch.tensor(list(blocks[: -(-stop // size)]), dtype=torch.long)]
    return bytes(taken.reshape(-1, pages.shape[2] * pages.shape[3])[:stop].reshape(-1).tolist())
