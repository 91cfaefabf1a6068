"""A client of an inference server that speaks as OpenAI's completions do, or as SGLang does.

It is `http.client` of the standard library: requests are few and plain, the engine's container needs nothing more
for it, and a line of a stream is handed over when it arrives, so that times are those of the tokens.
"""

from __future__ import annotations

import http.client
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvtransfer.completion import Completion, Prompt
from kvtransfer.kernels.errors import ConfigError, ServerError
from kvtransfer.server_answers import Flushed, OpenAIAnswer, OpenAIModels, SGLangAnswer, join_openai, join_sglang

Api = Literal["openai", "sglang"]
FLUSH_PATHS: dict[Api, tuple[str, ...]] = {
    "openai": ("/reset_prefix_cache", "/flush_cache"),
    "sglang": ("/flush_cache",),
}
_OWN_INFO = "/kvtransfer"  # answered by servers that can say digests
_BUSY = (200, 400)  # of a flush that was not done: vLLM's and SGLang's
_BUSY_S = 10.0  # for requests and stores to end that hold what is to be flushed
_SAID = 1 << 16  # bytes that are read of why a request was refused
_LOCKED = (401, 403)
_TooMuch = (400, 422)  # a server that refuses fields it does not know
_T = TypeVar("_T")
_A = TypeVar("_A", OpenAIAnswer, SGLangAnswer)


class ServerClient:
    """Thread-safe: each request has a connection of its own. Greedy decoding only.

    url         "http://host:port", with a path in front of the API's own if need be
    api         what to speak; None: asked of the server
    model       name that OpenAI's API wants; None: the first that the server lists
    timeout_s   of each wait for bytes
    flush_path  that empties the engine's own prefix cache; None: what the two kinds of server use
    api_key     sent with every request, as a bearer token; no message shows it

    Raises ServerError if the server does not answer, ConfigError for a URL or a key that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        api: Api | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        flush_path: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._secure, self._host, self._port, path = _parts(url)
        self.url, self._timeout_s = url, timeout_s
        self._base = path.rstrip("/").removesuffix("/v1")
        self._open_sockets: set[socket.socket] = set()
        self._aborts = 0
        self._headers = {"Content-Type": "application/json"}
        self._key: bytes | None = None
        if api_key is not None:
            if not re.fullmatch(r"[!-~]+", api_key):  # http.client would refuse it too, and show it
                raise ConfigError(
                    "api_key (--api-key, OPENAI_API_KEY): expected ASCII without spaces, got something else"
                )
            self._key, self._headers["Authorization"] = api_key.encode(), f"Bearer {api_key}"
        self.api: Api = self._find_api() if api is None else api
        self._flush_paths = FLUSH_PATHS[self.api] if flush_path is None else ("/" + flush_path.lstrip("/"),)
        self.model = self._find_model() if model is None and self.api == "openai" else model
        self.tells_digests = self._own_info() is not None
        self._plain = False  # fields of vLLM only are left out

    def complete(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        stream: bool = False,
        tops: bool = False,
        digests: bool = False,
        ignore_eos: bool = False,
    ) -> Completion:
        """One greedy answer. ``tops``: with the two most likely tokens at each place; ``digests``: of the KV, where
        the server can tell (`tells_digests`). Raises ServerError.
        """
        digests = digests and self.tells_digests
        if self.api == "sglang":
            body = sglang_request(prompt, max_new_tokens, stream=stream, tops=tops, ignore_eos=ignore_eos)
            if digests:
                body["kv_digests"] = True
            return join_sglang(self._timed("/generate", body, SGLangAnswer, stream))
        body = openai_request(self.model or "", prompt, max_new_tokens, stream=stream, tops=tops, ignore_eos=ignore_eos)
        if digests:
            body["kv_digests"] = True
        if tops and not self._plain:
            try:  # ids in place of texts: two tokens may have the same text
                body["return_tokens_as_token_ids"] = True
                return join_openai(self._timed("/v1/completions", body, OpenAIAnswer, stream))
            except ServerError as error:
                if error.status not in _TooMuch:
                    raise
                self._plain = True
                del body["return_tokens_as_token_ids"]
        return join_openai(self._timed("/v1/completions", body, OpenAIAnswer, stream))

    def flush(self) -> None:
        """Empty the engine's own prefix cache, once nothing holds it any more: a request that was answered, or its
        stores, may do so for a while. Raises ConfigError where the server has no such request, ServerError where it
        does not do it."""
        for path in self._flush_paths:
            until = time.monotonic() + _BUSY_S
            while (refused := self._refusal(path)) is not None:
                if refused.status in (404, 405):
                    break
                if refused.status not in _BUSY or time.monotonic() > until:
                    raise refused
                time.sleep(0.1)
            else:
                return
        raise ConfigError(
            f"{self.url}: expected a request that empties the prefix cache, got 404 for "
            f"{', '.join(self._flush_paths)}; start vLLM with VLLM_SERVER_DEV_MODE=1, or give --flush-path"
        )

    def info(self) -> dict[str, int] | None:
        """What a server of ours says about itself and its cache; None from others."""
        return self._own_info() if self.tells_digests else None

    def abort(self) -> None:
        """Break off all requests that are under way: they raise ServerError. From any thread."""
        self._aborts += 1  # first: a request that connects just now looks at it once its socket is listed
        for sock in list(self._open_sockets):
            with suppress(OSError):  # it has just ended
                sock.shutdown(socket.SHUT_RDWR)

    # --- inside

    def _own_info(self) -> dict[str, int] | None:
        """Counts; None where there are none, or where a page for people answers every path."""
        try:
            with self._open("GET", _OWN_INFO, None) as answer:
                found: dict[str, int] = self._decode(answer.read(), dict[str, int], _OWN_INFO)
        except ServerError as error:
            if error.status is None:
                raise
            return None
        return found

    def _refusal(self, path: str) -> ServerError | None:
        """Why the cache was not emptied; None if it was."""
        try:
            with self._open("POST", path, {}) as answer:
                data = self._without_key(answer.read())
        except ServerError as error:
            return error
        try:
            if msgspec.json.decode(data, type=Flushed).success:
                return None
        except (msgspec.DecodeError, RecursionError):  # a text, or nothing: the status is the answer
            return None
        return ServerError(f"{self.url}{path}: expected the cache to be emptied, got {data[:200]!r}", 200)

    def _find_api(self) -> Api:
        known: dict[str, Api] = {"/get_model_info": "sglang", "/model_info": "sglang", "/v1/models": "openai"}
        locked: ServerError | None = None
        for path, api in known.items():
            try:
                with self._open("GET", path, None) as answer:
                    answer.read()
                    if answer.status == 200:
                        return api
            except ServerError as error:
                if error.status is None:
                    raise
                locked = error if error.status in _LOCKED else locked
        raise locked or ServerError(
            f"{self.url}: expected an OpenAI-style or SGLang-style server, got neither; give --api", 404
        )

    def _find_model(self) -> str:
        with self._open("GET", "/v1/models", None) as answer:
            models = self._decode(answer.read(), OpenAIModels, "/v1/models").data
        if not models:
            raise ServerError(f"{self.url}/v1/models: expected a model, got none; give --model", 200)
        return models[0].id

    def _timed(self, path: str, body: dict[str, Any], kind: type[_A], stream: bool) -> Iterator[tuple[float, _A]]:
        """(seconds since the request, answer) of each piece. ServerError on a stream that breaks off: most that die
        look like one that ends, so an end has to be told, by a piece or by [DONE]."""
        started, ended, last = time.perf_counter(), False, b""
        with self._open("POST", path, body) as answer:
            if not stream:
                yield time.perf_counter() - started, self._decode(answer.read(), kind, path)
                return
            while line := self._without_key(answer.readline()):
                at, last = time.perf_counter() - started, line.strip() or last
                if line.startswith(b"error:"):  # llama.cpp's; a [DONE] follows
                    said = line[:500].decode(errors="replace").strip()
                    raise ServerError(f"{self.url}{path}: expected an answer, got {said}", 200)
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data and line.startswith(b"data:"):
                    piece = self._decode(data, kind, path)
                    ended = ended or piece.ended
                    yield at, piece
            if not ended:
                raise ServerError(
                    f"{self.url}{path}: expected a stream up to its end, but it broke off after {last[:200]!r}"
                )

    @contextmanager
    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            data = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise ConfigError(f"prompt: expected text that UTF-8 can hold: {error}") from error
        sock, aborts = None, self._aborts
        try:
            connection.connect()
            sock = connection.sock
            self._open_sockets.add(sock)
            if self._aborts != aborts:
                raise ConnectionAbortedError("broken off")
            connection.request(method, self._base + path, body=data, headers=self._headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                said = self._without_key(answer.read(_SAID)).decode(errors="replace")[:500].strip()
                said += "; it wants an --api-key, or another one" if answer.status in _LOCKED else ""
                raise ServerError(f"{self.url}{path}: expected status 200, got {answer.status}: {said}", answer.status)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: no answer ({type(error).__name__}: {error})") from error
        finally:
            self._open_sockets.discard(sock)
            connection.close()

    def _without_key(self, said: bytes) -> bytes:
        """What a server says: there are some that repeat what they were sent."""
        return said if self._key is None else said.replace(self._key, b"***")

    def _decode(self, data: bytes, kind: type[_T], path: str) -> _T:
        data = self._without_key(data)
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ServerError(
                f"{self.url}{path}: expected {kind.__name__}, got {data[:200]!r}: {error}", 200
            ) from error


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """(whether it is https, host, port, path). Raises ConfigError on what http.client would trip over later."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
        well = parts.scheme in ("http", "https") and host != "" and url.isascii() and url.isprintable()
        if not well or " " in url:
            raise ValueError("no such address")
    except ValueError as error:
        raise ConfigError(f"url: expected http://host:port, got {url!r}: {error}") from error
    return parts.scheme == "https", host, port, parts.path


def openai_request(
    model: str, prompt: Prompt, max_new_tokens: int, *, stream: bool, tops: bool, ignore_eos: bool
) -> dict[str, Any]:
    """Body of a greedy /v1/completions."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0.0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if tops:
        body["logprobs"] = 2
    if ignore_eos:
        body["ignore_eos"] = True
    return body


def sglang_request(
    prompt: Prompt, max_new_tokens: int, *, stream: bool, tops: bool, ignore_eos: bool
) -> dict[str, Any]:
    """Body of a greedy /generate."""
    sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
    body: dict[str, Any] = {("text" if isinstance(prompt, str) else "input_ids"): prompt, "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if tops:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    return body
