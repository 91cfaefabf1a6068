"""What the engine tests share: guarded pools and slabs of random bytes, and a naive model of where bytes lie.

Everything runs on the CPU's lanes. Tests hold work back with gates, never with sleeps, and every buffer carries guard
bytes. `byte_offsets` lists where the bytes of a page lie from the placements alone, without the code under test that
merges and orders them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtransfer import lanes as lanes_module
from kvtransfer.engine import TransferEngine
from kvtransfer.fifo import Delays, FifoStream, Rule
from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.events import Observer
from kvtransfer.kernels.layout import Layout, Placement
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool, Stream
from kvtransfer.staging import SLOT_ALIGNMENT, StagingRing
from kvtransfer.tiers.host import HostTier

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]

LIMIT_S = 20.0  # of every wait that should end: a hang fails here and not at the suite's limit
GUARD = 61  # odd, so that buffers start at odd addresses too
RING_SLOTS = 6  # of the rings that tests use

# Page sizes that are odd or small first, K and V of different width, state a page, layers that differ.
TINY = KVSpec.attention(num_layers=3, page_size=3, kv_heads=2, head_dim=5, itemsize=1, v_head_dim=3)
TOKEN = KVSpec.attention(num_layers=2, page_size=1, kv_heads=1, head_dim=7, itemsize=2)
EVEN = KVSpec.attention(num_layers=3, page_size=16, kv_heads=2, head_dim=8, itemsize=2)
LATENT = KVSpec.mla(num_layers=3, page_size=3, latent_bytes=37)
HYBRID = KVSpec(
    16,
    (
        (Component("k", 2, 9), Component("v", 2, 9)),
        (Component("state", 1, 129, per_page=True), Component("conv", 3, 11, per_page=True)),
        (Component("latent", 1, 31), Component("index", 1, 5), Component("scale", 1, 4, per_page=True)),
    ),
)
DEEP = KVSpec.attention(num_layers=9, page_size=3, kv_heads=1, head_dim=5, itemsize=1)
WIDE = KVSpec.attention(num_layers=2, page_size=20, kv_heads=2, head_dim=64, itemsize=2)  # a layer fills 10,240 bytes


def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Hold the test until ``condition()``; fail after `LIMIT_S`."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} was not met within {LIMIT_S} s"
        time.sleep(0.0005)


def random_bytes(rng: np.random.Generator, *shape: int) -> Bytes:
    """Fresh uint8 of that shape."""
    return rng.integers(0, 256, shape, dtype=np.uint8)


def fresh() -> np.random.Generator:
    """A generator with a seed of its own: no test should lean on one set of bytes."""
    return np.random.default_rng()


def byte_offsets(place: Placement) -> Ids:
    """Byte offsets of page 0 of one component, in canonical order (token, head, byte)."""
    at = np.array([place.offset], dtype=np.int64)
    for extent, stride in place.inner:
        at = (at[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return at


def component_bytes(layout: Layout, buffers: Sequence[Bytes], layer: int, component: int, pages: Ids) -> Bytes:
    """The bytes of one component of some pages, uint8 [n, bytes], a copy."""
    place = layout.placements[layer][component]
    at = byte_offsets(place)[None, :] + pages[:, None] * place.page_stride
    out: Bytes = buffers[place.buffer][at]
    return out


def page_bytes(layout: Layout, buffers: Sequence[Bytes], pages: Ids) -> Bytes:
    """Pages in page-first order, uint8 [n, page_bytes]."""
    parts = [
        component_bytes(layout, buffers, layer, i, pages)
        for layer, components in enumerate(layout.spec.layers)
        for i in range(len(components))
    ]
    return np.concatenate(parts, axis=1)


def put_pages(layout: Layout, buffers: Sequence[Bytes], pages: Ids, rows: Bytes) -> None:
    """The inverse of `page_bytes`. Mutates ``buffers``."""
    start = 0
    for places in layout.placements:
        for place in places:
            at = byte_offsets(place)
            buffers[place.buffer][at[None, :] + pages[:, None] * place.page_stride] = rows[:, start : start + at.size]
            start += at.size


class Guarded:
    """A pool over random bytes, each buffer in the middle of a larger one whose margins nobody may touch."""

    def __init__(
        self,
        rng: np.random.Generator,
        layout: Layout,
        *,
        streams: Sequence[Stream] | None = None,
        name: str = "pool",
    ) -> None:
        self.layout = layout
        self.whole = [torch.from_numpy(random_bytes(rng, n + 2 * GUARD)) for n in layout.buffer_bytes]
        inner = [w[GUARD : GUARD + n] for w, n in zip(self.whole, layout.buffer_bytes, strict=True)]
        self.pool = KVPool(layout, inner, streams=streams, name=name)
        self.buffers: list[Bytes] = [b.numpy() for b in inner]

    def pages(self, pages: Sequence[int] | Ids) -> Bytes:
        """Page-first bytes of some pages: a copy."""
        return page_bytes(self.layout, self.buffers, np.asarray(pages, dtype=np.int64))

    def put(self, pages: Sequence[int] | Ids, rows: Bytes) -> None:
        """Write pages, as a forward pass would."""
        put_pages(self.layout, self.buffers, np.asarray(pages, dtype=np.int64), rows)

    def snapshot(self) -> list[Bytes]:
        """Everything, margins too."""
        return [w.numpy().copy() for w in self.whole]

    def expect(self, before: list[Bytes], pages: Ids, rows: Bytes) -> None:
        """The pool is ``before`` with ``pages`` replaced, and not one byte else."""
        inner = [w[GUARD : w.size - GUARD] for w in before]
        put_pages(self.layout, inner, pages, rows)
        for number, (want, have) in enumerate(zip(before, self.whole, strict=True)):
            bad = np.flatnonzero(want != have.numpy())
            assert bad.size == 0, f"buffer {number}: {bad.size} bytes differ, the first at {bad[0] - GUARD}"


@dataclass
class Rig:
    """A guarded pool, a slab of random bytes, and an engine between them; ``delays`` hold its lanes back."""

    rng: np.random.Generator
    side: Guarded
    host: HostTier
    engine: TransferEngine
    delays: Delays

    @property
    def pool(self) -> KVPool:
        return self.side.pool

    @property
    def spec(self) -> KVSpec:
        return self.side.pool.spec

    def slots(self, slots: Sequence[int] | Ids) -> Bytes:
        """Payloads of some host slots without padding: a copy."""
        return slot_bytes(self.host, slots)

    def fill_slots(self, slots: Sequence[int] | Ids) -> Bytes:
        """New bytes in host slots by way of the engine, so that their digests are known. Returns them."""
        ids = np.asarray(slots, dtype=np.int64)
        rows = random_bytes(self.rng, ids.size, self.spec.page_bytes)
        helper = Guarded(self.rng, Layout.page_first(self.spec, max(1, ids.size)))
        helper.put(np.arange(ids.size), rows)
        with TransferEngine(helper.pool, self.host) as engine:
            engine.store(range(ids.size), ids).result(LIMIT_S)
        return rows

    def close(self) -> None:
        self.engine.close(timeout_s=LIMIT_S)
        self.host.close(wait_s=LIMIT_S)


def slot_bytes(host: HostTier, slots: Sequence[int] | Ids) -> Bytes:
    """Payloads of host slots without padding: a copy."""
    rows = host.payload.numpy().reshape(-1, host.slot_bytes)
    return rows[np.asarray(slots, dtype=np.int64), : host.spec.page_bytes].copy()


def make_host(rng: np.random.Generator, spec: KVSpec, slots: int) -> HostTier:
    """A slab of random bytes, padding included; no slot has digests."""
    host = HostTier(spec, capacity_pages=slots, pin=False, huge_pages=False, threads=1)
    host.payload.copy_(torch.from_numpy(random_bytes(rng, host.payload.numel())))
    return host


def make_rig(
    layout: str = "sglang.layer_first",
    spec: KVSpec = TINY,
    *,
    pages: int = 16,
    slots: int = 16,
    streams: Sequence[Stream] | None = None,
    delays: Delays | None = None,
    rng: np.random.Generator | None = None,
    **engine: Any,
) -> Rig:
    """See `Rig`; further keywords go to the engine."""
    rng = fresh() if rng is None else rng
    delays = Delays() if delays is None else delays
    side = Guarded(rng, Layout.named(layout, spec, pages), streams=streams)
    host = make_host(rng, spec, slots)
    return Rig(rng, side, host, TransferEngine(side.pool, host, delays=delays, **engine), delays)


def small_ring(slot_bytes: int = SLOT_ALIGNMENT) -> StagingRing:
    """`RING_SLOTS` slots of as little as there may be."""
    return StagingRing(torch.device("cpu"), RING_SLOTS * slot_bytes, RING_SLOTS)


def staged(staging_bytes: int | StagingRing | None = None) -> dict[str, Any]:
    """Engine keywords for the staged path over a small ring."""
    return {"path": "staged", "staging_bytes": small_ring() if staging_bytes is None else staging_bytes}


class Steps:
    """A rule for `Delays` that holds back chosen steps of a lane: ``steps.gate("copy_in", 2)`` shuts the third one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._gates: dict[tuple[str, int], threading.Event] = {}

    def gate(self, lane: str, nth: int) -> threading.Event:
        gate = threading.Event()
        self._gates[lane, nth] = gate
        return gate

    def __call__(self, label: str) -> Rule | None:
        nth = self.counts[label]
        self.counts[label] += 1
        return self._gates.get((label, nth))

    def open_all(self) -> None:
        for gate in self._gates.values():
            gate.set()


class Log(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, str]] = []
        self.stages: list[tuple[int, str, tuple[int, int], int]] = []
        self.ended: list[tuple[int, bool]] = []
        self.fallbacks: list[tuple[str, str]] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.waits: list[tuple[int, int]] = []

    def planned(self, transfer: int, direction: str, path: str, pages: int, total_bytes: int) -> None:
        self.plans.append((direction, path))

    def submitted(self, transfer: int, stage: str, layers: tuple[int, int], pages: int, total_bytes: int) -> None:
        self.stages.append((transfer, stage, layers, pages))

    def waited(self, transfer: int, layer: int, host_s: float) -> None:
        self.waits.append((transfer, layer))

    def finished(self, transfer: int, ok: bool, seconds: float, total_bytes: int) -> None:
        self.ended.append((transfer, ok))

    def fell_back(self, what: str, why: str) -> None:
        self.fallbacks.append((what, why))

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append((what, fields))


def write_all_layers(handle: TransferHandle, stream: FifoStream | None = None) -> None:
    """Let every layer of a layer-wise store go, in order."""
    for layer in range(handle.num_layers):
        handle.layer_written(layer, stream)


def gated(lanes: str = "", **engine: Any) -> tuple[Rig, threading.Event]:
    """A rig whose lanes (those that begin with ``lanes``) are shut, and the gate."""
    delays = Delays()
    gate = delays.gate(lanes)
    return make_rig(delays=delays, **engine), gate


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def blocked_handle(rig: Rig) -> tuple[TransferHandle, TransferHandle]:
    """(a layer-wise store that keeps slot 15 busy, a load of it that can't be submitted before the store is)."""
    store = rig.engine.store([15], [15], layerwise=True)
    return store, rig.engine.load([15], [14], layerwise=True)


def break_step(monkeypatch: pytest.MonkeyPatch, rig: Rig, where: str, nth: int) -> None:
    """Make the ``nth`` step of a kind raise, once: "kernel" or "copy"."""
    calls = iter(range(10**9))
    owner, name = (lanes_module, "run_on_cpu") if where == "kernel" else (rig.engine._shop.lanes.copier, "batch")
    real = getattr(owner, name)

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise OSError(f"injected into step {nth}")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, maybe)
