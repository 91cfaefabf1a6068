"""NVTX: spans of transfers as ranges of the domain ``kvtransfer``, for nsys, ncu and whatever else reads NVTX.

A range stands for what the calling thread does, launches and copies included, so that tools project it onto the streams
it enqueued on. Its message is the span's name, its category the row (a lane, or "compute"), its payload a struct of
`PAYLOAD`. Names are stable: docs/profiling.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer, Span

DOMAIN = "kvtransfer"
NVTX_VARIABLE = "KVTRANSFER_NVTX"
TIMELINE_VARIABLE = "KVTRANSFER_TIMELINE"
RANGES = (
    "plan", "submit", "layers", "copy", "scatter", "gather", "mapped", "strided", "relayout", "digest", "wait_layer",
    "compute",
)  # fmt: skip
PAYLOAD = np.dtype([("transfer", "i8"), ("bytes", "i8"), ("pages", "i8"), ("layer_start", "i4"), ("layer_stop", "i4")])


class NvtxObserver(Observer):
    """Pushes a range for each span, pops it at its end, each on the thread that does the work.

    ``spans`` is True only where a tool listens to the domain, so that without one nothing is built or called.
    """

    def __init__(self) -> None:
        import nvtx  # noqa: PLC0415  (loads the tool, if there is one)

        self._domain: Any = nvtx.get_domain(DOMAIN)
        self.spans = isinstance(self._domain, nvtx.Domain)

    def span(self, span: Span) -> AbstractContextManager[None]:
        return self._range(span)

    @contextmanager
    def _range(self, span: Span) -> Iterator[None]:
        domain = self._domain
        payload = np.array((span.transfer, span.total_bytes, span.pages, *span.layers), dtype=PAYLOAD)
        category = domain.get_category_id(span.row) if span.row else None
        domain.push_range(domain.get_event_attributes(span.name, category=category, payload=payload))
        try:
            yield
        finally:
            domain.pop_range()


def nvtx_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether KVTRANSFER_NVTX asks for NVTX ranges: 1 or 0. ConfigError for anything else."""
    value = environment.get(NVTX_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{NVTX_VARIABLE}: expected 1 or 0, got {value!r}")
    return value == "1"


def timeline_wanted(pool_name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The file that KVTRANSFER_TIMELINE names, if it does: ``%p`` stands for the process id, ``%n`` for the pool."""
    value = environment.get(TIMELINE_VARIABLE, "")
    return value.replace("%p", str(os.getpid())).replace("%n", pool_name) if value else None
