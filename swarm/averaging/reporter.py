"""Reports this peer's progress to the leader, and acts on the answer: it goes where the group is, or leaves an attempt
that was given up.

Each report is complete, so a lost one does no harm. If the peer that answers stands elsewhere in the run, all holders
are asked before this peer moves (catch_up). Never leads.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field

from swarm.averaging.agreement.group import Ballot
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.place import Place
from swarm.averaging.catch_up import CatchUp
from swarm.averaging.own_round import OwnRound
from swarm.averaging.roster import Roster
from swarm.averaging.survey import Survey
from swarm.averaging.wire.context import Context
from swarm.errors import SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember
from swarm.types import PeerId

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Reporter:
    context: Context
    place: Place
    member: RoundMember
    roster: Roster
    own_round: OwnRound
    survey: Survey
    catch_up: CatchUp
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

    @property
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
            for peer_id in sorted(self.roster.strangers(self.place.standing)):
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
        return PeerId(active.leader_id) if active else self.roster.leader(self.place.standing)

    def _heartbeat_targets(self) -> set[PeerId]:
        targets = set(self.roster.due_suspects())
        if self._target() == self.context.own_id:
            targets.update(self.roster.strangers(self.place.standing))
        return targets

    def _cut_off(self) -> set[PeerId]:
        """Members to which the connection broke. A call to each shows at once whether it is still there."""
        members = self.roster.members(self.place.standing)
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
            request = self.survey.request(peer_id)
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
            await self.catch_up.look(peer_id)
        elif reply.leader.peer_id not in (self.context.own_id, peer_id):
            self.roster.learn(reply.leader)
