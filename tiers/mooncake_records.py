"""MooncakeRecords: records through Mooncake's client, as two pieces each or, over memory of the tier's own, as one.

Over TCP the client makes a request of each piece, which costs it 0.1 ms of CPU: as much as copying 1 MiB. A record of
64 KiB and its trailer take 0.37 ms as two pieces, 0.28 as one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.kernels.errors import TierError, UnavailableError
from kvtransfer.tiers.bounce import Bounce
from kvtransfer.tiers.jobs import Job
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record_native import record_tools


class MooncakeRecords:
    """See the module. For the workers of one tier.

    store, config  the client, and its settings for puts
    bounce_bytes   longest record that goes as one piece; where there is no compiler none does
    job_pages      most records in a call
    ready          registers memory with the client; False: that is not set up. Raises TierError
    fell_back      is told why records go as two pieces
    """

    def __init__(
        self,
        store: Any,
        config: Any,
        bounce_bytes: int,
        job_pages: int,
        ready: Callable[[NDArray[np.uint8]], bool],
        fell_back: Callable[[str], None],
    ) -> None:
        self._store, self._config = store, config
        self._bounce_bytes, self._job_pages = bounce_bytes, job_pages
        self._ready, self._fell_back = ready, fell_back
        record_tools()  # built now, not in a worker's first call, whose time is limited
        self._bounces: dict[int, Bounce] = {}  # by thread
        self._refused: set[int] = set()  # threads that got none

    def get(self, names: list[str], job: Job) -> Iterator[tuple[list[int], list[int], bytes]]:
        """(positions, codes, which were found whole already) until every page has its code. The client fills one buffer
        of an object in a call: one named twice takes two."""
        places = list(range(len(names)))
        while places:
            first = list({names[at]: at for at in reversed(places)}.values())[::-1]
            asked, parts = [names[at] for at in first], job.parts.only(first)
            bounce, each = self._bounce_for(parts)
            if bounce is None:
                yield first, self._store.batch_get_into_multi_buffers(asked, *_pointers(parts)), bytes(len(first))
            else:
                sources = bounce.places(len(first), each)
                codes = self._store.batch_get_into(asked, sources, [each] * len(first))
                came = [i for i, code in enumerate(codes) if code == each]
                good = bytearray(len(first))
                found = bounce.unpack([sources[i] for i in came], [job.keys[first[i]] for i in came], parts.only(came))
                for i, whole in zip(came, found, strict=True):
                    good[i] = whole
                yield first, codes, bytes(good)
            done = set(first)
            places = [at for at in places if at not in done]

    def put(self, names: list[str], parts: Parts) -> list[int]:
        """Store records; the client's code of each."""
        bounce, each = self._bounce_for(parts)
        codes: list[int]
        if bounce is None:
            codes = self._store.batch_put_from_multi_buffers(names, *_pointers(parts), self._config)
        else:
            codes = self._store.batch_put_from(names, bounce.pack(parts, each), [each] * len(names), self._config)
        return codes

    def _bounce_for(self, parts: Parts) -> tuple[Bounce | None, int]:
        """The calling thread's, if these records (of one job) go over it; and the length of each."""
        each = int(parts.sizes[0].sum())
        goes = each <= self._bounce_bytes and bool((parts.sizes == parts.sizes[0]).all())
        return (self._bounce() if goes else None), each

    def _bounce(self) -> Bounce | None:
        """The calling thread's, made at first use; None where there is none, or where the client took no more memory:
        records go as two pieces then."""
        me, tools = threading.get_ident(), record_tools()
        if me not in self._bounces and me not in self._refused and tools is not None:
            made = Bounce(self._bounce_bytes * self._job_pages, tools)
            try:
                if self._ready(made.memory):
                    self._bounces[me] = made
            except UnavailableError:
                raise  # the store, not the memory
            except TierError as error:
                self._refused.add(me)
                self._fell_back(f"records go as two pieces, more slowly: {error}")
        return self._bounces.get(me)

    def memory(self) -> list[NDArray[np.uint8]]:
        """What was registered."""
        return [bounce.memory for bounce in self._bounces.values()]


def _pointers(parts: Parts) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths of the two parts of each record."""
    return parts.where.tolist(), parts.sizes.tolist()
