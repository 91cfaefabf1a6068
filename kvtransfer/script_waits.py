"""ScriptWaits: the short way of `TransferHandle.wait_layer` while a job of the submitter brings the layers.

A forward asks once a layer, on the thread that launches its kernels: where the model is small beside its launches,
whatever that takes is the forward's own time. The long way takes 60 to 100 us on a slow CPU, this one a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvtransfer.lanes import CudaEvent
from kvtransfer.submitter import Job


class _Seen(NamedTuple):
    """A stream that may wait, and for how many chunks it waits already."""

    raw: int
    stream: torch.cuda.Stream
    chunks: int


class ScriptWaits:
    """Waits for the chunks of one job, whose events are recorded in their order on one stream: who waits for one has
    waited for all before it. Thread-safe: what is remembered of a stream is replaced as a whole.

    events  one a chunk, in order
    until   of each layer: how many chunks must be submitted before all of it is
    """

    def __init__(self, job: Job, events: Sequence[CudaEvent], until: Sequence[int], device: torch.device) -> None:
        self._job, self._events, self._until, self._device = job, events, until, device.index or 0
        self._seen: _Seen | None = None

    def allow(self, stream: torch.cuda.Stream) -> None:
        """``stream`` is declared, and may wait from now on."""
        if self._seen is None or self._seen.raw != stream.cuda_stream:
            self._seen = _Seen(stream.cuda_stream, stream, 0)

    def wait(self, layer: int, *, landed: bool = False) -> bool:
        """Make the current stream wait for ``layer``; ``landed``: it is there, and the events may be others' by now.

        False, and nothing was done, where that takes the long way: on another stream than the one allowed, in a
        capture, or before the layer has been submitted.
        """
        seen = self._seen
        if seen is None or torch.cuda.current_device() != self._device:
            return False
        if torch._C._cuda_getCurrentRawStream(self._device) != seen.raw or torch.cuda.is_current_stream_capturing():
            return False
        chunks = self._until[layer]
        if landed or chunks <= seen.chunks:
            return True
        if chunks > self._job.chunks_submitted:
            return False
        self._events[chunks - 1].wait(seen.stream)
        self._seen = seen._replace(chunks=chunks)
        return True
