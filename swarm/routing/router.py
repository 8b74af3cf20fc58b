"""Chooses the peer that takes the next microbatch. Pure: it never waits, connects, or retries."""

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.machine.clock import Clock
from swarm.routing.peer_queue import NOBODY, LeftAlone, PeerQueue
from swarm.routing.throughput import Link, Observation
from swarm.types import PeerId, PeerRecord, PeerState

MOST_SILENT_SECONDS = 120.0
"""A peer that has just vanished from the directory was silent for no longer than this, because no record lasts
longer."""


@dataclass(frozen=True)
class Gone:
    """The last peer of a stage that has none now, and when it last announced itself, in monotonic seconds. If it
    `has_left` it said so; otherwise it fell silent."""

    name: str
    last_at: float
    has_left: bool

    def in_words(self, now: float) -> str:
        """What happened to the peer, in words. `now` is monotonic seconds."""
        did = "left" if self.has_left else "fell silent"
        return f"its last one, {self.name}, {did} {max(0.0, now - self.last_at):.0f} s ago"


class Router:
    """The known peers of every stage. With the same seed and the same calls it makes the same choices."""

    def __init__(self, clock: Clock, rng: random.Random, own: PeerId = NOBODY) -> None:
        """`own` is the peer that this process is, if it is one. Where it serves it is chosen first, while it has
        room."""
        self.own = own
        self._clock = clock
        self._queues: defaultdict[int, PeerQueue] = defaultdict(lambda: PeerQueue(rng, own))
        self._stage_of: dict[PeerId, int] = {}
        self._gone: dict[int, Gone] = {}

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        """Take over the directory's records of one stage. O(peers): for the background, not for every choice.

        Only those that serve can be chosen. A peer that is announced at two stages is at the one that it announced
        later.
        """
        queue = self._queues[stage]
        serving = [
            record for record in records if record.state is PeerState.SERVING and not self._has_left(record, stage)
        ]
        if not serving and (former := queue.records()):
            self._gone[stage] = self._last_of(former, records)
        for peer_id in queue.update(serving, self._clock.monotonic()):
            del self._stage_of[peer_id]
        for record in serving:
            peer_id = PeerId(record.peer_id)
            previous = self._stage_of.get(peer_id, stage)
            if previous != stage:
                self._queues[previous].remove(peer_id)
            self._stage_of[peer_id] = stage

    def choose(
        self, stage: int, num_samples: int, *, exclude: Collection[PeerId] = (), prefer: Sequence[PeerId] = ()
    ) -> PeerRecord | None:
        """Choose the peer that is to compute `num_samples` samples next; None if no peer can be asked now.

        Of those in `prefer` the first that serves and is not banned is chosen, and charged as usual; after them this
        very peer, if it serves the stage and has not said that it is busy.
        """
        return self._queues[stage].choose(num_samples, self._clock.monotonic(), exclude=exclude, prefer=prefer)

    def record(self, peer_id: PeerId) -> PeerRecord | None:
        queue = self._queue_of(peer_id)
        return None if queue is None else queue.record(peer_id)

    def num_peers(self, stage: int) -> int:
        """How many peers serve a stage, banned and busy ones too."""
        return len(self._queues[stage])

    def gone(self, stage: int) -> Gone | None:
        """The peer that was the last one of a stage without peers; None if the stage has some, or had none yet."""
        return None if self.num_peers(stage) else self._gone.get(stage)

    def expected_seconds(self, peer_id: PeerId, num_samples: int) -> float | None:
        """How long a serving peer, with its queue and the link to it, probably takes, bounded by what is typical of its
        stage; None if nothing is known."""
        queue = self._queue_of(peer_id)
        return None if queue is None else queue.expected_seconds(peer_id, num_samples)

    def others(self, peer_id: PeerId) -> list[PeerId]:
        """The serving peers of the same stage that are not banned."""
        stage = self._stage_of.get(peer_id)
        if stage is None:
            return []
        left_out = {peer_id} | self.banned(stage)
        return [PeerId(record.peer_id) for record in self.records(stage) if record.peer_id not in left_out]

    def banned(self, stage: int) -> set[PeerId]:
        return self._queues[stage].banned(self._clock.monotonic())

    def links(self, stage: int) -> dict[PeerId, Link]:
        return self._queues[stage].links()

    def left_alone(self, stage: int) -> list[LeftAlone]:
        """The serving peers of a stage that are banned or busy, and why. O(peers)."""
        return self._queues[stage].left_alone(self._clock.monotonic())

    def records(self, stage: int) -> list[PeerRecord]:
        """The newest announcements of all peers that serve a stage, banned and busy ones too."""
        return self._queues[stage].records()

    def succeeded(self, peer_id: PeerId, reply: Observation) -> None:
        """Learn from a peer's reply. A peer that is not known is ignored, here and by the methods below."""
        if (queue := self._queue_of(peer_id)) is not None:
            queue.succeeded(peer_id, self._clock.monotonic(), reply)

    def busy(self, peer_id: PeerId, retry_after_seconds: float, reason: str = "") -> None:
        """Leave a peer alone for a while. This is no ban: as a preferred peer it can still be chosen."""
        if (queue := self._queue_of(peer_id)) is not None:
            queue.busy(peer_id, self._clock.monotonic(), retry_after_seconds, reason)

    def failed(self, peer_id: PeerId, *, is_gone: bool = False, is_unreachable: bool = False, reason: str = "") -> None:
        """Ban a peer, for 5 s at first and for up to 5 min if it goes on failing.

        A success ends the ban at once; a later announcement ends it once its first 5 s have passed, unless the peer is
        unreachable: then `answered` ends it, and `unanswered` prolongs it. If the peer is gone, because nothing
        listened at its address, a later announcement comes from a new process, and ends the ban at once.
        """
        if (queue := self._queue_of(peer_id)) is not None:
            now = self._clock.monotonic()
            queue.failed(peer_id, now, is_gone=is_gone, is_unreachable=is_unreachable, reason=reason)

    def unreachable(self, stage: int) -> list[PeerRecord]:
        return self._queues[stage].unreachable(self._clock.monotonic())

    def answered(self, peer_id: PeerId) -> None:
        """End the ban of an unreachable peer that answers again, as Bans.answered does."""
        if (queue := self._queue_of(peer_id)) is not None:
            queue.answered(peer_id, self._clock.monotonic())

    def unanswered(self, peer_id: PeerId, seconds: float) -> None:
        """Prolong the ban of an unreachable peer that still does not answer to at least `seconds` from now.

        Otherwise all microbatches under way would try a frozen peer, whose machine takes connections and says nothing,
        each time that its ban ends.
        """
        if (queue := self._queue_of(peer_id)) is not None:
            queue.unanswered(peer_id, self._clock.monotonic(), seconds)

    def next_available_seconds(self, stage: int) -> float | None:
        """The seconds until some peer of the stage can be chosen: 0 if one can be now, None if no peer serves it.
        Banned and busy peers serve it."""
        return self._queues[stage].next_available_seconds(self._clock.monotonic())

    def _last_of(self, former: Sequence[PeerRecord], records: Sequence[PeerRecord]) -> Gone:
        """Of a stage's former peers, the one that was announced last. Its clock may be wrong, so the time since then is
        taken as 0 to MOST_SILENT_SECONDS."""
        last = max(former, key=lambda record: record.announced_at)
        ago = min(max(0.0, self._clock.time() - last.announced_at), MOST_SILENT_SECONDS)
        has_left = any(record.peer_id == last.peer_id for record in records)
        return Gone(last.name or last.peer_id[:8], self._clock.monotonic() - ago, has_left)

    def _queue_of(self, peer_id: PeerId) -> PeerQueue | None:
        stage = self._stage_of.get(peer_id)
        return None if stage is None else self._queues[stage]

    def _has_left(self, record: PeerRecord, stage: int) -> bool:
        """Whether the peer has since announced itself at another stage."""
        peer_id = PeerId(record.peer_id)
        known = self.record(peer_id)
        return known is not None and self._stage_of[peer_id] != stage and known.announced_at >= record.announced_at
