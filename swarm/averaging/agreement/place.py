"""One peer's place in its group: where it stands, how the last rounds ended, and what it has promised and leads in this
round.

`Advance` alone moves it. `Participant`, `OwnRound`, `Round` and `Barrier` note what is promised, decided and awaited.
The other parts read it.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.averaging.agreement.branches import Branches
from swarm.averaging.agreement.group import Ballot, Group
from swarm.averaging.agreement.messages import Standing
from swarm.config import Timeline
from swarm.rpc.v1 import averaging_pb2 as pb

KEPT_OUTCOMES = 4
"""A peer keeps the outcomes of so many committed rounds, or of as many as there are fragments, if that is more. Stages
that have tied parameters wait for each other only in the rounds that average these, so they may be as many rounds
apart as there are fragments."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    round: int
    prepared: pb.Prepared
    squared_norm: float
    """The squared norm of the stage's gradient. It includes the tied parameters if this stage is the one that counts
    them."""


class Place:
    """Where one peer is.

    Attributes:
        branches: where the other holders of its stage stand.
        timeline: the amendments that it knows, and so the configuration of each round.
        group: what it has promised and prepared in this round.
        lock: held while the stage is called, so that the peer does not move meanwhile.
        standing: its round, samples and lineage; changes together with `outcomes`.
        outcomes: how the last rounds were committed, by round.
        is_catching_up: whether it is on its way to its group. Then it promises no attempt.
        leads: the attempt that it leads; None while it leads none.
        decision: the result that this attempt has decided; None before that, and once it is committed.
        awaited_since: when another stage first waited for this one to decide the round; None if none has.
        is_sound: False once a missed round gave a wrong state. `standing` then stays at the last round before it.
    """

    def __init__(self, standing: Standing, branches: Branches, timeline: Timeline, *, num_fragments: int) -> None:
        """For `num_fragments` see AveragingConfig."""
        self.branches = branches
        self.timeline = timeline
        self.group = Group(standing.round)
        self.lock = asyncio.Lock()
        self.standing = standing
        self.outcomes: dict[int, pb.Outcome] = {}
        self.is_catching_up = False
        self.is_sound = True
        self.leads: Ballot | None = None
        self.decision: Decision | None = None
        self.awaited_since: float | None = None
        self._num_kept = max(KEPT_OUTCOMES, num_fragments)

    @property
    def last_members(self) -> Collection[str]:
        """Ids of the members of the round before; empty where this peer does not know them."""
        last = self.outcomes.get(self.standing.round - 1)
        return last.prepared.member_ids if last else ()

    def committed(self, after: Standing, outcome: pb.Outcome) -> None:
        self._move(after, [outcome])
        self.branches.committed(after)

    def applied_missed(self, after: Standing, outcome: pb.Outcome) -> None:
        self._move(after, [outcome])
        self.branches.applied_missed(after)

    def installed(self, standing: Standing, outcomes: Iterable[pb.Outcome], past: Sequence[str]) -> None:
        """Note that this peer has installed a state that others hold. `outcomes` say how the last rounds before that
        state were committed, and `past` has their lineages, oldest first."""
        self.outcomes.clear()
        self.is_sound = True
        self._move(standing, outcomes)
        self.branches.installed(standing, past)

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        self.is_catching_up = True
        try:
            yield
        finally:
            self.is_catching_up = False

    @contextmanager
    def leading(self, ballot: Ballot) -> Iterator[None]:
        self.leads = ballot
        try:
            yield
        finally:
            self.leads = self.decision = None

    def decide(self, decision: Decision) -> None:
        self.decision = decision

    def awaited(self, now: float) -> None:
        if self.awaited_since is None:
            self.awaited_since = now

    def _move(self, standing: Standing, outcomes: Iterable[pb.Outcome]) -> None:
        self.outcomes |= {outcome.round: outcome for outcome in outcomes}
        for round_number in sorted(self.outcomes)[: -self._num_kept]:
            del self.outcomes[round_number]
        self.standing = standing
        self.awaited_since = None
