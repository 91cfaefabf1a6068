"""What `kvtransfer verify` prints."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtransfer.verify import COLD, FLUSHED, Report, Request
from kvtransfer.verify_compare import Mismatch

_NOT_TOLD = "unknown: the server does not say (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"


def print_report(report: Report, console: Console, *, explain: bool = False) -> None:
    """A table, hit rates, what differs; the last line is the number of mismatches."""
    table = Table(title=f"kvtransfer verify: {escape(report.target)}", title_justify="left")
    for column in ("prompt", "run"):
        table.add_column(column, no_wrap=True)
    for column in ("prompt tokens", "cached", "new tokens"):
        table.add_column(column, justify="right")
    table.add_column("bytes")
    table.add_column("result")
    for request in report.requests:
        got = request.got
        counts = [_count(got.prompt_tokens), _count(got.cached_tokens), _count(len(got.tokens) or None)]
        known = "compared" if request.expected.digests is not None and got.digests is not None else "not known"
        result = "same" if request.mismatch is None else request.mismatch.kind.value
        table.add_row(escape(request.prompt), request.run, *counts, known, result)
    console.print(table)
    console.print(
        f"{COLD}: compared with the baseline's cold answers; {FLUSHED}: with its {report.reference} ones",
        markup=False,
        soft_wrap=True,
    )
    for run in (COLD, FLUSHED):
        console.print(f"hit rate, {run}: {_rate(report.hits(run))}", markup=False)
    for whose, hits in (("the baseline's", report.baseline_hits), ("the test's", report.hits(COLD))):
        if hits is not None and hits[0]:
            console.print(_not_cold(whose, hits), markup=False, soft_wrap=True)
    for line in report.counts:
        console.print(line, markup=False)
    hits = report.hits(FLUSHED)
    if hits is not None and not hits[0]:
        console.print("nothing came from the cache after the flush: this run says nothing about it", markup=False)
    for mismatch in report.allowed:
        console.print(f"allowed: {mismatch}", markup=False, soft_wrap=True)
    for mismatch in report.mismatches:
        console.print(f"mismatch: {mismatch}", markup=False, soft_wrap=True)
    if explain:
        for request in report.requests:
            if request.mismatch is not None:
                console.print(_explained(request, request.mismatch), markup=False, soft_wrap=True)
    console.print(f"Total mismatches: {len(report.mismatches)}", markup=False)


def _explained(request: Request, mismatch: Mismatch) -> str:
    lines = [f"{request.prompt}, {request.run}:"]
    if mismatch.page is not None:
        lines.append(f"  first page that differs: {mismatch.page}")
    else:
        lines.append(f"  no page is known to differ: {mismatch.why}")
    if mismatch.position is not None:
        at = mismatch.position
        for name, answer in (("expected", request.expected), ("got", request.got)):
            around = answer.tokens[max(0, at - 3) : at + 3]
            best = ", ".join(f"{token!r} {logprob:.4f}" for token, logprob in (answer.tops[at : at + 1] or [[]])[0])
            lines.append(f"  {name} from token {max(0, at - 3)}: {around}; best at {at}: {best or 'unknown'}")
    return "\n".join(lines)


def _not_cold(whose: str, hits: tuple[int, int]) -> str:
    """The engine's own cache was empty: another one had it, whose faults are in those answers too."""
    return (
        f"{whose} cold answers were not all cold: {_rate(hits)} came from a cache that outlives the flush, where an "
        "earlier run, or a prompt that begins alike, had left them"
    )


def _rate(hits: tuple[int, int] | None) -> str:
    if hits is None:
        return _NOT_TOLD
    cached, tokens = hits
    return f"{100 * cached / max(tokens, 1):.1f} % ({cached:,} of {tokens:,} prompt tokens)"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
