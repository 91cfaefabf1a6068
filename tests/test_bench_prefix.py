"""The prefix benchmark: its small form runs whole, and notices a wrong byte and a wrong token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_prefix
import pytest
import torch
from bench_prefix import SHAPES, Prefixed, Task, measure

from kvtransfer.integrations.prefix_cache import PrefixCache
from kvtransfer.integrations.prefix_run import PrefixRun


def test_small_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert bench_prefix.main(["--device", "cpu", "--repeats", "2", "--json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text())["result"]
    assert result["equal_tokens"] and result["equal_bytes"] and result["hits"] and result["prefix_tokens"] == 512
    assert result["load_bytes"] == 512 * 4 * 2 * 2 * 32 * 4
    assert result["warm_s"] > 0 and 0 < result["warm_share_low"] <= result["warm_share"] <= result["warm_share_high"]
    out = capsys.readouterr().out
    assert "warm / cold" in out and "bytes: equal" in out and "MISSED" not in out


@pytest.mark.gpu
def test_small_form_on_a_gpu() -> None:
    assert bench_prefix.main(["--model", "small", "--repeats", "2"]) == 0


def test_a_wrong_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrefixCache.forward

    def flipped(self: PrefixCache, model: Any, run: PrefixRun, options: dict[str, Any]) -> Any:
        for load in run.loads:
            load.result()
        if run.loads:
            view = run.cache.views(2, torch.uint8, torch.uint8)[1]
            view[int(run.cache.table.pages[9]), 3, 1, 0] ^= 1
        return real(self, model, run, options)

    monkeypatch.setattr(PrefixCache, "forward", flipped)
    with torch.no_grad():
        cpu = torch.device("cpu")
        work = Prefixed(Task.random(SHAPES["small"], cpu, 0), cpu, 16)
        try:
            result = measure(work, "small", 1, lambda _: None)
        finally:
            work.close()
    assert not result.equal_bytes and not result.exact and result.hits


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_prefix.main(["--device", "cpu", "--page-size", "7"])
    assert end.value.code == 2 and "divides 512" in capsys.readouterr().err
