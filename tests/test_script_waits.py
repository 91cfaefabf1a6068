"""The short way of waiting for a layer, against streams and events that write down who waits for what."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from kvtransfer.script_waits import ScriptWaits
from kvtransfer.submitter import Job

UNTIL = [2, 2, 3, 5, 5, 6]  # of six layers, in six chunks


class Stream:
    def __init__(self, raw: int) -> None:
        self.cuda_stream, self.waits = raw, list[int]()


class Event(NamedTuple):
    """The event after chunk ``number``."""

    number: int

    def wait(self, stream: Stream) -> None:
        stream.waits.append(self.number)


class World:
    """What is current: device, stream, capture; and how many chunks have been submitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.stream, self.capturing = 1, Stream(7), False
        self.job = SimpleNamespace(chunks_submitted=0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self.raw_stream, raising=False)
        events = cast(Any, [Event(chunk) for chunk in range(1, 7)])
        self.waits = ScriptWaits(cast(Job, self.job), events, UNTIL, torch.device("cuda", 1))

    def raw_stream(self, device: int) -> int:
        return self.stream.cuda_stream if device == self.device else 0

    def allow(self, stream: Stream) -> None:
        self.waits.allow(cast(torch.cuda.Stream, stream))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_stream_that_was_not_allowed_takes_the_long_way(world: World) -> None:
    world.job.chunks_submitted = 6
    assert not world.waits.wait(0)
    world.allow(world.stream)
    other, world.stream = world.stream, Stream(8)
    assert not world.waits.wait(0)
    assert not other.waits and not world.stream.waits


def test_what_is_not_submitted_is_not_waited_for(world: World) -> None:
    """An event that has not been recorded would hold nobody."""
    world.allow(world.stream)
    for submitted in range(7):
        world.job.chunks_submitted = submitted
        for layer, until in enumerate(UNTIL):
            if until > submitted:
                assert not world.waits.wait(layer)
    assert not world.stream.waits


def test_capture_and_another_device_take_the_long_way(world: World) -> None:
    """Also where there is nothing left to wait for: a capture without its error would be replayed without its wait."""
    world.allow(world.stream)
    world.job.chunks_submitted = 6
    assert world.waits.wait(5)
    world.capturing = True
    assert not world.waits.wait(0) and not world.waits.wait(0, landed=True)
    world.capturing, world.device = False, 0
    assert not world.waits.wait(0)


def test_what_has_landed_is_not_waited_for(world: World) -> None:
    """Its events may be another transfer's."""
    world.allow(world.stream)
    world.job.chunks_submitted = 7
    assert all(world.waits.wait(layer, landed=True) for layer in range(6))
    assert not world.stream.waits


@pytest.mark.parametrize("seed", range(20))
def test_every_stream_waits_behind_every_layer_that_it_asked_for(world: World, seed: int) -> None:
    """Two streams in turn, layers in any order: each has waited for the layer's last chunk or one behind it."""
    rng = random.Random(seed)
    streams = [Stream(7), Stream(8)]
    for _ in range(60):
        world.stream = rng.choice(streams)
        world.job.chunks_submitted = max(world.job.chunks_submitted, rng.randrange(8))
        layer = rng.randrange(6)
        if rng.random() < 0.5:
            world.allow(world.stream)
        if world.waits.wait(layer):
            assert max(world.stream.waits, default=0) >= UNTIL[layer]


def test_layers_of_one_chunk_cost_one_wait(world: World) -> None:
    world.allow(world.stream)
    world.job.chunks_submitted = 6
    assert all(world.waits.wait(layer) for layer in range(6))
    assert world.stream.waits == sorted(set(UNTIL))
    assert world.waits.wait(0) and world.stream.waits == sorted(set(UNTIL))
