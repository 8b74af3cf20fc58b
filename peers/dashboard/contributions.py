"""What each peer has contributed to a run while the dashboard watched, over the peer's restarts and moves.

Kept by history.py. A peer's own figures begin again when it restarts or moves; here they add up. All of them are
the peers' own claims.
"""

from dataclasses import dataclass, field

from peers.status.view import SwarmView

MOST_PEERS = 1024
"""The most peers that are kept: those that were seen last."""


@dataclass
class Contribution:
    """What one peer has contributed.

    Attributes:
        stage: the stage at which it was seen last.
        first_seen, last_seen: when it was seen first and last, in seconds since the epoch.
        serving_seconds: for how long it was seen to serve.
        microbatches: how many microbatches counted at its stage through it.
        exchanged_bytes: how many bytes it sent and received for averages.
        told_microbatches, told_bytes, told_start: its counters and its start time, as it reported them last.
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
    """What all peers have contributed, by their ids."""

    peers: dict[str, Contribution] = field(default_factory=dict)

    def add(self, view: SwarmView, at: float, *, seconds: float) -> None:
        """Add what peers have done since the last view, which was taken `seconds` ago."""
        for row in view.stages:
            for peer in row.peers:
                if peer.state != "serving" or not peer.peer_id:
                    continue
                known = self.peers.pop(peer.peer_id, None)
                is_known = known is not None
                known = known or Contribution(name=peer.name, stage=row.stage, first_seen=at, last_seen=at)
                # The peer moves to the end of the dict, whose order is that in which peers were last seen.
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
        """The contributions as the page shows them, by peer id."""
        shown = ("name", "stage", "first_seen", "last_seen", "serving_seconds", "microbatches", "exchanged_bytes")
        return {peer_id: {name: getattr(each, name) for name in shown} for peer_id, each in self.peers.items()}


def _gain(before: int, now: int, *, begins: bool) -> int:
    """By how much a peer's counter has grown; its whole value if it has begun again at 0."""
    return now if begins or now < before else now - before
