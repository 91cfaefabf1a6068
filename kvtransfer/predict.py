"""predict: how long a transfer takes by each path, from the link profile. Pure functions over numbers.

A path's time is that of its slowest part (copy engine or SMs on the link, the CPU that submits, the relayout on the
device) plus what can't overlap: the last chunk's relayout. Layer-wise loads are followed layer by layer, beside a
forward that computes each layer as soon as it is there. All of it reads tables, and what depends on the layouts
alone is worked out once for each engine and direction (`Terrain`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from kvtransfer.groups import Beside, Groups, GroupTimes, best_groups, layer_groups, layers_done
from kvtransfer.kernels.coalesce import Geometry
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.ids import id_tools
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.link import Grid, LinkProfile

STRIDED_RUN_PAGES = 4  # shorter runs go as batch descriptors: a 2-D call costs 8 descriptors' worth of CPU
CHUNK_PAGES = 128  # of a chunk where neither a ring nor layers cut: the CPU's, and rows of several layers
RUN_LOOP_US = 1.0  # Python's turn of a loop over runs, each layer: what many short runs cost on the strided path
GROUP_S = 0.05e-3  # submitting a layer group, besides its descriptors (H200)
# What a descriptor costs more beside a thread that launches a forward: both want the driver's lock. What 21 loads took
# beside forwards on an H200, in six patterns and four sizes, fits 1.4 to 2.0 us where one alone took 1.4.
BESIDE_LAUNCHES_US = 0.4
# Of the engine's thread, on a path that is submitted call by call: for a piece, besides the driver; and for a chunk,
# with its digests' launch, its events and its waits (H200: 37 chunks of one copy took 17.2 ms, 55 took 26.0).
PYTHON_PIECE_US = 2.0
PYTHON_CHUNK_US = 460.0
SCRIPTED_LAUNCH_US = 5.0  # of the submitter in C (H200: a transfer of one chunk, two launches and a copy, took 37 us)
# A layer-wise load beside its forward: the link begins so long after the call, copies take a little longer than alone,
# and so does a forward that fills the GPU. With these 18 loads in nine patterns beside 512 and 1,024 new tokens came
# within 2 % (H200, four hardware queues), but for groups of two layers. Of a forward that waits for its launches, the
# thread that launches is held for so much of the time in which descriptors are written. Nobody says which it is: both
# count, up to a layer that takes longer than the launches of an eager one (0.4 ms on a fast CPU, 0.5 on a slow one).
START_S, COPY_SLOWED, SLOWED, HELD, LONGEST_LAUNCHES_S = 0.65e-3, 1.03, 1.01, 0.55, 0.55e-3
UNKNOWN_COMPUTE = (0.25, 0.5, 1.0, 2.0)  # a layer's computing over its link time, where nobody says what it is

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Budget:
    """How much of the model's GPU a transfer may take: CTAs of a mapped launch, and the loss of a concurrent GEMM
    (a share of its rate) beyond which a path is given up where another one can carry the transfer."""

    name: str
    ctas: int
    gemm_loss: float


# A loss of 5 % and its measurement's noise of 3 % (H200). While decoding, kernels wait for memory and leave SMs idle.
BUDGETS = {"prefill": Budget("prefill", 4, 0.08), "decode": Budget("decode", 8, 0.15)}


def budget_of(sm_budget: int | str) -> Budget:
    """A named budget, or that many CTAs with any loss tolerated."""
    if isinstance(sm_budget, str):
        if sm_budget not in BUDGETS:
            raise ConfigError(f"sm_budget: expected a number of CTAs or one of {', '.join(BUDGETS)}, got {sm_budget!r}")
        return BUDGETS[sm_budget]
    if sm_budget < 1:
        raise ConfigError(f"sm_budget: expected at least 1 CTA, got {sm_budget}")
    return Budget(f"{sm_budget} CTAs", sm_budget, 1.0)


@dataclass(frozen=True)
class Runs:
    """Runs in which ids go up by one: all, and those of at least `STRIDED_RUN_PAGES` pages."""

    pages: int
    count: int
    long: int
    long_pages: int

    @classmethod
    def of(cls, ids: Ids, other: Ids | None = None) -> Runs:
        """Runs of one list, or those that two share, position by position."""
        count, long, long_pages = id_tools().runs(ids, other, STRIDED_RUN_PAGES)
        return cls(ids.size, count, long, long_pages)

    def parts(self) -> list[tuple[int, int]]:
        """(runs, pages in them) of the long and of the short ones, as far as there are any."""
        parts = ((self.long, self.long_pages), (self.count - self.long, self.pages - self.long_pages))
        return [part for part in parts if part[0]]


@dataclass(frozen=True)
class Prediction:
    """What is expected of one path.

    seconds    until the last byte has landed
    finish_s   of a layer-wise load beside layers whose time is known, until the last of them is computed; otherwise
               ``seconds``
    pieces, piece_bytes  what the link carries, after merging; the mean size
    bound      what it waits for: "the link", "the CPU" or "the relayout"
    kept       the share of a concurrent GEMM's rate that is left
    """

    path: str
    seconds: float
    finish_s: float
    total_bytes: int
    pieces: int
    piece_bytes: int
    bound: str
    kept: float
    groups: Groups = ()

    @property
    def gbps(self) -> float:
        return self.total_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Terrain:
    """All that the transfers of one engine and direction have in common.

    direct             the geometry between pool and host
    slot_bytes         of a ring slot, 0 without a ring
    host_stride_bytes  from one host slot to the next: pages merge where it is the page itself; None: it is
    host_pinned        whether copy engine and kernels can reach host memory directly
    scripted           whether staged bulk transfers are jobs of the submitter in C (`kvtransfer.scripted`)
    fixed_groups       layer groups of every layer-wise load, instead of the best ones (benchmarks)
    """

    direction: str
    spec: KVSpec
    direct: Geometry
    slot_bytes: int
    on_gpu: bool
    host_pinned: bool
    profile: LinkProfile
    budget: Budget = BUDGETS["prefill"]
    host_stride_bytes: int | None = None
    scripted: bool = False
    fixed_groups: Groups = ()
    _groups: dict[tuple[int, float | None], Groups] = field(default_factory=dict, compare=False, repr=False)

    @property
    def way(self) -> str:
        return "h2d" if self.direction == "load" else "d2h"

    @cached_property
    def link(self) -> str:
        """Whose figures the predictions rest on."""
        return self.profile.describe()

    @cached_property
    def merges(self) -> bool:
        """Whether whole pages of neighbouring slots are one run of host memory."""
        stride = self.spec.page_bytes if self.host_stride_bytes is None else self.host_stride_bytes
        return stride == self.spec.page_bytes <= self.slot_bytes

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """(bytes, how many a page) of the rows that 2-D copies move."""
        return sorted(Counter(e.piece_bytes for e in self.direct.merged).items())

    @cached_property
    def row_pieces(self) -> list[tuple[int, int]]:
        """(bytes, how many a page) of the pieces between pool and host."""
        count: Counter[int] = Counter()
        for e in self.direct.merged:
            count[e.piece_bytes] += e.unit_bytes // e.piece_bytes
        return sorted(count.items())

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """(bytes, how many a page) of what a kernel reads or writes of host memory in one go."""
        return sorted(Counter(e.unit_bytes for e in self.direct.entries).items())

    @cached_property
    def plain(self) -> bool:
        return all(not e.loops for e in self.direct.merged)

    @cached_property
    def layer_ends(self) -> list[int]:
        """Bytes of a page up to the end of each layer, beginning with 0."""
        return [0, *np.cumsum([self.spec.layer_bytes(i) for i in range(self.spec.num_layers)]).tolist()]

    @cached_property
    def relayout_s_per_byte(self) -> float:
        return 1e-9 / self.profile.relayout.value(self.direct.piece_bytes)

    @cached_property
    def peak(self) -> float:
        """GB/s that the link gives at best."""
        peak = self.profile.peak_gbps[self.way]
        if self.on_gpu and not self.host_pinned:
            return min(peak, self.profile.peak_gbps.get("pageable", peak))
        return peak

    @cached_property
    def _grids(self) -> dict[str, Grid]:
        flat = Grid((1,), (1,), ((self.peak,),))
        return {p: self.profile.grids.get(f"{p}/{self.way}", flat) for p in ("staged", "strided", "mapped", "cpu")}

    def link_s(self, path: str, piece_bytes: float, count: float, factor: float = 1.0) -> float:
        """Seconds of the link for ``count`` pieces; never quicker than its peak. ``factor`` scales the table's rate."""
        if not count:
            return 0.0
        rate = min(self._grids[path].rate(piece_bytes, count) * factor, self.peak)
        return piece_bytes * count / rate * 1e-9

    def groups(self, pages: int, compute_s: float | None = None) -> Groups:
        """Layer groups of a layer-wise load of about so many pages beside layers that take about ``compute_s`` each.

        On the CPU, where groups gain nothing, always the usual ones: the logic above them is tested there.
        Worked out once for each power of two of pages (and of the eighth root of two of seconds), then remembered.
        """
        if self.fixed_groups:
            return self.fixed_groups
        if not self.on_gpu:
            return tuple(layer_groups(self.spec.num_layers))
        about = 1 << max(0, pages - 1).bit_length()
        near = None if compute_s is None else 2.0 ** (round(8 * math.log2(compute_s)) / 8)
        if (about, near) not in self._groups:
            link_s = self.spec.page_bytes * about / self.spec.num_layers / self.peak * 1e-9
            times = [ratio * link_s for ratio in UNKNOWN_COMPUTE] if near is None else [near]
            forwards = [Beside(SLOWED * s) for s in times]
            forwards += [Beside(s, launches=True) for s in times if s < LONGEST_LAUNCHES_S]
            self._groups[about, near] = best_groups(
                self.layer_ends, lambda n, first: self._group_s(n, about, first), forwards, self.slot_bytes
            )
        return self._groups[about, near]

    def _group_s(self, page_bytes: int, pages: int, first: bool) -> GroupTimes:
        """Times of one layer group.

        While the ``first`` is submitted the forward waits for it, and does not want the driver's lock.
        """
        total = page_bytes * pages
        beside = 0.0 if first else BESIDE_LAUNCHES_US
        copy = COPY_SLOWED * self.link_s("staged", page_bytes, pages)
        last = min(total, self.slot_bytes)
        return GroupTimes(
            (START_S if first else GROUP_S) + pages * (self.profile.cpu.descriptor_us + beside) * 1e-6,
            copy,
            copy * last / total,
            last * self.relayout_s_per_byte + self.profile.cpu.launch_us * 1e-6,
            0.0 if first else HELD * pages * self.profile.cpu.descriptor_us * 1e-6,
        )


# -- the paths -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One transfer over a terrain. ``runs`` are shared by pool and host (None: page ids are on the GPU),
    ``host_runs`` the host's alone. ``boxes`` are the staged path's cuts of a page, as bytes."""

    pages: int
    runs: Runs | None
    host_runs: Runs
    layerwise: bool
    compute_s: float | None = None


def predict(terrain: Terrain, asked: Asked, path: str, boxes: Sequence[int] = (), groups: Groups = ()) -> Prediction:
    """One path's `Prediction`. ``boxes`` are the bytes a page of the staged path's cuts, in ``groups``."""
    if asked.pages == 0:
        return Prediction(path, 0.0, 0.0, 0, 0, 0, "nothing", 1.0)
    if path == "staged":
        return _staged(terrain, asked, boxes, groups)
    return _PATHS[path](terrain, asked)


def _staged(t: Terrain, asked: Asked, boxes: Sequence[int], groups: Groups) -> Prediction:
    cpu, total = t.profile.cpu, t.spec.page_bytes * asked.pages
    pieces: list[tuple[int, float]] = []
    if t.merges and len(boxes) == 1:
        most = t.slot_bytes // t.spec.page_bytes  # a chunk of pages is the longest that merges
        for runs, pages in asked.host_runs.parts():
            n = max(runs, -(-pages // most))
            pieces.append((n, t.spec.page_bytes * pages / n))
    else:
        pieces = [(asked.pages * n, nbytes) for nbytes, n in Counter(boxes).items()]
    link = sum(t.link_s("staged", nbytes, n) for n, nbytes in pieces)
    count = sum(n for n, _ in pieces)
    chunks = sum(-(-asked.pages // max(1, t.slot_bytes // nbytes)) for nbytes in boxes)
    launch_us = SCRIPTED_LAUNCH_US if t.scripted else cpu.launch_us
    busy = count * cpu.descriptor_us * 1e-6 + chunks * 2 * launch_us * 1e-6
    last = min(max(boxes) * asked.pages, t.slot_bytes)
    tail = last * t.relayout_s_per_byte + launch_us * 1e-6
    seconds, bound = _slowest(link, busy, total * t.relayout_s_per_byte)
    seconds += tail
    finish = seconds
    if asked.layerwise and t.direction == "load" and groups:
        layer_s = (asked.compute_s or 0.0) / t.profile.kept("staged", t.way, t.budget.ctas)
        ends = t.layer_ends
        sizes = cache(lambda nbytes, first: t._group_s(nbytes, asked.pages, first))
        seconds, finish = layers_done(groups, ends, sizes, Beside(layer_s))
    return _prediction(t, "staged", asked, seconds, finish, count, bound, groups)


def _strided(t: Terrain, asked: Asked) -> Prediction:
    assert asked.runs is not None
    runs, cpu = asked.runs, t.profile.cpu
    by_layer = asked.layerwise or len(t.direct.merged) > 1
    chunks = t.spec.num_layers if by_layer else -(-asked.pages // CHUNK_PAGES)
    link = busy = 0.0
    count = 0
    alone = asked.pages
    if t.plain and runs.long:
        alone -= runs.long_pages
        calls = runs.long if by_layer else max(runs.long, -(-runs.long_pages // CHUNK_PAGES))
        for row, n in t.rows:
            link += t.link_s("strided", row, runs.long_pages / calls) * calls * n
            count += calls * n
        busy += count * cpu.call_us * 1e-6
    for piece, n in t.row_pieces:
        link += t.link_s("staged", piece, alone * n)
        count += alone * n
        busy += alone * n * (cpu.descriptor_us + PYTHON_PIECE_US) * 1e-6
    busy += runs.count * (chunks if by_layer else 1) * RUN_LOOP_US * 1e-6
    chunk_s = PYTHON_CHUNK_US * 1e-6 if t.on_gpu else 0.0
    busy += (chunks - 1) * chunk_s
    seconds, bound = _slowest(link, busy, 0.0)
    # The kernel that reads along for digests runs before the first copy or after the last one.
    seconds += chunk_s + t.spec.page_bytes * asked.pages / chunks * t.relayout_s_per_byte + _start_s(t, asked)
    return _prediction(t, "strided", asked, seconds, _even_finish(t, asked, "strided", seconds), count, bound)


def _mapped(t: Terrain, asked: Asked) -> Prediction:
    factor = t.profile.mapped_factor(t.way, t.budget.ctas)
    link = sum(t.link_s("mapped", unit, asked.pages * n, factor) for unit, n in t.units)
    seconds = link + t.profile.cpu.launch_us * 1e-6 + _start_s(t, asked)
    count = asked.pages * t.direct.pieces_a_page
    return _prediction(t, "mapped", asked, seconds, _even_finish(t, asked, "mapped", seconds), count, "the link")


def _cpu(t: Terrain, asked: Asked) -> Prediction:
    count = asked.pages * t.direct.pieces_a_page
    seconds = sum(t.link_s("cpu", piece, asked.pages * n) for piece, n in t.row_pieces)
    return _prediction(t, "cpu", asked, seconds, _even_finish(t, asked, "cpu", seconds), count, "memory")


_PATHS: dict[str, Callable[[Terrain, Asked], Prediction]] = {"strided": _strided, "mapped": _mapped, "cpu": _cpu}


def _prediction(
    t: Terrain, path: str, asked: Asked, seconds: float, finish: float, count: int, bound: str, groups: Groups = ()
) -> Prediction:
    total = t.spec.page_bytes * asked.pages
    kept = t.profile.kept(path, t.way, t.budget.ctas) if t.on_gpu else 1.0
    return Prediction(path, seconds, finish, total, count, total // max(count, 1), bound, kept, groups)


def _slowest(link: float, cpu: float, relayout: float) -> tuple[float, str]:
    return max((link, "the link"), (cpu, "the CPU"), (relayout, "the relayout"))


def _start_s(t: Terrain, asked: Asked) -> float:
    """From the call of a layer-wise load until the link begins."""
    return START_S if t.on_gpu and asked.layerwise and t.direction == "load" else 0.0


def _even_finish(t: Terrain, asked: Asked, path: str, seconds: float) -> float:
    """When a forward is through whose layers arrive evenly over ``seconds``, one by one, and which the path slows."""
    if not asked.layerwise or t.direction != "load" or asked.compute_s is None:
        return seconds
    layers, layer_s = t.spec.num_layers, asked.compute_s / t.profile.kept(path, t.way, t.budget.ctas)
    # f_i = max(f_(i-1), arrival_i) + layer: with even arrivals the first or the last layer decides
    return max(seconds / layers + layers * layer_s, seconds + layer_s)
