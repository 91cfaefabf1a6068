"""Observers as one, and spans that cost nothing where nobody wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_helpers import EVEN, LIMIT_S, Log, make_rig, staged, write_all_layers

from kvtransfer import engine, handles, transfer
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.events import NO_OBSERVER, Observer, Observers, Span

SPAN = Span("copy", 7, "load", "copy_in", (1, 3), 4, 512)


class Spans(Observer):
    """Remembers the spans it was told of, as begin and end."""

    spans = True

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.log = [] if log is None else log
        self.name = name
        self.seen: list[Span] = []

    @contextmanager
    def span(self, span: Span) -> Iterator[None]:
        self.seen.append(span)
        self.log.append(f"{self.name}+{span.name}")
        try:
            yield
        finally:
            self.log.append(f"{self.name}-{span.name}")


def test_the_base_class_wants_no_spans_and_takes_them_all_the_same() -> None:
    assert not NO_OBSERVER.spans
    with NO_OBSERVER.span(SPAN):
        pass


def test_everyone_is_told_in_order() -> None:
    first, second = Log(), Log()
    both = Observers(first, second)
    both.planned(1, "load", "cpu", 2, 3)
    both.submitted(1, "copy", (0, 2), 2, 3)
    both.waited(1, 0, 0.5)
    both.finished(1, True, 0.1, 3)
    both.fell_back("ring", "no room")
    both.noted("set aside", slots=[1])
    assert vars(first) == vars(second)
    assert (first.plans, first.stages) == ([("load", "cpu")], [(1, "copy", (0, 2), 2)])
    assert (first.waits, first.ended) == ([(1, 0)], [(1, True)])
    assert (first.fallbacks, first.notes) == ([("ring", "no room")], [("set aside", {"slots": [1]})])


def test_spans_are_wanted_while_one_wants_them() -> None:
    log = Log()
    both = Observers(log, NO_OBSERVER)
    assert not both.spans
    late = Spans()
    both.add(late)
    assert both.spans
    with both.span(SPAN):
        assert late.log == ["+copy"]
    assert late.seen == [SPAN]
    both.remove(late)
    both.remove(late)
    assert not both.spans
    with both.span(SPAN):  # between the test of the flag and the call the last one may have gone
        pass
    assert len(late.seen) == 1


def test_several_spans_nest_and_end_on_an_error() -> None:
    log: list[str] = []
    both = Observers(Spans(log, "a"), Log(), Spans(log, "b"))
    with pytest.raises(OSError, match="on the way"), both.span(SPAN):
        raise OSError("on the way")
    assert log == ["a+copy", "b+copy", "b-copy", "a-copy"]


@pytest.mark.parametrize("path", ["cpu", "staged"])
def test_no_span_is_made_where_nobody_wants_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test of a flag, and nothing else, in all of a transfer and a forward."""

    def refuse(*args: object) -> Span:
        raise AssertionError(f"made a span of {args}")

    for module in (engine, handles, transfer):
        monkeypatch.setattr(module, "Span", refuse)
    log = Log()
    rig = make_rig(spec=EVEN, observer=log, **(staged() if path == "staged" else {}))
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(EVEN.num_layers))
    load = rig.engine.load(range(4), range(4), layerwise=True)
    with layerwise(layers, load=load):
        for layer in layers:
            layer(torch.zeros(1))
    load.result(LIMIT_S)
    store = rig.engine.store(range(4), range(4, 8), layerwise=True)
    write_all_layers(store)
    store.result(LIMIT_S)
    assert [direction for direction, _ in log.plans] == ["load", "store"]
    assert len(log.stages) >= 2 * EVEN.num_layers
    rig.close()


@pytest.mark.parametrize("path", ["cpu", "staged"])
def test_spans_of_a_load_and_a_forward(path: str) -> None:
    spans = Spans()
    rig = make_rig(spec=EVEN, observer=spans, **(staged() if path == "staged" else {}))
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(EVEN.num_layers))
    load = rig.engine.load(range(4), range(4), layerwise=True)
    with layerwise(layers, load=load):
        for layer in layers:
            layer(torch.zeros(1))
    load.result(LIMIT_S)
    rig.close()
    seen = [s for s in spans.seen if s.name in ("wait_layer", "compute")]
    assert [(s.name, s.layers) for s in seen] == [
        (name, (i, i + 1)) for i in range(EVEN.num_layers) for name in ("wait_layer", "compute")
    ]
    assert all(s.row == "compute" and s.stream is None and s.transfer == load.number for s in seen)
    moved = [s for s in spans.seen if s.row == "copy_in"]
    assert sum(s.total_bytes for s in moved) == load.total_bytes
    assert {s.name for s in moved} == ({"copy"} if path == "staged" else {"relayout"})
    assert all(s.stream is rig.engine._shop.lanes.streams[s.row] for s in moved)
    assert [s.name for s in spans.seen][:2] == ["plan", "submit"]


def test_a_forward_that_raises_ends_its_spans() -> None:
    class Bad(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no")

    spans = Spans()
    rig = make_rig(observer=spans)
    load = rig.engine.load(range(4), range(4), layerwise=True)
    inner = Bad()
    model = torch.nn.ModuleList([torch.nn.Sequential(inner), inner])  # the second runs inside the first
    with pytest.raises(ArithmeticError), layerwise(model, load=load, partial=True):
        model[0](torch.zeros(1))
    begun = [entry[1:] for entry in spans.log if entry.startswith("+")]
    ended = [entry[1:] for entry in spans.log if entry.startswith("-")]
    assert sorted(begun) == sorted(ended)
    assert begun.count("compute") == 2
    load.result(LIMIT_S)
    rig.close()


def test_observers_may_join_an_engine_later() -> None:
    late = Spans()
    rig = make_rig()
    rig.engine.load([0], [0]).result(LIMIT_S)
    rig.engine.observer.add(late)
    handle = rig.engine.load([0], [1])
    handle.result(LIMIT_S)
    rig.engine.observer.remove(late)
    rig.engine.load([0], [2]).result(LIMIT_S)
    assert {s.transfer for s in late.seen} == {0, handle.number}
    rig.close()
