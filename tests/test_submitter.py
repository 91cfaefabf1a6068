"""The C submitter against a driver of ours that writes down what it is asked: order, arguments, errors, stop, build."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gil_helpers import gil_counter

from kvtransfer import submitter as submitter_module
from kvtransfer.dma import CopyEngine, merge_runs
from kvtransfer.kernels.errors import ConfigError, TransferError
from kvtransfer.submitter import (
    CHUNK,
    COMMAND_WORDS,
    COPY,
    FEW_CHUNKS,
    LAUNCH,
    NONE,
    PACE,
    PAGES,
    PAGES_WORDS,
    RECORD,
    WAIT,
    ZERO,
    Job,
    Launch,
    Submitter,
    build_submitter,
)

DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
uint64_t log_[1 << 16]; size_t used = 0; int fail_at = -1, calls = 0, nap_us = 0, context_code = 0, mode_asked = -1;
volatile int passed = 1 << 30; /* events below it have passed */
uint64_t context_set = 0, pieces = 0, sizes_[1 << 16];
static int note(uint64_t what, uint64_t a, uint64_t b) {
  if (nap_us) usleep(nap_us);
  log_[used++] = what; log_[used++] = a; log_[used++] = b;
  return calls++ == fail_at ? 700 : 0;
}
int do_wait(void *stream, void *event, unsigned flags) { return note(1, (uint64_t)stream, (uint64_t)event + flags); }
int do_record(void *event, void *stream) { return note(2, (uint64_t)stream, (uint64_t)event); }
int do_query(void *event) { return (int)(uint64_t)event == 999 ? 719 : (int)(uint64_t)event < passed ? 0 : 600; }
int do_copy(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
  memcpy((void *)dst, (void *)src, bytes);
  return note(7, (uint64_t)stream, bytes);
}
int do_zero(uint64_t dst, unsigned char value, size_t bytes, void *stream) {
  memset((void *)dst, value, bytes);
  return note(8, (uint64_t)stream, bytes);
}
int do_wait_value(void *stream, uint64_t address, uint32_t value, unsigned flags) {
  return note(9, (uint64_t)stream, *(int32_t *)address + (int)value + (int)flags);
}
int do_set_context(void *context) { context_set = (uint64_t)context; return context_code; }
int do_mode(int *mode) { mode_asked = *mode; return 0; }
static int batch(uint64_t *dst, uint64_t *src, size_t *sizes, size_t n, void *attrs, size_t *first, size_t num,
                 void *stream) {
  if (num != 1 || *first != 0) return 1;
  for (size_t i = 0; i < n; ++i) memcpy((void *)dst[i], (void *)src[i], sizes_[pieces++] = sizes[i]);
  return note(4, (uint64_t)stream, (uint64_t)attrs);
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
  note(5, (uint64_t)stream, (uint64_t)function + gx * 1000 + gy * 100 + bx + shared);
  return note(6, wide, narrow);
}
"""
FUNCTIONS = ("do_batch_{}", "do_wait", "do_record", "do_query", "do_launch", "do_copy", "do_zero", "do_wait_value",
             "do_set_context", "do_mode")  # fmt: skip
LIMIT_S = 20.0


class Driver:
    def __init__(self, path: Path, version: int) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.batch_version = version

    def entry_points(self) -> tuple[int, ...]:
        names = (name.format(self.batch_version) for name in FUNCTIONS)
        addresses = (ctypes.cast(getattr(self.lib, n), ctypes.c_void_p).value or 0 for n in names)
        return (*addresses, 111, 222)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.lib, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_uint64.in_dll(self.lib, name).value

    def sizes(self) -> list[int]:
        return list((ctypes.c_uint64 * (1 << 16)).in_dll(self.lib, "sizes_"))[: self.get("pieces")]

    def log(self) -> list[tuple[int, int, int]]:
        used = ctypes.c_size_t.in_dll(self.lib, "used").value
        words = list((ctypes.c_uint64 * (1 << 16)).in_dll(self.lib, "log_"))[:used]
        return [(words[i], words[i + 1], words[i + 2]) for i in range(0, used, 3)]


@pytest.fixture(params=[12080, 13000])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    source, library = tmp_path / "driver.c", tmp_path / f"driver{request.param}.so"
    source.write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return Driver(library, request.param)


@pytest.fixture
def submitter(driver: Driver, tmp_path: Path) -> Iterator[Submitter]:
    made = Submitter(build_submitter(tmp_path / "cache"), cast(CopyEngine, driver), 4711, 0)
    yield made
    made.close()


def job(*rows: tuple[int, ...], keep: object = None) -> Job:
    commands = np.zeros((len(rows), COMMAND_WORDS), dtype=np.uint64)
    for i, row in enumerate(rows):
        commands[i, : len(row)] = row
    return Job(commands, keep)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.0005)


def pages(**words: int) -> np.ndarray[Any, Any]:
    return np.array([words.get(name, 0) for name in PAGES_WORDS], dtype=np.uint64)


def test_commands_run_in_order_with_their_arguments(driver: Driver, submitter: Submitter) -> None:
    shape = np.array(Launch(5_000_000, 64, 3, (8, 4, 8)).shape((2, 9)), dtype=np.uint32)
    values = np.array([2**63 + 5, 2**32 - 1, 0], dtype=np.uint64)
    parameters = values.ctypes.data + 8 * np.arange(3, dtype=np.uint64)
    nothing = pages()
    here, there = np.arange(1, 8, dtype=np.uint8), np.zeros(7, dtype=np.uint8)
    work = job(
        (NONE, 7),
        (WAIT, 7, 70),
        (RECORD, 7, 71),
        (LAUNCH, 8, 5_000_000, shape.ctypes.data, parameters.ctypes.data),
        (CHUNK, 0, 1),
        (PACE, 0, 5),
        (PAGES, 7, nothing.ctypes.data),  # no pages: no call
        (CHUNK, 0, 2),
        (COPY, 9, there.ctypes.data, here.ctypes.data, 6),
        (ZERO, 9, here.ctypes.data + 2, 3),
        keep=(shape, values, parameters, nothing),
    )
    submitter.give(work)
    wait_for(lambda: work.ended)
    launched = [(5, 8, 5_000_000 + 2000 + 900 + 64 + 3), (6, 2**63 + 5, 2**32 - 1)]
    assert driver.log() == [(1, 7, 70), (2, 7, 71), *launched, (7, 9, 6), (8, 9, 3)]
    assert there.tolist() == [1, 2, 3, 4, 5, 6, 0] and here.tolist() == [1, 2, 0, 0, 0, 6, 7]
    assert work.chunks_submitted == 2 and work.error() is None
    assert driver.get("context_set") == 4711, "the thread works in the streams' context"
    assert ctypes.c_int.in_dll(driver.lib, "mode_asked").value == 2, "and leaves other people's captures alone"


def test_others_are_let_in_before_each_copy_of_pages_and_not_within(driver: Driver, tmp_path: Path) -> None:
    word = np.zeros(1, dtype=np.int32)
    made = Submitter(build_submitter(tmp_path / "cache"), cast(CopyEngine, driver), 0, word.ctypes.data)
    here, there, cut = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8), np.array([[0, 0, 2]], dtype=np.uint64)
    ids = np.array([3, 1, 0, 2], dtype=np.int64)
    some = pages(
        ids=ids.ctypes.data, count=4, host=here.ctypes.data, host_stride=2, ring=there.ctypes.data, ring_stride=2,
        pieces=cut.ctypes.data, num_pieces=1, load=1, most=3,
    )  # fmt: skip
    nothing = pages()
    rows = [(PAGES, 7, some.ctypes.data), (PAGES, 7, nothing.ctypes.data), (PAGES, 8, some.ctypes.data), (CHUNK, 0, 1)]
    work = job(*rows, keep=(some, nothing))
    made.give(work)
    wait_for(lambda: work.ended)
    made.close()
    assert work.error() is None and there.tolist() == [6, 7, 2, 3, 0, 1, 4, 5]
    assert driver.log() == [(what, stream, {4: 111, 9: 0}[what]) for stream in (7, 8) for what in (9, 4, 4)]


def test_a_wait_that_is_refused_ends_its_job_before_a_byte_of_it_moves(driver: Driver, tmp_path: Path) -> None:
    word = np.zeros(1, dtype=np.int32)
    made = Submitter(build_submitter(tmp_path / "cache"), cast(CopyEngine, driver), 0, word.ctypes.data)
    here, there = np.arange(8, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    ids, cut = np.zeros(1, dtype=np.int64), np.array([[0, 0, 8]], dtype=np.uint64)
    first, second = (
        pages(
            ids=ids.ctypes.data, count=1, host=here.ctypes.data, ring=there.ctypes.data + at,
            pieces=cut.ctypes.data, num_pieces=1, load=1,
        )
        for at in (0, 8)
    )  # fmt: skip
    rows = [(PAGES, 7, first.ctypes.data), (CHUNK, 0, 1), (PAGES, 7, second.ctypes.data), (CHUNK, 0, 2)]
    failing, other = job(*rows, keep=(first, second)), job(*rows[2:], keep=second)
    driver.set("fail_at", 2)  # wait, copy, wait
    made.give(failing)
    wait_for(lambda: failing.ended)
    error = failing.error()
    assert error is not None and error.code == 700 and "command 2 of 4 (copy of pages)" in str(error)
    assert failing.chunks_submitted == 1 and there.tolist() == [*range(8), *[0] * 8]
    made.give(other)
    made.close()
    assert other.error() is None and there.tolist() == [*range(8)] * 2


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_pages_are_copied_with_neighbours_merged_as_numpy_would(
    driver: Driver, submitter: Submitter, load: bool, seed: int
) -> None:
    rng = np.random.default_rng([seed, load])
    slots, count, first = 60, 25, 7
    most = (0, 1, 4, 1000)[seed % 4]  # descriptors a call
    part = np.array([3, 5, 8][: 1 + seed % 3], dtype=np.int64)  # bytes of the pieces of a page
    whole = seed % 2 == 0  # whether a page's pieces fill the slot, so that neighbours merge
    stride = int(part.sum()) if whole else int(part.sum()) + 4
    at = np.concatenate(([0], np.cumsum(part)[:-1]))
    host = rng.integers(0, 256, slots * stride, dtype=np.uint8)
    ring = rng.integers(0, 256, count * int(part.sum()), dtype=np.uint8)
    ids = np.concatenate([np.arange(s, s + 6) for s in rng.permutation(10) * 6])[: first + count].astype(np.int64)
    pieces = np.stack([at, at, part], axis=1).astype(np.uint64)
    cuts = (
        np.array([host.ctypes.data + stride * s for s in (9, 33)], dtype=np.uint64) if seed > 2 else np.zeros(0, "u8")
    )
    mine = ids[first:]
    h = (host.ctypes.data + mine[:, None] * stride + at).reshape(-1).astype(np.uint64)
    r = (ring.ctypes.data + np.arange(count)[:, None] * int(part.sum()) + at).reshape(-1).astype(np.uint64)
    sizes = np.tile(part, count).astype(np.uint64)
    want = merge_runs(r, h, sizes, cuts) if load else merge_runs(h, r, sizes, cuts)
    old_host, old_ring = host.copy(), ring.copy()
    asked = pages(
        ids=ids.ctypes.data, first=first, count=count, host=host.ctypes.data, host_stride=stride,
        ring=ring.ctypes.data, ring_stride=int(part.sum()), pieces=pieces.ctypes.data, num_pieces=len(part),
        cuts=cuts.ctypes.data, num_cuts=len(cuts), load=int(load), any_order=int(load),
        most=most,
    )  # fmt: skip
    work = job((PAGES, 7, asked.ctypes.data), (CHUNK, 0, 1), keep=asked)
    submitter.give(work)
    wait_for(lambda: work.ended)
    assert driver.sizes() == want[2].tolist()
    calls = -(-want[2].size // most) if most else 1
    wanted = [(4, 7, 222 if load else 111)] * calls
    assert driver.log() == wanted, "sources are read in any order only where that is asked for"
    rows = old_host.reshape(slots, stride)[mine][:, : int(part.sum())]
    if load:
        assert np.array_equal(ring, rows.reshape(-1)) and np.array_equal(host, old_host)
    else:
        want_host = old_host.reshape(slots, stride).copy()
        want_host[mine, : int(part.sum())] = old_ring.reshape(count, -1)
        assert np.array_equal(host, want_host.reshape(-1)) and np.array_equal(ring, old_ring)


def test_an_error_names_its_command_and_ends_the_job_but_not_the_next(driver: Driver, submitter: Submitter) -> None:
    driver.set("fail_at", 2)
    bad = job((WAIT, 7, 1), (WAIT, 7, 2), (CHUNK, 0, 1), (RECORD, 7, 3), (CHUNK, 0, 2))
    good = job((WAIT, 7, 4), (CHUNK, 0, 1))
    submitter.give(bad)
    submitter.give(good)
    wait_for(lambda: good.ended)
    error = bad.error()
    assert error is not None and error.code == 700 and "command 3 of 5 (record) returned 700" in str(error)
    assert bad.ended and bad.chunks_submitted == 1 and len(driver.log()) == 4
    assert good.error() is None and good.chunks_submitted == 1


def test_a_context_that_can_not_be_entered_fails_every_job(driver: Driver, submitter: Submitter) -> None:
    driver.set("context_code", 201)
    work = job((WAIT, 7, 1), (CHUNK, 0, 1))
    submitter.give(work)
    wait_for(lambda: work.ended)
    error = work.error()
    assert error is not None and error.code == 201 and not driver.log()


def test_it_runs_ahead_only_as_far_as_events_have_passed_and_stops_there(driver: Driver, submitter: Submitter) -> None:
    driver.set("passed", 0)
    rows: list[tuple[int, ...]] = []
    for chunk in range(1, 11):
        rows += [(PACE, 0, chunk - 2) if chunk > 2 else (NONE,), (RECORD, 7, chunk), (CHUNK, 0, chunk)]
    work = job(*rows)
    submitter.give(work)
    submitter.await_chunks(work, 2)
    time.sleep(0.02)
    assert work.chunks_submitted == 2
    driver.set("passed", 4)  # events 1 to 3
    submitter.await_chunks(work, 5)
    time.sleep(0.02)
    assert work.chunks_submitted == 5 and not work.ended
    started = time.monotonic()
    submitter.await_chunks(work, 6)
    assert 0.003 < time.monotonic() - started < LIMIT_S, "nobody is held for long by what does not come"
    work.stop()
    wait_for(lambda: work.ended)
    assert work.chunks_submitted == 5 == len(driver.log()) and work.error() is None


def test_a_short_wait_keeps_the_gil_and_a_long_one_gives_it_away(
    driver: Driver, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the next chunks launches a forward, who waits for many has nothing to do meanwhile."""
    driver.set("nap_us", 20_000)  # a thread that may have the GIL also needs a processor
    monkeypatch.setattr(submitter_module, "LONGEST_LOOK_NS", 10**10)
    with gil_counter() as count:
        for chunks, most_ns, kept in ((1, 10**10, True), (FEW_CHUNKS + 1, 10**10, False), (1, 10**5, False)):
            monkeypatch.setattr(submitter_module, "SHORT_LOOK_NS", most_ns)
            work = job(*(row for n in range(chunks) for row in ((WAIT, 7, 70), (CHUNK, 0, n + 1))))
            submitter.give(work)
            before = count()
            submitter.await_chunks(work, chunks)
            assert (count() == before) is kept, (chunks, most_ns)
            assert work.chunks_submitted == chunks
            while not work.ended:
                time.sleep(0.0005)


def test_who_asks_again_for_a_job_that_stands_still_leaves_others_the_gil(
    driver: Driver, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be paced by a forward for as long as that takes: 2 ms of each 7 were everybody's."""
    kept: list[int] = []
    real = submitter._await_keeping_gil

    def keeping(address: int, count: int, most_ns: int) -> None:
        kept.append(count)
        real(address, count, most_ns)

    monkeypatch.setattr(submitter, "_await_keeping_gil", keeping)
    driver.set("passed", 1)
    work = job((CHUNK, 0, 1), (PACE, 0, 1), (CHUNK, 0, 2), (PACE, 0, 2), (CHUNK, 0, 3))
    submitter.give(work)
    submitter.await_chunks(work, 1)
    for _ in range(5):
        submitter.await_chunks(work, 2)
    assert kept == [1, 2] and work.chunks_submitted == 1
    driver.set("passed", 2)
    while work.chunks_submitted < 2:
        time.sleep(0.0005)
    for _ in range(5):
        submitter.await_chunks(work, 3)
    assert kept == [1, 2, 3], "it went on meanwhile"
    work.stop()
    while not work.ended:
        time.sleep(0.0005)


def test_an_event_that_fails_is_an_error(driver: Driver, submitter: Submitter) -> None:
    work = job((PACE, 0, 999), (CHUNK, 0, 1))
    submitter.give(work)
    wait_for(lambda: work.ended)
    error = work.error()
    assert error is not None and error.code == 719 and "(pace)" in str(error)


def test_stop_before_the_start_submits_nothing(driver: Driver, submitter: Submitter) -> None:
    work = job((WAIT, 7, 1), (CHUNK, 0, 1))
    work.stop()
    submitter.give(work)
    wait_for(lambda: work.ended)
    assert not driver.log() and work.chunks_submitted == 0 and work.error() is None


def test_progress_is_seen_meanwhile_and_stop_ends_it_between_two_chunks(driver: Driver, submitter: Submitter) -> None:
    driver.set("nap_us", 1000)
    work = job(*(row for chunk in range(1, 101) for row in ((RECORD, 7, chunk), (RECORD, 8, chunk), (CHUNK, 0, chunk))))
    submitter.give(work)
    wait_for(lambda: work.chunks_submitted >= 5)
    work.stop()
    wait_for(lambda: work.ended)
    assert 5 <= work.chunks_submitted < 100 and len(driver.log()) == 2 * work.chunks_submitted


def test_jobs_run_one_after_the_other_and_close_waits_for_them(driver: Driver, submitter: Submitter) -> None:
    driver.set("nap_us", 200)
    jobs = [job((RECORD, n, 1), (RECORD, n, 2), (CHUNK, 0, 1)) for n in range(50)]
    for work in jobs:
        submitter.give(work)
    submitter.close()
    assert all(work.ended for work in jobs)
    assert [(a, b) for _, a, b in driver.log()] == [(n, event) for n in range(50) for event in (1, 2)]
    submitter.close()
    with pytest.raises(TransferError, match="closed"):
        submitter.give(jobs[0])


def test_a_thread_that_expects_a_job_takes_it_and_sleeps_again_where_none_comes(
    driver: Driver, submitter: Submitter
) -> None:
    submitter.expect()  # before the first job: nothing
    for wait_s in (0.0, 0.0002, 0.003, 0.0, 0.01):
        work = job((RECORD, 1, 1), (CHUNK, 0, 1))
        submitter.expect()
        time.sleep(wait_s)
        submitter.give(work)
        wait_for(lambda work=work: work.ended)  # type: ignore[misc]
    assert len(driver.log()) == 5
    before = time.process_time()
    time.sleep(0.05)
    assert time.process_time() - before < 0.025, "it sleeps"
    submitter.expect()
    submitter.close()  # while it is awake
    submitter.expect()


def test_a_thread_that_expects_nothing_any_more_sleeps_at_once(driver: Driver, submitter: Submitter) -> None:
    work = job((RECORD, 1, 1))
    submitter.give(work)
    wait_for(lambda: work.ended)

    def others_s() -> float:
        return time.process_time() - time.thread_time()

    def burnt_s(*expected: bool) -> float:
        before = others_s()
        for _ in range(60):
            for job_follows in expected:
                submitter.expect(job_follows)
            time.sleep(0.002)
        return others_s() - before

    assert max(burnt_s(True) for _ in range(3)) > 2 * min(burnt_s(True, False) for _ in range(3))


@pytest.mark.parametrize("seed", range(3))
def test_jobs_of_many_threads_all_end_and_none_is_taken_after_the_close(
    seed: int, driver: Driver, tmp_path: Path
) -> None:
    """Jobs that were expected, or not, too early or in vain, while another thread closes."""
    made = Submitter(build_submitter(tmp_path / "cache"), cast(CopyEngine, driver), 0, 0)
    given: list[Job] = []
    refused: list[TransferError] = []
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            for _ in range(2000):
                for _ in range(int(rng.integers(3))):
                    made.expect(bool(rng.random() < 0.8))
                if rng.random() < 0.05:
                    time.sleep(rng.random() * 0.002)
                mine = job((NONE,), (CHUNK, 0, 1), (NONE,), (CHUNK, 0, 2))
                made.give(mine)
                given.append(mine)
                if rng.random() < 0.7:
                    made.await_chunks(mine, int(rng.integers(1, 4)))
        except TransferError as error:
            refused.append(error)
        except BaseException as error:  # kept: this test's failure
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(given) >= 1000 or bool(wrong))
    made.close()
    for thread in threads:
        thread.join()
    assert not wrong and len(refused) == 4 and all("closed" in str(e) for e in refused)
    assert len(given) >= 1000 and all(g.ended and g.chunks_submitted == 2 for g in given)


def test_closing_what_never_began_is_nothing(driver: Driver, tmp_path: Path) -> None:
    made = Submitter(build_submitter(tmp_path / "cache"), cast(CopyEngine, driver), 0, 0)
    made.close()
    assert driver.get("context_set") == 0, "no thread without a job"


def test_the_library_is_built_once_and_rebuilt_for_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_submitter(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_submitter(tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [first.name], "nothing else is left behind"
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert build_submitter(tmp_path) == first, "what is there needs no compiler"
    with pytest.raises((ConfigError, OSError)):
        build_submitter(tmp_path / "other")


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no room on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="no room on device"):
        build_submitter(tmp_path / "cache")


def test_many_processes_build_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvtransfer.submitter import build_submitter;"
        "print(build_submitter(Path(sys.argv[1])))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code, str(tmp_path)]
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
    assert launch.values([-1, 5]) == [2**64 - 1, 5, 0, 0]
    assert launch.shape((6, 2)) == (6, 2, 1, 256, 1024)
    with pytest.raises(ConfigError, match="at most 4 arguments, got 5"):
        launch.values([1] * 5)
