"""The disk tier against fio, beside a busy Python thread, and against its own bare I/O. Part of bench_tiers.py.

The slabs are overwritten twice before. Payload bytes count for the tier, all bytes for fio: random O_DIRECT, a record
as block, the best of psync in 8 jobs, io_uring and libaio 32 deep.

A virtual disk changes its mind within seconds, by a factor of two. So the tier and its own bare I/O take turns in
passes of half the pages, the same pages in the same order for both of a pair, each first as often; the share is the
median of the pairs'. Both overwrite slots that were written before: bare I/O those in which the pages lie, the tier
those that their removal, which is not timed, has freed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from bench_rows import Options, Row
from processors import busy_thread

from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import RecordBuffer, Tier, TierHandle
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.io import Storage, Transfer
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.record import RecordHeader

BATCH_PAGES, IN_FLIGHT = 128, 4
SPACE = bytes(32)
SPECS = {
    "1 MiB": (KVSpec.attention(num_layers=16, page_size=16, kv_heads=8, head_dim=128, itemsize=2), 1024, 0.85),
    "64 KiB": (KVSpec.attention(num_layers=1, page_size=16, kv_heads=8, head_dim=128, itemsize=2), 4096, 0.75),
}
ENGINES = {
    "psync x 8": ["--ioengine=psync", "--numjobs=8", "--group_reporting"],
    "io_uring": ["--ioengine=io_uring", "--iodepth=32"],
    "libaio": ["--ioengine=libaio", "--iodepth=32"],
}


class Pages:
    """Sealed pages of random bytes in a host slab."""

    def __init__(self, spec: KVSpec, count: int) -> None:
        self.count, self.page_bytes = count, spec.page_bytes
        self.host = HostTier(spec, capacity_pages=count, device="cpu", pin=False)
        self.host.payload.random_(0, 256)
        self.keys = [i.to_bytes(4, "little") * 8 for i in range(count)]
        shard = Shard.whole(spec)
        headers = [RecordHeader(key, SPACE, shard, "page_first", spec.page_bytes) for key in self.keys]
        self.host.seal(np.arange(count), headers)
        self.buffers = [self.host.record(i) for i in range(count)]

    def batches(self, order: Sequence[int]) -> Iterator[tuple[list[bytes], list[RecordBuffer]]]:
        for at in range(0, len(order), BATCH_PAGES):
            some = order[at : at + BATCH_PAGES]
            yield [self.keys[i] for i in some], [self.buffers[i] for i in some]

    def through(self, tier: Tier, verb: str, order: Sequence[int]) -> None:
        """Put or get the pages of ``order``, `IN_FLIGHT` batches under way; returns when all have ended well."""
        handles: list[TierHandle] = []
        for keys, buffers in self.batches(order):
            if len(handles) >= IN_FLIGHT:
                handles.pop(0).result().require()
            handles.append(tier.put_from(keys, buffers) if verb == "put" else tier.get_into(keys, buffers))
        for handle in handles:
            handle.result().require()


def passed(tier: DiskTier, pages: Pages, verb: str, order: Sequence[int]) -> float:
    """GB/s of payload of one pass over the pages of ``order``, with `IN_FLIGHT` batches under way."""
    if verb == "put":
        tier.remove([pages.keys[i] for i in order]).result()  # at the first pass there is nothing to remove
    started = time.perf_counter()
    pages.through(tier, verb, order)
    return len(order) * pages.page_bytes / (time.perf_counter() - started) / 1e9


def rate(tier: DiskTier, pages: Pages, verb: str, seconds: float, rng: np.random.Generator) -> float:
    """GB/s of passes over all pages, until so many seconds are over."""
    spent, passes = 0.0, 0
    while spent < seconds:
        spent += pages.count * pages.page_bytes / 1e9 / passed(tier, pages, verb, rng.permutation(pages.count).tolist())
        passes += 1
    return passes * pages.count * pages.page_bytes / spent / 1e9


class _Bare(Transfer):
    """A transfer that nobody checks, indexes or journals."""

    def __init__(self, **of: object) -> None:
        super().__init__(**of)  # type: ignore[arg-type]
        self.over = threading.Event()
        self._left = len(self.buffers)
        self._lock = threading.Lock()
        self.errors: list[int] = []

    def finish(self, positions: list[int], errors: list[int]) -> None:
        with self._lock:
            self.errors += [error for error in errors if error]
            self._left -= len(positions)
            if not self._left:
                self.over.set()


def bare_passed(tier: DiskTier, pages: Pages, verb: str, order: Sequence[int]) -> float:
    """`passed` of the same records through the same engine, with journal, checksum and index left out."""
    storage: Storage = tier._storage
    slots = tier._table.find(pages.keys)
    under_way: list[_Bare] = []
    started = time.perf_counter()
    for at in range(0, len(order), BATCH_PAGES):
        some = order[at : at + BATCH_PAGES]
        files, offsets = tier._where([slots[i] for i in some])
        if len(under_way) >= IN_FLIGHT:
            under_way.pop(0).over.wait()
        buffers = [pages.buffers[i] for i in some]
        transfer = _Bare(write=verb == "put", files=files, offsets=np.array(offsets), buffers=buffers)
        under_way.append(transfer)
        storage.submit(transfer)
    for transfer in under_way:
        transfer.over.wait()
        assert not transfer.errors
    return len(order) * pages.page_bytes / (time.perf_counter() - started) / 1e9


def pairs(
    tier: DiskTier, pages: Pages, verb: str, seconds: float, rng: np.random.Generator
) -> Iterator[tuple[float, float]]:
    """GB/s of the tier and of its bare I/O, in turns, for about so many seconds each; two pairs at least."""
    spent, turn = 0.0, 0
    while spent < 2 * seconds or turn % 2:
        order = rng.permutation(pages.count)[: pages.count // 2].tolist()
        started = time.perf_counter()
        if turn % 2:
            bare, ours = bare_passed(tier, pages, verb, order), passed(tier, pages, verb, order)
        else:
            ours, bare = passed(tier, pages, verb, order), bare_passed(tier, pages, verb, order)
        spent += time.perf_counter() - started
        turn += 1
        yield ours, bare


def fio(file: Path, verb: str, block: int, nbytes: int, seconds: float) -> dict[str, float]:
    """GB/s of each engine, all bytes. The file was overwritten once."""
    rates = {}
    for name, flags in ENGINES.items():
        command = [
            "fio", "--name=x", f"--filename={file}", f"--rw=rand{'write' if verb == 'put' else 'read'}", "--direct=1",
            f"--bs={block}", f"--size={nbytes}", "--time_based",
            f"--runtime={int(1000 * seconds)}ms", "--randrepeat=0", "--norandommap",
            "--output-format=json", *flags,
        ]  # fmt: skip
        out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        job = out["jobs"][0]["write" if verb == "put" else "read"]
        rates[name] = job["bw_bytes"] / 1e9
    return rates


def _overwritten(file: Path, nbytes: int) -> None:
    """A file of ``nbytes`` that was written twice."""
    for _ in range(2):
        subprocess.run(
            ["fio", "--name=x", f"--filename={file}", "--rw=write", "--direct=1", "--bs=1m", f"--size={nbytes}"],
            check=True, capture_output=True,
        )  # fmt: skip


def disk_rows(options: Options) -> list[Row]:
    """All rows of the disk tier."""
    if shutil.which("fio") is None:
        raise SystemExit(
            "bench_tiers disk: expected fio on the PATH, got none; install it with the system's package manager"
        )
    rows: list[Row] = []
    for label, (spec, count, bar) in SPECS.items():
        folder = options.folder / f"tier-{label.replace(' ', '')}"
        shutil.rmtree(folder, ignore_errors=True)
        pages = Pages(spec, count)
        tier = DiskTier(folder, spec, namespace=SPACE, capacity_pages=count, clean_every_s=3600, disk_share=1.0)
        try:
            tier.register(pages.host.payload.numpy())
            tier.register(pages.host.trailers.reshape(-1))
            rows += _rows_of(options, label, bar, tier, pages)
        finally:
            tier.close()
            pages.host.close()
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def _rows_of(options: Options, label: str, bar: float, tier: DiskTier, pages: Pages) -> list[Row]:
    rng = np.random.default_rng()
    file = options.folder / "fio.dat"
    nbytes = pages.count * tier.record_bytes
    _overwritten(file, nbytes)
    for _ in range(2):
        rate(tier, pages, "put", 1e-3, rng)
    rows: list[Row] = []
    for verb in ("get", "put"):
        ours: list[float] = []
        bare: list[float] = []
        limits: dict[str, list[float]] = {name: [] for name in ENGINES}
        for _ in range(options.repeats):
            for mine, without in pairs(tier, pages, verb, options.seconds, rng):
                ours.append(mine)
                bare.append(without)
            for name, got in fio(file, verb, tier.record_bytes, nbytes, options.seconds).items():
                limits[name].append(got)
        best = max(limits, key=lambda name: statistics.median(limits[name]))
        rows.append(Row.of(f"{verb} {label}", ours, f"fio {best}", limits[best], bar))
        # 10 % gained without them is a share of 1 / 1.1
        most = 1 / 1.1 if label == "1 MiB" else None
        rows.append(Row.paired(f"{verb} {label}", ours, "no journal, checksum, index", bare, most))
    alone: list[float] = []
    beside: list[float] = []
    for turn in range(2 * options.repeats):
        for busy in (turn % 2 == 0, turn % 2 == 1):
            with busy_thread("free" if busy else None):
                (beside if busy else alone).append(rate(tier, pages, "get", options.seconds / 2, rng))
    rows.append(Row.paired(f"get {label}, busy thread", beside, "alone", alone, 0.4 if label == "64 KiB" else None))
    file.unlink()
    return rows
