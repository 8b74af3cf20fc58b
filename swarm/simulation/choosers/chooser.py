"""What a way to choose peers is to a simulated pipeline, and this project's: the real router."""

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
    """The time from the request to the reply, without what happened further downstream: waiting, computing and the
    link."""


class Chooser(Protocol):
    """One sender's view of all stages."""

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        """Take over what the directory says about one stage."""
        ...

    def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
        """The peer that computes next; None if no peer can be asked now."""
        ...

    def num_asked_around(self, stage: int) -> int:
        """Peers among which a microbatch may be sent on; 0: the chosen peer is to take what it can."""
        ...

    def succeeded(self, peer_id: PeerId, answer: Answer) -> None:
        """A peer has answered."""
        ...

    def busy(self, peer_id: PeerId, retry_after_seconds: float) -> None:
        """A peer had no room."""
        ...

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        """A peer did not answer.

        Args:
            is_gone: nothing listened where it was; else a connection broke.
        """
        ...


class Ours:
    """The router of swarm.routing."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._router = Router(clock, rng)
        self.busy = self._router.busy

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        """See Router."""
        self._router.update(stage, records)
        # In place of swarm.hop.connections, whose probe each of these would answer: only the living are listed here.
        for record in self._router.unreachable(stage):
            self._router.answered(PeerId(record.peer_id))

    def choose(self, stage: int, num_samples: int, exclude: Collection[PeerId]) -> PeerId | None:
        """See Router."""
        record = self._router.choose(stage, num_samples, exclude=exclude)
        return None if record is None else PeerId(record.peer_id)

    def num_asked_around(self, stage: int) -> int:
        """As swarm.hop.hop counts them."""
        return self._router.num_peers(stage)

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        """See Router."""
        self._router.failed(peer_id, is_gone=is_gone, is_unreachable=True)

    def succeeded(self, peer_id: PeerId, answer: Answer) -> None:
        """See Router."""
        self._router.succeeded(peer_id, answer)
