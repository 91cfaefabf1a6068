"""The handle of a batch and the book that keeps it: states, deadlines, callbacks, input, counters, the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded, LayoutError, TierError
from kvtransfer.kernels.events import Observer
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle
from kvtransfer.tiers.batch_book import BatchBook

OK, MISS, ERROR, CANCELLED = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.CANCELLED
KEYS = [bytes([i]) * 32 for i in range(5)]


def buffers(n: int) -> list[RecordBuffer]:
    return [RecordBuffer(np.zeros(8192, np.uint8), np.zeros(4096, np.uint8)) for _ in range(n)]


@pytest.fixture
def book() -> BatchBook:
    return BatchBook("t")


def test_pages_are_settled_in_any_order_and_a_late_answer_changes_nothing(book: BatchBook) -> None:
    batch = book.open("get", KEYS[:3], buffers(3))
    assert isinstance(batch, TierHandle)
    assert batch.begin() == [0, 1, 2]
    assert batch.begin() == []  # nobody else's
    cause = OSError("gone")
    assert batch.settle(2, ERROR, cause)
    assert not batch.done() and batch.settled_pages == 1 and batch.status_now(2) is ERROR
    assert batch.settle_many([(0, OK, None), (1, MISS, None)], moved_bytes=77) == 2
    assert not batch.settle(1, OK)
    result = batch.result(0)
    assert result.statuses == (OK, MISS, ERROR) and result.errors == {2: cause}
    counters = book.counters()
    assert {name: n for name, n in counters.items() if n} == {"hits": 1, "misses": 1, "errors": 1, "bytes_read": 77}
    assert counters["bytes_written"] == counters["corrupt"] == 0


def test_pages_that_came_to_the_same_are_settled_together(book: BatchBook) -> None:
    """In a run or not, and whatever of them has its outcome already: as `settle_many` does it."""
    batch = book.open("get", KEYS, buffers(5))
    batch.begin()
    ended: list[int] = []
    batch.add_done_callback(lambda _: ended.append(batch.settled_pages))
    assert batch.settle_same([], OK) == batch.settle_same(range(0), OK) == 0
    assert batch.settle_same([1, 2], OK, moved_bytes=20) == 2
    assert batch.settle_same([1, 2], MISS, moved_bytes=5) == 0, "all late"
    cause = OSError("gone")
    batch.settle(4, ERROR, cause)
    assert batch.settle_same(range(2, 5), MISS, moved_bytes=7) == 1, "2 and 4 are late"
    assert batch.moved_bytes == 27 and not ended and batch.unsettled(range(5)) == [0]
    assert batch.settle_same([4, 0, 4], CANCELLED) == 1, "in any order; it is the last"
    assert ended == [5] and batch.settle_same(range(5), OK, moved_bytes=9) == 0 and ended == [5]
    result = batch.result(0)
    assert result.statuses == (CANCELLED, OK, OK, MISS, ERROR) and result.errors == {4: cause}
    assert book.counters()["bytes_read"] == 27 and book.in_flight == 0


def test_a_run_settled_twice_at_once_ends_its_batch_once() -> None:
    for _ in range(200):
        book = BatchBook("t")
        batch = book.open("lookup", KEYS)
        batch.begin()
        ended: list[object] = []
        batch.add_done_callback(ended.append)
        got: list[int] = []

        def settle(run: range, batch: Any = batch, got: list[int] = got) -> None:
            got.append(batch.settle_same(run, OK))

        workers = [threading.Thread(target=settle, args=[run]) for run in (range(5), range(5), range(2, 5))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sum(got) == 5 and ended == [batch] and batch.result(0).all_ok


def test_where_the_buffers_lie_is_looked_at_once(book: BatchBook) -> None:
    """And what they must be besides is asked before anything is touched."""
    given, seen = buffers(3), list[Any]()
    batch = book.open("put", KEYS[:3], given, check=seen.append)
    assert seen == [batch.parts]
    assert batch.parts.where.tolist() == [[part.__array_interface__["data"][0] for part in both] for both in given]
    assert batch.parts.sizes.tolist() == [[8192, 4096]] * 3
    batch.settle_same(range(3), OK)
    read_only = [RecordBuffer(*(np.frombuffer(bytes(4096), np.uint8) for _ in range(2))), *given[1:]]
    mixed = book.open("put", KEYS[:3], read_only)
    assert mixed.parts.where.tolist() == [[part.__array_interface__["data"][0] for part in both] for both in read_only]
    mixed.settle_same(range(3), OK)
    assert len(book.open("lookup", []).parts.where) == 0

    def refuse(parts: Any) -> None:
        raise ConfigError(f"{len(parts.where)} refused")

    with pytest.raises(ConfigError, match="3 refused"):
        book.open("get", KEYS[:3], given, check=refuse)
    assert book.in_flight == 0


def test_result_waits_and_its_time_out_leaves_the_batch_running(book: BatchBook) -> None:
    batch = book.open("lookup", KEYS)
    batch.begin()
    with pytest.raises(DeadlineExceeded, match="5 of 5 pages had no outcome") as got:
        batch.result(0.02)
    assert got.value.pages == (0, 1, 2, 3, 4)
    timer = threading.Timer(0.05, lambda: batch.settle_many((p, OK, None) for p in range(5)))
    timer.start()
    assert batch.result(5).all_ok


def test_cancel_ends_what_waits_and_leaves_what_is_begun(book: BatchBook) -> None:
    batch = book.open("put", KEYS, buffers(5))
    assert batch.begin([1, 3]) == [1, 3]
    assert batch.cancel() and batch.stopping
    assert not batch.done() and batch.buffers  # two are the tier's still
    assert batch.begin([0, 2]) == []
    batch.settle(1, OK)
    batch.settle(3, OK)
    assert batch.result(0).statuses == (CANCELLED, OK, CANCELLED, OK, CANCELLED)
    assert batch.buffers == () and not batch.cancel()


def test_the_deadline_ends_what_waits_without_anybody_looking(book: BatchBook) -> None:
    ended = threading.Event()
    batch = book.open("get", KEYS[:2], buffers(2), deadline_s=0.05)
    batch.add_done_callback(lambda _: ended.set())
    later = book.open("get", KEYS[:2], buffers(2), deadline_s=30)
    assert ended.wait(5)
    assert batch.result(0).statuses == (CANCELLED, CANCELLED) and batch.remaining_s == 0
    assert not later.done() and later.begin() == [0, 1]
    begun = book.open("get", KEYS[:2], buffers(2), deadline_s=0.01)
    assert begun.begin([0]) == [0]
    time.sleep(0.05)
    assert not begun.done() and begun.status_now(1) is CANCELLED
    begun.settle(0, OK)
    assert begun.result(0).statuses == (OK, CANCELLED)
    later.fail(TierError("x"))
    book.close()


def test_a_deadline_does_not_keep_a_batch_alive(book: BatchBook) -> None:
    batch = book.open("lookup", KEYS[:1], deadline_s=60)
    gone = weakref.ref(batch)
    batch.settle(0, OK)
    del batch
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    book.close()


def test_begin_and_cancel_race_for_each_page_and_one_wins() -> None:
    for _ in range(200):
        book = BatchBook("t")
        batch = book.open("lookup", KEYS)
        got: list[int] = []

        def work(batch: Any = batch, got: list[int] = got) -> None:
            for position in range(5):
                mine = batch.begin([position])
                got += mine
                batch.settle_many((p, OK, None) for p in mine)

        worker = threading.Thread(target=work)
        worker.start()
        batch.cancel()
        worker.join()
        assert batch.result(5).positions(OK) == tuple(got)


def test_callbacks_run_where_the_batch_ends_and_a_broken_one_harms_nobody(
    book: BatchBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    batch = book.open("lookup", KEYS[:1])
    seen: list[Any] = []
    batch.add_done_callback(lambda _: 1 / 0)
    batch.add_done_callback(lambda handle: seen.append((threading.get_ident(), handle.done(), book.in_flight)))
    worker = threading.Thread(target=lambda: batch.settle(0, OK))
    worker.start()
    worker.join()
    assert seen == [(worker.ident, True, 0)]
    assert [r.exc_type for r in reported] == [ZeroDivisionError]
    batch.add_done_callback(seen.append)
    assert seen[1] is batch


def test_a_tier_s_thread_cannot_wait_for_itself(book: BatchBook) -> None:
    first, second = book.open("lookup", KEYS[:1]), book.open("lookup", KEYS[:1])
    caught: list[BaseException] = []

    def callback(_: object) -> None:
        try:
            second.result()
        except TierError as error:
            caught.append(error)

    first.add_done_callback(callback)

    def work() -> None:
        book.own_thread()
        first.settle(0, OK)
        second.settle(0, OK)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(5)
    assert not worker.is_alive() and "can't wait" in str(caught[0])


def test_await(book: BatchBook) -> None:
    async def run() -> None:
        batch = book.open("lookup", KEYS[:2])
        threading.Timer(0.02, lambda: batch.settle_many([(0, OK, None), (1, MISS, None)])).start()
        got = await asyncio.wait_for(_plain(batch), 5)
        assert got.statuses == (OK, MISS)
        assert (await batch).statuses == (OK, MISS)

    async def _plain(batch: Any) -> Any:
        return await batch

    asyncio.run(run())


def test_no_pages_is_done_at_once(book: BatchBook) -> None:
    batch = book.open("get", [], [], deadline_s=1)
    assert batch.done() and batch.result(0).all_ok and book.in_flight == 0


@pytest.mark.parametrize(
    ("kind", "keys", "given", "message"),
    [
        (ConfigError, [b"x" * 31], buffers(1), r"keys\[0\]: expected a stored key of 32 bytes, got 31 bytes"),
        (ConfigError, ["x" * 32], buffers(1), "got str"),
        (ConfigError, KEYS[:2], buffers(1), "one buffer a key, got 1 for 2 keys"),
        (LayoutError, KEYS[:1], [RecordBuffer(np.zeros(4096, np.int8), np.zeros(4096, np.uint8))], "got int8"),
        (LayoutError, KEYS[:1], [RecordBuffer(np.zeros(4097, np.uint8), np.zeros(4096, np.uint8))], "got 4097"),
        (LayoutError, KEYS[:1], [RecordBuffer(np.zeros(4096, np.uint8), np.zeros(0, np.uint8))], "trailer.*got 0"),
        (
            LayoutError,
            KEYS[:1],
            [RecordBuffer(np.zeros(8192, np.uint8)[::2], np.zeros(4096, np.uint8))],
            r"strides \(2,\)",
        ),
        (
            LayoutError,
            KEYS[:1],
            [RecordBuffer(np.frombuffer(bytes(4096), np.uint8), np.zeros(4096, np.uint8))],
            "read-only",
        ),
        (LayoutError, KEYS[:2], [(*both, both[0]) for both in buffers(2)], r"buffers\[0\]: .* a payload and a trailer"),
        (LayoutError, KEYS[:2], [buffers(1)[0], buffers(1)[0][:1]], r"buffers\[1\]: .* a payload and a trailer, got 1"),
    ],
)
def test_bad_input_is_refused(book: BatchBook, kind: type[Exception], keys: Any, given: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        book.open("get", keys, given)
    assert book.in_flight == 0 and not any(book.counters().values())


def test_a_read_only_buffer_may_be_put_and_times_are_not_negative(book: BatchBook) -> None:
    book.open("put", KEYS[:1], [RecordBuffer(np.frombuffer(bytes(4096), np.uint8), np.zeros(4096, np.uint8))])
    with pytest.raises(ConfigError, match="deadline_s"):
        book.open("get", KEYS[:1], buffers(1), deadline_s=-1)
    with pytest.raises(ConfigError, match="ttl_s"):
        book.open("pin", KEYS[:1], ttl_s=float("nan"))


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append((what, fields))


def test_close_drains() -> None:
    notes = Notes()
    book = BatchBook("t", notes)
    batch = book.open("lookup", KEYS)
    batch.begin()
    threading.Timer(0.05, lambda: batch.settle_many((p, OK, None) for p in range(5))).start()
    assert book.close(timeout_s=5) == 0
    assert batch.result(0).all_ok and notes.notes == []
    with pytest.raises(TierError, match="t: closed"):
        book.open("lookup", KEYS)
    assert book.close() == 0


def test_close_without_drain_says_what_it_dropped() -> None:
    notes = Notes()
    book = BatchBook("t", notes)
    batch = book.open("put", KEYS, buffers(5))
    batch.begin([0])
    threading.Timer(0.05, lambda: batch.settle(0, OK)).start()
    assert book.close(drain=False, timeout_s=5) == 4
    assert notes.notes == [("tier.dropped", {"name": "t", "pages": 4})]
    assert book.counters()["dropped"] == 4


def test_close_out_of_time_aborts_and_raises() -> None:
    book = BatchBook("t")
    batch = book.open("put", KEYS, buffers(5), deadline_s=60)
    batch.begin([0, 1])
    aborted: list[int] = []
    with pytest.raises(DeadlineExceeded, match="3 pages cancelled, 2 still under way"):
        book.close(timeout_s=0.02, abort=lambda: aborted.append(1))
    assert aborted == [1] and not batch.done()
    batch.settle_many([(0, CANCELLED, None), (1, CANCELLED, None)])
    assert batch.result(0).positions(CANCELLED) == (0, 1, 2, 3, 4)
    book.close(timeout_s=0)
