"""TieredCache over real tiers: bytes there and back, faults, cancels, room. In both forms: one process, and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_helpers import MEMORY, ODD, MakeRig, disk, form, hit_pages, make  # noqa: F401
from engine_helpers import EVEN, HYBRID, LATENT, LIMIT_S, TINY, TOKEN

KINDS = [
    pytest.param(spec, layout, id=f"{name}-{layout}")
    for name, spec in {"tiny": TINY, "token": TOKEN, "even": EVEN, "odd": ODD}.items()
    for layout in (("sglang.layer_first", "vllm.LBHNC") if name != "tiny" else ("sglang.layer_first",))
]
KINDS += [
    pytest.param(HYBRID, "transformers", id="hybrid"),
    pytest.param(LATENT, "vllm.MLA", id="latent"),
]


@pytest.mark.parametrize(("spec", "layout"), KINDS)
def test_bytes_come_back_from_every_tier(make: MakeRig, tmp_path: Path, spec: Any, layout: str) -> None:  # noqa: F811
    rig = make(spec=spec, layout=layout, lower={"disk": disk(tmp_path / "disk")})
    tokens = rig.tokens(7)
    rows = rig.stored(tokens)
    assert np.array_equal(rig.loaded(tokens), rows)  # from the host
    rig.cache.flush("host")
    rig.settle()
    with rig.cache.match(tokens) as hit:
        assert (hit.pages, dict(hit.tokens_by_tier)) == (7, {"disk": 7 * rig.page_size})
    assert np.array_equal(rig.loaded(tokens), rows)  # from the disk, by way of the host
    with rig.cache.match(tokens) as hit:
        assert dict(hit.tokens_by_tier) == {"host": 7 * rig.page_size}
    assert np.array_equal(rig.loaded(tokens[: 3 * rig.page_size + rig.page_size - 1]), rows[:3])


def test_a_prefix_is_shared_and_only_what_lacks_is_written(make: MakeRig) -> None:  # noqa: F811
    rig = make(lower={"far": MEMORY})
    trunk = rig.tokens(4, rest=0)
    rows = rig.stored(trunk)
    written = rig.do("counters", "far")["bytes_written"]
    longer = rig.tokens(3, after=trunk)
    with rig.cache.match(longer) as hit:
        assert hit.pages == 4
    pages = rig.take(7)
    more = rig.write(pages)  # other bytes for the trunk's pages too: they must not be written
    store = rig.cache.store(longer, pages)
    assert store.result(LIMIT_S).all_ok and store.usable_pages == 7
    rig.settle()
    rig.give(pages)
    got = rig.loaded(longer)
    assert np.array_equal(got[:4], rows) and np.array_equal(got[4:], more[4:])
    assert rig.do("counters", "far")["bytes_written"] * 4 == written * 7
    assert hit_pages(rig, longer) == 7


def test_layer_wise_load_from_the_host(make: MakeRig) -> None:  # noqa: F811
    rig = make()
    tokens = rig.tokens(5)
    rows = rig.stored(tokens)
    rig.do("hold", "copy_in")
    with rig.cache.match(tokens) as hit:
        pages = rig.take(5)
        load = rig.cache.load(hit, pages, layerwise=True)
    assert load.await_submitted(LIMIT_S) == 5 and not load.done()
    rig.do("let_go")
    for layer in range(rig.spec.num_layers):
        rig.wait_layer(load, layer)
    assert np.array_equal(rig.read(pages), rows)
    verdict = load.verdict(LIMIT_S)
    assert verdict.ok and verdict.verified
