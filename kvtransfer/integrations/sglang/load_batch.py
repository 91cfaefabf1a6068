"""LoadBatch: the loads that one of SGLang's forwards waits for, of all its requests and pools."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.handles import TransferHandle
from kvtransfer.integrations.sglang.linked_pool import LinkedPool
from kvtransfer.kernels.condition import Event
from kvtransfer.kernels.errors import DeadlineExceeded, KVTransferError, TransferError

logger = logging.getLogger(__name__)
Pages = torch.Tensor | NDArray[np.int64]


@dataclass
class PoolLoad:
    """What a request wants in one pool: its keys, whose slots are held, and the pages of the device that they go to."""

    pool: LinkedPool
    keys: list[str]
    pages: Pages

    def release(self) -> None:
        """Let go of the slots."""
        self.pool.slots.release(self.keys)


class LoadBatch:
    """Made on the scheduler's thread when the batch is started; `start` begins the copies, there or on another thread.
    See `layer_counter.Waited`."""

    def __init__(self, loads: Mapping[str, Sequence[PoolLoad]], deadline_s: float) -> None:
        self._loads = [load for parts in loads.values() for load in parts]
        self._wanted: list[tuple[LinkedPool, list[str], Pages]] = []
        for pool in dict.fromkeys(load.pool for load in self._loads):
            mine = [load for load in self._loads if load.pool is pool]
            # Here, not in `start`: page ids on a GPU are ordered by the scheduler's stream.
            pages = _joined([load.pages for load in mine])
            self._wanted.append((pool, [key for load in mine for key in load.keys], pages))
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self._started = Event()
        self._handles: list[tuple[LinkedPool, list[str], TransferHandle]] = []
        self._failed = False
        self._finishing = threading.Lock()
        self._finished: bool | None = None

    @property
    def waits_for_tiers(self) -> bool:
        """Whether something has to come from below the host memory before `start` can begin."""
        return not all(pool.slots.all_ready(keys) for pool, keys, _ in self._wanted)

    def start(self) -> None:
        """Wait for what comes from below, and begin the copies of all pools. A failure is told by `finish`."""
        try:
            for pool, keys, _ in self._wanted:
                lost = pool.slots.wait_ready(keys, max(0.0, self._until - time.monotonic()))
                if lost:
                    raise TransferError(
                        f"pool {pool.name}: expected {len(keys)} pages in host memory, {len(lost)} of them did not "
                        "come from the tiers, or had no room"
                    )
            for pool, keys, pages in self._wanted:
                self._handles.append((pool, keys, pool.load(keys, pages)))
        except KVTransferError as error:
            self._fail(error)
        except BaseException:
            self._failed = True  # whatever it is: `finish` must not say that all is there
            raise
        finally:
            self._started.set()

    def wait_layer(self, layer: int) -> None:
        if not self._started.wait(max(0.0, self._until - time.monotonic())):
            self._fail(DeadlineExceeded(f"layer {layer}: the load had not begun by its deadline"))
            return
        for pool, _, handle in self._handles:
            try:
                pool.wait_layer(handle, layer)
            except KVTransferError as error:
                self._fail(error)

    def finish(self) -> bool:
        with self._finishing:
            if self._finished is None:
                self._finished = self._finish()
        return self._finished

    def _finish(self) -> bool:
        self._started.wait()  # `start` ends by the deadline
        for pool, keys, handle in self._handles:
            try:
                handle.result()
                bad: Sequence[int] = handle.verdict().bad_pages
            except TransferError as error:
                self._fail(error)
                bad = error.pages
                handle.cancel()
                _await_end(handle, self._deadline_s)
            pool.slots.forget([keys[at] for at in bad])
        for load in self._loads:
            load.release()
        return not self._failed

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            logger.error("kvtransfer: a load failed, its requests are aborted: %s", error)
        self._failed = True


def _await_end(handle: TransferHandle, timeout_s: float) -> None:
    """Until the transfer writes no more: it may have been given up before that."""
    ended = Event()
    handle.add_done_callback(lambda _: ended.set())
    ended.wait(timeout_s)


def _joined(pages: list[Pages]) -> Pages:
    if len(pages) == 1:
        return pages[0]
    tensors = [page for page in pages if isinstance(page, torch.Tensor)]
    if tensors:
        return torch.cat(tensors)
    return np.concatenate([page for page in pages if isinstance(page, np.ndarray)])
