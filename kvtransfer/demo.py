"""`kvtransfer demo`: a model's KV cache leaves the pool for pinned host memory and comes back inside the forward pass.

Cold: the prefix is computed into the pool, and the model goes on from there. Warm: the pool is cleared, the prefix
is loaded layer by layer while the forward over the rest of the prompt runs. Both must give the same tokens and the
same KV bytes. Cold is the reference because it splits the prompt at the same place and never leaves the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvtransfer.demo_model import QUESTION, LoadedModel, load_model, pick_device, read_prompt
from kvtransfer.demo_report import DemoResult
from kvtransfer.engine import TransferEngine
from kvtransfer.handles import TransferHandle, TransferResult
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

if TYPE_CHECKING:  # transformers takes seconds to import: after the options were checked
    from kvtransfer.integrations.transformers import PagedCache

CPU_PREFIX_TOKENS = 4096
POISON = 0xFF  # all ones: a NaN in every float format
LINK_COPY_BYTES = 256 << 20
MIN_PREFIX_TOKENS = 2

States = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class DemoOptions:
    """What the command line can set. ``prefix_tokens``: at most this many tokens of the text are reused."""

    model: str | None = None
    random_weights: bool = False
    prompt_file: Path | None = None
    max_new_tokens: int = 32
    page_size: int = 16
    prefix_tokens: int | None = None
    device: str = "auto"
    json_file: Path | None = None


@dataclass(frozen=True)
class Run:
    """One generate: new tokens, KV bytes of every layer, seconds until the first new token was on the host."""

    tokens: list[int]
    states: States
    first_token_s: float


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """The whole demo; ``console`` gets progress lines. Raises ConfigError on options that can't work."""
    _check(options)
    device = pick_device(options.device)
    text = read_prompt(options.prompt_file)
    loaded = load_model(options.model, options.random_weights, device, console)
    prefix, rest = _tokens(loaded, text, options, device)
    with torch.no_grad(), repeatable_attention(device):
        return _Demo(loaded, prefix, rest, options, device, console).run()


class _Demo:
    def __init__(
        self,
        loaded: LoadedModel,
        prefix: list[int],
        rest: list[int],
        options: DemoOptions,
        device: torch.device,
        console: Console,
    ) -> None:
        from kvtransfer.integrations.transformers import cache_keyword, pool_for  # noqa: PLC0415

        self.loaded, self.model, self.device, self.options = loaded, loaded.model, device, options
        self.say = console.print
        self.prefix_tokens = len(prefix)
        self.ids = torch.tensor([prefix + rest], device=device)
        self.keyword = cache_keyword(self.model)
        self.random = np.random.default_rng(0)
        pages = -(-(self.ids.shape[1] + options.max_new_tokens) // options.page_size)
        self.pool: KVPool = pool_for(self.model, pages, options.page_size, device)

    def run(self) -> DemoResult:
        pages = -(-self.prefix_tokens // self.options.page_size)
        with HostTier(self.pool.spec, capacity_pages=pages, device=self.device) as host:
            slots = host.allocate(pages)
            with TransferEngine(self.pool, host) as engine:
                return self._run(engine, slots)

    def _run(self, engine: TransferEngine, slots: np.ndarray[Any, np.dtype[np.int64]]) -> DemoResult:
        self._warm_up()
        self.say(f"cold: computing {self.prefix_tokens:,} tokens, then the rest of the prompt")
        cache = self._new_cache()
        prefill_s = self._timed(lambda: self._prefill(cache, self.ids[:, : self.prefix_tokens]))
        if self.device.type == "cuda":  # the first one also builds what the path needs
            cache.store(engine, slots).result()
        store = cache.store(engine, slots).result()
        cold = self._generate(cache, self.ids, tokens=self.options.max_new_tokens)
        cache.release()

        self._clear_pool()
        alone = self._load_alone(engine, slots)
        self._clear_pool()
        self.say("warm: loading the prefix layer by layer while the forward over the rest runs")
        cache = self._new_cache()
        handle: list[TransferHandle | None] = []
        warm = self._generate(
            cache,
            self.ids,
            tokens=self.options.max_new_tokens,
            before=lambda: handle.append(
                cache.load(engine, slots, tokens=self.prefix_tokens, prompt_tokens=self.ids.shape[1])
            ),
        )
        load = handle[0]
        if load is None:
            raise ConfigError(f"expected a prefix of at least {MIN_PREFIX_TOKENS} tokens, got {self.prefix_tokens}")
        loaded = load.result()
        cache.release()
        difference = _difference(cold, warm)
        return DemoResult(
            identical=not difference,
            model=self.loaded.name,
            tokens_reused=self.prefix_tokens,
            bytes=loaded.total_bytes,
            path=loaded.path,
            gbps=loaded.gbps,
            ttft_cold_s=prefill_s + cold.first_token_s,
            ttft_warm_s=warm.first_token_s,
            why=load.plan.explain(),
            difference=difference,
            gbps_alone=alone.gbps,
            store_gbps=store.gbps,
            link_gbps=link_gbps(self.device, loaded.total_bytes),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            prompt_tokens=self.ids.shape[1],
            answer=self.loaded.decode(warm.tokens).strip(),
        )

    def _new_cache(self) -> PagedCache:
        """A cache over pages in random order, as in a pool that was long in use."""
        from kvtransfer.integrations.transformers import PagedCache  # noqa: PLC0415

        return PagedCache(self.model, self.pool, self.random.permutation(self.pool.allocate_pages(self.pool.num_pages)))

    def _prefill(self, cache: PagedCache, ids: torch.Tensor) -> None:
        """Fill the cache; the model's head is left out, since nobody asks for these tokens' successors."""
        self.model.base_model(input_ids=ids, use_cache=True, **{self.keyword: cache})

    def _generate(
        self, cache: PagedCache, ids: torch.Tensor, *, tokens: int, before: Callable[[], None] | None = None
    ) -> Run:
        clock = _FirstToken()
        start = time.perf_counter()
        if before is not None:
            before()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            **{self.keyword: cache},
        )
        states = [cache.states(layer) for layer in range(len(cache.paged))]
        return Run(out[0, ids.shape[1] :].tolist(), states, clock.at(1) - start)

    def _warm_up(self) -> None:
        """One small generate, so that neither first token pays for what a process does once."""
        cache = self._new_cache()
        self._generate(cache, self.ids[:, :64], tokens=2)
        cache.release()

    def _load_alone(self, engine: TransferEngine, slots: np.ndarray[Any, np.dtype[np.int64]]) -> TransferResult:
        """The same load without a forward beside it; on a GPU the second of two, as with the store."""
        pages = self.random.permutation(self.pool.allocate_pages(len(slots)))
        if self.device.type == "cuda":
            engine.load(slots, pages, layerwise=True).result()
        result = engine.load(slots, pages, layerwise=True).result()
        self.pool.free_pages(pages)
        return result

    def _clear_pool(self) -> None:
        for buffer in self.pool.buffers:
            buffer.fill_(POISON)

    def _timed(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def repeatable_attention(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU, attention kernels that give the same bits each time.

    cuDNN's did not: of five runs of one prompt that never left the pool, four differed in a few bytes (H200, torch
    2.11, bf16, decoding over 3,000 tokens); flash, memory-efficient and plain attention gave the same bytes in all.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class _FirstToken:
    """A streamer for `generate` that notes when each token reached the host; the first call brings the prompt."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""

    def at(self, token: int) -> float:
        """When new token number ``token`` (from 1) was there."""
        return self._times[token]


def link_gbps(device: torch.device, total_bytes: int) -> float:
    """GB/s of one large copy towards the pool, the best of three: pinned host to GPU, or a plain copy on a CPU."""
    gpu = device.type == "cuda"
    size = max(total_bytes, LINK_COPY_BYTES) if gpu else total_bytes
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=gpu)
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9


def _difference(cold: Run, warm: Run) -> str:
    """What differs first, or nothing."""
    if cold.tokens != warm.tokens:
        at = next(
            (i for i, (a, b) in enumerate(zip(cold.tokens, warm.tokens, strict=False)) if a != b),
            min(len(cold.tokens), len(warm.tokens)),
        )
        return f"new token {at}: cold {cold.tokens[at : at + 3]}, warm {warm.tokens[at : at + 3]}"
    for layer, (one, other) in enumerate(zip(cold.states, warm.states, strict=True)):
        for name, a, b in zip("kv", one, other, strict=True):
            if a.shape != b.shape:
                return f"layer {layer} {name}: {tuple(a.shape)} cold, {tuple(b.shape)} warm"
            wrong = (a != b).nonzero()
            if wrong.numel():
                _, head, token, byte = wrong[0].tolist()
                return f"layer {layer} {name}: {len(wrong):,} bytes, first at token {token}, head {head}, byte {byte}"
    return ""


def _check(options: DemoOptions) -> None:
    for name, value, least in (
        ("--max-new-tokens", options.max_new_tokens, 1),
        ("--page-size", options.page_size, 1),
        ("--prefix-tokens", options.prefix_tokens, MIN_PREFIX_TOKENS),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json_file}: expected a file in a folder that exists")


def _tokens(loaded: LoadedModel, text: str, options: DemoOptions, device: torch.device) -> tuple[list[int], list[int]]:
    """The prefix to reuse and the rest of the prompt."""
    rest = loaded.encode(QUESTION)
    limit = CPU_PREFIX_TOKENS if device.type == "cpu" else None
    longest = int(loaded.model.config.get_text_config(decoder=True).max_position_embeddings)
    room = longest - len(rest) - options.max_new_tokens
    if room < MIN_PREFIX_TOKENS:
        raise ConfigError(f"--max-new-tokens: expected few enough for a model of {longest} tokens")
    bounds = [b for b in (options.prefix_tokens, limit, room) if b is not None]
    prefix = loaded.encode(text)[: min(bounds)]
    if len(prefix) < MIN_PREFIX_TOKENS:
        raise ConfigError(f"prompt: expected at least {MIN_PREFIX_TOKENS} tokens of text, got {len(prefix)}")
    return prefix, rest
