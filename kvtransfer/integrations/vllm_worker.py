"""The worker's half of the vLLM connector: a `Mover` over the worker's own KV memory. It decides nothing.

What a step is to move goes out in two parts: everything but stores when loads are started, stores once the forward has
been launched, so that their fences cover what it writes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from kvtransfer.commands import CODES, OK, Ack, Command, Load, Store, decode, encode, ids, positions
from kvtransfer.config import Config
from kvtransfer.engine import TransferEngine
from kvtransfer.integrations.vllm_facts import EngineFacts
from kvtransfer.integrations.vllm_layout import EnginePool, engine_pool, whole_spec
from kvtransfer.integrations.vllm_messages import StepAnswers, StepMetadata, WorkerFacts
from kvtransfer.kernels.condition import Condition
from kvtransfer.kernels.errors import DeadlineExceeded, KVTransferError, TransferError
from kvtransfer.mover import Mover
from kvtransfer.tier_build import TierMaker
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.host import HostTier

if TYPE_CHECKING:
    from kvtransfer.layer_loads import LayerLoad

logger = init_logger(f"vllm.{__name__}")
GRACE_S = 10.0  # beyond the engine's own deadline, in which every load ends


class WorkerHalf:
    """Moves for one worker. Called by vLLM's model runner, on its thread."""

    def __init__(self, config: Config, facts: EngineFacts) -> None:
        self._config, self._facts = config, facts
        self._close = ExitStack()
        self._view: EnginePool | None = None
        self._mover: Mover | None = None
        self._numbers: dict[str, int] = {}
        self._hooked: set[int] = set()  # layers whose attention has been seen to wait
        self._loads: list[LayerLoad] = []  # of this step
        self._stores: list[Command] = []
        self._watched: dict[int, Load] = {}  # layer-wise loads of this step, by command
        self._news = Condition()
        self._answers: list[Ack] = []
        self._verdicts: dict[int, Ack] = {}
        self._begun: dict[int, tuple[str, int, float]] = {}  # for the figures: kind, pages, since when
        self._counts: defaultdict[str, float] = defaultdict(float)

    # --- memory

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV memory is there: make the host memory, the engine and the tiers. Raises ConfigError,
        LayoutError, CapacityError; nothing is left behind then."""
        if self._mover is not None:
            raise TransferError("register_kv_caches: expected one call; unregister first")
        config, facts = self._config, self._facts
        with ExitStack() as undo:
            view = engine_pool(kv_caches, facts.num_blocks, facts.block_size)
            pool = view.pool
            settings = config.host.sized(pool.num_pages * pool.spec.page_bytes)
            host = HostTier(pool.spec, device=pool.device, **{**settings, "background": False})
            undo.callback(host.close)
            engine = TransferEngine(pool, host, **config.engine_settings())
            undo.callback(engine.close)
            owners = facts.ranks * facts.replicas_of_engine * config.instances
            namespace = facts.namespace(self.spec_of(view))
            maker = TierMaker(pool.spec, namespace, facts.place(config.instance), owners)
            tiers = {}
            for name, options in config.lower_tiers.items():
                tier = tiers[name] = maker(name, options)
                undo.callback(tier.close)
            mover = Mover(engine, tiers, shard=facts.shard(pool.spec.num_layers), deadline_s=config.deadline_s)
            undo.callback(mover.close)
            mover.answer = self._answered
            self._close = undo.pop_all()
        self._view, self._mover, self._numbers = view, mover, view.number()
        logger.info(
            "kvtransfer: rank %d: %r; %d pages of %d bytes in host memory (%s); tiers: %s",
            facts.rank,
            pool,
            host.num_slots,
            pool.spec.page_bytes,
            "pinned" if host.pinned else f"not pinned: {host.pin_reason}",
            ", ".join(tiers) or "none",
        )

    def spec_of(self, view: EnginePool) -> str:
        """Canonical text of what a page of the whole model holds."""
        return whole_spec(view.pool.spec, self._facts.head_parts).canonical()

    def told(self) -> WorkerFacts | None:
        """For the scheduler's half; None before there is memory."""
        if self._mover is None or self._view is None:
            return None
        return WorkerFacts(self._mover.facts(), self.spec_of(self._view))

    def unregister(self) -> None:
        """Finish what is under way and let go of the engine's memory. Idempotent."""
        self._close.close()
        self._view = self._mover = None

    # --- a step

    def start_loads(self, step: StepMetadata) -> None:
        """Begin everything but stores. Layers of loads that this step's forward uses are waited for as it comes to
        them; those that no attention is known to wait for, here."""
        mover = self._mover
        if mover is None:
            return
        self._declare_stream()
        commands = [command for data in step.commands if not isinstance(command := decode(data), Ack)]
        self._stores = [command for command in commands if isinstance(command, Store)]
        others = [command for command in commands if not isinstance(command, Store)]
        with self._news:
            self._watched = {c.id: c for c in others if isinstance(c, Load) and c.layerwise}
        self._submit(others)
        numbers = dict.fromkeys(load.load for load in self._watched.values())
        self._loads = [loads for number in numbers if (loads := self._load(number)) is not None]
        if self._loads:
            assert self._view is not None
            for layer in range(len(self._view.layers)):
                if layer not in self._hooked:
                    self._wait(layer)

    def wait_layer(self, name: str) -> None:
        """Have the current stream wait for this layer of the step's loads."""
        layer = self._numbers.get(name)
        if layer is None:
            return
        self._hooked.add(layer)
        if self._loads:
            self._declare_stream()
            self._wait(layer)

    def end_forward(self) -> None:
        """The forward has been launched: begin its stores."""
        for loads in self._loads:  # of layers that it never came to
            try:
                loads.wait_all()
            except KVTransferError as error:
                logger.debug("kvtransfer: a load failed: %s", error)
        self._declare_stream()
        stores, self._stores = self._stores, []
        self._submit(stores)

    def failed_blocks(self) -> set[int]:
        """Blocks that layer-wise loads of this step did not fill rightly. Waits for their verdict, which comes before
        the forward is through: its tokens must not be used otherwise."""
        self._loads = []
        limit_s = self._config.deadline_s + GRACE_S
        until = time.monotonic() + limit_s
        failed: set[int] = set()
        for number, load in self._watched.items():
            with self._news:
                if not self._news.wait_for(lambda: number in self._verdicts, until - time.monotonic()):  # noqa: B023
                    raise DeadlineExceeded(f"load of {positions(load)} pages: no verdict after {limit_s:g} s")
                ack = self._verdicts.pop(number)
            pages = ids(load.pages)
            failed.update(int(pages[at]) for at, code in enumerate(ack.statuses) if code != OK)
        with self._news:
            self._watched = {}
        return failed

    def take_answers(self) -> StepAnswers | None:
        """What became of commands since the last call, in the order in which it was found out."""
        with self._news:
            acks, self._answers = self._answers, []
        return StepAnswers({self._facts.rank: [encode(ack) for ack in acks]}) if acks else None

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._news:
            taken, self._counts = self._counts, defaultdict(float)
        return dict(taken)

    # --- inside

    def _submit(self, commands: Sequence[Command]) -> None:
        if not commands or self._mover is None:
            return
        now = time.monotonic()
        with self._news:
            for command in commands:
                if isinstance(command, Load | Store):
                    kind = "load" if isinstance(command, Load) else "store"
                    self._begun[command.id] = kind, positions(command), now
        self._mover.submit(commands)

    def _load(self, number: int) -> LayerLoad | None:
        assert self._mover is not None
        try:
            return self._mover.load(number)
        except TransferError as error:  # it was refused: its answer says so
            logger.warning("kvtransfer: a load was not begun: %s", error)
            return None

    def _wait(self, layer: int) -> None:
        for loads in self._loads:
            try:
                loads.wait_layer(layer)
            except KVTransferError as error:  # its answer names the pages; what the forward makes of them is discarded
                logger.debug("kvtransfer: layer %d: %s", layer, error)

    def _declare_stream(self) -> None:
        """Transfers are ordered against the stream that the engine uses now."""
        assert self._view is not None
        pool = self._view.pool
        if pool.device.type == "cuda":
            stream = torch.cuda.current_stream(pool.device)
            if not pool.declares(stream):
                pool.declare_stream(stream)

    def _answered(self, ack: Ack) -> None:
        """On a thread of the mover's."""
        with self._news:
            self._answers.append(ack)
            if ack.id in self._watched:
                self._verdicts[ack.id] = ack
            if (begun := self._begun.pop(ack.id, None)) is not None:
                kind, pages, since = begun
                assert self._view is not None
                good = ack.statuses.count(CODES[PageStatus.OK])
                self._counts[f"{kind}_pages"] += good
                self._counts[f"{kind}_bytes"] += good * self._view.pool.spec.page_bytes
                self._counts[f"{kind}_seconds"] += time.monotonic() - since
                self._counts[f"{kind}_failed_pages"] += pages - good
            self._news.notify_all()
