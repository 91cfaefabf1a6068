"""GETs of many pages against a scripted server: any answers, windows, bursts, pieces and ends, in C and in Python."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tier_pages import Arena

from kvtransfer.kernels.errors import UnavailableError
from kvtransfer.tiers import resp
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.resp import RespError, RespSocket
from kvtransfer.tiers.resp_native import Got, NativeWire, native_wire

GUARD = 0xA5
LIMIT_S = 5.0


class Scripted:
    """The server's end of a socket pair: a wire image for each key, sent in random pieces, ``most_bytes`` in all."""

    def __init__(self, rng: random.Random, answers: Mapping[bytes, bytes], most_bytes: int = 1 << 40) -> None:
        self.near, self._far = socket.socketpair()
        self.asked: list[bytes] = []
        self.most_under_way = 0
        self._rng, self._answers, self._left = rng, answers, most_bytes
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._far:
                self._serve()
        except BaseException as problem:
            self._problem = problem

    def _serve(self) -> None:
        unread, answered = b"", 0
        while data := self._far.recv(1 << 16):
            unread += data
            while (command := _command(unread)) is not None:
                key, unread = command
                self.asked.append(key)
            self.most_under_way = max(self.most_under_way, len(self.asked) - answered)
            out = b"".join(self._answers[key] for key in self.asked[answered:])[: self._left]
            self._left -= len(out)
            answered = len(self.asked)
            while out:
                count = self._rng.choice([1, 3, 5, 8, 70, 4000, len(out)])
                self._far.sendall(out[:count])
                out = out[count:]
                if self._rng.random() < 0.03:
                    time.sleep(0.0005)
            if not self._left:
                self._far.shutdown(socket.SHUT_WR)
                while self._far.recv(1 << 16):
                    pass
                return

    def close(self) -> None:
        """All that it was sent was commands."""
        self.near.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive() and not isinstance(self._problem, AssertionError | KeyError), self._problem


def _command(data: bytes) -> tuple[bytes, bytes] | None:
    """The key of the first GET, whole, and what is behind it."""
    start = b"*2\r\n$3\r\nGET\r\n$"
    length, end, rest = data[len(start) :].partition(b"\r\n")
    assert data[: len(start)] == start[: len(data)], data[:40]
    if not end or len(rest) < int(length) + 2:
        return None
    key, rest = rest[: int(length)], rest[int(length) :]
    assert rest[:2] == b"\r\n"
    return key, rest[2:]


class Scene:
    """Keys of any length and bytes, records of any sizes between guards, and an answer of any kind for each."""

    def __init__(self, rng: random.Random, count: int) -> None:
        keys = {rng.randbytes(rng.choice([1, 9, 32, 300])) + b"%d" % at for at in range(count)}
        self.keys = sorted(keys)
        alike = rng.random() < 0.3
        sizes = [(rng.choice([1, 2, 40, 5000]), rng.choice([1, 9, 4096])) for _ in range(count)]
        self.sizes = sizes[:1] * count if alike else sizes
        self.memory = np.full(sum(map(sum, self.sizes)) + 8 * (2 * count + 1), GUARD, np.uint8)
        self.buffers: list[RecordBuffer] = []
        self._guards = np.ones(self.memory.size, np.bool_)
        at = 8
        for both in self.sizes:
            parts = []
            for size in both:
                parts.append(self.memory[at : at + size])
                self._guards[at : at + size] = False
                at += size + 8
            self.buffers.append(RecordBuffer(*parts))
        self.expected: list[Any] = []
        self.images: list[bytes | None] = []
        self.wires: dict[bytes, bytes] = {}
        for key, (payload, trailer) in zip(self.keys, self.sizes, strict=True):
            self._answer(rng, key, payload + trailer)

    def _answer(self, rng: random.Random, key: bytes, size: int) -> None:
        kind = rng.choice(["hit"] * 12 + ["miss", "miss", "other", "error"])
        length = rng.choice([n for n in (0, 1, size - 1, size + 1, 10 * size) if n != size])
        data = rng.randbytes(size if kind == "hit" else length)
        message = rng.choice(["ERR", "WRONGTYPE Operation", "X " * 200])
        self.images.append(data if kind == "hit" else None)
        self.expected.append({"hit": True, "miss": False, "other": length, "error": message}[kind])
        value = b"$%d\r\n%s\r\n" % (len(data), data)
        self.wires[key] = {"miss": b"$-1\r\n", "error": b"-%s\r\n" % message.encode()}.get(kind, value)

    def check(self, answers: list[Any]) -> None:
        """These are the first answers, their records are whole, and nothing was written beside a record."""
        told = [a is not Got.NONE if isinstance(a, Got) else str(a) if isinstance(a, RespError) else a for a in answers]
        assert told == self.expected[: len(told)]
        assert [type(a) for a in told] == [type(a) for a in self.expected[: len(told)]], "a length is no verdict"
        for image, buffer in zip(self.images[: len(told)], self.buffers, strict=False):
            assert image is None or image == buffer.payload.tobytes() + buffer.trailer.tobytes()
        assert (self.memory[self._guards] == GUARD).all()

    def whole_answers(self, most_bytes: int) -> int:
        """How many answers lie within the first so many bytes."""
        count = 0
        for key in self.keys:
            most_bytes -= len(self.wires[key])
            if most_bytes < 0:
                break
            count += 1
        return count


@pytest.fixture(params=["c", "python"])
def native(request: pytest.FixtureRequest) -> NativeWire | None:
    wire = native_wire() if request.param == "c" else None
    assert (wire is not None) == (request.param == "c"), "this machine has a compiler"
    return wire


@pytest.fixture
def rng(monkeypatch: pytest.MonkeyPatch) -> Iterator[random.Random]:
    """Windows and bursts of any length, too."""
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    made = random.Random(seed)
    for name in ("_WINDOW_PAGES", "_BURST_PAGES"):
        monkeypatch.setattr(resp, name, made.choice([1, 2, 3, 7, 20, 64]))
    monkeypatch.setattr(resp, "_WINDOW_BYTES", made.choice([1, 20_000, 1 << 30]))
    monkeypatch.setattr(resp, "_BURST_BYTES", made.choice([1, 20_000, 1 << 30]))
    monkeypatch.setattr(resp, "_BURST_NS", made.choice([0, 100_000, 1 << 40]))
    yield made


@pytest.mark.parametrize("run", range(40))
def test_any_answers_through_any_window(native: NativeWire | None, rng: random.Random, run: int) -> None:
    """Each key has its answer, at most a window is under way, and the socket serves on afterwards."""
    scene = Scene(rng, rng.choice([0, 1, 2, 5, 40, 150]))
    server = Scripted(rng, scene.wires)
    link = RespSocket(server.near, LIMIT_S, native=native)
    wanted = rng.choice([len(scene.keys), rng.randint(0, 150)])
    answers = list[Any]()

    def enough() -> bool:
        return len(answers) >= wanted

    for some in link.fetch(scene.keys, scene.buffers, enough):
        assert some, "nothing is no answer"
        answers += some
    assert link.in_step and len(answers) >= min(wanted, len(scene.keys))
    scene.check(answers)
    assert server.asked == scene.keys[: len(answers)], "what was asked for was read"
    assert server.most_under_way <= max(2, resp._WINDOW_PAGES)
    if wanted < len(scene.keys):
        again = [answer for some in link.fetch(scene.keys, scene.buffers) for answer in some]
        scene.check(again)
        assert len(again) == len(scene.keys) and link.in_step
    server.close()


@pytest.mark.parametrize("run", range(40))
def test_a_server_that_dies_anywhere(native: NativeWire | None, rng: random.Random, run: int) -> None:
    """What came whole is told, but for one whose end was waited for together with what never came; then the error."""
    scene = Scene(rng, rng.choice([1, 3, 40, 150]))
    total = sum(map(len, scene.wires.values()))
    most_bytes = rng.randrange(total)
    server = Scripted(rng, scene.wires, most_bytes)
    link = RespSocket(server.near, LIMIT_S, native=native)
    answers: list[Any] = []
    with pytest.raises(UnavailableError, match=r"closed the connection|connection broke"):
        for some in link.fetch(scene.keys, scene.buffers):
            answers += some
    assert not link.in_step
    whole = scene.whole_answers(most_bytes)
    assert whole - 1 <= len(answers) <= whole
    scene.check(answers)
    server.close()


@pytest.mark.parametrize("run", range(10))
def test_a_reader_that_leaves_in_the_middle(native: NativeWire | None, rng: random.Random, run: int) -> None:
    """With answers under way the socket says that it is out of step; without any it serves on."""
    scene = Scene(rng, 60)
    server = Scripted(rng, scene.wires)
    link = RespSocket(server.near, LIMIT_S, native=native)
    fetching: Any = link.fetch(scene.keys, scene.buffers)
    answers = next(fetching)
    fetching.close()
    scene.check(answers)
    if link.in_step:
        scene.check([answer for some in link.fetch(scene.keys, scene.buffers) for answer in some])
        assert link.in_step
    server.close()


@pytest.mark.parametrize("run", range(6))
def test_records_are_checked_for_their_own_keys(native: NativeWire | None, rng: random.Random, run: int) -> None:
    """However the goes are cut, and whatever comes between: C calls whole just what is."""
    pages = Arena(40).fill()
    names = [b"k%d" % at for at in range(40)]
    images, kinds = pages.images(), rng.choices(["whole", "rotten", "other's", "short", "miss", "error"], k=40)
    wires = {}
    for at, kind in enumerate(kinds):
        flipped = bytearray(images[at])
        flipped[rng.randrange(12_060)] ^= 1
        data = {"rotten": bytes(flipped), "other's": images[at - 1], "short": images[at][:-4096]}.get(kind, images[at])
        value = b"$%d\r\n%s\r\n" % (len(data), data)
        wires[names[at]] = {"miss": b"$-1\r\n", "error": b"-ERR no\r\n"}.get(kind, value)
    whole = Got.FILLED if native is None else Got.WHOLE
    told = {"whole": whole, "rotten": Got.FILLED, "other's": Got.FILLED, "miss": Got.NONE}
    expected = [told.get(kind, len(images[0]) - 4096 if kind == "short" else "ERR no") for kind in kinds]
    server = Scripted(rng, wires)
    link = RespSocket(server.near, LIMIT_S, native=native)
    answers = [a for some in link.fetch(names, pages.buffers, stored_keys=pages.keys) for a in some]
    assert [str(a) if isinstance(a, RespError) else a for a in answers] == expected and link.in_step
    pages.check_guards()
    server.close()
    pages.close()
