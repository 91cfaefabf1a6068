"""Measuring a link: a meter of known costs, whose profile gives them back; budgets; the CPU's own; a real GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvtransfer.groups import LAUNCHED, Beside, GroupTimes, best_groups, layer_groups, layers_done, patterns
from kvtransfer.link import DIRECTIONS, LinkProfile, ProfileKey, decode_profile, encode_profile
from kvtransfer.meter import CpuMeter, CudaMeter, random_order
from kvtransfer.tune import CTAS, GEMM_SHARE, MAPPED_CTAS, Runner, measure

PEAK = {"h2d": 50.0, "d2h": 40.0, "both": 30.0, "pageable": 5.0}
START_S = {"staged": 12e-6, "strided": 4e-6, "mapped": 20e-6}
PIECE_S = {"staged": 0.4e-6, "strided": 0.01e-6, "mapped": 0.002e-6}


class ModelMeter:
    """Costs by a formula; each run moves a clock of its own on. ``noise`` is the spread of single runs."""

    key = ProfileKey("a card", "a driver", 4, 8)
    paths: tuple[str, ...] = ("staged", "strided", "mapped")
    both = True
    largest_bytes = 256 << 20

    def __init__(self, noise: float = 0.0) -> None:
        self.now, self.noise, self.runs = 100.0, noise, 0
        self._random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def run(self, seconds: float) -> Runner:
        cold = itertools.chain([4.0], itertools.repeat(1.0))

        def runner() -> float:
            self.runs += 1
            took = seconds * next(cold) * (1 + self._random.uniform(-self.noise, self.noise))
            self.now += took
            return took

        return runner

    def seconds(self, path: str, way: str, piece: int, count: int, ctas: int) -> float:
        rate = PEAK[way] * (min(1.0, ctas / MAPPED_CTAS) if path == "mapped" else 1.0)
        return START_S[path] + count * (PIECE_S[path] + piece / rate / 1e9)

    def peak(self, kind: str) -> tuple[int, Runner]:
        return 1 << 28, self.run((1 << 28) / PEAK[kind] / 1e9)

    def transfer(self, path: str, direction: str, piece_bytes: int, count: int, ctas: int) -> Runner:
        assert direction in DIRECTIONS and piece_bytes * count <= self.largest_bytes
        return self.run(self.seconds(path, direction, piece_bytes, count, ctas))

    def relayout(self, piece_bytes: int) -> tuple[int, Runner]:
        return 1 << 28, self.run((1 << 28) / 1000e9)

    def cpu_us(self, what: str) -> float:
        return {"descriptor": 0.5, "call": 7.0, "launch": 25.0}[what]

    def gemm_kept(self, path: str, direction: str, ctas: int, seconds: float) -> float:
        self.now += seconds
        return 1.0 - (0.01 * ctas if path == "mapped" else 0.002)


@pytest.fixture(scope="module")
def profile() -> LinkProfile:
    meter = ModelMeter(noise=0.02)
    return measure(meter, budget_s=60, now=meter.clock)


@pytest.mark.parametrize("path", ["staged", "strided", "mapped"])
@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_the_profile_gives_the_costs_back(profile: LinkProfile, path: str, way: str) -> None:
    """On the grid within the noise, off it a little worse: what lies between bends in both directions."""
    grid, model = profile.grids[f"{path}/{way}"], ModelMeter()
    assert (grid.piece_bytes[0], grid.piece_bytes[-1]) == (512, 4 << 20)
    assert grid.counts[-1] == 65_536 and len(grid.gbps[0]) == len(grid.counts)
    for piece, row in zip(grid.piece_bytes, grid.gbps, strict=True):
        for count, _ in zip(grid.counts, row, strict=False):
            assert grid.seconds(piece, count) == pytest.approx(model.seconds(path, way, piece, count, 4), rel=0.03)
    rng = random.Random(1)
    loose = 0.2 if path == "mapped" else 0.13  # its grid is coarser: every size is a kernel to compile
    for _ in range(300):
        piece = round(512 * 8192 ** rng.random())
        count = round(16 * (min(65_536, (256 << 20) // piece) / 16) ** rng.random())
        assert grid.seconds(piece, count) == pytest.approx(model.seconds(path, way, piece, count, 4), rel=loose)


def test_everything_else_in_the_profile(profile: LinkProfile) -> None:
    assert profile.key == ModelMeter.key and profile.source == "measured" and not profile.note
    assert profile.peak_gbps == pytest.approx(PEAK, rel=0.02)
    assert (profile.cpu.descriptor_us, profile.cpu.call_us, profile.cpu.launch_us) == (0.5, 7.0, 25.0)
    assert profile.relayout.value(1024) == pytest.approx(1000, rel=0.02)
    assert profile.grids["staged/both"].rate(1 << 20, 128) == pytest.approx(30, rel=0.05)
    for way in ("h2d", "d2h"):
        for n in CTAS:
            assert profile.kept("mapped", way, n) == pytest.approx(1 - 0.01 * n)
        assert profile.mapped_factor(way, 1) == pytest.approx(0.25, rel=0.03)
        assert profile.kept("staged", way, 1) == pytest.approx(0.998)
    assert decode_profile(encode_profile(profile), "here") == profile


def test_the_first_run_never_counts() -> None:
    """It is four times slower here: compiling, touching."""
    meter = ModelMeter()
    found = measure(meter, budget_s=1e-6, now=meter.clock)
    assert found.peak_gbps == pytest.approx(PEAK)


def test_a_budget_is_spent_and_kept() -> None:
    for budget_s in (30.0, 60.0):
        meter = ModelMeter()
        seen: list[tuple[int, int, str]] = []
        began = meter.now
        measure(meter, budget_s=budget_s, now=meter.clock, progress=lambda *told: seen.append(told))  # noqa: B023
        assert (1 - GEMM_SHARE) * 0.2 * budget_s < meter.now - began < 1.1 * budget_s
        assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
        assert {cells for _, cells, _ in seen} == {len(seen)}, "the bar ends where it should"
    few, many = ModelMeter(), ModelMeter()
    measure(few, budget_s=0.01, now=few.clock)
    measure(many, budget_s=60, now=many.clock)
    assert few.runs < many.runs / 2


def test_a_meter_of_less_makes_a_smaller_profile() -> None:
    class Small(ModelMeter):
        paths: tuple[str, ...] = ("staged",)
        both = False
        largest_bytes = 1 << 20

    meter = Small()
    found = measure(meter, budget_s=1, now=meter.clock)
    assert sorted(found.grids) == ["staged/d2h", "staged/h2d"] and not found.mapped_scale
    assert sorted(found.peak_gbps) == ["d2h", "h2d"]
    assert found.grids["staged/h2d"].piece_bytes[-1] == 64 << 10


def test_places_are_random_and_distinct() -> None:
    order = random_order(1000, 1000)
    assert sorted(order.tolist()) == list(range(1000)) and (order[1:] - order[:-1] != 1).mean() > 0.9
    assert random_order(3, 7).size == 7


def test_the_cpu_backend_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.meter.CPU_REGION_BYTES", 4 << 20)
    monkeypatch.setattr(CpuMeter, "largest_bytes", 2 << 20)
    meter = CpuMeter()
    assert all(end.count_nonzero() > 0.9 * end.numel() for end in meter._ends), "zeros are not timed"
    found = measure(meter, budget_s=0.5)
    assert sorted(found.grids) == ["cpu/d2h", "cpu/h2d", "staged/d2h", "staged/h2d"]
    assert found.key.device.startswith("CPU ") and found.peak_gbps["h2d"] > 0.1
    assert torch.equal(*meter._ends) is False


# -- layer groups ------------------------------------------------------------------------------------


def test_patterns_cover_all_layers() -> None:
    for layers in (1, 2, 7, 32, 61):
        found = patterns(layers)
        assert len(set(found)) == len(found)
        for groups in found:
            assert groups[0][0] == 0 and groups[-1][1] == layers
            assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise([*groups, (layers, layers + 1)]))


def test_layers_done_by_hand() -> None:
    """Groups of 1 and 2 layers of 10 bytes: 10 ms and 20 ms on the link, 1 ms until usable, layers of 5 ms."""
    ends, groups = [0, 10, 20, 30], ((0, 1), (1, 3))
    seconds = {10: GroupTimes(2.0, 10.0, 10.0, 1.0), 20: GroupTimes(3.0, 20.0, 10.0, 1.0)}
    arrived, done = layers_done(groups, ends, lambda nbytes, first: seconds[nbytes], Beside(5.0))
    assert arrived == 2.0 + 31.0 and done == 2.0 + 31.0 + 10.0
    seconds = {10: GroupTimes(20.0, 10.0, 10.0, 1.0), 20: GroupTimes(40.0, 20.0, 10.0, 1.0)}  # the CPU is slower
    arrived, done = layers_done(groups, ends, lambda nbytes, first: seconds[nbytes], Beside(5.0))
    assert arrived == 20.0 + 40.0 + 10.0 + 1.0 and done == 71.0 + 10.0
    seconds = {10: GroupTimes(2.0, 10.0, 10.0, 1.0), 20: GroupTimes(3.0, 20.0, 10.0, 1.0, 4.0)}
    # What holds the thread that launches counts where launches take the time; then they go on while layers are awaited,
    # and behind the last arrival there is `LAUNCHED` of two layers, or what is left to launch: 2 + 20 + 40 + 4.
    for beside, through in (
        (Beside(5.0), 43.0), (Beside(5.0, launches=True), 33.0 + 10.0 * LAUNCHED), (Beside(20.0, launches=True), 66.0),
    ):  # fmt: skip
        assert layers_done(groups, ends, lambda nbytes, first: seconds[nbytes], beside) == (33.0, through)


def on_the_link(copy: float, submit: float = 0.0) -> GroupTimes:
    return GroupTimes(submit, copy, copy, 0.0)


def test_groups_follow_the_compute() -> None:
    ends = [100 * i for i in range(33)]

    def cost(nbytes: int, first: bool) -> GroupTimes:  # 1 s a layer, a tenth of that a group
        return on_the_link(0.1 + nbytes / 100)

    fast = best_groups(ends, cost, [Beside(0.01)], 1 << 30)
    slow = best_groups(ends, cost, [Beside(10.0)], 1 << 30)
    even = best_groups(ends, cost, [Beside(1.0)], 1 << 30)
    assert fast[0] == (0, 32) or len(fast) <= 2, "nothing to hide: one group"
    assert slow[0][1] <= 4, "the forward begins early"
    assert even[0][1] <= 2 and even[-1][1] - even[-1][0] <= 2, "small first, small last"
    unknown = best_groups(ends, cost, [Beside(0.25), Beside(0.5), Beside(1.0), Beside(2.0)], 1 << 30)
    for layer_s in (0.25, 0.5, 1.0, 2.0):
        best = min(layers_done(p, ends, cost, Beside(layer_s))[1] for p in patterns(32))
        assert layers_done(unknown, ends, cost, Beside(layer_s))[1] < 1.1 * best


def test_groups_are_larger_where_their_descriptors_hold_the_launches() -> None:
    """Ten layers' time a group: a forward that waits for its launches is through later by each of them."""
    ends = [100 * i for i in range(33)]

    def cost(nbytes: int, first: bool) -> GroupTimes:
        return GroupTimes(0.1, nbytes / 100, nbytes / 100, 0.0, 0.0 if first else 10.0)

    ahead = best_groups(ends, cost, [Beside(1.0)], 1 << 30)
    behind = best_groups(ends, cost, [Beside(1.0, launches=True)], 1 << 30)
    both = best_groups(ends, cost, [Beside(1.0), Beside(1.0, launches=True)], 1 << 30)
    assert len(behind) < len(both) < len(ahead)


def test_a_first_group_that_costs_less_is_small() -> None:
    """Submitting what the forward waits for costs half: then the forward may begin early at no loss."""
    ends = [100 * i for i in range(33)]
    groups = best_groups(
        ends, lambda nbytes, first: on_the_link(nbytes / 100, 1.0 if first else 2.0), [Beside(3.0)], 1 << 30
    )  # fmt: skip
    assert groups[0] == (0, 1) and groups[1][1] - groups[1][0] > 1


def test_small_last_groups_are_submitted_ahead_of_the_link() -> None:
    """Submitting a group takes as long as four layers on the link: larger ones leave time for a small one behind them,
    and little is left to compute when all is there."""
    ends = [100 * i for i in range(33)]
    sizes = [
        b - a
        for a, b in best_groups(ends, lambda nbytes, first: on_the_link(nbytes / 100, 4.0), [Beside(0.3)], 1 << 30)
    ]
    assert sizes[-1] < 4 < max(sizes[:-1])


def test_groups_fit_a_ring_slot() -> None:
    ends = [100 * i for i in range(33)]
    groups = best_groups(ends, lambda nbytes, first: on_the_link(1.0), [Beside(1.0)], 450)
    assert max(stop - start for start, stop in groups) <= 4
    assert best_groups(ends, lambda nbytes, first: on_the_link(1.0), [Beside(1.0)], 50) == tuple(layer_groups(32, 1))


# -- a real GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    found = measure(CudaMeter(0), budget_s=20)
    print(found.peak_gbps, found.cpu, found.gemm_kept, found.mapped_scale, found.relayout)
    assert found.peak_gbps["h2d"] > 10 and found.peak_gbps["d2h"] > 10
    for key, grid in found.grids.items():
        print(key)
        for piece, row in zip(grid.piece_bytes, grid.gbps, strict=True):
            print(f"{piece:>9}", *(f"{rate:6.2f}" for rate in row))
        path, way = key.split("/")
        peak = found.peak_gbps[way]
        assert all(0 < rate < 1.15 * peak for row in grid.gbps for rate in row), f"{key}: quicker than one large copy"
        column = [row[min(2, len(row) - 1)] for row in grid.gbps]
        assert all(b > 0.7 * a for a, b in itertools.pairwise(column)), f"{key}: larger pieces are not slower: {column}"
        if path != "mapped" and way != "both":
            assert grid.gbps[-1][-1] > 0.85 * peak, f"{key}: large pieces reach the link"
    assert found.grids["mapped/h2d"].rate(32 << 10, 4096) > 0.6 * found.peak_gbps["h2d"]
    assert 0.05 < found.cpu.descriptor_us < 10 and found.relayout.value(32 << 10) > 100
    assert found.kept("staged", "h2d", 4) > 0.85 and found.kept("mapped", "h2d", 4) > 0.6
