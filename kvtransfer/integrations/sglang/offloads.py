"""Offloads: pages on their way from the device to host memory, acknowledged in the order in which they came."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.handles import TransferHandle
from kvtransfer.integrations.sglang.linked_pool import LinkedPool
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import DeadlineExceeded, KVTransferError

logger = logging.getLogger(__name__)
Pages = torch.Tensor | NDArray[np.int64]


@dataclass(eq=False)
class _Offload:
    """One of them: all its pools or nothing."""

    new: list[tuple[LinkedPool, list[str]]] = field(default_factory=list)
    left: int = 0
    failed: bool = False
    done: bool = False


class Offloads:
    """Thread-safe. ``begin`` is for the thread that launched the forwards that wrote the pages, or one behind it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._queue: deque[_Offload] = deque()

    def begin(self, wanted: Sequence[tuple[LinkedPool, list[str], Pages]]) -> None:
        """Copy pages to host memory, those that are there already left out. Where there is no room for all of them, it
        is over at once, and failed.

        The copies come behind what the pools' streams have been given until now.
        """
        offload = _Offload()
        chosen: list[tuple[LinkedPool, NDArray[np.int64], Pages]] = []
        for pool, keys, pages in wanted:
            reserved = pool.slots.reserve(keys)
            if reserved is None:
                offload.failed, chosen = True, []
                break
            positions, slots = reserved
            new = [keys[at] for at in positions]
            offload.new.append((pool, new))
            if new:
                chosen.append((pool, slots, pages if len(new) == len(keys) else pages[positions]))
        offload.left = len(chosen) + 1
        with self._changed:
            self._queue.append(offload)
        for pool, slots, pages in chosen:
            try:
                handle = pool.engine.store(pages, slots)
            except KVTransferError as error:
                self._ended(offload, error)
            else:
                handle.add_done_callback(partial(self._stored, offload))
        self._ended(offload, None)

    def completed(self) -> int:
        """How many are over, from the oldest on."""
        with self._changed:
            for at, offload in enumerate(self._queue):
                if not offload.done:
                    return at
            return len(self._queue)

    def pop(self) -> bool:
        """Take the oldest, which is over; whether all of it landed. IndexError if there is none."""
        with self._changed:
            if not self._queue or not self._queue[0].done:
                raise IndexError("expected an offload that is over, got none")
            return not self._queue.popleft().failed

    def drain(self, timeout_s: float) -> None:
        """Wait until all are over, and forget their outcomes. Raises DeadlineExceeded when the time is up."""
        until = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(offload.done for offload in self._queue), max(0.0, until - time.monotonic())
            ):
                raise DeadlineExceeded(f"offloads: some were not over after {timeout_s:g} s")
            self._queue.clear()

    def _stored(self, offload: _Offload, handle: TransferHandle) -> None:
        self._ended(offload, _error_of(handle))

    def _ended(self, offload: _Offload, error: KVTransferError | None) -> None:
        """One of its copies is over (or, the last time, all have been begun). On the engine's thread mostly."""
        with self._changed:
            offload.left -= 1
            if error is not None:
                offload.failed = True
                logger.warning("kvtransfer: an offload failed: %s", error)
            if offload.left:
                return
        for pool, new in offload.new:
            if offload.failed:
                pool.slots.forget(new)
                pool.slots.release(new)
            else:
                pool.slots.publish(new)
                if new and pool.lower is not None:
                    pool.lower.keep(new)  # lets go of them
                else:
                    pool.slots.release(new)
        with self._changed:
            offload.done = True
            self._changed.notify_all()


def _error_of(handle: TransferHandle) -> KVTransferError | None:
    try:
        handle.result(0)
    except KVTransferError as error:
        return error
    return None
