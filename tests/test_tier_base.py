"""Results of a tier's batches."""

from __future__ import annotations

import pytest

from kvtransfer.kernels.errors import TierError
from kvtransfer.tiers.base import BatchResult, PageStatus

OK, MISS, ERROR, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.CORRUPT


@pytest.mark.parametrize(
    ("statuses", "prefix", "all_ok"),
    [((), 0, True), ((OK,), 1, True), ((MISS, OK), 0, False), ((OK, OK, CORRUPT, OK), 2, False)],
)
def test_prefix_and_positions(statuses: tuple[PageStatus, ...], prefix: int, all_ok: bool) -> None:
    result = BatchResult(statuses)
    assert (result.prefix_pages, result.all_ok) == (prefix, all_ok)
    assert sorted(p for s in PageStatus for p in result.positions(s)) == list(range(len(statuses)))


def test_require_names_pages_and_the_first_cause() -> None:
    BatchResult((OK, OK)).require()
    first = OSError("disk gone")
    with pytest.raises(
        TierError, match=r"expected 4 pages ok, got at positions 1 \(miss\), 3 \(error\): disk gone"
    ) as got:
        BatchResult((OK, MISS, OK, ERROR), {3: first}).require()
    assert got.value.__cause__ is first
    with pytest.raises(TierError, match="and 2 more"):
        BatchResult((MISS,) * 10).require()
