"""A cache that is in use when its main thread, or its interpreter, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtransfer.kernels.callbacks import call_subscriber
from kvtransfer.worker import Ticker, Worker

PROGRAM = """
import atexit, signal, sys, threading


@atexit.register  # before all others are, and so it is called last
def say_who_is_left():
    left = {thread.name for thread in threading.enumerate()} - {threading.main_thread().name}
    print("left:", *sorted(left), file=sys.stderr)


import torch
from kvtransfer import KVPool, KVSpec, TieredCache, load_config

folder, end = sys.argv[1:]
spec = KVSpec.attention(num_layers=2, page_size=4, kv_heads=2, head_dim=32, itemsize=2)
pool = KVPool.allocate("sglang.layer_first", spec=spec, num_pages=48, device="cpu")
tiers = {"host": {"pages": 16}, "disk": {"paths": [folder], "cache_gb": 0.05}}
more = {"prefetch": {"min_tokens": 0}, "namespace": {"model": "m"}}
config = load_config(arguments={"tiers": tiers, **more}, environment={})
cache = TieredCache.create(pool, config)


def fill(pages, of):
    for buffer in pool.buffers:
        flat = buffer.reshape(-1).view(torch.uint8).view(-1, pool.layout.spec.page_bytes // len(pool.buffers))
        for page in pages:
            flat[page] = of


def one(number):
    tokens = [number] * 16
    pages = pool.allocate_pages(4)
    fill(pages, number % 251)
    cache.store(tokens, pages).result(20).require()
    fill(pages, 255)
    cache.warm([number // 2] * 16)
    with cache.match(tokens) as hit:
        load = cache.load(hit, pages[: hit.pages])
    load.result(20).require()
    pool.free_pages(pages)
    return hit.pages


def serve():
    main.join()
    with cache:
        assert [one(number) for number in range(40)] == [4] * 40
    assert cache.stats().directory.commands_under_way == 0
    print("served", flush=True)


main = threading.main_thread()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
if end == "served":
    threading.Thread(target=serve).start()
else:
    print("ready", flush=True)
    for number in range(10**9 if end == "interrupted" else 30):
        one(number)
        pages = pool.allocate_pages(4)
        cache.store([number + 10**6] * 16, pages).add_done_callback(lambda store: pool.free_pages(store.page_ids))
    if end == "raised":
        raise ValueError("on purpose")
"""


def start(folder: Path, end: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PROGRAM, str(folder), end]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_other_threads_go_on_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    """Executors of Python take nothing more from then on."""
    process = start(tmp_path, "served")
    try:
        out, said = process.communicate(timeout=45)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "served\n"), said


@pytest.mark.parametrize(("end", "code"), [("fell off", 0), ("raised", 1), ("interrupted", -signal.SIGINT)])
def test_an_interpreter_ends_with_a_cache_in_use(end: str, code: int, tmp_path: Path) -> None:
    process = start(tmp_path, end)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if end == "interrupted":
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, said
    assert "terminate" not in said
    # The cleaner has nothing of anybody's. An interrupt while a thread is being started leaves one that nobody knows.
    last = said.splitlines()[-1]
    assert last == "left: disk-cleaner" or (end == "interrupted" and "disk-io" not in last.split()), said


def test_a_worker_does_what_it_is_given_in_order_whatever_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_type))
    worker = Worker("a-worker")
    worker.submit(lambda: seen.append(1))
    worker.submit(lambda: seen[5])
    worker.submit(lambda: seen.append(threading.current_thread().name))
    worker.shutdown()
    assert seen == [1, IndexError, "a-worker"]
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: seen.append(2))
    worker.shutdown()


def test_a_worker_that_leaves_drops_what_it_has_not_begun() -> None:
    worker, gate, seen = Worker("a-worker"), threading.Event(), list[int]()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert gate.wait(10)
        seen.append(1)

    worker.submit(first)
    worker.submit(lambda: seen.append(2))
    assert begun.wait(10)
    threading.Timer(0.1, gate.set).start()
    worker.leave()
    worker.left(10)
    assert seen == [1]
    with pytest.raises(RuntimeError):
        worker.submit(lambda: seen.append(3))


def test_a_ticker_goes_on_whatever_its_work_raises_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told, calls, enough = list[type[BaseException] | None](), list[int](), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda what: told.append(what.exc_type))

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            enough.set()
        raise ValueError

    ticker = Ticker(work, 0.01)
    assert enough.wait(10)
    ticker.close()
    ticker.close()
    seen = len(calls)
    time.sleep(0.05)
    assert len(calls) == seen and told[:3] == [ValueError] * 3


def test_an_interrupt_in_a_callback_on_the_main_thread_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    monkeypatch.setattr(threading, "excepthook", told.append)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_subscriber(interrupted)
    other = threading.Thread(target=lambda: call_subscriber(interrupted))
    other.start()
    other.join(10)
    assert len(told) == 1
