"""Chooses the peer that takes the next microbatch. Pure: it never waits, connects, or retries."""

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.machine.clock import Clock
from swarm.routing.bans import Distrusted
from swarm.routing.peer_queue import NOBODY, LeftAlone, PeerQueue
from swarm.routing.throughput import Link, Observation
from swarm.types import Block, PeerId, PeerRecord, PeerState

MOST_SILENT_SECONDS = 120.0
"""A peer that has just vanished from the directory was silent for no longer than this, because no record lasts
longer."""


@dataclass(frozen=True)
class Gone:
    """The last peer of a block that has none now, and when it last announced itself, in monotonic seconds. If it
    `has_left` it said so; otherwise it fell silent."""

    name: str
    last_at: float
    has_left: bool

    def in_words(self, now: float) -> str:
        """What happened to the peer, in words. `now` is monotonic seconds."""
        did = "left" if self.has_left else "fell silent"
        return f"its last one, {self.name}, {did} {max(0.0, now - self.last_at):.0f} s ago"


class Router:
    """The known peers of every block. With the same seed and the same calls it makes the same choices.

    A peer may serve several blocks. Its speed, its queue and its bans are its own at each of them; but if its process
    does not answer at one, it is left alone at all, and if it answers again, it does so at all.
    """

    def __init__(self, clock: Clock, rng: random.Random, own: PeerId = NOBODY) -> None:
        """`own` is the peer that this process is, if it is one. Where it serves it is chosen first, while it has
        room."""
        self.own = own
        self._clock = clock
        self._queues: defaultdict[Block, PeerQueue] = defaultdict(lambda: PeerQueue(rng, own))
        self._gone: dict[Block, Gone] = {}
        self._distrusted = Distrusted()

    def update(self, block: Block, records: Sequence[PeerRecord]) -> None:
        """Take over the directory's records of one block. O(peers): for the background, not for every choice.

        Only those that serve can be chosen. A record counts at its own block, until it expires or says that the peer
        leaves, whatever the peer announces at other blocks.
        """
        queue = self._queues[block]
        serving = [record for record in records if record.state is PeerState.SERVING]
        if not serving and (former := queue.records()):
            self._gone[block] = self._last_of(former, records)
        queue.update(serving, self._clock.monotonic())

    def choose(
        self, block: Block, num_samples: int, *, exclude: Collection[PeerId] = (), prefer: PeerId | None = None
    ) -> PeerRecord | None:
        """Choose the peer that is to compute `num_samples` samples next; None if no peer can be asked now.

        The peer in `prefer` is chosen if it serves and is not banned, and charged as usual; after it this very peer, if
        it serves the stage and has not said that it is busy.
        """
        now = self._clock.monotonic()
        excluded = {*exclude, *self._distrusted.current(now)}
        return self._queues[block].choose(num_samples, now, exclude=excluded, prefer=prefer)

    def record(self, block: Block, peer_id: PeerId) -> PeerRecord | None:
        return self._queues[block].record(peer_id)

    def num_peers(self, block: Block) -> int:
        return len(self._queues[block])

    def gone(self, block: Block) -> Gone | None:
        """The peer that was the last one of a block without peers; None if the block has some, or had none yet."""
        return None if self.num_peers(block) else self._gone.get(block)

    def expected_seconds(self, block: Block, peer_id: PeerId, num_samples: int) -> float | None:
        """How long a serving peer, with its queue and the link to it, probably takes, bounded by what is typical of its
        block; None if nothing is known."""
        return self._queues[block].expected_seconds(peer_id, num_samples)

    def others(self, block: Block, peer_id: PeerId) -> list[PeerId]:
        """The serving peers of a block that are not banned, without one of them; none if that one does not serve it."""
        if self.record(block, peer_id) is None:
            return []
        left_out = {peer_id} | self.banned(block)
        return [PeerId(record.peer_id) for record in self.records(block) if record.peer_id not in left_out]

    def banned(self, block: Block) -> set[PeerId]:
        now = self._clock.monotonic()
        return self._queues[block].banned(now) | self._distrusted.current(now).keys()

    def links(self, block: Block) -> dict[PeerId, Link]:
        return self._queues[block].links()

    def left_alone(self, block: Block) -> list[LeftAlone]:
        """The serving peers of a block that are banned, busy or distrusted, and why. O(peers)."""
        now = self._clock.monotonic()
        distrusted = {
            peer: LeftAlone(record, reason, until, is_busy=False, is_silent=False)
            for peer, (until, reason) in self._distrusted.current(now).items()
            if (record := self.record(block, peer)) is not None
        }
        others = self._queues[block].left_alone(now)
        return [*distrusted.values(), *(each for each in others if each.record.peer_id not in distrusted)]

    def records(self, block: Block) -> list[PeerRecord]:
        """The newest announcements of all peers that serve a block, banned and busy ones too."""
        return self._queues[block].records()

    def succeeded(self, block: Block, peer_id: PeerId, reply: Observation) -> None:
        """Learn from a peer's reply. A peer that is not known is ignored, here and by the methods below."""
        if self.record(block, peer_id) is not None:
            self._queues[block].succeeded(peer_id, self._clock.monotonic(), reply)

    def busy(self, block: Block, peer_id: PeerId, retry_after_seconds: float, reason: str = "") -> None:
        """Leave a peer alone for a while. This is no ban: as a preferred peer it can still be chosen."""
        if self.record(block, peer_id) is not None:
            self._queues[block].busy(peer_id, self._clock.monotonic(), retry_after_seconds, reason)

    def failed(
        self, block: Block, peer_id: PeerId, *, is_gone: bool = False, is_unreachable: bool = False, reason: str = ""
    ) -> None:
        """Ban a peer, for 5 s at first and for up to 5 min if it goes on failing.

        A success ends the ban at once; a later announcement ends it once its first 5 s have passed, unless the peer is
        unreachable: then `answered` ends it, and `unanswered` prolongs it. If the peer is gone, because nothing
        listened at its address, a later announcement comes from a new process, and ends the ban at once. A peer that
        is gone or unreachable is banned at all blocks that its process serves.
        """
        now = self._clock.monotonic()
        for queue in self._queues_of(block, peer_id, all_blocks=is_gone or is_unreachable):
            queue.failed(peer_id, now, is_gone=is_gone, is_unreachable=is_unreachable, reason=reason)

    def distrust(self, peer_id: PeerId, reason: str) -> None:
        """Give a peer that computes wrongly no work at any block for a while, as Distrusted does."""
        self._distrusted.add(peer_id, self._clock.monotonic(), reason)

    def unreachable(self, block: Block) -> list[PeerRecord]:
        return self._queues[block].unreachable(self._clock.monotonic())

    def answered(self, block: Block, peer_id: PeerId) -> None:
        """End the ban of an unreachable peer that answers again, as Bans.answered does, at all blocks that its process
        serves."""
        for queue in self._queues_of(block, peer_id):
            queue.answered(peer_id, self._clock.monotonic())

    def unanswered(self, block: Block, peer_id: PeerId, seconds: float) -> None:
        """Prolong the ban of an unreachable peer that still does not answer to at least `seconds` from now, at all
        blocks that its process serves.

        Otherwise all microbatches under way would try a frozen peer, whose machine takes connections and says nothing,
        each time that its ban ends.
        """
        for queue in self._queues_of(block, peer_id):
            queue.unanswered(peer_id, self._clock.monotonic(), seconds)

    def next_available_seconds(self, block: Block) -> float | None:
        """The seconds until some peer of the block can be chosen: 0 if one can be now, None if no peer serves it.
        Banned and busy peers serve it."""
        return self._queues[block].next_available_seconds(self._clock.monotonic())

    def _last_of(self, former: Sequence[PeerRecord], records: Sequence[PeerRecord]) -> Gone:
        """Of a block's former peers, the one that was announced last. Its clock may be wrong, so the time since then is
        taken as 0 to MOST_SILENT_SECONDS."""
        last = max(former, key=lambda record: record.announced_at)
        ago = min(max(0.0, self._clock.time() - last.announced_at), MOST_SILENT_SECONDS)
        has_left = any(record.peer_id == last.peer_id for record in records)
        return Gone(last.display_name, self._clock.monotonic() - ago, has_left)

    def _queues_of(self, block: Block, peer_id: PeerId, *, all_blocks: bool = True) -> list[PeerQueue]:
        """The queues of the blocks that the process serves which serves this one; none if the peer is not known."""
        record = self.record(block, peer_id)
        if record is None:
            return []
        if not all_blocks:
            return [self._queues[block]]
        served = ((queue, queue.record(peer_id)) for queue in self._queues.values())
        return [queue for queue, other in served if other is not None and other.place == record.place]
