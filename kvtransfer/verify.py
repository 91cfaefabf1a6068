"""`kvtransfer verify`: does a model answer the same, token by token, when its KV cache went through us?

Phase ``baseline`` records what a server, or a local model, answers without us: each prompt cold, and again at once out
of the engine's own prefix cache. Phase ``test`` asks the same prompts of one with us: cold, so that their KV is
stored, and again after the engine's own cache was emptied, so that it comes back from us. Decoding is greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvtransfer.completion import Completion, KVDigests, Prompt
from kvtransfer.prompts import NamedPrompt
from kvtransfer.verify_compare import NEAR_TIE, Kind, Mismatch, compare
from kvtransfer.verify_file import Baseline, Entry

Reference = Literal["cold", "warm"]
COLD, FLUSHED = "cold", "after the flush"
Say = Callable[[str], None]


class Target(Protocol):
    """What is asked: a server, or a local model."""

    name: str

    def complete(self, prompt: Prompt, max_new_tokens: int) -> Completion:
        """A greedy answer, with the two best tokens at each place and digests of the KV where they can be had."""

    def flush(self) -> None:
        """Wait for stores, then empty the engine's own prefix cache; what was stored below stays."""

    def counts(self) -> list[str]:
        """What the cache says about itself, a line each."""


@dataclass(frozen=True)
class Request:
    """One answer of the test phase beside what was expected."""

    prompt: str
    run: str
    expected: Completion
    got: Completion
    mismatch: Mismatch | None


@dataclass(frozen=True)
class Report:
    """All requests of the test phase. ``allow_near_ties``: those are shown, and not counted. ``reference``: which
    answers of the baseline those after the flush were compared with; cold ones are always compared with cold ones."""

    target: str
    requests: list[Request]
    allow_near_ties: bool = False
    counts: list[str] = field(default_factory=list)
    reference: Reference = "cold"

    @property
    def mismatches(self) -> list[Mismatch]:
        """Those that count."""
        return [m for m in self._all if not (self.allow_near_ties and m.kind is Kind.NEAR_TIE)]

    @property
    def allowed(self) -> list[Mismatch]:
        """Near-ties that do not count."""
        return [m for m in self._all if self.allow_near_ties and m.kind is Kind.NEAR_TIE]

    @property
    def _all(self) -> list[Mismatch]:
        return [r.mismatch for r in self.requests if r.mismatch is not None]

    def hits(self, run: str) -> tuple[int, int] | None:
        """(cached, prompt) tokens of a run; None where the server does not say."""
        return _hits([r.got for r in self.requests if r.run == run])

    @property
    def baseline_hits(self) -> tuple[int, int] | None:
        """The same of the baseline's cold answers."""
        return _hits([r.expected for r in self.requests if r.run == COLD])


def _hits(answers: Sequence[Completion]) -> tuple[int, int] | None:
    told = [(answer.cached_tokens, answer.prompt_tokens) for answer in answers]
    if not told or any(cached is None or tokens is None for cached, tokens in told):
        return None
    return sum(c or 0 for c, _ in told), sum(t or 0 for _, t in told)


def record(target: Target, prompts: Sequence[NamedPrompt], max_new_tokens: int, say: Say) -> Baseline:
    """Phase ``baseline``."""
    entries = []
    for number, prompt in enumerate(prompts, 1):
        say(f"baseline: {prompt.name} ({number} of {len(prompts)})")
        target.flush()
        cold = target.complete(prompt.prompt, max_new_tokens)
        entries.append(Entry(prompt.name, prompt.prompt, cold, target.complete(prompt.prompt, max_new_tokens)))
    return Baseline(target.name, max_new_tokens, entries)


def replay(
    target: Target,
    baseline: Baseline,
    say: Say,
    *,
    reference: Reference = "cold",
    allow_near_ties: bool = False,
    near_tie: float = NEAR_TIE,
    settle_s: float = 0.0,
) -> Report:
    """Phase ``test``. ``reference``: which answer of the baseline those after the flush are compared with.
    ``settle_s``: seconds that a server is given to end its stores before its cache is emptied."""
    requests = []
    cold: list[Completion] = []
    for number, entry in enumerate(baseline.entries, 1):
        say(f"test, cold: {entry.name} ({number} of {len(baseline.entries)})")
        target.flush()
        got = target.complete(entry.prompt, baseline.max_new_tokens)
        cold.append(got)
        # Pages of a prompt that was cut elsewhere were summed up in another order: they can't be compared.
        alike = (got.cached_tokens or 0) == (entry.cold.cached_tokens or 0)
        wrong = compare(
            entry.name,
            COLD,
            entry.cold,
            got,
            bytes_of=entry.cold.digests if alike else None,
            pages=_pages(got.digests, None),
            near_tie=near_tie,
        )
        requests.append(Request(entry.name, COLD, entry.cold, got, wrong))
    time.sleep(settle_s)
    target.flush()
    for number, (entry, stored) in enumerate(zip(baseline.entries, cold, strict=True), 1):
        say(f"test, {FLUSHED}: {entry.name} ({number} of {len(baseline.entries)})")
        got = target.complete(entry.prompt, baseline.max_new_tokens)
        expected = entry.cold if reference == "cold" else entry.warm
        wrong = compare(
            entry.name,
            FLUSHED,
            expected,
            got,
            bytes_of=stored.digests,
            pages=_pages(got.digests, got.cached_tokens),
            near_tie=near_tie,
        )
        requests.append(Request(entry.name, FLUSHED, expected, got, wrong))
    return Report(target.name, requests, allow_near_ties, target.counts(), reference)


def _pages(digests: KVDigests | None, cached_tokens: int | None) -> int:
    """Pages whose bytes must be equal: all of the prompt's, or those that were loaded. At least one is asked for where
    there are no digests, so that nothing passes for known that isn't."""
    if digests is None:
        return 1
    return len(digests.pages) if cached_tokens is None else cached_tokens // digests.page_size
