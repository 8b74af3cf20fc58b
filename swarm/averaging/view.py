"""The averager's view of its round, for other parts of the peer. The lease table and the programs read it."""

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.training.round_member import Progress
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """This peer's knowledge of its group's round. The leader knows all of it, any other peer only its own part.

    Attributes:
        progress: the progress of each member, this peer included.
        committed: microbatches that some member has committed in this round.
        shown: `committed`, without the microbatches of members that have missed a heartbeat.
        counted: `committed`, and the microbatches that were committed by members that are gone or left out.
        lost: the microbatches that were certainly lost with a member.
        complete: whether the members hold all that the round needs.
        highest_microbatch: the highest index that any member has seen; -1 for none.
        quiet_seconds: the time since any of this last changed.
    """

    round: int
    leader_id: PeerId
    is_leader: bool
    progress: Mapping[PeerId, Progress]
    committed: frozenset[int]
    shown: frozenset[int]
    counted: frozenset[int]
    lost: frozenset[int]
    complete: bool
    highest_microbatch: int
    quiet_seconds: float
