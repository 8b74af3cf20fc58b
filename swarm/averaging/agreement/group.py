"""A member's state machine for the two-phase commit of a round.

    idle -> begun -> exchanging -> prepared -> (committed: the next round, idle)

With groups a member goes back from exchanging to begun with its group's average, and takes part in further exchanges.

Attempts are ordered by ballot, as in Paxos: a member obeys the highest ballot that it has promised, and refuses lower
ones. A prepared result is kept even if its attempt's leader dies. It is dropped in these cases only: the exchange of a
higher attempt begins, its own leader aborts, a higher attempt aborts and voids earlier results, or a commit or a
download takes its place.
"""

from dataclasses import dataclass
from enum import StrEnum

from swarm.errors import TryLater


@dataclass(frozen=True, order=True)
class Ballot:
    """Names one attempt at a round: its number, then the peer id of its leader."""

    attempt: int
    leader_id: str


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


class Refused(TryLater):
    """A leader's request is refused. The answer holds the member's promise and round."""


class Group:
    """The state machine. Every method either makes its transition or raises Refused and changes nothing."""

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
