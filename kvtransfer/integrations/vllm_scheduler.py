"""The scheduler's half of the vLLM connector: a `Directory` that decides. It moves nothing and never waits.

Blocks that a store reads are held in vLLM's own block pool, by a reference, until every rank has answered: whatever
becomes of their request meanwhile (finished, aborted, preempted), they are given to nobody else.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from kvtransfer.commands import Ack, Scope, decode, encode
from kvtransfer.config import Config
from kvtransfer.directory import Directory
from kvtransfer.directory_build import directory_of
from kvtransfer.integrations.vllm_doubts import Doubts
from kvtransfer.integrations.vllm_events import stored_events
from kvtransfer.integrations.vllm_facts import HOST, EngineFacts, common_facts
from kvtransfer.integrations.vllm_messages import StepAnswers, StepMetadata, WorkerFacts
from kvtransfer.integrations.vllm_requests import RequestState, adapter_name, keepable_tokens, request_salt
from kvtransfer.jobs import Job
from kvtransfer.rank_answers import RankAnswers
from kvtransfer.tiers.base import PageStatus

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


class SchedulerHalf:
    """Decides for one engine. Called by vLLM's scheduler, on its thread.

    layerwise: hits are loaded in the step that uses them, layer by layer; otherwise before it, while the request waits.
    events: tell what has come into host memory (`take_events`).
    """

    def __init__(self, config: Config, facts: EngineFacts, *, layerwise: bool, events: bool = False) -> None:
        self.layerwise = layerwise
        self._events: list[BlockStored] = []
        self._wants_events = events
        self._config, self._facts = config, facts
        self._salt = config.namespace.salt_bytes()
        self._namespaces: dict[str | None, bytes] = {}
        self._directory: Directory | None = None
        self._answers = RankAnswers(facts.ranks)
        self._requests: dict[str, RequestState] = {}
        self._pool: BlockPool | None = None
        self._held: dict[Job, list[int]] = {}
        self._news = StepMetadata()
        self._doubts = Doubts()
        self._generation = ""
        self._spec = ""
        self._counts: defaultdict[str, float] = defaultdict(float)

    # --- start

    def start(self, workers: Sequence[WorkerFacts]) -> None:
        """The workers' memory is there: from now on there can be hits. Again after the engine slept: its host memory is
        new then, and empty."""
        if not workers:
            return
        if self._directory is not None:
            self._directory.lost()
        self._directory = directory_of(self._config, common_facts(workers))
        self._answers = RankAnswers(self._facts.ranks)
        self._news, self._doubts = StepMetadata(), Doubts()
        self._spec = workers[0].spec
        self._rename()
        host = self._directory.figures().tiers[HOST].capacity_pages
        logger.info("kvtransfer: %d ranks, %d pages of %d tokens", len(workers), host, self._facts.block_size)

    def hold_in(self, pool: BlockPool) -> None:
        """Where blocks are held that a store reads."""
        self._pool = pool

    # --- a request comes

    def arrived(self, request: Request) -> RequestState:
        """A request, when it is first heard of."""
        state = self._requests.get(request.request_id)
        if state is None:
            salt = request_salt(self._salt, request.cache_salt)
            scope = Scope(self._namespace(adapter_name(request)), salt)
            state = self._requests[request.request_id] = RequestState(request, scope, keepable_tokens(request))
        return state

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind those that the engine has, and whether beside its steps. None: ask
        again, lower tiers are being read. One token at least is left to compute: no loaded block is written to."""
        directory, state, size = self._directory, self.arrived(request), self._facts.block_size
        if directory is None or computed_tokens % size:
            return 0, False
        tokens = state.tokens(request.num_tokens - 1)
        if len(tokens) // size * size <= computed_tokens:
            return 0, False
        if state.hit is not None and state.hit.device_pages == computed_tokens // size:
            return self._offer(state)
        state.forget_hit()
        if state.fetch is None:
            state.fetch = directory.prefetch(tokens, state.scope, request=request.request_id)
        if not directory.admit(state.fetch):
            return None, False
        state.hit = directory.match(tokens, state.scope, device_pages=computed_tokens // size)
        self._count("asked_tokens", len(tokens) - computed_tokens)
        return self._offer(state)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has blocks: load ``external_tokens`` into those behind the ones that the engine had filled."""
        directory, state = self._directory, self.arrived(request)
        hit = state.hit
        if hit is None or directory is None:
            return
        pages = external_tokens // self._facts.block_size
        if pages:
            first, stop = hit.device_pages, hit.device_pages + pages
            ids = blocks.get_block_ids()[0][first:stop]
            job = directory.load(hit, ids, layerwise=self.layerwise, pages=stop)
            state.load = job
            self._count("loads")
            self._count("loaded_tokens", external_tokens)
            arrived = self._failed if self.layerwise else self._arrived  # the workers tell of layers themselves
            job.add_done_callback(lambda done: arrived(state, done))
        state.forget_hit()

    def fetched_tokens(self, request: Request) -> int:
        """Tokens of the request's last load that lower tiers were read for."""
        state = self.arrived(request)
        if state.fetch is None or state.load is None:
            return 0
        first, stop = state.load.first, state.load.first + state.load.codes.size
        fetched = min(stop, state.fetch.first + state.fetch.usable_pages) - max(first, state.fetch.first)
        return max(0, fetched) * self._facts.block_size

    # --- a step

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers are to do in this step."""
        directory = self._directory
        if directory is None:
            return StepMetadata()
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._store(directory, request_id, scheduled, output)
        directory.tick()
        commands = directory.commands()
        for command in commands:
            self._answers.expect(command)
        news, self._news = self._news, StepMetadata()
        news.commands = [encode(command) for command in commands]
        self._doubts.sent(commands)
        return news

    def answered(self, answers: StepAnswers) -> None:
        """What the workers have answered."""
        directory = self._directory
        assert directory is not None
        whole: list[Ack] = []
        for rank, given in answers.answers.items():
            for data in given:
                ack = decode(data)
                assert isinstance(ack, Ack)
                if (complete := self._answers.add(rank, ack)) is not None:
                    whole.append(complete)
        for ack in self._doubts.judged(whole):
            directory.acknowledge(ack)
        if self._pool is not None and (bad := self._doubts.take_bad_blocks()):
            self._pool.evict_blocks(bad)

    # --- a request goes

    def finished(self, request: Request) -> None:
        """The request has ended, one way or the other. What it stores is held in the block pool until it is done."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            state.forget_hit()
            if state.fetch is not None and self._directory is not None:
                self._directory.stop(state.fetch)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are held until stores of them are answered."""
        return bool(self._held)

    def reset(self) -> None:
        """From now on nothing is found that was kept before, in no tier: the engine's weights may have changed."""
        self._generation = secrets.token_hex(8)
        self._rename()
        if self._directory is not None:
            self._directory.flush(HOST)

    def take_events(self) -> list[BlockStored]:
        """What has come into host memory since the last call, where events are wanted."""
        taken, self._events = self._events, []
        return taken

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        taken, self._counts = self._counts, defaultdict(float)
        return dict(taken)

    # --- inside

    def _rename(self) -> None:
        """Nothing that requests were told so far holds any more."""
        self._namespaces.clear()
        for state in self._requests.values():
            state.forget_hit()
            if state.fetch is not None and self._directory is not None:
                self._directory.stop(state.fetch)
            state.fetch, state.load, state.stored_pages = None, None, 0
            state.scope = Scope(self._namespace(adapter_name(state.request)), state.scope.salt)

    def _namespace(self, adapter: str | None) -> bytes:
        if adapter not in self._namespaces:
            self._namespaces[adapter] = self._facts.namespace(self._spec, adapter, self._generation)
        return self._namespaces[adapter]

    def _offer(self, state: RequestState) -> tuple[int, bool]:
        """What of the state's hit can be loaded."""
        hit = state.hit
        assert hit is not None
        stop = hit.pages
        if self.layerwise:  # what is in the host tier now: the forward can't wait for more
            stop = next((s.stop for s in hit.segments[:1] if s.tier == HOST), hit.device_pages)
        pages = stop - hit.device_pages
        if pages <= 0:
            state.forget_hit()
            return 0, False
        return pages * self._facts.block_size, not self.layerwise

    def _store(self, directory: Directory, request_id: str, scheduled: int, output: SchedulerOutput) -> None:
        """Have the pages kept that this step fills. Of tokens that are known alone: a draft may be rejected yet."""
        state = self._requests.get(request_id)
        if state is None or self._pool is None or output.kv_connector_block_state is None:
            return
        size, computed = self._facts.block_size, state.request.num_computed_tokens
        tokens = state.tokens(computed + scheduled)
        pages = len(tokens) // size
        if pages <= min(state.stored_pages, computed // size):
            return
        blocks = output.kv_connector_block_state.get_block_ids(request_id)
        if blocks is None:
            return
        self._doubts.filled(blocks[0][computed // size : pages])
        if pages <= state.stored_pages:
            return
        ids = blocks[0][state.stored_pages : pages]
        job = directory.store(tokens[: pages * size], ids, state.scope, first=state.stored_pages)
        state.stored_pages = pages
        if not job.done:
            self._pool.touch([self._pool.blocks[block] for block in ids])
            self._held[job] = ids
            job.add_done_callback(lambda done: self._let_go(state, done))

    def _let_go(self, state: RequestState, job: Job) -> None:
        """A store is done: its blocks are the engine's again, the last of the prefix to go first."""
        ids = self._held.pop(job)
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])
        ok = job.positions(PageStatus.OK)
        self._count("stored_tokens", len(ok) * self._facts.block_size)
        self._count("failed_store_pages", len(ids) - len(ok))
        if self._wants_events and ok:
            self._events += stored_events(state.request, ok, self._facts.block_size)

    def _arrived(self, state: RequestState, job: Job) -> None:
        """An asynchronous load is over, on every rank."""
        failed = np.ones(job.codes.size, dtype=np.bool_)
        failed[: job.usable_pages] = False
        assert job.ids is not None
        self._news.received.add(state.request.request_id)
        self._news.failed_blocks.update(job.ids[failed].tolist())
        self._failed(state, job)

    def _failed(self, state: RequestState, job: Job) -> None:
        """Pages of a load that did not arrive are computed, and stored, anew. The engine may have put them into its own
        cache already, where others would find them, were the request to go before it has computed them."""
        if job.usable_pages < job.codes.size:
            if self._pool is not None and job.ids is not None:
                self._pool.evict_blocks(set(job.ids[job.usable_pages :].tolist()))
            state.stored_pages = min(state.stored_pages, job.first + job.usable_pages)
            self._count("failed_load_pages", job.codes.size - job.usable_pages)
            logger.warning("kvtransfer: a load failed in part, its request computes the rest: %s", job.detail)

    def _count(self, name: str, by: float = 1) -> None:
        if by:
            self._counts[name] += by
