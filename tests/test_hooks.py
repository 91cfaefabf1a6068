"""Forward hooks: every component of a layer is there before the layer runs and leaves after it, compiled or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    DEEP,
    HYBRID,
    LIMIT_S,
    TINY,
    Bytes,
    Log,
    Rig,
    Steps,
    component_bytes,
    make_rig,
    random_bytes,
    staged,
    until,
)

from kvtransfer.fifo import Delays
from kvtransfer.handles import TransferHandle
from kvtransfer.hooks import layerwise, prepare
from kvtransfer.kernels.errors import LayoutError, TransferCancelled, TransferError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.record import NOTHING_STORED

PAGES = [3, 0, 5]


class Layer(torch.nn.Module):
    """Reads every component of its layer, and writes what ``writes`` holds for it first."""

    def __init__(self, rig: Rig, layer: int) -> None:
        super().__init__()
        self.rig, self.layer = rig, layer
        self.views = [rig.pool.view(layer, c.name, torch.uint8) for c in rig.spec.layers[layer]]
        self.seen: list[Bytes] = []
        self.writes: Bytes | None = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("the model's own error")
        if self.writes is not None:
            rows = self.rig.side.pages(PAGES)
            start, stop = self.rig.spec.layer_offsets[self.layer : self.layer + 2]
            rows[:, start:stop] = self.writes[:, start:stop]
            self.rig.side.put(PAGES, rows)
        self.seen = [view[PAGES].flatten(1).numpy().copy() for view in self.views]
        return x + 1


class Stack(torch.nn.Module):
    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(rig: Rig, start: int = 0, stop: int | None = None) -> Stack:
    return Stack([Layer(rig, i) for i in range(start, rig.spec.num_layers if stop is None else stop)])


def parts(model: Stack) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def hooks_on(model: Stack) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.layers)


def expected(rig: Rig, rows: Bytes, layer: int) -> list[Bytes]:
    """The components of one layer in page-first rows."""
    out, start = [], rig.spec.layer_offsets[layer]
    for c in rig.spec.layers[layer]:
        out.append(rows[:, start : start + c.page_bytes(rig.spec.page_size)])
        start += out[-1].shape[1]
    return out


def saw(rig: Rig, model: Stack, rows: Bytes) -> list[bool]:
    """For each layer, whether it saw all of its components of ``rows``."""
    return [
        len(layer.seen) == len(layer.views)
        and all(np.array_equal(a, b) for a, b in zip(layer.seen, expected(rig, rows, layer.layer), strict=True))
        for layer in parts(model)
    ]


# -- loads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("engine", [{}, staged()])
@pytest.mark.parametrize(
    ("name", "spec"), [("sglang.layer_first", HYBRID), ("vllm.LBNHC", DEEP), ("page_first", HYBRID)]
)
def test_every_component_of_every_layer_is_there_before_the_layer_runs(
    name: str, spec: KVSpec, engine: dict[str, Any], hooked: bool
) -> None:
    """The last step of each layer's load is held until the forward has come to that layer."""
    steps = Steps()
    lane = "copy_in" if not engine else "scatter"
    gates = [steps.gate(lane, nth) for nth in range(12)]
    armed = False
    rig = make_rig(name, spec, delays=Delays(lambda label: steps(label) if armed else None), **engine)
    slots = [7, 2, 9]
    rows = rig.fill_slots(slots)
    stale, armed = rig.side.pages(PAGES), True
    model = model_of(rig)
    handle = rig.engine.load(slots, PAGES, layerwise=True)
    if hooked:
        came = [threading.Event() for _ in model.layers]
        for layer, event in zip(parts(model), came, strict=True):
            layer.register_forward_pre_hook(lambda m, a, event=event: event.set(), prepend=True)

        def open_late() -> None:
            """Opens the steps that carry a layer once the forward has reached it."""
            for gate, chunk in zip(gates, handle.plan.chunks, strict=False):
                assert came[chunk.box.layer_start].wait(LIMIT_S)
                gate.set()

        opener = threading.Thread(target=open_late)
        opener.start()
        with layerwise(model.layers, load=handle):
            model(torch.zeros(1))
        opener.join(LIMIT_S)
        assert all(saw(rig, model, rows))
    else:
        model(torch.zeros(1))
        assert all(saw(rig, model, stale)), "without hooks the forward reads what was there before"
    steps.open_all()
    handle.result(LIMIT_S)
    rig.close()


def test_waits_go_layer_by_layer_and_hooks_are_removed() -> None:
    log = Log()
    rig = make_rig("sglang.layer_first", DEEP, observer=log)
    rows, model = rig.fill_slots([1, 2, 3]), model_of(rig)
    before = hooks_on(model)
    with layerwise(model.layers, load=rig.engine.load([1, 2, 3], PAGES, layerwise=True)) as nothing:
        assert nothing is None and hooks_on(model) == 2 * 9
        model(torch.zeros(1))
        model(torch.zeros(1))  # a second step waits for what is there already
    assert [layer for _, layer in log.waits] == [*range(9), *range(9)]
    assert hooks_on(model) == before == 0 and all(saw(rig, model, rows))
    model(torch.zeros(1))
    assert len(log.waits) == 18, "outside the block nothing waits"
    rig.close()


def test_a_bulk_load_can_feed_a_forward_too() -> None:
    rig = make_rig()
    rows, model = rig.fill_slots([1, 2, 3]), model_of(rig)
    with layerwise(model.layers, load=rig.engine.load([1, 2, 3], PAGES)):
        model(torch.zeros(1))
    assert all(saw(rig, model, rows))
    rig.close()


def test_nothing_to_load_and_nothing_to_store() -> None:
    rig = make_rig()
    model = model_of(rig)
    with layerwise(model.layers):
        model(torch.zeros(1))
    store = rig.engine.store([], [], layerwise=True)
    with layerwise(model.layers, load=rig.engine.load([], [], layerwise=True), store=store):
        model(torch.zeros(1))
    assert store.result(0).pages == 0
    rig.close()


def test_a_stage_of_a_pipeline_waits_for_its_own_layers() -> None:
    log = Log()
    rig = make_rig("vllm.BLNHC", DEEP, observer=log)
    rows = rig.fill_slots([1, 2, 3])
    load = rig.engine.load([1, 2, 3], PAGES, layerwise=True)
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    for start, stop in ((4, 9), (0, 4)):  # whichever stage runs first
        model = model_of(rig, start, stop)
        with layerwise(model.layers, load=load, store=store, first_layer=start):
            model(torch.zeros(1))
        assert all(saw(rig, model, rows))
    assert [layer for _, layer in log.waits] == [*range(4, 9), *range(4)]
    store.result(LIMIT_S)
    assert np.array_equal(rig.slots([4, 5, 6]), rows)
    rig.close()


def test_a_load_that_fails_stops_the_forward() -> None:
    rig = make_rig()
    model = model_of(rig)
    blocker = rig.engine.store([9], [1], layerwise=True)
    load = rig.engine.load([1, 2, 3], PAGES, layerwise=True)
    assert load.cancel()
    with pytest.raises(TransferCancelled), layerwise(model.layers, load=load):
        model(torch.zeros(1))
    assert not any(layer.seen for layer in parts(model)) and hooks_on(model) == 0
    blocker.cancel()
    rig.close()


# -- stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, staged()])
@pytest.mark.parametrize(("name", "spec"), [("sglang.layer_first", HYBRID), ("sglang.page_first", DEEP)])
def test_each_layer_leaves_as_soon_as_it_is_written(name: str, spec: KVSpec, engine: dict[str, Any]) -> None:
    rig = make_rig(name, spec, **engine)
    model = model_of(rig)
    new, old = random_bytes(rig.rng, 3, spec.page_bytes), rig.slots([4, 5, 6])
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    offsets = spec.layer_offsets

    def check(layer: Layer) -> Callable[..., None]:
        """Before a layer runs: all earlier ones have left, it and later ones have not."""

        def hook(module: Any, args: Any) -> None:
            if layer.layer:
                store.wait_layer(layer.layer - 1)
            cut = offsets[layer.layer]
            assert np.array_equal(rig.slots([4, 5, 6]), np.concatenate((new[:, :cut], old[:, cut:]), axis=1))

        return hook

    for layer in parts(model):
        layer.writes = new
        layer.register_forward_pre_hook(check(layer))
    with layerwise(model.layers, store=store):
        model(torch.zeros(1))
    store.result(LIMIT_S)
    assert np.array_equal(rig.slots([4, 5, 6]), new)
    rig.close()


def test_only_the_first_forward_of_a_block_is_stored() -> None:
    rig = make_rig()
    model = model_of(rig)
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    want = rig.side.pages(PAGES)
    with layerwise(model.layers, store=store):
        model(torch.zeros(1))
        store.result(LIMIT_S)
        for layer in parts(model):
            layer.writes = random_bytes(rig.rng, 3, TINY.page_bytes)
        model(torch.zeros(1))
    assert np.array_equal(rig.slots([4, 5, 6]), want)
    rig.close()


def test_an_exception_inside_removes_the_hooks_and_cancels_the_store_alone() -> None:
    rig = make_rig("sglang.layer_first", DEEP)
    rows, model = rig.fill_slots([1, 2, 3]), model_of(rig)
    load = rig.engine.load([1, 2, 3], PAGES, layerwise=True)
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    parts(model)[5].fails = True
    with pytest.raises(ArithmeticError, match="the model's own error"), layerwise(model.layers, load=load, store=store):
        model(torch.zeros(1))
    assert hooks_on(model) == 0 and load.result(LIMIT_S).pages == 3
    with pytest.raises(TransferCancelled):
        store.result(LIMIT_S)
    until(lambda: not rig.host.ledger.any_busy())
    assert (rig.host.digests[[4, 5, 6]] == NOTHING_STORED).all(), "half of it was written: never to be taken for a page"
    parts(model)[5].fails = False
    again = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    with layerwise(model.layers, store=again):
        model(torch.zeros(1))
    again.result(LIMIT_S)
    assert np.array_equal(rig.slots([4, 5, 6]), rows)
    rig.close()


@pytest.mark.parametrize("require_all", [True, False])
def test_a_layer_that_never_ran_is_noticed(require_all: bool) -> None:
    rig = make_rig("sglang.layer_first", DEEP)
    model = model_of(rig)
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)

    def early_exit() -> None:
        with layerwise(model.layers, store=store, require_all=require_all):
            for layer in parts(model)[:6]:
                layer(torch.zeros(1))

    if require_all:
        with pytest.raises(TransferError, match=r"layers \[6, 7, 8\] ran without their hook, or not at all: discard"):
            early_exit()
        with pytest.raises(TransferCancelled):
            store.result(LIMIT_S)
    else:
        early_exit()
        assert not store.done()
        for layer in (6, 7, 8):
            store.layer_written(layer)  # the caller knows better
        store.result(LIMIT_S)
    assert hooks_on(model) == 0
    rig.close()


# -- refusals --------------------------------------------------------------------------------------


def test_blocks_do_not_nest_over_one_layer() -> None:
    rig = make_rig()
    model, other = model_of(rig), model_of(rig)
    rows = rig.fill_slots([1, 2, 3])
    with layerwise(model.layers, load=rig.engine.load([1, 2, 3], PAGES, layerwise=True)):
        with (
            pytest.raises(TransferError, match="a block is open over these layers already"),
            layerwise(model.layers[1:2]),
        ):
            raise AssertionError("not reached")
        with layerwise(other.layers):  # other layers are no matter
            other(torch.zeros(1))
        model(torch.zeros(1))
    assert all(saw(rig, model, rows)) and hooks_on(model) == 0
    with layerwise(model.layers):
        model(torch.zeros(1))
    rig.close()


def test_layers_that_do_not_fit_are_refused() -> None:
    rig = make_rig()
    model = model_of(rig)
    load = rig.engine.load([1], [1])
    for first_layer, message in (
        (1, "layers: expected at most 2 from layer 1 on, got 3"),
        (-1, "first_layer: expected 0 or more, got -1"),
    ):
        with pytest.raises(LayoutError, match=message), layerwise(model.layers, load=load, first_layer=first_layer):
            raise AssertionError("not reached")
    shared = [model.layers[0], model.layers[1], model.layers[0]]
    with pytest.raises(LayoutError, match="expected distinct modules"), layerwise(shared, load=load):
        raise AssertionError("not reached")
    assert hooks_on(model) == 0
    rig.close()


# -- torch.compile ---------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """A layer that can be compiled: adds what the first byte of its pages holds."""

    def __init__(self, view: torch.Tensor) -> None:
        super().__init__()
        self.view = view
        self.index = torch.tensor(PAGES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.view[self.index].to(torch.float64).sum()


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def plain_model(rig: Rig) -> Stack:
    return Stack([Plain(rig.pool.view(i, "k", torch.uint8)) for i in range(rig.spec.num_layers)])


def sums(rig: Rig) -> float:
    """What `plain_model` gives for the bytes that are in the pool now."""
    pages = np.array(PAGES)
    return float(
        sum(component_bytes(rig.side.layout, rig.side.buffers, i, 0, pages).astype(np.int64).sum() for i in range(3))
    )


def load_late(rig: Rig, slots: list[int]) -> tuple[TransferHandle, threading.Event]:
    """A load whose first step is held back."""
    gate = rig.delays.gate("copy_in")
    return rig.engine.load(slots, PAGES, layerwise=True), gate


def run_late(rig: Rig, model: Stack, forward: Callable[[torch.Tensor], torch.Tensor], slots: list[int]) -> float:
    """One forward in a block, over a load that arrives only after the forward has begun to wait."""
    handle, gate = load_late(rig, slots)
    timer = threading.Timer(0.02, gate.set)
    timer.start()
    with layerwise(model.layers, load=handle):
        out = float(forward(torch.zeros(1, dtype=torch.float64)))
    timer.join(LIMIT_S)
    handle.result(LIMIT_S)
    return out


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("prepared", [False, True])
def test_compiled_forwards_wait_on_every_call(prepared: bool) -> None:
    """Compiled inside the first block, or prepared before: each later block waits for its own load."""
    rig = make_rig()
    model = plain_model(rig)
    remove = prepare(model.layers) if prepared else lambda: None
    forward = torch.compile(model, backend="eager")
    if prepared:
        forward(torch.zeros(1, dtype=torch.float64))  # compiled before the first load
    for round_ in range(3):
        slots = [3 * round_, 3 * round_ + 1, 3 * round_ + 2]
        rig.fill_slots(slots)
        got = run_late(rig, model, forward, slots)
        assert got == sums(rig), f"round {round_}"
        assert hooks_on(model) == (2 * 3 if prepared else 0)
    remove()
    assert hooks_on(model) == 0
    rig.close()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("in_place", [False, True])
def test_layers_that_were_compiled_one_by_one_wait_too(in_place: bool) -> None:
    rig = make_rig()
    model = plain_model(rig)
    if in_place:
        for layer in model.layers:
            layer.compile(backend="eager")
    else:
        model = Stack(
            [
                wrapped
                for layer in model.layers
                if isinstance(wrapped := torch.compile(layer, backend="eager"), torch.nn.Module)
            ]
        )
    for slots in ([0, 1, 2], [3, 4, 5]):
        rig.fill_slots(slots)
        assert run_late(rig, model, model, slots) == sums(rig)
    rig.close()


@pytest.mark.usefixtures("dynamo")
def test_compiled_forwards_feed_a_store() -> None:
    rig = make_rig()
    model = plain_model(rig)
    forward = torch.compile(model, backend="eager")
    for slots in ([0, 1, 2], [3, 4, 5]):
        store = rig.engine.store(PAGES, slots, layerwise=True)
        with layerwise(model.layers, store=store):
            forward(torch.zeros(1, dtype=torch.float64))
        store.result(LIMIT_S)
        assert np.array_equal(rig.slots(slots), rig.side.pages(PAGES))
    rig.close()


@pytest.mark.usefixtures("dynamo")
def test_a_module_that_was_compiled_without_its_hooks_is_noticed() -> None:
    rig = make_rig()
    model = plain_model(rig)
    forward = torch.compile(model, backend="eager")
    forward(torch.zeros(1, dtype=torch.float64))
    rig.fill_slots([0, 1, 2])
    store = rig.engine.store(PAGES, [4, 5, 6], layerwise=True)
    with (
        pytest.raises(TransferError, match=r"layers \[0, 1, 2\] ran without their hook.*hooks\.prepare\(layers\)"),
        layerwise(model.layers, load=rig.engine.load([0, 1, 2], PAGES, layerwise=True), store=store),
    ):
        forward(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TransferCancelled):
        store.result(LIMIT_S)
    torch.compiler.reset()  # as the message says
    assert run_late(rig, model, forward, [0, 1, 2]) == sums(rig)
    rig.close()


def test_prepared_layers_keep_their_hooks_and_do_nothing_outside_a_block() -> None:
    log = Log()
    rig = make_rig(observer=log)
    model = model_of(rig)
    remove = prepare(model.layers)
    model(torch.zeros(1))
    assert hooks_on(model) == 6 and not log.waits
    rows = rig.fill_slots([1, 2, 3])
    with layerwise(model.layers, load=rig.engine.load([1, 2, 3], PAGES, layerwise=True)):
        assert hooks_on(model) == 6, "used as they are"
        model(torch.zeros(1))
    assert all(saw(rig, model, rows)) and hooks_on(model) == 6 and len(log.waits) == 3
    remove()
    assert hooks_on(model) == 0
    assert not list(model.parameters()) and len(list(model.modules())) == 1 + 1 + 3, "a gate is no submodule"
    rig.close()
