"""Page ids at the door: refused on the CPU before anything is touched, on the GPU by a status that gates writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_helpers import (
    CTAS,
    DEVICE,
    as_unsigned,
    fresh_generator,
    make_table,
    on_device,
    page_first_memory,
    ready_memory,
)

from kvtransfer.kernels.check import (
    NO_POSITION,
    STATUS_WORDS,
    check_ids,
    device_ids,
    explain_status,
    fresh_status,
    host_ids,
)
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.mapped import mapped_copy
from kvtransfer.kernels.relayout import relayout
from kvtransfer.kernels.spec import KVSpec

SPEC = KVSpec.attention(2, 2, kv_heads=2, head_dim=8, itemsize=2)


# -- on the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [3]),
        (np.int32(3), [3]),
        ([4, 0, 2], [4, 0, 2]),
        ((1,), [1]),
        (range(2, 5), [2, 3, 4]),
        (np.array([4, 1], dtype=np.uint8), [4, 1]),
        (np.arange(5)[::-2], [4, 2, 0]),
        (torch.tensor([3, 1], dtype=torch.int32), [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        ([], []),
        (torch.empty(0), []),
    ],
)
def test_good_ids_become_an_int64_array(given: Any, expected: list[int]) -> None:
    out = host_ids(given, 5, "page", distinct=True)
    assert out.dtype == np.int64
    assert out.tolist() == expected


def test_ids_are_copied() -> None:
    given = np.array([1, 2])
    out = host_ids(given, 5, "page", distinct=True)
    given[0] = 4
    assert out.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 5], "page ids: expected 0 to 4, got 5 at position 1"),
        ([1, -1, 9], "page ids: expected 0 to 4, got -1 at position 1"),
        (5, "page ids: expected 0 to 4, got 5 at position 0"),
        (np.array([2**63], dtype=np.uint64), f"expected 0 to 4, got {2**63} at position 0"),
        (torch.tensor([0, 2**40]), f"expected 0 to 4, got {2**40} at position 1"),
        ([3, 1, 3], "page ids: expected distinct ids, got 3 at positions [0, 2]"),
        ([1.0, 2.0], "expected one axis of integers, got shape (2,) of float64"),
        (np.zeros((2, 2), dtype=np.int64), "expected one axis of integers, got shape (2, 2) of int64"),
        (np.zeros((0, 2), dtype=np.int64), "expected one axis of integers, got shape (0, 2) of int64"),
        (torch.tensor(3), "expected one axis of integers, got shape () of int64"),
        (torch.ones(2), "expected one axis of integers, got shape (2,) of torch.float32"),
        (torch.ones(2, dtype=torch.bfloat16), "expected one axis of integers, got shape (2,) of torch.bfloat16"),
        (torch.ones(2, dtype=torch.bool), "expected one axis of integers, got shape (2,) of bool"),
        ([True, False], "expected one axis of integers, got shape (2,) of bool"),
        ([[0], [1, 2]], "expected one axis of integers, got a ragged sequence"),
        ([2**70], "expected one axis of integers, got shape (1,) of object"),
        (True, "expected integers, a numpy array or a tensor, got bool"),
        ("12", "expected integers, a numpy array or a tensor, got str"),
        (None, "expected integers, a numpy array or a tensor, got NoneType"),
        (1.5, "expected integers, a numpy array or a tensor, got float"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "expected CPU ids here, got a tensor on meta"),
    ],
)
def test_bad_ids_are_refused(given: Any, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        host_ids(given, 5, "page", distinct=True)
    assert message in str(error.value)


@pytest.mark.parametrize("limit", [600, 32 * 500, 32 * 500 + 1, 2**31, 2**31 + 1, 2**40])
@pytest.mark.parametrize("order", ["random", "up", "down"])
def test_a_duplicate_is_found_among_many_ids_of_any_range(limit: int, order: str) -> None:
    rng = np.random.default_rng()
    ids = np.unique(np.concatenate((rng.integers(0, limit, 5000), [0, limit - 1])))
    ids = np.concatenate((ids[:499], [limit - 1]))
    assert ids.size == 500
    ids = {"random": rng.permutation(ids), "up": ids, "down": ids[::-1]}[order]
    assert host_ids(ids, limit, "page", distinct=True).tolist() == ids.tolist()
    first, second = sorted(rng.choice(500, 2, replace=False).tolist())
    ids = ids.copy()
    ids[second] = ids[first]
    with pytest.raises(LayoutError) as error:
        host_ids(ids, limit, "page", distinct=True)
    assert f"expected distinct ids, got {ids[first]} at positions [{first}, {second}]" in str(error.value)
    assert host_ids(ids, limit, "page", distinct=False).tolist() == ids.tolist()


def test_ids_may_repeat_where_they_are_only_read() -> None:
    assert host_ids([3, 1, 3], 5, "slot", distinct=False).tolist() == [3, 1, 3]


# -- in tensors on the device ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "contiguous int32 or int64 vector, got (2, 2) of torch.int64"),
        (torch.zeros((), dtype=torch.int64), "contiguous int32 or int64 vector, got () of torch.int64"),
        (torch.zeros(2), "contiguous int32 or int64 vector, got (2,) of torch.float32"),
        (torch.zeros(2, dtype=torch.int16), "contiguous int32 or int64 vector, got (2,) of torch.int16"),
        (torch.zeros(8, dtype=torch.int64)[::2], "contiguous int32 or int64 vector, got (4,) of torch.int64"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "expected them on cpu, got meta"),
    ],
)
def test_device_ids_of_another_shape_type_or_device_are_refused(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        device_ids(ids, torch.device("cpu"), "pool page")
    assert message in str(error.value)
    assert str(error.value).startswith("pool page ids: ")


def test_good_device_ids_come_back_as_they_are() -> None:
    ids = torch.arange(3, dtype=torch.int32)
    assert device_ids(ids, torch.device("cpu"), "page") is ids


class Checker:
    """Status and scratch of one pool of ``limit`` pages, kept over calls as an engine does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen = torch.zeros(limit + 2, dtype=torch.int32, device=DEVICE)  # a guard word at each end
        self.seen[0] = self.seen[-1] = 77
        self.stamp = 0

    def __call__(self, ids: torch.Tensor) -> list[int]:
        self.stamp += 1
        status = torch.tensor(fresh_status(), dtype=torch.int32, device=DEVICE)
        check_ids(ids, self.limit, status, self.seen[1:-1], self.stamp)
        assert self.seen[0] == self.seen[-1] == 77
        words: list[int] = status.tolist()
        return words


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([4, 0, 2], [0, NO_POSITION, NO_POSITION, 0]),
        ([0, 5, 1, 6], [1, 1, NO_POSITION, 0]),
        ([0, 1, -1], [1, 2, NO_POSITION, 0]),
        ([-(2**31)], [1, 0, NO_POSITION, 0]),
        ([2**31 - 1], [1, 0, NO_POSITION, 0]),
        ([], [0, NO_POSITION, NO_POSITION, 0]),
    ],
)
def test_ids_out_of_range_are_found_on_the_device(dtype: torch.dtype, ids: list[int], expected: list[int]) -> None:
    assert Checker(5)(on_device(np.array(ids, dtype=np.int64), dtype)) == expected


def test_ids_beyond_32_bits_are_out_of_range() -> None:
    assert Checker(5)(on_device(np.array([3, 2**32 + 1, 2**40]))) == [1, 1, NO_POSITION, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_duplicate_is_found_on_the_device(dtype: torch.dtype) -> None:
    words = Checker(9)(on_device(np.array([3, 1, 3, 5]), dtype))
    assert words[:2] == [2, NO_POSITION]
    assert words[2] in (0, 2)  # which of the two came second is the device's choice
    both = Checker(9)(on_device(np.array([3, 1, 3, 9]), dtype))
    assert (both[0], both[1]) == (3, 3)


@pytest.mark.parametrize("count", [1024, 1025, 3000])
def test_more_ids_than_a_program_takes(count: int) -> None:
    rng = fresh_generator()
    ids = rng.permutation(4000)[:count]
    checker = Checker(4000)
    assert checker(on_device(ids)) == list(fresh_status())
    if count > 1024:
        ids[-1] = ids[0]  # in another program's share
        words = checker(on_device(ids))
        assert words[0] == 2
        assert words[2] in (0, count - 1)
    ids[-1] = 4000
    assert checker(on_device(ids)) == [1, count - 1, NO_POSITION, 0]


def test_scratch_is_used_again_by_later_calls() -> None:
    checker = Checker(6)
    for _ in range(3):
        assert checker(on_device(np.arange(6))) == list(fresh_status())
        assert checker(on_device(np.array([2, 2])))[0] == 2


def test_explain_status() -> None:
    assert len(fresh_status()) == STATUS_WORDS
    assert explain_status(fresh_status(), 5, "pool page") is None
    out_of_range = explain_status([1, 7, NO_POSITION, 0], 5, "pool page")
    assert out_of_range == (
        "pool page ids on the GPU: expected 0 to 4, got an id outside it at position 7; nothing was written"
    )
    both = explain_status([3, 7, 2, 0], 5, "pool page")
    assert both is not None
    assert "expected distinct ids, got one for the second time at position 2" in both
    assert "at position 7" in both


@pytest.mark.parametrize("kernel", ["relayout", "mapped"])
@pytest.mark.parametrize(
    ("ids", "good"), [([2, 0, 1], True), ([2, 0, 2], False), ([0, 3, 1], False), ([1, -1, 2], False)]
)
def test_bad_ids_on_the_device_write_nothing(kernel: str, ids: list[int], good: bool) -> None:
    """The whole way: check, then a copy gated by its status, without a look at it in between."""
    rng = fresh_generator()
    src, dst = page_first_memory(SPEC, 3, rng), ready_memory("sglang.layer_first", SPEC, 3, rng)
    table = make_table(coalesce(SPEC, Side.of(src.layout), Side.of(dst.layout), Box.whole(SPEC), order="src"), src, dst)
    status = torch.tensor(fresh_status(), dtype=torch.int32, device=DEVICE)
    digests = torch.zeros(3, SPEC.num_layers, dtype=torch.int64, device=DEVICE)
    pages = on_device(np.array(ids))
    check_ids(pages, 3, status, torch.zeros(3, dtype=torch.int32, device=DEVICE), 1)
    if kernel == "relayout":
        relayout(table, 3, dst_ids=pages, status=status, digests=digests)
    else:
        flags = torch.zeros(SPEC.num_layers, dtype=torch.int32, device=DEVICE)
        mapped_copy(table, 3, flags, CTAS, dst_ids=pages, status=status, digests=digests)
        assert flags.tolist() == [CTAS] * SPEC.num_layers  # no wait is without an end
    src.expect_untouched()
    if good:
        wanted = dst.original_pages()
        wanted[ids] = src.original_pages()
        dst.expect_pages(wanted)
        assert explain_status(status.tolist(), 3, "page") is None
    else:
        dst.expect_untouched()
        assert not as_unsigned(digests).any()
        assert "nothing was written" in (explain_status(status.tolist(), 3, "page") or "")


FAR_IDS = """
import numpy as np
from test_check import test_bad_ids_on_the_device_write_nothing as run
for kernel in ("relayout", "mapped"):
    for ids in ([0, 2**40, 1], [0, -(2**40), 1]):
        run(kernel, ids, False)
print("survived")
"""


def test_ids_far_outside_do_not_reach_memory() -> None:
    """In a process of its own: a bad address ends it without a traceback."""
    here = Path(__file__).parent
    code = f"import os, sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
    if DEVICE.type == "cpu":
        code += "os.environ['TRITON_INTERPRET'] = '1'\n"
    command = [sys.executable, "-c", code + FAR_IDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout
