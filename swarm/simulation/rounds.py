"""The rounds of one stage: members that come and go, reports, attempts and commits, in virtual time.

Used by the study `averaging`. What a member promises, joins, prepares, commits and gives up is decided by the real
Group; who leads, who takes part, who is silent and who has to catch up by a real Roster for every member; who owns
which part by the real shares; when a round is complete, has a quorum or an unfinished result by the very functions that
a real averager asks. Simulated is what lies around them, in averager, reporter, leader and participant: messages that
take a while, training at an even pace, an exchange as long as its slowest line, downloads. Who dies falls silent, its
machine with it: nobody is told.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm.averaging import messages
from swarm.averaging.completion import Completion
from swarm.averaging.group import Ballot, Group, Refused
from swarm.averaging.messages import Standing
from swarm.averaging.quorum import Rule, has_quorum
from swarm.averaging.roster import Roster
from swarm.averaging.shares import Offer, Shares, divide
from swarm.averaging.timing import Timing
from swarm.averaging.transport import contact_of
from swarm.averaging.unfinished import unfinished
from swarm.config import AveragingConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId, PeerRecord, PeerState

TIMING = Timing()
"""As patient as real peers are."""
SAMPLES_PER_SECOND = 10.0
"""Of every member; only ratios count."""
LINE_SPREAD = 0.5
"""Standard deviation of the logarithm of a member's bandwidth: one in six is 1.6 times slower than usual, or faster."""
LINK_SECONDS = (0.02, 0.2)
"""Round trip to a member; drawn evenly."""
AWAY_SECONDS = 20.0
"""Mean time until a machine that died is back, with its key and nothing else."""
LISTED_SECONDS = (15.0, 20.0)
"""For how long the directory lists the dead."""
SNAPSHOT_FACTOR = 8
"""Who is back downloads so many times a contribution: anchor and momentum in 32 bits, for 8 bits of each parameter."""
QUIET_SECONDS = 3 * TIMING.fresh_seconds
"""Reports begin so long before a round can be complete: from earlier ones nothing would follow."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a stage is like."""

    num_members: int
    quorum: Rule
    lifetime_seconds: float
    """Mean time until a member dies; infinite if none does."""
    round_seconds: float
    """Training until a round is complete, as long as nobody dies."""
    payload_bytes: int
    """Of a contribution on the wire."""
    bytes_per_second: float
    """Of a usual member's line, either way."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine; a member lives on it until it dies, and later another one of the same name."""

    peer_id: PeerId
    bytes_per_second: float
    """Of its line, either way."""
    link_seconds: float
    """To any other one and back again, half of the way each."""


@dataclass(frozen=True, kw_only=True)
class RoundEnd:
    """How a round came to its end."""

    num_attempts: int
    """That were begun, by whichever leader."""
    seconds: float
    """From the moment a leader would have ended it to the first member's commit."""
    took_part: float
    """The members of the exchange, as a share of all that were there."""


class SimulatedStage:
    """All members, and what passes between them.

    Attributes:
        members: those that live and have the stage's state.
        ends: the rounds that were committed, in order.
        newest: the standing of the last of them.
        newest_members: who took part in it.
    """

    def __init__(self, timeline: Timeline, rng: random.Random, setting: Setting) -> None:
        config = RunConfig(
            stages=StagesConfig(num_stages=1),
            averaging=AveragingConfig(quorum=setting.quorum),
            rounds=RoundsConfig(round_samples=_round_samples(setting, RunConfig().data.microbatch_size)),
        )
        self.timeline = timeline
        self.setting = setting
        self.is_complete = Completion(config=config, stage=0, peers=lambda stage: ())
        self.members: dict[PeerId, SimulatedMember] = {}
        self.ends: list[RoundEnd] = []
        self.newest = Standing(run_samples=0, round=0, lineage="")
        self.newest_members: Collection[str] = ()
        self._rng = rng
        self._records: dict[PeerId, PeerRecord] = {}
        self._num_attempts = 0
        self._ending_since: float | None = None
        for _ in range(setting.num_members):
            host = Host(
                peer_id=PeerId(f"{rng.getrandbits(160):040x}"),
                bytes_per_second=setting.bytes_per_second * rng.lognormvariate(0.0, LINE_SPREAD),
                link_seconds=rng.uniform(*LINK_SECONDS),
            )
            self._serve(SimulatedMember(self, host))

    def directory(self) -> Collection[PeerRecord]:
        """All that serve, and for a while those that did."""
        return self._records.values()

    @property
    def ending_seconds(self) -> float:
        """How long the present round's end has lasted."""
        return 0.0 if self._ending_since is None else self.timeline.monotonic() - self._ending_since

    def send(
        self, sender: "SimulatedMember", peer_id: PeerId, action: Callable[["SimulatedMember"], object]
    ) -> None:  # fmt: skip
        """Have something happen at another member, or at the sender itself. The dead get no messages."""
        receiver = self.members.get(peer_id)
        if receiver is None:
            return
        seconds = 0.0 if receiver is sender else (sender.host.link_seconds + receiver.host.link_seconds) / 2

        def arrive() -> None:
            if not receiver.is_gone:
                action(receiver)

        self.timeline.after(seconds, arrive)

    def is_due(self) -> None:
        """A leader has all it takes to end the round, but perhaps for a quorum."""
        if self._ending_since is None:
            self._ending_since = self.timeline.monotonic()

    def attempted(self) -> None:
        """It begins an attempt."""
        self._num_attempts += 1

    def committed(self, after: Standing, member_ids: Collection[str]) -> None:
        """A member has committed a round."""
        if after.round <= self.newest.round:
            return
        end = RoundEnd(
            num_attempts=self._num_attempts, seconds=self.ending_seconds, took_part=len(member_ids) / len(self.members)
        )
        self.ends.append(end)
        self.newest, self.newest_members = after, member_ids
        self._num_attempts, self._ending_since = 0, None

    def returned(self, member: "SimulatedMember") -> None:
        """A member that serves makes itself known to all: it is new, or has caught up."""
        for other in self.members.values():
            if other is not member:
                other.learn_of(member)

    def kill(self, member: "SimulatedMember") -> None:
        """A machine is gone, from one moment to the next, and comes back later."""
        del self.members[member.peer_id]
        member.die()
        self.timeline.after(self._rng.uniform(*LISTED_SECONDS), lambda: self._forget(member))
        self.timeline.after(self._rng.expovariate(1 / AWAY_SECONDS), lambda: self._download(member.host))

    def _forget(self, member: "SimulatedMember") -> None:
        if self._records.get(member.peer_id) is member.record:
            del self._records[member.peer_id]

    def _download(self, host: Host) -> None:
        """A newcomer becomes what the stage is now; what is committed meanwhile it makes up for afterwards."""
        member = SimulatedMember(self, host)
        seconds = SNAPSHOT_FACTOR * self.setting.payload_bytes / host.bytes_per_second
        self.timeline.after(seconds, lambda: self._serve(member))

    def _serve(self, member: "SimulatedMember") -> None:
        self.members[member.peer_id] = member
        self._records[member.peer_id] = member.record
        self.returned(member)
        member.serve(self._rng.random() * TIMING.heartbeat_seconds)
        if self.setting.lifetime_seconds < float("inf"):
            lifetime = self._rng.expovariate(1 / self.setting.lifetime_seconds)
            self.timeline.after(lifetime, lambda: self.kill(member))


class SimulatedMember:
    """One peer of the stage: reports, leads, takes part and catches up."""

    def __init__(self, stage: SimulatedStage, host: Host) -> None:
        self.host = host
        self.record = PeerRecord(
            peer_id=host.peer_id, announced_at=stage.timeline.time(), stage=0, endpoint="simulated:1",
            state=PeerState.SERVING,
        )  # fmt: skip
        self.is_gone = False
        self.standing = stage.newest
        self.group = Group(self.standing.round)
        self.roster = Roster(
            own=self.record, directory=lambda: tuple(stage.directory()), clock=stage.timeline, timing=TIMING,
            branches_yield=stage.setting.quorum == "available", round_microbatches=None,
        )  # fmt: skip
        self.leads: Ballot | None = None
        """The attempt of its own that is under way."""
        self._stage = stage
        self._timeline = stage.timeline
        self._contact = contact_of(self.record)
        self._last_members = stage.newest_members
        self._is_catching_up = False
        self._trains_since = 0.0
        self._target = host.peer_id
        """Who leads, as far as it knows."""
        self._under_way: set[PeerId] = set()
        self._prepared: pb.Prepared | None = None
        self._exchange: Exchange | None = None
        self._attempts: Counter[int] = Counter()
        self._num_failures = 0

    @property
    def peer_id(self) -> PeerId:
        """The machine's: it keeps its key."""
        return self.host.peer_id

    def serve(self, after_seconds: float) -> None:
        """Begin to train, and to report after so long."""
        self._trains_since = self._timeline.monotonic()
        self._look_for_leader()
        self._timeline.after(after_seconds, self._beat)

    def die(self) -> None:
        """Nothing comes from it any more."""
        self.is_gone = True
        if self._exchange is not None:
            self._exchange.is_over = True

    def learn_of(self, other: "SimulatedMember") -> None:
        """Another one has said where it is."""
        self.roster.answered(other.peer_id, other.standing)
        if other.peer_id < self._target:
            self._look_for_leader()

    @property
    def _num_samples(self) -> int:
        return int(SAMPLES_PER_SECOND * (self._timeline.monotonic() - self._trains_since))

    def _look_for_leader(self) -> None:
        self._target = self.roster.leader(self.standing)

    # -- reports, as in averaging/reporter ---------------------------------------------------------------------------

    def _beat(self) -> None:
        if self.is_gone:
            return
        quiet = self._trains_since + self._stage.setting.round_seconds - QUIET_SECONDS - self._timeline.monotonic()
        if quiet > 0 and self.standing == self._stage.newest:
            # Not all at the same moment afterwards.
            self._timeline.after(quiet + self.host.link_seconds, self._beat)
            return
        self._timeline.after(TIMING.heartbeat_seconds, self._beat)
        active = self.group.active
        target = PeerId(active.leader_id) if active else self._target
        if target != self.peer_id:
            self._report(target, TIMING.report_seconds)
            return
        for peer_id in sorted({*self.roster.strangers(self.standing), *self.roster.due_suspects()}):
            self._report(peer_id, TIMING.call_seconds)
        self._consider()

    def _report(self, peer_id: PeerId, patience_seconds: float) -> None:
        if self._is_catching_up or peer_id in self._under_way:
            return
        prepared = self.group.prepared
        request = pb.ReportRequest(
            sender=self._contact, standing=messages.pack_standing(self.standing), num_samples=self._num_samples,
            prepared=messages.pack_ballot(prepared.ballot if prepared else None),
        )  # fmt: skip
        active = self.group.active
        self._under_way.add(peer_id)

        def heard(other: SimulatedMember) -> None:
            standing, leads, is_there = other._hear(request), other.leads, not other._is_catching_up
            self._stage.send(other, self.peer_id, lambda _: answered(standing, leads, is_there))

        def answered(theirs: Standing, leads: Ballot | None, is_there: bool) -> None:
            if peer_id in self._under_way:
                self._under_way.discard(peer_id)
                if is_there:
                    self._act_on(peer_id, active, theirs, leads)
                else:
                    self._lost(peer_id, active)

        def gave_up() -> None:
            if peer_id in self._under_way and not self.is_gone:
                self._under_way.discard(peer_id)
                self._lost(peer_id, active)

        self._stage.send(self, peer_id, heard)
        self._timeline.after(patience_seconds, gave_up)

    def _hear(self, request: pb.ReportRequest) -> Standing:
        if not self._is_catching_up:
            self.roster.hear(request)
        return self.standing

    def _act_on(self, peer_id: PeerId, active: Ballot | None, theirs: Standing, leads: Ballot | None) -> None:
        is_ahead = self.roster.is_ahead(theirs, self.standing)
        self.roster.answered(peer_id, None if leads and not is_ahead else theirs)
        if active is not None and active == self.group.active and active.leader_id == peer_id and leads != active:
            self._step_back()
        if is_ahead:
            self._catch_up()

    def _lost(self, peer_id: PeerId, active: Ballot | None) -> None:
        self.roster.suspect(peer_id)
        if active is not None and active == self.group.active and active.leader_id == peer_id:
            self._step_back()
        if peer_id == self._target:
            self._look_for_leader()

    def _step_back(self) -> None:
        self.group.step_back()
        self._end_exchange()

    def _catch_up(self) -> None:
        if self._is_catching_up or self.leads is not None:
            return
        self._is_catching_up = True
        self._step_back()
        self._timeline.after(self._stage.setting.payload_bytes / self.host.bytes_per_second, self._caught_up)

    def _caught_up(self) -> None:
        if self.is_gone:
            return
        self._is_catching_up = False
        self.group.install(self._stage.newest.round)
        self._move(self._stage.newest, self._stage.newest_members)
        self._stage.returned(self)

    def _move(self, standing: Standing, members: Collection[str]) -> None:
        self.standing, self._last_members = standing, members
        self._prepared = None
        self._num_failures = 0
        self._trains_since = self._timeline.monotonic()
        self.roster.moved(standing)
        self._look_for_leader()

    # -- leading, as in averaging/averager ---------------------------------------------------------------------------

    def has_quorum(self, present: Collection[str]) -> bool:
        """Whether those who are present may commit the round that this member is at."""
        return has_quorum(
            self._stage.setting.quorum, present, last_members=self._last_members,
            announced={self.peer_id, *self.roster.announced()},
        )  # fmt: skip

    def _consider(self) -> None:
        """Begin an attempt if the round can be ended now."""
        if self.is_gone or self._is_catching_up or self.leads is not None or self.group.active is not None:
            return
        if self.roster.leader(self.standing) != self.peer_id:
            self._look_for_leader()
            return
        members = self.roster.members(self.standing)
        num_samples = self._num_samples + sum(report.progress.num_samples for report in members.values())
        is_unfinished = self.group.prepared is not None or any(report.prepared for report in members.values())
        is_ready = (
            self._stage.is_complete(self.standing.round, (), num_samples)
            and not self.roster.overdue(self.standing)
            and not self.roster.awaits_members(self.standing)
        )
        present = sorted([*members, self.peer_id])
        if not (is_unfinished or is_ready):
            return
        self._stage.is_due()
        if not self.has_quorum(present):
            return
        promised = self.group.promised
        number = max(self._attempts[self.standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({self.standing.round: number})
        self.leads = Ballot(number, self.peer_id)
        self._stage.attempted()
        Attempt(self._stage, self, self.standing, self.leads, present)

    def attempt_failed(
        self, *, silent: Collection[PeerId], refusals: Mapping[PeerId, pb.Refusal], round_number: int
    ) -> None:  # fmt: skip
        """Its attempt came to nothing, and those who can be reached know it."""
        self.leads = None
        for peer_id in silent:
            self.roster.suspect(peer_id)
        for peer_id in refusals:
            self.roster.forget_report(peer_id)
        promised = max((refusal.promised.attempt for refusal in refusals.values()), default=0)
        self._attempts[round_number] = max(self._attempts[round_number], promised)
        if any(refusal.round > self.standing.round for refusal in refusals.values()):
            self._catch_up()
        self._num_failures += 1
        backoff = TIMING.retry_seconds * 2 ** (self._num_failures - 2) if self._num_failures > 1 else 0.0
        self._timeline.after(min(TIMING.max_retry_seconds, backoff), self._consider)

    def attempt_ended(self, before: Standing) -> None:
        """Its attempt was committed."""
        self.leads = None
        if self.standing == before:
            # It finished what it had no part in.
            self._catch_up()

    # -- taking part, as in averaging/participant --------------------------------------------------------------------

    def begin(self, standing: Standing, ballot: Ballot) -> pb.BeginReply:
        """Promise an attempt."""
        try:
            if self._is_catching_up or standing != self.standing:
                raise Refused("this member is elsewhere")
            self.group.begin(standing.round, ballot)
        except Refused:
            return pb.BeginReply(refusal=self._refusal())
        self._end_exchange()
        return pb.BeginReply(
            num_samples=self._num_samples, prepared=self._prepared if self.group.prepared else None,
            since=messages.pack_ballot(self.group.since), bytes_per_second=self.host.bytes_per_second,
        )  # fmt: skip

    def join(self, ballot: Ballot, exchange: "Exchange", answer: Callable[[pb.Prepared | None], object]) -> None:
        """Take part in an exchange; what comes of it is answered when it is over."""
        try:
            self.group.join(exchange.standing.round, ballot, exchange.shares.digest)
        except Refused:
            answer(None)
            return
        self._exchange = exchange
        exchange.join(self, answer)

    def prepare(self, round_number: int, ballot: Ballot, prepared: pb.Prepared) -> None:
        """The exchange is done."""
        self.group.prepare(round_number, ballot, prepared.digest)
        self._prepared, self._exchange = prepared, None

    def commit(self, round_number: int, prepared: pb.Prepared, after: Standing) -> None:
        """Apply a decided result, once."""
        with suppress(Refused):
            if self.group.check_commit(round_number, prepared.digest):
                self._end_exchange()
                self.group.commit(round_number, prepared.digest)
                self._move(after, prepared.member_ids)
                self._stage.committed(after, prepared.member_ids)

    def abort(self, round_number: int, ballot: Ballot, *, void: bool) -> None:
        """Its leader gives an attempt up."""
        with suppress(Refused):
            was_active = self.group.active
            self.group.abort(round_number, ballot, void=void)
            if was_active == ballot:
                self._end_exchange()

    def _end_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.fail()
            self._exchange = None

    def _refusal(self) -> pb.Refusal:
        return pb.Refusal(promised=messages.pack_ballot(self.group.promised), round=self.group.round)


class Exchange:
    """Members that send each other their parts: as long as it takes the slowest line, and for nobody without one.

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
        self._joined: list[tuple[SimulatedMember, Callable[[pb.Prepared | None], object]]] = []

    def join(self, member: SimulatedMember, answer: Callable[[pb.Prepared | None], object]) -> None:
        """One more member sends and waits for the others."""
        if self.is_over:
            # Somebody has died or left it. Of the former nobody hears; the latter has told all that were there.
            return
        self._joined.append((member, answer))
        if len(self._joined) == len(self.shares.members):
            self._timeline.after(self._seconds, self._done)

    def fail(self) -> None:
        """A member has given it up: all others notice."""
        if not self.is_over:
            self.is_over = True
            for _, answer in self._joined:
                answer(None)

    def _done(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        prepared = pb.Prepared(
            ballot=messages.pack_ballot(self._ballot), digest=self.shares.digest,
            member_ids=[share.peer_id for share in self.shares.members], num_samples=self.shares.round_samples,
        )  # fmt: skip
        for member, answer in self._joined:
            member.prepare(self.standing.round, self._ballot, prepared)
            answer(prepared)


class Attempt:
    """A leader's way from Begin to Commit or Abort, as in averaging/leader."""

    def __init__(
        self, stage: SimulatedStage, leader: SimulatedMember, standing: Standing, ballot: Ballot,
        members: Collection[PeerId],
    ) -> None:  # fmt: skip
        self._stage = stage
        self._leader = leader
        self._standing = standing
        self._ballot = ballot
        self._members = members
        self._begun: dict[PeerId, pb.BeginReply] = {}
        _Broadcast(
            stage, leader, members, lambda member, answer: answer(member.begin(standing, ballot)), self._when_begun
        )

    def _when_begun(self, replies: dict[PeerId, pb.BeginReply], silent: Collection[PeerId]) -> None:
        refusals = {peer_id: reply.refusal for peer_id, reply in replies.items() if reply.HasField("refusal")}
        if refusals or not self._leader.has_quorum(replies.keys()):
            self._fail(silent, refusals)
            return
        earlier = unfinished(replies)
        if earlier is not None:
            self._commit(earlier, [p for p, reply in replies.items() if reply.prepared.digest == earlier.digest])
            return
        num_samples = sum(reply.num_samples for reply in replies.values())
        if not self._stage.is_complete(self._standing.round, (), num_samples):
            self._fail(silent, void=True)
            return
        shares = divide(
            [
                Offer(
                    peer_id=peer_id, num_samples=reply.num_samples, round_samples=reply.num_samples, norm=1.0,
                    bytes_per_second=reply.bytes_per_second,
                )
                for peer_id, reply in sorted(replies.items())
            ],
            num_elements=self._stage.setting.payload_bytes, tile=1, clip_to_median=0.0,
        )  # fmt: skip
        seconds = exchange_seconds(shares, {p: reply.bytes_per_second for p, reply in replies.items()})
        exchange = Exchange(self._stage.timeline, self._standing, self._ballot, shares, seconds)
        _Broadcast(
            self._stage, self._leader, replies.keys(),
            lambda member, answer: member.join(self._ballot, exchange, answer), self._when_averaged, needs_all=True,
        )  # fmt: skip

    def _when_averaged(self, replies: dict[PeerId, pb.Prepared | None], silent: Collection[PeerId]) -> None:
        prepared = next(iter(replies.values()), None)
        if silent or prepared is None or None in replies.values():
            self._fail(silent)
        else:
            self._commit(prepared, replies.keys())

    def _commit(self, prepared: pb.Prepared, holders: Collection[PeerId]) -> None:
        outcome = pb.Outcome(round=self._standing.round, prepared=prepared)
        after = Standing(
            run_samples=self._standing.run_samples + prepared.num_samples, round=self._standing.round + 1,
            lineage=messages.lineage_after(self._standing.lineage, outcome),
        )  # fmt: skip

        def commit(member: SimulatedMember, answer: Callable[[bool], object]) -> None:
            member.commit(self._standing.round, prepared, after)
            answer(True)

        _Broadcast(
            self._stage, self._leader, holders, commit, lambda *_: self._leader.attempt_ended(self._standing)
        )  # fmt: skip

    def _fail(
        self, silent: Collection[PeerId], refusals: Mapping[PeerId, pb.Refusal] | None = None, *, void: bool = False
    ) -> None:  # fmt: skip
        def abort(member: SimulatedMember, answer: Callable[[bool], object]) -> None:
            member.abort(self._standing.round, self._ballot, void=void)
            answer(True)

        def then(_: dict[PeerId, bool], more: Collection[PeerId]) -> None:
            self._leader.attempt_failed(
                silent={*silent, *more}, refusals=refusals or {}, round_number=self._standing.round
            )

        _Broadcast(self._stage, self._leader, sorted(set(self._members) - set(silent)), abort, then)


class _Broadcast:
    """One call to many, as in averaging/broadcast: who is silent is not waited for."""

    def __init__(
        self, stage: SimulatedStage, leader: SimulatedMember, peers: Collection[PeerId],
        call: Callable[[SimulatedMember, Callable[[Any], object]], object],
        then: Callable[[dict[PeerId, Any], Collection[PeerId]], object], *, needs_all: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            needs_all: once somebody is silent, or an answer is None, the others get only a moment more.
        """
        self._stage = stage
        self._leader = leader
        self._then = then
        self._needs_all = needs_all
        self._pending = {peer_id: stage.members.get(peer_id) for peer_id in peers}
        self._replies: dict[PeerId, Any] = {}
        self._silent: set[PeerId] = set()
        self._since = stage.timeline.monotonic()
        self._is_over = self._is_ending = False
        for peer_id in peers:
            stage.send(leader, peer_id, lambda member: call(member, partial(self._answer, member)))
        stage.timeline.after(TIMING.heartbeat_seconds, self._watch)

    def _answer(self, member: SimulatedMember, reply: Any) -> None:
        self._stage.send(member, self._leader.peer_id, lambda _: self._answered(member.peer_id, reply))

    def _answered(self, peer_id: PeerId, reply: Any) -> None:
        if peer_id in self._pending:
            del self._pending[peer_id]
            self._replies[peer_id] = reply
            self._check(fails=reply is None)

    def _watch(self) -> None:
        if self._is_over or self._leader.is_gone:
            return
        self._stage.timeline.after(TIMING.heartbeat_seconds, self._watch)
        # Of one that is back already the connection broke.
        members = self._stage.members
        silent = {p for p, called in self._pending.items() if members.get(p, called) is not called}
        if self._stage.timeline.monotonic() - self._since >= TIMING.fresh_seconds:
            silent |= self._pending.keys() - self._leader.roster.alive()
        if silent:
            self._pending = {p: called for p, called in self._pending.items() if p not in silent}
            self._silent |= silent
            self._check(fails=True)

    def _check(self, *, fails: bool) -> None:
        if not self._pending:
            self._end()
        elif fails and self._needs_all and not self._is_ending:
            self._is_ending = True
            self._stage.timeline.after(TIMING.grace_seconds, self._end)

    def _end(self) -> None:
        if not self._is_over and not self._leader.is_gone:
            self._is_over = True
            self._then(self._replies, self._silent)


def exchange_seconds(shares: Shares, bytes_per_second: Mapping[PeerId, float]) -> float:
    """Until every member has sent all it has to: the others' parts of its own, and its part's result to all others."""
    others = len(shares.members) - 1
    return max(
        (shares.num_elements - share.num_elements + others * share.num_elements)
        / bytes_per_second[PeerId(share.peer_id)]
        for share in shares.members
    )


def _round_samples(setting: Setting, microbatch_size: int) -> int:
    wanted = setting.num_members * setting.round_seconds * SAMPLES_PER_SECOND
    return max(1, round(wanted / microbatch_size)) * microbatch_size
