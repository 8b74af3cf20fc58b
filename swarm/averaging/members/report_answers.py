"""How one peer answers a report: with its own standing, the leader, and what is known of the round.

Used by averaging/handlers; the other end is members/survey. The report's contents are noted in the roster.
"""

import math
from dataclasses import dataclass, field

from swarm.averaging import messages
from swarm.averaging.context import Context
from swarm.averaging.leading.watch import RoundWatch
from swarm.averaging.members.reporter import Reporter
from swarm.averaging.members.roster import Roster
from swarm.averaging.place import Place
from swarm.errors import NotReady
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember
from swarm.types import PeerId


@dataclass(eq=False)
class ReportAnswers:
    """Answers the reports that reach one peer."""

    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    reporter: Reporter
    watch: RoundWatch
    _told_round: int = field(default=-1, init=False)
    _told_at: dict[PeerId, float] = field(default_factory=dict, init=False)
    """When this peer, in `_told_round`, last sent to each member what all members have committed."""

    async def answer(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Take a report in and answer it. Raises NotReady while this peer catches up, and MalformedMessage."""
        if self.place.is_catching_up:
            # This peer neither leads nor takes part. A peer that takes it for the leader must look for another one.
            raise NotReady("this peer is catching up")
        # A sender that gets no answers from this peer does not count as a member, because it would only hold up
        # attempts.
        if not request.unanswered and self.roster.hear(request):
            self.context.changes.progressed()
        peer_id, standing = PeerId(request.sender.peer_id), self.place.standing
        theirs = messages.unpack_standing(request.standing)
        # A peer on another branch never leads here, and is not asked again. If it has come to this branch since, only
        # its reports say so.
        self.place.branches.reported(peer_id, theirs)
        if not self.place.branches.is_known(theirs) and self.place.leads is None:
            self.reporter.nudge(peer_id)
        reply = pb.ReportReply(
            standing=messages.pack_standing(standing),
            active=messages.pack_ballot(self.place.leads),
            outcome=self.place.outcomes.get(theirs.round),
            leader=self.watch.leader_contact(),
            num_alive=len(self.roster.alive()),
        )
        if theirs != standing:
            reply.past.extend(self.place.branches.told)
        elif self.context.config.rounds.synchronous:
            self._tell_of_microbatches(peer_id, reply)
        else:
            own = self.member.progress()
            reply.num_samples = own.num_samples if own.round == standing.round else 0
        return reply

    def _tell_of_microbatches(self, peer_id: PeerId, reply: pb.ReportReply) -> None:
        """If this peer leads, add to the reply what all members have committed: the next leader needs to know it."""
        view, now = self.watch.view(), self.context.clock.monotonic()
        if not view.is_leader:
            return
        if view.round != self._told_round:
            self._told_round, self._told_at = view.round, {}
        # Sent only now and then, because a round may have thousands of microbatches, and each of them causes reports.
        heartbeat_seconds = self.context.timing.heartbeat_seconds
        if now - self._told_at.get(peer_id, -math.inf) >= heartbeat_seconds:
            latest = now - heartbeat_seconds
            self._told_at = {peer: at for peer, at in self._told_at.items() if at > latest} | {peer_id: now}
            reply.committed_gaps.extend(messages.pack_indices(self.member.progress().committed))
            reply.counted_gaps.extend(messages.pack_indices(view.counted))
