"""Requests to an inference server at a rate or a concurrency, and what their times say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvtransfer.kernels.errors import ServerError
from kvtransfer.prompts import NamedPrompt
from kvtransfer.server_client import ServerClient


@dataclass(frozen=True)
class Shot:
    """One request. Times in seconds, from when it was due: waiting for a free place of ``concurrency`` counts.

    prompt_tokens  None where the server does not say; likewise ``cached_tokens``
    output_tokens  pieces that brought text where the server does not say
    error          why there is no answer; the figures then say nothing
    """

    name: str
    first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Figures:
    """Of the requests that were answered; ``wall_s`` is from the first that was due to the last answer.

    Times are None where none was answered, tokens also where the server does not say them for each.
    """

    requests: int
    failed: int
    wall_s: float
    ttft_avg_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens: int | None
    cached_tokens: int | None


def drive(
    client: ServerClient,
    prompts: Sequence[NamedPrompt],
    *,
    max_new_tokens: int,
    concurrency: int,
    qps: float | None = None,
    seed: int = 0,
    ignore_eos: bool = True,
) -> tuple[list[Shot], float]:
    """Send all prompts, streamed; the shots in their order, and the seconds from the first to the last.

    At most ``concurrency`` at a time. ``qps``: they are due at random moments, so many a second (Poisson); None: each
    as soon as there is a place. An exception, an interrupt for one, breaks off those under way.
    """
    gaps = np.random.default_rng(seed).exponential(1 / qps, len(prompts)) if qps is not None else np.zeros(len(prompts))
    due = np.cumsum(gaps) - gaps[:1].sum()  # the first one at once
    started = time.perf_counter()

    def send(prompt: NamedPrompt, due_s: float) -> Shot:
        sent_s = time.perf_counter() - started
        late_s = sent_s - due_s if qps is not None else 0.0
        try:
            done = client.complete(prompt.prompt, max_new_tokens, stream=True, ignore_eos=ignore_eos)
        except ServerError as error:
            return Shot(prompt.name, error=str(error))
        return Shot(
            prompt.name,
            late_s + done.first_token_s,
            late_s + done.total_s,
            done.prompt_tokens,
            done.cached_tokens,
            done.output_tokens,
        )

    with ThreadPoolExecutor(concurrency, thread_name_prefix="request") as threads:
        pending = []
        try:
            for prompt, due_s in zip(prompts, due.tolist(), strict=True):
                time.sleep(max(0.0, started + due_s - time.perf_counter()))
                pending.append(threads.submit(send, prompt, due_s))
            shots = [future.result() for future in pending]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            client.abort()
            raise
    return shots, time.perf_counter() - started


def figures(shots: Sequence[Shot], wall_s: float) -> Figures:
    """What the shots come to; percentiles are interpolated."""
    good = [shot for shot in shots if shot.error is None]
    first = [shot.first_token_s for shot in good]
    p50, p90, p99 = np.percentile(first, [50, 90, 99]).tolist() if good else (None, None, None)
    return Figures(
        requests=len(shots),
        failed=len(shots) - len(good),
        wall_s=wall_s,
        ttft_avg_s=float(np.mean(first)) if good else None,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        e2e_p50_s=float(np.median([shot.total_s for shot in good])) if good else None,
        requests_per_s=len(good) / wall_s,
        output_tokens_per_s=sum(shot.output_tokens for shot in good) / wall_s,
        input_tokens=_sum([shot.prompt_tokens for shot in good]),
        cached_tokens=_sum([shot.cached_tokens for shot in good]),
    )


def _sum(told: Sequence[int | None]) -> int | None:
    """None where there is nothing, or one is not known."""
    known = [number for number in told if number is not None]
    return sum(known) if known and len(known) == len(told) else None
