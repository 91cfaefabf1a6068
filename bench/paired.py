"""Medians with their spread, and 95 % intervals by order statistics: no assumption about how times are distributed.

The interval of a median is a pair of the sorted values themselves. The median lies below the k-th smallest of n values
with the probability that fewer than k of n fair coins fall heads (the sign test), so the k-th smallest and the k-th
largest enclose it with 1 - 2 P(Bin(n, 1/2) < k). Fewer than six values can't reach 95 %: then the interval is all of
them, and its coverage says what it is worth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Interval:
    """A median, and two of the values between which the true one lies with probability ``coverage``."""

    median: float
    low: float
    high: float
    coverage: float


def order_rank(count: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """(k, coverage): the k-th smallest to the k-th largest of ``count`` values enclose the median; the largest k that
    reaches ``confidence``, and 1 where none does."""
    if count < 1:
        raise ValueError(f"count: expected at least 1 value, got {count}")
    best, below = 1, 0.0
    coverage = 1.0 - 2.0 ** (1 - count)
    for k in range(1, count // 2 + 1):
        below += math.comb(count, k - 1) / 2.0**count  # P(Bin < k)
        if 1 - 2 * below < confidence:
            break
        best, coverage = k, 1 - 2 * below
    return best, coverage


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of ``values`` and its interval."""
    k, coverage = order_rank(len(values), confidence)
    ordered = sorted(values)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[-k], coverage)


def paired_ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Interval:
    """The median of top over bottom, pair by pair: what both of a pair have in common (a slow minute) cancels."""
    return median_interval([a / b for a, b in zip(tops, bottoms, strict=True)])
