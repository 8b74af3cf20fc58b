"""Reports this peer's progress to the leader, and acts on the answer: it goes where the group is, or leaves an attempt
that was given up.

Each report is complete, so a lost one does no harm. If the peer that answers stands elsewhere in the run, all holders
are asked before this peer moves (catch_up). Never leads.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.branches import voice_of
from swarm.averaging.agreement.messages import Ballot, Refused, Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.own_round import OwnRound
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
    """Asks other peers where they stand, with a report of where this peer stands, and notes their answers. Reporter and
    catch_up decide what follows from an answer."""

    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    advance: Advance
    call: Caller
    _asked: set[PeerId] = field(default_factory=set, init=False)
    """The peers that served at the last call of `choose`."""

    def report(self, peer_id: PeerId) -> pb.ReportRequest:
        """What a member reports to a peer: where it stands, and what it has of the round. Reporter sends this to the
        leader after every change, such as an inner step, and with each heartbeat."""
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
            request = self.report(peer_id)
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


@dataclass(eq=False)
class Reporter:
    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    own_round: OwnRound
    survey: Survey
    look: Callable[[PeerId], Awaitable[None]]
    """Asks all holders where they stand because of one peer, and moves this peer; see CatchUp.look."""
    num_alive: int = field(default=1, init=False)
    """The number of living members, by the last answer."""
    _under_way: set[PeerId] = field(default_factory=set, init=False)
    _nudges: set[PeerId] = field(default_factory=set, init=False)
    _connected: set[PeerId] = field(default_factory=set, init=False)
    """The members to which there was a connection when `_cut_off` last looked."""
    _turn_at: float = field(init=False)
    """When the loop in `run` last ran. A gap shows that this process stood still."""
    _is_waking: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._turn_at = self.context.clock.monotonic()

    def may_be_behind(self) -> bool:
        """Whether the group may have gone on without this peer, because this peer catches up, or stood still for a
        while."""
        return self.place.is_catching_up or self._is_waking or self._was_stopped()

    def nudge(self, peer_id: PeerId) -> None:
        self._nudges.add(peer_id)
        self.context.changes.report_again()

    async def run(self) -> None:
        """Report every change, though not too often, and now and then without a change. Runs until cancelled."""
        clock, timing = self.context.clock, self.context.timing
        last_heartbeat, last_progress = -math.inf, None
        self._turn_at = clock.monotonic()
        while True:
            if self._was_stopped():
                # Set at once, because an attempt may begin before the spawned task runs.
                self._is_waking = True
                self.context.tasks.spawn(self._wake())
            self._turn_at = now = clock.monotonic()
            if (progress := self.member.progress()) != last_progress:
                last_progress = progress
                self.context.changes.progressed()
            targets, self._nudges = self._nudges | {self._target()} | self._cut_off(), set()
            if now - last_heartbeat >= timing.heartbeat_seconds:
                last_heartbeat = now
                targets |= self._heartbeat_targets()
            # Sorted, because the order of a set of strings changes from process to process.
            for peer_id in sorted(targets - {self.context.own_id} - self._under_way):
                self.context.tasks.spawn(self._report(peer_id))
            await clock.sleep(timing.report_gap_seconds)
            await self.context.changes.until_report_due(timing.heartbeat_seconds - timing.report_gap_seconds)

    async def ask_all(self) -> None:
        async with asyncio.TaskGroup() as calls:
            for peer_id in sorted(self.roster.strangers()):
                calls.create_task(self._report(peer_id))

    def _was_stopped(self) -> bool:
        return self.context.clock.monotonic() - self._turn_at >= self.context.timing.late_seconds

    async def _wake(self) -> None:
        try:
            # Calls that were under way time out now, though the called peers are not at fault.
            await self.context.clock.sleep(self.context.timing.report_gap_seconds)
            self.roster.forget()
            await self.ask_all()
        finally:
            self._is_waking = False

    def _target(self) -> PeerId:
        # A member whose contribution is closed for an attempt stays with that leader, even if a peer with a lower id
        # appears.
        active = self.place.group.active
        return PeerId(active.leader_id) if active else self.roster.leader()

    def _heartbeat_targets(self) -> set[PeerId]:
        targets = set(self.roster.due_suspects())
        if self._target() == self.context.own_id:
            targets.update(self.roster.strangers())
        return targets

    def _cut_off(self) -> set[PeerId]:
        """Members to which the connection broke. A call to each shows at once whether it is still there."""
        members = self.roster.members()
        records, is_connected = self.roster.contacts.records(members), self.context.transport.is_connected
        connected = {peer for peer, record in records.items() if is_connected(record)}
        cut_off, self._connected = (self._connected & members.keys()) - connected, connected
        return cut_off

    # -- one report --------------------------------------------------------------------------------------------------

    async def _report(self, peer_id: PeerId) -> None:
        peer, version = self.roster.contacts.record(peer_id), self.context.changes.version
        progress, standing = self.member.progress(), self.place.standing
        group = self.place.group
        active = group.active
        if peer is None and active is not None and active.leader_id == peer_id:
            # The leader's address is not known, so it cannot be asked how this attempt ends.
            await self.own_round.step_back("the leader is not known", only=active)
        if peer is None or peer_id in self._under_way or progress.round != standing.round:
            return
        if self.place.is_catching_up:
            # No report now: others would take this peer for a member, or wait for it.
            return
        is_leader = peer_id == self._target()
        timeout_seconds = self.context.timing.report_seconds if is_leader else self.context.timing.call_seconds
        self._under_way.add(peer_id)
        try:
            request = self.survey.report(peer_id)
            reply = await self.survey.tell(peer, request, timeout_seconds)
            await self._act_on(peer_id, standing, active, reply)
            if request.unanswered:
                # The peer has answered now, so it will count the next report.
                self.context.changes.report_again()
        except SwarmError as error:
            self.survey.lost(peer_id, error)
            self.context.changes.report_again()
            if active is not None and active == group.active and active.leader_id == peer_id:
                logger.warning("in doubt about round %d: its leader %s is gone", standing.round, peer_id)
                await self.own_round.step_back("the leader is gone")
        finally:
            self._under_way.discard(peer_id)
            if version != self.context.changes.version:
                self.context.changes.report_again()

    async def _act_on(self, peer_id: PeerId, standing: Standing, active: Ballot | None, reply: pb.ReportReply) -> None:
        theirs, leading = await self.survey.take_in(peer_id, standing, reply)
        self.num_alive = reply.num_alive
        group = self.place.group
        if active is not None and active == group.active and active.leader_id == peer_id and leading != active:
            await self.own_round.step_back("the leader has given the attempt up")
        if standing != self.place.standing:
            return
        if theirs == standing and (reply.counted_gaps or reply.num_samples):
            self.roster.heard_of_round(peer_id, theirs, reply)
        if not self.place.branches.is_known(theirs):
            await self.look(peer_id)
        elif reply.leader.peer_id not in (self.context.own_id, peer_id):
            self.roster.learn(reply.leader)
