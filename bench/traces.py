"""Request traces: a list of requests, each a time, and the ids of its prompt's blocks; two requests share a prefix
where their leading ids are equal. The text is not in a trace: a block's tokens come from a generator seeded by its id.

The format is that of the traces published with the Mooncake paper (kvcache-ai/Mooncake, FAST25-release/traces,
Apache-2.0): a JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``
(one a block of 512 tokens of the prompt, the last one maybe short).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512
VOCABULARY = 1 << 17


@dataclass(frozen=True)
class Request:
    """``at_s`` seconds after the trace began."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def tokens(self) -> NDArray[np.int32]:
        """The prompt, int32."""
        return block_tokens(np.array(self.blocks, dtype=np.uint64))[: self.input_tokens]


def read(file: Path) -> Iterator[Request]:
    """Requests of a trace, gzipped or not. Raises ValueError, naming the line, on one that is none."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                blocks = tuple(int(block) for block in row["hash_ids"])
                request = Request(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), blocks)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: expected a request, got {line[:80]!r}") from error
            if len(blocks) != -(-request.input_tokens // BLOCK_TOKENS):
                raise ValueError(
                    f"{file}, line {number}: expected an id for each {BLOCK_TOKENS} of {request.input_tokens} tokens, "
                    f"got {len(blocks)}"
                )
            yield request


def block_tokens(blocks: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The tokens of these blocks, one after the other: splitmix64 over (block, position), so that a block's tokens
    depend on its id alone and a million tokens take milliseconds."""
    positions = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x: NDArray[np.uint64] = (blocks[:, None] * np.uint64(BLOCK_TOKENS) + positions).reshape(-1)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = np.bitwise_xor(x, np.right_shift(x, np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = np.bitwise_xor(x, np.right_shift(x, np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = np.bitwise_xor(x, np.right_shift(x, np.uint64(31)))
    tokens: NDArray[np.int32] = np.bitwise_and(x, np.uint64(VOCABULARY - 1)).astype(np.int32)
    return tokens
