"""Topology: the ranks of one cache by tensor, pipeline and context part, and who holds and who writes what.

A cache is that of one instance of an engine and one of its data-parallel replicas: ranks count from 0 within it. Tensor
parts are innermost, then context parts, then pipeline stages, as the engines count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.kernels.errors import ConfigError, LayoutError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.keys import Shard


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands."""

    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """``tp`` x ``pp`` x ``cp`` ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.cp) < 1:
            raise ConfigError(f"topology: expected sizes of at least 1, got tp={self.tp}, pp={self.pp}, cp={self.cp}")

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.tp * self.pp * self.cp

    def rank(self, *, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank that stands there."""
        if not (0 <= pp < self.pp and 0 <= cp < self.cp and 0 <= tp < self.tp):
            raise ConfigError(f"rank: expected a place within {self}, got pp={pp}, cp={cp}, tp={tp}")
        return (pp * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` stands."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank: expected 0 to {self.size - 1}, got {rank}")
        stage, tp = divmod(rank, self.tp)
        return Coordinates(*divmod(stage, self.cp), tp)

    def stage(self, pp: int) -> tuple[int, ...]:
        """The ranks of one pipeline stage; the first of them leads it."""
        first = self.rank(pp=pp)
        return tuple(range(first, first + self.cp * self.tp))

    @property
    def stage_leaders(self) -> tuple[int, ...]:
        """The rank that leads each stage; the first of them leads all."""
        return tuple(self.rank(pp=pp) for pp in range(self.pp))


class Shards:
    """Which records the ranks of a topology hold, and which one of those that hold the same writes a page.

    Args:
        topology: the ranks.
        spec: of the whole model, uncut.
        stage_layers: first layer, and the one behind the last, of each stage; equal parts unless told otherwise.
        context_split: ranks of different context parts hold different tokens of a page; else they hold the same.

    Heads are cut evenly. Where there are fewer than ``tp``, each is copied to as many neighbouring ranks; components
    of one head (an MLA latent, a state) are copied to all. Raises ConfigError or LayoutError for what can't be cut so.
    """

    def __init__(
        self,
        topology: Topology,
        spec: KVSpec,
        *,
        stage_layers: Sequence[tuple[int, int]] | None = None,
        context_split: bool = False,
    ) -> None:
        self.topology = topology
        self.spec = spec
        self.stage_layers = self._stages(stage_layers)
        self.head_parts = self._head_parts()
        context_parts = topology.cp if context_split else 1
        self._shards: list[Shard] = []
        self._holders: dict[Shard, list[int]] = {}
        for rank in range(topology.size):
            at = topology.coordinates(rank)
            part = at.tp // (topology.tp // self.head_parts)
            shard = Shard(
                *self.stage_layers[at.pp], part, self.head_parts, at.cp if context_split else 0, context_parts
            )
            self._shards.append(shard)
            self._holders.setdefault(shard, []).append(rank)

    def shard(self, rank: int) -> Shard:
        """What ``rank`` holds of every page."""
        self.topology.coordinates(rank)
        return self._shards[rank]

    def local_spec(self, rank: int) -> KVSpec:
        """The spec of the records of ``rank``. Context parts are not cut here: they are shares of a page's tokens."""
        shard = self.shard(rank)
        part = self.spec.select_layers(shard.layer_start, shard.layer_stop)
        return part if shard.head_parts == 1 else part.select_heads(shard.head_part, shard.head_parts)

    def holders(self, rank: int) -> tuple[int, ...]:
        """All ranks that hold the same bytes as ``rank``, itself among them."""
        return tuple(self._holders[self.shard(rank)])

    def writer(self, rank: int, page_key: bytes) -> int:
        """Which holder of what ``rank`` holds writes the page into shared tiers: by turns, as the key says."""
        holders = self._holders[self.shard(rank)]
        return holders[int.from_bytes(page_key[:8], "little") % len(holders)]

    def to_write(self, rank: int, page_keys: Sequence[bytes]) -> list[int]:
        """Positions of the pages that ``rank`` is to write. Over all ranks each shard of each page comes once."""
        return [at for at, key in enumerate(page_keys) if self.writer(rank, key) == rank]

    def _stages(self, given: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...]:
        layers, stages = self.spec.num_layers, self.topology.pp
        if given is None:
            if layers % stages:
                raise ConfigError(
                    f"stage_layers: expected them, as {layers} layers are no {stages} equal parts, got none"
                )
            step = layers // stages
            return tuple((pp * step, (pp + 1) * step) for pp in range(stages))
        edges = [edge for part in given for edge in part]
        whole = len(given) == stages and edges[0] == 0 and edges[-1] == layers
        if not whole or edges[1:-1:2] != edges[2:-1:2] or any(start >= stop for start, stop in given):
            raise ConfigError(
                f"stage_layers: expected {stages} parts that follow each other from 0 to {layers}, got {list(given)}"
            )
        return tuple((start, stop) for start, stop in given)

    def _head_parts(self) -> int:
        """Into how many different parts the heads are cut."""
        counts = {c.heads for components in self.spec.layers for c in components if c.heads > 1}
        tp = self.topology.tp
        if not counts:
            return 1
        if all(heads % tp == 0 for heads in counts):
            return tp
        if len(counts) == 1 and tp % min(counts) == 0:
            return min(counts)
        raise LayoutError(f"heads: expected counts that {tp} ranks can cut or copy evenly, got {sorted(counts)}")
