"""Metrics for Prometheus: an observer that counts what transfers do, and a collector that reads a cache's books when
somebody scrapes. Nothing is counted, and nothing imported, where none is attached.

Names and labels are stable: docs/metrics.md lists them, and a test compares the list with what is served.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtransfer.directory import DirectoryFigures
from kvtransfer.kernels.errors import ConfigError, KVTransferError
from kvtransfer.kernels.events import Observer

if TYPE_CHECKING:  # these bring torch
    from kvtransfer.cache import TieredCache
    from kvtransfer.link import LinkProfile

# From a page over a fast link to a long prefix from a slow store; a wait of a layer is far below.
DURATIONS_S = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
WAITS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 1.0)
LARGE_BYTES = 8 << 20  # smaller transfers say more of latency than of the link
HALF_LIFE_S = 10.0  # of transfer time, in the achieved share
_LINK_OF = {"load": "h2d", "store": "d2h"}
_BYTES = {"bytes_read": "read", "bytes_written": "write"}


class TierFigures(Protocol):
    """What is asked of a lower tier: `TierStats`, or `TierState` from another process."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def counters(self) -> Mapping[str, int]: ...


@dataclass
class _Faded:
    """Bytes and seconds of large transfers, the older the less."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> float:
        """The rate now, bytes a second."""
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        self.nbytes = self.nbytes * kept + nbytes
        self.seconds = self.seconds * kept + seconds
        return self.nbytes / self.seconds


class Metrics(Observer):
    """Give it to an engine, a host tier, a cache as their observer (one engine: its transfers are numbered), and
    `watch` the cache. Thread-safe.

    Args:
        registry: where the metrics are; None: one of their own, ``registry``.
        link: the profile that the achieved share is of (`TransferEngine.profile`); None: no share is given.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, link: LinkProfile | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        made: dict[str, Any] = {"registry": self.registry}
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, str]] = {}  # by transfer: direction and path
        self._rates: defaultdict[str, _Faded] = defaultdict(_Faded)
        self._peaks: dict[str, float] = {}
        ways = ("direction", "path")
        try:
            self._transfers = Counter(
                "kvtransfer_transfers", "Transfers that ended, ok or failed (or cancelled)", (*ways, "outcome"), **made
            )
        except ValueError as error:
            raise ConfigError(f"metrics: expected a registry that has none of kvtransfer: {error}") from error
        self._bytes = Counter("kvtransfer_transfer_bytes", "Bytes of transfers that ended well", ways, **made)
        self._pages = Counter("kvtransfer_transfer_pages", "Pages of transfers that were begun", ways, **made)
        self._seconds = Histogram(
            "kvtransfer_transfer_seconds", "From a transfer's first copy to its last", ways, buckets=DURATIONS_S, **made
        )
        self._waits = Histogram(
            "kvtransfer_layer_wait_seconds", "wait_layer held its caller for", buckets=WAITS_S, **made
        )
        self._fallbacks = Counter("kvtransfer_fallbacks", "Something slower was taken", ("what",), **made)
        self._events = Counter("kvtransfer_events", "Anything else that was told, by its name", ("event",), **made)
        self._suppressed = Gauge(
            "kvtransfer_tier_suppressed", "1 while a tier that failed is left alone", ("tier",), **made
        )
        self._share = Gauge(
            "kvtransfer_link_share", "Of the measured link, by large transfers lately", ("direction",), **made
        )
        if link is not None:
            peaks = Gauge(
                "kvtransfer_link_peak_bytes_per_second", "Measured, of one large copy", ("direction",), **made
            )
            for direction, name in _LINK_OF.items():
                self._peaks[direction] = link.peak_gbps[name] * 1e9
                peaks.labels(direction).set(self._peaks[direction])

    def watch(
        self,
        directory: Callable[[], DirectoryFigures] | None = None,
        tiers: Callable[[], Mapping[str, TierFigures]] | None = None,
    ) -> None:
        """From now on each scrape asks these for their figures, on the scraper's thread. `Directory.figures` walks the
        tree; tiers are not waited for. One that raises a KVTransferError has no figures then, and is counted."""
        try:
            self.registry.register(_Books(directory, tiers))
        except ValueError as error:
            raise ConfigError(f"metrics: expected to watch one cache a registry: {error}") from error

    def watch_cache(self, cache: TieredCache) -> None:
        """`watch` both halves of a cache."""
        self.watch(cache.directory.figures, cache.mover.stats)

    def serve(self, port: int = 0, address: str = "127.0.0.1") -> MetricsServer:
        """Serve the registry over http, on a thread, until it is closed. Port 0: any free one. Raises ConfigError where
        the address can't be had. An engine that serves metrics already can take ``registry`` into its own instead."""
        try:
            return MetricsServer(*start_http_server(port, address, self.registry))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics: expected an address to serve at, got {address}:{port}: {error}") from error

    # --- as an observer

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        self._pages.labels(direction, path).inc(pages)
        with self._lock:
            self._open[transfer] = (direction, path)

    def waited(self, transfer: int, layer: int, host_s: float) -> None:
        self._waits.observe(host_s)

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        with self._lock:
            direction, path = self._open.pop(transfer, ("unknown", "unknown"))
            if ok and total_bytes >= LARGE_BYTES and seconds > 0 and direction in self._peaks:
                rate = self._rates[direction].add(total_bytes, seconds)
                self._share.labels(direction).set(rate / self._peaks[direction])
        self._transfers.labels(direction, path, "ok" if ok else "failed").inc()
        self._seconds.labels(direction, path).observe(seconds)
        if ok:
            self._bytes.labels(direction, path).inc(total_bytes)

    def fell_back(self, what: str, why: str) -> None:
        self._fallbacks.labels(what).inc()

    def noted(self, what: str, **fields: Any) -> None:
        self._events.labels(what).inc()
        if what in ("tier.down", "tier.up"):
            self._suppressed.labels(str(fields.get("name", ""))).set(what == "tier.down")


class MetricsServer:
    """Serves until `close`. ``port`` is the one that it has."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Serve no more. Does nothing the second time."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Books(Collector):
    """Reads figures when it is scraped."""

    def __init__(
        self,
        directory: Callable[[], DirectoryFigures] | None,
        tiers: Callable[[], Mapping[str, TierFigures]] | None,
    ) -> None:
        self._directory, self._tiers = directory, tiers
        self._failed = 0

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked while it is registered; two caches in one registry are refused by their names."""
        return [*_of_directory(None), *_of_tiers({}), self._errors()]

    def collect(self) -> Iterable[Metric]:
        figures, tiers = None, {}
        try:
            figures = self._directory() if self._directory is not None else None
            tiers = dict(self._tiers()) if self._tiers is not None else {}
        except KVTransferError:  # counted, and served: a mover's process that died, a cache that is closed
            self._failed += 1
        return [*_of_directory(figures), *_of_tiers(tiers), self._errors()]

    def _errors(self) -> Metric:
        return CounterMetricFamily("kvtransfer_scrape_errors", "Scrapes that lack figures", value=self._failed)


def _of_directory(figures: DirectoryFigures | None) -> list[Metric]:
    matches = CounterMetricFamily("kvtransfer_matches", "Prefixes asked for")
    asked = CounterMetricFamily("kvtransfer_asked_tokens", "Tokens of prefixes asked for")
    hits = CounterMetricFamily(
        "kvtransfer_hit_tokens", "Tokens that were there, by the tier they came from", labels=["tier"]
    )
    used = GaugeMetricFamily(
        "kvtransfer_tier_used_pages", "There, on their way, or not confirmed gone", labels=["tier"]
    )
    there = GaugeMetricFamily("kvtransfer_tier_present_pages", "That can be hit", labels=["tier"])
    capacity = GaugeMetricFamily("kvtransfer_tier_capacity_pages", "Of tiers with a limit", labels=["tier"])
    pages = CounterMetricFamily("kvtransfer_tier_pages", "Pages by what became of them", labels=["tier", "event"])
    index = GaugeMetricFamily("kvtransfer_index_pages", "In the prefix index")
    locks = GaugeMetricFamily("kvtransfer_index_locks", "Holders of prefixes")
    commands = GaugeMetricFamily("kvtransfer_commands_under_way", "Asked of the mover and not answered")
    if figures is not None:
        matches.add_metric([], figures.matches)
        asked.add_metric([], figures.asked_tokens)
        index.add_metric([], figures.pages_in_index)
        locks.add_metric([], figures.locks)
        commands.add_metric([], figures.commands_under_way)
        for tier, tokens in figures.hit_tokens_by_tier.items():
            hits.add_metric([tier], tokens)
        for tier, one in figures.tiers.items():
            used.add_metric([tier], one.used_pages)
            there.add_metric([tier], one.present_pages)
            if one.capacity_pages is not None:
                capacity.add_metric([tier], one.capacity_pages)
            for event, count in one.counters.items():
                pages.add_metric([tier, event], count)
    return [matches, asked, hits, used, there, capacity, pages, index, locks, commands]


def _of_tiers(tiers: Mapping[str, TierFigures]) -> list[Metric]:
    moved = CounterMetricFamily(
        "kvtransfer_store_bytes", "Bytes between host memory and a lower tier", labels=["tier", "direction"]
    )
    outcomes = CounterMetricFamily(
        "kvtransfer_store_pages", "Pages asked of a lower tier, by outcome", labels=["tier", "outcome"]
    )
    used = GaugeMetricFamily("kvtransfer_store_used_bytes", "As the tier says", labels=["tier"])
    capacity = GaugeMetricFamily(
        "kvtransfer_store_capacity_bytes", "As the tier says; 0: no limit of its own", labels=["tier"]
    )
    flying = GaugeMetricFamily("kvtransfer_store_batches_in_flight", "Batches with a lower tier", labels=["tier"])
    for tier, stats in tiers.items():
        used.add_metric([tier], stats.used_bytes)
        capacity.add_metric([tier], stats.capacity_bytes)
        flying.add_metric([tier], stats.in_flight)
        for counter, count in stats.counters.items():
            if counter in _BYTES:
                moved.add_metric([tier, _BYTES[counter]], count)
            else:
                outcomes.add_metric([tier, counter], count)
    return [moved, outcomes, used, capacity, flying]
