"""A tier whose threads drop the last hold on its callers' tensors while the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from disk_helpers import SPACE, TINY, tiny_record
from tier_contract import done, eventually

from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.storage import EngineKind

# Freeing a tensor gives the interpreter lock away: the main thread, which waits for it, gets it in the middle of one.
PROGRAM = """
import secrets, sys, threading, weakref
import numpy as np
import torch
from disk_helpers import tiny_record
from test_tier_exit import make
from kvtransfer.tiers.base import RecordBuffer

tier, rng = make(*sys.argv[1:]), np.random.default_rng()
keys = [secrets.token_bytes(32) for _ in range(2000)]
buffers = [RecordBuffer(*(torch.from_numpy(array).numpy() for array in tiny_record(key, rng))) for key in keys]
freed = threading.Event()
weakref.finalize(buffers[100].payload, freed.set)
tier.put_from(keys, buffers, deadline_s=60)
del buffers
sys.exit(0 if freed.wait(30) else "the tier keeps what it was given")
"""
KINDS = ["io_uring", "threads", "batch", "memory"]


def make(folder: str, kind: str) -> DiskTier | MemoryTier:
    """A tier with I/O of a kind, one that commits on a thread of its own, or one of workers."""
    if kind == "memory":
        return MemoryTier(capacity_bytes=64 << 20)
    if kind == "batch":
        return DiskTier(folder, TINY, namespace=SPACE, capacity_pages=2500, sync="batch")
    engine: EngineKind = "io_uring" if kind == "io_uring" else "threads"
    return DiskTier(folder, TINY, namespace=SPACE, capacity_pages=2500, engine=engine)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interpreter_ends_while_a_tier_lets_go_of_tensors(kind: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), kind]
    ended = subprocess.run(program, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_keeps_nothing_of_a_batch_that_is_over(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    with make(str(tmp_path), kind) as tier:
        keys = [rng.bytes(32) for _ in range(3)]
        buffers = [tiny_record(key, rng) for key in keys]
        kept = [weakref.ref(array) for buffer in buffers for array in buffer]
        done(tier.put_from(keys, buffers))
        del buffers
        eventually(lambda: not any(ref() is not None for ref in kept))
