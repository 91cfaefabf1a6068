"""One rank of a prefill or a decode instance: bench/pd_demo.py starts it, and talks to it over its standard streams.

Reads a JSON line a request ({"ids": [...], "max_new_tokens": n}), answers with one. All ranks of an instance are asked
the same; a tensor-parallel one loads its part of the model by transformers' own plan, over gloo or NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from kvtransfer.config import load_config
from kvtransfer.demo_model import load_model
from kvtransfer.group import RankGroup
from kvtransfer.integrations.prefix_cache import PrefixCache
from kvtransfer.topology import Topology


def load(settings: dict[str, Any]) -> Any:
    """The model, or this rank's part of it."""
    device = torch.device(settings["device"])
    if settings["tp"] == 1:
        return load_model(settings["model"], False, device, Console(quiet=True)).model
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plan: dict[str, Any] = {"tp_plan": "auto"}
    if hasattr(transformers, "DistributedConfig"):
        plan = {"distributed_config": transformers.DistributedConfig(tp_plan="auto")}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(settings["model"], dtype=dtype, **plan).eval()


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print, in C++ too, do not answer
    torch.set_num_threads(1)
    model = load(settings)
    with ExitStack() as open_:
        ranks = None
        if settings["tp"] > 1:
            store = dist.FileStore(settings["meeting"], -1)  # type: ignore[attr-defined]
            ranks = RankGroup(Topology(tp=settings["tp"]), settings["rank"], store, name=settings["role"])
            open_.callback(ranks.close)
        prefixes = open_.enter_context(
            PrefixCache.create(
                model,
                load_config(arguments=settings["config"], environment={}),
                page_size=settings["page_size"],
                pool_tokens=settings["pool_tokens"],
                model_name=settings["name"],
                role=settings["role"],
                ranks=ranks,
            )
        )
        print(json.dumps({"ready": True}), file=answers, flush=True)
        cached: list[int] = []

        def inspect(_: object, hits: tuple[int, ...]) -> None:
            cached.append(hits[0])

        for line in sys.stdin:
            asked = json.loads(line)
            started = time.perf_counter()
            out = prefixes.generate(
                model,
                [asked["ids"]],
                max_new_tokens=asked["max_new_tokens"],
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                inspect=inspect,
            )
            took_s = time.perf_counter() - started
            prefixes.flush()
            answer = {"tokens": out[0, len(asked["ids"]) :].tolist(), "cached": cached[-1], "seconds": took_s}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
