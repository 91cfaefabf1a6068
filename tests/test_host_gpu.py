"""The host tier pinned by a real CUDA runtime."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.kernels.errors import CudaError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.pinning import CudaRegistrar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SPEC = KVSpec.attention(num_layers=3, page_size=16, kv_heads=5, head_dim=131, itemsize=2)  # 125,760 bytes a page


def rss_bytes() -> int:
    """Memory of this process, pinned pages of shared mappings included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("shared", [False, True])
def test_pages_at_chunk_boundaries_come_back(shared: bool) -> None:
    with HostTier(SPEC, capacity_bytes=1 << 30, chunk_bytes=64 << 20, shared=shared) as host:
        assert host.pinned and host.pin_reason.startswith("registered with cuda:")
        assert host.device_shift("cuda") in (0, host.device_shift())
        starts = host.chunk_slots.tolist()
        assert len(starts) >= 14
        slots = sorted({0, host.num_slots - 1, *starts, *(s - 1 for s in starts)})
        pages = host.payload.view(host.num_slots, host.slot_bytes)
        source = torch.randint(0, 256, (len(slots), host.slot_bytes), dtype=torch.uint8, device="cuda")
        for row, slot in enumerate(slots):
            pages[slot].copy_(source[row], non_blocking=True)
        torch.cuda.synchronize()
        back = torch.empty_like(source)
        for row, slot in enumerate(slots):
            assert torch.equal(pages[slot], source[row].cpu()), slot
            back[row].copy_(pages[slot], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, source)
        digests = torch.from_numpy(host.trailers[starts[0]])
        digests.copy_(source[0, :4096], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(digests, source[0, :4096].cpu())


def test_registering_twice_leaves_no_error_behind() -> None:
    registrar = CudaRegistrar()
    with HostTier(SPEC, capacity_pages=8) as host:
        with pytest.raises(CudaError, match="cudaHostRegister") as caught:
            registrar.register(host.address, host.slot_bytes)
        assert caught.value.code == 712
        with pytest.raises(CudaError, match="cudaHostUnregister"):
            registrar.unregister(host.address + 4096)
        assert torch.ones(9, device="cuda").sum().item() == 9  # a launch, and its check of the last error
        torch.cuda.synchronize()
        assert registrar._runtime.cudaGetLastError() == 0
    with HostTier(SPEC, capacity_pages=8) as again:  # all was unregistered
        assert again.pinned


def test_a_failed_chunk_is_undone() -> None:
    class FailsThird(CudaRegistrar):
        calls = 0

        def register(self, address: int, nbytes: int) -> None:
            self.calls += 1
            if self.calls == 3:
                address, nbytes = 4096, nbytes  # not ours: the driver refuses it
            super().register(address, nbytes)

    failing = FailsThird()
    with pytest.raises(CudaError, match="pinning chunk 3 of"):
        HostTier(SPEC, capacity_bytes=32 << 20, chunk_bytes=8 << 20, registrar=failing)
    assert torch.ones(9, device="cuda").sum().item() == 9
    with HostTier(SPEC, capacity_bytes=32 << 20, chunk_bytes=8 << 20) as host:
        assert host.pinned


def test_five_gib_cost_five_gib_and_the_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = 5 << 30
    before, begun = rss_bytes(), time.perf_counter()
    with HostTier(SPEC, capacity_bytes=asked) as host:
        seconds = time.perf_counter() - begun
        grown = rss_bytes() - before
        with capsys.disabled():
            print(f"\n5 GiB pinned in {seconds:.2f} s = {seconds / 5:.3f} s/GiB, resident {grown / asked:.4f} of it")
        assert 0.98 * asked <= grown <= 1.02 * asked
        assert host.num_slots == asked // (host.slot_bytes + host.trailer_bytes)
    assert rss_bytes() - before < 0.05 * asked


def test_memory_lies_on_the_gpus_node() -> None:
    with HostTier(SPEC, capacity_bytes=256 << 20) as host:
        if host.numa_node is None:
            pytest.skip("the system does not tell the GPU's NUMA node")
        if platform.machine() != "x86_64":
            pytest.skip("needs the number of the move_pages call")
        sample = np.linspace(0, host.payload.numel() - 1, 1000).astype(np.int64) // 4096 * 4096
        addresses = (ctypes.c_void_p * 1000)(*(host.address + sample).tolist())
        status = (ctypes.c_int * 1000)()
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.syscall(ctypes.c_long(279), 0, ctypes.c_ulong(1000), addresses, None, status, 0)
        if code:
            pytest.skip(f"move_pages: {os.strerror(ctypes.get_errno())}")
        assert sum(node == host.numa_node for node in status) > 990


def test_growing_in_the_background_while_copying() -> None:
    with HostTier(SPEC, capacity_bytes=3 << 30, background=True) as host:
        assert host.wait_ready(120, slots=1)
        slot = int(host.allocate(1)[0])
        data = torch.randint(0, 256, (host.slot_bytes,), dtype=torch.uint8, device="cuda")
        host.payload[slot * host.slot_bytes : (slot + 1) * host.slot_bytes].copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        assert host.wait_ready(120) and host.ready_slots == host.num_slots
        assert torch.equal(host.payload[slot * host.slot_bytes : (slot + 1) * host.slot_bytes], data.cpu())
