"""The Redis and Mooncake tiers against bare clients of the same servers. Parts of bench_tiers.py.

The servers run on the loopback interface of this machine. Bare clients move records of the same size in batches of
the same length, check nothing and keep no books: of Redis one socket with sendmsg and recv_into (GET and SET in
pipelines of 32), of Mooncake ``batch_put_from`` and ``batch_get_into`` on one registered buffer, as large as the tier's
pages together. Runs alternate, and shares are medians of neighbours; stores are empty before each put.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis
from bench_disk import BATCH_PAGES, Pages
from bench_rows import Options, Row
from mooncake.store import MooncakeDistributedStore

from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.mooncake import MooncakeTier
from kvtransfer.tiers.redis import RedisTier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tier_servers import Mooncake, start_redis

BAR = 0.8
PIPELINE = 32
SPECS = {
    "1 MiB": (KVSpec.attention(num_layers=16, page_size=16, kv_heads=8, head_dim=128, itemsize=2), 128),
    "64 KiB": (KVSpec.attention(num_layers=1, page_size=16, kv_heads=8, head_dim=128, itemsize=2), 2048),
}
Move = Callable[[list[int]], None]


def rate(move: Move, before: Callable[[], object], pages: Pages, seconds: float) -> float:
    """GB/s of payload: all pages in random order, again and again."""
    moved, spent, rng = 0, 0.0, np.random.default_rng()
    while spent < seconds:
        before()
        order = rng.permutation(pages.count).tolist()
        started = time.perf_counter()
        move(order)
        spent += time.perf_counter() - started
        moved += pages.count * pages.page_bytes
    return moved / spent / 1e9


def by_tier(tier: Tier, pages: Pages, verb: str) -> Move:
    """Batches through a tier, `IN_FLIGHT` under way."""
    return lambda order: pages.through(tier, verb, order)


class BareRedis:
    """One socket, records contiguous in memory of its own."""

    def __init__(self, family: int, address: Any, pages: Pages, record_bytes: int) -> None:
        self.socket = socket.socket(family)
        self.socket.connect(address)
        self.memory = memoryview(bytearray(pages.count * record_bytes))
        self.size = record_bytes

    def put(self, order: list[int]) -> None:
        for at in range(0, len(order), PIPELINE):
            parts: list[Any] = []
            for page in order[at : at + PIPELINE]:
                parts.append(b"*3\r\n$3\r\nSET\r\n$6\r\nb%05d\r\n$%d\r\n" % (page, self.size))
                parts += [self.memory[page * self.size : (page + 1) * self.size], b"\r\n"]
            while parts:
                sent = self.socket.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = memoryview(parts[0])[sent:]
            left = 5 * len(order[at : at + PIPELINE])
            while left:
                left -= len(self.socket.recv(left))

    def get(self, order: list[int]) -> None:
        head, tail = bytearray(len(f"${self.size}\r\n")), bytearray(2)
        for at in range(0, len(order), PIPELINE):
            some = order[at : at + PIPELINE]
            self.socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$6\r\nb%05d\r\n" % page for page in some))
            for page in some:
                for part in (
                    memoryview(head),
                    self.memory[page * self.size : (page + 1) * self.size],
                    memoryview(tail),
                ):
                    while len(part):
                        part = part[self.socket.recv_into(part) :]


class BareMooncake:
    """One client, one registered buffer."""

    def __init__(self, client: Any, pages: Pages, record_bytes: int) -> None:
        self.client, self.size = client, record_bytes
        self.memory = np.zeros(pages.count * record_bytes, np.uint8)
        self.address = self.memory.ctypes.data
        assert client.register_buffer(self.address, self.memory.size) == 0

    def move(self, order: list[int], verb: str) -> None:
        for at in range(0, len(order), BATCH_PAGES):
            some = order[at : at + BATCH_PAGES]
            keys = [f"bare-{page}" for page in some]
            where = [self.address + page * self.size for page in some]
            call = self.client.batch_put_from if verb == "put" else self.client.batch_get_into
            codes = call(keys, where, [self.size] * len(some))
            assert all(code in (0, self.size) for code in codes), codes


def compare(
    options: Options, what: str, pages: Pages, ours: Move, bare: Move, against: str, clear: Callable[[], object]
) -> Row:
    """One row: the two in turns of a quarter of the time, each first as often."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, 4 * options.repeats):
        for which in (turn % 2, 1 - turn % 2):
            got = rate((ours, bare)[which], clear, pages, options.seconds / 4)
            if turn >= 0:  # the first one warms up: memory is touched, connections are made
                rates[which].append(got)
    return Row.paired(what, rates[0], against, rates[1], BAR)


def redis_rows(options: Options) -> list[Row]:
    """Over TCP and over a unix socket."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        server, port, path = start_redis(Path(folder))
        control = redis.Redis(port=port)
        for way, url, family, address in (
            ("tcp", f"redis://127.0.0.1:{port}", socket.AF_INET, ("127.0.0.1", port)),
            ("unix", f"unix://{path}", socket.AF_UNIX, str(path)),
        ):
            for label, (spec, count) in SPECS.items():
                pages = Pages(spec, count)
                record_bytes = sum(part.size for part in pages.buffers[0])
                bare = BareRedis(family, address, pages, record_bytes)
                with RedisTier(url) as tier:
                    for verb, bare_move in (("put", bare.put), ("get", bare.get)):
                        clear = control.flushall if verb == "put" else bool
                        if verb == "get":
                            bare.put(list(range(count)))
                            by_tier(tier, pages, "put")(list(range(count)))
                        ours = by_tier(tier, pages, verb)
                        what = f"redis {way} {verb} {label}"
                        rows.append(compare(options, what, pages, ours, bare_move, "sendmsg/recv_into", clear))
                bare.socket.close()
                pages.host.close()
                control.flushall()
        control.close()
        server.kill()
    return rows


def mooncake_rows(options: Options) -> list[Row]:
    """Over TCP, the memory in another process."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        servers = Mooncake(Path(folder), segment_mib=2048, lease_ms=10_000)
        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", servers.address) == 0
        for label, (spec, count) in SPECS.items():
            pages = Pages(spec, count)
            bare = BareMooncake(client, pages, sum(part.size for part in pages.buffers[0]))
            with MooncakeTier(servers.address, store=client, timeout_s=60.0) as tier:
                tier.register(pages.host.payload.numpy())
                tier.register(pages.host.trailers.reshape(-1))
                for verb in ("put", "get"):

                    def clear(verb: str = verb) -> None:
                        if verb == "put":
                            client.remove_all(True)

                    def bare_move(order: list[int], bare: BareMooncake = bare, verb: str = verb) -> None:
                        bare.move(order, verb)

                    if verb == "get":
                        bare.move(list(range(count)), "put")
                        by_tier(tier, pages, "put")(list(range(count)))
                    ours = by_tier(tier, pages, verb)
                    what = f"mooncake tcp {verb} {label}"
                    rows.append(compare(options, what, pages, ours, bare_move, f"batch_{verb}", clear))
            client.unregister_buffer(bare.address)
            client.remove_all(True)
            pages.host.close()
        client.close()
        servers.kill()
    return rows
