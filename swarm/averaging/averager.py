"""LOOP 3: keeps one stage's peers at the same weights, round by round.

Started by the stage peer's program. Three things go on at once: this peer reports its progress to the peer
that it believes leads; when that is itself, it watches the reports and leads the attempts; and when it finds
itself behind, it downloads. Never touches weights: the stage does, when it is told to.
"""

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

from swarm.averaging import messages
from swarm.averaging.advance import Advance
from swarm.averaging.barrier import Barrier
from swarm.averaging.branches import Branches
from swarm.averaging.broadcast import Broadcast
from swarm.averaging.calls import Calls
from swarm.averaging.catch_up import CatchUp
from swarm.averaging.changes import Changes, wait
from swarm.averaging.completion import Completion
from swarm.averaging.context import Context, Tasks
from swarm.averaging.donor import Donor
from swarm.averaging.entry import Entry
from swarm.averaging.group import Ballot
from swarm.averaging.leader import AttemptFailed, Leader
from swarm.averaging.own_round import OwnRound
from swarm.averaging.participant import Participant
from swarm.averaging.place import KEPT_OUTCOMES, Place
from swarm.averaging.quorum import has_quorum
from swarm.averaging.reduction import Payload
from swarm.averaging.reporter import Reporter
from swarm.averaging.roster import Roster
from swarm.averaging.shared import SharedBlocks
from swarm.averaging.state_transfer import StateTransfer
from swarm.averaging.survey import Survey
from swarm.averaging.timing import Timing
from swarm.averaging.transport import BARRIER, Method, Reply, Request, Transport, contact_of, record_of
from swarm.averaging.view import AveragingStatistics, GroupView
from swarm.compression.codec import Buffer
from swarm.config import RunConfig
from swarm.errors import NotReady, SwarmError
from swarm.events.kinds import Events, NoEvents
from swarm.machine.clock import Clock
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.rpc.address import check_address
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.training.round_member import RoundMember
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

_REST_PER_LOOK = 4.0
"""Seconds between two looks at the round, for each second that one takes: that is for the event loop's other work."""


class Averager:
    """One peer's part in its stage's rounds."""

    def __init__(
        self, *, config: RunConfig, own: PeerRecord, member: RoundMember,
        peers: Callable[[int], Sequence[PeerRecord]], transport: Transport, clock: Clock, timing: Timing | None = None,
        events: Events | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            own: this peer's record; stage, endpoint and certificate are used.
            peers: the directory's last known view of a stage.
        """
        context = Context(
            config=config, own=own, peers=peers, transport=transport, clock=clock, timing=timing or Timing(),
            events=events or NoEvents(), tasks=Tasks(),
        )  # fmt: skip
        self._context = context
        self._config = config
        self._member = member
        self._clock = clock
        self._timing = context.timing
        self._changes = changes = Changes(clock)
        self._is_complete = Completion(config=config, stage=own.stage, peers=peers, is_awaited=self._is_awaited)
        self._waits_for_quorum = False
        self._awaited_round, self._awaited_since = -1, clock.monotonic()
        """Another stage has decided it, and waits for this one; since when, as far as it asked here."""
        self._attempts: Counter[int] = Counter()
        self._aborted: Counter[str] = Counter()
        self._num_attempts = 0
        self._told_at: dict[PeerId, float] = {}
        """When members heard last what all of them have committed."""
        self._told_round = -1
        standing = messages.standing_of(member.progress())
        branches = Branches(
            standing, clock=clock, more_samples_win=config.averaging.quorum == "available",
            patience_seconds=context.timing.fresh_seconds, run_round=partial(_run_round, context),
        )  # fmt: skip
        self._place = place = Place(
            standing, branches, num_kept=max(KEPT_OUTCOMES, config.averaging.num_fragments)
        )  # fmt: skip
        self._roster = roster = Roster(
            own=own, directory=partial(peers, own.stage), clock=clock, timing=context.timing,
            branches_yield=config.averaging.quorum == "available",
            round_microbatches=config.microbatches_per_round if config.rounds.synchronous else None,
            is_elsewhere=branches.is_elsewhere,
        )  # fmt: skip
        self._donor = Donor(place, member, clock)
        self._shared = SharedBlocks(
            config=config, stage=own.stage, own_id=context.own_id, transport=transport, peers=peers, clock=clock,
            timing=context.timing,
        )  # fmt: skip
        self._own_round = own_round = OwnRound(context, place, member)
        advance = Advance(
            context, place, member, own_round, shared=self._shared, donor=self._donor, roster=roster, changes=changes
        )
        self._participant = participant = Participant(context, place, own_round, advance, self._shared)
        self._call = Calls(context, roster, participant, changes)
        self._survey = Survey(context, place, member, roster=roster, advance=advance, call=self._call, changes=changes)
        transfer = StateTransfer(
            transport, address=context.address, own_id=context.own_id, silence_seconds=context.timing.silence_seconds
        )
        self._catch_up = CatchUp(
            context, place, own_round=own_round, advance=advance, transfer=transfer, roster=roster,
            survey=self._survey, entry=Entry(context, member),
        )  # fmt: skip
        self._reporter = Reporter(
            context, place, member, roster=roster, own_round=own_round, survey=self._survey,
            catch_up=self._catch_up, changes=changes,
        )  # fmt: skip
        self._leader = Leader(
            config=config, own_id=context.own_id, address=context.address,
            broadcast=Broadcast(call=self._call, is_silent=roster.is_silent, timing=context.timing),
            barrier=Barrier(context, place, call=self._call), shared=self._shared, is_complete=self._is_complete,
            absent_samples=self._absent_samples, has_quorum=self._has_quorum, decided=changes.signal, clock=clock,
            timing=context.timing,
        )  # fmt: skip
        self._handlers: dict[str, Callable[[Any], Any]] = {
            "Report": self._report_handler, "Begin": participant.begin, "Average": participant.average,
            "Commit": participant.commit, "Abort": participant.abort, "Barrier": self._barrier_handler,
        }  # fmt: skip

    # -- for the stage peer ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled. Leaving needs no farewell: the others go on without this peer."""
        tasks = self._context.tasks
        async with tasks.running():
            tasks.spawn(self._reporter.run())
            tasks.spawn(self._lead_loop())

    def notify(self) -> None:
        """The stage's progress changed."""
        self._changes.notify()

    async def join(self) -> None:
        """Ask every known peer where the run is, and download its state if this peer is behind; needs `run`."""
        await self._reporter.ask_all()

    def view(self) -> GroupView:
        """The round as this peer knows it."""
        own = self._member.progress()
        standing = self._place.standing
        leader_id = self._context.own_id if self._leader.active else self._roster.leader(standing)
        is_own_round = own.round == standing.round
        progress = {self._context.own_id: own} if is_own_round and not self._roster.excludes_self else {}
        progress |= {peer: report.progress for peer, report in self._roster.members(standing).items()}
        overdue = self._overdue()
        committed = frozenset[int]().union(*(p.committed for p in progress.values()))
        shown = frozenset[int]().union(*(p.committed for peer, p in progress.items() if peer not in overdue))
        num_samples = sum(p.num_samples for p in progress.values())
        decision = self._leader.decision
        is_decided = decision is not None and decision.round == standing.round
        if is_decided and self._config.rounds.synchronous:
            # Whoever has left since: what is decided holds all of the round's microbatches, and none is missing.
            size = self._config.microbatches_per_round
            committed = shown = committed | frozenset(range(standing.round * size, (standing.round + 1) * size))
        return GroupView(
            round=standing.round, leader_id=leader_id, is_leader=leader_id == self._context.own_id, progress=progress,
            committed=committed, shown=shown,
            # Also what this peer has while it is left out: it may be back with that before the round ends.
            counted=self._roster.counted | committed | (own.committed if is_own_round else frozenset()),
            lost=self._roster.lost - committed,
            complete=self._is_complete(
                standing.round, committed, num_samples, self._absent_samples(progress.keys())
            ),
            highest_microbatch=max([own.highest_microbatch, *(p.highest_microbatch for p in progress.values())]),
            quiet_seconds=self._changes.quiet_seconds,
        )  # fmt: skip

    def _absent_samples(self, present: Collection[PeerId]) -> int:
        """Samples of the round at living members, this peer included, that are not `present`.

        None in the synchronous setting, where others have the microbatches of an absent one replayed.
        """
        if self._config.rounds.synchronous:
            return 0
        standing, own = self._place.standing, self._member.progress()
        others = self._roster.absent_samples(standing, present)
        if (
            self._context.own_id in present
            or own.round != standing.round
            or self._roster.has_failed_for_good(self._context.own_id)
        ):
            return others
        return others + own.num_samples

    def _overdue(self) -> Set[PeerId]:
        # Who was stopped itself has heard of nobody, and during an attempt nothing can be added to a round.
        is_of_use = not self._reporter.may_be_behind and self._leader.active is None
        return self._roster.overdue(self._place.standing) if is_of_use else frozenset()

    @property
    def is_behind(self) -> bool:
        """Whether the group is at a later round, and its state is being had."""
        return self._place.is_catching_up

    def misses_member(self) -> bool:
        """See Roster.misses_member."""
        return self._roster.misses_member(self._place.standing)

    def awaits_reports(self) -> bool:
        """Whether a serving peer, alive as far as this one knows, has not told yet what it has of the round."""
        return self._roster.awaits_reports(self._place.standing)

    async def changed(self, seconds: float) -> None:
        """Wait until the view, or the state of a round, may have changed, but no longer than `seconds`."""
        await wait(self._changes.next, seconds)

    def statistics(self) -> AveragingStatistics:
        """A reading of the counters."""
        last = self._place.outcomes.get(self._place.standing.round - 1)
        return AveragingStatistics(
            num_attempts=self._num_attempts, aborted=dict(self._aborted),
            exchange_seconds=self._leader.times.total_exchange_seconds,
            barrier_seconds=self._leader.times.total_barrier_seconds, num_downloads=self._catch_up.num_downloads,
            num_members=len(last.prepared.member_ids) if last else 0,
            num_alive=max(self._reporter.num_alive, len(self._roster.alive())), refusals=self._place.branches.refusals,
        )  # fmt: skip

    # -- leading -----------------------------------------------------------------------------------------------------

    async def _lead_loop(self) -> None:
        num_failures = 0
        await wait(self._changes.next, self._timing.heartbeat_seconds)
        while True:
            changed, looked_at = self._changes.next, self._clock.monotonic()
            if not self._should_attempt():
                # A large group's reports come faster than all of them can be looked at.
                rest_seconds = _REST_PER_LOOK * (self._clock.monotonic() - looked_at)
                await self._clock.sleep(min(self._timing.heartbeat_seconds, rest_seconds))
                await wait(changed, self._timing.heartbeat_seconds)
                self._donor.expire()
            elif await self._attempt():
                num_failures = 0
            else:
                num_failures += 1
                backoff = self._timing.retry_seconds * 2 ** (num_failures - 2) if num_failures > 1 else 0.0
                await self._clock.sleep(min(self._timing.max_retry_seconds, backoff))

    def _should_attempt(self) -> bool:
        view = self.view()
        group = self._place.group
        if not view.is_leader or self._reporter.may_be_behind or group.active is not None:
            return False
        if self._place.branches.is_in_doubt:
            # If it is this peer that was left behind, it would commit another result of a round that is over.
            return False
        members = self._roster.members(self._place.standing)
        unfinished = group.prepared is not None or any(report.prepared for report in members.values())
        # To begin without a sign of life of some member would hold up the replays of what it has.
        is_ready = view.complete and not self._overdue() and not self._roster.awaits_members(self._place.standing)
        if not (unfinished or is_ready):
            return False
        present = self._has_quorum(view.progress.keys())
        if not present and not self._waits_for_quorum:
            logger.warning("round %d waits for a majority of the last round's members", view.round)
        self._waits_for_quorum = not present
        return present

    async def _attempt(self) -> bool:
        standing = self._place.standing
        promised = self._place.group.promised
        number = max(self._attempts[standing.round], promised.attempt if promised else 0) + 1
        self._attempts = Counter({standing.round: number})
        self._num_attempts += 1
        members = self._roster.records(self.view().progress)
        if not self._roster.excludes_self:
            members[self._context.own_id] = self._context.own
        ballot = Ballot(number, self._context.own_id)
        try:
            await self._leader.attempt(members, standing, number)
            # A result may be decided and not be committed here: the next attempt finishes what is prepared.
            await self._own_round.step_back("it was decided, and not committed here", only=ballot)
            if self._place.standing != standing:
                for peer_id in members.keys() - set(self._place.last_members):
                    self._roster.failed(peer_id)
        except AttemptFailed as failed:
            logger.info("attempt %d at round %d failed: %s", number, standing.round, failed)
            self._aborted[str(failed)] += 1
            self._attempts[standing.round] = max(number, failed.promised_attempt)
            for peer_id in failed.unreachable:
                self._roster.suspect(peer_id)
            for peer_id in failed.excluded:
                self._roster.exclude(peer_id)
            for peer_id in failed.refused:
                self._roster.forget_report(peer_id)
            self._changes.signal()
            if failed.refused:
                # They may be at a later round: without asking, this peer would go on alone.
                await self._reporter.ask_all()
            return False
        except SwarmError as error:
            # As where no holder of another stage's average of a shared block answers: it may decide anew.
            logger.warning("round %d cannot be committed yet: %s", standing.round, error)
            await self._own_round.step_back("what it takes to commit cannot be had", only=ballot)
            return False
        finally:
            self._changes.notify()
        return self._place.standing != standing

    @property
    def last_members(self) -> Collection[str]:
        """Ids of those who took part in the round before; empty where this peer does not know them."""
        return self._place.last_members

    def _has_quorum(self, present: Collection[str]) -> bool:
        return has_quorum(
            self._config.averaging.quorum, present, last_members=self._place.last_members,
            announced=lambda: {self._context.own_id, *self._roster.announced()},
        )  # fmt: skip

    # -- for other peers ---------------------------------------------------------------------------------------------

    async def handle(self, method: Method[Request, Reply], request: Request) -> Reply:
        """Answer a call. Raises WrongRun, IncompatibleVersion, WrongStage, NotReady, MalformedMessage."""
        message: Any = request
        self._check(message.address)
        with self._ends_without_memory():
            reply: Reply = await self._handlers[method.name](request)
        self._changes.signal()
        return reply

    async def exchange(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        """Answer as the owner of a part; see Participant.exchange."""
        self._check(opening.address)
        with self._ends_without_memory():
            return await self._participant.exchange(opening, pieces)

    async def download(self, request: pb.DownloadRequest) -> AsyncIterator[pb.DownloadReply]:
        """Answer a peer that is behind; see Donor.serve."""
        self._check(request.address)
        async for reply in self._donor.serve(request):
            yield reply

    async def shared(self, request: pb.SharedRequest) -> Buffer:
        """Give another stage this one's average of the blocks that both hold. Raises NotReady."""
        self._check(request.address)
        return self._shared.answer(request)

    async def _report_handler(self, request: pb.ReportRequest) -> pb.ReportReply:
        if self._place.is_catching_up:
            # Neither a leader nor a member: whoever believes so is to look for another.
            raise NotReady("this peer is catching up")
        # Who hears nothing of this peer would only hold up what it leads.
        if not request.unanswered and self._roster.hear(request):
            self._changes.progressed()
        standing, theirs = self._place.standing, messages.unpack_standing(request.standing)
        if not self._place.branches.is_known(theirs) and self._leader.active is None:
            self._reporter.nudge(PeerId(request.sender.peer_id))
        reply = pb.ReportReply(
            standing=messages.pack_standing(standing), active=messages.pack_ballot(self._leader.active),
            outcome=self._place.outcomes.get(theirs.round), leader=self._leader_contact(),
            num_alive=len(self._roster.alive()),
        )  # fmt: skip
        if theirs != standing:
            reply.past.extend(self._place.branches.told)
        else:
            self._tell_of_round(PeerId(request.sender.peer_id), reply)
        return reply

    def _tell_of_round(self, peer_id: PeerId, reply: pb.ReportReply) -> None:
        if not self._config.rounds.synchronous:
            own = self._member.progress()
            reply.num_samples = own.num_samples if own.round == reply.standing.round else 0
            return
        view, now = self.view(), self._clock.monotonic()
        if not view.is_leader:
            return
        if view.round != self._told_round:
            self._told_round, self._told_at = view.round, {}
        # Now and then: there may be thousands of microbatches in a round, and reports come with each of them.
        if now - self._told_at.get(peer_id, -math.inf) >= self._timing.heartbeat_seconds:
            latest = now - self._timing.heartbeat_seconds
            self._told_at = {peer: at for peer, at in self._told_at.items() if at > latest} | {peer_id: now}
            reply.committed_gaps.extend(messages.pack_indices(self._member.progress().committed))
            reply.counted_gaps.extend(messages.pack_indices(view.counted))

    async def _barrier_handler(self, request: pb.BarrierRequest) -> pb.BarrierReply:
        deadline = self._clock.monotonic() + min(request.wait_seconds, self._timing.barrier_seconds)
        is_shared = bool(self._shared.partners(request.round))
        if is_shared and request.round == self._place.standing.round != self._awaited_round:
            self._awaited_round, self._awaited_since = request.round, self._clock.monotonic()
        while True:
            outcome, decision = self._place.outcomes.get(request.round), self._leader.decision
            if outcome is not None:
                norm, digest = outcome.stage_squared_norm, outcome.prepared.digest
                return pb.BarrierReply(
                    ready=True, squared_norm=norm, digest=digest, leader=contact_of(self._context.own)
                )
            if decision is not None and decision.round == request.round:
                norm, digest = decision.squared_norm, decision.prepared.digest
                return pb.BarrierReply(
                    ready=True, squared_norm=norm, digest=digest, leader=contact_of(self._context.own)
                )
            leader, remaining = self._leader_contact(), deadline - self._clock.monotonic()
            if leader.peer_id != self._context.own_id and request.relay:
                return await self._ask_leader(leader, request.round, remaining)
            if leader.peer_id != self._context.own_id or remaining <= 0:
                return pb.BarrierReply(leader=leader)
            await wait(self._changes.next, remaining)

    def _is_awaited(self, round_number: int) -> bool:
        waited_seconds = self._clock.monotonic() - self._awaited_since
        return round_number == self._awaited_round and waited_seconds >= self._timing.awaited_seconds

    async def _ask_leader(self, leader: pb.Contact, round_number: int, seconds: float) -> pb.BarrierReply:
        request = pb.BarrierRequest(
            address=self._context.address,
            peer_id=self._context.own_id,
            round=round_number,
            wait_seconds=max(0.0, seconds),
        )
        try:
            timeout_seconds = request.wait_seconds + self._timing.report_seconds
            return await self._call(
                record_of(leader, self._context.own.stage), BARRIER, request, timeout_seconds=timeout_seconds
            )  # fmt: skip
        except SwarmError as error:
            logger.debug("nor does this peer get through to its leader: %s", error)
            return pb.BarrierReply(leader=leader)

    def _leader_contact(self) -> pb.Contact:
        leader = None if self._leader.active else self._roster.record(self._roster.leader(self._place.standing))
        return contact_of(leader or self._context.own)

    # -- helpers -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _ends_without_memory(self) -> Iterator[None]:
        """Have `run` raise what is raised inside for want of memory: this peer would be left out round after round, and
        whatever it computes would count for nobody."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self._context.tasks.spawn(_raise(error))
            raise

    def _check(self, address: Address) -> None:
        check_address(address, run_id=self._config.run_id, stage=self._context.own.stage)
        self._context.tasks.require_running()


async def _raise(error: Exception) -> None:
    raise error


def _run_round(context: Context) -> int | None:
    """Synchronous: a round that at least half of the other stages' peers have reached, as they say."""
    stages = set(range(context.config.stages.num_stages)) - {context.own.stage}
    rounds = sorted(record.round for stage in stages for record in context.peers(stage))
    return rounds[len(rounds) // 2] if rounds and context.config.rounds.synchronous else None
