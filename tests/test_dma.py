"""The copy engine against a fake driver: a small C library with the entry points of libcuda, moving host memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_helpers import FakeDriver, build_driver
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import dma
from kvtransfer.dma import U64, CopyEngine, TorchCopyEngine, merge_runs
from kvtransfer.kernels.errors import ConfigError, CudaError, LayoutError, TransferError
from kvtransfer.kernels.events import Observer

STREAM, OTHER_GPU, CAPTURING = 0x1000, 0x2000, 0x3000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(built: FakeDriver) -> Iterator[FakeDriver]:
    built.library.fake_reset()
    yield built
    assert built.library.fake_depth() == 0, "a context was pushed and not popped"


@pytest.fixture(params=[12080, 13000])
def engine(fake: FakeDriver, request: pytest.FixtureRequest) -> CopyEngine:
    return CopyEngine(library=fake.path, batch_version=request.param)


def u64(*values: int) -> U64:
    return np.array(values, dtype=np.uint64)


def pieces(buffer_dst: U64 | Any, buffer_src: Any, seed: int, n: int) -> tuple[U64, U64, U64]:
    """Random pieces of odd sizes: disjoint in dst, anywhere in src."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, buffer_dst.size), 2 * n, replace=False)).astype(np.uint64)
    sizes = cuts[1::2] - cuts[::2]
    starts = (rng.random(n) * (buffer_src.size - sizes.astype(np.int64))).astype(np.uint64)
    order = rng.permutation(n)
    dst = np.uint64(buffer_dst.ctypes.data) + cuts[::2]
    return dst[order], (np.uint64(buffer_src.ctypes.data) + starts)[order], sizes[order]


def expected(buffer_dst: Any, buffer_src: Any, dst: U64, src: U64, sizes: U64) -> Any:
    want = buffer_dst.copy()
    for d, s, n in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
        d, s = d - buffer_dst.ctypes.data, s - buffer_src.ctypes.data
        want[d : d + n] = buffer_src[s : s + n]
    return want


def naive_merge(rows: list[tuple[int, int, int]], boundaries: list[int]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    previous = (0, 0)
    for d, s, n in rows:
        if out:
            pd, ps, pn = out[-1]
            crossed = any(previous[0] < b <= d or previous[1] < b <= s for b in boundaries)
            if pd + pn == d and ps + pn == s and not crossed:
                out[-1] = (pd, ps, pn + n)
                previous = (d, s)
                continue
        out.append((d, s, n))
        previous = (d, s)
    return out


@st.composite
def descriptors(draw: Any) -> list[tuple[int, int, int]]:
    """Runs with chance neighbours on one side, on both, or on none."""
    rows: list[tuple[int, int, int]] = []
    for size in draw(st.lists(st.integers(1, 4), max_size=24)):
        if rows and draw(st.integers(0, 3)):
            d, s, n = rows[-1]
            kind = draw(st.sampled_from(["both", "both", "dst", "src"]))
            d = d + n if kind != "src" else draw(st.integers(0, 60))
            s = s + n if kind != "dst" else draw(st.integers(0, 60))
            rows.append((d, s, size))
        else:
            rows.append((draw(st.integers(0, 60)), draw(st.integers(0, 60)), size))
    return rows


@settings(max_examples=200, deadline=None)
@given(descriptors(), st.lists(st.integers(0, 80), max_size=4))
def test_merge_runs_equals_the_naive_loop(rows: list[tuple[int, int, int]], boundaries: list[int]) -> None:
    columns = [np.array([row[i] for row in rows], dtype=np.uint64) for i in range(3)]
    before = [column.copy() for column in columns]
    merged = merge_runs(columns[0], columns[1], columns[2], np.array(sorted(boundaries), dtype=np.uint64))
    got = list(zip(*(m.tolist() for m in merged), strict=True))
    assert got == naive_merge(rows, boundaries)
    assert all(m.dtype == np.uint64 and m.flags.c_contiguous for m in merged)
    assert all(np.array_equal(a, b) for a, b in zip(before, columns, strict=True))
    if not boundaries:
        assert got == list(zip(*(m.tolist() for m in merge_runs(*columns)), strict=True))


def test_merge_runs_beyond_4_gib_and_at_the_edges() -> None:
    step = 3 << 30
    dst = u64(*(i * step for i in range(4)))
    merged = merge_runs(dst, dst + np.uint64(7), np.full(4, step, dtype=np.uint64))
    assert [m.tolist() for m in merged] == [[0], [7], [4 * step]]
    assert merge_runs(u64(), u64(), u64())[2].size == 0
    assert merge_runs(u64(5), u64(6), u64(7))[2].tolist() == [7]
    halves = merge_runs(dst, dst, np.full(4, step, dtype=np.uint64), boundaries=u64(0, 2 * step))
    assert halves[2].tolist() == [2 * step, 2 * step]


def test_structures_have_the_c_layout(built: FakeDriver) -> None:
    library = built.library
    assert ctypes.sizeof(dma._Attributes) == library.attributes_size() == 24
    assert dma._Attributes.flags.offset == library.attributes_flags() == 20
    assert ctypes.sizeof(dma._Copy2D) == library.copy2d_size() == 128
    assert dma._Copy2D.src_device.offset == library.copy2d_src_device() == 32
    assert dma._Copy2D.dst_device.offset == library.copy2d_dst_device() == 88
    assert dma._Copy2D.height.offset == library.copy2d_height() == 120


@pytest.mark.parametrize("n", [1, 2, 17, 700])
def test_batch_moves_exact_bytes(engine: CopyEngine, fake: FakeDriver, n: int) -> None:
    src = np.random.default_rng(1).integers(0, 256, 20_011, dtype=np.uint8)
    dst = np.full(20_011, 0xAB, dtype=np.uint8)
    lists = pieces(dst, src, n, n)
    want, copies = expected(dst, src, *lists), [a.copy() for a in lists]
    engine.batch(*lists, STREAM)
    bad = np.flatnonzero(dst != want)
    assert not bad.size, f"first difference at byte {bad[0]}"
    assert all(np.array_equal(a, b) for a, b in zip(lists, copies, strict=True))
    assert fake.seen("abi") == engine.batch_version
    assert (fake.seen("count"), fake.seen("stream")) == (n, STREAM)


def test_attributes(engine: CopyEngine, fake: FakeDriver) -> None:
    a, b = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    lists = u64(a.ctypes.data), u64(b.ctypes.data), u64(8)
    engine.batch(*lists, STREAM)
    assert (fake.seen("order"), fake.seen("flags"), fake.seen("hints")) == (1, 1, 0)
    assert (fake.seen("num_attrs"), fake.seen("first")) == (1, 0)
    engine.batch(*lists, STREAM, any_order=True)
    assert fake.seen("order") == 3


def test_entry_points_are_asked_for_by_version(fake: FakeDriver) -> None:
    assert CopyEngine(library=fake.path).batch_version == 13000
    asked = fake.asked()
    assert "cuStreamWaitValue32:11070" in asked and "cuStreamWriteValue32:11070" in asked  # the _v2 forms
    assert "cuStreamGetCtx:9020" in asked and "cuMemcpy2DAsync:3020" in asked
    assert "cuMemcpyBatchAsync:13000" in asked and "cuMemcpyBatchAsync:12080" not in asked


def test_newest_version_the_driver_has(fake: FakeDriver) -> None:
    fake.set("fake_version", 12090)
    assert CopyEngine(library=fake.path).batch_version == 12080
    with pytest.raises(ConfigError, match="13000"):
        CopyEngine(library=fake.path, batch_version=13000)
    with pytest.raises(ConfigError, match="13000"):
        CopyEngine.create(library=fake.path, batch_version=13000)
    with pytest.raises(ConfigError, match=r"12080, 13000.*got 12090"):
        CopyEngine(library=fake.path, batch_version=12090)


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_stream_is_refused(engine: CopyEngine, fake: FakeDriver, stream: int) -> None:
    a = np.zeros(8, np.uint8)
    with pytest.raises(TransferError, match=r"legacy default stream.*torch\.cuda\.Stream"):
        engine.batch(u64(a.ctypes.data), u64(a.ctypes.data), u64(8), stream)
    assert fake.seen("calls") == 0


def test_a_stream_under_capture_is_refused(engine: CopyEngine, fake: FakeDriver) -> None:
    a = np.zeros(64, np.uint8)
    address = a.ctypes.data // 4 * 4 + 4
    calls: list[Callable[[], None]] = [
        lambda: engine.batch(u64(address), u64(address), u64(8), CAPTURING),
        lambda: engine.copy_2d(address, 8, address, 8, 8, 1, CAPTURING),
        lambda: engine.wait_value(CAPTURING, address, 1),
        lambda: engine.write_value(CAPTURING, address, 1),
    ]
    for call in calls:
        with pytest.raises(TransferError, match=r"handle\.wait_all"):
            call()
        assert fake.library.fake_depth() == 0
    assert fake.seen("calls") == 0 and not a.any()
    assert engine.stream_is_capturing(CAPTURING) and not engine.stream_is_capturing(STREAM)


def bad_lists() -> list[tuple[Any, Any, Any, str]]:
    good = u64(1, 2)
    return [
        (good.astype(np.int64), good, good, "dst: .*int64"),
        (good, [1, 2], good, "src: .*list"),
        (good, good, np.ones((2, 1), np.uint64), "sizes: .*shape"),
        (good, np.ones(4, np.uint64)[::2], good, "src: .*contiguous.*strides"),
        (good, good, u64(1), "one length.*2, 2 and 1"),
        (good, good, u64(1, 0), "sizes: .*got 0 at index 1"),
        (torch.zeros(2, dtype=torch.int64), good, good, "dst: .*Tensor"),
    ]


@pytest.mark.parametrize(("dst", "src", "sizes", "message"), bad_lists())
def test_bad_arrays_are_refused(
    engine: CopyEngine, fake: FakeDriver, dst: Any, src: Any, sizes: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        engine.batch(dst, src, sizes, STREAM)
    with pytest.raises(LayoutError, match=message):
        TorchCopyEngine().batch(dst, src, sizes, STREAM)
    assert fake.seen("calls") == 0


def test_nothing_to_do_calls_nothing(engine: CopyEngine, fake: FakeDriver) -> None:
    engine.batch(u64(), u64(), u64(), STREAM)
    engine.copy_2d(0, 8, 0, 8, 8, 0, STREAM)
    assert fake.seen("calls") == 0


def test_driver_errors(engine: CopyEngine, fake: FakeDriver) -> None:
    a = np.zeros(64, np.uint8)
    address = a.ctypes.data // 4 * 4 + 4
    lists = u64(address, address + 8), u64(address, address), u64(8, 5)
    fake.set("fake_code", 1)
    fake.set("fake_fail_index", 1)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_VALUE.*invalid argument") as caught:
        engine.batch(*lists, STREAM)
    assert caught.value.code == 1
    assert (f"piece 1: dst {address + 8:#x}" in str(caught.value)) == (engine.batch_version == 12080)
    fake.set("fake_fail_index", -1)  # SIZE_MAX: no piece in particular
    with pytest.raises(CudaError, match=r"2 pieces, stream 0x1000$"):
        engine.batch(*lists, STREAM)
    fake.set("fake_code", 4321)
    with pytest.raises(CudaError, match="4321 unknown error"):
        engine.batch(*lists, STREAM)
    with pytest.raises(CudaError, match=r"cuMemcpy2DAsync returned 4321.*3 rows of 4 bytes"):
        engine.copy_2d(address, 8, address, 8, 4, 3, STREAM)
    with pytest.raises(CudaError, match="cuStreamWaitValue32"):
        engine.wait_value(STREAM, address, 1)
    with pytest.raises(CudaError, match="cuStreamWriteValue32"):
        engine.write_value(STREAM, address, 1)
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer"):
        engine.host_device_pointer(address)
    fake.set("fake_code", 0)
    fake.set("fake_context_code", 709)
    with pytest.raises(CudaError, match="cuStreamGetCtx returned 709"):
        engine.batch(*lists, STREAM)


def test_the_streams_context_is_current_during_the_call(engine: CopyEngine, fake: FakeDriver) -> None:
    a, b = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    lists = u64(a.ctypes.data), u64(b.ctypes.data), u64(8)
    for stream, context in ((STREAM, 0xA), (OTHER_GPU, 0xB)):
        engine.batch(*lists, stream)  # from a thread without a context
        assert fake.seen("context") == context
    done = []

    def body() -> None:
        for stream, context in ((STREAM, 0xA), (OTHER_GPU, 0xB)):
            engine.must("cuCtxPushCurrent", 0xA)
            engine.batch(*lists, stream)
            done.append((fake.seen("context") == context, fake.library.fake_depth()))
            engine.must("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [(True, 1), (True, 1)]


def test_copy_2d(engine: CopyEngine, fake: FakeDriver) -> None:
    src = np.random.default_rng(2).integers(0, 256, (7, 33), dtype=np.uint8)
    dst = np.full((7, 41), 0xAB, dtype=np.uint8)
    engine.copy_2d(dst.ctypes.data + 3, 41, src.ctypes.data + 1, 33, 29, 7, STREAM)
    assert np.array_equal(dst[:, 3:32], src[:, 1:30])
    assert (dst[:, :3] == 0xAB).all() and (dst[:, 32:] == 0xAB).all()
    for bad in ((28, 33, 29, 7), (41, 28, 29, 7), (41, 33, 0, 7), (41, 33, 29, -1), (2**31, 33, 29, 7)):
        with pytest.raises(LayoutError, match="copy_2d: expected"):
            engine.copy_2d(dst.ctypes.data, bad[0], src.ctypes.data, *bad[1:], STREAM)
    assert fake.seen("calls") == 1


def test_flags_and_aliases(engine: CopyEngine, fake: FakeDriver) -> None:
    flag = np.zeros(1, dtype=np.uint32)
    engine.write_value(STREAM, flag.ctypes.data, 2**32 - 1)
    assert flag[0] == 2**32 - 1 and fake.seen("mem_flags") == 0
    engine.wait_value(OTHER_GPU, flag.ctypes.data, 77)
    assert (fake.seen("stream"), fake.seen("address"), fake.seen("value")) == (OTHER_GPU, flag.ctypes.data, 77)
    assert fake.seen("mem_flags") == 0  # GEQ, the cyclic compare
    for address, value in ((flag.ctypes.data + 2, 1), (flag.ctypes.data, -1), (flag.ctypes.data, 2**32)):
        for call in (engine.wait_value, engine.write_value):
            with pytest.raises(LayoutError, match="4-byte aligned"):
                call(STREAM, address, value)
    assert engine.host_device_pointer(0x5000) == 0x105000
    assert engine.supports_flags


def test_short_batches_keep_the_gil_and_long_ones_release_it(fake: FakeDriver) -> None:
    engine = CopyEngine(library=fake.path, keep_gil_below=3)
    fake.set("fake_sleep_us", 100_000)
    a = np.zeros(64, np.uint8)
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    moved = []
    try:
        for n in (2, 3):
            address = a.ctypes.data + np.arange(n, dtype=np.uint64)
            lists = address, address, np.ones(n, dtype=np.uint64)
            before = ticks[0]
            engine.batch(*lists, STREAM)
            moved.append(ticks[0] - before)
    finally:
        stop.set()
        thread.join()
    assert moved[0] <= 2 and moved[1] >= 10


def test_many_threads(engine: CopyEngine) -> None:
    src = np.random.default_rng(3).integers(0, 256, 9_001, dtype=np.uint8)
    outcomes: list[bool] = []

    def body(seed: int) -> None:
        for round_ in range(20):
            dst = np.zeros(9_001, np.uint8)
            lists = pieces(dst, src, seed * 100 + round_, 50)
            want = expected(dst, src, *lists)
            engine.batch(*lists, OTHER_GPU if seed % 2 else STREAM)
            outcomes.append(np.array_equal(dst, want))

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 80 and all(outcomes)


class Told(Observer):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def fell_back(self, what: str, why: str) -> None:
        self.lines.append((what, why))


@pytest.mark.parametrize("case", ["no library", "init fails", "too old", "symbol missing", "no cuGetProcAddress_v2"])
def test_without_a_usable_driver_torch_copies(fake: FakeDriver, tmp_path: Path, case: str) -> None:
    library = fake.path
    if case == "no library":
        library = tmp_path / "libcuda.so.1"
    elif case == "init fails":
        fake.set("fake_init_code", 100)
    elif case == "too old":
        fake.set("fake_version", 12040)
    elif case == "symbol missing":
        fake.set("fake_missing", b"cuStreamWaitValue32")
    else:
        library = tmp_path / "old.so"
        source = tmp_path / "old.c"
        source.write_text("int cuInit(unsigned f) { return (int)f; }")
        subprocess.run([shutil.which("cc") or "gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(ConfigError, match="driver"):
        CopyEngine(library=library)
    told = Told()
    with pytest.warns(RuntimeWarning, match="one by one through torch") as warned:
        engine = CopyEngine.create(library=library, observer=told)
    assert isinstance(engine, TorchCopyEngine) and len(warned) == 1
    assert [what for what, _ in told.lines] == ["copy engine"]
    a, b = np.zeros(8, np.uint8), np.arange(8, dtype=np.uint8)
    engine.register(a)
    engine.register(b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.batch(u64(a.ctypes.data), u64(b.ctypes.data), u64(8), 0)
    assert np.array_equal(a, b)


def test_causes_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1 of CUDA 12\.8") as caught:
        CopyEngine(library=tmp_path / "nothing.so")
    assert isinstance(caught.value.__cause__, OSError)


def test_create(fake: FakeDriver) -> None:
    engine = CopyEngine.create(library=fake.path, batch_version=12080, keep_gil_below=9)
    assert isinstance(engine, CopyEngine) and (engine.batch_version, engine.keep_gil_below) == (12080, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(CopyEngine.create("cpu", library=fake.path), TorchCopyEngine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_both_doors_are_named() -> None:
    with pytest.warns(RuntimeWarning, match=r"libcuda\.so\.1: "):
        assert isinstance(CopyEngine.create(), TorchCopyEngine)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-bindings")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself would load the fake driver")
def test_entry_points_through_cuda_bindings(built: FakeDriver) -> None:
    code = """
import ctypes, sys
import numpy as np
fake = ctypes.CDLL("libcuda.so.1"); fake.fake_reset()
from kvtransfer.dma import CopyEngine, _bindings_resolver
resolve = _bindings_resolver()
assert resolve("cuMemcpyBatchAsync", 12080) and resolve("cuMemcpyBatchAsync", 13000)
assert resolve("cuMemcpyBatchAsync", 12080) != resolve("cuMemcpyBatchAsync", 13000)
assert resolve("cuNoSuchThing", 13000) == 0 and resolve("cuMemcpyBatchAsync", 99000) == 0
sys.modules["ctypes"].CDLL = None  # the other door is shut: bindings must do
for version in (None, 12080, 13000):
    engine = CopyEngine(batch_version=version)
    a, b = np.zeros(9, np.uint8), np.arange(9, dtype=np.uint8)
    engine.batch(*(np.array([x], np.uint64) for x in (a.ctypes.data, b.ctypes.data, 9)), 0x1000)
    assert (a == b).all() and ctypes.c_int.in_dll(fake, "seen_abi").value == (version or 13000)
print("fine")
"""
    path = f"{built.path.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr


# The torch engine, on the host.


@pytest.mark.parametrize("n", [1, 33, 300])
def test_torch_engine_moves_exact_bytes(n: int) -> None:
    src = np.random.default_rng(4).integers(0, 256, 30_013, dtype=np.uint8)
    whole = torch.full((30_013 + 128,), 0xAB, dtype=torch.uint8)
    dst = whole.numpy()[64:-64]
    engine = TorchCopyEngine()
    engine.register(torch.from_numpy(src).view(torch.uint8)[5:])  # a view stands for its whole storage
    engine.register(whole)
    lists = pieces(dst, src, n, n)
    want = expected(dst, src, *lists)
    engine.batch(*lists, 0)
    assert np.array_equal(dst, want)
    assert (whole[:64] == 0xAB).all() and (whole[-64:] == 0xAB).all()


def test_torch_engine_moves_large_pieces() -> None:
    src, dst = torch.arange(1 << 19, dtype=torch.int32), torch.zeros(1 << 19, dtype=torch.int32)
    engine = TorchCopyEngine()
    for tensor in (src, dst):
        engine.register(tensor)
    engine.batch(u64(dst.data_ptr()), u64(src.data_ptr()), u64(4 << 19), 0)
    assert torch.equal(src, dst)


def test_torch_engine_refuses_addresses_it_was_not_told() -> None:
    engine, a, b = TorchCopyEngine(), np.zeros(64, np.uint8), np.ones(64, np.uint8)
    with pytest.raises(LayoutError, match=r"dst\[0\].*none of 0 ranges; register"):
        engine.batch(u64(a.ctypes.data), u64(b.ctypes.data), u64(8), 0)
    engine.register(a)
    engine.register(b)
    with pytest.raises(LayoutError, match=r"src\[1\]: expected 8 bytes"):
        engine.batch(u64(a.ctypes.data, a.ctypes.data + 8), u64(b.ctypes.data, b.ctypes.data + 57), u64(8, 8), 0)
    with pytest.raises(LayoutError, match=r"dst\[0\]"):
        engine.batch(u64(a.ctypes.data - 1), u64(b.ctypes.data), u64(8), 0)
    assert not a.any()


def test_torch_engine_ranges() -> None:
    engine, slab = TorchCopyEngine(), np.zeros(1_000, np.uint8)
    engine.register(slab[100:200])
    engine.register(slab[100:200])
    engine.register(slab[300:400])
    with pytest.raises(LayoutError, match=r"overlaps .* in part"):
        engine.register(slab[150:250])
    engine.register(slab)  # takes the place of both
    engine.register(slab[500:600])
    engine.register(np.zeros(0, np.uint8))
    assert len(engine._ranges[0]) == 1
    with pytest.raises(LayoutError, match="contiguous"):
        engine.register(slab[::2])
    slab[0] = 9
    engine.batch(u64(slab.ctypes.data + 999), u64(slab.ctypes.data), u64(1), 0)
    assert slab[999] == 9


def test_torch_engine_copy_2d_and_what_it_lacks() -> None:
    engine = TorchCopyEngine()
    src = np.random.default_rng(5).integers(0, 256, (5, 33), dtype=np.uint8)
    dst = np.full((5, 41), 0xAB, dtype=np.uint8)
    engine.register(src)
    engine.register(dst)
    engine.copy_2d(dst.ctypes.data + 3, 41, src.ctypes.data + 1, 33, 29, 5, 0)
    assert np.array_equal(dst[:, 3:32], src[:, 1:30])
    assert (dst[:, :3] == 0xAB).all() and (dst[:, 32:] == 0xAB).all()
    with pytest.raises(LayoutError, match="src"):
        engine.copy_2d(dst.ctypes.data, 41, src.ctypes.data + 5, 33, 29, 5, 0)
    engine.copy_2d(dst.ctypes.data, 41, src.ctypes.data, 33, 29, 0, 0)
    for call in (engine.wait_value, engine.write_value):
        with pytest.raises(ConfigError, match="events"):
            call(0, 0, 1)
    assert not engine.supports_flags and not engine.stream_is_capturing(0)
    assert engine.host_device_pointer(0x1234) == 0x1234
