"""The SGLang linker and its layer counter on real streams, in SGLang's own order of calls."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import spin
from sglang_helpers import LAYERS, PAGE, Engine, hashes, until

pytestmark = pytest.mark.gpu
ROUNDS = 200
PAGES = 8


def write(engine: Engine, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """What a forward does: write these pages, buffer by buffer, on the current stream."""
    for number, buffer in enumerate((*engine.pool.k_buffer, *engine.pool.v_buffer)):
        buffer.view(-1, PAGE * 2 * 24)[pages] = rows[number]


def read_layer(engine: Engine, pages: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention does: read a layer of these pages, on the current stream."""
    both = (engine.pool.k_buffer[layer], engine.pool.v_buffer[layer])
    k, v = (buffer.view(-1, PAGE * 2 * 24)[pages].clone() for buffer in both)
    return k, v


def fresh_rows() -> torch.Tensor:
    return torch.randn(2 * LAYERS, PAGES, PAGE * 2 * 24, device="cuda").half()


@pytest.mark.parametrize("path", ["auto", "staged", "mapped"])
def test_offload_and_load_on_two_streams(path: str) -> None:
    scheduler, forward = torch.cuda.Stream(), torch.cuda.Stream()
    wrong: list[str] = []
    with torch.cuda.stream(scheduler):
        engine = Engine("cuda", forward, pages=3 * PAGES, path=path)
        engine.linker.pools["kv"].slots._protect_s = 0.0
        for number in range(ROUNDS):
            keys = hashes(PAGES)
            ids = torch.randperm(30, device="cuda") + 1
            here, there = ids[:PAGES], ids[PAGES : 2 * PAGES]
            rows, other, earlier = fresh_rows(), fresh_rows(), fresh_rows()
            forward.wait_stream(scheduler)
            with torch.cuda.stream(forward):  # a forward that is still running writes the pages
                spin(forward, 1.0)
                write(engine, here, rows)
            assert engine.linker.offload(engine.transfer(keys, here.tolist()))
            until(lambda: engine.linker.num_completed_offloads() == 1)
            assert engine.linker.pop_completed_offload()
            with torch.cuda.stream(forward):  # then the pages are another request's, and the target is read late
                write(engine, here, other)
                write(engine, there, earlier)
                spin(forward, 1.0)
                before = [read_layer(engine, there, layer) for layer in range(LAYERS)]
            assert engine.linker.lookup("r", engine.transfer(keys)) == [*range(1, PAGES + 1)]
            assert engine.linker.load("r", engine.transfer(keys, there.tolist()))
            index = engine.linker.start_layer_wise_loading()
            engine.counter.set_consumer(index)
            with torch.cuda.stream(forward):
                after = []
                for layer in range(LAYERS):
                    engine.counter.wait_until(layer)
                    after.append(read_layer(engine, there, layer))
            engine.counter.set_consumer(-1)
            if not engine.linker.finish_layer_wise_loading(index):
                wrong.append(f"round {number}: the load failed")
            forward.synchronize()
            for layer in range(LAYERS):
                for kind in range(2):
                    at = layer + kind * LAYERS
                    if not torch.equal(before[layer][kind], earlier[at]):
                        wrong.append(f"round {number}, layer {layer}: the load came before a read")
                    if not torch.equal(after[layer][kind], rows[at]):
                        wrong.append(f"round {number}, layer {layer}: wrong bytes")
        engine.linker.close()
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
