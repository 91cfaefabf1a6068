"""Layer-wise loads and stores inside a forward: eager, compiled, piecewise CUDA graphs, full graph replay.

The model's layer i reads every component of layer i of the loaded pages, so its output is exact only if each
wait covered all of them; each load is held back behind a busy stream, so that a missing wait shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu_helpers import Rig, make_rig, shuffled, spin

from kvtransfer.hooks import layerwise, prepare
from kvtransfer.kernels.errors import TransferError
from kvtransfer.kernels.spec import Component, KVSpec

pytestmark = pytest.mark.gpu

LAYERS = 5
SPEC = KVSpec.uniform(LAYERS, 16, (Component("k", 4, 256), Component("v", 4, 128), Component("scale", 1, 32)))
PAGES, SLOTS = shuffled(24, 64, 1), shuffled(24, 64, 2)


class Layer(torch.nn.Module):
    """Sums the bytes of all components of its pages into the stream of hidden states."""

    def __init__(self, views: list[torch.Tensor], ids: torch.Tensor) -> None:
        super().__init__()
        self.views, self.ids = views, ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            x = x * 3 + view[self.ids].sum(dtype=torch.int64)
        return x


class Model(torch.nn.Module):
    def __init__(self, rig: Rig) -> None:
        super().__init__()
        ids = torch.from_numpy(PAGES).cuda()
        views = [[rig.pool.view(i, c, torch.int32) for c in range(3)] for i in range(LAYERS)]
        self.layers = torch.nn.ModuleList(Layer(v, ids) for v in views)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def expected(rig: Rig) -> int:
    """The model's output for what the slots hold, by numpy, in int64 arithmetic that wraps."""
    rows = rig.slots(SLOTS).numpy()
    x = np.int64(1)
    with np.errstate(over="ignore"):
        for layer in range(LAYERS):
            at = SPEC.layer_offsets[layer]
            for c in SPEC.layers[layer]:
                n = c.page_bytes(16)
                x = np.int64(x * np.int64(3) + rows[:, at : at + n].copy().view(np.int32).sum(dtype=np.int64))
                at += n
    return int(x)


class Bench:
    """A rig whose load is always late: the transfer waits for a declared stream that spins."""

    def __init__(self, path: str) -> None:
        self.compute, self.late = torch.cuda.Stream(), torch.cuda.Stream()
        self.rig = make_rig(
            "sglang.layer_first", SPEC, pages=64, slots=64, streams=[self.compute, self.late], path=path
        )
        self.model = Model(self.rig)
        self.one = torch.ones((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def rounds(self, run: Callable[[torch.Tensor], torch.Tensor], count: int = 4) -> None:
        for _ in range(count):
            self.rig.fill_slots(SLOTS)
            spin(self.late, 10)
            load = self.rig.engine.load(SLOTS, PAGES, layerwise=True)
            with torch.cuda.stream(self.compute), layerwise(self.model.layers, load):
                out = run(self.one)
            self.compute.synchronize()
            assert int(out) == expected(self.rig)
            load.result(20)


@pytest.fixture(params=["staged", "mapped", "strided"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_eager(bench: Bench) -> None:
    bench.rounds(bench.model)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in bench.model.layers)
    bench.rig.close()


def test_without_the_hooks_the_forward_reads_too_early(bench: Bench) -> None:
    with torch.cuda.stream(bench.compute):
        bench.model(bench.one)  # what is loaded at a first call waits for the device, and so for the load
    bench.rig.fill_slots(SLOTS)
    spin(bench.late, 150)
    load = bench.rig.engine.load(SLOTS, PAGES, layerwise=True)
    with torch.cuda.stream(bench.compute):
        out = bench.model(bench.one)
    bench.compute.synchronize()
    assert int(out) != expected(bench.rig)
    load.result(20)
    bench.rig.close()


def test_compiled_with_graph_breaks() -> None:
    bench = Bench("staged")
    compiled = torch.compile(bench.model)
    bench.rounds(compiled)
    torch.compiler.reset()
    remove = prepare(bench.model.layers)
    compiled = torch.compile(bench.model)
    compiled(bench.one)  # compiled before the first load
    bench.rounds(compiled)
    remove()
    torch.compiler.reset()
    late = torch.compile(bench.model)
    late(bench.one)
    bench.rig.fill_slots(SLOTS)
    load = bench.rig.engine.load(SLOTS, PAGES, layerwise=True)
    with (
        pytest.raises(TransferError, match="discard"),
        torch.cuda.stream(bench.compute),
        layerwise(bench.model.layers, load),
    ):
        late(bench.one)
    load.result(20)
    torch.compiler.reset()
    bench.rig.close()


class Graphed(torch.nn.Module):
    """A layer behind a CUDA graph of its own; its hooks run between the graphs."""

    def __init__(self, layer: torch.nn.Module, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self.x = x
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.out = layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.graph.replay()
        out: torch.Tensor = self.out
        return out


def test_piecewise_graphs_with_hooks_between(bench: Bench) -> None:
    x, pieces = bench.one.clone(), []
    bench.model(x)  # warm up outside the capture
    torch.cuda.synchronize()
    for layer in bench.model.layers:
        pieces.append(Graphed(layer, x, bench.compute))
        x = pieces[-1].out
    bench.model.layers = torch.nn.ModuleList(pieces)
    bench.rounds(bench.model)
    bench.rig.close()


def test_full_graph_after_wait_all(bench: Bench) -> None:
    graph = torch.cuda.CUDAGraph()
    bench.model(bench.one)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=bench.compute):
        out = bench.model(bench.one)
    for _ in range(4):
        bench.rig.fill_slots(SLOTS)
        spin(bench.late, 10)
        load = bench.rig.engine.load(SLOTS, PAGES, layerwise=True)
        load.wait_all(bench.compute)
        with torch.cuda.stream(bench.compute):
            graph.replay()
        bench.compute.synchronize()
        assert int(out) == expected(bench.rig)
        load.result(20)
    bench.rig.close()


def test_layers_leave_as_they_are_written() -> None:
    for path in ("staged", "strided"):
        bench = Bench(path)
        ids = torch.from_numpy(PAGES).cuda()

        class Writer(torch.nn.Module):
            def __init__(self, views: list[torch.Tensor], value: int) -> None:
                super().__init__()
                self.views, self.value = views, value

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                torch.cuda._sleep(2_000_000)
                for view in self.views:
                    view.index_fill_(0, ids, self.value)  # noqa: B023
                return x

        views = [[bench.rig.pool.view(i, c, torch.uint8) for c in range(3)] for i in range(LAYERS)]
        model = torch.nn.Sequential(*(Writer(v, 17 * (i + 1)) for i, v in enumerate(views)))
        store = bench.rig.engine.store(PAGES, SLOTS, layerwise=True)
        with torch.cuda.stream(bench.compute), layerwise(model, store=store):
            model(bench.one)
        store.result(20)
        rows = bench.rig.slots(SLOTS)
        for i in range(LAYERS):
            part = rows[:, SPEC.layer_offsets[i] : SPEC.layer_offsets[i + 1]]
            assert (part == 17 * (i + 1)).all(), f"layer {i} left before it was written"
        bench.rig.close()
