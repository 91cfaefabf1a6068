"""`kvtransfer verify`: phases, classes of mismatch, and its last line, over servers with and without a fault."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from local_server import serving
from raw_server import Answer, plain, raw_server
from rich.console import Console

from kvtransfer import cli
from kvtransfer.completion import Completion, KVDigests, Prompt
from kvtransfer.demo_model import _random_model
from kvtransfer.integrations.local_engine import KeptPrefixes, LocalEngine
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.prompts import NamedPrompt, read_prompts, shipped_prompts
from kvtransfer.verify import COLD, FLUSHED, Reference, record, replay
from kvtransfer.verify_compare import Kind, Mismatch, PageDifference, compare, compare_bytes
from kvtransfer.verify_report import print_report

QUICK = ("--max-new-tokens", "4", "--settle-s", "0")
PROMPTS = [f"Prompt {number}: " + "what a cache keeps it may forget. " * (4 + number) for number in range(3)]


def answer(
    tokens: str, margins: list[float] | None = None, pages: list[list[str]] | None = None, cached: int = 0
) -> Completion:
    return Completion(
        tokens=list(tokens),
        text=tokens,
        prompt_tokens=16,
        cached_tokens=cached,
        output_tokens=len(tokens),
        tops=[[(token, -1.0), ("?", -1.0 - m)] for token, m in zip(tokens, margins or [], strict=False)],
        digests=None if pages is None else KVDigests(4, pages),
    )


PAGES = [["a", "b"], ["c", "d"], ["e", "f"]]


def compared(expected: Completion, got: Completion, pages: int = 3) -> Mismatch | None:
    return compare("p", COLD, expected, got, bytes_of=expected.digests, pages=pages)


def test_equal_answers_are_none() -> None:
    assert compared(answer("xyz"), answer("xyz")) is None  # tokens agree: bytes need not be known
    assert compared(answer("xyz", pages=PAGES), answer("xyz", pages=PAGES)) is None


def test_bytes_that_differ_are_a_fault_even_where_tokens_agree() -> None:
    wrong = [["a", "b"], ["c", "X"], ["X", "f"]]
    found = compared(answer("xyz", pages=PAGES), answer("xyz", pages=wrong))
    assert found is not None and found.kind is Kind.BYTES and found.position is None
    assert found.page == PageDifference(page=1, layer=1, page_size=4, different_pages=2, compared_pages=3)
    assert "page 1 (tokens 4 to 7), layer 1; 2 of 3 pages differ" in str(found)
    assert compared(answer("xyz", pages=PAGES), answer("xyz", pages=wrong), pages=1) is None, "not loaded, not compared"


def test_classes_of_tokens_that_differ() -> None:
    close, far = [1.0, 0.2, 1.0], [1.0, 0.3, 1.0]
    near = compared(answer("xyz", close, PAGES), answer("xaz", close, PAGES))
    assert near is not None and near.kind is Kind.NEAR_TIE and near.position == 1 and near.margin == pytest.approx(0.2)
    assert (near.expected, near.got) == ("y", "a")
    for expected, got, why in (
        (answer("xyz", far, PAGES), answer("xaz", close, PAGES), "no near-tie"),
        (answer("xyz", close), answer("xaz", close), "can't be had"),
        (answer("xyz", close, PAGES), answer("xaz", close), "can't be had"),
        (answer("xyz", close, PAGES), answer("xaz", close, PAGES[:2]), "can't be had"),
        (answer("xyz", pages=PAGES), answer("xaz", pages=PAGES), "not known"),
    ):
        found = compared(expected, got)
        assert found is not None and found.kind is Kind.UNCLASSIFIED and why in found.why
    shorter = compared(answer("xyz"), answer("xy"))
    assert shorter is not None and (shorter.position, shorter.expected, shorter.got) == (2, "z", "(nothing)")


def test_layers_whose_bytes_are_not_known_are_passed_over() -> None:
    one, other = KVDigests(4, [["a", ""], ["c", ""]]), KVDigests(4, [["a", "b"], ["c", "d"]])
    assert compare_bytes(one, other, 2) == (True, None)
    assert compare_bytes(one, KVDigests(4, [["a", "b"], ["", "d"]]), 2) == (False, None)
    assert compare_bytes(one, KVDigests(8, [["a", "b"]]), 1) == (False, None)
    assert compare_bytes(None, other, 0) == (True, None)


def test_servers_that_tell_no_tokens_are_compared_by_text() -> None:
    assert compared(Completion([], "abc"), Completion([], "abc")) is None
    found = compared(Completion([], "abc"), Completion([], "abd"))
    assert found is not None and found.kind is Kind.UNCLASSIFIED


@dataclass
class Scripted:
    """A target that answers from a list, and writes down what it was asked."""

    answers: list[Completion]
    asked: list[str] = field(default_factory=list)
    name: str = "scripted"

    def complete(self, prompt: Prompt, max_new_tokens: int) -> Completion:
        self.asked.append(str(prompt))
        return self.answers.pop(0)

    def flush(self) -> None:
        self.asked.append("flush")

    def counts(self) -> list[str]:
        return []


def test_order_of_requests_and_what_each_is_compared_with() -> None:
    cold, warm = answer("xyz", pages=PAGES), answer("xyw", pages=PAGES, cached=12)
    target = Scripted([cold, warm, cold, warm])
    baseline = record(target, [NamedPrompt("a", "A"), NamedPrompt("b", "B")], 3, lambda _: None)
    assert target.asked == ["flush", "A", "A", "flush", "B", "B"]
    loaded = answer("xyw", pages=[["a", "b"], ["c", "d"], ["e", "X"]], cached=8)  # page 2 was computed: may differ
    target = Scripted([cold, cold, loaded, loaded])
    report = replay(target, baseline, lambda _: None, reference="warm")
    assert target.asked == ["flush", "A", "flush", "B", "flush", "A", "B"]
    assert report.mismatches == [] and report.hits(FLUSHED) == (16, 32) and report.hits(COLD) == (0, 32)
    report = replay(Scripted([cold, cold, loaded, loaded]), baseline, lambda _: None)
    assert [m.position for m in report.mismatches] == [2, 2]


@pytest.mark.parametrize("reference", ["cold", "warm"])
@pytest.mark.parametrize(("baseline_cached", "test_cached"), [(0, 0), (12, 0), (0, 8), (12, 8), (None, 8), (12, None)])
def test_the_report_says_what_is_compared_with_what_and_how_cold_it_was(
    reference: Reference, baseline_cached: int | None, test_cached: int | None
) -> None:
    """A baseline that came out of a cache hides that cache's faults: nobody may take it for a cold one."""
    was, now = (msgspec.structs.replace(answer("x"), cached_tokens=n) for n in (baseline_cached, test_cached))
    baseline = record(Scripted([was] * 4), [NamedPrompt("a", "A"), NamedPrompt("b", "B")], 1, lambda _: None)
    report = replay(Scripted([now] * 4), baseline, lambda _: None, reference=reference)
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert f"cold: compared with the baseline's cold answers; after the flush: with its {reference} ones" in lines
    for whose, cached, rate in (("baseline", baseline_cached, "75.0 % (24"), ("test", test_cached, "50.0 % (16")):
        said = [line for line in lines if line.startswith(f"the {whose}'s cold answers were not all cold")]
        assert len(said) == bool(cached) and all(f": {rate} of 32 prompt tokens) came from" in line for line in said)


def test_a_cold_prompt_that_was_cut_elsewhere_is_not_compared_by_bytes() -> None:
    baseline = record(Scripted([answer("x", pages=PAGES)] * 2), [NamedPrompt("a", "A")], 1, lambda _: None)
    other = answer("x", pages=[["X", "Y"]] * 3, cached=4)
    assert replay(Scripted([other, other]), baseline, lambda _: None).mismatches == []
    differs = replay(Scripted([answer("x", pages=[["X", "Y"]] * 3)] * 2), baseline, lambda _: None).mismatches
    assert [(m.run, m.kind) for m in differs] == [(COLD, Kind.BYTES)]


# --- over HTTP


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    loaded = _random_model(torch.device("cpu"), torch.float32)
    made = LocalEngine(loaded.model, loaded.encode, loaded.decode, KeptPrefixes(), page_size=16)
    yield made
    made.close()


class Faulty:
    """An engine whose cached answers can be spoilt, and whose own cache survives a flush: stands for one with us."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self.decode = engine, engine.decode
        self.flip: tuple[int, int] | None = None
        self.other_token_at: int | None = None
        self.hide_digests = False

    def complete(self, prompt: Prompt, max_new_tokens: int, **options: Any) -> Completion:
        done = self._engine.complete(prompt, max_new_tokens, **options)
        if not done.cached_tokens:
            return done
        if self.flip is not None and done.digests is not None:
            page, layer = self.flip
            done.digests.pages[page][layer] = "0" * 16
        if self.other_token_at is not None:
            token = done.tokens[self.other_token_at]
            tokens = [*done.tokens]
            tokens[self.other_token_at] = str(int(token) ^ 1)
            done = msgspec.structs.replace(done, tokens=tokens)
        return msgspec.structs.replace(done, digests=None) if self.hide_digests else done

    def flush(self) -> None:
        pass


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return "--prompts", str(file)


def verify(*args: str) -> int:
    try:
        cli.main(["verify", *args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_phases_over_http(
    engine: LocalEngine,
    api: str,
    prompts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "baseline.json"
    with serving(engine, apis=(api,)) as server:
        assert verify("baseline", "--url", server.url, "--file", str(file), *prompts, *QUICK) == 0
    assert f"3 prompts answered by {server.url} ({api})" in capsys.readouterr().out
    entries = json.loads(file.read_text())["entries"]
    assert [e["prompt"] for e in entries] == PROMPTS
    assert all(e["cold"]["cached_tokens"] == 0 < e["warm"]["cached_tokens"] for e in entries)
    engine.flush()
    faulty = Faulty(engine)
    with serving(faulty, apis=(api,)) as server:
        asked = ("test", "--url", server.url, "--file", str(file), "--settle-s", "0")
        for reference in ("cold", "warm"):
            engine.flush()
            assert verify(*asked, "--baseline", reference) == 0
            out = capsys.readouterr().out
            assert out.rstrip().split("\n")[-1] == "Total mismatches: 0"
            assert "hit rate, cold: 0.0 %" in out
            rate = re.search(r"hit rate, after the flush: ([\d.]+) %", out)
            assert rate is not None and float(rate[1]) > 90
        engine.flush()
        faulty.flip = (7, 3)
        assert verify(*asked, "--explain") == 1
        out = capsys.readouterr().out
        assert "bytes differ: tokens equal; the first difference is in page 7 (tokens 112 to 127), layer 3" in out
        assert "first page that differs: page 7" in out
        assert out.rstrip().split("\n")[-1] == "Total mismatches: 3"


def test_near_ties_over_http(
    engine: LocalEngine,
    prompts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens part while bytes agree: a near-tie if the margin allows it, else unclassified; never silently dropped."""
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "baseline.json"
    engine.flush()
    with serving(engine) as server:
        assert verify("baseline", "--url", server.url, "--file", str(file), *prompts, *QUICK) == 0
    faulty = Faulty(engine)
    faulty.other_token_at = 2
    with serving(faulty) as server:
        asked = ("test", "--url", server.url, "--file", str(file), "--settle-s", "0")
        outcomes = []
        for more in (("--near-tie", "1000"), ("--near-tie", "1000", "--allow-near-ties"), ("--near-tie", "0")):
            engine.flush()
            capsys.readouterr()
            outcomes.append((verify(*asked, *more), capsys.readouterr().out))
        assert [status for status, _ in outcomes] == [1, 0, 1]
        assert "near-tie: token 2" in outcomes[0][1] and "top-2 margin" in outcomes[0][1]
        lines = outcomes[1][1].rstrip().split("\n")
        assert lines[-1] == "Total mismatches: 0" and sum(line.startswith("allowed: ") for line in lines) == 3
        assert "unclassified: token 2" in outcomes[2][1]
        engine.flush()
        faulty.hide_digests = True
        capsys.readouterr()
        assert verify(*asked, "--near-tie", "1000", "--allow-near-ties") == 1
        out = capsys.readouterr().out
        assert "unclassified" in out and "can't be had" in out and out.rstrip().endswith("Total mismatches: 3")


def test_a_run_without_hits_says_so(
    engine: LocalEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine.flush()
    with serving(engine) as server:
        file = ("--url", server.url, "--file", str(tmp_path / "b.json"))
        assert verify("baseline", *file, *QUICK, "--most-prompts", "1") == 0
        assert verify("test", *file, "--settle-s", "0") == 0
    assert "nothing came from the cache after the flush" in capsys.readouterr().out


def test_options_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = ("--url", "http://127.0.0.1:9")
    for args, said in (
        (("both", *url), "phase baseline"),
        (("baseline", *url), "expected --file"),
        (("test", *url, "--file", str(tmp_path / "no")), "--file"),
        (("baseline", *url, "--file", str(tmp_path / "no" / "x")), "folder that exists"),
        (("test", *url, "--file", "x", "--prompts", "y"), "--prompts"),
        (("baseline", *url, "--file", "x", "--random-weights"), "--random-weights"),
        (("baseline", *url, "--file", "x", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("baseline", *url, "--file", "x", "--flip-page", "0"), "--flip-page"),
        (("baseline", *url, "--file", "x", "--near-tie", "-1"), "--near-tie"),
        (("baseline", *url, "--file", "x", "--timeout-s", "0"), "--timeout-s"),
        (("baseline", *url, "--file", "x", "--settle-s", "nan"), "--settle-s"),
        (("baseline", *url, "--file", str(tmp_path)), "may be written"),
    ):
        assert verify(*args) in (1, 2)
        assert said in capsys.readouterr().err, args
    assert verify("baseline", *url, "--file", str(tmp_path / "x")) == 1
    assert "no answer" in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path) -> None:
    from kvtransfer.verify_file import Baseline, read_baseline, write_baseline

    file = tmp_path / "b.json"
    with pytest.raises(ConfigError, match="verify baseline"):
        read_baseline(file)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="verify baseline"):
        read_baseline(file)
    write_baseline(Baseline("x", 3, []), file)
    assert read_baseline(file) == Baseline("x", 3, [])
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="expected version 1, got 2"):
        read_baseline(file)
    with pytest.raises(ConfigError, match="could not be written"):
        write_baseline(Baseline("x", 3, []), tmp_path)


def test_a_baseline_of_nothing_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No prompts, no mismatches: that is no clean run."""
    from kvtransfer.verify_file import Baseline, write_baseline

    write_baseline(Baseline("x", 3, []), tmp_path / "b")
    for where in (("--url", "http://127.0.0.1:9"), ("--random-weights",)):
        assert verify("test", *where, "--file", str(tmp_path / "b")) == 2
        said = capsys.readouterr()
        assert "expected prompts" in said.err and "Total mismatches" not in said.out


@pytest.mark.parametrize("body", ['{"choices": []}', "{}", '{"object": "error", "message": "x"}', "<html>"])
def test_a_server_that_answers_nothing_is_no_clean_run(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two answers of nothing are equal."""
    answers: dict[str, Answer] = {"/v1/models": plain('{"data": [{"id": "m"}]}'), "/reset_prefix_cache": plain("{}")}
    with raw_server({**answers, "/v1/completions": plain(body)}) as server:
        assert verify("baseline", "--url", server.url, "--file", str(tmp_path / "b"), *QUICK) == 1
    assert "expected" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_fewer_prompts_of_a_file(
    engine: LocalEngine, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.flush()
    with serving(engine) as server:
        where = ("--url", server.url, "--file", str(tmp_path / "b"), "--settle-s", "0")
        assert verify("baseline", *where, *prompts, "--max-new-tokens", "2") == 0
        assert verify("test", *where, "--most-prompts", "1") == 0
    said = capsys.readouterr()
    assert "line 1" in said.out and "line 2" not in said.out and said.out.rstrip().endswith("Total mismatches: 0")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_last_line_comes_whatever_the_terminal_can_show(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are of all scripts; a mismatch that can't be printed must not take the verdict with it."""
    from kvtransfer.verify_file import Baseline, Entry, write_baseline

    raw, expected = io.BytesIO(), Completion(["\u6f22"], "\u6f22")
    write_baseline(Baseline("x", 3, [Entry("p", "hi", expected, expected)]), tmp_path / "b")
    got = '{"choices": [{"text": "\U0001f600", "logprobs": {"tokens": ["\U0001f600"]}}]}'
    answers: dict[str, Answer] = {"/v1/models": plain('{"data": [{"id": "m"}]}'), "/reset_prefix_cache": plain("{}")}
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    with raw_server({**answers, "/v1/completions": plain(got)}) as server:
        words = ("--url", server.url, "--file", str(tmp_path / "b"), "--explain", "--settle-s", "0")
        assert verify("test", *words) == 1
    sys.stdout.flush()
    out = raw.getvalue().decode(encoding)
    assert out.rstrip().endswith("Total mismatches: 2") and ("\u6f22" in out) == (encoding == "utf-8")


# --- prompts


def test_shipped_prompts_have_three_lengths_and_share_no_beginning() -> None:
    prompts = shipped_prompts()
    words = [len(str(p.prompt).split()) for p in prompts]
    assert [p.name for p in prompts] == [f"{kind}-{i}" for kind in ("short", "medium", "long") for i in (1, 2, 3)]
    assert max(words[:3]) < 100 and 250 < min(words[3:6]) <= max(words[3:6]) < 400 and min(words[6:]) > 1000
    assert len({str(p.prompt)[:16] for p in prompts}) == 9


def test_prompts_of_files(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text('{"prompt": "one", "other": 1}\n\n{"prompt": [1, 2]}\n')
    assert [p.prompt for p in read_prompts(file)] == ["one", [1, 2]]
    assert len(read_prompts(file, 1)) == 1
    turns = [{"from": who, "value": text} for who, text in (("human", "hi"), ("gpt", "hello"), ("human", "more"))]
    file.write_text(json.dumps([{"id": "x", "conversations": turns}, {"conversations": []}]))
    first, second = (str(p.prompt) for p in read_prompts(file))
    assert (first, second) == ("hi\n", "hi\nhello\nmore\n") and second.startswith(first)
    for bad, said in (("", "at least one"), ('{"prompt": 3}', "line 1"), ("[3]", "ShareGPT"), ("nonsense", "line 1")):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=said):
            read_prompts(file)
    with pytest.raises(ConfigError, match="readable file"):
        read_prompts(tmp_path / "none")


def test_prompts_of_files_as_other_programs_write_them(tmp_path: Path) -> None:
    """A byte-order mark, carriage returns, a conversation a line, roles and turns that say nothing."""
    file = tmp_path / "p"
    hi = b'{"conversations": [{"from": "human", "value": "hi"}]}'
    for written, expected in (
        (b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}', ["one", "two"]),
        (b"\xef\xbb\xbf[" + hi + b"]", ["hi\n"]),
        (hi + b"\n" + hi + b"\n", ["hi\n", "hi\n"]),
        (b'{"prompt": "one"}\n{"prompt": "one"}\n', ["one", "one"]),
        (b'{"prompt": ""}\n{"prompt": []}\n{"prompt": "\xc3\xa9"}', ["\xe9"]),
    ):
        file.write_bytes(written)
        found = read_prompts(file)
        assert [p.prompt for p in found] == expected and len({p.name for p in found}) == len(found)
    turns = [
        {"from": who, "value": text} for who, text in (("system", "be"), ("human", " "), ("user", "x"), ("?", "y"))
    ]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": []}, {"id": 3}]))
    assert [p.prompt for p in read_prompts(file)] == ["be\n \nx\n"]
    for bad in (b'{"prompt": "\xff"}', b'{"prompt": "\\ud83d"}', b"\xff\xfe{\x00", b'{"prompt": null}', b"[" * 100_000):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match="expected"):
            read_prompts(file)


# --- a local model


def local(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    status = verify(*args, "--random-weights", "--device", "cpu", "--max-new-tokens", "4")
    return status, capsys.readouterr().out.rstrip().split("\n")


def host_only(folder: Path) -> tuple[str, str]:
    file = folder / "kvtransfer.yaml"
    file.write_text("tiers: {host: {pages: 200}}\n")
    return "--config", str(file)


@pytest.mark.parametrize("reference", ["cold", "warm"])
def test_a_local_model(
    prompts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, lines = local(capsys, "both", *prompts, *host_only(tmp_path), "--baseline", reference)
    assert (status, lines[-1]) == (0, "Total mismatches: 0"), lines
    assert any(line.startswith("hit rate, after the flush: 9") for line in lines), lines
    assert sum("│ compared" in line for line in lines) == 6


def test_one_flipped_bit_of_a_local_model(
    prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one byte, after the load was verified: tokens need not change, the page is named all the same."""
    monkeypatch.setenv("COLUMNS", "200")
    status, lines = local(capsys, "both", *prompts, *host_only(tmp_path), "--flip-page", "3", "--explain")
    assert (status, lines[-1]) == (1, "Total mismatches: 3"), lines
    named = [line for line in lines if "first page that differs: page 3 (tokens 48 to 63), layer 3" in line]
    assert len(named) == 3 and all("1 of" in line for line in named), lines


def test_a_bit_flipped_in_host_memory_is_found_by_the_cache_itself(
    prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed again: nothing differs, and the count of given-up forwards tells."""
    from kvtransfer.integrations.prefix_cache import PrefixCache
    from kvtransfer.mover import Mover

    monkeypatch.setenv("COLUMNS", "200")
    real = PrefixCache.flush

    def flush_and_damage(self: PrefixCache) -> None:
        real(self)
        assert isinstance(self.tiers.mover, Mover)
        self.tiers.mover.host.payload[77] ^= 1

    monkeypatch.setattr(PrefixCache, "flush", flush_and_damage)
    status, lines = local(capsys, "both", *prompts, *host_only(tmp_path))
    assert (status, lines[-1]) == (0, "Total mismatches: 0"), lines
    assert not any("done again because a page failed: 0" in line for line in lines), lines


def test_phases_of_a_local_model_in_two_processes(
    prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = ("--file", str(tmp_path / "b.json"))
    status, lines = local(capsys, "baseline", *prompts, *file)
    assert status == 0 and "3 prompts answered by random weights" in lines[-1]
    monkeypatch.delenv("KVTRANSFER_CONFIG", raising=False)
    status, lines = local(capsys, "test", *file)  # as much host memory as these prompts need
    assert (status, lines[-1]) == (0, "Total mismatches: 0"), lines
    assert any(line.startswith("hit rate, after the flush: 9") for line in lines), lines
