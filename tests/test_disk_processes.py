"""Disk tiers of several processes, and of processes that are killed at any moment."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_helpers import SPACE, TINY, empty, image, tiny_record
from disk_processes import Nursery, kill, lines, page_key
from tier_contract import done, eventually, statuses

from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.commit_log import SyncMode
from kvtransfer.tiers.disk import DiskTier

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


def test_four_processes_on_one_path(nursery: Nursery, tmp_path: Path) -> None:
    path = tmp_path / "tier"
    for again in (False, True):
        outs = [tmp_path / f"{rank}-{again}" for rank in range(4)]
        pids = [
            nursery.run("share_of_four", out, path=str(path), rank=rank, again=again) for rank, out in enumerate(outs)
        ]
        eventually(lambda outs=outs: all(lines(out) for out in outs))  # type: ignore[misc]
        (path / "go").touch()
        for pid, out in zip(pids, outs, strict=True):
            assert nursery.wait(pid) == 0, lines(out)
            share = int(lines(out)[0].split()[1])
            assert (1 << 20) * 0.8 < share <= 1 << 20 and lines(out)[1:] == ["done"]
        (path / "go").unlink()
        taken = sum(os.lstat(os.path.join(at, n)).st_blocks * 512 for at, _, names in os.walk(path) for n in names)
        assert taken <= 4 << 20
    assert sorted(p.name for p in (path / SPACE.hex()).iterdir()) == [f"i0-dp0-pp0-cp0-tp{r}" for r in range(4)]


def kill_and_look(nursery: Nursery, folder: Path, seed: int, sync: SyncMode) -> int:
    """One writer killed at a random moment; what it had acknowledged is all there. Returns how much that was."""
    rng = random.Random(seed)
    out = folder / f"out-{seed}"
    pid = nursery.run("write_for_ever", out, path=str(folder / "tier"), seed=seed, sync=sync)
    eventually(lambda: len(lines(out)) > rng.randint(1, 30))
    time.sleep(rng.random() * 0.05)
    kill(pid)
    assert nursery.wait(pid) == -9
    steps = [line.split() for line in lines(out)]
    put = {number + i for verb, n in steps if verb == "put" for number in [int(n)] for i in range(8)}
    removed = {number + i for verb, n in steps if verb == "remove" for number in [int(n)] for i in range(4)}
    tried = {number + i for verb, n in steps if verb == "try" for number in [int(n)] for i in range(8)}
    unsure = {max(tried) - 7 + i for i in range(8)}  # its last batch, or the removal behind that
    with DiskTier(folder / "tier", TINY, namespace=SPACE, capacity_pages=4000) as tier:
        numbers = sorted(tried)
        keys = [page_key(seed, number) for number in numbers]
        buffers = [empty() for _ in keys]
        got = dict(zip(numbers, statuses(tier.get_into(keys, buffers)), strict=True))
        for number, key, buffer in zip(numbers, keys, buffers, strict=True):
            if got[number] is OK:
                assert image(buffer) == image(tiny_record(key, np.random.default_rng(list(key))))
        assert {n for n in put - removed - unsure if got[n] is not OK} == set(), "acknowledged and lost"
        assert {n for n in removed if got[n] is OK} == set(), "removed and back"
        assert set(got.values()) <= {OK, MISS, CORRUPT}
        assert tier.stats().used_bytes <= tier.stats().capacity_bytes
        done(tier.remove(keys))
    return len(put)


@pytest.mark.parametrize("sync", ["none", "interval", "batch"])
def test_a_writer_that_is_killed_loses_nothing_acknowledged(nursery: Nursery, tmp_path: Path, sync: SyncMode) -> None:
    """Ten kills in all, one tier folder through each mode's lives."""
    assert sum(kill_and_look(nursery, tmp_path, seed, sync) for seed in range(4 if sync == "batch" else 3)) > 10


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_writer_killed_at_a_hundred_points(nursery: Nursery, tmp_path: Path) -> None:
    modes: list[SyncMode] = ["none", "interval", "batch"]
    for seed in range(100, 200):
        kill_and_look(nursery, tmp_path, seed, modes[seed % 3])
