"""Asks other peers where they stand, with a report of where this peer stands, and notes their answers.

Reporter and catch_up decide what follows from an answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.branches import voice_of
from swarm.averaging.agreement.group import Ballot, Refused
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.roster import Roster
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import REPORT, Caller, contact_of
from swarm.errors import PeerUnavailable, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress, RoundMember
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Survey:
    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    advance: Advance
    call: Caller
    _asked: set[PeerId] = field(default_factory=set, init=False)
    """The peers that served at the last call of `choose`."""

    async def choose(self) -> Standing | None:
        """Ask all holders where they stand. Returns where this peer should go; None if it should stay."""
        branches, standing = self.place.branches, self.place.standing
        self._asked = set(self.roster.contacts.serving())
        branches.listen()
        await self._ask(self.roster.holders(), lambda peer_id, reply: self.take_in(peer_id, standing, reply))
        return branches.choose(is_sound=self.place.is_sound, announced=self.roster.contacts.standings_announced())

    async def look(self) -> dict[PeerId, Progress]:
        """Ask all peers that serve what they have of this peer's round, and whom they do not follow. Returns the
        progress of those that are at it. Nothing else follows from their answers."""
        standing = self.place.standing
        told: dict[PeerId, Progress] = {}

        async def note(peer_id: PeerId, reply: pb.ReportReply) -> None:
            self._hear(peer_id, reply)
            if messages.unpack_standing(reply.standing) == standing:
                told[peer_id] = self.roster.progress(standing, reply, -1)

        serving = self.roster.contacts.serving()
        asked = sorted(serving.keys() - self.roster.suspicions.suspected)
        await self._ask([serving[peer_id] for peer_id in asked], note)
        return told

    def has_newcomers(self) -> bool:
        """Whether peers have begun to serve since the last call of `choose`. Each peer counts once, so a peer that
        serves but holds nothing of use is asked only once."""
        return not self._asked.issuperset(self.roster.contacts.serving())

    def behind(self, target: Standing) -> list[PeerRecord]:
        return list(self.roster.contacts.records(sorted(self.place.branches.behind(target))).values())

    async def _ask(
        self, peers: Iterable[PeerRecord], note: Callable[[PeerId, pb.ReportReply], Awaitable[object]]
    ) -> None:
        """Ask all of these peers at once where they stand, and `note` their answers."""

        async def ask(peer: PeerRecord) -> None:
            peer_id = PeerId(peer.peer_id)
            request = self.request(peer_id)
            # So the peer that is asked does not take this one for a member.
            request.unanswered = True
            try:
                timeout_seconds = self.context.timing.call_seconds
                await note(peer_id, await self.call(peer, REPORT, request, timeout_seconds=timeout_seconds))
            except SwarmError as error:
                self.lost(peer_id, error)

        async with asyncio.TaskGroup() as calls:
            for peer in peers:
                calls.create_task(ask(peer))

    def request(self, peer_id: PeerId) -> pb.ReportRequest:
        """Make a report: where this peer stands, and what it has of the round."""
        progress, prepared = self.member.progress(), self.place.group.prepared
        return pb.ReportRequest(
            address=self.context.address,
            sender=contact_of(self.context.present),
            standing=messages.pack_standing(self.place.standing),
            num_samples=progress.num_samples,
            committed_gaps=messages.pack_indices(progress.committed),
            highest_microbatch=progress.highest_microbatch,
            prepared=messages.pack_ballot(prepared.ballot if prepared else None),
            unanswered=peer_id in self.roster.suspicions.suspected,
        )

    async def tell(self, peer: PeerRecord, request: pb.ReportRequest, timeout_seconds: float) -> pb.ReportReply:
        """Send a report, and send it again if the connection breaks. Raises what the peer or the transport raises."""
        clock, reconnect_seconds = self.context.clock, self.context.timing.reconnect_seconds
        started_at = clock.monotonic()
        try:
            return await self.call(peer, REPORT, request, timeout_seconds=timeout_seconds)
        except PeerUnavailable as error:
            is_stale = messages.unpack_standing(request.standing) != self.place.standing
            # If a peer was silent until the connection broke, it will not answer on a new connection.
            was_silent = clock.monotonic() - started_at >= reconnect_seconds
            if error.is_gone or is_stale or was_silent or self.place.is_catching_up:
                raise
            # A new connection shows at once whether the peer is still there.
            return await self.call(peer, REPORT, request, timeout_seconds=reconnect_seconds)

    async def take_in(
        self, peer_id: PeerId, standing: Standing, reply: pb.ReportReply
    ) -> tuple[Standing, Ballot | None]:
        """Note a peer's standing. If its answer says that this peer's prepared result was decided, commit that result.

        Args:
            standing: where this peer was when it asked.

        Returns:
            Where the other peer stands, and the attempt that it leads.
        """
        voice, leading = voice_of(reply), messages.unpack_ballot(reply.active)
        self._hear(peer_id, reply)
        theirs = voice.standing
        self.place.branches.heard(peer_id, voice)
        # In the middle of a commit a leader still stands at the old round, while its members may not. So its standing
        # is not noted, unless it is ahead of this peer and can give the state.
        is_ahead = self.roster.is_ahead(theirs, self.place.standing)
        self.roster.answered(peer_id, None if leading and not is_ahead else theirs)
        decided, prepared = reply.outcome.prepared.digest, self.place.group.prepared
        if standing == self.place.standing and decided and prepared and prepared.digest == decided:
            try:
                await self.advance.apply(reply.outcome)
            except Refused as refused:
                # Something that the commit needs is gone. The whole state will be downloaded instead.
                logger.info("round %d cannot be committed here: %s", standing.round, refused)
        return theirs, leading

    def _hear(self, peer_id: PeerId, reply: pb.ReportReply) -> None:
        self.roster.passed_over.hear(peer_id, messages.unpack_ids(reply.idle_leader_ids))

    def lost(self, peer_id: PeerId, error: SwarmError) -> None:
        logger.debug("report to %s: %s", peer_id, error)
        self.roster.suspect(peer_id)
        self.context.changes.signal()  # Other parts need not wait for that peer any more.
