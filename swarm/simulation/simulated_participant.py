"""A member that takes part in its stage's rounds, and how members reach each other, in virtual time.

Base of the members in simulated_member; leaders (simulated_attempt) call it. Promises, joins, prepares, commits and
aborts are the real Group's to take or refuse; what surrounds them is as in averaging/exchanging/participant. Never
leads.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from swarm.averaging import messages
from swarm.averaging.leading.group import Ballot, Group, Refused
from swarm.averaging.leading.rules import has_quorum
from swarm.averaging.members.roster import Roster
from swarm.averaging.messages import Standing
from swarm.averaging.timing import Timing
from swarm.config import Quorum
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.simulated_exchange import SimulatedExchange
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId, PeerRecord, PeerState

Member = TypeVar("Member", bound="SimulatedParticipant")

TIMING = Timing()
"""As patient as real peers are."""
SAMPLES_PER_SECOND = 10.0
"""Of every member; only ratios count."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine; a member lives on it until it dies, and later another one of the same name."""

    peer_id: PeerId
    bytes_per_second: float
    """Of its line, either way."""
    link_seconds: float
    """To any other one and back again, half of the way each."""


class Network(Generic[Member]):
    """The members that live, and what passes between them."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.members: dict[PeerId, Member] = {}
        self.records: dict[PeerId, PeerRecord] = {}
        """What the directory has: all that serve, and for a while those that did."""

    def send(self, sender: "SimulatedParticipant", peer_id: PeerId, action: Callable[[Member], object]) -> None:
        """Have something happen at another member, or at the sender itself. The dead get no messages."""
        receiver = self.members.get(peer_id)
        if receiver is None:
            return
        seconds = 0.0 if receiver is sender else (sender.host.link_seconds + receiver.host.link_seconds) / 2

        def arrive() -> None:
            if not receiver.is_gone:
                action(receiver)

        self.timeline.after(seconds, arrive)


class SimulatedParticipant:
    """One member, as leaders see it."""

    def __init__(
        self,
        network: "Network[Any]",
        host: Host,
        *,
        standing: Standing,
        last_members: Collection[str],
        quorum: Quorum,
        committed: Callable[[Standing, Collection[str]], object],
    ) -> None:
        """
        Args:
            last_members: the members of the round before `standing`.
            committed: is told of every round that this member commits, and its members.
        """
        self.host = host
        self.record = PeerRecord(
            peer_id=host.peer_id,
            announced_at=network.timeline.time(),
            stage=0,
            endpoint="simulated:1",
            state=PeerState.SERVING,
        )
        self.standing = standing
        self.last_members = last_members
        self.group = Group(standing.round)
        self.roster = Roster(
            own=self.record,
            directory=lambda: tuple(network.records.values()),
            clock=network.timeline,
            timing=TIMING,
            branches_yield=quorum == "available",
            round_microbatches=None,
        )
        self.is_gone = False
        self.is_catching_up = False
        self._clock = network.timeline
        self._quorum = quorum
        self._committed = committed
        self._trains_since = self._clock.monotonic()
        self._prepared: pb.Prepared | None = None
        self._exchange: SimulatedExchange | None = None

    @property
    def peer_id(self) -> PeerId:
        """The machine's: it keeps its key."""
        return self.host.peer_id

    @property
    def num_samples(self) -> int:
        """That it has trained in its round: all the time, at an even pace."""
        return int(SAMPLES_PER_SECOND * (self._clock.monotonic() - self._trains_since))

    def die(self) -> None:
        """Nothing comes from it any more."""
        self.is_gone = True
        if self._exchange is not None:
            self._exchange.is_over = True

    def has_quorum(self, present: Collection[str]) -> bool:
        """Whether the members that are present may commit the round that this member is at."""
        return has_quorum(
            self._quorum,
            present,
            last_members=self.last_members,
            announced=lambda: {self.peer_id, *self.roster.contacts.serving()},
        )

    def begin(self, standing: Standing, ballot: Ballot) -> pb.BeginReply:
        """Promise an attempt."""
        try:
            if self.is_catching_up or standing != self.standing:
                raise Refused("this member is elsewhere")
            self.group.begin(standing.round, ballot)
        except Refused:
            return pb.BeginReply(refusal=self._refusal())
        self.end_exchange()
        return pb.BeginReply(
            num_samples=self.num_samples,
            prepared=self._prepared if self.group.prepared else None,
            since=messages.pack_ballot(self.group.since),
            bytes_per_second=self.host.bytes_per_second,
        )

    def join(self, ballot: Ballot, exchange: SimulatedExchange, answer: Callable[[pb.Prepared | None], object]) -> None:
        """Take part in an exchange; what comes of it is answered when it is over."""
        try:
            self.group.join(exchange.standing.round, ballot, exchange.shares.digest)
        except Refused:
            answer(None)
            return
        self._exchange = exchange

        def then(prepared: pb.Prepared | None) -> None:
            if prepared is not None:
                self.group.prepare(exchange.standing.round, ballot, prepared.digest)
                self._prepared, self._exchange = prepared, None
            answer(prepared)

        exchange.join(then)

    def commit(self, round_number: int, prepared: pb.Prepared, after: Standing) -> None:
        """Apply a decided result, once."""
        with suppress(Refused):
            if self.group.check_commit(round_number, prepared.digest):
                self.end_exchange()
                self.group.commit(round_number, prepared.digest)
                self.move(after, prepared.member_ids)
                self._committed(after, prepared.member_ids)

    def abort(self, round_number: int, ballot: Ballot, *, void: bool) -> None:
        """Its leader gives an attempt up."""
        with suppress(Refused):
            was_active = self.group.active
            self.group.abort(round_number, ballot, void=void)
            if was_active == ballot:
                self.end_exchange()

    def move(self, standing: Standing, members: Collection[str]) -> None:
        """Begin a round; `members` took part in the one before."""
        self.standing, self.last_members = standing, members
        self._prepared = None
        self._trains_since = self._clock.monotonic()
        self.roster.moved(standing)

    def step_back(self) -> None:
        """The leader is gone, or not at this attempt any more: what is prepared stays."""
        self.group.step_back()
        self.end_exchange()

    def end_exchange(self) -> None:
        """Leave an exchange, if there is one: the others notice."""
        if self._exchange is not None:
            self._exchange.fail()
            self._exchange = None

    def _refusal(self) -> pb.Refusal:
        return pb.Refusal(promised=messages.pack_ballot(self.group.promised), round=self.group.round)
