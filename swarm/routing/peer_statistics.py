"""What a router tells of one peer: for status, metrics and tests. Made by swarm.routing.peer_queue; decides nothing."""

from dataclasses import dataclass

from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class PeerStatistics:
    """A reading of one peer's routing."""

    peer_id: PeerId
    stage: int
    num_chosen: int
    num_failures: int
    num_busy: int
    banned: bool
    expected_seconds_per_sample: float
    """Waiting, computing and the link; what the next choice is charged with."""
    share: float
    """Of all choices among the stage's present peers."""
