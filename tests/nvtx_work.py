"""Transfers for an NVTX tool to watch: `python nvtx_work.py cpu|cuda`. Run by the NVTX tests."""

from __future__ import annotations

import sys

import torch

from kvtransfer.engine import TransferEngine
from kvtransfer.hooks import layerwise
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

SPEC = KVSpec.attention(num_layers=4, page_size=16, kv_heads=2, head_dim=64, itemsize=2)
PAGES = 12


def work(engine: TransferEngine, path: str | None) -> None:
    """A store, a layer-wise store and load around a forward, and a forward that raises."""
    engine.store(range(PAGES), range(PAGES), path=path).result(20)
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(SPEC.num_layers))
    load = engine.load(range(PAGES), range(PAGES), layerwise=True, path=path)
    store = engine.store(range(PAGES), range(PAGES, 2 * PAGES), layerwise=True) if path != "mapped" else None
    with layerwise(layers, load=load, store=store):
        for layer in layers:
            layer(torch.zeros(1, device=engine.pool.device))
    load.result(20)
    if store is not None:
        store.result(20)
    layers[0].register_forward_hook(_stumble, prepend=True)
    try:
        with layerwise(layers, load=engine.load(range(PAGES), range(PAGES), path=path)):
            layers[0](torch.zeros(1))
    except ArithmeticError:
        pass


def _stumble(*args: object) -> None:
    raise ArithmeticError("a forward that fails")


def main(device: str) -> None:
    paths: tuple[str, ...] = ("staged", "mapped", "strided") if device == "cuda" else ("cpu", "staged")
    for path in paths:
        pool = KVPool.allocate("sglang.layer_first", spec=SPEC, num_pages=64, device=device)
        choice = "staged" if path == "staged" else "auto"
        with (
            HostTier(SPEC, capacity_pages=64, pin=device == "cuda") as host,
            TransferEngine(pool, host, staging_bytes=12 << 20, path=choice) as engine,
        ):
            work(engine, path)
            print(path, engine.observer.spans)


if __name__ == "__main__":
    main(sys.argv[1])
