"""Ways to choose peers: this project's, by chance, and by the SWARM paper's queue.

All leave failed and busy peers alone as long as this project's way does, so only the choice differs.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from swarm.machine.clock import Clock
from swarm.routing.bans import BASE_BAN_SECONDS
from swarm.routing.router import Router
from swarm.routing.throughput import MovingAverage, Observation
from swarm.types import Block, PeerId, PeerRecord, PeerState

NUM_SAMPLES = 4  # Of a microbatch
SMOOTHING = 0.1
"""Weight of the newest observation in the SWARM paper's moving average, which is corrected for its start as in the
paper's published code."""
UNKNOWN_SECONDS = 1.0
"""The seconds that a peer which never answered is assumed to need for a sample, as in the SWARM paper's code."""
MAX_DRAWS = 20  # How many peers are drawn before all are looked at one by one


@dataclass(frozen=True, kw_only=True)
class Answer(Observation):
    """What a sender learns from a reply."""

    call_seconds: float
    """The time from the request to the reply that this peer took: waiting, computing and the link, but not what came
    further downstream."""


class Ours:
    """Chooses with the real router, swarm.routing."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._router = Router(clock, rng)

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        self._router.update(Block(stage), records)
        # This replaces the probes of swarm.hop.connections: only live peers are listed here, and they would answer.
        for record in self._router.unreachable(Block(stage)):
            self._router.answered(Block(stage), PeerId(record.peer_id))

    def choose(self, stage: int, exclude: Collection[PeerId]) -> PeerId | None:
        record = self._router.choose(Block(stage), NUM_SAMPLES, exclude=exclude)
        return None if record is None else PeerId(record.peer_id)

    def num_asked_around(self, stage: int) -> int:
        """How many peers may leave a microbatch to each other."""
        return self._router.num_peers(Block(stage))

    def failed(self, stage: int, peer_id: PeerId, *, is_gone: bool) -> None:
        """`is_gone` says whether nothing listened at the peer's address."""
        self._router.failed(Block(stage), peer_id, is_gone=is_gone, is_unreachable=True)

    def succeeded(self, stage: int, peer_id: PeerId, answer: Answer) -> None:
        self._router.succeeded(Block(stage), peer_id, answer)

    def busy(self, stage: int, peer_id: PeerId, retry_after_seconds: float) -> None:
        self._router.busy(Block(stage), peer_id, retry_after_seconds)


class ByChance:
    """Chooses at random, with equal chances for all peers that can be asked."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._peers: dict[int, list[PeerId]] = {}
        self._busy_until: dict[PeerId, float] = {}
        self._banned_until: dict[PeerId, float] = {}

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        self._peers[stage] = [PeerId(record.peer_id) for record in records if record.state is PeerState.SERVING]
        for peer_id in self._peers[stage]:
            # Only live peers are listed.
            self._banned_until.pop(peer_id, None)

    def choose(self, stage: int, exclude: Collection[PeerId]) -> PeerId | None:
        peers = self._peers[stage]
        for _ in range(MAX_DRAWS if peers else 0):
            peer_id = self._rng.choice(peers)
            if self._can_be_asked(peer_id, exclude):
                return peer_id
        left = [peer_id for peer_id in peers if self._can_be_asked(peer_id, exclude)]
        return self._rng.choice(left) if left else None

    def num_asked_around(self, stage: int) -> int:
        return 0

    def succeeded(self, stage: int, peer_id: PeerId, answer: Answer) -> None:
        """Learn nothing."""

    def busy(self, stage: int, peer_id: PeerId, retry_after_seconds: float) -> None:
        self._busy_until[peer_id] = self._clock.monotonic() + retry_after_seconds

    def failed(self, stage: int, peer_id: PeerId, *, is_gone: bool) -> None:
        self._banned_until[peer_id] = self._clock.monotonic() + BASE_BAN_SECONDS

    def _can_be_asked(self, peer_id: PeerId, exclude: Collection[PeerId]) -> bool:
        away_until = max(self._busy_until.get(peer_id, 0.0), self._banned_until.get(peer_id, 0.0))
        return peer_id not in exclude and away_until <= self._clock.monotonic()


class SwarmQueue(ByChance):
    """The SWARM paper's Algorithm 1: chooses the peer with the least sum of expected times, each a moving average over
    its calls. A newcomer begins with the sum of the queue's head, as in the published code; with 0, as in the text, it
    would get everything until it had caught up with the others' whole past."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self._seconds: defaultdict[PeerId, MovingAverage] = defaultdict(partial(MovingAverage, SMOOTHING))
        self._queues: dict[int, list[tuple[float, float, PeerId]]] = {}
        """Of each stage: (cumulative expected seconds, tie-break, peer)."""

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        super().update(stage, records)
        present = set(self._peers[stage])
        self._queues[stage] = queue = [entry for entry in self._queues.get(stage, ()) if entry[2] in present]
        heapq.heapify(queue)
        head = queue[0][0] if queue else 0.0
        queued = {entry[2] for entry in queue}
        # Newcomers enter in the directory's order, as the order of a set, and so the draws, would differ by process.
        for peer_id in self._peers[stage]:
            if peer_id not in queued:
                heapq.heappush(queue, (head, self._rng.random(), peer_id))

    def choose(self, stage: int, exclude: Collection[PeerId]) -> PeerId | None:
        queue, skipped, chosen = self._queues[stage], [], None
        while queue and chosen is None:
            priority, tie, peer_id = heapq.heappop(queue)
            if self._can_be_asked(peer_id, exclude):
                chosen = peer_id
                priority += self._seconds[peer_id].value or UNKNOWN_SECONDS * NUM_SAMPLES
            skipped.append((priority, tie, peer_id))
        for entry in skipped:
            heapq.heappush(queue, entry)
        return chosen

    def succeeded(self, stage: int, peer_id: PeerId, answer: Answer) -> None:
        self._seconds[peer_id].observe(answer.call_seconds)


Chooser = Ours | ByChance
"""Chooses peers for one sender, by what this sender knows of all stages."""
