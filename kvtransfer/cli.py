"""The command line: `kvtransfer demo`, `verify`, `tune`, `info`, `timeline`, `tier`, `config`.

Exit status 1: outputs of the demo or of verify differ, a transfer or a server failed, fsck found something wrong, a key
could not be converted; 2: bad input.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtransfer import __version__
from kvtransfer.kernels.errors import CapacityError, ConfigError, KVTransferError, LayoutError

BAD_INPUT = (ConfigError, LayoutError, CapacityError)

app = typer.Typer(
    name="kvtransfer",
    help="Moves the KV cache of language models between GPU memory, pinned host memory and storage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
timeline_app = typer.Typer(help="Read what `engine.timeline` or KVTRANSFER_TIMELINE recorded.", no_args_is_help=True)
app.add_typer(timeline_app, name="timeline")
tier_app = typer.Typer(help="Look into the files of a disk tier.", no_args_is_help=True)
app.add_typer(tier_app, name="tier")
config_app = typer.Typer(help="Check a configuration, or convert another cache's.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. An error of kvtransfer is one line on stderr; a bug keeps its traceback.

    Mutates the standard output: what it can't encode is escaped (tokens are of all scripts), lest the rest never comes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=None if args is None else list(args))
    except KVTransferError as error:
        print(f"kvtransfer: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BAD_INPUT) else 1) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtransfer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or id for transformers; SmolLM2-135M unless given.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="A tiny random model; needs no file.")
    ] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to reuse; a document of the project unless given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    prefix_tokens: Annotated[
        int | None, typer.Option(help="Reuse at most this many tokens of the text (4,096 on a CPU).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file too.")] = None,
) -> None:
    """Take a real model's KV cache to host memory and back inside the forward pass, and compare every byte."""
    from rich.console import Console  # noqa: PLC0415  (torch and transformers take seconds)

    from kvtransfer.demo import DemoOptions, run_demo  # noqa: PLC0415
    from kvtransfer.demo_report import print_result, write_json  # noqa: PLC0415

    options = DemoOptions(
        model, random_weights, prompt_file, max_new_tokens, page_size, prefix_tokens, device, json_file
    )
    result = run_demo(options, Console(stderr=True, highlight=False))
    print_result(result, Console(highlight=False))
    if json_file is not None:
        write_json(result, json_file)
    if not result.identical:
        raise typer.Exit(1)


@app.command()
def verify(
    phase: Annotated[
        Literal["baseline", "test", "both"],
        typer.Argument(help="baseline: record answers without kvtransfer; test: compare; both: of a local model."),
    ] = "both",
    file: Annotated[Path | None, typer.Option(help="Where baseline's answers are kept for test.")] = None,
    url: Annotated[str | None, typer.Option(help="A server, http://host:port; a local model unless given.")] = None,
    api: Annotated[Literal["openai", "sglang"] | None, typer.Option(help="Found out unless given.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="With --url: sent as a bearer token.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As with demo; with --url the name that the server knows it by.")
    ] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="As with demo.")] = False,
    device: Annotated[str, typer.Option(help="Of a local model: auto, cpu, cuda or cuda:N.")] = "auto",
    page_size: Annotated[int, typer.Option(help="Of a local model: tokens a page.")] = 16,
    config: Annotated[
        Path | None, typer.Option(help="Of a local model: the cache's configuration, host memory only unless given.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL or ShareGPT; short, medium and long ones of the project unless given.")
    ] = None,
    most_prompts: Annotated[int | None, typer.Option(help="At most this many of them.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 32,
    baseline: Annotated[
        Literal["cold", "warm"],
        typer.Option(help="Compare with the cold answers, or with those out of the engine's own prefix cache."),
    ] = "cold",
    allow_near_ties: Annotated[
        bool, typer.Option("--allow-near-ties", help="Show tokens that part at a near-tie, and don't count them.")
    ] = False,
    near_tie: Annotated[float, typer.Option(help="Log probability between the two best tokens, at most.")] = 0.25,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which page differed first, and what was near.")
    ] = False,
    settle_s: Annotated[float, typer.Option("--settle-s", help="Seconds a server gets to end its stores.")] = 1.0,
    flush_path: Annotated[str | None, typer.Option(help="Request that empties a server's own prefix cache.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Of a wait for a server.")] = 600.0,
    flip_page: Annotated[
        int | None, typer.Option(help="Flip one bit of this page after each load: verify must notice.")
    ] = None,
) -> None:
    """Compare, token by token, what a model answers with its KV cache out of kvtransfer and without."""
    from rich.console import Console  # noqa: PLC0415

    from kvtransfer.verify import Report  # noqa: PLC0415
    from kvtransfer.verify_options import VerifyOptions  # noqa: PLC0415
    from kvtransfer.verify_report import print_report  # noqa: PLC0415
    from kvtransfer.verify_run import run_verify  # noqa: PLC0415

    options = VerifyOptions(
        phase=phase,
        file=file,
        url=url,
        api=api,
        model=model,
        random_weights=random_weights,
        device=device,
        page_size=page_size,
        config=config,
        prompts=prompts,
        most_prompts=most_prompts,
        max_new_tokens=max_new_tokens,
        reference=baseline,
        allow_near_ties=allow_near_ties,
        near_tie=near_tie,
        explain=explain,
        settle_s=settle_s,
        flush_path=flush_path,
        timeout_s=timeout_s,
        api_key=api_key or None,
        flip_page=flip_page,
    )
    result = run_verify(options, Console(stderr=True, highlight=False))
    if not isinstance(result, Report):
        print(f"written: {file}, {len(result.entries)} prompts answered by {result.target}")
        return
    print_report(result, Console(highlight=False), explain=explain)
    if result.mismatches:
        raise typer.Exit(1)


@app.command()
def tune(
    device: Annotated[int, typer.Option(help="Index of the GPU among the visible ones.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure the CPU backend instead.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG (needs matplotlib).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the profile to this file too.")] = None,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds to spend on measuring.")] = 60.0,
) -> None:
    """Measure the link of this machine, and keep the profile that plans choose their paths by."""
    if not 0 < budget_s < float("inf"):
        raise ConfigError(f"--budget-s: expected seconds above 0, got {budget_s}")
    for name, file in (("--plot", plot), ("--json", json_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{name} {file}: expected a file in a folder that exists")
    from kvtransfer.link_report import require_matplotlib, tune_link  # noqa: PLC0415  (torch takes seconds)

    if plot is not None:
        require_matplotlib()  # before a minute of measuring
    tune_link(None if cpu else device, budget_s, plot, json_file)


@app.command()
def info() -> None:
    """What this machine offers, and what would be slow on it and why. Works without a GPU."""
    from kvtransfer.info import machine_report  # noqa: PLC0415

    print(machine_report().text())


@timeline_app.command()
def summarize(
    file: Annotated[Path, typer.Argument(help="The trace.")],
    link_gbps: Annotated[
        float | None, typer.Option(help="GB/s that the link can do one way, in place of what the trace says.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page that draws the trace.", metavar="FILE")] = None,
) -> None:
    """Exposed wait a layer, overlap of copies and compute, achieved share of the link."""
    from rich.console import Console  # noqa: PLC0415

    from kvtransfer.timeline_report import print_summary, read_trace, summarize, write_page  # noqa: PLC0415

    trace = read_trace(file)
    summary = summarize(trace, link_gbps)
    print_summary(summary, Console(highlight=False))
    if html is not None:
        write_page(trace, summary, html)
        print(f"written: {html}")


_TierPaths = Annotated[
    str, typer.Argument(metavar="DIR", help="Paths as configured, with ; between several, or a folder below one.")
]


@tier_app.command()
def inspect(paths: _TierPaths) -> None:
    """What each process's folder holds, who owns it, and how full it is. Changes nothing; tiers may be in use."""
    from kvtransfer.tier_tools import describe, find_tiers, inspect_tier  # noqa: PLC0415  (torch takes seconds)

    print("\n\n".join(describe(inspect_tier(folders)) for folders in find_tiers(paths)))


@tier_app.command()
def fsck(
    paths: _TierPaths,
    repair: Annotated[bool, typer.Option("--repair", help="Take what is wrong out of the journal.")] = False,
) -> None:
    """Read and verify every record, journal and snapshot. Status 1 if something is wrong and was not repaired."""
    from kvtransfer.tier_tools import check_tier, describe_check, find_tiers  # noqa: PLC0415  (torch takes seconds)

    reports = [check_tier(folders, repair=repair) for folders in find_tiers(paths)]
    print("\n\n".join(describe_check(report) for report in reports))
    if not all(report.clean or report.repaired for report in reports):
        raise typer.Exit(1)


@config_app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="YAML, TOML or JSON; without one what the environment says.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model, for the pages that fit each tier.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of k and of v, of all ranks.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head.")] = None,
    latent_dim: Annotated[int | None, typer.Option(help="Elements of a latent (MLA), in place of heads.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="Of the KV cache, in place of kv_dtype.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks of this machine that share the heads.")] = 1,
    device_pages: Annotated[int | None, typer.Option(help="Pages of a rank's device pool, for a host ratio.")] = None,
) -> None:
    """Print the resolved configuration with where each value came from, and the pages that its sizes hold."""
    from kvtransfer.config_tools import Geometry, check_file  # noqa: PLC0415

    check_file(file, Geometry(layers, kv_heads, head_dim, latent_dim, page_size, dtype, tp, device_pages))


@config_app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="FlexKV's configuration, YAML or JSON.")],
    ranks: Annotated[int, typer.Option(help="Ranks of a machine, which share cpu_cache_gb.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write to this new file, not to the screen.")] = None,
) -> None:
    """Say FlexKV's configuration in our terms. Status 1 if a key asks for what kvtransfer does not do."""
    from kvtransfer.config_tools import convert_file  # noqa: PLC0415

    if not convert_file(file, ranks, output):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
