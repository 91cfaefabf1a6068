"""What lies in a slab after churn, moved for real: in turn with one large copy, every byte compared."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from churn import PLACERS, WORKLOADS, Churn, Ids, run_lengths
from harness import Bar, LargeCopy, Row, measure
from report import progress
from rigs import SHAPES, Rig, Shape, compile_ahead
from works import EngineWork

MOVED_BYTES = 1 << 30
BAR = Bar(0.95)  # towards the host, placed by our allocator
CASES = [(SHAPES["llama8b"], 1)]
CASES += [(SHAPES[name], size) for name in ("mla576", "mla656", "mla1152", "onehead") for size in (16, 64)]


@dataclass(frozen=True)
class Job:
    """One churn: what a process of its own needs to know."""

    shape: Shape
    page_size: int
    placer: str
    num_slots: int
    stores: int
    pages: int
    seed: int

    @property
    def of(self) -> tuple[Shape, int]:
        """The rig's."""
        return self.shape, self.page_size


def last_slots(job: Job) -> Ids:
    """Churn (tails leave), then the slots of the last stores, store by store: ``pages`` of them, all still held."""
    placer, page_bytes = PLACERS[job.placer](job.num_slots), job.shape.spec(job.page_size).page_bytes
    churn = Churn(placer, job.num_slots, job.page_size, page_bytes, WORKLOADS["tails"], job.seed)
    coming = churn.stores()
    for _ in range(job.stores):
        next(coming)
    parts: list[Ids] = []
    while sum(p.size for p in parts) < job.pages:
        parts.append(next(coming))
    return np.concatenate(parts)[: job.pages]


def replay(
    gib: float,
    stores: int,
    limit: LargeCopy,
    *,
    seed: int,
    repeats: int,
    cases: Sequence[tuple[Shape, int]] = CASES,
    placers: Sequence[str] = ("extents", "stack", "queue"),
    processes: int | None = None,
) -> list[Row]:
    """For each (shape, page size): churn in a slab of ``gib``, then store and load the last stores where they lie, as
    many bytes as ``limit`` copies.

    The churns run first, in ``processes`` of their own (as many as there are CPUs): they take longer than the copies.
    """
    jobs = []
    for shape, size in cases:
        page_bytes = shape.spec(size).page_bytes
        slots, pages = int(gib * 2**30) // page_bytes, limit.nbytes // page_bytes
        jobs += [Job(shape, size, placer, slots, stores, pages, seed) for placer in placers]
    most = min(len(jobs), processes or len(os.sched_getaffinity(0)))
    if most > 1:
        with ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn")) as workers:
            places = list(workers.map(last_slots, jobs))
    else:
        places = [last_slots(job) for job in jobs]
    on_gpu = limit.device.type == "cuda"
    compile_ahead([(s, n, "sglang.layer_first") for s, n in cases], limit.device, most if on_gpu else 0)
    out: list[Row] = []
    with progress(2 * len(jobs)) as step:
        for shape, size in cases:
            mine = {job.placer: (job, at) for job, at in zip(jobs, places, strict=True) if job.of == (shape, size)}
            num_slots = next(iter(mine.values()))[0].num_slots
            with Rig(shape, size, limit.nbytes, limit.device, seed=seed, num_slots=num_slots) as rig:
                for job, at in mine.values():
                    rig.place(at)
                    where = f"{shape.name}, pages of {size}, {job.placer}: runs of {run_lengths(at).mean():,.0f}"
                    for direction in ("store", "load"):
                        step(f"{direction}, {where}")
                        work = EngineWork(rig, direction, name=f"{direction}, {where}")
                        bar = BAR if on_gpu and (job.placer, direction) == ("extents", "store") else None
                        out.append(measure(work, limit, repeats=repeats, bar=bar))
            if on_gpu:
                torch.cuda.empty_cache()
    return out
