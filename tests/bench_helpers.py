"""What tests of benchmarks share."""

from __future__ import annotations

import pytest

from kvtransfer import lanes


def spoil(monkeypatch: pytest.MonkeyPatch, *, loads_alone: bool = False) -> None:
    """Every relayout leaves one wrong byte where it wrote; ``loads_alone``: those into pools of many buffers."""
    real = lanes.run_on_cpu

    def wrong(task: lanes.RelayoutTask) -> None:
        real(task)
        if task.store and task.dst_ids is not None and (len(task.dst) > 1 or not loads_alone):
            entry, at = task.geometry.entries[-1], int(task.dst_ids[task.first])
            task.dst[entry.dst_buffer].view(-1)[entry.dst_offset + at * entry.dst_page_stride] ^= 1

    monkeypatch.setattr(lanes, "run_on_cpu", wrong)
