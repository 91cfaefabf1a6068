"""Load or recompute: from which token on is computing a prefix again faster than bringing it from where it lies?

Pages come in prefix order, so the question has one number as its answer: load the first ``s`` pages, compute the rest.

- A tier reads its own pages one after the other, all tiers at once: the last of a tier's first ``b`` bytes is in host
  memory after ``latency_s + b / bytes_per_s``. Pages of the host tier are there at once.
- The link carries page after page, each once it is in host memory: ``D(s)`` is when the first ``s`` pages have crossed,
  and ``A(s)`` when the last of them was in host memory (0: they lay there).
- Computing tokens ``a`` to ``b`` behind a prefix takes ``F(b) - F(a)``, where ``F(n)`` is the time of a prefill of
  ``n`` tokens: linear in ``n``, and quadratic where attention counts. ``C(s) = F(total) - F(tokens before page s)``.
- Layer-wise, a model of ``L`` layers begins with its first layer as soon as that is there: of what is still to cross
  when the last page is in host memory, a layer's share is an L-th. Each layer waits for its own bytes and for the layer
  before, so the end is the later of "the first layer's bytes, then computing all" and "all bytes, then the last layer":

      T(s) = max(A + (D - A) / L + C, D + C / L)

  With ``L = 1`` that is ``D + C``: first load, then compute.

The split with the least ``T`` is the answer; of equal ones, that which loads more, since the GPU has other work. Pure
functions of numbers; nothing here measures the GPU, or knows what else the link and the disk are doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError

if TYPE_CHECKING:  # the question is asked where requests are scheduled, which needs no torch
    from kvtransfer.link import LinkProfile


class Reading(Protocol):
    """What is looked at of a tier: `TierStats`, or what travels of them."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    @property
    def in_flight(self) -> int: ...


@dataclass(frozen=True)
class Rate:
    """Of one tier's reads, or of the link: bytes a second, and what comes before the first byte."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < float("inf") and 0 <= self.latency_s < float("inf")):
            raise ConfigError(f"rate: expected finite bytes a second above 0 and a latency of 0 or more, got {self}")


@dataclass(frozen=True)
class Prefill:
    """Seconds of a prefill: ``n / tokens_per_s + quadratic_s * n^2``, the latter of attention to all tokens before."""

    tokens_per_s: float
    quadratic_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.tokens_per_s > 0 and self.quadratic_s >= 0):
            raise ConfigError(f"prefill: expected a rate above 0 and a quadratic part of 0 or more, got {self}")

    def __call__(self, tokens: int) -> float:
        """Of the first ``tokens``."""
        return tokens / self.tokens_per_s + self.quadratic_s * tokens * tokens


@dataclass(frozen=True)
class Choice:
    """What to load of a hit.

    load_pages      of those behind the device's; the others are computed
    first_token     the first token that is computed
    seconds         until all tokens are computed, that way
    load_all_s, compute_all_s  the same if every page were loaded, and if none were
    """

    load_pages: int
    first_token: int
    seconds: float
    load_all_s: float
    compute_all_s: float


def choose(
    runs: Sequence[tuple[str, int]],
    *,
    page_size: int,
    page_bytes: int,
    link: Rate,
    rates: Mapping[str, Rate],
    prefill: float | Callable[[int], float],
    device_tokens: int = 0,
    total_tokens: int | None = None,
    layers: int = 1,
    host: str = "host",
) -> Choice:
    """How many pages to load: see the module.

    Args:
        runs: (tier, pages) of the hit behind its device pages, in order (`Hit.segments` has them).
        page_bytes: bytes of a page that cross the link and leave a tier.
        link: from host memory to the device.
        rates: of every tier in ``runs`` but ``host``, as far as host memory.
        prefill: tokens a second; or seconds as a function of the number of tokens from the first one on (`Prefill`).
        device_tokens: that need neither: they come before the runs.
        total_tokens: of the request (None: no more than the hit); what is behind the hit is computed in any case.
        layers: of a layer-wise load; 1 for one that is waited for as a whole.

    Raises ConfigError on numbers that can't be, on a tier without a rate, on a prefill whose seconds fall.
    """
    pages = sum(count for _, count in runs)
    hit_tokens = device_tokens + pages * page_size
    total = hit_tokens if total_tokens is None else total_tokens
    if page_size < 1 or page_bytes < 1 or layers < 1 or device_tokens < 0 or any(count < 0 for _, count in runs):
        raise ConfigError(
            f"choose: expected sizes and layers of at least 1 and no negative counts, got page_size={page_size}, "
            f"page_bytes={page_bytes}, layers={layers}, device_tokens={device_tokens}, runs={list(runs)}"
        )
    if total < hit_tokens:
        raise ConfigError(f"total_tokens: expected at least the {hit_tokens} of the hit, got {total}")
    in_host, crossed = _arrivals(runs, page_bytes, link, rates, host)
    computed = _compute_s(prefill, device_tokens + np.arange(pages + 1) * page_size, total)
    ends = np.maximum(in_host + (crossed - in_host) / layers + computed, crossed + computed / layers)
    best = pages - int(np.argmin(ends[::-1]))
    return Choice(best, device_tokens + best * page_size, float(ends[best]), float(ends[-1]), float(ends[0]))


def link_rate(profile: LinkProfile, page_bytes: int, pages: int = 64, direction: str = "h2d") -> Rate:
    """What the link was measured to do with so many pages: by the staged path, or the CPU's; else its peak."""
    for path in ("staged", "cpu"):
        grid = profile.grids.get(f"{path}/{direction}")
        if grid is not None:
            return Rate(grid.rate(page_bytes, pages) * 1e9)
    return Rate(profile.peak_gbps[direction] * 1e9)


class TierRates:
    """The read rates of tiers, from their `stats`, looked at now and then (`sample`). Thread-safe.

    Between two looks at which the tier was at work, what it has read is counted with that time: a tier that idled in
    between, or wrote, looks slower than it is, never faster. Older times fade by half every ``half_life_s`` of work.
    """

    def __init__(self, half_life_s: float = 30.0) -> None:
        if not half_life_s > 0:
            raise ConfigError(f"half_life_s: expected more than 0, got {half_life_s}")
        self._half_life_s = half_life_s
        self._lock = threading.Lock()  # requests ask for what a tick writes
        self._last: dict[str, tuple[float, int, bool]] = {}  # when, bytes read until then, at work
        self._sums: dict[str, tuple[float, float]] = {}  # bytes, seconds

    def sample(self, name: str, stats: Reading, now_s: float) -> None:
        """Take a look: ``stats`` of the tier ``name`` at ``now_s``, by any clock that only rises."""
        read, at_work = stats.counters.get("bytes_read", 0), stats.in_flight > 0
        with self._lock:
            before = self._last.get(name)
            self._last[name] = (now_s, read, at_work)
            if before is None or not before[2] or not at_work or now_s <= before[0] or read <= before[1]:
                return
            seconds = now_s - before[0]
            kept = 0.5 ** (seconds / self._half_life_s)
            old_bytes, old_s = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (old_bytes * kept + read - before[1], old_s * kept + seconds)

    def known(self) -> dict[str, Rate]:
        """Of the tiers that were seen reading."""
        with self._lock:
            sums = dict(self._sums)
        return {name: Rate(read / seconds) for name, (read, seconds) in sums.items()}


def _arrivals(
    runs: Sequence[tuple[str, int]], page_bytes: int, link: Rate, rates: Mapping[str, Rate], host: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``A(s)`` and ``D(s)`` for every number of pages from 0 on."""
    pages = sum(count for _, count in runs)
    there = np.zeros(pages)
    read: dict[str, int] = {}  # pages of each tier so far
    at = 0
    for tier, count in runs:
        if tier != host:
            if tier not in rates:
                raise ConfigError(f"rates: expected one for every tier but {host}, got none for {tier!r}")
            done = read.get(tier, 0)
            rate = rates[tier]
            there[at : at + count] = rate.latency_s + (done + 1 + np.arange(count)) * page_bytes / rate.bytes_per_s
            read[tier] = done + count
        at += count
    in_host, crossed = np.zeros(pages + 1), np.zeros(pages + 1)
    if pages:
        in_host[1:] = np.maximum.accumulate(there)
        page_s = page_bytes / link.bytes_per_s
        ahead = np.arange(pages) * page_s  # of pages before: each begins once it is there and they are over
        crossed[1:] = np.maximum.accumulate(there - ahead) + ahead + page_s + link.latency_s
    return in_host, crossed


def _compute_s(prefill: float | Callable[[int], float], before: NDArray[np.int64], total: int) -> NDArray[np.float64]:
    """``C(s)``: seconds to compute the tokens from each of ``before`` up to ``total``."""
    seconds = prefill if callable(prefill) else Prefill(float(prefill))
    spent = np.array([seconds(int(tokens)) for tokens in before], dtype=np.float64)
    left = float(seconds(total)) - spent
    if not np.isfinite(left).all() or (np.diff(left) > 0).any() or left[-1] < 0:
        raise ConfigError("prefill: expected finite seconds that rise with the number of tokens")
    return left
