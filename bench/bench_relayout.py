"""The relayout between two layouts on one device, digests included, against a device-to-device copy measured in turn.

    python bench/bench_relayout.py [--pieces 256 2048 ...] [--pairs "ring>layer_first" ...] [--mib 1024]

Bytes are counted as read and written, of the relayout and of the copy. Pages are of 16 tokens, and their ids in random
order on the pool's side. A piece is what is contiguous on both sides; it is asked that pieces of 2 KiB and more reach
80 % of the copy. Without a GPU the CPU backend's plain-torch relayout is timed against a memcpy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import Bar, LargeCopy, Row, measure
from report import checked, exit_status, finish, parser, progress
from rigs import device_of
from works import Wait

from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.digest import box_digests
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.launch import RELAYOUT_TILE_BYTES, RELAYOUT_WARPS
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout, relayout_reference
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.kernels.table import build_table
from kvtransfer.lanes import RelayoutTask, run_on_cpu

TOTAL_BYTES, CPU_BYTES, TEST_BYTES = 1 << 30, 8 << 20, 1 << 20
PIECES = (256, 512, 1024, 2048, 4096, 16384, 65536)  # a kernel is compiled for each
BAR, BAR_PIECE = Bar(share=0.80), 2048
LAYERS, TOKENS, HEADS = 8, 16, 4


@dataclass(frozen=True)
class Pair:
    """``pool`` is a ready layout, ``out`` whether the pool is read. One piece is a page's layer ("layer"), or a head of
    a token ("head"), which the layouts order differently."""

    pool: str
    out: bool
    piece_is: str

    @property
    def name(self) -> str:
        return f"{self.pool}>ring" if self.out else f"ring>{self.pool}"

    def spec(self, piece_bytes: int) -> KVSpec:
        if self.piece_is == "head":
            return KVSpec.attention(LAYERS, TOKENS, HEADS, piece_bytes, 1)
        tokens = TOKENS if piece_bytes % TOKENS == 0 else 1
        return KVSpec.mla(LAYERS, tokens, piece_bytes // tokens)


PAIRS = {
    pair.name: pair
    for pair in (
        Pair("sglang.layer_first", False, "layer"),
        Pair("sglang.layer_first", True, "layer"),
        Pair("vllm.BLHNC", True, "head"),
        Pair("transformers", False, "head"),
    )
}


class Relayout:
    """All pages of a pool of random bytes to or from a packed ring of as many, with digests; a `rigs.Work`."""

    direction = "device"
    engine_thread = ""

    def __init__(self, pair: Pair, piece_bytes: int, total_bytes: int, device: torch.device, seed: int = 0) -> None:
        self.device, spec = device, pair.spec(piece_bytes)
        self.count = max(1, total_bytes // spec.page_bytes)
        pool = Layout.named(pair.pool, spec, self.count)
        ring = Layout.page_first(spec, self.count)
        box, sides = Box.whole(spec), (Side.of(ring), Side.of(pool))
        if pair.out:
            geometry = coalesce(spec, sides[1], sides[0], box, order="dst")
        else:
            geometry = coalesce(spec, sides[0], sides[1], box, order="src")
        if geometry.piece_bytes != piece_bytes:
            raise LayoutError(f"{pair.name}: expected pieces of {piece_bytes} bytes, got {geometry.piece_bytes}")
        buffers = [[torch.empty(n, dtype=torch.uint8, device=device) for n in x.buffer_bytes] for x in (ring, pool)]
        self.src, self.dst = (buffers[1], buffers[0]) if pair.out else (buffers[0], buffers[1])
        self.spec, self.geometry, self.out = spec, geometry, pair.out
        ids = np.random.default_rng(seed).permutation(self.count)
        self.ids = torch.from_numpy(ids).to(device)
        self.digests = torch.zeros(self.count, spec.num_layers, dtype=torch.int64, device=device)
        for buffer in self.src:
            buffer.random_()
        self.name = f"{pair.name}, pieces of {piece_bytes:,} B"
        self.path = "device" if device.type == "cuda" else "plain torch"
        self.total_bytes = 2 * spec.page_bytes * self.count
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            ends = [b.data_ptr() for b in self.src], [b.data_ptr() for b in self.dst]
            self.table = build_table(geometry, spec, *ends, device, RELAYOUT_TILE_BYTES, RELAYOUT_WARPS)
            torch.cuda.synchronize(device)

    def begin(self, *, alone: bool = True) -> Wait:
        src_ids, dst_ids = (self.ids, None) if self.out else (None, self.ids)
        if self.stream is None:
            started = time.perf_counter()
            rows = (self.dst if self.out else self.src)[0].view(self.count, -1)
            task = RelayoutTask(
                self.spec, self.geometry, None, self.src, self.dst, src_ids, dst_ids, 0, self.count,
                packed=lambda: rows, digests=self.digests,
            )  # fmt: skip
            run_on_cpu(task)
            seconds = time.perf_counter() - started
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(200_000)  # 0.1 ms, while the launch is made
            begin.record()
            relayout(self.table, self.count, src_ids=src_ids, dst_ids=dst_ids, digests=self.digests)
            end.record()

        def wait() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait

    def exact(self) -> bool:
        """New bytes, one relayout, and both its bytes and its digests against plain torch and numpy."""
        for buffer in (*self.src, *self.dst):
            buffer.random_()
        self.digests.zero_()
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        self.begin()()
        want = [torch.empty_like(b).random_() for b in self.dst]
        here = torch.arange(self.count, device=self.device)
        ids = (self.ids, here) if self.out else (here, self.ids)
        relayout_reference(self.geometry, self.src, want, *ids)
        packed = (want if self.out else self.src)[0].view(self.count, -1)
        some = packed[: max(1, (64 << 20) // self.spec.page_bytes)].cpu().numpy()  # numpy takes a second a GiB
        sums = torch.from_numpy(box_digests(some, self.spec, self.geometry.box).view(np.int64))
        same = all(torch.equal(a, b) for a, b in zip(want, self.dst, strict=True))
        return same and torch.equal(sums, self.digests[: len(some)].cpu())


def run(
    pairs: Sequence[Pair],
    pieces: Sequence[int],
    device: torch.device,
    total_bytes: int,
    *,
    repeats: int,
    seed: int = 0,
    step: Callable[[str], None] = lambda _: None,
) -> tuple[list[Row], LargeCopy]:
    """One row a pair and piece size, and the copy that they are shares of."""
    limit, rows = LargeCopy(device, total_bytes), []
    for pair in pairs:
        for piece in pieces:
            step(f"{pair.name}, {piece:,} B")
            work = Relayout(pair, piece, total_bytes, device, seed)
            asked = device.type == "cuda" and piece >= BAR_PIECE  # of a GPU, not of plain torch on the CPU
            rows.append(measure(work, limit, repeats=repeats, bar=BAR if asked else None))
    return rows, limit


@exit_status
def main(argv: Sequence[str] | None) -> int:
    options = parser(__doc__)
    options.add_argument("--pieces", nargs="+", type=int, default=list(PIECES), help="bytes, multiples of 16")
    options.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    options.add_argument("--mib", type=int, help="bytes of a relayout; 1,024 MiB on a GPU, 8 on the CPU")
    args, device = checked(options, argv)
    if any(piece < 16 or piece % 16 for piece in args.pieces) or (args.mib is not None and args.mib < 1):
        options.error("--pieces: expected multiples of 16 bytes; --mib: at least 1")
    total = TOTAL_BYTES if device.type == "cuda" else CPU_BYTES
    total = args.mib << 20 if args.mib else total // 8 if args.quick else total
    repeats = args.repeats or (5 if args.quick else 21)
    with progress(len(args.pairs) * len(args.pieces)) as step:
        pairs = [PAIRS[name] for name in args.pairs]
        rows, limit = run(pairs, args.pieces, device, total, repeats=repeats, seed=args.seed, step=step)
    title = f"relayout with digests of {total:,} bytes on the device, pages in random order"
    return finish(args, title, rows, limit)


def test_relayout(benchmark: Any) -> None:
    """Pieces of 2 KiB into a layer-first pool, with digests."""
    device = device_of("auto")
    nbytes = TOTAL_BYTES if device.type == "cuda" else TEST_BYTES
    work = Relayout(PAIRS["ring>sglang.layer_first"], 2048, nbytes, device)
    benchmark.extra_info["bytes"] = work.total_bytes
    benchmark.pedantic(lambda: work.begin()(), rounds=5, warmup_rounds=1)
    assert work.exact()


if __name__ == "__main__":
    sys.exit(main(None))
