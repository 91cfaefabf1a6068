"""A small HTTP server over one transformers model: OpenAI's /v1/completions and SGLang's /generate, greedy only.

    python bench/local_server.py --random-weights --port 8000

For trying out `kvtransfer verify` and bench_serving.py where there is no engine. One request at a time. A request
that says no temperature is answered greedily too; one that says another than 0 is refused.
GET /kvtransfer says what its cache counts, which real servers don't; with "kv_digests": true an answer brings digests
of the prompt's KV. POST /flush_cache or /reset_prefix_cache empties what the engine itself keeps.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from kvtransfer.completion import Completion, Prompt
from kvtransfer.kernels.errors import ConfigError, KVTransferError

MODEL_NAME = "local"
Apis = tuple[str, ...]


class Engine(Protocol):
    """What is served: `kvtransfer.integrations.local_engine.LocalEngine`."""

    @property
    def decode(self) -> Callable[[list[int]], str]: ...

    def complete(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        tops: bool = False,
        digests: bool = False,
        ignore_eos: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion: ...

    def flush(self) -> None: ...


class _StreamOptions(Struct):
    include_usage: bool = False


class OpenAIRequest(Struct):
    """The fields of /v1/completions that are known here."""

    prompt: Prompt
    max_tokens: int = 16
    temperature: float | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    return_tokens_as_token_ids: bool = False
    kv_digests: bool = False


class _Sampling(Struct):
    max_new_tokens: int = 128
    temperature: float | None = None
    ignore_eos: bool = False


class SGLangRequest(Struct):
    """The fields of /generate that are known here."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: _Sampling = field(default_factory=_Sampling)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    kv_digests: bool = False


class _Http(ThreadingHTTPServer):
    """Knows its open connections."""

    daemon_threads = False  # closing waits for them: a model that computes outlives no interpreter

    def __init__(self, *words: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*words)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self, how: int) -> None:
        """Of all that are open: SHUT_RD, nothing more is read from them; SHUT_RDWR, nor written."""
        for sock in list(self._open):
            with suppress(OSError):  # it has just ended
                sock.shutdown(how)


class LocalServer:
    """Serves ``engine`` on the loopback interface until `close`. ``port`` 0: a free one; ``apis``: which are spoken.
    ``linger_s``: how long `close` lets answers go on.

    Raises ConfigError on a port that can't be had."""

    def __init__(
        self,
        engine: Engine,
        *,
        port: int = 0,
        apis: Apis = ("openai", "sglang"),
        info: Callable[[], dict[str, int]] = dict,
        linger_s: float = 10.0,
    ) -> None:
        class Handler(_Handler):
            pass

        Handler.engine, Handler.apis, Handler.info = engine, apis, staticmethod(info)
        self._linger_s = linger_s
        try:
            self._http = _Http(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port: expected a free one of 0..65535, got {port}: {error}") from error
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="local-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End connections whose request has not come in full; wait for the others' answers. After ``linger_s`` those
        are broken off too: a stream ends there, and an answer in one piece is computed, but not sent."""
        self._http.shutdown()
        self._http.hang_up(socket.SHUT_RD)
        late = threading.Timer(self._linger_s, self._http.hang_up, [socket.SHUT_RDWR])
        late.start()
        try:
            self._http.server_close()
        finally:
            late.cancel()
        self._thread.join()


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[LocalServer]:
    """A `LocalServer` for a while."""
    server = LocalServer(engine, **options)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    apis: Apis
    info: Callable[[], dict[str, int]]
    timeout = 60.0  # seconds that whoever asks may let a request wait
    _begun = False  # whether a stream has

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: whoever asks sees the answer."""

    def handle(self) -> None:
        with suppress(ConnectionError):  # whoever asked has gone
            super().handle()

    def do_GET(self) -> None:
        if self.path == "/v1/models" and "openai" in self.apis:
            self._answer({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
        elif self.path == "/get_model_info" and "sglang" in self.apis:
            self._answer({"model_path": MODEL_NAME, "is_generation": True})
        elif self.path == "/kvtransfer":
            self._answer(type(self).info())
        else:
            self._refuse(404, "no such path")

    def do_POST(self) -> None:
        self._begun = False
        try:
            length = self.headers.get("Content-Length", "0")
            if not length.isdecimal():
                raise ConfigError(f"Content-Length: expected a number, got {length!r}")
            body = self.rfile.read(int(length))
            if self.path == "/v1/completions" and "openai" in self.apis:
                self._openai(msgspec.json.decode(body, type=OpenAIRequest))
            elif self.path == "/generate" and "sglang" in self.apis:
                self._sglang(msgspec.json.decode(body, type=SGLangRequest))
            elif self.path == {"openai": "/reset_prefix_cache", "sglang": "/flush_cache"}[self.apis[-1]]:
                self.engine.flush()
                self._answer({})
            else:
                self._refuse(404, "no such path")
        except (ConfigError, msgspec.DecodeError) as error:
            self._refuse(400, str(error))
        except KVTransferError as error:
            self._refuse(500, str(error))

    def _openai(self, asked: OpenAIRequest) -> None:
        _require_greedy(asked.temperature)
        started = time.time()
        head = {"id": f"cmpl-{started}", "object": "text_completion", "created": int(started), "model": MODEL_NAME}

        def choice(text: str, end: str | None, logprobs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
            return [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": end}]

        words = _Words(self.engine.decode)

        def told(token: int) -> None:
            self._event({**head, "choices": choice(words.add(token), None)})

        done = self._complete(
            asked.prompt, asked.max_tokens, asked.ignore_eos, bool(asked.logprobs), asked.kv_digests,
            told if asked.stream else None,
        )  # fmt: skip
        end = "length" if done.output_tokens == asked.max_tokens else "stop"
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.output_tokens,
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        more = {} if done.digests is None else {"kv_digests": done.digests}
        if not asked.stream:
            logprobs = self._openai_logprobs(done, asked) if asked.logprobs else None
            self._answer({**head, "choices": choice(done.text, end, logprobs), "usage": usage, **more})
            return
        self._event({**head, "choices": choice(words.rest(), end), **more})
        if asked.stream_options is not None and asked.stream_options.include_usage:
            self._event({**head, "choices": [], "usage": usage})
        self._event(None)

    def _openai_logprobs(self, done: Completion, asked: OpenAIRequest) -> dict[str, Any]:
        def name(token: str) -> str:
            return f"token_id:{token}" if asked.return_tokens_as_token_ids else self.engine.decode([int(token)])

        return {
            "tokens": [name(token) for token in done.tokens],
            "token_logprobs": [top[0][1] for top in done.tops],
            "top_logprobs": [{name(token): logprob for token, logprob in top} for top in done.tops],
        }

    def _sglang(self, asked: SGLangRequest) -> None:
        _require_greedy(asked.sampling_params.temperature)
        prompt: Prompt | None = asked.text if asked.text is not None else asked.input_ids
        if prompt is None:
            raise ConfigError("expected text or input_ids, got neither")
        limit = asked.sampling_params.max_new_tokens
        words = _Words(self.engine.decode)

        def told(token: int) -> None:
            words.add(token)
            self._event({"text": words.text, "output_ids": words.ids, "meta_info": {}})

        done = self._complete(
            prompt, limit, asked.sampling_params.ignore_eos, asked.return_logprob, asked.kv_digests,
            told if asked.stream else None,
        )  # fmt: skip
        meta: dict[str, Any] = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.output_tokens,
            "cached_tokens": done.cached_tokens,
            "finish_reason": {"type": "length" if done.output_tokens == limit else "stop"},
        }
        if asked.return_logprob:
            ranked = [[(logprob, int(token), None) for token, logprob in top] for top in done.tops]
            best = [dict(top) for top in done.tops]
            meta["output_token_logprobs"] = [(b.get(t), int(t), None) for t, b in zip(done.tokens, best, strict=True)]
            meta["output_top_logprobs"] = ranked
        ids = [int(token) for token in done.tokens]
        whole: dict[str, Any] = {"text": done.text, "output_ids": ids, "meta_info": meta}
        if done.digests is not None:
            whole["kv_digests"] = done.digests
        if asked.stream:
            self._event(whole)
            self._event(None)
        else:
            self._answer(whole)

    def _complete(
        self,
        prompt: Prompt,
        limit: int,
        ignore_eos: bool,
        tops: bool,
        digests: bool,
        told: Callable[[int], None] | None,
    ) -> Completion:
        return self.engine.complete(prompt, limit, tops=tops, digests=digests, ignore_eos=ignore_eos, on_token=told)

    def _answer(self, content: Any) -> None:
        data = msgspec.json.encode(content)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, content: Any) -> None:
        """One piece of a stream; None ends it."""
        if not self._begun:
            self._begun = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
        self.wfile.write(b"data: " + (b"[DONE]" if content is None else msgspec.json.encode(content)) + b"\n\n")
        self.wfile.flush()

    def _refuse(self, status: int, why: str) -> None:
        """With a status of its own, or where a stream has begun as a piece of it, which is then the last."""
        if self._begun:
            self._event({"error": {"message": why, "code": status}})
            return
        data = msgspec.json.encode({"error": {"message": why}})
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Words:
    """Text of a stream, piece by piece: a character of several tokens comes out once it is whole."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self._decode(self.ids)
        return "" if text.endswith("\ufffd") else self._new(text)

    def rest(self) -> str:
        return self._new(self._decode(self.ids))

    def _new(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new


def _require_greedy(temperature: float | None) -> None:
    """Whoever names none takes what a server does by itself, and this one can do nothing else."""
    if temperature:
        raise ConfigError(f"temperature: expected 0 (this server decodes greedily), got {temperature}")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the input ends, or until interrupted."""
    from rigs import device_of  # noqa: PLC0415  (as a module this file needs no model)
    from serving_local import ABLATIONS, LocalOptions, served  # noqa: PLC0415

    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--port", type=int, default=8000, help="0: a free one")
    out.add_argument("--model", help="folder, GGUF file or id (SmolLM2-135M)")
    out.add_argument("--random-weights", action="store_true", help="a tiny random model")
    out.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    out.add_argument("--cache", choices=ABLATIONS, default="host", help="which tiers there are")
    out.add_argument("--page-size", type=int, default=16)
    out.add_argument("--host-pages", type=int, default=4096)
    out.add_argument(
        "--disk", type=Path, default=Path("kvtransfer-disk"), help="folder of the disk tier, made if need be"
    )
    out.add_argument("--disk-gb", type=float, default=1.0)
    out.add_argument("--redis", help="redis://host:port of the remote tier")
    args = out.parse_args(argv)
    if "remote" in args.cache and args.redis is None:
        out.error("--cache host+disk+remote: expected --redis redis://host:port")
    try:
        options = LocalOptions(
            device_of(args.device), args.model, args.random_weights, args.page_size, args.host_pages, args.disk,
            args.disk_gb, args.redis,
        )  # fmt: skip
        with closing(served(options, [args.cache], args.port)) as servers:
            for _, url in servers:
                print(f"serving at {url}; end with the end of input, or Ctrl-C", flush=True)
                sys.stdin.read()
    except KVTransferError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
