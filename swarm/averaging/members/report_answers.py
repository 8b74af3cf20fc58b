"""What one peer answers to a report: where it stands itself, which peer leads, and what is known of the round.

Used by averaging/handlers; the other end is members/survey. It also notes what the report tells.
"""

import math

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


class ReportAnswers:
    """Answers the reports that reach one peer."""

    def __init__(
        self,
        context: Context,
        place: Place,
        member: RoundMember,
        roster: Roster,
        reporter: Reporter,
        watch: RoundWatch,
    ) -> None:
        self._context = context
        self._place = place
        self._member = member
        self._roster = roster
        self._reporter = reporter
        self._watch = watch
        self._told_round = -1
        self._told_at: dict[PeerId, float] = {}
        """When this peer last told each member, in `_told_round`, what all members have committed."""

    async def answer(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Take a report in and answer it. Raises NotReady while this peer catches up, and MalformedMessage."""
        if self._place.is_catching_up:
            # This peer neither leads nor takes part: a peer that takes it for the leader is to look for another one.
            raise NotReady("this peer is catching up")
        # A sender that gets no answers from this peer is not counted as a member: it would only hold up attempts.
        if not request.unanswered and self._roster.hear(request):
            self._context.changes.progressed()
        peer_id, standing = PeerId(request.sender.peer_id), self._place.standing
        theirs = messages.unpack_standing(request.standing)
        if not self._place.branches.is_known(theirs) and self._place.leads is None:
            self._reporter.nudge(peer_id)
        reply = pb.ReportReply(
            standing=messages.pack_standing(standing),
            active=messages.pack_ballot(self._place.leads),
            outcome=self._place.outcomes.get(theirs.round),
            leader=self._watch.leader_contact(),
            num_alive=len(self._roster.alive()),
        )
        if theirs != standing:
            reply.past.extend(self._place.branches.told)
        elif self._context.config.rounds.synchronous:
            self._tell_of_microbatches(peer_id, reply)
        else:
            own = self._member.progress()
            reply.num_samples = own.num_samples if own.round == standing.round else 0
        return reply

    def _tell_of_microbatches(self, peer_id: PeerId, reply: pb.ReportReply) -> None:
        """Add what is committed to the reply, if this peer leads: whichever member leads after it has to know."""
        view, now = self._watch.view(), self._context.clock.monotonic()
        if not view.is_leader:
            return
        if view.round != self._told_round:
            self._told_round, self._told_at = view.round, {}
        # This is told only now and then: a round may have thousands of microbatches, and each of them brings reports.
        heartbeat_seconds = self._context.timing.heartbeat_seconds
        if now - self._told_at.get(peer_id, -math.inf) >= heartbeat_seconds:
            latest = now - heartbeat_seconds
            self._told_at = {peer: at for peer, at in self._told_at.items() if at > latest} | {peer_id: now}
            reply.committed_gaps.extend(messages.pack_indices(self._member.progress().committed))
            reply.counted_gaps.extend(messages.pack_indices(view.counted))
