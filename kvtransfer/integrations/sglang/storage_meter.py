"""What SGLang's storage metrics ask for: pages and GB/s of each batch since it last asked."""

from __future__ import annotations

import threading
from typing import Any

GB = 1e9  # SGLang's unit


class StorageMeter:
    """Counts only where SGLang wants metrics. Thread-safe."""

    def __init__(self, wanted: bool) -> None:
        self._lock = threading.Lock()
        self._wanted = wanted
        self._batches: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    def fetched(self, pages: int, page_bytes: int, seconds: float) -> None:
        """A batch came from the tiers."""
        self._note("prefetch", pages, page_bytes, seconds)

    def kept(self, pages: int, page_bytes: int, seconds: float) -> None:
        """A batch went to the tiers."""
        self._note("backup", pages, page_bytes, seconds)

    def _note(self, what: str, pages: int, page_bytes: int, seconds: float) -> None:
        if self._wanted and pages:
            with self._lock:
                self._batches[what].append((pages, pages * page_bytes / GB / max(seconds, 1e-9)))

    def take(self) -> Any:
        """A `StorageMetrics`, and counting starts anew; None where nobody wants it."""
        if not self._wanted:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415  (imports prometheus)

        with self._lock:
            batches, self._batches = self._batches, {"prefetch": [], "backup": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in batches["prefetch"]],
            backup_pgs=[pages for pages, _ in batches["backup"]],
            prefetch_bandwidth=[speed for _, speed in batches["prefetch"]],
            backup_bandwidth=[speed for _, speed in batches["backup"]],
        )
