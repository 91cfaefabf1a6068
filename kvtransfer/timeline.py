"""Timeline: when each piece of work really ran, recorded with bounded memory and written as a Chrome/Perfetto trace.

While a timeline is open, each span that has a stream is enclosed by two marks on that stream: CUDA events with timing
on a GPU, points of the FIFO on a CPU. They are read when a transfer ends, on the engine's thread, which never waits
for them. What can't be kept is counted.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from kvtransfer.device_info import device_info
from kvtransfer.fifo import FifoStream
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.events import Observer, Span
from kvtransfer.pool import is_capturing
from kvtransfer.timeline_clock import Anchor, GpuClock, Mark, Stamp
from kvtransfer.timeline_events import Header, Record, trace_of

RECORD_LIMIT = 65_536  # about 30 MB while it is open; a layer-wise load of 32 layers with its forward makes about 110
PENDING_LIMIT = 4_096  # spans of which the marks have not been passed yet: at most twice as many CUDA events
LOOK_AHEAD = 64  # marks that are asked for beyond the first that was not passed: streams run at their own pace
CLOSE_WAIT_S = 10.0


@dataclass(slots=True)
class _Pending:
    record: Record
    first: Mark
    last: Mark
    anchor: Anchor | None


class Timeline(Observer):
    """Records spans until `close`, which writes ``file``. Thread-safe. Made by `TransferEngine.timeline`.

    link_gbps  what the link can do in one direction; where not given, the PCIe link's theoretical rate, if known
    overwrite  False: if ``file`` exists, the first of file-1, file-2, ... that does not
    limit      records kept; the oldest go first and are counted in ``dropped``
    path       where the trace is or will be
    """

    spans = True

    def __init__(
        self,
        file: str | Path,
        device: torch.device,
        pool_name: str,
        *,
        link_gbps: float | None = None,
        overwrite: bool = True,
        limit: int = RECORD_LIMIT,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"limit: expected at least 1 record, got {limit}")
        if link_gbps is not None and not link_gbps > 0:
            raise ConfigError(f"link_gbps: expected more than 0, got {link_gbps}")
        self.path = _claim(Path(file), overwrite)
        self.dropped = 0
        self._limit = limit
        self._kept: deque[Record] = deque()
        self._pending: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._lost = ""
        self._groups = itertools.count(1)
        self._inside = threading.local()
        self._zero_s = time.perf_counter()
        self._gpu = GpuClock(device, self._zero_s) if device.type == "cuda" else None
        self._link = (link_gbps, "given" if link_gbps is not None else "")
        self._device, self._pool_name = device, pool_name

    # -- as an observer ---------------------------------------------------------------------------

    def span(self, span: Span) -> AbstractContextManager[None]:
        return self._recorded(span)

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        if total_bytes:  # an empty transfer ends on its caller's thread, which may be one that captures a graph
            with self._lock:
                self._collect(LOOK_AHEAD)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Wait for marks not yet passed, at most ``wait_s`` (what is left is counted as unfinished), and write the
        file. Later spans are ignored. Idempotent. ConfigError where the file can't be written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end = time.monotonic() + wait_s
            while self._pending and time.monotonic() < end:
                self._collect(len(self._pending))
                if self._pending:
                    time.sleep(0.001)
            unfinished = len(self._pending)
            self._pending.clear()
            self._write(unfinished)

    def _write(self, unfinished: int) -> None:
        gbps, source = self._link if self._link[0] is not None else _theoretical(self._device)
        on_gpu = self._gpu is not None
        header = Header(
            pool=self._pool_name,
            device=torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            clock="CUDA events" if on_gpu else "clock",
            limit=self._limit,
            dropped=self.dropped,
            unfinished=unfinished,
            link_gbps=gbps,
            link_gbps_source=source,
            error=self._lost,
        )
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_bytes(msgspec.json.encode(trace_of(self._kept, header)))
            os.replace(part, self.path)
        except OSError as error:
            raise ConfigError(f"timeline {self.path}: can't be written: {error}") from error

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, span: Span) -> Iterator[None]:
        outer: int = getattr(self._inside, "group", 0)
        if span.name == "layers":
            self._inside.group = next(self._groups)
        group: int = getattr(self._inside, "group", 0)
        anchor = self._gpu.anchor if self._gpu is not None else None
        begun = time.perf_counter()
        first = self._mark(span)
        try:
            yield
        finally:
            last = self._mark(span) if first is not None else None
            ended = time.perf_counter()
            self._inside.group = outer
            host = (begun - self._zero_s, ended - self._zero_s)
            on_stream = host if span.row and span.stream is None else None
            record = Record(span, threading.current_thread().name, group, host, on_stream)
            self._add(record, first, last, anchor)

    def _mark(self, span: Span) -> Mark | None:
        """A mark on the span's stream; None without one, after the end, and inside a capture (which it would enter)."""
        stream = span.stream
        if stream is None or self._closed or self._lost:
            return None
        if isinstance(stream, FifoStream):
            stamp = Stamp()
            stream.record(stamp)
            return stamp
        if self._gpu is None:
            return None
        if span.row == "compute" and is_capturing(stream):
            return None
        with self._lock:
            return self._gpu.mark(stream)

    def _add(self, record: Record, first: Mark | None, last: Mark | None, anchor: Anchor | None) -> None:
        with self._lock:
            if self._closed:
                return
            if first is None or last is None:
                self._keep(record)
            elif len(self._pending) < PENDING_LIMIT:
                self._pending.append(_Pending(record, first, last, anchor))
            else:
                self.dropped += 1

    def _keep(self, record: Record) -> None:
        if len(self._kept) >= self._limit:
            self._kept.popleft()
            self.dropped += 1
        self._kept.append(record)

    def _collect(self, look_ahead: int) -> None:
        """Read what was passed; look past at most ``look_ahead`` marks that were not. Never waits."""
        waiting: list[_Pending] = []
        try:
            if self._gpu is not None:
                self._gpu.renew()
            while self._pending and len(waiting) <= look_ahead:
                pending = self._pending.popleft()
                if not pending.last.query():
                    waiting.append(pending)
                    continue
                self._keep(self._read(pending))
        except RuntimeError as error:  # kept: CUDA is lost, and the trace says so
            self._lost = self._lost or repr(error)
            self.dropped += len(waiting) + len(self._pending)
            waiting.clear()
            self._pending.clear()
        self._pending.extendleft(reversed(waiting))

    def _read(self, pending: _Pending) -> Record:
        record, first, last = pending.record, pending.first, pending.last
        if isinstance(first, Stamp) or isinstance(last, Stamp):
            assert isinstance(first, Stamp) and isinstance(last, Stamp)
            record.on_stream = (first.at_s - self._zero_s, last.at_s - self._zero_s)
            return record
        assert self._gpu is not None and pending.anchor is not None
        record.on_stream = (self._gpu.at(pending.anchor, first), self._gpu.at(pending.anchor, last))
        self._gpu.give(first)
        self._gpu.give(last)
        return record


def _claim(file: Path, overwrite: bool) -> Path:
    """The path to write to, checked now and not after the work: ConfigError where nothing can be written there."""
    folder = file.parent
    if not folder.is_dir() or file.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"timeline {file}: expected a file in a folder that exists and can be written to")
    if overwrite:
        return file
    for number in itertools.count():
        path = file if number == 0 else file.with_name(f"{file.stem}-{number}{file.suffix}")
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"timeline {path}: can't be written: {error}") from error
    raise AssertionError("unreachable")


def _theoretical(device: torch.device) -> tuple[float | None, str]:
    """What the PCIe link of ``device`` can do on paper, and how we know."""
    if device.type != "cuda":
        return None, ""
    try:
        info = device_info(device)
    except ConfigError:
        return None, ""
    if info.pcie_theoretical_gbps is None:
        return None, ""
    return info.pcie_theoretical_gbps, f"PCIe {info.pcie_gen}.0 x{info.pcie_width} in theory"
