"""What the parts of bench_tiers.py share."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from paired import paired_ratio


@dataclass(frozen=True)
class Options:
    """Where to measure, how often, and about how long each time."""

    folder: Path
    repeats: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One comparison: medians of runs in turn, GB = 1e9 bytes of payload. ``bar``: the share that is asked for."""

    what: str
    gbps: float
    low: float
    high: float
    against: str
    limit_gbps: float
    share: float
    bar: float | None

    @property
    def met(self) -> bool:
        """Whether the share reaches the bar."""
        return self.bar is None or self.share >= self.bar

    @classmethod
    def of(cls, what: str, ours: list[float], against: str, limits: list[float], bar: float | None) -> Row:
        """From the rates of each run."""
        mine, limit = statistics.median(ours), statistics.median(limits)
        return cls(what, mine, min(ours), max(ours), against, limit, mine / limit, bar)

    @classmethod
    def paired(cls, what: str, ours: list[float], against: str, limits: list[float], bar: float | None) -> Row:
        """From the rates of runs next to each other, two by two: the share is the median of theirs. What a pair has in
        common, as a slow minute of the disk, is in neither side of it."""
        row = cls.of(what, ours, against, limits, bar)
        return replace(row, share=paired_ratio(ours, limits).median)
