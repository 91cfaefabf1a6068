"""The prefix index and the directory, against what their work costs bare.

    python bench/bench_index.py [--quick] [--page-sizes 1 16 64]
    python bench/bench_index.py --trace conversation_trace.jsonl.gz [--check]    # replays it through a directory too

Sequences of 32,768 int32 tokens, 100 of them. Every figure is a ratio within one run, measured in
turn, of the thread's CPU time (what else the machine does would double either):

- *match, 2 nodes*: 4,096 shared tokens and a rest of its own, over one numpy comparison of the whole array
- *match, 16 nodes*: over a bare loop of numpy comparisons over the same edges
- *insert*: of a sequence of which 4,096 tokens are known, over ten such comparisons and one copy of the tokens
- *page keys*: of a path that has none yet, over a bare hashlib loop
- *memory*: bytes a token of the tree, with slots of a host tier and flags of a disk, without keys

A replay moves no bytes: every command is answered at once. Its clock is the trace's. ``--check`` compares the hits with
a brute-force model (exact LRU; everything kept), request by request.
"""

from __future__ import annotations

import hashlib
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from harness import alternate
from lru_model import ExactLru
from numpy.typing import NDArray
from paired import Spread, paired_ratio
from report import checked, exit_status, print_table, progress, write_content
from report import parser as options
from traces import Request, read

from kvtransfer.books import TierPlan
from kvtransfer.commands import OK, Ack, Cancel, positions
from kvtransfer.directory import Directory
from kvtransfer.index import PrefixIndex
from kvtransfer.policy import EVICTION
from kvtransfer.radix import Match
from kvtransfer.tree import Ids

TOKENS = 32_768
SHARED = 4_096
SEQUENCES = 100
NODES = 16
TIERS = {"host": "slots", "disk": "keys"}
MEMORY_BAR = {1: 24.0, 16: 12.0, 64: 12.0}
REPLAY_BAR_S = {512: 60.0, 16: 300.0}

Sequence32 = NDArray[np.int32]


@dataclass(frozen=True)
class Row:
    """One case: ``value`` with its 95 % interval, at most ``bar``; microseconds of the case and of what it is divided
    by, a sequence. Of memory: bytes a token."""

    case: str
    page_size: int
    value: float
    low: float
    high: float
    bar: float | None
    us: float = 0.0
    bare_us: float = 0.0

    @property
    def met(self) -> bool:
        return self.bar is None or self.value <= self.bar


@dataclass(frozen=True)
class Replay:
    """A trace through a directory. ``seconds`` of the thread's CPU are the directory's, without drawing tokens, and
    ``wall_s`` is how long it took; ``exact``: hits equal those of the model, request by request (None: not compared).
    """

    page_size: int
    policy: str
    host_pages: int
    disk_pages: int
    requests: int
    seconds: float
    wall_s: float
    drawing_s: float
    asked_tokens: int
    hit_tokens: dict[str, int]
    evicted_pages: int
    bar_s: float | None
    exact: bool | None

    @property
    def met(self) -> bool:
        return self.bar_s is None or self.seconds < self.bar_s


def sequences(count: int, seed: int) -> list[Sequence32]:
    """Of 32,768 tokens, the first 4,096 the same."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 1 << 17, SHARED)
    return [np.concatenate((shared, rng.integers(0, 1 << 17, TOKENS - SHARED))).astype(np.int32) for _ in range(count)]


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return run


def row_of(case: str, size: int, bar: float, bare: Callable[[], float], ours: Callable[[], float], args: Args) -> Row:
    """Both in turn; seconds of all sequences."""
    pairs = alternate(bare, ours, args.repeats, args.longest_s)
    share = paired_ratio([b for _, b in pairs], [a for a, _ in pairs])
    bare_s, ours_s = (Spread.of([pair[n] for pair in pairs]).median / args.count * 1e6 for n in (0, 1))
    return Row(case, size, share.median, share.low, share.high, bar, ours_s, bare_s)


@dataclass(frozen=True)
class Args:
    """How much is measured."""

    count: int
    repeats: int
    longest_s: float


def compare_whole(each: Sequence[Sequence32], copies: Sequence[Sequence32]) -> None:
    for one, other in zip(each, copies, strict=True):
        assert (one == other).all()


def two_nodes(size: int, each: list[Sequence32], args: Args) -> Row:
    index, copies = PrefixIndex(size), [one.copy() for one in each]
    for one in each:
        index.insert(one)
    assert all(len(index.path(index.match(one).node)) == 2 for one in each)

    def ours() -> None:
        for one in each:
            assert index.match(one).pages == TOKENS // size

    return row_of("match, 2 nodes", size, 4.0, timed(lambda: compare_whole(each, copies)), timed(ours), args)


def sixteen_nodes(size: int, each: list[Sequence32], args: Args) -> Row:
    index, step = PrefixIndex(size), TOKENS // NODES
    own = [np.concatenate((np.array([n] * size, dtype=np.int32), one))[:TOKENS] for n, one in enumerate(each)]
    edges = []
    for one in own:
        for stop in range(step, TOKENS + 1, step):
            index.insert(one[:stop])
        edges.append([one[at : at + step].copy() for at in range(0, TOKENS, step)])
        assert len(index.path(index.match(one).node)) == NODES

    def bare() -> None:
        for one, parts in zip(own, edges, strict=True):
            at = 0
            for part in parts:
                assert (one[at : at + part.size] == part).all()
                at += part.size

    def ours() -> None:
        for one in own:
            assert index.match(one).pages == TOKENS // size

    return row_of("match, 16 nodes", size, 2.0, timed(bare), timed(ours), args)


def inserts(size: int, each: list[Sequence32], args: Args) -> Row:
    copies = [one.copy() for one in each]
    first, *others = each

    def bare() -> None:
        for _ in range(10):
            compare_whole(each, copies)
        kept = [one.tobytes() for one in each]
        assert len(kept) == len(each)

    def ours() -> float:
        index = PrefixIndex(size)
        index.insert(first)
        started = time.thread_time()
        for one in others:
            index.insert(one)
        return (time.thread_time() - started) * len(each) / len(others)

    return row_of("insert, of 10 comparisons + copy", size, 1.0, timed(bare), ours, args)


def keys(size: int, each: list[Sequence32], args: Args) -> Row:
    few = each[: max(1, 10 * len(each) // 100)]

    def bare() -> None:
        for one in few:
            data, key, out = memoryview(one.tobytes()), b"", []
            for at in range(0, len(data), 4 * size):
                hasher = hashlib.sha256(key)
                hasher.update(data[at : at + 4 * size])
                key = hasher.digest()
                out.append(key)

    def ours() -> float:
        index = PrefixIndex(size)
        found = [index.insert(np.concatenate((one[:1] + n, one[1:]))) for n, one in enumerate(few)]
        started = time.thread_time()
        for one in found:
            assert len(index.keys(one)) == TOKENS // size
        return time.thread_time() - started

    return row_of("page keys", size, 1.3, timed(bare), ours, Args(len(few), args.repeats, args.longest_s))


def memory(size: int, each: list[Sequence32]) -> Row:
    tracemalloc.start()
    try:
        index = PrefixIndex(size, TIERS)  # type: ignore[arg-type]
        for one in each:
            found = index.insert(one)
            pages = np.arange(found.pages)
            index.write(found.node, "host", pages, pages)
            index.write(found.node, "disk", pages, np.zeros(found.pages, dtype=np.int64))
        del found, pages
        used = tracemalloc.get_traced_memory()[0] / (index.pages * size)
    finally:
        tracemalloc.stop()
    return Row("memory, bytes a token", size, used, used, used, MEMORY_BAR.get(size))


def replay(
    requests: Sequence[Request],
    page_size: int,
    host_pages: int,
    disk_pages: int = 0,
    policy: str = "lru",
    *,
    model: ExactLru | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Each request is matched, loaded, and stored whole; every command is answered at once with OK."""
    now = [0.0]
    tiers = [TierPlan("host", capacity_pages=host_pages, evict=policy)]
    if disk_pages:
        tiers.append(TierPlan("disk", "keys", disk_pages, evict=policy))
    extra = 0.02 if policy == "path_score" else 0.0
    directory = Directory(page_size, tiers, clock=lambda: now[0], evict_extra=extra)
    seconds = wall_s = drawing = 0.0
    exact: bool | None = None if model is None else True
    ids: Ids = np.arange(1 + max(request.input_tokens for request in requests) // page_size)
    for number, request in enumerate(requests):
        if number % 500 == 0:
            step(f"pages of {page_size}, {policy}, request {number:,}")
        now[0] = request.at_s
        started = time.thread_time()
        tokens = request.tokens()
        drawn, wall = time.thread_time(), time.perf_counter()
        hit = directory.match(tokens)
        directory.load(hit, ids[: hit.pages])
        hit.release()
        answer_all(directory)
        directory.store(tokens, ids[: tokens.size // page_size])
        answer_all(directory)
        drawing += drawn - started
        seconds += time.thread_time() - drawn
        wall_s += time.perf_counter() - wall
        if model is not None and model.serve(tokens) != hit.pages:
            exact = False
    figures = directory.figures()
    if figures.locks or figures.commands_under_way or sum(figures.hit_tokens_by_tier.values()) != figures.hit_tokens:
        raise RuntimeError(f"books that don't close: {figures}")
    return Replay(
        page_size=page_size,
        policy=policy,
        host_pages=host_pages,
        disk_pages=disk_pages,
        requests=len(requests),
        seconds=seconds,
        wall_s=wall_s,
        drawing_s=drawing,
        asked_tokens=figures.asked_tokens,
        hit_tokens=figures.hit_tokens_by_tier,
        evicted_pages=figures.tiers["host"].counters.get("evicted", 0),
        bar_s=REPLAY_BAR_S.get(page_size) if len(requests) > 10_000 else None,
        exact=exact,
    )


def answer_all(directory: Directory) -> None:
    while commands := directory.commands():
        for command in commands:
            if not isinstance(command, Cancel):
                directory.acknowledge(Ack(id=command.id, statuses=bytes([OK]) * positions(command)))


def print_ratios(rows: Sequence[Row]) -> None:
    cells = [
        [
            r.case,
            str(r.page_size),
            f"{r.value:.2f} ({r.low:.2f}-{r.high:.2f})",
            "" if r.bar is None else f"<= {r.bar:g} {'met' if r.met else 'MISSED'}",
            f"{r.us:.1f}" if r.us else "",
            f"{r.bare_us:.1f}" if r.bare_us else "",
        ]
        for r in rows
    ]
    columns = ["case", "page size", "ratio (95 %)", "bar", "us a sequence", "bare"]
    print_table(f"{TOKENS:,} int32 tokens a sequence; ratios within this run", columns, cells)


def print_replays(rows: Sequence[Replay]) -> None:
    cells = [
        [
            r.policy,
            str(r.page_size),
            f"{r.host_pages:,}",
            f"{r.disk_pages:,}",
            f"{r.seconds:.1f}" + ("" if r.bar_s is None else f" (< {r.bar_s:g} {'met' if r.met else 'MISSED'})"),
            f"{r.wall_s:.1f}",
            f"{r.drawing_s:.1f}",
            ", ".join(f"{tier} {tokens / r.asked_tokens:.2%}" for tier, tokens in sorted(r.hit_tokens.items())),
            f"{r.evicted_pages:,}",
            {True: "equal", False: "DIFFERENT", None: ""}[r.exact],
        ]
        for r in rows
    ]
    columns = [
        "policy",
        "page size",
        "host pages",
        "disk pages",
        "CPU s in the directory",
        "wall",
        "CPU s drawing tokens",
    ]
    columns += ["hit tokens of those asked", "evicted", "the model's hits"]
    title = f"{rows[0].requests:,} requests, {rows[0].asked_tokens:,} tokens; no bytes moved, commands answered at once"
    print_table(title, columns, cells)


@exit_status
def main(argv: Sequence[str] | None) -> int:
    out = options(__doc__)
    out.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    out.add_argument("--trace", type=Path, help="also replay this trace")
    out.add_argument("--trace-page-sizes", type=int, nargs="+", default=[512, 16])
    out.add_argument("--host-tokens", type=int, default=3_000_000, help="that the host tier holds in a replay")
    out.add_argument("--disk-tokens", type=int, default=30_000_000, help="and the disk (0: none)")
    out.add_argument("--policies", nargs="+", choices=EVICTION, default=["lru"])
    out.add_argument("--check", action="store_true", help="compare hits with the model (host tier only, LRU)")
    args, device = checked(out, argv)
    if min([*args.page_sizes, *args.trace_page_sizes, args.host_tokens]) < 1 or args.disk_tokens < 0:
        out.error("page sizes and --host-tokens: expected at least 1")
    if TOKENS // NODES % max(args.page_sizes) or any(TOKENS // NODES % size for size in args.page_sizes):
        out.error(f"--page-sizes: expected divisors of {TOKENS // NODES}, got {args.page_sizes}")
    requests: list[Request] = []
    if args.trace is not None:
        try:
            requests = list(read(args.trace))
        except (OSError, ValueError) as error:
            out.error(f"--trace: {error}")
    much = Args(10 if args.quick else SEQUENCES, args.repeats or (5 if args.quick else 21), 2.0 if args.quick else 20.0)
    each = sequences(much.count, args.seed)
    rows: list[Row] = []
    cases = [two_nodes, sixteen_nodes, inserts, keys]
    with progress((len(cases) + 1) * len(args.page_sizes)) as step:
        for size in args.page_sizes:
            for case in cases:
                step(f"{case.__name__.replace('_', ' ')}, pages of {size}")
                rows.append(case(size, each, much))
            step(f"memory, pages of {size}")
            rows.append(memory(size, each))
    rows.sort(key=lambda r: r.case)
    print_ratios(rows)
    replays: list[Replay] = []
    if requests:
        wanted: list[tuple[int, str, int, ExactLru | None]] = []
        for size in args.trace_page_sizes:
            wanted += [(size, policy, args.disk_tokens // size, None) for policy in args.policies]
            if args.check:
                room = max(1, args.host_tokens // size)
                everything = sum(r.input_tokens // size for r in requests)
                wanted += [(size, "lru", 0, ExactLru(size, room)), (size, "lru", -everything, ExactLru(size, None))]
        with progress(len(wanted) * (1 + len(requests) // 500)) as step:
            for size, policy, disk, model in wanted:
                room = -disk if disk < 0 else max(1, args.host_tokens // size)
                replays.append(replay(requests, size, room, max(0, disk), policy, model=model, step=step))
        print_replays(replays)
    if args.json is not None:
        write_content(args.json, device, rows=[asdict(r) for r in rows], replays=[asdict(r) for r in replays])
    return 1 if any(r.exact is False for r in replays) else 0


@pytest.mark.parametrize("size", [1, 16, 64])
def bench_match(benchmark: Callable[[Callable[[], object]], object], size: int) -> None:
    index, each = PrefixIndex(size), sequences(4, 0)
    for one in each:
        index.insert(one)
    assert benchmark(lambda: index.match(each[2])) == Match(index.match(each[2]).node, TOKENS // size)


if __name__ == "__main__":
    sys.exit(main(None))
