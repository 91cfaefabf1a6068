"""The C submitter against a driver of ours that writes down what it is asked: order, arguments, errors, stop, build."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvtransfer.dma import CopyEngine
from kvtransfer.kernels.errors import ConfigError, CudaError
from kvtransfer.submitter import Launch, Script, Submitter, build

DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
uint64_t log_[4096]; size_t used = 0; int fail_at = -1, calls = 0, nap_us = 0;
static int note(uint64_t what, uint64_t a, uint64_t b) {
  if (nap_us) usleep(nap_us);
  log_[used++] = what; log_[used++] = a; log_[used++] = b;
  return calls++ == fail_at ? 700 : 0;
}
int do_wait(void *stream, void *event, unsigned flags) { return note(0, (uint64_t)stream, (uint64_t)event + flags); }
int do_record(void *event, void *stream) { return note(1, (uint64_t)stream, (uint64_t)event); }
static int batch(uint64_t *dst, uint64_t *src, size_t *sizes, size_t n, void *attrs, size_t *first, size_t num,
                 void *stream) {
  if (num != 1 || *first != 0) return 1;
  for (size_t i = 0; i < n; ++i) memcpy((void *)dst[i], (void *)src[i], sizes[i]);
  return note(2, (uint64_t)stream, (uint64_t)attrs);
}
int do_batch_12080(void *d, void *s, void *z, size_t n, void *a, void *f, size_t num, size_t *failed, void *stream) {
  return *failed == (size_t)-1 ? batch(d, s, z, n, a, f, num, stream) : 1;
}
int do_batch_13000(void *d, void *s, void *z, size_t n, void *a, void *f, size_t num, void *stream) {
  return batch(d, s, z, n, a, f, num, stream);
}
int do_launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
              unsigned shared, void *stream, void **params, void **extra) {
  if (extra || gz != 1 || by != 1 || bz != 1) return 1;
  uint64_t wide = *(uint64_t *)params[0]; uint32_t narrow = *(uint32_t *)params[1];
  note(3, (uint64_t)stream, (uint64_t)function + gx * 1000 + gy * 100 + bx + shared);
  return note(4, wide, narrow);
}
int do_copy_2d(const void *copy, void *stream) { return note(5, (uint64_t)stream, (uint64_t)copy); }
"""


class Driver:
    def __init__(self, path: Path, version: int) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.batch_version = version

    def entry_points(self) -> tuple[int, ...]:
        names = (f"do_batch_{self.batch_version}", "do_wait", "do_record", "do_launch", "do_copy_2d")
        addresses = (ctypes.cast(getattr(self.lib, n), ctypes.c_void_p).value or 0 for n in names)
        return (*addresses, 111, 222)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.lib, name).value = value

    def log(self) -> list[tuple[int, int, int]]:
        used = ctypes.c_size_t.in_dll(self.lib, "used").value
        words = list((ctypes.c_uint64 * 4096).in_dll(self.lib, "log_"))[:used]
        return [(words[i], words[i + 1], words[i + 2]) for i in range(0, used, 3)]


@pytest.fixture(params=[12080, 13000])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    source, library = tmp_path / "driver.c", tmp_path / f"driver{request.param}.so"
    source.write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return Driver(library, request.param)


def submitter(driver: Driver, folder: Path) -> Submitter:
    return Submitter(build(folder), cast(CopyEngine, driver))


def addresses(*arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([a.ctypes.data for a in arrays], dtype=np.uint64)


def test_commands_run_in_order_with_their_arguments(driver: Driver, tmp_path: Path) -> None:
    source = [np.random.default_rng(i).integers(0, 256, 33, dtype=np.uint8) for i in range(2)]
    target = [np.zeros(33, dtype=np.uint8) for _ in range(2)]
    script = Script()
    script.wait(7, 70)
    script.batch(7, addresses(*target), addresses(*source), np.full(2, 33, dtype=np.uint64), any_order=True)
    script.record(7, 71)
    script.launch(8, Launch(5_000_000, 64, 3, (8, 4, 8)), (2**63 + 5, 2**32 - 1), (2, 9))
    script.chunk_done()
    script.batch(7, *(np.empty(0, dtype=np.uint64),) * 3, any_order=False)  # nothing to copy: no call
    script.chunk_done()
    submitter(driver, tmp_path).submit(script)
    assert driver.log() == [
        (0, 7, 70),
        (2, 7, 222),
        (1, 7, 71),
        (3, 8, 5_000_000 + 2000 + 900 + 64 + 3),
        (4, 2**63 + 5, 2**32 - 1),
    ]
    assert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))
    assert script.progress[0] == 2


def test_an_error_names_its_command_and_ends_the_script(driver: Driver, tmp_path: Path) -> None:
    driver.set("fail_at", 2)
    script = Script()
    for event in (1, 2):
        script.wait(7, event)
    script.chunk_done()
    script.record(7, 3)
    script.chunk_done()
    with pytest.raises(CudaError, match=r"command 3 of 5 \(record\) returned 700") as caught:
        submitter(driver, tmp_path).submit(script)
    assert caught.value.code == 700 and script.progress[0] == 1 and len(driver.log()) == 3


def test_stop_ends_it_between_two_chunks_and_progress_is_seen_meanwhile(driver: Driver, tmp_path: Path) -> None:
    driver.set("nap_us", 2000)
    script = Script()
    for chunk in range(100):
        script.record(7, chunk)
        script.chunk_done()
    thread = threading.Thread(target=submitter(driver, tmp_path).submit, args=(script,))
    thread.start()
    while script.progress[0] < 5:  # the GIL is free: this loop runs beside the call
        time.sleep(0.0005)
    script.stop[0] = 1
    thread.join(10)
    assert not thread.is_alive()
    assert 5 <= script.progress[0] < 100 and len(driver.log()) == script.progress[0]


def test_the_library_is_built_once_and_rebuilt_for_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build(tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [first.name], "nothing else is left behind"
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert build(tmp_path) == first, "what is there needs no compiler"
    with pytest.raises((ConfigError, OSError)):
        build(tmp_path / "other")


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no room on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="no room on device"):
        build(tmp_path / "cache")


def test_many_processes_build_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvtransfer.submitter import build; print(build(Path(sys.argv[1])))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = ["python3", "-c", code, str(tmp_path)]
    import sys

    command[0] = sys.executable
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    outputs = {p.communicate(timeout=120)[0].strip() for p in running}
    assert len(outputs) == 1 and Path(outputs.pop()).exists()


def test_launch_reads_the_parameters_from_ptx() -> None:
    ptx = """
.visible .entry relayout_kernel(
	.param .u64 .ptr .global .align 1 relayout_kernel_param_0,
	.param .u64 relayout_kernel_param_1,
	.param .u32 relayout_kernel_param_2,
	.param .u64 .ptr .global .align 1 relayout_kernel_param_3
)
.reqntid 256
{ .param .b32 not_one_of_them; }
"""
    metadata = SimpleNamespace(num_warps=8, shared=1024)
    launch = Launch.of(SimpleNamespace(asm={"ptx": ptx}, function=99, metadata=metadata))
    assert (launch.widths, launch.threads, launch.shared_bytes, launch.function) == ((8, 8, 4, 8), 256, 1024, 99)
    values, pointers = launch.pack([2**64 - 1, 5])
    assert values.tolist() == [2**64 - 1, 5, 0, 0]
    assert np.diff(pointers).tolist() == [8, 8, 8] and pointers[0] == values.ctypes.data
    with pytest.raises(ConfigError, match="at most 4 arguments, got 5"):
        launch.pack([1] * 5)
