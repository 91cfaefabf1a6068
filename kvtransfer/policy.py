"""Policies: which pages go first, what is written down to a lower tier, what is fetched ahead and for how long.

Each is a small class without a clock or a thread of its own; the directory asks. Your own policies are taken wherever
one of these is: what is asked of them is in the protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tree import Node


class EvictionPolicy(Protocol):
    """The order in which a tier gives up tails (see victims.py).

    static      a node's rank only rises, and only when the node is used: then ranks are kept, not asked for anew
    keep_depth  one path of this many nodes or more always stays (0: none does)
    """

    @property
    def static(self) -> bool: ...

    @property
    def keep_depth(self) -> int: ...

    def rank(self, node: Node, now: float) -> Any:
        """What orders nodes: the lowest goes first. ``now`` is the index's clock, in seconds."""


class LRU:
    """The pages that were used the longest ago go first. Exact: ticks have no ties."""

    static, keep_depth = True, 0

    def rank(self, node: Node, now: float) -> int:
        return node.tick


class LFU:
    """The fewest hits go first, of these the longest unused."""

    static, keep_depth = True, 0

    def rank(self, node: Node, now: float) -> tuple[int, int]:
        return node.hits, node.tick


@dataclass(frozen=True)
class SLRU:
    """Two segments: pages with fewer than ``protect_hits`` hits go before all others; within a segment, LRU."""

    protect_hits: int = 2
    static: ClassVar[bool] = True
    keep_depth: ClassVar[int] = 0

    def rank(self, node: Node, now: float) -> tuple[bool, int]:
        return node.hits >= self.protect_hits, node.tick


class FIFO:
    """What came in first goes first."""

    static, keep_depth = True, 0

    def rank(self, node: Node, now: float) -> int:
        return node.born


class Priority:
    """The lowest priority goes first, within one LRU."""

    static, keep_depth = True, 0

    def rank(self, node: Node, now: float) -> tuple[int, int]:
        return node.priority, node.tick


@dataclass(frozen=True)
class PathScore:
    """The lowest ``hits * decay^age + depth_weight * depth`` goes first: age in seconds since the last use, depth in
    nodes from the root. One path of at least ``keep_depth`` nodes always stays, cut back to that depth at most.

    The order of two nodes changes as they age, so every eviction ranks all tails: with many small stores let the
    directory free more at once (its ``evict_extra``).
    """

    decay: float = 0.95
    depth_weight: float = 0.3
    keep_depth: int = 5
    static: ClassVar[bool] = False

    def rank(self, node: Node, now: float) -> tuple[float, int]:
        age_s = max(0.0, now - node.last_used)
        return node.hits * self.decay**age_s + self.depth_weight * node.depth(), node.tick


EVICTION: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "fifo": FIFO,
    "priority": Priority,
    "path_score": PathScore,
}


def eviction(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by its name, or as it is."""
    if not isinstance(policy, str):
        missing = [name for name in ("static", "keep_depth", "rank") if not hasattr(policy, name)]
        if missing:
            raise ConfigError(f"eviction: expected a policy with {', '.join(missing)}, got {type(policy).__name__}")
        return policy
    if policy not in EVICTION:
        raise ConfigError(f"eviction: expected one of {', '.join(EVICTION)} or a policy, got {policy!r}")
    return EVICTION[policy]()


@dataclass(frozen=True)
class Prune:
    """Cold branches go before there is a need: looked at every ``every_s``, only while more than ``watermark`` of the
    tier is used. Off unless given to the directory.

    A tail is cold with fewer than ``min_uses`` hits and no use for ``idle_s`` seconds; or (``lone``) where it belongs
    to a branch that nobody shares: a child of the root with fewer than two children, and so on down to the tail.
    """

    min_uses: int = 3
    idle_s: float = 300.0
    every_s: float = 10.0
    watermark: float = 0.8
    lone: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.watermark <= 1 or self.every_s < 0 or self.idle_s < 0:
            raise ConfigError(f"prune: expected a watermark in 0..1 and times of at least 0 s, got {self!r}")

    def is_cold(self, tail: Node, now: float) -> bool:
        """Whether the tail goes."""
        if tail.hits < self.min_uses and now - tail.last_used >= self.idle_s:
            return True
        node = tail
        while self.lone and len(node.children) < 2:
            if node.parent is None or node.parent.parent is None:
                return True
            node = node.parent
        return False


class WritePolicy(Protocol):
    """What a tier gets from the one above, and when."""

    @property
    def on_evict(self) -> bool:
        """Whether pages that the upper tier gives up are written first, where this tier lacks them."""

    def now(self, hits: int) -> bool:
        """Whether pages with so many hits are written as soon as they are there."""


class WriteThrough:
    """Everything, at once."""

    on_evict = False

    def now(self, hits: int) -> bool:
        return True


@dataclass(frozen=True)
class WriteThroughSelective:
    """What was hit at least ``hits`` times, from then on."""

    hits: int = 2
    on_evict: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.hits < 0:
            raise ConfigError(f"write_through_selective: expected hits of at least 0, got {self.hits}")

    def now(self, hits: int) -> bool:
        return hits >= self.hits


class WriteBack:
    """What the tier above gives up, before it goes there."""

    on_evict = True

    def now(self, hits: int) -> bool:
        return False


WRITING: dict[str, type[WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
}


def writing(policy: str | WritePolicy) -> WritePolicy:
    """A policy by its name, or as it is."""
    if not isinstance(policy, str):
        missing = [name for name in ("on_evict", "now") if not hasattr(policy, name)]
        if missing:
            raise ConfigError(f"write: expected a policy with {', '.join(missing)}, got {type(policy).__name__}")
        return policy
    if policy not in WRITING:
        raise ConfigError(f"write: expected one of {', '.join(WRITING)} or a policy, got {policy!r}")
    return WRITING[policy]()


Stop = Literal["best_effort", "wait_complete", "timeout"]
STOPS: tuple[Stop, ...] = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True)
class Prefetch:
    """Fetching ahead from lower tiers, from when a request is queued to when it is to run.

    threshold_tokens  fewer are not worth it
    stop              what happens when the request is to run before all is there: ``best_effort`` runs with what is,
                      ``wait_complete`` waits, ``timeout`` waits until ``base_s + per_ki_token_s * tokens / 1024`` have
                      passed since the prefetch began
    """

    threshold_tokens: int = 256
    stop: Stop = "best_effort"
    base_s: float = 1.0
    per_ki_token_s: float = 0.25

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise ConfigError(f"prefetch: expected stop as one of {', '.join(STOPS)}, got {self.stop!r}")
        if self.threshold_tokens < 0 or self.base_s < 0 or self.per_ki_token_s < 0:
            raise ConfigError(f"prefetch: expected a threshold and times of at least 0, got {self!r}")

    def is_worth(self, tokens: int) -> bool:
        """Whether so many tokens are fetched."""
        return tokens > 0 and tokens >= self.threshold_tokens

    def limit_s(self, tokens: int) -> float:
        """Seconds that a request may wait for so many tokens: 0, without an end, or by the formula."""
        if self.stop == "timeout":
            return self.base_s + self.per_ki_token_s * tokens / 1024
        return 0.0 if self.stop == "best_effort" else float("inf")
