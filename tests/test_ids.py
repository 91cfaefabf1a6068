"""Passes over ids: C and numpy give the same answers, C keeps Python's lock, and without a compiler numpy does it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from numpy.typing import NDArray

from kvtransfer.kernels.ids import MOST_MARKED, IdTools, NativeIds, NumpyIds, id_tools

LISTS = nps.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 30))


@pytest.fixture(params=["native", "numpy"])
def tools(request: pytest.FixtureRequest) -> IdTools:
    return id_tools() if request.param == "native" else NumpyIds()


def test_this_machine_has_a_compiler() -> None:
    assert isinstance(id_tools(), NativeIds)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_checked_ids(tools: IdTools, dtype: type[np.signedinteger]) -> None:
    for given_ids, distinct in (([], True), ([4], True), ([0, 3, 4], True), ([4, 0, 3], True), ([4, 4, 0], False)):
        raw: NDArray[np.signedinteger] = np.array(given_ids, dtype=dtype)
        found = tools.checked(raw, 5, distinct=distinct)
        assert found is not None and found.dtype == np.int64 and found.tolist() == given_ids
        assert not np.shares_memory(found, raw), "of its own: the caller may change his"
    for bad, distinct in (([5], False), ([-1, 2], False), ([1, 2, 1], True), ([3, 3], True), ([2, 1, 0, 2], True)):
        wrong: NDArray[np.signedinteger] = np.array(bad, dtype=dtype)
        assert tools.checked(wrong, 5, distinct=distinct) is None


@pytest.mark.parametrize("kind", ["every second", "backwards", "int32"])
def test_ids_that_lie_otherwise_in_memory(tools: IdTools, kind: str) -> None:
    """C is told an address: strides and widths must be seen to before."""
    ids: Any = {
        "every second": np.arange(20)[::2],
        "backwards": np.arange(10)[::-1],
        "int32": np.arange(10, dtype=np.int32),
    }[kind]
    want = ids.tolist()
    table, flags, to = np.zeros(20, dtype=np.int64), np.zeros(20, dtype=np.bool_), np.zeros(10, dtype=np.int64)
    tools.mark(table, ids, 5)
    flags[ids] = True
    assert np.flatnonzero(table).tolist() == sorted(want)
    table[want[-1]] = 9
    assert tools.most(table, ids) == 9 and tools.all_set(flags, ids)
    tools.copy(to, ids)
    assert to.tolist() == want
    found = tools.checked(ids, 20, distinct=True)
    assert found is not None and found.tolist() == want
    assert tools.runs(ids, ids, 4) == ((1, 1, 10) if kind == "int32" else (10, 0, 0))


def test_an_id_that_has_no_place_is_an_error_and_changes_nothing(tools: IdTools) -> None:
    table, flags = np.zeros(5, dtype=np.int64), np.ones(5, dtype=np.bool_)
    for work in (lambda x: tools.mark(table, x, 3), lambda x: tools.most(table, x), lambda x: tools.all_set(flags, x)):
        for bad in (5, 1 << 40):
            with pytest.raises(IndexError):
                work(np.array([1, bad]))
    assert not table.any()


def test_more_ids_than_are_marked() -> None:
    ids = np.array([MOST_MARKED + 5, 3, MOST_MARKED + 4])
    for tools in (id_tools(), NumpyIds()):
        found = tools.checked(ids, MOST_MARKED + 6, distinct=True)
        assert found is not None and found.tolist() == ids.tolist()
        assert tools.checked(np.append(ids, 3), MOST_MARKED + 6, distinct=True) is None


@given(LISTS, st.data())
def test_both_say_the_same(a: np.ndarray, data: st.DataObject) -> None:
    native, plain = id_tools(), NumpyIds()
    b = data.draw(nps.arrays(np.int64, a.size, elements=st.integers(0, 30)))
    least = data.draw(st.integers(1, 5))
    limit = data.draw(st.integers(20, 40))
    for distinct in (False, True):
        found, want = (tools.checked(a, limit, distinct=distinct) for tools in (native, plain))
        assert (found is None) == (want is None) and (found is None or found.tolist() == a.tolist())
    assert native.runs(a, None, least) == plain.runs(a, None, least)
    assert native.runs(a, b, least) == plain.runs(a, b, least)
    tables = [data.draw(nps.arrays(np.int64, 31, elements=st.integers(-3, 3)))] * 2
    tables = [table.copy() for table in tables]
    assert native.most(tables[0], a) == plain.most(tables[1], a)
    for tools, table in zip((native, plain), tables, strict=True):
        tools.mark(table, a, 7)
    assert tables[0].tolist() == tables[1].tolist()
    flags = data.draw(nps.arrays(np.bool_, 31))
    assert native.all_set(flags, a) == plain.all_set(flags, a)
    to = np.full(42, -1)
    native.copy(to, a)
    assert to.tolist() == a.tolist() + [-1] * (42 - a.size)


def test_a_busy_thread_gets_no_turn_in_between() -> None:
    """Beside a busy thread there is a pause in its turns as long as the pass takes. (While numpy works it has
    turns, in one of many attempts at the latest: others use these cores too.)"""
    rng, over = np.random.default_rng(), threading.Event()
    ids, table, flags = rng.permutation(1 << 21), np.zeros(1 << 21, dtype=np.int64), np.ones(1 << 21, dtype=np.bool_)
    turns: deque[float] = deque(maxlen=1 << 18)

    def busy() -> None:
        while not over.is_set():
            turns.append(time.perf_counter())

    def works(tools: IdTools) -> list[Callable[[], object]]:
        return [
            lambda: tools.checked(ids, 1 << 21, distinct=True),
            lambda: tools.runs(ids, ids, 4),
            lambda: tools.mark(table, ids, 3),
            lambda: tools.most(table, ids),
            lambda: tools.all_set(flags, ids),
            lambda: tools.copy(table, ids),
        ]

    def pause_share(work: Callable[[], object]) -> float:
        """The longest pause of the busy thread over the processor time of ``work``."""
        spent, begun = time.thread_time(), time.perf_counter()
        work()
        ended, spent = time.perf_counter(), time.thread_time() - spent
        within = [begun, *(at for at in list(turns) if begun < at < ended), ended]
        return max(b - a for a, b in pairwise(within)) / spent

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for work in works(id_tools()):
            assert min(pause_share(work) for _ in range(5)) > 0.5  # the rest is Python's, around the pass
        assert any(pause_share(works(NumpyIds())[0]) < 0.5 for _ in range(100))
    finally:
        over.set()
        thread.join()


def test_without_a_compiler_numpy_does_it(tmp_path: Path) -> None:
    code = (
        "from kvtransfer.kernels.ids import NumpyIds, id_tools; import sys;"
        "sys.exit(not isinstance(id_tools(), NumpyIds))"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path), "PATH": "/nowhere"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
