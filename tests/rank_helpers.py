"""Ranks as processes: started, waited for, and what each of them found."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtransfer.group import RankGroup
from kvtransfer.topology import Topology

PRELOAD = ["torch", "torch.distributed", "kvtransfer.rank_slots", "rank_work"]


@dataclass
class Ended:
    """How a rank ended: what its work returned, or the error's text, or neither if it was killed."""

    value: Any = None
    error: str = ""
    exitcode: int | None = None


def run_ranks(
    topology: Topology,
    work: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    limit_s: float = 120.0,
    absent: tuple[int, ...] = (),
    **group: Any,
) -> dict[int, Ended]:
    """``work(group, *arguments)`` on every rank of ``topology`` but those ``absent``, each a process of its own.

    Ends what is left when the time is up. ``group``: arguments for `RankGroup`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    children = {}
    for rank in range(topology.size):
        if rank not in absent:
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(
                target=_main, args=(theirs, topology, rank, work, str(folder / "store"), arguments, group)
            )
            child.start()
            theirs.close()
            children[rank] = (child, mine)
    until = time.monotonic() + limit_s
    ended = {}
    for rank, (_, pipe) in children.items():
        ended[rank] = Ended(error="nothing came in time")
        try:
            if pipe.poll(max(0.0, until - time.monotonic())):
                ended[rank] = pipe.recv()
        except EOFError:
            ended[rank] = Ended()
    for rank, (child, pipe) in children.items():
        child.join(max(0.1, min(5.0, until - time.monotonic())))
        if child.is_alive():
            child.kill()
            child.join()
        ended[rank].exitcode = child.exitcode
        pipe.close()
    return ended


def values(ended: dict[int, Ended]) -> list[Any]:
    """What all ranks returned; fails with their errors if one did not."""
    errors = {rank: end.error for rank, end in ended.items() if end.error or end.exitcode}
    assert not errors, "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())
    return [ended[rank].value for rank in sorted(ended)]


def _main(
    pipe: Connection, topology: Topology, rank: int, work: Any, store: str, arguments: Any, group: dict[str, Any]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    try:
        with RankGroup(topology, rank, FileStore(store, -1) if topology.size > 1 else None, **group) as ranks:
            ended = Ended(work(ranks, *arguments))
    except BaseException:
        ended = Ended(error=traceback.format_exc())
    pipe.send(ended)
    pipe.close()
