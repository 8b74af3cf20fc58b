"""What each peer has given to a run as long as it was watched, over its restarts and moves.

Kept by history.py. A peer's own figures begin again when its process or its stage does; here they add up. They are what
peers say of themselves.
"""

from dataclasses import dataclass, field

from peers.status.view import SwarmView

MOST_PEERS = 1024
"""How many peers are kept: those that were seen last."""


@dataclass
class Contribution:
    """What one peer has given.

    Attributes:
        stage: where it was seen last.
        first_seen, last_seen: when it was seen first and last, in seconds since the epoch.
        serving_seconds: how long it was seen to serve.
        microbatches: how many microbatches count through it.
        exchanged_bytes: how many bytes it sent and received for averages.
        told_microbatches, told_bytes, told_start: its own figures when it was seen last.
    """

    name: str
    stage: int
    first_seen: float
    last_seen: float
    serving_seconds: float = 0.0
    microbatches: int = 0
    exchanged_bytes: int = 0
    told_microbatches: int = 0
    told_bytes: int = 0
    told_start: float = 0.0


@dataclass
class Contributions:
    """What all peers have given, by their ids."""

    peers: dict[str, Contribution] = field(default_factory=dict)

    def add(self, view: SwarmView, at: float, *, seconds: float) -> None:
        """Count what peers have done since the last look, which was so many seconds ago."""
        for row in view.stages:
            for peer in row.peers:
                if peer.state != "serving" or not peer.peer_id:
                    continue
                known = self.peers.pop(peer.peer_id, None)
                is_known = known is not None
                known = known or Contribution(name=peer.name, stage=row.stage, first_seen=at, last_seen=at)
                # It moves to the end, where the peers are that were seen last.
                self.peers[peer.peer_id] = known
                begins = known.stage != row.stage or peer.started_at != known.told_start
                known.microbatches += _gain(known.told_microbatches, peer.committed, begins=begins)
                known.exchanged_bytes += _gain(known.told_bytes, peer.exchanged_bytes, begins=begins)
                known.serving_seconds += seconds if is_known else 0.0
                known.name, known.stage, known.last_seen = peer.name, row.stage, at
                known.told_microbatches, known.told_bytes = peer.committed, peer.exchanged_bytes
                known.told_start = peer.started_at
        for peer_id in list(self.peers)[: max(0, len(self.peers) - MOST_PEERS)]:
            del self.peers[peer_id]

    def to_json(self) -> dict[str, dict[str, object]]:
        """What the page shows, by peer id."""
        shown = ("name", "stage", "first_seen", "last_seen", "serving_seconds", "microbatches", "exchanged_bytes")
        return {peer_id: {name: getattr(each, name) for name in shown} for peer_id, each in self.peers.items()}


def _gain(before: int, now: int, *, begins: bool) -> int:
    """By how much a counter has grown; its whole value if it has begun again."""
    return now if begins or now < before else now - before
