"""Staged transfers as jobs of the submitter: no Python between their chunks, none a page (`kvtransfer.templates`).

A job holds some of the ring's slots from `hand_over` until it has been submitted, and others are left to transfers in
the other direction, so that both run at once. It holds its desk until the transfer has been acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.fifo import FifoEvent
from kvtransfer.kernels.ids import id_tools
from kvtransfer.lanes import CudaEvent, CudaLanes, Event
from kvtransfer.staging import RingSlot
from kvtransfer.submitter import Job
from kvtransfer.templates import MOST_WAITS, Desk, Template
from kvtransfer.workshop import Workshop

if TYPE_CHECKING:
    from kvtransfer.host_transfer import HostTransfer

MOST_TEMPLATES = 64
MOST_DESKS = 4  # kept for later; more transfers than that in flight make their own


@dataclass(frozen=True)
class Handed:
    """What a transfer has with the submitter."""

    job: Job
    slots: list[RingSlot]
    final: CudaEvent
    chunks: int


def template_of(shop: Workshop, transfer: HostTransfer) -> Template:
    """The template of a transfer's plan; made at the first of its shape."""
    plan = transfer.plan
    groups = None if plan.predicted is None else plan.predicted.groups
    key = (plan.direction, plan.pages, groups)
    template = shop.templates.get(key)
    if template is None or template.chunks != plan.chunks:
        if len(shop.templates) >= MOST_TEMPLATES:
            shop.templates.clear()
        template = shop.templates[key] = Template(shop, transfer.load, plan.chunks)
    return template


def hand_over(transfer: HostTransfer) -> bool:
    """Give all chunks of a started transfer to the submitter (it is `handed_over` then). Under the shop's lock; returns
    at once.

    False where the ring has too few slots that nobody holds: nothing has happened, try again later.
    """
    shop = transfer.shop
    assert isinstance(shop.lanes, CudaLanes) and shop.ring is not None and transfer.pages is not None
    submitter = shop.submitters[transfer.plan.direction]
    chunks, pages = transfer.plan.chunks, transfer.plan.pages
    held: list[RingSlot] = []
    try:
        slots = shop.ring.try_take(min(shop.ring.share, len(chunks)), held)
        if slots is None:
            return False
        desk = transfer.desk = _desk(shop, pages)
        tools = id_tools()
        tools.copy(desk.slots, transfer.slots)
        tools.copy(desk.ids, transfer.pages)
        bound = desk.bind(template_of(shop, transfer), pages)
        final = shop.lanes.record(transfer.last_lane)  # the job records it again
        waits = transfer.waits()
        for lane, event in waits[MOST_WAITS:]:
            shop.lanes.wait(lane, event)
        before = [(shop.lanes.streams[lane].cuda_stream, _handle(event)) for lane, event in waits[:MOST_WAITS]]
        job = bound.job(slots, final, transfer.any_order, before)
        transfer.handed = Handed(job, slots, final, len(chunks))
        transfer.handed_over = True
        submitter.give(job)  # first of all: the link is idle
        transfer.handle.script_started(job, submitter.await_chunks, bound.chunks)
    except BaseException:
        if transfer.handed is not None and transfer.handed.job.given:  # a KeyboardInterrupt behind it: it is under way
            transfer.handed.job.stop()
            transfer.handle.script_started(transfer.handed.job, submitter.await_chunks, bound.chunks)
            raise
        transfer.handed, transfer.handed_over = None, False
        for slot in held:
            shop.ring.give(slot, None)
        raise
    return True


def take_back(transfer: HostTransfer) -> bool:
    """After `hand_over`: whether the job has ended; then its ring slots are given back and its error is told. Under the
    shop's lock. Where everything was submitted the handle has its last event; otherwise `Transfer.finish` is due."""
    handed = transfer.handed
    assert handed is not None and transfer.shop.ring is not None and transfer.desk is not None
    if not handed.job.ended:
        return False
    lanes, handle, job = transfer.shop.lanes, transfer.handle, handed.job
    error = job.error()
    whole = job.chunks_submitted > handed.chunks
    last: Event | None = handed.final if whole else None
    try:
        handle.script_ended(failed=error is not None)
        if error is not None:
            handle.fail(error)
        transfer.count_submitted()
        handle.keep += [job, transfer]
        if last is None:  # whatever was enqueued must be through before anybody writes these slots
            for lane in (transfer.copy_lane, transfer.kernel_lane):
                if lane != transfer.last_lane:
                    lanes.wait(transfer.last_lane, lanes.record(lane))
            for slot in handed.slots:  # and what others had enqueued before: the job may have ended before it waited
                if slot.free is not None:
                    lanes.wait(transfer.last_lane, slot.free)
            last = lanes.record(transfer.last_lane)
    finally:
        transfer.handed = None
        for slot in handed.slots:
            transfer.shop.ring.give(slot, last)
    if whole:
        transfer.finish_with(handed.final, (transfer.desk.begin, transfer.desk.end), transfer.desk.digests_back)
    for chunk in transfer.plan.chunks[: handle.chunks_submitted]:
        for stage in ("copy", "scatter") if transfer.load else ("gather", "copy"):
            transfer.tell(stage, chunk)
    return True


def _handle(event: Event) -> int:
    assert not isinstance(event, FifoEvent)
    return int(event.cuda_event)


def _desk(shop: Workshop, pages: int) -> Desk:
    fitting = [d for d in shop.desks if d.pages >= pages]
    if not fitting:
        return Desk(shop, pages)
    desk: Desk = min(fitting, key=lambda d: d.pages)
    shop.desks.remove(desk)
    return desk


def give_desk(shop: Workshop, desk: Desk) -> None:
    """Nothing of its job is in flight any more."""
    shop.desks.append(desk)
    if len(shop.desks) > MOST_DESKS:
        shop.desks.remove(min(shop.desks, key=lambda d: d.pages))
