"""The serving benchmark: its load, its figures, and the whole of it over tiny local servers."""

from __future__ import annotations

import csv
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import bench_serving
import local_server
import numpy as np
import pytest
import redis
import report
import torch
from bench_serving import Row
from local_server import LocalServer, serving
from raw_server import Answer, plain, raw_server, stream
from rich.console import Console
from serving_load import Shot, drive, figures
from serving_local import LEFT_S, LocalOptions, served
from test_hostile_server import DONE, piece, usage
from tier_servers import start_redis

from kvtransfer.completion import Completion, Prompt
from kvtransfer.kernels.errors import ConfigError, OwnershipError
from kvtransfer.prompts import NamedPrompt
from kvtransfer.server_client import ServerClient

TEXTS = [f"Request {n}: " + "pages go down and pages come up again. " * (3 + n) for n in range(4)]


class Clockwork:
    """An engine that takes a known time: 50 ms to the first token, 20 ms for each one after it."""

    first_s, next_s = 0.05, 0.02

    def __init__(self) -> None:
        self.running, self.most_running = 0, 0
        self.begun: list[float] = []

    @staticmethod
    def decode(ids: list[int]) -> str:
        return "x" * len(ids)

    def complete(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        tops: bool = False,
        digests: bool = False,
        ignore_eos: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        if prompt == "bad":
            raise ConfigError("a prompt that is refused")
        self.begun.append(time.perf_counter())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for number in range(max_new_tokens):
                time.sleep(self.next_s if number else self.first_s)
                assert on_token is not None
                on_token(1)
        finally:
            self.running -= 1
        return Completion(["1"] * max_new_tokens, "x" * max_new_tokens, len(prompt), 3, max_new_tokens)

    def flush(self) -> None: ...


@pytest.fixture
def clockwork() -> Iterator[tuple[Clockwork, ServerClient]]:
    engine = Clockwork()
    with serving(engine) as server:
        yield engine, ServerClient(server.url)


def test_times_are_those_of_the_tokens(clockwork: tuple[Clockwork, ServerClient]) -> None:
    engine, client = clockwork
    engine.next_s = 0.2
    (shot,), wall_s = drive(client, [NamedPrompt("a", "abc")], max_new_tokens=5, concurrency=1)
    assert shot.first_token_s >= 0.05 and 0.85 <= shot.total_s <= wall_s
    assert shot.first_token_s <= shot.total_s - 0.4, "half of the 0.8 s that follow: the first token may be heard late"
    assert (shot.prompt_tokens, shot.cached_tokens, shot.output_tokens, shot.error) == (3, 3, 5, None)


def test_concurrency_is_a_bound_that_is_used(clockwork: tuple[Clockwork, ServerClient]) -> None:
    engine, client = clockwork
    shots, _ = drive(client, [NamedPrompt(str(n), "abc") for n in range(9)], max_new_tokens=2, concurrency=3)
    assert engine.most_running == 3 and [shot.name for shot in shots] == list(map(str, range(9)))


def test_qps_spreads_requests_and_waiting_counts(clockwork: tuple[Clockwork, ServerClient]) -> None:
    engine, client = clockwork
    prompts = [NamedPrompt(str(n), "abc") for n in range(12)]
    started = time.perf_counter()
    drive(client, prompts, max_new_tokens=1, concurrency=12, qps=20, seed=1)
    gaps = np.random.default_rng(1).exponential(1 / 20, 12)
    wanted = np.cumsum(gaps) - gaps[0]
    assert (np.sort(engine.begun) - started >= wanted).all(), "a request was sent before it was due"
    crowded, _ = drive(client, prompts, max_new_tokens=1, concurrency=1, qps=1000, seed=1)
    assert crowded[-1].first_token_s > 10 * Clockwork.first_s, "waiting for a place was left out"


def test_failures_are_counted(clockwork: tuple[Clockwork, ServerClient]) -> None:
    _, client = clockwork
    shots, wall_s = drive(client, [NamedPrompt("a", "abc"), NamedPrompt("b", "bad")], max_new_tokens=1, concurrency=2)
    found = figures(shots, wall_s)
    assert (found.requests, found.failed) == (2, 1) and "refused" in str(shots[1].error)
    assert Row("x", found).wrong == "x: 1 requests failed"


def test_figures() -> None:
    shots = [Shot(str(n), n / 100, n / 10, 10, n, 4) for n in range(1, 101)]
    found = figures(shots, 20.0)
    times = [found.ttft_avg_s, found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s, found.e2e_p50_s]
    assert times == pytest.approx([0.505, 0.505, 0.901, 0.9901, 5.05])
    assert (found.requests, found.failed, found.requests_per_s, found.output_tokens_per_s) == (100, 0, 5.0, 20.0)
    assert (found.input_tokens, found.cached_tokens) == (1000, 5050)
    assert figures([*shots, Shot("x", 1, 1, 10, None, 4)], 1.0).cached_tokens is None
    assert figures([*shots, Shot("x", 1, 1, None, 1, 4)], 1.0).input_tokens is None
    for count in (1, 2):
        few = figures(shots[:count], 1.0)
        for percent, value in ((50, few.ttft_p50_s), (90, few.ttft_p90_s), (99, few.ttft_p99_s)):
            assert value == pytest.approx(0.01 + (count - 1) * 0.01 * percent / 100)
    for none in (figures([], 1.0), figures([Shot("x", error="it broke")], 1.0)):
        assert none.ttft_p99_s is None is none.e2e_p50_s and none.cached_tokens is None is none.input_tokens
    assert Row("x", found, counted_tokens=5050).wrong is None
    assert Row("x", found, unfilled=1).wrong is not None and Row("x", found, failed_pages=1).wrong is not None
    assert Row("x", found, counted_tokens=5049).wrong == "x: answers tell 5050 cached tokens, the cache 5049"


def run(*args: str) -> int:
    return bench_serving.main(["--random-weights", "--device", "cpu", "--max-new-tokens", "3", *args])


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return "--prompts", str(file)


@pytest.mark.timeout(200)
def test_every_part_of_the_ablation(
    prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host tier of 20 pages can't hold the 41 of all prompts: what the lower tiers add shows in cached tokens."""
    pytest.importorskip("matplotlib")
    server, port, _ = start_redis(tmp_path)
    try:
        files = [tmp_path / name for name in ("out.json", "out.csv", "out.png")]
        words = ["--json", str(files[0]), "--csv", str(files[1]), "--plot", str(files[2])]
        words += ["--ablation", "none", "host", "host+disk", "host+disk+remote"]
        words += ["--redis", f"redis://127.0.0.1:{port}", "--disk", str(tmp_path), "--disk-gb", "0.1"]
        assert run(*words, *prompts, "--host-pages", "20") == 0
        store = redis.Redis(port=port)
        left = [store.ttl(key) for key in store.scan_iter()]
        assert left and all(0 < seconds <= LEFT_S for seconds in left), "nobody would ever remove them"
    finally:
        server.kill()
    rows: list[dict[str, Any]] = json.loads(files[0].read_text())["rows"]
    assert [row["case"] for row in rows] == ["none", "host", "host+disk", "host+disk+remote"]
    none, host, disk, remote = rows
    tokens = [len(text) for text in TEXTS]
    whole = sum(min(n // 16 * 16, n - 1) for n in tokens)
    assert all(row["figures"]["input_tokens"] == sum(tokens) for row in rows)
    assert none["figures"]["cached_tokens"] == 0 and none["loads"] is None
    assert 0 <= host["figures"]["cached_tokens"] < whole
    assert disk["figures"]["cached_tokens"] == remote["figures"]["cached_tokens"] == whole
    for row in rows[1:]:
        assert row["counted_tokens"] == row["figures"]["cached_tokens"]
        assert row["loads"] * 16 >= row["counted_tokens"]
    with files[1].open() as lines:
        written = list(csv.DictReader(lines))
    assert [row["case"] for row in written] == [row["case"] for row in rows]
    assert written[2]["cached_tokens"] == str(whole) and float(written[2]["ttft_p90_s"]) > 0
    assert files[2].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(word in out for word in ("TTFT avg ms", "p99", "e2e p50 ms", "out tok/s", "cached / input", "loads"))


def test_against_a_url(prompts: tuple[str, str], clockwork: tuple[Clockwork, ServerClient], tmp_path: Path) -> None:
    _, client = clockwork
    file = tmp_path / "out.json"
    words = ["--url", client.url, "--json", str(file), *prompts, "--qps", "50", "--max-new-tokens", "3"]
    assert bench_serving.main(["--device", "cpu", "--settle-s", "0", *words]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["figures"]["cached_tokens"] == 12 and row["cached_share"] == 12 / sum(map(len, TEXTS))
    assert row["loads"] is None and row["figures"]["ttft_p50_s"] >= 0.05


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Said before anything is measured: a run takes minutes."""
    same = str(tmp_path / "same")
    for bad, said in (
        (["--concurrency", "0"], "above 0"),
        *((["--qps", qps], "above 0") for qps in ("0", "-1", "nan", "inf")),
        *((["--most-prompts", most], "above 0") for most in ("0", "-1")),
        (["--max-new-tokens", "0"], "above 0"),
        (["--seed", "-1"], "0 or more"),
        (["--settle-s", "nan"], "0 or more"),
        (["--ablation", "host+disk+remote"], "expected --redis"),
        (["--url", "http://127.0.0.1:9"], "--random-weights"),
        *(([f"--{name}", str(tmp_path / "no" / "x")], "folder that exists") for name in ("csv", "json", "plot")),
        *(([f"--{name}", str(tmp_path)], "got a folder") for name in ("csv", "json", "plot")),
        (["--csv", same, "--json", same], "one twice"),
    ):
        with pytest.raises(SystemExit) as end:
            run(*bad)
        assert end.value.code == 2 and said in capsys.readouterr().err, bad
    assert run("--prompts", str(tmp_path / "none")) == 2
    assert run("--disk-gb", "-1", "--ablation", "none", "host+disk") == 2
    assert "case" not in capsys.readouterr().out, "the first part was measured before the second was looked at"
    assert bench_serving.main(["--url", "http://127.0.0.1:9"]) == 2


@pytest.mark.timeout(120)
def test_the_folder_of_a_disk_tier_is_made(prompts: tuple[str, str], tmp_path: Path) -> None:
    """As local_server.py makes it."""
    folder, file = tmp_path / "new" / "disk", tmp_path / "out.json"
    words = ["--ablation", "host+disk", "--disk-gb", "0.05", *prompts]
    assert run(*words, "--disk", str(folder), "--json", str(file)) == 0
    assert list(folder.iterdir()) == [], "what it filled is gone, what it was told is there"
    (row,) = json.loads(file.read_text())["rows"]
    assert row["case"] == "host+disk" and row["figures"]["failed"] == 0


@pytest.mark.parametrize("program", [bench_serving.main, local_server.main])
def test_a_folder_that_cannot_be_made_is_bad_input(
    program: Callable[[list[str]], int], prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ["--cache", "host+disk", "--port", "0"] if program is local_server.main else ["--ablation", "host+disk"]
    for folder in (prompts[1], f"{prompts[1]}/below"):
        assert program(["--random-weights", "--device", "cpu", "--disk-gb", "0.05", *case, "--disk", folder]) == 2
        said = capsys.readouterr()
        assert f"{folder}" in said.err and "expected a folder, there or to be made, got" in said.err and not said.out


TWO = {"max_new_tokens": 5, "concurrency": 2}
COMPLETIONS = "POST /v1/completions"
MODELS = plain('{"data": [{"id": "m"}]}')
WELL = stream(piece("a"), piece("b", "stop"), usage(), DONE)


def against(answers: dict[str, Answer], *words: str) -> int:
    with raw_server({"/v1/models": MODELS, **answers}) as server:
        return bench_serving.main(["--url", server.url, "--settle-s", "0", "--most-prompts", "2", *words])


def test_a_server_that_cannot_be_emptied_is_told_before_it_is_filled(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server({"/v1/models": MODELS, COMPLETIONS: WELL}) as server:
        assert bench_serving.main(["--url", server.url]) == 2
        assert COMPLETIONS not in server.asked
    assert "--flush-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken",
    [
        stream(piece("a"), chunked=False),
        stream('data: {"error": {"message": "it broke"}}\n\n', DONE),
        plain("<html>slow down", "429 Too Many Requests"),
        plain("<html>oops", "500 Oops"),
    ],
)
def test_failed_requests_end_with_1_and_without_figures(
    broken: Answer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("out.json", "out.csv", "out.png")]
    words = ["--json", str(files[0]), "--csv", str(files[1]), "--plot", str(files[2])]
    assert against({COMPLETIONS: broken, "/reset_prefix_cache": plain("{}")}, *words) == 1
    said = capsys.readouterr()
    assert "server: 2 requests failed" in said.err and "?" in said.out and "0.0" not in said.out.split("│")[4]
    (row,) = json.loads(files[0].read_text(), parse_constant=pytest.fail)["rows"]
    assert row["figures"]["failed"] == 2 and row["figures"]["ttft_avg_s"] is None and row["unfilled"] == 2
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_server_that_tells_no_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    answers: dict[str, Answer] = {COMPLETIONS: stream(piece("a"), piece("b", "stop"), DONE)}
    assert against({**answers, "/reset_prefix_cache": plain("{}")}, "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["figures"]["input_tokens"] is None is row["cached_share"] and "? / ?" in capsys.readouterr().out


def test_what_was_measured_is_kept_when_a_later_part_fails(
    prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is not there, an interrupt: the rows so far are shown and written, and folders are removed."""
    real, file = bench_serving.measure, tmp_path / "out.csv"
    for error, status in ((KeyboardInterrupt(), 130), (ConfigError("no store"), 2)):

        def measure(case: str, *rest: Any, error: BaseException = error) -> Row:
            if case == "host+disk":
                raise error
            return real(case, *rest)

        monkeypatch.setattr(bench_serving, "measure", measure)
        words = ["--ablation", "none", "host+disk", "--disk", str(tmp_path), "--csv", str(file), "--disk-gb", "0.1"]
        assert run(*words, *prompts) == status
        assert "none" in capsys.readouterr().out and len(file.read_text().splitlines()) == 2
        assert list(tmp_path.glob("kvtransfer-bench-*")) == []


def test_a_store_that_takes_nothing_is_told(prompts: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Else its row would pass for one of a cache with that store."""
    assert run("--ablation", "host+disk+remote", "--redis", "redis://127.0.0.1:9", *prompts) == 1
    assert "pages could not be written" in capsys.readouterr().err


def test_a_server_that_closes_waits_for_what_it_computes() -> None:
    """A thread that is still in the model when the interpreter ends takes the process down with it."""
    engine = Clockwork()
    engine.next_s = 0.1
    with serving(engine) as server:
        client = ServerClient(server.url)
        sender = threading.Thread(target=drive, args=(client, [NamedPrompt("a", "abc")] * 2), kwargs=TWO)
        sender.start()
        while engine.running < 2:
            time.sleep(0.01)
        client.abort()
    sender.join()
    assert engine.running == 0


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /gene",
        b"POST /generate HTTP/1.1\r\nContent-Length: 40\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: 40\r\n\r\n{",
    ],
)
def test_a_server_that_closes_does_not_wait_for_who_says_nothing(said: bytes) -> None:
    """Nor for the rest of what somebody began to say: a minute would pass before such a request is given up."""
    server = LocalServer(Clockwork())
    with socket.create_connection(address_of(server)) as silent:
        silent.sendall(said)
        ServerClient(server.url)  # answered: the connection before it was accepted
        started = time.perf_counter()
        server.close()
        assert time.perf_counter() - started < 5


def test_a_server_that_closes_does_not_wait_for_who_does_not_listen(capsys: pytest.CaptureFixture[str]) -> None:
    """A stream that nobody reads stops once the connection is full; it is broken off, and its thread ends."""

    class Loud(Clockwork):
        first_s = next_s = 0.0

        @staticmethod
        def decode(ids: list[int]) -> str:
            return "x" * (len(ids) << 20)

    engine = Loud()
    server = LocalServer(engine, linger_s=0.1)
    with socket.create_connection(address_of(server)) as deaf:
        body = b'{"text": "abc", "stream": true, "sampling_params": {"max_new_tokens": 40}}'
        deaf.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        deaf.recv(1)
        started = time.perf_counter()
        server.close()
        assert time.perf_counter() - started < 5 and engine.running == 0 and len(engine.begun) == 1
    assert "Traceback" not in capsys.readouterr().err


def address_of(server: LocalServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_a_local_server_finds_its_disk_again(tmp_path: Path) -> None:
    """Else each start would fill the folder once more, under a name that nobody can know."""
    options = LocalOptions(torch.device("cpu"), None, True, 16, 64, tmp_path, 0.05, None)
    cached = []
    for _ in range(2):
        with closing(served(options, ["host+disk"])) as servers:
            for _, url in servers:
                cached.append(ServerClient(url).complete(TEXTS[1], 2).cached_tokens)
                with (
                    pytest.raises(OwnershipError, match="no other process owns"),
                    closing(served(options, ["host+disk"])) as others,
                ):
                    next(others)
    assert cached == [0, len(TEXTS[1]) // 16 * 16] and len(list((tmp_path / "host-disk").iterdir())) == 1


def test_a_stored_page_is_counted_once_whatever_tiers_have_it(tmp_path: Path) -> None:
    """Neither its way down to the disk counts, nor its way back to a host tier that had no room for it any more."""
    options = LocalOptions(torch.device("cpu"), None, True, 16, 8, tmp_path, 0.05, None, fresh=True)
    with closing(served(options, ["host+disk"])) as servers:
        client = ServerClient(next(servers)[1])
        counts = []
        for text, cached in (("abcd", 0), ("efgh", 0), ("ijkl", 0), ("abcd", 63), ("abcd", 63)):
            assert client.complete(text * 16, 2).cached_tokens == cached
            client.flush()  # waits for stores
            info = client.info() or {}
            counts.append((info["stored_pages"], info["loaded_pages"]))
    assert counts == [(4, 0), (8, 0), (12, 0), (12, 4), (12, 8)] and info["failed_pages"] == 0


def test_a_narrow_terminal_loses_no_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "out_console", lambda: Console(width=40))
    bench_serving.show("a title", [Row("host+disk+remote", figures([Shot("x", 1.2345, 2.3456, 10, 5, 4)], 2.0))])
    out = capsys.readouterr().out
    assert all(text in out for text in ("host+disk+remote", "1234.5", "2345.6", "5 / 10", "50.0%", "stores"))


def test_an_interrupt_breaks_off_what_is_under_way(clockwork: tuple[Clockwork, ServerClient]) -> None:
    engine, client = clockwork
    engine.first_s = 2.0

    class Impatient(list[NamedPrompt]):
        def __iter__(self) -> Iterator[NamedPrompt]:
            yield from [NamedPrompt("a", "abc"), NamedPrompt("b", "abc")]
            time.sleep(0.3)
            raise KeyboardInterrupt

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        drive(client, Impatient([NamedPrompt("a", "abc")] * 3), max_new_tokens=50, concurrency=1)
    assert time.perf_counter() - started < 1.5 and len(engine.begun) == 1
