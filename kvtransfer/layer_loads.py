"""LayerLoad: a load as whoever launches the forward sees it. It may be made of several transfers."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager

from kvtransfer.handles import TransferHandle
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import TransferError
from kvtransfer.kernels.events import Observer
from kvtransfer.pool import Stream

KEPT = 128  # loads that are done and can still be asked for


class LayerLoad:
    """Transfers of one load. `kvtransfer.hooks.layerwise` takes it for ``load``."""

    def __init__(self, handles: tuple[TransferHandle, ...]) -> None:
        self.handles = handles

    @property
    def pages(self) -> int:
        """Pages in all."""
        return sum(handle.plan.pages for handle in self.handles)

    @property
    def num_layers(self) -> int:
        return self.handles[0].num_layers

    @property
    def observer(self) -> Observer:
        return self.handles[0].observer

    def wait_layer(self, layer: int, stream: Stream | None = None) -> None:
        """`TransferHandle.wait_layer` of each transfer."""
        for handle in self.handles:
            handle.wait_layer(layer, stream)

    def wait_all(self, stream: Stream | None = None) -> None:
        """`TransferHandle.wait_all` of each transfer."""
        for handle in self.handles:
            handle.wait_all(stream)

    def computing(self, layer: int) -> AbstractContextManager[None]:
        """Around the work of the layer's forward; see `TransferHandle.computing`."""
        return self.handles[0].computing(layer)


class LayerLoads:
    """The loads that were submitted last, by number. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._handles: OrderedDict[int, list[TransferHandle]] = OrderedDict()

    def add(self, number: int, handle: TransferHandle) -> None:
        """One more transfer of a load."""
        with self._changed:
            self._changed.notify_all()
            self._handles.setdefault(number, []).append(handle)
            while len(self._handles) > KEPT and all(h.done() for h in next(iter(self._handles.values()))):
                self._handles.popitem(last=False)

    def of(self, number: int, pages: int = 1, timeout_s: float = 0.0) -> LayerLoad:
        """All transfers of a load so far, once there are so many ``pages`` in them."""
        with self._changed:
            self._changed.wait_for(lambda: self._of(number).pages >= pages, timeout_s)
            found = self._of(number)
        if found.pages < pages:
            raise TransferError(
                f"load {number}: expected {pages} pages or more that have been submitted, of one of the last {KEPT} "
                f"loads, got {found.pages} after {timeout_s:g} s"
            )
        return found

    def _of(self, number: int) -> LayerLoad:
        return LayerLoad(tuple(self._handles.get(number, ())))
