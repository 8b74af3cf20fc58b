"""One member of a simulated stage: it reports, leads, takes part and catches up, in virtual time.

Made by simulated_stage. The member's own real Roster decides which members take part, are silent, or have to catch up.
The functions that a real peer asks decide which member leads, when a round is complete, and whether it has a quorum.
The member does things in the order of averaging/members/reporter and averaging/leading/lead_loop.
"""

from collections import Counter
from collections.abc import Collection
from functools import partial

from swarm.averaging import messages
from swarm.averaging.leading.group import Ballot
from swarm.averaging.leading.rules import leader_of
from swarm.averaging.messages import Standing
from swarm.averaging.transport import contact_of
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.simulated_attempt import Failure, SimulatedAttempt
from swarm.simulation.simulated_participant import TIMING, Host, Network, SimulatedParticipant
from swarm.simulation.stage_rounds import StageRounds
from swarm.types import PeerId

QUIET_SECONDS = 3 * TIMING.fresh_seconds
"""Reports begin this long before a round can be complete: from earlier ones nothing would follow."""


class SimulatedMember(SimulatedParticipant):
    """One peer of the stage: reports, leads, takes part and catches up."""

    def __init__(self, network: "Network[SimulatedMember]", rounds: StageRounds, host: Host) -> None:
        super().__init__(
            network,
            host,
            standing=rounds.newest,
            last_members=rounds.newest_members,
            quorum=rounds.setting.quorum,
            committed=lambda after, members: rounds.committed(after, members, num_present=len(network.members)),
        )
        self.leads: Ballot | None = None
        """The attempt of its own that is under way."""
        self._network = network
        self._rounds = rounds
        self._timeline = network.timeline
        self._contact = contact_of(self.record)
        self._target = host.peer_id
        """The leader, as far as this member knows."""
        self._under_way: set[PeerId] = set()
        self._attempts: Counter[int] = Counter()
        self._num_failures = 0
        self._retries_at = 0.0

    def serve(self, after_seconds: float) -> None:
        """Begin to train, and to report after so long."""
        self._trains_since = self._timeline.monotonic()
        self._look_for_leader()
        self._timeline.after(after_seconds, self._beat)

    def make_known(self) -> None:
        """Tell all others where it is: it is new, or has caught up."""
        for other in self._network.members.values():
            if other is not self:
                other.learn_of(self)

    def learn_of(self, other: "SimulatedMember") -> None:
        """Another one has said where it is."""
        self.roster.answered(other.peer_id, other.standing)
        if leader_of((other.peer_id, self._target)) != self._target:
            self._look_for_leader()

    def _look_for_leader(self) -> None:
        self._target = self.roster.leader(self.standing)

    # -- reports, as in averaging/members/reporter ---------------------------------------------------------------------

    def _beat(self) -> None:
        if self.is_gone:
            return
        quiet = self._trains_since + self._rounds.setting.round_seconds - QUIET_SECONDS - self._timeline.monotonic()
        if quiet > 0 and self.standing == self._rounds.newest:
            # Each waits for its own line as well, or all would report at the same moment.
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
            sender=self._contact,
            standing=messages.pack_standing(self.standing),
            num_samples=self.num_samples,
            prepared=messages.pack_ballot(prepared.ballot if prepared else None),
        )
        active = self.group.active
        self._under_way.add(peer_id)

        def heard(other: SimulatedMember) -> None:
            standing, leads, is_there = other.hear(request), other.leads, not other.is_catching_up
            self._network.send(other, self.peer_id, lambda _: answered(standing, leads, is_there))

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

        self._network.send(self, peer_id, heard)
        self._timeline.after(patience_seconds, gave_up)

    def hear(self, request: pb.ReportRequest) -> Standing:
        """Take note of a report; answers where this member is."""
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
        self._timeline.after(self._rounds.setting.payload_bytes / self.host.bytes_per_second, self._caught_up)

    def _caught_up(self) -> None:
        if self.is_gone:
            return
        self.is_catching_up = False
        self.group.install(self._rounds.newest.round)
        self.move(self._rounds.newest, self._rounds.newest_members)
        self.make_known()

    def move(self, standing: Standing, members: Collection[str]) -> None:
        """Begin a round."""
        super().move(standing, members)
        self._num_failures = 0
        self._look_for_leader()

    # -- leading, as in averaging/leading/lead_loop --------------------------------------------------------------------

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
            self._rounds.is_complete(self.standing.round, (), num_samples)
            and not self.roster.overdue(self.standing)
            and not self.roster.awaits_members(self.standing)
        )
        present = sorted([*members, self.peer_id])
        if not (is_unfinished or is_ready):
            return
        self._rounds.due()
        if not self.has_quorum(present):
            return
        promised = self.group.promised
        number = max(self._attempts[self.standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({self.standing.round: number})
        self.leads = Ballot(number, self.peer_id)
        self._rounds.attempted()
        SimulatedAttempt(
            self._network,
            self,
            self.leads,
            present,
            is_complete=self._rounds.is_complete,
            payload_bytes=self._rounds.setting.payload_bytes,
            ended=partial(self._attempt_ended, self.standing),
            failed=partial(self._attempt_failed, self.standing.round),
        )

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
