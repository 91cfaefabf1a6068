"""Load or recompute, against a simulation of every split: each page and each layer by itself."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import Grid
from kvtransfer.recompute import Prefill, Rate, TierRates, choose, link_rate
from kvtransfer.tiers.base import TierStats

FAST = Rate(50e9)


def simulate(
    runs: list[tuple[str, int]],
    load: int,
    page_size: int,
    page_bytes: int,
    link: Rate,
    rates: dict[str, Rate],
    prefill: Callable[[int], float],
    device: int,
    total: int,
    layers: int,
) -> float:
    """When all is computed if the first ``load`` pages are loaded: page by page, then layer by layer."""
    clocks: dict[str, float] = {}
    link_free = 0.0
    last_there = crossed = 0.0
    pages = [tier for tier, count in runs for _ in range(count)][:load]
    for tier in pages:
        there = 0.0
        if tier != "host":
            there = clocks.get(tier, rates[tier].latency_s) + page_bytes / rates[tier].bytes_per_s
            clocks[tier] = there
        last_there = max(last_there, there)
        link_free = max(link_free, there) + page_bytes / link.bytes_per_s
        crossed = link_free + link.latency_s
    work = prefill(total) - prefill(device + load * page_size)
    end = 0.0
    for layer in range(1, layers + 1):
        ready = last_there + (crossed - last_there) * layer / layers
        end = max(end, ready) + work / layers
    return end


names = st.sampled_from(["host", "disk", "far"])
rate = st.builds(Rate, st.floats(1e6, 1e11), st.sampled_from([0.0, 1e-4, 0.3]))


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(st.tuples(names, st.integers(0, 12)), max_size=5),
    page_size=st.integers(1, 64),
    page_bytes=st.sampled_from([4096, 1 << 20, 5 << 20]),
    link=rate,
    disk=rate,
    far=rate,
    tokens_per_s=st.floats(10, 1e6),
    quadratic_s=st.sampled_from([0.0, 1e-9, 1e-5]),
    device=st.integers(0, 100),
    more=st.integers(0, 500),
    layers=st.sampled_from([1, 2, 32]),
)
def test_same_as_trying_every_split(
    runs: list[tuple[str, int]], page_size: int, page_bytes: int, link: Rate, disk: Rate, far: Rate,
    tokens_per_s: float, quadratic_s: float, device: int, more: int, layers: int,
) -> None:  # fmt: skip
    rates = {"disk": disk, "far": far}
    pages = sum(count for _, count in runs)
    total = device + pages * page_size + more
    prefill = Prefill(tokens_per_s, quadratic_s)
    ends = [
        simulate(runs, s, page_size, page_bytes, link, rates, prefill, device, total, layers) for s in range(pages + 1)
    ]
    got = choose(
        runs, page_size=page_size, page_bytes=page_bytes, link=link, rates=rates, prefill=prefill,
        device_tokens=device, total_tokens=total, layers=layers,
    )  # fmt: skip
    least = min(ends)
    assert math.isclose(got.seconds, least, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(ends[got.load_pages], least, rel_tol=1e-9, abs_tol=1e-12)
    assert all(end > least * (1 - 1e-9) - 1e-12 for end in ends[got.load_pages + 1 :])
    assert got.first_token == device + got.load_pages * page_size
    assert math.isclose(got.load_all_s, ends[-1], rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(got.compute_all_s, ends[0], rel_tol=1e-9, abs_tol=1e-12)


def one(runs: list[tuple[str, int]], **more: Any) -> int:
    given: dict[str, Any] = {"page_size": 100, "page_bytes": 10_000_000, "link": FAST, "rates": {"disk": Rate(1e9)}}
    return choose(runs, **{**given, "prefill": 20_000.0, **more}).load_pages


def test_what_it_says_in_plain_cases() -> None:
    assert one([("host", 40)]) == 40  # 0.2 ms a page, or 5 ms
    assert one([("host", 40)], prefill=1e6) == 0  # 0.1 ms a page
    assert one([("disk", 40)]) == 0  # 10 ms a page, or 5 ms
    assert one([("host", 30), ("disk", 40)]) == 31  # the disk reads one while those of the host cross the link
    assert one([("disk", 40)], prefill=5_000.0) == 40
    # Attention makes the end of a long prefix dear: then it pays to load, and only if all before is loaded too.
    assert one([("disk", 40)], prefill=Prefill(20_000.0, 1e-6)) == 40
    # Layer-wise, most of the link's time hides behind computing.
    assert one([("host", 40)], prefill=450_000.0, total_tokens=4_000) == 40
    assert one([("host", 40)], prefill=600_000.0, total_tokens=40_000) == 0
    assert one([("host", 40)], prefill=600_000.0, total_tokens=40_000, layers=32) == 40
    assert one([], total_tokens=5) == 0 and one([("host", 0)]) == 0


def test_equal_ends_load_more() -> None:
    got = choose([("host", 3)], page_size=10, page_bytes=1000, link=Rate(1e6), rates={}, prefill=10_000.0)
    assert got.load_pages == 3 and math.isclose(got.compute_all_s, got.load_all_s)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"page_size": 0}, "sizes and layers of at least 1"),
        ({"layers": 0}, "layers=0"),
        ({"device_tokens": -1}, "device_tokens=-1"),
        ({"total_tokens": 399}, "at least the 400 of the hit, got 399"),
        ({"rates": {}}, "expected one for every tier but host, got none for 'disk'"),
        ({"prefill": lambda n: -float(n)}, "expected finite seconds that rise"),
        ({"prefill": lambda n: float("nan")}, "expected finite seconds that rise"),
        ({"prefill": 0.0}, "a rate above 0"),
    ],
)
def test_numbers_that_cannot_be(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        one([("disk", 4)], **more)


def test_rates_that_cannot_be() -> None:
    for bad in ((0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (float("nan"), 0.0), (1.0, -1.0)):
        with pytest.raises(ConfigError, match="rate: expected"):
            Rate(*bad)
    with pytest.raises(ConfigError, match="half_life_s"):
        TierRates(0)
    with pytest.raises(ConfigError, match="quadratic"):
        Prefill(1.0, -1.0)


def test_link_rates_come_from_the_profile() -> None:
    class Profile:
        grids = {"staged/h2d": Grid((1 << 20,), (1, 64), ((10.0, 40.0),))}  # noqa: RUF012
        peak_gbps = {"h2d": 55.0, "d2h": 50.0}  # noqa: RUF012

    profile: Any = Profile()
    assert math.isclose(link_rate(profile, 1 << 20).bytes_per_s, 40e9)
    assert math.isclose(link_rate(profile, 1 << 20, pages=1).bytes_per_s, 10e9)
    assert link_rate(profile, 1 << 20, direction="d2h").bytes_per_s == 50e9


def stats(read: int, in_flight: int = 1) -> TierStats:
    return TierStats(0, 0, 0, 0, in_flight, {"bytes_read": read})


def test_tier_rates_count_working_time_only() -> None:
    rates = TierRates(half_life_s=10.0)
    assert rates.known() == {}
    rates.sample("disk", stats(0, 0), 0.0)
    rates.sample("disk", stats(0), 100.0)  # idle until then
    rates.sample("disk", stats(2_000), 102.0)
    assert rates.known() == {"disk": Rate(1_000.0)}
    rates.sample("disk", stats(2_500, 0), 500.0)  # it may have idled: not counted
    rates.sample("disk", stats(2_500), 600.0)
    assert rates.known()["disk"].bytes_per_s == 1_000.0
    rates.sample("disk", stats(102_500), 610.0)  # faster now: older work fades
    assert math.isclose(rates.known()["disk"].bytes_per_s, (2_000 / 2 + 100_000) / (1 + 10))
    rates.sample("far", TierStats(0, 0, 0, 0, 1), 1.0)
    rates.sample("far", TierStats(0, 0, 0, 0, 1), 2.0)
    assert set(rates.known()) == {"disk"}


def test_tier_rates_are_asked_for_while_they_are_sampled() -> None:
    """Tiers come while requests ask, on other threads."""
    rates, over = TierRates(), threading.Event()
    met: list[BaseException] = []

    def ask() -> None:
        try:
            seen = 0
            while not over.is_set():
                known = rates.known()
                assert len(known) >= seen and all(rate == Rate(1_000.0) for rate in known.values())
                seen = len(known)
        except BaseException as error:
            met.append(error)

    def sample(thread: int) -> None:
        for number in range(300):
            for second in range(3):
                rates.sample(f"{thread}/{number}", stats(1_000 * second), float(second))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        askers = [threading.Thread(target=ask) for _ in range(2)]
        samplers = [threading.Thread(target=sample, args=(n,)) for n in range(3)]
        for thread in [*askers, *samplers]:
            thread.start()
        for thread in samplers:
            thread.join(60)
        over.set()
        for thread in askers:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not met and len(rates.known()) == 900
