"""What a cache's handles offer: callbacks, coroutines, hooks; and the core that joins two halves."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import MEMORY, MakeRig, Rig, form, make  # noqa: F401
from engine_helpers import LIMIT_S, until

from kvtransfer.cache import TieredCache
from kvtransfer.directory import Directory
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    LayoutError,
    TierError,
    TransferError,
)
from kvtransfer.layer_loads import KEPT
from kvtransfer.tiers.base import PageStatus

OK = PageStatus.OK


class Toy(torch.nn.Module):
    """Layers that look at what the device holds when they run."""

    def __init__(self, rig: Rig, pages: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(rig.spec.num_layers))
        self.seen: list[Any] = []
        self.rig, self.pages = rig, pages

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = self.rig.spec.layer_offsets
        for number, layer in enumerate(self.layers):
            x = layer(x)
            self.seen.append(self.rig.read(self.pages)[:, offsets[number] : offsets[number + 1]])
        return x


@pytest.mark.parametrize("below", [False, True])
def test_a_forward_waits_layer_by_layer(tmp_path: Any, below: bool) -> None:
    """The whole of `kvtransfer.layerwise`, where the forward is: in one process."""
    rig = Rig("one process", tmp_path, lower={"far": MEMORY})
    try:
        tokens = rig.tokens(4)
        rows = rig.stored(tokens)
        if below:
            rig.cache.flush("host")
            rig.settle()
        with rig.cache.match(tokens) as hit:
            pages = rig.take(4)
            load = rig.cache.load(hit, pages, layerwise=True)
        toy = Toy(rig, pages)
        with layerwise(toy.layers, load=load):
            toy(torch.zeros(1))
        assert np.array_equal(np.concatenate(toy.seen, axis=1), rows)
        assert load.verdict(LIMIT_S).verified
        with pytest.raises(LayoutError), layerwise([*toy.layers, torch.nn.Identity()], load=load):
            pass
        rig.give(pages)
        rig.check()
    finally:
        rig.close()


def test_callbacks_and_coroutines(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    tokens = rig.tokens(3)
    pages = rig.take(3)
    rig.write(pages)
    rig.do("hold", "copy_out")
    store = rig.cache.store(tokens, pages)
    told: list[Any] = []
    store.add_done_callback(told.append)
    assert not told and not store.done() and "running" in repr(store)
    rig.do("let_go")

    async def both() -> Any:
        result = await store
        with rig.cache.match(tokens) as hit:
            load = rig.cache.load(hit, more := rig.take(3))
        return result, await load, more

    stored, loaded, more = asyncio.run(both())
    assert stored.all_ok and loaded.all_ok and told == [store] and "done" in repr(store)
    store.add_done_callback(told.append)
    assert told == [store, store]
    rig.give([*pages, *more])


def test_a_callback_can_not_wait_for_its_own_thread(make: MakeRig) -> None:  # noqa: F811
    rig = make(pages=64)
    rig.do("hold", "copy_out")
    pages = rig.take(4)
    rig.write(pages)
    first = rig.cache.store(rig.tokens(2), pages[:2])
    second = rig.cache.store(rig.tokens(2), pages[2:])
    met: list[str] = []

    def wait(handle: Any) -> None:
        other = second if handle is first else first
        try:
            if not other.done():
                other.result(LIMIT_S)
            rig.cache.close()
        except Exception as error:
            met.append(str(error))

    first.add_done_callback(wait)
    second.add_done_callback(wait)
    rig.do("let_go")
    for store in (first, second):
        store.result(LIMIT_S)
    until(lambda: len(met) == 2, "both were told")
    assert all("callback can't wait" in text for text in met)
    rig.give(pages)


def test_a_callback_of_the_thread_that_closes_can_not_wait_for_that(make: MakeRig) -> None:  # noqa: F811
    """Closing cancels what waits for room, and tells so on the thread that closes."""
    rig = make(slots=4)
    rig.do("hold", "copy_out")
    rig.cache.store(rig.tokens(4), rig.take(4))
    waiting = rig.cache.store(rig.tokens(4), rig.take(4))
    met: list[tuple[int, float, str]] = []

    def close(handle: Any) -> None:
        begun = time.monotonic()
        with pytest.raises(TierError) as error:
            rig.cache.close()
        met.append((threading.get_ident(), time.monotonic() - begun, str(error.value)))

    waiting.add_done_callback(close)
    threading.Timer(0.2, lambda: rig.do("let_go")).start()
    rig.cache.close(drain=False, timeout_s=LIMIT_S)
    ((thread, took_s, said),) = met
    assert thread == threading.get_ident() and took_s < 1 and "callback can't wait" in said


def test_a_callback_that_raises_spoils_nothing(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    rig = make()
    tokens = rig.tokens(2)
    pages = rig.take(2)
    rows = rig.write(pages)
    store = rig.cache.store(tokens, pages)
    store.add_done_callback(lambda handle: 1 / 0 if handle.done() else None)
    store.result(LIMIT_S).require()
    until(lambda: seen, "it was reported")
    rig.settle()
    rig.give(pages)
    assert np.array_equal(rig.loaded(tokens), rows)


def test_free_pages_of_a_running_load_are_its_own(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    tokens = rig.tokens(2)
    rig.stored(tokens)
    rig.do("hold", "copy_in")
    with rig.cache.match(tokens) as hit:
        load = rig.cache.load(hit, pages := rig.take(2))
    with pytest.raises(TransferError, match="under way"):
        load.free_page_ids  # noqa: B018
    rig.do("let_go")
    load.result(LIMIT_S).require()
    assert load.free_page_ids.size == 0
    rig.give(pages)


def test_layers_of_a_load_that_the_mover_has_forgotten(tmp_path: Path) -> None:
    """More loads than it remembers were submitted before their forwards began: all of them have landed."""
    rig = Rig("one process", tmp_path)
    try:
        tokens = rig.tokens(1)
        rows, pages = rig.stored(tokens), rig.take(2)
        loads = []
        with rig.cache.match(tokens) as hit:
            for number in range(KEPT + 2):
                loads.append(rig.cache.load(hit, pages[:1] if not number else pages[1:], layerwise=True))
                loads[-1].result(LIMIT_S).require()
        with pytest.raises(TransferError, match="expected 1 pages"):
            rig.mover.load(loads[0].number)
        loads[0].wait_layer(0)
        loads[0].wait_all()
        with loads[0].computing(1):
            pass
        assert np.array_equal(rig.read(pages[:1]), rows) and loads[0].verdict(LIMIT_S).verified
        rig.give(pages)
        rig.check()
    finally:
        rig.close()


def test_ticks_go_on_whatever_one_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that cancels what is beyond its deadline does not end with somebody's bug."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    rig = Rig("one process", tmp_path, cache={"tick_s": 0.01})
    try:
        met: list[type[Exception]] = [DeadlineExceeded, CapacityError, OSError]
        good = rig.directory.tick

        def tick() -> None:
            if met:
                raise met.pop(0)("met by a tick")
            good()

        monkeypatch.setattr(rig.directory, "tick", tick)
        until(lambda: len(seen) == 3, "all are reported")
        rig.do("hold", "copy_out")
        store = rig.cache.store(rig.tokens(1), pages := rig.take(1), deadline_s=0.05)
        until(lambda: rig.do("held"), "it is under way")
        until(store.expired, "the deadline")
        rig.do("let_go")
        until(store.done, "the store is done")
        rig.give(pages)
        assert seen == [DeadlineExceeded, CapacityError, OSError]
    finally:
        rig.close()


def test_halves_that_do_not_fit_are_refused(make: MakeRig) -> None:  # noqa: F811
    from kvtransfer.books import TierPlan

    rig = make(lower={"far": MEMORY})
    good = [TierPlan("host", "slots", 32), TierPlan("far", "keys")]
    for directory in (
        Directory(rig.page_size + 1, good),
        Directory(rig.page_size, good[:1]),
        Directory(rig.page_size, [TierPlan("host", "slots", 33), good[1]]),
        Directory(rig.page_size, [TierPlan("memory", "slots", 8), good[1]]),
    ):
        with pytest.raises(ConfigError, match="expected a directory"):
            TieredCache(directory, rig.mover)
    with pytest.raises(ConfigError, match="deadline_s"):
        TieredCache(Directory(rig.page_size, good), rig.mover, deadline_s=-1.0)
