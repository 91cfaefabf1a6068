"""Forward hooks: each decoder layer waits for its own KV, and lets it go as soon as it is written.

``with layerwise(model.layers, load=handle): model(...)`` works with any torch module list. The pre-hook of
layer i makes the current stream wait until every component of layer i is there; the post-hook of a layer-wise
store says that layer i is written. Hooks are removed at the end, also on an exception.

Under torch.compile a hook is a graph break (it must run on each call), and Dynamo does not look again at hooks
that come or go after it compiled a module. So the hook of a module is one object for its whole life, which
looks up what to wait for when it runs, and leaving the block raises if a layer ran without its hook: then the
forward read KV that may not have been there, and its output must be discarded. Run the first compiled call
inside ``layerwise`` (or attach `LayerGate`s with ``prepare`` before compiling), and every later one works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.errors import LayoutError, TransferError
from kvtransfer.kernels.events import Observer

_ATTRIBUTE = "_kvtransfer_gate"


class Layered(Protocol):
    """A load that can be waited for layer by layer: a `TransferHandle`, or that of a cache."""

    @property
    def num_layers(self) -> int: ...

    @property
    def observer(self) -> Observer: ...

    def wait_layer(self, layer: int) -> None: ...

    def computing(self, layer: int) -> AbstractContextManager[None]: ...


class LayerGate:
    """What the hooks of one module look at. ``wait`` and ``written`` are set while a `layerwise` block is open."""

    def __init__(self) -> None:
        self.wait: Callable[[], None] | None = None
        self.written: Callable[[], None] | None = None
        self.before = torch.compiler.disable(self._before)
        self.after = torch.compiler.disable(self._after)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if self.wait is not None:
            self.wait()

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.written is not None:
            self.written()

    def __reduce__(self) -> tuple[type[LayerGate], tuple[()]]:
        return LayerGate, ()  # a copied or pickled module gets a gate of its own: hooks know theirs by closure

    @classmethod
    def of(cls, module: torch.nn.Module) -> LayerGate:
        """The gate of a module, made at first use. It is no parameter, buffer or submodule of it."""
        gate = module.__dict__.get(_ATTRIBUTE)
        if gate is None:
            gate = cls()
            object.__setattr__(module, _ATTRIBUTE, gate)
        return gate


def prepare(layers: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Attach hooks to stay, for modules that are compiled before the first load. Returns what removes them.

    With them attached, `layerwise` uses them and leaves them in place.
    """
    removers = []
    for module in layers:
        gate = LayerGate.of(module)
        removers += [module.register_forward_pre_hook(gate.before), module.register_forward_hook(gate.after)]

    def remove() -> None:
        for remover in removers:
            remover.remove()

    return remove


@contextmanager
def layerwise(
    layers: Iterable[torch.nn.Module],
    load: Layered | None = None,
    store: TransferHandle | None = None,
    *,
    first_layer: int = 0,
    require_all: bool = True,
    partial: bool = False,
) -> Iterator[None]:
    """While open, forwards through ``layers`` wait for ``load`` and feed ``store``, layer by layer.

    layers       module i is layer ``first_layer + i`` of the transfers (pipeline stages start further on)
    load         handle of ``engine.load(..., layerwise=True)``, or of a cache's (any load works; these overlap)
    store        handle of ``engine.store(..., layerwise=True)``; each layer leaves after its first forward
    partial      allow modules that do not reach to the transfers' last layer; the rest is then yours to wait for
    require_all  leaving without an error raises TransferError unless every module's hook ran at least once

    An exception inside cancels ``store`` and leaves ``load`` alone. Raises LayoutError where the layers do not
    fit the transfers, TransferError where a block is open over one of the modules already.
    """
    modules = list(layers)
    if first_layer < 0:
        raise LayoutError(f"first_layer: expected 0 or more, got {first_layer}")
    if len({id(module) for module in modules}) != len(modules):
        raise LayoutError(
            "layers: expected distinct modules, got one that is given twice: its hook can't tell them apart"
        )
    for handle in (load, store):
        if handle is not None and first_layer + len(modules) > handle.num_layers:
            raise LayoutError(
                f"layers: expected at most {handle.num_layers - first_layer} from layer {first_layer} on, "
                f"got {len(modules)}"
            )
        if handle is not None and not partial and first_layer + len(modules) < handle.num_layers:
            raise LayoutError(
                f"layers: expected {handle.num_layers - first_layer} from layer {first_layer} on, got {len(modules)}: "
                "the others would run without a wait. Pass partial=True if they are waited for elsewhere"
            )
    gates = [LayerGate.of(module) for module in modules]
    if any(gate.wait is not None for gate in gates):
        raise TransferError("layerwise: a block is open over these layers already; close it first")
    ran = [False] * len(modules)
    written = [False] * len(modules)
    told: Layered | None = load if load is not None else store  # whose observer hears of the layers' own work
    computing: list[tuple[int, AbstractContextManager[None]]] = []

    def waiter(i: int) -> Callable[[], None]:
        def wait() -> None:
            ran[i] = True
            if load is not None:
                load.wait_layer(first_layer + i)
            if told is not None and told.observer.spans:
                span = told.computing(first_layer + i)
                span.__enter__()
                computing.append((i, span))

        return wait

    def writer(i: int) -> Callable[[], None]:
        def tell() -> None:
            while computing and any(i == begun for begun, _ in computing):  # one whose forward raised is behind it
                computing.pop()[1].__exit__(None, None, None)
            if store is not None and not written[i]:
                written[i] = True
                store.layer_written(first_layer + i)

        return tell

    removers = []
    try:
        for i, (module, gate) in enumerate(zip(modules, gates, strict=True)):
            gate.wait, gate.written = waiter(i), writer(i)
            if gate.before not in module._forward_pre_hooks.values():
                removers.append(module.register_forward_pre_hook(gate.before))
            if gate.after not in module._forward_hooks.values():
                removers.append(module.register_forward_hook(gate.after))
        yield
        if require_all and not all(ran):
            missed = [first_layer + i for i, did in enumerate(ran) if not did]
            raise TransferError(
                f"layers {missed[:8]} ran without their hook, or not at all: discard this forward's output. A module "
                "that was compiled before its hooks were attached does not see them: call "
                "kvtransfer.hooks.prepare(layers) before compiling, or torch.compiler.reset() now"
            )
    except BaseException:
        if store is not None:
            store.cancel()
        raise
    finally:
        while computing:
            computing.pop()[1].__exit__(None, None, None)
        for remover in removers:
            remover.remove()
        for gate in gates:
            gate.wait = gate.written = None
