"""The wire: pages over one socket, whatever the answers and however they arrive."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tier_pages import Arena

from kvtransfer.kernels.errors import UnavailableError
from kvtransfer.tiers.base import RecordBuffer
from kvtransfer.tiers.resp import RespError, RespSocket
from kvtransfer.tiers.resp_native import Got, NativeWire, native_wire

PAYLOAD, TRAILER = 8192, 4096
SIZE = PAYLOAD + TRAILER


class Peer:
    """The server's end of a socket pair, on a thread: sends ``answer`` in pieces, and keeps what it received."""

    def __init__(
        self, answer: bytes, pieces: Sequence[int] = (), *, then: Callable[[socket.socket], object] | None = None
    ) -> None:
        self.near, far = socket.socketpair()
        self.received = bytearray()
        self._thread = threading.Thread(target=self._serve, args=(far, answer, pieces, then))
        self._thread.start()

    def _serve(self, far: socket.socket, answer: bytes, pieces: Sequence[int], then: Any) -> None:
        with far:
            far.settimeout(5)
            self.received += far.recv(1 << 20)
            start = 0
            for piece in [*pieces, len(answer)]:
                if start >= len(answer):
                    break
                far.sendall(answer[start : start + piece])
                start += piece
                if piece < 20:
                    time.sleep(0.0005)
            if then is not None:
                then(far)
            while data := far.recv(1 << 20):
                self.received += data

    def close(self) -> None:
        self.near.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


def buffers(n: int) -> list[RecordBuffer]:
    return [RecordBuffer(np.full(PAYLOAD, 7, np.uint8), np.full(TRAILER, 7, np.uint8)) for _ in range(n)]


def image(buffer: RecordBuffer) -> bytes:
    return buffer.payload.tobytes() + buffer.trailer.tobytes()


def value(size: int) -> tuple[bytes, bytes]:
    data = random.randbytes(size)
    return data, b"$%d\r\n%s\r\n" % (size, data)


def run(peer: Peer, work: Callable[[RespSocket], Any], timeout_s: float = 5) -> Any:
    link = link_over(peer.near, timeout_s)
    try:
        return work(link)
    finally:
        run_in_step.append(link.in_step)
        peer.close()


def each(some: Iterator[list[Any]]) -> Iterator[Any]:
    """A `Got` as whether it was there."""
    for answers in some:
        yield from (answer is not Got.NONE if isinstance(answer, Got) else answer for answer in answers)


def all_of(some: Iterator[list[Any]]) -> list[Any]:
    return list(each(some))


run_in_step: list[bool] = []
received_by: list[NativeWire | None] = [None]


def link_over(sock: socket.socket, timeout_s: float) -> RespSocket:
    return RespSocket(sock, timeout_s, native=received_by[0])


@pytest.fixture(autouse=True, params=["c", "python"])
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here is true of both ways to receive."""
    run_in_step.clear()
    received_by[0] = native_wire() if request.param == "c" else None
    assert (received_by[0] is not None) == (request.param == "c"), "this machine has a compiler"
    yield


@pytest.mark.parametrize("seed", range(30))
def test_any_answers_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    answers = b""
    expected: list[str | bool | int] = []
    images: list[bytes | None] = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.choice(["hit", "hit", "miss", "short", "long", "empty", "error"])
        data, wire = value({"hit": SIZE, "short": rng.randint(1, 40), "long": SIZE + 4096, "empty": 0}.get(kind, 1))
        if kind == "error":
            message = "WRONGTYPE " + "x" * rng.randint(0, 300)
            answers += b"-" + message.encode() + b"\r\n"
            expected.append(message)
        elif kind == "miss":
            answers += b"$-1\r\n"
            expected.append(False)
        else:
            answers += wire
            expected.append(True if kind == "hit" else len(data))
        images.append(data if kind == "hit" else None)
    pieces = [rng.choice([1, 2, 5, 7, 19, 5000, SIZE]) for _ in range(rng.randint(0, 40))]
    targets = buffers(len(expected))
    keys = [b"key %d" % i for i in range(len(expected))]
    peer = Peer(answers, pieces)
    got = run(peer, lambda link: all_of(link.fetch(keys, targets)))
    assert [str(g) if isinstance(g, RespError) else g for g in got] == expected
    assert all(data is None or image(target) == data for data, target in zip(images, targets, strict=True))
    assert bytes(peer.received) == b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(k), k) for k in keys)
    assert run_in_step == [True]


def test_store_sends_payload_and_trailer_as_one_value() -> None:
    pages = [
        RecordBuffer(np.frombuffer(random.randbytes(PAYLOAD), np.uint8), np.zeros(TRAILER, np.uint8))
        for _ in range(500)
    ]
    peer = Peer(b"+OK\r\n" * 498 + b"$-1\r\n-OOM command not allowed\r\n")
    keys = [b"k%d" % i for i in range(500)]
    got = run(peer, lambda link: all_of(link.store(keys, pages, [b"NX", b"PX", b"250"])))
    assert got[:499] == [True] * 498 + [False] and got[499].code == "OOM"
    sent = b"".join(
        b"*6\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n$2\r\nNX\r\n$2\r\nPX\r\n$3\r\n250\r\n"
        % (len(k), k, SIZE, image(p))
        for k, p in zip(keys, pages, strict=True)
    )
    assert bytes(peer.received) == sent


def test_fetch_after_fetch_and_store_on_one_socket() -> None:
    data, wire = value(SIZE)
    (target,) = buffers(1)
    near, far = socket.socketpair()
    link = link_over(near, 5)

    def serve() -> None:
        with far:
            for answer in (b"$-1\r\n", wire, b"+OK\r\n", wire):
                far.recv(1 << 20)
                far.sendall(answer)
            while far.recv(1 << 20):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    assert all_of(link.fetch([b"a"], [target])) == [False] and link.in_step
    assert all_of(link.fetch([b"a"], [target])) == [True] and image(target) == data
    assert all_of(link.store([b"a"], [RecordBuffer(target.payload[:4096], target.trailer[:0])], [])) == [True]
    target.payload[:] = 0
    assert all_of(link.fetch([b"a"], [target])) == [True] and image(target) == data
    near.close()
    thread.join(5)


def test_a_long_fetch_asks_as_it_goes_and_stops_when_told() -> None:
    """Never more than a window is asked for and unanswered; after `stop` what was asked for is read, and no more."""
    near, far = socket.socketpair()
    data, wire = value(SIZE)
    asked = [0, 0]  # commands received, most unanswered at a time

    def serve() -> None:
        with far:
            unread, answered = b"", 0
            while got := far.recv(1 << 16):
                unread += got
                while unread.count(b"GET"):
                    end = unread.index(b"GET") + 3
                    unread = unread[end:]
                    asked[0] += 1
                asked[1] = max(asked[1], asked[0] - answered)
                while answered < asked[0]:
                    far.sendall(wire)
                    answered += 1

    thread = threading.Thread(target=serve)
    thread.start()
    link, targets, keys = link_over(near, 5), buffers(300), [b"k%d" % i for i in range(300)]
    assert all_of(link.fetch(keys, targets)) == [True] * 300 and link.in_step
    assert all(image(target) == data for target in targets) and asked[0] == 300 and asked[1] <= 64
    got: list[object] = []
    for answer in each(link.fetch(keys, targets, lambda: len(got) >= 40)):
        got.append(answer)
    assert 40 <= len(got) <= 128 + 64 and link.in_step, "more than a burst and what was asked for behind it"
    assert all_of(link.fetch(keys, targets, lambda: True)) == [] and link.in_step
    assert all_of(link.fetch(keys[:3], targets[:3])) == [True] * 3
    near.close()
    thread.join(5)


def test_a_slow_server_s_pages_are_told_as_they_come() -> None:
    """Not at the end of a burst: whoever watches would take it for dead, and `stop` would be heard late."""
    _, wire = value(SIZE)

    def trickle(far: socket.socket) -> None:
        for _ in range(40):
            time.sleep(0.02)
            far.sendall(wire)

    told: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def work(link: RespSocket) -> None:
        for answers in link.fetch([b"k"] * 40, buffers(40)):
            told.append((time.monotonic(), len(answers)))

    run(Peer(b"", then=trickle), work)
    assert sum(pages for _, pages in told) == 40 and run_in_step == [True]
    assert max(after - before for (before, _), (after, _) in pairwise(told)) < 0.4, "of 0.8 s"


@pytest.mark.parametrize("cut", [0, 3, 9, 5000, SIZE + 9])
def test_a_server_that_goes_in_the_middle(cut: int) -> None:
    _, wire = value(SIZE)
    peer = Peer(wire[:cut], then=lambda far: far.shutdown(socket.SHUT_WR))
    with pytest.raises(UnavailableError, match="closed the connection"):
        run(peer, lambda link: all_of(link.fetch([b"a", b"b"], buffers(2))))
    assert run_in_step == [False]


def test_what_came_before_the_end_is_yielded() -> None:
    data, wire = value(SIZE)
    peer = Peer(wire * 3 + wire[:500], then=lambda far: far.shutdown(socket.SHUT_WR))
    targets, got = buffers(6), []

    def work(link: RespSocket) -> None:
        for answer in each(link.fetch([b"k"] * 6, targets)):
            got.append(answer)

    with pytest.raises(UnavailableError, match="closed the connection"):
        run(peer, work)
    assert got == [True] * 3 and all(image(target) == data for target in targets[:3])


@pytest.mark.parametrize("cut", [0, 3, 5000])
def test_a_server_that_falls_silent(cut: int) -> None:
    _, wire = value(SIZE)
    peer = Peer(wire[:cut])
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        run(peer, lambda link: all_of(link.fetch([b"a"], buffers(1))), timeout_s=0.2)
    assert 0.15 < time.monotonic() - started < 3 and run_in_step == [False]


def test_a_server_that_reads_nothing() -> None:
    near, far = socket.socketpair()
    link = link_over(near, 0.2)
    with pytest.raises(UnavailableError, match="in time"):
        all_of(link.store([b"k"] * 200, buffers(200), []))
    near.close()
    far.close()


@pytest.mark.parametrize("answer", [b":10\r\n", b"+QUEUED\r\n", b"*-1\r\n", b"$12x\r\n", b"$-7\r\n", b"$36\r\n"])
def test_an_answer_of_another_kind_is_never_taken_for_one_of_ours(answer: bytes) -> None:
    def stored(link: RespSocket) -> None:
        with pytest.raises(UnavailableError, match="out of step"):
            all_of(link.store([b"k"], buffers(1), [b"NX"]))
        assert not link.in_step, "whoever holds it must drop it"

    run(Peer(answer), stored)

    def fetched(link: RespSocket) -> None:
        with pytest.raises(UnavailableError, match="out of step"):
            all_of(link.fetch([b"k"], buffers(1)))
        assert not link.in_step

    if answer != b"$36\r\n":  # a value of another length is one
        run(Peer(answer), fetched)


def test_a_value_that_does_not_end_where_it_should() -> None:
    data, wire = value(SIZE)
    peer = Peer(wire + b"$%d\r\n%sXX$-1\r\n" % (SIZE, data))
    with pytest.raises(UnavailableError, match="out of step"):
        run(peer, lambda link: list(link.fetch([b"a", b"b", b"c"], buffers(3))))
    assert run_in_step == [False]


def test_records_are_checked_as_they_come() -> None:
    """Whole, filled but not whole, or not there; what C has not checked is just filled."""
    pages = Arena(4).fill()
    images = [image(buffer) for buffer in pages.buffers]
    images[1] = images[1][:77] + bytes([images[1][77] ^ 1]) + images[1][78:]
    wire = b"".join(b"$%d\r\n%s\r\n" % (len(data), data) for data in images[:3]) + b"$-1\r\n"
    for keys in (pages.keys, []):
        for buffer in pages.buffers:
            buffer.payload[:], buffer.trailer[:] = 0, 0
        peer = Peer(wire)
        got: list[Any] = []

        def work(link: RespSocket, keys: list[bytes] = keys, got: list[Any] = got) -> None:
            for answers in link.fetch([b"k"] * 4, pages.buffers, stored_keys=keys):
                got.extend(answers)

        run(peer, work)
        whole = Got.WHOLE if keys and received_by[0] is not None else Got.FILLED
        assert got == [whole, Got.FILLED, whole, Got.NONE]
        assert [image(buffer) for buffer in pages.buffers[:3]] == images[:3]
    assert run_in_step == [True, True]
    pages.close()


def test_what_was_read_ahead_is_never_put_behind_a_buffer() -> None:
    """A record shorter than what may have been read of it already."""
    memory = np.full(4096, 7, np.uint8)
    tiny = RecordBuffer(memory[:1], memory[1:2])
    data = b"$-1\r\n$2\r\nab\r\n$2\r\ncd\r\n$-1\r\n"
    got = run(Peer(data), lambda link: all_of(link.fetch([b"k"] * 4, [tiny] * 4)))
    assert got == [False, True, True, False] and run_in_step == [True]
    assert bytes(memory[:2]) == b"cd" and (memory[2:] == 7).all()
    big, memory = buffers(1)[0], np.full(4096, 7, np.uint8)
    small = RecordBuffer(memory[:2], memory[2:3])
    data = b"$%d\r\n%s\r\n$3\r\nabc\r\n$-1\r\n" % (SIZE, bytes(SIZE))
    got = run(Peer(data), lambda link: all_of(link.fetch([b"k"] * 3, [big, small, small])))
    assert got == [True, True, False] and run_in_step == [True, True]
    assert bytes(memory[:3]) == b"abc" and (memory[3:] == 7).all()


def test_shut_wakes_who_waits() -> None:
    peer = Peer(b"")
    link = link_over(peer.near, 20)
    threading.Timer(0.1, link.shut).start()
    started = time.monotonic()
    with pytest.raises(UnavailableError):
        all_of(link.fetch([b"a"], buffers(1)))
    link.shut()
    assert time.monotonic() - started < 5 and not link.in_step
    peer.close()
