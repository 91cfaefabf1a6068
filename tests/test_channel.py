"""The connection between a directory's process and a mover's: frames, the end of the other side, errors that travel."""

from __future__ import annotations

import datetime
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_helpers import LIMIT_S, until
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.channel import Call, Channel, Reply, require_plain
from kvtransfer.commands import Ack, Cancel, Evict, Lookup, Scope, encode
from kvtransfer.kernels.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    TierError,
    TransferError,
    UnavailableError,
)
from kvtransfer.mover_server import serve
from kvtransfer.remote_mover import RemoteMover
from kvtransfer.tiers.base import PageStatus


def decode_call(data: bytes) -> Call:
    return msgspec.msgpack.decode(data, type=Call)


class End:
    def __init__(self, connection: Any) -> None:
        self.got: list[Any] = []
        self.ended: list[str] = []
        self.channel = Channel(connection, self.got.append, self.ended.append)
        self.channel.start()


@pytest.fixture
def ends() -> Any:
    a, b = (End(one) for one in multiprocessing.Pipe())
    yield a, b
    a.channel.close()
    b.channel.close()


def test_messages_arrive_in_order(ends: Any) -> None:
    a, b = ends
    sent = [Cancel(id=n, command=n) for n in range(500)] + [Call(id=1, verb="x", arguments={"a": [1, b"2"]})]
    for message in sent:
        a.channel.send(message)
    b.channel.send(Ack(id=3, statuses=b"\1", unverified=(0,), bad_layers=((1, 2),)))
    until(lambda: len(b.got) == len(sent) and a.got, "all has come")
    assert b.got == sent and a.got[0].bad_layers == ((1, 2),)


def test_a_large_message_and_nobody_who_reads_hold_nobody_up() -> None:
    ours, theirs = multiprocessing.Pipe()
    end = End(ours)
    large = Evict(id=1, tier="t", scope=Scope(), keys=[bytes(32)] * 5000)

    def send() -> None:
        for _ in range(50):
            end.channel.send(large)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(LIMIT_S)
    assert not sender.is_alive()
    theirs.close()
    until(lambda: end.ended, "the end is seen")
    end.channel.send(Cancel(id=1, command=1))  # dropped
    end.channel.close()


def test_the_other_end_closes(ends: Any) -> None:
    a, b = ends
    b.channel.send(Cancel(id=1, command=1))
    b.channel.close()
    until(lambda: a.ended, "the end is seen")
    assert a.got == [Cancel(id=1, command=1)] and "ended" in a.ended[0] and len(b.ended) == 1


OF_ANOTHER_RELEASE = encode(Cancel(id=1, command=1, version=99))


@pytest.mark.parametrize("data", [b"", b"nonsense", OF_ANOTHER_RELEASE], ids=["empty", "nonsense", "version"])
def test_what_is_no_message_ends_it(data: bytes) -> None:
    ours, theirs = multiprocessing.Pipe()
    end = End(ours)
    theirs.send_bytes(data)
    until(lambda: end.ended, "the end is seen")
    assert "expected" in end.ended[0] and not end.got
    end.channel.close()
    theirs.close()


def test_a_bug_of_who_receives_ends_it_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args.exc_type))
    ours, theirs = multiprocessing.Pipe()
    other = End(theirs)
    ended: list[str] = []
    channel = Channel(ours, lambda message: 1 / 0, ended.append)
    channel.start()
    other.channel.send(Cancel(id=1, command=1))
    until(lambda: ended and other.ended, "both sides know")
    assert "ZeroDivisionError" in ended[0]
    until(lambda: hooked, "it is reported")
    channel.close()
    other.channel.close()


def test_one_way_pipes_are_refused() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with pytest.raises(ConfigError, match="duplex"):
        Channel(ours, print, print)
    ours.close()
    theirs.close()


def test_errors_travel_by_name() -> None:
    with pytest.raises(CapacityError, match="no room"):
        Reply(id=1, error="no room", kind="CapacityError").result()
    with pytest.raises(TierError, match="KeyError: 'x'"):
        Reply(id=1, error="'x'", kind="KeyError").result()
    with pytest.raises(TierError, match="annotations: y"):
        Reply(id=1, error="y", kind="annotations").result()
    assert Reply(id=1, value=[1]).result() == [1]


class Other:
    """The other process, played by a thread: answers calls as it is told."""

    def __init__(self, connection: Any, **answers: Any) -> None:
        self.answers, self.got = answers, list[Any]()
        self.channel = Channel(connection, self.take, lambda why: None)
        self.channel.start()

    def take(self, message: Any) -> None:
        self.got.append(message)
        if isinstance(message, Call) and message.verb in self.answers:
            self.channel.send(Reply(id=message.id, **self.answers[message.verb]))


def test_calls_that_fail_or_get_no_answer() -> None:
    ours, theirs = multiprocessing.Pipe()
    other = Other(theirs, detach={"error": "expected far", "kind": "ConfigError"}, close={})
    remote = RemoteMover(ours, timeout_s=0.2)
    with pytest.raises(ConfigError, match="expected far"):
        remote.detach("x")
    with pytest.raises(DeadlineExceeded, match=r"facts: .* no answer after 0\.2 s"):
        remote.facts()
    with pytest.raises(ConfigError, match="options"):
        remote.attach("x", object())
    with pytest.raises(ConfigError, match=r"Mover\.load"):
        remote.load(3)
    remote.close(timeout_s=1.0)
    other.channel.close()


class Odd(int):
    """A number that msgpack takes for another type."""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "disk", "paths": [Path("/a")]}, r"'paths'\[0\]: expected a plain value .*PosixPath"),
        ({"kind": "redis", "url": object()}, r"'url': expected a plain value .*object"),
        ({"kind": "x", "deep": {"more": [{"set": {1, 2}}]}}, r"'deep': 'more'\[0\]: 'set': .*set \{1, 2\}"),
        ({"kind": "memory", "cache_gb": np.float32(0.5)}, r"'cache_gb': expected a plain value .*float32"),
        ({"kind": "memory", "workers": 1 << 64}, r"'workers': expected a whole number of at most 64 bits"),
        ({"kind": "memory", "workers": -(1 << 63) - 1}, r"64 bits"),
        ({"kind": "memory", "workers": Odd(3)}, r"'workers': expected a plain value"),
        ({"kind": "x", "text": "\ud800"}, r"'text': expected a text that UTF-8 can hold"),
        ({"kind": "x", "\ud800": 1}, r"a key: expected a text that UTF-8 can hold"),
        ({"kind": "x", 3: "three"}, r"expected texts as keys, got int 3"),
        ({"kind": "x", "call": print}, r"'call': expected a plain value"),
        ({"kind": "x", "many": [0, 1, 2, datetime.date(2020, 1, 1)]}, r"'many'\[3\]: expected a plain value"),
    ],
)
def test_options_that_can_not_travel_are_refused_before_anything_is_sent(options: Any, named: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    other = Other(theirs, attach={"value": {"shared": False, "capacity_pages": None, "pages": 0}}, close={})
    remote = RemoteMover(ours, timeout_s=LIMIT_S)
    with pytest.raises(ConfigError, match=rf"attach: tier.*{named}"):
        remote.attach("far", options)
    assert not remote._calls  # nobody waits
    with pytest.raises(ConfigError, match="attach: name"):
        remote.attach("\ud800", {})
    good: dict[str, Any] = {"kind": "x", "a": [1, 2.5, None, True, "t", b"b", {"c": (1, -(1 << 63), (1 << 64) - 1)}]}
    assert remote.attach("far", good).pages == 0
    [call] = other.got
    assert call.arguments["tier"] == {**good, "a": [*good["a"][:-1], {"c": [1, -(1 << 63), (1 << 64) - 1]}]}
    require_plain(good, "here")
    remote.close(timeout_s=1.0)
    other.channel.close()


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary())
        | st.sampled_from([Path("a"), object(), 1j, {1}, Odd(1), np.int64(3), datetime.date(2020, 1, 1), Ellipsis]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        max_leaves=6,
    )
)
def test_what_is_plain_arrives_as_it_is(value: Any) -> None:
    try:
        require_plain(value, "value")
    except ConfigError:
        return
    back = decode_call(encode(Call(id=1, verb="x", arguments={"value": value})))
    assert repr(back.arguments["value"]) == repr(value)  # a NaN too


@pytest.mark.parametrize("figure", [1 << 70, "\ud800", object()], ids=["number", "text", "object"])
def test_a_figure_that_can_not_travel_leaves_nobody_waiting(figure: Any) -> None:
    class Figures:
        """A mover, as far as it is asked."""

        answer = None

        def stats(self) -> Any:
            return {"far": figure}

        def close(self, **more: Any) -> None:
            pass

    ours, theirs = multiprocessing.Pipe()
    server = threading.Thread(target=serve, args=(theirs, Figures()))
    server.start()
    remote = RemoteMover(ours, timeout_s=LIMIT_S)
    with pytest.raises(TierError, match=r"Error"):
        remote.stats()
    remote.close(timeout_s=1.0)
    server.join(LIMIT_S)
    assert not server.is_alive()


def test_a_mover_that_is_gone_answers_error() -> None:
    ours, theirs = multiprocessing.Pipe()
    other = Other(theirs)
    remote = RemoteMover(ours)
    acks: list[Ack] = []
    lost: list[str] = []
    met: list[Any] = []
    remote.answer, remote.lost = acks.append, lost.append
    waiting = threading.Thread(target=lambda: met.append(_raised(remote.facts)))
    waiting.start()
    until(lambda: other.got, "the call has come")
    other.channel.close()
    until(lambda: lost, "it is lost")
    waiting.join(LIMIT_S)
    assert isinstance(met[0], UnavailableError)
    lookup = Lookup(id=2, tier="far", scope=Scope(), keys=[b"k"] * 3)
    remote.submit([Cancel(id=1, command=9), lookup])
    until(lambda: acks, "an answer")
    assert acks == [Ack.of(lookup, PageStatus.ERROR, detail=acks[0].detail)] and "gone" in acks[0].detail
    assert remote.stats() == {} and len(lost) == 1
    with pytest.raises(UnavailableError):
        remote.facts()
    remote.close()
    remote.close()


def test_closing_lets_go_of_calls_that_wait() -> None:
    """A figure that is asked for while the cache closes has no answer: attaching waits without a limit."""
    ours, theirs = multiprocessing.Pipe()
    other = Other(theirs, close={})
    remote = RemoteMover(ours)
    met: list[Any] = []
    calls = [remote.facts, lambda: remote.attach("x", {})]
    waiting = [threading.Thread(target=lambda call=call: met.append(_raised(call)), daemon=True) for call in calls]
    for thread in waiting:
        thread.start()
    until(lambda: len(other.got) == 2, "the calls have come")
    remote.close(timeout_s=1.0)
    for thread in waiting:
        thread.join(LIMIT_S)
    assert len(met) == 2 and all(isinstance(error, UnavailableError) for error in met)
    other.channel.close()


def test_a_mover_that_is_gone_and_closed_answers_error() -> None:
    ours, theirs = multiprocessing.Pipe()
    remote = RemoteMover(ours)
    acks: list[Ack] = []
    remote.answer = acks.append
    theirs.close()
    lookup = Lookup(id=2, tier="far", scope=Scope(), keys=[b"k"])
    until(lambda: remote._gone, "it is gone")
    remote.submit([lookup])
    until(lambda: acks, "an answer")
    remote.close()
    remote.submit([lookup])
    until(lambda: len(acks) == 2, "another answer")
    assert acks[1].statuses == acks[0].statuses and not remote.is_own_thread()


def test_the_answering_thread_may_not_call() -> None:
    ours, theirs = multiprocessing.Pipe()
    other = Other(theirs, close={})
    remote = RemoteMover(ours)
    met: list[Any] = []
    remote.answer = lambda ack: met.append(_raised(remote.facts))
    other.channel.send(Ack(id=1, statuses=b"\1"))
    until(lambda: met, "it was told")
    assert isinstance(met[0], TransferError) and "own thread" in str(met[0])
    remote.close(timeout_s=1.0)
    other.channel.close()


def _raised(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None
