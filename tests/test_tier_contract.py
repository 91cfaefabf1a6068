"""The contract's own test: a tier that breaks a clause fails the test that is about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import test_memory_tier
from test_memory_tier import MemoryLab

from kvtransfer.kernels.errors import KVTransferError, RecordError
from kvtransfer.tiers.base import PageStatus, RecordBuffer, TierHandle
from kvtransfer.tiers.batch import Batch
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes, grouped, singly
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.parts import Parts

OK, MISS, ERROR = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR
Test = Callable[..., None]
Contract = test_memory_tier.TestMemory  # not by its name: its tests would be collected here again


class FlipsAByte(MemoryTier):
    def do_put(self, job: Job) -> Outcomes:
        for outcome in singly(super().do_put(job)):
            if outcome.moved_bytes:
                self._pages[job.keys[outcome.at]][8000] ^= 255
            yield outcome

    def _wrong(self, job: Job, places: list[int]) -> list[RecordError | None]:
        return [None] * len(places)


class PutsIntoItsSource(MemoryTier):
    def do_put(self, job: Job) -> Outcomes:
        for buffer in job.buffers:
            buffer.payload[buffer.payload.size - 1] ^= 1  # the padding: no checksum covers it
        return super().do_put(job)


class WritesBesideTheBuffer(MemoryTier):
    def do_get(self, job: Job) -> Outcomes:
        for outcome in singly(super().do_get(job)):
            payload = job.buffers[outcome.at].payload
            np.lib.stride_tricks.as_strided(payload, (payload.size + 1,))[-1] = 0
            yield outcome


class DoesNotVerify(MemoryTier):
    def _wrong(self, job: Job, places: list[int]) -> list[RecordError | None]:
        return [None] * len(places)


class DoesNotSetAside(MemoryTier):
    def do_set_aside(self, job: Job) -> Outcomes:
        return ()


class TakesUnsealed(MemoryTier):
    def _put(self, job: Job) -> Any:
        return grouped(self.do_put(job))


class Overwrites(MemoryTier):
    def do_put(self, job: Job) -> Outcomes:
        for _ in self.do_remove(job):
            pass
        return super().do_put(job)


class ShiftsItsAnswers(MemoryTier):
    def do_lookup(self, job: Job) -> Outcomes:
        outcomes = list(singly(super().do_lookup(job)))
        for at, outcome in enumerate(outcomes):
            yield outcome._replace(at=(at + 1) % len(outcomes))


class FailsAllForOne(MemoryTier):
    def _put(self, job: Job) -> Any:
        outcomes = list(singly(super()._put(job)))
        if any(outcome.status is ERROR for outcome in outcomes):
            outcomes = [outcome._replace(status=ERROR) for outcome in outcomes]
        return [outcomes]


class ForgetsPagesOfLongBatches(MemoryTier):
    def do_put(self, job: Job) -> Outcomes:
        for outcome in singly(super().do_put(job)):
            if len(job.keys) < 30 or outcome.at:
                yield outcome


class RemovesWhatIsPinned(MemoryTier):
    def _remove(self, job: Job) -> Any:
        return grouped(self.do_remove(job))


class EvictsWhatIsPinned(MemoryTier):
    def _make_room(self, buffer: RecordBuffer) -> bool:
        held, self.pins._until = self.pins._until, {}
        try:
            return super()._make_room(buffer)
        finally:
            self.pins._until = held


class Overflows(MemoryTier):
    def _make_room(self, buffer: RecordBuffer) -> bool:
        self._used_bytes += buffer.payload.size + buffer.trailer.size
        return True


class IgnoresDeadlines(MemoryTier):
    def put_from(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], *, deadline_s: float | None = None
    ) -> TierHandle:
        return super().put_from(keys, buffers)


class CallsBackTwice(MemoryTier):
    def _submit(self, batch: Batch) -> Batch:
        add = batch.add_done_callback

        def twice(callback: Callable[[TierHandle], object]) -> None:
            add(callback)
            add(callback)

        batch.add_done_callback = twice  # type: ignore[method-assign]
        return super()._submit(batch)


class NeverAnswersTheLast(MemoryTier):
    def _submit(self, batch: Batch) -> Batch:
        if batch.verb == "lookup":
            batch.begin()
            batch.settle_many((p, OK, None) for p in range(len(batch.keys) - 1))
            return batch
        return super()._submit(batch)


class LosesThePageOfACancelledBatch(MemoryTier):
    def _submit(self, batch: Batch) -> Batch:
        if batch.verb == "put" and len(batch.keys) == 200:
            batch.begin([0])
            batch.settle(0, OK)
        return super()._submit(batch)


class DropsAtClose(MemoryTier):
    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        super().close(drain=False, timeout_s=timeout_s)


class ServesAfterClose(MemoryTier):
    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        pass


class LeavesAThread(MemoryTier):
    def do_close(self) -> None:
        super().do_close()
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


class SharesOneBuffer(MemoryTier):
    """Not thread-safe: two gets at once read into each other."""

    def do_get(self, job: Job) -> Outcomes:
        self._where = job.buffers
        for outcome in singly(super().do_get(job)):
            time.sleep(0.001)
            if outcome.status is OK and self._where is not job.buffers:
                job.buffers[outcome.at].payload[0] ^= 1
            yield outcome

    def _wrong(self, job: Job, places: list[int]) -> list[RecordError | None]:
        return [None] * len(places)


class CountsNothing(MemoryTier):
    def do_get(self, job: Job) -> Outcomes:
        for outcome in singly(super().do_get(job)):
            yield outcome._replace(moved_bytes=0)


class TakesAnyMemory(MemoryTier):
    def __init__(self, capacity_bytes: int, **more: Any) -> None:
        super().__init__(capacity_bytes, **more)
        self.needs_registration = True

    def _require(self, parts: Parts) -> None:
        pass


class TakesShortRecords(MemoryTier):
    def do_get(self, job: Job) -> Outcomes:
        for at, key in enumerate(job.keys):
            record = self._pages.get(key)
            if record is None:
                yield Outcome(at, MISS)
            else:
                payload, trailer = job.buffers[at]
                payload[: record.size] = record[: payload.size]
                trailer[: record.size - payload.size] = record[payload.size :]
                yield Outcome(at, OK, moved_bytes=record.size)

    def _wrong(self, job: Job, places: list[int]) -> list[RecordError | None]:
        return [None] * len(places)


class AcceptsAnything(MemoryTier):
    def lookup(self, keys: Sequence[bytes]) -> TierHandle:
        return super().lookup([key for key in keys if len(key) == 32])


CASES: list[tuple[type[MemoryTier], Iterable[Test]]] = [
    (FlipsAByte, [Contract.test_a_record_comes_back_byte_for_byte, Contract.test_a_long_batch]),
    (PutsIntoItsSource, [Contract.test_a_record_comes_back_byte_for_byte]),
    (WritesBesideTheBuffer, [Contract.test_a_record_comes_back_byte_for_byte, Contract.test_a_long_batch]),
    (Overwrites, [Contract.test_the_first_value_of_a_key_stays]),
    (ShiftsItsAnswers, [Contract.test_hits_and_misses_keep_their_places]),
    (CountsNothing, [Contract.test_hits_and_misses_keep_their_places]),
    (TakesUnsealed, [Contract.test_an_unsealed_page_spoils_no_other]),
    (FailsAllForOne, [Contract.test_an_unsealed_page_spoils_no_other]),
    (ForgetsPagesOfLongBatches, [Contract.test_a_long_batch]),
    (TakesShortRecords, [Contract.test_a_short_record_is_a_miss]),
    (AcceptsAnything, [Contract.test_bad_input_is_refused_before_anything_is_touched]),
    (CallsBackTwice, [Contract.test_handles_call_back_once_and_can_be_awaited]),
    (IgnoresDeadlines, [Contract.test_a_deadline_of_nothing_begins_nothing]),
    (LosesThePageOfACancelledBatch, [Contract.test_cancel_leaves_each_page_done_or_undone]),
    (RemovesWhatIsPinned, [Contract.test_pins]),
    (EvictsWhatIsPinned, [Contract.test_the_capacity_holds]),
    (Overflows, [Contract.test_the_capacity_holds]),
    (SharesOneBuffer, [Contract.test_many_threads]),
    (DropsAtClose, [Contract.test_close_drains_and_refuses_what_comes_after]),
    (ServesAfterClose, [Contract.test_close_drains_and_refuses_what_comes_after]),
]


class BrokenLab(MemoryLab):
    def __init__(self, kind: type[MemoryTier]) -> None:
        self.kind = kind


def run(test: Test, kind: type[MemoryTier], *args: Any) -> None:
    test(Contract(), BrokenLab(kind), *args)


@pytest.mark.parametrize(
    ("kind", "test"),
    [(kind, test) for kind, tests in CASES for test in tests],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_tier_fails(kind: type[MemoryTier], test: Test) -> None:
    run(test, MemoryTier)
    with pytest.raises((AssertionError, pytest.fail.Exception, KVTransferError)):
        run(test, kind)


@pytest.mark.parametrize("kind", [DoesNotVerify, DoesNotSetAside])
@pytest.mark.parametrize("where", ["payload", "trailer"])
def test_rot_that_goes_unseen_or_stays_fails(kind: type[MemoryTier], where: str) -> None:
    with pytest.raises(AssertionError):
        run(Contract.test_a_flipped_bit_is_a_miss_and_is_set_aside, kind, where)


def test_a_thread_left_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tier_contract.LIMIT_S", 0.3)
    with pytest.raises(AssertionError):
        run(Contract.test_nothing_is_left_behind, LeavesAThread)


def test_memory_that_was_not_registered_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run(Contract.test_registration, TakesAnyMemory)


def test_a_batch_without_an_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tier_contract.LIMIT_S", 0.3)
    with pytest.raises(TimeoutError):
        run(Contract.test_hits_and_misses_keep_their_places, NeverAnswersTheLast)
