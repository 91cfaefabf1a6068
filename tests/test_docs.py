"""The examples in README.md and docs/ run as they stand, on CPU tensors and with less memory."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import prompt, tiny_model

from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.registry import tier_factory

ROOT = Path(__file__).resolve().parent.parent


SMALLER = {
    'device="cuda"': 'device="cpu"',
    "num_pages=512": "num_pages=300",
    "capacity_pages=4096": "capacity_pages=300",
}


def python_blocks(page: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    for given, instead in SMALLER.items():
        blocks = [block.replace(given, instead) for block in blocks]
    return blocks


class Toy(torch.nn.Module):
    """Layers that hooks can hang on."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_readme(capsys: Any) -> None:
    use, declare = python_blocks("README.md")
    names: dict[str, Any] = {"model": Toy(32), "inputs": torch.zeros(1)}
    exec(use, names)
    assert "by path cpu" in capsys.readouterr().out
    shape = (5, 16, 8, 128)
    k, v = ([torch.randn(shape).to(torch.bfloat16) for _ in range(32)] for _ in "kv")
    names |= {"k_by_layer": k, "v_by_layer": v, "kv_by_layer": [torch.stack(pair) for pair in zip(k, v, strict=True)]}
    exec(declare, names)
    assert torch.equal(names["pool"].view(31, "v", torch.bfloat16), v[31])


def test_the_demo_takes_as_long_wherever_it_is_said() -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/demo.md")]
    said = [re.findall(r"(\d+ to \d+ s|\w+ minutes?) on two cores", page) for page in pages]
    assert [len(times) for times in said] == [1, 1] and said[0] == said[1]


def test_transformers_page(tmp_path: Path) -> None:
    prefix_cache, first, by_cache, by_hooks = python_blocks("docs/transformers.md")
    model = tiny_model("llama")
    names: dict[str, Any] = {"model": model, "ids": prompt(100)}
    exec(prefix_cache.replace("/nvme/kv", str(tmp_path)), names)
    assert torch.equal(names["out"], names["again"]) and names["rows"].shape == (2, 8)
    assert names["prefixes"].stats().cached_tokens == 96
    names["ids"] = prompt(2100)
    exec(first, names)
    assert names["out"].shape[1] > 2100

    from kvtransfer import HostTier, TransferEngine, layerwise
    from kvtransfer.integrations.transformers import PagedCache

    pool = names["pool"]
    with torch.no_grad(), HostTier(pool.spec, capacity_pages=250) as host, TransferEngine(pool, host) as engine:
        names |= {
            "engine": engine,
            "layerwise": layerwise,
            "cache": PagedCache(model, pool),
            "slots": host.allocate(125),
        }
        exec(by_cache, names)
        names["cache"].release()
        pages = pool.allocate_pages(125)
        names |= {"cache": PagedCache(model, pool, pages), "pages": pages, "slots": host.allocate(125)}
        exec(by_hooks, names)
        names["handle"].result()


def test_tiers_page(capsys: Any, tmp_path: Path) -> None:
    first, resizing, disk, redis, mooncake, objects, movement, sharing, faulty = python_blocks("docs/tiers.md")
    for block in (first, resizing, movement, sharing, faulty):
        exec(block, {})
    told = capsys.readouterr().out
    assert "MISS" in told and "0 pages to load" in told
    spec = KVSpec.attention(2, 16, 2, 64, 2)
    with HostTier(spec, capacity_pages=4, device="cpu") as host:
        names: dict[str, Any] = {"spec": spec, "whole_spec": spec, "host": host}
        exec(disk.replace("/nvme", f"{tmp_path}/nvme").replace("2 << 40", "64 << 20"), names)
        assert names["tier"].stats().capacity_bytes > 7 << 20
        names["tier"].close()
    for block in (redis, mooncake, objects):  # these need servers: their settings are real ones at least
        for call in ast.parse(block).body:
            assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
            (kind,) = call.value.args
            assert isinstance(kind, ast.Constant) and isinstance(kind.value, str)
            known = inspect.signature(tier_factory(kind.value)).parameters
            assert {keyword.arg for keyword in call.value.keywords} <= set(known)


def test_metrics_page() -> None:
    (block,) = python_blocks("docs/metrics.md")
    exec(block.replace('{"pages": 4096}', '{"pages": 100, "pin": False}'), {})


def test_cache_page(capsys: Any, tmp_path: Path) -> None:
    use, two, *_ = python_blocks("docs/index_and_cache.md")  # the others are in test_directory.py
    exec(use.replace('{"pages": 4096}', '{"pages": 100, "pin": False}'), {})
    assert "992 tokens: {'host': 992}" in capsys.readouterr().out
    script = tmp_path / "two.py"
    script.write_text(two)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
