"""What the two halves of the connector send each other through vLLM, once a step.

Commands and answers are kvtransfer's own messages, encoded (commands.py), for all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtransfer.mover_facts import MoverFacts


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker.

    commands       to carry out in this step
    received       requests whose asynchronous load is over on every rank
    failed_blocks  of these loads, the blocks that did not arrive
    """

    commands: list[bytes] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


@dataclass
class StepAnswers(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: by rank, what they answered since the last step, in that order."""

    answers: dict[int, list[bytes]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both; a rank's own answers stay in their order."""
        assert isinstance(other, StepAnswers)
        merged = {rank: list(given) for rank, given in self.answers.items()}
        for rank, given in other.answers.items():
            merged.setdefault(rank, []).extend(given)
        return StepAnswers(merged)


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler, once its memory is there.

    facts  of its pool, host memory and tiers
    spec   what a page of the whole model holds, in canonical text
    """

    facts: MoverFacts
    spec: str
