"""The small parts that tiers share: registered memory, pins, sealed records, and what a worker survives."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tier_contract import done, eventually, statuses
from tier_pages import ODD, Arena

from kvtransfer.kernels.errors import ConfigError, LayoutError, OwnershipError, RecordError, TierError
from kvtransfer.tiers.base import PageStatus, RecordBuffer
from kvtransfer.tiers.faulty import Fault, FaultyTier
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.pins import PinBook
from kvtransfer.tiers.registered import RegisteredMemory, overlaps
from kvtransfer.tiers.sealed import check_sealed, check_whole, sealed_or_error, whole_or_error

OK, MISS, ERROR = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR


def test_registered_memory() -> None:
    memory = np.zeros(5 * 4096, np.uint8)
    book = RegisteredMemory("t")
    a, b, c = memory[:4096], memory[4096 : 3 * 4096], memory[4 * 4096 :]
    for part in (c, a, b):
        book.add(part)
    assert [r.size for r in book.regions()] == [4096, 8192, 4096]
    book.require(Parts.of([RecordBuffer(b[4096:], a), RecordBuffer(b, c)]))
    for outside in (memory[3 * 4096 : 4 * 4096], memory[:8192], np.zeros(4096, np.uint8)):
        with pytest.raises(ConfigError, match=r"buffers\[1\].trailer: expected registered memory"):
            book.require(Parts.of([RecordBuffer(b, c), RecordBuffer(b, outside)]))
    for again in (memory, memory[3 * 4096 - 1 : 4 * 4096], a, memory[1:2]):
        with pytest.raises(ConfigError, match="overlaps"):
            book.add(again)
    with pytest.raises(ConfigError, match="expected memory that is registered"):
        book.remove(b[1:])
    book.remove(b)
    with pytest.raises(ConfigError):
        book.require(Parts.of([RecordBuffer(b, c)]))
    for no in (memory[::2], memory.view(np.int8), memory[:0], memory.reshape(5, -1), "x"):
        with pytest.raises(LayoutError, match="register: expected"):
            book.add(no)  # type: ignore[arg-type]
    assert overlaps(memory, [RecordBuffer(a, c)]) and not overlaps(b, [RecordBuffer(a, c)])


def test_memory_in_use_is_not_unregistered() -> None:
    pages = Arena(1).fill()
    tier = FaultyTier(MemoryTier(1 << 20, workers=1), [Fault("delay", seconds=0)])
    gate = threading.Event()

    class Slow(MemoryTier):
        def do_put(self, job: Job) -> Outcomes:
            gate.wait(5)
            return super().do_put(job)

    with Slow(1 << 20) as slow:
        slow.register(pages.payloads)
        handle = slow.put_from(pages.keys, pages.buffers)
        with pytest.raises(OwnershipError, match="no batch uses"):
            slow.unregister(pages.payloads)
        gate.set()
        assert done(handle).all_ok
        slow.unregister(pages.payloads)
    tier.close()
    pages.close()


def test_pins_end() -> None:
    now = [100.0]
    book = PinBook(lambda: now[0])
    book.pin(b"a", 5.0)
    book.pin(b"b", None)
    book.pin(b"c", 5.0)
    book.pin(b"c", 0)
    assert (book.holds(b"a"), book.holds(b"b"), book.holds(b"c")) == (True, True, False)
    now[0] = 105.0
    assert not book.holds(b"a") and book.keys() == [b"b"]
    book.forget(b"b")
    assert book.keys() == []


def test_sealed_and_whole() -> None:
    pages = Arena(2).fill()
    key, buffer = pages.keys[0], pages.buffers[0]
    assert check_whole(key, buffer).payload_bytes == pages.spec.page_bytes
    with pytest.raises(RecordError, match="stored key"):
        check_sealed(pages.keys[1], buffer)
    with pytest.raises(RecordError, match="with padding"):
        check_sealed(key, RecordBuffer(buffer.payload[4096:], buffer.trailer))
    buffer.payload[0] ^= 1
    check_sealed(key, buffer)
    assert sealed_or_error(key, buffer) is None
    assert "payload checksum" in str(whole_or_error(key, buffer))
    with pytest.raises(RecordError, match="checksum"):
        check_whole(key, buffer)
    header = pages.host.header(1)
    pages.host.seal(1, [type(header)(**{**vars(header), "payload_xxh3": None})], checksum=False)
    with pytest.raises(RecordError, match="checksum=True"):
        check_sealed(key, buffer)
    assert "checksum=True" in str(whole_or_error(key, buffer))
    pages.close()


def test_the_quick_checks_find_every_flipped_bit_and_say_what_the_slow_ones_say() -> None:
    pages = Arena(1, ODD).fill()
    key, buffer = pages.keys[0], pages.buffers[0]
    assert sealed_or_error(key, buffer) is None and whole_or_error(key, buffer) is None
    assert "stored key" in str(sealed_or_error(bytes(32), buffer))
    for at in [*range(280), *range(280, 4096, 97), 4095]:
        bit = 1 << (at % 8)
        buffer.trailer[at] ^= bit
        for quick, slow in ((sealed_or_error, check_sealed), (whole_or_error, check_whole)):
            with pytest.raises(RecordError) as told:
                slow(key, buffer)
            assert str(quick(key, buffer)) == str(told.value)
        buffer.trailer[at] ^= bit
    for at in range(0, pages.spec.page_bytes, 13):
        buffer.payload[at] ^= 1
        assert sealed_or_error(key, buffer) is None and whole_or_error(key, buffer) is not None
        buffer.payload[at] ^= 1
    buffer.payload[pages.spec.page_bytes :] ^= 1  # padding is of no page
    assert whole_or_error(key, buffer) is None
    pages.close()


class Moody(MemoryTier):
    """Fails in a way of its caller's choice after the first page of a job."""

    problem: BaseException | None = None

    def do_get(self, job: Job) -> Outcomes:
        for outcome in super().do_get(job):
            yield outcome
            if self.problem is not None:
                raise self.problem


@pytest.mark.parametrize("problem", [RuntimeError("bug"), TierError("refused"), KeyError("k"), RecordError("odd")])
def test_a_worker_outlives_what_a_tier_raises(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page has its outcome, the thread serves the next batch; only a bug is reported as one."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    pages = Arena(3).fill()
    with Moody(1 << 20) as tier:
        done(tier.put_from(pages.keys, pages.buffers)).require()
        tier.problem = problem
        result = done(tier.get_into(pages.keys, pages.buffers))
        assert result.statuses == (OK, ERROR, ERROR)
        assert str(problem) in str(result.errors[1])
        tier.problem = None
        assert done(tier.get_into(pages.keys, pages.buffers)).all_ok
        assert tier.health.times_down == 0 and tier.stats().in_flight == 0
    assert len(reported) == (not isinstance(problem, TierError))
    pages.close()


def test_a_store_that_does_not_answer_takes_the_tier_down() -> None:
    pages = Arena(3).fill()
    with Moody(1 << 20) as tier:
        done(tier.put_from(pages.keys, pages.buffers)).require()
        tier.problem = ConnectionResetError("gone")
        assert statuses(tier.get_into(pages.keys, pages.buffers)) == (OK, ERROR, ERROR)
        tier.problem = None
        assert tier.wait_up(5)
        assert done(tier.get_into(pages.keys, pages.buffers)).all_ok
        assert tier.stats().counters["times_down"] == 1
    pages.close()


def test_a_stalled_call_answers_what_waits_behind_it() -> None:
    """The stuck page keeps its buffer; batches in the queue and new ones are ERROR in time, and it comes back."""
    gate, pages = threading.Event(), Arena(2).fill()

    class Stuck(MemoryTier):
        def __init__(self) -> None:
            super().__init__(1 << 20, timeout_s=0.1)
            self.answers = False

        def do_get(self, job: Job) -> Outcomes:
            gate.wait(10)
            return super().do_get(job)

        def do_probe(self) -> None:
            if not getattr(self, "answers", True):
                raise TimeoutError("still nothing")

    with Stuck() as tier:
        tier.answers = True
        assert tier.wait_up(5)
        tier.answers = False
        first = tier.get_into(pages.keys[:1], pages.buffers[:1])
        second = tier.get_into(pages.keys[1:], pages.buffers[1:])
        result = second.result(5)
        assert result.statuses == (ERROR,) and "unavailable" in str(result.errors[0])
        assert statuses(tier.lookup(pages.keys)) == (ERROR, ERROR)
        assert not first.done()
        gate.set()
        assert statuses(first) == (MISS,)
        tier.answers = True
        assert tier.wait_up(5) and statuses(tier.lookup(pages.keys)) == (MISS, MISS)
    pages.close()


def test_a_store_that_answers_probes_stays_down_while_every_worker_is_stuck() -> None:
    """Nobody would take what it is asked: new pages are ERROR at once, not late."""
    gate, pages = threading.Event(), Arena(1).fill()

    class Stuck(MemoryTier):
        def do_get(self, job: Job) -> Outcomes:
            gate.wait(10)
            return super().do_get(job)

    with Stuck(1 << 20, timeout_s=0.1) as tier:
        first = tier.get_into(pages.keys, pages.buffers)
        eventually(lambda: tier.health.times_down == 1)
        assert not tier.wait_up(0.5)
        assert statuses(tier.lookup(pages.keys)) == (ERROR,)
        gate.set()
        assert statuses(first) == (MISS,)
        assert tier.wait_up(5) and statuses(tier.lookup(pages.keys)) == (MISS,)
    pages.close()


def test_a_page_without_an_answer_is_an_error() -> None:
    class Forgetful(MemoryTier):
        def do_lookup(self, job: Job) -> Outcomes:
            yield Outcome(1, OK)

    with Forgetful(1 << 20) as tier:
        result = done(tier.lookup([bytes(32)] * 3))
        assert result.statuses == (ERROR, OK, ERROR) and "no outcome" in str(result.errors[0])


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"timeout_s": 0}, {"capacity_bytes": -1}])
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        MemoryTier(**{"capacity_bytes": 1, **wrong})
