"""Servers that want a key: it comes from the option or the environment, goes with every request, and is never shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bench_serving
import pytest
from raw_server import Answer, plain, raw_server, stream
from test_hostile_server import DONE, MODELS, piece, usage

from kvtransfer import cli
from kvtransfer.kernels.errors import ConfigError, ServerError
from kvtransfer.server_client import Api, ServerClient
from kvtransfer.verify_options import VerifyOptions

KEY, OTHER = "sk-one.of+these=", "sk-another"
ANSWERS: dict[str, dict[str, Answer]] = {
    "bench": {
        "/v1/models": MODELS,
        "/v1/completions": stream(piece("a"), piece("b", "stop"), usage(), DONE),
        "/reset_prefix_cache": plain("{}"),
    },
    "verify": {
        "/v1/models": MODELS,
        "/v1/completions": plain('{"choices": [{"text": "ab", "finish_reason": "stop"}]}'),
        "/reset_prefix_cache": plain("{}"),
    },
}


def verify(*words: str) -> int:
    try:
        cli.main(["verify", "baseline", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def bench(*words: str) -> int:
    return bench_serving.main([*words, "--settle-s", "0", "--device", "cpu"])


@pytest.mark.parametrize(("name", "program"), [("verify", verify), ("bench", bench)])
def test_the_key_comes_from_the_option_or_the_environment(
    name: str,
    program: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "out.json"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with raw_server(ANSWERS[name], KEY) as server:
        words = ["--url", server.url, "--most-prompts", "1", "--file" if name == "verify" else "--json", str(file)]
        refused, bad = 1 if name == "verify" else 2, 2

        def said(status: int, *more: str) -> str:
            assert program(*words, *more) == status
            out = "".join(capsys.readouterr())
            assert KEY not in out and OTHER not in out and not (file.exists() and KEY in file.read_text())
            return out

        assert "got 401" in (out := said(refused)) and "it wants an --api-key" in out
        said(0, "--api-key", KEY)
        monkeypatch.setenv("OPENAI_API_KEY", OTHER)
        assert "no such key: Bearer ***" in said(refused)
        said(0, "--api-key", KEY)
        assert "no such key: None" in said(refused, "--api-key", "")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        said(0)
        assert "no such key: Bearer ***" in said(refused, "--api-key", OTHER)
        for broken in (f"{OTHER}\n", f"{OTHER} x", f"{OTHER}\u20ac", f"{OTHER}\ud800"):
            assert "--api-key, OPENAI_API_KEY" in said(bad, "--api-key", broken)


ERROR, PAGE = f'{{"error": {{"message": "what is {KEY}?"}}}}', f"<html>{KEY}</html>" * 40
REPEATED: list[Answer] = [
    *(plain(PAGE, status) for status in ("200 OK", "400 Bad Request", "401 Unauthorized", "500 Oops")),
    plain(ERROR),
    stream(f"data: {ERROR}\n\n", DONE),
    stream(f"data: {PAGE}\n\n", DONE),
    stream(f"error: {KEY}\n\n", DONE),
    stream(f"it breaks off {KEY}", chunked=False),
]


@pytest.mark.parametrize("answer", REPEATED)
@pytest.mark.parametrize(("api", "path"), [("openai", "/v1/completions"), ("sglang", "/generate")])
def test_no_message_shows_a_key_that_a_server_repeats(api: Api, path: str, answer: Answer) -> None:
    with raw_server({path: answer}) as server:
        client = ServerClient(server.url, api=api, model="m", api_key=KEY)
        with pytest.raises(ServerError) as refused:
            client.complete("hello", 2, stream=isinstance(answer, list))
    assert "***" in str(refused.value) and "sk-" not in str(refused.value)


def test_what_holds_a_key_does_not_show_it() -> None:
    assert KEY not in repr(VerifyOptions("baseline", api_key=KEY))
    with raw_server({"/v1/models": plain(PAGE)}) as server, pytest.raises(ServerError, match=r"got b'<html>\*\*\*<"):
        ServerClient(server.url, api_key=KEY)
    with pytest.raises(ConfigError, match="expected ASCII without spaces"):
        ServerClient("http://127.0.0.1:9", api_key="")
