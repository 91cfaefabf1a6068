"""Slots of a host slab go to disk and come back while transfers between the slab and a pool run, byte for byte.

On a GPU the slab is pinned: what CUDA registered is registered with io_uring too, and read past the page cache.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.errors import KVTransferError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.keys import Namespace, Shard, page_keys, stored_keys
from kvtransfer.tiers.record import RecordHeader
from kvtransfer.tiers.storage import FileStorage

SPEC = KVSpec.attention(num_layers=3, page_size=16, kv_heads=5, head_dim=131, itemsize=2)  # 125,760 bytes a page
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_disk_and_transfers_share_a_slab(device: str, tmp_path: Path) -> None:
    count = 96
    space = Namespace.of(SPEC, model="m", kv_dtype="bfloat16").digest()
    shard = Shard.whole(SPEC)
    pool = KVPool.allocate("sglang.layer_first", spec=SPEC, num_pages=2 * count, device=device)
    # Small registrations, so that slots lie at their ends.
    host = HostTier(SPEC, capacity_pages=3 * count, device=device, chunk_bytes=4 << 20)
    assert host.pinned == (device == "cuda")
    engine = TransferEngine(pool, host)
    for buffer in pool.buffers:
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    pages = np.random.default_rng().permutation(2 * count)
    ours, noise = host.allocate(2 * count), host.allocate(count)
    stored = engine.store(pages, ours)
    stored.result(60)
    tokens = np.arange(2 * count * SPEC.page_size)
    keys = stored_keys(b"", space, page_keys(tokens, SPEC.page_size), shard)
    host.seal(ours, [RecordHeader(key, space, shard, "page_first", SPEC.page_bytes) for key in keys])
    rows = host.payload.view(-1, host.slot_bytes)
    before = [rows[slot, : SPEC.page_bytes].clone() for slot in ours.tolist()]
    trailers = host.trailers[ours].copy()

    over = threading.Event()
    problems: list[BaseException] = []

    def keep_the_link_busy() -> None:
        """Stores of other pages into the other slots, over and over."""
        try:
            while not over.is_set():
                engine.store(pages[:count], noise).result(60)
        except KVTransferError as error:
            problems.append(error)

    other = threading.Thread(target=keep_the_link_busy)
    storage = FileStorage(engine="io_uring", direct=True if device == "cuda" else None)
    with DiskTier(tmp_path, SPEC, namespace=space, capacity_pages=2 * count, storage=storage) as tier:
        tier.register(host.payload.numpy())
        tier.register(host.trailers.reshape(-1))
        other.start()
        try:
            buffers = [host.record(slot) for slot in ours.tolist()]
            for _ in range(4):
                tier.remove(keys).result(60)
                tier.put_from(keys, buffers).result(60).require()
                for slot in ours.tolist():
                    rows[slot] = 0xA5
                host.trailers[ours] = 0xA5
                order = np.random.default_rng().permutation(2 * count).tolist()
                tier.get_into([keys[i] for i in order], [buffers[i] for i in order]).result(60).require()
                for at, slot in enumerate(ours.tolist()):
                    assert torch.equal(rows[slot, : SPEC.page_bytes], before[at]), at
                assert np.array_equal(host.trailers[ours], trailers)
        finally:
            over.set()
            other.join(60)
        assert not problems
        for buffer in pool.buffers:
            buffer.zero_()
        engine.load(ours, pages).result(60)
        engine.store(pages, ours).result(60)
        for at, slot in enumerate(ours.tolist()):
            assert torch.equal(rows[slot, : SPEC.page_bytes], before[at]), at
        tier.unregister(host.payload.numpy())
        tier.unregister(host.trailers.reshape(-1))
    engine.close()
    host.close()
