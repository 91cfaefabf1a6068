"""Forwards that read a pool: decoder layers in the shapes of known models, over a prefix that may still be on its way.

Weights and cached values are normal random numbers in bf16. Random *bytes* would not do here: one bf16 in 256 of them
is no number or infinite, so that everything behind the first attention is NaN, and what products of NaN draw and take
says nothing about a model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rigs import Rig, Shape


@dataclass(frozen=True)
class Model:
    """Decoder layers of one shape; ``heads`` are those of K and V."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    heads: int
    dim: int

    def shape(self) -> Shape:
        """Its KV: K and V in bf16."""
        return Shape(self.name, self.layers, (("k", self.heads, 2 * self.dim), ("v", self.heads, 2 * self.dim)))


MODELS = {m.name: m for m in (Model("llama8b", 32, 4096, 14336, 32, 8, 128), Model("small", 16, 2048, 8192, 32, 8, 64))}
"""Llama 3's 8B, and its 1B as the small one."""

SHRUNK = {m.name: m for m in (Model("llama8b", 6, 32, 64, 2, 2, 16), Model("small", 3, 32, 64, 2, 1, 16))}
"""What stands for them on the CPU."""


def models_for(device: torch.device) -> dict[str, Model]:
    """Models by name, in a size that this device computes in milliseconds."""
    return MODELS if device.type == "cuda" else SHRUNK


class KVRig(Rig):
    """A rig whose pages hold normal random numbers in bf16: a model's K and V."""

    def __init__(
        self,
        model: Model,
        page_size: int,
        cached_tokens: int,
        device: torch.device,
        *,
        seed: int = 0,
        script: bool = True,
    ) -> None:
        shape = model.shape()
        total = shape.spec(page_size).page_bytes * (cached_tokens // page_size)
        super().__init__(shape, page_size, total, device, seed=seed, script=script)

    def scramble(self) -> None:
        """New random numbers in the whole pool, complete on return."""
        for buffer in self.pool.buffers:
            buffer.view(torch.bfloat16).normal_()
        self.synchronize()


class Layer(torch.nn.Module):
    """One decoder layer, computed as an eager forward does: attention of the new tokens over the cached ones in the
    pool and themselves (without a mask), and an MLP. ``keys``, ``values``: views of the pool's layer, [pages, tokens,
    heads, dim]; ``pages``: which of them hold the prefix, in order. Set by `Forward.bind`."""

    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__()
        self.model = model
        m, kv = model, model.heads * model.dim
        query = m.query_heads * m.dim

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02

        self.qkv, self.out = weight(m.hidden, query + 2 * kv), weight(query, m.hidden)
        self.up, self.down = weight(m.hidden, 2 * m.intermediate), weight(m.intermediate, m.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [new tokens, hidden], likewise returned."""
        m, new, kv = self.model, x.shape[0], self.model.heads * self.model.dim
        query = m.query_heads * m.dim
        q, k, v = (F.rms_norm(x, (m.hidden,)) @ self.qkv).split([query, kv, kv], -1)
        keys = torch.cat([self.keys[self.pages].view(-1, kv), k]).view(-1, m.heads, m.dim).transpose(0, 1)
        values = torch.cat([self.values[self.pages].view(-1, kv), v]).view(-1, m.heads, m.dim).transpose(0, 1)
        queries = q.view(new, m.query_heads, m.dim).transpose(0, 1)
        a = F.scaled_dot_product_attention(queries[None], keys[None], values[None], enable_gqa=True)[0]
        x = x + a.transpose(0, 1).reshape(new, query) @ self.out
        gate, up = (F.rms_norm(x, (m.hidden,)) @ self.up).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down


class Forward:
    """All layers of a model, on the rig's stream once `bind` has said which."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.layers = torch.nn.ModuleList(Layer(model, device) for _ in range(model.layers))
        self.stream: torch.cuda.Stream | None = None
        self._after: Callable[[], None] | None = None

    def bind(self, rig: Rig) -> None:
        """Read the prefix from ``rig.pages`` of the rig's pool from now on."""
        self.stream = rig.stream
        pages = torch.from_numpy(rig.pages).to(self.device)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            layer.keys, layer.values = (rig.pool.view(number, name, torch.bfloat16) for name in ("k", "v"))
            layer.pages = pages

    def release(self) -> None:
        """Let go of the rig's memory."""
        for layer in self.layers:
            del layer.keys, layer.values, layer.pages

    def tokens(self, count: int) -> torch.Tensor:
        """Random input of so many new tokens."""
        return torch.randn(count, self.model.hidden, device=self.device, dtype=torch.bfloat16)

    def __call__(self, x: torch.Tensor, after: Callable[[], None] | None = None) -> torch.Tensor:
        """The forward, on the current stream. ``after`` is called behind each layer."""
        after = self._after if after is None else after
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
                if after is not None:
                    after()
        return x

    def seconds(self, work: Callable[[], object]) -> float:
        """What ``work`` takes from its first call to the end of all that it leaves on the stream, which it finds
        current and idle. By the GPU's clock where there is one."""
        return self.marks(lambda mark: work())[-1]

    def marks(self, work: Callable[[Callable[[], None]], object]) -> list[float]:
        """Seconds from the begin of ``work`` to each of its calls of the mark that it is given, and to its end."""
        if self.stream is None:
            started = time.perf_counter()
            seen: list[float] = []
            work(lambda: seen.append(time.perf_counter() - started))
            return [*seen, time.perf_counter() - started]
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            begin, events = torch.cuda.Event(enable_timing=True), list[torch.cuda.Event]()

            def mark() -> None:
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()

            begin.record()
            work(mark)
            mark()
        events[-1].synchronize()
        return [float(begin.elapsed_time(event)) / 1e3 for event in events]

    def host_seconds(self, work: Callable[[], object], after: Callable[[], None] = lambda: None) -> list[float]:
        """Seconds of each layer of the one forward that ``work`` runs, by the host's clock, which takes no call of
        PyTorch: the first from the begin of ``work``, the last until all is through. ``after``: called behind each."""
        ends: list[float] = []

        def mark() -> None:
            ends.append(time.perf_counter())
            after()

        self._synchronize()
        self._after = mark
        try:
            with torch.cuda.stream(self.stream):  # None: nothing changes
                started = time.perf_counter()
                work()
        finally:
            self._after = None
        self._synchronize()
        ends[-1] = time.perf_counter()
        return [end - begin for begin, end in zip([started, *ends[:-1]], ends, strict=True)]

    def _synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def layer_seconds(self, x: torch.Tensor) -> list[float]:
        """What each layer takes in one forward alone."""
        ends = self.marks(lambda mark: self(x, mark))[: self.model.layers]
        return [end - begin for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]


def ideal_s(layer_s: Sequence[float], arrivals_s: Sequence[float]) -> float:
    """When a forward is through whose layer i may begin at ``arrivals_s[i]`` and takes ``layer_s[i]``:
    f_i = max(f_(i-1), arrival of layer i) + time of layer i."""
    done = 0.0
    for takes, arrives in zip(layer_s, arrivals_s, strict=True):
        done = max(done, arrives) + takes
    return done
