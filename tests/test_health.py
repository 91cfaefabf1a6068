"""Whether a store answers: one time-out, probing behind, back by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtransfer.kernels.errors import TierError, UnavailableError
from kvtransfer.kernels.events import HeardOut, Observer
from kvtransfer.tiers.health import Health


class Store:
    """Answers probes while ``answers`` is set."""

    def __init__(self) -> None:
        self.answers = True
        self.probes: list[float] = []

    def probe(self) -> None:
        self.probes.append(time.monotonic())
        if not self.answers:
            raise ConnectionRefusedError("nobody there")


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, what: str, **fields: Any) -> None:
        self.notes.append(what)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def health(store: Store, notes: Notes) -> Iterator[Health]:
    made = Health("h", store.probe, timeout_s=0.2, first_pause_s=0.02, longest_pause_s=0.08, observer=notes)
    yield made
    made.close()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was raised and reported as uncaught."""
    found: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: found.append(str(told.exc_value)))
    return found


def test_a_failure_takes_it_down_until_a_probe_succeeds(health: Health, store: Store, notes: Notes) -> None:
    assert health.up and health.error() is None
    store.answers = False
    health.failed(OSError("reset"))
    health.failed(OSError("again"))
    error = health.error()
    assert isinstance(error, UnavailableError) and "h: unavailable" in str(error) and "reset" in str(error)
    assert error is not health.error()  # each may be raised on its own
    time.sleep(0.3)
    pauses = [b - a for a, b in zip(store.probes, store.probes[1:], strict=False)]
    assert len(store.probes) >= 3 and max(pauses) >= 0.06, "pauses grow"
    store.answers = True
    assert health.wait_up(5) and health.up and health.times_down == 1
    told_by = time.monotonic() + 5
    while len(notes.notes) < 2 and time.monotonic() < told_by:  # told behind the change
        time.sleep(0.01)
    assert notes.notes == ["tier.down", "tier.up"]


def test_who_asks_for_no_events_hears_of_an_outage_too(
    health: Health, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvtransfer.tiers.health"):
        store.answers = False
        health.failed(TierError("port 6380: refused"))
        health.failed(TierError("again"))
        store.answers = True
        assert health.wait_up(5)
        deadline = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    down, up = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert down[0] == "WARNING" and "port 6380: refused" in down[1] and up[0] == "INFO" and "answers" in up[1]


def test_absent_at_the_start(health: Health, store: Store) -> None:
    store.answers = False
    assert not health.try_now() and not health.wait_up(0.05)
    store.answers = True
    assert health.wait_up(5)


def test_a_call_without_an_answer_counts_once(store: Store, notes: Notes) -> None:
    told: list[UnavailableError] = []
    health = Health("h", store.probe, timeout_s=0.05, first_pause_s=0.01, went_down=told.append, observer=notes)
    gate = threading.Event()

    def call() -> None:
        with health.watching():
            gate.wait(5)

    stuck = threading.Thread(target=call)
    stuck.start()
    deadline = time.monotonic() + 5
    while health.times_down == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "no answer within 0.05 s" in str(told[0])
    assert health.wait_up(5)
    time.sleep(0.2)
    assert health.times_down == 1, "the same stuck call does not take it down again"
    with health.watching():
        time.sleep(0.3)
    assert health.times_down == 2
    gate.set()
    stuck.join()
    health.close()


def test_quick_calls_never_take_it_down(health: Health) -> None:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        with health.watching():
            time.sleep(0.001)
    assert health.times_down == 0


def test_other_errors_of_a_probe_are_bugs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health("h", lambda: 1 / 0, timeout_s=1)
    with pytest.raises(ZeroDivisionError):
        health.try_now()


def test_the_threads_of_calls_that_are_overdue(health: Health) -> None:
    with health.watching():
        end = time.monotonic() + 5
        while health.up and time.monotonic() < end:
            time.sleep(0.01)
        assert health.overdue_threads() == {threading.get_ident()} and health.overdue_calls == 1
    assert health.overdue_threads() == set()


def test_without_a_thread_a_failure_takes_nothing_down_for_good(
    health: Health, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit of threads: there is nobody to find out that the store answers again."""
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with health.watching():
            health.failed(OSError("reset"))
        assert health.up
    health.failed(OSError("reset"))
    assert health.times_down == 1 and health.wait_up(5), "the thread was tried again"


def test_a_broken_observer_harms_nobody(store: Store, reported: list[str]) -> None:
    """What it raises is reported; the store comes back, and stalls are found, all the same."""

    class Broken(Observer):
        def noted(self, what: str, **fields: Any) -> None:
            raise ZeroDivisionError(what)

    told: list[UnavailableError] = []
    health = Health(
        "h", store.probe, timeout_s=0.1, first_pause_s=0.02, went_down=told.append, observer=HeardOut(Broken())
    )
    for times in (1, 2):
        health.failed(OSError("reset"))
        assert health.wait_up(5) and len(told) == times
    with health.watching():
        end = time.monotonic() + 5
        while len(told) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert health.times_down == 3 and len(told) == 3
    health.close()
    assert reported[:2] == ["tier.down", "tier.up"]


def test_closing_does_not_wait_for_a_probe_that_hangs() -> None:
    gate = threading.Event()
    health = Health("h", lambda: gate.wait(5), timeout_s=1, first_pause_s=0.0)
    health.failed(TierError("x"))
    time.sleep(0.05)
    started = time.monotonic()
    health.close(timeout_s=0.1)
    assert time.monotonic() - started < 1
    gate.set()
