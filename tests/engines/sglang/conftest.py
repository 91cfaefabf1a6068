"""SGLang compiles its page hash at first use, which takes longer than its time-outs: once, before the tests."""

from __future__ import annotations

import os
from array import array

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # there is no model: nothing is to be asked for one


@pytest.fixture(scope="session", autouse=True)
def page_hash() -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    assert len(get_storage_hash_str(RadixKey(array("q", range(8))), None, page_size=4)) == 2
