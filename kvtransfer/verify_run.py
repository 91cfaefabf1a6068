"""`kvtransfer verify` from its options to its report: servers, local models, and the phases that are asked for."""

from __future__ import annotations

import msgspec
from rich.console import Console

from kvtransfer.completion import Completion, Prompt
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.prompts import NamedPrompt, read_prompts, shipped_prompts
from kvtransfer.server_client import ServerClient
from kvtransfer.verify import Report, Target, record, replay
from kvtransfer.verify_file import Baseline, read_baseline, write_baseline
from kvtransfer.verify_options import VerifyOptions


class ServerTarget:
    """A server behind a URL."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.name = f"{client.url} ({client.api})"

    def complete(self, prompt: Prompt, max_new_tokens: int) -> Completion:
        return self._client.complete(prompt, max_new_tokens, tops=True, digests=True)

    def flush(self) -> None:
        self._client.flush()

    def counts(self) -> list[str]:
        info = self._client.info()
        return [f"{name}: {value}" for name, value in info.items()] if info else []


def run_verify(options: VerifyOptions, console: Console) -> Report | Baseline:
    """The phases that ``options`` ask for; ``console`` gets progress lines. Raises ConfigError on options that can't
    work, ServerError where a server fails."""
    options.check()
    known = _known(options) if options.phase == "test" else None
    prompts = _prompts(options) if known is None else [NamedPrompt(e.name, e.prompt) for e in known.entries]
    if options.url is not None:
        client = ServerClient(
            options.url,
            api=options.api,
            model=options.model,
            flush_path=options.flush_path,
            timeout_s=options.timeout_s,
            api_key=options.api_key,
        )
        target = ServerTarget(client)
        return _record(target, prompts, options, console) if known is None else _replay(target, known, options, console)
    from kvtransfer.verify_local import LocalModel  # noqa: PLC0415  (transformers, which servers do without)

    model = LocalModel(options, console)
    if known is None:
        with model.alone() as local:
            known = _record(local, prompts, options, console)
        if options.phase == "baseline":
            return known
    with model.with_us(model.lengths(prompts)) as local:
        return _replay(local, known, options, console)


def _prompts(options: VerifyOptions) -> list[NamedPrompt]:
    if options.prompts is not None:
        return read_prompts(options.prompts, options.most_prompts)
    return shipped_prompts()[: options.most_prompts]


def _record(target: Target, prompts: list[NamedPrompt], options: VerifyOptions, console: Console) -> Baseline:
    baseline = record(target, prompts, options.max_new_tokens, console.print)
    if options.file is not None:
        write_baseline(baseline, options.file)
    return baseline


def _known(options: VerifyOptions) -> Baseline:
    assert options.file is not None  # checked
    known = read_baseline(options.file)
    if not known.entries or known.max_new_tokens < 1:
        raise ConfigError(f"--file {options.file}: expected prompts and answers of at least one token, got none")
    return msgspec.structs.replace(known, entries=known.entries[: options.most_prompts])


def _replay(target: Target, baseline: Baseline, options: VerifyOptions, console: Console) -> Report:
    return replay(
        target,
        baseline,
        console.print,
        reference=options.reference,
        allow_near_ties=options.allow_near_ties,
        near_tie=options.near_tie,
        settle_s=options.settle_s if options.url is not None else 0.0,
    )
