"""Without a GPU: tests marked `gpu` are skipped, and Triton kernels run under Triton's interpreter.

With several processes (`pytest -n 2`) each computes with one thread, and so do the processes that it starts: as many
threads as cores in each of them would mostly wait for each other.

Engines that are not installed have stand-ins in tests/stubs, which come last: where the real one is, it is taken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "stubs"))

HAS_GPU = torch.cuda.is_available()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not HAS_GPU:
    # Read by triton when a kernel is decorated, so before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
