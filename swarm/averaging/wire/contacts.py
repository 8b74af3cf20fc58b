"""The addresses of a stage's peers: from the directory, and from the peers' own messages.

With the addresses in messages a group goes on when the directory is out of reach. The number of peers is bounded, so a
peer that sends messages in the name of invented peers does not fill the memory.
"""

from collections.abc import Iterable, Set
from functools import partial

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.wire.context import Context
from swarm.types import PeerId, PeerRecord, PeerState

MOST_UNLISTED = 64
"""The most remembered peers that the directory does not list. Far fewer peers join within the seconds that a record
takes to spread."""


class Contacts:
    """The other peers of one peer's block."""

    def __init__(self, context: Context) -> None:
        self._own_id = context.own_id
        self._directory = partial(context.peers, context.own.block)
        self._clock = context.clock
        self._timing = context.timing
        self._heard_of: dict[PeerId, tuple[PeerRecord, float]] = {}
        """The record of each peer by its own messages, and the time of its last sign of life."""
        self._listed_at: dict[str, float] = {}
        """When each peer was last seen in the directory."""

    # -- news --------------------------------------------------------------------------------------------------------

    def add(self, record: PeerRecord) -> bool:
        """Remember a peer that gave a sign of life. Returns whether other peers were forgotten to make room."""
        peer_id = PeerId(record.peer_id)
        if peer_id == self._own_id:
            return False
        # Making room is slow, so it is done only for newcomers: reports come many times a second.
        is_new = peer_id not in self._heard_of
        num_forgotten = self._make_room(peer_id) if is_new and len(self._heard_of) >= MOST_UNLISTED else 0
        self._heard_of[peer_id] = record, self._clock.monotonic()
        return num_forgotten > 0

    def _make_room(self, peer_id: PeerId) -> int:
        """Forget the unlisted peers with the oldest signs of life, until there is room for one more. Returns how
        many."""
        self._see_listed()
        unlisted = sorted(self._heard_of.keys() - self._listed_at.keys(), key=lambda peer: self._heard_of[peer][1])
        num_needless = len(unlisted) + (peer_id not in self._listed_at) - MOST_UNLISTED
        needless = unlisted[: max(0, num_needless)]
        for peer in needless:
            del self._heard_of[peer]
        return len(needless)

    def answered(self, peer_id: PeerId) -> None:
        """Note a peer's sign of life. (A leader sends no reports, only answers.)"""
        if (known := self._heard_of.get(peer_id)) is not None:
            self._heard_of[peer_id] = known[0], self._clock.monotonic()

    def forget_the_gone(self) -> None:
        """Forget peers that gave no sign of life for long, because over weeks they would become many."""
        self._see_listed()
        oldest = self._clock.monotonic() - self._timing.forget_seconds
        self._heard_of = {peer: contact for peer, contact in self._heard_of.items() if contact[1] >= oldest}

    def _see_listed(self) -> None:
        """Remember which peers the directory lists, so that they count as listed while the directory is out of
        reach."""
        now = self._clock.monotonic()
        oldest = now - self._timing.forget_seconds
        self._listed_at = {peer: at for peer, at in self._listed_at.items() if at >= oldest}
        self._listed_at |= dict.fromkeys((record.peer_id for record in self._directory()), now)

    # -- questions ---------------------------------------------------------------------------------------------------

    def all(self) -> dict[PeerId, PeerRecord]:
        known = {peer_id: record for peer_id, (record, _) in self._heard_of.items()}
        known |= {PeerId(record.peer_id): record for record in self._directory()}
        known.pop(self._own_id, None)
        return known

    def serving(self) -> dict[PeerId, PeerRecord]:
        """The peers that announce that they serve, and those that gave a sign of life lately and do not announce that
        they leave."""
        serving = {peer_id: self._heard_of[peer_id][0] for peer_id in self.recent()}
        for record in self._directory():
            if record.state is PeerState.SERVING:
                serving[PeerId(record.peer_id)] = record
            elif record.state is PeerState.LEAVING:
                serving.pop(PeerId(record.peer_id), None)
        serving.pop(self._own_id, None)
        return serving

    def recent(self) -> Set[PeerId]:
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        return {peer_id for peer_id, (_, heard_at) in self._heard_of.items() if heard_at >= oldest}

    def is_recent(self, peer_id: PeerId) -> bool:
        """Whether the peer gave a sign of life lately. Fast, because it looks at one peer only."""
        known = self._heard_of.get(peer_id)
        return known is not None and known[1] >= self._clock.monotonic() - self._timing.fresh_seconds

    def record(self, peer_id: PeerId) -> PeerRecord | None:
        """A peer's record; None if it is not known."""
        return self.all().get(peer_id)

    def records(self, peer_ids: Iterable[PeerId]) -> dict[PeerId, PeerRecord]:
        known = self.all()
        return {peer_id: known[peer_id] for peer_id in peer_ids if peer_id in known}

    def standings_announced(self) -> dict[PeerId, Standing]:
        return {
            PeerId(record.peer_id): Standing(run_samples=record.samples, round=record.round, lineage=record.lineage)
            for record in self._directory()
            if record.peer_id != self._own_id
        }
