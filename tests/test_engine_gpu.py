"""The engine on a GPU: every path byte for byte, ids in GPU tensors, cancel, deadlines, big pools."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_helpers import Rig, make_rig, shuffled, spin

from kvtransfer.engine import TransferEngine
from kvtransfer.handles import PageState
from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, LayoutError, TransferCancelled, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.staging import SLOTS
from kvtransfer.tiers.host import HostTier

pytestmark = pytest.mark.gpu

HYBRID = KVSpec(
    5,
    (
        (Component("k", 3, 48), Component("v", 3, 26)),
        (Component("state", 1, 1000, per_page=True),),
        (Component("latent", 1, 656), Component("index", 1, 132)),
    ),
)
SPECS = {
    "gqa-16": KVSpec.attention(6, 16, 8, 128, 2),
    "gqa-1": KVSpec.attention(6, 1, 8, 128, 2),
    "gqa-3-odd": KVSpec.attention(3, 3, 3, 13, 1),
    "mla-576": KVSpec.mla(5, 1, 576),
    "mla-656": KVSpec.mla(5, 64, 656),
    "one-head": KVSpec.attention(4, 1, 1, 128, 2),
}
LAYOUTS = ["sglang.layer_first", "vllm.LBHNC", "vllm.BLNHC", "vllm.BHLNC", "transformers", "page_first"]


def round_trip(rig: Rig, path: str | None, layerwise: bool, seed: int) -> None:
    count = 37
    pages, slots = shuffled(count, rig.pool.num_pages, seed), shuffled(count, rig.host.num_slots, seed + 1)
    want = rig.page_first(pages)
    padding = rig.host.payload.clone()
    before = [w.clone() for w in rig.whole]
    store = rig.engine.store(pages, slots, path=path, layerwise=layerwise and path != "mapped")
    if layerwise and path != "mapped":
        for layer in range(rig.pool.spec.num_layers):
            store.layer_written(layer)
    store.result(20)
    assert torch.equal(rig.slots(slots), want)
    others = np.setdiff1d(np.arange(rig.host.num_slots), slots)
    rows = rig.host.payload.view(-1, rig.host.slot_bytes)
    assert torch.equal(rows[others], padding.view(-1, rig.host.slot_bytes)[others])
    assert torch.equal(
        rows[:, rig.pool.spec.page_bytes :], padding.view(-1, rig.host.slot_bytes)[:, rig.pool.spec.page_bytes :]
    )
    assert all(torch.equal(a, b) for a, b in zip(before, rig.whole, strict=True)), "a store wrote to the pool"

    into = shuffled(count, rig.pool.num_pages, seed + 2)
    untouched = np.setdiff1d(np.arange(rig.pool.num_pages), into)
    rest = rig.page_first(untouched)
    load = rig.engine.load(slots, into, path=path, layerwise=layerwise)
    for layer in range(rig.pool.spec.num_layers):
        load.wait_layer(layer)
    got = rig.page_first(into)  # in stream order behind the waits, before result()
    assert torch.equal(got, want)
    assert load.verdict(20).ok and not load.verdict().unverified_pages
    load.result(20)
    assert torch.equal(rig.page_first(untouched), rest)
    for buffer, guarded, old in zip(rig.pool.buffers, rig.whole, before, strict=True):
        n = buffer.numel()
        assert torch.equal(guarded[:256], old[:256]) and torch.equal(guarded[256 + n :], old[256 + n :])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_every_path_is_exact(layout: str, name: str) -> None:
    rig = make_rig(layout, SPECS[name], pages=97, slots=61)
    try:
        for nth, path in enumerate((None, "staged", "mapped", "strided")):
            for layerwise in (False, True):
                round_trip(rig, path, layerwise, seed=100 * nth + layerwise)
    finally:
        rig.close()


def test_hybrid_layers_and_odd_widths() -> None:
    rig = make_rig("sglang.layer_first", HYBRID, pages=50, slots=41)
    try:
        for nth, path in enumerate((None, "staged", "mapped", "strided")):
            for layerwise in (False, True):
                round_trip(rig, path, layerwise, seed=7 * nth + layerwise)
    finally:
        rig.close()


def test_a_page_larger_than_a_ring_slot() -> None:
    spec = KVSpec.attention(3, 64, 8, 128, 2)  # 256 KiB a layer and page
    for slot_kib in (512, 200, 36):  # two layers, a part of one, eight tokens of one
        rig = make_rig("sglang.layer_first", spec, pages=61, slots=44, staging_bytes=SLOTS * slot_kib * 1024)
        try:
            round_trip(rig, "staged", False, seed=slot_kib)
            round_trip(rig, "staged", True, seed=slot_kib + 1)
        finally:
            rig.close()


def test_runs_and_registration_boundaries() -> None:
    """Contiguous ids on both sides: merged and strided copies, cut where registrations of the slab meet."""
    spec = KVSpec.attention(4, 16, 8, 128, 2)  # 256 KiB a page
    for path in ("staged", "strided", "mapped"):
        rig = make_rig("sglang.layer_first", spec, pages=96, slots=80, chunk_bytes=3 * 256 * 1024, path=path)
        try:
            pages, slots = np.arange(10, 80), np.arange(4, 74)
            want = rig.page_first(pages)
            rig.engine.store(pages, slots).result(20)
            assert torch.equal(rig.slots(slots), want)
            load = rig.engine.load(slots, pages + 16)
            load.result(20)
            assert torch.equal(rig.page_first(pages + 16), want)
        finally:
            rig.close()


def test_long_runs_over_many_registrations() -> None:
    """More pages than a chunk holds, contiguous, in a slab whose registrations end within runs of every chunk."""
    spec = KVSpec.attention(2, 16, 1, 128, 2)  # 16 KiB a page
    rig = make_rig("page_first", spec, pages=420, slots=410, chunk_bytes=37 * 16 * 1024, path="strided")
    try:
        pages, slots = np.arange(15, 415), np.arange(5, 405)
        want = rig.page_first(pages)
        rig.engine.store(pages, slots).result(20)
        assert torch.equal(rig.slots(slots), want)
        into = pages - 11
        load = rig.engine.load(slots, into)
        load.result(20)
        assert torch.equal(rig.page_first(into), want) and load.verdict().ok
    finally:
        rig.close()


def test_the_flags_of_a_second_load_do_not_pass_early() -> None:
    """Two mapped loads behind a busy stream: the second one's flags are new memory, and must be zero when looked at."""
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPECS["gqa-1"], pages=64, slots=64, streams=[writer, reader], path="mapped")
    try:
        loads, new = [], rig.fill_slots(np.arange(64))
        for _ in range(40):  # more at once than flag sets are made at a time
            torch.full((4096,), 2**30, dtype=torch.int32, device="cuda")  # memory that would pass for raised flags
        torch.cuda.synchronize()
        spin(writer, 250)
        for i in range(40):
            loads.append(rig.engine.load([i], [i], layerwise=True))
            loads[-1].wait_layer(5, reader)
        passed = torch.cuda.Event()
        passed.record(reader)
        assert not passed.query(), "the flags let a stream go before the loads began"
        with torch.cuda.stream(reader):
            got = rig.page_first(np.arange(40))
        assert torch.equal(got, new[:40])
        for load in loads:
            load.result(20)
    finally:
        rig.close()


def test_a_launch_that_fails_leaves_its_flags_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtransfer.kernels import mapped

    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPECS["gqa-1"], pages=64, slots=64, streams=[stream], path="mapped")
    try:
        rig.fill_slots(np.arange(8))
        with monkeypatch.context() as patch:
            patch.setattr(mapped, "mapped_copy", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no launch")))
            with pytest.raises(TransferError, match="no launch"):
                rig.engine.load([1, 2], [3, 4], layerwise=True).result(10)
        for _ in range(40):
            new = rig.fill_slots(np.arange(8))
            load = rig.engine.load(np.arange(8), np.arange(8), layerwise=True)
            for layer in range(rig.pool.spec.num_layers):
                load.wait_layer(layer, stream)
            with torch.cuda.stream(stream):
                got = rig.page_first(np.arange(8))
            assert torch.equal(got, new)
            load.result(10)
    finally:
        rig.close()


def test_a_new_pool_is_not_blanked_after_a_load() -> None:
    """The zeros of a new pool are behind it, whatever stream they were enqueued on."""
    spec, mine = SPECS["gqa-16"], torch.cuda.Stream()
    host = HostTier(spec, capacity_pages=8, device="cuda")
    host.payload.random_(0, 256)
    spin(torch.cuda.current_stream(), 50)
    pool = KVPool.allocate("page_first", spec=spec, num_pages=8, device="cuda", streams=[mine])
    engine = TransferEngine(pool, host, staging_bytes=12 << 20)
    engine.load(range(8), range(8)).result(10)
    torch.cuda.synchronize()
    want = host.payload.view(8, -1)[:, : spec.page_bytes]
    assert torch.equal(pool.buffers[0].cpu().view(8, -1), want)
    engine.close()
    host.close()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("path", ["staged", "mapped"])
def test_page_ids_in_gpu_tensors(dtype: torch.dtype, path: str) -> None:
    rig = make_rig("sglang.layer_first", SPECS["gqa-16"], pages=64, slots=64, path=path)
    try:
        pages, slots = shuffled(20, 64, 1), shuffled(20, 64, 2)
        ids = torch.from_numpy(pages).to("cuda", dtype)
        want = rig.page_first(pages)
        rig.engine.store(ids, slots).result(20)
        assert torch.equal(rig.slots(slots), want)
        into = shuffled(20, 64, 3)
        gpu_into = torch.from_numpy(into).to("cuda", dtype)
        load = rig.engine.load(slots, gpu_into)
        gpu_into.fill_(0)  # the caller may change its tensor at once
        load.wait_all()
        assert torch.equal(rig.page_first(into), want)
        load.result(20)

        for bad, word in ((64, "outside"), (-1, "outside"), (int(pages[3]), "second time")):
            wrong = torch.from_numpy(pages).to("cuda", dtype)
            wrong[7] = bad
            slab, pool = rig.host.payload.clone(), [w.clone() for w in rig.whole]
            for handle in (rig.engine.store(wrong, slots), rig.engine.load(slots, wrong)):
                with pytest.raises(LayoutError, match=word):
                    handle.result(20)
                assert (handle.states() == PageState.UNTOUCHED).all()
            assert torch.equal(slab, rig.host.payload)
            assert all(torch.equal(a, b) for a, b in zip(pool, rig.whole, strict=True))
    finally:
        rig.close()


def test_bad_ids_on_the_cpu_raise_at_the_call() -> None:
    rig = make_rig("sglang.layer_first", SPECS["gqa-16"], pages=16, slots=16)
    try:
        calls: tuple[Callable[[], object], ...] = (
            lambda: rig.engine.load([0, 1], [3, 16]),
            lambda: rig.engine.load([0, 1], [3, 3]),
            lambda: rig.engine.store([0, 1], [5, 5]),
            lambda: rig.engine.store([0, 1], [5, 16]),
            lambda: rig.engine.load([0, 1], torch.zeros(2, 2, dtype=torch.int64, device="cuda")),
        )
        for call in calls:
            with pytest.raises(LayoutError, match="expected"):
                call()
    finally:
        rig.close()


def test_a_flipped_bit_is_named() -> None:
    for path in ("staged", "mapped", "strided"):
        rig = make_rig("sglang.layer_first", SPECS["gqa-16"], pages=32, slots=32, path=path)
        try:
            pages, slots = shuffled(9, 32, 1), shuffled(9, 32, 2)
            rig.engine.store(pages, slots).result(20)
            spec = rig.pool.spec
            at = int(slots[4]) * rig.host.slot_bytes + spec.layer_offsets[3] + 777
            rig.host.payload[at] ^= 16
            load = rig.engine.load(slots, pages, layerwise=True)
            verdict = load.verdict(20)
            assert not verdict.ok and verdict.bad_pages == (4,) and verdict.bad_layers == ((4, 3),)
            with pytest.raises(TransferError, match="do not verify") as caught:
                load.result(20)
            assert caught.value.pages == (4,)
            assert load.states()[4] == PageState.INVALID and (np.delete(load.states(), 4) == PageState.DONE).all()
        finally:
            rig.close()


def test_cancel_and_deadline_leave_exact_states() -> None:
    stream = torch.cuda.Stream()
    rig = make_rig(
        "sglang.layer_first",
        SPECS["gqa-16"],
        pages=64,
        slots=64,
        streams=[stream],
        staging_bytes=6 << 20,
        path="staged",
    )
    try:
        pages, slots = shuffled(40, 64, 1), shuffled(40, 64, 2)
        new = rig.fill_slots(slots)
        old = rig.page_first(pages)
        spin(stream, 200)
        load = rig.engine.load(slots, pages)
        time.sleep(0.02)
        assert not load.done() and load.cancel()
        with pytest.raises(TransferCancelled):
            load.result(20)
        states, got = load.states(), rig.page_first(pages)
        assert (states == PageState.UNTOUCHED).any() and (states == PageState.DONE).any()
        for i, state in enumerate(states.tolist()):
            if state != PageState.INVALID:
                assert torch.equal(got[i], new[i] if state == PageState.DONE else old[i])

        for path in ("staged", "mapped"):
            spin(stream, 400)
            load = rig.engine.load(slots, pages, deadline_s=0.05, path=path, layerwise=True)
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                load.result(5)
            assert time.monotonic() - started < 0.3
            assert rig.pool.ledger.busy(pages).all(), "still in flight: the pages stay owned"
            assert rig.pool.ledger.wait_free(pages, 5)
        rig.engine.load(slots, pages).result(20)
        stream.synchronize()
        assert torch.equal(rig.page_first(pages), new)
    finally:
        rig.close()


def test_the_deadline_lets_a_waiting_stream_go() -> None:
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPECS["gqa-1"], pages=64, slots=64, streams=[writer, reader], path="mapped")
    try:
        pages, slots = shuffled(40, 64, 1), shuffled(40, 64, 2)
        rig.fill_slots(slots)
        spin(writer, 1500)
        load = rig.engine.load(slots, pages, deadline_s=0.1, layerwise=True)
        load.wait_layer(0, reader)
        started = time.monotonic()
        reader.synchronize()
        assert time.monotonic() - started < 1.0, "the flags were not raised at the deadline"
        with pytest.raises(DeadlineExceeded):
            load.result(5)
        assert rig.pool.ledger.wait_free(pages, 10)
        for _ in range(3):  # later loads are not let go by what was forced
            new = rig.fill_slots(slots)
            spin(writer, 20)
            load = rig.engine.load(slots, pages, layerwise=True)
            with torch.cuda.stream(reader):
                for layer in range(rig.pool.spec.num_layers):
                    load.wait_layer(layer)
                got = rig.page_first(pages)
            assert torch.equal(got, new)
            load.result(10)
    finally:
        rig.close()


def test_undeclared_streams_and_captures_are_refused() -> None:
    stream = torch.cuda.Stream()
    rig = make_rig("sglang.layer_first", SPECS["gqa-16"], pages=16, slots=16, streams=[stream])
    try:
        rig.fill_slots(np.arange(4))
        load = rig.engine.load([0, 1], [2, 3], layerwise=True)
        with pytest.raises(TransferError, match="declare_stream"):
            load.wait_layer(0)  # the current stream was never declared
        load.wait_layer(0, stream)
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph, stream=stream):
            x.add_(1)
            with pytest.raises(TransferError, match="wait_all"):
                load.wait_layer(1)
            with pytest.raises(TransferError, match="before the capture"):
                rig.engine.load([0, 1], [2, 3])
        graph.replay()
        torch.cuda.synchronize()
        assert float(x[0]) == 1.0
        load.result(10)
    finally:
        rig.close()


def test_device_copies_between_pools() -> None:
    spec = SPECS["gqa-16"]
    rig = make_rig("sglang.layer_first", spec, pages=40, slots=4)
    try:
        for name in ("vllm.BHLNC", "vllm.LBNHC", "page_first"):
            other = make_rig(name, spec, pages=30, slots=4)
            source, into = shuffled(21, 40, 1), shuffled(21, 30, 2)
            want = rig.page_first(source)
            handle = rig.engine.copy(source, other.pool, into)
            handle.wait_all()
            assert torch.equal(other.page_first(into), want)
            assert handle.result(10).path == "device"
            other.close()
    finally:
        rig.close()


def test_no_ring_and_no_pinning_fall_back() -> None:
    spec = SPECS["gqa-16"]
    rig = make_rig("sglang.layer_first", spec, pages=40, slots=40, staging_bytes=0)
    try:
        assert rig.engine.plan("load", [0], [0]).path in ("mapped", "strided")
        round_trip(rig, None, False, 3)
    finally:
        rig.close()
    pool = KVPool.allocate("sglang.layer_first", spec=spec, num_pages=8, device="cuda")
    host = HostTier(spec, capacity_pages=8, pin=False)
    engine = TransferEngine(pool, host, staging_bytes=6 << 20)
    assert engine.plan("load", [0], [0]).path in ("staged", "strided")
    with pytest.raises(ConfigError, match="not pinned"):
        engine.load([0], [0], path="mapped")
    host.payload.random_(0, 256)
    engine.load([3], [5]).result(10)
    assert int(pool.view(0, 0, torch.uint8)[5].flatten()[0]) == int(host.payload[3 * host.slot_bytes])
    engine.close()


def test_transfers_from_many_threads() -> None:
    spec = SPECS["gqa-16"]
    rig = make_rig("sglang.layer_first", spec, pages=256, slots=256)
    failures: list[str] = []

    def work(part: int) -> None:
        pages, slots = np.arange(32) + 32 * part, np.arange(32) + 32 * part
        rng = np.random.default_rng(part)
        for _ in range(6):
            order = rng.permutation(32)
            want = rig.page_first(pages)
            rig.engine.store(pages, slots[order]).result(30)
            back = rig.engine.load(slots[order], pages[::-1].copy())
            back.result(30)
            if not torch.equal(rig.page_first(pages[::-1].copy()), want):
                failures.append(f"thread {part}")

    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not failures
    finally:
        rig.close()


def test_pool_and_slab_above_4_gib_are_exact_at_their_ends() -> None:
    """Byte offsets pass 2**32 on both sides; pages at the start, around 2 and 4 GiB, and at the end."""
    spec = KVSpec.attention(2, 16, 8, 128, 2)  # 128 KiB a page
    pages = (5 << 30) // spec.page_bytes + 3
    pool = KVPool.allocate(Layout.named("vllm.LBNHC", spec, pages), device="cuda")  # one buffer of 5 GiB
    host = HostTier(spec, capacity_pages=pages, device="cuda")
    engine = TransferEngine(pool, host, staging_bytes=24 << 20)
    try:
        gib = (1 << 30) // spec.page_bytes
        near = sorted({0, 1, *(k * gib + d for k in (1, 2, 4) for d in (-1, 0, 1)), pages - 2, pages - 1})
        near += [k * gib // 2 + d for k in (4, 8) for d in (-1, 0, 1) if k * gib // 2 + d not in near]
        ids = np.asarray(near, dtype=np.int64)
        slots = ids[::-1].copy()
        k, v = pool.view(1, "k", torch.int64), pool.view(1, "v", torch.int64)
        for path in ("staged", "mapped", "strided"):
            k[ids] = torch.randint(-(2**62), 2**62, k[ids].shape, device="cuda")
            v[ids] = torch.randint(-(2**62), 2**62, v[ids].shape, device="cuda")
            want_k, want_v = k[ids].clone(), v[ids].clone()
            engine.store(ids, slots, path=path).result(60)
            k[ids], v[ids] = 0, 0
            engine.load(slots, ids, path=path).result(60)
            assert torch.equal(k[ids], want_k) and torch.equal(v[ids], want_v), path
    finally:
        engine.close()
        host.close()


@pytest.mark.parametrize(
    "end", ["sys.exit(3)", "raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"]
)
def test_a_process_may_end_with_transfers_on_their_way(end: str) -> None:
    """Python ends daemon threads where they stand: in the middle of PyTorch's C++ that aborts the process."""
    here = Path(__file__).parent
    text = f"""
import os, signal, sys, time
sys.path[:0] = {[str(here.parent), str(here)]!r}
import numpy as np, torch
from gpu_helpers import make_rig, spin
from kvtransfer.kernels.spec import KVSpec
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
stream = torch.cuda.Stream()
rig = make_rig("sglang.layer_first", KVSpec.attention(9, 16, 8, 128, 2), pages=400, slots=400, streams=[stream])
spin(stream, 300)
under_way = [rig.engine.load(np.arange(200), np.arange(200), layerwise=bool(i % 2)) for i in range(6)]
under_way.append(rig.engine.store(np.arange(200, 400), np.arange(200, 400)))
{end}
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in ((3,) if "exit" in end else (-2, 130)), done.stderr[-2000:]
    assert "terminate called" not in done.stderr
