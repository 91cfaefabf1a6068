"""The client of inference servers, against a local one that speaks both APIs over a tiny model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from local_server import LocalServer, serving

from kvtransfer.demo_model import _random_model
from kvtransfer.integrations.local_engine import KeptPrefixes, LocalEngine
from kvtransfer.integrations.transformers import PagedCache, cache_keyword, pool_for
from kvtransfer.kernels.errors import ConfigError, ServerError
from kvtransfer.server_client import Api, ServerClient

APIS: list[Api] = ["openai", "sglang"]
TEXT = "The key and the value of the tenth word stay what they are."


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    loaded = _random_model(torch.device("cpu"), torch.float32)
    made = LocalEngine(loaded.model, loaded.encode, loaded.decode, KeptPrefixes(3, 8), page_size=8)
    yield made
    made.close()


@pytest.fixture(params=APIS)
def server(request: pytest.FixtureRequest, engine: LocalEngine) -> Iterator[LocalServer]:
    engine.flush()
    with serving(engine, apis=(request.param,)) as made:
        yield made


def test_the_same_answer_whole_streamed_and_without_http(server: LocalServer, engine: LocalEngine) -> None:
    direct = engine.complete(TEXT, 12, tops=True)
    engine.flush()
    client = ServerClient(server.url)
    whole = client.complete(TEXT, 12, tops=True)
    assert (whole.tokens, whole.text, whole.output_tokens) == (direct.tokens, direct.text, 12)
    assert (whole.prompt_tokens, whole.cached_tokens) == (len(TEXT), 0)
    assert len(whole.tops) == 12 and all(len(top) == 2 and top[0][1] >= top[1][1] for top in whole.tops)
    assert whole.tops == direct.tops or client.api == "openai"
    margin = whole.margin(3)
    assert margin is not None and margin == pytest.approx(direct.tops[3][0][1] - direct.tops[3][1][1])
    streamed = client.complete(TEXT, 12, stream=True)
    assert streamed.text == direct.text and streamed.output_tokens == 12
    assert 0 < streamed.first_token_s < streamed.total_s
    assert streamed.cached_tokens == len(TEXT) // 8 * 8 - 8 * (len(TEXT) % 8 == 0)


def test_ids_as_prompt(server: LocalServer) -> None:
    client = ServerClient(server.url)
    assert client.complete(list(TEXT.encode()), 5, tops=True).tokens == client.complete(TEXT, 5, tops=True).tokens


def test_flush_empties_the_engines_own_cache(server: LocalServer) -> None:
    client = ServerClient(server.url)
    assert client.complete(TEXT, 3).cached_tokens == 0
    assert (client.complete(TEXT, 3).cached_tokens or 0) > 0
    client.flush()
    assert client.complete(TEXT, 3).cached_tokens == 0


def test_digests_come_from_a_server_of_ours(server: LocalServer) -> None:
    client = ServerClient(server.url)
    assert client.tells_digests and client.info() == {}
    cold, warm = client.complete(TEXT, 3, digests=True).digests, client.complete(TEXT, 3, digests=True).digests
    assert cold is not None and warm is not None and len(cold.pages) == len(TEXT) // 8
    hits = (len(TEXT) - 1) // 8
    assert cold.pages[:hits] == warm.pages[:hits] and all(len(digest) == 16 for page in cold.pages for digest in page)


def test_digests_of_a_paged_cache_are_those_of_transformers_own(engine: LocalEngine) -> None:
    from kvtransfer.integrations.kv_digests import kv_digests

    engine.flush()
    ids = torch.tensor([engine.encode(TEXT)])
    cache = PagedCache(engine.model, pool_for(engine.model, 64, 16))
    with torch.no_grad():
        engine.model(ids, **{cache_keyword(engine.model): cache})
    assert kv_digests(cache, ids.shape[1], 8) == engine.complete(TEXT, 4, digests=True).digests
    before = kv_digests(cache, ids.shape[1], 8)
    cache.views(2, torch.uint8, torch.uint8)[1][int(cache.table.pages[1]), 3, 1, 5] ^= 1
    after = kv_digests(cache, ids.shape[1], 8)
    different = [(p, n) for p, page in enumerate(after.pages) for n, d in enumerate(page) if d != before.pages[p][n]]
    assert different == [(2, 2)]


def test_refusals(server: LocalServer, engine: LocalEngine) -> None:
    client = ServerClient(server.url)
    with pytest.raises(ServerError, match=r"got 400.*at least 1 token") as refused:
        client.complete([], 3)
    assert refused.value.status == 400
    with pytest.raises(ServerError, match="no answer"):
        ServerClient("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="expected http://host:port"):
        ServerClient("127.0.0.1:8000")
    other: Api = "sglang" if client.api == "openai" else "openai"
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
        ServerClient(server.url, api=client.api, flush_path="/nowhere").flush()
    with pytest.raises(ServerError, match="404"):
        ServerClient(server.url, api=other, model="x").complete(TEXT, 1)
    with serving(engine, apis=("neither",)) as silent, pytest.raises(ServerError, match="got neither"):
        ServerClient(silent.url)


def test_a_temperature_that_is_not_said_is_greedy(server: LocalServer, engine: LocalEngine) -> None:
    """This server can do nothing else: who leaves the temperature to it gets that, and who asks for another is told."""
    api = ServerClient(server.url).api

    def ask(**more: Any) -> tuple[int, dict[str, Any]]:
        path = "/generate" if api == "sglang" else "/v1/completions"
        asked: dict[str, Any] = {"text": TEXT, "sampling_params": {"max_new_tokens": 4, **more}}
        if api == "openai":
            asked = {"prompt": TEXT, "max_tokens": 4, **more}
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        with closing(connection):
            connection.request("POST", path, json.dumps(asked))
            answer = connection.getresponse()
            return answer.status, json.load(answer)

    for more in ({}, {"temperature": None}, {"temperature": 0}, {"temperature": 0.0}):
        status, said = ask(**more)
        text = said["choices"][0]["text"] if api == "openai" else said["text"]
        assert (status, text) == (200, engine.complete(TEXT, 4).text), more
    for other in (1, 0.7, -1):
        status, said = ask(temperature=other)
        assert status == 400 and "temperature: expected 0" in said["error"]["message"], other


def test_a_request_that_fails_leaves_the_engine_usable(engine: LocalEngine) -> None:
    """A client that goes away in the middle of a stream ends its request, and only that."""

    def gone(token: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        engine.complete(TEXT, 5, on_token=gone)
    assert len(engine.complete(TEXT, 5).tokens) == 5


def test_the_longest_unused_sequence_is_given_up(engine: LocalEngine) -> None:
    engine.flush()
    prompts = [[(i * 7 + j) % 200 + 3 for j in range(150)] for i in range(4)]
    for prompt in prompts:  # three are kept
        assert engine.complete(prompt, 4).cached_tokens == 0
    assert engine.complete(prompts[3], 4).cached_tokens == 144
    assert engine.complete(prompts[0], 4).cached_tokens == 0


def test_the_server_as_a_program() -> None:
    """It says where it serves, and ends when its input does."""
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).resolve().parent.parent / "bench" / "local_server.py"
    words = [sys.executable, str(script), "--random-weights", "--device", "cpu", "--port", "0", "--host-pages", "100"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdin is not None and server.stdout is not None
            url = server.stdout.readline().split()[2].rstrip(";")
            client = ServerClient(url)
            assert client.complete(TEXT, 3).cached_tokens == 0
            assert client.complete(TEXT, 3).cached_tokens == len(TEXT) // 16 * 16
            assert (client.info() or {})["cached_tokens"] == len(TEXT) // 16 * 16
            server.stdin.close()
            assert server.wait(60) == 0
        finally:
            server.kill()
