"""Pools: typed views, page ids and their owners, declared streams, and everything that is refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import EVEN, HYBRID, LATENT, LIMIT_S, TINY, TOKEN, Guarded, component_bytes, fresh

from kvtransfer.fifo import FifoStream
from kvtransfer.kernels.errors import CapacityError, ConfigError, LayoutError, OwnershipError, TransferError
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("page_first", TINY),
        ("sglang.layer_first", TINY),
        ("sglang.layer_first", HYBRID),
        ("sglang.page_first", TINY),
        ("sglang.page_head", EVEN),
        ("vllm.LBNHC", TINY),
        ("vllm.BLHNC", EVEN),
        ("vllm.MLA", LATENT),
        ("transformers", TINY),
    ],
)
def test_a_view_shows_the_bytes_of_one_component(name: str, spec: KVSpec) -> None:
    side = Guarded(fresh(), Layout.named(name, spec, 5))
    pages = np.arange(5)
    for layer, components in enumerate(spec.layers):
        for i, c in enumerate(components):
            view = side.pool.view(layer, c.name, torch.uint8)
            assert view.shape == (5, c.rows(spec.page_size), c.heads, c.head_bytes)
            want = component_bytes(side.layout, side.buffers, layer, i, pages)
            assert np.array_equal(view.numpy().reshape(5, -1), want)
            assert view.untyped_storage().data_ptr() == side.whole[side.layout.placements[layer][i].buffer].data_ptr()


def test_a_view_of_wider_elements_writes_into_the_pool() -> None:
    pool = KVPool.allocate("vllm.LBHNC", spec=EVEN, num_pages=3)
    view = pool.view(1, "v", torch.bfloat16)
    assert view.shape == (3, 16, 2, 8) and view.dtype == torch.bfloat16
    view.fill_(1.5)
    assert sum(int((b.view(torch.bfloat16) == 1.5).sum()) for b in pool.buffers) == view.numel()
    assert pool.view(1, 1, torch.int8).shape == (3, 16, 2, 16)


def test_views_that_bytes_do_not_allow_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"expected elements that divide heads of 5 bytes, got torch\.bfloat16 of 2"):
        KVPool.allocate("page_first", spec=TINY, num_pages=2).view(0, "k", torch.bfloat16)  # heads of 5 bytes
    odd = Guarded(fresh(), Layout.named("page_first", EVEN, 2))  # starts at an odd address
    with pytest.raises(LayoutError, match="expected offsets in whole"):
        odd.pool.view(0, "k", torch.bfloat16)
    blocks = torch.zeros(2 * 2, 2, 8, 32, dtype=torch.uint8)  # pages of two kernel blocks
    split = Layout.from_tensors(
        KVSpec.attention(1, 16, 2, 16, 1), [blocks], "(page token) head token dim", components=("k", "v")
    )
    with pytest.raises(LayoutError, match="expected one stride an axis for a view"):
        KVPool(split, [blocks]).view(0, "k", torch.uint8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(((layer, "k", torch.uint8), "layer: expected 0 to 1, got ") for layer in (2, 40, -1, np.int64(-2), "k")),
        *(
            ((1, component, torch.uint8), r"component of layer 1: expected 'k', 'v' or 0 to 1, got ")
            for component in ("x", "", "K", 2, -1, np.int64(-1), 0.5, None)
        ),
        *(((1, "k", dtype), r"dtype: expected a torch\.dtype, got ") for dtype in ("bfloat16", np.uint8, 2, None)),
        *(
            ((1, "k", dtype), f"dtype: expected elements that divide heads of 12 bytes, got {dtype} of 8 bytes")
            for dtype in (torch.float64, torch.complex64)
        ),
    ],
)
def test_views_of_what_is_not_there_are_refused(words: Any, said: str) -> None:
    """Also once others were made: they are kept, and nothing else is found among them."""
    pool: Any = KVPool.allocate("vllm.LBNHC", spec=KVSpec.attention(2, 16, 2, 6, 2), num_pages=3)
    for _ in range(2):
        with pytest.raises(LayoutError, match=f"^{said}"):
            pool.view(*words)
        assert pool.view(np.int64(1), np.int64(1), torch.bfloat16).shape == (3, 16, 2, 6)
        assert pool.view(0, "k", torch.float32).shape == (3, 16, 2, 3), "wider ones, where they divide"


def test_pools_by_name_need_a_spec_and_a_size() -> None:
    with pytest.raises(LayoutError, match="expected spec and num_pages as well"):
        KVPool.allocate("page_first", spec=TINY)
    with pytest.raises(LayoutError, match="layout: expected one of page_first"):
        KVPool.allocate("page_last", spec=TINY, num_pages=3)
    pool = KVPool.allocate(Layout.page_first(TOKEN, 4))
    assert pool.num_pages == 4 and not pool.buffers[0].any() and pool.device.type == "cpu"
    assert repr(pool) == "KVPool('pool', page_first, 4 pages on cpu)"


def test_a_device_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"device: expected one that PyTorch knows, .* got 'gpu'"):
        KVPool.allocate("page_first", spec=TINY, num_pages=3, device="gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"expected a GPU for 'cuda:1', got .*; device='cpu' works without one"):
        KVPool.allocate("page_first", spec=TINY, num_pages=3, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="expected one of the 2 GPUs that PyTorch sees, got 'cuda:2'"):
        KVPool.allocate("page_first", spec=TINY, num_pages=3, device=torch.device("cuda", 2))


def test_buffers_that_do_not_fit_the_layout_are_refused() -> None:
    layout = Layout.named("sglang.layer_first", TINY, 4)
    buffers = [torch.zeros(n, dtype=torch.uint8) for n in layout.buffer_bytes]
    with pytest.raises(LayoutError, match=r"buffers: expected 6 for sglang.layer_first, got 5"):
        KVPool(layout, buffers[:-1])
    short = torch.zeros(layout.buffer_bytes[3] - 1, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=f"buffer 3: expected at least {layout.buffer_bytes[3]} bytes .*, got "):
        KVPool(layout, [*buffers[:3], short, *buffers[4:]])
    shifted = torch.zeros(layout.buffer_bytes[3] + 7, dtype=torch.uint8)[8:]  # enough storage, too little behind it
    with pytest.raises(LayoutError, match="buffer 3"):
        KVPool(layout, [*buffers[:3], shifted, *buffers[4:]])
    meta = torch.zeros(layout.buffer_bytes[3], dtype=torch.uint8, device="meta")
    with pytest.raises(LayoutError, match=r"expected one device, got \['cpu', 'meta'\]"):
        KVPool(layout, [*buffers[:3], meta, *buffers[4:]])


def test_page_ids_are_given_out_once_and_named_when_freed_wrongly() -> None:
    pool = KVPool.allocate("page_first", spec=TINY, num_pages=9, name="gpu0")
    a, b = pool.allocate_pages(4), pool.allocate_pages(5)
    assert pool.free_page_count == 0
    assert a.dtype == np.int64 and a.base is None and sorted([*a.tolist(), *b.tolist()]) == list(range(9))
    with pytest.raises(CapacityError, match="expected 1 free gpu0 pages, got 0 of 9"):
        pool.allocate_pages(1)
    pool.free_pages(a[:2])
    with pytest.raises(OwnershipError, match=rf"got \[{a[0]}\]: free already"):
        pool.free_pages(a[:1])
    with pytest.raises(OwnershipError, match=rf"distinct gpu0 pages, got \[{a[3]}\] more than once"):
        pool.free_pages([int(a[3]), int(a[3])])
    with pytest.raises(LayoutError, match="gpu0 page ids: expected 0 to 8, got 9 at position 1"):
        pool.free_pages([int(a[2]), 9])
    pool.free_pages(torch.from_numpy(a[2:]))
    assert pool.free_page_count == 4
    assert pool.allocate_pages(4).size == 4


def test_a_page_under_a_transfer_is_not_freed() -> None:
    pool = KVPool.allocate("page_first", spec=TINY, num_pages=6)
    pages = pool.allocate_pages(6)
    owner = object()
    pool.ledger.claim(np.array([2, 4]), owner)
    with pytest.raises(OwnershipError, match=r"got \[2\] still in flight after 0 s"):
        pool.free_pages(pages[:4])
    with pytest.raises(OwnershipError, match=r"got \[4\] still in flight"):
        pool.require_free([4, 5])
    pool.free_pages([0, 1, 3, 5])  # all or none: these are still ours to free
    waiter = threading.Thread(target=lambda: pool.free_pages([2, 4], wait_s=LIMIT_S))
    waiter.start()
    pool.ledger.release(owner)
    waiter.join(LIMIT_S)
    assert pool.allocate_pages(6).size == 6


def test_threads_never_get_one_page_twice() -> None:
    pool = KVPool.allocate("page_first", spec=TOKEN, num_pages=64)
    held = np.zeros(64, dtype=np.int64)
    clashes: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            try:
                got = pool.allocate_pages(int(rng.integers(1, 20)))
            except CapacityError:
                continue
            held[got] += 1
            if (held[got] != 1).any():
                clashes.append(got)
            held[got] -= 1
            pool.free_pages(rng.permutation(got))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not clashes and pool.allocate_pages(64).size == 64


def test_streams_are_declared_once_and_must_be_of_the_device() -> None:
    with FifoStream("a") as a, FifoStream("b") as b:
        pool = KVPool.allocate("page_first", spec=TINY, num_pages=2, streams=[a])
        assert pool.declares(a) and not pool.declares(b)
        pool.require_declared(a)
        with pytest.raises(TransferError, match=r"expected a stream declared for pool, got .*declare_stream"):
            pool.require_declared(b)
        pool.declare_stream(b)
        pool.declare_stream(b)
        assert pool.streams == [a, b]
    assert KVPool.allocate("page_first", spec=TINY, num_pages=2).streams == []
    meta = KVPool(Layout.page_first(TINY, 2), [torch.zeros(2 * TINY.page_bytes, dtype=torch.uint8, device="meta")])
    with pytest.raises(ConfigError, match="expected streams of meta, got"):
        meta.declare_stream(a)


@pytest.mark.parametrize("first", [True, False])
def test_views_are_made_once_and_can_be_written_to_in_any_mode(first: bool) -> None:
    spec = KVSpec.attention(2, 4, 1, 8, 2)
    pool = KVPool.allocate("sglang.layer_first", spec=spec, num_pages=3)
    with torch.inference_mode(first):
        view = pool.view(1, "k", torch.bfloat16)
        view.fill_(1)
    with torch.inference_mode(not first):
        assert pool.view(1, "k", torch.bfloat16) is view and pool.view(1, "v", torch.bfloat16) is not view
        view.fill_(2)
    with torch.no_grad():
        view.index_copy_(0, torch.tensor([1]), torch.full((1, 4, 1, 8), 3, dtype=torch.bfloat16))
    assert pool.view(1, 0, torch.bfloat16)[:, 0, 0, 0].tolist() == [2, 3, 2]
    assert pool.view(1, 0, torch.uint8).shape == (3, 4, 1, 16)
