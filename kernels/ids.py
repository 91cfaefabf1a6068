"""ids: passes over lists of page ids and slots that keep Python's lock (``ids.c``); numpy where there is no compiler.

A numpy operation on more than 500 elements gives the lock away. Beside a thread that computes in Python each such gift
costs up to 5 ms: a load of 8,192 pages held its caller for 83 ms instead of 0.7 (H200 machine, docs/performance.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import build, once

Ids = NDArray[np.int64]

_NO_MEMORY = 3  # of kvt_ids
_Counts = ctypes.c_uint64 * 3
MOST_MARKED = 1 << 24  # ids that are marked in a bitmap of 2 MiB at most; beyond that numpy sorts


class IdTools(Protocol):
    """An id that has no place in a table is an IndexError. Tables, flags and what is copied to are contiguous."""

    def checked(self, raw: NDArray[np.integer[Any]], limit: int, *, distinct: bool) -> Ids | None:
        """A copy of ``raw`` (int32 or int64) as int64, if all are 0 to ``limit - 1`` and, where asked, no two the same;
        else None."""

    def runs(self, a: Ids, b: Ids | None, least: int) -> tuple[int, int, int]:
        """Runs in which ``a`` (and ``b``) go up by one: (all, those of at least ``least``, ids in those)."""

    def most(self, table: Ids, ids: Ids) -> int:
        """``table[ids].max()``; 0 for no ids."""

    def mark(self, table: Ids, ids: Ids, value: int) -> None:
        """``table[ids] = value``."""

    def all_set(self, flags: NDArray[np.bool_], ids: Ids) -> bool:
        """``flags[ids].all()``."""

    def copy(self, to: Ids, ids: Ids) -> None:
        """``to[: ids.size] = ids``."""


class NativeIds:
    """`IdTools` by the functions of ``ids.c``."""

    def __init__(self, library: Path) -> None:
        lib = ctypes.PyDLL(str(library))  # it keeps Python's lock
        pointer, count, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., int]:
            found = getattr(lib, name)
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        self._ids = function("kvt_ids", ctypes.c_int, pointer, ctypes.c_int, count, number, ctypes.c_int, pointer)
        self._runs = function("kvt_runs", None, pointer, pointer, count, count, pointer)
        self._within = function("kvt_within", ctypes.c_int, pointer, count, count)
        self._most = function("kvt_most", number, pointer, pointer, count)
        self._mark = function("kvt_mark", None, pointer, pointer, count, number)
        self._all_set = function("kvt_all_set", ctypes.c_int, pointer, pointer, count)
        self._copy = function("kvt_copy", None, pointer, pointer, count)

    def checked(self, raw: NDArray[np.integer[Any]], limit: int, *, distinct: bool) -> Ids | None:
        if distinct and limit > MOST_MARKED:
            return NumpyIds().checked(raw, limit, distinct=True)
        raw, out = np.ascontiguousarray(raw), np.empty(raw.size, dtype=np.int64)
        code = self._ids(_address(raw), raw.itemsize, raw.size, limit, distinct, _address(out))
        if code == _NO_MEMORY:
            raise MemoryError(f"no room to mark {limit} ids")
        return None if code else out

    def runs(self, a: Ids, b: Ids | None, least: int) -> tuple[int, int, int]:
        out = _Counts()
        a, b = _plain(a), None if b is None else _plain(b)
        self._runs(_address(a), None if b is None else _address(b), a.size, least, out)
        return out[0], out[1], out[2]

    def most(self, table: Ids, ids: Ids) -> int:
        ids = self._places(ids, table.size)
        return self._most(_address(table), _address(ids), ids.size)

    def mark(self, table: Ids, ids: Ids, value: int) -> None:
        ids = self._places(ids, table.size)
        self._mark(_address(table), _address(ids), ids.size, value)

    def all_set(self, flags: NDArray[np.bool_], ids: Ids) -> bool:
        ids = self._places(ids, flags.size)
        return bool(self._all_set(_address(flags), _address(ids), ids.size))

    def copy(self, to: Ids, ids: Ids) -> None:
        ids = _plain(ids)
        self._copy(_address(to), _address(ids), ids.size)

    def _places(self, ids: Ids, size: int | None = None) -> Ids:
        """``ids`` as C reads them, each within a table of ``size``: IndexError otherwise, as numpy says."""
        ids = _plain(ids)
        if size is not None and not self._within(_address(ids), ids.size, size):
            raise IndexError(f"expected ids of 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}")
        return ids


class NumpyIds:
    """`IdTools` by numpy."""

    def checked(self, raw: NDArray[np.integer[Any]], limit: int, *, distinct: bool) -> Ids | None:
        if raw.size and not 0 <= int(raw.min()) <= int(raw.max()) < limit:
            return None
        out: Ids = raw.astype(np.int64, copy=True)
        return None if distinct and not _all_distinct(out, limit) else out

    def runs(self, a: Ids, b: Ids | None, least: int) -> tuple[int, int, int]:
        if not a.size:
            return 0, 0, 0
        follows = a[1:] - a[:-1] == 1
        if b is not None:
            follows &= b[1:] - b[:-1] == 1
        ends = np.concatenate(([-1], np.flatnonzero(~follows), [a.size - 1]))
        lengths = ends[1:] - ends[:-1]
        long = lengths[lengths >= least]
        return lengths.size, long.size, int(long.sum())

    def most(self, table: Ids, ids: Ids) -> int:
        return int(table[ids].max()) if ids.size else 0

    def mark(self, table: Ids, ids: Ids, value: int) -> None:
        table[ids] = value

    def all_set(self, flags: NDArray[np.bool_], ids: Ids) -> bool:
        return bool(flags[ids].all())

    def copy(self, to: Ids, ids: Ids) -> None:
        to[: ids.size] = ids


def _address(array: NDArray[Any]) -> int:
    """Of its first element. A quarter of the time that `array.ctypes` takes, which a call asks for a dozen times."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # it may not be written, or holds nothing
        return int(array.ctypes.data)


def _plain(ids: Ids) -> Ids:
    """``ids`` as C reads them: it is told an address, and neither strides nor width. No copy where they are so."""
    return np.ascontiguousarray(ids, dtype=np.int64)


@once
def id_tools() -> IdTools:
    """The C functions, built at the first call; numpy's where that fails."""
    try:
        return NativeIds(build(Path(__file__).with_name("ids.c")))
    except (ConfigError, OSError):
        return NumpyIds()


def _all_distinct(ids: Ids, limit: int) -> bool:
    """Whether no id, 0 to ``limit - 1``, is there twice. 8,192 random ids: 13 us by marks, 46 by sorting; a mark for
    each of 524,288 slots costs 50."""
    if (ids[1:] > ids[:-1]).all():
        return True
    if limit <= 32 * ids.size:
        seen = np.zeros(limit, dtype=np.bool_)
        seen[ids] = True
        return int(np.count_nonzero(seen)) == ids.size
    ranked = np.sort(ids.astype(np.int32) if limit <= 2**31 else ids)  # half the bytes sort twice as fast
    return bool((ranked[1:] != ranked[:-1]).all())
