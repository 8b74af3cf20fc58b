"""The exchange of one attempt: over when the slowest line has sent all it has to, and never without one of its members.

Used by simulated_attempt, which has the members divided by the real shares. Moves no bytes.
"""

from collections.abc import Callable, Mapping

from swarm.averaging import messages
from swarm.averaging.exchanging.shares import Shares
from swarm.averaging.leading.group import Ballot
from swarm.averaging.messages import Standing
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId


class SimulatedExchange:
    """Members that send each other their parts.

    Attributes:
        is_over: done, or given up.
    """

    def __init__(self, timeline: Timeline, standing: Standing, ballot: Ballot, shares: Shares, seconds: float) -> None:
        self.standing = standing
        self.shares = shares
        self.is_over = False
        self._timeline = timeline
        self._ballot = ballot
        self._seconds = seconds
        self._joined: list[Callable[[pb.Prepared | None], object]] = []

    def join(self, then: Callable[[pb.Prepared | None], object]) -> None:
        """One more member sends and waits for the others; `then` is told the result, or None if a member gave up."""
        if self.is_over:
            # A member has died, of which no member hears, or given up, of which the leader has been told.
            return
        self._joined.append(then)
        if len(self._joined) == len(self.shares.members):
            self._timeline.after(self._seconds, self._done)

    def fail(self) -> None:
        """A member has given it up: all others notice."""
        if not self.is_over:
            self.is_over = True
            for then in self._joined:
                then(None)

    def _done(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        prepared = pb.Prepared(
            ballot=messages.pack_ballot(self._ballot),
            digest=self.shares.digest,
            member_ids=[share.peer_id for share in self.shares.members],
            num_samples=self.shares.round_samples,
        )
        for then in self._joined:
            then(prepared)


def exchange_seconds(shares: Shares, bytes_per_second: Mapping[PeerId, float]) -> float:
    """Until every member has sent all it has to: the others' parts of its own, and its part's result to all others."""
    others = len(shares.members) - 1
    return max(
        (shares.num_elements - share.num_elements + others * share.num_elements)
        / bytes_per_second[PeerId(share.peer_id)]
        for share in shares.members
    )
