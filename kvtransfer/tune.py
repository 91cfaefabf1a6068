"""tune: measure a link within a budget of seconds, into a `LinkProfile`. What is timed is a `Meter`'s business.

Every figure is a median after a first run that isn't counted (it compiles kernels, touches memory and fills caches).
Cells share the budget: each is repeated as often as its share allows, and at least twice while there is time left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.link import FORMAT, CpuCost, CtaScale, Curve, Grid, LinkProfile, ProfileKey

KIB = 1024
PIECES = tuple(n * KIB for n in (2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096))
PIECE_BYTES = {
    "staged": (512, *PIECES),
    "strided": (512, *PIECES),
    # Each size is a kernel to compile. Between these the rate hardly changes (H200).
    "mapped": tuple(n * KIB // 2 for n in (1, 4, 16, 64, 512, 8192)),
    "cpu": (512, *(n * KIB for n in (4, 32, 256, 4096))),
}
# Steps of four: rates between them are then read within 6 %, where a fixed start gives way to a rate by piece.
_STEPS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
COUNTS = {"staged": _STEPS, "strided": (1, 4, *_STEPS), "mapped": _STEPS, "cpu": _STEPS}  # strided: rows of one call
BOTH_PIECE_BYTES = (2 * KIB, 64 * KIB, 1024 * KIB)
BOTH_COUNTS = (128, 8192)
RELAYOUT_PIECE_BYTES = (256, 2 * KIB, 32 * KIB)
CTAS = (1, 2, 4, 8, 16)
MAPPED_CTAS = 4  # of the mapped grids
SCALE_PIECE_BYTES, SCALE_COUNT = 32 * KIB, 4096
MOST_REPEATS, LEAST_REPEATS = 9, 2
GEMM_SHARE = 0.25  # of the budget

Runner = Callable[[], float]
Progress = Callable[[int, int, str], None]


class Meter(Protocol):
    """What `measure` times. A runner does one run on memory that was touched and holds random bytes, and returns the
    seconds that it took; what it needs is prepared before.
    """

    key: ProfileKey
    paths: tuple[str, ...]
    """Of "staged", "strided", "mapped" and "cpu", those it can run."""
    both: bool
    """Whether both directions can run at once."""
    largest_bytes: int
    """Of one run: larger cells are left out."""

    def peak(self, kind: str) -> tuple[int, Runner]:
        """(bytes of one direction, runner) of one large copy: "h2d", "d2h", "both" or "pageable"."""

    def transfer(self, path: str, direction: str, piece_bytes: int, count: int, ctas: int) -> Runner:
        """``count`` pieces between random places, of "both" so many in each direction; ``ctas`` of a mapped kernel.
        On the strided path seconds of one 2-D call of ``count`` rows."""

    def relayout(self, piece_bytes: int) -> tuple[int, Runner]:
        """(bytes of payload, runner) of a relayout within the device."""

    def cpu_us(self, what: str) -> float:
        """Microseconds of the submitting thread for a "descriptor", a "call" or a "launch"."""

    def gemm_kept(self, path: str, direction: str, ctas: int, seconds: float) -> float:
        """The share of a GEMM's rate that is left beside the path, measured for about so many seconds."""


class _Clock:
    """How often each of the cells that are left may be repeated."""

    def __init__(self, budget_s: float, cells: int, now: Callable[[], float], progress: Progress | None) -> None:
        self._now, self._end, self._progress = now, now() + budget_s, progress
        self.done, self.cells = 0, cells

    def median(self, runner: Runner, what: str) -> float:
        """Seconds of a run."""
        share = max(0.0, self._end - self._now()) / max(1, self.cells - self.done)
        runner()
        started = self._now()
        times = [runner()]
        each = max(self._now() - started, 1e-9)
        again = int(share / each) - 2
        least = LEAST_REPEATS - 1 if self._now() < self._end else 0
        times += [runner() for _ in range(max(least, min(MOST_REPEATS - 1, again)))]
        self.step(what)
        return max(statistics.median(times), 1e-9)

    def step(self, what: str) -> None:
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.cells, what)


def measure(
    meter: Meter, *, budget_s: float = 60.0, progress: Progress | None = None, now: Callable[[], float] = time.monotonic
) -> LinkProfile:
    """Measure everything that ``meter`` can run. ``budget_s`` is kept unless the fewest repeats take longer."""
    started = now()
    directions = [(path, way) for path in meter.paths for way in ("h2d", "d2h")]
    both = [path for path in meter.paths if meter.both and path != "strided"]
    shapes = {(path, way): _cells(path, meter.largest_bytes) for path, way in directions}
    shapes |= {(path, "both"): _both_cells(meter.largest_bytes) for path in both}
    peaks = ["h2d", "d2h", *(["both", "pageable"] if meter.both else [])]
    mapped = "mapped" in meter.paths
    ctas = CTAS if mapped else ()
    gemms = [(path, way, 1) for path, way in directions if path != "mapped"]
    gemms += [("mapped", way, n) for way in ("h2d", "d2h") for n in ctas]
    cells = (
        len(peaks) + len(RELAYOUT_PIECE_BYTES) + sum(len(row) for s in shapes.values() for row in s[2]) + 2 * len(ctas)
    )
    clock = _Clock(budget_s * (1 - GEMM_SHARE), cells + len(gemms) + 3, now, progress)

    peak_gbps = {}
    for kind in peaks:
        nbytes, runner = meter.peak(kind)
        peak_gbps[kind] = nbytes / clock.median(runner, f"large copy {kind}") / 1e9
    curve = []
    for piece in RELAYOUT_PIECE_BYTES:
        nbytes, runner = meter.relayout(piece)
        curve.append(nbytes / clock.median(runner, f"relayout of {piece:,} B") / 1e9)
    grids = {}
    for (path, way), (pieces, counts, rows) in shapes.items():
        found = []
        for piece, row in zip(pieces, rows, strict=True):
            rates = []
            for count in row:
                runner = meter.transfer(path, way, piece, count, MAPPED_CTAS)
                seconds = clock.median(runner, f"{path} {way}, {count:,} x {piece:,} B")
                rates.append(piece * count / seconds / 1e9)
            found.append(tuple(rates))
        grids[f"{path}/{way}"] = Grid(pieces, counts, tuple(found))
    scales = {}
    for way in ("h2d", "d2h") if mapped else ():
        rates = []
        for n in ctas:
            runner = meter.transfer("mapped", way, SCALE_PIECE_BYTES, SCALE_COUNT, n)
            seconds = clock.median(runner, f"mapped {way}, {n} CTAs")
            rates.append(SCALE_PIECE_BYTES * SCALE_COUNT / seconds / 1e9)
        scales[way] = Curve(ctas, tuple(rates))
    costs = []
    for what in ("descriptor", "call", "launch"):
        costs.append(max(meter.cpu_us(what), 1e-3))
        clock.step(f"CPU time of a {what}")
    kept = {}
    each = max(0.05, min(1.0, (started + budget_s - now()) / max(1, len(gemms))))
    for path, way, n in gemms:
        kept[path, way, n] = max(meter.gemm_kept(path, way, n, each), 1e-3)
        clock.step(f"GEMM beside {path} {way}")
    return LinkProfile(
        format=FORMAT,
        key=meter.key,
        source="measured",
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        peak_gbps=peak_gbps,
        grids=grids,
        mapped_ctas=MAPPED_CTAS,
        cpu=CpuCost(*costs),
        relayout=Curve(RELAYOUT_PIECE_BYTES, tuple(curve)),
        mapped_scale={
            w: CtaScale(c, Curve(ctas, tuple(kept["mapped", w, n] for n in ctas))) for w, c in scales.items()
        },
        gemm_kept={f"{path}/{way}": k for (path, way, _), k in kept.items() if path != "mapped"},
    )


Cells = tuple[tuple[int, ...], tuple[int, ...], list[Sequence[int]]]


def _cells(path: str, largest_bytes: int) -> Cells:
    """(piece sizes, counts, the counts of each row that are few enough bytes) of a path's grid."""
    pieces = tuple(p for p in PIECE_BYTES[path] if p * COUNTS[path][0] <= largest_bytes)
    rows: list[Sequence[int]] = [[n for n in COUNTS[path] if n * p <= largest_bytes] for p in pieces]
    return pieces, COUNTS[path], rows


def _both_cells(largest_bytes: int) -> Cells:
    pieces = tuple(p for p in BOTH_PIECE_BYTES if p * BOTH_COUNTS[0] <= largest_bytes)
    return pieces, BOTH_COUNTS, [[n for n in BOTH_COUNTS if n * p <= largest_bytes] for p in pieces]
