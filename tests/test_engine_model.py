"""Random transfers of several engines, against the same done one after the other; and no two engines lock up."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from engine_helpers import (
    LIMIT_S,
    TINY,
    TOKEN,
    Bytes,
    Guarded,
    fresh,
    make_rig,
    random_bytes,
    slot_bytes,
    staged,
)

from kvtransfer import engine as engine_module
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream, Rule
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.tiers.host import HostTier


class Model:
    """Random transfers by four engines over one pool, one slab and a second pool, against the same done in order."""

    SIZE = 16

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bytes = fresh()
        chance = random.Random(seed + 1)

        def delay(label: str) -> Rule | None:
            return chance.random() * 0.0005 if chance.random() < 0.1 else None

        self.compute = FifoStream("compute", Delays(delay))
        self.side = Guarded(self.bytes, Layout.named("sglang.layer_first", TINY, self.SIZE), streams=[self.compute])
        self.other = Guarded(self.bytes, Layout.named("vllm.LBHNC", TINY, self.SIZE), name="other")
        self.host = HostTier(TINY, capacity_pages=self.SIZE, pin=False, huge_pages=False, threads=1)
        self.engines = [
            TransferEngine(self.side.pool, self.host, delays=Delays(delay), **kw) for kw in ({}, {}, staged())
        ]
        self.engines.append(TransferEngine(self.other.pool, self.host, delays=Delays(delay), **staged()))
        self.pages, self.others = self.side.pages(range(self.SIZE)), self.other.pages(range(self.SIZE))
        self.slots = slot_bytes(self.host, range(self.SIZE))
        self.known = np.zeros(self.SIZE, dtype=bool)  # slots with digests
        self.running: list[tuple[TransferHandle, set[int]]] = []  # with the pages of the first pool that each touches
        self.loads: list[tuple[TransferHandle, tuple[int, ...]]] = []
        self.reads: list[tuple[Bytes, Bytes]] = []

    def ids(self, count: int) -> list[int]:
        return self.rng.sample(range(self.SIZE), count)

    def step(self) -> None:
        kind = self.rng.choice(["store", "store", "load", "load", "copy", "write", "read", "layers"])
        count = self.rng.randint(1, 4)
        if kind in ("write", "read"):
            self.forward(kind, self.ids(count))
            return
        engine = self.rng.choice(self.engines)
        mine, model = (self.others, self.others) if engine is self.engines[-1] else (self.pages, self.pages)
        pages, slots = self.ids(count), self.ids(count)
        touched = set() if model is self.others else set(pages)
        if kind == "copy":
            engine, into = self.rng.choice(self.engines[:3]), self.ids(count)
            handle = engine.copy(pages, self.other.pool, into)
            self.others[into] = self.pages[pages]
            touched = set(pages)
        elif kind == "load":
            handle = engine.load(slots, pages, layerwise=self.rng.random() < 0.3)
            mine[pages] = self.slots[slots]
            self.loads.append((handle, tuple(np.flatnonzero(~self.known[slots]).tolist())))
        else:
            handle = engine.store(pages, slots, layerwise=kind == "layers")
            self.slots[slots] = mine[pages]
            self.known[slots] = True
            if kind == "layers":
                stream = self.compute if model is self.pages and self.rng.random() < 0.5 else None
                if model is self.pages and stream is None:
                    self.compute.synchronize(LIMIT_S)  # "this thread has written it" must be true
                for layer in self.rng.sample(range(3), 3):
                    handle.layer_written(layer, stream)
        self.running.append((handle, touched))

    def forward(self, kind: str, pages: list[int]) -> None:
        """Work of the model on the compute stream: it waits for the transfers of its pages."""
        for handle, touched in self.running:
            if touched & set(pages) and not handle.done():
                handle.wait_all(self.compute)
        if kind == "write":
            rows = random_bytes(self.bytes, len(pages), TINY.page_bytes)
            self.compute.submit(lambda: self.side.put(pages, rows), "compute")
            self.pages[pages] = rows
        else:
            want = self.pages[pages].copy()
            self.compute.submit(lambda: self.reads.append((want, self.side.pages(pages))), "compute")

    def check(self) -> None:
        for handle, _ in self.running:
            handle.result(LIMIT_S)
        self.compute.synchronize(LIMIT_S)
        for handle, unknown in self.loads:
            assert handle.verdict(0).unverified_pages == unknown
        assert np.array_equal(self.side.pages(range(self.SIZE)), self.pages)
        assert np.array_equal(self.other.pages(range(self.SIZE)), self.others)
        assert np.array_equal(slot_bytes(self.host, range(self.SIZE)), self.slots)
        assert all(np.array_equal(want, seen) for want, seen in self.reads)
        self.running.clear()
        self.loads.clear()
        self.reads.clear()

    def run(self, operations: int) -> None:
        try:
            for number in range(operations):
                self.step()
                if number % 100 == 99:
                    self.check()
            self.check()
        finally:
            for engine in self.engines:
                engine.close(timeout_s=LIMIT_S)
            self.compute.close()
        assert not self.side.pool.ledger.any_busy() and not self.host.ledger.any_busy()
        self.host.close()


def test_two_thousand_random_transfers_give_what_they_give_in_order() -> None:
    Model(random.SystemRandom().randrange(2**32)).run(2_000)


@pytest.mark.long
def test_ten_thousand_random_transfers_give_what_they_give_in_order() -> None:
    for seed in range(3):
        Model(seed).run(10_000)


def test_the_model_sees_transfers_that_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "claim_all", lambda wanted, owner: [])
    with pytest.raises((AssertionError, TransferError)):  # other bytes, or digests that do not fit them
        for seed in range(20):
            Model(seed).run(300)


def test_engines_that_wait_for_each_other_both_ways_never_lock_up() -> None:
    rig = make_rig("page_first", TOKEN, pages=8, slots=8)
    engines = [TransferEngine(rig.pool, rig.host, **kw) for kw in ({}, staged())]
    handles: list[TransferHandle] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            engine = rng.choice(engines)
            pages, slots = rng.sample(range(8), 3), rng.sample(range(8), 3)
            handles.append(engine.load(slots, pages) if rng.random() < 0.5 else engine.store(pages, slots))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    for handle in handles:
        assert handle.result(LIMIT_S).pages == 3
    for engine in engines:
        engine.close(timeout_s=LIMIT_S)
    assert len(handles) == 400 and not rig.pool.ledger.any_busy() and not rig.host.ledger.any_busy()
    rig.close()
