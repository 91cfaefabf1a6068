"""The connector's waits in the order of vLLM's calls, on real streams: no byte of a page is read before it has come, or
overwritten before it has been read. On the CPU the same in small."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm_engine import BLOCK, MiniEngine

pytest_plugins = ["vllm_stub"]
pytestmark = pytest.mark.usefixtures("vllm_stub")


def rounds(count: int, **options: Any) -> None:
    """``count`` times: new tokens are computed and stored; their blocks, which come back as soon as nothing reads them,
    are overwritten by others; they are loaded into other blocks, behind work that the stream has still to do
    (`MiniEngine.disturb`), and read layer by layer. `MiniEngine.check` compares every byte."""
    engine = MiniEngine(**options)
    rng = random.Random()
    loaded = 0
    try:
        for _ in range(count):
            pages = rng.randrange(1, 9)
            tokens = [rng.randrange(50_000) for _ in range(pages * BLOCK + 1)]
            assert engine.run(tokens) == 0
            engine.settle()
            engine.run([rng.randrange(50_000) for _ in range(9 * BLOCK)])  # in the blocks of the first
            loaded += engine.run(tokens)
            engine.settle()
        assert loaded >= count * BLOCK
        assert engine.counts["load_failed_pages"] == 0 and engine.counts["store_failed_pages"] == 0
    finally:
        engine.close()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
@pytest.mark.parametrize("layout", ["BLNHC", "LBHNC"])
def test_rounds_on_the_cpu(layerwise: bool, layout: str) -> None:
    rounds(10, layerwise=layerwise, layout=layout, busy_ms=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
@pytest.mark.parametrize("layout", ["BLNHC", "LBNHC", "LBHNC"])
def test_200_rounds_on_a_gpu(layerwise: bool, layout: str) -> None:
    rounds(200, busy_ms=1.0, layerwise=layerwise, layout=layout, layers=16, width=256, host_pages=2048, device="cuda")


@pytest.mark.gpu
def test_layers_without_a_hook_on_a_gpu() -> None:
    rounds(50, busy_ms=1.0, layers=16, width=256, host_pages=2048, device="cuda", unhooked=[0, 7, 15])
