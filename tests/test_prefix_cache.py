"""PrefixCache: tokens equal to the same computation without us: warm, after a restart, batched, with failing tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import until
from prefix_helpers import config, new_tokens_of, padded, plain, prompts_of
from tiny_models import FAMILIES, tiny_model

from kvtransfer.commands import Command, Store, ids
from kvtransfer.integrations.kv_digests import kv_digests
from kvtransfer.integrations.prefix_run import PrefixRun
from kvtransfer.integrations.transformers import PagedCache, PrefixCache
from kvtransfer.kernels.errors import CapacityError, ConfigError, TransferError
from kvtransfer.mover import Mover
from kvtransfer.tiers.faulty import Fault, FaultyTier, Kind
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.memory_tier import MemoryTier

PAGE = 8
NEW = 6
DTYPES = [torch.float32, torch.bfloat16]


def make(model: Any, folder: Path | None = None, **more: Any) -> PrefixCache:
    return PrefixCache.create(model, config(folder), page_size=PAGE, pool_tokens=2048, **more)


def ask(prefixes: PrefixCache, model: Any, rows: list[list[int]], **options: Any) -> tuple[list[list[int]], list[int]]:
    """(new tokens, cached tokens of each row)."""
    cached: list[int] = []
    out = prefixes.generate(
        model,
        rows,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        inspect=lambda _, hits: cached.extend(hits),
        **options,
    )
    prefixes.flush()
    return new_tokens_of(out, rows), cached


def settle(prefixes: PrefixCache) -> None:
    """Wait until what is to go to lower tiers has gone there."""
    until(lambda: prefixes.tiers.directory.idle)


def usable(tokens: int) -> int:
    """Of a prompt whose whole pages are all there."""
    return min(tokens // PAGE * PAGE, tokens - 1)


@pytest.fixture
def llama() -> Iterator[tuple[PrefixCache, Any]]:
    model = tiny_model("llama")
    with make(model) as prefixes:
        yield prefixes, model


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_warm_and_after_a_restart(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The reference splits each prompt where the hit ends, as the warm run does: the same sums in the same order."""
    model = tiny_model(family, dtype)
    lengths = [5, 8, 9, 33, 64, 71]
    rows = prompts_of(lengths)
    with make(model, tmp_path) as prefixes:
        for number, row in enumerate(rows):
            tokens, (cached,) = ask(prefixes, model, [row])
            assert cached == (0 if number % 2 == 0 else cached)
            assert tokens == plain(model, [row], NEW, cached), f"cold, {len(row)} tokens"
        for row in rows:
            tokens, (cached,) = ask(prefixes, model, [row])
            assert cached == usable(len(row))
            assert tokens == plain(model, [row], NEW, cached), f"warm, {len(row)} tokens"
        stats = prefixes.stats()
        assert (stats.prompts, stats.prompt_tokens, stats.retries, stats.lost_pages) == (12, 2 * sum(lengths), 0, 0)
    with make(model, tmp_path) as prefixes:
        for row in rows:
            tokens, (cached,) = ask(prefixes, model, [row])
            assert cached == usable(len(row)), "nothing was left on the disk"
            assert tokens == plain(model, [row], NEW, cached), f"after a restart, {len(row)} tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_what_the_first_run_wrote(family: str, tmp_path: Path) -> None:
    """What was loaded, sliding layers' dropped tokens too; the pool is full of ones before."""
    model = tiny_model(family, torch.bfloat16)
    (row,) = prompts_of([77])
    kept: list[Any] = []

    def inspect(cache: Any, hits: tuple[int, ...]) -> None:
        assert isinstance(cache, PagedCache)
        kept.append(kv_digests(cache, len(row), PAGE).pages)

    for _ in range(2):
        with make(model, tmp_path) as prefixes:
            for buffer in prefixes.pool.buffers:
                buffer.fill_(0xFF)
            prefixes.generate(model, [row], max_new_tokens=2, do_sample=False, inspect=inspect)
    assert len(kept[0]) == 9 and kept[0] == kept[1]


def test_what_was_generated_is_a_hit_of_the_next_turn(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    (row,) = prompts_of([29])
    (answer,), _ = ask(prefixes, model, [row])
    turn = row + answer + [7, 8, 9]
    _, (cached,) = ask(prefixes, model, [turn])
    assert cached == (len(row) + NEW - 1) // PAGE * PAGE > len(row)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_mixed_lengths(family: str, dtype: torch.dtype) -> None:
    """Cold, warm, and warm as batches of other prompts; the warm reference starts from what the cold run left."""
    model = tiny_model(family, dtype)
    rows = prompts_of([30, 41, 12, 7])
    with make(model) as prefixes:
        cold, cached = ask(prefixes, model, rows)
        assert cached == [0] * 4 and cold == plain(model, rows, NEW)
        warm, cached = ask(prefixes, model, rows)
        columns = min(41 - n + usable(n) for n in (30, 41, 12, 7))
        assert cached == [max(0, columns - (41 - n)) for n in (30, 41, 12, 7)] and max(cached) > 30
        if dtype == torch.float32:
            assert warm == plain(model, rows, NEW, columns) == cold
        else:
            assert warm == plain(model, rows, NEW, columns)
        other = [rows[1], [5, 6, 7]]  # of the second row nothing is there: its padding ends at column 38
        tokens, cached = ask(prefixes, model, other)
        assert cached == [38, 0] and tokens == plain(model, other, NEW, 38)


def test_a_batch_as_a_tokenizer_gives_it(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    rows = prompts_of([20, 33])
    padded_ids, mask = padded(rows)
    expected = plain(model, rows, NEW)
    for _ in range(2):
        out = prefixes.generate(
            model, padded_ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert new_tokens_of(out, rows) == expected
        prefixes.flush()


def test_rows_that_end_early_store_no_padding(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    rows = prompts_of([15, 20])
    free = plain(model, rows, 12)
    end = free[0][1]
    expected = plain(model, rows, 12, eos_token_id=end)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    out = prefixes.generate(model, rows, **options)
    assert new_tokens_of(out, rows) == expected
    prefixes.flush()
    stop = free[0].index(end) + 1
    with prefixes.tiers.match(rows[0] + free[0][:stop] + [0] * 8, prefixes.scope) as hit:
        assert hit.tokens == (15 + stop) // PAGE * PAGE


def test_the_next_turn_may_come_at_once(llama: tuple[PrefixCache, Any]) -> None:
    """Without a flush in between: what is on its way to the host is waited for."""
    prefixes, model = llama
    (row,) = prompts_of([65])
    hits: list[int] = []
    for _ in range(4):
        out = prefixes.generate(
            model, [row], max_new_tokens=8, do_sample=False, inspect=lambda _, cached: hits.extend(cached)
        )
        row = out[0].tolist()
    assert hits == [0, 72, 80, 88]


def test_what_is_not_to_be_stored_is_not(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    (row,) = prompts_of([29])
    ask(prefixes, model, [row], store=False)
    assert ask(prefixes, model, [row])[1] == [0]
    assert ask(prefixes, model, [row])[1] == [24]


def test_many_threads_share_a_cache(llama: tuple[PrefixCache, Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prefixes, model = llama
    rows = prompts_of([40, 44, 48, 20])
    expected = [plain(model, [row], NEW) for row in rows]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert [t for t, _ in threads.map(lambda row: ask(prefixes, model, [row]), rows)] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Cold, warm, after a restart and as a batch: the same split of the prompt gives the same tokens."""
    from kvtransfer.demo import repeatable_attention

    model = tiny_model(family, dtype, "cuda")
    rows = prompts_of([9, 64, 71, 200])
    with repeatable_attention(model.device):
        for _ in range(2):
            with make(model, tmp_path) as prefixes:
                for row in [*rows, *rows]:
                    tokens, (cached,) = ask(prefixes, model, [row])
                    assert tokens == plain(model, [row], NEW, cached)
                assert prefixes.stats().retries == 0 and prefixes.stats().cached_tokens > 300
                tokens, hits = ask(prefixes, model, rows)
                columns = min(200 - len(row) + usable(len(row)) for row in rows)
                assert hits == [max(0, columns - 200 + len(row)) for row in rows]
                assert tokens == plain(model, rows, NEW, columns)


# --- tiers that fail


@pytest.mark.parametrize("kind", ["error", "wrong_bytes", "partial", "death"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_two_tiers_that_fail_half_way(family: str, kind: Kind) -> None:
    """Both lower tiers hold everything; in the middle of their loads they begin to fail: tokens stay right."""
    model = tiny_model(family)
    rows = prompts_of([40, 64, 71, 33])
    expected = [plain(model, [row], NEW) for row in rows]
    tiers = {name: FaultyTier(MemoryTier(64 << 20, name=name)) for name in ("near", "far")}
    with make(model, tiers=tiers) as prefixes:
        assert [ask(prefixes, model, [row])[0] for row in rows] == expected
        hits, whole = 0, 0
        for failing in ("far", "near", None):
            settle(prefixes)
            prefixes.tiers.flush("host")
            if failing == "far":
                prefixes.tiers.flush("near")  # so that the other one is read
            if failing is not None:
                tier = tiers[failing]
                tier.add(Fault(kind, verb="get", call=tier.calls("get") + 1, times=4, count=1))
            for row, want in zip(rows, expected, strict=True):
                tokens, (cached,) = ask(prefixes, model, [row])
                assert [tokens] == [want], f"{len(row)} tokens, {cached} cached"
                hits, whole = hits + cached, whole + usable(len(row))
        assert 0 < hits < whole, "no fault was met" if hits else "nothing was loaded"
        assert [(name, tier.calls("get")) for name, tier in tiers.items() if not tier.faults_struck] == []
    for tier in tiers.values():
        tier.close()


def slots_of(prefixes: PrefixCache, work: Callable[[], object]) -> tuple[HostTier, list[int]]:
    """The host tier, and the slots that ``work`` stored to, in the order of pages."""
    mover = prefixes.tiers.mover
    assert isinstance(mover, Mover)
    slots: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = mover.submit

        def submit(commands: Sequence[Command]) -> None:
            slots.extend(slot for c in commands if isinstance(c, Store) for slot in ids(c.slots).tolist())
            real(commands)

        patch.setattr(mover, "submit", submit)
        work()
    return mover.host, slots


def test_a_page_damaged_in_host_memory_is_computed_again(llama: tuple[PrefixCache, Any]) -> None:
    """Layer-wise: the forward has begun when the digest tells; it is given up before a token came out."""
    prefixes, model = llama
    (row,) = prompts_of([70])
    expected = plain(model, [row], NEW)
    host, slots = slots_of(prefixes, lambda: ask(prefixes, model, [row]))
    host.payload[int(slots[4]) * host.slot_bytes + 11] ^= 4
    seen: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            seen.append(-1)

    tokens, (cached,) = ask(prefixes, model, [row], streamer=Streamer())
    assert (tokens, cached, prefixes.stats().retries) == (expected, 4 * PAGE, 1)
    assert seen == [*row, *tokens[0], -1], "the prompt or a token was handed out twice"
    assert ask(prefixes, model, [row])[1] == [64], "it was stored again"


@pytest.mark.parametrize("fails", [(1,), (2,), (1, 2), (-1,), (-1, 2), (1, -2), (-1, -2)])
def test_a_streamer_has_the_prompt_once(
    llama: tuple[PrefixCache, Any], fails: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tries fail: before (-) or after they have handed the prompt over."""
    prefixes, model = llama
    (row,) = prompts_of([40])
    expected, _ = ask(prefixes, model, [row])
    seen: list[int] = []
    tries = [0]

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            seen.append(-1)

    real = prefixes.forward

    def forward(model: Any, run: Any, options: dict[str, Any]) -> Any:
        tries[0] += 1
        if tries[0] in fails:
            options["streamer"].put(run.batch.ids)
        if {tries[0], -tries[0]} & {*fails}:
            raise TransferError("a page did not come")
        return real(model, run, options)

    monkeypatch.setattr(prefixes, "forward", forward)
    tokens, _ = ask(prefixes, model, [row], streamer=Streamer())
    assert tokens == expected and tries[0] == (max(map(abs, fails)) + 1 if 1 in map(abs, fails) else 1)
    assert seen == [*row, *tokens[0], -1]


def test_pages_of_a_run_whose_end_was_interrupted_go_back_later(
    llama: tuple[PrefixCache, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, model = llama
    (row,) = prompts_of([40])
    prefixes.generate(model, [row], max_new_tokens=2, do_sample=False)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixRun, "wait", lambda run: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prefixes.flush()
    prefixes.flush()
    assert len(prefixes.pool.allocate_pages(prefixes.pool.num_pages)) == prefixes.pool.num_pages


def test_a_host_tier_that_fails_always_costs_two_forwards(llama: tuple[PrefixCache, Any]) -> None:
    """Loads that never verify: the last try loads nothing."""
    prefixes, model = llama
    (row,) = prompts_of([40])
    expected = plain(model, [row], NEW)
    host, slots = slots_of(prefixes, lambda: ask(prefixes, model, [row]))
    for slot in slots:
        host.payload[slot * host.slot_bytes] ^= 1
    tokens, (cached,) = ask(prefixes, model, [row])
    assert (tokens, cached) == (expected, 0) and 1 <= prefixes.stats().retries <= 2


# --- refusals


def test_refusals(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    rows = prompts_of([20, 30])
    padded_ids, mask = padded(rows)
    for options, said in (
        ({"num_beams": 2}, "no beams"),
        ({"num_return_sequences": 3}, "one sequence a prompt"),
        ({"attention_mask": mask.flip(1)}, "on the left"),
        ({"attention_mask": mask[:, 1:]}, "same shape"),
    ):
        with pytest.raises(ConfigError, match=said):
            prefixes.generate(model, padded_ids, max_new_tokens=2, **options)
    for bad, said in (([], "at least one prompt"), ([[1], []], "a token in each"), (torch.ones(3), "rows, columns")):
        with pytest.raises(ConfigError, match=said):
            prefixes.generate(model, bad, max_new_tokens=2)
    known = model.get_input_embeddings().num_embeddings
    for strange in ([[1, 2], [3, known]], [-1, 5], torch.tensor([[known + 7]])):  # on a GPU they end the process
        with pytest.raises(ConfigError, match=rf"ids: expected token ids of 0\.\.{known - 1}, got "):
            prefixes.generate(model, strange, max_new_tokens=2)
    with pytest.raises(CapacityError) as small:
        prefixes.generate(model, rows, max_new_tokens=2040)
    assert str(small.value) == (
        "pool: expected 517 free pages for 2 sequences of up to 2070 tokens, got 256 of 256; "
        "make it larger (pool_tokens), or the batch smaller"
    )
    free = len(prefixes.pool.allocate_pages(prefixes.pool.num_pages))
    assert free == 256, "a refused call kept pages"


def test_ids_in_every_form_and_in_none(llama: tuple[PrefixCache, Any]) -> None:
    """What tokenizers give, lists and tensors of one prompt or several, means the same; the rest is told the forms."""
    prefixes, model = llama
    (row,) = prompts_of([21])
    want = prefixes.generate(model, torch.tensor([row]), max_new_tokens=3, do_sample=False)
    array = np.array(row)
    same: Any
    bad: Any
    for same in (row, tuple(row), array, list(array), [row], [array], array[None], [torch.tensor(row)]):
        assert torch.equal(prefixes.generate(model, same, max_new_tokens=3, do_sample=False), want)
    for bad in ("text", ["text"], 5, None, [5, "6"], [5, [6]], [5.0, 6.0], [[5, None]], {"input_ids": [row]}):
        with pytest.raises(ConfigError, match=r"ids: expected .* a list of token ids, .*, got ") as refused:
            prefixes.generate(model, bad, max_new_tokens=2)
        assert type(bad).__name__ in str(refused.value)


def test_a_model_that_raises_keeps_no_pages(llama: tuple[PrefixCache, Any]) -> None:
    prefixes, model = llama
    (row,) = prompts_of([40])
    ask(prefixes, model, [row])

    class Breaking:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise KeyError("the streamer's own")

        def end(self) -> None: ...

    for _ in range(3):
        with pytest.raises(KeyError, match="own"):
            prefixes.generate(model, [row], max_new_tokens=NEW, streamer=Breaking())
    assert len(prefixes.pool.allocate_pages(prefixes.pool.num_pages)) == 256
    prefixes.pool.free_pages(range(256))
    assert ask(prefixes, model, [row])[0] == plain(model, [row], NEW)


def test_other_weights_and_other_salts_share_nothing(tmp_path: Path) -> None:
    import copy

    model = tiny_model("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    (row,) = prompts_of([40])
    with make(model, tmp_path) as prefixes:
        ask(prefixes, model, [row])
    with make(other, tmp_path) as prefixes:
        assert ask(prefixes, other, [row])[1] == [0]
    salted = config(tmp_path, namespace={"salt": "a tenant"})
    with PrefixCache.create(model, salted, page_size=PAGE, pool_tokens=2048) as prefixes:
        assert ask(prefixes, model, [row])[1] == [0]
    with make(model, tmp_path) as prefixes:
        assert ask(prefixes, model, [row])[1] == [39]


# --- the real model


class Real:
    """SmolLM2, and prompts of mixed length out of the project's document, every second one begins as the one before."""

    def __init__(self, count: int) -> None:
        from rich.console import Console

        from kvtransfer.demo_model import load_model, read_prompt

        try:
            loaded = load_model(None, False, torch.device("cpu"), Console(quiet=True))
        except ConfigError as error:
            pytest.skip(f"needs SmolLM2, which pip fetches: {error}")
        ids = loaded.encode(read_prompt(None))
        lengths = (40, 75, 17, 150, 333, 64, 512, 250)
        starts = [number // 2 * 61 for number in range(count)]
        self.model = loaded.model
        self.rows = [ids[start : start + lengths[n % 8] + n] for n, start in enumerate(starts)]


def check_real_model(count: int, folder: Path) -> None:
    """Warm, after a restart, and with the disk and a second tier failing in the middle of it."""
    real = Real(count)
    model, size = real.model, 16

    def caches(**more: Any) -> PrefixCache:
        return PrefixCache.create(model, config(folder, host_pages=1500), page_size=size, pool_tokens=4096, **more)

    expected = [plain(model, [row], NEW) for row in real.rows]
    with caches() as prefixes:
        for round_ in ("cold", "warm"):
            for row, want in zip(real.rows, expected, strict=True):
                tokens, (cached,) = ask(prefixes, model, [row])
                assert tokens == want, f"{round_}: {len(row)} tokens, {cached} cached"
                assert round_ == "cold" or cached == min(len(row) // size * size, len(row) - 1)
    with caches() as prefixes:
        for row, want in zip(real.rows, expected, strict=True):
            tokens, (cached,) = ask(prefixes, model, [row])
            assert tokens == want and cached == min(len(row) // size * size, len(row) - 1), "after a restart"
    tiers = {name: FaultyTier(MemoryTier(2 << 30, name=name)) for name in ("near", "far")}
    with caches(tiers=tiers) as prefixes:
        for row, want in zip(real.rows, expected, strict=True):
            assert ask(prefixes, model, [row])[0] == want
        for failing in ("far", "near"):
            settle(prefixes)
            prefixes.tiers.flush("host")
            if failing == "far":
                prefixes.tiers.flush("near")  # so that the other one is read
            # Of the prompts less than half need a call: what begins as the one before is there by then.
            tiers[failing].add(Fault("death", verb="get", call=tiers[failing].calls("get") + max(1, count // 8)))
            for row, want in zip(real.rows, expected, strict=True):
                assert ask(prefixes, model, [row])[0] == want, f"while {failing} fails"
        assert [(name, tier.calls("get")) for name, tier in tiers.items() if not tier.faults_struck] == []
    for tier in tiers.values():
        tier.close()


@pytest.mark.timeout(600)
def test_the_real_model(tmp_path: Path) -> None:
    check_real_model(3, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_real_model_with_32_prompts(tmp_path: Path) -> None:
    check_real_model(32, tmp_path)
