"""Tells the leader how far this peer is, and acts on the answer: goes where the group is, or leaves a dead attempt.

Started by averaging/averager. A report holds everything, so one that is lost costs nothing. Where an answer comes from
another place in the run, all holders are asked before anything follows. Never leads.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from swarm.averaging import messages
from swarm.averaging.branches import Branches, voice_of
from swarm.averaging.catch_up import CatchUp
from swarm.averaging.group import Ballot, Refused
from swarm.averaging.messages import Standing
from swarm.averaging.participant import Participant, Spawn
from swarm.averaging.roster import Roster
from swarm.averaging.timing import Timing
from swarm.averaging.transport import REPORT, Caller, contact_of
from swarm.errors import PeerUnavailable, SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.training.round_member import Progress, RoundMember
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)


class Reporter:
    """One peer's reports, and what follows from them."""

    def __init__(
        self, *, own: PeerRecord, address: Address, member: RoundMember, roster: Roster, participant: Participant,
        branches: Branches, catch_up: CatchUp, call: Caller, is_connected: Callable[[PeerRecord], bool], clock: Clock,
        timing: Timing, spawn: Spawn, changed: Callable[[], None], suspect: Callable[[PeerId], None],
    ) -> None:  # fmt: skip
        self._own = own
        self._own_id = PeerId(own.peer_id)
        self._address = address
        self._member = member
        self._roster = roster
        self._participant = participant
        self._branches = branches
        self._catch_up = catch_up
        self._call = call
        self._is_connected = is_connected
        self._clock = clock
        self._timing = timing
        self._spawn = spawn
        self._changed = changed
        self._suspect = suspect
        self._progressed = asyncio.Event()
        self._version = 0
        self._under_way: set[PeerId] = set()
        self._nudges: set[PeerId] = set()
        self._connected: set[PeerId] = set()
        """As of the last turn."""
        self._looking: asyncio.Event | None = None
        """While all are asked where they stand, and what follows is done; set at its end."""
        self._look_at = -math.inf
        """Until then nobody is asked again because of those that are known to be elsewhere."""
        self._turn_at = clock.monotonic()
        """The last turn of `run`: nothing else here is as regular."""
        self._is_waking = False
        self.num_alive = 1
        """Members alive, as the last answer had it."""

    @property
    def may_be_behind(self) -> bool:
        """Whether the group may have gone on without this peer: it catches up, or was stopped and asks the others."""
        return self._participant.is_catching_up or self._is_waking or self._was_stopped()

    def notify(self) -> None:
        """There is something to report."""
        self._version += 1
        self._progressed.set()

    def nudge(self, peer_id: PeerId) -> None:
        """A peer is ahead: report to it, since its answer says how to get there."""
        self._nudges.add(peer_id)
        self._progressed.set()

    async def run(self) -> None:
        """Report on every change, yet not too often, and now and then without one."""
        last_heartbeat, last_progress = float("-inf"), None
        self._turn_at = self._clock.monotonic()
        while True:
            if self._was_stopped():
                # At once: what is begun before that task has its turn may be behind.
                self._is_waking = True
                self._spawn(self._wake())
            self._turn_at = self._clock.monotonic()
            if (progress := self._member.progress()) != last_progress:
                last_progress = progress
                self._changed()
            targets, self._nudges = self._nudges | {self._target()} | self._cut_off(), set()
            now = self._clock.monotonic()
            if now - last_heartbeat >= self._timing.heartbeat_seconds:
                last_heartbeat = now
                targets |= self._heartbeat_targets()
            # In the same order in every run: that of a set of strings changes from process to process.
            for peer_id in sorted(targets - {self._own_id} - self._under_way):
                self._spawn(self._report(peer_id))
            await self._clock.sleep(self._timing.report_gap_seconds)
            await wait(self._progressed, self._timing.heartbeat_seconds - self._timing.report_gap_seconds)
            self._progressed.clear()

    async def ask_all(self) -> None:
        """Report to every serving peer, and go where the group is."""
        async with asyncio.TaskGroup() as calls:
            for peer_id in sorted(self._roster.strangers(self._participant.standing)):
                calls.create_task(self._report(peer_id))

    def _was_stopped(self) -> bool:
        return self._clock.monotonic() - self._turn_at >= self._timing.late_seconds

    async def _wake(self) -> None:
        try:
            # Calls that were under way time out now, through no fault of those that were called.
            await self._clock.sleep(self._timing.report_gap_seconds)
            self._roster.forget()
            await self.ask_all()
        finally:
            self._is_waking = False

    def _target(self) -> PeerId:
        # Whoever is closed for an attempt stays with its leader, whoever else has turned up.
        active = self._participant.group.active
        return PeerId(active.leader_id) if active else self._roster.leader(self._participant.standing)

    def _heartbeat_targets(self) -> set[PeerId]:
        targets = set(self._roster.due_suspects())
        if self._target() == self._own_id:
            targets.update(self._roster.strangers(self._participant.standing))
        return targets

    def _cut_off(self) -> set[PeerId]:
        """Members to which the connection broke: whether they are still there shows as soon as they are called."""
        members = self._roster.members(self._participant.standing)
        connected = {p for p, record in self._roster.records(members).items() if self._is_connected(record)}
        cut_off, self._connected = (self._connected & members.keys()) - connected, connected
        return cut_off

    # -- one report --------------------------------------------------------------------------------------------------

    async def _report(self, peer_id: PeerId) -> None:
        peer, version = self._roster.record(peer_id), self._version
        progress, standing = self._member.progress(), self._participant.standing
        group = self._participant.group
        active = group.active
        if peer is None and active is not None and active.leader_id == peer_id:
            # How this attempt ends can be asked of nobody.
            await self._participant.step_back("the leader is not known", only=active)
        if peer is None or peer_id in self._under_way or progress.round != standing.round:
            return
        if self._participant.is_catching_up:
            # Who reports is a member, or is waited for.
            return
        is_leader = peer_id == self._target()
        timeout_seconds = self._timing.report_seconds if is_leader else self._timing.call_seconds
        self._under_way.add(peer_id)
        try:
            request = self._request(peer_id, standing, progress)
            reply = await self._tell(peer, request, timeout_seconds)
            await self._act_on(peer_id, standing, active, reply)
            if request.unanswered:
                # Now it is answered: the next report counts.
                self._progressed.set()
        except SwarmError as error:
            logger.debug("report to %s: %s", peer_id, error)
            self._suspect(peer_id)
            self._progressed.set()
            if active is not None and active == group.active and active.leader_id == peer_id:
                logger.warning("in doubt about round %d: its leader %s is gone", standing.round, peer_id)
                await self._participant.step_back("the leader is gone")
        finally:
            self._under_way.discard(peer_id)
            if version != self._version:
                self._progressed.set()

    def _request(self, peer_id: PeerId, standing: Standing, progress: Progress) -> pb.ReportRequest:
        prepared = self._participant.group.prepared
        return pb.ReportRequest(
            address=self._address, sender=contact_of(self._own), standing=messages.pack_standing(standing),
            num_samples=progress.num_samples, committed_gaps=messages.pack_indices(progress.committed),
            highest_microbatch=progress.highest_microbatch,
            prepared=messages.pack_ballot(prepared.ballot if prepared else None),
            unanswered=self._roster.is_suspected(peer_id),
        )  # fmt: skip

    async def _tell(self, peer: PeerRecord, request: pb.ReportRequest, timeout_seconds: float) -> pb.ReportReply:
        started_at = self._clock.monotonic()
        try:
            return await self._call(peer, REPORT, request, timeout_seconds=timeout_seconds)
        except PeerUnavailable as error:
            is_stale = messages.unpack_standing(request.standing) != self._participant.standing
            # Who was silent until the connection broke will not answer on another one.
            was_silent = self._clock.monotonic() - started_at >= self._timing.reconnect_seconds
            if error.is_gone or is_stale or was_silent or self._participant.is_catching_up:
                raise
            # A connection broke: whether there is still somebody shows when another one is made, at once or not.
            return await self._call(peer, REPORT, request, timeout_seconds=self._timing.reconnect_seconds)

    async def _act_on(self, peer_id: PeerId, standing: Standing, active: Ballot | None, reply: pb.ReportReply) -> None:
        theirs, leading = await self._take_in(peer_id, standing, reply)
        self.num_alive = reply.num_alive
        group = self._participant.group
        if active is not None and active == group.active and active.leader_id == peer_id and leading != active:
            await self._participant.step_back("the leader has given the attempt up")
        if standing != self._participant.standing:
            return
        if theirs == standing and (reply.counted_gaps or reply.num_samples):
            progress = Progress(
                round=theirs.round, lineage=theirs.lineage, run_samples=theirs.run_samples,
                num_samples=reply.num_samples,
                committed=self._roster.named(theirs.round, reply.committed_gaps), highest_microbatch=-1,
            )  # fmt: skip
            self._roster.heard_of_round(peer_id, progress, self._roster.named(theirs.round, reply.counted_gaps))
        if not self._branches.is_known(theirs):
            await self._look_around(peer_id)
        elif reply.leader.peer_id not in (self._own_id, peer_id):
            self._roster.learn(reply.leader)

    async def _take_in(
        self, peer_id: PeerId, standing: Standing, reply: pb.ReportReply
    ) -> tuple[Standing, Ballot | None]:
        """Where a peer stands, and what it leads; commits what this peer has prepared, if that was decided."""
        voice, leading = voice_of(reply), messages.unpack_ballot(reply.active)
        theirs = voice.standing
        self._branches.heard(peer_id, voice)
        # A leader in the middle of a commit stands where its members no longer do; one that is ahead is a donor.
        is_ahead = self._roster.is_ahead(theirs, self._participant.standing)
        self._roster.answered(peer_id, None if leading and not is_ahead else theirs)
        decided, prepared = reply.outcome.prepared.digest, self._participant.group.prepared
        if standing == self._participant.standing and decided and prepared and prepared.digest == decided:
            try:
                await self._participant.apply(reply.outcome)
            except Refused as refused:
                # Something it takes is not to be had any more: then the whole state is downloaded.
                logger.info("round %d cannot be committed here: %s", standing.round, refused)
        return theirs, leading

    # -- other places ------------------------------------------------------------------------------------------------

    async def _look_around(self, because_of: PeerId) -> None:
        """Ask all where they stand, and go where this peer should be; a second call waits for the first.

        Not at once again because of a peer of which it is settled that it is elsewhere.
        """
        if self._looking is not None:
            await self._looking.wait()
            return
        if self._branches.is_elsewhere(because_of) and self._clock.monotonic() < self._look_at:
            return
        looking = self._looking = asyncio.Event()
        try:
            before = self._participant.standing
            target = await self.choose()
            if before != self._participant.standing:
                return
            if target is not None:
                await self._catch_up.run(target)
                if before != self._participant.standing:
                    self.notify()
                return
            for refusal in self._branches.stay():
                logger.warning("%s", refusal)
            timing = self._timing
            rest_seconds = timing.heartbeat_seconds if self._branches.is_in_doubt else timing.max_retry_seconds
            self._look_at = self._clock.monotonic() + rest_seconds
        finally:
            self._looking = None
            looking.set()

    async def choose(self) -> Standing | None:
        """Ask all holders where they stand; gives where this peer should go, None if it should stay."""
        self._branches.listen()
        async with asyncio.TaskGroup() as calls:
            for peer in self._roster.holders():
                calls.create_task(self._ask(peer))
        return self._branches.choose(is_sound=self._participant.is_sound, announced=self._roster.standings_announced())

    async def _ask(self, peer: PeerRecord) -> None:
        peer_id, standing = PeerId(peer.peer_id), self._participant.standing
        request = self._request(peer_id, standing, self._member.progress())
        # Who only looks around is no member because of that.
        request.unanswered = True
        try:
            reply = await self._call(peer, REPORT, request, timeout_seconds=self._timing.call_seconds)
            await self._take_in(peer_id, standing, reply)
        except SwarmError as error:
            logger.debug("report to %s: %s", peer_id, error)
            self._suspect(peer_id)


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than that."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
