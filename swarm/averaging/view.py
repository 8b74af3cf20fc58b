"""What an averager tells the rest of its peer: lease table, metrics and status read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.training.round_member import Progress
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """What this peer knows of its group's round; the leader's is the whole, any other's its own part.

    Attributes:
        progress: the progress of each member, this peer included.
        committed: microbatches that some member has committed in this round.
        shown: those, but for the ones of members that have missed a heartbeat.
        counted: what is committed, and what members had committed that are not there, or are left out.
        lost: of the latter, those that have certainly died with it.
        complete: the round has all it needs.
        highest_microbatch: highest index any member has seen; -1 for none.
        quiet_seconds: since anything of this last changed.
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


@dataclass(frozen=True, kw_only=True)
class AveragingStatistics:
    """Since the peer started. `num_alive` peers are there, and `num_members` took part in the last round."""

    num_attempts: int
    aborted: Mapping[str, int]
    exchange_seconds: float
    barrier_seconds: float
    num_downloads: int
    num_members: int
    num_alive: int
    refusals: Sequence[str]
    """A line for each holder that says it is elsewhere in the run, and is not followed."""
