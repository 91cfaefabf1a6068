"""Loads: the ways in which a prefix gets into the pool for the forward that needs it, the engine's and plain ones."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from baselines import LaunchALayer
from forward import Forward
from rigs import LIMIT_S, Rig

from kvtransfer.hooks import layerwise
from kvtransfer.plan import Plan

LAUNCHES = "one launch a layer"
NO_OVERLAP = "load, then forward"

End = Callable[[], object]
"""Holds the caller until the transfer of a case has been acknowledged; raises what went wrong with it."""


class Case(ABC):
    """One way of loading ``rig.slots`` into ``rig.pages`` for a forward. ``done``: whether the load of the `run` under
    way has ended, from the begin of its forward on."""

    done: Callable[[], bool]
    name = ""
    path = ""
    groups = ""
    hint_s: float | None = None

    def __init__(self, rig: Rig, forward: Forward) -> None:
        self.rig, self.forward = rig, forward

    @abstractmethod
    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        """Load and forward on the current stream: (output, how to wait for the load's end)."""


class LayerwiseLoad(Case):
    """The engine's layer-wise load, with its hooks on the layers."""

    def __init__(self, rig: Rig, forward: Forward, path: str, hint_s: float | None) -> None:
        super().__init__(rig, forward)
        self.name, self.hint_s = "layer-wise load", hint_s
        self._path = None if path == "auto" else path
        self.plan = rig.engine.plan(
            "load", rig.slots, rig.pages, layerwise=True, path=self._path, compute_s_per_layer=hint_s
        )
        self.path = self.plan.path if path != "auto" else f"auto: {self.plan.path}"
        self.groups = groups_text(self.plan)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        load = self.rig.engine.load(
            self.rig.slots, self.rig.pages, layerwise=True, path=self._path, compute_s_per_layer=self.hint_s
        )
        self.done = load.done
        with layerwise(self.forward.layers, load):
            out = self.forward(x)
        return out, lambda: load.result(LIMIT_S)


class NoOverlap(Case):
    """The engine's bulk load, then the forward."""

    name, path, groups = "baseline", NO_OVERLAP, "bulk"

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        load = self.rig.engine.load(self.rig.slots, self.rig.pages)
        load.wait_all(self.rig.stream)
        self.done = load.done
        return self.forward(x), lambda: load.result(LIMIT_S)


class LaunchesBefore(Case):
    """A copy kernel a layer on a stream of its own, all launched before the forward, and an event behind each that the
    layer's hook waits for. (On the CPU: copies layer by layer, all before the forward.) No ids are checked or uploaded,
    no digests computed."""

    name, path = "baseline", LAUNCHES

    def __init__(self, rig: Rig, forward: Forward) -> None:
        super().__init__(rig, forward)
        self.groups = f"1x{rig.shape.layers}"
        self._work = LaunchALayer(rig, "load", LAUNCHES)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, End]:
        ready: list[torch.cuda.Event | None] = []
        copies, compute = self._work.stream, self.rig.stream
        with torch.cuda.stream(copies):  # None: nothing changes
            if copies is not None and compute is not None:
                copies.wait_stream(compute)
            for layer in range(self.rig.shape.layers):
                self._work.move_layer(layer)
                ready.append(None if copies is None else copies.record_event())
        self.done = lambda: ready[-1] is None or ready[-1].query()
        with waiting(self.forward.layers, ready, compute):
            return self.forward(x), lambda: None


@contextmanager
def waiting(
    layers: torch.nn.ModuleList, ready: Sequence[torch.cuda.Event | None], compute: torch.cuda.Stream | None
) -> Iterator[None]:
    """While open, ``compute`` waits for the i-th event before layer i."""

    def hook(event: torch.cuda.Event | None) -> Callable[..., None]:
        def wait(module: torch.nn.Module, args: object) -> None:
            if compute is not None and event is not None:
                compute.wait_event(event)

        return wait

    removers = [m.register_forward_pre_hook(hook(e)) for m, e in zip(layers, ready, strict=True)]
    try:
        yield
    finally:
        for remover in removers:
            remover.remove()


def groups_text(plan: Plan) -> str:
    """Sizes of the layer groups, "1,2,3,4x5,3,2,1"; of one mapped launch what its layers are released by."""
    if plan.path == "mapped":
        return "flags"
    spans = dict.fromkeys((chunk.box.layer_start, chunk.box.layer_stop) for chunk in plan.chunks)
    runs = [(size, len(list(some))) for size, some in itertools.groupby(stop - start for start, stop in spans)]
    return ",".join(f"{size}x{count}" if count > 1 else f"{size}" for size, count in runs)
