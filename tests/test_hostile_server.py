"""Servers that die, lie, dawdle or speak something else: a failed answer is never taken for a good one."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import pytest
from raw_server import Answer, plain, raw_server, stream

from kvtransfer.completion import Completion
from kvtransfer.kernels.errors import ConfigError, ServerError
from kvtransfer.server_client import ServerClient

MODELS = plain('{"data": [{"id": "m"}]}')
PATHS = {"openai": "/v1/completions", "sglang": "/generate"}


def piece(text: str, end: str | None = None, **more: Any) -> str:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': end}], **more})}\n\n"


def usage(cached: int | None = 3) -> str:
    details = None if cached is None else {"cached_tokens": cached}
    told = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": details}
    return f"data: {json.dumps({'choices': [], 'usage': told})}\n\n"


def whole(text: str, count: int, end: str | None = None, **more: Any) -> str:
    """A piece of SGLang's."""
    meta = {"prompt_tokens": 7, "completion_tokens": count, "cached_tokens": 3}
    meta["finish_reason"] = None if end is None else {"type": end, "message": "why it ended"}  # type: ignore[assignment]
    return f"data: {json.dumps({'text': text, 'meta_info': meta, **more})}\n\n"


DONE = "data: [DONE]\n\n"


def ask(api: str, answer: Answer, streamed: bool = True, timeout_s: float = 5.0) -> Completion:
    with raw_server({"/v1/models": MODELS, PATHS[api]: answer}) as server:
        client = ServerClient(server.url, api=api, model="m", timeout_s=timeout_s)  # type: ignore[arg-type]
        return client.complete("hello", 2, stream=streamed)


BROKEN: dict[str, tuple[str, Answer]] = {
    "dies after a token": ("openai", stream(piece("a"), ended=False)),
    "dies after a token, not chunked": ("openai", stream(piece("a"), chunked=False)),
    "ends after a token, chunked": ("openai", stream(piece("a"))),
    "dies within a frame": ("openai", stream(piece("a"), piece("b", "length")[:20], chunked=False)),
    "dies within a chunk": ("openai", [*stream(piece("a"), ended=False), b"40\r\ndata: {"]),
    "dies before the usage": ("openai", stream(piece("a"), 'data: {"choices": [', chunked=False)),
    "an error in the stream": ("openai", stream(piece("a"), 'data: {"error": {"message": "it broke"}}\n\n', DONE)),
    "nothing but an error": ("openai", stream('data: {"error": {"message": "it broke"}}\n\n', DONE)),
    "an error as text": ("openai", stream('data: {"error": "it broke"}\n\n', DONE)),
    "no choices": ("openai", stream('data: {"choices": []}\n\n', DONE)),
    "nothing but usage": ("openai", stream(usage(), DONE)),
    "nothing but the end": ("openai", stream(DONE)),
    "llama.cpp's error in the stream": ("openai", stream(piece("a"), 'error: {"message": "it broke"}\n\n', DONE)),
    "an empty reason is no end": ("openai", stream(piece("a", ""), piece("b", ""), chunked=False)),
    "cancelled": ("openai", stream(piece("a"), piece("", "cancelled"), DONE)),
    "timed out": ("openai", stream(piece("a"), piece("", "timeout"), DONE)),
    "aborted": ("openai", stream(piece("a"), piece("", "abort"), DONE)),
    "HTML with status 200": ("openai", plain("<html>welcome</html>")),
    "no UTF-8": ("openai", stream(b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE)),
    "nested without end": ("openai", stream('data: {"x": ' + "[" * 100_000 + "\n\n", DONE)),
    "sglang dies after a token": ("sglang", stream(whole("a", 1), chunked=False)),
    "sglang, an error in the stream": ("sglang", stream(whole("a", 1), 'data: {"error": {"message": "x"}}\n\n', DONE)),
    "sglang, nothing but an error": ("sglang", stream('data: {"error": {"message": "it broke"}}\n\n', DONE)),
    "sglang aborted": ("sglang", stream(whole("a", 1, "abort"), DONE)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_breaks_is_a_failure(name: str) -> None:
    with pytest.raises(ServerError) as error:
        ask(*BROKEN[name])
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("api", ["openai", "sglang"])
@pytest.mark.parametrize(
    "body", ["", "{}", "null", "[]", "<html>", '{"choices": []}', '{"object": "error", "message": "x"}', '{"error": 1}']
)
def test_an_answer_without_an_answer_is_a_failure(api: str, body: str) -> None:
    with pytest.raises(ServerError):
        ask(api, plain(body), streamed=False)


@pytest.mark.parametrize(
    ("status", "more"),
    [("429 Too Many Requests", ()), ("500 Oops", ()), ("302 Found", ("Location: http://127.0.0.1:1/",)), ("503 x", ())],
)
def test_a_status_is_told(status: str, more: tuple[str, ...]) -> None:
    with pytest.raises(ServerError, match=f"got {status[:3]}: <html>no"):
        ask("openai", plain("<html>no" + "x" * 10_000, status, *more))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with pytest.raises(ServerError, match="no answer"):
        ask("openai", stream(piece("a"), 1.0, piece("b", "stop"), DONE), timeout_s=0.2)


GOOD: dict[str, tuple[str, Answer]] = {
    "as it should be": ("openai", stream(piece("a"), piece("b", "length"), usage(), DONE)),
    "not chunked": ("openai", stream(piece("a"), piece("b", "length"), usage(), DONE, chunked=False)),
    "all at once": ("openai", stream(piece("a") + piece("b", "length") + usage() + DONE)),
    "no [DONE]": ("openai", stream(piece("a"), piece("b", "length"), usage())),
    "empty reasons before the end": ("openai", stream(piece("a", ""), piece("b", "stop"), usage())),
    "fields that say nothing": (
        "openai",
        stream(piece("a", error=None, message=None, object="text_completion", usage=None, id=3),
               ": keep-alive\n\n", piece("b", "length", stop_reason=128001, service_tier=[]), usage(), DONE),
    ),
    "carriage returns": ("openai", stream((piece("a") + piece("b") + usage() + DONE).replace("\n", "\r\n"))),
    "comments and names": ("openai", stream(": ping\n\nevent: x\nid: 1\n" + piece("a"), piece("b"), usage(), DONE)),
    "no blank": ("openai", stream((piece("a") + piece("b") + usage() + DONE).replace("data: ", "data:"))),
    "byte by byte": ("openai", stream(*[bytes([b]) for b in (piece("a") + piece("b") + usage() + DONE).encode()])),
    "a first piece without a token": ("openai", stream(piece(""), piece("a"), piece("b", "length"), usage(), DONE)),
    "sglang": ("sglang", stream(whole("a", 1), whole("ab", 2, "length"), DONE)),
    "sglang without [DONE]": ("sglang", stream(whole("a", 1), whole("ab", 2, "length"))),
    "sglang, pieces that are only new": (
        "sglang", stream(whole("a", 1, output_ids=[5]), whole("b", 2, "length", output_ids=[5]), DONE)
    ),
    "sglang, an end that is taken back": (
        "sglang", stream(whole("abc", 1, output_ids=[5]), whole("ab", 2, "stop", output_ids=[5, 6]), DONE)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_streams_that_are_well(name: str) -> None:
    done = ask(*GOOD[name])
    assert (done.text, done.prompt_tokens, done.cached_tokens, done.output_tokens) == ("ab", 7, 3, 2)
    assert 0 < done.first_token_s <= done.total_s


def test_a_token_that_is_repeated() -> None:
    """Pieces that are only new, and all alike: each looks like everything so far."""
    ends = [None, None, "length"]
    parts = [whole("a", count, end, output_ids=[5]) for count, end in enumerate(ends, 1)]
    done = ask("sglang", stream(*parts, whole("", 3, "length", output_ids=[]), DONE))
    assert (done.text, done.tokens) == ("aaa", ["5", "5", "5"])


def test_what_was_no_stream_is_shown() -> None:
    with pytest.raises(ServerError, match="too long"):
        ask("openai", plain('{"error": {"message": "too long"}}', "200 OK", "Content-Type: application/json"))


HELD: dict[str, tuple[str, str, Answer]] = {
    "vLLM": ("openai", "/reset_prefix_cache", plain('{"success": false}')),
    "SGLang": ("sglang", "/flush_cache", plain("Flush cache failed.\n", "400 Bad Request")),
}
EMPTIED = [plain('{"success": true}'), plain("Cache flushed.\n"), plain(""), plain("{}"), plain('{"success": "yes"}')]


@pytest.mark.parametrize("name", HELD)
def test_a_cache_that_is_held_is_emptied_once_it_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has just been answered, or its stores, still hold it; a pass would be measured over the engine's
    own cache."""
    api, path, held = HELD[name]
    with raw_server({path: held}) as server:
        client = ServerClient(server.url, api=api, model="m")  # type: ignore[arg-type]
        later = threading.Timer(0.3, server.answers.update, [{path: EMPTIED[0]}])
        later.start()
        client.flush()
        later.join()
        assert server.asked.count(f"POST {path}") > 1
        monkeypatch.setattr("kvtransfer.server_client._BUSY_S", 0.2)
        server.answers[path] = held
        with pytest.raises(ServerError, match=r"success.: false|got 400: Flush cache failed"):
            client.flush()
        for emptied in EMPTIED:
            server.answers[path] = emptied
            server.asked.clear()
            client.flush()
            assert server.asked == [f"POST {path}"]
        server.answers[path] = plain("no", "500 Oops")
        with pytest.raises(ServerError, match="got 500"):
            client.flush()
        assert server.asked.count(f"POST {path}") == 2, "what is no question of time is not asked again"


def test_a_character_of_several_bytes_that_is_split() -> None:
    answer = {"choices": [{"text": "é\U0001f600", "finish_reason": "stop"}]}
    raw = b"data: " + json.dumps(answer, ensure_ascii=False).encode() + b"\n\n"
    cut = raw.index("\U0001f600".encode()) + 2
    assert ask("openai", stream(raw[:cut], 0.05, raw[cut:], DONE)).text == "é\U0001f600"


def test_the_first_token_is_the_first_that_brings_something() -> None:
    for api, answer in (
        ("openai", stream(piece(""), 0.3, piece("a"), piece("", "stop"), DONE)),
        ("sglang", stream(whole("", 0), 0.3, whole("a", 1), whole("a", 1, "stop"), DONE)),
    ):
        done = ask(api, answer)
        assert done.first_token_s >= 0.3, api


@pytest.mark.parametrize("told", [None, {}, {"prompt_tokens": 7}, {"prompt_tokens": 7, "prompt_tokens_details": None}])
def test_what_a_server_does_not_say_is_not_known(told: dict[str, Any] | None) -> None:
    done = ask("openai", stream(piece("a"), piece("b", "stop", usage=told), DONE))
    assert done.prompt_tokens == (told or {}).get("prompt_tokens") and done.cached_tokens is None
    assert done.output_tokens == 2


def test_no_token_at_all_is_an_answer() -> None:
    done = ask("openai", stream(piece("", "stop", usage={"completion_tokens": 0}), DONE))
    assert (done.output_tokens, done.text) == (0, "") and done.first_token_s == done.total_s


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "http://:80", "http://host:99999", "http://127.0.0.1:abc", "http://[::1",
     "http://a b:80", "http://h\x01st", "http://" + "a" * 300, "http://127.0.0.1:9/x y"],
)  # fmt: skip
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        ServerClient(url)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_ends_of_a_url(end: str) -> None:
    with raw_server({"/v1/models": MODELS, "/v1/completions": stream(piece("a", "stop"), DONE)}) as server:
        client = ServerClient(server.url + end)
        assert client.api == "openai" and client.complete("x", 1, stream=True).text == "a"
        assert set(server.asked) <= {"GET /get_model_info", "GET /model_info", "GET /v1/models", "GET /kvtransfer",
                                     "POST /v1/completions"}  # fmt: skip


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask("openai", stream(piece("a", "stop"), DONE)).text == "a"


@pytest.mark.parametrize("own", ["<html>", "[]", '{"detail": "hello"}', '{"loaded_pages": "many"}'])
def test_a_server_that_answers_everything_is_not_taken_for_ours(own: str) -> None:
    with raw_server({"/v1/models": MODELS, "/kvtransfer": plain(own)}) as server:
        client = ServerClient(server.url, api="openai", model="m")
        assert not client.tells_digests and client.info() is None


def test_a_request_that_connects_is_broken_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded server takes its time for that; whoever is interrupted would wait for the whole answer."""
    real = http.client.HTTPConnection.connect
    with raw_server({"/v1/completions": plain('{"choices": [{"text": "a"}]}')}) as server:
        client = ServerClient(server.url, api="openai", model="m")

        def connect(connection: http.client.HTTPConnection) -> None:
            real(connection)
            client.abort()

        with monkeypatch.context() as patched:
            patched.setattr(http.client.HTTPConnection, "connect", connect)
            with pytest.raises(ServerError, match="broken off"):
                client.complete("x", 1)
        assert "POST /v1/completions" not in server.asked
        assert client.complete("x", 1).text == "a", "an abort is of those that are under way"


def test_a_text_that_is_no_text() -> None:
    with raw_server({"/v1/models": MODELS, "/v1/completions": plain("{}")}) as server:
        client = ServerClient(server.url, api="openai", model="m")
        with pytest.raises(ConfigError, match="UTF-8"):
            client.complete("\ud83d", 1)
