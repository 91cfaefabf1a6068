"""Compile and load every kernel that an engine may launch, by empty launches, before the first transfer.

A module that is loaded later waits for the device, and a device may by then wait for a flag that only the work
behind that module will raise. What is compiled is kept by Triton on disk: a second process loads in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtransfer.groups import patterns
from kvtransfer.kernels import check, mapped, relayout
from kvtransfer.kernels.coalesce import Box
from kvtransfer.lanes import CudaLanes
from kvtransfer.plan import staged_boxes
from kvtransfer.submitter import Launch
from kvtransfer.workshop import Workshop


def load_kernels(shop: Workshop, *, host_pinned: bool) -> None:
    """Empty launches of all variants for the pool's layout, on the gather lane; returns when they are through.

    Builds the tables of the boxes that transfers will use (they stay in ``shop.tables``). Mutates no page.
    """
    lanes, pool = shop.lanes, shop.pool
    assert isinstance(lanes, CudaLanes) and shop.flags is not None
    loaded: set[tuple[object, ...]] = set()
    with torch.cuda.device(pool.device), lanes.on("gather"):
        ids = torch.zeros(1, dtype=torch.int64, device=pool.device)
        status = torch.tensor(check.fresh_status(), dtype=torch.int32, device=pool.device)
        seen = torch.zeros(1, dtype=torch.int32, device=pool.device)
        digests = torch.zeros(1, pool.spec.num_layers, dtype=torch.int64, device=pool.device) if shop.verify else None
        check.check_ids(ids, 1, status, seen, 1)
        for kind, box in _launches(shop, host_pinned):
            table = shop.geometry(kind, box)[1]
            assert table is not None
            variant = (kind, *relayout.tile_constants(table).items())
            if variant in loaded:
                continue
            loaded.add(variant)
            for gate in (None, status):
                if kind == "host>pool":
                    flags, held = shop.flags.take()
                    mapped.mapped_copy(
                        table, 0, flags, shop.ctas, src_ids=ids, dst_ids=ids, status=gate, digests=digests
                    )
                    shop.flags.give(flags, held + shop.ctas)
                elif kind == "ring>pool":
                    compiled = relayout.relayout(table, 0, dst_ids=ids, status=gate, digests=digests)
                    if gate is None:
                        shop.launches[variant] = Launch.of(compiled)
                else:
                    compiled = relayout.relayout(table, 0, src_ids=ids, status=gate, digests=digests)
                    if gate is None:
                        shop.launches[variant] = Launch.of(compiled)
                    if shop.verify:  # the digests of a strided copy: read, nothing written
                        relayout.relayout(table, 0, src_ids=ids, status=gate, digests=digests, store=False)
    lanes.streams["gather"].synchronize()


def _launches(shop: Workshop, host_pinned: bool) -> Iterator[tuple[str, Box]]:
    """(kind, box) of every launch that a plan can ask for."""
    spec, layers = shop.pool.spec, shop.pool.spec.num_layers
    if host_pinned:
        yield "host>pool", Box.whole(spec)
    single = tuple((i, i + 1) for i in range(layers))
    slot_bytes = shop.ring.slot_bytes if shop.ring is not None else 0
    groupings = (((0, layers),), single, *patterns(layers)) if slot_bytes else ()
    for box in dict.fromkeys(box for groups in groupings for box in staged_boxes(spec, slot_bytes, groups)):
        yield "pool>ring", box
        yield "ring>pool", box
    yield "pool>ring", Box.whole(spec)  # strided copies digest whole pages
    for i, j in single:  # or layer by layer
        yield "pool>ring", Box(i, j, 0, spec.page_size)
