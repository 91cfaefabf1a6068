"""Verifier: checks many records that were read, the large ones on several threads.

One thread reads 1 MiB that is not in a cache in 0.1 to 0.4 ms, which is as long as a fast disk takes for it. xxhash
gives the interpreter lock away for large input, so several threads check at once. Beside a busy Python thread that is
no gain: getting the lock back takes 5 ms a page. So where threads were seen to wait, one thread checks on with the lock
in its hand for a while.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.kernels.errors import RecordError
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.quick_check import QuickCheck, Records

_LARGE_BYTES = 256 << 10
_MOST_HELPERS = 3
_WAITED_S = 3e-3  # longer than a group is held up by anything but the interpreter lock
_GROUPS_ALONE = 64


class Verifier:
    """Checks records of ``payload_bytes`` with ``check``, on ``helpers`` threads and the caller's. Thread-safe.

    ``helpers`` None: one a CPU that this process may use, but for the caller's own, at most three.
    """

    def __init__(self, name: str, check: QuickCheck, payload_bytes: int, *, helpers: int | None = None) -> None:
        spare = min(_MOST_HELPERS, len(os.sched_getaffinity(0)) - 1) if helpers is None else helpers
        self._name, self._check = name, check
        self._helpers = spare if payload_bytes >= _LARGE_BYTES else 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._alone = 0  # groups to go with one thread

    def whole(self, records: Records, parts: Parts | None = None) -> list[RecordError | None]:
        """For each stored key and record, what is wrong with it (see `QuickCheck.whole`). ``parts``: of the buffers, if
        they are known."""
        if not self._helpers or len(records) < 2 or self._alone > 0:
            self._alone -= self._alone > 0
            return self._check.many(records, whole=True, parts=parts)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix=f"{self._name}-verify")
            pool = self._pool
        parts = Parts.of([buffer for _, buffer in records]) if parts is None else parts
        step = -(-len(records) // (self._helpers + 1))
        shares = [range(at, min(at + step, len(records))) for at in range(0, len(records), step)]
        try:
            others = [pool.submit(self._part, records, parts, share) for share in shares[1:]]
        except RuntimeError:  # no more threads, or the interpreter is ending: whoever waits for these waits still
            return self._check.many(records, whole=True, parts=parts)
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        found = self._part(records, parts, shares[0])
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        if wall_s - cpu_s > _WAITED_S + cpu_s:
            self._alone = _GROUPS_ALONE
        for other in others:
            found += other.result()
        return found

    def _part(self, records: Records, parts: Parts, share: range) -> list[RecordError | None]:
        mine = records[share.start : share.stop]
        return self._check.many(mine, whole=True, gives_lock=True, parts=parts.only(share))

    def close(self) -> None:
        """End the threads. Nothing may be under way."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
