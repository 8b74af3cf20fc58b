"""The interface of a way to choose peers, for a simulated pipeline; and this project's way, the real router."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.machine.clock import Clock
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.types import PeerId, PeerRecord


@dataclass(frozen=True, kw_only=True)
class Answer(Observation):
    """What a sender learns from a reply."""

    call_seconds: float
    """The time from the request to the reply that this peer took: waiting, computing and the link, but not what came
    further downstream."""


class Chooser(Protocol):
    """Chooses peers for one sender, by what this sender knows of all stages."""

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None: ...

    def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
        """Choose the peer that computes next; None if no peer can be asked now."""
        ...

    def num_asked_around(self, stage: int) -> int:
        """How many peers of a stage may leave a microbatch to each other; 0 if the chosen peer takes all it can."""
        ...

    def succeeded(self, peer_id: PeerId, answer: Answer) -> None: ...

    def busy(self, peer_id: PeerId, retry_after_seconds: float) -> None: ...

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        """Note that a peer did not answer.

        Args:
            is_gone: whether nothing listened at its address; otherwise a connection broke.
        """
        ...


class Ours:
    """Chooses with the real router, swarm.routing."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._router = Router(clock, rng)
        self.busy = self._router.busy

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        self._router.update(stage, records)
        # This replaces the probes of swarm.hop.connections: only live peers are listed here, and they would answer.
        for record in self._router.unreachable(stage):
            self._router.answered(PeerId(record.peer_id))

    def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
        record = self._router.choose(stage, num_samples, exclude=exclude)
        return None if record is None else PeerId(record.peer_id)

    def num_asked_around(self, stage: int) -> int:
        return self._router.num_peers(stage)

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        self._router.failed(peer_id, is_gone=is_gone, is_unreachable=True)

    def succeeded(self, peer_id: PeerId, answer: Answer) -> None:
        self._router.succeeded(peer_id, answer)
