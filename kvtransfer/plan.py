"""plan: which path a transfer takes, in which chunks, and why. Pure functions over numbers.

Each path that can carry the transfer is predicted from the link profile (`kvtransfer.predict`), and the one that is
through first is taken. Two rules stand above the clock: a path that would take more of a concurrent GEMM than the
budget tolerates is left to those who ask for it, as are stores by SMs, and of paths that are about as quick as each
other the one that leaves the GPU to the model goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtransfer.groups import MAX_GROUP_LAYERS, Groups, layer_groups
from kvtransfer.kernels.coalesce import Box
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.layout import box_bytes
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.predict import CHUNK_PAGES, Asked, Prediction, Runs, Terrain, predict

__all__ = [
    "HOST_PATHS",
    "MAX_GROUP_LAYERS",
    "PATHS",
    "Chunk",
    "Facts",
    "Plan",
    "layer_groups",
    "make_plan",
    "runs_of",
    "staged_boxes",
]

HOST_PATHS = ("staged", "strided", "mapped", "cpu")  # between a pool and host slots
PATHS = (*HOST_PATHS, "device")

MARGIN = 0.05  # a path that takes more from the model must be so much quicker: 3 % are noise, its SMs cost 2 to 5
GEMM_NOISE = 0.03  # of a measurement of what a GEMM keeps: smaller differences are none
PATIENCE = 2.0  # a path over the budget is left out for one that takes at most so many times as long
LEAD_BYTES = 4 << 20  # of a first staged chunk: submitting and gathering a whole one would leave the link idle
DIGEST_TOKENS = 8  # a box starts on a whole digest word when it starts on a multiple of 8 tokens


@dataclass(frozen=True)
class Chunk:
    """What is submitted and acknowledged as one: pages ``first`` to ``first + count - 1`` of a box."""

    box: Box
    first: int
    count: int


@dataclass(frozen=True)
class Plan:
    """How one transfer will run, and why.

    predicted  of the path; None where nothing is predicted (copies within a device)
    others     predictions of the other paths that could carry it, the runner-up first
    barred     (path, reason) of those among them that the budget leaves to those who ask for them
    refused    (path, reason) of paths that can't carry it
    link       whose figures the predictions rest on
    """

    direction: str
    path: str
    reason: str
    pages: int
    total_bytes: int
    piece_bytes: int
    pieces: int
    chunks: tuple[Chunk, ...]
    layerwise: bool
    predicted: Prediction | None = None
    others: tuple[Prediction, ...] = field(default=())
    barred: tuple[tuple[str, str], ...] = field(default=())
    refused: tuple[tuple[str, str], ...] = field(default=())
    link: str = ""

    @cached_property
    def chunks_a_layer(self) -> tuple[int, ...]:
        """How many chunks have something of each layer, up to the last one that any has. Counted once a plan, which is
        used again where the numbers are the same."""
        counts = np.zeros(max((c.box.layer_stop for c in self.chunks), default=0), dtype=np.int64)
        for chunk in self.chunks:
            counts[chunk.box.layer_start : chunk.box.layer_stop] += 1
        return tuple(counts.tolist())

    @cached_property
    def chunks_until(self) -> tuple[int, ...]:
        """Of each layer: how many chunks, from the first on, must be submitted before all of it is."""
        until = np.zeros(len(self.chunks_a_layer), dtype=np.int64)
        for number, chunk in enumerate(self.chunks, 1):
            until[chunk.box.layer_start : chunk.box.layer_stop] = number
        return tuple(until.tolist())

    @cached_property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """(path, why not) of the other paths, the runner-up first."""
        barred = dict(self.barred)
        return tuple((p.path, self._why_not(p, barred.get(p.path))) for p in self.others) + self.refused

    def explain(self) -> str:
        """A few lines for people: pieces, count, path, what is predicted, and why the others lost."""
        lines = [
            f"{self.direction}: {self.pages} pages, {self.total_bytes:,} bytes by path {self.path}: {self.reason}",
            f"  {self.pieces:,} pieces of {self.piece_bytes:,} bytes in {len(self.chunks)} chunks"
            + (", layer by layer" if self.layerwise else ""),
        ]
        if self.predicted is not None and self.predicted.seconds:
            lines.append(f"  predicted {_figures(self.predicted)}, bound by {self.predicted.bound}")
        if self.layerwise and self.predicted is not None and self.predicted.groups:
            sizes = ",".join(str(stop - start) for start, stop in self.predicted.groups)
            lines.append(f"  groups of {sizes} layers")
        runner_up = self.others[0].path if self.others else None
        lines += [f"  not {path}{' (runner-up)' if path == runner_up else ''}: {why}" for path, why in self.rejected]
        if self.link:
            lines.append(f"  link: {self.link}")
        return "\n".join(lines)

    def _why_not(self, p: Prediction, bar: str | None) -> str:
        if bar is not None:
            return f"{bar}; predicted {_figures(p)}" if p.seconds else bar
        chosen = self.predicted
        if chosen is None or not chosen.finish_s:
            return "nothing is moved"
        slower = p.finish_s / chosen.finish_s - 1
        what = "load and forward" if p.finish_s != p.seconds else "it"
        if slower >= 0:
            return f"predicted {_figures(p)}: {what} would take {slower:.1%} longer, bound by {p.bound}"
        if p.kept >= chosen.kept - GEMM_NOISE:
            return f"predicted {_figures(p)}: {what} would take {-slower:.1%} less, noise, and it arrives later"
        return (
            f"predicted {_figures(p)}: {what} would take {-slower:.1%} less, "
            f"but leaves {p.kept:.0%} of a concurrent GEMM instead of {chosen.kept:.0%}"
        )


@dataclass(frozen=True)
class Facts:
    """What a choice is made from: what all transfers of a direction share, and this one's own.

    runs       runs of pages that follow each other on both sides; None where the page ids are on the GPU
    host_runs  runs of host slots alone: what the staged path merges
    compute_s  seconds that a layer of the forward takes beside which a layer-wise load runs, where known
    """

    terrain: Terrain
    pages: int
    runs: Runs | None
    host_runs: Runs
    layerwise: bool
    compute_s: float | None = None


def make_plan(facts: Facts, forced: str | None = None) -> Plan:
    """Choose a path (or take ``forced``) and cut the transfer into chunks. ConfigError if a forced path can't run."""
    t = facts.terrain
    groups = _groups(facts)
    _, box_sizes = _cuts(t.spec, t.slot_bytes, groups)
    refused = dict(_refusals(facts, max(box_sizes)))
    if forced is not None and forced not in HOST_PATHS:
        raise ConfigError(f"path: expected one of {', '.join(HOST_PATHS)} or 'auto', got {forced!r}")
    if forced in refused:
        raise ConfigError(f"path {forced!r} can't carry this {t.direction}: {refused[forced]}")
    order = ("staged", "strided", "mapped") if t.on_gpu else ("cpu", "staged")
    asked = Asked(facts.pages, facts.runs, facts.host_runs, facts.layerwise, facts.compute_s)
    can = [predict(t, asked, path, box_sizes, groups) for path in order if path not in refused]
    if not can:
        raise ConfigError(f"no path can carry this {t.direction}: {refused}")
    barred = dict(_barred(t, can))
    chosen = next(p for p in can if p.path == forced) if forced is not None else _best(can, barred)
    barred.pop(chosen.path, None)
    others = sorted((p for p in can if p is not chosen), key=lambda p: (p.path in barred, p.finish_s))
    return Plan(
        t.direction,
        chosen.path,
        "asked for by the caller" if forced is not None else _reason(t, chosen, others, barred),
        facts.pages,
        facts.pages * t.spec.page_bytes,
        chosen.piece_bytes,
        chosen.pieces,
        _chunks(t, chosen.path, facts.pages, facts.layerwise, groups),
        facts.layerwise,
        chosen,
        tuple(others),
        tuple(barred.items()),
        tuple((p, refused[p]) for p in order if p in refused),
        t.link,
    )


def _refusals(facts: Facts, largest_box: int) -> Iterable[tuple[str, str]]:
    f = facts.terrain
    if not f.on_gpu:
        yield "mapped", "there is no GPU to run the kernel"
        yield "strided", "there is no GPU"
    else:
        yield "cpu", "the pool is on a GPU"
        if not f.host_pinned:
            yield "mapped", "the host slab is not pinned, so kernels can't reach it"
    if f.slot_bytes == 0:
        yield "staged", "there is no staging ring"
    elif largest_box > f.slot_bytes:
        yield (
            "staged",
            (
                f"a ring slot of {f.slot_bytes:,} bytes is too small for {DIGEST_TOKENS} tokens of one layer "
                f"({largest_box:,} bytes); give the ring more staging_bytes"
            ),
        )
    if facts.runs is None:
        yield "strided", "page ids are on the GPU: the copy engine needs addresses on the CPU"
    if facts.layerwise and f.direction == "store":
        yield "mapped", "its one launch can't leave layer by layer"
        if facts.runs is None:
            yield "staged", "layer by layer it can't wait for the GPU's check of page ids: give them on the CPU"


def _barred(t: Terrain, can: Sequence[Prediction]) -> Iterable[tuple[str, str]]:
    """Paths that can carry the transfer and are left to those who ask for them, unless there is no other.

    One that takes too much of the model's rate is only left out for one that is not much slower: a path that takes 2 %
    for fifty times as long takes more in the end, and the request waits.
    """
    gentle = [p for p in can if 1 - p.kept <= t.budget.gemm_loss]
    for p in can:
        loss = 1 - p.kept
        if p.path == "mapped" and t.direction == "store":
            yield p.path, f"SMs that write host memory take {loss:.0%} of a concurrent GEMM: only where asked for"
        elif loss > t.budget.gemm_loss and any(other.finish_s <= PATIENCE * p.finish_s for other in gentle):
            yield (
                p.path,
                f"it takes {loss:.0%} of a concurrent GEMM; {t.budget.name} tolerates {t.budget.gemm_loss:.0%}",
            )
    if can[0].path == "cpu":
        yield from ((p.path, "a ring gains nothing on a CPU") for p in can[1:])


def _best(can: Sequence[Prediction], barred: dict[str, str]) -> Prediction:
    """The first one through; of those close behind it the one that takes least from the model. Of forwards that end
    within the noise of what a GEMM keeps, the one whose load is through first: a few pages could be copied layer by
    layer all along the forward, by Python that the forward needs as well."""
    free = [p for p in can if p.path not in barred] or can
    limit = min(p.finish_s for p in free) * (1 + MARGIN)
    close = [p for p in free if p.finish_s <= limit]
    least = max(p.kept for p in close) - GEMM_NOISE
    gentle = [p for p in close if p.kept >= least]
    first = min(p.finish_s for p in gentle)
    return min((p for p in gentle if p.finish_s <= first * (1 + GEMM_NOISE)), key=lambda p: p.seconds)


def _figures(p: Prediction) -> str:
    return f"{p.seconds * 1e3:.3g} ms, {p.gbps:.1f} GB/s"


def _reason(t: Terrain, chosen: Prediction, others: Sequence[Prediction], barred: dict[str, str]) -> str:
    if not t.on_gpu:
        return "the pool is in host memory"
    if not chosen.seconds:
        return "there is nothing to move"
    quicker = [p for p in others if p.path not in barred and p.finish_s < chosen.finish_s]
    if quicker and all(p.kept >= chosen.kept - GEMM_NOISE for p in quicker):
        return f"within {GEMM_NOISE:.0%} of the quickest, and its last byte is there first"
    if quicker:
        return f"within {MARGIN:.0%} of the quickest, and it takes less from the model"
    return "predicted to be through first" if others else "no other path can carry it"


# -- chunks ----------------------------------------------------------------------------------------


def _chunks(t: Terrain, path: str, pages: int, layerwise: bool, groups: Groups) -> tuple[Chunk, ...]:
    if pages == 0:
        return ()
    if path == "staged":
        return _staged_chunks(t.spec, t.slot_bytes, groups, pages)
    whole = Box.whole(t.spec)
    if path == "mapped":
        return (Chunk(whole, 0, pages),)
    if layerwise or (path == "strided" and len(t.direct.merged) > 1):
        layers = range(t.spec.num_layers)
        return tuple(Chunk(Box(layer, layer + 1, 0, t.spec.page_size), 0, pages) for layer in layers)
    return _by_pages(whole, pages, CHUNK_PAGES)


@lru_cache(maxsize=256)
def _staged_chunks(spec: KVSpec, slot_bytes: int, groups: Groups, pages: int) -> tuple[Chunk, ...]:
    cuts = list(zip(*_cuts(spec, slot_bytes, groups), strict=True))
    lead = min(pages, max(1, min(LEAD_BYTES, slot_bytes) // cuts[0][1]))
    chunks = [Chunk(cuts[0][0], 0, lead)]
    for box, nbytes in cuts:
        chunks += _by_pages(box, pages, max(1, slot_bytes // nbytes), lead if box is cuts[0][0] else 0)
    return tuple(chunks)


@lru_cache(maxsize=256)
def _by_pages(box: Box, pages: int, most: int, start: int = 0) -> tuple[Chunk, ...]:
    return tuple(Chunk(box, first, min(most, pages - first)) for first in range(start, pages, most))


def _groups(facts: Facts) -> Groups:
    """Layers that may travel together. A layer-wise store can't wait for the next layer: each goes alone."""
    t = facts.terrain
    if not facts.layerwise:
        return ((0, t.spec.num_layers),)
    if t.direction == "load":
        return t.groups(facts.pages, facts.compute_s)
    return tuple((i, i + 1) for i in range(t.spec.num_layers))


def staged_boxes(spec: KVSpec, slot_bytes: int, groups: Groups) -> tuple[Box, ...]:
    """The boxes that each group of layers is cut into to fit a ring slot: by layer first, then by token."""
    tokens = spec.page_size
    boxes: list[Box] = []
    for start, stop in groups:
        at = start
        while at < stop:
            end = at + 1
            while end < stop and box_bytes(spec, at, end + 1, 0, tokens) <= slot_bytes:
                end += 1
            if box_bytes(spec, at, end, 0, tokens) <= slot_bytes:
                boxes.append(Box(at, end, 0, tokens))
            else:
                boxes += _token_boxes(spec, at, slot_bytes)
            at = end
    return tuple(boxes)


def _token_boxes(spec: KVSpec, layer: int, slot_bytes: int) -> list[Box]:
    # Powers of two, so that pages made of kernel blocks (16, 64 tokens) are cut between or within blocks, never across.
    tokens = spec.page_size
    step = min(tokens, DIGEST_TOKENS)
    while 2 * step <= tokens and box_bytes(spec, layer, layer + 1, 0, 2 * step) <= slot_bytes:
        step *= 2
    return [Box(layer, layer + 1, t, min(t + step, tokens)) for t in range(0, tokens, step)]


@lru_cache(maxsize=256)
def _cuts(spec: KVSpec, slot_bytes: int, groups: Groups) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """`staged_boxes`, and the bytes of each a page."""
    boxes = staged_boxes(spec, slot_bytes, groups)
    return boxes, tuple(box_bytes(spec, b.layer_start, b.layer_stop, b.token_start, b.token_stop) for b in boxes)


def runs_of(a: NDArray[np.int64], b: NDArray[np.int64]) -> Sequence[tuple[int, int]]:
    """(first position, length) of each run in which both id lists go up by one together."""
    if a.size == 0:
        return []
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    return list(zip(starts.tolist(), np.diff(np.append(starts, a.size)).tolist(), strict=True))
