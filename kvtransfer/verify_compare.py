"""Two answers to one prompt: do they agree, and if not, what kind of difference is it?"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtransfer.completion import Completion, KVDigests

NEAR_TIE = 0.25
"""Log probability. Between 16 and 32, where logits often lie, bfloat16 steps by 0.125: two steps are a near-tie."""


class Kind(enum.Enum):
    """What a mismatch is."""

    BYTES = "bytes differ"
    NEAR_TIE = "near-tie"
    UNCLASSIFIED = "unclassified"


@dataclass(frozen=True)
class PageDifference:
    """The first page and layer, in order of tokens, whose bytes differ; how many pages do of those compared."""

    page: int
    layer: int
    page_size: int
    different_pages: int
    compared_pages: int

    def __str__(self) -> str:
        first = self.page * self.page_size
        return (
            f"page {self.page} (tokens {first} to {first + self.page_size - 1}), layer {self.layer}; "
            f"{self.different_pages} of {self.compared_pages} pages differ"
        )


@dataclass(frozen=True)
class Mismatch:
    """``run``: which request of the prompt. ``position``: of the first new token that differs, None where none does."""

    prompt: str
    run: str
    kind: Kind
    position: int | None
    expected: str
    got: str
    margin: float | None
    page: PageDifference | None
    why: str

    def __str__(self) -> str:
        at = "tokens equal"
        if self.position is not None:
            margin = "unknown" if self.margin is None else f"{self.margin:.4f}"
            at = f"token {self.position}: expected {self.expected!r}, got {self.got!r}, top-2 margin {margin}"
        return f"{self.prompt}, {self.run}: {self.kind.value}: {at}; {self.why}"


def compare_bytes(expected: KVDigests | None, got: KVDigests | None, pages: int) -> tuple[bool, PageDifference | None]:
    """(Whether each of the first ``pages`` pages could be compared in some layer, the first difference)."""
    if expected is None or got is None or expected.page_size != got.page_size:
        return pages == 0, None
    both = list(zip(expected.pages, got.pages, strict=False))[:pages]
    known, first, different = 0, None, 0
    for page, (theirs, ours) in enumerate(both):
        pairs = [(layer, a, b) for layer, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a and b]
        known += bool(pairs)
        wrong = next((layer for layer, a, b in pairs if a != b), None)
        if wrong is not None:
            different += 1
            first = (page, wrong) if first is None else first
    if first is None:
        return known == pages, None
    return True, PageDifference(*first, expected.page_size, different, known)


def compare(
    prompt: str,
    run: str,
    expected: Completion,
    got: Completion,
    *,
    bytes_of: KVDigests | None,
    pages: int,
    near_tie: float = NEAR_TIE,
) -> Mismatch | None:
    """What is wrong with ``got``, None if nothing is.

    bytes_of  digests that the first ``pages`` pages of ``got`` must have; None: nobody knows
    near_tie  most that the two best tokens may lie apart where a choice between them is no fault of a cache

    Bytes are looked at first: where they differ it is a fault even if the tokens agree.
    """
    known, page = compare_bytes(bytes_of, got.digests, pages)
    position = _first_difference(expected.tokens, got.tokens)
    if position is None and page is None and not expected.tokens and expected.text != got.text:
        position = 0  # a server that tells neither ids nor texts of tokens
    if position is None and page is None:
        return None
    margins = [] if position is None else [a.margin(position) for a in (expected, got)]
    told = [margin for margin in margins if margin is not None]
    margin = max(told) if told else None
    if page is not None:
        kind, why = Kind.BYTES, f"the first difference is in {page}"
    elif not known:
        kind, why = Kind.UNCLASSIFIED, "the bytes of the KV can't be had"
    elif margin is None:
        kind, why = Kind.UNCLASSIFIED, "bytes equal, but how close the choice was is not known"
    elif margin > near_tie:
        kind, why = Kind.UNCLASSIFIED, f"bytes equal, and no near-tie (at most {near_tie:g})"
    else:
        kind, why = Kind.NEAR_TIE, "bytes equal: sums were rounded in another order"
    place = 0 if position is None else position
    return Mismatch(prompt, run, kind, position, _token(expected, place), _token(got, place), margin, page, why)


def _first_difference(one: list[str], other: list[str]) -> int | None:
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _token(answer: Completion, position: int) -> str:
    return answer.tokens[position] if position < len(answer.tokens) else "(nothing)"
