"""Engines and storage: bytes and guards, short and failing calls, fallbacks and what is told of them, registration."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_helpers import Told
from kernel_helpers import fresh_generator

from kvtransfer.kernels.errors import ConfigError, OwnershipError, TierError
from kvtransfer.tiers import uring_buffers, uring_engine
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.io import SHORT, Transfer, address
from kvtransfer.tiers.storage import EngineKind, FileStorage
from kvtransfer.tiers.uring import CQE, SQE, Kernel, Ring

SLOT, TRAILER = 3 * 4096, 4096
RECORD = SLOT + TRAILER
ENGINES: list[EngineKind] = ["io_uring", "threads"]


class Moved(Transfer):
    """Counts what it is told; ``refuse`` are positions that it does not want any more."""

    def __init__(self, refuse: tuple[int, ...] = (), **of: Any) -> None:
        super().__init__(**of)
        self.refuse = set(refuse)
        self.results: dict[int, int] = {}
        self.twice: list[int] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    def start(self, positions: list[int]) -> list[int]:
        kept = [p for p in positions if p not in self.refuse]
        self.finish([p for p in positions if p in self.refuse], [-1] * (len(positions) - len(kept)))
        return kept

    def finish(self, positions: list[int], errors: list[int]) -> None:
        with self._lock:
            self.twice += [p for p in positions if p in self.results]
            self.results.update(zip(positions, errors, strict=True))
            if len(self.results) == len(self.buffers):
                self.over.set()

    def wait(self) -> list[int]:
        assert self.over.wait(20), self.results
        assert not self.twice
        return [self.results[p] for p in range(len(self.buffers))]


def memory(count: int, *, shift: int = 0) -> tuple[np.ndarray, np.ndarray, list[RecordBuffer]]:
    """Payloads and trailers of ``count`` records in two regions, ``shift`` bytes off a page's begin."""
    regions = [
        np.frombuffer(mmap.mmap(-1, count * size + 4096), np.uint8)[shift : shift + count * size]
        for size in (SLOT, TRAILER)
    ]
    payloads, trailers = (region.reshape(count, -1) for region in regions)
    return regions[0], regions[1], [RecordBuffer(payloads[i], trailers[i]) for i in range(count)]


def moved(storage: FileStorage, file: int, write: bool, places: list[int], buffers: list[RecordBuffer]) -> list[int]:
    offsets = np.array(places, dtype=np.int64) * RECORD
    transfer = Moved(write=write, files=[file] * len(places), offsets=offsets, buffers=buffers)
    storage.submit(transfer)
    return transfer.wait()


@pytest.fixture(params=ENGINES)
def storage(request: pytest.FixtureRequest) -> Iterator[FileStorage]:
    made = FileStorage(engine=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("shift", [0, 4096 - 512, 17])
def test_records_lie_where_they_should_and_nothing_else_changes(
    storage: FileStorage, tmp_path: Path, registered: bool, shift: int
) -> None:
    count = 37
    rng = np.random.default_rng()
    file = storage.create(str(tmp_path / "slab"), (count + 5) * RECORD, slab=True)
    payloads, trailers, buffers = memory(count, shift=shift)
    payloads[:], trailers[:] = (rng.integers(0, 256, region.size, dtype=np.uint8) for region in (payloads, trailers))
    if registered and shift == 0:
        assert storage.register(payloads, SLOT) == (storage.engine_kind == "io_uring")
        storage.register(trailers, TRAILER)
    places = rng.permutation(count + 5)[:count].tolist()
    assert moved(storage, file, True, places, buffers) == [0] * count
    image = np.fromfile(tmp_path / "slab", dtype=np.uint8).reshape(-1, RECORD)
    for place, buffer in zip(places, buffers, strict=True):
        assert image[place].tobytes() == buffer.payload.tobytes() + buffer.trailer.tobytes()
    assert not image[[p for p in range(count + 5) if p not in places]].any()
    expected = [(b.payload.copy(), b.trailer.copy()) for b in buffers]
    guards = memory(3)
    payloads[:], trailers[:] = 0xA5, 0xA5
    order = rng.permutation(count).tolist()
    assert moved(storage, file, False, [places[i] for i in order], [buffers[i] for i in order]) == [0] * count
    for (payload, trailer), buffer in zip(expected, buffers, strict=True):
        assert np.array_equal(payload, buffer.payload) and np.array_equal(trailer, buffer.trailer)
    assert not guards[0].any()


def test_more_records_than_fit_at_once(storage: FileStorage, tmp_path: Path) -> None:
    count = 3 * uring_engine.DEPTH + 7
    file = storage.create(str(tmp_path / "slab"), count * RECORD, slab=True)
    payloads, trailers, buffers = memory(count)
    payloads[:], trailers[:] = 7, np.arange(trailers.size) // TRAILER % 251
    assert moved(storage, file, True, list(range(count)), buffers) == [0] * count
    trailers[:] = 0
    assert moved(storage, file, False, list(range(count)), buffers) == [0] * count
    assert np.array_equal(trailers, np.arange(trailers.size) // TRAILER % 251)


def test_what_is_not_wanted_any_more_is_not_touched(storage: FileStorage, tmp_path: Path) -> None:
    file = storage.create(str(tmp_path / "slab"), 10 * RECORD, slab=True)
    _, _, buffers = memory(10)
    for buffer in buffers:
        buffer.payload[:] = 1
    transfer = Moved(
        refuse=(0, 3, 4, 9), write=True, files=[file] * 10, offsets=np.arange(10) * RECORD, buffers=buffers
    )
    storage.submit(transfer)
    assert [p for p, result in enumerate(transfer.wait()) if result] == [0, 3, 4, 9]
    image = np.fromfile(tmp_path / "slab", dtype=np.uint8).reshape(10, RECORD)
    assert image.any(axis=1).tolist() == [p not in (0, 3, 4, 9) for p in range(10)]


def test_beyond_the_end_is_short_and_never_success(storage: FileStorage, tmp_path: Path) -> None:
    file = storage.create(str(tmp_path / "slab"), 4 * RECORD, slab=True)
    _, _, buffers = memory(4)
    os.truncate(tmp_path / "slab", 3 * RECORD - 4096)
    assert moved(storage, file, False, [0, 1, 2, 3], buffers) == [0, 0, SHORT, SHORT]


def test_a_bug_in_a_tier_stops_nobody_else(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args.exc_value))
    file = storage.create(str(tmp_path / "slab"), 4 * RECORD, slab=True)
    _, _, buffers = memory(4)

    class Bad(Moved):
        def finish(self, positions: list[int], errors: list[int]) -> None:
            raise KeyError("a bug")

    storage.submit(Bad(write=True, files=[file] * 4, offsets=np.arange(4) * RECORD, buffers=buffers))
    assert moved(storage, file, True, [0, 1, 2, 3], buffers) == [0] * 4
    assert hooked and all(isinstance(error, KeyError) for error in hooked)


def test_files_come_and_go_and_their_numbers_stay_apart(storage: FileStorage, tmp_path: Path) -> None:
    _, _, buffers = memory(2)
    files = [storage.create(str(tmp_path / f"slab{i}"), 2 * RECORD, slab=True) for i in range(5)]
    for number, file in enumerate(files):
        buffers[0].payload[:] = number + 1
        assert moved(storage, file, True, [1], buffers[:1]) == [0]
    storage.close_file(files[1])
    again = storage.open(str(tmp_path / "slab1"), writable=True, slab=True)
    for number, file in enumerate([files[0], again, *files[2:]]):
        assert moved(storage, file, False, [1], buffers[1:]) == [0]
        assert (buffers[1].payload == number + 1).all()


def test_more_files_than_the_table_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring_engine, "_FILES", 3)
    storage = FileStorage(engine="io_uring")
    _, _, buffers = memory(6)
    files = [storage.create(str(tmp_path / f"slab{i}"), RECORD, slab=True) for i in range(6)]
    for number, buffer in enumerate(buffers):
        buffer.payload[:] = number + 1
    transfer = Moved(write=True, files=files, offsets=np.zeros(6, np.int64), buffers=buffers)
    storage.submit(transfer)
    assert transfer.wait() == [0] * 6
    for number in range(6):
        assert (np.fromfile(tmp_path / f"slab{number}", np.uint8)[:SLOT] == number + 1).all()
    storage.close()


# --- what the kernel may answer


class Answers(Kernel):
    """Spoils what io_uring answers, or refuses calls, as told."""

    def __init__(self, refuse: Callable[[int, tuple[Any, ...]], int] = lambda number, args: 0) -> None:
        super().__init__()
        self.refuse = refuse

    def call(self, number: int, *args: Any, waits: bool = False) -> int:
        code = self.refuse(number, args)
        if code:
            raise OSError(code, os.strerror(code))
        return super().call(number, *args, waits=waits)


def spoilt_results(monkeypatch: pytest.MonkeyPatch, result: int, times: int) -> None:
    """The first ``times`` completions say ``result``."""
    take, left = Ring.take, [times]

    def spoil(self: Ring) -> np.ndarray:
        done = take(self)
        for i in range(len(done)):
            if left[0]:
                left[0] -= 1
                done["result"][i] = result
        return done

    monkeypatch.setattr(Ring, "take", spoil)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("result", [4096, 0, -errno.EAGAIN, -errno.EINTR])
def test_short_or_interrupted_completions_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int, registered: bool
) -> None:
    storage = FileStorage(engine="io_uring")
    file = storage.create(str(tmp_path / "slab"), 9 * RECORD, slab=True)
    payloads, trailers, buffers = memory(9)
    if registered:
        assert storage.register(payloads, SLOT) and storage.register(trailers, TRAILER)
    payloads[:], trailers[:] = 3, 4
    spoilt_results(monkeypatch, result, 5)
    assert moved(storage, file, True, list(range(9)), buffers) == [0] * 9
    image = np.fromfile(tmp_path / "slab", np.uint8).reshape(9, RECORD)
    assert (image[:, :SLOT] == 3).all() and (image[:, SLOT:] == 4).all()
    spoilt_results(monkeypatch, result, 10**9)
    got = moved(storage, file, False, list(range(9)), buffers)
    assert set(got) == {SHORT if result >= 0 else -result}
    storage.close()


def test_an_error_of_the_device_reaches_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(engine="io_uring")
    file = storage.create(str(tmp_path / "slab"), 4 * RECORD, slab=True)
    _, _, buffers = memory(4)
    spoilt_results(monkeypatch, -errno.EIO, 1)
    got = moved(storage, file, True, [0, 1, 2, 3], buffers)
    assert sorted(got) == [0, 0, 0, errno.EIO]
    storage.close()


def test_files_made_together_are_not_taken_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is put into the kernel's table while the next is taken into the books."""
    storage = FileStorage(engine="io_uring")
    engine = storage._engine
    assert isinstance(engine, uring_engine.UringEngine)
    at_work, go_on = threading.Event(), threading.Event()

    def busy(ring: Ring) -> None:
        at_work.set()
        go_on.wait(10)

    with engine._changed:
        engine._commands.append(busy)
        engine._changed.notify()
    assert at_work.wait(10)
    engine.add_file(os.open(tmp_path, os.O_RDONLY))
    append = np.append

    def slow(array: Any, value: Any) -> Any:
        made = append(array, value)
        go_on.set()
        time.sleep(0.1)  # the ring's thread takes the first file into its table
        return made

    monkeypatch.setattr(np, "append", slow)
    engine.add_file(os.open(tmp_path, os.O_RDONLY))
    monkeypatch.setattr(np, "append", append)
    engine._call(lambda ring: None)  # behind what was queued
    for number in range(2):
        fixed, name = int(engine._fixed[number]), int(engine._fds[number])
        assert not fixed or name == number, f"file {number} would be taken for the one at place {name}"
    storage.close()


def test_buffers_stay_the_kernels_where_the_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug ends the ring's thread while the device has a read: nobody is told before it is over."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = uring_engine.UringEngine()
    near, far = os.pipe()
    _, _, buffers = memory(1)
    transfer = Moved(write=False, files=[engine.add_file(near)], offsets=np.zeros(1, np.int64), buffers=buffers)

    def broken(self: Any, ring: Ring) -> Any:
        raise RuntimeError("bug")

    monkeypatch.setattr(uring_engine.UringEngine, "_reap", broken)
    engine.submit(transfer)
    assert not transfer.over.wait(0.5), "the kernel has the buffer still"
    os.write(far, b"\x55" * RECORD)
    assert transfer.wait() == [errno.EIO]
    engine.close()
    os.close(near)
    os.close(far)


@pytest.mark.parametrize(("write", "function"), [(True, "pwritev"), (False, "preadv")])
def test_threads_repeat_what_came_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: bool, function: str
) -> None:
    storage = FileStorage(engine="threads")
    file = storage.create(str(tmp_path / "slab"), 4 * RECORD, slab=True)
    _, _, buffers = memory(4)
    real, calls = getattr(os, function), [0]
    answers: list[Any] = [4096, OSError(errno.EINTR, "again")]

    def call(*args: Any) -> int:
        calls[0] += 1
        if calls[0] <= len(answers):
            if isinstance(answers[calls[0] - 1], OSError):
                raise answers[calls[0] - 1]
            return int(answers[calls[0] - 1])
        return int(real(*args))

    monkeypatch.setattr(os, function, call)
    assert moved(storage, file, write, [0, 1, 2, 3], buffers) == [0] * 4
    monkeypatch.setattr(os, function, lambda *args: 4096)
    assert moved(storage, file, write, [0, 1, 2, 3], buffers) == [SHORT] * 4
    storage.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_where_io_uring_is_refused_threads_work(tmp_path: Path, code: int) -> None:
    told = Told()
    kernel = Answers(lambda number, args: code if number == 425 else 0)
    before = threading.active_count()
    storage = FileStorage(observer=told, kernel=kernel)
    assert storage.engine_kind == "threads"
    assert [what for what, _ in told.fallbacks] == ["io_uring"] and os.strerror(code) in told.fallbacks[0][1]
    file = storage.create(str(tmp_path / "slab"), RECORD, slab=True)
    _, _, buffers = memory(1)
    assert moved(storage, file, True, [0], buffers) == [0]
    storage.close()
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="io_uring"):
        FileStorage(engine="io_uring", kernel=kernel)


def test_newer_flags_are_left_out_where_the_kernel_does_not_know_them(tmp_path: Path) -> None:
    flags: list[int] = []

    class Old(Kernel):
        def call(self, number: int, *args: Any, waits: bool = False) -> int:
            if number == 425:
                asked = int(ctypes.cast(args[1], ctypes.POINTER(ctypes.c_uint32))[2])
                flags.append(asked)
                if asked & ((1 << 12) | (1 << 13) | (1 << 8)):
                    raise OSError(errno.EINVAL, "no such flag")
            return super().call(number, *args, waits=waits)

    storage = FileStorage(engine="io_uring", kernel=Old())
    assert len(flags) == 3
    file = storage.create(str(tmp_path / "slab"), 5 * RECORD, slab=True)
    _, _, buffers = memory(5)
    assert moved(storage, file, True, list(range(5)), buffers) == [0] * 5
    storage.close()


def test_where_memory_may_not_be_registered_it_is_mapped_at_each_call(tmp_path: Path) -> None:
    told = Told()
    storage = FileStorage(
        engine="io_uring", observer=told,
        kernel=Answers(lambda number, args: errno.ENOMEM if number == 427 and args[1] == 16 else 0),
    )  # fmt: skip
    payloads, trailers, buffers = memory(5)
    assert not storage.register(payloads, SLOT) and not storage.register(trailers, TRAILER)
    assert [what for what, _ in told.fallbacks] == ["registered buffers"] and "memlock" in told.fallbacks[0][1]
    file = storage.create(str(tmp_path / "slab"), 5 * RECORD, slab=True)
    assert moved(storage, file, True, list(range(5)), buffers) == [0] * 5
    storage.close()


def test_the_memlock_limit_of_an_ordinary_user(tmp_path: Path) -> None:
    """A real limit, in a process without privileges."""
    code = f"""
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path[:0] = {sys.path!r}
from disk_helpers import Told
from kvtransfer.tiers.storage import FileStorage
import numpy as np, mmap
told = Told()
storage = FileStorage(engine="io_uring", observer=told)
small = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
large = np.frombuffer(mmap.mmap(-1, 1 << 26), np.uint8)
print(storage.register(small, 4096), storage.register(large, 4096), len(told.fallbacks))
storage.unregister(small)
print(storage.register(small, 4096))
storage.close()
"""
    if os.geteuid() != 0:
        code = code.replace("os.setgroups([]); os.setgid(65534); os.setuid(65534)", "")
    limit = 8 << 20

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))

    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=lower, timeout=60
    )
    if "Permission denied" in out.stderr or "ModuleNotFoundError" in out.stderr:
        # the interpreter or the checkout lies where other users can't read
        code = code.replace("os.setgroups([]); os.setgid(65534); os.setuid(65534)", _WITHOUT_IPC_LOCK)
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=lower, timeout=60
        )
    assert out.stdout.split() == ["True", "False", "1", "True"], out.stderr


# prctl(PR_CAPBSET_DROP) does not take what is held; capset with CAP_IPC_LOCK (14) cleared from all three sets does.
_WITHOUT_IPC_LOCK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
for word in (0, 1, 2):
    data[word] &= ~(1 << 14)
assert libc.capset(header, data) == 0
"""


def test_registration_is_cut_between_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uring_buffers, "CHUNK_BYTES", 5 * SLOT + 100)
    storage = FileStorage(engine="io_uring")
    engine = storage._engine
    assert isinstance(engine, uring_engine.UringEngine)
    payloads, trailers, buffers = memory(23)
    assert storage.register(payloads, SLOT) and storage.register(trailers, TRAILER)
    start = address(payloads)
    lengths = [stop - at for at, stop, _ in engine._fixed_buffers.chunks if start <= at < start + payloads.size]
    assert lengths == [5 * SLOT] * 4 + [3 * SLOT]
    file = storage.create(str(tmp_path / "slab"), 23 * RECORD, slab=True)
    payloads[:] = np.arange(payloads.size) // SLOT
    assert moved(storage, file, True, list(range(23)), buffers) == [0] * 23
    image = np.fromfile(tmp_path / "slab", np.uint8).reshape(23, RECORD)
    assert (image[:, :SLOT] == np.arange(23)[:, None]).all()
    storage.unregister(payloads)
    storage.unregister(trailers)
    assert not engine._fixed_buffers.chunks and len(engine._fixed_buffers._free) == uring_buffers.PLACES
    assert moved(storage, file, False, list(range(23)), buffers) == [0] * 23
    storage.close()


# --- O_DIRECT


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def call(path: Any, flags: int, *more: Any, **other: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here", path)
        return real(path, flags, *more, **other)

    monkeypatch.setattr(os, "open", call)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_o_direct_is_refused_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineKind
) -> None:
    refuse_direct(monkeypatch)
    told = Told()
    storage = FileStorage(engine=engine, observer=told)
    files = [storage.create(str(tmp_path / name), 4 * RECORD, slab=True) for name in ("a", "b")]
    assert [what for what, _ in told.fallbacks] == ["O_DIRECT"] and "no direct I/O" in told.fallbacks[0][1]
    _, _, buffers = memory(4)
    for buffer in buffers:
        buffer.payload[:] = 9
    assert moved(storage, files[1], True, [0, 1, 2, 3], buffers) == [0] * 4
    storage.close()
    reader = FileStorage(engine=engine, observer=told)
    file = reader.open(str(tmp_path / "b"), writable=False, slab=True)
    assert moved(reader, file, False, [0, 1, 2, 3], memory(4)[2]) == [0] * 4
    assert len(told.fallbacks) == 2
    reader.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"], "the trial left something behind"


def test_a_file_system_that_takes_the_flag_and_refuses_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EINVAL, "not aligned enough")

    monkeypatch.setattr(os, "pwrite", refuse)
    told = Told()
    storage = FileStorage(engine="threads", observer=told)
    storage.create(str(tmp_path / "slab"), RECORD, slab=True)
    assert [what for what, _ in told.fallbacks] == ["O_DIRECT"]
    storage.close()
    assert os.listdir(tmp_path) == ["slab"]


def test_direct_asked_for_by_name_is_an_error_where_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    storage = FileStorage(engine="threads", direct=True)
    with pytest.raises(ConfigError, match="O_DIRECT"):
        storage.create(str(tmp_path / "slab"), RECORD, slab=True)
    storage.close()


def test_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer kernels take O_DIRECT there, older ones refuse it: both work."""
    folder = Path("/dev/shm") / f"kvtransfer-test-{os.getpid()}"
    folder.mkdir()
    try:
        storage = FileStorage()
        file = storage.create(str(folder / "slab"), 4 * RECORD, slab=True)
        _, _, buffers = memory(4)
        assert moved(storage, file, True, [0, 1, 2, 3], buffers) == [0] * 4
        assert moved(storage, file, False, [0, 1, 2, 3], buffers) == [0] * 4
        storage.close()
    finally:
        (folder / "slab").unlink(missing_ok=True)
        folder.rmdir()


def test_memory_that_begins_anywhere_is_copied_and_that_is_said_once(tmp_path: Path) -> None:
    told = Told()
    storage = FileStorage(observer=told)
    file = storage.create(str(tmp_path / "slab"), 4 * RECORD, slab=True)
    _, _, buffers = memory(4, shift=8)
    for _ in range(2):
        assert moved(storage, file, True, [0, 1, 2, 3], buffers) == [0] * 4
    assert [what for what, _ in told.fallbacks] == ["aligned buffers"]
    storage.close()


# --- files


def test_a_lock_has_one_owner_and_names_it(tmp_path: Path) -> None:
    first, second = FileStorage(engine="threads"), FileStorage(engine="threads")
    first.lock(str(tmp_path / "LOCK"), "process 12 on here")
    with pytest.raises(OwnershipError, match="owned by process 12 on here"):
        second.lock(str(tmp_path / "LOCK"), "process 13")
    first.close()
    second.lock(str(tmp_path / "LOCK"), "13")
    assert (tmp_path / "LOCK").read_text() == "13"
    second.close()


def test_a_new_folder_is_synced_into_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure may take it, with all that was synced in it."""
    synced: list[str] = []
    monkeypatch.setattr(FileStorage, "sync_folder", lambda self, path: synced.append(path))
    storage = FileStorage(engine="threads")
    storage.make_folder(f"{tmp_path}/a/b")
    assert synced == [str(tmp_path), f"{tmp_path}/a"] and (tmp_path / "a" / "b").is_dir()
    storage.make_folder(f"{tmp_path}/a/b")
    assert len(synced) == 2
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        storage.make_folder(f"{tmp_path}/file")
    storage.close()


def test_a_file_that_could_not_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    storage = FileStorage(engine="threads")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        storage.create(str(tmp_path / "slab"), RECORD, slab=True)
    assert os.listdir(tmp_path) == []
    storage.close()


def test_after_close_nothing_is_taken_and_nothing_is_left(storage: FileStorage, tmp_path: Path) -> None:
    file = storage.create(str(tmp_path / "slab"), RECORD, slab=True)
    _, _, buffers = memory(1)
    transfer = Moved(write=True, files=[file], offsets=np.zeros(1, np.int64), buffers=buffers)
    storage.submit(transfer)
    storage.close()
    assert transfer.wait() == [0], "what was queued is finished"
    storage.close()
    with pytest.raises((TierError, KeyError)):
        storage.submit(Moved(write=True, files=[file], offsets=np.zeros(1, np.int64), buffers=buffers))


def test_nothing_leaks(tmp_path: Path) -> None:
    def use() -> None:
        for kind in ENGINES:
            storage = FileStorage(engine=kind)
            payloads, trailers, buffers = memory(8)
            storage.register(payloads, SLOT)
            storage.register(trailers, TRAILER)
            file = storage.create(str(tmp_path / "slab"), 8 * RECORD, slab=True)
            assert moved(storage, file, True, list(range(8)), buffers) == [0] * 8
            storage.close()
            (tmp_path / "slab").unlink()

    use()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(10):
        use()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_entries_have_the_kernels_layout() -> None:
    assert (SQE.itemsize, CQE.itemsize) == (64, 16)
    where = {name: SQE.fields[name][1] for name in SQE.names or ()} if SQE.fields else {}
    assert where == {
        "opcode": 0, "flags": 1, "ioprio": 2, "fd": 4, "offset": 8, "address": 16, "length": 24, "rw_flags": 28,
        "user_data": 32, "buffer": 40, "personality": 42, "splice": 44, "pad": 48,
    }  # fmt: skip


@pytest.mark.parametrize("head", [0, 5, 7, 8, 13, (1 << 32) - 3, (1 << 32) - 8])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
def test_completions_are_taken_in_order_where_the_ring_ends(head: int, count: int) -> None:
    """Also where its counters do; they are a copy, which the kernel does not write over."""
    ring = Ring.__new__(Ring)
    ring._cqes, ring._cq_mask = np.zeros(8, CQE), 7
    ring._cq_head, ring._cq_tail = np.array([head], np.uint32), np.array([(head + count) % (1 << 32)], np.uint32)
    expected = fresh_generator().integers(-(1 << 31), 1 << 31, count)
    for at, result in enumerate(expected.tolist()):
        ring._cqes[(head + at) % 8] = (1000 + at, result, at)
    taken = ring.take()
    ring._cqes[:] = 0
    assert taken["user_data"].tolist() == [1000 + at for at in range(count)] and (taken["result"] == expected).all()
    assert taken.dtype == CQE and ring.ready() == 0 and ring._cq_head[0] == ring._cq_tail[0]
    taken["result"] = 1
