"""The rounds of one stage in virtual time: members that come and go, report, lead and catch up.

Used by the study `averaging`. What a member promises, joins, prepares, commits and gives up is decided by the real
Group; who leads, who takes part, who is silent and who has to catch up by a real Roster for every member; who owns
which part by the real shares; when a round is complete, has a quorum or an unfinished result by the very functions that
a real averager asks. Simulated is what lies around them, in lead_loop, reporter, leader and participant: messages that
take a while, training at an even pace, an exchange as long as its slowest line, downloads. Who dies falls silent, its
machine with it: nobody is told.
"""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from swarm.averaging import messages
from swarm.averaging.group import Ballot
from swarm.averaging.messages import Standing
from swarm.averaging.rules import is_complete, leader_of
from swarm.averaging.transport import contact_of
from swarm.config import AveragingConfig, Quorum, RoundsConfig, RunConfig, StagesConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.attempt import Attempt, Failure
from swarm.simulation.participant import SAMPLES_PER_SECOND, TIMING, Host, Network, Participant
from swarm.simulation.rules.own_rule import LISTED_SECONDS
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId

LINE_SPREAD = 0.5
"""Standard deviation of the logarithm of a member's bandwidth: one in six is 1.6 times slower than usual, or faster."""
LINK_SECONDS = (0.02, 0.2)
"""Round trip to a member; drawn evenly."""
AWAY_SECONDS = 20.0
"""Mean time until a machine that died is back, with its key and nothing else."""
SNAPSHOT_FACTOR = 8
"""Who is back downloads so many times a contribution: anchor and momentum in 32 bits, for 8 bits of each parameter."""
QUIET_SECONDS = 3 * TIMING.fresh_seconds
"""Reports begin so long before a round can be complete: from earlier ones nothing would follow."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a stage is like."""

    num_members: int
    quorum: Quorum
    lifetime_seconds: float
    """Mean time until a member dies; infinite if none does."""
    round_seconds: float
    """Training until a round is complete, as long as nobody dies."""
    payload_bytes: int
    """Of a contribution on the wire."""
    bytes_per_second: float
    """Of a usual member's line, either way."""


@dataclass(frozen=True, kw_only=True)
class RoundEnd:
    """How a round came to its end."""

    num_attempts: int
    """That were begun, by whichever leader."""
    seconds: float
    """From the moment a leader would have ended it to the first member's commit."""
    took_part: float
    """The members of the exchange, as a share of all that were there."""


class SimulatedStage(Network["SimulatedMember"]):
    """All members, how they come and go, and what came of their rounds.

    Attributes:
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
        super().__init__(timeline)
        self.setting = setting
        self.is_complete = partial(is_complete, config)
        self.ends: list[RoundEnd] = []
        self.newest = Standing(run_samples=0, round=0, lineage="")
        self.newest_members: Collection[str] = ()
        self._rng = rng
        self._num_attempts = 0
        self._ending_since: float | None = None
        for _ in range(setting.num_members):
            host = Host(
                peer_id=PeerId(f"{rng.getrandbits(160):040x}"),
                bytes_per_second=setting.bytes_per_second * rng.lognormvariate(0.0, LINE_SPREAD),
                link_seconds=rng.uniform(*LINK_SECONDS),
            )
            self._serve(SimulatedMember(self, host))

    @property
    def ending_seconds(self) -> float:
        """How long the present round's end has lasted."""
        return 0.0 if self._ending_since is None else self.timeline.monotonic() - self._ending_since

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
        # Of them, some may have died since.
        took_part = min(1.0, len(member_ids) / len(self.members))
        end = RoundEnd(num_attempts=self._num_attempts, seconds=self.ending_seconds, took_part=took_part)
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
        if self.records.get(member.peer_id) is member.record:
            del self.records[member.peer_id]

    def _download(self, host: Host) -> None:
        """A newcomer becomes what the stage is now; what is committed meanwhile it makes up for afterwards."""
        member = SimulatedMember(self, host)
        seconds = SNAPSHOT_FACTOR * self.setting.payload_bytes / host.bytes_per_second
        self.timeline.after(seconds, lambda: self._serve(member))

    def _serve(self, member: "SimulatedMember") -> None:
        self.members[member.peer_id] = member
        self.records[member.peer_id] = member.record
        self.returned(member)
        member.serve(self._rng.random() * TIMING.heartbeat_seconds)
        if self.setting.lifetime_seconds < float("inf"):
            lifetime = self._rng.expovariate(1 / self.setting.lifetime_seconds)
            self.timeline.after(lifetime, lambda: self.kill(member))


class SimulatedMember(Participant):
    """One peer of the stage: reports, leads, takes part and catches up."""

    def __init__(self, stage: SimulatedStage, host: Host) -> None:
        super().__init__(
            stage, host, standing=stage.newest, last_members=stage.newest_members, quorum=stage.setting.quorum,
            committed=stage.committed,
        )  # fmt: skip
        self.leads: Ballot | None = None
        """The attempt of its own that is under way."""
        self._stage = stage
        self._timeline = stage.timeline
        self._contact = contact_of(self.record)
        self._target = host.peer_id
        """Who leads, as far as it knows."""
        self._under_way: set[PeerId] = set()
        self._attempts: Counter[int] = Counter()
        self._num_failures = 0
        self._retries_at = 0.0

    def serve(self, after_seconds: float) -> None:
        """Begin to train, and to report after so long."""
        self._trains_since = self._timeline.monotonic()
        self._look_for_leader()
        self._timeline.after(after_seconds, self._beat)

    def learn_of(self, other: "SimulatedMember") -> None:
        """Another one has said where it is."""
        self.roster.answered(other.peer_id, other.standing)
        if leader_of((other.peer_id, self._target)) != self._target:
            self._look_for_leader()

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
        if self.is_catching_up or peer_id in self._under_way:
            return
        prepared = self.group.prepared
        request = pb.ReportRequest(
            sender=self._contact, standing=messages.pack_standing(self.standing), num_samples=self.num_samples,
            prepared=messages.pack_ballot(prepared.ballot if prepared else None),
        )  # fmt: skip
        active = self.group.active
        self._under_way.add(peer_id)

        def heard(other: SimulatedMember) -> None:
            standing, leads, is_there = other._hear(request), other.leads, not other.is_catching_up
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
        if not self.is_catching_up:
            self.roster.hear(request)
        return self.standing

    def _act_on(self, peer_id: PeerId, active: Ballot | None, theirs: Standing, leads: Ballot | None) -> None:
        is_ahead = self.roster.is_ahead(theirs, self.standing)
        self.roster.answered(peer_id, None if leads and not is_ahead else theirs)
        if active is not None and active == self.group.active and active.leader_id == peer_id and leads != active:
            self.step_back()
        if is_ahead:
            self._catch_up()

    def _lost(self, peer_id: PeerId, active: Ballot | None) -> None:
        self.roster.suspect(peer_id)
        if active is not None and active == self.group.active and active.leader_id == peer_id:
            self.step_back()
        if peer_id == self._target:
            self._look_for_leader()

    def _catch_up(self) -> None:
        if self.is_catching_up or self.leads is not None:
            return
        self.is_catching_up = True
        self.step_back()
        self._timeline.after(self._stage.setting.payload_bytes / self.host.bytes_per_second, self._caught_up)

    def _caught_up(self) -> None:
        if self.is_gone:
            return
        self.is_catching_up = False
        self.group.install(self._stage.newest.round)
        self.move(self._stage.newest, self._stage.newest_members)
        self._stage.returned(self)

    def move(self, standing: Standing, members: Collection[str]) -> None:
        """Begin a round."""
        super().move(standing, members)
        self._num_failures = 0
        self._look_for_leader()

    # -- leading, as in averaging/lead_loop ---------------------------------------------------------------------------

    def _consider(self) -> None:
        """Begin an attempt if the round can be ended now."""
        if self.is_gone or self.is_catching_up or self.leads is not None or self.group.active is not None:
            return
        if self._timeline.monotonic() < self._retries_at:
            return
        if self.roster.leader(self.standing) != self.peer_id:
            self._look_for_leader()
            return
        members = self.roster.members(self.standing)
        num_samples = self.num_samples + sum(report.progress.num_samples for report in members.values())
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
        Attempt(
            self._stage, self, self.leads, present, is_complete=self._stage.is_complete,
            payload_bytes=self._stage.setting.payload_bytes, ended=partial(self._attempt_ended, self.standing),
            failed=partial(self._attempt_failed, self.standing.round),
        )  # fmt: skip

    def _attempt_failed(self, round_number: int, failure: Failure) -> None:
        self.leads = None
        for peer_id in failure.silent:
            self.roster.suspect(peer_id)
        for peer_id in failure.refusals:
            self.roster.forget_report(peer_id)
        refusals = failure.refusals.values()
        promised = max((refusal.promised.attempt for refusal in refusals), default=0)
        self._attempts[round_number] = max(self._attempts[round_number], promised)
        if any(refusal.round > self.standing.round for refusal in refusals):
            self._catch_up()
        self._num_failures += 1
        backoff = TIMING.retry_seconds * 2 ** (self._num_failures - 2) if self._num_failures > 1 else 0.0
        self._retries_at = self._timeline.monotonic() + min(TIMING.max_retry_seconds, backoff)
        self._timeline.at(self._retries_at, self._consider)

    def _attempt_ended(self, before: Standing) -> None:
        self.leads = None
        if self.standing == before:
            # It finished what it had no part in.
            self._catch_up()


def _round_samples(setting: Setting, microbatch_size: int) -> int:
    wanted = setting.num_members * setting.round_seconds * SAMPLES_PER_SECOND
    return max(1, round(wanted / microbatch_size)) * microbatch_size
