"""Prefill and decode in processes of their own that share KV through a store: two turns of a conversation.

    python bench/pd_demo.py --redis redis://127.0.0.1:6379
    python bench/pd_demo.py --random-weights --prefill-tp 1 --decode-tp 2

Turn 1: the prefill instance computes the prompt, stores it, and gives the first token. The decode instance is told the
prompt, loads it, and writes the answer, which it stores as well. Turn 2, the conversation so far and another question:
prefill finds what decode has written. Both instances may have several ranks, and need not have as many.
The tokens must be those of one process that computes everything itself, and what one has stored must have reached the
other. Exit status 1 if not, 2 for bad input or an instance that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
from report import print_table
from rich.console import Console
from serving_local import LEFT_S

from kvtransfer.demo_model import load_model, read_prompt
from kvtransfer.integrations.local_engine import KeptPrefixes, LocalEngine
from kvtransfer.kernels.errors import ConfigError, KVTransferError, ServerError

QUESTIONS = ("\n\nWhat is the text about?\n", "\n\nAnd what else does it say?\n")
WORKER = Path(__file__).with_name("pd_worker.py")
START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True)
class Step:
    """What one instance did in one turn."""

    turn: int
    instance: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    tokens: list[int]


@dataclass(frozen=True)
class Outcome:
    """``equal``: every token is the one that a single process writes; ``turn1_tokens``: prompt and answer."""

    steps: list[Step]
    equal: bool
    turn1_tokens: int


class Instance:
    """The ranks of one role. Requests go to all of them; their answers must be alike."""

    def __init__(
        self,
        role: str,
        tp: int,
        settings: dict[str, Any],
        folder: Path,
        worker: Path = WORKER,
    ) -> None:
        self.name = f"{role} (tp {tp})"
        port = free_port()
        self._ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(tp):
                mine = {**settings, "role": role, "tp": tp, "rank": rank, "meeting": str(folder / f"{role}-ranks")}
                environment = dict(os.environ)
                if tp > 1:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp)}
                    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                command = [sys.executable, str(worker), json.dumps(mine)]
                log = (folder / f"{role}-{rank}.log").open("w")
                with log:
                    self._ranks.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=log,
                            text=True,
                            env=environment,
                        )
                    )
            self._logs = [folder / f"{role}-{rank}.log" for rank in range(tp)]
            self._answers()
        except BaseException:
            self.close()
            raise

    def ask(self, turn: int, ids: list[int], max_new_tokens: int) -> Step:
        """All ranks answer the same, or ServerError."""
        for number, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            try:
                rank.stdin.write(json.dumps({"ids": ids, "max_new_tokens": max_new_tokens}) + "\n")
                rank.stdin.flush()
            except OSError as error:
                raise self._ended(number) from error
        answers = self._answers()
        first = answers[0]
        if any((a["tokens"], a["cached"]) != (first["tokens"], first["cached"]) for a in answers):
            raise ServerError(f"{self.name}: expected the same of all ranks, got {answers}")
        return Step(turn, self.name, len(ids), first["cached"], first["seconds"], first["tokens"])

    def close(self) -> None:
        """End the ranks: their input ends, then they do. Where one has died the others may wait for it: they are ended
        at once, as are those that take longer than ``STOP_S``."""
        until = time.monotonic() + (STOP_S if all(rank.poll() in (None, 0) for rank in self._ranks) else 0)
        for rank in self._ranks:
            if rank.stdin is not None:
                with suppress(OSError):  # what was left to write has no reader any more
                    rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()

    def _answers(self) -> list[Any]:
        """A line of each rank, in whatever order they come: when one dies the others may never answer."""
        lines: dict[int, str] = {}
        while len(lines) < len(self._ranks):
            silent = {rank.stdout: number for number, rank in enumerate(self._ranks) if rank.stdout is not None}
            silent = {answers: number for answers, number in silent.items() if number not in lines}
            for answers in select.select(list(silent), [], [])[0]:
                line = answers.readline()
                if not line:
                    raise self._ended(silent[answers])
                lines[silent[answers]] = line
        return [json.loads(lines[number]) for number in range(len(self._ranks))]

    def _ended(self, number: int) -> ServerError:
        rank = self._ranks[number]
        try:
            status = str(rank.wait(STOP_S))
        except subprocess.TimeoutExpired:
            status = "unknown"
        said = self._logs[number].read_text(errors="replace")[-2000:]
        return ServerError(f"{self.name}: a rank ended with status {status}:\n{said}")


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Both turns, and the same in one process. Raises ServerError if an instance fails."""
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kvtransfer-pd-")))
        remote = _remote(args, folder, open_)
        model_path = _random_model(folder) if args.random_weights else args.model
        loaded = load_model(model_path, False, torch.device("cpu"), console)
        encode = (lambda text: list(text.encode())) if args.random_weights else loaded.encode
        text = read_prompt(None)
        config: dict[str, Any] = {
            "tiers": {"host": {"pages": args.host_pages}, "remote": remote},
            "prefetch": {"min_tokens": 0},
            "share_across_tp": lcm(args.prefill_tp, args.decode_tp),
        }
        settings = {
            "device": "cpu",
            "model": model_path,
            "config": config,
            "page_size": args.page_size,
            "pool_tokens": 4 * (args.prompt_tokens + 3 * args.max_new_tokens),
            "name": f"pd-{folder.name}",
        }
        instances = []
        for role, tp in (("prefill", args.prefill_tp), ("decode", args.decode_tp)):
            console.print(f"starting {role}, {tp} rank{'s' if tp > 1 else ''}")
            instances.append(Instance(role, tp, settings, folder))
            open_.callback(instances[-1].close)
        prefill, decode = instances
        alone = LocalEngine(loaded.model, encode, loaded.decode, KeptPrefixes(), page_size=args.page_size)
        steps: list[Step] = []
        equal, ids, turn1_tokens = True, encode(text)[: args.prompt_tokens], 0
        for turn, question in enumerate(QUESTIONS, 1):
            ids = ids + encode(question)
            steps.append(prefill.ask(turn, ids, 1))
            steps.append(decode.ask(turn, ids, args.max_new_tokens))
            wanted = [int(token) for token in alone.complete(ids, args.max_new_tokens, ignore_eos=True).tokens]
            equal = equal and steps[-1].tokens == wanted and steps[-2].tokens == wanted[:1]
            ids = ids + steps[-1].tokens
            turn1_tokens = turn1_tokens or len(ids)
        return Outcome(steps, equal, turn1_tokens)


def missing(outcome: Outcome, page_size: int) -> list[str]:
    """Steps that had to compute what another had stored: without the store tokens are equal too."""
    found = []
    for step in outcome.steps:
        wanted = min(step.prompt_tokens // page_size * page_size, step.prompt_tokens - 1)
        if step.instance.startswith("prefill"):  # the last token of the first turn was never computed
            wanted = (outcome.turn1_tokens - 1) // page_size * page_size if step.turn > 1 else 0
        if step.cached_tokens < wanted:
            found.append(f"turn {step.turn}, {step.instance}: expected {wanted:,} cached, got {step.cached_tokens:,}")
    return found


def show(outcome: Outcome, missed: Sequence[str] = ()) -> None:
    """A table, what did not come through the store, and the verdict as the last line."""
    rows = [
        [str(s.turn), s.instance, f"{s.prompt_tokens:,}", f"{s.cached_tokens:,}", f"{s.seconds:.2f}"]
        for s in outcome.steps
    ]
    print_table("prefill and decode", ["turn", "instance", "prompt tokens", "cached", "seconds"], rows, left=2)
    print(f"after turn 1 there were {outcome.turn1_tokens:,} tokens of prompt and answer")
    for line in missed:
        print(f"not shared: {line}")
    print(f"tokens equal: {'yes' if outcome.equal else 'no'}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--redis", help="redis://host:port; a server is started unless a store is given")
    out.add_argument("--mooncake", help="host:port of a Mooncake master")
    out.add_argument("--model", help="folder, GGUF file or id (SmolLM2-135M); several ranks need a folder or an id")
    out.add_argument("--random-weights", action="store_true", help="a tiny random model with four KV heads")
    out.add_argument("--prefill-tp", type=int, default=1, help="ranks of the prefill instance")
    out.add_argument("--decode-tp", type=int, default=1, help="ranks of the decode instance")
    out.add_argument("--prompt-tokens", type=int, default=300, help="of the text, at most")
    out.add_argument("--max-new-tokens", type=int, default=24)
    out.add_argument("--page-size", type=int, default=16)
    out.add_argument("--host-pages", type=int, default=512)
    args = out.parse_args(argv)
    counts = (args.prefill_tp, args.decode_tp, args.prompt_tokens, args.max_new_tokens, args.page_size, args.host_pages)
    if min(counts) < 1:
        out.error("expected numbers above 0")
    if args.redis is not None and args.mooncake is not None:
        out.error("--redis, --mooncake: expected one store, got both")
    if args.model and args.random_weights:
        out.error("--model, --random-weights: expected one of them, got both")
    if max(args.prefill_tp, args.decode_tp) > 1 and not (args.random_weights or args.model):
        out.error("--prefill-tp, --decode-tp: several ranks need --model FOLDER or --random-weights")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = parse(argv)
    try:
        outcome = run(args, Console(stderr=True, highlight=False))
    except KVTransferError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    missed = missing(outcome, args.page_size)
    show(outcome, missed)
    return 0 if outcome.equal and not missed else 1


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _remote(args: argparse.Namespace, folder: Path, open_: ExitStack) -> dict[str, Any]:
    """Options of the shared tier."""
    if args.redis is not None:
        return {"kind": "redis", "url": args.redis, "ttl_s": LEFT_S}
    if args.mooncake is not None:
        return {"kind": "mooncake", "master": args.mooncake, "hostname": "127.0.0.1"}
    return {"kind": "redis", "url": open_.enter_context(_own_redis(folder))}


@contextmanager
def _own_redis(folder: Path) -> Iterator[str]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise ConfigError("expected --redis URL or --mooncake HOST:PORT, since there is no redis-server here; got none")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
                break
            except OSError as error:
                if server.poll() is not None or time.monotonic() > end:
                    raise ConfigError(f"{binary} does not serve on port {port}: {error}") from error
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _random_model(folder: Path) -> str:
    """A small Llama over bytes with four KV heads, saved where ranks can read their parts of it."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.2,  # large enough that different tokens come out
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    path = folder / "model"
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return str(path)


def _byte_tokenizer() -> Any:
    """Enough of a tokenizer for `load_model`; the demo encodes bytes itself."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ranks and the store are ended
    sys.exit(main())
