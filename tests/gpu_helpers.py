"""What the GPU tests share: random pools with guards, page-first references, a stream that is kept busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.engine import TransferEngine
from kvtransfer.kernels.coalesce import Box, Side, coalesce
from kvtransfer.kernels.layout import Layout
from kvtransfer.kernels.relayout import relayout_reference
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.pool import KVPool
from kvtransfer.tiers.host import HostTier

GUARD = 256
MS = 1_900_000  # cycles of torch.cuda._sleep in about a millisecond


@dataclass
class Rig:
    """A pool of random bytes inside guard bytes, a pinned slab, and an engine between them."""

    pool: KVPool
    host: HostTier
    engine: TransferEngine
    whole: list[torch.Tensor]  # the pool's buffers with their guards

    def page_first(self, pages: NDArray[np.int64]) -> torch.Tensor:
        """The bytes of pool pages in page-first order, on the CPU, by plain torch: uint8 [n, page_bytes]."""
        spec = self.pool.spec
        target = Layout.page_first(spec, len(pages))
        geometry = coalesce(spec, Side.of(self.pool.layout), Side.of(target), Box.whole(spec), order="dst")
        out = torch.empty(target.buffer_bytes[0], dtype=torch.uint8, device=self.pool.device)
        ids = torch.from_numpy(np.asarray(pages)).to(self.pool.device)
        relayout_reference(geometry, self.pool.buffers, [out], ids, torch.arange(len(pages), device=self.pool.device))
        return out.view(len(pages), spec.page_bytes).cpu()

    def slots(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """The bytes of host slots without padding: uint8 [n, page_bytes], a copy."""
        rows = self.host.payload.view(-1, self.host.slot_bytes)
        return rows[torch.from_numpy(np.asarray(slots)), : self.pool.spec.page_bytes].clone()

    def fill_slots(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """New random bytes in host slots; digests dropped. Returns them: uint8 [n, page_bytes]."""
        bytes_ = torch.randint(0, 256, (len(slots), self.pool.spec.page_bytes), dtype=torch.uint8)
        rows = self.host.payload.view(-1, self.host.slot_bytes)
        rows[torch.from_numpy(np.asarray(slots)), : self.pool.spec.page_bytes] = bytes_
        self.host.digests[slots] = 0
        return bytes_

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def make_rig(
    layout: str,
    spec: KVSpec,
    *,
    pages: int,
    slots: int,
    device: str = "cuda",
    streams: list[torch.cuda.Stream] | None = None,
    staging_bytes: int = 12 << 20,
    path: str = "auto",
    verify: bool = True,
    chunk_bytes: int = 64 << 30,
    script: bool = True,
) -> Rig:
    """See `Rig`. ``chunk_bytes`` is the largest registration of the slab."""
    declared = Layout.named(layout, spec, pages)
    whole = [torch.randint(0, 256, (n + 2 * GUARD,), dtype=torch.uint8, device=device) for n in declared.buffer_bytes]
    pool = KVPool(
        declared, [w[GUARD : GUARD + n] for w, n in zip(whole, declared.buffer_bytes, strict=True)], streams=streams
    )
    host = HostTier(spec, capacity_pages=slots, device=device, chunk_bytes=chunk_bytes)
    engine = TransferEngine(pool, host, staging_bytes=staging_bytes, path=path, verify=verify, script=script)
    torch.cuda.synchronize(pool.device)
    return Rig(pool, host, engine, whole)


def shuffled(count: int, limit: int, seed: int) -> NDArray[np.int64]:
    """``count`` distinct ids below ``limit`` in random order."""
    return np.random.default_rng(seed).permutation(limit)[:count].astype(np.int64)


def spin(stream: torch.cuda.Stream, milliseconds: float) -> None:
    """Keep ``stream`` busy for about that long."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * MS))
