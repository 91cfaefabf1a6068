"""Events of ours, over the driver of driver_helpers: contexts, errors, and the GIL."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from driver_helpers import FakeDriver, build_driver
from gil_helpers import gil_counter

from kvtransfer.dma import CopyEngine
from kvtransfer.gpu_events import GpuEvent, GpuEvents
from kvtransfer.kernels.errors import CudaError

STREAM, OTHER_GPU = (SimpleNamespace(cuda_stream=handle) for handle in (0x1000, 0x2000))
DEFAULT = SimpleNamespace(cuda_stream=0)
OURS, OTHERS = 0xA, 0xB  # contexts of the two streams


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(built: FakeDriver) -> Iterator[FakeDriver]:
    gc.collect()  # events of the test before, which a traceback may have kept
    built.library.fake_reset()
    yield built
    assert built.library.fake_depth() == 0, "a context was pushed and not popped"


@pytest.fixture
def events(fake: FakeDriver) -> GpuEvents:
    return GpuEvents(CopyEngine(library=fake.path), STREAM.cuda_stream)


def number(fake: FakeDriver, name: str) -> int:
    return int(ctypes.c_int.in_dll(fake.library, name).value)


def of(fake: FakeDriver, what: str, event: GpuEvent) -> int:
    return int((ctypes.c_uint64 * 256).in_dll(fake.library, f"event_{what}")[event.cuda_event])


@pytest.mark.parametrize("stream", [STREAM, DEFAULT])
@pytest.mark.parametrize("current", [None, OURS, OTHERS])
def test_events_belong_to_their_context_whatever_the_thread_has(
    fake: FakeDriver, events: GpuEvents, stream: Any, current: int | None
) -> None:
    """The default stream's handle is 0 in every context."""
    done: list[int] = []

    def body() -> None:
        if current is not None:
            events._engine.must("cuCtxPushCurrent", current)
        event = events.mark(stream)
        assert of(fake, "context", event) == OURS and of(fake, "stream", event) == stream.cuda_stream + 1
        assert of(fake, "flags", event) == 2, "no timing, which would cost"
        event.wait(stream)
        assert fake.seen("stream") == stream.cuda_stream and fake.seen("value") == event.cuda_event
        assert event.query() and fake.seen("flags") == 0
        del event
        gc.collect()
        assert number(fake, "events_destroyed") == 1
        done.append(fake.library.fake_depth())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [current is not None]


@pytest.mark.parametrize("current", [None, OURS, OTHERS])
def test_a_thread_of_ours_has_their_context_for_good(events: GpuEvents, current: int | None) -> None:
    """C asks for an event there, without a context of its own."""
    said: list[int] = []

    def body() -> None:
        if current is not None:
            events._engine.must("cuCtxPushCurrent", current)
        events.enter()
        event = events.mark(STREAM)
        said.append(events._engine.function("cuEventQuery")(event.cuda_event))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert said == [0]


def test_a_stream_of_torch_waits_for_one(fake: FakeDriver, events: GpuEvents) -> None:
    event = events.mark(STREAM)
    torch.cuda.Stream.wait_event(cast(torch.cuda.Stream, STREAM), cast(torch.cuda.Event, event))
    assert fake.seen("stream") == STREAM.cuda_stream and fake.seen("value") == event.cuda_event


def test_what_the_driver_says_of_an_event(fake: FakeDriver, events: GpuEvents) -> None:
    event = events.mark(STREAM)
    for code, passed in ((0, True), (600, False)):
        fake.set("fake_query_code", code)
        assert event.query() is passed
    fake.set("fake_query_code", 1)
    with pytest.raises(CudaError, match=r"cuEventQuery returned 1 CUDA_ERROR_INVALID_VALUE") as caught:
        event.query()
    assert caught.value.code == 1
    with pytest.raises(CudaError, match="cuEventRecord returned 400"):
        event.record(OTHER_GPU)
    event.wait(OTHER_GPU)  # an engine there works on the same host memory
    assert fake.seen("stream") == OTHER_GPU.cuda_stream and fake.seen("value") == event.cuda_event
    fake.set("fake_code", 1)
    with pytest.raises(CudaError, match="cuStreamWaitEvent returned 1"):
        event.wait(STREAM)
    fake.set("fake_code", 0)


def test_each_is_destroyed_once_and_none_that_was_not_made(fake: FakeDriver, events: GpuEvents) -> None:
    kept = [events.mark(STREAM) for _ in range(5)]
    assert number(fake, "events_made") == 5 and number(fake, "events_destroyed") == 0
    kept.clear()
    gc.collect()
    assert number(fake, "events_destroyed") == 5
    fake.set("fake_code", 2)
    with pytest.raises(CudaError, match="cuEventCreate returned 2"):
        events.mark(STREAM)
    fake.set("fake_code", 0)
    last = events.mark(STREAM)
    fake.set("fake_code", 4)  # what a driver says that has been torn down
    del last
    gc.collect()
    assert number(fake, "events_destroyed") == 6


def test_no_verb_gives_the_gil_away(fake: FakeDriver, events: GpuEvents) -> None:
    """Each call of the driver takes 2 ms: whoever asks for the GIL meanwhile would get it."""
    event = events.mark(STREAM)
    spare = [events.mark(STREAM)]
    verbs: dict[str, Callable[[], object]] = {
        "mark": lambda: events.mark(STREAM), "record": lambda: event.record(STREAM),
        "wait": lambda: event.wait(STREAM), "query": event.query, "destroy": spare.clear,
    }  # fmt: skip
    fake.set("fake_sleep_us", 2000)
    away = ctypes.CDLL(None).usleep
    with gil_counter() as count:
        before = count()
        away(2000)
        assert count() > before, "a call that gives it away is seen"
        for name, verb in verbs.items():
            before = count()
            verb()
            assert count() == before, name
