"""Plans: the rules as a table, and what must hold of every cut: each byte of each page moves exactly once."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import DEEP, EVEN, HYBRID, TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.layout import Layout, box_bytes, packed_box
from kvtransfer.kernels.spec import Component, KVSpec
from kvtransfer.link import Curve, Grid, decode_profile
from kvtransfer.plan import (
    DIGEST_TOKENS,
    MAX_GROUP_LAYERS,
    PATHS,
    Facts,
    layer_groups,
    make_plan,
    runs_of,
    staged_boxes,
)
from kvtransfer.predict import CHUNK_PAGES, STRIDED_RUN_PAGES, Runs, Terrain, budget_of

BIG = KVSpec.attention(num_layers=32, page_size=64, kv_heads=8, head_dim=128, itemsize=2)  # 8 MiB a page
TOKENS = KVSpec.attention(num_layers=32, page_size=1, kv_heads=8, head_dim=128, itemsize=2)  # 128 KiB a page


MEDIUM = KVSpec.attention(num_layers=32, page_size=16, kv_heads=8, head_dim=128, itemsize=2)  # 2 MiB a page
SKETCH = Path(__file__).parent / "data" / "link_sketch.json"  # a link on which batches of small pieces are slow
H200 = decode_profile(SKETCH.read_bytes(), SKETCH.name)


def even_runs(pages: int, count: int) -> Runs:
    """``count`` runs of about one length."""
    long = count if count and pages // count >= STRIDED_RUN_PAGES else 0
    return Runs(pages, count, long, pages if long else 0)


def facts(spec: KVSpec = EVEN, layout: str = "sglang.layer_first", **more: Any) -> Facts:
    """Facts of an H200 with a pinned slab and a ring of 64 MiB slots, random ids, unless told otherwise."""
    direction = more.get("direction", "load")
    pages = more.get("pages", 8)
    pool, host = Side.of(Layout.named(layout, spec, 8)), Side.of(Layout.page_first(spec, 8))
    ends = (host, pool) if direction == "load" else (pool, host)
    terrain = Terrain(
        direction,
        spec,
        coalesce(spec, *ends, Box.whole(spec), order="src" if direction == "load" else "dst"),
        more.get("slot_bytes", 64 << 20),
        more.get("on_gpu", True),
        more.get("host_pinned", True),
        more.get("profile", H200),
        budget_of(more.get("sm_budget", "prefill")),
        more.get("host_stride_bytes"),
    )
    runs = more.get("runs", pages)
    return Facts(
        terrain,
        pages,
        None if runs is None else even_runs(pages, runs),
        even_runs(pages, more.get("host_runs", pages if runs is None else runs)),
        more.get("layerwise", False),
        more.get("compute_s"),
    )


@pytest.mark.parametrize(
    ("case", "path"),
    [
        (facts(on_gpu=False), "cpu"),
        (facts(on_gpu=False, slot_bytes=0), "cpu"),
        (facts(BIG, pages=64), "staged"),
        (facts(BIG, direction="store", pages=64), "staged"),
        (facts(BIG, layerwise=True), "staged"),
        (facts(BIG, layerwise=True, pages=128), "staged"),
        (facts(MEDIUM, pages=512), "staged"),
        (facts(MEDIUM, pages=512, layerwise=True), "staged"),
        (facts(MEDIUM, pages=512, direction="store"), "staged"),
        (facts(MEDIUM, pages=512, direction="store", layerwise=True), "staged"),
        (facts(TOKENS, pages=8192), "mapped"),
        (facts(TOKENS, pages=8192, layerwise=True), "mapped"),
        (facts(TOKENS, pages=8192, host_runs=512), "staged"),  # runs of 16 pages merge to 2 MiB
        (facts(TOKENS, pages=8192, host_runs=512, host_stride_bytes=256 << 10), "mapped"),  # but not over padding
        (facts(TOKENS, pages=8192, runs=None), "mapped"),
        (facts(TOKENS, pages=8192, host_pinned=False), "staged"),
        (facts(TOKENS, pages=8192, host_pinned=False, slot_bytes=0), "strided"),
        (facts(TOKENS, pages=8192, direction="store"), "staged"),
        (facts(TOKENS, pages=8192, direction="store", slot_bytes=0), "strided"),
        (facts(TOKENS, pages=8192, direction="store", slot_bytes=0, runs=None), "mapped"),
        (facts(BIG, "page_first", pages=64), "staged"),  # the strided copy is one chunk, its digests come after it
        (facts(TOKENS, "page_first", pages=8192), "mapped"),  # rows of 128 KiB, each a call of its own
        (
            facts(TOKENS, "page_first", pages=8192, runs=16),
            "staged",
        ),  # every chunk of a strided copy costs Python's time
        (facts(TOKENS, "page_first", pages=8192, runs=None), "mapped"),
        (facts(BIG, "page_first", pages=64, runs=None), "staged"),
        (facts(BIG, pages=0, runs=0), "staged"),
    ],
)
def test_the_rules(case: Facts, path: str) -> None:
    plan = make_plan(case)
    assert plan.path == path
    assert plan.total_bytes == case.pages * case.terrain.spec.page_bytes
    assert not {path} & {name for name, _ in plan.rejected}
    assert plan.reason and all(why for _, why in plan.rejected)


@pytest.mark.parametrize(
    ("case", "forced", "message"),
    [
        (facts(), "tape", r"path: expected one of staged, strided, mapped, cpu or 'auto', got 'tape'"),
        (facts(), "cpu", "path 'cpu' can't carry this load: the pool is on a GPU"),
        (facts(), "device", "path: expected one of staged, strided, mapped, cpu or 'auto', got 'device'"),
        (facts(on_gpu=False), "mapped", "path 'mapped' can't carry this load: there is no GPU"),
        (facts(on_gpu=False), "strided", "path 'strided' can't carry this load: there is no GPU"),
        (facts(host_pinned=False), "mapped", "the host slab is not pinned"),
        (facts(slot_bytes=0), "staged", "there is no staging ring"),
        (
            facts(slot_bytes=4096, spec=KVSpec.mla(2, 64, 1152)),
            "staged",
            r"a ring slot of 4,096 bytes is too small for 8 tokens of one layer \(9,216 bytes\)",
        ),
        (facts(runs=None), "strided", "page ids are on the GPU"),
        (facts(direction="store", layerwise=True), "mapped", "can't leave layer by layer"),
        (facts(direction="store", layerwise=True, runs=None), "staged", "give them on the CPU"),
    ],
)
def test_a_forced_path_that_can_not_run_is_refused_with_its_reason(case: Facts, forced: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(case, forced)


def test_no_path_at_all_is_refused_with_every_reason() -> None:
    case = facts(slot_bytes=0, host_pinned=False, runs=None)
    with pytest.raises(ConfigError, match=r"no path can carry this load: .*not pinned.*no staging ring.*on the GPU"):
        make_plan(case)


@pytest.mark.parametrize("forced", ["staged", "strided", "mapped"])
def test_a_forced_path_is_taken_and_said(forced: str) -> None:
    plan = make_plan(facts(), forced)
    assert plan.path == forced and plan.reason == "asked for by the caller"


def test_explain_says_what_was_chosen_and_why_the_others_lost() -> None:
    text = make_plan(facts(TOKENS, pages=8192, layerwise=True, runs=None)).explain()
    lines = text.splitlines()
    assert lines[0].startswith("load: 8192 pages, 1,073,741,824 bytes by path mapped: ")
    assert "524,288 pieces of 2,048 bytes in 1 chunks, layer by layer" in lines[1]
    assert re.fullmatch(r"  predicted 22\.\d ms, 48\.\d GB/s, bound by the link", lines[2])
    assert [line.split(":")[0] for line in lines[3:]] == ["  not staged (runner-up)", "  not strided", "  link"]
    assert re.search(r"predicted [\d.]+ ms, [\d.]+ GB/s: it would take [\d.]+% longer, bound by the link", lines[3])
    assert "page ids are on the GPU" in lines[4]
    assert "shipped figures of NVIDIA H200" in lines[5]


def test_explain_tells_groups_and_what_the_budget_holds_back() -> None:
    text = make_plan(facts(MEDIUM, pages=512, layerwise=True)).explain()
    assert re.search(r"^  groups of 4,4,4,4,4,4,4,1,2,1 layers$", text, re.M)
    quick = replace_struct(H200, grids={**H200.grids, "mapped/h2d": Grid((1,), (1,), ((53.5,),))})
    text = make_plan(facts(MEDIUM, pages=512, layerwise=True, profile=quick)).explain()
    assert "by path staged: within 5% of the quickest, and it takes less from the model" in text
    assert "% less, but leaves 96% of a concurrent GEMM instead of 100%" in text
    text = make_plan(facts(MEDIUM, pages=512, direction="store")).explain()
    assert "  not mapped: SMs that write host memory take 36% of a concurrent GEMM: only where asked for; pred" in text


def test_the_budget_rules_paths_out_by_what_a_gemm_loses() -> None:
    """A card whose GEMM loses 10 % to reading SMs: prefill gives the path up, decode and a number do not."""
    scale = replace_struct(H200.mapped_scale["h2d"], gemm_kept=Curve((1, 16), (0.9, 0.9)))
    lossy = replace_struct(H200, mapped_scale={**H200.mapped_scale, "h2d": scale})
    paths = {b: make_plan(facts(TOKENS, pages=8192, profile=lossy, sm_budget=b)) for b in ("prefill", "decode", 4)}
    assert [p.path for p in paths.values()] == ["staged", "mapped", "mapped"]
    assert dict(paths["prefill"].rejected)["mapped"].startswith(
        "it takes 10% of a concurrent GEMM; prefill tolerates 8%"
    )
    assert make_plan(facts(TOKENS, pages=8192, profile=lossy, slot_bytes=0, runs=None)).path == "mapped", "none else"


def test_few_ctas_are_slower_and_the_choice_follows() -> None:
    one, four = (make_plan(facts(TOKENS, pages=8192, sm_budget=n), "mapped").predicted for n in (1, 4))
    assert one is not None and four is not None
    assert one.seconds / four.seconds == pytest.approx(51 / 16, rel=0.02)
    assert make_plan(facts(TOKENS, pages=8192, sm_budget=1)).path == "staged"


@pytest.mark.parametrize("budget", ["prefill", "decode", 1, 16])
def test_stores_never_write_host_memory_from_sms_unless_asked(budget: int | str) -> None:
    kept = {**H200.mapped_scale, "d2h": replace_struct(H200.mapped_scale["d2h"], gemm_kept=Curve((1,), (1.0,)))}
    free = replace_struct(H200, mapped_scale=kept)
    for spec, pages in ((TOKENS, 8192), (MEDIUM, 512), (EVEN, 100)):
        for profile in (H200, free):
            case = facts(spec, pages=pages, direction="store", profile=profile, sm_budget=budget)
            assert make_plan(case).path != "mapped"
            assert make_plan(case, "mapped").path == "mapped"


@given(
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    st.sampled_from([(8, 128, 2), (1, 128, 2), (1, 576, 1), (2, 64, 1), (16, 128, 4)]),
    st.integers(1, 1 << 16),
    st.floats(0, 1),
    st.sampled_from(["sglang.layer_first", "vllm.LBHNC", "page_first", "vllm.BLNHC"]),
    st.sampled_from(["load", "store"]),
    st.booleans(),
    st.sampled_from([None, 1e-5, 3e-4, 1e-2]),
)
@settings(max_examples=200, deadline=None)
def test_the_choice_is_never_far_from_the_best_prediction(
    page_size: int,
    heads: tuple[int, int, int],
    pages: int,
    share: float,
    layout: str,
    direction: str,
    layerwise: bool,
    compute_s: float | None,
) -> None:
    spec = KVSpec.attention(8, page_size, *heads)
    runs = max(1, int(share * pages))
    plan = make_plan(
        facts(spec, layout, pages=pages, runs=runs, direction=direction, layerwise=layerwise, compute_s=compute_s)
    )
    assert plan.predicted is not None and plan.predicted.seconds > 0
    allowed = [p for p in plan.others if p.path not in dict(plan.barred)]
    best = min([plan.predicted.finish_s, *(p.finish_s for p in allowed)])
    assert plan.predicted.finish_s <= 1.05 * best
    assert plan.predicted.total_bytes == plan.total_bytes
    assert plan.predicted.gbps <= 55.4, "never quicker than the link"
    for p in (plan.predicted, *plan.others):
        assert p.finish_s >= p.seconds > 0 and 0 < p.kept <= 1


def test_planning_8192_pages_is_quick() -> None:
    """Under 0.3 ms, the runs counted: the best of many calls by the thread's own clock, for others share the cores."""
    ids = np.random.default_rng(0).permutation(8192), np.random.default_rng(1).permutation(8192)
    for spec, layerwise in itertools.product((TOKENS, MEDIUM, BIG), (False, True)):
        terrain = facts(spec).terrain
        times = []
        for _ in range(300):
            started = time.thread_time()
            make_plan(Facts(terrain, 8192, Runs.of(*ids), Runs.of(ids[0]), layerwise))
            times.append(time.thread_time() - started)
        assert min(times) < 0.3e-3, f"{spec.page_size} {layerwise}: {min(times) * 1e6:.0f} us"


def test_a_small_transfer_on_the_cpu_goes_in_blocks_of_pages() -> None:
    plan = make_plan(facts(on_gpu=False, pages=2 * CHUNK_PAGES + 1))
    assert [(c.first, c.count) for c in plan.chunks] == [(0, 128), (128, 128), (256, 1)]
    assert all(c.box == Box.whole(EVEN) for c in plan.chunks)


def test_no_pages_make_no_chunks() -> None:
    for path in PATHS[:3]:
        assert make_plan(facts(pages=0, runs=0), path).chunks == ()


# -- cuts ------------------------------------------------------------------------------------------

COMPONENT = st.builds(
    lambda heads, width, per_page: (heads, width, per_page), st.integers(1, 3), st.integers(1, 40), st.booleans()
)
SPECS = st.builds(
    lambda page_size, layers: KVSpec(
        page_size,
        tuple(tuple(Component(f"c{i}", h, b, p) for i, (h, b, p) in enumerate(components)) for components in layers),
    ),
    st.integers(1, 40),
    st.lists(st.lists(COMPONENT, min_size=1, max_size=3), min_size=1, max_size=9),
)


def marked(spec: KVSpec, box: Box) -> list[tuple[int, int, int]]:
    """(layer, component, token) of every row in a box."""
    rows = []
    for layer, i in packed_box(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop, 0):
        per_page = spec.layers[layer][i].per_page
        rows += [(layer, i, token) for token in ([0] if per_page else range(box.token_start, box.token_stop))]
    return rows


def all_rows(spec: KVSpec) -> list[tuple[int, int, int]]:
    return [
        (layer, i, token)
        for layer, components in enumerate(spec.layers)
        for i, c in enumerate(components)
        for token in range(c.rows(spec.page_size))
    ]


@given(SPECS, st.integers(1, 4000), st.sampled_from(["none", "load", "store"]))
@settings(max_examples=200, deadline=None)
def test_boxes_cover_every_byte_once_and_fit_where_they_can(spec: KVSpec, slot_bytes: int, by_layer: str) -> None:
    groups = {
        "none": ((0, spec.num_layers),),
        "load": tuple(layer_groups(spec.num_layers)),
        "store": tuple((i, i + 1) for i in range(spec.num_layers)),
    }[by_layer]
    boxes = staged_boxes(spec, slot_bytes, groups)
    seen = [row for box in boxes for row in marked(spec, box)]
    assert sorted(seen) == all_rows(spec)
    for box in boxes:
        assert any(start <= box.layer_start and box.layer_stop <= stop for start, stop in groups)
        assert box.token_start % DIGEST_TOKENS == 0, "a digest word would be cut in two"
        nbytes = box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
        one_layer, tokens = box.layer_stop - box.layer_start == 1, box.token_stop - box.token_start
        uncut = one_layer and (tokens <= DIGEST_TOKENS or spec.page_size < 2 * DIGEST_TOKENS)
        assert nbytes <= slot_bytes or uncut, "a box that could have been cut smaller"


@given(
    SPECS, st.integers(0, 300), st.integers(1, 9000), st.booleans(), st.booleans(), st.sampled_from(["load", "store"])
)
@settings(max_examples=150, deadline=None)
def test_chunks_cover_every_page_and_layer_once(
    spec: KVSpec, pages: int, slot_bytes: int, layerwise: bool, on_gpu: bool, direction: str
) -> None:
    case = facts(spec, direction=direction, pages=pages, slot_bytes=slot_bytes, layerwise=layerwise, on_gpu=on_gpu)
    rows = all_rows(spec)
    index = {row: at for at, row in enumerate(rows)}
    for path in ("cpu", "staged", "strided", "mapped"):
        try:
            plan = make_plan(case, path)
        except ConfigError:
            continue
        times = np.zeros((pages, len(rows)), dtype=np.int64)
        for chunk in plan.chunks:
            assert chunk.count > 0
            box = chunk.box
            nbytes = box_bytes(spec, box.layer_start, box.layer_stop, box.token_start, box.token_stop)
            if path == "staged":
                assert chunk.count * nbytes <= slot_bytes
            columns = [index[row] for row in marked(spec, box)]
            times[np.ix_(range(chunk.first, chunk.first + chunk.count), columns)] += 1
        assert (times == 1).all()
        if layerwise and direction == "store":
            assert all(c.box.layer_stop - c.box.layer_start == 1 for c in plan.chunks), "each layer leaves alone"
        if layerwise and path != "mapped":
            order = [c.box.layer_start for c in plan.chunks]
            assert order == sorted(order), "layers arrive in order"


def test_a_box_of_pages_with_blocks_is_cut_where_the_blocks_allow() -> None:
    """A manager page of 64 tokens made of blocks of 16: a ring slot of 24 tokens must not cut a block in two."""
    spec = KVSpec.mla(1, 64, 128)
    for box in staged_boxes(spec, 24 * 128, ((0, 1),)):
        start, count = box.token_start, box.token_stop - box.token_start
        assert count <= 16 and start % 16 + count <= 16


# -- small parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [*range(1, 40), 61, 80, 128])
def test_layer_groups_add_up_and_start_and_end_small(num_layers: int) -> None:
    groups = layer_groups(num_layers)
    assert groups[0][0] == 0 and groups[-1][1] == num_layers
    assert all(a[1] == b[0] for a, b in itertools.pairwise(groups))
    sizes = [stop - start for start, stop in groups]
    assert min(sizes) >= 1 and max(sizes) <= MAX_GROUP_LAYERS
    assert sizes[0] == 1 or num_layers == 1
    assert sizes[-1] == 1
    if num_layers >= 16:
        assert sizes[:4] == [1, 2, 3, 4] and sizes[-3:] == [3, 2, 1]


def naive_runs(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for i in range(len(a)):
        if runs and a[i] == a[i - 1] + 1 and b[i] == b[i - 1] + 1:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return runs


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
@settings(deadline=None)
def test_runs_equal_the_naive_list(pairs: list[tuple[int, int]]) -> None:
    a = np.array([p[0] for p in pairs], dtype=np.int64)
    b = np.array([p[1] for p in pairs], dtype=np.int64)
    want = naive_runs(a.tolist(), b.tolist())
    assert list(runs_of(a, b)) == want
    long = [n for _, n in want if n >= STRIDED_RUN_PAGES]
    assert Runs.of(a, b) == Runs(len(pairs), len(want), len(long), sum(long))
    assert Runs.of(a) == Runs.of(a, a)


@pytest.mark.parametrize("spec", [TINY, HYBRID, DEEP])
def test_pieces_are_counted(spec: KVSpec) -> None:
    case = facts(spec, on_gpu=False)
    plan = make_plan(case)
    assert plan.pieces == 8 * case.terrain.direct.pieces_a_page
    assert plan.piece_bytes == case.terrain.spec.page_bytes // case.terrain.direct.pieces_a_page
