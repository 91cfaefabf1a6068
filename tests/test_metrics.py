"""Metrics: what is counted, what a scrape over http shows of a cache at work, and that documented names are served."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import LIMIT_S, until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.commands import Ack, Scope
from kvtransfer.config import load_config
from kvtransfer.directory import Directory
from kvtransfer.kernels.errors import ConfigError, UnavailableError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.metrics import Metrics, MetricsServer
from kvtransfer.pool import KVPool
from kvtransfer.tiers.base import PageStatus, TierStats
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.memory_tier import MemoryTier

ROOT = Path(__file__).resolve().parent.parent
SPEC = KVSpec.attention(num_layers=2, page_size=4, kv_heads=2, head_dim=8, itemsize=2)  # 512 bytes a page
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def scraped(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


class Link:
    """Peaks of a profile."""

    peak_gbps = {"h2d": 50.0, "d2h": 40.0}  # noqa: RUF012


def link() -> Any:
    return Link()


def test_a_cache_at_work_over_http() -> None:
    metrics = Metrics(link=link())
    far = FaultyTier(MemoryTier(1 << 30, name="far", observer=metrics))
    pool = KVPool.allocate("vllm.LBNHC", spec=SPEC, num_pages=64, device="cpu")
    config = load_config(arguments={"tiers": {"host": {"pages": 8, "pin": False}}}, environment={})
    cache = TieredCache.create(
        pool, config, tiers={"far": far}, scope=Scope(bytes(32), b"s"), observer=metrics, tick_s=None
    )
    with cache, metrics.serve() as server:
        metrics.watch_cache(cache)
        for n in range(3):  # 18 pages through a host tier of 8
            tokens = np.arange(24) + 100 * n
            pages = pool.allocate_pages(6)
            cache.store(tokens, pages).result(LIMIT_S).require()
            until(lambda: cache.directory.idle, "nothing under way")
            pool.free_pages(pages)
        with cache.match(tokens) as hit:
            pages = pool.allocate_pages(hit.pages)
            cache.load(hit, pages).result(LIMIT_S).require()
        cache.match(np.arange(1000, 1010)).release()
        until(lambda: cache.directory.idle, "nothing under way")
        samples = parsed(scraped(server))
        assert value(samples, "kvtransfer_matches_total") == 2
        assert value(samples, "kvtransfer_asked_tokens_total") == 34
        assert value(samples, "kvtransfer_hit_tokens_total", tier="host") == 24
        assert value(samples, "kvtransfer_tier_present_pages", tier="host") == 8
        assert value(samples, "kvtransfer_tier_capacity_pages", tier="host") == 8
        assert value(samples, "kvtransfer_tier_present_pages", tier="far") == 18
        assert value(samples, "kvtransfer_tier_pages_total", tier="host", event="evicted") == 10
        assert value(samples, "kvtransfer_tier_pages_total", tier="far", event="written") == 18
        store = {"direction": "store", "path": "cpu"}
        assert value(samples, "kvtransfer_transfer_bytes_total", **store) == 18 * 512
        assert value(samples, "kvtransfer_transfer_pages_total", **store) == 18
        assert value(samples, "kvtransfer_transfer_seconds_count", **store) == 3
        assert value(samples, "kvtransfer_transfers_total", direction="load", path="cpu", outcome="ok") == 1
        assert value(samples, "kvtransfer_store_bytes_total", tier="far", direction="write") == 18 * 8192
        assert value(samples, "kvtransfer_store_pages_total", tier="far", outcome="stored") == 18
        assert value(samples, "kvtransfer_store_used_bytes", tier="far") == 18 * 8192
        assert value(samples, "kvtransfer_index_locks") == value(samples, "kvtransfer_commands_under_way") == 0
        assert value(samples, "kvtransfer_scrape_errors_total") == 0
        assert value(samples, "kvtransfer_link_peak_bytes_per_second", direction="load") == 50e9
        port = server.port
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1)
    far.close()


def test_documented_names_and_no_others_are_served() -> None:
    table = re.findall(r"(?m)^\| `(kvtransfer_\w+)` \|([\w, ]*)\|", (ROOT / "docs/metrics.md").read_text())
    documented = {name: set(labels.replace(",", " ").split()) for name, labels in table}
    metrics = Metrics(link=link())
    metrics.planned(1, "load", "staged", 2, 16 << 20)
    metrics.waited(1, 0, 0.001)
    metrics.finished(1, True, 0.001, 16 << 20)
    metrics.fell_back("pin", "a reason")
    metrics.noted("tier.down", name="far")
    directory = Directory(2, [TierPlan("host", capacity_pages=4)])
    directory.store([1, 2], [0])
    for command in directory.commands():
        directory.acknowledge(Ack.of(command, PageStatus.OK))
    directory.match([1, 2]).release()
    stats = TierStats(0, 0, 0, 0, 0, {"hits": 1, "bytes_read": 4})
    metrics.watch(lambda: directory.figures(), lambda: {"far": stats})
    served: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name) if family.type == "histogram" else sample.name
            if not sample.name.endswith("_created"):
                served.setdefault(name, set()).update(set(sample.labels) - {"le"})
    assert served == documented


def test_a_tier_that_is_left_alone_shows_until_it_is_back() -> None:
    metrics = Metrics()
    for what, expected in (("tier.down", 1), ("tier.down", 1), ("tier.up", 0)):
        metrics.noted(what, name="far", cause="a reason")
        samples = parsed(generate_latest(metrics.registry).decode())
        assert value(samples, "kvtransfer_tier_suppressed", tier="far") == expected
    assert value(samples, "kvtransfer_events_total", event="tier.down") == 2


def test_the_share_is_of_large_transfers_and_fades() -> None:
    metrics = Metrics(link=link())

    def share() -> float:
        return value(parsed(generate_latest(metrics.registry).decode()), "kvtransfer_link_share", direction="load")

    def moved(number: int, nbytes: int, seconds: float, ok: bool = True) -> None:
        metrics.planned(number, "load", "staged", 1, nbytes)
        metrics.finished(number, ok, seconds, nbytes)

    moved(1, 1 << 20, 1e-6)  # too small to say anything
    with pytest.raises(KeyError):
        share()
    moved(2, 10**9, 0.04)
    assert share() == pytest.approx(0.5)
    moved(3, 10**9, 0.01, ok=False)  # failed: it may have moved nothing
    assert share() == pytest.approx(0.5)
    moved(4, 10**9, 0.02)
    assert share() == pytest.approx(2e9 / 0.06 / 50e9, rel=0.01)
    moved(5, 10**12, 25.0)
    assert share() == pytest.approx(40e9 / 50e9, rel=0.01)
    metrics.finished(99, True, 0.1, 5)  # begun before it was attached
    samples = parsed(generate_latest(metrics.registry).decode())
    assert value(samples, "kvtransfer_transfers_total", direction="unknown", path="unknown", outcome="ok") == 1
    assert value(samples, "kvtransfer_transfers_total", direction="load", path="staged", outcome="failed") == 1


def test_figures_that_cannot_be_had_are_left_out_and_counted() -> None:
    metrics = Metrics()
    directory = Directory(2, [TierPlan("host", capacity_pages=4)])
    gone = [False]

    def tiers() -> dict[str, TierStats]:
        if gone[0]:
            raise UnavailableError("the mover's process has ended")
        return {}

    metrics.watch(directory.figures, tiers)
    assert b"kvtransfer_scrape_errors_total 0.0" in generate_latest(metrics.registry)
    gone[0] = True
    for _ in range(2):
        text = generate_latest(metrics.registry).decode()
    assert value(parsed(text), "kvtransfer_scrape_errors_total") == 2


def test_one_registry_has_one_of_each() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    assert metrics.registry is registry and Metrics().registry is not registry
    with pytest.raises(ConfigError, match="a registry that has none of kvtransfer"):
        Metrics(registry)
    metrics.watch(None, None)
    with pytest.raises(ConfigError, match="watch one cache a registry"):
        metrics.watch(None, None)


def test_an_address_that_cannot_be_had() -> None:
    with Metrics().serve() as server:
        for port in (server.port, 70_000):
            with pytest.raises(ConfigError, match=rf"got 127\.0\.0\.1:{port}"):
                Metrics().serve(port)


def test_nobody_pays_who_does_not_ask() -> None:
    code = (
        "import sys, kvtransfer; from kvtransfer import TieredCache, TransferEngine, Directory; "
        "print([m for m in sys.modules if 'prometheus' in m or m == 'kvtransfer.metrics'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_faults_of_a_lower_tier_show() -> None:
    metrics = Metrics()
    far = FaultyTier(MemoryTier(1 << 20, name="far"), [Fault("error", verb="lookup", pages=[0])])
    metrics.watch(None, lambda: {"far": far.stats()})
    far.lookup([bytes(32)]).result(5)
    samples = parsed(generate_latest(metrics.registry).decode())
    assert value(samples, "kvtransfer_store_pages_total", tier="far", outcome="errors") == 1
    far.close()
