"""The copy engine on a GPU: exact bytes in both forms of the batch call, order, refusals, errors, a second GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtransfer.dma import BATCH_VERSIONS, U64, Copier, CopyEngine, TorchCopyEngine, merge_runs
from kvtransfer.kernels.errors import TransferError

pytestmark = pytest.mark.gpu

GUARD = 512
gpu: Any = torch.cuda  # whose classes mypy takes for untyped calls
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=sorted(BATCH_VERSIONS))
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    yield CopyEngine(batch_version=request.param)
    gpu.synchronize()


def u64(*values: int) -> U64:
    return np.array(values, dtype=np.uint64)


def random_pieces(seed: int, n: int, total: int) -> tuple[U64, U64, U64]:
    """Offsets of disjoint destinations, of sources, and sizes, all odd lengths; a third are runs on both sides."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, total), 2 * n, replace=False)).astype(np.uint64)
    dst, sizes = cuts[::2].copy(), cuts[1::2] - cuts[::2]
    src = (rng.random(n) * (total - sizes.astype(np.int64))).astype(np.uint64)
    for i in range(1, n, 3):  # piece i follows piece i - 1 on both sides
        room = int(cuts[2 * i + 1] - (dst[i - 1] + sizes[i - 1]))
        if int(src[i - 1] + sizes[i - 1]) + room <= total:
            dst[i], src[i], sizes[i] = dst[i - 1] + sizes[i - 1], src[i - 1] + sizes[i - 1], room
    return dst, src, sizes


def guarded(total: int, device: str, pinned: bool = False) -> torch.Tensor:
    return torch.full((GUARD + total + GUARD,), 0xAB, dtype=torch.uint8, device=device, pin_memory=pinned)


def check(got: torch.Tensor, dst: U64, src: U64, sizes: U64, content: Bytes) -> None:
    want = np.full(got.numel(), 0xAB, dtype=np.uint8)
    for d, s, n in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
        want[GUARD + d : GUARD + d + n] = content[s : s + n]
    bad = np.flatnonzero(got.cpu().numpy() != want)
    assert not bad.size, f"{bad.size} wrong bytes, the first at {int(bad[0]) - GUARD}"


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize(("n", "total"), [(1, 8_209), (31, 100_003), (1_000, 5_000_011)])
@pytest.mark.parametrize("merge", [False, True])
def test_batch_moves_exact_bytes(engine: CopyEngine, direction: str, n: int, total: int, merge: bool) -> None:
    on_gpu = {"h2d": (False, True), "d2h": (True, False), "d2d": (True, True)}[direction]
    content = torch.from_numpy(np.random.default_rng(n).integers(0, 256, total, dtype=np.uint8))
    source = content.cuda() if on_gpu[0] else content.pin_memory()
    target = guarded(total, "cuda") if on_gpu[1] else guarded(total, "cpu", pinned=True)
    dst, src, sizes = random_pieces(n, n, total)
    lists = dst + np.uint64(target.data_ptr() + GUARD), src + np.uint64(source.data_ptr()), sizes
    if merge:
        lists = merge_runs(*lists)
        assert n == 1 or len(lists[0]) < n
    gpu.synchronize()
    stream = gpu.Stream()
    engine.batch(*lists, stream.cuda_stream)
    stream.synchronize()
    check(target, dst, src, sizes, content.numpy())


def test_any_order_from_a_finished_host_page(engine: CopyEngine) -> None:
    content = torch.arange(100_000, dtype=torch.int32).pin_memory()
    target = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    gpu.synchronize()
    stream = gpu.Stream()
    engine.batch(u64(target.data_ptr()), u64(content.data_ptr()), u64(400_000), stream.cuda_stream, any_order=True)
    stream.synchronize()
    assert torch.equal(target.cpu(), content)


def test_stream_order_holds_against_earlier_work(engine: CopyEngine) -> None:
    """The source is written on the same stream after a long kernel: the copy must see it, in 50 rounds."""
    stream = gpu.Stream()
    source = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    target = torch.zeros(1 << 20, dtype=torch.int32, pin_memory=True)
    pieces = np.arange(64, dtype=np.uint64) * np.uint64(1 << 16)
    for round_ in range(1, 51):
        with gpu.stream(stream):
            gpu._sleep(2_000_000)
            source.fill_(round_)
        lists = pieces + np.uint64(target.data_ptr()), pieces + np.uint64(source.data_ptr())
        engine.batch(*lists, np.full(64, 1 << 16, dtype=np.uint64), stream.cuda_stream)
        stream.synchronize()
        assert bool((target == round_).all()), f"round {round_}"


def test_the_legacy_stream_is_refused(engine: CopyEngine) -> None:
    target = torch.zeros(8, dtype=torch.uint8, device="cuda")
    legacy = gpu.default_stream().cuda_stream
    assert legacy == 0
    for stream in (legacy, 1):
        with pytest.raises(TransferError, match="legacy default stream"):
            engine.batch(u64(target.data_ptr()), u64(target.data_ptr()), u64(8), stream)


def test_a_capture_refuses_and_survives(engine: CopyEngine) -> None:
    a, b = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    stream, graph = gpu.Stream(), gpu.CUDAGraph()
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    a.add_(torch.zeros_like(b))  # load the kernel before the capture
    gpu.synchronize()
    with gpu.graph(graph, stream=stream):
        raw = gpu.current_stream().cuda_stream
        assert engine.stream_is_capturing(raw)
        a.add_(b)
        calls: list[Callable[[], None]] = [
            lambda: engine.batch(u64(a.data_ptr()), u64(b.data_ptr()), u64(256), raw),
            lambda: engine.copy_2d(a.data_ptr(), 16, b.data_ptr(), 16, 16, 4, raw),
            lambda: engine.wait_value(raw, flag.data_ptr(), 1),
            lambda: engine.write_value(raw, flag.data_ptr(), 1),
        ]
        for call in calls:
            with pytest.raises(TransferError, match=r"handle\.wait_all"):
                call()
    assert not engine.stream_is_capturing(stream.cuda_stream)
    graph.replay()
    gpu.synchronize()
    assert bool((a == 1).all())


def test_flags_hold_a_stream_until_the_value_is_reached(engine: CopyEngine) -> None:
    waiting, writing = gpu.Stream(), gpu.Stream()
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    data = torch.zeros(4096, dtype=torch.int32, device="cuda")
    target = torch.zeros(4096, dtype=torch.int32, pin_memory=True)
    with gpu.stream(writing):
        data.fill_(1)  # load the kernel first: loading may wait for the device
    gpu.synchronize()
    reached = gpu.Event()
    address = flag.data_ptr()
    try:
        engine.wait_value(waiting.cuda_stream, address, 3)
        engine.batch(u64(target.data_ptr()), u64(data.data_ptr()), u64(16_384), waiting.cuda_stream)
        reached.record(waiting)
        with gpu.stream(writing):
            data.fill_(7)
        engine.write_value(writing.cuda_stream, address, 2)
        writing.synchronize()
        time.sleep(0.05)
        assert not reached.query(), "the stream went on at 2, expected 3"
    finally:
        engine.write_value(writing.cuda_stream, address, 3)
    deadline = time.monotonic() + 20
    while not reached.query():
        assert time.monotonic() < deadline, "the flag was written, the stream still waits"
        time.sleep(0.001)
    assert bool((target == 7).all())


def test_flags_compare_cyclically(engine: CopyEngine) -> None:
    stream = gpu.Stream()
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    gpu.synchronize()
    passed = gpu.Event()
    engine.write_value(stream.cuda_stream, flag.data_ptr(), 5)
    engine.wait_value(stream.cuda_stream, flag.data_ptr(), 2**32 - 3)  # 5 is 8 steps after it
    passed.record(stream)
    deadline = time.monotonic() + 20
    while not passed.query():
        assert time.monotonic() < deadline
    assert int(flag.item()) == 5


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy_2d(engine: CopyEngine, direction: str) -> None:
    width, height, pitch, narrow = 4_099, 33, 8_192, 4_200
    content = torch.randint(0, 256, (height, pitch), dtype=torch.uint8)
    if direction == "h2d":
        source, target = content.pin_memory(), torch.full((height, narrow), 0xAB, dtype=torch.uint8, device="cuda")
    else:
        source, target = content.cuda(), torch.full((height, narrow), 0xAB, dtype=torch.uint8).pin_memory()
    gpu.synchronize()
    stream = gpu.Stream()
    engine.copy_2d(target.data_ptr() + 7, narrow, source.data_ptr() + 5, pitch, width, height, stream.cuda_stream)
    stream.synchronize()
    want = torch.full((height, narrow), 0xAB, dtype=torch.uint8)
    want[:, 7 : 7 + width] = content[:, 5 : 5 + width]
    assert torch.equal(target.cpu(), want)


def test_registered_memory_through_its_alias(engine: CopyEngine) -> None:
    """Memory that CUDA did not allocate, registered: copied from and to by its device alias."""
    runtime: Any = gpu.cudart()
    memory = np.zeros((1 << 20) + 4096, dtype=np.uint8)
    start = (-memory.ctypes.data) % 4096
    host = memory[start : start + (1 << 20)]
    assert int(runtime.cudaHostRegister(host.ctypes.data, host.nbytes, 0)) == 0
    try:
        alias = engine.host_device_pointer(host.ctypes.data)
        print(f"alias == address: {alias == host.ctypes.data}")
        assert engine.host_device_pointer(host.ctypes.data + 4096) == alias + 4096
        content = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
        device = content.cuda()
        stream = gpu.Stream()
        gpu.synchronize()
        engine.batch(u64(alias + 3), u64(device.data_ptr() + 3), u64((1 << 20) - 3), stream.cuda_stream)
        stream.synchronize()
        assert np.array_equal(host[3:], content.numpy()[3:]) and not host[:3].any()
        device.zero_()
        gpu.synchronize()
        engine.copy_2d(device.data_ptr(), 1024, alias, 1024, 1024, 1024, stream.cuda_stream)
        stream.synchronize()
        assert np.array_equal(device.cpu().numpy(), host)
    finally:
        assert int(runtime.cudaHostUnregister(host.ctypes.data)) == 0


@pytest.mark.parametrize("version", sorted(BATCH_VERSIONS))
@pytest.mark.parametrize("case", ["null", "past the end"])
def test_a_bad_pointer_is_an_error(version: int, case: str) -> None:
    """In a process of its own, since an error may spoil the context."""
    code = f"""
import numpy as np, torch
from kvtransfer.dma import CopyEngine
from kvtransfer.kernels.errors import CudaError
engine = CopyEngine(batch_version={version})
host = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True)
device = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
stream = torch.cuda.Stream().cuda_stream
dst, size = {{"null": (0, 4096), "past the end": (device.data_ptr(), 64 << 20)}}[{case!r}]
lists = (device.data_ptr(), dst), (host.data_ptr(), host.data_ptr()), (64, size)
try:
    engine.batch(*(np.array(x, dtype=np.uint64) for x in lists), stream)
    torch.cuda.synchronize()
    print("passed")
except CudaError as error:
    print("CudaError", error.code, error)
except RuntimeError as error:
    print("later", type(error).__name__, error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    print(result.stdout, result.stderr[-2000:], result.returncode)
    assert result.stdout.startswith("CudaError" if case == "null" else ("CudaError", "later"))


def test_from_a_thread_that_never_used_cuda(engine: CopyEngine) -> None:
    content = torch.arange(10_000, dtype=torch.int32).pin_memory()
    target = torch.zeros(10_000, dtype=torch.int32, device="cuda")
    stream = gpu.Stream()
    gpu.synchronize()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            engine.batch(u64(target.data_ptr()), u64(content.data_ptr()), u64(40_000), stream.cuda_stream)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    stream.synchronize()
    assert not errors and torch.equal(target.cpu(), content)


@pytest.mark.skipif(gpu.device_count() < 2, reason="needs two GPUs")
def test_a_stream_of_another_gpu(engine: CopyEngine) -> None:
    content = torch.arange(10_000, dtype=torch.int32).pin_memory()
    target = torch.zeros(10_000, dtype=torch.int32, device="cuda:1")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda:1")
    stream = gpu.Stream(device="cuda:1")
    gpu.synchronize("cuda:1")
    outcome: list[object] = []

    def body() -> None:
        try:
            with gpu.device(0):
                torch.zeros(1, device="cuda:0")
                engine.batch(u64(target.data_ptr()), u64(content.data_ptr()), u64(20_000), stream.cuda_stream)
                second = target.data_ptr() + 20_000, 5_000, content.data_ptr() + 20_000, 5_000, 5_000, 4
                engine.copy_2d(*second, stream.cuda_stream)
                engine.write_value(stream.cuda_stream, flag.data_ptr(), 9)
                engine.wait_value(stream.cuda_stream, flag.data_ptr(), 9)
                outcome.append(gpu.current_device())
                outcome.append(torch.zeros(1, device="cuda").device.index)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    stream.synchronize()
    assert outcome == [0, 0]
    assert torch.equal(target.cpu(), content) and int(flag.item()) == 9


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_the_torch_engine_agrees(direction: str) -> None:
    engine: Copier = TorchCopyEngine()
    total, n = 100_003, 40
    content = torch.from_numpy(np.random.default_rng(6).integers(0, 256, total, dtype=np.uint8))
    source = content.pin_memory() if direction == "h2d" else content.cuda()
    target = guarded(total, "cuda") if direction == "h2d" else guarded(total, "cpu", pinned=True)
    for tensor in (source, target):
        engine.register(tensor)
    dst, src, sizes = random_pieces(3, n, total)
    lists = dst + np.uint64(target.data_ptr() + GUARD), src + np.uint64(source.data_ptr()), sizes
    gpu.synchronize()
    stream = gpu.Stream()
    with pytest.raises(TransferError, match="legacy"):
        engine.batch(*lists, 0)
    engine.batch(*lists, stream.cuda_stream)
    stream.synchronize()
    check(target, dst, src, sizes, content.numpy())


def test_create_takes_the_driver_and_the_cost_of_a_descriptor(capsys: pytest.CaptureFixture[str]) -> None:
    engine = CopyEngine.create("cuda")
    assert isinstance(engine, CopyEngine)
    source = torch.zeros(128 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    gpu.synchronize()
    stream = gpu.Stream()
    lines = [f"batch version {engine.batch_version}"]
    for n in (8, 500, 4096):
        size = 32 << 10
        offsets = np.random.default_rng(n).permutation(n).astype(np.uint64) * np.uint64(size)
        lists = offsets + np.uint64(target.data_ptr()), offsets[::-1] + np.uint64(source.data_ptr())
        contiguous = np.ascontiguousarray(lists[1])
        sizes = np.full(n, size, dtype=np.uint64)
        for _ in range(3):
            started = time.perf_counter()
            engine.batch(lists[0], contiguous, sizes, stream.cuda_stream)
            submitted = time.perf_counter() - started
            stream.synchronize()
            took = time.perf_counter() - started
        lines.append(f"{n} x {size} B: {submitted / n * 1e6:.2f} us a piece, {n * size / took / 1e9:.1f} GB/s")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
