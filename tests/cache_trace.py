"""A serving day in small: a directory in this process, which imports neither torch nor CUDA, and a mover in another.
Threads serve requests of a trace: prefetch, match, load layer by layer, compute, store. What a page should hold follows
from the tokens up to its end, so every byte that a load brings is compared, where the memory is: on a GPU or the CPU.

    python -c 'import cache_trace; cache_trace.main()' '{"device": "cuda", "requests": 1000}'
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.books import TierPlan
from kvtransfer.cache import TieredCache
from kvtransfer.cache_parts import plan_of
from kvtransfer.commands import Scope
from kvtransfer.directory import Directory
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.policy import Prefetch
from kvtransfer.remote_mover import start_mover
from kvtransfer.tiers.keys import Namespace

if TYPE_CHECKING:
    import torch

    from kvtransfer.mover import Mover

GUARD = 256
LIMIT_S = 60.0


@dataclass(frozen=True)
class Day:
    """What is served. ``trace``: a file of requests (bench/traces.py); "": made up, in its shape."""

    folder: str
    device: str = "cpu"
    requests: int = 60
    threads: int = 4
    trace: str = ""
    layers: int = 3
    page_size: int = 16
    heads: int = 2
    head_dim: int = 40
    pages: int = 160
    host_pages: int = 120
    disk_pages: int = 400
    layout: str = "vllm.LBNHC"
    seed: int = 0

    @property
    def spec(self) -> KVSpec:
        return KVSpec.attention(self.layers, self.page_size, self.heads, self.head_dim, 2)

    @property
    def scope(self) -> Scope:
        return Scope(Namespace.of(self.spec, model="trace", kv_dtype="float16").digest(), b"salt")


class Worker:
    """The mover's process. ``use`` is a forward: it waits for each layer, looks at it, and writes new pages."""

    def __init__(self, day: Day) -> None:
        import torch

        from kvtransfer.engine import TransferEngine
        from kvtransfer.kernels.layout import Layout
        from kvtransfer.mover import Mover
        from kvtransfer.pool import KVPool
        from kvtransfer.tier_build import TierMaker
        from kvtransfer.tiers.host import HostTier

        layout = Layout.named(day.layout, day.spec, day.pages)
        self.device = torch.device(day.device)
        self.whole = [
            torch.randint(0, 256, (n + 2 * GUARD,), dtype=torch.uint8, device=self.device) for n in layout.buffer_bytes
        ]
        self.before = [w.clone() for w in self.whole]
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        streams = None if self.stream is None else [self.stream]
        self.pool = KVPool(layout, [w[GUARD:-GUARD] for w in self.whole], streams=streams)
        self.host = HostTier(day.spec, capacity_pages=day.host_pages, device=self.device)
        self.engine = TransferEngine(self.pool, self.host, staging_bytes=8 << 20)
        options = {"kind": "disk", "paths": [f"{day.folder}/disk"], "pages": day.disk_pages, "disk_share": 1.0}
        self.disk = TierMaker(day.spec, day.scope.namespace)("disk", options)
        self.mover: Mover = Mover(self.engine, {"disk": self.disk})

    def use(self, number: int, pages: list[int], seeds: list[int], new: list[int], new_seeds: list[int]) -> int:
        """A forward over loaded ``pages``, of load ``number`` (0: of none), that writes ``new`` ones. How many bytes
        were wrong."""
        import torch

        if self.stream is None:
            return self._use(number, pages, seeds, new, new_seeds)
        with torch.cuda.stream(self.stream):
            return self._use(number, pages, seeds, new, new_seeds)

    def _use(self, number: int, pages: list[int], seeds: list[int], new: list[int], new_seeds: list[int]) -> int:
        import torch

        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        load = self.mover.load(number, pages=len(pages), timeout_s=LIMIT_S) if pages and number else None
        for layer in range(self.pool.spec.num_layers):
            if load is not None:
                load.wait_layer(layer)
            for component in range(2):
                view = self.pool.view(layer, component, torch.uint8)
                for ids, their, write in ((pages, seeds, False), (new, new_seeds, True)):
                    if ids:
                        at = torch.tensor(ids, device=self.device)
                        want = content(torch.tensor(their, device=self.device), layer, component, view[0].numel())
                        if write:
                            view[at] = want.view(-1, *view.shape[1:])
                        else:
                            wrong += (view[at].reshape(len(ids), -1) != want).sum()
        return int(wrong.item())

    def guards(self) -> int:
        """Guard bytes that are other than they were."""
        ends = [
            (a[part] != b[part]).sum()
            for a, b in zip(self.whole, self.before, strict=True)
            for part in (slice(GUARD), slice(-GUARD, None))
        ]
        return int(sum(ends))

    def on_gpu(self) -> bool:
        import torch

        return bool(torch.cuda.is_initialized())

    def close(self) -> None:
        self.mover.close(drain=False)
        self.engine.close(drain=False)
        self.disk.close(drain=False)
        self.host.close()


def content(seeds: torch.Tensor, layer: int, component: int, nbytes: int) -> torch.Tensor:
    """What one component of a layer holds in pages of these seeds, uint8 [n, nbytes]."""
    import torch

    x = seeds[:, None] + torch.arange(nbytes, device=seeds.device) * 0x9E3779B9 + (2 * layer + component) * 0x85EBCA77
    x = (x ^ (x >> 29)) * 0x1CE4E5B9
    return ((x ^ (x >> 17)) & 0xFF).to(torch.uint8)


@contextmanager
def make_worker(day: Day, control: Connection) -> Iterator[Mover]:
    import torch

    torch.set_num_threads(1)
    worker = Worker(day)

    def obey() -> None:
        while True:
            try:
                verb, arguments = control.recv()
            except (EOFError, OSError):
                return
            try:
                control.send(getattr(worker, verb)(*arguments))
            except Exception as error:
                control.send(error)

    threading.Thread(target=obey, daemon=True).start()
    try:
        yield worker.mover
    finally:
        worker.close()


def prompts(day: Day) -> list[NDArray[np.int32]]:
    """Token ids of each request: conversations that share system prompts and grow turn by turn; or a trace's own."""
    longest = day.pages // (2 * day.threads)
    if day.trace:
        from traces import read

        found = []
        for request in read(Path(day.trace)):
            blocks = np.array(request.blocks[:longest], dtype=np.int64)
            found.append(_page_tokens(blocks, day.page_size))
            if len(found) == day.requests:
                return found
    rng = random.Random(day.seed)
    systems = [[rng.randrange(1 << 30) for _ in range(rng.choice([1, 2, 5]))] for _ in range(5)]
    sessions: list[list[int]] = []
    found = []
    for _ in range(day.requests):
        if not sessions or rng.random() < 0.35:
            sessions.append(list(rng.choice(systems)))
        back = rng.randrange(len(sessions)) if rng.random() < 0.2 else int(rng.expovariate(0.4))  # some come back late
        talk = sessions[-1 - min(back, len(sessions) - 1)]
        talk += [rng.randrange(1 << 30) for _ in range(rng.choice([1, 1, 2, 4]))]
        del talk[longest:]
        found.append(_page_tokens(np.array(talk, dtype=np.int64), day.page_size))
    return found


def _page_tokens(blocks: NDArray[np.int64], page_size: int) -> NDArray[np.int32]:
    """A page of tokens for each block id, the same for the same id."""
    ids = (blocks[:, None] * 1_000_003 + np.arange(page_size)) & 0x7FFFFFFF
    return ids.astype(np.int32).reshape(-1)


def seeds_of(tokens: NDArray[np.int32], page_size: int) -> list[int]:
    """Of each page, from all tokens up to its end."""
    hasher, seeds = hashlib.sha256(), []
    for at in range(0, tokens.size - page_size + 1, page_size):
        hasher.update(tokens[at : at + page_size].tobytes())
        seeds.append(int.from_bytes(hasher.digest()[:5], "little"))
    return seeds


class Server:
    """The directory's process: serves requests from several threads."""

    def __init__(self, day: Day) -> None:
        self.day = day
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        self.control, self.lock = mine, threading.Lock()
        remote = start_mover(make_worker, day, theirs)
        theirs.close()
        facts = remote.facts()
        plans = [TierPlan("host", "slots", facts.host_pages)]
        plans += [plan_of(name, tier, write="write_through") for name, tier in facts.tiers.items()]
        self.directory = Directory(day.page_size, plans, prefetch=Prefetch(1, "timeout", 0.2, 0.1))
        self.cache = TieredCache(self.directory, remote, scope=day.scope)
        self.free, self.room = list(range(day.pages)), threading.Condition()
        self.wrong_bytes = self.loaded_pages = self.failed = 0

    def do(self, verb: str, *arguments: Any) -> Any:
        with self.lock:
            self.control.send((verb, arguments))
            assert self.control.poll(LIMIT_S), f"{verb} had no answer"
            value = self.control.recv()
        if isinstance(value, Exception):
            raise value
        return value

    def take(self, count: int) -> list[int]:
        with self.room:
            assert self.room.wait_for(lambda: len(self.free) >= count, LIMIT_S), "no device pages in time"
            out, self.free = self.free[:count], self.free[count:]
            return out

    def give(self, pages: Sequence[int]) -> None:
        self.cache.require_free(pages)
        with self.room:
            self.free += pages
            self.room.notify_all()

    def serve(self, number: int, tokens: NDArray[np.int32]) -> None:
        """One request. Every seventh is aborted while its store runs."""
        seeds = seeds_of(tokens, self.day.page_size)
        fetch = self.cache.prefetch(tokens, request=number)
        while not self.cache.admit(fetch):
            threading.Event().wait(0.005)
        pages = self.take(len(seeds))
        with self.cache.match(tokens) as hit:
            load = self.cache.load(hit, pages[: hit.pages], layerwise=True)
        there = load.await_submitted(LIMIT_S)
        wrong = self.do("use", load.number, pages[:there], seeds[:there], pages[there:], seeds[there:])
        good = load.verdict(LIMIT_S).ok
        store = self.cache.store(tokens, pages[there:], first=there) if good else None
        if store is not None:
            if number % 7 == 3:
                store.cancel()
            store.result(LIMIT_S)
        with self.room:
            self.wrong_bytes += wrong if good else 0
            self.loaded_pages += there
            self.failed += not good
        self.give(pages)

    def run(self) -> dict[str, Any]:
        """Serve all. What came of it, in plain values."""
        waiting = list(enumerate(prompts(self.day)))[::-1]
        errors: list[str] = []

        def work() -> None:
            while waiting and not errors:
                try:
                    self.serve(*waiting.pop())
                except IndexError:
                    return
                except BaseException as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    raise

        threads = [threading.Thread(target=work) for _ in range(self.day.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        figures = self.cache.stats().directory
        out = {
            "errors": errors,
            "requests": figures.matches,
            "wrong_bytes": self.wrong_bytes,
            "loaded_pages": self.loaded_pages,
            "failed_loads": self.failed,
            "guards": self.do("guards"),
            "hit_tokens": figures.hit_tokens,
            "by_tier": figures.hit_tokens_by_tier,
            "disk_read_pages": figures.tiers["disk"].counters.get("read", 0),
            "evicted_pages": figures.tiers["host"].counters.get("evicted", 0),
            "mover_on_gpu": self.do("on_gpu"),
        }
        dropped = self.cache.close()
        mapped = Path("/proc/self/maps").read_text()
        return out | {
            "dropped": len(dropped.handles),
            "locks": self.directory.index.locks,
            "torch_here": "torch" in sys.modules,
            "cuda_here": "libcuda" in mapped or "/dev/nvidia" in mapped,
        }


def main() -> None:
    """The day's settings as JSON are the argument; prints what came of it as JSON."""
    print(json.dumps(Server(Day(**json.loads(sys.argv[1]))).run()))


def command(day: Day) -> list[str]:
    """What runs a day in a process of its own."""
    return [sys.executable, "-c", "import cache_trace; cache_trace.main()", json.dumps(asdict(day))]
