"""The connector inside vLLM's own scheduler: what comes out of it is right to the token, whatever comes from a cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines.vllm.rig import BLOCK, Engine

pytestmark = pytest.mark.engines


def prompt(tokens: int) -> list[int]:
    rng = random.Random()
    return [rng.randrange(50_000) for _ in range(tokens)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "async"])
def test_a_second_turn_hits_the_first(tmp_path: Path, layerwise: bool, runner: str) -> None:
    engine = Engine(tmp_path, layerwise=layerwise, runner=runner)
    first = prompt(100)
    answer = engine.ask("a", first, 40)
    assert answer == engine.right(first, 40)
    engine.forget()
    engine.taken()
    second = [*first, *answer, *prompt(20)]
    assert engine.ask("b", second, 10) == engine.right(second, 10)
    assert engine.taken()["loaded_tokens"] == (100 + 39) // BLOCK * BLOCK  # the last token's KV was never computed
    engine.close()
