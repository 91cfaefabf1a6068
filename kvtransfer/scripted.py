"""A layer-wise load through the ring, submitted as scripts: no Python between its chunks.

The first chunks go as a script of their own, so that the first layers are on their way while the rest is being
described. Each chunk is: wait for the ring slot, copy batch, scatter, and an event that makes its layers ready.
The ring keeps a slot for transfers of other threads, which would otherwise wait for the whole script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtransfer.kernels.coalesce import Box
from kvtransfer.kernels.launch import relayout_grid
from kvtransfer.kernels.relayout import tile_constants
from kvtransfer.lanes import CudaLanes
from kvtransfer.plan import Chunk
from kvtransfer.staging import SLOTS, RingSlot
from kvtransfer.submitter import Script, Submitter

if TYPE_CHECKING:
    from kvtransfer.host_transfer import HostTransfer

FIRST_CHUNKS = 2
RING_SLOTS = SLOTS - 1


def can_launch(transfer: HostTransfer) -> bool:
    """Whether the kernel of every chunk was preloaded in the form that a script launches."""
    shop = transfer.shop
    return all(_variant(transfer, box) in shop.launches for box in dict.fromkeys(c.box for c in transfer.plan.chunks))


def _variant(transfer: HostTransfer, box: Box) -> tuple[object, ...]:
    table = transfer.shop.geometry("ring>pool", box)[1]
    return () if table is None else ("ring>pool", *tile_constants(table).items())


def submit_load(transfer: HostTransfer, submitter: Submitter) -> None:
    """Submit all chunks of a started transfer. Runs on the engine's thread; takes the shop's lock only for a moment.

    Returns early when the handle was cancelled: what was not submitted stays untouched.
    """
    shop, handle, lanes = transfer.shop, transfer.handle, transfer.shop.lanes
    assert isinstance(lanes, CudaLanes) and shop.ring is not None
    chunks = transfer.plan.chunks
    slots = shop.ring.take_several(min(RING_SLOTS, len(chunks)))
    events = [torch.cuda.Event() for _ in chunks]
    copied = torch.cuda.Event()
    for event in (*events, copied):  # makes the driver's handle; the script records it again
        event.record(lanes.streams["scatter"])
    handle.keep += [copied, slots]
    failed = True
    try:
        for start, stop in ((0, FIRST_CHUNKS), (FIRST_CHUNKS, len(chunks))):
            part = chunks[start:stop]
            script = Script()
            for nth, chunk in enumerate(part, start):
                slot = slots[nth % len(slots)]
                free = slot.free if nth < len(slots) else events[nth - len(slots)]
                _describe(script, transfer, chunk, slot, free, copied, events[nth])
            handle.keep.append(script)
            handle.script_started(script.progress, script.stop, list(zip(part, events[start:stop], strict=True)))
            submitter.submit(script)
            handle.script_ended(failed=False)
            if handle.cancelled:
                break
        failed = False
    finally:
        if failed:
            handle.script_ended(failed=True)
        transfer.count_submitted()
        # Whatever was enqueued must be through before anybody writes these slots.
        with shop.lock:
            lanes.wait("scatter", lanes.record("copy_in"))
            last = lanes.record("scatter")
        for slot in slots:
            shop.ring.give(slot, last)
    for chunk in chunks[: handle.chunks_submitted]:
        transfer.tell("copy", chunk)
        transfer.tell("scatter", chunk)


def _describe(
    script: Script,
    transfer: HostTransfer,
    chunk: Chunk,
    slot: RingSlot,
    free: object,
    copied: torch.cuda.Event,
    done: torch.cuda.Event,
) -> None:
    shop, lanes = transfer.shop, transfer.shop.lanes
    assert isinstance(lanes, CudaLanes)
    copy, scatter = lanes.streams["copy_in"].cuda_stream, lanes.streams["scatter"].cuda_stream
    if isinstance(free, torch.cuda.Event):
        script.wait(copy, free.cuda_event)
    dst, src, sizes = transfer.ring_descriptors(chunk, slot.address)
    script.batch(copy, dst, src, sizes, any_order=transfer.any_order)
    script.record(copy, copied.cuda_event)
    script.wait(scatter, copied.cuda_event)
    table = shop.geometry("ring>pool", chunk.box)[1]
    assert table is not None and transfer.ids is not None
    launch = shop.launches[_variant(transfer, chunk.box)]
    digests, layers = transfer.digests, transfer.spec.num_layers
    spare = table.layer_rows.data_ptr()
    tiles = -(-chunk.count // table.tile.pages) * -(-table.unit_words // table.tile.words)
    arguments = (
        table.rows.data_ptr(), slot.address, 0, spare, transfer.ids.data_ptr(), 0, chunk.first, chunk.count, spare,
        spare if digests is None else digests.data_ptr() + 8 * layers * chunk.first, 1 if digests is None else layers,
    )  # fmt: skip
    script.launch(scatter, launch, arguments, relayout_grid(tiles, table.num_entries))
    script.record(scatter, done.cuda_event)
    script.chunk_done()
