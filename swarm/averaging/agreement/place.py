"""One peer's place in its group: where it stands, how the last rounds ended, and what it has promised and leads in this
round.

`Group` is what two-phase commit asks of a member, and `unfinished` what it asks of a leader that comes after another.
`Advance` alone moves the place. `Participant`, `OwnRound`, `Round` and `Barrier` note what is promised, decided and
awaited. The other parts read it.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.branches import Branches
from swarm.averaging.agreement.messages import Ballot, Refused, Standing
from swarm.config import Timeline
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

KEPT_OUTCOMES = 4
"""A peer keeps the outcomes of so many committed rounds, or of as many as there are fragments, if that is more. Stages
that have tied parameters wait for each other only in the rounds that average these, so they may be as many rounds
apart as there are fragments."""

Begun = Mapping[PeerId, pb.BeginReply]
"""The answers of the members that began an attempt."""


@dataclass(frozen=True, kw_only=True)
class PreparedResult:
    """An exchanged result that waits for its commit."""

    ballot: Ballot
    digest: str


class Phase(StrEnum):
    """Where a member is within an attempt."""

    IDLE = "idle"
    BEGUN = "begun"
    EXCHANGING = "exchanging"
    PREPARED = "prepared"


class Group:
    """A member's state machine for the two-phase commit of a round.

        idle -> begun -> exchanging -> prepared -> (committed: the next round, idle)

    With groups a member goes back from exchanging to begun with its group's average, and takes part in further
    exchanges.

    Attempts are ordered by ballot, as in Paxos: a member obeys the highest ballot that it has promised, and refuses
    lower ones. A prepared result is kept even if its attempt's leader dies. It is dropped in these cases only: the
    exchange of a higher attempt begins, its own leader aborts, a higher attempt aborts and voids earlier results, or a
    commit or a download takes its place. Every method either makes its transition or raises Refused and changes
    nothing.
    """

    def __init__(self, round_number: int) -> None:
        self.install(round_number)

    def install(self, round_number: int, *, last_digest: str = "") -> None:
        """Begin a round in which nothing is promised. `last_digest` is the digest of the result that was applied before
        it; empty after a download."""
        self.round = round_number
        self.last_digest = last_digest
        self.promised: Ballot | None = None
        self.since: Ballot | None = None
        """The first ballot promised in this round. This member may not know of earlier attempts."""
        self.active: Ballot | None = None
        """The attempt for which the member's contribution is closed."""
        self.shares_digest = ""
        self.prepared: PreparedResult | None = None

    @property
    def phase(self) -> Phase:
        if self.active is None:
            return Phase.IDLE
        if self.prepared is not None and self.prepared.ballot == self.active:
            return Phase.PREPARED
        return Phase.EXCHANGING if self.shares_digest else Phase.BEGUN

    def begin(self, round_number: int, ballot: Ballot) -> None:
        """Promise an attempt. A repeated Begin is obeyed until the exchange starts."""
        self._require_round(round_number)
        if self.promised is not None and ballot < self.promised:
            raise Refused(f"attempt {self.promised.attempt} of {self.promised.leader_id} is promised")
        if ballot == self.promised and (ballot != self.active or self.shares_digest):
            raise Refused(f"attempt {ballot.attempt} is over or under way")
        self.promised = self.active = ballot
        self.since = self.since or ballot
        self.shares_digest = ""

    def join(self, round_number: int, ballot: Ballot, shares_digest: str) -> None:
        """Start the exchange among the members whose shares have this digest."""
        self._require_round(round_number)
        if self.phase is not Phase.BEGUN or ballot != self.active:
            raise Refused(f"attempt {ballot.attempt} of {ballot.leader_id} has not begun here")
        # The leader has asked all members that it reaches. So no earlier attempt was decided, or can be.
        self.prepared = None
        self.shares_digest = shares_digest

    def keep_part(self, round_number: int, ballot: Ballot) -> None:
        """End an exchange within a group. Another one follows in the same attempt."""
        self._require_exchanging(round_number, ballot)
        self.shares_digest = ""

    def prepare(self, round_number: int, ballot: Ballot, digest: str) -> None:
        self._require_exchanging(round_number, ballot)
        self.prepared = PreparedResult(ballot=ballot, digest=digest)

    def check_commit(self, round_number: int, digest: str) -> bool:
        """Whether the prepared result is to be applied; False if it was applied before.

        It does not matter which peer asks: the digest alone decides whether a result may be committed.
        """
        if round_number + 1 == self.round and digest == self.last_digest != "":
            return False
        self._require_round(round_number)
        if self.prepared is None or self.prepared.digest != digest:
            raise Refused("that result is not prepared here")
        return True

    def commit(self, round_number: int, digest: str) -> None:
        """Begin the next round, because the prepared result was applied."""
        assert self.check_commit(round_number, digest)
        self.install(round_number + 1, last_digest=digest)

    def abort(self, round_number: int, ballot: Ballot, *, void: bool) -> None:
        """Give up the leader's attempt and what it has prepared; if `void`, also what earlier attempts have
        prepared."""
        self._require_round(round_number)
        if self.promised is not None and ballot < self.promised:
            raise Refused(f"attempt {self.promised.attempt} of {self.promised.leader_id} is promised")
        if self.prepared is not None and (self.prepared.ballot == ballot or (void and self.prepared.ballot < ballot)):
            self.prepared = None
        if ballot == self.active:
            self.step_back()

    def step_back(self) -> None:
        """Leave an attempt whose leader is gone or has given it up, but keep what is prepared."""
        self.active = None
        self.shares_digest = ""

    def _require_exchanging(self, round_number: int, ballot: Ballot) -> None:
        self._require_round(round_number)
        if self.phase is not Phase.EXCHANGING or ballot != self.active:
            raise Refused(f"attempt {ballot.attempt} of {ballot.leader_id} was given up")

    def _require_round(self, round_number: int) -> None:
        if round_number != self.round:
            raise Refused(f"this member is at round {self.round}, not {round_number}")


def unfinished(begun: Begun) -> pb.Prepared | None:
    """The newest result of an earlier attempt, if it may have been decided; else None. It cannot have been decided if a
    member of its exchange (with groups, of the last one) does not hold it, or if half of all members do not."""
    prepared = [reply.prepared for reply in begun.values() if reply.HasField("prepared")]
    if not prepared:
        return None
    newest = max(prepared, key=lambda p: messages.require_ballot(p.ballot))
    ballot = messages.require_ballot(newest.ballot)
    # The answer of a member that was restarted since does not count: it may have prepared the result and forgotten it.
    lacking = {
        peer
        for peer, reply in begun.items()
        if reply.prepared.digest != newest.digest and messages.require_ballot(reply.since) <= ballot
    }.intersection(newest.member_ids)
    if lacking.intersection(newest.decider_ids or newest.member_ids) or 2 * len(lacking) >= len(newest.member_ids):
        return None
    return messages.signed_by_all(newest, [each for each in prepared if each.digest == newest.digest])


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
        decision: what this attempt has decided: the round, its result, and the stage's squared norm. None before that,
            and once it is committed.
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
        self.decision: pb.Outcome | None = None
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
        # One of a round to come would be kept as the newest, in place of what this peer itself commits.
        self._move(standing, (outcome for outcome in outcomes if outcome.round < standing.round))
        self.branches.installed(standing, past)

    def refusal(self, refused: Refused) -> pb.Refusal:
        """The answer to a leader whose request is refused."""
        return pb.Refusal(
            reason=str(refused), promised=messages.pack_ballot(self.group.promised), round=self.group.round
        )

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

    def decide(self, decision: pb.Outcome) -> None:
        self.decision = decision

    def decided(self, round_number: int) -> pb.Outcome | None:
        """How a round was committed, or what the attempt that this peer leads has decided; None if nothing is known."""
        known = self.outcomes.get(round_number), self.decision
        return next((outcome for outcome in known if outcome is not None and outcome.round == round_number), None)

    def awaited(self, now: float) -> None:
        if self.awaited_since is None:
            self.awaited_since = now

    def _move(self, standing: Standing, outcomes: Iterable[pb.Outcome]) -> None:
        self.outcomes |= {outcome.round: outcome for outcome in outcomes}
        for round_number in sorted(self.outcomes)[: -self._num_kept]:
            del self.outcomes[round_number]
        self.standing = standing
        self.awaited_since = None
